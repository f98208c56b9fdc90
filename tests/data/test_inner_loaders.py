"""A loader of the user's own that reads from loaders of torch or of this library, as one that fetches ahead does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from ignite_train import ForwardOutput, ResumableLoader, ShardedSampler, TokenBudgetSampler, create_trainer
from ignite_train.data.how_exact import how_exact
from ignite_train.data.samplers import inner_loaders, set_epoch
from ignite_train.handlers import Checkpoint


class Around:
    """Gives what another loader gives. Other attributes are those that the test names."""

    def __init__(self, inner: Any, **others: Any) -> None:
        self.inner = inner
        vars(self).update(others)

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        yield from self.inner


class Delegating(Around):
    """Has the attributes of what it reads from."""

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["inner"], name)


class Several(Around):
    """Reads from several, one after another."""

    def __len__(self) -> int:
        return sum(map(len, self._all()))

    def __iter__(self) -> Iterator[Any]:
        for one in self._all():
            yield from one

    def _all(self) -> Any:
        return self.inner.values() if isinstance(self.inner, dict) else self.inner


class Returning(Around):
    """Is its own iterator."""

    def __iter__(self) -> Iterator[Any]:
        self.opened = iter(self.inner)
        return self

    def __next__(self) -> Any:
        return next(self.opened)


class Settings(dict[str, Any]):
    """Entries as attributes; asking for another one is an error of another kind."""

    __getattr__ = dict.__getitem__


AROUND: dict[str, Callable[[Any], Any]] = {
    "attribute": Around,
    "delegating": Delegating,
    "list": lambda inner: Several([inner]),
    "tuple": lambda inner: Several((inner,)),
    "dict": lambda inner: Several({"labelled": inner}),
    "twice": lambda inner: Around(Around(inner)),
    "around-its-own-iterator": lambda inner: Around(Returning(inner)),
    "beside-settings": lambda inner: Around(inner, settings=Settings(a=Settings()), many=[{}] * 10_000),
}
DATA = torch.arange(6.0)[:, None]
INNER: dict[str, Callable[[], Any]] = {
    "ResumableLoader": lambda: ResumableLoader(DATA, 3, shuffle=True, seed=1),
    "ShardedSampler": lambda: DataLoader(DATA, 3, sampler=ShardedSampler(DATA, shuffle=True, seed=1)),  # type: ignore[arg-type]
    "DistributedSampler": lambda: DataLoader(DATA, 3, sampler=DistributedSampler(DATA, 1, 0)),  # type: ignore[arg-type,var-annotated]
}


def trained(loader: Any, **limits: int) -> list[float]:
    """The samples of the updates of a run, in their order."""
    seen: list[float] = []
    model = nn.Linear(1, 1)

    def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
        seen.extend(x.flatten().tolist())
        return ForwardOutput(model(x).square().sum(), len(x))

    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=1e-3), forward)
    if isinstance(loader, Around):
        vars(loader).update(trainer=trainer, model=model)  # which refers to the loader in turn
    trainer.run(loader, **limits)
    return seen


@pytest.mark.parametrize("limits", [{"max_epochs": 3}, {"max_iters": 6, "epoch_length": 3}], ids=["epochs", "epoch-length"])
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("around", AROUND)
def test_what_a_loader_reads_from_is_told_the_epoch(around: str, inner: str, limits: dict[str, int]) -> None:
    """The inner loader has another order in each epoch, as where it is the loader of the run."""
    seen = trained(AROUND[around](INNER[inner]()), **limits)
    assert seen == trained(INNER[inner](), **limits)
    assert seen[:6] != seen[6:12]


class Reversing(Around):
    """Tells what it reads from an epoch of its own."""

    def __iter__(self) -> Iterator[Any]:
        self.epochs = [*vars(self).get("epochs", ()), 7 - len(vars(self).get("epochs", ()))]
        self.inner.set_epoch(self.epochs[-1])
        return iter(self.inner)


def test_a_loader_that_tells_epochs_itself_has_the_last_word() -> None:
    loader, expected = INNER["ResumableLoader"](), list[float]()
    for epoch in (7, 6):
        loader.set_epoch(epoch)
        expected += torch.cat([*loader]).flatten().tolist()
    assert trained(Reversing(INNER["ResumableLoader"]()), max_epochs=2) == expected


class Noting:
    """Notes the epochs that it is told."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class NotingModule(nn.Linear):
    """A model with a schedule of its own."""

    def set_epoch(self, epoch: int) -> None:
        raise AssertionError(f"it was told the epoch {epoch}")


def test_only_what_may_give_data_is_told_and_nothing_is_read() -> None:
    """Each once. An object with `set_epoch` passes it on itself; an iterator has begun its pass."""
    numbers, passes_on, outer = iter(range(3)), Noting(), Noting()
    vars(outer).update(inner=passes_on)
    model = NotingModule(1, 1)
    loader = Around(outer, model=model, itself=[outer, model], numbers=numbers, own=(number for number in range(3)))
    set_epoch(loader, 4)
    assert (outer.told, passes_on.told, next(numbers), next(loader.own)) == ([4], [], 0, 0)  # type: ignore[attr-defined]
    for data in ([[torch.ones(1)]], (1, 2), iter([3]), [{}] * 10_000, Returning(outer)):
        set_epoch(data, 1)
        assert inner_loaders(data) == []
    assert outer.told == [4]


# --- resuming within an epoch ----------------------------------------------------------------------------------------------


class Halving(DataLoader[Any]):
    """Opens its pass when it is read."""

    def __iter__(self) -> Any:
        for x in super().__iter__():
            yield x / 2


