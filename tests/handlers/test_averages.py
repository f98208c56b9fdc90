"""Stochastic weight averaging is the plain mean; a momentum teacher follows the student as its schedule says."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune

from bits import bit_by_bit
from ignite_train import ForwardOutput, Trainer, TrainEvents, UpdateOptions, create_evaluator, create_trainer
from ignite_train.checkpoint import consolidate, latest, load_weights
from ignite_train.handlers import (
    Checkpoint,
    ModelEMA,
    MomentumTeacher,
    StochasticWeightAveraging,
    TensorBoard,
    Validation,
)
from mistakes import Mistake, assert_one_line
from ranks import run_ranks

DATA = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in range(4)]


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
    return ForwardOutput((model(x) - 2.0).square().sum(), len(x))


def make(model: nn.Module, forward: Any = forward, **options: Any) -> Trainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    return create_trainer(model, optimizer, forward, options=UpdateOptions(**options))


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


# --- stochastic weight averaging ---


def test_the_mean_of_the_epochs_from_the_start_on() -> None:
    """Weights and running statistics against the mean over the ends of the epochs 2 to 4; counts are the model's."""
    model, ends = net(), []
    trainer, swa = make(model), StochasticWeightAveraging(start=2 * len(DATA))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: ends.append(copies(model)))
    swa.attach(trainer)
    trainer.run(DATA, max_epochs=4)
    assert swa.num_updates == 3
    for name, value in swa.state_dict()["model"].items():
        if name.endswith("num_batches_tracked"):
            assert value == 16
        else:
            torch.testing.assert_close(value, torch.stack([end[name] for end in ends[1:]]).mean(0), rtol=1e-12, atol=1e-12)


def test_the_mean_of_the_weights_after_each_step() -> None:
    """From the first step on, without those with which the run began; an event of the user's own."""
    model, ends = net(), []
    trainer, swa = make(model), StochasticWeightAveraging()
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: ends.append(copies(model)))
    swa.attach(trainer, Events.STARTED | Events.ITERATION_COMPLETED)
    trainer.run(DATA)
    assert swa.num_updates == len(DATA)
    found = swa.state_dict()["model"]["0.weight"]
    torch.testing.assert_close(found, torch.stack([end["0.weight"] for end in ends]).mean(0), rtol=1e-12, atol=1e-12)


def test_before_the_start_it_is_the_weights_of_the_moment() -> None:
    """So that a validation of the average shows nothing old."""
    model = net()
    trainer, swa = make(model), StochasticWeightAveraging(start=100)
    swa.attach(trainer)
    trainer.run(DATA, max_epochs=2)
    before = bit_by_bit(model.state_dict())
    with swa.swapped_in():
        assert bit_by_bit(model.state_dict()) == before
    assert swa.num_updates == 0


def test_saved_before_the_start_it_is_the_weights_of_the_moment(tmp_path: Path) -> None:
    """So that no export has the weights with which the run began."""
    model, found = net(), net()
    trainer = make(model)
    StochasticWeightAveraging(start=100).attach(trainer)
    Checkpoint(tmp_path, asynchronous=False).attach(trainer)
    trainer.run(DATA, max_epochs=2)
    load_weights(found, tmp_path, entry="StochasticWeightAveraging")
    assert bit_by_bit(found.state_dict()) == bit_by_bit(model.state_dict())


