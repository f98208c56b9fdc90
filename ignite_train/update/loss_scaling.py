"""Loss scaling: what backward multiplies the loss by so that half-precision gradients neither vanish nor overflow.

A policy holds a scale and is told after each update whether the gradients overflowed. It never touches a tensor: the update
unscales with the scale that its own backward used, and only then asks for the next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

from ignite_train.arguments import one_of, positive_int, real_number
from ignite_train.errors import LossScaleFloorError

__all__ = [
    "DeepSpeedLossScaling",
    "FairseqLossScaling",
    "LossScaling",
    "NoLossScaling",
    "StaticLossScaling",
    "TorchLossScaling",
    "scale_near_floor",
]

_ANOTHER_WROTE_IT = "another policy wrote it, or a newer version of ignite_train; use that one, or start with a fresh scale"


@runtime_checkable
class LossScaling(Protocol):
    """The interface of a loss-scaling policy, as the update calls it.

    Attributes:
        scale: what the next backward multiplies the loss by.
        enabled: whether non-finite gradients are an overflow (skip, lower the scale) or an error of the training.
    """

    scale: float
    enabled: bool

    def update(self, *, overflow: bool) -> None:
        """Sets the scale for the next update, knowing whether this one overflowed."""

    def state_dict(self) -> dict[str, Any]:
        """All that decides the scales to come, in plain types."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Takes it over."""


class NoLossScaling:
    """Scale 1, for fp32 and bf16: a lower scale would not help, so non-finite gradients are no overflow."""

    scale = 1.0
    enabled = False

    def update(self, *, overflow: bool) -> None:
        """Does nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Does nothing."""


class StaticLossScaling:
    """A scale that never changes; an overflow skips the update, and `give_up_after` of them in a row end the run.

    Args:
        scale: the scale; a power of two loses no bits.

    Raises:
        TypeError, ValueError: `scale` is not a number greater than 0.
    """

    enabled = True

    def __init__(self, scale: float) -> None:
        self.scale = real_number("scale", scale, above=0)

    def update(self, *, overflow: bool) -> None:
        """Does nothing."""

    def state_dict(self) -> dict[str, Any]:
        """The scale."""
        return {"scale": self.scale}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keeps its own scale, which is a setting of the script.

        Raises:
            ValueError: it is the state of another policy, or the scale is not a positive number.
        """
        if set(state_dict) != {"scale"}:
            raise ValueError(
                f"StaticLossScaling state must have the key 'scale' alone, got {list(state_dict)!r:.80}: {_ANOTHER_WROTE_IT}"
            )
        real_number("scale", state_dict["scale"], above=0)


class _DynamicLossScaling:
    """The common part of the growing policies: bounds, the policy at the floor, and a state with all counters."""

    enabled = True
    _saved: tuple[str, ...] = ("scale",)  # what is added later is read with a default, as older states lack it

    def __init__(self, init_scale: float, min_scale: float, max_scale: float, on_floor: str) -> None:
        self.scale = real_number("init_scale", init_scale, above=0)
        self.min_scale = real_number("min_scale", min_scale, above=0)
        self.max_scale = real_number("max_scale", max_scale, above=0)
        self.on_floor = one_of("on_floor", on_floor, ("raise", "hold"))
        if not self.min_scale <= self.scale <= self.max_scale:
            raise ValueError(
                f"init_scale must be between min_scale={self.min_scale:g} and max_scale={self.max_scale:g}, got {self.scale:g}"
            )

    def _grow(self, factor: float) -> None:
        self.scale = min(self.scale * factor, self.max_scale)

    def _back_off(self, factor: float) -> None:
        """Lowers the scale. At the floor it stays, with an error if the policy says so; else `give_up_after` ends the run."""
        if self.scale <= self.min_scale and self.on_floor == "raise":
            raise LossScaleFloorError(self.scale, self.min_scale)
        self.scale = max(self.scale * factor, self.min_scale)

    def state_dict(self) -> dict[str, Any]:
        """The scale and every counter, so that a resumed run grows it at the same update."""
        return {name: getattr(self, name) for name in self._saved}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes scale and counters over.

        Raises:
            ValueError: it is the state of another policy, or the scale is not a positive number.
        """
        if set(state_dict) != set(self._saved):
            raise ValueError(
                f"{type(self).__name__} state must have the keys {list(self._saved)}, got {list(state_dict)!r:.80}: "
                f"{_ANOTHER_WROTE_IT}"
            )
        real_number("scale", state_dict["scale"], above=0)
        for name in self._saved[1:]:
            value, least = state_dict[name], -1 if name.startswith("last_") else 0
            if type(value) is not int or value < least:
                raise ValueError(f"{type(self).__name__} state must have an integer from {least} as {name}, got {value!r:.60}")
        for name in self._saved:
            setattr(self, name, state_dict[name])


