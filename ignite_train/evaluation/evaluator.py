"""Evaluation: the same sample-weighted mean as in training, over all ranks, also if their shares of the data differ."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch
from ignite.engine import Engine, Events
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data.distributed import DistributedSampler

from ignite_train.arguments import describe, one_of, positive_int
from ignite_train.data.description import length_of
from ignite_train.data.fetch_thread import FetchThread
from ignite_train.data.grouping import POLICIES
from ignite_train.data.micro_batch_pass import Uneven
from ignite_train.data.position import open_loader
from ignite_train.data.samplers import samplers_of
from ignite_train.device.to_device import ToDevice
from ignite_train.engine.dispatch import attached
from ignite_train.engine.limits import checked_loader, without_full_batch
from ignite_train.engine.loop import Batches, Loop
from ignite_train.evaluation.scored_weights import ScoredWeights
from ignite_train.evaluation.uneven_metrics import metrics_published_at, uneven_metrics, waiting_metrics_at
from ignite_train.forward import TERM, Forward, ForwardOutput, as_forward_output, bind_forward
from ignite_train.model.forward_state import ForwardState
from ignite_train.model.in_full import in_full, put_entries_back
from ignite_train.model.loss_declaration import FirstLook
from ignite_train.model.modes import modes_of, set_modes
from ignite_train.model.precision import Precision, PrecisionName
from ignite_train.model.reshard import reshard
from ignite_train.other_words import answers_other_words, made_by
from ignite_train.ranks import collectives
from ignite_train.ranks.begin_alike import buffers_of_first_rank
from ignite_train.ranks.data_ranks import checked_data_dims
from ignite_train.ranks.messages import RankRequests
from ignite_train.ranks.placeholders import borrowed_micro_batch
from ignite_train.ranks.statistics import Statistics
from ignite_train.ranks.wrapping import data_ranks_of_any, unwrap
from ignite_train.state import EvaluatorState

__all__ = ["Evaluator", "create_evaluator", "kept_state"]

_END = object()  # of a loader, which may give None


class Evaluator(Loop):
    """An Ignite engine that runs `forward` without gradients over a loader; `create_evaluator` makes it.

    After `run`, `state.metrics` has `"loss"` = Σloss / Σsample_size (of a loss with several terms, the sum of their means) and,
    for each log, Σlog / Σsample_size: a count of correct answers becomes the accuracy. A log with a denominator of its own is
    divided by the sum of that; NaN if that is 0. All sums are over all ranks, reduced once at the end.

    `state.forward_output` is the `ForwardOutput` of the latest micro-batch. `state.output` is its `outputs`, which Ignite's
    metrics read, or the `ForwardOutput` itself where it has none. A placeholder, which a rank runs after its data has ended, is
    no iteration: no event fires for it. `state.carried` is the state that forward keeps from micro-batch to micro-batch; it is
    empty at the start of each run and separate from the trainer's.

    Attributes:
        scored_weights: the handlers that put other weights into the model for each run, the outermost first.
    """

    state: EvaluatorState

    @made_by("create_evaluator(model, forward)")
    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        precision: PrecisionName,
        uneven: Uneven = "all",
        data_dims: Sequence[str] | None = None,
    ) -> None:
        super().__init__(_evaluate)
        self.state = EvaluatorState()
        self.model = unwrap(model)
        self._find_data_ranks = partial(data_ranks_of_any, self.model, data_dims, option="data_dims={}")
        self._num_ranks, self.data_ranks = collectives.world_size(), self._find_data_ranks()
        this = weakref.proxy(self)
        self.forward, self.first_look = bind_forward(forward, lambda: this.state), FirstLook()
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self.transfer, self.precision = ToDevice(device), Precision(precision, device)
        self.statistics = Statistics(device, counts=self.data_ranks.counts)
        self._limit: int | None = None
        self._around: list[Callable[[], AbstractContextManager[Any]]] = [lambda: buffers_of_first_rank(this.model)]
        self.scored_weights: list[ScoredWeights] = []
        self._is_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        self._uneven: Uneven = "replay" if uneven == "all" and self._is_sharded else uneven

    def run_within(self, make_context: Callable[[], AbstractContextManager[Any]], *, first: bool = False) -> None:
        """Has each run be inside a `with` of its own. Several are nested, and the eval mode is inside all of them.

        Args:
            make_context: gives a context manager for each run.
            first: whether it is outside of the others, and so of the context in which ranks have the buffers of rank 0;
                otherwise it is inside of them.
        """
        self._around.insert(0 if first else len(self._around), make_context)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.model).__name__}, {self.precision.name})"

    def run(
        self,
        data: Iterable[Any] | None = None,
        max_epochs: int | None = None,
        max_iters: int | None = None,
        epoch_length: int | None = None,
    ) -> EvaluatorState:
        """Evaluates once over `data`. Collective: all ranks call it, also a rank without data.

        Args:
            data: a loader of micro-batches; ranks may have different numbers, or none.
            max_epochs: 1 or None: an evaluation is one pass.
            max_iters: stop after this many micro-batches of each rank.
            epoch_length: the same as `max_iters`.

        Returns:
            The state, with the metrics. Its own attributes are fresh; those that others have put there stay.

        Raises:
            TypeError: `data` cannot be iterated.
            ValueError: `max_epochs` is not 1; or the sampler repeats samples, which would count twice; or no rank has a sample;
                or the ranks have different numbers of micro-batches and the evaluator was made with `uneven="error"`.
        """
        self.progress.refuse_nested_run()
        if max_epochs not in (None, 1):
            raise ValueError(
                f"max_epochs must be 1, since an evaluation is one pass over data, got {max_epochs!r}; leave it out"
            )
        loader = checked_loader(data)
        _refuse_padding(loader)
        name, limit = ("epoch_length", epoch_length) if max_iters is None else ("max_iters", max_iters)
        self._limit = None if limit is None else positive_int(name, limit)
        self._refuse_running_metrics(loader)
        vars(self.state).update(vars(EvaluatorState()))  # what others have put there stays
        self.state.max_epochs = 1
        self.progress.epoch_open = False
        self._forward_state = ForwardState(self.model, self.state.carried)
        if self._num_ranks != collectives.world_size():  # it may be made before the process group, or after
            self._num_ranks, self.data_ranks = collectives.world_size(), self._find_data_ranks()
        self.statistics = Statistics(self.statistics.device, counts=self.data_ranks.counts)
        self._run_inside(self._around, loader)
        return self.state

    def _run_inside(self, contexts: Sequence[Callable[[], AbstractContextManager[Any]]], loader: Iterable[Any]) -> None:
        """Runs it in these contexts, and innermost in eval mode: a module may compute something from its weights there.

        Afterwards a sharded model has its shards as parameters: the contexts write into these, and so does the next step.

        The contexts are nested, since in an `ExitStack` Ctrl-C may come after one is entered and before its end is noted.
        """
        if contexts:
            with contexts[0]():
                self._run_inside(contexts[1:], loader)
            return
        modes, evaluated = modes_of(self.model), modes_of(self.model, training=())

        def put_back() -> None:
            reshard(self.model)  # first, so that a module which changes its weights in `train()` changes those that are trained
            set_modes(modes, since=evaluated)

        try:
            self.model.eval()
            super().run(loader)
        finally:
            in_full(put_back)

    def _expected_length(self, data: Iterable[Any]) -> int | None:
        """Micro-batches of this rank; other ranks may have more or fewer."""
        length = length_of(data)
        return length if length is None or self._limit is None else min(length, self._limit)

    def _open(self, data: Iterable[Any]) -> _Whole:
        opened = open_loader(data)
        micro_batches: Iterator[Any] = islice(opened, self._limit)
        if self._uneven != "all":
            micro_batches = _in_step(micro_batches, self._uneven, self._run_placeholder, lends=self._is_sharded)
        return _Whole(micro_batches, opened)

    def _run_placeholder(self, micro_batch: Any) -> None:
        """Runs forward only so that the others' collectives complete: nothing of it counts."""
        before = self._forward_state.mark()
        _forward(self, micro_batch)
        self._forward_state.put_back(before)

    def _close_epoch(self, started: float) -> None:
        data, given = self.state.dataloader, self.state.iteration
        is_part = self._uneven == "shortest" or self.should_terminate_single_epoch
        length = None if data is None or is_part else self._expected_length(data)
        self._publish()
        self._warn_of_metrics_with_my_names()
        with uneven_metrics(self, has_data=given > 0):
            super()._close_epoch(started)
        if length is not None and given < length:  # now, since a warning may be an error
            warnings.warn(
                f"the loader of the evaluation has len() {length} and gave {given} micro-batches, of which its metrics are; "
                "correct its __len__, or its dataset if a next() in it raises StopIteration",
                stacklevel=2,
            )

    def _refuse_running_metrics(self, data: Iterable[Any]) -> None:
        """Refuses metrics that are reduced at another event than EPOCH_COMPLETED, or than ITERATION_COMPLETED of even ranks."""
        if collectives.world_size() == 1 or self._uneven in ("shortest", "error"):
            return
        judged = (Events.EPOCH_COMPLETED, Events.ITERATION_COMPLETED)  # the first elsewhere, the second below
        for event in dict.fromkeys(event for event, *_ in attached(self) if event not in judged):
            for name, metric in waiting_metrics_at(self, event).items():
                raise ValueError(
                    f"metric {name!r} ({type(metric).__name__}) is reduced over ranks at {event}, and would hang where they "
                    "have different numbers of samples; attach it with usage=EpochWise()"
                )
        running = waiting_metrics_at(self, Events.ITERATION_COMPLETED)
        if not running:
            return
        length = self._expected_length(data)
        lengths = [int(length) for length in collectives.everyones(-1 if length is None else length)]
        if min(lengths) < 0 or len(set(lengths)) > 1:
            name, metric = next(iter(running.items()))
            raise ValueError(
                f"metric {name!r} ({type(metric).__name__}) is reduced over ranks after each micro-batch and would hang where "
                f"they have different numbers, got {['unknown' if n < 0 else n for n in lengths]}; attach it with "
                "usage=EpochWise(), or pass uneven='shortest' to create_evaluator"
            )

    def _warn_of_metrics_with_my_names(self) -> None:
        """Says once of each metric of Ignite that replaces the loss or a log in `state.metrics`."""
        for name, metric in metrics_published_at(self, Events.EPOCH_COMPLETED).items():
            if name in self.state.metrics and name not in self.progress.warned:
                self.progress.warned.add(name)
                self.logger.warning(
                    f"metric {name!r} ({type(metric).__name__}) replaces the {name!r} that the evaluator publishes itself; "
                    f"attach it under another name, such as 'my_{name}'"
                )

    def _publish(self) -> None:
        self.statistics.start(RankRequests())
        totals = self.statistics.finish(norm=0.0)
        if totals.sample_size == 0:
            hint = without_full_batch(self.state.dataloader)
            raise ValueError(f"data must hold at least one sample on some rank, got none: Σsample_size is 0{hint}")
        self.state.metrics["loss"] = totals.loss / totals.sample_size
        for name, value in totals.logs.items():
            weight = totals.log_weights.get(name, totals.sample_size)
            self.state.metrics[name] = value / weight if weight else math.nan
        if terms := [name for name in totals.logs if name.startswith(TERM) and totals.log_weights[name]]:
            self.state.metrics["loss"] = sum(self.state.metrics[name] for name in terms)


