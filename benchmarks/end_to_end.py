"""Whole trainings, as a user runs them: wall time and peak memory, each contestant in a fresh process.

    python benchmarks/end_to_end.py

The models and the data are those of `examples/`, with the data through an ordinary DataLoader: the language model at small
settings to the same held-out loss, and the handwritten digits to the same accuracy. The time is that of training, without
imports and data preparation; memory is the peak of the whole process, and how much of it came while training.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

sys.path.append(str(Path(__file__).parent.parent / "examples"))

import torch
import typer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset
from typer import Option

import contestants
import peers
from contestants import REFERENCE, Contestant, Work
from ignite_train import ForwardOutput
from interleaving import MIN_REPETITIONS, Rounds, Spread, interleave, table

CONTESTANTS: dict[str, Contestant] = contestants.BY_HAND | {
    "ignite_train": contestants.ignite_train,
    "ignite_train, all handlers": contestants.ignite_train_with_handlers,
}
TASKS = {"language model": ("held-out bits per byte", 0.02), "digits": ("held-out accuracy", 0.01)}  # how far apart they may be
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Settings:
    """How long the trainings are."""

    updates: int
    width: int
    layers: int
    epochs: int


def memory(field: str) -> float:
    """MiB that this process has resident (VmRSS) or had at most (VmHWM); 0 where the system does not tell."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    return sum(int(line.split()[1]) * 1024 / MEBIBYTE for line in lines if line.startswith(field))


def loader_of(data: Dataset[Any], batch_size: int, *, batches: int) -> DataLoader[Any]:
    """Gives this many batches, drawn again in each epoch, in the same order to all contestants."""
    generator = torch.Generator().manual_seed(0)
    order: list[list[int]] = []
    while len(order) < batches:
        epoch = torch.randperm(len(data), generator=generator).tolist()  # type: ignore[arg-type]
        order += [epoch[begin : begin + batch_size] for begin in range(0, len(epoch), batch_size)]
    return DataLoader(data, batch_sampler=order[:batches])


def language_model(settings: Settings) -> tuple[Work, Any]:
    """The example's model and text, smaller, and the held-out bits per byte."""
    from language_model import GPT, cut_into_blocks, read_standard_library

    context, steps, samples = 64, 2, 16
    train_blocks, held_out = (cut_into_blocks(text, context) for text in read_standard_library(2_000_000))
    torch.manual_seed(0)
    model = GPT(context=context, layers=settings.layers, width=settings.width)

    def summed(model: nn.Module, micro_batch: tuple[Tensor], reduction: str) -> Tensor:
        inputs, targets = micro_batch[0][:, :-1].long(), micro_batch[0][:, 1:].flatten().long()
        return cross_entropy(model(inputs).flatten(0, 1), targets, reduction=reduction)

    def forward(model: nn.Module, micro_batch: tuple[Tensor]) -> ForwardOutput:
        return ForwardOutput(summed(model, micro_batch, "sum"), micro_batch[0][:, 1:].numel())

    @torch.no_grad()
    def score() -> float:
        return float(summed(model.eval(), (held_out[:64],), "mean")) / torch.log(torch.tensor(2.0)).item()

    work = Work(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True),
        micro_batches=loader_of(TensorDataset(train_blocks), samples, batches=settings.updates * steps),
        mean_loss=partial(summed, reduction="mean"),
        forward=forward,
        accumulation_steps=steps,
    )
    return work, score


