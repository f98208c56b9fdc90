"""A description of a loader and its order in plain types: saved with the position, and compared when a run resumes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from ignite_train.data.samplers import ShardedSampler

__all__ = ["Seekable", "changes", "describe_data", "length_of"]


@runtime_checkable
class Seekable(Protocol):
    """A loader whose next pass can start anywhere, such as `ResumableLoader`; `len()` then counts what is left."""

    samples_per_round: int

    def seek(self, samples: int) -> None:
        """Lets the next pass start after `samples` samples, counted over all ranks."""


@runtime_checkable
class _Described(Protocol):
    """A sampler of batches that says what its order depends on, such as `TokenBudgetSampler`."""

    def describe(self) -> dict[str, Any]: ...


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


def changes(before: Mapping[str, Any], now: Mapping[str, Any], *, jumps: bool) -> tuple[list[str], list[str]]:
    """The differences between two descriptions, one line each.

    Args:
        before: describes the loader that gave the first part of an epoch.
        now: describes the loader that will give the rest.
        jumps: whether the position is a number of samples and not of micro-batches.

    Returns:
        Those because of which the rest would miss samples or use some twice, and the harmless ones. An order that is not named
        was drawn: the samplers of earlier versions knew no other.
    """
    fixed = _has_fixed_order(before) and _has_fixed_order(now)
    harmless = {"drop_last"}
    if jumps:
        harmless.add("batch_size")
    if fixed:
        harmless |= {"samples", "seed", "micro_batches"}
    if fixed and not jumps and "seekable" not in (*before, *now):
        harmless |= {"loader", "sampler", "shuffle"}
    keys = [key for key in {**before, **now} if key != "seekable" and before.get(key) != now.get(key)]
    if "samples" in keys or "shuffle" in keys:  # which decide about the order too
        keys = [key for key in keys if key != "order"]
    refused = [_line(key, before, now) for key in keys if key not in harmless]
    return refused, [_line(key, before, now) for key in keys if key in harmless and not (jumps and key == "batch_size")]


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
        if isinstance(batch_sampler, _Described):
            return described | batch_sampler.describe()
        sampler = batch_sampler.sampler if isinstance(batch_sampler, BatchSampler) else None
        if sampler is None:
            return described
        described |= {"batch_size": batch_sampler.batch_size, "drop_last": batch_sampler.drop_last}
    else:
        described["drop_last"] = loader.drop_last
    return described | {"samples": _length_of_dataset(loader)} | _describe_sampler(sampler)


def _describe_sampler(sampler: Any) -> dict[str, Any]:
    described: dict[str, Any] = {"sampler": type(sampler).__name__}
    if isinstance(sampler, ShardedSampler):
        described |= sampler.describe()
    elif isinstance(sampler, RandomSampler):
        described |= {"shuffle": True, "replacement": sampler.replacement, "num_samples": sampler.num_samples}
    elif isinstance(sampler, SequentialSampler):
        described["shuffle"] = False
    elif isinstance(sampler, DistributedSampler):
        options = vars(sampler)
        described |= {name: options[name] for name in ("shuffle", "seed", "num_replicas")}
    elif isinstance(sampler, Sized):
        described["num_samples"] = length_of(sampler)
    return described


def _length_of_dataset(loader: DataLoader[Any]) -> int | None:
    dataset: Any = loader.dataset
    return length_of(dataset)


def _has_fixed_order(described: Mapping[str, Any]) -> bool:
    """Whether sample i of an epoch is the same in any longer dataset too."""
    return described.get("shuffle") is False and described.get("sampler") != "DistributedSampler"


def _line(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    if key == "order":
        return f"order: {before.get(key, 'drawn')} -> {now.get(key, 'drawn')} (the version that wrote it can finish the epoch)"
    return f"{key}: {before.get(key)!r} -> {now.get(key)!r}"
