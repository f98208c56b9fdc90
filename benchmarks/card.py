"""What is asked of the device, and of the machine that it is in. On the CPU, where the dry runs are, there is little to ask."""

import math
import subprocess
import time
import warnings
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "L40S": 362.0, "RTX 4090": 165.0}  # dense bf16, by data sheets
DRY_RUN = "CPU, a dry run whose figures mean nothing"
_PRODUCTS = 10
_WAIT = "called a synchronizing CUDA operation"  # the mode itself warns, in other words, that it does not see all of them


def settle(device: str) -> None:
    """Torch's settings in a process that trains: matrix products in TF32, and one thread on the CPU."""
    torch.set_float32_matmul_precision("high")
    if device == "cpu":
        torch.set_num_threads(1)


def profiler(device: str) -> Any:
    """Torch's profiler, of the host and of the device."""
    return profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])])


def wait_for(device: str) -> None:
    """Returns when the device has done all that it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def stop_profiler(profiler: Any, device: str) -> None:
    """Stops it when the device has done all that it was given."""
    wait_for(device)
    profiler.stop()


def now(device: str) -> float:
    """Seconds by the host's clock, read when the device has done all that it was given."""
    wait_for(device)
    return time.perf_counter()


def free_cached(device: str) -> None:
    """Gives back the memory that torch keeps and no tensor needs."""
    if device == "cuda":
        torch.cuda.empty_cache()


def forget_peak(device: str) -> None:
    """The peak of memory counts from here on."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device: str) -> float:
    """The most memory that tensors had at a time; NaN on the CPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else math.nan


class WaitWarnings:
    """Counts what CUDA's synchronisation debug mode warns of between `start` and `stop`; on the CPU there is nothing to count.

    The mode sees operations of torch that wait for the device. To wait for an event is not among them.
    """

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"
        self._recorder: Any = None
        self._caught: Any = []

    def start(self) -> None:
        """Turns the mode on."""
        self._recorder = warnings.catch_warnings(record=True)
        self._caught = self._recorder.__enter__()
        warnings.simplefilter("always")
        if self._is_cuda:
            torch.cuda.set_sync_debug_mode("warn")

    def stop(self) -> int:
        """Turns it off, and gives the number."""
        if self._is_cuda:
            torch.cuda.set_sync_debug_mode("default")
        self._recorder.__exit__(None, None, None)
        return sum(_WAIT in str(warning.message) for warning in self._caught)


def fitting(gigabytes: float) -> int:
    """How many processes that take so much memory the device has room for; 4 on the CPU."""
    if not torch.cuda.is_available():
        return 4
    _, in_all = torch.cuda.mem_get_info()
    return max(1, int(in_all / 1e9 / gigabytes))


def driver_version() -> str:
    """As `nvidia-smi` says."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return ended.stdout.split("\n")[0].strip() or "unknown"


def card() -> str:
    """The name of the card, and what drives it."""
    if not torch.cuda.is_available():
        return DRY_RUN
    return f"{torch.cuda.get_device_name()}, driver {driver_version()}, CUDA {torch.version.cuda}"


def peak_flop_per_second() -> float:
    """Of dense bf16, by the card's data sheet; NaN where the table does not know it."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((tflops * 1e12 for known, tflops in PEAK_TFLOPS.items() if known in name), math.nan)


def product_flop_per_second(device: str) -> float:
    """What a product of two large bf16 matrices reaches on this device."""
    size = 8192 if device == "cuda" else 64
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    started = now(device)
    for _ in range(_PRODUCTS):
        a @ b
    return _PRODUCTS * 2 * size**3 / (now(device) - started)
