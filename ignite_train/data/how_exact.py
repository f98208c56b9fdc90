"""How exactly a run finds its position in a loader again, for the log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from inspect import isgeneratorfunction
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ignite_train.data.description import DRAWS_NOTHING, Pipeline, Seekable, is_of_user, length_of
from ignite_train.data.resumable_loader import ResumableLoader
from ignite_train.data.samplers import HasEpoch, inner_loaders, samplers_of
from ignite_train.engine.attachable import Stateful
from ignite_train.model.random_state import generators_within
from ignite_train.ranks import collectives

__all__ = ["how_exact"]


def how_exact(loader: Iterable[Any]) -> tuple[list[str], str]:
    """How a run that was interrupted in the middle of an epoch finds its position in `loader` again.

    Returns:
        What may differ after resuming, one sentence each, and a note, which may be empty.
    """
    kind = type(loader).__name__
    if isinstance(loader, (Seekable, list, tuple)):
        return [*_doubts_of_samples(loader)], ""
    workers = loader.num_workers if isinstance(loader, DataLoader) else 0
    doubts, note = list[str](), ""
    if isinstance(loader, Stateful):
        note = _note_of_state(loader)
        doubts += _doubts_of_state(loader)
    elif _is_stream(loader):
        doubts.append(
            f"the {kind} cannot save its position: resuming reads past what was done and is exact only if the stream gives the "
            "same data again, as one does that draws nothing at random or is seeded; if it does not, use a ResumableLoader"
        )
    else:
        note = _note_of_reading(loader)
        if isinstance(loader, DataLoader) and workers and not loader.in_order:
            doubts.append(
                f"the {kind} has in_order=False: its workers give micro-batches in an order that differs from pass to pass, so "
                "that resuming within an epoch misses some and repeats others; leave in_order out"
            )
        if isinstance(loader, DataLoader) and workers and loader.persistent_workers:
            doubts.append(
                f"the workers of the {kind} are persistent: what a dataset draws in them depends on earlier epochs and "
                "differs after resuming; use a ResumableLoader, or persistent_workers=False"
            )
        doubts += _doubts_of_inner(loader)
    if isinstance(loader, DataLoader) and loader.persistent_workers and isinstance(loader.dataset, HasEpoch):
        doubts.append(
            f"the workers of the {kind} are persistent: set_epoch of its dataset reaches them only if the dataset shares the "
            "epoch with them, as those of Hugging Face do, or else they give the first epoch again and again, and new workers "
            "after resuming give another; use a ResumableLoader, or persistent_workers=False"
        )
    if length_of(loader) is None and not workers and collectives.world_size() > 1:
        doubts.append(
            f"the {kind} has no length, so {collectives.world_size()} ranks read it one micro-batch ahead: what it draws from "
            "this process's random generators differs after resuming; draw no random numbers, or fetch in workers"
        )
    return doubts, note


def _doubts_of_samples(loader: Iterable[Any]) -> Iterator[str]:
    if not isinstance(loader, ResumableLoader) or not loader.num_workers or loader.seeds_generators:
        return
    for path in [*generators_within(loader.dataset)][:1]:
        name = path.removeprefix("_dataset.")
        yield (
            f"the workers of the {type(loader).__name__} have copies of the generator {name!r} of the dataset: what a sample "
            "draws from it differs after resuming, unless the sample seeds it; give the dataset a method seed_sample(seed) "
            "that seeds it for the sample that is fetched next"
        )


def _doubts_of_inner(loader: Iterable[Any]) -> Iterator[str]:
    """Of DataLoaders that are opened by a loader or a generator of the user's own, at a time that is not known."""
    if isinstance(loader, DataLoader) and not isgeneratorfunction(type(loader).__iter__):
        return
    kind, inner = type(loader).__name__, inner_loaders(loader)
    if any(one.persistent_workers and not isinstance(one, Seekable) for one in inner):
        yield (
            f"the {kind} opens a DataLoader with persistent workers, whose start draws a number more: resuming within an epoch "
            "may miss some samples and repeat others; pass persistent_workers=False there, or use a ResumableLoader"
        )
    if len(inner) > 1 and any(map(_draws_from_process, inner)):
        yield (
            f"the {kind} may open a DataLoader after forward has drawn: its order, or what its workers draw, then depends on "
            "that, and resuming within an epoch may miss some samples and repeat others; give each DataLoader there a "
            "generator= of its own, or use a ResumableLoader"
        )


