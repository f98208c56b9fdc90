"""Trains a small GPT on the source text of Python's own standard library, byte by byte. Nothing is downloaded.

    python examples/language_model.py                                  # one process
    python examples/language_model.py --nproc 2                        # two, started by the script itself
    torchrun --nproc_per_node=2 examples/language_model.py             # two, started by torchrun

The three train on the same samples in the same updates: their losses are equal up to rounding. Interrupt one with Ctrl-C, or
kill it, and start any of them again: it continues where it was. From top to bottom: the settings, the data, the model, the one
function that the trainer needs, and the run with its handlers.
"""

import inspect
import math
import os
import signal
import sysconfig
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

# Before torch starts its threads: waiting threads sleep. By default they spin, which slows a busy machine down.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import ignite.distributed as idist
import torch
import torch.nn.functional as F  # noqa: N812
import typer
from ignite.engine import Events
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm
from typer import Option

from ignite_train import ForwardOutput, ResumableLoader, ShardedSampler, Trainer, create_evaluator, create_trainer
from ignite_train.handlers import (
    Checkpoint,
    LearningRateSchedule,
    ProgressLog,
    StopOnSignal,
    TensorBoard,
    TrainingMetrics,
    Validation,
)
from launching import launch, number_of_processes

# Left out of the training text: what is not the library itself, and tables of data that look like source.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class Settings:
    """What the command line can change. All counts are over all processes together."""

    nproc: Annotated[int, Option(min=1, help="Processes to start; leave at 1 under torchrun.")] = 1
    max_updates: Annotated[int, Option(min=1, help="Optimizer updates.")] = 800
    micro_batch: Annotated[int, Option(min=1, help="Blocks of text to a forward pass, over all processes.")] = 16
    accumulation_steps: Annotated[int, Option(min=1, help="Micro-batches to an update.")] = 2
    context: Annotated[int, Option(min=1, help="Bytes the model can look back.")] = 128
    layers: Annotated[int, Option(min=1, help="Transformer blocks.")] = 4
    width: Annotated[int, Option(min=32, help="Width of the model; a multiple of 32, the width of a head.")] = 128
    learning_rate: Annotated[float, Option(min=0.0, help="At its highest, after the warm-up.")] = 3e-3
    precision: Annotated[Literal["fp32", "bf16"], Option(help="Of the forward pass.")] = "fp32"
    log_every: Annotated[int, Option(min=1, help="Updates between two points of the training curve.")] = 20
    evaluate_every: Annotated[int, Option(min=1, help="Updates between two evaluations on the held-out files.")] = 100
    max_bytes: Annotated[int | None, Option(min=1, help="Use only this many bytes of the text.")] = None
    sample: Annotated[int, Option(min=0, help="Bytes of text to generate at the end.")] = 400
    seed: Annotated[int, Option(min=0, help="Of the initial weights, the order of the samples and the text.")] = 0
    save_every: Annotated[int, Option(min=1, help="Updates between two checkpoints.")] = 50
    log_dir: Annotated[Path, Option(help="Of curves and checkpoints; a run resumes from them.")] = Path("runs/language_model")


def read_standard_library(max_bytes: int | None) -> tuple[bytes, bytes]:
    """Returns the text to train on and the held-out text: every 30th file, whole, so that no file is in both."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts))
    paths = [path for path in paths if not path.name.startswith("_sysconfigdata")]  # differs from machine to machine
    texts: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    for number, path in enumerate(paths):
        if max_bytes is not None and size >= max_bytes:
            break
        text = path.read_bytes()[: None if max_bytes is None else max_bytes - size]
        size += len(text)
        texts[number % 30 == 0].append(text)
    return b"".join(texts[False]), b"".join(texts[True])


def cut_into_blocks(text: bytes, context: int) -> Tensor:
    """Returns rows of `context + 1` bytes that overlap by one, so that each byte but the first is predicted once."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, context + 1, context)


