"""Whatever happens to the files of a checkpoint, it is noticed, and an older one that is whole takes its place."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import ignite_train
from ignite_train import CheckpointError, ForwardOutput, Trainer, UpdateOptions, checkpoint, create_trainer
from ignite_train.checkpoint.manifest import read_manifest
from ignite_train.errors import DamagedCheckpointError, UnreadableCheckpointError
from ignite_train.handlers import Checkpoint
from ignite_train.ranks import collectives
from ignite_train.tools.checkpoint_command import checkpoint_command
from ranks import run_ranks
from small_checkpoints import names, taken_apart

OLD, NEW = "update-00000002", "update-00000004"
PAGE = 4096
FILES = ("rank-00000.safetensors", "rank-00000.json", "manifest.json")


class Run(NamedTuple):
    """A trainer with a `Checkpoint`, and what it moves."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    trainer: Trainer
    checkpoint: Checkpoint

    def digest(self) -> str:
        """Of every bit of parameters, moments and counters, and of the random generator."""
        found = hashlib.sha256()

        def add(value: Any) -> None:
            if isinstance(value, torch.Tensor):
                found.update(f"{value.dtype} {tuple(value.shape)}".encode())
                found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            elif isinstance(value, dict):
                for key, entry in value.items():
                    found.update(repr(key).encode())
                    add(entry)
            elif isinstance(value, (list, tuple)):
                for entry in value:
                    add(entry)
            else:
                found.update(repr(value).encode())

        add([self.model.state_dict(), self.optimizer.state_dict(), self.trainer.state_dict(), torch.get_rng_state()])
        return found.hexdigest()


def _forward(model: nn.Module, x: torch.Tensor) -> ForwardOutput:
    return ForwardOutput(model(x).square().sum(), len(x))


def start(directory: Path) -> Run:
    """A run as a new process has it."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(40, 60), nn.Dropout(0.5), nn.Linear(60, 40), nn.BatchNorm1d(40))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = create_trainer(
        model, optimizer, _forward, options=UpdateOptions(reduction="explicit" if collectives.world_size() > 1 else "auto")
    )
    saver = Checkpoint(directory, every=2, keep=9)
    saver.attach(trainer)
    return Run(model, optimizer, trainer, saver)


def _random(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311  # the same each time


def data() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(6, 40, generator=generator) for _ in range(5)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A directory with two checkpoints, and by name what a run is after going back to each."""
    directory = tmp_path_factory.mktemp("whole")
    run = start(directory)
    run.trainer.run(data(), max_iters=4)
    (directory / f"{NEW}.1").rename(directory / NEW)  # saved again at the end of the run
    digests = {}
    for name in (OLD, NEW):
        run = start(directory)
        run.checkpoint.restore(directory / name)
        digests[name] = run.digest()
    assert names(directory) == [OLD, NEW]
    assert len({*digests.values(), start(directory).digest()}) == 3
    assert sum(path.stat().st_size for path in (directory / NEW).iterdir()) < 500_000
    return directory, digests


@pytest.fixture
def falls_back(whole, tmp_path, caplog) -> Callable[[Callable[[Path], None], str], None]:
    """Damages the newer one of two checkpoints, in a copy, and sees to it that everything is as it should be."""
    source, digests = whole
    run = start(tmp_path)

    def falls_back(damage: Callable[[Path], None], what: str) -> None:
        directory = tmp_path / "copy"
        shutil.copytree(source / OLD, directory / OLD, copy_function=os.link)
        shutil.copytree(source / NEW, directory / NEW)
        damage(directory / NEW)
        with pytest.raises(DamagedCheckpointError) as caught:
            checkpoint.verify(directory / NEW)
        reason = str(caught.value)
        assert "\n" not in reason, what

        caplog.clear()
        run.checkpoint.saver.directory.path = directory
        run.checkpoint.restore("must")
        assert run.digest() == digests[OLD], what
        assert run.checkpoint.latest == directory / OLD, what
        assert f"{NEW} is damaged: " in caplog.text, what
        assert "it is renamed, and an older one is tried" in caplog.text, what
        assert re.fullmatch(rf"damaged-{NEW}-[0-9a-f]{{4}},{OLD}", ",".join(names(directory))), what
        shutil.rmtree(directory)

    return falls_back


def altered(path: Path, change: Callable[[bytearray], Any]) -> None:
    """Changes the bytes of a file; they must not be what they were."""
    content = path.read_bytes()
    new = bytearray(content)
    change(new)
    assert new != content
    path.write_bytes(new)


