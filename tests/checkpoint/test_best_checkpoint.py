"""The checkpoint with the best score: which it is, its mark in the list, its model back in the run and as a file."""

from __future__ import annotations

import errno
import logging
import weakref
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import cuts
import small_checkpoints
from bits import bit_by_bit
from ignite_train import (
    CheckpointError,
    ForwardOutput,
    ResumableLoader,
    TrainEvents,
    UpdateOptions,
    create_evaluator,
    create_trainer,
)
from ignite_train.checkpoint import best, find
from ignite_train.checkpoint.capture import plain_config
from ignite_train.checkpoint.directory import CheckpointDirectory, commit
from ignite_train.handlers import Checkpoint, EarlyStopping, ModelEMA, TrainingMetrics, Validation
from ignite_train.ranks import collectives
from ignite_train.tools.checkpoint_command import checkpoint_command as main
from ranks import run_ranks

SCORES = [3.0, 1.0, 2.0, 4.0]


def job(directory: Path, mode: Any = "min", *, sharded: bool = False, scores: list[float] = SCORES) -> Any:
    """A run that validates and saves after each update, with these scores; and the weights after each."""
    model: nn.Module = cuts.linear()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (idist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer, evaluator = create_trainer(model, optimizer, cuts.forward), create_evaluator(model, cuts.forward)
    evaluator.add_event_handler(
        Events.EPOCH_COMPLETED, lambda: evaluator.state.metrics.update(loss=scores[trainer.state.iteration - 1])
    )
    checkpoint = Checkpoint(directory, every=1, score="loss", mode=mode, keep=99)
    checkpoint.attach(trainer, evaluator=evaluator)
    Validation(evaluator, cuts.cut(cuts.samples(), [4])).attach(trainer, Events.ITERATION_COMPLETED)
    weights: list[Any] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: weights.append(whole(model)))
    return trainer, checkpoint, model, weights


def whole(model: nn.Module) -> dict[str, Any]:
    values = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()}
    return {name: value.tolist() for name, value in values.items()}


