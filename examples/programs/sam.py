"""Sharpness-aware minimisation (arXiv:2010.01412): the optimizer asks for the gradient a second time, at a worse point nearby.

    python examples/programs/sam.py
    torchrun --nproc_per_node=2 examples/programs/sam.py

SAM is written as torch's optimizers with a `closure` are. With `closure=True` both evaluations run over the whole group, are
reduced over the ranks and weighed alike, so that each rank climbs to the same point. The optimizer inside it is saved too.
"""

from collections.abc import Callable
from typing import Any

import ignite.distributed as idist
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ignite_train import ForwardOutput, UpdateOptions, create_trainer
from workbench import Trained, accumulation_steps, digits, losses_of, micro_batches, mine, start


class Sam(torch.optim.Optimizer):
    """Steps along the gradient at the worst point of a small ball, as SGD does.

    Args:
        params: as for any optimizer.
        radius: of the ball.
        settings: of the SGD.
    """

    def __init__(self, params: Any, radius: float = 0.05, **settings: Any) -> None:
        super().__init__(params, {"radius": radius, **settings})
        self.base_optimizer = torch.optim.SGD(self.param_groups, **settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """Evaluates the loss twice; returns what it was at first."""
        evaluate = torch.enable_grad()(closure)
        loss = evaluate()
        trained = [(p, group["radius"]) for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.clone() for p, _ in trained]
        norm = torch.stack([p.grad.norm() for p, _ in trained]).norm() + 1e-12
        for parameter, radius in trained:
            parameter += radius * parameter.grad / norm
        evaluate()
        for (parameter, _), value in zip(trained, before, strict=True):
            parameter.copy_(value)
        self.base_optimizer.step()
        return loss


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small convolutional classifier, and SAM around SGD with momentum."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * 4 * 4, 10)),
    )
    return model, Sam(model.parameters(), lr=0.05, momentum=0.9)


def data() -> list[tuple[Tensor, ...]]:
    """Micro-batches of digits and their classes."""
    return micro_batches(*digits())


def train(num_updates: int = 60) -> Trained:
    """Returns the classifier, and its losses before each step."""
    model, optimizer = build()

    def forward(model: nn.Module, micro_batch: tuple[Tensor, Tensor]) -> ForwardOutput:
        images, classes = micro_batch
        return ForwardOutput(cross_entropy(model(images), classes, reduction="sum"), sample_size=len(classes))

    trainer = create_trainer(
        idist.auto_model(model),
        optimizer,
        forward,
        accumulation_steps=accumulation_steps(),
        options=UpdateOptions(closure=True),
    )
    losses = losses_of(trainer)
    trainer.run(mine(data()), max_iters=num_updates)
    return model, losses


if __name__ == "__main__":
    start(train)
