"""The curvature is that of torch's own eigenvalues of the whole Hessian, and looking at it changes nothing."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from bits import bit_by_bit
from ignite_train import ForwardOutput, UpdateOptions, create_trainer
from ignite_train.handlers import CurvatureMonitor
from ignite_train.metrics import grouped_metric
from ranks import run_ranks

SIZES = (5, 3, 6, 2)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 3, generator=generator, dtype=torch.float64), torch.randint(4, (size,), generator=generator))
        for size in SIZES
    ]


def net(*more: nn.Module) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), *more, nn.Linear(4, 4)).double()


def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
    x, y = micro_batch
    return ForwardOutput(cross_entropy(model(x), y, reduction="sum"), len(y))


def hessian(model: nn.Module, block: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Of the mean loss, by the parameters of `block`, row by row."""
    parameters = list(block.parameters())
    gradients = torch.autograd.grad(cross_entropy(model(x), y), parameters, create_graph=True)
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    rows = [torch.autograd.grad(element, parameters, retain_graph=True) for element in flat]
    return torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in rows])


def largest(matrix: Tensor) -> float:
    values = torch.linalg.eigvalsh(matrix)
    return float(values[values.abs().argmax()])


def curvature(model: nn.Module, data: Any, **options: Any) -> dict[str, float]:
    wrapped = DistributedDataParallel(model) if idist.get_world_size() > 1 else model
    trainer = create_trainer(wrapped, torch.optim.SGD(model.parameters(), lr=0.1), forward, accumulation_steps=2)
    CurvatureMonitor(forward, every=2, tolerance=1e-5, max_iterations=2000, **options).attach(trainer)
    metrics = trainer.run(data).metrics
    return {name: value for name, value in metrics.items() if name.startswith("curvature/")}


@pytest.mark.slow
def test_it_is_that_of_the_whole_hessian() -> None:
    """Of the model and of each layer, over both micro-batches of the last update, at the weights after it."""
    model = net()
    blocks = nn.ModuleDict({"all": model, "first": model[0], "last": model[2]})
    found = curvature(model, batches(), blocks=blocks)
    x, y = (torch.cat(parts) for parts in zip(*batches()[2:], strict=True))
    expected = {f"curvature/{name}": largest(hessian(model, block, x, y)) for name, block in blocks.items()}
    assert found == pytest.approx(expected, rel=1e-7)
    assert len({round(value, 3) for value in found.values()}) == 3


def test_a_negative_one_has_its_sign() -> None:
    """Of the loss -3w² + v² it is -6; of a linear loss 0; a NaN is not published."""
    for factor, expected in ((-3.0, {"curvature/model": -6.0}), (0.0, {"curvature/model": 2.0}), (float("inf"), {})):
        weights = nn.ParameterList([nn.Parameter(torch.tensor([0.5, 0.5]))])

        def bent(weights: Any, size: float, factor: float = factor) -> Tensor:
            return factor * weights[0][0] ** 2 + weights[0][1] ** 2

        model: nn.Module = weights
        options = UpdateOptions(on_nonfinite="skip")
        trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), bent, options=options)
        CurvatureMonitor(bent, every=1, tolerance=1e-4).attach(trainer)
        assert trainer.run([1.0]).metrics == pytest.approx(expected, rel=1e-6)
    linear = nn.Linear(2, 1)
    trainer = create_trainer(linear, torch.optim.SGD(linear.parameters(), lr=0.1), lambda model, x: model(x).sum())
    CurvatureMonitor(lambda model, x: model(x).sum(), every=1).attach(trainer)
    assert trainer.run([torch.ones(1, 2)]).metrics == {"curvature/model": 0.0}


def test_parameters_on_which_the_loss_is_linear_or_does_not_depend() -> None:
    """Their rows of the Hessian are zero."""

    def bent(weights: Any, _: Any) -> Tensor:
        return 2.0 * weights[0] ** 2 + 5.0 * weights[1]

    model: nn.Module = nn.ParameterList([nn.Parameter(torch.tensor(0.5)) for _ in range(3)])
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), bent)
    CurvatureMonitor(bent, every=1).attach(trainer)
    assert trainer.run([1.0]).metrics == {"curvature/model": pytest.approx(4.0)}


def of_two_weights(**options: Any) -> float:
    """What is published for the second derivatives 4 and 3."""

    def bent(weights: Any, _: Any) -> Tensor:
        return 2.0 * weights[0][0] ** 2 + 1.5 * weights[0][1] ** 2

    model: nn.Module = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.float64))])
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), bent)
    CurvatureMonitor(bent, every=1, **options).attach(trainer)
    return float(trainer.run([1.0]).metrics["curvature/model"])


