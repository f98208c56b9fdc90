"""The code in README.md and docs/performance.md runs as it is printed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from processes import DEADLINE_SECONDS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PERFORMANCE = ROOT / "docs/performance.md"

# As torch compiles by default, but without a C++ compiler's minute; and two equal blocks of the model in place of six.
SIX, TWO = "layers=6", "layers=2"
QUICKLY = """
import torch._inductor.compile_fx
from torch._dynamo.backends.debugging import aot_eager
torch._inductor.compile_fx.compile_fx = lambda graph, inputs, **_: aot_eager(graph, inputs)
"""

# Runs `python -m MODULE WORDS...` for each list of words, as if each had a process of its own.
ONE_AFTER_THE_OTHER = """
import ast, runpy, sys
for _, _, module, *words in ast.literal_eval(sys.argv[1]):
    sys.argv = [module, *words]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code:
            raise
"""


def blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def commands(text: str, beginning: str) -> list[list[str]]:
    """The words of each command line that begins so, without its comment."""
    return [
        shlex.split(line, comments=True)
        for line in re.findall(r"^\$ (.*)$", text, flags=re.MULTILINE)
        if line.startswith(beginning)
    ]


@pytest.mark.slow
def test_the_blocks_run_when_pasted_one_after_the_other(tmp_path: Path) -> None:
    """The Python of README in one process from top to bottom, as printed, and then the commands on what it has saved.

    The first block has at most 25 lines, on the first screen, and learns what its data hold.
    """
    assert len(blocks(README)[0].splitlines()) <= 25
    assert README[: README.index("```python")].count("\n") < 30
    pasted = "".join(blocks(README))
    seeded = f"import torch\ntorch.manual_seed(0)\n{pasted}"
    result = subprocess.run(
        [sys.executable, "-c", seeded], capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False, cwd=tmp_path
    )

    assert result.returncode == 0, result.stderr
    accuracies = [float(value) for value in re.findall(r"accuracy ([0-9.e-]+)", result.stdout)]
    assert len(accuracies) == 6  # each 32nd of 192 updates
    assert accuracies[2] > 0.9
    assert "finished after 96 updates (96 steps, 0 skipped) in 3 epochs" in result.stdout
    assert "100 {'weight': " in result.stdout
    assert "nothing to do" not in result.stdout + result.stderr
    assert sorted(path.name for path in (tmp_path / "runs/first").iterdir() if path.is_dir()) == [
        "update-00000100",
        "update-00000192",
    ]
    on_checkpoints = commands(README, "python -m ignite_train.checkpoint")
    one_process = [sys.executable, "-c", ONE_AFTER_THE_OTHER, repr(on_checkpoints)]
    subprocess.run(one_process, capture_output=True, timeout=DEADLINE_SECONDS, check=True, cwd=tmp_path)
    assert len(on_checkpoints) == 3
    assert (tmp_path / "model.pt").is_file()


@pytest.mark.nightly
@pytest.mark.skipif(not PERFORMANCE.is_file(), reason="looks at a checkout, and here is none")
@pytest.mark.parametrize("compiler", ["quick", "inductor"])
def test_what_makes_it_fast_runs_as_printed(compiler: str, tmp_path: Path) -> None:
    """The blocks of docs/performance.md are one script; each `print(...)  # 1` in it prints what stands there."""
    printed = "".join(blocks(PERFORMANCE.read_text(encoding="utf-8")))
    script = tmp_path / "performance.py"
    assert printed.count(SIX) == 1
    script.write_text(QUICKLY + printed.replace(SIX, TWO) if compiler == "quick" else printed, encoding="utf-8")
    result = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=True, cwd=tmp_path
    )
    promised = re.findall(r'^print\("([^"]+)", .*\)  # (\d+)', printed, flags=re.MULTILINE)

    assert len(promised) == 3
    assert [line for line in result.stdout.splitlines() if line.startswith(("graphs", "traces"))] == [
        f"{what} {number}" for what, number in promised
    ]
