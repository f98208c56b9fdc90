"""Finding the fastest settings: it changes nothing, each candidate computes the same updates, and noise wins nothing."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import accumulate, count, cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ignite.distributed as idist
import numpy as np
import pytest
import torch
import torch.distributed as dist
from ignite.engine import Engine
from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from bits import bit_by_bit
from ignite_train import ForwardOutput, ResumableLoader, Trainer, Tuned, create_supervised_trainer, create_trainer, tune
from ignite_train.model.modules_used import modules_used
from ignite_train.model.random_state import capture_random_state
from ignite_train.tuning.alone import TrialError
from ignite_train.tuning.copies import copies_of, set_memory_layout
from ignite_train.tuning.cut_warnings import difference_warnings
from ignite_train.tuning.dimensions import Dimension, dimensions
from ignite_train.tuning.fixed_samples import FixedSamples
from ignite_train.tuning.race import race
from ignite_train.tuning.search import Search
from ignite_train.tuning.settings import Settings
from ignite_train.tuning.tuned import Measured
from ignite_train.update.update_graphs import UpdateGraphs
from processes import DEADLINE_SECONDS
from ranks import run_ranks
from tiers import only, slow

X = torch.randn(48, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
IMAGES = torch.randn(48, 2, 4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
NAMES = ("threads", "micro_batch", "fused", "channels_last", "workers", "compile")
NOTHING: dict[str, list[Any]] = {name: [] for name in NAMES}


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
    import ignite_train.tuning.trial
    import ignite_train.tuning.tune  # noqa: F401

    found = Clock()
    put("ignite_train.tuning.trial.perf_counter", found)
    put("ignite_train.tuning.tune.perf_counter", found)
    put("ignite_train.tuning.search._ROUNDS", 3)  # without noise they are all alike
    put("ignite_train.tuning.search._LAST_ROUNDS", 3)
    return found


def net(*, noisy: bool = False) -> nn.Module:
    """A small net; a noisy one has what draws and what remembers."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        between = [nn.BatchNorm1d(4), nn.Dropout(0.3)] if noisy else [nn.Tanh()]
        return nn.Sequential(nn.Linear(3, 4), *between, nn.Linear(4, 1)).double()


def summed(model: nn.Module, x: Tensor) -> ForwardOutput:
    return ForwardOutput((model(x) - 2.0).square().sum(), sample_size=len(x))


def costing(clock: Clock, seconds: Callable[[int], float]) -> Callable[[nn.Module, Tensor], ForwardOutput]:
    """A forward for which time passes by the size of its micro-batch."""

    def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
        clock.now += seconds(len(x))
        return summed(model, x)

    return forward


def make(forward: Any, *, noisy: bool = False, **settings: Any) -> Trainer:
    model = net(noisy=noisy)
    return create_trainer(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), forward, **{"accumulation_steps": 4, **settings}
    )


def tuned(trainer: Trainer, loader: Any, **values: list[Any]) -> Tuned:
    """Varies these settings only, for as long as it takes."""
    return tune(trainer, loader, seconds=1e6, values={**NOTHING, **values})


def loader_of(size: int = 4, **settings: Any) -> DataLoader[Any]:
    return DataLoader(X, batch_size=size, **{"shuffle": True, **settings})  # type: ignore[arg-type]


# --- it changes nothing -----------------------------------------------------------------------------------------------------


class Shared(nn.Linear):
    """Its copies are itself, as of a large module that is not trained."""

    def __deepcopy__(self, _memo: Any) -> nn.Module:
        return self


def test_a_model_whose_copy_is_not_one_keeps_its_weights(clock):
    """They would be emptied with the copies."""
    model = nn.Sequential(Shared(3, 4), nn.Linear(4, 1)).double()
    before = bit_by_bit(model.state_dict())
    model[0].requires_grad_(False)
    trainer = create_trainer(model, torch.optim.SGD(model[1].parameters()), costing(clock, float), accumulation_steps=4)
    with pytest.raises(RuntimeError, match=r"got a copy that has the tensor '0.weight' of the original"):
        tuned(trainer, loader_of(), micro_batch=[8])
    assert bit_by_bit(model.state_dict()) == before


class Augmented(Dataset[Tensor]):
    """Draws from all generators, and from one of its own."""

    def __init__(self) -> None:
        self.own, self.epochs = np.random.default_rng(5), list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Tensor:
        return X[index] + random.random() + np.random.rand() + self.own.random() + torch.rand(())  # noqa: S311


LOADERS: dict[str, Callable[[], Any]] = {
    "default generator": lambda: DataLoader(Augmented(), batch_size=4, shuffle=True),
    "own generator": lambda: loader_of(generator=torch.Generator().manual_seed(9)),
    "resumable": lambda: ResumableLoader(Augmented(), batch_size=4, shuffle=True, seed=3),
    "list": lambda: list(X.split(4)),
}


@pytest.mark.parametrize("kind", only(["own generator"], LOADERS))
def test_the_run_after_it_is_the_run_without_it(kind: str, clock: Clock) -> None:
    """Weights, states, counters, generators, gradients and modes are bit by bit the same, also in the middle of an epoch."""
    ends = []
    for tunes in (False, True):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(7)
        loader, trainer = LOADERS[kind](), make(costing(clock, lambda size: 4.0 / size), noisy=True)
        model, optimizer = trainer._stateful_parts["model"], trainer._stateful_parts["optimizer"]
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        trainer.run(loader, max_iters=2)
        if tunes:
            found = tuned(trainer, loader, fused=[True], micro_batch=[8, 2], threads=[1])
            assert {row.settings.fused for row in found.rows} == {None, True}
            assert all(row.samples_per_second for row in found.rows)
        trainer.run(loader, max_iters=5)
        parts = [
            model.state_dict(),
            optimizer.state_dict(),
            trainer.state_dict(),
            capture_random_state(),
            schedule.state_dict(),
        ]
        parts += [[p.grad for p in model.parameters()], [m.training for m in model.modules()], torch.get_num_threads()]
        ends.append(bit_by_bit(parts))
        ends[-1].append(getattr(getattr(loader, "dataset", None), "epochs", None))

    assert repr(ends[1]) == repr(ends[0])


