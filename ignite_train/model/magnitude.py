"""A number of a tensor that tells whether its values have changed."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["magnitude"]


def magnitude(tensor: Tensor) -> Tensor:
    """Σ|x|, in double precision where the device has it; of integers, bool and floats of one byte Σx of what is stored.

    Torch takes no norm of the latter, and widening them would need eight times their memory.

    Returns:
        A scalar on the device of the tensor; it is not read.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.sum(dtype=torch.int64)
    if tensor.itemsize == 1:
        return tensor.view(torch.uint8).sum(dtype=torch.int64)
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    norm: Tensor = torch.linalg.vector_norm(tensor, 1, dtype=None if tensor.device.type == "mps" else wide)
    return norm
