"""The devices of the machine on which tests train."""

from __future__ import annotations

import torch


def devices() -> list[torch.device]:
    """The CPU, and the accelerator if there is one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return [torch.device("cpu"), *([] if accelerator is None else [torch.device(accelerator.type, 0)])]
