"""Weights in the formats of others: safetensors in one file and in shards, and directories of torch.distributed.checkpoint."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bits import bit_by_bit
from ignite_train import CheckpointError, create_trainer
from ignite_train.checkpoint import average_checkpoints, consolidate, load_weights
from ignite_train.checkpoint.__main__ import checkpoint_command
from ignite_train.handlers import Checkpoint, ModelEMA
from ignite_train.plot import main as plot_command
from ignite_train.plot import plot_runs, read_curves
from ignite_train.tools.write_weights import Format, write_weights
from ranks import run_ranks

LOADER = [torch.tensor([0, 1, 2]), torch.tensor([3, 4, 0])]


class Tied(nn.Module):
    """An embedding that is the output layer too, in two dtypes, and not contiguous in memory."""

    def __init__(self, *, frozen: bool = False, rows: int = 5) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(rows, 4), nn.Linear(4, 4)
        self.layer.weight = nn.Parameter(torch.randn(4, 4).t())
        self.head = nn.Linear(4, rows, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.layer.requires_grad_(not frozen)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(tokens % self.embedding.num_embeddings)))


def mean_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens).square().mean()
    return loss


def run(directory: Path, make: Callable[[Any], torch.optim.Optimizer] | None = None, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Tied(**options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1) if make is None else make(model.parameters())
    trainer = create_trainer(model, optimizer, mean_loss)
    ema = ModelEMA(0.5)
    ema.attach(trainer)
    Checkpoint(directory, asynchronous=False).attach(trainer)
    trainer.run(LOADER, max_epochs=2)
    return model, (optimizer, ema)


def test_safetensors_in_one_file(tmp_path: Path) -> None:
    """The package reads it; tied weights stand in it once; it says that it is of torch, which Hugging Face's libraries ask."""
    model, _ = run(tmp_path / "run")
    assert consolidate(tmp_path / "run", tmp_path / "model.safetensors") == "safetensors"
    read, expected = load_file(tmp_path / "model.safetensors"), model.state_dict()
    assert read.keys() == expected.keys() - {"head.weight"}
    assert bit_by_bit(read) == bit_by_bit({name: expected[name] for name in read})
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    other = Tied()
    assert load_weights(other, tmp_path / "model.safetensors") == []
    assert bit_by_bit(other.state_dict()) == bit_by_bit(expected)


def test_a_file_of_safetensors_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says which package is missing."""
    (tmp_path / "model.safetensors").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(CheckpointError, match=r"model\.safetensors needs the package safetensors; install it"):
        load_weights(Tied(), tmp_path / "model.safetensors")


@pytest.mark.parametrize(("max_shard_bytes", "numbers"), [(40, 4), (100, 2), (10_000, 1)])
def test_safetensors_in_shards(max_shard_bytes: int, numbers: int, tmp_path: Path) -> None:
    """Each file holds what fits, a larger tensor is alone, and the index names the file of each."""
    model, _ = run(tmp_path / "run")
    folder = tmp_path / "out"
    folder.mkdir()
    consolidate(tmp_path / "run", folder / "model.safetensors", max_shard_bytes=max_shard_bytes)
    if numbers > 1:
        names = [f"model-{number:05}-of-{numbers:05}.safetensors" for number in range(1, numbers + 1)]
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": 4 * (20 + 16 + 4) + 8}
        assert {*index["weight_map"].values()} == {*names}
        assert all(name in load_file(folder / file) for name, file in index["weight_map"].items())
        assert {path.name for path in folder.iterdir()} == {*names, "model.safetensors.index.json"}
    else:
        assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    other = Tied()
    assert load_weights(other, folder) == []
    assert bit_by_bit(other.state_dict()) == bit_by_bit(model.state_dict())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


TWO = {"a": torch.ones(2), "b": torch.zeros(2)}


@pytest.mark.parametrize(
    ("there", "max_shard_bytes"),
    [
        ("model-00001-of-00002.safetensors", 8),
        ("model-00001-of-00002.safetensors", 100),
        ("model-00003-of-00003.safetensors", 8),
        ("model.safetensors.index.json", 8),
        ("model.safetensors.index.json", 100),
        ("model.safetensors", 8),
    ],
)
def test_an_export_beside_another_of_its_name_is_refused(there: str, max_shard_bytes: int, tmp_path: Path) -> None:
    """Else one that is broken off would leave a mixture of two, and a reader may take either; nobody's files are removed."""
    for name in (there, "other-00001-of-00002.safetensors", "other.safetensors"):
        (tmp_path / name).write_bytes(b"earlier")
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=f"without an earlier export of its name, got '.*' beside '{there}'; "):
        write_weights(TWO, tmp_path / "model.safetensors", max_shard_bytes=max_shard_bytes)
    assert contents(tmp_path) == before
    (tmp_path / there).unlink()
    write_weights(TWO, tmp_path / "model.safetensors", max_shard_bytes=max_shard_bytes)


