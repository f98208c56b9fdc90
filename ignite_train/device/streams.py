"""Whether a device has streams, on which work is queued while the host continues."""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["has_streams"]


@cache
def has_streams(device: torch.device) -> bool:
    """Whether torch makes streams and events on `device`. The CPU has none, nor has MPS.

    Torch is asked by making one of each. So CUDA, ROCm and XPU have them, and what registers itself with torch as an
    accelerator has them if its backend does.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return False
    try:
        torch.Stream(device).record_event().synchronize()
    except (RuntimeError, NotImplementedError):  # a NotImplementedError of Python's own, too
        return False
    return True
