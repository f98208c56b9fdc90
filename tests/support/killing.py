"""A job that is killed and started again until it is done, and what of it has to be the same in the end."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ignite.engine import Events
from ignite.metrics import Average
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from torch.utils.data._utils import worker

import ignite_train.checkpoint.lock
import ignite_train.ranks.collectives
from ignite_train import Evaluator, ForwardOutput, ResumableLoader, Trainer, create_evaluator, create_trainer
from ignite_train.checkpoint.disk import Disk
from ignite_train.checkpoint.lock import LOCK
from ignite_train.checkpoint.manifest import is_checkpoint_name, read_manifest
from ignite_train.checkpoint.reader import CheckpointReader
from ignite_train.checkpoint.retention import Retention
from ignite_train.handlers import Checkpoint, LearningRateSchedule, StopOnSignal, TensorBoard, TrainingMetrics, Validation
from ignite_train.metrics import TIMED_METRICS
from processes import DEADLINE_SECONDS, Processes, forked

PHASES = ("save", "agreement", "rename", "prune")
_BY_THE_CLOCK = {*TIMED_METRICS, "seconds"}  # metrics and sums that no run has twice


# --- the job ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained, and where it leaves what it does.

    Attributes:
        directory: of everything.
        world_size: ranks.
        num_workers: of the loader of each.
        epochs: how long.
        every: updates between two checkpoints.
        asynchronous: whether a thread writes them.
        keeps_all: no checkpoint is ever removed.
        grace_seconds: of a StopOnSignal; None: there is none.
        end_together: ranks that end when each of them has given up waiting: the end of one alone would wake the others up.
        stale_seconds: when the lock of a run that stands still is taken over; None: when a user's would be.
    """

    directory: Path
    world_size: int = 2
    num_workers: int = 0
    epochs: int = 6
    every: int = 2
    asynchronous: bool = True
    keeps_all: bool = False
    grace_seconds: float | None = None
    end_together: tuple[int, ...] = ()
    stale_seconds: float | None = None

    @property
    def checkpoints(self) -> Path:
        """Their directory."""
        return self.directory / "checkpoints"


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a process stops: before the n-th operation of a phase in its life. Training and validation are phases too."""

    rank: int
    phase: str
    number: int


class Noisy(Dataset[Any]):
    """Samples with random augmentation by all three generators; gives the index too. 52, so that the last update is ragged."""

    def __init__(self, count: int = 52) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        noise = torch.randn(6) * random.random() + float(np.random.rand())  # noqa: S311
        return torch.arange(6) * 0.1 + index * 0.01 + 0.3 * noise, torch.tensor([(index % 7) * 0.2]), index


def build(job: Job, rank: int) -> tuple[Trainer, Evaluator, Checkpoint, ResumableLoader, nn.Module, torch.optim.Optimizer]:
    """The job's trainer, with all that has a state attached to it."""
    random.seed(1 + rank)
    np.random.seed(1 + rank)
    torch.manual_seed(1 + rank)
    model: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
    if job.world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = create_trainer(model, optimizer, forward, accumulation_steps=2, max_grad_norm=1.0)
    evaluator = create_evaluator(model, forward)
    held_out = ResumableLoader(Noisy(), 8, shuffle=False, seed=5)
    LearningRateSchedule(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)).attach(trainer)
    trainer.add_event_handler(Events.EPOCH_STARTED, lambda: torch.rand(3))  # draws once more where a run goes on
    Average(lambda output: output.loss).attach(trainer, "average_loss")
    Validation(evaluator, held_out).attach(trainer)
    TensorBoard(job.directory / "points").attach(trainer, Events.ITERATION_COMPLETED(every=2), evaluator=evaluator)
    TrainingMetrics().attach(trainer, Events.ITERATION_COMPLETED(every=3))
    checkpoint = Checkpoint(job.checkpoints, every=job.every, keep=1, score="loss", asynchronous=job.asynchronous)
    if job.keeps_all:
        checkpoint.saver.retention = KeepAll(last=1, best=1, mode="min", every=None)
    checkpoint.attach(trainer, evaluator=evaluator)
    worker.MP_STATUS_CHECK_INTERVAL = 0.5  # how often a worker looks whether its parent was killed: torch says 5 seconds
    samples = Noisy(54 if job.world_size == 3 else 52)  # BatchNorm needs two in the last micro-batch
    loader = ResumableLoader(samples, 4, shuffle=True, seed=3, num_workers=job.num_workers)
    if job.grace_seconds is not None:
        StopOnSignal(grace_seconds=job.grace_seconds).attach(trainer)
    return trainer, evaluator, checkpoint, loader, model, optimizer


