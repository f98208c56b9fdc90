"""Micro-batches of all kinds are moved whole, or named; and cut in two, with everything that belongs to a sample."""

from __future__ import annotations

import logging
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ignite_train import ForwardOutput, UpdateOptions, create_trainer
from ignite_train.device.leaves import leaves, map_leaves
from ignite_train.device.to_device import ToDevice, moves_itself

META, CPU = torch.device("meta"), torch.device("cpu")


@dataclass
class Batch:
    """With what a constructor must not be called for again."""

    x: Tensor
    y: Tensor
    name: str = "batch"
    made: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.made += 1


@dataclass(frozen=True, slots=True)
class Frozen:
    """Can be changed neither by assignment nor through its `__dict__`."""

    x: Tensor
    y: Any


class Encoded(UserDict[str, Any]):
    """As tokenizers give it: tensors by name, an object for each sample beside them, and a `to` that moves them in place."""

    def __init__(self, data: dict[str, Any], encodings: list[Any] | None = None) -> None:
        super().__init__(data)
        self.encodings = encodings

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Encoded:
        self.data = {name: value.to(device, non_blocking=non_blocking) for name, value in self.data.items()}
        return self


class Table:
    """Columns of one length, which are cut together, as those of `TensorDict` are."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, rows: slice) -> Table:
        return Table(**{name: column[rows] for name, column in self.columns.items()})

    def to(self, device: torch.device) -> Table:
        return Table(**{name: column.to(device) for name, column in self.columns.items()})


class Graphs:
    """Graphs that are joined to one, with the protocol of PyTorch Geometric: nodes of all of them, and whose each is."""

    def __init__(self, x: Tensor, owner: Tensor) -> None:
        self.x, self.owner = x, owner

    @property
    def num_graphs(self) -> int:
        return int(self.owner.max()) + 1

    def to_data_list(self) -> list[Tensor]:
        return [self.x[self.owner == number] for number in range(self.num_graphs)]

    @classmethod
    def from_data_list(cls, graphs: list[Tensor]) -> Graphs:
        return cls(torch.cat(graphs), torch.cat([torch.full((len(one),), number) for number, one in enumerate(graphs)]))

    def to(self, _device: torch.device) -> Graphs:
        return self


class Opaque:
    """Holds tensors in a way that nothing can know."""

    def __init__(self, x: Tensor) -> None:
        self.parts = {"x": [x]}


class Pair(NamedTuple):
    """A tensor and something else."""

    x: Tensor
    rest: Any


def test_containers_are_moved_and_keep_their_class() -> None:
    """A `UserDict`, dataclasses and a namespace, in each other; constructors are not called again."""
    batch = {
        "user": UserDict(x=torch.ones(2), deep=UserDict(y=[torch.ones(2)])),
        "class": Batch(torch.ones(2), torch.ones(3)),
        "frozen": Frozen(torch.ones(2), Pair(torch.ones(2), Batch(torch.ones(1), torch.ones(1)))),
        "space": SimpleNamespace(x=torch.ones(2), n=3),
    }
    moved = ToDevice(META)(batch)
    tensors = [leaf for leaf in leaves(moved) if isinstance(leaf, Tensor)]
    assert [leaf.device for leaf in tensors] == [META] * 9
    assert all(leaf.device == CPU for leaf in leaves(batch) if isinstance(leaf, Tensor))
    assert {name: type(one) for name, one in moved.items()} == {name: type(one) for name, one in batch.items()}
    assert type(moved["user"]["deep"]) is UserDict
    assert (moved["class"].name, moved["class"].made, moved["space"].n) == ("batch", 1, 3)
    assert type(moved["frozen"].y.rest) is Batch


def test_what_has_nothing_to_move_is_the_same_object() -> None:
    settings = Batch("no tensor", None)  # type: ignore[arg-type]
    assert ToDevice(META)([settings])[0] is settings


def test_what_is_not_moved_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """By its class, and only where it holds tensors."""
    mover = ToDevice(META)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            mover({"a": Opaque(torch.ones(2)), "b": MappingProxyType({"x": torch.ones(2)}), "c": SimpleNamespace(), "d": len})
    assert [record.message.partition(" whose")[0] for record in caplog.records] == [
        "the micro-batch holds a Opaque",
        "the micro-batch holds a mappingproxy",
    ]
    assert "to(device)" in caplog.text


def test_a_dataclass_with_its_own_to_is_asked(caplog: pytest.LogCaptureFixture) -> None:
    @dataclass
    class Asked(Batch):
        def to(self, device: torch.device) -> str:
            return f"moved to {device}"

    assert ToDevice(META)(SimpleNamespace(x=Asked(torch.ones(1), torch.ones(1)))).x == "moved to meta"
    assert not caplog.records


def test_leaves_are_in_the_order_of_the_walk() -> None:
    batch = [SimpleNamespace(x=1, y={"z": 2}), Batch(3, 4), UserDict(a=5)]  # type: ignore[arg-type]
    assert [leaf for leaf in leaves(batch) if isinstance(leaf, int)] == [1, 2, 3, 4, 1, 5]
    assert map_leaves(str, batch, whole=moves_itself)[2]["a"] == "5"


ROWS, TARGETS = torch.randn(6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64), torch.arange(6.0).double()


def graphs() -> Graphs:
    """The row of a sample stands once for each node of its graph."""
    owner = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4, 5, 5])
    return Graphs(ROWS[owner], owner)


def samples_of(batch: Any) -> list[tuple[list[float], float, str]]:
    """The rows, targets and names of a micro-batch, as a forward reads them."""
    if isinstance(batch, tuple):  # a graph beside its targets
        return [([*one[0]], float(target), "") for one, target in zip(batch[0].to_data_list(), batch[1], strict=True)]
    if isinstance(batch, Table):
        return [([*row], float(target), "") for row, target in zip(batch.columns["x"], batch.columns["y"], strict=True)]
    get = batch.get if isinstance(batch, (dict, UserDict)) else lambda name, default=None: getattr(batch, name, default)
    names = get("names") or getattr(batch, "encodings", None) or [""] * len(get("x"))
    return [([*row], float(target), str(name)) for row, target, name in zip(get("x"), get("y"), names, strict=True)]


NAMES = [*"abcdef"]
KINDS: dict[str, Callable[[], Any]] = {
    "dict with names": lambda: {"x": ROWS, "y": TARGETS.numpy(), "names": NAMES, "shape": [6, 6], "of": "six"},
    "UserDict": lambda: UserDict(x=ROWS, y=TARGETS),
    "UserDict with a to": lambda: Encoded({"x": ROWS, "y": TARGETS}, NAMES),
    "dataclass": lambda: Frozen(ROWS, TARGETS),
    "namespace": lambda: SimpleNamespace(x=ROWS, y=TARGETS, names=NAMES),
    "table": lambda: Table(x=ROWS, y=TARGETS),
    "graphs": lambda: (graphs(), TARGETS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_halves_have_what_belongs_to_their_samples(kind: str) -> None:
    """Micro-batches that fit in two samples at most: each sample meets its own target and name, and the update is the same."""
    runs = []
    for fits in (6, 2):
        torch.manual_seed(0)
        model = nn.Linear(3, 1, dtype=torch.float64)
        seen: list[tuple[list[float], float, str]] = []

        def forward(model: nn.Module, batch: Any, fits: int = fits, seen: Any = seen) -> ForwardOutput:
            found = samples_of(batch)
            if len(found) > fits:
                raise torch.OutOfMemoryError("no room")
            seen += [(row, target, name) for row, target, name in found]
            x, y = torch.stack([torch.stack(row) for row, _, _ in found]), torch.tensor([y for _, y, _ in found])
            return ForwardOutput((model(x)[:, 0] - y).square().sum(), len(found))

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = UpdateOptions(on_out_of_memory="split")
        create_trainer(model, optimizer, forward, options=options).run([KINDS[kind]()], max_epochs=1)
        runs.append((seen, model.weight.detach()))
    (whole, expected), (cut, found) = runs
    assert [(name, target) for _, target, name in cut] == [(name, target) for _, target, name in whole]
    assert all(torch.equal(torch.stack(one[0]), torch.stack(two[0])) for one, two in zip(cut, whole, strict=True))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)


def test_numbers_in_a_list_are_no_samples() -> None:
    """A list of as many numbers as there are samples may be a shape; arrays and strings of that length are cut."""
    shapes = []

    def forward(model: nn.Module, batch: dict[str, Any]) -> ForwardOutput:
        if len(batch["x"]) > 1:
            raise torch.OutOfMemoryError("no room")
        shapes.append((batch["shape"], batch["names"], batch["ids"].tolist()))
        return ForwardOutput(model(batch["x"]).sum(), 1)

    batch = {"x": torch.ones(2, 3), "shape": [7, 9], "names": ["a", "b"], "ids": np.arange(2)}
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    create_trainer(model, optimizer, forward, options=UpdateOptions(on_out_of_memory="split")).run([batch], max_epochs=1)
    assert shapes == [([7, 9], ["a"], [0]), ([7, 9], ["b"], [1])]
