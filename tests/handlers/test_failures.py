"""A rank that fails or hangs takes nobody hostage: the others end in time, and say who it was."""

from __future__ import annotations

import json
import linecache
import logging
import logging.handlers
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cuts
import ignite_train
from ignite_train import ForwardOutput, NonFiniteError, Trainer, TrainEvents, TrainingError, create_evaluator, create_trainer
from ignite_train.handlers import FailureBoard, HangWatch, PeerFailureError, Validation, failure_board, hang_watch
from ignite_train.ranks import collectives, whereabouts
from ignite_train.ranks.process import has_ended, look_up, own_process
from ignite_train.ranks.sealed_messages import SealedMessages
from ignite_train.ranks.whereabouts import find_whereabouts
from processes import DEADLINE_SECONDS, Processes, forked
from tiers import nightly
from update_options import with_options


def until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> Any:
    """Waits for `condition` and returns what it is; an error at the deadline."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.02)
    return value


class Board:
    """What the processes of a test tell one another and the test: small files in a directory, written at once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, name: str, value: Any = None) -> None:
        temporary = self.directory / f".{name}.{os.getpid()}.{threading.get_ident()}"
        temporary.write_text(json.dumps(value))
        temporary.rename(self.directory / name)

    def read(self, name: str) -> Any:
        return json.loads((self.directory / name).read_text())

    def has(self, name: str) -> bool:
        return (self.directory / name).exists()

    def wait_for(self, name: str, seconds: float = DEADLINE_SECONDS) -> Any:
        until(lambda: self.has(name), f"a note {name!r}", seconds)
        return self.read(name)


lists_keys = pytest.mark.skipif(not hasattr(TCPStore, "list_keys"), reason="the store of this torch cannot list its keys")


