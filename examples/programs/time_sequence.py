"""Sine waves continued by two LSTM cells, trained on all of them at once by LBFGS, which evaluates the loss again and again.

    python examples/programs/time_sequence.py
    torchrun --nproc_per_node=2 examples/programs/time_sequence.py

With `closure=True` the trainer gives LBFGS torch's closure. Each evaluation runs over the whole group, on all ranks, so that
they agree on each step of the line search. The full batch may be cut into micro-batches, for its memory.
"""

import ignite.distributed as idist
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from ignite_train import ForwardOutput, UpdateOptions, create_trainer
from workbench import Trained, accumulation_steps, losses_of, micro_batches, mine, start


class Continuation(nn.Module):
    """Reads a wave value by value and says the next value each time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.LSTMCell(1, 12), nn.LSTMCell(12, 12), nn.Linear(12, 1)

    def forward(self, waves: Tensor) -> Tensor:
        """(waves, values) to (waves, values)."""
        first = second = None
        said = []
        for value in waves.split(1, dim=1):
            first = self.first(value, first)
            second = self.second(first[0], second)
            said.append(self.last(second[0]))
        return torch.cat(said, dim=1)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, and LBFGS with a line search."""
    torch.manual_seed(0)
    model = Continuation()
    return model, torch.optim.LBFGS(model.parameters(), max_iter=8, line_search_fn="strong_wolfe")


def data() -> list[tuple[Tensor, ...]]:
    """32 waves of 16 values that begin at different times, in two micro-batches: the full batch."""
    torch.manual_seed(1)
    waves = torch.sin((torch.arange(17) + 20 * torch.rand(32, 1)) / 4)
    return micro_batches(waves[:, :-1], waves[:, 1:])


def train(num_updates: int = 8) -> Trained:
    """Returns the model, and the loss before each step."""
    model, optimizer = build()

    def forward(model: nn.Module, micro_batch: tuple[Tensor, Tensor]) -> ForwardOutput:
        waves, following = micro_batch
        return ForwardOutput(mse_loss(model(waves), following, reduction="sum"), sample_size=following.numel())

    trainer = create_trainer(
        idist.auto_model(model),
        optimizer,
        forward,
        accumulation_steps=accumulation_steps(),
        options=UpdateOptions(closure=True),
    )
    losses = losses_of(trainer)
    trainer.run(mine(data()), max_epochs=num_updates)
    return model, losses


if __name__ == "__main__":
    start(train)
