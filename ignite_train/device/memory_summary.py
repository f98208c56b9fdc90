"""What is known about the memory when some of it is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

__all__ = ["memory_summary"]


def memory_summary() -> str:
    """The summary of CUDA's allocator; without CUDA a line about the memory of this process, empty where it is unknown.

    Read from Linux's `/proc`, and from what the system says about limits (`ulimit -v`, setrlimit(2)).
    """
    if torch.cuda.is_available():
        return torch.cuda.memory_summary()
    if sys.platform != "linux":
        return ""
    import resource  # is missing on other systems

    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:  # not mounted, or not even a file can be opened: the lack of memory is what must be reported
        return ""
    sizes = {name: value for name, _, value in (line.partition(":") for line in lines)}
    gib = {name: int(sizes[name].split()[0]) / 2**20 for name in ("VmRSS", "VmHWM", "VmSize") if name in sizes}  # from KiB
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if len(gib) < 3:
        return ""
    ends = "not limited" if limit == resource.RLIM_INFINITY else f"limited to {limit / 2**30:.2f} GiB"
    return (
        f"memory of this process: {gib['VmRSS']:.2f} GiB resident, {gib['VmHWM']:.2f} GiB at most so far; "
        f"address space {gib['VmSize']:.2f} GiB, {ends}"
    )
