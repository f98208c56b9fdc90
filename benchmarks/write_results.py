"""Runs the benchmarks and writes results.md and scaling.md beside this file: `make bench`. Nothing else writes them.

What is measured on a GPU has a command and a file of its own, see `gpu.py`.

python benchmarks/write_results.py
python benchmarks/write_results.py --only overhead --only checkpoint    # the other sections stay as they are
python benchmarks/write_results.py --quick --into trial    # everything with few repetitions: shows that it runs
"""

import datetime
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import torch
import typer
from typer import Option

HERE = Path(__file__).parent
PEERS = ("pytorch-ignite", "lightning", "accelerate", "transformers")
# Script, its heading, and what makes it quick.
SCRIPTS = (
    ("overhead.py", "Cost of the loop", ["--repetitions", "2", "--accumulation", "4", "--stretches", "3"]),
    ("fast.py", "What each acceleration saves", ["--repetitions", "1", "--size", "0.5 ms"]),
    ("start.py", "Start", ["--repetitions", "1", "--only", "checkpoint"]),
    ("compiled.py", "Compiled updates", ["--repetitions", "1", "--accumulation", "1", "--only", "width 64"]),
    ("instructions.py", "Instructions of an update", ["--print", "--only", "no peer"]),
    ("optimizer_phase.py", "Optimizer phase", ["--repetitions", "2", "--parameters", "5"]),
    ("distributed.py", "Several ranks", ["--repetitions", "2", "--ranks", "2", "--accumulation", "4", "--size", "tiny"]),
    ("loaders.py", "Loaders with workers", ["--repetitions", "1", "--accumulation", "4", "--micro-batches", "16"]),
    ("end_to_end.py", "Whole trainings", ["--repetitions", "1", "--updates", "5", "--epochs", "1"]),
    ("state_consistency.py", "A digest of the state", ["--updates", "3", "--width", "64", "--layers", "1"]),
    ("handler_costs.py", "Averages and monitors", ["--repetitions", "2", "--millions", "1"]),
    ("checkpoint.py", "Saving", ["--repetitions", "2", "--megabytes", "10"]),
)
SCALING = ("scaling.py", "How the cost of an update grows", ["--repetitions", "1", "--ranks", "2"])
READING = (
    "Ratios are to the reference in the same run, in interleaved rounds; median (first to third quartile). Every loop of a "
    "table ended at the same parameters or score. Others may have used the machine at the same time: look at the line "
    '"once more (the noise)" before reading anything into a difference.'
)


def circumstances() -> str:
    """When, where and with what, without a dot at the end."""
    versions = []
    for peer in PEERS:
        try:
            versions.append(f"{peer} {version(peer)}")
        except PackageNotFoundError:
            versions.append(f"{peer} left out, since it could not be installed here")
    when = datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d")
    return (
        f"on {when}: torch {torch.__version__}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores ({platform.machine()}); {', '.join(versions)}"
    )


def section(script: str, heading: str, options: list[str]) -> tuple[str, bool]:
    """Runs one script; what it printed under its heading, and whether it ran to the end."""
    started = time.perf_counter()
    print(f"{script} ...", file=sys.stderr, flush=True)
    ended = subprocess.run([sys.executable, HERE / script, *options], stdout=subprocess.PIPE, text=True, check=False)
    print(f"{script}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    failed = f"\n\n`{script}` ended with status {ended.returncode}." if ended.returncode else ""
    text = (
        f"## {heading}\n\n`benchmarks/{script}`. Written by `make bench` {circumstances()}.\n\n{ended.stdout.strip()}{failed}\n"
    )
    return text, ended.returncode == 0


def sections_of(path: Path) -> dict[str, str]:
    """The sections of a file that was written before, by heading."""
    texts = path.read_text(encoding="utf-8").split("\n## ")[1:] if path.exists() else []
    return {text.partition("\n")[0]: f"## {text.rstrip()}\n" for text in texts}


def main(
    into: Annotated[Path, Option(help="Folder for the two files.")] = HERE,
    only: Annotated[list[str], Option(help="Scripts to run, without .py; may be given several times.")] = [],  # noqa: B006
    *,
    quick: Annotated[bool, Option("--quick", help="Few repetitions; not for publishing, and not into this folder.")] = False,
) -> None:
    """Run the benchmarks and write their figures."""
    if quick and into.resolve() == HERE.resolve():
        raise typer.BadParameter("--quick needs --into: figures of few repetitions are not to be published")
    unknown = {*only} - {script.removesuffix(".py") for script, _, _ in (*SCRIPTS, SCALING)}
    if unknown:
        raise typer.BadParameter(f"--only must name a script of benchmarks/, got {sorted(unknown)[0]!r}")
    into.mkdir(parents=True, exist_ok=True)
    succeeded = True
    for script, heading, options in (*SCRIPTS, SCALING):
        if only and script.removesuffix(".py") not in only:
            continue
        text, ran = section(script, heading, options if quick else [])
        succeeded = succeeded and ran
        if script == SCALING[0]:
            (into / "scaling.md").write_text(f"#{text.removeprefix('##')}\n{READING}\n", encoding="utf-8")
            continue
        sections = sections_of(into / "results.md") | {heading: text}
        ordered = [sections[heading] for _, heading, _ in SCRIPTS if heading in sections]
        (into / "results.md").write_text("\n".join([f"# Benchmarks\n\n{READING}\n", *ordered]), encoding="utf-8")
    if not succeeded:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
