"""What forward carries from micro-batch to micro-batch: saved, resumed, and taken back with what does not count."""

from __future__ import annotations

import gc
import math
import os
import signal
import weakref
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from bits import bit_by_bit
from ignite_train import (
    CheckpointError,
    ForwardOutput,
    NonFiniteError,
    ResumableLoader,
    StaticLossScaling,
    TrainEvents,
    UpdateOptions,
    create_evaluator,
    create_trainer,
)
from ignite_train.checkpoint.reader import CheckpointReader
from ignite_train.checkpoint.run_state import RunState
from ignite_train.checkpoint.saved_run import SavedRun
from ignite_train.handlers import Checkpoint
from ignite_train.state import Carried
from ranks import RanksFailedError, run_ranks
from update_options import with_options

# --- a recurrent network whose hidden state is carried from segment to segment -----------------------------------------------


class Recurrent(nn.Module):
    """A small recurrent network and its head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.RNN(3, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        out, hidden = self.rnn(x, hidden)
        return self.head(out), hidden


def segments(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Seven segments of a long sequence, in their order; each rank has a sequence of its own."""
    generator = torch.Generator().manual_seed(1 + rank)
    return [(torch.randn(4, 2, 3, generator=generator), torch.randn(4, 2, 1, generator=generator)) for _ in range(7)]


def truncated_bptt(directory: Path, killed_at: int) -> dict[str, Any]:
    """Two epochs on each rank; all ranks are killed in update `killed_at`, unless that is 0."""
    rank = idist.get_rank()
    model = Recurrent()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

    def forward(model: nn.Module, micro_batch: tuple[Tensor, Tensor]) -> ForwardOutput:
        x, y = micro_batch
        carried = trainer.state.carried
        predicted, hidden = model(x, carried.get("hidden"))
        carried["hidden"] = hidden
        return ForwardOutput(mse_loss(predicted, y, reduction="sum"), y.numel())

    reduction = "explicit" if idist.get_world_size() > 1 else "auto"
    trainer = create_trainer(model, optimizer, forward, accumulation_steps=2, options=UpdateOptions(reduction=reduction))

    def kill() -> None:
        if trainer.state.iteration == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.add_event_handler(TrainEvents.BACKWARD_COMPLETED, kill)
    trainer.add_event_handler(Events.EPOCH_STARTED, trainer.state.carried.clear)  # each epoch is a new sequence
    Checkpoint(directory, every=1, asynchronous=False).attach(trainer)
    trainer.run(segments(rank), max_epochs=2)
    return bit_by_bit([model.state_dict(), optimizer.state_dict(), trainer.state.carried["hidden"], trainer.state.output.loss])


@pytest.mark.slow
@pytest.mark.parametrize("killed_at", [3, 6])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_killed_recurrent_network_goes_on_bitwise(world_size: int, killed_at: int, tmp_path: Path) -> None:
    """Killed in the middle of an epoch and started again, its weights, moments, loss and hidden state are the same bits."""
    expected = run_ranks(truncated_bptt, tmp_path / "undisturbed", 0, world_size=world_size)
    with pytest.raises(RanksFailedError, match="died without a word"):
        run_ranks(truncated_bptt, tmp_path / "killed", killed_at, world_size=world_size)
    assert run_ranks(truncated_bptt, tmp_path / "killed", 0, world_size=world_size) == expected


@pytest.mark.slow
def test_ranks_carry_their_own(tmp_path: Path) -> None:
    """Two ranks on two sequences end with two hidden states and one model."""
    first, second = run_ranks(truncated_bptt, tmp_path, 0)
    assert first[0] == second[0]
    assert first[2] != second[2]


# --- another number of ranks ------------------------------------------------------------------------------------------------


