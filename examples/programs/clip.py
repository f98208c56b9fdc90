"""Contrastive learning of pairs in the manner of CLIP (arXiv:2103.00020): the loss is one of the whole batch of all ranks.

    python examples/programs/clip.py
    torchrun --nproc_per_node=2 examples/programs/clip.py

With accumulation the batch is cut, for its memory, though each pair is compared with all others. So its features are computed
twice: first all of them without graphs, then those of each micro-batch, which take their place among the others. The sum of the
gradients is that of the whole batch.
"""

import ignite.distributed as idist
import torch
from ignite.engine import Events
from ignite.utils import convert_tensor
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from ignite_train import ForwardOutput, Trainer, TrainState, UpdateOptions, create_trainer
from workbench import GROUP, Trained, accumulation_steps, losses_of, mine, start

WIDTH, PAIRS = 16, 16


class TwoTowers(nn.Module):
    """Puts a wave, and the numbers that describe it, at the same place on a sphere."""

    def __init__(self) -> None:
        super().__init__()
        self.wave, self.text = (nn.Sequential(nn.Linear(inputs, 32), nn.GELU(), nn.Linear(32, WIDTH)) for inputs in (24, 3))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, waves: Tensor, texts: Tensor) -> Tensor:
        """To (2, pairs, WIDTH): features of the waves and of the texts."""
        return normalize(torch.stack([self.wave(waves), self.text(texts)]), dim=2)


def build() -> tuple[TwoTowers, torch.optim.Optimizer]:
    """The towers, and AdamW."""
    torch.manual_seed(0)
    model = TwoTowers()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def data() -> list[tuple[Tensor, Tensor]]:
    """Micro-batches of equal size: waves with noise, and their speed, delay and height."""
    torch.manual_seed(1)
    texts = torch.rand(320, 3)
    speed, delay, height = (1 + texts).split(1, dim=1)
    waves = height * (speed * torch.arange(24) / 4 + 2 * delay).sin() + 0.05 * torch.randn(320, 24)
    return list(zip(waves.split(PAIRS), texts.split(PAIRS), strict=True))


def contrast(features: Tensor, scale: Tensor) -> Tensor:
    """Mean of the losses of finding the text of each wave, and the wave of each text, among all."""
    logits = scale.exp() * features[0] @ features[1].T
    own = torch.arange(len(logits), device=logits.device)
    return (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2


def train(num_updates: int = 100) -> Trained:
    """Returns the towers, and the losses of the whole batches."""
    model, optimizer = build()
    model_on_ranks, known = idist.auto_model(model), {}

    def forward(_model: nn.Module, micro_batch: tuple[Tensor, Tensor], state: TrainState) -> ForwardOutput:
        features, first = known["features"].clone(), idist.get_rank() * state.group_size * PAIRS
        first += state.micro_batch_in_group * PAIRS
        features[:, first : first + PAIRS] = model_on_ranks(*micro_batch)
        scale = torch.lerp(model.scale.detach(), model.scale, 1 / GROUP)  # its gradient is added up GROUP times
        return ForwardOutput(contrast(features, scale), sample_size=1)

    trainer = create_trainer(
        model_on_ranks,
        optimizer,
        forward,
        accumulation_steps=accumulation_steps(),
        options=UpdateOptions(normalize=False),
    )

    @trainer.on(Events.ITERATION_STARTED)
    @torch.no_grad()
    def know_all_features(trainer: Trainer) -> None:
        moved = [convert_tensor(micro_batch, device=idist.device()) for micro_batch in trainer.state.batch]
        own = torch.cat([model(*micro_batch) for micro_batch in moved], dim=1)
        known["features"] = idist.all_gather(own.transpose(0, 1).contiguous()).transpose(0, 1)

    losses = losses_of(trainer)
    trainer.run(mine(data()), max_iters=num_updates)
    return model, losses


if __name__ == "__main__":
    start(train)
