"""What is changed for a while is put back wherever Ctrl-C comes, in the change, within it, or as it is put back."""

from __future__ import annotations

import gc
import random
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Average
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from bits import bit_by_bit
from control_c import at_each_place, pressed, unlike
from ignite_train import ForwardOutput, UpdateOptions, create_evaluator, create_trainer, deterministic
from ignite_train.checkpoint import capture, run_objects
from ignite_train.data import position
from ignite_train.engine import dispatch
from ignite_train.evaluation import evaluator as evaluators
from ignite_train.evaluation import uneven_metrics
from ignite_train.fast.folded_step import FoldedStep
from ignite_train.handlers import ModelEMA, OptimizerModes, StepTimer, StopOnSignal, Validation, predict
from ignite_train.kinds_of_handlers import averaging_handler
from ignite_train.kinds_of_handlers.handler import handle_in_every_nth_update
from ignite_train.model import check_forward, modes, nonfinite, random_state
from ignite_train.model.fused_kernels import FusedKernels
from ignite_train.model.gradients import Gradients
from ignite_train.model.in_full import in_full, put_entries_back
from ignite_train.model.step_watch import StepWatch
from ignite_train.ranks import ddp, whereabouts
from ignite_train.ranks.ddp import DDPCrossing
from ignite_train.ranks.first_buffers import FirstBuffers
from ignite_train.ranks.fsdp import FSDPCrossing
from ignite_train.update.closure_step import _Before
from ignite_train.update.forward_backward import ForwardBackward
from ignite_train.update.stepper import OneStepper
from schedule_free import ScheduleFreeSGD
from tiers import accelerated

DATA = [torch.arange(6.0).view(3, 2) + number for number in range(2)]


class StopError(Exception):
    """Raised on purpose."""


def test_it_is_called_again_where_it_is_broken_off() -> None:
    """Once, and then what has broken it off is raised."""
    calls: list[int] = []

    def put_back() -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_full(put_back)
    assert calls == [0, 1]
    in_full(put_back)
    assert calls == [0, 1, 2]


def test_an_error_of_its_own_is_raised() -> None:
    """An invalid state, say, is refused both times."""

    def refuse() -> None:
        raise StopError

    with pytest.raises(StopError):
        in_full(refuse)


@pytest.mark.parametrize("change", [{}, {"a": 9}, {"new": 1}, {"a": None}, {"a": None, "new": 1, "b": 7}], ids=str)
def test_entries_are_put_back_in_their_order(change: dict[str, Any]) -> None:
    """Those that were changed, those that were deleted, and those that are new; no moment is without those that stay."""
    before = {"a": 1, "b": 2, "c": 3}
    kept = before.keys() - {name for name, value in change.items() if value is None}

    def run(pressing: Callable[[], Any]) -> Any:
        now = dict(before)
        for name, value in change.items():
            if value is None:
                del now[name]
            else:
                now[name] = value
        with suppress(KeyboardInterrupt), pressing():
            put_entries_back(now, before)
        there = kept <= now.keys()
        put_entries_back(now, before)
        return there, [*now.items()]

    outcomes = at_each_place(run, put_entries_back)
    assert [outcome for outcome in outcomes.values() if outcome[1] != [*before.items()]] == []
    if len(kept) == len(before):
        assert unlike(outcomes) == []


# --- what is changed for a while: what does that, what it must leave alone, and the functions in which Ctrl-C comes


Case = tuple[Callable[[], Any], Callable[[], Any], tuple[Any, ...]]


def model_of(*, mixed: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))
    if mixed:
        model[1].eval()
    return model


def forward(model: nn.Module, x: Any) -> Any:
    return model(x).square().mean()


def modes_of(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def generators() -> Any:
    return bit_by_bit(torch.get_rng_state()), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]


def draw() -> None:
    torch.rand(3)
    random.random()  # noqa: S311
    np.random.rand()


def in_other_modes() -> Case:
    model = model_of(mixed=True)

    def use() -> None:
        with check_forward._modes(model, [model[1]]):
            modes_of(model)

    return use, lambda: modes_of(model), (check_forward._modes,)


def with_kept_generators() -> Case:
    owner = SimpleNamespace(own=torch.Generator().manual_seed(3))

    def use() -> None:
        with random_state.kept_random_state(owner):
            draw()
            torch.rand(3, generator=owner.own)

    def look() -> Any:
        return generators(), bit_by_bit(owner.own.get_state())

    return use, look, (random_state.kept_random_state, random_state.restore_random_state, random_state.set_generator_state)


