"""The random generators that a training run draws from: Python's, NumPy's and torch's, on the CPU and on the accelerators.

All code that captures or restores random state stands here: the generators of the process, those of one device around a forward
that is run again, and those that a loader, its samplers and its dataset hold.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress
from operator import attrgetter, not_
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ignite_train.internals.of_torch import ITERATOR
from ignite_train.model.in_full import in_full

__all__ = [
    "NUMPY",
    "PYTHON",
    "Draws",
    "Generator",
    "RandomState",
    "capture_random_state",
    "check_generators",
    "generators_within",
    "get_generator_state",
    "kept_random_state",
    "objects_within",
    "restore_random_state",
    "seed_new_rank",
    "seed_of",
    "seed_random_state",
    "set_generator_state",
    "set_generator_states",
]

Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState
PYTHON: random.Random = attrgetter("__self__")(random.random)
"""Python's own generator, whose methods are the functions of `random`."""
NUMPY: np.random.RandomState = attrgetter("__self__")(np.random.rand)
"""NumPy's own generator, likewise."""
_MAX_OBJECTS, _MAX_ENTRIES = 500, 32  # a dataset may hold millions of objects, which are not searched
_NO_OWNERS = (
    Tensor,
    nn.Module,
    np.ndarray,
    str,
    bytes,
    int,
    float,
    type,
    FunctionType,
    MethodType,
    ModuleType,
    random.SystemRandom,
)


class RandomState:
    """The state of generators that a forward draws from: torch's of the CPU and of some devices, and others.

    It is taken when the object is made. `capture_random_state` takes the whole state of the process, which is slower.

    Args:
        devices: those of the model.
        generators: the others. The state of most takes ten times as long to read as torch's.
    """

    def __init__(self, devices: Sequence[torch.device], generators: Sequence[Generator]) -> None:
        self._generators = [torch.default_generator, *generators]
        self._states = [torch.default_generator.get_state(), *map(get_generator_state, generators)]
        self._on_devices: list[tuple[ModuleType, torch.device, Tensor]] = []
        for device in devices:
            if device.type != "cpu":
                backend = torch.get_device_module(device)
                self._on_devices.append((backend, device, backend.get_rng_state(device)))

    def restore(self) -> None:
        """Puts the generators back to it."""
        for generator, state in zip(self._generators, self._states, strict=True):
            set_generator_state(generator, state)
        for backend, device, state in self._on_devices:
            backend.set_rng_state(state, device)

    def torch_has_moved(self) -> bool:
        """Whether one of torch's generators, of the CPU or of a device, has been drawn from since."""
        if not torch.equal(torch.default_generator.get_state(), self._states[0]):
            return True
        return not all(torch.equal(state, backend.get_rng_state(device)) for backend, device, state in self._on_devices)

    def moved(self) -> list[Generator]:
        """The generators that have been drawn from since; generators of devices are left out."""
        alike = map(_are_alike, map(get_generator_state, self._generators), self._states)
        return [*compress(self._generators, map(not_, alike))]

    def others(self) -> dict[int, tuple[Generator, Any]]:
        """The generators besides torch's, with their states, by their ids."""
        found = zip(self._generators[1:], self._states[1:], strict=True)  # torch's own is always the first
        return {id(generator): (generator, state) for generator, state in found}


