"""A script of a user that trains over elastic replicas in float64 and writes at its end what each update was made of.

Arguments: the directory, the epochs, the samples, seconds that each forward sleeps, and the kind of batches. `elastic_runs`
calls it with a function that is told where a replica is.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ignite_train import (
    ForwardOutput,
    Piggyback,
    ResumableLoader,
    TokenBudgetSampler,
    TrainEvents,
    UpdateOptions,
    create_evaluator,
    create_trainer,
)
from ignite_train.handlers import Checkpoint, EarlyStopping, FailureBoard, HangWatch, LearningRateSchedule, Validation
from meshes import on_cpu


class Samples(torch.utils.data.Dataset):
    """Each sample is a function of its index, which it carries."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        draw = lambda size: torch.randn(size, generator=generator, dtype=torch.float64)  # noqa: E731
        return index, draw(6), draw(1)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def make_optimizer(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer: torch.optim.Optimizer
    if "ADAMW" in os.environ:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)  # stable: rounding stays small
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


def shard(model: nn.Module) -> None:
    """Shares the model out to the ranks of the replica, if there are any."""
    if "RANK" not in os.environ:
        return
    dist.init_process_group("gloo")
    mesh = on_cpu()
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


class History(Piggyback):
    """How often each sample was in each update, added up over the replicas; a replica that joins gets it with the state."""

    saved_as = "history"

    def __init__(self, number: int) -> None:
        self.payload_size, self.counts, self.updates = number, [0] * number, list[Any]()
        self._attempt: Any = None  # the update that is counted, and how often one was made again before
        self._latest: list[int] = []
        self.start: Any = None
        self.trainer: Any = None

    def count(self, indices: list[int]) -> None:
        self._begin()
        for index in indices:
            self.counts[index] += 1

    def payload(self) -> list[float]:
        self._begin()  # where this replica has no micro-batch now, and had one before the update was taken back
        return [float(count) for count in self.counts]

    def _begin(self) -> None:
        state = self.trainer.state
        attempt = state.iteration, state.metrics["updates_made_again"]
        if attempt != self._attempt:
            self._attempt, self.counts = attempt, [0] * self.payload_size

    def on_reduced(self, sums: list[float]) -> None:
        self._latest = [round(number) for number in sums]

    def settle(self) -> None:
        pass

    def __call__(self, trainer: Any) -> None:
        self.updates.append([trainer.state.epoch, self._latest])

    def state_dict(self) -> dict[str, str]:
        return {"updates": json.dumps(self.updates), "start": json.dumps(self.start)}

    def load_state_dict(self, state_dict: dict[str, str]) -> None:
        self.updates, self.start = json.loads(state_dict["updates"]), json.loads(state_dict["start"])


def values(model: nn.Module) -> dict[str, Any]:
    """Collective over the ranks of a replica."""
    state = model.state_dict().items()
    return {name: (value.full_tensor() if isinstance(value, DTensor) else value).tolist() for name, value in state}


def tell_places(trainer: Any, optimizer: torch.optim.Optimizer, history: History, reach: Callable[[str], None]) -> None:
    """Has `reach` told of each place in the update that the script itself does not come through."""
    members = trainer.process.members

    def told(function: Callable[..., Any], before: str = "", after: str = "") -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any) -> Any:
            reach(before)
            result = function(*arguments)
            reach(after)
            return result

        return call

    members.sum = told(members.sum, "reduction")
    members.commit = told(members.commit, "commit", "commit")
    join = members.join

    def joining(step: Any, capture: Any, restore: Any) -> None:
        join(step, told(capture, "healing another", "healing another"), told(restore, "being healed", "being healed"))
        reach("joined")

    members.join = joining
    optimizer.register_step_pre_hook(lambda *_: reach("step"))
    optimizer.register_step_post_hook(lambda *_: reach("step"))


