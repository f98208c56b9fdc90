"""The copy of a run's checkpoints in an object store: whole wherever the run is killed, and enough to resume from alone."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec.config
import numpy as np
import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ignite_train import (
    CheckpointError,
    Evaluator,
    LockTakenOverError,
    ResumableLoader,
    Trainer,
    create_evaluator,
    create_trainer,
)
from ignite_train.checkpoint import find, verify
from ignite_train.checkpoint.manifest import MANIFEST, read_manifest
from ignite_train.checkpoint.retention import Retention
from ignite_train.handlers import Checkpoint
from killing import until
from processes import DEADLINE_SECONDS, forked
from ranks import run_ranks
from tiers import only

CHANGES = ("pipe_file", "put_file", "rm_file", "rm", "mv")  # what the store is asked to do, one call each
UPDATES = 4
CHANGES_OF_A_LIFE = 23  # that a run with these updates asks for
CALLS_OF_A_START = 16  # of any kind, until all is fetched and nothing is missing in the store


class Samples(torch.utils.data.Dataset[Any]):
    """For one epoch with more updates than are made, on 3 ranks too."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(4) * 0.1 + index * 0.3


def build(directory: Path | str, url: str | None, **options: Any) -> tuple[Trainer, Checkpoint]:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.3), nn.Linear(3, 1))
    if options.get("frozen") == "once":
        model[0].requires_grad_(False)
    model = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.05)
    trainer = create_trainer(model, optimizer, forward)
    checkpoint = Checkpoint(directory, **{"every": 1, **options}, mirror=url)
    checkpoint.attach(trainer)
    return trainer, checkpoint


def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def train(directory: Path, url: str | None, *, updates: int = UPDATES, resume: Any = "auto", **options: Any) -> Trainer:
    trainer, _ = build(directory, url, **options)
    trainer.run(loader(), max_iters=updates, resume=resume)
    return trainer


def loader() -> ResumableLoader:
    return ResumableLoader(Samples(), 2, shuffle=True, seed=3)


def bits(trainer: Trainer) -> list[list[int]]:
    return [value.detach().reshape(-1).view(torch.int32).tolist() for value in trainer.model.parameters()]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of the checkpoints, by its path; without the lock of a run, and what says who copies."""
    files = (path for path in folder.rglob("*") if path.is_file())
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    return {name: data for name, data in found.items() if name != "writer.json" and not name.startswith(".")}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "here"


# --- the same files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("frozen", ["each", "once"])
def test_the_store_has_the_files_of_the_directory(here: Path, store: Path, frozen: str, asynchronous: bool) -> None:
    """So a copy of it is a directory of checkpoints. Also what is removed is the same."""
    train(here, f"file://{store}", frozen=frozen, asynchronous=asynchronous, keep=2, keep_every=1 if frozen == "each" else None)

    assert contents(store) == contents(here)
    assert len(find(store)) == (UPDATES if frozen == "each" else 2)
    assert any(name.startswith("frozen-") for name in contents(store)) == (frozen == "once")
    for found in find(store):
        verify(found.path)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["each", "once"])
def test_a_run_whose_directory_is_lost_ends_with_the_same_bits(here: Path, store: Path, frozen: str) -> None:
    """The newest checkpoint comes back as it was written, and training continues in the middle of the epoch."""
    undisturbed = train(here / "other", f"file://{store}-other", frozen=frozen)
    train(here, f"file://{store}", updates=2, frozen=frozen)
    before = contents(store)
    shutil.rmtree(here)
    trainer, checkpoint = build(here, f"file://{store}", frozen=frozen)
    came: list[dict[str, bytes]] = []
    trainer.add_event_handler(Events.ITERATION_STARTED(once=3), lambda: came.append(contents(here)))
    trainer.run(loader(), max_iters=UPDATES)

    assert came
    assert came[0] == {name: data for name, data in before.items() if name in came[0]}
    assert sum(MANIFEST in name for name in came[0]) == 1
    assert bits(trainer) == bits(undisturbed)
    assert checkpoint.latest is not None
    assert contents(store) == contents(here)


@pytest.mark.slow
def test_the_rule_of_what_stays_is_asked_as_often_however_many_there_are(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer sorts all checkpoints."""
    asked, surplus = list[int](), Retention.surplus
    monkeypatch.setattr(Retention, "surplus", lambda rule, known: (asked.append(len(known)), surplus(rule, known))[1])
    train(here, "memory://asked", updates=12, keep=99)
    assert asked.count(11) == asked.count(3) > 0


