"""Errors carry the values that they speak of, from one process to another too."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import ignite_train.handlers
from ignite_train import errors

VALUES: dict[str, tuple[Any, ...]] = {
    "TrainingError": ("no training",),
    "ForwardContractError": ("no loss",),
    "NoGradientError": ("no gradient",),
    "SparseGradientError": ("table.weight",),
    "UnlikeParametersError": ("'a.weight'", (0, 2)),
    "LearningRateError": (1, float("inf")),
    "GradientAccessError": ("not now",),
    "CheckpointError": ("not written",),
    "DamagedCheckpointError": ("runs/update-00000001", "it is cut short"),
    "CheckpointFormatError": ("runs/update-00000003", 2, 1),
    "UnreadableCheckpointError": ("runs/update-00000002", "an I/O error"),
    "NonFiniteError": (3, 0.5, float("inf"), ("rank 0, NaN in the loss", "rank 1, inf in the loss"), (2, 3)),
    "GaveUpError": (17, 5, "was skipped"),
    "LossScaleFloorError": (0.25, 0.125, ("rank 1, NaN in the loss",)),
    "PeerFailureError": (3, 17, "ValueError: no"),
    "GradNormMismatchError": (4, (0.5, 1.5), ("weight", "bias")),
    "StateMismatchError": (6, ("parameter weight", "loss scale"), (1,)),
}


def kinds(root: type[Exception] = errors.TrainingError) -> dict[str, type[Exception]]:
    """All errors of the library, by name."""
    assert ignite_train.handlers.__all__  # those of the handlers are defined when these are imported
    found = {root.__name__: root}
    for kind in root.__subclasses__():
        found |= kinds(kind) if kind.__module__.startswith("ignite_train") else {}
    return found


def test_each_error_is_tried_below() -> None:
    """A new one has to be added."""
    for name in ignite_train.handlers.__all__:
        getattr(ignite_train.handlers, name)  # imports it
    assert {*kinds()} == {*VALUES}
    assert {*errors.__all__} <= {*VALUES}


@pytest.mark.parametrize("name", VALUES)
def test_an_error_comes_whole_through_a_pickle(name: str) -> None:
    """Its type, its message and each of its attributes."""
    kind = getattr(errors, name, None) or getattr(ignite_train.handlers, name)
    error = kind(*VALUES[name])
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    assert {*map(repr, VALUES[name])} <= {*map(repr, vars(error).values()), *map(repr, error.args)}


def test_an_option_comes_through_a_pickle_too() -> None:
    """`all_differ` is no positional argument, and changes the message."""
    error = ignite_train.handlers.GradNormMismatchError(4, (0.5, 1.5), ("weight",), all_differ=True)
    again = pickle.loads(pickle.dumps(error))
    assert again.all_differ is True
    assert str(again) == str(error) != str(ignite_train.handlers.GradNormMismatchError(4, (0.5, 1.5), ("weight",)))
