"""Several ranks are protected without being asked: what each default notices, what replaces it, and what is not saved."""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import cuts
from ignite_train import (
    ForwardOutput,
    TorchLossScaling,
    Trainer,
    TrainEvents,
    create_supervised_trainer,
    create_trainer,
    protection,
)
from ignite_train.handlers import (
    Checkpoint,
    FailureBoard,
    GradNormConsistency,
    GradNormMismatchError,
    HangWatch,
    StateConsistency,
    StateMismatchError,
    hang_watch,
)
from ignite_train.ranks import collectives, rank_vote, replicas
from log_messages import messages_from_here
from processes import DEADLINE_SECONDS
from ranks import run_ranks
from test_failures import TIMEOUT, Board, Clock, Group, be_patient, see_a_hang, threads, until
from update_options import with_options

Way = Literal["ddp", "auto", "explicit", "fsdp"]
KINDS = (FailureBoard, HangWatch, GradNormConsistency, StateConsistency)
each_replica = pytest.mark.parametrize("way", ["ddp", "auto", "explicit"])


def make(
    way: Way = "ddp", forward: Callable[..., Any] = cuts.forward, module: nn.Module | None = None, **options: Any
) -> tuple[Trainer, nn.Module]:
    """A trainer of a small linear model that crosses the ranks in this way, and the module without a wrapper."""
    module = cuts.linear() if module is None else module
    model: nn.Module = module
    if way == "fsdp":
        fully_shard(module, mesh=init_device_mesh("cpu", (idist.get_world_size(),)))
    if way in ("ddp", "auto"):
        model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=cuts.LEARNING_RATE)
    return create_trainer(model, optimizer, forward, **with_options(reduction=way, **options)), module


def loader(updates: int = 6) -> list[cuts.Sample]:
    return cuts.shard([[4] * updates] * idist.get_world_size())


def attached(trainer: Trainer) -> list[str]:
    """The protecting handlers of `trainer`, one entry for each that is there."""
    owners = [entry[0].__self__ for entry in trainer._event_handlers[Events.STARTED] if hasattr(entry[0], "__self__")]
    owners += [callback.__self__ for callback in trainer.on_enter]
    return sorted(type(owner).__name__ for owner in [*owners, *trainer.piggybacks] if isinstance(owner, KINDS))


ALL = sorted(kind.__name__ for kind in KINDS)


# --- what is attached ---


def what_is_attached() -> dict[str, Any]:
    module = cuts.linear()
    ddp, optimizer = DistributedDataParallel(module), torch.optim.SGD(module.parameters(), lr=0.1)
    watch = {"timeout_seconds": 7, "first_timeout_seconds": 9}
    chosen = {"hang_watch": watch, "state_consistency": {"every": 5}, "failure_board": False, "grad_norm_consistency": True}
    custom = make(protect=chosen)[0]
    return {
        "default": attached(make()[0]),
        "none": attached(make(protect=False)[0]),
        "supervised": attached(create_supervised_trainer(ddp, optimizer, nn.MSELoss())),
        "supervised none": attached(create_supervised_trainer(ddp, optimizer, nn.MSELoss(), protect=False)),
        "custom": attached(custom),
        "seconds": [(d.timeout_seconds, d.first_timeout_seconds) for d in custom.default_handlers if isinstance(d, HangWatch)],
    }


@pytest.mark.slow
def test_several_ranks_are_protected_by_default_and_by_settings() -> None:
    """All four handlers, none, or those that are asked for with their settings; by both factories."""
    for found in run_ranks(what_is_attached):
        assert found["default"] == found["supervised"] == ALL
        assert found["none"] == found["supervised none"] == []
        assert found["custom"] == [name for name in ALL if name != "FailureBoard"]
        assert found["seconds"] == [(7.0, 9.0)]


