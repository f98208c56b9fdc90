"""What an average of the weights costs, and what a monitor costs between two updates that it looks at.

    python benchmarks/handler_costs.py

An averaging of `ModelEMA` is timed against one `torch._foreach_lerp_` over the same tensors, which it cannot be quicker than.
Updates of a small model with `GradientMonitor` attached, none of which it looks at, are timed against updates without it. Last
comes what `TensorBoard` takes to write the scalars of an update. All in interleaved rounds.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer
from torch import nn
from typer import Option

from ignite_train import create_trainer
from ignite_train.handlers import GradientMonitor, ModelEMA, TensorBoard
from interleaving import MIN_REPETITIONS, interleave, table


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss."""
    return model(x).square().mean()


def averagings(millions: int) -> dict[str, Callable[[], float]]:
    """One averaging of a model with this many million parameters, in matrices of a quarter of a million."""
    model = nn.Sequential(*(nn.Linear(500, 500, bias=False) for _ in range(4 * millions)))
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), mean_square)
    ema = ModelEMA(0.999)
    ema.attach(trainer)
    weights = [parameter.detach() for parameter in model.parameters()]
    averages = [weight.clone() for weight in weights]

    def timed(average: Callable[[], object]) -> Callable[[], float]:
        def seconds() -> float:
            started = time.perf_counter()
            average()
            return time.perf_counter() - started

        return seconds

    def lerp() -> None:
        torch._foreach_lerp_(averages, weights, 0.001)

    return {"_foreach_lerp_": timed(lerp), "ModelEMA": timed(ema), "once more (the noise)": timed(lerp)}


def updates(number: int) -> dict[str, Callable[[], float]]:
    """This many updates of a small model, with and without a monitor that looks at none of them; seconds of one."""

    def seconds(*, with_monitor: bool) -> float:
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
        trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), mean_square)
        if with_monitor:
            GradientMonitor(every=10**9).attach(trainer)
        data = [torch.ones(4, 16)] * number
        trainer.run(data[:20])
        started = time.perf_counter()
        trainer.run(data, max_epochs=2)
        return (time.perf_counter() - started) / number

    return {
        "without a monitor": lambda: seconds(with_monitor=False),
        "GradientMonitor, not looking": lambda: seconds(with_monitor=True),
        "once more (the noise)": lambda: seconds(with_monitor=False),
    }


def points(directory: Path, *numbers: int) -> dict[str, Callable[[], float]]:
    """Seconds of a call of `TensorBoard`, which writes this many scalars: the median of 200 calls."""

    def seconds(number: int) -> float:
        model = nn.Linear(1, 1)
        trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), mean_square)
        trainer.state.metrics = {f"log {index}": index / 3 for index in range(number)}
        tensorboard = TensorBoard(directory / f"{len(list(directory.iterdir()))}")
        tensorboard.attach(trainer)
        taken = []
        for update in range(1_000, 1_220):
            trainer.state.iteration, started = update, time.perf_counter()
            tensorboard(trainer)
            taken.append(time.perf_counter() - started)
        return statistics.median(taken[20:])

    once_more = {f"{numbers[0]} scalars, once more (the noise)": partial(seconds, numbers[0])}
    return {f"{number} scalars": partial(seconds, number) for number in numbers} | once_more


def main(
    millions: Annotated[int, Option(help="Million parameters of the averaged model.")] = 50,
    number: Annotated[int, Option(help="Updates in a measurement of the monitor.")] = 300,
    repetitions: Annotated[int, Option(help=f"Rounds; at least {MIN_REPETITIONS} for a result.")] = 15,
) -> None:
    """Time an averaging against one `_foreach_lerp_`, and updates with a monitor that does not look against those without."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with TemporaryDirectory() as directory:
        for title, contestants, unit in (
            (f"One averaging of {millions} M parameters", averagings(millions), "ms"),
            (f"One of {number} updates of a small model", updates(number), "µs"),
            ("Writing the scalars of an update", points(Path(directory), 24, 8, 240), "µs"),
        ):
            rounds = interleave(contestants, repetitions=repetitions, quiet=True)
            scale = 1e3 if unit == "ms" else 1e6
            rows = [
                (name, f"{rounds.typical(name) * scale:.1f}", rounds.ratios(name).show(3), rounds.difference(name).show(1))
                for name in contestants
            ]
            print(f"\n{title}, on one thread:\n")
            print(table(("", unit, "ratio", "difference, µs"), rows))


if __name__ == "__main__":
    typer.run(main)
