"""PCGrad (arXiv:2001.06782) on handwritten digits: three tasks share a network, and give up what works against the others.

    python examples/programs/pcgrad.py
    torchrun --nproc_per_node=2 examples/programs/pcgrad.py

`SeveralGradients` takes the gradient of each task by itself, over all micro-batches and ranks, and combines those of the shared
part. Each task has labels for a part of the images, so that each loss is a mean over its own number of them.
"""

from collections.abc import Mapping
from itertools import islice

import ignite.distributed as idist
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ignite_train import ForwardOutput, UpdateOptions, create_trainer
from ignite_train.handlers import SeveralGradients
from workbench import Trained, digits, groups, losses_of, micro_batches, mine, start

TASKS = {"digit": 10, "curved": 2, "large": 2}  # and how many classes each has
UNKNOWN = -100  # a label that is not known


class Tasks(nn.Module):
    """A shared body, and a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Tanh())
        self.heads = nn.ModuleDict({name: nn.Linear(24, classes) for name, classes in TASKS.items()})

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """The logits of each task."""
        hidden = self.body(images)
        return {name: head(hidden) for name, head in self.heads.items()}


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer."""
    torch.manual_seed(0)
    model = Tasks()
    return model, torch.optim.Adam(model.parameters(), lr=5e-3)


def data() -> list[tuple[Tensor, ...]]:
    """Micro-batches of images and of a label for each task, some of which are not known."""
    torch.manual_seed(1)
    images, digit = digits()
    curved = torch.isin(digit, torch.tensor([0, 3, 6, 8, 9])).long()
    labels = torch.stack([digit, curved, (digit > 4).long()], dim=1)
    labels[:, 1:] = labels[:, 1:].masked_fill(torch.rand(len(labels), 2) < 0.4, UNKNOWN)
    return micro_batches(images, labels)


def task_losses(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The loss of each task, summed over the images whose label is known."""
    return {
        name: cross_entropy(logits, label, ignore_index=UNKNOWN, reduction="sum")
        for (name, logits), label in zip(model(images).items(), labels.unbind(1), strict=True)
    }


def count(micro_batch: tuple[Tensor, Tensor]) -> dict[str, int]:
    """How many labels of each task are known."""
    return dict(zip(TASKS, (micro_batch[1] != UNKNOWN).sum(0).tolist(), strict=True))


def project(gradients: Mapping[str, Tensor], update: int) -> Tensor:
    """Algorithm 1: from each gradient what conflicts with one of the others is taken, in an order that the update decides."""
    generator, kept = torch.Generator().manual_seed(update), []
    for name, gradient in sorted(gradients.items()):
        others = [other for another, other in sorted(gradients.items()) if another != name]
        for index in torch.randperm(len(others), generator=generator).tolist():
            other = others[index]
            gradient = gradient - gradient.dot(other).clamp(max=0) / other.dot(other) * other
        kept.append(gradient)
    return torch.stack(kept).sum(0)


def train(num_updates: int = 100) -> Trained:
    """Returns the model, and the sum of the mean losses of the tasks."""
    model, optimizer = build()

    def forward(model: nn.Module, micro_batch: tuple[Tensor, Tensor]) -> ForwardOutput:
        sizes, losses = count(micro_batch), task_losses(model, *micro_batch)
        return ForwardOutput({name: (loss, sizes[name]) for name, loss in losses.items()})

    trainer = create_trainer(idist.auto_model(model), optimizer, forward, options=UpdateOptions(sample_sizes=count))
    combine = SeveralGradients(lambda gradients: project(gradients, trainer.state.iteration), parameters=model.body)
    combine.attach(trainer)
    losses = losses_of(trainer)
    with trainer.session() as state:
        for group in islice(groups(data(), num_updates), state.iteration, None):
            trainer.update(mine(group))
    return model, losses


if __name__ == "__main__":
    start(train)
