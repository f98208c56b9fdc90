"""What a checkpoint says of the script that wrote it: its configuration, and the versions of what its numbers depend on."""

from __future__ import annotations

import platform
import re
from typing import Any

import ignite
import numpy as np
import torch

from ignite_train.checkpoint.tree import TreeEncoder, decode

__all__ = ["config_changes", "plain_config", "versions"]

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # in the text of an object: another one in each process


def plain_config(config: Any, description: Any) -> Any:
    """The user's configuration and the arguments of the trainer, as a tree for the manifest.

    Values that are neither plain nor containers are stored as text, which is the same in each process that makes them.

    Args:
        config: from the user.
        description: of the trainer.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): plain(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(entry) for entry in value]
        if isinstance(value, (set, frozenset)):  # their order is another one in each process
            return sorted(map(plain, value), key=repr)
        return value if value is None or isinstance(value, (bool, int, float, str)) else _ADDRESS.sub("", str(value))

    return TreeEncoder().encode({"config": plain(config), "trainer": plain(description)}, ("config",))


def config_changes(saved: Any, current: Any) -> list[str]:
    """The differences between two trees of `plain_config`, a line each."""
    before, now = _flat(saved), _flat(current)
    keys = [key for key in {**before, **now} if repr(before.get(key)) != repr(now.get(key)) or (key in before) != (key in now)]
    return [f"{key}: {_shown(before, key)} -> {_shown(now, key)}" for key in keys]


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
    return repr(values[key]) if key in values else "nothing"
