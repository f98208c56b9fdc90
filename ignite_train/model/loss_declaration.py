"""A trial of the first micro-batch, cut and doubled: whether loss and logs are the sums or means that `forward` declares."""

from __future__ import annotations

import inspect
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from ignite_train.forward import BoundForward, ForwardOutput, as_forward_output, is_declared, refuse_fraction
from ignite_train.internals.of_torch import COLLECTIVE_NAMESPACES, DispatchMode, pytree, schema_of, storage_number
from ignite_train.model.forward_state import ForwardState
from ignite_train.model.memory_layout import has_plain_memory
from ignite_train.model.precision import Precision
from ignite_train.state import Carried

__all__ = ["FirstLook", "LossDeclarationWarning", "check_declaration"]

# A trial changes what warnings and the compiler do in the whole process. Its thread may take it again where Ctrl-C left it.
_ONE_AT_A_TIME = threading.RLock()
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_FEW = 6  # from this many samples on a half has three: with two the logarithm of their number doubles, as a sum does


class LossDeclarationWarning(UserWarning):
    """The first loss, or a log of it, is a mean where `forward` declares a sum, or a sum where it declares a mean."""


def check_declaration(
    model: nn.Module, forward: BoundForward, micro_batch: Any, *, carried: Carried, precision: Precision
) -> list[str]:
    """Says in one line each what is wrong with the declaration of loss and logs, and what to do; nothing if all is right.

    Forward is run two to ten times, in eval mode and without gradients: on parts of the samples, and on each part twice over.
    A sum doubles, and a mean stays, whatever its weights, masks and penalties are. What does neither is taken to be right, as
    contrastive losses are, and so is what cannot be cut: every tensor must be as long as the first one, and other leaves must
    be numbers.

    It leaves no trace: what forward changes is put back, and a forward that refers to something which could not be put
    back, such as an iterator, is not run. Where it would write into a tensor that is not its own, or begin a collective, it is
    broken off before. Nothing is said then, nor while another thread makes such a trial.

    Args:
        model: without a wrapper.
        forward: the user's.
        micro_batch: on the device of the model.
        carried: what forward carries.
        precision: under which it runs.
    """
    if (parts := _Parts.of(micro_batch)) is None:
        return []
    # What would write into a parameter or a buffer is broken off.
    state = ForwardState(model, carried, forward, watches_tensors=False)
    mark = state.mark(micro_batch)
    if not state.is_complete or any(map(_may_communicate, state.modules)) or not _ONE_AT_A_TIME.acquire(blocking=False):
        return []
    try:
        with suppress(Exception), _apart(state.modules), precision.autocast():
            return _findings(_Probe(lambda part: as_forward_output(forward(model, part)), parts))
    finally:
        _ONE_AT_A_TIME.release()
        state.put_back(mark)  # puts the modes back too
    return []


class FirstLook:
    """Looks for mistakes in what a `forward` declares, does and returns, when it runs first.

    Attributes:
        is_over: whether nothing is left to look at, so that `forward` can be called by itself.
    """

    def __init__(self) -> None:
        self.is_over = self._is_checked = False

    def __call__(
        self,
        forward: BoundForward,
        model: nn.Module,
        micro_batch: Any,
        module: nn.Module,
        *,
        carried: Carried,
        precision: Precision,
    ) -> Any:
        """Runs `forward`.

        Args:
            forward: the user's.
            model: its first argument.
            micro_batch: its second.
            module: the model without a wrapper; for this one and the others see `check_declaration`.
            carried: what forward carries.
            precision: under which it runs.
        """
        messages: list[str] = []
        is_first = not self._is_checked
        if is_first:
            self._is_checked = True
            messages = check_declaration(module, forward, micro_batch, carried=carried, precision=precision)
        was_training = module.training
        returned = forward(model, micro_batch)
        self.is_over = _size_is_known(returned)
        for message in messages:
            _warn(message, inspect.unwrap(forward), LossDeclarationWarning)
        if is_first and module.training != was_training:
            _warn(_other_mode(is_training=was_training), inspect.unwrap(forward), UserWarning)
        return returned


def _warn(message: str, forward: Any, category: type[Warning]) -> None:
    """Warns at the line of the user's function."""
    while isinstance(forward, partial):
        forward = forward.func
    function = forward.__func__ if isinstance(forward, MethodType) else forward
    if isinstance(function, FunctionType):
        code = function.__code__
        warnings.warn_explicit(message, category, code.co_filename, code.co_firstlineno)
    else:
        warnings.warn(message, category, stacklevel=3)


