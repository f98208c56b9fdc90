"""A checkpoint from somebody who means harm: refused in one line, nothing of it is run, nothing outside of it is touched.

Each is forged so that its checksums are right, and only the malice is wrong.
"""

from __future__ import annotations

import enum
import errno
import json
import math
import os
import pickle
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ignite_train import CheckpointError, ForwardOutput, checkpoint, create_trainer
from ignite_train.checkpoint.directory import CheckpointDirectory
from ignite_train.checkpoint.disk import Disk
from ignite_train.checkpoint.manifest import checked_json, compact_json, open_regular, reading_error
from ignite_train.checkpoint.reader import CheckpointReader
from ignite_train.checkpoint.resume import read_agreed
from ignite_train.checkpoint.tensor_files import (
    Box,
    Entry,
    Piece,
    TensorFile,
    assemble,
    check_cover,
    check_entries,
    write_tensors,
)
from ignite_train.checkpoint.tree import DTYPES, MAX_DEPTH, MAX_NODES, TreeEncoder, decode
from ignite_train.checkpoint.writer import Snapshot
from ignite_train.errors import DamagedCheckpointError
from ignite_train.handlers import Checkpoint
from ignite_train.model.memory_layout import as_bytes
from ignite_train.model.random_state import capture_random_state, check_generators, restore_random_state
from small_checkpoints import contents, put_together, save, taken_apart

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # said once, by whoever is first

Values = dict[str, Any]
FORBIDDEN = (
    *("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.putenv", "pty.spawn"),
    *("socket.connect", "socket.bind", "socket.getaddrinfo", "urllib.Request", "ctypes.dlopen", "pickle.find_class"),
    *("exec", "compile", "marshal.loads", "shutil.rmtree", "os.symlink", "os.chmod", "os.truncate"),
)
_heard: list[str] = []
_listening = [False]


def _listen(event: str, _arguments: Any) -> None:
    if _listening[0] and event in FORBIDDEN:
        _heard.append(event)


class Payload:
    """Touches a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


def _forward(model: nn.Module, x: Tensor) -> ForwardOutput:
    return ForwardOutput(model(x).square().sum(), len(x))


def start(directory: Path) -> tuple[list[Any], Checkpoint]:
    """A run as a new process has it: what is moved, and its `Checkpoint`."""
    torch.manual_seed(7)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = create_trainer(model, optimizer, _forward)
    saver = Checkpoint(directory, every=1, config={"depth": 2})
    saver.attach(trainer)
    return [model, optimizer, trainer], saver


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that was not changed."""
    parts, saver = start(tmp_path_factory.mktemp("honest"))
    parts[-1].run([torch.randn(5, 4)] * 3, max_epochs=1)
    assert saver.latest is not None
    checkpoint.verify(saver.latest)
    return saver.latest


@pytest.fixture(scope="module")
def ear() -> None:
    """Hears what the interpreter is about to do; a hook stays for ever, so it is told when to listen."""
    if _listen not in _hooks:
        _hooks.append(_listen)
        sys.addaudithook(_listen)


_hooks: list[Any] = []


class Forgery:
    """A copy of a checkpoint whose files can be changed; `seal` makes the checksums right again."""

    def __init__(self, path: Path, canary: Path) -> None:
        self.path, self.canary = path, canary
        self.manifest: Values = json.loads((path / "manifest.json").read_bytes())["manifest"]
        self.index: Values = json.loads((path / "rank-00000.json").read_bytes())
        self.header, self.numbers = taken_apart(self.tensors.read_bytes())
        self.raw_index: bytes | None = None
        self.raw_manifest: bytes | None = None
        self.is_recorded = True  # the tensors, in the manifest, as they are

    @property
    def tensors(self) -> Path:
        return self.path / "rank-00000.safetensors"

    def entry(self) -> Values:
        """What the header says of the weight."""
        found: Values = self.header["model['weight']"]
        return found

    def note(self) -> Values:
        """What the index says of it."""
        found: Values = self.index["tensors"]["model['weight']"]
        return found

    def tree(self, name: str) -> Any:
        return self.index["objects"][name]

    def value(self, *path: Any) -> list[Any]:
        """The pair of key and value in a tree of dicts."""
        name, *keys = path
        here, pair = self.index["objects"][name], None
        for key in keys:
            pair = next(pair for pair in here["dict"] if pair[0] == key)
            here = pair[1]
        assert pair is not None
        return pair

    def seal(self) -> None:
        index = compact_json(self.index) if self.raw_index is None else self.raw_index
        (self.path / "rank-00000.json").write_bytes(index)
        files = self.manifest.get("files")
        if isinstance(files, dict) and isinstance(files.get("rank-00000.json"), dict):
            files["rank-00000.json"] = {"size": len(index), "crc32": zlib.crc32(index)}
        file, record = put_together(self.header, self.numbers)
        self.tensors.write_bytes(file)
        if self.is_recorded and isinstance(files, dict):
            files["rank-00000.safetensors"] = record
        self.seal_manifest()

    def seal_manifest(self) -> None:
        body = json.dumps(self.manifest).encode() if self.raw_manifest is None else self.raw_manifest
        (self.path / "manifest.json").write_bytes(b'{"crc32":"%08x","manifest":%b}\n' % (zlib.crc32(body), body))


Forge = Callable[[Forgery], Any]
KINDS: dict[str, Forge] = {}


def kind(name: str) -> Callable[[Forge], Forge]:
    """Adds a kind of malice."""

    def add(forge: Forge) -> Forge:
        KINDS[name] = forge
        return forge

    return add


def _set(keys: tuple[str, ...], value: Any) -> Forge:
    def forge(forgery: Forgery) -> None:
        here: Any = forgery
        here = getattr(here, keys[0])
        here = here() if callable(here) else here
        for key in keys[1:-1]:
            here = here[key]
        here[keys[-1]] = value

    return forge


def _record(**fields: Any) -> Forge:
    """Another record of the tensors in the manifest."""

    def forge(forgery: Forgery) -> None:
        forgery.is_recorded = False
        forgery.manifest["files"]["rank-00000.safetensors"].update(fields)

    return forge


def _replaced_by(name: str, make: Callable[[Path, Forgery], Any]) -> Forge:
    """Puts something else in the place of a file, after sealing."""

    def forge(forgery: Forgery) -> Callable[[], None]:
        def later() -> None:
            (forgery.path / name).rename(forgery.path / "aside")
            make(forgery.path / name, forgery)

        return later

    return forge


