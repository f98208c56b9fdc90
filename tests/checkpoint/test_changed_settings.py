"""A resumed run says which settings of its handlers, its loss scaling and its loader are not those of the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import nn

from ignite_train import (
    CheckpointError,
    FairseqLossScaling,
    ForwardOutput,
    ResumableLoader,
    StaticLossScaling,
    TorchLossScaling,
    Trainer,
    UpdateOptions,
    create_evaluator,
    create_trainer,
)
from ignite_train.handlers import Checkpoint, EarlyStopping, Freeze, GradientMonitor, ModelEMA, Validation
from ignite_train.trainer import Trainer as AnyTrainer

LOADER = [torch.ones(2, 3)] * 3


def _forward(model: nn.Module, x: torch.Tensor) -> ForwardOutput:
    return ForwardOutput(model(x).square().sum(), len(x))


def build(directory: Path, *, leave_out: tuple[str, ...] = (), **settings: Any) -> Trainer:
    torch.manual_seed(3)
    model = nn.Linear(3, 1)
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=1e-3), _forward, **settings)
    Checkpoint(directory, leave_out=leave_out).attach(trainer)
    return trainer


def resumed(caplog: Any) -> str:
    """The line in the log about the resumption, if it is a warning."""
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "resuming from" in r.getMessage()]
    caplog.clear()
    assert len(lines) < 2
    return "".join(lines)


def with_handlers(directory: Path, decay: float, patience: int, every: int) -> Trainer:
    trainer = build(directory)
    evaluator = create_evaluator(trainer.model, _forward)
    ModelEMA(decay).attach(trainer)
    Validation(evaluator, LOADER, score="loss").attach(trainer)
    EarlyStopping(evaluator, score="loss", patience=patience).attach(trainer)
    GradientMonitor(every=every).attach(trainer)
    return trainer


def test_settings_of_handlers_that_differ_are_told(tmp_path: Path, caplog: Any) -> None:
    """Those of a handler with a state and of one without, the script's are used; the same settings are not worth a line."""
    with_handlers(tmp_path, 0.9, 3, 2).run(LOADER, max_epochs=1)
    with_handlers(tmp_path, 0.9, 3, 2).run(LOADER, max_epochs=2)
    assert resumed(caplog) == ""

    with_handlers(tmp_path, 0.5, 4, 3).run(LOADER, max_epochs=3)
    line = resumed(caplog)
    assert "handlers.ModelEMA.decay: 0.9 -> 0.5 (the script's is used)" in line
    assert "EarlyStopping.patience: 3 -> 4 (the script's is used)" in line
    assert "handlers.GradientMonitor.every: 2 -> 3 (the script's is used)" in line
    assert line.count("->") == 3


def test_rare_settings_of_the_update_that_differ_are_told(tmp_path: Path, caplog: Any) -> None:
    """They change what is trained from there on; accelerations do not."""
    build(tmp_path).run(LOADER, max_epochs=1)
    build(tmp_path, options=UpdateOptions(fast=False)).run(LOADER, max_epochs=2)
    assert resumed(caplog) == ""
    build(tmp_path, options=UpdateOptions(normalize=False, on_nonfinite="skip")).run(LOADER, max_epochs=3)
    line = resumed(caplog)
    assert "trainer.options.normalize: nothing -> False" in line
    assert "trainer.options.on_nonfinite: nothing -> 'skip'" in line
    build(tmp_path).run(LOADER, max_epochs=4)
    assert "trainer.options.normalize: False -> nothing" in resumed(caplog)


def test_a_part_that_is_frozen_on_one_side_only_is_told(tmp_path: Path, caplog: Any) -> None:
    """It has no state, and changes what is trained: left out, until another step, and another part of the model."""

    def part(directory: Path, names: tuple[str, ...], until: Any = None) -> Trainer:
        trainer = build(directory)
        if names:
            Freeze([trainer.model.get_parameter(name) for name in names], until=until).attach(trainer)
        return trainer

    part(tmp_path, ("weight",)).run(LOADER, max_epochs=1)
    part(tmp_path, ("weight",)).run(LOADER, max_epochs=2)
    assert resumed(caplog) == ""
    part(tmp_path, ("weight",), until=50).run(LOADER, max_epochs=3)
    assert "trainer.before_norm.Freeze.until: None -> 50" in resumed(caplog)
    part(tmp_path, ()).run(LOADER, max_epochs=4)
    assert "trainer.before_norm.Freeze" in resumed(caplog)