def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
    x, y, _ = micro_batch
    return ForwardOutput(mse_loss(model(x), y, reduction="sum"), len(x), {"inputs": float(x.sum())})


class KeepAll(Retention):
    """Removes nothing."""

    def surplus(self, _manifests: Sequence[Any]) -> list[int]:
        return []


class Halt:
    """Holds a process where it is to be killed, and keeps a trail of the phases it went through."""

    def __init__(self, job: Job, rank: int, life: int, stop: Stop | None) -> None:
        self._stop = stop if stop is not None and stop.rank == rank else None
        self._notes, self._life = job.directory, life
        self._counts: Counter[str] = Counter()
        self._trail = os.open(job.directory / f"trail.{life}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def before(self, phase: str) -> None:
        self._counts[phase] += 1
        os.write(self._trail, f"{phase}\n".encode())
        if self._stop is not None and (self._stop.phase, self._stop.number) == (phase, self._counts[phase]):
            (self._notes / f"halted.{self._life}").touch()
            while not (self._notes / f"released.{self._life}").exists():
                time.sleep(0.002)


class HaltingDisk(Disk):
    """Says what is being done before it is done."""

    def __init__(self, halt: Halt) -> None:
        self._halt, self._phase = halt, "save"

    def make_directory(self, path: Path) -> None:
        self._phase = "save"
        self._halt.before("save")
        super().make_directory(path)

    def create(self, path: Path) -> int:
        self._halt.before("save")
        return super().create(path)

    def write(self, descriptor: int, data: memoryview) -> None:
        self._halt.before("save")
        super().write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        self._halt.before("save")
        super().sync(descriptor)

    def close(self, descriptor: int) -> None:
        self._halt.before("save")
        super().close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        self._phase = "rename" if is_checkpoint_name(target.name) else "prune"
        self._halt.before(self._phase)
        super().rename(source, target)

    def sync_directory(self, path: Path) -> None:
        self._halt.before(self._phase)
        super().sync_directory(path)

    def remove_file(self, path: Path, parent: int) -> None:
        self._halt.before("prune")
        super().remove_file(path, parent)

    def remove_directory(self, path: Path, parent: int) -> None:
        self._halt.before("prune")
        super().remove_directory(path, parent)


def _live(job: Job, rank: int, life: int, stop: Stop | None) -> None:
    """One process of a life."""
    os.setsid()  # so that whatever it starts can be found
    multiprocessing.set_start_method("fork", force=True)  # as in a script; workers of a fork server outlive a killed parent
    with (job.directory / f"stderr.{life}.{rank}").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        torch.set_num_threads(1)
        _train(job, rank, life, Halt(job, rank, life, stop))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _train(job: Job, rank: int, life: int, halt: Halt) -> None:
    import ignite.distributed as idist

    if job.world_size > 1:
        idist.initialize("gloo", init_method=f"file://{job.directory}/store.{life}", rank=rank, world_size=job.world_size)
    gather, end_process = ignite_train.ranks.collectives.gather_objects, ignite_train.ranks.collectives.end_process
    if job.stale_seconds is not None:
        ignite_train.checkpoint.lock.STALE_SECONDS, ignite_train.checkpoint.lock.HEARTBEAT_SECONDS = (
            job.stale_seconds,
            job.stale_seconds / 10,
        )

    def halting_gather(value: Any, group: Any = None) -> list[Any]:
        if group is not None:
            halt.before("agreement")
        return gather(value, group)

    def end_together(status: int) -> None:
        (job.directory / f"ends.{life}.{rank}").touch()
        until(lambda: all((job.directory / f"ends.{life}.{other}").exists() for other in job.end_together), "all give up")
        end_process(status)

    ignite_train.ranks.collectives.gather_objects = halting_gather
    if job.end_together:
        ignite_train.ranks.collectives.end_process = end_together  # type: ignore[assignment]
    trainer, evaluator, checkpoint, loader, model, optimizer = build(job, rank)
    # from the first update on: the trial at the start of a run is not a save
    trainer.append_event_handler(Events.STARTED, lambda: setattr(checkpoint.saver.directory, "disk", HaltingDisk(halt)))
    trainer.add_event_handler(Events.ITERATION_STARTED, halt.before, "training")
    evaluator.add_event_handler(Events.ITERATION_STARTED, halt.before, "validation")
    history = os.open(job.directory / f"history.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    @trainer.on(Events.ITERATION_COMPLETED)
    def note() -> None:
        state = trainer.state
        line = {
            "life": life,
            "update": state.iteration,
            "samples": [micro_batch[2].tolist() for micro_batch in state.batch],
            "output": asdict(state.output),
            "metrics": timeless(state.metrics),
            "weights": [digest(model.state_dict()), digest(optimizer.state_dict())],
        }
        os.write(history, (json.dumps(line) + "\n").encode())

    state = trainer.run(loader, max_epochs=job.epochs)
    _leave(job, rank, state, model, optimizer)


def _leave(job: Job, rank: int, state: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Writes what the run has ended with."""
    final = {
        "weights": digest(model.state_dict()),
        "optimizer": digest(optimizer.state_dict()),
        "counters": [state.iteration, state.epoch, state.num_steps, state.num_micro_batches],
        "metrics": timeless(state.metrics),
    }
    temporary = job.directory / f".final.{rank}"
    temporary.write_text(json.dumps(final))
    temporary.rename(job.directory / f"final.{rank}")


# --- what must be the same ----------------------------------------------------------------------------------------------------


def digest(value: Any) -> str:
    """Equal only if every bit is."""
    return hashlib.sha256(repr(plain(value)).encode()).hexdigest()


def plain(value: Any) -> Any:
    """Plain values that are equal only if every tensor in it is, bit by bit; without what depends on the clock."""
    if isinstance(value, Tensor):
        return (
            str(value.dtype),
            tuple(value.shape),
            value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, Mapping):
        return [(repr(key), plain(entry)) for key, entry in value.items() if str(key).rpartition("/")[2] not in _BY_THE_CLOCK]
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return repr(value)


def timeless(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name not in _BY_THE_CLOCK}


def points(job: Job) -> dict[str, list[tuple[int, float]]]:
    """All points as TensorBoard shows them; of those that depend on the clock, where they are."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(job.directory / "points"), {"scalars": 0})
    events.Reload()
    return {
        tag: [(point.step, 0.0 if tag.rpartition("/")[2] in _BY_THE_CLOCK else point.value) for point in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def stored(path: Path) -> tuple[Any, dict[str, str]]:
    """What moment of the run a checkpoint is of, and digests of everything in it. Reads and checks every byte."""
    with CheckpointReader(path) as checkpoint:
        checkpoint.verify()
        ranks = range(checkpoint.manifest.world_size)
        names = [(name, rank) for rank in ranks for name in checkpoint.names(rank)]
        trainer = checkpoint.read("trainer")
        moment = (trainer["iteration"], trainer["epochs_completed"], trainer["ended"])
        return moment, {f"{name} of rank {rank}": digest(checkpoint.read(name, rank=rank)) for name, rank in names}


def history(job: Job, rank: int) -> list[dict[str, Any]]:
    """What a rank did, update by update and life by life."""
    path = job.directory / f"history.{rank}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@dataclass(frozen=True, slots=True)
class Reference:
    """The run that nobody disturbs."""

    updates: list[dict[int, dict[str, Any]]]  # of each rank
    finals: list[dict[str, Any]]
    points: dict[str, list[tuple[int, float]]]
    checkpoints: dict[Any, dict[str, str]]
    best: float

    @classmethod
    def of(cls, job: Job) -> Reference:
        """Runs `job`, which keeps all its checkpoints."""
        job = replace(job, keeps_all=True, every=1)
        with Life(job, 0) as life:
            assert life.wait() == [0] * job.world_size, life.stderr()
        ranks = range(job.world_size)
        updates = [{line["update"]: done(line) for line in history(job, rank)} for rank in ranks]
        assert all([line["update"] for line in history(job, rank)] == [*updates[rank]] for rank in ranks)
        names = committed(job)
        return cls(updates, finals(job), points(job), dict(stored(path) for path in names), best(job))


def committed(job: Job) -> list[Path]:
    """The checkpoints that are there. A process that was killed leaves its lock beside them."""
    return sorted(path for path in job.checkpoints.iterdir() if is_checkpoint_name(path.name))


def best(job: Job) -> float:
    """The best score of the checkpoints that are there."""
    manifests = [read_manifest(path) for path in committed(job)]
    return min(manifest.score for manifest in manifests if manifest.score is not None)


def done(line: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key != "life"}


def finals(job: Job) -> list[dict[str, Any]]:
    return [json.loads((job.directory / f"final.{rank}").read_text()) for rank in range(job.world_size)]


# --- lives --------------------------------------------------------------------------------------------------------------------


class Life(Processes):
    """The processes of a job from one start to the next. None is left over at the end, nor what they have started."""

    def __init__(self, job: Job, number: int, stop: Stop | None = None) -> None:
        job.directory.mkdir(parents=True, exist_ok=True)
        self.job, self.number = job, number
        super().__init__(
            [forked.Process(target=_live, args=(job, rank, number, stop)) for rank in range(job.world_size)],
            [job.directory / f"stderr.{number}.{rank}" for rank in range(job.world_size)],
        )

    def kill(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.processes[rank].kill()

    def trail(self, rank: int) -> list[str]:
        """The phases of saving that a rank went through, an entry for each operation, the last of which it may be in."""
        path = self.job.directory / f"trail.{self.number}.{rank}"
        return path.read_text().split() if path.exists() else []

    def halted(self) -> bool:
        """Whether a process stands where it was to stop."""
        return (self.job.directory / f"halted.{self.number}").exists()

    def release(self) -> None:
        """Lets the process that stopped go on."""
        (self.job.directory / f"released.{self.number}").touch()

    def over(self) -> bool:
        return not any(process.is_alive() for process in self.processes)

    def wait(self) -> list[int | None]:
        """Waits until all have ended, and gives how."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def end_orphans(self) -> int:
        """Waits until what the processes started is gone, and ends loader workers that torch has forgotten: how many.

        A worker looks twice a second whether it still has the parent that it had when it came to look first. If the
        parent was killed before that, it stays for ever.
        """
        with suppress(AssertionError):
            until(lambda: not self.started(), "all is gone", 10.0)
        orphans = self.started()
        for pid in orphans:
            with suppress(OSError):  # by now it has ended by itself
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                assert name == "pt_data_worker", f"{name} was left over"
                os.kill(pid, signal.SIGKILL)
        until(lambda: not self.started(), "all is gone")
        return len(orphans)

    def started(self) -> list[int]:
        """What the processes have started and is still there."""
        sessions = {process.pid for process in self.processes}
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) in sessions and fields[0] != "Z":
                found.append(int(path.parent.name))
        return found


def until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.005)


@dataclass(frozen=True, slots=True)
class Kill:
    """When which ranks are killed, and whether the others are left to end by themselves.

    Attributes:
        victims: their ranks.
        stop: where a process stops for that; None: after some progress.
        updates: the progress, in updates of this life, and then
        seconds: at some time.
        left_alone: the others end by themselves; or else they are killed a moment later, as a launcher does.
    """

    victims: tuple[int, ...]
    stop: Stop | None
    updates: int
    seconds: float
    left_alone: bool

    @property
    def place(self) -> str:
        return "progress" if self.stop is None else self.stop.phase


def kills(count: int, seed: int, world_size: int = 2) -> list[Kill]:
    """So many kills at random; every place and every set of victims has its turn."""
    chance = random.Random(seed)  # noqa: S311
    victims = [(0,), (1,), (0, 1)] if world_size == 2 else [(0,)]
    places = ["progress", "save", "progress", "agreement", "rename", "progress", "prune"]
    plan = []
    for index in range(count):
        place, dead = places[index % len(places)], victims[index % len(victims)]
        rank = chance.choice(dead) if place in ("save", "agreement") else 0
        # in its life a rank saves some 20 times; rank 0 does 15 operations on files and 3 agreements in each
        number = chance.randint(1, {"save": 40, "agreement": 9, "rename": 8, "prune": 24}.get(place, 1))
        stop = None if place == "progress" or (world_size == 1 and place == "agreement") else Stop(rank, place, number)
        plan.append(Kill(dead, stop, chance.randint(0, 10), chance.uniform(0, 0.2), chance.random() < 0.5))
    return plan


@dataclass
class Toll:
    """What a number of jobs went through."""

    runs: int = 0
    equal: int = 0
    lives: int = 0
    redone: int = 0
    orphans: int = 0
    by_victims: Counter[str] = field(default_factory=Counter)
    by_place: Counter[str] = field(default_factory=Counter)

    @property
    def kills(self) -> int:
        return sum(self.by_place.values())


def endure(jobs: Iterator[Job], plan: Sequence[Kill], reference: Callable[[Job], Reference]) -> Toll:
    """Runs jobs that are killed by `plan`, each until it is done, and looks at everything after each kill and at the end."""
    toll, left = Toll(), list(plan)[::-1]
    while left:
        job = next(jobs)
        expected, newest, finished = reference(job), 0, False
        toll.runs += 1
        for number in range(100):
            kill = left[-1] if left else None
            with Life(job, number, kill.stop if kill else None) as life:
                hit = kill is not None and _strike(life, kill)
                statuses = life.wait()
                assert None not in statuses, f"a rank outlives the other, {statuses}"
                toll.orphans += life.end_orphans()
                toll.lives += 1
                finished = not hit and statuses == [0] * job.world_size
                assert finished or hit, f"life {number} ended by itself with {statuses}"
                newest = inspect(job, expected, number, newest, toll)
            if hit:
                left.pop()
                assert kill is not None
                toll.by_victims[" and ".join(map(str, kill.victims))] += 1
                toll.by_place[kill.place] += 1
            if finished:
                break
        assert finished, f"not done after {number} lives"
        compare_ends(job, expected)
        toll.equal += 1
    return toll


def _strike(life: Life, kill: Kill) -> bool:
    """Waits for the moment, and kills. False if the processes were done before."""
    job, path = life.job, life.job.directory / "history.0"
    before = path.stat().st_size if path.exists() else 0

    def updates() -> int:
        return path.read_bytes()[before:].count(b"\n") if path.exists() else 0

    if kill.stop is None:
        until(lambda: updates() >= kill.updates or life.over(), "progress")
        time.sleep(kill.seconds)
    else:
        until(lambda: life.halted() or life.over(), "the place to be killed at")
    life.kill(kill.victims)
    for victim in kill.victims:
        life.processes[victim].join()
    if kill.stop is not None:
        life.release()
    hit = any(life.processes[victim].exitcode == -signal.SIGKILL for victim in kill.victims)  # one may have been done before
    have_met = all(life.trail(rank) for rank in range(job.world_size))  # or else they wait for one another for minutes
    if hit and not (kill.left_alone and have_met):
        life.kill(range(job.world_size))
    return hit


def inspect(job: Job, expected: Reference, life: int, newest_before: int, toll: Toll) -> int:
    """Looks at what the processes have left. Gives the newest update that is saved."""
    names = sorted(path.name for path in job.checkpoints.iterdir()) if job.checkpoints.exists() else []
    whole = [name for name in names if is_checkpoint_name(name)]
    unfinished = [name for name in names if name.startswith(".unfinished-")]
    removed = [name for name in names if name.startswith(".removed-")]
    lock = [name for name in names if name == LOCK]  # of a process that was killed
    assert sorted(whole + unfinished + removed + lock) == names
    assert len(whole) <= 3  # the newest, the best, and one that was to be removed
    assert len(unfinished) <= 1
    assert len(removed) <= 1
    newest = 0
    for name in whole:
        moment, content = stored(job.checkpoints / name)
        wrong = {key: (moment, name) for key, entry in expected.checkpoints[moment].items() if content.get(key) != entry}
        assert not wrong, f"{name} can be read and is wrong: {wrong}"
        newest = max(newest, moment[0])
    assert newest >= newest_before, "a committed checkpoint is gone"
    interval = job.every * (2 if job.asynchronous else 1)
    for rank in range(job.world_size):
        lines = history(job, rank)
        assert [expected.updates[rank][line["update"]] for line in lines] == [done(line) for line in lines]
        mine = [line["update"] for line in lines if line["life"] == life]
        assert mine == [*range(newest_before + 1, newest_before + 1 + len(mine))], "it went on at the newest checkpoint"
        assert not mine or mine[-1] - newest <= interval
        toll.redone += max(0, mine[-1] - newest) if mine else 0
    return newest


def compare_ends(job: Job, expected: Reference) -> None:
    """A run that was killed ended as the one that was not, and left nothing else behind."""
    assert finals(job) == expected.finals
    assert points(job) == expected.points
    assert best(job) == expected.best
    for rank in range(job.world_size):
        assert {line["update"] for line in history(job, rank)} == set(expected.updates[rank])
    names = [path.name for path in job.checkpoints.iterdir()]
    assert all(is_checkpoint_name(name) for name in names), names
    assert len(names) <= 3, names
