"""Skip-grams with negative sampling (arXiv:1310.4546): two large tables, of which an update sees only some rows.

    python examples/programs/word2vec.py
    torchrun --nproc_per_node=2 examples/programs/word2vec.py

The gradients are sparse and stay so: in accumulation, across the ranks, in the norm and in the step of SparseAdam.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from ignite_train import ForwardOutput, UpdateOptions, create_trainer
from workbench import Trained, accumulation_steps, losses_of, micro_batches, mine, start, words

VOCABULARY, WIDTH, WINDOW, NEGATIVES = 2000, 24, 2, 5


class SkipGrams(nn.Module):
    """A vector of each word where it stands in the middle, and one where it stands beside another."""

    def __init__(self) -> None:
        super().__init__()
        self.middle, self.beside = (nn.Embedding(VOCABULARY, WIDTH, sparse=True) for _ in range(2))

    def forward(self, middle: Tensor, beside: Tensor) -> Tensor:
        """(pairs,) and (pairs, candidates) to logits: how likely each candidate stands beside the word."""
        return (self.beside(beside) @ self.middle(middle)[:, :, None]).squeeze(2)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The tables, and an Adam that moves only the rows which were seen."""
    torch.manual_seed(0)
    model = SkipGrams()
    nn.init.zeros_(model.beside.weight)
    return model, torch.optim.SparseAdam(model.parameters(), lr=0.01)


def data() -> list[tuple[Tensor, ...]]:
    """Micro-batches of words, and of candidates: first a word that stands beside it, then some that were drawn."""
    text, spots = words(6000, VOCABULARY), torch.arange(WINDOW, 6000 - WINDOW)
    torch.manual_seed(1)
    spots = spots[torch.randperm(len(spots))]
    beside = text[spots + torch.randint(1, WINDOW + 1, spots.shape) * (2 * torch.randint(2, spots.shape) - 1)]
    drawn = text[torch.randint(len(text), (len(spots), NEGATIVES))]
    return micro_batches(text[spots], torch.cat([beside[:, None], drawn], dim=1))


def surprise(logits: Tensor) -> Tensor:
    """The first candidate should be likely, the others not; summed."""
    return -logsigmoid(logits[:, 0]).sum() - logsigmoid(-logits[:, 1:]).sum()


def train(num_updates: int = 180) -> Trained:
    """Returns the tables, and the losses per pair."""
    model, optimizer = build()

    def forward(model: nn.Module, micro_batch: tuple[Tensor, Tensor]) -> ForwardOutput:
        middle, candidates = micro_batch
        return ForwardOutput(surprise(model(middle, candidates)), sample_size=len(middle))

    trainer = create_trainer(
        model, optimizer, forward, accumulation_steps=accumulation_steps(), options=UpdateOptions(reduction="explicit")
    )
    losses = losses_of(trainer)
    trainer.run(mine(data()), max_iters=num_updates)
    return model, losses


if __name__ == "__main__":
    start(train)