def flip(bit: int) -> Callable[[bytearray], None]:
    def flip(content: bytearray) -> None:
        content[bit // 8] ^= 1 << bit % 8

    return flip


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_noticed(whole, tmp_path, name):
    """300 random bits in each file, one at a time: none is taken for what was written."""
    draw, path = _random(4), tmp_path / NEW
    shutil.copytree(whole[0] / NEW, path)
    for bit in draw.sample(range(8 * (path / name).stat().st_size), 300):
        altered(path / name, flip(bit))
        with pytest.raises(DamagedCheckpointError):
            checkpoint.verify(path)
        altered(path / name, flip(bit))
    checkpoint.verify(path)


@pytest.mark.slow
@pytest.mark.parametrize("count", [80, pytest.param(1000, marks=[pytest.mark.nightly, pytest.mark.timeout(6000)])])
@pytest.mark.parametrize("name", FILES)
def test_a_run_goes_on_from_the_older_one(whole, falls_back, name, count):
    """One random bit in one file: the run resumes from the older one, bitwise, and the log says what was wrong."""
    draw, size = _random(5), (whole[0] / NEW / name).stat().st_size
    for bit in draw.sample(range(8 * size), count):
        falls_back(lambda path: altered(path / name, flip(bit)), f"bit {bit} of {name}")  # noqa: B023


@pytest.mark.slow
def test_every_page_of_zeros_is_noticed(whole, falls_back):
    """A page that never reached the disk, each in turn, and runs of zeros anywhere."""
    draw, damaged = _random(6), 0
    for name in FILES:
        size = (whole[0] / NEW / name).stat().st_size
        begins = [*range(0, size, PAGE), *(draw.randrange(size) for _ in range(8))]
        for begin in begins:
            content = (whole[0] / NEW / name).read_bytes()
            end = min(begin + PAGE, size)
            if any(content[begin:end]):
                damaged += 1

                def zero(content: bytearray, begin: int = begin, end: int = end) -> None:
                    content[begin:end] = bytes(end - begin)

                falls_back(lambda path: altered(path / name, zero), f"{name}, zeros from {begin}")  # noqa: B023

    assert damaged >= 25


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_every_file_that_is_cut_short_or_goes_on_is_noticed(whole, falls_back, name):
    """Any prefix of a file, and a file with more behind it."""
    draw, size = _random(8), (whole[0] / NEW / name).stat().st_size
    for length in {0, 1, size - 1, *(draw.randrange(size) for _ in range(16))}:
        falls_back(lambda path: altered(path / name, lambda c: c.__delitem__(slice(length, None))), f"{name}, {length}")  # noqa: B023
    for tail in (b"\0", b"\n", b" ", b"}", bytes(PAGE), *(draw.randbytes(9) for _ in range(2))):
        falls_back(lambda path: altered(path / name, lambda content: content.extend(tail)), f"{name} and {tail[:9]!r}")  # noqa: B023


def test_parts_that_change_places_are_noticed(whole, falls_back):
    """Two halves of a file, or two of its blocks, in each other's place: all the right bytes."""
    for name in FILES:
        size = (whole[0] / NEW / name).stat().st_size

        def swap(content: bytearray) -> None:
            half = len(content) // 2
            content[:half], content[half : 2 * half] = content[half : 2 * half], content[:half]

        def rotate(content: bytearray) -> None:
            content[:] = content[8:] + content[:8]

        assert size > 100
        for change in (swap, rotate):
            falls_back(lambda path: altered(path / name, change), f"{name}, {change.__name__}")  # noqa: B023


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_or_of_another_checkpoint_is_noticed(whole, falls_back, name):
    """A file that is gone, is a directory, or is the one of that name in the older checkpoint."""

    def is_directory(path: Path) -> None:
        (path / name).unlink()
        (path / name).mkdir()

    falls_back(lambda path: (path / name).unlink(), f"no {name}")
    falls_back(is_directory, f"{name} is a directory")
    if name != "manifest.json":
        falls_back(lambda path: shutil.copy(whole[0] / OLD / name, path / name), f"{name} of the older one")


def test_a_manifest_of_another_checkpoint_is_noticed(whole, falls_back):
    """An old manifest beside new files; and files in each other's place."""

    def swapped(path: Path) -> None:
        (path / FILES[0]).rename(path / "aside")
        (path / FILES[1]).rename(path / FILES[0])
        (path / "aside").rename(path / FILES[1])

    falls_back(lambda path: shutil.copy(whole[0] / OLD / "manifest.json", path / "manifest.json"), "a stale manifest")
    falls_back(swapped, "the two files of a rank, swapped")
    falls_back(lambda path: [entry.unlink() for entry in path.iterdir()], "an empty directory")


def test_a_reader_without_checksums_takes_flipped_bits_for_tensors(whole, tmp_path, monkeypatch):
    """What the checksums are for: without them a flipped bit in the tensors is not noticed."""
    with monkeypatch.context() as patch:
        for module in (
            ignite_train.checkpoint.tensor_files,
            ignite_train.checkpoint.manifest,
            ignite_train.checkpoint.manifest,
            ignite_train.checkpoint.directory,
        ):
            patch.setattr(module, "zlib_ng", SimpleNamespace(crc32=lambda *_: 0))
        run = start(tmp_path)
        run.trainer.run(data(), max_iters=2)
        path = checkpoint.latest(tmp_path)
        assert path is not None
        file = (path / "rank-00000.safetensors").read_bytes()
        begin = len(file) - len(taken_apart(file)[1])
        for bit in _random(9).sample(range(8 * begin, 8 * len(file)), 20):
            altered(path / "rank-00000.safetensors", flip(bit))
            checkpoint.verify(path)
            altered(path / "rank-00000.safetensors", flip(bit))


# --- a run that saves meanwhile -----------------------------------------------------------------------------------------------


def consolidated(directory: Path) -> bool:
    checkpoint.consolidate(directory, directory / "model.pt")
    return (directory / "model.pt").is_file()


LOOKS: dict[str, Callable[[Path], bool]] = {
    "latest": lambda directory: checkpoint.latest(directory) in [*directory.iterdir()],
    "read_checkpoint": lambda directory: checkpoint.read_checkpoint(directory).update == 4,
    "load_weights": lambda directory: checkpoint.load_weights(start(directory).model, directory) == [],
    "consolidate": consolidated,
    "consolidate, the command": lambda directory: (
        checkpoint_command(["consolidate", str(directory), "--output", str(directory / "model.pt")]) == 0
    ),
    "list": lambda directory: checkpoint_command(["list", str(directory)]) == 0,
    "verify": lambda directory: checkpoint_command(["verify", str(directory)]) == 0,
}


def overtaken(directory: Path, patch: pytest.MonkeyPatch, number: int) -> None:
    """When the newest checkpoint is looked at for the time `number` it has another name, as if one after it had come."""
    looked: list[Path] = []

    def look(path: Path) -> Any:
        looked.append(path)
        if path == directory / NEW and looked.count(path) == number:
            path.rename(directory / "update-00000006")
        return read_manifest(path)

    for module in ("directory", "reader"):
        patch.setattr(f"ignite_train.checkpoint.{module}.read_manifest", look)


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("what", list(LOOKS))
def test_a_checkpoint_that_its_run_removes_meanwhile_is_not_damaged(
    what: str, number: int, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A list has no damage, and what reads the newest one reads the one that is the newest then."""
    shutil.copytree(whole[0] / NEW, tmp_path / NEW)
    overtaken(tmp_path, monkeypatch, number)
    assert LOOKS[what](tmp_path)
    assert "damaged" not in "".join(capsys.readouterr())


def test_a_run_that_removes_each_checkpoint_before_it_is_read(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends with the remedy."""

    def look(path: Path) -> Any:
        path.rename(tmp_path / f"update-{int(path.name[-8:]) + 1:08}")
        return read_manifest(path)

    shutil.copytree(whole[0] / NEW, tmp_path / NEW)
    monkeypatch.setattr("ignite_train.checkpoint.reader.read_manifest", look)
    for read in (checkpoint.latest, checkpoint.read_checkpoint):
        with pytest.raises(CheckpointError, match=r"train with Checkpoint\(keep=\.\.\.\) of more"):
            read(tmp_path)


def test_if_none_is_whole_nothing_begins_from_scratch(whole, tmp_path):
    """Both damaged: an error that says of each what is wrong with it. The run has not changed."""
    directory = tmp_path / "copy"
    shutil.copytree(whole[0], directory)
    (directory / OLD / "rank-00000.safetensors").unlink()
    altered(directory / NEW / "rank-00000.safetensors", flip(12345))
    run = start(directory)
    before = run.digest()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole: .*checksum.*it has no rank-00000.safetensors"):
        run.trainer.run(data(), max_iters=6)

    assert run.digest() == before
    assert all(name.startswith("damaged-") for name in names(directory))


# --- errors of the disk are not damage ---

CODES = (errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE)


def failing(patch: pytest.MonkeyPatch, call: str, part: str, code: int) -> None:
    """From now on a call to the system fails for every file that has `part` in its path."""
    real = getattr(os, call)

    def fails(target: Any, *arguments: Any, **options: Any) -> Any:
        path = str(Path(f"/proc/self/fd/{target}").readlink()) if isinstance(target, int) else os.fspath(target)
        if part in path:
            raise OSError(code, os.strerror(code), None if isinstance(target, int) else path)
        return real(target, *arguments, **options)

    patch.setattr(os, call, fails)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize(
    ("call", "part"),
    [
        *(("open", f"{NEW}/{name}") for name in FILES),
        ("open", f"{OLD}/manifest.json"),
        ("preadv", f"{NEW}/rank-00000.safetensors"),
        ("read", f"{NEW}/rank-00000.json"),
        ("read", f"{NEW}/manifest.json"),
        ("listdir", "copy"),
    ],
)
def test_an_error_of_the_disk_renames_nothing(whole, tmp_path, call, part, code, caplog):
    """The start fails with one line that names file and error; when the disk is readable again, the same command resumes."""
    directory = tmp_path / "copy"
    shutil.copytree(whole[0], directory)
    run = start(directory)
    before = run.digest()
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, call, part, code)
        with pytest.raises(CheckpointError) as caught:
            run.trainer.run(data(), max_iters=6)
    message = str(caught.value)
    assert f"[Errno {code}] {os.strerror(code)}" in message
    assert part in message
    assert (call == "listdir") == ("what an earlier process has left in" in caplog.text)
    assert "nothing was renamed: start again when the disk is readable" in message
    assert "\n" not in message
    assert names(directory) == [OLD, NEW]
    assert run.digest() == before

    run = start(directory)
    run.checkpoint.restore("auto")
    assert run.digest() == whole[1][NEW]


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_an_error_of_the_disk_is_not_taken_for_damage_by_the_command(whole, tmp_path, code):
    """`verify` and `latest` say that it cannot be read, and do not answer with an older one."""
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, "preadv", NEW, code)
        for ask in (lambda: checkpoint.verify(whole[0] / NEW), lambda: checkpoint.latest(whole[0])):
            with pytest.raises(UnreadableCheckpointError, match=rf"{NEW} cannot be read: \[Errno {code}\]"):
                ask()
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, "open", f"{NEW}/manifest.json", code)
        with pytest.raises(UnreadableCheckpointError):
            checkpoint.latest(whole[0])
        assert checkpoint_command(["list", str(whole[0])]) == 1


