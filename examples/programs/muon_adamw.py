"""A small transformer on words, with Muon for the matrices inside and AdamW for the rest: two optimizers step together.

    python examples/programs/muon_adamw.py
    torchrun --nproc_per_node=2 examples/programs/muon_adamw.py

One norm is taken over all gradients and clipped, and there is one decision: either both optimizers step or neither does. Each
has a schedule of its own here, and a checkpoint would hold each under its name.
"""

import ignite.distributed as idist
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR

from ignite_train import ForwardOutput, create_trainer
from ignite_train.handlers import LearningRateSchedule
from workbench import Trained, accumulation_steps, losses_of, micro_batches, mine, start, words

VOCABULARY, LENGTH, WIDTH, MAX_NORM = 200, 12, 16, 1.0


class Transformer(nn.Module):
    """Two layers that look back only."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.last = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:
        """(sentences, words) to logits of the words that follow."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=self.places.dtype)
        return self.last(self.blocks(self.words(text) + self.places, mask=mask, is_causal=True))


def build() -> tuple[nn.Module, dict[str, torch.optim.Optimizer], list[LinearLR]]:
    """The model, its optimizers, and a schedule for each."""
    torch.manual_seed(0)
    model = Transformer()
    matrices = [parameter for parameter in model.blocks.parameters() if parameter.dim() == 2]
    inside = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    optimizers = {"muon": torch.optim.Muon(matrices, lr=0.02), "adamw": torch.optim.AdamW(others, lr=3e-3)}
    return model, optimizers, [LinearLR(optimizer, 1.0, 0.1, total_iters=60) for optimizer in optimizers.values()]


def data() -> list[tuple[Tensor, ...]]:
    """Micro-batches of sentences and of the same sentences, one word later."""
    text = words(320 * LENGTH + 1, VOCABULARY)
    return micro_batches(text[:-1].view(-1, LENGTH), text[1:].view(-1, LENGTH))


def train(num_updates: int = 60) -> Trained:
    """Returns the model, and its losses per word."""
    model, optimizers, schedules = build()

    def forward(model: nn.Module, micro_batch: tuple[Tensor, Tensor]) -> ForwardOutput:
        text, following = micro_batch
        return ForwardOutput(cross_entropy(model(text).transpose(1, 2), following, reduction="sum"), following.numel())

    trainer = create_trainer(
        idist.auto_model(model), optimizers, forward, accumulation_steps=accumulation_steps(), max_grad_norm=MAX_NORM
    )
    for schedule in schedules:
        LearningRateSchedule(schedule).attach(trainer)
    losses = losses_of(trainer)
    trainer.run(mine(data()), max_iters=num_updates)
    return model, losses


if __name__ == "__main__":
    start(train)
