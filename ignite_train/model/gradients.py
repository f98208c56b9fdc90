"""The accumulated gradients of an optimizer: their norm, the one factor that makes them a mean, and clearing them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from operator import add, attrgetter, gt, is_, is_not
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ignite_train.device.to_host import is_on_host
from ignite_train.errors import GradientAccessError, NoGradientError
from ignite_train.internals.of_distributed import parameter_groups, whole_parameters
from ignite_train.internals.of_torch import foreach_mul_, foreach_norm
from ignite_train.model.memory_layout import is_dense, local_part
from ignite_train.model.optimizers import Optimizers
from ignite_train.model.sparse_parameters import sparse_gradient_values, sparse_parameters

__all__ = [
    "SMALLEST_NORM",
    "Gradients",
    "may_trust_norm",
    "no_gradient_error",
    "share_memory",
    "sharing_memory",
    "times",
]

SMALLEST_NORM = 2.0**-40  # below it squares that float32 cannot hold may be more than a rounding of their sum

_ROW = 2**14  # elements that are squared and added up in one go; their float32 sum is good to 2e-7
_GRADIENT, _DEVICE, _DTYPE = attrgetter("grad"), attrgetter("device"), attrgetter("dtype")
_IS_ON_HOST = attrgetter("is_cpu")
_START, _SIZE = Tensor.data_ptr, attrgetter("nbytes")
_HOST = torch.device("cpu")
_WIDE = {torch.float32, torch.float64}  # norms of narrower ones are added up in float32
_FLOAT32_ON_HOST = {(_HOST, torch.float32)}
_NOTHING, _TENSOR = repeat(None), repeat(Tensor)
_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_STRIDE = 2.0**100  # by which a factor beyond these is brought between them
_CUT = 2**18  # a gradient from this size on is read in rows: a float32 sum over all of it would be off by 1e-6 and more


def may_trust_norm(norm: float) -> bool:
    """Whether float32 can have added up the squares of the gradients: none too large, and not all too small."""
    return SMALLEST_NORM <= norm < math.inf


def no_gradient_error() -> NoGradientError:
    """Why there can be no step where no parameter has a gradient."""
    return NoGradientError(
        "backward left no gradient on any parameter of the optimizer: the loss that forward returned does not depend on them; "
        "return it with its graph (no .detach(), .item() or torch.no_grad()), freeze fewer parameters, or remove hooks that "
        "step and clear gradients within backward"
    )


class Gradients:
    """The gradients of `optimizer`'s parameters, as backward left them: a sum, times the loss scale.

    Args:
        model: gives the parameters their names.
        optimizer: whose parameters these are; one, or several that are stepped together.

    Attributes:
        kinds: on which devices and in which dtypes they were when their norm was last taken; empty if there were none.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | Optimizers) -> None:
        self._optimizer = optimizer
        self._model = model
        self._sparse = {*sparse_parameters(model)}
        self._sharded = parameter_groups(model)  # by FSDP2, which keeps whole gradients for itself until it reduces them
        self._mean_factor: float | None = None  # while they may be read: what they are multiplied by to become the mean
        self.kinds: set[tuple[torch.device, torch.dtype]] = set()
        # The gradients that were seen to have memory of their own in this update, with None for a parameter without one.
        self._apart: list[Tensor | None] = []
        self._on_host = _OnHost()

    def clear(self) -> None:
        """Drops all gradients; `.grad` is None afterwards."""
        self._apart = []
        optimizer = self._optimizer
        if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
            optimizer.zero_grad(set_to_none=True)
            return
        for group in optimizer.param_groups:  # as torch's does, but for a profiler's range that costs more than all of it
            for parameter in group["params"]:
                parameter.grad = None

    def clear_stale(self) -> None:
        """Drops gradients that something else than an update left behind: this update must not use them."""
        for group in self._optimizer.param_groups:
            if any(map(is_not, map(_GRADIENT, group["params"]), _NOTHING)):
                self.clear()
                break

    def drop_frozen(self) -> None:
        """Clears gradients of parameters that were frozen within the update: what is there is of this rank alone."""
        for parameter in self.parameters():
            if not parameter.requires_grad:
                parameter.grad = None

    def set_aside(self) -> list[Tensor | None]:
        """Takes all gradients off their parameters."""
        self._apart, aside = [], []
        for parameter in self.parameters():
            aside.append(parameter.grad)
            parameter.grad = None
        return aside

    def put_back(self, aside: list[Tensor | None]) -> None:
        """Undoes `set_aside`, and whatever came since."""
        for parameter, gradient in zip(self.parameters(), aside, strict=True):
            parameter.grad = gradient

    def add_back(self, aside: list[Tensor | None]) -> None:
        """Adds the gradients that were set aside to those that came since, as backward would have."""
        for parameter, gradient in zip(self.parameters(), aside, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            elif gradient is not None:
                # in place where that is possible: a sparse one may meet a dense one of the same table
                parameter.grad = parameter.grad + gradient if gradient.is_sparse else gradient.add_(parameter.grad)

    def separate(self) -> None:
        """Gives each of them memory of its own; called after each backward.

        Backward hands one tensor to two parameters where their gradients are equal, as those of the terms of a sum may be, and
        views of it to the parts of a `cat`. What then adds to one of them in place, or scales it, would do so to the other too:
        torch's own accumulation and `clip_grad_norm_` do. With `fully_shard` these are the whole gradients, which FSDP2 has
        inside until it reduces them; the shards lie apart. Sparse gradients are left alone.
        """
        found = self._of_whole_parameters() if self._sharded else self._of_each_parameter()
        if len(found) == len(self._apart) and all(map(is_, found, self._apart)):
            return  # backward has added to them in place
        self._apart = found
        existing = parts = found
        if self._sparse or any(map(is_not, map(type, found), _TENSOR)):
            existing, parts = _with_memory(found)
        if not share_memory(parts):
            return
        copied = {id(existing[index]) for index in sharing_memory(parts)}
        for parameter in whole_parameters(self._sharded) if self._sharded else self.parameters():
            if parameter.grad is not None and id(parameter.grad) in copied:
                parameter.grad = parameter.grad.clone()
        self._apart = self._of_whole_parameters() if self._sharded else self._of_each_parameter()

    def let_go(self) -> None:
        """Keeps no gradient in memory for the next `separate`, where FSDP2 frees whole gradients in the backward before it."""
        self._apart = []

    def detach(self) -> None:
        """Cuts the graphs that `create_graph=True` leaves on gradients, so that the next micro-batch does not grow them."""
        self._apart = []
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach()

    def norm(self) -> float | Tensor:
        """L2 norm over all of them, with the loss scale, in float32 or wider; on an accelerator a 0-d tensor, not read."""
        kinds = _by_kind(self._strided() if self._sparse else self._existing())
        self.kinds = {*kinds}
        return _length(kinds, self._on_host)

    def note_kinds(self) -> None:
        """Notes what there is, as `norm` does, where the norm was taken of the gradients of several optimizers at once."""
        self.kinds = {*_by_kind(self._existing())}

    def scaled_norm(self) -> float:
        """The same norm for gradients whose squares float32 cannot hold. Takes more time, and waits for the device.

        It is infinite or NaN only if an element is (or if float64 cannot hold the norm itself).
        """
        return _scaled_length(self._strided())

    def scaled_shard_norm_squared(self, copies: Callable[[Tensor], int]) -> float:
        """`shard_norm_squared` by way of `scaled_norm`."""
        lengths = {replicas: _scaled_length(gradients) for replicas, gradients in self._shares(copies).items()}
        return sum(length * length / replicas for replicas, length in lengths.items())

    def shard_norm_squared(self, copies: Callable[[Tensor], int]) -> float | Tensor:
        """This rank's share of the squared norm, for gradients that are sharded over some ranks: Σ over all ranks is the whole.

        Args:
            copies: how many ranks hold the same part of a gradient, which counts on each of them for its share.
        """
        self.kinds = set()
        squared: float | Tensor = 0.0
        for replicas, gradients in self._shares(copies).items():
            kinds = _by_kind(gradients)
            self.kinds |= {*kinds}
            length = _length(kinds, self._on_host)
            squared += length * length / replicas  # a power of floats raises an OverflowError where a product is infinite
        return squared

    def _shares(self, copies: Callable[[Tensor], int]) -> dict[int, list[Tensor]]:
        """This rank's parts, by how many ranks hold the same."""
        shares: dict[int, list[Tensor]] = {}
        for gradient in self._existing():
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            shares.setdefault(copies(gradient), []).append(local)
        return shares

    def first_sparse(self) -> str | None:
        """The name of the first parameter whose gradient is sparse, and which is not the weight of a sparse embedding."""
        named = [(name, p) for name, p in self._model.named_parameters() if p not in self._sparse]
        return next((name for name, p in named if p.grad is not None and p.grad.layout is not torch.strided), None)

    @contextmanager
    def readable(self, mean_factor: float) -> Iterator[None]:
        """Within this context `named` gives the gradients, times `mean_factor`."""
        self._mean_factor = mean_factor
        try:
            yield
        finally:
            self._mean_factor = None

    def mean_factor(self) -> float:
        """The factor that makes them the gradients of the mean loss.

        Raises:
            GradientAccessError: outside of GRADIENTS_READY.
        """
        if self._mean_factor is None:
            raise GradientAccessError(
                "gradients are whole in GRADIENTS_READY only; call gradients() in a handler of TrainEvents.GRADIENTS_READY; it "
                "gives copies: to change a gradient, change .grad of its parameter in a handler of GRADIENTS_REDUCED"
            )
        return self._mean_factor

    def named(self) -> dict[str, Tensor]:
        """Copies of the gradients of the mean loss, by parameter name.

        Raises:
            GradientAccessError: outside of GRADIENTS_READY.
        """
        factor, named = self.mean_factor(), self._model.named_parameters()
        return {name: times(p.grad.detach(), factor) for name, p in named if p.grad is not None}

    def has_several(self) -> bool:
        """Whether more than one parameter has a gradient."""
        return sum(parameter.grad is not None for parameter in self.parameters()) > 1

    def unstepped(self) -> list[str]:
        """The names of the model's parameters that have a gradient, and that no optimizer steps."""
        stepped = {id(parameter) for parameter in self.parameters()}
        return [name for name, p in self._model.named_parameters() if p.grad is not None and id(p) not in stepped]

    def refuse_dropped(self, event: str = "GRADIENTS_READY") -> None:
        """Sees to it that a step will move something.

        Raises:
            NoGradientError: no gradient is left of those whose norm was taken.
        """
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    return
        raise NoGradientError(
            f"a handler of {event} has dropped all gradients before the step; leave out its zero_grad(): the trainer "
            "clears them after each update"
        )

    def multiply(self, factor: float) -> None:
        """Multiplies all of them, in one pass; in several if float32, in which the kernels hold it, cannot hold the factor.

        float32 ones on the host are multiplied by a tensor, since of a number torch makes one for each gradient, which takes
        longer. It rounds the factor as torch's arithmetic with a number does.
        """
        existing = self._existing()
        plain = not self._sparse and all(map(is_, map(type, existing), _TENSOR))
        if not plain:
            # of shards the memory: torch multiplies no DTensors of several meshes, or beside plain tensors, in one call
            existing = [one.to_local() if isinstance(one, DTensor) else one for one in existing]
        as_tensor = plain and self.kinds == _FLOAT32_ON_HOST
        parts = [factor] if _SMALLEST <= abs(factor) <= _LARGEST else _factors(factor)
        for part in parts if existing else ():
            foreach_mul_(existing, torch.from_numpy(np.asarray(part, dtype=np.float32)) if as_tensor else part)

    def name(self, parameter: nn.Parameter) -> str:
        """The name of `parameter` in a message."""
        return next((f"{name!r}" for name, known in self._model.named_parameters() if known is parameter), "a parameter")

    def parameters(self) -> list[nn.Parameter]:
        """Whose they are, in the optimizer's order."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _of_each_parameter(self) -> list[Any]:
        """The gradients of all parameters, in the optimizer's order, with None for a parameter that has none."""
        found: list[Any] = []
        for group in self._optimizer.param_groups:
            found += map(_GRADIENT, group["params"])
        return found

    def _of_whole_parameters(self) -> list[Any]:
        """The same of those inside FSDP2, to which the next backward adds in place."""
        return [*map(_GRADIENT, whole_parameters(self._sharded))]

    def _existing(self) -> list[Tensor]:
        found = self._of_each_parameter()
        return [gradient for gradient in found if gradient is not None] if any(map(is_, found, _NOTHING)) else found

    def _strided(self) -> list[Tensor]:
        """All of them, and of sparse ones the rows that are there. Rows that backward has left twice are added up first."""
        for parameter in self._sparse:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
        return [sparse_gradient_values(gradient) for gradient in self._existing()]


def sharing_memory(tensors: Sequence[Tensor]) -> list[int]:
    """The indices of dense tensors that would have to be copied, so that no two of `tensors` share a byte."""
    if not share_memory(tensors):
        return []
    found, end = list[int](), 0
    for start, index in sorted([(tensor.data_ptr(), index) for index, tensor in enumerate(tensors)]):
        if start < end:
            found.append(index)
        else:
            end = start + tensors[index].nbytes
    return found


def share_memory(tensors: Iterable[Tensor]) -> bool:
    """Whether two of them share a byte. It is asked in each update, so no line of Python runs for each tensor."""
    tensors = [*tensors]
    if len(tensors) < 2:
        return False
    starts = [*map(_START, tensors)]
    # Apart from each other, as many of them end before one begins as have begun before it.
    ends = sorted(map(add, starts, map(_SIZE, tensors)))
    starts.sort()
    return any(map(gt, ends, starts[1:]))


def times(gradient: Tensor, factor: float) -> Tensor:
    """Their product, also where float32, in which torch multiplies by a number, cannot hold the number."""
    for part in _factors(factor):
        gradient = gradient * part
    return gradient


def _factors(factor: float) -> list[float]:
    """Factors that float32 can hold to its full precision, whose product is `factor`; itself alone, but for extreme ones.

    All but the last of them are powers of two, which round nothing.
    """
    parts = []
    while not (_SMALLEST <= abs(factor) <= _LARGEST) and factor != 0.0 and math.isfinite(factor):
        parts.append(_STRIDE if abs(factor) > 1.0 else 1.0 / _STRIDE)
        factor /= parts[-1]
    return [*parts, factor]


def _with_memory(gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients that have memory of their own to compare, and the part of each that this rank holds."""
    with torch.no_grad():
        existing = [(gradient, local_part(gradient)) for gradient in gradients if gradient is not None]
    plain = [(gradient, part) for gradient, part in existing if type(part) is Tensor and part.layout is torch.strided]
    return [gradient for gradient, _ in plain], [part for _, part in plain]


def _by_kind(gradients: list[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Sorts them by device and dtype; mostly they are of one kind. To ask for devices takes longer than to ask for the host."""
    dtypes = {*map(_DTYPE, gradients)}
    if len(dtypes) == 1 and all(map(_IS_ON_HOST, gradients)):
        return {(_HOST, dtypes.pop()): gradients}
    kind_of_each = [*zip(map(_DEVICE, gradients), map(_DTYPE, gradients), strict=True)]
    if len({*kind_of_each}) == 1:
        return {kind_of_each[0]: gradients}
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for kind, gradient in zip(kind_of_each, gradients, strict=True):
        kinds.setdefault(kind, []).append(gradient)
    return kinds


class _OnHost(dict[tuple[torch.device, torch.dtype], bool]):
    """Whether the host reads gradients of a kind without waiting for a device; asked once for each kind."""

    def __missing__(self, kind: tuple[torch.device, torch.dtype]) -> bool:
        self[kind] = answer = is_on_host(kind[0])
        return answer


def _length(kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]], known: _OnHost) -> float | Tensor:
    """The L2 norm over all gradients of all kinds: a number if all are on the CPU, or else a tensor on one device, not read."""
    on_host: list[float] = []
    elsewhere: list[Tensor] = []
    for kind, gradients in kinds.items():
        wide = None if kind[1] in _WIDE or kind[1].is_complex else torch.float32
        if known[kind]:
            left, tables = (gradients, []) if max(map(Tensor.numel, gradients)) < _CUT else _cut(gradients)
            for table in tables:
                on_host += torch.linalg.vector_norm(table, dim=1, dtype=wide).tolist()
            on_host += map(Tensor.item, foreach_norm(left, 2.0, dtype=wide))
        else:
            elsewhere.append(torch.stack(foreach_norm(gradients, 2.0, dtype=wide)))
    if not elsewhere:
        return math.hypot(*on_host)
    home = elsewhere[0].device
    exact = torch.float32 if home.type == "mps" else torch.float64
    norms = [part.to(home, exact) for part in elsewhere]
    if on_host:
        norms.append(torch.tensor(on_host, dtype=exact).to(home))
    return torch.linalg.vector_norm(norms[0] if len(norms) == 1 else torch.cat(norms))  # type: ignore[no-any-return]


