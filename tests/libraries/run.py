"""Trains with the libraries that people use, each in an environment of its own, and writes docs/libraries.md.

`make libraries` calls it. Names on its command line choose some of packages.toml. An environment sees what is installed for
this Python, torch among it, and has the packages of its library beside; it stays for the next time, in
`.venv-libraries/<name>`, and is made again when they change. A library that cannot be installed is in the table as such, and
is no failure. Nothing but packages is downloaded: weights are random, and data is made.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ENVIRONMENTS = ROOT / ".venv-libraries"
TABLE = ROOT / "docs/libraries.md"
CHECKS = ("one", "four", "ranks", "killed", "weights")
SECONDS = 1800
COLUMNS = (
    "library",
    "what was tried",
    "1 micro-batch",
    "4 micro-batches",
    "2 processes",
    "SIGKILL",
    "weights",
    "glue",
    "ran on",
)
HEAD = f"""# Libraries that were tried

The table is what `make libraries` has found: libraries that people train with, in the versions of
[`tests/libraries/packages.toml`](../tests/libraries/packages.toml), each in an environment of its own. Models have random
weights, and everything ran on the CPU. The cases are the files of [`tests/libraries/`](../tests/libraries).

| column | what was done |
|---|---|
| 1 and 4 micro-batches | training with a group of that many micro-batches to an update, against a loop in plain torch |
| 2 processes | the same with two gloo processes and two micro-batches each to an update, against that loop over all four |
| SIGKILL | a run with checkpoints and validation is killed in its second epoch and resumes; all that is saved is compared \
bit by bit with a run that nothing has ended |
| weights | the trained weights go out of a checkpoint by `consolidate` and into fresh models, in so many ways: by \
`torch.load`, by `load_weights` from the checkpoint and from shards of safetensors, by functions of the library; compared bit \
by bit |
| glue | lines of `forward` and of what is attached to the trainer |
| ran on | the day on which the row was written |

"bitwise" means equal bits in weights and losses; a number is the largest difference, in parts of the largest number of its
tensor.

| {" | ".join(COLUMNS)} |
|{"---|" * len(COLUMNS)}
"""


def wanted() -> dict[str, list[str]]:
    """The packages of each library."""
    read = tomllib.loads((HERE / "packages.toml").read_text(encoding="utf-8"))
    return {name: entry["packages"] for name, entry in read.items()}


def environment(name: str, packages: Sequence[str], place: Path = ENVIRONMENTS) -> Path | str:
    """The Python of an environment with these packages beside ours; or why they could not be installed, in one line."""
    folder = place / name
    python, installed = folder / "bin/python", folder / "installed"
    if installed.exists() and installed.read_text(encoding="utf-8").split() == list(packages):
        return python
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=False)
    (beside,) = (folder / "lib").glob("python*/site-packages")
    (beside / "ours.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    torch = next(
        line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line.startswith("torch==")
    )
    (folder / "constraints.txt").write_text(f"{torch}\n", encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "-c",
        str(folder / "constraints.txt"),
    ]
    result = subprocess.run([*command, *packages], capture_output=True, text=True, check=False)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["ERROR: pip failed"]
        return lines[-1].removeprefix("ERROR: ")
    installed.write_text("\n".join(packages), encoding="utf-8")
    return python


def tried(name: str, python: Path) -> list[dict[str, Any]]:
    """What became of each case of a library."""
    folders = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    with tempfile.TemporaryDirectory() as place:
        output, log = Path(place) / "rows.json", Path(place) / "log"
        command = [python, "-c", "import sys; from libraries.harness import main; main(*sys.argv[1:])", name, output]
        with log.open("w") as file:
            try:
                subprocess.run(
                    command, cwd=place, env={**os.environ, **settings}, stdout=file, stderr=file, timeout=SECONDS, check=False
                )
            except subprocess.TimeoutExpired:
                file.write(f"not done after {SECONDS} seconds\n")
        written = log.read_text(errors="replace")
        if not output.exists():
            print(written)
            failure = f"FAILED: {written.strip().splitlines()[-1] if written.strip() else 'no word'}"
            return [{"case": "all", "glue": 0, "checks": dict.fromkeys(CHECKS, failure)}]
        rows: list[dict[str, Any]] = json.loads(output.read_text(encoding="utf-8"))
        if any(failed(row) for row in rows):
            print(written)
        return rows


def failed(row: Mapping[str, Any]) -> list[str]:
    """The checks of a case that failed."""
    return [check for check, result in row["checks"].items() if result.startswith("FAILED")]


def title(packages: Sequence[str]) -> str:
    """A library with its version."""
    return packages[0].replace("==", " ")


def lines_of(packages: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rows of a library for the table."""
    return [f"| {' | '.join(cells(packages, row))} |" for row in rows]


def cells(packages: Sequence[str], row: Mapping[str, Any]) -> list[str]:
    """The cells of a row of the table."""
    return [title(packages), row["case"], *(cell(row["checks"][check]) for check in CHECKS), str(row["glue"]), today()]


def today() -> str:
    """As the table has it, in each row: a run of some libraries leaves the rows of the others."""
    return f"{datetime.now(UTC):%Y-%m-%d}"


def cell(result: str) -> str:
    """A result as the table has it."""
    kind, _, reason = result.partition(": ")
    words = {"not tried": "not tried: ", "known": "no: ", "FAILED": "**failed**: "}
    return words[kind] + reason.replace("|", "/") if kind in words else result


def record(lines: Mapping[str, Sequence[str]], table: Path = TABLE) -> None:
    """Writes the table: these rows in place of those of the same libraries, and the others as they were."""
    rows: dict[str, list[str]] = {}
    names = {packages[0].partition("==")[0]: name for name, packages in wanted().items()}
    for line in table.read_text(encoding="utf-8").splitlines() if table.exists() else []:
        words = line.split()
        if len(words) > 1 and words[0] == "|" and words[1] in names:
            rows.setdefault(names[words[1]], []).append(line)
    rows |= {name: list(some) for name, some in lines.items()}
    text = "".join(f"{line}\n" for name in names.values() for line in rows.get(name, []))
    last = f"Python {platform.python_version()} and torch {version('torch')}"
    table.write_text(f"{HEAD}{text}\nThe latest rows were written with {last}.\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if any check failed that is not known to, 0 otherwise."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    packages = wanted()
    parser.add_argument("libraries", nargs="*", help="of packages.toml; all if left out")
    parser.add_argument("--keep", action="store_true", help="leave docs/libraries.md as it is")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.libraries if name not in packages]
    if unknown:
        parser.error(f"libraries must be of {', '.join(packages)}, got {unknown[0]!r}")
    wrong = 0
    for name in options.libraries or packages:
        print(f"{name}: installing {' '.join(packages[name])}", flush=True)
        python = environment(name, packages[name])
        if isinstance(python, str):
            lines = [f"| {title(packages[name])} | could not be installed: {cell(python)} |{' |' * 6} {today()} |"]
            print(lines[0])
        else:
            rows = tried(name, python)
            lines = lines_of(packages[name], rows)
            wrong += sum(len(failed(row)) for row in rows)
            print(*lines, sep="\n", flush=True)
        if not options.keep:
            record({name: lines})
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
