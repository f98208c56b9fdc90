"""What `benchmarks/trace_analysis.py` reads from a trace, on traces of a few events whose figures can be counted by hand."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="looks at a checkout, which is not here")

MAIN, AUTOGRAD = 100, 101  # threads of the host
COMPUTE, COPIES = 7, 13  # streams
ADAM = "void at::native::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor<float, 4>>(...)"
LENGTH = 1000.0  # microseconds of an update


def analysis() -> Any:
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))  # as when a script of it is started
    return importlib.import_module("trace_analysis")


def mark(ts: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": analysis().MARK, "pid": 1, "tid": MAIN, "ts": ts, "dur": 1.0}


def call(name: str, ts: float, number: int, *, dur: float = 2.0, thread: int = MAIN) -> dict[str, Any]:
    return {
        "ph": "X", "cat": "cuda_runtime", "name": name, "pid": 1, "tid": thread, "ts": ts, "dur": dur,
        "args": {"cbid": 0, "correlation": number},
    }  # fmt: skip


def on_device(
    name: str, ts: float, number: int, *, dur: float, stream: int = COMPUTE, category: str = "kernel", **arguments: Any
) -> dict[str, Any]:
    arguments = {"device": 0, "stream": stream, "correlation": number, **arguments}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": arguments}


def update(begin: float, number: int, *, wait_from: float = 80.0) -> list[dict[str, Any]]:
    """One that begins on the host at `begin`. The device: forward 100 to 300, backward 300 to 700, step 750 to 900."""
    return [
        mark(begin),
        call("cudaMemcpyAsync", begin + 5, number),
        call("cudaLaunchKernel", begin + 10, number + 1),
        call("cuLaunchKernelEx", begin + 30, number + 2, thread=AUTOGRAD) | {"cat": "cuda_driver"},
        call("cudaLaunchKernel", begin + 60, number + 3),
        call("cudaEventSynchronize", begin + wait_from, number + 4, dur=800.0),
        on_device(
            "Memcpy HtoD (Pinned -> Device)", begin + 50, number, dur=100, stream=COPIES, category="gpu_memcpy", bytes=2**25
        ),
        on_device("forward", begin + 100, number + 1, dur=200),
        on_device("backward", begin + 300, number + 2, dur=400),
        on_device(ADAM, begin + 750, number + 3, dur=150),
    ]


def trace(**options: Any) -> Any:
    """Two updates, and what a trace has beside."""
    beside = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}},
        {"ph": "s", "id": 1, "pid": 1, "tid": MAIN, "ts": 10, "cat": "ac2g", "name": "ac2g"},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": MAIN, "ts": 9, "dur": 3, "args": {"External id": 4}},
        call("cudaDeviceSynchronize", 2 * LENGTH + 50, 90, dur=500),  # ends the profile, after the last update
    ]
    events = [*update(LENGTH, 20, **options), *update(0, 10, **options), mark(2 * LENGTH), *beside]
    return analysis().Trace.of(events)


def test_it_counts_waits_and_launches() -> None:
    """Those between the first and the last mark, of each update, by name; and the share of time in waits."""
    found = analysis().findings(trace())

    assert (found.updates, found.milliseconds) == (2, 1.0)
    assert found.busy_milliseconds == pytest.approx(0.8)  # 50 to 700, and 750 to 900
    assert found.waits == {"cudaEventSynchronize": 1.0}
    assert found.waited == pytest.approx(0.8)
    assert (found.launches, found.graphs) == (3.0, 0.0)


@pytest.mark.parametrize(
    ("name", "waits"),
    [
        ("cudaStreamSynchronize", True),
        ("cudaStreamSynchronize_v3020", True),
        ("cudaDeviceSynchronize", True),
        ("cudaMemcpy", True),
        ("cuEventSynchronize", True),
        ("cudaMemcpyAsync", False),
        ("cudaStreamWaitEvent", False),
        ("cudaEventQuery", False),
    ],
)
def test_it_knows_which_calls_wait(name: str, waits: bool) -> None:
    """A call that lets a stream wait, or that only asks, does not hold the host."""
    found = analysis().findings(analysis().Trace.of([mark(0), call(name, 10, 1), mark(LENGTH)]))

    assert found.waits == ({name: 1.0} if waits else {})


def test_it_tells_whether_the_step_was_queued_first() -> None:
    """A step that is launched before the host begins to wait, in each update, and one that is launched after it."""
    first, after = analysis().findings(trace()), analysis().findings(trace(wait_from=40.0))

    assert (first.queued, first.stepped) == (2, 2)
    assert (after.queued, after.stepped) == (0, 2)


def test_it_measures_what_is_copied_beside_kernels() -> None:
    """The copy runs from 50 to 150, a kernel on another stream from 100; not small copies, nor those on the kernels' stream."""
    events = [
        mark(0),
        call("cudaMemcpyAsync", 1, 1),
        call("cudaLaunchKernel", 2, 2),
        on_device("Memcpy HtoD (Pinned -> Device)", 20, 1, dur=40, category="gpu_memcpy", bytes=2**25),
        on_device("kernel", 10, 2, dur=100),
        on_device("Memcpy HtoD (Pinned -> Device)", 20, 1, dur=10, stream=COPIES, category="gpu_memcpy", bytes=8),
        mark(LENGTH),
    ]

    assert analysis().findings(trace()).copied_beside == pytest.approx(0.5)
    assert analysis().findings(analysis().Trace.of(events)).copied_beside == 0.0


