"""A description of a loader and its order in plain types: saved with the position, and compared when a run resumes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sized
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset
from torch.utils.data.distributed import DistributedSampler

from ignite_train.data.resumable_loader import ResumableLoader
from ignite_train.data.samplers import HasEpoch, ShardedSampler, cuts_batches, samplers_of
from ignite_train.data.token_budget_sampler import TokenBudgetSampler
from ignite_train.model.random_state import generators_within

__all__ = [
    "DRAWS_NOTHING",
    "DealtOrder",
    "Pipeline",
    "Seekable",
    "attributes_of_samplers",
    "changes",
    "dealt_order",
    "describe_data",
    "is_of_user",
    "length_of",
]

# Packages whose samplers take their orders from generators, or draw nothing.
_KNOWN = ("torch", "torchdata", "ignite", "ignite_train", "builtins", "numpy")
_DRAWN = "order drawn from"
_MAX_ENTRIES = 100_000  # of a list that is hashed


@runtime_checkable
class Seekable(Protocol):
    """A loader whose next pass can start anywhere, such as `ResumableLoader`; `len()` then counts what is left."""

    samples_per_round: int

    def seek(self, samples: int) -> None:
        """Lets the next pass start after `samples` samples, counted over all ranks."""


@runtime_checkable
class Pipeline(Protocol):
    """A loader such as `torchdata.nodes.Loader`, whose state lacks the generators of its samplers."""

    restart_on_stop_iteration: bool


DRAWS_NOTHING = (SequentialSampler, ShardedSampler, DistributedSampler, list, tuple, range)  # of samplers


def length_of(loader: Any) -> int | None:
    """Micro-batches in a pass over `loader`, or the length of a sampler or dataset; None if it has none."""
    if not isinstance(loader, Sized):
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # a DataLoader over an iterable dataset, or over a sampler without a length
        return None


def describe_data(loader: Iterable[Any]) -> dict[str, Any]:
    """The type of a loader, its samples, batch size and order, as far as known. Does not open it or draw random numbers."""
    described: dict[str, Any] = {"loader": type(loader).__name__}
    if isinstance(loader, DataLoader):
        described |= _describe_batches(loader)
    has_size = described.get("batch_size") is not None or "seekable" in described  # which says where each rank stands
    if "samples" not in described or not has_size:
        described["micro_batches"] = length_of(loader)
    return described


class DealtOrder(NamedTuple):
    """The order of a loader whose samples are dealt out to ranks, each of which gets its own.

    Attributes:
        ranks: to which.
        settings: on which the order depends, in plain types. They must be the same on these ranks.
    """

    ranks: tuple[int, ...]
    settings: dict[str, Any]


def dealt_order(loader: Iterable[Any] | None) -> DealtOrder | None:
    """The order of a loader with `ShardedSampler` or `TokenBudgetSampler`; None of any other, whose ranks may differ."""
    if not isinstance(loader, DataLoader) or (sampler := _dealt_by(loader)) is None:
        return None
    settings = sampler.describe() | {"drop_last": describe_data(loader).get("drop_last")}
    return DealtOrder(sampler.dealing.ranks, settings | _indices_of_subsets(loader))


def _dealt_by(loader: DataLoader[Any]) -> ShardedSampler | TokenBudgetSampler | None:
    """The sampler that deals the samples of a loader, or its batches, out to the ranks."""
    if isinstance(loader, ResumableLoader):
        return loader.dealt_by
    return next((one for one in samplers_of(loader) if isinstance(one, (ShardedSampler, TokenBudgetSampler))), None)


def _indices_of_subsets(loader: DataLoader[Any]) -> dict[str, str]:
    """The samples that `torch.utils.data.Subset` chooses, shortened: ranks may not deal out different halves of a split."""
    found = list[str]()
    dataset: Any = loader.dataset
    if isinstance(loader, ResumableLoader):
        dataset = dataset.dataset
    while isinstance(dataset, Subset):
        indices: Any = dataset.indices
        if isinstance(indices, range):
            found.append(str(indices))
        elif isinstance(indices, (list, np.ndarray, Tensor)):
            found.append(str(_short(indices[:_MAX_ENTRIES])))
        dataset = dataset.dataset
    return {"indices of Subset": " ".join(found)} if found else {}


def changes(before: Mapping[str, Any], now: Mapping[str, Any], *, jumps: bool) -> tuple[list[str], list[str]]:
    """The differences between two descriptions, one line each.

    Args:
        before: describes the loader that gave the first part of an epoch.
        now: describes the loader that will give the rest.
        jumps: whether the position is a number of samples and not of micro-batches.

    Returns:
        Those because of which the rest would miss samples or use some twice, and the harmless ones.
    """
    fixed = _has_fixed_order(before) and _has_fixed_order(now)
    harmless = {"drop_last"}
    if jumps:
        harmless |= {"batch_size", _DRAWN}
    if fixed:
        harmless |= {"samples", "seed", "micro_batches"}
    if fixed and not jumps and "seekable" not in (*before, *now):
        harmless |= {"loader", "sampler", "shuffle"}
    keys = [key for key in {**before, **now} if key != "seekable" and before.get(key) != now.get(key)]
    if _DRAWN not in before or _DRAWN not in now:
        keys = [key for key in keys if key != _DRAWN]
    refused = [_line(key, before, now) for key in keys if key not in harmless]
    return refused, [_line(key, before, now) for key in keys if key in harmless]


def attributes_of_samplers(loader: Iterable[Any]) -> dict[str, Any]:
    """The plain attributes of samplers of the user's own that are not told the epoch; of long ones a hash.

    Such a sampler may count its passes, or shuffle the order that the pass before has left.
    """
    found = {
        f"{type(sampler).__name__}.{name}": _short(value)
        for sampler in samplers_of(loader)
        if is_of_user(sampler)
        for name, value in _variables(sampler).items()
    }
    return {name: value for name, value in found.items() if value is not None}


def is_of_user(one: object) -> bool:
    """Whether a loader or sampler is of a class of the user's, and is not told the epoch, on which its order could depend."""
    return type(one).__module__.partition(".")[0] not in _KNOWN and not isinstance(one, HasEpoch)


