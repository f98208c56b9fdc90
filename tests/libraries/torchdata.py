"""torchdata: loaders with a state, and a pipeline of nodes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import TensorDataset, default_collate
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from libraries.harness import Case
from libraries.points import batches, forward, network


def samples() -> TensorDataset:
    x, y = (torch.cat(parts) for parts in zip(*(batches() * 2)[:10], strict=True))
    return TensorDataset(x[:32], y[:32])


def share(rank: int, world_size: int) -> list[Any]:
    data = samples()
    return [data[index] for index in range(rank, len(data), world_size)]


def stateful(rank: int, world_size: int, workers: int = 0) -> Any:
    return StatefulDataLoader(share(rank, world_size), 4, num_workers=workers)


def shuffled(rank: int, world_size: int) -> Any:
    return StatefulDataLoader(share(rank, world_size), 4, shuffle=True, generator=torch.Generator().manual_seed(5))


def pipeline(rank: int, world_size: int) -> Any:
    source = nodes.IterableWrapper(share(rank, world_size))
    return nodes.Loader(nodes.Mapper(nodes.Batcher(source, 4), default_collate))


CASES = [
    Case("StatefulDataLoader, in order", network, stateful, forward),
    Case("StatefulDataLoader, two workers", network, lambda rank, world_size: stateful(rank, world_size, 2), forward),
    Case("StatefulDataLoader, shuffled", network, shuffled, forward),
    Case("a pipeline of nodes", network, pipeline, forward),
]
