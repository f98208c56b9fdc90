"""Plain English: phrases that readers stumbled over do not come back, and examples can be pasted as they are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not (ROOT / "ignite_train").is_dir(), reason="looks at a checkout, and here is none")

# A phrase, and what to write instead.
PHRASES = {
    r"\b(?:[Nn]obody|[Ww]ho(?:so)?ever|[Aa]nybody|[Ss]omebody)\b": "name the subject: 'no rank', 'the caller', 'unknown'",
    r"(?<!there\s)\b(?:is|are) none\b(?! of)": "say what is invalid or missing",
    r"\bhostage\b": "say what happens",
    r"\b[Gg]o(?:es|ing)? on\b|\bwent on\b": "'continue', 'resume'",
    r"\banew\b|\bfor ever\b": "'again', 'forever'",
    r"\bmend(?:s|ed)?\b": "'correct', 'fix'",
    r"\b[Ff]or (?:want|lack) of\b": "'because there is no ...'",
    r"\bso (?:long ago|many (?:updates|steps|epochs))\b": "'this many ...'",
    r"\bcom(?:e|es|ing) to (?:be|know|differ)\b": "'become', 'learn', 'differ'",
    r"\bwithout a word\b": "'without a message'",
    r"\beven out\b": "'make equally long'",
}


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _sources() -> list[Path]:
    library = [path for path in (ROOT / "ignite_train").rglob("*.py") if "handlers" not in path.parts]
    scripts = [path for folder in ("benchmarks", "examples", "handlers") for path in (ROOT / folder).glob("*.py")]
    return sorted([*library, *scripts])


def _documents() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def _found(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, phrase and remedy; a phrase may be broken over two lines."""
    for phrase, remedy in PHRASES.items():
        for match in re.finditer(phrase.replace(" ", r"[\s#\"]+"), text):
            yield text[: match.start()].count("\n") + 1, match.group(), remedy


def test_stumbling_blocks_do_not_come_back() -> None:
    """No message, docstring, comment or document has a phrase of the list."""
    files = [*_sources(), *_documents()]
    found = [(_name(path), *hit) for path in files for hit in _found(path.read_text(encoding="utf-8"))]

    assert found == []
    assert len(files) > 40


def test_the_list_finds_what_it_is_for() -> None:
    """Also at the beginning of a sentence, and over the end of a line."""
    text = "Whoever asks, an entry that is none.\nThe run goes\n# on; when it is over, none of them is left."

    assert [(line, phrase) for line, phrase, _ in _found(text)] == [(1, "Whoever"), (1, "is none"), (2, "goes\n# on")]


def _defined(node: ast.AST) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef]:
    """The node and what stands in its blocks, if it is a module, a class or a function; expressions hold none."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield from _defined(child)


@pytest.mark.slow
def test_examples_can_be_pasted_as_they_are() -> None:
    """No docstring needs a fixture of the tests; each handler and each factory for data has an example."""
    docstrings = {
        _name(path): [
            docstring
            for node in _defined(ast.parse(path.read_text(encoding="utf-8")))
            if (docstring := ast.get_docstring(node))
        ]
        for path in _sources()
    }

    assert [name for name, found in docstrings.items() if any("getfixture" in one for one in found)] == []
    with_class = [name for name in docstrings if name.startswith("handlers/") and not name.endswith("__init__.py")]
    assert [name for name in with_class if not any("\n    >>> " in one for one in docstrings[name])] == []
