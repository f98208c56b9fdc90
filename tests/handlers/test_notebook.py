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


CELLS = (
    """
import torch
from ignite_train import attach_defaults, create_evaluator, create_trainer
from ignite_train.handlers import Checkpoint, Validation
from ignite_train.plot import plot_runs, read_curves

data, broken = [torch.ones(2, 3)] * 6, [True]

def forward(model, x):
    if broken and trainer.state.iteration == 4:
        raise KeyboardInterrupt
    return model(x).square().mean()

def make():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward)
    evaluator = create_evaluator(model, lambda model, x: model(x).square().mean())
    attach_defaults(trainer, directory="run", evaluator=evaluator, leave_out=("tensorboard",))
    Validation(evaluator, data).attach(trainer)
    Checkpoint("run", every=2).attach(trainer)
    return trainer

trainer = make()
""",
    "trainer.run(data, max_epochs=2)  # interrupted",
    "broken.clear()",
    "state = trainer.run(data, max_epochs=2)",
    "weights = trainer.model.weight.detach().clone()\ntrainer",
    "trainer = make()\nstate = trainer.run(data, max_epochs=3)",
    "print(state.iteration, state.num_steps, bool(torch.isfinite(weights).all()))",
    "from IPython.display import Image\nplot_runs({'run': read_curves('run')}, 'curves.png')\nImage('curves.png')",
)


def test_a_whole_notebook(tmp_path: Path) -> None:
    """Run, interrupted, edited, run again, and resumed by a trainer that is made again; plots are inline."""
    import nbclient
    import nbformat

    cells = [nbformat.v4.new_code_cell(code) for code in CELLS]
    patience = dict.fromkeys(("timeout", "startup_timeout", "iopub_timeout"), int(DEADLINE_SECONDS))
    resources = {"metadata": {"path": str(tmp_path)}}
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, kernel_name="python3", resources=resources, allow_errors=True, **patience).execute()
    texts = ["".join(one.get("text", "") or str(one.get("data", one)) for one in cell.outputs) for cell in notebook.cells]
    errors = [[one["ename"] for one in cell.outputs if one.output_type == "error"] for cell in notebook.cells]
    assert errors == [[], ["KeyboardInterrupt"], [], [], [], [], [], []], texts
    assert texts[1].startswith("Linear, 4 parameters, on cpu in fp32, SGD\n")
    assert "12 updates in 2 epochs: 1 micro-batch each\n" in texts[1]
    assert "continues after update 3" in texts[3]
    assert "epoch 1/2" in texts[3]
    assert "finished after 12 updates (12 steps, 0 skipped) in 2 epochs, 9 updates in this run" in texts[3]
    assert "<b>Trainer(Linear, SGD" in texts[4]
    assert "resumed after update 12 from " in texts[5]
    assert "18 18 True" in texts[6]
    assert "image/png" in texts[7]


def test_bars_are_widgets(tmp_path: Path) -> None:
    """One for the training, which counts its updates, and one for all validations; lines and the table are text."""
    bars, _, text = outputs_of("auto", tmp_path)
    assert sorted(bar["max"] for bar in bars) == [6.0, 12.0]
    assert "validation after update 12" in text
    assert "finished after 12 updates" in text
    assert "%|" not in text, "no bar of characters"


def test_lines_are_text(tmp_path: Path) -> None:
    """So the test above can fail."""
    bars, shown, text = outputs_of("simple", tmp_path)
    assert bars == shown == []
    assert "finished after 12 updates" in text
