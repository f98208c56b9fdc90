"""All tests run on one thread each, also what they start: as many run at a time as there are cores.

`OMP_NUM_THREADS` gives them more: with other numbers of threads sums round differently, see
`tests/project/test_other_machines.py`.
"""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path

import pytest
import torch

torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))

if torch.cuda.is_available():  # `deterministic` refuses to begin without it once CUDA was used, as other tests do
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Collecting thousands of tests makes no garbage, but the collector looks through all of them again and again.
gc.disable()


def pytest_collection_finish() -> None:
    """Leaves what was collected out of all later searches for garbage, which the tests cause and some of them wait for."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Gives the examples of handlers what `ignite_train.handlers` says that they begin with."""
    if isinstance(item, pytest.DoctestItem) and item.name.startswith("ignite_train.handlers"):
        import ignite_train
        import ignite_train.handlers

        setup = (ignite_train.handlers.__doc__ or "").partition("begins::\n")[2]
        lines = [line.removeprefix("    ") for line in setup.splitlines() if line.startswith("    ")]
        names = {**vars(ignite_train), **vars(ignite_train.handlers), "directory": Path(tempfile.mkdtemp())}
        exec("\n".join(lines), names)  # noqa: S102
        item.dtest.globs.update({name: value for name, value in names.items() if not name.startswith("_")})
