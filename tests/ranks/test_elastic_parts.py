"""What assumes a fixed group of ranks, with elastic replicas: each part works, or is refused in one line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Average
from test_elastic import ELASTIC, FewMembers, forward, loader, make, with_members
from torch import nn

from ignite_train import (
    FellBehindError,
    ForwardOutput,
    MembersChangedError,
    NoQuorumError,
    ResumableLoader,
    attach_metric,
    create_evaluator,
    create_trainer,
    tune,
)
from ignite_train.handlers import (
    Checkpoint,
    CurvatureMonitor,
    EarlyStopping,
    FailureBoard,
    GradNormConsistency,
    HangWatch,
    LearningRateFinder,
    MinLearningRate,
    ModelEMA,
    ModelSync,
    OuterOptimizer,
    ReduceOnPlateau,
    SeveralGradients,
    StateConsistency,
    StepTimer,
    StopOnSignal,
    TrainingMetrics,
    Validation,
    predict,
)
from ignite_train.ranks import members

__all__ = ["with_members"]  # a fixture
ALIKE = {"num_ranks": 1, "sends": ""}
"""The entries that replicas tell one another and that must be equal."""


def outer(trainer: Any) -> None:
    OuterOptimizer(torch.optim.SGD(trainer.model.parameters(), lr=1.0), every=2).attach(trainer)


REFUSED: dict[str, Callable[[Any], object]] = {
    "StateConsistency": lambda trainer: StateConsistency(trainer.model, trainer.optimizers["optimizer"]).attach(trainer),
    "GradNormConsistency": lambda trainer: GradNormConsistency().attach(trainer),
    "OuterOptimizer": outer,
    "ModelSync": lambda trainer: ModelSync().attach(trainer, create_evaluator(trainer.model, forward)),
    "SeveralGradients": lambda trainer: SeveralGradients(lambda gradients: gradients["one"]).attach(trainer),
    "CurvatureMonitor": lambda trainer: CurvatureMonitor(forward).attach(trainer),
    "attach_metric": lambda trainer: attach_metric(trainer, Average(), "mean"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_part_that_looks_at_one_replica_only_is_refused(with_members: Callable[[FewMembers], None], name: str) -> None:
    """In one line, when it is attached, since it would be wrong without a word."""
    with_members(FewMembers())

    with pytest.raises(ValueError, match=rf"^{name}.* must be left out with reduction='elastic': ") as refusal:
        REFUSED[name](make())
    assert "\n" not in str(refusal.value)


class Distributed(nn.parallel.DistributedDataParallel):
    """A wrapper without a process group."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


def test_a_wrapped_model_is_refused(with_members: Callable[[FewMembers], None]) -> None:
    """In one line, when the trainer is made."""
    with_members(FewMembers())
    model = Distributed(nn.Linear(3, 1))

    with pytest.raises(ValueError, match=r"plain module .* for reduction='elastic', got a Distributed in it; ") as refusal:
        create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward, seed=0, options=ELASTIC)
    assert "\n" not in str(refusal.value)


def test_a_search_for_the_rate_or_for_settings_is_refused(with_members: Callable[[FewMembers], None]) -> None:
    """Its end would be that of the replicas."""
    with_members(FewMembers())

    with pytest.raises(ValueError, match="got reduction='elastic'"):
        LearningRateFinder(make).run(loader())
    with pytest.raises(RuntimeError, match="got reduction='elastic'"):
        tune(lambda: make(), loader(), seconds=0.1)  # make has parameters without defaults


def test_the_length_of_a_schedule_is_refused(with_members: Callable[[FewMembers], None]) -> None:
    """It would be counted from the share of one replica, however many take part."""
    with_members(FewMembers())

    with pytest.raises(ValueError, match=r"^total_updates .* reduction='elastic', .*max_iters=") as refusal:
        make().total_updates(loader(), max_epochs=2)
    assert "\n" not in str(refusal.value)


