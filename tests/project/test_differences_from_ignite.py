"""The code of docs/differences-from-ignite.md runs as printed, and the list of Ignite's tests that fail keeps to the page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ignite.engine import Events

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/differences-from-ignite.md"
SUITE = ROOT / "tests/ignite_suite/run.py"

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="looks at a checkout, and here is none")


def _headings() -> list[str]:
    return re.findall(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the command `make ignite-suite`."""
    monkeypatch.syspath_prepend(str(SUITE.parent))
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
    of_documentation = {entry["heading"] for entry in suite.read_list()["documentation"]}
    assert {heading for heading in {*listed.values(), *of_documentation} if heading not in _headings()} == set()


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


def test_documentation_reports_what_differs_from_the_list(
    suite: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A block must be listed that does something else, or does not run with Ignite's own engine; a listed one must differ."""
    listed = {"documentation": [{"heading": "why", "blocks": ["a:1"]}], "left_out": [{"reason": "r", "blocks": ["b:1"]}]}
    ran, other, failed = ["ran", "1"], ["ran", "2"], ["failed", "NameError: x"]
    monkeypatch.setattr(suite, "read_list", lambda: listed)

    def report(stock: dict[str, Any], ours: dict[str, Any]) -> tuple[int, str]:
        monkeypatch.setattr(suite, "blocks_of", lambda kind, *_: stock if kind == "stock" else ours)
        return suite.documentation(Path()), capsys.readouterr().out

    fine = {"a:1": ran, "b:1": failed, "c:1": ran}, {"a:1": other, "b:1": failed, "c:1": ran}
    assert report(*fine) == (0, "documentation: 3 blocks, 1 do the same, 1 differ, 1 are left out\n\n")
    assert report(fine[0], fine[1] | {"c:1": other})[0] == 1
    assert report(fine[0], fine[1] | {"c:1": failed})[0] == 1
    assert report(fine[0], fine[1] | {"a:1": ran})[0] == 1
    assert report(fine[0] | {"c:1": failed}, fine[1])[0] == 1


def test_what_is_not_python_in_the_documentation_is_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies of comments alone, printed lines, `...` for a value and for more arguments, a parenthesis too many."""
    monkeypatch.syspath_prepend(str(SUITE.parent))
    from stand_ins import Namespace, repaired  # type: ignore[import-not-found]

    code = """
model = ...
engine = Engine(...)
@engine.on(Events.STARTED)
def start(engine)
    # something
def end():
    # something

made = dict(model=model, ...)
print(type(made["model"]).__name__))
> Sequential
"""
    names = Namespace()
    exec(repaired(code), names)  # noqa: S102
    assert names["start"](None) is names["end"]() is None
    assert names["made"] == {"model": names["model"]}
    assert names["engine"].run([1, 2]).iteration == 2
    with pytest.raises(SyntaxError):
        repaired("for each of them:: it runs")


def test_the_adaptor_is_an_engine(suite: Any) -> None:
    """The trainer that takes the place of Ignite's engine calls the process function, and starts again where Ignite does."""
    from trainer_as_engine import TrainerAsEngine  # type: ignore[import-not-found]

    seen, shown = list[int](), list[int]()
    engine = TrainerAsEngine(lambda engine, batch: seen.append(batch))
    engine.add_event_handler(Events.ITERATION_STARTED, lambda: shown.append(engine.state.batch))
    for _ in range(2):
        engine.run([1, 2], max_epochs=2)
        assert (engine.state.epoch, engine.state.iteration, engine.state.num_steps) == (2, 4, 4)
    assert seen == shown == [1, 2, 1, 2] * 2


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("release", ["installed", "newest-pre-release"])
def test_ignites_own_tests_fail_where_the_list_says(release: str) -> None:
    """`make ignite-suite`, for the engine and the handlers. Needs a package index, or for the installed one IGNITE_SOURCE."""
    command = [sys.executable, str(SUITE), "engine", "handlers"]
    command += ["--pre"] if release != "installed" else []
    result = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_code_in_ignites_documentation_does_the_same() -> None:
    """README, pages and docstrings: what they print, save and send to trackers, but for what the page says.

    Blocks that do not run with Ignite's own engine are listed with the reason. Needs a package index, or IGNITE_SOURCE.
    """
    result = subprocess.run(
        [sys.executable, str(SUITE), "documentation"], capture_output=True, text=True, timeout=1700, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    found = re.search(r"(\d+) blocks, (\d+) do the same", result.stdout)
    assert found is not None
    assert int(found[2]) > 280
