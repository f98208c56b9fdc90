"""Each script of examples/programs does what the same program does in plain torch, however it is cut, and when it is killed."""

from __future__ import annotations

import importlib
import itertools
import os
import random
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch.nn.utils import parameters_to_vector

from bits import bit_by_bit
from ignite_train import Trainer, TrainEvents, create_trainer
from ignite_train.handlers import Checkpoint
from processes import DEADLINE_SECONDS
from programs_by_hand import BY_HAND, ByHand, clip_uncut, uncut
from ranks import RanksFailedError, run_ranks
from tiers import nightly, slow

pytestmark = pytest.mark.usefixtures("no_gpu")

FOLDER = Path(__file__).parents[2] / "examples/programs"
PAGE = FOLDER.parent.parent / "docs/programs.md"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "workbench")
MAX_LINES, MAX_LOOP = 120, 30

# Programs whose ranks may have fewer micro-batches than others, or none; and after how many updates they are compared, since a
# difference in rounding grows with the updates.
ON_DEMAND = {
    "ppo": 2,  # rounds of several updates
    "prioritised_replay": 6,  # what the update gives for single samples
    "stylegan2": 3,  # other forwards for some updates
    "bert": 2,  # losses with denominators of their own
    "fixmatch": 10,  # two loaders, and a loss that is 0 until the model is sure of something
    "pcgrad": 3,  # several gradients of one update
    "dp_sgd": 3,  # gradients of single samples
}
UPDATES = {"time_sequence": 3}
RESUMED_UPDATES, KILLED_UPDATES = 4, 12
TWO_TRAINERS = ("dcgan", "wgan_gp")
# Programs that save themselves, and what counts their rounds.
ROUNDS = {"ppo": "walkers", "prioritised_replay": "memory", "stylegan2": "loop"}
RANKS, CUTS = (1, 2, 3), (1, 5)  # micro-batches of an update, over all ranks: 2 and 3 ranks have unequal numbers of them


def program(name: str, folder: Path = FOLDER) -> Any:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # as when the script is started
    return importlib.import_module(name)


@contextmanager
def factors_that_show(script: Any) -> Iterator[None]:
    """Within it Adam has a large epsilon. With a small one it steps alike along a gradient and along twice that."""
    build = script.build

    def with_large_epsilon() -> Any:
        parts = build()
        values = [value for part in parts for value in (part.values() if isinstance(part, dict) else [part])]
        optimizers = [value for value in values if isinstance(value, torch.optim.Optimizer)]
        for group in (group for optimizer in optimizers for group in optimizer.param_groups if "eps" in group):
            group["eps"] = 0.01
        return parts

    script.build = with_large_epsilon
    yield
    script.build = build


@contextmanager
def cut_into(number: int, name: str) -> Iterator[None]:
    """Within it an update of the program has so many micro-batches, over all ranks, of unlike sizes: some may be empty."""
    script = program(name)

    def mine(group: list[Any]) -> list[Any]:
        wholes = uncut(group)
        ends = [[round(len(whole) * (place / number) ** 1.5) for place in range(1, number)] for whole in wholes]
        parts = [whole.tensor_split(at) for whole, at in zip(wholes, ends, strict=True)]
        return list(zip(*parts, strict=True))[idist.get_rank() :: idist.get_world_size()]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "mine", mine)
        if name == "dp_sgd":
            patch.setattr(script, "GROUP", number)  # a micro-batch counts for a share of the expected samples
        yield


def ours(name: str, num_updates: int) -> tuple[torch.Tensor, list[float]]:
    """In float64, so that what differs is either rounding or wrong."""
    torch.set_default_dtype(torch.float64)
    with factors_that_show(program(name)):
        model, losses = program(name).train(num_updates)
    return parameters_to_vector(model.parameters()).detach(), losses


def ours_cut(number: int, name: str, num_updates: int) -> tuple[torch.Tensor, list[float]]:
    with cut_into(number, name):
        return ours(name, num_updates)


def by_hand(name: str, num_updates: int) -> tuple[torch.Tensor, list[float]]:
    return loop(BY_HAND[name], name, num_updates)


def loop(function: ByHand, name: str, num_updates: int) -> tuple[torch.Tensor, list[float]]:
    with factors_that_show(program(name)):
        model, losses = function(program(name), num_updates)
    return parameters_to_vector(model.parameters()).detach(), losses


