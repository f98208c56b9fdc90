"""A script of a user that trains over elastic replicas in float64 and writes at its end what each update was made of.

Arguments: the directory, the epochs, the samples, seconds that each forward sleeps, and the kind of batches.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from ignite.engine import Events
from torch import Tensor, nn

from ignite_train import (
    ForwardOutput,
    Piggyback,
    ResumableLoader,
    TokenBudgetSampler,
    TrainEvents,
    UpdateOptions,
    create_trainer,
)
from ignite_train.handlers import LearningRateSchedule


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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)  # stable: rounding stays small
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


class History(Piggyback):
    """How often each sample was in each update, added up over the replicas; a replica that joins gets it with the state."""

    saved_as = "history"

    def __init__(self, number: int) -> None:
        self.payload_size, self.counts, self.updates = number, [0] * number, list[Any]()
        self._latest: list[int] = []
        self.start: Any = None

    def payload(self) -> list[float]:
        return [float(count) for count in self.counts]

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
    return {name: value.tolist() for name, value in model.state_dict().items()}


def main(directory: str, epochs: int, number: int, seconds: float, batches: str) -> None:
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))  # replicas begin with other weights, and become equal
    model, history = make_model(), History(number)
    optimizer, schedule = make_optimizer(model)

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        indices, x, y = micro_batch
        for index in indices.tolist():
            history.counts[index] += 1
        time.sleep(seconds)
        return ForwardOutput((model(x) - y).square().sum(), sample_size=len(y))

    def begin(trainer: Any) -> None:
        if trainer.state.micro_batch_in_group == 0:
            history.counts = [0] * number

    def keep_start(trainer: Any) -> None:
        history.counts = [0] * number
        if trainer.state.iteration == 1:
            history.start = values(model)

    def say_begun(trainer: Any) -> None:
        if trainer.state.iteration == 2:
            (Path(directory) / "begun").touch()

    options = UpdateOptions(reduction="elastic")
    trainer = create_trainer(model, optimizer, forward, accumulation_steps=2, seed=5, options=options)
    trainer.piggybacks.append(history)
    trainer.add_event_handler(Events.ITERATION_STARTED, keep_start)
    trainer.add_event_handler(TrainEvents.MICRO_BATCH_STARTED, begin)
    trainer.add_event_handler(TrainEvents.STEP_COMPLETED, history)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, say_begun)
    LearningRateSchedule(schedule).attach(trainer)
    if batches == "tokens":
        sampler = TokenBudgetSampler([1 + index % 3 for index in range(number)], max_tokens=5, shuffle=True, seed=3)
        loader = ResumableLoader(Samples(number), batches=sampler, seed=3)
    else:
        workers = {"workers": 1}.get(batches, 0)
        loader = ResumableLoader(Samples(number), batch_size=2, shuffle=True, seed=3, num_workers=workers)
    trainer.run(loader, max_epochs=epochs)
    end = {"parameters": values(model), "updates": history.updates, "start": history.start, "steps": trainer.state.num_steps}
    path = Path(directory) / f"{os.environ['IGNITE_TRAIN_REPLICA']}-{os.getpid()}.json"
    path.with_suffix(".part").write_text(json.dumps(end))
    path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
