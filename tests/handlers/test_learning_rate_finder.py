"""The search for a learning rate: its curve is that of a plain loop, and the run after it has the bits of one without it."""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from bits import bit_by_bit
from ignite_train import ForwardOutput, ResumableLoader, StaticLossScaling, Trainer, TrainEvents, UpdateOptions, create_trainer
from ignite_train.handlers import Checkpoint, LearningRateFinder
from mistakes import Mistake, assert_one_line
from ranks import run_ranks

ROWS = torch.randn(24, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
MICRO_BATCHES = list(ROWS.split(4))
Make = Callable[[], Trainer]


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1)).double()


def mean_loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 2.0).square().mean()


def maker(forward: Any = mean_loss, *, whole: bool = False, **options: Any) -> Make:
    """A function that makes a trainer of the linear layer, or of the whole net."""

    def make_trainer() -> Trainer:
        model = net() if whole else net()[0]
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        return create_trainer(model, optimizer, forward, options=UpdateOptions(**options))

    return make_trainer


@pytest.fixture(autouse=True)
def _may_not_diverge() -> Iterator[None]:
    """Short searches often end before the loss diverges, which is warned about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the loss did not diverge")
        yield


def search(make_trainer: Make, data: Any = MICRO_BATCHES, **settings: Any) -> LearningRateFinder:
    finder = LearningRateFinder(make_trainer)
    finder.run(data, **{"num_iter": 9, "start_lr": 1e-4, "end_lr": 0.5, **settings})
    return finder


@pytest.mark.parametrize("mode", ["exp", "linear"])
def test_the_curve_is_that_of_a_plain_loop(mode: Any) -> None:
    """Rates from the first to the last, over two passes of the data; losses smoothed as Ignite does."""
    found = search(maker(), step_mode=mode).get_results()

    model = net()[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rates, losses = [], []
    for update in range(9):
        share = update / 8
        rate = 1e-4 * (0.5 / 1e-4) ** share if mode == "exp" else 1e-4 + (0.5 - 1e-4) * share
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = mean_loss(model, MICRO_BATCHES[update % 6])
        loss.backward()
        optimizer.step()
        losses.append(0.05 * loss.item() + 0.95 * losses[-1] if losses else loss.item())
        rates.append(rate)
    assert found["lr"] == pytest.approx(rates, rel=1e-12)
    assert found["loss"] == pytest.approx(losses, rel=1e-10)


LOADERS: dict[str, Callable[[], Any]] = {
    "list": lambda: MICRO_BATCHES,
    "shuffled": lambda: DataLoader(ROWS, batch_size=4, shuffle=True),  # type: ignore[arg-type]
    "own generator": lambda: DataLoader(ROWS, 4, shuffle=True, generator=torch.Generator().manual_seed(5)),  # type: ignore[arg-type]
    "resumable": lambda: ResumableLoader(ROWS, 4, shuffle=True),
}


@pytest.mark.parametrize("name", list(LOADERS))
@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
def test_a_run_after_it_has_the_bits_of_one_without_it(name: str, fails: bool) -> None:
    """Also where the search fails: random numbers and the loader's generators are put back. Before a run and in the middle."""
    calls = 0

    def failing(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise ZeroDivisionError
        return mean_loss(model, x)

    results = []
    for searches in (False, True):
        torch.manual_seed(11)
        loader, trainer = LOADERS[name](), maker(whole=True)()
        for epoch in (1, 2):
            if searches and not fails:
                search(maker(whole=True), loader)
            elif searches:
                calls = 0
                with pytest.raises(ZeroDivisionError):
                    search(maker(failing, whole=True), loader)
            trainer.run(loader, max_epochs=epoch)
        results.append(bit_by_bit([trainer.model.state_dict(), trainer.state_dict(), torch.get_rng_state()]))
    assert results[0] == results[1]


class Noisy(Dataset[Tensor]):
    """Adds noise of the worker's own generator to each sample."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> Tensor:
        return ROWS[index] + 0.1 * torch.randn(3, dtype=torch.float64)


class Continuing:
    """A loader that continues from its place, which it saves."""

    def __init__(self) -> None:
        self.place = [0]

    def __iter__(self) -> Iterator[Tensor]:
        while self.place[0] < len(MICRO_BATCHES):
            self.place[0] += 1
            yield MICRO_BATCHES[self.place[0] - 1]
        self.place[0] = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Late(Continuing):
    """Has a state only in a pass. Each pass starts at the first batch."""

    def __iter__(self) -> Iterator[Tensor]:
        self.begun = True
        return iter(MICRO_BATCHES)

    def state_dict(self) -> dict[str, Any]:
        if not hasattr(self, "begun"):
            raise RuntimeError("not begun")
        return super().state_dict()


MOVED: dict[str, Callable[[], Any]] = {
    "a place of its own": Continuing,
    "a state only in a pass": Late,
    "persistent workers": lambda: DataLoader(Noisy(), 4, shuffle=True, num_workers=1, persistent_workers=True),
}


@pytest.mark.parametrize("name", list(MOVED))
def test_a_loader_with_a_place_or_with_workers_that_persist_is_not_moved(name: str) -> None:
    """A search of 4 updates, before a pass of 6 and after it; as `tune` leaves it."""
    results = []
    for searches in (False, True):
        torch.manual_seed(11)
        loader, trainer = MOVED[name](), maker(whole=True)()
        for epoch in (1, 2):
            if searches:
                search(maker(whole=True), loader, num_iter=4)
            trainer.run(loader, max_epochs=epoch)
            assert trainer.state.iteration == epoch * len(MICRO_BATCHES)
        results.append(bit_by_bit([trainer.model.state_dict(), torch.get_rng_state()]))
    assert results[0] == results[1]


def test_infinite_losses_end_it() -> None:
    """A rate that is far too high gives no error, under each policy, and what is not finite is not in the results."""
    data = [x.float() for x in MICRO_BATCHES]
    for options in ({}, {"on_nonfinite": "skip"}, {"on_nonfinite": "skip", "give_up_after": 1}):

        def make_trainer(options: Any = options) -> Trainer:
            model = net()[0].float()
            return create_trainer(
                model, torch.optim.SGD(model.parameters(), lr=1.0), mean_loss, options=UpdateOptions(**options)
            )

        results = search(make_trainer, data, num_iter=100, end_lr=1e38, diverge_th=1e30).get_results()
        assert 1 < len(results["loss"]) < 100
        assert all(map(math.isfinite, results["loss"]))


def test_an_update_that_is_skipped_is_no_point() -> None:
    """Although its loss is finite: here the gradient of the third update overflows."""

    def make_trainer() -> Trainer:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        trainer = create_trainer(model, optimizer, mean_loss, loss_scaling=StaticLossScaling(1.0))
        event = TrainEvents.GRADIENTS_REDUCED(once=3)
        trainer.add_event_handler(event, lambda: model[0].weight.grad.fill_(math.inf))  # type: ignore[union-attr, operator]
        return trainer

    found = search(make_trainer, num_iter=5, start_lr=1e-3, end_lr=5e-3, step_mode="linear")
    assert found.get_results()["lr"] == pytest.approx([1e-3, 2e-3, 4e-3, 5e-3])


def test_two_groups_and_tensors_for_rates() -> None:
    """Each group has its own rates, of one optimizer or of several; tensors stay the tensors that they are."""
    seen: list[Any] = []
    rate = torch.tensor(0.01)

    def make_trainer() -> Trainer:
        model = net()
        model[1].requires_grad_(False)
        first = torch.optim.AdamW([{"params": model[0].parameters(), "lr": rate}])
        second = torch.optim.SGD(model[3].parameters(), lr=0.1)
        trainer = create_trainer(model, {"first": first, "second": second}, mean_loss)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append(trainer.state.update_output.learning_rates))  # type: ignore[union-attr]
        return trainer

    found = search(make_trainer, num_iter=3, start_lr=[1e-3, 1e-4], end_lr=[1.0, 1.0]).get_results()
    assert [rates[0] for rates in seen] == pytest.approx([1e-3, 1e-3**0.5, 1.0], rel=1e-6)
    assert [rates[1] for rates in seen] == pytest.approx([1e-4, 1e-2, 1.0])
    assert found["lr"] == [pytest.approx(list(rates)) for rates in seen]
    assert float(rate) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2])
def test_the_suggestion_and_its_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: int) -> None:
    """The losses over the rates of the first group, without those that are left out; the suggestion is a dot on the curve."""

    def make_trainer() -> Trainer:
        model = net()
        parts = [{"params": model[0].parameters()}, {"params": model[1:].parameters(), "lr": 1e-5}]
        optimizer = torch.optim.SGD(parts if groups == 2 else model.parameters(), lr=1e-3)
        return create_trainer(model, optimizer, mean_loss)

    drawn = list[Any]()
    torch.manual_seed(0)
    finder = search(make_trainer, num_iter=30, start_lr=None, end_lr=10.0)
    finder.save_plot(tmp_path / "rates.png", skip_start=2)
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
    trainer = make_trainer()
    finder.apply_suggested_lr(trainer.optimizers["optimizer"])
    results, suggestion = finder.get_results(), finder.lr_suggestion()
    rates = [rate[0] if groups == 2 else rate for rate in results["lr"]]
    first = suggestion[0] if groups == 2 else suggestion
    assert trainer.optimizers["optimizer"].param_groups[0]["lr"] == first
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    finder.save_plot(tmp_path / "rates.png", skip_start=2, skip_end=3)
    (axes,) = drawn[0].axes
    curve, dot = axes.get_lines()
    points = [list(point) for point in zip(rates, results["loss"], strict=True)]
    assert curve.get_xydata().tolist() == points[2:-3]
    assert dot.get_xydata().tolist() == [points[rates.index(first)]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [f"suggestion: {first:.3g}"]
    assert (axes.get_xscale(), axes.get_xlabel(), axes.get_ylabel()) == ("log", "learning rate", "smoothed loss")
    with suppress(KeyError):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install matplotlib"):
        finder.save_plot(tmp_path / "none.png")


def test_the_suggestion_for_several_optimizers() -> None:
    """Each group gets its own, of all optimizers at once; a rate that is a tensor stays that tensor."""
    rate = torch.tensor(0.01)

    def make_trainer() -> Trainer:
        model = net()
        model[1].requires_grad_(False)
        first = torch.optim.AdamW([{"params": model[0].parameters(), "lr": rate}])
        return create_trainer(model, {"first": first, "second": torch.optim.SGD(model[3].parameters(), lr=0.1)}, mean_loss)

    torch.manual_seed(0)
    finder = search(make_trainer, num_iter=30, start_lr=[1e-4, 1e-5], end_lr=10.0)
    optimizers, suggestion = make_trainer().optimizers, finder.lr_suggestion()
    finder.apply_suggested_lr(optimizers)
    assert optimizers["first"].param_groups[0]["lr"] is rate
    assert [float(rate), optimizers["second"].param_groups[0]["lr"]] == pytest.approx(suggestion)
    with pytest.raises(RuntimeError, match=r"given the 2 parameter groups of the search, got 1; .* pass trainer.optimizers"):
        finder.apply_suggested_lr(optimizers["first"])


def losses_of(given: list[float], **settings: Any) -> list[float]:
    """The curve where the updates have these losses, whose gradient is zero."""
    remaining = iter(given)

    def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
        return ForwardOutput(0.0 * model(x).sum() + next(remaining), sample_size=1)

    results = search(maker(forward, on_nonfinite="skip"), num_iter=len(given), **settings).get_results()
    losses: list[float] = results["loss"]
    return losses


def test_it_ends_where_the_loss_is_more_than_so_many_times_the_least() -> None:
    """The loss of that update is the last point; one of exactly so many times does not end it."""
    losses = [4.0, 2.0, 3.0, 6.0, 6.1, 1.0, 1.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as that the loss did not diverge
        assert losses_of(losses, smooth_f=0, diverge_th=3) == losses[:5]
        assert losses_of([1.0, 1.0, math.nan, 1.0], smooth_f=0.0) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("losses", "ends_after"),
    [
        ([1.0, 0.1, -0.1, -0.5, 2.4, 2.6, 0.0], 6),  # 2 * (1.0 + 0.5) above -0.5
        ([1.0, 0.0, 1.9, 2.1, 0.0], 4),
        ([-1.0, -2.0, -1.5, 1.9, 2.1, 0.0], 5),  # 2 * 2.0 above -2.0
        ([-1.0, -1.1, -1.2, -1.1], 4),
    ],
)
def test_a_loss_below_zero_ends_it_when_it_has_risen(losses: list[float], ends_after: int) -> None:
    """By `diverge_th` - 1 times the distance from the least one to zero, or to the first one where that is above zero."""
    assert losses_of(losses, smooth_f=0, diverge_th=3) == losses[:ends_after]


def test_a_loss_is_smoothed() -> None:
    """The share of a new one is `smooth_f`; with 0 nothing is smoothed."""
    assert losses_of([4.0, 2.0, 3.0], smooth_f=0.25) == [4.0, 3.5, 3.375]
    assert losses_of([4.0, 2.0, 3.0], smooth_f=0.0) == [4.0, 2.0, 3.0]


@pytest.mark.parametrize(("number", "rates"), [(1, [1e-3]), (2, [1e-3, 0.5]), (3, [1e-3, 0.2505, 0.5])])
def test_few_updates_have_the_first_and_the_last_rate(number: int, rates: list[float]) -> None:
    """The first is the optimizer's own, if none is given."""
    found = search(maker(whole=True), num_iter=number, start_lr=None, step_mode="linear")
    assert found.get_results()["lr"] == pytest.approx(rates)


def test_it_warns_where_the_loss_does_not_diverge() -> None:
    """As Ignite's does; a second search begins again."""
    finder = LearningRateFinder(maker())
    for _ in range(2):
        with pytest.warns(UserWarning, match="the loss did not diverge: increase end_lr"):
            finder.run(MICRO_BATCHES, num_iter=5, end_lr=1e-2)
        assert len(finder.get_results()["lr"]) == 5


def _search_on_this_rank() -> Any:
    data = MICRO_BATCHES[idist.get_rank() :: 2]
    return search(maker(whole=True, reduction="explicit"), data, num_iter=40, end_lr=50.0, diverge_th=1.5).get_results()


@pytest.mark.slow
def test_two_ranks_find_the_same() -> None:
    """Both end after the same update."""
    first, second = run_ranks(_search_on_this_rank)
    assert first == second
    assert 1 < len(first["loss"]) <= 40


def test_the_model_of_the_program_is_not_trained() -> None:
    """A function is refused that returns its trainer or makes another of its model; a copy beside frozen parts is not."""
    trainer = maker(whole=True)()
    before = bit_by_bit([trainer.model.state_dict(), trainer.optimizers["optimizer"].state_dict()])

    def of_the_same() -> Trainer:
        return create_trainer(trainer.model, torch.optim.SGD(trainer.model.parameters(), lr=1e-3), mean_loss)

    def of_a_copy() -> Trainer:
        model = nn.Sequential(copy.deepcopy(trainer.model[0]), frozen)
        return create_trainer(model, torch.optim.SGD(model.parameters(), lr=1e-3), mean_loss)

    for make in (lambda: trainer, of_the_same):
        with pytest.raises(ValueError, match="make_trainer must make a new model each time"):
            search(make)
    assert bit_by_bit([trainer.model.state_dict(), trainer.optimizers["optimizer"].state_dict()]) == before
    assert trainer.state.iteration == 0
    frozen = nn.Linear(4, 1).double().requires_grad_(False)
    assert search(of_a_copy).get_results()["lr"]
    assert bit_by_bit([trainer.model.state_dict(), trainer.optimizers["optimizer"].state_dict()]) == before


def saving() -> Trainer:
    trainer = maker()()
    Checkpoint("nowhere").attach(trainer)
    return trainer


MISTAKES: dict[str, Mistake] = {
    "trainer": (TypeError, "got a Trainer, which the search would train; write", lambda: LearningRateFinder(maker()())),  # type: ignore[arg-type]
    "nothing": (TypeError, "make_trainer must be a function", lambda: LearningRateFinder(3)),  # type: ignore[arg-type]
    "no trainer": (TypeError, "make_trainer must return a Trainer", lambda: search(net)),  # type: ignore[arg-type]
    "attach": (TypeError, "is not attached; write finder", lambda: LearningRateFinder(maker()).attach(maker()())),
    "checkpoint": (ValueError, "make_trainer must attach no Checkpoint", lambda: search(saving)),
    "order": (
        ValueError,
        "start_lr must be less than end_lr, got 1 and 0.5",
        lambda: search(maker(), start_lr=1.0),
    ),
    "same": (ValueError, "start_lr must be less than end_lr, got 0.5 and 0.5", lambda: search(maker(), start_lr=0.5)),
    "zero": (ValueError, "start_lr must be greater than 0", lambda: search(maker(), start_lr=0.0)),
    "groups": (ValueError, "end_lr must have one rate for each", lambda: search(maker(), end_lr=[1.0, 2.0])),
    "mode": (ValueError, "step_mode must be one of", lambda: search(maker(), step_mode="cosine")),
    "smooth": (ValueError, "smooth_f must be less than 1", lambda: search(maker(), smooth_f=1.0)),
    "diverge": (ValueError, "diverge_th must be at least 1", lambda: search(maker(), diverge_th=0.5)),
    "updates": (ValueError, "num_iter must be at least 1", lambda: search(maker(), num_iter=0)),
    "picture": (RuntimeError, "nothing to draw", lambda: LearningRateFinder(maker()).save_plot("none.png")),
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes(name: str) -> None:
    """Each is answered in one line."""
    assert_one_line(MISTAKES[name])