# names that lead elsewhere, and things that are not files
for _label, _name in {
    "a path out of the directory": "../../etc/passwd",
    "an absolute path": "/etc/passwd",
    "a name with a zero byte": "rank-00000.json\0.safetensors",
    "another suffix": "rank-00000.pt",
}.items():
    KINDS[_label] = lambda forgery, name=_name: forgery.manifest["files"].update({name: {"size": 10, "crc32": 0}})
    KINDS[f"{_label} instead"] = lambda forgery, name=_name: forgery.manifest["files"].update(
        {name: forgery.manifest["files"].pop("rank-00000.safetensors")}
    )
for _name in ("rank-00000.safetensors", "rank-00000.json", "manifest.json"):
    KINDS[f"{_name} is a link to its like"] = _replaced_by(_name, lambda path, _: path.symlink_to("aside"))
    KINDS[f"{_name} is a link to a device"] = _replaced_by(_name, lambda path, _: path.symlink_to("/dev/zero"))
    KINDS[f"{_name} is a pipe"] = _replaced_by(_name, lambda path, _: os.mkfifo(path))
    KINDS[f"{_name} is a directory"] = _replaced_by(_name, lambda path, _: path.mkdir())
    KINDS[f"{_name} is a pickle"] = _replaced_by(_name, lambda path, f: path.write_bytes(pickle.dumps(Payload(f.canary))))
    KINDS[f"{_name} is a file of torch.save"] = _replaced_by(_name, lambda path, f: torch.save(Payload(f.canary), path))

# counters, and what a manifest claims
for _key in ("update", "epoch", "serial", "world_size"):
    for _value in (-1, 2**53, 10**400, True, 1.0, "1", None, [1], {"dict": []}):
        KINDS[f"{_key} {_value!r:.12}"] = _set(("manifest", _key), _value)
for _value in (0, 2, 99_999, 100_000):
    KINDS[f"{_value} ranks"] = _set(("manifest", "world_size"), _value)
for _value in (10**9, 0, -1, "1", True, None, [1], {}):
    KINDS[f"format {_value!r}"] = _set(("manifest", "format"), _value)
for _value in ("0.5", True, 10**400, [0.5], {"float": "nan"}):
    KINDS[f"score {_value!r:.12}"] = _set(("manifest", "score"), _value)
for _value in ({"pickle": "gASVCgAAAA=="}, {"tensor": "model['weight']"}, {"dict": 5}, {"bytes": "$"}, {"a": 1, "b": 2}):
    KINDS[f"config {_value}"] = _set(("manifest", "config"), _value)
for _value in ([], {"torch": 2}, None):
    KINDS[f"versions {_value}"] = _set(("manifest", "versions"), _value)
for _value in ([], None, {}, {"rank-00000.json": 5, "rank-00000.safetensors": {"size": 1, "crc32": 0}}):
    KINDS[f"files {_value!s:.20}"] = _set(("manifest", "files"), _value)
for _value in (-1, 2**63, 2**50, True, 1.5, "10"):
    KINDS[f"size {_value!r}"] = _record(size=_value)
KINDS["a record without a checksum"] = _record(crc32=None)
KINDS["a record with a path"] = _record(path="/etc/passwd")
KINDS["the checksum of another header"] = _record(crc32=0)
KINDS["another field"] = _set(("manifest", "import"), "os")
KINDS["a manifest that is a list"] = lambda forgery: setattr(forgery, "raw_manifest", b"[]")
KINDS["a key twice"] = lambda f: setattr(f, "raw_manifest", json.dumps(f.manifest)[:-1].encode() + b',"update":3}')
for _constant in ("NaN", "Infinity", "-Infinity"):
    KINDS[f"{_constant} in a manifest"] = lambda f, c=_constant: setattr(
        f, "raw_manifest", json.dumps({**f.manifest, "score": "@"}).replace('"@"', c).encode()
    )
KINDS["an infinite score by a long exponent"] = lambda f: setattr(
    f, "raw_manifest", json.dumps({**f.manifest, "score": "@"}).replace('"@"', "1e999").encode()
)
KINDS["a number of 10,000 digits"] = lambda f: setattr(
    f, "raw_manifest", json.dumps({**f.manifest, "update": "@"}).replace('"@"', "9" * 10_000).encode()
)
KINDS["a manifest nested deeply"] = lambda f: setattr(
    f, "raw_manifest", json.dumps({**f.manifest, "config": "@"}).replace('"@"', "[" * 200_000 + "]" * 200_000).encode()
)
KINDS["a manifest that is not text"] = lambda f: setattr(f, "raw_manifest", b"\xff\xfe\x00" * 9)
KINDS["a manifest of 17 MB"] = _set(("manifest", "config"), "x" * 17 * 2**20)


# what header and index say of the tensors
def _huge(forgery: Forgery) -> None:
    begin = forgery.entry()["data_offsets"][0]
    forgery.entry().update(shape=[2**50], data_offsets=[begin, begin + 2**52])


def _added(forgery: Forgery, entry: Values, note: Values) -> None:
    forgery.header["x"], forgery.index["tensors"]["x"] = entry, note


KINDS["an entry of 2**52 bytes"] = _huge
KINDS["an entry of 2**52 bytes and a file that claims them"] = lambda f: (
    _huge(f),
    _record(size=f.tensors.stat().st_size - 48 + 2**52)(f),
)
KINDS["a part of a tensor of 2**50 numbers"] = lambda f: f.note().update(whole=[2**50, 4], start=[0, 0])
KINDS["an empty tensor with endless strides"] = lambda f: (
    _added(f, {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}, {"crc32": 0}),
    f.value("model", "bias")[1].update(tensor="x"),
)
IN_HEADER: dict[str, tuple[Any, ...]] = {
    "shape": ([3, -4], [3, 4.0], [True, 12], [2, 4], [5, 3], "34", None, [[3], [4]], [1] * 65, [2**63, 0]),
    "dtype": ("F128", "I16", "O", "__import__('os')", None, ["F32"], {"dtype": "F32"}),
    "data_offsets": ([0], [0, 47], [4, 48], [-48, 0], [0, 2**62], [0.0, 48], [False, 48], "0", None, [48, 0], [0, 48, 48]),
}
IN_NOTE: dict[str, tuple[Any, ...]] = {
    "start": ([-1, 0], [0], [1, 0], [0, 2**62], None),
    "whole": ([1, 1], [3, 4, 1], [3, 5], [2**62, 2**62], None),
    "order": ([0, 0], [1, 2], [0], [0, 1, 1], [0, True], None),
    "dtype": ("float128", "object", "complex64", "int64", None, ["float32"], {"dtype": "float32"}),
    "crc32": (-1, 2**64, "0", None),
}
for _where, _entries in {"entry": IN_HEADER, "note": IN_NOTE}.items():
    for _key, _values in _entries.items():
        for _value in _values:
            KINDS[f"{_key} {_value!r:.30}, in the {_where}"] = _set((_where, _key), _value)


