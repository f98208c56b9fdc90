"""The table of memory in docs/distributed.md: what its command measures is what the sizes of the parameters say."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from ranks import run_ranks

ROOT = Path(__file__).parents[2]
FOLDER, PAGE = ROOT / "benchmarks", ROOT / "docs/distributed.md"
WIDTH, LAYERS = 32, 2

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="looks at a checkout, which is not here")


def script() -> Any:
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))  # as when the script is started
    return importlib.import_module("sharding_memory")


def measured(way: str) -> tuple[int, int, int, int]:
    return tuple(script().measure(way, 1, WIDTH, LAYERS))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_what_is_measured_is_what_the_sizes_say() -> None:
    """AdamW has two moments of each element, and a count of 4 bytes for each tensor; the ranks divide what is sharded."""
    sizes = [parameter.numel() for parameter in script().build_model(WIDTH, LAYERS).parameters()]
    elements, counts = 4 * sum(sizes), 4 * len(sizes)
    replicas, zero_1, zero_2, zero_3, reduced = (run_ranks(measured, way) for way in script().WAYS)
    assert reduced == zero_3  # of one micro-batch
    assert [found[:3] for found in replicas] == [(elements, elements, 2 * elements + counts)] * 2
    assert [found[:2] for found in zero_1] == [(elements, elements)] * 2
    assert sum(found[2] for found in zero_1) == 2 * elements + counts
    for sharded in (zero_2, zero_3):
        assert [sum(parts) for parts in zip(*sharded, strict=True)][:3] == [elements, elements, 2 * elements + 2 * counts]
        assert max(found[0] for found in sharded) < 0.6 * elements
    most = [found[0][3] for found in (replicas, zero_1, zero_2, zero_3)]
    assert most == sorted(most, reverse=True)
    assert len(set(most)) == 4
    assert most[0] > 4 * elements


def test_the_page_has_a_row_for_each_way() -> None:
    """As the command writes them: megabytes, and the share of what replicas have."""
    text = PAGE.read_text(encoding="utf-8").partition(script().BEGIN)[2].partition(script().END)[0]
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith(("| `", "| the"))]
    assert [row[0].removeprefix("| ") for row in rows] == list(script().WAYS)
    shares = [[float(share) for share in re.findall(r"\((\d\.\d\d)\)", " ".join(row[1:]))] for row in rows]
    assert [len(row) for row in shares] == [5] * 5
    assert shares[0] == [1.0] * 5
    assert [row[:3] for row in shares[1:]] == [[1.0, 1.0, 0.5], [0.5, 0.5, 0.5], [0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]
