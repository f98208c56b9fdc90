"""The generators that a loader holds are found by name, and a state from a file cannot break them."""

from __future__ import annotations

import random
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from ignite_train.model.objects_used import is_accounted_for, objects_used, variables_around
from ignite_train.model.random_state import (
    NUMPY,
    PYTHON,
    RandomState,
    capture_random_state,
    check_generators,
    generators_within,
    get_generator_state,
    restore_random_state,
    seed_new_rank,
    set_generator_state,
)


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


@pytest.mark.parametrize("depth", [1, 5, 6, 40])
def test_a_generator_is_found_however_deep(depth: int) -> None:
    """Datasets, transforms and samplers may be wrapped in one another."""
    owner = own = torch.Generator()
    for _ in range(depth):
        owner = Holder(inner=owner)  # type: ignore[assignment]
    assert generators_within(owner) == {".".join(["inner"] * depth): own}


def test_generators_of_the_process_and_of_large_containers_are_left_out() -> None:
    """Those are saved elsewhere; and a dataset of millions of objects is not searched."""
    process = Holder(a=torch.default_generator, b=np.random.mtrand._rand, c=random.SystemRandom())
    assert generators_within(process) == {}
    assert generators_within(Holder(samples=[np.random.default_rng(0)] * 1000)) == {}
    circle = Holder()
    circle.itself = [circle]
    assert generators_within(circle) == {}


CHANCE = np.random.default_rng(0)


def by_chance() -> float:
    return float(CHANCE.random())


class Drawing(nn.Module):
    """Its class refers to a generator, by way of a function."""

    def forward(self, x: Tensor) -> Tensor:
        return x * by_chance()


def ways_to_a_generator() -> dict[str, Any]:
    """Functions that come to draw from it, and a module that does."""
    hooked, holder = nn.Linear(1, 1), Holder(rng=CHANCE)
    hooked.register_forward_hook(lambda *_: by_chance() and None)
    return {
        "closure": (lambda rng: lambda *_: rng.random())(CHANCE),
        "function": lambda *_: by_chance(),
        "default": lambda *_, rng=CHANCE: rng.random(),
        "partial": partial(lambda rng, *_: rng.random(), CHANCE),
        "method": MethodType(lambda self, *_: self.rng.random(), holder),
        "container": lambda *_, those=({"rng": CHANCE},): those,
        "module": Drawing(),
        "hook": hooked,
    }


@pytest.mark.parametrize("way", ways_to_a_generator())
def test_a_generator_that_forward_refers_to_is_found(way: str) -> None:
    """However it gets there; and what is found is not accounted for where it cannot be put back."""
    found = [*objects_used([ways_to_a_generator()[way]])]
    assert any(one is CHANCE for one in found)
    assert not all(map(is_accounted_for, found))


def test_what_is_around_a_function_is_found_beside_a_name_without_a_value() -> None:
    """It is left out, and nothing else is."""

    def forward() -> Any:
        return CHANCE, inner, later

    inner = np.random.default_rng(0)
    around, everywhere = variables_around(forward)
    assert list(around) == ["inner"]
    assert everywhere["CHANCE"] is CHANCE
    assert any(one is inner for one in objects_used([forward]))
    later = None


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


def numpys_draws() -> list[float]:
    """What NumPy would draw next: words, and the second normal number of a pair. The state of the generator is put back."""
    before = np.random.get_state()
    drawn = [float(np.random.randn()), float(np.random.rand()), float(np.random.randn())]
    np.random.set_state(before)
    return drawn


def plain(state: Any) -> tuple[Any, ...]:
    """NumPy's state, for a comparison."""
    words = state["state"]
    return state["bit_generator"], words["key"].tolist(), words["pos"], state["has_gauss"], state["gauss"]


CHANGES = {
    "nothing": lambda: None,
    "a word": np.random.rand,
    "all words": lambda: np.random.rand(312),  # 624 of 32 bits: the position is the same again
    "a normal number": np.random.randn,
    "a pair of them": lambda: np.random.randn(2),
    "a seed": lambda: np.random.seed(5),
}


@pytest.mark.parametrize("first", CHANGES)
@pytest.mark.parametrize("second", CHANGES)
def test_the_state_of_numpy_is_that_of_now(first: str, second: str) -> None:
    """Whatever is drawn between two readings, each brings back what would have been drawn after it; also the one after."""
    np.random.seed(3)
    found = []
    for change in (first, second, "nothing"):
        CHANGES[change]()
        found.append((capture_random_state(), numpys_draws()))
    for state, draws in reversed(found):
        np.random.seed(9)
        restore_random_state(state)
        assert numpys_draws() == draws
        assert plain(capture_random_state()["numpy"]) == plain(np.random.get_state(legacy=False))


