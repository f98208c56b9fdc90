"""Handlers and rarer options on any device: each training is made on the CPU and on the device, and the numbers are compared.

Without an accelerator each training is made twice on the CPU. The update itself is in test_accelerator.py.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Accuracy, ConfusionMatrix, Loss, RunningAverage
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, TensorDataset

from bits import bit_by_bit
from devices import devices
from ignite_train import (
    ForwardOutput,
    Mean,
    Trainer,
    TrainEvents,
    attach_defaults,
    attach_metric,
    check_forward,
    create_evaluator,
    create_supervised_trainer,
    create_trainer,
    keep_outputs,
    tune,
)
from ignite_train.device.streams import has_streams
from ignite_train.handlers import (
    Checkpoint,
    CurvatureMonitor,
    EarlyStopping,
    EmptyCache,
    Freeze,
    GarbageCollection,
    GradientMonitor,
    GradNormConsistency,
    HangWatch,
    LearningRateFinder,
    LearningRateSchedule,
    LossScaleLogger,
    MinLearningRate,
    ModelEMA,
    ModelSync,
    MomentumTeacher,
    OptimizerModes,
    OuterOptimizer,
    Profiler,
    ReduceOnPlateau,
    SeveralGradients,
    StateConsistency,
    StepTimer,
    StochasticWeightAveraging,
    StopOnSignal,
    TimeLimit,
    TrainingMetrics,
    Validation,
    predict,
)
from ignite_train.metrics import TIMED_METRICS
from ignite_train.model.random_state import RandomState
from schedule_free import ScheduleFreeSGD
from update_options import with_options

Batch = tuple[Tensor, Tensor]

CPU = torch.device("cpu")
WIDTH, CLASSES, STEPS, UPDATES = 16, 5, 2, 8


# On the simulated accelerator of `make simulated-accelerator` torch's BatchNorm never writes its running statistics.
NORM = nn.LayerNorm if any(device.type == "mcpu" for device in devices()) else nn.BatchNorm1d


def make_model(device: torch.device, *, dropout: float = 0.0) -> nn.Sequential:
    """Two layers with a norm between them, which have the same weights on each device.

    The first has no bias, whose gradient would be rounding alone, of which Adam would make steps as large as any.
    """
    torch.manual_seed(0)
    layers = (
        nn.Linear(WIDTH, WIDTH, bias=False),
        NORM(WIDTH),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(WIDTH, CLASSES),
    )
    return nn.Sequential(*layers).to(device)


def batches(number: int = STEPS * UPDATES, seed: int = 1) -> list[Batch]:
    """Micro-batches of 6 to 8 samples in the host's memory, whose labels can be learned."""
    generator = torch.Generator().manual_seed(seed)
    xs = [torch.randn(6 + index % 3, WIDTH, generator=generator) for index in range(number)]
    return [(x, x[:, :CLASSES].argmax(1)) for x in xs]


def forward(model: nn.Module, batch: Batch) -> ForwardOutput:
    """The sum of the losses, logs of each kind, and predictions."""
    x, y = batch
    logits = model(x)
    right, loss = (logits.argmax(1) == y).sum(), cross_entropy(logits, y, reduction="sum")
    logs = {"right": right, "largest": Mean(logits.abs().max()), "of_two": (x[:, 0].sum(), 2.0), "rows": len(y)}
    return ForwardOutput(loss, len(y), logs, outputs=(logits, y))


def journal_of(trainer: Trainer) -> list[list[float]]:
    """Grows by the numbers of each update."""
    journal: list[list[float]] = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def note() -> None:
        output = trainer.state.update_output
        assert output is not None
        rates = [float(rate) for rate in output.learning_rates]
        journal.append([output.loss, output.grad_norm, output.sample_size, *rates, *output.logs.values()])

    return journal


def untimed(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics that two runs with the same bits have in common."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if name.rpartition("/")[2] not in TIMED_METRICS and "memory" not in name
    }


def state_of(*holders: Any) -> list[Any]:
    """Copies of the states of modules, optimizers and handlers, as they are now."""
    return [
        pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, one.state_dict()) for one in holders
    ]


def beside_the_cpu(device: torch.device, train: Callable[[torch.device], Any], rtol: float = 1e-4, atol: float = 1e-5) -> Any:
    """Compares all that a training gives on `device` with what it gives on the CPU, and returns the former.

    Tensors and floats may differ by rounding; everything else must be equal.
    """
    expected, found = train(CPU), train(device)
    (wanted, shape), (leaves, own_shape) = pytree.tree_flatten(expected), pytree.tree_flatten(found)
    assert own_shape == shape
    for mine, other in zip(leaves, wanted, strict=True):
        if isinstance(mine, Tensor):
            torch.testing.assert_close(mine.detach().cpu(), other.detach(), rtol=rtol, atol=atol, equal_nan=True)
        elif isinstance(mine, float):
            assert mine == pytest.approx(other, rel=rtol, abs=atol, nan_ok=True)
        else:
            assert mine == other
    return found


