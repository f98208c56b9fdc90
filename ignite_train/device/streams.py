"""Whether a device has streams, on which work is queued while the host continues, and copies that are right without them."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

__all__ = ["copy_on", "has_streams"]


@cache
def has_streams(device: torch.device) -> bool:
    """Whether torch makes streams and events on `device`, by which the host can know when a copy is done. The CPU has none.

    Torch is asked by making one of each. So CUDA, ROCm and XPU have them, and what registers itself with torch as an
    accelerator has them if its backend does. MPS counts as having none: its copies that do not wait may read memory of the host
    that was freed meanwhile (pytorch/pytorch, issue 189690).
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type or device.type == "mps":
        return False
    try:
        torch.Stream(device).record_event().synchronize()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def copy_on(device: torch.device, tensor: Tensor) -> Tensor:
    """A tensor of the host on `device`, for what is queued next. The host need not keep it, and waits only without streams."""
    if has_streams(device):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
