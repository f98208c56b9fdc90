"""Each step of docs/start.md is the script before it with the marked lines, and runs; the page shows what is printed."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import steps
from processes import DEADLINE_SECONDS

pytestmark = pytest.mark.skipif(not steps.PAGE.is_file(), reason="looks at a checkout, and here is none")

STEPS = [
    "The first run",
    "Validation",
    "The best checkpoint, and resuming",
    "Early stopping",
    "A learning-rate schedule",
    "A dashboard",
    "Two processes",
    "A cluster",
]


def _run(script: str, folder: Path, *launcher: str) -> str:
    (folder / "train.py").write_text(script, encoding="utf-8")
    command = [sys.executable, *launcher, "train.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=True).stdout


def _form(line: str) -> str:
    """A line without what differs from machine to machine: digits, how many spaces, and the unit of a number."""
    return re.sub(r"[\d.]+[km]?", "#", re.sub(r"\s+", " ", line)).strip()


@pytest.mark.slow
def test_the_first_run_prints_what_the_page_shows(tmp_path: Path) -> None:
    """At most 25 lines, and each line that the page shows is printed, in its order, but for digits."""
    script = steps.scripts()["The first run"]
    shown = re.search(r"^```text\n(.*?)^```", steps.PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[1]
    printed = iter([_form(line) for line in _run(script, tmp_path).splitlines()])

    assert len(script.splitlines()) <= 25
    assert [line for line in shown.splitlines() if line != "..." and _form(line) not in printed] == []


def test_each_step_is_the_one_before_with_marked_lines() -> None:
    """The steps that the page has; each is Python, and changes at most eight lines."""
    scripts = steps.scripts()
    for heading, script in scripts.items():
        compile(script, heading, "exec")

    lines = [set(script.splitlines()) for script in scripts.values()]
    assert list(scripts) == STEPS
    assert max(len(after - before) for before, after in itertools.pairwise(lines)) <= 8
    with pytest.raises(ValueError, match="does not have these lines once"):
        steps.changed("a = 1\n", " a = 2\n+b = 3\n")


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("heading", STEPS[1:6])
def test_each_step_runs(heading: str, tmp_path: Path) -> None:
    """In one process, and learns what its data hold."""
    printed = _run(steps.scripts()[heading], tmp_path)
    accuracies = [float(value) for value in re.findall(r"accuracy ([0-9.]+)", printed)]

    assert max(accuracies) > 0.85
    assert ("validation" in printed) == (heading != "The first run")


@pytest.mark.nightly
@pytest.mark.parametrize("heading", STEPS[6:])
def test_two_processes_train_as_one_does(heading: str, tmp_path: Path) -> None:
    """The last lines of both runs have the same numbers, to the digits that are printed; a finished run has nothing to do."""
    script = steps.scripts()[heading]
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    printed = []
    for name, launcher in (("one", ()), ("two", torchrun)):
        (tmp_path / name).mkdir()
        printed.append(_run(script, tmp_path / name, *launcher))
    losses = [re.findall(r"update +\d+/\d+ +loss ([0-9.]+)", text) for text in printed]

    assert len(losses[0]) > 10
    assert [float(loss) for loss in losses[1]] == pytest.approx([float(loss) for loss in losses[0]], rel=0.02)
    assert "0 updates in this run" in _run(script, tmp_path / "one", *torchrun)
