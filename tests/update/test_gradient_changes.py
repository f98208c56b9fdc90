"""GRADIENTS_REDUCED: handlers change the mean gradient in place, as programs by hand do between backward and step."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import cuts
from ignite_train import (
    ForwardOutput,
    GradientAccessError,
    NoGradientError,
    NonFiniteError,
    TorchLossScaling,
    Trainer,
    TrainEvents,
    UpdateOptions,
    count_traffic,
    create_trainer,
)
from meshes import on_cpu
from ranks import run_ranks
from setups import Batch, Setup

Build = Callable[..., Setup]
Change = Callable[[nn.Module], None]
SIZES = [[[2, 3], [4]], [[1], []], [[3], [2, 5]]]  # by update and rank


def whole(tensor: Tensor) -> Tensor:
    """The tensor that all ranks hold together. Collective, if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip_values(model: nn.Module) -> None:
    """Each element to a range, as `clip_grad_value_` does."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.05, 0.05)


def clip_each(model: nn.Module) -> None:
    """Each parameter by its own norm, as DINO does."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(min(1.0, 0.1 / (float(whole(parameter.grad.norm())) + 1e-6)))


def clip_adaptively(model: nn.Module) -> None:
    """Each row by the norm of its weights (Brock et al., High-performance large-scale image recognition, 2021, section 4.1)."""
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None
        if parameter.dim() == 1:
            weight, norm = (float(whole(tensor.norm())) for tensor in (parameter.detach(), gradient))
            gradient.mul_(min(1.0, 0.1 * max(weight, 1e-3) / max(norm, 1e-6)))
        else:
            weights, norms = (tensor.norm(dim=1, keepdim=True) for tensor in (parameter.detach(), gradient))
            gradient.mul_((0.1 * weights.clamp(min=1e-3) / norms.clamp(min=1e-6)).clamp(max=1.0))


def freeze_last(model: nn.Module) -> None:
    """The last layer stays where it is, as in DINO's first epoch."""
    for parameter in list(model.parameters())[-2:]:
        parameter.grad = None


CHANGES: dict[str, Change] = {
    "values": clip_values,
    "each": clip_each,
    "adaptive": clip_adaptively,
    "frozen": freeze_last,
}


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def by_hand(change: Change) -> tuple[list[float], list[float]]:
    """Parameters and norms of the loop on all samples of each update at once."""
    model, start, norms = network(), 0, []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for sizes in SIZES:
        count = sum(map(sum, sizes))
        loss, weight, *_ = cuts.forward(model, cuts.cut(cuts.samples(), [count], start)[0])
        start += count
        optimizer.zero_grad()
        (loss / weight).backward()
        change(model)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.15)))
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), norms


def with_events(way: str, name: str) -> tuple[list[float], list[float], list[str]]:
    """The same on this rank's samples, with the change in a handler; and the collectives of the last update."""
    model = network()
    if way == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (idist.get_world_size(),)))
    wrapped = DistributedDataParallel(model) if way == "ddp" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = UpdateOptions(reduction=way)  # type: ignore[arg-type]
    trainer = create_trainer(wrapped, optimizer, cuts.forward, max_grad_norm=0.15, options=options)
    if name:
        trainer.add_event_handler(TrainEvents.GRADIENTS_REDUCED, lambda: CHANGES[name](model))
    start, norms = 0, []
    with trainer.session():
        for sizes in SIZES:
            rank, ranks = idist.get_rank(), idist.get_world_size()
            mine = [size for own in (sizes if ranks == 1 else sizes[rank : rank + 1]) for size in own]
            before = 0 if ranks == 1 else sum(map(sum, sizes[:rank]))
            with count_traffic() as traffic:
                norms.append(trainer.update(cuts.cut(cuts.samples(), mine, start + before)).grad_norm)
            start += sum(map(sum, sizes))
    parameters = torch.cat([whole(p.detach()).flatten() for p in model.parameters()]).tolist()
    return parameters, norms, [one.name for one in traffic.collectives]


@pytest.mark.parametrize("name", list(CHANGES))
def test_one_process_is_the_loop_by_hand(name: str) -> None:
    """The norm in the record is that after the change and before clipping."""
    parameters, norms, _ = with_events("auto", name)
    expected = by_hand(CHANGES[name])
    assert parameters == pytest.approx(expected[0], rel=1e-11)
    assert norms == pytest.approx(expected[1], rel=1e-11)
    assert expected[0] != pytest.approx(by_hand(lambda model: None)[0], rel=1e-3), "the change matters"


def all_on_ranks(way: str) -> list[tuple[list[float], list[float], list[str]]]:
    return [with_events(way, name) for name in ("", *CHANGES)]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "explicit", "fsdp"])