def counting(directory: Path, updates: int, carries_on: int) -> Any:
    """Rank `carries_on` alone carries something."""
    model = nn.Linear(1, 1)

    def forward(model: nn.Module, micro_batch: Tensor) -> ForwardOutput:
        if idist.get_rank() == carries_on:
            trainer.state.carried["seen"] = trainer.state.carried.get("seen", 0) + 1
        return ForwardOutput(model(micro_batch).sum(), len(micro_batch))

    trainer = create_trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        forward,
        options=UpdateOptions(reduction="explicit" if idist.get_world_size() > 1 else "auto"),
    )
    Checkpoint(directory, every=1).attach(trainer)
    try:
        trainer.run(ResumableLoader(torch.ones(16, 1), 2, shuffle=False), max_iters=updates)
    except CheckpointError as error:
        return str(error)
    return trainer.state.iteration, dict(trainer.state.carried)


@pytest.mark.slow
@pytest.mark.parametrize("carries_on", [0, 1])
def test_another_number_of_ranks_is_refused(carries_on: int, tmp_path: Path) -> None:
    """In one line that names the key and the way out, on whichever of the ranks something was carried."""
    run_ranks(counting, tmp_path, 2, carries_on)
    (message,) = run_ranks(counting, tmp_path, 4, carries_on, world_size=1)
    assert "'seen' in state.carried" in message
    assert 'leave_out=("carried",)' in message
    assert "\n" not in message


@pytest.mark.slow
def test_another_number_of_ranks_is_taken_where_nothing_is_carried(tmp_path: Path) -> None:
    """Nothing is lost then."""
    run_ranks(counting, tmp_path, 2, -1)
    assert run_ranks(counting, tmp_path, 4, -1, world_size=1) == [(4, {})]


def without_carried(directory: Path) -> tuple[Any, list[str]]:
    model = nn.Linear(1, 1)
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).sum())
    trainer.state.carried["seen"] = 7
    path = max(path for path in directory.iterdir() if path.name.startswith("update-"))
    run = SavedRun(trainer, leave_out=["carried"])
    run.begin()
    with CheckpointReader(path) as stored:
        state = RunState(stored, run)
        state.restore()
    return dict(trainer.state.carried), state.unused


@pytest.mark.slow
def test_carried_values_can_be_dropped(tmp_path: Path) -> None:
    """If so asked the run begins without them, and says that they are not used."""
    run_ranks(counting, tmp_path, 2, 1)
    run_ranks(counting, tmp_path / "alone", 2, 0, world_size=1)
    assert without_carried(tmp_path / "alone") == ({}, ["state.carried"])
    assert without_carried(tmp_path)[0] == {}


# --- what does not count is taken back ------------------------------------------------------------------------------------


