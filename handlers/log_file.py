"""The metrics of a run in a file of text: JSON lines, or a table of comma-separated values."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal

from ignite_train.arguments import COUNT, check_fields, directory_of, optional, path_of
from ignite_train.kinds_of_handlers import RecordingHandler
from ignite_train.kinds_of_handlers.recording_handler import numbered_path
from ignite_train.metrics import json_line
from ignite_train.trainer import Trainer

__all__ = ["Csv", "JsonLines", "LogFile"]


class LogFile(RecordingHandler, ABC):
    """Writes `trainer.state.metrics` to a file of text, a line for each time, on rank 0 only; see `JsonLines` and `Csv`.

    Names have their group, as in `"train/loss"`, `"optimizer/grad_norm"`, `"speed/data_wait"`, `"validation/loss"`. A metric
    that is not a single number becomes several, or is left out with one warning. A class for another format defines `_updates`
    and `_add`.

    A line is with the operating system as soon as it is written. A run that resumes removes what was written after its
    checkpoint, and continues: each line is there once. A run that starts from the beginning renames the file of an earlier one
    to `*.old.1`, the next to `*.old.2`, and so on.

    Args:
        path: the file. Its directory is made.
        on_error: what happens when the file cannot be written, because the disk is full, say: `"warn"` and train without this
            line, or `"raise"`, which ends the run on all ranks.

    Attributes:
        path: the file, as an absolute path.

    Raises:
        TypeError: `path` is not a path.
        ValueError: `path` is a directory, or `on_error` is neither of the two.
    """

    what_is_written = "a line"

    def __init__(self, path: str | Path, *, on_error: Literal["warn", "raise"] = "warn") -> None:
        file = path_of("path", path)
        if file.is_dir():
            raise ValueError(f"path must be a file, got the directory {str(file)!r}; add the name of a file in it")
        self.path = directory_of("the directory of path", file.parent) / file.name
        super().__init__(self.path, on_error)
        self._file: BinaryIO | None = None  # opened when there is something to write
        self._is_known = False  # whether the next two describe the file: it was loaded, or written by this process
        self._latest, self._lines = 0, 0  # the update of the latest lines, and how many they are

    def state_dict(self) -> dict[str, Any]:
        """How far the file is. What was written so far is on the disk when it returns, or a warning says that it may not be."""
        if self._file is not None:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:  # also with `on_error="raise"`, since without a state the log could not be continued
                self.warn(f"lines in {self.path} may not be on the disk ({error})")
        return {"written": self.written, "latest": self._latest, "lines": self._lines}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Removes the lines that were written after `state_dict` was taken.

        Raises:
            TypeError: `state_dict` is not a mapping.
            ValueError: a key is missing, or something in it is not what `state_dict()` gives.
        """
        check_fields(type(self).__name__, state_dict, {"written": optional(COUNT), "latest": COUNT, "lines": COUNT})
        self.finish()
        self.written, self._latest, self._lines = (state_dict[name] for name in ("written", "latest", "lines"))
        self._is_known = True

    # --- what a format says -----------------------------------------------------------------------------------------------

    @abstractmethod
    def _updates(self, file: BinaryIO) -> Iterator[int | None]:
        """The update of each line, and None for a line that has no update and stays.

        Raises:
            ValueError: the line is not whole.
        """

    @abstractmethod
    def _add(self, file: BinaryIO, place: Mapping[str, int], numbers: Mapping[str, float]) -> BinaryIO:
        """Writes a line at the end, and returns the file, or the one that has taken its place."""

    # --- the file ---------------------------------------------------------------------------------------------------------

    def is_open(self) -> bool:
        """See `RecordingHandler`."""
        return self._file is not None

    def may_be_continued(self) -> bool:
        """See `RecordingHandler`."""
        return not self._is_known and self._has_lines()

    def record(self, trainer: Trainer, numbers: Mapping[str, float]) -> None:
        """See `RecordingHandler`."""
        update = trainer.state.iteration
        if self._file is None:
            self._file = self._open()  # so that it is closed if this line cannot be written
        self._file = self._add(self._file, {"update": update, "epoch": trainer.state.epoch}, numbers)
        self._lines = self._lines + 1 if update == self._latest else 1
        self._latest = update

    def recover(self) -> None:
        """Closes the file: the next line begins by cutting off what there is of this one."""
        self.finish()

    def finish(self) -> None:
        """Closes the file."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        self._file = None

    def _open(self) -> BinaryIO:
        """Opens the file at the end of what is to stay of it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        begin = self.begin or 0
        if begin == 0 and not self._is_known and self._has_lines():
            self.path.replace(numbered_path(self.path.with_name(f"{self.path.name}.old")))
        if not self._is_known:
            self._latest, self._lines = begin, sys.maxsize if begin else 0
        file = self.path.open("a+b", buffering=0)
        file.seek(0)
        file.truncate(self._end(file))
        file.seek(0, os.SEEK_END)
        if not self._is_known:
            self._lines = 0
        self._is_known = True
        return file

    def _has_lines(self) -> bool:
        return self.path.exists() and self.path.stat().st_size > 0

    def _end(self, file: BinaryIO) -> int:
        """The byte after the last line that is to stay: of an update before the latest, or one of its `_lines` lines."""
        end = lines = 0
        with suppress(ValueError, TypeError, IndexError):  # the line is not whole, or not one of ours
            for update in self._updates(file):
                lines += update == self._latest
                if update is not None and (update > self._latest or lines > self._lines):
                    break
                end = file.tell()
        return end