ASKS = {
    "latest": checkpoint.latest,
    "best": checkpoint.best,
    "read_checkpoint": checkpoint.read_checkpoint,
    "load_weights": lambda path: checkpoint.load_weights(nn.Linear(1, 1), path),
    "the best of load_weights": lambda path: checkpoint.load_weights(nn.Linear(1, 1), path, best=True),
    "average_checkpoints": lambda path: checkpoint.average_checkpoints(path, last=1),
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_where_one_is_chosen_none_that_cannot_be_read_is_passed_over(whole, ask, monkeypatch):
    """It may be the newest or the best. The disk gives one error, at the first look, and none at a second."""

    def read_once(path):
        if path.name != NEW or met:
            return read_manifest(path)
        met.append(path)
        raise UnreadableCheckpointError(str(path), "on purpose")

    met = []
    monkeypatch.setattr("ignite_train.checkpoint.directory.read_manifest", read_once)
    with pytest.raises(UnreadableCheckpointError, match=rf"{NEW} cannot be read: on purpose"):
        ask(whole[0])
    assert len(met) == 1


@pytest.mark.parametrize("ask", [checkpoint.latest, checkpoint.best, checkpoint.read_checkpoint])
def test_where_one_is_chosen_a_warning_names_those_that_are_damaged(whole, tmp_path, ask, caplog):
    """Of the manifest nothing can be read, so that it might have been the one to choose."""
    directory = tmp_path / "copy"
    shutil.copytree(whole[0], directory)
    altered(directory / NEW / "manifest.json", flip(20))
    ask(directory)
    assert f"{NEW} is damaged: " in caplog.text
    assert "; it is passed over" in caplog.text


@pytest.mark.slow
def test_a_directory_with_damaged_ones_only_does_not_begin_anew(whole, tmp_path):
    """However often the command is started, it is refused with the ways out: after `resume="never"`, `auto` resumes again."""
    directory = tmp_path / "copy"
    shutil.copytree(whole[0], directory)
    for name in (OLD, NEW):
        altered(directory / name / "rank-00000.safetensors", flip(12345))
    for _ in range(3):
        with pytest.raises(CheckpointError) as caught:
            start(directory).trainer.run(data(), max_iters=6)
        assert "\n" not in str(caught.value)
    assert re.search(
        rf"copy has no whole checkpoint and 2 .* such as damaged-{NEW}-[0-9a-f]{{4}}: training does not start from the "
        "beginning without being told to; repair or replace them, or pass resume='never' once, or move them to another "
        "directory",
        str(caught.value),
    )
    assert len(names(directory)) == 2
    with pytest.raises(CheckpointError, match="has no whole checkpoint and 2"):
        start(directory).trainer.run(data(), max_iters=6, resume="must")

    start(directory).trainer.run(data(), max_iters=6, resume="never")
    run = start(directory)
    run.trainer.run(data(), max_iters=8)
    assert run.trainer.state.iteration == 8
    assert len([name for name in names(directory) if name.startswith("damaged-")]) == 2

    reference = start(tmp_path / "reference")
    reference.trainer.run(data(), max_iters=8)
    assert run.digest() == reference.digest()


def test_one_that_is_damaged_and_named_is_refused(whole, tmp_path):
    """`resume=path` means that one: no other one is used instead."""
    directory = tmp_path / "copy"
    shutil.copytree(whole[0], directory)
    altered(directory / NEW / "rank-00000.safetensors", flip(12345))
    run = start(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"is damaged: .*checksum"):
        run.trainer.run(data(), max_iters=6, resume=directory / NEW)

    assert OLD in names(directory)


def test_nothing_is_renamed_in_the_directory_of_another_run(whole, tmp_path, caplog):
    """A damaged checkpoint that is found there is passed over, and the one before is used."""
    theirs = tmp_path / "theirs"
    shutil.copytree(whole[0], theirs)
    altered(theirs / NEW / "rank-00000.safetensors", flip(12345))
    run = start(tmp_path / "mine")
    run.checkpoint.restore(theirs)

    assert run.digest() == whole[1][OLD]
    assert names(theirs) == [OLD, NEW]
    assert f"{NEW} is damaged: " in caplog.text
    assert "; an older one is tried" in caplog.text


def test_one_that_cannot_be_renamed_is_passed_over(whole, tmp_path, caplog):
    """In a directory that cannot be written to: the one before is used, and the log does not say that it was renamed."""
    directory = tmp_path / "copy"
    shutil.copytree(whole[0], directory)
    altered(directory / NEW / "rank-00000.safetensors", flip(12345))
    run = start(directory)

    def read_only(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    run.checkpoint.saver.directory.disk.rename = read_only
    run.checkpoint.restore("must")

    assert run.digest() == whole[1][OLD]
    assert names(directory) == [OLD, NEW]
    assert "; an older one is tried" in caplog.text


@pytest.mark.slow
def test_the_run_that_falls_back_ends_bitwise_as_if_nothing_had_happened(whole, tmp_path):
    """Training on from the older one gives the weights of a run that was never interrupted."""
    reference = start(tmp_path / "reference")
    reference.trainer.run(data(), max_iters=8)
    directory = tmp_path / "copy"
    shutil.copytree(whole[0], directory)
    altered(directory / NEW / "rank-00000.safetensors", flip(777))
    assert checkpoint.latest(directory) == directory / OLD
    run = start(directory)
    run.trainer.run(data(), max_iters=8)

    assert run.digest() == reference.digest()


# --- two ranks ---


def _rank_files(path: Path) -> Iterator[tuple[str, str]]:
    for kind in ("json", "safetensors"):
        yield f"rank-00000.{kind}", f"rank-00001.{kind}"


def _swap(path: Path) -> None:
    for first, second in _rank_files(path):
        (path / first).rename(path / "aside")
        (path / second).rename(path / first)
        (path / "aside").rename(path / second)


def _lose_rank_1(path: Path) -> None:
    for _, second in _rank_files(path):
        (path / second).unlink()


def _flip_in_rank_1(path: Path) -> None:
    altered(path / "rank-00001.safetensors", flip(99))


def _copy_of_rank_0(path: Path) -> None:
    for first, second in _rank_files(path):
        shutil.copy(path / first, path / second)


def _two_ranks(directory: Path, damage: str) -> tuple[str, str, str, list[str]]:
    def begin() -> Run:
        run = start(directory)
        torch.manual_seed(collectives.rank())
        return run

    run = begin()
    run.trainer.run(data(), max_iters=2)
    run = begin()
    run.checkpoint.restore("must")
    expected = run.digest()
    run.trainer.run(data(), max_iters=4)
    damaged = checkpoint.latest(directory)
    assert damaged is not None
    before = [entry.path.name for entry in checkpoint.find(directory)]
    collectives.gather_objects(None)
    if collectives.is_main_rank():
        for name in before[1:]:
            globals()[damage](directory / name)
    run = begin()
    run.checkpoint.restore("must")
    return expected, run.digest(), str(run.checkpoint.latest), names(directory)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["_swap", "_lose_rank_1", "_flip_in_rank_1", "_copy_of_rank_0"])
def test_damage_to_the_files_of_one_rank_is_noticed_by_all(tmp_path, damage):
    """Both ranks go back to the same older one, though only one of them saw what is wrong."""
    (expected_0, found_0, path_0, left), (expected_1, found_1, path_1, _) = run_ranks(_two_ranks, tmp_path, damage)

    assert (found_0, found_1) == (expected_0, expected_1)
    assert path_0 == path_1 == str(tmp_path / "update-00000002.1")
    assert len([name for name in left if name.startswith("damaged-update-00000004.1")]) == 1


def _one_rank_fails(directory: Path, call: str, part: str, rank: int) -> tuple[str, list[str]]:
    """What the start says if one rank alone has an error of its disk."""
    start(directory).trainer.run(data(), max_iters=2)
    run = start(directory)
    collectives.gather_objects(None)
    with pytest.MonkeyPatch.context() as patch:
        if collectives.rank() == rank:
            failing(patch, call, part, errno.EIO)
        with pytest.raises(CheckpointError) as caught:
            run.trainer.run(data(), max_iters=4)
    collectives.gather_objects(None)
    return str(caught.value), names(directory)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "part", "rank"),
    [
        ("preadv", "rank-00001.safetensors", 1),
        ("open", "manifest.json", 1),
        ("open", "manifest.json", 0),
        ("preadv", "00000.safetensors", 1),
    ],
)
def test_an_error_of_the_disk_of_one_rank_is_raised_by_all(tmp_path, call, part, rank):
    """Both ranks raise the same line, which names the file, and nothing is renamed."""
    (first, left), (second, _) = run_ranks(_one_rank_fails, tmp_path, call, part, rank)

    assert first == second
    assert part in first
    assert "[Errno 5] Input/output error" in first
    assert "nothing was renamed" in first
    assert left == ["update-00000002.1"]


