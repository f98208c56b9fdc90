"""What the library logs in a process in which pytest's `caplog` does not listen, such as that of a rank."""

from __future__ import annotations

import logging


def messages_from_here(level: int = logging.WARNING) -> list[str]:
    """A list to which each message of this level and above is appended from here on, until the process ends."""
    messages: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ignite_train").addHandler(handler)
    return messages
