"""tune: it leaves random numbers and the loader alone, each candidate computes the same updates, and noise wins nothing."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import accumulate, count, cycle
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from bits import bit_by_bit
from ignite_train import ForwardOutput, ResumableLoader, Trainer, Tuned, create_supervised_trainer, create_trainer, tune
from ignite_train.handlers import Checkpoint
from ignite_train.tools.search import Dimension, Search, race
from ignite_train.tools.trial import TrialError, TrialSamples
from mistakes import Mistake, assert_one_line
from ranks import run_ranks
from tiers import nightly

X = torch.randn(48, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
IMAGES = torch.randn(48, 2, 4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
PAGE = Path(__file__).parents[2] / "docs" / "tuning.md"
EVERY = ("threads", "micro_batch", "workers", "accumulation_steps", "fused", "compile")
Cost = Callable[[int], float]


class Clock:
    """Stands in place of the machine's: time passes when forward says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return install_clock(monkeypatch.setattr)


def install_clock(put: Callable[..., None]) -> Clock:
    found = Clock()
    put("ignite_train.tools.trial.perf_counter", found)
    put("ignite_train.tools.tune.perf_counter", found)
    put("ignite_train.tools.search._ROUNDS", 3)  # without noise they are all alike
    put("ignite_train.tools.search._LAST_ROUNDS", 3)
    return found


def summed(model: nn.Module, x: Tensor) -> ForwardOutput:
    return ForwardOutput((model(x) - 2.0).square().sum(), sample_size=len(x))


def maker(clock: Clock, cost: Cost, middle: Callable[[], nn.Module] = nn.Tanh, made: list[Any] | None = None) -> Any:
    """A function that makes a trainer, in whose forward time passes by the size of the micro-batch."""

    def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
        clock.now += cost(len(x))
        return summed(model, x)

    def make_trainer(accumulation_steps: int = 4, fused: Any = None, compile: Any = False) -> Trainer:  # noqa: A002, FBT002
        model = nn.Sequential(nn.Linear(3, 4), middle(), nn.Linear(4, 1)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        trainer = create_trainer(model, optimizer, forward, accumulation_steps=accumulation_steps, compile=compile)
        if made is not None:
            made.append((trainer, torch.get_num_threads()))
        return trainer

    return make_trainer


def loader_of(size: int = 4, **settings: Any) -> DataLoader[Any]:
    return DataLoader(X, batch_size=size, **{"shuffle": True, **settings})  # type: ignore[arg-type]


def tuned(make_trainer: Any, loader: Any, **values: list[Any]) -> Tuned:
    """Varies these settings only, for as long as it takes."""
    return tune(make_trainer, loader, seconds=1e6, values={**{name: [] for name in EVERY}, **values})


# --- what it finds ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_fastest_is_named_with_its_gain_and_its_line(clock: Clock) -> None:
    """A micro-batch costs 1 s and 0.1 s for each sample: one of 16 takes 2.6 s, four of 4 take 5.6 s."""
    found = tuned(maker(clock, lambda size: 1.0 + 0.1 * size), loader_of(), micro_batch=[2, 8, 16])
    assert (found.fastest["micro_batch"], found.fastest["accumulation_steps"]) == (16, 1)
    assert found.gain == pytest.approx(5.6 / 2.6)
    assert found.line == "make_trainer(accumulation_steps=1); DataLoader(..., batch_size=16)"
    assert f"{16 / 5.6:.3g}" in str(found).splitlines()[1]
    assert [row.settings["micro_batch"] for row in found.rows] == [4, 8, 16, 16]
    assert "to have it: make_trainer(accumulation_steps=1)" in str(found)


@pytest.mark.nightly
def test_nothing_is_named_where_all_are_equal(clock: Clock) -> None:
    """The time is that of the samples alone."""
    found = tuned(maker(clock, lambda size: 0.1 * size), loader_of(), micro_batch=[1, 2, 8])
    assert (found.fastest, found.gain, found.line) == (found.present, 1.0, "")
    assert str(found).endswith("nothing was faster than your settings by more than the noise")


@pytest.mark.slow
def test_each_candidate_computes_the_updates_of_one_large_batch(clock: Clock) -> None:
    """From the same weights, on the same samples: losses and norms of all first updates agree, and so nothing is warned of."""
    made: list[Any] = []
    found = tuned(maker(clock, lambda size: 1.0, made=made), loader_of(), micro_batch=[1, 2, 8, 16], fused=[True])
    assert len(found.rows) >= 4
    assert found.warnings == ()
    assert len({trainer.state.update_output.sample_size for trainer, _ in made if trainer.state.iteration}) == 1


@pytest.mark.nightly
def test_what_is_tried_by_default(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads and workers by powers of two, sizes that divide the samples of an update, and the parameters that are known."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(3))
    tried: list[Any] = []

    def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
        clock.now += 1.0
        return summed(model, x)

    def make_trainer(
        accumulation_steps: int = 2, *, fused: bool = False, channels_last: bool = False, width: int = 4
    ) -> Trainer:
        tried.append((accumulation_steps, fused, channels_last, width, torch.get_num_threads()))
        model = nn.Linear(3, width).double()
        return create_trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), forward, accumulation_steps=accumulation_steps
        )

    before = torch.get_num_threads()
    found = tune(make_trainer, loader_of(num_workers=0), seconds=1e6, values={"workers": []})
    assert found.left_alone == {"workers": "left out by values", "width": "there is no other usual value"}
    assert {entry[4] for entry in tried} == {before, 1, 2, 3}
    assert {entry[0] for entry in tried} == {1, 2}
    assert {entry[1:3] for entry in tried} >= {(True, False), (False, True)}
    assert torch.get_num_threads() == before