class Group(Processes):
    """Processes of one gloo group, any of which may fail, hang or be stopped. None is left over at the end.

    Each runs `function(board, *args)`; what it writes to standard error is in `stderr(rank)`. They meet at a file, at a store
    in the process of rank 0 (`tcp`), or at one in this process, as torchrun has it (`agent`).
    """

    def __init__(
        self,
        directory: Path,
        function: Callable[..., Any],
        *args: Any,
        world_size: int = 2,
        tcp: bool = False,
        agent: TCPStore | None = None,
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.board = Board(directory)
        place: dict[str, Any] = {}
        if tcp or agent is not None:
            place = {"WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": agent.port if agent else _free_port()}
            place["TORCHELASTIC_USE_AGENT_STORE"] = agent is not None
        jobs = [(directory, pickle.dumps((function, args)), rank, world_size, place) for rank in range(world_size)]
        super().__init__(
            [forked.Process(target=_child, args=job, daemon=True) for job in jobs],
            [directory / f"stderr.{rank}" for rank in range(world_size)],
        )

    def status(self, rank: int, seconds: float = DEADLINE_SECONDS) -> int:
        """Waits for the end of a process and returns its exit status."""
        process = self.processes[rank]
        process.join(seconds)
        assert process.exitcode is not None, f"rank {rank} had not ended after {seconds} s"
        return process.exitcode

    def lives(self, rank: int) -> bool:
        return self.processes[rank].is_alive()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _child(directory: Path, job: bytes, rank: int, world_size: int, place: dict[str, Any]) -> None:
    with (directory / f"stderr.{rank}").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    function, args = pickle.loads(job)
    if place:
        os.environ.update({name: str(value) for name, value in (place | {"RANK": rank, "LOCAL_RANK": rank}).items()})
        idist.initialize("gloo")
    else:
        idist.initialize("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size)
    function(Board(directory), *args)


def be_patient() -> None:
    """In this process a main thread that is to come out by itself may take its time: nothing else ends it."""
    failure_board._PATIENCE_SECONDS = failure_board._ROLL_CALL_SECONDS = 2 * DEADLINE_SECONDS


def await_answers() -> None:
    """In this process a rank that is slow to answer is not taken for one that is gone."""
    failure_board._ROLL_CALL_SECONDS = 2 * DEADLINE_SECONDS


def count_looks() -> Callable[[], int]:
    """Returns how often the board has been looked at in this process from here on; at the first look it is known there."""
    looks: list[str] = []
    has = SealedMessages.has

    def counted(self: SealedMessages, name: str) -> bool:
        found = has(self, name)
        if name in ("news", "first"):
            looks.append(name)
        return found

    SealedMessages.has = counted  # type: ignore[method-assign]
    return lambda: len(looks)


def make(reduction: str, forward: Callable[..., Any] = cuts.forward, **options: Any) -> Trainer:
    """A trainer of a model of two layers, each in a bucket of its own."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(cuts.FEATURES, 4), nn.Linear(4, 1)).double()
    if reduction == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=1e-5)
    if reduction == "fsdp":
        for module in (*model, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (idist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"protect": False, **options}  # each handler is tried alone
    return create_trainer(model, optimizer, forward, **with_options(reduction=reduction, **options))  # type: ignore[arg-type]


# --- FailureBoard ---


EVENTS = {
    "micro_batch_started": TrainEvents.MICRO_BATCH_STARTED,
    "gradients_ready": TrainEvents.GRADIENTS_READY,
    "step_completed": TrainEvents.STEP_COMPLETED,
    "iteration_completed": Events.ITERATION_COMPLETED,
    "epoch_completed": Events.EPOCH_COMPLETED,
    "completed": Events.COMPLETED,
}
WAYS = ["ddp", "explicit", "fsdp"]
SITES = ["loader", "forward", "backward", "step", *EVENTS]


class Loader(list[Any]):
    """A loader that calls `before(index)` before each micro-batch."""

    def __init__(self, micro_batches: list[Any], before: Callable[[int], None]) -> None:
        super().__init__(micro_batches)
        self.before = before

    def __iter__(self) -> Iterator[Any]:
        for index, micro_batch in enumerate(super().__iter__()):
            self.before(index)
            yield micro_batch


def fail_on_one_rank(board: Board, site: str, failing: int, reduction: str, protected: bool) -> None:
    """The rank fails at its third update, tells so, and its process lives on: a slow teardown, or a thread that is not done."""
    await_answers()
    mine = idist.get_rank() == failing

    def boom(here: str, update: int | None = None) -> None:
        if mine and here == site and (update or trainer.state.iteration) == 3:
            board.write("failed", time.monotonic())
            raise RuntimeError(f"boom in {site}")

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        boom("forward")
        return cuts.forward(model, micro_batch)

    trainer = make(reduction, forward)
    first = next(iter(trainer.process.model.parameters()))  # type: ignore[attr-defined]
    first.register_hook(lambda _gradient: boom("backward"))
    trainer.optimizers["optimizer"].register_step_pre_hook(lambda *_: boom("step"))  # type: ignore[attr-defined]
    if protected:
        FailureBoard().attach(trainer)
    for name, event in EVENTS.items():
        trainer.add_event_handler(event, partial(boom, name, None))
    if not mine and site == "completed":  # it waits for the other as a save by all ranks does
        trainer.add_event_handler(Events.COMPLETED, idist.barrier)
    loader = Loader(cuts.cut(cuts.samples(), [8] * 3), lambda index: boom("loader", index + 1))
    try:
        trainer.run(loader, max_epochs=1 if site == "completed" else 2)
    except BaseException as error:
        notes = getattr(error, "__notes__", [])
        board.write(f"raised.{idist.get_rank()}", [type(error).__name__, str(error), notes, time.monotonic()])
        if mine:
            board.wait_for("release", 3 * DEADLINE_SECONDS)
        raise


def threads() -> list[str]:
    """Threads that our handlers left behind."""
    names = {"FailureBoard", "HangWatch", "StopOnSignal"}
    return [thread.name for thread in threading.enumerate() if thread.name in names]


def see_one_rank_fail(group: Group, site: str, failing: int) -> dict[str, float]:
    """Asserts what both ranks do and returns the seconds that each took."""
    survivor, board = 1 - failing, group.board
    failed = board.wait_for("failed")
    assert group.status(survivor, DEADLINE_SECONDS) == 1
    ended = time.monotonic()
    kind, message, notes, raised = board.wait_for(f"raised.{failing}")
    assert (kind, message, notes) == ("RuntimeError", f"boom in {site}", [])
    assert group.lives(failing)
    board.write("release")
    assert group.status(failing) == 1
    update = 2 if site == "loader" else 3  # the loader is asked before the update begins
    cause = f"rank {failing} failed at update {update}: RuntimeError: boom in {site} (rank {survivor} was at update "
    assert cause in group.stderr(survivor)
    assert raised - failed < DEADLINE_SECONDS
    return {"survivor ended": ended - failed, "failing raised": raised - failed}


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(SITES)), ids=SITES)
def test_wherever_a_rank_fails_the_other_ends_and_names_the_cause(tmp_path: Path, index: int) -> None:
    """Either rank, each way of reducing: the other ends in time, with status 1 and the cause; the error goes on unchanged."""
    site, ways = SITES[index], [WAYS[(index + 1) % 3], WAYS[(index + 2) % 3]]
    with (
        Group(tmp_path / "0", fail_on_one_rank, site, 0, ways[0], True) as zero,
        Group(tmp_path / "1", fail_on_one_rank, site, 1, ways[1], True) as one,
        ThreadPoolExecutor() as pool,
    ):
        for case in [pool.submit(see_one_rank_fail, group, site, rank) for rank, group in enumerate((zero, one))]:
            case.result()


@pytest.mark.slow
def test_without_the_board_the_other_hangs_and_blames_the_connection(tmp_path: Path) -> None:
    """The same failure with no board: nothing ends as long as the failed process lives, and then nobody says why."""
    with Group(tmp_path, fail_on_one_rank, "forward", 1, "ddp", False) as group:
        raised = group.board.wait_for("raised.1")[-1]
        until(lambda: not group.lives(0) or time.monotonic() > raised + 2.0, "two seconds")
        assert group.lives(0)
        group.board.write("release")
        assert group.status(0) == 1
        assert "boom" not in group.stderr(0)


LONG_MESSAGE = f"\nboom {'x' * 1000}\na second line"  # as some of torch's, which tell of each backend


def fail_beside_a_busy_rank(board: Board) -> None:
    """Rank 1 fails while rank 0 is in forward, again and again; no collective is near."""
    be_patient()
    rank, seen, forwards = idist.get_rank(), [], count(1)

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        if next(forwards) == 3 and rank == 1:
            raise RuntimeError(LONG_MESSAGE)
        time.sleep(0.01 * (1 - rank))
        return cuts.forward(model, micro_batch)

    trainer = make("explicit", forward, accumulation_steps=100_000)
    events = (TrainEvents.MICRO_BATCH_STARTED, Events.ITERATION_COMPLETED)
    before = [len(trainer._event_handlers[event]) for event in events]
    FailureBoard().attach(trainer)
    trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda error: seen.append(type(error)))
    with pytest.raises(RuntimeError) as caught:
        trainer.run(cuts.cut(cuts.samples(), [1]) * 10_000, max_epochs=1)
    assert seen == [caught.type]
    if rank == 0:
        assert isinstance(caught.value, PeerFailureError)
        assert (caught.value.rank, caught.value.update) == (1, 1)
        assert caught.value.error == f"RuntimeError: boom {'x' * (300 - 4 - 19)} ..."
    else:
        assert str(caught.value) == LONG_MESSAGE
    assert [len(trainer._event_handlers[event]) for event in events] == before
    until(lambda: threads() == [], "no thread is left")
    board.write(f"done.{rank}", next(forwards))


@pytest.mark.slow
def test_a_rank_that_is_not_blocked_raises_where_it_can_be_caught(tmp_path: Path) -> None:
    """It gets a `PeerFailureError` at its next event, handlers of EXCEPTION_RAISED run, and nothing is left behind."""
    with Group(tmp_path, fail_beside_a_busy_rank) as group:
        assert [group.status(rank) for rank in (0, 1)] == [0, 0]
        assert 0 < group.board.read("done.0") < 10_000
        assert "rank 1 failed at update 1: RuntimeError: boom xxx" in group.stderr(0)
        assert "a second line" not in group.stderr(0)


def fail_and_die(board: Board, failing: int) -> None:
    """The process of the rank that fails is gone as soon as `run` has raised."""
    be_patient()
    rank = idist.get_rank()
    trainer = make("ddp")
    FailureBoard().attach(trainer)

    @trainer.on(Events.ITERATION_STARTED(once=3))
    def boom() -> None:
        if rank == failing:
            raise RuntimeError("boom")

    try:
        trainer.run(cuts.cut(cuts.samples(), [8] * 8), max_epochs=1)
    except RuntimeError as error:
        board.write(f"raised.{rank}", [type(error).__name__, getattr(error, "__notes__", [])])
        if rank == failing:
            os._exit(3)
        raise


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_a_connection_that_breaks_keeps_its_error_and_learns_the_cause(tmp_path: Path, failing: int) -> None:
    """Also where rank 0 fails, whose process holds the store: it stays until the others have read what happened."""
    with Group(tmp_path, fail_and_die, failing, tcp=True) as group:
        assert group.status(failing) == 3
        assert group.status(1 - failing, DEADLINE_SECONDS) == 1
        kind, notes = group.board.read(f"raised.{1 - failing}")
        assert kind == "RuntimeError"  # gloo's
        assert [f"rank {failing} failed at update 3: RuntimeError: boom" in note for note in notes] == [True]
        assert f"rank {failing} failed at update 3: RuntimeError: boom" in group.stderr(1 - failing)


def die_in_an_update(board: Board, dying: int, number: int, reduction: str) -> None:
    """A signal that no process can handle, or a fault: the rank has said no more than which process it is."""
    await_answers()
    looks, trainer = count_looks(), make(reduction)
    FailureBoard().attach(trainer)
    HangWatch(timeout_seconds=600).attach(trainer)

    @trainer.on(Events.ITERATION_STARTED(once=3))
    def die() -> None:
        if idist.get_rank() == dying:
            until(looks, "its thread has begun to look at the board")
            os.kill(os.getpid(), number)

    trainer.run(cuts.cut(cuts.samples(), [8] * 8), max_epochs=1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("dying", "number", "meeting", "reduction"),
    [
        (1, signal.SIGKILL, "file", "ddp"),
        (0, signal.SIGSEGV, "file", "explicit"),
        (1, signal.SIGKILL, "rank 0", "explicit"),
        (2, signal.SIGSEGV, "rank 0", "fsdp"),
        (0, signal.SIGKILL, "rank 0", "ddp"),
        (0, signal.SIGKILL, "launcher", "explicit"),
        (2, signal.SIGKILL, "launcher", "ddp"),
    ],
)
def test_every_survivor_names_the_rank_that_was_killed(
    tmp_path: Path, dying: int, number: signal.Signals, meeting: str, reduction: str
) -> None:
    """Of three ranks one dies without a word: the other two end in time with status 1, and the log of each names that rank."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if meeting == "launcher" else None
    arguments = (dying, number, reduction)
    with Group(tmp_path, die_in_an_update, *arguments, world_size=3, tcp=meeting == "rank 0", agent=agent) as group:
        assert group.status(dying) == -number
        assert number != signal.SIGSEGV or " in die\n" in group.stderr(dying)  # so a crash of a test's process explains itself
        survivors = [rank for rank in range(3) if rank != dying]
        assert [group.status(rank, DEADLINE_SECONDS) for rank in survivors] == [1, 1]
        for rank in survivors:
            stderr = group.stderr(rank)
            if meeting == "rank 0" and dying == 0:
                assert "ERROR ignite_train.handlers.failure_board: rank 0, which hosts the store, is gone; " in stderr
            else:
                assert f"ERROR ignite_train.handlers.failure_board: rank {dying} is gone: no longer running" in stderr
            assert not re.search(f"rank [^{dying}](, which hosts the store,)? is gone|ranks .* are gone", stderr)


def send_to_a_rank_that_dies(board: Board, dying: int) -> None:
    """It dies while the other sends to it: gloo does not wake a sender whose data is half written when its peer is gone."""
    looks, trainer = count_looks(), make("explicit")
    many = torch.zeros(2**24)  # more than the connection holds

    def sends(frame: Any) -> bool:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        return frame.f_code.co_name == "send" and "wait()" in line  # after that of `isend`

    def tell(frames: Callable[[], Any], main: int) -> None:
        until(lambda: sends(frames()[main]), "it waits for gloo")
        board.write("sends")

    FailureBoard().attach(trainer)

    @trainer.on(Events.ITERATION_COMPLETED(once=2))
    def send() -> None:
        until(looks, "its thread has begun to look at the board")
        board.write(f"looks.{idist.get_rank()}")
        if idist.get_rank() == dying:
            board.wait_for(f"looks.{1 - dying}")  # before the store stands still with the process that holds it
            torch.distributed.irecv(many, 1 - dying)
            board.write(f"ready.{dying}")
            os.kill(os.getpid(), signal.SIGSTOP)
        threading.Thread(target=tell, args=[sys._current_frames, threading.get_ident()], daemon=True).start()
        torch.distributed.send(many, dying)

    trainer.run(cuts.cut(cuts.samples(), [8] * 3), max_epochs=1)


@pytest.mark.slow
@pytest.mark.parametrize(("dying", "tcp"), [(0, True), (1, True), (1, False)], ids=["the host", "of a host", "of a file"])
def test_a_sender_whose_peer_is_killed_does_not_wait_for_gloo(tmp_path: Path, dying: int, tcp: bool) -> None:
    """It ends in time, though nobody raises, and names the rank; also if that held the store."""
    with Group(tmp_path, send_to_a_rank_that_dies, dying, tcp=tcp) as group:
        for note in (f"ready.{dying}", "sends"):
            group.board.wait_for(note)
        group.send(signal.SIGKILL, dying)
        assert group.status(1 - dying) == 1
        stderr = group.stderr(1 - dying)
        if dying == 0:
            assert "rank 0, which hosts the store, is gone; " in stderr
        else:
            assert f"rank {dying} failed at update 2: its process is no longer running" in stderr
            assert f"rank {dying} is gone: no longer running" in stderr


def train_until_killed(board: Board) -> None:
    """Buffers, which rank 0 sends before each forward, and gradients in small messages."""
    looks, rank = count_looks(), idist.get_rank()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(cuts.FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double())
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), cuts.forward)

    @trainer.on(Events.ITERATION_COMPLETED(once=3))
    def tell() -> None:
        until(looks, "its thread has begun to look at the board")
        board.write(f"trains.{rank}")

    trainer.run(cuts.cut(cuts.samples(), [8]) * 100_000, max_epochs=1)


