"""The average of the weights: what it is, that training does not notice it, and that it is saved and exported."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import cuts
from bits import bit_by_bit
from ignite_train import CheckpointError, ForwardOutput, NoLossScaling, Trainer, TrainEvents, create_evaluator, create_trainer
from ignite_train.checkpoint import consolidate, latest, load_weights
from ignite_train.checkpoint.reader import CheckpointReader
from ignite_train.handlers import Checkpoint, ModelEMA, Validation
from ignite_train.tools.checkpoint_command import checkpoint_command as main
from mistakes import Mistake, assert_one_line
from ranks import run_ranks
from update_options import with_options

DATA = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in range(6)]


class Net(nn.Module):
    """Has a tied weight, statistics of a BatchNorm and a mask with infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.again = nn.Linear(3, 4)
        self.again.weight = self.first.weight
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x) + self.again(x)).tanh()) + self.mask.exp()[0]


def net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Net().double()


def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
    return ForwardOutput((model(x.to(next(model.parameters()).dtype)) - 2.0).square().sum(), len(x))


def make(model: nn.Module, *, rate: float = 0.05, **options: Any) -> Trainer:
    return create_trainer(model, torch.optim.SGD(model.parameters(), lr=rate, momentum=0.5), forward, **options)


def averaged(ema: ModelEMA) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in ema.state_dict()["model"].items()}


# --- what the average is ---


def decay_of(settings: dict[str, Any], number: int) -> float:
    decay = settings["decay"]
    if callable(decay):
        return float(decay(number))
    return min(decay, (1 + number) / (10 + number)) if settings.get("warm_up", True) else decay


