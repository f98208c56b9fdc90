"""A signal to any rank ends the run on all of them after the same update, and never later than it is allowed to."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events

import cuts
import ignite_train
from ignite_train.handlers import FailureBoard, StopOnSignal, stop_on_signal
from ignite_train.ranks import collectives
from processes import DEADLINE_SECONDS
from test_failures import Board, Group, Loader, make, threads, until

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def installed() -> list[Any]:
    """What handles our signals, and the descriptor that Python tells of signals."""
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    return [*map(signal.getsignal, SIGNALS), descriptor]


# --- one process ---


@pytest.mark.parametrize("same", [True, False], ids=["the same", "another"])
def test_a_trainer_has_one(same: bool) -> None:
    """A second one would leave the handlers of the first one installed after the run."""
    before, trainer, stop = installed(), make("auto"), StopOnSignal()
    stop.attach(trainer)
    with pytest.raises(ValueError, match="a trainer must have one StopOnSignal at most, got a second"):
        (stop if same else StopOnSignal([signal.SIGUSR1])).attach(trainer)
    assert trainer.run(cuts.cut(cuts.samples(), [8] * 2), max_epochs=1).iteration == 2
    assert installed() == before
    stop.attach(other := make("auto"))
    assert other.run(cuts.cut(cuts.samples(), [8] * 2), max_epochs=1).iteration == 2
    assert installed() == before


def test_two_trainers_at_a_time_have_one_each() -> None:
    """The second would have put the handlers of the first back at its end, in place of the script's."""
    before, outer, inner, stop = installed(), make("auto"), make("auto"), StopOnSignal()
    for trainer in (outer, inner):
        stop.attach(trainer)
    data = cuts.cut(cuts.samples(), [8] * 2)
    with outer.session(), pytest.raises(RuntimeError, match="must listen for one trainer at a time, got a second; give each"):
        inner.run(data, max_epochs=1)
    assert installed() == before
    assert inner.run(data, max_epochs=1).iteration == 2
    assert installed() == before


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("event", "last"),
    [
        (Events.STARTED, 1),
        (Events.ITERATION_STARTED(once=2), 2),
        (Events.ITERATION_COMPLETED(once=2), 2),
        (Events.EPOCH_COMPLETED, 4),
    ],
    ids=["before", "in an update", "after an update", "after an epoch"],
)
def test_the_run_ends_after_this_update(number: signal.Signals, event: Any, last: int) -> None:
    """As if nothing more had been asked for: handlers of COMPLETED run, and what handled the signals before is back."""
    before, completed = installed(), []
    trainer, stop = make("auto"), StopOnSignal()
    stop.attach(trainer)
    trainer.add_event_handler(event, lambda: signal.raise_signal(number))
    trainer.add_event_handler(Events.COMPLETED, lambda: completed.append(installed() == before))
    assert trainer.run(cuts.cut(cuts.samples(), [8] * 4), max_epochs=2).iteration == last
    assert stop.received is number
    assert completed == [False]  # still there for what saves at the end, whenever that was attached
    assert installed() == before
    until(lambda: threads() == [], "no thread is left")


def test_a_second_run_listens_again_and_goes_on() -> None:
    """The stop of one run is nothing to the next."""
    trainer, stop = make("auto"), StopOnSignal([signal.SIGUSR1])
    stop.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=2), lambda: signal.raise_signal(signal.SIGUSR1))
    loader = cuts.cut(cuts.samples(), [8] * 4)
    assert trainer.run(loader, max_epochs=1).iteration == 2
    assert stop.received is signal.SIGUSR1
    assert trainer.run(loader).iteration == 4
    assert stop.received is None


