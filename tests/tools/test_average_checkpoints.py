"""The mean of the weights of several checkpoints is the exact one, rounded once, whatever they are stored in."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from safetensors.torch import load_file
from torch import nn

import small_checkpoints
from bits import bit_by_bit
from ignite_train import CheckpointError, create_trainer
from ignite_train.checkpoint import average_checkpoints, consolidate, find, load_weights
from ignite_train.checkpoint.manifest import read_manifest
from ignite_train.errors import DamagedCheckpointError, UnreadableCheckpointError
from ignite_train.handlers import Checkpoint

DATA = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def train(directory: Path) -> list[dict[str, torch.Tensor]]:
    """A run of five epochs with a checkpoint after each. Gives the weights after each."""
    model, states = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = create_trainer(model, optimizer, lambda model, x: (model(x) - 2.0).square().mean())
    Checkpoint(directory, every_epochs=1, keep=5, asynchronous=False).attach(trainer)
    trainer.add_event_handler(
        Events.EPOCH_COMPLETED, lambda: states.append({name: value.clone() for name, value in model.state_dict().items()})
    )
    trainer.run(DATA, max_epochs=5)
    return states


def exact_mean(states: list[dict[str, torch.Tensor]], name: str) -> torch.Tensor:
    """By rational numbers, in float64."""
    columns = zip(*(state[name].flatten().tolist() for state in states), strict=True)
    mean = [float(sum(map(Fraction, column)) / len(states)) for column in columns]
    return torch.tensor(mean, dtype=torch.float64).reshape(states[0][name].shape)


def test_the_last_checkpoints_of_a_run(tmp_path: Path) -> None:
    """The last three epochs, bitwise the mean of rational numbers; counters are the newest; a model loads the file."""
    states = train(tmp_path / "run")
    mean = average_checkpoints(tmp_path / "run", tmp_path / "mean.pt", last=3)
    expected = {name: exact_mean(states[2:], name).float() for name in states[0] if not name.endswith("batches_tracked")}
    expected["1.num_batches_tracked"] = torch.tensor(20)
    assert bit_by_bit(mean) == bit_by_bit({name: expected[name] for name in mean})
    assert not torch.equal(mean["0.weight"], states[-1]["0.weight"])
    model = net()
    assert load_weights(model, tmp_path / "mean.pt") == []
    assert bit_by_bit(dict(model.state_dict())) == bit_by_bit(mean)
    whole = average_checkpoints(tmp_path / "run", last=5)  # as many as there are
    assert torch.equal(whole["0.weight"], exact_mean(states, "0.weight").float())


def test_checkpoints_and_files_by_their_paths(tmp_path: Path) -> None:
    """A checkpoint, a file and a wrapped model's file give the mean of the three; one alone is itself."""
    states = train(tmp_path / "run")
    paths = [found.path for found in find(tmp_path / "run")]
    consolidate(paths[1], tmp_path / "second.pt")
    torch.save({f"module.{name}": value for name, value in states[2].items()}, tmp_path / "third.pt")
    mean = average_checkpoints([paths[0], tmp_path / "second.pt", str(tmp_path / "third.pt")])
    assert torch.equal(mean["0.weight"], exact_mean(states[:3], "0.weight").float())
    assert bit_by_bit(average_checkpoints([paths[3]])) == bit_by_bit(states[3])


def test_the_names_are_those_of_the_checkpoints(tmp_path: Path) -> None:
    """Also of a model whose only part is called module, as if a wrapper were around it."""
    model = nn.ModuleDict({"module": net()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = create_trainer(model, optimizer, lambda model, x: model["module"](x).square().mean())
    Checkpoint(tmp_path, every_epochs=1, keep=2).attach(trainer)
    trainer.run(DATA, max_epochs=2)
    model.load_state_dict(average_checkpoints(tmp_path, tmp_path / "mean.pt", last=2))
    assert load_weights(model, tmp_path / "mean.pt") == []


def test_the_last_are_those_that_were_written_last(tmp_path: Path) -> None:
    """After the run went back to an earlier checkpoint, those of the abandoned part with more updates are not the last."""
    train(tmp_path)
    early = find(tmp_path)[0]
    model = net()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.5), lambda model, x: model(x).square().mean())
    Checkpoint(tmp_path, every_epochs=1, keep=9, asynchronous=False, script_wins=("lr",)).attach(trainer)
    trainer.run(DATA, max_epochs=3, resume=early.path)
    assert [entry.manifest.epoch for entry in find(tmp_path) if entry.manifest] == [1, 4, 5, 2, 3]
    last = [entry.path for entry in find(tmp_path)][-2:]
    assert bit_by_bit(average_checkpoints(tmp_path, last=2)) == bit_by_bit(average_checkpoints(last))


def test_an_update_that_was_saved_again_is_as_new_as_its_last_save(tmp_path: Path) -> None:
    """The run went back to update 1, and was killed before it removed the first checkpoint of that update."""
    for directory, updates in ((tmp_path, (1, 2, 3)), (tmp_path / "later", (7, 8, 9, 1))):
        directory.mkdir(exist_ok=True)
        for update in updates:
            small_checkpoints.save(directory, update, last=9)
    (tmp_path / "later/update-00000001").rename(tmp_path / "update-00000001.1")
    mean = average_checkpoints(tmp_path, last=2)["weight"]
    assert mean.unique().tolist() == [2.0]  # of updates 3 and 1


