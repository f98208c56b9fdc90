"""Which part of a tensor a rank holds, and how any part is assembled from the parts that others held."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ignite_train.ranks.root_mesh import is_first_holder

__all__ = ["Box", "Piece", "assemble", "check_cover", "local_box", "own_piece"]


class Box(NamedTuple):
    """A block of a tensor: where it starts and how long it is in each dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, other: Box) -> Box | None:
        """What both have in common."""
        starts = tuple(map(max, self.start, other.start))
        ends = (min(a + m, b + n) for a, m, b, n in zip(*self, *other, strict=True))
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, shape) if all(length > 0 for length in shape) else None

    def slices(self, inside: Box) -> tuple[slice, ...]:
        """Where this block is in one that holds it."""
        offsets = (start - origin for start, origin in zip(self.start, inside.start, strict=True))
        return tuple(slice(offset, offset + length) for offset, length in zip(offsets, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a tensor that one rank writes.

    Attributes:
        data: the numbers, on any device.
        box: which part it is.
        whole: the shape of the whole tensor.
    """

    data: Tensor
    box: Box
    whole: tuple[int, ...]


def own_piece(tensor: Tensor, *, everything: bool) -> Piece | None:
    """The part of `tensor` that this rank writes; None if other ranks write all of it.

    Of a sharded tensor each part is written once; any other one is written whole where `everything` is true.
    """
    whole = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Piece(tensor, Box((0,) * len(whole), whole), whole) if everything else None
    if not is_first_holder(tensor):
        return None
    local = tensor.to_local()
    return Piece(local, local_box(tensor), whole) if local.numel() else None


def local_box(tensor: DTensor) -> Box:
    """The part of a sharded tensor that this rank holds."""
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def assemble(box: Box, dtype: torch.dtype, parts: Iterable[tuple[Box, Callable[[], Tensor]]]) -> Tensor:
    """The numbers of `box`, from parts that do not overlap; only those that are needed are read.

    Raises:
        ValueError: the parts do not cover the box, or overlap. Known before any memory is asked for.
    """
    needed = [(common, part, read) for part, read in parts if (common := box.overlap(part)) is not None]
    check_cover(box, [common for common, _, _ in needed])
    if len(needed) == 1 and needed[0][1] == box:
        return needed[0][2]()
    result = torch.empty(box.shape, dtype=dtype)
    for common, part, read in needed:
        result[common.slices(box)] = read()[common.slices(part)]
    return result


def check_cover(box: Box, parts: Iterable[Box]) -> None:
    """Checks that `parts`, which lie in `box`, hold each of its numbers once.

    Raises:
        ValueError: they do not.
    """
    ordered = sorted(parts)
    held, whole = sum(math.prod(part.shape) for part in ordered), math.prod(box.shape)
    if held != whole:
        raise ValueError(f"its parts hold {held} of {whole} numbers")
    for index, part in enumerate(ordered):
        for other in islice(ordered, index + 1, None):
            if other.start[:1] >= tuple(first + length for first, length in zip(*part, strict=True))[:1]:
                break
            if part.overlap(other) is not None:
                raise ValueError("its parts overlap")