class Draws:
    """The state of the generators before the running update, read in little time.

    The states of most of them take long to read. So those of Python, of NumPy and of the user are remembered in the updates 1,
    2, 4, 8, ...; and in all others from when on one of these looks has found them moved since the look before.

    Args:
        find: looks for the devices of the model, and for the generators besides torch's.

    Attributes:
        state: before the running update; None where it was not remembered.
        may_happen: whether forward may draw random numbers. Where it is known that it does not, no state is remembered.
    """

    def __init__(self, find: Callable[[], tuple[Sequence[torch.device], Sequence[Generator]]]) -> None:
        self._find, self.may_happen = find, True
        self.state: RandomState | None = None
        # By the latest look; without torch's own, whose state is a copy and would be held twice.
        self._seen: dict[int, tuple[Generator, Any]] = {}
        self._num_marks = 0
        self._devices: Sequence[torch.device] = ()
        self._drawn: list[Generator] = []  # those that were seen to move

    def mark(self) -> None:
        """Remembers the state before an update. Forgets the one before."""
        self.state = None
        if not self.may_happen:
            return
        self._num_marks += 1
        if self._num_marks & (self._num_marks - 1):
            self.state = RandomState(self._devices, self._drawn)
        else:
            self._look()

    def put_back(self) -> None:
        """Goes back to the state before the update, where it was remembered."""
        if self.state is not None:
            self.state.restore()

    def _look(self) -> None:
        self._devices, generators = self._find()
        self.state = RandomState(self._devices, generators)
        before, self._seen = self._seen, self.state.others()
        moved = {
            key: one for key, (one, state) in self._seen.items() if key in before and not _are_alike(state, before[key][1])
        }
        self._drawn = [*({id(one): one for one in self._drawn} | moved).values()]


def capture_random_state() -> dict[str, Any]:
    """The state of each default generator of this process, in plain types."""
    numpys: Any = np.random.get_state(legacy=False)
    states: dict[str, Any] = {"python": random.getstate(), "numpy": numpys, "torch": torch.get_rng_state()}
    if torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        states["accelerators"] = [module.get_rng_state(index) for index in range(torch.accelerator.device_count())]
    return states


def check_generators(states: Mapping[str, Any]) -> None:
    """Tries `states` on temporary generators, so that those in use change only if all of them can be restored.

    Raises:
        ValueError: one of them is not a state of its generator.
    """
    try:
        set_generator_state(random.Random(), states["python"])  # noqa: S311
        set_generator_state(np.random.RandomState(), states["numpy"])
        set_generator_state(torch.Generator(), states["torch"])
        if "accelerators" in states and torch.accelerator.is_available():
            for state in states["accelerators"][: torch.accelerator.device_count()]:
                torch.Generator(torch.accelerator.current_accelerator()).set_state(state)
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ValueError(f"the states of the random generators cannot be restored: {error}") from error


