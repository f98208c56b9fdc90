"""Updates on demand: the same as those of a run, in sessions that begin, end and resume as a run does."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

import cuts
from bits import bit_by_bit
from ignite_train import ForwardOutput, Trainer, TrainEvents, UpdateOptions, count_traffic, create_trainer
from ignite_train.handlers import (
    Checkpoint,
    FailureBoard,
    LearningRateSchedule,
    ProgressLog,
    StateMismatchError,
    StopOnSignal,
    TrainingMetrics,
)
from processes import DEADLINE_SECONDS, Processes, forked
from ranks import run_ranks
from setups import Batch, Setup

Build = Callable[..., Setup]
OF_RUNS = {"GET_BATCH_STARTED", "GET_BATCH_COMPLETED", "EPOCH_STARTED", "EPOCH_COMPLETED"}


def record_events(trainer: Trainer) -> list[str]:
    """The names of the events from here on."""
    fired: list[str] = []
    for event in (*Events, *TrainEvents):
        trainer.add_event_handler(event, lambda *_, name: fired.append(name), name=event.name)
    return fired


def records(trainer: Trainer) -> list[Any]:
    """The record of each update from here on, bit by bit."""
    kept: list[Any] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: kept.append(repr(trainer.state.update_output)))
    return kept


# --- one process ---


def test_it_is_the_update_of_a_run(build: Build, micro_batches: list[Batch]) -> None:
    """The same groups give the same bits, records, counters and events, but for those of epochs and of loaders."""
    in_run, on_demand = (build(accumulation_steps=2, max_grad_norm=0.5) for _ in range(2))
    events = [record_events(setup.trainer) for setup in (in_run, on_demand)]
    expected, kept = records(in_run.trainer), records(on_demand.trainer)

    in_run.trainer.run(micro_batches, max_epochs=1)
    with on_demand.trainer.session() as state:
        returned = [on_demand.trainer.update(group) for group in (micro_batches[:2], micro_batches[2:4], micro_batches[4:])]

    assert bit_by_bit(on_demand.model.state_dict()) == bit_by_bit(in_run.model.state_dict())
    assert bit_by_bit(on_demand.optimizer.state_dict()) == bit_by_bit(in_run.optimizer.state_dict())
    assert [repr(output) for output in returned] == kept == expected
    assert state is on_demand.trainer.state
    assert (state.iteration, state.num_steps, state.num_micro_batches, state.epoch) == (3, 3, 5, 0)
    assert events[1] == [name for name in events[0] if name not in OF_RUNS]


def test_run_and_session_follow_each_other(build: Build, micro_batches: list[Batch]) -> None:
    """Updates on demand between two calls of `run` are counted, and belong to no epoch."""
    mixed, plain = build(), build()
    mixed.trainer.run(micro_batches, max_epochs=1)
    with mixed.trainer.session():
        mixed.trainer.update(micro_batches[:1])
    state = mixed.trainer.run(micro_batches, max_epochs=2)
    plain.trainer.run([*micro_batches, micro_batches[0], *micro_batches], max_epochs=1)

    assert (state.iteration, state.epoch) == (11, 2)
    assert bit_by_bit(mixed.model.state_dict()) == bit_by_bit(plain.model.state_dict())


def test_no_micro_batch_at_all_is_a_skip(build: Build, micro_batches: list[Batch]) -> None:
    """An empty list moves nothing and is counted as a skip."""
    setup = build()
    before = bit_by_bit(setup.model.state_dict())
    with setup.trainer.session() as state:
        record = setup.trainer.update([])
    assert record.skipped_reason == "no_samples"
    assert (state.iteration, state.num_skipped) == (1, 1)
    assert bit_by_bit(setup.model.state_dict()) == before


@pytest.mark.parametrize("end", ["limit", "terminate", "interrupt", "exception"])
def test_a_session_ends_as_a_run_does(build: Build, micro_batches: list[Batch], end: str) -> None:
    """What is opened at its beginning is closed at its end, and the closing events are those of a run."""
    trainer = build().trainer
    fired, opened = record_events(trainer), []
    trainer.on_enter.append(lambda trainer: opened.append(True))
    trainer.on_exit.append(opened.clear)
    trainer.interrupt_resume_enabled = True

    def loop() -> None:
        with trainer.session():
            assert opened == [True]
            trainer.update(micro_batches[:1])
            if end == "exception":
                raise ZeroDivisionError
            if end != "limit":
                getattr(trainer, end)()
                assert trainer.should_terminate or trainer.should_interrupt

    if end == "exception":
        with pytest.raises(ZeroDivisionError):
            loop()
    else:
        loop()
    closing = {
        "limit": ["COMPLETED"],
        "terminate": ["TERMINATE", "COMPLETED"],
        "interrupt": ["INTERRUPT"],
        "exception": ["EXCEPTION_RAISED"],
    }
    assert fired[fired.index("ITERATION_COMPLETED") + 1 :] == closing[end]
    assert fired[0] == "STARTED"
    assert opened == []


def test_an_update_that_fails_is_taken_back(build: Build, micro_batches: list[Batch]) -> None:
    """A loop that catches the error continues as if the update had never been asked for."""
    failing, plain = build(), build()
    with failing.trainer.session() as state:
        failing.trainer.update(micro_batches[:1])
        with pytest.raises(ValueError, match="too many values"):
            failing.trainer.update([micro_batches[1], "no pair of tensors"])
        assert (state.iteration, state.num_micro_batches, state.batch) == (1, 1, None)
        failing.trainer.update(micro_batches[1:2])
    with plain.trainer.session():
        for micro_batch in micro_batches[:2]:
            plain.trainer.update([micro_batch])

    assert failing.contents() == plain.contents()


@pytest.mark.parametrize("event", ["STARTED", "ITERATION_STARTED", "STEP_COMPLETED", "COMPLETED"])
@pytest.mark.parametrize("way", ["run", "session"])
def test_it_is_refused_inside_its_own_run(build: Build, micro_batches: list[Batch], way: str, event: str) -> None:
    """A handler of the trainer itself cannot ask for an update."""
    trainer = build().trainer
    events = {**Events.__members__, **TrainEvents.__members__}
    trainer.add_event_handler(events[event], lambda: trainer.update(micro_batches[:1]))

    def session() -> None:
        with trainer.session():
            trainer.update(micro_batches[:1])

    begin = {"run": lambda: trainer.run(micro_batches), "session": session}[way]
    with pytest.raises(RuntimeError, match="update was called inside a handler of its own run or update"):
        begin()


def test_what_else_is_refused(build: Build, micro_batches: list[Batch], tmp_path: Path) -> None:
    """One line says what was wrong and what to do."""
    trainer = build().trainer
    with pytest.raises(TypeError, match=r"micro_batches must be a list, got .*; pass update\(\[micro_batch\]\)"):
        trainer.update(micro_batches[0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must not hold None"):
        trainer.update([None])
    with trainer.session():
        for nested in (lambda: trainer.run(micro_batches), lambda: trainer.session().__enter__()):
            with pytest.raises(RuntimeError, match="inside a session or an update of the same trainer"):
                nested()
        with pytest.raises(RuntimeError, match="has no epochs"):
            trainer.terminate_epoch()
        trainer.terminate()
        with pytest.raises(RuntimeError, match=r"leave the loop .* trainer\.should_terminate or trainer\.should_interrupt"):
            trainer.update(micro_batches[:1])
    with trainer.session(max_iters=1) as state:
        trainer.update(micro_batches[:1])
        assert state.max_iters == 1
        with pytest.raises(RuntimeError, match="after max_iters=1 updates; raise"):
            trainer.update(micro_batches[:1])
    Checkpoint(tmp_path).attach(trainer)
    with pytest.raises(RuntimeError, match="needs a session where a Checkpoint is attached"):
        trainer.update(micro_batches[:1])


def test_an_epoch_that_is_open_is_finished_first(build: Build, micro_batches: list[Batch]) -> None:
    """The data of an epoch that `run` has left belongs to `run`."""
    trainer = build().trainer
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), trainer.terminate)
    trainer.run(micro_batches, max_epochs=1)
    with pytest.raises(RuntimeError, match="in the middle of epoch 1, which run has left after update 2"):
        trainer.update(micro_batches[:1])
    with pytest.raises(RuntimeError, match="in the middle of epoch 1"), trainer.session():
        pass
    trainer.run(micro_batches, max_epochs=1)
    assert trainer.update(micro_batches[:1]).applied


def test_without_a_session_a_warning_says_what_is_missing(
    build: Build, micro_batches: list[Batch], caplog: pytest.LogCaptureFixture
) -> None:
    """Once, and only if something would begin with a run."""
    quiet, loud = build().trainer, build().trainer
    loud.add_event_handler(Events.STARTED, lambda: None)
    with caplog.at_level(logging.WARNING, logger="ignite_train"):
        for trainer in (quiet, quiet, loud, loud):
            assert trainer.update(micro_batches[:1]).applied
    assert [record.message.startswith("update was called without a session") for record in caplog.records] == [True]
    assert loud.state.iteration == 2


def test_ready_made_handlers_work_in_a_session(
    build: Build, micro_batches: list[Batch], capsys: pytest.CaptureFixture[str]
) -> None:
    """Metrics, schedules and the log see a session as they see a run."""
    setup = build()
    trainer, metrics = setup.trainer, TrainingMetrics()
    metrics.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    ProgressLog("simple").attach(trainer, Events.ITERATION_COMPLETED(every=2))
    LearningRateSchedule(torch.optim.lr_scheduler.StepLR(setup.optimizer, 1, 0.5)).attach(trainer)
    with trainer.session(max_iters=4) as state:
        losses = [trainer.update([micro_batch]) for micro_batch in micro_batches[:4]]
    total = sum(record.loss * record.sample_size for record in losses[2:]) / sum(record.sample_size for record in losses[2:])

    assert state.metrics["loss"] == pytest.approx(total, rel=1e-12)
    assert state.metrics["progress"] == 0.75
    assert [group["lr"] for group in setup.optimizer.param_groups] == [0.1 * 0.5**4]
    assert "finished" in capsys.readouterr().out


# --- a GAN: two trainers that take turns ---


class Gan:
    """Two networks, their optimizers, and real samples and noise for each round."""

    def __init__(self, rounds: int = 6) -> None:
        generator = torch.Generator().manual_seed(3)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.g = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
            self.d = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
        self.g_optimizer, self.d_optimizer = (torch.optim.Adam(n.parameters(), lr=0.01, betas=(0.5, 0.999)) for n in self.nets)
        self.real = torch.randn(rounds, 16, 3, generator=generator) * 0.5 + 1.0
        self.noise = torch.randn(rounds, 16, 4, generator=generator)

    @property
    def nets(self) -> tuple[nn.Module, nn.Module]:
        return self.g, self.d

    def d_forward(self, net: nn.Module, micro_batch: tuple[Tensor, Tensor]) -> ForwardOutput:
        real, fake = micro_batch
        return ForwardOutput(_judged(net(real), 1.0) + _judged(net(fake), 0.0), len(real))

    def g_forward(self, net: nn.Module, noise: Tensor) -> ForwardOutput:
        return ForwardOutput(_judged(self.d(net(noise)), 1.0), len(noise))

    def fake(self, noise: Tensor) -> Tensor:
        with torch.no_grad():
            return self.g(noise)  # type: ignore[no-any-return]

    def contents(self) -> Any:
        return bit_by_bit([part.state_dict() for part in (*self.nets, self.g_optimizer, self.d_optimizer)])


def _judged(logits: Tensor, label: float) -> Tensor:
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, label), reduction="sum")


def by_hand(gan: Gan) -> None:
    """The loop of a tutorial, with means over the samples."""
    for real, noise in zip(gan.real, gan.noise, strict=True):
        for optimizer, loss_of in (
            (gan.d_optimizer, lambda: gan.d_forward(gan.d, (real, gan.fake(noise))).loss / 16),  # noqa: B023
            (gan.g_optimizer, lambda: gan.g_forward(gan.g, noise).loss / 16),  # noqa: B023
        ):
            optimizer.zero_grad()
            loss_of().backward()
            optimizer.step()


def two_trainers(gan: Gan, **settings: Any) -> tuple[Trainer, Trainer]:
    """Those of the discriminator and of the generator, in this order."""
    wrap = DistributedDataParallel if idist.get_world_size() > 1 else nn.Sequential
    return (
        create_trainer(wrap(gan.d), gan.d_optimizer, gan.d_forward, **settings),
        create_trainer(wrap(gan.g), gan.g_optimizer, gan.g_forward, **settings),
    )


def test_a_gan_in_a_loop_of_ones_own_is_the_loop_by_hand() -> None:
    """Bit by bit, with a batch whose size is a power of two."""
    plain, ours = Gan(), Gan()
    by_hand(plain)
    d, g = two_trainers(ours)
    with d.session(), g.session():
        for real, noise in zip(ours.real, ours.noise, strict=True):
            d.update([(real, ours.fake(noise))])
            g.update([noise])
    assert ours.contents() == plain.contents()


def test_a_gan_from_a_handler_is_the_loop_by_hand() -> None:
    """The generator is updated in a handler of the discriminator's run."""
    plain, ours = Gan(), Gan()
    by_hand(plain)
    d, g = two_trainers(ours)
    latest: list[Tensor] = []

    @d.on(Events.ITERATION_STARTED)
    def make_fakes() -> None:
        nonlocal latest
        pairs, latest = d.state.batch, [noise for _, noise in d.state.batch]
        d.state.batch = [(real, ours.fake(noise)) for real, noise in pairs]

    @d.on(TrainEvents.STEP_COMPLETED)
    def update_generator() -> None:
        g.update(latest)

    with g.session():
        d.run(list(zip(ours.real, ours.noise, strict=True)))
    assert ours.contents() == plain.contents()
    assert (d.state.iteration, g.state.iteration, g.state.epoch) == (6, 6, 0)


