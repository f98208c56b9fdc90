"""State that is not this run's, or cannot be stored: compared and refused before it is taken, or named in the log."""

from __future__ import annotations

import json
import logging
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

from bits import bit_by_bit
from ignite_train import (
    CheckpointError,
    ForwardOutput,
    Trainer,
    create_trainer,
)
from ignite_train.handlers import Checkpoint, LearningRateSchedule, TrainingMetrics
from ignite_train.manifest import compact_json

X = torch.linspace(-1, 1, 96).reshape(12, 8)
LOADER = [X[i : i + 3] for i in range(0, 12, 3)]  # four micro-batches
Build = Callable[[nn.Module], torch.optim.Optimizer]


class InjectedError(Exception):
    """Raised by a test on purpose."""


def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
    return ForwardOutput((model(x) - 1).square().sum(), len(x))


def net(seed: int = 0) -> nn.Sequential:
    """Two layers of one shape, so that nothing but their names tells them apart, and one of another."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def build(directory: Path, optimizer: Build = adamw, seed: int = 0, **options: Any) -> Trainer:
    model = net(seed)
    trainer = create_trainer(model, optimizer(model), forward)
    Checkpoint(directory, every=1, keep=9, **options).attach(trainer)
    return trainer


def saved(directory: Path, optimizer: Build = adamw, updates: int = 2) -> Path:
    """A directory with checkpoints of a run of this optimizer."""
    build(directory, optimizer).run(LOADER, max_iters=updates)
    return directory


def refusal(trainer: Trainer) -> str:
    """Why it cannot go on; nothing of it has changed."""
    before = bit_by_bit([trainer.parts["model"].state_dict(), trainer.parts["optimizer"].state_dict(), torch.get_rng_state()])
    with pytest.raises(CheckpointError) as error:
        trainer.run(LOADER, max_iters=9)
    after = [trainer.parts["model"].state_dict(), trainer.parts["optimizer"].state_dict(), torch.get_rng_state()]
    assert bit_by_bit(after) == before
    assert "\n" not in str(error.value)
    return str(error.value)


def logged(caplog: Any, level: int = logging.WARNING) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if (record.levelno >= level and record.name == "ignite_train")
        or (record.levelno >= level and record.name.startswith("ignite_train."))
    ]


# --- forging ---


def forge(directory: Path, change: Callable[[Any, bytearray], None]) -> Path:
    """Changes index and tensors of the newest checkpoint and makes all checksums right; the others go."""
    *others, newest = sorted(directory.glob("update-*"))
    for other in others:
        shutil.rmtree(other)
    index, data = json.loads((newest / "rank-00000.json").read_bytes()), bytearray((newest / "rank-00000.bin").read_bytes())
    change(index, data)
    reseal(newest, compact_json(index), data)
    return newest


def reseal(path: Path, index: bytes, data: bytes | bytearray | None, size: int | None = None) -> None:
    (path / "rank-00000.json").write_bytes(index)
    if data is not None:
        (path / "rank-00000.bin").write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_bytes())["manifest"]
    manifest["files"]["rank-00000.json"] = {"size": len(index), "crc32": zlib.crc32(index)}
    manifest["files"]["rank-00000.bin"]["size"] = len(data) if data is not None else size
    body = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(b'{"crc32":"%08x","manifest":%b}\n' % (zlib.crc32(body), body))


def without_description(index: Any, data: bytearray) -> None:
    """As the version before this check wrote it."""
    del index["objects"]["description"]


def replace_tensor(index: Any, data: bytearray, name: str, value: Tensor) -> None:
    """Another tensor under a name, the others where they were, one after another."""
    entries, new, offset = index["tensors"], bytearray(), 0
    for key, entry in sorted(entries.items(), key=lambda item: item[1]["offset"]):
        part = bytes(data[entry["offset"] : entry["offset"] + entry["num_bytes"]])
        if key == name:
            part = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            shape = list(value.shape)
            entry |= {"shape": shape, "whole": shape, "start": [0] * len(shape), "order": [*range(len(shape))]}
            entry |= {"dtype": str(value.dtype).removeprefix("torch."), "crc32": zlib.crc32(part), "num_bytes": len(part)}
        entry["offset"], offset = offset, offset + len(part)
        new += part
    data[:] = new


def put(index: Any, name: str, value: Any, *keys: Any) -> None:
    """Another value at a place in the tree of an object."""
    pair, here = None, index["objects"][name]
    for key in keys:
        pair = next(pair for pair in here["dict"] if pair[0] == key) if isinstance(here, dict) else None
        here = here[key] if pair is None else pair[1]
        last = here if pair is None else pair
    assert isinstance(last, list)
    last[1] = value


# --- the optimizer ---


def test_parameters_in_another_order_are_refused(tmp_path: Path) -> None:
    """Moments of another parameter of the same shape would be taken without a word."""
    saved(tmp_path)
    message = refusal(
        build(
            tmp_path,
            lambda model: torch.optim.AdamW([*model[1].parameters(), *model[0].parameters(), *model[2].parameters()], lr=0.01),
        )
    )
    assert "is of another optimizer: parameter 0 of param_groups[0] was 0.weight and is 1.weight now" in message


@pytest.mark.parametrize("has_names", [True, False], ids=["described", "older"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "step"])
def test_a_moment_of_another_shape_is_refused(key: str, fused: bool, has_names: bool, tmp_path: Path) -> None:
    """Also by a checkpoint without names, and with right checksums: a fused kernel would leave its memory."""
    optimizer: Build = lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)  # noqa: E731
    saved(tmp_path, optimizer)
    wrong = torch.zeros(3) if key == "step" else torch.zeros(1)

    def change(index: Any, data: bytearray) -> None:
        replace_tensor(index, data, f"optimizer['state'][0][{key!r}]", wrong)
        if not has_names:
            without_description(index, data)

    forge(tmp_path, change)
    expected = "must be one number" if key == "step" else f"{key} of 0.weight has shape (1,) and not (8, 8)"
    assert expected in refusal(build(tmp_path, optimizer))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (torch.optim.AdamW, torch.optim.Adam, "AdamW wrote it, and this run has Adam"),
        (torch.optim.Adam, torch.optim.AdamW, "Adam wrote it, and this run has AdamW"),
        (torch.optim.RMSprop, torch.optim.SGD, "RMSprop wrote it, and this run has SGD"),
    ],
)
def test_another_class_is_refused(before: Any, after: Any, message: str, tmp_path: Path) -> None:
    """Adam and AdamW differ in nothing but an option, and torch takes the option of the checkpoint."""
    saved(tmp_path, lambda model: before(model.parameters(), lr=0.01))
    trainer = build(tmp_path, lambda model: after(model.parameters(), lr=0.01))
    assert message in refusal(trainer)


def test_adam_is_told_from_adamw_in_an_older_checkpoint(tmp_path: Path) -> None:
    """By the option that is all that differs."""
    saved(tmp_path)
    forge(tmp_path, without_description)
    message = refusal(build(tmp_path, lambda model: torch.optim.Adam(model.parameters(), lr=0.01)))
    assert "its decoupled_weight_decay is True, and Adam has False" in message


@pytest.mark.parametrize("has_names", [True, False], ids=["described", "older"])
def test_what_a_step_needs_must_be_there(has_names: bool, tmp_path: Path) -> None:
    """A state without a moment is refused when it is read, and not in the middle of the first step."""
    saved(tmp_path)

    def change(index: Any, data: bytearray) -> None:
        state = next(pair[1] for pair in index["objects"]["optimizer"]["dict"] if pair[0] == "state")
        first = state["dict"][0][1]["dict"]
        first[:] = [pair for pair in first if pair[0] != "exp_avg_sq"]
        del index["tensors"]["optimizer['state'][0]['exp_avg_sq']"]
        replace_tensor(index, data, "", torch.zeros(0))
        if not has_names:
            without_description(index, data)

    forge(tmp_path, change)
    assert "the state of 0.weight has no exp_avg_sq" in refusal(build(tmp_path))


FORMS: dict[str, Build] = {
    "adadelta": lambda model: torch.optim.Adadelta(model.parameters()),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01, fused=True),
    "adam amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True),
    "adamax": lambda model: torch.optim.Adamax(model.parameters()),
    "asgd": lambda model: torch.optim.ASGD(model.parameters()),
    "muon": lambda model: torch.optim.Muon([p for p in model.parameters() if p.dim() == 2]),
    "nadam": lambda model: torch.optim.NAdam(model.parameters()),
    "radam": lambda model: torch.optim.RAdam(model.parameters()),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), momentum=0.9, centered=True),
    "rprop": lambda model: torch.optim.Rprop(model.parameters()),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    "sgd momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True),
    "tensor lr": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01)),
    "own": lambda model: Factored(model.parameters()),
}


class Factored(torch.optim.Optimizer):
    """Keeps what torch's do not: factors, lists, strings, a number for all."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                rows = state.setdefault("rows", torch.zeros(parameter.shape[0]))
                rows += parameter.grad.reshape(len(rows), -1).square().sum(1)
                state["history"] = [*state.get("history", []), parameter.grad.norm()][-2:]
                state["kind"] = "factored"
                parameter -= group["lr"] * parameter.grad / (rows.sqrt() + 1e-3).reshape(-1, *[1] * (parameter.dim() - 1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("has_names", [True, False], ids=["described", "older"])
def test_every_optimizer_goes_on_bitwise(form: str, has_names: bool, tmp_path: Path) -> None:
    """What each of torch's optimizers keeps, and one of somebody else's, is taken for what it is."""

    def frozen(model: nn.Module) -> torch.optim.Optimizer:
        if form == "muon":
            for parameter in model.parameters():
                parameter.requires_grad_(parameter.dim() == 2)
        return FORMS[form](model)

    whole = build(tmp_path / "whole", frozen)
    whole.run(LOADER, max_iters=7)
    saved(tmp_path / "parts", frozen, 3)
    forge(tmp_path / "parts", (lambda index, data: None) if has_names else without_description)
    resumed = build(tmp_path / "parts", frozen, seed=4)
    resumed.run(LOADER, max_iters=7)
    for name in ("model", "optimizer"):
        assert bit_by_bit(resumed.parts[name].state_dict()) == bit_by_bit(whole.parts[name].state_dict())
    assert resumed.state.iteration == 7


def test_the_odd_one_of_an_unknown_optimizer_is_refused(tmp_path: Path) -> None:
    """Where all others of its shape have the shape of the parameter, one that has not was forged."""

    class Own(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.01})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter].setdefault("buffer", torch.zeros_like(parameter)).add_(parameter.grad)
                parameter -= 0.01 * self.state[parameter]["buffer"]

    def three(model: nn.Module) -> torch.optim.Optimizer:
        model[2] = nn.Linear(8, 8)
        return Own(model.parameters())

    saved(tmp_path, three)
    forge(tmp_path, lambda index, data: replace_tensor(index, data, "optimizer['state'][2]['buffer']", torch.zeros(1)))
    assert "buffer of 1.weight has shape (1,) and not (8, 8), as for all others of that shape" in refusal(
        build(tmp_path, three)
    )