@pytest.mark.nightly
def test_any_parameter_can_be_varied(clock: Clock) -> None:
    """By `values`: here the wider model is not slower, and the one of two parts is."""

    def make_trainer(parts: int = 4) -> Trainer:
        def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
            clock.now += parts
            return summed(model, x)

        model = nn.Linear(3, 1).double()
        return create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward)

    found = tune(make_trainer, loader_of(), seconds=1e6, values={"parts": [1, 2, 8], "threads": [], "workers": []})
    assert found.fastest["parts"] == 1
    assert found.line == "make_trainer(parts=1)"
    assert found.left_alone["micro_batch"] == "make_trainer has no parameter accumulation_steps"


@pytest.mark.slow
def test_a_candidate_that_fails_is_a_row(clock: Clock) -> None:
    """And the search goes on."""

    def cost(size: int) -> float:
        if size == 8:
            raise torch.OutOfMemoryError("no room\nfor 8")
        return 1.0 if size > 4 else 0.5

    found = tuned(maker(clock, cost), loader_of(), micro_batch=[8, 2])
    (failed,) = [row for row in found.rows if row.samples_per_second is None]
    assert failed.outcome == "failed: OutOfMemoryError: no room for 8"
    assert [row.settings["micro_batch"] for row in found.rows] == [4, 8, 2]


@pytest.mark.parametrize(
    ("fails", "last"), [(1, 15), (1, 18), (1, 30), (2, 14)], ids=["windows", "first race", "later race", "a winner"]
)
def test_the_fastest_settings_may_not_fail_in_the_search(fails: int, last: int, clock: Clock) -> None:
    """Their failure, by a schedule of a fixed length say, is an error, and not a row for each candidate beside them."""
    made = count()

    def make_trainer(accumulation_steps: int = 1, width: int = 1) -> Trainer:
        def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
            clock.now += 0.5 if width == fails == 2 else 1.0
            return summed(model, x)

        model = nn.Linear(3, width).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = create_trainer(model, optimizer, forward, accumulation_steps=accumulation_steps)
        limit = last if next(made) and width == fails else 1000

        @trainer.on(Events.ITERATION_STARTED)
        def end() -> None:
            if trainer.state.iteration > limit:
                raise ValueError("too many steps")

        return trainer

    values = {"threads": [], "micro_batch": [], "workers": [], "width": [2, 3, 4]}
    says = f"^the {'present settings' if fails == 1 else 'settings width=2'} cannot be measured: ValueError: too many steps"
    assert_one_line((RuntimeError, says, lambda: tune(make_trainer, loader_of(), seconds=1e6, values=values)))


@pytest.mark.nightly
def test_a_window_of_a_very_slow_candidate_ends_early(clock: Clock) -> None:
    """After three windows of the present settings, so that one that is a thousand times slower does not use up the time."""
    found = tuned(maker(clock, lambda size: 1000.0 if size < 4 else 1.0), loader_of(), micro_batch=[2])
    assert found.rows[1].outcome == "slower"