def assert_on(device: torch.device, tensors: Any) -> None:
    """Asserts that each of them is there; of a state, its tensors with more than one element, since counters may be apart."""
    found = [leaf for leaf in pytree.tree_leaves(tensors) if isinstance(leaf, Tensor) and leaf.numel() > 1]
    assert found
    assert {leaf.device for leaf in found} == {device}


def fresh(directory: Path) -> Path:
    """A directory in it that no run has written to."""
    return Path(tempfile.mkdtemp(dir=directory))


# --- handlers that look inside ----------------------------------------------------------------------------------------------


def test_curvature(device: torch.device) -> None:
    """The largest eigenvalue of 2 XᵀX / n, beside torch's own solver in float64; and the curvature of a block of a model."""

    def squares(model: nn.Module, batch: Batch) -> ForwardOutput:
        return ForwardOutput(model(batch[0]).square().sum(), len(batch[1]))

    def train(place: torch.device) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(WIDTH, 1, bias=False).to(place)
        trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=1e-3), squares, accumulation_steps=STEPS)
        CurvatureMonitor(squares, every=4, tolerance=1e-3, max_iterations=1000).attach(trainer)
        own = dict(trainer.run(batches(), max_epochs=1).metrics)
        net = make_model(place)
        trainer = create_trainer(net, torch.optim.SGD(net.parameters(), lr=1e-2), forward, accumulation_steps=STEPS)
        CurvatureMonitor(forward, every=2, blocks={"last": net[4]}, tolerance=1e-3).attach(trainer)
        return own, dict(trainer.run(batches(), max_iters=4).metrics), net.state_dict()

    own, last, _ = beside_the_cpu(device, train, rtol=2e-2)
    x = torch.cat([x for x, _ in batches()[-STEPS:]]).double()
    assert own["curvature/model"] == pytest.approx(float(torch.linalg.eigvalsh(2 * x.T @ x / len(x))[-1]), rel=1e-2)
    assert last["curvature/last"] > 0


def test_norms_of_layers_and_checks_of_the_state(device: torch.device) -> None:
    """Norms, ratios, dead layers and histograms, with a part that thaws in the middle, and the handlers that compare ranks."""

    def train(place: torch.device) -> Any:
        model = make_model(place)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        trainer = create_trainer(model, optimizer, forward, accumulation_steps=STEPS, max_grad_norm=0.5)
        journal, monitor = journal_of(trainer), GradientMonitor(every=2, with_histograms=True)
        monitor.attach(trainer)
        Freeze(model[0], until=3).attach(trainer)
        GradNormConsistency().attach(trainer)
        StateConsistency(model, optimizer).attach(trainer, Events.ITERATION_COMPLETED(every=2))
        TrainingMetrics().attach(trainer, Events.ITERATION_COMPLETED(every=3))
        LossScaleLogger().attach(trainer)
        seen, first = [], model[0].weight.detach().clone()

        @trainer.on(Events.ITERATION_COMPLETED)
        def note() -> None:
            still = bool(torch.equal(model[0].weight, first))
            seen.append([untimed(trainer.state.metrics), list(monitor.dead), still])

        trainer.run(batches(), max_epochs=1)
        counted = {name: sum(one.counts) for name, one in monitor.histograms.items()}
        return journal, seen, counted, list(model.parameters())

    _, seen, counted, _ = beside_the_cpu(device, train, rtol=1e-3)
    assert [still for _, _, still in seen] == [True] * 3 + [False] * 5
    assert ["0" in dead for _, dead, _ in seen][1::2] == [True, False, False, False]
    assert counted["weight/0"] == WIDTH * WIDTH


