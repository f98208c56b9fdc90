"""Records which functions of the library each test calls, in the processes that it starts too.

`sitecustomize.py`, laid into a copy of the checkout, makes every Python process there trace calls. The name of the running
test is in a file, since a process that is forked from a server does not get the environment of the test that asked for it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

SITECUSTOMIZE = """import sys
sys.path.insert(0, {tests!r})
import called_by
called_by.trace({library!r}, {records!r})
sys.path.remove({tests!r})
"""


def lay_out(copy: Path, records: Path) -> None:
    """Makes every Python process that has this copy of the checkout on its PYTHONPATH trace calls."""
    records.mkdir(parents=True, exist_ok=True)
    (records / "current").write_text("")
    text = SITECUSTOMIZE.format(tests=str(copy / "tests"), library=str(copy / "ignite_train"), records=str(records))
    (copy / "sitecustomize.py").write_text(text)


def trace(library: str, records: str) -> None:
    """Writes down each function of the library at its first call in this process and this test."""
    prefix, cut = library + os.sep, len(library) - len("ignite_train")
    seen: dict[int, Any] = {}  # holds the code too, so that its id stays its own

    def on_call(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if code.co_filename.startswith(prefix) and id(code) not in seen:
            seen[id(code)] = code
            with open(f"{records}/current") as file:  # noqa: PTH123  # pathlib would be traced
                name = file.read()
            if name:
                with open(f"{records}/{name}", "a") as file:  # noqa: PTH123
                    file.write(f"{code.co_filename[cut:]}::{code.co_qualname}\n")

    os.register_at_fork(after_in_child=seen.clear)
    sys.modules["called_by"].forget = seen.clear  # type: ignore[attr-defined]
    sys.settrace(on_call)
    threading.settrace(on_call)


class Recorder:
    """A plugin of pytest that tells the traced processes which test is running, and collects what they wrote.

    Args:
        records: the directory of `lay_out`.
        into: gets a line of JSON for each test: its name, how many seconds it took, and the functions that it called, as in
            `"ignite_train/trainer.py::Trainer.run"`.
    """

    def __init__(self, records: Path, into: Path) -> None:
        self._records, self._into, self._count = records, into, 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Runs one test under its name."""
        self._count += 1
        calls = self._records / f"test-{self._count}"
        sys.modules["called_by"].forget()  # type: ignore[attr-defined]
        (self._records / "current").write_text(calls.name)
        begin = time.monotonic()
        try:
            return (yield)
        finally:
            seconds = round(time.monotonic() - begin, 3)
            (self._records / "current").write_text("")
            functions = sorted(set(calls.read_text().splitlines())) if calls.exists() else []
            with self._into.open("a") as file:
                print(json.dumps({"test": item.nodeid, "seconds": seconds, "functions": functions}), file=file)


if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[3:], plugins=[Recorder(Path(sys.argv[1]), Path(sys.argv[2]))]))
