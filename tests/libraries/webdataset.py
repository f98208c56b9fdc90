"""webdataset: samples in tar files."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset
from torch.utils.data import DataLoader

from libraries.harness import Case
from libraries.points import batches, forward, network


@functools.cache
def shards() -> list[str]:
    folder = Path(tempfile.mkdtemp())
    x, y = (torch.cat(parts).numpy() for parts in zip(*(batches() * 2)[:10], strict=True))
    for shard in range(4):
        with webdataset.TarWriter(str(folder / f"{shard}.tar")) as writer:
            for index in range(shard * 8, shard * 8 + 8):
                writer.write({"__key__": f"{index:06}", "x.npy": x[index].astype(np.float64), "y.cls": int(y[index])})
    return sorted(str(path) for path in folder.glob("*.tar"))


def pipeline(rank: int, world_size: int, *, shuffled: bool = False) -> Any:
    files = shards()[rank::world_size]
    data = webdataset.WebDataset(files, shardshuffle=2 if shuffled else False, seed=3, nodesplitter=None, empty_check=False)
    data = data.shuffle(6, seed=4) if shuffled else data
    return data.decode().to_tuple("x.npy", "y.cls")


def loader(rank: int, world_size: int) -> Any:
    return DataLoader(pipeline(rank, world_size), 4)


def shuffled(rank: int, world_size: int) -> Any:
    return webdataset.WebLoader(pipeline(rank, world_size, shuffled=True), batch_size=4)


CASES = [
    Case("DataLoader over tar files", network, loader, forward),
    Case("WebLoader, shards and samples shuffled", network, shuffled, forward),
]
