"""The journal: each thing that an update changes, at each of the five ways in which an update ends."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ignite_train import ForwardOutput, TorchLossScaling, Trainer, TrainEvents, TrainState, UpdateOptions, create_trainer
from ignite_train.handlers import Checkpoint
from ignite_train.model.step_watch import StepWatch
from ignite_train.update.journal import End, Ending, Journal, Part

# What is left of an update by each end: "kept" or "back", in the order of PARTS.
COUNTERS = ("num_micro_batches", "iteration", "num_steps", "num_skipped")
PARTS = ("parameters", "buffers", "carried", "random", *COUNTERS, "scale", "record", "output")
TABLE: dict[End, Sequence[int]] = {
    # The loss scale grows at each step, and falls by an overflow.
    End.STEPPED: (1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1),
    End.SKIPPED: (0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1),
    End.NO_SAMPLES: (0, 1, 1, 1, 1, 1, 0, 1, 0, 1, 1),
    End.BROKEN_BEFORE: (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    End.BROKEN_AFTER: (1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1),
}


class StopError(Exception):
    """Breaks an update off."""


def stop() -> None:
    raise StopError


def made(**arguments: Any) -> tuple[Trainer, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))

    def forward(model: nn.Module, batch: tuple[Tensor, float], state: TrainState) -> ForwardOutput:
        x, size = batch
        state.carried["count"] = state.carried.get("count", 0) + 1
        return ForwardOutput(model(x).square().sum() * float(size > 0), size)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return create_trainer(model, optimizer, forward, accumulation_steps=2, **arguments), model


def look(trainer: Trainer, model: nn.Module) -> list[Any]:
    state = trainer.state
    parameters, buffers = ([one.tolist() for one in of()] for of in (model.parameters, model.buffers))
    counters = [state.num_micro_batches, state.iteration, state.num_steps, state.num_skipped]
    records = state.update_output, state.output
    scale = trainer.process.state_dict()["loss_scaling"]["scale"]
    return [parameters, buffers, state.carried.get("count", 0), torch.get_rng_state().tolist(), *counters, scale, *records]


@pytest.mark.parametrize("saves", [False, True], ids=["alone", "with a checkpoint"])
@pytest.mark.parametrize("end", End)
def test_each_part_at_each_end(end: End, saves: bool, tmp_path: Path) -> None:
    """What the update has changed is kept or put back as the table says; nothing else of it is left, and no gradient."""
    trainer, model = made(loss_scaling=TorchLossScaling(8.0, growth_interval=1))
    # The random state is remembered for a search for values that are not finite, or where the run is saved.
    if saves:
        Checkpoint(tmp_path).attach(trainer)
    else:
        trainer.mark_everything()
    with trainer.session():
        check(trainer, model, end)


def check(trainer: Trainer, model: nn.Module, end: End) -> None:
    """Compares one update that ends so with the table."""
    batch = torch.randn(4, 3), 4.0
    trainer.update([batch, batch])
    before = look(trainer, model)
    x, size = batch
    if end is End.BROKEN_BEFORE:
        trainer.add_event_handler(TrainEvents.BACKWARD_COMPLETED, stop)
    elif end is End.BROKEN_AFTER:
        trainer.optimizers["optimizer"].register_step_post_hook(lambda *_: stop())  # type: ignore[attr-defined]
    elif end is End.SKIPPED:
        x = x * torch.inf
    elif end is End.NO_SAMPLES:
        size = 0.0
    if end in (End.BROKEN_BEFORE, End.BROKEN_AFTER):
        with pytest.raises(StopError):
            trainer.update([(x, size), batch])
    else:
        trainer.update([(x, size), (batch[0], size)])
    changed = [int(one != other) for one, other in zip(before, look(trainer, model), strict=True)]
    assert dict(zip(PARTS, changed, strict=True)) == dict(zip(PARTS, TABLE[end], strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (trainer.state.forward_output, trainer.state.micro_batch_in_group) == (None, None)
    assert trainer.process.gather.statistics.own_totals().sample_size == 0  # type: ignore[attr-defined]


class Noting:
    """Notes how it is ended, and may raise there."""

    def __init__(self, kept_at: frozenset[End], error: BaseException | None = None, *, may_repeat: bool = False) -> None:
        self.kept_at, self.error, self.ends = kept_at, error, list[Any]()
        self.ending, self.may_repeat = Ending(), may_repeat

    def part(self) -> Part:
        return Part(
            kept_at=self.kept_at,
            mark=lambda: self.ends.append("mark"),
            keep=lambda: self._end("keep"),
            put_back=lambda: self._end("put back"),
            may_repeat=self.may_repeat,
        )

    def _end(self, how: str) -> None:
        self.ends.append((how, self.ending.end, self.ending.applied))
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("closes", [True, False])
def test_a_part_that_raises_does_not_hold_the_others_up(closes: bool) -> None:
    """Each is ended once, in one way, whichever of them raises, and the first error is raised."""
    parts = [Noting(frozenset(End), KeyboardInterrupt()), Noting(frozenset()), Noting(frozenset(End), ValueError())]
    watch = StepWatch(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    journal = Journal(watch)
    for part in parts:
        part.ending = journal.ending
    journal.choose([part.part() for part in parts])

    def run() -> None:
        with journal as opened:
            if closes:
                opened.close(End.STEPPED, applied=True)
            stop()

    with pytest.raises(ValueError) as caught:  # noqa: PT011
        run()
    assert isinstance(caught.value.__context__, KeyboardInterrupt)
    ending = (End.STEPPED, True) if closes else (End.BROKEN_BEFORE, False)
    assert [part.ends for part in parts] == [["mark", (how, *ending)] for how in ("keep", "put back", "keep")]


def test_parts_that_may_be_ended_twice_are_ended_again() -> None:
    """Where Ctrl-C comes while the update is closed, the first of them may not have begun."""
    everywhere = frozenset(End)
    parts = [Noting(everywhere, may_repeat=True), Noting(everywhere, KeyboardInterrupt()), Noting(everywhere, may_repeat=True)]
    journal = Journal(StepWatch(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)))
    journal.choose([part.part() for part in parts])
    with pytest.raises(KeyboardInterrupt), journal as opened:
        opened.close(End.STEPPED, applied=True)
    assert [len(part.ends) for part in parts] == [3, 2, 3]


def test_an_update_that_has_moved_does_not_end_as_a_skip() -> None:
    """Host and device decide from the same numbers; if they ever differ, the run ends and does not count a skip."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    watch = StepWatch(optimizer)
    journal = Journal(watch)

    def run() -> None:
        with journal as opened:
            watch.enter(optimizer)
            opened.close(End.SKIPPED, applied=False)

    with pytest.raises(AssertionError):
        run()
    assert journal.ending.end is End.BROKEN_AFTER


