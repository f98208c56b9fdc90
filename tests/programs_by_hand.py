"""The loops of examples/programs in plain torch, on one process: what a reader would write without the library.

Each takes the program, whose model, data and losses it uses, and the number of updates. It returns what the program's `train`
returns. `BY_HAND` lists them by the names of the programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Trained = tuple[nn.Module, list[float]]
ByHand = Callable[[Any, int], Trained]

BY_HAND: dict[str, ByHand] = {}


def _listed(function: ByHand) -> ByHand:
    BY_HAND[function.__name__] = function
    return function


def _divide_gradients(model: nn.Module, size: float) -> None:
    """Makes the mean gradient of the sum."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= size


@_listed
def dcgan(program: Any, num_updates: int) -> Trained:
    g_net, d_net, g_optimizer, d_optimizer = program.build()
    losses = []
    for group in program.groups(program.data(), num_updates):
        size = sum(len(real) for (real,) in group)
        made = [g_net(torch.randn(len(real), program.NOISE, 1, 1)) for (real,) in group]
        d_optimizer.zero_grad()
        total = 0.0
        for (real,), one in zip(group, made, strict=True):
            loss = program.judged(d_net(real), 1.0) + program.judged(d_net(one.detach()), 0.0)
            loss.backward()
            total += loss.item()
        _divide_gradients(d_net, size)
        d_optimizer.step()
        losses.append(total / size)
        g_optimizer.zero_grad()
        for one in made:
            program.judged(d_net(one), 1.0).backward()
        _divide_gradients(g_net, size)
        g_optimizer.step()
    return nn.ModuleDict({"g": g_net, "d": d_net}), losses


@_listed
def wgan_gp(program: Any, num_updates: int) -> Trained:
    g_net, critic, g_optimizer, c_optimizer = program.build()
    losses, more = [], program.groups()
    for _ in range(num_updates):
        for _ in range(program.CRITIC_UPDATES):
            group = next(more)
            c_optimizer.zero_grad()
            for real, noise, between in group:
                made = g_net(noise).detach()
                slopes = program.penalty(critic, torch.lerp(real, made, between))
                ((critic(made) - critic(real)).sum() + program.PENALTY * slopes).backward()
            _divide_gradients(critic, sum(len(real) for real, *_ in group))
            c_optimizer.step()
        group, total = next(more), 0.0
        size = sum(len(real) for real, *_ in group)
        g_optimizer.zero_grad()
        for _, noise, _ in group:
            loss = -critic(g_net(noise)).sum()
            loss.backward()
            total += loss.item()
        _divide_gradients(g_net, size)
        g_optimizer.step()
        losses.append(total / size)
    return nn.ModuleDict({"g": g_net, "critic": critic}), losses


@_listed
def reinforce(program: Any, num_updates: int) -> Trained:
    policy, optimizer = program.build()
    steps = []
    for update in range(num_updates):
        episodes = [program.play(policy, seed) for seed in range(program.GROUP * update, program.GROUP * (update + 1))]
        optimizer.zero_grad()
        for episode in episodes:
            program.surrogate(policy, episode).backward()
        optimizer.step()
        steps.append(sum(len(states) for states, *_ in episodes) / program.GROUP)
    return policy, steps


@_listed
def time_sequence(program: Any, num_updates: int) -> Trained:
    model, optimizer = program.build()
    full_batch, losses = program.data(), []
    size = sum(following.numel() for _, following in full_batch)

    def closure() -> float:
        optimizer.zero_grad()
        total = 0.0
        for waves, following in full_batch:
            loss = program.mse_loss(model(waves), following, reduction="sum")
            loss.backward()
            total += loss.item()
        _divide_gradients(model, size)
        return total / size

    for _ in range(num_updates):
        losses.append(optimizer.step(closure))
    return model, losses
