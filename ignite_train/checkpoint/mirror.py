"""A copy of the checkpoints in an object store, for runs whose disk may be lost with their machine.

A checkpoint is committed in the directory first. Then each rank copies its share of the files. When all have done so, rank 0
writes the manifest, the last object: that is the commit in the store, where a checkpoint without a manifest does not count. A
removal takes the manifest first. A start fetches the newest whole checkpoint, and the best, where the directory lacks them.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from glob import has_magic
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ignite_train.arguments import describe
from ignite_train.checkpoint.directory import CheckpointDirectory, Exchange, on_main, refuse_unreadable, together
from ignite_train.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    checked_json,
    compact_json,
    file_names,
    is_checkpoint_name,
    is_frozen_name,
    one_line,
    parse_manifest,
    reading_error,
)
from ignite_train.checkpoint.reader import CheckpointReader
from ignite_train.checkpoint.retention import Retention
from ignite_train.errors import CheckpointError, CheckpointFormatError, DamagedCheckpointError, LockTakenOverError
from ignite_train.ranks import collectives

__all__ = ["Mirror"]

_logger = logging.getLogger(__name__)
_WRITER = "writer.json"  # says which run copies to the store
_DAMAGED = f"damaged-{MANIFEST}"  # what the manifest of a damaged checkpoint is called; giving its name back undoes that
_CHUNK_BYTES = 16 * 2**20


class Mirror:
    """The same files under the same names as in the directory of the checkpoints, in a store that fsspec reaches.

    The store has no lock: the run that was started last is its writer, and an earlier run finds that out when it copies next.

    Args:
        url: where in the store, such as `s3://bucket/run`.

    Attributes:
        url: the same, without a name and a password in it.

    Raises:
        TypeError: `url` is not a string.
        ValueError: fsspec cannot open `url`, or a package is missing.
    """

    def __init__(self, url: str) -> None:
        self._store, self._root = _opened(url)
        self.url: str = self._store.unstrip_protocol(self._root)
        self._token = ""  # by which this run is the writer; empty before the first time
        self._manifests: dict[str, Manifest] = {}  # of the checkpoints in the store, by name
        self._folders: dict[str, list[str]] = {}  # that have no manifest, with what is in them
        self._frozen: list[str] = []
        self._has_warned = False

    def __str__(self) -> str:
        return f"the mirror {self.url}"

    @property
    def cache(self) -> Path:
        """Where on the disk a run that names this URL alone has its checkpoints: under its path, in the user's cache."""
        parts = [quote(part) for part in self.url.replace("://", "/").split("/") if part not in ("", ".", "..")]
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ignite_train" / "/".join(parts)

    # --- from the directory to the store ----------------------------------------------------------------------------------

    def send(self, directory: CheckpointDirectory, retention: Retention, exchange: Exchange) -> None:
        """Copies what the store lacks, the newest checkpoint first, and then removes there what `retention` does not keep.

        Collective over the ranks of `exchange`.

        Raises:
            CheckpointError: it failed, on all ranks alike. The next call does what is left.
        """
        for name, manifest in on_main(exchange, f"looking into {self}", partial(self._missing, directory, retention)):
            together(exchange, f"copying {name} to {self}", partial(self._put_share, directory, name, manifest))
            on_main(exchange, f"committing {name} in {self}", partial(self._commit, directory, name, manifest))
        if collectives.is_main_rank():
            self._prune(retention)

    def _missing(self, directory: CheckpointDirectory, retention: Retention) -> list[tuple[str, Manifest]]:
        """The checkpoints that the store lacks. Takes back a checkpoint there of the same name with other contents."""
        self._check_writer()
        self._scan()
        here = dict(directory.scan()[0])
        everywhere = self._manifests | here
        if here and _newest(here) < _newest(everywhere) and directory.later_than < _newest(everywhere):
            raise CheckpointError(
                f"{self} has a newer checkpoint than {directory.path}, and this run did not begin with it; resume from it with "
                "trainer.run, or choose another mirror"
            )
        directory.later_than = _newest(everywhere)
        stays = _kept(everywhere, retention)
        missing = [name for name in here if name in stays and self._manifests.get(name) != here[name]]
        for name in missing:
            if self._manifests.pop(name, None) is not None:
                self._store.rm_file(f"{self._root}/{name}/{MANIFEST}")
        return [(name, here[name]) for name in reversed(missing)]

    def _put_share(self, directory: CheckpointDirectory, name: str, manifest: Manifest) -> None:
        for file in _share(manifest):
            place, record = _place(name, file), manifest.files[file]
            if not is_frozen_name(file) or self._size(place) != record.size:  # a frozen file is named by what is in it
                self._store.put_file(str(directory.path / place), f"{self._root}/{place}")
                if (size := self._size(place)) != record.size:
                    raise CheckpointError(f"{file} has {size} bytes there, and {record.size} were written")

    def _commit(self, directory: CheckpointDirectory, name: str, manifest: Manifest) -> None:
        self._check_writer()
        self._store.put_file(str(directory.path / name / MANIFEST), f"{self._root}/{name}/{MANIFEST}")
        self._manifests[name] = manifest

    def _prune(self, retention: Retention) -> None:
        """Removes surplus checkpoints, what copies that were cut short have left, and frozen weights that none refers to."""
        try:
            stays = _kept(self._manifests, retention)
            for name in [name for name in self._manifests if name not in stays]:
                del self._manifests[name]
                self._store.rm_file(f"{self._root}/{name}/{MANIFEST}")
                self._store.rm(f"{self._root}/{name}", recursive=True)
            for name, files in self._folders.items():
                if name not in self._manifests and _DAMAGED not in files:
                    self._store.rm(f"{self._root}/{name}", recursive=True)
            used = {file for manifest in self._manifests.values() for file in manifest.files}
            for name in self._frozen:
                if name not in used:
                    self._store.rm_file(f"{self._root}/{name}")
        except Exception as error:
            if not self._has_warned:
                _logger.warning(f"old checkpoints could not be removed from {self}: {one_line(error)}")
            self._has_warned = True

    # --- from the store to the directory ----------------------------------------------------------------------------------

    def fetch(self, directory: CheckpointDirectory, retention: Retention, exchange: Exchange) -> None:
        """Becomes the writer, and fetches the newest whole checkpoint and the best, where the directory lacks them. Collective.

        A damaged one is set aside in the store, with a warning, and the one before is taken.

        Raises:
            CheckpointError: the store cannot be reached, or has only damaged checkpoints and the directory none.
        """
        on_main(exchange, f"reaching {self}", self._become_writer)
        look = partial(self._begin_fetching, directory, retention)
        while (found := on_main(exchange, f"looking into {self}", look)) is not None:
            name, manifest, unfinished = found
            get = partial(self._get_share, directory, unfinished, name, manifest)
            check = partial(_check_share, directory.path / unfinished / name, manifest)
            try:
                reasons = together(exchange, f"fetching {name} from {self}", get)
                if not any(reasons):
                    reasons = together(exchange, f"checking {name} of {self}", check)
                settle = partial(self._settle, directory, unfinished, name, "; ".join(filter(None, reasons)))
                on_main(exchange, f"taking over {name} of {self}", settle)
            finally:
                if collectives.is_main_rank():
                    directory.abandon(unfinished)

    def _begin_fetching(self, directory: CheckpointDirectory, retention: Retention) -> tuple[str, Manifest, str] | None:
        """The newest checkpoint that the directory lacks, and a new directory with its manifest; None if it lacks none."""
        self._scan()
        found, failed = directory.scan(afresh=True)
        refuse_unreadable(failed)
        here = dict(found)
        directory.later_than = _newest(self._manifests)
        wanted = _kept(self._manifests | here, replace(retention, last=1, every=None)) - here.keys()
        damaged = [name for name, files in self._folders.items() if _DAMAGED in files]
        if not here and not wanted and damaged:
            raise CheckpointError(
                f"{self} has no whole checkpoint and {len(damaged)} damaged, such as {damaged[-1]}: training does not start "
                f"from the beginning without being told to; repair it and rename its {_DAMAGED}, or choose another mirror"
            )
        if not wanted:
            return None
        name = max(wanted, key=lambda one: self._manifests[one].serial)
        unfinished = directory.begin()
        directory.disk.make_directory(directory.path / unfinished / name)
        sealed = self._store.cat_file(f"{self._root}/{name}/{MANIFEST}")
        directory.disk.write_file(directory.path / unfinished / name / MANIFEST, [memoryview(sealed)], len(sealed))
        return name, self._manifests[name], unfinished

    def _get_share(self, directory: CheckpointDirectory, unfinished: str, name: str, manifest: Manifest) -> str:
        """Fetches this rank's share of the files. Returns why they are damaged, or an empty string."""
        for file in _share(manifest):
            place, size = _place(name, file), manifest.files[file].size
            if (found := self._size(place)) != size:
                return f"it has no {file}" if found is None else f"{file} has {found} bytes, it was written with {size}"
            directory.disk.write_file(directory.path / unfinished / place, self._parts(place, size), size)
        return ""

    def _parts(self, place: str, size: int) -> Iterator[memoryview]:
        for start in range(0, size, _CHUNK_BYTES):
            end = min(start + _CHUNK_BYTES, size)
            yield memoryview(self._store.cat_file(f"{self._root}/{place}", start=start, end=end))

    def _settle(self, directory: CheckpointDirectory, unfinished: str, name: str, reason: str) -> None:
        if reason:
            self._set_aside(name)
            _logger.warning(f"{name} of {self} is damaged: {reason}; its manifest is renamed, and an older one is tried")
        else:
            directory.adopt(unfinished, name)
            _logger.info(f"fetched {name} from {self}")

    # --- what is in the store ---------------------------------------------------------------------------------------------

    def _scan(self) -> None:
        """Finds the checkpoints. The manifest of each is read once."""
        known, self._manifests, self._folders = self._manifests, {}, {}
        names = self._names(self._root)
        self._frozen = [name for name in names if is_frozen_name(name)]
        for name in filter(is_checkpoint_name, names):
            files = [] if name in known else self._names(f"{self._root}/{name}")
            manifest = known[name] if name in known else self._read_manifest(name) if MANIFEST in files else None
            if manifest is not None:
                self._manifests[name] = manifest
            else:
                self._folders[name] = [_DAMAGED if file == MANIFEST else file for file in files]

    def _read_manifest(self, name: str) -> Manifest | None:
        data = self._store.cat_file(f"{self._root}/{name}/{MANIFEST}")
        place = Path(self._root) / name
        try:
            return parse_manifest(data, place)
        except Exception as error:
            failure = reading_error(place, error)
        if isinstance(failure, CheckpointFormatError):
            raise failure
        _logger.warning(f"{name} of {self} is damaged: {failure.reason}; its manifest is renamed")
        self._set_aside(name)
        return None

    def _set_aside(self, name: str) -> None:
        """A damaged checkpoint does not count any more, and stays where it is."""
        self._manifests.pop(name, None)
        self._store.mv(f"{self._root}/{name}/{MANIFEST}", f"{self._root}/{name}/{_DAMAGED}")

    def _names(self, folder: str) -> list[str]:
        return sorted(path.rstrip("/").rpartition("/")[2] for path in self._store.ls(folder, detail=False))

    def _size(self, place: str) -> int | None:
        """The size of an object in bytes; None if it does not exist."""
        with suppress(FileNotFoundError):
            return int(self._store.size(f"{self._root}/{place}"))
        return None

    # --- one writer -------------------------------------------------------------------------------------------------------

    def _become_writer(self) -> None:
        token = os.urandom(8).hex()
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "token": token}
        try:
            self._store.pipe_file(f"{self._root}/{_WRITER}", compact_json(holder))
        except Exception as error:
            raise CheckpointError(
                f"{type(error).__name__}: {one_line(error)}; make it writable, or leave out mirror= to start with the "
                "directory alone"
            ) from error
        self._token = token

    def _check_writer(self) -> None:
        if not self._token:
            self._become_writer()
        try:
            holder = checked_json(self._store.cat_file(f"{self._root}/{_WRITER}"))
        except FileNotFoundError:
            self._become_writer()
            return
        if holder.get("token") != self._token:
            raise LockTakenOverError(
                f"pid {holder.get('pid')!r:.20} on host {holder.get('host')!r:.80} was started later with {self}; this run "
                "must not write there any more: end it, or give it another mirror"
            )


