"""State that is not this run's, or cannot be stored: compared and refused before it is taken, or named in the log."""

from __future__ import annotations

import copy
import json
import logging
import math
import re
import shutil
import subprocess
import sys
import weakref
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from ignite.handlers import BasicTimeProfiler, EarlyStopping, EMAHandler
from ignite.handlers import LRScheduler as IgnitesSchedule
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import AveragedModel

import small_checkpoints
from bits import bit_by_bit
from ignite_train import (
    CheckpointError,
    ForwardOutput,
    StaticLossScaling,
    TorchLossScaling,
    Trainer,
    TrainEvents,
    UpdateOptions,
    UpdateOutput,
    WarmUpSchedule,
    create_evaluator,
    create_trainer,
)
from ignite_train.checkpoint import read_checkpoint, verify
from ignite_train.checkpoint.capture import HeldState
from ignite_train.checkpoint.manifest import MAX_MARKS, compact_json, count_marks
from ignite_train.checkpoint.reader import CheckpointReader
from ignite_train.checkpoint.run_objects import SavedOptimizer
from ignite_train.checkpoint.tensor_files import Entry
from ignite_train.checkpoint.tree import MAX_NODES, TreeEncoder
from ignite_train.errors import DamagedCheckpointError
from ignite_train.handlers import (
    Checkpoint,
    GradNormConsistency,
    LearningRateSchedule,
    ReduceOnPlateau,
    StateConsistency,
    TrainingMetrics,
    Validation,
)
from log_messages import messages_from_here
from processes import DEADLINE_SECONDS
from ranks import run_ranks
from small_checkpoints import put_together, save, taken_apart
from tiers import nightly

X = torch.linspace(-1, 1, 96).reshape(12, 8)
LOADER = [X[i : i + 3] for i in range(0, 12, 3)]  # four micro-batches
Build = Callable[[nn.Module], torch.optim.Optimizer]


class InjectedError(Exception):
    """Raised by a test on purpose."""


def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
    return ForwardOutput((model(x) - 1).square().sum(), len(x))


def net(seed: int = 0) -> nn.Sequential:
    """Two layers of one shape, so that nothing but their names tells them apart, and one of another."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def build(directory: Path, optimizer: Build = adamw, seed: int = 0, **options: Any) -> Trainer:
    model = net(seed)
    trainer = create_trainer(model, optimizer(model), forward)
    Checkpoint(directory, every=1, keep=9, **options).attach(trainer)
    return trainer


def saved(directory: Path, optimizer: Build = adamw, updates: int = 2) -> Path:
    """A directory with checkpoints of a run of this optimizer."""
    build(directory, optimizer).run(LOADER, max_iters=updates)
    return directory


def refusal(trainer: Trainer) -> str:
    """Why it cannot resume; nothing of it has changed."""

    def state() -> Any:
        parts = [trainer.model, trainer.optimizers["optimizer"], trainer]
        return bit_by_bit([*(part.state_dict() for part in parts), torch.get_rng_state()])

    before = state()
    with pytest.raises(CheckpointError) as error:
        trainer.run(LOADER, max_iters=9)
    assert state() == before
    assert "\n" not in str(error.value)
    return str(error.value)


def logged(caplog: Any, level: int = logging.WARNING) -> list[str]:
    records = [record for record in caplog.records if record.name.partition(".")[0] == "ignite_train"]
    return [record.getMessage() for record in records if record.levelno >= level]


# --- forging ---


DTYPES_OF_THE_FORMAT = {torch.float32: "F32", torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.float64: "F64"}


class Stored(NamedTuple):
    """What the files of a rank hold."""

    index: Any
    header: Any
    numbers: bytearray


def stored_in(path: Path, rank: int = 0) -> Stored:
    files = [(path / f"rank-{rank:05d}.{suffix}").read_bytes() for suffix in ("json", "safetensors")]
    return Stored(json.loads(files[0]), *taken_apart(files[1]))


def forge(directory: Path, change: Callable[[Any, Any], None]) -> Path:
    """Changes index and tensors of the newest checkpoint and makes all checksums right; the others go."""
    *others, newest = sorted(directory.glob("update-*"))
    for other in others:
        shutil.rmtree(other)
    stored = stored_in(newest)
    change(stored.index, stored)
    reseal(newest, stored)
    return newest


def reseal(path: Path, stored: Stored, rank: int = 0, *, index: bytes | None = None, size: int | None = None) -> None:
    """Writes the files of a rank; `size` is what its tensors are said to have, and nobody looks at them before that."""
    stem, index = f"rank-{rank:05d}", compact_json(stored.index) if index is None else index
    file, record = put_together(stored.header, stored.numbers)
    (path / f"{stem}.json").write_bytes(index)
    (path / f"{stem}.safetensors").write_bytes(file)
    manifest = json.loads((path / "manifest.json").read_bytes())["manifest"]
    manifest["files"][f"{stem}.json"] = {"size": len(index), "crc32": zlib.crc32(index)}
    manifest["files"][f"{stem}.safetensors"] = record if size is None else {**record, "size": size}
    body = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(b'{"crc32":"%08x","manifest":%b}\n' % (zlib.crc32(body), body))


def replace_tensor(index: Any, stored: Stored, name: str, value: Tensor) -> None:
    """Another tensor under a name, the others where they were, one after another; those that the index lacks go."""
    new = bytearray()
    for key in stored.header.keys() - index["tensors"].keys():
        del stored.header[key]
    for key, entry in sorted(stored.header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        part = bytes(stored.numbers[begin:end])
        if key == name:
            part = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            entry |= {"dtype": DTYPES_OF_THE_FORMAT[value.dtype], "shape": [*value.shape]}
            index["tensors"][key] = {"crc32": zlib.crc32(part)}
        entry["data_offsets"] = [len(new), len(new) + len(part)]
        new += part
    stored.numbers[:] = new


def put(index: Any, name: str, value: Any, *keys: Any) -> None:
    """Another value at a place in the tree of an object."""
    pair, here = None, index["objects"][name]
    for key in keys:
        pair = next(pair for pair in here["dict"] if pair[0] == key) if isinstance(here, dict) else None
        here = here[key] if pair is None else pair[1]
        last = here if pair is None else pair
    assert isinstance(last, list)
    last[1] = value


# --- the optimizer ---


def test_parameters_in_another_order_are_refused(tmp_path: Path) -> None:
    """Moments of another parameter of the same shape would be taken without a word."""
    saved(tmp_path)
    message = refusal(
        build(
            tmp_path,
            lambda model: torch.optim.AdamW([*model[1].parameters(), *model[0].parameters(), *model[2].parameters()], lr=0.01),
        )
    )
    assert (
        "optimizer: parameter 0 of param_groups[0] is 0.weight, float32 of shape (8, 8), and this run has 1.weight" in message
    )


@pytest.mark.sampled(9)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "step"])
def test_a_moment_of_another_shape_is_refused(key: str, fused: bool, tmp_path: Path) -> None:
    """Also with right checksums: a fused kernel would leave its memory."""
    optimizer: Build = lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)  # noqa: E731
    saved(tmp_path, optimizer)
    wrong = torch.zeros(3) if key == "step" else torch.zeros(1)

    forge(tmp_path, lambda index, data: replace_tensor(index, data, f"optimizer['state'][0][{key!r}]", wrong))
    expected = "one number of at least 0" if key == "step" else "float32 of shape (8, 8)"
    expected = f"{key} of 0.weight is float32 of shape {tuple(wrong.shape)}, and this run has {expected}; build"
    assert expected in refusal(build(tmp_path, optimizer))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (torch.optim.AdamW, torch.optim.Adam, "AdamW wrote it, and this run has Adam"),
        (torch.optim.Adam, torch.optim.AdamW, "Adam wrote it, and this run has AdamW"),
        (torch.optim.RMSprop, torch.optim.SGD, "RMSprop wrote it, and this run has SGD"),
    ],
)
def test_another_class_is_refused(before: Any, after: Any, message: str, tmp_path: Path) -> None:
    """Adam and AdamW differ in nothing but an option, and torch takes the option of the checkpoint."""
    saved(tmp_path, lambda model: before(model.parameters(), lr=0.01))
    trainer = build(tmp_path, lambda model: after(model.parameters(), lr=0.01))
    assert message in refusal(trainer)


def test_an_option_that_came_with_a_newer_torch_is_no_other_class(tmp_path: Path) -> None:
    """Nor is the rate that a schedule has added to the groups."""

    def other(index: Any, data: Any) -> None:
        groups = next(value for key, value in index["objects"]["optimizer"]["dict"] if key == "param_groups")
        groups[0]["dict"] = [*(pair for pair in groups[0]["dict"] if pair[0] != "capturable"), ["initial_lr", 0.01]]

    saved(tmp_path)
    forge(tmp_path, other)
    trainer = build(tmp_path)
    trainer.run(LOADER, max_iters=3)
    assert trainer.state.iteration == 3


def test_what_a_step_needs_must_be_there(tmp_path: Path) -> None:
    """A state without a moment is refused when it is read, and not in the middle of the first step."""
    saved(tmp_path)

    def change(index: Any, data: Any) -> None:
        state = next(pair[1] for pair in index["objects"]["optimizer"]["dict"] if pair[0] == "state")
        first = state["dict"][0][1]["dict"]
        first[:] = [pair for pair in first if pair[0] != "exp_avg_sq"]
        del index["tensors"]["optimizer['state'][0]['exp_avg_sq']"]
        replace_tensor(index, data, "", torch.zeros(0))

    forge(tmp_path, change)
    assert "exp_avg_sq of 0.weight is missing" in refusal(build(tmp_path))


def test_a_state_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    """Of an optimizer of torch's, also where a step needs nothing of it."""
    optimizer: Build = lambda model: torch.optim.SGD(model.parameters(), lr=0.01)  # noqa: E731
    saved(tmp_path, optimizer)

    def change(index: Any, data: Any) -> None:
        state = next(pair[1] for pair in index["objects"]["optimizer"]["dict"] if pair[0] == "state")
        state["dict"] = [[0, 7]]

    forge(tmp_path, change)
    assert "the state of 0.weight is 7" in refusal(build(tmp_path, optimizer))


