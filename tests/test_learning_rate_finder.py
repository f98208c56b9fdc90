"""The search for a learning rate: its curve is that of a plain loop, and the run after it has the bits of one without it."""

from __future__ import annotations

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
from torch.utils.data import DataLoader

from bits import bit_by_bit
from ignite_train import FairseqLossScaling, GaveUpError, ResumableLoader, Trainer, TrainEvents, UpdateOptions, create_trainer
from ignite_train.handlers import Checkpoint, Freeze, LearningRateFinder, ModelEMA, OuterOptimizer, TrainingMetrics
from mistakes import Mistake, assert_one_line
from ranks import run_ranks

ROWS = torch.randn(24, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
MICRO_BATCHES = list(ROWS.split(4))


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1)).double()


def mean_loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 2.0).square().mean()


def make(model: nn.Module, optimizer: Any = None, **options: Any) -> Trainer:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    return create_trainer(model, optimizer, mean_loss, options=UpdateOptions(**options))


@pytest.fixture(autouse=True)
def _may_not_diverge() -> Iterator[None]:
    """Short searches often end before the loss diverges, which is warned about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the loss did not diverge")
        yield


def search(trainer: Trainer, data: Any, finder: LearningRateFinder | None = None, **settings: Any) -> LearningRateFinder:
    finder = finder or LearningRateFinder()
    with finder.attach(trainer, **{"num_iter": 9, "start_lr": 1e-4, "end_lr": 0.5, **settings}) as searching:
        assert searching is trainer
        searching.run(data)
    return finder


@pytest.mark.parametrize("mode", ["exp", "linear"])
def test_the_curve_is_that_of_a_plain_loop(mode: Any) -> None:
    """Rates from the first to the last, over two passes of the data; losses smoothed as Ignite does."""
    model = net()[0]
    found = search(make(model, torch.optim.SGD(model.parameters(), lr=1.0)), MICRO_BATCHES, step_mode=mode).get_results()

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


def loaders() -> dict[str, Callable[[], Any]]:
    return {
        "list": lambda: MICRO_BATCHES,
        "shuffled": lambda: DataLoader(ROWS, batch_size=4, shuffle=True),  # type: ignore[arg-type]
        "own-generator": lambda: DataLoader(
            ROWS,  # type: ignore[arg-type]
            batch_size=4,
            shuffle=True,
            generator=torch.Generator().manual_seed(5),
        ),
        "resumable": lambda: ResumableLoader(ROWS, 4, shuffle=True),
    }


def job(name: str, directory: Path, *, searches: str | None) -> Any:
    """A run of three epochs with handlers; what remains of it, with a search before it or after its first epoch, or none."""
    torch.manual_seed(11)
    model, loader = net(), loaders()[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer, ema = make(model, optimizer), ModelEMA(0.5)
    ema.attach(trainer)
    TrainingMetrics().attach(trainer, Events.ITERATION_COMPLETED(every=2))
    Checkpoint(directory, every_epochs=1, asynchronous=False).attach(trainer)
    if searches == "before":
        search(trainer, loader)
        assert not list(directory.glob("*"))
    trainer.run(loader, max_epochs=1)
    if searches == "between":
        files = sorted(directory.rglob("*"))
        search(trainer, loader, num_iter=5, smooth_f=0.0)
        assert sorted(directory.rglob("*")) == files
    if searches == "failing":
        trainer._update.forward = fails_at(8, trainer._update.forward)  # type: ignore[attr-defined]
        with pytest.raises(ZeroDivisionError):
            search(trainer, loader)
        trainer._update.forward = trainer._update.forward.inner  # type: ignore[attr-defined]
    trainer.run(loader, max_epochs=3)
    metrics = {name: value for name, value in trainer.state.metrics.items() if name in ("loss", "grad_norm")}
    states = [model.state_dict(), optimizer.state_dict(), trainer.state_dict(), ema.state_dict()]
    return bit_by_bit([*states, metrics, torch.get_rng_state()]), sorted(trainer._stateful)


def test_metrics_do_not_count_the_search() -> None:
    """The interval that begins before it has no update afterwards."""
    trainer, metrics = make(net()), TrainingMetrics()
    metrics.attach(trainer, Events.ITERATION_COMPLETED(every=100))
    search(trainer, MICRO_BATCHES, num_iter=3)
    assert set(metrics.state_dict()["sums"].values()) == {0.0}
    assert set(metrics.seconds_by_section.values()) == {0.0}


def run_with_an_outer_optimizer(*, searches: bool) -> Any:
    """What remains of it, and how many points the search has."""
    model = net()[0]
    trainer = make(model, torch.optim.SGD(model.parameters(), lr=0.05), reduction="local")
    outer = OuterOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), every=2)
    outer.attach(trainer)
    data = MICRO_BATCHES[idist.get_rank() :: idist.get_world_size()] * 2
    points = len(search(trainer, data, num_iter=5).get_results()["loss"]) if searches else 5
    trainer.run(data)
    return bit_by_bit([model.state_dict(), outer.state_dict()]), trainer.state.num_steps, points


def test_an_outer_optimizer_makes_no_step_in_the_search() -> None:
    """It steps at the same updates afterwards, and from the weights that the run begins with."""
    assert run_with_an_outer_optimizer(searches=True) == run_with_an_outer_optimizer(searches=False)


def _with_and_without_a_search() -> Any:
    return run_with_an_outer_optimizer(searches=True), run_with_an_outer_optimizer(searches=False)


@pytest.mark.slow
def test_replicas_that_train_on_their_own() -> None:
    """They step in the search, and each has what it had before."""
    for searched, plain in run_ranks(_with_and_without_a_search):
        assert searched == plain
        assert searched[1:] == (6, 5)


class Holder:
    """An object in which no module is looked for."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module


