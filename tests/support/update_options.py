"""Arguments of `create_trainer` given flat, as helpers of tests pass them on: the rare ones move into its options."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ignite_train import UpdateOptions

_RARE = {field.name for field in fields(UpdateOptions)}


def with_options(**arguments: Any) -> dict[str, Any]:
    """The same arguments, the rare settings among them as `options=UpdateOptions(...)`."""
    rare = {name: value for name, value in arguments.items() if name in _RARE}
    everyday = {name: value for name, value in arguments.items() if name not in _RARE}
    return everyday | ({"options": UpdateOptions(**rare)} if rare else {})
