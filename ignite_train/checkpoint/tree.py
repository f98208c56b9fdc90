"""Nested state as a tree of JSON and named tensors, and back: plain types only, nothing that could import or run anything."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ignite_train.arguments import describe
from ignite_train.errors import CheckpointError
from ignite_train.internals.of_torch import storage_number
from ignite_train.model.composed_tensor import is_composed
from ignite_train.model.memory_layout import local_part

__all__ = [
    "DTYPES",
    "MAX_DEPTH",
    "MAX_NODES",
    "Composed",
    "KeyPath",
    "TensorForm",
    "TreeEncoder",
    "class_name",
    "decode",
    "dtype_name",
    "form_of",
    "path_name",
    "tensors_in",
]

MAX_DEPTH = 64
MAX_NODES = 1_000_000
DTYPES: dict[str, torch.dtype] = {
    name: vars(torch)[name]
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
}
"""The dtypes that a stored tensor may have, by name."""
_STORABLE = {*DTYPES.values()}
_PLAIN = {type(None), bool, int, str}  # their values stand for themselves
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", torch.Size: "tuple"}  # and not their subclasses
KeyPath = tuple[Any, ...]
"""Where a value is: the keys and indices that lead to it, the first of which names the object."""


def class_name(kind: type) -> str:
    """The name by which a class is compared."""
    return f"{kind.__module__}.{kind.__qualname__}"


def path_name(path: KeyPath) -> str:
    """How a path is written in files and messages: `optimizer['state'][0]['exp_avg']`."""
    return str(path[0]) + "".join(map("[{!r}]".format, path[1:]))


@dataclass(slots=True)
class TensorForm:
    """The facts about a tensor that are compared, and are known before it is read. Like a tensor, it cannot be a key.

    Attributes:
        shape: of the whole tensor.
        dtype: of its numbers.
        name: of the class of a tensor that is made of others, or of a parameter; empty for any other tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str = ""

    def __repr__(self) -> str:
        return f"{self.name and f'{self.name:.100}, '}{dtype_name(self.dtype)} of shape {self.shape}"


def form_of(value: Any) -> Any:
    """The form of a tensor, or the value itself where it is not a tensor."""
    if not isinstance(value, Tensor):
        return value
    return TensorForm(tuple(value.shape), value.dtype, class_name(type(value)) if is_composed(value) else "")