@pytest.mark.parametrize("is_found", [True, False], ids=["found", "named"])
def test_modules_beside_the_model_are_put_back(is_found: bool) -> None:
    """Weights, running statistics, buffers that no state has, and the mode; the trainer's own may be among the named ones."""
    model, teacher = net(), nn.BatchNorm1d(3).double()
    teacher.register_buffer("calls", torch.zeros(()), persistent=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    holder = teacher if is_found else Holder(teacher)

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        teacher = holder if isinstance(holder, nn.Module) else holder.module
        teacher.train()
        teacher.get_buffer("calls").add_(1)
        with torch.no_grad():
            teacher.get_parameter("weight").mul_(0.5)
        return mean_loss(model, teacher(x))

    trainer = create_trainer(model, optimizer, forward)
    teacher.eval()
    before = bit_by_bit([dict(teacher.named_parameters()), dict(teacher.named_buffers()), model.state_dict()])
    named = {"teacher": teacher, "model": model, "optimizer": optimizer, "trainer": trainer}
    search(trainer, MICRO_BATCHES, to_save={} if is_found else named)
    assert bit_by_bit([dict(teacher.named_parameters()), dict(teacher.named_buffers()), model.state_dict()]) == before
    assert not teacher.training


def test_several_optimizers() -> None:
    """The rates are those of the groups of both, and both are put back."""
    model = net()
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9), torch.optim.AdamW(model[1:].parameters())]
    trainer = make(model, optimizers)
    trainer.run(MICRO_BATCHES)
    before = bit_by_bit([model.state_dict(), *(one.state_dict() for one in optimizers)])
    found = search(trainer, MICRO_BATCHES, num_iter=3, start_lr=[1e-3, 1e-4], end_lr=[0.1, 1.0]).get_results()
    assert found["lr"][-1] == pytest.approx([0.1, 1.0])
    assert bit_by_bit([model.state_dict(), *(one.state_dict() for one in optimizers)]) == before