@pytest.fixture(autouse=True)
def _default_dtype() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def assert_equal_to_rounding(found: tuple[torch.Tensor, list[float]], expected: tuple[torch.Tensor, list[float]]) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(expected[1]), rtol=1e-8, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_program_is_the_loop_by_hand(name: str) -> None:
    """Parameters and losses are equal to rounding, after an epoch or more."""
    number = UPDATES.get(name, 18)
    expected = by_hand(name, number)

    assert_equal_to_rounding(ours(name, number), expected)
    assert len(expected[1]) == number


@pytest.mark.sampled(0, slow=6)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_program_is_the_loop_by_hand_on_two_ranks(name: str) -> None:
    """Two ranks that share the micro-batches of each group end where one process does."""
    number = UPDATES.get(name, 18)
    expected = by_hand(name, number)

    for found in run_ranks(ours, name, number):
        assert_equal_to_rounding(found, expected)


def in_its_tier(place: int, name: str, ranks: int, *more: int) -> Any:
    """A case of the two tests below: one in ten is slow, so that each number of ranks has some; the others are nightly."""
    return slow(name, ranks, *more) if place % 10 == 0 else nightly(name, ranks, *more)


@pytest.mark.parametrize(
    ("name", "ranks", "number"),
    [
        (name, ranks, number) if (ranks, number) == (1, 5) else in_its_tier(place, name, ranks, number)
        for place, (number, name, ranks) in enumerate(itertools.product(CUTS, ON_DEMAND, RANKS))
    ],
)
def test_a_program_is_the_loop_by_hand_however_it_is_cut(name: str, ranks: int, number: int) -> None:
    """One micro-batch of all samples, so that other ranks have none, and five of unlike sizes, on one rank, two and three."""
    num_updates = max(ON_DEMAND[name], 3 if ranks == 1 else 6)
    expected = by_hand(name, num_updates)

    if ranks == 1:
        assert_equal_to_rounding(ours_cut(number, name, num_updates), expected)
        return
    for found in run_ranks(ours_cut, number, name, num_updates, world_size=ranks):
        assert_equal_to_rounding(found, expected)


def test_clip_is_the_loss_of_the_whole_batch() -> None:
    """What is cut into micro-batches, and put together again, has the gradients of one batch that is not cut."""
    assert_equal_to_rounding(ours("clip", 6), loop(clip_uncut, "clip", 6))


class StoppedError(Exception):
    """Ends a program in the middle."""


def saved(name: str, directory: Path, num_updates: int, watch: Callable[[Trainer], Any], every: int = 2) -> Any:
    """Trains a program that saves now and then the updates of its last trainer; one that has rounds saves them itself.

    `watch` gets each trainer.
    """
    script, made = program(name), dict[str, Any]()

    def create(model: torch.nn.Module, optimizer: Any, forward: Any, **arguments: Any) -> Trainer:
        trainer = create_trainer(model, optimizer, forward, **arguments)
        watch(trainer)
        if not made and name in TWO_TRAINERS:
            made.update(net=model, optimizer=optimizer, trainer=trainer)
        elif name not in ROUNDS:
            Checkpoint(directory, every=every, to_save=made).attach(trainer)
        return trainer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "create_trainer", create)
        model, losses = script.train(num_updates, *((directory,) if name in ROUNDS else ()))
    return bit_by_bit(model.state_dict()), losses


def saved_twice(name: str, directory: Path) -> tuple[Any, Any]:
    """What a program comes to in one piece, and in two: the second continues after the second update.

    It fails after the third update of the trainer that saves, or after the first one of the third round.
    """

    def is_due(trainer: Any, number: int) -> bool:
        if trainer.checkpoint is None:
            return False  # the other trainer of the round
        return (trainer.checkpoint.to_save[ROUNDS[name]].rounds + 1 if name in ROUNDS else number) == 3

    def fail() -> None:
        raise StoppedError

    whole = saved(name, directory / "whole", RESUMED_UPDATES, lambda trainer: None)
    with pytest.raises(StoppedError):
        saved(
            name,
            directory / "stopped",
            RESUMED_UPDATES,
            lambda trainer: trainer.add_event_handler(Events.ITERATION_COMPLETED(event_filter=is_due), fail),
        )
    return whole, saved(name, directory / "stopped", RESUMED_UPDATES, lambda trainer: None)


def check_resumed(whole: Any, resumed: Any) -> None:
    assert resumed[0] == whole[0], "bitwise the same parameters"
    assert resumed[1] == whole[1][2:], "and it did nothing twice"


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_program_that_failed_resumes_bitwise(name: str, tmp_path: Path) -> None:
    """With a `Checkpoint` on its trainer, or on the one that ends a round, and the other trainer in `to_save`."""
    check_resumed(*saved_twice(name, tmp_path))


