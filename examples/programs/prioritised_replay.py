"""The priorities of Rainbow (arXiv:1511.05952, 1710.02298): a memory that is sampled by the errors of earlier updates.

    python examples/programs/prioritised_replay.py
    torchrun --nproc_per_node=2 examples/programs/prioritised_replay.py

The task is the paper's cliff walk: one wrong step leads back to the start, and only the last right one is rewarded.
`keep_outputs` hands the errors of single samples to the loop, those of all ranks, so that the memories of the ranks stay alike.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from ignite_train import ForwardOutput, UpdateOptions, create_trainer, keep_outputs
from ignite_train.handlers import Checkpoint
from workbench import SIZES, LoopState, Trained, losses_of, micro_batches, mine, start

PLACES, CAPACITY, DISCOUNT = 6, 256, 0.9
SYNC_EVERY, SAVE_EVERY = 5, 2


class Memory(LoopState):
    """Transitions (place, action, reward, next place, whether the walk continues), and the priority of each."""

    def __init__(self) -> None:
        self.transitions, self.priorities = torch.zeros(CAPACITY, 5), torch.zeros(CAPACITY)
        self.written = self.rounds = 0

    def walk(self, net: nn.Module) -> None:
        """One walk from the start, in which every second step is a random one; each transition has the highest priority."""
        place, continues = 0, True
        while continues:
            with torch.no_grad():
                best = int(net(torch.eye(PLACES)[place]).argmax())
            action = best if torch.rand(()) < 0.5 else int(torch.randint(2, ()))
            is_right = action == place % 2
            ends = not is_right or place == PLACES - 1
            following = 0 if ends else place + 1
            step = torch.tensor([place, action, is_right and ends, following, not ends], dtype=torch.get_default_dtype())
            self.transitions[self.written % CAPACITY] = step
            self.priorities[self.written % CAPACITY] = max(1.0, float(self.priorities.max()))
            self.written += 1
            place, continues = following, not ends

    def sample(self, progress: float) -> list[tuple[Tensor, ...]]:
        """Micro-batches of indices, transitions, and weights that undo the choice by priority more and more."""
        chances = self.priorities.sqrt() / self.priorities.sqrt().sum()
        indices = torch.multinomial(chances, sum(SIZES))
        weights = chances[indices] ** (-0.4 - 0.6 * progress)
        return micro_batches(indices, self.transitions[indices], weights / weights.max())

    def learn(self, indices: Tensor, errors: Tensor) -> None:
        """Sets the priorities of samples that were used."""
        self.priorities[indices] = errors.abs() + 1e-3


def build() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """A net that gives the values of both actions, the one that it follows, and its optimizer."""
    torch.manual_seed(0)
    net, target = (nn.Sequential(nn.Linear(PLACES, 32), nn.ReLU(), nn.Linear(32, 2)) for _ in range(2))
    target.load_state_dict(net.state_dict())
    return net, target, torch.optim.Adam(net.parameters(), lr=0.01)


def surprises(net: nn.Module, target: nn.Module, transitions: Tensor) -> Tensor:
    """The errors of double Q-learning (arXiv:1509.06461), one for each sample."""
    places, actions, rewards, following, continues = transitions.unbind(1)
    with torch.no_grad():
        best = net(torch.eye(PLACES)[following.long()]).argmax(1, keepdim=True)
        future = target(torch.eye(PLACES)[following.long()]).gather(1, best).squeeze(1)
    expected = net(torch.eye(PLACES)[places.long()]).gather(1, actions.long()[:, None]).squeeze(1)
    return expected - rewards - continues * DISCOUNT * future


def weighted(errors: Tensor, weights: Tensor) -> Tensor:
    """The sum of the losses."""
    return (weights * smooth_l1_loss(errors, torch.zeros_like(errors), reduction="none")).sum()


def train(num_rounds: int = 100, directory: str | None = None) -> Trained:
    """Returns the net, and the loss of each round."""
    net, target, optimizer = build()

    def forward(net: nn.Module, samples: tuple[Tensor, ...]) -> ForwardOutput:
        indices, transitions, weights = samples
        errors = surprises(net, target, transitions)
        return ForwardOutput(weighted(errors, weights), sample_size=len(indices), outputs=(indices, errors))

    trainer = create_trainer(net, optimizer, forward, options=UpdateOptions(reduction="explicit"))
    memory, outputs, losses = Memory(), keep_outputs(trainer), losses_of(trainer)
    checkpoint = None if directory is None else Checkpoint(directory, to_save={"memory": memory, "target": target})
    if checkpoint is not None:
        checkpoint.attach(trainer)
    with trainer.session():
        while memory.rounds < num_rounds:
            while memory.written < 100 + memory.rounds:
                memory.walk(net)
            trainer.update(mine(memory.sample(memory.rounds / num_rounds)))
            for indices, errors in outputs(gathered=True):
                memory.learn(indices, errors)
            memory.rounds += 1
            if memory.rounds % SYNC_EVERY == 0:
                target.load_state_dict(net.state_dict())
            if checkpoint is not None and memory.rounds % SAVE_EVERY == 0:
                checkpoint.save()
    return net, losses


if __name__ == "__main__":
    start(train)
