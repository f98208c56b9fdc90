"""tensordict: batches of its own classes, which move themselves and are cut along their first dimension."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict, tensorclass
from torch import Tensor, nn

from ignite_train import ForwardOutput
from libraries.harness import HALVED, Case, dealt
from libraries.points import batches, network
from libraries.points import forward as by_points


@tensorclass
class Points:
    """Points and their classes."""

    x: Tensor
    y: Tensor


def dicts() -> list[Any]:
    return [TensorDict({"points": {"x": x}, "y": y}, batch_size=len(y)) for x, y in batches()]


def objects() -> list[Any]:
    return [Points(x=x, y=y, batch_size=[len(y)]) for x, y in batches()]


def forward(model: nn.Module, batch: Any) -> ForwardOutput:
    return by_points(model, (batch["points", "x"], batch["y"]))


def of_objects(model: nn.Module, batch: Any) -> ForwardOutput:
    return by_points(model, (batch.x, batch.y))


def has_room(batch: Any) -> bool:
    return len(batch) < 3


CASES = [
    Case("TensorDict", network, dealt(dicts), forward),
    Case("TensorDict, halved where memory runs out", network, dealt(dicts), forward, options=HALVED, has_room=has_room),
    Case("tensorclass, halved where memory runs out", network, dealt(objects), of_objects, options=HALVED, has_room=has_room),
]
