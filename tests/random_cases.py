"""Random training programs, and what each must come to, computed beside the library in float64.

A case is drawn from a number. It fixes a model made of several kinds of layers and layouts, an optimizer of torch's with random
options, how the samples are cut into micro-batches, updates and ranks, and what goes wrong on the way. The reference holds
contiguous copies of the parameters, computes each update's gradient over all samples at once, and steps with torch's for-loop
implementation, so that it shares neither layout nor kernel nor accumulation with what is under test.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ignite_train import ForwardOutput, StaticLossScaling, UpdateOptions, create_trainer

FEATURES = 8
PIECES = ("linear", "conv", "transposed", "gain", "shared", "unused", "frozen", "complex", "embedding")
# Which implementations an optimizer has, and options to draw from beside its rate.
OPTIMIZERS: dict[str, tuple[tuple[str, ...], dict[str, tuple[Any, ...]]]] = {
    "SGD": (("forloop", "foreach", "fused"), {"momentum": (0.0, 0.9), "weight_decay": (0.0, 0.1), "maximize": (False, True)}),
    "Adam": (("forloop", "foreach", "fused"), {"amsgrad": (False, True), "weight_decay": (0.0, 0.1), "eps": (1e-2,)}),
    "AdamW": (("forloop", "foreach", "fused"), {"amsgrad": (False, True), "maximize": (False, True), "eps": (1e-2,)}),
    "Adagrad": (("forloop", "foreach", "fused"), {"weight_decay": (0.0, 0.1), "lr_decay": (0.0, 0.1), "eps": (1e-2,)}),
    "RMSprop": (("forloop", "foreach"), {"momentum": (0.0, 0.9), "centered": (False, True), "eps": (1e-2,)}),
    "Adadelta": (("forloop", "foreach"), {"weight_decay": (0.0, 0.1), "eps": (1e-2,)}),
    "Adamax": (("forloop", "foreach"), {"weight_decay": (0.0, 0.1), "eps": (1e-2,)}),
    "NAdam": (("forloop", "foreach"), {"decoupled_weight_decay": (False, True), "weight_decay": (0.0, 0.1), "eps": (1e-2,)}),
    "RAdam": (("forloop", "foreach"), {"weight_decay": (0.0, 0.1), "eps": (1e-2,)}),
    "ASGD": (("forloop",), {"weight_decay": (0.0, 0.1)}),  # torch's foreach keeps its decays in float32
}
TOLERANCES = {torch.float64: 1e-8, torch.float32: 2e-3}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training program; see `draw`."""

    seed: int
    reduction: str
    dtype: torch.dtype
    pieces: tuple[str, ...]
    channels_last: bool
    optimizer: str
    implementation: str
    options: dict[str, Any]
    groups: int
    accumulation_steps: int
    sizes: tuple[tuple[int, ...], ...]  # of each rank's micro-batches
    sized: bool
    max_grad_norm: float | None
    loss_scale: float | None
    on_nonfinite: str
    poisoned: tuple[int, int] | None  # rank and micro-batch whose target is NaN
    on_out_of_memory: str
    too_large: tuple[int, int] | None  # rank and micro-batch that does not fit into memory


def draw(seed: int, world_size: int) -> Case:
    """The case of this number."""
    rng = random.Random(seed)  # noqa: S311
    reduction = "auto" if world_size == 1 else rng.choice(("ddp", "auto", "explicit", "fsdp"))
    optimizer = rng.choice(sorted(OPTIMIZERS))
    implementations, choices = OPTIMIZERS[optimizer]
    implementation = rng.choice(implementations)
    if reduction == "fsdp" and implementation == "fused" and not optimizer.startswith("Adam"):
        implementation = "foreach"  # torch has no other fused kernel for sharded parameters
    pieces = _draw_pieces(rng, complex_too=implementation != "fused" and optimizer != "ASGD", sharded=reduction == "fsdp")
    options = {"lr": rng.choice((0.01, 0.05)), **{name: rng.choice(values) for name, values in choices.items()}}
    if options.get("momentum") and optimizer == "SGD":
        options["nesterov"] = rng.random() < 0.5
    accumulation_steps = rng.choice((1, 2, 3, 4))
    longest = rng.randint(1, 4) * accumulation_steps
    counts = [longest, *(rng.randint(0, longest) for _ in range(world_size - 1))]
    rng.shuffle(counts)
    sizes = tuple(tuple(rng.choice((1, 2, 3, 5)) for _ in range(count)) for count in counts)
    rank = counts.index(longest)
    may_drop_micro_batches = reduction == "explicit" or world_size == 1
    goes_wrong = rng.random()
    return Case(
        seed=seed,
        reduction=reduction,
        dtype=rng.choice((torch.float64, torch.float32)),
        pieces=tuple(sorted(pieces)),
        channels_last=reduction != "fsdp" and rng.random() < 0.5,
        optimizer=optimizer,
        implementation=implementation,
        options=options,
        groups=rng.choice((1, 2)),
        accumulation_steps=accumulation_steps,
        sizes=sizes,
        sized=rng.random() < 0.7,
        max_grad_norm=rng.choice((None, 0.1, 1e3)),
        loss_scale=rng.choice((None, None, 1024.0)),
        on_nonfinite="skip",
        poisoned=(rank, rng.randrange(longest)) if goes_wrong < 0.25 else None,
        on_out_of_memory=rng.choice(("skip", "split")) if may_drop_micro_batches and goes_wrong > 0.75 else "raise",
        too_large=(rank, rng.randrange(longest)) if may_drop_micro_batches and goes_wrong > 0.75 else None,
    )


