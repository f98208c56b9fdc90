"""Recovery from a micro-batch that does not fit into memory: it is dropped or cut."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ignite_train.model.forward_state import ForwardState
from ignite_train.model.gradients import Gradients
from ignite_train.model.micro_batch_rollback import writing_error, written_into
from ignite_train.ranks.statistics import Statistics
from ignite_train.update.forward_backward import ForwardBackward
from ignite_train.update.halves import halves, is_of_samples, num_samples, uncut

__all__ = ["RecoverFromOutOfMemory", "advise", "memory_summary"]


def advise(error: torch.OutOfMemoryError) -> None:
    """Adds advice and a summary of the memory to an error that ends the run."""
    error.add_note(
        "to fit: smaller micro-batches with more accumulation_steps (the update stays the same), precision='bf16', "
        "activation checkpointing; or options=UpdateOptions(on_out_of_memory='skip') or 'split', on several ranks with "
        "reduction='explicit' there"
    )
    if summary := memory_summary():
        error.add_note(summary)


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


class RecoverFromOutOfMemory:
    """Takes back what a failed attempt has done, and drops the micro-batch or halves it.

    Gradients, statistics, `state.forward_output` and what forward changes are as if the attempt had not been, so that the
    update is bitwise the one in which that micro-batch had no weight; halves make the same sums as the whole, because their
    weights are sample sizes. The price is a second buffer of gradients while a micro-batch runs.

    Args:
        passes: forward, whose changes are put back. With `on_out_of_memory="split"` a micro-batch is halved, rather than
            dropped; what fitted is remembered, so that later ones are cut beforehand.
        gradients: which are put back.
        statistics: which are put back, and told of each failure.
    """

    def __init__(self, passes: ForwardBackward, gradients: Gradients, statistics: Statistics) -> None:
        self._state, self._split = passes.state, passes.options.on_out_of_memory == "split"
        # Copies of all parameters are what a lack of memory is made of.
        self._forward_state = ForwardState(passes.module, passes.carried, passes.user_forward, copies=False)
        self._gradients, self._statistics = gradients, statistics
        self._fits: int | None = None
        self._waiting: deque[Any] = deque()
        self._is_cut: list[bool] = []  # of each leaf of the micro-batch, whether its first dimension is that of the samples

    def parts(self, micro_batch: Any) -> Iterator[Any]:
        """The micro-batch, cut to what has been found to fit, and whatever further cutting adds."""
        self._waiting, self._is_cut = deque([micro_batch]), is_of_samples(micro_batch)
        while self._waiting:
            part = self._waiting.popleft()
            size = num_samples(part)
            if self._fits is not None and size is not None and size > self._fits:
                self._waiting.extendleft(reversed(halves(part, self._is_cut)))
            else:
                yield part

    @contextmanager
    def attempt(self, part: Any) -> Iterator[None]:
        """Within it the part is tried. If it does not fit, the attempt is forgotten, and all is as it was before."""
        aside, sums = self._gradients.set_aside(), self._statistics.mark()
        before, was_written = self._forward_state.mark(), written_into(part)
        try:
            yield
        except torch.OutOfMemoryError as error:
            # Its frames and the graph of the loss hold the memory that the next attempt needs.
            error.__traceback__ = self._state.forward_output = None
            self._gradients.put_back(aside)
            self._statistics.rewind(sums)
            self._forward_state.put_back(before)
            self._give_up_on(part, is_written=was_written())
        else:
            self._gradients.add_back(aside)
            self._forward_state.keep(before)

    def _give_up_on(self, part: Any, *, is_written: bool = False) -> None:
        """Called for a part that did not fit, when everything is put back.

        Args:
            part: which one.
            is_written: whether forward has written into it.

        Raises:
            ValueError: a single sample does not fit, or what does not fit cannot be halved, or not be run again.
        """
        self._statistics.num_out_of_memory += 1
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        if not self._split:
            return
        if is_written:
            raise writing_error("on_out_of_memory='split' must be able to run a micro-batch again")
        size = num_samples(part)
        if (whole := uncut(part)) is not None:
            raise ValueError(
                f"on_out_of_memory='split' must be able to halve a micro-batch, and one with a {type(whole).__name__} cannot "
                "be halved along its first dimension; use on_out_of_memory='skip', or smaller micro-batches"
            )
        if size is None or size < 2:
            raise ValueError(
                "on_out_of_memory='split' must be able to halve a micro-batch, and one of a single sample, or without tensors, "
                "does not fit into memory; use a smaller model or shorter samples"
            )
        self._fits = (size + 1) // 2
        self._waiting.extendleft(reversed(halves(part, self._is_cut)))
