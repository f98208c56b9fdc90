"""What `StateConsistency` costs: one digest of the whole state, as a share of the updates between two of them.

    python benchmarks/state_consistency.py

Trains a mid-sized model with AdamW on the CPU and times updates and digests in turn, in one process, so that a machine whose
speed drifts slows both. Prints medians and the spread from the first to the third quartile.
"""

import statistics
import time
from typing import Annotated

import torch
import typer
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from typer import Option

from ignite_train import ForwardOutput, create_trainer
from ignite_train.handlers import tensor_digests


def forward(model: nn.Module, tokens: Tensor) -> ForwardOutput:
    """Next-token loss."""
    logits = model(tokens[:, :-1]).flatten(0, 1)
    targets = tokens[:, 1:].flatten()
    return ForwardOutput(cross_entropy(logits, targets, reduction="sum"), sample_size=targets.numel())


def main(
    width: Annotated[int, Option(help="Of the transformer.")] = 256,
    layers: Annotated[int, Option(help="Of the transformer.")] = 6,
    updates: Annotated[int, Option(help="Timed updates; each is followed by a timed digest.")] = 15,
    every: Annotated[int, Option(help="Updates between two digests, for the share.")] = 100,
) -> None:
    """Time one digest of parameters and moments against the updates between two of them."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.Sequential(nn.Embedding(256, width), nn.TransformerEncoder(block, layers, enable_nested_tensor=False))
    model.append(nn.Linear(width, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    trainer = create_trainer(model, optimizer, forward)
    batches = [torch.randint(256, (8, 129)) for _ in range(updates + 2)]
    update_seconds: list[float] = []
    digest_seconds: list[float] = []
    started = 0.0

    @trainer.on(Events.ITERATION_STARTED)
    def start() -> None:
        nonlocal started
        started = time.perf_counter()

    @trainer.on(Events.ITERATION_COMPLETED)
    def take() -> None:
        ended = time.perf_counter()
        tensors: dict[str, Tensor] = dict(model.named_parameters())
        for number, entries in enumerate(optimizer.state.values()):
            tensors |= {f"{key} {number}": entry for key, entry in entries.items() if isinstance(entry, Tensor)}
        tensor_digests(tensors)
        update_seconds.append(ended - started)
        digest_seconds.append(time.perf_counter() - ended)

    trainer.run(batches, max_epochs=1)
    shares = [100 * digest / (every * update) for digest, update in zip(digest_seconds[2:], update_seconds[2:], strict=True)]
    low, middle, high = statistics.quantiles(shares, n=4)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters / 1e6:.1f} M parameters, {updates} updates, a digest every {every} updates:")
    print(f"{middle:.3f} % of the time of training (quartiles {low:.3f} to {high:.3f} %)")


if __name__ == "__main__":
    typer.run(main)