def test_a_store_in_memory_will_do(here: Path) -> None:
    """Any file system of fsspec."""
    url = f"memory://{here.parent.name}/run"
    whole = bits(train(here / "other", f"{url}-other"))
    train(here, url, updates=2)
    shutil.rmtree(here)
    assert bits(train(here, url, resume="must")) == whole


@pytest.mark.slow
@pytest.mark.parametrize("resume", ["auto", "must"])
def test_the_newest_wins_wherever_it_is(here: Path, store: Path, tmp_path: Path, resume: str) -> None:
    """A directory with older checkpoints, as of a machine that the job comes back to, gets the newest, and only such a one."""
    train(here, f"file://{store}", updates=1)
    shutil.copytree(here, tmp_path / "old")
    train(here, f"file://{store}", updates=3)
    newer = shutil.copytree(here, tmp_path / "newer")

    trainer, _ = build(tmp_path / "old", f"file://{store}")
    started: list[int] = []
    trainer.add_event_handler(Events.STARTED, lambda: started.append(trainer.state.iteration))
    trainer.run(loader(), max_iters=UPDATES, resume=resume)
    assert started == [3]

    behind, before = tmp_path / "behind", contents(newer)
    train(tmp_path / "elsewhere", f"file://{behind}", updates=1)
    trainer = train(newer, f"file://{behind}", updates=3, resume=resume)
    assert trainer.state.iteration == 3
    assert contents(newer) == before
    assert contents(behind) == before, "a run that is over copies what is missing"


@pytest.mark.slow
def test_a_run_from_an_older_checkpoint_is_newer_than_what_the_store_has(here: Path, store: Path) -> None:
    """Its serial numbers come after those in the store, so that it is the one that is resumed, and that stays."""
    train(here, f"file://{store}", updates=3, keep=9)
    first = here / "update-00000001"
    for newer in (path for path in here.glob("update-*") if path != first):
        shutil.rmtree(newer)
    train(here, f"file://{store}", updates=2, keep=9, resume=first)

    newest = find(store)[-1]
    assert newest.manifest is not None
    assert newest.manifest.update == 2
    shutil.rmtree(here)
    trainer, _ = build(here, f"file://{store}")
    started: list[int] = []
    trainer.add_event_handler(Events.STARTED, lambda: started.append(trainer.state.iteration))
    trainer.run(loader(), max_iters=3)
    assert started == [2]


def test_checkpoints_in_the_store_are_not_overlooked_by_never(here: Path, store: Path) -> None:
    """Checkpoints in the directory are not overlooked either."""
    train(here, f"file://{store}", updates=1)
    shutil.rmtree(here)
    with pytest.raises(ValueError, match="resume must not be 'never' where checkpoints are"):
        train(here, f"file://{store}", resume="never")