def test_a_single_process_has_no_protection(
    build: Callable[..., Any], micro_batches: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is attached, no thread runs; settings are checked all the same, and no warning names what has checked them."""
    with pytest.raises(ValueError, match="tolerance"):
        build(protect={"grad_norm_consistency": {"tolerance": 0}})
    trainer = build(protect={"hang_watch": {"timeout_seconds": 7}, "state_consistency": {"every": 5}}).trainer
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: names.extend(threads()))
    names: list[str] = []
    trainer.run(micro_batches, max_epochs=1)
    assert (attached(trainer), trainer.piggybacks, trainer.default_handlers, names) == ([], [], [], [])
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("protect", "error", "message"),
    [
        ("yes", TypeError, "protect must be a bool or a mapping of settings by the name of the handler, got 'yes' of type str"),
        (
            {"hang_wach": True},
            ValueError,
            r"protect must have keys among failure_board, .* got 'hang_wach'; did you mean 'hang_watch'\?",
        ),
        ({"hang_watch": 60}, TypeError, r"protect\['hang_watch'\] must be a bool or a mapping of settings, got 60 of type int"),
        (
            {"hang_watch": {"timeout": 60}},
            ValueError,
            r"protect\['hang_watch'\] must have keys among timeout_seconds, .* got 'timeout'; did you mean 'timeout_seconds'\?",
        ),
        ({"failure_board": {"seconds": 1}}, ValueError, r"protect\['failure_board'\] must be True or False, because it has no"),
        (
            {"state_consistency": {"every": 0}},
            ValueError,
            r"protect\['state_consistency'\]\['every'\] must be at least 1, got 0",
        ),
        ({"state_consistency": {"model": None}}, ValueError, r"must have keys among every, scheduler, own_buffers, .* 'model'"),
        ({"grad_norm_consistency": {"tolerance": 0}}, ValueError, "tolerance must be greater than 0, got 0"),
    ],
)
def test_settings_that_do_not_exist_are_refused(build: Any, protect: Any, error: type[Exception], message: str) -> None:
    """The message names the nearest handler or setting, also in a single process."""
    with pytest.raises(error, match=message):
        build(protect=protect)


class OwnWatch(HangWatch):
    """A user's own kind of watch."""


def replace(when: str) -> Any:
    trainer, module = make()
    if when == "after a run":
        trainer.run(loader(), max_epochs=1)
    own: list[Any] = [
        StateConsistency(module, trainer.optimizers["optimizer"]),
        GradNormConsistency(),
        OwnWatch(50),
        FailureBoard(),
    ]
    for handler in reversed(own) if when == "in another order" else own:
        handler.attach(trainer)
    during: list[str] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=8), lambda: during.extend(sorted(threads())))
    trainer.run(loader(), max_epochs=2)
    handlers = [type(entry[0]).__name__ for entry in trainer._event_handlers[Events.ITERATION_COMPLETED]]
    left = [handler for handler in trainer.piggybacks if not any(handler is mine for mine in own)]
    settled = [entry[0].__self__ in own for entry in trainer._event_handlers[Events.COMPLETED] if hasattr(entry[0], "__self__")]
    return attached(trainer), trainer.default_handlers, left, during, settled, handlers.count("GradNormConsistency")


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before a run", "in another order", "after a run"])
def test_a_handler_of_ones_own_replaces_the_default(when: str) -> None:
    """Each kind is there once, the user's, a subclass counts as its kind, and nothing of the default is left behind."""
    for found, defaults, left, during, settled, norms in run_ranks(replace, when):
        assert found == sorted("OwnWatch" if name == "HangWatch" else name for name in ALL)
        assert (defaults, left, settled, norms) == ([], [], [True, True], 1)
        assert during == ["FailureBoard", "HangWatch", "HangWatch"]


