"""The engine whose one iteration is one update, and what its ranks agree on."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from html import escape
from inspect import getattr_static
from pathlib import Path
from types import MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any, Never, Protocol

from ignite.engine import Events, RemovableEventHandle
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ignite_train.arguments import ANYTHING, COUNT, check_fields, describe, named_ranks, positive_int
from ignite_train.data.grouping import MicroBatchGrouping
from ignite_train.data.run_data import RunData, known_size
from ignite_train.engine.attachable import Attachable, Stateful, owner_of
from ignite_train.engine.dispatch import add_counters, attached
from ignite_train.engine.ignite_state import from_ignite_state, is_ignite_state
from ignite_train.engine.introduction import introduction
from ignite_train.engine.limits import checked_limits, checked_loader
from ignite_train.engine.loop import Loop, iterate_on_request
from ignite_train.engine.sections import Sections
from ignite_train.events import EVENT_COUNTERS, TrainEvents
from ignite_train.forward import Forward, ForwardOutput
from ignite_train.metrics import single_metrics
from ignite_train.model.optimizers import parts_as_optimizers
from ignite_train.model.precision import refuse_cached_autocast
from ignite_train.other_words import answers_other_words, made_by, refuse_arguments, refuse_attribute
from ignite_train.ranks import collectives
from ignite_train.ranks.messages import Piggyback, RankRequests
from ignite_train.state import Carried, TrainState, UpdateOutput

__all__ = ["Moments", "OutputTransform", "Process", "Replicas", "Trainer"]

_COUNTERS = ("iteration", "num_steps", "num_skipped", "num_micro_batches")
_ARGUMENTS_OF_RUN = ("data", "max_epochs", "max_iters", "epoch_length", "resume")
_MADE = "create_trainer(model, optimizer, forward)"
_LIMITS = ("epoch_length", "max_epochs", "max_iters")
_GIVEN = {
    *("optimizer", "forward", "accumulation_steps", "max_grad_norm", "precision", "loss_scaling"),
    *("compile", "protect", "seed", "output_transform", "options"),
}
"""The arguments of `create_trainer` that a trainer does not have as attributes."""
_STEP_COMPLETED, _GRADIENTS_REDUCED = TrainEvents.STEP_COMPLETED, TrainEvents.GRADIENTS_REDUCED


OutputTransform = Callable[[UpdateOutput], Any]
"""Makes `state.output` of the record of an update."""


class Process(Protocol):
    """The update as its trainer sees it; see `Update`, the one there is."""

    def __call__(self, trainer: Trainer, micro_batches: Sequence[Any]) -> Any:
        """Does one update, and returns what becomes `state.output`."""

    def choose(self, trainer: Trainer) -> None:
        """Chooses the work that the attached handlers need. Called whenever one is attached or removed."""

    def instead(self, forward: Forward | None, name: str | None) -> AbstractContextManager[None]:
        """Within it an update runs another forward, if one is given, and its record has a name."""

    def named_gradients(self) -> dict[str, Tensor]:
        """The gradients in GRADIENTS_READY."""

    def mean_factor(self) -> float:
        """The factor that makes `.grad` the mean gradient, in GRADIENTS_READY."""

    @property
    def is_spoilt(self) -> bool:
        """Whether an update that was broken off has left a trace."""

    def mark_everything(self) -> None:
        """Remembers in each update what one that is broken off has to put back."""

    def state_dict(self) -> dict[str, Any]:
        """The counts and the loss scale that it keeps from update to update."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes it over."""


@dataclass(slots=True)
class Moments:
    """Functions that an update calls beside its events: few moments, each of which costs nothing where it has no function.

    Attributes:
        output_transform: called with the record when it is published, and makes `state.output` of it; None: that is the record.
        on_backward: called with the result of a forward when its backward is done.
        before_norm: called with the trainer after an update's last backward, before the norm is taken, on every rank; after
            that of each further evaluation too, where the optimizer has a closure.
        frozen: give the parameters that the latest update did not move, to handlers that move parameters beside the optimizer.
        after_update: called with the trainer when an update is counted, before its last events.
        on_record: called with the record of an update, after `after_update`.
    """

    output_transform: OutputTransform | None = None
    on_backward: list[Callable[[ForwardOutput], None]] = field(default_factory=list)
    before_norm: list[Callable[[Trainer], None]] = field(default_factory=list)
    frozen: list[Callable[[], Sequence[nn.Parameter]]] = field(default_factory=list)
    after_update: list[Callable[[Trainer], None]] = field(default_factory=list)
    on_record: list[Callable[[UpdateOutput], None]] = field(default_factory=list)