def _one_over_the_other(forgery: Forgery) -> None:
    begin, end = forgery.entry()["data_offsets"]
    is_alike = lambda entry: entry["data_offsets"][1] - entry["data_offsets"][0] == end - begin  # noqa: E731
    other = next(key for key, entry in forgery.header.items() if key != "model['weight']" and is_alike(entry))
    forgery.header[other] = dict(forgery.entry())


def _with_a_gap(forgery: Forgery) -> None:
    forgery.numbers[:] = bytes(4) + forgery.numbers
    for entry in forgery.header.values():
        entry["data_offsets"] = [offset + 4 for offset in entry["data_offsets"]]


def _raw_header(text: bytes) -> Forge:
    return lambda forgery: setattr(forgery, "header", text)


KINDS["one entry over the other, and a gap"] = _one_over_the_other
KINDS["bytes that no entry speaks of"] = lambda forgery: forgery.numbers.extend(bytes(100))
KINDS["an entry with another field"] = _set(("entry", "module"), "os")
KINDS["a note with another field"] = _set(("note", "module"), "os")
KINDS["an entry that is a list"] = _set(("header", "model['weight']"), [])
KINDS["a note that is a list"] = lambda forgery: forgery.index["tensors"].update({"model['weight']": []})
KINDS["a missing entry"] = lambda forgery: forgery.header.pop("model['weight']")
KINDS["a missing note"] = lambda forgery: forgery.index["tensors"].pop("model['weight']")
KINDS["two names for the same bytes"] = lambda forgery: _added(forgery, dict(forgery.entry()), dict(forgery.note()))
KINDS["a gap"] = _with_a_gap
KINDS["words for other programs"] = lambda forgery: forgery.header.update(__metadata__={"format": "pt"})
KINDS["a header that is a list"] = _raw_header(b"[]")
KINDS["a header that is not text"] = _raw_header(b"\x80\x04\x95" * 9)
KINDS["a header that is empty"] = _raw_header(b"")
KINDS["a header with a key twice"] = lambda f: setattr(f, "header", compact_json(f.header)[:-1] + b",\"model['weight']\":{}}")
KINDS["a header nested deeply"] = _raw_header(b"[" * 100_000 + b"]" * 100_000)
KINDS["a file of tensors without a header"] = _replaced_by("rank-00000.safetensors", lambda path, _: path.write_bytes(b""))
KINDS["an index that is a list"] = lambda forgery: setattr(forgery, "raw_index", b"[]")
KINDS["an index with more in it"] = _set(("index", "modules"), ["os"])
KINDS["tensors that are a list"] = _set(("index", "tensors"), [])
KINDS["objects that are a list"] = _set(("index", "objects"), [])
KINDS["an index that is not text"] = lambda forgery: setattr(forgery, "raw_index", b"\x80\x04\x95" * 9)
KINDS["an index that is empty"] = lambda forgery: setattr(forgery, "raw_index", b"")
KINDS["an index with a key twice"] = lambda f: setattr(f, "raw_index", compact_json(f.index)[:-1] + b',"objects":{}}')


def _hollow(name: str, size: int) -> Forge:
    def forge(forgery: Forgery) -> Callable[[], None]:
        def later() -> None:
            if name != "manifest.json":
                forgery.manifest["files"][name]["size"] = size
                forgery.seal_manifest()
            os.truncate(forgery.path / name, size)

        return later

    return forge


KINDS["an index of 300 MB that are not there"] = _hollow("rank-00000.json", 300 * 2**20)
KINDS["a manifest of 1 TB that are not there"] = _hollow("manifest.json", 2**40)

