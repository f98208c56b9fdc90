"""Log files with lines that cannot be read, or that a person has added: a resumed run costs none of the others."""

from __future__ import annotations

import csv
import errno
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events

import cuts
from ignite_train import Trainer, create_trainer
from ignite_train.handlers import Checkpoint, Csv, JsonLines, LogFile, TrainingMetrics
from ignite_train.handlers import log_file as module

DATA = cuts.cut(cuts.samples(), [4, 12, 7, 9, 16, 16])  # six micro-batches
EVERY = Events.ITERATION_COMPLETED
KINDS: dict[str, type[LogFile]] = {"json": JsonLines, "csv": Csv}
kinds = pytest.mark.parametrize("kind", KINDS)
NOTE = b"# lr was too high here, by 10 times\n"


def make(directory: Path, kind: str) -> tuple[Trainer, LogFile]:
    """Logs each update, and saves every four."""
    model = cuts.linear()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), cuts.forward)
    log = KINDS[kind](directory / "log")
    log.attach(trainer, EVERY(every=1))
    TrainingMetrics().attach(trainer, EVERY(every=1))
    Checkpoint(directory / "checkpoints", every=4, asynchronous=False).attach(trainer)
    return trainer, log


def broken_off(directory: Path, kind: str) -> list[bytes]:
    """A run that has saved update 4 and logged update 6. Returns its lines; those of updates 5 and 6 are the last two."""
    trainer, log = make(directory, kind)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=7), lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(DATA, max_epochs=2)
    lines = log.path.read_bytes().splitlines(keepends=True)
    assert [update_of(line) for line in lines[-6:]] == [1, 2, 3, 4, 5, 6]
    return lines


def resumed(directory: Path, kind: str, lines: list[bytes], updates: int = 8) -> list[bytes]:
    """The lines after a run that finds `lines` and resumes after update 4."""
    trainer, log = make(directory, kind)
    log.path.write_bytes(b"".join(lines))
    trainer.run(DATA, max_iters=updates)
    assert {path.name for path in directory.iterdir()} == {"log", "checkpoints"}
    return log.path.read_bytes().splitlines(keepends=True)


def update_of(line: bytes) -> int:
    return int(json.loads(line)["update"] if line.startswith(b"{") else line.split(b",")[0])


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "flipped bit": lambda line: bytes([line[0] ^ 0x40]) + line[1:],
    "byte that is no letter": lambda line: line[:1] + b"\xff" + line[2:],
    "nulls": lambda line: b"\0" * 10 + line[10:],
    "nulls over the end": lambda line: b"\0" * len(line),
    "quotation mark": lambda line: line[:1] + b'"' + line[2:],
    "note": lambda line: line + NOTE,
    "empty line": lambda line: line + b"\n",
    "brackets": lambda line: line + b"[" * 100_000 + b"\n",
    "other values": lambda line: line + b'{"update": "one"}\n{"update": 1e999}\n{"update": null}\n{}\n[1]\n3.5\n""\n',
    "long field": lambda line: line + b"x" * 200_000 + b"\n",
}


@kinds
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_line_that_cannot_be_read_costs_no_other(tmp_path: Path, kind: str, damage: str) -> None:
    """What stood before the checkpoint is there bit by bit, the damaged line too; what came after it is written again."""
    lines = broken_off(tmp_path, kind)
    lines[-5] = DAMAGES[damage](lines[-5])
    found = resumed(tmp_path, kind, lines)
    before = b"".join(lines[:-2])
    assert b"".join(found)[: len(before)] == before
    assert [update_of(line) for line in b"".join(found)[len(before) :].splitlines()] == [5, 6, 7, 8]


@kinds
def test_a_note_after_the_checkpoint_stays(tmp_path: Path, kind: str) -> None:
    """Between lines that are written again, since a person writes it behind the latest of them."""
    lines = broken_off(tmp_path, kind)
    found = resumed(tmp_path, kind, [*lines[:-1], NOTE, lines[-1]])
    assert found[: len(lines) - 1] == [*lines[:-2], NOTE]
    assert [update_of(line) for line in found[len(lines) - 1 :]] == [5, 6, 7, 8]


