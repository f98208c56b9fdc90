"""One case of a library, and the five checks that each case must pass. A file beside this one has the cases of its library.

The model of a case is trained by a loop in plain torch, and by a trainer in several ways:

- `one`: each micro-batch is an update;
- `four`: four micro-batches are an update;
- `ranks`: two gloo processes, with two micro-batches each to an update;
- `killed`: in the middle of the second epoch SIGKILL ends the process; the run that resumes must end with the same bits in
  weights, optimizer and everything else that was saved as one that was left alone;
- `weights`: what was trained goes out of the checkpoint, and into a fresh model, by plain torch, by ours and by the library.

The first three are compared with the loop in plain torch.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import numpy as np
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.utils import _pytree as pytree

from ignite_train import (
    Evaluator,
    ForwardOutput,
    Trainer,
    TrainEvents,
    UpdateOptions,
    create_evaluator,
    create_trainer,
)
from ignite_train.checkpoint import consolidate, load_weights
from ignite_train.handlers import Checkpoint, Validation
from ranks import Ranks

CHECKS = ("one", "four", "ranks", "killed", "weights")
EPOCHS = 2
WORLD_SIZE = 2
KILLED_IN = 7  # of 8 updates, in the second epoch
SECONDS = 300.0


@dataclass(frozen=True)
class Around:
    """What a script has beside model and optimizer, such as a schedule or an average.

    Attributes:
        after_step: is called after each step, in both loops.
        to_save: what of it a checkpoint must hold.
    """

    after_step: Callable[[], Any] = lambda: None
    to_save: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Attached:
    """What the handlers of a library leave behind.

    Attributes:
        look: is called at the end of the run, and raises if they did not do what they are for.
        to_save: what of them a checkpoint must hold.
    """

    look: Callable[[], Any] = lambda: None
    to_save: Mapping[str, Any] = field(default_factory=dict)


def plain_sgd(model: nn.Module) -> Optimizer:
    """Differences that come from rounding stay as small as they are."""
    return SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """Something that is tried with a library.

    Attributes:
        name: what is tried, for the table.
        model: makes the model.
        data: the loader of a rank, for (rank, world size): 8 micro-batches on one rank and 4 on each of two.
        forward: as for `create_trainer`. The loop by hand calls it too.
        optimizer: makes the optimizer of a model.
        around: makes what the script has beside them, of model and optimizer.
        attach: attaches handlers of the library to the trainer and evaluator of the complete run.
        writes: writes the weights by the library's own function into a folder, and returns what `load_weights` is to read.
        reads: makes a model by the library's own function from the file that `consolidate` has written; or from the shards of
            safetensors in the folder `hub` beside it.
        options: as for `create_trainer`.
        has_room: whether there is memory for a micro-batch; the trainer's forward runs out of it where there is none.
        dtype: the default one of torch, while the case is tried.
        tolerance: the largest difference from the loop by hand, in parts of the largest number of its tensor.
        not_tried: the reasons, by check.
        known: checks that fail, and why; they are tried, and must fail.
    """

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[int, int], Iterable[Any]]
    forward: Callable[[nn.Module, Any], Any]
    optimizer: Callable[[nn.Module], Any] = plain_sgd
    around: Callable[[nn.Module, Any], Around] = lambda model, optimizer: Around()
    attach: Callable[[Trainer, Evaluator], Attached] = lambda trainer, evaluator: Attached()
    writes: Callable[[nn.Module, Path], Path] | None = None
    reads: Callable[[Path], nn.Module] | None = None
    options: UpdateOptions = field(default_factory=UpdateOptions)
    has_room: Callable[[Any], bool] | None = None
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-6
    not_tried: Mapping[str, str] = field(default_factory=dict)
    known: Mapping[str, str] = field(default_factory=dict)


def dealt(make: Callable[[], list[Any]]) -> Callable[[int, int], list[Any]]:
    """The `data` of a case whose micro-batches are dealt out to the ranks."""
    return lambda rank, world_size: make()[rank::world_size]


def seed(number: int) -> None:
    """Sets the generators of Python, NumPy and torch."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def made(case: Case, number: int = 0) -> nn.Module:
    """The model, with the weights of this seed."""
    seed(number)
    return case.model()


# --- training -----------------------------------------------------------------------------------------------------------------