def _opened(url: Any) -> tuple[Any, str]:
    """The file system of fsspec for a URL, and the path in it."""
    if not isinstance(url, str):
        raise TypeError(f"mirror must be a URL such as 's3://bucket/run', got {describe(url)}")
    protocol, found, _ = url.partition("://")
    if not found:
        raise ValueError(f"mirror must be a URL such as 's3://bucket/run', got {url!r}")
    options = {"auto_mkdir": True} if protocol in ("file", "local") else {}
    try:
        from fsspec.core import url_to_fs

        store, root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **options)
    except ImportError as error:
        raise ValueError(
            f"mirror={url!r} needs a package that is not installed: {one_line(error)}; for s3:// pip install 'ignite_train[s3]'"
        ) from error
    except Exception as error:
        raise ValueError(f"mirror must be a URL that fsspec opens, got {url!r}: {one_line(error)}") from error
    if has_magic(root) and protocol not in ("file", "local"):  # a store would find the checkpoints of other runs by it too
        raise ValueError(f"mirror must be a URL whose path is without *, ? and [, got the path {root!r}")
    return store, root.rstrip("/")


def _place(name: str, file: str) -> str:
    """Where a file of a checkpoint lies, in the directory and in the store."""
    return file if is_frozen_name(file) else f"{name}/{file}"


