"""In the copy whose tokens can be changed, each of them is what the changed source would be."""

from __future__ import annotations

import ast
import sys
from typing import Any

import pytest

import token_switches
from switched_copy import Token, with_switches

SOURCE = '''"""A module: 1 + 1."""
from __future__ import annotations
LIMIT: int = 3

class Counter:
    step = 1.5

    def count(self, numbers, *, twice=False):
        """Counts: 2 + 2."""
        counted = []
        for number in numbers:
            is_small = number < LIMIT
            if is_small and number is not None:
                counted.append(number - self.step)
        return counted * 4 if twice else counted

def look(numbers):
    counter = Counter()
    pairs = list(zip(numbers, numbers, strict=True))
    within = [0 <= number < 5 for number in numbers]
    small = {8} | {len(numbers)}
    return counter.count(numbers), counter.count(numbers, twice=True), within, small, not numbers, f"{1 + 1}", pairs
'''


def outcome(source: str) -> Any:
    """What the module computes; an error is its type."""
    names: dict[str, Any] = {}
    try:
        exec(compile(source, "module", "exec"), names)  # noqa: S102
        return [names["look"](numbers) for numbers in ([], [0, 1, 2, 3, 4])]
    except TypeError as error:
        return type(error)


def test_a_switched_token_is_that_of_the_changed_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by itself, against the text in which its line is changed; and none at all."""
    monkeypatch.setitem(sys.modules, "ignite_train.token_switches", token_switches)
    tokens: list[Token] = []
    switched = ast.unparse(with_switches(SOURCE, "module.py", tokens))
    assert outcome(switched) == outcome(SOURCE)
    kinds = ["3", "1.5", "False", "number < LIMIT", "is_small and number is not None", "number - self.step", "0", "True"]
    assert set(kinds) < {token.before for token in tokens}
    for number, (_, line, _, before, after) in enumerate(tokens):
        monkeypatch.setattr(token_switches, "changed", number)
        lines = SOURCE.splitlines()
        assert lines[line - 1].count(before) == 1
        lines[line - 1] = lines[line - 1].replace(before, after)
        assert outcome(switched) == outcome("\n".join(lines)), before
    assert not {"1", "1 + 1", "2 + 2"} & {token.before for token in tokens}  # docstrings and messages