class _Whole(Batches):
    """A pass over micro-batches, one at a time.

    Args:
        micro_batches: what is evaluated.
        opened: the pass over the loader that gives them.
    """

    def __init__(self, micro_batches: Iterator[Any], opened: Iterator[Any]) -> None:
        self._micro_batches, self._opened = micro_batches, opened

    def __next__(self) -> Any:
        return next(self._micro_batches)

    def close(self) -> None:
        """Ends the thread that reads the loader, if there is one."""
        if isinstance(self._opened, FetchThread):
            self._opened.pause()


def _in_step(
    micro_batches: Iterator[Any], uneven: Uneven, run_placeholder: Callable[[Any], None], *, lends: bool
) -> Iterator[Any]:
    """Has every rank run forward equally often, because it has collectives. Collective, once for each micro-batch.

    Args:
        micro_batches: those of this rank.
        uneven: what to do where some ranks have fewer.
        run_placeholder: runs forward on a micro-batch that does not count.
        lends: whether that is what another rank runs at the same time, so that all use the same sharded modules; or else the
            latest of this rank.

    Raises:
        ValueError: one rank has run out and another has not, and `uneven` is `"error"`.
    """
    dummy, number = None, 0
    while True:
        micro_batch, number = next(micro_batches, _END), number + 1
        lacks = micro_batch is _END
        some_lack, some_have = (flag > 0 for flag in collectives.largest(lacks, not lacks))
        if not some_have or (some_lack and uneven == "shortest"):
            return
        if some_lack and uneven == "error":
            raise ValueError(
                f"data must be equally long on all ranks for uneven='error', got micro-batch {number} on some ranks only; make "
                "the shards equally long, or pass uneven='shortest' or uneven='replay' to create_evaluator"
            )
        dummy = dummy if lacks else micro_batch
        if some_lack and (lends or number == 1):
            dummy = borrowed_micro_batch(None if lacks else micro_batch)
        if lacks:
            run_placeholder(dummy)
        else:
            yield micro_batch


