"""`Checkpoint(frozen="once")`: weights that do not train lie in one file, to which checkpoints refer."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ignite_train import CheckpointError, ForwardOutput, Trainer, checkpoint, create_trainer
from ignite_train.checkpoint.disk import Disk
from ignite_train.checkpoint.manifest import is_frozen_name, read_manifest
from ignite_train.checkpoint.reader import CheckpointReader
from ignite_train.errors import UnreadableCheckpointError
from ignite_train.handlers import Checkpoint
from ignite_train.ranks import collectives
from ignite_train.tools.checkpoint_command import checkpoint_command
from processes import DEADLINE_SECONDS, Processes, forked
from ranks import run_ranks
from small_checkpoints import names
from tiers import slow

X = torch.linspace(-1, 1, 64).reshape(8, 8)
LOADER = [X[i : i + 2] for i in range(0, 8, 2)]


def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
    return ForwardOutput((model(x) - 1).square().sum(), len(x))


def net(seed: int = 0) -> nn.Sequential:
    """A frozen layer, whose weight is tied to that of another, and a small one that trains."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model[2].weight = model[0].weight
    for layer in (model[0], model[2]):
        layer.requires_grad_(False)
    return model


def build(
    directory: Path, model: nn.Module | None = None, *, frozen: Any = "once", **options: Any
) -> tuple[Trainer, Checkpoint]:
    model = net() if model is None else model
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)
    trainer = create_trainer(model, optimizer, forward)
    saver = Checkpoint(directory, **{"every": 1, "keep": 2, **options}, frozen=frozen)
    saver.attach(trainer)
    return trainer, saver


def frozen_files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if is_frozen_name(path.name))


def checkpoints(directory: Path) -> list[Path]:
    return [found.path for found in checkpoint.find(directory)]


def bits(model: nn.Module) -> dict[str, list[int]]:
    return {name: value.detach().reshape(-1).view(torch.int32).tolist() for name, value in model.named_parameters()}


def test_they_are_written_once_and_resume_bitwise(tmp_path: Path) -> None:
    """The run that resumes ends as one that was not broken off, and both read as with each checkpoint of its own."""
    once, each, whole = (build(tmp_path / name, frozen=how) for name, how in (("a", "once"), ("b", "each"), ("c", "each")))
    once[0].run(LOADER, max_iters=2)
    each[0].run(LOADER, max_iters=2)
    (file,) = frozen_files(tmp_path / "a")
    assert not frozen_files(tmp_path / "b")
    newest = checkpoints(tmp_path / "a")[-1]
    with CheckpointReader(newest) as one, CheckpointReader(checkpoints(tmp_path / "b")[-1]) as other:
        assert one.names() == other.names()
        mine, theirs = one.read("model"), other.read("model")
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
        assert mine["0.weight"] is mine["2.weight"]
        assert {"model['0.weight']", "model['0.bias']", "model['2.bias']"} == {*one._part(0).files[1].entries}
    checkpoint.verify(newest)

    again, _ = build(tmp_path / "a", net(seed=1))
    again.run(LOADER, max_iters=6)
    whole[0].run(LOADER, max_iters=6)
    assert bits(again.model) == bits(whole[0].model)
    assert frozen_files(tmp_path / "a") == [file]


def test_the_command_goes_through_all_where_their_file_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each checkpoint has its line, with the reason. A checkpoint that was copied without its file is such a case."""
    build(tmp_path)[0].run(LOADER, max_iters=4)
    for name in frozen_files(tmp_path):
        (tmp_path / name).unlink()
    found = checkpoints(tmp_path)
    assert checkpoint_command(["verify", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in lines] == [path.name for path in found]
    assert len(lines) == 2
    assert all("cannot be read: " in line and "frozen-" in line and "latest" not in line for line in lines)


def test_what_has_not_changed_is_neither_copied_nor_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save after the first has nothing of them in its hands."""
    trainer, saver = build(tmp_path)
    written: list[str] = []
    create = saver.saver.directory.disk.create
    monkeypatch.setattr(saver.saver.directory.disk, "create", lambda path: (written.append(path.name), create(path))[1])
    taken: list[set[str]] = []
    write = saver.saver._write
    monkeypatch.setattr(
        saver.saver, "_write", lambda contents, *rest: (taken.append({*contents.all_pieces}), write(contents, *rest))[1]
    )
    trainer.run(LOADER, max_iters=3)
    assert sum(map(is_frozen_name, written)) == 1
    assert [bool({"model['0.weight']"} & names) for names in taken[:3]] == [True, False, False]


