"""What a checkpoint says of the script that wrote it: configuration, settings, and the versions that its numbers depend on."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Mapping
from types import MethodType
from typing import Any

import ignite
import numpy as np
import torch
from ignite.engine import Engine

from ignite_train.checkpoint.tree import TreeEncoder, decode
from ignite_train.engine.dispatch import Attachable, attached

__all__ = ["config_changes", "handler_settings", "plain_config", "versions"]

_SETTINGS = ("handlers.", "trainer.loss_scaling.")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # in the text of an object: another one in each process


def plain_config(config: Any, description: Any, handlers: Mapping[str, Any] | None = None) -> Any:
    """The user's configuration, the arguments of the trainer and the settings of handlers, as a tree for the manifest.

    Values that are neither plain nor containers are stored as text, which is the same in each process that makes them.

    Args:
        config: from the user.
        description: of the trainer.
        handlers: what `handler_settings` gave.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): plain(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(entry) for entry in value]
        if isinstance(value, (set, frozenset)):  # their order is another one in each process
            return sorted(map(plain, value), key=repr)
        return value if value is None or isinstance(value, (bool, int, float, str)) else _ADDRESS.sub("", str(value))

    settings = {"config": plain(config), "trainer": plain(description), "handlers": plain(handlers or {})}
    return TreeEncoder().encode(settings, ("config",))


def handler_settings(engines: Iterable[Engine]) -> dict[str, dict[str, Any]]:
    """The settings of the attached handlers, by their class or `saved_as`; a second one of a name gets a number.

    Args:
        engines: the trainers and the evaluators.
    """
    found: dict[int, Attachable] = {}
    for engine in engines:
        for _, handler, _ in attached(engine):
            owner = handler.__self__ if isinstance(handler, MethodType) else handler
            if isinstance(owner, Attachable):
                found.setdefault(id(owner), owner)
    settings: dict[str, dict[str, Any]] = {}
    for owner in found.values():
        name, number = owner.saved_as or type(owner).__name__, 1
        while (key := name if number == 1 else f"{name}-{number}") in settings:
            number += 1
        settings[key] = owner.settings()
    return settings


def config_changes(saved: Any, script: Any, in_effect: Any) -> list[str]:
    """The differences between two trees of `plain_config`, a line each. Of a setting it says which of the two is used.

    Args:
        saved: of the checkpoint.
        script: of the script that resumes, before a state was restored.
        in_effect: the same afterwards.
    """
    before, now, used = _flat(saved), _flat(script), _flat(in_effect)
    keys = [key for key in {**before, **now} if repr(before.get(key)) != repr(now.get(key)) or (key in before) != (key in now)]
    lines = []
    for key in keys:
        if not key.startswith(_SETTINGS):
            lines.append(f"{key}: {_shown(before, key)} -> {_shown(now, key)}")
        elif key in before and key in now:  # what is attached on one side only has no setting on the other
            wins = "checkpoint" if repr(used.get(key)) == repr(before[key]) else "script"
            lines.append(f"{key}: {_shown(before, key)} -> {_shown(now, key)} (the {wins}'s is used)")
    return lines


def versions() -> dict[str, str]:
    """The versions of the packages that a run's numbers depend on."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "pytorch-ignite": ignite.__version__,
        "numpy": np.__version__,
    }


def _flat(tree: Any) -> dict[str, Any]:
    """The values in a tree, by their dotted names."""
    values: dict[str, Any] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, entry in value.items():
                walk(entry, f"{path}.{key}" if path else str(key))
        else:
            values[path] = value

    walk(decode(tree, ("config",)), "")
    return values


def _shown(values: dict[str, Any], key: str) -> str:
    return f"{values[key]!r:.200}" if key in values else "nothing"