def test_it_listens_as_long_as_others_save() -> None:
    """What else is done when the run is over comes before its end, also what was attached when it started."""
    before, trainer, saving = installed(), make("auto"), []
    StopOnSignal().attach(trainer)

    @trainer.on(Events.STARTED)
    def attach() -> None:
        trainer.add_event_handler(Events.COMPLETED, lambda: saving.append(installed() != before))

    trainer.run(cuts.cut(cuts.samples(), [8]), max_epochs=1)
    assert saving == [True]
    assert installed() == before


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_no_handler_behind(error: type[BaseException]) -> None:
    """However the run ends, signals mean what they meant before, and no thread is left."""
    before, trainer = installed(), make("auto")
    StopOnSignal().attach(trainer)

    @trainer.on(Events.ITERATION_STARTED)
    def boom() -> None:
        raise error

    with pytest.raises(error):
        trainer.run(cuts.cut(cuts.samples(), [8] * 4), max_epochs=1)
    assert installed() == before
    until(lambda: threads() == [], "no thread is left")


def test_signals_that_come_together_are_heard_one_by_one() -> None:
    watch = stop_on_signal._Watch.__new__(stop_on_signal._Watch)
    watch._reader, writer = socket.socketpair()
    watch._reader.setblocking(False)
    watch._first = None
    with watch._reader, writer:
        writer.send(bytes([signal.SIGUSR1, signal.SIGUSR2]))
        assert [watch._next(), watch._next()] == [signal.SIGUSR1, signal.SIGUSR2]


def test_signals_of_others_reach_them() -> None:
    """A descriptor that was told of signals before, an event loop's say, hears of those that are not ours."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    ours.settimeout(DEADLINE_SECONDS)
    heard: list[Any] = []
    trainer = make("auto")
    StopOnSignal([signal.SIGUSR1]).attach(trainer)

    @trainer.on(Events.ITERATION_STARTED(once=1))
    def other_signal() -> None:
        signal.raise_signal(signal.SIGUSR2)
        heard.append(ours.recv(1)[0])

    previous_handler = signal.signal(signal.SIGUSR2, lambda *_: None)
    previous_descriptor = signal.set_wakeup_fd(theirs.fileno())
    try:
        assert trainer.run(cuts.cut(cuts.samples(), [8] * 2), max_epochs=1).iteration == 2
        assert signal.set_wakeup_fd(previous_descriptor) == theirs.fileno()
    finally:
        signal.set_wakeup_fd(previous_descriptor)
        signal.signal(signal.SIGUSR2, previous_handler)
        ours.close()
        theirs.close()
    assert heard == [signal.SIGUSR2]


def test_a_signal_whose_handler_python_does_not_know_keeps_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that a library of C has installed before Python began, which Python could not put back. A warning says so."""
    known, install, changed = signal.getsignal, signal.signal, set[int]()
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGUSR1 else known(number))
    monkeypatch.setattr(signal, "signal", lambda number, handler: (changed.add(number), install(number, handler))[1])
    trainer, stop = make("auto"), StopOnSignal()
    stop.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=2), lambda: signal.raise_signal(signal.SIGTERM))
    assert trainer.run(cuts.cut(cuts.samples(), [8] * 4), max_epochs=1).iteration == 2
    assert changed == {signal.SIGTERM}
    assert [line for line in caplog.messages if "SIGUSR1" in line] == [
        "SIGUSR1 has a handler that Python did not install, and keeps it: it will not end the run"
    ]


def test_outside_of_the_main_thread_the_run_continues(caplog: pytest.LogCaptureFixture) -> None:
    """One warning in two runs says that it listens to nothing; a later run in the main thread listens."""
    before, trainer, stop, runs = installed(), make("auto"), StopOnSignal(), []
    stop.attach(trainer)
    loader = cuts.cut(cuts.samples(), [8] * 4)

    def run() -> None:
        runs.extend(trainer.run(loader, max_epochs=epochs).iteration for epochs in (1, 2))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert (runs, stop.received) == ([4, 8], None)
    assert installed() == before
    (message,) = [message for message in caplog.messages if "StopOnSignal" in message]
    assert message.startswith("StopOnSignal listens to nothing in this run: it is not in the main thread")
    assert "Ray, stops a run by ending its processes" in message
    trainer.add_event_handler(Events.ITERATION_STARTED(once=10), lambda: signal.raise_signal(signal.SIGTERM))
    assert (trainer.run(loader, max_epochs=3).iteration, stop.received) == (10, signal.SIGTERM)


