"""Adding up sparse gradients over the ranks by the rows that each rank has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ignite_train.model.memory_layout import as_bytes
from ignite_train.model.sparse_parameters import tensor_of_rows
from ignite_train.ranks import collectives

__all__ = ["SparseRows"]


class SparseRows:
    """Adds up the sparse gradients of some parameters over the ranks: each rank gets the rows of all of them.

    How many rows a rank has travels with the statistics. Then one gathering carries the indices and the values of the rows of
    all parameters, and each rank adds them up in the order of the ranks, so that all come to the same bits. What crosses is
    proportional to the rows and not to the size of the table.

    Args:
        parameters: the weights of embeddings with `sparse=True`, the same on all ranks in one order.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._embeddings = tuple(parameters)

    def announcement(self) -> Tensor:
        """The numbers to sum over the ranks, in float64: for each parameter a place for each rank, with 0 on the other ranks.

        It is one more than the number of rows, or 0 where this rank has no gradient.
        """
        places = torch.zeros(len(self._embeddings), collectives.world_size(), dtype=torch.float64)
        for index, parameter in enumerate(self._embeddings):
            if parameter.grad is not None:
                parameter.grad = _as_rows(parameter.grad)
                places[index, collectives.rank()] = 1 + len(parameter.grad.values())
        return places.flatten()

    def add_over_ranks(self, announced: Tensor) -> None:
        """Gives each parameter the sum of the gradients of all ranks; none where no rank has one. Collective.

        Waits for the device.

        Args:
            announced: the sum of `announcement` over the ranks.
        """
        counts = announced.reshape(len(self._embeddings), -1).long().tolist()  # sync
        row_bytes = [8 + parameter[0].nbytes for parameter in self._embeddings]
        totals = [
            sum(max(count - 1, 0) * size for count, size in zip(of_rank, row_bytes, strict=True))
            for of_rank in zip(*counts, strict=True)
        ]
        gathered = collectives.gather_bytes(self._packed(), totals) if any(totals) else [self._packed()] * len(totals)
        places = [0] * len(gathered)
        for parameter, of_parameter in zip(self._embeddings, counts, strict=True):
            parts = []
            for rank, count in enumerate(of_parameter):
                if count > 0:
                    part, places[rank] = _unpack(gathered[rank], places[rank], count - 1, parameter)
                    parts.append(part)
            parameter.grad = _sum_of(parts, parameter) if parts else None

    def _packed(self) -> Tensor:
        """The rows of this rank as bytes: of each parameter the indices, then the values."""
        parts = [torch.empty(0, dtype=torch.uint8, device=self._embeddings[0].device)]
        for parameter in self._embeddings:
            if parameter.grad is not None:
                rows = parameter.grad.indices()[0], parameter.grad.values()
                parts += [as_bytes(part.contiguous()) for part in rows]
        return torch.cat(parts)


def _as_rows(gradient: Tensor) -> Tensor:
    """The gradient as coalesced rows; that of a weight that is used densely too is dense, and each of its rows counts."""
    if gradient.is_sparse:
        return gradient.coalesce()
    return tensor_of_rows(torch.arange(len(gradient), device=gradient.device), gradient, gradient.shape, is_coalesced=True)


def _unpack(content: Tensor, start: int, rows: int, parameter: nn.Parameter) -> tuple[tuple[Tensor, Tensor], int]:
    """The indices and values of so many rows of `parameter`, and where what follows them begins."""
    middle = start + 8 * rows
    end = middle + rows * parameter[0].nbytes
    indices = content[start:middle].clone().view(torch.int64)  # a copy begins where a number may
    values = content[middle:end].clone().view(parameter.dtype).view(rows, *parameter.shape[1:])
    return (indices, values), end


def _sum_of(parts: Sequence[tuple[Tensor, Tensor]], parameter: nn.Parameter) -> Tensor:
    indices = torch.cat([indices for indices, _ in parts])
    values = torch.cat([values for _, values in parts])
    return tensor_of_rows(indices, values, parameter.shape).coalesce()
