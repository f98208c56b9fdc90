"""Runs the tests on an accelerator that is simulated on the CPU: `make simulated-accelerator`. See docs/accelerators.md.

The device is that of torch_mcpu, a descendant of torch's own example of a backend, OpenReg. Its streams are threads, its copies
and many of its operations run there while the host continues, and its allocators are those of CUDA in their manners. So what is
read, written over or freed too early shows as a wrong number. What it lacks is computed on the CPU, which waits for the device.

It is built in `.venv-accelerator/`, from a clone, or from a checkout that `ACCELERATOR_SOURCE=path` names, with the
changes below.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PLACE = ROOT / ".venv-accelerator"
PYTHON, SOURCE = PLACE / "bin/python", PLACE / "source"
REPOSITORY, COMMIT = "https://github.com/kzwrime/torch_mcpu", "789373a"
SECONDS_PER_TEST = 120
LACKING = (
    "test_channels_last",  # convolutions
    "model-data-parallel",  # a `.to` that keeps parameters
    "test_a_wrapper_is_no_block",  # the same, for tied ones
    "test_sparse_gradients",
    "test_evaluations_predictions_and_metrics",  # nonzero
    "test_a_search_for_a_learning_rate",  # fused Adam with a tensor as rate
    "test_one_update_enters_no_more_than_it_did",  # counts calls, of which a machine with an accelerator has one more
)
ON_DEVICE = ("tests/device/test_accelerator.py", "tests/device/test_handlers_on_a_device.py")


class Change(NamedTuple):
    """What is done to a file of the source: a pattern, what takes its place, and how often it must occur."""

    file: str
    pattern: str
    instead: str
    number: int = 1


CHANGES = (
    # For torch 2.13.
    Change("csrc/runtime/DeviceCachingAllocator.cpp", r"\bkLargeBuffer\b", "20971520"),
    Change(
        "torch_mcpu/__init__.py", r"from torch_mcpu\.compile import setup_mcpu_compile", "setup_mcpu_compile = lambda: None"
    ),
    # A subclass of torch's event does not tell times.
    Change("torch_mcpu/__init__.py", r"torch\.Event = .*", ""),
    # Numbers of the host beside tensors of the device. They are never freed, since they are read later.
    Change(
        "csrc/aten/ops/Common.h",
        r"make_cpu_view_spec\(const at::Tensor& tensor\) \{\s*TORCH_CHECK\(\s*is_mcpu_tensor\(tensor\)",
        "make_cpu_view_spec(const at::Tensor& given) {\n"
        "  bool is_number = given.is_cpu() && given.dim() == 0;\n"
        "  const at::Tensor& tensor = is_number ? *new at::Tensor(given.clone()) : given;\n"
        "  TORCH_CHECK(is_number || is_mcpu_tensor(tensor)",
    ),
    Change(
        "csrc/aten/ops/binary_out.cpp",
        r"self\.options\(\)(?=\.dtype\(at::result_type\(self, other\)\)\);\s*\}\s*at::Tensor empty_like)",
        "(self.is_cpu() ? other : self).options()",
    ),
    Change(
        "csrc/aten/ops/binary_out.cpp",
        r"self\.options\(\)(?=\.dtype\(arithmetic_result_type)",
        "(self.is_cpu() ? other : self).options()",
    ),
    Change(
        "csrc/aten/ops/binary_out.cpp",
        r"empty_comparison_mcpu\(self(?=, out_sizes)",
        "empty_comparison_mcpu(self.is_cpu() ? other : self",
    ),
    # abs of float64, by the CPU.
    Change("csrc/aten/OpenRegExtra.cpp", r'm\.impl\("abs\.out".*', ""),
    Change("csrc/aten/native/Minimal.cpp", r'c10::OperatorName\("aten::abs".*', "", number=2),
    Change("csrc/aten/native/MCPUFallback.cpp", r"std::cerr << .*", ""),
    # Autocast for linear layers.
    Change(
        "csrc/amp/autocast_mode.cpp",
        r"KERNEL_PRIVATEUSEONE\(mm, lower_precision_fp\)",
        "".join(f"KERNEL_PRIVATEUSEONE({name}, lower_precision_fp)\n" for name in ("mm", "addmm", "bmm", "matmul", "linear")),
    ),
    # Threads of streams that have nothing to do sleep, and the host sleeps while it waits for them.
    Change("third_party/openreg/csrc/stream.cpp", r"IdlePolicy::Busy;(?=\s*\}\s*const bool high)", "IdlePolicy::Block;"),
    Change(
        "third_party/openreg/csrc/stream.cpp", r"(?<=HIGH_PRIORITY_STREAM_IDLE_POLICY TORCH_MCPU_STREAM_IDLE_)BUSY", "BLOCK"
    ),
    Change(
        "third_party/openreg/csrc/stream.cpp", r"wake_cv\.wait\(lock, ", "wake_cv.wait_for(lock, std::chrono::milliseconds(1), "
    ),
    Change("third_party/openreg/csrc/stream.cpp", r"openreg::cpu_relax\(\);(?=\s*\+\+spins)", "std::this_thread::yield();"),
    Change("third_party/openreg/CMakeLists.txt", r'(?<="Build and run unit tests" )ON', "OFF"),  # they expect the busy threads
)


def run(*command: str | Path, **environment: str) -> int:
    """The exit status of a command in the root of this repository."""
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=False).returncode


def prepare() -> None:
    """The source, changed, and an environment in which it is installed."""
    shutil.rmtree(PLACE, ignore_errors=True)
    venv.create(PLACE, with_pip=True)
    source = os.environ.get("ACCELERATOR_SOURCE", REPOSITORY)
    if run("git", "clone", "--quiet", source, SOURCE):
        sys.exit(f"git could not clone {source}, see above; pass ACCELERATOR_SOURCE=path of a checkout of {REPOSITORY}")
    if run("git", "-C", SOURCE, "checkout", "--quiet", COMMIT):
        sys.exit(f"{source} must have commit {COMMIT}, see above; pass ACCELERATOR_SOURCE=path of a checkout that has it")
    for change in CHANGES:
        path = SOURCE / change.file
        text, number = re.subn(change.pattern, lambda _, change=change: change.instead, path.read_text(encoding="utf-8"))
        if number != change.number:
            sys.exit(
                f"{change.file} of torch_mcpu should have {change.pattern!r} {change.number} times, it has it {number} times"
            )
        path.write_text(text, encoding="utf-8")
    install = (PYTHON, "-m", "pip", "install", "--quiet", "-c", "constraints.txt")
    failed = run(*install, "torch==2.13.0") or run(*install, "wheel", "--editable", ".[examples,dev]")
    if failed or run(*install, "--no-build-isolation", SOURCE, TORCH_MCPU_ENABLE_CPU_FALLBACK="1"):
        sys.exit("the simulated accelerator could not be installed, see above")
    (PLACE / "installed").touch()


def main() -> int:
    """1 if a test failed."""
    if not (PLACE / "installed").exists():
        prepare()
    without = " and ".join(f"not {name}" for name in LACKING)
    tests = (PYTHON, "-m", "pytest", "-q", "--timeout", str(SECONDS_PER_TEST), "-k", without)
    failed = run(*tests, *ON_DEVICE, OMP_NUM_THREADS="1")  # on the device
    # All tests of `make test`, most of them on the CPU, of a machine that has an accelerator.
    return int(run(*tests, "-n", "auto", "--maxprocesses", "8", "--dist", "worksteal", OMP_NUM_THREADS="1") or failed)


if __name__ == "__main__":
    sys.exit(main())
