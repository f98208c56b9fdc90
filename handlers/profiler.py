"""A trace of a few updates by torch's profiler."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from ignite.engine import Events, RemovableEventHandle

from ignite_train.arguments import describe, did_you_mean, directory_of, whole_number
from ignite_train.engine.sections import RANGES, Sections
from ignite_train.kinds_of_handlers import Handler
from ignite_train.ranks import collectives
from ignite_train.trainer import Trainer

__all__ = ["Profiler"]

_logger = logging.getLogger(__name__)


class Profiler(Handler):
    """Runs `torch.profiler` over a few updates, and writes a trace for ui.perfetto.dev or chrome://tracing.

    The trace shows the sections of the update (data, forward, backward, reduction, optimizer, handler, ...) around what torch
    did in them, and the sections of a `StepTimer`. It is written when the last of the updates is over, as
    `updates-11-to-13.rank-0.trace.json.gz`; a run that ends before that, also by an exception, writes what there is of it. In
    all other updates the handler compares a number. Updates that are profiled are slower.

    Args:
        directory: where the traces go. It is made.
        updates: which updates, in a row: `range(11, 14)` are 11, 12 and 13.
        ranks: on which ranks.
        warm_up: how many updates before the first run with the profiler on, and are not in the trace: the first ones with a
            profiler are slower than the others.
        options: of `torch.profiler.profile`, such as `with_stack=True` and `profile_memory=True`.

    Attributes:
        traces: the files that were written.

    Raises:
        TypeError: an argument is of the wrong type, or an option is not known.
        ValueError: `directory` is a file, or `updates` is empty, has gaps, or begins before 1, or an option is one that the
            handler sets itself.

    Example:
        >>> profiler = Profiler(directory, updates=range(3, 5))
        >>> handle = profiler.attach(trainer)
        >>> state = trainer.run([torch.ones(2, 3)] * 6, max_epochs=1)
        >>> [path.name for path in profiler.traces]
        ['updates-3-to-4.rank-0.trace.json.gz']
    """

    _sections: Sections  # once attached

    attached_once = True

    def __init__(
        self,
        directory: str | Path,
        *,
        updates: range = range(11, 14),
        ranks: Collection[int] = (0,),
        warm_up: int = 1,
        **options: Any,
    ) -> None:
        if not isinstance(updates, range):
            raise TypeError(f"updates must be a range, got {describe(updates)}; updates 11 to 13 are range(11, 14)")
        if len(updates) == 0 or updates.step != 1 or updates.start < 1:
            raise ValueError(
                f"updates must be a range of updates in a row from 1 on, got {updates}; 11 to 13 are range(11, 14)"
            )
        if own := {"schedule", "on_trace_ready"} & {*options}:
            raise ValueError(f"options must not have {own.pop()!r}, which follows from updates and directory")
        known = inspect.signature(torch.profiler.profile).parameters
        for name in options.keys() - known.keys():
            raise TypeError(f"options must be those of torch.profiler.profile, got {name!r}{did_you_mean(name, known)}")
        if not isinstance(ranks, Collection):
            raise TypeError(f"ranks must be a sequence of ranks, got {describe(ranks)}; pass (0,) for the first")
        self.directory, self.updates, self.ranks = directory_of("directory", directory), updates, tuple(ranks)
        self.warm_up = whole_number("warm_up", warm_up or 0)
        self._window = range(max(updates.start - self.warm_up, 1), updates.stop)  # the updates in which the profiler runs
        self.traces: list[Path] = []
        self._options = options
        self._profile: torch.profiler.profile | None = None  # while it runs
        self._ranges_before: Callable[[str], Callable[[], None]] | None = None  # of a StepTimer, say
        self._close_range: Callable[[], None] | None = None  # of the update
        self._first = self._latest = 0  # the first update to record, and the latest one that is over

    def attach(self, trainer: Trainer) -> RemovableEventHandle | None:
        """Profiles the updates of `trainer`, on the chosen ranks. All ranks may call it."""
        if collectives.rank() not in self.ranks:
            return None
        self._sections = trainer.sections
        trainer.enter_with(self)
        trainer.on_exit.append(self._stop)
        return trainer.append_event_handler(Events.ITERATION_COMPLETED, self)

    def __call__(self, trainer: Trainer) -> None:
        """Begins or ends the profile where it is due, between two updates."""
        update = trainer.state.iteration
        if self._profile is not None:
            self._step(update)
        elif update + 1 in self._window:
            self._start(update)

    # --- one profile ------------------------------------------------------------------------------------------------------

    def _start(self, update: int) -> None:
        """Starts the profiler between `update` and the next."""
        self._first, self._latest = max(self.updates.start, update + 1), update
        warm_up, number = self._first - update - 1, len(range(self._first, self.updates.stop))
        with warnings.catch_warnings():
            # Torch 2.11 warns of a second cycle at each start, and here is one.
            warnings.filterwarnings("ignore", category=UserWarning, module="torch.profiler")
            warnings.filterwarnings("ignore", "Profiler won't be using warmup")  # as was asked for
            schedule = torch.profiler.schedule(wait=0, warmup=warm_up, active=number, repeat=1)
            self._profile = torch.profiler.profile(schedule=schedule, on_trace_ready=self._write, **self._options)
            self._profile.record_steps = False  # they are counted from 0; an update has a range of its own
            self._profile.start()
        self._ranges_before = self._sections.open_range
        self._sections.set_ranges(self._open_range)

    def _step(self, update: int) -> None:
        self._latest = update
        if update + 1 >= self.updates.stop:
            self._stop()
            return
        assert self._profile is not None  # noqa: S101  # it runs
        self._end_ranges()
        self._profile.step()
        self._sections.set_ranges(self._open_range)

    def _stop(self) -> None:
        """Ends the profile, which writes its trace unless it has recorded nothing yet."""
        if self._profile is None:
            return
        self._end_ranges()
        profile, self._profile = self._profile, None
        profile.stop()

    def _open_range(self, section: str) -> Callable[[], None]:
        """Opens the range of a section, and before the first section of an update the range of the update around it."""
        if self._close_range is None and section in ("data", "forward"):
            self._close_range = RANGES["record_function"](f"update {self._latest + 1}")
        return RANGES["record_function"](section)

    def _end_ranges(self) -> None:
        """Ends the range of the section, and the range of the update around it."""
        self._sections.set_ranges(self._ranges_before)
        if self._close_range is not None:
            self._close_range()
        self._close_range = None

    def _write(self, profile: torch.profiler.profile) -> None:
        updates = f"updates-{self._first}-to-{max(self._latest, self._first)}"
        path = self.directory / f"{updates}.rank-{collectives.rank()}.trace.json.gz"
        unfinished = path.with_name(f".unfinished.{path.name}")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(unfinished))
            unfinished.replace(path)
        except OSError as error:
            _logger.warning(f"the trace {path} could not be written ({error})")
            return
        finally:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
        self.traces.append(path)
