"""Batches of as many samples as fit into a number of tokens."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ignite_train.arguments import describe, one_of, positive_int, whole_number
from ignite_train.data.dealing import DealtSampler
from ignite_train.data.epoch_order import Order, epoch_order
from ignite_train.ranks import collectives

if TYPE_CHECKING:
    from numpy.typing import NDArray  # see epoch_order.py

__all__ = ["TokenBudgetSampler"]

_BATCHES_TO_BUCKET = 4  # more mix the samples better, fewer pad them less
_logger = logging.getLogger(__name__)


class _Bucket(NamedTuple):
    """Samples of similar lengths, which lie side by side when the samples are sorted.

    Attributes:
        first: the place of its first sample.
        num_samples: how many it has.
        batch_size: samples to a batch; as many of its longest as fit into the budget.
    """

    first: int
    num_samples: int
    batch_size: int

    @property
    def num_batches(self) -> int:
        """The last one may have fewer samples."""
        return -(-self.num_samples // self.batch_size)


class TokenBudgetSampler(DealtSampler[list[int]]):
    """Batches of samples of similar lengths, each of at most `max_tokens` tokens: samples times the longest of them.

    That is what a batch costs once its samples are padded to one length. Short samples come in large batches, long ones in
    small batches. Samples are sorted into buckets by length; a bucket has one length, or as many as make at least 4 batches.
    With `shuffle`, each epoch mixes the samples of each bucket and the order of all batches. Every epoch has the same number of
    batches, and every sample once.

    Batches are dealt out to the ranks like cards: batch i of the epoch goes to rank i mod world size. None is repeated or
    dropped, so ranks differ by at most one batch, which trainer and evaluator allow. W ranks see in each round the same batches
    as one process in W batches.

    The order depends on the lengths, the budget, the seed and the epoch, and on no pass before. Pass it to a `ResumableLoader`,
    which begins at any batch without going through those before it, also on another number of ranks. As `batch_sampler` of a
    DataLoader it gives the same batches, which a resumed run reads up to its position.

    Args:
        lengths: tokens of each sample, at least 1; in a translation the larger one of source and target.
        max_tokens: of a batch, padding included.
        max_samples: of a batch; None: as many as fit.
        shuffle: a new order in each epoch. Without it batches come in the order of their lengths, the longest first.
        seed: of the order; the same on all ranks.
        too_long: what happens with samples of more than `max_tokens` tokens: `"raise"`, or `"skip"`, which leaves them out of
            all epochs and logs how many they are.
        mesh: as for `ShardedSampler`.

    Attributes:
        num_samples: samples of the dataset, with those that are left out.
        num_skipped: samples that are left out.
        num_batches: batches in an epoch, over all ranks.
        epoch: the epoch (0-based) of the next pass.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has an invalid value, or a sample is too long, or all of them are.

    Example:
        >>> from ignite_train import TokenBudgetSampler
        >>> list(TokenBudgetSampler([2, 9, 3, 2, 8], max_tokens=18, shuffle=False))  # in a single process
        [[1, 4], [2, 0], [3]]
    """

    def __init__(
        self,
        lengths: Sequence[int] | NDArray[Any] | Tensor,
        *,
        max_tokens: int,
        max_samples: int | None = None,
        shuffle: bool,
        seed: int = 0,
        too_long: Literal["raise", "skip"] = "raise",
        mesh: DeviceMesh | None = None,
    ) -> None:
        tokens = _checked_lengths(lengths)
        self._max_tokens = positive_int("max_tokens", max_tokens)
        self._max_samples = None if max_samples is None else positive_int("max_samples", max_samples)
        self._shuffle, self._seed = shuffle, whole_number("seed", seed)
        self._digest = hashlib.blake2b(tokens.astype("<i8").tobytes(), digest_size=8).hexdigest()
        self.num_samples = len(tokens)
        self.num_skipped = self._count_too_long(tokens, one_of("too_long", too_long, ("raise", "skip")))
        self._by_length = np.argsort(-tokens, kind="stable")[self.num_skipped :]  # the longest first
        self._buckets = list(self._cut(tokens[self._by_length]))
        self._first_batches = np.cumsum([0, *(bucket.num_batches for bucket in self._buckets)])  # of each bucket
        self.num_batches = int(self._first_batches[-1])
        super().__init__(self.num_batches, mesh)

    def describe(self) -> dict[str, Any]:
        """The settings that decide the order, in plain types."""
        described = {"samples": self.num_samples, "lengths": self._digest, "max_tokens": self._max_tokens}
        return described | {"max_samples": self._max_samples, "shuffle": self._shuffle, "seed": self._seed}

    def __repr__(self) -> str:
        batches = f"{self.num_samples - self.num_skipped} samples in {self.num_batches} batches, max_tokens={self._max_tokens}"
        rank = f"rank {self.dealing.rank} of {self.dealing.size}"
        return f"{type(self).__name__}({batches}, shuffle={self._shuffle}, seed={self._seed}, {rank})"

    def __iter__(self) -> Iterator[list[int]]:
        positions, epoch = self.begin_pass(), self.epoch  # what comes before them is not computed
        order = self._order(self.num_batches, epoch, part=0)
        orders: dict[int, Order] = {}  # of the samples of each bucket that was needed so far
        for position in positions:
            batch = int(order(np.array([position]))[0])
            number = int(np.searchsorted(self._first_batches, batch, side="right")) - 1
            bucket = self._buckets[number]
            if number not in orders:
                orders[number] = self._order(bucket.num_samples, epoch, part=number + 1)
            begin = (batch - int(self._first_batches[number])) * bucket.batch_size
            inside = orders[number](np.arange(begin, min(begin + bucket.batch_size, bucket.num_samples)))
            yield self._by_length[bucket.first + inside].tolist()

    def _order(self, length: int, epoch: int, *, part: int) -> Order:
        """The order of the batches (part 0) or of the samples of a bucket."""
        if not self._shuffle:
            return lambda positions: positions
        digest = hashlib.blake2b(f"{self._seed} {epoch} {part}".encode(), digest_size=8).digest()
        key = (self._seed, epoch * (len(self._buckets) + 1) + part)
        return epoch_order(length, key=key, drawn_seed=int.from_bytes(digest, "little") >> 1)

    def _cut(self, tokens: NDArray[np.int64]) -> Iterator[_Bucket]:
        """Samples whose lengths fall are cut into buckets; no length is in two of them."""
        starts = np.flatnonzero(np.diff(tokens, prepend=tokens[0] + 1))
        first, batch_size = 0, 0
        for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(tokens)], strict=True):
            if start == first:
                batch_size = min(self._max_tokens // int(tokens[start]), self._max_samples or len(tokens))
            if end - first >= _BATCHES_TO_BUCKET * batch_size or end == len(tokens):
                yield _Bucket(first, end - first, batch_size)
                first = end

    def _count_too_long(self, tokens: NDArray[np.int64], policy: str) -> int:
        """The number of samples that no batch may hold."""
        found = np.flatnonzero(tokens > self._max_tokens)
        if len(found) == 0:
            return 0
        number, longest = len(found), int(tokens.max())
        if policy == "raise" or number == len(tokens):
            raise ValueError(
                f"lengths must be at most max_tokens={self._max_tokens}, got {int(tokens[found[0]])} at sample {found[0]}, "
                f"{number} such samples of {len(tokens)} and {longest} at most; raise max_tokens, shorten the samples, or pass "
                "too_long='skip' if some fit"
            )
        if collectives.is_main_rank():
            _logger.warning(f"{number} of {len(tokens)} samples are left out: they have more than {self._max_tokens} tokens")
        return number


def _checked_lengths(lengths: Any) -> NDArray[np.int64]:
    """The lengths as an array.

    Raises:
        TypeError: they are not whole numbers, one for each sample.
        ValueError: the sequence is empty, or a length is below 1.
    """
    array = np.asarray(lengths)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(f"lengths must be a sequence of whole numbers, one for each sample, got {describe(lengths)}")
    if array.size == 0:
        raise ValueError("lengths must have at least one sample, got none")
    if array.min() < 1:
        raise ValueError(
            f"lengths must be at least 1, got {array.min()} at sample {int(array.argmin())}; leave such samples out"
        )
    return array.astype(np.int64)
