"""Small models on meshes of four gloo processes, and the same updates by hand on one process, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as over_ranks
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.optim import Optimizer

from ignite_train import ForwardOutput, Trainer, UpdateOptions, create_trainer

Sample = tuple[Tensor, Tensor]
TOKENS, FEATURES, WIDTH, CLASSES = 4, 6, 8, 6
LIMIT = 0.05  # below the norms that occur, so that clipping does something
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def on_cpu() -> DeviceMesh:
    """All ranks, for `fully_shard`, which without a mesh moves a model to the accelerator of the machine, if there is one."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


class Net(nn.Module):
    """A block as in a transformer, without attention."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(FEATURES, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        out: Tensor = self.head(hidden + self.down(functional.gelu(self.up(self.norm(hidden)))))
        return out


class Attention(nn.Module):
    """One head of attention over all tokens; each rank of `mesh` computes those of its queries (context parallel)."""

    def __init__(self) -> None:
        super().__init__()
        self.mesh: DeviceMesh | None = None
        self.embed, self.values = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.keys = nn.Linear(WIDTH, WIDTH, bias=False)  # the gradient of a bias is zero, and its rounding moves AdamW
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        keys, values = self.keys(hidden), self.values(hidden)
        if self.mesh is not None:
            gather = over_ranks.all_gather_single_autograd
            keys, values = (gather(one.contiguous(), 1, self.mesh) for one in (keys, values))
        out: Tensor = self.head((hidden @ keys.transpose(1, 2)).softmax(-1) @ values)
        return out


class Mixture(nn.Module):
    """Two experts that all tokens use, each by its gate; each rank of `mesh` computes those that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.mesh: DeviceMesh | None = None
        self.weights = nn.Parameter(torch.randn(2, WIDTH, WIDTH) * 0.3)

    def forward(self, hidden: Tensor, gates: Tensor) -> Tensor:
        if self.mesh is None:
            return _mix(hidden, gates, self.weights)
        assert isinstance(self.weights, DTensor)
        held, own = self.weights.to_local(), self.mesh.get_local_rank()
        everyones = over_ranks.all_gather_single_autograd(torch.cat([hidden, gates], 1), 0, self.mesh)
        hidden_of_all, gates_of_all = everyones.split([WIDTH, 2], 1)
        partial = _mix(hidden_of_all, gates_of_all[:, own : own + 1], held)
        return over_ranks.reduce_scatter_single_autograd(partial, "sum", 0, self.mesh)