def _draw_pieces(rng: random.Random, *, complex_too: bool, sharded: bool) -> set[str]:
    pieces = {piece for piece in PIECES if rng.random() < 0.4} | {rng.choice(("linear", "transposed", "conv"))}
    if sharded:  # needs whole floating-point tensors with one dimension at least, each with a gradient
        return (pieces & {"linear", "conv", "shared", "embedding"}) | {"linear"}
    return pieces if complex_too else pieces - {"complex"}


class Mixture(nn.Module):
    """The sum of what its pieces make of eight features, and of one token."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.pieces = case.pieces
        self.linear, self.shared = nn.Linear(FEATURES, 1), nn.Linear(FEATURES, FEATURES)
        self.conv, self.embedding = nn.Conv2d(2, 3, 2), nn.Embedding(5, 1)
        self.transposed = nn.Parameter(0.3 * torch.randn(FEATURES, 3).t())
        self.gain, self.unused = nn.Parameter(torch.randn(())), nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(FEATURES), requires_grad=False)
        self.complex = nn.Parameter(0.3 * torch.randn(FEATURES, dtype=torch.complex64))
        for name in set(PIECES) - set(case.pieces):
            setattr(self, name, None)
        for name, parameter in self.named_parameters():
            wide = torch.complex128 if case.dtype is torch.float64 else torch.complex64
            parameter.data = parameter.data.to(wide if name == "complex" else case.dtype)
        if case.channels_last and "conv" in case.pieces:
            self.conv.weight.data = self.conv.weight.data.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        """One number a sample."""
        out = x.sum(1) * 0
        if "linear" in self.pieces:
            out = out + self.linear(x).squeeze(1)
        if "conv" in self.pieces:
            out = out + torch.tanh(self.conv(x.reshape(-1, 2, 2, 2))).flatten(1).sum(1)
        if "transposed" in self.pieces:
            out = out + torch.tanh(x @ self.transposed.t()).sum(1)
        if "shared" in self.pieces:
            out = out + self.shared(torch.tanh(self.shared(x))).sum(1) * 0.1
        if "frozen" in self.pieces:
            out = out + x @ self.frozen
        if "complex" in self.pieces:
            out = out + (x.to(self.complex.dtype) @ self.complex).abs().square() * 0.1
        if "embedding" in self.pieces:
            out = out + self.embedding(token).squeeze(1)
        return out * self.gain if "gain" in self.pieces else out


def micro_batches(case: Case, rank: int) -> list[tuple[Tensor, ...]]:
    """Inputs, tokens, targets, weights (some are zero), and whether it is too large for the memory."""
    made = []
    for number, size in enumerate(case.sizes[rank]):
        generator = torch.Generator().manual_seed(1000 * case.seed + 100 * rank + number)
        x = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)
        token = torch.randint(5, (size,), generator=generator)
        y = torch.randn(size, generator=generator, dtype=torch.float64)
        weight = torch.randint(0, 4, (size,), generator=generator).double()
        if case.poisoned == (rank, number):
            y[0] = math.nan
            weight[0] = 1.0
        made.append((x, token, y, weight, torch.full((size,), case.too_large == (rank, number))))
    return made


def loss_and_weight(model: nn.Module, micro_batch: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The weighted sum of squared errors, and the sum of the weights."""
    x, token, y, weight, _ = micro_batch
    error = model(x.to(dtype), token) - y.to(dtype)
    return torch.where(weight > 0, weight.to(dtype) * error.square(), 0.0).sum(), weight.sum()


