"""Putting things back although Ctrl-C comes in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["in_full", "put_entries_back"]


def in_full(put_back: Callable[[], object]) -> None:
    """Calls a function that puts back what something has changed; where it is broken off, by Ctrl-C say, once more.

    In a notebook the next run would begin with what is half put back, and give no message. What runs in each update has the
    same lines in place of this call.

    Args:
        put_back: may be called twice, and may have come to any place in it the first time.

    Raises:
        BaseException: what has broken it off, when it was called again; or what it raises itself.
    """
    try:
        put_back()
    except BaseException:
        put_back()
        raise


def put_entries_back(now: dict[Any, Any], before: Mapping[Any, Any]) -> None:
    """Gives a dictionary the entries that it had, in their order. It is never empty meanwhile.

    Args:
        now: the dictionary, such as the attributes of an object.
        before: a copy of it as it was.
    """
    now.update(before)
    for name in [name for name in now if name not in before]:
        del now[name]
    if [*now] != [*before]:  # one was missing, and stands at the end
        for name in before:
            now[name] = now.pop(name)
