"""The pictures of docs/gallery.md can be drawn again, and show what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from processes import DEADLINE_SECONDS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/gallery.py"

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="looks at a checkout, and here is none")


def drawn(what: str, picture: Path) -> str:
    command = [sys.executable, str(SCRIPT), what, "--output", str(picture)]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=True).stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    return printed


@pytest.mark.nightly
@pytest.mark.parametrize("what", ["cost", "scaling"])
def test_a_picture_is_drawn_from_the_results(what: str, tmp_path: Path) -> None:
    """With matplotlib, of the tables that are there."""
    drawn(what, tmp_path / f"{what}.png")


@pytest.mark.nightly
def test_killed_replicas_are_drawn(tmp_path: Path) -> None:
    """Four are killed, and the one that is not makes each update once, with the losses of the others."""
    pytest.importorskip("torchft", reason="elastic replicas need the extra ignite_train[elastic]")
    printed = drawn("elastic", tmp_path / "elastic.png")

    assert re.fullmatch(r"4 replicas killed, \d+ updates, each once: True, 0 losses differ between replicas\n", printed)


@pytest.mark.nightly
def test_no_kill_changes_a_loss(tmp_path: Path) -> None:
    """Of all updates, those that were made again too."""
    printed = drawn("kills", tmp_path / "kills.png")

    # How many are made again depends on whether the newest checkpoint was complete at the kill.
    assert re.fullmatch(r"\d+ updates, \d+ of them made again, 0 with another loss\n", printed)