class Task:
    """A forward, and a module beside the model that remembers what it has seen."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.teacher = clock, nn.BatchNorm1d(3).double()
        self.teacher.register_buffer("mask", torch.ones(1).expand(3))

    def forward(self, model: nn.Module, x: Tensor) -> Tensor:
        return by_argument({"only": self.teacher}, self.clock, model, x)

    __call__ = forward


def by_argument(teachers: dict[str, nn.Module], clock: Clock, model: nn.Module, x: Tensor) -> Tensor:
    clock.now += len(x)
    return model(teachers["only"](x)).sum()


def ways_to_a_module(clock: Clock) -> dict[str, tuple[Any, nn.Module]]:
    """Forwards, and the module that each uses."""
    task = Task(clock)
    teachers = {"only": task.teacher}

    def inner(model: nn.Module, x: Tensor) -> Tensor:
        return by_argument(teachers, clock, model, x)

    return {
        "method": (task.forward, task.teacher),
        "object": (task, task.teacher),
        "partial": (partial(by_argument, teachers, clock), task.teacher),
        "function": (lambda model, x: inner(model, x), task.teacher),
    }


@pytest.mark.parametrize("way", ["method", "object", "partial", "function"])
def test_modules_beside_the_model_are_put_back(way: str, clock: Clock) -> None:
    """Wherever forward has them from."""
    forward, teacher = ways_to_a_module(clock)[way]
    before = bit_by_bit(teacher.state_dict())
    tuned(make(forward), loader_of(), micro_batch=[8])
    assert bit_by_bit(teacher.state_dict()) == before


def test_modules_of_a_circle_are_found_once() -> None:
    """Also in a function that calls itself, and in a list that holds itself."""
    teacher = nn.Linear(1, 1)
    circle: list[Any] = [teacher]
    circle.append(circle)

    def forward(model: nn.Module, x: Tensor) -> Any:
        return forward(model, x) if circle else None

    assert [*islice(modules_used([forward, forward]), 5)] == [teacher]


class Interrupt(BaseException):
    """As Ctrl-C: not an Exception."""


@pytest.mark.parametrize("threads", [1, slow(3)])
def test_all_is_put_back_when_it_is_interrupted(threads: int, clock: Clock) -> None:
    """Also what a forward changes that uses the model, or another module, from outside."""
    model, queue = net(noisy=True), nn.BatchNorm1d(3).double()

    def forward(_model: nn.Module, x: Tensor) -> Tensor:
        clock.now += 0.1
        if torch.get_num_threads() == 2:  # it is the candidate
            raise Interrupt
        return _model(queue(x)).sum() + model(x).sum()

    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward, accumulation_steps=2)
    next(model.parameters()).grad = torch.ones(4, 3, dtype=torch.float64)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        seen = [model.state_dict(), queue.state_dict(), [p.grad for p in model.parameters()], capture_random_state()]
        expected = bit_by_bit(seen)
        with pytest.raises(Interrupt):
            tune(trainer, loader_of(), seconds=100.0, values={"threads": [2], "compile": [], "workers": []})
        seen = [model.state_dict(), queue.state_dict(), [p.grad for p in model.parameters()], capture_random_state()]

        assert repr(bit_by_bit(seen)) == repr(expected)
        assert torch.get_num_threads() == threads
        assert idist.utils._need_to_sync  # and the process is no longer alone
    finally:
        torch.set_num_threads(before)


# --- the updates stay what they are -----------------------------------------------------------------------------------------


class ConvNet(nn.Module):
    """Has weights of 4 dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).mean((2, 3)))  # type: ignore[no-any-return]


def test_each_candidate_computes_the_updates_of_one_large_batch(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights after its first window are those of a plain loop over the whole samples of each update, in their order."""
    from ignite_train.tuning import trial as module

    ends: list[tuple[Settings, list[Tensor]]] = []
    window = module.Trial._window

    def seen(self: Any) -> float:
        seconds = window(self)
        if self._trainer.state.epoch == 1:
            samples = [torch.cat(list(self._loader)), *self._trainer._stateful_parts["model"].parameters()]
            ends.append((self.settings, [tensor.detach().clone() for tensor in samples]))
        return seconds

    monkeypatch.setattr(module.Trial, "_window", seen)
    torch.manual_seed(4)
    model = ConvNet().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    forward = costing(clock, lambda size: size)
    trainer = create_trainer(model, optimizer, forward, accumulation_steps=3, max_grad_norm=0.5)
    loader = DataLoader(IMAGES, batch_size=4, shuffle=True)  # type: ignore[arg-type]
    torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)  # it puts a step of its own in the place of the optimizer's
    trainer.run(loader, max_iters=2)  # so that the optimizer has a state
    tuned(trainer, loader, micro_batch=[12, 2], fused=[True], channels_last=[True])
    del ends[0]  # of the calibration

    assert {(s.micro_batch, s.accumulation_steps) for s, _ in ends} == {(4, 3), (12, 1), (2, 6)}
    assert {s.channels_last for s, _ in ends} == {False, True}
    assert {s.fused for s, _ in ends} == {None, True}
    expected = by_hand(model, optimizer, ends[0][1][0])
    for settings, (samples, *weights) in ends:
        assert torch.equal(samples, ends[0][1][0]), settings
        for weight, reference in zip(weights, expected, strict=True):
            torch.testing.assert_close(weight, reference, rtol=1e-9, atol=1e-9)


def by_hand(model: nn.Module, before: torch.optim.Optimizer, samples: Tensor) -> list[Tensor]:
    """A plain loop of torch over updates of 12 samples."""
    copy = ConvNet().double()
    copy.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(copy.parameters(), lr=0.1)
    optimizer.load_state_dict(deepcopy(before.state_dict()))
    for x in samples.split(12):
        optimizer.zero_grad()
        (copy(x) - 2.0).square().mean().backward()
        nn.utils.clip_grad_norm_(copy.parameters(), 0.5)
        optimizer.step()
    return list(copy.parameters())


class Remembering(torch.optim.SGD):
    """Keeps what it did in an attribute of its own, which torch does not copy."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.history: list[str] = ["made"]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.history.append("stepped")
        super().step(closure)


def test_a_copy_shares_nothing() -> None:
    """Stepping it leaves the user's optimizer and weights alone, with what its class keeps."""
    model = net()
    first, second = (Remembering(part.parameters(), lr=0.1) for part in (model[0], model[2]))  # type: ignore[index]
    before = bit_by_bit(model.state_dict())
    twin, optimizers = copies_of(model, {"first": first, "second": second}, compiled=False)
    twin(X).sum().backward()
    for optimizer in optimizers.values():  # type: ignore[union-attr]
        optimizer.step()

    assert bit_by_bit(model.state_dict()) == before
    assert all(p.grad is None for p in model.parameters())
    assert (first.history, second.history) == (["made"], ["made"])
    assert [o.history for o in optimizers.values()] == [["made", "stepped"]] * 2  # type: ignore[union-attr, attr-defined]
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["by the user", "by the trainer"])
@pytest.mark.parametrize("whole", [False, True], ids=["a part", "the whole"])
def test_what_is_compiled_in_place_is_compiled_in_the_copy(whole: bool, compiled: bool) -> None:
    """Unless the trainer has compiled the model, which the trainer of the copy then does."""
    model = net()
    (model if whole else model[2]).compile(backend="eager")  # type: ignore[index, operator]
    twin, _ = copies_of(model, torch.optim.SGD(model.parameters(), lr=0.1), compiled=compiled)
    are_compiled = [[part._compiled_call_impl is not None for part in module.modules()] for module in (model, twin)]
    assert are_compiled == [[whole, False, False, not whole], [whole and not compiled, False, False, not whole]]


