"""What would make a run quicker, from what the run has measured: a few lines at its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

__all__ = ["hints"]

_MOST = 3
_LONG_WAIT = 0.1  # the share of the time in which the loader is waited for
_MOSTLY = 0.5  # the share of the time that forward and backward take
_SHORT_RUN = 60.0  # seconds; a shorter run tells little, since what it waits for may be its start


def hints(seconds: Mapping[str, float], data: Any, device: torch.device, precision: str, *, epochs: int) -> list[str]:
    """At most three lines, each with what was measured and what to change.

    Args:
        seconds: what each section of the run took; see `SECTIONS`.
        data: the loader.
        device: of the model.
        precision: of forward.
        epochs: how many times the loader was opened.
    """
    total = sum(seconds.values())
    if total < _SHORT_RUN:
        return []
    return [*islice(_found(seconds, total, data, device, precision, epochs), _MOST)]


def _found(
    seconds: Mapping[str, float], total: float, data: Any, device: torch.device, precision: str, epochs: int
) -> Iterator[str]:
    on_card = device.type == "cuda"
    if isinstance(data, DataLoader) and (waits := seconds["data"] / total) >= _LONG_WAIT:
        waited = f"the loader was waited for {waits:.0%} of the time"
        if data.num_workers == 0:
            yield f"{waited}; try DataLoader(..., num_workers=2) or more"
        elif epochs > 1 and not data.persistent_workers:
            yield f"{waited}; try persistent_workers=True, without which each epoch starts them again"
        else:
            yield f"{waited}; try more than num_workers={data.num_workers}"
        if on_card and not data.pin_memory:
            yield "copies to the device wait for the host; try DataLoader(..., pin_memory=True)"
    computes = (seconds["forward"] + seconds["backward"]) / total
    if on_card and precision == "fp32" and computes >= _MOSTLY and torch.cuda.is_bf16_supported(including_emulation=False):
        yield f"forward and backward took {computes:.0%} of the time in fp32; this card has bf16, try precision='bf16'"
