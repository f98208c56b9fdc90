"""The engine whose one iteration is one update, and what its ranks agree on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from ignite.engine import RemovableEventHandle
from torch import Tensor

from ignite_train import distributed
from ignite_train.arguments import positive_int, shown
from ignite_train.events import EVENT_COUNTERS, TrainEvents
from ignite_train.loop import Batches, Loop
from ignite_train.signals import Passenger, Signals
from ignite_train.state import TrainState, UpdateOutput

__all__ = ["Groups", "OpenGroups", "Process", "Trainer"]

_COUNTERS = ("iteration", "num_steps", "num_skipped", "micro_batch")


class Groups(Batches, Protocol):
    """One pass over the data of all ranks, in groups of micro-batches.

    Attributes:
        more: this rank's vote on another group after the one given last; see `Signals`.
        widest: micro-batches of the rank that had the most of them in the group given last; None if nobody knows.
    """

    more: int
    widest: int | None

    def __next__(self) -> list[Any]:
        """The micro-batches of the next update; empty where only other ranks have some."""


class OpenGroups(Protocol):
    """Starts a pass over a loader; see `GroupedMicroBatches`, the one there is."""

    def __call__(self, loader: Iterable[Any], *, epoch: int, first_update: int, skip: int) -> Groups:
        """Starts epoch `epoch`, past its first `skip` groups. Collective."""


class Process(Protocol):
    """The update as its trainer sees it; see `Update`, the one there is."""

    def __call__(self, trainer: Trainer, group: list[Any]) -> UpdateOutput:
        """Does one update."""

    def named_gradients(self) -> dict[str, Tensor]:
        """The gradients in GRADIENTS_READY."""

    def state_dict(self) -> dict[str, Any]:
        """What it remembers of the updates before."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes it over."""


