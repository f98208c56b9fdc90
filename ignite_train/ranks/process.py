"""Processes of this machine: whether one that wrote down who it is has ended, as Linux's `/proc` tells."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

__all__ = ["has_ended", "look_up", "own_process", "process_space"]


def own_process() -> list[str]:
    """Unique id of this process, for `has_ended` on another rank; empty where Linux's `/proc` is missing.

    It is made of the machine since it was booted, the namespace of the process, its number and when it began.
    """
    return [*_process(os.getpid())]


@cache
def _process(number: int) -> tuple[str, ...]:
    """See `own_process`; of this number, which another one has after a fork."""
    try:
        return *process_space(), str(number), look_up(number)[1]
    except OSError:
        return ()


def has_ended(process: Sequence[str]) -> bool:
    """Whether that process of `own_process` is known to have ended: it is seen only from the same machine and namespace."""
    here = own_process()
    if not process or not here or process[:2] != here[:2]:
        return False
    try:
        status, began = look_up(int(process[2]))
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status in "ZX" or began != process[3]  # Z and X: dead, and not yet waited for


def process_space() -> tuple[str, str]:
    """Names the set of process numbers: the machine since it was booted, and the namespace, as each container has one.

    Raises:
        OSError: the kernel does not tell.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return boot, str(Path("/proc/self/ns/pid").readlink())


def look_up(number: int) -> tuple[str, str]:
    """The status and the beginning of a process. Its name, which is there too, may be no text.

    Raises:
        OSError: there is no such process, or the kernel does not tell.
    """
    fields = Path(f"/proc/{number}/stat").read_bytes().rpartition(b")")[2].decode().split()
    return fields[0], fields[19]