def bigram_bits_per_byte(train_blocks: Tensor, held_out_blocks: Tensor) -> float:
    """Fits the counts of byte pairs, each plus one, and returns the bits it takes to code a held-out byte after another."""

    def pairs(blocks: Tensor) -> Tensor:
        return (blocks[:, :-1].long() * 256 + blocks[:, 1:]).flatten()

    counts = torch.bincount(pairs(train_blocks), minlength=256 * 256).view(256, 256).double() + 1
    bits = -(counts / counts.sum(dim=1, keepdim=True)).log2()
    return bits.flatten()[pairs(held_out_blocks)].mean().item()


class Block(nn.Module):
    """One layer of the transformer: attention to the bytes before, then a small network at each byte."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        for last in (self.project, self.down):  # each layer begins as the identity: a high learning rate is safe at once
            nn.init.zeros_(last.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x`, `[batch, length, width]`, with what this layer adds."""
        query, key, value = self.query_key_value(self.norm_1(x)).unflatten(-1, (3, -1, 32)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Predicts the next byte at every position; embedding and output share their weights."""

    def __init__(self, *, context: int, layers: int, width: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of the byte after each of `tokens`, `[batch, length]`."""
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.bytes.weight)

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int, *, context: int, temperature: float = 0.7) -> str:
        """Continues `prompt` by `length` bytes, each drawn from what the model expects."""
        text = list(prompt)
        device = self.bytes.weight.device
        for _ in range(length):
            logits = self(torch.tensor([text[-context:]], device=device))[0, -1]
            text.append(int(torch.multinomial((logits.float() / temperature).softmax(dim=-1), 1)))
        return bytes(text).decode(errors="replace")


def sample(gpt: GPT, settings: Settings) -> dict[str, str]:
    """A short text for TensorBoard."""
    with torch.random.fork_rng():  # the run draws the same numbers with and without it
        text = gpt.eval().generate(b"def ", min(settings.sample, 100), context=settings.context)
    return {"sample": "\n".join(f"    {line}" for line in text.splitlines())}  # Markdown for code


def forward(model: nn.Module, blocks: Tensor) -> ForwardOutput:
    """The one function that training needs from you: the loss of one micro-batch, summed, and how many bytes it is of.

    The trainer divides by the number of bytes of the whole update, over all micro-batches and processes. Logs are summed
    and divided in the same way, so that a count of right answers becomes the accuracy. The evaluator uses it too.
    """
    inputs, targets = blocks[:, :-1].long(), blocks[:, 1:].flatten().long()
    logits = model(inputs).flatten(0, 1)
    loss = F.cross_entropy(logits, targets, reduction="sum")
    correct = (logits.argmax(dim=-1) == targets).sum()
    return ForwardOutput(loss, targets.numel(), {"accuracy": correct, "bits_per_byte": loss.detach() / math.log(2)})