@pytest.mark.parametrize(("mode", "update"), [("min", 2), ("max", 4)], ids=["min", "max"])
def test_the_best_comes_back(mode: str, update: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its path and score; its weights in the model; the same by the command, which marks it in the list."""
    trainer, checkpoint, model, weights = job(tmp_path, mode)
    assert checkpoint.best is None
    trainer.run(cuts.cut(cuts.samples(), [8] * 4), max_epochs=1)
    path = tmp_path / ("update-00000002" if mode == "min" else "update-00000004.1")  # saved again at the end of the run
    assert checkpoint.best == (path, SCORES[update - 1])
    assert best(tmp_path).path == path  # type: ignore[union-attr]
    assert checkpoint.load_best() == checkpoint.best
    assert whole(model) == weights[update - 1] != weights[update - 2]

    assert main(["list", str(tmp_path)]) == 0
    marked = [line.partition(" ")[0] for line in capsys.readouterr().out.splitlines() if ", best" in line]
    assert marked == [path.name]
    assert main(["consolidate", str(tmp_path), "--best", "--output", str(tmp_path / "best.pt")]) == 0
    assert bit_by_bit(torch.load(tmp_path / "best.pt")) == bit_by_bit(dict(model.state_dict()))


def test_a_script_may_keep_the_checkpoint_alone(tmp_path: Path) -> None:
    """Without the trainer it still tells of its files and loads the best; an evaluation is not saved, and no other run is."""
    trainer, checkpoint, model, weights = job(tmp_path, "min")
    trainer.run(cuts.cut(cuts.samples(), [8] * 4), max_epochs=1)
    evaluator, reference = checkpoint._run.evaluator, weakref.ref(trainer)
    evaluator.remove_event_handler(
        evaluator._handlers[Events.EPOCH_COMPLETED][0][0], Events.EPOCH_COMPLETED
    )  # it has the trainer
    del trainer
    assert reference() is None
    evaluator.run(cuts.cut(cuts.samples(), [4]))
    assert checkpoint.latest.name == "update-00000004.1"
    assert checkpoint.load_best().path == tmp_path / "update-00000002"
    assert whole(model) == weights[1]
    with pytest.raises(RuntimeError, match=r"^save\(\) was called when the trainer was gone; keep the trainer until then"):
        checkpoint.save()


@pytest.mark.parametrize("leave_out", [(), ("ModelEMA",)], ids=["unknown", "left out"])
def test_without_the_trainer_no_other_weights_are_loaded_for_an_average(
    leave_out: tuple[str, ...], tmp_path: Path, caplog: Any
) -> None:
    """It was attached behind the checkpoint, and no run has asked for it since. One that is left out is named in a warning."""

    def build(*, runs: bool) -> tuple[Checkpoint, Any]:
        model = cuts.linear()
        trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), cuts.forward)
        evaluator = create_evaluator(model, cuts.forward)
        checkpoint, ema = Checkpoint(tmp_path, score="loss", mode="min", leave_out=leave_out), ModelEMA()
        checkpoint.attach(trainer, evaluator=evaluator)
        ema.attach(trainer)
        ema.use_in(evaluator)
        if runs:
            trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: evaluator.run(cuts.cut(cuts.samples(), [4])))
            trainer.run(cuts.cut(cuts.samples(), [8] * 4), max_epochs=1)
        return checkpoint, evaluator

    build(runs=True)
    checkpoint, _ = build(runs=False)
    refused = pytest.raises(RuntimeError, match=r"load_best\(\) was called when the trainer was gone; keep the trainer")
    with nullcontext() if leave_out else refused:
        checkpoint.load_best()
    assert ("has no state of ModelEMA" in caplog.text) == bool(leave_out)


def test_of_equal_scores_the_first(tmp_path: Path) -> None:
    """Two checkpoints have the same score."""
    trainer, checkpoint, _, _ = job(tmp_path, scores=[2.0, 1.0, 1.0, 3.0])
    trainer.run(cuts.cut(cuts.samples(), [8] * 4), max_epochs=1)
    assert checkpoint.best.path.name == "update-00000002"


def test_loaded_weights_do_not_have_the_score_of_the_last_ones(tmp_path: Path) -> None:
    """They may be saved at the end of the script, in the place of those that were evaluated after that update."""
    trainer, checkpoint, model, weights = job(tmp_path)
    trainer.run(cuts.cut(cuts.samples(), [8] * 4), max_epochs=1)
    assert scores_in(tmp_path) == {1: 3.0, 2: 1.0, 3: 2.0, 4: 4.0}
    checkpoint.load_best()
    checkpoint.save()
    assert scores_in(tmp_path) == {1: 3.0, 2: 1.0, 3: 2.0, 4: None}
    assert whole(model) == weights[1]
    assert checkpoint.best == (tmp_path / "update-00000002", 1.0)


def test_a_score_of_zero_is_a_score(tmp_path: Path) -> None:
    """It is lower than a half."""
    trainer, checkpoint, _, _ = job(tmp_path, scores=[2.0, 0.0, 0.5, 3.0])
    trainer.run(cuts.cut(cuts.samples(), [8] * 4), max_epochs=1)
    assert checkpoint.best == (tmp_path / "update-00000002", 0.0)


def scored(
    directory: Path,
    scores: dict[int, float],
    updates: int,
    *,
    metric: str = "loss",
    disk: Any = None,
    resume: str | Path = "auto",
    **options: Any,
) -> Checkpoint:
    """A run that saves, without `every`, only at its end and for its scores, which are given by the update that they are of."""
    model = cuts.linear()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), cuts.forward)
    evaluator = create_evaluator(model, cuts.forward)
    evaluator.add_event_handler(
        Events.EPOCH_COMPLETED, lambda: evaluator.state.metrics.update({metric: scores[trainer.state.iteration]})
    )
    checkpoint = Checkpoint(directory, score=metric, **{"every": 10**6, "keep": 1, **options})
    checkpoint.saver.directory.disk = disk or checkpoint.saver.directory.disk
    checkpoint.attach(trainer, evaluator=evaluator)

    @trainer.on(Events.STARTED | Events.ITERATION_COMPLETED)
    def evaluate() -> None:
        if trainer.state.iteration in scores:
            evaluator.run(cuts.cut(cuts.samples(), [4]))

    trainer.run(cuts.cut(cuts.samples(), [4] * 8), max_iters=updates, resume=resume)
    return checkpoint


def scores_in(directory: Path) -> dict[int, float | None]:
    return {entry.manifest.update: entry.manifest.score for entry in find(directory) if entry.manifest}


def test_the_score_of_weights_that_were_not_saved_is_not_the_best(tmp_path: Path) -> None:
    """The weights of the beginning are the best of all; the best that there are on the disk is kept."""
    checkpoint = scored(tmp_path, {0: 0.1, 1: 0.5, 2: 0.4, 3: 0.6}, 4)
    assert scores_in(tmp_path) == {2: 0.4, 4: None}
    assert checkpoint.best == (tmp_path / "update-00000002", 0.4)


def test_a_score_that_is_only_as_good_is_not_saved(tmp_path: Path) -> None:
    """A metric that stands still, such as an accuracy of 1, does not cost a checkpoint with each evaluation."""
    scored(tmp_path, {1: 1.0, 2: 1.0, 3: 1.0}, 4)
    assert scores_in(tmp_path) == {1: 1.0, 4: None}


@pytest.mark.parametrize("score", [float("-inf"), float("nan")], ids=str)
def test_a_score_that_is_not_finite_is_not_the_best(score: float, tmp_path: Path) -> None:
    """No checkpoint has it, so it must not keep later ones from being the best."""
    scored(tmp_path, {1: 5.0, 2: score, 3: 3.0, 4: 4.0}, 5)
    assert scores_in(tmp_path) == {3: 3.0, 5: None}


def test_of_several_evaluations_after_one_update_the_first_counts(tmp_path: Path) -> None:
    """A test set at the end, evaluated by the evaluator of the validation, does not decide which weights are the best."""
    trainer, checkpoint, _, _ = job(tmp_path, scores=[2.0, 1.0, 3.0])
    evaluator = checkpoint._run.evaluator
    assert evaluator is not None
    test_score = evaluator.append_event_handler(  # type: ignore[attr-defined]
        Events.EPOCH_COMPLETED, lambda: trainer.should_terminate and evaluator.state.metrics.update(loss=0.5)
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: trainer.terminate())
    trainer.add_event_handler(Events.COMPLETED, lambda: evaluator.run(cuts.cut(cuts.samples(), [4])))
    trainer.run(cuts.cut(cuts.samples(), [8] * 4), max_epochs=1)
    test_score.remove()
    assert scores_in(tmp_path) == {1: 2.0, 2: 1.0, 3: 3.0}
    assert checkpoint.best == (tmp_path / "update-00000002", 1.0)


@pytest.mark.parametrize("asynchronous", [True, False], ids=["beside the run", "in the run"])
def test_a_best_that_could_not_be_written_is_not_the_best(asynchronous: bool, tmp_path: Path) -> None:
    """The disk fails for the best of all, and the run trains on: the next best is kept, though the lost one was better."""

    class FailsOnce(small_checkpoints.QuickDisk):
        files = 0

        def create(self, path: Path) -> int:
            self.files += path.suffix == ".safetensors"
            if self.files == 2 and path.suffix == ".safetensors":
                raise OSError(errno.EIO, "on purpose")
            return super().create(path)

    scores = {1: 5.0, 2: 1.0, 3: 2.0, 4: 3.0}
    scored(tmp_path, scores, 5, disk=FailsOnce(), on_error="warn", asynchronous=asynchronous)
    assert scores_in(tmp_path) == {3: 2.0, 5: None}


def test_as_many_of_the_best_are_saved_as_stay(tmp_path: Path) -> None:
    """The second and the third best stay too, although each was worse than the best when it was found, also after a restart."""
    scores = {1: 0.3, 2: 0.5, 3: 0.4, 4: 0.6, 5: 0.35, 6: 0.9}
    scored(tmp_path, scores, 7, keep_best=3)
    assert scores_in(tmp_path) == {1: 0.3, 3: 0.4, 5: 0.35, 7: None}
    scored(tmp_path, {8: 0.38, 9: 0.39}, 10, keep_best=3)
    assert scores_in(tmp_path) == {1: 0.3, 5: 0.35, 8: 0.38, 10: None}


@pytest.mark.parametrize(("keep", "of_update_3"), [(1, [0.1]), (99, [0.1, 0.5])], ids=["few stay", "all stay"])
def test_a_rewind_does_not_remove_the_best(tmp_path: Path, keep: int, of_update_3: list[float]) -> None:
    """Another line from an earlier checkpoint comes to the same updates with other scores: the best of both lines stays."""
    options: dict[str, Any] = {"every": 1, "keep": keep, "keep_every": 2}
    scored(tmp_path, {3: 0.1, 4: 0.2}, 5, **options)
    checkpoint = scored(tmp_path, {3: 0.5, 4: 0.4}, 5, resume=tmp_path / "update-00000002", **options)
    assert checkpoint.best == (tmp_path / "update-00000003", 0.1)
    assert checkpoint.load_best() == checkpoint.best
    manifests = [entry.manifest for entry in find(tmp_path) if entry.manifest]
    assert [manifest.score for manifest in manifests if manifest.update == 3] == of_update_3


# --- which state an evaluation belongs to ---

TOO_LATE = [
    Events.EPOCH_STARTED,
    Events.DATALOADER_STOP_ITERATION,
    Events.GET_BATCH_STARTED,
    Events.GET_BATCH_COMPLETED,
    Events.ITERATION_STARTED,
    TrainEvents.MICRO_BATCH_STARTED,
    TrainEvents.GRADIENTS_REDUCED,
    TrainEvents.GRADIENTS_READY,
]
IN_TIME = [TrainEvents.STEP_COMPLETED, Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED, Events.COMPLETED]
HELD_OUT = cuts.cut(cuts.samples(), [16])


def by_hand(model: nn.Module) -> float:
    """The mean loss over the held-out samples."""
    x, y, w = HELD_OUT[0]
    with torch.no_grad():
        return float((w * (x @ model.weight[0] + model.bias - y) ** 2).sum() / w.sum())  # type: ignore[operator]


def turning(directory: Path, **options: Any) -> Any:
    """A run whose weights get better until update 4 and then worse; and the scores by hand of the weights after each update."""
    model = cuts.linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    trainer, evaluator = create_trainer(model, optimizer, cuts.forward), create_evaluator(model, cuts.forward)
    checkpoint = Checkpoint(directory, score="loss", keep=1, **{"every": 10**6, **options})
    checkpoint.attach(trainer, evaluator=evaluator)
    states = {0: by_hand(model)}

    @trainer.on(Events.ITERATION_COMPLETED)
    def turn() -> None:
        states[trainer.state.iteration] = by_hand(model)
        if trainer.state.iteration == 4:
            optimizer.param_groups[0]["lr"] = -0.02

    return trainer, evaluator, checkpoint, model, states


BATCHES = cuts.cut(cuts.samples(), [8] * 2)  # of the same samples, so that each of the first updates is an improvement


def claims_what_it_has(checkpoint: Checkpoint, model: nn.Module) -> int:
    """Loads the best, compares its score with that by hand of the loaded weights, and returns its update."""
    path, score = checkpoint.load_best()
    assert by_hand(model) == pytest.approx(score, rel=1e-9)
    return int(path.name.removeprefix("update-").partition(".")[0])


@pytest.mark.parametrize("how", ["Validation", "plain"])
@pytest.mark.parametrize("event", [*IN_TIME, *TOO_LATE], ids=str)
def test_the_best_has_the_score_that_it_claims(tmp_path: Path, event: Any, how: str, caplog: pytest.LogCaptureFixture) -> None:
    """At whatever event the run evaluates, the score is of the weights that are kept; if none are kept, a warning says so."""
    trainer, evaluator, checkpoint, model, states = turning(tmp_path)
    stopping, validation = EarlyStopping(evaluator, patience=99), Validation(evaluator, HELD_OUT)
    stopping.attach(trainer)
    found: list[float] = []
    evaluator.add_event_handler(Events.COMPLETED, lambda: found.append(by_hand(model)))
    if how == "Validation":
        validation.attach(trainer, event)
    else:
        trainer.add_event_handler(event, lambda *_: evaluator.run(HELD_OUT))
    with caplog.at_level(logging.WARNING):
        trainer.run(BATCHES, max_epochs=4)
    warnings = [record.getMessage() for record in caplog.records if "is not kept" in record.getMessage()]

    assert states[4] == min(states.values())
    for handler in (stopping, *([validation] if how == "Validation" else ())):
        assert handler.best == pytest.approx(states[handler.best_update], rel=1e-9)
    if event in IN_TIME:
        assert warnings == []
        assert states[claims_what_it_has(checkpoint, model)] == pytest.approx(min(found), rel=1e-9)
    else:
        assert len(warnings) == 1
        assert "evaluate at ITERATION_COMPLETED or EPOCH_COMPLETED" in warnings[0]
        assert checkpoint.best is None


def test_a_best_that_is_missed_is_told_although_the_next_update_is_evaluated_in_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The weights after update 4 are the best, and are evaluated too late; those after update 5 take their place."""
    trainer, evaluator, checkpoint, model, _ = turning(tmp_path)
    trainer.add_event_handler(
        Events.ITERATION_STARTED(once=5) | TrainEvents.STEP_COMPLETED(once=5), lambda: evaluator.run(HELD_OUT)
    )
    with caplog.at_level(logging.WARNING):
        trainer.run(BATCHES, max_epochs=4)
    assert "update 4 has one of the best scores and is not kept" in caplog.text
    assert claims_what_it_has(checkpoint, model) == 5


@pytest.mark.parametrize("options", [{}, {"every": 2}], ids=["never saved", "saved before the evaluation"])
@pytest.mark.parametrize("saves", [True, False], ids=["saves", "does not save"])
def test_the_best_of_a_session(tmp_path: Path, options: dict[str, Any], saves: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Evaluated between two updates, a state has its score if the loop saves it before the next update; or a warning comes."""
    trainer, evaluator, checkpoint, model, states = turning(tmp_path, **options)
    with caplog.at_level(logging.WARNING), trainer.session():
        for micro_batch in BATCHES * 4:
            trainer.update([micro_batch])
            evaluator.run(HELD_OUT)
            if saves:
                checkpoint.save()
    assert states[4] == min(states.values())
    assert claims_what_it_has(checkpoint, model) == (4 if saves else 8)  # the last state is saved by the end of the session
    assert ("update 1 has one of the best scores and is not kept" in caplog.text) is not saves


@pytest.mark.parametrize("updates", [4, 8], ids=["the last is the best", "an earlier one is"])
def test_the_best_of_several_runs(tmp_path: Path, updates: int, caplog: pytest.LogCaptureFixture) -> None:
    """Evaluated between two runs, a state has its score if the script saves it then."""
    trainer, evaluator, checkpoint, model, states = turning(tmp_path)
    with caplog.at_level(logging.WARNING):
        evaluator.run(HELD_OUT)  # before the first update: no state of a run
        for limit in range(2, updates + 1, 2):
            trainer.run(BATCHES, max_iters=limit)
            evaluator.run(HELD_OUT)
            checkpoint.save()
    assert states[4] == min(states.values())
    assert claims_what_it_has(checkpoint, model) == 4
    assert "is not kept" not in caplog.text
    before = scores_in(tmp_path)
    evaluator.run(HELD_OUT)  # of the loaded weights, which are not those after the last update
    checkpoint.save()
    assert scores_in(tmp_path)[updates] is None
    trainer.run(BATCHES, max_iters=updates + 1)
    assert {update: score for update, score in scores_in(tmp_path).items() if score is not None}.items() <= before.items()
    assert scores_in(tmp_path)[updates + 1] is None


def test_a_best_between_two_runs_that_is_not_saved_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is not saved on its own: what the script changes before the next run would be saved as if it had been evaluated."""
    trainer, evaluator, checkpoint, model, _ = turning(tmp_path)
    trainer.run(BATCHES, max_iters=2)
    evaluator.run(HELD_OUT)
    with pytest.raises(CheckpointError, match=r"is not saved; call checkpoint.save\(\) after the evaluation"):
        checkpoint.load_best()
    nn.init.zeros_(model.weight)
    with caplog.at_level(logging.WARNING):
        trainer.run(BATCHES, max_iters=4)
    assert "update 2 has one of the best scores and is not kept" in caplog.text
    assert {*scores_in(tmp_path).values()} == {None}


def test_an_evaluation_before_the_run_resumes_saves_nothing(tmp_path: Path) -> None:
    """The new model would be the newest in the directory, and the run would start from it."""
    turning(tmp_path)[0].run(BATCHES, max_epochs=1)
    trainer, evaluator, *_ = turning(tmp_path)
    evaluator.run(HELD_OUT)
    trainer.run(BATCHES, max_epochs=2)
    assert trainer.state.num_steps == 4
    assert scores_in(tmp_path) == {4: None}


def test_the_last_state_of_a_run_that_was_stopped_has_its_score(tmp_path: Path) -> None:
    """TERMINATE saves it, and the evaluation at COMPLETED comes after that."""
    trainer, evaluator, checkpoint, model, _ = turning(tmp_path)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), lambda: trainer.terminate())
    trainer.add_event_handler(Events.COMPLETED, lambda: evaluator.run(HELD_OUT))
    trainer.run(BATCHES, max_epochs=4)
    assert checkpoint.best is not None
    assert claims_what_it_has(checkpoint, model) == 4