class Wrapping(torch.optim.Optimizer):
    """Steps by an optimizer inside it, over the same groups, as SAM does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.inside = torch.optim.AdamW(self.param_groups, lr=0.05)
        self.param_groups = self.inside.param_groups

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.inside.step()
        return loss


def test_the_optimizer_inside_another_is_put_back() -> None:
    """Its moments are not in the state of the outer one."""
    model = net()
    optimizer = Wrapping(model.parameters())
    trainer = make(model, optimizer, closure=True)
    trainer.run(MICRO_BATCHES)
    before = bit_by_bit([model.state_dict(), optimizer.inside.state_dict()])
    search(trainer, MICRO_BATCHES)
    assert bit_by_bit([model.state_dict(), optimizer.inside.state_dict()]) == before


def test_skipped_updates_do_not_give_up_the_search() -> None:
    """A loss that is not finite ends it, whatever number of them would end the run, which still counts its own."""
    model = net()[0].float()
    trainer = make(model, torch.optim.SGD(model.parameters(), lr=1.0), on_nonfinite="skip", give_up_after=1)
    data = [x.float() for x in MICRO_BATCHES]
    results = search(trainer, data, num_iter=100, end_lr=1e38, diverge_th=1e300).get_results()
    assert 1 < len(results["loss"]) < 100
    with pytest.raises(GaveUpError):
        trainer.run([data[0] * math.nan])


def test_what_is_set_in_the_search_is_gone() -> None:
    """Attributes that a handler gives the trainer and its state, and handlers that are attached inside."""
    trainer = make(net())
    before = {*vars(trainer)}, {*vars(trainer.state)}
    called: list[int] = []

    def set_two(engine: Trainer) -> None:
        called.append(engine.state.iteration)
        engine.found = engine.state.found = 1  # type: ignore[attr-defined]

    with LearningRateFinder().attach(trainer, num_iter=3) as searching:
        searching.add_event_handler(Events.COMPLETED, set_two)
        searching.run(MICRO_BATCHES)
    assert ({*vars(trainer)}, {*vars(trainer.state)}) == before
    trainer.run(MICRO_BATCHES)
    assert called == [3]


def test_a_search_before_a_resumed_run(tmp_path: Path) -> None:
    """The search begins with the script's model, and not with the checkpoint, from which the run then continues."""

    def start() -> Trainer:
        trainer = make(net())
        Checkpoint(tmp_path, every_epochs=1, asynchronous=False).attach(trainer)
        return trainer

    start().run(MICRO_BATCHES, max_epochs=1)
    trainer, first = start(), []
    with LearningRateFinder().attach(trainer, num_iter=3) as searching:
        searching.add_event_handler(Events.STARTED, lambda: first.append(trainer.state.iteration))
        searching.run(MICRO_BATCHES)
    assert first == [0]
    assert trainer.run(MICRO_BATCHES, max_epochs=2).num_steps == 12


class fails_at:  # noqa: N801
    """A forward that fails in one update."""

    def __init__(self, number: int, inner: Any) -> None:
        self.left, self.inner = number, inner

    def __call__(self, model: nn.Module, x: Tensor) -> Any:
        self.left -= 1
        return self.inner(model, x) if self.left else 1 // 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("searches", ["before", "between", "failing"])
@pytest.mark.parametrize("name", list(loaders()))
def test_the_run_has_the_bits_of_one_without_a_search(name: str, searches: str, tmp_path: Path) -> None:
    """Weights, buffers, moments, counters, average, metrics and generators; no checkpoint is written in a search."""
    assert job(name, tmp_path / "with", searches=searches) == job(name, tmp_path / "without", searches=None)


def test_without_a_number_it_takes_the_epochs_of_the_run() -> None:
    """Two epochs of six updates; the last of them has the last rate."""
    model = net()[0]
    trainer = make(model, torch.optim.SGD(model.parameters(), lr=1.0))
    finder = LearningRateFinder()
    with finder.attach(trainer, start_lr=1e-4, end_lr=1e-2) as searching:
        searching.run(MICRO_BATCHES, max_epochs=2)
    rates = finder.get_results()["lr"]
    assert len(rates) == 12
    assert rates[-1] == pytest.approx(1e-2)


@pytest.mark.parametrize("done", [1, 2])
def test_without_a_number_it_takes_the_epochs_that_are_left(done: int) -> None:
    """Of three, where the run has made one or two already."""
    trainer, finder = make(net()), LearningRateFinder()
    trainer.run(MICRO_BATCHES, max_epochs=done)
    with finder.attach(trainer, start_lr=1e-4, end_lr=1e-2) as searching:
        searching.run(MICRO_BATCHES, max_epochs=3)
    assert len(finder.get_results()["lr"]) == 6 * (3 - done)


