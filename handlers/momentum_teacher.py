"""A teacher whose weights follow those of the student, for self-distillation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from ignite.engine import Events, RemovableEventHandle
from torch import Tensor, nn

from ignite_train.arguments import describe, real_number
from ignite_train.checkpoint.run_objects import SavedModule
from ignite_train.engine.dispatch import attached
from ignite_train.events import Event, TrainEvents
from ignite_train.kinds_of_handlers import Handler
from ignite_train.model.averaged_tensors import (
    averaged_statistics,
    averaged_tensors,
    can_move,
    check_alike,
    move_towards,
    plain_name,
)
from ignite_train.model.optimizers import stepped_parameters
from ignite_train.ranks import collectives
from ignite_train.ranks.begin_alike import begin_alike
from ignite_train.ranks.wrapping import unwrap
from ignite_train.state import TrainState
from ignite_train.trainer import Trainer

__all__ = ["MomentumTeacher"]

_logger = logging.getLogger(__name__)


class MomentumTeacher(Handler):
    """Moves a teacher towards the student after each step: teacher ← m · teacher + (1 - m) · student.

    As in Mean Teacher (arXiv:1703.01780), BYOL (arXiv:2006.07733) and DINO (arXiv:2104.14294). Forward runs the teacher under
    `torch.no_grad()`, beside the student. Make it with `copy.deepcopy(student)`, before the model is wrapped. A skipped update
    does not move it. Running statistics of normalisation layers follow too, unless they are to be the teacher's own, as other
    buffers are. Its parameters should be of float32: small moves are lost by rounding in bfloat16 and float16, which is warned
    about.

    The teacher is saved with the run: its parameters once for all ranks, and the buffers of each rank, which differ as those of
    the student do. `consolidate --entry MomentumTeacher` writes it as a file. All ranks must attach it; they begin with the
    weights of rank 0. Where the student is sharded, shard the teacher in the same way.

    Args:
        teacher: a module of its own, whose parameters the optimizer does not have. `requires_grad` becomes False.
        student: the model that is trained, or the part of it that the teacher follows, with the same parameters.
        momentum: m, in [0, 1], or a function of `trainer.state` that gives it, the same on all ranks: a schedule.
        own_statistics: leave the running statistics of normalisation layers to the teacher, which moves them itself if forward
            runs it in training mode, as in Mean Teacher and BYOL.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `momentum` is not in [0, 1].

    Example:
        >>> import copy, math
        >>> student = torch.nn.Linear(3, 4)
        >>> teacher = copy.deepcopy(student)
        >>> def forward(model, x):
        ...     with torch.no_grad():
        ...         target = teacher(x)
        ...     return (model(x + 0.1 * torch.randn_like(x)) - target).square().mean()
        >>> trainer = create_trainer(student, torch.optim.SGD(student.parameters(), lr=0.1), forward)
        >>> def momentum(state):  # from 0.99 to 1, as in BYOL
        ...     return 1 - 0.01 * (1 + math.cos(math.pi * state.progress)) / 2
        >>> handle = MomentumTeacher(teacher, student, momentum).attach(trainer)
        >>> trainer.run(data, max_epochs=2).num_steps
        8
    """

    is_collective = True
    of_one_trainer = True

    same_on_all_ranks = True

    def __init__(
        self,
        teacher: nn.Module,
        student: nn.Module,
        momentum: float | Callable[[TrainState], float] = 0.996,
        *,
        own_statistics: bool = False,
    ) -> None:
        for name, module in (("teacher", teacher), ("student", student)):
            if not isinstance(module, nn.Module):
                raise TypeError(f"{name} must be a torch.nn.Module, got {describe(module)}")
        self.teacher, self.student = teacher, unwrap(student)
        self.momentum = momentum if callable(momentum) else _checked_momentum(momentum)
        if not isinstance(own_statistics, bool):
            raise TypeError(f"own_statistics must be True or False, got {describe(own_statistics)}")
        self.own_statistics = own_statistics
        self._held_buffers: RemovableEventHandle | None = None

    def attach(self, trainer: Trainer, event: Event = TrainEvents.STEP_COMPLETED) -> RemovableEventHandle:
        """Moves the teacher at `event`, before other handlers there. Collective.

        Raises:
            ValueError: teacher and student differ in their parameters or in how they are sharded, or the optimizer has
                parameters of the teacher, or none of the student, or the teacher would be moved twice in each step.
        """
        if any(isinstance(other, MomentumTeacher) and other.teacher is self.teacher for _, other, _ in attached(trainer)):
            raise ValueError("teacher must be attached once, got one that is attached already and would be moved twice")
        rule, remedy = "teacher must have the parameters of student, sharded alike", "make it with copy.deepcopy(student)"
        check_alike(averaged_tensors(self.teacher), averaged_tensors(self.student), rule, remedy)
        trained = {id(parameter) for parameter in stepped_parameters(trainer.optimizers)}
        if any(id(parameter) in trained for parameter in self.teacher.parameters()):
            raise ValueError(
                "teacher must not be trained, got one with parameters of the optimizer; pass a deepcopy of student"
            )
        if not any(id(parameter) in trained for parameter in self.student.parameters()):
            raise ValueError("student must be trained, got one without parameters of the optimizer; pass a part of the model")
        self._warn_of_rounding()
        self.teacher.requires_grad_(False)
        if collectives.world_size() > 1:
            begin_alike(self.teacher)
        if next(self.teacher.buffers(), None) is not None:
            self._held_buffers = trainer.add_event_handler(Events.STARTED, _TeacherBuffers(self.teacher))
        trainer.on_enter.append(self._check)
        return trainer.prepend_event_handler(event, self)

    def taken_off(self) -> None:
        """The buffers are not saved any more."""
        if self._held_buffers is not None:
            self._held_buffers.remove()

    def _check(self, _: Trainer) -> None:
        check_alike(averaged_tensors(self.teacher), averaged_tensors(self.student))

    def _warn_of_rounding(self) -> None:
        """Warns of a teacher in 16 bits: a momentum near 1 moves it by less than its rounding, so that it stays."""
        rounded = [name for name, value in self.teacher.named_parameters() if value.dtype in (torch.bfloat16, torch.float16)]
        if rounded and collectives.is_main_rank():
            kind = str(self.teacher.get_parameter(rounded[0]).dtype).removeprefix("torch.")
            _logger.warning(
                f"the teacher has parameters of {kind} ({rounded[0]!r}), in which small moves are lost by rounding, so that it "
                "may not follow the student; make it with copy.deepcopy(student).float(), and let precision= choose the dtype "
                "of what it computes"
            )

    def __call__(self, trainer: Trainer) -> None:
        """Moves the teacher once.

        Raises:
            ValueError: `momentum` is a function and gave a number outside of [0, 1].
        """
        momentum = _checked_momentum(self.momentum(trainer.state)) if callable(self.momentum) else self.momentum
        moved, leading = averaged_tensors(self.teacher), averaged_tensors(self.student)
        stay = {name for name, value in leading.items() if not can_move(value)}
        if self.own_statistics:
            stay.update(averaged_statistics(self.teacher))
        if stay:
            moved, leading = ({name: value for name, value in each.items() if name not in stay} for each in (moved, leading))
        move_towards(moved, leading, 1.0 - momentum)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """The state of the teacher, under `"model"`."""
        return {"model": SavedModule(self.teacher).state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores it."""
        SavedModule(self.teacher).load_state_dict(state_dict["model"])


class _TeacherBuffers:
    """Has each rank's own buffers of the teacher in the checkpoints: they differ, as those of the student do."""

    def __init__(self, teacher: nn.Module) -> None:
        self._teacher = teacher

    def __call__(self) -> None:
        """Does nothing: it is attached so that its state is saved."""

    def state_dict(self) -> dict[str, Tensor]:
        return {plain_name(name): buffer for name, buffer in self._teacher.named_buffers()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for name, buffer in self._teacher.named_buffers():
                buffer.copy_(state_dict[plain_name(name)])


def _checked_momentum(momentum: Any) -> float:
    number = real_number("momentum", momentum, at_least=0)
    if number > 1:
        raise ValueError(f"momentum must be at most 1, got {momentum!r}")
    return number