def _between_runs(directory: str) -> Any:
    model, options = cuts.linear(), UpdateOptions(reduction="explicit")
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.02), cuts.forward, options=options)
    evaluator = create_evaluator(model, cuts.forward)
    checkpoint = Checkpoint(directory, score="loss", keep=1)
    checkpoint.attach(trainer, evaluator=evaluator)
    for epoch in (1, 2):
        trainer.run(cuts.shard([[8], [8]]), max_epochs=epoch)
        evaluator.run(HELD_OUT)
        checkpoint.save()
    path, score = checkpoint.load_best()
    return path.name, score, by_hand(model)


@pytest.mark.slow
def test_two_ranks_keep_the_best_of_several_runs(tmp_path: Path) -> None:
    """They save together what they have evaluated between two runs, and after the last one."""
    first, second = run_ranks(_between_runs, str(tmp_path))
    assert first == second
    assert first[0].startswith("update-00000002")
    assert first[2] == pytest.approx(first[1], rel=1e-9)


def test_scores_of_another_metric_do_not_compete(tmp_path: Path) -> None:
    """The script names another metric: its best are found, and the best by the one before stays too."""
    scored(tmp_path, {1: 2.5, 2: 1.5, 3: 2.0}, 3)
    assert scores_in(tmp_path) == {2: 1.5, 3: 2.0}
    checkpoint = scored(tmp_path, {3: 0.2, 4: 0.3, 5: 0.9, 6: 0.5}, 7, metric="accuracy", mode="max")
    assert scores_in(tmp_path) == {2: 1.5, 5: 0.9, 7: None}
    assert checkpoint.best == (tmp_path / "update-00000005", 0.9)


