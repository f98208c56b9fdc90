"""The script of docs/start.md after each of its steps: a block of Python, and blocks that say which lines come and go."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/start.md"

_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
_BLOCK = re.compile(r"^```(python|diff)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def changed(script: str, difference: str) -> str:
    """The script with the lines marked `+` and without those marked `-`; the others say where.

    Raises:
        ValueError: the script does not have the lines that are not new, or has them twice.
    """
    before = "".join(f"{line[1:]}\n" for line in difference.splitlines() if line[0] != "+")
    after = "".join(f"{line[1:]}\n" for line in difference.splitlines() if line[0] != "-")
    if f"\n{script}".count(f"\n{before}") != 1:
        raise ValueError(f"the script does not have these lines once:\n{before}")
    return f"\n{script}".replace(f"\n{before}", f"\n{after}")[1:]


def scripts() -> dict[str, str]:
    """The whole script by the heading of the step, in the order of the page."""
    _, *parts = _HEADING.split(PAGE.read_text(encoding="utf-8"))
    found, script = {}, ""
    for heading, text in zip(parts[::2], parts[1::2], strict=True):
        blocks = _BLOCK.findall(text)
        for kind, block in blocks:
            script = block if kind == "python" else changed(script, block)
        if blocks:
            found[heading] = script
    return found
