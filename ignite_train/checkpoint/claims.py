"""Whether the state that a checkpoint claims to hold can be the state of this run.

Names, shapes and dtypes decide it, before memory is allocated for a tensor and before anything of the run is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ignite_train.arguments import describe
from ignite_train.checkpoint.optimizer_state import check_optimizer_state
from ignite_train.checkpoint.reader import CheckpointReader, TensorClaim
from ignite_train.checkpoint.run_objects import RunObjects, SavedModule
from ignite_train.checkpoint.schedule_state import check_schedule, why_not_rescaled
from ignite_train.checkpoint.state_rules import StateRules
from ignite_train.checkpoint.tensor_classes import class_name, is_composed
from ignite_train.errors import CheckpointError
from ignite_train.model.memory_layout import as_bytes
from ignite_train.model.optimizers import InnerState, has_own_form
from ignite_train.state import UpdateOutput

__all__ = ["EVERY_RANK", "Claims", "buffers_of", "check_module", "check_tied"]

EVERY_RANK = ("trainer", "data", "results", "buffers", "generators")
"""The states that each rank writes, besides its handlers."""
_FREE_BYTES = 2**28  # what tensors of shapes that only the file knows may take in any case
_MOST_PER_BYTE = 16  # and for each byte that is on the disk: file systems compress, and copies leave out zeros


@dataclass(frozen=True, slots=True)
class Claims:
    """What a checkpoint says that it holds, with a `TensorClaim` in the place of each tensor.

    Attributes:
        shared: the states of the shared objects, by name.
        own: the states of this rank, by name.
        description: what `StateRules.describe` gave when it was written; empty if an older version wrote it.
    """

    shared: dict[str, Any]
    own: dict[str, Any]
    description: Mapping[str, Any]

    def described(self, kind: str, name: str) -> Any:
        """What is known of one optimizer or schedule; None if nothing is."""
        return self.description.get(kind, {}).get(name)

    def check(self, path: str, objects: RunObjects, rules: StateRules) -> None:
        """Compares the state with the objects of this run.

        Args:
            path: of the checkpoint.
            objects: of this run.
            rules: what the user decides.

        Raises:
            CheckpointError: it is of another model, optimizer or schedule, or a part of it has an invalid form.
        """
        for name in (*EVERY_RANK, *objects.trainers):
            if not isinstance(self.own[name], dict):
                raise CheckpointError(f"{path} has an invalid state of {name!r}: {describe(self.own[name])}")
        names = objects.parameter_names()
        for name, entry in objects.shared.items():
            if isinstance(entry, SavedModule):
                check_module(path, name, entry.state_dict(), self.shared[name])
            elif isinstance(entry, Optimizer):
                self.check_optimizer(path, name, objects, rules)
            elif isinstance(entry, InnerState):
                none_decided: list[dict[str, Any]] = [{} for _ in entry.inner.param_groups]
                missing = self.missing_groups(name.rpartition(".")[0], objects) if entry.shares_groups else []
                check_optimizer_state(path, name, entry.inner, self.shared[name], None, names, none_decided, missing)
        self._check_schedules(path, objects, rules)
        self._check_this_rank(path, objects)

    def check_optimizer(self, path: str, name: str, objects: RunObjects, rules: StateRules) -> None:
        """Compares the state of one optimizer with that of the run; see `check`."""
        described, optimizer = self.described("optimizers", name), objects.optimizers[name]
        missing, names = self.missing_groups(name, objects), objects.parameter_names()
        check_optimizer_state(path, name, optimizer, self.shared[name], described, names, rules.decided(name), missing)

    def missing_groups(self, name: str, objects: RunObjects) -> list[list[nn.Parameter]]:
        """The parameter groups that an optimizer lacks, as `RunObjects.missing_groups` has them; they need torch's form."""
        if name not in objects.optimizers:  # it is inside of another one
            return []
        saved = self.shared[name]
        has_groups = isinstance(saved, Mapping) and not has_own_form(saved)
        return objects.missing_groups(name, self.described("optimizers", name)) if has_groups else []

    def check_size(self, reader: CheckpointReader, objects: RunObjects) -> None:
        """Limits what is allocated for tensors whose shapes the run does not know, by what the checkpoint takes on the disk.

        Raises:
            CheckpointError: it claims more.
        """
        known = {
            tuple(parameter.shape)
            for optimizer in objects.optimizers.values()
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        unknown: dict[tuple[str, str], int] = {}
        for name, value in {**self.shared, **self.own}.items():
            entry = objects.shared.get(name)
            if not isinstance(entry, SavedModule):
                for claim in _tensors(value):
                    if not isinstance(entry, Optimizer) or claim.shape not in known:
                        unknown[name, claim.key] = claim.num_bytes
        total, on_disk = sum(unknown.values()), reader.bytes_on_disk
        if total > max(_FREE_BYTES, _MOST_PER_BYTE * on_disk):
            name, _ = max(unknown, key=unknown.__getitem__)
            raise CheckpointError(
                f"{reader.path} claims {total} bytes of tensors that the model does not need, most of them for {name!r}, and "
                f"takes {on_disk} bytes on the disk; copy it without holes, or leave that out"
            )

    def _check_schedules(self, path: str, objects: RunObjects, rules: StateRules) -> None:
        for name, schedule in objects.schedules.items():
            saved = {**self.shared, **self.own}.get(name)
            if saved is None:
                continue
            optimizers = [key for key, optimizer in objects.optimizers.items() if optimizer is schedule.optimizer]
            groups: list[Any] = [self.shared[key].get("param_groups", ()) for key in optimizers]
            groups.append(schedule.optimizer.param_groups)
            check_schedule(path, name, schedule, saved, self.described("schedules", name), max(groups, key=len))
            if "lr" not in rules.script_wins:
                continue
            if reason := why_not_rescaled(schedule) or self._why_no_multiple(schedule, objects, rules):
                raise CheckpointError(
                    f"script_wins must not name 'lr' where {name!r} is restored: {reason}; restart it with "
                    f"leave_out=({name.partition('/')[2]!r},), or let the checkpoint win"
                )

    def _why_no_multiple(self, schedule: LRScheduler, objects: RunObjects, rules: StateRules) -> str:
        """Why a schedule cannot continue with the script's rates, as multiples of those in the checkpoint; empty if it can."""
        for name in (name for name, optimizer in objects.optimizers.items() if optimizer is schedule.optimizer):
            for index, pair in enumerate(zip(self.shared[name].get("param_groups", ()), rules.decided(name), strict=False)):
                before, now = (group.get("initial_lr", group["lr"]) for group in pair)
                if before == 0 != now:
                    return f"param_groups[{index}] of {name} had lr=0, which cannot be scaled to the script's {now!r:.20}"
        return ""

    def _check_this_rank(self, path: str, objects: RunObjects) -> None:
        """Looks at what would otherwise be taken over unchecked: the buffers of this rank and its latest results."""
        for module, buffers in objects.buffers().items():
            claimed = buffers_of(self.own, module)
            saved = {name: claimed[name] for name in buffers if name in claimed}
            check_module(path, module, {name: buffers[name] for name in saved}, saved)
        output, metrics = self.own["results"].get("output"), self.own["results"].get("metrics")
        if not isinstance(metrics, dict) or not (output is None or (isinstance(output, dict) and _is_record(output))):
            raise CheckpointError(f"{path} has invalid results of an update: {describe(self.own['results'])}")


def buffers_of(own: Mapping[str, Any], module: str) -> dict[str, Any]:
    """The buffers of a module in the states of a rank; none if rank 0 or an older version wrote them."""
    found = own["buffers"] if module == "model" else own.get("buffers_of", {}).get(module, {})
    return found if isinstance(found, dict) else {}


def check_module(path: str, name: str, current: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Compares the names, shapes and dtypes of a saved module with those of this run.

    Raises:
        CheckpointError: they differ.
    """

    def shape(value: Any) -> Any:
        return tuple(value.shape) if isinstance(value, (torch.Tensor, TensorClaim)) else None

    wrong = [f"{key!r} is missing" for key in current if key not in saved]
    wrong += [f"{key!r} is not in the {name}" for key in saved if key not in current]

    def kind(value: Any) -> str:
        return value.of_class if isinstance(value, TensorClaim) else class_name(type(value)) if is_composed(value) else ""

    both = [key for key in current if key in saved]
    wrong += [
        f"{key!r} has the shape {shape(saved[key])} and not {shape(current[key])}"
        for key in both
        if shape(saved[key]) != shape(current[key])
    ]
    wrong += [
        f"{key!r} is {saved[key].dtype} and not {current[key].dtype}"
        for key in both
        if shape(saved[key]) == shape(current[key]) is not None and saved[key].dtype != current[key].dtype
    ]
    wrong += [
        f"{key!r} is of the class {kind(saved[key]) or 'Tensor':.100} and not {kind(current[key]) or 'Tensor'}"
        for key in both
        if shape(saved[key]) == shape(current[key]) is not None and kind(saved[key]) != kind(current[key])
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(f"{path} is of another {name}: {', '.join(wrong[:3])}{more}; build the {name} that was saved")


def check_tied(path: str, name: str, current: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Checks that names of one tensor of this run have the same numbers in a saved module; or else the last would win.

    Raises:
        CheckpointError: they do not, because the weights were not tied then.
    """
    names: dict[Any, str] = {}
    for key, value in current.items():
        if isinstance(value, Tensor) and value.numel() and not value.is_meta and type(value) is Tensor:
            first = names.setdefault((value.data_ptr(), value.dtype, tuple(value.shape), value.stride()), key)
            one, other = saved.get(first), saved.get(key)
            if one is not other and isinstance(one, Tensor) and isinstance(other, Tensor) and not _same_bits(one, other):
                raise CheckpointError(
                    f"{path} is of another {name}: {first!r} and {key!r} are one tensor in this run, and differ there; build "
                    f"the {name} that was saved"
                )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Of two tensors of one shape."""
    return one.dtype == other.dtype and torch.equal(as_bytes(one.contiguous()), as_bytes(other.contiguous()))


def _tensors(value: Any) -> Iterator[TensorClaim]:
    """The tensors in a nested state."""
    if isinstance(value, TensorClaim):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _tensors(entry)


def _is_record(output: Mapping[str, Any]) -> bool:
    """Whether an `UpdateOutput` can be made of it."""
    return output.keys() == {field.name for field in fields(UpdateOutput)}