def _scaled_length(gradients: list[Tensor]) -> float:
    """The L2 norm over all of them, each divided by the largest element before it is squared."""
    kinds = _by_kind([gradient for gradient in gradients if gradient.numel() > 0])
    peaks: list[float] = []
    for same in kinds.values():
        peaks += torch.stack(foreach_norm(same, math.inf)).tolist()  # sync
    largest = max(peaks, default=0.0)
    if largest == 0.0 or not all(map(math.isfinite, peaks)):
        return sum(peaks)
    lengths: list[float] = []
    for (device, dtype), same in kinds.items():
        wide = torch.promote_types(dtype, torch.float32)
        exact = None if dtype.is_complex or device.type == "mps" else torch.float64
        scaled = [torch.linalg.vector_norm(gradient.to(wide) / largest, dtype=exact) for gradient in same]
        lengths += torch.stack(scaled).tolist()  # sync
    return largest * math.hypot(*lengths)


def _cut(gradients: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Cuts large ones into rows; gives what is left of each, and tables of rows.

    The rows of a table are read by as many threads as there are; `foreach_norm` reads with one. As the rows are always the
    same, the sum is too, whatever the number of threads.
    """
    left, tables = [], []
    for gradient in gradients:
        part = gradient
        if gradient.numel() >= _CUT and is_dense(gradient):
            flat = gradient.as_strided((gradient.numel(),), (1,))  # in the order of memory, which a norm does not depend on
            whole = flat.numel() // _ROW * _ROW
            tables.append(flat[:whole].view(-1, _ROW))
            part = flat[whole:]
        left.append(part)
    return left, tables
