"""datasets: a data set in memory, and one that is a stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from ignite_train import ForwardOutput, ResumableLoader
from libraries.harness import Case


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def rows() -> Dataset:
    x = np.random.default_rng(0).standard_normal((32, 6))
    return Dataset.from_dict({"x": x.tolist(), "y": [int(row.argmax() % 3) for row in x]}).with_format("torch")


def stream(rank: int, world_size: int) -> Any:
    return split_dataset_by_node(rows().to_iterable_dataset(num_shards=8), rank=rank, world_size=world_size)


def forward(model: nn.Module, batch: Any) -> ForwardOutput:
    logits = model(batch["x"].to(torch.float64))
    return ForwardOutput(cross_entropy(logits, batch["y"], reduction="sum"), len(batch["y"]))


def in_memory(rank: int, world_size: int) -> Any:
    return ResumableLoader(rows(), 4, shuffle=True, seed=3)


def by_torch(rank: int, world_size: int) -> Any:
    return DataLoader(rows().shard(world_size, rank), 4)


def streaming(rank: int, world_size: int) -> Any:
    return StatefulDataLoader(stream(rank, world_size), 4)


def streaming_plain(rank: int, world_size: int) -> Any:
    return DataLoader(stream(rank, world_size), 4)


def shuffled(rank: int, world_size: int) -> Any:
    return DataLoader(stream(rank, world_size).shuffle(seed=5, buffer_size=6), 4)


def shuffled_stateful(rank: int, world_size: int) -> Any:
    return StatefulDataLoader(stream(rank, world_size).shuffle(seed=5, buffer_size=6), 4)


OWN_SHARE = {"ranks": "the loader finds the share of its rank by itself"}
CASES = [
    Case("in memory, ResumableLoader, shuffled", model, in_memory, forward, not_tried=OWN_SHARE),
    Case("in memory, DataLoader", model, by_torch, forward),
    Case("stream, StatefulDataLoader", model, streaming, forward),
    Case("stream, DataLoader", model, streaming_plain, forward),
    Case("stream that shuffles, DataLoader", model, shuffled, forward),
    Case(
        "stream that shuffles, StatefulDataLoader",
        model,
        shuffled_stateful,
        forward,
        known={
            "killed": "datasets leaves its shuffle buffer out of its state, which workers cannot load; a plain DataLoader is "
            "exact"
        },
    ),
]
