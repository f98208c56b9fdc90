"""REINFORCE (Williams 1992) on a pole that must be balanced: each update is made of episodes, which the policy itself plays.

    python examples/programs/reinforce.py
    torchrun --nproc_per_node=2 examples/programs/reinforce.py

The loop reads nothing from a loader: the data of an update depend on the update before. Episodes differ in length, so
micro-batches do too. The gradient is the *sum* over episodes and steps, `normalize=False`; the loss that is reported is a mean
per step all the same.
"""

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli

from ignite_train import ForwardOutput, UpdateOptions, create_trainer
from workbench import GROUP, Trained, mine, start

MAX_STEPS, DISCOUNT = 100, 0.98


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A policy of position, speed, angle and its speed: the logit of a push to the right."""
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1), nn.Flatten(0))
    return policy, torch.optim.Adam(policy.parameters(), lr=0.01)


def play(policy: nn.Module, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """One episode: the states, the actions taken in them, and the discounted rewards that followed."""
    generator = torch.Generator().manual_seed(seed)
    state, states, actions = 0.1 * torch.rand(4, generator=generator) - 0.05, [], []
    while len(states) < MAX_STEPS and abs(state[2]) < 0.21:
        with torch.no_grad():
            probability = policy(state[None]).sigmoid()
        states.append(state)
        actions.append((torch.rand(1, generator=generator) < probability).to(state))
        state = state + 0.02 * motion(state, 20 * actions[-1] - 10)
    rewards = torch.ones(len(states))
    for step in reversed(range(len(states) - 1)):
        rewards[step] += DISCOUNT * rewards[step + 1]
    return torch.stack(states), torch.cat(actions), (rewards - rewards.mean()) / rewards.std()


def motion(state: Tensor, force: Tensor) -> Tensor:
    """How the state changes: a cart of 1 kg with a pole of 0.1 kg and 1 m (Barto, Sutton and Anderson 1983)."""
    _, speed, angle, turning = state
    pushed = (force + 0.05 * turning.square() * angle.sin()) / 1.1
    turned = (9.8 * angle.sin() - angle.cos() * pushed) / (0.5 * (4 / 3 - 0.1 * angle.cos().square() / 1.1))
    return torch.stack([speed, (pushed - 0.05 * turned * angle.cos() / 1.1).squeeze(), turning, turned.squeeze()])


def surrogate(policy: nn.Module, episode: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Its gradient is that of the expected reward, with the sign turned."""
    states, actions, rewards = episode
    return -(Bernoulli(logits=policy(states)).log_prob(actions) * rewards).sum()


def train(num_updates: int = 80) -> Trained:
    """Returns the policy, and how many steps an episode had in each update."""
    policy, optimizer = build()

    def forward(policy: nn.Module, episode: tuple[Tensor, Tensor, Tensor]) -> ForwardOutput:
        return ForwardOutput(surrogate(policy, episode), sample_size=len(episode[0]))

    options = UpdateOptions(reduction="explicit", normalize=False)
    trainer = create_trainer(policy, optimizer, forward, options=options)
    steps = []
    with trainer.session() as state:
        while state.iteration < num_updates:
            seeds = range(GROUP * state.iteration, GROUP * (state.iteration + 1))
            record = trainer.update([play(policy, seed) for seed in mine(list(seeds))])
            steps.append(record.sample_size / GROUP)
    return policy, steps


if __name__ == "__main__":
    start(train, "steps an episode:")