def test_other_objects_are_put_back() -> None:
    """Any that have a state: here a schedule that forward steps."""
    model, parameter = net(), nn.Parameter(torch.zeros(()))
    schedule = torch.optim.lr_scheduler.CyclicLR(torch.optim.SGD([parameter], lr=0.1), 0.1, 0.3)

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        schedule.optimizer.step()
        schedule.step()
        return mean_loss(model, x)

    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=1e-3), forward)
    before = schedule.state_dict()
    search(trainer, MICRO_BATCHES, to_save={"schedule": schedule}, num_iter=3)
    assert schedule.state_dict() == before
    search(trainer, MICRO_BATCHES, num_iter=3)
    assert schedule.last_epoch == 3


def test_what_forward_carries_and_the_loss_scale_are_put_back() -> None:
    """And the count of updates until the scale grows."""
    model, scaling = net(), FairseqLossScaling(8.0, scale_window=8)

    def forward(model: nn.Module, x: Tensor, state: Any) -> Tensor:
        state.carried["sum"] = state.carried.get("sum", 0.0) + x.sum()
        return mean_loss(model, x)

    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=1e-3), forward, loss_scaling=scaling)
    trainer.run(MICRO_BATCHES, max_epochs=1)
    before = bit_by_bit([trainer.state.carried["sum"], scaling.state_dict()])
    search(trainer, MICRO_BATCHES, num_iter=3)
    assert bit_by_bit([trainer.state.carried["sum"], scaling.state_dict()]) == before


def test_infinite_losses_end_it() -> None:
    """A rate that is far too high gives no error, and what is not finite is not in the results."""
    model = net()[0].float()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = make(model, optimizer)
    before = bit_by_bit([model.state_dict(), optimizer.state_dict()])
    data = [x.float() for x in MICRO_BATCHES]
    results = search(trainer, data, num_iter=100, end_lr=1e38, diverge_th=1e30).get_results()
    assert 1 < len(results["loss"]) < 100
    assert all(map(math.isfinite, results["loss"]))
    assert bit_by_bit([model.state_dict(), optimizer.state_dict()]) == before


def test_two_groups_and_tensors_for_rates() -> None:
    """Each group has its own rates; tensors stay the tensors that they are."""
    model = net()
    rate = torch.tensor(0.01)
    optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": rate}, {"params": model[3].parameters()}])
    model[1].requires_grad_(False)
    trainer = make(model, optimizer)
    Freeze(model[0]).attach(trainer)
    seen: list[Any] = []
    with LearningRateFinder().attach(trainer, num_iter=3, start_lr=[1e-3, 1e-4], end_lr=[1.0, 1.0]) as searching:
        searching.add_event_handler(
            Events.ITERATION_COMPLETED, lambda: seen.append(searching.state.update_output.learning_rates)
        )  # type: ignore[union-attr]
        searching.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append(bit_by_bit(model[0].weight)))
        searching.run(MICRO_BATCHES)
    assert [rates[0] for rates in seen[::2]] == pytest.approx([1e-3, 1e-3**0.5, 1.0], rel=1e-6)
    assert [rates[1] for rates in seen[::2]] == pytest.approx([1e-4, 1e-2, 1.0])
    assert len({str(weights) for weights in seen[1::2]}) == 1  # frozen
    assert optimizer.param_groups[0]["lr"] is not None
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.01)


