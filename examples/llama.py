"""Trains a small Llama with tensor parallel, `fully_shard` and activation checkpointing, on the source text of Python itself.

    python examples/llama.py                                           # one process
    python examples/llama.py --nproc 4                                 # tensor parallel over 2, sharded over 2
    torchrun --nproc_per_node=4 examples/llama.py --tp 4               # tensor parallel over 4

All of them train on the same samples in the same updates: their losses are equal up to rounding, and each continues from the
checkpoint of any other. From top to bottom: the model, how it is laid out on the mesh, and the run.
"""

import inspect
import os
from typing import Annotated

# Before torch starts its threads: waiting threads sleep. By default they spin, which slows a busy machine down.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse as text_to_learn
from pathlib import Path

import ignite.distributed as idist
import torch
import torch.nn.functional as F  # noqa: N812
import typer
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from typer import Option

from ignite_train import ForwardOutput, ResumableLoader, Trainer, UpdateOptions, create_trainer
from ignite_train.handlers import Checkpoint
from launching import launch, number_of_processes

WIDTH, HEADS, LAYERS, CONTEXT = 32, 4, 2, 32
MICRO_BATCH, ACCUMULATION_STEPS = 8, 2  # blocks of text to a forward, over all data ranks together


class Attention(nn.Module):
    """Causal attention with rotary positions. Under tensor parallel each rank has some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Takes and gives (batch, tokens, width)."""
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True)
        projected: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return projected


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Takes and gives (batch, tokens, width)."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """One layer of the transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        """Takes and gives (batch, tokens, width)."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Llama(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Takes bytes (batch, tokens), and gives the logits of the next one (batch, tokens, 256)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(x.shape[-2], device=x.device, dtype=torch.float64), rates)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.split(half, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def lay_out(model: Llama, mesh: DeviceMesh) -> None:
    """Tensor and sequence parallel over "tp", activations recomputed in backward, and all of it sharded over "dp"."""
    outside = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    inside = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        **{f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")},
        "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh["tp"], outside)
    for index, block in enumerate(model.blocks):
        parallelize_module(block, mesh["tp"], inside)
        model.blocks[index] = fully_shard(checkpoint_wrapper(block), mesh=mesh["dp"])  # type: ignore[no-untyped-call]
    fully_shard(model, mesh=mesh["dp"])


def forward(model: nn.Module, block: Tensor) -> ForwardOutput:
    """The one function that the trainer needs: the loss summed over the bytes, and how many they are."""
    targets = block[:, 1:].long()
    logits = model(block[:, :-1].long())
    return ForwardOutput(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel())


def train(_local_rank: int, tp: int, max_updates: int, directory: Path | None, in_float64: bool) -> None:
    """The run: what each process does."""
    torch.set_num_threads(1)
    text = torch.frombuffer(bytearray(inspect.getsource(text_to_learn).encode()), dtype=torch.uint8)
    blocks = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    torch.manual_seed(1)  # the same weights on all ranks, before they are laid out
    model = Llama().to(torch.float64 if in_float64 else torch.float32).to(idist.device())
    mesh = None
    if idist.get_world_size() > 1:
        shape = (idist.get_world_size() // tp, tp)
        mesh = init_device_mesh(idist.device().type, shape, mesh_dim_names=("dp", "tp"))
        lay_out(model, mesh)
    data_mesh = None if mesh is None else mesh["dp"]
    share = MICRO_BATCH // (1 if data_mesh is None else data_mesh.size())
    loader = ResumableLoader(blocks, share, shuffle=True, seed=1, drop_last=True, seed_samples=False, mesh=data_mesh)
    trainer = create_trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        forward,
        accumulation_steps=ACCUMULATION_STEPS,
        max_grad_norm=1.0,
        options=UpdateOptions(data_dims=("dp",)),
    )
    if directory is not None:
        Checkpoint(directory, every=5).attach(trainer)

    def say(trainer: Trainer) -> None:
        output = trainer.state.update_output
        if output is not None and idist.get_rank() == 0:
            numbers = f"loss {output.loss:.10f}, gradient norm {output.grad_norm:.10f}, {output.sample_size:.0f} bytes"
            print(f"update {trainer.state.iteration}: {numbers}", flush=True)

    trainer.add_event_handler(Events.ITERATION_COMPLETED, say)
    trainer.run(loader, max_iters=max_updates)


def main(
    nproc: Annotated[int, Option(min=1, help="Processes to start; leave at 1 under torchrun.")] = 1,
    tp: Annotated[int, Option(min=1, help="Ranks of a tensor-parallel group.")] = 2,
    max_updates: Annotated[int, Option(min=1, help="Optimizer updates.")] = 60,
    directory: Annotated[Path | None, Option(help="Where checkpoints lie; none by default.")] = None,
    in_float64: Annotated[bool, Option(help="Computes in float64, to compare losses.")] = False,
) -> None:
    """Train a small Llama on the source text of a module of Python, byte by byte."""
    processes = number_of_processes(nproc)
    if processes > 1 and (processes % tp or HEADS % tp or CONTEXT % tp or MICRO_BATCH % (processes // tp)):
        raise typer.BadParameter(f"--tp must divide {processes} processes, {HEADS} heads and {CONTEXT} bytes, got {tp}")
    launch(train, processes, tp, max_updates, directory, in_float64)


if __name__ == "__main__":
    typer.run(main)
