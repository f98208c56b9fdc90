"""Compiling a model in place, as `torch.nn.Module.compile` does, and its backward with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ignite_train.arguments import describe
from ignite_train.internals.of_torch import compiled_autograd
from ignite_train.model.memory_layout import is_lost
from ignite_train.model.reshard import is_sharded
from ignite_train.ranks.wrapping import unwrap

__all__ = ["WHOLE", "Backward", "Compile", "compile_in_place", "compiles_updates", "of_model"]

Backward = Callable[..., None]
"""Runs backward from a loss; takes the arguments of `torch.autograd.backward`."""

Compile = bool | Literal["update"] | Mapping[str, Any]
"""Whether to compile; options of `torch.compile`, such as `{"mode": "reduce-overhead"}`, mean yes. `"update"` compiles whole
updates, and so does `{"update": True}` beside such options."""

ModelOptions = bool | Mapping[str, Any]
"""The same without whole updates."""

WHOLE = "update"
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def compiles_updates(options: Compile) -> bool:
    """Whether whole updates are to be compiled."""
    return options == WHOLE or (isinstance(options, Mapping) and WHOLE in options)


def of_model(options: Compile, model: nn.Module) -> ModelOptions:
    """How the model alone is compiled, for evaluation and for updates that are not a graph.

    Where whole updates are compiled it is left as it is if torch would leave it so; see `compile_in_place`.

    Raises:
        TypeError: the options are none of what `Compile` allows.
        ValueError: `"update"` among them is not True.
    """
    if not isinstance(options, (bool, Mapping)) and options != WHOLE:
        hint = f"; write compile={{'mode': {options!r}}}" if options in _MODES else ""
        raise TypeError(
            f"compile must be a bool or a mapping of torch.compile's options, or 'update', got {describe(options)}{hint}"
        )
    whole = compiles_updates(options)
    if whole and isinstance(options, Mapping) and options[WHOLE] is not True:
        raise ValueError(f"compile['update'] must be True, got {options[WHOLE]!r}; leave it out to compile the model alone")
    if whole and _is_bare(unwrap(model)):
        return False
    if isinstance(options, Mapping) and whole:
        return {name: value for name, value in options.items() if name != WHOLE} or True
    return True if whole else options  # type: ignore[return-value]  # no string


def _is_bare(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


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
            torch, whose code torch leaves as it is without a message. Compile backward without the model, or in
            DistributedDataParallel.
    """
    if options is False:
        if backward:
            raise ValueError("compiled_autograd must be False without compile; pass compile=True, or torch.compile's options")
        return torch.autograd.backward
    if is_sharded(model):
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
    compiler, within = torch.compile(**settings), compiled_autograd()
    dynamic = settings.get("dynamic") is True  # torch's own rule: a size is fixed until it is seen to vary

    def backward(loss: Tensor, **arguments: Any) -> None:
        with within(compiler, dynamic=dynamic):
            torch.autograd.backward(loss, **arguments)

    return backward
