"""What a trace of torch's profiler says about updates: the host's waits, the order of step and reading, and idle time.

All of it is computed from the list `traceEvents` of a trace in Chrome's format, as `export_chrome_trace` writes it: `ts` and
`dur` are microseconds; what the device does has the categories `kernel`, `gpu_memcpy` and `gpu_memset`, its stream in
`args.stream`, and in `args.correlation` the number of the call of the host that launched it, whose category is `cuda_runtime`
or `cuda_driver`. Each update begins with an annotation of the name `MARK`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

MARK = "an update begins"
LARGE_COPY = 2**20  # bytes: smaller copies are numbers for the host, not micro-batches

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_HOST = ("cuda_runtime", "cuda_driver")
_WAITS = ("EventSynchronize", "StreamSynchronize", "DeviceSynchronize", "CtxSynchronize")  # behind cuda, or cu of the driver
_COPY_THAT_WAITS = "cudaMemcpy"
_STEP = "adam"  # in the names of the kernels of fused AdamW


class Span(NamedTuple):
    """Something that took time, in microseconds."""

    begin: float
    end: float
    name: str


@dataclass(frozen=True)
class DeviceSpan:
    """Something that the device did.

    Attributes:
        span: when, and its name.
        category: kernel, copy or memset, by the names of traces.
        stream: on which.
        launched: when the host had asked for it; NaN where the trace has no such call.
        thread: of the host that asked; None where it is not known.
        num_bytes: of a copy.
    """

    span: Span
    category: str
    stream: int
    launched: float
    thread: Any
    num_bytes: int


@dataclass(frozen=True)
class Trace:
    """The events of a trace that matter here, in the order of time.

    Attributes:
        marks: when updates began on the host; the last one ends what is looked at.
        device: what the device did.
        launches: the calls of the host that launched something.
        waits: the calls in which the host waited for the device.
    """

    marks: list[float]
    device: list[DeviceSpan]
    launches: list[Span]
    waits: list[Span]

    @classmethod
    def of(cls, events: Iterable[dict[str, Any]]) -> Trace:
        """From `traceEvents`."""
        timed = sorted((event for event in events if event.get("ph") == "X"), key=lambda event: float(event["ts"]))
        marks = [event for event in timed if event.get("cat") == "user_annotation" and event["name"] == MARK]
        calls = [event for event in timed if event.get("cat") in _ON_HOST]
        by_number = {event["args"]["correlation"]: event for event in calls if "correlation" in event.get("args", {})}
        return cls(
            marks=[float(event["ts"]) for event in marks],
            device=[_device_span(event, by_number) for event in timed if event.get("cat") in _ON_DEVICE],
            launches=[_span(event) for event in calls if "Launch" in event["name"]],
            waits=[_span(event) for event in calls if _is_wait(event["name"])],
        )

    def between(self, begin: float, end: float) -> Trace:
        """What was asked for in this time."""
        return Trace(
            [mark for mark in self.marks if begin <= mark <= end],
            [one for one in self.device if begin <= one.launched < end],
            [span for span in self.launches if begin <= span.begin < end],
            [span for span in self.waits if begin <= span.begin < end],
        )

    def updates(self) -> list[Trace]:
        """Each whole update."""
        return [self.between(begin, end) for begin, end in pairwise(self.marks)]


def _is_wait(name: str) -> bool:
    plain = name.partition("_")[0]
    return plain.endswith(_WAITS) or plain == _COPY_THAT_WAITS


def _span(event: dict[str, Any]) -> Span:
    return Span(float(event["ts"]), float(event["ts"]) + float(event["dur"]), event["name"])


def _device_span(event: dict[str, Any], calls: dict[int, dict[str, Any]]) -> DeviceSpan:
    arguments = event.get("args", {})
    call = calls.get(arguments.get("correlation"))
    return DeviceSpan(
        span=_span(event),
        category=event["cat"],
        stream=int(arguments.get("stream", event.get("tid", 0))),
        launched=math.nan if call is None else float(call["ts"]),
        thread=None if call is None else call["tid"],
        num_bytes=int(arguments.get("bytes", 0)),
    )


@dataclass(frozen=True)
class Findings:
    """What a trace says; NaN, or no entry, where it says nothing.

    Attributes:
        updates: whole ones in the trace.
        milliseconds: of an update, from its beginning on the host to that of the next one.
        busy_milliseconds: of an update, in which the device does something.
        launches: of kernels and of graphs in an update, by the host.
        graphs: of these, those of CUDA graphs.
        waits: how often the host waits in an update, by the name of the call.
        waited: the part of an update's time in which it does.
        queued: in how many updates the last kernel of the step was launched before the host began its last wait.
        stepped: in how many updates there were such kernels and a wait.
        copied_beside: the part of the time of large copies to the device in which a kernel ran on another stream.
        idle_between: from the end of an update's last kernel to the beginning of the first one of the next, to the time of
            an update.
        idle_in_step: the part of the optimizer phase in which the device does nothing; see `idle_in_optimizer_phase`.
        idle: the part of all the time in which the device does nothing.
    """

    updates: int
    milliseconds: float
    busy_milliseconds: float
    launches: float
    graphs: float
    waits: dict[str, float]
    waited: float
    queued: int
    stepped: int
    copied_beside: float
    idle_between: float
    idle_in_step: float
    idle: float


def findings(trace: Trace) -> Findings:
    """What a trace says about its updates."""
    updates = trace.updates()
    if not updates:
        return Findings(0, math.nan, math.nan, math.nan, math.nan, {}, math.nan, 0, 0, *[math.nan] * 4)
    whole = trace.between(trace.marks[0], trace.marks[-1])
    microseconds = (trace.marks[-1] - trace.marks[0]) / len(updates)
    orders = [order for update in updates if (order := _step_before_wait(update)) is not None]
    return Findings(
        updates=len(updates),
        milliseconds=microseconds / 1000,
        busy_milliseconds=_total(merged(one.span for one in whole.device)) / len(updates) / 1000,
        launches=len(whole.launches) / len(updates),
        graphs=sum("Graph" in launch.name for launch in whole.launches) / len(updates),
        waits={name: times / len(updates) for name, times in Counter(wait.name for wait in whole.waits).items()},
        waited=_total(whole.waits) / len(updates) / microseconds,
        queued=sum(orders),
        stepped=len(orders),
        copied_beside=_copied_beside(whole.device),
        idle_between=_idle_between(updates) / microseconds,
        idle_in_step=idle_in_optimizer_phase(whole),
        idle=_idle(whole.device),
    )


def _step_before_wait(update: Trace) -> bool | None:
    """Whether all of the step was launched before the host began its last wait; None where an update lacks either."""
    launched = [one.launched for one in update.device if is_step(one)]
    return max(launched) < update.waits[-1].begin if launched and update.waits else None


def is_step(one: DeviceSpan) -> bool:
    """Whether it is a kernel of fused AdamW."""
    return one.category == "kernel" and _STEP in one.span.name.lower()


def _copied_beside(device: Sequence[DeviceSpan]) -> float:
    copies = [one for one in device if one.category == "gpu_memcpy" and "HtoD" in one.span.name and one.num_bytes >= LARGE_COPY]
    whole = _total(copy.span for copy in copies)
    beside = 0.0
    for stream in {copy.stream for copy in copies}:
        busy = merged(one.span for one in device if one.category == "kernel" and one.stream != stream)
        beside += sum(_overlap(copy.span, busy) for copy in copies if copy.stream == stream)
    return beside / whole if whole else math.nan


def merged(spans: Iterable[Span]) -> list[Span]:
    """The times in which at least one of them runs, as spans that do not touch."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.begin <= found[-1].end:
            found[-1] = Span(found[-1].begin, max(found[-1].end, span.end), "")
        else:
            found.append(Span(span.begin, span.end, ""))
    return found