# --- options ---


def test_what_the_script_sets_in_another_way_is_listed(tmp_path: Path, caplog: Any) -> None:
    """The checkpoint wins, each time, and each time the log says so."""
    saved(tmp_path)

    def other(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.5, amsgrad=True)

    for updates in (3, 4):
        caplog.clear()
        trainer = build(tmp_path, other)
        trainer.run(LOADER, max_iters=updates)
        group = trainer.parts["optimizer"].param_groups[0]
        assert (group["lr"], group["amsgrad"]) == (0.01, False)
        (line,) = [line for line in logged(caplog) if "going on from" in line]
        assert "changed since: optimizer.lr: 0.01 -> 0.5 (the checkpoint's is used; script_wins=('lr',) takes the " in line
        assert "optimizer.amsgrad: False -> True (the checkpoint's is used" in line
        assert line.count("->") == 2


def test_an_option_that_a_schedule_moves_has_not_changed(tmp_path: Path, caplog: Any) -> None:
    """The same script again is no warning, whatever its schedules and handlers have made of the rate."""

    def run(updates: int) -> None:
        model = net()
        optimizer = adamw(model)
        trainer = create_trainer(model, optimizer, forward)
        LearningRateSchedule(schedulers.OneCycleLR(optimizer, 0.1, total_steps=20)).attach(trainer)
        Checkpoint(tmp_path, every=1).attach(trainer)
        trainer.run(LOADER, max_iters=updates)

    run(3)
    caplog.clear()
    run(6)
    assert logged(caplog) == []


