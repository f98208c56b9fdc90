"""The position of a rank in its data, in a form from which another process can resume."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from ignite_train.arguments import COUNT, check_fields
from ignite_train.data.description import Pipeline, Seekable, attributes_of_samplers, changes, describe_data
from ignite_train.data.resumable_loader import ResumableLoader
from ignite_train.data.samplers import inner_loaders
from ignite_train.engine.attachable import Stateful
from ignite_train.errors import CheckpointError, TrainingError
from ignite_train.internals.of_torch import end_workers, has_lost_workers, pass_of, sampler_pass_of
from ignite_train.model.in_full import in_full
from ignite_train.model.random_state import (
    capture_random_state,
    generators_within,
    get_generator_state,
    restore_random_state,
    set_generator_states,
)
from ignite_train.ranks import collectives

__all__ = ["DataPosition", "open_loader"]

_logger = logging.getLogger(__name__)


def open_loader(loader: Iterable[Any]) -> Iterator[Any]:
    """Starts a pass over `loader`, with the same random draws whether its persistent workers run already or not.

    A DataLoader draws a seed when it starts its workers. Persistent workers start once in a process, so that the first pass of
    a resumed process would draw once more than the same pass did before. That seed is drawn from a copy of the generator.
    Others start likewise where one has ended, as by the stop button of a notebook.
    """
    for one in inner_loaders(loader):
        if has_lost_workers(pass_of(one)):
            end_workers(one)
    if not isinstance(loader, DataLoader) or not loader.persistent_workers or pass_of(loader) is not None:
        return iter(loader)
    own, copied = loader.generator, torch.Generator()
    copied.set_state((torch.default_generator if own is None else own).get_state())

    def put_back() -> None:
        loader.generator = own

    try:
        loader.generator = copied
        return iter(loader)
    finally:
        in_full(put_back)


class DataPosition:
    """Finds the position in a loader at which a pass was interrupted, in one of three ways.

    A loader that can seek jumps there. A loader with a state, such as torchdata's StatefulDataLoader, gets it back. Any other
    loader is opened with the random generators in the state that they had when the pass began, so that it shuffles the same
    way, and is read up to the position; then the generators get their present state back. `how_exact` says what may still
    differ.

    Args:
        loader: this rank's loader.
        copies: copy the states that a loader gives, since some change the object that they have given.

    Attributes:
        is_stateful: whether the loader's own state is saved, which `note` asks for after each group.
        exhausted: whether the loader was exhausted after the latest group.
        may_break: whether another pass over the loader would end the one that was found.
    """

    def __init__(self, loader: Iterable[Any], *, copies: bool = True) -> None:
        self._loader, self._copies, self._num_ranks = loader, copies, collectives.world_size()
        self._seekable = loader if isinstance(loader, Seekable) else None
        self._stateful = loader if self._seekable is None and isinstance(loader, Stateful) else None
        self._keeps_generators = self._stateful is not None and not isinstance(loader, (DataLoader, Pipeline))
        self._description = describe_data(loader)
        self._first_sample = 0
        self._opening: dict[str, Any] = {}  # the generators before the pass was opened
        # Of a stateful loader, before and after the latest group: its state, and the generators that it holds.
        self._notes: list[tuple[Any, dict[str, Any] | None]] = [(None, None), (None, None)]
        self.is_stateful, self.exhausted, self.may_break = self._stateful is not None, False, False
        self._own_after: Any = {}  # its own generators once the position is found
        self._before: dict[str, Any] = {}  # all generators, before any of this
        self._pass: object = None  # see `_pass_of`
        self._pass_before: object = None  # the same, before this one was opened
        self.at_end = self.jumps = False
        self.reads_past = self.has_restored = False  # the latter: the loader's own state was put back within a pass

    @contextmanager
    def opening(self) -> Iterator[None]:
        """In it the pass is found and opened: after an error the generators are as before, and the next run draws the same."""
        self._before = {**capture_random_state(), "own": self._own_generators()}
        try:
            yield
        except BaseException:
            self._put_back(self._before)
            raise

    def find(self, saved: Mapping[str, Any], skip: int) -> None:
        """Prepares, in `opening`, for a pass that begins after the `skip` groups after which `saved` was written. Collective.

        Afterwards `reads_past` says whether these groups must still be read, `jumps` whether `len()` counts only what is left,
        and `at_end` whether the loader has nothing left for this pass.

        Raises:
            ValueError: another number of ranks wrote it and the loader cannot seek; or it is another loader, so that samples
                would be missed or used twice.
            CheckpointError: it cannot be the place in this loader.
        """
        with self._refusing() if saved else nullcontext():
            self._find(saved, skip)

    def _find(self, saved: Mapping[str, Any], skip: int) -> None:
        self._compare(saved, in_epoch=skip > 0)
        if skip:
            self._go_to(saved)
        else:
            self._go_to_the_start(saved)
        self._warn_of_changed_samplers(saved.get("opening", saved) if self.reads_past else saved)
        if not self._opening:
            self._opening = {**self._before, "own": self._own_generators(), "samplers": attributes_of_samplers(self._loader)}

    def open(self) -> Iterator[Any]:
        """Begins the pass at the position that was found; it gives nothing where nothing is left."""
        self._pass_before = _pass_of(self._loader)
        if self.at_end:
            return iter(())
        with _without_restart(self._loader):
            return open_loader(self._loader)

    def found(self) -> None:
        """Call it once the groups were read past: finding the position leaves the random generators unchanged."""
        now = _pass_of(self._loader)
        self._pass = None if now is self._pass_before else now  # a generator opens its pass when it is read
        self.may_break = self._pass is not None
        if self.jumps or self.has_restored or self.reads_past:
            in_full(partial(restore_random_state, self._before))
        draws_itself = isinstance(self._loader, Pipeline) and not self.at_end  # to find its place, in a thread perhaps
        own = generators_within(self._loader, _is_opened_again) if draws_itself else self._find_own_generators()
        with self._refusing():
            set_generator_states(own, self._own_after)
        if not self.has_restored:  # the first group may have to be read again
            with suppress(Exception):  # a loader of a user's may have a state only once it is read, and raise anything before
                self.note(exhausted=False)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """In it, an error of a saved state, which may come from any file, is a refusal."""
        try:
            yield
        except (AttributeError, LookupError, TypeError, RuntimeError, OverflowError) as error:
            if isinstance(error, TrainingError):
                raise
            raise CheckpointError(
                f"the place in the data that was saved is not one of this {type(self._loader).__name__}: "
                f"{type(error).__name__}: {' '.join(str(error).split()):.300}; start in another directory"
            ) from error

    def broken_pass_error(self) -> ValueError:
        """Why the pass cannot be read on where something is left of it and `is_pass_broken`."""
        return ValueError(
            f"data must not be read elsewhere in the middle of a pass, got a {type(self._loader).__name__} that makes one pass "
            "at a time, since its workers are persistent or it has a state, and another one was begun: the samples that were "
            "left are missed; use another loader there"
        )

    def is_pass_broken(self) -> bool:
        """Whether persistent workers make another pass by now, which has ended this one."""
        return self._pass is not None and _pass_of(self._loader) is not self._pass

    def take_back_opening(self) -> None:
        """Puts the generators back to what they were before the pass was opened, at the start of an epoch."""
        self._put_back(self._opening)

    def _put_back(self, states: Mapping[str, Any]) -> None:
        def put_back() -> None:
            restore_random_state(states)
            self._set_own_generators(states["own"])

        in_full(put_back)

    def note(self, *, exhausted: bool) -> None:
        """Call it when a group was read, before anything is read ahead, and when the loader is exhausted."""
        self.exhausted = exhausted
        if self._stateful is not None:
            state = self._stateful.state_dict()
            self._notes = [self._notes[1], (copy.deepcopy(state) if self._copies else state, self._own_generators())]

    def note_other_data(self, *, in_group: bool) -> None:
        """Call it where a stream was given other data: its start is the place after the latest group, or before that too."""
        note = self._stateful.state_dict() if self._stateful is not None else None, None
        self._notes = [self._notes[0] if in_group else note, note]

    def saved(self, rounds: int, given: int, *, latest: bool, at_rest: bool = False) -> dict[str, Any]:
        """The position in plain types.

        Args:
            rounds: the largest number of micro-batches that any rank was given since the position was found.
            given: micro-batches that this rank was given in this epoch.
            latest: whether the latest group is among them.
            at_rest: whether nothing was read behind them, but for what worker processes read.
        """
        position: dict[str, Any] = {"world_size": self._num_ranks, "generators": self._own_generators()}
        position["description"] = self._description
        if self._seekable is not None:
            samples = self._first_sample + rounds * self._seekable.samples_per_round
            if isinstance(self._loader, ResumableLoader):  # the last group of an epoch may be cut short
                samples = min(samples, self._loader.dealt_by.num_entries)
            return position | {"samples": samples}
        position |= {"micro_batches": given, "exhausted": self.exhausted and latest, "opening": self._opening}
        if self._stateful is not None:
            state, generators = self._notes[latest]
            own = {} if generators is None else {"generators": generators}
            return position | {"loader": state, **own}
        if isinstance(self._loader, DataLoader):
            position["workers"], position["samplers"] = self._loader.num_workers, attributes_of_samplers(self._loader)
            if at_rest and type(self._loader).__iter__ is DataLoader.__iter__:  # another may read ahead in a thread
                position["read_ahead"] = self._read_ahead()
        return position

    def _compare(self, saved: Mapping[str, Any], *, in_epoch: bool) -> None:
        """Refuses another loader within an epoch, on all ranks if any of them has one; at the start of an epoch it warns."""
        if not saved:
            return
        jumps = self._seekable is not None and "samples" in saved
        refused, harmless = changes(saved["description"], self._description, jumps=jumps)
        accepted = not in_epoch or saved.get("on_changed_data") == "warn"
        harmless += self._changed_generators(saved)
        if accepted:
            refused, harmless = [], [*refused, *harmless]
        if harmless and collectives.is_main_rank():
            began = "this epoch began" if in_epoch else "the epoch before began"
            _logger.warning(f"the data is not that with which {began}: {', '.join(harmless)}")
        found = collectives.gather_objects(refused) if in_epoch and not accepted else []
        reports = [f"{'; '.join(lines):.400} (rank {rank})" for rank, lines in enumerate(found) if lines]
        if reports:
            remedy = (
                "undo the change, or pass Checkpoint(..., on_changed_data='warn'), or resume from a checkpoint of the end of "
                "an epoch (resume=PATH), where any change is allowed without epoch_length; a loader that set_data has chosen "
                "for this epoch must be chosen in EPOCH_STARTED, which fires again"
                if saved.get("on_changed_data")  # a place from a checkpoint
                else "continue with the loader that it began with, to the end of this epoch N by run(loader, max_epochs=N), or "
                "make another trainer"
            )
            raise ValueError(
                "data must be unchanged to resume in the middle of an epoch, or of a pass with epoch_length, got "
                f"{reports[0]}: samples would be missed or used twice; {remedy}"
            )

    def _changed_generators(self, saved: Mapping[str, Any]) -> list[str]:
        """A line where the dataset has lost a generator whose state was saved, or got one for which none was."""
        if not self._is_of_as_many_ranks(saved):
            return []
        before, now = saved["generators"], self._find_own_generators()
        names = [", ".join(name for name in each if name.startswith("dataset.")) or "none" for each in (before, now)]
        return [f"generators of the dataset: {names[0]:.200} -> {names[1]:.200}"] if names[0] != names[1] else []

    def _is_of_as_many_ranks(self, saved: Mapping[str, Any]) -> bool:
        return not saved or bool(saved["world_size"] == self._num_ranks)

    def _go_to(self, saved: Mapping[str, Any]) -> None:
        same_ranks = self._is_of_as_many_ranks(saved)
        if self._seekable is not None and "samples" in saved:
            check_fields("DataPosition", saved, {"samples": COUNT})
            self._first_sample = saved["samples"]
            self._seekable.seek(self._first_sample)
            self.jumps, self._own_after = True, saved["generators"] if same_ranks else {}
            return
        if not same_ranks:
            raise ValueError(
                f"data must be a loader that can seek, such as ResumableLoader, and epoch_length be left out, to resume in the "
                f"middle of an epoch with {self._num_ranks} ranks after {saved['world_size']}, got a "
                f"{type(self._loader).__name__}; or resume from a checkpoint of the end of an epoch"
            )
        if "opening" in saved:
            self._opening = saved["opening"]
            restore_random_state(self._opening)
            self._set_own_generators(self._opening["own"])
        if self._stateful is not None and self._has_state_of_same_kind(saved):  # its sampler may be read past all the same
            self.has_restored = True
            self._notes, self._own_after = [(saved["loader"], None)] * 2, saved["generators"]
            self.at_end = saved["exhausted"]
            if self.at_end:
                self._go_past(saved["loader"])
            else:
                self._stateful.load_state_dict(copy.deepcopy(saved["loader"]))
            return
        self.reads_past = True
        self._warn_of_other_workers(saved)
        # Something else may have drawn from its generators since the pass was opened, as a validation with the same one does.
        # Where another number of micro-batches was read ahead than will be now, the state is not that of the place.
        if saved.get("read_ahead") == self._read_ahead():
            self._own_after = saved["generators"]

    def _read_ahead(self) -> list[Any]:
        """The settings by which a DataLoader reads micro-batches before they are asked for."""
        return [self._loader.num_workers, self._loader.prefetch_factor] if isinstance(self._loader, DataLoader) else []

    def _go_to_the_start(self, saved: Mapping[str, Any]) -> None:
        """Puts back the state and the generators of a loader, which depend on earlier passes."""
        if self._seekable is not None:
            self._seekable.seek(0)
        same_ranks = self._is_of_as_many_ranks(saved)
        # A pass was open, and nothing of it done.
        has_begun = saved.get("micro_batches") == 0 and not saved["exhausted"] and bool(saved["opening"])
        if self._stateful is not None and same_ranks and self._has_state_of_same_kind(saved):
            if has_begun:
                self._stateful.load_state_dict(copy.deepcopy(saved["loader"]))
            else:
                self._go_past(saved["loader"])
            restore_random_state(self._before)
        elif self._stateful is not None and saved.get("loader") is not None and not same_ranks and collectives.is_main_rank():
            _logger.warning(
                f"the {type(self._loader).__name__} begins at the start of its data, because {saved['world_size']} ranks have "
                f"written its place, and {self._num_ranks} cannot continue there: samples that were used lately are "
                "used again; a ResumableLoader without epoch_length avoids that"
            )
        if not same_ranks:
            return
        own = saved.get("generators", {})
        if self._stateful is not None and has_begun:
            own, self._own_after = saved["opening"]["own"], own
        self._set_own_generators(own)

    def _go_past(self, state: Any) -> None:
        """Puts the loader back to the end of a pass, so that the next one that is opened is new.

        Some loaders end that pass where it is opened, and generators only where it is read. A loader that gives something then
        has begun the next pass already, and is put back.
        """
        assert self._stateful is not None  # noqa: S101  # there is its state
        for reads in (False,) if isinstance(self._loader, Iterator) else (True, False):  # an iterator has one pass
            self._stateful.load_state_dict(copy.deepcopy(state))
            opened = open_loader(self._loader)
            if not reads or next(opened, self) is self:
                return
            del opened  # which ends a generator, before the state is loaded again

    def _has_state_of_same_kind(self, saved: Mapping[str, Any]) -> bool:
        """Whether there is the state of a loader, and not one that another kind of loader has written."""
        return saved.get("loader") is not None and saved["description"]["loader"] == self._description["loader"]

    def _warn_of_other_workers(self, saved: Mapping[str, Any]) -> None:
        before, now = saved.get("workers"), self._loader.num_workers if isinstance(self._loader, DataLoader) else None
        if before is not None and now is not None and before != now:
            _logger.warning(
                f"num_workers: {before} -> {now}: what a dataset draws differs until the end of the epoch; a "
                "ResumableLoader avoids that"
            )

    def _warn_of_changed_samplers(self, saved: Mapping[str, Any]) -> None:
        """Says where a sampler of the user's own is not what it was at that place, since only its generators are put back."""
        before, now = saved.get("samplers", {}), attributes_of_samplers(self._loader)
        names = {**before, **now} if "samplers" in saved else {}
        changed = [
            f"{name!s:.60}: {before.get(name)!r:.60} -> {now.get(name)!r:.60}"
            for name in names
            if now.get(name) != before.get(name)
        ]
        if changed and self._stateful is None:
            _logger.warning(
                f"the sampler is not as it was at this place of the data ({', '.join(changed)}), since what it keeps is not "
                "saved with the place: if its order depends on them, samples are missed and others used twice; let the order "
                "depend on set_epoch(epoch), or on a random generator that the sampler holds"
            )

    def _own_generators(self) -> dict[str, Any]:
        found = self._find_own_generators()
        return dict(zip(found, map(get_generator_state, found.values()), strict=True))

    def _set_own_generators(self, states: Mapping[str, Any]) -> None:
        set_generator_states(self._find_own_generators(), states)

    def _find_own_generators(self) -> dict[str, Any]:
        """The generators of the loader, its samplers and its dataset, unless its own state or the seed of a sample has them."""
        if self._keeps_generators:
            return {}
        found = generators_within(self._loader)
        if isinstance(self._loader, ResumableLoader) and self._loader.seeds_generators:
            return {name: generator for name, generator in found.items() if not name.startswith("dataset.")}
        return found


def _is_opened_again(owner: Any, name: Any, value: Any) -> bool:
    """Whether this attribute of a node of torchdata is a sampler or a source that the node reads again up to its place."""
    is_node = any(kind.__module__.startswith("torchdata.") for kind in type(owner).__mro__)
    return is_node and name in ("sampler", "iterable") and not isinstance(value, Stateful)


def _pass_of(loader: Iterable[Any]) -> object:
    """An object that stands for the pass of persistent workers: torch has another in each. None without such workers."""
    return sampler_pass_of(loader) if isinstance(loader, DataLoader) else None


@contextmanager
def _without_restart(loader: Any) -> Iterator[None]:
    """In it, a pipeline of nodes gives nothing where its state has nothing left, and does not begin the next pass."""
    if not isinstance(loader, Pipeline):
        yield
        return
    restarts = loader.restart_on_stop_iteration
    loader.restart_on_stop_iteration = False
    try:
        yield
    finally:
        loader.restart_on_stop_iteration = restarts