class TorchLossScaling(_DynamicLossScaling):
    """The rule of `torch.amp.GradScaler`: grow after `growth_interval` good updates in a row, back off at an overflow.

    GradScaler's first scale of 2^16 is meant for mean losses. A loss that is a sum over n samples has gradients n times as
    large, so here 2^16 is divided by the size of the first update, rounded up to a power of two. All ranks agree on that size
    after the first forward of the first update, in one small collective: this rank's first sample size times its micro-batches,
    summed over the ranks. No later update needs anything.

    Args:
        init_scale: the first scale, which is taken as it is; None for 2^16 divided by the size of the first update.
        growth_factor: what it grows by.
        backoff_factor: what an overflow multiplies it by.
        growth_interval: good updates in a row before it grows.
        min_scale: the floor. GradScaler has none and reaches 0 in the end.
        max_scale: the ceiling; past 2^24 float16 gradients gain nothing.
        on_floor: at an overflow on the floor, `"raise"` a `LossScaleFloorError` or `"hold"` the scale.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a value is out of range, or `init_scale` is not between `min_scale` and `max_scale`.
    """

    _saved = ("scale", "good_updates")

    def __init__(
        self,
        init_scale: float | None = None,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 2.0**-24,
        max_scale: float = 2.0**24,
        on_floor: Literal["raise", "hold"] = "raise",
    ) -> None:
        self.awaits_size = init_scale is None
        if init_scale is None:
            init_scale = min(max(2.0**16, real_number("min_scale", min_scale)), real_number("max_scale", max_scale))
        super().__init__(init_scale, min_scale, max_scale, on_floor)
        self.growth_factor = real_number("growth_factor", growth_factor, above=1)
        self.backoff_factor = real_number("backoff_factor", backoff_factor, above=0)
        if self.backoff_factor >= 1:
            raise ValueError(f"backoff_factor must be below 1, got {backoff_factor!r}")
        self.growth_interval = positive_int("growth_interval", growth_interval)
        self.good_updates = 0

    def begin(self, sample_size: float) -> None:
        """Sets the first scale, unless there are no samples yet."""
        if 0 < sample_size < math.inf:
            fraction, exponent = math.frexp(sample_size)
            # Makes 2^exponent the smallest power of two that is not below the size.
            exponent -= fraction == 0.5
            self.scale = min(max(math.ldexp(1.0, 16 - exponent), self.min_scale), self.max_scale)
            self.awaits_size = False

    def state_dict(self) -> dict[str, Any]:
        """The scale and the counter; and before the first update that the scale is not known yet."""
        return super().state_dict() | ({"awaits_size": True} if self.awaits_size else {})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes them over.

        Raises:
            ValueError: it is the state of another policy, or the scale is not a positive number.
        """
        awaits = state_dict.get("awaits_size", False)
        if not isinstance(awaits, bool):
            raise ValueError(f"TorchLossScaling state must have True or False as awaits_size, got {awaits!r:.60}")
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "awaits_size"})
        self.awaits_size = awaits

    def update(self, *, overflow: bool) -> None:
        """Grows or backs off."""
        if overflow:
            self.good_updates = 0
            self._back_off(self.backoff_factor)
            return
        self.good_updates += 1
        if self.good_updates == self.growth_interval:
            self.good_updates = 0
            self._grow(self.growth_factor)


class FairseqLossScaling(_DynamicLossScaling):
    """fairseq's `DynamicLossScaler`: double every `scale_window` updates since an overflow, halve if overflows are frequent.

    Args:
        init_scale: the first scale; low, because a loss that is a sum has large gradients.
        scale_window: updates since the last overflow before it doubles. fairseq's default is 2^14 / ranks / accumulation
            steps, which can become 0 there; here it is at least 1.
        tolerance: the share of overflows since the last change of scale below which it is not halved; 0 halves always.
        threshold: a floor below which the scale does not fall, without an error; None for no floor.
        min_scale: halving to this or below is refused.
        max_scale: the ceiling.
        on_floor: what refusing means: `"raise"` a `LossScaleFloorError` with the scale restored, or `"hold"` it.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a value is out of range, or `init_scale` is not between `min_scale` and `max_scale`.
    """

    _saved = ("scale", "updates", "last_overflow", "last_rescale", "overflows_since_rescale")

    def __init__(
        self,
        init_scale: float = 2.0**7,
        *,
        scale_window: int = 2**14,
        tolerance: float = 0.0,
        threshold: float | None = None,
        min_scale: float = 1e-4,
        max_scale: float = 2.0**24,
        on_floor: Literal["raise", "hold"] = "raise",
    ) -> None:
        super().__init__(init_scale, min_scale, max_scale, on_floor)
        self.scale_window = positive_int("scale_window", scale_window)
        self.tolerance = real_number("tolerance", tolerance, at_least=0)
        self.threshold = None if threshold is None else real_number("threshold", threshold, above=0)
        self.updates = 0
        self.last_overflow = self.last_rescale = -1
        self.overflows_since_rescale = 0

    def update(self, *, overflow: bool) -> None:
        """Doubles or halves."""
        if overflow:
            self._overflow()
        elif (self.updates - self.last_overflow) % self.scale_window == 0:
            self._grow(2.0)
            self.last_rescale = self.updates
        self.updates += 1

    def _overflow(self) -> None:
        since_rescale = self.updates - self.last_rescale
        self.last_overflow = self.updates
        self.overflows_since_rescale += 1
        if self.overflows_since_rescale / max(since_rescale, 1) < self.tolerance:
            return
        halved = max(self.scale / 2, self.threshold or 0.0)
        if halved <= self.min_scale:
            if self.on_floor == "raise":
                raise LossScaleFloorError(self.scale, self.min_scale)
        else:
            self.scale = halved
        self.last_rescale = self.updates
        self.overflows_since_rescale = 0


class DeepSpeedLossScaling(_DynamicLossScaling):
    """DeepSpeed's `DynamicLossScaler`: double after `scale_window` good updates past the first, halve when patience is used up.

    Args:
        init_scale: the first scale.
        scale_window: it doubles after `scale_window` + 1 good updates since the last overflow, then every `scale_window`.
        hysteresis: the scale is halved at the `hysteresis`-th overflow; those before only use up patience.
        consecutive_hysteresis: every good update restores the patience; else only growing does.
        min_scale: the floor.
        max_scale: the ceiling.
        on_floor: at an overflow on the floor, `"raise"` a `LossScaleFloorError` or `"hold"` the scale.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a value is out of range, or `init_scale` is not between `min_scale` and `max_scale`.
    """

    _saved = ("scale", "updates", "last_overflow", "patience")

    def __init__(
        self,
        init_scale: float = 2.0**16,
        *,
        scale_window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
        on_floor: Literal["raise", "hold"] = "raise",
    ) -> None:
        super().__init__(init_scale, min_scale, max_scale, on_floor)
        self.scale_window = positive_int("scale_window", scale_window)
        self.hysteresis = self.patience = positive_int("hysteresis", hysteresis)
        self.consecutive_hysteresis = consecutive_hysteresis
        self.updates, self.last_overflow = 0, -1

    def update(self, *, overflow: bool) -> None:
        """Doubles, halves or uses up patience."""
        if overflow:
            if self.patience == 1:
                self._back_off(0.5)
            else:
                self.patience -= 1
            self.last_overflow = self.updates
        else:
            self._good()
        self.updates += 1

    def _good(self) -> None:
        good_before = self.updates - self.last_overflow - 1
        grows = good_before > 0 and good_before % self.scale_window == 0
        if self.consecutive_hysteresis or grows:
            self.patience = self.hysteresis
        if grows:
            self._grow(2.0)


def scale_near_floor(policy: LossScaling) -> float:
    """The scale up to which the next overflow may be refused at the floor: no policy lowers a larger one that far at once.

    Up to it each update remembers the random state, so that the error can say where the first value that is not finite is.
    """
    return 2.0 * policy.min_scale if isinstance(policy, _DynamicLossScaling) and policy.on_floor == "raise" else 0.0
