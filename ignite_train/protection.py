"""The handlers that protect a training on several ranks and are attached by default.

Beside `defaults.py` this is the one file of the core that may import handlers, and it does so where they are used: so
importing the package stays quick, and a training in a single process does not import them.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Mapping
from typing import Any

from ignite.engine import Events
from torch import nn

from ignite_train.arguments import describe, did_you_mean, positive_int
from ignite_train.ranks import collectives
from ignite_train.ranks.wrapping import own_parameters
from ignite_train.trainer import Trainer

__all__ = ["Protect", "protect_ranks"]

Protect = bool | Mapping[str, Mapping[str, Any] | bool]
"""Whether several ranks are protected: all handlers, none, or for each by its name whether or with which settings."""

_CHECKS = ("grad_norm_consistency", "state_consistency")
_NAMES = ("failure_board", "hang_watch", *_CHECKS)
_EARLY = (1, 2, 3, 10, 30, 100, 300)  # updates of a process whose state is compared: a mistake in the set-up shows there
_EVERY = 1000  # the updates whose number is a multiple of this are compared too; and each save, and the end of a run
_NOT_SETTINGS = {"model", "optimizer"}  # the trainer has them


def protect_ranks(trainer: Trainer, protect: Protect, model: nn.Module) -> Trainer:
    """Attaches the handlers that `protect` asks for; none of them in a single process.

    Args:
        trainer: the trainer; it knows the model and the optimizers.
        protect: see `create_trainer`.
        model: the model with its wrapper. If some of its parameters are each rank's own by design, norms and states are
            compared only if `protect` names the check.

    Returns:
        The trainer.

    Raises:
        TypeError: `protect`, or an entry of it, is neither a bool nor a mapping.
        ValueError: a name is not one of a handler or of a setting, or a handler refuses the value of a setting.
    """
    chosen = _chosen(protect)
    if collectives.world_size() == 1 and not any(chosen.values()):
        return trainer
    unfit: set[str] = set()  # those that do nothing, or give a false alarm, unless the user knows better and names them
    own = own_parameters(model)
    if own and collectives.world_size() > 1:
        unfit.update(_CHECKS)
        logging.getLogger("ignite_train").info(
            "GradNormConsistency and StateConsistency are left out unless protect names them: DistributedDataParallel ignores "
            f"{own[0]!r} and {len(own) - 1} more parameters, which may differ between the ranks"
        )
    if trainer.replicas.are_elastic:  # a replica that has lost a rank ends, and is started again
        unfit.update(_NAMES)
    if trainer.config["reduction"] == "local":  # each rank has a norm of its own
        unfit.add("grad_norm_consistency")
    named = protect if isinstance(protect, Mapping) else {}
    handlers = []
    for name, settings in chosen.items():
        if name in unfit and name not in named:
            continue
        handler, where = _make(trainer, name, settings)
        handler.leave_unattached()  # in a single process, and where the settings of the next one are refused
        handlers.append((handler, where))
    for handler, where in handlers if collectives.world_size() > 1 else ():
        handler.attach(trainer, *where)
        trainer.default_handlers.append(handler)
    return trainer


def _chosen(protect: Any) -> dict[str, dict[str, Any]]:
    """The settings of each handler that is asked for, by name."""
    if isinstance(protect, bool):
        return {name: {} for name in _NAMES} if protect else {}
    if not isinstance(protect, Mapping):
        raise TypeError(f"protect must be a bool or a mapping of settings by the name of the handler, got {describe(protect)}")
    for name, settings in protect.items():
        if name not in _NAMES:
            raise ValueError(f"protect must have keys among {', '.join(_NAMES)}, got {name!r}{did_you_mean(name, _NAMES)}")
        if not isinstance(settings, (bool, Mapping)):
            raise TypeError(f"protect[{name!r}] must be a bool or a mapping of settings, got {describe(settings)}")
    asked = {name: settings for name in _NAMES if (settings := protect.get(name, True)) is not False}
    return {name: dict(settings) if isinstance(settings, Mapping) else {} for name, settings in asked.items()}


def _make(trainer: Trainer, name: str, settings: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """The handler, and what its `attach` takes after the trainer."""
    from ignite_train.handlers import FailureBoard, GradNormConsistency, HangWatch, StateConsistency

    if name != "state_consistency":
        kinds: dict[str, Any] = {
            "failure_board": FailureBoard,
            "hang_watch": HangWatch,
            "grad_norm_consistency": GradNormConsistency,
        }
        _check_settings(name, settings, _settings_of(kinds[name]))
        return kinds[name](**settings), ()
    _check_settings(name, settings, ["every", *_settings_of(StateConsistency)])
    every = positive_int("protect['state_consistency']['every']", settings.pop("every", _EVERY))
    # Without buffers, which a layer may fill from the data of its rank, and without what an optimizer may divide over the
    # ranks: what differs there and matters moves the parameters apart, and by default there must be no false alarm.
    usual: dict[str, Any] = {"own_buffers": [buffer for buffer, _ in trainer.model.named_buffers()], "optimizer_state": False}
    handler = StateConsistency(trainer.model, trainer.optimizers, **(usual | settings))
    if trainer.config["reduction"] == "local":  # it looks where the replicas are equal, which is rare
        return handler, (Events.ITERATION_COMPLETED,)
    return handler, (Events.ITERATION_COMPLETED(event_filter=_FirstAndEvery(_EARLY, every)),)


def _settings_of(kind: type) -> list[str]:
    return [name for name in inspect.signature(kind).parameters if name not in _NOT_SETTINGS]


def _check_settings(name: str, settings: Mapping[str, Any], allowed: Collection[str]) -> None:
    for setting in settings:
        if setting not in allowed:
            among = f"have keys among {', '.join(allowed)}" if allowed else "be True or False, because it has no settings"
            raise ValueError(f"protect[{name!r}] must {among}, got {setting!r}{did_you_mean(setting, allowed)}")


class _FirstAndEvery:
    """A filter of events: some of the first updates of this process, and those whose number is a multiple of `every`."""

    def __init__(self, first: Collection[int], every: int) -> None:
        self._first, self._every = frozenset(first), every
        self._before: int | None = None  # updates of earlier processes

    def __call__(self, engine: Any, event: int) -> bool:  # noqa: ARG002  # Ignite calls it with both
        if self._before is None:
            self._before = event - 1
        return event - self._before in self._first or event % self._every == 0
