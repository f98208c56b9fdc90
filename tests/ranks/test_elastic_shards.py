"""Elastic replicas of two ranks each, on which `fully_shard` has shared the model out: they train, and are lost, as one."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_elastic import FewMembers, forward, loader
from test_elastic_kills import CARDS, ends_of, run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import elastic_runs
import elastic_script
from ignite_train import MembersChangedError, TrainEvents, UnlikeParametersError, UpdateOptions, create_trainer
from ignite_train.ranks import collectives, members, wrapping
from ignite_train.ranks.wrapping import ReductionName
from meshes import on_cpu
from ranks import run_ranks
from tiers import nightly, slow

pytest.importorskip("torchft", reason="elastic replicas need the extra ignite_train[elastic]")

from ignite_train.elastic import ElasticLauncher  # it needs torchft

NOWHERE = "http://127.0.0.1:1"


# --- on the ranks of one replica ---


class Group:
    """In place of the group of a member: a message that arrives, or does not."""

    def __init__(self, *, is_broken: bool) -> None:
        self.is_broken = is_broken

    def allreduce(self, tensors: list[Tensor], options: Any) -> Group:  # noqa: ARG002  # as torchft has it
        return self

    def wait(self) -> None:
        if self.is_broken:
            raise RuntimeError("Connection closed by peer")

    def abort(self, *, errored: bool) -> None:
        pass


def sum_where_rank_1_has_lost_a_member() -> str:
    one = members.Members(NOWHERE)
    one.size, one._key, one._group = 2, "key", Group(is_broken=collectives.rank() == 1)
    with pytest.raises(MembersChangedError) as error:
        one.sum([torch.ones(1)])
    assert not one._key  # so that it will take part in no other update of these members
    return str(error.value)


def test_a_sum_that_fails_on_one_rank_fails_on_all_of_the_replica() -> None:
    """Or else one rank would step, and the other would take its update back."""
    assert run_ranks(sum_where_rank_1_has_lost_a_member) == [
        "a replica was lost: by another rank of this replica",
        "a replica was lost: Connection closed by peer",
    ]


def answer_of_rank_0() -> list[str]:
    one = members.Members(NOWHERE)
    told = [members._Participant("first", NOWHERE, 3, {"key": "another", "history": ""})]
    one._question = members._Question(lambda: told if collectives.is_main_rank() else None)
    with pytest.raises(MembersChangedError):
        one.confirm()
    assert one._quorum is not None
    return [participant.replica_id for participant in one._quorum]


def test_all_ranks_of_a_replica_go_by_the_answer_to_the_first() -> None:
    """The other ranks do not ask the lighthouse."""
    assert run_ranks(answer_of_rank_0) == [["first"], ["first"]]


def join_others_of_one_rank() -> str:
    one = members.Members(NOWHERE)
    one._identity = "second"
    data = {"is_new": False, "ended_runs": 0, "key": "", "history": "", "stops": False, "num_ranks": 1, "sends": ""}
    others = members._Participant("first", NOWHERE, 3, data)
    own = members._Participant("second", NOWHERE, 0, data | {"is_new": True, "num_ranks": 2})
    one.leave = lambda: None  # type: ignore[method-assign]  # it has no lighthouse
    with pytest.raises(ValueError, match="ranks") as error:
        one._form([others, own])
    one._identity = "first"
    with pytest.raises(MembersChangedError):  # the others ask again
        one._form([others, own])
    return str(error.value)


def test_a_replica_of_another_size_is_refused() -> None:
    """It has other shards. The others continue without it."""
    line = "each replica must have as many ranks as the others, 1, got 2; start all of them with the same number"

    assert run_ranks(join_others_of_one_rank) == [line, line]


def trainers_that_are_refused() -> list[str]:
    wrapping.check_elastic = lambda: NOWHERE
    lines = []
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    plain, hybrid = nn.Linear(3, 1), fully_shard(nn.Linear(3, 1), mesh=mesh)
    for model in (plain, hybrid):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="elastic") as refusal:
            create_trainer(model, optimizer, lambda model, x: model(x), seed=0, options=UpdateOptions(reduction="elastic"))
        lines.append(str(refusal.value))
    return lines


def test_a_model_that_is_not_sharded_over_all_ranks_is_refused() -> None:
    """In one line, when the trainer is made."""
    plain, hybrid = run_ranks(trainers_that_are_refused)[0]

    assert plain.startswith("model must be a plain module in a process of its own for reduction='elastic', got 2 ranks; ")
    assert hybrid.startswith("model must be sharded by fully_shard alone, over all ranks of its replica, for ")
    assert "\n" not in plain + hybrid


class OneReplica(FewMembers):
    """Stands in for `Members`: this replica alone, with changes at given updates."""

    def sum(self, tensors: list[Tensor]) -> None:
        pass


def trained_on_two_ranks(changes: dict[int, int] | None, in_each: bool) -> tuple[list[Tensor], list[Any], int]:
    """Two epochs of a model with dropout, of a loader of which one rank has one micro-batch more than the other."""
    wrapping.check_elastic, wrapping.Members = lambda: NOWHERE, lambda _: OneReplica(changes)  # type: ignore[assignment, misc]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    fully_shard(model, mesh=on_cpu())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reduction: ReductionName = "auto" if changes is None else "elastic"
    options = UpdateOptions(reduction=reduction, reduce_each_micro_batch=in_each)
    trainer = create_trainer(
        model, optimizer, forward, accumulation_steps=2, max_grad_norm=1.0, seed=1, protect=False, options=options
    )
    records: list[Any] = []
    trainer.add_event_handler(TrainEvents.STEP_COMPLETED, lambda: records.append(trainer.state.update_output))
    trainer.run(loader(), max_epochs=2)
    made_again = trainer.state.metrics.get("updates_made_again", 0)
    return [parameter.full_tensor() for parameter in model.parameters()], records, made_again


@pytest.mark.parametrize("in_each", [False, True], ids=["reduced once", "reduced in each micro-batch"])
def test_a_replica_alone_trains_as_without_others(*, in_each: bool) -> None:
    """Bitwise as by `fully_shard` alone, also where updates are made again: all that an update does is taken back."""
    plain, elastic = (run_ranks(trained_on_two_ranks, changes, in_each) for changes in (None, {0: 1, 3: 2, 5: 1}))

    for (others, records_of_others, _), (parameters, records, made_again) in zip(plain, elastic, strict=True):
        assert made_again == 4
        assert records == records_of_others
        assert all(map(torch.equal, parameters, others))


def use_other_parameters_on_each_rank() -> None:
    wrapping.check_elastic, wrapping.Members = lambda: NOWHERE, lambda _: OneReplica()  # type: ignore[assignment, misc]

    class OneOfTwo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)]).double()

        def forward(self, x: Tensor) -> Any:
            return self.parts[collectives.rank()](x)

    model = fully_shard(OneOfTwo(), mesh=on_cpu())
    optimizer, elastic = torch.optim.SGD(model.parameters(), lr=0.1), UpdateOptions(reduction="elastic")
    with pytest.raises(UnlikeParametersError):
        create_trainer(model, optimizer, forward, seed=1, options=elastic).run(loader(), max_epochs=1)


def test_ranks_of_a_replica_that_use_other_parameters_are_told() -> None:
    """FSDP2 would add up gradients of different parameters without a word, as with `fully_shard` alone."""
    run_ranks(use_other_parameters_on_each_rank)


# --- the launcher ---


def test_the_launcher_ends_a_replica_as_one(tmp_path: Path) -> None:
    """A rank is killed, and another one stopped for ever: each time both ranks are started again, and meet elsewhere."""
    script = (
        "import json, os, pathlib, signal, sys, time\n"
        "directory, rank = pathlib.Path(sys.argv[1]), os.environ['RANK']\n"
        "number = len(list(directory.glob(f'{rank}-*')))\n"
        "names = ['LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT', 'IGNITE_TRAIN_REPLICA']\n"
        "(directory / f'{rank}-{number}').write_text(json.dumps([os.environ[name] for name in names]))\n"
        "while not (directory / f'{1 - int(rank)}-{number}').exists(): time.sleep(0.01)\n"
        "if rank == str(number): os.kill(os.getpid(), [signal.SIGKILL, signal.SIGSTOP][number])\n"
        "while number < 2: time.sleep(0.01)\n"
        "pathlib.Path(os.environ['IGNITE_TRAIN_ENDED']).touch()\n"
    )
    command = [sys.executable, "-S", "-c", script, str(tmp_path)]
    with ElasticLauncher(command, 1, num_ranks=2, hang_seconds=0.3) as launcher:
        deadline = time.monotonic() + 120
        while not launcher.look():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert launcher.run() == 0
    assert launcher.num_restarts == 2
    told = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert sorted(told) == [f"{rank}-{number}" for rank in range(2) for number in range(3)]
    for number in range(3):
        first, second = told[f"0-{number}"], told[f"1-{number}"]
        assert first == ["0", "2", "2", "127.0.0.1", second[4], "0"]
        assert second == ["1", *first[1:]]


# --- whole runs ---


def train(directory: Path, samples: int, death: tuple[int, int, int] | None = None) -> ElasticLauncher:
    """Trains two replicas of two ranks for three epochs.

    With `death`, a replica and a rank in it get this signal once they have begun, and the run ends when it has come again.
    """
    epochs = "3" if death is None else "1000"
    command = [sys.executable, elastic_script.__file__, str(directory), epochs, str(samples), "0.02", "samples"]
    with ElasticLauncher(command, 2, num_ranks=2, heartbeat_ms=1500, join_ms=10_000, hang_seconds=10) as launcher:
        deadline, killed = time.monotonic() + elastic_runs.SECONDS, False
        while not launcher.look():
            assert time.monotonic() < deadline, "the replicas have not ended"
            if death is not None and launcher.num_restarts:
                if (directory / f"made-{launcher.replicas[death[0]].processes[0].pid}").exists():
                    (directory / "enough").touch()
            elif death is not None and (directory / "begun").exists() and not killed:
                os.kill(launcher.replicas[death[0]].processes[death[1]].pid, death[2])
                killed = True
            time.sleep(0.02)
    return launcher


@pytest.mark.parametrize(
    ("optimizer", "samples"),
    [slow("SGD", 96), nightly("ADAMW", 96), nightly("ADAMW", 82), nightly("SGD", 81)],
)
def test_replicas_of_two_ranks_make_the_update_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, samples: int
) -> None:
    """Clipped by the norm of the whole. With 82 samples a replica has none in a last update, with 81 only one rank has one."""
    monkeypatch.setenv(optimizer, "1")
    monkeypatch.setenv("CLIPS", "2.0")
    launcher = train(tmp_path, samples)

    assert launcher.num_restarts == 0
    assert len(ends_of(tmp_path)) == 2
    elastic_runs.check(ends_of(tmp_path), samples)


@pytest.mark.parametrize(
    ("rank", "number"),
    [nightly(0, signal.SIGKILL), slow(1, signal.SIGKILL), nightly(0, signal.SIGSTOP), nightly(1, signal.SIGSTOP)],
)
def test_a_replica_that_has_lost_a_rank_is_lost(tmp_path: Path, rank: int, number: int) -> None:
    """The launcher ends it, also where the rank is only suspended; the other replica continues, and heals it."""
    launcher = train(tmp_path, 96, (1, rank, number))

    assert launcher.num_restarts > 0
    assert len(ends_of(tmp_path)) == 2
    elastic_runs.check(ends_of(tmp_path))


CASES = [(seed, 2 + (seed % 4 == 0), ("samples", "tokens", "workers")[seed % 3]) for seed in range(1, 11)]


@pytest.mark.nightly
@pytest.mark.parametrize(("seed", "num_replicas", "batches"), CASES)
def test_replicas_of_which_ranks_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, num_replicas: int, batches: str
) -> None:
    """At each place, on either rank, as for replicas of one process: they end where a run on one process ends.

    Some of them have a FailureBoard and a HangWatch, which must not be in the way.
    """
    monkeypatch.setenv(("SGD", "ADAMW")[seed % 2 == 0], "1")
    monkeypatch.setenv("CLIPS", "2.0")
    if seed % 5 == 0:
        monkeypatch.setenv("BOARDS", "1")
    done = run(tmp_path, seed, num_replicas, CARDS, batches, "shards")
    assert done.returncode == 0, done.stderr[-20_000:]
    kills = json.loads((tmp_path / "kills").read_text())

    assert kills["number"] >= CARDS
    assert {place for place, _, _ in kills["played"]} == {*elastic_runs.PLACES}
    elastic_runs.check(ends_of(tmp_path))
