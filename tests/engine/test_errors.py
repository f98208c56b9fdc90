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
    "UnlikeMicroBatchesError": ((0, 1),),
    "UnlikeParametersError": ("'a.weight'", (0, 2)),
    "LearningRateError": (1, float("inf")),
    "GradientAccessError": ("not now",),
    "CheckpointError": ("not written",),
    "DamagedCheckpointError": ("runs/update-00000001", "it is cut short"),
    "CheckpointFormatError": ("runs/update-00000003", 2, 5, "in format 2, and this one reads formats from 3 on"),
    "UnreadableCheckpointError": ("runs/update-00000002", "an I/O error"),
    "LockTakenOverError": ("taken over",),
    "NonFiniteError": (3, 0.5, float("inf"), ("rank 0, NaN in the loss", "rank 1, inf in the loss"), (2, 3)),
    "GaveUpError": (17, 5, "was skipped"),
    "MembersChangedError": ("a replica was lost",),
    "FellBehindError": ("the others have continued",),
    "NoQuorumError": ("no lighthouse",),
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


@pytest.mark.parametrize("name", sorted({*VALUES} - {"StateMismatchError", "GradNormMismatchError"}))
def test_an_error_is_shown_as_a_sentence(name: str) -> None:
    """It speaks of its values in words, and not as a tuple of them."""
    kind = getattr(errors, name, None) or getattr(ignite_train.handlers, name)
    error = kind(*VALUES[name])
    assert error.args == (str(error),)
    assert " " in str(error)


def test_an_option_comes_through_a_pickle_too() -> None:
    """`all_differ` is no positional argument, and changes the message."""
    error = ignite_train.handlers.GradNormMismatchError(4, (0.5, 1.5), ("weight",), all_differ=True)
    again = pickle.loads(pickle.dumps(error))
    assert again.all_differ is True
    assert str(again) == str(error) != str(ignite_train.handlers.GradNormMismatchError(4, (0.5, 1.5), ("weight",)))


@pytest.mark.parametrize(
    ("norms", "who"),
    [
        ((1.0, 1.0, 2.0), "rank 2 differs from the majority; "),
        ((1.0, 2.0, 1.0, 1.0, 3.0), "ranks 1, 4 differ from the majority; "),
        ((2.0, 1.0), ""),
        ((1.0, 3.0, 3.0, 4.0), ""),
        ((1.0, 2.0, 3.0, 3.0, 4.0), ""),
        ((1.0, float("nan"), 1.0), "rank 1 found the update not finite and ranks 0, 2 made the step"),
        ((float("inf"), 1.0, float("nan")), "ranks 0, 2 found the update not finite and rank 1 made the step"),
    ],
    ids=["one of three", "two of five", "of two", "two of four", "two alike of five", "one not finite", "two not finite"],
)
def test_norms_that_differ_name_the_ranks_outside_the_majority(norms: tuple[float, ...], who: str) -> None:
    """More than half of the ranks are one; ranks that did not step are named first."""
    message = str(ignite_train.handlers.GradNormMismatchError(4, norms, ()))
    finding = message.split("\n")[1 + len(norms)]
    assert finding.startswith(who or "no parameter can be named")


@pytest.mark.parametrize(("number", "more"), [(1, ""), (5, ""), (6, " and 1 more"), (9, " and 4 more")])
@pytest.mark.parametrize("kind", ["GradNormMismatchError", "StateMismatchError"])
def test_of_many_names_five_are_shown(kind: str, number: int, more: str) -> None:
    """And how many are left."""
    names = tuple(f"layer{index}" for index in range(number))
    middle = ((0.5, 1.5), names) if kind == "GradNormMismatchError" else (names, (1,))
    message = str(getattr(ignite_train.handlers, kind)(4, *middle))
    assert f"{', '.join(names[:5])}{more}" in message
    assert ("more" in message) == bool(more)
    assert "layer5" not in message


@pytest.mark.parametrize(
    ("ranks", "who"),
    [
        ((2,), "rank 2 differs from the majority"),
        ((0, 3), "ranks 0, 3 differ from the majority"),
        ((), "no majority of the ranks agrees"),
    ],
    ids=["one", "two", "none"],
)
def test_a_state_that_differs_names_the_ranks_outside_the_majority(ranks: tuple[int, ...], who: str) -> None:
    """Where there is one."""
    assert f"; {who}" in str(ignite_train.handlers.StateMismatchError(4, ("parameter weight",), ranks))