def tangent(published: float) -> float:
    """Of the angle between the first axis and v, where this is 4 cos² + 3 sin²; each step of the iteration makes it 3/4."""
    return math.sqrt((4.0 - published) / (published - 3.0))


def error(tangent: float) -> float:
    """The length of Hv - λv by λ, for v of length 1."""
    return tangent / (4.0 + 3.0 * tangent**2)


@pytest.mark.parametrize("tolerance", [0.03, 0.01, 1e-3])
def test_it_ends_as_soon_as_the_tolerance_is_met(tolerance: float) -> None:
    """The error is within it, and in the step before it was not."""
    last = tangent(of_two_weights(tolerance=tolerance))
    assert error(last) <= tolerance < error(last * 4 / 3)


def test_it_ends_after_so_many_iterations() -> None:
    """Each makes one step of the iteration, from the same v; another seed has another."""
    found = [tangent(of_two_weights(tolerance=1e-9, max_iterations=number)) for number in (1, 2, 3)]
    assert found == pytest.approx([found[0], found[0] * 0.75, found[0] * 0.75**2])
    assert of_two_weights(max_iterations=1, seed=1) != pytest.approx(of_two_weights(max_iterations=1))


def test_loggers_show_it_with_the_layers() -> None:
    """Also one that was attached before it, at the same event."""
    model, seen = net(), []
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=2), lambda: seen.extend(trainer.state.metrics))
    CurvatureMonitor(forward, every=2, max_iterations=1).attach(trainer)
    trainer.run(batches()[:2])
    assert seen == ["curvature/model"]
    assert grouped_metric(seen[0]) == "layers/curvature/model"


def test_an_update_without_samples_has_none() -> None:
    """Also what was published before is gone."""
    model, seen = net(), []
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), masked)
    CurvatureMonitor(masked, every=1, max_iterations=1).attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append("curvature/model" in trainer.state.metrics))
    (x, y), second, *_ = batches()
    trainer.run([(x, y), (x, y - 4), second])
    assert seen == [True, False, True]


def both(model: nn.Module, micro_batch: Any) -> ForwardOutput:
    """Two terms, whose denominators have another ratio in each micro-batch."""
    x, y = micro_batch
    own = cross_entropy(model(x), y, reduction="sum")
    return ForwardOutput({"own": (own, len(y)), "norm": (model(x).square().sum(), len(y) ** 2)})


def test_each_term_of_a_loss_has_its_own_denominator() -> None:
    """Over all micro-batches of the update: the loss of the Hessian is the loss of the update."""
    model, data = net(), batches()[:2]
    options = UpdateOptions(sample_sizes=lambda pair: {"own": len(pair[1]), "norm": len(pair[1]) ** 2})
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), both, accumulation_steps=2, options=options)
    CurvatureMonitor(both, every=1, tolerance=1e-6, max_iterations=2000).attach(trainer)
    found = trainer.run(data).metrics["curvature/model"]
    names, shapes = zip(*((name, value.shape) for name, value in model.named_parameters()), strict=True)

    def loss(flat: Tensor) -> Tensor:
        parts = torch.split(flat, [shape.numel() for shape in shapes])
        weights = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        outputs = [torch.func.functional_call(model, weights, (x,)) for x, _ in data]
        own = sum(cross_entropy(output, y, reduction="sum") for output, (_, y) in zip(outputs, data, strict=True))
        norm = sum(output.square().sum() for output in outputs)
        return own / sum(SIZES[:2]) + norm / sum(size**2 for size in SIZES[:2])

    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    assert found == pytest.approx(largest(torch.autograd.functional.hessian(loss, flat)), rel=1e-7)


def test_an_update_with_a_name_is_left_out() -> None:
    """Its forward may be another one, for which its micro-batches are made. What was published before is gone."""
    model = net()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward)
    CurvatureMonitor(forward, every=1, max_iterations=1).attach(trainer)
    with trainer.session():
        trainer.update(batches()[:1])
        assert "curvature/model" in trainer.state.metrics
        trainer.update([torch.ones(2, 3).double()], forward=lambda model, x: model(x).square().mean(), name="penalty")
        assert "curvature/model" not in trainer.state.metrics


def masked(model: nn.Module, micro_batch: Any) -> ForwardOutput:
    """Labels below 0 do not count."""
    x, y = micro_batch
    return ForwardOutput(cross_entropy(model(x), y.clamp(min=-1), reduction="sum", ignore_index=-1), int((y >= 0).sum()))