def test_arguments_must_make_sense() -> None:
    """What no process can handle is refused, and a grace of nothing."""
    with pytest.raises(ValueError, match="signals must be signals that a process can handle, got SIGKILL"):
        StopOnSignal([signal.SIGTERM, signal.SIGKILL])
    with pytest.raises(TypeError, match=r"signals must be a sequence of signals, got .*SIGTERM.*; pass \(signal.SIGTERM,\)"):
        StopOnSignal(signal.SIGTERM)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="grace_seconds must be greater than 0, got 0"):
        StopOnSignal(grace_seconds=0)


def fork_while_listening(board: Board) -> None:
    trainer, stop = make("auto"), StopOnSignal()
    stop.attach(trainer)
    before = installed()

    @trainer.on(Events.ITERATION_STARTED(once=2))
    def fork() -> None:
        assert installed() != before
        child = os.fork()
        if child == 0:
            if installed() == before:
                os.kill(os.getpid(), signal.SIGTERM)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM, status

    trainer.run(cuts.cut(cuts.samples(), [8] * 4), max_epochs=1)
    board.write("done", [stop.received, trainer.state.iteration])


def test_a_forked_process_is_on_its_own(tmp_path: Path) -> None:
    """A worker that gets SIGTERM dies of it, as it would have before, and the run hears nothing of it."""
    with Group(tmp_path, fork_while_listening, world_size=1) as group:
        assert group.status(0) == 0
        assert group.board.read("done") == [None, 4]
        assert "SIGTERM" not in group.stderr(0)


class Endless(torch.utils.data.Dataset[Any]):
    """The same samples again and again."""

    samples = cuts.samples()

    def __len__(self) -> int:
        return 64_000_000

    def __getitem__(self, index: int) -> Any:
        return tuple(part[index % len(part)] for part in self.samples)


class Bytes(Endless):
    """Samples without tensors, more than a pipe holds: the worker of a rank that is killed waits to send them."""

    def __getitem__(self, index: int) -> Any:
        return bytes(100_000)


@contextlib.contextmanager
def started(call: str) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A process of a group of its own, without a terminal, that calls a function of this file; and what the process prints."""
    code = f"import sys; sys.path[:] = {sys.path!r}; import test_signals; test_signals.{call}"
    pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True, **pipes) as process:
        assert process.stdout is not None
        deadline = threading.Timer(DEADLINE_SECONDS, process.kill)
        deadline.start()
        try:
            yield process, process.stdout
        finally:
            deadline.cancel()
            process.kill()


def say(line: str) -> None:
    """Tells the process that started this one."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Leading(Endless):
    """Samples for which a process is started that leads a session of its own, here or in a worker."""

    def __getitem__(self, index: int) -> Any:
        subprocess.run(["true"], preexec_fn=os.setsid, check=True)
        return super().__getitem__(index)


def lead(_worker: int) -> None:
    """A worker leaves the session by itself."""
    os.setsid()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no sessions")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_and_a_worker_may_lead_sessions(workers: int) -> None:
    """The leader of a process group could not. A worker does not lead the group that it is moved to."""
    trainer, stop = make("auto"), StopOnSignal()
    stop.attach(trainer)
    loader = torch.utils.data.DataLoader(Leading(), batch_size=4, num_workers=workers, worker_init_fn=lead if workers else None)
    assert trainer.run(loader, max_iters=2).iteration == 2


