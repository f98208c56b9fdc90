"""The lazy regularisers of StyleGAN2 (arXiv:1912.04958) on handwritten digits: some rounds have two more updates.

    python examples/programs/stylegan2.py
    torchrun --nproc_per_node=2 examples/programs/stylegan2.py

A regulariser is an update of the same trainer with a forward of its own, `update(..., forward=..., name=...)`. It counts as an
update, and the average of the generator is told to follow the others alone. The length of a path is compared with the mean of
the updates before (the paper counts the present one in), so that it does not matter how a batch is cut.
"""

import copy
import math
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from ignite_train import ForwardOutput, UpdateOptions, create_trainer, only
from ignite_train.handlers import Checkpoint, ModelEMA
from workbench import LoopState, Trained, digits, groups, micro_batches, mine, start

NOISE, R1, PATH, DECAY, AVERAGED = 8, 1.0, 2.0, 0.99, 0.9
D_EVERY, G_EVERY = 4, 2  # rounds; 16 and 4 in the paper


class Loop(LoopState):
    """How many rounds are done, and the mean length of a path."""

    def __init__(self) -> None:
        self.rounds, self.length = 0, 0.0


def build() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    """The generator, of noise to styles and of these to images; the discriminator; an Adam for each, slower as in the paper."""
    torch.manual_seed(0)
    mapping = nn.Sequential(nn.Linear(NOISE, 16), nn.LeakyReLU(0.2), nn.Linear(16, 16))
    synthesis = nn.Sequential(nn.Linear(16, 48), nn.Softplus(), nn.Linear(48, 64), nn.Tanh(), nn.Unflatten(1, (1, 8, 8)))
    d_net = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.Softplus(), nn.Linear(48, 1), nn.Flatten(0))
    g_net = nn.Sequential(mapping, synthesis)
    lazy = {g_net: G_EVERY / (G_EVERY + 1), d_net: D_EVERY / (D_EVERY + 1)}
    adams = [torch.optim.Adam(net.parameters(), 2e-3 * share, (0.0, 0.99**share)) for net, share in lazy.items()]
    return g_net, d_net, *adams


def data() -> list[tuple[Tensor, ...]]:
    """Micro-batches of real images."""
    return micro_batches(digits()[0])


def draw(group: list[tuple[Tensor, ...]]) -> list[tuple[Tensor, Tensor]]:
    """For each micro-batch the noise that images are made of, and the noise that the length of a path is measured by."""
    return [(torch.randn(len(real), NOISE), torch.randn(len(real), 1, 8, 8)) for (real,) in group]


def slopes(d_net: nn.Module, real: Tensor) -> Tensor:
    """R1 (arXiv:1801.04406): the squared slopes of the discriminator at real images, summed over them."""
    real = real.detach().requires_grad_()
    (slope,) = torch.autograd.grad(d_net(real).sum(), real, create_graph=True)
    return 0.5 * R1 * D_EVERY * slope.square().sum()


def path_lengths(g_net: nn.Module, noise: Tensor, direction: Tensor) -> Tensor:
    """How far each image moves in a random direction, for a step of its style."""
    mapping, synthesis = g_net
    styles = mapping(noise)
    moved = (synthesis(styles) * direction).sum() / math.sqrt(direction[0].numel())
    (slope,) = torch.autograd.grad(moved, styles, create_graph=True)
    return slope.square().sum(dim=1).sqrt()


def judge(d_net: nn.Module, images: tuple[Tensor, Tensor]) -> ForwardOutput:
    """The discriminator's loss on real images and on made ones."""
    return ForwardOutput(softplus(-d_net(images[0])).sum() + softplus(d_net(images[1])).sum(), len(images[0]))


def r1(d_net: nn.Module, images: tuple[Tensor, Tensor]) -> ForwardOutput:
    """Its regulariser."""
    return ForwardOutput(slopes(d_net, images[0]), len(images[0]))


def train(num_rounds: int = 100, directory: str | None = None) -> Trained:
    """Returns the discriminator and the average of the generator, and the discriminator's losses."""
    g_net, d_net, g_optimizer, d_optimizer = build()

    def deceive(g_net: nn.Module, noise: tuple[Tensor, Tensor]) -> ForwardOutput:
        return ForwardOutput(softplus(-d_net(g_net(noise[0]))).sum(), len(noise[0]))

    def path(g_net: nn.Module, noise: tuple[Tensor, Tensor]) -> ForwardOutput:
        lengths = path_lengths(g_net, *noise)
        return ForwardOutput(PATH * G_EVERY * (lengths - loop.length).square().sum(), len(lengths), {"length": lengths.sum()})

    d = create_trainer(d_net, d_optimizer, judge, options=UpdateOptions(reduction="explicit"))
    g = create_trainer(g_net, g_optimizer, deceive, options=UpdateOptions(reduction="explicit"))
    loop, average, losses = Loop(), ModelEMA(AVERAGED, warm_up=False), []
    average.attach(g, only(None))
    if directory is not None:
        Checkpoint(directory, to_save={"loop": loop, "d": d, "d_net": d_net, "d_optimizer": d_optimizer}).attach(g)
    with d.session(), g.session():
        for group in islice(groups(data(), num_rounds), loop.rounds, None):
            noise = mine(draw(group))
            images = [(real, g_net(one).detach()) for (real,), (one, _) in zip(mine(group), noise, strict=True)]
            losses.append(d.update(images).loss)
            if loop.rounds % D_EVERY == 0:
                d.update(images, forward=r1, name="r1")
            g.update(noise)
            if loop.rounds % G_EVERY == 0:
                record = g.update(noise, forward=path, name="path")
                loop.length += (1 - DECAY) * (record.logs["length"] / record.sample_size - loop.length)
            loop.rounds += 1
            if directory is not None:
                g.checkpoint.save()
    with average.swapped_in():
        return nn.ModuleDict({"d": d_net, "g": copy.deepcopy(g_net)}), losses


if __name__ == "__main__":
    start(train)
