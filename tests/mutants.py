"""Changes the library at random, one token at a time, and reports which changes no test notices.

    python tests/mutants.py --number 20 --seed 1 --jobs 2

Each mutant is made in a copy of the checkout. The test files that name what the mutated file defines run first and stop at the
first failure; if they all pass, so do the rest. A mutant that passes everything survives: its difference is printed, for a
person to judge whether the change matters. The exit status is 1 if any survived.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 1500  # for all tests of one mutant; one that hangs is noticed
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
    source: str

    def difference(self) -> str:
        """The change, as a unified difference of both syntax trees."""
        before = ast.unparse(ast.parse((ROOT / self.path).read_text(encoding="utf-8")))
        lines = difflib.unified_diff(before.splitlines(), self.source.splitlines(), lineterm="", n=2)
        return "\n".join(list(lines)[2:])


class _Change(ast.NodeTransformer):
    """Changes the token of this number, counted over all that can be changed; counts them all."""

    def __init__(self, number: int) -> None:
        self.left, self.count, self.line = number, 0, 0

    def _hit(self, node: ast.AST) -> bool:
        self.count += 1
        self.left -= 1
        if self.left == -1:
            self.line = node.lineno  # type: ignore[attr-defined]
        return self.left == -1

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
    return Mutant(path, change.line, ast.unparse(tree)), change.count


def draw(number: int, seed: int) -> Iterator[Mutant]:
    """So many mutants; each token of the core and the handlers is as likely as any other."""
    packages = [path for path in (ROOT / "ignite_train").rglob("*.py") if "handlers" not in path.relative_to(ROOT).parts]
    files = sorted(path.relative_to(ROOT) for path in [*packages, *(ROOT / "handlers").glob("*.py")])
    tokens = [(path, index) for path in files for index in range(mutate(path, -1)[1])]
    for path, index in random.Random(seed).sample(tokens, number):  # noqa: S311
        yield mutate(path, index)[0]


def test_files(path: Path) -> tuple[list[str], list[str]]:
    """The test files that name most of what the file defines, and all others."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)} | {path.stem}
    tests = sorted((ROOT / "tests").glob("test_*.py"))
    hits = {test: sum(name in test.read_text(encoding="utf-8") for name in names) for test in tests}
    ranked = sorted(tests, key=lambda test: -hits[test])
    chosen = [*[test for test in ranked if hits[test]][:6], ROOT / "tests/test_update.py", ROOT / "tests/test_cuts.py"]
    first = [f"tests/{test.name}" for test in dict.fromkeys(chosen)]
    return first, [f"tests/{test.name}" for test in tests if f"tests/{test.name}" not in first]


def survives(mutant: Mutant) -> bool:
    """Whether all tests pass with the mutant in place of its file."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as there:
        copy = Path(there) / "checkout"
        ignored = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", "runs", "build", "dist")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
        (copy / mutant.path).write_text(mutant.source, encoding="utf-8")
        for tests in test_files(mutant.path):
            # test_house and test_docs look at how a file is written, which unparsing changes.
            chosen = [test for test in tests if not test.endswith(("test_house.py", "test_docs.py", "test_wheel.py"))]
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not nightly", "-p", "no:cacheprovider", *chosen]
            try:
                done = subprocess.run(
                    command, cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, capture_output=True, timeout=SECONDS
                )
            except subprocess.TimeoutExpired:
                return False
            if done.returncode != 0:
                return False
    return True


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--number", type=int, default=20, help="how many mutants (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="which (default: 0)")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (default: 1)")
    options = parser.parse_args()
    mutants, survivors = list(draw(options.number, options.seed)), 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutant, survived in zip(mutants, pool.map(survives, mutants), strict=True):
            survivors += survived
            print(f"{'SURVIVED' if survived else 'noticed '}  {mutant.path}:{mutant.line}", flush=True)
            if survived:
                print(mutant.difference(), flush=True)
    print(f"{len(mutants)} mutants, {survivors} survived")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
