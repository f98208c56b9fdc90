"""A run under Ray Train: Ray starts the processes, and all of them again when one dies; the run continues with the same bits.

    pip install 'ignite-train[ray]'
    python examples/ray_train.py --storage /shared/runs --name first --workers 2

The checkpoints of the run lie in Ray's storage path, which all machines must see. Ray calls `train` in a thread of each
process, where no handler hears a signal: Ray stops a run by ending its processes. The same command resumes it.
"""

import argparse
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import ray.data
import ray.train
import torch
from ignite.engine import Events
from ray.train.torch import TorchTrainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ignite_train import ForwardOutput, Trainer, create_trainer
from ignite_train.handlers import Checkpoint


class FixedShards(ray.train.DataConfig):
    """Gives each worker the same rows in the same order at each start. By default Ray deals them out as they are asked for."""

    def configure(
        self, datasets: dict[str, ray.data.Dataset], world_size: int, *_: Any, **__: Any
    ) -> list[dict[str, ray.data.DataIterator]]:
        """A list of the shards by name for each worker, which differ in length by one row at most."""
        shards: list[dict[str, ray.data.DataIterator]] = [{} for _ in range(world_size)]
        for name, dataset in datasets.items():
            cuts = [rank * dataset.count() // world_size for rank in range(1, world_size)]
            for of_worker, shard in zip(shards, dataset.split_at_indices(cuts) if cuts else [dataset], strict=True):
                of_worker[name] = shard.iterator()
        return shards


class PrintReports(ray.train.UserCallback):
    """Prints what the first worker has reported. Ray calls it in the process that controls the run."""

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:  # noqa: ARG002  # Ray's
        """One line a report."""
        print("update {update}: loss {loss!r}, gradient norm {grad_norm!r}".format_map(metrics[0]), flush=True)


class RayLoader:
    """Micro-batches of this worker's shard. A resumed run reads those that it has used again, without computing them."""

    def __init__(self, name: str, batch_size: int) -> None:
        self.shard, self.batch_size = ray.train.get_dataset_shard(name), batch_size

    def __iter__(self) -> Iterator[Tensor]:
        return (batch["data"] for batch in self.shard.iter_torch_batches(batch_size=self.batch_size))


def report(trainer: Trainer) -> None:
    """Sends the numbers of an update to Ray, together with all other workers. What it has not fetched when one dies is lost."""
    output = trainer.state.update_output
    ray.train.report({"update": trainer.state.iteration, "loss": output.loss, "grad_norm": output.grad_norm})


def forward(model: nn.Module, blocks: Tensor) -> ForwardOutput:
    """Predicts each byte from the one before."""
    logits, targets = model(blocks[:, :-1]), blocks[:, 1:]
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return ForwardOutput(loss, sample_size=targets.numel())


def train(config: dict[str, Any]) -> None:
    """What each worker does. Ray has made the process group."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 256)).to(idist.device())
    if idist.get_world_size() > 1:
        model = idist.auto_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    trainer = create_trainer(model, optimizer, forward, accumulation_steps=2, max_grad_norm=1.0)
    Checkpoint(config["directory"], every=4).attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=4), report)
    loader = RayLoader("train", 16 // idist.get_world_size())
    trainer.run(loader, max_epochs=config["max_epochs"])  # resumes from the newest checkpoint, if there is one


def start(
    storage: Path, name: str, *, workers: int = 2, max_epochs: int = 3, train: Callable[[dict[str, Any]], None] = train
) -> ray.train.Result:
    """Trains in `workers` processes, for each of which Ray needs a CPU, or a GPU, and one more CPU for the data."""
    text = torch.tensor(list(Path(inspect.__file__).read_bytes()[:8193]))
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    trainer = TorchTrainer(
        train,
        train_loop_config={"directory": str(storage / name / "checkpoints"), "max_epochs": max_epochs},
        datasets={"train": ray.data.from_numpy(text.unfold(0, 33, 32).numpy())},
        dataset_config=FixedShards(),
        scaling_config=ray.train.ScalingConfig(num_workers=workers, use_gpu=torch.cuda.is_available()),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=str(storage),
            failure_config=ray.train.FailureConfig(max_failures=2),
            callbacks=[PrintReports()],
        ),
    )
    return trainer.fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", type=Path, required=True, help="a directory that all machines see")
    parser.add_argument("--name", required=True, help="of the run; the same name resumes it")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--max-epochs", type=int, default=3)
    options = parser.parse_args()
    start(options.storage.absolute(), options.name, workers=options.workers, max_epochs=options.max_epochs)
    print(f"the checkpoints are in {options.storage / options.name / 'checkpoints'}")
