"""Runs all benchmarks and writes results.md and scaling.md beside this file: `make bench`. Nothing else writes them.

python benchmarks/write_results.py
python benchmarks/write_results.py --quick --into /tmp/trial    # everything with few repetitions: shows that it runs
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
    ("optimizer_phase.py", "Optimizer phase", ["--repetitions", "2", "--parameters", "5"]),
    ("distributed.py", "Several ranks", ["--repetitions", "2", "--accumulation", "4", "--size", "tiny"]),
    ("end_to_end.py", "Whole trainings", ["--repetitions", "1", "--updates", "5", "--epochs", "1"]),
    ("state_consistency.py", "A digest of the state", ["--updates", "3", "--width", "64", "--layers", "1"]),
    ("checkpoint.py", "Saving", ["--repetitions", "2", "--megabytes", "10"]),
    ("gpu.py", "On a GPU", []),
)
SCALING = ("scaling.py", "How the cost of an update grows", ["--repetitions", "1", "--ranks", "2"])


def circumstances() -> str:
    """When, where and with what."""
    versions = []
    for peer in PEERS:
        try:
            versions.append(f"{peer} {version(peer)}")
        except PackageNotFoundError:
            versions.append(f"{peer} left out, since it could not be installed here")
    when = datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d")
    return (
        f"Written by `make bench` on {when}: torch {torch.__version__}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores ({platform.machine()}); {', '.join(versions)}.\n\n"
        "Ratios are to the reference in the same run, in interleaved rounds; median (first to third quartile). Every loop of a "
        "table ended at the same parameters or score. Others may have used the machine at the same time: look at the line "
        '"once more (the noise)" before reading anything into a difference.'
    )


def section(script: str, heading: str, options: list[str]) -> tuple[str, bool]:
    """Runs one script; what it printed under its heading, and whether it ran to the end."""
    started = time.perf_counter()
    print(f"{script} ...", file=sys.stderr, flush=True)
    ended = subprocess.run([sys.executable, HERE / script, *options], stdout=subprocess.PIPE, text=True, check=False)
    print(f"{script}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    failed = f"\n\n`{script}` ended with status {ended.returncode}." if ended.returncode else ""
    return f"## {heading}\n\n`benchmarks/{script}`\n\n{ended.stdout.strip()}{failed}\n", ended.returncode == 0


def main(
    into: Annotated[Path, Option(help="Folder for the two files.")] = HERE,
    *,
    quick: Annotated[bool, Option("--quick", help="Few repetitions; not for publishing, and not into this folder.")] = False,
) -> None:
    """Run all benchmarks and write their figures."""
    if quick and into.resolve() == HERE.resolve():
        raise typer.BadParameter("--quick needs --into: figures of few repetitions are not to be published")
    into.mkdir(parents=True, exist_ok=True)
    sections = [section(script, heading, options if quick else []) for script, heading, options in SCRIPTS]
    script, heading, options = SCALING
    scaling, scaled = section(script, heading, options if quick else [])
    results = "\n".join(text for text, _ in sections)
    (into / "results.md").write_text(f"# Benchmarks\n\n{circumstances()}\n\n{results}", encoding="utf-8")
    (into / "scaling.md").write_text(f"#{scaling.removeprefix('##')}\n{circumstances()}\n", encoding="utf-8")
    if not (scaled and all(ran for _, ran in sections)):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
