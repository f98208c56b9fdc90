"""Weights without a trainer: from a run, a checkpoint or a plain file, for any wrapping of the model."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import small_checkpoints
from bits import bit_by_bit
from ignite_train import CheckpointError, count_traffic, create_evaluator, create_trainer
from ignite_train.checkpoint import average_checkpoints, best, consolidate, latest, load_weights
from ignite_train.checkpoint.directory import CheckpointDirectory, commit
from ignite_train.handlers import Checkpoint, ModelEMA, Validation
from ignite_train.ranks import collectives
from ignite_train.tools.write_weights import write_weights
from ranks import run_ranks

DATA = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def net(outputs: int = 2, seed: int = 3) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, outputs))


def mean_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - 2.0).square().mean()


def train(directory: Path) -> dict[str, Any]:
    """A run whose first epoch is its best. Gives the bits of its models: the latest, the best and the average."""
    model = net()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), mean_loss)
    evaluator, ema = create_evaluator(model, mean_loss), ModelEMA(0.5)
    ema.attach(trainer)
    states: dict[str, Any] = {}
    evaluator.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.state.metrics.update(rank=float(trainer.state.epoch)))
    Validation(evaluator, DATA, score="rank", mode="min").attach(trainer)
    Checkpoint(directory, score="rank", mode="min", every_epochs=1, asynchronous=False).attach(trainer, evaluator=evaluator)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: states.setdefault("best", bit_by_bit(dict(model.state_dict()))))
    trainer.run(DATA, max_epochs=3)
    return {**states, "latest": bit_by_bit(dict(model.state_dict())), "average": bit_by_bit(ema.state_dict()["model"])}


def loaded(path: Path, model: nn.Module | None = None, **options: Any) -> Any:
    model = model or net(seed=9)
    assert load_weights(model, path, **options) == []
    return bit_by_bit(dict(model.state_dict()))


def test_from_a_run(tmp_path: Path) -> None:
    """The newest, the best, the average, and one checkpoint by its path; the function writes the same to a file."""
    states = train(tmp_path / "run")
    assert loaded(tmp_path / "run") == states["latest"] != states["best"]
    assert loaded(tmp_path / "run", best=True) == states["best"]
    assert loaded(tmp_path / "run", entry="ModelEMA") == states["average"]
    found = best(tmp_path / "run")
    assert found is not None
    assert loaded(found.path) == states["best"]
    consolidate(tmp_path / "run", tmp_path / "best.pt", best=True)
    assert bit_by_bit(torch.load(tmp_path / "best.pt")) == states["best"]
    consolidate(tmp_path / "run", tmp_path / "average.pt", entry="ModelEMA")
    assert loaded(tmp_path / "average.pt") == states["average"]


def test_a_folder_with_checkpoints_is_a_run_whatever_else_lies_in_it(tmp_path: Path) -> None:
    """Older exports of each format in it are not read, by none of the functions."""
    states, old = train(tmp_path), net(seed=1).state_dict()
    write_weights(old, tmp_path / "away", file_format="distributed")
    for file in (tmp_path / "away").iterdir():
        file.rename(tmp_path / file.name)
    for name in ("pytorch_model.bin", "model.safetensors"):
        write_weights(old, tmp_path / name)
        (tmp_path / f"{name}.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(old, name)}), encoding="utf-8")
    assert loaded(tmp_path) == states["latest"]
    assert loaded(tmp_path, best=True) == states["best"]
    assert loaded(tmp_path, entry="ModelEMA") == states["average"]
    assert bit_by_bit(average_checkpoints([tmp_path])) == states["latest"]
    consolidate(tmp_path, tmp_path / "newest.pt")
    consolidate(tmp_path, tmp_path / "best.pt", best=True)
    assert bit_by_bit(torch.load(tmp_path / "newest.pt")) == states["latest"]
    assert bit_by_bit(torch.load(tmp_path / "best.pt")) == states["best"]
    for path in [*tmp_path.glob("update-*")]:
        path.rename(tmp_path / f"damaged-{path.name}")  # as a start renames them
    with pytest.raises(CheckpointError, match="has no whole checkpoint"):
        load_weights(net(), tmp_path)


@pytest.mark.parametrize("exists", [False, True], ids=["new", "there already"])
def test_a_file_that_cannot_be_written_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool) -> None:
    """A full disk: a file of that name stays as it was, and no part of the new one is left."""
    file = tmp_path / "model.pt"
    if exists:
        file.write_bytes(b"earlier")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match="could not be written: No space left"):
        write_weights(net().state_dict(), file)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"earlier"] * exists


def test_a_file_has_its_name_when_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its bytes first, and then the name: a power cut leaves a whole file or none."""
    synced: list[tuple[int, int, bool]] = []

    def fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        synced.append((status.st_ino, status.st_size, (tmp_path / "model.pt").exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    write_weights(net().state_dict(), tmp_path / "model.pt")
    file, directory = (tmp_path / "model.pt").stat(), tmp_path.stat()
    assert synced == [(file.st_ino, file.st_size, False), (directory.st_ino, directory.st_size, True)]


FORMS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda state: state,
    "under-model": lambda state: {"model": state, "epoch": 3},
    "under-state-dict": lambda state: {"state_dict": state},
    "of-ddp": lambda state: {f"module.{name}": value for name, value in state.items()},
    "of-compile": lambda state: {f"_orig_mod.{name}": value for name, value in state.items()},
    "of-both": lambda state: {f"module._orig_mod.{name}": value for name, value in state.items()},
}


@pytest.mark.parametrize("name", list(FORMS))
def test_from_a_plain_file(name: str, tmp_path: Path) -> None:
    """As people save them, also from a wrapped model."""
    model = net()
    torch.save(FORMS[name](model.state_dict()), tmp_path / "model.pt")
    assert loaded(tmp_path / "model.pt") == bit_by_bit(dict(model.state_dict()))


def test_another_last_layer(tmp_path: Path) -> None:
    """strict=False loads what fits and names the rest, which stays; strict refuses and changes nothing."""
    torch.save({**net().state_dict(), "unknown": torch.ones(1)}, tmp_path / "model.pt")
    model = net(outputs=5, seed=9)
    before = bit_by_bit(dict(model.state_dict()))
    with pytest.raises(
        CheckpointError,
        match=r"'2\.weight' does not fit \(it has another shape there, or numbers that would be cut off\), and 2 more",
    ):
        load_weights(model, tmp_path / "model.pt")
    assert bit_by_bit(dict(model.state_dict())) == before
    assert load_weights(model, tmp_path / "model.pt", strict=False) == ["2.weight", "2.bias"]
    after = bit_by_bit(dict(model.state_dict()))
    expected = bit_by_bit(dict(net().state_dict()))
    assert after == {name: before[name] if name.startswith("2.") else expected[name] for name in after}


class Packed(nn.Linear):
    """Gives in its state a name that it does not take, as a layer of 4 bits of bitsandbytes does on the CPU."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        destination[f"{prefix}packed"] = torch.ones(1)


def test_a_layer_that_refuses_its_own_state(tmp_path: Path) -> None:
    """With strict=False the others are loaded, and it is not asked; whole it is refused in one line."""
    model = nn.Sequential(Packed(2, 2), nn.Linear(2, 1))
    state = model.state_dict()
    torch.save({name: value for name, value in state.items() if name.startswith("1.")}, tmp_path / "part.pt")
    torch.save(state, tmp_path / "whole.pt")
    other = nn.Sequential(Packed(2, 2), nn.Linear(2, 1))
    before = bit_by_bit(dict(other[0].state_dict()))
    assert load_weights(other, tmp_path / "part.pt", strict=False) == ["0.weight", "0.bias", "0.packed"]
    assert bit_by_bit(dict(other[1].state_dict())) == bit_by_bit(dict(model[1].state_dict()))
    assert bit_by_bit(dict(other[0].state_dict())) == before
    with pytest.raises(
        CheckpointError, match=r'the model refuses what \S+whole\.pt holds: .*Unexpected key.*"0\.packed"'
    ) as raised:
        load_weights(other, tmp_path / "whole.pt")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("model", [nn.LazyLinear(1), nn.Linear(2, 1, device="meta")], ids=["lazy", "meta"])
@pytest.mark.parametrize("strict", [True, False])
def test_a_model_without_memory_is_refused(model: nn.Module, strict: bool, tmp_path: Path) -> None:
    """Nothing can be loaded into it."""
    torch.save(nn.Linear(2, 1).state_dict(), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="'weight' of the model has no memory yet") as raised:
        load_weights(model, tmp_path / "model.pt", strict=strict)
    assert "\n" not in str(raised.value)


KINDS = {
    kind: torch.zeros(2, dtype=kind)
    for kind in (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.int32, torch.bool)
}


@pytest.mark.parametrize("saved", KINDS, ids=str)
@pytest.mark.parametrize("here", KINDS, ids=str)
@pytest.mark.parametrize("value", [1, 2, 2.5])
def test_numbers_are_loaded_where_nothing_of_them_is_cut_off(
    here: torch.dtype, saved: torch.dtype, value: float, tmp_path: Path
) -> None:
    """Into another kind of number only if they are the same there; the imaginary part of a complex one has no place."""
    model = nn.Module()
    model.register_buffer("one", KINDS[here].clone())
    model.register_buffer("two", torch.zeros(1))
    written = torch.full((2,), value).to(saved)
    torch.save({"one": written, "two": torch.ones(1)}, tmp_path / "m.pt")
    number = written[0].item()
    takes: Any = (
        complex if saved is torch.complex64 else {torch.bool: bool, torch.int64: int, torch.int32: int}.get(here, float)
    )
    if takes(number) == number and (here is torch.complex64 or saved is not torch.complex64):
        assert load_weights(model, tmp_path / "m.pt") == []
        assert model.get_buffer("one").tolist() == [number, number]
        return
    with pytest.raises(CheckpointError, match=r"'one' does not fit \(it has another shape there, or numbers that would be cut"):
        load_weights(model, tmp_path / "m.pt")
    assert load_weights(model, tmp_path / "m.pt", strict=False) == ["one"]
    assert model.get_buffer("one").tolist() == [0, 0]
    assert model.get_buffer("two").tolist() == [1]


class Rescaled(nn.Linear):
    """Keeps a number that is no buffer, and reads it from each state, as quantised layers of torch do."""

    scale = 2.0

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        destination[f"{prefix}scale"] = torch.tensor(self.scale)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *more: Any) -> None:
        self.scale = float(state_dict.pop(f"{prefix}scale"))
        super()._load_from_state_dict(state_dict, prefix, *more)  # type: ignore[no-untyped-call]


def test_a_layer_that_reads_its_own_names_is_handed_what_it_has(tmp_path: Path) -> None:
    """With strict=False, of a file that has none of them; the others are loaded."""
    torch.save({"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}, tmp_path / "part.pt")
    model = nn.Sequential(nn.Linear(2, 2), Rescaled(2, 1))
    before = bit_by_bit(dict(model[1].state_dict()))
    assert load_weights(model, tmp_path / "part.pt", strict=False) == ["1.weight", "1.bias", "1.scale"]
    assert model[0].weight.tolist() == [[1, 1], [1, 1]]
    assert bit_by_bit(dict(model[1].state_dict())) == before


@pytest.mark.parametrize("part", [nn.Linear(3, 3, device="meta"), nn.LazyLinear(3)], ids=["meta", "lazy"])
def test_a_part_without_memory_that_the_file_lacks_is_left_out(part: nn.Module, tmp_path: Path) -> None:
    """With strict=False."""
    torch.save({"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}, tmp_path / "part.pt")
    model = nn.Sequential(nn.Linear(2, 2), part)
    assert load_weights(model, tmp_path / "part.pt", strict=False) == ["1.weight", "1.bias"]
    assert model[0].weight.tolist() == [[1, 1], [1, 1]]


class WithoutRoom(nn.Linear):
    """Runs out of memory when it loads."""

    def _load_from_state_dict(self, *_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


@pytest.mark.parametrize("strict", [True, False])
def test_lack_of_memory_is_no_fault_of_the_file(strict: bool, tmp_path: Path) -> None:
    """The error stays what it is."""
    torch.save({"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}, tmp_path / "m.pt")
    model = nn.Sequential(WithoutRoom(2, 2), *([] if strict else [nn.Linear(2, 2)]))
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 2 GiB"):
        load_weights(model, tmp_path / "m.pt", strict=strict)


def _on_this_rank(path: str) -> Any:
    sharded = net(seed=9)
    for module in (sharded[0], sharded):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    with count_traffic() as traffic:
        load_weights(sharded, path)
    assert traffic.collectives == []
    whole = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in sharded.state_dict().items()}
    replicated = DistributedDataParallel(net(seed=9))
    if idist.get_rank() == 1:  # no collective: one rank may call it alone
        load_weights(replicated, path)
    return bit_by_bit(whole), bit_by_bit(dict(replicated.module.state_dict()))


@pytest.mark.slow
def test_sharded_and_wrapped(tmp_path: Path) -> None:
    """Each rank of a sharded model has its shards; a wrapped model is loaded inside."""
    states = train(tmp_path)
    (first, untouched), (second, wrapped) = run_ranks(_on_this_rank, str(latest(tmp_path)))
    assert first == second == wrapped == states["latest"] != untouched


def refused(write: Callable[[Path], Any], **options: Any) -> Callable[[Path], Any]:
    def call(path: Path) -> None:
        write(path)
        load_weights(net(), path, **options)

    return call


def of_another(path: Path) -> None:
    torch.save(nn.Linear(9, 9).state_dict(), path)


def without(left_out: str, **more: Any) -> Callable[[Path], None]:
    """Writes a file that lacks one of the names, and has others."""
    return lambda path: torch.save({k: v for k, v in net().state_dict().items() if k != left_out} | more, path)


MISTAKES: dict[str, tuple[type[Exception], str, Callable[[Path], Any]]] = {
    "nothing": (CheckpointError, "does not exist", refused(lambda path: None)),
    "empty": (CheckpointError, "has no whole checkpoint", refused(lambda path: path.mkdir())),
    "best": (CheckpointError, "has no checkpoint with a score", refused(lambda path: path.mkdir(), best=True)),
    "text": (
        CheckpointError,
        "must be a state_dict that torch.save has written",
        refused(lambda path: path.write_text("x" * 99)),
    ),
    "number": (CheckpointError, "must hold a state_dict, got 3", refused(lambda path: torch.save(3, path))),
    "numbered": (
        CheckpointError,
        r"must hold a state_dict, got \{0",
        refused(lambda path: torch.save({0: torch.ones(2)}, path)),
    ),
    "other": (CheckpointError, "is of another model", refused(of_another)),
    "missing": (CheckpointError, r"'2.bias' does not fit \(only one of them has it\), and 0", refused(without("2.bias"))),
    "unknown": (CheckpointError, r"'more' does not fit \(only one of them has it\), and 0", refused(without("", more=1))),
    "no-tensor": (
        CheckpointError,
        r"'0.bias' does not fit \(it has another shape there, or numbers that would be cut off\)",
        refused(without("0.bias", **{"0.bias": 1})),
    ),
    "nothing-fits": (CheckpointError, "is of another model", refused(of_another, strict=False)),
    "entry": (CheckpointError, "entry, best and evaluated are for checkpoints", refused(of_another, entry="ModelEMA")),
    "model": (TypeError, "model must be a torch.nn.Module", lambda path: load_weights({}, path)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes(name: str, tmp_path: Path) -> None:
    """Each is answered in one line."""
    error, says, call = MISTAKES[name]
    with pytest.raises(error, match=says) as raised:
        call(tmp_path / "runs")
    assert "\n" not in str(raised.value)


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    """Wherever it ends, in either of the formats of torch.save."""
    file = tmp_path / "model.pt"
    for is_zip in (True, False):
        torch.save(nn.Linear(2, 1).state_dict(), file, _use_new_zipfile_serialization=is_zip)
        whole = file.read_bytes()
        for end in range(0, len(whole), 23):
            file.write_bytes(whole[:end])
            with pytest.raises(CheckpointError, match=r"must be a state_dict that torch\.save has written, but: "):
                load_weights(nn.Linear(2, 1), file)


class Command:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    """A file from somebody else may hold any pickle: it is refused with torch's reason, in one line."""
    model = net()
    before = bit_by_bit(dict(model.state_dict()))
    torch.save({**net(seed=9).state_dict(), "more": Command(tmp_path / "made")}, tmp_path / "model.pt")
    with pytest.raises(
        CheckpointError, match=r"must be a state_dict that torch\.save has written, but: Weights only"
    ) as raised:
        load_weights(model, tmp_path / "model.pt", strict=False)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "made").exists()
    assert bit_by_bit(dict(model.state_dict())) == before