def evaluated(directory: Path, url: str, losses: list[float], updates: int) -> Checkpoint:
    """Trains with a score for each update."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    trainer = create_trainer(model, torch.optim.AdamW(model.parameters()), forward)
    evaluator: Evaluator = create_evaluator(model, forward)
    checkpoint = Checkpoint(directory, every=1, keep=1, score="loss", mirror=url)
    checkpoint.attach(trainer, evaluator=evaluator)

    @evaluator.on(Events.EPOCH_COMPLETED)
    def score() -> None:
        evaluator.state.metrics["loss"] = losses[trainer.state.iteration - 1]

    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: evaluator.run([torch.ones(2, 4)]))
    trainer.run(loader(), max_iters=updates)
    return checkpoint


def test_the_best_is_fetched_too(here: Path, store: Path) -> None:
    """Or a worse one would be the best after the directory was lost."""
    losses = [0.5, 0.1, 0.4, 0.3]
    evaluated(here, f"file://{store}", losses, 3)
    assert [found.path.name for found in find(store)] == [found.path.name for found in find(here)]
    shutil.rmtree(here)
    checkpoint = evaluated(here, f"file://{store}", losses, 4)

    assert checkpoint.best is not None
    assert checkpoint.best.score == 0.1
    assert checkpoint.load_best().path.name == "update-00000002"
    assert contents(store) == contents(here)


# --- killed -----------------------------------------------------------------------------------------------------------------


class Store:
    """Stands before a store, and says what it is asked for before it is done."""

    def __init__(self, store: Any, before: Callable[[str, tuple[Any, ...]], None]) -> None:
        self._store, self._before = store, before

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            self._before(name, args)
            return found(*args, **options)

        return call


def watch(checkpoint: Checkpoint, before: Callable[[str, tuple[Any, ...]], None]) -> None:
    mirror = checkpoint.saver.mirror
    assert mirror is not None
    mirror._store = Store(mirror._store, before)


def life(
    directory: Path, url: str, number: int, calls: tuple[str, ...], options: dict[str, Any], environment: dict[str, str]
) -> None:
    """Trains in a process of its own, killed before the call of this number to the store; leaves the bits it ends with."""
    os.environ.update(environment)  # that of a fork server is older
    try:
        torch.set_num_threads(1)
        trainer, checkpoint = build(directory, url, frozen="once", **options)
        counts: Counter[str] = Counter()

        def before(name: str, args: tuple[Any, ...]) -> None:
            counts["all"] += not calls or name in calls
            if counts["all"] == number and (not calls or name in calls):
                os.kill(os.getpid(), signal.SIGKILL)

        watch(checkpoint, before)
        trainer.run(loader(), max_iters=UPDATES)
        left_by(directory).write_text(f"{bits(trainer)}\n{counts['all']}")
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def left_by(directory: Path) -> Path:
    return directory.with_name("left")


def live(
    directory: Path, url: str, number: int = 0, calls: tuple[str, ...] = CHANGES, **options: Any
) -> tuple[int | None, str]:
    """How such a process ended, and what it left."""
    left = left_by(directory)
    left.unlink(missing_ok=True)
    process = forked.Process(target=life, args=(directory, url, number, calls, options, {**os.environ}))
    process.start()
    process.join(DEADLINE_SECONDS)
    process.kill()
    return process.exitcode, left.read_text() if left.exists() else ""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, bytes]]:
    """The bits of a run that is not killed, and its checkpoints."""
    directory = tmp_path_factory.mktemp("undisturbed")
    status, left = live(directory / "other", f"file://{directory}/other-store")
    assert (status, int(left.splitlines()[1])) == (0, CHANGES_OF_A_LIFE)
    status, left = live(directory / "here", f"file://{directory}/store", keep_every=1)
    assert status == 0
    return left.splitlines()[0], contents(directory / "here")


def manifests(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"update-*/{MANIFEST}"))


def check_whole(store: Path, here: Path, undisturbed: dict[str, bytes]) -> None:
    """All checkpoints in a store are whole, and equal to the local ones; at most the newest local one is missing."""
    local = [found.manifest.update for found in find(here) if found.manifest] if here.exists() else []
    there = [path.parent for path in manifests(store)]
    newest = max((read_manifest(path).update for path in there), default=0)
    assert newest in {max(local, default=0), max(local, default=0) - 1}
    for path in there:
        verify(path)
        for file in path.iterdir():
            reference, copied_from = undisturbed.get(f"{path.name}/{file.name}"), here / path.name / file.name
            assert file.name == MANIFEST or reference is None or file.read_bytes() == reference
            assert not copied_from.exists() or file.read_bytes() == copied_from.read_bytes()


def check_nothing_left(store: Path, here: Path) -> None:
    """The store has all that the directory has, perhaps the checkpoint before it too, and nothing that was cut short."""
    assert contents(here).items() <= contents(store).items()
    assert [path.parent for path in manifests(store)] == sorted(store.glob("update-*"))
    assert {path.name for path in here.iterdir()} <= {path.name for path in store.iterdir()}
    assert len(manifests(store)) == 2
    assert len([*store.glob("frozen-*")]) == 1


@pytest.mark.parametrize("number", only([4, 10, 17], range(1, CHANGES_OF_A_LIFE + 1)))
def test_killed_before_any_change_of_the_store_it_has_a_whole_checkpoint(
    here: Path, store: Path, undisturbed: tuple[str, dict[str, bytes]], number: int
) -> None:
    """The disk is not needed: what is left of it is removed before the next start."""
    status, _ = live(here, f"file://{store}", number)
    assert status == -signal.SIGKILL
    check_whole(store, here, undisturbed[1])
    # The first call names the writer, and the first checkpoint has two files, frozen weights and a manifest.
    assert bool(manifests(store)) == (number > 5)

    shutil.rmtree(here, ignore_errors=True)  # the first call comes before there is one
    status, left = live(here, f"file://{store}")
    assert status == 0
    assert left.splitlines()[0] == undisturbed[0]
    check_nothing_left(store, here)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, CALLS_OF_A_START + 1))
def test_killed_while_it_fetches_the_next_start_has_the_same(
    here: Path, store: Path, undisturbed: tuple[str, dict[str, bytes]], number: int
) -> None:
    """A checkpoint that is half fetched is never taken for one."""
    train(here, f"file://{store}", updates=2, frozen="once")
    shutil.rmtree(here)
    status, _ = live(here, f"file://{store}", number, calls=())
    assert status == -signal.SIGKILL
    for found in find(here) if here.exists() else ():
        verify(found.path)

    status, left = live(here, f"file://{store}")
    assert status == 0
    assert left.splitlines()[0] == undisturbed[0]
    check_nothing_left(store, here)


# --- damage -----------------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a bit of the tensors": lambda path: flip(path / "rank-00000.safetensors"),
    "a bit of the index": lambda path: flip(path / "rank-00000.json"),
    "a bit of the manifest": lambda path: flip(path / MANIFEST),
    "a file is missing": lambda path: (path / "rank-00000.safetensors").unlink(),
    "a file is cut": lambda path: (path / "rank-00000.json").write_bytes((path / "rank-00000.json").read_bytes()[:-1]),
    "the last number": lambda path: (path / "rank-00000.safetensors").write_bytes(
        (path / "rank-00000.safetensors").read_bytes()[:-1] + b"\xff"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_object_is_noticed_and_the_one_before_is_taken(
    here: Path, store: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """The damaged one does not count any more, and nothing of it is removed: it may be the reader that is broken."""
    whole = bits(train(here / "other", f"file://{store}-other"))
    train(here, f"file://{store}", updates=2)
    shutil.rmtree(here)
    newest = find(store)[-1].path
    DAMAGE[damage](newest)
    remains = {path.name for path in newest.iterdir()} - {MANIFEST}
    trainer, _ = build(here, f"file://{store}")
    started: list[int] = []
    trainer.add_event_handler(Events.STARTED, lambda: started.append(trainer.state.iteration))
    trainer.run(loader(), max_iters=UPDATES)

    assert started == [1]
    assert bits(trainer) == whole
    (warning,) = [record.message for record in caplog.records if "damaged" in record.message]
    assert re.match(rf"{newest.name} of the mirror file://.* is damaged: .*; its manifest is renamed", warning)
    assert {path.name for path in newest.iterdir()} >= {f"damaged-{MANIFEST}", *remains}
    assert [found.manifest.update for found in find(here) if found.manifest] == [3, 4]
    assert {path.parent.name for path in manifests(store)} == {found.path.name for found in find(here)}


@pytest.mark.slow
def test_a_run_that_finds_its_directory_damaged_is_newer_than_what_the_store_has(here: Path, store: Path) -> None:
    """It begins with an older checkpoint of the directory, and its serial numbers come after the newest in the store."""
    whole = bits(train(here / "other", f"file://{store}-other"))
    train(here, f"file://{store}", updates=3, keep=9)
    for found in find(here)[1:]:
        flip(found.path / "rank-00000.safetensors")
    train(here, f"file://{store}", updates=2, keep=9)
    shutil.rmtree(here)
    trainer, _ = build(here, f"file://{store}", keep=9)
    started: list[int] = []
    trainer.add_event_handler(Events.STARTED, lambda: started.append(trainer.state.iteration))
    trainer.run(loader(), max_iters=UPDATES)
    assert started == [2]
    assert bits(trainer) == whole


def test_all_damaged_is_not_a_new_start(here: Path, store: Path) -> None:
    """Nor at the start after that, which finds their manifests renamed."""
    train(here, f"file://{store}", updates=2)
    shutil.rmtree(here)
    for found in find(store):
        flip(found.path / "rank-00000.safetensors")
    for _ in range(2):
        with pytest.raises(
            CheckpointError, match=r"has no whole checkpoint and 2 damaged, such as update-00000002\.1: training"
        ):
            train(here, f"file://{store}")
    renamed = store / "update-00000002.1" / f"damaged-{MANIFEST}"
    flip(renamed.with_name("rank-00000.safetensors"))
    renamed.rename(renamed.with_name(MANIFEST))
    train(here, f"file://{store}", updates=2)
    assert find(here)[-1].path.name == "update-00000002.1"


def test_damaged_frozen_weights_are_told_and_an_older_one_is_no_way_out(here: Path, store: Path) -> None:
    """All checkpoints need the same file, as in a directory. It is not left in the directory."""
    train(here, f"file://{store}", updates=2, frozen="once")
    shutil.rmtree(here)
    flip(next(store.glob("frozen-*")))
    with pytest.raises(CheckpointError, match=r"which has its frozen weights and lies beside it, cannot be used"):
        train(here, f"file://{store}", frozen="once")
    assert contents(here) == {}
    assert len(manifests(store)) == 2


def test_a_newer_format_is_not_passed_over(here: Path, store: Path) -> None:
    """The start is refused, as with one in a directory."""
    train(here, f"file://{store}", updates=1)
    shutil.rmtree(here)
    path = manifests(store)[-1]
    body = re.sub(rb'"format":1', b'"format":7', path.read_bytes().partition(b'"manifest":')[2][:-2])
    path.write_bytes(b'{"crc32":"%08x","manifest":%b}\n' % (zlib.crc32(body), body))
    with pytest.raises(CheckpointError, match="format 7"):
        train(here, f"file://{store}")
    assert path.exists()


# --- failures ---------------------------------------------------------------------------------------------------------------


def broken(checkpoint: Checkpoint, fails: Callable[[str, tuple[Any, ...]], bool]) -> None:
    def before(name: str, args: tuple[Any, ...]) -> None:
        if fails(name, args):
            raise TimeoutError(f"the store does not answer to {name}")

    watch(checkpoint, before)


def fails_at(update: int, times: int = 1) -> Callable[[str, tuple[Any, ...]], bool]:
    """The first attempts to copy a file of the checkpoints of this update."""
    met: list[str] = []

    def fails(name: str, args: tuple[Any, ...]) -> bool:
        if name != "put_file" or f"/update-{update:08d}" not in args[1]:
            return False
        met.append(name)
        return len(met) <= times

    return fails


def test_a_copy_that_fails_is_told_as_a_save_that_fails_and_made_up_for(
    here: Path, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint on the disk is whole. The save after the failure copies both."""
    trainer, checkpoint = build(here, f"file://{store}", on_error="warn", keep=9)
    broken(checkpoint, fails_at(2))
    there: list[set[str]] = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def wait() -> None:
        checkpoint.saver.wait()
        there.append({path.parent.name for path in manifests(store)})

    trainer.run(loader(), max_iters=UPDATES)
    (warning,) = [record.message for record in caplog.records if "the store does not answer" in record.message]
    assert re.fullmatch(
        r"copying update-00000002 to the mirror file://.* failed: rank 0, TimeoutError: the store does not answer to put_file; "
        r"training continues, and the older checkpoints are untouched",
        warning,
    )
    names = [f"update-{number:08d}" for number in range(5)]
    assert there == [set(), {names[1]}, {names[1]}, {names[1], names[2], names[3]}]
    assert contents(store) == contents(here)
    assert len(find(here)) == UPDATES + 1 - 1