def by_hand(case: Case, accumulation_steps: int, world_size: int = 1) -> tuple[dict[str, Any], list[float]]:
    """The weights and the losses of a loop in plain torch, over the data of all ranks."""
    model = made(case)
    optimizer = case.optimizer(model)
    around, losses = case.around(model, optimizer), []
    seed(1)
    loaders = [case.data(rank, world_size) for rank in range(world_size)]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for epoch in range(EPOCHS):
        for loader in loaders:
            say_epoch(loader, epoch)
        for shares in groups([iter(loader) for loader in loaders], accumulation_steps):
            loss, size, sums = 0.0, 0.0, [None for _ in parameters]
            for group in shares:
                optimizer.zero_grad()
                for micro_batch in group:
                    output = whole(case.forward(model, micro_batch))
                    output.loss.backward()
                    loss, size = loss + float(output.loss.detach()), size + float(output.sample_size)
                sums = [added(one, parameter.grad) for one, parameter in zip(sums, parameters, strict=True)]
            for one, parameter in zip(sums, parameters, strict=True):
                parameter.grad = None if one is None else one * (1 / size)
            optimizer.step()
            around.after_step()
            losses.append(loss / size)
    return model.state_dict(), losses


def say_epoch(loader: Any, epoch: int) -> None:
    """Tells a loader and its dataset which epoch it is, as the documentation of datasets asks for."""
    for one in (loader, *([loader.dataset] if hasattr(loader, "dataset") else [])):
        if hasattr(one, "set_epoch"):
            one.set_epoch(epoch)


def added(one: Tensor | None, two: Tensor | None) -> Tensor | None:
    """The sum over ranks, of which some may have no gradient."""
    if one is None or two is None:
        return two if one is None else one
    return one + two


def whole(output: Any) -> ForwardOutput:
    """What forward has returned, with all of its fields; of a bare mean the weight is 1."""
    return output if isinstance(output, ForwardOutput) else ForwardOutput(output, 1.0)


def groups(iterators: list[Iterator[Any]], accumulation_steps: int) -> Iterator[list[list[Any]]]:
    """The micro-batches of each update of an epoch, by rank."""
    while any(shares := [list(itertools.islice(each, accumulation_steps)) for each in iterators]):
        yield shares


@dataclass
class Run:
    """A trainer, and what it moves."""

    model: nn.Module
    optimizer: Any
    around: Around
    trainer: Trainer
    loader: Iterable[Any]
    attached: Attached = field(default_factory=Attached)
    losses: list[float] = field(default_factory=list)

    @property
    def to_save(self) -> dict[str, Any]:
        """Beside model and optimizer."""
        return {**self.around.to_save, **self.attached.to_save}

    def start(self) -> None:
        """Trains to the end."""
        seed(1)
        self.trainer.add_event_handler(TrainEvents.STEP_COMPLETED, lambda: self.around.after_step())
        self.trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: self.losses.append(loss_of(self.trainer)))
        self.trainer.run(self.loader, max_epochs=EPOCHS)

    def contents(self) -> dict[str, Any]:
        """Everything that a resumed run must have in the end."""
        saved = {name: one.state_dict() for name, one in self.to_save.items()}
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "to_save": saved}


def loss_of(trainer: Trainer) -> float:
    """The loss of the latest update."""
    assert trainer.state.update_output is not None
    return trainer.state.update_output.loss


def run_of(case: Case, accumulation_steps: int) -> Run:
    """A trainer in this process, which may be one of several."""
    model = made(case)
    optimizer = case.optimizer(model)
    wraps = idist.get_world_size() > 1 and case.options.reduction == "auto"
    wrapped = DistributedDataParallel(model) if wraps else model
    trainer = create_trainer(
        wrapped, optimizer, cramped(case), accumulation_steps=accumulation_steps, options=case.options, protect=False
    )
    loader = case.data(idist.get_rank(), idist.get_world_size())
    return Run(model, optimizer, case.around(model, optimizer), trainer, loader)


def cramped(case: Case) -> Callable[[nn.Module, Any], Any]:
    """The forward of a case, which has memory for some micro-batches only."""
    has_room = case.has_room
    if has_room is None:
        return case.forward

    def forward(model: nn.Module, micro_batch: Any) -> Any:
        if not has_room(micro_batch):
            raise torch.OutOfMemoryError("more than has room in this case")
        return case.forward(model, micro_batch)

    return forward


# What cuts micro-batches that have no room; on several ranks it needs the explicit reduction.
HALVED = UpdateOptions(on_out_of_memory="split", reduction="explicit")


def trained(case: Case, accumulation_steps: int) -> tuple[dict[str, Any], list[float]]:
    """The weights and the losses of a trainer."""
    run = run_of(case, accumulation_steps)
    run.start()
    return run.model.state_dict(), run.losses


