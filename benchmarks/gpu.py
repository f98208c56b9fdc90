"""GPT-2-sized training on one CUDA GPU in bf16: tokens per second, FLOP utilisation, idle time and host waits of each loop.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --dry-run      # every contestant on the CPU at a tiny size: shows that it runs, measures nothing

- Tokens per second: median over interleaved rounds, also as a ratio to the loop by hand of the same round.
- FLOP utilisation: 6 FLOP per parameter and token, and 12 · layers · width · context per token for attention, over the dense
  bf16 peak of the card (`--peak-tflops` for a card that the table does not know).
- Idle in the optimizer phase: from the end of the last kernel that a backward thread launched to the end of the last kernel of
  the fused optimizer, the share in which no kernel runs; from torch's profiler.
- Waits: what `torch.cuda.set_sync_debug_mode("warn")` reports, for each update.
"""

import json
import math
import statistics
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from typer import Option

import contestants
import peers
from contestants import REFERENCE, Contestant, MicroBatches, Work
from ignite_train import ForwardOutput
from interleaving import MIN_REPETITIONS, interleave, table

CONTESTANTS = contestants.BY_HAND | contestants.IGNITE_TRAIN
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "L40S": 362.0, "RTX 4090": 165.0}  # dense bf16
LOSS_TOLERANCE = 0.02  # after a few updates; bf16 and Adam make more of it than rounding
WARM_UP, OBSERVED, STRETCH, STRETCHES = 3, 3, 3, 4  # updates
STEPS = 4  # micro-batches to an update


