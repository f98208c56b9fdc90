"""Device-to-host copies that do not wait for later work of the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ignite_train.device.streams import has_streams

__all__ = ["ToHost", "is_on_host"]

_WAITS_FOR_RANKS = True  # HangWatch looks for it in the file where a rank stands

_HOST = "cpu"


def is_on_host(device: torch.device) -> bool:
    """Whether the host reads tensors there without waiting for a device."""
    return device.type == _HOST


class ToHost:
    """A transfer of a few numbers to the host, which does not wait for work that was queued on the device later.

    On an accelerator with streams, the numbers are copied to pinned memory and an event is recorded after the copy: the host
    waits for that event, while the device continues with what was queued later. On other devices they are read in `receive`.

    Args:
        device: where the numbers are.
    """

    def __init__(self, device: torch.device) -> None:
        self._source = device
        self._numbers: Tensor | None = None
        self._pinned: Tensor | None = None
        self._event: Any = None

    @property
    def under_way(self) -> bool:
        """Whether something was sent and not yet read."""
        return self._numbers is not None

    def send(self, numbers: Tensor) -> None:
        """Starts the transfer of a vector, which must not be changed until it was received."""
        self._numbers = numbers
        if not has_streams(numbers.device):
            return
        if self._event is None:
            self._event = _new_event(self._source)
        if self._pinned is None or self._pinned.shape != numbers.shape or self._pinned.dtype != numbers.dtype:
            self._pinned = torch.empty_like(numbers, device="cpu", pin_memory=not numbers.is_cpu)
        self._pinned.copy_(numbers, non_blocking=True)
        self._event.record(_stream_of(self._source))
        self._numbers = self._pinned

    def receive(self) -> list[float]:
        """Waits for the numbers that were sent and returns them. Synchronises with the device."""
        numbers = self._numbers
        assert numbers is not None  # noqa: S101  # `send` comes before
        self._numbers = None
        if numbers is self._pinned:
            self._event.synchronize()
        values: list[float] = numbers.tolist()  # sync
        return values

    def forget(self) -> None:
        """Drops what was sent without reading it."""
        self._numbers = None


def _new_event(device: torch.device) -> Any:
    return torch.Event(device=device)


def _stream_of(device: torch.device) -> Any:
    return torch.accelerator.current_stream(device)
