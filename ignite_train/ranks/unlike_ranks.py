"""Ranks that were started unlike one another: the difference is named on all of them, before they wait for one another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence

from torch import nn

from ignite_train.ranks import collectives

__all__ = ["described_parameters", "refuse_unlike_ranks"]

_MOST = 3  # differences that an error names


def refuse_unlike_ranks(description: Mapping[str, str], beside: bytes = b"") -> bytes:
    """Compares a description over the ranks. Collective: one exchange of digests, and another one where they differ.

    Args:
        description: what must be the same on all ranks, by name.
        beside: bytes that rank 0 gives to all ranks in the same exchange.

    Returns:
        Those of rank 0.

    Raises:
        ValueError: the descriptions differ, on all ranks alike.
    """
    digest = hashlib.sha256(json.dumps(sorted(description.items())).encode()).digest()
    of_ranks = collectives.gather_objects((digest, beside))
    if len({digest for digest, _ in of_ranks}) > 1:
        raise ValueError(_difference(collectives.gather_objects(dict(description))))
    return bytes(of_ranks[0][1])


def described_parameters(model: nn.Module, own: Collection[str] = ()) -> dict[str, str]:
    """The shape and dtype of each parameter, and whether it is trained; without those that are each rank's `own`."""
    return {
        f"the parameter {name}": f"{list(p.shape)} of {p.dtype}, {'trained' if p.requires_grad else 'frozen'}"
        for name, p in model.named_parameters()
        if name not in own
    }


def _difference(of_ranks: Sequence[Mapping[str, str]]) -> str:
    names = [
        name
        for name in dict.fromkeys(name for description in of_ranks for name in description)
        if len({description.get(name) for description in of_ranks}) > 1
    ]
    parts = []
    for name in names[:_MOST]:
        ranks: dict[str, list[str]] = {}
        for rank, description in enumerate(of_ranks):
            ranks.setdefault(description.get(name, "none"), []).append(str(rank))
        values = (f"{value} on rank {', '.join(numbers)}" for value, numbers in ranks.items())
        parts.append(f"{name}: {' and '.join(values)}")
    more = f"; and {len(names) - _MOST} more differences" if len(names) > _MOST else ""
    return (
        f"trainer must be made alike on all ranks, got {'; '.join(parts)}{more}; give all ranks the same settings, limits, "
        "handlers and model"
    )