# trees
TREES: dict[str, Any] = {
    "an unknown tag": {"object": "os.system"},
    "a pickle as a tag": {"pickle": "gASVCgAAAA=="},
    "two tags": {"tuple": [], "set": []},
    "no tag": {},
    "bytes that are not base64": {"bytes": "%%%"},
    "bytes that are not text": {"bytes": 5},
    "a tuple that is text": {"tuple": "abc"},
    "a tuple that is a dict": {"tuple": {"dict": []}},
    "a dict that is text": {"dict": ["ab"]},
    "a dict that is a number": {"dict": 5},
    "a dict of single values": {"dict": [[1]]},
    "a dict with a list as key": {"dict": [[[1], 1]]},
    "a dict with a set as key": {"dict": [[{"set": [1]}, 1]]},
    "a dict with a dict as key": {"dict": [[{"dict": []}, 1]]},
    "a dict with a tensor as key": {"dict": [[{"tensor": "model['weight']"}, 1]]},
    "a dict with a key twice": {"dict": [["a", 1], ["a", 2]]},
    "a set of lists": {"set": [[1]]},
    "a complex number too large": {"complex": [10**400, 0.0]},
    "a complex number of three": {"complex": [1.0, 2.0, 3.0]},
    "a complex number as text": {"complex": ["1+1j"]},
    "a number by another name": {"float": "Infinity"},
    "a number that is code": {"float": "__import__('os')"},
    "a dtype that is a module": {"dtype": "nn"},
    "a dtype that is a function": {"dtype": "load"},
    "a tensor that is not there": {"tensor": "model['other']"},
    "a tensor without a name": {"tensor": None},
    "a tensor by number": {"tensor": 0},
    "an array of another rank's": {"array": "../rank-00001"},
    "lists in lists": json.loads("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)),
    "a node bomb": [0] * (MAX_NODES + 1),
}
for _label, _tree in TREES.items():
    KINDS[_label] = lambda forgery, tree=_tree: forgery.index["objects"].update(model=tree)
    if _label != "a node bomb":
        KINDS[f"{_label}, for the counters"] = lambda forgery, tree=_tree: forgery.index["objects"].update(trainer=tree)
for _label, _open, _close, _depth in (
    ("tuples in tuples", b'{"tuple":[', b"]}", 450),
    ("tuples that are tuples", b'{"tuple":', b"}", 900),
    ("sets that are sets", b'{"set":', b"}", 900),
    ("keys in keys", b'{"dict":[[', b",1]]}", 300),
):
    KINDS[_label] = lambda f, text=_open * _depth + b"[]" + _close * _depth: setattr(
        f, "raw_index", compact_json({**f.index, "objects": {**f.index["objects"], "model": "@"}}).replace(b'"@"', text)
    )
KINDS["an index nested deeply"] = lambda f: setattr(
    f, "raw_index", compact_json({**f.index, "objects": {"model": "@"}}).replace(b'"@"', b"[" * 100_000 + b"]" * 100_000)
)
KINDS["NaN in an index"] = lambda f: setattr(
    f, "raw_index", compact_json({**f.index, "objects": {"model": "@"}}).replace(b'"@"', b"NaN")
)
KINDS["a flood of text, and colours"] = lambda f: f.index["objects"].update(model={"tensor": "\x1b[31m\n" * 100_000})

# whole, but of another kind than what it is for
MISFITS: dict[str, Forge] = {}
for _key in ("model", "optimizer", "trainer", "data", "results", "buffers", "generators"):
    for _value in (None, 5, [], "text", {"dict": []}, {"tuple": []}, {"tensor": "model['weight']"}):
        if not (_key == "buffers" and _value == {"dict": []}) and not (_key == "data" and _value == {"dict": []}):
            MISFITS[f"{_key} is {_value}"] = lambda f, key=_key, value=_value: f.index["objects"].update({key: value})
    MISFITS[f"no {_key}"] = lambda forgery, key=_key: forgery.index["objects"].pop(key)
for _key in ("iteration", "num_steps", "epochs_completed", "epoch_iteration"):
    for _value in (-1, {"float": "nan"}, True, "7", None, 1.0):
        MISFITS[f"{_key} {_value}"] = lambda f, key=_key, value=_value: f.value("trainer", key).__setitem__(1, value)
MISFITS["weights in each other's place"] = lambda f: f.value("model", "weight").__setitem__(1, {"tensor": "model['bias']"})
MISFITS["a weight that is text"] = lambda f: f.value("model", "weight").__setitem__(1, "text")
MISFITS["a weight of another dtype"] = _set(("entry", "dtype"), "I32")
MISFITS["more weights"] = lambda f: f.tree("model")["dict"].append(["more", {"tensor": "model['weight']"}])
MISFITS["parameter groups of another length"] = lambda f: f.value("optimizer", "param_groups").__setitem__(1, [])
MISFITS["NumPy's generator beyond its table"] = lambda f: f.value("generators", "numpy", "state", "pos").__setitem__(1, 10**9)
MISFITS["NumPy's generator before its table"] = lambda f: f.value("generators", "numpy", "state", "pos").__setitem__(1, -5)
MISFITS["Python's generator beyond its table"] = lambda f: f.value("generators", "python")[1]["tuple"][1]["tuple"].__setitem__(
    -1, 10**6
)
MISFITS["torch's generator is a weight"] = lambda f: f.value("generators", "torch").__setitem__(
    1, {"tensor": "model['weight']"}
)


@pytest.fixture
def refused(honest, tmp_path, ear, monkeypatch, caplog) -> Iterator[Callable[[Forge, bool], None]]:
    """Checks that a forgery is refused by every reader, and that nothing else happens."""
    canary = tmp_path / "canary"
    parts, saver = start(tmp_path / "run")
    before = [part.state_dict() for part in parts]
    before_text = repr(before)
    largest = [0]
    measured, measured_read = _measuring(largest)

    def refused(forge: Forge, misfit: bool) -> None:
        path = tmp_path / "run" / honest.name
        shutil.copytree(honest, path)
        forgery = Forgery(path, canary)
        later = forge(forgery)
        forgery.seal()
        if callable(later):
            later()
        monkeypatch.setattr(torch, "empty", measured)
        monkeypatch.setattr(os, "read", measured_read)
        _heard.clear()
        _listening[0] = True
        try:
            if misfit:
                checkpoint.verify(path)
            else:
                with pytest.raises(DamagedCheckpointError) as damaged:
                    checkpoint.verify(path)
                _one_line(damaged.value)
            with pytest.raises(CheckpointError) as error:
                saver.restore("must")
        finally:
            _listening[0] = False
            monkeypatch.undo()
        _one_line(error.value)
        assert _heard == []
        assert largest[0] < 2**26, "asked for memory that no checkpoint of this size has use for"
        assert not canary.exists()
        if not str(error.value).startswith("resuming from"):
            assert repr([part.state_dict() for part in parts]) == before_text

    yield refused
    assert not canary.exists()


def _measuring(largest: list[int]) -> tuple[Callable[..., Tensor], Callable[[int, int], bytes]]:
    """`torch.empty` and `os.read` that note the largest size they were asked for."""
    empty, read = torch.empty, os.read

    def measured(*arguments: Any, **keywords: Any) -> Tensor:
        shape = arguments[0] if isinstance(arguments[0], (list, tuple)) else arguments
        largest[0] = max(largest[0], math.prod(shape))
        return empty(*arguments, **keywords)

    def measured_read(descriptor: int, size: int) -> bytes:
        largest[0] = max(largest[0], size)
        return read(descriptor, min(size, 2**26))

    return measured, measured_read


def _one_line(error: Exception) -> None:
    assert str(error).isprintable(), "one line, and nothing that a terminal would obey"
    assert len(str(error)) < 2500


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", KINDS)
def test_a_malicious_checkpoint_is_refused(refused, name):
    """Read by `verify` and by a run that resumes: one line says what is wrong. Nothing is run, and no memory is asked for."""
    refused(KINDS[name], False)


@pytest.mark.parametrize("key", [*IN_HEADER, *IN_NOTE])
def test_an_entry_that_is_none_is_refused(key):
    """By the checks of header and index themselves, before a tensor is read."""
    honest = {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}
    note = {"crc32": 2**32 - 1, "dtype": "float32", "start": [0, 0], "whole": [3, 4], "order": [0, 1]}

    def check(described: Values, note: Values) -> None:
        entry = Entry.from_json(described, note)
        check_entries({"x": entry}, 48)
        check_cover(Box((0,) * len(entry.whole), entry.whole), [entry.box])

    check(honest, note)
    check(honest, {"crc32": 0})
    for value in IN_HEADER.get(key, ()):
        with pytest.raises((ValueError, TypeError)):
            check({**honest, key: value}, {"crc32": 0})
    for value in IN_NOTE.get(key, ()):
        with pytest.raises((ValueError, TypeError)):
            check(honest, {**note, key: value})


@pytest.mark.parametrize("name", [name for name in TREES if name != "a node bomb"])
def test_a_tree_that_is_none_is_refused(name):
    """By the decoder itself, wherever the tree stands."""

    def tensor(key: str, _path: Any) -> Tensor:
        if key != "model['weight']":
            raise ValueError(f"there is no {key}")
        return torch.zeros(2)

    with pytest.raises((ValueError, TypeError)):
        decode(TREES[name], ("x",), tensor)


@pytest.mark.sampled(30)
@pytest.mark.parametrize("name", MISFITS)
def test_a_checkpoint_of_another_kind_is_refused(refused, name):
    """Whole, but its values are not what a run is made of: an error in one line, and no crash, now or at the next draw."""
    refused(MISFITS[name], True)
    np.random.rand()


def test_an_honest_checkpoint_passes_the_forger(honest, tmp_path):
    """Taken apart and sealed again without a change it is read, so what is refused above is the malice."""
    shutil.copytree(honest, tmp_path / honest.name)
    Forgery(tmp_path / honest.name, tmp_path / "canary").seal()
    checkpoint.verify(tmp_path / honest.name)
    _, saver = start(tmp_path)
    saver.restore("must")

    assert saver.latest == tmp_path / honest.name


def test_the_ear_hears_a_pickle(tmp_path, ear):
    """The payload does what it says where pickles are loaded, and that is heard: silence above means something."""
    _heard.clear()
    _listening[0] = True
    try:
        pickle.loads(pickle.dumps(Payload(tmp_path / "canary")))
    finally:
        _listening[0] = False

    assert (tmp_path / "canary").exists()
    assert {"pickle.find_class", "os.system"} <= {*_heard}


def test_files_that_nobody_asked_for_are_never_opened(honest, tmp_path, ear):
    """A pickle beside the files of a checkpoint, under any name, is ignored."""
    shutil.copytree(honest, tmp_path / honest.name)
    for name in (".metadata", "model.pt", "rank-00001.safetensors", "rank-00000.pkl", "__init__.py", "conftest.py"):
        (tmp_path / honest.name / name).write_bytes(pickle.dumps(Payload(tmp_path / "canary")))
    opened: list[str] = []

    def listen(event: str, arguments: Any) -> None:
        if _listening[0] and event == "open":
            opened.append(str(arguments[0]))

    sys.addaudithook(listen)
    _, saver = start(tmp_path)
    _listening[0] = True
    try:
        checkpoint.verify(tmp_path / honest.name)
        saver.restore("must")
    finally:
        _listening[0] = False

    assert {Path(path).name for path in opened if honest.name in path} == {
        "manifest.json",
        "rank-00000.json",
        "rank-00000.safetensors",
    }
    assert not (tmp_path / "canary").exists()


def test_only_regular_files_are_read(tmp_path):
    """A pipe, a directory or a device is refused for what it is, also if its size is the right one."""
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "directory", tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(ValueError, match="is not a regular file"):
            open_regular(path, path.stat().st_size)


def test_a_link_in_place_of_a_checkpoint_is_refused(honest, tmp_path):
    """A link to a checkpoint somewhere else is not gone on from by itself; what it points to may be named."""
    (tmp_path / honest.name).symlink_to(honest)
    _, saver = start(tmp_path)
    with pytest.raises(DamagedCheckpointError, match="it is a link"):
        checkpoint.verify(tmp_path / honest.name)
    saver.restore(tmp_path / honest.name)
    assert saver.latest == honest
    with pytest.raises(CheckpointError, match="it is a link"):
        saver.restore("must")

    assert honest.is_dir()


def test_a_directory_that_everybody_can_write_to_is_warned_about(honest, tmp_path, caplog):
    """A user who can write there decides what is loaded."""
    shutil.copytree(honest, tmp_path / honest.name)
    _, saver = start(tmp_path)
    saver.restore("must")
    assert "every user of this machine" not in caplog.text
    tmp_path.chmod(0o777)
    saver.restore("must")

    assert f"every user of this machine can write to {tmp_path}" in caplog.text


@pytest.mark.slow
def test_one_tensor_named_often_is_read_once(tmp_path, monkeypatch):
    """A small file cannot ask for the memory of a large one by naming a tensor again and again."""
    path = save(tmp_path, 1)
    forgery = Forgery(path, tmp_path / "canary")
    forgery.index["objects"]["model"] = [{"tensor": "model['weight']"}] * 200_000
    forgery.seal()
    reads: list[str] = []
    read = TensorFile.read
    monkeypatch.setattr(TensorFile, "read", lambda self, name: reads.append(name) or read(self, name))
    with CheckpointReader(path) as stored:
        found = stored.read("model")

    assert len(found) == 200_000
    assert len(reads) == 1


@pytest.mark.parametrize(
    "parts",
    [
        [Box((0,), (2,)), Box((0,), (2,))],
        [Box((0,), (3,)), Box((2,), (1,))],
        [Box((0,), (2,))],
        [Box((0,), (2,)), Box((2,), (2,)), Box((1,), (1,))],
        [],
    ],
)
def test_parts_that_overlap_or_leave_a_gap_are_refused(parts):
    """Even if there are as many numbers as there should be: or else what was in memory before would be read as weights."""
    with pytest.raises(ValueError, match="its parts"):
        assemble(Box((0,), (4,)), torch.float32, [(part, lambda: torch.zeros(4)) for part in parts])


@pytest.mark.slow
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 15), st.booleans())
@settings(deadline=None)
def test_parts_that_cover_are_put_together(rows, columns, extra, double):
    """A grid of blocks of any size gives the whole; with one of them twice or missing it is refused."""
    whole = torch.arange(float(5 * 7)).reshape(5, 7)
    boxes = [
        Box((top, left), (min(rows, 5 - top), min(columns, 7 - left)))
        for top in range(0, 5, rows)
        for left in range(0, 7, columns)
    ]
    box = Box((0, 0), (5, 7))

    def parts(boxes: list[Box]) -> list[Any]:
        return [(part, lambda part=part: whole[part.slices(box)]) for part in boxes]

    assert torch.equal(assemble(box, whole.dtype, parts(boxes)), whole)
    odd = boxes[extra % len(boxes)]
    with pytest.raises(ValueError, match="its parts"):
        check_cover(box, [*boxes, odd] if double else [part for part in boxes if part is not odd])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2J\u202eb\x00", r"a\x1b[2J\u202eb\x00"),
        ("a\r\n\tb", "a b"),
        ("é" * 500, "é" * 500),
        ("é" * 501, "é" * 500 + "..."),
    ],
    ids=["control characters", "lines", "long", "too long"],
)
def test_what_a_file_holds_cannot_write_to_the_terminal(text, shown):
    """A reason is one line of limited length; what would move the cursor or clear the screen is spelt out."""
    error = reading_error(Path("update-00000001"), ValueError(text))
    assert isinstance(error, DamagedCheckpointError)
    assert error.reason == shown