def test_several_gradients_and_losses_with_denominators(device: torch.device) -> None:
    """PCGrad of two terms whose samples are counted beforehand; without the handler the sum of the terms."""

    def sizes(batch: Batch) -> dict[str, float]:
        return {"labels": len(batch[1]), "first": int((batch[1] == 0).sum())}

    def terms(model: nn.Module, batch: Batch) -> ForwardOutput:
        logits, first = model(batch[0]), batch[1] == 0
        apart = (logits[:, 0].tanh() * first).square().sum() - (logits[:, 1] * first).sum()
        return ForwardOutput(
            {"labels": (cross_entropy(logits, batch[1], reduction="sum"), len(first)), "first": (apart, first.sum())}
        )

    def project(gradients: Mapping[str, Tensor]) -> Tensor:
        one, other = gradients.values()
        product = one.dot(other)
        shared = one - product / other.square().sum() * other + other - product / one.square().sum() * one
        return torch.where(product >= 0, one + other, shared)

    def train(place: torch.device, *, projects: bool) -> Any:
        model = make_model(place)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        arguments = with_options(accumulation_steps=STEPS, max_grad_norm=1.0, sample_sizes=sizes)
        trainer = create_trainer(model, optimizer, terms, **arguments)
        journal, losses = journal_of(trainer), []
        if projects:
            SeveralGradients(project).attach(trainer)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.update_output.losses))
        trainer.run(batches(), max_epochs=1)
        return journal, losses, list(model.parameters())

    projected = beside_the_cpu(device, lambda place: train(place, projects=True), rtol=1e-3)
    summed = beside_the_cpu(device, lambda place: train(place, projects=False), rtol=1e-3)
    assert set(projected[1][0]) == {"labels", "first"}
    assert projected[0][-1][0] != pytest.approx(summed[0][-1][0], rel=1e-3)


# --- averages, other optimizers, evaluation ---------------------------------------------------------------------------------


def test_averages_and_teachers(device: torch.device, tmp_path: Path) -> None:
    """EMA on the device and on the host, SWA, a teacher with a schedule, evaluations of an average, and its checkpoint."""

    def train(place: torch.device, directory: Path) -> Any:
        model = make_model(place)
        teacher = copy.deepcopy(model).eval()

        def distill(model: nn.Module, batch: Batch) -> ForwardOutput:
            with torch.no_grad():
                target = teacher(batch[0])
            return ForwardOutput(forward(model, batch).loss + (model(batch[0]) - target).square().sum(), len(batch[1]))

        trainer = create_trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), distill, accumulation_steps=STEPS)
        ema, on_host, swa = ModelEMA(0.9), ModelEMA(0.9, device="cpu"), StochasticWeightAveraging(start=UPDATES)
        averaged, scores = create_evaluator(model, forward), []
        for handler in (ema, on_host, swa, MomentumTeacher(teacher, model, lambda state: 0.9 + 0.1 * state.progress)):
            handler.attach(trainer)
        ema.use_in(averaged)
        validation = Validation(averaged, batches(3, seed=2))
        validation.attach(trainer)
        averaged.add_event_handler(Events.COMPLETED, lambda: scores.append(untimed(averaged.state.metrics)))
        Checkpoint(directory, every_epochs=1, score="loss").attach(trainer, evaluator=averaged)
        trainer.run(batches(), max_epochs=3)
        own = bit_by_bit(model.state_dict())
        with swa.swapped_in():
            mean = state_of(model)
        assert bit_by_bit(model.state_dict()) == own
        averages, host_averages = ema.state_dict()["model"], on_host._averages
        assert_on(place, [averages, mean, teacher.state_dict()])
        assert_on(CPU, host_averages)
        for name, average in host_averages.items():
            torch.testing.assert_close(average, averages[name].cpu(), rtol=1e-5, atol=1e-6)
        states = [teacher.state_dict(), averages, *mean]
        return states, scores, validation.best, swa.num_updates, (ema.num_updates, on_host.num_updates)

    found = beside_the_cpu(device, lambda place: train(place, fresh(tmp_path)), rtol=1e-3, atol=1e-4)
    assert found[3:] == (3, (3 * UPDATES,) * 2)


def test_modes_of_an_optimizer_and_a_plateau(device: torch.device) -> None:
    """Evaluations at the mean leave no trace in training; a rate that is far too high is divided, and then the run ends."""

    def train(place: torch.device, *, evaluates: bool) -> Any:
        model = make_model(place)
        optimizer = ScheduleFreeSGD(model.parameters(), lr=0.1)
        trainer, scores = create_trainer(model, optimizer, forward, accumulation_steps=STEPS), []
        evaluator = create_evaluator(model, forward)
        OptimizerModes(optimizer).attach(trainer, evaluator=evaluator)
        evaluator.add_event_handler(Events.COMPLETED, lambda: scores.append(untimed(evaluator.state.metrics)))
        if evaluates:
            Validation(evaluator, batches(3, seed=2)).attach(trainer, Events.ITERATION_COMPLETED(every=3))
        journal = journal_of(trainer)
        trainer.run(batches(), max_epochs=2)
        return journal, list(model.parameters()), scores

    def plateau(place: torch.device) -> Any:
        model = nn.Linear(WIDTH, 1).to(place)
        nn.init.constant_(model.weight, 0.5)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def squares(model: nn.Module, batch: Batch) -> ForwardOutput:
            return ForwardOutput(model(batch[0]).square().sum(), len(batch[1]))

        trainer, evaluator = create_trainer(model, optimizer, squares), create_evaluator(model, squares)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=0)
        stopping, validation = EarlyStopping(evaluator, patience=2), Validation(evaluator, batches(3, seed=2))
        ReduceOnPlateau(evaluator, scheduler).attach(trainer)
        stopping.attach(trainer)
        ModelSync().attach(trainer, evaluator=evaluator)
        validation.attach(trainer, Events.ITERATION_COMPLETED)
        trainer.run(batches(12), max_epochs=1)
        return trainer.state.iteration, validation.best, stopping.num_bad, optimizer.param_groups[0]["lr"], model.weight

    *trained, scores = beside_the_cpu(device, lambda place: train(place, evaluates=True))
    assert len(scores) == 2 * UPDATES // 3
    assert bit_by_bit(train(device, evaluates=False)[:2]) == bit_by_bit(trained)
    assert beside_the_cpu(device, plateau, rtol=1e-3)[3] < 1.0


