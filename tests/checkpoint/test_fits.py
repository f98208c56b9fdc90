"""The comparison of two trees, by which a checkpoint is refused and a changed setting is told."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ignite_train import CheckpointError
from ignite_train.checkpoint.differences import differences
from ignite_train.checkpoint.fits import check_module


@pytest.mark.parametrize(
    ("saved", "here", "found"),
    [
        ({"a": {"b": 1, "c": [2]}}, {"a": {"b": 1, "c": [2]}}, []),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, ["a.b: 1 -> 2"]),
        ({"a": {"b": 1}}, {}, ["a.b: 1 -> nothing"]),
        ({}, {"a": {"b": 1, "c": None}}, ["a.b: nothing -> 1", "a.c: nothing -> None"]),
        ({"a": {"b": 1}}, {"a": 3}, ["a: {'b': 1} -> 3"]),
        ({"a": [1, 2]}, {"a": [1]}, ["a: [1, 2] -> [1]"]),
        ({0: "x", "b": 2}, {"b": 3, 0: "y"}, ["b: 2 -> 3", "0: 'x' -> 'y'"]),
    ],
    ids=["equal", "value", "only saved", "only here", "mapping and value", "lists", "in the order of the run"],
)
def test_each_place_where_two_trees_differ_is_found_once(saved: Any, here: Any, found: list[str]) -> None:
    """Down to the values, which are compared whole if they are no mappings."""
    assert [one.change for one in differences(saved, here)] == found


@pytest.mark.parametrize(("same", "found"), [(operator.eq, 0), (lambda one, other: repr(one) == repr(other), 2)])
def test_what_is_the_same_is_for_the_caller_to_say(same: Callable[[Any, Any], bool], found: int) -> None:
    assert len([*differences({"a": 1, "b": True}, {"a": 1.0, "b": 1}, same)]) == found


def test_a_module_is_compared_by_names_shapes_dtypes_and_classes() -> None:
    """Not by numbers, nor by what is no tensor on both sides; three differences are told, and how many more there are."""
    saved = {**nn.Linear(2, 2).state_dict(), "extra": {"version": 1}}
    check_module("there", "model", {**nn.Linear(2, 2).state_dict(), "extra": {"version": 2}}, saved)
    other = {
        "weight": torch.zeros(2, 2, dtype=torch.half),
        "bias": torch.zeros(3),
        "scale": torch.ones(1),
        "extra": torch.ones(1),
    }
    with pytest.raises(CheckpointError) as caught:
        check_module("there", "model", other, saved)
    assert str(caught.value) == (
        "there is of another model: weight is float32 of shape (2, 2), and this run has float16 of shape (2, 2); bias is "
        "float32 of shape (2,), and this run has float32 of shape (3,); scale is missing; and 1 "
        "more; build the model that was saved"
    )