def train(_local_rank: int, settings: Settings) -> None:
    """The run: what each process does."""
    processes = idist.get_world_size()
    if processes > 1:  # or each process would start a thread on every core
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // idist.get_nproc_per_node()))

    texts = read_standard_library(settings.max_bytes)
    blocks, held_out_blocks = (cut_into_blocks(text, settings.context) for text in texts)
    bigram = bigram_bits_per_byte(blocks, held_out_blocks)
    # This loader deals blocks out to the processes like cards: with a share of the micro-batch on each, all of them
    # together see in every update what one process alone would see. A later run can resume in the middle of an epoch.
    share = settings.micro_batch // processes
    loader = ResumableLoader(blocks, share, shuffle=True, seed=settings.seed, seed_samples=False)
    held_out_loader = DataLoader(held_out_blocks, batch_size=32, sampler=ShardedSampler(held_out_blocks, shuffle=False))

    torch.manual_seed(settings.seed)
    gpt = GPT(context=settings.context, layers=settings.layers, width=settings.width).to(idist.device())
    if idist.get_rank() == 0:
        text, weights = len(texts[0]) / 1e6, sum(parameter.numel() for parameter in gpt.parameters()) / 1e6
        print(f"{text:.1f} MB of text, {weights:.2f} million weights, {settings.max_updates} updates", flush=True)
    model = idist.auto_model(gpt) if processes > 1 else gpt  # with one process it would use DataParallel
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)

    def rate(step: int) -> float:
        warmup = max(1, settings.max_updates // 20)
        progress = max(0.0, (step - warmup) / max(1, settings.max_updates - warmup))
        return min(1.0, (step + 1) / warmup) * (0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2)

    trainer = create_trainer(
        model,
        optimizer,
        forward,
        accumulation_steps=settings.accumulation_steps,
        max_grad_norm=1.0,
        precision=settings.precision,
    )
    evaluator = create_evaluator(model, forward, precision=settings.precision)

    # Everything else is handlers: leave out what you do not need.
    every = Events.ITERATION_COMPLETED(every=settings.log_every)
    LearningRateSchedule(torch.optim.lr_scheduler.LambdaLR(optimizer, rate)).attach(trainer)  # counts applied updates
    validate_at = Events.ITERATION_COMPLETED(every=settings.evaluate_every) | Events.COMPLETED
    Validation(evaluator, held_out_loader, score="bits_per_byte").attach(trainer, validate_at)
    TrainingMetrics().attach(trainer, every)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=10), print_first_line)
    ProgressLog().attach(trainer, Events.ITERATION_COMPLETED(every=100), evaluator=evaluator)
    tensorboard = TensorBoard(settings.log_dir)
    tensorboard.attach(trainer, every, evaluator=evaluator)
    if settings.sample:
        tensorboard.show(trainer, partial(sample, gpt, settings), validate_at)
    trainer.state.metrics["bigram/bits_per_byte"] = bigram  # all metrics are logged: here a level line beside the curves
    checkpoint = Checkpoint(settings.log_dir / "checkpoints", every=settings.save_every, config=asdict(settings))
    checkpoint.attach(trainer, evaluator=evaluator)
    stop = StopOnSignal([signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])  # Ctrl-C: save and end
    stop.attach(trainer)

    trainer.run(loader, max_iters=settings.max_updates)  # resumes from the newest checkpoint, if there is one

    if trainer.state.iteration < settings.max_updates:
        if idist.get_rank() == 0:
            print(f"stopped after update {trainer.state.iteration}; the same command continues from there")
        return
    held_out, output = evaluator.state.metrics or evaluator.run(held_out_loader).metrics, trainer.state.update_output
    if idist.get_rank() == 0:
        print(f"last update: loss {output.loss:.6f} nats per byte, gradient norm {output.grad_norm:.6f}")
        print(f"held-out files: {held_out['bits_per_byte']:.4f} bits per byte, accuracy {held_out['accuracy']:.2%}")
        print(f"byte bigrams:   {bigram:.4f} bits per byte")
        if settings.sample:
            print("-" * 80, gpt.eval().generate(b"def ", settings.sample, context=settings.context), "-" * 80, sep="\n")
        print(f"see the curves with: tensorboard --logdir {settings.log_dir}; to start again, remove that folder")


def print_first_line(trainer: Trainer) -> None:
    """A handler of your own can be a function: here a first line, long before the first one of `ProgressLog`."""
    if idist.get_rank() == 0:
        output = trainer.state.update_output
        tqdm.write(f"update {trainer.state.iteration}: loss {output.loss:.3f} nats per byte")


def main(**options: Any) -> None:
    """Train a small GPT on the source text of Python's standard library, byte by byte."""
    settings = Settings(**options)
    processes = number_of_processes(settings.nproc)
    if settings.micro_batch % processes:
        raise typer.BadParameter(f"--micro-batch must be a multiple of {processes}, the processes; got {settings.micro_batch}")
    if settings.width % 32:
        raise typer.BadParameter(f"--width must be a multiple of 32, the width of a head; got {settings.width}")
    launch(train, processes, settings)


main.__signature__ = inspect.signature(Settings)  # typer takes the options of the command line from here

if __name__ == "__main__":
    typer.run(main)