def validate_and_save(trainer: Any, directory: Path, number: int, reach: Callable[[str], None]) -> None:
    """Attaches what a run has besides its updates, with directories of this replica's own."""

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        reach("evaluation")
        _, x, y = micro_batch
        return ForwardOutput((model(x) - y).square().sum(), sample_size=len(y))

    evaluator = create_evaluator(trainer.model, forward)
    validation = ResumableLoader(Samples(number // 4), batch_size=6, shuffle=False)
    Validation(evaluator, validation, sanity=0).attach(trainer, Events.ITERATION_COMPLETED(every=5))
    EarlyStopping(evaluator, patience=10**6).attach(trainer)

    class Saves:
        def state_dict(self) -> dict[str, int]:
            reach("save")
            return {"zero": 0}

        def load_state_dict(self, state_dict: dict[str, int]) -> None:
            pass

    saves = os.environ.get("SAVES", os.environ["IGNITE_TRAIN_REPLICA"])
    Checkpoint(directory / f"saves-{saves}", every=4, to_save={"saves": Saves()}).attach(trainer)


def hang_once(path: Path) -> None:
    if not path.exists():
        path.touch()
        time.sleep(10**6)


def make_loader(batches: str, number: int) -> ResumableLoader:
    if batches == "tokens":
        sampler = TokenBudgetSampler([1 + index % 3 for index in range(number)], max_tokens=5, shuffle=True, seed=3)
        return ResumableLoader(Samples(number), batches=sampler, seed=3)
    workers = {"workers": 1}.get(batches, 0)
    return ResumableLoader(Samples(number), batch_size=2, shuffle=True, seed=3, num_workers=workers)


def rare_settings() -> dict[str, Any]:
    clips = {"max_grad_norm": float(os.environ["CLIPS"])} if "CLIPS" in os.environ else {}
    return {"options": UpdateOptions(reduction="elastic"), **clips}


def watch(trainer: Any) -> None:
    """Attaches what looks for ranks that fail or hang."""
    if "BOARDS" in os.environ:
        FailureBoard().attach(trainer)
        HangWatch(timeout_seconds=60).attach(trainer)
    if "HANGS" in os.environ:
        HangWatch(timeout_seconds=4).attach(trainer)


def write(directory: Path, end: Any) -> None:
    """Writes what a replica has come to; its first rank does."""
    if os.environ.get("RANK", "0") == "0":
        path = directory / f"{os.environ['IGNITE_TRAIN_REPLICA']}-{os.getpid()}.json"
        path.with_suffix(".part").write_text(json.dumps(end))
        path.with_suffix(".part").rename(path)


def main(
    directory: str, epochs: int, number: int, seconds: float, batches: str, reach: Callable[[str], None] | None = None
) -> None:
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))  # replicas begin with other weights, and become equal
    model, history = make_model(), History(number)
    shard(model)
    optimizer, schedule = make_optimizer(model)

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        indices, x, y = micro_batch
        if trainer.state.micro_batch_in_group is not None:  # or else it stands in for one that this rank lacks
            history.count(indices.tolist())
        time.sleep(seconds)
        # From update 3 on: on a machine that is busy a replica may join later.
        if trainer.state.iteration >= 3 and os.environ["IGNITE_TRAIN_REPLICA"] == os.environ.get("HANGS"):
            hang_once(Path(directory) / "hung")
        loss = (model(x) - y).square().sum()
        if reach is not None:
            reach("forward")
            loss.register_hook(lambda gradient: reach("backward"))
        return ForwardOutput(loss, sample_size=len(y), logs={"near": ((loss.detach() < 1).float(), 1.0)})

    def keep_start(trainer: Any) -> None:
        if trainer.state.iteration == 1:
            history.start = values(model)

    def say_begun(trainer: Any) -> None:
        if trainer.state.iteration == 2:
            (Path(directory) / "begun").touch()
        (Path(directory) / f"made-{os.getpid()}").touch()
        if (Path(directory) / "enough").exists():
            trainer.terminate()

    trainer = create_trainer(model, optimizer, forward, accumulation_steps=2, seed=5, **rare_settings())
    history.trainer = trainer
    trainer.piggybacks.append(history)
    trainer.add_event_handler(Events.ITERATION_STARTED, keep_start)
    trainer.add_event_handler(TrainEvents.STEP_COMPLETED, history)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, say_begun)
    LearningRateSchedule(schedule).attach(trainer)
    if reach is not None:
        tell_places(trainer, optimizer, history, reach)
        validate_and_save(trainer, Path(directory), number, reach)
    watch(trainer)
    trainer.run(make_loader(batches, number), max_epochs=epochs)
    end = {"parameters": values(model), "updates": history.updates, "start": history.start, "steps": trainer.state.num_steps}
    write(Path(directory), end)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