@pytest.mark.nightly
@pytest.mark.parametrize(("victim", "world_size"), [(0, 2), (1, 2), (2, 3)])
def test_killed_beside_ranks_that_stand_still_for_a_moment(tmp_path: Path, victim: int, world_size: int) -> None:
    """On a busy machine the others often have half a message written then: they end in time and name the rank."""
    others = [rank for rank in range(world_size) if rank != victim]
    for number in range(20):
        with Group(tmp_path / str(number), train_until_killed, world_size=world_size, tcp=True) as group:
            for rank in range(world_size):
                group.board.wait_for(f"trains.{rank}")
            group.send(signal.SIGSTOP, *others)
            until(lambda: {_state_of(group.processes[rank].pid) for rank in others} == {"T"}, "they stand still")
            group.send(signal.SIGKILL, victim)
            group.processes[victim].join()
            group.send(signal.SIGCONT, *others)
            assert [group.status(rank, 60.0) for rank in others] == [1] * len(others)
            assert all(re.search(f"rank {victim}.* is gone", group.stderr(rank)) for rank in others)


LAUNCHED = """
import os, signal
import ignite.distributed as idist
from ignite.engine import Events
import cuts
from ignite_train.handlers import FailureBoard, StopOnSignal
from test_failures import count_looks, make, until

def train(local_rank):
    looks, trainer = count_looks(), make("ddp")
    FailureBoard().attach(trainer)
    StopOnSignal().attach(trainer)

    @trainer.on(Events.ITERATION_STARTED(once=3))
    def die():
        if idist.get_rank() == 1:
            until(looks, "its thread has said which process this is")
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.run(cuts.cut(cuts.samples(), [8] * 8), max_epochs=1)

if __name__ == "__main__":
    arguments = {} if "RANK" in os.environ else {"nproc_per_node": 2, "master_port": int(os.environ["FREE_PORT"])}
    with idist.Parallel(backend="gloo", **arguments) as parallel:
        parallel.run(train)
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [nightly([]), ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]])
def test_a_launcher_that_ends_the_others_leaves_time_to_name_the_rank(tmp_path: Path, launcher: list[str]) -> None:
    """`idist.Parallel` and torchrun send SIGTERM to the survivors at once: with `StopOnSignal` the line is still written."""
    script = tmp_path / "train.py"
    script.write_text(LAUNCHED)
    paths = [str(Path(path).parent) for path in (__file__, cuts.__file__)] + [str(Path(ignite_train.__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "FREE_PORT": str(_free_port()), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 1
    assert "rank 1 is gone: no longer running" in done.stderr
    assert "rank 0 is gone" not in done.stderr


def hear_late(board: Board, how: str) -> None:
    """Rank 0 is done, and its process is gone or stays, when rank 1 fails on its own account in a handler of COMPLETED."""
    be_patient()
    rank, failures = idist.get_rank(), FailureBoard()
    trainer = make("ddp")
    failures.attach(trainer)

    @trainer.on(Events.COMPLETED)
    def save() -> None:
        if rank == 1:
            board.wait_for("rank 0 is done")
            if how == "gone":
                until(lambda: not failures._watch or not failures._watch.is_alive(), "the store is gone")
            raise RuntimeError("boom")

    try:
        trainer.run(cuts.cut(cuts.samples(), [8] * 3), max_epochs=1)
    except RuntimeError as error:
        board.write(f"notes.{rank}", getattr(error, "__notes__", []))
        board.write("rank 1 has failed")
    board.write(f"rank {rank} is done")
    if rank == 0 and how == "stays":
        board.wait_for("rank 1 has failed")
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["gone", "stays"])
def test_a_rank_that_ended_in_good_order_is_not_called_gone(tmp_path: Path, how: str) -> None:
    """Also if it hosts the store, whether its process has ended with its run or not, and another rank fails later."""
    with Group(tmp_path, hear_late, how, tcp=True) as group:
        assert [group.status(rank) for rank in (0, 1)] == [0, 0]
        assert group.board.read("notes.1") == []
        assert "gone" not in group.stderr()


def end_after_the_host(board: Board) -> None:
    """The process of rank 0 is gone when rank 1 still sits in a handler of COMPLETED, and when it ends."""
    trainer, failures, watch = make("ddp"), FailureBoard(), HangWatch(timeout_seconds=1.0, first_timeout_seconds=600.0)
    failures.attach(trainer)
    watch.attach(trainer)

    @trainer.on(Events.COMPLETED)
    def save() -> None:
        if idist.get_rank() == 1:
            until(lambda: failures._watch and not failures._watch.is_alive(), "the board has noticed that the store is gone")
            until(lambda: watch._watch and watch._watch._messages is None, "the watch has noticed it")

    trainer.run(cuts.cut(cuts.samples(), [8]), max_epochs=1)  # the first update, for which a busy machine may take its time
    os._exit(0)


@pytest.mark.slow
def test_the_end_of_a_good_run_is_no_alarm(tmp_path: Path) -> None:
    """A rank whose run ends after that of the host of the store says that it watches alone, but not as a warning."""
    with Group(tmp_path, end_after_the_host, tcp=True) as group:
        assert [group.status(rank) for rank in (0, 1)] == [0, 0]
        assert "rank 1 watches only itself from now on" in group.stderr(1)
        assert re.findall("(WARNING|ERROR) ignite_train.*", group.stderr()) == []


def fail_beside_a_stopped_rank(board: Board) -> None:
    join = failure_board._Watch.join
    failure_board._Watch.join = lambda watch, timeout=None: join(watch)  # type: ignore[method-assign]  # however busy it is
    trainer = make("ddp")
    FailureBoard().attach(trainer)

    @trainer.on(Events.ITERATION_STARTED(once=3))
    def boom() -> None:
        if idist.get_rank() == 1:
            board.write("stopping")
            os.kill(os.getpid(), signal.SIGSTOP)
        board.wait_for("stopped")
        raise RuntimeError("boom")

    trainer.run(cuts.cut(cuts.samples(), [8] * 3), max_epochs=1)


@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_not_said_to_be_dead(tmp_path: Path) -> None:
    """A stopped process may still come back: the line says that it is gone or stands still."""
    with Group(tmp_path, fail_beside_a_stopped_rank) as group:
        group.board.wait_for("stopping")
        until(lambda: _state_of(group.processes[1].pid) == "T", "rank 1 is stopped")
        group.board.write("stopped")
        assert group.status(0, DEADLINE_SECONDS) == 1
        assert "rank 1 is gone or standing still: no answer came within 2 s" in group.stderr(0)


def fail_on_both(board: Board) -> None:
    be_patient()
    rank, trainer = idist.get_rank(), make("ddp")
    FailureBoard().attach(trainer)

    @trainer.on(Events.ITERATION_STARTED(once=3))
    def boom() -> None:
        raise RuntimeError(f"boom on {rank}")

    try:
        trainer.run(cuts.cut(cuts.samples(), [8] * 8), max_epochs=1)
    except RuntimeError as error:
        board.write(f"raised.{rank}", [str(error), *getattr(error, "__notes__", [])])


@pytest.mark.slow
def test_of_two_failures_one_is_the_first(tmp_path: Path) -> None:
    """Both ranks fail at once, each on its own account: each keeps its error, and one learns that the other was first."""
    with Group(tmp_path, fail_on_both) as group:
        assert [group.status(rank) for rank in (0, 1)] == [0, 0]
        raised = [group.board.read(f"raised.{rank}") for rank in (0, 1)]
        assert [error for error, *_ in raised] == ["boom on 0", "boom on 1"]
        assert sorted(len(notes) for _, *notes in raised) == [0, 1]
        later = max((0, 1), key=lambda rank: len(raised[rank]))
        assert raised[later][1].startswith(f"rank {1 - later} failed at update 3: RuntimeError: boom on {1 - later}.")


def end_at_different_times(board: Board) -> None:
    """Rank 0 is done, and then fails on its own account, while rank 1 still sits in a handler of COMPLETED."""
    looks, trainer = count_looks(), make("ddp")
    FailureBoard().attach(trainer)
    if idist.get_rank() == 1:

        @trainer.on(Events.COMPLETED)
        def save() -> None:
            board.wait_for("rank 0 has failed")
            seen = looks()
            until(lambda: looks() >= seen + 3, "a few looks at the board")

    trainer.run(cuts.cut(cuts.samples(), [8] * 3), max_epochs=1)
    until(lambda: threads() == [], "no thread is left")
    if idist.get_rank() == 0:
        board.write("rank 0 has failed")
        board.wait_for("rank 1 is done")
        raise RuntimeError("after the run")
    board.write("rank 1 is done")


@pytest.mark.slow
def test_a_run_that_has_ended_is_no_failure(tmp_path: Path) -> None:
    """One rank may end its run a little earlier than another, and do then what it likes."""
    with Group(tmp_path, end_at_different_times) as group:
        assert [group.status(rank) for rank in (0, 1)] == [1, 0]
        assert "failed at update" not in group.stderr(0) + group.stderr(1)


def run_three_times(board: Board) -> None:
    """A run that ends well, one in which both ranks raise alike, one far behind the other, and one in which rank 1 fails."""
    rank = idist.get_rank()
    loader = cuts.cut(cuts.samples(), [8] * 3)

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        output = cuts.forward(model, micro_batch)
        return output._replace(loss=output.loss * float("nan")) if trainer.state.epoch == 2 else output

    be_patient()
    trainer, failures = make("ddp", forward), FailureBoard()
    failures.attach(trainer)
    trainer.run(loader, max_epochs=1)
    until(lambda: threads() == [], "no thread is left")

    def dawdle(_error: BaseException) -> None:
        if rank == 1 and trainer.state.epoch == 2:
            until(lambda: failures._watch and failures._watch._cause, "the thread has heard of rank 0 before this rank tells")

    trainer.prepend_event_handler(Events.EXCEPTION_RAISED, dawdle)
    with pytest.raises(NonFiniteError) as caught:
        trainer.run(loader, max_epochs=2)
    assert not hasattr(caught.value, "__notes__")
    until(lambda: threads() == [], "no thread is left")

    state = trainer.state_dict() | {"epochs_completed": 2, "epoch_iteration": 0}
    trainer.load_state_dict(state)
    assert trainer.run(loader, max_epochs=3).epoch == 3
    until(lambda: threads() == [], "no thread is left")
    board.write(f"three.{rank}")
    if rank == 1:
        trainer.add_event_handler(Events.EPOCH_STARTED, lambda: 1 / 0)
    trainer.run(loader, max_epochs=4)


@pytest.mark.slow
def test_a_board_serves_one_run_after_another(tmp_path: Path) -> None:
    """What one run left on the board is nothing to the next; an error that all ranks raise alike stays what it is."""
    with Group(tmp_path, run_three_times) as group:
        assert [group.status(rank) for rank in (0, 1)] == [1, 1]
        assert group.board.has("three.0")
        assert group.board.has("three.1")
        assert "rank 1 failed at update 6: ZeroDivisionError: division by zero" in group.stderr(0)


def fail_in_the_first_attempt(board: Board, attempt: int) -> None:
    looks, trainer = count_looks(), make("ddp")
    FailureBoard().attach(trainer)

    def look(index: int) -> None:
        until(lambda: attempt == 1 or looks() > index, "a look at the board")

    if attempt == 1 and idist.get_rank() == 1:
        trainer.add_event_handler(Events.ITERATION_STARTED(once=2), lambda: 1 / 0)
    trainer.run(Loader(cuts.cut(cuts.samples(), [8] * 3), look), max_epochs=1)


@pytest.mark.slow
@lists_keys
def test_what_a_failed_attempt_left_in_the_store_is_nothing_to_the_next(tmp_path: Path) -> None:
    """The launcher keeps its store, and starts the ranks again."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt, status in [(1, 1), (2, 0)]:
        with Group(tmp_path / str(attempt), fail_in_the_first_attempt, attempt, agent=store) as group:
            assert [group.status(rank) for rank in (0, 1)] == [status, status]
        ours = [key for key in store.list_keys() if "ignite_train/" in key]
        assert len(ours) >= attempt
        for key in {*store.list_keys()} - {*ours}:
            store.delete_key(key)  # gloo does not cope with what its own last attempt left