def _one_rank_sees_damage(directory: Path, kind: str) -> tuple[str, list[str]]:
    """What the start says if rank 1 alone reads other bytes, or sees no files at all."""
    start(directory).trainer.run(data(), max_iters=2)
    run = start(directory)
    collectives.gather_objects(None)
    with pytest.MonkeyPatch.context() as patch:
        if collectives.rank() == 1 and kind == "other bytes":
            patch.setattr(ignite_train.checkpoint.tensor_files, "zlib_ng", SimpleNamespace(crc32=lambda *_: 0))
        elif collectives.rank() == 1:
            failing(patch, "lstat" if kind == "no files" else "open", "update-0", errno.ENOENT)
            failing(patch, "stat", "update-0", errno.ENOENT)
        with pytest.raises(CheckpointError) as caught:
            run.trainer.run(data(), max_iters=4)
    collectives.gather_objects(None)
    return str(caught.value), names(directory)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("other bytes", "that is what rank 1 reads, and rank 0 finds it whole, so nothing was renamed"),
        ("no files", "does not exist on rank 1: all ranks must see the same files"),
    ],
)
def test_what_one_rank_alone_sees_is_no_damage(tmp_path, kind, says):
    """A mount that is not there, or a host that reads wrongly: nothing is renamed, and both ranks say which rank it is."""
    (first, left), (second, _) = run_ranks(_one_rank_sees_damage, tmp_path, kind)

    assert first == second
    assert says in first
    assert left == ["update-00000002.1"]
