"""Mistakes of a user, each of which must be answered in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Mistake = tuple[type[Exception], str, Callable[[], Any]]
"""The error, a pattern that its message has, and what makes the mistake."""


def assert_one_line(mistake: Mistake) -> None:
    """The error comes, and its message is one line and says what it must."""
    error, says, make = mistake
    with pytest.raises(error, match=says) as raised:
        make()
    assert "\n" not in str(raised.value)
