"""What `StateConsistency` costs: one digest of the whole state, as a share of the updates between two of them.

    python benchmarks/state_consistency.py

Trains a mid-sized model with AdamW on two CPU processes and times updates and digests in turn, so that a machine whose speed
drifts slows both. Prints the median and the spread from the first to the third quartile.
"""

import statistics
import time
from typing import Annotated

import ignite.distributed as idist
import torch
import typer
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from typer import Option

from ignite_train import ForwardOutput, create_trainer
from ignite_train.handlers import StateConsistency


def forward(model: nn.Module, tokens: Tensor) -> ForwardOutput:
    """Next-token loss."""
    logits = model(tokens[:, :-1]).flatten(0, 1)
    targets = tokens[:, 1:].flatten()
    return ForwardOutput(cross_entropy(logits, targets, reduction="sum"), sample_size=targets.numel())


def measure(_local_rank: int, width: int, layers: int, updates: int, every: int) -> None:
    """Trains on this rank, with a digest after each update, and prints on rank 0 what one costs."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    layer_stack = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(256, width), layer_stack, nn.Linear(width, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    trainer = create_trainer(idist.auto_model(model), optimizer, forward)
    StateConsistency(model, optimizer).attach(trainer, Events.ITERATION_COMPLETED)
    times: list[tuple[float, float, float]] = []  # update started, update ended, digest taken
    moments = [0.0, 0.0]

    def now(index: int) -> None:
        moments[index] = time.perf_counter()

    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: now(0))
    trainer.prepend_event_handler(Events.ITERATION_COMPLETED, lambda: now(1))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: times.append((*moments, time.perf_counter())))
    trainer.run([torch.randint(256, (8, 129)) for _ in range(updates + 2)], max_epochs=1)

    shares = [100 * (taken - ended) / (every * (ended - started)) for started, ended, taken in times[2:]]
    low, middle, high = statistics.quantiles(shares, n=4)
    if idist.get_rank() == 0:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        print(f"{parameters / 1e6:.1f} M parameters, 2 processes, {updates} updates, a digest every {every} updates:")
        print(f"{middle:.3f} % of the time of training (quartiles {low:.3f} to {high:.3f} %)")


def main(
    width: Annotated[int, Option(help="Of the transformer.")] = 256,
    layers: Annotated[int, Option(help="Of the transformer.")] = 6,
    updates: Annotated[int, Option(help="Timed updates; each is followed by a timed digest.")] = 15,
    every: Annotated[int, Option(help="Updates between two digests, for the share.")] = 100,
) -> None:
    """Time one digest of parameters, moments and counters against the updates between two of them, on two processes."""
    with idist.Parallel(backend="gloo", nproc_per_node=2) as parallel:
        parallel.run(measure, width, layers, updates, every)


if __name__ == "__main__":
    typer.run(main)
