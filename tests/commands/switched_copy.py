"""Copies the checkout so that each token of the library can be changed while it runs; see `mutants.py`.

`a < b` becomes `_switches.either(17, "Lt", "LtE", a, b)` there: a `<=` in the processes in which token 17 is the changed one.
"""

from __future__ import annotations

import ast
import copy
import shutil
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

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


class Token(NamedTuple):
    """A token of the library, and what is put in its place."""

    path: str
    line: int
    function: str
    before: str
    after: str


class _Switches(ast.NodeTransformer):
    """Puts a switch around each token that can be changed, and appends it to `tokens`."""

    def __init__(self, path: str, tokens: list[Token]) -> None:
        self._path, self._tokens, self._names = path, tokens, list[str]()

    def _new(self, node: ast.AST, before: str, after: str) -> ast.Constant:
        line = node.lineno  # type: ignore[attr-defined]
        self._tokens.append(Token(self._path, line, ".".join(self._names), before, after))
        return ast.Constant(len(self._tokens) - 1)

    @staticmethod
    def _call(name: str, *arguments: ast.expr) -> ast.Call:
        return ast.Call(ast.Attribute(ast.Name("_switches", ast.Load()), name, ast.Load()), list(arguments), [])

    def _either(self, token: ast.Constant, written: ast.expr, other: ast.expr) -> ast.IfExp:
        return ast.IfExp(self._call("stays", token), written, other)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._names.append(node.name)
        node.body = [self.visit(statement) for statement in node.body]
        self._names.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Visits no annotation: those are not run."""
        node.args.defaults = [self.visit(default) for default in node.args.defaults]
        node.args.kw_defaults = [default and self.visit(default) for default in node.args.kw_defaults]
        self._names.append(node.name)
        node.body = [self.visit(statement) for statement in node.body]
        self._names.pop()
        return node

    def visit_match_case(self, node: ast.match_case) -> ast.AST:
        """Visits no pattern, in which nothing can be called."""
        node.guard = node.guard and self.visit(node.guard)
        node.body = [self.visit(statement) for statement in node.body]
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        """Leaves the `strict=` of a zip alone, which only says that lengths never differ."""
        return node if node.arg == "strict" else self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        """Leaves messages alone."""
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if type(node.ops[0]) not in COMPARISONS:
            return self.generic_visit(node)
        other = copy.deepcopy(node)
        other.ops[0] = COMPARISONS[type(node.ops[0])]()
        before, after = ast.unparse(node), ast.unparse(other)
        self.generic_visit(node)
        token = self._new(node, before, after)
        if len(node.ops) == 1:
            names = [ast.Constant(type(one.ops[0]).__name__) for one in (node, other)]
            return self._call("either", token, *names, node.left, node.comparators[0])
        other = copy.deepcopy(node)
        other.ops[0] = COMPARISONS[type(node.ops[0])]()
        return self._either(token, node, other)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        if type(node.op) not in OPERATORS:
            return self.generic_visit(node)
        other = OPERATORS[type(node.op)]
        before, after = ast.unparse(node), ast.unparse(ast.BinOp(node.left, other(), node.right))
        self.generic_visit(node)
        names = ast.Constant(type(node.op).__name__), ast.Constant(other.__name__)
        return self._call("either", self._new(node, before, after), *names, node.left, node.right)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        before, after = ast.unparse(node), ast.unparse(ast.BoolOp(other, node.values))
        self.generic_visit(node)
        return self._either(self._new(node, before, after), node, ast.BoolOp(other, copy.deepcopy(node.values)))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        before, after = ast.unparse(node), ast.unparse(node.operand)
        self.generic_visit(node)
        return self._call("negated", self._new(node, before, after), node.operand) if isinstance(node.op, ast.Not) else node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if type(node.value) not in (bool, int, float):
            return node
        other = ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
        return self._either(self._new(node, ast.unparse(node), ast.unparse(other)), node, other)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Constant):
            return node  # a docstring
        before = ast.unparse(node)
        self.generic_visit(node)
        if isinstance(node.value, ast.Call):
            node.value = self._either(self._new(node, before, "pass"), node.value, ast.Constant(None))
        return node


def library(root: Path) -> list[Path]:
    """The files of the core and the handlers, relative to `root`."""
    core = [path for path in (root / "ignite_train").rglob("*.py") if "handlers" not in path.relative_to(root).parts]
    return sorted(path.relative_to(root) for path in [*core, *(root / "handlers").glob("*.py")])


def make_switched_copy(root: Path, there: Path) -> list[Token]:
    """Copies the checkout `root` to the directory `there`, which must not exist. Gives the tokens by their numbers."""
    ignored = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", "runs", "build", "dist")
    shutil.copytree(root, there, symlinks=True, ignore=ignored)
    tokens: list[Token] = []
    for path in library(root):
        tree = with_switches((root / path).read_text(encoding="utf-8"), str(path), tokens)
        (there / path).write_text(ast.unparse(tree), encoding="utf-8")
    shutil.copy(Path(__file__).with_name("token_switches.py"), there / "ignite_train")
    return tokens


def with_switches(source: str, path: str, tokens: list[Token]) -> ast.Module:
    """The source of a module with its switches. Its tokens are appended to `tokens`."""
    tree = _Switches(path, tokens).visit(ast.parse(source))
    place = sum(1 for _ in takewhile(_stands_first, tree.body))
    tree.body.insert(place, ast.Import([ast.alias("ignite_train.token_switches", "_switches")]))
    return ast.fix_missing_locations(tree)


def _stands_first(statement: ast.stmt) -> bool:
    """The docstring of a module and its imports from `__future__`."""
    is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
    return is_future or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