def fail_beside_a_stopped_store(board: Board) -> None:
    trainer = make("ddp")
    FailureBoard().attach(trainer)

    @trainer.on(Events.ITERATION_STARTED(once=3))
    def boom() -> None:
        if idist.get_rank() == 0:
            board.write("stopping")
            os.kill(os.getpid(), signal.SIGSTOP)
        board.wait_for("stopped")
        raise RuntimeError("boom")

    trainer.run(cuts.cut(cuts.samples(), [8] * 3), max_epochs=1)


@pytest.mark.slow
def test_a_store_that_does_not_answer_holds_nobody_up(tmp_path: Path) -> None:
    """The process that holds the store is stopped: the exception of the rank that fails goes on all the same."""
    with Group(tmp_path, fail_beside_a_stopped_store, tcp=True) as group:
        group.board.wait_for("stopping")
        until(lambda: _state_of(group.processes[0].pid) == "T", "rank 0 is stopped")
        group.board.write("stopped")
        assert group.status(1, DEADLINE_SECONDS) == 1
        assert "RuntimeError: boom" in group.stderr(1)


def _state_of(pid: int | None) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_each_file_that_waits_for_ranks_is_known_to_the_watch() -> None:
    """So that it blames the rank that has not come, and not the one that waits for it."""
    root = Path(ignite_train.__file__).parent  # of a checkout, or of what is installed
    marked = {path.name for path in root.glob("*/*.py") if f"\n{whereabouts._MARK} = True" in path.read_text("utf-8")}
    waiting = {path.name for path in root.glob("ranks/*.py") if ".wait()" in path.read_text("utf-8")}
    assert len(waiting) > 1
    assert marked == {*waiting, "to_host.py", "ddp.py", "mesh.py"}  # where torch itself waits in a call of these