def _size_is_known(returned: Any) -> bool:
    """Refuses a pair whose second is a tensor with a fraction; False while it is 0, which an accuracy may be at first.

    Waits for the device, if forward returns a plain pair with a floating-point tensor.
    """
    if type(returned) is not tuple or len(returned) != 2 or not isinstance(returned[1], Tensor):
        return True
    if returned[1].numel() != 1 or returned[1].requires_grad or not returned[1].is_floating_point():
        return True
    size = float(returned[1])  # sync, once in a process
    refuse_fraction(size)
    return size != 0


def _may_communicate(module: nn.Module) -> bool:
    """Whether its forward may begin a collective. One that is broken off there can leave torch's state of a DTensor behind."""
    return isinstance(module, FSDPModule) or any(isinstance(one, DTensor) for one in module.parameters(recurse=False))


class _Probe:
    """Runs forward on parts of a micro-batch.

    Args:
        forward: the user's, given a micro-batch.
        parts: the micro-batch.

    Attributes:
        is_declared: whether the latest forward gave a sample size.
        tolerance: how much numbers may differ that are equal to rounding.
    """

    def __init__(self, forward: Callable[[Any], ForwardOutput], parts: _Parts) -> None:
        self._forward, self.parts = forward, parts
        self.is_declared, self.tolerance = False, 1e-4

    def numbers(self, *cuts: Sequence[int], is_widened: bool = False) -> list[dict[str, float]]:
        """For each cut the loss, the logs by their names, and the sample size under "": no log may have these names.

        Logs that have a denominator, or are a `Mean`, are left out. For the arguments see `_Parts.cut`.
        """
        outputs = [self._forward(self.parts.cut(cut, is_widened=is_widened)) for cut in cuts]
        self.is_declared = is_declared(outputs[0])
        plain = [{name: value for name, value in one.logs.items() if not isinstance(value, tuple)} for one in outputs]
        rows = [{"loss": one.loss, "": one.sample_size, **logs} for one, logs in zip(outputs, plain, strict=True)]
        tensors = [torch.as_tensor(value, device=outputs[0].loss.device) for row in rows for value in row.values()]
        if any(one.dtype in (torch.bfloat16, torch.float16) for one in tensors):
            self.tolerance = 1e-2
        values = iter(torch.stack([one.float().reshape(()) for one in tensors]).tolist())  # sync, a few times in a process
        return [{name: next(values) for name in row} for row in rows]

    def is_same(self, one: float, other: float) -> bool:
        """Whether they are equal, to rounding; or both 0."""
        return one == other or self.is_equal(one, other)

    def is_between(self, one: float, other: float, value: float) -> bool:
        """Whether `value` lies between the two, which count too unless one is 0: a count of something rare may be 0 or 1."""
        low, high = sorted((one, other))
        is_one = self.is_same(low, value) or self.is_same(high, value)
        return 0 not in (one, other) if is_one else low < value < high

    def is_equal(self, one: float, other: float, *, factor: float = 1.0) -> bool:
        """Whether `other` is `factor` times as large as `one`, to rounding; not if they are 0, which says nothing."""
        return math.isfinite(one) and one != 0 and math.isclose(factor * one, other, rel_tol=self.tolerance)


def _findings(probe: _Probe) -> list[str]:
    count, is_equal = probe.parts.count, probe.is_equal
    part, doubled = probe.numbers([0], [0, 0])
    if not probe.is_declared:
        is_sum = is_equal(part["loss"], doubled["loss"], factor=2) and not _is_mean_of_columns(probe, part["loss"])
        return [_bare_sum(count)] if is_sum else []
    if not is_equal(part[""], doubled[""], factor=2):
        return [_number_of_fields(part[""], count)] if _is_of_fields(probe, part, doubled) else []
    is_square = is_equal(part["loss"], doubled["loss"], factor=4)
    stays = [name for name, value in part.items() if name and probe.is_same(value, doubled[name])]
    means, size = _means(probe, stays, part), part[""] * count / probe.parts.size
    found = [_declared_mean(size)] if "loss" in means else []
    if is_square:
        other, both = probe.numbers([1], [0, 1])
        if is_equal(2 * (part["loss"] + other["loss"]), both["loss"]):
            found.append(_multiplied_sum(size))
    logs = [name for name in means if name != "loss"]
    return [*found, _mean_logs(logs)] if logs else found


