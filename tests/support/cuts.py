"""The same weighted samples, cut into micro-batches in many ways, and the update they must all make, by hand in float64.

The model is linear and the loss of a sample is w·(x·a + b − y)², so that the gradient of the mean has a closed form. A
sample's weight w counts as its sample size: what is minimised is Σ w·(...)² / Σ w.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import ignite.distributed as idist
import torch
from torch import Tensor, nn

from ignite_train import ForwardOutput

# Set by `test_other_machines.py`: the same samples in another order round differently, as another processor does.
REVERSED = os.environ.get("TESTS_REVERSED") == "1"
LEARNING_RATE = 0.05
FEATURES = 3
Sample = tuple[Tensor, Tensor, Tensor]


def samples(count: int = 64, seed: int = 0) -> Sample:
    """Inputs, targets and unequal integer weights in 1..9, in float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randn(count, generator=generator, dtype=torch.float64)
    return x, y, torch.randint(1, 10, (count,), generator=generator).double()


def cut(data: Sample, sizes: Sequence[int], start: int = 0) -> list[Sample]:
    """Consecutive micro-batches of these sizes, from sample `start` on; a size may be 0."""
    micro_batches = []
    for size in sizes:
        parts = tuple(part[start : start + size] for part in data)
        micro_batches.append(tuple(part.flip(0) for part in parts) if REVERSED else parts)
        start += size
    return micro_batches  # type: ignore[return-value]


def shard(sizes: Sequence[Sequence[int]]) -> list[Sample]:
    """This rank's micro-batches, if `sizes` are those of each rank."""
    rank = idist.get_rank()
    return cut(samples(), sizes[rank], start=sum(map(sum, sizes[:rank])))


class Unsized:
    """A loader that does not know its length."""

    def __init__(self, micro_batches: Sequence[Any]) -> None:
        self.micro_batches = micro_batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.micro_batches)


def linear(dtype: torch.dtype = torch.float64) -> nn.Linear:
    """The model, always with the same weights."""
    model = nn.Linear(FEATURES, 1, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.3, -0.2, 0.1]], dtype=torch.float64))
        model.bias.fill_(0.05)
    return model.to(dtype)


def forward(model: nn.Module, micro_batch: Sample) -> ForwardOutput:
    """The loss summed over the micro-batch, its weight, and the number of samples as a log."""
    dtype = next(model.parameters()).dtype
    x, y, w = (part.to(dtype) for part in micro_batch)
    loss = (w * (model(x).squeeze(1) - y) ** 2).sum()
    return ForwardOutput(loss, float(w.sum()), {"samples": len(x)})


def mean_forward(model: nn.Module, micro_batch: Sample) -> Tensor:
    """A bare mean loss over the micro-batch, weights left aside."""
    dtype = next(model.parameters()).dtype
    x, y, _ = (part.to(dtype) for part in micro_batch)
    return ((model(x).squeeze(1) - y) ** 2).mean()


def reference(updates: Sequence[Sample]) -> dict[str, Any]:
    """SGD on the closed form: one step of weighted least squares for each entry, all its samples at once."""
    a, b = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64), 0.05
    losses, sizes, norms = [], [], []
    for x, y, w in updates:
        residual = x @ a + b - y
        total = float(w.sum())
        losses.append(float((w * residual**2).sum()) / total)
        sizes.append(total)
        grad_a, grad_b = 2 * (w * residual) @ x / total, float(2 * (w * residual).sum() / total)
        norms.append(float((grad_a @ grad_a + grad_b**2).sqrt()))
        a, b = a - LEARNING_RATE * grad_a, b - LEARNING_RATE * grad_b
    return {"weight": a, "bias": b, "losses": losses, "sizes": sizes, "norms": norms}