def train_on_bytes() -> None:
    """Runs for minutes, and prints which workers it has when they have sent something."""
    trainer = make("auto", lambda model, _batch: cuts.forward(model, next(iter(cuts.cut(cuts.samples(), [8])))))
    StopOnSignal().attach(trainer)
    loader = torch.utils.data.DataLoader(Bytes(), batch_size=1, num_workers=2, collate_fn=list)
    found = lambda: " ".join(str(one.pid) for one in multiprocessing.active_children())  # noqa: E731
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: say(f"workers {found()}"))
    trainer.run(loader, max_epochs=1)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_what_kills_the_group_leaves_no_worker(number: signal.Signals) -> None:
    """The workers have a group of their own."""
    with started("train_on_bytes()") as (process, printed):
        workers = next(line for line in iter(printed.readline, "") if line.startswith("workers")).split()[1:]
        assert len(workers) == 2
        os.killpg(process.pid, number)
        assert process.wait() == -number
        until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers), "no worker is left")


def train_with_workers(name: str, persistent: bool) -> None:
    """Runs for minutes unless it is stopped, and prints when it trains and how it ended."""
    # The update that a signal meets still needs its workers, which have 4 micro-batches ready.
    trainer, stop = make("auto", accumulation_steps=64), StopOnSignal([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
    stop.attach(trainer)
    kind: Any = {"torch": torch.utils.data.DataLoader, "ignite_train": ignite_train.ResumableLoader}[name]
    loader = kind(Endless(), batch_size=1, shuffle=False, num_workers=2, persistent_workers=persistent)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: say("trains"))
    trainer.run(loader, max_epochs=1)
    say(f"received {stop.received}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "name", "persistent"),
    [
        (signal.SIGTERM, "torch", False),
        (signal.SIGTERM, "ignite_train", True),
        (signal.SIGUSR1, "torch", True),
        (signal.SIGINT, "torch", True),
    ],
)
def test_a_signal_to_the_group_leaves_the_workers(number: signal.Signals, name: str, persistent: bool) -> None:
    """Torchrun and terminals send it so. The update is completed with what the workers give, and the run returns."""
    with started(f"train_with_workers({name!r}, {persistent})") as (process, printed):
        assert "trains\n" in iter(printed.readline, "")
        os.killpg(process.pid, number)
        assert (printed.read(), process.wait()) == (f"received {int(number)}\n", 0)


# --- two processes ---


def train_until_stopped(board: Board, reduction: str) -> None:
    """Runs for minutes, if nobody stops it."""
    rank, before = idist.get_rank(), installed()
    trainer, stop = make(reduction), StopOnSignal()
    stop.attach(trainer)
    FailureBoard().attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: board.write(f"trains.{rank}"))
    trainer.run(Loader(cuts.cut(cuts.samples(), [1]) * 1_000_000, lambda _: time.sleep(0.005)), max_epochs=1)
    assert installed() == before
    until(lambda: threads() == [], "no thread is left")
    board.write(f"ended.{rank}", [trainer.state.iteration, stop.received])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "to", "reduction"),
    [
        (signal.SIGTERM, [0], "ddp"),
        (signal.SIGTERM, [1], "explicit"),
        (signal.SIGTERM, [0, 1], "explicit"),
        (signal.SIGUSR1, [0], "explicit"),
        (signal.SIGUSR1, [1], "ddp"),
        (signal.SIGUSR1, [0, 1], "ddp"),
    ],
)
def test_all_ranks_stop_after_the_same_update(tmp_path: Path, number: signal.Signals, to: list[int], reduction: str) -> None:
    """Whichever rank gets whichever signal, one or both: status 0, the same last update, and what was installed is back."""
    with Group(tmp_path, train_until_stopped, reduction) as group:
        for rank in (0, 1):
            group.board.wait_for(f"trains.{rank}")
        group.send(number, *to)
        assert [group.status(rank) for rank in (0, 1)] == [0, 0]
        outcomes = [group.board.read(f"ended.{rank}") for rank in (0, 1)]
        assert outcomes[0][0] == outcomes[1][0] < 1_000_000
        heard = [rank for rank, (_, received) in enumerate(outcomes) if received is not None]
        assert heard  # and if both got it, the run of one may have ended by the other's before it heard of its own
        assert {*heard} <= {*to}
        for rank in heard:
            assert outcomes[rank][1] == number
            assert f"{number.name}: the run ends after this update or the next, on all ranks" in group.stderr(rank)


