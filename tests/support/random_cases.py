"""Random training programs, and what each must come to, computed beside the library in float64.

A case is drawn from a number. It fixes a model made of several kinds of layers and layouts, an optimizer of torch's with random
options, how the samples are cut into micro-batches, updates and ranks, and what goes wrong on the way. The reference holds
contiguous copies of the parameters, computes each update's gradient over all samples at once, and steps with torch's for-loop
implementation, so that it shares neither layout nor kernel nor accumulation with what is under test. With `reduction="local"`
it does so for the samples of each rank apart, and makes outer steps by the formula of SGD. It knows nothing of checkpoints,
exceptions and loaders: a program that is broken off, resumed or fed from one container comes to the same.
"""

from __future__ import annotations

import math
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ignite.distributed as idist
import torch
import torch.distributed as dist
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ignite_train import ForwardOutput, StaticLossScaling, Trainer, TrainEvents, UpdateOptions, create_trainer
from ignite_train.handlers import Checkpoint, OuterOptimizer

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
# What a program may have beside its shape.
TRAITS = (
    "carried",  # forward adds what the micro-batch before has left
    "changed",  # a handler changes the mean gradient
    "demanded",  # each update is asked for
    "outside",  # a factor stands beside the model, in a ModuleDict
    "placed",  # forward knows the update and its place in the group
    "summed",  # the step is along the sum
    "whole",  # what is not a whole group is left out
)
SEEDED = "seeded"  # one more: `seed=` is given. Drawn by numbers of its own, so that the others stay what they were
MOVING = "moving"  # a buffer moves in each forward; drawn likewise
GAPPED, LATE = "gapped", "late"  # pieces that are drawn likewise: a parameter with gaps in memory; one that joins in the run
OUTER_RATE = 0.7
PARTS = ("x", "token", "y", "weight", "is_too_large")  # of a micro-batch
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
    second: tuple[str, str, dict[str, Any]] | None = None  # kind, implementation and options of a second optimizer
    is_sparse: bool = False  # the second optimizer steps the embedding alone, along sparse gradients
    limits_each: bool = False  # `max_grad_norm` is for the norm of each optimizer
    closure: Literal[False, True, "replay"] = False  # the optimizer is inside one that evaluates the loss again, elsewhere
    empty: frozenset[tuple[int, int]] = frozenset()  # rank and micro-batch in whose place the loader gives None
    traits: frozenset[str] = frozenset()  # see `TRAITS`
    outer: tuple[int, float] | None = None  # with local replicas: updates to an outer step, and its momentum
    refilled: Literal["", "list", "dict", "tensors"] = ""  # what the loader yields again and again, with other contents
    raising: tuple[str, int] | None = None  # where an exception comes, and in which update; see `_with_exception`
    has_checkpoint: bool = False
    is_fed: bool = False  # the buffer that moves takes part in forward
    joins: int | None = None  # the update in which a parameter joins the optimizer
    ends: int | None = None  # the update after which the run ends and another process, as it were, resumes it
    has_terms: bool = False  # the loss is the sum of two means, each over samples of its own
    named: frozenset[int] = frozenset()  # the updates that are asked for with another forward, and a name


def draw(seed: int, world_size: int, *, local: bool = False) -> Case:
    """The case of this number; with `local` one whose replicas train on their own, which is another program."""
    rng = random.Random(seed)  # noqa: S311
    drawn = "auto" if world_size == 1 else rng.choice(("ddp", "auto", "explicit", "fsdp"))
    case = _draw(seed, rng, world_size, "local" if local else drawn)
    case = _with_traits(_with_shape(case, _numbers("shape", seed)), _numbers("traits", seed))
    case = _with_outer_optimizer(case, _numbers("outer", seed)) if local else case
    for name, add in _ADDED.items():
        rng = _numbers(name, seed)
        if rng.random() < 0.25:
            case = add(case, rng)
    return case


def _draw(seed: int, rng: random.Random, world_size: int, reduction: str) -> Case:
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
    may_drop_micro_batches = reduction in ("explicit", "local") or world_size == 1
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


def _numbers(what: str, seed: int) -> random.Random:
    return random.Random(f"{what} {seed}")  # noqa: S311


def _with_shape(case: Case, rng: random.Random) -> Case:
    """The case with another shape of program, or as it is. Drawn by numbers of its own, which leave the rest as it was."""
    shape = rng.choice(("plain", "several", "sparse", "closure"))
    if rng.random() < 0.4:
        taken = {case.poisoned, case.too_large}
        places = [(rank, number) for rank, sizes in enumerate(case.sizes) for number in range(len(sizes))]
        case = replace(case, empty=frozenset(place for place in places if place not in taken and rng.random() < 0.3))
    if shape == "several" and set(case.pieces) & {"linear", "conv", "shared"}:  # which have two parameters each
        kinds = ("forloop", "foreach") if case.reduction == "fsdp" or "complex" in case.pieces else ("foreach", "fused")
        kind = rng.choice(("SGD", "AdamW"))
        options = {"lr": 0.02, **({"momentum": 0.9} if kind == "SGD" else {"eps": 1e-2})}
        case = replace(case, second=(kind, rng.choice(kinds), options), limits_each=rng.random() < 0.5)
        return replace(case, limits_each=case.limits_each and case.reduction != "local")
    if shape == "sparse" and case.reduction != "fsdp":
        second: dict[str, dict[str, Any]] = {"SGD": {"lr": 0.1}, "Adagrad": {"lr": 0.1, "eps": 1e-2}}
        kind = rng.choice(sorted(second))
        pieces = tuple(sorted({*case.pieces, "embedding"}))
        return replace(case, pieces=pieces, second=(kind, rng.choice(("forloop", "foreach")), second[kind]), is_sparse=True)
    if shape == "closure" and case.reduction not in ("fsdp", "local") and case.implementation != "fused":
        return replace(case, closure=rng.choice((True, "replay")), on_out_of_memory="raise", too_large=None)
    return case