def _total(spans: Iterable[Span]) -> float:
    return sum(span.end - span.begin for span in spans)


def _overlap(span: Span, others: Iterable[Span]) -> float:
    return sum(max(0.0, min(span.end, other.end) - max(span.begin, other.begin)) for other in others)


def _idle_between(updates: Sequence[Trace]) -> float:
    """Microseconds, the mean over the updates that have one after them; nothing is counted where they overlap."""
    kernels = [[one.span for one in update.device if one.category == "kernel"] for update in updates]
    gaps = [
        max(0.0, min(span.begin for span in after) - max(span.end for span in before))
        for before, after in pairwise(kernels)
        if before and after
    ]
    return sum(gaps) / len(gaps) if gaps else math.nan


def _idle(device: Sequence[DeviceSpan]) -> float:
    busy = merged(one.span for one in device)
    if not busy:
        return math.nan
    return 1 - _total(busy) / (busy[-1].end - busy[0].begin)


def idle_in_optimizer_phase(trace: Trace) -> float:
    """How much of the optimizer phase the device does nothing, over all updates of a trace.

    The phase is from the end of the last kernel that a thread of autograd's launched to the end of the last one of the
    optimizer. Kernels of backward are launched by threads of autograd's own, those of the optimizer have Adam in their names.
    """
    main = next((one.thread for one in trace.device if is_step(one)), None)
    idle = whole = gap = covered = 0.0
    since: float | None = None  # the end of the latest kernel of a backward
    for one in trace.device:
        begin, end, _ = one.span
        if one.thread not in (main, None):
            since, gap, covered = end, 0.0, end
        elif since is not None:
            gap += max(0.0, begin - covered)
            covered = max(covered, end)
            if is_step(one):
                idle, whole = idle + gap, whole + covered - since
                since, gap = covered, 0.0
    return idle / whole if whole else math.nan
