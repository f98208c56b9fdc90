"""A checkpoint that an older version of the package wrote, and that lies in `tests/data`, is still resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from ignite_train import ForwardOutput, ResumableLoader, Trainer, create_trainer
from ignite_train.handlers import Checkpoint, LearningRateSchedule, TrainingMetrics
from ignite_train.metrics import TIMED_METRICS

DATA = Path(__file__).parent / "data" / "format-1"
TIMES = ("seconds", "waited")  # sums of the clock, which have another place today
UPDATE = 4  # of three to an epoch: in the middle of the second


class Job(NamedTuple):
    """A run, and what is compared of it."""

    trainer: Trainer
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any
    metrics: TrainingMetrics
    loader: Any

    def state(self) -> dict[str, Any]:
        """All that a checkpoint holds of it, in lists and numbers, as JSON gives them back."""
        state = self.trainer.state
        record = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "metrics": self.metrics.state_dict(),
            "torch": torch.get_rng_state(),
            "counters": [state.iteration, state.epoch, state.num_steps, state.num_skipped],
            "published": {name: value for name, value in state.metrics.items() if name not in TIMED_METRICS},
        }
        return json.loads(json.dumps(_plain(record)))


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()  # float32 as float64, so exact
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
    (x,) = micro_batch
    noisy = x + 0.1 * torch.randn_like(x)
    return ForwardOutput((model(noisy) - x[:, :3]).square().sum(), len(x), {"error": x.abs().sum()})


def make(directory: Path | None, seed: int) -> Job:
    """The run that was saved; its weights are those of `seed`."""
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    schedule = CosineAnnealingLR(optimizer, 9)
    trainer = create_trainer(model, optimizer, forward)
    LearningRateSchedule(schedule).attach(trainer)
    metrics = TrainingMetrics()
    metrics.attach(trainer, Events.ITERATION_COMPLETED(every=3))
    if directory is not None:
        Checkpoint(directory, every=2, config={"depth": 1}).attach(trainer)
    samples = torch.utils.data.TensorDataset(torch.arange(48.0).reshape(12, 4).cos())
    return Job(trainer, model, optimizer, schedule, metrics, ResumableLoader(samples, 4, shuffle=True, seed=1))


def test_goes_on_bitwise_from_a_checkpoint_of_an_older_version(tmp_path: Path) -> None:
    """It holds what its run held when it was written; the end is that of a run which was given these numbers by hand."""
    expected = json.loads((DATA / "expected.json").read_text())
    shutil.copytree(DATA / "update-00000004", tmp_path / "update-00000004")
    resumed, found = make(tmp_path, seed=9), []
    resumed.trainer.add_event_handler(Events.ITERATION_STARTED(once=UPDATE + 1), lambda: found.append(resumed.state()))
    resumed.trainer.run(resumed.loader, max_epochs=3)
    sums, then = found[0]["metrics"]["sums"], expected["metrics"]["sums"]
    assert {name: sums[name] for name in then if name not in TIMES} == {
        name: value for name, value in then.items() if name not in TIMES
    }
    assert found[0]["metrics"]["logs"] == expected["metrics"]["logs"]
    interval = found[0]["metrics"]["seconds"]["interval"]
    assert (interval["data"], interval["data"] + interval["update"]) == (then["waited"], then["seconds"])
    assert {**found[0], "counters": [UPDATE, *found[0]["counters"][1:]], "metrics": expected["metrics"]} == expected

    by_hand = make(None, seed=5)

    @by_hand.trainer.on(Events.ITERATION_COMPLETED(once=UPDATE))
    def put() -> None:
        by_hand.model.load_state_dict({name: torch.tensor(value) for name, value in expected["model"].items()})
        optimizer = expected["optimizer"]
        state = {int(i): {k: torch.tensor(v) for k, v in entry.items()} for i, entry in optimizer["state"].items()}
        by_hand.optimizer.load_state_dict({"state": state, "param_groups": optimizer["param_groups"]})
        by_hand.schedule.load_state_dict(expected["schedule"])
        by_hand.metrics.load_state_dict(expected["metrics"])
        by_hand.trainer.state.metrics = dict(expected["published"])
        torch.set_rng_state(torch.tensor(expected["torch"], dtype=torch.uint8))

    by_hand.trainer.run(by_hand.loader, max_epochs=3)
    end, expected_end = resumed.state(), by_hand.state()
    for record in (end, expected_end):
        del record["metrics"]["seconds"]
    assert end == expected_end
    assert end["counters"] == [9, 3, 9, 0]