def test_the_watches_cost_an_update_nothing() -> None:
    """Nothing is attached to what happens in an update, and in a single process the board has no thread either."""
    trainer = make("auto")
    FailureBoard().attach(trainer)
    HangWatch().attach(trainer)
    during: list[str] = []
    trainer.add_event_handler(Events.STARTED, lambda: during.extend(threads()))
    trainer.run(cuts.cut(cuts.samples(), [8]), max_epochs=1)
    once = {*Events} - {event for event in Events if "ITERATION" in event.name or "BATCH" in event.name}
    assert {event for event, handlers in trainer._event_handlers.items() if handlers} <= once
    assert during == ["HangWatch"] * 2
    until(lambda: threads() == [], "no thread is left")


def test_a_peer_failure_can_be_caught_and_sent() -> None:
    """It is one of our errors, and comes whole through a pickle."""
    error = pickle.loads(pickle.dumps(PeerFailureError(3, 17, "ValueError: no")))
    assert issubclass(PeerFailureError, TrainingError)
    assert (error.rank, error.update, error.error) == (3, 17, "ValueError: no")
    assert str(error) == "rank 3 failed at update 17: ValueError: no"


# --- HangWatch ---

TIMEOUT = 0.4  # by a clock that stands still until a test sets it forward
STEP = TIMEOUT / 8  # what a watch takes for time that has passed, between two of its looks


