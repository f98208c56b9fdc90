"""Runs the recipes that use other libraries, beside a loop by hand and the library's own trainer, and writes docs/recipes.md.

    python benchmarks/recipes.py                           # all, into the tables of the page and two pictures
    python benchmarks/recipes.py dpo grpo ppo              # into one of the tables, and its picture
    python benchmarks/recipes.py train_vit --rounds 1      # a single recipe; only shown

A recipe runs in the environment of its library, which `make libraries` makes too. First it runs in float64, and its losses and
weights are compared with those of the loop in tests/support/recipes_by_hand.py, of the library's trainer in
tests/support/recipes_by_library.py, of two processes, and of a run that resumed after SIGKILL. Then all of them run
in float32, in turns, and their processor time is compared. Three programs of examples/programs take part too: their loops by
hand are in tests/support/programs_by_hand.py, and another test resumes them.
"""

import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from ignite.engine import Events
from typer import Argument, Option

from interleaving import interleave, table
from programs import PROGRAMS, lines_of, program

ROOT = Path(__file__).parent.parent
PAGE, PICTURES, END = ROOT / "docs/recipes.md", ROOT / "docs/pictures", "<!-- end -->\n"


class Recipe(NamedTuple):
    """A run that is compared, and how it is shown.

    Attributes:
        library: whose environment it runs in; None: that of this process.
        length: of the timed run, in epochs; of a program in updates, or in rounds.
        compared: of the run in float64.
        score: what is evaluated after the run; none if empty.
        curve: what each number of the curve is.
        unit: of the curve.
    """

    library: str | None
    length: int
    compared: int = 2
    score: str = ""
    curve: str = "loss"
    unit: str = "update"


RECIPES = {
    "finetune_lora": Recipe("peft", 15, score="loss"),
    "train_vit": Recipe("timm", 15, score="accuracy"),
    "segment_monai": Recipe("monai", 8, score="dice"),
    "dpo": Recipe("trl", 120, compared=20),
    "grpo": Recipe("trl", 120, compared=20, curve="reward"),
    "ppo": Recipe(None, 40, compared=10, curve="reward", unit="round"),
}
# Each has a table and a picture of this name.
GROUPS = {"recipes": ("finetune_lora", "train_vit", "segment_monai"), "preferences": ("dpo", "grpo", "ppo")}
TRAINERS = {
    "finetune_lora": "transformers' `Trainer`",
    "segment_monai": "MONAI's `SupervisedTrainer`",
    "dpo": "TRL's `DPOTrainer`",
    "grpo": "TRL's `GRPOTrainer`",
}
WHO = ("by hand", "ours", "its own trainer")
HEAD = ("recipe", "", "lines", "time, to that by hand", "last loss", "held out", "curve, to that by hand", "weights")
SECONDS = 1800.0

Run = Callable[[int, Path], tuple[torch.nn.Module, list[float], dict[str, Any]]]


def support(name: str) -> Any:
    """A module of tests/, tests/support/ or examples/."""
    for folder in ("tests", "tests/support", "examples"):
        if str(ROOT / folder) not in sys.path:
            sys.path.insert(0, str(ROOT / folder))
    return importlib.import_module(name)


# --- in the environment of the library ----------------------------------------------------------------------------------------


def contestants(name: str) -> dict[str, Run]:
    """The same run by hand, with our trainer, and with the library's where it has one: functions of a length and a folder."""
    if "torchvision" not in sys.modules:
        support("libraries.harness").let_torchvision_be_imported()
    found: dict[str, Run]
    if name in PROGRAMS:
        recipe = program(name)
        by_hand = partial(program("programs_by_hand").BY_HAND[name], recipe)
        found = {"by hand": partial(bare, by_hand), "ours": partial(bare, recipe.train)}
    else:
        recipe = support(name)
        found = {"by hand": partial(support("recipes_by_hand").BY_HAND[name], recipe), "ours": partial(recipe.train, 0)}
    if name in TRAINERS:
        found["its own trainer"] = partial(support("recipes_by_library").BY_LIBRARY[name], recipe)
    return found


def bare(
    train: Callable[[int], tuple[torch.nn.Module, list[float]]], length: int, _directory: Path
) -> tuple[torch.nn.Module, list[float], dict[str, Any]]:
    """A program's run, which needs no folder and is not evaluated."""
    return *train(length), {}


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Of a model, in copies."""
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def apart(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """The largest difference, in parts of the largest number of its tensor."""
    differences = [
        float((found[key].double() - value.double()).abs().max() / value.double().abs().max().clamp_min(1e-30))
        for key, value in expected.items()
    ]
    return max(differences)


def run_in(name: str, who: str, length: int, directory: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Weights and curve in float64, also in a process of its own."""
    torch.set_default_dtype(torch.float64)
    model, curve, _ = contestants(name)[who](length, directory)
    return tensors(model), torch.tensor(curve)