def test_the_script_wins_where_it_is_told_to(tmp_path: Path, caplog: Any) -> None:
    """By name of the option, for all groups, now and after the next resumption."""
    saved(tmp_path)

    def other(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.25, eps=1e-3)

    for updates, changed in ((3, True), (4, False)):
        caplog.clear()
        trainer = build(tmp_path, other, script_wins=("lr", "weight_decay"))
        trainer.run(LOADER, max_iters=updates)
        group = trainer.parts["optimizer"].param_groups[0]
        assert (group["lr"], group["weight_decay"], group["eps"]) == (0.5, 0.25, 1e-8)
        (line,) = [line for line in logged(caplog) if "going on from" in line]
        assert ("optimizer.lr: 0.01 -> 0.5 (the script's is used)" in line) == changed
        assert "optimizer.eps: 1e-08 -> 0.001 (the checkpoint's is used" in line


def test_an_option_of_the_script_that_the_state_cannot_serve_is_refused(tmp_path: Path) -> None:
    """AMSGrad needs a moment that the checkpoint does not hold."""
    saved(tmp_path)
    trainer = build(tmp_path, lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True), script_wins=("amsgrad",))
    assert "the state of 0.weight has no max_exp_avg_sq" in refusal(trainer)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"script_wins": ("learning_rate",)},
            ValueError,
            "script_wins must name options of the optimizer, any of .*, got 'learn",
        ),
        ({"script_wins": "lr"}, TypeError, r"script_wins must be a sequence of names such as \('lr',\), got 'lr'"),
        ({"leave_out": ("TrainingMetric",)}, ValueError, "got 'TrainingMetric'; did you mean 'TrainingMetrics'"),
        ({"leave_out": "TrainingMetrics"}, TypeError, "leave_out must be a sequence of names"),
    ],
)
def test_names_that_nothing_has_are_refused(options: Any, error: Any, message: str, tmp_path: Path) -> None:
    """Before the first batch, with what there is and the nearest."""
    with pytest.raises(error, match=message):
        trainer = build(tmp_path, **options)
        TrainingMetrics().attach(trainer)
        trainer.run(LOADER, max_iters=1)
    assert not tmp_path.exists() or not [*tmp_path.iterdir()]


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 12),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
    "step": lambda o: schedulers.StepLR(o, 2),
    "sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.5, 1.0, 2), schedulers.ExponentialLR(o, 0.9)], [4]
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_goes_on_over_the_rate_of_the_script(schedule: str, tmp_path: Path) -> None:
    """Its place and its shape are the checkpoint's: the rates are those of a whole run at the script's rate."""

    def rates(directory: Path, lr: float, updates: int, **options: Any) -> list[float]:
        model, found = net(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        trainer = create_trainer(model, optimizer, forward)
        LearningRateSchedule(SCHEDULES[schedule](optimizer)).attach(trainer)
        Checkpoint(directory, every=1, **options).attach(trainer)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: found.append(trainer.state.output.learning_rates[0]))
        trainer.run(LOADER, max_iters=updates)
        return found

    expected = rates(tmp_path / "whole", 0.005, 9)
    rates(tmp_path / "parts", 0.02, 3)
    assert rates(tmp_path / "parts", 0.005, 9, script_wins=("lr",)) == pytest.approx(expected[3:], rel=1e-12)


def test_a_schedule_that_has_rates_of_its_own_is_refused(tmp_path: Path) -> None:
    """It would overrule the script at its next step; the message says how to begin it anew."""

    def run(updates: int, **options: Any) -> Trainer:
        model = net()
        optimizer = adamw(model)
        trainer = create_trainer(model, optimizer, forward)
        LearningRateSchedule(schedulers.OneCycleLR(optimizer, 0.1, total_steps=20)).attach(trainer)
        Checkpoint(tmp_path, every=1, **options).attach(trainer)
        if updates:
            trainer.run(LOADER, max_iters=updates)
        return trainer

    run(3)
    message = refusal(run(0, script_wins=("lr",)))
    assert (
        "script_wins must not name 'lr' where 'handlers/LearningRateSchedule' goes on: OneCycleLR does not compute" in message
    )
    assert "leave_out=('LearningRateSchedule',)" in message
    assert run(6, script_wins=("lr",), leave_out=("LearningRateSchedule",)).state.iteration == 6
