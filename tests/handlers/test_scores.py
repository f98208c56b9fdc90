"""Handlers that react to a validation score: when they act, in what order, on all ranks, and after a resumption."""

from __future__ import annotations

import itertools
import logging
import math
import random
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import cuts
from bits import bit_by_bit
from ignite_train import CheckpointError, Evaluator, Trainer, TrainEvents, create_evaluator, create_trainer
from ignite_train.handlers import Checkpoint, EarlyStopping, ReduceOnPlateau, Validation
from ignite_train.kinds_of_handlers import ScoreHandler
from mistakes import Mistake, assert_one_line
from ranks import run_ranks

DATA = cuts.cut(cuts.samples(), [8, 8, 8])


def replicated(model: nn.Module) -> nn.Module:
    """The model in DistributedDataParallel on several ranks."""
    return nn.parallel.DistributedDataParallel(model) if idist.get_world_size() > 1 else model


class Scripted:
    """A trainer and an evaluator whose score after update N is `scores[N - 1]`, validated after each update."""

    def __init__(self, scores: Sequence[float]) -> None:
        self.model = replicated(cuts.linear())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.trainer = create_trainer(self.model, self.optimizer, cuts.forward)
        self.evaluator = create_evaluator(self.model, cuts.forward)
        self.validation = Validation(self.evaluator, DATA[:1])
        self.scores, self.length = scores, len(scores)
        self.evaluator.add_event_handler(Events.EPOCH_COMPLETED, self._replace)

    def _replace(self) -> None:
        self.evaluator.state.metrics["loss"] = self.scores[self.trainer.state.iteration - 1]

    def validate(self) -> None:
        self.validation.attach(self.trainer, Events.ITERATION_COMPLETED)

    def run(self, max_iters: int | None = None, **options: Any) -> int:
        """The update after which it ended."""
        return self.trainer.run(DATA, max_iters=max_iters or self.length, **options).iteration


def test_an_evaluation_before_the_step_is_of_the_update_before() -> None:
    """The weights after each update are reacted to once, at whatever event they are evaluated, and the first weights never."""
    trainer, evaluator = (scripted := Scripted([])).trainer, create_evaluator(scripted.model, cuts.forward)
    found: list[tuple[int, float]] = []

    class Noting(ScoreHandler):
        def on_score(self, trainer: Trainer, score: float) -> None:
            found.append((trainer.updates_done, score))

    Noting(evaluator, "loss", "min").attach(trainer)
    events = Events.ITERATION_STARTED | TrainEvents.GRADIENTS_READY | Events.EPOCH_COMPLETED
    trainer.add_event_handler(events, lambda: evaluator.run(DATA[:1]))
    by_hand: list[float] = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda: by_hand.append(cuts.forward(scripted.model, DATA[0]).loss.item() / float(DATA[0][2].sum())),
    )
    trainer.run(DATA, max_epochs=1)
    assert found == [(update, pytest.approx(score, rel=1e-9)) for update, score in enumerate(by_hand, start=1)]


def _evaluated_without_a_trainer() -> Any:
    scripted = Scripted([])
    trainer, evaluator = scripted.trainer, create_evaluator(scripted.model, cuts.forward)
    stopping = EarlyStopping(evaluator, patience=3)
    assert stopping.evaluator is evaluator
    stopping.attach(trainer)
    trainer.run(DATA, max_epochs=1)
    reference = weakref.ref(trainer)
    scripted.trainer = None  # type: ignore[assignment]
    if idist.get_rank() > 0 or idist.get_world_size() == 1:
        del trainer
        assert reference() is None
    loss = evaluator.run(DATA[:1]).metrics["loss"]
    assert evaluator.run(DATA[:1]).metrics["loss"] == loss
    return stopping.best, stopping.state_dict()["latest_update"], stopping.evaluator is evaluator


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_evaluation_without_a_trainer_changes_nothing(num_ranks: int) -> None:
    """Where one rank alone still has it, the ranks agree about the score nevertheless, and none waits."""
    *_, found = [_evaluated_without_a_trainer()] if num_ranks == 1 else run_ranks(_evaluated_without_a_trainer)
    assert found == (None, 3, True)


# --- the stages of an event ---


def test_a_script_may_choose_another_evaluator_before_it_attaches() -> None:
    """A class of the user's may set the attribute itself."""
    trainer, model = (scripted := Scripted([])).trainer, scripted.model
    one, other = (create_evaluator(model, cuts.forward) for _ in range(2))
    stopping = EarlyStopping(one, "loss", patience=1)
    stopping.evaluator = other
    stopping.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: other.run(DATA[:1]))
    trainer.run(DATA, max_epochs=1)
    assert (stopping.evaluator, stopping.state_dict()["latest_update"]) == (other, 1)


def _noting(calls: list[Any], what: Any) -> Callable[[], None]:
    return lambda: calls.append(what)