class Ignoring(nn.Module):
    """A linear model whose bias each rank keeps to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = cuts.linear()
        self._ddp_params_and_buffers_to_ignore = ["inner.bias"]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def train_with_own_parameters(protect: Any) -> tuple[list[str], str, list[str]]:
    logged = messages_from_here(logging.INFO)
    logging.getLogger("ignite_train").setLevel(logging.INFO)
    trainer, _ = make(module=Ignoring(), protect=protect)
    left_out = [line for line in logged if "are left out unless protect names them" in line]
    try:
        trainer.run(loader(), max_epochs=1)
    except (StateMismatchError, GradNormMismatchError) as error:
        return attached(trainer), type(error).__name__, left_out
    return attached(trainer), "", left_out


@pytest.mark.slow
def test_parameters_that_differ_by_design_are_no_error() -> None:
    """Where DDP ignores a parameter, ranks are not compared unless the user asks for it by name."""
    for found, error, left_out in run_ranks(train_with_own_parameters, True):
        assert (found, error) == (["FailureBoard", "HangWatch"], "")
        (line,) = left_out
        assert "DistributedDataParallel ignores 'inner.bias' and 0 more parameters" in line
    for found, error, _ in run_ranks(train_with_own_parameters, {"grad_norm_consistency": True}):
        assert "GradNormConsistency" in found
        assert error == "GradNormMismatchError"


class Buffered(nn.Linear):
    """A linear model with a buffer that holds what the rank saw last."""

    def __init__(self) -> None:
        super().__init__(cuts.FEATURES, 1, dtype=torch.float64)
        nn.init.constant_(self.weight, 0.1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.fill_(float(x.sum()))
        return super().forward(x)


def train_buffered(way: Way) -> int:
    return make(way, module=Buffered(), protect={"state_consistency": {"every": 1}})[0].run(loader(), max_epochs=1).num_steps


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "explicit"])
def test_buffers_of_a_ranks_own_are_no_false_alarm(way: Way) -> None:
    """A layer may fill a buffer from the data of its rank; by default that is not compared."""
    assert run_ranks(train_buffered, way) == [6, 6]


def train_with_divided_state(settings: dict[str, Any]) -> Any:
    trainer, module = make("ddp", protect={"state_consistency": {"every": 1, **settings}})
    state = trainer.optimizers["optimizer"].state  # type: ignore[attr-defined]
    trainer.add_event_handler(
        TrainEvents.STEP_COMPLETED(once=1), lambda: state[module.weight].update(own=torch.tensor(idist.get_rank()))
    )
    try:
        return trainer.run(loader(), max_epochs=1).num_steps
    except StateMismatchError as error:
        return error.names


@pytest.mark.slow
def test_an_optimizer_may_divide_its_state_over_the_ranks() -> None:
    """What an optimizer keeps on one rank alone is no false alarm, and is compared where that is asked for."""
    assert run_ranks(train_with_divided_state, {}) == [6, 6]
    assert run_ranks(train_with_divided_state, {"optimizer_state": True}) == [("optimizer own of weight",)] * 2


def train_with_an_optimizer_called_optimizer() -> Any:
    module = cuts.linear()
    optimizers = {
        "optimizer": torch.optim.SGD([module.weight], lr=cuts.LEARNING_RATE),
        "other": torch.optim.SGD([module.bias], lr=cuts.LEARNING_RATE),
    }
    protect = {"state_consistency": {"every": 1}}
    trainer = create_trainer(DistributedDataParallel(module), optimizers, cuts.forward, protect=protect)

    @trainer.on(TrainEvents.STEP_COMPLETED(once=1))
    def spoil() -> None:
        optimizers["other"].param_groups[0]["lr"] *= 1 + idist.get_rank()

    with pytest.raises(StateMismatchError) as caught:
        trainer.run(loader(), max_epochs=1)
    return caught.value.names


@pytest.mark.slow
def test_each_of_several_optimizers_is_compared_whatever_they_are_called() -> None:
    """An optimizer with the name of an only one does not hide the others; the message says which one differs."""
    expected = ("learning rate of group 0 of other",)
    assert run_ranks(train_with_an_optimizer_called_optimizer) == [expected] * 2


def count_collectives(way: Way) -> list[dict[str, int]]:
    counts = []
    for protect in (False, True):
        trainer, _ = make(way, protect=protect)
        profiler = profile(activities=[ProfilerActivity.CPU])
        trainer.add_event_handler(Events.EPOCH_STARTED(once=1), profiler.__enter__)
        trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), partial(profiler.__exit__, None, None, None))
        trainer.run(loader(6), max_epochs=1)
        counts.append({event.key: event.count for event in profiler.key_averages() if event.key.startswith("gloo:")})
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "auto", "explicit", "fsdp"])
def test_the_defaults_add_no_collective_to_an_update(way: Way) -> None:
    """An epoch, the first updates with their digests among them, has as many collectives as without protection."""
    for without, protected in run_ranks(count_collectives, way):
        assert protected == without
        assert without["gloo:all_gather"] >= 6


# --- which updates are compared ---


def drift_in_update_5() -> Any:
    trainer, module = make("ddp", protect={"state_consistency": {"every": 4}, "grad_norm_consistency": False})
    steps: list[int] = []
    trainer.add_event_handler(TrainEvents.STEP_COMPLETED, lambda: steps.append(trainer.state.iteration))

    @trainer.on(TrainEvents.STEP_COMPLETED(once=5))
    def change() -> None:
        with torch.no_grad():
            module.weight += idist.get_rank()

    try:
        trainer.run(loader(6), max_epochs=2)
    except StateMismatchError as error:
        return str(error).partition(":")[0], steps
    return "", steps


@pytest.mark.slow
def test_ranks_that_drift_apart_later_are_noticed() -> None:
    """After the first updates those are compared whose number is a multiple of `every`."""
    assert run_ranks(drift_in_update_5) == [("update 8", [*range(1, 9)])] * 2


def compared_by_default(protect: Any) -> list[int]:
    """The updates, of the first 2100, after which the state is compared."""
    events: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateConsistency, "attach", lambda self, trainer, event: events.append(event))
        make(protect=protect)
    (event,) = events
    return [update for update in range(1, 2100) if event.filter(None, update)]


@pytest.mark.slow
def test_the_first_three_updates_are_compared_then_ever_fewer_and_each_thousandth() -> None:
    """By default; `every` is another number of them."""
    assert run_ranks(compared_by_default, True) == [[1, 2, 3, 10, 30, 100, 300, 1000, 2000]] * 2
    assert run_ranks(compared_by_default, {"state_consistency": {"every": 900}}) == [[1, 2, 3, 10, 30, 100, 300, 900, 1800]] * 2


def differ_from_update_5(how: str, directory: Path) -> tuple[str, list[int], list[str]]:
    """The first line of the error, the updates whose state was compared, and what was done with the state at the end."""
    trainer, module = make("explicit" if how == "explicit" else "ddp")
    done: list[str] = []
    if how == "saved":
        Checkpoint(directory, every=6, asynchronous=False).attach(trainer)
    trainer.add_event_handler(Events.COMPLETED, lambda: done.append("completed"))

    @trainer.on(TrainEvents.STEP_COMPLETED)
    def change() -> None:
        if trainer.state.iteration >= 5 and idist.get_rank() == 0:
            with torch.no_grad():
                module.weight.clamp_(-0.05, 0.05)
        if trainer.state.iteration == 7 and how == "stopped":
            trainer.terminate()
        if trainer.state.iteration == 7 and how == "raised":
            raise OSError("the disk is full")

    compared = compared_updates(trainer)
    try:
        if how == "session":
            with trainer.session():
                for micro_batch in loader(8):
                    trainer.update([micro_batch])
        else:
            trainer.run(loader(8), max_epochs=1)
    except (StateMismatchError, OSError) as error:
        return str(error).partition(";")[0], compared, [*done, *(path.name for path in directory.glob("update-*"))]
    return "", compared, done


def compared_updates(trainer: Trainer) -> list[int]:
    """The updates after which the default check makes a digest; filled during the run."""
    (check,) = (handler for handler in trainer.default_handlers if isinstance(handler, StateConsistency))
    compared: list[int] = []
    make_digest = check._check

    def noted(trainer: Trainer) -> Any:
        compared.append(trainer.state.iteration)
        return make_digest(trainer)

    check._check = noted  # type: ignore[method-assign]
    return compared


@pytest.mark.parametrize(
    ("how", "update"), [("ddp", 8), ("explicit", 8), ("session", 8), ("stopped", 8), ("saved", 6)], ids=lambda value: str(value)
)
def test_ranks_that_drift_apart_are_noticed_before_a_save_and_at_the_end(how: str, update: int, tmp_path: Path) -> None:
    """Also of a run that ends before the next update that is compared by its number. Nothing is saved of such a state."""
    expected = f"update {update}: the ranks differ in parameter weight", [1, 2, 3, update], []
    for error, *rest in run_ranks(differ_from_update_5, how, tmp_path, timeout_seconds=120):
        assert (error, *rest) == expected


def test_a_run_that_ends_with_an_exception_compares_nothing(tmp_path: Path) -> None:
    """Another rank may be gone."""
    assert run_ranks(differ_from_update_5, "raised", tmp_path, timeout_seconds=120) == [("the disk is full", [1, 2, 3], [])] * 2


def compared_in_whole(updates: int, every: int, directory: Path) -> list[int]:
    trainer, _ = make()
    compared = compared_updates(trainer)
    if every:
        Checkpoint(directory, every=every).attach(trainer)
    trainer.run(loader(updates), max_epochs=1)
    trainer.run(loader(updates), max_epochs=1)  # has nothing to do
    trainer.verify_ranks()
    return compared


@pytest.mark.parametrize(
    ("updates", "every", "compared"),
    [(8, 0, [1, 2, 3, 8]), (3, 0, [1, 2, 3]), (8, 4, [1, 2, 3, 4, 8]), (7, 3, [1, 2, 3, 6, 7])],
)
def test_no_update_is_compared_twice(updates: int, every: int, compared: list[int], tmp_path: Path) -> None:
    """Neither an update that was compared for its number, nor an update that was saved."""
    assert run_ranks(compared_in_whole, updates, every, tmp_path, timeout_seconds=120) == [compared] * 2


@pytest.mark.parametrize("begin", [1, 6])
def test_the_first_updates_of_a_process_are_compared_and_then_one_of_many(begin: int) -> None:
    """The named updates of each process, also of one that resumes; then the multiples of a number."""
    filter_ = protection._FirstAndEvery((1, 2, 3), 5)
    due = [update for update in range(begin, 21) if filter_(None, update)]
    assert due == ([1, 2, 3, 5, 10, 15, 20] if begin == 1 else [6, 7, 8, 10, 15, 20])


# --- a forward that calls another module than its argument ---


def call_the_raw_module(way: Way, protect: Any, directory: Path | None) -> Any:
    raw: list[nn.Module] = []

    def forward(_model: nn.Module, micro_batch: cuts.Sample) -> ForwardOutput:
        return cuts.forward(raw[0], micro_batch)

    trainer, module = make(way, forward, protect=protect)
    raw.append(module)
    steps: list[int] = []
    trainer.add_event_handler(TrainEvents.STEP_COMPLETED, lambda: steps.append(trainer.state.iteration))
    if directory is not None:
        Checkpoint(directory, every=1).attach(trainer)
    error: Exception | None = None
    try:
        trainer.run(loader(3), max_epochs=1)
    except (StateMismatchError, GradNormMismatchError) as caught:
        error = caught
    whole = {
        name: p.full_tensor().flatten().tolist() if way == "fsdp" else p.flatten().tolist()  # type: ignore[attr-defined]
        for name, p in module.named_parameters()
    }
    return type(error).__name__, str(error), steps, whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("protect", "error"),
    [
        (True, "StateMismatchError"),
        ({"state_consistency": False}, "GradNormMismatchError"),
        ({"grad_norm_consistency": False}, "StateMismatchError"),
    ],
    ids=["defaults", "norms", "states"],
)
def test_a_forward_that_calls_the_raw_module_is_named_before_the_second_step(protect: Any, error: str) -> None:
    """Gradients that never crossed the ranks end all ranks in update 2, and the message asks for this cause."""
    for kind, message, steps, _ in run_ranks(call_the_raw_module, "ddp", protect, None):
        assert (kind, steps) == (error, [1])
        assert message.startswith("update 1: ")
        assert "does forward call the model it is given as its argument, outside of no_sync()?" in message


@pytest.mark.slow
def test_no_checkpoint_is_made_of_ranks_that_were_never_reduced(tmp_path: Path) -> None:
    """A save after update 1 is preceded by the comparison that update 2 would have brought."""
    for kind, message, steps, _ in run_ranks(call_the_raw_module, "ddp", True, tmp_path / "run"):
        assert kind == "GradNormMismatchError"
        assert "a forward that does not call the model it is given as its argument" in message
        assert steps == [1]
    assert not [*tmp_path.glob("run/update-*")]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["auto", "explicit", "fsdp"])
def test_where_the_raw_module_is_what_is_reduced_it_makes_no_difference(way: Way) -> None:
    """Without hooks of a wrapper the closure's module is the model itself: the closed form, and no error."""
    data = cuts.samples()
    updates = [tuple(torch.cat([part[4 * i : 4 * i + 4], part[12 + 4 * i : 16 + 4 * i]]) for part in data) for i in range(3)]
    expected = cuts.reference(updates)  # type: ignore[arg-type]
    for kind, _, steps, whole in run_ranks(call_the_raw_module, way, True, None):
        assert (kind, steps) == ("NoneType", [1, 2, 3])
        assert whole["weight"] == pytest.approx(expected["weight"].tolist(), rel=1e-12)  # sums in another order
        assert whole["bias"] == pytest.approx([expected["bias"]], rel=1e-12)