def _evaluate(engine: Evaluator, micro_batch: Any) -> Any:
    engine.state.output = engine.state.forward_output = None  # not held while the next one is computed
    output = _forward(engine, micro_batch)
    engine.statistics.add(output)
    engine.transfer.await_copies()  # the loader may give the next one in the same memory; forward is under way by now
    engine.state.forward_output = output
    return output if output.outputs is None else output.outputs


def _forward(engine: Evaluator, micro_batch: Any) -> ForwardOutput:
    with torch.no_grad(), engine.precision.autocast():
        forward, model, on_device = engine.forward, engine.model, engine.transfer(micro_batch)
        if engine.first_look.is_over:
            return as_forward_output(forward(model, on_device))
        carried, precision = engine.state.carried, engine.precision
        return as_forward_output(engine.first_look(forward, model, on_device, model, carried=carried, precision=precision))


def _refuse_padding(data: Iterable[Any]) -> None:
    for sampler in samplers_of(data):
        if not isinstance(sampler, DistributedSampler) or "total_size" not in vars(sampler):  # it may be a class of the user's
            continue
        surplus = sampler.total_size - len(sampler.dataset)  # type: ignore[arg-type]
        if surplus > 0:
            raise ValueError(
                f"data must hold each sample once, got a DistributedSampler that repeats {surplus} to make the ranks equal; "
                "use ShardedSampler(dataset, shuffle=False), whose shards may differ by one"
            )


