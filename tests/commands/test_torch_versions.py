"""The record of the versions of torch says what pytest said."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import torch

import torch_versions


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("...\n3 passed in 1.2s\n", (3, 0, 0)),
        ("F.\n1 failed, 2913 passed, 3 skipped, 10 deselected, 2 warnings in 700.55s (0:11:40)\n", (2913, 1, 3)),
        ("ERROR x\n2 errors in 3.1s\n", (0, 2, 0)),
        ("1 failed, 1 passed, 1 error in 3.1s", (1, 2, 0)),
        ("", (0, 0, 0)),
    ],
)
def test_the_counts_are_those_of_the_last_line(printed: str, expected: tuple[int, int, int]) -> None:
    """Errors count as failures, and what is not said is 0."""
    assert tuple(torch_versions.counts(printed).values()) == expected


def test_a_row_takes_the_place_of_an_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row for each version and choice of tests, the newest version first: 2.10 is newer than 2.9."""
    monkeypatch.setattr(torch_versions, "TABLE", tmp_path / "table.md")
    for version, tests, passed in [("2.9.0", "all", 1), ("2.10.0", "all", 2), ("2.9.0", "all", 3), ("2.9.0", "test_a", 4)]:
        torch_versions.record(version, tests, {"passed": passed, "failed": 0, "skipped": 5})
    rows = re.findall(r"\| \S+ \| (\S+) \| \S+ \| (\S+) \| (\d) \| 0 \| 5 \|\n", (tmp_path / "table.md").read_text())
    assert rows == [("2.10.0", "all", "2"), ("2.9.0", "test_a", "4"), ("2.9.0", "all", "3")]


def test_what_torch_brings_with_it_is_not_constrained() -> None:
    """It may ask for other versions than those of constraints.txt: torch 2.11 wants setuptools before 82."""
    pinned = "# One environment.\nfilelock==4.2\nsetuptools==84.2.1\ntorch==2.13.0\ntyping_extensions==4.16\ntqdm==4.70\n"
    there = "filelock==4.1\nsetuptools==81.0.0\ntorch==2.11.0\ntyping-extensions @ file:///wheels/typing_extensions.whl\n"
    assert torch_versions.constrained(pinned, there) == "# One environment.\ntqdm==4.70\n"


@pytest.mark.skipif(not (torch_versions.ROOT / "pyproject.toml").exists(), reason="looks at a checkout, and this is none")
def test_this_torch_is_a_supported_one() -> None:
    """The oldest version is the one that pyproject.toml states, and the torch of this environment is not older."""
    project = tomllib.loads((torch_versions.ROOT / "pyproject.toml").read_text())["project"]
    stated = next(line for line in project["dependencies"] if line.startswith("torch"))
    assert stated.startswith(f"torch>={torch_versions.oldest().rpartition('.')[0]}")
    release = [int(part) for part in torch.__version__.partition("+")[0].split(".")[:2]]
    assert release >= [int(part) for part in torch_versions.oldest().split(".")[:2]]


@pytest.mark.skipif(not (torch_versions.ROOT / "docs").is_dir(), reason="looks at a checkout, and this is none")
def test_the_readme_states_the_oldest_and_the_newest() -> None:
    """The newest is the last that all tests were run with, and none of them failed."""
    table = (torch_versions.ROOT / "docs/torch_versions.md").read_text(encoding="utf-8")
    tried = re.findall(r"^\| [\d-]+ \| ([\d.]+) \| [\d.]+ \| all.* \| \d+ \| 0 \| \d+ \|$", table, flags=re.MULTILINE)
    newest = max(tried, key=lambda version: [int(part) for part in version.split(".")])
    oldest, newest = (version.rpartition(".")[0] for version in (torch_versions.oldest(), newest))
    readme = (torch_versions.ROOT / "README.md").read_text(encoding="utf-8")
    assert f"[torch ≥ {oldest}, tried up to {newest}](docs/torch_versions.md)" in readme