MOMENT, STEP = "optimizer['state'][0]['exp_avg']", "optimizer['state'][0]['step']"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda i, d: replace_tensor(i, d, MOMENT, torch.zeros(8, 8, dtype=torch.int32)),
            "exp_avg of 0.weight is int32 of shape (8, 8), and this run has float32 of shape (8, 8)",
        ),
        (
            lambda i, d: put(i, "optimizer", 5, "state", 0, "exp_avg"),
            "exp_avg of 0.weight is 5 of type int, and this run has float32 of",
        ),
        (
            lambda i, d: replace_tensor(i, d, STEP, torch.tensor(2)),
            "step of 0.weight is int64 of shape (), and this",
        ),
        (
            lambda i, d: put(i, "optimizer", "2", "state", 0, "step"),
            "step of 0.weight is '2' of type str, and this run",
        ),
        (lambda i, d: put(i, "optimizer", [0, 0, 2, 3, 4, 5], "param_groups", 0, "params"), "with a parameter twice"),
        (lambda i, d: put(i, "optimizer", 6, "param_groups", 0, "params"), "has parameter groups without a list of parameters"),
    ],
    ids=["integer moment", "number", "integer step", "text", "twice", "no list"],
)
def test_a_value_that_no_step_could_use_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    """Before it is loaded: torch would take it, and the next step would fail or be another one."""
    saved(tmp_path)
    forge(tmp_path, change)
    assert message in refusal(build(tmp_path))


def test_a_momentum_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    """The step of SGD would fail on it."""
    optimizer: Build = lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)  # noqa: E731
    saved(tmp_path, optimizer)
    forge(tmp_path, lambda index, data: put(index, "optimizer", 5, "state", 0, "momentum_buffer"))
    assert "momentum_buffer of 0.weight is 5 of type int, and this run has float32" in refusal(build(tmp_path, optimizer))


@pytest.mark.parametrize("value", [torch.tensor(3.0), 3, torch.ones(3)], ids=["tensor", "integer", "vector"])
def test_a_value_that_another_torch_keeps_is_taken(value: Any, tmp_path: Path) -> None:
    """Of any name and shape beside the moments: no step of this torch uses it."""
    trainer = build(tmp_path)
    state = trainer.optimizers["optimizer"].state
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: [entry.update(new=copy.copy(value)) for entry in state.values()]
    )
    trainer.run(LOADER, max_iters=2)
    again = build(tmp_path)
    again.run(LOADER, max_iters=3)
    state = again.optimizers["optimizer"].state
    assert [bit_by_bit(entry["new"]) for entry in state.values()] == [bit_by_bit(value)] * 6


class WithRows(torch.optim.AdamW):
    """A user's AdamW, which keeps a number for each row beside the moments."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("rows", torch.zeros(len(parameter))).add_(1)
        return loss


def test_what_a_class_of_the_user_adds_to_one_of_torch_is_taken(tmp_path: Path) -> None:
    """In any shape; the moments, which its base class needs, are looked at all the same."""
    optimizer: Build = lambda model: WithRows(model.parameters(), lr=0.01)  # noqa: E731
    saved(tmp_path, optimizer)
    trainer = build(tmp_path, optimizer)
    trainer.run(LOADER, max_iters=3)
    assert [len(state["rows"]) for state in trainer.optimizers["optimizer"].state.values()] == [8, 8, 8, 8, 2, 2]
    forge(tmp_path, lambda index, data: replace_tensor(index, data, MOMENT, torch.zeros(1)))
    assert "exp_avg of 0.weight is float32 of shape (1,), and this run has float32" in refusal(build(tmp_path, optimizer))


FORMS: dict[str, Build] = {
    "adadelta": lambda model: torch.optim.Adadelta(model.parameters()),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01, fused=True),
    "adam amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True),
    "adamax": lambda model: torch.optim.Adamax(model.parameters()),
    "asgd": lambda model: torch.optim.ASGD(model.parameters()),
    "muon": lambda model: torch.optim.Muon([p for p in model.parameters() if p.dim() == 2]),
    "nadam": lambda model: torch.optim.NAdam(model.parameters()),
    "radam": lambda model: torch.optim.RAdam(model.parameters()),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), momentum=0.9, centered=True),
    "rprop": lambda model: torch.optim.Rprop(model.parameters()),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    "sgd momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True),
    "tensor lr": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01)),
    "own": lambda model: Factored(model.parameters()),
}


class Factored(torch.optim.Optimizer):
    """Keeps what torch's do not: factors, lists, strings, a number for all."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                rows = state.setdefault("rows", torch.zeros(parameter.shape[0]))
                rows += parameter.grad.reshape(len(rows), -1).square().sum(1)
                state["history"] = [*state.get("history", []), parameter.grad.norm()][-2:]
                state["kind"] = "factored"
                parameter -= group["lr"] * parameter.grad / (rows.sqrt() + 1e-3).reshape(-1, *[1] * (parameter.dim() - 1))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_optimizer_goes_on_bitwise(form: str, tmp_path: Path) -> None:
    """What each of torch's optimizers keeps, and one of somebody else's, is taken for what it is."""

    def frozen(model: nn.Module) -> torch.optim.Optimizer:
        if form == "muon":
            for parameter in model.parameters():
                parameter.requires_grad_(parameter.dim() == 2)
        return FORMS[form](model)

    whole = build(tmp_path / "whole", frozen)
    whole.run(LOADER, max_iters=7)
    saved(tmp_path / "parts", frozen, 3)
    resumed = build(tmp_path / "parts", frozen, seed=4)
    resumed.run(LOADER, max_iters=7)
    for name in ("model", "optimizer"):
        assert bit_by_bit(resumed.parts[name].state_dict()) == bit_by_bit(whole.parts[name].state_dict())
    assert resumed.state.iteration == 7


def test_factored_moments_of_a_convolution_are_read(tmp_path: Path) -> None:
    """Adafactor keeps a mean over rows and one over columns of each kernel."""

    def make() -> Trainer:
        model = nn.Conv2d(1, 2, (2, 3))
        optimizer = torch.optim.Adafactor(model.parameters())
        trainer = create_trainer(model, optimizer, lambda model, x: model(x.reshape(-1, 1, 2, 4)).square().mean())
        Checkpoint(tmp_path).attach(trainer)
        return trainer

    make().run(LOADER, max_iters=1)
    resumed = make()
    resumed.run(LOADER, max_iters=2)
    assert [resumed.state.iteration, resumed.state.num_steps] == [2, 2]


class Wide(torch.optim.Optimizer):
    """Keeps over weights in bfloat16 what torch would load as bfloat16, and a string that torch would load as another one."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                zeros = torch.zeros(parameter.shape)
                state |= {"mean": zeros, "of": [zeros.clone()], "steps": torch.tensor(0), "kind": "wide"}
            state["steps"] += 1
            state["mean"].lerp_(parameter.grad.float(), 0.1)
            state["of"][0].lerp_(state["mean"], 0.1)
            parameter -= 0.01 * (state["mean"] + state["of"][0]).to(parameter.dtype)


class WideByItself(Wide):
    """Calls torch's `load_state_dict` in its own, and puts integers and strings right, as those of pytorch_optimizer do."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for key, parameter in enumerate(self.param_groups[0]["params"]):
            for name in ("steps", "kind"):
                self.state[parameter][name] = state_dict["state"][key][name]


def momentum_of_wide_gradients(parameters: Any) -> torch.optim.Optimizer:
    """The momentum of torch's SGD, which has the dtype of the gradients."""
    parameters = [*parameters]
    for parameter in parameters:
        parameter.grad_dtype = torch.float32
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