@contextmanager
def kept_state(evaluator: Engine) -> Iterator[None]:
    """Within it the evaluator may run; afterwards its state is what it was before, metrics included.

    Args:
        evaluator: ours, or any engine of Ignite.
    """
    state, before = evaluator.state, {**vars(evaluator.state)}

    def put_back() -> None:
        evaluator.state = state
        put_entries_back(vars(state), before)

    try:
        yield
    finally:
        in_full(put_back)


@answers_other_words
def create_evaluator(
    model: nn.Module,
    forward: Forward,
    *,
    precision: PrecisionName = "fp32",
    uneven: Uneven = "all",
    data_dims: Sequence[str] | None = None,
) -> Evaluator:
    """Makes an engine that evaluates `model`.

    The model is put into eval mode for the run by its `eval()`; afterwards each module is back, by its `train()`, in the mode
    that it had. A model in DistributedDataParallel is run without its wrapper. All ranks have the buffers of rank 0 in the run,
    and afterwards their own again, so that an evaluation changes nothing in the training, except for buffers that the model
    writes in eval mode.

    Args:
        model: the model; it may be the one that is being trained.
        forward: as for `create_trainer`; the same function can serve both. A third parameter is the state of the evaluator.
        precision: as for `create_trainer`.
        uneven: what ranks with different numbers of micro-batches do. With `"all"` each evaluates its own, without a collective
            until the end; a `forward` with collectives of its own then hangs (SyncBatchNorm has none in eval mode). The other
            values cost a small collective for each micro-batch. With `"replay"` ranks that ran out run forward on a
            placeholder that does not count, as with sharded models always. With `"shortest"` all stop when the first rank runs
            out, so that samples are left out. With `"error"` unequal numbers are an error.
        data_dims: as in `UpdateOptions`, for a model on a mesh. Each sample counts once in the loss, in logs and in `predict`;
            metrics of Ignite add up over all ranks, so that means are right and sums count it once for each rank of its group.

    Returns:
        An engine whose `run(loader)` fills `state.metrics`.

    Raises:
        TypeError: `model` is not a module, or `forward` is not callable.
        ValueError: `precision` or `uneven` is not one of the values above, or `data_dims` does not belong to the model.

    Example:
        >>> import torch
        >>> from ignite_train import ForwardOutput, create_evaluator
        >>> def forward(model, x):
        ...     return ForwardOutput(model(x).sum(), sample_size=len(x), logs={"positive": (x > 0).sum()})
        >>> evaluator = create_evaluator(torch.nn.Linear(1, 1), forward)
        >>> evaluator.run([torch.ones(6, 1), -torch.ones(2, 1)]).metrics["positive"]
        0.75
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {describe(model)}")
    one_of("uneven", uneven, POLICIES)
    return Evaluator(model, forward, precision, uneven, checked_data_dims(data_dims))
