"""Digests that are compared over ranks by a sum alone: words of 16 bits, and their squares.

Over n ranks, (Σw)² = n·Σw² holds if and only if all words w are equal (Cauchy–Schwarz). Float64 adds up words of
16 bits and their squares exactly, for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["differ", "differ_on_device", "digest_words", "with_squares"]


def digest_words(digest: int, number: int) -> list[float]:
    """The lowest bits of a digest, in so many words."""
    return [float(digest >> 16 * place & 0xFFFF) for place in range(number)]


def with_squares(words: Sequence[float]) -> list[float]:
    """The numbers to sum over the ranks."""
    return [*words, *(word * word for word in words)]


def differ(sums: Sequence[float], num_ranks: int) -> bool:
    """Whether the words differ of which these are the sums of `with_squares` over `num_ranks` ranks."""
    middle = len(sums) // 2
    return any(int(word) ** 2 != num_ranks * int(square) for word, square in zip(sums[:middle], sums[middle:], strict=True))


def differ_on_device(sums: Tensor, num_ranks: int) -> Tensor:
    """The same as a bool tensor without dimensions, not read; `sums` may have several such rows."""
    words, squares = sums.chunk(2, dim=-1)
    return (words.square() != num_ranks * squares).any()