def test_a_position_of_numpys_generator_that_cannot_be_is_refused():
    """NumPy takes any, and reads beyond its table at the next draw: the process would die."""
    states = capture_random_state()
    for position in (-1, 625, 10**9, True, "7", None):
        forged = {**states, "numpy": {**states["numpy"], "state": {**states["numpy"]["state"], "pos": position}}}
        for take in (check_generators, restore_random_state):
            with pytest.raises(ValueError, match="has the invalid position"):
                take(forged)
    check_generators(states)
    restore_random_state(states)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RuntimeError("two\nlines"), "does not fit this run: RuntimeError: two lines"),
        (FileNotFoundError("two\nlines"), "two lines"),
        (FileNotFoundError(errno.ENOENT, "No such file", "some/where"), "it has no where"),
        (FileNotFoundError(errno.ENOENT, "No such file", 7), "No such file: 7"),
    ],
    ids=["any", "of a handler", "of the system", "of a descriptor"],
)
def test_a_failure_of_any_kind_is_the_answer_of_a_rank(tmp_path, error, says):
    """Whatever reading raises, the other ranks hear of it instead of waiting."""

    def fail(_stored: CheckpointReader) -> None:
        raise error

    path = save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=f"update-00000001.* {says}"):
        read_agreed(tmp_path, [path.name], CheckpointDirectory(tmp_path, Disk()), fail)


