"""Runs Ignite's own tests, and the code in its documentation, with our trainer in the place of its `Engine`.

`make ignite-suite` calls it. The tests are those of the installed release: pip downloads its source distribution, once, into
`.ignite-suite/`; where no package index can be reached, `IGNITE_SOURCE=path` names a checkout or an unpacked source
distribution of the same version. What fails must be in differences.toml, with the heading of docs/differences-from-ignite.md
that gives the reason; what is in that list must fail. A test that fails with Ignite's own engine too (a package is missing, the
machine is slow) does not count, and one that fails is run once more, since some measure time.

The part `documentation` runs each block of code of its README, its pages and its docstrings on its engine and on ours, and
compares what comes of it; see documentation.py.

With `--pre` the newest pre-release of Ignite is installed into `.ignite-suite/pre/`, in front of the installed release.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FETCHED = ROOT / ".ignite-suite"
PARTS = ("engine", "handlers", "metrics")
DOCUMENTATION = "documentation"
DOCUMENTATION_SECONDS = 1200
PREFIX = "tests/ignite/"
SECONDS_PER_TEST = 300

Outcomes = Mapping[str, tuple[str, str]]  # by the name of a test: passed, failed or skipped; and its error


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts that are named, and prints what became of them; 1 if anything differs from the list."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}, {DOCUMENTATION}, or files of theirs; all by default")
    parser.add_argument("-n", "--processes", default="2")
    parser.add_argument("--pre", action="store_true", help="with the newest pre-release of Ignite, which pip installs beside")
    given = parser.parse_args(arguments)
    if given.pre:
        return with_pre_release([*given.parts, "-n", given.processes])
    print(f"Ignite {version('pytorch-ignite')}", flush=True)
    parts = given.parts or [*PARTS, DOCUMENTATION]
    wrong = documentation(source_of_the_release()) if DOCUMENTATION in parts else 0
    parts = [part for part in parts if part != DOCUMENTATION]
    return max(wrong, own_tests(parts, given.processes)) if parts else wrong


def own_tests(parts: Sequence[str], processes: str) -> int:
    """Runs Ignite's tests, and prints what became of them; 1 if anything differs from the list."""
    listed = differences()
    with tempfile.TemporaryDirectory() as place:
        copied = Path(place) / "tests"
        shutil.copytree(source_of_the_release() / "tests", copied)
        ours = run(copied.parent, [f"{PREFIX}{part}" for part in parts], processes)
        ours = ours | run_again(copied.parent, failed_and_unlisted(ours, listed))
        unknown = failed_and_unlisted(ours, listed)
        stock = run(copied.parent, [f"{PREFIX}{name}" for name in unknown], processes, stock=True) if unknown else {}
    return report(ours, stock, listed)


def with_pre_release(arguments: Sequence[str]) -> int:
    """Runs this command in a process that imports the newest pre-release of Ignite."""
    place = FETCHED / "pre"
    shutil.rmtree(place, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--pre",
        "--no-deps",
        "--target",
        str(place),
        "pytorch-ignite",
    ]
    if subprocess.run(command, check=False).returncode:
        sys.exit("pip could not install the newest pre-release of Ignite; --pre needs a package index")
    environment = {**os.environ, "PYTHONPATH": str(place)}
    return subprocess.run([sys.executable, __file__, *arguments], env=environment, check=False).returncode


def failed_and_unlisted(outcomes: Outcomes, listed: Mapping[str, str]) -> list[str]:
    """The tests that fail, and of which the list says nothing."""
    return [name for name, (outcome, _) in outcomes.items() if outcome == "failed" and reason(name, listed) is None]


def run_again(place: Path, names: Sequence[str]) -> Outcomes:
    """The outcomes of tests that are run once more, one after the other."""
    return run(place, [f"{PREFIX}{name}" for name in names], "1") if names else {}


def documentation(source: Path) -> int:
    """Runs the code in Ignite's documentation on both engines, and prints what differs; 1 if it is not in the list."""
    with tempfile.TemporaryDirectory() as place:
        stock, ours = (blocks_of(kind, source, Path(place)) for kind in ("stock", "ours"))
    listed = read_list()
    left_out = {block: entry["reason"] for entry in listed["left_out"] for block in entry["blocks"]}
    different = {block: entry["heading"] for entry in listed["documentation"] for block in entry["blocks"]}
    fails = {name: outcome[1] for name, outcome in stock.items() if outcome[0] != "ran"}
    differs = [name for name, outcome in stock.items() if name not in fails and ours[name] != outcome]
    wrong = [
        f"does not run with Ignite's own engine, and is not in the list: {name}: {fails[name]}"
        for name in fails - left_out.keys()
    ]
    wrong += [
        f"differs, and is not in the list: {name}: {stock[name]}, ours: {ours[name]}"
        for name in differs
        if name not in different
    ]
    wrong += [f"is the same, and is in the list under {different[name]!r}: {name}" for name in different if name not in differs]
    same = len(stock) - len(fails) - len(differs)
    print(f"documentation: {len(stock)} blocks, {same} do the same, {len(differs)} differ, {len(fails)} are left out")
    print(*wrong, sep="\n")
    return int(bool(wrong))


