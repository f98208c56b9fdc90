"""A copy of the trained model that is evaluated in its place, and that nothing trains."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ignite_train.model.averaged_tensors import averaged_tensors
from ignite_train.model.tensor_digests import tensor_digests

__all__ = ["UnchangedCopy"]


class UnchangedCopy:
    """Finds out whether a model is a copy of the trained one that nothing changes while steps are made.

    What follows the trained model, such as an average of its weights, moves with it, or is still equal to it.

    Attributes:
        is_settled: whether that is known, so that there is nothing left to look at.
    """

    def __init__(self) -> None:
        self.is_settled = False
        self._first: tuple[int, dict[str, int]] | None = None  # the number of steps at the first look, and the contents

    def look(self, evaluated: nn.Module, trained: nn.Module, num_steps: int) -> int:
        """Looks at the models after `num_steps` steps, and gives the steps in which a copy has not changed, once; or else 0."""
        mine, theirs = averaged_tensors(evaluated), averaged_tensors(trained)
        if not _is_copy(mine, theirs):
            self.is_settled = True
            return 0
        now = tensor_digests(mine)
        before, first = self._first = self._first or (num_steps, now)
        if now == first and (num_steps == before or now == tensor_digests(theirs)):
            return 0
        self.is_settled = True
        return num_steps - before if now == first else 0


def _is_copy(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Whether all tensors of a model have the form of the other's and none is the same, and whether contents can be read.

    Of sharded models they are not: a rank with an empty shard would find out something else than the others.
    """
    forms = [{name: (type(one), one.shape, one.dtype) for name, one in tensors.items()} for tensors in (mine, theirs)]
    are_others = bool(mine) and {*map(id, mine.values())}.isdisjoint(map(id, theirs.values()))
    return are_others and forms[0] == forms[1] and _is_plain(mine) and _is_plain(theirs)


def _is_plain(tensors: Mapping[str, Tensor]) -> bool:
    plain = all(type(one) in (Tensor, nn.Parameter) and one.layout is torch.strided for one in tensors.values())
    return plain and len({one.device for one in tensors.values()}) == 1