# --- what goes in comes out ---

_floats = st.floats(allow_nan=True, allow_infinity=True)
_scalars = st.none() | st.booleans() | st.integers() | _floats | st.text() | st.binary(max_size=9) | st.complex_numbers()
_scalars |= st.sampled_from([*DTYPES.values(), -0.0, float("nan"), "\ud800", "\x1b", 2**70, b""])
_keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: st.tuples(inner) | st.tuples(inner, inner) | st.frozensets(inner, max_size=2),
    max_leaves=3,
)
_layouts: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.transpose(0, -1),
    "every second": lambda tensor: tensor[..., ::2],
    "expanded": lambda tensor: tensor[:1].expand(3, *tensor.shape[1:]) if len(tensor) else tensor,
    "overlapping": lambda tensor: tensor.flatten().unfold(0, min(2, tensor.numel()), 1) if tensor.numel() else tensor,
    "conjugated": lambda tensor: tensor.conj(),
    "negated": lambda tensor: tensor.conj().imag if tensor.dtype == torch.complex64 else tensor,
    "channels last": lambda tensor: tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor,
    "0-d": lambda tensor: tensor.flatten()[0] if tensor.numel() else tensor,
    "parameter": lambda tensor: nn.Parameter(tensor, requires_grad=tensor.is_floating_point()),
}


@st.composite
def _tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from([*DTYPES.values()]))
    shape = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    count = math.prod(shape) * dtype.itemsize
    data = draw(st.binary(min_size=count, max_size=count))
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return _layouts[draw(st.sampled_from([*_layouts]))](raw.view(dtype).reshape(shape))


@st.composite
def _arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    kind = draw(st.sampled_from(["?", "u1", "i8", ">i4", "f4", ">f8", "f2", "c16", "u2"]))
    array = np.array(draw(st.lists(st.integers(0, 1), min_size=6, max_size=6))).astype(kind).reshape(2, 3)
    change = draw(st.sampled_from(["none", "transposed", "reversed", "frozen", "0-d", "broadcast"]))
    if change == "frozen":
        array.setflags(write=False)
    shapes = {
        "transposed": array.T,
        "reversed": array[:, ::-1],
        "0-d": array[0, 0, ...],
        "broadcast": np.broadcast_to(array, (2, 2, 3)),
    }
    return shapes.get(change, array)


_values = st.recursive(
    _scalars | _tensors() | _arrays(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(_keys, inner, max_size=3)
        | st.sets(_keys, max_size=3)
        | st.frozensets(_keys, max_size=3)
    ),
    max_leaves=12,
)


def _exact(value: Any) -> Any:
    """Equal only if type, structure and every bit are."""
    if isinstance(value, Tensor):
        plain = value.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)  # also of no elements
        return "tensor", str(plain.dtype), tuple(plain.shape), plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        return "array", array.dtype.newbyteorder("=").str, array.shape, array.astype(array.dtype.newbyteorder("=")).tobytes()
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [_exact(entry) for entry in value]
    if isinstance(value, dict):
        return "dict", [(_exact(key), _exact(entry)) for key, entry in value.items()]
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, sorted(repr(_exact(entry)) for entry in value)
    if isinstance(value, complex):
        return "complex", _exact(value.real), _exact(value.imag)
    if isinstance(value, float):
        return "float", "nan" if math.isnan(value) else value.hex()
    return type(value).__name__, repr(value)


def _read_by_safetensors(path: Path, pieces: Mapping[str, Piece]) -> None:
    """The package finds the names, shapes, dtypes and bits that were written; complex numbers as pairs, others as bytes."""
    found = safetensors.torch.load_file(path)
    assert found.keys() == pieces.keys()
    for name, piece in pieces.items():
        written, dtype = piece.data.resolve_conj().resolve_neg().contiguous(), piece.data.dtype
        if dtype.is_complex:
            written = torch.view_as_real(written)
        elif dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu):
            dtype = torch.uint8
        assert found[name].shape == written.shape
        assert dtype.is_complex or found[name].dtype == dtype
        assert found[name].reshape(-1).view(torch.uint8).tolist() == as_bytes(written).tolist()