def _is_of_fields(probe: _Probe, part: dict[str, float], doubled: dict[str, float]) -> bool:
    """Whether the size is that of a pair or a dict, in each part and in the whole, beside a sum over the samples."""
    fields = probe.parts.num_fields
    if fields < 2 or probe.parts.count == fields or not part[""] == doubled[""] == fields:
        return False
    if not probe.is_equal(part["loss"], doubled["loss"], factor=2):
        return False
    others = probe.numbers([1], [0, 1]) if len(probe.parts.sizes) > 1 else []
    return all(one[""] == fields for one in others)


def _means(probe: _Probe, names: Sequence[str], part: dict[str, float]) -> list[str]:
    """Selects the `names` of means: their values do not grow with the samples, and are not alike in all parts.

    What is alike in all of them is a constant. One with a fraction, such as a temperature, counts as a mean in logs.

    Args:
        probe: has run forward on the first part.
        names: of what stays where the first part is there twice; it may be 0.
        part: what forward has returned for the first part.
    """
    means, unknown, sizes = list[str](), names, probe.parts.sizes
    with suppress(Exception):  # a last part of another size may not suit forward; the others have told enough then
        for number, size in enumerate(sizes[1:], start=1):
            if not unknown:
                break
            one, doubled = probe.numbers([number], [number, number])
            # A sum that is 0 does not double either; of what was not 0 the first part has told enough.
            stays = [name for name in unknown if part[name] != 0 or probe.is_same(one[name], doubled[name])]
            unknown = [name for name in stays if probe.is_same(part[name], one[name])]
            known = {*stays} - {*unknown}
            # The number of different samples grows with the part, though not where samples are there twice.
            factor = size / sizes[0]
            found = [n for n in stays if n in known and not probe.is_equal(part[n], one[n], factor=factor)]
            # Both parts together have a mean that lies between; the matches within a batch, say, grow instead.
            (both,) = probe.numbers([0, number]) if found else ({},)
            means += [name for name in found if probe.is_between(part[name], one[name], both[name])]
    return means + [name for name in unknown if name != "loss" and part[name] % 1 > 0]


def _is_mean_of_columns(probe: _Probe, loss: float) -> bool:
    """Whether samples lie in the second dimension and the loss is a mean over them: a sum over time steps is right then."""
    with suppress(RuntimeError, ValueError, IndexError):  # columns are features
        return probe.is_equal(loss, probe.numbers([0], is_widened=True)[0]["loss"])
    return False


def _bare_sum(count: int) -> str:
    return (
        f"forward returned a bare loss, which is taken as a mean, but it looks like a sum over {count} samples; if it is one, "
        f"loss and gradient are {count} times too large; return ForwardOutput(loss, sample_size=...) or the mean; for a step "
        "along the sum of a micro-batch return ForwardOutput(loss, sample_size=1)"
    )


