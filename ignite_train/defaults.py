"""attach_defaults: metrics, progress, log file and TensorBoard in one line.

Handlers are imported where they are attached, so that importing the package stays quick.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ignite.engine import Engine, Events

from ignite_train.arguments import describe, did_you_mean, directory_of, one_of, positive_int
from ignite_train.engine.dispatch import attachables
from ignite_train.events import every as every_nth
from ignite_train.other_words import answers_other_words
from ignite_train.ranks import collectives
from ignite_train.trainer import Trainer

if TYPE_CHECKING:
    from ignite_train.handlers import JsonLines, ProgressLog, TensorBoard, TrainingMetrics

__all__ = ["Defaults", "attach_defaults"]

_CALL = "attach_defaults(trainer, directory='runs/first')"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class Defaults(NamedTuple):
    """The handlers that `attach_defaults` has attached; None for one that was left out.

    Attributes:
        training_metrics: computes what the others show.
        progress: the bar or the lines, and the table at the end.
        json_lines: the file `metrics.jsonl`.
        tensorboard: the folder `tensorboard`.
    """

    training_metrics: TrainingMetrics | None = None
    progress: ProgressLog | None = None
    json_lines: JsonLines | None = None
    tensorboard: TensorBoard | None = None


@answers_other_words
def attach_defaults(
    trainer: Trainer,
    *,
    directory: str | Path,
    evaluator: Engine | None = None,
    every: int = 50,
    unit: str = "samples",
    config: Mapping[str, Any] | None = None,
    leave_out: Collection[str] = (),
    log_level: str | None = None,
    log_on_all_ranks: bool = False,
) -> Defaults:
    """Attaches what shows a run: `TrainingMetrics`, `ProgressLog`, `JsonLines` and `TensorBoard`.

    Each of them can be attached alone instead, with settings of its own. Checkpoints and validation are not among them; a
    `Checkpoint` may write into the same directory, and its files are named in the table at the end of the run. All ranks
    must call this; rank 0 shows and writes.

    Args:
        trainer: the trainer.
        directory: where the run writes: `metrics.jsonl`, which `python -m ignite_train.plot` draws, and `tensorboard`.
        evaluator: whose progress, metrics and time are shown, as `validation/...`.
        every: updates between two lines, and between two points. From 50 on there are some at updates 1, 2, 5, 10, 20, 50, ...
            too, so that a short run has curves.
        unit: what `sample_size` counts, for the speed that is shown.
        config: the hyper-parameters, for TensorBoard; see `TensorBoard`.
        leave_out: names of `Defaults` that are not attached, such as `("tensorboard",)`.
        log_level: the least that the library's logger `"ignite_train"` lets through: `"DEBUG"`, `"INFO"`, `"WARNING"` or
            `"ERROR"`. Where the program has not set up Python's logging, messages then go to standard error. None does
            not touch logging.
        log_on_all_ranks: whether this holds on all ranks, or on rank 0, while the others let errors alone through.

    Returns:
        The handlers, by name.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: `every` is below 1, `leave_out` has an unknown name, or `log_level` is not one of the four.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import torch
        >>> from ignite_train import attach_defaults, create_trainer
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trainer = create_trainer(model, optimizer, lambda model, x: model(x).square().mean())
        >>> directory = Path(tempfile.mkdtemp())
        >>> attached = attach_defaults(trainer, directory=directory, every=2, leave_out=("progress",))
        >>> state = trainer.run([torch.ones(2, 3)] * 4, max_epochs=1)
        >>> sorted(path.name for path in directory.iterdir())
        ['metrics.jsonl', 'tensorboard']
    """
    from ignite_train.handlers import JsonLines, ProgressLog, TensorBoard, TrainingMetrics

    directory = directory_of("directory", directory)
    event = every_nth(positive_int("every", every), Events.ITERATION_COMPLETED, early=True)
    made: dict[str, Callable[[], Any]] = {
        "training_metrics": TrainingMetrics,
        "progress": lambda: ProgressLog(unit=unit),
        "json_lines": lambda: JsonLines(directory / "metrics.jsonl"),
        "tensorboard": lambda: TensorBoard(directory / "tensorboard", config=config),
    }
    if not isinstance(trainer, Trainer):
        raise TypeError(f"trainer must be what create_trainer returned, got {describe(trainer)}; write {_CALL}")
    if isinstance(leave_out, str) or not isinstance(leave_out, Collection):
        remedy = f"; pass ({leave_out!r},)" if isinstance(leave_out, str) else ""
        raise TypeError(f"leave_out must be a sequence of names, got {leave_out!r}{remedy}")
    for name in leave_out:
        if name not in made:
            raise ValueError(f"leave_out must have names among {', '.join(made)}, got {name!r}{did_you_mean(name, made)}")
    if log_level is not None:
        _set_log_level(one_of("log_level", log_level, _LEVELS), on_all_ranks=log_on_all_ranks)
    kinds = {"training_metrics": TrainingMetrics, "progress": ProgressLog}
    own = {type(one) for one in attachables(trainer)}
    there = tuple(name for name, kind in kinds.items() if kind in own and name not in leave_out)
    if "training_metrics" in there:
        raise ValueError(
            "trainer must have TrainingMetrics once, got those of attach_defaults beside others; call attach_defaults once, or "
            f"pass leave_out={(*leave_out, *there)!r}"
        )
    chosen = {name: make() for name, make in made.items() if name not in leave_out}
    for handler in chosen.values():
        handler.attach(trainer, event, evaluator=evaluator)
    return Defaults(**chosen)


def _set_log_level(level: str, *, on_all_ranks: bool) -> None:
    logging.basicConfig(format="%(levelname)s %(message)s")  # does nothing where the program has set up logging
    shown = level if on_all_ranks or collectives.is_main_rank() else "ERROR"
    logging.getLogger("ignite_train").setLevel(shown)
