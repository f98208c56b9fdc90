"""How long each section of an update takes: percentiles, on the host and on the device, and the slowest rank."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal, NamedTuple

from ignite.engine import Events, RemovableEventHandle

from ignite_train.arguments import one_of, positive_int
from ignite_train.device.event_times import EventTimes, event_maker
from ignite_train.engine.sections import RANGES, SECTIONS, Sections
from ignite_train.events import Event, every
from ignite_train.kinds_of_handlers import PiggybackHandler
from ignite_train.ranks import collectives
from ignite_train.trainer import Trainer

__all__ = ["SectionTimes", "StepTimer"]

_OWN_WORK = ("data", "forward", "optimizer", "handler")  # in which no rank waits for the others


class SectionTimes(NamedTuple):
    """How long a section took in an update, in seconds, over the latest updates.

    Attributes:
        updates: how many.
        mean: their mean.
        p50: the median.
        p90: 90 % of the updates took at most this; between two of them it is interpolated.
        p99: likewise for 99 %.
        maximum: the longest.
    """

    updates: int
    mean: float
    p50: float
    p90: float
    p99: float
    maximum: float


class StepTimer(PiggybackHandler):
    """Measures what each update spends in data, forward, backward, reduction, optimizer, handlers, evaluation and saving.

    It divides the time into the sections of `TrainingMetrics`, which has their sums. This handler has the times of each of the
    latest updates, of sections of your own, of an accelerator too, and of all ranks. An update lasts from the end of the update
    before to its own end.

    A section of your own is a `with`, in forward or in a handler; such sections can be nested, and one that an exception leaves
    is counted up to there. Their time is a part of the section around them:

        with timer.section("augment"):
            x = augment(x)

    On an accelerator, events on the current stream time the same sections there; they are read some updates later, and never
    waited for. On several ranks the means of each interval travel with the statistics of the next update. So each rank knows
    the slowest one: `"slowest_rank"`, the rank that took longest for data, forward, optimizer and handlers, where no rank waits
    for another, and `"slowest_to_median"`, its time over the time of the median rank (of two ranks, of the other rank), are
    put into `trainer.state.metrics`. A handler with a collective waits for the other ranks in the section "handler", so in
    intervals with such handlers the rank that is named may be one that has waited.

    Args:
        window: how many of the latest updates are kept.
        ranges: also name the sections in the profiles of others: `"record_function"` for those of torch, `"nvtx"` for NVIDIA's.

    Attributes:
        seconds_by_rank: mean seconds of an update, by section and rank, in the latest interval whose numbers have travelled;
            empty in a single process.

    Raises:
        TypeError: `window` is not an integer.
        ValueError: `window` is below 1, or `ranges` is not one of these.

    Example:
        >>> timer = StepTimer()
        >>> def forward(model, x):
        ...     with timer.section("square"):
        ...         return model(x).square().mean()
        >>> model = torch.nn.Linear(3, 1)
        >>> trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward)
        >>> handle = timer.attach(trainer, Events.ITERATION_COMPLETED(every=2))
        >>> state = trainer.run(data, max_epochs=1)
        >>> timer.summary()["square"].updates
        4
        >>> timer.summary()["square"].maximum < timer.summary()["forward"].maximum
        True
    """

    attached_once = True

    def __init__(self, *, window: int = 1000, ranges: Literal["none", "record_function", "nvtx"] = "none") -> None:
        self.window = positive_int("window", window)
        self.ranges = one_of("ranges", ranges, ("none", *RANGES))
        self.seconds_by_rank: dict[str, list[float]] = {}
        self._sections: Sections | None = None
        self._on_device: EventTimes | None = None
        self._windows: dict[str, deque[float]] = {}  # by section
        self._device_windows: dict[str, deque[float]] = {}
        self._before = dict.fromkeys(SECTIONS, 0.0)  # seconds by section at the end of the update before
        self._own: dict[str, float] = {}  # seconds of the user's sections in this update
        self._path: list[str] = []  # the user's sections that are open
        self._sums, self._count = dict.fromkeys(SECTIONS, 0.0), 0  # of the interval
        self._due: list[float] | None = None  # what is to travel
        self._sent: list[float] | None = None  # on its way

    def attach(self, trainer: Trainer, event: Event = every(50, Events.ITERATION_COMPLETED)) -> RemovableEventHandle:
        """Measures each update. At `event` an interval ends, and the ranks tell one another their means."""
        # Elastic replicas are others from update to update: each knows its own times.
        self.payload_size = 0 if trainer.replicas.are_elastic else len(SECTIONS) * collectives.world_size()
        self._sections = sections = trainer.sections
        make_event = event_maker(next(trainer.model.parameters()).device)
        if make_event is not None:
            self._on_device = EventTimes(make_event)
            sections.listeners.append(self._mark_on_device)
        if self.ranges != "none":
            sections.set_ranges(RANGES[self.ranges])
        trainer.enter_with(self._start)
        handle = super().attach(trainer, event)
        trainer.prepend_event_handler(Events.ITERATION_COMPLETED, self._end_update)  # before what is called at `event`
        return handle

    def taken_off(self) -> None:
        """Measures no later updates; what was measured stays."""
        if self._sections is not None:
            self._sections.listeners = [other for other in self._sections.listeners if other != self._mark_on_device]
            if self.ranges != "none":
                self._sections.set_ranges(None)
        self._sections = self._on_device = None

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """A context manager that times a section of your own, in the main thread. Outside of a run it does nothing.

        Args:
            name: its name. Inside another section of your own it is `"outer/name"`.

        Raises:
            ValueError: `name` is the name of a section of the update.
        """
        if name in SECTIONS:
            raise ValueError(f"name must not be that of a section of the update ({', '.join(SECTIONS)}), got {name!r}")
        sections, device = self._sections, self._on_device
        if sections is None or sections.current is None:
            yield
            return
        outer = self._path
        path, started = "/".join([*outer, name]), time.perf_counter()
        with ExitStack() as at_end:
            if sections.open_range is not None:
                at_end.callback(sections.open_range(path))
            if device is not None:
                at_end.callback(device.span(path))
            try:
                self._path = [*outer, name]
                yield
            finally:
                self._path = outer
                self._own[path] = self._own.get(path, 0.0) + time.perf_counter() - started

    def summary(self, *, device: bool = False) -> dict[str, SectionTimes]:
        """The times of each section that took any, over the latest `window` updates of this rank.

        Args:
            device: those on the accelerator; empty without an accelerator.
        """
        self._drain()
        windows = self._device_windows if device else self._windows
        return {name: _times(window) for name, window in windows.items() if any(window)}

    def table(self) -> str:
        """The summary as text, in milliseconds; empty before the first update."""
        host, device, by_rank = self.summary(), self.summary(device=True), self.seconds_by_rank
        if not host:
            return ""
        titles = ["mean", "p50", "p90", "p99", "max"] + ["on device"] * bool(device) + ["slowest rank"] * bool(by_rank)
        lines = [f"{'ms an update':<20}" + "".join(f"{title:>13}" for title in titles)]
        for name, times in host.items():
            cells = [f"{seconds * 1e3:.3f}" for seconds in times[1:]]
            if device:
                cells.append(f"{device[name].p50 * 1e3:.3f}" if name in device else "")
            if name in by_rank:
                cells.append(str(by_rank[name].index(max(by_rank[name]))))
            lines.append((f"{name:<20}" + "".join(f"{cell:>13}" for cell in cells)).rstrip())
        return "\n".join(lines)

    def __call__(self, trainer: Trainer) -> None:
        """Ends an interval: its means travel with the next update, and the means of the interval before are published."""
        if self._count:
            self._due = [seconds / self._count for seconds in self._sums.values()]
            self._sums, self._count = dict.fromkeys(SECTIONS, 0.0), 0
        self._drain()
        if self.seconds_by_rank:
            own = [sum(self.seconds_by_rank[name][rank] for name in _OWN_WORK) for rank in range(collectives.world_size())]
            trainer.state.metrics["slowest_rank"] = float(own.index(max(own)))
            trainer.state.metrics["slowest_to_median"] = max(own) / (statistics.median_low(own) or 1.0)

    # --- what travels -----------------------------------------------------------------------------------------------------

    def payload(self) -> Sequence[float]:
        """The means of this rank in its place, where an interval has ended."""
        if not self.payload_size:
            return []
        if self._due is not None:
            self._sent, self._due = self._due, None
        numbers = [0.0] * self.payload_size
        if self._sent is not None:
            begin = collectives.rank() * len(SECTIONS)
            numbers[begin : begin + len(SECTIONS)] = self._sent
        return numbers

    def on_reduced(self, sums: list[float]) -> None:
        """Takes the means of all ranks."""
        if self._sent is not None:
            self._sent = None
            self.seconds_by_rank = {name: sums[index :: len(SECTIONS)] for index, name in enumerate(SECTIONS)}

    def settle(self) -> None:
        """Exchanges what no update will carry, at the end of a run. Collective."""
        if self._due is not None:
            self.on_reduced(collectives.total(self.payload()))

    # --- what is measured -------------------------------------------------------------------------------------------------

    def _start(self, _trainer: Trainer) -> None:
        assert self._sections is not None  # noqa: S101  # attached
        self._before, self._own, self._path = self._sections.seconds(), {}, []
        self.seconds_by_rank = {}  # of the run before

    def _mark_on_device(self, _before: str | None, section: str | None) -> None:
        assert self._on_device is not None  # noqa: S101  # attached
        self._on_device.mark(section)

    def _end_update(self) -> None:
        assert self._sections is not None  # noqa: S101  # attached
        now, before = self._sections.seconds(), self._before
        update = {name: seconds - before[name] for name, seconds in now.items()}
        for name, seconds in update.items():
            self._sums[name] += seconds
        self._count += 1
        _append(self._windows, update | self._own, self.window)
        self._before, self._own = now, {}
        if self._on_device is not None:
            self._on_device.end_update(self._sections.current)

    def _drain(self) -> None:
        for update in [] if self._on_device is None else self._on_device.drain():
            _append(self._device_windows, update, self.window)


def _append(windows: dict[str, deque[float]], update: dict[str, float], window: int) -> None:
    """Adds one update to each window: 0 where it has no such section, also before the section was first seen."""
    count = max((len(times) for times in windows.values()), default=0)
    for name in update:
        if name not in windows:
            windows[name] = deque([0.0] * count, maxlen=window)
    for name, times in windows.items():
        times.append(update.get(name, 0.0))


def _times(window: Sequence[float]) -> SectionTimes:
    ordered = sorted(window)
    percentiles = statistics.quantiles(ordered * (1 + (len(ordered) == 1)), n=100, method="inclusive")
    p50, p90, p99 = (percentiles[part - 1] for part in (50, 90, 99))
    return SectionTimes(len(ordered), statistics.fmean(ordered), p50, p90, p99, ordered[-1])