def part_state(few: FewMembers, with_members: Callable[[FewMembers], None], directory: Path) -> tuple[Any, ...]:
    """The end of a run with everything that is allowed beside it."""
    with_members(few)
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(3, 4).double(), "b": nn.Linear(4, 1).double()})
    optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9) for name, part in model.items()}
    drawn = list[float]()

    def both(model: nn.ModuleDict, micro_batch: torch.Tensor) -> ForwardOutput:
        noise = torch.randn(1)
        if model.training:
            drawn.append(noise.item())
        loss = (model["b"](model["a"](micro_batch)) * (1 + noise * model.training) - 1).square().sum()
        return ForwardOutput(loss, sample_size=len(micro_batch), logs={"number": (1.0, 1.0)}, outputs=micro_batch.sum(1))

    limits = {"a": 1.0, "b": 2.0}
    trainer = create_trainer(model, optimizers, both, seed=1, options=ELASTIC, accumulation_steps=2, max_grad_norm=limits)
    evaluator = create_evaluator(model, both)
    ema = ModelEMA(decay=0.9)
    ema.attach(trainer)
    timer = StepTimer()
    timer.attach(trainer)
    for handler in (FailureBoard(), HangWatch(), StopOnSignal(), TrainingMetrics()):
        handler.attach(trainer)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers["a"], patience=0, threshold=10.0)
    stopping, plateau = EarlyStopping(evaluator, patience=2, min_delta=10.0), ReduceOnPlateau(evaluator, schedule)
    stopping.attach(trainer)
    plateau.attach(trainer)
    validation = ResumableLoader(torch.ones(5, 3, dtype=torch.float64), batch_size=2, shuffle=False)
    Validation(evaluator, validation, sanity=0).attach(trainer, Events.ITERATION_COMPLETED(every=3))
    Checkpoint(directory, every=4).attach(trainer)
    trainer.run(loader(), max_epochs=9)
    assert timer.summary()
    found = predict(evaluator, validation)
    drawn_once = drawn[-2:]
    return trainer, list(model.state_dict().values()), list(ema.state_dict().items()), stopping.num_bad, found, drawn_once


@pytest.mark.slow
def test_the_parts_of_a_run_notice_nothing_of_an_update_that_is_made_again(
    with_members: Callable[[FewMembers], None], tmp_path: Path
) -> None:
    """Several optimizers and limits, validation, early stopping, averages, schedules and predictions are bitwise the same."""
    trainer, values, ema, bad, predictions, drawn = part_state(FewMembers(), with_members, tmp_path / "plain")
    few = FewMembers({0: 2, 2: 1, 3: 1, 5: 1, 8: 3})
    again, values_again, ema_again, bad_again, predictions_again, drawn_again = part_state(
        few, with_members, tmp_path / "again"
    )

    assert trainer.state.iteration == again.state.iteration == 10  # EarlyStopping has asked for the end in update 9, of both
    assert (bad, drawn) == (bad_again, drawn_again)
    assert all(map(torch.equal, values, values_again))
    assert len(predictions) == 5
    assert torch.equal(predictions, predictions_again)
    assert str(ema) == str(ema_again)
    assert sorted(path.name for path in (tmp_path / "plain").iterdir()) == sorted(
        p.name for p in (tmp_path / "again").iterdir()
    )


def test_random_numbers_are_those_of_the_member(with_members: Callable[[FewMembers], None]) -> None:
    """A replica that is another member after a change draws what that member would have drawn."""

    class Moves(FewMembers):
        def renew(self, step: Callable[[], int]) -> None:
            super().renew(step)
            self.rank = 1
            self.size = 1

    def numbers(few: FewMembers) -> list[float]:
        with_members(few)
        drawn = list[float]()
        trainer = make()
        trainer.model.register_forward_hook(lambda *_: drawn.append(torch.rand(1).item()))
        trainer.run(loader(8), max_epochs=1)
        return drawn

    second = FewMembers()
    second.rank = 1
    of_first, of_second, moved = numbers(FewMembers()), numbers(second), numbers(Moves({1: 1}))

    assert moved[:2] == of_first[:2]
    assert moved[4:] == of_second[2:]  # two of the update that was taken back lie between