def _variables(sampler: Any) -> Mapping[str, Any]:
    try:
        variables: dict[str, Any] = vars(sampler)
    except TypeError:  # an array, say
        return {}
    return variables


def _short(value: Any) -> Any:
    """A number itself, the hash of a list or array; None for anything else, and for what is too long to read each time."""
    if isinstance(value, (np.ndarray, Tensor)):
        value = _as_list(value)
    if isinstance(value, (bool, int, float)):
        return value
    if not isinstance(value, list) or len(value) > _MAX_ENTRIES:
        return None
    text = repr(value)
    return None if " at 0x" in text else hashlib.blake2b(text.encode(), digest_size=8).hexdigest()  # an object in the list


def _as_list(array: np.ndarray[Any, Any] | Tensor) -> Any:
    """The entries, or the only one of an array without dimensions; None if there are too many, or they cannot be read."""
    num_entries = array.numel() if isinstance(array, Tensor) else array.size
    try:
        return array.tolist() if num_entries <= _MAX_ENTRIES else None
    except RuntimeError:  # a sparse or nested tensor, or one without memory
        return None


def _describe_batches(loader: DataLoader[Any]) -> dict[str, Any]:
    described: dict[str, Any] = {"batch_size": loader.batch_size}
    if isinstance(loader, Seekable):
        described["seekable"] = True
    if isinstance(loader.dataset, IterableDataset):
        return described
    sampler: Any = loader.sampler
    if loader.batch_size is None and loader.batch_sampler is not None:
        batch_sampler: Any = loader.batch_sampler
        described["batch_sampler"] = type(batch_sampler).__name__
        if isinstance(dealt_by := _dealt_by(loader), TokenBudgetSampler):
            return described | dealt_by.describe()
        if not cuts_batches(batch_sampler):
            return described
        sampler = batch_sampler.sampler
        described |= {"batch_size": batch_sampler.batch_size, "drop_last": batch_sampler.drop_last}
    else:
        described["drop_last"] = loader.drop_last
    described |= {"samples": length_of(loader.dataset)} | _describe_sampler(sampler)
    if not isinstance(sampler, DRAWS_NOTHING):
        described[_DRAWN] = _drawn_from(loader)
    return described


def _describe_sampler(sampler: Any) -> dict[str, Any]:
    described: dict[str, Any] = {"sampler": type(sampler).__name__}
    if isinstance(sampler, ShardedSampler):
        described |= sampler.describe()
    elif isinstance(sampler, RandomSampler) and "replacement" in vars(sampler):
        described |= {"shuffle": True, "replacement": sampler.replacement, "num_samples": sampler.num_samples}
    elif isinstance(sampler, SequentialSampler):
        described["shuffle"] = False
    elif isinstance(sampler, DistributedSampler):
        options = vars(sampler)
        described |= {name: options[name] for name in ("shuffle", "seed", "num_replicas") if name in options}
    elif isinstance(sampler, Sized):
        described["num_samples"] = length_of(sampler)
    return described


def _drawn_from(loader: DataLoader[Any]) -> str:
    """The generators from which the order of a loader may come: its own and those of its samplers, or that of the process.

    A loader draws a number at the beginning of each pass, from its own generator if it has one, and otherwise from the process.
    So it matters for an order that comes from there too.
    """
    names = [name for name in generators_within(loader) if name.startswith(("generator", "sampler.", "batch_sampler."))]
    of_samplers = any(generators_within(sampler) for sampler in samplers_of(loader))
    return ", ".join([*names, *["process"] * (not of_samplers)])


def _has_fixed_order(described: Mapping[str, Any]) -> bool:
    """Whether sample i of an epoch is the same in any longer dataset too."""
    return described.get("shuffle") is False and described.get("sampler") != "DistributedSampler"


def _line(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    if key == _DRAWN:
        return f"{key}: {before[key]!s:.60} -> {now[key]!s:.60}"
    return f"{key!s:.60}: {before.get(key)!r:.60} -> {now.get(key)!r:.60}"