def _with_traits(case: Case, rng: random.Random) -> Case:
    """The case with some of the traits that it can have."""
    traits = {trait for trait in TRAITS if rng.random() < 0.25}
    if _numbers(SEEDED, case.seed).random() < 0.25:
        traits |= {SEEDED}
    if case.on_out_of_memory == "split":
        traits -= {"carried"}  # the second half finds what the first has left
    if "demanded" in traits:
        traits -= {"whole"}  # which is about the last group of an epoch
    if case.reduction not in ("explicit", "local") and len(case.sizes) > 1:
        traits -= {"outside"}
    if "whole" in traits and case.accumulation_steps > 1:
        longest = max(map(len, case.sizes))
        rest = tuple(rng.choice((1, 2, 3, 5)) for _ in range(rng.randrange(case.accumulation_steps)))
        case = replace(case, sizes=tuple(sizes + rest if len(sizes) == longest else sizes for sizes in case.sizes))
    if "summed" in traits:  # a step that is not clipped would be far too long
        case = replace(case, max_grad_norm=rng.choice((0.1, 0.5)))
    return replace(case, traits=frozenset(traits))


def _with_outer_optimizer(case: Case, rng: random.Random) -> Case:
    """The case with outer steps, or with replicas that are never made equal."""
    return replace(case, outer=rng.choice((None, (1, 0.0), (2, 0.9), (3, 0.9))))


def _with_fused_closure(case: Case, rng: random.Random) -> Case:
    if case.implementation != "fused" or case.second is not None or case.closure or case.reduction in ("fsdp", "local"):
        return case
    return replace(case, closure=rng.choice((True, "replay")), on_out_of_memory="raise", too_large=None)


def _with_gaps(case: Case, rng: random.Random) -> Case:
    return case if case.reduction == "fsdp" else replace(case, pieces=(*case.pieces, GAPPED))


def _with_shared_state(case: Case, rng: random.Random) -> Case:
    """The case with an optimizer whose momenta are each on one rank."""
    if len(case.sizes) == 1 or case.reduction in ("fsdp", "local") or case.second is not None or case.closure:
        return case
    pieces = tuple(piece for piece in case.pieces if piece != "complex") or ("linear",)
    return replace(case, optimizer="SGD", implementation="shared", options={"lr": 0.02, "momentum": 0.9}, pieces=pieces)


def _with_refilled(case: Case, rng: random.Random) -> Case:
    """The case with a loader that yields one container. On several ranks where none is held: one rank alone would raise."""
    is_held = case.accumulation_steps > 1 or not case.sized
    if "demanded" in case.traits or (len(case.sizes) > 1 and is_held):
        return case
    kinds: tuple[Literal["list", "dict", "tensors"], ...] = ("list", "dict", "tensors")
    return replace(case, refilled=rng.choice(kinds))


def _with_joining(case: Case, rng: random.Random) -> Case:
    """The case with a parameter that is frozen at first, where nothing else has to know it as trained, or as frozen."""
    is_wrapped = len(case.sizes) > 1 and case.reduction not in ("explicit", "local")
    if is_wrapped or case.outer is not None or not _num_updates(case):
        return case
    return replace(case, pieces=(*case.pieces, LATE), joins=rng.randint(1, _num_updates(case)))


def _with_buffer(case: Case, rng: random.Random) -> Case:
    if case.reduction == "fsdp" or case.on_out_of_memory == "split" or case.closure is True:
        return case
    return replace(case, traits=case.traits | {MOVING}, is_fed=len(case.sizes) == 1)


def _with_end(case: Case, rng: random.Random) -> Case:
    return replace(case, ends=rng.randrange(1, _num_updates(case)), has_checkpoint=True) if _num_updates(case) > 1 else case


def _with_exception(case: Case, rng: random.Random) -> Case:
    """The case with an exception that the program catches.

    It comes when gradients are ready, at the end of the first step from that update on, between two optimizers' steps ("half"),
    or at the end of the update.
    """
    update = rng.randint(1, max(1, _num_updates(case)))
    if case.reduction == "local" or update == case.ends:
        return case
    where = rng.choice(("ready", "step", "completed"))
    if case.second is not None and where == "step" and rng.random() < 0.5:
        where = "half"
    case = replace(case, raising=(where, update), has_checkpoint=case.has_checkpoint or rng.random() < 0.5)
    if case.poisoned is None and rng.random() < 0.5:
        case = replace(case, on_nonfinite="raise")  # then nothing is copied unless something else asks for it
    are_marked = case.has_checkpoint or case.on_nonfinite == "skip"
    return replace(case, is_fed=case.is_fed and (are_marked or where != "ready"))