def _draws_from_process(loader: DataLoader[Any]) -> bool:
    """Whether the order of a loader, or the seeds of its workers, may come from the generators that forward draws from."""
    if isinstance(loader, Seekable):
        return False
    if loader.num_workers and loader.generator is None:
        return True
    if isinstance(loader.dataset, IterableDataset):
        return False
    fixed: tuple[type, ...] = (HasEpoch, BatchSampler, *DRAWS_NOTHING)
    return any(not isinstance(one, fixed) and not generators_within(one) for one in samplers_of(loader))


def _note_of_reading(loader: Iterable[Any]) -> str:
    note = f"resuming reads the {type(loader).__name__} again up to its position; a ResumableLoader jumps there"
    if not _may_draw_while_read(loader):
        return note
    return (
        f"{note}; if it draws its order while it is read and remembers what it gave, let it draw from a generator of its own, "
        "or pass create_trainer(..., seed=), since samples are missed and others used twice otherwise"
    )


def _may_draw_while_read(loader: Iterable[Any]) -> bool:
    """Whether a loader or sampler of the user's own gives the order, and may draw it between the draws of forward."""
    return any(is_of_user(one) and not generators_within(one) for one in (loader, *samplers_of(loader)))


def _note_of_state(loader: Iterable[Any]) -> str:
    kind = type(loader).__name__
    note = f"resuming is as exact as the state that the {kind} gives: a buffer that shuffles a stream may not be in it"
    if length_of(loader) is None and not isinstance(loader, (DataLoader, Pipeline)):
        note += "; it has no length, so with the state of the end of a pass it must give nothing, or that epoch is repeated"
    return note


def _doubts_of_state(loader: Iterable[Any]) -> Iterator[str]:
    kind = type(loader).__name__
    if isinstance(loader, DataLoader) and loader.num_workers:
        yield (
            f"the state of the {kind} does not include the random generators of its workers: what a dataset draws there "
            "differs after resuming; draw no random numbers there, or use a ResumableLoader"
        )
    if (sampler := _sampler_that_may_differ(loader)) is not None:
        yield (
            f"the {kind} opens its {type(sampler).__name__} several times to find its place: if that draws an order at "
            "random, or counts its passes, resuming within an epoch misses some samples and repeats others; use torch's "
            "DataLoader, with which a drawn order is the same again, or give the sampler a state_dict"
        )


def _sampler_that_may_differ(loader: Iterable[Any]) -> Any:
    """A sampler that a StatefulDataLoader opens more than once, or reads late, and that may draw another order then; or None.

    Samplers of the loader's own package are right. Torch's draw when they are read, which is right where the loader makes the
    batches itself.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    right: tuple[type, ...] = (Stateful, HasEpoch, BatchSampler, *DRAWS_NOTHING)
    if loader.batch_size is not None:
        right = (*right, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    home = _package(loader)
    return next((one for one in samplers_of(loader) if not isinstance(one, right) and _package(one) != home), None)


def _package(one: object) -> str:
    return type(one).__module__.partition(".")[0]


def _is_stream(loader: Iterable[Any]) -> bool:
    """Whether the loader is a stream, and not a pass over something that can be opened again."""
    if isinstance(loader, DataLoader):
        return isinstance(loader.dataset, IterableDataset)
    return isinstance(loader, Iterator) or not isinstance(loader, Sized)
