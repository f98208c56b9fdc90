"""A trial of the first micro-batch, cut and doubled: whether loss and logs are the sums or means that `forward` declares."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ignite_train.carried import Carried
from ignite_train.forward import BoundForward, ForwardOutput, as_forward_output, is_declared
from ignite_train.model.forward_reach import ForwardReach
from ignite_train.model.precision import Precision
from ignite_train.model.replay import TrialRun

__all__ = ["LossDeclarationWarning", "check_forward"]

_COLLECTIVES = {"c10d", "c10d_functional", "_c10d_functional"}
_FEW = 6  # from this many samples on a half has three: with two the logarithm of their number doubles, as a sum does


class LossDeclarationWarning(UserWarning):
    """The loss or a log of the first micro-batch is a mean where `forward` declares a sum, or a sum where it declares a mean."""


def check_forward(
    model: nn.Module, forward: BoundForward, micro_batch: Any, *, carried: Carried, precision: Precision
) -> list[str]:
    """Says in one line each what is wrong with the declaration of loss and logs, and what to do; nothing if all is right.

    Forward is run two to five times, in eval mode and without gradients: on a part of the samples, and on that part twice over.
    A sum doubles, and a mean stays, whatever its weights, masks and penalties are. What does neither is taken to be right, as
    contrastive losses are, and so is what cannot be cut: every tensor must be as long as the first one, and other leaves must
    be numbers.

    It leaves no trace: what forward changes is put back, and a forward that refers to something which could not be put back, such
    as an iterator, is not run. Where it would write into a tensor that is not its own, or begin a collective, it is broken off
    before. Nothing is said then.

    Args:
        model: without a wrapper.
        forward: the user's.
        micro_batch: on the device of the model.
        carried: what forward carries.
        precision: under which it runs.
    """
    parts = _Parts.of(micro_batch)
    if parts is None or any(isinstance(module, FSDPModule) for module in model.modules()):
        return []
    reach = ForwardReach(model, forward)
    if not reach.is_known:
        return []
    modules = nn.ModuleList(reach.modules)
    trial = TrialRun(modules, carried, forward, micro_batch)
    found: list[str] = []
    with suppress(Exception), _apart(modules), precision.autocast():
        found = _findings(lambda part: as_forward_output(forward(model, part)), parts)
    trial.undo()
    reach.put_back()
    return found


def _findings(run: Callable[[Any], ForwardOutput], parts: _Parts) -> list[str]:
    part, doubled = run(parts.part()), run(parts.doubled())
    if not is_declared(part):
        return [_bare_sum(parts.count)] if _doubles(part.loss, doubled.loss) and not _is_mean_of_columns(run, parts) else []
    if not _doubles(part.sample_size, doubled.sample_size):
        return []
    found, size = [], float(part.sample_size) * parts.count / parts.size  # sync, as all of this, once in a process
    stays = [name for name, value in part.logs.items() if type(value) is not tuple and _same(value, doubled.logs[name])]
    four_times = _same(4 * float(part.loss), doubled.loss)
    if not (_same(part.loss, doubled.loss) or four_times or stays):
        return []
    other = run(parts.other())  # a number that is the same for other samples is a constant and no mean
    if _same(part.loss, doubled.loss) and not _same(part.loss, other.loss):
        found.append(_declared_mean(size))
    if four_times and _same(2 * (float(part.loss) + float(other.loss)), run(parts.both()).loss):
        found.append(_multiplied_sum(size))
    means = [name for name in stays if not _same(part.logs[name], other.logs[name])]
    return [*found, _mean_logs(means)] if means else found


def _is_mean_of_columns(run: Callable[[Any], ForwardOutput], parts: _Parts) -> bool:
    """Whether samples lie in the second dimension and the loss is a mean over them: a sum over time steps is right then."""
    with suppress(RuntimeError, ValueError, IndexError):  # columns are features
        return _same(run(parts.part()).loss, run(parts.widened()).loss)
    return False


def _bare_sum(count: int) -> str:
    return (
        f"forward returned a bare loss, which is taken as a mean, but it looks like a sum over {count} samples; if it is one, loss "
        f"and gradient are {count} times too large; return ForwardOutput(loss, sample_size=...) or the mean; for a step along the "
        "sum of a micro-batch return ForwardOutput(loss, sample_size=1)"
    )


def _declared_mean(size: float) -> str:
    return (
        f"forward returned sample_size={size:g} with a loss that looks like a mean; if it is one, loss and gradient are {size:g} "
        'times too small; return the sum (reduction="sum"), or the mean times sample_size, or the mean alone'
    )


def _multiplied_sum(size: float) -> str:
    return (
        f"the loss looks like a sum that was multiplied by sample_size={size:g}; if it is one, loss and gradient are {size:g} "
        "times too large; the loss_fn of create_supervised_trainer must return the mean, or be a loss module of torch with "
        'reduction="sum"'
    )


def _mean_logs(names: list[str]) -> str:
    listed = ", ".join(f"logs[{name!r}]" for name in names)
    return (
        f"{listed} of forward did not grow with the samples, as a mean does not, and would be divided by sample_size once more; "
        "log a sum, such as a count of correct answers, or a pair (sum, denominator)"
    )


def _doubles(part: Any, doubled: Any) -> bool:
    return _same(2 * float(part), doubled)


def _same(one: Any, other: Any) -> bool:
    """Whether they are equal to rounding; not if they are 0, which says nothing."""
    coarse = any(isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) for value in (one, other))
    first, second = float(one), float(other)
    return math.isfinite(first) and first != 0 and math.isclose(first, second, rel_tol=1e-2 if coarse else 1e-4)


class _Parts:
    """A micro-batch that can be cut into samples.

    Args:
        leaves: its tensors and numbers.
        structure: how they lie in it.
        count: the samples.
    """

    def __init__(self, leaves: list[Any], structure: Any, count: int) -> None:
        self._leaves, self._structure, self.count = leaves, structure, count
        self.size = count // 2 if count >= _FEW else 1  # of a part

    @classmethod
    def of(cls, micro_batch: Any) -> _Parts | None:
        """The parts of a micro-batch, if its tensors leave no doubt: a sample alone may have a first dimension too."""
        leaves, structure = pytree.tree_flatten(micro_batch)
        if not all(leaf is None or isinstance(leaf, (Tensor, int, float)) for leaf in leaves):
            return None
        shapes = [leaf.shape for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0]
        count = shapes[0][0] if shapes else 0
        is_image = all(len(shape) == 3 for shape in shapes) and count <= 4
        if count < 2 or any(shape[0] != count for shape in shapes) or is_image or all(len(shape) == 1 for shape in shapes):
            return None
        return cls(leaves, structure, count)

    def part(self) -> Any:
        """Some samples."""
        return self._made(lambda leaf: leaf[: self.size].clone())

    def doubled(self) -> Any:
        """The same samples twice."""
        return self._made(lambda leaf: torch.cat([leaf[: self.size]] * 2))

    def other(self) -> Any:
        """As many other samples."""
        return self._made(lambda leaf: leaf[self.size : 2 * self.size].clone())

    def both(self) -> Any:
        """These and those."""
        return self._made(lambda leaf: leaf[: 2 * self.size].clone())

    def widened(self) -> Any:
        """The part with each column twice."""
        return self._made(lambda leaf: torch.cat([leaf[: self.size]] * 2, dim=1) if leaf.dim() > 1 else leaf[: self.size].clone())

    def _made(self, change: Callable[[Tensor], Tensor]) -> Any:
        made = [change(leaf) if isinstance(leaf, Tensor) and leaf.dim() > 0 else leaf for leaf in self._leaves]
        return pytree.tree_unflatten(made, self._structure)


class _BrokenOffError(Exception):
    """Ends a run of forward that would leave a trace; it does not leave this file."""


class _Apart(TorchDispatchMode):
    """Breaks off what would begin a collective, or write into a tensor that was there before."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own: set[int] = set()  # memory that was made while this is open

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002  # torch's
        """Called by torch for each operation."""
        kwargs = kwargs or {}
        if func.namespace in _COLLECTIVES:
            raise _BrokenOffError
        if func._schema.is_mutable:
            given = {**dict(zip((one.name for one in func._schema.arguments), args, strict=False)), **kwargs}
            writes = [one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
            if not self._memory([given.get(name) for name in writes]) <= self._own:
                raise _BrokenOffError
        result = func(*args, **kwargs)
        self._own |= self._memory(result) - self._memory((args, kwargs))
        return result

    @staticmethod
    def _memory(values: Any) -> set[int]:
        return {leaf.untyped_storage()._cdata for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)}


@contextmanager
def _apart(owner: nn.Module) -> Iterator[None]:
    """Within it modules are in eval mode, nothing is compiled or warned of, and nothing leaves a trace."""
    modules = {one: one.training for one in owner.modules()}
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    try:
        for module in modules:
            module.training = False
        with torch.no_grad(), eager, warnings.catch_warnings(action="ignore"), _Apart():
            yield
    finally:
        for module, training in modules.items():
            module.training = training