def test_ranks_are_the_loop_by_hand(way: str) -> None:
    """On ragged and empty groups; replicas have no more collectives for it, and sharded models one small all-reduce."""
    for (_, _, without), *outcomes in run_ranks(all_on_ranks, way):
        for name, (parameters, norms, collectives) in zip(CHANGES, outcomes, strict=True):
            expected = by_hand(CHANGES[name])
            assert parameters == pytest.approx(expected[0], rel=1e-11), name
            assert norms == pytest.approx(expected[1], rel=1e-11), name
            if way != "fsdp":
                assert collectives == without, name
            elif name == "values":  # the others read norms over the ranks themselves
                assert collectives == [*without, "allreduce_"]


# --- one process, in other circumstances ---


def listen(trainer: Trainer, model: nn.Module, event: TrainEvents = TrainEvents.GRADIENTS_REDUCED) -> list[list[float]]:
    """The gradients, flattened, of each time that the event fires."""
    seen: list[list[float]] = []
    trainer.add_event_handler(
        event, lambda: seen.append([x for p in model.parameters() if p.grad is not None for x in p.grad.flatten().tolist()])
    )
    return seen


def test_a_loss_scale_is_taken_out_first(build: Build, micro_batches: list[Batch]) -> None:
    """With a scale that is a power of two the gradients are bitwise those without one."""
    scaled = build(loss_scaling=TorchLossScaling(init_scale=1024.0), accumulation_steps=2)
    plain = build(accumulation_steps=2)
    seen = [listen(setup.trainer, setup.model) for setup in (scaled, plain)]
    for setup in (scaled, plain):
        setup.trainer.run(micro_batches, max_epochs=1)
    assert seen[0] == seen[1]
    assert len(seen[0]) == 3


def test_the_sum_stays_a_sum(build: Build, micro_batches: list[Batch]) -> None:
    """With `normalize=False` it is Σ∇loss."""
    mean, total = build(), build(normalize=False)
    seen = [listen(setup.trainer, setup.model) for setup in (mean, total)]
    for setup in (mean, total):
        setup.trainer.run(micro_batches[2:3])
    assert seen[1][0] == [4 * x for x in seen[0][0]]


@pytest.mark.parametrize("weight", [0.25, 0.5, 1.0, 2.0])
def test_gradients_of_any_total_weight_are_means(weight: float) -> None:
    """Also where the total is less than one."""
    model, seen = nn.Linear(2, 1, bias=False).double(), []

    def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
        return ForwardOutput(model(x).sum(), sample_size=weight)

    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward)
    trainer.add_event_handler(TrainEvents.GRADIENTS_REDUCED, lambda: seen.append(model.weight.grad.tolist()))
    trainer.run([torch.tensor([[1.0, 3.0]], dtype=torch.float64)])
    assert seen == [[[1 / weight, 3 / weight]]]


@pytest.mark.parametrize("fused", [False, True])
def test_a_handler_that_only_looks_changes_nothing(build: Build, micro_batches: list[Batch], fused: bool) -> None:
    """The updates are those without it to rounding, and bitwise where the factor is a power of two; the log says why."""

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01, fused=fused)

    looking, plain = build(optimizer=adamw), build(optimizer=adamw)
    listen(looking.trainer, looking.model)
    for setup in (looking, plain):
        setup.trainer.run([micro_batches[2]] * 3, max_epochs=1)
    assert looking.contents() == plain.contents()


def test_the_log_says_what_it_costs(build: Build, micro_batches: list[Batch], caplog: pytest.LogCaptureFixture) -> None:
    """Once."""
    setup = build()
    listen(setup.trainer, setup.model)
    with caplog.at_level(logging.INFO, logger="ignite_train"):
        setup.trainer.run(micro_batches, max_epochs=1)
    assert sum("since GRADIENTS_REDUCED has a handler" in record.message for record in caplog.records) == 1


def test_later_events_see_the_changed_gradients(build: Build, micro_batches: list[Batch]) -> None:
    """`trainer.gradients()` in GRADIENTS_READY gives them, and its norm is the record's."""
    setup = build()
    kept: list[Tensor] = []

    @setup.trainer.on(TrainEvents.GRADIENTS_REDUCED)
    def halve() -> None:
        with pytest.raises(GradientAccessError):
            setup.trainer.gradients()
        for parameter in setup.model.parameters():
            assert parameter.grad is not None
            kept.append(parameter.grad.mul_(0.5).clone())

    @setup.trainer.on(TrainEvents.GRADIENTS_READY)
    def compare() -> None:
        gradients = list(setup.trainer.gradients().values())
        assert all(torch.equal(p, q) for p, q in zip(gradients, kept, strict=True))

    output = setup.trainer.run(micro_batches[:1]).update_output
    assert output is not None
    assert output.grad_norm == pytest.approx(math.hypot(*(float(g.norm()) for g in kept)), rel=1e-6)