def test_validated_beside_the_weights_with_a_point_each(tmp_path: Path) -> None:
    """Two evaluators, a logger: each epoch has one point of the weights and one of the average, and they differ."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = net()
    trainer, swa = make(model), StochasticWeightAveraging()
    plain, averaged = create_evaluator(model, forward), create_evaluator(model, forward)
    board = TensorBoard(tmp_path)
    for tag, evaluator in (("weights", plain), ("average", averaged)):
        board.attach(trainer, evaluator=evaluator, tag=tag)
        Validation(evaluator, DATA).attach(trainer)
    swa.use_in(averaged)
    swa.attach(trainer)
    trainer.run(DATA, max_epochs=3)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    points = {tag: [(point.step, point.value) for point in events.Scalars(f"{tag}/loss")] for tag in ("weights", "average")}
    assert [step for step, _ in points["weights"]] == [step for step, _ in points["average"]] == [4, 8, 12]
    assert points["weights"][0] == points["average"][0]  # the mean of one
    assert points["weights"][1][1] != points["average"][1][1]


@pytest.mark.slow
def test_swa_resumed(tmp_path: Path) -> None:
    """Broken off in the third epoch, the mean has the same bits at the end."""

    def job(directory: Path | None) -> tuple[Trainer, StochasticWeightAveraging]:
        trainer, swa = make(net()), StochasticWeightAveraging(start=3)
        if directory is not None:
            Checkpoint(directory, every=1, asynchronous=False).attach(trainer)
        swa.attach(trainer)
        return trainer, swa

    whole, expected = job(None)
    whole.run(DATA, max_epochs=4)
    trainer, _ = job(tmp_path)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=10), lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(DATA, max_epochs=4)
    trainer, swa = job(tmp_path)
    trainer.run(DATA, max_epochs=4, resume="must")
    assert bit_by_bit(swa.state_dict()) == bit_by_bit(expected.state_dict())
    consolidate(latest(tmp_path), tmp_path / "swa.pt", entry="StochasticWeightAveraging")  # type: ignore[arg-type]
    assert bit_by_bit(torch.load(tmp_path / "swa.pt")) == bit_by_bit(swa.state_dict()["model"])


# --- momentum teacher ---


def schedule(state: Any) -> float:
    return 1 - 0.1 * (1 + math.cos(math.pi * state.progress)) / 2


def distillation(teacher: nn.Module) -> Callable[..., ForwardOutput]:
    def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
        with torch.no_grad():
            target = teacher(x + 0.5)
        scale = 1.0 if len(x) == 4 else math.nan  # a smaller micro-batch is skipped
        return ForwardOutput((model(x) - target).square().sum() * scale, len(x))

    return forward


def test_the_teacher_follows_its_schedule() -> None:
    """Against the recursion, with the momentum of each step, a skipped update left out; the teacher of the loss is this one."""
    model = net()
    teacher = copy.deepcopy(model).eval()
    with torch.no_grad():
        teacher[0].weight.add_(1.0)
    expected = copies(teacher)
    trainer = make(model, distillation(teacher), on_nonfinite="skip")
    moments: list[float] = []

    def follow(trainer: Trainer) -> None:
        moments.append(schedule(trainer.state))
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                expected[name] = moments[-1] * expected[name] + (1 - moments[-1]) * value

    trainer.add_event_handler(TrainEvents.STEP_COMPLETED, follow)
    MomentumTeacher(teacher, model, schedule).attach(trainer)
    trainer.run([*DATA, DATA[0][:3]], max_epochs=2)
    assert len(moments) == 8
    assert moments == sorted(moments)
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    for name, value in teacher.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 1.0, 0.75])
def test_a_momentum_is_from_0_to_1(momentum: float) -> None:
    """With 0 the teacher is the student, with 1 it stays."""
    model = net()
    teacher = copy.deepcopy(model)
    before, trainer = copies(teacher), make(model)
    MomentumTeacher(teacher, model, momentum).attach(trainer)
    trainer.run(DATA[:1])
    expected = momentum * before["0.weight"] + (1 - momentum) * model[0].weight.detach()
    torch.testing.assert_close(teacher[0].weight, expected, rtol=1e-12, atol=1e-12)
    assert not torch.equal(model[0].weight, before["0.weight"])


def with_a_teacher(inputs: int, outputs: int, directory: Path, *, own_statistics: bool) -> tuple[Trainer, nn.Module]:
    """A trainer that saves in `directory`, and a teacher with running statistics, which its forward runs in training mode."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs)).double()
    teacher = copy.deepcopy(model)

    def both(model: nn.Module, x: Tensor) -> ForwardOutput:
        with torch.no_grad():
            target = teacher(x + 1)
        return ForwardOutput((model(x) - target - 1).square().sum(), sample_size=len(x))

    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), both)
    MomentumTeacher(teacher, model, 0.9, own_statistics=own_statistics).attach(trainer)
    Checkpoint(directory, every=2).attach(trainer)
    return trainer, teacher


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True], ids=["averaged", "own"])
def test_a_teacher_may_have_statistics_of_its_own(own: bool, tmp_path: Path) -> None:
    """Those that it has moved itself in training mode, as in Mean Teacher; also after a resume."""

    def start(directory: Path, limit: int) -> tuple[nn.Module, Tensor]:
        trainer, teacher = with_a_teacher(4, 3, directory, own_statistics=own)
        by_hand = copy.deepcopy(teacher)
        generator = torch.Generator().manual_seed(1)
        data = [torch.randn(8, 4, generator=generator, dtype=torch.float64) for _ in range(4)]
        state = trainer.run(data, max_iters=limit)
        assert state.iteration == limit
        for x in data[:1]:
            by_hand(x + 1)  # what the first forward of the teacher has moved
        return teacher, by_hand[1].running_mean

    teacher, first = start(tmp_path / "one", 1)
    assert torch.equal(teacher[1].running_mean, first) == own
    start(tmp_path / "cut", 2)
    resumed, whole = start(tmp_path / "cut", 4)[0], start(tmp_path / "whole", 4)[0]
    assert bit_by_bit(resumed.state_dict()) == bit_by_bit(whole.state_dict())