class Journal:
    """A trainer whose forward writes down what it finds carried, and changes that in every way there is."""

    def __init__(self, **arguments: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(1, 1)
        self.found: list[Any] = []
        self.trouble: dict[int, Any] = {}  # by the number of the call: what happens in it
        self.calls = 0
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.trainer = create_trainer(self.model, optimizer, self.forward, accumulation_steps=2, **with_options(**arguments))
        self.trainer.state.carried.update(queue=torch.zeros(3), hidden=[torch.zeros(1), {"n": 0}])

    def forward(self, model: nn.Module, micro_batch: Tensor) -> ForwardOutput:
        carried = self.trainer.state.carried
        self.calls += 1
        self.found.append((carried["queue"].tolist(), carried["hidden"][0].item(), carried["hidden"][1]["n"]))
        predicted = model(micro_batch)
        carried["queue"][carried["hidden"][1]["n"] % 3] += micro_batch[0, 0].item()  # in place
        carried["hidden"][1]["n"] += 1  # in place, inside
        carried["hidden"] = [carried["hidden"][0] * 0.5 + predicted.mean(), carried["hidden"][1]]
        trouble = self.trouble.get(self.calls)
        if isinstance(trouble, Exception):
            raise trouble
        loss = predicted.sum() * (1.0 if trouble is None else trouble)
        return ForwardOutput(loss, 0 if trouble == 0 else len(micro_batch))

    def state(self) -> Any:
        return bit_by_bit(dict(self.trainer.state.carried))

    def saved(self) -> Any:
        return bit_by_bit(self.trainer.state_dict()["carried"]["values"])


DATA = [torch.full((2, 1), float(number)) for number in range(1, 9)]


def test_an_exception_takes_back_what_its_update_carried() -> None:
    """The update that broke off is run again on the values from before it, and the end is that of an undisturbed run."""
    undisturbed, broken = Journal(), Journal()
    undisturbed.trainer.run(DATA)
    broken.trouble = {4: ValueError("boom")}
    with pytest.raises(ValueError, match="boom"):
        broken.trainer.run(DATA)
    broken.trouble = {}
    broken.trainer.run(DATA)
    assert broken.state() == undisturbed.state()
    assert broken.found == [*undisturbed.found[:4], *undisturbed.found[2:]]


@pytest.mark.parametrize("event", [TrainEvents.FORWARD_COMPLETED, TrainEvents.BACKWARD_COMPLETED, TrainEvents.GRADIENTS_READY])
def test_state_saved_within_an_update_is_that_before_it(event: TrainEvents) -> None:
    """It goes together with the counters, which do not count that update yet."""
    journal, saved = Journal(), []
    before: list[Any] = []
    journal.trainer.add_event_handler(Events.ITERATION_STARTED, lambda: before.append(journal.state()))
    journal.trainer.add_event_handler(event, lambda: saved.append(journal.saved()))
    journal.trainer.run(DATA)
    assert [entry for entry in before for _ in range(len(saved) // 4)] == saved


@pytest.mark.parametrize("event", [TrainEvents.STEP_COMPLETED, Events.ITERATION_COMPLETED])
def test_state_saved_after_the_step_is_that_after_it(event: Any) -> None:
    """It goes together with the counters, which count that update."""
    journal, saved, now = Journal(), [], []
    journal.trainer.add_event_handler(event, lambda: now.append(journal.state()))
    journal.trainer.add_event_handler(event, lambda: saved.append(journal.saved()))
    journal.trainer.run(DATA)
    assert saved == now
    assert saved[0] != saved[1]


@pytest.mark.parametrize("scaled", [False, True], ids=["nonfinite", "overflow"])
def test_a_skipped_update_carries_nothing_on(scaled: bool) -> None:
    """What a NaN has left is taken back, so that the next update is finite; only the bad one is skipped."""
    arguments: dict[str, Any] = {"loss_scaling": StaticLossScaling(4.0)} if scaled else {"on_nonfinite": "skip"}
    journal = Journal(**arguments)
    journal.trouble = {4: math.nan}
    journal.trainer.run(DATA)
    assert (journal.trainer.state.num_steps, journal.trainer.state.num_skipped) == (3, 1)
    assert journal.found[4] == journal.found[2]
    assert journal.trainer.state.carried["hidden"][1]["n"] == 6


def test_an_update_without_samples_carries_on() -> None:
    """Micro-batches of weight zero can warm a hidden state up."""
    journal = Journal()
    journal.trouble = {3: 0, 4: 0}
    journal.trainer.run(DATA)
    assert journal.trainer.state.num_skipped == 1
    assert [found[2] for found in journal.found] == list(range(8))


def test_a_search_for_the_cause_runs_on_the_same_values() -> None:
    """The search finds carried what the update found, and leaves what was there before it."""
    journal = Journal()
    journal.trouble = {4: math.nan, 6: math.nan}
    with pytest.raises(NonFiniteError):
        journal.trainer.run(DATA)
    assert journal.found[4:6] == journal.found[2:4]
    assert journal.trainer.state.carried["hidden"][1]["n"] == 2


@pytest.mark.parametrize("policy", ["skip", "split"])
def test_a_lack_of_memory_takes_back_what_was_carried(policy: Any) -> None:
    """The next micro-batch, or the first half of this one, finds what the one that did not fit found."""
    journal = Journal(on_out_of_memory=policy)
    journal.trouble = {3: torch.OutOfMemoryError("no room")}
    journal.trainer.run(DATA)
    assert journal.found[3] == journal.found[2]
    assert journal.trainer.state.num_skipped == 0


# --- how it is kept ---------------------------------------------------------------------------------------------------------


def test_values_are_stored_without_graphs() -> None:
    """Also inside containers; what the user still computes with keeps its graph, and a stored list can be appended to."""
    carried, leaf = Carried(), torch.ones(2, requires_grad=True)
    states = [leaf * 2, (leaf * 3, {"c": leaf * 4})]
    carried["states"], carried["plain"] = states, torch.zeros(1)
    assert not any(tensor.requires_grad for tensor in torch.utils._pytree.tree_leaves(carried["states"]))
    assert states[0].requires_grad
    assert torch.equal(carried["states"][1][1]["c"], torch.full((2,), 4.0))
    carried.setdefault("queue", []).append(1)
    carried.update(more=leaf * 5)
    carried |= {"last": leaf * 6}
    assert carried["queue"] == [1]
    assert not carried["more"].requires_grad
    assert not carried["last"].requires_grad


def test_a_mapping_may_be_assigned() -> None:
    """The state keeps its dict, and saves what is assigned."""
    journal = Journal()
    carried = journal.trainer.state.carried
    journal.trainer.state.carried = {"queue": torch.ones(3), "hidden": [torch.ones(1), {"n": 5}]}
    assert journal.trainer.state.carried is carried
    journal.trainer.run(DATA[:2])
    assert journal.trainer.state_dict()["carried"]["values"]["hidden"][1]["n"] == 7


def test_no_graph_is_carried() -> None:
    """When the next micro-batch starts, nothing holds the graph of the last one."""
    model, graphs, alive = nn.Linear(1, 1), [], []

    class Node:
        pass

    def forward(model: nn.Module, micro_batch: Tensor) -> ForwardOutput:
        alive.append(sum(graph() is not None for graph in graphs))
        loss = model(micro_batch).sum()
        node = Node()
        loss.grad_fn.metadata["node"] = node
        graphs.append(weakref.ref(node))
        trainer.state.carried["loss"] = loss
        return ForwardOutput(loss, 1)

    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward, accumulation_steps=2)
    gc.disable()
    try:
        trainer.run(DATA)
    finally:
        gc.enable()
    assert alive == [0] * 8


def test_what_is_loaded_is_a_copy() -> None:
    """A state that was saved can be loaded twice, whatever forward does to the values in between."""
    journal = Journal()
    journal.trainer.run(DATA[:4])
    state = journal.trainer.state_dict()
    before = bit_by_bit(state["carried"])
    again = Journal()
    again.trainer.load_state_dict(state)
    again.trainer.state.carried["queue"].add_(1)
    assert bit_by_bit(state["carried"]) == before
    assert again.state() != journal.state()


@pytest.mark.parametrize("accelerator", [None, torch.device("meta")], ids=["host", "accelerator"])
def test_tensors_come_back_to_their_kind_of_device(monkeypatch: pytest.MonkeyPatch, accelerator: torch.device | None) -> None:
    """A checkpoint gives them on the CPU. Without an accelerator they stay there."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
    carried = Carried()
    values = {"host": torch.zeros(2), "name": "a", "device": [torch.ones(2)]}
    carried.load_state_dict({"values": values, "devices": ["cpu", "cuda"]})
    assert (carried["host"].device.type, carried["name"]) == ("cpu", "a")
    assert carried["device"][0].device.type == ("cpu" if accelerator is None else "meta")


@pytest.mark.parametrize("wrong", [3, {"values": {}}, {"values": [], "devices": []}, {"values": {}, "devices": ["cpu"]}])
def test_a_state_of_something_else_is_refused(wrong: Any) -> None:
    """Nothing is taken over then."""
    journal = Journal()
    before = journal.state()
    with pytest.raises((TypeError, ValueError), match=r"must be what|must have the keys|must be a mapping"):
        journal.trainer.load_state_dict({**journal.trainer.state_dict(), "carried": wrong})
    assert journal.state() == before


def test_an_evaluator_carries_its_own() -> None:
    """Each evaluation begins with nothing carried, and that of the trainer is left alone."""
    journal, found = Journal(), []

    def forward(model: nn.Module, micro_batch: Tensor) -> Tensor:
        found.append(dict(evaluator.state.carried))
        evaluator.state.carried["n"] = len(found)
        return model(micro_batch).mean()

    evaluator = create_evaluator(journal.model, forward)
    before = journal.state()
    evaluator.run(DATA[:2])
    evaluator.run(DATA[:2])
    assert found == [{}, {"n": 1}, {}, {"n": 3}]
    assert journal.state() == before
