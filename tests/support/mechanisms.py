"""One small program for each mechanism of docs/programs.md, and the same program by hand: one batch of all ranks, in float64.

A program makes six updates in two epochs on the samples of `cuts`. On two ranks they are cut raggedly: rank 1 has two
micro-batches in the first update of an epoch, one in the second, and none in the third. The reference shares the loss and the
optimizer with the library, and nothing else.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ignite.distributed as idist
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, AdamW, Optimizer

import cuts
from ignite_train import ForwardOutput, Trainer, TrainEvents, create_trainer
from random_cases import Sharpness
from update_options import with_options

STEPS, EPOCHS = 2, 2
WAYS = ("ddp", "small", "explicit", "fsdp")
POISONED = (1, 2)  # rank and micro-batch whose first target is NaN where that is asked for: in the second update of an epoch

REPLICAS = r"pass .* without .* and with options=UpdateOptions\(reduction='explicit'\)$"


class Place(NamedTuple):
    """What a forward may know of where it is."""

    progress: float = 0.0
    micro_batch: int = 0
    carried: Any = None


Loss = Callable[[Any, cuts.Sample, Place], tuple[Any, ...]]


def network() -> nn.Module:
    """3 features to 1 number."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(cuts.FEATURES, 4), nn.Tanh(), nn.Linear(4, 1)).double()


class WithTable(nn.Module):
    """The network, and a table with a sparse gradient: a row for each weight that a sample can have."""

    def __init__(self, *, is_sparse: bool = True) -> None:
        super().__init__()
        self.net = network()
        self.table = nn.Embedding(10, 1, sparse=is_sparse).double()
        with torch.no_grad():
            self.table.weight.copy_(torch.arange(10.0).cos()[:, None])

    def forward(self, x: Tensor, row: Tensor) -> Tensor:
        return self.net(x) + self.table(row)  # type: ignore[no-any-return]


