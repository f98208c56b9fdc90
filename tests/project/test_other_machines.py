"""No test of the gate depends on how one processor rounds: they pass with other instructions, threads and orders of samples."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# One run of the gate takes two minutes on two free cores. Only what hangs takes so long.
LIMIT_SECONDS = 3000

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(LIMIT_SECONDS + 60),
    pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="looks at a checkout, and this is none"),
]


@pytest.mark.parametrize("reversed_samples", ["0", "1"], ids=["order", "reversed"])
@pytest.mark.parametrize(
    ("instructions", "threads"), [("default", "1"), ("avx2", "2"), ("avx512", "4")], ids=["default-1", "avx2-2", "avx512-4"]
)
def test_the_gate_passes_where_sums_round_differently(instructions: str, threads: str, reversed_samples: str) -> None:
    """A processor without the instructions uses those that it has, as torch does."""
    settings = {
        "ATEN_CPU_CAPABILITY": instructions,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TESTS_REVERSED": reversed_samples,
    }
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider", "tests"]
    ran = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    failed = re.findall(r"^(?:FAILED|ERROR) .*$", ran.stdout, flags=re.MULTILINE)
    assert (ran.returncode, failed) == (0, []), f"with {settings}: {ran.stdout[-2000:]}"
    assert int(re.findall(r"(\d+) passed", ran.stdout)[-1]) > 1000
