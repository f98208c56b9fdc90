"""A trial of the first micro-batch, cut and doubled: whether loss and logs are the sums or means that `forward` declares."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ignite_train.carried import Carried
from ignite_train.forward import BoundForward, ForwardOutput, as_forward_output, is_declared
from ignite_train.model.forward_reach import ForwardReach
from ignite_train.model.forward_state import ForwardState
from ignite_train.model.precision import Precision

__all__ = ["LossDeclarationWarning", "check_forward"]

_COLLECTIVES = {"c10d", "c10d_functional", "_c10d_functional"}
_FEW = 6  # from this many samples on a half has three: with two the logarithm of their number doubles, as a sum does


class LossDeclarationWarning(UserWarning):
    """The first loss, or a log of it, is a mean where `forward` declares a sum, or a sum where it declares a mean."""


def check_forward(
    model: nn.Module, forward: BoundForward, micro_batch: Any, *, carried: Carried, precision: Precision
) -> list[str]:
    """Says in one line each what is wrong with the declaration of loss and logs, and what to do; nothing if all is right.

    Forward is run two to five times, in eval mode and without gradients: on a part of the samples, and on that part twice over.
    A sum doubles, and a mean stays, whatever its weights, masks and penalties are. What does neither is taken to be right, as
    contrastive losses are, and so is what cannot be cut: every tensor must be as long as the first one, and other leaves must
    be numbers.

    It leaves no trace: what forward changes is put back, and a forward that refers to something which could not be put
    back, such as an iterator, is not run. Where it would write into a tensor that is not its own, or begin a collective, it is
    broken off before. Nothing is said then.

    Args:
        model: without a wrapper.
        forward: the user's.
        micro_batch: on the device of the model.
        carried: what forward carries.
        precision: under which it runs.
    """
    parts, reach = _Parts.of(micro_batch), ForwardReach(model, forward)
    modules = nn.ModuleList(reach.modules)
    if parts is None or not reach.is_known or any(isinstance(module, FSDPModule) for module in modules.modules()):
        return []
    # What would write into a parameter or a buffer is broken off.
    state = ForwardState(modules, carried, forward, watches_tensors=False)
    mark = state.mark(micro_batch)
    try:
        with suppress(Exception), _apart(modules), precision.autocast():
            return _findings(lambda part: as_forward_output(forward(model, part)), parts)
    finally:
        state.put_back(mark)  # puts the modes back too
        reach.put_back()
    return []


def _findings(run: Callable[[Any], ForwardOutput], parts: _Parts) -> list[str]:
    first = run(parts.part())
    part, doubled = _read(first, run(parts.doubled()))
    if not is_declared(first):
        is_sum = part.loss.doubles(doubled.loss) and not _is_mean_of_columns(run, parts)
        return [_bare_sum(parts.count)] if is_sum else []
    if not part.size.doubles(doubled.size):
        return []
    found, size = [], part.size.value * parts.count / parts.size
    stays, squares = part.loss.stays(doubled.loss), part.loss.stays(doubled.loss, factor=4)
    names = [name for name, log in part.logs.items() if log.stays(doubled.logs[name])]
    if not (stays or squares or names):
        return []
    other, both = _read(run(parts.other()), run(parts.both()))
    if stays and not part.loss.stays(other.loss):  # a number that is the same for other samples is a constant and no mean
        found.append(_declared_mean(size))
    if squares and _Number(2 * (part.loss.value + other.loss.value), part.loss.is_coarse).stays(both.loss):
        found.append(_multiplied_sum(size))
    means = [name for name in names if not part.logs[name].stays(other.logs[name])]
    return [*found, _mean_logs(means)] if means else found


def _is_mean_of_columns(run: Callable[[Any], ForwardOutput], parts: _Parts) -> bool:
    """Whether samples lie in the second dimension and the loss is a mean over them: a sum over time steps is right then."""
    with suppress(RuntimeError, ValueError, IndexError):  # columns are features
        part, widened = _read(run(parts.part()), run(parts.widened()))
        return part.loss.stays(widened.loss)
    return False


class _Number(NamedTuple):
    """A number of forward, and whether it is rounded to few digits."""

    value: float
    is_coarse: bool

    def stays(self, other: _Number, factor: float = 1.0) -> bool:
        """Whether the other one is equal to rounding, or `factor` times as large; not if they are 0, which says nothing."""
        tolerance = 1e-2 if self.is_coarse else 1e-4
        return (
            math.isfinite(self.value) and self.value != 0 and math.isclose(factor * self.value, other.value, rel_tol=tolerance)
        )

    def doubles(self, other: _Number) -> bool:
        """Whether the other one is twice as large."""
        return self.stays(other, factor=2.0)


class _Numbers(NamedTuple):
    """What a forward returned. Logs that have a denominator are left out."""

    loss: _Number
    size: _Number
    logs: dict[str, _Number]


def _read(*outputs: ForwardOutput) -> list[_Numbers]:
    """Reads the numbers of all outputs in one go."""
    device = outputs[0].loss.device
    rows: list[dict[str, Any]] = [
        {name: value for name, value in one.logs.items() if type(value) is not tuple} | {"loss": one.loss, "": one.sample_size}
        for one in outputs  # no log may be called "loss"
    ]
    flat = [torch.as_tensor(value, device=device).float().reshape(()) for row in rows for value in row.values()]
    values, read = iter(torch.stack(flat).tolist()), []  # sync, once or a few times in a process
    for row in rows:
        numbers = {name: _Number(next(values), _is_coarse(value)) for name, value in row.items()}
        read.append(_Numbers(numbers.pop("loss"), numbers.pop(""), numbers))
    return read


def _is_coarse(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _bare_sum(count: int) -> str:
    return (
        f"forward returned a bare loss, which is taken as a mean, but it looks like a sum over {count} samples; if it is one, "
        f"loss and gradient are {count} times too large; return ForwardOutput(loss, sample_size=...) or the mean; for a step "
        "along the sum of a micro-batch return ForwardOutput(loss, sample_size=1)"
    )


def _declared_mean(size: float) -> str:
    return (
        f"forward returned sample_size={size:g} with a loss that looks like a mean; if it is one, loss and gradient are "
        f'{size:g} times too small; return the sum (reduction="sum"), or the mean times sample_size, or the mean alone'
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
        f"{listed} of forward did not grow with the samples, as a mean does not, and is divided by sample_size once more; "
        "log a sum, such as a count of correct answers, or a pair (sum, denominator)"
    )


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
        if not all(
            _is_plain(leaf) if isinstance(leaf, Tensor) else isinstance(leaf, (int, float, type(None))) for leaf in leaves
        ):
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
        return self._made(
            lambda leaf: torch.cat([leaf[: self.size]] * 2, dim=1) if leaf.dim() > 1 else leaf[: self.size].clone()
        )

    def _made(self, change: Callable[[Tensor], Tensor]) -> Any:
        made = [change(leaf) if isinstance(leaf, Tensor) and leaf.dim() > 0 else leaf for leaf in self._leaves]
        return pytree.tree_unflatten(made, self._structure)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta or tensor.is_quantized)


class _BrokenOffError(Exception):
    """Ends a run of forward that would leave a trace; it does not leave this file."""


class _Apart(TorchDispatchMode):
    """Breaks off what would begin a collective, or write into a tensor that was there before."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own: set[int] = set()  # memory that was made while this is open

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's
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
    """Puts modules into eval mode, and within it nothing is compiled or warned of, and nothing leaves a trace."""
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    for module in owner.modules():
        module.training = False
    with torch.no_grad(), eager, warnings.catch_warnings(action="ignore"), _Apart():
        yield
