"""docs/heritage.md has a row for each behaviour of the loops that this library replaces, and each row has tests that exist."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/heritage.md"

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="looks at a checkout, and here is none")

# How many behaviours each part has. The letters stand for the parts of an update, the numbers for its behaviours.
FAIRSEQ = {"A": 21, "B": 8, "C": 8, "D": 5, "E": 5, "F": 8, "G": 7, "H": 11, "J": 7, "L": 6}
STEP = {"A": 20, "B": 20, "C": 12, "D": 15, "E": 18, "F": 16, "G": 11}
OTHERS = {"V": 28, "DS": 20}

_ROW = re.compile(r"^\| ((?:F-)?[A-Z]{1,2}\d+) \|(.*)\|$", re.MULTILINE)
_TEST = re.compile(r"`(tests/\w+\.py)::(\w+)`")


def _rows() -> list[tuple[str, list[str]]]:
    """The id of each row, and its cells: the behaviour, where it is here, the tests, what is different."""
    return [(name, [cell.strip() for cell in rest.split("|")]) for name, rest in _ROW.findall(PAGE.read_text(encoding="utf-8"))]


@cache
def _tests_in(file: str) -> set[str]:
    path = ROOT / file
    return {*re.findall(r"^def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)} if path.is_file() else set()


def test_each_behaviour_has_one_row() -> None:
    """None of them is missing, and none is there twice."""
    wanted = [f"F-{letter}{number}" for letter, count in FAIRSEQ.items() for number in range(1, count + 1)]
    wanted += [
        f"{letter}{number}" for part in (STEP, OTHERS) for letter, count in part.items() for number in range(1, count + 1)
    ]

    assert [name for name, _ in _rows()] == wanted
    assert [name for name, count in Counter(wanted).items() if count > 1] == []


def test_each_row_names_tests_that_exist() -> None:
    """Or says that there is no such thing here, or that it is missing; the cell of tests holds nothing else."""
    rows = _rows()
    named = {name: _TEST.findall(cells[2]) for name, cells in rows}
    absent = {name: cells[1].startswith(("Not here", "Not yet")) for name, cells in rows}

    assert [name for name, cells in rows if len(cells) != 4 or not all(cells[:2])] == []
    assert [name for name, tests in named.items() if not (tests or absent[name])] == []
    assert [name for name, cells in rows if _TEST.sub("", cells[2]).strip(", ")] == []
    missing = [f"{file}::{test}" for tests in named.values() for file, test in tests if test not in _tests_in(file)]
    assert sorted(set(missing)) == []


def test_a_test_that_does_not_exist_is_noticed() -> None:
    """Neither in a file that exists, nor in one that does not."""
    assert "test_each_behaviour_has_one_row" in _tests_in("tests/test_heritage.py")
    assert "test_of_nothing" not in _tests_in("tests/test_heritage.py") | _tests_in("tests/test_of_nothing.py")