def test_an_update_that_is_repeated_moves_the_statistics_of_a_teacher_once(tmp_path: Path) -> None:
    """A broken update has moved them in its forward; where a checkpoint is attached they are put back, as the student's are."""

    def start(breaks: bool) -> nn.Module:
        trainer, teacher = with_a_teacher(3, 4, tmp_path / str(breaks), own_statistics=True)

        @trainer.on(TrainEvents.BACKWARD_COMPLETED(once=3))
        def stop() -> None:
            if breaks and not stops:
                stops.append(3)
                raise ConnectionError

        stops = list[int]()
        if breaks:
            with pytest.raises(ConnectionError):
                trainer.run(DATA, max_epochs=1)
        trainer.run(DATA, max_epochs=1)
        return teacher

    assert bit_by_bit(start(breaks=True).state_dict()) == bit_by_bit(start(breaks=False).state_dict())


class Spectral(nn.Module):
    """Has a parameter of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 1 + 2j, dtype=torch.complex128))
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum(-1, keepdim=True).abs() + self.bias


@pytest.mark.parametrize("kind", ["teacher", "ema"])
def test_complex_parameters_are_averaged(kind: str) -> None:
    """Against the recursion, as all others are."""
    model = Spectral()
    teacher, trainer, ema = copy.deepcopy(model), make(model), ModelEMA(0.75, warm_up=False)
    expected = copies(model)
    if kind == "teacher":
        MomentumTeacher(teacher, model, 0.75).attach(trainer)
    else:
        ema.attach(trainer)

    @trainer.on(TrainEvents.STEP_COMPLETED)
    def follow() -> None:
        for name, value in copies(model).items():
            expected[name] = 0.75 * expected[name] + 0.25 * value

    trainer.run(DATA)
    found = teacher.state_dict() if kind == "teacher" else ema.state_dict()["model"]
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)


def test_the_student_may_have_several_optimizers() -> None:
    """The teacher has parameters of neither."""
    model = net()
    teacher = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.02), torch.optim.AdamW(model[1:].parameters())]
    trainer = create_trainer(model, optimizers, forward)
    MomentumTeacher(teacher, model, 0.0).attach(trainer)
    trainer.run(DATA)
    assert bit_by_bit(dict(teacher.named_parameters())) == bit_by_bit(dict(model.named_parameters()))


def test_a_teacher_that_would_be_rounded_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """In bfloat16 it stays where it is; in float32 it follows a student in bfloat16."""
    model = nn.Linear(8, 8, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    rounded, wide = copy.deepcopy(model), copy.deepcopy(model).float()

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).float().mean()  # whose gradient is 1/8 everywhere

    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=1.0), forward)
    for teacher in (wide, rounded):
        MomentumTeacher(teacher, model, 0.996).attach(trainer)
    trainer.run([torch.ones(4, 8, dtype=torch.bfloat16)] * 3)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "parameters of bfloat16 ('weight')" in caplog.text
    assert torch.equal(rounded.weight, torch.ones_like(rounded.weight))
    assert not torch.equal(wide.weight, torch.ones_like(wide.weight))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_frozen_weights_of_a_narrow_dtype_are_averaged_in_float32(dtype: torch.dtype) -> None:
    """Weights under adapters are such; torch has no arithmetic in them, and they come back with the same bits."""
    model = net()
    frozen = nn.Parameter(torch.tensor([1.5, -0.25]).to(dtype), requires_grad=False)
    model.register_parameter("frozen", frozen)
    trainer = make(model)
    ema = ModelEMA(0.5)
    ema.attach(trainer)
    trainer.run(DATA)
    assert ema.state_dict()["model"]["frozen"].tolist() == [1.5, -0.25]
    with ema.swapped_in():
        assert (frozen.dtype, frozen.float().tolist()) == (dtype, [1.5, -0.25])


def test_a_teacher_keeps_frozen_weights_of_one_byte() -> None:
    """Torch has no arithmetic in them; the others follow the student."""
    model = net()
    model.register_parameter("frozen", nn.Parameter(torch.tensor([1.5, -0.25]).to(torch.float8_e4m3fn), requires_grad=False))
    teacher = copy.deepcopy(model)
    trainer = make(model)
    MomentumTeacher(teacher, model, 0.0).attach(trainer)
    trainer.run(DATA)
    assert bit_by_bit([*teacher.parameters()]) == bit_by_bit([*model.parameters()])
    assert teacher.get_parameter("frozen").tolist() == [1.5, -0.25]


def test_a_part_of_the_model_can_be_the_student() -> None:
    """The teacher follows the encoder alone."""
    model = net()
    teacher = copy.deepcopy(model[0])
    trainer = make(model)
    MomentumTeacher(teacher, model[0], 0.0).attach(trainer)
    trainer.run(DATA)
    assert bit_by_bit(teacher.state_dict()) == bit_by_bit(model[0].state_dict())


def test_a_student_of_two_optimizers() -> None:
    """The teacher follows the parameters of both."""
    model = net()
    teacher = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[:2], model[2:])]
    trainer = create_trainer(model, optimizers, forward)
    MomentumTeacher(teacher, model, 0.0).attach(trainer)
    before = bit_by_bit([*teacher.parameters()])
    trainer.run(DATA[:2])
    assert bit_by_bit([*teacher.parameters()]) == bit_by_bit([*model.parameters()]) != before


@pytest.mark.slow
def test_a_teacher_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Broken off in the middle, student and teacher end with the same bits; the teacher is exported as a file."""

    def job(directory: Path | None) -> tuple[Trainer, nn.Module, nn.Module]:
        model = net()
        teacher = copy.deepcopy(model).eval()
        trainer = make(model, distillation(teacher))
        if directory is not None:
            Checkpoint(directory, every=1, asynchronous=False).attach(trainer)
        MomentumTeacher(teacher, model, schedule).attach(trainer)
        return trainer, model, teacher

    whole, *expected = job(None)
    whole.run(DATA, max_epochs=2)
    trainer, _, _ = job(tmp_path)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=6), lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(DATA, max_epochs=2)
    trainer, *modules = job(tmp_path)
    trainer.run(DATA, max_epochs=2, resume="must")
    assert [bit_by_bit(m.state_dict()) for m in modules] == [bit_by_bit(m.state_dict()) for m in expected]
    assert "no checkpoint keeps" not in caplog.text
    consolidate(latest(tmp_path), tmp_path / "teacher.pt", entry="MomentumTeacher")  # type: ignore[arg-type]
    assert bit_by_bit(torch.load(tmp_path / "teacher.pt")) == bit_by_bit(dict(modules[1].state_dict()))


