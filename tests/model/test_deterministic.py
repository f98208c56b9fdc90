"""Deterministic mode: the same bits in each run, loaders with workers too, and everything put back."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bits import bit_by_bit
from ignite_train import create_trainer, deterministic
from ignite_train.model.random_state import capture_random_state
from mistakes import Mistake, assert_one_line
from tiers import slow


class Augmented(Dataset[Tensor]):
    """Draws from all three generators for each sample."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()])  # noqa: S311


def settings() -> Any:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        bit_by_bit(capture_random_state()["torch"]),
        random.getstate(),
        np.random.get_state()[1].tolist(),  # type: ignore[index]
    )


def train(workers: int) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), lambda model, x: model(x).square().mean())
    trainer.run(DataLoader(Augmented(), batch_size=3, shuffle=True, num_workers=workers), max_epochs=2)
    return bit_by_bit(model.state_dict())


@pytest.mark.parametrize("workers", [0, slow(2)])
def test_each_run_has_the_same_bits(workers: int) -> None:
    """Initial weights, shuffling, augmentation and dropout; another seed gives others; afterwards all is as it was."""
    before, found = settings(), []
    for seed in (3, 3, 4):
        with deterministic(seed):
            assert torch.are_deterministic_algorithms_enabled()
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"]
            found.append(train(workers))
    assert found[0] == found[1] != found[2]
    assert settings() == before


@pytest.mark.parametrize("seed", [0, 2**32 - 1], ids=["smallest", "largest"])
def test_every_generator_begins_with_the_seed(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's, NumPy's and torch's; and cuDNN measures nothing meanwhile, since what is fastest differs from run to run."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with deterministic(seed):
        drawn = random.random(), np.random.rand(), torch.rand(()).item()  # noqa: S311
        assert not torch.backends.cudnn.benchmark
    generator = torch.Generator().manual_seed(seed)
    assert drawn == (
        random.Random(seed).random(),  # noqa: S311
        np.random.RandomState(seed).rand(),
        torch.rand((), generator=generator).item(),
    )
    assert torch.backends.cudnn.benchmark


def test_put_back_after_an_exception_and_inside_another() -> None:
    """The inner one leaves the outer one's settings."""

    def fail() -> None:
        with deterministic(1, warn_only=True):
            outer = settings()
            with deterministic(2):
                assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert settings() == outer
            assert outer[1]
            1 // 0  # noqa: B018

    before = settings()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert settings() == before


MISTAKES: dict[str, Mistake] = {
    "negative": (ValueError, "seed must be from 0", lambda: deterministic(-1)),
    "large": (ValueError, "seed must be from 0", lambda: deterministic(2**32)),
    "none": (TypeError, "seed must be an integer", lambda: deterministic(None)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes(name: str) -> None:
    """Each is answered in one line, and changes nothing."""
    before = settings()
    assert_one_line(MISTAKES[name])
    assert settings() == before


def test_too_late_for_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspace of cuBLAS is fixed when CUDA is first used."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with pytest.raises(RuntimeError, match="call it at the top of the script"):
        deterministic(1)