def normalised(beside: nn.Module, model: nn.Module, micro_batch: Any) -> ForwardOutput:
    x, y = micro_batch
    return forward(model, (beside(x), y))


def test_it_leaves_no_trace() -> None:
    """Dropout and BatchNorm: parameters, buffers and random state are those of a run without it, also beside the model."""
    ends = []
    for looks in (False, True):
        torch.manual_seed(3)
        model, beside = net(nn.BatchNorm1d(4), nn.Dropout(0.5)), nn.BatchNorm1d(3).double()

        use = partial(normalised, beside)
        trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), use)
        if looks:
            CurvatureMonitor(use, every=2, max_iterations=3).attach(trainer)
        state = trainer.run(batches(), max_epochs=2)
        assert ("curvature/model" in state.metrics) == looks
        assert state.micro_batch_in_group is None
        ends.append(bit_by_bit([dict(model.state_dict()), dict(beside.state_dict()), torch.get_rng_state()]))
    assert ends[0] == ends[1]


def on_two_ranks() -> tuple[dict[str, float], dict[str, float]]:
    model, data = net(), batches()
    blocks = {"all": model, "first": model[0], "last": model[2]}
    mine = data[:1] if idist.get_rank() == 0 else data[1:]
    found = curvature(model, mine, blocks=blocks)
    x, y = data[3]  # rank 0 has nothing for the second update
    return found, {f"curvature/{name}": largest(hessian(model, block, x, y)) for name, block in blocks.items()}


@pytest.mark.slow
def test_two_ranks_see_one_loss() -> None:
    """Rank 0 has one micro-batch and rank 1 three, two to an update: in the second update rank 0 has none, and agrees."""
    first, second = run_ranks(on_two_ranks)
    assert first == second
    assert first[0] == pytest.approx(first[1], rel=1e-7)
    assert len(first[1]) == 3


def with_halves() -> tuple[dict[str, float], dict[str, float]]:
    """Both ranks have samples of the update that is looked at."""
    model, data = net(), batches()
    blocks = {"first": model[0], "last": model[2]}
    found = curvature(model, data[idist.get_rank() :: 2] * 2, blocks=blocks)
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    return found, {f"curvature/{name}": largest(hessian(model, block, x, y)) for name, block in blocks.items()}


@pytest.mark.slow
def test_two_ranks_share_the_samples() -> None:
    """Of unequal sizes, 11 on rank 0 and 5 on rank 1: the loss is the mean over all of them, for each block."""
    first, second = run_ranks(with_halves)
    assert first == second
    assert first[0] == pytest.approx(first[1], rel=1e-7)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"forward": None}, TypeError, "forward must be the function"),
        ({"every": 0}, ValueError, "every"),
        ({"tolerance": 1.5}, ValueError, "tolerance must be below 1, got 1.5"),
        ({"tolerance": 1}, ValueError, "tolerance must be below 1, got 1"),
        ({"blocks": {"a": 1}}, TypeError, r"blocks\['a'\] must be a torch.nn.Module"),
        ({"blocks": {"a": nn.Tanh()}}, ValueError, r"blocks\['a'\] must have parameters, and has none"),
        ({"blocks": [nn.Tanh()]}, TypeError, "blocks must be modules by name, got .*; leave it out for the whole model"),
        ({"blocks": {}}, TypeError, "blocks must be modules by name, got {}"),
        ({"seed": None}, TypeError, "seed must be a number, got None"),
    ],
    ids=["forward", "every", "tolerance", "tolerance-1", "not-a-module", "no-parameters", "list", "none", "seed"],
)
def test_mistakes(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """One line says which argument."""
    with pytest.raises(error, match=message):
        CurvatureMonitor(**{"forward": forward, **options})


def test_a_block_of_another_model_is_refused() -> None:
    """Its loss would not depend on it, and the curvature would be 0."""
    model = net()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward)
    with pytest.raises(ValueError, match=r"blocks\['last'\] must be a module of the trainer's model, got another one"):
        CurvatureMonitor(forward, blocks={"last": net()[2]}).attach(trainer)


@pytest.mark.parametrize("whole", [True, False], ids=["model", "block"])
def test_sparse_gradients_are_refused(whole: bool) -> None:
    """Torch cannot differentiate them twice; a block of dense parameters is taken."""
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 4))

    def looked_up(model: nn.Module, rows: Tensor) -> ForwardOutput:
        return ForwardOutput(model(rows).square().sum(), len(rows))

    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), looked_up)
    with pytest.raises(
        ValueError, match=r"blocks must have dense gradients, got '0.weight' of an embedding with sparse=True; "
    ) as error:
        CurvatureMonitor(looked_up, blocks=None if whole else {"table": model[0]}).attach(trainer)
    assert "\n" not in str(error.value)
    CurvatureMonitor(looked_up, every=1, blocks={"last": model[1]}).attach(trainer)
    assert trainer.run([torch.tensor([0, 2, 2])]).metrics["curvature/last"] > 0