def test_states_of_weights_take_the_layout_of_the_weights() -> None:
    """Those of 4 dimensions; all values stay."""
    model = ConvNet()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 2, 4, 4)).sum().backward()
    optimizer.step()
    before = bit_by_bit([model.state_dict(), optimizer.state_dict()])
    weight, state = model.conv.weight, optimizer.state[model.conv.weight]
    for channels_last in (True, False):
        set_memory_layout(model, {"only": optimizer}, channels_last=channels_last)
        tensors = [weight, state["exp_avg"], state["exp_avg_sq"]]
        assert [tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors] == [channels_last] * 3
        assert bit_by_bit([model.state_dict(), optimizer.state_dict()]) == before


# --- what is found ----------------------------------------------------------------------------------------------------------


def test_the_fastest_is_named_with_its_gain_and_its_line(clock: Clock) -> None:
    """By a clock for which a micro-batch takes 3 seconds and each of its samples 1: 4·(3+4) to 3+16."""
    trainer = make(costing(clock, lambda size: 3.0 + size))
    found = tuned(trainer, loader_of(), micro_batch=[2, 8, 16])

    assert (found.fastest.micro_batch, found.fastest.accumulation_steps) == (16, 1)
    assert found.gain == pytest.approx(28 / 19)
    assert found.line == "DataLoader(..., batch_size=16); create_trainer(..., accumulation_steps=1)"
    assert [row.settings.micro_batch for row in found.rows] == [4, 8, 16, 16]
    assert found.rows[0].samples_per_second == pytest.approx(16 / 28)
    assert [row.ratio for row in found.rows] == pytest.approx([1, 28 / 22, 28 / 19, 28 / 19])
    text = str(found)
    assert "micro-batch 16 x 1: 1.47 times as fast as your settings (quartiles 1.47 to 1.47)" in text
    assert "micro-batch 8 x 2" in text
    assert trainer._grouping._steps == 4  # nothing was switched


@pytest.mark.slow
def test_smaller_ones_are_tried_where_larger_ones_are_slower(clock: Clock) -> None:
    """A cost that grows with the square: the larger neighbour ends its direction, the smallest wins."""
    found = tuned(make(costing(clock, lambda size: size**2)), loader_of(), micro_batch=[1, 2, 8, 16])

    assert [row.settings.micro_batch for row in found.rows] == [4, 8, 2, 1, 1]
    assert found.gain == pytest.approx(4.0)


