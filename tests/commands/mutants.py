"""Changes the library at random, one token at a time, and reports which changes no test notices.

    python tests/commands/mutants.py --number 300 --seed 1 --jobs 2

The tests run in a copy of the checkout in which any token can be changed while the library runs, see `switched_copy.py`. First,
and again when the library is another one or with `--record`, one pass of all tests writes down which tokens each test runs; it
is kept in `.mutants_cache`. Then pytest collects all tests once, and each mutant is a process forked from that one: it runs the
tests that run the token, the quickest and those that run the fewest tokens first, until one fails or `--seconds` are over. A
mutant that passes survives. It is printed, for a person to judge whether the change matters. The exit status is 1 if any
survived. `--only ignite_train/update` takes tokens of these files only, `--slow` has the slow tests too, `--tokens` is
for some tokens by their numbers, and `--tests` for some tests. A test that fails here without a change too notices nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from switched_copy import Token, library, make_switched_copy

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".mutants_cache"
NONE = -1  # the number of no token
AT_IMPORT = ""  # in place of the name of a test: what has run before the first one
SLOWER, GRACE_SECONDS = 10, 20  # how much longer than when recorded tests may take; one that hangs is noticed
# Without pytest's capture, whose file all that is forked would share with what outlives a test.
PYTEST = ("-qs", "-p", "no:cacheprovider", "-p", "no:xdist")
# What looks at how a file is written, which a copy changes; what builds the package; and what runs for minutes.
LEFT_OUT = ("house", "words", "docs", "readme", "wheel", "torch_versions", "examples")


class Record(NamedTuple):
    """What a pass of all tests has recorded of one."""

    test: str
    seconds: float
    tokens: list[int]


class Recorder:
    """A plugin of pytest that writes into a file which tokens run in each test that passes."""

    def __init__(self, into: Path) -> None:
        self._into, self._passed = into, True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Forgets what ran before, in all processes, and writes down what runs now."""
        marks = importlib.import_module("ignite_train.token_switches").marks
        marks[:] = bytes(len(marks))
        self._passed, begin = True, time.monotonic()
        result = yield
        if self._passed:
            self._write(item.nodeid, time.monotonic() - begin)
        return result

    def pytest_collection_finish(self) -> None:
        """Writes down what has run at import."""
        self._write(AT_IMPORT, 0.0)

    def _write(self, test: str, seconds: float) -> None:
        marks = importlib.import_module("ignite_train.token_switches").marks
        with self._into.open("a") as file:
            print(json.dumps((test, seconds, [number for number, mark in enumerate(marks[:]) if mark])), file=file)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Looks whether it has passed."""
        self._passed &= not report.failed


class Judge:
    """A plugin of pytest that runs no tests, but mutants: each in a process that is forked from this one.

    Args:
        numbers: of the tokens to change.
        tokens: all of them.
        records: of all tests.
        seconds: how much time the tests of a mutant may take, as recorded.
        results: a file descriptor to which a line for each mutant is written.
    """

    def __init__(self, numbers: list[int], tokens: list[Token], records: list[Record], seconds: float, results: int) -> None:
        self._numbers, self._tokens, self._seconds, self._results = numbers, tokens, seconds, results
        self._records = [record for record in records if record.test != AT_IMPORT]
        self._at_import = {number for record in records if record.test == AT_IMPORT for number in record.tokens}
        self._unfit: set[str] = set()  # tests that fail in such a process where nothing is changed
        self._in_mutant = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Judges them all."""
        self._items = {item.nodeid: item for item in session.items}
        for number in self._numbers:
            begin = time.monotonic()
            noticed, told = self._judge(number)
            token, took = self._tokens[number], time.monotonic() - begin
            head = f"{'noticed ' if noticed else 'SURVIVED'}  {number}  {token.path}:{token.line}  {took:.0f} s  {told}\n"
            change = "" if noticed else f"    {token.function}\n    - {token.before}\n    + {token.after}\n"
            os.write(self._results, (head + change).encode())
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The first test that fails ends the process of a mutant."""
        if report.failed and self._in_mutant:
            print(report.longreprtext, flush=True)
            os._exit(1)

    def _judge(self, number: int) -> tuple[str, str]:
        """The name of the test that notices the mutant, empty if all pass; and what happened, in words."""
        tokens, run = {number}, self._in_fork
        if number in self._at_import:  # what it has made is used where the rest of the file is
            tokens = {other for other, token in enumerate(self._tokens) if token.path == self._tokens[number].path}
            run = self._in_new_process
        able = [record for record in self._records if record.test in self._items and not tokens.isdisjoint(record.tokens)]
        while True:
            chosen = self._chosen(able, Path(self._tokens[number].path).stem)
            if not chosen or not (noticed := run(number, chosen)):
                return "", f"{len(chosen)} of the {len(able)} tests that run it have passed"
            last = next(place for place, record in enumerate(chosen) if record.test == noticed)
            if not (unfit := run(NONE, chosen[: last + 1])):  # the same tests pass without the change
                return noticed, noticed
            self._unfit.add(unfit)
            print(f"left out: {unfit}", flush=True)

    def _chosen(self, able: list[Record], name: str) -> list[Record]:
        """As many as there is time for: by turns one that is quick, and one that runs few tokens."""
        able = [record for record in able if record.test not in self._unfit]
        quick = sorted(able, key=lambda record: (name not in record.test.partition("::")[0], record.seconds))
        special = sorted(able, key=lambda record: (len(record.tokens), record.seconds))
        chosen, seconds = dict[str, Record](), 0.0
        for record in chain.from_iterable(zip(quick, special, strict=True)):
            if record.test not in chosen and (not chosen or seconds + record.seconds <= self._seconds):
                chosen[record.test] = record
                seconds += record.seconds
        return list(chosen.values())

    def _in_fork(self, number: int, records: list[Record]) -> str:
        """The test that fails, or in which the process dies or takes too long; or nothing."""
        there = Path(tempfile.mkdtemp(prefix="mutant-"))
        process = os.fork()
        if process == 0:
            try:
                os.setsid()  # so that all it starts can be ended
                self._run_items(number, [self._items[record.test] for record in records], there)
                os._exit(0)
            except BaseException:
                os._exit(2)
        try:
            return "" if _has_passed(process, there / "test", records) else (there / "test").read_text()
        finally:
            shutil.rmtree(there, ignore_errors=True)

    def _run_items(self, number: int, items: list[pytest.Item], there: Path) -> None:
        importlib.import_module("ignite_train.token_switches").changed = number  # type: ignore[attr-defined]
        os.environ |= {"CHANGED_TOKEN": str(number), "TMPDIR": str(there)}
        tempfile.tempdir, self._in_mutant = str(there), True
        for item, following in zip(items, [*items[1:], None], strict=True):
            (there / "test").write_text(item.nodeid)
            item.config._tmp_path_factory._basetemp = there  # type: ignore[attr-defined]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)

    def _in_new_process(self, number: int, records: list[Record]) -> str:
        """The same, in a process that has not imported the library yet."""
        there = Path(tempfile.mkdtemp(prefix="mutant-"))
        environment = {**os.environ, "CHANGED_TOKEN": str(number), "TMPDIR": str(there), "RUNNING_TEST": str(there / "test")}
        environment["PYTHONPATH"] += f"{os.pathsep}{Path('tests/commands').resolve()}"
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *PYTEST, "-x", "-p", "mutants", "-m", "", *(record.test for record in records)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        try:
            if _has_passed(process.pid, there / "test", records):
                return ""
            return (there / "test").read_text() if (there / "test").exists() else records[0].test  # it cannot be imported
        finally:
            process.returncode = 0  # it was waited for; or else a ResourceWarning would fail every later test
            shutil.rmtree(there, ignore_errors=True)


def pytest_runtest_logstart(nodeid: str) -> None:
    """Writes down which test begins, where this module is a plugin of pytest: in the process of a mutant of its own."""
    Path(os.environ["RUNNING_TEST"]).write_text(nodeid)


def _has_passed(process: int, running: Path, records: list[Record]) -> bool:
    """Waits for a process that leads a group, and ends what is left of the group.

    Args:
        process: its number.
        running: a file with the name of the test that it runs now; it need not exist before the first one begins.
        records: of its tests.
    """
    limits = {record.test: SLOWER * record.seconds + GRACE_SECONDS for record in records}
    test, deadline = records[0].test, time.monotonic() + limits[records[0].test]
    while (done := os.waitpid(process, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
        now = running.read_text() if running.exists() else test
        if now != test and now in limits:
            test, deadline = now, time.monotonic() + limits[now]
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    if done[0] == 0:
        os.waitpid(process, 0)
    return done == (process, 0)


def start_pytest(there: Path, plugin: object, files: Sequence[str], *, slow: bool, **environment: str) -> int:
    """Forks a process that runs pytest in a copy of the checkout. Gives its number."""
    if process := os.fork():
        return process
    try:
        _run_pytest(there, plugin, files, slow=slow, **environment)
    finally:
        os._exit(1)


def _run_pytest(there: Path, plugin: object, files: Sequence[str], *, slow: bool, **environment: str) -> None:
    output = os.open(there / f"output-{os.getpid()}", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(there)
    vars(sys.modules["__main__"]).pop("__file__")  # or multiprocessing would import it in each process that a test starts
    own = (ROOT, ROOT / "tests/commands")
    sys.path[:] = [str(there), *(entry for entry in sys.path if Path(entry or ".").resolve() not in own)]
    os.environ |= {"PYTHONPATH": str(there), **environment}
    marks = "not nightly" if slow else "not slow and not nightly"
    pytest.main([*PYTEST, "-m", marks, *files], plugins=[plugin])


def record(there: Path, num_tokens: int, into: Path, *, slow: bool, jobs: int) -> None:
    """Writes down which tokens each test runs."""
    files = [test.relative_to(ROOT).as_posix() for test in sorted((ROOT / "tests").glob("*/test_*.py"))]
    files = [file for file in files if not file.endswith(tuple(f"test_{name}.py" for name in LEFT_OUT))]
    parts, processes = [there / f"records-{job}" for job in range(jobs)], list[int]()
    for job, part in enumerate(parts):
        (marks := there / f"marks-{job}").write_bytes(bytes(num_tokens))
        processes.append(start_pytest(there, Recorder(part), files[job::jobs], slow=slow, TOKEN_MARKS=str(marks)))
    for process in processes:
        os.waitpid(process, 0)
    into.parent.mkdir(exist_ok=True)
    into.write_text("".join(part.read_text() for part in parts))


def recorded(there: Path, num_tokens: int, *, slow: bool, jobs: int, again: bool) -> list[Record]:
    """The records of all tests: those in the cache, if they are of this library, or else new ones."""
    digest = hashlib.sha256(b"".join((ROOT / path).read_bytes() for path in library(ROOT))).hexdigest()[:16]
    file = CACHE / f"{digest}-{'slow' if slow else 'fast'}.jsonl"
    if again or not file.exists():
        record(there, num_tokens, file, slow=slow, jobs=jobs)
    return [Record(*json.loads(line)) for line in file.read_text().splitlines()]


def options() -> argparse.Namespace:
    """Of the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--number", type=int, default=20, help="how many mutants (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="which (default: 0)")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (default: 1)")
    parser.add_argument("--seconds", type=float, default=60, help="of tests for a mutant (default: 60)")
    parser.add_argument("--only", default="", help="the beginning of the path of the files to change")
    parser.add_argument("--tokens", type=int, nargs="*", help="these tokens, by the numbers that an earlier call has printed")
    parser.add_argument("--tests", default="", help="only those whose name contains this text")
    parser.add_argument("--slow", action="store_true", help="with the slow tests too")
    parser.add_argument("--record", action="store_true", help="write down again which tokens each test runs")
    return parser.parse_args()


