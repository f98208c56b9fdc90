"""docs/heritage.md has a row for each behaviour of the loops that this library replaces, and each row has tests that exist."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/heritage.md"

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="looks at a checkout, and here is none")

# How many behaviours each part has. The letters stand for the parts of an update, the numbers for its behaviours.
FAIRSEQ = {"A": 21, "B": 8, "C": 8, "D": 5, "E": 5, "F": 8, "G": 7, "H": 11, "J": 7, "L": 6}
STEP = {"A": 20, "B": 20, "C": 12, "D": 15, "E": 18, "F": 16, "G": 11}
OTHERS = {"V": 28, "DS": 20}

_ROW = re.compile(r"^\| ((?:F-)?[A-Z]{1,2}\d+b?) \|(.*)\|$", re.MULTILINE)
_TEST = re.compile(r"`(tests/\w+/\w+\.py)::(\w+)`")


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
    wanted.insert(wanted.index("F-A6"), "F-A5b")
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
    assert "test_each_behaviour_has_one_row" in _tests_in("tests/project/test_heritage.py")
    assert "test_of_nothing" not in _tests_in("tests/project/test_heritage.py") | _tests_in("tests/project/test_of_nothing.py")


# --- whether a test speaks of what its row is about ---

# What the tests of a row call its matter, where the row has other words for it.
OTHER_WORDS = {
    "F-A1": "cuts",  # of micro-batches and ranks, by all of which an update is the same
    "F-D2": "rates",
    "F-E5": "page",
    "F-G4": "refused uses",
    "F-H6": "kinds",  # each kind of model, optimizer and loader
    "F-H7": "world",
    "A3": "cuts",
    "A6": "demand",
    "A7": "deepspeed",
    "A12": "unequal",
    "B7": "skip",
    "B13": "finite",
    "B14": "nan",
    "D3": "filters counter",
    "D9": "reductions",
    "D10": "arguments",
    "E8": "interval",
    "F1": "killed",
    "F10": "interval",
    "F13": "world",
    "G1": "cuts",
    "V2": "beside",
    "V10": "finite reads",
    "V17": "persistent",
    "DS1": "arguments",
    "DS4": "reported deepspeed",
    "DS10": "reductions",
}
_FUNCTION_WORDS = {
    *("all", "also", "and", "another", "any", "because", "both", "cannot", "does", "each", "for", "from", "has", "here", "how"),
    *("last", "later", "may", "not", "once", "one", "only", "other", "over", "same", "some", "than", "that", "the", "their"),
    *("then", "there", "these", "they", "this", "those", "too", "under", "until", "what", "when", "where", "whether", "which"),
    *("with", "within", "without"),
}
_TOO_COMMON = 0.3  # of the named tests: a word in more of them tells none from another


def _stems(text: str) -> set[str]:
    """The words, and the parts of names, each without its ending."""
    apart = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", text).replace("_", " ").lower()
    words = {word for word in re.findall(r"[a-z]{3,}", apart) if word not in _FUNCTION_WORDS}
    return {re.sub(r"(?<=\w{3})(ations?|ings?|ies|ed|es|s|e|y)$", "", word) for word in words}


@cache
def _definitions(file: str) -> dict[str, str]:
    """What the functions, classes and values of a file are made of, by their names; a test with its file's name."""
    text = (ROOT / file).read_text(encoding="utf-8")
    lines, found = text.splitlines(), {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            found[ast.unparse(target)] = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    return found


@cache
def _words_of(file: str, test: str) -> set[str]:
    """The words of a test, of what it uses from its file, and of the file's name."""
    definitions = _definitions(file)
    used = {name for name in re.findall(r"\w+", definitions[test]) if name in definitions}
    return _stems(" ".join([Path(file).stem, *(definitions[name] for name in {test, *used})]))


def test_each_named_test_speaks_of_its_row() -> None:
    """It has a word of the behaviour, or of where that is here, which most of the named tests do not have."""
    named = {name: _TEST.findall(cells[2]) for name, cells in _rows()}
    counts = Counter(word for test in {test for tests in named.values() for test in tests} for word in _words_of(*test))
    most = _TOO_COMMON * len({test for tests in named.values() for test in tests})
    silent = [
        f"{name}: {test}"
        for name, cells in _rows()
        for file, test in named[name]
        if not {word for word in _stems(f"{cells[0]} {cells[1]} {OTHER_WORDS.get(name, '')}") if counts[word] <= most}
        & _words_of(file, test)
    ]
    assert silent == []
