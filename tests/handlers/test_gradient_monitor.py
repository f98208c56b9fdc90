"""The numbers of each layer are those of a plain loop, over ranks and shards too, and cost nothing between two looks."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bits import bit_by_bit
from ignite_train import ForwardOutput, Trainer, TrainEvents, UpdateOptions, count_traffic, create_trainer
from ignite_train.engine.dispatch import entries
from ignite_train.handlers import Checkpoint, Freeze, GradientMonitor, OuterOptimizer
from ignite_train.handlers.gradient_monitor import _norms
from mistakes import Mistake, assert_one_line
from ranks import run_ranks

DATA = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in range(8)]
EVERY = 2


class Net(nn.Module):
    """A block of two layers, a head, and a layer that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
        self.head, self.unused = nn.Linear(4, 1), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x)) + 0 * self.unused.weight.sum()


def net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Net().double()


def mean_loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 2.0).square().mean()


def make(model: nn.Module, **options: Any) -> Trainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return create_trainer(model, optimizer, mean_loss, max_grad_norm=0.1, options=UpdateOptions(**options))


def norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))


def by_hand(ranks: int = 1) -> list[dict[str, float]]:
    """What is published after each second update, computed layer by layer in a plain loop."""
    model, found = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    layers = {"block.0": model.block[0], "block.2": model.block[2], "head": model.head, "unused": model.unused}
    for update in range(1, len(DATA) // ranks + 1):
        optimizer.zero_grad()
        mean_loss(model, torch.cat(DATA[ranks * (update - 1) : ranks * update])).backward()
        metrics: dict[str, float] = {"dead_layers": 1}
        before = {name: [p.detach().clone() for p in layer.parameters()] for name, layer in layers.items()}
        for name, layer in layers.items():
            metrics[f"layer_grad_norm/{name}"] = norm([p.grad for p in layer.parameters() if p.grad is not None])
            metrics[f"layer_weight_norm/{name}"] = norm(before[name])
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        for name, layer in layers.items():
            moved = norm([p.detach() - was for p, was in zip(layer.parameters(), before[name], strict=True)])
            metrics[f"update_ratio/{name}"] = moved / metrics[f"layer_weight_norm/{name}"]
        if update % EVERY == 0:
            found.append(metrics)
    return found


def run(trainer: Trainer, data: Any, **settings: Any) -> tuple[list[dict[str, float]], GradientMonitor]:
    monitor, found = GradientMonitor(EVERY, **settings), []
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=EVERY), lambda: found.append(dict(trainer.state.metrics)))
    monitor.attach(trainer)
    trainer.run(data, max_epochs=1)
    return found, monitor


def check(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-9, abs=1e-15)


def test_against_a_plain_loop() -> None:
    """Each number of each layer, read by a handler that was attached before; the training is not changed by it."""
    model, other = net(), net()
    found, monitor = run(make(model), DATA)
    check(found, by_hand())
    assert monitor.dead == ("unused",)
    assert monitor.histograms == {}  # which have to be asked for
    make(other).run(DATA, max_epochs=1)
    assert bit_by_bit(model.state_dict()) == bit_by_bit(other.state_dict())


