"""The code of docs/programs.md runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[2] / "docs/programs.md"

pytestmark = pytest.mark.skipif(not PROGRAMS.is_file(), reason="looks at a checkout, which is not here")


def test_the_page_on_programs_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All blocks, one after the other, print what stands beside each `print`, and nothing else; each section prints."""
    monkeypatch.chdir(tmp_path)
    text = PROGRAMS.read_text(encoding="utf-8")
    code = "".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
    promised = re.findall(r"^ *print\(.*\)  # (.*)$", code, flags=re.MULTILINE)
    exec(compile(code, str(PROGRAMS), "exec"), {"__name__": "page"})  # noqa: S102

    assert capsys.readouterr().out.splitlines() == promised
    assert all("  # " in section and "print(" in section for section in text.split("\n## ")[1:])