def test_what_is_tried_by_default(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that divide the 12 samples of an update and lie half as much apart, larger ones first; and each other value."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2}, raising=False)
    model = ConvNet().double()
    trainer = create_trainer(model, torch.optim.AdamW(model.parameters()), costing(clock, float), accumulation_steps=3)
    found = tune(trainer, DataLoader(IMAGES, batch_size=4), seconds=1e6, values={"workers": [], "compile": []})  # type: ignore[arg-type]

    present, *others = [row.settings for row in found.rows]
    assert [(s.micro_batch, s.accumulation_steps) for s in others if s.micro_batch != 4] == [(6, 2), (12, 1), (2, 6), (1, 12)]
    assert [s.threads for s in others if s.threads != present.threads] == [2, 3]
    assert [(s.fused, s.channels_last) for s in others if s.micro_batch == 4 and s.threads == present.threads] == [
        (True, False),
        (None, True),
    ]
    assert found.left_alone == {"workers": "left out by values", "compile": "left out by values"}


@pytest.mark.parametrize(("name", "number"), [("workers", 3), slow("compile", 1)], ids=["workers", "compile"])
def test_other_values_are_tried_by_default(name: str, number: int, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 worker process or as many as processors, or compiled; the time is too short for any, so that they are counted."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2}, raising=False)
    values = {other: values for other, values in NOTHING.items() if other != name}
    found = tune(make(costing(clock, float)), loader_of(), seconds=1.0, values=values)
    assert found.num_unmeasured == number
    assert found.left_alone.keys() == values.keys()


@pytest.mark.parametrize(("fused", "other"), [(None, True), (False, True), (True, False)], ids=["default", "off", "on"])
def test_an_optimizer_that_is_fused_is_tried_without(fused: bool | None, other: bool, clock: Clock) -> None:
    """And one that is not is tried with it."""
    model = net()
    trainer = create_trainer(model, torch.optim.AdamW(model.parameters(), fused=fused), costing(clock, float))
    found = tune(trainer, loader_of(), seconds=1e6, values={name: [] for name in NAMES if name != "fused"})
    assert [row.settings.fused for row in found.rows] == [fused, other]


@pytest.mark.parametrize(
    ("processors", "threads"),
    [(1, (1, 3)), (4, (1, 2, 3, 4)), (6, (1, 2, 3, 4, 6)), (None, (1, 3))],
    ids=["1", "4", "6", "unknown"],
)
def test_threads_are_tried_up_to_the_processors(
    processors: int | None, threads: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system does not say which of them this process may use, all count, or one. The present number is among them."""
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: processors)
    found, _ = dimensions(replace(PRESENT, threads=3), net(), [], {}, {})
    assert {dimension.name: dimension.values for dimension in found}["threads"] == threads


def test_what_has_one_value_is_left_alone_and_said(clock: Clock) -> None:
    """A model without weights of 4 dimensions, an optimizer that knows no `fused`, and a single sample to an update."""
    model = net()
    trainer = create_trainer(model, torch.optim.RMSprop(model.parameters()), costing(clock, float))
    found = tune(trainer, loader_of(1), seconds=1e6, values={"threads": [], "workers": [], "compile": []})
    assert found.left_alone == {
        "micro_batch": "the samples of an update cannot be divided otherwise",
        "fused": "the optimizer has no argument of this name",
        "channels_last": "no weight has 4 dimensions",
        **dict.fromkeys(("threads", "workers", "compile"), "left out by values"),
    }


class Stepping(torch.optim.AdamW):
    """Its step takes 9 seconds, or one if it is fused."""

    clock: Clock

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.clock.now += 1.0 if self.param_groups[0]["fused"] else 9.0
        super().step(closure)


def first_layout(model: nn.Module) -> bool:
    return next(model.parameters()).is_contiguous(memory_format=torch.channels_last)


LINES: dict[str, tuple[str, Callable[[nn.Module], bool], list[Any], str]] = {
    "threads": ("threads", lambda model: torch.get_num_threads() == 2, [2], "torch.set_num_threads(2)"),
    "fused": ("fused", lambda model: True, [True], "Stepping(..., fused=True)"),
    "layout": ("channels_last", first_layout, [True], "model.to(memory_format=torch.channels_last)"),
    "layout back": (
        "channels_last",
        lambda model: not first_layout(model),
        [False],
        "model.to(memory_format=torch.contiguous_format)",
    ),
    "compile": (
        "compile",
        lambda model: model._compiled_call_impl is not None,
        [{"backend": "eager"}],
        "create_trainer(..., compile={'backend': 'eager'})",
    ),
}


@pytest.mark.parametrize("case", only(["threads", "fused", "layout", "layout back"], LINES))
def test_the_line_says_how_to_have_each_setting(case: str, clock: Clock) -> None:
    """Of several optimizers it names one that knows the argument."""
    name, is_fast, values, line = LINES[case]
    model = ConvNet().double()
    if case == "layout back":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizers = [torch.optim.RMSprop(model.conv.parameters()), Stepping(model.head.parameters())]

    def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
        clock.now += 1.0 if is_fast(model) else 9.0
        return summed(model, x)

    Stepping.clock = clock
    trainer = create_trainer(model, optimizers, forward)
    found = tuned(trainer, DataLoader(IMAGES, batch_size=4), **{name: values})  # type: ignore[arg-type]
    assert found.line == line
    assert [getattr(row.settings, name) for row in found.rows[1:]] == values * 2


STEPS: dict[str, tuple[Any, list[int], str]] = {
    "by epoch": ([2, 3, 1], [2, 2, 3, 3], "accumulation_steps differ from epoch to epoch"),
    "function": (lambda update: 1 + update % 4, [2, 3, 4, 1], "accumulation_steps are a function"),
}


@pytest.mark.parametrize("case", STEPS)
def test_accumulation_steps_that_change_are_those_of_the_next_update(case: str, clock: Clock) -> None:
    """Measured, and not varied, for which the reason is given."""
    steps, expected, reason = STEPS[case]
    trainer, loader = make(costing(clock, float), accumulation_steps=steps), loader_of(12)  # 4 micro-batches to an epoch
    found = []
    for updates in range(4):
        if updates:
            trainer.run(loader, max_iters=updates)
        found.append(tuned(trainer, loader, threads=[1]))
    assert [one.present.accumulation_steps for one in found] == expected
    assert {one.left_alone["micro_batch"] for one in found} == {reason}


class Held(torch.optim.AdamW):
    """Something keeps each object that has made a step."""

    all: list[torch.optim.Optimizer]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.all.append(self)
        super().step(closure)


def test_memory_of_copies_is_given_back(clock: Clock) -> None:
    """Whatever still refers to them."""
    models, Held.all = list[nn.Module](), []

    def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
        clock.now += 1.0
        models.append(model)
        return summed(model, x)

    model = net(noisy=True)
    trainer = create_trainer(model, Held(model.parameters(), lr=0.01), forward, accumulation_steps=4)
    tuned(trainer, loader_of(), micro_batch=[8])

    assert len({id(model) for model in models}) == len({id(optimizer) for optimizer in Held.all}) >= 3
    tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    assert {tensor.numel() for tensor in tensors} == {0}
    assert all(tensor.grad is None for tensor in tensors)
    assert not any(optimizer.state for optimizer in Held.all)


@pytest.mark.slow
def test_nothing_is_named_where_all_are_equal(clock: Clock) -> None:
    found = tune(make(costing(clock, lambda size: size)), loader_of(), seconds=1e6, values={"compile": [], "workers": []})

    assert found.fastest == found.present
    assert (found.gain, found.gain_quartiles, found.line) == (1.0, (1.0, 1.0), "")
    assert str(found).endswith("nothing was faster than your settings by more than the noise")
    assert len(found.rows) >= 4


def test_a_candidate_that_fails_is_a_row(clock: Clock) -> None:
    """Too little memory from 16 samples on: the others are measured all the same."""

    def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
        clock.now += 3.0 + len(x)
        if len(x) >= 16:
            raise torch.OutOfMemoryError("too large\nfor this device")
        return summed(model, x)

    found = tuned(make(forward), loader_of(), micro_batch=[8, 16], fused=[True])

    assert found.fastest.micro_batch == 8
    (failed,) = [row for row in found.rows if row.samples_per_second is None]
    assert failed[1:] == (None, 0.0, 0.0, None, "failed: OutOfMemoryError: too large for this device")
    assert failed.settings.micro_batch == 16
    assert "failed: OutOfMemoryError" in str(found)
    assert found.rows[-2].settings.fused is True


def test_a_window_of_a_very_slow_candidate_ends_early(clock: Clock) -> None:
    """Windows of 26 updates of 0.04 seconds; one with updates of 1 second has 5 in each of three, and its rate is right."""
    calls: list[int] = []

    def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
        calls.append(len(x))
        clock.now += 0.01 if len(x) == 4 else 0.5
        return summed(model, x)

    found = tuned(make(forward), loader_of(), micro_batch=[8])

    assert calls.count(4) % (26 * 4) == 3 * 2 * 4  # but for two of the calibration
    assert calls.count(8) == 3 * 5 * 2
    assert found.rows[1].samples_per_second == pytest.approx(16 / 1.0)
    assert found.rows[1].outcome == "slower"


def test_the_time_is_kept(clock: Clock) -> None:
    """The fifth part of it is left for the last race; what was not measured is counted."""
    trainer = make(costing(clock, lambda size: 1.0))
    found = tune(trainer, loader_of(), seconds=50.0, values={**NOTHING, "micro_batch": [2, 1, 8]})

    assert found.num_unmeasured == 3
    assert "3 candidates; pass more seconds" in str(found)


# --- noise wins nothing -----------------------------------------------------------------------------------------------------

PRESENT = Settings(micro_batch=4, accumulation_steps=4, fused=None, channels_last=False, threads=2, workers=0, compile=False)


class Scripted:
    """Settings whose windows take what is written down."""

    peak_memory = None
    samples = 16

    def __init__(self, settings: Settings, seconds: Iterator[float], log: list[Any]) -> None:
        self.settings, self._seconds, self._log = settings, seconds, log
        log.append(("made", settings.threads))

    def seconds(self) -> float:
        found = next(self._seconds)
        if found < 0:
            raise TrialError("broken")
        return found

    def close(self) -> None:
        self._log.append(("closed", self.settings.threads))


def searched(script: dict[int, list[float]]) -> tuple[Search, list[Any]]:
    """A search over threads, for each number of which the windows take these seconds, again and again."""
    log: list[Any] = []
    endless = {threads: cycle(seconds) for threads, seconds in script.items()}
    search = Search(lambda settings: Scripted(settings, endless[settings.threads], log), PRESENT, lambda: False)
    search([Dimension("threads", tuple(sorted(script)), is_ordered=False)])
    return search, log


def test_noise_is_no_winner() -> None:
    """Times that differ by a third at random, the same for all: many candidates, none of them faster."""
    draw = random.Random(2)  # noqa: S311
    noisy = {threads: [1.0 + draw.random() / 3 for _ in range(101)] for threads in range(1, 20)}
    search, log = searched(noisy)

    assert len(search.rows) >= 19
    assert max(accumulate(1 if what == "made" else -1 for what, _ in log)) == 2  # in memory together
    assert search.fastest == PRESENT


def test_a_gain_beyond_the_noise_is_a_winner() -> None:
    draw = random.Random(2)  # noqa: S311
    search, _ = searched({n: [(0.5 if n == 7 else 1.0) + draw.random() / 10 for _ in range(101)] for n in range(1, 9)})

    assert search.fastest.threads == 7
    assert search.last_race is not None
    assert 1.7 < search.last_race.ratio < 2.1


def test_a_lucky_winner_is_not_named() -> None:
    """It is faster in its race and not in the last one: the present settings stay."""
    search, log = searched({2: [1.0], 4: [0.5] * 7 + [1.0] * 9})

    assert search.fastest == PRESENT
    assert [row.outcome for row in search.rows] == ["", "faster", "once more, beside the present settings: no difference"]
    assert log.count(("made", 2)) == log.count(("closed", 2)) == 2
    assert log.count(("made", 4)) == log.count(("closed", 4)) == 1


def test_one_that_breaks_in_the_last_race_is_not_named() -> None:
    search, log = searched({2: [1.0], 4: [0.5] * 7 + [-1.0]})

    assert search.fastest == PRESENT
    assert search.rows[-1][1:] == (None, 0.0, 0.0, None, "not measured once more: broken")
    assert len([entry for entry in log if entry[0] == "made"]) == len([entry for entry in log if entry[0] == "closed"])


def test_a_drift_of_the_machine_is_in_both_times_of_a_round() -> None:
    """A machine that becomes slower and slower: one that is 10 % faster in each round wins."""
    times = iter(range(1, 1000))
    found = race(lambda: 1.1 * next(times), lambda: next(times) * 1.0, rounds=9)

    assert found.outcome == "no difference"  # a drift as large as that is noise
    slow = [10.0 + n // 2 for n in range(100)]
    before, after = iter(slow), iter(slow)
    found = race(lambda: 1.1 * next(before), lambda: next(after), rounds=9)
    assert found.outcome == "faster"
    assert found.ratio == pytest.approx(1.1)


def test_the_order_of_a_round_alternates_and_a_slower_one_ends_early() -> None:
    order: list[str] = []

    def noting(name: str, seconds: float) -> Callable[[], float]:
        return lambda: order.append(name) or seconds  # type: ignore[func-returns-value]

    found = race(noting("a", 1.0), noting("b", 1.5), rounds=7)

    assert order == ["a", "b", "b", "a", "a", "b"]
    assert found.outcome == "slower"


def test_a_gain_of_less_than_two_percent_is_none_worth_a_change() -> None:
    assert race(lambda: 1.015, lambda: 1.0, rounds=7).outcome == "no difference"
    assert race(lambda: 1.03, lambda: 1.0, rounds=7).outcome == "faster"
    assert race(lambda: 1.0, lambda: 1.0, rounds=7).outcome == "no difference"


@pytest.mark.parametrize(("after", "rounds"), [(2.5, 2), (1.9, 4)], ids=["less than half as fast", "slower"])
def test_one_that_cannot_win_is_not_measured_on(after: float, rounds: int) -> None:
    """Three of nine may be lost; one that is less than half as fast is out after two."""
    found = race(lambda: 1.0, lambda: after, rounds=9)
    assert (len(found.before), len(found.after), found.outcome) == (rounds, rounds, "slower")


def test_the_table_shows_rates_spreads_and_memory() -> None:
    """As in its documentation; what could not be measured has dashes."""
    rows = [
        Measured(PRESENT, 28.5714, 0.1, 1.0, None, ""),
        Measured(replace(PRESENT, threads=4), 2843.4, 0.256, 1.5, 3 * 2**30, "faster"),
        Measured(replace(PRESENT, workers=1), None, 0.0, 0.0, None, "failed: OSError"),
    ]
    found = Tuned(
        present=PRESENT,
        fastest=PRESENT,
        gain=1.0,
        gain_quartiles=(1.0, 1.0),
        line="",
        rows=tuple(rows),
        warnings=(),
        left_alone={},
        num_unmeasured=0,
    )
    head, *lines, _ = str(found).splitlines()
    assert head.split() == ["settings", "samples/s", "spread", "ratio", "peak", "memory"]
    assert [" ".join(line.split()) for line in lines] == [
        "present: micro-batch 4 x 4, fused=None, channels_last=False, threads=2, workers=0, compile=False 28.6 10% 1.00 -",
        "threads=4 2,843 26% 1.50 3,072 MiB faster",
        "workers=1 - - - - failed: OSError",
    ]
    assert len({line.index(end) + len(end) for line, end in zip(lines, ("1.00", "1.50"), strict=False)}) == 1  # aligned


# --- where the cut matters --------------------------------------------------------------------------------------------------


def test_what_depends_on_the_cut_is_named(clock: Clock) -> None:
    def bare(model: nn.Module, x: Tensor) -> Tensor:
        clock.now += 1.0
        return model(x).square().mean()  # type: ignore[no-any-return]

    found = tuned(make(bare, noisy=True), loader_of(), micro_batch=[8])

    assert [warning.partition(":")[0] for warning in found.warnings[:2]] == ["'1'", "'2'"]
    assert "BatchNorm" in found.warnings[0]
    assert "dropout" in found.warnings[1]
    assert "bare loss" in found.warnings[2]
    assert "warning: '1': BatchNorm" in str(found)


@pytest.mark.slow
def test_a_contrastive_loss_is_noticed_by_what_it_computes(clock: Clock) -> None:
    def contrastive(model: nn.Module, x: Tensor) -> ForwardOutput:
        clock.now += 1.0
        similar = model(x) @ model(x).T
        return ForwardOutput(-similar.log_softmax(1).diag().sum(), sample_size=len(x))

    found = tuned(make(contrastive), loader_of(), micro_batch=[8])
    plain = tuned(make(costing(clock, lambda size: 1.0)), loader_of(), micro_batch=[8])

    assert "as contrastive losses" in found.warnings[0]
    assert found.warnings[0].startswith("micro-batch 8 x 2: the loss of the same update is ")
    assert plain.warnings == ()


@pytest.mark.parametrize(("after", "is_named"), [(0.0101, True), (0.01, False), (0.0099, True)])
@pytest.mark.parametrize("what", ["loss", "gradient norm"])
def test_a_difference_is_relative_where_numbers_are_small(what: str, after: float, is_named: bool) -> None:
    """A difference of a hundredth is more than rounding, however small the loss and the norm are."""
    present = Settings(
        micro_batch=8, accumulation_steps=2, fused=None, channels_last=False, threads=1, workers=None, compile=False
    )
    before, other = (
        SimpleNamespace(settings=settings, first_loss=0.01, first_norm=0.01)
        for settings in (present, replace(present, micro_batch=4, accumulation_steps=4))
    )
    setattr(other, {"loss": "first_loss", "gradient norm": "first_norm"}[what], after)
    found = difference_warnings(nn.Linear(1, 1), before, [None, other], "fp32")  # type: ignore[arg-type, list-item]
    assert [f"the {what} of the same update is {after:.4g} in place of 0.01" in line for line in found] == [True] * is_named


class Recurrent(nn.Module):
    """Has modules whose dropout is an argument, and more of them than a line shows."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 4, num_layers=2, dropout=probability, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, dropout=probability, batch_first=True)
        self.head = nn.Sequential(*(nn.Dropout(probability) for _ in range(2)), *(nn.BatchNorm1d(4) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.rnn(x[:, None])
        return self.head(self.attention(hidden, hidden, hidden)[0][:, 0])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("probability", "dropping"),
    [(0.2, ["'rnn', 'attention', 'head.0' and 1 more: dropout draws"]), (0.0, [])],
    ids=["dropping", "keeping"],
)
def test_modules_that_depend_on_the_cut_are_listed(probability: float, dropping: list[str], clock: Clock) -> None:
    """Three of them by name. Dropout that drops nothing draws nothing."""
    model = Recurrent(probability).double()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), costing(clock, float), accumulation_steps=4)
    found = tuned(trainer, loader_of(), micro_batch=[8])

    expected = ["'head.2', 'head.3', 'head.4': BatchNorm takes", *dropping]
    assert all(warning.startswith(start) for warning, start in zip(found.warnings, expected, strict=False))
    assert len(found.warnings) >= len(expected)


@pytest.mark.parametrize(
    ("precision", "below", "above"), [("fp32", 5e-4, 2e-3), ("bf16", 0.01, 0.1)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("what", ["loss", "gradient norm"])
def test_a_difference_beyond_rounding_is_noticed(what: str, precision: Any, below: float, above: float, clock: Clock) -> None:
    """By the rounding of the precision: of another cut the loss, or its gradient alone, is a bit larger."""
    warnings = []
    for excess in (below, above):

        def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
            clock.now += 1.0
            output = summed(model, x)
            more = output.loss * (0.0 if len(x) == 4 else excess)  # noqa: B023
            loss = output.loss + (more if what == "loss" else more - more.detach())
            return ForwardOutput(loss, sample_size=len(x))

        warnings.append(tuned(make(forward, precision=precision), loader_of(), micro_batch=[8]).warnings)
    assert warnings[0] == ()
    (warning,) = warnings[1]
    assert warning.startswith(f"micro-batch 8 x 2: the {what} of the same update is ")


# --- loaders ----------------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Tensor]):
    """Has no order of indices."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(X)


FIXED: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "batch sampler": (lambda: DataLoader(X, batch_sampler=BatchSampler(SequentialSampler(X), 4, False)), {"micro_batch"}),  # type: ignore[arg-type]
    "stream": (lambda: DataLoader(Stream(), batch_size=4), {"micro_batch", "workers"}),
    "list": (lambda: list(X.split(4)), {"micro_batch", "workers"}),
    "thread": (lambda: ResumableLoader(X, 4, shuffle=True, fetch_in_thread=True), {"workers"}),
}


@pytest.mark.parametrize("kind", only(["batch sampler", "thread"], FIXED))
def test_what_a_loader_does_not_allow_is_left_alone_and_said(kind: str, clock: Clock) -> None:
    """The reason is the loader's; what is left can be tuned."""
    build, fixed = FIXED[kind]
    found = tuned(make(costing(clock, lambda size: 1.0)), build(), micro_batch=[8], workers=[0], fused=[True])

    reasons = {name: reason for name, reason in found.left_alone.items() if "values" not in reason}
    assert reasons.keys() & {"micro_batch", "workers"} == fixed
    assert any(row.settings.fused for row in found.rows)
    assert found.rows[0].samples_per_second == pytest.approx(1.0 if "micro_batch" in fixed else 4.0)
    assert ("micro-batches/s" if "micro_batch" in fixed else "samples/s") in str(found).splitlines()[0]
    assert all(f"not varied: {name}: {reasons[name]}" in str(found) for name in fixed)


class Noting(Dataset[Tensor]):
    """Knows the processes that have loaded its samples."""

    def __init__(self) -> None:
        self.processes = set[int]()

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Tensor:
        self.processes.add(os.getpid())
        return X[index]


def test_samples_are_loaded_while_they_are_measured(clock: Clock) -> None:
    """In this process, where the program has no workers; in their order, as often as there are too few of them."""
    dataset = Noting()
    loader = DataLoader(dataset, batch_size=8)
    samples = FixedSamples(loader, 2, 4)
    assert dataset.processes == set()
    micro_batches = list(samples.loader(replace(PRESENT, micro_batch=4)))
    assert torch.equal(torch.cat(micro_batches), torch.cat([X, X])[: 2 * 4 * 8])
    assert dataset.processes == {os.getpid()}


def test_what_is_fetched_beforehand_is_repeated() -> None:
    """At most 64 updates are held in memory."""
    loader = Unbounded()
    found = FixedSamples(loader, 2, 100).loader(PRESENT)
    assert [int(x) for x in found] == [*range(128), *range(72)]


class Unbounded:
    """Numbers its micro-batches."""

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor(number) for number in count())


class Reader:
    """Remembers how many micro-batches it has given, and reads on from there; the one at `broken` cannot be read."""

    def __init__(self, broken: int | None = None) -> None:
        self.given, self.read, self._broken = 1, 0, broken

    def __iter__(self) -> Iterator[Tensor]:
        while self.given != self._broken:
            self.given += 1
            self.read += 1
            yield X[:4]
        raise OSError("broken")

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.given = state_dict["given"]


@pytest.mark.parametrize("broken", [None, 5], ids=["whole", "raises"])
def test_a_loader_with_a_place_of_its_own_is_put_back(broken: int | None) -> None:
    """Also if it raises an error while its first micro-batches are fetched."""
    reader = Reader(broken)
    with pytest.raises(OSError, match="broken") if broken else nullcontext():
        FixedSamples(reader, 4, 3)

    assert (reader.given, reader.read) == (1, 4 if broken else 12)


@pytest.mark.slow
def test_a_whole_update_is_measured_as_a_graph(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """All updates of a candidate with compile="update" but its first one, which is looked at, are graphs."""
    steps: list[int] = []
    ordinary = UpdateGraphs.end

    def tick(clock: Clock) -> float:
        clock.now += 1.0
        return clock.now

    def noting(graphs: UpdateGraphs, *arguments: Any) -> Tensor:
        steps.append(1)
        return ordinary(graphs, *arguments)

    monkeypatch.setattr(UpdateGraphs, "end", noting)
    monkeypatch.setattr(Clock, "__call__", tick)
    found = tuned(make(summed), loader_of(), compile=[{"update": True, "backend": "eager"}])  # type: ignore[arg-type]

    assert len(found.rows) == 2
    assert len(steps) > 2


@pytest.mark.slow
def test_workers_are_ended(clock: Clock) -> None:
    """Candidates with worker processes, whose windows all read the same: no process is left over."""
    found = tuned(make(costing(clock, lambda size: 1.0)), loader_of(), workers=[0, 1])

    assert [row.settings.workers for row in found.rows] == [0, 1]
    assert found.rows[1].outcome == "no difference"
    for worker in multiprocessing.active_children():
        worker.join(DEADLINE_SECONDS)  # torch waits five seconds and then asks it to end
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_a_model_that_the_user_has_compiled_is_measured_so(clock: Clock) -> None:
    compiled: list[bool] = []

    def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
        compiled.append(model._compiled_call_impl is not None)
        return costing(clock, lambda size: 1.0)(model, x)

    model = ConvNet().double()
    model.compile(backend="eager")
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward)
    tuned(trainer, DataLoader(IMAGES, batch_size=4), threads=[1])
    assert compiled
    assert all(compiled)


@pytest.mark.slow
def test_compiling_is_tried_and_leaves_the_model_as_it_was(clock: Clock) -> None:
    """And no graph stays in memory."""
    model = ConvNet().double()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), costing(clock, lambda size: 1.0))
    found = tuned(trainer, DataLoader(IMAGES, batch_size=4), compile=[{"backend": "eager"}])  # type: ignore[arg-type]

    assert [row.settings.compile for row in found.rows] == [False, {"backend": "eager"}]
    assert found.rows[1].outcome == "no difference"
    assert model._compiled_call_impl is None
    assert _debug_get_cache_entry_list(ConvNet.forward) == []


@pytest.mark.slow
def test_a_supervised_trainer_is_tuned_as_well(clock: Clock) -> None:
    """With Ignite's name for the micro-batches to an update in the line."""

    def loss_fn(y_pred: Tensor, y: Tensor) -> Tensor:
        clock.now += 3.0 + len(y)
        return nn.functional.mse_loss(y_pred, y)

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs: list[Any] = []
    trainer = create_supervised_trainer(
        model, optimizer, loss_fn, gradient_accumulation_steps=2, output_transform=lambda *output: outputs.append(output)
    )
    found = tuned(trainer, DataLoader(TensorDataset(X, X[:, :1]), batch_size=4), micro_batch=[8])

    assert found.line == "DataLoader(..., batch_size=8); create_supervised_trainer(..., gradient_accumulation_steps=1)"
    assert outputs == []


# --- several ranks ----------------------------------------------------------------------------------------------------------


def tuned_on_ranks() -> tuple[Tuned, list[float], bool]:
    """Rank 1 is slower, and cannot take micro-batches of 16 samples."""
    with pytest.MonkeyPatch.context() as patch:
        clock = install_clock(patch.setattr)

        def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
            clock.now += (3.0 + len(x)) * (1 + idist.get_rank() + 2 * dist.get_rank())
            if dist.get_rank() == 1 and len(x) == 16:
                raise MemoryError
            return summed(model, x)

        model = net()
        wrapped = nn.parallel.DistributedDataParallel(model)
        trainer = create_trainer(wrapped, torch.optim.SGD(model.parameters(), lr=0.1), forward, accumulation_steps=4)
        found = tuned(trainer, loader_of(), micro_batch=[8, 16])
        return found, model[0].weight.flatten().tolist(), idist.get_world_size() == 2  # type: ignore[index, union-attr, operator]


@pytest.mark.slow
def test_all_ranks_find_the_same_and_the_slowest_counts() -> None:
    """A candidate that fails on one rank is out on both, and neither waits for the other."""
    (one, weights, _), (two, others, is_back) = run_ranks(tuned_on_ranks)

    assert is_back
    assert one == two
    assert weights == others == net()[0].weight.flatten().tolist()  # type: ignore[index]
    assert one.fastest.micro_batch == 8
    assert one.rows[0].samples_per_second == pytest.approx(16 / (28 * 3))
    assert one.rows[2].outcome == "failed: MemoryError (rank 1)"


def tuned_with_collectives() -> str:
    def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
        dist.all_reduce(torch.ones(()))
        return summed(model, x)

    model = net()
    wrapped = nn.parallel.DistributedDataParallel(model)
    trainer = create_trainer(wrapped, torch.optim.SGD(model.parameters(), lr=0.1), forward, accumulation_steps=4)
    with pytest.raises(RuntimeError) as raised:
        tune(trainer, loader_of(), seconds=1.0)
    return str(raised.value)


@pytest.mark.slow
def test_a_forward_with_collectives_is_refused() -> None:
    assert all(
        "tune needs a forward without collectives of its own" in message for message in run_ranks(tuned_with_collectives)
    )


# --- mistakes ---------------------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "trainer": ({"trainer": Engine(lambda engine, batch: None)}, TypeError, "trainer must be a Trainer"),
    "iterator": ({"loader": iter([X[:4]])}, TypeError, "loader must be one that can be read again"),
    "empty": ({"loader": []}, ValueError, "loader must give at least one micro-batch"),
    "seconds": ({"seconds": 0}, ValueError, "seconds must be greater than 0"),
    "name": ({"values": {"thread": [1]}}, ValueError, "did you mean 'threads'"),
    "no list": ({"values": {"threads": 2}}, TypeError, r"values\['threads'\] must be a list"),
    "no divisor": ({"values": {"micro_batch": [5]}}, ValueError, "must divide the 16 samples of an update, got 5"),
    "no mapping": ({"values": ["threads"]}, TypeError, "values must be a mapping"),
    "no bool": ({"values": {"fused": [1]}}, TypeError, "True and False"),
}


