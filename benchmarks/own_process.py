"""A function in a process of its own, with which one talks by messages: what it breaks there breaks nothing here."""

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

_SECONDS_TO_END = 5.0


class ProcessFailedError(Exception):
    """The function raised, its process died, or it did not answer."""


@dataclass(frozen=True)
class Failure:
    """Says as an answer that something was raised, and what."""

    text: str

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """In one line that fits into a table; all of it goes to stderr."""
        traceback.print_exception(error)
        lines = str(error).strip().splitlines()
        said = f"{type(error).__name__}: {lines[0] if lines else ''}".replace("|", "/")
        return cls(f"{said[:200]} ...") if len(said) > 200 else cls(said)


class OwnProcess:
    """Calls `function(connection, *arguments)` in a new process.

    Args:
        function: can be pickled, as its arguments; it answers each message with one of its own.
        arguments: of the function.
    """

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")  # a process that has used CUDA must not be forked
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, function, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, message: Any) -> None:
        """Sends a message, for which `receive` has the answer.

        Raises:
            ProcessFailedError: the process has ended.
        """
        try:
            self._connection.send(message)
        except OSError as error:
            raise ProcessFailedError(self._how_it_ended()) from error

    def receive(self, timeout: float) -> Any:
        """The next answer.

        Raises:
            ProcessFailedError: the answer is a `Failure`; or there was none in so many seconds, and the process is ended.
        """
        try:
            if not self._connection.poll(timeout):
                self._process.kill()
                raise ProcessFailedError(f"it did not answer within {timeout:.0f} s")
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise ProcessFailedError(self._how_it_ended()) from error
        if isinstance(answer, Failure):
            raise ProcessFailedError(answer.text)
        return answer

    def _how_it_ended(self) -> str:
        self._process.join(_SECONDS_TO_END)
        return f"its process ended with status {self._process.exitcode}"

    def end(self) -> None:
        """Ends the process in every case, and gives its memory back."""
        self._connection.close()
        self._process.kill()
        self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()


def one_after_the_other(
    function: Callable[..., None], arguments: dict[str, tuple[Any, ...]], *, until: float, timeout: float
) -> Iterator[tuple[str, Any]]:
    """Names and answers to the message "begin", of processes that are all there from the beginning and work in turn.

    Args:
        function: see `OwnProcess`.
        arguments: of the process of each name.
        until: when no further process begins, by `time.perf_counter`.
        timeout: seconds to wait for each answer.

    Yields:
        Name and answer; where a process has not answered, a string with the reason.
    """
    with ExitStack() as stack:
        processes = {name: stack.enter_context(OwnProcess(function, *given)) for name, given in arguments.items()}
        for name, process in processes.items():
            if time.perf_counter() > until:
                yield name, "left out: the time was over"
                continue
            try:
                process.send("begin")
                answer = process.receive(timeout)
            except ProcessFailedError as error:
                answer = f"failed: {error}"
            finally:
                process.end()
            yield name, answer


def _run(connection: Connection, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.dup2(2, 1)  # what a contestant prints does not belong in a table
    sys.stdout = sys.stderr
    try:
        function(connection, *arguments)
    except EOFError:
        return  # the other side has gone
    except Exception as error:
        connection.send(Failure.of(error))
