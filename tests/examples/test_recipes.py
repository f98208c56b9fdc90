"""The recipes are the loops by hand, on two processes too, and resume bitwise after SIGKILL; libraries' trainers agree.

They run in the environments that `make libraries` and `make recipes` make, and are skipped where these are not there.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from libraries import run
from processes import DEADLINE_SECONDS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/recipes.md"
SCRIPTS = ("finetune_lora", "train_vit", "segment_monai")
NAMES = (*SCRIPTS, "dpo", "grpo", "ppo")  # the programs are started, killed and resumed by tests of their own
OTHER_ON_RANKS = "train_vit"  # it draws its mixture on each process
# As a script that is started, with torchvision, which timm imports, beside a torch for CPUs.
AS_STARTED = """
import runpy, sys
from libraries.harness import let_torchvision_be_imported
let_torchvision_be_imported()
del sys.argv[0]  # of this; the script is next, and reads its options
runpy.run_path(sys.argv[0], run_name="__main__")
"""

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="looks at a checkout, and here is none")


def recipes() -> Any:
    if str(ROOT / "benchmarks") not in sys.path:
        sys.path.insert(0, str(ROOT / "benchmarks"))
    return importlib.import_module("recipes")


def python_of(name: str) -> Path:
    library = recipes().RECIPES[name].library
    if library is None:
        return Path(sys.executable)
    if not (run.ENVIRONMENTS / library / "installed").exists():
        pytest.skip(f"{library} is not installed; make libraries LIBRARIES={library}")
    return run.ENVIRONMENTS / library / "bin/python"


@pytest.mark.nightly
@pytest.mark.timeout(4 * DEADLINE_SECONDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_the_loop_by_hand(name: str) -> None:
    """In float64 its curve is equal to rounding: with our trainer, on two processes, and with the library's trainer."""
    found = recipes().measured(name, python_of(name), recipes().RECIPES[name].compared, 0)

    assert found["resumed bitwise"] or name not in SCRIPTS
    assert found["ranks are equal"]
    contestants = {"ours", *(["its own trainer"] if name in recipes().TRAINERS else [])}
    assert {*found["curve"]} == {*contestants, "ours on two processes"}
    for who in contestants | ({"ours on two processes"} if name != OTHER_ON_RANKS else set()):
        assert found["curve"][who] < 1e-6, who
        assert found["weights"][who] < 1e-4, who


@pytest.mark.nightly
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_recipe_runs_as_it_is_started(name: str, tmp_path: Path) -> None:
    """It says how it went, and leaves a checkpoint."""
    folders = os.pathsep.join(str(folder) for folder in (ROOT, ROOT / "tests", ROOT / "tests/support", ROOT / "examples"))
    environment = {**os.environ, "PYTHONPATH": folders, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [
        python_of(name),
        "-c",
        AS_STARTED,
        ROOT / f"examples/{name}.py",
        "--epochs",
        "1",
        "--directory",
        tmp_path / "run",
    ]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)

    assert ended.returncode == 0, ended.stderr
    assert "in 1 epoch" in ended.stdout + ended.stderr
    assert [*(tmp_path / "run").glob("update-*")]


@pytest.mark.slow
def test_the_table_has_the_lines_of_today() -> None:
    """Each recipe has a row for each who trains it, and fits on a few pages."""
    rows = re.findall(r"^\| (?:\[`(\w+)`\]\S+)? *\| ([^|]+) \| (\d+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    names, counted = iter(NAMES), dict[str, list[int]]()
    for name, _, number in rows:
        counted.setdefault(next(names) if name else [*counted][-1], []).append(int(number))

    assert counted == {name: [*recipes().lines(name).values()] for name in NAMES}
    sizes = {name: len((ROOT / recipes().script(name)).read_text(encoding="utf-8").splitlines()) for name in NAMES}
    assert all(60 <= size <= 150 for size in sizes.values()), sizes
