"""Why the cut of an update into micro-batches may change what it computes, with names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ignite_train.tuning.settings import Settings
from ignite_train.tuning.trial import Trial

__all__ = ["cut_warnings", "difference_warnings"]

_TOLERANCES: Mapping[str, float] = {"fp32": 1e-3, "bf16": 3e-2, "fp16": 1e-2}  # of the same sum in another order
_NAMES = 3  # that a line shows


def cut_warnings(model: nn.Module, present: Trial) -> list[str]:
    """What is known to depend on the cut before anything is compared: one line for each kind.

    Args:
        model: the user's.
        present: measured with the present settings.
    """
    found = []
    norms = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    if norms:
        found.append(
            f"{_listed(norms)}: BatchNorm takes mean and variance from a micro-batch, so that another size trains another model"
        )
    dropping = _dropping(model)
    if dropping:
        found.append(f"{_listed(dropping)}: dropout draws other numbers for another cut; the distribution is the same")
    if not present.declares:
        found.append(
            "forward returns a bare loss, so that an update is the mean of the means of its micro-batches; where these have "
            "unequal sizes or weights, another cut weighs samples differently; return ForwardOutput(sum, sample_size=...)"
        )
    return found


def difference_warnings(model: nn.Module, present: Trial, others: Iterable[Trial | None], precision: str) -> list[str]:
    """Settings under which the first update, of the same samples from the same weights, came out otherwise.

    It finds what has no name, such as a contrastive loss. Not looked for where dropout draws.

    Args:
        model: the user's.
        present: measured with the present settings.
        others: measured with other settings.
        precision: of the trainer.
    """
    if _dropping(model):
        return []
    found, tolerance = [], _TOLERANCES[precision]
    for other in others:
        if other is None:
            continue
        for what, before, after in (
            ("loss", present.first_loss, other.first_loss),
            ("gradient norm", present.first_norm, other.first_norm),
        ):
            if abs(after - before) > tolerance * max(abs(before), 1e-6):
                found.append(_changed(what, before, after, other.settings, present.settings))
                break
    return found


def _changed(what: str, before: float, after: float, settings: Settings, present: Settings) -> str:
    cause = ""
    if settings.micro_batch != present.micro_batch:
        cause = "; the loss depends on which samples are in a micro-batch, as contrastive losses and means do"
    return f"{settings.label(present)}: the {what} of the same update is {after:.4g} in place of {before:.4g}{cause}"


def _dropping(model: nn.Module) -> list[str]:
    """Names of modules that draw in training."""
    return [name for name, module in model.named_modules() if _drop_probability(module) > 0]


def _drop_probability(module: nn.Module) -> float:
    if isinstance(module, _DropoutNd):
        return module.p
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        return module.dropout
    return 0.0


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in islice(names, _NAMES))
    return f"{shown} and {len(names) - _NAMES} more" if len(names) > _NAMES else shown