class Outer(torch.optim.Optimizer):
    """Steps another optimizer that is inside it, after the loss was evaluated again."""

    def __init__(self, parameters: Any, kind: Any = torch.optim.SGD, **options: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.base = kind([*self.param_groups[0]["params"]], lr=0.01, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.enable_grad()(closure)()
        self.base.step()


def test_the_state_of_an_optimizer_inside_another_is_looked_at(tmp_path: Path) -> None:
    """As that of the outer one is: torch would take the momentum of another parameter for this one's."""

    def made(**options: Any) -> Trainer:
        model = net()
        optimizer = Outer(model.parameters(), **options or {"momentum": 0.9})
        trainer = create_trainer(model, optimizer, forward, options=UpdateOptions(closure=True))
        Checkpoint(tmp_path, every=1, keep=9).attach(trainer)
        return trainer

    made().run(LOADER, max_iters=2)
    assert made().run(LOADER, max_iters=3).iteration == 3
    assert read_checkpoint(tmp_path).param_groups["optimizer.base"][0].options["momentum"] == 0.9
    message = refusal(made(kind=torch.optim.RMSprop))
    assert "another optimizer.base: SGD wrote it, and this run has RMSprop" in message
    name = "optimizer.base['state'][0]['momentum_buffer']"
    forge(tmp_path, lambda index, data: replace_tensor(index, data, name, torch.zeros(8, 4)))
    assert "another optimizer.base: momentum_buffer of 0.weight is float32 of shape (8, 4), and this run" in refusal(made())


class Halves(torch.optim.Optimizer):
    """Chooses the dtype and the numbers of its state by itself when it is loaded."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state |= {"half": state["half"].half(), "less": state["less"] - 1}


def test_a_state_that_an_optimizer_changes_when_it_is_loaded_stays_so() -> None:
    """Only what torch has rounded to the dtype of the weights is put back."""
    weight = torch.zeros(2, dtype=torch.bfloat16)
    optimizer, third = Halves([weight], {}), torch.full((2,), 1 / 3)
    saved = {name: third.clone() for name in ("half", "less", "rounded")}
    SavedOptimizer(optimizer).load_state_dict({"state": {0: saved}, "param_groups": [{"params": [0]}]})
    loaded = optimizer.state[weight]
    assert torch.equal(loaded["half"], third.bfloat16().half())
    assert torch.equal(loaded["less"], third.bfloat16() - 1)
    assert torch.equal(loaded["rounded"], third)


@pytest.mark.parametrize("optimizer", [Wide, WideByItself, momentum_of_wide_gradients], ids=["own", "loads itself", "sgd"])
def test_a_state_that_is_wider_than_the_weights_goes_on_bitwise(optimizer: Any, tmp_path: Path) -> None:
    """Resumed, it has the dtypes, integers and strings that it had, and the weights are those of a run without interruption."""
    found = []
    for directory, limits in ((tmp_path / "whole", [7]), (tmp_path / "parts", [3, 7])):
        for seed, limit in enumerate(limits):
            model = net(seed).to(torch.bfloat16)
            trainer = create_trainer(
                model, optimizer(model.parameters()), lambda model, x: forward(model, x.to(torch.bfloat16))
            )
            Checkpoint(directory).attach(trainer)
            trainer.run(LOADER, max_iters=limit)
        found.append([bit_by_bit(trainer.parts[name].state_dict()) for name in ("model", "optimizer")])
    assert found[0] == found[1]


class Starts(torch.optim.Optimizer):
    """Keeps a number for a parameter that was zero at the start, and a tensor for others, as Prodigy does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("p0", parameter.clone() if parameter.any() else torch.tensor(0.0))
            parameter -= 0.01 * (parameter - state["p0"] + parameter.grad)


def test_what_an_optimizer_of_another_library_keeps_is_its_own_affair(tmp_path: Path) -> None:
    """Also where one entry of all has another shape than its parameter: the same script resumes, bitwise."""

    def with_zeros(model: nn.Module) -> torch.optim.Optimizer:
        model[2] = nn.Linear(8, 8)
        nn.init.zeros_(model[1].bias)
        return Starts(model.parameters())

    found = []
    for folder, limits in (("whole", [5]), ("parts", [2, 5])):
        for limit in limits:
            torch.manual_seed(0)
            run = build(tmp_path / folder, with_zeros)
            run.run(LOADER, max_iters=limit)
        found.append(bit_by_bit(run.parts["model"].state_dict()))
    assert found[0] == found[1]


class Collects(Starts):
    """Has after its first step what no checkpoint can hold."""

    def step(self) -> None:  # type: ignore[override]
        super().step()
        self.state[self.param_groups[0]["params"][0]]["helper"] = object()


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_state_that_cannot_be_saved_is_found_after_the_first_step(on_error: str, tmp_path: Path, caplog: Any) -> None:
    """And not after an epoch of work; with `on_error="warn"` training continues."""
    model = net()
    trainer = create_trainer(model, Collects(model.parameters()), forward)
    options: Any = {"on_error": on_error}
    Checkpoint(tmp_path, every=3, **options).attach(trainer)
    expected = "trying to save the state after the first step failed"
    if on_error == "raise":
        with pytest.raises(CheckpointError, match=f"{expected}.*'helper'.* cannot be stored"):
            trainer.run(LOADER, max_iters=2)
        assert trainer.state.iteration == 1
    else:
        with pytest.raises(CheckpointError, match="the run is over"):
            trainer.run(LOADER, max_iters=2)
        assert trainer.state.iteration == 2
        assert expected in logged(caplog)[0]


def test_of_two_of_one_shape_none_is_the_odd_one(tmp_path: Path) -> None:
    """An optimizer of the user may keep something else for one of them, and no third says which is right."""

    class Own(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.01})

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for number, parameter in enumerate(self.param_groups[0]["params"]):
                kept = torch.zeros_like(parameter) if number else torch.zeros(1)
                self.state[parameter].setdefault("kept", kept).add_(1)

    optimizer: Build = lambda model: Own(model.parameters())  # noqa: E731
    saved(tmp_path, optimizer)
    trainer = build(tmp_path, optimizer)
    trainer.run(LOADER, max_iters=3)
    assert [float(state["kept"].max()) for state in trainer.optimizers["optimizer"].state.values()] == [3.0] * 6


# --- options ---


def test_what_the_script_sets_in_another_way_is_listed(tmp_path: Path, caplog: Any) -> None:
    """The checkpoint wins, each time, and each time the log says so."""
    saved(tmp_path)

    def other(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.5, amsgrad=True)

    for updates in (3, 4):
        caplog.clear()
        trainer = build(tmp_path, other)
        trainer.run(LOADER, max_iters=updates)
        group = trainer.optimizers["optimizer"].param_groups[0]
        assert (group["lr"], group["amsgrad"]) == (0.01, False)
        (line,) = [line for line in logged(caplog) if "resuming from" in line]
        assert "changed since: optimizer.lr: 0.01 -> 0.5 (the checkpoint's is used; script_wins=('lr',) takes the " in line
        assert "optimizer.amsgrad: False -> True (the checkpoint's is used" in line
        assert line.count("->") == 2


def test_pairs_and_tensors_that_the_script_sets_are_listed(tmp_path: Path, caplog: Any) -> None:
    """The betas, and a rate in a tensor, as their numbers."""

    def optimizer(lr: float, betas: tuple[float, float]) -> Build:
        return lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(lr), betas=betas)

    saved(tmp_path, optimizer(0.25, (0.5, 0.75)))
    build(tmp_path, optimizer(0.5, (0.5, 0.875))).run(LOADER, max_iters=3)
    (line,) = [line for line in logged(caplog) if "resuming from" in line]
    assert "optimizer.lr: 0.25 -> 0.5 (the checkpoint's" in line
    assert "optimizer.betas: [0.5, 0.75] -> [0.5, 0.875] (the checkpoint's" in line
    assert line.count("->") == 2


def test_options_that_are_not_numbers_are_kept(tmp_path: Path, caplog: Any) -> None:
    """A vector, a list of them and a dtype come back from the checkpoint; what cannot be compared is not listed."""

    def optimizer(scale: float, dtype: torch.dtype) -> Build:
        vector = torch.full((2,), scale)
        options = {"lr": 0.01, "scales": vector, "levels": [vector], "dtype": dtype, "betas": [scale], "names": ("a", "b")}
        return lambda model: torch.optim.SGD([{"params": model.parameters(), **options}])

    saved(tmp_path, optimizer(0.5, torch.float16))
    trainer = build(tmp_path, optimizer(0.25, torch.float64))
    trainer.run(LOADER, max_iters=3)
    group = trainer.optimizers["optimizer"].param_groups[0]
    assert (group["scales"].tolist(), group["levels"][0].tolist(), group["dtype"]) == ([0.5, 0.5], [0.5, 0.5], torch.float16)
    (line,) = [line for line in logged(caplog) if "resuming from" in line]
    assert "optimizer.betas: [0.5] -> [0.25] (the checkpoint's" in line
    assert line.count("->") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "names"),
    [(lambda layer: layer, "0.weight and 1 more"), (lambda layer: layer.bias, "0.bias")],
    ids=["layer", "parameter"],
)
def test_what_is_frozen_now_and_was_not_is_listed(part: Any, names: str, tmp_path: Path, caplog: Any) -> None:
    """A handler that froze a part in update 2 is not called again in a resumed run, which then trains that part."""

    def run(updates: int, frozen: int) -> list[str]:
        trainer = build(tmp_path)
        model: Any = trainer.model
        trainer.add_event_handler(Events.ITERATION_STARTED(once=2), lambda: part(model[frozen]).requires_grad_(False))
        caplog.clear()
        trainer.run(LOADER, max_iters=updates)
        return [line for line in logged(caplog) if "requires_grad" in line]

    assert run(1, 0) == run(3, 0) == []
    (line,) = run(4, 1)
    assert f"requires_grad of {names}: False -> True (the script's is used)" in line


def test_what_the_script_freezes_now_is_listed(tmp_path: Path, caplog: Any) -> None:
    """It stays frozen, and the log says that the run before has trained it."""
    saved(tmp_path)
    caplog.clear()
    trainer = build(tmp_path)
    model: Any = trainer.model
    model[1].requires_grad_(False)
    trainer.run(LOADER, max_iters=3)
    (line,) = [line for line in logged(caplog) if "requires_grad" in line]
    assert "requires_grad of 1.weight and 1 more: True -> False (the script's is used)" in line
    assert line.count("->") == 1
    assert not model[1].weight.requires_grad


def test_an_option_that_a_schedule_moves_has_not_changed(tmp_path: Path, caplog: Any) -> None:
    """The same script again does not warn, whatever its schedules and handlers have made of the rate."""

    def run(updates: int) -> None:
        model = net()
        optimizer = adamw(model)
        trainer = create_trainer(model, optimizer, forward)
        LearningRateSchedule(schedulers.OneCycleLR(optimizer, 0.1, total_steps=20)).attach(trainer)
        Checkpoint(tmp_path, every=1).attach(trainer)
        trainer.run(LOADER, max_iters=updates)

    run(3)
    caplog.clear()
    run(6)
    assert logged(caplog) == []


@pytest.mark.parametrize(
    ("lr", "start", "change"),
    [(0.02, 1.0, "0.01 -> 0.02"), (0.04, 0.25, "0.01 -> 0.04"), (0.01, 1.0, ""), (0.01, 0.25, "")],
    ids=["rate", "both", "none", "schedule"],
)
def test_a_rate_that_a_schedule_starts_from_is_listed_as_the_script_has_written_it(
    lr: float, start: float, change: str, tmp_path: Path, caplog: Any
) -> None:
    """The first rate of a schedule is not listed: it differs where the run gets longer, say."""

    def run(updates: int, lr: float, start: float) -> None:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        trainer = create_trainer(model, optimizer, forward)
        LearningRateSchedule(schedulers.ConstantLR(optimizer, start, 100)).attach(trainer)
        Checkpoint(tmp_path, every=1).attach(trainer)
        trainer.run(LOADER, max_iters=updates)

    run(2, 0.01, 1.0)
    caplog.clear()
    run(3, lr, start)
    told = re.findall(r"optimizer\.(\S+: \S+ -> \S+) \(", " ".join(logged(caplog)))
    assert told == [f"lr: {change}"] * bool(change)


def test_the_script_wins_where_it_is_told_to(tmp_path: Path, caplog: Any) -> None:
    """By name of the option, for all groups, now and after the next resumption."""
    saved(tmp_path)

    def other(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.25, eps=1e-3)

    for updates, changed in ((3, True), (4, False)):
        caplog.clear()
        trainer = build(tmp_path, other, script_wins=("lr", "weight_decay"))
        trainer.run(LOADER, max_iters=updates)
        group = trainer.optimizers["optimizer"].param_groups[0]
        assert (group["lr"], group["weight_decay"], group["eps"]) == (0.5, 0.25, 1e-8)
        (line,) = [line for line in logged(caplog) if "resuming from" in line]
        assert ("optimizer.lr: 0.01 -> 0.5 (the script's is used)" in line) == changed
        assert "optimizer.eps: 1e-08 -> 0.001 (the checkpoint's is used" in line


def test_an_option_of_the_script_that_the_state_cannot_serve_is_refused(tmp_path: Path) -> None:
    """AMSGrad needs a moment that the checkpoint does not hold."""
    saved(tmp_path)
    trainer = build(tmp_path, lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True), script_wins=("amsgrad",))
    assert "max_exp_avg_sq of 0.weight is missing" in refusal(trainer)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"script_wins": ("learning_rate",)},
            ValueError,
            "script_wins must name options of the optimizer, any of .*, got 'learn",
        ),
        ({"script_wins": "lr"}, TypeError, r"script_wins must be a sequence of names such as \('lr',\), got 'lr'"),
        ({"leave_out": ("TrainingMetric",)}, ValueError, "got 'TrainingMetric'; did you mean 'TrainingMetrics'"),
        ({"leave_out": "TrainingMetrics"}, TypeError, "leave_out must be a sequence of names"),
        ({"leave_out": ("TrainingMetrics", 1)}, TypeError, "leave_out must be a sequence of names"),
        ({"script_wins": 1}, TypeError, "script_wins must be a sequence of names"),
        ({"leave_out": (name for name in ["TrainingMetric"])}, ValueError, "got 'TrainingMetric'; did you mean"),
    ],
    ids=["option", "one option", "handler", "one handler", "number among names", "number", "name from a generator"],
)
def test_names_that_nothing_has_are_refused(options: Any, error: Any, message: str, tmp_path: Path) -> None:
    """Before the first batch, with what there is and the nearest."""

    def run() -> None:
        trainer = build(tmp_path, **options)
        TrainingMetrics().attach(trainer)
        trainer.run(LOADER, max_iters=1)

    with pytest.raises(error, match=message):
        run()
    assert not tmp_path.exists() or not [*tmp_path.iterdir()]


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 12),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
    "step": lambda o: schedulers.StepLR(o, 2),
    "sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.5, 1.0, 2), schedulers.ExponentialLR(o, 0.9)], [4]
    ),
}


