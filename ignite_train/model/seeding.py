"""Random numbers of an update that are a function of a seed, the update, the micro-batch and the rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from ignite_train.model.random_state import PYTHON, RandomState, seed_random_state

__all__ = ["Seeding"]


class Seeding:
    """Seeds the generators inside an update, and gives them back after it as they were before.

    So what forward draws does not depend on the updates before, on the loader, on handlers or on an evaluation, and none of
    these depends on what forward draws: an update that is repeated, or a resumed run, draws the same numbers without a snapshot
    of the generators. fairseq's trainer seeds each update in this way (`_set_seed`), but torch's generators only, and the same
    on all ranks.

    - Each micro-batch is seeded by (seed, update, micro-batch in the group, rank). An optimizer that evaluates the loss again
      counts the evaluations too.
    - After the last backward the generators are seeded by (seed, update), the same on all ranks: for handlers that change the
      reduced gradient, and for optimizers that draw.

    Seeded are Python's generator, NumPy's, torch's of the CPU and that of the device of the model. NumPy's is put in another's
    place meanwhile, because its state takes long to read; a normal number that NumPy has drawn in advance is lost with that.

    Later micro-batches of a group may be read inside the update. What a sampler draws for them is not seeded, see `outside`.

    Args:
        seed: an integer of at least 0; the same on all ranks.
        device: of the model.
        rank: of this process.

    Attributes:
        rank: the same; another one in the next update, where replicas come and go.
    """

    def __init__(self, seed: int, device: torch.device, rank: int) -> None:
        self.seed, self._target, self.rank = seed, device, rank
        self._numpy = np.random.MT19937(0)
        self._update = 0
        self._before: tuple[RandomState, np.random.BitGenerator] | None = None  # while an update runs

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.seed}, rank={self.rank})"

    def begin(self, update: int) -> None:
        """Keeps the states that the generators have now, until `end`."""
        self._update = update
        self._before = RandomState([self._target], [PYTHON]), get_bit_generator()
        set_bit_generator(self._numpy)

    def micro_batch(self, index: int, evaluation: int = 0) -> None:
        """Seeds for the forward and backward of a micro-batch: `index` in the group of this rank, from 0."""
        self._seed("micro_batch", self._update, evaluation, index, self.rank)

    def step(self, evaluation: int = 0) -> None:
        """Seeds for what follows the last backward, alike on all ranks."""
        self._seed("step", self._update, evaluation)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Within this context the generators continue where they were before the update."""
        if self._before is None:
            yield
            return
        inside = RandomState([self._target], [PYTHON])
        self.end()
        try:
            yield
        finally:
            self.begin(self._update)
            inside.restore()

    def end(self) -> None:
        """Puts the generators back. Does nothing where no update has begun."""
        if self._before is not None:
            state, numpy = self._before
            state.restore()
            set_bit_generator(numpy)
            self._before = None  # last: where Ctrl-C comes before, it is called again

    def _seed(self, *key: int | str) -> None:
        seed = seed_random_state(self.seed, *key)
        if self._target.type != "cpu":
            with torch.accelerator.device_index(self._target.index):
                torch.get_device_module(self._target).manual_seed(seed)