def killed_in(name: str, epochs: int, directory: Path, update: int) -> None:
    """Our run, which ends itself at an update."""
    recipe = support(name)
    create = recipe.create_trainer

    def with_end(*arguments: Any, **options: Any) -> Any:
        trainer = create(*arguments, **options)
        trainer.add_event_handler(Events.ITERATION_STARTED(once=update), lambda: os.kill(os.getpid(), signal.SIGKILL))
        return trainer

    recipe.create_trainer = with_end
    run_in(name, "ours", epochs, directory)


def resumes_bitwise(name: str, epochs: int, place: Path, alone: tuple[dict[str, torch.Tensor], torch.Tensor]) -> bool:
    """Whether our run ends with the same bits after SIGKILL in its last epoch."""
    update = len(alone[1]) - len(alone[1]) // epochs // 2
    child = multiprocessing.get_context("fork").Process(target=killed_in, args=(name, epochs, place / "killed", update))
    child.start()
    child.join(SECONDS)
    died = child.exitcode
    child.kill()
    if died != -signal.SIGKILL:
        raise RuntimeError(f"the run of {name} that was to be killed ended with {died}")
    weights, losses = run_in(name, "ours", epochs, place / "killed")
    same = [torch.equal(weights[key], value) for key, value in alone[0].items()]
    return 0 < len(losses) < len(alone[1]) and torch.equal(losses, alone[1][-len(losses) :]) and all(same)


def compared(name: str, length: int) -> dict[str, Any]:
    """How far curve and weights are from those by hand, and whether a run resumes bitwise."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        runs = {who: run_in(name, who, length, place / who) for who in contestants(name)}
        resumed = None if name in PROGRAMS else resumes_bitwise(name, length, place, runs["ours"])
        ranks = support("ranks").run_ranks(run_in, name, "ours", length, place / "ranks", timeout_seconds=SECONDS)
    runs["ours on two processes"] = ranks[0]
    weights, curve = runs.pop("by hand")
    return {
        "curve": {who: apart({"": found}, {"": curve}) for who, (_, found) in runs.items()},
        "weights": {who: apart(found, weights) for who, (found, _) in runs.items()},
        "resumed bitwise": resumed,
        "ranks are equal": apart(ranks[0][0], ranks[1][0]) == 0,
    }


def timed(name: str, length: int, rounds: int) -> dict[str, Any]:
    """Times to that by hand, and the curves and scores of each in float32.

    The run of a program is short, so what it costs to begin is left out.
    """
    torch.set_default_dtype(torch.float32)
    last: dict[str, Any] = {}

    def seconds(who: str, run: Run, length: int) -> float:
        with tempfile.TemporaryDirectory() as place:
            started = time.process_time()
            _, curve, metrics = run(length, Path(place))
            last[who] = {"curve": curve, "score": metrics.get(RECIPES[name].score)}
            return time.process_time() - started

    def without_beginning(who: str, run: Run) -> float:
        beginning = seconds(who, run, 1) if name in PROGRAMS else 0.0
        return seconds(who, run, length) - beginning

    runs = {who: partial(without_beginning, who, run) for who, run in contestants(name).items()}
    measured = interleave(runs, repetitions=rounds, bracket=False, warm_up=rounds > 1)
    spreads = {who: measured.ratios(who) for who in runs if who != "by hand"}
    return {"times": {who: one.show() if rounds > 1 else f"{one.median:.2f}" for who, one in spreads.items()}, "runs": last}


def measure(name: str, output: Path, length: int, rounds: int) -> None:
    """Both, into a file."""
    torch.set_num_threads(1)
    found = compared(name, min(length, RECIPES[name].compared))
    if rounds:
        found |= timed(name, length, rounds)
    output.write_text(json.dumps(found), encoding="utf-8")


# --- the command --------------------------------------------------------------------------------------------------------------


def environment(name: str) -> Path | str:
    """The Python of the environment of a recipe; or why it could not be made."""
    run = support("libraries.run")
    library = RECIPES[name].library
    found: Path | str = Path(sys.executable) if library is None else run.environment(library, run.wanted()[library])
    return found


def measured(name: str, python: Path, length: int, rounds: int) -> dict[str, Any]:
    """Results of a recipe in that environment."""
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "found.json"
        options = ["--inside", str(output), "--length", str(length), "--rounds", str(rounds)]
        command = [str(python), str(Path(__file__).resolve()), name, *options]
        subprocess.run(command, cwd=place, env={**os.environ, **settings}, stdout=sys.stderr, timeout=4 * SECONDS, check=True)
        found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return found


def script(name: str) -> Path:
    """Of a recipe, below the root."""
    return Path("examples/programs" if name in PROGRAMS else "examples") / f"{name}.py"


def lines(name: str) -> dict[str, int]:
    """Of the function that trains, and of our `forward`, without blank ones and comments."""
    by_hand = "programs_by_hand" if name in PROGRAMS else "recipes_by_hand"
    of_ours = ("train",) if name in PROGRAMS else ("train", "forward")  # that of a program is inside of `train`
    found = {
        "by hand": lines_of(ROOT / f"tests/support/{by_hand}.py", name),
        "ours": sum(lines_of(ROOT / script(name), function) for function in of_ours),
    }
    if name in TRAINERS:
        found["its own trainer"] = lines_of(ROOT / "tests/support/recipes_by_library.py", name)
    return found


def rows(name: str, found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Of the table: one for each who trained."""
    cells, recipe = [], RECIPES[name]
    for who, number in lines(name).items():
        run = found["runs"][who]
        shown = TRAINERS[name] if who == "its own trainer" else {"ours": "with a trainer"}.get(who, who)
        differences = [f"{found[what][who]:.0e}" if found[what].get(who) else "equal bits" for what in ("curve", "weights")]
        cells.append(
            (
                f"[`{name}`](../{script(name)})" if who == "by hand" else "",
                shown,
                str(number),
                found["times"].get(who, "1"),
                f"{'' if recipe.curve == 'loss' else f'{recipe.curve} '}{run['curve'][-1]:.4f}",
                f"{recipe.score} {run['score']:.4f}" if recipe.score else "",
                *(["", ""] if who == "by hand" else differences),
            )
        )
    return cells


