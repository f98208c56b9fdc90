"""gymnasium: a policy learns by REINFORCE; a micro-batch is the seed of an episode, and forward plays it."""

from __future__ import annotations

from typing import Any

import gymnasium
import torch
from torch import nn

from ignite_train import ForwardOutput
from libraries.harness import Case, dealt

STEPS = 30


def policy() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))


def forward(model: nn.Module, seed: Any) -> ForwardOutput:
    environment, generator = gymnasium.make("CartPole-v1", max_episode_steps=STEPS), torch.Generator().manual_seed(seed)
    seen, _ = environment.reset(seed=seed)
    chosen, rewards, ended = [], [], False
    while not ended:
        odds = torch.log_softmax(model(torch.as_tensor(seen, dtype=torch.get_default_dtype())), 0)
        action = int(torch.multinomial(odds.detach().exp(), 1, generator=generator))
        seen, reward, terminated, truncated, _ = environment.step(action)
        chosen.append(odds[action])
        rewards.append(float(reward))
        ended = terminated or truncated
    returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
    return ForwardOutput(-(torch.stack(chosen) * (returns - returns.mean())).sum(), 1, {"length": len(rewards)})


def in_parallel(model: nn.Module, seed: Any) -> ForwardOutput:
    environments = gymnasium.make_vec("CartPole-v1", num_envs=3, max_episode_steps=STEPS)
    generator = torch.Generator().manual_seed(seed)
    seen, _ = environments.reset(seed=seed)
    loss = torch.zeros(())
    for _ in range(STEPS // 2):
        odds = torch.log_softmax(model(torch.as_tensor(seen, dtype=torch.get_default_dtype())), 1)
        actions = torch.multinomial(odds.detach().exp(), 1, generator=generator)
        seen, rewards, _, _, _ = environments.step(actions.flatten().numpy())
        loss = loss - (odds.gather(1, actions).flatten() * torch.as_tensor(rewards)).sum()
    return ForwardOutput(loss, 3)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def seeds() -> list[int]:
    return list(range(8))


CASES = [
    Case("REINFORCE on CartPole", policy, dealt(seeds), forward, adam),
    Case("environments side by side", policy, dealt(seeds), in_parallel, adam),
]
