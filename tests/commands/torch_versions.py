"""Runs the tests with several versions of torch, each in an environment of its own, and writes docs/torch_versions.md.

`make torch-versions` calls it. Without versions on its command line it takes the oldest that pyproject.toml allows and the
newest that pip finds. An environment stays for the next time, in `.venv-torch-<version>/`; one that was not installed to the
end is installed again.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs/torch_versions.md"
HEAD = """# Versions of torch

What `make torch-versions` has found: the tests of the gate with the oldest and the newest torch that are supported, and with
others that were tried. A run of some test files only says which.

| date | torch | Python | tests | passed | failed | skipped |
|---|---|---|---|---|---|---|
"""
OUTCOMES = ("passed", "failed", "skipped")


def oldest() -> str:
    """The lowest version that pyproject.toml allows."""
    found = re.search(r'"torch>=([\d.]+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert found, "pyproject.toml names no oldest torch"
    version = found[1]
    return version if version.count(".") > 1 else f"{version}.0"


def newest() -> str:
    """The highest version that pip finds for this Python; a CPU build counts as its version."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    found = re.match(r"torch \(([\d.]+)", subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found, "pip finds no torch"
    return found[1]


def requirements() -> list[str]:
    """What the library, its examples and its tests need, apart from torch: so a version that is not supported can be tried."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["examples"], *extras["dev"]]
    return [line for line in wanted if not re.match(r"torch\b", line)]


def environment(version: str) -> Path:
    """The Python of an environment with this torch and what it asks for, and with all else as in constraints.txt."""
    place = ROOT / f".venv-torch-{version}"
    python, installed = place / "bin/python", place / "installed"
    if not installed.exists():
        venv.create(place, with_pip=True, clear=True)
        pip, constraints = [python, "-m", "pip"], place / "constraints.txt"
        subprocess.run([*pip, "install", "--quiet", "--upgrade", "pip"], check=True)
        subprocess.run([*pip, "install", "--quiet", f"torch=={version}"], check=True)
        there = subprocess.run([*pip, "freeze", "--all"], capture_output=True, text=True, check=True).stdout
        pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
        constraints.write_text(f"torch=={version}\n{constrained(pinned, there)}", encoding="utf-8")
        for wanted in (requirements(), ["--no-deps", "--editable", str(ROOT)]):
            subprocess.run([*pip, "install", "--quiet", "-c", constraints, *wanted], check=True)
        installed.touch()
    return python


def constrained(pinned: str, there: str) -> str:
    """The lines of `pinned` about what is not there yet: torch may ask for other versions of what it came with."""
    came = {_name(line) for line in there.splitlines()}
    return "".join(f"{line}\n" for line in pinned.splitlines() if _name(line) not in came)


def _name(requirement: str) -> str:
    return re.split(r"[ =@]", requirement)[0].lower().replace("_", "-")


def counts(printed: str) -> dict[str, int]:
    """How many tests had which outcome, by pytest's last line. A test file that could not be imported has failed."""
    lines = printed.strip().splitlines()
    found = {
        word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", lines[-1] if lines else "")
    }
    found["failed"] = found.get("failed", 0) + found.pop("error", 0)
    return {outcome: found.get(outcome, 0) for outcome in OUTCOMES}


def record(version: str, tests: str, found: dict[str, int]) -> None:
    """Writes a row, in place of one for the same version and tests; the newest torch comes first."""
    row = f"| {datetime.now(UTC):%Y-%m-%d} | {version} | {platform.python_version()} | {tests} | "
    row += " | ".join(str(found[outcome]) for outcome in OUTCOMES) + " |"
    before = TABLE.read_text(encoding="utf-8").splitlines() if TABLE.exists() else []
    rows = {_key(line): line for line in [*(line for line in before if re.match(r"\| \d{4}-", line)), row]}
    order = sorted(rows, key=lambda key: ([int(part) for part in re.findall(r"\d+", key[0])], key[1]), reverse=True)
    TABLE.write_text(HEAD + "".join(f"{rows[key]}\n" for key in order), encoding="utf-8")


def _key(row: str) -> tuple[str, str]:
    cells = [cell.strip() for cell in row.split("|")]
    return cells[2], cells[4]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if any test failed, 0 if none did."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("versions", nargs="*", help="of torch; the oldest supported and the newest release if left out")
    parser.add_argument("--tests", nargs="*", default=[], help="test files, instead of all")
    parser.add_argument("--marks", default="not nightly", help="which tests of these, as for pytest -m (default: not nightly)")
    options = parser.parse_args(arguments)
    failed = 0
    for version in options.versions or dict.fromkeys([oldest(), newest()]):
        parallel = ["-n", "auto", "--maxprocesses", "8", "--dist", "worksteal"]
        command = [environment(version), "-m", "pytest", "-q", *parallel, "-m", options.marks, *options.tests]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            lines = [line for line in process.stdout or () if sys.stdout.write(line)]
        found = counts("".join(lines))
        tests = ", ".join(Path(name).stem for name in options.tests) or "all"
        record(version, tests if options.marks == "not nightly" else f"{tests}: {options.marks}", found)
        failed += found["failed"] + (process.returncode != 0)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