# --- one rank alone is not finite after the reduction ---


class Spoiled:
    """Rank 1's copy of the reduced gradients becomes NaN in one update, as by a fault after the reduction."""

    def __init__(self, way: Way, update: int, **options: Any) -> None:
        self.trainer, self.module = make(way, **options)
        self.update = update
        if idist.get_rank() != (0 if way == "fsdp" else 1):  # the shards of so small a model are all on rank 0
            return
        if way in ("ddp", "fsdp"):
            # No handler of an event may do this unnoticed.
            self.trainer.moments.before_norm.append(lambda _: self.spoil())
        else:  # the gradients are reduced after the last event of a micro-batch
            self.unflatten, replicas.unflatten = replicas.unflatten, self.spoil_sum

    def spoil(self) -> None:
        if self.trainer.state.iteration == self.update:
            gradient = self.module.weight.grad
            local: Any = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            local.data.fill_(math.nan)  # which torch does not count as a change

    def spoil_sum(self, *given: Any) -> None:
        self.unflatten(*given)
        if self.trainer.state.iteration == self.update:
            self.module.weight.grad[0, -1] = math.nan


POLICIES: dict[str, dict[str, Any]] = {
    "skip": {"on_nonfinite": "skip"},
    "scaling": {"loss_scaling": TorchLossScaling(8.0, growth_interval=100)},
    "raise": {},
}