def get_stuck(board: Board, grace_seconds: float, together: bool) -> None:
    """Rank 1 is stuck in its loader, where it still runs Python; rank 0 waits for it in a collective, where it does not.

    If they end `together`, a process ends only when both are about to: the end of rank 1 alone would wake rank 0 up.
    """
    end_process = collectives.end_process

    def end(status: int) -> None:
        board.write(f"ends.{idist.get_rank()}")
        for rank in (0, 1):
            board.wait_for(f"ends.{rank}")
        end_process(status)

    if together:
        collectives.end_process = end  # type: ignore[assignment]

    def stick(index: int) -> None:
        if index == 2:
            board.write(f"sticks.{idist.get_rank()}")
            while idist.get_rank() == 1:
                time.sleep(0.01)

    trainer = make("ddp")
    StopOnSignal(grace_seconds=grace_seconds).attach(trainer)
    trainer.run(Loader(cuts.cut(cuts.samples(), [8] * 4), stick), max_epochs=1)


@pytest.mark.slow
def test_a_rank_that_is_stuck_ends_when_its_grace_is_over(tmp_path: Path) -> None:
    """Not before, and with its stacks: blocked in a collective or busy in Python."""
    with Group(tmp_path, get_stuck, 1.0, True) as group:
        for rank in (0, 1):
            group.board.wait_for(f"sticks.{rank}")
        sent = time.monotonic()
        group.send(signal.SIGTERM, 0, 1)
        assert [group.status(rank, 1.0 + DEADLINE_SECONDS) for rank in (0, 1)] == [128 + signal.SIGTERM] * 2
        assert time.monotonic() - sent >= 1.0
        for rank in (0, 1):
            late = f"SIGTERM: the run has not ended within grace_seconds=1; rank {rank}, at update "
            assert late in group.stderr(rank)
            assert "in get_stuck" in group.stderr(rank).partition(late)[2]


@pytest.mark.slow
def test_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    """Whatever grace is left, and also where the main thread runs no handler."""
    with Group(tmp_path, get_stuck, 3 * DEADLINE_SECONDS, False) as group:
        for rank in (0, 1):
            group.board.wait_for(f"sticks.{rank}")
        group.send(signal.SIGTERM, 0)
        until(lambda: "SIGTERM: the run ends after" in group.stderr(0), "the first signal is heard of")
        again = time.monotonic()
        while group.lives(0) and time.monotonic() < again + DEADLINE_SECONDS:
            group.send(signal.SIGUSR1, 0)
            time.sleep(0.05)
        assert group.status(0) == 128 + signal.SIGUSR1
        assert "SIGUSR1 again: rank 0, at update " in group.stderr(0)


def ask_twice(board: Board) -> None:
    stop_on_signal._SAME_REQUEST_SECONDS = 60.0  # the thread may hear of the second one late
    trainer, stop = make("auto"), StopOnSignal()
    stop.attach(trainer)
    for number in SIGNALS:
        trainer.add_event_handler(Events.ITERATION_STARTED(once=2), signal.raise_signal, number)
    trainer.run(cuts.cut(cuts.samples(), [8] * 4), max_epochs=1)
    board.write("ended", [trainer.state.iteration, stop.received])


def test_a_request_that_comes_twice_is_one(tmp_path: Path) -> None:
    """Scheduler and launcher both pass it on: that is no second signal."""
    with Group(tmp_path, ask_twice, world_size=1) as group:
        assert group.status(0) == 0
        assert group.board.read("ended") == [2, int(signal.SIGTERM)]


# --- torchrun ---

SCRIPT = """
import os, pathlib, signal
import ignite.distributed as idist
from ignite.engine import Events
import cuts
from ignite_train.handlers import FailureBoard, HangWatch, StopOnSignal
from test_failures import make

here = pathlib.Path(__file__).parent
idist.initialize("gloo")
rank, trainer = idist.get_rank(), make("ddp")
for handler in (FailureBoard(), HangWatch(), StopOnSignal()):
    handler.attach(trainer)

@trainer.on(Events.ITERATION_STARTED(once=3))
def die_once():
    if rank == 1 and not (here / "died").exists():
        (here / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)

trainer.run(cuts.cut(cuts.samples(), [8] * 4), max_epochs=1)
(here / f"ended.{rank}").write_text(f"{trainer.state.iteration} {os.environ['TORCHELASTIC_RESTART_COUNT']}")
"""