def deterministically() -> Case:
    def use() -> None:
        with deterministic(7):
            draw()

    def look() -> Any:
        return torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, generators()

    return use, look, (deterministic._begin, deterministic._put_back)


def with_hooks_that_search() -> Case:
    model = model_of()

    def use() -> None:
        with nonfinite._watched(model, lambda *_: None):
            model(DATA[0]).sum().backward()

    def look() -> Any:
        hooks = [len(module._forward_hooks) for module in model.modules()]
        return hooks, [len(parameter._backward_hooks or ()) for parameter in model.parameters()]

    return use, look, (nonfinite._watched, RemovableHandle.remove)


def in_an_evaluation() -> Case:
    model = model_of(mixed=True)
    evaluator = create_evaluator(model, forward)
    return (
        lambda: evaluator.run(DATA),
        lambda: modes_of(model),
        (evaluators.Evaluator._run_inside, modes.set_modes, nn.Module.train),
    )


def with_a_kept_state() -> Case:
    evaluator = create_evaluator(model_of(), forward)
    evaluator.run(DATA)

    def use() -> None:
        with evaluators.kept_state(evaluator):
            evaluator.state.metrics, evaluator.state.new = {"other": 1.0}, 3

    def look() -> Any:
        return {name: id(value) for name, value in vars(evaluator.state).items()}

    return use, look, (evaluators.kept_state, put_entries_back)


def with_swapped_averages() -> Case:
    model, ema = model_of(), ModelEMA(0.5)
    trainer = create_trainer(model, SGD(model.parameters(), lr=0.1), forward)
    ema.attach(trainer)
    trainer.run(DATA)

    def use() -> None:
        with ema.swapped_in():
            draw()

    def look() -> Any:
        return bit_by_bit(model.state_dict()), ema._is_swapped_in, trainer.replicas.have_own_weights

    return use, look, (averaging_handler.AveragingHandler.swapped_in,)


def with_other_optimizer_modes() -> Case:
    model = nn.Linear(2, 1)
    optimizer = ScheduleFreeSGD(model.parameters(), lr=0.1)
    trainer, evaluator = create_trainer(model, optimizer, forward), create_evaluator(model, forward)
    OptimizerModes(optimizer).attach(trainer, evaluator=evaluator)
    trainer.run(DATA)

    def look() -> Any:
        return bit_by_bit([model.state_dict(), optimizer.state_dict()]), trainer.replicas.have_own_weights

    return lambda: evaluator.run(DATA), look, (OptimizerModes._evaluating, ScheduleFreeSGD._move)


def without_collections() -> Case:
    def use() -> None:
        with capture.paused_collection():
            DATA[0].sum()

    return use, lambda: (gc.isenabled(), whereabouts.PAUSED.is_set()), (capture.paused_collection,)


def where_a_thread_stands() -> Case:
    return lambda: whereabouts.find_whereabouts(0), gc.isenabled, (whereabouts._top_of,)


def with_writable_buffers() -> Case:
    module = nn.Module()
    for name in "ab":
        module.register_buffer(name, torch.ones(1).expand(3))

    def use() -> None:
        with run_objects._writable_buffers(module):
            module.load_state_dict({"a": torch.ones(3), "b": torch.ones(3)})

    return use, lambda: {name: id(one) for name, one in module._buffers.items()}, (run_objects._writable_buffers,)


def as_a_loader_is_opened() -> Case:
    own = torch.Generator().manual_seed(3)
    loader = DataLoader(DATA, shuffle=True, num_workers=1, persistent_workers=True, generator=own)
    loader._get_iterator = lambda: iter(())  # type: ignore[assignment,method-assign,return-value]  # without workers
    return lambda: position.open_loader(loader), lambda: loader.generator is own, (position.open_loader, DataLoader.__setattr__)


def without_a_kernel() -> Case:
    model = nn.ParameterDict({name: torch.ones(3) for name in "ab"})
    optimizer = Adam([{"params": [one]} for one in model.values()], lr=0.1, fused=True)
    gradients = Gradients(model, optimizer)
    stepper = OneStepper(optimizer, gradients, StepWatch(optimizer))
    stepper.kernels.unfused = [*optimizer.param_groups]

    def use() -> None:
        with stepper._all_kernels():
            draw()

    def look() -> Any:
        return [group["fused"] for group in optimizer.param_groups]

    return use, look, (OneStepper._all_kernels, FusedKernels.__enter__, FusedKernels.__exit__)


