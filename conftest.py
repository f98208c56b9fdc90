"""All tests run on one thread each, also what they start: as many run at a time as there are cores.

`OMP_NUM_THREADS` gives them more: with other numbers of threads sums round differently, see `tests/test_other_machines.py`.
"""

from __future__ import annotations

import gc
import os

import torch

torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))

# Collecting thousands of tests makes no garbage, but the collector looks through all of them again and again.
gc.disable()


def pytest_collection_finish() -> None:
    """Leaves what was collected out of all later searches for garbage, which the tests cause and some of them wait for."""
    gc.collect()
    gc.freeze()
    gc.enable()