@pytest.mark.slow
def test_torchrun_starts_a_job_again_whose_rank_was_killed(tmp_path: Path) -> None:
    """SIGKILL, once: the other rank ends, the launcher starts both again, and the second attempt comes to its end.

    The launcher of torch 2.13 gives both attempts the same store, where gloo finds the addresses of dead processes: two of
    three restarts fail on that. Told not to share its store, it makes a new one for each attempt.
    """
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    paths = [str(Path(path).parent) for path in (__file__, cuts.__file__)] + [str(Path(ignite_train.__file__).parents[1])]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # see the docstring
    done = subprocess.run(
        [*launcher, "--monitor-interval=0.1", str(script)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "died").exists()
    assert [(tmp_path / f"ended.{rank}").read_text() for rank in (0, 1)] == ["4 1", "4 1"]


def test_a_handler_that_is_installed_during_the_run_has_the_signal_for_itself(caplog: pytest.LogCaptureFixture) -> None:
    """The run neither says that it ends nor is ended when the time for that is over; the handler stays after the run."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = ignite_train.create_trainer(model, optimizer, lambda model, x: model(x).square().mean())
    stop, received = StopOnSignal([signal.SIGUSR1], grace_seconds=0.2), list[int]()
    stop.attach(trainer)

    def take_over(number: int, _frame: Any) -> None:
        received.append(number)

    trainer.add_event_handler(Events.STARTED, lambda: signal.signal(signal.SIGUSR1, take_over))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: signal.raise_signal(signal.SIGUSR1))
    before = signal.getsignal(signal.SIGUSR1)
    try:
        trainer.run([torch.ones(2, 3)] * 4)
        assert signal.getsignal(signal.SIGUSR1) is take_over
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (trainer.state.iteration, received, stop.received) == (4, [signal.SIGUSR1], None)
    assert "SIGUSR1" not in caplog.text


def test_a_handler_that_calls_the_one_before_ends_the_run(caplog: pytest.LogCaptureFixture) -> None:
    """As one that writes its logs out first: the run is told, and the time for its end begins."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = ignite_train.create_trainer(model, optimizer, lambda model, x: model(x).square().mean())
    stop = StopOnSignal([signal.SIGUSR1])
    stop.attach(trainer)

    @trainer.on(Events.STARTED)
    def chain() -> None:
        earlier: Any = signal.getsignal(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, lambda number, frame: earlier(number, frame))

    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: signal.raise_signal(signal.SIGUSR1))
    before = signal.getsignal(signal.SIGUSR1)
    try:
        trainer.run([torch.ones(2, 3)] * 9)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (trainer.state.iteration < 9, stop.received) == (True, signal.SIGUSR1)
    assert "SIGUSR1: the run ends after this update or the next" in caplog.text


def test_sessions_that_end_in_the_order_in_which_they_began_listen_to_their_ends() -> None:
    """The first to end put the script's handlers back under the other, which a signal then ended without a save."""
    before, trainers = installed(), [make("auto"), make("auto"), make("auto")]
    stops, sessions = [StopOnSignal(), StopOnSignal([signal.SIGUSR1]), StopOnSignal()], list[Any]()
    for trainer, stop in zip(trainers, stops, strict=True):
        stop.attach(trainer)
        sessions.append(trainer.session())
        sessions[-1].__enter__()
    for ended, stop in enumerate(stops):
        number = stop._requests[-1]
        signal.raise_signal(number)
        assert next(one.received for one in stops[ended:] if number in one._requests) is number
        sessions[ended].__exit__(None, None, None)
        for one in stops:
            one.received = None
    assert installed() == before
