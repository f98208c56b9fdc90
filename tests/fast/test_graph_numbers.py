"""Which differences between a compiled update and the same code are mistakes."""

from __future__ import annotations

import math

import pytest
import torch

from ignite_train.fast.graph_numbers import GraphNumbers

RIGHT = GraphNumbers(norm=50.0, loss=100.0, sample_size=10.0)
SINGLE, DOUBLE, HALF = [torch.float32], [torch.float64], [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ("found", "dtypes", "expected"),
    [
        (RIGHT, DOUBLE, None),
        (RIGHT._replace(norm=50.05), SINGLE, None),
        (RIGHT._replace(norm=50.15), SINGLE, "a gradient norm of 5.015 per sample in place of 5"),
        (RIGHT._replace(norm=49.85), SINGLE, "a gradient norm of 4.985 per sample in place of 5"),
        (RIGHT._replace(norm=50.001), DOUBLE, "a gradient norm of 5.0001 per sample in place of 5"),
        (RIGHT._replace(norm=52.0), HALF, None),
        (RIGHT._replace(norm=53.0), HALF, "a gradient norm of 5.3 per sample in place of 5"),
        (RIGHT._replace(norm=math.nan), SINGLE, "a gradient norm of nan per sample in place of 5"),
        (RIGHT._replace(norm=math.inf), HALF, "a gradient norm of inf per sample in place of 5"),
        (RIGHT._replace(loss=100.1), SINGLE, None),
        (RIGHT._replace(loss=100.3), SINGLE, "a loss of 10.03 per sample in place of 10"),
        (RIGHT._replace(loss=-100.0), HALF, "a loss of -10 per sample in place of 10"),
        (RIGHT._replace(sample_size=11.0), HALF, "a sample size of 11 in place of 10"),
    ],
)
def test_what_is_more_than_rounding_is_named(found, dtypes, expected):
    assert found.difference(RIGHT, dtypes) == expected


@pytest.mark.parametrize(
    "expected",
    [
        GraphNumbers(norm=math.inf, loss=100.0, sample_size=10.0),
        GraphNumbers(norm=50.0, loss=math.nan, sample_size=10.0),
        GraphNumbers(norm=0.0, loss=0.0, sample_size=0.0),
        GraphNumbers(norm=1e-8, loss=-1e-7, sample_size=10.0),  # nothing but rounding
    ],
    ids=["norm", "loss", "no sample", "rounding"],
)
def test_what_says_nothing_is_not_compared(expected):
    found = GraphNumbers(norm=3e-8, loss=2e-7, sample_size=expected.sample_size)
    assert found.difference(expected, SINGLE) is None


@pytest.mark.parametrize("size", [1.0, 0.25])
def test_a_single_sample_is_compared(size):
    """As of a bare loss, whose sample size is 1; weights may add up to less."""
    expected = GraphNumbers(norm=5 * size, loss=10 * size, sample_size=size)
    assert expected.difference(expected, SINGLE) is None
    found = expected._replace(norm=6 * size)
    assert found.difference(expected, SINGLE) == "a gradient norm of 6 per sample in place of 5"


@pytest.mark.parametrize(
    ("norm", "loss", "expected"),
    [
        (1.5e-5, 1.5e-4, None),
        (3e-5, 0.0, "a gradient norm of 3e-06 per sample in place of 0"),
        (0.0, -3e-4, "a loss of -3e-05 per sample in place of 0"),
    ],
    ids=["rounding", "norm", "loss"],
)
def test_what_should_be_nothing_is_measured_by_the_sample(norm, loss, expected):
    """A norm of 1e-3 and a loss of 1e-2, times the tolerance, may be left of large numbers that cancel."""
    assert GraphNumbers(norm, loss, 10.0).difference(GraphNumbers(0.0, 0.0, 10.0), SINGLE) == expected


def test_a_small_norm_is_compared() -> None:
    """As that of a model that is nearly trained, where a wrong graph would lose the most."""
    expected = GraphNumbers(norm=0.05, loss=100.0, sample_size=10.0)
    found = expected._replace(norm=0.06)
    assert found.difference(expected, SINGLE) == "a gradient norm of 0.006 per sample in place of 0.005"