@pytest.mark.parametrize(
    "name", [slow(name) if name in ("dcgan", "word_lstm", "sam", "ppo", "bert") else nightly(name) for name in SCRIPTS]
)
def test_a_program_that_failed_resumes_bitwise_on_two_ranks(name: str, tmp_path: Path) -> None:
    """As above."""
    for whole, resumed in run_ranks(saved_twice, name, tmp_path):
        check_resumed(whole, resumed)


class Reaper:
    """Counts moments inside the updates of a program on this rank, and ends all ranks at one of them as `kill -9` does."""

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0
        others = idist.all_gather(os.getpid())
        self._pids = sorted(map(int, others if isinstance(others, (list, torch.Tensor)) else [others]), key=os.getpid().__eq__)

    def watch(self, trainer: Trainer) -> None:
        for event in (TrainEvents.FORWARD_COMPLETED, TrainEvents.STEP_COMPLETED, Events.ITERATION_COMPLETED):
            trainer.add_event_handler(event, self)

    def __call__(self) -> None:
        self.seen += 1
        if self.seen == self.at:
            for pid in self._pids:  # this one is the last
                os.kill(pid, signal.SIGKILL)


def life(name: str, directory: Path, at: int = 0, victim: int = 0) -> tuple[Any, list[float], int]:
    """What a program comes to that saves each update or round, and how many moments it had; one rank may end it before."""
    reaper = Reaper(at if idist.get_rank() == victim else 0)
    with cut_into(5, name):
        return (*saved(name, directory, KILLED_UPDATES, reaper.watch, every=1), reaper.seen)


@pytest.mark.parametrize(
    ("name", "ranks"), [in_its_tier(place, *case) for place, case in enumerate(itertools.product(ON_DEMAND, RANKS))]
)
def test_a_program_that_is_killed_twice_resumes_bitwise(name: str, ranks: int, tmp_path: Path) -> None:
    """At a random moment of a random update, with accumulation, on one rank, two and three."""
    chance = random.Random(f"{name} {ranks}")  # noqa: S311
    whole = run_ranks(life, name, tmp_path / "whole", world_size=ranks)
    victim = chance.randrange(ranks)
    moments = whole[victim][2]
    for first, last in ((moments // 2, 3 * moments // 4), (1, moments // 5)):
        with pytest.raises(RanksFailedError, match=f"rank {victim}: died without a word, with exit code -9"):
            run_ranks(life, name, tmp_path / "killed", chance.randint(first, last), victim, world_size=ranks)

    for (bits, numbers, _), (found, rest, _) in zip(
        whole, run_ranks(life, name, tmp_path / "killed", world_size=ranks), strict=True
    ):
        assert found == bits
        assert 0 < len(rest) < len(numbers)
        assert rest == numbers[-len(rest) :]


@pytest.mark.sampled(0, slow=11)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_program_runs_as_it_is_started(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """`python examples/programs/NAME.py` trains and says how it went."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.syspath_prepend(str(FOLDER))
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")

    assert "in the first updates" in capsys.readouterr().out


@pytest.mark.nightly
def test_a_program_runs_under_torchrun() -> None:
    """On two processes, of which the first reports."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(FOLDER / "maml.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("in the first updates") == 1


def test_each_script_is_in_the_list() -> None:
    """There is a loop by hand for each, and it fits on a few pages."""
    assert sorted(BY_HAND) == SCRIPTS
    assert [name for name in SCRIPTS if len((FOLDER / f"{name}.py").read_text().splitlines()) > MAX_LINES] == []


@pytest.mark.slow
@pytest.mark.skipif(not PAGE.is_file(), reason="looks at a checkout, which is not here")
def test_the_table_has_the_lines_of_today() -> None:
    """Each script has a row in docs/programs.md, whose numbers of lines `python benchmarks/programs.py` would write again."""
    rows = re.findall(r"^\| \[`(\w+)`\]\(\S+\) \| .* \| (\d+) \| (\d+) \|", PAGE.read_text(), re.MULTILINE)
    counted = {name: program("programs", PAGE.parent.parent / "benchmarks").lines(name) for name in SCRIPTS}

    assert {name: (int(by_hand), int(loop)) for name, by_hand, loop in rows} == counted
    assert max(loop for _, loop in counted.values()) <= MAX_LOOP