def test_a_run_without_a_quorum_ends_with_a_checkpoint(with_members: Callable[[FewMembers], None], tmp_path: Path) -> None:
    """Of the updates that are counted; the run resumes there, and ends as one that was not interrupted."""

    class Lost(FewMembers):
        def renew(self, step: Callable[[], int]) -> None:  # noqa: ARG002  # as its base class has it
            raise NoQuorumError("the lighthouse has gone")

    def trained(few: FewMembers, directory: Path) -> Any:
        with_members(few)
        trainer = make()
        checkpoint = Checkpoint(directory, every=100)
        checkpoint.attach(trainer)
        try:
            trainer.run(loader(), max_epochs=2)
        except NoQuorumError:
            assert checkpoint.latest is not None
            assert checkpoint.latest.name == "update-00000008"
        return trainer

    whole = trained(FewMembers(), tmp_path / "whole")
    assert trained(Lost({8: 1}), tmp_path / "lost").state.iteration == 8
    resumed = trained(FewMembers(), tmp_path / "lost")

    assert resumed.state_dict() == whole.state_dict()
    for one, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_replica_that_comes_after_a_request_to_stop_makes_no_update(
    with_members: Callable[[FewMembers], None],
) -> None:
    """It would go on alone otherwise, where the others have ended."""
    few = FewMembers()
    few.is_stopped = True
    with_members(few)
    trainer = make()
    trainer.run(loader(), max_epochs=2)

    assert trainer.state.iteration == 0


def test_a_replica_that_comes_after_a_request_to_stop_ends_with_the_state_of_the_others(
    with_members: Callable[[FewMembers], None], tmp_path: Path
) -> None:
    """And saves it, though it has resumed from an older checkpoint of its own; no epoch begins in which that was put back."""

    class Gives(FewMembers):
        def part(self, step: Callable[[], int], *, stopped: bool) -> None:  # noqa: ARG002  # as its base class has it
            self.state = self.capture()

    class Takes(FewMembers):
        def join(self, step: Callable[[], int], capture: Callable[[], Any], restore: Callable[[Any], None]) -> None:
            assert step() == 2  # from its own checkpoint
            super().join(step, capture, restore)
            restore(gives.state)
            self.is_stopped = True

    def trained(few: FewMembers, name: str, updates: int) -> Any:
        with_members(few)
        trainer = make()
        Checkpoint(tmp_path / name, every=100).attach(trainer)
        trainer.run(loader(), max_iters=updates)
        return trainer

    gives, stopped = Gives(), FewMembers()
    stopped.is_stopped = True
    trained(FewMembers(), "own", 2)
    others = trained(gives, "others", 4)
    comes = trained(Takes(), "own", 9)
    resumed = trained(stopped, "own", 9)

    for one in (comes, resumed):
        assert one.state.iteration == 4
        for of_one, of_others in zip(one.model.parameters(), others.model.parameters(), strict=True):
            assert torch.equal(of_one, of_others)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["EarlyStopping", "MinLearningRate"])
def test_a_stop_that_a_score_decides_travels_with_the_next_update(
    with_members: Callable[[FewMembers], None], name: str
) -> None:
    """The scores of two replicas may differ in their last bits, so a single replica may want to stop."""
    with_members(FewMembers())
    trainer = make()
    evaluator = create_evaluator(trainer.model, forward)
    optimizer = trainer.optimizers["optimizer"]
    if name == "EarlyStopping":
        EarlyStopping(evaluator, target=1e9).attach(trainer)
    else:
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=1e9, mode="max")
        ReduceOnPlateau(evaluator, schedule, mode="max").attach(trainer)
        MinLearningRate(optimizer, minimum=0.05).attach(trainer)
    wanted = list[tuple[int, bool]]()
    Validation(evaluator, [torch.ones(2, 3, dtype=torch.float64)], sanity=0).attach(
        trainer, Events.ITERATION_COMPLETED(every=2)
    )
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: wanted.append((trainer.state.iteration, trainer.requests.stop))
    )
    trainer.run(loader(), max_epochs=9)

    first = next(update for update, stops in wanted if stops)
    assert trainer.state.iteration == first + 1