@pytest.mark.slow
@pytest.mark.parametrize("event", [Events.ITERATION_COMPLETED, Events.ITERATION_COMPLETED(every=1)], ids=["plain", "filtered"])
def test_the_stages_do_not_depend_on_the_order_of_attaching(event: Any) -> None:
    """Two handlers of each stage, in each of 40 random orders; within a stage the order is the documented one."""
    for seed in range(40):
        trainer, calls = Scripted([1.0]).trainer, []
        stages = {
            "measure": trainer.prepend_event_handler,
            "evaluate": trainer.add_evaluation_handler,
            "react": trainer.add_event_handler,
            "save": trainer.append_event_handler,
        }
        order = [(stage, number) for stage in stages for number in (0, 1)]
        random.Random(seed).shuffle(order)  # noqa: S311
        for stage, number in order:
            stages[stage](event, _noting(calls, (stage, number)))
        trainer.run(DATA, max_iters=1)

        def expected(stage: str, order: Any = order) -> list[Any]:
            attached = [entry for entry in order if entry[0] == stage]
            return attached[::-1] if stage == "measure" else attached

        assert calls == [entry for stage in stages for entry in expected(stage)]


def test_a_stage_is_of_one_event() -> None:
    """A function that saves at one event may react at another, and its place there follows from that."""
    trainer, calls = Scripted([1.0]).trainer, []

    def both(trainer: Trainer) -> None:
        calls.append(trainer.last_event_name)

    trainer.append_event_handler(TrainEvents.STEP_COMPLETED, both)
    trainer.add_event_handler(TrainEvents.STEP_COMPLETED, lambda: calls.append("last of all at STEP_COMPLETED"))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, both)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: calls.append("after both"))
    trainer.run(DATA, max_iters=1)
    assert calls == ["last of all at STEP_COMPLETED", TrainEvents.STEP_COMPLETED, Events.ITERATION_COMPLETED, "after both"]


@pytest.mark.parametrize("seed", range(4))
def test_a_checkpoint_of_the_same_update_has_the_reaction(seed: int, tmp_path: Path) -> None:
    """In any order of attaching: a user's handler sees the validation, and the checkpoint holds the lowered rate and counts."""
    job, seen = Scripted([3.0, 4.0]), []
    stopping = EarlyStopping(job.evaluator, patience=5)
    plateau = ReduceOnPlateau(job.evaluator, ReduceLROnPlateau(job.optimizer, factor=0.25, patience=0, threshold=0))
    attach: list[Callable[[], Any]] = [
        job.validate,
        lambda: stopping.attach(job.trainer),
        lambda: plateau.attach(job.trainer),
        lambda: Checkpoint(tmp_path, every=1, asynchronous=False).attach(job.trainer, evaluator=job.evaluator),
        lambda: job.trainer.add_event_handler(
            Events.ITERATION_COMPLETED,
            lambda: seen.append((job.validation.is_best, stopping.num_bad, job.optimizer.param_groups[0]["lr"])),
        ),
    ]
    random.Random(seed).shuffle(attach)  # noqa: S311
    for one in attach:
        one()
    job.run()
    assert seen == [(True, 0, 1e-3), (False, 1, 2.5e-4)]

    other = Scripted([3.0, 4.0, 5.0])
    counted = EarlyStopping(other.evaluator, patience=5)
    counted.attach(other.trainer)
    Checkpoint(tmp_path).attach(other.trainer, evaluator=other.evaluator)
    other.run(max_iters=3)
    assert (counted.num_bad, other.optimizer.param_groups[0]["lr"]) == (1, 2.5e-4)  # nothing evaluated the third update


# --- a rehearsal of the validation ---