@pytest.mark.parametrize("whole", range(3))
def test_an_export_in_shards_that_breaks_off_leaves_nothing(
    whole: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full at the first shard, at the second, or at the index: the same call may follow."""
    synced: list[int] = []

    def full(descriptor: int) -> None:
        if len(synced) == whole:
            raise OSError(errno.ENOSPC, "No space left on device")
        synced.append(descriptor)

    (tmp_path / "config.json").write_bytes(b"of the user")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        write_weights(TWO, tmp_path / "model.safetensors", max_shard_bytes=8)
    monkeypatch.undo()
    assert contents(tmp_path) == {"config.json": b"of the user"}
    write_weights(TWO, tmp_path / "model.safetensors", max_shard_bytes=8)


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        lambda path: path.symlink_to(path.with_name("there")),
        lambda path: path.symlink_to(path.with_name("nothing")),
        lambda path: path.mkdir(),
    ],
    ids=["pipe", "link", "broken link", "directory"],
)
def test_an_output_that_is_no_regular_file_is_refused(name: str, make: Callable[[Path], Any], tmp_path: Path) -> None:
    """It is not replaced, nor written to."""
    (tmp_path / "there").write_bytes(b"earlier")
    make(tmp_path / name)
    before = (tmp_path / name).lstat()
    with pytest.raises(CheckpointError, match=f"output must be the path of a file, got '.*{name}'; "):
        write_weights(TWO, tmp_path / name)
    assert (tmp_path / name).lstat() == before
    assert (tmp_path / "there").read_bytes() == b"earlier"
    assert {path.name for path in tmp_path.iterdir()} == {"there", name}


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({"a": torch.ones(2, dtype=torch.complex64)}, "cannot hold torch.complex64, as 'a' has it; use file_format='torch'"),
        ({"a": torch.ones(2), "b": 3}, "tensors by their names only, got 'b'.*file_format='torch'"),
        ({}, "must be written of tensors"),
    ],
    ids=["dtype", "number", "nothing"],
)
def test_what_the_format_cannot_hold(state: Any, match: str, tmp_path: Path) -> None:
    """Is refused, and no file appears."""
    with pytest.raises(CheckpointError, match=match):
        write_weights(state, tmp_path / "model.safetensors")
    assert [*tmp_path.iterdir()] == []


def test_a_write_that_fails_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_weights({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(CheckpointError, match=r"model\.safetensors could not be written: No space left on device"):
        write_weights({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("number", [24_900, 200_000])
@pytest.mark.parametrize("file_format", get_args(Format))
def test_a_disk_that_is_full(file_format: Any, number: int, tmp_path: Path) -> None:
    """The error names the output and the cause, whichever of torch's errors it is, and nothing is left."""
    output = tmp_path / ("output.safetensors" if file_format == "safetensors" else "output")
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (90_000, usual[1]))  # the disk of a test cannot be filled
    try:
        with pytest.raises(CheckpointError, match=r"output\S* could not be written: .*File too large$") as caught:
            write_weights({"a": torch.zeros(number)}, output, file_format=file_format)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert str(tmp_path) in str(caught.value)
    assert [*tmp_path.iterdir()] == []


def test_a_folder_of_the_output_that_does_not_exist(tmp_path: Path) -> None:
    """Is said of the output, and not of the file that would have become it."""
    with pytest.raises(CheckpointError, match=r"none/model\.pt could not be written: No such file or directory$"):
        write_weights({"a": torch.zeros(1)}, tmp_path / "none" / "model.pt")