class Complex(nn.Module):
    """A complex layer behind a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2, dtype=torch.float64)
        self.second = nn.Linear(2, 3, dtype=torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).to(torch.complex128)).abs()


def test_complex_layers_have_the_norms_of_their_real_and_imaginary_parts() -> None:
    """In numbers and in histograms, in which each element is two; one of such layers alone is a model too."""
    model = Complex()
    before = [parameter.detach().clone() for parameter in model.second.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = create_trainer(model, optimizer, mean_loss)
    gradients = list[Tensor]()
    trainer.add_event_handler(
        TrainEvents.GRADIENTS_READY,
        lambda: gradients.extend(trainer.gradients()[f"second.{name}"] for name in ("weight", "bias")),
    )
    monitor = GradientMonitor(1, with_histograms=True)
    monitor.attach(trainer)
    metrics = trainer.run(DATA[:1]).metrics
    assert metrics["layer_grad_norm/second"] == pytest.approx(float(torch.cat([g.flatten() for g in gradients]).abs().norm()))
    assert metrics["layer_weight_norm/second"] == pytest.approx(float(torch.cat([w.flatten() for w in before]).abs().norm()))
    assert metrics["update_ratio/second"] == pytest.approx(
        0.05 * metrics["layer_grad_norm/second"] / metrics["layer_weight_norm/second"]
    )
    assert metrics["dead_layers"] == 0
    assert sum(monitor.histograms["gradient/second"].counts) == sum(monitor.histograms["weight/second"].counts) == 2 * 9
    alone = nn.Linear(3, 1, bias=False, dtype=torch.complex64)
    trainer = create_trainer(alone, torch.optim.SGD(alone.parameters(), lr=0.05), lambda model, x: model(x).abs().mean())
    GradientMonitor(1).attach(trainer)
    assert trainer.run([torch.ones(2, 3, dtype=torch.complex64)]).metrics["layer_grad_norm/model"] > 0


@pytest.mark.parametrize("scale", [1e-24, 1e22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_whose_squares_float32_does_not_hold(dtype: torch.dtype, scale: float) -> None:
    """They are neither zero, which would be a dead layer, nor infinite, which would leave all layers out."""
    model = nn.Linear(3, 1, bias=False, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    trainer = create_trainer(model, optimizer, lambda model, x: model(x).sum() * scale, max_grad_norm=1.0)
    GradientMonitor(1).attach(trainer)
    metrics = trainer.run([torch.full((1, 3), 2.0, dtype=dtype)]).metrics
    assert metrics["layer_grad_norm/model"] == pytest.approx(2.0 * scale * math.sqrt(3), rel=1e-2)
    assert metrics["dead_layers"] == 0


def test_on_the_cpu_norms_take_no_copy_of_a_tensor() -> None:
    """In float64 torch copies it there: a piece at a time."""
    number = 2**22
    tensors = [torch.full((number,), 0.55), torch.zeros(0), torch.full((4,), 1e-30)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        found = _norms(tensors)
    assert max(event.self_cpu_memory_usage for event in profile.events()) < number
    assert found.tolist() == pytest.approx([float(torch.tensor(0.55)) * 2**11, 0.0, float(torch.tensor(2e-30))], rel=1e-12)


def test_layers_together() -> None:
    """With depth=1 the norms of a block are those of all its layers."""
    (first, *_), _ = run(make(net()), DATA, depth=1)
    expected = by_hand()[0]
    whole = math.hypot(expected["layer_grad_norm/block.0"], expected["layer_grad_norm/block.2"])
    assert first["layer_grad_norm/block"] == pytest.approx(whole, rel=1e-9)
    assert {name.partition("/")[2] for name in first if "/" in name} == {"block", "head", "unused"}


def test_a_model_of_one_parameter() -> None:
    """Its only layer is the model itself."""
    model = nn.Linear(2, 1, bias=False).double()
    nn.init.constant_(model.weight, 3.0)
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).mean())
    (found,), _ = run(trainer, [torch.tensor([[3.0, 4.0]], dtype=torch.float64)] * EVERY)
    assert found["layer_grad_norm/model"] == pytest.approx(5.0, rel=1e-12)
    weight = [3.0 - 0.1 * (EVERY - 1) * one for one in (3.0, 4.0)]
    assert found["layer_weight_norm/model"] == pytest.approx(math.hypot(*weight), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["float64", "float32", "bfloat16"])
def test_histograms_and_norms(dtype: torch.dtype) -> None:
    """Against counting and squaring each element by itself; norms are not added up in fewer than 32 bits."""
    model = net().to(dtype)

    def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
        return ForwardOutput((model(x) - 2.0).square().sum(), len(x))

    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), forward, max_grad_norm=0.1)
    seen: dict[str, Any] = {}

    def keep() -> None:
        seen.update({f"weight/{name}": p.detach().clone() for name, p in model.named_parameters()})
        seen.update({f"gradient/{name}": value.clone() for name, value in trainer.gradients().items()})

    trainer.add_event_handler(TrainEvents.GRADIENTS_READY, keep)
    with torch.no_grad():
        model.unused.weight.copy_(torch.tensor([[1e9, 2.0**-30], [1 - 2.0**-40, -1e-9]], dtype=torch.float64))
    (found,), monitor = run(trainer, [x.to(dtype) for x in DATA[:EVERY]], with_histograms=True)
    cases = [(kind, layer) for kind in ("weight", "gradient") for layer in ("block.0", "block.2", "head", "unused")]
    for kind, layer in cases:
        elements = torch.cat([value.flatten() for name, value in seen.items() if name.startswith(f"{kind}/{layer}.")]).tolist()
        edges, counts = monitor.histograms[f"{kind}/{layer}"]
        assert list(counts) == [sum(low <= x < high for x in elements) for low, high in pairwise(edges)]
        # the norm of each parameter has the bits of float32 where the parameter has fewer than those of float64
        expected = pytest.approx(math.hypot(*elements), rel=1e-9 if dtype == torch.float64 else 1e-6)
        assert found[f"layer_{kind.replace('ient', '')}_norm/{layer}"] == expected
    sizes = [sum(monitor.histograms[f"{kind}/{layer}"].counts) for kind, layer in cases]
    assert sizes == [20, 24, 5, 6, 20, 24, 5, 4]  # one bias has no gradient


def watched(*, with_monitor: bool) -> tuple[list[int], list[bool]]:
    """The host reads of each update, and whether GRADIENTS_READY had a handler in it."""
    trainer, reads, listens = make(net()), [0], []
    if with_monitor:
        GradientMonitor(EVERY).attach(trainer)
    event = TrainEvents.BACKWARD_COMPLETED
    trainer.add_event_handler(event, lambda: listens.append(trainer.has_handlers(TrainEvents.GRADIENTS_READY)))
    with count_traffic("cpu") as traffic:
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: reads.append(len(traffic.host_reads)))
        trainer.run(DATA[:5], max_epochs=1)
    assert traffic.collectives == []
    return [after - before for before, after in pairwise(reads)], listens


def test_between_two_looks_it_does_nothing() -> None:
    """No read, no collective and no handler of GRADIENTS_READY; in the update that it looks at one read more."""
    reads, listens = watched(with_monitor=True)
    assert listens == [False, True, False, True, False]
    expected, _ = watched(with_monitor=False)
    assert [mine - plain for mine, plain in zip(reads, expected, strict=True)] == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("every", [1, 3])
def test_it_looks_at_each_update_whose_number_is_a_multiple(every: int) -> None:
    """Also at the first update of a run that continues another."""
    trainer, looked = make(net()), []
    GradientMonitor(every).attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: trainer.state.metrics.clear())
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: looked.extend([trainer.state.iteration] if trainer.state.metrics else [])
    )
    for limit in (2, 3, 8):
        trainer.run(DATA, max_iters=limit)
    assert looked == list(range(every, 9, every))


def test_a_skipped_update_and_an_exception_leave_nothing_behind() -> None:
    """Neither publishes, and no copy of the weights stays."""
    model = net()
    trainer = make(model, on_nonfinite="skip")
    found, monitor = run(trainer, [DATA[0], DATA[1] * math.nan, DATA[2]])
    assert found == [{}]
    trainer.add_event_handler(TrainEvents.GRADIENTS_READY, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(DATA, max_epochs=2)
    assert not trainer.state.metrics
    assert not monitor._weights
    assert trainer.has_handlers(TrainEvents.GRADIENTS_READY)  # that of the test alone
    assert len(entries(trainer, TrainEvents.GRADIENTS_READY)) == 1


def test_a_skipped_update_does_not_show_the_norms_of_an_earlier_one() -> None:
    """They are gone, and those of the next update are there again."""
    trainer, seen = make(net(), on_nonfinite="skip"), []
    GradientMonitor(every=1).attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append(len(trainer.state.metrics)))
    trainer.run([DATA[0], DATA[1] * math.nan, DATA[2]])
    assert seen[0] == seen[2] > 0
    assert seen[1] == 0


def test_weights_that_are_zero_have_no_ratio() -> None:
    """From the beginning, or from some update on; what was published before is gone."""
    model = net()
    trainer = make(model)
    with torch.no_grad():
        model.unused.weight.zero_()
        model.unused.bias.zero_()
    trainer.add_event_handler(
        Events.ITERATION_STARTED(once=4), lambda: [parameter.detach().zero_() for parameter in model.head.parameters()]
    )
    found, _ = run(trainer, DATA)
    ratios = [{name.partition("/")[2] for name in metrics if name.startswith("update_ratio/")} for metrics in found]
    assert ratios == [{"block.0", "block.2", "head"}, {"block.0", "block.2"}, *[{"block.0", "block.2", "head"}] * 2]
    assert [metrics["layer_weight_norm/unused"] for metrics in found] == [0.0] * 4
    assert found[1]["layer_weight_norm/head"] == 0


def test_frozen_layers_are_dead() -> None:
    """A layer without a gradient does not move."""
    model = net()
    trainer = make(model)
    Freeze(model.block).attach(trainer)
    found, monitor = run(trainer, DATA)
    assert monitor.dead == ("block.0", "block.2", "unused")
    assert found[-1]["update_ratio/block.0"] == 0


def test_parameters_that_are_not_trained_are_in_no_layer() -> None:
    """A layer without any other is not shown, and not dead; of a layer with others only these count."""
    model = net()
    model.block[0].requires_grad_(requires_grad=False)
    model.head.bias.requires_grad_(requires_grad=False)
    found, monitor = run(make(model), DATA[:EVERY], with_histograms=True)
    layers = ["block.2", "head", "unused"]
    assert {name.partition("/")[2] for name in found[0] if "/" in name} == {*layers}
    assert monitor.dead == ("unused",)
    assert [sum(monitor.histograms[f"weight/{name}"].counts) for name in layers] == [24, 4, 6]


def test_the_edges_of_a_histogram_are_powers_of_two() -> None:
    """From 2⁻³⁰ to 2⁶, their negatives, and the infinities."""
    _, monitor = run(make(net()), DATA[:EVERY], with_histograms=True)
    powers = [math.ldexp(1.0, exponent) for exponent in range(-30, 7)]
    expected = (-math.inf, *(-power for power in powers[::-1]), *powers, math.inf)
    assert {histogram.edges for histogram in monitor.histograms.values()} == {expected}


def _on_this_rank(kind: str) -> Any:
    model: nn.Module = net()
    if kind in ("fsdp", "both"):
        mesh = init_device_mesh("cpu", (2,))
        copied = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copy", "shard")) if kind == "both" else mesh
        for layer, its_mesh in ((model.block, copied), (model.head, mesh)):
            fully_shard(layer, mesh=its_mesh)  # type: ignore[arg-type]
        fully_shard(model, mesh=mesh)
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    trainer = make(model, **({"reduction": "explicit"} if kind == "explicit" else {}))
    found, monitor = run(trainer, DATA[idist.get_rank() :: 2], with_histograms=True)
    return found, {name: histogram.counts for name, histogram in monitor.histograms.items()}, monitor.dead


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "explicit", "fsdp", "both"])
def test_two_ranks(kind: str) -> None:
    """The numbers of one process with all data, on both ranks; also where each has one block whole and the others in parts."""
    (first, counts, dead), second = run_ranks(_on_this_rank, kind)
    assert (first, counts, dead) == second
    check(first, by_hand(ranks=2))
    assert dead == ("unused",)
    assert {name: sum(numbers) for name, numbers in counts.items() if name.startswith("weight")} == {
        "weight/block.0": 20,
        "weight/block.2": 24,
        "weight/head": 5,
        "weight/unused": 6,
    }


def _while_one_rank_skips(skipping: str) -> list[list[str]]:
    """The names of what is published in each second update; rank 0 makes no step in update 4."""
    trainer = make(net(), reduction="local", on_nonfinite="skip")
    OuterOptimizer(torch.optim.SGD(trainer.model.parameters(), lr=1.0), every=8).attach(trainer)
    GradientMonitor(every=EVERY).attach(trainer)
    published = list[list[str]]()
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED(every=EVERY),
        lambda: published.append(sorted({one.split("/")[0] for one in trainer.state.metrics})),
    )
    with trainer.session():
        for update, batch in enumerate(DATA[:6], start=1):
            is_skipping = idist.get_rank() == 0 and update == 4
            trainer.update([] if is_skipping and skipping == "empty" else [batch * (math.nan if is_skipping else 1.0)])
    return published


@pytest.mark.slow
@pytest.mark.parametrize("skipping", ["nonfinite", "empty"])
def test_a_rank_that_skips_alone_has_no_norms_of_that_update(skipping: str) -> None:
    """With `reduction="local"` an update counts as applied if another rank has stepped."""
    names = ["dead_layers", "layer_grad_norm", "layer_weight_norm", "update_ratio"]
    assert run_ranks(_while_one_rank_skips, skipping) == [[names, [], names], [names, names, names]]


ROWS = 6
INDICES = [
    torch.tensor(rows) for rows in ([0, 2, 2], [2, 5, 1], [4, 4, 0], [1, 2, 4], [3, 3, 3], [0, 5, 2], [1, 1, 2], [4, 0, 0])
]


class Table(nn.Module):
    """An embedding and a linear layer."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.table, self.last = nn.Embedding(ROWS, 2, sparse=sparse).double(), nn.Linear(2, 1).double()

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self.table(rows)).squeeze(1)


