"""What `compile="update"` takes beside `compile=True` and beside no compiling: several networks, one thread.

    python benchmarks/compiled.py

Data, optimizer (fused AdamW) and clipping are the same in all three ways. Each way has one trainer, which compiles before the
first round and trains on in every round; what is compared is the processor time of an update. Before the rounds parameters,
loss and norm must be the same for all, or the script ends with an error.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

import torch
import typer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector
from typer import Option

import contestants
from contestants import MicroBatches, Work
from ignite_train import ForwardOutput, Trainer
from interleaving import MIN_REPETITIONS, Rounds, interleave, table

Batch = tuple[Tensor, Tensor]

MODEL = "compile=True"
UPDATE = 'compile="update"'
WAYS: dict[str, bool | Literal["update"]] = {MODEL: True, UPDATE: "update", "not compiled": False}
CLASSES = 8


class Net(nn.Module):
    """Layers in a class of its own, since torch does not compile a bare `Sequential`."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.layers(x)
        return logits


class Transformer(nn.Module):
    """Tokens to logits at each place."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.embedding, self.head = nn.Embedding(CLASSES, width), nn.Linear(width, CLASSES)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape (samples, classes, length)."""
        logits: Tensor = self.head(self.blocks(self.embedding(tokens))).transpose(1, 2)
        return logits


def mlp(width: int) -> tuple[nn.Module, Batch]:
    """Three layers, and 16 samples."""
    layers = [nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)]
    return Net(*layers), (torch.randn(16, 32), torch.randint(CLASSES, (16,)))


def convolutions(width: int) -> tuple[nn.Module, Batch]:
    """Three convolutions with norms, and 8 images."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    model = Net(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, CLASSES))
    return model, (torch.randn(8, 3, 32, 32), torch.randint(CLASSES, (8,)))


def transformer(width: int, layers: int) -> tuple[nn.Module, Batch]:
    """Blocks, and 4 sequences of 32 tokens."""
    return Transformer(width, layers), (torch.randint(CLASSES, (4, 32)), torch.randint(CLASSES, (4, 32)))


NETWORKS: dict[str, tuple[Callable[[], tuple[nn.Module, Batch]], int]] = {  # and updates to a stretch
    "MLP of width 64": (partial(mlp, 64), 50),
    "MLP of width 256": (partial(mlp, 256), 50),
    "MLP of width 1024": (partial(mlp, 1024), 10),
    "transformer, 4 blocks of width 128": (partial(transformer, 128, 4), 5),
    "transformer, 4 blocks of width 256": (partial(transformer, 256, 4), 5),
    "convolutions of width 16": (partial(convolutions, 16), 5),
}


def forward(model: nn.Module, micro_batch: Batch) -> ForwardOutput:
    """The summed loss and how many numbers it is the sum of."""
    x, y = micro_batch
    return ForwardOutput(cross_entropy(model(x), y, reduction="sum"), y.numel())


class Run:
    """One trainer, which trains on each time it is called.

    Args:
        network: a name of `NETWORKS`.
        steps: micro-batches to an update.
        compiled: see `create_trainer`.
    """

    def __init__(self, network: str, steps: int, *, compiled: bool | Literal["update"]) -> None:
        make, stretch = NETWORKS[network]
        torch.manual_seed(0)
        model, batch = make()
        self.work = Work(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
            micro_batches=MicroBatches([batch], steps=steps, stretch=max(2, stretch // steps), stretches=5, warm_up=3),
            mean_loss=lambda *_: torch.empty(0),  # no loop by hand takes part
            forward=forward,
            accumulation_steps=steps,
        )
        self.trainer: Trainer = contestants.trainer_of(self.work, compiled=compiled)

    def __call__(self) -> float:
        """Seconds of the processor for an update."""
        with contestants.silence():
            self.trainer.run(self.work.micro_batches, max_epochs=self.trainer.state.epoch + 1)
        seconds: float = self.work.micro_batches.cpu_seconds
        return seconds

    def state(self) -> tuple[Tensor, list[float]]:
        """A copy of the parameters; loss and norm of the latest update, if there was one."""
        output = self.trainer.state.update_output
        numbers = [] if output is None else [output.loss, output.grad_norm]
        return parameters_to_vector(self.work.model.parameters()).detach().clone(), numbers


def compare(network: str, steps: int, repetitions: int) -> Rounds:
    """Trains in all ways.

    Raises:
        AssertionError: they did not do the same work, or updates were not compiled as a whole.
    """
    torch._dynamo.reset()  # or torch would count the graphs of other networks against its limit
    runs = {name: Run(network, steps, compiled=compiled) for name, compiled in WAYS.items()}
    start = runs[MODEL].state()[0]
    for run in runs.values():
        run()
    expected, numbers = runs[MODEL].state()
    for name, run in runs.items():
        found, its_numbers = run.state()
        apart = float((found - expected).norm() / (expected - start).norm())
        if apart > 3e-2 or any(abs(a / b - 1) > 1e-2 for a, b in zip(its_numbers, numbers, strict=True)):
            raise AssertionError(f"{network}, {name}: not the same work, {apart:g} apart, {its_numbers} and {numbers}")
    contestants.check_compiled(runs[UPDATE].trainer)
    return interleave(dict(runs), repetitions=repetitions, warm_up=False, quiet=True)


def main(
    accumulation: Annotated[list[int], Option(help="Micro-batches to an update; may be given several times.")] = [1, 4],  # noqa: B006
    repetitions: Annotated[int, Option(min=1, help="Rounds; all ways run in each of them.")] = MIN_REPETITIONS,
    only: Annotated[str, Option(help="Networks with this in their name.")] = "",
) -> None:
    """Measure updates that are compiled as a whole beside those of a compiled model."""
    torch.set_num_threads(1)
    rows = []
    for network in (name for name in NETWORKS if only in name):
        for steps in accumulation:
            rounds = compare(network, steps, repetitions)
            microseconds = f"{rounds.typical(MODEL) * 1e6:.0f}"
            rows.append([network, str(steps), microseconds, *(rounds.ratios(name).show() for name in WAYS if name != MODEL)])
    head = [
        "network",
        "accumulation",
        f"µs an update, {MODEL}",
        *(f"{name}, ratio (quartiles)" for name in WAYS if name != MODEL),
    ]
    print(table(head, rows))


if __name__ == "__main__":
    typer.run(main)
