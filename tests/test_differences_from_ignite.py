"""The code of docs/differences-from-ignite.md runs as printed, and the list of Ignite's tests that fail keeps to the page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/differences-from-ignite.md"

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="looks at a checkout, and here is none")


def _headings() -> list[str]:
    return re.findall(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the command `make ignite-suite`."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "ignite_suite"))
    import run  # type: ignore[import-not-found]

    yield run
    sys.modules.pop("run", None)


def test_the_page_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """All blocks print what stands beside each `print`; one in a loop prints each word of its comment."""
    code = "".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL))
    exec(compile(code, str(PAGE), "exec"), {"__name__": "page"})  # noqa: S102
    promised = re.findall(r"^( *)print\(.*\)  # (.*)$", code, flags=re.MULTILINE)
    lines = [line for indent, text in promised for line in (text.split() if indent else [text])]

    assert len(promised) == 12
    assert capsys.readouterr().out.splitlines() == lines


def test_counting_in_updates_comes_first() -> None:
    """What differs for each user of accumulation is what the page begins with."""
    assert _headings()[0] == "An iteration is an update, not a batch"


def test_each_test_in_the_list_has_a_heading(suite: Any) -> None:
    """The list of Ignite's tests that may fail gives no reason that is not on the page."""
    listed = suite.differences()
    assert len(listed) > 50
    assert {heading for heading in listed.values() if heading not in _headings()} == set()


def test_the_suite_reports_what_differs_from_the_list(suite: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A failure that is not listed, and a listed test that passes, are errors; one that fails with stock too is not."""
    listed = {"engine/t.py::a": "why", "engine/t.py::b[1-*": "why"}
    fine = {"engine/t.py::a[x]": ("failed", ""), "engine/t.py::b[1-2]": ("failed", ""), "engine/t.py::b[2-2]": ("passed", "")}
    assert suite.report(fine, {}, listed) == 0
    assert "engine: 2 differ, 1 passed" in capsys.readouterr().out

    assert suite.report({"engine/t.py::ab": ("failed", "it broke")}, {}, listed) == 1
    assert "fails, and is not in the list: engine/t.py::ab: it broke" in capsys.readouterr().out
    assert suite.report({"engine/t.py::a": ("passed", "")}, {}, listed) == 1
    assert "passes, and is in the list under 'why': engine/t.py::a" in capsys.readouterr().out

    same = {"engine/t.py::c": ("failed", "no package")}
    assert suite.report(same, same, listed) == 0
    assert suite.report(same, {"engine/t.py::c": ("passed", "")}, listed) == 1


def test_the_adaptor_is_an_engine(suite: Any) -> None:
    """The trainer that takes the place of Ignite's engine calls the process function, and starts again where Ignite does."""
    from trainer_as_engine import TrainerAsEngine  # type: ignore[import-not-found]

    seen: list[int] = []
    engine = TrainerAsEngine(lambda engine, batch: seen.append(batch))
    for _ in range(2):
        engine.run([1, 2], max_epochs=2)
        assert (engine.state.epoch, engine.state.iteration, engine.state.num_steps) == (2, 4, 4)
    assert seen == [1, 2, 1, 2] * 2


DIFFERENT_BLOCKS = {"ignite.engine.engine:terminate": "A run that was stopped continues where it was"}


@pytest.mark.nightly
def test_the_code_in_ignites_documentation_does_the_same(tmp_path: Path) -> None:
    """What the docstrings of the installed engine and handlers print, a trainer prints too, but for what the page says.

    Blocks that do not run with Ignite's own engine are left out: they have gaps, or need packages such as wandb.
    """
    script = Path(__file__).parent / "ignite_suite/documentation.py"
    stock, ours = (
        json.loads(
            subprocess.run(
                [sys.executable, str(script), kind], capture_output=True, text=True, timeout=250, check=True, cwd=tmp_path
            ).stdout.splitlines()[-1]
        )
        for kind in ("stock", "ours")
    )
    ran = {name: printed for name, (outcome, printed) in stock.items() if outcome == "ran"}
    assert len(ran) >= 60
    different = {name.rpartition(":")[0].rpartition(":")[0] for name, printed in ran.items() if ours[name] != ["ran", printed]}
    assert different == set(DIFFERENT_BLOCKS)
    assert set(DIFFERENT_BLOCKS.values()) <= set(_headings())


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("release", ["installed", "newest-pre-release"])
def test_ignites_own_tests_fail_where_the_list_says(release: str) -> None:
    """`make ignite-suite`, for the engine and the handlers. Needs a package index, or for the installed one IGNITE_SOURCE."""
    command = [sys.executable, str(Path(__file__).parent / "ignite_suite/run.py"), "engine", "handlers"]
    command += ["--pre"] if release != "installed" else []
    result = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