def test_with_the_default_a_copy_that_fails_ends_the_run(here: Path, store: Path) -> None:
    """And the start after it copies what is missing, although the run may have nothing to save any more."""
    trainer, checkpoint = build(here, f"file://{store}")
    broken(checkpoint, fails_at(2))
    with pytest.raises(CheckpointError, match="copying update-00000002 to the mirror"):
        trainer.run(loader(), max_iters=UPDATES)
    for found in find(here):
        verify(found.path)
    assert [path.parent.name for path in manifests(store)] == ["update-00000001"]

    trainer, checkpoint = build(here, f"file://{store}", on_error="warn")
    broken(checkpoint, fails_at(UPDATES, times=9))
    with pytest.raises(CheckpointError, match="the run is over, and its last state is not on the mirror"):
        trainer.run(loader(), max_iters=UPDATES)
    assert contents(store) != contents(here)
    train(here, f"file://{store}")
    assert contents(store) == contents(here)


def test_a_mirror_that_cannot_be_reached_is_told_before_anything_is_trained(here: Path, store: Path) -> None:
    """The newest checkpoint may be there, so this is raised whatever `on_error` says."""
    trainer, checkpoint = build(here, f"file://{store}", on_error="warn")
    broken(checkpoint, lambda name, args: True)
    with pytest.raises(
        CheckpointError,
        match=r"reaching the mirror file://.* failed: rank 0, CheckpointError: TimeoutError: the store does not answer to "
        r"pipe_file; make it writable, or leave out mirror= to start with the directory alone$",
    ):
        trainer.run(loader(), max_iters=UPDATES)
    assert trainer.state.iteration == 0


