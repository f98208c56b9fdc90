"""All tests run on one thread each, also what they start: as many run at a time as there are cores."""

from __future__ import annotations

import os

import torch

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
