"""A variational autoencoder (arXiv:1312.6114) of digits, whose second term grows during the run, and which steps along the sum.

    python examples/programs/vae.py
    torchrun --nproc_per_node=2 examples/programs/vae.py

A `forward` with a third parameter gets the state, so the schedule needs no global variable. `normalize=False` steps along the
sum over the images, as many VAEs do. The loss is reported per image all the same, and so is a log, unless it has a denominator
of its own: here the pixels.
"""

import ignite.distributed as idist
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from ignite_train import ForwardOutput, TrainState, UpdateOptions, create_trainer
from workbench import Trained, accumulation_steps, digits, losses_of, micro_batches, mine, start

LATENT = 4


class Autoencoder(nn.Module):
    """Images to where they may lie in a small space, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2 * LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, 64), nn.ReLU(), nn.Linear(64, 64), nn.Unflatten(1, (1, 8, 8)))

    def forward(self, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Images that were made of a place, and the mean and the logarithm of the variance of that place."""
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        return self.decoder(mean + noise * (log_variance / 2).exp()), mean, log_variance


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, and Adam."""
    torch.manual_seed(0)
    model = Autoencoder()
    return model, torch.optim.Adam(model.parameters(), lr=3e-3)


def data() -> list[tuple[Tensor, ...]]:
    """Micro-batches of images and noise, which is drawn here so that it does not depend on the number of ranks."""
    torch.manual_seed(1)
    return micro_batches(digits()[0], torch.randn(320, LATENT))


def divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """From the standard normal distribution, summed over the images."""
    return (mean.square() + log_variance.exp() - log_variance - 1).sum() / 2


def weight(progress: float) -> float:
    """Of the divergence: it rises in the first half."""
    return min(1.0, 2 * progress)


def train(num_updates: int = 200) -> Trained:
    """Returns the model, and its losses per image."""
    model, optimizer = build()

    def forward(model: nn.Module, micro_batch: tuple[Tensor, Tensor], state: TrainState) -> ForwardOutput:
        images, noise = micro_batch
        made, mean, log_variance = model(images, noise)
        error, kl = mse_loss(made, images, reduction="sum"), divergence(mean, log_variance)
        logs = {"kl": kl, "error_per_pixel": (error, images.numel())}
        return ForwardOutput(error + weight(state.progress) * kl, sample_size=len(images), logs=logs)

    trainer = create_trainer(
        idist.auto_model(model),
        optimizer,
        forward,
        accumulation_steps=accumulation_steps(),
        options=UpdateOptions(normalize=False),
    )
    losses = losses_of(trainer)
    trainer.run(mine(data()), max_iters=num_updates)
    return model, losses


if __name__ == "__main__":
    start(train)