def disagree(way: Way, policy: str, update: int, directory: Path | None = None, cadence: dict[str, int] | None = None) -> Any:
    trainer = Spoiled(way, update, **POLICIES[policy]).trainer
    steps: list[int] = []
    trainer.add_event_handler(TrainEvents.STEP_COMPLETED, lambda: steps.append(trainer.state.iteration))
    if directory is not None:
        Checkpoint(directory, asynchronous=False, **(cadence or {"every": 1})).attach(trainer)  # type: ignore[arg-type]
    try:
        trainer.run(loader(4), max_epochs=1)
    except Exception as error:
        return type(error).__name__, str(error), steps
    return None, "", steps


@pytest.mark.slow
@each_replica
@pytest.mark.parametrize("policy", ["skip", "scaling"])
@pytest.mark.parametrize("update", [2, 4])
def test_a_rank_that_alone_skips_ends_all_before_the_next_step(way: Way, policy: str, update: int) -> None:
    """Both ranks end with an error that names rank 1, and rank 0 has made no step after that update; at the end too."""
    first, second = run_ranks(disagree, way, policy, update)
    assert first[:2] == second[:2]
    kind, message, steps = first
    assert kind == "GradNormMismatchError"
    assert message.startswith(f"update {update}: the gradient norm differs between the ranks:")
    assert "rank 1 found the update not finite and rank 0 made the step" in message
    assert steps == list(range(1, update + 1))
    assert second[2] == list(range(1, update))


