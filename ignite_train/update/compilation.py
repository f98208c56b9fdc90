"""What is compiled: a model in place, as `torch.nn.Module.compile` does, its backward with it, or a whole update."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ignite_train.arguments import describe
from ignite_train.model.compiled_step import is_lost
from ignite_train.ranks.reduction import NoReduction, Reduction
from ignite_train.ranks.wrapping import unwrap
from ignite_train.update.options import UpdateOptions

__all__ = ["Backward", "Compile", "compile_in_place", "of_model", "of_update", "why_no_graph"]

Backward = Callable[..., None]
"""Runs backward from a loss; takes the arguments of `torch.autograd.backward`."""

Compile = bool | Literal["update"] | Mapping[str, Any]
"""Whether to compile; options of `torch.compile`, such as `{"mode": "reduce-overhead"}`, mean yes. `"update"` compiles whole
updates, and so does `{"update": True}` beside such options."""

ModelOptions = bool | Mapping[str, Any]
"""The same without whole updates."""

_WHOLE = "update"
_ON_CPU = {
    "cpp_wrapper": True,
    # Convolutions keep the memory format of what they are given. To bring weights to another one, and gradients back, in each
    # update makes a graph twice as slow.
    "layout_optimization": False,
}


def of_update(options: Compile, device: torch.device) -> dict[str, Any] | None:
    """The arguments of `torch.compile` for whole updates; None where these are not to be compiled.

    Where none are given, Python's part of a call is left out too: on the CPU by inductor's wrapper in C++, on CUDA by CUDA
    graphs.

    Args:
        options: see `Compile`.
        device: of the model.

    Raises:
        TypeError: the options are none of what `Compile` allows.
        ValueError: `"update"` among them is not True.
    """
    if isinstance(options, Mapping):
        if _WHOLE not in options:
            return None
        if options[_WHOLE] is not True:
            raise ValueError(
                f"compile['update'] must be True, got {options[_WHOLE]!r}; leave it out to compile the model alone"
            )
        given = {name: value for name, value in options.items() if name != _WHOLE}
    elif options == _WHOLE:
        given = {}
    elif isinstance(options, bool):
        return None
    else:
        raise TypeError(f"compile must be a bool or a mapping of torch.compile's options, or 'update', got {describe(options)}")
    if given:
        return given
    return {"mode": "reduce-overhead"} if device.type == "cuda" else {"options": {**_ON_CPU}}


def of_model(options: Compile, model: nn.Module) -> ModelOptions:
    """How the model alone is compiled, for evaluation and for updates that are not a graph.

    Where whole updates are compiled it is left as it is if torch would leave it so; see `compile_in_place`.
    """
    whole = options == _WHOLE or (isinstance(options, Mapping) and _WHOLE in options)
    if whole and _is_bare(unwrap(model)):
        return False
    if isinstance(options, Mapping) and whole:
        return {name: value for name, value in options.items() if name != _WHOLE} or True
    return True if whole else options  # type: ignore[return-value]  # no string


def _is_bare(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def why_no_graph(
    model: nn.Module, reduction: Reduction, options: UpdateOptions, *, num_optimizers: int, takes_state: bool
) -> str | None:
    """Why no update of a trainer can be a graph: what it has to do in between cannot be seen from outside of one.

    Args:
        model: whose update it is.
        reduction: how its gradients cross ranks.
        options: of the update.
        num_optimizers: how many step it.
        takes_state: whether forward has the state for its third parameter.
    """
    device = next(model.parameters()).device
    if not isinstance(reduction, NoReduction):
        return "gradients cross ranks"
    if device.type not in ("cpu", "cuda") or any(parameter.device != device for parameter in model.parameters()):
        return "the model is not on the CPU or one CUDA device alone"
    if takes_state:
        return "forward has a third parameter, and its numbers change with each update"
    if num_optimizers != 1:
        return "there are several optimizers"
    if options.on_out_of_memory != "raise":
        return f"on_out_of_memory is {options.on_out_of_memory!r}"
    changed = ("closure", "compiled_autograd", "create_graph", "keep_gradients", "retain_graph")
    return next((f"{name} is {vars(options)[name]!r}" for name in changed if vars(options)[name]), None)


def compile_in_place(model: nn.Module, options: ModelOptions, *, backward: bool = False) -> Backward:
    """Has `model` compiled when it is first called; its class and the names of its parameters stay.

    Inside DistributedDataParallel it is the module, not the wrapper, which changes with each micro-batch; torch still cuts
    the graph where the wrapper's buckets end, so that their reduction overlaps backward.

    Args:
        model: which one.
        options: see `Compile`; nothing is done for False.
        backward: whether backward is traced and compiled too, with the same options (compiled autograd).

    Returns:
        What runs backward.

    Raises:
        ValueError: the model is sharded, which puts calls between its blocks that no graph can span; or it is a bare module of
            torch, whose code torch leaves as it is without a message. Backward is to be compiled without the model, or in
            DistributedDataParallel.
    """
    if options is False:
        if backward:
            raise ValueError("compiled_autograd must be False without compile; pass compile=True, or torch.compile's options")
        return torch.autograd.backward
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(
            "compile must be False for a model that fully_shard was applied to; compile its blocks before sharding"
        )
    module = unwrap(model)
    if _is_bare(module):
        raise ValueError(
            f"compile must be False for a bare {type(module).__name__}, which torch leaves as it is; make it a part of a "
            "module with a forward of your own"
        )
    if backward and module is not model:
        raise ValueError(
            "compiled_autograd must be False in DistributedDataParallel, whose reduction torch does not trace; pass the module "
            "inside, with options=UpdateOptions(reduction='explicit')"
        )
    _warn_of_lost_buffers(module)
    settings = {} if options is True else dict(options)
    module.compile(**settings)
    return _compiled_backward(settings) if backward else torch.autograd.backward


def _warn_of_lost_buffers(module: nn.Module) -> None:
    lost = next((name for name, buffer in module.named_buffers() if is_lost(buffer)), None)
    if lost is not None:
        logging.getLogger("ignite_train").warning(
            f"the buffer {lost!r} is a float64 number without dimensions on the CPU, and what compiled code writes into such a "
            "tensor is lost; give it the shape (1,) or another dtype if forward changes it"
        )


def _compiled_backward(settings: dict[str, Any]) -> Backward:
    """Traces the whole of backward when it is first run: also of the loss, which no graph of forward holds, and `.grad +=`.

    Torch looks a trace up by the structure of the autograd graph and by whether a gradient is there already; so there is one
    for the first micro-batch of a group and one for all others, and more where sizes vary.
    """
    compiler = torch.compile(**settings)
    dynamic = settings.get("dynamic") is True  # torch's own rule: a size is fixed until it is seen to vary

    def backward(loss: Tensor, **arguments: Any) -> None:
        with torch._dynamo.compiled_autograd._enable(compiler, dynamic=dynamic):
            torch.autograd.backward(loss, **arguments)

    return backward