class JsonLines(LogFile):
    """Writes `trainer.state.metrics` as one JSON object a line, on rank 0 only; see `LogFile` for what holds of the file.

    A line has `"update"`, `"epoch"` and the metrics. NaN and infinities, which JSON does not know, are the strings `"nan"`,
    `"inf"` and `"-inf"`, which Python's `float` reads. `python -m ignite_train.plot` draws such files.

    Example:
        >>> handle = TrainingMetrics().attach(trainer, Events.ITERATION_COMPLETED(every=2))
        >>> handle = JsonLines(directory / "metrics.jsonl").attach(trainer, Events.ITERATION_COMPLETED(every=2))
        >>> state = trainer.run(data, max_epochs=1)
        >>> [json.loads(line)["update"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
        [2, 4]
    """

    def _updates(self, file: BinaryIO) -> Iterator[int | None]:
        for line in iter(file.readline, b""):
            entries = json.loads(line)
            if not line.endswith(b"\n") or not isinstance(entries, dict):
                raise ValueError("not a whole line")
            yield int(entries["update"]) if "update" in entries else None

    def _add(self, file: BinaryIO, place: Mapping[str, int], numbers: Mapping[str, float]) -> BinaryIO:
        _write_whole(file, f"{json_line({**place, **numbers})}\n".encode())
        return file


class Csv(LogFile):
    """Writes `trainer.state.metrics` as comma-separated values, on rank 0 only; see `LogFile` for what holds of the file.

    The first line has the names: `update`, `epoch` and the metrics, in the order in which they came. What a line does not have
    is left blank. When a metric comes for the first time, the file is written again with one more column.

    Example:
        >>> handle = TrainingMetrics().attach(trainer, Events.ITERATION_COMPLETED(every=2))
        >>> handle = Csv(directory / "metrics.csv").attach(trainer, Events.ITERATION_COMPLETED(every=2))
        >>> state = trainer.run(data, max_epochs=1)
        >>> [row["update"] for row in csv.DictReader((directory / "metrics.csv").read_text().splitlines())]
        ['2', '4']
    """

    def __init__(self, path: str | Path, *, on_error: Literal["warn", "raise"] = "warn") -> None:
        super().__init__(path, on_error=on_error)
        self._columns: list[str] = []

    def _updates(self, file: BinaryIO) -> Iterator[int | None]:
        self._columns = []
        for line in iter(file.readline, b""):
            fields = _cells(line)
            if not self._columns:
                self._columns = fields
                yield None
            else:
                yield int(fields[0])

    def _add(self, file: BinaryIO, place: Mapping[str, int], numbers: Mapping[str, float]) -> BinaryIO:
        entries: dict[str, float] = {**place, **numbers}
        new = [name for name in entries if name not in self._columns]
        if new:
            file = self._widen(file, [*self._columns, *new])
        _write_whole(file, _row([repr(entries[name]) if name in entries else "" for name in self._columns]))
        return file

    def _widen(self, file: BinaryIO, columns: list[str]) -> BinaryIO:
        """Puts a file with these columns and the same lines in the place of `file`."""
        file.seek(0)
        lines = [_cells(line) for line in file][1:]
        temporary = self.path.with_name(f".{self.path.name}.unfinished")
        text = b"".join(_row(line + [""] * (len(columns) - len(line))) for line in [columns, *lines])
        with temporary.open("wb", buffering=0) as wider:
            _write_whole(wider, text)
            os.fsync(wider.fileno())
        temporary.replace(self.path)
        file.close()
        self._columns = columns
        return self.path.open("a+b", buffering=0)


def _write_whole(file: BinaryIO, data: bytes) -> None:
    """Writes all of it: a disk that is nearly full may take a part."""
    while data:
        data = data[file.write(data) :]


def _cells(line: bytes) -> list[str]:
    """The fields of a whole line.

    Raises:
        ValueError: it has no end.
    """
    if not line.endswith(b"\n"):
        raise ValueError("not a whole line")
    return next(csv.reader([line.decode()]))


def _row(fields: list[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(fields)
    return text.getvalue().encode()