def test_a_setting_that_a_state_brings_back_is_told_as_the_checkpoints(tmp_path: Path, caplog: Any) -> None:
    """A handler of the user's may save its settings, and then the script's have no effect."""
    from ignite_train.kinds_of_handlers import Handler

    class Own(Handler):
        def __init__(self, limit: int) -> None:
            self.limit = limit

        def attach(self, trainer: AnyTrainer) -> None:
            trainer.add_event_handler(Events.ITERATION_COMPLETED, self.look)

        def look(self) -> None:
            pass

        def state_dict(self) -> dict[str, Any]:
            return {"limit": self.limit}

        def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
            self.limit = state_dict["limit"]

    for limit in (1, 2):
        trainer = build(tmp_path)
        Own(limit).attach(trainer)
        trainer.run(LOADER, max_epochs=limit)
    assert "handlers.Own.limit: 1 -> 2 (the checkpoint's is used)" in resumed(caplog)


def test_settings_of_the_loss_scaling_that_differ_are_told(tmp_path: Path, caplog: Any) -> None:
    """The script's settings are used, and the scale and the counters of the checkpoint: also of a scale that is a setting."""
    build(tmp_path / "static", loss_scaling=StaticLossScaling(128.0)).run(LOADER, max_epochs=1)
    trainer = build(tmp_path / "static", loss_scaling=StaticLossScaling(64.0))
    trainer.run(LOADER, max_epochs=2)
    assert trainer.state.update_output is not None
    assert trainer.state.update_output.loss_scale == 64.0
    assert "trainer.loss_scaling.scale: 128.0 -> 64.0 (the script's is used)" in resumed(caplog)

    for interval in (2, 3):
        trainer = build(tmp_path / "torch", loss_scaling=TorchLossScaling(8.0, growth_interval=interval))
        trainer.run(LOADER, max_epochs=interval - 1)
    assert "trainer.loss_scaling.growth_interval: 2 -> 3 (the script's is used)" in resumed(caplog)
    assert trainer.state_dict()["update"]["loss_scaling"] == {"scale": 32.0, "good_updates": 1}


def test_a_batch_size_is_told_where_it_moves_no_sample(tmp_path: Path, caplog: Any) -> None:
    """It makes the updates larger at the same learning rate, as accumulation does, in the middle of an epoch and at its end."""
    samples = torch.ones(24, 3)
    build(tmp_path).run(ResumableLoader(samples, batch_size=4, shuffle=True), max_iters=2)
    build(tmp_path).run(ResumableLoader(samples, batch_size=8, shuffle=True), max_epochs=2)
    build(tmp_path).run(ResumableLoader(samples, batch_size=2, shuffle=True), max_epochs=3)
    lines = [line for line in caplog.messages if "not that with which" in line]
    assert ["batch_size: 4 -> 8" in lines[0], "batch_size: 8 -> 2" in lines[1], len(lines)] == [True, True, 2]


def test_another_class_of_loss_scaling_is_refused_by_its_name(tmp_path: Path, caplog: Any) -> None:
    """Both names and the remedy, which is a fresh scale; nothing of the run is changed."""
    build(tmp_path, loss_scaling=TorchLossScaling(8.0)).run(LOADER, max_epochs=1)
    trainer = build(tmp_path, loss_scaling=FairseqLossScaling(4.0))
    with pytest.raises(CheckpointError, match=r"TorchLossScaling wrote the scale .* this run has FairseqLossScaling") as caught:
        trainer.run(LOADER, max_epochs=2)
    assert "leave_out=('loss_scaling',)" in str(caught.value)
    assert len(str(caught.value)) < 600

    trainer = build(tmp_path, loss_scaling=FairseqLossScaling(4.0), leave_out=("loss_scaling",))
    trainer.run(LOADER, max_epochs=2)
    assert (trainer.state.iteration, trainer.state_dict()["update"]["loss_scaling"]["scale"]) == (6, 4.0)
    assert "not used" in resumed(caplog)


def test_a_loss_scaling_where_there_was_none_starts_fresh(tmp_path: Path, caplog: Any) -> None:
    """A run in fp32 that goes on with one says so; the way back goes on too."""
    build(tmp_path).run(LOADER, max_epochs=1)
    trainer = build(tmp_path, loss_scaling=TorchLossScaling(8.0))
    trainer.run(LOADER, max_epochs=2)
    assert trainer.state_dict()["update"]["loss_scaling"] == {"scale": 8.0, "good_updates": 3}
    assert "has no state for it: loss_scaling" in resumed(caplog)
    trainer = build(tmp_path)
    trainer.run(LOADER, max_epochs=3)
    assert (trainer.state.iteration, trainer.state.update_output and trainer.state.update_output.loss_scale) == (9, 1.0)
    assert "not used, because it is not attached or is left out: loss_scaling" in resumed(caplog)