def with_numbers_for_a_kernel() -> Case:
    model = nn.Linear(2, 1)
    optimizer = Adam(model.parameters(), lr=0.1, fused=True)
    stepper: Any = create_trainer(model, optimizer, forward).process.stepper  # type: ignore[attr-defined]
    stepper._direct, stepper._plain = (lambda *_, **__: "by hand"), SimpleNamespace(step=lambda: None)

    def use() -> None:
        stepper._step_with([], grad_scale=torch.ones(()), found_inf=torch.zeros(()))

    return use, lambda: {"grad_scale", "found_inf"} & vars(optimizer).keys(), (FoldedStep._step_with,)


def without_gradients_and_hooks() -> Case:
    model = nn.Linear(2, 1)
    model(DATA[0]).sum().backward()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient)  # type: ignore[no-untyped-call]
    parameters = [*model.parameters()]

    def use() -> None:
        with ddp._set_aside(parameters):
            pass

    def look() -> Any:
        return [(id(one.grad), dict(one._backward_hooks or {})) for one in parameters]

    return use, look, (ddp._set_aside,)


class Wrapper(nn.Module):
    """Of DistributedDataParallel and of FSDP2 what their contexts change."""

    def __init__(self) -> None:
        super().__init__()
        self.broadcast_buffers, self.find_unused_parameters = True, False
        self.children_in_sync = [True, True]

    def set_requires_gradient_sync(self, requires: bool) -> None:
        for number in range(2):
            len(self.children_in_sync)
            self.children_in_sync[number] = requires
            len(self.children_in_sync)


def without_the_buffers_of_ddp() -> Case:
    wrapper = Wrapper()
    buffers: Any = FirstBuffers(wrapper)  # type: ignore[arg-type]
    buffers._is_first = False

    def use() -> None:
        with buffers._given(nullcontext(), last=True):
            draw()

    return use, lambda: wrapper.broadcast_buffers, (FirstBuffers._given, nn.Module.__setattr__)


def without_reductions() -> Case:
    wrapper = Wrapper()

    def use() -> None:
        with FSDPCrossing._unsynchronised(SimpleNamespace(_root=wrapper)):  # type: ignore[arg-type]
            draw()

    return use, lambda: [*wrapper.children_in_sync], (FSDPCrossing._unsynchronised, Wrapper.set_requires_gradient_sync)


def with_the_module_of_ddp_replaced() -> Case:
    module, wrapper = nn.Linear(2, 1), Wrapper()
    wrapper.module = module

    def use() -> None:
        with suppress(AttributeError):  # it is no wrapper
            DDPCrossing.take_part(SimpleNamespace(_ddp=wrapper), lambda _: None, lambda _: None)  # type: ignore[arg-type,return-value]

    return use, lambda: wrapper.module is module, (DDPCrossing.take_part, nn.Module.__setattr__)


def in_a_rehearsal() -> Case:
    model = model_of()
    trainer, evaluator = create_trainer(model, SGD(model.parameters(), lr=0.1), forward), create_evaluator(model, forward)
    validation = Validation(evaluator, DATA)
    validation.attach(trainer)
    evaluator.add_event_handler(Events.EPOCH_COMPLETED, list[Any]().clear)  # is left out of it
    places = Validation._rehearse, evaluators.kept_state, dispatch.without_handlers
    return lambda: validation._rehearse(trainer), lambda: handlers_of(evaluator), places


def in_a_prediction() -> Case:
    evaluator = create_evaluator(nn.Identity(), lambda _, x: ForwardOutput(x.sum() * 0, len(x), outputs=x))
    return lambda: predict(evaluator, DATA), lambda: handlers_of(evaluator), (predict, evaluators.kept_state)


def handlers_of(engine: Any) -> Any:
    return {event: len(handlers) for event, handlers in engine._event_handlers.items() if handlers}


def in_a_section() -> Case:
    model, timer = model_of(), StepTimer()
    trainer = create_trainer(model, SGD(model.parameters(), lr=0.1), forward)
    timer.attach(trainer)
    trainer.sections.switch("handler")

    def use() -> None:
        with timer.section("outer"), timer.section("inner"):
            draw()

    return use, lambda: [*timer._path], (StepTimer.section,)


def while_signals_stop_the_run() -> Case:
    model, stop = model_of(), StopOnSignal([signal.SIGUSR1, signal.SIGUSR2])
    trainer = create_trainer(model, SGD(model.parameters(), lr=0.1), forward)
    stop.attach(trainer)

    def use() -> None:
        trainer.run(DATA, max_epochs=trainer.state.epoch + 1)

    def look() -> Any:
        descriptor = signal.set_wakeup_fd(-1)
        threads = [thread for thread in threading.enumerate() if thread.name == "StopOnSignal"]
        return signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2), descriptor, stop._watch, threads

    return use, look, (StopOnSignal._start, StopOnSignal._restore)