BEGUN: dict[str, Callable[[Any], Any]] = {
    **SCHEDULES,
    "warm-up": lambda o: schedulers.LinearLR(o, 0.1, total_iters=4),
    "one cycle": lambda o: schedulers.OneCycleLR(o, 0.01, total_steps=20),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.001, 0.01, step_size_up=3),
    "sequence with a cycle": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.CyclicLR(o, 0.001, 0.01, step_size_up=3)], [2]
    ),
    "warm-up of ours": lambda o: WarmUpSchedule(o, "cosine", warm_up=3, total=12),
}


def begun(directory: Path, make: Callable[[Any], Any] | None, updates: int, name: str = "", **options: Any) -> list[Any]:
    """Trains with a schedule; the rate and the momentum of each update of this start."""
    model, found = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    trainer = create_trainer(model, optimizer, forward)
    if make is not None:
        handler = LearningRateSchedule(make(optimizer))
        handler.saved_as = name or None
        handler.attach(trainer, options.pop("event", TrainEvents.STEP_COMPLETED))
    Checkpoint(directory, every=1, **options).attach(trainer)

    def note() -> None:
        found.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))

    trainer.append_event_handler(Events.ITERATION_STARTED, note)
    trainer.run(LOADER, max_iters=updates)
    return found


def close(found: list[Any], expected: list[Any]) -> bool:
    """Whether pairs of rate and momentum are those, but for rounding."""
    return torch.allclose(torch.tensor(found).double(), torch.tensor(expected).double(), rtol=1e-6, atol=0.0)


def alone(make: Callable[[Any], Any], updates: int) -> list[Any]:
    """The rates and momenta of a schedule of torch, without a checkpoint."""
    optimizer, found = torch.optim.SGD(net().parameters(), lr=0.01, momentum=0.9), []
    schedule = make(optimizer)
    for _ in range(updates):
        found.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("schedule", BEGUN)
def test_a_schedule_that_is_added_begins_over_the_rate_of_the_script(schedule: str, tmp_path: Path, caplog: Any) -> None:
    """The rates are those of the schedule alone, also where the run is killed once more, and nothing is said then."""
    make = BEGUN[schedule]
    begun(tmp_path, None, 2)
    expected = alone(make, 7)
    assert begun(tmp_path, make, 5) == expected[:3]
    caplog.clear()
    assert close(begun(tmp_path, make, 9), expected[3:])
    assert logged(caplog) == []


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [*SCHEDULES, "warm-up", "warm-up of ours"])
def test_a_schedule_that_is_added_where_the_script_wins(schedule: str, tmp_path: Path) -> None:
    """The next start has the same rates: it knows from which one the schedule has begun."""
    make = BEGUN[schedule]
    begun(tmp_path, None, 2)
    expected = alone(make, 7)
    assert begun(tmp_path, make, 5, script_wins=("lr",)) == expected[:3]
    assert close(begun(tmp_path, make, 9, script_wins=("lr",)), expected[3:])


@pytest.mark.parametrize("schedule", ["warm-up", "cosine", "one cycle"])
def test_a_schedule_takes_the_place_of_another(schedule: str, tmp_path: Path) -> None:
    """Under another name it begins, and is restored from then on. One that is left out begins at each start."""
    make = BEGUN[schedule]
    begun(tmp_path, lambda o: schedulers.StepLR(o, 1, 0.5), 2)
    expected = alone(make, 7)
    assert begun(tmp_path, make, 5, "second") == expected[:3]
    assert close(begun(tmp_path, make, 9, "second"), expected[3:])
    assert begun(tmp_path, make, 12, "second", leave_out=("second",)) == expected[:3]


def test_a_rate_that_a_restored_plateau_has_lowered_stays(tmp_path: Path) -> None:
    """A warm-up that is left out begins over it, as it always has; of the script's rate the plateau knows nothing."""

    def run(updates: int) -> float:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trainer, evaluator = create_trainer(model, optimizer, forward), create_evaluator(model, forward)
        LearningRateSchedule(schedulers.ConstantLR(optimizer, 1.0, 2)).attach(trainer)
        plateau = schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1.0)
        ReduceOnPlateau(evaluator, plateau).attach(trainer)
        Validation(evaluator, LOADER).attach(trainer, Events.ITERATION_COMPLETED)
        Checkpoint(tmp_path, every=1, leave_out=("LearningRateSchedule",)).attach(trainer)
        trainer.run(LOADER, max_iters=updates)
        return float(trainer.state.output.learning_rates[0])

    before = run(4)
    assert run(5) <= before < 0.01


def test_a_schedule_without_a_state_can_be_left_out(tmp_path: Path) -> None:
    """A builtin function has no `__dict__`, which torch's `state_dict` of a LambdaLR looks for."""
    for updates in (2, 4):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trainer = create_trainer(model, optimizer, forward)
        LearningRateSchedule(schedulers.LambdaLR(optimizer, [1.0, 0.5, 0.25].__getitem__)).attach(trainer)
        Checkpoint(tmp_path, every=1, leave_out=("LearningRateSchedule",)).attach(trainer)
        assert trainer.run(LOADER, max_iters=updates).output.learning_rates[0] == 0.005


def test_the_momentum_of_the_script_is_back_where_a_cycle_is_replaced(tmp_path: Path, caplog: Any) -> None:
    """A one-cycle schedule has moved it; the schedule that takes its place begins over both."""
    assert begun(tmp_path, BEGUN["one cycle"], 4)[-1][1] < 0.95
    caplog.clear()
    assert begun(tmp_path, BEGUN["cosine"], 6, "second") == alone(BEGUN["cosine"], 2)
    assert "optimizer.momentum: 0.95 -> 0.9 (the script's is used)" in caplog.text


def test_a_second_schedule_begins_over_the_restored_rate(tmp_path: Path) -> None:
    """The first one is restored, and both change the rate."""

    def run(updates: int, *, with_second: bool) -> list[float]:
        model, found = net(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = create_trainer(model, optimizer, forward)
        LearningRateSchedule(schedulers.ExponentialLR(optimizer, 0.5)).attach(trainer)
        if with_second:
            LearningRateSchedule(schedulers.StepLR(optimizer, 100)).attach(trainer)
        Checkpoint(tmp_path, every=1).attach(trainer)
        trainer.append_event_handler(Events.ITERATION_STARTED, lambda: found.append(optimizer.param_groups[0]["lr"]))
        trainer.run(LOADER, max_iters=updates)
        return found

    assert run(2, with_second=False) == pytest.approx([0.1, 0.05])
    assert run(4, with_second=True) == pytest.approx([0.025, 0.0125])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_goes_on_over_the_rate_of_the_script(schedule: str, tmp_path: Path) -> None:
    """Its place and its shape are the checkpoint's: the rates are those of a whole run at the script's rate."""

    def rates(directory: Path, lr: float, updates: int, **options: Any) -> list[float]:
        model, found = net(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        trainer = create_trainer(model, optimizer, forward)
        LearningRateSchedule(SCHEDULES[schedule](optimizer)).attach(trainer)
        Checkpoint(directory, every=1, **options).attach(trainer)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: found.append(trainer.state.output.learning_rates[0]))
        trainer.run(LOADER, max_iters=updates)
        return found

    expected = rates(tmp_path / "whole", 0.005, 9)
    rates(tmp_path / "parts", 0.02, 3)
    assert rates(tmp_path / "parts", 0.005, 9, script_wins=("lr",)) == pytest.approx(expected[3:], rel=1e-12)


def test_a_rate_of_zero_has_no_other_multiple(tmp_path: Path) -> None:
    """A group that does not train stays so, beside one over the script's rate; that it shall train now is refused."""

    def made(first: float, second: float, **options: Any) -> Trainer:
        model = net()
        groups = [{"params": [*model[0].parameters()], "lr": first}, {"params": [*model[1:].parameters()], "lr": second}]
        optimizer = torch.optim.SGD(groups)
        trainer = create_trainer(model, optimizer, forward)
        LearningRateSchedule(schedulers.CosineAnnealingLR(optimizer, 12)).attach(trainer)
        Checkpoint(tmp_path, every=1, **options).attach(trainer)
        return trainer

    made(0.0, 0.02).run(LOADER, max_iters=3)
    message = refusal(made(0.3, 0.005, script_wins=("lr",)))
    assert (
        "param_groups[0] of optimizer had lr=0, which cannot be scaled to the script's 0.3; let the checkpoint win" in message
    )
    rates = made(0.0, 0.005, script_wins=("lr",)).run(LOADER, max_iters=4).output.learning_rates
    assert rates == pytest.approx((0.0, 0.005 * (1 + math.cos(math.pi * 3 / 12)) / 2), rel=1e-12)


@pytest.mark.slow
def test_a_schedule_that_has_rates_of_its_own_is_refused(tmp_path: Path) -> None:
    """It would overrule the script at its next step; the message says how to begin it anew."""

    def run(updates: int, **options: Any) -> Trainer:
        model = net()
        optimizer = adamw(model)
        trainer = create_trainer(model, optimizer, forward)
        LearningRateSchedule(schedulers.OneCycleLR(optimizer, 0.1, total_steps=20)).attach(trainer)
        Checkpoint(tmp_path, every=1, **options).attach(trainer)
        if updates:
            trainer.run(LOADER, max_iters=updates)
        return trainer

    run(3)
    message = refusal(run(0, script_wins=("lr",)))
    assert (
        "script_wins must not name 'lr' where 'handlers/LearningRateSchedule' is restored: OneCycleLR does not compute"
        in message
    )
    assert "as in handler.saved_as = 'second': it begins over the script's lr" in message
    assert run(6, script_wins=("lr",), leave_out=("LearningRateSchedule",)).state.iteration == 6


# --- schedules, scaling, generators and the rest ---


def scheduled(directory: Path, make: Callable[[Any], Any]) -> Trainer:
    model = net()
    optimizer = adamw(model)
    trainer = create_trainer(model, optimizer, forward)
    LearningRateSchedule(make(optimizer)).attach(trainer)
    Checkpoint(directory, every=1).attach(trainer)
    return trainer


def test_the_state_of_another_schedule_is_refused(tmp_path: Path) -> None:
    """Torch would set its attributes on whatever schedule it is given."""
    scheduled(tmp_path, lambda o: schedulers.StepLR(o, 2)).run(LOADER, max_iters=2)
    message = refusal(scheduled(tmp_path, lambda o: schedulers.CosineAnnealingLR(o, 9)))
    assert "is of another schedule at 'handlers/LearningRateSchedule'" in message
    assert "as in handler.saved_as = 'second': it begins over the script's lr" in message


def test_what_a_schedule_was_given_otherwise_is_listed(tmp_path: Path, caplog: Any) -> None:
    """The checkpoint's is used, as torch has it, and the log says so."""
    scheduled(tmp_path, lambda o: schedulers.StepLR(o, 2)).run(LOADER, max_iters=2)
    scheduled(tmp_path, lambda o: schedulers.StepLR(o, 3)).run(LOADER, max_iters=3)
    assert any("LearningRateSchedule.step_size: 2 -> 3 (the checkpoint's is used)" in line for line in logged(caplog))


def test_other_milestones_are_no_other_schedule(tmp_path: Path) -> None:
    """They are the keys of a mapping in the state, and an option that may differ as others may."""
    scheduled(tmp_path, lambda o: schedulers.MultiStepLR(o, [2, 5])).run(LOADER, max_iters=2)
    trainer = scheduled(tmp_path, lambda o: schedulers.MultiStepLR(o, [3, 5, 7]))
    assert trainer.run(LOADER, max_iters=3).iteration == 3


def chained(*parts: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda o: schedulers.ChainedScheduler([part(o) for part in parts])


def after_warm_up(*parts: Callable[[Any], Any], milestones: Sequence[int] = (3,)) -> Callable[[Any], Any]:
    return lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, 1.0, 3), *(part(o) for part in parts)], [*milestones]
    )


