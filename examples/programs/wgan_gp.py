"""A WGAN with gradient penalty (arXiv:1704.00028): five updates of the critic to one of the generator, on a ring of Gaussians.

    python examples/programs/wgan_gp.py
    torchrun --nproc_per_node=2 examples/programs/wgan_gp.py

The penalty is a derivative inside the loss. `forward` takes it with `torch.autograd.grad(..., create_graph=True)`, as in a loop
by hand; the trainer needs to know nothing of it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ignite_train import ForwardOutput, UpdateOptions, create_trainer
from workbench import SIZES, Trained, losses_of, mine, start

NOISE, CRITIC_UPDATES, PENALTY = 4, 5, 10.0


def build() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    """A generator of points, a critic, and an Adam for each."""
    torch.manual_seed(0)
    g_net, critic = (
        nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, outputs))
        for inputs, outputs in ((NOISE, 2), (2, 1))
    )
    g_optimizer, c_optimizer = (torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.0, 0.9)) for net in (g_net, critic))
    return g_net, critic, g_optimizer, c_optimizer


def groups() -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
    """Without an end: real points, noise, and where between a real and a made point the slope is measured."""
    while True:
        group = []
        for size in SIZES:
            angles = torch.randint(8, (size,)) * torch.pi / 4
            real = torch.stack([angles.cos(), angles.sin()], dim=1) + 0.05 * torch.randn(size, 2)
            group.append((real, torch.randn(size, NOISE), torch.rand(size, 1)))
        yield group


def penalty(critic: nn.Module, points: Tensor) -> Tensor:
    """How far the slopes of the critic are from 1, squared and summed over the points."""
    points = points.detach().requires_grad_()
    (slopes,) = torch.autograd.grad(critic(points).sum(), points, create_graph=True)
    return (slopes.norm(dim=1) - 1).square().sum()


def train(num_updates: int = 60) -> Trained:
    """Returns both networks, and the losses of the generator."""
    g_net, critic, g_optimizer, c_optimizer = build()

    def c_forward(critic: nn.Module, points: tuple[Tensor, Tensor, Tensor]) -> ForwardOutput:
        real, noise, between = points
        with torch.no_grad():
            made = g_net(noise)
        distance = (critic(made) - critic(real)).sum()
        return ForwardOutput(distance + PENALTY * penalty(critic, torch.lerp(real, made, between)), sample_size=len(real))

    def g_forward(g_net: nn.Module, points: tuple[Tensor, Tensor, Tensor]) -> ForwardOutput:
        return ForwardOutput(-critic(g_net(points[1])).sum(), sample_size=len(points[1]))

    c = create_trainer(critic, c_optimizer, c_forward, options=UpdateOptions(reduction="explicit"))
    g = create_trainer(g_net, g_optimizer, g_forward, options=UpdateOptions(reduction="explicit"))
    losses, more = losses_of(g), groups()
    with c.session(), g.session() as state:
        while state.iteration < num_updates:
            for _ in range(CRITIC_UPDATES):
                c.update(mine(next(more)))
            g.update(mine(next(more)))
    return nn.ModuleDict({"g": g_net, "critic": critic}), losses


if __name__ == "__main__":
    start(train)
