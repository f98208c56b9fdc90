"""Ranks that were started unlike one another: the difference is named on all of them, before they wait for one another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

from torch import nn

from ignite_train.ranks import collectives

__all__ = ["Description", "described_model", "exchanged", "refuse_unlike_ranks"]

_MOST = 3  # differences that an error names


@dataclass(frozen=True, slots=True)
class Description:
    """Settings that must be the same on several ranks, in words by name.

    Attributes:
        of_all: on all ranks.
        sharing: the ranks among which samples are dealt out, in increasing order; empty where that is not known.
        of_data: on the sharing ranks that have such an entry.
        in_order: names that stand at the same places on all ranks, by what they are names of.
        buffers: the names of the buffers, which stand in the same order where all ranks have the same names. A rank may have
            some under names of its own, such as a queue, where no other rank needs them.
    """

    of_all: Mapping[str, str] = field(default_factory=dict)
    sharing: tuple[int, ...] = ()
    of_data: Mapping[str, str] = field(default_factory=dict)
    in_order: Mapping[str, Sequence[str]] = field(default_factory=dict)
    buffers: Sequence[str] = ()


class _Sent(NamedTuple):
    """The message of a rank: a value, and the name of the exchange."""

    which: str
    value: Any


def exchanged(exchange: Callable[[Any], list[Any]], which: str, value: Any) -> list[Any]:
    """Exchanges a value of each rank, and returns them in rank order. Collective.

    Args:
        exchange: such as `collectives.gather_objects`.
        which: names the exchange.
        value: of this rank.

    Raises:
        ValueError: some rank is in another exchange, on all ranks whose exchange has a name.
    """
    of_ranks = exchange(_Sent(which, value))
    names = [one.which if isinstance(one, _Sent) else "another" for one in of_ranks]
    if parts := _differences({rank: {"the exchange between the ranks": name} for rank, name in enumerate(names)}):
        raise ValueError(_in_words(parts))
    return [one.value for one in of_ranks]


def refuse_unlike_ranks(description: Description, beside: bytes = b"") -> bytes:
    """Compares a description over the ranks. Collective: one exchange of digests, and another one where they differ.

    Args:
        description: what must be the same.
        beside: bytes that rank 0 gives to all ranks in the same exchange.

    Returns:
        Those of rank 0.

    Raises:
        ValueError: the descriptions differ, on all ranks alike.
    """
    alike = _digest(description.of_all, description.in_order, {"the buffers": description.buffers})
    digests = alike, _digest(description.of_data)
    of_ranks = exchanged(collectives.gather_objects, "of settings", (*digests, description.sharing, beside))
    of_data = {(sharing, digest) for _, digest, sharing, _ in of_ranks if sharing}
    differ = len({digest for digest, *_ in of_ranks}) > 1 or len(of_data) > len({sharing for sharing, _ in of_data})
    if differ and (parts := _differences_of(collectives.gather_objects(description))):
        raise ValueError(_in_words(parts))
    return bytes(of_ranks[0][-1])


def _digest(*described: Mapping[str, Any]) -> bytes:
    return hashlib.sha256(json.dumps([sorted(one.items()) for one in described]).encode()).digest()


def described_model(model: nn.Module, own: Collection[str] = ()) -> Description:
    """Its parameters and buffers, without those that are each rank's `own`.

    Of a parameter it has the shape and dtype, and whether it is trained. Torch's wrappers and our messages match parameters and
    buffers over the ranks by their places, so the names alone do not make a model the same.
    """
    parameters = {name: parameter for name, parameter in model.named_parameters() if name not in own}
    described = {
        f"the parameter {name}": f"{list(p.shape)} of {p.dtype}, {'trained' if p.requires_grad else 'frozen'}"
        for name, p in parameters.items()
    }
    buffers = [name for name, _ in model.named_buffers() if name not in own]
    return Description(described, in_order={"the parameters": [*parameters]}, buffers=buffers)


def _first_other_place(kind: str, orders: Sequence[Sequence[str]]) -> list[str]:
    """The first place, counted from 1, at which names differ; the places behind it would say the same."""
    hint = "" if len({tuple(sorted(order)) for order in orders}) > 1 else " (a set has another order in each process)"
    for place, names in enumerate(zip_longest(*orders, fillvalue="none"), start=1):
        if parts := _differences({rank: {f"place {place} of {kind}": name} for rank, name in enumerate(names)}):
            return [f"{parts[0]}{hint}"]
    return []


def _differences_of(of_ranks: Sequence[Description]) -> list[str]:
    parts = _differences({rank: description.of_all for rank, description in enumerate(of_ranks)})
    # What only some ranks have moves what stands behind it, and has been named then.
    for kind in dict.fromkeys(kind for one in of_ranks for kind in one.in_order) if not parts else ():
        parts += _first_other_place(kind, [one.in_order.get(kind, ()) for one in of_ranks])
    if not parts and len({tuple(sorted(one.buffers)) for one in of_ranks}) == 1:
        parts = _first_other_place("the buffers", [one.buffers for one in of_ranks])
    for sharing in sorted({description.sharing for description in of_ranks if description.sharing}):
        among = {rank: one.of_data for rank, one in enumerate(of_ranks) if one.sharing == sharing}
        parts += _differences(among)
    return parts


def _in_words(parts: Sequence[str]) -> str:
    more = f"; and {len(parts) - _MOST} more differences" if len(parts) > _MOST else ""
    return (
        f"trainer must be made alike on all ranks, got {'; '.join(parts[:_MOST])}{more}; give all ranks the same settings, "
        "limits, order of samples, handlers and model"
    )


def _differences(of_ranks: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Each name whose values differ, with the value of each of these ranks."""
    parts = []
    for name in dict.fromkeys(name for described in of_ranks.values() for name in described):
        ranks: dict[str, list[str]] = {}
        for rank, described in of_ranks.items():
            ranks.setdefault(described.get(name, "none"), []).append(str(rank))
        if len(ranks) > 1:
            values = (f"{value} on rank {', '.join(numbers)}" for value, numbers in ranks.items())
            parts.append(f"{name}: {' and '.join(values)}")
    return parts