def test_later_events_see_the_mean_of_what_handlers_have_made_infinite(build: Build, micro_batches: list[Batch]) -> None:
    """The update is skipped, and in GRADIENTS_READY the other gradients are still those of the mean loss."""
    setup = build(options=UpdateOptions(on_nonfinite="skip"))
    kept: list[Tensor] = []
    seen: list[Tensor] = []

    @setup.trainer.on(TrainEvents.GRADIENTS_REDUCED)
    def spoil() -> None:
        first, *rest = (parameter.grad for parameter in setup.model.parameters())
        assert first is not None
        first.fill_(math.inf)
        kept.extend(gradient.clone() for gradient in rest if gradient is not None)

    setup.trainer.add_event_handler(
        TrainEvents.GRADIENTS_READY, lambda: seen.extend(g.clone() for g in [*setup.trainer.gradients().values()][1:])
    )
    output = setup.trainer.run(micro_batches[:1]).update_output
    assert output is not None
    assert output.skipped_reason == "nonfinite"
    assert len(kept) > 0
    assert all(torch.equal(p, q) for p, q in zip(seen, kept, strict=True))


def seen_by_handlers(shards: list[list[int]]) -> list[tuple[int, float, float, str | None]]:
    """Number, loss, sample size and name that a handler reads of each update; and those of the record that is left of it."""
    model = cuts.linear()
    options = UpdateOptions(reduction="explicit" if len(shards) > 1 else "auto")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_trainer(model, optimizer, cuts.forward, max_grad_norm=0.1, protect=False, options=options)
    seen: list[tuple[int, float, float, str | None]] = []

    @trainer.on(TrainEvents.GRADIENTS_REDUCED)
    def note(trainer: Trainer) -> None:
        record = trainer.state.update_output
        assert record is not None
        seen.append((trainer.state.iteration, record.loss, record.sample_size, record.name))

    with trainer.session() as state:
        for name in (None, "other", None):
            record = trainer.update(cuts.shard(shards), name=name)
            seen.append((state.iteration, record.loss, record.sample_size, record.name))
    return seen


@pytest.mark.slow
def test_the_loss_and_the_size_of_the_running_update_are_known() -> None:
    """Over all micro-batches and ranks, as in the record that the update leaves."""
    alone = seen_by_handlers([[40, 24]])
    assert alone[::2] == alone[1::2]
    assert [(number, name) for number, *_, name in alone[::2]] == [(1, None), (2, "other"), (3, None)]
    assert alone[0][2] == float(cuts.samples()[2].sum())
    for found in run_ranks(seen_by_handlers, [[40], [4, 20]]):
        assert found[::2] == found[1::2]
        assert [size for _, _, size, _ in found] == [size for _, _, size, _ in alone]


def test_gradients_beyond_float32_squares_keep_their_norm(build: Build, micro_batches: list[Batch]) -> None:
    """A handler may make them so large that float32 cannot hold their squares."""
    setup = build()

    @setup.trainer.on(TrainEvents.GRADIENTS_REDUCED)
    def fill() -> None:
        for parameter in setup.model.parameters():
            parameter.grad = torch.full_like(parameter, 2.0**100)

    output = setup.trainer.run(micro_batches[:1]).update_output
    count = sum(p.numel() for p in setup.model.parameters())
    assert output is not None
    assert output.grad_norm == pytest.approx(2.0**100 * math.sqrt(count), rel=1e-6)


@pytest.mark.parametrize("scaled", [False, True])
def test_updates_that_have_no_mean_gradient(build: Build, micro_batches: list[Batch], scaled: bool) -> None:
    """One without a sample does not fire the event, and none that has overflowed: as with GradScaler, the scale must fall."""
    setup = build(loss_scaling=TorchLossScaling(init_scale=1024.0)) if scaled else build(on_nonfinite="skip")
    seen = listen(setup.trainer, setup.model)
    bad = (torch.full((2, 4), torch.nan), torch.zeros(2, 1))
    setup.trainer.run([bad, micro_batches[0]], max_epochs=1)
    setup.trainer.update([])
    assert (len(seen), setup.trainer.state.num_skipped) == (1 if scaled else 2, 2)


def test_what_handlers_break_is_noticed(build: Build, micro_batches: list[Batch]) -> None:
    """A gradient that they make NaN is not stepped along, and dropping all of them is an error."""
    setup = build()
    before = setup.contents()
    handle = setup.trainer.add_event_handler(
        TrainEvents.GRADIENTS_REDUCED, lambda: next(setup.model.parameters()).grad.fill_(math.nan)
    )
    with pytest.raises(NonFiniteError):
        setup.trainer.update(micro_batches[:1])
    handle.remove()
    setup.trainer.add_event_handler(TrainEvents.GRADIENTS_REDUCED, setup.optimizer.zero_grad)
    with pytest.raises(NoGradientError, match="a handler of GRADIENTS_REDUCED has dropped all gradients"):
        setup.trainer.update(micro_batches[:1])
    assert setup.contents() == before


