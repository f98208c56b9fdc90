"""The generators that a loader holds are found by name, and a state from a file cannot break them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from ignite_train.model.random_state import generators_within, get_generator_state, set_generator_state


class Holder:
    """Any object with attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def test_generators_are_found_wherever_a_loader_holds_them() -> None:
    """In samplers of samplers, datasets, their parts and small containers; each once, under the shortest path."""
    own, chance = torch.Generator(), random.Random(0)  # noqa: S311
    dataset = Holder(transforms=[Holder(rng=np.random.default_rng(0)), Holder(rng=chance)], again=chance)
    sampler = BatchSampler(RandomSampler(range(4), generator=own), 2, False)
    found = generators_within(DataLoader(dataset, batch_sampler=sampler))  # type: ignore[arg-type]
    assert sorted(found) == ["batch_sampler.sampler.generator", "dataset.again", "dataset.transforms.0.rng"]
    assert found["batch_sampler.sampler.generator"] is own


def test_generators_of_the_process_and_of_large_containers_are_left_out() -> None:
    """Those are saved elsewhere; and a dataset of millions of objects is not searched."""
    process = Holder(a=torch.default_generator, b=np.random.mtrand._rand, c=random.SystemRandom())
    assert generators_within(process) == {}
    assert generators_within(Holder(samples=[np.random.default_rng(0)] * 1000)) == {}
    circle = Holder()
    circle.itself = [circle]
    assert generators_within(circle) == {}


GENERATORS: dict[str, Any] = {
    "torch": lambda: torch.Generator().manual_seed(1),
    "python": lambda: random.Random(1),  # noqa: S311
    "numpy": lambda: np.random.default_rng(1),
    "numpy, philox": lambda: np.random.Generator(np.random.Philox(1)),
    "numpy, old": lambda: np.random.RandomState(1),
}


def draw(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return torch.rand(3, generator=generator).tolist()
    return [generator.random() for _ in range(3)] if isinstance(generator, random.Random) else generator.normal(size=3).tolist()


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_state_brings_the_same_numbers_back(kind: str) -> None:
    """Also in another generator of that kind; the state of another kind is refused."""
    generator, other = GENERATORS[kind](), GENERATORS[kind]()
    draw(generator)
    state = get_generator_state(generator)
    expected = draw(generator)
    set_generator_state(other, state)
    assert draw(other) == expected
    with pytest.raises(ValueError, match="must not be of type int"):
        set_generator_state(other, 3)


@pytest.mark.parametrize("position", [-1, 625, 2**40, "0"])
def test_numpys_position_must_be_in_its_table(position: Any) -> None:
    """NumPy itself would read beyond it, in the process's memory."""
    old, philox = np.random.RandomState(1), np.random.Generator(np.random.Philox(1))
    state = get_generator_state(old)
    with pytest.raises(ValueError, match="position"):
        set_generator_state(old, {**state, "state": {**state["state"], "pos": position}})
    with pytest.raises(ValueError, match="position"):
        set_generator_state(philox, {**get_generator_state(philox), "buffer_pos": position})