def test_a_model_whose_only_part_is_called_module(tmp_path: Path) -> None:
    """Its names look like those of a wrapper: it loads its own weights and those of the part, from a run and from a file."""
    model = nn.ModuleDict({"module": net()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = create_trainer(model, optimizer, lambda model, x: mean_loss(model["module"], x))
    Checkpoint(tmp_path / "run").attach(trainer)
    trainer.run(DATA, max_epochs=1)
    torch.save(model.state_dict(), tmp_path / "whole.pt")
    torch.save(model["module"].state_dict(), tmp_path / "part.pt")
    for path in (tmp_path / "run", tmp_path / "whole.pt", tmp_path / "part.pt"):
        assert loaded(path, nn.ModuleDict({"module": net(seed=9)})) == bit_by_bit(dict(model.state_dict()))
        assert loaded(path) == bit_by_bit(dict(model["module"].state_dict()))


class Scaled(nn.Linear):
    """Keeps a plain number besides its weights."""

    def __init__(self, scale: float) -> None:
        super().__init__(3, 1)
        self.scale = scale

    def get_extra_state(self) -> Any:
        return {"scale": self.scale}

    def set_extra_state(self, state: Any) -> None:
        self.scale = state["scale"]


def test_the_extra_state_of_a_module_is_loaded(tmp_path: Path) -> None:
    """From a run and from a file."""
    model = Scaled(2.0)
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), mean_loss)
    Checkpoint(tmp_path / "run").attach(trainer)
    trainer.run(DATA, max_epochs=1)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    for path in (tmp_path / "run", tmp_path / "model.pt"):
        other = Scaled(7.0)
        assert load_weights(other, path) == []
        assert other.scale == 2.0
        assert torch.equal(other.weight, model.weight)