class Scale(nn.Module):
    """A learned factor, which stands outside the network as a criterion does."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([1.5, 0.5], dtype=torch.float64))

    def forward(self, out: Tensor) -> Tensor:
        return out * self.factor.sum()


def with_scale() -> nn.Module:
    return nn.ModuleDict({"net": network(), "scale": Scale()})


# --- losses: the sum, its weight, and logs ------------------------------------------------------------------------------------


def _squared(out: Tensor, micro_batch: cuts.Sample) -> tuple[Any, ...]:
    _, y, w = micro_batch
    return (w * (out.squeeze(1) - y).square()).sum(), float(w.sum()), {"samples": len(y)}


def plain(model: Any, micro_batch: cuts.Sample, _place: Place) -> tuple[Any, ...]:
    return _squared(model(micro_batch[0]), micro_batch)


def with_rows(model: Any, micro_batch: cuts.Sample, _place: Place) -> tuple[Any, ...]:
    return _squared(model(micro_batch[0], micro_batch[2].long()), micro_batch)


def scaled(model: Any, micro_batch: cuts.Sample, _place: Place) -> tuple[Any, ...]:
    return _squared(model["scale"](model["net"](micro_batch[0])), micro_batch)


def annealed(model: Any, micro_batch: cuts.Sample, place: Place) -> tuple[Any, ...]:
    """Grows with the run, and differs within a group."""
    loss, size, logs = _squared(model(micro_batch[0]), micro_batch)
    return loss * (0.5 + place.progress + 0.25 * place.micro_batch), size, logs


def recurrent(model: Any, micro_batch: cuts.Sample, place: Place) -> tuple[Any, ...]:
    """Reads what the micro-batch before has left."""
    out = model(micro_batch[0] + place.carried.get("hidden", 0.0))
    place.carried["hidden"] = out.detach().mean() if len(out) else torch.zeros((), dtype=torch.float64)
    return _squared(out, micro_batch)


def per_sample(model: Any, micro_batch: cuts.Sample, _place: Place) -> tuple[Any, ...]:
    """The loss per sample, and beside it the error per weight."""
    x, y, w = micro_batch
    out = model(x)
    error = (w * (out.detach().squeeze(1) - y).abs()).sum()
    return (w * (out.squeeze(1) - y).square()).sum(), len(y), {"error": (error, w.sum())}


# --- optimizers, by name ------------------------------------------------------------------------------------------------------


def one(model: nn.Module, rate: float = 0.05) -> dict[str, Optimizer]:
    return {"": SGD(model.parameters(), lr=rate, momentum=0.9)}


def slow(model: nn.Module) -> dict[str, Optimizer]:
    return one(model, 1e-4)


def two(model: nn.Module) -> dict[str, Optimizer]:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    return {"matrices": SGD(matrices, lr=0.05, momentum=0.9), "others": AdamW(others, lr=0.02, eps=1e-2)}


def sharpness(model: nn.Module) -> dict[str, Optimizer]:
    return {"": Sharpness(SGD(model.parameters(), lr=0.05, momentum=0.9))}


def of_table_and_net(model: Any) -> dict[str, Optimizer]:
    table = Adagrad(model.table.parameters(), lr=0.1, eps=1e-2)
    return {"table": table, "net": SGD(model.net.parameters(), lr=0.05, momentum=0.9)}


# --- the mechanisms -----------------------------------------------------------------------------------------------------------


def clamp(model: nn.Module) -> None:
    """Each element of the mean gradient to a range."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.1, 0.1)


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """A program that uses it.

    Attributes:
        loss: the loss of a micro-batch.
        model: makes the model.
        by_hand: makes the model of the reference, if that is another.
        optimizers: makes the optimizers, by name; the only one is called "".
        limit: `max_grad_norm`.
        settings: other arguments of `create_trainer` and `UpdateOptions`.
        change: what a handler of GRADIENTS_REDUCED does.
        sees_state: whether forward takes the state.
        on_demand: whether updates are asked for one by one.
        sizes: samples in the micro-batches of each rank.
        empty: rank and micro-batch in whose place the loader gives None.
        updates: of an epoch.
        refused: what the error says, by the way of crossing ranks in which it is refused.
    """

    loss: Loss = plain
    model: Callable[[], nn.Module] = network
    by_hand: Callable[[], nn.Module] | None = None
    optimizers: Callable[[Any], dict[str, Optimizer]] = one
    limit: Any = 2.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[nn.Module], None] | None = None
    sees_state: bool = False
    on_demand: bool = False
    sizes: tuple[tuple[int, ...], ...] = ((2, 3, 1, 4, 2, 3), (4, 1, 2))
    empty: frozenset[tuple[int, int]] = frozenset()
    updates: int = 3
    refused: Mapping[str, str] = field(default_factory=dict)


MECHANISMS = {
    "none-of-them": Mechanism(),
    "update-on-demand": Mechanism(on_demand=True),
    "several-optimizers": Mechanism(optimizers=two, limit={"matrices": 1.0, "others": 0.5}),
    "closure": Mechanism(
        optimizers=sharpness,
        settings={"closure": True},
        refused={
            "fsdp": "closure must be False for a model with DTensors, as fully_shard makes them.*use DistributedDataParallel$"
        },
    ),
    "changed-gradients": Mechanism(change=clamp, limit=0.15),
    "sparse-gradients": Mechanism(
        loss=with_rows,
        model=WithTable,
        by_hand=lambda: WithTable(is_sparse=False),
        optimizers=of_table_and_net,
        refused={"fsdp": "model must have dense gradients in fully_shard, got 'table.weight'.*build it with sparse=False$"},
    ),
    "forward-with-state": Mechanism(loss=annealed, sees_state=True),
    "sum-and-denominators": Mechanism(loss=per_sample, optimizers=slow, limit=50.0, settings={"normalize": False}),
    "whole-groups": Mechanism(sizes=((2, 3, 1, 4, 2), (4, 1, 2)), updates=2, settings={"drop_last_group": True}),
    "empty-micro-batches": Mechanism(settings={"none_is_empty": True}, empty=frozenset({(0, 2), (0, 3), (1, 1)})),
    "carried-state": Mechanism(loss=recurrent, sees_state=True),
    "parameters-outside": Mechanism(
        loss=scaled,
        model=with_scale,
        refused=dict.fromkeys(("ddp", "small", "fsdp"), rf"a forward of its own .* got a ModuleDict; .*{REPLICAS}"),
    ),
}


