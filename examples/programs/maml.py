"""MAML (arXiv:1703.03400) on sine waves: weights from which one step of gradient descent on a few points learns a new wave.

    python examples/programs/maml.py
    torchrun --nproc_per_node=2 examples/programs/maml.py

A micro-batch is some tasks. The inner step is a part of `forward`: it makes other weights, and the gradient of the loss flows
back through them. The trainer makes the outer update, over the tasks of all micro-batches and ranks.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import mse_loss

from ignite_train import ForwardOutput, UpdateOptions, create_trainer
from workbench import Trained, accumulation_steps, losses_of, mine, start

INNER_RATE, POINTS = 0.02, 10

Task = tuple[Tensor, Tensor, Tensor, Tensor]


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small network, and Adam."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    return model, torch.optim.Adam(model.parameters(), lr=3e-3)


def task() -> Task:
    """A wave of some height and delay: points to learn it from, and points to judge by."""
    height, delay = 0.5 + 2 * torch.rand(()), 3 * torch.rand(())
    x = 10 * torch.rand(2 * POINTS, 1) - 5
    y = height * (x + delay).sin()
    return x[:POINTS], y[:POINTS], x[POINTS:], y[POINTS:]


def data(num_updates: int) -> list[list[Task]]:
    """Micro-batches of three and of two tasks, by turns."""
    torch.manual_seed(1)
    return [[task() for _ in range(size)] for _ in range(num_updates) for size in (3, 2)]


def adapted(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The weights after a step on these points, which can be differentiated."""
    weights = dict(model.named_parameters())
    gradients = torch.autograd.grad(mse_loss(model(x), y), list(weights.values()), create_graph=True)
    return {name: value - INNER_RATE * slope for (name, value), slope in zip(weights.items(), gradients, strict=True)}


def train(num_updates: int = 150) -> Trained:
    """Returns the network, and the losses after the inner step."""
    model, optimizer = build()

    def forward(model: nn.Module, tasks: list[Task]) -> ForwardOutput:
        errors = [mse_loss(functional_call(model, adapted(model, x, y), x_new), y_new) for x, y, x_new, y_new in tasks]
        return ForwardOutput(sum(errors), sample_size=len(tasks))

    trainer = create_trainer(
        model, optimizer, forward, accumulation_steps=accumulation_steps(), options=UpdateOptions(reduction="explicit")
    )
    losses = losses_of(trainer)
    trainer.run(mine(data(num_updates)))
    return model, losses


if __name__ == "__main__":
    start(train)