def test_tied_weights_that_have_the_same_bytes_only(tmp_path: Path) -> None:
    """Two names of one tensor of the model must have the same numbers in the file; 1 in float16 is another in bfloat16."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    ones = torch.ones(2, 2, dtype=torch.float16)
    torch.save({"0.weight": ones, "1.weight": ones.clone()}, tmp_path / "same.pt")
    torch.save({"0.weight": ones, "1.weight": ones.clone().view(torch.bfloat16)}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match=r"'0\.weight' and '1\.weight' are one tensor in this run, and differ there"):
        load_weights(model, tmp_path / "other.pt")
    assert load_weights(model, tmp_path / "same.pt") == []
    assert torch.equal(model[1].weight, torch.ones(2, 2))


def rows() -> Any:
    """Three layers, each of one row, of which the last trains."""
    model = nn.Sequential(*[nn.Linear(3, 1, bias=False) for _ in range(3)])
    model[:2].requires_grad_(False)
    return model


def saving(model: Any, directory: str) -> Any:
    trainer = create_trainer(model, torch.optim.SGD([model[2].weight], lr=0.0), lambda model, x: model[2](x).sum())
    Checkpoint(directory).attach(trainer)
    return trainer


def _into_tied_shards(directory: str) -> Any:
    """Loads files into a model in which two names are one sharded tensor, of whose only row the last rank has nothing."""
    torch.manual_seed(idist.get_rank())
    model = rows()
    model[1].weight = model[0].weight
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    left = load_weights(model, f"{directory}/once.pt")
    with pytest.raises(CheckpointError, match=r"'0\.weight' and '1\.weight' are one tensor in this run, and differ there"):
        load_weights(model, f"{directory}/other.pt")
    with pytest.raises(CheckpointError, match=r"'0\.weight' and '1\.weight' are one tensor in this run, and differ there"):
        saving(model, f"{directory}/untied").run([torch.ones(1, 3)], max_epochs=2)
    return left, bit_by_bit({name: value.full_tensor() for name, value in model.state_dict().items()})


@pytest.mark.slow
def test_tied_weights_of_a_sharded_model(tmp_path: Path) -> None:
    """A file needs one of their names. Two names with different numbers are refused, by a resume too, also without a row."""
    torch.manual_seed(5)
    model = rows()
    state = model.state_dict()
    torch.save({name: state[name] for name in ("1.weight", "2.weight")}, tmp_path / "once.pt")
    torch.save(state, tmp_path / "other.pt")
    saving(model, f"{tmp_path}/untied").run([torch.ones(1, 3)], max_epochs=1)
    expected = bit_by_bit({**state, "0.weight": state["1.weight"]})
    assert run_ranks(_into_tied_shards, str(tmp_path)) == [([], expected)] * 2


def test_an_entry_without_weights(tmp_path: Path) -> None:
    """A handler of the run that holds none, what is empty, and a name that is misspelt."""
    train(tmp_path)
    for entry in ("buffers", "optimizer"):
        with pytest.raises(CheckpointError, match=f"entry must be an object with weights, got '{entry}'"):
            average_checkpoints(tmp_path, last=1, entry=entry)
    with pytest.raises(CheckpointError, match="is of another model"):
        load_weights(net(), tmp_path, entry="optimizer")
    with pytest.raises(CheckpointError, match="entry must be an object of"):
        load_weights(net(), tmp_path, entry="EMA")


@pytest.mark.parametrize("state", [5, [1, 2], {}, {1: torch.ones(2)}], ids=["number", "list", "empty", "numbered"])
def test_an_object_that_is_no_state_dict(state: Any, tmp_path: Path) -> None:
    """Whatever an object of the user gives as its state can be in a checkpoint."""
    place = CheckpointDirectory(tmp_path, small_checkpoints.QuickDisk())
    contents, keep = small_checkpoints.contents(state, "to_save/own"), small_checkpoints.keep(1)
    commit(place, contents, small_checkpoints.manifest(1), keep, collectives.gather_objects)
    with pytest.raises(CheckpointError, match=r"entry must be an object with weights, got 'own' in \S+, which is "):
        load_weights(net(), tmp_path, entry="own")


@pytest.mark.parametrize("saved", [[3.0, 3.0], [3.0, 4.0]], ids=["alike", "unlike"])
def test_an_expanded_buffer(saved: list[float], tmp_path: Path) -> None:
    """It takes what is loaded and stays expanded; where its entries differ, it gets memory of its own."""
    model = nn.Linear(2, 1)
    base = torch.zeros(1, 1)
    model.register_buffer("mask", base.expand(4, 2))
    torch.save(model.state_dict() | {"mask": torch.tensor([saved] * 4)}, tmp_path / "model.pt")
    load_weights(model, tmp_path / "model.pt")
    assert isinstance(model.mask, torch.Tensor)
    assert model.mask.tolist() == [saved] * 4
    assert (model.mask.data_ptr() == base.data_ptr()) is (saved[0] == saved[1])


def test_a_run_with_an_expanded_buffer_resumes(tmp_path: Path) -> None:
    """Torch itself loads into no such buffer."""

    def run(value: float, max_epochs: int) -> list[float]:
        model = nn.Linear(2, 1)
        model.register_buffer("offset", torch.full((1,), value).expand(3))
        trainer = create_trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: (model(x) + model.offset[:1]).mean()
        )
        Checkpoint(tmp_path).attach(trainer)
        trainer.run([torch.ones(3, 2)], max_epochs=max_epochs)
        found: list[float] = model.get_buffer("offset").tolist()
        return found

    assert run(2.0, 1) == [2.0] * 3
    assert run(5.0, 2) == [2.0] * 3


class Tied(nn.Module):
    """An embedding of source and target that is the output layer too, and a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target, self.layer = nn.Embedding(5, 3), nn.Embedding(5, 3), nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.source.weight = self.target.weight = self.head.weight


