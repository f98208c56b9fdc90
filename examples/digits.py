"""Learns the handwritten digits that come with scikit-learn, with `create_supervised_trainer`, in a few seconds.

    python examples/digits.py                                          # one process
    python examples/digits.py --nproc 2                                # two, started by the script itself
    torchrun --nproc_per_node=2 examples/digits.py                     # two, started by torchrun
    python examples/digits.py --tune 60                                # which settings are fastest here? nothing is trained

`language_model.py` beside this file is the longer tutorial.
"""

from functools import partial
from typing import Annotated

import ignite.distributed as idist
import torch
import torch.nn.functional as F  # noqa: N812
import typer
from ignite.engine import Events
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typer import Option

from ignite_train import ForwardOutput, ShardedSampler, Trainer, create_evaluator, create_supervised_trainer, tune
from ignite_train.handlers import ProgressLog, TensorBoard, TrainingMetrics, Validation
from launching import launch, number_of_processes


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    """Returns the images to train on and every fifth, drawn at random but always alike, to test on."""
    images, labels = load_digits(return_X_y=True)
    arrays = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    x, x_test, y, y_test = map(torch.from_numpy, arrays)
    x, x_test = (pixels.float().view(-1, 1, 8, 8) / 16 for pixels in (x, x_test))
    return TensorDataset(x, y), TensorDataset(x_test, y_test)


def build_model() -> nn.Module:
    """Two convolutions and a linear layer."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 2 * 2, 10)),
    )


def make_trainer(
    gradient_accumulation_steps: int = 1,
    *,
    fused: bool | None = None,
    channels_last: bool = False,
    compile: bool = False,  # noqa: A002  # torch's name for it
) -> Trainer:
    """Model, optimizer and trainer; `tune` tries other values of the parameters."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = build_model().to(idist.device(), memory_format=layout)
    if idist.get_world_size() > 1:
        model = idist.auto_model(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=fused)
    return create_supervised_trainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        gradient_accumulation_steps=gradient_accumulation_steps,
        compile=compile,
    )


def test_forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> ForwardOutput:
    """What the evaluator adds up; divided by the number of samples, the count of right answers is the accuracy."""
    x, y = batch
    logits = model(x)
    loss = F.cross_entropy(logits, y, reduction="sum")
    return ForwardOutput(loss, sample_size=len(y), logs={"accuracy": (logits.argmax(dim=-1) == y).sum()})


def mistakes(model: nn.Module, test_set: TensorDataset) -> dict[str, str | Tensor]:
    """The first test images that the model takes for another digit, side by side, and what it takes them for."""
    images, labels = test_set.tensors
    device = next(model.parameters()).device
    with torch.no_grad():
        found = model(images.to(device)).argmax(dim=-1).cpu()
    wrong = (found != labels).nonzero().flatten()[:8]
    if len(wrong) == 0:
        return {"mistakes/text": "none"}
    words = ", ".join(f"{labels[index]} as {found[index]}" for index in wrong)
    return {"mistakes/images": torch.cat([*images[wrong]], dim=-1), "mistakes/text": words}


def train(_local_rank: int, epochs: int, batch_size: int, seed: int, log_dir: str, tuning_seconds: float) -> None:
    """The run, or the search for its fastest settings: what each process does."""
    processes = idist.get_world_size()
    torch.set_num_threads(1)  # the operations are too small for threads to share
    train_set, test_set = read_digits()
    sampler = ShardedSampler(train_set, shuffle=True, seed=seed)
    loader = DataLoader(train_set, batch_size=max(1, batch_size // processes), sampler=sampler)
    test_loader = DataLoader(test_set, batch_size=128, sampler=ShardedSampler(test_set, shuffle=False))

    torch.manual_seed(seed)
    if tuning_seconds:
        found = tune(make_trainer, loader, seconds=tuning_seconds)
        if idist.get_rank() == 0:
            print(found)
        return
    trainer = make_trainer()
    evaluator = create_evaluator(trainer.model, test_forward)
    TrainingMetrics().attach(trainer, Events.EPOCH_COMPLETED)
    ProgressLog().attach(trainer, Events.EPOCH_COMPLETED(every=5))
    Validation(evaluator, test_loader, score="accuracy").attach(trainer, Events.COMPLETED)
    if log_dir:
        tensorboard = TensorBoard(log_dir)
        tensorboard.attach(trainer, Events.EPOCH_COMPLETED, evaluator=evaluator)
        tensorboard.show(trainer, partial(mistakes, evaluator.model, test_set), Events.EPOCH_COMPLETED(every=5))
    trainer.run(loader, max_epochs=epochs)

    if idist.get_rank() == 0:
        print(f"held-out accuracy: {evaluator.state.metrics['accuracy']:.2%} of {len(test_set)} images")


def main(
    nproc: Annotated[int, Option(min=1, help="Processes to start; leave at 1 under torchrun.")] = 1,
    epochs: Annotated[int, Option(min=1, help="Passes over the images.")] = 15,
    batch_size: Annotated[int, Option(min=1, help="Images to an update, over all processes.")] = 64,
    seed: Annotated[int, Option(min=0, help="Of the initial weights and the order of the images.")] = 0,
    log_dir: Annotated[str, Option(help="For TensorBoard: curves, and images that are taken for another digit.")] = "",
    tuning_seconds: Annotated[
        float, Option("--tune", min=0.0, help="Seconds to search for the fastest settings, in place of training.")
    ] = 0.0,
) -> None:
    """Learn scikit-learn's handwritten digits."""
    launch(train, number_of_processes(nproc), epochs, batch_size, seed, log_dir, tuning_seconds)


if __name__ == "__main__":
    typer.run(main)
