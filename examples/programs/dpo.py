"""Direct preference optimization (arXiv:2305.18290) of a small language model, which learns to count from pairs of answers.

    python examples/programs/dpo.py
    torchrun --nproc_per_node=2 examples/programs/dpo.py

The model of the beginning is the reference. What it says of each pair is computed once, and lies in the data beside the pair,
so that no second model is held. The loss is a sum over pairs, so it does not matter how the pairs are cut.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from ignite_train import ForwardOutput, UpdateOptions, create_trainer
from workbench import Trained, accumulation_steps, losses_of, micro_batches, mine, start

WORDS, LENGTH, BETA = 10, 6, 0.5


class Speaker(nn.Module):
    """Says how likely each next word is, after those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.memory = nn.Embedding(WORDS, 16), nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, WORDS)

    def forward(self, texts: Tensor) -> Tensor:
        """Logits of the word that follows each word, of shape (texts, words, WORDS)."""
        return self.head(self.memory(self.embedding(texts))[0])


def build() -> tuple[Speaker, torch.optim.Optimizer]:
    """A model that was not trained yet."""
    torch.manual_seed(0)
    speaker = Speaker()
    return speaker, torch.optim.Adam(speaker.parameters(), lr=0.003)


def log_probability(speaker: nn.Module, texts: Tensor) -> Tensor:
    """Of each text, after its first word."""
    found = speaker(texts[:, :-1]).log_softmax(-1)
    return found.gather(-1, texts[:, 1:, None]).sum((1, 2))


def data(reference: Speaker) -> list[tuple[Tensor, ...]]:
    """Pairs with the same first word: one that counts on from there, and another; and the margin that the reference sees."""
    generator = torch.Generator().manual_seed(1)
    first = torch.randint(WORDS, (320, 1), generator=generator)
    chosen = (first + torch.arange(LENGTH)) % WORDS
    rejected = torch.cat([first, torch.randint(WORDS, (320, LENGTH - 1), generator=generator)], dim=1)
    with torch.no_grad():
        margin = log_probability(reference, chosen) - log_probability(reference, rejected)
    return micro_batches(chosen, rejected, margin)


def preference_loss(speaker: nn.Module, pairs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The sum over pairs, and how many of them the model ranks rightly, compared with the reference."""
    chosen, rejected, before = pairs
    margin = log_probability(speaker, chosen) - log_probability(speaker, rejected) - before
    return -logsigmoid(BETA * margin).sum(), (margin > 0).sum()


def train(num_updates: int = 40) -> Trained:
    """Returns the model, and its losses."""
    speaker, optimizer = build()
    pairs = data(speaker)

    def forward(speaker: nn.Module, pairs: tuple[Tensor, ...]) -> ForwardOutput:
        loss, ranked = preference_loss(speaker, pairs)
        return ForwardOutput(loss, sample_size=len(pairs[0]), logs={"ranked": ranked})

    trainer = create_trainer(
        speaker, optimizer, forward, accumulation_steps=accumulation_steps(), options=UpdateOptions(reduction="explicit")
    )
    losses = losses_of(trainer)
    trainer.run(mine(pairs), max_iters=num_updates)
    return speaker, losses


if __name__ == "__main__":
    start(train)
