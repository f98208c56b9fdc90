"""Changes the library at random, one token at a time, and reports which changes no test notices.

    python tests/mutants.py --number 20 --seed 1 --jobs 2

First, and again with `--record`, one pass of all tests writes down which functions each of them calls (see `called_by.py`); it
is kept in `.mutants_cache`. Each mutant then stands in a copy of the checkout, and the tests that call the function that was
changed are run in a process forked from one that has imported torch: the quickest first, then the others, then what else is in
their files, since a fixture or a cache may have made the call for another test. The first that fails ends it. A mutant that
passes everything survives: its difference is printed, for a person to judge whether the change matters. The exit status is 1 if
any survived. `--only ignite_train/update` takes mutants of these files only.
"""

from __future__ import annotations

import argparse
import ast
import difflib
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
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

import called_by

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".mutants_cache" / "called_by.jsonl"
SLOWER, GRACE_SECONDS = 10, 120  # how much longer than when recorded tests may take; one that hangs is noticed
QUICK_SECONDS, QUICK_TESTS = 10, 40  # of the first round
# What looks at how a file is written, which unparsing changes; what builds the package; and what runs for minutes.
LEFT_OUT = ("house", "docs", "readme", "wheel", "torch_versions", "examples")
COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
COMPARISONS |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitOr: ast.BitAnd,
}


@dataclass(frozen=True)
class Mutant:
    """A file of the library, as it would be after one change."""

    path: Path
    line: int
    function: str  # the qualified name of the function that has the token; empty outside of all
    source: str

    def difference(self) -> str:
        """The change, as a unified difference of both syntax trees."""
        before = ast.unparse(ast.parse((ROOT / self.path).read_text(encoding="utf-8")))
        lines = difflib.unified_diff(before.splitlines(), self.source.splitlines(), lineterm="", n=2)
        return "\n".join(list(lines)[2:])


class _Change(ast.NodeTransformer):
    """Changes the token of this number, counted over all that can be changed; counts them all."""

    def __init__(self, number: int) -> None:
        self.left, self.count, self.line, self.function = number, 0, 0, ""
        self._names: list[str] = []  # of the classes and functions around

    def _hit(self, node: ast.AST) -> bool:
        self.count += 1
        self.left -= 1
        if self.left == -1:
            self.line = node.lineno  # type: ignore[attr-defined]
            self.function = self._qualified_name()
        return self.left == -1

    def _qualified_name(self) -> str:
        """As in `__qualname__`; empty in the body of a class or module, which runs at import."""
        if not self._names or not self._names[-1].endswith("()"):
            return ""
        return ".".join(self._names).replace("().", ".<locals>.").removesuffix("()")

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._names.append(node.name)
        node.body = [self.visit(statement) for statement in node.body]
        self._names.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Visits no annotation: those are not run."""
        node.args.defaults = [self.visit(default) for default in node.args.defaults]
        node.args.kw_defaults = [default and self.visit(default) for default in node.args.kw_defaults]
        self._names.append(node.name + "()")
        node.body = [self.visit(statement) for statement in node.body]
        self._names.pop()
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if type(node.ops[0]) in COMPARISONS and self._hit(node):
            node.ops[0] = COMPARISONS[type(node.ops[0])]()
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if type(node.op) in OPERATORS and self._hit(node):
            node.op = OPERATORS[type(node.op)]()
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        if self._hit(node):
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return node.operand if isinstance(node.op, ast.Not) and self._hit(node) else node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, bool) and self._hit(node):
            return ast.copy_location(ast.Constant(not node.value), node)
        if type(node.value) in (int, float) and self._hit(node):
            return ast.copy_location(ast.Constant(node.value + 1), node)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Constant):
            return node  # a docstring
        self.generic_visit(node)
        return ast.copy_location(ast.Pass(), node) if isinstance(node.value, ast.Call) and self._hit(node) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:  # messages are not arithmetic
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node


def mutate(path: Path, number: int) -> tuple[Mutant, int]:
    """The file with its token of this number changed, and how many tokens can be."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    change = _Change(number)
    tree = ast.fix_missing_locations(change.visit(tree))
    return Mutant(path, change.line, change.function, ast.unparse(tree)), change.count