@pytest.mark.parametrize("thaws", [False, True])
def test_weights_that_change_or_thaw_are_written_again(tmp_path: Path, thaws: bool) -> None:
    """Under another name, beside the first as long as a checkpoint refers to it."""
    trainer, _ = build(tmp_path)
    seen: list[list[str]] = []

    @trainer.on(Events.ITERATION_STARTED(once=3))
    def change() -> None:
        layer = trainer.model[0]
        if thaws:
            layer.bias.requires_grad_(True)
            trainer.optimizers["optimizer"].add_param_group({"params": [layer.bias]})
        else:
            layer.bias.data[0] = -layer.bias.data[0]  # which no version of the tensor shows

    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: seen.append(frozen_files(tmp_path)))
    trainer.run([*LOADER, *LOADER], max_iters=5)
    first, last = seen[2], frozen_files(tmp_path)
    assert len(first) == len(last) == 1
    assert first != last
    assert {*first, *last} == {*seen[4]} or {*seen[4]} == {*last}  # the removal runs beside the training
    for path in checkpoints(tmp_path):
        checkpoint.verify(path)
        assert last[0] in read_manifest(path).files
    with CheckpointReader(checkpoints(tmp_path)[-1]) as stored:
        assert torch.equal(stored.read("model")["0.bias"], trainer.model[0].bias)


def test_retention_keeps_a_file_that_one_checkpoint_needs(tmp_path: Path) -> None:
    """An old checkpoint stays by `keep_every`, and so does its file; without a reference the file goes."""
    trainer, _ = build(tmp_path, keep=1, keep_every=2)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=3), lambda: trainer.model[0].bias.data.zero_())
    trainer.run([*LOADER, *LOADER], max_iters=5)
    assert [read_manifest(path).update for path in checkpoints(tmp_path)] == [2, 4, 5]
    assert len(frozen_files(tmp_path)) == 2
    shutil.rmtree(checkpoints(tmp_path)[0])
    build(tmp_path, net(), keep=1, keep_every=2)[0].run([*LOADER, *LOADER], max_iters=6)
    assert len(frozen_files(tmp_path)) == 1


def test_a_checkpoint_that_cannot_be_read_keeps_all_of_them(tmp_path: Path) -> None:
    """It may refer to any."""
    trainer, _ = build(tmp_path, keep=1, keep_every=2)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=3), lambda: trainer.model[0].bias.data.zero_())

    @trainer.on(Events.ITERATION_STARTED(once=4))
    def harm() -> None:
        (tmp_path / "update-00000002/manifest.json").write_bytes(b"")
        trainer_saver.saver.directory._manifests.clear()

    trainer_saver = trainer.checkpoint
    trainer.run([*LOADER, *LOADER], max_iters=5)
    assert len(frozen_files(tmp_path)) == 2


@pytest.mark.parametrize("harm", ["missing", "damaged", "cut short", "another"])
def test_a_file_that_is_missing_or_damaged_is_named_in_one_line(tmp_path: Path, harm: str) -> None:
    """No checkpoint is renamed for it: all that refer to the file are whole when it is back."""
    build(tmp_path)[0].run(LOADER, max_iters=3)
    (name,) = frozen_files(tmp_path)
    content, before = (tmp_path / name).read_bytes(), names(tmp_path)
    changed = {"damaged": content[:-1] + bytes([content[-1] ^ 1]), "cut short": content[:-1], "another": content[::-1]}
    if harm == "missing":
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(changed[harm])
    with pytest.raises(UnreadableCheckpointError, match=name) as error:
        checkpoint.verify(checkpoints(tmp_path)[-1])
    assert "\n" not in str(error.value)
    assert ("is missing" if harm == "missing" else "cannot be used") in str(error.value)
    trainer, _ = build(tmp_path, net(seed=1))
    state = bits(trainer.model)
    with pytest.raises(CheckpointError, match=name) as error:
        trainer.run(LOADER, max_iters=6)
    assert "\n" not in str(error.value)
    assert bits(trainer.model) == state
    with pytest.raises(CheckpointError, match=name):
        checkpoint.load_weights(net(), tmp_path)
    (tmp_path / name).write_bytes(content)
    assert names(tmp_path) == before
    checkpoint.verify(checkpoints(tmp_path)[-1])


def test_a_file_that_vanishes_in_the_run_fails_one_save_and_is_written_again(tmp_path: Path) -> None:
    """The next save knows that it has to."""
    trainer, saver = build(tmp_path, on_error="warn", asynchronous=False)

    @trainer.on(Events.ITERATION_STARTED(once=3))
    def remove() -> None:
        for name in frozen_files(tmp_path):
            (tmp_path / name).unlink()

    trainer.run(LOADER, max_iters=4)
    assert [read_manifest(path).update for path in checkpoints(tmp_path)][-1] == 4
    assert len(frozen_files(tmp_path)) == 1
    assert saver.latest is not None
    checkpoint.verify(saver.latest)