def in_every_update() -> Case:
    model, owner = model_of(), StepTimer()
    trainer = create_trainer(model, SGD(model.parameters(), lr=0.1), forward)
    handlers = {Events.ITERATION_STARTED: draw, Events.ITERATION_COMPLETED: draw}
    handle_in_every_nth_update(owner, trainer, 1, handlers)
    trainer.run(DATA)

    def use() -> None:
        trainer.run(DATA, max_epochs=trainer.state.epoch + 1)

    def look() -> Any:
        found = handlers_of(trainer)
        return found[Events.ITERATION_STARTED], found[Events.ITERATION_COMPLETED]

    return use, look, (handle_in_every_nth_update,)


CASES = (
    in_other_modes,
    with_kept_generators,
    deterministically,
    with_hooks_that_search,
    in_an_evaluation,
    with_a_kept_state,
    with_swapped_averages,
    with_other_optimizer_modes,
    without_collections,
    where_a_thread_stands,
    with_writable_buffers,
    as_a_loader_is_opened,
    without_a_kernel,
    pytest.param(with_numbers_for_a_kernel, marks=accelerated),
    without_gradients_and_hooks,
    without_the_buffers_of_ddp,
    without_reductions,
    with_the_module_of_ddp_replaced,
    in_a_rehearsal,
    in_a_prediction,
    in_a_section,
    while_signals_stop_the_run,
    in_every_update,
)


def changed_by(use: Callable[[], Any], look: Callable[[], Any], pressing: Callable[[], Any]) -> list[Any]:
    """What something looks like before and after a use in which Ctrl-C may come, if that is not the same."""
    before, error = look(), None
    try:
        with pressing():
            use()
    except KeyboardInterrupt as raised:  # a notebook keeps it, and with it the frames that were left
        error = raised
    after = look()
    del error
    return [] if before == after else [before, after]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_nothing_stays_changed(case: Callable[[], Case]) -> None:
    """Wherever Ctrl-C comes in the functions that change it for a while."""

    def run(pressing: Callable[[], Any]) -> Any:
        use, look, _ = case()
        return changed_by(use, look, pressing)

    outcomes = at_each_place(run, *case()[2])
    assert len(outcomes) > 1
    assert {place: outcome for place, outcome in outcomes.items() if outcome} == {}


def test_metrics_over_ranks_compute_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Theirs is another method while an evaluation ends; here the ranks are one process that says it is two."""
    evaluator, metrics = create_evaluator(model_of(), forward), [Average(), Average()]
    for number, metric in enumerate(metrics):
        metric.attach(evaluator, str(number))
    monkeypatch.setattr(uneven_metrics.collectives, "world_size", lambda: 2)
    monkeypatch.setattr(uneven_metrics.collectives, "gather_objects", lambda one: [one, one])

    def use() -> None:
        with uneven_metrics.uneven_metrics(evaluator, has_data=True):
            draw()

    def run(pressing: Callable[[], Any]) -> Any:
        return changed_by(use, lambda: ["compute" in vars(metric) for metric in metrics], pressing)

    assert unlike(at_each_place(run, uneven_metrics.uneven_metrics)) == []


def test_a_model_is_in_training_mode_as_a_whole() -> None:
    """The next run looks at the outermost module alone."""

    def run(pressing: Callable[[], Any]) -> Any:
        model = model_of().eval()
        trainer = create_trainer(model, SGD(model.parameters(), lr=0.1), forward)
        with suppress(KeyboardInterrupt), pressing():
            trainer.run(DATA)
        trainer.run(DATA, max_epochs=2)
        return modes_of(model)

    assert unlike(at_each_place(run, ForwardBackward.begin, nn.Module.train)) == []


def test_a_step_with_a_closure_that_is_undone_is_not_counted() -> None:
    """Its evaluation is not finite. Ctrl-C as parameters and state are put back must not make it a step."""

    def run(pressing: Callable[[], Any]) -> Any:
        model = nn.Linear(2, 1)
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=1e30, max_iter=3)
        trainer = create_trainer(model, optimizer, forward, options=UpdateOptions(closure=True, on_nonfinite="skip"))
        with suppress(KeyboardInterrupt), pressing():
            trainer.run([torch.full((3, 2), 1e4)])
        return bit_by_bit([*model.parameters()]), len(optimizer.state), trainer.state.num_steps

    assert run(lambda: pressed(0))[2] == 0
    assert unlike(at_each_place(run, _Before.put_back)) == []
