"""Each script of examples/programs does what the same program does in plain torch, on one rank and on two."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from programs_by_hand import BY_HAND
from ranks import run_ranks

FOLDER = Path(__file__).parent.parent / "examples/programs"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "workbench")
MAX_LINES = 120

# One of each mechanism is in the fast tier, for these updates. A difference in rounding grows with the number of updates.
FAST = {
    "wgan_gp": 1,  # updates on demand
    "reinforce": 2,  # the sum
    "time_sequence": 1,  # a closure
    "muon_adamw": 2,  # several optimizers
    "word2vec": 2,  # sparse gradients
    "word_lstm": 3,  # a carried state
    "dino": 5,  # changed gradients, and a forward that knows the progress
    "clip": 2,  # and one that knows its place in the group
    "maml": 2,  # derivatives of derivatives
}
UPDATES = {"time_sequence": 3}


def program(name: str) -> Any:
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))  # as when the script is started
    return importlib.import_module(name)


def ours(name: str, num_updates: int) -> tuple[torch.Tensor, list[float]]:
    """In float64, so that what differs is either rounding or wrong."""
    torch.set_default_dtype(torch.float64)
    model, losses = program(name).train(num_updates)
    return parameters_to_vector(model.parameters()).detach(), losses


def by_hand(name: str, num_updates: int) -> tuple[torch.Tensor, list[float]]:
    model, losses = BY_HAND[name](program(name), num_updates)
    return parameters_to_vector(model.parameters()).detach(), losses


@pytest.fixture(autouse=True)
def _default_dtype() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def assert_equal_to_rounding(found: tuple[torch.Tensor, list[float]], expected: tuple[torch.Tensor, list[float]]) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(expected[1]), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", [*FAST])
def test_the_first_updates_are_those_by_hand(name: str) -> None:
    """One program of each mechanism, for a few updates on one rank."""
    assert_equal_to_rounding(ours(name, FAST[name]), by_hand(name, FAST[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_program_is_the_loop_by_hand(name: str) -> None:
    """Parameters and losses are equal to rounding, after an epoch or more."""
    number = UPDATES.get(name, 18)
    expected = by_hand(name, number)

    assert_equal_to_rounding(ours(name, number), expected)
    assert len(expected[1]) == number


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_program_is_the_loop_by_hand_on_two_ranks(name: str) -> None:
    """Two ranks that share the micro-batches of each group end where one process does."""
    number = UPDATES.get(name, 18)
    expected = by_hand(name, number)

    for found in run_ranks(ours, name, number):
        assert_equal_to_rounding(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_program_runs_as_it_is_started(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """`python examples/programs/NAME.py` trains and says how it went."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.syspath_prepend(str(FOLDER))
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")

    assert "in the first updates" in capsys.readouterr().out
