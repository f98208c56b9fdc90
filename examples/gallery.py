"""Draws pictures of docs/gallery.md: killed runs and replicas, the cost of the loop beside other libraries, and how it grows.

python examples/gallery.py kills
python examples/gallery.py cost
python examples/gallery.py scaling
python examples/gallery.py elastic   # needs the package torchft
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib as mpl
import torch
import typer
from ignite.engine import Events
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from ignite_train import ForwardOutput, ResumableLoader, Trainer, UpdateOptions, create_trainer
from ignite_train.handlers import Checkpoint

mpl.use("Agg")  # draws to a file: no window, no display

import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs/pictures"
INK, OURS, OTHERS, KILL = "#1f2933", "#1d4e89", "#9bb8d9", "#c4572e"
UPDATES, KILLED_AFTER = 240, (70, 131, 190)
TOGETHER = 15  # updates that all replicas make before some of them are killed
VICTIMS = ((1,), (2,), (1, 2), ())  # killed in this order; at last none, and the run is stopped

app = typer.Typer(add_completion=False)


def forward(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> ForwardOutput:
    """Classifies points."""
    return ForwardOutput(cross_entropy(model(batch[0]), batch[1], reduction="sum"), sample_size=len(batch[1]))


@app.command(hidden=True)
def train(directory: Path, killed_after: int = 0) -> None:
    """Trains, or resumes, and writes the loss of each update; the process kills itself after one of them."""
    torch.manual_seed(0)
    x = torch.randn(1024, 8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    data = TensorDataset(x, (x @ torch.randn(8, 4)).argmax(1))
    loader = ResumableLoader(data, batch_size=32, shuffle=True, seed=0)
    trainer = create_trainer(model, torch.optim.AdamW(model.parameters(), lr=3e-3), forward)
    Checkpoint(directory, every=20, keep=2).attach(trainer)

    @trainer.on(Events.ITERATION_COMPLETED)
    def write(trainer: Trainer) -> None:
        with (directory / "losses.jsonl").open("a") as file:
            print(json.dumps([trainer.state.iteration, trainer.state.update_output.loss]), file=file)
        if trainer.state.iteration == killed_after:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.run(loader, max_iters=UPDATES)


def losses(directory: Path, kills: tuple[int, ...]) -> list[tuple[int, float]]:
    """Loss of each update, also of those that were made again, of a run that is killed after these updates."""
    directory.mkdir()
    for killed_after in (*kills, 0):
        command = [sys.executable, __file__, "train", str(directory), "--killed-after", str(killed_after)]
        status = subprocess.run(command, check=False).returncode  # noqa: S603
        if status != (-signal.SIGKILL if killed_after else 0):
            raise RuntimeError(f"the run ended with status {status}")
    return [tuple(json.loads(line)) for line in (directory / "losses.jsonl").read_text().splitlines()]


@app.command()
def kills(output: Path = PICTURES / "kills.png") -> None:
    """Draws a run that is killed three times over one that is not."""
    with tempfile.TemporaryDirectory() as folder:
        whole = dict(losses(Path(folder) / "whole", ()))
        killed = losses(Path(folder) / "killed", KILLED_AFTER)
    apart = sum(loss != whole[update] for update, loss in killed)
    print(f"{len(killed)} updates, {len(killed) - UPDATES} of them made again, {apart} with another loss")
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    axes.plot(list(whole), list(whole.values()), color=OTHERS, linewidth=4, label="never interrupted")
    axes.plot(*zip(*dict(killed).items(), strict=True), color=OURS, linewidth=1, label="killed three times and resumed")
    for update in KILLED_AFTER:
        axes.axvline(update, color=KILL, linestyle="--", linewidth=1, label="SIGKILL" if update == KILLED_AFTER[0] else None)
    axes.set(xlabel="update", ylabel="loss of the update")
    axes.legend(framealpha=1, edgecolor="none", loc="upper center")
    figure.savefig(output, dpi=110)


@app.command()
def cost(output: Path = PICTURES / "cost.png") -> None:
    """Draws the first table of benchmarks/results.md: time of an update, as a multiple of that of a loop by hand."""
    text = (
        (ROOT / "benchmarks/results.md")
        .read_text(encoding="utf-8")
        .partition("Accumulation 1:")[2]
        .partition("Accumulation 4:")[0]
    )
    rows = [(name.strip(" `"), float(ratio)) for name, ratio in re.findall(r"^\| ([^|]+) \| ([\d.]+) \(", text, re.MULTILINE)]
    rows = [(name.replace("`", ""), ratio) for name, ratio in rows if "once more" not in name]
    figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
    names, ratios = zip(*reversed(rows), strict=True)
    bars = axes.barh(names, ratios, color=[OURS if name.startswith("ignite_train") else OTHERS for name in names])
    axes.bar_label(bars, padding=3, color=INK, fmt="%.2f")
    axes.axvline(1.0, color=KILL, linewidth=1)
    axes.set(xlabel="time of an update", xlim=(0, 1.15 * max(ratios)))
    figure.savefig(output, dpi=110)


def _table(heading: str) -> list[list[float]]:
    """The numbers in the first three columns of a table of benchmarks/scaling.md."""
    text = (ROOT / "benchmarks/scaling.md").read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([\d,]+) \| (\d+) \| (\d+) \|", text, re.MULTILINE)
    return [[float(number.replace(",", "")) for number in row] for row in rows]


@app.command()
def scaling(output: Path = PICTURES / "scaling.png") -> None:
    """Draws three tables of benchmarks/scaling.md: time of an update against what it grows with."""
    figure, all_axes = plt.subplots(1, 3, figsize=(9, 3.2), layout="constrained")
    for axes, heading in zip(all_axes, ("Tensors", "Parameters", "Accumulation"), strict=True):
        numbers, by_hand, ours = zip(*_table(heading), strict=True)
        axes.loglog(numbers, [microseconds / 1000 for microseconds in by_hand], "s-", color=OTHERS, label="by hand")
        axes.loglog(numbers, [microseconds / 1000 for microseconds in ours], "o-", color=OURS, label="ignite_train")
        axes.set(xlabel="micro-batches" if heading == "Accumulation" else heading.lower())
    all_axes[0].set(ylabel="ms an update")
    all_axes[0].legend(frameon=False)
    figure.savefig(output, dpi=110)


@app.command(hidden=True)
def train_elastic(directory: Path) -> None:
    """Trains as one of several replicas, and writes the time, the number, the loss and the replicas of each update."""
    torch.manual_seed(0)
    x = torch.randn(3072, 8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    data = TensorDataset(x, (x @ torch.randn(8, 4)).argmax(1))
    options = UpdateOptions(reduction="elastic")
    trainer = create_trainer(model, torch.optim.AdamW(model.parameters(), lr=3e-3), forward, seed=0, options=options)
    own = directory / os.environ["IGNITE_TRAIN_REPLICA"]
    own.with_suffix(".pid").write_text(str(os.getpid()))

    @trainer.on(Events.ITERATION_COMPLETED)
    def write(trainer: Trainer) -> None:
        state = trainer.state
        row = [time.monotonic(), state.iteration, state.update_output.loss, state.metrics["replicas"]]
        with own.with_suffix(".jsonl").open("a") as file:
            print(json.dumps(row), file=file)
        time.sleep(0.3)  # an update of a larger model
        if (directory / "enough").exists():
            trainer.terminate()

    trainer.run(ResumableLoader(data, batch_size=16, shuffle=True, seed=0), max_epochs=1000)


def _rows(file: Path) -> list[list[float]]:
    """The rows that a replica has written so far, without a line that it is writing."""
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


def _kill_replicas(folder: Path) -> list[tuple[float, int]]:
    """Runs three replicas, and kills those in `VICTIMS`. Gives the time and the number of each that was killed."""
    killed, since, waiting = list[tuple[float, int]](), 0.0, list(VICTIMS)
    launcher = ["-m", "ignite_train.elastic", "--replicas", "3", "--heartbeat-ms", "1500", "--join-ms", "8000"]
    with subprocess.Popen([sys.executable, *launcher, __file__, "train-elastic", str(folder)]) as run:  # noqa: S603
        while run.poll() is None:
            latest = _rows(folder / "0.jsonl")[-TOGETHER:]
            if waiting and len(latest) == TOGETHER and latest[0][0] > since and all(row[3] == 3 for row in latest):
                since = time.monotonic()
                for number in waiting.pop(0):
                    os.kill(int((folder / f"{number}.pid").read_text()), signal.SIGKILL)
                    killed.append((since, number))
                if not waiting:
                    (folder / "enough").touch()
            time.sleep(0.05)
    if run.returncode:
        raise RuntimeError(f"the run ended with status {run.returncode}")
    return killed


@app.command()
def elastic(output: Path = PICTURES / "elastic.png") -> None:
    """Draws three replicas of which two are killed, one after the other and together, and start again."""
    with tempfile.TemporaryDirectory() as name:
        killed = _kill_replicas(Path(name))
        rows = [_rows(Path(name) / f"{number}.jsonl") for number in range(3)]
    first = rows[0][0][0]
    updates = [int(row[1]) for row in rows[0]]  # of the one that is never killed
    in_order = updates == list(range(1, len(updates) + 1))
    losses_of = {int(update): loss for _, update, loss, _ in rows[0]}
    apart = sum(loss != losses_of[int(update)] for of_one in rows for _, update, loss, _ in of_one)
    print(
        f"{len(killed)} replicas killed, {len(updates)} updates, each once: {in_order}, {apart} losses differ between replicas"
    )
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(7, 4.2), layout="constrained", sharex=True, gridspec_kw={"height_ratios": [2, 1]}
    )
    above.plot([row[0] - first for row in rows[0]], [row[2] for row in rows[0]], color=OURS, linewidth=1)
    below.eventplot([[row[0] - first for row in of_one] for of_one in rows], colors=OURS, linelengths=0.6, linewidths=0.5)
    for when, number in killed:
        below.plot(when - first, number, "X", color=KILL, markersize=9)
        above.axvline(when - first, color=KILL, linestyle="--", linewidth=1)
    above.set(ylabel="loss of the update")
    below.set(
        ylabel="replica",
        xlabel="seconds; below, each line is an update of a replica, and each cross a SIGKILL",
        yticks=[0, 1, 2],
    )
    figure.savefig(output, dpi=110)


if __name__ == "__main__":
    app()
