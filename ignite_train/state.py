"""TrainState: counters, latest output, metrics and what forward carries; each attribute is declared here."""

from __future__ import annotations

import copy
import math
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from ignite.engine import CallableEventWithFilter, State
from torch import Tensor

from ignite_train.arguments import MAPPING, SEQUENCE, check_fields, describe
from ignite_train.events import EVENT_COUNTERS
from ignite_train.forward import TERM, ForwardOutput
from ignite_train.internals.of_torch import pytree
from ignite_train.other_words import refuse_attribute

__all__ = ["Carried", "EvaluatorState", "SkippedReason", "TrainState", "UpdateOutput"]

SkippedReason = Literal["overflow", "nonfinite", "no_samples"]
"""Why an update moved nothing: the scaled gradients overflowed, they are not finite, or no rank had a sample."""


@dataclass(frozen=True)
class UpdateOutput:
    """The record of one update. Every number is over all micro-batches and ranks, and bitwise the same on every rank.

    Attributes:
        loss: Σloss / Σsample_size; NaN if there was no sample.
        sample_size: Σsample_size.
        grad_norm: L2 norm over all parameters of the optimizer, or of all optimizers: unscaled, normalised, before clipping.
        clip_coefficient: what clipping multiplied the gradient by; 1.0 if it was left alone. If each optimizer has a limit of
            its own, it is the smallest coefficient.
        learning_rates: of each parameter group, as this update used them; of several optimizers, those of the first one first.
        loss_scale: the scale this update's backward used; 1.0 without loss scaling.
        num_micro_batches: how many micro-batches took part. Each part of one that was halved, because memory ran out, counts as
            one.
        num_out_of_memory: how often forward or backward ran out of memory and was recovered from.
        logs: the sum of each entry of the `logs` that `forward` returned; of a `Mean`, that of its values times sample size.
        log_weights: the sums of the denominators of logs that have their own, as a `Mean` has; others are per `sample_size`.
        grad_norms: where `max_grad_norm` is a mapping, the norm over the parameters of each optimizer, by its name.
        clip_coefficients: where `max_grad_norm` is a mapping, the coefficient of each optimizer, by its name.
        num_evaluations: how often forward and backward have run over the group: once, or more often with `closure`. Loss and
            norm are those of the first time; those that were not finite, if an evaluation ended the update.
        name: what `trainer.update(..., name=...)` has called it; None for all others.
        num_ranks_skipped: with `reduction="local"`, how many ranks did not step while others did: their gradients were not
            finite, or they had no sample. Loss, sample size, logs and norm are then those of the ranks that stepped.
        applied: whether the parameters moved; with `reduction="local"`, those of some rank.
        skipped_reason: why not, or None.
    """

    loss: float
    sample_size: float
    grad_norm: float
    clip_coefficient: float = 1.0
    learning_rates: tuple[float, ...] = ()
    loss_scale: float = 1.0
    num_micro_batches: int = 1
    num_out_of_memory: int = 0
    logs: Mapping[str, float] = field(default_factory=dict)
    skipped_reason: SkippedReason | None = None
    log_weights: Mapping[str, float] = field(default_factory=dict)
    grad_norms: Mapping[str, float] = field(default_factory=dict)
    clip_coefficients: Mapping[str, float] = field(default_factory=dict)
    num_evaluations: int = 1
    num_ranks_skipped: int = 0
    name: str | None = None

    @classmethod
    def from_update(cls, **fields: Any) -> UpdateOutput:
        """As `UpdateOutput(**fields)`, in a tenth of the instructions: a frozen dataclass sets each field by a call of its own.

        Every field that has a mapping must be given, and names are not checked.
        """
        record = object.__new__(cls)
        record.__dict__.update(fields)  # a field that is left out is found on the class, which has its default
        return record

    __iter__ = None  # it has no elements, although it answers `output["loss"]`

    def __getitem__(self, name: Any) -> Any:
        """Answers `output["loss"]`."""
        raise TypeError(f"UpdateOutput has attributes and no keys, got [{name!r}]; write state.update_output.{name}")

    if not TYPE_CHECKING:  # or else each attribute would be known

        def __getattr__(self, name: str) -> Any:
            """Answers `output.item()`."""
            raise refuse_attribute(self, name)

    @property
    def applied(self) -> bool:
        """Whether the parameters moved."""
        return self.skipped_reason is None

    @property
    def losses(self) -> dict[str, float]:
        """Where forward returned several losses with denominators of their own, the mean of each; NaN without a sample."""
        sizes = self.sample_sizes
        return {name: self.logs[TERM + name] / size if size else math.nan for name, size in sizes.items()}

    @property
    def sample_sizes(self) -> dict[str, float]:
        """The denominators of `losses`, of which `sample_size` is the sum."""
        return {name.removeprefix(TERM): size for name, size in self.log_weights.items() if name.startswith(TERM)}