@kinds
def test_a_wrong_update_costs_its_own_line_and_no_other(tmp_path: Path, kind: str) -> None:
    """A flipped bit has made a later update of it, which is not the run's any more."""
    lines = broken_off(tmp_path, kind)
    later = lines[-5].replace(b"2", b"6", 1)
    assert update_of(later) == 6
    found = resumed(tmp_path, kind, [*lines[:-5], later, *lines[-4:]])
    assert found[: len(lines) - 3] == [*lines[:-5], *lines[-4:-2]]
    assert [update_of(line) for line in found[len(lines) - 3 :]] == [5, 6, 7, 8]


@kinds
def test_a_resumed_run_cuts_a_log_where_it_is(tmp_path: Path, kind: str) -> None:
    """A link stays one, and the file keeps its mode; a note behind what goes is kept."""
    lines = broken_off(tmp_path, kind)
    elsewhere = tmp_path / "checkpoints" / "target"
    (tmp_path / "log").rename(elsewhere)
    (tmp_path / "log").symlink_to(elsewhere)
    elsewhere.chmod(0o640)
    before = elsewhere.stat()
    found = resumed(tmp_path, kind, [*lines[:-1], NOTE, lines[-1], NOTE])
    assert found[: len(lines)] == [*lines[:-2], NOTE, NOTE]
    assert [update_of(line) for line in found[len(lines) :]] == [5, 6, 7, 8]
    after = elsewhere.stat()
    assert (tmp_path / "log").is_symlink()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)