def main() -> int:
    """The command."""
    asked = options()
    for name in ("ignite.distributed", "torch.distributed.fsdp", "torch.optim"):
        importlib.import_module(name)  # once for all processes
    temporary = Path(tempfile.mkdtemp(prefix="mutants-"))  # no TemporaryDirectory, which each process that a test forks removes
    try:
        there = temporary / "checkout"
        tokens = make_switched_copy(ROOT, there)
        records = recorded(there, len(tokens), slow=asked.slow, jobs=asked.jobs, again=asked.record)
        records = [record for record in records if record.test == AT_IMPORT or asked.tests in record.test]
        numbers = [number for number, token in enumerate(tokens) if token.path.startswith(asked.only)]
        chosen = asked.tokens or random.Random(asked.seed).sample(numbers, min(asked.number, len(numbers)))  # noqa: S311
        files = sorted({record.test.partition("::")[0] for record in records if record.test != AT_IMPORT})
        lines, into = os.pipe()
        for job in range(asked.jobs):
            judge = Judge(chosen[job :: asked.jobs], tokens, records, asked.seconds, into)
            start_pytest(there, judge, files, slow=asked.slow)
        os.close(into)
        survivors = judged = 0
        with os.fdopen(lines) as reader:
            for line in reader:
                print(line, end="", flush=True)
                survivors, judged = survivors + line.startswith("SURVIVED"), judged + line.startswith(("SURVIVED", "noticed"))
        if judged < len(chosen):
            print(*(f"{output.read_text()[-5000:]}\n" for output in there.glob("output-*")))
    finally:
        shutil.rmtree(temporary)
    print(f"{judged} of {len(chosen)} mutants were judged: {survivors} survived")
    return int(survivors > 0 or judged < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