class Experts(nn.Module):
    """A mixture of experts between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gate = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.experts, self.head = Mixture(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x).flatten(0, 1)
        mixed = self.experts(hidden, self.gate(hidden).softmax(-1))
        out: Tensor = self.head(torch.tanh(mixed)).view(*x.shape[:2], -1)
        return out


def _mix(hidden: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    return torch.einsum("nd,ne,edf->nf", hidden, gates, experts)


def forward(model: nn.Module, micro_batch: Sample) -> ForwardOutput:
    """Cross entropy, summed over the tokens."""
    x, y = micro_batch
    loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
    return ForwardOutput(loss, y.numel(), {"tokens": y.numel()})


def forward_of_own_tokens(model: Any, micro_batch: Sample) -> ForwardOutput:
    """The same for the tokens of this rank of a context-parallel group, which is fed all of them."""
    mesh = model.mesh
    x, y = (part.chunk(mesh.size(), dim=1)[mesh.get_local_rank()] for part in micro_batch)
    return forward(model, (x, y))


# --- ways to cut a model ------------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """How a model lies on four ranks.

    Attributes:
        model: makes it.
        cut: makes DTensors of its parameters on the mesh.
        shape: of the mesh.
        names: of its dimensions.
        data_dims: the option.
        feeds: the dimensions over which ranks are fed their own micro-batches.
        forward: of a micro-batch.
        same_size: whether all micro-batches must have as many samples.
    """

    model: Callable[[], nn.Module]
    cut: Callable[[Any, DeviceMesh], None]
    shape: tuple[int, ...]
    names: tuple[str, ...]
    data_dims: tuple[str, ...] | None
    feeds: tuple[str, ...]
    forward: Callable[[Any, Sample], ForwardOutput] = forward
    same_size: bool = False


def tensor_parallel(model: Any, mesh: DeviceMesh) -> None:
    names = mesh.mesh_dim_names or ()
    parallelize_module(model, mesh[names[-1]], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _sequence_parallel(model: Net, mesh: DeviceMesh) -> None:
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)


def _tensor_parallel_sharded(model: Net, mesh: DeviceMesh) -> None:
    tensor_parallel(model, mesh)
    fully_shard(model.up, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def _sequence_parallel_sharded(model: Net, mesh: DeviceMesh) -> None:
    _sequence_parallel(model, mesh)
    fully_shard(model, mesh=mesh["dp"])


def _sharded(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh)


def _context_parallel(model: Attention, mesh: DeviceMesh) -> None:
    model.mesh = mesh["cp"]
    fully_shard(model, mesh=mesh["dp"])


def expert_parallel(model: Experts, mesh: DeviceMesh) -> None:
    model.experts.mesh = mesh["ep"]
    model.experts.weights = nn.Parameter(distribute_tensor(model.experts.weights.data, mesh["ep"], [Shard(0)]))


def _expert_parallel_sharded(model: Experts, mesh: DeviceMesh) -> None:
    expert_parallel(model, mesh)
    fully_shard(model.experts, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh)


def _replicated(model: nn.Module, mesh: DeviceMesh) -> None:
    replicate(model, mesh=mesh)


LAYOUTS = {
    "TP2 x DP2": Layout(Net, tensor_parallel, (2, 2), ("dp", "tp"), ("dp",), ("dp",)),
    "SP2 x DP2": Layout(Net, _sequence_parallel, (2, 2), ("dp", "tp"), ("dp",), ("dp",)),
    "TP2 x FSDP2": Layout(Net, _tensor_parallel_sharded, (2, 2), ("dp", "tp"), ("dp",), ("dp",)),
    "SP2 x FSDP2": Layout(Net, _sequence_parallel_sharded, (2, 2), ("dp", "tp"), ("dp",), ("dp",)),
    "HSDP 2 x 2": Layout(Net, _sharded, (2, 2), ("copy", "shard"), None, ("copy", "shard")),
    "CP2 x FSDP2": Layout(Attention, _context_parallel, (2, 2), ("dp", "cp"), ("dp", "cp"), ("dp",), forward_of_own_tokens),
    "EP2 x DP2": Layout(Experts, expert_parallel, (2, 2), ("dp", "ep"), ("dp", "ep"), ("dp", "ep"), same_size=True),
    "odd TP2 x FSDP2": Layout(partial(Net, 7), _tensor_parallel_sharded, (2, 2), ("dp", "tp"), ("dp",), ("dp",)),
    "TP4": Layout(Net, tensor_parallel, (4,), ("tp",), (), ()),
    "EP2 x FSDP2": Layout(Experts, _expert_parallel_sharded, (2, 2), ("dp", "ep"), ("dp", "ep"), ("dp", "ep"), same_size=True),
    "replicate": Layout(Net, _replicated, (4,), ("copy",), None, ("copy",)),
}


UNUSUAL = {
    # Not "tp" for four ranks: that part would be equal to the mesh of TP4, which torch then takes for it; that has no "dp".
    "TP4 x DP1": LAYOUTS["TP2 x DP2"]._replace(shape=(1, 4), names=("dp", "wide")),
    "TP1 x DP4": LAYOUTS["TP2 x DP2"]._replace(shape=(4, 1)),
    "TP4 x FSDP1": LAYOUTS["TP2 x FSDP2"]._replace(shape=(1, 4), names=("dp", "wide")),
    "TP1 x FSDP4": LAYOUTS["TP2 x FSDP2"]._replace(shape=(4, 1)),
    "SP1 x FSDP4": LAYOUTS["SP2 x FSDP2"]._replace(shape=(4, 1)),
    "HSDP 4 x 1": LAYOUTS["HSDP 2 x 2"]._replace(shape=(4, 1)),
    "HSDP 1 x 4": LAYOUTS["HSDP 2 x 2"]._replace(shape=(1, 4)),
    "CP4 x FSDP1": LAYOUTS["CP2 x FSDP2"]._replace(shape=(1, 4)),
    "CP1 x FSDP4": LAYOUTS["CP2 x FSDP2"]._replace(shape=(4, 1)),
}


def layout_of(name: str) -> Layout:
    """One of both tables."""
    return LAYOUTS[name] if name in LAYOUTS else UNUSUAL[name]


def copies_of(name: str) -> int:
    """How many ranks run each micro-batch and count it: all of a context-parallel group, each on its tokens."""
    return int(name[2]) if name.startswith("CP") else 1


def new_model(layout: Layout) -> nn.Module:
    """Whole, with the same weights in each process."""
    torch.manual_seed(3)
    return layout.model().double()


def groups_of(layout: Layout, steps: int, cut: str, updates: int = 3, seed: int = 5) -> list[list[list[Sample]]]:
    """For each update, for each data rank that is fed on its own, its micro-batches.

    `cut`: `"ragged"`, or `"missing"` where a data rank has none in the second update and fewer in the others.
    """
    ranks = 1
    for name, size in zip(layout.names, layout.shape, strict=True):
        ranks *= size if name in layout.feeds else 1
    generator = torch.Generator().manual_seed(seed)
    found: list[list[list[Sample]]] = []
    for update in range(updates):
        found.append([])
        for rank in range(ranks):
            last = rank == ranks - 1
            number = steps if cut == "ragged" or ranks == 1 or not last else 0 if update == 1 else max(1, steps - 1)
            found[-1].append([_micro_batch(generator, 2 if layout.same_size else 1 + (rank + i) % 3) for i in range(number)])
    return found


def _micro_batch(generator: torch.Generator, size: int) -> Sample:
    x = torch.randn(size, TOKENS, FEATURES, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (size, TOKENS), generator=generator)


@cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """One for all cases of a process: each has process groups of its own."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def on_mesh(layout: Layout) -> tuple[nn.Module, DeviceMesh]:
    """A model on the mesh."""
    mesh = mesh_of(layout.shape, layout.names)
    model = new_model(layout)
    layout.cut(model, mesh)
    return model, mesh