def parameter_groups(case: Case, named: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """One group, or two of which the second has half the rate."""
    parameters = [parameter for _, parameter in named]
    if case.groups == 1 or len(parameters) < 2:
        return [{"params": parameters}]
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": case.options["lr"] / 2}]


def make_model(case: Case) -> Mixture:
    """The same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        return Mixture(case)


def train(case: Case) -> tuple[dict[str, Tensor], list[tuple[float, float, float, bool]]]:
    """What the library comes to on this rank: parameters; loss, sample size, norm and whether it stepped, an update."""
    model, rank, world_size = make_model(case), idist.get_rank(), idist.get_world_size()
    named = list(model.named_parameters())
    wrapped: Any = model
    if case.reduction == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
        named = list(model.named_parameters())
    elif world_size > 1 and case.reduction != "explicit":
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    flags = {"forloop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}[case.implementation]
    optimizer = getattr(torch.optim, case.optimizer)(parameter_groups(case, named), **case.options, **flags)

    def forward(model: nn.Module, micro_batch: tuple[Tensor, ...]) -> ForwardOutput:
        limit = 1 if case.on_out_of_memory == "split" else 0
        if len(micro_batch[0]) > limit and bool(micro_batch[4].any()):
            raise torch.OutOfMemoryError("a micro-batch that is too large")
        loss, weight = loss_and_weight(model, micro_batch, case.dtype)
        return ForwardOutput(loss, weight)

    trainer = create_trainer(
        wrapped,
        optimizer,
        forward,
        accumulation_steps=case.accumulation_steps,
        max_grad_norm=case.max_grad_norm,
        loss_scaling=None if case.loss_scale is None else StaticLossScaling(case.loss_scale),
        options=UpdateOptions(on_nonfinite=case.on_nonfinite, reduction=case.reduction, on_out_of_memory=case.on_out_of_memory),
    )
    records: list[tuple[float, float, float, bool]] = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def note() -> None:
        output = trainer.state.output
        assert output is not None
        records.append((output.loss, output.sample_size, output.grad_norm, output.applied))

    loader: Any = micro_batches(case, rank)
    trainer.run(loader if case.sized else _Unsized(loader), max_epochs=1)
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    return {name: parameter.detach() for name, parameter in whole.items()}, records


class _Unsized:
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Any:
        return iter(self.items)


def reference(case: Case) -> tuple[dict[str, Tensor], list[tuple[float, float, float, bool]]]:
    """What `train` must come to: all samples of an update at once, contiguous, in float64, by torch's for-loops."""
    model = make_model(case)
    for parameter in model.parameters():
        wide = torch.complex128 if parameter.is_complex() else torch.float64
        parameter.data = parameter.data.to(wide).clone(memory_format=torch.contiguous_format)
    named = list(model.named_parameters())
    optimizer = getattr(torch.optim, case.optimizer)(parameter_groups(case, named), **case.options, foreach=False)
    ranks = [micro_batches(case, rank) for rank in range(len(case.sizes))]
    steps, records = case.accumulation_steps, []
    for update in range(-(-max(map(len, ranks)) // steps)):
        group = [one for batches in ranks for one in batches[update * steps : (update + 1) * steps]]
        if case.on_out_of_memory == "skip":
            group = [one for one in group if not bool(one[4].any())]
        records.append(_reference_update(case, model, optimizer, group))
    return {name: parameter.detach() for name, parameter in named}, records


def _reference_update(case: Case, model: nn.Module, optimizer: Any, group: list[Any]) -> tuple[float, float, float, bool]:
    parts = [loss_and_weight(model, one, torch.float64) for one in group]
    size = sum(float(weight) for _, weight in parts)
    if size == 0:
        return math.nan, size, math.nan, False
    mean = sum(loss for loss, _ in parts) / size
    loss = float(mean.detach())
    optimizer.zero_grad()
    mean.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = math.sqrt(sum(float(gradient.abs().square().sum()) for gradient in gradients))
    if not math.isfinite(norm) or not math.isfinite(loss):
        return loss, size, norm, False
    if case.max_grad_norm is not None and norm > 0:
        for gradient in gradients:
            gradient.mul_(min(1.0, case.max_grad_norm / (norm + 1e-6)))
    optimizer.step()
    return loss, size, norm, True


def difference(case: Case) -> str:
    """What is wrong with the case on this rank; empty if nothing is."""
    (found, records), (expected, expected_records) = train(case), reference(case)
    tolerance = TOLERANCES[case.dtype]
    if len(records) != len(expected_records):
        return f"{len(records)} updates and not {len(expected_records)}"
    for number, (one, other) in enumerate(zip(records, expected_records, strict=True), start=1):
        close = _same(one[:3], other[:3], tolerance)
        if one[3] != other[3] or not close:
            return f"update {number}: loss, sample size, norm, stepped are {one} and not {other}"
    for name, value in found.items():
        wide = value.to(expected[name].dtype)
        if not torch.allclose(wide, expected[name], rtol=tolerance, atol=tolerance):
            return f"{name} is off by {float((wide - expected[name]).abs().max()):.3g}"
    return ""


def _same(found: tuple[float, ...], expected: tuple[float, ...], tolerance: float) -> bool:
    def same(one: float, other: float) -> bool:
        if not math.isfinite(one) or not math.isfinite(other):
            return math.isfinite(one) == math.isfinite(other)
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)

    return all(same(one, other) for one, other in zip(found, expected, strict=True))


def failures(seeds: range, world_size: int, run: Callable[[Case], str] = difference) -> list[str]:
    """Runs the cases of these numbers on this rank: a line for each that fails."""
    lines = []
    for seed in seeds:
        case = draw(seed, world_size)
        try:
            found = run(case)
        except Exception as error:  # the other cases are still of interest, where there is one rank
            if world_size > 1:
                raise RuntimeError(f"{case}") from error
            found = f"{type(error).__name__}: {error}"
        if found:
            lines.append(f"{found}: {case}")
    return lines