@dataclass(slots=True)
class Replicas:
    """Facts about the replicas of the model, of which each rank has one or a part.

    Attributes:
        are_equal: False while replicas that train locally differ.
        are_elastic: whether they come and go, so that others take part though there is one rank.
        have_own_weights: False while a handler has put other weights into the model, for an evaluation say, which must not be
            saved.
        rank: the number of this process, and `num_ranks` how many there are; asked once, since the parts of an update are made
            for them.
        num_data_ranks: how many ranks, or groups of ranks that are fed the same, have samples of their own.
        have_begun: whether a run has begun, or an update, with as many ranks.
    """

    are_equal: bool = True
    are_elastic: bool = False
    have_own_weights: bool = True
    rank: int = field(default_factory=collectives.rank)
    num_ranks: int = field(default_factory=collectives.world_size)
    num_data_ranks: int = field(default_factory=collectives.world_size)
    have_begun: bool = False

    def begin(self) -> None:
        """Notes that a run begins.

        Raises:
            RuntimeError: there are more ranks now, or fewer, than when the trainer was made.
        """
        number = collectives.world_size()
        if number != self.num_ranks:
            what_to_do = (
                "call init_process_group (or enter idist.Parallel) before create_trainer"
                if number > self.num_ranks
                else "run it before idist.finalize() (or inside idist.Parallel), or make another by create_trainer"
            )
            ranks = "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
            raise RuntimeError(f"trainer was made for {ranks}, and this run has {number}; {what_to_do}")
        self.have_begun = True

    @property
    def is_alone(self) -> bool:
        """Whether a request need not travel to others."""
        return self.num_ranks == 1 and not self.are_elastic