@pytest.mark.slow
@each_replica
@pytest.mark.parametrize(("update", "cadence"), [(2, {"every": 1}), (4, {"every_epochs": 1}), (4, {"every": 4})])
def test_no_checkpoint_is_committed_after_a_disagreement(
    tmp_path: Path, way: Way, update: int, cadence: dict[str, int]
) -> None:
    """A save waits for the comparison of the update it follows, also at the end of an epoch and of the run."""
    for kind, message, _ in run_ranks(disagree, way, "skip", update, tmp_path / "run", cadence):
        assert (kind, message.partition(":")[0]) == ("GradNormMismatchError", f"update {update}")
    found = sorted(path.name for path in tmp_path.glob("run/update-*"))
    assert found == (["update-00000001"] if cadence == {"every": 1} else [])


def flip_before_a_stop(directory: Path) -> str:
    """A parameter of rank 1 changes in update 2, after which rank 0 asks for the end of the run."""
    trainer, module = make("ddp")

    @trainer.on(TrainEvents.STEP_COMPLETED(once=2))
    def change() -> None:
        if idist.get_rank() == 1:
            module.bias.detach().add_(1.0)
        trainer.terminate(agreed=True)

    Checkpoint(directory, every=100).attach(trainer)
    with pytest.raises(StateMismatchError, match="update 2: the ranks differ in parameter bias"):
        trainer.run(loader(4), max_epochs=1)
    return ",".join(path.name for path in directory.glob("update-*"))


@pytest.mark.slow
def test_the_save_of_a_run_that_is_stopped_waits_for_its_check_too(tmp_path: Path) -> None:
    """The last save comes with TERMINATE, before the checks of COMPLETED."""
    assert run_ranks(flip_before_a_stop, tmp_path / "run") == ["", ""]


def spoil_a_shard(policy: str) -> Any:
    kind, message, steps = disagree("fsdp", policy, 2)
    return kind, message.partition(" (")[0], steps


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["skip", "scaling", "raise"])
def test_a_sharded_model_has_one_norm_for_all_ranks(policy: str) -> None:
    """A shard that is not finite makes the reduced norm so: all ranks judge alike, and there is nothing to disagree on."""
    first, second = run_ranks(spoil_a_shard, policy)
    assert first == second
    assert first[0] == ("NonFiniteError" if policy == "raise" else None)
    assert first[2] == ([1] if policy == "raise" else [1, 3, 4])


def raise_alone(board: Board, way: Way, protect: Any) -> None:
    be_patient()
    rank_vote._PATIENCE_SECONDS = 0.5  # type: ignore[attr-defined]
    trainer = Spoiled(way, 2, protect=protect).trainer
    trainer.add_event_handler(
        TrainEvents.STEP_COMPLETED, lambda: board.write(f"step.{trainer.state.iteration}.{idist.get_rank()}")
    )
    try:
        trainer.run(loader(4), max_epochs=1)
    except Exception as error:
        board.write(f"raised.{idist.get_rank()}", [type(error).__name__, str(error)])
        raise


@pytest.mark.slow
@each_replica
def test_a_rank_that_raises_alone_ends_all_and_is_named(tmp_path: Path, way: Way) -> None:
    """It does not wait for the others in a gather; the board tells them which rank it was, and no later step is made."""
    with Group(tmp_path, raise_alone, way, True) as group:
        assert [group.status(rank) for rank in (0, 1)] == [1, 1]
        kind, message = group.board.read("raised.1")
        assert kind == "NonFiniteError"
        assert "not finite on this rank, but finite on rank 0, which most likely made the step" in message
        assert "rank 1 failed at update 2: NonFiniteError: update 2: gradient norm nan" in group.stderr(0)
        steps = sorted(path.name for path in tmp_path.glob("step.*"))
        assert steps == ["step.1.0", "step.1.1", "step.2.0"]


def gather_means(model: nn.Module, sample: cuts.Sample) -> ForwardOutput:
    """A forward that is collective: the loss has a term that all ranks add up, as that of a contrastive loss."""
    output = cuts.forward(model, sample)
    return output._replace(loss=output.loss + 0.0 * collectives.total([float(output.loss)])[0])


