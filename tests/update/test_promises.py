"""What the README promises, for each mechanism of docs/programs.md, in each way of crossing ranks in which it is not refused.

The programs, and the same by hand, are in `mechanisms.py`. One program that uses no mechanism is beside them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
from ignite.engine import Events

from bits import bit_by_bit
from ignite_train import NonFiniteError, Trainer, TrainEvents, count_traffic
from ignite_train.handlers import Checkpoint, StateMismatchError
from mechanisms import MECHANISMS, WAYS, ByHand, Program, flat
from ranks import Ranks, RanksFailedError
from tiers import nightly, only, slow

# torch says so whenever its own optimizers make a sparse tensor
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")

ALL = [(name, way) for name in MECHANISMS for way in WAYS]
HELD = [(name, way) for name, way in ALL if way not in MECHANISMS[name].refused]
REFUSED = [(name, way) for name, way in ALL if way in MECHANISMS[name].refused]
FAST = [("several-optimizers", "explicit"), ("closure", "small"), ("changed-gradients", "fsdp"), ("sparse-gradients", "ddp")]
ROTATING = []  # each mechanism in one way
for _number, _name in enumerate(MECHANISMS):
    _ways = [way for way in WAYS if (_name, way) in HELD]
    ROTATING.append((_name, _ways[_number % len(_ways)]))
QUIET = {"failure_board": False, "hang_watch": False}  # of `protect`, where all ranks fail together

held = pytest.mark.parametrize(("name", "way"), [case if case in FAST else slow(*case) for case in HELD])


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two ranks for all cases of this file."""
    with Ranks() as ranks:
        yield ranks


# --- exact, and the same decision ---------------------------------------------------------------------------------------------


def trained(name: str, way: str, poisoned: bool) -> tuple[list[float], list[Any], list[bool]]:
    """Parameters, the record of each update, and whether an update that was skipped has changed no bit."""
    program = Program(name, way, poisoned=poisoned)
    records, stayed, before = program.note_records(), [], [bit_by_bit(flat(program.model))]

    def compare(trainer: Trainer) -> None:
        now = bit_by_bit(flat(program.model))
        assert trainer.state.update_output is not None
        if not trainer.state.update_output.applied:
            stayed.append(now == before[0])
        before[0] = now

    program.trainer.add_event_handler(Events.ITERATION_COMPLETED, compare)
    program.train()
    return flat(program.model), [tuple(record) for record in records], stayed


@pytest.mark.slow
@pytest.mark.parametrize("poisoned", [False, True], ids=["clean", "poisoned"])
@held
def test_it_is_the_loop_by_hand_with_one_decision(ranks: Ranks, name: str, way: str, poisoned: bool) -> None:
    """On ragged groups, and where rank 1 alone has a NaN: no rank steps then, nothing moves, and the run continues."""
    expected = ByHand(MECHANISMS[name], poisoned=poisoned)
    outcomes = ranks.run(trained, name, way, poisoned)

    assert repr(outcomes[0]) == repr(outcomes[1]), "bitwise the same on both ranks"
    parameters, records, stayed = outcomes[0]
    assert stayed == [True] * (2 * poisoned)
    assert [record[3] for record in records] == [record.applied for record in expected.records]
    for found, by_hand in zip(records, expected.records, strict=True):
        assert found[:3] == pytest.approx(by_hand[:3], rel=1e-9, nan_ok=True)
        assert found[4] == pytest.approx(by_hand.logs, rel=1e-9, nan_ok=True)
    assert parameters == pytest.approx(flat(expected.model), rel=1e-9, abs=1e-12)


# --- one reduction ------------------------------------------------------------------------------------------------------------

# What an update has beside the collectives of one without the mechanism; `docs/programs.md` says so.
BEFORE = {
    ("update-on-demand", "fsdp"): ["allreduce_"],  # the lengths of the lists
    ("empty-micro-batches", "fsdp"): ["allreduce_", "broadcast_", "broadcast_"],  # the numbers, and what another rank lends
}
AFTER = {
    ("several-optimizers", "fsdp"): ["allreduce_"] * 2,  # a norm for each optimizer that has a limit
    ("changed-gradients", "fsdp"): ["allreduce_"],  # Σsample_size must be known before the norm
    ("sparse-gradients", "ddp"): ["allreduce_"],  # the rows, by DistributedDataParallel
    ("sparse-gradients", "small"): ["allgather_"],
    ("sparse-gradients", "explicit"): ["allgather_"],
}
EVALUATIONS = {"closure": 2}