def test_evaluations_predictions_and_metrics(device: torch.device) -> None:
    """Ignite's metrics on the host and on the device, in training and in an evaluation; predictions in order; kept outputs."""
    held_out = TensorDataset(*map(torch.cat, zip(*batches(5, seed=2), strict=True)))

    def train(place: torch.device) -> Any:
        model = make_model(place)
        trainer = create_trainer(model, torch.optim.Adam(model.parameters(), lr=1e-2), forward, accumulation_steps=STEPS)
        evaluator, kept = create_evaluator(model, forward), keep_outputs(trainer)
        for name, where in (("host", None), ("device", place)):
            chosen = {} if where is None else {"device": where}
            attach_metric(trainer, Accuracy(**chosen), f"accuracy_on_{name}")
            Accuracy(**chosen).attach(evaluator, f"accuracy_on_{name}")
            Loss(cross_entropy, **chosen).attach(evaluator, f"loss_on_{name}")
            ConfusionMatrix(CLASSES, **chosen).attach(evaluator, f"matrix_on_{name}")
        RunningAverage(output_transform=lambda output: output.loss).attach(trainer, "running")
        Validation(evaluator, DataLoader(held_out, 8)).attach(trainer)
        trainer.run(batches(), max_epochs=2)
        assert_on(place, kept())
        evaluated = evaluator.run(DataLoader(held_out, 8)).metrics
        assert evaluated["loss"] == pytest.approx(evaluated["loss_on_host"], rel=1e-5)
        rows = predict(evaluator, DataLoader(held_out, 8, shuffle=True, generator=torch.Generator().manual_seed(0)))
        assert_on(CPU, rows)
        matrices = [evaluated.pop(f"matrix_on_{name}") for name in ("host", "device")]
        return kept(), kept(gathered=True), untimed(trainer.state.metrics), untimed(evaluated), matrices, rows

    *_, rows = beside_the_cpu(device, train, rtol=1e-3, atol=1e-4)
    assert torch.equal(rows[1], held_out.tensors[1])


# --- the update -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closure", [True, "replay", "sam"])
def test_optimizers_with_a_closure(device: torch.device, closure: Any) -> None:
    """LBFGS with a line search, and SAM, of groups with BatchNorm in them."""

    class Sam(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            """Steps along the gradient of a place that is a little higher."""
            parameters = self.param_groups[0]["params"]
            loss = closure()
            moves = [0.05 * p.grad / p.grad.norm() for p in parameters]
            torch._foreach_add_(parameters, moves)
            torch.enable_grad()(closure)()
            torch._foreach_sub_(parameters, moves)
            super().step()
            return loss

    def train(place: torch.device) -> Any:
        model = make_model(place)
        optimizer = (
            Sam(model.parameters(), lr=0.1)
            if closure == "sam"
            else torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")
        )
        arguments = with_options(accumulation_steps=STEPS, closure=True if closure == "sam" else closure)
        trainer, evaluations = create_trainer(model, optimizer, forward, **arguments), []
        journal = journal_of(trainer)
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda: evaluations.append(trainer.state.update_output.num_evaluations)
        )
        trainer.run(batches(), max_iters=4)
        return journal, evaluations, model.state_dict()

    _, evaluations, _ = beside_the_cpu(device, train, rtol=2e-3, atol=1e-3)
    assert min(evaluations) > 1


OPTIONS: dict[str, dict[str, Any]] = {
    "kept gradients": {"keep_gradients": True, "max_grad_norm": 0.5},
    "sums": {"normalize": False, "max_grad_norm": 0.5},
    "graphs": {"create_graph": True},
    "a schedule of accumulation": {"accumulation_steps": lambda number: 1 + number % 3},
    "each its own limit": {"max_grad_norm": {"body": 0.2, "head": 0.1}, "several": True},
    "several optimizers": {"max_grad_norm": 0.5, "several": True, "keep_gradients": True},
    "no fast ways": {"fast": False, "max_grad_norm": 0.5},
    "last group left out": {"drop_last_group": True, "accumulation_steps": 3},
    "modes left alone": {"train_mode": False},
}