# --- gradients that are not finite, which a handler repairs ---


def repair(model: nn.Module) -> None:
    """As the training loops of EDM and StyleGAN3 do in each update."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        torch.nan_to_num(parameter.grad, nan=0, posinf=1e5, neginf=-1e5, out=parameter.grad)


def with_trouble(model: nn.Module, loss: Tensor, update: int) -> Tensor:
    """In update 2 some gradients are NaN, and in update 3 the loss alone is infinite."""
    if update == 2:
        return loss + (0 * model[0].weight[0]).sqrt().sum()
    return loss + math.inf if update == 3 else loss


def repaired_by_hand() -> list[float]:
    """The loop on all samples of each update at once."""
    model, start = network(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for update, sizes in enumerate(SIZES, start=1):
        count = sum(map(sum, sizes))
        loss, weight, *_ = cuts.forward(model, cuts.cut(cuts.samples(), [count], start)[0])
        start += count
        optimizer.zero_grad()
        (with_trouble(model, loss, update) / weight).backward()
        repair(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.15)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def repaired(way: str) -> tuple[list[float], list[tuple[int, bool]]]:
    """The same with a handler, on this rank's samples; and of each update whether the loss is finite and it was applied."""
    model = network()
    wrapped = DistributedDataParallel(model) if way == "ddp" else model

    def forward(model: nn.Module, micro_batch: Any, state: Any) -> ForwardOutput:
        output = cuts.forward(model, micro_batch)
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        return output._replace(loss=with_trouble(inner, output.loss, state.iteration))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = UpdateOptions(reduction=way)  # type: ignore[arg-type]
    trainer = create_trainer(wrapped, optimizer, forward, max_grad_norm=0.15, options=options)
    trainer.add_event_handler(TrainEvents.GRADIENTS_REDUCED, lambda: repair(model))
    start, records = 0, []
    rank, ranks = idist.get_rank(), idist.get_world_size()
    for sizes in SIZES:
        mine = [size for own in (sizes if ranks == 1 else sizes[rank : rank + 1]) for size in own]
        before = 0 if ranks == 1 else sum(map(sum, sizes[:rank]))
        record = trainer.update(cuts.cut(cuts.samples(), mine, start + before))
        records.append((int(math.isfinite(record.loss)), record.applied))
        start += sum(map(sum, sizes))
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), records


def in_both_ways() -> list[Any]:
    return [repaired(way) for way in ("ddp", "explicit")]


@pytest.mark.filterwarnings("ignore:update.. was called without a session")
@pytest.mark.parametrize("ranks", [1, 2])
def test_repaired_gradients_are_stepped_along_as_by_hand(ranks: int) -> None:
    """Norm and decision come after the handler. A loss that is not finite does not skip the update then."""
    outcomes = [repaired("auto")] if ranks == 1 else [one for rank in run_ranks(in_both_ways) for one in rank]
    expected = repaired_by_hand()
    for parameters, records in outcomes:
        assert parameters == pytest.approx(expected, rel=1e-11)
        assert records == [(1, True), (1, True), (0, True)]


# --- a handler on some of the ranks ---


def read_on(ranks: tuple[int, ...], way: str) -> list[float]:
    """The weights after updates in which a handler of these ranks looks at the gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    wrapped: nn.Module = (
        DistributedDataParallel(model) if way == "ddp" else fully_shard(model, mesh=on_cpu()) if way == "fsdp" else model
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    trainer = create_trainer(
        wrapped,
        optimizer,
        lambda model, x: ForwardOutput(model(x).square().sum(), len(x)),
        max_grad_norm=0.3,
        options=UpdateOptions(reduction=way),  # type: ignore[arg-type]
    )
    rank = idist.get_rank()
    if rank in ranks:
        trainer.add_event_handler(TrainEvents.GRADIENTS_REDUCED, lambda: [p.grad for p in model.parameters()])
    generator = torch.Generator().manual_seed(rank)
    trainer.run([torch.randn(3, 3, generator=generator) for _ in range(5)], max_epochs=1)
    return torch.cat([whole(parameter).detach().flatten() for parameter in model.parameters()]).tolist()


def read_in_all_ways() -> list[list[float]]:
    return [read_on(ranks, way) for way in ("explicit", "ddp", "fsdp") for ranks in ((0, 1), (0,))]


@pytest.mark.slow
def test_a_handler_on_one_rank_leaves_the_ranks_alike() -> None:
    """All ranks multiply the gradients out where one of them does, bit by bit, and take the norm again with it."""
    first, second = run_ranks(read_in_all_ways)
    assert first == second
    assert first[::2] == first[1::2]