def decay(optimizer: Any) -> Any:
    return schedulers.ExponentialLR(optimizer, 0.9)


def stairs(optimizer: Any) -> Any:
    return schedulers.StepLR(optimizer, 2)


def cosine(length: int) -> Callable[[Any], Any]:
    return lambda o: schedulers.CosineAnnealingLR(o, length)


OTHER_PARTS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "another order": (
        chained(decay, stairs),
        chained(stairs, decay),
        "ChainedScheduler[ExponentialLR, StepLR] wrote it, and this run has ChainedScheduler[StepLR, ExponentialLR]",
    ),
    "fewer": (chained(decay, stairs), chained(decay), "and this run has ChainedScheduler[ExponentialLR]"),
    "more": (
        after_warm_up(cosine(9)),
        after_warm_up(cosine(9), decay, milestones=(3, 8)),
        "SequentialLR[LinearLR, CosineAnnealingLR] wrote it, and this run has "
        "SequentialLR[LinearLR, CosineAnnealingLR, ExponentialLR]",
    ),
    "another class": (after_warm_up(cosine(9)), after_warm_up(decay), "this run has SequentialLR[LinearLR, ExponentialLR]"),
    "deeper": (
        chained(after_warm_up(decay)),
        chained(after_warm_up(stairs)),
        "ChainedScheduler[SequentialLR[LinearLR, ExponentialLR]] wrote it",
    ),
}


@pytest.mark.parametrize("name", OTHER_PARTS)
def test_a_schedule_of_other_parts_is_refused(name: str, tmp_path: Path) -> None:
    """Each part would continue from the place of another, and the rates would be of neither schedule."""
    before, now, says = OTHER_PARTS[name]
    scheduled(tmp_path, before).run(LOADER, max_iters=2)
    assert says in refusal(scheduled(tmp_path, now))


@pytest.mark.parametrize(
    ("before", "now", "says"),
    [
        (after_warm_up(cosine(7)), after_warm_up(cosine(12)), "schedulers[1].T_max: 7 -> 12"),
        (after_warm_up(decay), after_warm_up(decay, milestones=(8,)), "milestones[0]: 3 -> 8"),
        (chained(after_warm_up(cosine(7))), chained(after_warm_up(cosine(9))), "schedulers[0].schedulers[1].T_max: 7 -> 9"),
        (lambda o: schedulers.MultiStepLR(o, [2, 5]), lambda o: schedulers.MultiStepLR(o, [3]), "milestones: [2, 5] -> [3]"),
    ],
    ids=["length", "milestone", "deeper", "milestones of steps"],
)
def test_what_a_part_was_given_otherwise_is_listed(before: Any, now: Any, says: str, tmp_path: Path, caplog: Any) -> None:
    """As for a schedule without parts; the same script again does not warn."""
    for limit, make in enumerate((before, before, now), start=1):
        assert not [line for line in logged(caplog) if "->" in line]
        scheduled(tmp_path, make).run(LOADER, max_iters=limit)
    (line,) = [line for line in logged(caplog) if "->" in line]
    assert f"{says} (the checkpoint's is used)" in line
    assert line.count("->") == 1


def _shorter_rates(index: Any, data: Any) -> None:
    put(index, "handlers/LearningRateSchedule", [], "base_lrs")


def test_rates_for_other_groups_are_refused(tmp_path: Path) -> None:
    """A schedule with fewer rates than groups would leave the others where they are."""
    scheduled(tmp_path, lambda o: schedulers.StepLR(o, 2)).run(LOADER, max_iters=2)
    forge(tmp_path, _shorter_rates)
    assert "it has [] for the 1 parameter groups" in refusal(scheduled(tmp_path, lambda o: schedulers.StepLR(o, 2)))


@pytest.mark.parametrize("make", [chained, after_warm_up], ids=["chain", "sequence"])
def test_a_one_cycle_at_its_end_within_another_schedule_is_restored(make: Any, tmp_path: Path) -> None:
    """Torch raises an error at one more step, which the run does not make."""
    for _ in range(2):
        trainer = scheduled(tmp_path, make(lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=6 if make is chained else 3)))
        assert trainer.run(LOADER, max_iters=6).iteration == 6


def test_a_tensor_of_several_numbers_is_no_base_rate(tmp_path: Path) -> None:
    """A rate may be a tensor, which is not read for the comparison, but has one number."""

    def tensor_rate(model: Any) -> Trainer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
        trainer = create_trainer(model, optimizer, forward)
        LearningRateSchedule(stairs(optimizer)).attach(trainer)
        Checkpoint(tmp_path, every=1).attach(trainer)
        return trainer

    tensor_rate(net()).run(LOADER, max_iters=2)
    name = "handlers/LearningRateSchedule['base_lrs'][0]"
    forge(tmp_path, lambda index, data: replace_tensor(index, data, name, torch.ones(3)))
    assert "it has float32 of shape (3,) in the place of a number" in refusal(tensor_rate(net()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i, d: replace_tensor(i, d, "generators['torch']", torch.zeros(16, dtype=torch.uint8)), "random generators"),
        (lambda i, d: replace_tensor(i, d, "generators['torch']", torch.zeros(5056)), "random generators"),
        (lambda i, d: put(i, "generators", [1, 2, 3], "python"), "random generators"),
        (lambda i, d: put(i, "data", [1, 2, 3], "opening", "python"), "does not fit this run: ValueError: the states of the"),
        (lambda i, d: put(i, "trainer", {"dict": []}, "carried"), "does not fit this run: ValueError: state_dict must have"),
        (lambda i, d: i["objects"].update({"trainer/state.metrics": 5}), "has an invalid state of 'trainer/state.metrics'"),
        (lambda i, d: put(i, "results", {"dict": [["loss", 1.0]]}, "output"), "has invalid results of an update"),
        (
            lambda i, d: put(i, "model", {"dict": []}, "0.weight"),
            "0.weight is no tensor, and this run has float32 of",
        ),
        (lambda i, d: put(i, "optimizer", {"dict": []}, "param_groups"), "has the keys"),
        (lambda i, d: i["objects"].update(optimizer=5), "is of another optimizer: is 5 of type int"),
    ],
    ids=["short", "floats", "python", "loader", "carried", "metrics", "output", "model", "groups", "number"],
)
def test_what_is_no_state_is_refused_before_anything_changes(change: Any, message: str, tmp_path: Path) -> None:
    """Generators, results, model and optimizer: nothing is loaded if one of them cannot be."""
    saved(tmp_path)
    forge(tmp_path, change)
    assert message in refusal(build(tmp_path))


def test_what_an_older_version_did_not_record_of_an_update_has_its_default(tmp_path: Path) -> None:
    """Each number of the record that has a default is left out, as it would be by a version that did not know it yet."""
    saved(tmp_path)

    def leave_out(index: Any, _: Any) -> None:
        record = next(entry for entry in index["objects"]["results"]["dict"] if entry[0] == "output")[1]["dict"]
        record[:] = [entry for entry in record if entry[0] in ("loss", "sample_size", "grad_norm")]
        kept.update(record)

    kept: dict[str, float] = {}
    forge(tmp_path, leave_out)
    trainer, seen = build(tmp_path), list[UpdateOutput | None]()
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: seen.append(trainer.state.update_output))
    trainer.run(LOADER, max_iters=4)
    assert seen[0] == UpdateOutput(**kept)
    assert len(seen) == 2


@pytest.mark.parametrize("keys", [("output",), ()], ids=["in the record", "beside the record"])
def test_what_a_newer_version_recorded_of_an_update_is_refused(keys: tuple[str, ...], tmp_path: Path) -> None:
    """The line does not say that the checkpoint is damaged, and nothing is renamed."""
    saved(tmp_path)

    def add(index: Any, _: Any) -> None:
        here = index["objects"]["results"]
        for key in keys:
            here = next(entry for entry in here["dict"] if entry[0] == key)[1]
        here["dict"].append(["num_flips", 3])

    path = forge(tmp_path, add)
    assert "ignite_train does not know 'num_flips', which most likely a newer version wrote; resume" in refusal(build(tmp_path))
    assert path.is_dir()


@pytest.mark.parametrize("scaling", [TorchLossScaling(8.0), StaticLossScaling(8.0)], ids=["torch", "static"])
def test_what_a_newer_version_saved_of_the_loss_scaling_is_refused(scaling: Any) -> None:
    with pytest.raises(ValueError, match=r"got .*'num_flips'.*: another policy wrote it, or a newer version of ignite_train"):
        scaling.load_state_dict({**scaling.state_dict(), "num_flips": 3})


@pytest.mark.parametrize(("key", "value"), [("good_updates", "7"), ("good_updates", -1), ("scale", "1")])
def test_counters_of_the_loss_scaling_are_looked_at(key: str, value: Any) -> None:
    """A counter of another type would break the run at the first update that grows the scale."""
    scaling = TorchLossScaling(8.0)
    before = scaling.state_dict()
    with pytest.raises((TypeError, ValueError), match=key):
        scaling.load_state_dict({**before, key: value})
    assert scaling.state_dict() == before


