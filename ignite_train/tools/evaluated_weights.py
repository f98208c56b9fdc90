"""The weights with which a run was evaluated, where the optimizer trains at others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ignite_train.checkpoint.reader import CheckpointReader
from ignite_train.errors import CheckpointError

__all__ = ["evaluated_weights"]


def evaluated_weights(stored: CheckpointReader, state: Mapping[str, Any]) -> dict[str, Any]:
    """The model's state at the point where schedule-free optimizers are evaluated.

    They hold y = (1 - beta) z + beta x in the model while they train, and z in their state; x is what counts (Defazio et al.,
    The Road Less Scheduled, arXiv:2405.15682). It is computed as their `eval()` does: y + (1 - 1 / beta) (z - y).

    Args:
        stored: the checkpoint.
        state: its model's.

    Raises:
        CheckpointError: no optimizer in the checkpoint is schedule-free.
    """
    found, changed = False, dict(state)
    for name, described in stored.read("description")["optimizers"].items():
        optimizer = stored.read(name)
        if not isinstance(optimizer, dict) or not any("z" in one for one in optimizer.get("state", {}).values()):
            continue
        found = True
        for group, names in zip(optimizer["param_groups"], described["names"], strict=True):
            if group.get("train_mode") is False:
                continue
            weight = 1 - 1 / _beta(name, group)
            for index, of in zip(group["params"], names, strict=True):
                z = optimizer["state"].get(index, {}).get("z")
                if isinstance(z, Tensor) and of in state:
                    point = torch.lerp(state[of], z.to(state[of].dtype), weight)
                    changed |= {other: point for other, value in state.items() if value is state[of]}
    if not found:
        raise CheckpointError(
            f"evaluated=True needs a schedule-free optimizer, and {stored.path} has none whose state has z; the weights of an "
            "average are an entry, such as entry='ModelEMA'"
        )
    return changed


def _beta(name: str, group: Mapping[str, Any]) -> float:
    beta = group["betas"][0] if "betas" in group else group.get("momentum")
    if not isinstance(beta, (int, float)) or not 0 < beta <= 1:
        raise CheckpointError(f"{name} must have betas or a momentum in its groups, got {sorted(map(str, group))}")
    return float(beta)