def groups(mechanism: Mechanism, *, poisoned: bool = False) -> list[list[list[Any]]]:
    """The micro-batches of each update of an epoch, by rank; None in the place of one that is empty."""
    data, start, ranks = cuts.samples(), 0, []
    for rank, sizes in enumerate(mechanism.sizes):
        made: list[Any] = []
        for number, size in enumerate(sizes):
            x, y, w = (part[start : start + size].clone() for part in data)
            start += size
            if poisoned and (rank, number) == POISONED:
                y[0] = math.nan
            made.append(None if (rank, number) in mechanism.empty else (x, y, w))
        ranks.append(made)
    return [[made[STEPS * update : STEPS * (update + 1)] for made in ranks] for update in range(mechanism.updates)]


class Record(NamedTuple):
    """What an update came to. `logs` are sums."""

    loss: float
    sample_size: float
    grad_norm: float
    applied: bool
    logs: dict[str, float]


def flat(model: nn.Module) -> list[float]:
    """All parameters. Collective, if they are sharded."""
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [number for p in whole for number in p.detach().flatten().tolist()]


# --- by hand ------------------------------------------------------------------------------------------------------------------


class ByHand:
    """The loop on the micro-batches of all ranks, in this process."""

    def __init__(self, mechanism: Mechanism, *, poisoned: bool = False) -> None:
        self._mechanism = mechanism
        self.model = (mechanism.by_hand or mechanism.model)()
        self._optimizers = mechanism.optimizers(self.model)
        self._carried: list[dict[str, Any]] = [{} for _ in mechanism.sizes]
        epoch = groups(mechanism, poisoned=poisoned)
        self.records = [self._update(group, number / (EPOCHS * len(epoch))) for number, group in enumerate(EPOCHS * epoch)]

    def _update(self, group: list[list[Any]], progress: float) -> Record:
        carried = copy.deepcopy(self._carried)
        loss, size, logs, norm = self._evaluate(group, progress)
        applied = math.isfinite(norm)
        if not applied:
            self._carried = carried
        for optimizer in self._optimizers.values() if applied else ():
            again = (lambda: self._evaluate(group, progress)) if self._mechanism.settings.get("closure") else None
            optimizer.step(torch.enable_grad()(again) if again else None)  # type: ignore[arg-type]
        return Record(loss, size, norm, applied, logs)

    def _evaluate(self, group: list[list[Any]], progress: float) -> tuple[float, float, dict[str, float], float]:
        """Leaves the gradient that is stepped along."""
        mechanism, total, size, logs = self._mechanism, torch.zeros(()).double(), 0.0, {}
        for rank, micro_batches in enumerate(group):
            for index, micro_batch in enumerate(each for each in micro_batches if each is not None):
                outcome = mechanism.loss(self.model, micro_batch, Place(progress, index, self._carried[rank]))
                total, size = total + outcome[0], size + outcome[1]
                for name, value in outcome[2].items():
                    logs[name] = logs.get(name, 0.0) + float(value[0] if isinstance(value, tuple) else value)
        self.model.zero_grad()
        (total if mechanism.settings.get("normalize") is False else total / size).backward()
        if mechanism.change is not None:
            mechanism.change(self.model)
        return float(total.detach()) / size, size, logs, self._clip()

    def _clip(self) -> float:
        """The norm before."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        limit = self._mechanism.limit
        for name, optimizer in self._optimizers.items() if math.isfinite(norm) else ():
            parameters = [p for g in optimizer.param_groups for p in g["params"]]
            if isinstance(limit, Mapping):
                torch.nn.utils.clip_grad_norm_(parameters, limit[name])
        if not isinstance(limit, Mapping) and math.isfinite(norm):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        return norm


# --- by the library -----------------------------------------------------------------------------------------------------------


class Program:
    """A trainer for this rank, and what it moves.

    Args:
        name: of the mechanism.
        way: how gradients cross the ranks.
        poisoned: whether a target is NaN.
        arguments: of `create_trainer` and `UpdateOptions`.
    """

    def __init__(self, name: str, way: str, *, poisoned: bool = False, **arguments: Any) -> None:
        self.mechanism = mechanism = MECHANISMS[name]
        self.model = mechanism.model()
        if way == "fsdp":
            _shard(self.model)
        wrapped = DistributedDataParallel(self.model) if way in ("ddp", "small") else self.model
        self.optimizers = mechanism.optimizers(self.model)
        options: dict[str, Any] = {"accumulation_steps": STEPS, "max_grad_norm": mechanism.limit}
        options |= {"reduction": {"small": "auto"}.get(way, way), "on_nonfinite": "skip"}
        options |= dict(mechanism.settings) | arguments
        forward = self._forward_with_state if mechanism.sees_state else self._forward
        optimizers = self.optimizers.get("", self.optimizers)
        self.trainer: Trainer = create_trainer(wrapped, optimizers, forward, **with_options(**options))  # type: ignore[arg-type]
        if mechanism.change is not None:
            change = mechanism.change
            self.trainer.add_event_handler(TrainEvents.GRADIENTS_REDUCED, lambda: change(self.model))
        rank = idist.get_rank()
        self.groups = [group[rank] for group in groups(mechanism, poisoned=poisoned)]

    def _forward(self, model: Any, micro_batch: cuts.Sample) -> ForwardOutput:
        return ForwardOutput(*self.mechanism.loss(model, micro_batch, Place()))

    def _forward_with_state(self, model: Any, micro_batch: cuts.Sample, state: Any) -> ForwardOutput:
        place = Place(state.progress, state.micro_batch_in_group or 0, state.carried)
        return ForwardOutput(*self.mechanism.loss(model, micro_batch, place))

    @property
    def num_updates(self) -> int:
        """Of the whole run."""
        return EPOCHS * self.mechanism.updates

    def train(self) -> None:
        """To the end, from wherever a checkpoint leaves it."""
        if not self.mechanism.on_demand:
            # what the third group has in "whole groups" is left out by the option, and not here
            self.trainer.run(self._loader(), max_epochs=EPOCHS)
            return
        with self.trainer.session(max_iters=self.num_updates) as state:
            for group in (EPOCHS * self.groups)[state.iteration :]:
                self.trainer.update(group)

    def _loader(self) -> list[Any]:
        loader = [micro_batch for group in self.groups for micro_batch in group]
        size = len(self.mechanism.sizes[idist.get_rank()])
        return [*loader, *loader[: size - len(loader)]]  # a rest that is not a whole group is some micro-batch

    def note_records(self) -> list[Record]:
        """The record of each update from here on."""
        records: list[Record] = []

        def note(trainer: Trainer) -> None:
            output = trainer.state.update_output
            assert output is not None
            records.append(Record(output.loss, output.sample_size, output.grad_norm, output.applied, dict(output.logs)))

        self.trainer.add_event_handler(Events.ITERATION_COMPLETED, note)
        return records

    def contents(self) -> Iterator[Any]:
        """What a resumed run must have the same bits of."""
        yield self.model.state_dict()
        for optimizer in self.optimizers.values():
            yield optimizer.state_dict()
            yield optimizer.inner.state_dict() if isinstance(optimizer, Sharpness) else None
        yield self.trainer.state_dict()


def _shard(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (idist.get_world_size(),))
    for module in model.children() if isinstance(model, nn.ModuleDict) else [model]:  # torch shards no container
        fully_shard(module, mesh=mesh)