def counted(name: str, way: str) -> list[str]:
    """The collectives of the second epoch's first update, in which both ranks have a whole group."""
    program = Program(name, way, protect=False)
    number, context, names = program.mechanism.updates + 1, count_traffic(), []

    @program.trainer.on(Events.ITERATION_STARTED(once=number))
    def begin() -> None:
        names.append(context.__enter__())

    @program.trainer.on(Events.ITERATION_COMPLETED(once=number))
    def end() -> None:
        context.__exit__(None, None, None)

    program.train()
    return [one.name for one in names[0].collectives]


@pytest.mark.slow
@held
def test_an_update_has_one_reduction(ranks: Ranks, name: str, way: str) -> None:
    """Its collectives are those of the same update without the mechanism, and what the documents say it costs beside them."""
    plain, _ = ranks.run(counted, "none-of-them", way)
    found = ranks.run(counted, name, way)

    assert found[0] == found[1]
    assert found[0] == [*BEFORE.get((name, way), []), *plain * EVALUATIONS.get(name, 1), *AFTER.get((name, way), [])]
    assert plain.count("allgather_") == 1  # of the sums, with which all gradients cross where they are few
    assert plain.count("allreduce_") == (1 if way == "ddp" else 0)
    if way != "fsdp":  # which has operations of its own
        assert plain == ["allgather_", *["allreduce_"] * (way == "ddp")]  # the latter is DistributedDataParallel's


# --- resumed bitwise ----------------------------------------------------------------------------------------------------------


class StoppedError(Exception):
    """Ends a run in the middle."""


def ended(name: str, way: str, directory: Path, stop_at: int) -> Any:
    """All contents at the end of a run, which fails in this update if it is not 0."""
    program = Program(name, way, protect=QUIET)
    Checkpoint(directory, every=2).attach(program.trainer)
    program.trainer.add_event_handler(TrainEvents.STEP_COMPLETED, lambda: fail_in(program.trainer, stop_at))
    program.train()
    return repr(bit_by_bit([flat(program.model), *program.contents()]))


def fail_in(trainer: Trainer, update: int) -> None:
    if trainer.state.iteration == update:
        raise StoppedError


def resumed(name: str, way: str, directory: Path) -> tuple[Any, Any]:
    """The ends of a run in one piece, and of one that failed in the first update of its second epoch."""
    whole = ended(name, way, directory / "whole", 0)
    with pytest.raises(StoppedError):
        ended(name, way, directory / "stopped", MECHANISMS[name].updates + 1)
    return whole, ended(name, way, directory / "stopped", 0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), [case if case in (*FAST, *ROTATING) else nightly(*case) for case in HELD])
def test_a_resumed_run_ends_with_the_same_bits(ranks: Ranks, name: str, way: str, tmp_path: Path) -> None:
    """Parameters, moments, counters and what is carried."""
    for whole, other in ranks.run(resumed, name, way, tmp_path):
        assert whole == other


# --- nothing silently wrong ---------------------------------------------------------------------------------------------------


def caught(error: type[Exception], program: Program) -> Exception:
    with pytest.raises(error) as found:
        program.train()
    return found.value


def poisoned_message(name: str, way: str) -> str:
    program = Program(name, way, poisoned=True, on_nonfinite="raise", protect=QUIET)
    return str(caught(NonFiniteError, program))


@held
def test_a_nan_of_one_rank_is_named_on_all(ranks: Ranks, name: str, way: str) -> None:
    """By default, with the rank that had it."""
    for message in ranks.run(poisoned_message, name, way):
        assert "rank 1" in message


