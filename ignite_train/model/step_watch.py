"""Whether the steps of an update have moved parameters, also where one of them raises half way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from itertools import repeat
from operator import attrgetter, is_, is_not
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_train.internals.of_torch import step_pre_hooks_of, step_pre_hooks_of_all, version_of
from ignite_train.model.composed_tensor import is_composed
from ignite_train.model.magnitude import magnitude
from ignite_train.model.memory_layout import local_part
from ignite_train.model.optimizers import Optimizers, each_optimizer, is_torchs, is_wrapped_by_scheduler, labelled_optimizers

__all__ = ["StepWatch"]

_GRADIENT = attrgetter("grad")


class StepWatch:
    """Whether the running update has moved parameters on this rank. `Stepping` tells it of each step.

    A step that has returned has moved. Of one that raises the versions of parameters and of the optimizer's state tell, which
    are read right before it. Torch's fused kernels move no version of a parameter or of a moment, and that of SGD moves none
    at all; and code may write into `.data`. So a step whose versions are not known to move is watched by values too where it
    is cheap to do so: in the first steps, and where a pre-hook may raise before the step begins. Otherwise it counts as having
    moved once it was entered.

    Args:
        optimizer: whose steps, or those of several optimizers.

    Attributes:
        entered: the optimizers that have moved something, and whether their step has returned. Empty where nothing has moved;
            while a device decides, `moved` asks it. None while a step is watched: `moved` then looks at it.
    """

    def __init__(self, optimizer: Optimizer | Optimizers) -> None:
        self._labels: Mapping[Optimizer, str] = {one: label for label, one in labelled_optimizers(optimizer).items()}
        self.entered: dict[Optimizer, bool | None] = {}
        self._watched = {one: _Watched(one, self.entered) for one in self._labels}
        self._ask_device: Callable[[], bool] | None = None

    def begin(self) -> None:
        """Nothing has moved in the update that begins, or that was put back to its beginning."""
        self.entered.clear()
        self._ask_device = None

    @property
    def moved(self) -> bool:
        """Whether something has moved. Waits for the device, if it decides about a step whose numbers have not been read."""
        for optimizer in [one for one, returned in self.entered.items() if returned is None]:
            self._watched[optimizer].judge()  # Ctrl-C came before its `__exit__`
        if self._ask_device is not None and self.entered:
            ask, made = self._ask_device, False
            # A device that has failed cannot tell, and counts as not having made the step.
            with suppress(RuntimeError):
                made = ask()
            self._ask_device = None
            if not made:
                self.entered.clear()
        return bool(self.entered)

    def enter(self, optimizer: Optimizer) -> None:
        """A kernel is about to be called directly, with arguments that were looked at: what raises from here on has moved.

        It is one entry in a dict, and not the versions of all tensors, since this step is made to be quick.
        """
        self.entered[optimizer] = False

    def leave(self, optimizer: Optimizer) -> None:
        """The step that was entered has returned."""
        self.entered[optimizer] = True

    def leave_to_device(self, ask: Callable[[], bool]) -> None:
        """The device decides whether the steps to come move something; `ask` tells until `decided` is called. It may wait."""
        self._ask_device = ask

    def decided(self, *, moved: bool) -> None:
        """The host knows now what the device has decided."""
        self._ask_device = None
        if not moved:
            self.entered.clear()

    def stepping(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Stands around a call of `optimizer.step`."""
        return self._watched[optimizer]

    def half_made(self) -> str | None:
        """The note for an error that has come in the middle of the step; None if no step was made, or all of it."""
        if not self.entered or (len(self.entered) == len(self._watched) and all(self.entered.values())):
            return None
        parts = []
        for optimizer, label in self._labels.items():
            returned = self.entered.get(optimizer)
            did = "made no step" if returned is None else "made its step" if returned else "raised when it had moved parameters"
            parts.append(f"{label} {did}")
        return (
            f"a part of this update's step was made before the error: {', '.join(parts)}; the update counts as a step and is "
            "not made again, so go back to a checkpoint if the missing part matters"
        )