def test_sanity_finds_a_mistake_before_the_first_update() -> None:
    """A misspelt score, and an evaluation that fails, are found before a batch is trained on."""
    for options, error in (({"score": "sampels", "mode": "min"}, ValueError), ({}, ZeroDivisionError)):
        job, seen = Scripted([1.0]), []
        evaluator = create_evaluator(job.model, cuts.forward if options else lambda model, x: 1 // 0)
        Validation(evaluator, DATA, sanity=2, **options).attach(job.trainer)
        job.trainer.add_event_handler(Events.ITERATION_STARTED, _noting(seen, "trained"))
        with pytest.raises(error):
            job.run()
        assert seen == []
    with pytest.raises(ValueError, match="sanity must be at least 0, got -1"):
        Validation(job.evaluator, DATA, sanity=-1)
    assert Validation(job.evaluator, DATA, sanity=False).sanity == 0


def test_sanity_leaves_no_trace(tmp_path: Path) -> None:
    """Its score is not one: nothing reacts, no checkpoint has it, training has the same bits; a resumed run does without it."""
    results = []
    for sanity in (0, 2):
        job, evaluated, logged = Scripted([3.0, 4.0, 2.0]), [], []
        job.validation = Validation(job.evaluator, DATA, sanity=sanity)
        job.validate()
        job.evaluator.add_event_handler(Events.ITERATION_COMPLETED, _noting(evaluated, 1))
        job.evaluator.add_event_handler(Events.COMPLETED, _noting(logged, 1))
        stopping = EarlyStopping(job.evaluator, patience=2)
        stopping.attach(job.trainer)
        checkpoint = Checkpoint(tmp_path / str(sanity), every=99, score="loss")
        checkpoint.attach(job.trainer, evaluator=job.evaluator)
        for max_iters in (1, 3):
            job.run(max_iters=max_iters)
        assert (len(evaluated), len(logged)) == (3 * 3, 3)
        state = [stopping.state_dict(), job.validation.state_dict(), job.model.state_dict(), checkpoint.best.score]  # type: ignore[union-attr]
        results.append(bit_by_bit(state))
    assert results[0] == results[1]


# --- EarlyStopping ---


@pytest.mark.parametrize(
    ("settings", "scores", "ended", "best"),
    [
        ({"patience": 2}, [3.0, 2.0, 2.0, 2.5, 1.0], 4, (2.0, 2)),
        ({"patience": 2}, [3.0, 2.0, 2.5, 1.0, 1.5], 5, (1.0, 4)),
        ({"patience": 2, "mode": "max"}, [1.0, 2.0, 2.0, 1.0, 3.0], 4, (2.0, 2)),
        ({"patience": 1, "min_delta": 0.5}, [3.0, 2.25, 1.75, 1.0], 3, (2.25, 2)),
        ({"patience": 2, "min_delta": 0.5}, [3.0, 2.75, 2.25, 2.0, 1.875, 0.0], 5, (2.25, 3)),
        ({"patience": 1, "min_delta": 0.5, "mode": "max"}, [1.0, 1.75, 2.25, 3.0], 3, (1.75, 2)),
        ({"patience": 2}, [math.nan, 3.0, math.nan, math.nan, 1.0], 4, (3.0, 2)),
        ({"patience": 2}, [math.nan, math.nan, 1.0], 2, (None, None)),
        ({"target": 2.0}, [3.0, 9.0, 9.0, 2.0, 1.0], 4, (2.0, 4)),
        ({"target": 2.0, "mode": "max"}, [1.0, math.nan, 2.5, 3.0], 3, (2.5, 3)),
        ({"target": 2.0, "patience": 2}, [3.0, 3.0, 3.0, 1.0], 3, (3.0, 1)),
        ({"patience": 3}, [3.0, 2.0, 1.0], 3, (1.0, 3)),
    ],
    ids=lambda value: str(value).replace(" ", "") if isinstance(value, dict) else None,
)
def test_the_update_after_which_it_ends(settings: dict[str, Any], scores: list[float], ended: int, best: Any) -> None:
    """Worked out by hand: `patience` evaluations in a row that are not better by more than `min_delta`, or the target."""
    job = Scripted(scores)
    stopping = EarlyStopping(job.evaluator, **settings)
    stopping.attach(job.trainer)
    job.validate()
    assert job.run() == ended
    assert (stopping.best, stopping.best_update) == best


@pytest.mark.parametrize(
    ("settings", "scores", "reason"),
    [
        ({"patience": 1}, [3.0, 2.5, 4.0], "loss was best in update 2 (2.5), 1 evaluation ago, and patience=1"),
        ({"patience": 2}, [math.nan, math.nan], "loss has never been a number, 2 evaluations ago, and patience=2"),
        ({"target": 2.0}, [3.0, 1.5], "loss is 1.5, and target=2"),
    ],
    ids=["patience", "no number", "target"],
)
def test_it_says_why_it_ends(settings: dict[str, Any], scores: list[float], reason: str, caplog: Any) -> None:
    """Once, with the update."""
    job = Scripted(scores)
    EarlyStopping(job.evaluator, **settings).attach(job.trainer)
    job.validate()
    ended = job.run()
    lines = [line for line in caplog.messages if "EarlyStopping" in line]
    assert lines == [f"update {ended}: EarlyStopping ends the run: {reason}"]


def test_a_run_that_it_ends_as_it_is_entered_says_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    """A run in the next cell of a notebook is such; doing what the line says is enough."""
    job = Scripted([3.0, 4.0, 4.0, 4.0, 4.0])
    stopping = EarlyStopping(job.evaluator, patience=1)
    stopping.attach(job.trainer)
    job.validate()
    ended = job.run()
    caplog.clear()
    assert job.run() == ended
    assert [line for line in caplog.messages if "EarlyStopping" in line] == [
        f"update {ended}: EarlyStopping ends the run: loss was best in update 1 (3), 1 evaluation ago, and patience=1; to "
        "continue, give it a larger patience, or another target"
    ]
    stopping.patience = 3
    assert job.run() > ended


def test_a_run_that_it_ended_stays_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same script, started again, adds no update and says why; with a larger patience it continues."""
    scores, ends = [3.0, 4.0, 4.0, 4.0, 4.0, 4.0], []
    for patience in (2, 2, 4):
        job = Scripted(scores)
        EarlyStopping(job.evaluator, patience=patience).attach(job.trainer)
        job.validate()
        Checkpoint(tmp_path).attach(job.trainer)
        caplog.clear()
        ends.append((job.run(), "EarlyStopping ends the run: loss was best in update 1 (3)" in caplog.text))
    assert ends == [(3, True), (3, True), (5, True)]


def test_an_evaluation_of_the_update_at_which_a_run_resumes_does_not_count_again(tmp_path: Path, caplog: Any) -> None:
    """The evaluations before the break are not forgotten, so the log does not say that they are missing."""
    job = Scripted([3.0, 4.0])
    EarlyStopping(job.evaluator, patience=5).attach(job.trainer)
    job.validate()
    Checkpoint(tmp_path).attach(job.trainer)
    job.run()
    other = Scripted([3.0, 4.0, 5.0])
    stopping = EarlyStopping(other.evaluator, patience=5)
    stopping.attach(other.trainer)
    Checkpoint(tmp_path).attach(other.trainer)
    evaluated: list[int] = []

    def evaluate() -> None:
        if not evaluated:
            evaluated.append(other.trainer.state.iteration)
            other.evaluator.run(DATA)

    other.trainer.add_event_handler(Events.GET_BATCH_STARTED, evaluate)
    assert other.run() == 3
    assert (evaluated, stopping.best, stopping.num_bad) == ([2], 3.0, 1)
    assert not any("has done nothing" in line for line in caplog.messages)


def test_evaluations_that_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    """One before the first update, and a second one of the same update; and without any, a warning says what is missing."""
    job = Scripted([3.0, 4.0, 2.0])
    job.scores = [3.0, 4.0, 2.0, 0.0]  # index -1: before the first update
    stopping = EarlyStopping(job.evaluator, patience=2)
    stopping.attach(job.trainer)
    job.trainer.add_event_handler(Events.STARTED, lambda: job.evaluator.run(DATA))
    job.trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: job.evaluator.run(DATA))
    job.validate()
    assert job.run() == 3
    assert (stopping.best, stopping.best_update) == (2.0, 3)

    job = Scripted([3.0, 4.0])
    EarlyStopping(job.evaluator, patience=2).attach(job.trainer)
    assert not any("EarlyStopping has done nothing" in record.message for record in caplog.records)
    job.run()
    assert any("EarlyStopping has done nothing: its evaluator did not run" in record.message for record in caplog.records)


# --- ReduceOnPlateau ---


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_rates_are_those_of_a_plain_loop(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A scheduler of torch, stepped by hand after each score, gives the rates that the updates use."""
    scores = [3.0, 2.0, 2.5, 2.5, 2.5, 1.0, 4.0, 5.0, 6.0]
    settings: dict[str, Any] = {"mode": mode, "factor": 0.5, "patience": 1, "cooldown": 1}
    alone = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler, expected = ReduceLROnPlateau(alone, **settings), []
    for score in scores:
        expected.append(alone.param_groups[0]["lr"])
        scheduler.step(score)

    job, used = Scripted(scores), []
    ReduceOnPlateau(job.evaluator, ReduceLROnPlateau(job.optimizer, **settings), mode=mode).attach(job.trainer)
    job.validate()
    job.trainer.add_event_handler(
        TrainEvents.STEP_COMPLETED, lambda: used.append(job.trainer.state.update_output.learning_rates[0])
    )
    with caplog.at_level(logging.INFO):
        job.run()
    assert used == expected
    assert len(set(expected)) > 2
    lines = [record.message for record in caplog.records if ": learning rate " in record.message]
    assert len(lines) == sum(one != other for one, other in itertools.pairwise([*expected, alone.param_groups[0]["lr"]]))
    assert sum("learning rate 0.001 -> 0.0005" in line for line in lines) == 1


# --- which scores are better ---


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("loss", "min"),
        ("val_loss", "min"),
        ("wordErrorRate", "min"),
        ("validation/perplexity", "min"),
        ("accuracy", "max"),
        ("top1-accuracy", "max"),
        ("BLEU", "max"),
        ("loss/f1", "max"),
        ("AUC", "max"),
        ("rouge2", "max"),
    ],
)
def test_the_words_of_a_name_decide_which_scores_are_better(name: str, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """In each handler that ranks scores, and the log says what was taken; what the script says goes before."""
    evaluator, optimizer = Scripted([1.0]).evaluator, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    better = {"min": "lower", "max": "higher"}[mode]
    with caplog.at_level(logging.INFO, logger="ignite_train"):
        made = [
            Validation(evaluator, DATA, score=name),
            EarlyStopping(evaluator, name, patience=1),
            ReduceOnPlateau(evaluator, ReduceLROnPlateau(optimizer, mode=mode), score=name),  # type: ignore[arg-type]
        ]
        Checkpoint("nowhere", score=name)
    assert [handler.mode for handler in made] == [mode] * 3
    assert [
        record.message.partition(":")[0] for record in caplog.records if f": {better} values of {name!r} " in record.message
    ] == [
        "Validation",
        "EarlyStopping",
        "ReduceOnPlateau",
        "Checkpoint",
    ]
    other: Any = {"min": "max", "max": "min"}[mode]
    assert Validation(evaluator, DATA, score=name, mode=other).mode == other


@pytest.mark.parametrize("name", ["score", "rate", "negative", "error_of_accuracy", "glossary", "classes"])
def test_a_name_that_does_not_decide_is_refused(name: str) -> None:
    """When the handler is made. Only whole words count."""
    evaluator = Scripted([1.0]).evaluator
    makes: list[Callable[[], Any]] = [
        lambda: Validation(evaluator, DATA, score=name),
        lambda: EarlyStopping(evaluator, name, patience=1),
        lambda: Checkpoint("nowhere", score=name),
    ]
    for make in makes:
        assert_one_line((ValueError, f"mode must be 'min' or 'max' for the score '{name}' of .*; pass mode='max' if", make))


def test_the_best_by_accuracy_is_the_highest(tmp_path: Path) -> None:
    """Without a mode: the checkpoint that stays is the one with the highest accuracy, and training goes on while it rises."""
    job = Scripted([0.64, 0.7, 0.8, 0.91, 0.9])
    job.evaluator.add_event_handler(
        Events.EPOCH_COMPLETED, lambda: job.evaluator.state.metrics.update(accuracy=job.evaluator.state.metrics["loss"])
    )
    validation = Validation(job.evaluator, DATA[:1], score="accuracy")
    validation.attach(job.trainer, Events.ITERATION_COMPLETED)
    EarlyStopping(job.evaluator, "accuracy", patience=2).attach(job.trainer)
    checkpoint = Checkpoint(tmp_path, score="accuracy", keep=1)
    checkpoint.attach(job.trainer, evaluator=job.evaluator)
    assert job.run() == 5
    assert (validation.best, validation.best_update) == (0.91, 4)
    assert checkpoint.best is not None
    assert checkpoint.best[1] == 0.91


def following(directory: Path, *kinds: str, **settings: Any) -> tuple[Scripted, Validation]:
    """A validation, attached before these handlers: the losses fall, and the accuracy is best in the second of them."""
    job = Scripted([0.9, 0.8, 0.7, 0.6])
    accuracies = [0.5, 0.75, 0.25, 0.5]

    def replace() -> None:
        job.evaluator.state.metrics["accuracy"] = accuracies[job.trainer.state.iteration - 1]

    job.evaluator.add_event_handler(Events.EPOCH_COMPLETED, replace)
    validation = Validation(job.evaluator, DATA[:1], **settings)
    validation.attach(job.trainer, Events.ITERATION_COMPLETED)
    Checkpoint(directory, every=1, score="accuracy" if "checkpoint" in kinds else None).attach(
        job.trainer, evaluator=job.evaluator
    )
    if "stopping" in kinds:
        EarlyStopping(job.evaluator, "accuracy", patience=9).attach(job.trainer)
    if "lowest" in kinds:
        EarlyStopping(job.evaluator, "accuracy", patience=9, mode="min").attach(job.trainer)
    if "plateau" in kinds:
        ReduceOnPlateau(job.evaluator, ReduceLROnPlateau(job.optimizer, patience=9)).attach(job.trainer)
    return job, validation


LOSS, ACCURACY = ("loss", 0.6, 4), ("accuracy", 0.75, 2)
FOLLOWING: dict[str, tuple[tuple[str, ...], dict[str, Any], tuple[str, float, int]]] = {
    "nothing": ((), {}, LOSS),
    "the stopping": (("stopping",), {}, ACCURACY),
    "the checkpoint": (("checkpoint",), {}, ACCURACY),
    "both alike": (("stopping", "checkpoint"), {}, ACCURACY),
    "its mode": (("lowest",), {}, ("accuracy", 0.25, 3)),
    "two scores": (("stopping", "plateau"), {}, LOSS),
    "two modes": (("lowest", "checkpoint"), {}, LOSS),
    "its own": (("stopping", "checkpoint"), {"score": "loss"}, LOSS),
    "its own mode": (("stopping", "checkpoint"), {"mode": "max"}, ("loss", 0.9, 1)),
}


@pytest.mark.parametrize("name", FOLLOWING)
def test_a_validation_without_a_score_follows_that_of_the_others(name: str, tmp_path: Path) -> None:
    """Where they follow one alone: its best is the one that stays in a checkpoint. After a resume it is the same."""
    kinds, settings, best = FOLLOWING[name]
    job, validation = following(tmp_path, *kinds, **settings)
    job.run()
    assert (validation.score, validation.best, validation.best_update) == best
    assert list(validation.rows_at_end()) == [("best", f"{best[0]} {best[1]:g} at update {best[2]}")]


def test_a_resumed_validation_keeps_the_best_of_the_score_that_it_follows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Broken off after any update the run ends as one that was not; one with another score begins to look for its best."""
    caplog.set_level(logging.INFO)
    for broken_at in (1, 2, 3):
        for kinds in (("stopping",), ("stopping", "plateau")):
            directory = tmp_path / f"{broken_at}{len(kinds)}"
            following(directory, *kinds)[0].run(broken_at)
            caplog.clear()
            job, validation = following(directory, *kinds)
            job.run(4)
            assert (validation.score, validation.best, validation.best_update) == (ACCURACY if len(kinds) == 1 else LOSS)
            assert not [line for line in caplog.messages if "Validation.score" in line or "Validation.mode" in line]
    following(tmp_path / "other")[0].run(2)
    job, validation = following(tmp_path / "other", "stopping")
    job.run(4)
    assert (validation.score, validation.best, validation.best_update) == ("accuracy", 0.5, 4)


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (({"score": "accuracy"}, "stopping"), ({}, "stopping"), []),
        (({}, "stopping"), ({"score": "accuracy"}, "stopping"), []),
        (({"score": "loss"}, "plateau"), ({}, "plateau"), []),
        (({}, "plateau"), ({}, "plateau", "stopping"), []),
        (({}, "plateau"), ({}, "checkpoint"), ["score: 'loss' -> 'accuracy'", "mode: 'min' -> 'max'"]),
    ],
    ids=["left out", "named", "the default", "the others follow two", "another score"],
)
def test_a_resumed_run_tells_which_score_its_validation_really_follows(
    before: Any, now: Any, told: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether the script names it or another handler decides makes no difference."""
    (settings, *kinds), (other, *others) = before, now
    following(tmp_path, *kinds, **settings)[0].run(2)
    caplog.clear()
    following(tmp_path, *others, **other)[0].run(4)
    line = next((line for line in caplog.messages if "resuming from" in line), "")
    assert [part for part in told if f"handlers.Validation.{part} (the script's is used)" in line] == told
    assert line.count("handlers.Validation.") == len(told)


def test_a_plateau_of_the_other_direction_is_refused() -> None:
    """The scheduler of torch has the default "min"; `mode` says that it is meant."""
    evaluator, optimizer = Scripted([1.0]).evaluator, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = ReduceLROnPlateau(optimizer)
    says = (
        r"scheduler must have mode='max' for the score 'accuracy', got 'min'; write ReduceLROnPlateau\(optimizer, mode='max'\)"
    )
    assert_one_line((ValueError, says, lambda: ReduceOnPlateau(evaluator, scheduler, score="accuracy")))
    assert ReduceOnPlateau(evaluator, scheduler, score="accuracy", mode="min").mode == "min"


@pytest.mark.parametrize("handler", ["Validation", "EarlyStopping", "ReduceOnPlateau", "Checkpoint"])
def test_a_resume_in_the_other_direction_is_refused(handler: str, tmp_path: Path) -> None:
    """The best score so far would be the worst. In the same direction the run resumes."""

    def job(mode: Any) -> Scripted:
        made = Scripted([3.0, 2.0, 1.0])
        if handler != "Validation":
            made.validate()
        scheduler = ReduceLROnPlateau(made.optimizer, mode=mode)
        if handler == "EarlyStopping":
            EarlyStopping(made.evaluator, patience=9, mode=mode).attach(made.trainer)
        if handler == "ReduceOnPlateau":
            ReduceOnPlateau(made.evaluator, scheduler, mode=mode).attach(made.trainer)
        if handler == "Validation":
            Validation(made.evaluator, DATA[:1], mode=mode).attach(made.trainer, Events.ITERATION_COMPLETED)
        best: dict[str, Any] = {"score": "loss", "mode": mode} if handler == "Checkpoint" else {}
        Checkpoint(tmp_path, **best).attach(made.trainer, evaluator=made.evaluator)
        return made

    assert job("max").run(2) == 2
    with pytest.raises(
        (ValueError, CheckpointError), match="mode must be 'max' for the score 'loss', as when the checkpoint was saved"
    ):
        job("min").run(3)
    assert job("max").run(3) == 3


@pytest.mark.parametrize("score", ["accuracy", "error"])
def test_a_resume_with_another_score_begins_anew(score: str, tmp_path: Path) -> None:
    """The best loss says nothing of another metric, whichever direction that has: the handlers end as if nothing were saved."""

    def job(name: str, directory: Path | None) -> tuple[Scripted, dict[str, Any]]:
        made = Scripted([0.1, 0.2, 0.3, 4.0, 3.0, 2.0, 1.0])

        def replace() -> None:
            loss = made.evaluator.state.metrics["loss"]
            made.evaluator.state.metrics |= {"accuracy": 5.0 - loss, "error": loss}

        made.evaluator.add_event_handler(Events.EPOCH_COMPLETED, replace)
        validation = Validation(made.evaluator, DATA[:1], score=name, sanity=0)
        validation.attach(made.trainer, Events.ITERATION_COMPLETED)
        scheduler = ReduceLROnPlateau(made.optimizer, factor=0.5, patience=0, mode="max" if name == "accuracy" else "min")
        handlers = {"stopping": EarlyStopping(made.evaluator, name, patience=3)}
        handlers |= {"plateau": ReduceOnPlateau(made.evaluator, scheduler, score=name)}  # type: ignore[dict-item]
        for handler in handlers.values():
            handler.attach(made.trainer)
        if directory is not None:
            Checkpoint(directory, every=1, keep=9).attach(made.trainer)
        found = {"best": validation, **handlers, "optimizer": made.optimizer}
        return made, found

    before, _ = job("loss", tmp_path)
    assert before.run(3) == 3
    after, found = job(score, tmp_path)
    assert after.run() == 7  # not ended by what the loss has done
    assert (found["best"].best, found["best"].best_update) == (1.0 if score == "error" else 4.0, 7)
    assert (found["stopping"].best, found["stopping"].num_bad) == (found["best"].best, 0)
    assert found["optimizer"].param_groups[0]["lr"] == 1e-3 * 0.5**2  # by the two losses that did not improve, and none later


# --- resumption ---


SCORES = [3.0, 2.0, 2.5, 2.25, 1.5, 1.75, 2.0, 1.75, 9.0]


def reacting(directory: Path | None = None) -> tuple[Scripted, dict[str, Any]]:
    job = Scripted(SCORES)
    stopping = EarlyStopping(job.evaluator, patience=3)
    plateau = ReduceOnPlateau(job.evaluator, ReduceLROnPlateau(job.optimizer, factor=0.5, patience=1))
    for handler in (stopping, plateau):
        handler.attach(job.trainer)
    job.validate()
    if directory is not None:
        Checkpoint(directory, every=1, asynchronous=False).attach(job.trainer)
    return job, {"stopping": stopping, "plateau": plateau, "model": job.model, "optimizer": job.optimizer}


@pytest.mark.parametrize("broken_at", [1, 4, 6])
def test_resumed_it_ends_with_the_same_bits(broken_at: int, tmp_path: Path) -> None:
    """An exception in the next update, and another process: it ends after the same update, with the same state."""
    whole, expected = reacting()
    assert whole.run() == 8
    job, _ = reacting(tmp_path)
    job.trainer.add_event_handler(Events.ITERATION_STARTED(once=broken_at + 1), lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        job.run()
    again, states = reacting(tmp_path)
    assert again.run(resume="must") == 8
    for name, entry in states.items():
        assert bit_by_bit(entry.state_dict()) == bit_by_bit(expected[name].state_dict()), name


# --- two ranks ---


def _local_scores_on_this_rank() -> tuple[int, float]:
    """An Ignite engine as evaluator whose metric differs from rank to rank: only rank 0's stops improving."""
    job, rank = Scripted([1.0]), idist.get_rank()
    evaluator = Engine(lambda engine, batch: None)
    by_rank = ([3.0, 4.0, 4.0, 4.0], [3.0, 2.0, 1.0, 0.0])[rank]
    evaluator.add_event_handler(
        Events.EPOCH_COMPLETED, lambda: evaluator.state.metrics.update(loss=by_rank[job.trainer.state.iteration - 1])
    )
    EarlyStopping(evaluator, patience=2).attach(job.trainer)
    ReduceOnPlateau(evaluator, ReduceLROnPlateau(job.optimizer, patience=0)).attach(job.trainer)
    job.trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: evaluator.run([0]))
    ended = job.run(max_iters=4)
    return ended, job.optimizer.param_groups[0]["lr"]


def _real_scores_on_this_rank() -> tuple[int, Any]:
    """Each rank has its own share of the held-out samples, of different size; the rate is so high that the loss grows."""
    model = replicated(cuts.linear())
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=10.0), cuts.forward)
    evaluator: Evaluator = create_evaluator(model, cuts.forward)
    stopping = EarlyStopping(evaluator, patience=2)
    stopping.attach(trainer)
    Validation(evaluator, cuts.shard([[7], [3, 4]])).attach(trainer, Events.ITERATION_COMPLETED)
    return trainer.run(cuts.shard([[4] * 6, [4] * 6]), max_iters=6).iteration, stopping.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("way", [_local_scores_on_this_rank, _real_scores_on_this_rank], ids=["local", "real"])