@pytest.mark.parametrize("error", [DamagedCheckpointError, UnreadableCheckpointError], ids=["damaged", "unreadable"])
def test_one_that_cannot_be_read_is_not_passed_over(error: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be one of the last."""
    train(tmp_path)
    newest = find(tmp_path)[-1].path

    def read(checkpoint: Path) -> Any:
        if checkpoint == newest:
            raise error(str(checkpoint), "on purpose")
        return read_manifest(checkpoint)

    for module in ("directory", "reader"):
        monkeypatch.setattr(f"ignite_train.checkpoint.{module}.read_manifest", read)
    with pytest.raises(error, match="on purpose"):
        average_checkpoints(tmp_path, last=2)


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        (torch.float16, [60000.0, 60000.0, 60000.0], 60000.0),  # whose sum no float16 holds
        (torch.bfloat16, [256.0, 1.0, 1.0], 86.0),  # 256 + 1 is 256 in bfloat16
        (torch.float32, [2.0**24, 1.0, 1.0, 1.0, 1.0], 3355444.0),  # 2**24 + 1 is 2**24 in float32
        (torch.complex64, [2.0**24 + 5j, 1.0, 1.0, 1.0, 1.0], 3355444.0 + 1j),
        (torch.int64, [3, 4, 8], 8),
        (torch.bool, [True, True, False], False),
    ],
    ids=["float16", "bfloat16", "float32", "complex64", "int64", "bool"],
)
def test_the_sum_is_wide(tmp_path: Path, dtype: torch.dtype, values: list[Any], expected: Any) -> None:
    """Each dtype is added up in float64 and kept; integers are those of the last one."""
    files = [tmp_path / f"{number}.pt" for number in range(len(values))]
    for file, value in zip(files, values, strict=True):
        torch.save({"w": torch.tensor([value], dtype=dtype)}, file)
    assert bit_by_bit(average_checkpoints(files)) == bit_by_bit({"w": torch.tensor([expected], dtype=dtype)})


def test_a_tensor_with_two_names_is_added_once(tmp_path: Path) -> None:
    """Tied weights in float64, in which the sum is taken."""
    files = [tmp_path / "first.pt", tmp_path / "second.pt"]
    for file, value in zip(files, (1.0, 4.0), strict=True):
        weight = torch.full((2,), value, dtype=torch.float64)
        torch.save({"encoder": weight, "decoder": weight}, file)
    assert {name: value.tolist() for name, value in average_checkpoints(files).items()} == {
        "encoder": [2.5, 2.5],
        "decoder": [2.5, 2.5],
    }


def test_tied_weights_of_files_are_one_tensor_in_the_mean(tmp_path: Path) -> None:
    """Of torch's files too, where two names share memory; if another file has other numbers under them, it is refused."""
    for number, value in enumerate((1.0, 4.0)):
        weight = torch.full((2,), value)
        torch.save({"encoder": weight, "decoder": weight.detach()}, tmp_path / f"{number}.pt")
    mean = average_checkpoints([tmp_path / "0.pt", tmp_path / "1.pt"], tmp_path / "mean.safetensors")
    assert {name: value.tolist() for name, value in mean.items()} == {"encoder": [2.5, 2.5], "decoder": [2.5, 2.5]}
    assert load_file(tmp_path / "mean.safetensors").keys() == {"encoder"}
    torch.save({"encoder": torch.ones(2), "decoder": torch.zeros(2)}, tmp_path / "0.pt")
    for order in ("01", "10"):
        with pytest.raises(
            CheckpointError,
            match=r"paths must be .* one model: 'encoder' and 'decoder' are one tensor in \S+1\.pt, and differ in \S+0\.pt",
        ):
            average_checkpoints([tmp_path / f"{number}.pt" for number in order])


def test_an_entry_that_only_one_of_them_has(tmp_path: Path) -> None:
    """It is not a tensor, like the extra state of a module, and is named too, in either order."""
    files = [tmp_path / "first.pt", tmp_path / "second.pt"]
    torch.save({"w": torch.ones(2)}, files[0])
    torch.save({"w": torch.ones(2), "extra": 5}, files[1])
    with pytest.raises(CheckpointError, match=r"'extra' is missing in \S+first\.pt and 5 of type int in \S+second\.pt"):
        average_checkpoints(files)
    with pytest.raises(CheckpointError, match=r"'extra' is 5 of type int in \S+second\.pt and missing in \S+first\.pt"):
        average_checkpoints(files[::-1])


def test_mistakes(tmp_path: Path) -> None:
    """One line says what is wrong with which checkpoint; nothing is written."""
    for name, state in {"a": {"w": torch.ones(2)}, "b": {"w": torch.ones(3)}, "c": {"v": torch.ones(2)}}.items():
        torch.save(state, tmp_path / f"{name}.pt")
    a, b, c, output = tmp_path / "a.pt", tmp_path / "b.pt", tmp_path / "c.pt", tmp_path / "mean.pt"
    with pytest.raises(CheckpointError, match=r"'w' is torch\.float32 \(2,\) in \S+a\.pt and torch\.float32 \(3,\) in"):
        average_checkpoints([a, b], output)
    with pytest.raises(CheckpointError, match=r"'v' is missing in \S+a\.pt"):
        average_checkpoints([a, c], output)
    with pytest.raises(ValueError, match="at least one"):
        average_checkpoints([], output)
    with pytest.raises(TypeError, match=r"paths must be a list .* last=\.\.\., got"):
        average_checkpoints(str(tmp_path), output)
    with pytest.raises(TypeError, match="paths must be the directory of a run with last=2"):
        average_checkpoints([a, b], output, last=2)
    with pytest.raises(ValueError, match="last"):
        average_checkpoints(tmp_path, output, last=0)
    train(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"6 checkpoints .* has 5; lower last"):
        average_checkpoints(tmp_path / "run", output, last=6)
    assert not output.exists()