def test_a_replica_whose_learning_rate_is_another_one_ends() -> None:
    """The score of an evaluation may differ in its last bits on one device, and so what a handler decides from it."""
    replicas = [members.Members("http://127.0.0.1:1") for _ in range(3)]
    for one, rate in zip(replicas, (0.05, 0.1, 0.1), strict=True):
        one.commit(1, (rate,))
    told = {"is_new": False, "ended_runs": 0, **ALIKE}
    named = [members._Participant(str(number), "", 1, {**told, "history": one._history}) for number, one in enumerate(replicas)]
    newest = members._newest(named)

    assert newest == 1
    with pytest.raises(FellBehindError, match="with other members or learning rates to update 1") as refusal:
        replicas[0]._check_places(named, named[0], named[newest])
    assert "\n" not in str(refusal.value)
    with pytest.raises(MembersChangedError):
        replicas[1]._check_places(named, named[1], named[newest])


def test_a_replica_that_sends_other_numbers_ends(with_members: Callable[[FewMembers], None], tmp_path: Path) -> None:
    """Vectors of two lengths were added up, which aborted another replica in C++ without a line, again and again."""
    few, told = FewMembers(), {"is_new": False, "ended_runs": 0, "history": "", **ALIKE}
    with_members(few)
    trainer = make()
    Checkpoint(tmp_path, every_seconds=60).attach(trainer)
    trainer.run(loader(), max_epochs=1)
    with_checkpoint = told | {"sends": few.sends}
    for alone, other, line in ((told, with_checkpoint, "(none), got Cadence"), (with_checkpoint, told, "(Cadence), got none")):
        named = [members._Participant("0", "", 1, alone), members._Participant("1", "", 1, other | {"is_new": True})]
        one = members.Members("http://127.0.0.1:1")
        with pytest.raises(MembersChangedError):  # it continues without the other one
            one._check_places(named, named[0], named[0])
        with pytest.raises(ValueError, match=rf"^handlers that send .* the other replicas {re.escape(line)}; ") as refusal:
            one._check_places(named, named[1], named[0])
        assert "\n" not in str(refusal.value)