def test_a_new_rank_draws_numbers_of_its_own() -> None:
    """From the state of another rank: of each generator, others than any rank, and the same at each start."""

    def drawn(state: dict[str, Any], rank: int | None) -> tuple[float, float, float]:
        restore_random_state(state)
        if rank is not None:
            seed_new_rank(rank)
        return float(torch.rand(())), float(np.random.rand()), random.random()  # noqa: S311

    state = capture_random_state()
    found = [drawn(state, rank) for rank in (None, 1, 2)]
    assert [drawn(state, rank) for rank in (None, 1, 2)] == found
    for numbers in zip(*found, strict=True):
        assert len({*numbers}) == 3


@pytest.mark.parametrize("kind", ["PCG64", "Philox"])
def test_another_generator_of_numpy_is_read_and_put_back(kind: str) -> None:
    """`np.random.set_bit_generator` may put another kind there."""
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(getattr(np.random, kind)(1))  # type: ignore[attr-defined]
    try:
        state, draws = capture_random_state(), np.random.rand(3).tolist()
        restore_random_state(state)
        assert np.random.rand(3).tolist() == draws
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch) -> list[torch.Generator]:
    """The generators of two accelerators that this machine is said to have; a device may be given by its index."""
    found = [torch.Generator().manual_seed(number) for number in (1, 2)]

    def index(device: int | torch.device) -> int:
        return device if isinstance(device, int) else device.index

    module = SimpleNamespace(
        get_rng_state=lambda device: found[index(device)].get_state(),
        set_rng_state=lambda state, device: found[index(device)].set_state(state),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(found))
    return found


def test_each_accelerator_draws_the_same_numbers_again(accelerators: list[torch.Generator]) -> None:
    """After a restore, each its own; on a machine with fewer of them those that are there do."""
    state = capture_random_state()
    first = [draw(generator) for generator in accelerators]
    check_generators(state)
    restore_random_state(state)
    assert [draw(generator) for generator in accelerators] == first
    assert first[0] != first[1]
    del accelerators[1]
    check_generators(state)
    restore_random_state(state)
    assert draw(accelerators[0]) == first[0]


def test_a_state_of_a_machine_without_accelerators_leaves_them_alone(accelerators: list[torch.Generator]) -> None:
    """As where a run continues with a GPU that it did not have before."""
    state = capture_random_state()
    del state["accelerators"]
    before = [generator.get_state() for generator in accelerators]
    check_generators(state)
    restore_random_state(state)
    assert all(torch.equal(generator.get_state(), one) for generator, one in zip(accelerators, before, strict=True))


def test_a_damaged_state_of_an_accelerator_is_refused(accelerators: list[torch.Generator]) -> None:
    """Before any generator has changed. One for a device that this machine does not have is not looked at."""
    state = capture_random_state()
    state["accelerators"][1] = torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(ValueError, match="random generators cannot be restored"):
        check_generators(state)
    del accelerators[1]
    check_generators(state)


def test_a_draw_on_an_accelerator_is_noticed(accelerators: list[torch.Generator]) -> None:
    """On the device that is watched, and on no other."""
    before = RandomState([torch.device("cuda", 1)], [])
    draw(accelerators[0])
    assert not before.torch_has_moved()
    draw(accelerators[1])
    assert before.torch_has_moved()
    before.restore()
    assert not before.torch_has_moved()


OWN = np.random.default_rng(3)
DRAWS = {"python": random.random, "numpy": np.random.rand, "own": OWN.random, "torch": lambda: torch.rand(())}


@pytest.mark.parametrize("asked", [(PYTHON,), (PYTHON, NUMPY, OWN), ()], ids=["Python too", "all", "torch only"])
def test_a_draw_is_noticed(asked: tuple[Any, ...]) -> None:
    """Of each generator that was asked about, and of no other; until the state is put back."""
    before = RandomState([torch.device("cpu")], asked)
    assert not before.moved()
    generators = {"python": PYTHON, "numpy": NUMPY, "own": OWN, "torch": torch.default_generator}
    for name, drawn in DRAWS.items():
        drawn()
        watched = name == "torch" or generators[name] in asked
        assert before.moved() == ([generators[name]] if watched else [])
        assert before.torch_has_moved() is (name == "torch")
        before.restore()
        assert not before.moved()


@pytest.mark.parametrize("name", ["python", "numpy", "torch"])
def test_a_damaged_state_is_refused(name: str) -> None:
    """Each generator's, before any of them has changed."""
    states = capture_random_state()
    states["torch"] = torch.Generator().manual_seed(5).get_state()
    version, internal, gauss = states["python"]
    damaged = {
        "python": (version, internal[:7], gauss),
        "numpy": {**states["numpy"], "state": {**states["numpy"]["state"], "key": np.zeros(3, dtype=np.uint32), "pos": 1}},
        "torch": torch.zeros(3, dtype=torch.uint8),
    }
    check_generators(states)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="state"):
        check_generators(states | {name: damaged[name]})
    assert torch.equal(torch.get_rng_state(), before)


def test_the_accelerators_of_a_new_rank_are_seeded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's function for all devices, with another seed on each rank."""
    state, seeds = capture_random_state(), []
    for rank in (1, 2):
        restore_random_state(state)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "manual_seed", seeds.append)
            seed_new_rank(rank)
    assert len({*seeds}) == 2