class Trainer(Loop):
    """An Ignite engine whose iteration is one optimizer update; `create_trainer` makes it.

    Attributes:
        state: counters, the latest output and the metrics; see `TrainState`.
        process: the update that each iteration does.
        config: how the trainer was made, in plain types: accumulation steps, limit of the norm, precision, reduction, seed. It
            stands in each checkpoint and in TensorBoard. A handler may add what it was made with.
        piggybacks: handlers whose numbers travel with the statistics of each update; the same on all ranks, in one order.
        requests: what this rank asks of all ranks with these numbers.
        moments: functions that an update calls beside its events.
        replicas: what is known about the replicas of the model.
        checkpoint: the `Checkpoint` that saves and resumes this run; None without one.
    """

    state: TrainState
    process: Process

    @made_by(_MADE)
    def __init__(
        self,
        update: Process,
        grouping: MicroBatchGrouping,
        parts: Mapping[str, Any],
        settings: Mapping[str, Any],
        state: TrainState,
        output_transform: OutputTransform | None,
    ) -> None:
        super().__init__(update)
        self.state = state
        this = weakref.proxy(self)
        self.state.ask(lambda: this.progress.done_before(this.state), known_size)
        self.requests = RankRequests()
        self.piggybacks: list[Piggyback] = []
        self.moments, self.replicas = Moments(output_transform), Replicas()
        self.parts: dict[str, Stateful] = dict(parts)
        self.config = dict(settings)
        self.checkpoint: Any = None
        self.default_handlers: list[Attachable] = []  # attached by default and not by the user
        self.data = RunData(
            grouping, self.state, self.progress, self.requests, lambda: this.fire_event(Events.DATALOADER_STOP_ITERATION)
        )
        self.register_events(*TrainEvents, event_to_attr=EVENT_COUNTERS)
        self._handlers_changed()

    @property
    def model(self) -> nn.Module:
        """The model that is trained, without the `DistributedDataParallel` around it."""
        model = self.parts["model"]
        assert isinstance(model, nn.Module)  # noqa: S101  # `create_trainer` has checked it
        return model

    @property
    def optimizers(self) -> Mapping[str, Optimizer]:
        """The optimizers by the names that they were given, or the only one as `"optimizer"`; a trainer keeps those it has."""
        return MappingProxyType(parts_as_optimizers(self.parts))

    if not TYPE_CHECKING:  # or else each attribute would be known

        def __getattr__(self, name: str) -> Any:
            """Answers an attribute of another library."""
            raise refuse_attribute(self, name)

    def __dir__(self) -> list[str]:
        """The attributes that can be read."""
        kind = type(self)
        return [name for name in super().__dir__() if not isinstance(getattr_static(kind, name, None), _Given)]

    def _repr_html_(self) -> str:
        """A notebook's view of it: the model, its updates, and how far it has come."""
        state = self.state
        lines = self.introduce()
        done = f"epoch {state.epoch}, update {state.iteration}: {state.num_steps} steps, {state.num_skipped} skipped"
        numbers = [f"{name} {value:.4g}" for name, value in single_metrics(state.metrics, set()).items()]
        rows = [repr(self), *lines, done, *numbers]
        return f"<b>{escape(rows[0])}</b><br>" + "<br>".join(map(escape, rows[1:]))

    def introduce(self) -> list[str]:
        """A few lines about what is trained where, and how many updates there will be."""
        return introduction(
            self.model,
            self.optimizers.values(),
            self.config,
            self.state,
            updates=self.expected_updates,
            data_ranks=self.replicas.num_data_ranks,
        )

    def __repr__(self) -> str:
        parts = [type(part).__name__ for part in self.parts.values()]
        settings = [f"accumulation_steps={self.config['accumulation_steps']}", self.config["precision"]]
        counters = [f"epoch {self.state.epoch}", f"update {self.state.iteration}"]
        return f"{type(self).__name__}({', '.join([*parts, *settings, *counters])})"

    def run(
        self,
        data: Iterable[Any] | None = None,
        max_epochs: int | None = None,
        max_iters: int | None = None,
        epoch_length: int | None = None,
        *,
        resume: str | Path = "auto",
        **unknown: Never,
    ) -> TrainState:
        """Trains until a limit is reached.

        A second call continues where the first ended, whether by its limit, by `terminate` or by an exception; a run that has
        reached its limit does nothing and says so. All ranks must call it. A script that is started again needs a trainer and a
        `Checkpoint` for each call, see "Several stages in one script" in the cookbook.

        Args:
            data: a loader of micro-batches, sized or not; the trainer groups them. Ranks may have different numbers. With None,
                which needs `epoch_length`, forward is called with None as its micro-batch.
            max_epochs: epochs, in all; 1 if no limit was ever given. An epoch is one pass over the data.
            max_iters: updates, in all. Either this or `max_epochs`.
            epoch_length: for data without a length or an end: an epoch is this many updates, and passes over the data follow
                each other across epochs. When a pass ends, DATALOADER_STOP_ITERATION fires and the next one begins. A second
                call with the same data continues with the same length.
            resume: with a `Checkpoint` attached, what a trainer that has not trained yet does first: `"auto"` goes back to the
                newest whole checkpoint, and trains from the beginning only where there has never been one; `"must"`
                insists on one; `"never"` trains from the beginning, in a directory that must have no checkpoints; a path
                names one checkpoint, or another directory of them. Where it lies outside of the run's own directory, the run
                begins there, and continues from its own checkpoints once it has some.
            unknown: the words of other libraries, such as `epochs`, are refused with what to write here.

        Returns:
            The state.

        Raises:
            TypeError: `data` cannot be iterated, or a limit is not an integer.
            ValueError: a limit is below 1 or below what was trained already, or both are given, or `data` is empty, or an
                iterator ended before the limit, or `resume` asks for what is not there.
            RuntimeError: it is called inside a handler of the same run, or there are more or fewer ranks than when the trainer
                was made.
            CheckpointError: no checkpoint can be read; or the trainer has trained before its `Checkpoint` was attached, and
                there are checkpoints of another start, which `"auto"` would neither continue nor keep.
        """
        refuse_arguments("Trainer.run", unknown, _ARGUMENTS_OF_RUN)
        self.progress.refuse_nested_run()
        self.replicas.begin()
        refuse_cached_autocast()
        loader, state = None if data is None else checked_loader(data), self.state
        self.data.begin_run(loader, epoch_length)
        with self._resuming(resume):
            limits = checked_limits(state, max_epochs, max_iters)
            is_renewed = self.has_handlers(Events.DATALOADER_STOP_ITERATION)  # by a handler that puts another iterator there
            self.data.refuse_used_iterator(loader, None if is_renewed else limits[0])
            state.max_epochs, state.max_iters = limits
            self.requests.begin(stop_epoch=self.progress.epoch_open and self.requests.stop_epoch)
            try:
                super().run(loader)
            finally:
                self.data.pause()
        return state

    @contextmanager
    def session(self, *, max_iters: int | None = None, resume: str | Path = "auto") -> Iterator[TrainState]:
        """A run whose updates are made by calls of `update`, and not from a loader.

            with trainer.session() as state:
                for micro_batch in micro_batches[state.iteration :]:
                    record = trainer.update([micro_batch])

        It begins as `run` does: a `Checkpoint` restores the state, threads and files of handlers are opened, STARTED fires.
        It ends as `run` does: with TERMINATE or INTERRUPT after a request to stop, with COMPLETED, or with EXCEPTION_RAISED if
        an exception leaves the `with`; then all is closed. There are no epochs and no events of them. What the loop inside
        reads is its own to find again after a resume; `state.iteration` says how many updates were done. Before each
        update, the first too, it ends if `should_terminate` or `should_interrupt` is set. All ranks must open the session and
        leave it, which is when they agree about what was asked for after the last update, in one small collective. Several
        trainers can have sessions at the same time, and one can `run` in the session of another.

        Args:
            max_iters: how many updates the training has in all, for `state.max_iters` and what shows progress. None: the limit
                that was given before, if any.
            resume: as for `run`.

        Yields:
            The state.

        Raises:
            RuntimeError: the trainer is running already, or `run` has left an epoch open, or there are more or fewer ranks than
                when the trainer was made.
            ValueError: `max_iters` is below 1 or below what was trained already, or `resume` asks for what is not there.
            CheckpointError: no checkpoint can be read.
        """
        self.progress.refuse_nested_run()
        self.replicas.begin()
        refuse_cached_autocast()
        state = self.state
        with self._resuming(resume):
            self._refuse_open_epoch("session was opened")
            state.max_epochs = None
            state.max_iters = state.max_iters if max_iters is None else checked_limits(state, None, max_iters)[1]
            self.requests.begin()
            with super().session():
                yield state

    @property
    def in_session(self) -> bool:
        """Whether a session is open: from after its STARTED to before its closing events."""
        return self.progress.session_open

    @property
    def is_iterating(self) -> bool:
        """Whether an update is under way, of a run or on request: handlers of its events find the state half changed."""
        return self.progress.iterating or self.progress.updating

    @property
    def updates_done(self) -> int:
        """The updates that have had their effect: the weights are those after the latest of them, also inside the next one."""
        return self.state.iteration - (self.progress.iterating and not self.progress.settled)

    def update(self, micro_batches: list[Any], *, forward: Forward | None = None, name: str | None = None) -> UpdateOutput:
        """Makes one update from the micro-batches that it is given, as `run` does from those of a loader.

        ITERATION_STARTED, the events of `TrainEvents` and ITERATION_COMPLETED fire, and the counters count; nothing of epochs
        or loaders fires. All ranks call it equally often. Their lists may differ in length or be empty. Where the model is
        sharded, or with `uneven="replay"`, the ranks tell one another how long they are, in one more small collective. A
        forward with collectives of its own needs `uneven="replay"` for lists that differ.

        Call it in a `session`: in a loop of your own, or in a handler of another trainer. Without a session it does the same
        update, but what begins and ends with a run does not take part: handlers of STARTED and COMPLETED, and whatever opens a
        thread or a file for a run, such as `FailureBoard` and `HangWatch`. A warning says so once. A trainer with a
        `Checkpoint` needs a session.

        After an exception the counters are those before this update, unless it had moved the parameters already.

        Args:
            micro_batches: the group of this rank, of any length, whatever `accumulation_steps` is.
            forward: runs instead of the trainer's own, in this update only, as for a regulariser that is due in every
                16th update. The update counts as any other. It is never compiled as a whole.
            name: the `name` in the record, by which `only` selects updates for schedules, averages and metrics.

        Returns:
            The record of the update.

        Raises:
            TypeError: `micro_batches` is not a list, or holds None; `forward` cannot be called with a model and a micro-batch,
                or `name` is not a string.
            RuntimeError: it is called inside a handler of its own run or update, or while `run` has left an epoch open, or a
                stop was asked for, or a `Checkpoint` is attached and no session is open; or in the first update without a
                session there are more or fewer ranks than when the trainer was made.
        """
        if not isinstance(micro_batches, list):
            raise TypeError(f"micro_batches must be a list, got {describe(micro_batches)}; pass update([micro_batch])")
        if any(micro_batch is None for micro_batch in micro_batches) and not self.data.grouping.rules.none_is_empty:
            raise TypeError("micro_batches must not hold None; leave it out, since a rank without data passes update([])")
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name must be a string, or None, got {describe(name)}")
        with self.process.instead(forward, name):
            self._refuse_update()
            self.state.batch = self.data.given(micro_batches)
            iterate_on_request(self, self.data)
        assert self.state.update_output is not None  # noqa: S101  # each update publishes one
        return self.state.update_output

    def _refuse_update(self) -> None:
        """Raises where no update can be asked for, and warns once where handlers of a run would take no part in it."""
        if self.progress.session_open and not self.progress.updating:
            if self.should_terminate or self.should_interrupt:
                raise RuntimeError(
                    "update was called after a request to stop; before an update, leave the loop if "
                    "trainer.should_terminate or trainer.should_interrupt is set"
                )
            limit = self.state.max_iters
            if limit is not None and self.state.iteration >= limit:
                raise RuntimeError(f"update was called after max_iters={limit} updates; raise session's max_iters")
            return
        if self.progress.running or self.progress.updating:
            raise RuntimeError("update was called inside a handler of its own run or update; call it from another trainer's")
        self._refuse_open_epoch("update was called")
        if not self.replicas.have_begun:
            self.replicas.begin()
        if self.checkpoint is not None:
            raise RuntimeError("update needs a session where a Checkpoint is attached; write: with trainer.session(): ...")
        if "session" not in self.progress.warned and (self.on_enter or self.has_handlers(Events.STARTED)):
            self.progress.warned.add("session")
            self.logger.warning(
                "update was called without a session, in which STARTED, COMPLETED, FailureBoard, HangWatch and whatever else "
                "begins and ends with a run have no part; write: with trainer.session(): ..."
            )

    def _refuse_open_epoch(self, what: str) -> None:
        if self.progress.epoch_open:
            raise RuntimeError(
                f"{what} in the middle of epoch {self.state.epoch}, which run has left after update "
                f"{self.state.iteration}; end the epoch with run first"
            )

    def _expected_length(self, data: Any) -> int | None:
        return self.data.expected_length(data)

    def _resuming(self, resume: str | Path) -> AbstractContextManager[None]:
        """The `with` in which a run trains: its `Checkpoint`, if there is one, restores the state when it is entered."""
        if not isinstance(resume, (str, Path)):
            raise TypeError(
                f"resume must be 'auto', 'must', 'never' or a path, got {describe(resume)}; leave it out, and a run with a "
                "Checkpoint continues where it was"
            )
        if self.checkpoint is not None:
            resuming: AbstractContextManager[None] = self.checkpoint.resuming(resume)
            return resuming
        if resume not in ("auto", "never"):
            raise ValueError(f"resume must be 'auto' or 'never' without checkpoints, got {resume!r}; attach a Checkpoint first")
        return nullcontext()

    def terminate(self, skip_completed: bool = False, *, agreed: bool = False) -> None:
        """Ends the run on all ranks after the same update.

        Asked for from GET_BATCH_STARTED to ITERATION_COMPLETED, that update is the last one; in STARTED or EPOCH_STARTED, the
        first one that follows; in EPOCH_COMPLETED, no other one follows. On several ranks the request travels with the next
        update's statistics (or the end of the epoch or of the session), and that update is the last one, everywhere.

        Args:
            skip_completed: do not fire COMPLETED. On several ranks it needs `agreed=True`, because requests travel without it.
            agreed: every rank calls this in the same update, because the reason is the same on all of them: no need to ask.
        """
        if agreed or self.replicas.is_alone:
            super().terminate(skip_completed is True)  # as a handler it is called with the trainer
        else:
            self.requests.stop = True

    def terminate_epoch(self, skip_epoch_completed: bool = False, *, agreed: bool = False) -> None:
        """Ends the epoch on all ranks after the same update; as `terminate` does the run. In EPOCH_COMPLETED it does nothing.

        With several ranks, each has read one micro-batch ahead of a loader without a length, which the next epoch does not
        have; a loader that continues where it was needs `epoch_length=` in `run`, which reads nothing ahead.
        `skip_epoch_completed` needs `agreed=True` there, as `skip_completed` does.

        Raises:
            RuntimeError: it is called in a session.
        """
        if self.progress.session_open:
            raise RuntimeError("terminate_epoch was called in a session, which has no epochs; call terminate()")
        if agreed or self.replicas.is_alone:
            super().terminate_epoch(skip_epoch_completed is True)
        else:
            self.requests.stop_epoch = True

    def interrupt(self, *, agreed: bool = False) -> None:
        """Ends the run on all ranks after the same update, so that the next `run` continues there; as `terminate` does.

        INTERRUPT is fired in place of TERMINATE and COMPLETED.
        """
        if agreed or self.replicas.is_alone or not self.interrupt_resume_enabled:  # or else Ignite refuses
            super().interrupt()
        else:
            self.requests.interrupt = True

    def mark_everything(self) -> None:
        """Has each update remember buffers and random state, so that an update that ends with an exception leaves no trace.

        Without this they are remembered only where a setting of the trainer needs it. `Checkpoint` calls it, so that a run that
        continues after an exception saves what one without the exception would.
        """
        self.process.mark_everything()

    def warn_if_spoilt(self) -> None:
        """Warns once if an update that an exception broke off has left a trace in buffers, which were not remembered."""
        if self.process.is_spoilt and "spoilt" not in self.progress.warned:
            self.progress.warned.add("spoilt")
            self.logger.warning(
                "an update that an exception broke off has moved buffers of the model, such as running statistics, and they "
                "were not put back, since no Checkpoint was attached then; checkpoints are of a run that is not bitwise the "
                "one without the exception; attach Checkpoint before the first run"
            )

    def publish(self, output: UpdateOutput) -> None:
        """Puts the record of an update, and what the output transform makes of it, into the state."""
        state, transform = self.state, self.moments.output_transform
        state.update_output = output
        state.output = output if transform is None else transform(output)

    def amend(self, output: UpdateOutput) -> UpdateOutput:
        """Replaces the record of the update; the output transform is called once an update, and not again."""
        if self.state.output is self.state.update_output:
            self.state.output = output
        self.state.update_output = output
        return output

    def finish_update(self, requests: RankRequests, *, applied: bool) -> None:
        """Fires the last event of an update that has had its effect, and does what the ranks asked for together."""
        if requests.stop:
            self.terminate(agreed=True)
        if requests.stop_epoch:
            self.terminate_epoch(agreed=True)
        if requests.interrupt:
            self.interrupt(agreed=True)
        self.progress.ranks_have_more = requests.more_data > 0
        state, moments = self.state, self.moments
        for callback in moments.after_update:
            callback(self)
        output = state.update_output
        assert output is not None  # noqa: S101  # published before
        for record in moments.on_record:
            record(output)
        if applied:
            self.fire_event(_STEP_COMPLETED)
            return
        if state.num_skipped & (state.num_skipped - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
            numbers = f"gradient norm {output.grad_norm:g}, loss scale {output.loss_scale:g}"
            what = "the sample sizes of all ranks add up to 0" if output.skipped_reason == "no_samples" else numbers
            self.logger.warning(
                f"update {state.iteration} was skipped ({output.skipped_reason}): {what}; skipped so far: {state.num_skipped}"
            )
        self.fire_event(TrainEvents.STEP_SKIPPED)

    @property
    def sections(self) -> Sections:
        """How the time of this trainer's runs divides into sections, measured from the first time that this is asked for."""
        if self._sections is None:
            self._sections = sections = Sections()
            self.data.waiting = partial(sections.within, "data")
            self.begin_section = sections.switch
            self.on_enter.insert(0, lambda _: sections.switch("handler"))
            self.on_exit.append(lambda: sections.switch(None))
        return self._sections

    def section(self, section: str) -> AbstractContextManager[None]:
        """A `with` whose time is that of a section of the run, such as `"evaluation"`, if anything measures sections."""
        return nullcontext() if self._sections is None else self._sections.within(section)

    def verify_ranks(self) -> None:
        """Compares now what the consistency checks would send with the next update. To be called before the state is saved.

        The `StateConsistency` that is attached by default compares the state of this moment, unless the latest update was
        compared already. An error is raised on all ranks. One small all-reduce for each check that is attached; without any it
        does nothing. Collective.
        """
        for piggyback in self.piggybacks:
            piggyback.settle()

    def replace_default(self, handler: object) -> None:
        """Takes off the default handler of the same kind. A handler that can be a default calls it when it is attached.

        One that watches whole runs, by its methods, still watches the run that is under way.
        """
        for default in [default for default in self.default_handlers if isinstance(handler, type(default))]:
            self.default_handlers.remove(default)
            self.on_enter = [function for function in self.on_enter if owner_of(function) is not default]
            for event in [event for event, other, _ in attached(self) if other is default]:
                self.remove_event_handler(default, event)

    @property
    def expected_updates(self) -> int | None:
        """How many updates the whole run has, as far as can be told: updates that are done, and updates to come by its limit.

        Each epoch to come counts with the length of the latest. None without a limit, where the length of an epoch is unknown,
        and where `accumulation_steps`, unless it is one number, gives epochs different lengths.
        """
        state, progress = self.state, self.progress
        if state.max_iters is not None:
            return state.max_iters
        are_alike = self.data.stream is not None or isinstance(self.config["accumulation_steps"], int)
        if state.max_epochs is None or not state.epoch_length or not are_alike:
            return None
        to_come = (state.max_epochs - state.epoch) * state.epoch_length
        if progress.epoch_open:
            to_come += max(0, state.epoch_length - progress.epoch_iteration - progress.iterating)
        return state.iteration + to_come

    @answers_other_words
    def total_updates(self, data: Iterable[Any] | None, max_epochs: int = 1, *, epoch_length: int | None = None) -> int:
        """The updates of a run from its beginning, for the length of a learning-rate schedule. Collective.

        It counts as `run` does, with `accumulation_steps` and the longest of the ranks' loaders, and opens nothing. Updates
        that will be skipped are counted, so a schedule that follows steps may not reach its end.

        Args:
            data: the loader, whose length is taken to be the same in each epoch; None as for `run`.
            max_epochs: as for `run`.
            epoch_length: as for `run`.

        Returns:
            The number.

        Raises:
            TypeError: `data` cannot be iterated, or a number is not an integer.
            ValueError: a number is below 1, or a loader has no length and no `epoch_length` is given, or with
                `reduction="elastic"`, where the number of replicas is unknown.
        """
        if self.replicas.are_elastic:
            raise ValueError(
                "total_updates must be left out with reduction='elastic', where the number of replicas to come is unknown; "
                "limit the run by max_iters= in run, which is then the total"
            )
        loader: Any = data if data is None else checked_loader(data)
        epochs = positive_int("max_epochs", max_epochs)
        if epoch_length is not None:
            return epochs * positive_int("epoch_length", epoch_length)
        total = 0
        for epoch in range(1, epochs + 1):
            updates = self.data.grouping.updates(loader, epoch=epoch, first_update=total + 1)
            if updates is None:
                raise ValueError(
                    f"data must have a length on all ranks, got {type(loader).__name__}; pass epoch_length to this and to run, "
                    "or limit the run with max_iters, which is then the total"
                )
            total += updates
        return total

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of this update by parameter name: reduced over ranks, unscaled, normalised, not yet clipped.

        Copies, made when asked for: changing them changes nothing. Parameters without a gradient are left out.

        Raises:
            GradientAccessError: outside of handlers of GRADIENTS_READY.
        """
        return self.process.named_gradients()

    def set_data(self, data: Any) -> None:
        """Has the run continue with another loader. All ranks must call it.

        Call it between two epochs: in a handler of DATALOADER_STOP_ITERATION, EPOCH_STARTED or EPOCH_COMPLETED. In a run with
        `epoch_length` it may be called anywhere, and the next group comes from the beginning of `data`. If the group that
        is under way there breaks off, another call of `run` is refused, since the group cannot be read again.

        A resumed run fires EPOCH_STARTED again where it continues within an epoch, so choose the loader there by `state.epoch`;
        what EPOCH_COMPLETED or DATALOADER_STOP_ITERATION had set must be passed to `run` by the script that resumes.

        Checkpoints have the place of one loader, the latest. A run that resumes as an epoch begins puts its generators into the
        loader of that epoch, unless this is set in EPOCH_STARTED and the latest was given to `run`. So loaders that take turns
        need an order that depends on seed and epoch alone, as that of a `ResumableLoader` does.

        Raises:
            TypeError: `data` cannot be iterated.
            RuntimeError: it is called within an epoch, which is one pass over the loader that it began with.
        """
        self.data.replace(checked_loader(data))

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]  # Ignite returns an OrderedDict
        """Counters, limits, position in the epoch, user keys, the loss scaling and `state.carried`.

        It has neither model nor optimizer: a `Checkpoint` saves these too.

        Raises:
            ValueError: a name in `state_dict_user_keys` is one of the trainer's own.
        """
        state = self.state
        saved: dict[str, Any] = {name: getattr(state, name) for name in _COUNTERS}
        if self.progress.iterating and not self.progress.settled:  # an update that has not had its effect is not done
            saved["iteration"], saved["num_micro_batches"] = state.iteration - 1, self.progress.micro_batches_before
        saved["epochs_completed"] = state.epoch - self.progress.epoch_open
        saved["epoch_iteration"] = self.progress.iterations_in_epoch if self.progress.epoch_open else 0
        saved["epoch_length"], saved["max_epochs"], saved["max_iters"] = state.epoch_length, state.max_epochs, state.max_iters
        saved["ended"], saved["update"] = self.progress.ended, self.process.state_dict()
        saved["end_of_epoch"] = (
            [self.should_terminate_single_epoch, self.requests.stop_epoch] if self.progress.epoch_open else []
        )
        saved["carried"] = state.carried.state_dict()
        if clashes := saved.keys() & {*self.state_dict_user_keys}:
            raise ValueError(f"state_dict_user_keys must not have names of the trainer's own, got {min(clashes)!r}")
        return saved | {key: getattr(state, key) for key in self.state_dict_user_keys}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes back to where `state_dict` was taken, and the next `run` continues there.

        It may also come from a stock Ignite engine, whose counters of batches are converted; its model and optimizer are
        loaded by you, and where data shuffles, the samples that are left of a half-read epoch may differ.

        Raises:
            TypeError: `state_dict` is not a mapping, or a limit is not an integer.
            ValueError: a key is missing, or a counter or a limit is out of range.
        """
        carried = Carried()
        if is_ignite_state(state_dict):
            converted = from_ignite_state(state_dict, self.config["accumulation_steps"])
            fresh = {"update": self.process.state_dict(), "carried": carried.state_dict(), "end_of_epoch": []}
            state_dict = {**state_dict, **converted, **fresh}
        counters = dict.fromkeys((*_COUNTERS, "epochs_completed", "epoch_iteration"), COUNT)
        others = (*_LIMITS, "ended", "update", "carried", "end_of_epoch", *self.state_dict_user_keys)
        check_fields("Trainer", state_dict, counters | dict.fromkeys(others, ANYTHING))
        for key in (key for key in ("max_epochs", "max_iters") if state_dict[key] is not None):
            positive_int(f"state_dict[{key!r}]", state_dict[key])
        carried.load_state_dict(state_dict["carried"])
        stops, stops_everywhere = state_dict["end_of_epoch"] or (False, False)
        self.process.load_state_dict(state_dict["update"])
        self.state.carried.load_state_dict(carried.state_dict())
        self.data.forget_position()
        self.progress.epoch_started = self.progress.interrupted = False
        self.state.update_output = self.state.output = None  # a checkpoint puts its record back after this
        for key in (*_COUNTERS, *_LIMITS, *self.state_dict_user_keys):
            setattr(self.state, key, state_dict[key])
        self.progress.epoch_iteration, self.progress.ended = state_dict["epoch_iteration"], bool(state_dict["ended"])
        self.progress.epoch_open = self.progress.epoch_iteration > 0
        self.should_terminate_single_epoch = stops
        self.requests.begin(stop_epoch=bool(stops_everywhere))
        self.state.epoch = state_dict["epochs_completed"] + self.progress.epoch_open

    def register_events(self, *event_names: Any, event_to_attr: Mapping[Any, str] | None = None) -> None:
        """Adds events that can be fired; `event_to_attr` names the state attribute that their filters count.

        The map that this trainer's filters read is its own: another engine in the process cannot re-point it. The events are
        put into Ignite's map of the whole process too, unless they are there, since loggers and `global_step_from_engine`
        look there. So the states of other engines get the counters as attributes, which stay 0.
        """
        super().register_events(*event_names)
        if event_to_attr:
            add_counters(self.state, event_to_attr)

    def add_event_handler(self, event_name: Any, handler: Any, *args: Any, **kwargs: Any) -> RemovableEventHandle:
        """Attaches a handler, as in Ignite; the error for a misspelt event names the nearest one.

        Raises:
            TypeError: `handler` cannot be called, or is a learning-rate scheduler or a method of one.
            ValueError: the event is not known.
        """
        if isinstance(handler, LRScheduler):
            raise TypeError(
                f"handler must not be a scheduler, got {describe(handler)}; use LearningRateSchedule(scheduler).attach(trainer)"
            )
        if not callable(handler) and not isinstance(handler, Attachable):
            raise TypeError(f"handler must be callable, got {describe(handler)}")
        if isinstance(handler, MethodType) and isinstance(handler.__self__, LRScheduler):
            raise TypeError(
                f"handler must not be a method of a scheduler, got {type(handler.__self__).__name__}.{handler.__name__}, which "
                "would be called with the trainer; use LearningRateSchedule(scheduler).attach(trainer)"
            )
        return super().add_event_handler(event_name, handler, *args, **kwargs)

    def remove_event_handler(self, handler: Any, event_name: Any) -> None:
        """Removes a handler, as in Ignite; with the last event of an `Attachable` all that its `attach` has put elsewhere too.

        Functions of `on_exit` stay: they close what a run has opened.
        """
        super().remove_event_handler(handler, event_name)
        if not isinstance(handler, Attachable) or any(other is handler for _, other, _ in attached(self)):
            return
        for engine in filter(None, (self, *(reference() for reference in handler.attached_evaluators))):
            for event, other, _ in attached(engine):
                if owner_of(other) is handler and engine.has_event_handler(other, event):  # one call removes all that are equal
                    engine.remove_event_handler(other, event)
        # New lists: a run that is entered, or an update that is under way, still reads those before.
        self.on_enter = [function for function in self.on_enter if owner_of(function) is not handler]
        self.moments.on_record = [function for function in self.moments.on_record if owner_of(function) is not handler]
        self.piggybacks = [piggyback for piggyback in self.piggybacks if piggyback is not handler]
        handler.attached_evaluators = ()
        handler.taken_off()

    def _handlers_changed(self) -> None:
        """Has the update choose once, and not in each update, what it does for the handlers that there are."""
        self.requests.changes_gradients = self.has_handlers(_GRADIENTS_REDUCED)
        self.process.choose(self)

    # --- what the loop asks -----------------------------------------------------------------------------------------------

    def _open(self, data: Any) -> RunData:
        self.data.open(data)
        return self.data

    def _take_back(self) -> None:
        super()._take_back()
        self.data.take_back()

    def _has_nothing_to_do(self) -> bool:
        """The same on all ranks: one that does nothing would leave the others waiting. Collective."""
        reached = super()._has_nothing_to_do()
        of_ranks = [float(reached)] if self.replicas.are_elastic else collectives.everyones(reached)
        if len({*of_ranks}) > 1:
            idle = [rank for rank, is_reached in enumerate(of_ranks) if is_reached]
            raise ValueError(
                f"max_epochs and max_iters must be the same on all ranks, got limits that {named_ranks(idle, 'has', 'have')} "
                f"reached and others have not; here {self.state.max_epochs} and {self.state.max_iters}"
            )
        return reached

    def _close_epoch(self, started: float) -> None:
        wrong_length = self.data.finish()
        try:
            super()._close_epoch(started)
        finally:  # a handler of EPOCH_COMPLETED may raise an error when the epoch is closed
            self.data.epoch_closed()
        if wrong_length is not None:  # now, since a warning may be an error
            warnings.warn(wrong_length, stacklevel=2)
        self.progress.data_ended &= self.data.stream is None  # a stream says itself when a pass has ended
        self.requests.stop_epoch = False  # what handlers of EPOCH_COMPLETED asked for is done already

    def _take_up_stops(self, *, between_updates: bool = False) -> None:
        """Between two epochs, where a run begins, where a session ends, and in a single process no update carries requests."""
        requests = self.requests
        stop, interrupt = requests.stop, requests.interrupt
        between_updates &= not self.replicas.are_elastic  # then what a replica asks for travels with the next update
        if between_updates:
            stop, interrupt = (number > 0 for number in collectives.largest(stop, interrupt))
        if (stop or interrupt) and (between_updates or self.replicas.is_alone):
            if stop and not self.should_terminate:
                self.terminate(agreed=True)
            if interrupt:
                self.interrupt(agreed=True)
        super()._take_up_stops()


class _Given:
    """Refuses to set such an argument. A `__setattr__` would cost time in each update."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, trainer: Trainer | None, _: type) -> Never:
        raise AttributeError(self.name)  # so that `__getattr__` answers

    def __set__(self, trainer: Trainer, _: Any) -> Never:
        hint = "; a trainer keeps what it was made with: make another by create_trainer to change that"
        raise refuse_attribute(trainer, self.name, hint)

    def __delete__(self, trainer: Trainer) -> Never:
        raise refuse_attribute(trainer, self.name)


for _name in _GIVEN:
    setattr(Trainer, _name, _Given(_name))
