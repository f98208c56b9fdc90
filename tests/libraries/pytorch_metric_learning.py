"""pytorch-metric-learning: losses with parameters of their own, miners, a memory."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_metric_learning import losses, miners, reducers, samplers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ignite_train import ForwardOutput
from libraries.harness import Around, Case, dealt

CLASSES = 4


class Embedder(nn.Module):
    """A network and the loss, whose parameters are trained with it."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.body, self.loss = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8)), loss()

    def forward(self, x: torch.Tensor, y: torch.Tensor, mined: Any = None) -> torch.Tensor:
        return self.loss(self.body(x), y, mined)


def points() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, 6, generator=generator), torch.arange(64) % CLASSES


def batches() -> list[Any]:
    return list(DataLoader(TensorDataset(*points()), 8))


def sampled(rank: int, world_size: int) -> Any:
    x, y = points()
    return DataLoader(TensorDataset(x, y), 8, sampler=samplers.MPerClassSampler(y, 2, 8, length_before_new_iter=64))


def forward(model: nn.Module, batch: Any) -> ForwardOutput:
    x, y = batch
    return ForwardOutput(model(x, y) * len(y), len(y))


def mined(model: Any, batch: Any) -> ForwardOutput:
    x, y = batch
    with torch.no_grad():
        hard = miners.MultiSimilarityMiner()(model.body(x), y)
    return ForwardOutput(model(x, y, hard), 1)


class Memory:
    """Where the memory of the loss is; its own state_dict has the memory alone."""

    names = ("queue_idx", "curr_batch_idx", "has_been_filled")

    def __init__(self, loss: Any) -> None:
        self.loss = loss

    def state_dict(self) -> dict[str, Any]:
        return {name: vars(self.loss)[name] for name in self.names if name in vars(self.loss)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self.loss).update(state)


def memory(model: Any, optimizer: Any) -> Around:
    return Around(to_save={"memory": Memory(model.loss)})


SHUFFLES = {"killed": "the sampler shuffles a list of its own, which it does not save; the log says so when the run resumes"}
TRIPLETS = {"reducer": reducers.SumReducer()}
RANDOM = {"ranks": "the ranks draw other samples than one process does"}
MEMORY = {"ranks": "each rank has a memory of its own"}

CASES = [
    Case("ProxyAnchorLoss", lambda: Embedder(lambda: losses.ProxyAnchorLoss(CLASSES, 8)), dealt(batches), forward),
    Case("ArcFaceLoss", lambda: Embedder(lambda: losses.ArcFaceLoss(CLASSES, 8)), dealt(batches), forward),
    Case(
        "TripletMarginLoss with a miner",
        lambda: Embedder(lambda: losses.TripletMarginLoss(**TRIPLETS)),
        dealt(batches),
        mined,
        not_tried={"ranks": "the miner needs the network without its wrapper"},
    ),
    Case(
        "SupConLoss, MPerClassSampler", lambda: Embedder(losses.SupConLoss), sampled, forward, not_tried=RANDOM, known=SHUFFLES
    ),
    Case(
        "CrossBatchMemory",
        lambda: Embedder(lambda: losses.CrossBatchMemory(losses.ContrastiveLoss(), 8, memory_size=24)),
        dealt(batches),
        forward,
        around=memory,
        not_tried=MEMORY,
    ),
]
