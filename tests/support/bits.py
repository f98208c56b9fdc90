"""A view of any state that is equal only bit by bit. A file of its own, which ranks can import too: `conftest` exists twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def bit_by_bit(value: Any) -> Any:
    """Plain values for nested state, which differ if any tensor in it differs by a bit, in its dtype or its shape."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, Tensor):
        value = value.to_local() if hasattr(value, "to_local") else value  # of a sharded one, the shard of this rank
        return (
            value.dtype,
            tuple(value.shape),
            bytes(value.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).tolist()),
        )
    if isinstance(value, Mapping):
        return {key: bit_by_bit(entry) for key, entry in value.items()}
    return [bit_by_bit(entry) for entry in value] if isinstance(value, (list, tuple)) else value