def digits(epochs: int) -> tuple[Work, Any]:
    """The example's images and network, and the held-out accuracy."""
    from digits import build_model, read_digits

    train_set, test_set = read_digits()
    torch.manual_seed(0)
    model = build_model()

    def mean_loss(model: nn.Module, micro_batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(model(micro_batch[0]), micro_batch[1])

    def forward(model: nn.Module, micro_batch: tuple[Tensor, Tensor]) -> ForwardOutput:
        x, y = micro_batch
        return ForwardOutput(cross_entropy(model(x), y, reduction="sum"), len(y))

    @torch.no_grad()
    def score() -> float:
        x, y = test_set.tensors
        return float((model.eval()(x).argmax(1) == y).float().mean())

    work = Work(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3, fused=True),
        micro_batches=loader_of(train_set, 64, batches=epochs * -(-len(train_set) // 64)),
        mean_loss=mean_loss,
        forward=forward,
        max_grad_norm=None,
    )
    return work, score


def train_alone(task: str, name: str, settings: Settings) -> None:
    """What a fresh process does; prints its figures."""
    torch.set_num_threads(1)
    work, score = language_model(settings) if task == "language model" else digits(settings.epochs)
    contestant = (CONTESTANTS | peers.PEERS)[name]
    contestants.run(contestant, _first_steps(work))  # importing is not a part of training
    before, started = memory("VmRSS"), time.perf_counter()
    contestants.run(contestant, work)
    seconds = time.perf_counter() - started
    print(json.dumps({"seconds": seconds, "peak": memory("VmHWM"), "before": before, "score": score()}))


def _first_steps(work: Work) -> Work:
    """Work on a network of one weight, for a peer to import what it wants."""
    model = nn.Linear(1, 1)
    batch = [(torch.ones(1, 1), torch.ones(1, 1))] * 2 * work.accumulation_steps

    def mean_loss(model: nn.Module, micro_batch: Any) -> Tensor:
        return (model(micro_batch[0]) - micro_batch[1]).square().mean()

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        return ForwardOutput(mean_loss(model, micro_batch), 1)

    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loader = DataLoader(batch, batch_size=None)  # type: ignore[arg-type]
    return replace(work, model=model, optimizer=optimizer, micro_batches=loader, mean_loss=mean_loss, forward=forward)


def in_fresh_process(task: str, name: str, settings: Settings, figures: dict[str, list[dict[str, float]]]) -> float:
    """Trains there and keeps its figures; returns the seconds it took."""
    command = [sys.executable, __file__, "--alone", json.dumps([task, name, asdict(settings)])]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"{task}, {name}: {ended.stderr[-2000:]}")
    figures.setdefault(name, []).append(json.loads(ended.stdout.splitlines()[-1]))
    return figures[name][-1]["seconds"]


def show(task: str, rounds: Rounds, figures: dict[str, list[dict[str, float]]]) -> str:
    """The table of one task, once all have reached the same score."""
    what, tolerance = TASKS[task]
    expected = figures[REFERENCE][0]["score"]
    rows = []
    for name, runs in figures.items():
        if any(abs(run["score"] - expected) > tolerance for run in runs):
            raise AssertionError(f"{task}: {name} ended at {what} {runs[0]['score']:.4f}, the loop by hand at {expected:.4f}")
        peak = Spread.of([run["peak"] for run in runs])
        grown = Spread.of([run["peak"] - run["before"] for run in runs])
        ratio = "1" if name == REFERENCE else rounds.ratios(name).show()
        rows.append([name, ratio, f"{peak.median:.0f}", grown.show(0), f"{runs[0]['score']:.4f}"])
    head = ["loop", "wall time, by hand = 1 (quartiles)", "peak memory, MiB", "of it while training (quartiles)", what]
    return f"\n{task.capitalize()}; by hand it takes {rounds.typical(REFERENCE):.1f} s.\n\n{table(head, rows)}"


def main(
    task: Annotated[list[str], Option(help="language model or digits; may be given several times.")] = list(TASKS),  # noqa: B006
    updates: Annotated[int, Option(min=1, help="Of the language model.")] = 60,
    width: Annotated[int, Option(min=32, help="Of the language model.")] = 64,
    layers: Annotated[int, Option(min=1, help="Of the language model.")] = 2,
    epochs: Annotated[int, Option(min=1, help="Over the digits.")] = 10,
    repetitions: Annotated[int, Option(min=1, help="Rounds; all contestants run in each of them.")] = MIN_REPETITIONS,
    only: Annotated[str, Option(help="Contestants with this in their name; the reference is always there.")] = "",
    alone: Annotated[str, Option(hidden=True)] = "",
) -> None:
    """Train to the end with each loop and compare time and memory."""
    if alone:
        task_name, name, settings = json.loads(alone)
        return train_alone(task_name, name, Settings(**settings))
    os.environ["PYTHONWARNINGS"] = "ignore"
    names = [name for name in CONTESTANTS | peers.installed(peers.PEERS) if only in name or name == REFERENCE]
    for one in task:
        figures: dict[str, list[dict[str, float]]] = {}
        settings = Settings(updates, width, layers, epochs)
        clocks = {name: partial(in_fresh_process, one, name, settings, figures) for name in names}
        rounds = interleave(clocks, repetitions=repetitions, bracket=False, warm_up=False)
        print(show(one, rounds, figures))
    return None


if __name__ == "__main__":
    typer.run(main)