class Clock:
    """The time of the watches of all ranks. It passes only when a test says so, and never faster than they look at it.

    So a busy machine is no hang. After each step it is waited for until the watch of each rank has seen the new time, and has
    heard since of all `ranks`.

    Args:
        board: what the ranks share.
        ranks: those that live.
        watch: in the process of a rank, the handler whose clock it is.
    """

    def __init__(self, board: Board, ranks: list[int], watch: HangWatch | None = None) -> None:
        self.board, self.ranks, self.watch = board, ranks, watch
        self._latest = -1.0
        if watch is not None:
            hang_watch.time = SimpleNamespace(monotonic=self._look, sleep=time.sleep)  # type: ignore[attr-defined]

    def _now(self) -> float:
        return self.board.read("time") if self.board.has("time") else 0.0

    def _look(self) -> float:
        now, running = self._now(), self.watch and self.watch._watch
        if running and (report := running._reports[running._rank]) is not None:
            self.board.write(f"place.{running._rank}", report.where)
        if running and now == self._latest and all(running._heard[rank] == running._clock for rank in self.ranks):
            self.board.write(f"seen.{idist.get_rank()}", now)
        self._latest = now
        return now

    def set_forward(self, seconds: float, over: Callable[[], bool] = lambda: False) -> None:
        """Lets so much time pass, or until `over`, in steps that the watches believe."""
        watching = self.ranks or [1 - int(self.board.read("hangs"))]
        for _ in range(round(seconds / STEP)):
            self.board.write("time", self._now() + STEP)
            until(lambda: over() or self._seen_by(watching), "a look at the time")

    def _seen_by(self, ranks: list[int]) -> bool:
        notes = [f"seen.{rank}" for rank in ranks]
        return all(self.board.has(note) and self.board.read(note) == self._now() for note in notes)


def hang_on_one_rank(
    board: Board, hanging: int, how: str, update: int, first_timeouts: tuple[float, float], ranks: list[int], reduction: str
) -> None:
    """In this update the rank stops or loops for ever, in forward."""
    rank = idist.get_rank()

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        if rank == hanging and trainer.state.iteration == update:
            board.write("hangs", rank)
            if how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            loop_for_ever()
        return cuts.forward(model, micro_batch)

    trainer = make(reduction, forward)
    watch = HangWatch(timeout_seconds=TIMEOUT, first_timeout_seconds=first_timeouts[rank])
    Clock(board, ranks, watch)
    watch.attach(trainer)
    trainer.run(cuts.cut(cuts.samples(), [8] * 5), max_epochs=1)


def loop_for_ever() -> None:
    while True:
        time.sleep(0.01)


def see_a_hang(group: Group, ranks: list[int], watching: list[int]) -> None:
    """Asserts that nothing is said before the timeout, and lets it pass."""
    clock = Clock(group.board, ranks)
    clock.set_forward(TIMEOUT - STEP)
    assert "training hangs" not in group.stderr()
    clock.set_forward(20 * TIMEOUT, over=lambda: any(not group.lives(rank) for rank in watching))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hanging", "tcp", "way", "verdict"),
    [
        *((1, False, way, "rank 1 is silent for more than 0.4 s; rank 0 at update 3 in ") for way in WAYS),
        (0, True, "ddp", "the store at which the ranks met has not answered for "),
    ],
    ids=[*(f"rank 1, {way}" for way in WAYS), "rank 0, which holds the store"],
)
def test_a_stopped_rank_is_noticed_by_the_other(tmp_path: Path, hanging: int, tcp: bool, way: str, verdict: str) -> None:
    """SIGSTOP: the other names it, shows where itself is, and ends, in each way of crossing ranks; not before the timeout."""
    living = [] if tcp else [1 - hanging]  # a rank that waits for the store does not hear of itself
    with Group(tmp_path, hang_on_one_rank, hanging, "stopped", 3, (20.0, 20.0), living, way, tcp=tcp) as group:
        group.board.wait_for("hangs")
        until(lambda: _state_of(group.processes[hanging].pid) == "T", "the rank is stopped")
        see_a_hang(group, living, [1 - hanging])
        assert group.status(1 - hanging, DEADLINE_SECONDS) == 1
        assert group.lives(hanging)
        stderr = group.stderr(1 - hanging)
        assert f"training hangs: {verdict}" in stderr
        assert "Thread 0x" in stderr  # every one of them
        assert "in hang_on_one_rank" in stderr


@pytest.mark.slow
def test_a_rank_that_never_comes_back_is_noticed_by_both(tmp_path: Path) -> None:
    """An endless loop in forward: both ranks say that rank 1 is behind and where each is, show their stacks, and end.

    Here in the first update, and with more patience on rank 1, so that it has it from rank 0.
    """
    with Group(tmp_path, hang_on_one_rank, 1, "looping", 1, (TIMEOUT, 60.0), [0, 1], "ddp") as group:
        group.board.wait_for("hangs")
        until(lambda: group.board.wait_for("place.0").startswith("_engine_run_backward"), "rank 0 waits for the other")
        see_a_hang(group, [0, 1], [0, 1])
        assert [group.status(rank, DEADLINE_SECONDS) for rank in (0, 1)] == [1, 1]
        for rank in (0, 1):
            stderr = group.stderr(rank)
            assert (
                "no rank has moved for more than 0.4 s; rank 1 is behind; rank 0 at update 1 in _engine_run_backward" in stderr
            )
            assert "; rank 1 at update 1 in loop_for_ever (test_failures.py:" in stderr
            assert ("in loop_for_ever" in stderr.partition("stacks of rank")[2]) == (rank == 1)


