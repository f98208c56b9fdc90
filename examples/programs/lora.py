"""LoRA (arXiv:2106.09685) on a trained classifier, whose last layer is thawed in the middle of the run.

    python examples/programs/lora.py
    torchrun --nproc_per_node=2 examples/programs/lora.py

The weights that were trained before are frozen by `requires_grad_(False)`. What trains may change between any two updates: the
optimizer has all parameters from the beginning, and moves those that have gradients.
"""

import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ignite_train import ForwardOutput, Trainer, UpdateOptions, create_trainer
from workbench import Trained, accumulation_steps, digits, losses_of, micro_batches, mine, start

RANK, THAWED_AFTER = 2, 8


class Lora(nn.Module):
    """A frozen linear layer, and beside it two thin matrices whose product is added to its weight."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, features: Tensor) -> Tensor:
        """As the layer, changed by the matrices."""
        return self.layer(features) + self.up(self.down(features))


def build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A classifier that has learned digits, with LoRA in its hidden layers and a frozen last one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    learn, (images, classes) = torch.optim.Adam(model.parameters(), lr=0.01), digits()
    for _ in range(30):
        learn.zero_grad()
        cross_entropy(model(images), classes).backward()
        learn.step()
    model[1], model[3] = Lora(model[1]), Lora(model[3])
    model[-1].requires_grad_(False)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def data() -> list[tuple[Tensor, ...]]:
    """Micro-batches of the other task: black and white are exchanged, and each class is called by the next number."""
    images, classes = digits()
    return micro_batches(-images, (classes + 1) % 10)


def train(num_updates: int = 60) -> Trained:
    """Returns the classifier, and its losses."""
    model, optimizer = build()

    def forward(model: nn.Module, micro_batch: tuple[Tensor, Tensor]) -> ForwardOutput:
        images, classes = micro_batch
        return ForwardOutput(cross_entropy(model(images), classes, reduction="sum"), sample_size=len(classes))

    trainer = create_trainer(
        model, optimizer, forward, accumulation_steps=accumulation_steps(), options=UpdateOptions(reduction="explicit")
    )

    @trainer.on(Events.ITERATION_STARTED)
    def thaw(trainer: Trainer) -> None:
        model[-1].requires_grad_(trainer.state.iteration > THAWED_AFTER)

    losses = losses_of(trainer)
    trainer.run(mine(data()), max_iters=num_updates)
    return model, losses


if __name__ == "__main__":
    start(train)