def test_sums_of_the_metrics_are_looked_at() -> None:
    """Sums under other names would break the run when they are published."""
    metrics = TrainingMetrics()
    with pytest.raises(ValueError, match=r"without .*grad_norm"):
        metrics.load_state_dict({**metrics.state_dict(), "sums": {"loss": 1.0}})


def _buffers(directory: str, forged: bool) -> Any:
    torch.manual_seed(idist.get_rank())
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    for parameter in model.parameters():
        parameter.data.fill_(0.1)
    trainer = create_trainer(model, adamw(model), forward, options=UpdateOptions(reduction="explicit"))
    Checkpoint(directory, every=1, keep=9).attach(trainer)
    try:
        trainer.run(LOADER, max_iters=2 + forged)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_buffers_of_other_ranks_are_compared(tmp_path: Path) -> None:
    """A buffer of another shape would be spread over that of the model; all ranks refuse it alike."""
    assert run_ranks(_buffers, str(tmp_path), False) == ["", ""]
    newest = sorted(tmp_path.glob("update-*"))[-1]
    for path in tmp_path.glob("update-*"):
        if path != newest:
            shutil.rmtree(path)
    stored = stored_in(newest, rank=1)
    replace_tensor(stored.index, stored, "buffers['model']['1.running_mean']", torch.ones(1))
    reseal(newest, stored, rank=1)
    first, second = run_ranks(_buffers, str(tmp_path), True)
    assert first == second
    assert "is of another model: 1.running_mean is float32 of shape (1,), and this run has float32 of shape (8,)" in first


# --- optimizers of another shape ---


class Facade(torch.optim.Optimizer):
    """Two optimizers as one, with a state of its own form."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"os": [part.state_dict() for part in self.parts]}


def test_an_optimizer_whose_state_has_another_form_is_refused_when_it_is_attached(tmp_path: Path) -> None:
    """If it cannot load it: its checkpoints could be written and not be read."""
    model = net()
    optimizer = Facade(adamw(model[0]), torch.optim.SGD(model[1:].parameters(), lr=0.1))
    trainer = create_trainer(model, optimizer, forward)
    with pytest.raises(TypeError, match=r"optimizer must load the state that it gives.*subclass of Facade"):
        Checkpoint(tmp_path).attach(trainer)
    with pytest.raises(TypeError, match=r"to_save/other must load the state"):
        Checkpoint(tmp_path, to_save={"other": optimizer}).attach(create_trainer(model, adamw(model), forward))


def sharded_by_zero(directory: str, updates: int, seed: int) -> Any:
    """Trains with each rank's part of the moments; gives the parameters, and the moments of this rank."""
    model = net(seed)
    if idist.get_world_size() > 1:
        model = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01)
    trainer = create_trainer(model, optimizer, forward)
    LearningRateSchedule(schedulers.ExponentialLR(optimizer, 0.9)).attach(trainer)
    if directory:
        Checkpoint(directory, every=1).attach(trainer)
    trainer.run(LOADER, max_iters=updates)
    moments = optimizer.optim.state_dict()["state"]
    return bit_by_bit([*trainer.model.state_dict().values()]), bit_by_bit({key: moments[key] for key in sorted(moments)})


@pytest.mark.slow
def test_moments_that_are_sharded_by_zero_come_back_bitwise(tmp_path: Path) -> None:
    """Rank 0 writes the moments of all ranks, and each takes its own."""
    whole = run_ranks(sharded_by_zero, "", 6, 0)
    run_ranks(sharded_by_zero, str(tmp_path), 3, 0)
    resumed = run_ranks(sharded_by_zero, str(tmp_path), 6, 5)
    assert resumed == whole
    assert whole[0][1] != whole[1][1]


# --- handlers ---


@pytest.mark.slow
def test_a_handler_that_cannot_be_stored_does_not_end_the_run(tmp_path: Path, caplog: Any) -> None:
    """One warning says what is lost and how to be silent about it; everything else is stored and comes back."""

    def run(updates: int, **options: Any) -> None:
        model = net()
        trainer = create_trainer(model, adamw(model), forward)
        TrainingMetrics().attach(trainer, Events.ITERATION_COMPLETED)
        ema = EMAHandler(model, momentum=0.5, momentum_warmup=0.1, warmup_iters=3)
        ema.attach(trainer, warn_if_exists=False)
        Checkpoint(tmp_path, every=1, to_save={"ema": ema.ema_model}, **options).attach(trainer)
        trainer.run(LOADER, max_iters=updates)
        assert trainer.state.iteration == updates

    run(4)
    (line,) = logged(caplog)
    assert line.startswith(
        "handlers/LambdaStateScheduler is left out of the checkpoints, so a resumed run starts without its state: "
    )
    assert "handlers/LambdaStateScheduler['lambda_obj'] cannot be stored" in line
    assert "Checkpoint(..., leave_out=('LambdaStateScheduler',)) leaves it out without this warning" in line
    caplog.clear()
    run(6, leave_out=("LambdaStateScheduler",))
    assert logged(caplog) == []


class Raises:
    """A handler whose state cannot even be asked for."""

    def state_dict(self) -> Any:
        raise RuntimeError("no\nstate")

    def load_state_dict(self, state: Any) -> None:
        """Never called."""

    def __call__(self) -> None:
        """So that it can be a handler."""


class IsInterrupted(Raises):
    """A handler whose `state_dict` is interrupted once by a foreign error, such as the end of a worker."""

    asked = 0

    def state_dict(self) -> Any:
        self.asked += 1
        if self.asked == 4:
            raise RuntimeError("DataLoader worker is killed")
        return {"asked": self.asked}


class Asked(Raises):
    """A handler that counts how often it is asked for its state."""

    def __init__(self, state: Any) -> None:
        self.state, self.asked = state, 0

    def state_dict(self) -> Any:
        self.asked += 1
        return {"state": self.state}


def test_a_state_that_cannot_be_stored_is_asked_for_as_often_as_others(tmp_path: Path) -> None:
    """It may be collective, and another rank's can be stored."""
    handlers = [Asked(1), Asked(object())]
    for handler in handlers:
        trainer = build(tmp_path / str(handlers.index(handler)))
        trainer.add_event_handler(Events.ITERATION_COMPLETED, handler)
        trainer.run(LOADER, max_iters=3)
    assert handlers[0].asked == handlers[1].asked


def test_an_error_that_is_not_of_a_state_fails_the_save(tmp_path: Path) -> None:
    """Or else the newest checkpoint would lack the state, and the next start would take it."""
    model = net()
    trainer = create_trainer(model, adamw(model), forward)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, IsInterrupted())
    Checkpoint(tmp_path, every=1).attach(trainer)
    with pytest.raises(RuntimeError, match="worker is killed"):
        trainer.run(LOADER, max_iters=8)
    found = sorted(tmp_path.glob("update-*"))
    assert found
    for path in found:
        with CheckpointReader(path) as stored:
            assert "handlers/IsInterrupted" in stored.names()


def test_a_handler_whose_state_raises_does_not_end_the_run(tmp_path: Path, caplog: Any) -> None:
    """It is left out like one that cannot be stored; nothing half of it is written."""
    trainer = build(tmp_path)
    trainer.add_event_handler(Events.STARTED, Raises())
    trainer.run(LOADER, max_iters=3)
    (line,) = logged(caplog)
    assert "handlers/Raises is left out" in line
    assert "RuntimeError: no state" in line
    with CheckpointReader(sorted(tmp_path.glob("update-*"))[-1]) as stored:
        stored.verify()
        assert "handlers/Raises" not in stored.names()


def test_a_metric_that_cannot_be_stored_does_not_end_the_run(tmp_path: Path, caplog: Any) -> None:
    """A table that a handler has published for a logger is left out with one warning; the other metrics come back."""
    trainer = build(tmp_path)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: trainer.state.metrics.update(table=object(), numbers=[1, 2]))
    trainer.run(LOADER, max_iters=3)
    (line,) = logged(caplog)
    assert line.startswith("state.metrics['table'] is left out of the checkpoints, so a resumed run starts without it: ")
    assert line.endswith("; publish a number, a string or a tensor")
    again = build(tmp_path)
    again.run(LOADER, max_iters=3)
    assert again.state.metrics == {"numbers": [1, 2]}


def test_a_metric_of_an_evaluator_that_cannot_be_stored_is_told_too(tmp_path: Path, caplog: Any) -> None:
    trainer = build(tmp_path)
    evaluator = create_evaluator(trainer.model, forward)
    evaluator.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.state.metrics.update(table=object()))
    Validation(evaluator, LOADER).attach(trainer, Events.ITERATION_COMPLETED)
    trainer.run(LOADER, max_iters=3)
    (line,) = logged(caplog)
    assert line.startswith(
        "evaluator/state.metrics['table'] is left out of the checkpoints, so a resumed run starts without it: "
    )


class Half:
    """A handler whose state can be stored in part: a tensor that another handler holds too, and a lock."""

    def __init__(self, tensor: Tensor, rest: Any) -> None:
        self.state = {"tensor": tensor, "rest": rest}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state

    def __call__(self) -> None:
        """So that it can be a handler."""


class Adds:
    """A handler that is called with a number."""

    def __init__(self) -> None:
        self.total = 0

    def __call__(self, number: int) -> None:
        self.total += number

    def add(self, number: int) -> None:
        self.total += number

    def state_dict(self) -> Any:
        return {"total": self.total}

    def load_state_dict(self, state: Any) -> None:
        self.total = state["total"]


@pytest.mark.parametrize(
    "given",
    [lambda adds: partial(adds, 2), lambda adds: partial(adds.add, 2), lambda adds: partial(partial(adds.add), number=2)],
    ids=["object", "method", "twice"],
)
def test_the_owner_of_a_partial_is_saved(given: Any, tmp_path: Path) -> None:
    """An object of which a method is attached with some of its arguments; and no longer when it is taken off."""
    for updates in (3, 5):
        trainer, adds = build(tmp_path), Adds()
        trainer.add_event_handler(Events.ITERATION_COMPLETED, handler := given(adds))
        trainer.run(LOADER, max_iters=updates)
        assert adds.total == 2 * updates
    trainer.remove_event_handler(handler, Events.ITERATION_COMPLETED)
    trainer.run(LOADER, max_iters=6)
    with CheckpointReader(sorted(tmp_path.glob("update-*"))[-1]) as stored:
        assert "handlers/Adds" not in stored.names()