@pytest.mark.slow
def test_the_time_is_kept(clock: Clock) -> None:
    """The fifth part of it is left for the last race; what was not measured is counted."""
    values = {**{name: [] for name in EVERY}, "micro_batch": [2, 1, 8]}
    found = tune(maker(clock, lambda size: 1.0), loader_of(), seconds=50.0, values=values)
    assert found.num_unmeasured == 3
    assert "3 candidates; pass more seconds" in str(found)


# --- what it leaves alone ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(0, slow=3)
@pytest.mark.parametrize("kind", ["global generator", "own generator", "resumable"])
@pytest.mark.parametrize("ends", ["well", "by an error"])
def test_a_run_after_it_is_the_run_without_it(kind: str, ends: str, clock: Clock) -> None:
    """Random numbers, the order of the loader, its place, and torch's threads are what they were."""
    results = []
    for tunes in (False, True):
        torch.manual_seed(3)
        own = torch.Generator().manual_seed(5) if kind == "own generator" else None
        loader: Any = ResumableLoader(X, 4, shuffle=True) if kind == "resumable" else loader_of(generator=own)
        calls = iter(range(10_000))

        def cost(_: int, calls: Iterator[int] = calls, fails: bool = tunes and ends == "by an error") -> float:
            if fails and next(calls) == 40:
                raise KeyboardInterrupt
            return 1.0

        make_trainer = maker(clock, cost, lambda: nn.Dropout(0.3))
        if tunes and ends == "well":
            tuned(make_trainer, loader, micro_batch=[8], threads=[2])
        elif tunes:
            with pytest.raises(KeyboardInterrupt):
                tuned(make_trainer, loader, micro_batch=[8], threads=[2])
        trainer = maker(clock, lambda _: 1.0, lambda: nn.Dropout(0.3))()
        trainer.run(loader, max_epochs=2)
        results.append((bit_by_bit([trainer.model.state_dict(), torch.get_rng_state()]), torch.get_num_threads()))
    assert results[0] == results[1]


class Stateful:
    """A loader with a place of its own."""

    def __init__(self) -> None:
        self.place = 3

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(8):
            self.place += 1
            yield X[:4]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Streaming(IterableDataset[Tensor]):
    """Has no length."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(X)


class Process(IterableDataset[Tensor]):
    """Says in which process it is read."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.tensor(os.getpid())] * 8)


def test_a_loader_that_starts_workers_for_its_state_is_read_in_this_process() -> None:
    """Which `StatefulDataLoader` does; its workers would be one more number of them than is measured."""
    loader: Any = StatefulDataLoader(Process(), 4, num_workers=1)
    samples = TrialSamples(loader, 2, None, {})
    assert [batch.tolist() for batch in samples.loader({})] == [[os.getpid()] * 4] * 2


