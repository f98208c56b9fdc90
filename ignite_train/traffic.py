"""Counting what an update costs besides arithmetic: reads of the device by the host, and collectives."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ignite_train.internals.of_torch import (
    COLLECTIVE_NAMESPACES,
    COPY,
    NO_COLLECTIVES,
    READ,
    DispatchMode,
    indices_of,
    pytree,
    values_of,
)

__all__ = ["Counted", "Traffic", "count_traffic"]

_TORCH = str(Path(torch.__file__).parent)
_READS = {"tolist", "numpy", "__array__", "__dlpack__", "__repr__"}  # torch's dispatcher does not see all of these
_IN_PLACE = ("all_reduce", "broadcast")  # what c10d does in the memory that it is given; the functional ones give new tensors


class Counted(NamedTuple):
    """One read or collective.

    Attributes:
        name: torch's name of the operation.
        where: file and line of the innermost frame outside of torch.
        num_bytes: of a collective, the bytes of the tensors that this rank gives to it and that it fills here; 0 for a read.
    """

    name: str
    where: str
    num_bytes: int = 0


@dataclass
class Traffic:
    """The reads and collectives that were counted so far.

    Attributes:
        host_reads: operations whose result made the host wait for the device, in order.
        collectives: operations over ranks, in order.
    """

    host_reads: list[Counted] = field(default_factory=list)
    collectives: list[Counted] = field(default_factory=list)


@contextmanager
def count_traffic(device: str | torch.device | None = None) -> Iterator[Traffic]:
    """Counts host reads and collectives that this thread, or backward for it, issues in the context.

    A host read is `item`, `tolist`, `numpy`, `float(tensor)`, `if tensor`, printing it, or a copy to the CPU. On a machine
    without an accelerator, reads of CPU tensors are counted, so that a test of "one read an update" runs there too. Operations
    that wait inside torch's kernels, as `nonzero` does, are not counted; `torch.cuda.set_sync_debug_mode` reports those. Of CPU
    tensors it does not see what torch reads without an operation of its own: `torch.equal`, `allclose`, `linspace` of tensors,
    `torch.tensor` of a list of tensors, `pickle` and `torch.save`.

    Args:
        device: the type of device whose tensors count; None means the accelerator, or the CPU if there is none.

    Example:
        >>> import torch
        >>> from ignite_train import count_traffic
        >>> with count_traffic("cpu") as traffic:
        ...     total = torch.ones(3).sum().item()
        >>> [read.name for read in traffic.host_reads], traffic.collectives
        (['item'], [])
    """
    if device is None:
        accelerator = torch.accelerator.current_accelerator()
        device = "cpu" if accelerator is None else accelerator
    traffic, watched = Traffic(), torch.device(device).type
    calls = _Calls(traffic, watched)
    with _Operations(traffic, watched, calls), calls:
        yield traffic


class _Calls(TorchFunctionMode):
    """Counts reads that are calls of a named method of a tensor."""

    def __init__(self, traffic: Traffic, watched: str) -> None:
        super().__init__()
        self._traffic, self._watched = traffic, watched
        self.name = ""  # of the method that is running, whose operations `_Operations` sees
        self.counted = False

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outer = self.name, self.counted
        self.name, self.counted = func.__name__, False
        if self.name in _READS and isinstance(args[0], Tensor) and args[0].device.type == self._watched:
            self.count()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.name, self.counted = outer

    def count(self, name: str = "") -> None:
        """Counts one read, also if it takes several operations."""
        if not self.counted:
            self._traffic.host_reads.append(Counted(self.name or name, _place()))
        self.counted = bool(self.name)


class _Operations(DispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives, and reads that are operations of their own, also those in backward."""

    def __init__(self, traffic: Traffic, watched: str, calls: _Calls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._traffic, self._watched, self._calls = traffic, watched, calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        if func.namespace in COLLECTIVE_NAMESPACES and name not in NO_COLLECTIVES:
            filled = () if name.startswith(_IN_PLACE) else result
            tensors = {id(leaf): leaf for leaf in pytree.tree_leaves((args, kwargs, filled)) if isinstance(leaf, Tensor)}
            self._traffic.collectives.append(Counted(name, _place(), sum(map(_num_bytes, tensors.values()))))
        is_copy = name in {COPY, "copy_"} and self._watched != "cpu" and result.device.type == "cpu"
        if (is_copy or name == READ) and args[name == "copy_"].device.type == self._watched:  # its source
            self._calls.count(name)
        return result


def _num_bytes(tensor: Tensor) -> int:
    """Of a sparse tensor, the bytes of its indices and values."""
    if tensor.layout is torch.sparse_coo:
        return indices_of(tensor).nbytes + values_of(tensor).nbytes
    return tensor.nbytes


def _place() -> str:
    """File and line of the innermost frame outside of torch and this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_code.co_filename == __file__ or frame.f_code.co_filename.startswith(_TORCH)):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