def optimizers_of(model: nn.Sequential, *, several: bool) -> Any:
    """Makes a fused optimizer, or two of different kinds."""
    if not several:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    body = [*model[0].parameters(), *model[1].parameters()]
    return {"body": torch.optim.SGD(body, lr=0.1, momentum=0.9, fused=True), "head": torch.optim.Adagrad(model[4].parameters())}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option(device: torch.device, name: str) -> None:
    """Losses, norms, logs, gradients that handlers read, and parameters; with the fast ways the numbers are the same."""

    def train(place: torch.device, **changed: Any) -> Any:
        options = {"accumulation_steps": STEPS, **OPTIONS[name], **changed}
        model = make_model(place).eval() if name == "modes left alone" else make_model(place)
        optimizers = optimizers_of(model, several=options.pop("several", False))
        trainer = create_trainer(model, optimizers, forward, **with_options(**options))
        journal, gradients = journal_of(trainer), []

        @trainer.on(TrainEvents.GRADIENTS_READY)
        def note() -> None:
            gradients.append({key: gradient.detach().clone() for key, gradient in trainer.gradients().items()})

        kept: list[Any] = []
        if options.get("keep_gradients"):
            copy_gradients = lambda: kept.append([p.grad.clone() for p in model.parameters()])  # noqa: E731
            trainer.add_event_handler(Events.ITERATION_COMPLETED, copy_gradients)
        trainer.run(batches(), max_epochs=1)
        output = trainer.state.update_output
        norms = [dict(output.grad_norms), dict(output.clip_coefficients), output.clip_coefficient]
        return journal, gradients, kept, norms, model.state_dict()

    journal, gradients, kept, *_ = beside_the_cpu(device, train, rtol=1e-3)
    assert_on(device, [gradients, kept])
    norm = torch.stack([gradient.norm() for gradient in gradients[-1].values()]).norm()
    assert journal[-1][1] == pytest.approx(float(norm), rel=1e-4)
    plain = train(device, fast=False)
    for mine, other in zip(journal, plain[0], strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("fast", [True, False])
def test_a_skipped_update_leaves_no_trace(device: torch.device, fast: bool) -> None:
    """Parameters, moments, statistics of BatchNorm, what forward carries and averages keep every bit."""

    def train(place: torch.device) -> Any:
        model = make_model(place)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

        def carrying(model: nn.Module, batch: Batch, state: Any) -> ForwardOutput:
            state.carried["mean"] = 0.5 * state.carried.get("mean", torch.zeros(WIDTH, device=place)) + batch[0].mean(0)
            return forward(model, batch)

        arguments = with_options(accumulation_steps=STEPS, on_nonfinite="skip", fast=fast, max_grad_norm=1.0)
        trainer, ema, seen, why = create_trainer(model, optimizer, carrying, **arguments), ModelEMA(0.9), [], []
        ema.attach(trainer)
        LearningRateSchedule(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)).attach(trainer)

        @trainer.on(Events.ITERATION_COMPLETED)
        def note() -> None:
            carried = trainer.state.carried["mean"]
            assert_on(place, carried)
            seen.append(bit_by_bit([*state_of(model, optimizer, ema), carried]))
            why.append(trainer.state.update_output.skipped_reason)

        data = batches()
        for index, value in ((6, torch.nan), (10, torch.inf)):
            data[index] = (torch.full_like(data[index][0], value), data[index][1])
        trainer.run(data, max_epochs=1)
        assert [seen[index] == seen[index - 1] for index in range(1, UPDATES)] == [reason is not None for reason in why[1:]]
        return why, trainer.state.num_steps, state_of(model, ema), trainer.state.carried["mean"]

    assert beside_the_cpu(device, train, rtol=1e-3)[0] == [None] * 3 + ["nonfinite", None, "nonfinite", None, None]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "SparseAdam"])
