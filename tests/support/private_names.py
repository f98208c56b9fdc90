"""Private names of other people's code in a file, read from its syntax tree."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["PUBLIC", "defined_names", "private_names_of_others", "tree"]

# Names of Python's that begin with an underscore and are documented, so that they change no more than others do.
PUBLIC = {"_asdict", "_current_frames", "_exit", "_fields", "_getframe", "_make", "_replace"}

_PRIVATE = re.compile(r"_[A-Za-z]\w*")


@functools.cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def defined_names(path: Path) -> set[str]:
    """What the file defines: functions, classes, variables, and attributes that a method gives to its own object."""
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}:
                names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def private_names_of_others(path: Path) -> list[tuple[int, str]]:
    """Lines and names of the private ones that the file does not define: attributes, imports, and strings that are names."""
    own = defined_names(path) | PUBLIC
    return sorted({(line, name) for line, name in _used(tree(path)) if _PRIVATE.fullmatch(name) and name not in own})


def _used(module: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, name) for name in (node.module or "").split("."))
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, name) for alias in node.names for name in alias.name.split("."))
