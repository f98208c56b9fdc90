"""Measures the memory of a rank with replicas, with ZeRO-1 and with `fully_shard`; writes the table of docs/distributed.md.

    python benchmarks/sharding_memory.py            # measures on two gloo processes, and writes
    python benchmarks/sharding_memory.py --print    # only shows the table

Counted are the bytes of this rank's tensors: of the parameters and of the optimizer's state after an update, of the gradients
when they are reduced, and at the moment of an update in which all tensors together have most, with activations, buckets, and
whole copies of what is sharded. That moment is looked for after each operation of torch, of which one follows the other on the
CPU. What the allocator holds beyond them is not counted.
"""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import ignite.distributed as idist
import torch
import typer
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typer import Option

from ignite_train import ForwardOutput, TrainEvents, UpdateOptions, create_trainer
from interleaving import table

PAGE = Path(__file__).parent.parent / "docs/distributed.md"
BEGIN, END = "<!-- written by benchmarks/sharding_memory.py -->\n", "<!-- end of sharding_memory -->\n"
HEAD = ("", "parameters", "gradients", "optimizer", "most at once", "with 4 micro-batches")
ROWS, WIDTH, LAYERS, VOCABULARY, LENGTH = 4, 128, 6, 256, 32


class Memory(NamedTuple):
    """Bytes of one rank; see above."""

    parameters: int
    gradients: int
    optimizer: int
    most: int


def build_model(width: int = WIDTH, layers: int = LAYERS) -> nn.Module:
    """A Transformer, whose blocks are sharded one by one."""
    block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    stack = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(VOCABULARY, width), stack, nn.Linear(width, VOCABULARY))


def replicas(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Each rank has all of everything."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True), torch.optim.AdamW(model.parameters())


def zero_1(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The optimizer's state is divided."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)


def zero_2(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Everything is divided; the parameters are whole from forward to the end of backward."""
    return sharded(model, reshard=False)


def zero_3(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Everything is divided; the parameters of a block are whole while it computes."""
    return sharded(model, reshard=True)


def sharded(model: nn.Module, *, reshard: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """`fully_shard` of each block and of the rest."""
    for block in model[1].layers:
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    return model, torch.optim.AdamW(model.parameters())


WAYS: dict[str, Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]] = {
    "`DistributedDataParallel`": replicas,
    "the same, `ZeroRedundancyOptimizer` (ZeRO-1)": zero_1,
    "`fully_shard`, `reshard_after_forward=False` (as ZeRO-2)": zero_2,
    "`fully_shard` (as ZeRO-3)": zero_3,
    "the same, `reduce_each_micro_batch=True`": zero_3,
}


def local_tensors(values: Any) -> list[Tensor]:
    """All tensors in nested containers; of a sharded one its shard."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def count_bytes(values: Any) -> int:
    """Of the elements of all tensors; of a sharded one those of its shard."""
    return sum(tensor.numel() * tensor.element_size() for tensor in local_tensors(values))


class MostAtOnce(TorchDispatchMode):
    """Inside it, the most bytes that all living storages made or used in it have had at once.

    Attributes:
        most: bytes; may be set to 0 to begin again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._living: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls an operation of torch, and looks if it has made or resized a storage."""
        result = function(*args, **(kwargs or {}))
        is_new = False
        for tensor in local_tensors([args, kwargs, result]):
            storage = tensor.untyped_storage()
            if (key := storage._cdata) not in self._living or self._living[key]() is None:
                self._living[key] = weakref.ref(storage)
                is_new = True
        if is_new or "resize_" in str(function):
            living = {key: storage for key, reference in self._living.items() if (storage := reference()) is not None}
            self._living = {key: self._living[key] for key in living}
            self.most = max(self.most, sum(storage.nbytes() for storage in living.values()))
        return result


def forward(model: nn.Module, tokens: Tensor) -> ForwardOutput:
    """Next-token loss."""
    logits, targets = model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
    return ForwardOutput(cross_entropy(logits, targets, reduction="sum"), sample_size=targets.numel())


def measure(way: str, accumulation: int, width: int = WIDTH, layers: int = LAYERS) -> Memory:
    """Makes three updates on this rank, and looks at the third."""
    torch.manual_seed(0)
    gradients: list[int] = []
    with MostAtOnce() as watch:
        model, optimizer = WAYS[way](build_model(width, layers))
        options = UpdateOptions(reduce_each_micro_batch="reduce_each_micro_batch" in way)
        trainer = create_trainer(model, optimizer, forward, accumulation_steps=accumulation, protect=False, options=options)

        @trainer.on(TrainEvents.BACKWARD_COMPLETED)
        def look() -> None:
            gradients.append(count_bytes([parameter.grad for parameter in model.parameters()]))

        @trainer.on(Events.ITERATION_STARTED(once=3))
        def begin() -> None:
            watch.most = 0

        trainer.run([torch.randint(VOCABULARY, (ROWS, LENGTH + 1)) for _ in range(3 * accumulation)], max_epochs=1)
    state = optimizer.optim.state if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer.state
    return Memory(count_bytes(list(model.parameters())), gradients[-1], count_bytes(list(state.values())), watch.most)


def rows() -> list[tuple[str, ...]]:
    """Of the table, on this rank: megabytes, and the share of what replicas have."""
    found = {way: (measure(way, 1), measure(way, 4)) for way in WAYS}
    of_replicas = next(iter(found.values()))

    def cell(value: int, reference: int) -> str:
        return f"{value / 1e6:.2f} ({value / reference:.2f})"

    cells = []
    for way, (one, four) in found.items():
        numbers = [cell(value, reference) for value, reference in zip(one, of_replicas[0], strict=True)]
        cells.append((way, *numbers, cell(four.most, of_replicas[1].most)))
    return cells


def write(_local_rank: int, *, show: bool) -> None:
    """Measures on all ranks, and writes on the first."""
    torch.set_num_threads(1)
    listed = rows()
    if idist.get_rank() != 0:
        return
    parameters = sum(parameter.numel() for parameter in build_model().parameters())
    text = table(HEAD, listed) + "\n\n"
    text += f"Megabytes of rank 0 of {idist.get_world_size()}, and the share of those of replicas; a Transformer with "
    text += f"{parameters / 1e6:.2f} M parameters in float32, AdamW, torch {torch.__version__}.\n"
    if show:
        print(text)
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + text + "\n" + END + rest.partition(END)[2], encoding="utf-8")


def main(
    *,
    show: Annotated[bool, Option("--print", help="Print the table, and do not change the page.")] = False,
) -> None:
    """Measure the memory of each way, and write the table."""
    with idist.Parallel(backend="gloo", nproc_per_node=2) as parallel:
        parallel.run(write, show=show)


if __name__ == "__main__":
    typer.run(main)