class TreeEncoder:
    """Turns nested state into a tree for JSON; tensors are named by their path and kept aside.

    None, bool, int, str, finite floats and lists stand for themselves in the tree; anything else is an object with one key that
    says what it is. Two names for one tensor, as tied weights have, are stored once.

    Attributes:
        tensors: the tensors met, by the name of their path. Not copied.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._met: dict[Any, str] = {}
        self._nodes = 0

    def encode(self, value: Any, path: KeyPath) -> Any:
        """The tree of `value`.

        Raises:
            CheckpointError: something in it cannot be stored, or it is too large or too deep; the message says where.
        """
        kind = type(value)
        if kind in _PLAIN or (kind is float and math.isfinite(value)):
            return value
        if kind is dict or kind in _SEQUENCES:  # what follows looks at subclasses too, which takes longer
            return self._encode_container(value, path)
        if isinstance(value, (Tensor, np.ndarray)):
            return self._encode_tensor(value, path)
        if isinstance(value, np.bool_):
            return bool(value)
        if isinstance(value, int) or (isinstance(value, np.integer) and value.dtype.kind != "m"):  # a time span has a unit
            return int(value)
        if isinstance(value, (float, np.floating)) and not isinstance(value, np.longdouble):
            return float(value) if math.isfinite(value) else {"float": str(float(value))}
        if isinstance(value, str):
            return str.__str__(value)  # `str` of an enum of strings is the name of its member
        if isinstance(value, (bytes, bytearray)):
            return {"bytes": base64.b64encode(value).decode()}
        if isinstance(value, complex):
            return {"complex": self._encode_container([value.real, value.imag], path)}
        if isinstance(value, torch.dtype):
            return {"dtype": dtype_name(value)}
        if isinstance(value, (Mapping, set, frozenset)):
            return self._encode_container(value, path)
        raise CheckpointError(
            f"{path_name(path)} cannot be stored: {describe(value)}; state_dict() must give numbers, strings, tensors, arrays, "
            "and lists, tuples, sets and dicts of them"
        )

    def _encode_container(self, value: Any, path: KeyPath) -> Any:
        """Of each kind of container. A plain value in it, as most are, costs no call."""
        is_mapping = type(value) is dict or isinstance(value, Mapping)
        self._nodes += len(value) * (1 + is_mapping)  # the keys count too
        if self._nodes >= MAX_NODES or len(path) > MAX_DEPTH - (len(value) > 0):
            raise CheckpointError(
                f"{path_name(path[:4])}... cannot be stored: it is nested deeper than {MAX_DEPTH} or has more than {MAX_NODES} "
                "values; hold numbers in a tensor, and nothing that contains itself"
            )
        if is_mapping:
            pairs = []
            for key, entry in value.items():
                known = key if type(key) in _PLAIN else self._encode_key(key, path)
                is_plain = (kind := type(entry)) in _PLAIN or (kind is float and math.isfinite(entry))
                pairs.append([known, entry if is_plain else self.encode(entry, (*path, key))])
            return {"dict": pairs}
        entries = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else list(value)
        if not _PLAIN.issuperset(map(type, entries)):  # else it may be the state of Python's generator: 625 integers
            for index, entry in enumerate(entries):
                if type(entry) not in _PLAIN and not (type(entry) is float and math.isfinite(entry)):
                    entries[index] = self.encode(entry, (*path, index))
        if type(value) is list:
            return entries
        return {_SEQUENCES.get(type(value)) or ("set" if isinstance(value, set) else "frozenset"): entries}

    def _encode_key(self, key: Any, path: KeyPath) -> Any:
        if isinstance(key, Tensor):
            raise CheckpointError(f"{path_name(path)} cannot be stored: a tensor is a key in it; use numbers or strings")
        return self.encode(key, (*path, "key"))

    def _encode_tensor(self, value: Any, path: KeyPath) -> Any:
        if isinstance(value, np.ndarray):
            if value.dtype.name not in DTYPES or isinstance(value, np.ma.MaskedArray):
                raise CheckpointError(f"{path_name(path)} cannot be stored: an array of {value.dtype}, or masked; use numbers")
            array = np.require(value, value.dtype.newbyteorder("="), ["C", "W"])
            return {"array": self._keep(torch.from_numpy(array).reshape(value.shape), path)}
        tensor = value.detach()
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.dtype not in _STORABLE:
            raise CheckpointError(f"{path_name(path)} cannot be stored: a tensor that is sparse, quantized or without data")
        if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            raise CheckpointError(
                f"{path_name(path)} cannot be stored: a DTensor whose shards are yet to be summed; redistribute it first"
            )
        is_plain = type(tensor) is Tensor or isinstance(tensor, DTensor)
        if not is_plain and is_composed(tensor):
            return self._encode_composed(tensor, path)
        if not is_plain:
            raise CheckpointError(f"{path_name(path)} cannot be stored: a tensor of type {type(tensor).__name__}")
        return {"tensor": self._keep(tensor, path)}

    def _encode_composed(self, tensor: Any, path: KeyPath) -> Any:
        """Its class, dtype and shape, its parts, and what else makes it up."""
        names, context = tensor.__tensor_flatten__()
        self._nodes += 2  # its parts and its context
        parts = self.encode({name: getattr(tensor, name) for name in names}, path)
        known = [class_name(type(tensor)), dtype_name(tensor.dtype), list(tensor.shape)]
        return {"composed": [*known, parts, self.encode(context, (*path, "context"))]}

    def _keep(self, tensor: Tensor, path: KeyPath) -> str:
        name = path_name(path)
        if name in self.tensors:
            raise CheckpointError(f"{name} cannot be stored: two values have this name; use other keys")
        if tensor.numel():
            memory = _shard_memory(tensor) if isinstance(tensor, DTensor) else (tensor.device, tensor.data_ptr())
            place = (memory, tensor.dtype, tuple(tensor.shape), tensor.stride())
            name = self._met.setdefault((*place, tensor.is_conj(), tensor.is_neg()), name)
        self.tensors[name] = tensor
        return name


def _shard_memory(tensor: DTensor) -> tuple[Any, ...]:
    """Where the shard of this rank is. All ranks find the same tensors to be one, also a rank that has no element of them."""
    here = local_part(tensor)
    return storage_number(here.untyped_storage()), here.storage_offset(), tensor.device_mesh, tensor.placements


def tensors_in(tree: Any) -> set[str]:
    """The names of the tensors and arrays that a tree of `TreeEncoder` has."""
    if isinstance(tree, list):
        return {name for entry in tree for name in tensors_in(entry)}
    if not isinstance(tree, dict):
        return set()
    return {content for kind, content in tree.items() if kind in ("tensor", "array")} | {
        name for kind, content in tree.items() if isinstance(content, list) for name in tensors_in(content)
    }


def _no_tensor(name: str, path: KeyPath) -> Tensor:
    raise ValueError(f"{path_name(path)} must hold no tensor, and has {name}")


class Composed(NamedTuple):
    """A tensor that is made of others, as a file describes it.

    Attributes:
        form: the name of its class, its dtype and its shape.
        parts: the tensors, or what stands for them, by the names of attributes.
        context: what else makes it up.
    """

    form: TensorForm
    parts: dict[str, Any]
    context: Any


def _none_composed(composed: Composed, path: KeyPath) -> Any:
    raise CheckpointError(f"{path_name(path)} is of the class {composed.form.name:.100}, which is not known here")


def decode(
    tree: Any,
    path: KeyPath,
    tensor: Callable[[str, KeyPath], Any] = _no_tensor,
    compose: Callable[[Composed, KeyPath], Any] = _none_composed,
) -> Any:
    """The value that `tree` was made of.

    Args:
        tree: from `TreeEncoder.encode`, or from a file, which may be forged.
        path: where it is.
        tensor: returns the tensor with a name at a path, or a stand-in for it; by default any tensor is refused.
        compose: makes a tensor of its parts, or a stand-in for it; by default it is refused.

    Raises:
        ValueError: it is not a valid tree, or it is too large or too deep.
        TypeError: something in it cannot be a key, an entry of a set, or an array.
    """
    return _Decoder(tensor, compose).decode(tree, path)


class _Decoder:
    def __init__(self, tensor: Callable[[str, KeyPath], Any], compose: Callable[[Composed, KeyPath], Any]) -> None:
        self._tensor, self._compose = tensor, compose
        self._nodes = 0

    def decode(self, tree: Any, path: KeyPath) -> Any:
        self._nodes += 1
        if len(path) > MAX_DEPTH or self._nodes > MAX_NODES:
            raise ValueError(f"nested deeper than {MAX_DEPTH}, or more than {MAX_NODES} values")
        if tree is None or isinstance(tree, (bool, int, float, str)):
            return tree
        if isinstance(tree, list):
            return [self.decode(entry, (*path, index)) for index, entry in enumerate(tree)]
        if not isinstance(tree, dict) or len(tree) != 1:
            raise ValueError(f"{path_name(path)} is not a valid value")
        ((kind, content),) = tree.items()
        if kind == "dict":
            return self._decode_dict(content, path)
        if kind == "composed":
            return self._decode_composed(content, path)
        if kind in ("tuple", "set", "frozenset", "complex"):
            return self._decode_sequence(kind, content, path)
        if not isinstance(content, str):
            raise ValueError(f"{path_name(path)} is not a valid value")
        if kind in ("tensor", "array"):
            found = self._tensor(content, path)
            return found.numpy() if kind == "array" and isinstance(found, Tensor) else found
        if kind == "float" and content in ("inf", "-inf", "nan"):
            return float(content)
        if kind == "bytes":
            return base64.b64decode(content, validate=True)
        if kind == "dtype" and content in DTYPES:
            return DTYPES[content]
        raise ValueError(f"{path_name(path)} is of the unknown kind {kind!r:.40}")

    def _decode_composed(self, content: Any, path: KeyPath) -> Any:
        if not isinstance(content, list) or len(content) != 5:
            raise ValueError(f"{path_name(path)} is not a tensor")
        name, dtype, shape, parts, context = content
        sizes = shape if isinstance(shape, list) and len(shape) <= MAX_DEPTH else [-1]
        if not isinstance(name, str) or dtype not in DTYPES or not all(type(size) is int and size >= 0 for size in sizes):
            raise ValueError(f"{path_name(path)} is not a tensor")
        found = self.decode(parts, path)
        if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
            raise ValueError(f"{path_name(path)} is not a tensor")
        form = TensorForm(tuple(sizes), DTYPES[dtype], name)
        return self._compose(Composed(form, found, self.decode(context, (*path, "context"))), path)

    def _decode_sequence(self, kind: str, content: Any, path: KeyPath) -> Any:
        if not isinstance(content, list):
            raise ValueError(f"{path_name(path)} is not a {kind}")
        entries = [self.decode(entry, (*path, index)) for index, entry in enumerate(content)]
        if kind == "complex":
            if [type(entry) for entry in entries] != [float, float]:
                raise ValueError(f"{path_name(path)} is not a complex number")
            return complex(*entries)
        make: Callable[[list[Any]], Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}[kind]
        return make(entries)

    def _decode_dict(self, pairs: Any, path: KeyPath) -> dict[Any, Any]:
        if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise ValueError(f"{path_name(path)} is not a dict")
        result: dict[Any, Any] = {}
        for tree, value in pairs:
            key = self.decode(tree, (*path, "key"))
            if isinstance(key, Tensor) or key in result:
                raise ValueError(f"{path_name(path)} has a duplicate or an invalid key")
            result[key] = self.decode(value, (*path, key))
        return result


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")