@kinds
def test_a_write_error_costs_its_line_and_no_line_of_others(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is opened again then: what cannot be read stays, and so does a later update that another has written."""
    trainer, log = make(tmp_path, kind)
    foreign = b'{"update": 99}\n' if kind == "json" else b"99,1\n"
    write, fails = module._write_whole, [OSError(errno.EIO, "Input/output error")]

    @trainer.on(Events.ITERATION_STARTED(once=3))
    def add() -> None:
        with log.path.open("ab") as file:
            file.write(NOTE + foreign)

    def fail(file: Any, data: bytes) -> None:
        if fails and trainer.state.iteration == 4:
            write(file, data[: len(data) // 2])
            raise fails.pop()
        write(file, data)

    monkeypatch.setattr(module, "_write_whole", fail)
    trainer.run(DATA, max_iters=6)
    lines = log.path.read_bytes().splitlines(keepends=True)[-7:]
    assert lines[2:4] == [NOTE, foreign]
    assert [update_of(line) for line in lines[:2] + lines[4:]] == [1, 2, 3, 5, 6]


# --- tables -----------------------------------------------------------------------------------------------------------------


def rows(lines: list[bytes]) -> list[dict[str, str]]:
    """As another program reads them, from the line with the names on."""
    text = b"".join(lines).decode(errors="replace")
    return list(csv.DictReader(io.StringIO(text[text.index("update,") :], newline="")))


@pytest.mark.parametrize("above", [NOTE, NOTE + b"\n", b"\xff\n"], ids=["note", "two lines", "no letters"])
def test_a_table_with_lines_above_its_names_keeps_its_columns(tmp_path: Path, above: bytes) -> None:
    """The names are in the first line that begins with "update"; also when a column is added."""
    lines = broken_off(tmp_path, "csv")
    trainer, log = make(tmp_path, "csv")
    log.path.write_bytes(b"".join([above, *lines]))
    trainer.prepend_event_handler(EVERY(once=6), lambda: trainer.state.metrics.update(late=1.0))
    trainer.run(DATA, max_iters=6)
    content = log.path.read_bytes()
    assert content.startswith(above + b"update,epoch,")
    found = rows([content])
    assert [row["update"] for row in found] == [*"123456"]
    assert [row["train/late"] for row in found] == [""] * 5 + ["1.0"]
    assert [row["train/loss"] for row in found[:4]] == [row["train/loss"] for row in rows(lines)[:4]]


def test_a_table_that_gets_a_column_keeps_what_cannot_be_read(tmp_path: Path) -> None:
    """Notes and damaged lines bit by bit; whole rows get a blank, also those with letters that are none."""
    lines = broken_off(tmp_path, "csv")
    lines[1] = lines[1].replace(b".", b".\xff", 1)
    lines[2] = b'2,1,"0.5\n'
    trainer, log = make(tmp_path, "csv")
    log.path.write_bytes(b"".join([*lines[:3], NOTE, *lines[3:]]))
    trainer.prepend_event_handler(EVERY(once=5), lambda: trainer.state.metrics.update(late=1.0))
    trainer.run(DATA, max_iters=5)
    found = log.path.read_bytes().splitlines(keepends=True)
    assert found[0] == lines[0][:-1] + b",train/late\n"
    assert found[1] == lines[1][:-1] + b",\n"
    assert found[2:4] == [lines[2], NOTE]
    assert found[4:6] == [line[:-1] + b",\n" for line in lines[3:5]]
    assert update_of(found[6]) == 5


HEADERS = {
    "none": b"",
    "flipped bit": b"updata,epoch,x\n",
    "no letters": b"up\xff,epoch\n",
    "quotation mark": b'"update,epoch\n',
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_table_without_names_is_kept_under_another(tmp_path: Path, caplog: pytest.LogCaptureFixture, header: bytes) -> None:
    """Which column is which cannot be known, so its rows do not go on below other names; a warning says so."""
    lines = broken_off(tmp_path, "csv")
    content = b"".join([header, *lines[1:5]])
    trainer, log = make(tmp_path, "csv")
    log.path.write_bytes(content)
    trainer.run(DATA, max_iters=6)
    old = tmp_path / "log.old.1"
    assert old.read_bytes() == content
    assert [row["update"] for row in rows([log.path.read_bytes()])] == ["5", "6"]
    assert [line for line in caplog.messages if str(log.path) in line] == [
        f"{log.path} has no line of names that begins with 'update', so its columns are not known: it is kept as {old.name}, "
        "and a new table is begun"
    ]


# --- the cost of opening ----------------------------------------------------------------------------------------------------


class CountedFile(io.FileIO):
    """A file of the system that counts how often it is read."""

    reads = 0

    def readinto(self, buffer: Any) -> int | None:  # type: ignore[override]
        CountedFile.reads += 1
        return super().readinto(buffer)

    def read(self, size: int | None = -1) -> bytes | None:  # type: ignore[override]
        CountedFile.reads += 1
        return super().read(size)

    def readall(self) -> bytes | None:  # type: ignore[override]
        CountedFile.reads += 1
        return super().readall()


@kinds
@pytest.mark.parametrize("widens", [False, True], ids=["same metrics", "another metric"])
def test_a_long_log_is_opened_with_few_reads(tmp_path: Path, kind: str, widens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many lines for each call of the system."""
    trainer, log = make(tmp_path, kind)
    trainer.run(DATA, max_iters=4)
    *head, last = log.path.read_bytes().splitlines(keepends=True)
    number = 2000
    log.path.write_bytes(b"".join([*head, *[last] * number]))

    def counted(path: Path, mode: str = "r", buffering: int = -1, **options: Any) -> Any:
        if "b" not in mode:
            return io.open(path, mode, buffering, **options)  # noqa: UP020  # builtin open of a text
        raw = CountedFile(path, mode.replace("b", ""))
        if buffering == 0:
            return raw
        return (io.BufferedRandom if "+" in mode else io.BufferedReader if "r" in mode else io.BufferedWriter)(raw)

    monkeypatch.setattr(Path, "open", counted)
    monkeypatch.setattr(CountedFile, "reads", 0)
    trainer, log = make(tmp_path, kind)
    log.load_state_dict({"latest": 4, "points": {}, "lines": number})
    trainer.state.metrics["late" if widens else "loss"] = 1.0
    log(trainer)
    log.finish()
    assert 0 < CountedFile.reads < number
    assert len(log.path.read_bytes().splitlines()) == len(head) + number + 1


@kinds
def test_a_later_run_reads_a_log_only_if_something_has_happened_to_it(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may call `run` for each epoch: to read the whole file each time takes longer and longer."""
    trainer, log = make(tmp_path, kind)
    trainer.run(DATA, max_epochs=1)
    read = list[bytes]()
    judge = type(log)._update_of
    monkeypatch.setattr(type(log), "_update_of", lambda log, line: (read.append(line), judge(log, line))[1])
    trainer.run(DATA, max_epochs=2)
    assert read == []
    with log.path.open("ab") as file:
        file.write(b"{half a line")
    trainer.run(DATA, max_epochs=3)
    lines = log.path.read_bytes().splitlines(keepends=True)
    assert [update_of(line) for line in lines[-18:]] == [*range(1, 19)]
    assert len(read) == len(lines) - 6
    trainer.run(DATA, max_iters=20, resume=tmp_path / "checkpoints" / "update-00000016")
    lines = log.path.read_bytes().splitlines(keepends=True)
    assert [update_of(line) for line in lines[-20:]] == [*range(1, 21)]