def table_loss(model: nn.Module, rows: Tensor) -> ForwardOutput:
    return ForwardOutput((model(rows) - rows).square().sum(), len(rows))


def table_by_hand() -> tuple[list[dict[str, float]], list[int]]:
    """What is published after each second update of four micro-batches, with dense gradients; the latest histogram."""
    model, found = Table(sparse=False), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for update in range(1, 3):
        rows = torch.cat(INDICES[4 * (update - 1) : 4 * update])
        optimizer.zero_grad()
        ((model(rows) - rows).square().sum() / len(rows)).backward()
        before = {name: [p.detach().clone() for p in layer.parameters()] for name, layer in model.named_children()}
        optimizer.step()
        metrics: dict[str, float] = {"dead_layers": 0}
        for name, layer in model.named_children():
            metrics[f"layer_grad_norm/{name}"] = norm([p.grad for p in layer.parameters() if p.grad is not None])
            metrics[f"layer_weight_norm/{name}"] = norm(before[name])
            moved = norm([p.detach() - was for p, was in zip(layer.parameters(), before[name], strict=True)])
            metrics[f"update_ratio/{name}"] = moved / metrics[f"layer_weight_norm/{name}"]
        if update % EVERY == 0:
            found.append(metrics)
    elements = model.table.weight.grad.flatten().tolist()  # type: ignore[union-attr]
    edges = [-math.inf, *(-(2.0**e) for e in range(6, -31, -1)), *(2.0**e for e in range(-30, 7)), math.inf]
    return found, [sum(low <= x < high for x in elements) for low, high in pairwise(edges)]