@pytest.mark.parametrize("limit", [None, 0.2])
def test_sparse_gradients(device: torch.device, kind: str, limit: float | None) -> None:
    """Of an embedding and a bag, beside a dense layer with an optimizer of its own; words repeat."""

    def words_forward(model: nn.Module, batch: Batch) -> ForwardOutput:
        table, bag, last = model.children()
        made = last(torch.cat([table(batch[0]).sum(1), bag(batch[0])], 1).tanh())
        return ForwardOutput(cross_entropy(made, batch[1], reduction="sum"), len(batch[1]))

    def train(place: torch.device) -> Any:
        torch.manual_seed(0)
        model = nn.ModuleList(
            [nn.Embedding(40, 4, sparse=True), nn.EmbeddingBag(40, 3, mode="sum", sparse=True), nn.Linear(7, CLASSES)]
        ).to(place)
        tables = [model[0].weight, model[1].weight]
        optimizers = [getattr(torch.optim, kind)(tables, lr=0.1), torch.optim.Adam(model[2].parameters(), lr=0.01)]
        arguments = with_options(accumulation_steps=STEPS, max_grad_norm=limit, on_nonfinite="skip")
        trainer = create_trainer(model, optimizers, words_forward, **arguments)
        journal = journal_of(trainer)
        generator = torch.Generator().manual_seed(3)
        draw = [
            (torch.randint(40, (7, 4), generator=generator) // 3, torch.arange(7) % CLASSES) for _ in range(STEPS * UPDATES)
        ]
        trainer.run(draw, max_epochs=1)
        return journal, list(model.parameters())

    beside_the_cpu(device, train, rtol=1e-3, atol=1e-4)


# --- micro-batches ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """A micro-batch of attributes."""

    x: Tensor
    y: Tensor
    name: str = "kept"


class Pair(NamedTuple):
    """A micro-batch of two names."""

    x: Tensor
    y: Tensor


CONTAINERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dict": lambda x, y: {"x": x, "y": y, "name": "kept", "number": 3, "nothing": None},
    "nested": lambda x, y: {"x": [x, (x,)], "y": {"deeper": [y]}},
    "dataclass": Record,
    "named tuple": Pair,
    "UserDict": lambda x, y: UserDict(x=x, y=y),
    "SimpleNamespace": lambda x, y: SimpleNamespace(x=x, y=y),
}


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers(device: torch.device, kind: str, pinned: bool) -> None:
    """Each arrives as what it was, with its tensors on the device, in training and in an evaluation, also when it is pinned."""
    if pinned and not has_streams(device):
        pytest.skip("memory is pinned for an accelerator")
    data = [CONTAINERS[kind](*(part.pin_memory() if pinned else part for part in batch)) for batch in batches()]

    def train(place: torch.device) -> Any:
        def look(model: nn.Module, batch: Any) -> ForwardOutput:
            assert type(batch) is type(data[0])
            parts = batch if isinstance(batch, (dict, UserDict)) else {"x": batch.x, "y": batch.y}
            x, y = (pytree.tree_leaves(parts[name])[0] for name in ("x", "y"))
            assert {x.device, y.device} == {place}
            assert not isinstance(batch, Record) or batch.name == "kept"
            assert kind != "dict" or [batch[name] for name in ("name", "number", "nothing")] == ["kept", 3, None]
            return forward(model, (x, y))

        model = make_model(place)
        trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), look, accumulation_steps=STEPS)
        journal = journal_of(trainer)
        trainer.run(data, max_epochs=1)
        evaluator = create_evaluator(model, look)
        return journal, evaluator.run(data).metrics, model.state_dict()

    beside_the_cpu(device, train)
    assert all(leaf.device == CPU for leaf in pytree.tree_leaves(data) if isinstance(leaf, Tensor))


# --- whole runs -------------------------------------------------------------------------------------------------------------


def test_all_that_shows_and_watches_a_run(device: torch.device, tmp_path: Path) -> None:
    """The lines of the log are alike, beside TensorBoard, a profile, a timer and the handlers that watch."""

    def train(place: torch.device) -> Any:
        directory, model = fresh(tmp_path), make_model(place)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        arguments = {
            "gradient_accumulation_steps": STEPS,
            "max_grad_norm": 1.0,
            "output_transform": lambda x, y, p, loss: (x, p),
        }
        trainer = create_supervised_trainer(model, optimizer, cross_entropy, **arguments)  # type: ignore[arg-type]
        evaluator = create_evaluator(model, forward)
        Validation(evaluator, batches(3, seed=2)).attach(trainer, Events.ITERATION_COMPLETED(every=4))
        defaults = attach_defaults(trainer, directory=directory, evaluator=evaluator, every=2, config={"lr": 1e-2})
        timer, profiler = StepTimer(ranges="record_function"), Profiler(directory, updates=range(3, 5))
        HangWatch().attach(trainer, evaluator=evaluator)
        for handler in (timer, profiler, TimeLimit(1e6), StopOnSignal(), GradientMonitor(every=4), LossScaleLogger()):
            handler.attach(trainer)
        for watching in (GarbageCollection(), EmptyCache()):
            watching.attach(trainer, Events.ITERATION_COMPLETED(every=3))
        MinLearningRate(optimizer, minimum=1e-9).attach(trainer)
        trainer.run(batches(), max_epochs=2)
        assert_on(place, trainer.state.output)
        assert bool(timer.summary(device=True)) == has_streams(place)
        assert [path.exists() for path in profiler.traces] == [True]
        assert defaults.tensorboard is not None
        assert any((directory / "tensorboard").iterdir())
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        return [untimed({name: value for name, value in line.items() if isinstance(value, (int, float))}) for line in lines]

    lines = beside_the_cpu(device, train, rtol=1e-3)
    assert len(lines) == UPDATES + 4  # those of the evaluations
    assert {"train/loss", "optimizer/grad_norm", "validation/loss"} <= {name for line in lines for name in line}