def test_it_measures_idle_time() -> None:
    """From 900 to 1100 between two updates, from 700 to 750 of the 200 of the optimizer phase, and in all."""
    found = analysis().findings(trace())

    assert found.idle_between == pytest.approx(0.2)
    assert found.idle_in_step == pytest.approx(50 / 200)
    busy = 2 * (50 + 200 + 400 + 150)  # the copy's 50 before the forward, and the kernels
    assert found.idle == pytest.approx(1 - busy / (1900 - 50))


def test_kernels_of_a_graph_belong_to_its_launch() -> None:
    """A graph is one launch; its kernels have the launch's number, and the step inside has no name of its own."""
    events = [
        mark(0),
        call("cudaGraphLaunch", 10, 1),
        on_device("triton_poi_fused_0", 30, 1, dur=10),
        on_device("triton_red_fused_1", 50, 1, dur=10),
        call("cudaEventSynchronize", 20, 2, dur=50),
        mark(LENGTH),
    ]
    found = analysis().findings(analysis().Trace.of(events))

    assert (found.launches, found.graphs, found.stepped) == (1.0, 1.0, 0)
    assert found.idle == pytest.approx(1 - 20 / 30)
    assert math.isnan(found.idle_in_step)
    assert math.isnan(found.idle_between)


def test_a_trace_without_a_device_says_nothing_about_it() -> None:
    """As on the CPU: NaN, not an error; and so without an update."""
    found = analysis().findings(analysis().Trace.of([mark(0), mark(LENGTH)]))

    assert found.updates == 1
    assert found.waits == {}
    assert all(math.isnan(part) for part in (found.copied_beside, found.idle_between, found.idle_in_step, found.idle))
    assert analysis().findings(analysis().Trace.of([])).updates == 0


@pytest.mark.slow
def test_the_picture_has_a_row_for_each_stream_and_two_for_the_host(tmp_path: Path) -> None:
    """With the colour of who launched it; and it can be drawn."""
    analysis()
    picture = importlib.import_module("trace_picture")
    rows = picture.lanes(trace())

    assert list(rows) == ["stream 7", "stream 13", "host waits", "host launches"]
    assert [name for name, _ in rows["stream 7"]] == [picture.FORWARD, picture.BACKWARD, picture.STEP] * 2
    assert {name for name, _ in rows["stream 13"]} == {picture.COPY}
    assert len(rows["host waits"]) == 2
    picture.draw({"one": trace(), "other": trace()}, tmp_path / "trace.png")
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
