"""Finding the fastest settings for a user's own model and data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from ignite_train.arguments import describe, real_number
from ignite_train.model.loss_declaration import LossDeclarationWarning
from ignite_train.model.optimizers import OneOrSeveralOptimizers
from ignite_train.model.random_state import capture_random_state, restore_random_state
from ignite_train.ranks import collectives
from ignite_train.ranks.wrapping import unwrap
from ignite_train.trainer import Creation, Trainer
from ignite_train.tuning.alone import TrialError
from ignite_train.tuning.cut_warnings import cut_warnings, difference_warnings
from ignite_train.tuning.dimensions import Dimension, dimensions, present_layout
from ignite_train.tuning.fixed_samples import FixedSamples
from ignite_train.tuning.search import Search
from ignite_train.tuning.settings import Settings
from ignite_train.tuning.trial import Trial
from ignite_train.tuning.tuned import Tuned
from ignite_train.tuning.untouched import untouched

__all__ = ["tune"]

_WINDOW = 1 / 100  # of the time in all: at most 5 rounds of two windows for each candidate, and 9 at the end
_LONGEST_WINDOW = 1.0  # seconds
_FIRST_UPDATES, _MOST_UPDATES = 3, 1000
_PATIENCE = 3.0  # windows of the present settings, after which one of another candidate ends
_SEARCH = 0.8  # of the time is for the search, the rest for the last race


def tune(
    trainer: Trainer, loader: Iterable[Any], *, seconds: float = 60.0, values: Mapping[str, Iterable[Any]] | None = None
) -> Tuned:
    """Measures which settings compute the updates of this training fastest, and says what to write to have them.

    The samples of an update stay the same: it is cut into larger or smaller micro-batches, and accumulated over fewer or more
    of them. Varied one after another are the threads of torch, this cut, `fused` of the optimizer, the memory layout
    `channels_last` of weights, the worker processes of the loader, and `compile`. Each candidate is measured in turn with the
    fastest settings so far, on the same samples, and is faster if it is so by more than 2 % in three quarters of the rounds.
    The winner is measured once more beside the present settings, and that is the gain that is reported. A candidate that
    raises, because there is too little memory for example, is a row of the table.

    Nothing is switched. All is measured on copies of model and optimizer, without the trainer's handlers; afterwards weights,
    states, random numbers, the loader's place and order, torch's threads and the trainer are what they were, also after an
    exception or Ctrl-C. Not put back: what the dataset or forward change in objects of their own other than modules, the peak
    statistics of CUDA's allocator, and the graphs of `torch.compile`, which are compiled again. The copies take memory beside
    the originals: at most two models with their optimizers.

    On several ranks each measures for itself at the same time, without reducing gradients, which costs the same whatever the
    settings are; the slowest counts. So a candidate that fails on one rank leaves none waiting. All ranks call it alike.

    Args:
        trainer: from `create_trainer` or `create_supervised_trainer`, not within a run.
        loader: of the training. Micro-batches can be cut and workers varied if it is a DataLoader over a map-style dataset; a
            `batch_sampler` of your own fixes the micro-batches.
        seconds: how long to search, roughly: the first window of a candidate, with what it compiles, is not interrupted.
        values: what to try in place of the usual values, by name, such as `{"threads": [1, 2], "compile": []}`; an empty list
            leaves a setting alone. The names are threads, micro_batch, fused, channels_last, workers and compile.

    Returns:
        What was measured; `print` shows a table.

    Raises:
        TypeError: an argument is of the wrong type, or the loader is an iterator.
        ValueError: a value is out of range, or the loader is empty, or the model cannot be measured on one rank.
        RuntimeError: the trainer is running, or was not made by these functions, or the present settings cannot be measured, or
            forward has collectives of its own.

    Example:
        >>> import torch
        >>> from ignite_train import create_trainer, tune
        >>> model = torch.nn.Linear(64, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> trainer = create_trainer(model, optimizer, lambda model, x: model(x).square().mean(), accumulation_steps=4)
        >>> loader = torch.utils.data.DataLoader(torch.randn(512, 64), batch_size=8, shuffle=True)
        >>> found = tune(trainer, loader, seconds=0.5, values={"compile": [], "workers": []})
        >>> found.present.micro_batch, found.fastest.micro_batch * found.fastest.accumulation_steps
        (8, 32)
    """
    creation, seconds = _checked(trainer), real_number("seconds", seconds, above=0)
    model, optimizers, started = creation.arguments["model"], _listed(creation.arguments["optimizer"]), perf_counter()
    functions = [creation.arguments[name] for name in creation.arguments.keys() & {"forward", "loss_fn", "model_fn"}]
    with untouched([model], functions, loader), _recorded() as recorded:
        trials = _Trials(trainer, creation, loader)
        present = trials.present
        chosen, left_alone = dimensions(present, unwrap(model), optimizers, trials.samples.why_fixed, values or {})
        chosen = _agreed(present, chosen)
        with _graphs_of_one_size(present, chosen):
            trials.fill_windows(min(_LONGEST_WINDOW, _WINDOW * seconds))
            search = Search(trials, present, lambda: collectives.largest(perf_counter() - started)[0] > _SEARCH * seconds)
            search(chosen)
    found = search.last_race if search.fastest != present else None
    return Tuned(
        present=present,
        fastest=search.fastest,
        gain=1.0 if found is None else found.ratio,
        gain_quartiles=(1.0, 1.0) if found is None else found.quartiles,
        line=_line(search.fastest, present, creation, optimizers, loader),
        rows=tuple(search.rows),
        warnings=(*trials.warnings(cut=any(dimension.name == "micro_batch" for dimension in chosen)), *recorded),
        left_alone=left_alone,
        num_unmeasured=search.num_unmeasured,
    )


class _Trials:
    """Makes trials on the same samples, and keeps what their first updates came to.

    Args:
        trainer: the user's.
        creation: how it was made.
        loader: the user's.

    Attributes:
        present: the settings of the program.
        samples: what all trials are trained on.
    """

    def __init__(self, trainer: Trainer, creation: Creation, loader: Iterable[Any]) -> None:
        self._creation, self._loader = creation, loader
        update: Any = trainer._update
        self._loss_scaling, self._precision = update.loss_scaling, update.precision.name
        steps, reason = _accumulation_steps(trainer, creation)
        self.samples = FixedSamples(loader, steps, _FIRST_UPDATES)
        if reason:
            self.samples.why_fixed["micro_batch"] = reason
        self._why_fixed = self.samples.why_fixed
        knowing = [one for one in _listed(creation.arguments["optimizer"]) if "fused" in one.defaults]
        self.present = Settings(
            micro_batch=self.samples.micro_batch,
            accumulation_steps=steps,
            fused=knowing[0].param_groups[0]["fused"] if knowing else None,
            channels_last=present_layout(creation.arguments["model"]),
            threads=torch.get_num_threads(),
            workers=self.samples.workers,
            compile=creation.arguments["compile"],
        )
        self._random_state = capture_random_state()
        self._patience = math.inf
        self._made: list[Trial] = []

    def __call__(self, settings: Settings) -> Trial:
        """A trial of these settings, which begins with the weights and random numbers of all others. Collective."""
        restore_random_state(self._random_state)
        trial = Trial(self._creation, self._loss_scaling, settings, self.present, self.samples, patience=self._patience)
        self._made.append(trial)
        return trial

    def fill_windows(self, seconds: float) -> None:
        """Takes as many samples as the present settings compute in a window of this length. Collective.

        Raises:
            RuntimeError: the present settings cannot be measured, or forward has collectives of its own.
        """
        try:
            trial = self(self.present)
            try:
                taken, begun = trial.seconds(), collectives.any_rank(trial.num_collectives)
            finally:
                trial.close()
        except TrialError as error:
            raise RuntimeError(f"the present settings cannot be measured: {error}") from error
        if begun:
            raise RuntimeError(
                "tune needs a forward without collectives of its own, such as SyncBatchNorm's: a candidate that fails on one "
                "rank would leave the others waiting; tune in a single process"
            )
        self._made.clear()  # what it was trained on is not what the others are
        self._patience = _PATIENCE * max(seconds, 2 * taken)
        updates = 1 + min(_MOST_UPDATES, max(2, round(seconds / max(taken, 1e-9))))
        self.samples = FixedSamples(self._loader, self.present.accumulation_steps, int(collectives.largest(updates)[0]))

    def warnings(self, *, cut: bool) -> list[str]:
        """Why results may differ under other settings; `cut`: whether other sizes of micro-batches were tried."""
        model, present = self._creation.arguments["model"], self._made[0]
        found = cut_warnings(model, present) if cut else []
        return found + difference_warnings(model, present, self._made[1:], self._precision)


def _checked(trainer: Any) -> Creation:
    if not isinstance(trainer, Trainer):
        raise TypeError(f"trainer must be a Trainer, got {describe(trainer)}; pass what create_trainer returned")
    if trainer._creation is None:
        raise RuntimeError("trainer must be made by create_trainer or create_supervised_trainer, which know how to make a copy")
    if trainer._running:
        raise RuntimeError("tune was called inside a handler of the trainer's run; call it before run")
    if any(isinstance(module, FSDPModule) for module in trainer._creation.arguments["model"].modules()):
        raise ValueError(
            "trainer must have a model that is whole on each rank, got one that fully_shard was applied to, whose forward "
            "waits for all ranks; tune a smaller model of the same kind"
        )
    return trainer._creation


def _listed(optimizer: OneOrSeveralOptimizers) -> list[Optimizer]:
    if isinstance(optimizer, Optimizer):
        return [optimizer]
    return list(optimizer.values() if isinstance(optimizer, Mapping) else optimizer)


def _accumulation_steps(trainer: Trainer, creation: Creation) -> tuple[int, str]:
    """Those of the next update, and why they cannot be changed, if that is so."""
    steps, state = creation.arguments[creation.accumulation_argument], trainer.state
    if isinstance(steps, Sequence):
        epoch = state.epoch + (not trainer._epoch_open)
        return steps[min(epoch, len(steps)) - 1], "accumulation_steps differ from epoch to epoch"
    if callable(steps):
        return steps(state.iteration + 1), "accumulation_steps are a function"
    return steps, ""


def _agreed(present: Settings, chosen: list[Dimension]) -> list[Dimension]:
    """The dimensions of rank 0, so that all ranks measure the same candidates.

    Raises:
        ValueError: the ranks have different settings.
    """
    everyones = collectives.gather_objects((present, chosen))
    for rank, (settings, _) in enumerate(everyones):
        if settings != everyones[0][0]:
            raise ValueError(
                f"trainer and loader must have the same settings on all ranks, got {everyones[0][0].label()} on rank 0 and "
                f"{settings.label()} on rank {rank}"
            )
    dimensions_of_rank_0: list[Dimension] = everyones[0][1]
    return dimensions_of_rank_0


def _line(fastest: Settings, present: Settings, creation: Creation, optimizers: list[Optimizer], loader: Iterable[Any]) -> str:
    knowing = [optimizer for optimizer in optimizers if "fused" in optimizer.defaults] or optimizers
    return fastest.line(
        present,
        creator=creation.function.__name__,
        optimizer=type(knowing[0]).__name__,
        loader=type(loader).__name__,
    )


@contextmanager
def _recorded() -> Iterator[list[str]]:
    """Keeps the warnings of copies back; what they say of the loss is in the list afterwards."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += dict.fromkeys(str(one.message) for one in caught if issubclass(one.category, LossDeclarationWarning))


@contextmanager
def _graphs_of_one_size(present: Settings, chosen: list[Dimension]) -> Iterator[None]:
    """Has torch compile a graph for each size of micro-batches, as in a run that has one, and forget them afterwards."""
    values = [present.compile, *(value for dimension in chosen if dimension.name == "compile" for value in dimension.values)]
    if all(value is False for value in values):
        yield
        return
    from torch._dynamo import config  # takes a second

    with config.patch(automatic_dynamic_shapes=False):
        try:
            yield
        finally:
            torch.compiler.reset()