def place(layout: Layout, mesh: DeviceMesh) -> int:
    """This rank's place among those that are fed on their own."""
    index = 0
    for name, size, coordinate in zip(layout.names, layout.shape, mesh.get_coordinate() or (), strict=True):
        if name in layout.feeds:
            index = index * size + coordinate
    return index


def whole(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, gathered."""
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in model.named_parameters()}


class Record(NamedTuple):
    """What an update says of itself."""

    loss: float
    sample_size: float
    grad_norm: float
    num_micro_batches: int
    tokens: float


Result = tuple[dict[str, Tensor], list[Record]]


def trainer_of(layout: Layout, model: nn.Module, optimizer: Optimizer, **arguments: Any) -> Trainer:
    options = {"data_dims": layout.data_dims} | arguments.pop("options", {})
    return create_trainer(model, optimizer, layout.forward, options=UpdateOptions(**options), **arguments)


def train(
    name: str, optimizer: str, steps: int, cut: str, limit: float | None, seed: int = 5
) -> tuple[dict[str, Tensor], list[Record]]:
    """The parameters and the records after three updates on a mesh."""
    layout = layout_of(name)
    model, mesh = on_mesh(layout)
    trainer = trainer_of(
        layout, model, OPTIMIZERS[optimizer](model.parameters()), accumulation_steps=steps, max_grad_norm=limit
    )
    records = []
    with trainer.session(max_iters=3):
        for group in groups_of(layout, steps, cut, seed=seed):
            output = trainer.update(group[place(layout, mesh)])
            assert output.applied
            records.append(
                Record(output.loss, output.sample_size, output.grad_norm, output.num_micro_batches, output.logs["tokens"])
            )
    return whole(model), records


def by_hand(
    name: str, optimizer: str, steps: int, cut: str, limit: float | None, seed: int = 5
) -> tuple[dict[str, Tensor], list[Record]]:
    """The same on one process, with torch alone."""
    layout = layout_of(name)
    model = new_model(layout)
    stepping, records = OPTIMIZERS[optimizer](model.parameters()), []
    for group in groups_of(layout, steps, cut, seed=seed):
        micro_batches = [micro_batch for own in group for micro_batch in own]
        loss: Any = sum(forward(model, micro_batch).loss for micro_batch in micro_batches)
        size = sum(y.numel() for _, y in micro_batches)
        (loss / size).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9 if limit is None else limit)
        stepping.step()
        stepping.zero_grad()
        logged = float(size)
        records.append(Record(float(loss.detach()) / size, size, float(norm), len(micro_batches), logged))
    return whole(model), records


def differences(found: Sequence[tuple[dict[str, Tensor], list[Record]]], expected: tuple[Any, Any], copies: int) -> list[float]:
    """Of each rank the largest difference of a parameter, and of what was recorded. `copies`: of the micro-batches."""
    worst = []
    for weights, records in found:
        worst.append(max(float((weights[name] - value).abs().max()) for name, value in expected[0].items()))
        for ours, theirs in zip(records, expected[1], strict=True):
            theirs = theirs._replace(num_micro_batches=theirs.num_micro_batches * copies)
            worst += [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return worst
