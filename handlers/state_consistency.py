"""Checking that all ranks have the same parameters, optimizer state and counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from inspect import signature
from numbers import Number
from typing import Any, NamedTuple, Protocol

from ignite.engine import Events, RemovableEventHandle
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ignite_train.arguments import did_you_mean, named_ranks
from ignite_train.errors import TrainingError
from ignite_train.events import Event, every
from ignite_train.internals.of_torch import RunningNorm
from ignite_train.kinds_of_handlers import PiggybackHandler
from ignite_train.model.optimizers import OneOrSeveralOptimizers, as_optimizers
from ignite_train.model.tensor_digests import content_digest, tensor_digests
from ignite_train.ranks import collectives
from ignite_train.ranks.digest_words import differ, differ_on_device, digest_words, with_squares
from ignite_train.ranks.root_mesh import copies, part_and_copy
from ignite_train.trainer import Trainer

__all__ = ["StateConsistency", "StateMismatchError"]

_COUNTERS = ("num_steps", "num_skipped", "iteration", "epoch")  # micro_batch counts what one rank had
_WORDS = 4  # of 16 bits: a digest of 64
_NAMED = 5  # tensors and values in the message


class StateMismatchError(TrainingError, RuntimeError):
    """The state differs between the ranks. Raised on every rank, in the update after the check.

    Attributes:
        update: the update after which (`state.iteration` at which) the state differed.
        names: the tensors and values that differ, in the order of the state.
        ranks: the ranks that differ from the majority; empty without a majority, as with two ranks.
        most_parameters_differ: whether more than half of the trainable parameters do, as when gradients were never reduced.
    """

    def __init__(
        self, update: int, names: tuple[str, ...], ranks: tuple[int, ...], *, most_parameters_differ: bool = False
    ) -> None:
        self.update, self.names, self.ranks = update, names, ranks
        self.most_parameters_differ = most_parameters_differ
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        who = (
            f"{named_ranks(ranks, 'differs', 'differ')} from the majority"
            if ranks
            else "no majority of the ranks agrees, so it is unknown which are right"
        )
        own = " (name it in own_buffers if each rank fills it from its own data)" if names[0].startswith("buffer ") else ""
        question = (
            "does forward call the model it is given as its argument, outside of no_sync()? Do all ranks update several "
            "trainers in the same order? If so, "
            if most_parameters_differ
            else ""
        )
        super().__init__(
            f"update {update}: the ranks differ in {', '.join(names[:_NAMED])}{more}{own}; {who}; {question}look for code that "
            "changes the state of one rank alone, and resume from a checkpoint no newer than the last check that passed"
        )


class _Check(NamedTuple):
    """A comparison: its update, and a digest of 64 bits for each tensor and value by name.

    Attributes:
        update: the update.
        digests: of what all ranks hold alike.
        shards: of the parts that other ranks hold too, as with `fully_shard` over a mesh of two dimensions (HSDP), or with
            tensor parallel and replicas.
        holders: which part each of these is, on this rank.
    """

    update: int
    digests: dict[str, int]
    shards: dict[str, int]
    holders: dict[str, _Shard]

    @property
    def digest(self) -> int:
        """The digest of everything that all ranks hold alike, in any order."""
        return sum(self.digests.values())

    def words_of_shards(self) -> list[float]:
        """Four words whose sum over all ranks is zero if each part is the same on all ranks that hold it."""
        parts = ((digest_words(digest, _WORDS), self.holders[name].factor) for name, digest in self.shards.items())
        words = [[word * factor for word in of_part] for of_part, factor in parts]
        return [sum(column) for column in zip(*words, strict=True)] if words else [0.0] * _WORDS


class _Shard(NamedTuple):
    """Which part of a parameter a rank holds, where several ranks hold the same.

    Attributes:
        part: the coordinates of the rank in the dimensions of the mesh over which it is cut.
        copy: the coordinates in the dimensions over which it is replicated.
        copies: how many ranks hold the same.
    """

    part: tuple[int, ...]
    copy: tuple[int, ...]
    copies: int

    @property
    def factor(self) -> int:
        """The factor of this rank's digest, chosen so that the sum over all ranks is zero if all copies are the same."""
        return -1 if any(self.copy) else self.copies - 1


