"""Every state of a disk that a power cut can leave, from a record of what was asked of it. A model, and a pessimistic one.

What was not waited for may be lost, or not, in any combination: of a file its bytes (none, half, all of them, or zeros in
their place), of a directory each name that came or went, a rename being two of those. What was waited for is there for ever.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any

from ignite_train.checkpoint.disk import Disk

Operation = tuple[str, *tuple[Any, ...]]
Tree = dict[str, Any]
"""What is in a directory: bytes are a file, another tree is a directory."""


class Recorder(Disk):
    """Writes down all that is asked of it, and does it, but for the waiting.

    Args:
        root: paths are noted relative to it. It counts as durable.

    Attributes:
        log: the operations.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log: list[Operation] = []
        self._open: dict[int, str] = {}

    def note(self, kind: str, *arguments: Any) -> None:
        self.log.append((kind, *[str(a.relative_to(self.root)) if isinstance(a, Path) else a for a in arguments]))

    def make_directory(self, path: Path) -> None:
        super().make_directory(path)
        self.note("make_directory", path)

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        self._open[descriptor] = str(path.relative_to(self.root))
        self.note("create", path)
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> None:
        super().write(descriptor, data)
        self.note("write", self._open[descriptor], bytes(data))

    def sync(self, descriptor: int) -> None:
        self.note("sync", self._open[descriptor])

    def close(self, descriptor: int) -> None:
        super().close(descriptor)
        self.note("close", self._open.pop(descriptor))

    def link(self, source: Path, target: Path) -> None:
        super().link(source, target)
        self.note("link", source, target)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.note("rename", source, target)

    def sync_directory(self, path: Path) -> None:
        self.note("sync_directory", path)

    def remove_file(self, path: Path, parent: int) -> None:
        super().remove_file(path, parent)
        self.note("remove", path)

    def remove_directory(self, path: Path, parent: int) -> None:
        super().remove_directory(path, parent)
        self.note("remove", path)


@dataclass(eq=False)
class _File:
    data: bytes = b""
    is_durable: bool = False

    def states(self) -> Iterator[bytes]:
        half = len(self.data) // 2
        yield self.data
        if not self.is_durable:
            yield from {b"", self.data[:half], bytes(len(self.data)), self.data[:half] + bytes(len(self.data) - half)}


@dataclass(eq=False)
class _Directory:
    entries: dict[str, _File | _Directory] = field(default_factory=dict)
    durable: dict[str, _File | _Directory] = field(default_factory=dict)
    pending: list[tuple[str, _File | _Directory | None]] = field(default_factory=list)

    def change(self, name: str, node: _File | _Directory | None) -> None:
        self.pending.append((name, node))
        if node is None:
            del self.entries[name]
        else:
            self.entries[name] = node

    def sync(self) -> None:
        self.durable, self.pending = dict(self.entries), []

    def find(self, path: str) -> tuple[_Directory, str]:
        """The directory in which the last part of a path is a name."""
        *parents, name = Path(path).parts or ("",)
        here = self
        for parent in parents:
            there = here.entries[parent]
            assert isinstance(there, _Directory)
            here = there
        return here, name

    def states(self) -> Iterator[Tree]:
        subsets = chain.from_iterable(combinations(self.pending, count) for count in range(len(self.pending), -1, -1))
        for subset in subsets:
            entries: dict[str, Any] = {**self.durable}
            for name, node in subset:
                entries[name] = node
            there = {name: node for name, node in entries.items() if node is not None}
            for chosen in product(*[[*node.states()] for node in there.values()]):
                yield dict(zip(there, chosen, strict=True))


def disk_states(log: list[Operation], *, after_commit: bool = False) -> Iterator[tuple[Tree, Any]]:
    """Each state that is possible somewhere in `log`, with the last thing noted as `returned` before; each only once.

    `after_commit`: only from where something is noted as `returned`.
    """
    root, returned, seen = _Directory(), None, set()
    for operation in [("start",), *log]:
        returned = operation[1] if operation[0] == "returned" else returned
        _apply(root, operation)
        for tree in root.states() if returned is not None or not after_commit else ():
            key = (returned, _frozen(tree))
            if key not in seen:
                seen.add(key)
                yield tree, returned


def _apply(root: _Directory, operation: Operation) -> None:
    kind, *arguments = operation
    if kind in ("start", "returned", "close"):
        return
    here, name = root.find(arguments[0])
    if kind in ("make_directory", "create"):
        here.change(name, _Directory() if kind == "make_directory" else _File())
    elif kind == "remove":
        here.change(name, None)
    elif kind == "rename":
        target, new_name = root.find(arguments[1])
        node = here.entries[name]
        here.change(name, None)
        target.change(new_name, node)
    elif kind == "link":
        target, new_name = root.find(arguments[1])
        target.change(new_name, here.entries[name])
    elif kind == "sync_directory":
        node = here.entries[name] if name else here
        assert isinstance(node, _Directory)
        node.sync()
    else:
        file = here.entries[name]
        assert isinstance(file, _File)
        file.data, file.is_durable = file.data + b"".join(arguments[1:]), kind == "sync"


def _frozen(tree: Tree) -> Any:
    return tuple((name, _frozen(node) if isinstance(node, dict) else hash(node)) for name, node in sorted(tree.items()))


def lay_out(tree: Tree, directory: Path) -> None:
    """Makes the files of a state, in a directory that is there."""
    for name, node in tree.items():
        if isinstance(node, dict):
            (directory / name).mkdir()
            lay_out(node, directory / name)
        else:
            descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT)
            os.write(descriptor, node)
            os.close(descriptor)