def test_each_checkpoint_has_the_handlers_that_are_attached_then(tmp_path: Path) -> None:
    """One that comes in the run, one that goes to an evaluator, and one that goes."""
    trainer, adds = build(tmp_path), Adds()
    evaluator = create_evaluator(trainer.model, forward)
    Validation(evaluator, LOADER).attach(trainer, Events.ITERATION_COMPLETED)

    def move() -> None:
        if trainer.state.iteration == 1:
            trainer.add_event_handler(Events.ITERATION_COMPLETED, adds.add, 1)
        elif trainer.state.iteration == 2:
            trainer.remove_event_handler(adds.add, Events.ITERATION_COMPLETED)
            evaluator.add_event_handler(Events.COMPLETED, adds.add, 1)
        elif trainer.state.iteration == 3:
            evaluator.remove_event_handler(adds.add, Events.COMPLETED)

    trainer.add_event_handler(Events.ITERATION_STARTED, move)
    trainer.run(LOADER, max_iters=3)
    found = []
    for path in sorted(tmp_path.glob("update-*")):
        with CheckpointReader(path) as stored:
            found.append([name for name in stored.names() if name.endswith("Adds")])
    assert found == [["handlers/Adds"], ["evaluator/Adds"], []]


def test_what_was_half_encoded_leaves_nothing_behind(tmp_path: Path) -> None:
    """A tensor that it shares with another handler is still stored with that one."""
    shared = torch.arange(3.0)
    trainer = build(tmp_path)
    first, second = Half(shared, object()), Half(shared, 1)
    trainer.add_event_handler(Events.STARTED, first)
    trainer.add_event_handler(Events.STARTED, second)
    trainer.run(LOADER, max_iters=1)
    with CheckpointReader(sorted(tmp_path.glob("update-*"))[-1]) as stored:
        stored.verify()
        assert torch.equal(stored.read("handlers/Half-2")["tensor"], shared)


# --- handlers that hold what no checkpoint keeps ---


@pytest.mark.slow
def test_an_average_that_no_checkpoint_keeps_is_named(tmp_path: Path, caplog: Any) -> None:
    """`EMAHandler` has no `state_dict`: once, with its attribute and the remedy, which silences it."""
    for options, expected in (({}, 1), ({"leave_out": ("EMAHandler",)}, 0), ({"to_save": True}, 0)):
        caplog.clear()
        model = net()
        trainer = create_trainer(model, adamw(model), forward)
        ema = EMAHandler(model, momentum=0.5)
        ema.attach(trainer)
        if "to_save" in options:
            options = {"to_save": {"ema": ema.ema_model}}
        Checkpoint(tmp_path / str(len(options)) / str(expected) / str([*options]), every=1, **options).attach(trainer)
        trainer.run(LOADER, max_iters=3)
        lines = logged(caplog)
        assert len(lines) == expected
        assert all("the handler EMAHandler holds 6 tensors in 'ema_model' that change in training" in line for line in lines)
        assert all("Checkpoint(..., to_save={'ema_model': ...})" in line for line in lines)


class Own:
    """What users write: an average by hand."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self.model = model

    def update(self) -> None:
        for name, parameter in self.model.named_parameters():
            self.shadow[name].lerp_(parameter.detach(), 0.5)


@pytest.mark.parametrize("is_partial", [False, True])
def test_tensors_of_any_object_and_modules_of_any_function_are_seen(is_partial: bool, tmp_path: Path, caplog: Any) -> None:
    """Bound methods, with arguments by `functools.partial` too, objects, closures and arguments."""
    model = net()
    trainer = create_trainer(model, adamw(model), forward)
    average, critic = AveragedModel(model), nn.Linear(2, 2)
    update = Own(model).update
    trainer.add_event_handler(TrainEvents.STEP_COMPLETED(every=1), partial(update) if is_partial else update)

    def in_closure() -> None:
        average.update_parameters(model)

    def by_argument(critic: nn.Module) -> None:
        with torch.no_grad():
            next(critic.parameters()).mul_(0.5)

    trainer.add_event_handler(TrainEvents.STEP_COMPLETED, in_closure)
    trainer.add_event_handler(TrainEvents.STEP_COMPLETED, by_argument, critic)
    Checkpoint(tmp_path, every=1).attach(trainer)
    trainer.run(LOADER, max_iters=2)
    lines = logged(caplog)
    for part in ("Own holds 6 tensors in 'shadow'", "in_closure holds 7 tensors in 'average'", "by_argument holds 1 tensors"):
        assert sum(part in line for line in lines) == 1, part
    assert len(lines) == 3


def test_a_handler_may_name_what_is_not_there_yet(tmp_path: Path, caplog: Any) -> None:
    """An evaluator that is made later, or never; what else the function refers to is seen all the same."""
    model = net()
    trainer, average, later = create_trainer(model, adamw(model), forward), AveragedModel(model), False

    def in_closure() -> None:
        average.update_parameters(evaluator if later else model)

    if later:
        evaluator = model
    trainer.add_event_handler(TrainEvents.STEP_COMPLETED, in_closure)
    Checkpoint(tmp_path, every=1).attach(trainer)
    trainer.run(LOADER, max_iters=2)
    (line,) = logged(caplog)
    assert "in_closure holds 7 tensors in 'average'" in line


class Late:
    """Makes what it holds when it is first called, and changes it with each later call."""

    held: Tensor | None = None

    def __call__(self) -> None:
        self.held = torch.zeros(2) if self.held is None else self.held.add_(1)


@pytest.mark.parametrize(("held", "updates", "every"), [(torch.zeros(2), 1, 9), (None, 3, 1)], ids=["one save", "made later"])
def test_what_is_held_is_noticed_as_soon_as_it_changes(
    held: Tensor | None, updates: int, every: int, tmp_path: Path, caplog: Any
) -> None:
    """By the only checkpoint of a run too, and where the handler makes its tensors while the run is under way."""
    model = net()
    trainer, handler = create_trainer(model, adamw(model), forward), Late()
    handler.held = held
    trainer.add_event_handler(Events.ITERATION_COMPLETED, handler)
    Checkpoint(tmp_path, every=every, every_epochs=9, asynchronous=False).attach(trainer)
    trainer.run(LOADER, max_iters=updates)
    (line,) = logged(caplog)
    assert "the handler Late holds 1 tensors in 'held' that change in training" in line


def test_a_tensor_in_the_place_of_a_freed_one_is_watched() -> None:
    """What has its id was another tensor when it was looked at first; its own changes are seen from then on."""
    held, tensor, former = HeldState(), torch.zeros(2), torch.zeros(2)
    held._versions[id(tensor)] = weakref.ref(former), former._version
    assert not held._is_changed(tensor)
    assert not held._is_changed(tensor)
    tensor.add_(1)
    assert held._is_changed(tensor)


def _with_an_average(directory: str) -> list[str]:
    lines = messages_from_here()
    model = net()
    trainer = create_trainer(model, adamw(model), forward, options=UpdateOptions(reduction="explicit"))
    EMAHandler(model, momentum=0.5).attach(trainer)
    Checkpoint(directory, every=1).attach(trainer)
    trainer.run(LOADER, max_iters=2)
    return lines


@pytest.mark.slow
def test_what_is_held_on_all_ranks_is_named_by_the_first(tmp_path: Path) -> None:
    (line,), other = run_ranks(_with_an_average, str(tmp_path))
    assert "the handler EMAHandler holds 6 tensors in 'ema_model'" in line
    assert other == []


class Innocent:
    """Holds what is not lost: the model, a frozen teacher, its predictions, the latest batch, a loss without weights."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.teacher, self.latest, self.loss = model, net(1), None, nn.MSELoss()
        with torch.inference_mode():
            self.targets = torch.ones(3)  # has no count of its changes

    def __call__(self, trainer: Trainer) -> None:
        self.latest = trainer.state.batch[0]


def test_what_is_not_lost_is_not_named(tmp_path: Path, caplog: Any) -> None:
    """No false alarm for plain functions, frozen modules, caches, Ignite's handlers and our own."""
    model = net()
    optimizer = adamw(model)
    trainer, evaluator = create_trainer(model, optimizer, forward), create_evaluator(model, forward)
    seen: list[float] = []

    def note() -> None:
        seen.append(float(next(model.parameters()).detach().sum()))

    profiler = BasicTimeProfiler()
    profiler.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, note)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, Innocent(model))
    stopper = EarlyStopping(5, lambda engine: -engine.state.metrics["loss"], trainer)
    evaluator.add_event_handler(Events.COMPLETED, stopper)
    Validation(evaluator, LOADER).attach(trainer, Events.ITERATION_COMPLETED)
    for handler in (TrainingMetrics(), StateConsistency(model, optimizer), GradNormConsistency()):
        handler.attach(trainer)
    average = AveragedModel(model)
    trainer.add_event_handler(TrainEvents.STEP_COMPLETED, lambda: average.update_parameters(model))
    LearningRateSchedule(schedulers.StepLR(optimizer, 2)).attach(trainer)
    Checkpoint(tmp_path, every=1, to_save={"average": average}).attach(trainer, evaluator=evaluator)
    trainer.run(LOADER, max_epochs=1)
    assert logged(caplog) == []


class Stepping:
    """A program of the user's that steps its schedules itself."""

    def __init__(self, schedule: Any) -> None:
        self.schedules = [schedule]

    def after_update(self) -> None:
        self.schedules[0].step()


def _stepped(way: str, schedule: Any) -> Callable[..., None]:
    """A handler that steps a schedule."""
    step = schedule.step
    ways: dict[str, Callable[..., None]] = {
        "closure": lambda: schedule.step(),  # a bound method is refused
        "method in a closure": lambda: step(),
        "default": lambda trainer, schedule=schedule: schedule.step(),
        "attribute": Stepping(schedule).after_update,
    }
    return ways[way]


@pytest.mark.parametrize("way", ["closure", "method in a closure", "default", "attribute"])
def test_a_schedule_that_no_checkpoint_keeps_is_named(way: str, tmp_path: Path, caplog: Any) -> None:
    """Once, before the first batch. With `to_save` a resumed run has the rates of a loop by hand, and nothing is said."""

    def sequence(optimizer: torch.optim.Optimizer) -> Any:
        parts = [schedulers.ConstantLR(optimizer, 0.5, 2), schedulers.StepLR(optimizer, 1, 0.5)]
        return schedulers.SequentialLR(optimizer, parts, [2])  # type: ignore[arg-type]

    def by_hand(updates: int) -> float:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.01)
        schedule = sequence(optimizer)
        for _ in range(updates):
            optimizer.step()
            schedule.step()
        rate: float = optimizer.param_groups[0]["lr"]
        return rate

    def train(directory: Path, updates: int, **options: Any) -> tuple[float, list[str]]:
        caplog.clear()
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        schedule = sequence(optimizer)
        trainer = create_trainer(model, optimizer, forward)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, _stepped(way, schedule))
        said: list[int] = []
        trainer.add_event_handler(Events.ITERATION_STARTED(once=1), lambda: said.append(len(caplog.messages)))
        to_save = {"schedule": schedule} if options.pop("saves", False) else None
        Checkpoint(directory, every=1, to_save=to_save, **options).attach(trainer)
        trainer.run(LOADER, max_iters=updates)
        lines = [line for line in logged(caplog) if "whose state no checkpoint keeps" in line]
        assert said in ([], [len(lines)])
        return optimizer.param_groups[0]["lr"], lines

    (line,) = train(tmp_path / "lost", 2)[1]
    name = "Stepping" if way == "attribute" else "<lambda>"
    assert line.startswith(f"the handler {name} holds a SequentialLR in ")
    assert "LearningRateSchedule(...).attach(trainer)" in line
    assert train(tmp_path / "left", 2, leave_out=(name,))[1] == []
    rates = [train(tmp_path / "saved", updates, saves=True) for updates in (3, 5)]
    assert rates == [(by_hand(3), []), (by_hand(5), [])]
    assert by_hand(3) > by_hand(5)