@pytest.mark.parametrize("event", ["FORWARD_COMPLETED", "BACKWARD_COMPLETED", "GRADIENTS_REDUCED", "GRADIENTS_READY"])
def test_a_handler_that_comes_within_an_update_is_called_in_it(event: str) -> None:
    """What depends on the handlers is chosen when they come and go, also while an update runs."""
    trainer, _ = made()
    fired: list[int] = []

    def come() -> None:
        handle = trainer.add_event_handler(TrainEvents[event], lambda: fired.append(trainer.state.iteration))
        trainer.add_event_handler(TrainEvents.STEP_COMPLETED(once=2), handle.remove)

    trainer.add_event_handler(TrainEvents.MICRO_BATCH_STARTED(once=2), come)
    batch = torch.randn(4, 3), 4.0
    for _ in range(3):
        trainer.update([batch, batch])
    times = 2 if event in ("FORWARD_COMPLETED", "BACKWARD_COMPLETED") else 1
    assert fired == [1] + [2] * times


@pytest.mark.parametrize("update", [1, 3])
@pytest.mark.parametrize("layer", [nn.BatchNorm1d, nn.LayerNorm])
def test_a_trace_that_was_left_is_told_when_a_run_with_a_checkpoint_begins(
    layer: Any, update: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, and only if the update has moved buffers, and none of them were copied."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), layer(4), nn.Linear(4, 1))
    model.register_buffer("fixed", torch.ones(3))
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), lambda m, x: m(x).square().mean())
    handle = trainer.add_event_handler(TrainEvents.GRADIENTS_READY(once=update), stop)
    data = [torch.randn(4, 3) for _ in range(4)]
    with pytest.raises(StopError):
        trainer.run(data, max_epochs=1)
    handle.remove()
    Checkpoint(tmp_path, every=1).attach(trainer)
    with caplog.at_level(logging.WARNING, logger="ignite_train"):
        trainer.run(data, max_epochs=1)
    told = [record.message for record in caplog.records if "has moved buffers" in record.message]
    assert len(told) == (layer is nn.BatchNorm1d)


def test_a_run_that_goes_on_after_an_exception_is_bitwise_the_other(tmp_path: Path) -> None:
    """With a Checkpoint buffers and random numbers of the update that is repeated are those of one without the exception."""
    ends = []
    for number in (2, 0):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        options = UpdateOptions(on_nonfinite="raise")
        trainer = create_trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.05), lambda m, x: m(x).square().mean(), options=options
        )
        Checkpoint(tmp_path / str(number)).attach(trainer)
        handle = trainer.add_event_handler(TrainEvents.GRADIENTS_READY(once=2), stop)
        generator = torch.Generator().manual_seed(2)
        data = [torch.randn(4, 3, generator=generator) for _ in range(4)]
        if number:
            with pytest.raises(StopError):
                trainer.run(data, max_epochs=1)
        handle.remove()
        trainer.run(data, max_epochs=1)
        ends.append([{name: value.tolist() for name, value in model.state_dict().items()}, torch.rand(()).item()])
    assert ends[0] == ends[1]


def test_an_update_that_fails_as_it_begins_leaves_the_random_state_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was remembered then is that of the update before."""
    trainer, model = made()
    batch = torch.randn(4, 3), 4.0
    trainer.update([batch, batch])
    model.eval()
    monkeypatch.setattr(model, "train", stop)
    before = torch.get_rng_state()
    with pytest.raises(StopError):
        trainer.update([batch, batch])
    assert torch.equal(torch.get_rng_state(), before)