class KilledError(Exception):
    """Ends a loop."""


def _gan_session(directory: Path, *, killed_after: int | None = None) -> tuple[Any, int]:
    """One process of a training that is saved every second round; random noise comes from torch's generator."""
    gan = Gan()
    d, g = two_trainers(gan)
    others = {"d_net": gan.d, "d_optimizer": gan.d_optimizer, "d_trainer": d}
    Checkpoint(directory, every=2, to_save=others).attach(g)
    with d.session(), g.session() as state:
        first = state.iteration
        for number in range(first, len(gan.real)):
            if number == killed_after:
                raise KilledError
            noise = torch.randn(16, 4)
            d.update([(gan.real[number], gan.fake(noise))])
            g.update([noise])
    return (gan.contents(), bit_by_bit([d.state_dict(), g.state_dict()])), first


@pytest.mark.slow
def test_sessions_that_share_a_checkpoint_resume_bitwise(tmp_path: Path) -> None:
    """Attached to the trainer that ends a round, one checkpoint holds both; the loop continues at its counter."""
    torch.manual_seed(7)
    expected, _ = _gan_session(tmp_path / "whole")
    torch.manual_seed(7)
    with pytest.raises(KilledError):
        _gan_session(tmp_path / "killed", killed_after=5)
    torch.manual_seed(99)
    resumed, first = _gan_session(tmp_path / "killed")

    assert first == 4
    assert resumed == expected