def draw(results: Mapping[str, Mapping[str, Any]], picture: Path) -> None:
    """The curve of each recipe, ours over that by hand."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(results), figsize=(3.4 * len(results), 2.9), layout="constrained", squeeze=False)
    for axes, (name, found) in zip(panels[0], results.items(), strict=True):
        for who, colour, width, style in (
            ("by hand", "#9bb8d9", 3.5, "-"),
            ("ours", "#1d4e89", 1.0, "-"),
            (WHO[2], "#c4572e", 1.2, ":"),
        ):
            if who in found["runs"]:
                axes.plot(found["runs"][who]["curve"], color=colour, linewidth=width, linestyle=style, label=who)
        axes.set_title(name, loc="left", fontsize=10)
        axes.set(xlabel=RECIPES[name].unit, ylabel=RECIPES[name].curve)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(picture, dpi=130)


def record(results: Mapping[str, Mapping[str, Any]], rounds: int, *, show: bool) -> None:
    """Writes table and picture of each group that was measured; tables of single recipes are shown."""
    when = (
        f"{datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, a load of {os.getloadavg()[1]:.0f} on {os.cpu_count()} cores"
    )
    of = f"median and quartiles of {rounds} rounds" if rounds > 1 else "of one round"
    for group, names in GROUPS.items():
        chosen = {name: results[name] for name in names if name in results}
        text = table(HEAD, [row for name, found in chosen.items() for row in rows(name, found)]) + "\n\n"
        text += f"Processor times on one process, {of}. Written on {when}.\n"
        if show or len(chosen) < len(names):
            print(text if chosen else "", end="")
            continue
        begin = f"<!-- written by benchmarks/recipes.py {' '.join(names)} -->\n"
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
        PAGE.write_text(before + begin + "\n" + text + "\n" + END + rest.partition(END)[2], encoding="utf-8")
        draw(chosen, PICTURES / f"{group}.png")


def main(
    names: Annotated[list[str] | None, Argument(help="Of recipes; all if left out.")] = None,
    rounds: Annotated[int, Option(min=0, help="In which times are compared; 0: only equality is.")] = 3,
    length: Annotated[
        int, Option(min=0, help="Of the timed runs, in epochs, or updates of a program; 0: as the recipe wants.")
    ] = 0,
    inside: Annotated[Path | None, Option(hidden=True, help="This process is in the environment, and writes there.")] = None,
    *,
    show: Annotated[bool, Option("--print", help="Print the table, and do not change the page.")] = False,
) -> None:
    """Measure the recipes, and write their table."""
    chosen = names or [*RECIPES]
    if inside is not None:
        measure(chosen[0], inside, length or RECIPES[chosen[0]].length, rounds)
        return
    results: dict[str, dict[str, Any]] = {}
    for name in chosen:
        python = environment(name)
        if isinstance(python, str):
            raise SystemExit(f"{RECIPES[name].library} cannot be installed: {python}")
        results[name] = measured(name, python, length, rounds)
        print(name, {key: value for key, value in results[name].items() if key != "runs"}, file=sys.stderr, flush=True)
    if rounds:
        record(results, rounds, show=show)


if __name__ == "__main__":
    typer.run(main)
