"""Lies in a copy of the library, where it says which token is changed and notes which tokens have run; see `mutants.py`."""

from __future__ import annotations

import mmap
import operator
import os
from pathlib import Path
from typing import Any

import torch

OPERATIONS = {
    "Lt": operator.lt,
    "LtE": operator.le,
    "Gt": operator.gt,
    "GtE": operator.ge,
    "Eq": operator.eq,
    "NotEq": operator.ne,
    "Is": operator.is_,
    "IsNot": operator.is_not,
    "In": lambda value, container: value in container,
    "NotIn": lambda value, container: value not in container,
    "Add": operator.add,
    "Sub": operator.sub,
    "Mult": operator.mul,
    "Div": operator.truediv,
    "FloorDiv": operator.floordiv,
    "BitOr": operator.or_,
    "BitAnd": operator.and_,
}


def _open_marks() -> mmap.mmap | None:
    """A byte of each token, which all processes of a test write into the same file."""
    path = os.environ.get("TOKEN_MARKS")
    if path is None:
        return None
    with Path(path).open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


changed = int(os.environ.get("CHANGED_TOKEN", "-1"))
marks = _open_marks()


def stays(token: int) -> bool:
    """Whether the token that runs now is as it was written."""
    if marks is not None and not torch.compiler.is_compiling():
        marks[token] = 1
    return token != changed


def either(token: int, operation: str, other: str, left: Any, right: Any) -> Any:
    """Applies the operation that was written, or the other one."""
    return OPERATIONS[operation if stays(token) else other](left, right)


def negated(token: int, value: Any) -> Any:
    """What `not` makes of a value, or without it."""
    return not value if stays(token) else value
