"""DP-SGD (arXiv:1607.00133) on handwritten digits: each sample's gradient is clipped, and noise hides whether it was there.

    python examples/programs/dp_sgd.py
    torchrun --nproc_per_node=2 examples/programs/dp_sgd.py

Forward clips the gradients of the samples and returns a loss whose gradient is their sum, which the update adds up over
micro-batches and ranks. A handler of GRADIENTS_REDUCED adds the noise, once and alike on all ranks. A batch is drawn sample by
sample; its expected number divides the sum, as the proof wants, so each micro-batch counts for a share of that.

Where privacy matters, draw the seed of the noise from `secrets`, save it with `to_save=`, and keep the checkpoints to yourself.
"""

from itertools import islice

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from ignite_train import ForwardOutput, Trainer, TrainEvents, UpdateOptions, create_trainer
from workbench import GROUP, Trained, digits, losses_of, mine, start

SAMPLES, EXPECTED = 320, 24  # how many there are, and how many an update has on average
MAX_NORM, NOISE = 1.0, 0.5  # of a sample's gradient; the deviation of the noise in units of that


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)


def draw(images: Tensor, classes: Tensor) -> list[tuple[Tensor, ...]]:
    """Each sample with the same chance, by itself, cut into micro-batches: any of them may be empty."""
    chosen = torch.rand(SAMPLES) < EXPECTED / SAMPLES
    return [(images[part], classes[part]) for part in chosen.nonzero().squeeze(1).tensor_split(GROUP)]


def batches(num_updates: int) -> list[list[tuple[Tensor, ...]]]:
    """The micro-batches of each update, over all ranks."""
    samples = digits(SAMPLES)
    torch.manual_seed(1)
    return [draw(*samples) for _ in range(num_updates)]


def loss_of_one(model: nn.Module, parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
    """The loss of a single sample, as a function of the parameters."""
    return cross_entropy(functional_call(model, parameters, image[None]), label[None])


def clipped(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    """The sum of the losses, with the sum of the clipped gradients of the samples as its gradient."""
    parameters = dict(model.named_parameters())
    if len(images) == 0:
        return sum(0.0 * parameter.sum() for parameter in parameters.values())
    fixed = {name: parameter.detach() for name, parameter in parameters.items()}
    single = vmap(grad(lambda *sample: loss_of_one(model, *sample)), in_dims=(None, 0, 0))(fixed, images, classes)
    norms = torch.stack([one.flatten(1).norm(dim=1) for one in single.values()]).norm(dim=0)
    factors = (MAX_NORM / norms).clamp(max=1.0)
    summed = {name: torch.einsum("n,n...->...", factors, one) for name, one in single.items()}
    linear = sum((parameters[name] * one).sum() for name, one in summed.items())  # whose gradient is `summed`
    with torch.no_grad():
        loss = cross_entropy(model(images), classes, reduction="sum")
    return loss + linear - linear.detach()


def noise(model: nn.Module, update: int) -> list[Tensor]:
    """The noise of an update, for the mean gradient of each parameter: a function of its number, so nothing is to be saved."""
    generator = torch.Generator().manual_seed(update)
    scale = NOISE * MAX_NORM / EXPECTED
    return [scale * torch.randn(parameter.shape, generator=generator) for parameter in model.parameters()]


def train(num_updates: int = 100) -> Trained:
    """Returns the model, and the losses per expected sample."""
    model, optimizer = build()

    def forward(model: nn.Module, samples: tuple[Tensor, Tensor]) -> ForwardOutput:
        return ForwardOutput(clipped(model, *samples), sample_size=EXPECTED / GROUP)

    trainer = create_trainer(model, optimizer, forward, options=UpdateOptions(reduction="explicit"))

    @trainer.on(TrainEvents.GRADIENTS_REDUCED)
    def hide(trainer: Trainer) -> None:
        for parameter, one in zip(model.parameters(), noise(model, trainer.state.iteration), strict=True):
            parameter.grad += one

    losses = losses_of(trainer)
    with trainer.session() as state:
        for group in islice(batches(num_updates), state.iteration, None):
            trainer.update(mine(group))
    return model, losses


if __name__ == "__main__":
    start(train)