def hub_folder(folder: Path, state: dict[str, Any], *, in_shards: bool) -> Path:
    """A folder as `save_pretrained` leaves it: each tied tensor once, one file or several with an index."""
    folder.mkdir()
    if not in_shards:
        torch.save(state, folder / "pytorch_model.bin")
        return folder
    weight_map = {name: f"pytorch_model-{number:05}-of-{len(state):05}.bin" for number, name in enumerate(state, 1)}
    for name, file in weight_map.items():
        torch.save({name: state[name]}, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


@pytest.mark.parametrize("in_shards", [False, True])
@pytest.mark.parametrize("kept", ["source.weight", "target.weight", "head.weight"])
def test_a_folder_of_the_hub_whose_tied_tensors_are_there_once(kept: str, in_shards: bool, tmp_path: Path) -> None:
    """All names of a tensor of the model get what one of them has, whichever it is."""
    model, other = Tied(), Tied()
    dropped = {"source.weight", "target.weight", "head.weight"} - {kept}
    folder = hub_folder(
        tmp_path / "hub", {k: v for k, v in model.state_dict().items() if k not in dropped}, in_shards=in_shards
    )
    assert load_weights(other, folder) == []
    assert bit_by_bit(other.state_dict()) == bit_by_bit(model.state_dict())
    other.head.weight = nn.Parameter(torch.zeros(5, 3))
    with pytest.raises(CheckpointError, match="does not fit"):  # not tied: the file does not say what it is
        load_weights(other, folder)


@pytest.mark.parametrize(
    "names",
    [
        ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),
        ("model.safetensors", "consolidated.safetensors", "model.fp16.safetensors", "training_args.bin"),
        ("model.safetensors.index.json", "pytorch_model.bin", "consolidated.safetensors"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json", "optimizer.bin"),
        ("diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model.safetensors"),
    ],
)
def test_of_several_files_in_a_folder_the_one_that_its_library_takes(names: tuple[str, ...], tmp_path: Path) -> None:
    """Transformers prefers a whole file to an index, and diffusers an index."""
    for number, name in enumerate(names):
        state = {"weight": torch.full((1, 2), float(number)), "bias": torch.zeros(1)}
        if name.endswith(".index.json"):
            shard = name.replace(".index.json", "").replace(".", "-00001-of-00001.")
            write_weights(state, tmp_path / shard)
            index = {"weight_map": dict.fromkeys(state, shard)}
            (tmp_path / name).write_text(json.dumps(index), encoding="utf-8")
        else:
            write_weights(state, tmp_path / "away.safetensors" if name.endswith("safetensors") else tmp_path / "away.pt")
            next(tmp_path.glob("away.*")).rename(tmp_path / name)
    model = nn.Linear(2, 1)
    assert load_weights(model, tmp_path) == []
    assert model.weight.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("name", ["model-00001-of-00001.safetensors", "pytorch_model-00001-of-00001.bin"])
def test_a_lone_shard_needs_no_index(name: str, tmp_path: Path) -> None:
    """It is the whole model."""
    model, suffix = nn.Linear(2, 1), ".safetensors" if name.endswith("safetensors") else ".pt"
    write_weights(model.state_dict(), tmp_path / f"written{suffix}")
    (tmp_path / f"written{suffix}").rename(tmp_path / name)
    other = nn.Linear(2, 1)
    assert load_weights(other, tmp_path) == []
    assert bit_by_bit(other.state_dict()) == bit_by_bit(model.state_dict())


def test_shards_without_their_index_are_named(tmp_path: Path) -> None:
    """As an export that was killed leaves them."""
    for number in (1, 2):
        torch.save({"weight": torch.ones(1, 2)}, tmp_path / f"pytorch_model-0000{number}-of-00003.bin")
    with pytest.raises(CheckpointError, match=r"has 'pytorch_model-00001-of-00003\.bin' and no index that names it; "):
        load_weights(nn.Linear(2, 1), tmp_path)


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda folder: next(folder.glob("*-00001-*")).unlink(), "has no file 'pytorch_model-00001-of-00004.bin'"),
        (lambda folder: rewritten(folder, {"layer.bias": "../elsewhere.bin"}), "'../elsewhere.bin'"),
        (lambda folder: rewritten(folder, {"more": "pytorch_model-00001-of-00004.bin"}), "more"),
        (lambda folder: (folder / "pytorch_model.bin.index.json").write_text("{"), "weight_map"),
    ],
    ids=["missing", "outside", "not in the file", "no json"],
)
def test_a_damaged_folder_of_the_hub(spoil: Callable[[Path], Any], match: str, tmp_path: Path) -> None:
    """Refused in one line, and the model is unchanged."""
    state = {name: value for name, value in Tied().state_dict().items() if name not in {"target.weight", "head.weight"}}
    folder, model = hub_folder(tmp_path / "hub", {**state, "extra": torch.ones(1)}, in_shards=True), Tied()
    before = bit_by_bit(model.state_dict())
    spoil(folder)
    with pytest.raises(CheckpointError, match=match):
        load_weights(model, folder, strict=False)
    assert bit_by_bit(model.state_dict()) == before


def rewritten(folder: Path, changes: dict[str, str]) -> None:
    """Changes the index."""
    path = folder / "pytorch_model.bin.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    index["weight_map"] |= changes
    path.write_text(json.dumps(index), encoding="utf-8")


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_weight_does_not_fit_into_another_one(tmp_path: Path) -> None:
    """Torch has no conversion between the two; the other weights are loaded."""
    torch.save(
        {"weight": torch.quantize_per_tensor(torch.ones(1, 2), 0.1, 0, torch.qint8), "bias": torch.ones(1)}, tmp_path / "m.pt"
    )
    model = nn.Linear(2, 1)
    with pytest.raises(CheckpointError, match="'weight' does not fit"):
        load_weights(model, tmp_path / "m.pt")
    assert load_weights(model, tmp_path / "m.pt", strict=False) == ["weight"]
    assert model.bias.item() == 1.0