@pytest.mark.slow
@example(torch.ones(8, dtype=torch.int16)[::2][:0])  # contiguous, and not to be viewed as bytes
@example(torch.ones(8, dtype=torch.int16)[::2][:1])  # the same
@given(_values)
@settings(max_examples=150, deadline=None)
def test_any_plain_state_comes_back_bit_by_bit(value):
    """Through the tree, JSON, a snapshot and a file: the same types, structure, numbers and bits, in every dtype and layout."""
    stored = contents(value, "state")
    pieces = Snapshot().take(stored.pieces)
    for name, piece in stored.pieces.items():
        assert _exact(pieces[name].data) == _exact(piece.data)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tensors"
        for number, source in enumerate((stored.pieces, pieces)):
            record, notes = write_tensors(Disk(), path.with_suffix(f".{number}"), source)
            index = checked_json(compact_json({"tree": stored.trees["state"], "notes": notes}))
            _read_by_safetensors(path.with_suffix(f".{number}"), source)
            file = TensorFile(path.with_suffix(f".{number}"), record, index["notes"])
            try:
                found = decode(index["tree"], ("state",), lambda name, _path: file.read(name))  # noqa: B023
            finally:
                file.close()
            assert _exact(found) == _exact(value)


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (lambda x: [x, x], 1),
        (lambda x: [x, x.view(3, 2)], 2),
        (lambda x: [x, x.conj()], 2),
        (lambda x: [x.imag, x.conj().imag], 2),
        (lambda x: [x, x.clone()], 2),
        (lambda x: [x, nn.Parameter(x)], 1),
        (lambda x: [x[:0], x[:0]], 2),
    ],
)
def test_two_names_for_the_same_numbers_are_stored_once(value, count):
    """Tied weights take their place once; views that look at the same memory in another way do not."""
    x = torch.randn(2, 3, dtype=torch.complex64)

    assert len(contents(value(x)).pieces) == count


class _Text(str, enum.Enum):  # noqa: UP042  # a StrEnum is another string than this one
    WARM = "warm"


@pytest.mark.parametrize(
    ("value", "plain"),
    [(_Text.WARM, "warm"), ({_Text.WARM: 1}, {"warm": 1}), (np.str_("warm"), "warm"), (enum.IntEnum("N", "A").A, 1)],
    ids=["string of an enum", "key of an enum", "numpy", "number of an enum"],
)
def test_what_equals_a_plain_value_comes_back_as_that(value, plain):
    """Also where `str` gives something else, such as the name of a member."""
    found = decode(TreeEncoder().encode(value, ("x",)), ("x",))

    assert found == value == plain
    assert type(found) is type(plain)


class _Named(tuple):
    pass


_loop: list[Any] = []
_loop.append(_loop)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "where"),
    [
        (object(), r"model\['a'\]\[0\] cannot be stored"),
        (lambda: None, r"model\['a'\]\[0\] cannot be stored"),
        (_Named((1,)), "cannot be stored"),
        (torch.ones(2).to_sparse(), "sparse"),
        (torch.ones(2, device="meta"), "without data"),
        (np.array([object()]), "an array of object"),
        (np.array(["a"]), "an array of <U1"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), "masked"),
        (np.ones(2, np.longdouble), "an array of"),
        (np.longdouble(1) / 3, "cannot be stored"),
        (np.timedelta64(5, "ns"), "cannot be stored"),
        ({torch.ones(1): 1}, "a tensor is a key"),
        ({float("nan"): torch.ones(1), -float("nan"): torch.ones(2)}, "two values have this name"),
        (_loop, "nested deeper than 64"),
        ([0] * (MAX_NODES + 1), "more than 1000000 values"),
    ],
    ids=[
        *("object", "lambda", "named tuple", "sparse", "meta", "array of objects", "array of strings", "masked", "longdouble"),
        *("longdouble scalar", "time span", "tensor as key", "two NaN keys", "loop", "too many"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(value, where):
    """Anything that would not come back as it was is refused when it is saved, and the message says where it is."""
    with pytest.raises(CheckpointError, match=where):
        TreeEncoder().encode({"a": [value]}, ("model",))


def test_as_many_values_as_can_be_stored_can_be_read(monkeypatch):
    """The limits of the reader are those of the writer, for each kind of value, in number and in depth."""
    monkeypatch.setattr("ignite_train.checkpoint.tree.MAX_NODES", 1000)
    for entry, nodes in (((), 1), (1j, 3), (math.inf, 1), ({}, 1), (frozenset(), 1), ((1,), 2), ({1: 2}, 3), (b"", 1)):
        value = [entry] * (999 // nodes)
        assert decode(TreeEncoder().encode(value, ("x",)), ("x",)) == value
        with pytest.raises(CheckpointError, match="more than 1000 values"):
            TreeEncoder().encode([*value, entry, entry, entry], ("x",))
        with pytest.raises(ValueError, match="more than 1000 values"):
            decode(_unbounded(monkeypatch, [*value, entry, entry, entry]), ("x",))


@pytest.mark.parametrize("kind", ["list", "tuple", "dict", "key", "frozenset", "complex"])
def test_as_deep_as_can_be_stored_can_be_read(kind):
    """The deepest value that the writer takes is taken by the reader, and the next one by neither."""
    wrap: Callable[[Any], Any] = {
        "list": lambda value: [value],
        "tuple": lambda value: (value,),
        "dict": lambda value: {1: value},
        "key": lambda value: {(value,): 1} if value == 1j else {(next(iter(value)),): 1},
        "frozenset": lambda value: frozenset([value]),
        "complex": lambda value: [value],
    }[kind]
    value, depth = wrap(1j), 1
    while True:
        try:
            tree = TreeEncoder().encode(value, ("x",))
        except CheckpointError:
            break
        assert decode(tree, ("x",)) == value
        value, depth = wrap(value), depth + 1

    assert depth > MAX_DEPTH / 2 - 2


def _unbounded(monkeypatch: pytest.MonkeyPatch, value: Any) -> Any:
    """The tree of a value that is too large for the writer."""
    with monkeypatch.context() as patch:
        patch.setattr("ignite_train.checkpoint.tree.MAX_NODES", 10**9)
        return TreeEncoder().encode(value, ("x",))


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6)
    | st.sampled_from(["inf", "float32", "AAAA", 10**400, "model", -0.0]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4), inner, max_size=2)
        | st.sampled_from(
            ["dict", "tuple", "set", "frozenset", "complex", "tensor", "array", "float", "bytes", "dtype"]
        ).flatmap(lambda tag: inner.map(lambda content: {tag: content}))
        | st.lists(st.lists(inner, min_size=2, max_size=2), max_size=3).map(lambda pairs: {"dict": pairs})
    ),
    max_leaves=15,
)


