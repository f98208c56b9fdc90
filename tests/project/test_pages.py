"""Each block of Python on a page of docs/ is run by a test; here are those that no other file runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import nn
from torch.nn.functional import cross_entropy

from ignite_train import ForwardOutput, create_trainer
from ignite_train.plan import Run, plan

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HERE = {"reliability.md", "scaling.md"}

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="looks at a checkout, and here is none")


def blocks(page: str) -> list[str]:
    """The Python of a page; a block that is marked `py` is not run: it needs what this library does not bring."""
    path = ROOT / page if page == "README.md" else ROOT / "docs" / page
    return re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_each_page_with_code_has_a_test() -> None:
    """A test of another file names the page, or the page is one of those below."""
    tests = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)}
    with_code = {path.name for path in PAGES if blocks(path.name)}

    assert len(with_code) > 10
    assert {page for page in with_code - HERE if not any(page in text for text in tests.values())} == set()
    assert with_code >= HERE


def test_what_forward_carries() -> None:
    """The block of docs/reliability.md on a small recurrent network, whose state begins again in each epoch."""
    (block,) = [block for block in blocks("reliability.md") if "carried" in block]
    model, starts = nn.GRU(3, 5, batch_first=True), list[bool]()

    def network(x: Any, hidden: Any) -> Any:
        starts.append(hidden is None)
        return model(x, hidden)

    names: dict[str, Any] = {
        "Events": Events,
        "ForwardOutput": ForwardOutput,
        "create_trainer": lambda model, optimizer, forward: create_trainer(
            model, optimizer, lambda model, micro_batch: forward(network, micro_batch)
        ),
        "cross_entropy": cross_entropy,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    exec(compile(block, "docs/reliability.md", "exec"), names)  # noqa: S102
    data = [(torch.randn(2, 4, 3), torch.randint(5, (2, 4))) for _ in range(3)]
    names["trainer"].run(data, max_epochs=2)

    assert starts[-6:] == [True, False, False] * 2
    assert names["trainer"].state.carried["hidden"].shape == (1, 2, 5)


def test_the_calculator_as_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    """The block of docs/scaling.md, whose result another save would change."""
    (block,) = blocks("scaling.md")
    exec(compile(block, "docs/scaling.md", "exec"), {})  # noqa: S102
    result = plan(Run(updates=100_000, compute=8.0, ranks=64, gradients=5e9, bandwidth=20e9, mtbf=2000, save=30.0))

    assert capsys.readouterr().out == f"Checkpoint(every={result.every}), goodput {result.goodput:.3f}\n"