def _ranks_taken(manifest: Manifest) -> range:
    """The ranks whose files of a checkpoint this rank copies: itself alone, where there are as many ranks as wrote it."""
    return range(collectives.rank(), manifest.world_size, collectives.world_size())


def _share(manifest: Manifest) -> list[str]:
    """The files that this rank copies, and its part of the frozen weights."""
    frozen = sorted(filter(is_frozen_name, manifest.files))
    return [
        *(file for part in _ranks_taken(manifest) for file in file_names(part)),
        *frozen[collectives.rank() :: collectives.world_size()],
    ]


def _check_share(path: Path, manifest: Manifest) -> str:
    """Reads each byte that this rank has fetched. Returns why the files are damaged, or an empty string."""
    try:
        with CheckpointReader(path) as reader:
            reader.verify(_ranks_taken(manifest))
    except DamagedCheckpointError as error:
        return error.reason
    return ""


def _newest(manifests: dict[str, Manifest]) -> int:
    return max((manifest.serial for manifest in manifests.values()), default=0)


def _kept(manifests: dict[str, Manifest], retention: Retention) -> set[str]:
    """The names of those that `retention` keeps."""
    surplus = set(retention.surplus([*manifests.values()]))
    return {name for place, name in enumerate(manifests) if place not in surplus}
