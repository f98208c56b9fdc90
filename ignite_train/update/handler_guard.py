"""A guard around the user's code inside an update: it must not change gradients, which are a sum there, and must not step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ignite_train.errors import ForwardContractError, GradientAccessError
from ignite_train.events import TrainEvents
from ignite_train.internals.of_torch import version_of
from ignite_train.model.gradients import Gradients
from ignite_train.model.memory_layout import bytes_at, local_part
from ignite_train.model.optimizers import Optimizers, each_optimizer
from ignite_train.ranks import collectives
from ignite_train.trainer import Trainer

__all__ = ["HandlerGuard"]

_logger = logging.getLogger(__name__)
_BACKWARD_COMPLETED = TrainEvents.BACKWARD_COMPLETED
_Seen = tuple[nn.Parameter, Tensor | None, int, bytes]  # a parameter, and how its gradient was


class HandlerGuard:
    """Refuses what `forward` and handlers inside an update must not do: step an optimizer of the trainer, or change gradients.

    Before GRADIENTS_REDUCED, and in GRADIENTS_READY, `.grad` is a sum, so that what is clipped or added there has the wrong
    size. Gradients are compared by identity and by torch's count of changes, which leaves out those of `.grad.data`: so in few
    updates, see `is_watching`, what lies in the memory of the host is compared too. One that a handler has set to None is
    allowed: its parameter stays where it is. If a handler sets all of them to None, it has called `zero_grad()`, and earlier
    micro-batches are lost.

    Args:
        gradients: those of the trainer's optimizers.
        optimizer: these optimizers.
        keeps_graph: whether gradients have graphs, which handlers of BACKWARD_COMPLETED may go through with another backward.

    Attributes:
        num_updates: how many have begun in this process.
        is_watching: whether more is looked at in the running update: in the 1st, 2nd, 4th, 8th, ..., and in the first one with
            other handlers than before.
        has_other_handlers: whether the next update has.
    """

    def __init__(self, gradients: Gradients, optimizer: Optimizer | Optimizers, *, keeps_graph: bool) -> None:
        self._gradients, self._optimizers, self._keeps_graph = gradients, each_optimizer(optimizer), keeps_graph
        self.num_updates, self.is_watching, self.has_other_handlers = 0, False, False
        self._has_warned = False

    @contextmanager
    def readable(self, mean_factor: float) -> Iterator[None]:
        """Within it handlers of GRADIENTS_READY read the gradients, times `mean_factor`."""
        with self._gradients.readable(mean_factor), self._unchanged("GRADIENTS_READY"):
            yield

    @contextmanager
    def no_step(self, who: str, error: type[Exception] = GradientAccessError) -> Iterator[None]:
        """Within it the optimizers refuse to step. Their hooks are gone afterwards, when the trainer steps them.

        Args:
            who: would have called it, for the message.
            error: the type of the error.
        """
        refuses, handles = True, list[RemovableHandle]()

        def refuse(*_: Any) -> None:
            if refuses:
                raise error(
                    f"{who} must not call step() of the trainer's optimizer: each update makes one step, after "
                    "GRADIENTS_READY; leave the call out"
                )

        try:
            for one in self._optimizers:
                handles.append(one.register_step_pre_hook(refuse))
            yield
        finally:
            refuses = False
            try:
                for handle in handles:
                    handle.remove()
            except BaseException:  # by Ctrl-C: steps with a hook take a slower way
                for handle in handles:
                    handle.remove()
                raise

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Within it `forward` runs: without a step, and without a gradient that it leaves behind, changes or drops."""
        before = self.look()
        with self.no_step("forward", ForwardContractError):
            yield
        if (seen := self.changed(before, may_drop=False)) is None:
            return
        parameter, gradient, _, _ = seen
        name = self._gradients.name(parameter)
        if gradient is None:
            raise ForwardContractError(
                f"forward must not leave gradients behind, and {name} has one: it called backward(), which the update would "
                "step along; use torch.autograd.grad(loss, inputs)"
            )
        raise ForwardContractError(
            f"forward must not change gradients, and the one of {name} is "
            f"{'gone' if parameter.grad is None else 'another one'} now: it called zero_grad(), backward() or "
            "clip_grad_norm_(), and .grad is the sum over the earlier micro-batches; leave this to the trainer, which "
            "clips by max_grad_norm=, and for gradients of your own use torch.autograd.grad(loss, inputs)"
        )

    def fire(self, trainer: Trainer, event: Any) -> None:
        """Fires an event of a micro-batch, whose handlers may read gradients."""
        may_change = event is _BACKWARD_COMPLETED and self._keeps_graph
        had_several = self._gradients.has_several()  # a single one may be dropped on purpose
        with self.no_step(f"a handler of {event.name}") if may_change else self._unchanged(event.name):
            trainer.fire_event(event)
        if had_several:
            self._gradients.refuse_dropped(event.name)

    def warn_of_unstepped(self) -> None:
        """Warns once of a layer that has gradients and is in no optimizer, since it was replaced, added or thawed later."""
        if self._has_warned or not (names := self._gradients.unstepped()):
            return
        self._has_warned = True
        if collectives.is_main_rank():
            _logger.warning(
                f"{names[0]!r} and {len(names) - 1} more parameters of the model have gradients and are in no optimizer of the "
                "trainer, which neither steps nor clears them: a layer that is replaced, added or thawed after the trainer is "
                "made needs optimizer.add_param_group"
            )

    @contextmanager
    def _unchanged(self, event: str) -> Iterator[None]:
        before = self.look(with_contents=self.is_watching)
        with self.no_step(f"a handler of {event}"):
            yield
        if (seen := self.changed(before)) is not None:
            name = self._gradients.name(seen[0])
            raise GradientAccessError(
                f"a handler of {event} must not change gradients, and that of {name} is another one now: .grad is a sum "
                "there, times the loss scale; change the mean gradient in a handler of TrainEvents.GRADIENTS_REDUCED, and for "
                "gradients of your own use torch.autograd.grad"
            )

    def look(self, *, with_contents: bool = False) -> list[_Seen]:
        """Notes the gradients before something runs, for `changed` after it."""
        found = [(parameter, parameter.grad) for parameter in self._gradients.parameters()]
        return [
            (parameter, None, -1, b"")
            if gradient is None
            else (parameter, gradient, version_of(gradient), _contents(gradient) if with_contents else b"")
            for parameter, gradient in found
        ]

    @staticmethod
    def changed(before: list[_Seen], *, may_drop: bool = True) -> _Seen | None:
        """The first parameter that has another gradient than before; None if none has.

        Args:
            before: how they were.
            may_drop: whether a gradient may have become None.
        """
        for seen in before:
            parameter, gradient, version, contents = seen
            now = parameter.grad
            if now is None:
                if gradient is not None and not may_drop:
                    return seen
            elif now is not gradient or version_of(now) != version or (contents and _contents(now) != contents):
                return seen
        return None


def _contents(gradient: Tensor) -> bytes:
    """A sample of what a gradient holds; nothing of one whose memory the host cannot look into."""
    local = local_part(gradient)
    if type(local) not in (Tensor, nn.Parameter) or local.layout is not torch.strided or not local.is_cpu:
        return b""
    return bytes_at(local.data_ptr(), local.nbytes) if local.is_contiguous() else b""
