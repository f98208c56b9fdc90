"""What the programs share: small data, groups of micro-batches, this rank's part of a group, and how a program is started."""

import os
import pydoc_data.topics
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Events
from torch import Tensor, nn

from ignite_train import Trainer

GROUP = 2  # micro-batches to an update over all ranks, so one or two ranks do the same updates
SIZES = (20, 12)  # samples in them: they differ, so a mean of their means would not be the mean

Trained = tuple[nn.Module, list[float]]
"""The trained model, and a number of each update: mostly the mean loss."""


class LoopState:
    """What a loop must remember from round to round; a checkpoint saves its attributes."""

    def state_dict(self) -> dict[str, Any]:
        """The attributes."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes them over."""
        vars(self).update(state)


def digits(count: int = 320) -> tuple[Tensor, Tensor]:
    """Handwritten digits: images of shape (count, 1, 8, 8) between -1 and 1, and their classes."""
    from sklearn.datasets import load_digits  # here, because some programs start faster without it

    images, classes = load_digits(return_X_y=True)
    images = torch.as_tensor(images[:count] / 8 - 1, dtype=torch.get_default_dtype())
    return images.view(-1, 1, 8, 8), torch.as_tensor(classes[:count])


def words(count: int, vocabulary: int) -> Tensor:
    """The first words of Python's help on its own language, as numbers; 0 stands for all but the most frequent ones."""
    text = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    found = re.findall(r"[a-z]+", text.lower())[:count]
    numbers = {word: number for number, (word, _) in enumerate(Counter(found).most_common(vocabulary - 1), start=1)}
    return torch.tensor([numbers.get(word, 0) for word in found])


def micro_batches(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Cuts tensors of equal length into micro-batches, whose sizes take turns."""
    sizes = list(SIZES) * (len(tensors[0]) // sum(SIZES))
    return list(zip(*(tensor[: sum(sizes)].split(sizes) for tensor in tensors), strict=True))


def groups(data: list[Any], num_updates: int) -> Iterator[list[Any]]:
    """The micro-batches of each update, over all ranks; the data begin again when they end."""
    return islice(cycle(data[first : first + GROUP] for first in range(0, len(data), GROUP)), num_updates)


def mine(data: list[Any]) -> list[Any]:
    """What this rank has of a group, or of all micro-batches."""
    return data[idist.get_rank() :: idist.get_world_size()]


def accumulation_steps() -> int:
    """How many micro-batches of a group each rank has."""
    return GROUP // idist.get_world_size()


def losses_of(trainer: Trainer) -> list[float]:
    """A list that grows by the mean loss of each update."""
    losses: list[float] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.update_output.loss))
    return losses


def start(train: Callable[[], Trained], what: str = "loss") -> None:
    """Trains on this process, or on each that torchrun has started, and prints how the numbers of `train` went."""
    torch.set_num_threads(1)  # the operations are too small for threads to share
    if "RANK" in os.environ:
        idist.initialize("gloo")
    _, listed = train()
    tenth = -(-len(listed) // 10)
    first, last = (sum(part) / tenth for part in (listed[:tenth], listed[-tenth:]))
    if idist.get_rank() == 0:
        print(f"{what} {first:.4f} in the first updates, {last:.4f} in the last of {len(listed)}")
    idist.finalize()