def _rounds(directory: Path, *, every: int | None = None, dies_after: int | None = None) -> tuple[list[Any], int]:
    """One process of a loop with rounds of three updates and a line of its own behind each; it may kill itself in one."""
    model = nn.Linear(2, 1)
    trainer = create_trainer(model, torch.optim.AdamW(model.parameters(), lr=0.1), lambda model, x: model(x).square().mean())
    holder = nn.ParameterList([nn.Parameter(torch.zeros(2), requires_grad=False)])
    loop = holder[0].data
    checkpoint = Checkpoint(directory, every=every, every_epochs=None if every else 99, to_save={"loop": holder})
    checkpoint.attach(trainer)
    with trainer.session() as state:
        while loop[0] < 4:
            x = torch.rand(6, 2)
            for part in range(3):
                if dies_after is not None and state.iteration == dies_after:
                    os.kill(os.getpid(), signal.SIGKILL)
                trainer.update([x[part::3]])
            loop += torch.tensor([1.0, model.weight.sum().item()])
            checkpoint.save()
            checkpoint.saver.wait()
    return bit_by_bit([dict(model.named_parameters()), loop]), state.iteration


def _seeded_rounds(directory: Path, **options: Any) -> tuple[list[Any], int]:
    torch.manual_seed(3)
    return _rounds(directory, **options)


