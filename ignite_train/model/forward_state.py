"""The list of what running forward may change besides gradients, to go back to where forward is run again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from itertools import chain
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ignite_train.errors import TrainingError
from ignite_train.internals.of_torch import buffers_of, parameters_of, pytree, version_of
from ignite_train.model.buffer_rollback import BufferRollback
from ignite_train.model.in_full import in_full, put_entries_back
from ignite_train.model.magnitude import magnitude
from ignite_train.model.memory_layout import has_plain_memory
from ignite_train.model.micro_batch_rollback import MicroBatchRollback, content_of, same_content
from ignite_train.model.objects_used import CONTAINERS, MAX_ENTRIES, attributes_of, is_accounted_for, objects_used
from ignite_train.model.random_state import NUMPY, PYTHON, Generator, RandomState, generators_within
from ignite_train.state import Carried

__all__ = ["ForwardMark", "ForwardState"]

_OF_EACH_MODULE = vars(nn.Module()).keys()
_WRAPPERS = (DistributedDataParallel, FSDPModule)  # their reductions are under way, whether the forward counts or not


class _Kept(NamedTuple):
    """A tensor that forward may move.

    Attributes:
        tensor: the tensor, whose `.data` may become another.
        version: how often torch had written to it.
        alias: its memory as it was.
        values: a copy; or its magnitude, if `is_magnitude`.
    """

    tensor: Tensor
    version: int
    alias: Tensor
    values: Tensor
    is_magnitude: bool

    def has_moved(self) -> bool:
        """Whether something has written to it. Its values are compared too: a change of `.data` has no version."""
        if version_of(self.tensor) != self.version or _address(self.tensor) != _address(self.alias):
            return True
        now = magnitude(self.alias) if self.is_magnitude else self.alias
        return not same_content(content_of(now), content_of(self.values))


class _Places(NamedTuple):
    """Versions and addresses of tensors, to see which of them have moved."""

    tensors: list[Tensor]
    versions: list[int]
    addresses: list[int]

    def moved(self) -> list[Tensor]:
        now = _places(self.tensors)
        if now.versions == self.versions and now.addresses == self.addresses:
            return []
        pairs = zip(self.tensors, now.versions, self.versions, now.addresses, self.addresses, strict=True)
        return [tensor for tensor, *places in pairs if places[0] != places[1] or places[2] != places[3]]


class ForwardMark(NamedTuple):
    """How things were at a mark, for `ForwardState.put_back`, which may be given it several times."""

    random_state: RandomState
    carried: dict[Any, Any]
    buffers: BufferRollback
    attributes: list[tuple[dict[str, Any], dict[str, Any]]]
    containers: list[tuple[Any, Any]]
    arrays: MicroBatchRollback
    kept: list[_Kept]
    places: _Places
    is_last_look: bool

    def moved(self) -> list[Tensor]:
        """Parameters, and tensors in attributes of modules, that are not what they were."""
        return [*[one.tensor for one in self.kept if one.has_moved()], *self.places.moved()]


class ForwardState:
    """All that a forward may change besides gradients: marked before it, and put back so that it leaves no trace.

    - The random generators: torch's of the CPU and of the model's devices, Python's and NumPy's, and those that the modules, or
      forward and what it refers to, hold.
    - The buffers of the modules; their attributes, with the entries of the lists, dicts, sets and deques among these, and the
      values of arrays and tensors.
    - What forward carries, and what it writes into the micro-batches that are named.
    - Parameters that forward moves, such as a target network's. Until trained parameters have stepped all of them are copied;
      from then on those are that were seen to move. Of the others version and address are compared, and one that moves later
      is refused by its name.

    The modules are the model's, and those that forward refers to. What forward keeps in an object of its own, in a global
    variable or in a container inside of another one is not put back, and stays as the run has left it.

    Args:
        module: the model.
        carried: what forward carries.
        forward: the user's; what it refers to is looked for in the marks 1, 2, 4, 8, ....
        copies: whether all parameters are copied at first. Otherwise their magnitudes are taken at first, and those are copied
            that were seen to move in a forward that was kept.
        watches_tensors: False where nothing can write into parameters and buffers, as in a trial that breaks off what does.
            They are neither copied nor read then; buffers that forward assigns are put back all the same, and so are the
            containers and simple objects that forward refers to, of which a trial must leave no trace.

    Attributes:
        modules: those that the latest mark has found, with the modules in them.
    """

    def __init__(
        self,
        module: nn.Module,
        carried: Carried | None = None,
        forward: Any = None,
        *,
        copies: bool = True,
        watches_tensors: bool = True,
    ) -> None:
        self._module, self._carried, self._forward = module, Carried() if carried is None else carried, forward
        self._copies_at_first, self._looks_at_values = copies, watches_tensors
        self._watches_tensors = watches_tensors
        self._trained: list[float] = []  # magnitudes at the first mark: a target that equals them does not move until they have
        self._moving: dict[int, Tensor] = {}
        self._num_marks = 0
        self.modules: list[nn.Module] = []
        self._devices: list[torch.device] = []
        self._reached: list[Any] = []  # by way of forward
        self._used: list[nn.Module] = []
        self._generators: list[Generator] = []

    @property
    def is_complete(self) -> bool:
        """Whether all that forward refers to, as found by the latest mark, is of a kind whose changes can be put back."""
        return all(map(is_accounted_for, self._reached))

    def mark(self, micro_batches: Any = ()) -> ForwardMark:
        """Remembers how things are.

        Args:
            micro_batches: those into which forward may write, in any structure.
        """
        self._num_marks += 1
        self._find(is_look=self._num_marks & (self._num_marks - 1) == 0)
        buffers = BufferRollback(self._everything() if self._watches_tensors else nn.Module())
        buffers.mark()
        attributes = [vars(one) for one in self.modules if not isinstance(one, _WRAPPERS)]
        values = [values[name] for values in attributes for name in values.keys() - _OF_EACH_MODULE]
        containers = [one for one in values if isinstance(one, CONTAINERS) and len(one) <= MAX_ENTRIES]
        values += [entry for one in containers for entry in (one.values() if isinstance(one, dict) else one)]
        if not self._watches_tensors:
            attributes += [buffers_of(one) for one in self.modules]
            attributes += [held for one in self._reached if (held := attributes_of(one)) is not None]
            containers += [one for one in self._reached if type(one) in CONTAINERS and len(one) <= MAX_ENTRIES]
        return ForwardMark(
            RandomState(self._devices, self._generators),
            self._carried.copies(),
            buffers,
            [(one, {**one}) for one in attributes],
            [(one, copy(one)) for one in containers],
            MicroBatchRollback([micro_batches, [one for one in values if type(one) is np.ndarray]]),
            *self._look_at([one for one in values if isinstance(one, Tensor)]),
            self._looks_at_values and self._have_stepped(),
        )

    def find_generators(self) -> tuple[list[torch.device], list[Generator]]:
        """Looks for what forward may draw from: the devices, whose generators are torch's, and the other generators."""
        self._find(is_look=True)
        return self._devices, self._generators

    def keep(self, mark: ForwardMark) -> None:
        """Keeps the changes of a forward since `mark`, and notes the parameters that it has moved."""
        self._moving |= {id(one): one for one in mark.moved()}
        self._looks_at_values &= not mark.is_last_look

    def written(self, mark: ForwardMark, *, stepped: Iterable[Tensor] = ()) -> dict[str, dict[str, Tensor]]:
        """Tensors that forward may have written to since `mark`, by kind and name; of parameters, the moved ones.

        Args:
            mark: which one.
            stepped: parameters that are left out.
        """
        left = {id(one) for one in stepped}
        names = self._names()
        moved = {names.get(id(one), str(id(one))): one for one in mark.moved() if id(one) not in left}
        return {**self._always_written(mark), "moved parameter": moved}

    def copies(self, mark: ForwardMark) -> dict[str, dict[str, Tensor]]:
        """The values at `mark`, by the names of `written`. Call it right after `mark`."""
        copied = {kind: {name: one.clone() for name, one in some.items()} for kind, some in self._always_written(mark).items()}
        names, kept = self._names(), [one for one in mark.kept if not one.is_magnitude]
        return {**copied, "moved parameter": {names.get(id(one.tensor), str(id(one.tensor))): one.values for one in kept}}

    def _always_written(self, mark: ForwardMark) -> dict[str, dict[str, Tensor]]:
        carried = [one for one in pytree.tree_leaves(dict(self._carried)) if isinstance(one, Tensor)]
        return {
            "buffer": {name: one for name, one in self._everything().named_buffers() if _is_plain(one)},
            "carried value": {str(number): one for number, one in enumerate(carried)},
            "array of the micro-batch": {str(number): torch.as_tensor(one) for number, one in enumerate(mark.arrays.arrays)},
        }

    def _names(self) -> dict[int, str]:
        return {id(one): name for name, one in self._everything().named_parameters()}

    def _everything(self) -> nn.Module:
        return nn.ModuleDict({"model": self._module, **{f"used {number}": one for number, one in enumerate(self._used)}})

    def put_back(self, mark: ForwardMark, *, stepped: Iterable[Tensor] = ()) -> None:
        """Puts everything back to where it was at `mark`.

        Args:
            mark: which one.
            stepped: parameters that something else has moved too, such as an optimizer, and that stay as they are.

        Raises:
            TrainingError: forward has moved a parameter that was not copied. Everything else is back.
        """
        left = [*stepped]
        in_full(lambda: self._put_back(mark, left))

    def _put_back(self, mark: ForwardMark, stepped: Sequence[Tensor]) -> None:
        for now, before in mark.attributes:
            if now.keys() != before.keys() or any(now[name] is not value for name, value in before.items()):
                put_entries_back(now, before)
        for container, entries in mark.containers:
            _fill(container, entries)
        mark.buffers.roll_back()
        mark.arrays.roll_back()
        self._carried.replace(mark.carried)
        mark.random_state.restore()
        self._put_tensors_back(mark, stepped)

    # --- what there is --------------------------------------------------------------------------------------------------------

    def _find(self, *, is_look: bool) -> None:
        """Looks for the modules, and where these are others or it is time to look, for the generators."""
        forward = self._forward
        if is_look and forward is not None:
            self._reached = [*objects_used([forward, self._module])]
            self._used = [one for one in self._reached if isinstance(one, nn.Module) and one is not self._module]
        modules = [*dict.fromkeys(one for owner in (self._module, *self._used) for one in owner.modules())]
        if not is_look and modules == self.modules:
            return
        self.modules = modules
        self._devices = [*{parameter.device for parameter in self._module.parameters() if not parameter.is_cpu}]
        owners = [*modules, forward.__self__ if isinstance(forward, MethodType) else forward]
        found = {id(one): one for one in (PYTHON, NUMPY, *self._reached) if isinstance(one, Generator)}
        found |= {id(one): one for owner in owners for one in generators_within(owner).values()}
        found.pop(id(torch.default_generator), None)
        self._generators = [*found.values()]

    # --- parameters -----------------------------------------------------------------------------------------------------------

    def _look_at(self, attributes: Sequence[Tensor]) -> tuple[list[_Kept], _Places]:
        parameters = [one for module in self.modules for one in parameters_of(module).values() if one is not None]
        tensors = [one for one in {id(one): one for one in (*parameters, *attributes)}.values() if not one.is_inference()]
        looked_at = [one for one in tensors if (self._looks_at_values or id(one) in self._moving) and _is_plain(one)]
        kept = [self._kept(one) for one in looked_at]
        known = {id(one) for one in looked_at}
        return kept, _places([one for one in tensors if id(one) not in known] if known else tensors)

    def _have_stepped(self) -> bool:
        """Whether trained parameters are not what they were at the first mark."""
        parameters = [one for one in self._module.parameters() if one.requires_grad and _is_plain(one)]
        magnitudes = [float(magnitude(one.detach())) for one in parameters]  # sync, until the first step
        self._trained = self._trained or magnitudes
        return magnitudes != self._trained

    def _kept(self, tensor: Tensor) -> _Kept:
        alias = tensor.detach()
        is_copied = self._copies_at_first or id(tensor) in self._moving
        return _Kept(tensor, version_of(tensor), alias, alias.clone() if is_copied else magnitude(alias), not is_copied)

    @torch.no_grad()
    def _put_tensors_back(self, mark: ForwardMark, stepped: Sequence[Tensor]) -> None:
        left = {id(one) for one in stepped}
        lost = [one for one in mark.places.moved() if id(one) not in left]
        moved = [one for one in mark.kept if id(one.tensor) not in left and one.has_moved()]
        # A module may hold the memory of its parameters in another tensor too, as one that packs them does.
        memory = {_memory(one) for one in (*(one.alias for one in moved), *lost)}
        shared = [one for one in stepped if _memory(one) in memory] if memory else []
        values = [one.clone() for one in shared]
        for one in moved:
            self._moving[id(one.tensor)] = one.tensor
            if one.is_magnitude:
                lost.append(one.tensor)
                continue
            if _address(one.tensor) != _address(one.alias):
                one.tensor.data = one.alias
            one.alias.copy_(one.values)
        for parameter, value in zip(shared, values, strict=True):
            parameter.data.copy_(value)  # which is no new version: it has not moved
        self._looks_at_values &= not mark.is_last_look
        memory = {_memory(one) for one in shared}
        lost = [one for one in lost if isinstance(one, nn.Parameter) or _memory(one) not in memory]
        if lost:
            name = self._names().get(id(lost[0]), "a tensor in an attribute")
            raise TrainingError(
                f"forward was run and had to be taken back, and it has moved {name}, which was not copied; move it in a "
                "handler of STEP_COMPLETED, or make it a buffer"
            )


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and has_plain_memory(tensor)


def _places(tensors: list[Tensor]) -> _Places:
    return _Places(tensors, [*map(version_of, tensors)], [*map(_address, tensors)])


def _address(tensor: Tensor) -> int:
    """Where it begins in memory; 0 for one that has no such place."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _memory(tensor: Tensor) -> int:
    """Where the memory begins that it has in common with its views; its own identity for one that has no such place."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def _fill(container: Any, entries: Any) -> None:
    """Puts the entries of a container back, if they are others."""
    now, before = ([*one.items()] if isinstance(one, dict) else [*one] for one in (container, entries))
    flat = [[*chain.from_iterable(one)] if isinstance(container, dict) else one for one in (now, before)]
    if len(flat[0]) == len(flat[1]) and all(one is other for one, other in zip(*flat, strict=True)):
        return
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(entries)
    else:
        container.extend(entries)