def test_scores_of_two_earlier_metrics_do_not_compete(tmp_path: Path) -> None:
    """The best by each of them stays, although a lower one is better for both."""
    for metric, (number, score) in {"loss": (1, 9.0), "error": (2, 0.5), "distance": (3, 4.0)}.items():
        scored(tmp_path, {number: score}, number, metric=metric)
    assert scores_in(tmp_path) == {1: 9.0, 2: 0.5, 3: 4.0}


def test_without_a_metric_the_best_of_the_script_before_stays(tmp_path: Path) -> None:
    """The script says nothing of the best any more: those with a high score are not taken for the worst."""
    scored(tmp_path, {1: 0.2, 2: 0.9, 3: 0.5}, 3, metric="accuracy", mode="max")
    model = cuts.linear()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), cuts.forward)
    Checkpoint(tmp_path, every=1, keep=1).attach(trainer)
    trainer.run(cuts.cut(cuts.samples(), [4] * 8), max_iters=5)
    assert scores_in(tmp_path) == {2: 0.9, 5: None}


def test_without_a_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checkpoints without a score, or that do not say which scores are better, are not guessed at; nor is a run disturbed."""
    trainer, checkpoint, _, _ = job(tmp_path / "run")
    with pytest.raises(
        CheckpointError, match=r"no checkpoint with a score; no evaluation has found a finite 'loss' yet; attach"
    ):
        checkpoint.load_best()
    trainer.add_event_handler(Events.COMPLETED, checkpoint.load_best)
    with pytest.raises(RuntimeError, match="called during the run"):
        trainer.run(cuts.cut(cuts.samples(), [8] * 4), max_epochs=1)

    plain = tmp_path / "plain"
    plain.mkdir()
    small_checkpoints.save(plain, 1)
    assert best(plain) is None
    assert main(["consolidate", str(plain), "--best"]) == 1
    assert "has no checkpoint with a score" in capsys.readouterr().err
    small_checkpoints.save(plain, 2, score=1.0)
    with pytest.raises(CheckpointError, match="does not say whether a lower score is better"):
        best(plain)
    assert main(["list", str(plain)]) == 0
    assert "best" not in capsys.readouterr().out


def layers(outputs: int, *, tied: bool = False) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, outputs))
    if tied:
        model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            partial(layers, 3),
            r"is of another model: 2\.weight is float32 of shape \(1, 2\), and this run has .*\(3, 2\)",
        ),
        (partial(layers, 1, tied=True), r"'0\.weight' and '1\.weight' are one tensor in this run, and differ there"),
    ],
    ids=["shape", "tied"],
)
def test_the_best_of_another_model_is_refused(other: Any, says: str, tmp_path: Path) -> None:
    """In one line, and the model keeps all its weights."""
    config = plain_config({}, {"best": {"metric": "loss", "mode": "min"}})
    commit(
        CheckpointDirectory(tmp_path, small_checkpoints.QuickDisk()),
        small_checkpoints.contents(dict(layers(1).state_dict())),
        small_checkpoints.manifest(1, score=0.5, config=config),
        small_checkpoints.keep(1),
        collectives.gather_objects,
    )
    model = other()
    before = bit_by_bit(dict(model.state_dict()))
    checkpoint = Checkpoint(tmp_path)
    checkpoint.attach(create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), cuts.forward))
    with pytest.raises(CheckpointError, match=says) as error:
        checkpoint.load_best()
    assert "\n" not in str(error.value)
    assert bit_by_bit(dict(model.state_dict())) == before


def _on_this_rank(directory: str) -> Any:
    trainer, checkpoint, model, weights = job(Path(directory), sharded=True)
    trainer.run(cuts.shard([[4] * 4, [4] * 4]), max_epochs=1)
    found = checkpoint.load_best()
    return found.path.name, whole(model) == weights[1] != weights[3], whole(model)


@pytest.mark.slow
def test_two_ranks_load_their_shards(tmp_path: Path) -> None:
    """Of a sharded model each rank gets its shards of the best weights."""
    first, second = run_ranks(_on_this_rank, str(tmp_path))
    assert first == second
    assert first[:2] == ("update-00000002", True)


def _stopped(directory: Path, stop: int | None) -> Any:
    """A run with dropout that validates at its ends too; the weights, and the loss of each epoch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))

    def forward(model: nn.Module, x: torch.Tensor) -> ForwardOutput:
        return ForwardOutput((model(x) - x.sum(1, keepdim=True)).square().sum(), len(x))

    trainer = create_trainer(model, torch.optim.AdamW(model.parameters(), lr=0.01), forward)
    evaluator, losses = create_evaluator(model, forward), dict[int, float]()
    held_out: Any = DataLoader(x[:16], batch_size=8)  # type: ignore[arg-type]  # its passes draw from torch's generator
    Validation(evaluator, held_out).attach(trainer, Events.EPOCH_COMPLETED | Events.COMPLETED)
    TrainingMetrics(memory=False).attach(trainer, Events.EPOCH_COMPLETED)
    trainer.add_event_handler(
        Events.EPOCH_COMPLETED, lambda: losses.update({trainer.state.epoch: trainer.state.metrics["loss"]})
    )
    Checkpoint(directory, every=1000, score="loss").attach(trainer, evaluator=evaluator)
    if stop is not None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop), lambda: trainer.terminate())
    trainer.run(ResumableLoader(x, batch_size=8, shuffle=True), max_epochs=3)  # type: ignore[arg-type]
    return bit_by_bit(model.state_dict()), losses


@pytest.mark.parametrize("stop", [3, 11, 19])
def test_a_run_that_was_stopped_and_validated_for_the_best_continues_bitwise(stop: int, tmp_path: Path) -> None:
    """The save for the score replaced the save at TERMINATE, and had the random numbers and intervals after COMPLETED."""
    weights, losses = _stopped(tmp_path / "whole", None)
    _stopped(tmp_path / "stopped", stop)
    assert len(scores_in(tmp_path / "stopped")) == 1 or stop > 8
    resumed, later = _stopped(tmp_path / "stopped", None)
    assert resumed == weights
    assert later == {epoch: loss for epoch, loss in losses.items() if epoch > stop // 8}
