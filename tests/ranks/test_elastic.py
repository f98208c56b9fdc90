"""Elastic replicas without torchft: what is refused, how samples are dealt again, and that an update leaves no trace."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import nn

from ignite_train import (
    ForwardOutput,
    MembersChangedError,
    ResumableLoader,
    TokenBudgetSampler,
    TrainEvents,
    UpdateOptions,
    create_trainer,
)
from ignite_train.data.dealing import ElasticDealing
from ignite_train.handlers import LearningRateSchedule
from ignite_train.ranks import members, wrapping

ELASTIC = UpdateOptions(reduction="elastic")


class FewMembers:
    """Stands in for `Members`: this process alone, with changes at given updates."""

    def __init__(self, changes: dict[int, int] | None = None) -> None:
        self.rank, self.size, self.num_changes, self.is_stopped = 0, 1, 0, False
        self.changes, self.step = dict(changes or {}), 0
        self.restored: list[int] = []

    def join(self, step: Callable[[], int], capture: Callable[[], Any], restore: Callable[[Any], None]) -> None:
        self.capture, self.restore, self.step = capture, restore, step()

    def part(self, step: Callable[[], int], *, stopped: bool) -> None:
        pass

    def note_end(self) -> None:
        pass

    def leave(self) -> None:
        pass

    def ask(self, step: int) -> None:
        self.step = step

    def confirm(self) -> None:
        if self.changes.get(self.step, 0):
            self.changes[self.step] -= 1
            raise MembersChangedError("another replica takes part")

    def renew(self, step: Callable[[], int]) -> None:
        self.restored.append(step())

    def commit(self, step: int, learning_rates: Sequence[float]) -> None:
        assert step == self.step + 1
        assert learning_rates


@pytest.fixture
def with_members(monkeypatch: pytest.MonkeyPatch) -> Callable[[FewMembers], None]:
    """Has trainers that are made use these members, as if torchft and a lighthouse were there."""

    def use(few: FewMembers) -> None:
        monkeypatch.setattr(wrapping, "check_elastic", lambda: "http://127.0.0.1:1")
        monkeypatch.setattr(wrapping, "Members", lambda _: few)

    return use


def forward(model: nn.Module, micro_batch: torch.Tensor) -> ForwardOutput:
    return ForwardOutput((model(micro_batch) - 1).square().sum(), sample_size=len(micro_batch))


def make(**arguments: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return create_trainer(model, optimizer, forward, **{"seed": 1, "options": ELASTIC, "accumulation_steps": 2} | arguments)


def loader(number: int = 21, **options: Any) -> ResumableLoader:
    data = torch.randn(number, 3, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return ResumableLoader(data, batch_size=2, shuffle=True, seed=3, **options)


# --- what is told ---


@pytest.mark.parametrize(("own", "says"), [(120, True), (57, True), (56, False), (55, False), (0, False)])
def test_a_replica_that_has_resumed_further_than_the_others_says_so(
    own: int, says: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It dropped its updates without a word, as the other replicas had begun without it. A single update may be their last."""
    mine, running = (members._Participant("name", "", step, {}) for step in (own, 55))
    members._warn_of_lost_updates(mine, running)
    assert [f"resumed after update {own}, and takes over the state after 55" in line for line in caplog.messages] == [
        True
    ] * says


# --- what is refused ---


def test_a_trainer_without_torchft_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says which extra is missing."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ValueError, match=r"needs torchft, which is not installed; pip install 'ignite_train\[elastic\]'$"):
        make()


def test_a_trainer_without_a_lighthouse_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says which variable is missing, and what sets it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv(members.LIGHTHOUSE, raising=False)

    with pytest.raises(ValueError, match=r"variable TORCHFT_LIGHTHOUSE, got none; .*python -m ignite_train.elastic"):
        make()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"options": UpdateOptions(reduction="elastic", closure=True)}, "closure must be left out"),
        ({"options": UpdateOptions(reduction="elastic", uneven="shortest")}, "uneven must be left out"),
        ({"options": UpdateOptions(reduction="elastic", on_out_of_memory="skip")}, "on_out_of_memory must be left out"),
        ({"options": UpdateOptions(reduction="elastic", drop_last_group=True)}, "drop_last_group must be left out"),
        ({"compile": True}, "compile must be False"),
        ({"seed": None}, "seed must be given"),
        ({"precision": "fp16"}, "loss_scaling must have its first scale"),
    ],
)
def test_a_combination_that_is_not_supported_is_refused(
    with_members: Callable[[FewMembers], None], arguments: dict[str, Any], message: str
) -> None:
    """Before the first batch, in one line that names the argument."""
    with_members(FewMembers())

    with pytest.raises(ValueError, match=message) as refusal:
        make(**arguments)
    assert "\n" not in str(refusal.value)


def test_running_statistics_are_refused(with_members: Callable[[FewMembers], None]) -> None:
    """Each replica would have others."""
    with_members(FewMembers())
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(ValueError, match=r"no running statistics for reduction='elastic', got '1.running_mean'"):
        create_trainer(model, optimizer, forward, seed=0, options=ELASTIC)