def test_an_error_at_the_end_of_an_evaluation_leaves_the_weights() -> None:
    """Whatever else is called there fails: all that was to be put back is."""
    model = net()
    trainer, evaluator, ema = make(model), create_evaluator(model, forward), ModelEMA(0.5)
    ema.attach(trainer)
    evaluator.on_exit.append(lambda: 1 // 0)
    ema.use_in(evaluator)
    trainer.run(DATA)
    before = bit_by_bit(model.state_dict())
    with pytest.raises(ZeroDivisionError):
        evaluator.run(DATA)
    assert bit_by_bit(model.state_dict()) == before
    evaluator.on_exit.pop(0)
    assert evaluator.run(DATA).metrics["loss"] > 0


@pytest.mark.parametrize(
    "settings",
    [{"decay": 0.9}, {"decay": 0.3}, {"decay": 0.9, "warm_up": False}, {"decay": lambda number: 1 - 1 / number}],
    ids=["warm-up", "past-warm-up", "constant", "schedule"],
)
def test_the_closed_form(settings: dict[str, Any]) -> None:
    """Parameters and statistics against the weighted sum of what they were after each applied update, skips left out."""
    model, weights = net(), []
    trainer = make(model, **with_options(on_nonfinite="skip", loss_scaling=NoLossScaling()))
    ema = ModelEMA(**settings)
    ema.attach(trainer)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.add_event_handler(
        TrainEvents.STEP_COMPLETED, lambda: weights.append({name: value.clone() for name, value in model.state_dict().items()})
    )
    data = [*DATA[:3], DATA[3] * math.inf, *DATA[4:]]
    model.norm.eval()
    assert trainer.run(data, max_epochs=1).num_skipped == 1

    assert len(weights) == ema.num_updates == 5
    for name, value in averaged(ema).items():
        expected = start[name]
        for number, after in enumerate(weights, start=1):
            decay = decay_of(settings, number)
            expected = decay * expected + (1 - decay) * after[name]
        if name in ("mask", "norm.num_batches_tracked"):
            expected = model.state_dict()[name]
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


def test_a_schedule_that_is_one_over_n_is_the_mean() -> None:
    """With decay 1 - 1/n it is the plain mean of the weights after each update, as in stochastic weight averaging."""
    model, weights = net(), []
    trainer, ema = make(model), ModelEMA(lambda number: 1 - 1 / number)
    ema.attach(trainer)
    trainer.add_event_handler(TrainEvents.STEP_COMPLETED, lambda: weights.append(model.last.weight.detach().clone()))
    trainer.run(DATA, max_epochs=1)
    torch.testing.assert_close(averaged(ema)["last.weight"], torch.stack(weights).mean(0), rtol=1e-12, atol=1e-12)


def test_small_steps_of_a_bfloat16_model_are_not_lost() -> None:
    """The average of bfloat16 weights is kept in float32, where a step of 1/1000 of the difference is not rounded away."""
    model = nn.Linear(3, 1, bias=False).bfloat16()
    trainer, ema = make(model, rate=0.0), ModelEMA(0.999, warm_up=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    ema.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: model.weight.data.fill_(2.0))
    trainer.run(DATA, max_epochs=1)
    average = averaged(ema)["weight"]
    assert average.dtype == torch.float32
    torch.testing.assert_close(average, torch.full((1, 3), 2 - 0.999**6), rtol=1e-5, atol=0)


def test_it_begins_with_the_weights_of_the_first_run() -> None:
    """Weights that are loaded after `attach` count, and not those that were there when it was attached."""
    model = net()
    trainer, ema = make(model, rate=0.0), ModelEMA(0.9)
    ema.attach(trainer)
    with torch.no_grad():
        model.last.weight.fill_(7.0)
    trainer.run(DATA, max_epochs=1)
    assert bit_by_bit(averaged(ema)["last.weight"]) == bit_by_bit(model.last.weight)


def rarely_averaged(model: nn.Module) -> tuple[Trainer, ModelEMA]:
    trainer, ema = make(model), ModelEMA(0.9, warm_up=False)
    ema.attach(trainer, TrainEvents.STEP_COMPLETED(every=4))
    return trainer, ema


@pytest.mark.parametrize("ends", ["limit", "error"])
def test_runs_that_end_before_the_first_averaging_are_as_one_run(ends: str) -> None:
    """The average is the same, to the bit, whether it averages for the first time in the first run or in the third."""
    whole, expected = rarely_averaged(net())
    whole.run(DATA, max_iters=6)
    trainer, ema = rarely_averaged(net())
    for number in (1, 3):
        if ends == "limit":
            trainer.run(DATA, max_iters=number)
            continue
        handle = trainer.add_event_handler(Events.ITERATION_STARTED(once=number + 1), lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            trainer.run(DATA, max_iters=6)
        handle.remove()
    trainer.run(DATA, max_iters=6)
    assert ema.num_updates == 1
    assert bit_by_bit(ema.state_dict()) == bit_by_bit(expected.state_dict())


@pytest.mark.parametrize("ema_first", [True, False], ids=["ema-first", "checkpoint-first"])
def test_resumed_before_the_first_averaging_it_is_as_one_run(ema_first: bool, tmp_path: Path) -> None:
    """The weights with which the average began come from the checkpoint, and are not those that are restored."""
    whole, expected = rarely_averaged(net())
    whole.run(DATA, max_iters=6)
    for number in (3, 6):
        trainer, ema = make(net()), ModelEMA(0.9, warm_up=False)
        checkpoint = Checkpoint(tmp_path, every=1, asynchronous=False)
        if not ema_first:
            checkpoint.attach(trainer)
        ema.attach(trainer, TrainEvents.STEP_COMPLETED(every=4))
        if ema_first:
            checkpoint.attach(trainer)
        trainer.run(DATA, max_iters=number)
    assert bit_by_bit(ema.state_dict()) == bit_by_bit(expected.state_dict())


def test_attached_after_a_run_it_begins_with_the_weights_of_the_next_one() -> None:
    """Also where a run has failed before its first step, and the script has loaded other weights."""
    model = net()
    trainer = make(model, rate=0.0)
    trainer.run(DATA, max_iters=1)
    ema = ModelEMA(0.9)
    ema.attach(trainer)
    with torch.no_grad():
        model.last.weight.fill_(7.0)
    handle = trainer.add_event_handler(Events.ITERATION_STARTED, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(DATA, max_iters=6)
    handle.remove()
    with torch.no_grad():
        model.last.weight.fill_(9.0)
    model.norm.eval()
    trainer.run(DATA, max_iters=6)
    torch.testing.assert_close(averaged(ema)["last.weight"], model.last.weight.detach(), rtol=1e-14, atol=0)


# --- in the place of the weights ---


def test_its_state_is_not_given_beside_a_model_that_has_the_averages() -> None:
    """A script that stores both, by `torch.save` or the checkpoint of another trainer, would lose the trained weights."""
    ema = ModelEMA()
    trainer = make(net())
    ema.attach(trainer)
    trainer.run(DATA, max_epochs=1)
    with (
        ema.swapped_in(),
        pytest.raises(RuntimeError, match=r"state_dict\(\) was called inside swapped_in\(\) .*; save after it"),
    ):
        ema.state_dict()
    assert ema.state_dict()["num_updates"] == trainer.state.num_steps


@pytest.mark.parametrize("leave_out", [(), ("ModelEMA",)], ids=["saved", "left-out"])
@pytest.mark.parametrize("evaluates", [True, False], ids=["evaluation", "swapped-in"])
def test_no_checkpoint_has_the_average_for_the_weights(evaluates: bool, leave_out: tuple[str, ...], tmp_path: Path) -> None:
    """A save while they are swapped in is refused, and the next save has the weights that are trained.

    Also where the handler's own state is not saved.
    """
    model = net()
    trainer, evaluator = make(model), create_evaluator(model, forward)
    ema, checkpoint = ModelEMA(), Checkpoint(tmp_path, leave_out=leave_out)
    ema.attach(trainer)
    ema.use_in(evaluator)
    checkpoint.attach(trainer)
    evaluator.add_event_handler(Events.COMPLETED, checkpoint.save)
    with trainer.session():
        trainer.update(DATA[:1])
        trained = bit_by_bit(model.state_dict())
        act = partial(evaluator.run, DATA[:1]) if evaluates else checkpoint.save
        refused = pytest.raises(RuntimeError, match=r"save\(\) was called in .* inside swapped_in\(\), .*; save after it")
        with nullcontext() if evaluates else ema.swapped_in(), refused:
            act()
        checkpoint.save()
    loaded = net()
    load_weights(loaded, checkpoint.latest)
    assert bit_by_bit(loaded.state_dict()) == trained


def test_removed_and_attached_again_it_keeps_its_average() -> None:
    """To the same trainer: the updates between count for nothing, and the average continues from where it was."""
    model = net()
    trainer, ema = make(model), ModelEMA(decay=0.5, warm_up=False)
    handle = ema.attach(trainer)
    trainer.run(DATA, max_epochs=1)
    before = averaged(ema)
    handle.remove()
    trainer.run(DATA, max_epochs=2)
    ema.attach(trainer)
    assert bit_by_bit(averaged(ema)) == bit_by_bit(
        {**before, **{name: value for name, value in model.state_dict().items() if "num_batches" in name}}
    )
    trainer.run(DATA[:1], max_epochs=3)
    for name, value in model.named_parameters():
        torch.testing.assert_close(ema.state_dict()["model"][name], 0.5 * before[name] + 0.5 * value)


def test_swapped_in_and_out_again() -> None:
    """Inside, the model has the averages under each of their names; outside its own bits, also after an exception."""
    model = net()
    trainer, ema = make(model), ModelEMA(0.9)
    with pytest.raises(RuntimeError, match=r"attach\(trainer\) must be called first"), ema.swapped_in():
        pass
    ema.attach(trainer)
    trainer.run(DATA, max_epochs=1)
    before, expected = bit_by_bit(model.state_dict()), bit_by_bit(averaged(ema))
    inside: list[Any] = []

    def nested() -> None:
        with ema.swapped_in():
            inside.append(bit_by_bit(model.state_dict()))
            with ema.swapped_in():
                inside.append("never")

    with pytest.raises(RuntimeError, match="inside swapped_in"):
        nested()
    assert inside == [expected]
    assert bit_by_bit(model.state_dict()) == before != expected
    assert bit_by_bit(averaged(ema)) == expected
    with pytest.raises(RuntimeError, match="a run was started inside"), ema.swapped_in():
        trainer.run(DATA, max_epochs=2)
    assert bit_by_bit(model.state_dict()) == before  # nothing was trained, running statistics neither
    with pytest.raises(RuntimeError, match="an update was made inside"), ema.swapped_in():
        trainer.update(DATA[:1])


@pytest.mark.parametrize("event", [Events.EPOCH_COMPLETED, TrainEvents.STEP_COMPLETED(every=2)], ids=["epoch", "step"])
@pytest.mark.parametrize("first", ["ema", "validation"])
def test_validated_beside_the_weights(event: Any, first: str) -> None:
    """Two validations at one event, one of the average: training ends with the same bits, and each score is its model's."""
    bits = []
    for validates in (False, True):
        model = net()
        trainer, ema = make(model), ModelEMA(0.9)
        raw, average = create_evaluator(model, forward), create_evaluator(model, forward)

        def attach_validations(average: Any = average, raw: Any = raw, trainer: Any = trainer) -> None:
            for evaluator in (average, raw):
                Validation(evaluator, DATA[:2]).attach(trainer, event)

        if first == "validation" and validates:
            attach_validations()
        ema.attach(trainer)
        ema.use_in(average)
        if first == "ema" and validates:
            attach_validations()
        trainer.run(DATA, max_epochs=2)
        bits.append(bit_by_bit([model.state_dict(), ema.state_dict()]))
    assert bits[0] == bits[1]
    other = net()
    for state, evaluator in ((averaged(ema), average), (model.state_dict(), raw)):
        other.load_state_dict(state)
        assert create_evaluator(other, forward).run(DATA[:2]).metrics == evaluator.state.metrics


def test_an_evaluation_that_fails_leaves_the_weights() -> None:
    """The averages do not stay in the model after an exception in the evaluation."""
    model = net()
    trainer, ema, evaluator = make(model), ModelEMA(0.9), create_evaluator(model, forward)
    ema.attach(trainer)
    ema.use_in(evaluator)
    trainer.run(DATA, max_epochs=1)
    before = bit_by_bit(model.state_dict())
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'to'"):
        evaluator.run([None])
    assert bit_by_bit(model.state_dict()) == before


# --- saved and exported ---


def saved_job(directory: Path, *, ema_first: bool = True, ema: ModelEMA | None = None, **options: Any) -> Any:
    model = net()
    trainer, ema = make(model), ema or ModelEMA(0.9)
    attach: list[Callable[[], Any]] = [
        lambda: ema.attach(trainer),
        lambda: Checkpoint(directory, every=1, asynchronous=False, **options).attach(trainer),
    ]
    for one in attach if ema_first else attach[::-1]:
        one()
    return trainer, model, ema


@pytest.mark.slow
@pytest.mark.parametrize("ema_first", [True, False], ids=["ema-first", "checkpoint-first"])
def test_resumed_it_has_the_same_bits(ema_first: bool, tmp_path: Path) -> None:
    """Broken off in the fourth update, in another process it ends with the average of a run that was not."""
    model = net()
    whole, expected = make(model), ModelEMA(0.9)
    expected.attach(whole)
    whole.run(DATA, max_epochs=2)
    trainer, _, _ = saved_job(tmp_path, ema_first=ema_first)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=4), lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(DATA, max_epochs=2)
    trainer, model, ema = saved_job(tmp_path, ema_first=ema_first)
    trainer.run(DATA, max_epochs=2, resume="must")
    assert bit_by_bit(ema.state_dict()) == bit_by_bit(expected.state_dict())


@pytest.mark.slow
def test_added_to_a_run_it_begins_with_its_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint without an average: it starts from the weights that are restored, and the log says so."""
    model = net()
    trainer = make(model)
    Checkpoint(tmp_path).attach(trainer)
    trainer.run(DATA, max_epochs=1)
    trainer, _, ema = saved_job(tmp_path, ema=ModelEMA(0.5, warm_up=False))
    seen: list[Tensor] = []
    trainer.add_event_handler(Events.ITERATION_STARTED(once=7), lambda: seen.append(averaged(ema)["last.weight"]))
    trainer.run(DATA, max_epochs=2)
    assert bit_by_bit(seen) == bit_by_bit([model.last.weight])
    assert any("handlers/ModelEMA" in record.message for record in caplog.records if "beginning" in record.message)
    trainer, _, ema = saved_job(tmp_path, leave_out=("ModelEMA",))
    trainer.run(DATA, max_epochs=3)
    assert ema.num_updates == 6


def test_exported_as_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the function and by the command, as a state_dict that the model loads; a misspelt name is answered."""
    trainer, model, ema = saved_job(tmp_path / "run")
    trainer.run(DATA, max_epochs=1)
    path, file = latest(tmp_path / "run"), tmp_path / "ema.pt"
    assert path is not None
    consolidate(path, file, entry="ModelEMA")
    assert bit_by_bit(torch.load(file)) == bit_by_bit(ema.state_dict()["model"])
    net().load_state_dict(torch.load(file))
    assert main(["consolidate", str(tmp_path / "run"), "--entry", "handlers/ModelEMA", "--output", str(tmp_path / "b.pt")]) == 0
    assert bit_by_bit(torch.load(tmp_path / "b.pt")) == bit_by_bit(torch.load(file)) != bit_by_bit(dict(model.state_dict()))
    with pytest.raises(CheckpointError, match="entry must be an object of"):
        consolidate(path, file, entry="ema")
    assert "the handlers/ModelEMA of" in capsys.readouterr().out


def test_exported_without_the_names_of_activation_checkpointing(tmp_path: Path) -> None:
    """Each weight stands there once, as the average and not as the weight, under the name that a plain model has."""
    model = net()
    model.last = checkpoint_wrapper(model.last)  # type: ignore[no-untyped-call]
    trainer, ema = make(model), ModelEMA(0.9)
    ema.attach(trainer)
    Checkpoint(tmp_path / "run").attach(trainer)
    trainer.run(DATA, max_epochs=1)
    consolidate(tmp_path / "run", tmp_path / "ema.pt", entry="ModelEMA")
    found = torch.load(tmp_path / "ema.pt")
    net().load_state_dict(found)
    assert bit_by_bit(found["last.weight"]) == bit_by_bit(ema.state_dict()["model"]["last.weight"])
    assert not torch.equal(found["last.weight"], model.last.weight)


# --- several ranks ---


def _statistics_on_this_rank(directory: str) -> Any:
    """Each rank has other data, so that the statistics differ, and evaluates the average; then the run is resumed."""
    rank, model = idist.get_rank(), net()
    ddp = nn.parallel.DistributedDataParallel(model)
    trainer, ema, evaluator = make(ddp), ModelEMA(0.9), create_evaluator(ddp, forward)
    ema.attach(trainer)
    ema.use_in(evaluator)
    Checkpoint(directory, asynchronous=False).attach(trainer)
    trainer.run(DATA[rank::2], max_epochs=1)
    own = averaged(ema)["norm.running_mean"]
    metrics = [evaluator.run(DATA[rank::2]).metrics["loss"], evaluator.run(DATA[1 - rank :: 2]).metrics["loss"]]
    with CheckpointReader(latest(directory)) as reader:  # type: ignore[arg-type]
        saved = ["handlers/ModelEMA" in reader.names(written_by) for written_by in (0, 1)]
    return own.tolist(), metrics, saved, bit_by_bit(averaged(ema))


@pytest.mark.slow
def test_two_ranks_evaluate_one_average(tmp_path: Path) -> None:
    """The statistics of rank 0 count on both, as they do for the model; the checkpoint has the average once."""
    (first, metrics, saved, state), (second, other_metrics, _, other_state) = run_ranks(_statistics_on_this_rank, str(tmp_path))
    assert first != second
    assert metrics == other_metrics
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-12)
    assert saved == [True, False]
    assert state == other_state


def _sharded_on_this_rank(directory: str) -> Any:
    model = cuts.linear()
    fully_shard(model, mesh=init_device_mesh("cpu", (idist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=cuts.LEARNING_RATE)
    trainer, ema = create_trainer(model, optimizer, cuts.forward), ModelEMA(0.9)
    evaluator = create_evaluator(model, cuts.forward)
    ema.use_in(evaluator)
    ema.attach(trainer)
    Validation(evaluator, cuts.shard([[8], [8]])).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    Checkpoint(directory, asynchronous=False).attach(trainer)
    trainer.run(cuts.shard([[8] * 4, [8] * 4]), max_epochs=1)
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in averaged(ema).items()}
    with pytest.raises(ValueError, match="device must be left out for a sharded model"):
        ModelEMA(device="cpu").attach(trainer)
    return {name: value.tolist() for name, value in whole.items()}, evaluator.state.metrics["loss"]


@pytest.mark.slow
def test_shards_are_averaged_as_the_whole(tmp_path: Path) -> None:
    """Two ranks with a sharded model: the average, its score and its file are those of one process with all the data."""
    outcomes = run_ranks(_sharded_on_this_rank, str(tmp_path))
    model, data = cuts.linear(), cuts.samples()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=cuts.LEARNING_RATE), cuts.forward)
    ema, evaluator = ModelEMA(0.9), create_evaluator(model, cuts.forward)
    ema.attach(trainer)
    shares = [cuts.cut(data, [8] * 4), cuts.cut(data, [8] * 4, start=32)]
    trainer.run([tuple(map(torch.cat, zip(*pair, strict=True))) for pair in zip(*shares, strict=True)], max_epochs=1)
    ema.use_in(evaluator)
    loss = evaluator.run([*cuts.cut(data, [8]), *cuts.cut(data, [8], start=8)]).metrics["loss"]

    consolidate(latest(tmp_path), tmp_path / "ema.pt", entry="ModelEMA")  # type: ignore[arg-type]
    for name, expected in averaged(ema).items():
        for state, found in outcomes:
            torch.testing.assert_close(torch.tensor(state[name], dtype=torch.float64), expected, rtol=1e-12, atol=1e-12)
            assert found == pytest.approx(loss, rel=1e-12)
        torch.testing.assert_close(torch.load(tmp_path / "ema.pt")[name], expected, rtol=1e-12, atol=1e-12)


