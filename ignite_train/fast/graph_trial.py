"""A trial of a graph: what it writes, and what the same code writes uncompiled, from one beginning and without a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ignite_train.fast.graph_numbers import tolerance_of
from ignite_train.model.forward_state import ForwardState
from ignite_train.model.in_full import in_full
from ignite_train.model.random_state import NUMPY, PYTHON

__all__ = ["GraphTrial"]

_Tensors = dict[str, dict[str, Tensor]]
_OF_ONE = 10  # a tensor may be off by more than all of its kind together


class GraphTrial:
    """A context for a run that is put back at its end; entered for the graph, and again for the same code uncompiled.

    Args:
        forward_state: what forward may change.
        micro_batch: which forward runs on.
        stepped: what a step changes, by kind and name.
    """

    def __init__(self, forward_state: ForwardState, micro_batch: Any, stepped: _Tensors) -> None:
        self._forward_state, self._micro_batch, self._stepped = forward_state, micro_batch, stepped
        self._before: _Tensors = {}
        self._found: _Tensors = {}

    def __enter__(self) -> None:
        self._mark = self._forward_state.mark(self._micro_batch)
        self._before = {**self._forward_state.copies(self._mark), **_cloned(self._stepped)}

    def __exit__(self, *raised: Any) -> None:
        in_full(self._put_back)

    def _put_back(self) -> None:
        with torch.no_grad():
            for kind, tensors in self._stepped.items():
                for name, tensor in tensors.items():
                    tensor.copy_(self._before[kind][name])
        self._forward_state.put_back(self._mark, stepped=self._stepped.get("parameter", {}).values())

    def note(self, gradients: Sequence[Tensor]) -> None:
        """Remembers what the graph has written, and its gradients."""
        self._found = _cloned(self._written(gradients))

    def draws_of_its_own(self) -> bool:
        """Whether the run of now has drawn from a generator that is not the process's."""
        known = (torch.default_generator, PYTHON, NUMPY)
        return any(all(one is not other for other in known) for one in self._mark.random_state.moved())

    def difference(self, gradients: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> str | None:
        """The first tensor that graph and later run have written differently, by more than rounding, in words; None if none.

        A change may be off by ten times the tolerance of `GraphNumbers.difference`, or by as little as one tolerance of the
        changes of all tensors of its kind: what is small beside the others may be a difference of large numbers. Integers must
        be equal.

        Args:
            gradients: those of the run of now.
            dtypes: in which it computes.
        """
        tolerance, expected = tolerance_of(dtypes), self._written(gradients)
        for kind in expected | self._found:
            before, found, right = (tensors.get(kind, {}) for tensors in (self._before, self._found, expected))
            names = [*dict.fromkeys([*right, *found])]
            pairs = {name: (found.get(name, before.get(name)), right.get(name, before.get(name))) for name in names}
            changes = {name: _distance(one, before.get(name)) for name, (_, one) in pairs.items() if one is not None}
            of_all = sum(change**2 for change in changes.values()) ** 0.5
            for name, (one, other) in pairs.items():
                if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
                    return f"the {kind} {name} is not the same"
                allowed = tolerance * max(_OF_ONE * changes[name], of_all) + _rounding(other)
                if _distance(one, other) > (allowed if other.is_floating_point() else 0):
                    return f"the {kind} {name} is off"
        return None

    def _written(self, gradients: Sequence[Tensor]) -> _Tensors:
        own: _Tensors = {"gradient": {str(number): one for number, one in enumerate(gradients)}}
        stepped = self._stepped.get("parameter", {}).values()
        return {**self._forward_state.written(self._mark, stepped=stepped), **self._stepped, **own}


@torch.no_grad()
def _distance(one: Tensor, other: Tensor | None) -> float:
    """L2 norm of the difference, in float64; 0 where it is not finite. Synchronises with the device."""
    dtype = torch.complex128 if one.is_complex() else torch.float64
    wide = one.detach().to(dtype)
    distance = wide if other is None else wide - other.to(dtype)
    return float(torch.nan_to_num(torch.linalg.vector_norm(distance), 0.0, 0.0, 0.0))  # sync


def _rounding(tensor: Tensor) -> float:
    if not tensor.is_floating_point():
        return 0.0
    return 4 * torch.finfo(tensor.dtype).eps * _distance(tensor, None)


def _cloned(tensors: Mapping[str, Mapping[str, Tensor]]) -> _Tensors:
    return {kind: {name: one.detach().clone() for name, one in some.items()} for kind, some in tensors.items()}