class Job:
    """A training with all handlers that have a state, and with dropout on the device."""

    def __init__(self, device: torch.device, directory: Path) -> None:
        self.device, self.model = device, make_model(device, dropout=0.2)
        self.teacher = copy.deepcopy(self.model).eval()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.trainer = create_trainer(self.model, self.optimizer, self.forward, accumulation_steps=STEPS, max_grad_norm=1.0)
        self.evaluator, self.averaged = (create_evaluator(self.model, forward) for _ in range(2))
        self.ema, self.swa, self.on_host = ModelEMA(0.9), StochasticWeightAveraging(start=4), ModelEMA(0.8, device="cpu")
        self.outer = OuterOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.5), every=4)
        self.log = directory / "log"
        self.attach(directory)

    def forward(self, model: nn.Module, batch: Batch, state: Any) -> ForwardOutput:
        """The loss, and the distance to the teacher; a mean is carried on."""
        with torch.no_grad():
            target = self.teacher(batch[0])
        output = forward(model, batch)
        state.carried["mean"] = 0.5 * state.carried.get("mean", torch.zeros(CLASSES, device=self.device)) + target.mean(0)
        return output._replace(loss=output.loss + (output.outputs[0] - state.carried["mean"]).square().sum())

    def attach(self, directory: Path) -> None:
        """Attaches them."""
        trainer, every_third = self.trainer, Events.ITERATION_COMPLETED(every=3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.9, patience=0, threshold=0)
        for evaluator in (self.evaluator, self.averaged):
            Validation(evaluator, batches(3, seed=2)).attach(trainer, every_third)
        teacher = MomentumTeacher(self.teacher, self.model, lambda state: 0.9 + 0.1 * state.progress)
        for handler in (self.outer, self.ema, self.on_host, self.swa, teacher, Freeze(self.model[0], until=5)):
            handler.attach(trainer)
        self.ema.use_in(self.averaged)
        ReduceOnPlateau(self.evaluator, plateau).attach(trainer)
        EarlyStopping(self.evaluator, patience=100).attach(trainer)
        TimeLimit(1e6).attach(trainer)
        MinLearningRate(self.optimizer, minimum=1e-12).attach(trainer)
        attach_metric(trainer, Accuracy(device=self.device), "accuracy")
        attach_defaults(trainer, directory=self.log, evaluator=self.evaluator, every=2, leave_out=("progress",))
        Checkpoint(directory / "checkpoints", every=1).attach(trainer, evaluator=self.evaluator)

    def run(self, *, seed: int, stop: int | None = None) -> Any:
        """Trains up to an update or to the end, and gives the bits of all that it has made."""
        torch.manual_seed(seed)  # the accelerator too
        if stop is not None:  # not by max_iters, on which the momentum of the teacher would depend
            self.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop), self.trainer.terminate)
        self.trainer.run(batches(), max_epochs=2)
        lines = [untimed(numbers_in(line)) for line in (self.log / "metrics.jsonl").read_text().splitlines()]
        assert_on(self.device, [self.trainer.state.carried["mean"], self.teacher.state_dict(), self.ema.state_dict()])
        states = state_of(self.model, self.optimizer, self.teacher, self.ema, self.on_host, self.swa, self.outer)
        generators = [torch.get_rng_state(), *[state for _, _, state in RandomState([self.device], [])._on_devices]]
        scores = [untimed(engine.state.metrics) for engine in (self.trainer, self.evaluator, self.averaged)]
        return bit_by_bit([states, generators, self.trainer.state.carried["mean"]]), scores, lines


def numbers_in(line: str) -> dict[str, float]:
    """The numbers in a line of the log."""
    return {name: value for name, value in json.loads(line).items() if isinstance(value, (int, float))}


@pytest.mark.parametrize("stop", [3, 6, 13])
def test_a_resumed_run_with_all_handlers(device: torch.device, stop: int, tmp_path: Path) -> None:
    """Stopped before the thaw, between two outer steps and in the second epoch, built anew and continued: the same bits."""
    whole = Job(device, fresh(tmp_path)).run(seed=3)
    directory = fresh(tmp_path)
    Job(device, directory).run(seed=3, stop=stop)
    resumed = Job(device, directory).run(seed=4)
    for mine, other in zip(resumed, whole, strict=True):
        assert mine == other