def raise_alone_in_collective_forward(board: Board, uneven: Literal["all", "replay"]) -> None:
    rank_vote._PATIENCE_SECONDS = 0.5  # type: ignore[attr-defined]
    trainer = Spoiled("ddp", 2, forward=gather_means, uneven=uneven).trainer
    try:
        trainer.run(loader(4), max_epochs=1)
    except Exception as error:
        board.write(f"raised.{idist.get_rank()}", [type(error).__name__, str(error)])
        raise


@pytest.mark.slow
@pytest.mark.parametrize("uneven", ["all", "replay"])
def test_a_rank_that_raises_alone_does_not_run_a_collective_forward(tmp_path: Path, uneven: str) -> None:
    """It would meet a collective of the other rank's next update, or wait for it: it is named within seconds instead."""
    with Group(tmp_path, raise_alone_in_collective_forward, uneven) as group:
        assert [group.status(rank) for rank in (0, 1)] == [1, 1]
        kind, message = group.board.read("raised.1")
        assert kind == "NonFiniteError"
        assert "not finite on this rank, but finite on rank 0, which most likely made the step" in message
        assert "rank 1 failed at update 2: NonFiniteError: update 2: gradient norm nan" in group.stderr(0)


@pytest.mark.slow
def test_a_rank_that_raises_alone_does_not_hang_without_protection_either(tmp_path: Path) -> None:
    """Its own search is its own; the other rank notices that the connection is gone."""
    with Group(tmp_path, raise_alone, "ddp", False) as group:
        assert [group.status(rank) for rank in (0, 1)] == [1, 1]
        assert group.board.read("raised.1")[0] == "NonFiniteError"


def have_cast(ballot: rank_vote.RankVote, voters: list[int]) -> bool:
    """Whether these have voted for the latest time."""
    assert ballot._messages is not None
    return all(ballot._messages.read(f"{ballot._number}/{voter}") for voter in voters)


def vote(late: int | None) -> Any:
    ballot, rank = rank_vote.RankVote(), idist.get_rank()
    found = []
    for absentee in (None, late):
        rank_vote._PATIENCE_SECONDS = DEADLINE_SECONDS if absentee is None else 0.2  # type: ignore[attr-defined]
        if rank != absentee:
            ballot.cast()
            voters = [voter for voter in range(idist.get_world_size()) if voter != absentee]
            until(partial(have_cast, ballot, voters), "the others have voted")
            found.append(ballot.absent())
        idist.barrier()
    if rank == late:  # it comes when the others have lost patience
        ballot.cast()
        found.append(ballot.absent())
    return found


@pytest.mark.slow
def test_a_vote_has_one_outcome_on_all_ranks() -> None:
    """All are there, or the absent ones are named, to a rank that comes late too."""
    assert run_ranks(vote, None, world_size=3) == [[(), ()]] * 3
    assert run_ranks(vote, 1, world_size=3) == [[(), (1,)]] * 3


class Gone:
    """A store whose process has ended."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Connection reset by peer")


def test_a_store_that_is_gone_counts_as_all_others_absent() -> None:
    """The error that led to the vote is the one that is raised."""
    ballot = rank_vote.RankVote()
    ballot._messages, ballot._world_size = Gone(), 3  # type: ignore[assignment]
    ballot.cast()
    assert ballot.absent() == (1, 2)


# --- a rank that hangs ---


def loop_in_python() -> None:
    while True:
        time.sleep(0.01)


def loop_in_a_regular_expression() -> None:
    re.match(r"(a|aa)+$", "a" * 200 + "b")  # years, and Python's lock is held all the while


def stop_the_process() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


SETTINGS = {"timeout_seconds": TIMEOUT, "first_timeout_seconds": TIMEOUT}


def watch_of(trainer: Trainer) -> HangWatch:
    """The one that it has by default."""
    (watch,) = (default for default in trainer.default_handlers if isinstance(default, HangWatch))
    return watch


def hang(board: Board, how: Callable[[], None], living: list[int]) -> None:
    """Rank 1 hangs in update 3, with nothing but the defaults."""

    def forward(model: nn.Module, micro_batch: cuts.Sample) -> ForwardOutput:
        if idist.get_rank() == 1 and trainer.state.iteration == 3:
            board.write("hangs")
            how()
        return cuts.forward(model, micro_batch)

    trainer, _ = make("ddp", forward, protect={"hang_watch": SETTINGS})
    Clock(board, living, watch_of(trainer))
    trainer.run(loader(), max_epochs=1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", [loop_in_python, loop_in_a_regular_expression, stop_the_process])
def test_a_rank_that_hangs_ends_the_others_by_default(tmp_path: Path, how: Callable[[], None]) -> None:
    """An endless loop, one that holds Python's lock, and SIGSTOP: rank 0 ends and names rank 1; a rank that can ends too."""
    living = [0, 1] if how is loop_in_python else [0]
    with Group(tmp_path, hang, how, living) as group:
        group.board.wait_for("hangs")
        see_a_hang(group, living, living)
        assert [group.status(rank) for rank in living] == [1] * len(living)
        verdict = "no rank has moved for more than 0.4 s; rank 1 is behind" if how is loop_in_python else "rank 1 is silent for"
        assert all(f"training hangs: {verdict}" in group.stderr(rank) for rank in living)