class Trainer(Loop):
    """An Ignite engine whose iteration is one optimizer update; `create_trainer` makes it.

    Attributes:
        state: counters, the latest output and the metrics; see `TrainState`.
        signals: what this rank will tell the others with the next update.
        widest_group: micro-batches of the rank that has the most of them in this update; None if nobody knows.
        passengers: whose numbers travel with the statistics of each update; attached alike on all ranks.
    """

    state: TrainState

    def __init__(self, update: Process, open_groups: OpenGroups) -> None:
        super().__init__(update)
        self.state = TrainState()
        self.signals = Signals()
        self.passengers: list[Passenger] = []
        self.widest_group: int | None = None
        self._update, self._open_groups = update, open_groups
        self._ranks_have_more = True
        self._micro_batches_before = 0  # this update
        self.register_events(*TrainEvents, event_to_attr=EVENT_COUNTERS)

    def run(
        self,
        data: Iterable[Any] | None = None,
        max_epochs: int | None = None,
        max_iters: int | None = None,
        epoch_length: int | None = None,
    ) -> TrainState:
        """Trains until a limit is reached.

        A second call goes on where the first ended, whether by its limit, by `terminate` or by an exception; a run that has
        reached its limit does nothing and says so. All ranks call it alike.

        Args:
            data: a loader of micro-batches, sized or not; the trainer groups them. Ranks may have different numbers.
            max_epochs: passes over the data, in all; 1 if no limit was ever given.
            max_iters: updates, in all. Either this or `max_epochs`.
            epoch_length: not supported: an epoch is one pass over the data.

        Returns:
            The state.

        Raises:
            TypeError: `data` cannot be iterated, or a limit is no integer.
            ValueError: a limit is below 1 or below what was trained already, or both are given, or there is no data.
        """
        if epoch_length is not None:
            raise ValueError(
                f"epoch_length must be None, got {epoch_length!r}: an epoch is one pass over the loader; "
                "for data without an end pass max_iters and attach handlers to ITERATION_COMPLETED(every=...)"
            )
        self._refuse_nested_run()
        limits = self._limits(max_epochs, max_iters)
        loader, state = self._as_loader(data), self.state
        self._refuse_used_iterator(loader, limits[0])
        state.max_epochs, state.max_iters = limits
        if self._is_done(state):
            self.logger.warning(
                f"nothing to do: epoch {state.epoch} and update {state.iteration} are done and the limit is "
                f"max_epochs={state.max_epochs}, max_iters={state.max_iters}; raise it to go on"
            )
            return state
        self.signals = Signals()
        self._run(loader)
        return state

    def terminate(self, skip_completed: bool = False, *, agreed: bool = False) -> None:
        """Ends the run on all ranks after the same update.

        In a single process the running update is the last one, as in Ignite. On several ranks the request travels with the
        next update's statistics (or the end of the epoch), and that update is the last one, everywhere.

        Args:
            skip_completed: do not fire COMPLETED.
            agreed: every rank calls this in the same update, because the reason is the same on all of them: no need to ask.
        """
        if agreed or distributed.world_size() == 1:
            super().terminate(skip_completed)
        else:
            self.signals.stop = True

    def terminate_epoch(self, skip_epoch_completed: bool = False, *, agreed: bool = False) -> None:
        """Ends the epoch on all ranks after the same update; as `terminate` does the run."""
        if agreed or distributed.world_size() == 1:
            super().terminate_epoch(skip_epoch_completed)
        else:
            self.signals.stop_epoch = True

    def heed(self, agreed: Signals) -> None:
        """Does what the ranks, asked together, want. The update calls it with the reduced signals."""
        if agreed.stop:
            self.terminate(agreed=True)
        if agreed.stop_epoch:
            self.terminate_epoch(agreed=True)
        self._ranks_have_more = agreed.more_data > 0

    def settle(self, *, applied: bool) -> None:
        """Counts the update as done and fires STEP_COMPLETED or STEP_SKIPPED. The update calls it once it had its effect."""
        self.settled = True
        if applied:
            self.state.num_steps += 1
            self.fire_event(TrainEvents.STEP_COMPLETED)
            return
        state, output = self.state, self.state.output
        state.num_skipped += 1
        if output is not None and state.num_skipped & (state.num_skipped - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
            self.logger.warning(
                f"update {state.iteration} was skipped ({output.skipped_reason}): gradient norm {output.grad_norm:g}, "
                f"loss scale {output.loss_scale:g}; skipped so far: {state.num_skipped}"
            )
        self.fire_event(TrainEvents.STEP_SKIPPED)

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of this update by parameter name: reduced over ranks, unscaled, normalised, not yet clipped.

        Copies, made when asked for: changing them changes nothing. Parameters without a gradient are left out.

        Raises:
            GradientAccessError: outside of handlers of GRADIENTS_READY.
        """
        return self._update.named_gradients()

    def set_data(self, data: Any) -> None:
        """Not supported: a run trains on the loader that it was given."""
        raise NotImplementedError("set_data is not supported: pass the loader to run(loader, ...)")

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]  # Ignite returns an OrderedDict
        """Counters, limits, position in the epoch, user keys and the loss scaling, in plain types."""
        state = self.state
        saved: dict[str, Any] = {name: getattr(state, name) for name in _COUNTERS}
        if self._iterating and not self.settled:  # an update that has not had its effect is not done
            saved["iteration"], saved["micro_batch"] = state.iteration - 1, self._micro_batches_before
        saved["epochs_completed"] = state.epoch - self._epoch_open
        saved["epoch_iteration"] = self._epoch_iteration + (self._iterating and self.settled) if self._epoch_open else 0
        saved["epoch_length"], saved["max_epochs"], saved["max_iters"] = state.epoch_length, state.max_epochs, state.max_iters
        saved["update"] = self._update.state_dict()
        return saved | {key: getattr(state, key) for key in self.state_dict_user_keys}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes back to where `state_dict` was taken. The next `run` goes on from there.

        Raises:
            TypeError: it is no mapping, or a limit is no integer.
            ValueError: a key is missing, or a counter or a limit is none.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be what Trainer.state_dict() gave, got {shown(state_dict)}")
        expected = [*_COUNTERS, "epochs_completed", "epoch_iteration", "epoch_length", "max_epochs", "max_iters", "update"]
        missing = [key for key in [*expected, *self.state_dict_user_keys] if key not in state_dict]
        if missing:
            raise ValueError(f"state_dict must have the keys of Trainer.state_dict(), got one without {', '.join(missing)}")
        for key in (*_COUNTERS, "epochs_completed", "epoch_iteration"):
            if isinstance(state_dict[key], bool) or not isinstance(state_dict[key], int) or state_dict[key] < 0:
                raise ValueError(f"state_dict[{key!r}] must be an integer of at least 0, got {state_dict[key]!r}")
        for key in (key for key in ("max_epochs", "max_iters") if state_dict[key] is not None):
            positive_int(f"state_dict[{key!r}]", state_dict[key])
        self._update.load_state_dict(state_dict["update"])
        for key in (*_COUNTERS, "epoch_length", "max_epochs", "max_iters", *self.state_dict_user_keys):
            setattr(self.state, key, state_dict[key])
        self._epoch_iteration = state_dict["epoch_iteration"]
        self._epoch_open = self._epoch_iteration > 0
        self.state.epoch = state_dict["epochs_completed"] + self._epoch_open

    def register_events(self, *event_names: Any, event_to_attr: Mapping[Any, str] | None = None) -> None:
        """Adds events that can be fired; `event_to_attr` names the state attribute that their filters look at.

        Unlike Ignite's, that map is this trainer's own: another engine in the process cannot re-point it.
        """
        super().register_events(*event_names)
        if event_to_attr:
            self.state.event_to_attr.update(event_to_attr)
            self.state._update_attrs()

    def add_event_handler(self, event_name: Any, handler: Any, *args: Any, **kwargs: Any) -> RemovableEventHandle:
        """As in Ignite; a misspelt event is answered with the nearest one."""
        if not callable(handler):
            raise TypeError(f"handler must be callable, got {shown(handler)}")
        return super().add_event_handler(event_name, handler, *args, **kwargs)

    # --- what the loop asks -----------------------------------------------------------------------------------------------

    def _open(self, data: Iterable[Any]) -> Groups:
        first_update = self.state.iteration + 1 - self._epoch_iteration
        groups = self._open_groups(data, epoch=self.state.epoch, first_update=first_update, skip=self._epoch_iteration)
        self._ranks_have_more = groups.length is not None or sum(distributed.everyones(groups.more)) > 0
        return groups

    def _fetch(self, batches: Any) -> Any:
        group = super()._fetch(batches)
        self.signals.more_data, self._micro_batches_before = batches.more, self.state.micro_batch
        self.widest_group = batches.widest
        return group

    def _close_epoch(self, started: float) -> None:
        if self._epoch_iteration == 0 and not self.should_terminate_single_epoch:
            raise ValueError(f"data must give at least one micro-batch on some rank, got none in epoch {self.state.epoch}")
        super()._close_epoch(started)
        self.signals.stop_epoch = False  # what handlers of EPOCH_COMPLETED asked for is done already

    def _epoch_is_over(self, batches: Batches) -> bool:
        return super()._epoch_is_over(batches) or not self._ranks_have_more

    def _stop_between_epochs(self) -> bool:
        """Between two epochs no update carries the request of one rank to the others."""
        if distributed.any_rank(self.signals.stop):
            self.terminate(agreed=True)
        return super()._stop_between_epochs()

    def _refuse_used_iterator(self, loader: Iterable[Any], max_epochs: int | None) -> None:
        half_read = self._epoch_open and loader is self.state.dataloader
        if isinstance(loader, Iterator) and (half_read or (max_epochs or 1) > 1):
            why = "is half read" if half_read else f"can be iterated once, not {max_epochs} times"
            raise TypeError(f"data must be a loader, got an iterator ({type(loader).__name__}), which {why}; pass a DataLoader")

    def _limits(self, max_epochs: int | None, max_iters: int | None) -> tuple[int | None, int | None]:
        state = self.state
        if max_epochs is not None and max_iters is not None:
            raise ValueError(f"max_epochs and max_iters exclude each other, got {max_epochs!r} and {max_iters!r}; pass one")
        if max_epochs is not None:
            begun, limit = state.epoch, positive_int("max_epochs", max_epochs)
            if limit < begun:
                raise ValueError(f"max_epochs must not be below the {begun} epochs already begun, got {max_epochs}")
            return limit, None
        if max_iters is not None:
            limit = positive_int("max_iters", max_iters)
            if limit < state.iteration:
                raise ValueError(f"max_iters must not be below the {state.iteration} updates already done, got {max_iters}")
            return None, limit
        return (1, None) if state.max_epochs is None and state.max_iters is None else (state.max_epochs, state.max_iters)
