"""A word-level LSTM with truncated backpropagation through time: the hidden state is carried from each update to the next.

    python examples/programs/word_lstm.py
    torchrun --nproc_per_node=2 examples/programs/word_lstm.py

What `forward` puts into `state.carried` loses its graph there, is saved with each checkpoint, and is put back if an update does
not count. The text is read in 32 places at once; each micro-batch of a group has some of them, and its own hidden state.
"""

import ignite.distributed as idist
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ignite_train import ForwardOutput, TrainState, create_trainer
from workbench import SIZES, Trained, accumulation_steps, losses_of, micro_batches, mine, start, words

VOCABULARY, WIDTH, LENGTH, MAX_NORM = 200, 24, 8, 0.2

Hidden = tuple[Tensor, Tensor]


class WordLstm(nn.Module):
    """Words in, logits of the words that follow out."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.last = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, text: Tensor, hidden: Hidden | None) -> tuple[Tensor, Hidden]:
        """(places, words) to (places, words, VOCABULARY), and the hidden state after the last word."""
        read, hidden = self.lstm(self.words(text), hidden)
        return self.last(read), hidden


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, and plain SGD."""
    torch.manual_seed(0)
    model = WordLstm()
    return model, torch.optim.SGD(model.parameters(), lr=2.0)


def data() -> list[tuple[Tensor, ...]]:
    """Micro-batches of text and of the same text, one word later. A group continues where the group before ended."""
    places = words(sum(SIZES) * 16 * LENGTH + 1, VOCABULARY)
    text, following = (part.view(sum(SIZES), -1).split(LENGTH, dim=1) for part in (places[:-1], places[1:]))
    return micro_batches(torch.cat(text), torch.cat(following))


def train(num_updates: int = 96) -> Trained:
    """Returns the model, and its losses per word."""
    model, optimizer = build()

    def forward(model: nn.Module, micro_batch: tuple[Tensor, Tensor], state: TrainState) -> ForwardOutput:
        text, following = micro_batch
        place = state.micro_batch_in_group
        logits, state.carried[place] = model(text, state.carried.get(place))
        return ForwardOutput(cross_entropy(logits.transpose(1, 2), following, reduction="sum"), following.numel())

    trainer = create_trainer(
        idist.auto_model(model), optimizer, forward, accumulation_steps=accumulation_steps(), max_grad_norm=MAX_NORM
    )
    trainer.add_event_handler(Events.EPOCH_STARTED, lambda: trainer.state.carried.clear())
    losses = losses_of(trainer)
    trainer.run(mine(data()), max_iters=num_updates)
    return model, losses


if __name__ == "__main__":
    start(train)
