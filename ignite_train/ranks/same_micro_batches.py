"""Seeing to it that ranks which must be fed the same micro-batches are, as those of a tensor-parallel group."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ignite_train.errors import UnlikeMicroBatchesError
from ignite_train.internals.of_torch import pytree
from ignite_train.ranks.data_ranks import DataRanks
from ignite_train.ranks.digest_words import differ, differ_on_device, digest_words, with_squares
from ignite_train.ranks.messages import Piggyback

__all__ = ["SameMicroBatches", "digest_of"]

_MOST = 1024  # elements of a tensor that are looked at
_WORDS = 2  # of a digest
_NUMBERS = 2 * _WORDS  # that travel of it
_PLAIN = (bool, int, float, str, bytes, type(None))


class SameMicroBatches(Piggyback):
    """Compares the micro-batches of an update within each group of ranks that is fed the same ones, before the step.

    What travels is, in the place of each group, a digest; see `ignite_train.ranks.digest_words`. It is made of how many
    micro-batches there are, of their structure, shapes and dtypes, and of up to 1024 elements of each tensor that lies on the
    host. So nothing waits for a device.

    Args:
        ranks: the groups.
    """

    def __init__(self, ranks: DataRanks) -> None:
        self._groups, self._own = ranks.groups, ranks.rank
        self.payload_size = _NUMBERS * len(ranks.groups)
        self._group: Sequence[Any] = ()

    def look(self, group: Sequence[Any]) -> None:
        """Notes the micro-batches of this rank in the running update."""
        self._group = group

    def payload(self) -> Sequence[float]:
        """The digest, in the place of this rank's group."""
        digest, self._group = digest_of([*self._group]), ()
        numbers = [0.0] * self.payload_size
        numbers[_NUMBERS * self._own : _NUMBERS * (self._own + 1)] = with_squares(digest_words(digest, _WORDS))
        return numbers

    def vetoes(self, sums: Tensor) -> Tensor:
        """See `Piggyback`: whether some group was not fed the same."""
        return differ_on_device(sums.view(-1, _NUMBERS), len(self._groups[0]))

    def on_reduced(self, sums: list[float]) -> None:
        """Compares.

        Raises:
            UnlikeMicroBatchesError: the ranks of a group were fed different micro-batches.
        """
        for number, group in enumerate(self._groups):
            if differ(sums[_NUMBERS * number : _NUMBERS * (number + 1)], len(group)):
                raise UnlikeMicroBatchesError(group)


def digest_of(group: Sequence[Any]) -> int:
    """32 bits of the micro-batches of a group; the same for the same ones, in any process."""
    leaves, structure = pytree.tree_flatten([*group])
    checksum = zlib.crc32(f"{len(group)} {structure}".encode())
    for leaf in leaves:
        checksum = _of_leaf(leaf, checksum)
    return checksum


def _of_leaf(leaf: Any, checksum: int) -> int:
    if not isinstance(leaf, Tensor):
        return zlib.crc32((repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__name__).encode(), checksum)
    checksum = zlib.crc32(f"{tuple(leaf.shape)} {leaf.dtype}".encode(), checksum)
    if type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.device.type != "cpu" or leaf.numel() == 0:
        return checksum
    seen = leaf.detach().reshape(-1)[:: -(-leaf.numel() // _MOST)].resolve_conj().contiguous()
    return zlib.crc32(seen.view(torch.uint8).numpy().tobytes(), checksum)