@pytest.mark.slow
def test_rounds_resume_bitwise_from_their_ends(tmp_path: Path) -> None:
    """Killed in the middle of a round, a loop that saves at the end of each round ends with the bits of one that was not."""
    expected = _seeded_rounds(tmp_path / "whole")
    process = forked.Process(target=_seeded_rounds, args=(tmp_path / "killed",), kwargs={"dies_after": 8})
    with Processes([process], []):
        process.join(DEADLINE_SECONDS)
        assert process.exitcode == -signal.SIGKILL
    assert sorted(path.name for path in (tmp_path / "killed").glob("update-*")) == ["update-00000003", "update-00000006"]
    torch.manual_seed(99)

    assert _rounds(tmp_path / "killed") == expected
    assert expected[1] == 12


# --- ranks ---


def on_ranks(way: str, groups: list[list[list[int]]]) -> tuple[list[float], list[float], int]:
    """Weight and bias after the updates, the records, and the micro-batches of this rank; `groups[update][rank]` are sizes."""
    data, model, start = cuts.samples(), cuts.linear(), 0
    if way == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    wrapped = DistributedDataParallel(model) if way == "ddp" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=cuts.LEARNING_RATE)
    trainer = create_trainer(wrapped, optimizer, cuts.forward, options=UpdateOptions(reduction=way))  # type: ignore[arg-type]
    kept: list[float] = []
    with trainer.session() as state:
        for sizes in groups:
            rank = idist.get_rank()
            record = trainer.update(cuts.cut(data, sizes[rank], start + sum(map(sum, sizes[:rank]))))
            kept += [record.loss, record.sample_size, record.grad_norm]
            start += sum(map(sum, sizes))
    weight, bias = (p.full_tensor() if way == "fsdp" else p for p in model.parameters())  # type: ignore[attr-defined]
    return [*weight.flatten().tolist(), bias.item()], kept, state.num_micro_batches


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "explicit", "fsdp"])
def test_ranks_may_have_lists_of_different_lengths(way: str) -> None:
    """Three updates with ragged, empty and equal groups are weighted least squares over all samples, in float64."""
    groups = [[[2, 3], [1]], [[], [4, 2, 1]], [[3], [3]]]
    data, start, parts = cuts.samples(), 0, []
    for sizes in groups:
        count = sum(map(sum, sizes))
        parts.append(cuts.cut(data, [count], start)[0])
        start += count
    expected = cuts.reference(parts)
    outcomes = run_ranks(on_ranks, way, groups)

    assert [outcome[2] for outcome in outcomes] == [3, 5]
    for parameters, kept, _ in outcomes:
        assert parameters == pytest.approx([*expected["weight"].tolist(), expected["bias"]], rel=1e-12)
        by_hand = zip(expected["losses"], expected["sizes"], expected["norms"], strict=True)
        assert kept == pytest.approx([number for numbers in by_hand for number in numbers], rel=1e-12)