def test_the_tools_find_them(tmp_path: Path) -> None:
    """consolidate, load_weights, read_checkpoint, average_checkpoints; a copy needs the file beside it."""
    trainer, _ = build(tmp_path)
    trainer.run(LOADER, max_iters=2)
    older, newest = checkpoints(tmp_path)
    checkpoint.consolidate(newest, tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt")
    assert all(torch.equal(found[name], value) for name, value in trainer.model.state_dict().items())
    loaded = net(seed=1)
    assert checkpoint.load_weights(loaded, newest) == []
    assert bits(loaded) == bits(trainer.model)
    assert checkpoint.read_checkpoint(newest).shapes["0.weight"] == (8, 8)
    checkpoint.average_checkpoints([older, newest], tmp_path / "mean.pt")
    mean = torch.load(tmp_path / "mean.pt")
    assert torch.equal(mean["0.weight"], trainer.model[0].weight)

    alone = tmp_path / "elsewhere" / newest.name
    shutil.copytree(newest, alone)
    message = r"frozen-\w+\.safetensors, which has its frozen weights and lies beside it, is missing; .*: copy that file there$"
    for read in (checkpoint.verify, lambda path: checkpoint.load_weights(net(), path)):
        with pytest.raises(UnreadableCheckpointError, match=message):
            read(alone)
    shutil.copy(tmp_path / frozen_files(tmp_path)[0], alone.parent)
    checkpoint.verify(alone)


def test_a_run_without_frozen_weights_has_no_such_file(tmp_path: Path) -> None:
    model = net().requires_grad_(True)
    build(tmp_path, model)[0].run(LOADER, max_iters=2)
    assert not frozen_files(tmp_path)
    checkpoint.verify(checkpoints(tmp_path)[-1])


def test_another_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"frozen must be .*'each'.*'once'"):
        Checkpoint(tmp_path, frozen="never")  # type: ignore[arg-type]


# --- kills ---


class Killed(Disk):
    """Kills this process before the n-th operation from the first on a file of frozen weights."""

    def __init__(self, number: int) -> None:
        self._left, self._begun, self._descriptor = number, False, -1

    def _count(self) -> None:
        if self._begun:
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1

    def create(self, path: Path) -> int:
        self._begun |= is_frozen_name(path.name)
        self._count()
        return super().create(path)

    def write(self, descriptor: int, data: memoryview) -> None:
        self._count()
        super().write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        self._count()
        super().sync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)

    def sync_directory(self, path: Path) -> None:
        self._count()
        super().sync_directory(path)


def _changes_and_is_killed(directory: Path, number: int) -> None:
    trainer, saver = build(directory, keep=1)
    trainer.run(LOADER, max_iters=1)
    trainer.model[0].bias.data.zero_()
    saver.saver.directory.disk = Killed(number)
    trainer.run(LOADER, max_iters=2)
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [*map(slow, range(14)), 14, 15, 16, *map(slow, range(17, 22))])
def test_a_kill_while_they_are_written_again_loses_nothing(tmp_path: Path, number: int) -> None:
    """By SIGKILL before each operation: the old checkpoint or the new one is whole, and the next run leaves one file."""
    process = forked.Process(target=_changes_and_is_killed, args=(tmp_path, number))
    with Processes([process], []):
        process.join(DEADLINE_SECONDS)
    assert process.exitcode in (0, -signal.SIGKILL)
    newest = checkpoints(tmp_path)[-1]
    checkpoint.verify(newest)
    with CheckpointReader(newest) as stored:
        bias = stored.read("model")["0.bias"]
    assert torch.equal(bias, net()[0].bias) if read_manifest(newest).update == 1 else not bias.any()
    build(tmp_path, keep=1)[0].run(LOADER, max_iters=3)
    assert len(frozen_files(tmp_path)) == 1
    assert len(checkpoints(tmp_path)) == 1
    checkpoint.verify(checkpoints(tmp_path)[0])


# --- ranks ---


def _sharded(directory: Path, epochs: int) -> tuple[list[str], bool]:
    model = net()
    model[2].weight = nn.Parameter(model[2].weight.detach().clone(), requires_grad=False)
    if collectives.world_size() > 1:
        mesh = init_device_mesh("cpu", (collectives.world_size(),))
        for layer in (model[0], model[2], model[4]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    trainer, _ = build(directory, model)
    trainer.run(LOADER, max_epochs=epochs)
    whole = {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in model.state_dict().items()}
    reference = net()
    names = ("0.weight", "0.bias", "2.bias")
    return frozen_files(directory), all(torch.equal(whole[name], reference.state_dict()[name]) for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("worlds", [(2, 1), (1, 2), (2, 2)], ids=str)
def test_sharded_models_and_other_numbers_of_ranks(tmp_path: Path, worlds: tuple[int, int]) -> None:
    """Each rank has the file of its shards; as many ranks as will can read them."""
    found: list[Any] = []
    for epochs, world in enumerate(worlds, start=1):
        run: Callable[..., Any] = run_ranks if world > 1 else lambda work, *args: [work(*args)]
        found.append(run(_sharded, tmp_path, epochs))
    for world, ranks in zip(worlds, found, strict=True):
        assert all(is_equal for _, is_equal in ranks)
        assert len(ranks[0][0]) == world
    checkpoint.verify(checkpoints(tmp_path)[-1])
    loaded = net(seed=1)
    assert checkpoint.load_weights(loaded, tmp_path) == []
    assert torch.equal(loaded[0].weight, net()[0].weight)
