"""A DCGAN (arXiv:1511.06434) on small digits: two trainers take turns, each with its own optimizer and its own counters.

    python examples/programs/dcgan.py
    torchrun --nproc_per_node=2 examples/programs/dcgan.py

The loop is the user's own: it draws noise, makes images, and asks each trainer for one update. The images have a graph that
leads back to the generator. The discriminator sees them without it, the generator's update goes back through it.
"""

from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from ignite_train import ForwardOutput, UpdateOptions, create_trainer
from workbench import Trained, digits, groups, losses_of, micro_batches, mine, start

NOISE = 16


def build() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    """A generator of 8x8 images, a discriminator, and an Adam for each."""
    torch.manual_seed(0)
    g_net = nn.Sequential(
        *(nn.ConvTranspose2d(NOISE, 32, 2), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.ConvTranspose2d(16, 1, 4, 2, 1), nn.Tanh()),
    )
    d_net = nn.Sequential(
        *(nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2)),
        *(nn.Conv2d(16, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.LeakyReLU(0.2)),
        *(nn.Conv2d(32, 1, 2), nn.Flatten(0)),
    )
    g_optimizer, d_optimizer = (torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.999)) for net in (g_net, d_net))
    return g_net, d_net, g_optimizer, d_optimizer


def data() -> list[tuple[Tensor, ...]]:
    """Micro-batches of real images."""
    return micro_batches(digits()[0])


def judged(logits: Tensor, label: float) -> Tensor:
    """How wrong the discriminator is if all images are real (1) or made (0), summed over them."""
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, label), reduction="sum")


def train(num_updates: int = 100) -> Trained:
    """Returns both networks, and the discriminator's losses."""
    g_net, d_net, g_optimizer, d_optimizer = build()

    def d_forward(d_net: nn.Module, images: tuple[Tensor, Tensor]) -> ForwardOutput:
        real, made = images
        return ForwardOutput(judged(d_net(real), 1.0) + judged(d_net(made), 0.0), sample_size=len(real))

    def g_forward(_g_net: nn.Module, made: Tensor) -> ForwardOutput:
        return ForwardOutput(judged(d_net(made), 1.0), sample_size=len(made))

    d = create_trainer(d_net, d_optimizer, d_forward, options=UpdateOptions(reduction="explicit"))
    g = create_trainer(g_net, g_optimizer, g_forward, options=UpdateOptions(reduction="explicit"))
    losses = losses_of(d)
    with d.session(), g.session() as state:
        for group in islice(groups(data(), num_updates), state.iteration, None):
            noise = [torch.randn(len(real), NOISE, 1, 1) for (real,) in group]  # the same on all ranks
            made = [g_net(one) for one in mine(noise)]
            d.update([(real, one.detach()) for (real,), one in zip(mine(group), made, strict=True)])
            g.update(made)
    return nn.ModuleDict({"g": g_net, "d": d_net}), losses


if __name__ == "__main__":
    start(train)
