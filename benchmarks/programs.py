"""Writes the table of examples/programs into docs/programs.md: lines of each loop, by hand and with a trainer, and their times.

    python benchmarks/programs.py                          # measures, and writes
    python benchmarks/programs.py --repetitions 1 --print  # only shows the table

Lines are those with code in the body of `train` of the script, and in that of the function of the same name in
tests/support/programs_by_hand.py: from the model, which both take from the script, to the return. The ratio of the times is
that of processor time for the same updates on one process, without what a run costs to begin, in interleaved rounds.
"""

import ast
import importlib
import io
import sys
import time
import tokenize
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from typer import Option

from interleaving import interleave, table

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/programs.md"
BEGIN, END = "<!-- written by benchmarks/programs.py -->\n", "<!-- end -->\n"
HEAD = ("program", "mechanisms", "lines by hand", "with a trainer", "time, to that by hand")
# What each script shows, and for how many updates it is timed.
PROGRAMS = {
    "dcgan": ("two trainers in a loop of one's own, and gradients that flow through both networks", 8),
    "wgan_gp": ("five updates of one trainer to one of another; a derivative inside the loss", 6),
    "reinforce": ("data that depend on the update before; steps along the sum", 8),
    "time_sequence": ("LBFGS and its closure, on all data at once", 2),
    "sam": ("an optimizer that evaluates the loss twice, with an optimizer inside", 30),
    "muon_adamw": ("two optimizers with a schedule each", 30),
    "word2vec": ("sparse gradients", 80),
    "word_lstm": ("a hidden state that is carried, and begins again in each epoch", 40),
    "lora": ("parameters that are thawed in the middle of the run", 80),
    "dino": ("a teacher, a centre, changed gradients, a temperature by progress", 12),
    "clip": ("a loss of the whole batch of all ranks, with accumulation", 50),
    "vae": ("a schedule in the loss; steps along the sum; logs with denominators of their own", 80),
    "maml": ("an inner step that is differentiated", 20),
    "ppo": ("rounds: a rollout, and updates on it until the policy has moved far; saved at the end of a round", 4),
    "dpo": ("pairs of answers, with what a reference model says of them in the data", 30),
    "grpo": ("a rollout for each update; rewards compared within a micro-batch; a penalty by a reference model", 20),
    "prioritised_replay": ("errors of single samples, of all ranks, by which the loop samples; a target network", 30),
    "bert": ("two losses with denominators of their own", 60),
    "fixmatch": ("labelled and unlabelled data from two loaders, with a denominator each", 100),
    "pcgrad": ("a gradient for each of three tasks, of which one is made", 60),
    "dp_sgd": ("gradients of single samples are clipped in forward, and noise is added once", 60),
    "stylegan2": ("lazy regularisers: another forward for some updates, which an average leaves out", 40),
}


def program(name: str) -> Any:
    """The script as a module."""
    for folder in (ROOT / "examples/programs", ROOT / "tests/support"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    return importlib.import_module(name)


def lines_of(path: Path, function: str) -> int:
    """How many lines of a function's body hold code: no blank ones, no comments, no docstring."""
    source = path.read_text(encoding="utf-8")
    node = next(one for one in ast.parse(source).body if isinstance(one, ast.FunctionDef) and one.name == function)
    first = node.body[ast.get_docstring(node) is not None].lineno
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in layout]
    code = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return len(code & set(range(first, (node.end_lineno or 0) + 1)))


def lines(name: str) -> tuple[int, int]:
    """Of the loop by hand, and of ours."""
    return lines_of(ROOT / "tests/support/programs_by_hand.py", name), lines_of(ROOT / f"examples/programs/{name}.py", "train")


def timed(train: Callable[[int], Any], number: int) -> Callable[[], float]:
    """A function that makes these updates, and returns the seconds of the processor, less those of a run with one update."""

    def seconds(number: int) -> float:
        started = time.process_time()
        train(number)
        return time.process_time() - started

    return lambda: seconds(number + 1) - seconds(1)


def ratio(name: str, repetitions: int) -> str:
    """Our time to that of the loop by hand."""
    script, by_hand, number = program(name), program("programs_by_hand").BY_HAND[name], PROGRAMS[name][1]
    contestants = {"hand": timed(partial(by_hand, script), number), "ours": timed(script.train, number)}
    return interleave(contestants, repetitions=repetitions, quiet=True).ratios("ours").show()


def row(name: str, repetitions: int) -> tuple[str, ...]:
    """A row of the table."""
    by_hand, ours = map(str, lines(name))
    cells = (f"[`{name}`](../examples/programs/{name}.py)", PROGRAMS[name][0], by_hand, ours, ratio(name, repetitions))
    print(" | ".join(cells), file=sys.stderr, flush=True)
    return cells


def main(
    repetitions: Annotated[int, Option(min=1, help="Rounds of each program.")] = 7,
    *,
    show: Annotated[bool, Option("--print", help="Print the table, and do not change the page.")] = False,
) -> None:
    """Measure the programs, and write their table."""
    torch.set_num_threads(1)
    text = table(HEAD, [row(name, repetitions) for name in PROGRAMS]) + "\n\n"
    text += f"Median and quartiles of {repetitions} rounds on one process, torch {torch.__version__}, processor time.\n"
    if show:
        print(text)
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + text + "\n" + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
