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
    "F-A17": "skip",
    "F-D2": "rates resumed",
    "F-E1": "evaluation",
    "F-E5": "page",
    "F-H4": "score",
    "F-H6": "kinds killed",  # each kind of model, optimizer and loader; all handlers at once
    "A6": "demand",
    "A7": "deepspeed",
    "A8": "counter",
    "A12": "unequal",
    "B7": "skip",
    "B9": "resumed",
    "B13": "finite",
    "D1": "order timeline",
    "D3": "filters counter",
    "D9": "reductions",
    "D10": "arguments",
    "D12": "killed",
    "E9": "tensorboard",
    "F1": "killed crash",
    "F10": "interval",
    "F14": "rule",
    "G1": "cuts",
    "V17": "persistent dataset",
    "DS3": "sum",
    "DS4": "deepspeed",
    "DS6": "lists",
    "DS10": "reductions",
}
# Words that join others, and those that are no matter of their own: verbs, places in an order, and what all loops have.
_FUNCTION_WORDS = {
    *("about", "after", "again", "all", "also", "and", "another", "any", "applies", "are", "back", "because", "been", "before"),
    *("behind", "best", "better", "both", "cannot", "decide", "deep", "default", "does", "done", "each", "early", "end"),
    *("fairseq", "first", "fit", "follow", "for", "found", "from", "full", "get", "give", "had", "has", "here", "hold", "how"),
    *("inside", "its", "keep", "large", "last", "later", "learn", "leave", "left", "made", "may", "must", "never", "next"),
    *("not", "nothing", "once", "one", "only", "open", "other", "out", "outside", "over", "own", "put", "raise", "same", "say"),
    *("set", "several", "silent", "slow", "smaller", "some", "speed", "start", "take", "tell", "than", "that", "the", "their"),
    *("them", "then", "there", "these", "they", "this", "those", "told", "too", "type", "under", "until", "use", "user", "was"),
    *(
        "every",
        "false",
        "micro",
        "name",
        "options",
        "returns",
        "row",
        "were",
        "what",
        "when",
        "where",
        "whether",
        "which",
        "while",
        "whole",
        "win",
        "with",
        "within",
        "without",
        "wrong",
    ),
}
_TOO_COMMON = 0.3  # of the named tests: a word in more of them tells none from another


def _stem(word: str) -> str:
    return re.sub(r"(?<=\w{3})(ations?|ings?|ies|ed|es|s|e|y)$", "", word)


_NO_NOUNS = {_stem(word) for word in _FUNCTION_WORDS}


def _stems(text: str) -> set[str]:
    """The words, and the parts of names, each without its ending."""
    apart = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", text).replace("_", " ").lower()
    return {_stem(word) for word in re.findall(r"[a-z]{3,}", apart)} - _NO_NOUNS


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
    """The words of a test and of its file's name, and not those of what it calls."""
    return _stems(f"{Path(file).stem.removeprefix('test_')} {_definitions(file)[test]}")


@cache
def _common() -> set[str]:
    """The words that too many of the named tests have."""
    tests = {test for _, cells in _rows() for test in _TEST.findall(cells[2])}
    counts = Counter(word for test in tests for word in _words_of(*test))
    return {word for word, count in counts.items() if count > _TOO_COMMON * len(tests)}


def _silent(cells: list[str], others: str = "") -> list[str]:
    """The tests of a row that have no noun of the behaviour, nor of where that is here, nor one of `others`."""
    nouns = _stems(f"{cells[0]} {cells[1]} {others}") - _common()
    return [f"{file}::{test}" for file, test in _TEST.findall(cells[2]) if not nouns & _words_of(file, test)]


@pytest.mark.slow
def test_each_named_test_speaks_of_its_row() -> None:
    """It has a noun of the behaviour, or of where that is here, which most of the named tests do not have."""
    assert {name: tests for name, cells in _rows() if (tests := _silent(cells, OTHER_WORDS.get(name, "")))} == {}


def test_a_test_of_something_else_is_noticed() -> None:
    """A row on types of samples has no test of a loss scale, and one on windows none of copies to a device."""
    rows = dict(_rows())
    assert _silent([*rows["F-A14"][:2], "`tests/update/test_loss_scaling.py::test_fairseq_threshold_is_a_silent_floor`"])
    assert _silent([*rows["F-C2"][:2], "`tests/device/test_transfer.py::test_samples_and_targets_keep_their_dtype`"])


def test_other_words_are_needed() -> None:
    """Without them their row would have a test that does not speak of it."""
    rows = dict(_rows())
    assert [name for name in OTHER_WORDS if not _silent(rows[name])] == []


def test_each_row_has_a_test_of_the_gate() -> None:
    """What is run at night alone, or nowhere, does not show a behaviour to whoever changes it."""
    apart = re.compile(r"mark\.(nightly|skip|xfail)\b(?!if)")

    def is_apart(file: str, test: str) -> bool:
        of_file = _definitions(file).get("pytestmark", "")
        own = [line for line in _definitions(file)[test].splitlines() if line.startswith("@")]
        return apart.search("\n".join([of_file, *own])) is not None

    rows = {name: _TEST.findall(cells[2]) for name, cells in _rows()}
    assert [name for name, tests in rows.items() if tests and all(is_apart(*test) for test in tests)] == []
    assert is_apart("tests/checkpoint/test_kill.py", "test_two_hundred_kills")
