"""Records that ranks leave for one another in the store at which they met, and that no stranger can write."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ignite_train.internals.of_distributed import default_store
from ignite_train.ranks import collectives
from ignite_train.ranks.unlike_ranks import Description, refuse_unlike_ranks

__all__ = ["SealedMessages"]

_ABSENT = "-"  # never a record: those have a space in them
_NAME_BYTES, _SECRET_BYTES = 8, 24
_TRIES = 3  # to take a place that a stranger has written to


class SealedMessages:
    """Named records of the ranks of one run, in a fresh corner of the store, by a connection of its own.

    torch's store has no password: a process that reaches its port can read and write all of it. So each record
    carries a code that is made of its name, its content and a secret (HMAC-SHA256). Rank 0 draws the secret and the others
    get it through a collective; it never lies in the store. A record with a wrong code counts as absent, and so does a record
    that cannot be read at all, that was copied to another name, or that is older and was written back. Deleting records, or
    writing over them, can still keep the ranks from hearing of one another.

    For a thread that must not wait for what others ask the store. What an earlier attempt of the job left there is not seen:
    torchrun gives restarted ranks the store of those that failed.

    Args:
        store: of this thread alone.
        secret: the same on all ranks.

    Attributes:
        host_rank: the rank whose process holds the store; None if it is a file, or in the process of the launcher.
        host: who holds it, in words: a rank, the launcher or a file.
    """

    def __init__(self, store: Store, secret: bytes) -> None:
        self._store, self._secret = store, secret
        self._there: set[str] = set()  # names that have been written: `multi_get` waits for those that have not
        self._written = 0
        self._latest: dict[str, int] = {}  # by name, the number of the latest record that was read
        over_tcp = isinstance(_bottom(store), dist.TCPStore)  # type: ignore[attr-defined]
        of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.host_rank = 0 if over_tcp and not of_launcher else None
        self.host = "rank 0" if self.host_rank == 0 else "the launcher" if over_tcp else "the file where the ranks met"

    @classmethod
    def start(cls, describe: Callable[[], Description] = Description) -> SealedMessages | None:
        """Opens the same corner on all ranks; None in a single process. Collective.

        Args:
            describe: gives what must be the same on all ranks; see `refuse_unlike_ranks`.

        Raises:
            ValueError: it is not.
        """
        if collectives.world_size() == 1 or not dist.is_initialized():
            return None
        drawn = refuse_unlike_ranks(describe(), os.urandom(_NAME_BYTES + _SECRET_BYTES))
        store: Store = default_store().clone()
        return cls(PrefixStore(f"ignite_train/{drawn[:_NAME_BYTES].hex()}", store), drawn[_NAME_BYTES:])

    def has(self, name: str) -> bool:
        """Whether something lies there, a stranger's perhaps. One request to the store."""
        return self._store.check([name])

    def write(self, name: str, value: Any) -> None:
        """Leaves `value` there, of which JSON must know the type, in place of what lay there."""
        self._written += 1
        self._store.set(name, self._seal(name, self._written, value))

    def write_once(self, name: str, value: Any) -> Any:
        """Leaves `value` there if no rank has left anything yet, and returns what lies there then."""
        record = self._seal(name, 0, value)
        for _ in range(_TRIES):
            held = self._store.compare_set(name, "", record)
            if held == record.encode():
                break
            found = self._unseal(name, held)
            if found is not None:
                return found
            self._store.delete_key(name)  # a stranger's
        return value

    def read(self, name: str) -> Any:
        """The latest value that a rank has left there; None if no rank has. Does not wait for one."""
        return self._unseal(name, self._store.compare_set(name, _ABSENT, _ABSENT))  # the one read of a store that never waits

    def read_all(self, names: Iterable[str]) -> dict[str, Any]:
        """The values that ranks have left under these names; two requests to the store, one for each name if one is missing."""
        names = list(names)
        new = [name for name in names if name not in self._there]
        all_there = not new or self._store.check(new)
        there = names if all_there else [name for name in names if name in self._there or self.has(name)]
        self._there.update(there)
        records = self._store.multi_get(there) if there else []
        values = {name: self._unseal(name, record) for name, record in zip(there, records, strict=True)}
        return {name: value for name, value in values.items() if value is not None}

    def _seal(self, name: str, number: int, value: Any) -> str:
        content = json.dumps([number, value])
        return f"{self._code(name, content)} {content}"

    def _code(self, name: str, content: str) -> str:
        return hmac.new(self._secret, f"{name} {content}".encode(), hashlib.sha256).hexdigest()

    def _unseal(self, name: str, record: bytes) -> Any:
        code, _, content = record.decode(errors="replace").partition(" ")
        if not hmac.compare_digest(code.encode(), self._code(name, content).encode()):
            return None
        number, value = json.loads(content)
        if number < self._latest.get(name, 0):
            return None
        self._latest[name] = number
        return value


def _bottom(store: Store) -> Store:
    """The store under all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
