"""Ctrl-C at an exact place, where Python raises it: as a function is entered, or as what it has called in C returns."""

from __future__ import annotations

import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_TIMES = 2  # that one place is come to, which stand for all later ones


def _codes(function: Any) -> Iterator[CodeType]:
    """The code of a function, below its decorators, and of the functions inside it."""
    found = function if isinstance(function, CodeType) else inspect.unwrap(function).__code__
    yield found
    for constant in found.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


@contextmanager
def pressed(number: int, *functions: Callable[..., Any] | Path) -> Iterator[list[str]]:
    """Raises KeyboardInterrupt at a place of these functions, once.

    Generator expressions have no place: they are entered also where Python drops them, and then it ignores errors.

    Args:
        number: of the place, from 1, counted as they come, each in the first times only; 0: at none.
        functions: in which they are counted, with the functions that are written inside them; a folder stands for all in it.

    Yields:
        A list that has the place when it was come to.
    """
    folders = tuple(f"{one}{os.sep}" for one in functions if isinstance(one, Path))
    codes = {code for one in functions if not isinstance(one, Path) for code in _codes(one)}
    left, found, times = [number], list[str](), Counter[Any]()

    def is_place(code: CodeType) -> bool:
        return code.co_name != "<genexpr>" and (code in codes or code.co_filename.startswith(folders))

    def look(frame: FrameType, event: str, called: Any) -> None:
        if event in ("call", "c_return") and is_place(frame.f_code):
            times[frame.f_code, frame.f_lasti, event] += 1
            left[0] -= times[frame.f_code, frame.f_lasti, event] <= _TIMES
            if left[0] == 0:
                sys.setprofile(None)
                what = "entered" if event == "call" else f"after {called.__name__}"
                found.append(f"{frame.f_code.co_qualname}:{frame.f_lineno} {what}")
                raise KeyboardInterrupt

    sys.setprofile(look if number else None)
    try:
        yield found
    finally:
        sys.setprofile(None)


def at_each_place(run: Callable[[Callable[[], Any]], Any], *functions: Callable[..., Any] | Path) -> dict[str, Any]:
    """What `run` gives where Ctrl-C comes at each place of these functions, by place; and under "nowhere" without it.

    Args:
        run: is given what makes the `with` in which Ctrl-C may come, and catches the KeyboardInterrupt.
        functions: see `pressed`.
    """
    outcomes = {"nowhere": run(lambda: pressed(0))}
    for number in count(1):
        places = list[list[str]]()

        @contextmanager
        def pressing(number: int = number, places: list[list[str]] = places) -> Iterator[None]:
            with pressed(number, *functions) as found:
                places.append(found)
                yield

        outcome = run(pressing)
        if not places[0]:
            return outcomes
        outcomes[f"{number}: {places[0][0]}"] = outcome
    raise AssertionError


def unlike(outcomes: dict[str, Any]) -> list[str]:
    """The places at which the outcome is another one than without Ctrl-C. There must be some places."""
    assert len(outcomes) > 1
    return [place for place, outcome in outcomes.items() if outcome != outcomes["nowhere"]]