def count_both(way: str) -> dict[str, list[str]]:
    """The collectives of one update inside `run`, and of one on demand, of trainers that were made alike."""
    counted: dict[str, list[str]] = {}
    for where in ("run", "session"):
        model = cuts.linear(torch.float32)
        if way == "fsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        wrapped = DistributedDataParallel(model) if way in ("ddp", "auto") else model
        optimizer = torch.optim.SGD(model.parameters(), lr=cuts.LEARNING_RATE)
        options = UpdateOptions(reduction=way)  # type: ignore[arg-type]
        trainer = create_trainer(wrapped, optimizer, cuts.forward, accumulation_steps=2, options=options)
        FailureBoard().attach(trainer)
        micro_batches = cuts.shard([[2] * 8, [2] * 8])
        stack, names = ExitStack(), []
        trainer.add_event_handler(Events.ITERATION_STARTED(once=3), lambda: names.append(stack.enter_context(count_traffic())))  # noqa: B023
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), stack.close)
        if where == "run":
            trainer.run(micro_batches, max_iters=3)
        else:
            with trainer.session():
                for number in range(3):
                    trainer.update(micro_batches[2 * number : 2 * number + 2])
        counted[where] = [one.name for one in names[0].collectives]
        counted[where + " moved"] = [repr(p.full_tensor() if way == "fsdp" else p) for p in model.parameters()]  # type: ignore[attr-defined]
    return counted


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "auto", "explicit", "fsdp"])
def test_it_has_the_collectives_of_an_update_in_a_run(way: str) -> None:
    """The same operations in the same order, and the same parameters; lists for a sharded model are measured first."""
    for counted in run_ranks(count_both, way):
        measured = ["allreduce_"] if way == "fsdp" else []
        assert counted["session"] == [*measured, *counted["run"]] != []
        assert counted["session moved"] == counted["run moved"]


