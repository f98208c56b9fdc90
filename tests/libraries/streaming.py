"""MosaicML streaming: samples in its own shards, with a loader that has a state."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import torch
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

from ignite_train import ForwardOutput
from libraries.harness import Case
from libraries.points import batches, forward, network


@functools.cache
def shards() -> str:
    folder = tempfile.mkdtemp()
    x, y = (torch.cat(parts) for parts in zip(*(batches() * 2)[:10], strict=True))
    with MDSWriter(out=folder, columns={"x": "ndarray:float64:6", "y": "int"}, size_limit=600) as writer:
        for index in range(32):
            writer.write({"x": x[index].numpy(), "y": int(y[index])})
    return folder


def loader(rank: int, world_size: int, *, shuffle: bool = False) -> Any:
    clean_stale_shared_memory()
    data = StreamingDataset(local=shards(), batch_size=4, shuffle=shuffle, shuffle_seed=3, num_canonical_nodes=1)
    return StreamingDataLoader(data, batch_size=4)


def of_entries(model: Any, batch: Any) -> ForwardOutput:
    return forward(model, (batch["x"], batch["y"]))


RANKS = {"ranks": "it finds its ranks by a launcher's environment variables, which the processes of the test do not have"}
CASES = [
    Case("StreamingDataLoader, in order", network, loader, of_entries, not_tried=RANKS),
    Case("StreamingDataLoader, shuffled", network, functools.partial(loader, shuffle=True), of_entries, not_tried=RANKS),
]