def sparse_on_this_rank(kind: str) -> Any:
    rank, size = idist.get_rank(), idist.get_world_size()
    model: nn.Module = Table(sparse=True)
    options = {"reduction": kind} if kind == "explicit" else {}
    model = DistributedDataParallel(model) if kind == "ddp" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = create_trainer(model, optimizer, table_loss, accumulation_steps=4 // size, options=UpdateOptions(**options))
    found, monitor = run(trainer, INDICES[rank::size], with_histograms=True)
    return found, list(monitor.histograms["gradient/table"].counts)


def test_sparse_gradients() -> None:
    """The numbers of dense ones, with rows that occur in several micro-batches and rows that occur in none."""
    (found, counts), (expected, expected_counts) = sparse_on_this_rank("alone"), table_by_hand()
    check(found, expected)
    assert counts == expected_counts


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "explicit"])
def test_sparse_gradients_of_two_ranks(kind: str) -> None:
    """Both ranks have the numbers of one process with all data."""
    first, second = run_ranks(sparse_on_this_rank, kind, timeout_seconds=120)
    assert first == second
    expected, counts = table_by_hand()
    check(first[0], expected)
    assert first[1] == counts


@pytest.mark.slow
def test_resumed_between_two_looks(tmp_path: Path) -> None:
    """A logger reads the same after a resume as in a run that did not break off."""

    def job(directory: Path | None) -> tuple[Trainer, list[Any]]:
        trainer, read = make(net()), []
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: read.append(dict(trainer.state.metrics)))
        if directory is not None:
            Checkpoint(directory, every=1, asynchronous=False).attach(trainer)
        GradientMonitor(EVERY).attach(trainer)
        return trainer, read

    whole, expected = job(None)
    whole.run(DATA, max_epochs=1)
    trainer, before = job(tmp_path)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=4), lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(DATA, max_epochs=1)
    trainer, after = job(tmp_path)
    trainer.run(DATA, max_epochs=1, resume="must")
    assert [*before, *after] == expected
    assert after[0] != {}


MISTAKES: dict[str, Mistake] = {
    "every": (ValueError, "every must be at least 1", lambda: GradientMonitor(0)),
    "depth": (TypeError, "depth must be a positive integer", lambda: GradientMonitor(depth=1.5)),  # type: ignore[arg-type]
    "trainer": (TypeError, "trainer must be a Trainer", lambda: GradientMonitor().attach(net())),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes(name: str) -> None:
    """Each is answered in one line."""
    assert_one_line(MISTAKES[name])