def draw(number: int, seed: int, only: str = "") -> Iterator[Mutant]:
    """So many mutants; each token of the core and the handlers is as likely as any other."""
    packages = [path for path in (ROOT / "ignite_train").rglob("*.py") if "handlers" not in path.relative_to(ROOT).parts]
    files = sorted(path.relative_to(ROOT) for path in [*packages, *(ROOT / "handlers").glob("*.py")])
    files = [path for path in files if str(path).startswith(only)]
    tokens = [(path, index) for path in files for index in range(mutate(path, -1)[1])]
    for path, index in random.Random(seed).sample(tokens, min(number, len(tokens))):  # noqa: S311
        yield mutate(path, index)[0]


class Test(NamedTuple):
    """What a pass of all tests has recorded of one."""

    name: str
    seconds: float
    functions: frozenset[str]

    @property
    def file(self) -> str:
        """Where it is."""
        return self.name.partition("::")[0]


class Checkout:
    """A copy of the checkout, in which one file at a time is a mutant's."""

    def __init__(self, there: Path) -> None:
        self.root = there / "checkout"
        ignored = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", "runs", "build", "dist")
        shutil.copytree(ROOT, self.root, symlinks=True, ignore=ignored)

    def run(self, mutant: Mutant, tests: list[Test]) -> str:
        """Runs these tests, in this order. Gives the first that failed, "time-out", or nothing if all passed."""
        path = self.root / mutant.path
        original = path.read_text(encoding="utf-8")
        path.write_text(mutant.source, encoding="utf-8")
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()
        try:
            process = self._start(tests)
            limit = SLOWER * sum(test.seconds for test in tests) + GRACE_SECONDS
            return self._outcome(process, time.monotonic() + limit)
        finally:
            path.write_text(original, encoding="utf-8")

    def _start(self, tests: list[Test]) -> int:
        """Forks a process that has imported torch already. It leads a group of its own, so that all it starts can be ended."""
        (self.root / "failed").unlink(missing_ok=True)
        process = os.fork()
        if process == 0:
            os.setsid()
            try:
                os._exit(self._run_pytest(tests))
            except BaseException:
                os._exit(99)
        return process

    def _run_pytest(self, tests: list[Test]) -> int:
        output = os.open(self.root / "output", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(self.root)
        vars(sys.modules["__main__"]).pop("__file__")  # or multiprocessing would import it in each process that a test starts
        sys.path[:] = [str(self.root), *(entry for entry in sys.path if not Path(entry or ".").resolve().is_relative_to(ROOT))]
        sys.dont_write_bytecode = True  # what is there already is of the unchanged files
        os.environ |= {"PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}
        files = dict.fromkeys(test.file for test in tests)
        options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--continue-on-collection-errors"]
        return int(pytest.main([*options, *files], plugins=[Chosen([test.name for test in tests])]))

    def _outcome(self, process: int, deadline: float) -> str:
        while (done := os.waitpid(process, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.05)
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # what the tests left over
        if done[0] == 0:
            os.waitpid(process, 0)
            return "time-out"
        if os.waitstatus_to_exitcode(done[1]) == 0:
            return ""
        failed = self.root / "failed"
        return failed.read_text() if failed.exists() else "pytest itself failed"


class Chosen:
    """A plugin of pytest that leaves only these tests, in this order, and writes down the first that fails."""

    def __init__(self, names: list[str]) -> None:
        self._places = {name: place for place, name in enumerate(names)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sorts them."""
        items[:] = sorted((item for item in items if item.nodeid in self._places), key=lambda item: self._places[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Writes it down."""
        if report.failed:
            Path("failed").write_text(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported has failed too."""
        if report.failed:
            Path("failed").write_text(f"import of {report.nodeid}")


def rounds(mutant: Mutant, tests: list[Test]) -> Iterator[list[Test]]:
    """The tests to run, round by round."""
    path = str(mutant.path)
    path = f"ignite_train/{path}" if path.startswith("handlers") else path
    key = f"{path}::{mutant.function}"
    if mutant.function:
        calling = [test for test in tests if any(name == key or name.startswith(f"{key}.<locals>") for name in test.functions)]
    else:
        calling = [test for test in tests if any(name.startswith(key) for name in test.functions)]
    named = {test.file for test in tests if mutant.path.stem in test.file}
    calling.sort(key=lambda test: (test.file not in named, test.seconds))
    quick, seconds = list[Test](), 0.0
    for test in calling:
        seconds += test.seconds
        if quick and (seconds > QUICK_SECONDS or len(quick) == QUICK_TESTS):
            break
        quick.append(test)
    yield quick
    yield calling[len(quick) :]
    files = {test.file for test in calling} | named
    yield [test for test in tests if test.file in files and test not in calling]


def judge(mutants: list[Mutant], tests: list[Test], results: Path) -> None:
    """Runs each mutant in one copy, and appends its outcome to `results` and to standard output."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as there:
        checkout = Checkout(Path(there))
        for mutant in mutants:
            noticed, count, begin = "", 0, time.monotonic()
            for chosen in rounds(mutant, tests):
                if chosen and not noticed:
                    noticed, count = checkout.run(mutant, chosen), count + len(chosen)
            seconds = time.monotonic() - begin
            line = f"{'noticed ' if noticed else 'SURVIVED'}  {mutant.path}:{mutant.line}  {seconds:.0f} s"
            print(f"{line}  {noticed or f'{count} tests passed'}", flush=True)
            if not noticed:
                print(mutant.difference(), flush=True)
            with results.open("a") as file:
                print(noticed, file=file)


def record(jobs: int) -> None:
    """Writes down which functions each test calls."""
    CACHE.parent.mkdir(exist_ok=True)
    files = [f"tests/{test.name}" for test in sorted((ROOT / "tests").glob("test_*.py"))]
    chosen = [file for file in files if not file.endswith(tuple(f"test_{name}.py" for name in LEFT_OUT))]
    with tempfile.TemporaryDirectory(prefix="mutants-") as there:
        started = [_start_recording(Path(there) / str(job), chosen[job::jobs]) for job in range(jobs)]
        for process, _ in started:
            process.wait()
        CACHE.write_text("".join(path.read_text() for _, path in started))


def _start_recording(there: Path, files: list[str]) -> tuple[subprocess.Popen[bytes], Path]:
    """Starts a pass of these test files in a copy of their own; gives the file that will have the records too."""
    copy, records, into = Checkout(there).root, there / "records", there / "called_by.jsonl"
    called_by.lay_out(copy, records)
    command = [sys.executable, str(copy / "tests/called_by.py"), str(records), str(into), "-q", "-p", "no:xdist", *files]
    return subprocess.Popen(command, cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}), into


def recorded() -> list[Test]:
    """What the last `record` has written."""
    lines = map(json.loads, CACHE.read_text().splitlines())
    return [Test(line["test"], line["seconds"], frozenset(line["functions"])) for line in lines]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--number", type=int, default=20, help="how many mutants (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="which (default: 0)")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (default: 1)")
    parser.add_argument("--only", default="", help="the beginning of the path of the files to change")
    parser.add_argument("--record", action="store_true", help="write down again which functions each test calls")
    options = parser.parse_args()
    if options.record or not CACHE.exists():
        record(options.jobs)
    mutants, tests = list(draw(options.number, options.seed, options.only)), recorded()
    for name in ("ignite.distributed", "torch.distributed.fsdp", "torch.optim"):
        importlib.import_module(name)  # once for all

    with tempfile.TemporaryDirectory() as there:
        results, workers = Path(there) / "results", list[int]()
        results.touch()
        for job in range(options.jobs):
            if (worker := os.fork()) == 0:
                judge(mutants[job :: options.jobs], tests, results)
                os._exit(0)
            workers.append(worker)
        for worker in workers:
            os.waitpid(worker, 0)
        outcomes = results.read_text().splitlines()
    survivors = outcomes.count("")
    print(f"{len(outcomes)} of {len(mutants)} mutants were judged: {survivors} survived")
    return int(survivors > 0 or len(outcomes) < len(mutants))


if __name__ == "__main__":
    sys.exit(main())