def dawdle_on_rank_one(board: Board) -> None:
    """Each micro-batch takes its time on rank 1, the first one longer than what is allowed later."""
    trainer, watch = make("ddp"), HangWatch(timeout_seconds=TIMEOUT, first_timeout_seconds=20.0)
    clock = Clock(board, [0, 1], watch)

    def dawdle(_index: int) -> None:
        if idist.get_rank() == 1:
            clock.set_forward(4 * TIMEOUT if trainer.state.iteration == 0 else TIMEOUT / 2)

    watch.attach(trainer)
    for epoch in (1, 2):  # two runs
        trainer.run(Loader(cuts.cut(cuts.samples(), [8] * 3), dawdle), max_epochs=epoch)
        until(lambda: threads() == [], "no thread is left")
    board.write(f"updates.{idist.get_rank()}", trainer.state.iteration)


@pytest.mark.slow
def test_a_slow_rank_does_not_hang(tmp_path: Path) -> None:
    """A loader that takes less than the timeout at a time, or more before the first update, is no hang; in two runs."""
    with Group(tmp_path, dawdle_on_rank_one) as group:
        assert [group.status(rank) for rank in (0, 1)] == [0, 0]
        assert group.board.read("updates.0") == 6
        assert group.board.read("time") > 6 * TIMEOUT


def train_and_wait(board: Board) -> None:
    trainer, watch = make("ddp"), HangWatch(timeout_seconds=TIMEOUT)
    Clock(board, [0, 1], watch)
    watch.attach(trainer)

    @trainer.on(Events.ITERATION_STARTED(once=3))
    def wait() -> None:
        board.write(f"waits.{idist.get_rank()}")
        board.wait_for("awake")

    trainer.run(cuts.cut(cuts.samples(), [8] * 5), max_epochs=1)
    board.write(f"updates.{idist.get_rank()}", trainer.state.iteration)


@pytest.mark.slow
def test_ranks_that_are_suspended_together_wake_up_and_go_on(tmp_path: Path) -> None:
    """A scheduler that takes the machine away for longer than the timeout is no hang."""
    with Group(tmp_path, train_and_wait) as group:
        for rank in (0, 1):
            group.board.wait_for(f"waits.{rank}")
        clock = Clock(group.board, [0, 1])
        clock.set_forward(STEP)
        group.send(signal.SIGSTOP, 0, 1)
        until(lambda: [_state_of(process.pid) for process in group.processes] == ["T", "T"], "both are stopped")
        group.board.write("time", 1000 * TIMEOUT)
        group.send(signal.SIGCONT, 0, 1)
        clock.set_forward(2 * STEP)
        group.board.write("awake")
        assert [group.status(rank) for rank in (0, 1)] == [0, 0]
        assert [group.board.read(f"updates.{rank}") for rank in (0, 1)] == [5, 5]


def validate_slowly(board: Board, attached: bool) -> None:
    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        if not model.training:
            clock.set_forward(TIMEOUT / 2)
        return cuts.forward(model, micro_batch)

    trainer = make("auto", forward)
    evaluator = create_evaluator(trainer.process.model, forward)  # type: ignore[attr-defined]
    validation = Validation(evaluator, cuts.cut(cuts.samples(), [1] * 6))
    validation.attach(trainer, Events.ITERATION_COMPLETED(once=2))
    watch = HangWatch(TIMEOUT, first_timeout_seconds=TIMEOUT)
    clock = Clock(board, [0], watch)
    watch.attach(trainer, evaluator=evaluator if attached else None)
    trainer.run(cuts.cut(cuts.samples(), [8] * 3), max_epochs=1)


@pytest.mark.slow
@pytest.mark.parametrize(("attached", "status"), [(True, 0), (False, 1)])
def test_validation_counts_as_life_if_its_evaluator_is_attached(tmp_path: Path, attached: bool, status: int) -> None:
    """In a single process, which watches itself, and with a validation longer than the timeout."""
    with Group(tmp_path, validate_slowly, attached, world_size=1) as group:
        assert group.status(0) == status
        assert group.board.read("time") > TIMEOUT
        assert ("training hangs: no rank has moved" in group.stderr(0)) == bool(status)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"timeout_seconds": 0}, "timeout_seconds must be greater than 0, got 0"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds must be finite, got nan"),
        ({"timeout_seconds": 10, "first_timeout_seconds": 9}, "first_timeout_seconds must be at least 10, got 9"),
    ],
)
def test_timeouts_must_make_sense(arguments: dict[str, Any], message: str) -> None:
    """The message names the argument, its value and what is allowed."""
    with pytest.raises(ValueError, match=message):
        HangWatch(**arguments)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, (600.0, 1800.0, None)),
        ({"timeout_seconds": 10}, (10.0, 30.0, None)),
        ({"timeout_seconds": 10, "first_timeout_seconds": 10, "standstill_seconds": 10}, (10.0, 10.0, 10.0)),
        ({"timeout_seconds": 0.5, "first_timeout_seconds": 12}, (0.5, 12.0, None)),
    ],
    ids=["as it is", "shorter", "all alike", "a long beginning"],
)
def test_timeouts_that_are_left_out(arguments: dict[str, Any], expected: tuple[Any, ...]) -> None:
    """The first update may take three times as long as the others; all ranks together as long as they like."""
    watch = HangWatch(**arguments)
    assert (watch.timeout_seconds, watch.first_timeout_seconds, watch.standstill_seconds) == expected


LOOKS_WHILE_THREADS_START = """
import gc, threading, time
from ignite_train.ranks.whereabouts import find_whereabouts

class Cycle:
    def __init__(self):
        self.me = self

    def __del__(self):
        time.sleep(0)  # lets another thread run

def look():
    while not over.is_set():
        Cycle()
        find_whereabouts(threading.main_thread().ident)

over = threading.Event()
looking = threading.Thread(target=look, daemon=True)
gc.freeze()  # a collection is over at once
gc.set_threshold(1, 1, 1)
looking.start()
for _ in range(2000):
    Cycle()
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
over.set()
looking.join()
"""
# The collection that becomes due at a frame's name would come where the object of the frame below is made. Its finaliser waits
# until the main thread has left those functions, and is in one that has its texts in their place.
LOOKS_WHILE_FUNCTIONS_END = """
import gc, threading, time
from ignite_train.ranks.whereabouts import find_whereabouts

class Cycle:
    def __init__(self):
        self.me = self

    def __del__(self):
        time.sleep(0.01)

class Name:
    seen = 0

    def __str__(self):
        self.seen += 1
        Cycle()
        gc.set_threshold(1)
        return "threading"

def look():
    while names["__name__"].seen < 30:
        gc.set_threshold(0)
        find_whereabouts(threading.main_thread().ident)

names = {"__name__": Name(), "sleep": time.sleep}
exec("def inner(): sleep(0.003)", names)
exec("def middle(): inner()", names)
exec("def outer(): middle()", names)
others = {"__name__": "threading", "sleep": time.sleep}
exec("def many():\\n" + "".join(f" a{n} = 'text'\\n" for n in range(100)) + " sleep(0.02)", others)
looking = threading.Thread(target=look, daemon=True)
looking.start()
while looking.is_alive():
    names["outer"]()
    others["many"]()
"""


