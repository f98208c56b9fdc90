"""`make demo` on an old Python: it says so before it makes or downloads anything."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from processes import DEADLINE_SECONDS

MAKEFILE = Path(__file__).parents[2] / "Makefile"

pytestmark = pytest.mark.skipif(
    not MAKEFILE.is_file() or shutil.which("make") is None, reason="looks at a checkout, and needs make"
)

# An interpreter that says that it is Python 3.10, and leaves a file if it is asked for anything but its version.
OLD_PYTHON = f"""#!/bin/sh
test "$1" = -c || {{ touch called; exit 1; }}
exec {sys.executable} -c 'import sys; sys.version_info = (3, 10, 4); exec(sys.argv[1])' "$2"
"""


def test_an_old_python_is_refused_before_anything_is_installed(tmp_path: Path) -> None:
    """One line with the version that is needed, the one that was found and what to do; no environment is begun."""
    shutil.copy(MAKEFILE, tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    python = tmp_path / "python3.10"
    python.write_text(OLD_PYTHON, encoding="utf-8")
    python.chmod(0o755)
    result = subprocess.run(
        ["make", "demo", f"PYTHON={python}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )

    assert result.returncode != 0
    assert f"Python 3.11 or newer is needed, {python} is 3.10; name another one: make PYTHON=python3.12" in result.stderr
    assert not (tmp_path / "called").exists()
    assert not (tmp_path / ".venv").exists()