def _resumed_on_this_rank(directory: str) -> tuple[Any, Any, list[float]]:
    """What is different on the ranks: the buffers of the teacher of an undisturbed run, of a resumed one, and running means."""

    def job() -> tuple[Trainer, nn.Module]:
        model = net()
        teacher = copy.deepcopy(model).train()  # its own running means follow the data of its rank
        trainer = make(model, distillation(teacher), reduction="explicit")
        MomentumTeacher(teacher, model, 0.9).attach(trainer)
        return trainer, teacher

    data = DATA[2 * idist.get_rank() :][:2]
    whole, expected = job()
    whole.run(data, max_epochs=2)
    for epochs in (1, 2):
        trainer, teacher = job()
        Checkpoint(directory, asynchronous=False).attach(trainer)
        trainer.run(data, max_epochs=epochs)
    return bit_by_bit([*expected.buffers()]), bit_by_bit([*teacher.buffers()]), teacher[1].running_mean.tolist()


@pytest.mark.slow
def test_each_rank_gets_its_teachers_buffers_back(tmp_path: Path) -> None:
    """A teacher in training mode keeps running means of its rank's data; resumed, each rank has its own."""
    (expected, found, mean), (others, of_other, other_mean) = run_ranks(_resumed_on_this_rank, str(tmp_path))
    assert found == expected
    assert of_other == others
    assert mean != other_mean


