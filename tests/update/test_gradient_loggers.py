"""Ignite's loggers of gradients write the mean gradient with `keep_gradients`, and without it a line says what to do."""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import MagicMock

import ignite.distributed as idist
import numpy as np
import pytest
import torch
from ignite.engine import Events
from ignite.handlers import TensorboardLogger
from ignite.handlers.tensorboard_logger import GradsHistHandler, GradsScalarHandler, WeightsScalarHandler

import cuts
from ignite_train import Trainer, TrainEvents, UpdateOptions, create_trainer
from ranks import run_ranks

HANDLERS = {"scalar": GradsScalarHandler, "histogram": GradsHistHandler}


def make(*, keep: bool, max_grad_norm: float | None = None) -> tuple[Trainer, torch.nn.Module]:
    torch.manual_seed(3)
    model = idist.auto_model(cuts.linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    options = UpdateOptions(keep_gradients=keep)
    trainer = create_trainer(
        model, optimizer, cuts.forward, accumulation_steps=2, max_grad_norm=max_grad_norm, options=options, protect=False
    )
    return trainer, model


def logged(trainer: Trainer, log_handler: Any, event: Any = Events.ITERATION_COMPLETED) -> list[tuple[str, Any, int]]:
    """What Ignite's logger writes: tag, value, step."""
    written: list[tuple[str, Any, int]] = []
    logger = MagicMock(spec=TensorboardLogger, writer=MagicMock())
    logger.writer.add_scalar = lambda tag, value, step: written.append((tag, float(value), step))
    logger.writer.add_histogram = lambda *, tag, values, global_step: written.append((tag, np.array(values), global_step))
    TensorboardLogger.attach(logger, trainer, log_handler, event)
    return written


def curves(max_grad_norm: float | None) -> list[tuple[float, float]]:
    """Of each update and parameter: the norm that the logger wrote, and that of the clipped mean gradient."""
    trainer, model = make(keep=True, max_grad_norm=max_grad_norm)
    written = logged(trainer, GradsScalarHandler(model, reduction=torch.norm))
    norms: list[float] = []

    @trainer.on(TrainEvents.GRADIENTS_READY)
    def note() -> None:
        output = trainer.state.update_output
        assert output is not None
        norms.extend(float(output.clip_coefficient * gradient.norm()) for gradient in trainer.gradients().values())

    data = cuts.cut(cuts.samples(), [4, 12, 7, 9, 16, 16])
    trainer.run(data[idist.get_rank() :: idist.get_world_size()], max_epochs=2)
    return list(zip([value for _, value, _ in written], norms, strict=True))


@pytest.mark.parametrize("max_grad_norm", [None, 0.1], ids=["whole", "clipped"])
def test_the_norms_are_those_of_the_mean_gradient(max_grad_norm):
    """One point per update and parameter, each the norm of what the optimizer stepped along."""
    points = curves(max_grad_norm)
    assert len(points) == 2 * 3 * 2  # parameters, updates, epochs
    for value, expected in points:
        assert value == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_ranks_log_the_gradient_of_all():
    """On two ranks with unequal data both log the same curve, that of the reduced mean."""
    first, second = run_ranks(curves, None)
    assert first == second
    assert all(value == pytest.approx(expected, rel=1e-6) for value, expected in first)


def test_histograms_hold_the_mean_gradient():
    """The values of the histogram are the entries of the gradient."""
    trainer, model = make(keep=True)
    written = logged(trainer, GradsHistHandler(model))
    means: list[Any] = []
    trainer.add_event_handler(TrainEvents.GRADIENTS_READY, lambda: means.extend(trainer.gradients().values()))
    trainer.run(cuts.cut(cuts.samples(), [4, 12, 7, 9]))
    assert [step for _, _, step in written] == [1, 1, 2, 2]
    for (_, values, _), mean in zip(written, means, strict=True):
        np.testing.assert_allclose(values, mean.cpu().numpy(), rtol=1e-6)


@pytest.mark.parametrize("name", sorted(HANDLERS))
def test_cleared_gradients_are_said_once(caplog, name):
    """Attached without `keep_gradients`, nothing is written, and one line says what to pass."""
    trainer, model = make(keep=False)
    written = logged(trainer, HANDLERS[name](model), Events.ITERATION_COMPLETED(every=1))
    trainer.run(cuts.cut(cuts.samples(), [4, 12]), max_epochs=1)
    trainer.run(cuts.cut(cuts.samples(), [4, 12]), max_epochs=2)
    assert written == []
    (line,) = [record.message for record in caplog.records if "attached" in record.message]
    assert line == (
        f"{HANDLERS[name].__name__} is attached to Events.ITERATION_COMPLETED, where .grad is None, so that it writes nothing; "
        "pass UpdateOptions(keep_gradients=True) and attach it to Events.ITERATION_COMPLETED"
    )


@pytest.mark.parametrize("keep", [False, True], ids=["cleared", "kept"])
def test_gradients_that_are_no_mean_yet_are_said(caplog, keep):
    """Within the update `.grad` is a sum, whether gradients are kept or not."""
    trainer, model = make(keep=keep)
    logged(trainer, GradsScalarHandler(model), TrainEvents.GRADIENTS_READY)
    trainer.run(cuts.cut(cuts.samples(), [4, 12]))
    assert "attached to TrainEvents.GRADIENTS_READY, where .grad is a sum" in caplog.text


def test_of_several_loggers_one_is_said(caplog):
    """What to pass is the same for all of them."""
    trainer, model = make(keep=False)
    for name in sorted(HANDLERS):
        logged(trainer, HANDLERS[name](model))
    trainer.run(cuts.cut(cuts.samples(), [4, 12]))
    assert sum("is attached to" in record.message for record in caplog.records) == 1


def test_what_is_right_is_not_warned_about(caplog):
    """Nothing is said of loggers of gradients that are kept, and of loggers of weights."""
    caplog.set_level(logging.WARNING)
    trainer, model = make(keep=True)
    logged(trainer, GradsScalarHandler(model))
    logged(make(keep=False)[0], WeightsScalarHandler(model))
    trainer.run(cuts.cut(cuts.samples(), [4, 12]))
    assert "attached" not in caplog.text


def test_before_the_norm_is_taken_it_is_the_mean(caplog):
    """In GRADIENTS_REDUCED a logger writes the mean gradient, without `keep_gradients` and without a warning."""
    trainer, model = make(keep=False)
    written = logged(trainer, GradsScalarHandler(model, reduction=torch.norm), TrainEvents.GRADIENTS_REDUCED)
    norms: list[float] = []
    trainer.add_event_handler(
        TrainEvents.GRADIENTS_READY, lambda: norms.extend(float(g.norm()) for g in trainer.gradients().values())
    )
    trainer.run(cuts.cut(cuts.samples(), [4, 12]))
    assert [value for _, value, _ in written] == pytest.approx(norms, rel=1e-12)
    assert len(written) == 2
    assert "attached" not in caplog.text