def complete_run(case: Case, directory: Path, killed_in: int | None = None) -> Run:
    """A run as in a script, with validation, checkpoints and the library's own handlers."""
    run = run_of(case, 2)
    evaluator = create_evaluator(run.model, case.forward)
    run.attached = case.attach(run.trainer, evaluator)
    Validation(evaluator, list(itertools.islice(case.data(0, 1), 2))).attach(run.trainer)
    Checkpoint(directory, every=2, to_save=run.to_save, asynchronous=False).attach(run.trainer)
    if killed_in is not None:
        run.trainer.add_event_handler(Events.ITERATION_STARTED(once=killed_in), lambda: os.kill(os.getpid(), signal.SIGKILL))
    return run


def run_to_its_end(case: Case, directory: Path) -> Run:
    """A complete run that is left alone, or one that resumes."""
    run = complete_run(case, directory)
    run.start()
    run.attached.look()
    return run


# --- the checks ---------------------------------------------------------------------------------------------------------------


class Tried:
    """The checks of one case. Each returns how near the result was."""

    def __init__(self, library: str, case: Case, ranks: Ranks, place: Path) -> None:
        self.library, self.case, self.ranks, self.place = library, case, ranks, place
        self._alone: Run | None = None

    def one(self) -> str:
        return compared(self.case, trained(self.case, 1), by_hand(self.case, 1))

    def four(self) -> str:
        return compared(self.case, trained(self.case, 4), by_hand(self.case, 4))

    def ranks_(self) -> str:
        both = self.ranks.run(_trained_on_rank, self.library, self.case.name, timeout_seconds=SECONDS)
        apart = first_difference(both[0], both[1])
        assert apart is None, f"the ranks differ in {apart}"
        return compared(self.case, both[0], by_hand(self.case, 2, WORLD_SIZE))

    def killed(self) -> str:
        directory = self.place / "killed"
        child = multiprocessing.get_context("fork").Process(target=_run_and_be_killed, args=(self.case, directory))
        child.start()
        child.join(SECONDS)
        died = child.exitcode
        child.kill()
        assert died == -signal.SIGKILL, f"the run that was to be killed ended with {died}"
        resumed, alone = run_to_its_end(self.case, directory), self.alone()
        done = len(alone.losses) - len(resumed.losses)
        assert done >= KILLED_IN // 2, f"the run resumed after update {done}, not after {KILLED_IN - 1}"
        assert resumed.losses == alone.losses[done:], f"losses {resumed.losses} and not {alone.losses[done:]}"
        apart = first_difference(resumed.contents(), alone.contents())
        assert apart is None, f"{apart} differs from the run that was left alone"
        return "bitwise"

    def weights(self) -> str:
        run, file = self.alone(), self.place / "weights.pt"
        expected = run.model.state_dict()
        consolidate(self.place / "alone", file)
        by_torch, by_ours = made(self.case, 7), made(self.case, 8)
        by_torch.load_state_dict(torch.load(file))
        load_weights(by_ours, self.place / "alone")
        found = {"torch.load": by_torch, "load_weights": by_ours}
        if all(type(value) is Tensor for value in expected.values()):
            hub = self.place / "hub"
            hub.mkdir()
            consolidate(self.place / "alone", hub / "model.safetensors", max_shard_bytes=4000)
            found["load_weights of shards of safetensors"] = model = made(self.case, 10)
            load_weights(model, hub)
        if self.case.writes is not None:
            (self.place / "written").mkdir()
            found["load_weights of the library's file"] = model = made(self.case, 9)
            load_weights(model, self.case.writes(run.model, self.place / "written"))
        if self.case.reads is not None:
            found["the library"] = self.case.reads(file)
        for by, model in found.items():
            apart = first_difference(model.state_dict(), expected)
            assert apart is None, f"{apart} differs after loading by {by}"
        return f"{len(found)} ways"

    def alone(self) -> Run:
        """The run that nothing has ended."""
        if self._alone is None:
            self._alone = run_to_its_end(self.case, self.place / "alone")
        return self._alone


def _run_and_be_killed(case: Case, directory: Path) -> None:
    torch.set_default_dtype(case.dtype)
    complete_run(case, directory, KILLED_IN).start()


def _trained_on_rank(library: str, name: str) -> Any:
    """Weights and losses on a rank, without classes that the other process may not know."""
    logging.disable(logging.WARNING)
    case = cases_of(library)[name]
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have workers
    torch.set_default_dtype(case.dtype)
    weights, losses = trained(case, 2)
    return {key: value for key, value in weights.items() if isinstance(value, Tensor)}, losses