def test_a_start_that_cannot_copy_names_the_mirror(here: Path, store: Path) -> None:
    """Missing checkpoints are copied there at the start; where that fails for the last time allowed, the remedy names it."""
    train(here, None, updates=2)
    trainer, checkpoint = build(here, f"file://{store}", on_error="warn", give_up_after=1)
    broken(checkpoint, fails_at(2))
    with pytest.raises(
        CheckpointError, match=r"copying update-00000002.* to the mirror .* give_up_after=1: make the mirror writable"
    ):
        trainer.run(loader(), max_iters=UPDATES)


def test_a_store_that_may_not_be_removed_from_is_told_once(here: Path, store: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Some stores keep everything for some time."""
    trainer, checkpoint = build(here, f"file://{store}", keep=1)
    broken(checkpoint, lambda name, args: name in ("rm", "rm_file"))
    trainer.run(loader(), max_iters=UPDATES)
    (warning,) = [record.message for record in caplog.records if "could not be removed" in record.message]
    assert warning.endswith("the store does not answer to rm_file")
    assert len(find(here)) == 1
    assert len(find(store)) == UPDATES + 1


def test_a_removal_takes_the_manifest_first_and_comes_after_the_commit(here: Path, store: Path) -> None:
    """So that nothing is taken for a checkpoint that is half removed, and there is always one."""
    trainer, checkpoint = build(here, f"file://{store}", keep=1)
    trail: list[str] = []

    def note(name: str, args: tuple[Any, ...]) -> None:
        if name in CHANGES:
            trail.append(f"{name} {Path(args[name == 'put_file']).relative_to(store)}")

    watch(checkpoint, note)
    trainer.run(loader(), max_iters=2)
    first, second = "update-00000001", "update-00000002"
    assert trail[:9] == [
        "pipe_file writer.json",
        *(f"put_file {first}/{file}" for file in ("rank-00000.json", "rank-00000.safetensors", MANIFEST)),
        *(f"put_file {second}/{file}" for file in ("rank-00000.json", "rank-00000.safetensors", MANIFEST)),
        f"rm_file {first}/{MANIFEST}",
        f"rm {first}",
    ]


def test_the_run_that_was_started_last_is_the_one_that_writes(here: Path, store: Path) -> None:
    """A run that comes back after a pause learns that another machine has gone on without it, and writes nothing more."""
    trainer, _ = build(here / "one", f"file://{store}", on_error="warn")
    trainer.add_event_handler(Events.ITERATION_STARTED(once=3), lambda: train(here / "two", f"file://{store}", updates=4))
    with pytest.raises(LockTakenOverError, match=r"was started later with the mirror .*; this run must not write there"):
        trainer.run(loader(), max_iters=UPDATES)
    assert contents(store) == contents(here / "two")


def test_what_a_mirror_may_be(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told in one line when it is named."""
    with pytest.raises(
        ValueError,
        match=r"^directory must be a path on a disk where mirror='memory://one' is given, got 'memory://two'; "
        r"leave out mirror=, or name a directory$",
    ):
        Checkpoint("memory://two", mirror="memory://one")
    with pytest.raises(
        ValueError,
        match=r"^directory must be a string where it is a URL, got PosixPath\('s3:/bucket/run'\); write 's3://bucket/run'$",
    ):
        Checkpoint(Path("s3://bucket/run"))
    with pytest.raises(ValueError, match=r"^mirror must be a URL such as 's3://bucket/run', got 's3:/bucket'$"):
        Checkpoint(here, mirror="s3:/bucket")
    for path in ("layers=[64]", "run*", "run?"):  # by which other runs would be found too
        says = rf"^mirror must be a URL whose path is without \*, \? and \[, got the path '/{re.escape(path)}'$"
        with pytest.raises(ValueError, match=says):
            Checkpoint(here, mirror=f"memory://{path}")
    assert Checkpoint(here, mirror=f"file://{here}[1]").directory == here
    with pytest.raises(TypeError, match=r"^mirror must be a URL such as 's3://bucket/run', got 3 of type int$"):
        Checkpoint(here, mirror=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^mirror must be a URL that fsspec opens, got 'zz://run': Protocol not known: zz$"):
        Checkpoint(here, mirror="zz://run")
    for missing, url in (("fsspec.core", "memory://run"), ("s3fs", "s3://bucket/run")):
        monkeypatch.setitem(sys.modules, missing, None)
        with pytest.raises(ValueError, match=rf"^mirror='{url}' needs a package that is not installed: .*ignite_train\[s3\]'$"):
            Checkpoint(here, mirror=url)
        monkeypatch.undo()


def test_a_url_in_place_of_a_directory(here: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are written into the user's cache and copied; on a machine whose cache is empty the run continues."""
    undisturbed = train(here / "whole", f"file://{store}-of-another")
    begun: list[int] = []
    for cache, updates in (("one", 2), ("two", UPDATES)):
        monkeypatch.setenv("XDG_CACHE_HOME", str(here / cache))
        trainer, checkpoint = build(f"file://{store}", None)
        assert checkpoint.directory == here / cache / "ignite_train" / "file" / store.relative_to("/")
        assert checkpoint.saver.mirror is not None
        assert checkpoint.saver.mirror.url == f"file://{store}"
        trainer.add_event_handler(Events.STARTED, lambda made: begun.append(made.state.iteration))
        trainer.run(loader(), max_iters=updates)
        assert contents(store) == contents(checkpoint.directory)
    assert begun == [0, 2]
    assert bits(trainer) == bits(undisturbed)


def test_the_cache_of_a_url_has_no_secrets_and_stays_where_it_is(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(here))
    assert Checkpoint("memory://bucket/../a b/run/").directory == here / ".cache/ignite_train/memory/bucket/a%20b/run"


def test_a_mirror_is_shown(here: Path) -> None:
    """Where the handler is."""
    checkpoint = Checkpoint(here, mirror="memory://bucket/run/")
    assert repr(checkpoint) == f"Checkpoint('{here}', every_epochs=1, keep=2, mirror='memory:///bucket/run')"
    assert checkpoint.rows_at_end() == [("files", f"{here}, copied to memory:///bucket/run (Checkpoint)")]


# --- ranks ------------------------------------------------------------------------------------------------------------------


def train_on_ranks(directory: Path, url: str, updates: int, fails_on: int | None = None) -> tuple[Any, list[str], str]:
    """The bits that a rank ends with, the files that it has copied or fetched itself, and its error."""
    trainer, checkpoint = build(directory, url)
    rank, calls, error = dist.get_rank(), [], ""

    def before(name: str, args: tuple[Any, ...]) -> None:
        if name == "put_file" and rank == fails_on:
            raise TimeoutError("the store does not answer")
        if name in ("put_file", "cat_file"):
            calls.append(f"{name} {Path(args[-1]).name}")

    watch(checkpoint, before)
    try:
        trainer.run(loader(), max_iters=updates)
    except CheckpointError as failure:
        error = str(failure)
    return bits(trainer), calls, error


def test_each_rank_copies_and_fetches_its_own_files(here: Path, store: Path) -> None:
    """And rank 0 the manifests. The directory is lost, and the run ends with the same bits."""
    url = f"file://{store}"
    whole = run_ranks(train_on_ranks, here / "other", f"{url}-other", UPDATES)
    run_ranks(train_on_ranks, here, url, 2)
    assert contents(store) == {name: data for name, data in contents(here).items() if not name.startswith("other")}
    shutil.rmtree(here)
    again = run_ranks(train_on_ranks, here, url, UPDATES)

    assert [found[0] for found in again] == [found[0] for found in whole]
    assert contents(store) == contents(here)
    for rank, (_, calls, _) in enumerate(again):
        files = {f"{what} rank-{rank:05d}.{kind}" for what in ("put_file", "cat_file") for kind in ("json", "safetensors")}
        own = {f"put_file {MANIFEST}", f"cat_file {MANIFEST}", "cat_file writer.json"} if rank == 0 else set()
        assert {*calls} == files | own


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3])
def test_another_number_of_ranks_fetches_and_continues(here: Path, store: Path, world_size: int) -> None:
    """The ranks that are there fetch the files of the ranks that are gone, and copy them where the store lacks them."""
    run_ranks(train_on_ranks, here, f"file://{store}", 2)
    shutil.rmtree(store / "update-00000002.1")
    shutil.rmtree(store / "update-00000001", ignore_errors=True)
    shutil.copytree(here, here.with_name("copy"))
    run_ranks(train_on_ranks, here, f"file://{store}", 2, world_size=world_size)
    assert contents(store).keys() >= {name for name in contents(here.with_name("copy")) if "00002.1" in name}
    shutil.rmtree(here)
    run_ranks(train_on_ranks, here, f"file://{store}", 3, world_size=world_size)
    assert contents(store) == contents(here)
    assert find(here)[-1].manifest.world_size == world_size  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_failure_of_one_rank_is_that_of_all(here: Path, store: Path) -> None:
    """No rank waits for another, and the store has no checkpoint with a part of its files."""
    found = run_ranks(train_on_ranks, here, f"file://{store}", UPDATES, 1)
    assert len({error for _, _, error in found}) == 1
    assert re.match(r"copying update-00000001 to the mirror .* failed: rank 1, TimeoutError: the store does", found[0][2])
    assert manifests(store) == []
    assert len(find(here)) == 1


# --- a real server ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The file system of a server on this machine that speaks S3, with an empty bucket."""
    pytest.importorskip("moto.server", reason="pip install 'moto[server]'")
    s3fs = pytest.importorskip("s3fs", reason="pip install 'ignite-train[s3]'")
    # Else s3fs asks again after 15 seconds, and a server that is only slow has no upload in parts any more when it is asked.
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"read_timeout": 600, "connect_timeout": 600}})
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            until(lambda: answers(port), "the server answers")
            store = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
            store.mkdir("bucket")
            yield store
        finally:
            server.kill()


def answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


@pytest.mark.nightly
def test_killed_anywhere_it_resumes_from_a_server_alone(
    tmp_path: Path, bucket: Any, undisturbed: tuple[str, dict[str, bytes]]
) -> None:
    """Before each change of what the server has, as above with a folder."""
    for number in range(1, 100):
        here, url = tmp_path / str(number) / "here", f"s3://bucket/run-{number}"
        here.parent.mkdir()
        status, left = live(here, url, number)
        if status == 0:
            assert number == int(left.splitlines()[1]) + 1 == CHANGES_OF_A_LIFE + 1
            break
        assert status == -signal.SIGKILL
        copy = tmp_path / str(number) / "copy"
        copy.mkdir()
        if bucket.exists(f"bucket/run-{number}"):
            bucket.get(f"bucket/run-{number}/", f"{copy}/", recursive=True)
        check_whole(copy, here, undisturbed[1])
        assert bool(manifests(copy)) == (number > 5)
        shutil.rmtree(here, ignore_errors=True)
        status, left = live(here, url)
        assert status == 0
        assert left.splitlines()[0] == undisturbed[0]
        shutil.rmtree(copy)
        bucket.get(f"bucket/run-{number}/", f"{copy}/", recursive=True)
        check_nothing_left(copy, here)