class HalvingElsewhere(DataLoader[Any]):
    """The same by another method."""

    def __iter__(self) -> Any:
        return self._halves()

    def _halves(self) -> Iterator[Any]:
        for x in super().__iter__():
            yield x / 2


class HalvingAtOnce(DataLoader[Any]):
    """Opens its pass at once."""

    def __iter__(self) -> Any:
        return (x / 2 for x in super().__iter__())


def shuffled(**options: Any) -> Any:
    return DataLoader(DATA, 3, shuffle=True, **options)  # type: ignore[arg-type]


def own() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def resumable(**options: Any) -> Any:
    return ResumableLoader(DATA, 3, shuffle=True, seed=1, **options)


def by_tokens() -> Any:
    return ResumableLoader(DATA, batches=TokenBudgetSampler([1] * 6, max_tokens=3, shuffle=True, seed=1))


KEPT: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
STARTS, LATE = "whose start draws", "after forward has drawn"
DIFFERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "kept": (STARTS, lambda: Around(shuffled(**KEPT))),
    "kept-with-generator": (STARTS, lambda: Around(shuffled(**KEPT, generator=own()))),
    "kept-generator": (STARTS, lambda: Halving(DATA, 3, shuffle=True, **KEPT)),
    "several": (LATE, lambda: Several([shuffled(), shuffled()])),
    "several-samplers": (LATE, lambda: Several([DataLoader(DATA, 3, sampler=RandomSampler(DATA)) for _ in "12"])),  # type: ignore[arg-type]
    "beside-another": (LATE, lambda: Several([resumable(), shuffled()])),
}
IS_EXACT: dict[str, Callable[[], Any]] = {
    "plain": lambda: Around(shuffled()),
    "workers": lambda: Around(shuffled(num_workers=1)),
    "generator": lambda: Halving(DATA, 3, shuffle=True),
    "twice-around": lambda: Around(Around(shuffled())),
    "several-with-generators": lambda: Several([shuffled(generator=own()), shuffled(generator=own())]),
    "several-by-tokens": lambda: Several([by_tokens(), by_tokens()]),
    "several-in-order": lambda: Several([DataLoader(DATA, 3), DataLoader(DATA, 3, sampler=range(6))]),  # type: ignore[arg-type]
    "several-told": lambda: Several([INNER["ShardedSampler"](), INNER["DistributedSampler"]()]),
    "several-resumable": lambda: Several([resumable(), resumable(num_workers=1)]),
    "kept-resumable": lambda: Around(resumable(**KEPT)),
}


def differs_after_resuming(make_loader: Callable[[], Any], directory: Path) -> bool:
    """Whether a run that resumes within its second epoch trains on other samples than one that was not interrupted."""

    def seen(directory: Path, *limits: int) -> list[float]:
        found: list[float] = []
        for limit in limits:
            torch.manual_seed(2)
            model, loader = nn.Linear(1, 1), make_loader()

            def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
                found.extend(x.flatten().tolist())
                return ForwardOutput((model(x) * torch.rand(())).square().sum(), len(x))

            trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=1e-3), forward)
            Checkpoint(directory).attach(trainer)
            trainer.run(loader, max_iters=limit)
        return found

    whole = make_loader()
    updates = len(whole)
    return seen(directory / "whole", 2 * updates) != seen(directory / "resumed", 2 * updates - 1, 2 * updates)


class Curriculum:
    """No loader: its epochs are begun otherwise."""

    def set_epoch(self, epoch: int, loss: float) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("has_inner", [False, True])
def test_a_loader_that_has_set_epoch_is_told_alone(has_inner: bool) -> None:
    """Also where it is an attribute of the object, and not of its class; and what is not a loader is not told."""
    told: list[int] = []
    loader = Around(shuffled(sampler=None) if has_inner else DATA, curriculum=Curriculum())
    vars(loader)["set_epoch"] = told.append
    trained(loader, max_epochs=3)
    assert told == [0, 1, 2]
    trained(Around(shuffled(), curriculum=Curriculum()), max_epochs=2)


@pytest.mark.parametrize("kind", DIFFERS)
def test_a_loader_that_opens_others_at_another_moment_is_warned_about(kind: str, tmp_path: Path) -> None:
    about, make_loader = DIFFERS[kind]
    assert about in how_exact(make_loader())[0][-1]
    assert differs_after_resuming(make_loader, tmp_path)


@pytest.mark.parametrize("kind", IS_EXACT)
def test_nothing_is_said_of_a_loader_that_resumes_with_the_same_samples(kind: str, tmp_path: Path) -> None:
    assert how_exact(IS_EXACT[kind]())[0] == []
    assert not differs_after_resuming(IS_EXACT[kind], tmp_path)


@pytest.mark.parametrize("limits", [{"max_epochs": 3}, {"max_iters": 6, "epoch_length": 4}], ids=["epochs", "epoch-length"])
@pytest.mark.parametrize("kind", [Halving, HalvingElsewhere, HalvingAtOnce])
def test_a_generator_may_open_a_pass_of_workers_that_are_kept(kind: Any, limits: dict[str, int]) -> None:
    """When it is read, after the trainer has begun the pass."""
    loader = kind(DATA, 3, num_workers=1, persistent_workers=True)
    assert trained(loader, **limits) == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5] * 3


def test_a_pass_elsewhere_is_noticed_where_the_generator_is_made_of_an_open_one() -> None:
    loader = HalvingAtOnce(DATA, 3, num_workers=1, persistent_workers=True)
    model = nn.Linear(1, 1)
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=1e-3), lambda model, x: model(x).square().mean())
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: next(iter(loader)))
    with pytest.raises(ValueError, match="data must not be read elsewhere in the middle of a pass"):
        trainer.run(loader, max_epochs=2)
