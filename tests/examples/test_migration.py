"""docs/migration.md: its scripts are the files of tests/migration, which end at the same loss; its tables are long enough.

`make migration` runs those of the peers too, with the interpreter in `PEERS_PYTHON`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR

from processes import DEADLINE_SECONDS

FOLDER = Path(__file__).parents[1] / "migration"
PAGE = FOLDER.parent.parent / "docs/migration.md"
# The scripts run in folders of their own, and `make migration` gives a path from the root of the checkout.
PEERS = str(Path(path).absolute()) if (path := os.environ.get("PEERS_PYTHON", "")) else ""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
LOOPS = FOLDER.parent.parent / "docs/programs.md"
# After each loop.
PRINTED = "\nprint('parameters', [number for one in model.parameters() for number in one.flatten().tolist()])\n"

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="looks at a checkout, and here is none")

with_peers = pytest.mark.skipif(not PEERS, reason="PEERS_PYTHON names no interpreter with the peers; see `make migration`")


def validation_loss(name: str, folder: Path, samples: int, python: str = sys.executable) -> float:
    """What the script prints at its end, with so many samples."""
    folder = folder / f"{name}-{samples}"  # Lightning would resume from the checkpoints of the other
    folder.mkdir()
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8").replace("96", str(samples))
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    printed = printed_by([python, *(TORCHRUN if name == "from_deepspeed" else []), f"{name}.py"], folder)
    return float(re.findall(r"^validation loss ([0-9.]+)$", printed, re.MULTILINE)[-1])


def printed_by(command: list[str], folder: Path) -> str:
    """The output of a command that is run in this folder."""
    paths = os.pathsep.join([str(FOLDER.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=True
    ).stdout


def by_hand(samples: int) -> float:
    """The run in plain torch, over whole batches of 16."""
    torch.manual_seed(0)
    x = torch.randn(samples, 4)
    y = (x @ torch.randn(4, 3)).argmax(1)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = CosineAnnealingLR(optimizer, T_max=18)
    for _ in range(3):
        for inputs, targets in zip(x.split(16), y.split(16), strict=True):
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        return cross_entropy(model(x), y).item()


@pytest.mark.parametrize("name", [path.stem for path in sorted(FOLDER.glob("*.py"))])
def test_the_page_prints_the_files(name: str) -> None:
    """Each script, without its first line."""
    code = (FOLDER / f"{name}.py").read_text(encoding="utf-8").partition('"""\n')[2].lstrip("\n")

    assert f"```py\n{code}```" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["Lightning", "Accelerate", "Hugging Face Trainer"])
def test_a_table_has_thirty_rows(name: str) -> None:
    """Each with words of theirs and ours."""
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")]

    assert len(rows) > 30
    assert {len(row) for row in rows} == {2}


@pytest.mark.nightly
@pytest.mark.parametrize("samples", [96, 90])
def test_ours_is_the_mean_over_samples(samples: int, tmp_path: Path) -> None:
    """Also where the last micro-batch is smaller; the page has the numbers. Ignite's is with equal micro-batches only."""
    exact = by_hand(samples)

    assert validation_loss("to_ignite_train", tmp_path, samples) == pytest.approx(exact, abs=1e-5)
    assert f"{exact:.5f}" in PAGE.read_text(encoding="utf-8")
    assert (validation_loss("from_ignite", tmp_path, samples) == pytest.approx(exact, abs=1e-5)) == (samples == 96)


@pytest.mark.nightly
@with_peers
@pytest.mark.parametrize("name", ["from_lightning", "from_accelerate", "from_trainer", "from_deepspeed"])
def test_the_peers_agree_where_micro_batches_are_equal(name: str, tmp_path: Path) -> None:
    """With 96 samples they end where we do; with 90 they end at the mean of means, which the page has too."""
    equal, unequal = (validation_loss(name, tmp_path, samples, PEERS) for samples in (96, 90))

    assert equal == pytest.approx(by_hand(96), abs=1e-5)
    assert abs(unequal - by_hand(90)) > 1e-3
    assert f"{unequal:.5f}" in PAGE.read_text(encoding="utf-8")


@pytest.mark.nightly
@with_peers
def test_the_loops_with_the_engine_of_deepspeed_make_our_updates(tmp_path: Path) -> None:
    """With a fixed number of micro-batches, and with one that varies; other tests have a stand-in for the engine."""
    text = LOOPS.read_text(encoding="utf-8")
    preamble = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[0]
    section = text.partition("\n## The loop of DeepSpeed\n")[2].partition("\n## ")[0]
    ended = []
    for kind, command in (("py", [PEERS, *TORCHRUN]), ("python", [sys.executable])):
        loops = re.findall(rf"```{kind}\n(.*?)```", section, flags=re.DOTALL)
        assert len(loops) == 2
        imported = "import deepspeed\n" if kind == "py" else ""
        code = PRINTED.join([f"{imported}{preamble}\n{loops[0]}", loops[1], ""])
        (tmp_path / f"{kind}.py").write_text(code, encoding="utf-8")
        printed = printed_by([*command, f"{kind}.py"], tmp_path)
        found = re.findall(r"^parameters (\[.*\])$", printed, re.MULTILINE)
        ended.append(torch.tensor([json.loads(numbers) for numbers in found]))

    assert ended[0].shape[0] == 2
    assert (ended[0][1] - ended[0][0]).abs().max() > 1e-3
    torch.testing.assert_close(ended[1], ended[0], rtol=1e-5, atol=1e-6)