class Carried(UserDict[Any, Any]):
    """A dict for what forward carries from micro-batch to micro-batch: an RNN's hidden state, a queue, a centre.

    Each rank has its own. It is saved with every checkpoint, so it may hold what a checkpoint can: tensors, arrays, numbers,
    strings, and lists, tuples and dicts of them. It is taken back with every forward that does not count: of a micro-batch
    that ran out of memory, of a placeholder, of the search for a value that is not finite, of an update that broke off with
    an exception, and of an update that was skipped because it overflowed or was not finite. (Otherwise a NaN that such an
    update leaves here would spoil all updates after it.) It is not emptied between epochs.

    A value is stored without the graphs of its tensors when it is assigned to a key, also inside lists, tuples and dicts, so
    the memory of a micro-batch is freed with it. Code that appends a tensor to a stored list must call `detach` on it first.
    Read values from here each time: after an update was taken back they are other objects.

    The price is a copy of the values in each update, and nothing where the dict is empty.
    """

    def __init__(self, values: Mapping[Any, Any] | None = None) -> None:
        self._before: dict[Any, Any] | None = None  # while an update runs: copies of the values at its beginning
        super().__init__(values)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, _without_graphs(value))

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """The value of a key; where it is missing, `default` is stored first. A list that is returned may be appended to."""
        if key not in self:
            self[key] = default
        return self[key]

    def __ior__(self, other: Any) -> Self:  # type: ignore[misc]  # UserDict goes past __setitem__
        self.update(other)
        return self

    def replace(self, values: Mapping[Any, Any]) -> None:
        """Holds copies of `values`, and nothing else."""
        self.data = _copies(values)

    def copies(self) -> dict[Any, Any]:
        """Copies of the current values, for `replace`."""
        return _copies(self.data)

    def begin_update(self) -> None:
        """Remembers the values, for `rewind` and `roll_back`."""
        self._before = _copies(self.data) if self.data else {}

    def end_update(self) -> None:
        """Keeps what the update has made of them."""
        self._before = None

    def rewind(self) -> None:
        """Goes back to the beginning of the running update, to run its forwards again."""
        if self._before is not None:
            self.replace(self._before)

    def roll_back(self) -> None:
        """Goes back to the beginning of the running update, which does not count. Does nothing where none is running."""
        if self._before is not None:
            self.data, self._before = self._before, None

    def state_dict(self) -> dict[str, Any]:
        """The values after the latest update that is done, not copied, and what kind of device each tensor is on."""
        values = dict(self.data if self._before is None else self._before)
        devices = [leaf.device.type for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
        return {"values": values, "devices": devices}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Holds copies of the values that `state_dict` gave, and nothing else. A checkpoint gives them on the CPU.

        Raises:
            ValueError: `state_dict` did not give them.
        """
        check_fields("Carried", state_dict, {"values": MAPPING, "devices": SEQUENCE})
        values, devices = dict(state_dict["values"]), state_dict["devices"]
        num_tensors = sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(values))
        if len(devices) != num_tensors:
            raise ValueError(f"state_dict must be what Carried.state_dict() gave, got {describe(state_dict)}")
        accelerator, kinds = torch.accelerator.current_accelerator(), iter(devices)

        def moved(leaf: Any) -> Any:
            on_accelerator = isinstance(leaf, Tensor) and next(kinds) != "cpu" and accelerator is not None
            return leaf.to(accelerator) if on_accelerator else leaf

        self._before = None
        self.replace(pytree.tree_map(moved, values))


class _Carrying(State):
    """A state with what forward carries from micro-batch to micro-batch."""

    _carried: Carried

    @property
    def carried(self) -> Carried:
        """See `Carried`. Assigning a mapping puts copies of its values there."""
        return self._carried

    @carried.setter
    def carried(self, values: Mapping[Any, Any]) -> None:
        self._carried.replace(values)


class TrainState(_Carrying):
    """Ignite's state, and the counters of a training run.

    Attributes:
        iteration: updates, 1-based: the number of the one that is running or ran last.
        epoch: 1-based number of the epoch that is running or ran last.
        epoch_length: updates in this epoch, agreed over the ranks. If the loader has no length, those of the epoch before,
            and None in the first.
        num_steps: updates that moved the parameters.
        num_skipped: updates that did not.
        num_micro_batches: micro-batches this rank has started.
        batch: the group of this update: a list of micro-batches. With worker processes the later ones may still be on their
            way; they are waited for where they are asked for.
        forward_output: what `forward` returned for the running micro-batch; None outside of it.
        update_output: the record of the latest update, set before GRADIENTS_READY; None before the first. Forward finds that of
            the update before, also where it is run again; an update that an exception broke off before its step leaves it. In
            GRADIENTS_REDUCED it is the record so far, whose norm is of the gradients before handlers change them.
        output: what Ignite's handlers read: what `output_transform` made of `update_output`; by default the same object, and
            with `create_supervised_trainer` the loss. After a resume it is made of the record that was saved; it is None until
            the first update where `output_transform` needs a micro-batch too.
        metrics: numbers of handlers, by name.
        carried: state that forward keeps from micro-batch to micro-batch on this rank; see `Carried`.
        micro_batch_in_group: index of the running micro-batch in its group, from 0; None outside of one, and in a forward that
            is run on a placeholder.
        group_size: micro-batches of this rank in the running group; None where there is none, and where they arrive one by one
            from a loader without a length. The same in the whole update.
        progress: the fraction of the run that was done before the running update, or the latest; in [0, 1). None without a
            limit, or where the length of an epoch is unknown.
    """

    num_steps: int
    num_skipped: int
    num_micro_batches: int
    forward_output: ForwardOutput | None
    update_output: UpdateOutput | None
    output: Any
    batch: Any
    micro_batch_in_group: int | None
    # Until a trainer tells, and in a copy, which has no trainer.
    _progress: Callable[[], float | None] = staticmethod(lambda: None)
    _size_of: Callable[[Any], int | None] = staticmethod(len)  # of a group

    def __init__(self) -> None:
        # Ignite keeps one map of events to counters for the whole process, which any other engine can re-point.
        self.event_to_attr = {**EVENT_COUNTERS}
        super().__init__(num_steps=0, num_skipped=0, num_micro_batches=0, forward_output=None, update_output=None)
        self.micro_batch_in_group = None
        self._carried = Carried()

    if not TYPE_CHECKING:  # or else each attribute would be known

        def __getattr__(self, name: str) -> Any:
            """Answers an attribute of another library."""
            raise refuse_attribute(self, name)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has everything but the functions of the trainer."""
        return {name: value for name, value in vars(self).items() if name not in ("_progress", "_size_of")}

    def __repr__(self) -> str:
        counters = f"{self.num_steps} steps, {self.num_skipped} skipped, {self.num_micro_batches} micro-batches"
        return f"TrainState(epoch {self.epoch}, update {self.iteration}, {counters})"

    @property
    def group_size(self) -> int | None:
        """See above."""
        return None if self.batch is None else self._size_of(self.batch)

    @property
    def progress(self) -> float | None:
        """See above."""
        return self._progress()

    def ask(self, progress: Callable[[], float | None], size_of: Callable[[Any], int | None]) -> None:
        """Has `progress` return what this function does, and `group_size` what the other does. A trainer calls it."""
        self._progress, self._size_of = progress, size_of

    def get_event_attrib_value(self, event_name: Any) -> int:
        """The counter that a filter on `event_name` counts.

        Raises:
            RuntimeError: the event has no counter.
        """
        attribute = self.event_to_attr.get(event_name)
        if attribute is None:
            name = event_name.name if isinstance(event_name, CallableEventWithFilter) else event_name
            raise RuntimeError(f"{name} has no counter: attach to it without every=, once=, before= and after=")
        value: int = getattr(self, attribute)
        return value


class EvaluatorState(_Carrying):
    """Ignite's state of one evaluation.

    Attributes:
        forward_output: what `forward` returned for the latest micro-batch.
        output: its `outputs`, or the `ForwardOutput` where it has none.
        carried: what forward carries from micro-batch to micro-batch of this evaluation; a trainer's is another.
        micro_batch_in_group: 0, because each micro-batch stands alone.
        group_size: 1.
        progress: None.
    """

    micro_batch_in_group = 0
    group_size = 1
    progress: float | None = None

    forward_output: ForwardOutput | None
    output: Any

    def __init__(self) -> None:
        super().__init__(forward_output=None)
        self._carried = Carried()

    def __repr__(self) -> str:
        return f"EvaluatorState({', '.join(f'{name}={value!r}' for name, value in self.metrics.items())})"


def _has_graph(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _without_graphs(value: Any) -> Any:
    """The value itself where no tensor in it has a graph. Otherwise a copy with new containers: the user's are in use."""
    if not any(map(_has_graph, pytree.tree_leaves(value))):
        return value
    return pytree.tree_map(lambda leaf: leaf.detach() if _has_graph(leaf) else leaf, value)


def _copies(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Copies of all tensors without their graphs, of all containers, and of whatever else is in them."""
    if not values:
        return {}

    def copied(leaf: Any) -> Any:
        return leaf.detach().clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)

    result: dict[Any, Any] = pytree.tree_map(copied, dict(values))
    return result