def test_adapters_alone(tmp_path: Path) -> None:
    """What was frozen is left out, and a model that has it takes the rest."""
    model, _ = run(tmp_path / "run", frozen=True)
    consolidate(tmp_path / "run", tmp_path / "adapters.safetensors", trained_only=True)
    assert load_file(tmp_path / "adapters.safetensors").keys() == {"embedding.weight", "steps"}
    torch.manual_seed(0)
    other = Tied(frozen=True)
    assert load_weights(other, tmp_path / "adapters.safetensors", strict=False) == ["layer.weight", "layer.bias"]
    assert bit_by_bit(other.state_dict()) == bit_by_bit(model.state_dict())


class ScheduleFree(torch.optim.SGD):
    """Schedule-free SGD, written from the paper's equations: trains at y, keeps z, and is evaluated at x."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            group.update(train_mode=True, betas=(0.9, 0.999), k=0)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            beta, c = group["betas"][0], 1 / group["k"]
            for y in (one for one in group["params"] if one.grad is not None):
                z = self.state[y].setdefault("z", y.clone())
                x = (y - (1 - beta) * z) / beta
                z.sub_(y.grad, alpha=group["lr"])
                x = (1 - c) * x + c * z
                y.copy_((1 - beta) * z + beta * x)

    @torch.no_grad()
    def points(self) -> list[Tensor]:
        """Where it is evaluated, in float64."""
        beta = 0.9
        return [(y.double() - (1 - beta) * self.state[y]["z"].double()) / beta for y in self.param_groups[0]["params"]]


def test_the_weights_of_an_evaluation(tmp_path: Path) -> None:
    """Of a schedule-free optimizer x and not y, under both names of tied weights; of an average its entry."""
    model, (optimizer, ema) = run(tmp_path / "run", ScheduleFree)
    expected = dict(zip((name for name, _ in model.named_parameters()), optimizer.points(), strict=True))
    consolidate(tmp_path / "run", tmp_path / "x.pt", evaluated=True)
    found = torch.load(tmp_path / "x.pt")
    for name, point in expected.items():
        torch.testing.assert_close(found[name].double(), point, rtol=1e-6, atol=1e-7)
        assert not torch.equal(found[name], model.state_dict()[name])
    assert torch.equal(found["head.weight"], found["embedding.weight"])
    load_weights(model, tmp_path / "run", evaluated=True)
    assert bit_by_bit(model.state_dict()) == bit_by_bit(found)
    consolidate(tmp_path / "run", tmp_path / "average.safetensors", entry="ModelEMA")
    average = ema.state_dict()["model"]
    assert bit_by_bit(load_file(tmp_path / "average.safetensors")) == bit_by_bit(
        {name: value for name, value in average.items() if name != "head.weight"}
    )
    run(tmp_path / "other")
    with pytest.raises(CheckpointError, match="needs a schedule-free optimizer"):
        consolidate(tmp_path / "other", tmp_path / "y.pt", evaluated=True)
    with pytest.raises(CheckpointError, match="got entry='ModelEMA'"):
        consolidate(tmp_path / "run", tmp_path / "y.pt", evaluated=True, entry="ModelEMA")
    with pytest.raises(CheckpointError, match="got entry='ModelEMA'"):
        load_weights(model, tmp_path / "run", evaluated=True, entry="ModelEMA")


def _sharded(directory: str, rows: int) -> Any:
    """Trains a sharded model, and resumes its run. Gives the weights after each of the two, and where they are evaluated."""
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = Tied(rows=rows)
        model.layer = nn.Linear(4, 4)  # fully_shard takes weights that are contiguous
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = ScheduleFree(model.parameters())
        optimizer.param_groups[0]["lr"] = 0.01
        trainer = create_trainer(model, optimizer, mean_loss)
        checkpoint = Checkpoint(directory, asynchronous=False)
        checkpoint.attach(trainer)
        if seed:
            checkpoint.restore("must")
        else:
            trainer.run(LOADER, max_epochs=2)
        found.append({name: value.full_tensor() for name, value in model.named_parameters()})
    names = [name for name, _ in model.named_parameters()]
    points = [point.full_tensor() for point in optimizer.points()]
    return [bit_by_bit(one) for one in found], dict(zip(names, points, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [5, 1])  # of the one row the second rank has nothing
def test_tied_weights_of_a_sharded_model_are_one_tensor_in_its_checkpoint(rows: int, tmp_path: Path) -> None:
    """Both names have the point of an evaluation; a file of safetensors, and an average in one, has them once."""
    (trained, restored), points = run_ranks(_sharded, str(tmp_path / "run"), rows)[0]
    assert trained == restored
    consolidate(tmp_path / "run", tmp_path / "x.pt", evaluated=True)
    found = torch.load(tmp_path / "x.pt")
    for name, point in {**points, "head.weight": points["embedding.weight"]}.items():
        torch.testing.assert_close(found[name].double(), point, rtol=1e-6, atol=1e-7)
    consolidate(tmp_path / "run", tmp_path / "model.safetensors")
    average_checkpoints([tmp_path / "run"], tmp_path / "mean.safetensors")
    for file in ("model.safetensors", "mean.safetensors"):
        assert load_file(tmp_path / file).keys() == {"embedding.weight", "layer.weight", "layer.bias", "steps"}
        other = Tied(rows=rows)
        assert load_weights(other, tmp_path / file) == []
        assert bit_by_bit(dict(other.named_parameters())) == trained


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_distributed_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours is read by torch, and torch's by ours, by function and by command; nested under a name or at the top."""
    model, _ = run(tmp_path / "run")
    command = ["consolidate", str(tmp_path / "run"), "--format", "distributed", "--output", str(tmp_path / "dcp")]
    assert checkpoint_command(command) == 0
    assert "torch.distributed.checkpoint.load" in capsys.readouterr().out
    other = Tied()
    state = other.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    other.load_state_dict(state)
    assert bit_by_bit(other.state_dict()) == bit_by_bit(model.state_dict())
    nested = {"model": model.state_dict(), "optimizer": {"lr": 0.1, "moments": [torch.ones(2)]}}
    dcp.save(nested, checkpoint_id=tmp_path / "nested", no_dist=True)
    for directory in ("dcp", "nested"):
        other = Tied()
        assert load_weights(other, tmp_path / directory) == []
        assert bit_by_bit(other.state_dict()) == bit_by_bit(model.state_dict())
    assert checkpoint_command(["consolidate", str(tmp_path / "nested"), "--output", str(tmp_path / "m.safetensors")]) == 0
    assert bit_by_bit(load_file(tmp_path / "m.safetensors")["layer.weight"]) == bit_by_bit(model.state_dict()["layer.weight"])
    assert checkpoint_command(command) == 1
    assert "a directory that does not exist" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"no tensors under 'teacher'; it has \['model', 'optimizer'\]"):
        load_weights(other, tmp_path / "nested", entry="teacher")