def _teacher_on_this_rank(kind: str) -> Any:
    model = net()[0]
    teacher = copy.deepcopy(model)
    if kind == "fsdp":
        for module in (model, teacher):
            fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    else:
        with torch.no_grad():
            teacher.weight.add_(idist.get_rank())  # that of rank 0 counts
    wrapped = DistributedDataParallel(model) if kind == "ddp" else model
    trainer = make(wrapped, **({"reduction": "explicit"} if kind == "explicit" else {}))
    MomentumTeacher(teacher, wrapped, schedule).attach(trainer)
    trainer.run(DATA[idist.get_rank() :: 2], max_epochs=2)
    return [value.full_tensor().tolist() if isinstance(value, DTensor) else value.tolist() for value in teacher.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "explicit", "fsdp"])
def test_a_teacher_on_two_ranks(kind: str) -> None:
    """The teacher of one process with all data, on both ranks, sharded or not."""
    first, second = run_ranks(_teacher_on_this_rank, kind)
    model = net()[0]
    teacher = copy.deepcopy(model)
    trainer = make(model)
    MomentumTeacher(teacher, model, schedule).attach(trainer)
    trainer.run([torch.cat(DATA[:2]), torch.cat(DATA[2:])], max_epochs=2)
    assert first == second
    for found, expected in zip(first, teacher.parameters(), strict=True):
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected.data, rtol=1e-10, atol=1e-12)


def following(kind: str, model: nn.Module) -> tuple[Any, Callable[[], dict[str, Tensor]]]:
    """A handler that moves half of the way in each step, and what gives the average by name."""
    if kind == "average":
        ema = ModelEMA(0.5, warm_up=False)
        return ema, lambda: ema.state_dict()["model"]
    teacher = copy.deepcopy(model)
    return MomentumTeacher(teacher, model, 0.5), teacher.state_dict


@pytest.mark.parametrize("kind", ["average", "teacher"])
def test_an_average_goes_by_name_where_a_module_was_put_in_again(kind: str) -> None:
    """Then it is registered last, with parameters of the same shapes as others."""
    model = nn.Sequential(OrderedDict((name, nn.Linear(3, 3)) for name in "abc")).double()
    trainer = make(model)
    handler, average = following(kind, model)
    handler.attach(trainer)
    expected = copies(model)

    def follow() -> None:
        for name, value in model.named_parameters():
            expected[name].lerp_(value.detach(), 0.5)

    trainer.add_event_handler(Events.ITERATION_COMPLETED, follow)
    trainer.run(DATA, max_epochs=1)
    del model.a
    model.a = nn.Linear(3, 3).double().requires_grad_(False)
    model.a.load_state_dict({name.removeprefix("a."): expected[name] for name in ("a.weight", "a.bias")})
    trainer.run(DATA, max_epochs=2)
    assert [*copies(model)] != [*expected]
    for name, value in expected.items():
        torch.testing.assert_close(average()[name], value)