def test_sparse_gradients_are_refused(with_members: Callable[[FewMembers], None]) -> None:
    """Rows of embeddings do not cross between members."""
    with_members(FewMembers())
    model = nn.Embedding(3, 3, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(ValueError, match="no sparse gradients for reduction='elastic'"):
        create_trainer(model, optimizer, forward, seed=0, options=ELASTIC)


@pytest.mark.parametrize(
    ("data", "settings"),
    [
        ([torch.ones(2, 3, dtype=torch.float64)], {"max_epochs": 1}),
        (loader(), {"max_epochs": 1, "epoch_length": 2}),
        (None, {"max_epochs": 1, "epoch_length": 2}),
    ],
)
def test_data_that_cannot_be_dealt_again_is_refused(
    with_members: Callable[[FewMembers], None], data: Any, settings: dict[str, Any]
) -> None:
    """The remedy is named, and no update is made."""
    with_members(FewMembers())
    trainer = make()

    with pytest.raises((TypeError, ValueError), match="data must be a ResumableLoader with reduction='elastic'"):
        trainer.run(data, **settings)
    assert trainer.state.iteration == 0


def test_updates_on_request_are_refused(with_members: Callable[[FewMembers], None]) -> None:
    """Their groups come from a loop of the user's, which nothing can deal again."""
    with_members(FewMembers())

    with pytest.raises(ValueError, match="as in a session"):
        make().update([torch.ones(2, 3, dtype=torch.float64)])


# --- an update that is made again ---


def trained(few: FewMembers, with_members: Callable[[FewMembers], None]) -> tuple[Any, list[str]]:
    """A trainer after two epochs, and the events that have fired."""
    with_members(few)
    trainer, fired = make(), list[str]()
    for event in (Events.ITERATION_STARTED, Events.ITERATION_COMPLETED, TrainEvents.STEP_COMPLETED):
        trainer.add_event_handler(event, lambda _, name: fired.append(f"{name} {trainer.state.iteration}"), event.name)
    trainer.run(loader(), max_epochs=2)
    return trainer, fired


def test_an_update_that_is_made_again_leaves_no_trace(with_members: Callable[[FewMembers], None]) -> None:
    """Parameters, moments, counters and events are bitwise those of a run in which no update was made again."""
    plain, fired = trained(FewMembers(), with_members)
    few = FewMembers({0: 1, 3: 2, 5: 1, 11: 1})
    again, fired_again = trained(few, with_members)

    assert few.restored == [0, 3, 3, 5, 11]
    assert again.state.metrics["updates_made_again"] == 5
    assert fired_again == fired
    assert again.state_dict() == plain.state_dict()
    assert again.state.update_output == plain.state.update_output
    for one, other in zip(again.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)
    moments = (trainer.optimizers["optimizer"].state_dict()["state"] for trainer in (again, plain))
    for one, other in zip(*(state.values() for state in moments), strict=True):
        assert torch.equal(one["momentum_buffer"], other["momentum_buffer"])


class Gives(FewMembers):
    """Gives its state where it begins, or within an update that is taken back."""

    def join(self, step: Callable[[], int], capture: Callable[[], Any], restore: Callable[[Any], None]) -> None:
        super().join(step, capture, restore)
        self.state = capture()

    def renew(self, step: Callable[[], int]) -> None:
        super().renew(step)
        self.state = self.capture()


class Takes(FewMembers):
    """Takes this state over."""

    def __init__(self, state: torch.Tensor) -> None:
        super().__init__()
        self.state = state

    def join(self, step: Callable[[], int], capture: Callable[[], Any], restore: Callable[[Any], None]) -> None:
        super().join(step, capture, restore)
        restore(self.state)
        self.taken_at = step()


def test_a_state_that_is_handed_over_continues_bitwise(with_members: Callable[[FewMembers], None]) -> None:
    """Taken in the middle of an epoch, within an update that is taken back, and restored into another trainer as it starts."""
    gives = Gives({4: 1})
    whole, _ = trained(gives, with_members)
    takes = Takes(gives.state)
    taken, fired = trained(takes, with_members)

    assert takes.taken_at == 4
    assert fired[0] == "ITERATION_STARTED 5"
    assert taken.state_dict() == whole.state_dict()
    for one, other in zip(taken.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)


class Counts:
    """Counts its calls, and draws a random number in each."""

    def __init__(self, saved_as: str) -> None:
        self.saved_as, self.number = saved_as, 0

    def __call__(self) -> None:
        self.number += 1
        torch.rand(())

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("given", [0, 3, 6, 8], ids=lambda given: f"in update {given + 1}")
def test_handlers_of_the_update_that_a_replica_joins_in_are_not_ahead(
    with_members: Callable[[FewMembers], None], caplog: pytest.LogCaptureFixture, given: int
) -> None:
    """Events before an update have fired where the state comes from, and fire here too: handlers counted them twice."""
    events = (Events.STARTED, Events.EPOCH_STARTED, Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED)
    every = (*events, Events.ITERATION_STARTED, Events.ITERATION_COMPLETED)

    def trained(few: FewMembers) -> tuple[Any, ...]:
        with_members(few)
        trainer, counts, rates = make(), [Counts(event.name) for event in every], dict[int, tuple[float, ...]]()
        optimizer, late = trainer.optimizers["optimizer"], trainer.model.get_parameter("2.bias")
        del optimizer.param_groups[0]["params"][-1]
        for event, count in zip(every, counts, strict=True):
            trainer.add_event_handler(event, count)

        @trainer.on(Events.EPOCH_STARTED(once=2))  # type: ignore[untyped-decorator]
        def grow() -> None:
            optimizer.add_param_group({"params": [late], "initial_lr": 0.1})

        @trainer.on(Events.ITERATION_COMPLETED)  # type: ignore[untyped-decorator]
        def note() -> None:
            rates[trainer.state.iteration] = trainer.state.update_output.learning_rates

        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        LearningRateSchedule(schedule).attach(trainer, Events.EPOCH_STARTED)
        trainer.run(loader(), max_epochs=3)
        return trainer.state_dict(), [one.number for one in counts], rates, torch.get_rng_state(), [*trainer.model.parameters()]

    gives = Gives({given: 1})
    state, counts, rates, drawn, parameters = trained(gives)
    taken = trained(Takes(gives.state))

    assert counts == [1, 3, 18, 18, 18, 18]
    assert taken[:2] == (state, counts)
    assert taken[2] == {update: rate for update, rate in rates.items() if update > given}
    assert torch.equal(taken[3], drawn)
    assert all(map(torch.equal, taken[4], parameters))
    assert "something else steps it" not in caplog.text


def test_replicas_that_begin_together_do_the_same_in_started(with_members: Callable[[FewMembers], None]) -> None:
    """Weights that a handler of STARTED sets were put back in all replicas but the first, so that replicas differed."""

    def trained(few: FewMembers) -> tuple[Any, int, list[torch.Tensor]]:
        with_members(few)
        trainer, count = make(), Counts("count")
        trainer.add_event_handler(Events.STARTED, count)
        trainer.add_event_handler(Events.STARTED, lambda: torch.nn.init.ones_(trainer.model.get_parameter("0.weight")))
        trainer.run(loader(), max_epochs=1)
        return trainer.state_dict(), count.number, [*trainer.model.parameters()]

    gives = Gives()
    state, number, parameters = trained(gives)
    taken = trained(Takes(gives.state))

    assert taken[:2] == (state, number) == (state, 1)
    assert all(map(torch.equal, taken[2], parameters))


# --- dealing ---


def indices(number: int, seed: int, batches: str) -> ResumableLoader:
    """A loader of the numbers of its samples."""
    if batches == "samples":
        return ResumableLoader(torch.arange(number), batch_size=2, shuffle=True, seed=seed)
    sampler = TokenBudgetSampler([1 + index % 3 for index in range(number)], max_tokens=5, shuffle=True, seed=seed)
    return ResumableLoader(torch.arange(number), batches=sampler, seed=seed)


@pytest.mark.parametrize("batches", ["samples", "tokens"])
@pytest.mark.parametrize("seed", range(20))
def test_each_sample_is_dealt_once_whoever_takes_part(
    with_members: Callable[[FewMembers], None], seed: int, batches: str
) -> None:
    """The passes of all members side by side: at random updates others take part, and what is left is dealt again."""
    draw = random.Random(seed)  # noqa: S311  # a test
    number, group = draw.randint(1, 60), draw.randint(1, 3)
    size, place, done, given = draw.randint(1, 4), {}, 0, list[int]()
    while True:
        shares = []
        for rank in range(size):
            few = FewMembers()
            few.rank, few.size = rank, size
            with_members(few)
            trainer = make(accumulation_steps=group)
            data = indices(number, seed, batches)
            grouping = trainer.data.grouping
            shares.append(grouping(data, epoch=1, first_update=1, skip=done, position=place))
        lengths = {share.length for share in shares}
        assert len(lengths) == 1
        if done == lengths.pop():
            break
        for _ in range(draw.randint(1, 4)):
            if done == shares[0].length:
                break
            given += [int(index) for share in shares for micro_batch in next(share) for index in micro_batch]
            done += 1
        place, size = shares[0].position(), draw.randint(1, 4)
        if draw.random() < 0.5 and done < shares[0].length:  # groups that were given and are not counted are dealt again
            for share in shares:
                next(share)
            place = shares[0].position(done)

    assert sorted(given) == list(range(number))


def test_each_member_knows_the_shares_of_all() -> None:
    """Without asking them."""
    few = FewMembers()
    few.rank, few.size = 1, 3
    dealing, data = ElasticDealing(few), loader(8)  # type: ignore[arg-type]
    data.deal_by(dealing)

    assert dealing.lengths(lambda: len(data)) == [2, 2, 1]
    assert (dealing.rank, len(data)) == (1, 2)