def test_a_signal_at_the_end_of_an_update_ends_its_session_after_it(build: Build, micro_batches: list[Batch]) -> None:
    """It does so in a run, and not after another update: `requests.stop` is what `StopOnSignal` sets."""
    trainer = build().trainer
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: setattr(trainer.requests, "stop", True))
    with trainer.session():
        trainer.update(micro_batches[:1])
        assert trainer.should_terminate


def stop_on_one_rank() -> tuple[int, list[str]]:
    """Rank 1 asks to stop in update 2."""
    model = DistributedDataParallel(cuts.linear())
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), cuts.forward)
    fired = record_events(trainer)
    if idist.get_rank() == 1:
        trainer.add_event_handler(TrainEvents.MICRO_BATCH_STARTED(once=2), trainer.terminate)
    with trainer.session() as state:
        for micro_batch in cuts.shard([[2] * 6, [2] * 6]):
            if trainer.should_terminate:
                break
            trainer.update([micro_batch])
    return state.iteration, fired[-2:]


@pytest.mark.slow
def test_a_stop_of_one_rank_ends_the_loops_of_all() -> None:
    """After the same update, with the closing events."""
    assert run_ranks(stop_on_one_rank) == [(2, ["TERMINATE", "COMPLETED"])] * 2


def stop_after_the_last_update(how: str) -> tuple[list[str], bool, int]:
    """Rank 1 asks for it once the loop is over; the script opens another session if it may."""
    model = cuts.linear()
    trainer = create_trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), cuts.forward, options=UpdateOptions(reduction="explicit")
    )
    trainer.interrupt_resume_enabled = True
    StopOnSignal().attach(trainer)
    fired = record_events(trainer)
    with trainer.session() as state:
        trainer.update([cuts.samples()])
        if idist.get_rank() == 1:
            signal.raise_signal(signal.SIGTERM) if how == "signal" else getattr(trainer, how)()
    closing, stops = fired[fired.index("ITERATION_COMPLETED") + 1 :], bool(trainer.should_terminate)
    with trainer.session():  # the request is answered
        trainer.update([cuts.samples()])
    return closing, stops, state.iteration


@pytest.mark.slow
def test_a_stop_after_the_last_update_ends_the_sessions_of_all() -> None:
    """With the closing events of a stop, on each rank; what comes next may be asked for by `should_terminate`."""
    for how in ("terminate", "signal"):
        assert run_ranks(stop_after_the_last_update, how) == [(["TERMINATE", "COMPLETED"], True, 2)] * 2
    assert run_ranks(stop_after_the_last_update, "interrupt") == [(["INTERRUPT"], False, 2)] * 2


