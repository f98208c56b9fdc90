"""Forward and backward of one micro-batch: the user's function, and backward from its loss times the loss scale."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ignite_train.device.to_device import ToDevice
from ignite_train.engine.loop import Progress
from ignite_train.errors import ForwardContractError
from ignite_train.forward import (
    OF_THIS_MICRO_BATCH,
    UNCOUNTED,
    BoundForward,
    Forward,
    ForwardOutput,
    TermTotals,
    as_forward_output,
    bind_forward,
    is_declared,
)
from ignite_train.model.in_full import in_full
from ignite_train.model.loss_declaration import FirstLook
from ignite_train.model.precision import Precision
from ignite_train.model.seeding import Seeding
from ignite_train.ranks import collectives
from ignite_train.state import TrainState
from ignite_train.update.compilation import Backward
from ignite_train.update.handler_guard import HandlerGuard
from ignite_train.update.loss_scaling import LossScaling, TorchLossScaling
from ignite_train.update.loss_terms import LossTerms
from ignite_train.update.options import UpdateOptions

__all__ = ["Engine", "ForwardBackward"]


class Engine(NamedTuple):
    """Torch's engine, without what `torch.autograd.backward` does around it.

    Attributes:
        run: called with the tensors, and with a gradient of each, two tuples; adds to `.grad` and keeps no graph.
        may_not: whether `torch.autograd.backward` would refuse to run now, or do something else.
    """

    run: Callable[..., object]
    may_not: Callable[[], bool]


@dataclass(kw_only=True)
class ForwardBackward:
    """Runs forward and backward; each micro-batch of an update is run by this, also where it is run again.

    Attributes:
        model: with its wrapper, if it has one.
        module: without.
        user_forward: the user's function.
        run_backward: as `torch.autograd.backward`; given the loss alone, it keeps or makes the graph that the options ask for.
        engine: takes the place of `run_backward` for losses that are plain tensors, if an acceleration has set it.
        transfer: copies micro-batches to the device; None on the CPU.
        precision: of forward.
        loss_scaling: multiplies the loss.
        seeding: what random numbers are a function of, if they are.
        guard: looks after forward in the updates that it watches.
        state: of the trainer; told which micro-batch is run again.
        carried: what forward carries.
        terms: counts the denominators of a loss with several terms, if the user has a function that does so.
        term_totals: what is known of them in the running update.
        options: of the update.
        counts: whether this rank's samples count; see `Statistics`.
        is_other: whether the running update has another forward than the trainer was made with.
        name: of the running update.
        awaits_size: whether the first loss scale is still to be found in the running update.
        progress: of the trainer, whose loop has marked the record before the update.
    """

    model: nn.Module
    module: nn.Module
    user_forward: BoundForward
    run_backward: Backward
    transfer: ToDevice | None
    precision: Precision
    loss_scaling: LossScaling
    seeding: Seeding | None
    guard: HandlerGuard
    state: TrainState
    options: UpdateOptions
    counts: bool = True
    engine: Engine | None = None
    awaits_size: bool = False
    progress: Progress = field(default_factory=Progress)  # until a trainer gives its own
    is_other: bool = False
    name: str | None = None
    _is_looked_at: bool = False  # whether it does so in the running one, or forward is still looked at for mistakes
    _group_size: int = 0  # how many micro-batches this rank has in the running update, as far as is known when it begins

    def __post_init__(self) -> None:
        self._first_look = FirstLook()
        self.carried, self._autocasts = self.state.carried, bool(self.precision.dtypes)
        count = self.options.sample_sizes
        self.terms = None if count is None else LossTerms(count, counts=self.counts)
        self.term_totals: TermTotals = UNCOUNTED
        self._splits = self.options.on_out_of_memory == "split"
        # If so, the update is divided by the denominators of a single micro-batch.
        self._may_be_whole = collectives.world_size() == 1 and self.options.normalize and not self._splits
        if self.options.retain_graph or self.options.create_graph:
            self.run_backward = partial(self.run_backward, retain_graph=True, create_graph=self.options.create_graph)
        self._begins_by_size = self.loss_scaling if isinstance(self.loss_scaling, TorchLossScaling) else None

    @contextmanager
    def instead(self, forward: Forward | None, name: str | None) -> Iterator[None]:
        """Within it an update runs another forward, if one is given, and its record has a name."""
        before = self.user_forward, self.terms
        if forward is not None:
            self.user_forward, self.terms = bind_forward(forward, lambda: self.state), None
        self.is_other, self.name = forward is not None, name
        try:
            yield
        finally:
            self.is_other, self.name = False, None
            self.user_forward, self.terms = before

    def begin(self, group: Sequence[Any]) -> None:
        """Before the first forward of an update. Collective, where the user counts the samples of several losses."""
        guard = self.guard
        guard.num_updates = number = guard.num_updates + 1
        guard.is_watching, guard.has_other_handlers = guard.has_other_handlers or number & (number - 1) == 0, False
        self._is_looked_at = guard.is_watching or not (self._first_look.is_over or self.is_other)
        if self.terms is not None:
            self.term_totals = self.terms.begin(group)
        else:
            self.term_totals = OF_THIS_MICRO_BATCH if self._may_be_whole and len(group) == 1 else UNCOUNTED
        if self.options.train_mode and not self.module.training:
            in_full(self.model.train)
        if self._begins_by_size is not None:
            self.awaits_size, self._group_size = self._begins_by_size.awaits_size, len(group)

    def forward(self, micro_batch: Any) -> ForwardOutput:
        """Runs the user's function on a micro-batch, which is copied to the device first, and checks the result."""
        on_device = micro_batch if self.transfer is None else self.transfer(micro_batch)
        user_forward = self._watched_forward if self._is_looked_at else self.user_forward
        if self._autocasts:
            with self.precision.autocast():
                returned = user_forward(self.model, on_device)
        else:
            returned = user_forward(self.model, on_device)
        output = as_forward_output(returned, self.term_totals)
        if self._splits and not is_declared(output):
            raise ForwardContractError(
                "on_out_of_memory='split' must know how much each half of a micro-batch weighs, and forward returned a mean "
                "alone; return ForwardOutput(loss summed over the samples, sample_size=their number)"
            )
        if self.awaits_size:
            self.agree_on_scale(output.sample_size)
        return output

    def backward_from(self, loss: Tensor) -> Callable[[], object]:
        """Gives a function that runs backward from the loss, times the loss scale, with no frame of ours in between."""
        engine, is_plain = self.engine, loss.requires_grad and self.loss_scaling.scale == 1.0
        scaled = loss if is_plain else self.scaled(loss)
        if engine is None or type(scaled) is not Tensor or engine.may_not():
            return partial(self.run_backward, scaled)
        return partial(engine.run, (scaled,), (torch.ones_like(scaled),))

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for backward."""
        if not loss.requires_grad:
            remedy = "return it without .detach() or no_grad()"
            if torch.is_inference_mode_enabled():
                remedy = "torch.inference_mode() is on, in which none is made; make the model and call the run outside of it"
            elif not torch.is_grad_enabled():
                remedy = (
                    "gradients are switched off in this thread, so call torch.set_grad_enabled(True) before the run, and write "
                    "`with torch.no_grad():` where a handler switches them off"
                )
            elif not any(one.requires_grad for one in self.module.parameters()):
                remedy = "no parameter of the model requires a gradient any more; thaw those that are to train"
            raise ForwardContractError(f"the loss that forward returned has no graph; {remedy}")
        return loss if self.loss_scaling.scale == 1.0 else loss * self.loss_scaling.scale

    @contextmanager
    def run_again(self) -> Iterator[None]:
        """A `with` in which forward finds the record of the update before, as at first, and not that of the running update."""
        state = self.state
        now = state.update_output, state.output
        state.update_output, state.output = self.progress.record_before
        try:
            yield
        finally:
            state.update_output, state.output = now

    def loss_without_wrapper(self, micro_batch: Any, index: int | None = None) -> Tensor:
        """The loss of a micro-batch that is run again, times the loss scale; `index` in the group, None for a placeholder."""
        self.state.micro_batch_in_group = index
        if self.seeding is not None and index is not None:
            self.seeding.micro_batch(index)
        with self.precision.autocast():
            on_device = micro_batch if self.transfer is None else self.transfer(micro_batch)
            returned = self.user_forward(self.module, on_device)
            loss = as_forward_output(returned, self.term_totals).loss
        return loss * self.loss_scaling.scale if self.loss_scaling.enabled else loss

    def agree_on_scale(self, sample_size: float | Tensor) -> None:
        """Finds the first loss scale. Collective: called once in the update, after the first forward of each rank.

        There forwards have been through their own collectives alike, and no backward has needed the scale yet. A rank without
        micro-batches calls it before it joins the backward of the others.
        """
        self.awaits_size = False
        (total,) = collectives.total([float(sample_size) * self._group_size * self.counts])  # sync, in the first update
        assert self._begins_by_size is not None  # noqa: S101  # asked before
        self._begins_by_size.begin(total)

    def _watched_forward(self, model: nn.Module, micro_batch: Any) -> Any:
        with self.guard.forward():
            if self._first_look.is_over or self.is_other:
                return self.user_forward(model, micro_batch)
            carried, precision = self.carried, self.precision
            return self._first_look(self.user_forward, model, micro_batch, self.module, carried=carried, precision=precision)
