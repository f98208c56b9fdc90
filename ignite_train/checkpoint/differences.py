"""The places where two trees differ: one describes a checkpoint, the other the run which resumes from it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

from ignite_train.arguments import describe
from ignite_train.checkpoint.tree import TensorForm
from ignite_train.errors import CheckpointError

__all__ = ["Difference", "Word", "differences", "refuse"]


class Word(Enum):
    """Stands for a value that a tree lacks, or that need not be compared."""

    NOTHING = "nothing"
    NO_TENSOR = "no tensor"
    ONE_NUMBER = "one number of at least 0"

    def __repr__(self) -> str:
        return self.value


class Difference(NamedTuple):
    """A place where two trees differ."""

    path: tuple[str, ...]
    saved: Any
    here: Any

    def __str__(self) -> str:
        where = f"{' of '.join(reversed(self.path)):.200}"
        if self.is_on_one_side:
            return f"{where} is {'missing' if self.saved is Word.NOTHING else 'not in this run'}"
        return f"{where} is {_shown(self.saved)}, and this run has {_shown(self.here)}"

    @property
    def is_on_one_side(self) -> bool:
        """Whether one of the trees has no such entry."""
        return self.saved is Word.NOTHING or self.here is Word.NOTHING

    @property
    def change(self) -> str:
        """The same as a change of a setting, for the log."""
        return f"{'.'.join(self.path)}: {self.saved!r:.200} -> {self.here!r:.200}"


def differences(
    saved: Any, here: Any, same: Callable[[Any, Any], bool] = operator.eq, path: tuple[str, ...] = ()
) -> Iterator[Difference]:
    """The places where two nested mappings differ. Where one lacks a mapping, each entry of it is a difference.

    Args:
        saved: of the checkpoint.
        here: of this run.
        same: whether two values other than mappings count as equal.
        path: of both, in larger ones.
    """
    one, other = ({} if tree is Word.NOTHING else tree for tree in (saved, here))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in {**other, **one}:
            values = one.get(key, Word.NOTHING), other.get(key, Word.NOTHING)
            yield from differences(*values, same, (*path, str(key)))
    elif not same(saved, here):
        yield Difference(path, saved, here)


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, (TensorForm, Word)) else describe(value)


def refuse(path: str, what: str, problems: Iterable[Difference | str], remedy: str) -> None:
    """Raises CheckpointError if there are problems, and names the first of them."""
    found = [str(problem) for problem in problems]
    if found:
        more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
        raise CheckpointError(f"{path} is of another {what}: {'; '.join(found[:3])}{more}; {remedy}")