def differing_message(name: str, way: str) -> tuple[str, int]:
    """Rank 1 has another rate in the last group of its last optimizer from the first step on."""
    program = Program(name, way, protect=QUIET)
    if idist.get_rank() == 1:
        group = list(program.optimizers.values())[-1].param_groups[-1]
        program.trainer.add_event_handler(TrainEvents.STEP_COMPLETED, lambda: group.update(lr=group["lr"] * 1.5))
    return str(caught(StateMismatchError, program)), program.trainer.state.iteration


@held
def test_ranks_that_differ_are_reported(ranks: Ranks, name: str, way: str) -> None:
    """By the check that is attached by default, on all ranks, in the next update."""
    found = ranks.run(differing_message, name, way)
    assert found[0] == found[1]
    assert "rate" in found[0][0]
    assert found[0][1] == 1, "the second update was not done"


def change_on_one_rank(way: str, factor: float) -> str:
    """Rank 1 multiplies its mean gradient by a factor."""
    program = Program("changed-gradients", way, on_nonfinite="raise")

    @program.trainer.on(TrainEvents.GRADIENTS_REDUCED)
    def multiply() -> None:
        for parameter in program.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(factor if idist.get_rank() == 1 else 1.0)

    return str(caught(StateMismatchError, program))


REPLICATED = [way for way in WAYS if way != "fsdp"]  # where each rank has all gradients


@pytest.mark.parametrize("way", only(["small"], REPLICATED))
def test_gradients_that_one_rank_changes_otherwise_are_reported(ranks: Ranks, way: str) -> None:
    """By the check that is attached by default, on all ranks."""
    first, second = ranks.run(change_on_one_rank, way, 1.5)
    assert first == second
    assert "update 1: the ranks differ in parameter 0.weight" in first


@pytest.mark.parametrize("way", [slow("explicit"), slow("fsdp"), nightly("ddp"), nightly("small")])
def test_a_gradient_that_one_rank_makes_infinite_ends_all(ranks: Ranks, way: str) -> None:
    """No rank waits for the one that has raised; where gradients are sharded all raise."""
    with pytest.raises(RanksFailedError) as found:
        ranks.run(change_on_one_rank, way, math.inf)
    first, _, second = str(found.value).partition("\nrank 1: ")
    assert "NonFiniteError" in second
    assert first != "rank 0: returned"
    assert "was not done at the deadline" not in str(found.value)


# --- a failure ends all -------------------------------------------------------------------------------------------------------


def fail_on_one_rank(name: str, way: str) -> None:
    """Rank 1 fails before a forward of the second update."""
    program = Program(name, way)
    if idist.get_rank() == 1:
        program.trainer.add_event_handler(TrainEvents.MICRO_BATCH_STARTED, lambda: fail_in(program.trainer, 2))
    program.train()


@pytest.mark.parametrize(("name", "way"), [slow(*case) if case in ROTATING else nightly(*case) for case in HELD])
def test_a_failure_of_one_rank_ends_all(ranks: Ranks, name: str, way: str) -> None:
    """No rank waits for the one that has failed."""
    with pytest.raises(RanksFailedError) as found:
        ranks.run(fail_on_one_rank, name, way)
    first, _, second = str(found.value).partition("\nrank 1: ")
    assert "StoppedError" in second
    assert first != "rank 0: returned"
    assert "was not done at the deadline" not in str(found.value)


# --- refusals -----------------------------------------------------------------------------------------------------------------


def refusal(name: str, way: str) -> str:
    with pytest.raises((TypeError, ValueError)) as found:
        Program(name, way)
    return str(found.value)


@pytest.mark.parametrize(("name", "way"), [case if index == 0 else slow(*case) for index, case in enumerate(REFUSED)])
def test_a_refusal_is_one_line_with_the_remedy(ranks: Ranks, name: str, way: str) -> None:
    """On all ranks, before anything is computed."""
    for message in ranks.run(refusal, name, way):
        assert "\n" not in message
        assert re.search(MECHANISMS[name].refused[way], message)


def test_each_mechanism_has_a_way() -> None:
    """In which it is not refused, and one without ranks: the plain replicas."""
    assert {name for name, way in HELD if way == "explicit"} == set(MECHANISMS)