def gan_on_ranks(rounds: int) -> list[float]:
    """All parameters after rounds in which this rank has its half of the samples."""
    gan = Gan(rounds)
    for net in gan.nets:
        net.double()
    d, g = two_trainers(gan)
    rank = idist.get_rank()
    mine = slice(0, 5) if rank == 0 else slice(5, 16)
    with d.session(), g.session():
        for real, noise in zip(gan.real.double(), gan.noise.double(), strict=True):
            d.update([(real[mine], gan.fake(noise[mine]))])
            g.update([noise[mine]])
    return [number for net in gan.nets for p in net.parameters() for number in p.flatten().tolist()]


@pytest.mark.slow
def test_a_gan_on_two_ranks_is_the_loop_by_hand() -> None:
    """In float64, with 5 samples on one rank and 11 on the other, the networks are those of the whole batch."""
    gan = Gan(4)
    for net in gan.nets:
        net.double()
    gan.real, gan.noise = gan.real.double(), gan.noise.double()
    by_hand(gan)
    expected = [number for net in gan.nets for p in net.parameters() for number in p.flatten().tolist()]
    for outcome in run_ranks(gan_on_ranks, 4):
        assert outcome == pytest.approx(expected, rel=1e-9, abs=1e-12)


def fail_on_one_rank() -> Iterator[None]:
    """Rank 0's loop fails between two updates."""
    model = DistributedDataParallel(cuts.linear())
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), cuts.forward)
    with trainer.session():
        for number, micro_batch in enumerate(cuts.shard([[2] * 6, [2] * 6])):
            trainer.update([micro_batch])
            if idist.get_rank() == 0 and number == 2:
                raise ValueError("the loop of rank 0 failed")
    raise AssertionError("no rank may come here")


@pytest.mark.slow
def test_an_error_in_the_loop_of_one_rank_ends_the_others() -> None:
    """The default FailureBoard is open in a session: no rank waits for the one that failed."""
    with pytest.raises(AssertionError) as raised:
        run_ranks(fail_on_one_rank)
    assert "ValueError: the loop of rank 0 failed" in str(raised.value)
    assert "was not done at the deadline" not in str(raised.value)
    assert "no rank may come here" not in str(raised.value)


# --- what several trainers share ---


def test_a_signal_stops_all_trainers_that_listen() -> None:
    """Not only the one whose session was opened last; each closes as a run that was stopped."""
    gan = Gan()
    d, g = two_trainers(gan)
    stops = [StopOnSignal(), StopOnSignal()]
    for stop, trainer in zip(stops, (d, g), strict=True):
        stop.attach(trainer)
    fired = [record_events(trainer) for trainer in (d, g)]
    before = signal.getsignal(signal.SIGTERM)
    with d.session(), g.session():
        for number, (real, noise) in enumerate(zip(gan.real, gan.noise, strict=True)):
            if d.should_terminate or g.should_terminate:
                break
            if number == 2:
                signal.raise_signal(signal.SIGTERM)
            d.update([(real, gan.fake(noise))])
            g.update([noise])
    assert [stop.received for stop in stops] == [signal.SIGTERM] * 2
    assert [trainer.state.iteration for trainer in (d, g)] == [3, 3]
    assert [events[-2:] for events in fired] == [["TERMINATE", "COMPLETED"]] * 2
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_stops_those_that_asked_for_it() -> None:
    """Of two trainers with a signal each, the one whose signal comes; the other one continues."""
    gan = Gan()
    d, g = two_trainers(gan)
    stops = {d: StopOnSignal([signal.SIGTERM]), g: StopOnSignal([signal.SIGUSR1])}
    for trainer, stop in stops.items():
        stop.attach(trainer)
    with d.session(), g.session():
        signal.raise_signal(signal.SIGUSR1)
        d.update([(gan.real[0], gan.fake(gan.noise[0]))])
        g.update([gan.noise[0]])
        assert (d.should_terminate, g.should_terminate) == (False, True)
    assert [stop.received for stop in stops.values()] == [None, signal.SIGUSR1]