@pytest.mark.nightly
def test_a_server_gets_large_files_in_parts_and_a_flipped_bit_there_is_noticed(tmp_path: Path, bucket: Any) -> None:
    """Of 121 MB, which is more than one request carries; a bucket that is not there is told."""

    def trainer(directory: Path, url: str) -> tuple[Trainer, nn.Module]:
        torch.manual_seed(0)
        model = nn.Linear(5500, 5500)
        made = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward)
        Checkpoint(directory, every=1, mirror=url).attach(made)
        return made, model

    data = [torch.ones(1, 5500)] * 9
    made, model = trainer(tmp_path / "here", "s3://bucket/large")
    made.run(data, max_iters=2)
    at_two = [value.clone() for value in model.parameters()]
    shutil.rmtree(tmp_path / "here")
    made, model = trainer(tmp_path / "here", "s3://bucket/large")
    made.add_event_handler(Events.STARTED, lambda: at_two.extend(value.clone() for value in model.parameters()))
    made.run(data, max_iters=3)
    assert all(torch.equal(one, other) for one, other in zip(at_two[:2], at_two[2:], strict=True))

    shutil.rmtree(tmp_path / "here")
    (name,) = bucket.glob("bucket/large/update-00000003*/rank-00000.safetensors")
    stored = bytearray(bucket.cat_file(name))
    stored[len(stored) // 2] ^= 1
    bucket.pipe_file(name, bytes(stored))
    started: list[int] = []
    made, _ = trainer(tmp_path / "here", "s3://bucket/large")
    made.add_event_handler(Events.STARTED, lambda: started.append(made.state.iteration))
    made.run(data, max_iters=3)
    assert started == [2]
    assert bucket.glob("bucket/large/update-00000003*/damaged-manifest.json")

    made, _ = trainer(tmp_path / "other", "s3://no-such-bucket/run")
    with pytest.raises(CheckpointError, match=r"^reaching the mirror s3://no-such-bucket/run failed: rank 0, .*exist"):
        made.run(data, max_iters=1)