def test_a_group_that_is_never_formed_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a member that was suspended while the others connected to it: torch would wait for ever."""
    process_group = pytest.importorskip("torchft.process_group", reason="elastic replicas need the extra ignite_train[elastic]")
    wait = threading.Event()
    monkeypatch.setattr(process_group.ProcessGroupGloo, "configure", lambda *_: wait.wait(60))
    monkeypatch.setattr(members, "_REBUILD_AT_MOST", 0.05)
    monkeypatch.setenv("IGNITE_TRAIN_PATIENCE_SECONDS", "0.2")
    data = {"is_new": True, "ended_runs": 0, "nonce": "", "key": "", "history": "", "stops": False, **ALIKE}
    only = SimpleNamespace(replica_id="", data=data, step=0, store_address="127.0.0.1:1")

    monkeypatch.setattr(members.Members, "_ask", lambda *_: [only])

    with pytest.raises(
        NoQuorumError, match=r"has named no members for 0.2 s; .*more than half of the living replicas must ask"
    ):
        members.Members("http://127.0.0.1:1").renew(lambda: 0)
    assert not wait.is_set()
    wait.set()


@pytest.mark.parametrize("is_silent", [False, True], ids=["that has ended with the run", "that waits for more members"])
def test_a_replica_does_not_wait_for_a_lighthouse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, is_silent: bool) -> None:
    """One that has made the last update ends well; one that was just starting says that nothing is left."""
    monkeypatch.setattr(members.Members, "_ended_runs", 0)  # which is put back
    ended, over = tmp_path / "ended", threading.Event()
    ended.touch()
    monkeypatch.setenv("IGNITE_TRAIN_ENDED", str(ended))
    monkeypatch.setenv("IGNITE_TRAIN_PATIENCE_SECONDS", "2" if not is_silent else "600")
    monkeypatch.setattr(members, "_LAST_ANSWER_SECONDS", 0.05)
    waited_for_an_answer = []

    def ask(*_: object) -> None:
        if is_silent and not over.wait(60):
            waited_for_an_answer.append(True)

    monkeypatch.setattr(members.Members, "_ask", ask)

    members.Members("http://127.0.0.1:1").part(lambda: 0, stopped=False)
    monkeypatch.setattr(members.Members, "_ended_runs", 0)  # as in a process of its own
    with pytest.raises(NoQuorumError, match=r"^the run has ended while this replica was starting"):
        members.Members("http://127.0.0.1:1").renew(lambda: 0)
    over.set()
    assert not waited_for_an_answer


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
def test_a_bad_number_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """One line names the variable."""
    monkeypatch.setenv("IGNITE_TRAIN_PATIENCE_SECONDS", text)

    with pytest.raises(ValueError, match=rf"^IGNITE_TRAIN_PATIENCE_SECONDS .* seconds above 0, got '{text}'$"):
        members.Members("http://127.0.0.1:1")


@pytest.mark.parametrize("again", [False, True], ids=["and ends", "and then begins another run"])
def test_a_run_that_has_nothing_to_do_leaves_the_sign_of_its_end(
    with_members: Callable[[FewMembers], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, again: bool
) -> None:
    """As where all replicas are started after the last update: by that file the launcher knows that nothing is left."""
    monkeypatch.setattr(members.Members, "_ended_runs", 0)  # which is put back
    with_members(FewMembers())
    whole = make()
    whole.run(loader(), max_epochs=2)
    monkeypatch.setenv("IGNITE_TRAIN_ENDED", str(tmp_path / "ended"))
    real = members.Members("http://127.0.0.1:1")
    monkeypatch.setattr(real, "_connect", lambda: None)
    monkeypatch.setattr(real, "renew", lambda step: None)
    with_members(real)  # type: ignore[arg-type]  # the real ones
    resumed = make()
    resumed.load_state_dict(whole.state_dict())
    resumed.run(loader(), max_epochs=2)

    assert (tmp_path / "ended").exists()
    if again:  # the sign of the run before must not be taken for that of this one
        real.join(lambda: 0, lambda: torch.zeros(1), lambda content: None)
        real.leave()
        assert not (tmp_path / "ended").exists()


STAGES = """
import logging, os, sys, torch
logging.basicConfig(level=logging.INFO, format="%(message)s")
from elastic_script import Samples, make_model
from ignite_train import ForwardOutput, ResumableLoader, UpdateOptions, create_trainer
torch.manual_seed(0)
model = make_model()
def forward(model, micro_batch):
    _, x, y = micro_batch
    return ForwardOutput((model(x) - y).square().sum(), sample_size=len(y))
for stage in (1, 2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    trainer = create_trainer(model, optimizer, forward, seed=stage, options=UpdateOptions(reduction="elastic"))
    trainer.run(ResumableLoader(Samples(24), batch_size=2, shuffle=True), max_epochs=2)
    line = f"{stage} {trainer.state.iteration} {[value.sum().item() for value in model.parameters()]}"
    os.write(1, f"{line}\\n".encode())  # at once: both replicas write to one pipe
"""


@pytest.mark.slow
def test_stages_with_a_trainer_each_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second trainer took the end of the first one's run for that of its own, and refused to begin."""
    pytest.importorskip("torchft", reason="elastic replicas need the extra ignite_train[elastic]")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # tests/support
    (tmp_path / "stages.py").write_text(STAGES)
    done = launch("--replicas", "2", "--min-replicas", "2", str(tmp_path / "stages.py"))

    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line[:4] for line in lines] == ["1 12", "1 12", "2 12", "2 12"]
    assert lines[0] == lines[1] != lines[2] == lines[3]
    assert "makes run" not in done.stderr  # both are always in the same


