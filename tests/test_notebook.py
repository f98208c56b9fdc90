"""In a notebook the bars are tqdm's widgets. Needs ipywidgets, ipykernel and nbclient, which the environment does not have."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from processes import DEADLINE_SECONDS

NEEDED = ("ipywidgets", "ipykernel", "nbclient")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
WIDGET = "application/vnd.jupyter.widget-view+json"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * DEADLINE_SECONDS),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: pip install {' '.join(NEEDED)}"),
]

TRAINING = """
import torch
from ignite_train import create_evaluator, create_trainer
from ignite_train.handlers import ProgressLog, Validation

model = torch.nn.Linear(3, 1)
forward = lambda model, x: model(x).square().mean()
trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward)
evaluator = create_evaluator(model, forward)
ProgressLog({style!r}).attach(trainer, evaluator=evaluator)
data = [torch.ones(2, 3)] * 6
Validation(evaluator, data).attach(trainer)
state = trainer.run(data, max_epochs=2)
"""


def outputs_of(style: str, folder: Path) -> tuple[list[dict[str, Any]], list[str], str]:
    """What a cell that trains leaves in a notebook: the widgets that were made, those in its output, and its text."""
    import nbclient
    import nbformat

    code = TRAINING.format(style=style)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    patience = dict.fromkeys(("timeout", "startup_timeout", "iopub_timeout"), int(DEADLINE_SECONDS))
    client = nbclient.NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": str(folder)}}, **patience)
    client.execute()
    (done,) = notebook.cells
    made = [state for state in client.widget_state.values() if state.get("_model_name") == "FloatProgressModel"]
    text = "".join(output.get("text", "") for output in done.outputs)
    return made, [kind for output in done.outputs for kind in output.get("data", {}) if kind == WIDGET], text


def test_bars_are_widgets(tmp_path: Path) -> None:
    """One for the training, which counts its updates, and one for each validation; lines and the table are text."""
    bars, _, text = outputs_of("auto", tmp_path)
    assert sorted(bar["max"] for bar in bars) == [6.0, 6.0, 12.0]
    assert "validation after update 12" in text
    assert "finished after 12 updates" in text
    assert "%|" not in text, "no bar of characters"


def test_lines_are_text(tmp_path: Path) -> None:
    """So the test above can fail."""
    bars, shown, text = outputs_of("simple", tmp_path)
    assert bars == shown == []
    assert "finished after 12 updates" in text