def _number_of_fields(size: float, count: int) -> str:
    return (
        f"forward returned sample_size={size:g}, the number of fields of the micro-batch, as len(batch) is, with a loss that "
        f"looks like a sum over {count} samples; return the number of samples, such as the length of the target"
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


def _other_mode(*, is_training: bool) -> str:
    now, call = ("eval", "model.eval()") if is_training else ("training", "model.train()")
    return (
        f"forward has put the model into {now} mode, in which dropout and BatchNorm do something else; unless that is meant, "
        f"leave {call} out of forward: the mode is set outside of it"
    )


def _mean_logs(names: list[str]) -> str:
    listed = ", ".join(f"logs[{name!r}]" for name in names)
    return (
        f"{listed} of forward did not grow with the samples, as a mean does not, and is divided by sample_size once more; "
        f"log a sum, such as a count of correct answers, a pair (sum, denominator), or logs={{{names[0]!r}: Mean(...)}}"
    )


class _Parts:
    """A micro-batch that can be cut into samples.

    Args:
        leaves: its tensors and numbers.
        structure: how they lie in it.
        count: the samples.

    Attributes:
        count: the same.
        num_fields: how many entries a pair or a dict has; 0 where they are all alike, as the samples of a list are.
        size: how many samples the first part has.
        sizes: of each part.
    """

    def __init__(self, leaves: list[Any], structure: Any, count: int) -> None:
        self._leaves, self._structure, self.count = leaves, structure, count
        whole = pytree.tree_unflatten(leaves, structure)
        kinds = {str(pytree.tree_map(_kind, one)) for one in whole} if isinstance(whole, (tuple, list)) else ()
        self.num_fields = len(whole) if isinstance(whole, dict) or len(kinds) > 1 else 0
        self.size = size = count // 2 if count >= _FEW else 1  # of a half
        # The second half with what is left over, or without one sample: an accuracy that is alike in both halves differs there.
        others = slice(size if count > 2 * size else size + 1, count)
        pieces = slice(size), slice(size, 2 * size), others
        self._pieces = [piece for piece in pieces if range(count)[piece]]
        self.sizes = [len(range(count)[piece]) for piece in self._pieces]

    @classmethod
    def of(cls, micro_batch: Any) -> _Parts | None:
        """The parts of a micro-batch, if its tensors leave no doubt: a sample alone may have a first dimension too."""
        leaves, structure = pytree.tree_flatten(micro_batch)
        if not all(
            has_plain_memory(leaf) if isinstance(leaf, Tensor) else isinstance(leaf, (int, float, type(None)))
            for leaf in leaves
        ):
            return None
        shapes = [leaf.shape for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0]
        count = shapes[0][0] if shapes else 0
        is_image = all(len(shape) == 3 for shape in shapes) and count <= 4
        if count < 2 or any(shape[0] != count for shape in shapes) or is_image or all(len(shape) == 1 for shape in shapes):
            return None
        return cls(leaves, structure, count)

    def cut(self, parts: Sequence[int], *, is_widened: bool = False) -> Any:
        """A micro-batch of some samples.

        Args:
            parts: the numbers of parts of the samples, which come one after the other.
            is_widened: whether each column of them is there twice.
        """

        def change(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.dim() == 0:
                return leaf
            chosen = torch.cat([leaf[self._pieces[part]] for part in parts])
            return torch.cat([chosen, chosen], dim=1) if is_widened and leaf.dim() > 1 else chosen

        return pytree.tree_unflatten([*map(change, self._leaves)], self._structure)


def _kind(leaf: Any) -> Any:
    return (leaf.dtype, leaf.shape) if isinstance(leaf, Tensor) else type(leaf)


class _BrokenOffError(Exception):
    """Ends a run of forward that would leave a trace; it does not leave this file."""


class _Apart(DispatchMode):
    """Breaks off what would begin a collective, or write into a tensor that was there before.

    Attributes:
        is_over: whether it lets all pass. Ctrl-C in its `__enter__` or `__exit__`, which are torch's, leaves it in its place.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_over = False
        self._own: set[int] = set()  # memory that was made while this is open

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's
        """Called by torch for each operation."""
        kwargs = kwargs or {}
        if self.is_over:
            return func(*args, **kwargs)
        if func.namespace in COLLECTIVE_NAMESPACES:
            raise _BrokenOffError
        if (schema := schema_of(func)).is_mutable:
            given = {**dict(zip((one.name for one in schema.arguments), args, strict=False)), **kwargs}
            writes = [one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
            if not self._memory([given.get(name) for name in writes]) <= self._own:
                raise _BrokenOffError
        result = func(*args, **kwargs)
        self._own |= self._memory(result) - self._memory((args, kwargs))
        return result

    @staticmethod
    def _memory(values: Any) -> set[int]:
        return {storage_number(leaf.untyped_storage()) for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)}


class _NoAssignment(TorchFunctionMode):
    """Breaks off at `tensor.data = ...`, which torch does not dispatch.

    Args:
        mode: is over when this one is.
    """

    def __init__(self, mode: _Apart) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's
        """Called by torch for each of its functions."""
        if func == _SET_DATA and not self._mode.is_over:
            raise _BrokenOffError
        return func(*args, **(kwargs or {}))


@contextmanager
def _apart(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Puts modules into eval mode, and within it nothing is compiled or warned of, and nothing leaves a trace."""
    mode = _Apart()
    try:
        for module in modules:
            module.training = False  # without `train()`, which may write into weights; they are put back by attribute too
        with (
            # made here, since it is in force from then on
            torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext(),
            torch.no_grad(),
            warnings.catch_warnings(action="ignore"),
            mode,
            _NoAssignment(mode),
        ):
            yield
    finally:
        mode.is_over = True
