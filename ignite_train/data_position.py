"""Where a rank stands in its data, in a form from which it can be found again, in another process too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader, IterableDataset

from ignite_train import distributed
from ignite_train.generators import generator_states, restore_generators

__all__ = ["DataPosition"]


@runtime_checkable
class _Seekable(Protocol):
    """A loader that can start anywhere, such as `ResumableLoader`; the next pass does so, and `len()` counts what is left."""

    samples_per_round: int

    def seek(self, samples: int) -> None: ...


@runtime_checkable
class _Stateful(Protocol):
    """A loader that knows where it is, such as torchdata's StatefulDataLoader."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class DataPosition:
    """Finds the place in a loader at which a pass was left, in one of three ways.

    A loader that can seek jumps there. One with a state is given it. Any other one is opened with the random generators as
    they were when the pass began, so that it shuffles the same way, and read again up to there; then the generators are put
    back to what they are.

    Args:
        loader: this rank's loader.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._seekable = loader if isinstance(loader, _Seekable) else None
        self._stateful = loader if self._seekable is None and isinstance(loader, _Stateful) else None
        self._first_sample = 0
        self._opening: dict[str, Any] = {}
        self._states: list[Any] = [None, None]  # of a stateful loader, before and after the latest group
        self._generators_before: dict[str, Any] | None = None
        self.jumps = False
        self.reads_past = False

    def find(self, saved: Mapping[str, Any], skip: int) -> None:
        """Prepares the loader for a pass that begins after `skip` groups, which `saved` was written after.

        Afterwards `reads_past` says whether they still have to be read, and `jumps` whether `len()` counts only what is left.

        Raises:
            ValueError: other ranks than these wrote it, and the loader cannot seek.
        """
        if skip:
            self._generators_before = generator_states()
            self._go_to(saved)
        elif "generators" in saved:
            self._set_own_generators(saved["generators"])
        self._opening = {**generator_states(), "own": self._own_generators()}
        if self.reads_past and "opening" in saved:
            restore_generators(saved["opening"])
            self._set_own_generators(saved["opening"]["own"])
            self._opening = saved["opening"]

    def found(self) -> None:
        """To be called once what was to be read past is read: finding the place leaves no trace in the random generators."""
        if self._generators_before is not None:
            restore_generators(self._generators_before)
            self._generators_before = None

    def note(self) -> None:
        """To be called after each group is read, before anything is read ahead."""
        if self._stateful is not None:
            self._states = [self._states[1], self._stateful.state_dict()]

    def saved(self, rounds: int, *, latest: bool) -> dict[str, Any]:
        """The position after so many micro-batches of this pass, in plain types.

        Args:
            rounds: micro-batches that this pass has given since it was found.
            latest: whether the group that was read last is among them.
        """
        position: dict[str, Any] = {"world_size": distributed.world_size(), "generators": self._own_generators()}
        if self._seekable is not None:
            return position | {"samples": self._first_sample + rounds * self._seekable.samples_per_round}
        if self._stateful is not None:
            return position | {"loader": self._states[latest]}
        return position | {"opening": self._opening}

    def _go_to(self, saved: Mapping[str, Any]) -> None:
        if self._seekable is not None and "samples" in saved:
            self._first_sample = saved["samples"]
            self._seekable.seek(self._first_sample)
            self.jumps = True
            return
        if saved.get("world_size", distributed.world_size()) != distributed.world_size():
            raise ValueError(
                f"data must be a loader that can seek, such as ResumableLoader, to go on in the middle of an epoch with "
                f"{distributed.world_size()} ranks where {saved['world_size']} left off, got a {type(self._loader).__name__}; "
                "or go on from a checkpoint of the end of an epoch"
            )
        if self._stateful is not None and saved.get("loader") is not None:
            self._stateful.load_state_dict(saved["loader"])
            self._states = [saved["loader"], saved["loader"]]
            return
        self.reads_past = True

    def _own_generators(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._find_own_generators()]

    def _set_own_generators(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._find_own_generators(), states, strict=False):
            generator.set_state(state)

    def _find_own_generators(self) -> list[torch.Generator]:
        """Those of the loader and its samplers."""
        owners: list[Any] = [self._loader]
        if self._seekable is not None or not isinstance(self._loader, DataLoader):
            return []
        if not isinstance(self._loader.dataset, IterableDataset):
            owners += [self._loader.sampler, self._loader.batch_sampler]
        found = [vars(owner).get("generator") for owner in owners if owner is not None]
        return list({id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values())
