"""FixMatch (arXiv:2001.07685) on handwritten digits: few of them are labelled, and the others are labelled by the model itself.

    python examples/programs/fixmatch.py
    torchrun --nproc_per_node=2 examples/programs/fixmatch.py

What the model is sure of, for an image that is changed a little, is the label of the same image changed a lot. The labelled and
the unlabelled images come from two loaders, and each loss is a mean over its own number of images.
"""

from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ignite_train import ForwardOutput, UpdateOptions, create_trainer
from workbench import Trained, digits, groups, losses_of, micro_batches, mine, start

SURE, WEIGHT, PIXELS = 0.8, 1.0, 64


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 48), nn.ReLU(), nn.Linear(48, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True, weight_decay=5e-4)


def weak(images: Tensor) -> Tensor:
    """With a little noise."""
    return images + 0.05 * torch.randn_like(images)


def strong(images: Tensor) -> Tensor:
    """With more, and a square that is cut out of each."""
    steps = torch.arange(8) - torch.randint(6, (2, len(images), 1))  # from the upper left corner of the square
    down, across = ((steps >= 0) & (steps < 3)).unbind()
    inside = down[:, None, :, None] & across[:, None, None, :]
    return (images + 0.2 * torch.randn_like(images)).masked_fill(inside, 0.0)


def data() -> list[tuple[Tensor, ...]]:
    """Micro-batches of labelled images, classes, and unlabelled images in both ways; the latter have other sizes."""
    torch.manual_seed(1)
    images, classes = digits(1280)
    labelled = micro_batches(weak(images[:160]), classes[:160])
    others = [weak(images[160:]), strong(images[160:])]
    sizes = [3 * len(one[0]) + (7 if number % 3 else -5) for number, one in enumerate(labelled)]
    parts = [part[: sum(sizes)].split(sizes) for part in others]
    return [(*one, *two) for one, two in zip(labelled, zip(*parts, strict=True), strict=True)]


def supervised(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    """Summed over the images."""
    return cross_entropy(model(images), classes, reduction="sum")


def consistent(model: nn.Module, weak: Tensor, strong: Tensor) -> Tensor:
    """Summed over the images of which the model is sure; the others count as 0."""
    with torch.no_grad():
        confidence, guess = model(weak).softmax(dim=1).max(dim=1)
    return WEIGHT * (cross_entropy(model(strong), guess, reduction="none") * (confidence >= SURE)).sum()


def count(micro_batch: tuple[Tensor, ...]) -> dict[str, int]:
    """How many images of both kinds there are."""
    return {"labelled": len(micro_batch[0]), "unlabelled": len(micro_batch[2])}


def train(num_updates: int = 100) -> Trained:
    """Returns the model, and the sum of both mean losses."""
    model, optimizer = build()

    def forward(model: nn.Module, micro_batch: tuple[Tensor, ...]) -> ForwardOutput:
        images, classes, weak, strong = micro_batch
        labelled = supervised(model, images, classes), len(images)
        return ForwardOutput({"labelled": labelled, "unlabelled": (consistent(model, weak, strong), len(weak))})

    options = UpdateOptions(sample_sizes=count, reduction="explicit")
    trainer = create_trainer(model, optimizer, forward, options=options)
    losses = losses_of(trainer)
    with trainer.session() as state:
        for group in islice(groups(data(), num_updates), state.iteration, None):
            trainer.update(mine(group))
    return model, losses


if __name__ == "__main__":
    start(train)
