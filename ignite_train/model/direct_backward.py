"""Torch's autograd engine, called without the preparation of `torch.autograd.backward`, for a loss that needs none of it.

What is private in torch about a backward that is run this way stands in this file, and is tried before it is used, see
`is_direct_right`.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor
from torch.autograd.variable import Variable

__all__ = ["direct_backward", "is_direct_right"]

_WAITS_FOR_RANKS = True  # HangWatch looks for it in the file where a rank stands: in backward DDP waits for the others

_torchs_log = logging.getLogger(torch.autograd.graph.__name__)
_torchs_engine: Any = vars(torch.autograd.graph).get("_engine_run_backward")  # hands this thread's context to those of devices


def _engine() -> Any:
    """What runs a backward whose loss is on the CPU: the engine itself if this torch was built without an accelerator."""
    if torch.accelerator.current_accelerator() is not None:
        return _torchs_engine
    try:
        return Variable._execution_engine.run_backward
    except AttributeError:  # another version of torch has it elsewhere
        return _torchs_engine


_run_engine = _engine()
_torchs_backward = torch.autograd.backward
_is_known = {"_is_torch_function_mode_enabled", "_are_functorch_transforms_active"} <= vars(torch._C).keys()


def direct_backward(loss: Tensor, *, retain_graph: bool = False, create_graph: bool = False) -> None:
    """`torch.autograd.backward` of a scalar loss, by way of the engine where that comes to the very same.

    Torch asks who wants to see its calls, makes tuples of what may be one tensor or several, and makes the gradient of each,
    which for a scalar is one. The engine is the same, with hooks, anomaly mode, and compiled autograd. Torch's function is
    called where the loss is not a plain scalar; where a mode that sees torch's functions, or a transform of `torch.func`, is
    active; where each node is to be written to torch's debug log; where it has been replaced; and where a trial has shown that
    the engine takes something else.

    Args:
        loss: a scalar with a graph.
        retain_graph: keep its graph.
        create_graph: make the gradients differentiable.
    """
    if (
        _is_known
        and type(loss) is Tensor
        and loss.ndim == 0
        and loss.is_floating_point()
        and torch.autograd.backward is _torchs_backward
        and not torch._C._is_torch_function_mode_enabled()
        and not torch._C._are_functorch_transforms_active()
        and not _torchs_log.isEnabledFor(logging.DEBUG)
        and is_direct_right()  # last: the trial is made where nothing can change it
    ):
        _engine_run_backward(loss, retain_graph=retain_graph, create_graph=create_graph)
    else:
        torch.autograd.backward(loss, retain_graph=retain_graph, create_graph=create_graph)


def _engine_run_backward(loss: Tensor, *, retain_graph: bool, create_graph: bool) -> None:
    """Named as the function of torch that it replaces: `HangWatch` shows the name for a rank that waits in backward."""
    one = torch.ones_like(loss)
    run = _run_engine if loss.is_cpu else _torchs_engine
    run((loss,), (one,), retain_graph, create_graph, (), allow_unreachable=True, accumulate_grad=True)


def _same(tensor: Tensor) -> Tensor:
    """In the place of the user's hooks on saved tensors, which are not to see the trial."""
    return tensor


@functools.cache
def is_direct_right() -> bool:
    """Whether the engine leaves the gradients that `torch.autograd.backward` does, bit by bit; where not, the log says so."""
    gradients: list[list[Tensor | None]] = []
    try:
        for run in (_torchs_backward, _engine_run_backward):
            leaves = [torch.arange(1.0, 8.0, device="cpu").requires_grad_() for _ in range(2)]
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
                loss = (leaves[0] / 3.0 * leaves[1].exp()).sum()
            run(loss, retain_graph=True, create_graph=False)
            run(loss, retain_graph=False, create_graph=False)
            gradients.append([leaf.grad for leaf in leaves])
        same = all(map(torch.equal, *gradients))
    except (AttributeError, RuntimeError, TypeError):  # other arguments
        same = False
    if not same:
        logging.getLogger("ignite_train").warning(
            "torch's autograd engine, called directly, differs from torch.autograd.backward in torch "
            f"{torch.__version__}, as a trial has shown; torch.autograd.backward is called, which is slower"
        )
    return same