def test_the_suggestion_and_its_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate is applied, and the curve is a PNG; without matplotlib one line says what to install."""
    model = net()[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    finder = search(make(model, optimizer), MICRO_BATCHES, num_iter=60, end_lr=10.0)
    finder.apply_suggested_lr(optimizer)
    assert optimizer.param_groups[0]["lr"] == finder.lr_suggestion()
    finder.save_plot(tmp_path / "rates.png", skip_start=2)
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RuntimeError, match="nothing to draw"):
        finder.save_plot(tmp_path / "none.png", skip_start=1000)
    with suppress(KeyError):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'ignite-train\[plot\]'"):
        finder.save_plot(tmp_path / "none.png")


def test_an_update_that_is_skipped_is_no_point() -> None:
    """Although its loss is finite: here the gradient of the third update overflows."""
    model, finder = net(), LearningRateFinder()
    trainer = make(model, torch.optim.SGD(model.parameters(), lr=1.0), on_nonfinite="skip")
    with finder.attach(trainer, num_iter=5, start_lr=1e-3, end_lr=5e-3, step_mode="linear") as searching:
        event = TrainEvents.GRADIENTS_REDUCED(once=3)
        searching.add_event_handler(event, lambda: model[0].weight.grad.fill_(math.inf))  # type: ignore[union-attr]
        searching.run(MICRO_BATCHES)
    assert finder.get_results()["lr"] == pytest.approx([1e-3, 2e-3, 4e-3, 5e-3])


def losses_of(given: list[float], **settings: Any) -> list[float]:
    """The curve where the updates have these losses."""
    remaining = iter(given)
    trainer = make(net())
    finder = search(trainer, MICRO_BATCHES, num_iter=len(given), output_transform=lambda output: next(remaining), **settings)
    return finder.get_results()["loss"]


def test_it_ends_where_the_loss_is_more_than_so_many_times_the_least() -> None:
    """The loss of that update is the last point; one of exactly so many times does not end it."""
    losses = [4.0, 2.0, 3.0, 6.0, 6.1, 1.0, 1.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as that the loss did not diverge
        assert losses_of(losses, smooth_f=0, diverge_th=3) == losses[:5]
        assert losses_of([1.0, 1.0, math.nan, 1.0], smooth_f=0.0) == [1.0, 1.0]


def test_a_loss_is_smoothed() -> None:
    """The share of a new one is `smooth_f`; with 0 nothing is smoothed."""
    assert losses_of([4.0, 2.0, 3.0], smooth_f=0.25) == [4.0, 3.5, 3.375]
    assert losses_of([4.0, 2.0, 3.0], smooth_f=0.0) == [4.0, 2.0, 3.0]


@pytest.mark.parametrize(("number", "rates"), [(1, [1e-3]), (2, [1e-3, 0.5]), (3, [1e-3, 0.2505, 0.5])])
def test_few_updates_have_the_first_and_the_last_rate(number: int, rates: list[float]) -> None:
    """Also in a search that continues a run."""
    model = net()
    trainer = make(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    trainer.run(MICRO_BATCHES, max_epochs=1)
    found = search(trainer, MICRO_BATCHES, num_iter=number, start_lr=None, step_mode="linear")
    assert found.get_results()["lr"] == pytest.approx(rates)


@pytest.mark.parametrize("groups", [1, 2])
def test_what_the_picture_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: int) -> None:
    """The losses over the rates of the first group, without those that are left out; the suggestion is a dot on the curve."""
    model, drawn = net(), list[Any]()
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    parts = [{"params": model[0].parameters()}, {"params": model[1:].parameters(), "lr": 1e-5}]
    optimizer = torch.optim.SGD(parts if groups == 2 else model.parameters(), lr=1e-3)
    finder = search(make(model, optimizer), MICRO_BATCHES, num_iter=30, start_lr=None, end_lr=10.0)
    finder.save_plot(tmp_path / "rates.png", skip_start=2, skip_end=3)
    results, suggestion = finder.get_results(), finder.lr_suggestion()
    rates = [rate[0] if groups == 2 else rate for rate in results["lr"]]
    first = suggestion[0] if groups == 2 else suggestion
    (axes,) = drawn[0].axes
    curve, dot = axes.get_lines()
    points = [list(point) for point in zip(rates, results["loss"], strict=True)]
    assert curve.get_xydata().tolist() == points[2:-3]
    assert dot.get_xydata().tolist() == [points[rates.index(first)]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [f"suggestion: {first:.3g}"]
    assert (axes.get_xscale(), axes.get_xlabel(), axes.get_ylabel()) == ("log", "learning rate", "smoothed loss")
    finder.save_plot(tmp_path / "rates.png")
    assert drawn[1].axes[0].get_lines()[0].get_xydata().tolist() == points


def _search_on_this_rank() -> Any:
    model = net()
    trainer = make(model, reduction="explicit")
    before = bit_by_bit(model.state_dict())
    data = MICRO_BATCHES[idist.get_rank() :: 2]
    finder = search(trainer, data, num_iter=40, end_lr=50.0, diverge_th=1.5)
    mean = search(trainer, data, output_transform=lambda output: float(idist.get_rank()))
    assert bit_by_bit(model.state_dict()) == before
    return finder.get_results(), mean.get_results()["loss"]


@pytest.mark.slow
def test_two_ranks_find_the_same() -> None:
    """Both end after the same update; a loss of the user's own is averaged over them."""
    first, second = run_ranks(_search_on_this_rank)
    assert first == second
    assert 1 < len(first[0]["loss"]) <= 40
    assert first[1] == pytest.approx([0.5] * 9)


