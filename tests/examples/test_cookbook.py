"""Each entry of docs/cookbook.md runs as printed after the first block of the page, alone, and prints what stands beside it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/cookbook.md"
TEXT = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""

pytestmark = pytest.mark.skipif(not TEXT, reason="looks at a checkout, and here is none")

_ENTRY = re.compile(r"^### (.+?)$(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_PRINT = re.compile(r"^ *print\(.*\)  # (.+)$", re.MULTILINE)

ENTRIES = dict(_ENTRY.findall(TEXT))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("title", ENTRIES)
def test_an_entry_runs_as_printed(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """It begins with nothing but the first block."""
    first = _BLOCK.search(TEXT)[1]
    blocks = _BLOCK.findall(ENTRIES[title])
    monkeypatch.chdir(tmp_path)
    exec(compile("".join([first, *blocks]), "docs/cookbook.md", "exec"), {})  # noqa: S102

    promised = [line for block in blocks for line in _PRINT.findall(block)]
    assert len(promised) >= 1
    assert capsys.readouterr().out.splitlines() == promised


def test_entries_are_short() -> None:
    """At most 30 lines of Python each, and at least one sentence that says why."""
    lengths = {title: sum(block.count("\n") for block in _BLOCK.findall(text)) for title, text in ENTRIES.items()}

    assert {title: length for title, length in lengths.items() if length > 30} == {}
    assert len(ENTRIES) >= 28