def test_all_ranks_react_alike(way: Callable[[], Any]) -> None:
    """Both ranks end after the third update with the same rate and state, also where a metric was not reduced."""
    first, second = run_ranks(way)
    assert first == second
    assert first[0] == 3


def _best_on_this_rank(directory: Path, what: str) -> tuple[Any, ...]:
    """The score of this rank's samples only, which on rank 1 is another one, or is not published."""
    job, rank = Scripted([1.0]), idist.get_rank()
    evaluator = create_evaluator(job.model, cuts.forward)
    by_rank = ([3.0, 2.0, 2.5, 1.0], [3.0, 4.0, 1.0, 5.0])[rank]

    def publish() -> None:
        if rank == 0 or what == "differs":
            evaluator.state.metrics["error"] = by_rank[job.trainer.state.iteration - 1]

    evaluator.add_event_handler(Events.EPOCH_COMPLETED, publish)
    validation = Validation(evaluator, DATA[:1], score="error", sanity=0)
    validation.attach(job.trainer, Events.ITERATION_COMPLETED)
    checkpoint = Checkpoint(directory, every=1000, score="error")
    checkpoint.attach(job.trainer, evaluator=evaluator)
    job.run(max_iters=4)
    return validation.best, validation.best_update, checkpoint.best


@pytest.mark.slow
@pytest.mark.parametrize("what", ["differs", "is published on rank 0"])
def test_the_best_is_that_of_rank_0(tmp_path: Path, what: str) -> None:
    """Also where another rank has none. One rank alone would save otherwise, and wait."""
    first, second = run_ranks(_best_on_this_rank, tmp_path, what, timeout_seconds=40)
    assert first == second
    assert first[:2] == (1.0, 4)
    assert first[2][1] == 1.0


