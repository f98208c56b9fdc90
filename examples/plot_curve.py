"""Draws the training of the language model: bits per byte over updates, beside what byte bigrams reach.

python examples/plot_curve.py                                      # train, then draw docs/curve.png
python examples/plot_curve.py --log-dir runs/language_model        # draw the run that is there
"""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import matplotlib as mpl
import typer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer import Option

mpl.use("Agg")  # draws to a file: no window, no display

import matplotlib.pyplot as plt

EXAMPLES = Path(__file__).resolve().parent
INK, MUTED, TRAIN, HELD_OUT, BIGRAM = "#1f2933", "#7b8794", "#9bb8d9", "#1d4e89", "#c4572e"


def train(log_dir: Path) -> None:
    """Trains the language model with its defaults."""
    command = [sys.executable, str(EXAMPLES / "language_model.py"), "--log-dir", str(log_dir)]
    subprocess.run(command, check=True)  # noqa: S603


def scalars_of(log_dir: Path) -> EventAccumulator:
    """Reads the scalars of the run in `log_dir`; a resumed run has several files, which count as one."""
    if not [*log_dir.glob("events.out.tfevents.*")]:
        raise typer.BadParameter(f"no run in {log_dir}; leave --log-dir out to train one")
    events = EventAccumulator(str(log_dir))
    events.Reload()
    return events


def curve(events: EventAccumulator, tag: str) -> tuple[list[int], list[float]]:
    """Returns the updates and the values of one scalar."""
    scalars = events.Scalars(tag)
    return [scalar.step for scalar in scalars], [scalar.value for scalar in scalars]


def draw(events: EventAccumulator, output: Path) -> None:
    """Draws the three curves; each is named at its end rather than in a legend."""
    training, held_out = curve(events, "train/bits_per_byte"), curve(events, "validation/bits_per_byte")
    bigram = curve(events, "bigram/bits_per_byte")[1][0]
    plt.rcParams.update({"font.family": "sans-serif", "font.size": 10, "text.color": INK, "axes.labelcolor": INK})
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    last, points = training[0][-1], {"textcoords": "offset points"}  # names stand a little off their curves

    axes.axhline(bigram, color=BIGRAM, linewidth=1.4, linestyle=(0, (5, 3)))
    axes.plot(*training, color=TRAIN, linewidth=1.6)
    axes.plot(*held_out, color=HELD_OUT, linewidth=2, marker="o", markersize=4.5)
    axes.annotate(f"byte bigrams, held-out {bigram:.2f}", (last, bigram), (0, 6), color=BIGRAM, ha="right", **points)
    axes.annotate("training", (training[0][1], training[1][1]), (8, 2), color=MUTED, **points)
    axes.annotate(f"held-out\n{held_out[1][-1]:.2f}", (held_out[0][-1], held_out[1][-1]), (8, -6), color=HELD_OUT, **points)

    axes.set(xlabel="update", ylabel="bits per byte", xlim=(0, last * 1.12))
    axes.set_ylim(0, max(bigram * 1.5, held_out[1][0] * 1.1))
    axes.set_title("A small GPT learns the source text of Python's standard library", loc="left", fontsize=11, pad=12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#cbd2d9")
    axes.tick_params(color="#cbd2d9", labelcolor=MUTED)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)

    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=200)


def main(
    log_dir: Annotated[Path | None, Option(help="Of a run of language_model.py; without it, one is trained.")] = None,
    output: Annotated[Path, Option(help="The picture.")] = EXAMPLES.parent / "docs" / "curve.png",
) -> None:
    """Draw the training curve of the language model."""
    if log_dir is None:
        log_dir = Path("runs/language_model")
        train(log_dir)
    draw(scalars_of(log_dir), output)
    print(f"drew {output}")


if __name__ == "__main__":
    typer.run(main)