@pytest.mark.slow
@given(_json)
@settings(max_examples=500, deadline=None)
def test_no_tree_makes_the_decoder_fail_otherwise(tree):
    """Any JSON is either a value, which goes back to a tree of the same value, or a ValueError or TypeError."""

    def tensor(_name: str, _path: Any) -> Tensor:
        return torch.zeros(2, dtype=torch.bfloat16)

    try:
        value = decode(tree, ("x",), tensor)
    except (ValueError, TypeError):
        return
    assert _exact(decode(TreeEncoder().encode(value, ("x",)), ("x",), tensor)) == _exact(value)


@pytest.mark.slow
@given(
    st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), _json, min_size=3),
    st.dictionaries(st.sampled_from(["crc32", "dtype", "order", "start", "whole"]), _json, min_size=1),
)
@settings(max_examples=200, deadline=None)
def test_no_entry_makes_the_reader_fail_otherwise(described, note):
    """Any JSON in place of an entry is refused, or is one that fits itself."""
    try:
        entry = Entry.from_json(described, note)
    except (ValueError, TypeError):
        return
    assert described["data_offsets"] == [entry.offset, entry.offset + entry.num_bytes]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_piece_of_each_dtype_keeps_its_bits(tmp_path):
    """Every dtype that can be stored is written and read, with all its bit patterns of one byte."""
    for name, dtype in DTYPES.items():
        raw = torch.arange(256, dtype=torch.uint8) if dtype is not torch.bool else torch.tensor([0, 1] * 128, dtype=torch.uint8)
        tensor = raw.view(dtype)
        shape = tuple(tensor.shape)
        pieces = {"x": Piece(tensor, (0,), shape)}
        record, notes = write_tensors(Disk(), tmp_path / name, pieces)
        _read_by_safetensors(tmp_path / name, pieces)
        with closing(TensorFile(tmp_path / name, record, notes)) as file:
            assert torch.equal(file.read("x").view(torch.uint8), raw), name
            assert file.read("x").dtype is dtype


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_each_dtype_and_order_in_memory_lies_in_one_file(tmp_path, monkeypatch):
    """The package reads each tensor with the shape it has, however it lies in memory; we find its order there again."""
    monkeypatch.setattr("ignite_train.checkpoint.tensor_files._CHUNK_BYTES", 100)
    made: dict[str, Tensor] = {}
    for name, dtype in DTYPES.items():
        data = torch.arange(2 * 3 * 4 * 5 * dtype.itemsize) % (2 if dtype is torch.bool else 256)
        tensor = data.to(torch.uint8).view(dtype).view(2, 3, 4, 5)
        made |= {name: tensor, f"{name}, channels last": tensor.contiguous(memory_format=torch.channels_last)}
        made |= {f"{name}, transposed": tensor[0, 0].T, f"{name}, with gaps": tensor[..., ::2], f"{name}, of none": tensor[:0]}
        made |= {f"{name}, a number": tensor[1, 2, 3, 4], f"{name}, of one value": tensor[0, 0, 0, :1].expand(7)}
    pieces = {key: Piece(tensor, (0,) * tensor.dim(), tuple(tensor.shape)) for key, tensor in made.items()}
    record, notes = write_tensors(Disk(), tmp_path / "tensors", pieces)
    _read_by_safetensors(tmp_path / "tensors", pieces)
    with closing(TensorFile(tmp_path / "tensors", record, notes)) as file:
        assert all(entry.offset % DTYPES[entry.dtype].itemsize == 0 for entry in file.entries.values())
        for key, tensor in made.items():
            found = file.read(key)
            assert _exact(found) == _exact(tensor), key
            if "gaps" not in key and "one value" not in key:
                assert found.stride() == tensor.stride() or not tensor.numel(), key


@pytest.mark.parametrize("at_once", [1 << 30, 3], ids=["whole reads", "short reads"])
def test_tensors_of_many_chunks_are_read_and_checked(tmp_path, monkeypatch, at_once):
    """Wherever the chunks end, and if the system gives fewer bytes than were asked for; each byte that differs is noticed."""
    monkeypatch.setattr("ignite_train.checkpoint.tensor_files._CHUNK_BYTES", 7)
    preadv, pread = os.preadv, os.pread
    monkeypatch.setattr(os, "preadv", lambda file, buffers, place: preadv(file, [buffers[0][:at_once]], place))
    monkeypatch.setattr(os, "pread", lambda file, size, place: pread(file, min(size, at_once), place))
    tensors = {str(size): torch.arange(100 + size, 100 + 2 * size, dtype=torch.uint8) for size in (5, 0, 7, 30, 14)}
    pieces = {name: Piece(tensor, (0,), (len(tensor),)) for name, tensor in tensors.items()}
    path = tmp_path / "tensors"
    record, notes = write_tensors(Disk(), path, pieces)
    whole = path.read_bytes()
    begin = record.size - sum(len(tensor) for tensor in tensors.values())
    assert whole[begin:] == b"".join(bytes(tensor.tolist()) for tensor in tensors.values())
    for place in range(begin):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"no header|the checksum differs"):
            TensorFile(path, record, notes)
    for place in (None, *range(begin, len(whole))):
        path.write_bytes(whole if place is None else whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        file, refused = TensorFile(path, record, notes), set()
        for name, tensor in tensors.items():
            try:
                file.check(name)
                assert torch.equal(file.read(name), tensor)
            except ValueError:
                refused.add(name)
        file.close()
        inside = {name: -1 if place is None else place - begin - entry.offset for name, entry in file.entries.items()}
        assert refused == {name for name, at in inside.items() if 0 <= at < len(tensors[name])}