def begin(**settings: Any) -> None:
    with LearningRateFinder().attach(make(net()), **settings):
        pytest.fail("it was not refused")


def begin_in_an_epoch() -> None:
    trainer = make(net())
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: LearningRateFinder().attach(trainer).__enter__())
    trainer.run(MICRO_BATCHES)


def begin_after_a_run_that_broke_off() -> None:
    trainer = make(net())
    trainer.add_event_handler(Events.ITERATION_STARTED(once=3), lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(MICRO_BATCHES)
    LearningRateFinder().attach(trainer).__enter__()


def begin_when_a_run_starts() -> None:
    trainer = make(net())
    trainer.add_event_handler(Events.STARTED, lambda: LearningRateFinder().attach(trainer).__enter__())
    trainer.run(MICRO_BATCHES)


def search_without_a_length() -> None:
    with LearningRateFinder().attach(make(net())) as trainer:
        trainer.run(iter(MICRO_BATCHES))


def of_another() -> None:
    begin(to_save={"optimizer": torch.optim.SGD(net().parameters())})


MISTAKES: dict[str, Mistake] = {
    "trainer": (TypeError, "trainer must be a Trainer", lambda: LearningRateFinder().attach(net()).__enter__()),  # type: ignore[arg-type]
    "order": (ValueError, "start_lr must be less than end_lr, got 1 and 0.5", lambda: begin(start_lr=1.0, end_lr=0.5)),
    "alike": (ValueError, "start_lr must be less than end_lr, got 0.5 and 0.5", lambda: begin(start_lr=0.5, end_lr=0.5)),
    "zero": (ValueError, "start_lr must be greater than 0", lambda: begin(start_lr=0.0)),
    "groups": (ValueError, "end_lr must have one rate for each", lambda: begin(end_lr=[1.0, 2.0])),
    "mode": (ValueError, "step_mode must be one of", lambda: begin(step_mode="cosine")),
    "smooth": (ValueError, "smooth_f must be less than 1", lambda: begin(smooth_f=1.0)),
    "diverge": (ValueError, "diverge_th must be at least 1", lambda: begin(diverge_th=0.5)),
    "updates": (ValueError, "num_iter must be at least 1", lambda: begin(num_iter=0)),
    "save": (TypeError, r"to_save\['ema'\] must have state_dict", lambda: begin(to_save={"ema": 3})),
    "optimizer": (ValueError, r"to_save\['optimizer'\] must be the optimizer of the trainer", of_another),
    "running": (RuntimeError, "in the middle of an epoch", begin_in_an_epoch),
    "broken off": (RuntimeError, "in the middle of an epoch", begin_after_a_run_that_broke_off),
    "started": (RuntimeError, "in the middle of an epoch", begin_when_a_run_starts),
    "length": (ValueError, "num_iter must be given", search_without_a_length),
    "picture": (RuntimeError, "nothing to draw", lambda: LearningRateFinder().save_plot("none.png")),
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes(name: str) -> None:
    """Each is answered in one line."""
    assert_one_line(MISTAKES[name])


def test_it_warns_where_the_loss_does_not_diverge() -> None:
    """As Ignite's does."""
    with pytest.warns(UserWarning, match="the loss did not diverge: increase end_lr"):
        search(make(net()), MICRO_BATCHES)
