"""The metrics of a run in a file of text: JSON lines, or a table of comma-separated values."""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal

from ignite_train.arguments import COUNT, check_fields, directory_of, path_of
from ignite_train.kinds_of_handlers import RecordingHandler
from ignite_train.kinds_of_handlers.recording_handler import numbered_path
from ignite_train.metrics import json_line
from ignite_train.trainer import Trainer

__all__ = ["Csv", "JsonLines", "LogFile"]

_logger = logging.getLogger(__name__)


class LogFile(RecordingHandler, ABC):
    """Writes `trainer.state.metrics` to a file of text, a line for each time, on rank 0 only; see `JsonLines` and `Csv`.

    Names have their group, as in `"train/loss"`, `"optimizer/grad_norm"`, `"speed/data_wait"`, `"validation/loss"`. A metric
    that is not a single number becomes several, or is left out with one warning. A class for another format defines
    `_update_of` and `_add`.

    An update has one line of the training, and a further one with what has changed since then, if it is published later: at the
    end of the last epoch, say. A line is with the operating system as soon as it is written.

    A run that resumes removes the lines that were written after its checkpoint, and a last line without an end, and continues:
    each line is there once. Lines without an update stay: a note by hand, say, or a damaged one. A run that starts from the
    beginning renames the file of an earlier one to `*.old.1`, the next to `*.old.2`, and so on. If the file is removed or
    replaced during the run, the next save, or the end of the run, warns of that and begins a new one at the path, or adds to
    the one that is there.

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
        self._is_known = False  # whether `latest` and the next describe the file: it was loaded, or written by this process
        self._is_cut = False  # whether later lines were removed since then: those that come now are by others
        self._left: tuple[int, int, int] | None = None  # which file this process has closed with all its lines, and its size
        self._lines = 0  # how many lines the latest update has

    def state_dict(self) -> dict[str, Any]:
        """How far the file is. What was written so far is on the disk when it returns, or a warning says that it may not be."""
        self.check_file()
        if self._file is not None:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:  # also with `on_error="raise"`, since without a state the log could not be continued
                self.warn(f"lines in {self.path} may not be on the disk ({error})")
        return {**self.state_of_written(), "lines": self._lines}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Removes the lines that were written after `state_dict` was taken, when the next line is written.

        Raises:
            TypeError: `state_dict` is not a mapping.
            ValueError: a key is missing, or something in it is not what `state_dict()` gives.
        """
        check_fields(type(self).__name__, state_dict, {"lines": COUNT})
        self.load_written(state_dict)
        self.recover()
        self._lines, self._is_known, self._is_cut = state_dict["lines"], True, False

    # --- what a format says -----------------------------------------------------------------------------------------------

    @abstractmethod
    def _update_of(self, line: bytes) -> int | None:
        """The update of a line that has an end; None if it has none or cannot be read. Called with all lines in their order."""

    @abstractmethod
    def _add(self, file: BinaryIO, place: Mapping[str, int], numbers: Mapping[str, float]) -> BinaryIO:
        """Writes a line at the end, and returns the file, or the one that has taken its place."""

    # --- the file ---------------------------------------------------------------------------------------------------------

    def open_file(self) -> tuple[Path, int] | None:
        """See `RecordingHandler`."""
        return None if self._file is None else (self.path, self._file.fileno())

    def may_be_continued(self) -> bool:
        """See `RecordingHandler`."""
        return not self._is_known and self._has_lines()

    def record(self, trainer: Trainer, numbers: Mapping[str, float]) -> None:
        """See `RecordingHandler`."""
        update = trainer.updates_done
        if self._file is None:
            self._file = self._open()  # so that it is closed if this line cannot be written
        self._file = self._add(self._file, {"update": update, "epoch": trainer.state.epoch}, numbers)
        self._lines = self._lines + 1 if update == self.latest else 1

    def recover(self) -> None:
        """Closes the file: the next line begins by cutting off what there is of this one."""
        self.finish()
        self._left = None

    def finish(self) -> None:
        """Closes the file."""
        if self._file is not None:
            with suppress(OSError):
                self._left = _identity(os.fstat(self._file.fileno()))
                self._file.close()
        self._file = None

    def _open(self) -> BinaryIO:
        """Opens the file at the end of what is to stay of it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self._is_known:
            begin = self.begin or 0
            if begin == 0 and self._has_lines():
                self._set_aside()
            self.latest, self._lines = begin, sys.maxsize if begin else 0
        self.path.touch()
        with self.path.open("r+b") as file:  # buffered: many lines for each call of the system
            if self._left is None or _identity(os.fstat(file.fileno())) != self._left:
                self._cut(file)
        self._is_known = self._is_cut = True
        return self.path.open("ab", buffering=0)

    def _has_lines(self) -> bool:
        return self.path.exists() and self.path.stat().st_size > 0

    def _set_aside(self) -> Path:
        """Gives the file another name, and returns it."""
        return self.path.replace(numbered_path(self.path.with_name(f"{self.path.name}.old")))

    def _cut(self, file: BinaryIO) -> None:
        """Removes lines of updates after the latest, lines of that one but the first `_lines`, and a last one without an end.

        Each line is judged by itself, so that one that is damaged costs no other.
        """
        end, of_latest, behind, has_gap = 0, 0, list[bytes](), False
        for line in file:
            if not line.endswith(b"\n"):
                break  # it is the last one
            update = self._update_of(line)
            of_latest += update == self.latest
            stays = update is None or update < self.latest or (update == self.latest and of_latest <= self._lines)
            if not stays and not self._is_cut:
                has_gap = True
            elif has_gap:
                behind.append(line)
            else:
                end += len(line)
        file.seek(end)
        file.writelines(behind)  # a kill before the next line leaves too much, which the next start removes
        file.truncate()
        self._lines = min(self._lines, of_latest)


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

    def _update_of(self, line: bytes) -> int | None:
        with suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):  # it is not one of ours
            return int(json.loads(line)["update"])
        return None

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

    def _cut(self, file: BinaryIO) -> None:
        self._columns = []
        super()._cut(file)

    def _open(self) -> BinaryIO:
        file = super()._open()
        if not self._columns and self._has_lines():
            file.close()
            old = self._set_aside()
            _logger.warning(
                f"{self.path} has no line of names that begins with 'update', so its columns are not known: it is kept as "
                f"{old.name}, and a new table is begun"
            )
            file = super()._open()
        return file

    def _update_of(self, line: bytes) -> int | None:
        fields = _cells(line)
        if not self._columns and fields[:1] == ["update"]:
            self._columns = fields
        return _first_number(fields)

    def _add(self, file: BinaryIO, place: Mapping[str, int], numbers: Mapping[str, float]) -> BinaryIO:
        entries: dict[str, float] = {**place, **numbers}
        if not entries.keys() <= {*self._columns}:
            file = self._widen(file, entries)
        _write_whole(file, _row([repr(entries[name]) if name in entries else "" for name in self._columns]))
        return file

    def _widen(self, file: BinaryIO, names: Iterable[str]) -> BinaryIO:
        """Puts a file with these columns too, and the same lines, in the place of the one at the path."""
        self.check_file()
        if self._file is None:  # it was not `file` any more
            self._file = file = self._open()
        known = {*self._columns}
        columns = [*self._columns, *(name for name in names if name not in known)]
        with self.path.open("rb") as narrow:
            lines = [self._widened(line, columns) for line in narrow]
        unfinished = self.path.with_name(f".{self.path.name}.unfinished")
        try:
            with unfinished.open("wb", buffering=0) as wider:
                _write_whole(wider, b"".join(lines if self._columns else [_row(columns)]))
                os.fsync(wider.fileno())
            unfinished.replace(self.path)  # at once, or not at all
        finally:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
        file.close()
        self._columns = columns
        return self.path.open("ab", buffering=0)

    def _widened(self, line: bytes, columns: list[str]) -> bytes:
        """A line with blanks for new columns, or the new names; a line that cannot be read as it is."""
        fields = _cells(line)
        if fields and fields == self._columns:
            return _row(columns)
        return line if _first_number(fields) is None else _row(fields + [""] * (len(columns) - len(fields)))


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_dev, status.st_ino, status.st_size


def _write_whole(file: BinaryIO, data: bytes) -> None:
    """Writes all of it: a disk that is nearly full may take a part."""
    while data:
        data = data[file.write(data) :]


def _cells(line: bytes) -> list[str]:
    """The fields of a line; none where it cannot be read. Bytes that are no letters come back from `_row`."""
    with suppress(csv.Error):
        return next(csv.reader([line.decode("utf-8-sig", errors="surrogateescape")], strict=True))
    return []


def _first_number(fields: list[str]) -> int | None:
    with suppress(ValueError, IndexError, OverflowError):
        return int(float(fields[0]))  # other programs write whole numbers with a point
    return None


def _row(fields: list[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(fields)
    return text.getvalue().encode(errors="surrogateescape")
