"""In which precision the forward pass computes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, get_args

import torch

from ignite_train.arguments import one_of
from ignite_train.other_words import answers

__all__ = ["Precision", "PrecisionName", "refuse_cached_autocast"]

PrecisionName = Literal["fp32", "bf16", "fp16"]

_NAMES = get_args(PrecisionName)
_AS_IT_IS = nullcontext()
_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Runs the forward pass under autocast, or not.

    Args:
        name: `"fp32"` computes in the model's own dtypes, so also for a model that is bfloat16 throughout; `"bf16"` and
            `"fp16"` autocast the operations that torch lists for the device, with weights and gradients in their own dtype.
        device: where the model lives; CPU, CUDA and others that torch can autocast on.

    Raises:
        ValueError: the name is none of the three.
    """

    def __init__(self, name: PrecisionName, device: torch.device) -> None:
        hint = answers("precision", str(name))
        if hint:
            raise ValueError(f"precision must be one of {', '.join(map(repr, _NAMES))}, got {name!r}{hint}")
        self.name = one_of("precision", name, _NAMES)
        self._device_type = device.type
        self._dtype = _AUTOCAST_DTYPES.get(name)
        if self._dtype is not None:
            torch.autocast(self._device_type, dtype=self._dtype)  # torch's own error for a device that cannot

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The dtypes of autocast, beside those of the model; none without it."""
        return [] if self._dtype is None else [self._dtype]

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which `forward` runs."""
        return _AS_IT_IS if self._dtype is None else torch.autocast(self._device_type, dtype=self._dtype)


def refuse_cached_autocast() -> None:
    """Refuses a training inside of `torch.autocast`, which keeps its copies of the weights until it is left.

    Raises:
        ValueError: autocast is switched on, with its cache.
    """
    accelerator = torch.accelerator.current_accelerator()
    kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    if torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, kinds)):
        raise ValueError(
            "run and session must not be called inside torch.autocast, whose cache keeps copies of the weights as they were in "
            "the first update; pass precision='bf16' to create_trainer instead"
        )
