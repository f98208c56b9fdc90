"""Which cases of a law `make test` looks at, and which are left to `make test-all`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

accelerated = pytest.mark.skipif(
    os.environ.get("IGNITE_TRAIN_FAST") == "0", reason="is about an acceleration, which IGNITE_TRAIN_FAST=0 switches off"
)
"""Marks a test of an acceleration itself; all others pass without accelerations too."""


def slow(*values: Any) -> Any:
    """The values of one case, for `parametrize`, that is left to `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def nightly(*values: Any) -> Any:
    """The values of one case, for `parametrize`, that is left to `make nightly`."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def one_in(number: int, cases: Iterable[Any]) -> list[Any]:
    """The cases of one parameter, for `parametrize`: the first of each `number` stays, the others are slow."""
    return [case if index % number == 0 else slow(case) for index, case in enumerate(cases)]


def only(fast: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases of one parameter, for `parametrize`: these stay, the others are slow."""
    kept = list(fast)
    return [case if case in kept else slow(case) for case in cases]