def restore_random_state(states: Mapping[str, Any]) -> None:
    """Restores `states`. An accelerator without a state in it is left alone.

    Raises:
        ValueError: NumPy's state has an invalid position, and NumPy would read beyond its table.
    """
    _check_numpy_state(states["numpy"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "accelerators" in states and torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        for index, state in enumerate(states["accelerators"][: torch.accelerator.device_count()]):
            module.set_rng_state(state, index)


@contextmanager
def kept_random_state(owner: Any) -> Iterator[Mapping[str, Any]]:
    """Puts the generators of the process, and those that `owner` holds, back at the end of this `with`.

    Args:
        owner: a loader, say; see `generators_within`.

    Yields:
        The state of those of the process, for `restore_random_state`.
    """
    random_state, own = capture_random_state(), RandomState([], [*generators_within(owner).values()])

    def put_back() -> None:
        own.restore()
        restore_random_state(random_state)

    try:
        yield random_state
    finally:
        in_full(put_back)


def seed_new_rank(rank: int) -> None:
    """Gives a rank that took over the restored state of another one random numbers of its own, the same at each start.

    Of Python's, NumPy's and torch's generators, with those of the accelerators.
    """
    seed = seed_random_state("new rank", rank, torch.initial_seed(), int(torch.randint(2**40, ())))
    torch.manual_seed(seed)  # the accelerators too


def seed_of(*key: int | str) -> int:
    """A hash of `key`, of 64 bits."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")


def seed_random_state(*key: int | str) -> int:
    """Seeds those of the CPU with a hash of `key`; fast enough for each sample, which `torch.manual_seed` is not.

    Returns:
        The hash, of 64 bits.
    """
    seed = seed_of(*key)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    return seed


def objects_within(owner: Any, without: Callable[[Any, Any, Any], bool] | None = None, *, kinds: Any) -> dict[str, Any]:
    """The objects of these kinds that `owner`, a loader say, and its attributes hold, by the names that lead there.

    The generators of the process are left out. So is what is in closures, in large containers, in a pass that is under way, in
    another object of these kinds, and in the attributes for which `without(object, name, value)` is true.
    """
    found: dict[str, Any] = {}
    queue: list[tuple[tuple[Any, ...], Any]] = [((), owner)]
    seen = {id(torch.default_generator), id(PYTHON), id(NUMPY), id(owner)}
    for path, value in queue:  # grows
        if issubclass(type(value), kinds):  # of the class, since an object may give attributes that it does not have
            found[".".join(map(str, path))] = value
            continue
        for name, entry in _attributes(value).items():
            if without is not None and without(value, name, entry):
                continue
            if len(queue) < _MAX_OBJECTS and entry is not None and id(entry) not in seen and not isinstance(entry, _NO_OWNERS):
                seen.add(id(entry))
                queue.append(((*path, name), entry))
    return found


generators_within: Callable[..., dict[str, Generator]] = partial(objects_within, kinds=Generator)
"""The generators that an owner holds; see `objects_within`."""


def get_generator_state(generator: Generator) -> Any:
    """The state of one generator, in plain types and tensors."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state(legacy=False)


def set_generator_states(generators: Mapping[str, Generator], states: Mapping[str, Any]) -> None:
    """Restores the states of those generators that have one by their name; the others are left alone.

    Raises:
        ValueError: as `set_generator_state`.
    """
    for name, generator in generators.items():
        if name in states:
            set_generator_state(generator, states[name])


def set_generator_state(generator: Generator, state: Any) -> None:
    """Restores what `get_generator_state` gave.

    Raises:
        ValueError: it is the state of another kind of generator, or invalid.
    """
    if isinstance(generator, torch.Generator) and isinstance(state, Tensor):
        generator.set_state(state)
    elif isinstance(generator, random.Random) and isinstance(state, (tuple, list)):
        version, internal, gauss = state
        generator.setstate((version, tuple(internal), gauss))
    elif isinstance(generator, (np.random.Generator, np.random.RandomState)) and isinstance(state, dict):
        _check_numpy_state(state)
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        else:
            generator.set_state(state)
    else:
        raise ValueError(f"the state of a {type(generator).__name__} must not be of type {type(state).__name__}")


def _are_alike(one: Any, other: Any) -> bool:
    """Whether two states of one generator are the same."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        for key, value in one.items():
            is_one = isinstance(value, (Tensor, np.ndarray, dict))
            if not (_are_alike(value, other[key]) if is_one else value == other[key]):
                return False
        return True
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)


def _attributes(value: Any) -> Mapping[Any, Any]:
    """The attributes or entries of an object, by name, key or index; empty if it is too large or has none.

    A container of the user's own class is not iterated, because that may read its data; its attributes are looked at instead.
    """
    if type(value) in (list, tuple, dict):
        if len(value) > _MAX_ENTRIES:
            return {}
        return dict(value if type(value) is dict else enumerate(value))
    try:
        return {name: entry for name, entry in vars(value).items() if name != ITERATOR}
    except TypeError:
        return {}


def _check_numpy_state(state: Mapping[str, Any]) -> None:
    """NumPy accepts any position, and would read beyond its table at the next draw."""
    for table, index, owner in (("key", "pos", state["state"]), ("buffer", "buffer_pos", state)):
        position = owner.get(index, 0)
        if type(position) is not int or not 0 <= position <= len(owner.get(table, ())):
            raise ValueError(f"the state of NumPy's generator has the invalid position {position!r:.40}")
