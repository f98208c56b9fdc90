"""`drop_last_group`: an epoch has whole groups only, alone and over ranks, with and without a length, also when it resumes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import cuts
from bits import bit_by_bit
from ignite_train import TrainEvents, UpdateOptions, create_trainer
from ignite_train.handlers import Checkpoint
from ranks import run_ranks
from setups import Batch, Setup

Build = Callable[..., Setup]


def dropped(build: Build, *forward: Any, **settings: Any) -> Setup:
    return build(*forward, drop_last_group=True, **settings)


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize(("steps", "used"), [(2, 4), (3, 3), (5, 5), ([1, 2], 5)], ids=["2", "3", "5", "by epoch"])
def test_what_is_no_whole_group_is_left_out(
    build: Build, micro_batches: list[Batch], steps: Any, used: int, sized: bool
) -> None:
    """Two epochs are bitwise those of a loader without the rest."""
    ours, whole = dropped(build, accumulation_steps=steps), build(accumulation_steps=steps)
    last = 4 if steps == [1, 2] else used
    loader = micro_batches if sized else cuts.Unsized(micro_batches)
    ours.trainer.run(loader, max_epochs=2)  # type: ignore[arg-type]
    whole.trainer.run(micro_batches[:used], max_epochs=1)
    whole.trainer.run(micro_batches[:last], max_epochs=2)
    assert bit_by_bit(ours.model.state_dict()) == bit_by_bit(whole.model.state_dict())
    assert ours.trainer.state.num_micro_batches == used + last
    assert ours.trainer.state.epoch_length == whole.trainer.state.epoch_length


class Unknown(IterableDataset[Any]):
    """Five samples, of which nothing says how many they are."""

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.ones(5, 2, 4))


@pytest.mark.slow
def test_workers_that_still_read_the_last_group_do_not_show_it(build: Build) -> None:
    """A group of micro-batches that workers prepare is otherwise begun before it is known to be whole."""
    setup = dropped(build, lambda model, x: (model(x[0]).sum(), 1.0), accumulation_steps=2)
    state = setup.trainer.run(DataLoader(Unknown(), batch_size=1, num_workers=1), max_epochs=2)
    assert (state.iteration, state.num_micro_batches) == (4, 8)


def test_the_loader_is_read_to_its_end(build: Build) -> None:
    """So that it draws what it draws without the option, and says nothing of its length."""
    setup = dropped(build, accumulation_steps=2)
    read: list[int] = []

    class Noting(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return super().__getitem__(index)

    loader = DataLoader(Noting(torch.randn(5, 4), torch.randn(5, 1)), batch_size=1, shuffle=True)
    setup.trainer.run(loader, max_epochs=3)
    assert [sorted(read[epoch * 5 : epoch * 5 + 5]) for epoch in range(3)] == [[0, 1, 2, 3, 4]] * 3
    assert (setup.trainer.state.iteration, len(read)) == (6, 15)


@pytest.mark.parametrize("number", [5, 1])
@pytest.mark.parametrize("sized", [True, False])
def test_no_whole_group_at_all_is_an_error(build: Build, micro_batches: list[Batch], sized: bool, number: int) -> None:
    """An epoch without an update would never end."""
    loader = micro_batches[:number] if sized else cuts.Unsized(micro_batches[:number])
    with pytest.raises(ValueError, match=rf"must have a whole group in each epoch .* got {number} .* asks for 6"):
        dropped(build, accumulation_steps=6).trainer.run(loader)  # type: ignore[arg-type]


@pytest.mark.parametrize("sized", [True, False])
def test_no_data_at_all_is_another_error(build: Build, sized: bool) -> None:
    """Another number of micro-batches to an update would not help."""
    with pytest.raises(ValueError, match="data must give at least one micro-batch"):
        dropped(build, accumulation_steps=2).trainer.run([] if sized else cuts.Unsized([]))  # type: ignore[arg-type]


def _without_a_whole_group() -> list[str]:
    found = []
    for sized in (True, False):
        for uneven, numbers in (("all", (0, 2)), ("all", (2, 1)), ("shortest", (5, 2)), ("shortest", (5, 0))):
            own = [(torch.randn(2, 4), torch.randn(2, 1))] * numbers[idist.get_rank()]
            options = UpdateOptions(drop_last_group=True, uneven=uneven, reduction="explicit")  # type: ignore[arg-type]
            model = torch.nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            trainer = create_trainer(
                model,
                optimizer,
                lambda model, batch: model(batch[0]).mean(),
                accumulation_steps=3,
                options=options,
                protect=False,
            )
            with pytest.raises(ValueError, match="data must") as caught:
                trainer.run(own if sized else cuts.Unsized(own))
            found.append(str(caught.value))
    return found


@pytest.mark.slow
def test_ranks_without_a_whole_group_say_so() -> None:
    """They have data, so that it would be wrong to say that none of them has; only with "shortest" one rank may have none."""
    first, second = run_ranks(_without_a_whole_group)
    assert first == second
    for message, number in zip([*first[:3], *first[4:7]], [2, 2, 2] * 2, strict=True):
        assert f"must have a whole group in each epoch for drop_last_group=True, got {number} micro-batches" in message
    assert all("on every rank for uneven='shortest', got none" in message for message in first[3::4])


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_run_that_resumes_drops_the_same(build: Build, micro_batches: list[Batch], tmp_path: Path, stop: int) -> None:
    """Stopped in the middle or after the last whole group of an epoch."""
    loader = DataLoader(TensorDataset(torch.randn(5, 4), torch.randn(5, 1)), batch_size=1, shuffle=True)
    torch.manual_seed(5)
    whole = dropped(build, accumulation_steps=2)
    whole.trainer.run(loader, max_epochs=3)
    torch.manual_seed(5)
    first = dropped(build, accumulation_steps=2)
    Checkpoint(tmp_path, every=1).attach(first.trainer)

    @first.trainer.on(TrainEvents.STEP_COMPLETED(once=stop + 1))
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        first.trainer.run(loader, max_epochs=3)
    torch.manual_seed(6)
    second = dropped(build, accumulation_steps=2)
    Checkpoint(tmp_path, every=1).attach(second.trainer)
    second.trainer.run(loader, max_epochs=3)
    assert second.trainer.state.iteration == whole.trainer.state.iteration == 6
    assert bit_by_bit(second.model.state_dict()) == bit_by_bit(whole.model.state_dict())


def on_ranks(sized: bool, uneven: str) -> tuple[int, int, float]:
    """Updates, micro-batches of this rank, and Σsample_size of the last update, after two epochs."""
    options = UpdateOptions(reduction="explicit", uneven=uneven, drop_last_group=True)  # type: ignore[arg-type]
    model = cuts.linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = create_trainer(model, optimizer, cuts.forward, accumulation_steps=2, options=options)
    data = cuts.shard([[1] * 5, [1] * 3])
    state = trainer.run(data if sized else cuts.Unsized(data), max_epochs=2)  # type: ignore[arg-type]
    assert idist.get_world_size() == 2
    assert state.update_output is not None
    return state.iteration, state.num_micro_batches, state.update_output.num_micro_batches


def more_than_announced() -> tuple[int, int]:
    """Rank 0 says 3 micro-batches and gives 6, rank 1 says 5 and gives them."""

    class Lying(list[Any]):
        def __len__(self) -> int:
            return 3

    model = cuts.linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = UpdateOptions(reduction="explicit", drop_last_group=True)
    trainer = create_trainer(model, optimizer, cuts.forward, accumulation_steps=2, options=options)
    data = cuts.shard([[1] * 6, [1] * 5])
    if idist.get_rank() == 1:
        state = trainer.run(data, max_epochs=1)
    else:
        with pytest.warns(UserWarning, match=r"the loader has len\(\) 3 and gave more micro-batches"):
            state = trainer.run(Lying(data), max_epochs=1)
    return state.iteration, state.num_micro_batches


@pytest.mark.slow
def test_a_loader_that_gives_more_than_it_said_is_warned_about() -> None:
    """And what it gave beyond that is left out."""
    assert run_ranks(more_than_announced) == [(2, 3), (2, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("uneven", ["all", "shortest"])
@pytest.mark.parametrize("sized", [True, False])
def test_ranks_drop_the_same_group(sized: bool, uneven: str) -> None:
    """5 and 3 micro-batches in groups of 2: two groups in which some rank is whole, or one in which all are."""
    expected = [(4, 8, 3), (4, 6, 3)] if uneven == "all" else [(2, 4, 4), (2, 4, 4)]
    assert run_ranks(on_ranks, sized, uneven) == expected
