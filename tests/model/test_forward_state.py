"""`forward(model, micro_batch, state)`: which functions get the state, and what it says of the place in the run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cuts
from ignite_train import ForwardOutput, NonFiniteError, TrainEvents, UpdateOptions, create_evaluator, create_trainer
from ranks import run_ranks
from setups import Batch, Setup, summed_loss

Build = Callable[..., Setup]
Place = tuple[int | None, int | None, float | None]


def place_of(state: Any) -> Place:
    return state.micro_batch_in_group, state.group_size, state.progress


class Looking:
    """A forward that notes where it is."""

    def __init__(self) -> None:
        self.places: list[Place] = []

    def __call__(self, model: nn.Module, micro_batch: Batch, state: Any) -> ForwardOutput:
        self.places.append(place_of(state))
        return summed_loss(model, micro_batch)

    def method(self, model: nn.Module, micro_batch: Batch, state: Any) -> ForwardOutput:
        return self(model, micro_batch, state)


@pytest.mark.parametrize("kind", ["object", "method", "function", "partial"])
def test_forward_knows_its_place(build: Build, micro_batches: list[Batch], kind: str) -> None:
    """Five micro-batches in groups of two, two epochs: index, size of the group, and the updates before over all of them."""
    looking = Looking()
    forward: Any = {
        "object": looking,
        "method": looking.method,
        "function": lambda model, micro_batch, state: looking(model, micro_batch, state),
        "partial": functools.partial(lambda look, model, micro_batch, state: look(model, micro_batch, state), looking),
    }[kind]
    trainer = build(forward, accumulation_steps=2).trainer
    ready: list[Place] = []
    trainer.add_event_handler(TrainEvents.GRADIENTS_READY, lambda: ready.append(place_of(trainer.state)))
    trainer.run(micro_batches, max_epochs=2)

    indices, sizes, updates = [0, 1, 0, 1, 0], [2, 2, 2, 2, 1], [0, 0, 1, 1, 2]
    expected = [
        (index, size, pytest.approx((update + 3 * epoch) / 6))
        for epoch in range(2)
        for index, size, update in zip(indices, sizes, updates, strict=True)
    ]
    assert looking.places == expected
    assert [index for index, _, _ in ready] == [None] * 6
    assert [size for _, size, _ in ready] == [2, 2, 1] * 2


def test_progress_counts_updates_where_they_are_the_limit(build: Build, micro_batches: list[Batch]) -> None:
    """Of `max_iters`; it is None without a limit, and the place in the group is that of the list that `update` was given."""
    looking = Looking()
    trainer = build(looking).trainer
    trainer.run(micro_batches, max_iters=8)
    assert [progress for _, _, progress in looking.places] == [update / 8 for update in range(8)]

    looking = Looking()
    trainer = build(looking).trainer
    with trainer.session():
        trainer.update(micro_batches[:2])
    with trainer.session(max_iters=4):
        trainer.update(micro_batches[2:3])
    assert looking.places == [(0, 2, None), (1, 2, None), (0, 1, 0.25)]


@pytest.mark.slow
def test_a_resumed_run_goes_through_the_same_places(build: Build, micro_batches: list[Batch]) -> None:
    """Stopped in the middle of an epoch, and continued by another trainer."""
    whole, parts = Looking(), Looking()
    build(whole, accumulation_steps=2).trainer.run(micro_batches, max_epochs=2)
    first = build(parts, accumulation_steps=2).trainer
    first.add_event_handler(TrainEvents.STEP_COMPLETED(once=4), first.terminate)
    first.run(micro_batches, max_epochs=2)
    second = build(parts, accumulation_steps=2).trainer
    second.load_state_dict(first.state_dict())
    second.data.load_position(first.data.position())
    second.run(micro_batches)
    assert parts.places == whole.places


def test_a_default_or_a_partial_is_no_state(build: Build, micro_batches: list[Batch]) -> None:
    """Such a parameter keeps the value that the user gave it."""
    seen: list[Any] = []

    def with_default(model: nn.Module, micro_batch: Batch, weight: Any = 2.0) -> ForwardOutput:
        seen.append(weight)
        return summed_loss(model, micro_batch)

    def required(model: nn.Module, micro_batch: Batch, weight: Any) -> ForwardOutput:
        return with_default(model, micro_batch, weight)

    def among_more(model: nn.Module, micro_batch: Batch, *more: Any, **named: Any) -> ForwardOutput:
        return with_default(model, micro_batch, (more, named))

    for forward in (with_default, functools.partial(required, weight=3.0), among_more):
        build(forward).trainer.run(micro_batches[:1])
        create_evaluator(nn.Linear(4, 1), forward).run(micro_batches[:1])
    assert seen == [2.0, 2.0, 3.0, 3.0, ((), {}), ((), {})]


def test_other_parameters_are_refused(build: Build) -> None:
    """Four of them, or one that has to be named."""

    def of_four(model: Any, micro_batch: Any, state: Any, more: Any) -> Any: ...
    def named(model: Any, micro_batch: Any, *, state: Any) -> Any: ...

    for forward in (of_four, named):
        with pytest.raises(TypeError, match=r"forward\(model, micro_batch\) or forward\(model, micro_batch, state\), got one"):
            build(forward)


def test_an_evaluator_passes_its_own_state(build: Build, micro_batches: list[Batch]) -> None:
    """A new one in each run; a micro-batch is alone in its group."""
    states: list[Any] = []

    def forward(model: nn.Module, micro_batch: Batch, state: Any) -> ForwardOutput:
        states.append(state)
        return summed_loss(model, micro_batch)

    setup = build(forward)
    evaluator = create_evaluator(setup.model, forward)
    setup.trainer.run(micro_batches[:1])
    first, second = evaluator.run(micro_batches[:1]), evaluator.run(micro_batches[:1])
    assert all(state is known for state, known in zip(states, (setup.trainer.state, first, second), strict=True))
    assert place_of(second) == (0, 1, None)


def test_the_search_for_a_nan_sees_the_same_places(build: Build, micro_batches: list[Batch]) -> None:
    """What is run again is at the same place in its group."""
    looking = Looking()
    trainer = build(looking, accumulation_steps=3).trainer
    bad = (torch.full((2, 4), torch.nan), torch.zeros(2, 1))
    with pytest.raises(NonFiniteError, match="micro-batch 3 of 3"):
        trainer.run([*micro_batches[:2], bad], max_epochs=1)
    assert looking.places == [(0, 3, 0.0), (1, 3, 0.0), (2, 3, 0.0)] * 2
    assert trainer.state.micro_batch_in_group is None


def test_both_halves_of_a_split_micro_batch_have_its_place(build: Build, micro_batches: list[Batch]) -> None:
    """The second micro-batch does not fit; its halves are both the second."""
    looking = Looking()

    def forward(model: nn.Module, micro_batch: Batch, state: Any) -> ForwardOutput:
        if len(micro_batch[1]) > 3:
            raise torch.OutOfMemoryError
        return looking(model, micro_batch, state)

    build(forward, accumulation_steps=2, on_out_of_memory="split").trainer.run(micro_batches[1:3], max_epochs=1)
    assert [place[:2] for place in looking.places] == [(0, 2), (1, 2), (1, 2)]


def look_on_ranks() -> list[tuple[int | None, int | None]]:
    """The places of this rank, which has 2 or 0 micro-batches in its second group, and placeholders instead."""
    places: list[tuple[int | None, int | None]] = []

    def forward(model: nn.Module, micro_batch: cuts.Sample, state: Any) -> ForwardOutput:
        places.append((state.micro_batch_in_group, state.group_size))
        return cuts.forward(model, micro_batch)

    model = DistributedDataParallel(cuts.linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = UpdateOptions(uneven="replay")
    trainer = create_trainer(model, optimizer, forward, accumulation_steps=2, options=options)
    trainer.run(cuts.shard([[2] * 4, [2] * 2]), max_epochs=1)
    return places


@pytest.mark.slow
def test_a_placeholder_has_no_place_in_the_group() -> None:
    """Its index is None, so that a forward which caches by index can tell."""
    both = [(0, 2), (1, 2)]
    assert run_ranks(look_on_ranks) == [both * 2, [*both, (None, 0), (None, 0)]]


def anneal(progress: float | None) -> float:
    """A weight that grows over the first half of training; full in an evaluation."""
    return 1.0 if progress is None else min(1.0, 2 * progress)


def test_a_schedule_inside_the_loss_is_the_loop_by_hand(build: Build, micro_batches: list[Batch]) -> None:
    """An annealed penalty, as in a β-VAE, against the loop that counts itself; bitwise where sizes are powers of two."""
    data = [micro_batches[2]] * 4

    def penalty(model: nn.Module) -> Tensor:
        return sum((p.square().sum() for p in model.parameters()), torch.zeros(()))

    def forward(model: nn.Module, micro_batch: Batch, state: Any) -> ForwardOutput:
        output = summed_loss(model, micro_batch)
        return output._replace(loss=output.loss + anneal(state.progress) * output.sample_size * penalty(model))

    ours, hand = build(forward), build()
    ours.trainer.run(data, max_epochs=1)
    for update, batch in enumerate(data):
        hand.optimizer.zero_grad()
        output = summed_loss(hand.model, batch)
        ((output.loss + anneal(update / 4) * 4 * penalty(hand.model)) / 4).backward()
        hand.optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(ours.model.parameters(), hand.model.parameters(), strict=True))
    assert idist.get_world_size() == 1
