"""A method that is called without keeping its object alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import Generic, ParamSpec, TypeVar

__all__ = ["WeakMethod"]

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class WeakMethod(Generic[_Given, _Result]):
    """Calls a method of an object that is held elsewhere, so that what an object gives its parts makes no cycle with it.

    Args:
        method: of an object that lives as long as this is called.
    """

    def __init__(self, method: Callable[_Given, _Result]) -> None:
        assert isinstance(method, MethodType)  # noqa: S101
        self._object, self._function = weakref.ref(method.__self__), method.__func__

    def __call__(self, *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        """Calls the method and returns its result."""
        result: _Result = self._function(self._object(), *args, **kwargs)
        return result
