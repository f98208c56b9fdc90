"""The state that an optimizer of torch keeps for a parameter, as one small step of another optimizer of its class shows it.

The kernels of torch trust the shapes in a state: one that is fused and given a moment of another shape reads and writes beyond
its memory. No table says what each class keeps, which would have to grow with torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["WAYS", "Expected", "expected_state", "torchs_class"]

_SIZES = (2, 3, 4, 5, 6, 7)  # of the parameter that is tried: all differ, and none is 1
WAYS = {"fused", "foreach", "capturable", "differentiable", "maximize"}  # of computing the same state


class Expected:
    """The entry of the state under one key.

    Args:
        value: what it is for a small parameter.
        small: the shape of that parameter.
    """

    def __init__(self, value: Any, small: tuple[int, ...]) -> None:
        self.is_number = not isinstance(value, Tensor) or (value.numel() == 1 and len(small) > 0)
        self.dtype = value.dtype if isinstance(value, Tensor) else torch.float32
        self._dimensions = () if self.is_number else tuple(size if size not in small else None for size in value.shape)

    def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the value for a parameter of this shape. A dimension of its own, as Adafactor's factors have, stays."""
        pairs = zip(self._dimensions, parameter, strict=True)
        return tuple(size if own is None else own for own, size in pairs)


def expected_state(
    kind: type[Optimizer], num_dimensions: int, dtype: torch.dtype, options: Mapping[str, Any]
) -> dict[str, Expected]:
    """The state of a parameter after a step; empty where that cannot be found out, as for classes of other libraries.

    Args:
        kind: the class of the optimizer. Of a subclass of one of torch's, which may keep more, that one counts.
        num_dimensions: of the parameter.
        dtype: of the parameter.
        options: of its group. Only those count that switch something on or off.
    """
    torchs: Any = torchs_class(kind)
    if torchs is None or num_dimensions > len(_SIZES):
        return {}
    switches: dict[str, Any] = {}
    for name, entry in inspect.signature(torchs).parameters.items():
        value = options.get(name)
        if isinstance(entry.default, bool) and isinstance(value, bool) and name not in WAYS:
            switches[name] = value
        elif type(entry.default) in (int, float) and entry.default == 0 and isinstance(value, (int, float)):
            switches[name] = 0.5 if value else 0
    return _tried(torchs, num_dimensions, dtype, tuple(switches.items()))


def torchs_class(kind: type[Optimizer]) -> Any:
    """The optimizer of torch that a class is, or derives from; None for one of another library."""
    found = (one for one in kind.__mro__ if one is not Optimizer and f"{one.__module__}.".startswith("torch.optim."))
    return next(found, None)


@lru_cache(maxsize=256)
def _tried(
    kind: type[Optimizer], num_dimensions: int, dtype: torch.dtype, switches: tuple[tuple[str, Any], ...]
) -> dict[str, Expected]:
    shape = _SIZES[:num_dimensions]
    for is_sparse in (False, True):
        parameter = nn.Parameter(torch.ones(shape, dtype=dtype), requires_grad=True)
        try:
            gradient = torch.ones_like(parameter)
            parameter.grad = gradient.to_sparse(1) if is_sparse else gradient
            optimizer = kind([parameter], **dict(switches))
            optimizer.step()
        except (RuntimeError, ValueError, TypeError, NotImplementedError):
            continue  # SparseAdam takes sparse gradients only, LBFGS a closure, and some dtypes have no arithmetic
        return {key: Expected(value, shape) for key, value in optimizer.state[parameter].items()}
    return {}