def test_a_schedule_that_is_kept_or_of_another_run_is_not_named(tmp_path: Path, caplog: Any) -> None:
    """The schedule of a handler of ours or of Ignite's, a part of it, and a schedule over an optimizer of another run."""
    model, other = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    parts = [schedulers.ConstantLR(optimizer, 0.5, 2), schedulers.StepLR(optimizer, 1, 0.5)]
    ours: Any = schedulers.SequentialLR(optimizer, parts, [2])
    theirs = IgnitesSchedule(schedulers.StepLR(optimizer, 3))
    foreign = schedulers.StepLR(torch.optim.SGD(other.parameters(), lr=1.0), 3)
    trainer, seen = create_trainer(model, optimizer, forward), list[Any]()
    LearningRateSchedule(ours).attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED, theirs)
    last = parts[1]
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda: seen.extend([ours.get_last_lr(), last.get_last_lr(), theirs.lr_scheduler.get_last_lr(), foreign.get_last_lr()]),
    )
    Checkpoint(tmp_path, every=1).attach(trainer)
    trainer.run(LOADER, max_iters=2)
    assert logged(caplog) == []


# --- what a file claims ---

_MEMORY = """
import json, resource, sys
from pathlib import Path
sys.path[:0] = {folders!r}
import torch
from test_other_state import LOADER, adamw, build, net
from ignite_train import CheckpointError
from ignite_train import checkpoint
trainer = build(Path({directory!r}))
trainer.optimizers["optimizer"].zero_grad()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    {action}
    message = "nothing was refused"
except CheckpointError as error:
    message = str(error)
print(json.dumps([message, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024]))
"""
_RESUME = "trainer.run(LOADER, max_iters=9)"


def peak(directory: Path, action: str = _RESUME) -> tuple[str, int]:
    """The error of an action in a new process, and by how many MiB it grew."""
    folders = [str(Path(file).parent) for file in (__file__, small_checkpoints.__file__)]
    script = _MEMORY.format(folders=folders, directory=str(directory), action=action)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=True)
    message, megabytes = json.loads(done.stdout.splitlines()[-1])
    return message, megabytes


def claim(directory: Path, name: str, numbers: int) -> Path:
    """A checkpoint that claims a vector of so many zeros, which are a hole in its file."""
    path = forge(directory, lambda index, data: None)
    stored = stored_in(path)
    replace_tensor(stored.index, stored, name, torch.zeros(0))
    crc, block = 0, bytes(2**20)
    for _ in range(numbers // 2**18):
        crc = zlib.crc32(block, crc)
    end = len(stored.numbers)
    stored.header[name] |= {"shape": [numbers], "data_offsets": [end, end + 4 * numbers]}
    stored.index["tensors"][name] = {"crc32": crc}
    size = len(put_together(stored.header, stored.numbers)[0]) + 4 * numbers
    reseal(path, stored, size=size)
    with (path / "rank-00000.safetensors").open("r+b") as file:
        file.truncate(size)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        nightly("model['0.weight']", "0.weight is float32 of shape (536870912,), and this run has float32 of shape (8, 8)"),
        nightly(
            "optimizer['state'][0]['exp_avg']",
            "exp_avg of 0.weight is float32 of shape (536870912,), and",
        ),
        nightly("optimizer['state'][0]['step']", "step of 0.weight is float32 of shape (536870912,)"),
        ("handlers/Half['tensor']", "are on the disk; copy it without holes"),
        nightly("to_save/own['tensor']", "are on the disk; copy it without holes"),
        nightly("generators['torch']", "are on the disk; copy it without holes"),
    ],
)
def test_a_claim_of_two_gigabytes_takes_no_memory(name: str, message: str, tmp_path: Path) -> None:
    """28 kB on the disk with right checksums: refused by its shape before memory is asked for."""
    saved_with_half(tmp_path)
    claim(tmp_path, name, 2**29)
    setup = "from test_other_state import saved_with_half; saved_with_half(Path({directory!r}), 9)"
    found, megabytes = peak(tmp_path, setup.format(directory=str(tmp_path)))
    assert message in found
    assert megabytes < 300


def saved_with_half(directory: Path, updates: int = 2) -> None:
    """A run with a handler and an object of the user that hold tensors."""
    trainer = build(directory, to_save={"own": Half(torch.ones(3), 1)})
    trainer.add_event_handler(Events.STARTED, Half(torch.zeros(3), 1))
    trainer.run(LOADER, max_iters=updates)


@pytest.mark.parametrize("name", ["handlers/Half['tensor']", "to_save/own['tensor']", "optimizer['state'][0]['rows']"])
def test_what_may_be_claimed_follows_from_what_the_disk_holds(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Where nothing is granted in any case an honest checkpoint is taken, and one with a hole of a megabyte is not."""
    monkeypatch.setattr("ignite_train.checkpoint.tensor_files._FREE_BYTES", 0)

    def start() -> Trainer:
        trainer = build(tmp_path, FORMS["own"], to_save={"own": Half(torch.ones(3), 1)})
        trainer.add_event_handler(Events.STARTED, Half(torch.zeros(3), 1))
        return trainer

    for updates in (2, 3):
        start().run(LOADER, max_iters=updates)
    claim(tmp_path, name, 2**18)
    assert "are on the disk; copy it without holes" in refusal(start())


@pytest.mark.nightly
def test_verifying_takes_the_memory_of_a_buffer(tmp_path: Path) -> None:
    """Whatever a file claims, its bytes are checked a few at a time."""
    saved(tmp_path)
    path = claim(tmp_path, "model['0.weight']", 2**28)
    found, megabytes = peak(tmp_path, f"checkpoint.verify({str(path)!r})")
    assert found == "nothing was refused"
    assert megabytes < 200


@pytest.mark.nightly
def test_an_index_of_endless_lists_is_not_parsed(tmp_path: Path) -> None:
    """Sixty megabytes of `[]` would be lists of more than a gigabyte."""
    saved(tmp_path)
    path = forge(tmp_path, lambda index, data: None)
    index = (path / "rank-00000.json").read_bytes()
    lists = b"[" + b"[]," * (20 * 2**20) + b"[]]"
    forged = index.replace(b'{"objects":{', b'{"objects":{"more":' + lists + b",", 1)
    assert forged != index
    reseal(path, stored_in(path), index=forged)
    found, megabytes = peak(tmp_path)
    assert f"its JSON has more than {MAX_MARKS} values" in found
    assert megabytes < 300


def test_a_manifest_of_endless_lists_is_not_parsed(tmp_path: Path) -> None:
    """Twelve megabytes of `[]` would be lists of a quarter of a gigabyte."""
    path = sorted(saved(tmp_path).glob("update-*"))[-1]
    manifest = json.loads((path / "manifest.json").read_bytes())["manifest"]
    body = json.dumps({**manifest, "config": "@"}).encode().replace(b'"@"', b"[" + b"[]," * 4_000_001 + b"[]]")
    (path / "manifest.json").write_bytes(b'{"crc32":"%08x","manifest":%b}\n' % (zlib.crc32(body), body))
    with pytest.raises(DamagedCheckpointError, match="its JSON has more than 4000000 values"):
        verify(path)


@pytest.mark.slow
def test_what_the_reader_would_refuse_is_not_written(tmp_path: Path, monkeypatch: Any) -> None:
    """A state of more values, or a configuration that is too large for a manifest, fails when it is saved."""
    trainer = build(tmp_path, config={"text": "x" * 2**25})
    with pytest.raises(CheckpointError, match="config must be small, got a manifest of"):
        trainer.run(LOADER, max_iters=2)
    monkeypatch.setattr("ignite_train.checkpoint.directory.MAX_MARKS", 100)
    with pytest.raises(CheckpointError, match="the state has more than 100 values"):
        build(tmp_path).run(LOADER, max_iters=2)
    assert [*tmp_path.iterdir()] == []


def marks(data: bytes) -> int:
    """Brackets, braces and commas."""
    return len(re.findall(rb"[\[{,]", data))


LIMITS: dict[str, tuple[tuple[str, ...], Callable[[bytes, bytes], int]]] = {
    "bytes of the index": (("directory.MAX_INDEX_BYTES", "reader.MAX_INDEX_BYTES"), lambda index, _: len(index)),
    "values of the index": (("directory.MAX_MARKS",), lambda index, _: marks(index)),
    "bytes of the manifest": (("manifest._MAX_MANIFEST_BYTES",), lambda _, manifest: len(manifest)),
    "values of the manifest": (("manifest._MAX_MANIFEST_MARKS",), lambda _, manifest: marks(manifest.partition(b't":')[2])),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_what_is_as_large_as_allowed_is_written_and_read(limit: str, tmp_path: Path, monkeypatch: Any) -> None:
    """The reader takes all that the writer lets through, and the writer refuses what is larger by one."""
    names, count = LIMITS[limit]
    first = save(tmp_path / "first", 1)
    size = count((first / "rank-00000.json").read_bytes(), (first / "manifest.json").read_bytes())
    for name in names:
        monkeypatch.setattr(f"ignite_train.checkpoint.{name}", size)
    verify(save(tmp_path / "second", 1))
    for name in names:
        monkeypatch.setattr(f"ignite_train.checkpoint.{name}", size - 1)
    with pytest.raises(CheckpointError, match=r"the state has .* use tensors|config must be small"):
        save(tmp_path / "third", 1)
    assert [*(tmp_path / "third").iterdir()] == []


def test_the_limits_let_through_what_can_be_written() -> None:
    """The largest state that the encoder takes has fewer marks than the reader allows."""
    for value in ([()] * 1000, {(index,): () for index in range(400)}, [{}] * 1000, [torch.ones(1, 1, 1, 1)] * 1000):
        encoder = TreeEncoder()
        tree = encoder.encode(value, ("x",))
        note = Entry("complex128", (1,) * 4, (0,) * 4, (2,) * 4, (3, 2, 1, 0), 0).note(0)
        entries = dict.fromkeys(encoder.tensors, note)
        per_node = count_marks(compact_json({"objects": {"x": tree}, "tensors": entries})) / encoder._nodes
        assert 2 * per_node * MAX_NODES <= MAX_MARKS