def _rank_0_evaluates_alone(directory: Path) -> int:
    """By an engine of Ignite, which waits for no other rank: before the run, at the end of each epoch, and after the run."""
    job, evaluator = Scripted([1.0]), Engine(lambda engine, batch: None)
    evaluator.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.state.metrics.update(loss=1.0))
    Checkpoint(directory, score="loss").attach(job.trainer, evaluator=evaluator)
    if idist.get_rank() == 0:
        job.trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0]))
        evaluator.run([0])
    job.trainer.run(DATA, max_epochs=2)
    if idist.get_rank() == 0:
        evaluator.run([0])
    return job.trainer.state.epoch


@pytest.mark.slow
def test_one_rank_may_evaluate_alone_where_all_save_then(tmp_path: Path) -> None:
    assert run_ranks(_rank_0_evaluates_alone, tmp_path, timeout_seconds=40) == [2, 2]


# --- mistakes ---


def mistakes(job: Scripted) -> dict[str, Mistake]:
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    plateau = ReduceLROnPlateau(job.optimizer)
    return {
        "trainer": (TypeError, "evaluator must be what create_evaluator", lambda: EarlyStopping(job.trainer, patience=1)),
        "neither": (ValueError, "patience or target must be given", lambda: EarlyStopping(job.evaluator)),
        "patience": (ValueError, "patience must be at least 1, got 0", lambda: EarlyStopping(job.evaluator, patience=0)),
        "delta": (ValueError, "min_delta must be at least 0", lambda: EarlyStopping(job.evaluator, patience=1, min_delta=-1.0)),
        "mode": (ValueError, "mode must be one of", lambda: EarlyStopping(job.evaluator, patience=1, mode="mix")),  # type: ignore[arg-type]
        "target": (ValueError, "target must be finite", lambda: EarlyStopping(job.evaluator, target=math.nan)),
        "score": (TypeError, "score must be the name of", lambda: EarlyStopping(job.evaluator, 3, patience=1)),  # type: ignore[arg-type]
        "step": (TypeError, "need LearningRateSchedule", lambda: ReduceOnPlateau(job.evaluator, StepLR(job.optimizer, 1))),  # type: ignore[arg-type]
        "other": (
            ValueError,
            "scheduler must be of the trainer's optimizer",
            lambda: ReduceOnPlateau(job.evaluator, ReduceLROnPlateau(other)).attach(job.trainer),
        ),
        "order": (TypeError, "scheduler must be a", lambda: ReduceOnPlateau(plateau, job.evaluator)),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("name", list(mistakes(Scripted([1.0]))))
def test_mistakes(name: str) -> None:
    """Each is answered in one line, before training."""
    assert_one_line(mistakes(Scripted([1.0]))[name])


def test_a_misspelt_score() -> None:
    """The nearest metric is named when the evaluation is complete, the first time that the names are known."""
    job = Scripted([1.0])
    EarlyStopping(job.evaluator, "sampels", patience=1, mode="min").attach(job.trainer)
    job.validate()
    with pytest.raises(ValueError, match="did you mean 'samples'"):
        job.run()


def test_both_react_to_one_evaluation_in_either_order() -> None:
    """The rate is lowered in the update that also ends the run, whichever was attached first."""
    results = []
    for order in itertools.permutations((0, 1)):
        job = Scripted([3.0, 4.0, 5.0])
        stopping = EarlyStopping(job.evaluator, patience=1)
        plateau = ReduceOnPlateau(job.evaluator, ReduceLROnPlateau(job.optimizer, factor=0.5, patience=0))
        for index in order:
            (stopping, plateau)[index].attach(job.trainer)
        job.validate()
        results.append((job.run(), job.optimizer.param_groups[0]["lr"]))
    assert results == [(2, 5e-4)] * 2
