"""A thread that reads ahead while the model computes: it overlaps, and nothing else differs."""

from __future__ import annotations

import _thread
import copy
import logging
import os
import pickle
import random
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import numpy as np
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from bits import bit_by_bit
from ignite_train import (
    ForwardOutput,
    ResumableLoader,
    TokenBudgetSampler,
    Trainer,
    UpdateOptions,
    create_evaluator,
    create_trainer,
)
from ignite_train.data import fetch_thread
from ignite_train.data.fetch_thread import FetchThread
from ignite_train.handlers import Checkpoint
from processes import forked
from ranks import run_ranks
from update_options import with_options

SECONDS = 200  # after which something that should happen has not


def reading_threads() -> list[threading.Thread]:
    """The reading threads that run: Python also lists a thread whose start another test has interrupted by Ctrl-C."""
    running = filter(threading.Thread.is_alive, threading.enumerate())
    return [thread for thread in running if thread.name == FetchThread.__name__]


def ended(thread: threading.Thread) -> bool:
    """Whether it ends by itself."""
    thread.join(SECONDS)
    return not thread.is_alive()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """After any of these tests."""
    yield
    assert all(ended(thread) for thread in reading_threads())


class Noisy(Dataset[Tensor]):
    """Sample i is i, and some noise from a generator of its own."""

    def __init__(self, length: int = 11) -> None:
        self.length, self.generator = length, torch.Generator()

    def __len__(self) -> int:
        return self.length

    def seed_sample(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def __getitem__(self, index: int) -> Tensor:
        return index + torch.rand(4, generator=self.generator)


class Quiet(Dataset[Tensor]):
    """Draws nothing; before each sample it calls `before`."""

    def __init__(self, before: Callable[[int], object] = lambda index: None) -> None:
        self.before = before

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Tensor:
        self.before(index)
        return torch.full((4,), float(index))


def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
    """Draws from all three generators of the process."""
    noise = torch.randn_like(x) + float(np.random.rand()) + random.random()  # noqa: S311
    return ForwardOutput((model(x + 0.1 * noise) / 11).square().sum(), len(x), {"sum": x.sum()})


def make(forward: Any = forward, **arguments: Any) -> tuple[nn.Module, Trainer]:
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trainer = create_trainer(model, optimizer, forward, **with_options(**{"accumulation_steps": 4, **arguments}))
    random.seed(2)
    np.random.seed(2)
    torch.manual_seed(2)
    return model, trainer


def loader_of(dataset: Any, batch_size: int = 2, **options: Any) -> ResumableLoader:
    return ResumableLoader(dataset, batch_size, shuffle=True, seed=3, **{"fetch_in_thread": True, **options})


def end_of(model: nn.Module, trainer: Trainer) -> Any:
    """The numbers of a run, and what is drawn after it."""
    drawn = [torch.rand(2), np.random.rand(2).tolist(), random.random()]  # noqa: S311
    state = trainer.state
    return bit_by_bit(
        [model.state_dict(), state.num_micro_batches, state.iteration, state.epoch, state.update_output.loss, drawn]
    )


# --- the thread by itself -------------------------------------------------------------------------------------------------


def test_it_reads_ahead_and_no_further():
    """Two elements lie ready without being asked for, and the third is not read."""
    read, second = list[int](), threading.Event()

    def source() -> Iterator[int]:
        for number in range(9):
            read.append(number)
            if number == 2:
                second.set()
            yield number

    numbers = FetchThread(source(), ahead=2, name="numbers")
    assert read == []
    assert next(numbers) == 0
    assert second.wait(SECONDS)
    numbers.pause()
    assert (read, reading_threads()) == ([0, 1, 2], [])
    assert [*numbers] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert next(numbers, None) is None


def test_after_a_pause_it_continues():
    """Whatever was read when it came, and also twice in a row."""
    numbers = FetchThread(iter(range(20)), ahead=3, name="numbers")
    given = []
    for number in numbers:
        given.append(number)
        numbers.pause()
        numbers.pause()
        assert reading_threads() == []
    assert given == [*range(20)]


@pytest.mark.parametrize("kind", [OSError, KeyError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("at", [0, 1, 4])
def test_an_error_is_raised_where_it_would_have_been(kind, at):
    """The same object, with the lines that raised it; what follows it is given as it would have been."""
    error = kind("gone")

    class Source(Iterator[int]):
        def __init__(self) -> None:
            self.numbers = count()

        def __next__(self) -> int:
            if (number := next(self.numbers)) == at:
                raise error
            if number == 7:
                raise StopIteration
            return number

    numbers, given = FetchThread(Source(), ahead=2, name="numbers"), []
    for _ in range(at):
        given.append(next(numbers))
    with pytest.raises(kind) as caught:
        next(numbers)
    assert caught.value is error
    assert "raise error" in "".join(traceback.format_tb(error.__traceback__)[-1:])
    assert [*given, *numbers] == [number for number in range(7) if number != at]


def test_a_pass_that_is_dropped_ends_its_thread():
    """Though it is never exhausted."""
    numbers = FetchThread(iter(range(99)), ahead=2, name="numbers")
    next(numbers)
    (thread,) = reading_threads()
    del numbers
    assert ended(thread)


def test_in_another_process_it_says_so(monkeypatch):
    """A process that was forked has no thread, so it must not wait for one."""
    numbers = FetchThread(iter(range(9)), ahead=2, name="numbers")
    next(numbers)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(RuntimeError, match="begun in another process"):
            next(numbers)
    assert next(numbers) == 1


def test_a_thread_that_dies_is_no_hang(monkeypatch):
    """As no thread should."""
    monkeypatch.setattr(fetch_thread, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(fetch_thread._ReadAhead, "run", lambda self: None)
    numbers = FetchThread(iter(range(9)), ahead=2, name="numbers")
    next(numbers)
    with pytest.raises(RuntimeError, match="has died without an error"):
        next(numbers)


def test_it_works_as_the_thread_that_began_it():
    """With its default device, and NumPy's way to treat errors."""
    seen = []

    def source() -> Iterator[int]:
        for number in range(3):
            seen.append((torch.empty(()).device.type, np.geterr()["divide"], torch.is_grad_enabled()))
            yield number

    with torch.device("meta"), np.errstate(divide="raise"):
        assert [*FetchThread(source(), ahead=1, name="numbers")] == [0, 1, 2]
    assert seen == [("meta", "raise", True)] * 3


@pytest.mark.parametrize("gpu", [None, 1], ids=["none", "second"])
def test_it_works_on_the_gpu_of_the_thread_that_began_it(gpu, monkeypatch):
    """Each thread of CUDA begins with the first one; a process that has not used any must not begin to."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: chosen.append((threading.current_thread().name, number)))
    assert [*FetchThread(iter(range(3)), ahead=2, name="numbers")] == [0, 1, 2]
    assert chosen == ([] if gpu is None else [(FetchThread.__name__, 1)])


def _leave_it_reading() -> None:
    first = threading.Event()

    def source() -> Iterator[int]:
        yield 0
        first.set()
        threading.Event().wait()

    numbers = FetchThread(source(), ahead=1, name="numbers")
    next(numbers)
    first.wait(SECONDS)
    globals()["kept"] = numbers  # until the process ends


def test_a_sample_that_never_comes_does_not_keep_the_process():
    """It ends as soon as its program has, and in good order."""
    process = forked.Process(target=_leave_it_reading)
    process.start()
    process.join(SECONDS)
    status = process.exitcode
    process.kill()
    assert status == 0


# --- what it must not draw ------------------------------------------------------------------------------------------------

DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(()),
    "numpy": np.random.rand,
    "python": random.random,
}


@pytest.mark.parametrize("generator", DRAWS)
def test_a_dataset_that_draws_is_refused(generator):
    """At the first sample, before a thread runs; the generators have their states of before."""
    _, trainer = make()
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    with pytest.raises(ValueError, match=f"ResumableLoader.*draws from that of {generator}.*num_workers=1"):
        trainer.run(loader_of(Quiet(lambda index: DRAWS[generator]())), max_epochs=1)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states
    assert trainer.state.iteration == 0


@pytest.mark.parametrize("generator", DRAWS)
def test_a_draw_that_is_refused_leaves_no_trace(generator):
    """Also where no run puts the generators back, as in an evaluation."""
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    numbers = FetchThread((DRAWS[generator]() for _ in range(3)), ahead=2, name="numbers")
    with pytest.raises(ValueError, match=f"numbers, which draws from that of {generator}"):
        next(numbers)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states


@pytest.mark.parametrize("generator", ["torch", "numpy"])
def test_a_later_draw_is_seen_where_the_thread_is_waited_for(generator, monkeypatch):
    """Since nothing else draws then."""
    waits, take = threading.Event(), fetch_thread._ReadAhead.take

    def taking(self: Any, thread: Any) -> Any:
        waits.set()
        return take(self, thread)

    monkeypatch.setattr(fetch_thread._ReadAhead, "take", taking)

    def source() -> Iterator[int]:
        yield 0
        waits.wait(SECONDS)
        DRAWS[generator]()
        yield 1

    numbers = FetchThread(source(), ahead=2, name="numbers")
    assert next(numbers) == 0
    with pytest.raises(ValueError, match=f"numbers, which draws from that of {generator}"):
        next(numbers)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        pytest.param({"num_workers": 1}, "num_workers must be 0 with fetch_in_thread=True, got 1: .* fork", id="workers"),
        pytest.param({"seed_samples": False}, "seed_samples must be True with fetch_in_thread=True", id="seeds"),
        pytest.param({"prefetch_factor": 0}, "prefetch_factor must be at least 1, got 0", id="ahead"),
    ],
)
def test_what_cannot_be_safe_is_refused(options, text):
    with pytest.raises(ValueError, match=text):
        loader_of(Quiet(), **options)


@pytest.mark.parametrize("accumulation_steps", [1, 3])
@pytest.mark.parametrize("buffers", [1, 2])
def test_a_loader_that_writes_over_what_it_gave_is_refused(buffers, accumulation_steps):
    """The thread would write while the model computes; one that gives memory of its own is left alone."""
    memory, number = [torch.empty(2, 4) for _ in range(buffers)], count()

    def collate(samples: list[Tensor]) -> Tensor:
        return torch.stack(samples, out=memory[next(number) % buffers])

    _, trainer = make(accumulation_steps=accumulation_steps)
    with pytest.raises(ValueError, match="memory of its own"):
        trainer.run(loader_of(Quiet(), collate_fn=collate, drop_last=True), max_epochs=1)


@pytest.mark.parametrize(("whole", "buffers"), [(False, 3), (True, 4)], ids=["arriving", "whole"])
def test_what_a_group_holds_is_not_written_over_either(whole, buffers):
    """The thread reads two ahead of what was taken. A group that arrives holds two at once, and a whole one all three."""

    def refused(buffers: int) -> bool:
        memory, number = [torch.empty(1, 4) for _ in range(buffers)], count()

        def collate(samples: list[Tensor]) -> Tensor:
            return torch.stack(samples, out=memory[next(number) % buffers])

        _, trainer = make(accumulation_steps=3, options=UpdateOptions(drop_last_group=whole))
        loader = loader_of(Quiet(), batch_size=1, collate_fn=collate, drop_last=True, prefetch_factor=2)
        try:
            trainer.run(loader, max_epochs=1)
        except ValueError as error:
            return "memory of its own" in str(error)
        return False

    assert (refused(buffers), refused(buffers + 1)) == (True, False)


def test_a_generator_that_is_not_seeded_is_refused():
    """It would be drawn from ahead of what was trained on."""

    class Unseeded(Dataset[Tensor]):
        def __init__(self) -> None:
            self.transforms = [np.random.default_rng(1)]

        def __len__(self) -> int:
            return 3

    with pytest.raises(ValueError, match=r"got a Unseeded with the generator 'transforms.0'; give it a method seed_sample"):
        loader_of(Unseeded())


# --- training -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation_steps", [1, 4])
def test_samples_are_fetched_while_the_model_computes(accumulation_steps):
    """Each forward waits until the sample two places later is being fetched, and the other way round."""
    meet, forwards = threading.Barrier(2, timeout=SECONDS), count()

    def before(index: int) -> None:
        if index >= 2:
            meet.wait()

    def meeting(model: nn.Module, x: Tensor) -> ForwardOutput:
        if next(forwards) < 9:
            meet.wait()
        return forward(model, x)

    _, trainer = make(meeting, accumulation_steps=accumulation_steps)
    trainer.run(ResumableLoader(Quiet(before), 1, shuffle=False, fetch_in_thread=True), max_epochs=1)
    assert trainer.state.num_micro_batches == 11


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "accumulated": ({}, {}, {"max_epochs": 2}),
    "one by one": ({"accumulation_steps": 1}, {"prefetch_factor": 5}, {"max_epochs": 2}),
    "seeded": ({"seed": 5}, {}, {"max_epochs": 2}),
    "last group left out": ({"drop_last_group": True}, {"prefetch_factor": 1}, {"max_epochs": 2}),
    "epochs of three updates": ({}, {}, {"max_epochs": 2, "epoch_length": 3}),
    "by tokens": ({}, {"batches": True}, {"max_epochs": 2}),
    "updates": ({}, {"drop_last": True}, {"max_iters": 5}),
}


def run_case(name: str, *, fetch_in_thread: bool) -> Any:
    arguments, options, limits = CASES[name]
    model, trainer = make(**arguments)
    options = {"fetch_in_thread": fetch_in_thread, **options}
    if not fetch_in_thread:
        options.pop("prefetch_factor", None)
    events: list[Any] = []
    for event in (Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED, Events.EPOCH_COMPLETED):
        trainer.add_event_handler(event, lambda: events.append((trainer.last_event_name.name, trainer.state.iteration)))
    if options.pop("batches", False):
        batches = TokenBudgetSampler([1 + index % 5 for index in range(11)], max_tokens=8, shuffle=True)
        loader = ResumableLoader(Noisy(), batches=batches, seed=3, **options)
    else:
        loader = loader_of(Noisy(), **options)
    trainer.run(loader, **limits)
    assert reading_threads() == []
    return end_of(model, trainer), events, bit_by_bit(trainer.data.position())


@pytest.mark.parametrize("name", CASES)
def test_it_trains_bitwise_as_without_the_thread(name):
    """The same samples, draws of forward, events and place in the data, and no thread is left."""
    assert run_case(name, fetch_in_thread=True) == run_case(name, fetch_in_thread=False)


def stop_by_terminate(trainer: Trainer) -> None:
    trainer.terminate()


def stop_by_interrupt(trainer: Trainer) -> None:
    trainer.interrupt()


def stop_by_error(_trainer: Trainer) -> None:
    raise RuntimeError("stopped")


def stop_by_control_c(_trainer: Trainer) -> None:
    raise KeyboardInterrupt


STOPS = {"terminate": stop_by_terminate, "interrupt": stop_by_interrupt, "error": stop_by_error, "ctrl-c": stop_by_control_c}


def stopped_and_resumed(stop: str, event: Any, directory: Path | None, limits: dict[str, Any]) -> Any:
    """The end of a run that stops in the middle of a pass, resumed from a checkpoint or in the same process."""
    loader = loader_of(Noisy(), prefetch_factor=3)
    model, trainer = make()
    trainer.interrupt_resume_enabled = True
    if directory is not None:
        Checkpoint(directory, every=1).attach(trainer)
    armed = [stop]

    @trainer.on(event)
    def stop_once() -> None:
        if trainer.state.iteration == (3 if limits["epoch_length"] is None else 2) and armed:
            STOPS[armed.pop()](trainer)

    if stop in ("error", "ctrl-c"):
        with pytest.raises((RuntimeError, KeyboardInterrupt)):
            trainer.run(loader, **limits)
    else:
        trainer.run(loader, **limits)
    assert (reading_threads(), armed) == ([], [])
    if directory is not None:
        model, trainer = make()
        torch.rand(7)
        Checkpoint(directory, every=1).attach(trainer)
        loader = loader_of(Noisy())
    trainer.run(loader, **limits)
    return end_of(model, trainer)


def undisturbed(limits: dict[str, Any], **arguments: Any) -> Any:
    model, trainer = make(**arguments)
    trainer.run(loader_of(Noisy(), fetch_in_thread=False), **limits)
    return end_of(model, trainer)


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("length", [None, 3], ids=["passes", "stream"])
@pytest.mark.slow
def test_a_run_that_is_stopped_resumes_bitwise(stop, length, tmp_path):
    """From a checkpoint, at what was trained on: more than that had been read."""
    limits = {"max_epochs": 2, "epoch_length": length}
    found = stopped_and_resumed(stop, Events.ITERATION_COMPLETED, tmp_path, limits)
    assert found == undisturbed(limits)


@pytest.mark.parametrize("stop", ["terminate", "interrupt"])
@pytest.mark.parametrize("event", [Events.ITERATION_COMPLETED, Events.GET_BATCH_COMPLETED], ids=["after", "fetched"])
@pytest.mark.parametrize("length", [None, 3], ids=["passes", "stream"])
@pytest.mark.sampled(3)
def test_a_run_continues_in_the_same_process(stop, event, length):
    """Also where the stop comes between the fetch of a group and its update."""
    limits = {"max_epochs": 2, "epoch_length": length}
    assert stopped_and_resumed(stop, event, None, limits) == undisturbed(limits)


@pytest.mark.parametrize("at", [0, 1, 6])
def test_an_error_of_the_dataset_ends_the_run_and_can_be_repaired(at):
    """It is raised by `run`, with the line of the dataset; then the same trainer repeats the update, with the same bits."""
    broken = [at]

    class Broken(Noisy):
        def __getitem__(self, index: int) -> Tensor:
            if index in broken:
                raise OSError("cannot read")
            return super().__getitem__(index)

    model, trainer = make(seed=5)
    loader = loader_of(Broken())
    with pytest.raises(OSError, match="cannot read") as caught:
        trainer.run(loader, max_epochs=2)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert (frames[-1], frames.count("__next__") > 0, reading_threads()) == ("__getitem__", True, [])
    broken.clear()
    trainer.run(loader, max_epochs=2)
    assert end_of(model, trainer) == undisturbed({"max_epochs": 2}, seed=5)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT as a terminal's processes have it: those that a shell starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_control_c_while_the_thread_is_waited_for(monkeypatch):
    """As the dataset is reading: the run ends, no thread is left, and the next run continues with the same bits."""
    pressed: list[int] = []
    waits, take = threading.Event(), fetch_thread._ReadAhead.take

    def taking(self: Any, thread: Any) -> Any:
        if not self.read:
            waits.set()
        try:
            return take(self, thread)
        finally:
            waits.clear()

    monkeypatch.setattr(fetch_thread._ReadAhead, "take", taking)

    class Pressing(Noisy):
        def __getitem__(self, index: int) -> Tensor:
            if index == 6 and not pressed and threading.current_thread() is not threading.main_thread():
                pressed.append(index)
                waits.wait(SECONDS)
                _thread.interrupt_main()
            return super().__getitem__(index)

    _, trainer = make()
    loader = loader_of(Pressing())
    with pytest.raises(KeyboardInterrupt):
        trainer.run(loader, max_epochs=2)
    assert (pressed, reading_threads()) == ([6], [])
    trainer.run(loader, max_epochs=2)
    assert trainer.state.num_micro_batches == 12


@pytest.mark.slow
def test_a_dataset_that_hangs_does_not_keep_the_run(monkeypatch, caplog):
    """A warning says so; and the next pass of the loader does not call the dataset until the thread is back."""
    monkeypatch.setattr(fetch_thread, "_PATIENCE_SECONDS", 0.05)
    hangs, released, inside = threading.Event(), threading.Event(), list[int]()

    def before(index: int) -> None:
        inside.append(index)
        assert len(inside) == 1
        if index == 5 and not hangs.is_set():
            hangs.set()
            released.wait(SECONDS)
        inside.clear()

    def waiting(model: nn.Module, x: Tensor) -> ForwardOutput:
        if not released.is_set() and x[0, 0] == 2:
            assert hangs.wait(SECONDS)
            trainer.terminate()
        return forward(model, x)

    _, trainer = make(waiting, accumulation_steps=1)
    loader = ResumableLoader(Quiet(before), 1, shuffle=False, fetch_in_thread=True, prefetch_factor=3)
    with caplog.at_level(logging.WARNING):
        trainer.run(loader, max_epochs=1)
    assert f"the thread that reads {loader!r} has not come back within 0.05 s" in caplog.text
    threading.Timer(0.1, released.set).start()
    trainer.run(loader, max_epochs=1)
    assert trainer.state.num_micro_batches == 11


def test_an_evaluation_ends_its_thread():
    """Also one that does not read everything, or fails; with the same result as without."""
    model, _ = make()
    evaluator = create_evaluator(model, lambda model, x: ForwardOutput(model(x).sum(), len(x)))
    for limit in (2, None):
        losses = [
            evaluator.run(loader_of(Noisy(), fetch_in_thread=in_thread), max_iters=limit).metrics["loss"]
            for in_thread in (True, False)
        ]
        assert (losses[0], reading_threads()) == (losses[1], [])
    failing = create_evaluator(model, lambda model, x: stop_by_error(x))
    with pytest.raises(RuntimeError, match="stopped"):
        failing.run(loader_of(Noisy()))
    assert reading_threads() == []


def test_an_iterator_that_is_trained_on_ends_its_thread():
    """What it has read is used by the next run."""
    _, trainer = make(accumulation_steps=2)
    micro_batches = iter(loader_of(Noisy()))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), trainer.terminate)
    for done in (4, 6):
        trainer.run(micro_batches, max_epochs=1)
        assert (trainer.state.num_micro_batches, reading_threads()) == (done, [])


def test_a_loader_can_be_copied():
    """To another process too."""
    loader = loader_of(Noisy())
    for other in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):
        assert [micro_batch.tolist() for micro_batch in other] == [micro_batch.tolist() for micro_batch in loader]


def test_samples_of_a_generator_of_their_own_are_the_same_in_workers():
    """`seed_sample` is called in each of the three ways to read."""
    ways: list[dict[str, Any]] = [{}, {"fetch_in_thread": False}, {"fetch_in_thread": False, "num_workers": 2}]
    first, *others = [[x.tolist() for x in loader_of(Noisy(), **way)] for way in ways]
    assert others == [first, first]


def train_on_ranks(uneven: str, wrapped: bool, in_thread: bool) -> Any:
    """Rank 0 has five micro-batches and rank 1 has four."""
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    module = DistributedDataParallel(model) if wrapped else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    options = UpdateOptions(reduction="auto" if wrapped else "explicit", uneven=uneven)  # type: ignore[arg-type]
    trainer = create_trainer(module, optimizer, forward, accumulation_steps=3, options=options)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5 + idist.get_rank())
    trainer.run(loader_of(Noisy(9), 1, fetch_in_thread=in_thread), max_epochs=2)
    return bit_by_bit(model.state_dict()), trainer.state.num_micro_batches, trainer.state.iteration, len(reading_threads())


@pytest.mark.slow
@pytest.mark.parametrize("uneven", ["all", "shortest", "replay"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "ddp"])
def test_ranks_of_unequal_length_train_as_without_the_thread(uneven, wrapped):
    """Bitwise, and on no rank a thread is left."""
    with_thread, without = (run_ranks(train_on_ranks, uneven, wrapped, in_thread) for in_thread in (True, False))
    assert with_thread == without
    assert [(micro_batches, threads) for _, micro_batches, _, threads in without] == [
        (8 if uneven == "shortest" else 10, 0),
        (8, 0),
    ]