# --- mistakes ---


MISTAKES: dict[str, Mistake] = {
    "one": (ValueError, "decay must be less than 1, got 1.0", lambda: ModelEMA(1.0)),
    "negative": (ValueError, "decay must be at least 0", lambda: ModelEMA(-0.1)),
    "text": (TypeError, "decay must be a number", lambda: ModelEMA("0.9")),  # type: ignore[arg-type]
    "warm-up": (TypeError, "warm_up must be True or False", lambda: ModelEMA(warm_up=2)),  # type: ignore[arg-type]
    "device": (TypeError, "device must be a device of torch such as 'cpu', got 'gpu'", lambda: ModelEMA(device="gpu")),
    "evaluator": (TypeError, "evaluator must be what create_evaluator", lambda: ModelEMA().use_in(make(net()))),  # type: ignore[arg-type]
    "unattached": (RuntimeError, r"attach\(trainer\) must be called first", lambda: ModelEMA().state_dict()),
    "unattached state": (
        RuntimeError,
        r"attach\(trainer\) must be called first",
        lambda: ModelEMA().load_state_dict({"num_updates": 1, "model": {}}),
    ),
    "other": (ValueError, "got one of another model", lambda: evaluate_another()),
    "state": (ValueError, "state_dict must be of the same model", lambda: load_another()),
}


def evaluate_another() -> None:
    ema, other = ModelEMA(), net()
    ema.attach(make(net()))
    evaluator = create_evaluator(other, forward)
    ema.use_in(evaluator)
    evaluator.run(DATA)


def load_another() -> None:
    ema = ModelEMA()
    ema.attach(make(net()))
    ema.load_state_dict({"num_updates": 1, "model": nn.Linear(3, 4).state_dict()})


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes(name: str) -> None:
    """Each is answered in one line."""
    assert_one_line(MISTAKES[name])


def test_a_schedule_that_gives_nonsense() -> None:
    """The value is refused in the update that would have used it."""
    trainer = make(net())
    ModelEMA(lambda number: 2.0 - number).attach(trainer)
    with pytest.raises(ValueError, match=r"decay must be less than 1, got 1\.0"):
        trainer.run(DATA)
