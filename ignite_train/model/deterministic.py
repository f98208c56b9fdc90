"""The same numbers in each run of a script: seeds and algorithms, in one call."""

from __future__ import annotations

import os
import random
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from ignite_train.arguments import describe
from ignite_train.model.in_full import in_full
from ignite_train.model.random_state import capture_random_state, restore_random_state

__all__ = ["deterministic"]

_WORKSPACE, _FIXED_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


class deterministic:  # noqa: N801  # it is called as a function is
    """Seeds all generators and switches to deterministic algorithms; call it once, at the top of the script.

    - Python's, NumPy's and torch's generators are seeded on all devices, with the same seed on all ranks, so that ranks build
      the same model. If dropout or augmentation shall differ between the ranks, call `torch.manual_seed(seed + rank)` once the
      model and the trainer are made.
    - A DataLoader shuffles, and seeds its workers, with numbers that it draws from torch's generator: it gives the same
      samples in each run of the script. With a `ResumableLoader` they do not even depend on the number of workers.
    - torch uses deterministic algorithms only; an operation that has none raises an error, or with `warn_only` a warning.
      cuDNN's benchmark is off, and cuBLAS has a workspace of fixed size.

    As a function it is for the rest of the process. As a context manager it restores what it has changed, the generators
    too, at its end. The same numbers are not promised on another machine or with another version of torch. The order of a `set`
    of strings changes from process to process unless `PYTHONHASHSEED` is set before Python starts.

    Args:
        seed: from 0 to 2³² - 1.
        warn_only: warn of an operation that has no deterministic algorithm.

    Raises:
        TypeError: `seed` is not an integer.
        ValueError: `seed` is out of range.
        RuntimeError: CUDA was used before, with a cuBLAS workspace whose size is not fixed.

    Example:
        >>> import torch
        >>> from ignite_train import deterministic
        >>> def draw():
        ...     with deterministic(7):
        ...         return torch.rand(3).tolist()
        >>> draw() == draw()
        True
    """

    def __init__(self, seed: int, *, warn_only: bool = False) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed must be an integer, got {describe(seed)}")
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed must be from 0 to 2**32 - 1, got {seed}")
        is_late: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if is_late and _WORKSPACE not in os.environ:
            raise RuntimeError("deterministic was called after CUDA was used; call it at the top of the script")
        self.seed, self.warn_only = seed, warn_only
        self._before: dict[str, Any] = {
            "random": capture_random_state(),
            "algorithms": (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
            "benchmark": torch.backends.cudnn.benchmark,
            "workspace": os.environ.get(_WORKSPACE),
        }
        try:
            self._begin()
        except BaseException:  # by Ctrl-C: no `with` has begun that would end
            in_full(self._put_back)
            raise

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.seed}, warn_only={self.warn_only})"

    def __enter__(self) -> Self:
        return self

    def _begin(self) -> None:
        os.environ.setdefault(_WORKSPACE, _FIXED_WORKSPACE)
        torch.use_deterministic_algorithms(True, warn_only=self.warn_only)
        torch.backends.cudnn.benchmark = False
        random.seed(self.seed)
        np.random.seed(self.seed)
        torch.manual_seed(self.seed)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        in_full(self._put_back)

    def _put_back(self) -> None:
        before = self._before
        enabled, warn_only = before["algorithms"]
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.backends.cudnn.benchmark = before["benchmark"]
        if before["workspace"] is None:
            os.environ.pop(_WORKSPACE, None)
        restore_random_state(before["random"])