def take_long(board: Board, how: str, standstill: float | None) -> None:
    """Between updates 2 and 3 the ranks do something until the test has seen enough."""
    trainer, _ = make("ddp", protect={"hang_watch": {**SETTINGS, "standstill_seconds": standstill}})
    Clock(board, [0, 1], watch_of(trainer))

    @trainer.on(Events.ITERATION_COMPLETED(once=2))
    def something() -> None:
        board.write(f"takes.{idist.get_rank()}")
        if how == "together" or idist.get_rank() == 0:
            board.wait_for("enough")
        else:
            idist.barrier()

    trainer.run(loader(), max_epochs=1)


def take_time(group: Group) -> None:
    """Three times the timeout, or until a rank has ended."""
    for rank in (0, 1):
        group.board.wait_for(f"takes.{rank}")
    Clock(group.board, [0, 1]).set_forward(3 * TIMEOUT, over=lambda: not all(group.lives(rank) for rank in (0, 1)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "standstill", "status", "verdict"),
    [
        ("together", None, 0, None),
        ("together", 0.8, 1, "no rank has moved for more than 0.8 s; no rank is ahead of the others"),
        ("on rank 0 while rank 1 waits", None, 1, "no rank has moved for more than 0.4 s; rank 0 is behind"),
    ],
)
def test_only_ranks_at_different_places_hang(
    tmp_path: Path, how: str, standstill: float | None, status: int, verdict: str | None
) -> None:
    """What all ranks do together may take long, unless a limit is set for it; what others wait for may not."""
    with Group(tmp_path, take_long, how, standstill) as group:
        take_time(group)
        if status == 0:
            group.board.write("enough")
        assert [group.status(rank) for rank in (0, 1)] == [status, status]
        assert verdict is None or all(f"training hangs: {verdict}" in group.stderr(rank) for rank in (0, 1))
        assert status == 1 or "training hangs" not in group.stderr()


def read_late(board: Board) -> None:
    """Rank 1 waits for rank 0, finds nothing itself, and is slow to read what rank 0 finds."""

    def reads(watch: Any) -> None:
        if not watch._verdict and watch._messages.has("verdict"):
            time.sleep(0.8)
        exchange(watch)
        if watch._verdict:
            board.write("read")

    def ends(status: int) -> None:
        board.write("ends", board.has("read"))
        end_process(status)

    exchange, end_process = hang_watch._Watch._exchange, collectives.end_process
    if idist.get_rank() == 1:
        hang_watch._Watch._exchange, hang_watch._Watch._find_hang = reads, lambda self: ""  # type: ignore[method-assign]
    else:
        collectives.end_process = ends
    take_long(board, "on rank 0 while rank 1 waits", None)


@pytest.mark.slow
def test_no_rank_ends_before_the_others_know_why(tmp_path: Path) -> None:
    """They would report a broken connection or a silent rank instead of what was found."""
    with Group(tmp_path, read_late) as group:
        take_time(group)
        assert [group.status(rank) for rank in (0, 1)] == [1, 1]
        assert group.board.read("ends") is True
        finding = "training hangs: no rank has moved for more than 0.4 s; rank 0 is behind"
        assert all(finding in group.stderr(rank) for rank in (0, 1))


def gather_for_long(board: Board) -> None:
    """Rank 0 computes between collectives and rank 1 waits in each of them, in all for three times the timeout."""
    trainer, _ = make("ddp", protect={"hang_watch": SETTINGS})
    clock = Clock(board, [0, 1], watch_of(trainer))

    @trainer.on(Events.ITERATION_COMPLETED(once=2))
    def validate() -> None:
        for _ in range(6):
            if idist.get_rank() == 0:
                clock.set_forward(TIMEOUT / 2)
            idist.barrier()

    trainer.run(loader(), max_epochs=1)


@pytest.mark.slow
def test_collectives_are_progress(tmp_path: Path) -> None:
    """A long validation with collectives in it is not taken for a hang, though one rank is seen waiting all the time."""
    with Group(tmp_path, gather_for_long) as group:
        assert [group.status(rank) for rank in (0, 1)] == [0, 0]
        assert "training hangs" not in group.stderr()
