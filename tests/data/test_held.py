"""What is held while more is read must still be what was read: each kind of container, in each place that reads ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from ignite_train import ForwardOutput, ResumableLoader, Trainer, UpdateOptions, create_evaluator, create_trainer
from ignite_train.data import held as held_module
from ignite_train.data.arriving_group import ArrivingGroup
from ignite_train.data.held import Held
from ranks import run_ranks

NUMBER = 12  # micro-batches
REFUSED = "data must give each micro-batch in a container and memory of its own"


def in_dict() -> Callable[[Tensor], Any]:
    kept: dict[str, Tensor] = {}

    def fill(x: Tensor) -> Any:
        kept["x"] = x
        return kept

    return fill


def in_list() -> Callable[[Tensor], Any]:
    kept = [torch.zeros(1)]

    def fill(x: Tensor) -> Any:
        kept[0] = x
        return kept

    return fill


def in_object() -> Callable[[Tensor], Any]:
    kept = SimpleNamespace(x=None)

    def fill(x: Tensor) -> Any:
        kept.x = x
        return kept

    return fill


def nested() -> Callable[[Tensor], Any]:
    kept: list[Any] = [{"x": None}]

    def fill(x: Tensor) -> Any:
        kept[0]["x"] = x
        return tuple(kept)

    return fill


def set_() -> Callable[[Tensor], Any]:
    kept = torch.zeros(1, 1)

    def fill(x: Tensor) -> Any:
        return kept.set_(x)

    return fill


def data() -> Callable[[Tensor], Any]:
    kept = torch.zeros(1, 1)

    def fill(x: Tensor) -> Any:
        kept.data = x
        return kept

    return fill


def data_copied() -> Callable[[Tensor], Any]:
    kept = torch.zeros(1, 1)

    def fill(x: Tensor) -> Any:
        kept.data.copy_(x)
        return kept

    return fill


def numpy() -> Callable[[Tensor], Any]:
    kept = np.zeros((1, 1), np.float32)

    def fill(x: Tensor) -> Any:
        kept[:] = x.numpy()
        return {"x": torch.from_numpy(kept)}

    return fill


def large_numpy() -> Callable[[Tensor], Any]:
    kept = np.zeros((300, 70), np.float32)

    def fill(x: Tensor) -> Any:
        kept[:] = x.numpy()
        return [kept.T]

    return fill


def number() -> Callable[[Tensor], Any]:
    kept: dict[str, Any] = {"x": 0.0}

    def fill(x: Tensor) -> Any:
        kept["x"] = float(x)
        return kept

    return fill


KINDS: dict[str, Callable[[], Callable[[Tensor], Any]]] = {
    "dict": in_dict,
    "list": in_list,
    "object": in_object,
    "nested": nested,
    "set_": set_,
    "data": data,
    "data.copy_": data_copied,
    "from_numpy": numpy,
    "array": large_numpy,
    "number": number,
}


def value_of(micro_batch: Any) -> float:
    """Whatever it is wrapped in."""
    while not isinstance(micro_batch, (Tensor, np.ndarray, float)):
        if isinstance(micro_batch, SimpleNamespace):
            micro_batch = micro_batch.x
        else:
            micro_batch = micro_batch["x"] if isinstance(micro_batch, dict) else micro_batch[0]
    return float(micro_batch.reshape(-1)[0]) if not isinstance(micro_batch, float) else micro_batch


class Refilling:
    """A loader without a length that fills one of a few containers with each micro-batch."""

    def __init__(self, kind: str, containers: int = 1, number: int = NUMBER) -> None:
        self.fills, self.number = [KINDS[kind]() for _ in range(containers)], number

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.number):
            yield self.fills[index % len(self.fills)](torch.full((1, 1), float(index)))


def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
    x = torch.full((1, 1), value_of(micro_batch))
    return ForwardOutput(model(x).sum() * 1e-3, 1, outputs=x)


def make(steps: Any, **options: Any) -> Trainer:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return create_trainer(model, optimizer, forward, accumulation_steps=steps, protect=False, options=UpdateOptions(**options))


def in_a_group(kind: str) -> None:
    make(2).run(Refilling(kind))


def in_a_later_group(kind: str) -> None:
    make(lambda update: 1 if update < 3 else 2).run(Refilling(kind))


def in_a_ring(kind: str) -> None:
    make(lambda update: 2 if update < 3 else 4).run(Refilling(kind, containers=3))


def in_an_arriving_group(kind: str) -> None:
    source = iter(Refilling(kind))
    list(ArrivingGroup(lambda: next(source), NUMBER, is_sized=False, on_complete=lambda group: None))


def by_a_collate_function(kind: str) -> None:
    fill = KINDS[kind]()
    make(2).run(DataLoader(torch.arange(float(NUMBER)), 1, collate_fn=lambda x: fill(default_collate(x).reshape(1, 1))))


def in_a_thread(kind: str) -> None:
    make(1).run(threaded(kind))


def in_an_evaluation(kind: str) -> None:
    create_evaluator(nn.Linear(1, 1), forward).run(threaded(kind))


def threaded(kind: str) -> ResumableLoader:
    fill = KINDS[kind]()
    return ResumableLoader(
        torch.arange(float(NUMBER)),
        1,
        shuffle=False,
        collate_fn=lambda x: fill(default_collate(x).reshape(1, 1)),
        fetch_in_thread=True,
    )


PLACES = {
    place.__name__: place
    for place in (
        in_a_group,
        in_a_later_group,
        in_a_ring,
        in_an_arriving_group,
        by_a_collate_function,
        in_a_thread,
        in_an_evaluation,
    )
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_container_that_is_filled_again_is_refused(kind: str, place: str) -> None:
    """Without this each group would be trained on its last micro-batch, without a word."""
    with pytest.raises(ValueError, match=REFUSED) as caught:
        PLACES[place](kind)
    assert "yield a new dict, list or object each time, and a copy" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_that_grows_late_is_looked_at(kind: str) -> None:
    """The ring was long enough for all groups before, so that the loader did nothing wrong until then."""
    trainer = make(lambda update: 2 if update < 40 else 4)
    with pytest.raises(ValueError, match=REFUSED):
        trainer.run(Refilling(kind, containers=3, number=120))
    assert trainer.state.iteration == 39  # updates, all of groups of two


def _ahead() -> list[str]:
    messages = []
    for kind in KINDS:
        with pytest.raises(ValueError, match=REFUSED) as caught:
            make(1, reduction="explicit").run(Refilling(kind))
        messages.append(str(caught.value))
    return messages


@pytest.mark.slow
def test_it_is_refused_where_ranks_read_one_ahead() -> None:
    """Each update would train on the micro-batch of the next one."""
    assert all(len(messages) == len(KINDS) for messages in run_ranks(_ahead))


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_taken_where_nothing_is_held(kind: str) -> None:
    """One micro-batch to an update, and a ring that is as long as a group: as in a loop by hand."""
    for steps, containers in ((1, 1), (3, 3)):
        trainer, seen = make(steps), []
        trainer.moments.on_backward.append(lambda output, seen=seen: seen.append(float(output.outputs)))
        trainer.run(Refilling(kind, containers))
        assert seen == [float(index) for index in range(NUMBER)]


def test_what_forward_and_handlers_write_is_their_own() -> None:
    """Only what changes while the loader is read is an error, also where one tensor is given again and again."""

    def write(model: nn.Module, x: Any) -> Tensor:
        x["x"].add_(1)
        x["y"] = x["x"]
        return (model(x["x"]) * 1e-3).sum()

    one = {"x": torch.zeros(1, 1)}
    arriving, model = iter([one] * 6), nn.Linear(1, 1)
    for micro_batch in ArrivingGroup(lambda: next(arriving), 6, is_sized=False, on_complete=lambda group: None):
        write(model, micro_batch)
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), write, accumulation_steps=2)
    trainer.run([one] * 6)
    assert float(one["x"]) == 12.0


def test_micro_batches_of_any_kind_are_looked_at() -> None:
    """Cycles, long lists, values without memory, and what is no container at all."""
    cycle: dict[str, Any] = {"x": torch.zeros(2)}
    cycle["self"] = cycle
    odd = [
        cycle,
        list(range(10**5)),
        None,
        {1, 2},
        object(),
        np.array(["a", None], dtype=object),
        float("nan"),
        np.zeros((0, 3)),
    ]
    odd += [torch.zeros(4, 3)[:, 1], torch.zeros(1).expand(5), np.zeros((4, 4))[::-2, ::-1], nn.Linear(1, 1), iter([])]
    with torch.inference_mode():
        odd.append(torch.ones(2))
    held = Held(odd)
    for _ in range(2):
        held.check()
        for one in odd:
            held.check_against(one)


def test_a_view_into_memory_that_is_written_elsewhere_is_not_refused() -> None:
    """Columns of one array, each written before it is given: nothing that is held changes."""
    columns = np.zeros((50, NUMBER), np.float32)

    class Columns:
        def __iter__(self) -> Iterator[Any]:
            for index in range(NUMBER):
                columns[:, index] = index
                yield torch.from_numpy(columns)[:, index]

    numbers = count()
    trainer = make(4)
    trainer.moments.on_backward.append(lambda output: next(numbers))
    trainer.run(Columns())
    assert next(numbers) == NUMBER


def test_groups_are_looked_at_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first 16 groups of a pass and in each 16th: a loader that gives its memory again does so from the beginning."""
    looks: list[int] = []
    ordinary = held_module._bytes_at
    monkeypatch.setattr(held_module, "_bytes_at", lambda *given: looks.append(trainer.state.iteration) or ordinary(*given))
    model = nn.Linear(3, 1)
    trainer = create_trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).mean(), accumulation_steps=2
    )
    trainer.run((torch.randn(2, 3) for _ in range(140)), max_epochs=1)
    assert sorted({*looks}) == [*range(16), 16, 32, 48, 64]  # what is read before update n + 1


@pytest.mark.parametrize("kind", ["list", "tuple", "torch's collation", "one's own collation", "no collation"])
def test_what_gives_each_micro_batch_once_is_not_looked_at(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list has all of them at the same time, and torch's own collation makes new tensors for each."""
    looks: list[int] = []
    ordinary = held_module._bytes_at
    monkeypatch.setattr(held_module, "_bytes_at", lambda *given: looks.append(1) or ordinary(*given))
    samples = [torch.randn(2, 3) for _ in range(8)]
    loader: Any = {
        "list": samples,
        "tuple": tuple(samples),
        "torch's collation": DataLoader(samples, batch_size=2),
        "one's own collation": DataLoader(samples, batch_size=2, collate_fn=lambda found: torch.stack(found)),
        "no collation": DataLoader(samples, batch_size=None),
    }[kind]
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    create_trainer(model, optimizer, lambda model, x: model(x).mean(), accumulation_steps=2).run(loader, max_epochs=1)
    assert bool(looks) == (kind in ("one's own collation", "no collation"))
