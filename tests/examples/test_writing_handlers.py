"""The code of docs/writing-handlers.md runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ranks import run_ranks

ROOT = Path(__file__).parents[2]
WRITING_HANDLERS = ROOT / "docs/writing-handlers.md"

pytestmark = pytest.mark.skipif(not WRITING_HANDLERS.is_file(), reason="looks at a checkout, and here is none")


def blocks(heading: str = "") -> list[str]:
    """The Python code of the page, or of one section of it."""
    text = WRITING_HANDLERS.read_text(encoding="utf-8")
    if heading:
        text = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def promised(code: str) -> list[str]:
    """What the comments after `print` say that it prints."""
    return re.findall(r"^ *print\(.*\)  # (.*)$", code, flags=re.MULTILINE)


@pytest.mark.slow
def test_the_page_on_handlers_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All blocks, one after the other, print what stands beside each `print`, and nothing else."""
    monkeypatch.chdir(tmp_path)
    code = "".join(blocks())
    exec(compile(code, str(WRITING_HANDLERS), "exec"), {"__name__": "page"})  # noqa: S102

    assert len(promised(code)) == 6
    assert capsys.readouterr().out.splitlines() == promised(code)


def test_each_kind_of_handler_has_code() -> None:
    """Five lines, state, agreement over ranks, the stages of an event and the end of a run: each section runs something."""
    headings = re.findall(r"^## (.*)$", WRITING_HANDLERS.read_text(encoding="utf-8"), flags=re.MULTILINE)

    assert len(headings) == 5
    assert [heading for heading in headings if not promised("".join(blocks(heading)))] == []


def _agree_on_this_rank() -> tuple[list[str], int]:
    """Runs the section on agreement with the model on several ranks; returns what it prints and the steps."""
    preparation, (agreement,) = blocks()[0], blocks("Agreeing over ranks")
    plain = "model = torch.nn.Linear(3, 1)"
    assert preparation.count(plain) == 1
    printed: list[str] = []
    names: dict[str, Any] = {"print": lambda *values: printed.append(" ".join(map(str, values)))}
    exec(preparation.replace(plain, "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))"), names)  # noqa: S102
    exec(agreement, names)  # noqa: S102
    return printed, names["trainer"].state.num_steps


@pytest.mark.slow
def test_a_piggyback_agrees_over_ranks() -> None:
    """Each of two ranks drops one sample in each update, so that the limit of 5 is passed on both in the third."""
    assert (
        run_ranks(_agree_on_this_rank) == [(["6 samples were dropped, more than limit=5; look at the data", "2 steps"], 2)] * 2
    )