def _with_terms(case: Case, rng: random.Random) -> Case:
    """The case with a second loss that has another denominator, where that can be."""
    if "summed" in case.traits or case.on_out_of_memory == "skip" or case.reduction == "local":
        return case
    return replace(case, has_terms=True)


def _with_names(case: Case, rng: random.Random) -> Case:
    """The case with another forward for some updates, each of which is asked for."""
    if case.refilled or "whole" in case.traits:
        return case
    named = frozenset(update for update in range(1, _num_updates(case) + 1) if rng.random() < 0.5)
    return replace(case, traits=case.traits | {"demanded"}, named=named)


# In this order: the later ones look at what the earlier ones have made of the case.
_ADDED = {
    "fused closures": _with_fused_closure,
    "gaps": _with_gaps,
    "shared state": _with_shared_state,
    "refilled": _with_refilled,
    "joining": _with_joining,
    "buffer": _with_buffer,
    "ends": _with_end,
    "raising": _with_exception,
    "terms": _with_terms,
    "names": _with_names,
}


def _draw_pieces(rng: random.Random, *, complex_too: bool, sharded: bool) -> set[str]:
    pieces = {piece for piece in PIECES if rng.random() < 0.4} | {rng.choice(("linear", "transposed", "conv"))}
    if sharded:  # needs whole floating-point tensors with one dimension at least, each with a gradient
        return (pieces & {"linear", "conv", "shared", "embedding"}) | {"linear"}
    return pieces if complex_too else pieces - {"complex"}


class Mixture(nn.Module):
    """The sum of what its pieces make of eight features, and of one token."""

    def __init__(self, case: Case, *, is_sparse: bool = False) -> None:
        super().__init__()
        self.pieces = case.pieces
        self.linear, self.shared = nn.Linear(FEATURES, 1), nn.Linear(FEATURES, FEATURES)
        self.conv, self.embedding = nn.Conv2d(2, 3, 2), nn.Embedding(5, 1, sparse=is_sparse)
        self.transposed = nn.Parameter(0.3 * torch.randn(FEATURES, 3).t())
        self.gain, self.unused = nn.Parameter(torch.randn(())), nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(FEATURES), requires_grad=False)
        self.complex = nn.Parameter(0.3 * torch.randn(FEATURES, dtype=torch.complex64))
        self.gapped = nn.Parameter(torch.empty(0))
        self.gaps = 0.3 * torch.randn(FEATURES, 4).to(case.dtype)
        self.gapped.data = self.gaps[:, ::2]
        self.late = nn.Parameter(0.3 * torch.randn(FEATURES), requires_grad=False)
        self.moves, self.is_fed = MOVING in case.traits, case.is_fed
        if self.moves:
            self.register_buffer("moved", torch.zeros((), dtype=case.dtype))
        for name in {*PIECES, GAPPED, LATE} - set(case.pieces):
            setattr(self, name, None)
        for name, parameter in self.named_parameters():
            wide = torch.complex128 if case.dtype is torch.float64 else torch.complex64
            if name != GAPPED:
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
        if GAPPED in self.pieces:
            out = out + torch.tanh(x @ self.gapped).sum(1)
        if LATE in self.pieces:
            out = out + x @ self.late
        if self.moves:
            out = out + self.moved if self.is_fed else out
            with torch.no_grad():
                self.moved.mul_(0.5).add_(torch.tanh(out.detach().mean()), alpha=0.5)
        return out * self.gain if "gain" in self.pieces else out