def test_a_checkpoint_moves_to_another_device(device: torch.device, tmp_path: Path) -> None:
    """A run that began on the CPU continues on the device, with moments and averages there, as it would have continued."""

    def build(place: torch.device, directory: Path) -> tuple[Trainer, nn.Module, torch.optim.Optimizer, ModelEMA]:
        model = make_model(place)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        trainer, ema = create_trainer(model, optimizer, forward, accumulation_steps=STEPS), ModelEMA(0.9)
        ema.attach(trainer)
        Checkpoint(directory, every=4).attach(trainer)
        return trainer, model, optimizer, ema

    for first, second in ((CPU, device), (device, CPU)):
        directory = fresh(tmp_path)
        build(first, directory)[0].run(batches(), max_iters=4)
        trainer, *holders = build(second, directory)
        assert trainer.run(batches(), max_epochs=2).iteration == 2 * UPDATES
        whole, *expected = build(CPU, fresh(tmp_path))
        whole.run(batches(), max_epochs=2)
        assert_on(second, state_of(*holders))
        mine, other = pytree.tree_leaves(state_of(*holders)), pytree.tree_leaves(state_of(*expected))
        for one, wanted in zip(mine, other, strict=True):
            if isinstance(one, Tensor):
                torch.testing.assert_close(one.cpu(), wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("by_inner_rate", [False, True])
def test_an_outer_optimizer(device: torch.device, by_inner_rate: bool) -> None:
    """Lookahead with momentum in a single process: parameters, the outer norm and the number of its steps."""

    def train(place: torch.device) -> Any:
        model = make_model(place)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        trainer = create_trainer(model, optimizer, forward, accumulation_steps=STEPS, **with_options(reduction="local"))
        outer = OuterOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5, nesterov=True), every=3, by_inner_rate=by_inner_rate
        )
        outer.attach(trainer)
        journal = journal_of(trainer)
        trainer.run(batches(STEPS * 6), max_epochs=2)
        assert_on(place, outer.state_dict())
        return journal, outer.num_outer_steps, outer.grad_norm, list(model.parameters())

    assert beside_the_cpu(device, train, rtol=1e-3)[1] == 4


# --- tools ------------------------------------------------------------------------------------------------------------------


def test_a_search_for_a_learning_rate(device: torch.device) -> None:
    """The rates and the smoothed losses up to where it diverges, and generators that are where they were."""

    def train(place: torch.device) -> Any:
        def make_trainer() -> Trainer:
            model = nn.Linear(WIDTH, 1).to(place)
            nn.init.constant_(model.weight, 0.5)
            nn.init.ones_(model.bias)
            rate = torch.tensor(1e-4, device=place)  # as a schedule on the device keeps it
            optimizer = torch.optim.Adam(model.parameters(), lr=rate, capturable=has_streams(place), fused=True)
            return create_trainer(
                model,
                optimizer,
                lambda model, batch: ForwardOutput(
                    mse_loss(model(batch[0])[:, 0], batch[1].float(), reduction="sum"), len(batch[1])
                ),
                accumulation_steps=STEPS,
            )

        finder, before = (
            LearningRateFinder(make_trainer),
            bit_by_bit([state for *_, state in RandomState([place], [])._on_devices]),
        )
        finder.run(batches(), num_iter=40, end_lr=100.0)
        assert bit_by_bit([state for *_, state in RandomState([place], [])._on_devices]) == before
        return finder.get_results()

    assert 10 < len(beside_the_cpu(device, train, rtol=1e-2)["lr"]) < 40


def test_a_check_of_forward_and_a_search_for_speed(device: torch.device) -> None:
    """The check finds a forward exact, and one with a wrong weight not; `tune` measures and leaves the generators alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)).to(device)
    data = [(x.to(device), y.to(device)) for x, y in batches(3)]
    assert check_forward(model, forward, data).is_exact
    assert not check_forward(model, lambda model, batch: forward(model, batch)._replace(sample_size=1), data).is_exact

    def make_trainer(*, accumulation_steps: int = 2, fused: bool = False) -> Trainer:
        made = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)).to(device)
        optimizer = torch.optim.AdamW(made.parameters(), fused=fused)
        return create_trainer(made, optimizer, forward, accumulation_steps=accumulation_steps)

    loader = DataLoader(TensorDataset(*map(torch.cat, zip(*batches(64), strict=True))), 8, shuffle=True)
    before = bit_by_bit([torch.get_rng_state(), *[state for *_, state in RandomState([device], [])._on_devices]])
    found = tune(make_trainer, loader, seconds=0.3, values={"workers": [], "threads": [], "micro_batch": [8, 16]})
    assert bit_by_bit([torch.get_rng_state(), *[state for *_, state in RandomState([device], [])._on_devices]]) == before
    assert found.fastest["micro_batch"] * found.fastest["accumulation_steps"] == 16