def gan_that_is_stopped(directory: Path) -> tuple[list[int], bool, int]:
    """Rank 1 gets a signal while the generator is updated, in the second round; one checkpoint holds both trainers."""
    gan = Gan()
    d, g = two_trainers(gan)
    for trainer in (d, g):
        StopOnSignal().attach(trainer)
    others = {"d_net": gan.d, "d_optimizer": gan.d_optimizer, "d_trainer": d}
    Checkpoint(directory, every=100, to_save=others).attach(g)
    if idist.get_rank() == 1:
        g.add_event_handler(Events.ITERATION_STARTED(once=2), lambda: signal.raise_signal(signal.SIGTERM))
    with d.session(), g.session() as state:
        first = state.iteration
        for real, noise in zip(gan.real[first:], gan.noise[first:], strict=True):
            if d.should_terminate or g.should_terminate:
                break
            d.update([(real, gan.fake(noise))])
            g.update([noise])
    return [d.state.iteration, g.state.iteration], g.should_terminate, first


def stopped_and_resumed(directory: Path) -> list[Any]:
    return [gan_that_is_stopped(directory) for _ in range(2)]


@pytest.mark.slow
def test_a_stop_and_a_checkpoint_are_shared_over_ranks(tmp_path: Path) -> None:
    """All ranks leave the loop after the same round, and the next run continues there with both trainers."""
    first, second = ([2, 2], True, 0), ([6, 6], False, 2)
    assert run_ranks(stopped_and_resumed, tmp_path) == [[first, second]] * 2


def update_in_another_order() -> str:
    """Two trainers whose models differ, the second of which comes first on rank 1; what that is found to be."""
    trainers = []
    for factor in (1.0, 3.0):
        model = cuts.linear()
        nn.utils.vector_to_parameters(
            factor * nn.utils.parameters_to_vector(model.parameters()).detach() + 1, model.parameters()
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainers.append(create_trainer(model, optimizer, cuts.forward, options=UpdateOptions(reduction="explicit")))
    order = trainers if idist.get_rank() == 0 else trainers[::-1]

    def loop() -> None:
        with trainers[0].session(), trainers[1].session():
            for trainer in order * 3:
                trainer.update([cuts.samples()])

    with pytest.raises(StateMismatchError) as raised:
        loop()
    return str(raised.value)


@pytest.mark.slow
def test_the_message_asks_for_the_order_of_the_trainers() -> None:
    """Where ranks update two trainers in different orders, the gradients of one were added to those of the other."""
    for message in run_ranks(update_in_another_order):
        assert "outside of no_sync()? Do all ranks update several trainers in the same order? If so, look for code" in message
        assert "\n" not in message


def fail_in_the_second_trainer() -> None:
    """The generator's forward fails on rank 1, in the third round."""
    gan = Gan()
    d, g = two_trainers(gan)
    if idist.get_rank() == 1:
        g.add_event_handler(TrainEvents.MICRO_BATCH_STARTED(once=3), raise_error)
    with d.session(), g.session():
        for real, noise in zip(gan.real, gan.noise, strict=True):
            d.update([(real, gan.fake(noise))])
            g.update([noise])
    raise AssertionError("no rank may come here")


def raise_error() -> None:
    raise ValueError("the generator of rank 1 failed")


@pytest.mark.slow
def test_a_failure_in_one_trainer_ends_the_sessions_of_all() -> None:
    """Each has its default FailureBoard: rank 0 learns what has failed, and does not wait."""
    with pytest.raises(AssertionError) as raised:
        run_ranks(fail_in_the_second_trainer)
    assert "ValueError: the generator of rank 1 failed" in str(raised.value)
    assert "was not done at the deadline" not in str(raised.value)
    assert "no rank may come here" not in str(raised.value)