class Outside(nn.Module):
    """A learned factor, as a criterion may have one."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([0.8], dtype=case.dtype))

    def forward(self, out: Tensor) -> Tensor:
        return out * self.factor


class Place(NamedTuple):
    """What forward may know of where it is."""

    update: int
    micro_batch: int
    carried: Any


def micro_batches(case: Case, rank: int) -> list[tuple[Tensor, ...] | None]:
    """Inputs, tokens, targets, weights (some are zero), and whether it is too large for the memory; or None."""
    made: list[tuple[Tensor, ...] | None] = []
    for number, size in enumerate(case.sizes[rank]):
        generator = torch.Generator().manual_seed(1000 * case.seed + 100 * rank + number)
        x = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)
        token = torch.randint(5, (size,), generator=generator)
        y = torch.randn(size, generator=generator, dtype=torch.float64)
        weight = torch.randint(0, 4, (size,), generator=generator).double()
        if case.poisoned == (rank, number):
            y[0] = math.nan
            weight[0] = 1.0
        whole = (x, token, y, weight, torch.full((size,), case.too_large == (rank, number)))
        made.append(None if (rank, number) in case.empty else whole)
    return made


def losses_of(
    case: Case, model: Any, micro_batch: tuple[Tensor, ...], place: Place, *, is_other: bool = False
) -> dict[str, tuple[Tensor, Tensor]]:
    """The terms of the loss: a weighted sum of squared errors with the sum of the weights, and maybe one more.

    Or what the other forward has, which is one. The model tells the dtype.
    """
    dtype = next(model.parameters()).dtype
    dtype = dtype if dtype.is_floating_point else dtype.to_real()
    x, token, y, weight, _ = micro_batch.values() if isinstance(micro_batch, dict) else micro_batch
    is_container = isinstance(model, nn.ModuleDict)
    out = model["net"](x.to(dtype), token) if is_container else model(x.to(dtype), token)
    out = model["outside"](out) if is_container else out
    if "carried" in case.traits:
        out = out + place.carried.get("mean", 0.0)
        place.carried["mean"] = torch.tanh(out.detach().mean())
    error = out - y.to(dtype)
    factor = 0.5 + 1 / place.update + 0.25 * place.micro_batch if "placed" in case.traits else 1.0
    squares = factor * torch.where(weight > 0, weight.to(dtype) * error.square(), 0.0).sum()
    lengths = factor * torch.where(y > 0, (1 + error.square()).sqrt(), 0.0).sum()
    if is_other:
        return {"other": (squares + lengths, (weight > 0).sum())}
    terms = {"squares": (squares, weight.sum())}
    return {**terms, "lengths": (lengths, (y > 0).sum())} if case.has_terms else terms


def count(micro_batch: Any) -> dict[str, float]:
    """The denominators of both terms."""
    _, _, y, weight, _ = micro_batch.values() if isinstance(micro_batch, dict) else micro_batch
    return {"squares": float(weight.sum()), "lengths": float((y > 0).sum())}


def as_output(terms: dict[str, tuple[Tensor, Tensor]]) -> ForwardOutput:
    """What forward returns of them."""
    return ForwardOutput(terms) if len(terms) > 1 else ForwardOutput(*next(iter(terms.values())))


def change(model: nn.Module) -> None:
    """What a handler, or the loop by hand, does with the mean gradient."""
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        if name.endswith("embedding.weight") or parameter.is_complex():  # those have no clamp_
            parameter.grad.mul_(0.5)
        else:
            parameter.grad.clamp_(-0.1, 0.1)


def parameter_groups(case: Case, named: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """One group, or two of which the second has half the rate."""
    parameters = [parameter for _, parameter in named]
    if case.groups == 1 or len(parameters) < 2:
        return [{"params": parameters}]
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": case.options["lr"] / 2}]


def make_model(case: Case, *, is_sparse: bool = False) -> nn.Module:
    """The same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        model = Mixture(case, is_sparse=is_sparse)
        return nn.ModuleDict({"net": model, "outside": Outside(case)}) if "outside" in case.traits else model


