"""The harness of tests/libraries says when a library works and when it does not, and its table keeps what was found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from libraries import run
from libraries.harness import CHECKS, same, try_case
from libraries.points import CASES, forward
from ranks import Ranks

HERE = Path(__file__).parents[1] / "libraries"
GOOD = CASES[0]


class Forgetful(torch.optim.SGD):
    """Its rate depends on a number that is not in its state."""

    calls = 0

    def step(self) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = 0.01 * self.calls
        super().step()


class Counting:
    """A forward whose loss is another one whenever it was called before."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: Any, batch: Any) -> Any:
        self.calls += 1
        output = forward(model, batch)
        return output._replace(loss=output.loss * self.calls)


@pytest.mark.slow
def test_a_case_of_plain_torch_passes() -> None:
    """Bitwise where it runs in one process, and equal to rounding on two; weights in three ways."""
    with Ranks() as ranks:
        found = try_case("points", GOOD, ranks)
    assert [*found] == [*CHECKS]
    assert [found[check] for check in ("one", "four", "killed", "weights")] == ["bitwise"] * 3 + ["3 ways"]
    assert found["ranks"] == "bitwise" or float(found["ranks"]) < 1e-12


@pytest.mark.slow
def test_what_does_not_work_is_said() -> None:
    """Each check can fail; one that is known to fail must, and one with a reason is not tried."""
    forgets = replace(GOOD, optimizer=lambda model: Forgetful(model.parameters(), lr=0.01))
    with Ranks() as ranks:
        assert try_case("", forgets, ranks, ["one", "killed"])["killed"].startswith("FAILED: AssertionError: losses")
        assert try_case("", replace(forgets, known={"killed": "why"}), ranks, ["killed"]) == {"killed": "known: why"}
        assert try_case("", replace(GOOD, known={"one": "why"}), ranks, ["one"])["one"].startswith("FAILED: passes (bitwise)")
        assert try_case("", replace(GOOD, not_tried={"one": "why"}), ranks, ["one"]) == {"one": "not tried: why"}
        differs = try_case("", replace(GOOD, forward=Counting()), ranks, ["one", "four"])
        assert all("away from the loop by hand" in result for result in differs.values())


@pytest.mark.parametrize(
    ("one", "two", "equal"),
    [
        (torch.zeros(2), torch.zeros(2), True),
        (torch.zeros(2), -torch.zeros(2), False),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), False),
        (torch.tensor([torch.nan]), torch.tensor([torch.nan]), True),
        (1.5, 1.5, True),
        (1, 2, False),
    ],
    ids=["same", "sign", "dtype", "nan", "number", "other"],
)
def test_leaves_are_compared_bit_by_bit(one: Any, two: Any, equal: bool) -> None:
    """The sign of zero and the dtype count."""
    assert same(one, two) is equal
    assert not isinstance(one, Tensor) or same(one, one)


def test_each_library_has_a_file_and_each_file_its_packages() -> None:
    """All with a version, and none is left over."""
    parts = {"harness", "run", "points"}
    assert {path.stem for path in HERE.glob("*.py")} - parts == {*run.wanted()}
    assert all("==" in package for packages in run.wanted().values() for package in packages)


def test_the_table_keeps_the_rows_of_other_libraries(tmp_path: Path) -> None:
    """In the order of packages.toml; a library's own rows are replaced."""
    table = tmp_path / "table.md"
    row = {"case": "a | b", "glue": 3, "checks": dict.fromkeys(CHECKS, "bitwise") | {"killed": "known: a|b"}}
    packages = run.wanted()
    for library in ("timm", "peft", "timm"):
        run.record({library: run.lines_of(packages[library], [row, row])}, table)
    lines = [line for line in table.read_text().splitlines() if line.startswith(("| timm", "| peft"))]
    assert [line.split()[1] for line in lines] == ["peft", "peft", "timm", "timm"]
    assert all(f"| bitwise | bitwise | bitwise | no: a/b | bitwise | 3 | {run.today()} |" in line for line in lines)


@pytest.mark.slow
@pytest.mark.skipif(not (run.ROOT / "constraints.txt").exists(), reason="looks at a checkout, and this is none")
def test_a_library_that_cannot_be_installed_is_reported(tmp_path: Path) -> None:
    """In one line, and nothing of it stays that would be taken for an environment."""
    place = tmp_path / "environments"
    reason = run.environment("absent", [str(tmp_path / "no-such-package.whl")], place)
    assert isinstance(reason, str)
    assert reason
    assert not (place / "absent/installed").exists()