@pytest.mark.parametrize("own", [0, 1, 2])
def test_a_replica_that_joins_another_run_of_the_script_says_so(
    own: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was started again, is in the first run, and would read its data with the state of the second, without a word."""
    process_group = pytest.importorskip("torchft.process_group", reason="elastic replicas need the extra ignite_train[elastic]")
    monkeypatch.setattr(process_group.ProcessGroupGloo, "configure", lambda *_: None)
    monkeypatch.setattr(members.Members, "_receive_state", lambda *_: None)
    data = {"is_new": False, "ended_runs": 1, "nonce": "", "key": "", "history": "", "stops": False, **ALIKE}
    running = members._Participant("0:some", "127.0.0.1:1", 15, data)
    mine = members._Participant("1:other", "127.0.0.1:1", 0, data | {"is_new": True, "ended_runs": own})
    one = members.Members("http://127.0.0.1:1")
    one._identity = mine.replica_id
    one._form([running, mine])

    line = f"this replica makes run {own + 1} since its start, and takes over the state of replica 0, which makes run 2: "
    assert [message.startswith(line) for message in caplog.messages] == [True] * (own != 1)


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ignite_train.elastic", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--replicas", "2", "no_such_file.py"], "script must be a file, got 'no_such_file.py'"),
        (["--replicas", "0", __file__], "replicas must be at least 1, got 0"),
        (["--replicas", "2", "--min-replicas", "3", __file__], "min_replicas must be at most replicas=2, got 3"),
        (["--replicas", "2", "--hang-seconds", "0", __file__], "hang_seconds must be greater than 0"),
        (["--replicas", "2", "--max-restarts", "-1", __file__], "max_restarts must be at least 0"),
    ],
)
def test_the_launcher_refuses_bad_arguments(arguments: list[str], message: str) -> None:
    """In one line, before a process is started."""
    pytest.importorskip("torchft", reason="elastic replicas need the extra ignite_train[elastic]")
    done = launch(*arguments)

    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"python -m ignite_train.elastic: error: {message}")


@pytest.mark.slow
def test_the_launcher_replaces_a_replica_that_was_stopped_or_killed(tmp_path: Path) -> None:
    """One that a signal has suspended is killed after its time-out; each is started again until one has ended well."""
    pytest.importorskip("torchft", reason="elastic replicas need the extra ignite_train[elastic]")
    from ignite_train.elastic import ElasticLauncher

    script = (
        "import os, signal, sys, time, pathlib\n"
        "first = pathlib.Path(sys.argv[1]) / os.environ['IGNITE_TRAIN_REPLICA']\n"
        "if not first.exists():\n"
        "    first.touch()\n"
        "    os.kill(os.getpid(), signal.SIGSTOP if first.name == '0' else signal.SIGKILL)\n"
        "while not (first.parent / '0').exists() or not (first.parent / 'enough').exists(): time.sleep(0.01)\n"
        "pathlib.Path(os.environ['IGNITE_TRAIN_ENDED']).touch()\n"
    )
    command = [sys.executable, "-S", "-c", script, str(tmp_path)]
    with ElasticLauncher(command, 2, hang_seconds=0.3) as launcher:
        deadline = time.monotonic() + 60
        while launcher.num_restarts < 2:
            assert not launcher.look()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (tmp_path / "enough").touch()
        assert launcher.run() == 0


def test_the_launcher_goes_on_where_it_has_killed_all_replicas(tmp_path: Path) -> None:
    """It took replicas that it had just killed, since they were stopped, for replicas that have ended for good."""
    pytest.importorskip("torchft", reason="elastic replicas need the extra ignite_train[elastic]")
    from ignite_train.elastic import ElasticLauncher

    script = (
        "import os, signal, sys, pathlib\n"
        "first = pathlib.Path(sys.argv[1]) / 'first'\n"
        "if not first.exists():\n"
        "    first.touch()\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "pathlib.Path(os.environ['IGNITE_TRAIN_ENDED']).touch()\n"
    )
    with ElasticLauncher([sys.executable, "-S", "-c", script, str(tmp_path)], 1, hang_seconds=0.1) as launcher:
        assert launcher.run() == 0
    assert launcher.num_restarts == 1


@pytest.mark.parametrize(("makes", "restarts", "status"), [(1, 1, 0), (9, 2, 1)], ids=["once", "each time"])
def test_the_launcher_replaces_a_replica_that_ends_well_before_the_last_update(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, makes: int, restarts: int, status: int
) -> None:
    """The others have not ended the run; where it does so again and again, they are ended, and the run has failed."""
    pytest.importorskip("torchft", reason="elastic replicas need the extra ignite_train[elastic]")
    from ignite_train.elastic import ElasticLauncher

    script = (
        "import os, sys, time, pathlib\n"
        "directory, makes = pathlib.Path(sys.argv[1]), int(sys.argv[2])\n"
        "if os.environ['IGNITE_TRAIN_REPLICA'] == '1':\n"
        "    (directory / str(os.getpid())).touch()\n"
        "    if len([*directory.iterdir()]) <= makes: sys.exit(0)\n"
        "    pathlib.Path(os.environ['IGNITE_TRAIN_ENDED']).touch()\n"
        "while not os.path.exists(os.environ['IGNITE_TRAIN_ENDED']): time.sleep(0.01)\n"
    )
    with ElasticLauncher([sys.executable, "-S", "-c", script, str(tmp_path), str(makes)], 2) as launcher:
        deadline = time.monotonic() + 60
        while not launcher.look():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert launcher.run() == (status and 128 + signal.SIGTERM)
    assert launcher.num_restarts == restarts
    line = "replica 1 has ended with status 0 before the last update"
    told = "; a script whose trainer is not elastic must make the file in $IGNITE_TRAIN_ENDED when it is done"
    assert caplog.messages[:restarts] == [f"{line} and is started again{told}"] * restarts
    assert caplog.messages[restarts:] == [f"{line} 3 times in a row soon after it was started"] * status


FAILURES = {
    "at once, by a signal": ("os.abort()", 100, 2, "-6 3 times in a row soon after it was started"),
    "later": ("sys.exit(4)", 4, 4, "4 and max_restarts=4 is used up; correct why"),
    "the first time": ("sys.exit(4)", 0, 0, "4 and max_restarts=0 is used up; correct why"),
}


@pytest.mark.parametrize("name", list(FAILURES))
def test_the_launcher_starts_no_replica_again_for_ever(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However it fails, and however long after its start: here no time is short."""
    pytest.importorskip("torchft", reason="elastic replicas need the extra ignite_train[elastic]")
    from ignite_train.elastic import ElasticLauncher

    fails, max_restarts, restarts, says = FAILURES[name]
    if name == "later":
        monkeypatch.setattr("ignite_train.tools.elastic._AT_ONCE_SECONDS", 0.0)
    command = [sys.executable, "-S", "-c", f"import os, sys; {fails}"]
    with ElasticLauncher(command, 1, max_restarts=max_restarts) as launcher:
        deadline = time.monotonic() + 60
        while not launcher.look():
            assert time.monotonic() < deadline
            assert launcher.num_restarts < 10, "it is started again for ever"
            time.sleep(0.01)
        assert launcher.run() == (134 if fails == "os.abort()" else 4)
    assert launcher.num_restarts == restarts
    assert caplog.messages[-1].startswith(f"replica 0 has ended with status {says}")


def signalled(directory: Path, at_first: str = "") -> tuple[int, int]:
    """The status of a launcher whose replicas all run when it passes SIGTERM on, and how many were started again.

    Args:
        directory: for the signs that they run.
        at_first: a line of their script.
    """
    pytest.importorskip("torchft", reason="elastic replicas need the extra ignite_train[elastic]")
    from ignite_train.elastic import ElasticLauncher

    script = (
        f"import os, signal, sys, time, pathlib\n{at_first}\n"
        "(pathlib.Path(sys.argv[1]) / os.environ['IGNITE_TRAIN_REPLICA']).touch()\n"
        "time.sleep(60)\n"
    )
    with ElasticLauncher([sys.executable, "-S", "-c", script, str(directory)], 2) as launcher:
        deadline = time.monotonic() + 60
        while len(list(directory.iterdir())) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        launcher.pass_on(signal.SIGTERM)
        return launcher.run(), launcher.num_restarts


def test_the_launcher_fails_where_no_replica_has_ended_the_run(tmp_path: Path) -> None:
    """Though each of them has ended well, as after a signal that their script takes for itself."""
    status, _ = signalled(tmp_path, at_first="signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))")
    assert status == 1


def test_the_launcher_passes_a_signal_on(tmp_path: Path) -> None:
    """All replicas get it, and none is started again."""
    assert signalled(tmp_path) == (128 + signal.SIGTERM, 0)