FIXED: dict[str, tuple[Callable[[], Any], str]] = {
    "list": (lambda: [X[:4]] * 8, "what a list without an order of indices gives cannot be cut otherwise"),
    "stateful": (Stateful, "what a Stateful without an order"),
    "stream": (lambda: DataLoader(Streaming(), batch_size=4), "what a DataLoader without an order"),
    "batch sampler": (
        lambda: DataLoader(X, batch_sampler=BatchSampler(SequentialSampler(X), 4, drop_last=True)),  # type: ignore[arg-type]
        "the batch_sampler of the DataLoader decides which samples are a micro-batch",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(FIXED))
def test_micro_batches_that_cannot_be_cut_are_left_alone_and_said(kind: str, clock: Clock) -> None:
    """The unit of the table is then micro-batches; a loader with a place of its own is where it was."""
    make_loader, reason = FIXED[kind]
    loader = make_loader()
    found = tune(maker(clock, lambda _: 1.0), loader, seconds=1e6, values={"threads": [], "compile": [], "workers": []})
    assert reason in found.left_alone["micro_batch"]
    assert ("micro-batches/s" in str(found)) == (kind != "batch sampler" or found.present["micro_batch"] is None)
    assert kind != "stateful" or loader.place == 3


# --- what depends on the cut ------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_what_depends_on_the_cut_is_named(clock: Clock) -> None:
    """BatchNorm by its name; what has no name by what the first update comes to, unless dropout draws."""
    norm = tuned(maker(clock, lambda _: 1.0, lambda: nn.BatchNorm1d(4)), loader_of(), micro_batch=[8])
    assert norm.warnings[0].startswith("'1': BatchNorm takes mean and variance from a micro-batch")
    assert any("the loss of the same update is" in line for line in norm.warnings)
    drop = tuned(maker(clock, lambda _: 1.0, lambda: nn.Dropout(0.5)), loader_of(), micro_batch=[8])
    assert drop.warnings == ("dropout draws other numbers for another cut; so first updates are not compared",)


# --- noise wins nothing -----------------------------------------------------------------------------------------------------

PRESENT = {"micro_batch": 4, "threads": 2}


class Scripted:
    """Settings whose windows take what is written down."""

    peak_memory = None
    samples = 16

    def __init__(self, settings: Any, seconds: Iterator[float], log: list[Any]) -> None:
        self.settings, self._seconds, self._log = settings, seconds, log
        log.append(("made", settings["threads"]))

    def seconds(self) -> float:
        found = next(self._seconds)
        if found < 0:
            raise TrialError("broken")
        return found

    def close(self) -> None:
        self._log.append(("closed", self.settings["threads"]))


def searched(script: dict[int, list[float]]) -> tuple[Search, list[Any]]:
    """A search over threads, for each number of which the windows take these seconds, again and again."""
    log: list[Any] = []
    endless = {threads: cycle(seconds) for threads, seconds in script.items()}
    search = Search(lambda settings: Scripted(settings, endless[settings["threads"]], log), PRESENT, lambda: False)
    change = lambda settings, value: {**settings, "threads": value}  # noqa: E731
    search([Dimension("threads", tuple(sorted(script)), is_ordered=False, change=change)])
    return search, log


def test_noise_is_no_winner() -> None:
    """Times that differ by a third at random, the same for all: many candidates, none of them faster."""
    draw = random.Random(2)  # noqa: S311
    search, log = searched({threads: [1.0 + draw.random() / 3 for _ in range(101)] for threads in range(1, 20)})
    assert len(search.rows) >= 19
    assert max(accumulate(1 if what == "made" else -1 for what, _ in log)) == 2, "in memory together"
    assert search.fastest == PRESENT


def test_a_gain_beyond_the_noise_is_a_winner() -> None:
    """Half of the time, with noise of a tenth."""
    draw = random.Random(2)  # noqa: S311
    search, _ = searched({n: [(0.5 if n == 7 else 1.0) + draw.random() / 10 for _ in range(101)] for n in range(1, 9)})
    assert search.fastest["threads"] == 7
    assert search.last_race is not None
    assert all(1.7 < ratio < 2.2 for ratio in search.last_race.quartiles)


@pytest.mark.parametrize(
    ("script", "last"),
    [
        ([0.5] * 7 + [1.0] * 9, "once more, beside the present settings: no difference"),
        ([0.5] * 7 + [-1.0], "not measured once more: broken"),
    ],
    ids=["lucky", "breaks"],
)
def test_a_winner_that_does_not_win_again_is_not_named(script: list[float], last: str) -> None:
    """The present settings stay, and all that was made is closed."""
    search, log = searched({2: [1.0], 4: script})
    assert search.fastest == PRESENT
    assert search.rows[-1].outcome == last
    assert len([entry for entry in log if entry[0] == "made"]) == len([entry for entry in log if entry[0] == "closed"])


def test_a_drift_of_the_machine_is_in_both_times_of_a_round() -> None:
    """A machine that becomes slower and slower: one that is 10 % faster in each round wins."""
    times = [10.0 + n // 2 for n in range(100)]
    before, after = iter(times), iter(times)
    found = race(lambda: 1.1 * next(before), lambda: next(after), rounds=9)
    assert found.outcome == "faster"
    assert found.ratios == pytest.approx([1.1] * 9)


@pytest.mark.parametrize(
    ("after", "rounds", "outcome"),
    [(1 / 1.015, 3, "no difference"), (1 / 1.03, 7, "faster"), (2.5, 2, "slower"), (1.9, 3, "slower")],
)
def test_a_race_ends_where_it_is_decided(after: float, rounds: int, outcome: str) -> None:
    """A gain of less than two percent is none worth a change; the order alternates from round to round."""
    order: list[str] = []

    def noting(name: str, seconds: float) -> Callable[[], float]:
        return lambda: order.append(name) or seconds  # type: ignore[func-returns-value]

    found = race(noting("a", 1.0), noting("b", after), rounds=7)
    assert (found.outcome, "".join(order[:4])) == (outcome, "abba")
    assert len(found.ratios) == rounds


# --- real clocks, ranks and mistakes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [nightly([]), nightly([1])], ids=["alone", "workers"])
def test_a_supervised_trainer_by_the_real_clock(workers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With channels_last and worker processes; a row for each that was tried. The search itself never runs out of time."""
    monkeypatch.setattr("ignite_train.tools.tune.perf_counter", lambda: 0.0)

    def make_trainer(gradient_accumulation_steps: int = 2, *, channels_last: bool = False) -> Trainer:
        layout = torch.channels_last if channels_last else torch.contiguous_format
        model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 1)).double().to(memory_format=layout)
        return create_supervised_trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=1e-4),
            nn.MSELoss(),
            gradient_accumulation_steps=gradient_accumulation_steps,
        )

    pairs = list(zip(IMAGES, torch.zeros(48, 1, dtype=torch.float64), strict=True))
    loader: Any = DataLoader(pairs, batch_size=4)  # type: ignore[arg-type]
    found = tune(make_trainer, loader, seconds=0.2, values={"threads": [], "workers": workers, "micro_batch": [8]})
    assert {*map(str, (row.settings["channels_last"] for row in found.rows))} == {"False", "True"}
    assert all(row.samples_per_second is not None for row in found.rows)


def on_rank() -> Any:
    """A rank on which a setting fails, and one that is slower."""
    put = pytest.MonkeyPatch()
    clock, rank = install_clock(put.setattr), idist.get_rank()

    def cost(size: int) -> float:
        assert idist.get_world_size() == 1
        if rank == 1 and size == 8:
            raise ValueError("not here")
        return float(1 + rank) if size == 4 else 0.5

    found = tuned(maker(clock, cost), loader_of(shuffle=False), micro_batch=[2, 8])
    return str(found), idist.get_world_size()


@pytest.mark.slow
def test_all_ranks_find_the_same_and_the_slowest_counts() -> None:
    """A candidate that fails on one rank leaves none waiting."""
    outcomes = run_ranks(on_rank)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1] == 2
    assert "failed: ValueError: not here (rank 1)" in outcomes[0][0]
    assert "fastest: micro_batch=2, accumulation_steps=8: 2.00 times" in outcomes[0][0]


def simple(accumulation_steps: int = 1) -> Trainer:
    model = nn.Linear(3, 1).double()
    return create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), summed, accumulation_steps=accumulation_steps)


def stepped(accumulation_steps: int = 2) -> Trainer:
    return simple(accumulation_steps)


def heedless(accumulation_steps: int = 2) -> Trainer:
    return simple()


def breaking(accumulation_steps: int = 1) -> Trainer:
    raise RuntimeError("no such device")


@pytest.mark.parametrize("iteration", [2, 5, 8, 17], ids=["first window", "second window", "search", "last window"])
@pytest.mark.parametrize("call", ["terminate", "terminate_epoch"])
def test_a_handler_that_ends_an_epoch_or_the_run_is_refused(call: str, iteration: int, clock: Clock) -> None:
    """A window that such a handler cuts short has no time, and must not have the time of another window."""
    make_trainer = maker(clock, lambda _: 1.0)

    @wraps(make_trainer)
    def ending(**settings: Any) -> Trainer:
        trainer: Trainer = make_trainer(**settings)

        @trainer.on(Events.ITERATION_COMPLETED)
        def end() -> None:
            if trainer.state.iteration >= iteration:
                getattr(trainer, call)()

        return trainer

    message = "make_trainer must attach no handler that ends an epoch or the run, .* got one after 2 of 3 updates;"
    message = f"the present settings cannot be measured: ValueError: {message}"
    assert_one_line((RuntimeError, message, lambda: tuned(ending, loader_of())))


def test_the_model_of_the_program_is_not_trained() -> None:
    """It is refused before the first update."""
    trainer = simple()
    before = bit_by_bit(trainer.model.state_dict())

    def of_the_same(accumulation_steps: int = 1) -> Trainer:
        optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
        return create_trainer(trainer.model, optimizer, summed, accumulation_steps=accumulation_steps)

    message = "the present settings cannot be measured: ValueError: make_trainer must make a new model each time"
    assert_one_line((RuntimeError, message, lambda: tune(of_the_same, loader_of(), seconds=0.1)))
    assert bit_by_bit(trainer.model.state_dict()) == before


def test_a_checkpoint_of_the_run_is_neither_written_nor_read(tmp_path: Path) -> None:
    """A trial would save into the run's directory, and the run would continue from the trial."""

    def saving(accumulation_steps: int = 1) -> Trainer:
        trainer = simple(accumulation_steps)
        Checkpoint(tmp_path / "run", every=1).attach(trainer)
        return trainer

    message = "the present settings cannot be measured: ValueError: make_trainer must attach no Checkpoint"
    assert_one_line((RuntimeError, message, lambda: tune(saving, loader_of(), seconds=0.1)))
    assert [*tmp_path.iterdir()] == []


MISTAKES: dict[str, Mistake] = {
    "a trainer": (
        TypeError,
        "make_trainer must be a function that makes a new trainer, got a Trainer; write",
        lambda: tune(simple(), [X]),
    ),  # type: ignore[arg-type]
    "no function": (TypeError, "make_trainer must be a function", lambda: tune(3, [X])),  # type: ignore[arg-type]
    "no default": (TypeError, "must have a default for each parameter, got 'width'", lambda: tune(lambda width: simple(), [X])),
    "steps that are not passed on": (
        RuntimeError,
        "make_trainer must pass its accumulation_steps on to create_trainer, got a trainer with accumulation_steps=1 for "
        "accumulation_steps=2",
        lambda: tune(heedless, loader_of()),
    ),
    "steps without a parameter": (
        RuntimeError,
        "make_trainer must pass its accumulation_steps on to create_trainer, got a trainer with accumulation_steps=2 and no "
        "such parameter; add one, with one number as its default",
        lambda: tune(lambda: stepped(), loader_of()),  # it has no parameters
    ),
    "several numbers of steps": (
        TypeError,
        r"make_trainer's default of accumulation_steps must be a positive integer, got \[2, 4\]",
        lambda: tune(lambda accumulation_steps=[2, 4]: stepped(accumulation_steps), loader_of()),  # type: ignore[misc]
    ),
    "no trainer": (RuntimeError, "make_trainer must return a Trainer, got", lambda: tune(lambda: 3, [X])),  # type: ignore[arg-type, return-value]
    "breaks": (
        RuntimeError,
        "the present settings cannot be measured: RuntimeError: no such device",
        lambda: tune(breaking, [X]),
    ),
    "seconds": (ValueError, "seconds must be", lambda: tune(simple, [X], seconds=0.0)),
    "values": (TypeError, "values must be a mapping", lambda: tune(simple, [X], values=[1])),  # type: ignore[arg-type]
    "unknown": (ValueError, "got 'thread'; did you mean 'threads'", lambda: tune(simple, [X], values={"thread": [1]})),
    "no list": (TypeError, r"values\['threads'\] must be a list", lambda: tune(simple, [X], values={"threads": 2})),  # type: ignore[dict-item]
    "no number": (ValueError, r"values\['threads'\] must be", lambda: tune(simple, [X], values={"threads": [0]})),
    "other samples": (
        ValueError,
        r"values\['micro_batch'\] must divide the 8 samples of an update, got 3; give some of 1, 2, 4, 8",
        lambda: tune(stepped, loader_of(), values={"micro_batch": [8, 3]}),
    ),
    "more samples": (
        ValueError,
        r"values\['micro_batch'\] must divide the 8 samples of an update, got 16",
        lambda: tune(stepped, loader_of(), values={"micro_batch": [16]}),
    ),
    "steps": (
        ValueError,
        r"values must leave 'accumulation_steps' alone, .* got \[2, 1\]; give 'micro_batch'",
        lambda: tune(stepped, loader_of(), values={"accumulation_steps": [1, 2]}),
    ),
    "steps of a list": (
        ValueError,
        "values must leave 'accumulation_steps' alone",
        lambda: tune(stepped, [X[:4]], values={"accumulation_steps": [1]}),
    ),
    "iterator": (TypeError, "loader must be one that can be read again", lambda: tune(simple, iter([X]))),
    "empty": (ValueError, "loader must give at least one micro-batch", lambda: tune(simple, [])),
}


@pytest.mark.parametrize("what", list(MISTAKES))
def test_mistakes_are_answered_in_one_line(what: str) -> None:
    """With the argument, the value and the remedy."""
    assert_one_line(MISTAKES[what])


@pytest.mark.slow
@pytest.mark.skipif(not PAGE.is_file(), reason="looks at a checkout, which is not here")
def test_the_page_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/tuning.md: its code prints a table."""
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(block, {"__name__": "page"})  # noqa: S102
    assert "present: micro_batch=16, accumulation_steps=4" in capsys.readouterr().out
