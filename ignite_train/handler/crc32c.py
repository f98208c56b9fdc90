"""CRC-32C (Castagnoli), by tables and NumPy, since nothing that is installed computes it in C.

A CRC is linear over bits. So that of some bytes is the sum (xor) of what each byte adds, by its value and by its distance from
the end, and of what the register before them adds to the first four.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["ChangingBytes", "crc32c", "masked"]

_POLYNOMIAL = 0x82F63B78  # with its bits reversed
_ONES = 0xFFFFFFFF
_MASK = 0xA282EAD8  # TensorFlow's record format adds it to a checksum that it has rotated
_BLOCK = 2048  # bytes that are looked up at once


def crc32c(data: bytes | bytearray) -> int:
    """The CRC-32C of `data`."""
    table, places, register = _contributions(), _places(), _ONES
    for start in range(0, len(data), _BLOCK):
        block = np.frombuffer(data, np.uint8, min(_BLOCK, len(data) - start), start)
        length = len(block)
        sums = int(np.bitwise_xor.reduce(table.take(places[-length:] + block)))
        for byte in range(min(4, length)):
            sums ^= int(table[256 * (length - 1 - byte) + (register >> 8 * byte & 255)])
        register = sums ^ register >> 8 * length
    return register ^ _ONES


def masked(crc: int) -> int:
    """What TensorFlow's record format stores in place of `crc`."""
    return ((crc >> 15 | crc << 17) + _MASK) & _ONES


class ChangingBytes:
    """The CRC-32C of data of which only some bytes change. It takes as long as there are such bytes, however long the data is.

    Args:
        data: the data, whose bytes at `places` are 0.
        places: the indices of the bytes that change.
    """

    def __init__(self, data: bytes | bytearray, places: Sequence[int]) -> None:
        self._unchanged = crc32c(data)
        self._table = _rows(len(data) - 1 - np.asarray(places, np.intp)).ravel()
        self._begins = 256 * np.arange(len(places), dtype=np.intp)

    def crc32c(self, values: NDArray[np.uint8]) -> int:
        """The CRC-32C of the data with these bytes at the places."""
        return int(np.bitwise_xor.reduce(self._table.take(self._begins + values))) ^ self._unchanged


@functools.cache
def _contributions() -> NDArray[np.uint32]:
    """What each value of a byte adds to the CRC of a block, by its distance from the end: `256 * distance + value`."""
    values = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = np.where(values & 1, values >> 1 ^ np.uint32(_POLYNOMIAL), values >> 1)
    rows = [values]
    for _ in range(_BLOCK - 1):
        rows.append(rows[-1] >> 8 ^ values[rows[-1] & 255])
    return np.concatenate(rows)


@functools.cache
def _places() -> NDArray[np.intp]:
    """Where the contributions of each byte of a whole block begin."""
    return 256 * np.arange(_BLOCK - 1, -1, -1)


def _rows(distances: NDArray[np.intp]) -> NDArray[np.uint32]:
    """What each value of a byte adds at these distances from the end: of the shape (distances, 256)."""
    table = _contributions()
    rows, blocks = table.reshape(_BLOCK, 256)[distances % _BLOCK], distances // _BLOCK
    while (farther := np.flatnonzero(blocks)).size:  # a whole block of zeros follows
        before = rows[farther]
        rows[farther] = functools.reduce(
            np.bitwise_xor, [table.take(256 * (_BLOCK - 1 - byte) + (before >> 8 * byte & 255)) for byte in range(4)]
        )
        blocks[farther] -= 1
    return rows