class Block(nn.Module):
    """Attention to what came before, then a small network at each token."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x`, `[batch, length, width]`, with what this layer adds."""
        query, key, value = self.query_key_value(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """GPT-2's shapes: 12 layers of width 768 are its smallest, 124 M parameters."""

    def __init__(self, *, layers: int, width: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of the token after each."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return functional.linear(self.norm(self.blocks(x)), self.tokens.weight)


def loss_of(model: nn.Module, micro_batch: tuple[Tensor], reduction: str) -> Tensor:
    """Next-token loss."""
    tokens = micro_batch[0]
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction=reduction)


def forward(model: nn.Module, micro_batch: tuple[Tensor]) -> ForwardOutput:
    """The same as a sum, with its weight."""
    return ForwardOutput(loss_of(model, micro_batch, "sum"), micro_batch[0][:, 1:].numel())


class ObservedMicroBatches(MicroBatches):
    """Counts the host's waits over some updates, then profiles some, and then lets the clock run."""

    def __init__(self, batches: list[Any], *, cuda: bool) -> None:
        wait = torch.cuda.synchronize if cuda else None  # the clock is to see what the GPU has done, not what it was told
        warm_up = WARM_UP + 2 * OBSERVED + 1
        super().__init__(batches, steps=STEPS, stretch=STRETCH, stretches=STRETCHES, warm_up=warm_up, before_note=wait)
        self._cuda, self.waits, self.idle = cuda, 0.0, math.nan

    def __iter__(self) -> Iterator[Any]:
        count_from, profile_from, end = ((WARM_UP + more) * STEPS for more in (0, OBSERVED, 2 * OBSERVED))
        recorder = warnings.catch_warnings(record=True)
        profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] if self._cuda else [ProfilerActivity.CPU])
        caught: Any = []
        for index, batch in enumerate(super().__iter__()):
            if self._cuda and index == count_from:
                caught = recorder.__enter__()
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
            if self._cuda and index == profile_from:
                torch.cuda.set_sync_debug_mode("default")
                recorder.__exit__(None, None, None)
                self.waits = sum("synchroniz" in str(warning.message) for warning in caught) / OBSERVED
                profiler.__enter__()
            if self._cuda and index == end:
                torch.cuda.synchronize()
                profiler.__exit__(None, None, None)
                with tempfile.TemporaryDirectory() as directory:
                    trace = Path(directory) / "trace.json"
                    profiler.export_chrome_trace(str(trace))
                    self.idle = idle_share(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"])
            yield batch


def idle_share(events: list[dict[str, Any]]) -> float:
    """How much of the optimizer phase the GPU does nothing, over all updates in a trace of torch's profiler.

    Backward's kernels are launched by threads of autograd's own; the optimizer's have Adam in their names.
    """
    timed = [event for event in events if event.get("ph") == "X"]
    threads = {e["args"]["correlation"]: e["tid"] for e in timed if e.get("cat") in ("cuda_runtime", "cuda_driver")}
    on_gpu = (event for event in timed if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"))
    kernels = [(e["ts"], e["ts"] + e["dur"], threads.get(e["args"].get("correlation")), e["name"]) for e in on_gpu]
    main = next((thread for _, _, thread, name in kernels if "Adam" in name), None)
    idle = whole = gap = covered = 0.0
    since: float | None = None  # the end of the latest kernel of a backward
    for start, end, thread, name in sorted(kernels, key=lambda kernel: kernel[0]):
        if thread not in (main, None):
            since, gap, covered = end, 0.0, end
        elif since is not None:
            gap += max(0.0, start - covered)
            covered = max(covered, end)
            if "Adam" in name:
                idle, whole = idle + gap, whole + covered - since
                since, gap = covered, 0.0
    return idle / whole if whole else math.nan


@dataclass(frozen=True)
class Shape:
    """How large everything is."""

    layers: int
    width: int
    context: int
    samples: int
    vocabulary: int
    device: str

    def work(self, *, compiled: bool) -> Work:
        """A fresh model, and tokens on the device: moving data is not what is measured here."""
        torch.manual_seed(0)
        model = GPT2(layers=self.layers, width=self.width, context=self.context, vocabulary=self.vocabulary).to(self.device)
        if compiled:
            model.compile()
        size = (self.samples, self.context + 1)
        batches = [(torch.randint(self.vocabulary, size, device=self.device),) for _ in range(8)]
        return Work(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
            micro_batches=ObservedMicroBatches(batches, cuda=self.device == "cuda"),
            mean_loss=partial(loss_of, reduction="mean"),
            forward=forward,
            accumulation_steps=STEPS,
            precision="bf16",
        )

    @property
    def tokens(self) -> int:
        """In one update."""
        return STEPS * self.samples * self.context

    def flop(self, parameters: int) -> float:
        """Of forward and backward, for one token."""
        return 6.0 * parameters + 12.0 * self.layers * self.width * self.context


def compare(shape: Shape, everyone: dict[str, Contestant], *, compiled: bool, repetitions: int, peak: float | None) -> str:
    """Trains with all contestants in turn and returns a table."""
    seen: dict[str, list[tuple[float, float, float]]] = {name: [] for name in everyone}  # waits, idle share, peak memory
    expected: list[float] = []
    parameters = sum(parameter.numel() for parameter in shape.work(compiled=False).model.parameters())

    def seconds(name: str) -> float:
        work = shape.work(compiled=compiled)
        if shape.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        outcome = contestants.run(everyone[name], work)
        expected.append(outcome.losses[-1])
        if abs(expected[-1] / expected[0] - 1) > LOSS_TOLERANCE:
            raise AssertionError(f"{name}: the last loss is {expected[-1]:.4f}, that of the loop by hand {expected[0]:.4f}")
        memory = torch.cuda.max_memory_allocated() / 2**30 if shape.device == "cuda" else math.nan
        seen[name].append((work.micro_batches.waits, work.micro_batches.idle, memory))
        return float(work.micro_batches.wall_seconds)

    rounds = interleave({name: partial(seconds, name) for name in everyone}, repetitions=repetitions, bracket=False)
    rows = []
    for name in everyone:
        waits, idle, memory = (statistics.median(values) for values in zip(*seen[name], strict=True))
        speed = shape.tokens / rounds.typical(name)
        utilisation = f"{speed * shape.flop(parameters) / peak / 1e12:.1%}" if peak else "?"
        ratio = "1" if name == REFERENCE else rounds.ratios(name).show(3)
        rows.append([name, f"{speed:,.0f}", ratio, utilisation, f"{idle:.1%}", f"{waits:g}", f"{memory:.2f}"])
    head = [
        "loop",
        "tokens/s",
        "time, by hand = 1 (quartiles)",
        "FLOP utilisation",
        "idle in optimizer phase",
        "waits an update",
    ]
    return table([*head, "peak GiB"], rows)


def main(
    layers: Annotated[int, Option(min=1)] = 12,
    width: Annotated[int, Option(min=64, help="A multiple of 64, the width of a head.")] = 768,
    context: Annotated[int, Option(min=1, help="Tokens in a sample.")] = 1024,
    samples: Annotated[int, Option(min=1, help="In a micro-batch.")] = 8,
    repetitions: Annotated[int, Option(min=1, help="Rounds; all contestants run in each of them.")] = MIN_REPETITIONS,
    peak_tflops: Annotated[float | None, Option(help="Of the card, dense bf16; where the table does not know it.")] = None,
    only: Annotated[str, Option(help="Contestants with this in their name; the reference is always there.")] = "",
    compiled: Annotated[str, Option(help="without, with or both.")] = "both",
    *,
    dry_run: Annotated[bool, Option("--dry-run", help="Everything once on the CPU, tiny: the figures mean nothing.")] = False,
) -> None:
    """Measure training on one GPU, with and without torch.compile."""
    if not torch.cuda.is_available() and not dry_run:
        print("No CUDA device here: nothing is measured.")
        return
    everyone = CONTESTANTS | peers.installed(peers.PEERS)
    everyone = {name: run for name, run in everyone.items() if only in name or name == REFERENCE}
    shape = Shape(layers, width, context, samples, 50304, "cuda")  # GPT-2's vocabulary, rounded up
    card = "CPU, dry run"
    if dry_run:
        shape, repetitions = Shape(2, 64, 16, 2, 128, "cpu"), 1
    else:
        torch.set_float32_matmul_precision("high")
        card = torch.cuda.get_device_name()
    peak = peak_tflops or next((peak for name, peak in PEAK_TFLOPS.items() if name in card), None)
    for ways, use in (("without", False), ("with", True)):
        if compiled in (ways, "both"):
            print(
                f"\n{card}, torch {torch.__version__}, bf16, {ways} torch.compile; {shape}, {STEPS} micro-batches an update.\n"
            )
            print(compare(shape, everyone, compiled=use, repetitions=repetitions, peak=peak))


if __name__ == "__main__":
    typer.run(main)