def test_a_forward_that_writes_into_its_micro_batch_is_refused() -> None:
    """Each product would be that of other values."""

    def writing(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        x, y = micro_batch
        return forward(model, (x.mul_(0.5), y))

    model = net()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), writing)
    CurvatureMonitor(writing, every=2).attach(trainer)
    with pytest.raises(ValueError, match=r"CurvatureMonitor runs forward .* again, and forward has written into its tensors"):
        trainer.run(batches(), max_epochs=1)
    assert trainer.state.iteration == 2


def test_it_follows_what_is_frozen_and_thawed_in_the_run() -> None:
    """The figure is that of the parameters that require a gradient in that update; without any there is none."""
    model, data, seen = net(), batches(), []
    model[0].requires_grad_(False)
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward)
    blocks = {"all": model, "first": model[0]}
    CurvatureMonitor(forward, every=1, blocks=blocks, tolerance=1e-5, max_iterations=2000).attach(trainer)

    @trainer.on(Events.ITERATION_STARTED)
    def thaw_and_freeze() -> None:
        model[0].requires_grad_(trainer.state.iteration == 2)

    @trainer.on(Events.ITERATION_COMPLETED)
    def compare() -> None:
        found = {name: value for name, value in trainer.state.metrics.items() if name.startswith("curvature/")}
        (batch,) = trainer.state.batch
        trained = {"all": model, "first": model[0]} if trainer.state.iteration == 2 else {"all": model[2]}
        expected = {f"curvature/{name}": largest(hessian(model, block, *batch)) for name, block in trained.items()}
        assert found == pytest.approx(expected, rel=1e-7)
        seen.append(len(found))

    trainer.run(data[:3])
    assert seen == [1, 2, 1]


@pytest.mark.parametrize("mode", ["skip", "split"])
def test_a_micro_batch_that_does_not_fit_costs_the_value_and_not_the_run(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The last one is cut beforehand in the update that splits, which does not run out of memory then."""
    model, seen = net(), []

    def narrow(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        if len(micro_batch[1]) == max(SIZES):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return forward(model, micro_batch)

    options = UpdateOptions(on_out_of_memory=mode)
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), narrow, accumulation_steps=2, options=options)
    CurvatureMonitor(narrow, every=1, max_iterations=1).attach(trainer)

    @trainer.on(Events.ITERATION_COMPLETED)
    def note() -> None:
        output = trainer.state.update_output
        assert output is not None
        seen.append((output.num_out_of_memory, "curvature/model" in trainer.state.metrics))

    trainer.run(batches(), max_epochs=2)
    assert seen == [(0, True), (1, False), (0, True), (int(mode == "skip"), False)]
    assert len([line for line in caplog.messages if line.startswith("CurvatureMonitor leaves out its value after")]) == 1


def test_on_several_ranks_lack_of_memory_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may wait in a collective of forward, which this rank would not join."""
    model = nn.Linear(3, 1)

    def narrow(model: nn.Module, x: Tensor) -> Tensor:
        if trainer.state.micro_batch_in_group is not None and trainer.state.update_output is not None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return model(x).square().mean()

    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), narrow)
    CurvatureMonitor(narrow, every=1).attach(trainer)
    monkeypatch.setattr("ignite_train.handlers.curvature_monitor.collectives", SimpleNamespace(world_size=lambda: 2))
    with pytest.raises(torch.OutOfMemoryError):
        trainer.run([torch.ones(2, 3)])


def test_complex_parameters_are_refused() -> None:
    """When it is attached: the power iteration is over real numbers. A block of real ones is taken."""
    model = nn.ModuleDict({"real": nn.Linear(3, 2), "complex": nn.Linear(2, 1, dtype=torch.complex64)})

    def magnitude(model: Any, x: Tensor) -> Tensor:
        return model["complex"](model["real"](x).to(torch.complex64)).abs().square().mean()

    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), magnitude)
    with pytest.raises(ValueError, match=r"blocks must have real parameters, got 'complex.weight' of torch.complex64; "):
        CurvatureMonitor(magnitude).attach(trainer)
    CurvatureMonitor(magnitude, every=1, blocks={"real": model["real"]}).attach(trainer)
    assert trainer.run([torch.ones(2, 3)]).metrics["curvature/real"] > 0