def blocks_of(kind: str, source: Path, place: Path) -> dict[str, list[Any]]:
    """What became of each block with one of the engines."""
    command = [sys.executable, str(HERE / "documentation.py"), kind, str(source)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=DOCUMENTATION_SECONDS, check=False, cwd=place)
    if result.returncode:
        sys.exit(f"the code of the documentation could not be run:\n{result.stderr[-2000:]}")
    found: dict[str, list[Any]] = json.loads(result.stdout.splitlines()[-1])
    return found


def source_of_the_release() -> Path:
    """A folder with `tests`, `docs/source` and `README.md` of the installed release of Ignite."""
    wanted = version("pytorch-ignite")
    if "IGNITE_SOURCE" in os.environ:
        source = Path(os.environ["IGNITE_SOURCE"])
        text = (source / "ignite/__init__.py").read_text(encoding="utf-8")
        found = re.search(r'__version__ = "(.*)"', text)
        if not found or found[1] != wanted:
            sys.exit(f"IGNITE_SOURCE must have the installed version {wanted}, got {found and found[1]} in {source}")
        return source
    place = FETCHED / wanted
    if not (place / "README.md").exists():
        fetch(wanted, place)
    return place


def fetch(wanted: str, place: Path) -> None:
    """Unpacks the tests and the documentation of the source distribution."""
    with tempfile.TemporaryDirectory() as download:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "pytorch-ignite"]
        result = subprocess.run([*command, "--dest", download, f"pytorch-ignite=={wanted}"], check=False)
        if result.returncode:
            sys.exit(f"pip could not fetch the source of Ignite {wanted}; pass IGNITE_SOURCE=path of a checkout of v{wanted}")
        (archive,) = Path(download).glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            opened.extractall(download, filter="data")
        (tests,) = Path(download).glob("*/tests")
        partial = place.with_name(f"{wanted}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        for name in ("tests", "docs/source"):
            shutil.copytree(tests.parent / name, partial / name)
        shutil.copy(tests.parent / "README.md", partial)
        shutil.rmtree(place, ignore_errors=True)
        partial.rename(place)


def run(place: Path, names: Iterable[str], processes: str, *, stock: bool = False) -> Outcomes:
    """Runs tests in `place`, where nothing but the tests is, so that the installed Ignite is imported."""
    written = place / f"outcomes-{stock}.json"
    folders = [str(HERE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "IGNITE_SUITE_OUTCOMES": str(written)}
    if stock:
        environment["IGNITE_SUITE_STOCK"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "--no-summary", "-p", "trainer_as_engine", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull, f"--rootdir={place}", "--continue-on-collection-errors", f"--timeout={SECONDS_PER_TEST}"]
    command += ["-n", processes, "-m", "not distributed and not multinode_distributed and not tpu", "-W", "ignore"]
    subprocess.run([*command, *names], cwd=place, env=environment, check=False)
    if not written.exists():
        sys.exit("pytest did not come to its end; the lines above say why")
    return {name.removeprefix(PREFIX): tuple(outcome) for name, outcome in json.loads(written.read_text()).items()}


def differences() -> dict[str, str]:
    """The tests that may fail, or the beginnings of their names with a `*`, and the reason for each."""
    return {test: entry["heading"] for entry in read_list()["difference"] for test in entry["tests"]}


def read_list() -> dict[str, Any]:
    """The list of what may differ."""
    return tomllib.loads((HERE / "differences.toml").read_text(encoding="utf-8"))


def reason(name: str, listed: Mapping[str, str]) -> str | None:
    """Why the test `name` may fail; None if it must pass. The name of a test without parameters stands for all of its cases."""
    for entry, heading in listed.items():
        if name == entry or name.startswith(f"{entry}[") or (entry.endswith("*") and name.startswith(entry[:-1])):
            return heading
    return None


def report(ours: Outcomes, stock: Outcomes, listed: Mapping[str, str]) -> int:
    """Prints the counts, and each test that differs from the list.

    Returns:
        0 if none does, or else 1.
    """
    counts: Counter[tuple[str, str]] = Counter()
    by_reason: Counter[str] = Counter()
    wrong = []
    for name, (outcome, error) in sorted(ours.items()):
        heading, part = reason(name, listed), name.partition("/")[0]
        if outcome == "failed" and heading is not None:
            outcome = "differ"
            by_reason[heading] += 1
        elif outcome == "failed" and stock.get(name, ("absent", ""))[0] == "failed":
            outcome = "fail with Ignite's own engine too"
        elif outcome == "failed":
            wrong.append(f"fails, and is not in the list: {name}: {error}")
        elif outcome == "passed" and heading is not None:
            wrong.append(f"passes, and is in the list under {heading!r}: {name}")
        counts[part, outcome] += 1
    for part in sorted({part for part, _ in counts}):
        print(f"{part}: {', '.join(f'{number} {outcome}' for (of, outcome), number in sorted(counts.items()) if of == part)}")
    for heading, number in by_reason.most_common():
        print(f"  {number:4} {heading}")
    print(*wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
