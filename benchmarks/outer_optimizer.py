"""Writes the table of replicas that train on their own into docs/distributed.md: loss, and bytes between the ranks, by H.

    python benchmarks/outer_optimizer.py                    # trains, and writes
    python benchmarks/outer_optimizer.py --seeds 1 --print  # only shows the table

Two ranks learn scikit-learn's handwritten digits, with AdamW on each rank, beside a run that reduces the gradients in each
update. Every H updates the ranks take the mean of the replicas (local SGD), or make the step of DiLoCo's outer optimizer, which
has Nesterov's momentum 0.9 and the rate 0.7. All runs of a seed have the same first weights and the same samples in the same
order. Bytes are those that a rank gives to collectives in training, as `count_traffic` counts them.
"""

import json
import logging
import statistics
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import ignite.distributed as idist
import torch
import torch.nn.functional as F  # noqa: N812
import typer
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer import Option

from ignite_train import ForwardOutput, ResumableLoader, Traffic, UpdateOptions, count_traffic, create_evaluator, create_trainer
from ignite_train.handlers import OuterOptimizer
from interleaving import table

PAGE = Path(__file__).parent.parent / "docs/distributed.md"
BEGIN, END = "<!-- written by benchmarks/outer_optimizer.py -->\n", "<!-- end -->\n"
HEAD = (
    "gradients cross the ranks",
    "training loss",
    "test loss",
    "test accuracy",
    "bytes of weights or gradients",
    "all bytes",
)
MEAN, DILOCO = "the mean of the replicas", "DiLoCo"
SETTINGS = ((0, ""), (1, MEAN), (8, MEAN), (32, MEAN), (8, DILOCO), (32, DILOCO))  # H; 0: gradients are reduced in each update
UPDATES, BATCH_SIZE, WEIGHTS = 128, 32, 10_000  # a collective of more bytes than WEIGHTS carries weights or gradients


def data() -> tuple[TensorDataset, TensorDataset]:
    """Images to train on, and every fifth to test on."""
    images, labels = load_digits(return_X_y=True)
    arrays = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    x, x_test, y, y_test = map(torch.from_numpy, arrays)
    return TensorDataset(x.float() / 16, y), TensorDataset(x_test.float() / 16, y_test)


def forward(model: nn.Module, batch: Any) -> ForwardOutput:
    """Cross entropy, and the number of right answers."""
    x, y = batch
    logits = model(x)
    return ForwardOutput(F.cross_entropy(logits, y, reduction="sum"), len(y), {"accuracy": (logits.argmax(-1) == y).sum()})


def outer_optimizer(method: str, model: nn.Module) -> torch.optim.Optimizer:
    """That of a method."""
    if method == MEAN:
        return torch.optim.SGD(model.parameters(), lr=1.0)
    return torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)


def train(every: int, method: str, seed: int) -> dict[str, float]:
    """One run, by all ranks, and what it came to."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))
    options = UpdateOptions(reduction="local" if every else "explicit")
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trainer = create_trainer(model, inner, forward, seed=seed, options=options, protect=False)
    if every:
        OuterOptimizer(outer_optimizer(method, model), every=every).attach(trainer)
    train_set, test_set = data()
    counting = count_traffic("cpu") if seed == 1 else nullcontext(Traffic())  # counting takes time, and seeds send the same
    with counting as traffic:
        trainer.run(ResumableLoader(train_set, BATCH_SIZE, shuffle=True, seed=seed), max_iters=UPDATES)
    evaluator, scores = create_evaluator(model, forward), []
    for samples in (train_set, test_set):
        evaluator.run(DataLoader(samples, batch_size=512) if idist.get_rank() == 0 else [])
        scores.append(dict(evaluator.state.metrics))
    sizes = [collective.num_bytes for collective in traffic.collectives]
    return {
        "training loss": scores[0]["loss"],
        "test loss": scores[1]["loss"],
        "accuracy": scores[1]["accuracy"],
        "weights": sum(size for size in sizes if size > WEIGHTS),
        "all": sum(sizes),
    }


def train_all(_local_rank: int, seeds: int, result: str) -> None:
    """All runs, one after the other, on each of the ranks; rank 0 writes what they came to."""
    torch.set_num_threads(1)
    logging.getLogger("ignite_train").setLevel(logging.ERROR)
    found = [[train(every, method, seed) for seed in range(1, seeds + 1)] for every, method in SETTINGS]
    if idist.get_rank() == 0:
        Path(result).write_text(json.dumps(found), encoding="utf-8")


def row(every: int, method: str, runs: list[dict[str, float]]) -> list[str]:
    """The means over the seeds, and the range of the losses."""

    def mean(name: str, digits: int) -> str:
        values = [run[name] for run in runs]
        spread = f" ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(values) > 1 else ""
        return f"{statistics.mean(values):.{digits}f}{spread}"

    what = 'in each update (`reduction="explicit"`)' if every == 0 else f"every H = {every} updates: {method}"
    bytes_of = [f"{runs[0][name]:,.0f}" for name in ("weights", "all")]
    return [what, mean("training loss", 4), mean("test loss", 3), mean("accuracy", 3), *bytes_of]


def main(
    seeds: Annotated[int, Option(help="Runs of each setting.")] = 3,
    *,
    only_print: Annotated[bool, Option("--print", help="Show the table and do not write it.")] = False,
) -> None:
    """Trains with each H and writes the table."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        with idist.Parallel(backend="gloo", nproc_per_node=2) as parallel:
            parallel.run(train_all, seeds, str(result))
        found = json.loads(result.read_text(encoding="utf-8"))
    text = table(HEAD, [row(*setting, runs) for setting, runs in zip(SETTINGS, found, strict=True)])
    print(text)
    if not only_print:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        note = f"\n\n{UPDATES} updates of two ranks, {BATCH_SIZE} samples on each; means of {seeds} seeds, and their range.\n"
        PAGE.write_text(f"{before}{BEGIN}{text}{note}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