# A thread has the collector off for a while, in which the process forks.
FORKS_WHILE_THREAD_PAUSES = """
import gc, os, threading, time, warnings
from ignite_train.checkpoint.capture import paused_collection
from ignite_train.ranks.whereabouts import COLLECTOR

def look():
    with COLLECTOR:
        gc.disable()
        holds.set()
        time.sleep(0.3)
        gc.enable()

def save():
    with paused_collection():
        holds.set()
        is_over.wait()

warnings.simplefilter("ignore")
holds, is_over = threading.Event(), threading.Event()
thread = threading.Thread(target=PAUSES, daemon=True)
thread.start()
holds.wait()
child = os.fork()
if child == 0:
    os._exit(0 if gc.isenabled() and COLLECTOR.acquire(timeout=5.0) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
is_over.set()
thread.join()
assert gc.isenabled() and not COLLECTOR.locked()
"""

# A thread that forks in a pause of its own, which is not one of the new process.
FORKS_IN_A_PAUSE = """
import gc, os
from ignite_train.checkpoint.capture import paused_collection

with paused_collection():
    child = os.fork()
    assert gc.isenabled() == (child == 0)
assert gc.isenabled()
if child == 0:
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def end_of(script: str) -> tuple[int, str]:
    """The exit code of another Python that runs it, and what it has written to standard error."""
    done = subprocess.run([sys.executable, "-c", script], timeout=DEADLINE_SECONDS, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.nightly
def test_looking_at_the_main_thread_does_not_stop_threads_from_starting() -> None:
    """Also where a garbage collection runs a finaliser in the middle of it, for which some versions of Python stood still."""
    assert end_of(LOOKS_WHILE_THREADS_START) == (0, "")


@pytest.mark.slow
def test_looking_at_the_main_thread_while_its_functions_end() -> None:
    """Also where a garbage collection runs a finaliser in the middle of it, of which processes with Python 3.11 died."""
    assert end_of(LOOKS_WHILE_FUNCTIONS_END) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("pauses", ["look", "save"])
def test_a_process_that_is_forked_while_a_thread_pauses_the_collector_collects_its_garbage(pauses: str) -> None:
    """A worker of a loader is forked while HangWatch looks at a thread or a state is saved. Nor does it keep the lock."""
    assert end_of(FORKS_WHILE_THREAD_PAUSES.replace("PAUSES", pauses)) == (0, "")


@pytest.mark.slow
def test_a_process_that_is_forked_in_a_pause_of_its_own_ends_it() -> None:
    """The pause of the thread that forks continues in both processes."""
    assert end_of(FORKS_IN_A_PAUSE) == (0, "")


# --- processes that end ---


def loop_until(is_over: Callable[[], bool]) -> None:
    while not is_over():
        time.sleep(0.001)


def test_a_thread_between_two_lines_is_somewhere() -> None:
    """Where Python has no number of a line for an instruction; the watch once died of meeting such a one."""
    units, is_over = len(loop_until.__code__.co_code) // 2, threading.Event()
    # "No location", for eight units each and for what is left of them.
    table = bytes([0xFF] * (units // 8) + [0xF8 + units % 8 - 1] * (units % 8 > 0))
    function = FunctionType(loop_until.__code__.replace(co_linetable=table), globals())
    thread = threading.Thread(target=function, args=(is_over.is_set,))
    thread.start()
    try:
        until(
            lambda: find_whereabouts(thread.ident or 0).where.startswith("loop_until (test_failures.py:"), "it is in its loop"
        )
        assert not find_whereabouts(thread.ident or 0).waits
    finally:
        is_over.set()
        thread.join(DEADLINE_SECONDS)


def test_a_process_is_known_to_have_ended_when_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before its parent knows, and where its number is that of another process; of another machine nothing is known."""
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    machine, namespace, *_ = here = own_process()
    began = Path(f"/proc/{child.pid}/stat").read_text().split()[21]  # proc_pid_stat(5)
    process = [machine, namespace, str(child.pid), began]
    elsewhere = [["another machine", *process[1:]], [machine, "another namespace", *process[2:]], []]
    assert not any(map(has_ended, [here, process, *elsewhere]))
    assert has_ended([*process[:3], "1"])

    child.stdin.close()  # type: ignore[union-attr]
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is dead, and still has its number
    assert [*map(has_ended, [process, *elsewhere])] == [True, False, False, False]
    child.wait()
    assert [*map(has_ended, [process, *elsewhere])] == [True, False, False, False]
    monkeypatch.setattr("ignite_train.ranks.process.own_process", list)
    assert not has_ended(process)  # nor where there is no `/proc` to look into


def test_the_name_of_a_process_may_be_no_text() -> None:
    """The kernel cuts a title after 15 bytes, which may be within a letter; and it may have brackets and blanks."""
    code = "import ctypes; ctypes.CDLL(None).prctl(15, bytes([41, 32, 230, 40]), 0, 0, 0); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()  # type: ignore[union-attr]
        status, began = look_up(child.pid)
        child.communicate(b"over\n")
    assert (status in "RSD", began.isdecimal()) == (True, True)


def end_with(path: str, blocked: bool) -> None:
    """Writes some lines that wait in memory, and ends."""
    for stream in ("stdout", "stderr"):
        setattr(sys, stream, Path(path, stream).open("w"))  # noqa: SIM115  # nothing closes it
        getattr(sys, stream).write("written")
    memory = logging.handlers.MemoryHandler(100, target=logging.FileHandler(f"{path}/log"))
    logging.getLogger("ends").addHandler(memory)
    logging.getLogger("ends").warning("logged")
    if blocked:
        memory.flush = threading.Event().wait  # type: ignore[method-assign]
    collectives.end_process(3)
    Path(path, "later").touch()


@pytest.mark.slow
@pytest.mark.parametrize("blocked", [False, True], ids=["free", "blocked"])
def test_a_process_ends_at_once_with_what_it_has_written(blocked: bool, tmp_path: Path) -> None:
    """With the status that was asked for; also where a log cannot be written, without waiting for that."""
    process = forked.Process(target=end_with, args=(str(tmp_path), blocked), daemon=True)
    process.start()
    process.join(60)
    status = process.exitcode
    process.kill()
    assert status == 3
    assert not (tmp_path / "later").exists()
    if not blocked:
        found = {path.name: path.read_text() for path in tmp_path.iterdir()}
        assert found == {"stdout": "written", "stderr": "written", "log": "logged\n"}
