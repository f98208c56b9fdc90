"""The code in README.md and docs/performance.md runs as it is printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PERFORMANCE = ROOT / "docs/performance.md"

# As torch compiles by default, but without a C++ compiler's minute.
QUICKLY = """
import torch._inductor.compile_fx
from torch._dynamo.backends.debugging import aot_eager
torch._inductor.compile_fx.compile_fx = lambda graph, inputs, **_: aot_eager(graph, inputs)
"""


def blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_the_quickstart_runs_as_printed(tmp_path: Path) -> None:
    """The first block is at most 25 lines, on the first screen, and learns what its data hold; the others go on."""
    quickstart, own_handler, going_on = blocks(README)
    assert len(quickstart.splitlines()) <= 25
    assert README[: README.index("```python")].count("\n") < 30
    script = tmp_path / "quickstart.py"
    go_on = (
        "\nfrom ignite_train import TrainEvents\n"
        + own_handler
        + "\ntrainer.run(DataLoader(data, batch_size=32), max_epochs=4)\n"
        + going_on.replace("max_epochs=3", "max_epochs=5")
    )
    script.write_text("import torch\ntorch.manual_seed(0)\n" + quickstart + go_on, encoding="utf-8")
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, check=True, cwd=tmp_path)
    accuracies = [float(value) for value in re.findall(r"accuracy ([0-9.e-]+)", result.stdout)]
    assert len(accuracies) == 5
    assert accuracies[-1] > 0.9
    assert "finished after 96 updates (96 steps, 0 skipped) in 3 epochs" in result.stdout
    assert "100 {'weight': " in result.stdout
    assert [path.name for path in (tmp_path / "runs/first").iterdir()] == ["update-00000160"]


@pytest.mark.skipif(not PERFORMANCE.is_file(), reason="looks at a checkout, and this is none")
@pytest.mark.parametrize("compiler", ["quick", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_what_makes_it_fast_runs_as_printed(compiler: str, tmp_path: Path) -> None:
    """The blocks of docs/performance.md are one script; each `print(...)  # 1` in it prints what stands there."""
    printed = "".join(blocks(PERFORMANCE.read_text(encoding="utf-8")))
    script = tmp_path / "performance.py"
    script.write_text((QUICKLY if compiler == "quick" else "") + printed, encoding="utf-8")
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, check=True, cwd=tmp_path)
    promised = re.findall(r'^print\("([^"]+)", .*\)  # (\d+)', printed, flags=re.MULTILINE)

    assert len(promised) == 2
    assert [line for line in result.stdout.splitlines() if line.startswith(("graphs", "traces"))] == [
        f"{what} {number}" for what, number in promised
    ]
