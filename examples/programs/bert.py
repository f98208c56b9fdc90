"""BERT's two losses (arXiv:1810.04805) on words: words that are masked, and whether the second half follows the first.

    python examples/programs/bert.py
    torchrun --nproc_per_node=2 examples/programs/bert.py

Each loss is a mean over samples of its own, masked words and pairs. Micro-batches have unequal numbers of masked words, so a
mean of their means would be another loss. `sample_sizes` counts them before the first forward.
"""

from itertools import islice

import ignite.distributed as idist
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from ignite_train import ForwardOutput, UpdateOptions, create_trainer
from workbench import Trained, groups, losses_of, micro_batches, mine, start, words

VOCABULARY, LENGTH, WIDTH, MAX_NORM = 100, 12, 16, 1.0
MASK, IGNORED = VOCABULARY, -100  # a word of its own; what cross_entropy leaves out


class Bert(nn.Module):
    """A layer of attention over both halves; one head for words, one for pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY + 1, WIDTH), nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.word, self.follows = nn.Linear(WIDTH, VOCABULARY), nn.Linear(WIDTH, 1)

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """(pairs, words) to logits of the words, (pairs, VOCABULARY, words), and of the pairs."""
        hidden = self.block(self.words(text) + self.places)
        return self.word(hidden).transpose(1, 2), self.follows(hidden[:, 0]).squeeze(1)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer."""
    torch.manual_seed(0)
    model = Bert()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def data() -> list[tuple[Tensor, ...]]:
    """Micro-batches of masked pairs, the words behind the masks, and whether the second half is the one that follows."""
    torch.manual_seed(1)
    pairs = words(320 * LENGTH, VOCABULARY).view(-1, LENGTH)
    follows = torch.rand(len(pairs)) < 0.5
    second = torch.where(follows[:, None], pairs, pairs[torch.randperm(len(pairs))])[:, LENGTH // 2 :]
    text = torch.cat([pairs[:, : LENGTH // 2], second], dim=1)
    is_masked = torch.rand(text.shape) < 0.15
    return micro_batches(text.masked_fill(is_masked, MASK), text.masked_fill(~is_masked, IGNORED), follows)


def losses_of_both(model: nn.Module, text: Tensor, masked: Tensor, follows: Tensor) -> tuple[Tensor, Tensor]:
    """The sums over masked words and over pairs."""
    word, pair = model(text)
    words_loss = cross_entropy(word, masked, ignore_index=IGNORED, reduction="sum")
    return words_loss, binary_cross_entropy_with_logits(pair, follows.to(pair.dtype), reduction="sum")


def count(micro_batch: tuple[Tensor, ...]) -> dict[str, int]:
    """How many masked words and pairs there are."""
    _, masked, follows = micro_batch
    return {"words": int((masked != IGNORED).sum()), "pairs": len(follows)}


def train(num_updates: int = 60) -> Trained:
    """Returns the model, and the sum of both mean losses."""
    model, optimizer = build()

    def forward(model: nn.Module, micro_batch: tuple[Tensor, ...]) -> ForwardOutput:
        sizes, (of_words, of_pairs) = count(micro_batch), losses_of_both(model, *micro_batch)
        return ForwardOutput({"words": (of_words, sizes["words"]), "pairs": (of_pairs, sizes["pairs"])})

    options = UpdateOptions(sample_sizes=count)
    trainer = create_trainer(idist.auto_model(model), optimizer, forward, max_grad_norm=MAX_NORM, options=options)
    losses = losses_of(trainer)
    with trainer.session() as state:
        for group in islice(groups(data(), num_updates), state.iteration, None):
            trainer.update(mine(group))
    return model, losses


if __name__ == "__main__":
    start(train)
