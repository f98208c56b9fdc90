"""PPO (arXiv:1707.06347) in rounds: walkers collect a rollout, then several updates learn from it, until the policy moved far.

    python examples/programs/ppo.py
    torchrun --nproc_per_node=2 examples/programs/ppo.py

A run can continue only from the end of a round. There the loop saves: the walkers, and how many rounds are done, are in the
checkpoint beside the trainer. All ranks collect the same rollout, and each learns from its share.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli

from ignite_train import ForwardOutput, UpdateOptions, create_trainer
from ignite_train.handlers import Checkpoint
from workbench import LoopState, Trained, micro_batches, mine, start

WALKERS, STEPS, EPOCHS, GROUP = 16, 8, 2, 2
DISCOUNT, TRACE, CLIP, MAX_KL = 0.9, 0.9, 0.2, 0.01


class Walkers(LoopState):
    """Points on a line that are pushed to the left or to the right, and are rewarded for being near its middle."""

    def __init__(self) -> None:
        self.states, self.rounds = torch.randn(WALKERS, 2), 0  # positions and speeds; how many rounds are done

    def push(self, actions: Tensor) -> Tensor:
        """One step of all walkers; returns their rewards."""
        speeds = 0.5 * self.states[:, 1] + 0.4 * (actions - 0.5)
        self.states = torch.stack([(self.states[:, 0] + speeds).clamp(-2, 2), speeds], dim=1)
        return -self.states[:, 0].square()


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A net that gives the logit of pushing to the right, and the value of the state."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    return net, torch.optim.Adam(net.parameters(), lr=0.01)


@torch.no_grad()
def collect(net: nn.Module, walkers: Walkers) -> tuple[tuple[Tensor, ...], float]:
    """A rollout: states, actions, their log-probabilities, advantages (arXiv:1506.02438) and returns; and its mean reward."""
    steps, values, rewards = [], [], []
    for _ in range(STEPS):
        logits, value = net(walkers.states).unbind(1)
        policy = Bernoulli(logits=logits)
        actions = policy.sample()
        steps.append((walkers.states, actions, policy.log_prob(actions)))
        values.append(value)
        rewards.append(walkers.push(actions))
    values.append(net(walkers.states)[:, 1])
    advantages = [torch.zeros(WALKERS)]
    for step in reversed(range(STEPS)):
        surprise = rewards[step] + DISCOUNT * values[step + 1] - values[step]
        advantages.insert(0, surprise + DISCOUNT * TRACE * advantages[0])
    states, actions, before = (torch.cat(part) for part in zip(*steps, strict=True))
    advantage = torch.cat(advantages[:-1])
    scaled = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    return (states, actions, before, scaled, advantage + torch.cat(values[:-1])), float(torch.stack(rewards).mean())


def groups(rollout: tuple[Tensor, ...]) -> Iterator[list[tuple[Tensor, ...]]]:
    """The samples in another order in each epoch, as groups of micro-batches."""
    for _ in range(EPOCHS):
        order = torch.randperm(len(rollout[0]))
        cut = micro_batches(*(part[order] for part in rollout))
        yield from (cut[first : first + GROUP] for first in range(0, len(cut), GROUP))


def clipped(net: nn.Module, samples: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The loss of PPO, and how far the policy has moved (http://joschu.net/blog/kl-approx.html), summed over the samples."""
    states, actions, before, advantages, returns = samples
    logits, values = net(states).unbind(1)
    policy = Bernoulli(logits=logits)
    ratios = (log_ratios := policy.log_prob(actions) - before).exp()
    gains = torch.minimum(ratios * advantages, ratios.clamp(1 - CLIP, 1 + CLIP) * advantages)
    losses = 0.5 * (values - returns).square() - gains - 0.01 * policy.entropy()
    return losses.sum(), (ratios - 1 - log_ratios).detach().sum()


def train(num_rounds: int = 40, directory: str | None = None) -> Trained:
    """Returns the net, and the mean reward of each round."""
    net, optimizer = build()

    def forward(net: nn.Module, samples: tuple[Tensor, ...]) -> ForwardOutput:
        loss, moved = clipped(net, samples)
        return ForwardOutput(loss, sample_size=len(samples[0]), logs={"moved": moved})

    trainer = create_trainer(net, optimizer, forward, max_grad_norm=0.5, options=UpdateOptions(reduction="explicit"))
    walkers, rewards = Walkers(), []
    checkpoint = None if directory is None else Checkpoint(directory, to_save={"walkers": walkers})
    if checkpoint is not None:
        checkpoint.attach(trainer)
    with trainer.session():
        while walkers.rounds < num_rounds:
            rollout, reward = collect(net, walkers)
            for group in groups(rollout):
                record = trainer.update(mine(group))
                if record.logs["moved"] > MAX_KL * record.sample_size:  # over all ranks
                    break
            walkers.rounds += 1
            rewards.append(reward)
            if checkpoint is not None:
                checkpoint.save()
    return net, rewards


if __name__ == "__main__":
    start(train, "reward")