@pytest.mark.parametrize("kind", ["average", "teacher"])
@pytest.mark.parametrize("when", ["between runs", "in a run"])
def test_an_average_of_parameters_that_are_gone_is_refused(kind: str, when: str) -> None:
    """Pruning renames a weight and registers it last: matched by place, its average would follow the bias."""
    model = nn.Sequential(OrderedDict(linear=nn.Linear(3, 4), norm=nn.LayerNorm(4))).double()
    trainer = make(model)
    handler, average = following(kind, model)
    handle = handler.attach(trainer)

    def change() -> None:
        prune.identity(model.norm, "weight")  # type: ignore[no-untyped-call]

    trainer.run(DATA, max_epochs=1)
    before, known = trainer.state.num_steps, bit_by_bit(average())
    change() if when == "between runs" else trainer.add_event_handler(Events.EPOCH_STARTED, change)
    with pytest.raises(ValueError, match=r"got a difference in 'norm\.weight'; call remove\(\)"):
        trainer.run(DATA, max_epochs=2)
    assert trainer.state.num_steps == before + (when == "in a run")
    if kind == "teacher":
        assert bit_by_bit(average()) == known
    handle.remove()
    following("average", model)[0].attach(trainer)
    if when == "between runs":
        trainer.run(DATA, max_epochs=2)


def attach_teacher(teacher: nn.Module | None = None, **arguments: Any) -> None:
    model = net()
    MomentumTeacher(teacher or copy.deepcopy(model), **{"student": model, **arguments}).attach(make(model))


def teach_by(momentum: Any) -> None:
    model = net()
    trainer = make(model)
    MomentumTeacher(copy.deepcopy(model), model, momentum).attach(trainer)
    trainer.run(DATA)


def teach_itself() -> None:
    model = net()
    MomentumTeacher(model, model).attach(make(model))


def attach_twice() -> None:
    model = net()
    trainer, teacher = make(model), copy.deepcopy(model)
    for _ in range(2):  # as a cell of a notebook that is run again
        MomentumTeacher(teacher, model).attach(trainer)


def average_twice() -> None:
    trainer, swa = make(net()), StochasticWeightAveraging()
    swa.attach(trainer).remove()
    swa.attach(trainer)
    swa.attach(trainer, Events.COMPLETED)


MISTAKES: dict[str, Mistake] = {
    "start": (ValueError, "start must be at least 0", lambda: StochasticWeightAveraging(-1)),
    "half": (TypeError, "start must be a number of steps", lambda: StochasticWeightAveraging(0.75)),  # type: ignore[arg-type]
    "teacher": (TypeError, "teacher must be a torch.nn.Module", lambda: attach_teacher("net")),  # type: ignore[arg-type]
    "other": (ValueError, "teacher must have the parameters of student", lambda: attach_teacher(nn.Linear(3, 4))),
    "itself": (ValueError, "teacher must not be trained", teach_itself),
    "untrained": (ValueError, "student must be trained", lambda: attach_teacher(net(), student=net())),
    "twice": (ValueError, "teacher must be attached once", attach_twice),
    "average twice": (ValueError, "StochasticWeightAveraging must be attached once", average_twice),
    "momentum": (ValueError, "momentum must be at most 1, got 1.5", lambda: attach_teacher(momentum=1.5)),
    "schedule": (ValueError, "momentum must be at least 0, got -1", lambda: teach_by(lambda state: -1)),
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes(name: str) -> None:
    """Each is answered in one line."""
    assert_one_line(MISTAKES[name])