def test_a_distributed_checkpoint_beside_a_manifest_of_others_is_read(tmp_path: Path) -> None:
    """Other programs write a file of that name too."""
    model, other = Tied(), Tied()
    write_weights(model.state_dict(), tmp_path / "dcp", file_format="distributed")
    (tmp_path / "dcp" / "manifest.json").write_text("{}", encoding="utf-8")
    assert load_weights(other, tmp_path / "dcp") == []
    assert bit_by_bit(other.state_dict()) == bit_by_bit(model.state_dict())


class _Runs:
    def __reduce__(self) -> Any:
        return (print, ("this must not run",))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(_Runs())),
        lambda folder: (folder / ".metadata").write_bytes(pickle.dumps([1])),
        lambda folder: (folder / ".metadata").write_bytes(b""),
        lambda folder: next(folder.glob("*.distcp")).unlink(),
        lambda folder: next(folder.glob("*.distcp")).write_bytes(b"short"),
    ],
    ids=["runs code", "another object", "empty", "missing", "short"],
)
def test_a_distributed_checkpoint_that_is_spoilt(spoil: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused in one line, the model is unchanged, and nothing that stands in it is run."""
    model = Tied()
    write_weights(model.state_dict(), tmp_path / "dcp", file_format="distributed")
    spoil(tmp_path / "dcp")
    other = Tied()
    before = bit_by_bit(other.state_dict())
    with pytest.raises(CheckpointError, match=r"cannot be read as a torch\.distributed\.checkpoint: \w+"):
        load_weights(other, tmp_path / "dcp")
    assert bit_by_bit(other.state_dict()) == before
    assert "must not run" not in capsys.readouterr().out


# --- the command ------------------------------------------------------------------------------------------------------------


def test_a_home_directory_in_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No shell replaces the ~ behind an equals sign; an unknown one is a mistake."""
    monkeypatch.setenv("HOME", str(tmp_path))
    run(tmp_path / "run")
    assert checkpoint_command(["consolidate", "~/run", "--output=~/model.pt"]) == 0
    assert f"{tmp_path}/model.pt  the model of {tmp_path}/run/" in capsys.readouterr().out
    assert (tmp_path / "model.pt").is_file()
    (tmp_path / "log.jsonl").write_text('{"update": 1, "epoch": 1, "training/loss": 0.5}\n')
    assert plot_command(["~/log.jsonl", "--output=~/curves.png"]) == 0
    assert (tmp_path / "curves.png").is_file()
    plot_runs({"run": read_curves(tmp_path / "log.jsonl")}, "~/again.png")
    assert (tmp_path / "again.png").is_file()
    for command in (checkpoint_command, plot_command):
        with pytest.raises(SystemExit):
            command([*(["consolidate"] if command is checkpoint_command else []), "~nobody-of-this-name/run"])
        assert "must not begin with an unknown '~', got '~nobody-of-this-name/run'" in capsys.readouterr().err


@pytest.mark.parametrize("shard_bytes", [100, 10_000])
def test_the_reader_that_the_command_names_works(shard_bytes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a file of safetensors, and of shards with their index."""
    model, _ = run(tmp_path / "run")
    command = [
        "consolidate",
        str(tmp_path / "run"),
        f"--output={tmp_path / 'm.safetensors'}",
        f"--max-shard-bytes={shard_bytes}",
    ]
    assert checkpoint_command(command) == 0
    printed = capsys.readouterr().out
    named = re.search(r"^(\S+)  the model of .*; load_weights\(model, '(.*)'\) reads it$", printed)
    assert named is not None
    assert named[1] == named[2]
    other = Tied()
    assert load_weights(other, named[2]) == []
    assert bit_by_bit(other.state_dict()) == bit_by_bit(model.state_dict())


def test_a_damaged_file_of_safetensors_is_called_that(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"model\.safetensors must be a file of safetensors, but: "):
        load_weights(Tied(), tmp_path / "model.safetensors")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_mistakes_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Are answered in one line, and no file appears."""
    run(tmp_path / "run")
    consolidate(tmp_path / "run", tmp_path / "dcp", file_format="distributed")
    (tmp_path / "file").touch()
    before = {*tmp_path.iterdir()}
    output, other = (["--output", str(tmp_path / name)] for name in ("model.safetensors", "model.pt"))
    for arguments, answer in (
        (["consolidate", "run", *output, "--format", "torch"], "output must not end in .safetensors with file_format='torch'"),
        (
            ["consolidate", "run", *other, "--format", "safetensors"],
            "output must end in .safetensors with file_format='safetens",
        ),
        (["consolidate", "run", *output, "--max-shard-bytes", "0"], "max_shard_bytes must be "),
        (["consolidate", "dcp", *output, "--best"], "best, trained_only and evaluated need a checkpoint of this library, got "),
        (["verify", "dcp"], f"no checkpoint in {tmp_path / 'dcp'}, but one of torch.distributed.checkpoint"),
        (["verify", "file"], f"{tmp_path / 'file'} is a file; pass the directory of a run"),
    ):
        command, name, *options = arguments
        assert checkpoint_command([command, str(tmp_path / name), *options]) == 1
        printed = "".join(capsys.readouterr())
        assert printed.startswith(answer)
        assert printed.count("\n") == 1
    assert {*tmp_path.iterdir()} == before