class _Watched:
    """An optimizer, and how its parameters and its state were before its step; the context of a step.

    Args:
        optimizer: which one.
        entered: of the `StepWatch`, which is told.
    """

    def __init__(self, optimizer: Optimizer, entered: dict[Optimizer, bool | None]) -> None:
        self._optimizer, self._entered, self._all = optimizer, entered, each_optimizer(optimizer)
        # Where `_seen` were found: the lists of the groups with their lengths, and `step` of the optimizer and its class.
        self._groups: list[tuple[list[nn.Parameter], int]] = []
        self._steps: Any = None
        self._tells = False  # whether a step was seen to move versions
        self._num_steps = 0  # that were made while they were not known to do so
        self._seen: list[list[nn.Parameter]] = []
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []
        self._sums_before: list[Tensor] = []
        self._had_state = False

    def __enter__(self) -> None:
        """Notes how things are before the step."""
        optimizer = self._optimizer
        self._had_state = bool(optimizer.state)
        if not (self._tells and self._are_parameters_known()):
            self._find_parameters()
        self._tensors = tensors = self._look()
        try:
            self._versions = [*map(version_of, tensors)]
        except RuntimeError:  # one was made in inference mode
            self._versions = _versions(tensors)
        if not self._tells:
            hooks = bool(step_pre_hooks_of(optimizer) or step_pre_hooks_of_all)
            # Moments come into being in the first step, so the second one is the first whose versions tell something.
            self._sums_before = self._sums() if hooks or self._num_steps < 2 else []
        self._entered[optimizer] = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        """Tells whether the step has moved something. One that has returned has."""
        if kind is None:
            # The first thing after the step: an interrupt from here on must not have it made again.
            self._entered[self._optimizer] = True
            if not self._tells:
                self.learn()
        else:
            self.judge()

    def judge(self) -> None:
        """Tells whether a step that has not returned, as far as is known, has moved something."""
        if self.may_have_moved():
            self._entered[self._optimizer] = False
        else:
            self.forget_new_state()
            self._entered.pop(self._optimizer, None)

    def may_have_moved(self) -> bool:
        """Whether the step, which has raised, has changed parameters, or state that was there."""
        if _versions(self._tensors) != self._versions or (self._had_state and not self._are_same(self._look())):
            return True
        if self._tells:
            return False
        return not self._sums_before or not all(map(torch.equal, self._sums_before, self._sums()))

    def learn(self) -> None:
        """Notes whether the step, which has returned, shows in the versions."""
        if self._are_same(self._look()):
            self._tells = _versions(self._tensors) != self._versions
        self._num_steps += 1
        self._sums_before = []

    def forget_new_state(self) -> None:
        """Drops the state that a first step has begun to make, of which torch would take a part for the whole."""
        if not self._had_state:
            self._optimizer.state.clear()

    def _are_same(self, tensors: list[Tensor]) -> bool:
        return len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors))

    def _are_parameters_known(self) -> bool:
        """Whether those that were looked at have gradients, and stand in the same groups as when they were found."""
        groups, known = self._optimizer.param_groups, self._steps
        if len(self._all) > 1 or len(groups) != len(self._groups):
            return False
        if known != (vars(self._optimizer).get("step"), type(self._optimizer).step):
            return False
        for group, (parameters, number) in zip(groups, self._groups, strict=True):
            if group["params"] is not parameters or len(parameters) != number:
                return False
        (parameters,) = self._seen
        return all(map(is_not, map(_GRADIENT, parameters), repeat(None)))

    def _find_parameters(self) -> None:
        self._seen = [self._looked_at(one) for one in self._all]
        self._steps = vars(self._optimizer).get("step"), type(self._optimizer).step
        self._groups = [(group["params"], len(group["params"])) for group in self._optimizer.param_groups]

    def _looked_at(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """All parameters, or, of an optimizer of torch, the first with a gradient of each group, device and dtype.

        Torch's own steps write to these first. A look at few tensors takes a microsecond; one at the parameters and moments of
        300 takes as long as a small model's step.
        """
        step, kind = vars(optimizer).get("step"), type(optimizer)
        if not is_torchs(kind.step) or not (step is None or is_wrapped_by_scheduler(step, kind)):
            return [parameter for group in optimizer.param_groups for parameter in group["params"]]
        found: list[nn.Parameter] = []
        for group in optimizer.param_groups:
            first: dict[Any, nn.Parameter] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    first.setdefault((parameter.device, parameter.dtype), parameter)
            found += first.values()
        return found

    def _look(self) -> list[Tensor]:
        """The parameters that are looked at, and the tensors of their state."""
        tensors: list[Tensor] = []
        for optimizer, parameters in zip(self._all, self._seen, strict=True):
            tensors += parameters
            states = optimizer.state
            for parameter in parameters if states else ():
                entries = states.get(parameter)
                if not entries or not (type(entries) is dict or isinstance(entries, Mapping)):  # the one is told faster
                    continue
                # A comprehension would be a call of its own before Python 3.12.
                for entry in entries.values():
                    if isinstance(entry, Tensor):
                        tensors.append(entry)
        return tensors

    @torch.no_grad()
    def _sums(self) -> list[Tensor]:
        """The magnitude of each parameter, or of this rank's shard; not read. Quantised weights that are frozen have none."""
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        return [magnitude(local_part(one.detach())) for one in parameters if one.requires_grad or not is_composed(one)]


def _versions(tensors: list[Tensor]) -> list[int]:
    """How often each was written to. Tensors made in inference mode do not count that."""
    try:
        return [*map(version_of, tensors)]
    except RuntimeError:
        return [-1 if tensor.is_inference() else version_of(tensor) for tensor in tensors]