_FLAGS = {"forloop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def make_optimizers(case: Case, named: list[tuple[str, nn.Parameter]], *, by_for_loops: bool = False) -> dict[str, Any]:
    """The optimizer, or two by name; in the implementation of the case, or all by for-loops."""
    named = [(name, parameter) for name, parameter in named if not name.endswith(LATE)]
    if case.implementation == "shared" and not by_for_loops:
        return {"": SharedMomenta(parameter_groups(case, named), **case.options)}
    flags = _FLAGS["forloop" if by_for_loops or case.implementation == "shared" else case.implementation]
    kind = getattr(torch.optim, case.optimizer)
    if case.second is None:
        inner = kind(parameter_groups(case, named), **case.options, **flags)
        return {"": Sharpness(inner) if case.closure else inner}
    is_other = [
        name.endswith("embedding.weight") if case.is_sparse else number % 2 == 1 for number, (name, _) in enumerate(named)
    ]
    first, other = ([p for (_, p), second in zip(named, is_other, strict=True) if second is which] for which in (False, True))
    second, implementation, options = case.second
    its_flags = _FLAGS["forloop" if by_for_loops else implementation]
    return {
        "first": kind(first, **case.options, **flags),
        "second": getattr(torch.optim, second)(other, **options, **its_flags),
    }


class Sharpness(torch.optim.Optimizer):
    """Steps an optimizer along the gradients at parameters that are moved uphill (Foret et al., 2021)."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([parameter for group in inner.param_groups for parameter in group["params"]], {})
        self.inner = inner
        self.param_groups = inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        moved = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([torch.linalg.vector_norm(p.grad).double() for p in moved]).norm()
        before = [parameter.clone() for parameter in moved]
        for parameter in moved:
            parameter.add_(parameter.grad * float(0.01 / (norm + 1e-6)))
        closure()
        for parameter, value in zip(moved, before, strict=True):
            parameter.copy_(value)
        self.inner.step()


class SharedMomenta(torch.optim.Optimizer):
    """SGD with momentum, each rank of which has the momenta of its share of the parameters, and tells the others the steps."""

    def __init__(self, params: Any, lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        numbered = enumerate((group, parameter) for group in self.param_groups for parameter in group["params"])
        for number, (group, parameter) in numbered:
            if parameter.grad is None:
                continue
            step = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            if number % dist.get_world_size() == dist.get_rank():
                state = self.state[parameter]
                state["momentum"] = group["momentum"] * state.get("momentum", 0.0) + parameter.grad
                step.copy_(state["momentum"])
            dist.all_reduce(step)
            parameter.sub_(step, alpha=group["lr"])


def join(optimizers: dict[str, Any], model: nn.Module) -> None:
    """Has the parameter that is late joined the first optimizer."""
    (late,) = (parameter for name, parameter in model.named_parameters() if name.endswith(LATE))
    if not late.requires_grad:
        late.requires_grad_(True)
        first = next(iter(optimizers.values()))
        (first.inner if isinstance(first, Sharpness) else first).add_param_group({"params": [late]})


def forward_of(case: Case, is_other: bool, model: nn.Module, micro_batch: Any, state: Any) -> ForwardOutput:
    """The forward of the trainer, or the other one."""
    limit = 1 if case.on_out_of_memory == "split" else 0
    x, *_, is_too_large = micro_batch.values() if isinstance(micro_batch, dict) else micro_batch
    if len(x) > limit and bool(is_too_large.any()):
        raise torch.OutOfMemoryError("a micro-batch that is too large")
    place = Place(state.iteration, state.micro_batch_in_group or 0, state.carried)
    return as_output(losses_of(case, model, micro_batch, place, is_other=is_other))


def forward_of_graph(case: Case, model: nn.Module, micro_batch: tuple[Tensor, ...]) -> ForwardOutput:
    """A forward that does not ask where it is."""
    return as_output(losses_of(case, model, micro_batch, Place(1, 0, {})))


class AccidentError(Exception):
    """What goes wrong in a handler or in a step, and is caught."""


class Trained(NamedTuple):
    """What a program has come to on this rank."""

    values: dict[str, Tensor]  # parameters, and the buffer that takes part in forward
    records: dict[int, tuple[float, float, float, bool]]  # by update: loss, sample size, norm and whether it stepped
    counters: tuple[int, int, int]  # updates, steps, skips
    written: dict[str, Tensor]  # the states of the optimizers, and the buffers


def train(
    case: Case,
    compile: Any = False,  # noqa: A002, FBT002
    *,
    fast: bool = True,
) -> Trained:
    """What the library comes to on this rank."""
    records: dict[int, tuple[float, float, float, bool]] = {}
    ahead = [case.raising] if case.raising else []  # what is still to go wrong
    generator = torch.get_rng_state()
    with _directory(case) as directory:
        for end in (None,) if case.ends is None else (case.ends, None):
            model = make_model(case, is_sparse=case.is_sparse)
            trainer, optimizers = _make_trainer(case, model, compile, fast=fast)
            if directory is not None:
                Checkpoint(directory, asynchronous=False).attach(trainer)
            _attach_handlers(case, trainer, model, optimizers)
            _note(trainer, records)
            _go_wrong(trainer, optimizers, ahead)
            _run(case, trainer, micro_batches(case, idist.get_rank()), end)
    if SEEDED in case.traits and case.ends is None and not torch.equal(torch.get_rng_state(), generator):
        raise RuntimeError("the seeds of the updates have moved the generator of the process")
    if GAPPED in case.pieces and not torch.equal(*(_gaps(one) for one in (model, make_model(case)))):
        raise RuntimeError("what lies between the elements of a parameter was written to")
    return _trained(case, trainer, model, optimizers, records)


def _make_trainer(case: Case, model: nn.Module, compile: Any, *, fast: bool) -> tuple[Trainer, dict[str, Any]]:  # noqa: A002
    wrapped: Any = model
    if case.reduction == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (idist.get_world_size(),)))
    elif idist.get_world_size() > 1 and case.reduction not in ("explicit", "local"):
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizers = make_optimizers(case, list(model.named_parameters()))

    forward = partial(forward_of, case, False)
    trainer = create_trainer(
        wrapped,
        optimizers.get("", optimizers),
        forward if compile is False else lambda model, micro_batch: forward_of_graph(case, model, micro_batch),
        compile=compile,
        accumulation_steps=case.accumulation_steps,
        max_grad_norm=_limit(case, optimizers),
        loss_scaling=None if case.loss_scale is None else StaticLossScaling(case.loss_scale),
        seed=case.seed if SEEDED in case.traits else None,
        options=_options(case) if fast else replace(_options(case), fast=False),
    )
    return trainer, optimizers


@contextmanager
def _directory(case: Case) -> Iterator[Path | None]:
    """A temporary directory, the same on all ranks, where there are checkpoints."""
    if not case.has_checkpoint:
        yield None
        return
    is_first = idist.get_rank() == 0
    name = [tempfile.mkdtemp(prefix="random-case-") if is_first else ""]
    if idist.get_world_size() > 1:
        dist.broadcast_object_list(name)
    try:
        yield Path(name[0])
        idist.barrier()
    finally:
        if is_first:
            shutil.rmtree(name[0])


def _note(trainer: Trainer, records: dict[int, tuple[float, float, float, bool]]) -> None:
    @trainer.on(Events.ITERATION_COMPLETED)
    def note() -> None:
        output = trainer.state.output
        assert output is not None
        records[trainer.state.iteration] = (output.loss, output.sample_size, output.grad_norm, output.applied)


def _go_wrong(trainer: Trainer, optimizers: dict[str, Any], ahead: list[tuple[str, int]]) -> None:
    """Raises once, in the place and the update that are ahead."""
    if not ahead:
        return
    where, update = ahead[0]

    def fail(*_: Any) -> None:
        if ahead and (trainer.state.iteration == update or (where in ("step", "half") and trainer.state.iteration > update)):
            raise AccidentError(ahead.pop())

    if where == "ready":
        trainer.add_event_handler(TrainEvents.GRADIENTS_READY, fail)
    elif where == "completed":
        trainer.add_event_handler(Events.ITERATION_COMPLETED, fail)
    else:
        [*optimizers.values()][0 if where == "half" else -1].register_step_post_hook(fail)


def _trained(case: Case, trainer: Trainer, model: nn.Module, optimizers: dict[str, Any], records: Any) -> Trained:
    values = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    buffers = dict(model.named_buffers())
    state = trainer.state
    written = {
        f"{name} {number} {key}": value.detach()
        for name, optimizer in optimizers.items()
        for number, part in optimizer.state_dict()["state"].items()
        for key, value in part.items()
        if isinstance(value, Tensor) and case.reduction != "fsdp"
    }
    return Trained(
        {name: value.detach() for name, value in {**values, **(buffers if case.is_fed else {})}.items()},
        records,
        (state.iteration, state.num_steps, state.num_skipped),
        {**written, **buffers},
    )


def _gaps(model: nn.Module) -> Tensor:
    """What lies between the elements of the parameter with gaps."""
    (mixture,) = (module for module in model.modules() if isinstance(module, Mixture))
    return mixture.gaps[:, 1::2]


def _attach_handlers(case: Case, trainer: Trainer, model: nn.Module, optimizers: dict[str, Any]) -> None:
    if case.joins is not None:
        trainer.add_event_handler(Events.ITERATION_STARTED(once=case.joins), lambda: join(optimizers, model))
    if "changed" in case.traits:
        trainer.add_event_handler(TrainEvents.GRADIENTS_REDUCED, lambda: change(model))
    if case.outer is not None:
        every, momentum = case.outer
        outer = torch.optim.SGD(model.parameters(), lr=OUTER_RATE, momentum=momentum, nesterov=momentum > 0)
        OuterOptimizer(outer, every=every).attach(trainer)


def _limit(case: Case, optimizers: dict[str, Any]) -> Any:
    limit = case.max_grad_norm
    return dict.fromkeys(optimizers, limit) if limit is not None and case.limits_each else limit


def _run(case: Case, trainer: Trainer, mine: list[Any], end: int | None) -> None:
    if "demanded" in case.traits:
        _demand(case, trainer, mine, end)
        return
    if end is not None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=end), trainer.terminate)
    if case.refilled:
        loader: Any = _Refilled(mine, case.refilled) if case.sized else _Unsized(_Refilled(mine, case.refilled))
    else:
        loader = mine if case.sized else _Unsized(mine)
    try:
        trainer.run(loader, max_epochs=1)
    except AccidentError:
        trainer.run(loader, max_epochs=1)


def _demand(case: Case, trainer: Trainer, mine: list[Any], end: int | None) -> None:
    with trainer.session() as state:
        for update in range(state.iteration, _num_updates(case) if end is None else end):
            group = mine[update * case.accumulation_steps : (update + 1) * case.accumulation_steps]
            is_named = update + 1 in case.named
            other: dict[str, Any] = {"forward": partial(forward_of, case, True), "name": "other"} if is_named else {}
            try:
                record = trainer.update(group, **other)
            except AccidentError as error:
                if error.args[0][0] != "ready" and not (error.args[0][0] == "step" and case.closure):  # it was made
                    continue
                record = trainer.update(group, **other)
            if record.name != other.get("name"):
                raise RuntimeError(f"update {update + 1} is recorded as {record.name!r}")


def _num_updates(case: Case) -> int:
    longest = max(map(len, case.sizes))
    return (longest if "whole" in case.traits else longest + case.accumulation_steps - 1) // case.accumulation_steps


def _options(case: Case) -> UpdateOptions:
    return UpdateOptions(
        on_nonfinite=case.on_nonfinite,  # type: ignore[arg-type]
        reduction=case.reduction,  # type: ignore[arg-type]
        on_out_of_memory=case.on_out_of_memory,  # type: ignore[arg-type]
        closure=case.closure,
        none_is_empty=bool(case.empty),
        normalize="summed" not in case.traits,
        drop_last_group="whole" in case.traits,
        sample_sizes=count if case.has_terms else None,
    )


class _Refilled:
    """Gives its micro-batches in one container, which has the next one's contents when that is read."""

    def __init__(self, items: list[Any], kind: str) -> None:
        self.items, self.kind = items, kind

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Any:
        named = dict[str, Tensor]()
        listed = list[Tensor]()
        tensors = tuple(torch.empty(0, dtype=part.dtype) for part in next((one for one in self.items if one is not None), ()))
        for item in self.items:
            if item is None:
                yield None
                continue
            named.update(zip(PARTS, item, strict=True))
            listed[:] = item
            for number, (tensor, part) in enumerate(zip(tensors, item, strict=True)):
                if number % 2:
                    tensor.set_(part)
                else:
                    tensor.data = part
            yield {"dict": named, "list": listed, "tensors": tensors}[self.kind]


class _Unsized:
    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> Any:
        return iter(self.items)


def reference(case: Case) -> tuple[dict[str, Tensor], list[tuple[float, float, float, bool]]]:
    """What `train` must come to: all samples of an update at once, contiguous, in float64, by torch's for-loops."""
    by_hand = _ByHand(case, range(len(case.sizes)))
    records = [by_hand.update(number) for number in range(1, _num_updates(case) + 1)]
    return by_hand.parameters, records


def local_reference(case: Case, rank: int) -> tuple[dict[str, Tensor], list[tuple[float, float, float, bool]]]:
    """What `train` must come to on this rank with `reduction="local"`: that of each rank on its own, and the outer steps.

    What is recorded is Σloss / Σsample_size over the ranks that have stepped, and the root of the mean square of their norms.
    """
    replicas = [_ByHand(case, [one]) for one in range(len(case.sizes))]
    outer = _OuterByHand(replicas)
    records: list[tuple[float, float, float, bool]] = []
    for number in range(1, _num_updates(case) + 1):
        own = [one for one in (replica.update(number) for replica in replicas) if one[3]]
        size = sum(one[1] for one in own)
        loss = sum(one[0] * one[1] for one in own) / size if own else math.nan
        norm = math.sqrt(sum(one[2] ** 2 for one in own) / len(own)) if own else math.nan
        records.append((loss, size, norm, bool(own)))
        if case.outer is not None and number % case.outer[0] == 0:
            outer.step(case.outer[1])
    return replicas[rank].parameters, records


class _OuterByHand:
    """Outer steps along Δ = x - mean(x_r): m ← βm + Δ, and x ← x - α(Δ + βm), which is Nesterov's momentum where β > 0."""

    def __init__(self, replicas: list[_ByHand]) -> None:
        self._replicas = replicas
        self._weights = {name: value.clone() for name, value in replicas[0].parameters.items()}
        self._momenta = {name: torch.zeros_like(value) for name, value in self._weights.items()}

    def step(self, momentum: float) -> None:
        for name, weight in self._weights.items():
            values = [replica.parameters[name] for replica in self._replicas]
            difference = weight - torch.stack(values).mean(0)
            self._momenta[name] = momentum * self._momenta[name] + difference
            weight -= OUTER_RATE * (difference + momentum * self._momenta[name])
            for value in values:
                value.copy_(weight)


class _ByHand:
    """The updates of the reference, one by one, over the samples of some ranks."""

    def __init__(self, case: Case, ranks: Sequence[int]) -> None:
        self._case, self._model = case, make_model(case)
        for parameter in self._model.parameters():
            wide = torch.complex128 if parameter.is_complex() else torch.float64
            parameter.data = parameter.data.to(wide).clone(memory_format=torch.contiguous_format)
        for buffer in self._model.buffers():
            buffer.data = buffer.data.double()
        named = list(self._model.named_parameters())
        self._optimizers = make_optimizers(case, named, by_for_loops=True)
        self._ranks = [micro_batches(case, rank) for rank in ranks]
        self._carried: list[dict[str, Any]] = [{} for _ in self._ranks]
        self._breaks_at = case.raising[1] if case.raising is not None and case.raising[0] == "half" else math.inf

    @property
    def parameters(self) -> dict[str, Tensor]:
        """By name, sharing the memory of the model's."""
        buffers = self._model.named_buffers() if self._case.is_fed else ()
        return {name: parameter.detach() for name, parameter in (*self._model.named_parameters(), *buffers)}

    def update(self, number: int) -> tuple[float, float, float, bool]:
        """Loss, sample size, norm, and whether it stepped."""
        if number == self._case.joins:
            join(self._optimizers, self._model)
        before = [dict(values) for values in self._carried]
        buffers = [buffer.clone() for buffer in self._model.buffers()]
        loss, size, norm = self._evaluate(number, before)
        if size == 0:
            return math.nan, size, math.nan, False
        if not math.isfinite(norm) or not math.isfinite(loss):
            self._carried = before
            self._set_buffers(buffers)
            return loss, size, norm, False
        after, buffers_after = self._carried, [buffer.clone() for buffer in self._model.buffers()]
        for optimizer in self._optimizers.values():
            if self._case.closure:
                self._set_buffers(buffers)
                optimizer.step(torch.enable_grad()(lambda: self._evaluate(number, before)))
            else:
                optimizer.step()
            if number >= self._breaks_at:  # the other optimizer did not make its step
                self._breaks_at = math.inf
                break
        if self._case.closure == "replay":
            self._carried = after
            self._set_buffers(buffers_after)
        return loss, size, norm, True

    def _set_buffers(self, values: list[Tensor]) -> None:
        for buffer, value in zip(self._model.buffers(), values, strict=True):
            buffer.copy_(value)

    def _evaluate(self, number: int, before: list[dict[str, Any]]) -> tuple[float, float, float]:
        """Loss, sample size and norm; it leaves the clipped gradients, if they are finite."""
        case, steps = self._case, self._case.accumulation_steps
        totals: dict[str, tuple[Any, float]] = {}
        self._carried = [dict(values) for values in before]
        for made, carried in zip(self._ranks, self._carried, strict=True):
            group = [one for one in made[(number - 1) * steps : number * steps] if one is not None]
            for index, one in enumerate(group):
                if case.on_out_of_memory != "skip" or not bool(one[4].any()):
                    place, is_other = Place(number, index, carried), number in case.named
                    for name, (loss, weight) in losses_of(case, self._model, one, place, is_other=is_other).items():
                        total, size = totals.get(name, (0.0, 0.0))
                        totals[name] = total + loss, size + float(weight)
        self._model.zero_grad()
        size = sum(size for _, size in totals.values())
        if size == 0:
            return math.nan, size, math.nan
        mean = sum(total / size for total, size in totals.values() if size > 0)
        (mean * size if "summed" in case.traits else mean).backward()
        norm = _norm(self._model.parameters())
        if math.isfinite(norm):
            if "changed" in case.traits:
                change(self._model)
                norm = _norm(self._model.parameters())
            _clip(case, self._model, self._optimizers, norm)
        return float(mean.detach()), size, norm


def _norm(parameters: Iterable[nn.Parameter]) -> float:
    return math.sqrt(sum(float(p.grad.abs().square().sum()) for p in parameters if p.grad is not None))


def _clip(case: Case, model: nn.Module, optimizers: dict[str, Any], norm: float) -> None:
    parts = [[p for group in one.param_groups for p in group["params"]] for one in optimizers.values()]
    for parameters in parts if case.limits_each else [list(model.parameters())]:
        own = _norm(parameters) if case.limits_each else norm
        for parameter in parameters:
            if parameter.grad is not None and case.max_grad_norm is not None and own > 0:
                parameter.grad.mul_(min(1.0, case.max_grad_norm / (own + 1e-6)))


def without_what_no_graph_can_hold(case: Case) -> Case:
    """The case with one optimizer that has a formula, no lack of memory, and a forward that does not ask where it is."""
    kind = case.optimizer if case.optimizer in ("SGD", "Adam", "AdamW") else "SGD"
    options = case.options if kind == case.optimizer else {"lr": 0.05, "momentum": 0.9}
    return replace(
        case,
        optimizer=kind,
        implementation=case.implementation if case.implementation in OPTIMIZERS[kind][0] else "foreach",
        options=options,
        pieces=tuple(piece for piece in case.pieces if piece != "complex") or ("linear",),
        second=None,
        is_sparse=False,
        limits_each=False,
        closure=False,
        on_out_of_memory="raise",
        too_large=None,
        traits=case.traits - {"carried", "changed", "placed"},
        has_terms=False,
        named=frozenset(),
        raising=case.raising if case.raising is not None and case.raising[0] == "completed" else None,
    )


def difference_of_graphs(case: Case) -> str:
    """What is wrong where updates are graphs, run operation by operation; empty if nothing is.

    All that an update writes is compared with the plain path: the state of the optimizer and the buffers too.
    """
    torch._dynamo.reset()
    case, how = without_what_no_graph_can_hold(case), {"update": True, "backend": "eager"}
    if (found := difference(case, how)) or case.refilled:
        return found
    plain, graph = train(case, fast=False).written, train(case, how).written
    return _unequal(graph, plain, TOLERANCES[case.dtype]) if graph.keys() == plain.keys() else f"{[*graph]}, not {[*plain]}"


def difference(case: Case, compile: Any = False) -> str:  # noqa: A002, FBT002
    """What is wrong with the case on this rank, with and without accelerations; empty if nothing is."""
    by_hand = partial(local_reference, rank=idist.get_rank()) if case.reduction == "local" else reference
    expected, records = by_hand(case)
    written: list[dict[str, Tensor]] = []
    for fast in (True, False) if compile is False else (True,):
        try:
            found = train(case, compile, fast=fast)
        except ValueError as error:
            is_held = case.accumulation_steps > 1 or not case.sized
            if case.refilled and is_held and "each micro-batch in a container and memory of its own" in str(error):
                return ""
            raise
        if wrong := _wrong(case, found, expected, records):
            return wrong if fast else f"without accelerations: {wrong}"
        written.append(found.written)
    if written[0].keys() != written[-1].keys():
        return f"accelerations leave {[*written[0]]}, and the plain path {[*written[-1]]}"
    return _unequal(written[0], written[-1], TOLERANCES[case.dtype])


def _wrong(case: Case, found: Trained, expected: dict[str, Tensor], records: list[tuple[float, float, float, bool]]) -> str:
    applied = [record[3] for record in records]
    counters = (len(applied), sum(applied), len(applied) - sum(applied))
    if found.counters != counters:
        return f"updates, steps and skips are {found.counters} and not {counters}"
    absent = [number for number in range(1, len(records) + 1) if number not in found.records]
    if len(absent) > (case.raising is not None and case.raising[0] in ("step", "half")):
        return f"updates {absent} were not recorded"
    for number, record in found.records.items():
        other = records[number - 1]
        if record[3] != other[3] or not _same(record[:3], other[:3], TOLERANCES[case.dtype]):
            return f"update {number}: loss, sample size, norm, stepped are {record} and not {other}"
    return _unequal(found.values, expected, TOLERANCES[case.dtype])


def _unequal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> str:
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


def failures(seeds: range, world_size: int, run: Callable[[Case], str] = difference, *, local: bool = False) -> list[str]:
    """Runs the cases of these numbers on this rank: a line for each that fails."""
    lines = []
    for seed in seeds:
        case = draw(seed, world_size, local=local)
        try:
            found = run(case)
        except Exception as error:  # the other cases are still of interest, where there is one rank
            if world_size > 1:
                raise RuntimeError(f"{case}") from error
            found = f"{type(error).__name__}: {error}"
        if found:
            lines.append(f"{found}: {case}")
    return lines