@pytest.mark.parametrize("what", WRONG)
def test_mistakes_are_answered_in_one_line(what: str) -> None:
    given, kind, message = WRONG[what]
    with pytest.raises(kind, match=message) as raised:
        tune(**{"trainer": make(summed), "loader": loader_of(), **given})
    assert "\n" not in str(raised.value)


def test_present_settings_that_fail_are_an_error() -> None:
    def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
        raise KeyError("label")

    with pytest.raises(RuntimeError, match="the present settings cannot be measured: KeyError: 'label'"):
        tune(make(forward), loader_of())


def test_it_is_refused_within_a_run() -> None:
    trainer, errors = make(summed), list[str]()

    @trainer.on("ITERATION_COMPLETED")
    def _(trainer: Trainer) -> None:
        with pytest.raises(RuntimeError, match="called inside a handler") as raised:
            tune(trainer, loader_of())
        errors.append(str(raised.value))

    trainer.run(loader_of(), max_iters=1)
    assert len(errors) == 1


PAGE = Path(__file__).parent.parent / "docs/tuning.md"


@pytest.mark.slow
@pytest.mark.skipif(not PAGE.is_file(), reason="looks at a checkout, which is not here")
def test_the_page_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Its block prints a table, and the line that the result has."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, str(PAGE), "exec"), names)  # noqa: S102
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].startswith("present: micro-batch 16 x 4")
    assert printed[-1] == names["found"].line
    assert names["trainer"].state.iteration == 0