class _Schedule(Protocol):
    def state_dict(self) -> Mapping[str, Any]: ...


class StateConsistency(PiggybackHandler):
    """Compares the state of all ranks bit by bit, and raises `StateMismatchError` on each of them if it differs.

    The state is: parameters, buffers, the optimizer's state and settings, the schedule, the loss scale and the counters
    `num_steps`, `num_skipped`, `iteration` and `epoch`. Gradients are averaged over ranks, so no gradient norm and nothing else
    in training shows that a parameter, a moment or a learning rate differs on one rank.

    A check reads the state once and makes a digest of it, which travels with the statistics of the next update: the result is
    known one update later and costs no collective of its own; the last check of a run takes one. A single bit that differs is
    always found; for other differences two digests are equal with a probability of about 2⁻⁶⁴. The digest does not protect
    against deliberate changes.

    State that differs between ranks by design is left out: the running statistics of normalisation layers, shards that no other
    rank holds, and objects that are neither tensors nor numbers nor strings. Shards that several ranks hold, as with
    `fully_shard` over a mesh of two dimensions (HSDP), are compared among these ranks. Optimizers must keep the same state on
    all ranks, as torch's do, except for `ZeroRedundancyOptimizer`. With `reduction="local"` it compares after the updates in
    which `OuterOptimizer` has made the replicas equal; pass `optimizer_state=False` there. All ranks must attach it.

    Args:
        model: the model, in `DistributedDataParallel` or not.
        optimizer: its optimizer, or several as `create_trainer` takes them.
        scheduler: the learning-rate schedule; any object with a `state_dict`.
        own_buffers: names of buffers that each rank fills from its own data; they are left out too.
        optimizer_state: whether the optimizer's state is compared, with what it keeps in its groups beside the arguments of its
            class. Without it a check costs less, and a moment that differs is found by the parameters that it has moved.

    Raises:
        TypeError: `model` is not a module, or `optimizer` not an optimizer.
        ValueError: a name in `own_buffers` is not a buffer of the model.

    Example:
        >>> handle = StateConsistency(model, optimizer).attach(trainer, Events.ITERATION_COMPLETED(every=2))
        >>> trainer.run(data, max_epochs=1).num_steps
        4
    """

    not_elastic = "it compares the ranks of a process group, and replicas that come and go are in none"
    of_one_trainer = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: OneOrSeveralOptimizers,
        *,
        scheduler: _Schedule | None = None,
        own_buffers: Collection[str] = (),
        optimizer_state: bool = True,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {model!r:.60} of type {type(model).__name__}")
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        several = as_optimizers(optimizer)
        self._optimizers = {"optimizer": several} if isinstance(several, Optimizer) else several.named
        self.optimizer, self.scheduler, self.optimizer_state = optimizer, scheduler, optimizer_state
        buffers = dict(self.model.named_buffers())
        for name in own_buffers:
            if name not in buffers:
                raise ValueError(f"own_buffers must be names of buffers of model, got {name!r}{did_you_mean(name, buffers)}")
        self.own_buffers = frozenset(own_buffers)
        self.payload_size = 3 * _WORDS + 1
        self._due: _Check | None = None  # not yet sent
        self._sent: _Check | None = None  # on its way
        self._has_moved = False  # whether there was an update since `settle`

    def attach(self, trainer: Trainer, event: Event = every(100, Events.ITERATION_COMPLETED)) -> RemovableEventHandle:
        """Takes the digest at `event`, which must fire in the same updates on all ranks, before other handlers there."""
        return super().attach(trainer, event)

    def __call__(self, trainer: Trainer) -> None:
        """Takes the digest, unless replicas that train locally differ now. Synchronises with the device."""
        if collectives.world_size() > 1 and trainer.replicas.are_equal:
            self._due = self._check(trainer)

    def payload(self) -> Sequence[float]:
        """The four 16-bit words of the digest, their squares, the words of the shards' digest, and a 1 for having a digest.

        All are zero if no check is due. The words of the shards are multiplied so that they sum to zero over ranks that hold
        the same, see `_Shard.factor`.
        """
        self._has_moved = True
        if self._due is not None:
            self._sent, self._due = self._due, None
        if self._sent is None:
            return [0.0] * self.payload_size
        return [*with_squares(digest_words(self._sent.digest, _WORDS)), *self._sent.words_of_shards(), 1.0]

    def vetoes(self, sums: Tensor) -> Tensor:
        """See `Piggyback`: whether the digests differ, or are missing on some rank, which counts as a digest of 0."""
        return differ_on_device(sums[: 2 * _WORDS], collectives.world_size()) | (sums[2 * _WORDS : -1] != 0).any()

    def on_reduced(self, sums: list[float]) -> None:
        """Compares the digests.

        Raises:
            StateMismatchError: the digests differ, or some rank has none because its counters differ.
            ValueError: the states agree, and yet some rank had no digest.
        """
        sent, self._sent = self._sent, None
        present = round(sums[-1])
        if not present:
            return
        world_size = collectives.world_size()
        if present < world_size:
            self._compare(self._check(self.trainer))
            raise ValueError(
                f"event must fire in the same updates on all ranks, got one in which StateConsistency had a digest on "
                f"{present} of {world_size} ranks: attach it alike on all ranks, to an event with the same counter on all"
            )
        if differ(sums[: 2 * _WORDS], world_size) or any(sums[2 * _WORDS : -1]):
            assert sent is not None  # noqa: S101  # all ranks have one
            self._compare(sent)

    def settle(self) -> None:
        """Compares a digest that has not travelled yet: after the last update, or before a save. Collective.

        The handler that is attached by default takes one for this, unless the latest update was compared already. One that the
        user attaches does not: outside of its event the ranks may differ by design.

        Raises:
            StateMismatchError: the digests differ, or some rank has none because its counters differ.
            ValueError: the states agree, and yet some rank had no digest.
        """
        is_compared = self._due is not None or self._sent is not None or not self._has_moved
        if not is_compared and self in self.trainer.default_handlers:
            self(self.trainer)
        self.on_reduced(collectives.total(self.payload()))
        self._has_moved = False

    def _compare(self, check: _Check) -> None:
        """Exchanges all digests and raises if any differ. Collective."""
        checks: list[_Check] = collectives.gather_objects(check)
        names = dict.fromkeys(name for one in checks for name in (*one.shards, *one.digests))
        groups = {name: _holders([one.holders.get(name) for one in checks]) for name in names}
        differing = tuple(
            name
            for name in names
            if _differ([one.digests.get(name) for one in checks])
            or any(_differ([checks[rank].shards.get(name) for rank in group]) for group in groups[name])
        )
        if differing:
            outside = [_outside([one.digest for one in checks], range(len(checks)))]
            for called, group in [(name, group) for name in differing for group in groups[name]]:
                outside.append(_outside([checks[rank].shards.get(called, 0) for rank in group], group))
            ranks = () if None in outside else tuple(sorted({rank for found in outside for rank in found or ()}))
            trained = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
            widespread = 2 * sum(f"parameter {name}" in differing for name in trained) > len(trained)
            raise StateMismatchError(checks[0].update, differing, ranks, most_parameters_differ=widespread)

    def _check(self, trainer: Trainer) -> _Check:
        """Digests of the present state."""
        state = dict(self._state(trainer))
        holders = {name: _shard_of(value) for name, value in state.items() if isinstance(value, DTensor)}
        state = {name: value.to_local() if name in holders else value for name, value in state.items()}
        digests = {
            name: content_digest(name, repr(value).encode()) for name, value in state.items() if not isinstance(value, Tensor)
        }
        digests |= tensor_digests({name: value for name, value in state.items() if isinstance(value, Tensor)})
        whole = {name: digests[name] for name in state if name not in holders}
        return _Check(trainer.state.iteration, whole, {name: digests[name] for name in holders}, holders)

    def _state(self, trainer: Trainer) -> Iterator[tuple[str, Any]]:
        """Tensors and values by name."""
        names: dict[Any, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        yield from _flatten({f"parameter {name}": parameter for parameter, name in names.items()})
        for prefix, module in self.model.named_modules():
            for name, buffer in module.named_buffers(prefix, recurse=False):
                if not isinstance(module, RunningNorm) and name not in self.own_buffers:
                    yield from _flatten({f"buffer {name}": buffer})
        for called, optimizer in self._optimizers.items():
            yield from self._state_of(optimizer, f" of {called}" if len(self._optimizers) > 1 else "", names)
        if self.scheduler is not None:
            yield from _flatten(self.scheduler.state_dict(), "schedule ")
        for name, value in _flatten(trainer.state_dict()["update"]):
            yield name.replace("loss_scaling.scale", "loss scale").replace("loss_scaling.", "loss scaling "), value
        yield from ((f"counter {name}", getattr(trainer.state, name)) for name in _COUNTERS)

    def _state_of(self, optimizer: Optimizer, of: str, names: Mapping[Any, str]) -> Iterator[tuple[str, Any]]:
        """Tensors and values of one optimizer by name."""
        for parameter, entries in optimizer.state.items() if self.optimizer_state else ():
            yield from _flatten(entries, "optimizer ", f" of {names.get(parameter, 'a parameter outside of the model')}")
        # What else is in a group is state too: the steps that the optimizer has counted, or a rate that it has estimated.
        settings = {"lr", *signature(type(optimizer)).parameters}
        for index, group in enumerate(optimizer.param_groups):
            keys = [key for key in group if key != "params" and (self.optimizer_state or key in settings)]
            entries = {"learning rate" if key == "lr" else key: group[key] for key in keys}
            yield from _flatten(entries, after=f" of group {index}{of}")


def _flatten(entries: Mapping[Any, Any], before: str = "", after: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors and plain values in nested state, by their path between `before` and `after`."""
    for key, value in entries.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{before}{key}.", after)
        elif isinstance(value, (list, tuple)):
            yield from _flatten(dict(enumerate(value)), f"{before}{key}.", after)
        elif isinstance(value, DTensor):
            if (held := copies(value)) == collectives.world_size():
                yield f"{before}{key}{after}", value.to_local()
            elif held > 1:
                yield f"{before}{key}{after}", value
        elif isinstance(value, (Tensor, Number, str, bytes)) or value is None:
            yield f"{before}{key}{after}", value


def _shard_of(tensor: DTensor) -> _Shard:
    return _Shard(*part_and_copy(tensor), copies(tensor))


def _holders(shards: Sequence[_Shard | None]) -> list[list[int]]:
    """The ranks that hold the same shard, group by group."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, shard in enumerate(shards):
        if shard is not None:
            groups.setdefault(shard.part, []).append(rank)
    return list(groups.values())


def _differ(digests: Sequence[int | None]) -> bool:
    return len({*digests}) > 1


def _outside(digests: Sequence[int], ranks: Sequence[int]) -> list[int] | None:
    """The ranks, among `ranks`, that differ from the majority; None without a majority."""
    (most, count), *_ = Counter(digests).most_common()
    return [rank for rank, digest in zip(ranks, digests, strict=True) if digest != most] if 2 * count > len(digests) else None