def compared(case: Case, found: tuple[dict[str, Any], list[float]], expected: tuple[dict[str, Any], list[float]]) -> str:
    """How far two results are apart: "bitwise", or the largest difference in parts of the largest number of its tensor."""
    largest = 0.0
    assert len(found[1]) == len(expected[1]), f"{len(found[1])} updates, by hand {len(expected[1])}"
    for name, value in {**expected[0], "losses": torch.tensor(expected[1])}.items():
        if not isinstance(value, Tensor):
            continue
        other = torch.tensor(found[1]) if name == "losses" else found[0][name]
        if first_difference(other, value) is None:
            continue
        one, two = (tensor.detach().to(torch.float64) for tensor in (other, value))
        difference = float((one - two).abs().max() / two.abs().max().clamp_min(1e-30))
        assert difference <= case.tolerance, f"{name} is {difference:.1e} away from the loop by hand"
        largest = max(largest, difference)
    return "bitwise" if largest == 0 else f"{largest:.0e}"


def first_difference(found: Any, expected: Any) -> str | None:
    """The path of the first leaf that is not the same bit by bit; None if there is none."""
    ours, theirs = (dict(pytree.tree_flatten_with_path(value)[0]) for value in (found, expected))
    if ours.keys() != theirs.keys():
        return f"the set of names ({next(iter(ours.keys() ^ theirs.keys()))})"
    return next((pytree.keystr(path) or "the value" for path in ours if not same(ours[path], theirs[path])), None)


def same(one: Any, two: Any) -> bool:
    """Whether two leaves are equal, tensors bit by bit."""
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        if type(one) is not type(two) or one.dtype != two.dtype or one.shape != two.shape:
            return False
        if hasattr(one, "__tensor_flatten__"):
            return all(same(getattr(one, name), getattr(two, name)) for name in one.__tensor_flatten__()[0])
        return torch.equal(*(part.detach().contiguous().reshape(-1).view(torch.uint8) for part in (one, two)))
    if isinstance(one, np.ndarray):
        return np.array_equal(one, two)
    return bool(one == two or (callable(one) and callable(two)) or (one != one and two != two))


# --- a library ----------------------------------------------------------------------------------------------------------------


def let_torchvision_be_imported() -> None:
    """Declares the operators that torchvision looks for: its wheel for CUDA cannot load its own beside a torch for CPUs."""
    if torch.version.cuda is None and find_spec("torchvision") is not None:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def cases_of(library: str) -> dict[str, Case]:
    """The cases of a library's file, by name."""
    if f"libraries.{library}" not in sys.modules:
        let_torchvision_be_imported()
    return {case.name: case for case in importlib.import_module(f"libraries.{library}").CASES}


def glue(case: Case) -> int:
    """The lines of `forward`, `around` and `attach` of a case."""
    functions = [
        one for one in (case.forward, case.around, case.attach) if inspect.isfunction(one) and one.__name__ != "<lambda>"
    ]
    return sum(len([line for line in inspect.getsource(one).splitlines() if line.strip()]) for one in functions)


def try_case(library: str, case: Case, ranks: Ranks, only: Iterable[str] = CHECKS) -> dict[str, str]:
    """What each check has found; one that failed begins with FAILED."""
    found: dict[str, str] = {}
    before, threads = torch.get_default_dtype(), torch.get_num_threads()
    # A process that is forked after OpenMP's threads were used would wait for them without end.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        tried = Tried(library, case, ranks, Path(place))
        checks = {"one": tried.one, "four": tried.four, "ranks": tried.ranks_, "killed": tried.killed, "weights": tried.weights}
        for check in only:
            if check in case.not_tried:
                found[check] = f"not tried: {case.not_tried[check]}"
                continue
            try:
                torch.set_default_dtype(case.dtype)
                result = checks[check]()
                found[check] = f"FAILED: passes ({result}), and is known to fail" if check in case.known else result
            except Exception as error:  # whatever a library raises is what the table is for
                traceback.print_exc()
                why = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
                found[check] = f"known: {case.known[check]}" if check in case.known else why
            finally:
                torch.set_default_dtype(before)
            print(f"{library}: {case.name}: {check}: {found[check]}", file=sys.stderr, flush=True)
    torch.set_num_threads(threads)
    return found


def main(library: str, output: str, *names: str) -> None:
    """Tries the cases of a library, those named or all, and writes what was found into a file."""
    logging.basicConfig(level=logging.WARNING)
    cases = cases_of(library)
    with Ranks(WORLD_SIZE) as ranks:
        rows = [
            {"case": name, "glue": glue(case), "checks": try_case(library, case, ranks)}
            for name, case in cases.items()
            if not names or name in names
        ]
    Path(output).write_text(json.dumps(rows), encoding="utf-8")
