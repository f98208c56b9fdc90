"""The lock of a directory of checkpoints: one run at a time writes there, also if hosts share the file system.

The lock is a small file with host, process and a token of its own, in which a thread counts while the run lives. It needs no
locks of the operating system, which network file systems may lack: a start that finds a lock watches whether its count grows.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ignite_train.errors import CheckpointError, LockTakenOverError
from ignite_train.ranks.process import look_up, process_space

__all__ = ["HEARTBEAT_SECONDS", "LOCK", "STALE_SECONDS", "DirectoryLock", "writer_of"]

HEARTBEAT_SECONDS = 2.0
STALE_SECONDS = 12.0  # a lock whose count has not changed for this long is taken over
LOCK = ".lock.json"
_POLL_SECONDS = 0.05
_SIZE = 512  # bytes of the file, always: a count is written over the one before, in one call
_JOIN_SECONDS = 5.0

_logger = logging.getLogger(__name__)
_held_here: set[str] = set()  # tokens of the locks that this process holds


class DirectoryLock:
    """Holds a directory for one run of one process. Only one rank of a run holds it.

    A lock that a killed process of this host has left is taken over at once. On another host a process cannot be looked for:
    its lock is taken over when its count has stood still for `STALE_SECONDS`. A process that was suspended for that long
    learns of it at its next `check`, and commits nothing more.

    Args:
        directory: the directory.

    Attributes:
        token: names this holding of the lock; empty while it is not held.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self.token = directory, ""
        self._beats = 0
        self._held_in: tuple[int, ...] = ()  # process, device and number of the directory, when it was taken
        self._owner_may_wake = False  # of the lock that this one took over
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def path(self) -> Path:
        """The file."""
        return self.directory / LOCK

    def hold(self) -> None:
        """Takes the lock; if this object holds it already, checks that it still does. The directory must exist.

        Raises:
            CheckpointError: another run writes to the directory.
            OSError: the file cannot be written.
        """
        if self.token:
            self.check()
            return
        token = os.urandom(8).hex()
        self._take(token)
        self._held_in = os.getpid(), *_identity(self.directory)
        self.token, self._over = token, threading.Event()
        _held_here.add(token)
        self._thread = threading.Thread(target=self._beat, args=(token, self._over), name="CheckpointLock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Checks that the lock is still held by this run. A lock file that was removed is written again.

        Raises:
            LockTakenOverError: another run holds it.
            CheckpointError: this one has released it; or the directory is no longer the one in which it was taken.
        """
        if not self.token:
            raise CheckpointError(f"this run has ended and writes no more checkpoints to {self.directory}")
        found = _read(self.path)
        if self._is_own(found):
            return
        if _identity(self.directory) != self._held_in[1:]:
            raise CheckpointError(
                f"{self.directory} is not the directory to which this run has begun to save: that was renamed, removed, "
                "replaced or unmounted; put it back, or end this run and start it again"
            )
        if found is None and self._create(self.token):
            return
        found = found or _read(self.path)
        if not self._is_own(found):
            holder = _parsed(found or b"")
            raise LockTakenOverError(
                f"{_named(holder)} has taken over {self.directory} while this run stood still; this run must not write there "
                "any more: end it"
            )

    def _is_own(self, found: bytes | None) -> bool:
        return found is not None and _parsed(found).get("token") == self.token

    def release(self) -> None:
        """Releases the lock, if it is held. The file of another run stays, and so does that of a process that forked this."""
        token, self.token = self.token, ""
        if not token or self._held_in[0] != os.getpid():
            return
        self._over.set()
        try:
            if self._thread is not None and self._thread.is_alive():  # not where Ctrl-C came as it was started
                self._thread.join(_JOIN_SECONDS)
        finally:
            with suppress(OSError):
                if writer_of(self.directory) == token:
                    self._leave_mark() if self._owner_may_wake else self.path.unlink()
            _held_here.discard(token)

    def _leave_mark(self) -> None:
        """Marks the lock as released in its file, so that an earlier owner that wakes up sees that it has lost the lock."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW)
        _write_and_close(descriptor, json.dumps({"released": True}).encode().ljust(_SIZE - 1) + b"\n")

    def _take(self, token: str) -> None:
        seen, since = None, time.monotonic()
        while not self._create(token):
            found = _read(self.path)
            if found is None:  # released in between
                continue
            holder = _parsed(found)
            if holder.get("released"):
                self._take_over(token, found, "")
                self._owner_may_wake = True
                return
            if str(holder.get("token")) in _held_here:
                raise CheckpointError(
                    f"another Checkpoint of this process is writing to {self.directory}; give each its own directory"
                )
            if _is_gone(holder):
                self._take_over(token, found, "is no longer running")
                return
            if seen is not None and found != seen:
                raise CheckpointError(
                    f"{_named(holder)} writes checkpoints to {self.directory}; end that run, or choose another directory"
                )
            if seen is None:
                seen, since = found, time.monotonic()
                _logger.info(
                    f"{_named(holder)} holds {self.path}: waiting for up to {STALE_SECONDS:g} s to see whether it lives"
                )
            elif time.monotonic() - since >= STALE_SECONDS:
                self._take_over(token, found, f"has shown no sign of life for {STALE_SECONDS:g} s")
                self._owner_may_wake = True
                return
            time.sleep(_POLL_SECONDS)

    def _create(self, token: str) -> bool:
        """Creates the file; returns False if it exists already."""
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        except FileExistsError:
            return False
        try:
            _write_and_close(descriptor, _content(token, self._beats))
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        return True

    def _take_over(self, token: str, found: bytes, why: str) -> None:
        """Replaces the file by a new one: its owner, if it ever wakes up, counts in the old one, which has no name."""
        own = self.path.with_name(f"{LOCK}-{token}")
        descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        try:
            _write_and_close(descriptor, _content(token, self._beats))
            if _read(self.path) not in (found, None):
                raise CheckpointError(
                    f"another run has just taken over {self.directory}; end that run, or choose another directory"
                )
            own.rename(self.path)
        finally:
            own.unlink(missing_ok=True)
        if why:
            _logger.warning(f"{_named(_parsed(found))} {why}: this run takes over {self.directory}")

    def _beat(self, token: str, over: threading.Event) -> None:
        while not over.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):  # the disk may recover; each commit checks the lock
                self._count(token)

    def _count(self, token: str) -> None:
        """Writes to the file that it has opened and read, so never to one that has replaced it in between."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW)
        is_own = _parsed(os.pread(descriptor, _SIZE, 0)).get("token") == token
        self._beats += is_own
        _write_and_close(descriptor, _content(token, self._beats) if is_own else b"")


def writer_of(directory: Path) -> str:
    """The token in the lock file of a directory; empty if the file is missing or cannot be read."""
    with suppress(OSError):
        return str(_parsed(_read(directory / LOCK) or b"").get("token", ""))
    return ""


def _identity(directory: Path) -> tuple[int, ...]:
    """What tells a directory from another one at the same path; empty if there is none."""
    try:
        found = directory.stat()
    except (FileNotFoundError, NotADirectoryError):
        return ()
    return found.st_dev, found.st_ino


def _read(path: Path) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return os.read(descriptor, _SIZE)
    finally:
        os.close(descriptor)


def _write_and_close(descriptor: int, content: bytes) -> None:
    try:
        os.pwrite(descriptor, content, 0)
    finally:
        os.close(descriptor)  # network file systems show others what was written before this


def _content(token: str, beats: int) -> bytes:
    pid = os.getpid()
    holder = {"host": _host(), "space": _pid_space(), "pid": pid, "born": _born(pid)[0], "token": token, "beats": beats}
    return json.dumps(holder).encode().ljust(_SIZE - 1)[: _SIZE - 1] + b"\n"


def _parsed(content: bytes) -> dict[str, Any]:
    """What stands in a lock file; an empty mapping if it is invalid, or is just being written."""
    try:
        values = json.loads(content)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _named(holder: dict[str, Any]) -> str:
    """Who holds a lock, in printable characters and of limited length."""
    return f"pid {holder['pid']!r:.20} on host {holder.get('host')!r:.80}" if "pid" in holder else "another run"


def _is_gone(holder: dict[str, Any]) -> bool:
    """Whether the process is known to have ended: only one of this host, in the same space of process numbers, can be."""
    pid = holder.get("pid")
    if (holder.get("host"), holder.get("space")) != (_host(), _pid_space()) or type(pid) is not int or pid <= 0:
        return False
    if pid == os.getpid():
        return True  # a lock that this process holds is known by its token
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    born, state = _born(pid)
    return state in ("Z", "X") or (born != "" and born != holder.get("born", born))


def _host() -> str:
    return socket.gethostname().encode("ascii", "replace").decode()[:120]


def _pid_space() -> str:
    """Names the set of process numbers; empty if the kernel does not tell."""
    with suppress(OSError):
        return " ".join(process_space())[:120]
    return ""


def _born(pid: int) -> tuple[str, str]:
    """When a process was started, and its status, from the kernel; empty strings if it does not tell."""
    with suppress(OSError):
        status, began = look_up(pid)
        return began, status
    return "", ""
