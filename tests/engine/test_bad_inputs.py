"""Mistakes: each is answered in one line that names what was given, what is wrong with it and what to do instead."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from ignite.engine import Events
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from ignite_train import (
    DeepSpeedLossScaling,
    FairseqLossScaling,
    ForwardContractError,
    ForwardOutput,
    NoGradientError,
    NoLossScaling,
    ResumableLoader,
    ShardedSampler,
    StaticLossScaling,
    TokenBudgetSampler,
    TorchLossScaling,
    TrainEvents,
    UpdateOptions,
    create_evaluator,
    create_supervised_trainer,
    create_trainer,
    handlers,
)
from ignite_train.handlers import (
    LearningRateSchedule,
    MinLearningRate,
    ProgressLog,
    TensorBoard,
    TimeLimit,
    TrainingMetrics,
    Validation,
)
from ignite_train.model.precision import Precision
from update_options import with_options


class Case:
    """One mistake: how to make it, the error it is answered with, and what the message must say."""

    def __init__(self, name: str, make: Any, error: type[Exception], *says: str) -> None:
        self.name, self.make, self.error, self.says = name, make, error, says


def cases(*given: Case) -> Any:
    """Parametrises a test by mistakes."""
    return pytest.mark.parametrize("case", given, ids=lambda case: case.name)


@contextlib.contextmanager
def answered(case: Case) -> Iterator[None]:
    """Expects the error of the case, in one line of a length that can be read, with all that it must say."""
    with pytest.raises(case.error) as raised:
        yield
    message = str(raised.value)
    assert "\n" not in message
    assert 20 < len(message) < 300
    for part in case.says:
        assert part in message, f"{part!r} is missing in: {message}"


class Calls:
    """A `forward` that counts how often it was called."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, model: nn.Module, _micro_batch: Any) -> torch.Tensor:
        self.number += 1
        return model(torch.ones(1, 2)).sum()


def linear() -> nn.Linear:
    return nn.Linear(2, 1)


def adapted(change: Callable[[nn.Module], Any]) -> dict[str, Any]:
    """Arguments with a model that was changed before its optimizer was built."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": change(model), "optimizer": optimizer}


def arguments(**changes: Any) -> dict[str, Any]:
    """Good arguments for `create_trainer`, but for the changes."""
    model = changes.get("model", linear())
    good = {"model": model, "forward": Calls(), "optimizer": None}
    if "optimizer" not in changes:
        parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
        good["optimizer"] = torch.optim.SGD(parameters or [nn.Parameter(torch.zeros(1))], lr=0.1)
    return good | changes


def trainer_with(forward: Any = None, **changes: Any) -> Any:
    return create_trainer(**with_options(**arguments(forward=forward or Calls(), **changes)))


# --- construction ----------------------------------------------------------------------------------------------------------


def sharing_one() -> dict[str, Any]:
    model = nn.Sequential(linear(), linear())
    return {"model": model, "optimizer": torch.optim.SGD(model[0].parameters(), lr=0.1)}


def several(name: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """A model of two layers, and what `name` makes of the optimizers of both."""
    model = nn.Sequential(linear(), linear())
    return {"model": model, "optimizer": name(*(torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model))}


def duplicate() -> dict[str, Any]:
    """A model, and an optimizer that has its weight twice."""
    model = linear()
    with warnings.catch_warnings(action="ignore"):  # torch's own, which is all that it does about it
        return {"model": model, "optimizer": torch.optim.SGD([model.weight, model.weight, model.bias], lr=0.1)}


def sparse(kind: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """An embedding with sparse gradients and a layer with dense ones, and an optimizer over both."""
    model = nn.Sequential(nn.Embedding(3, 2, sparse=True), linear())
    return {"model": model, "optimizer": kind(list(model.parameters()), lr=0.1, **options)}


class Relative(torch.optim.Optimizer):
    """Computes its rate itself, as Adafactor may."""

    def __init__(self, parameters: Any, **defaults: Any) -> None:
        super().__init__(parameters, defaults)

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Makes steps of a hundredth of the gradient."""
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(0.01 * parameter.grad)


def relative(**defaults: Any) -> dict[str, Any]:
    """A model and such an optimizer."""
    model = linear()
    return {"model": model, "optimizer": Relative(model.parameters(), **defaults)}


def scheduler() -> Any:
    return torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(linear().parameters(), lr=0.1))


def test_gradients_with_a_graph_are_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """On two ranks they are refused: what crosses the ranks has no graph."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr("ignite_train.ranks.collectives.world_size", lambda: 2)
    with pytest.raises(ValueError, match="create_graph must be False on several ranks"):
        create_trainer(model, optimizer, lambda model, x: model(x).sum(), **with_options(create_graph=True))


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_device_that_cannot_autocast_is_known_at_once(name: Any) -> None:
    """By torch's own error; in float32 nothing is asked of it."""
    assert Precision("fp32", torch.device("meta")).dtypes == []
    with pytest.raises(RuntimeError, match="autocast"):
        Precision(name, torch.device("meta"))


def test_a_rate_that_means_nothing_may_be_given() -> None:
    """As the message says where it is missing."""
    made = relative(lr=1.0)
    before = made["model"].weight.detach().clone()
    trainer = create_trainer(made["model"], made["optimizer"], lambda model, x: model(x).sum())
    assert trainer.run([torch.ones(1, 2)]).update_output.learning_rates == (1.0,)
    torch.testing.assert_close(made["model"].weight.detach(), before - 0.01)


@cases(
    Case("model-none", {"model": None}, TypeError, "model", "torch.nn.Module", "None"),
    Case("model-class", {"model": nn.Linear}, TypeError, "model", "torch.nn.Module", "Linear"),
    Case("model-function", {"model": torch.relu}, TypeError, "model", "torch.nn.Module", "relu"),
    Case("model-list", {"model": [nn.Sequential(nn.ReLU())]}, TypeError, "model", "torch.nn.Module", "of type list"),
    Case("model-empty", {"model": nn.ReLU()}, ValueError, "model", "none", "requires_grad_(True)"),
    Case("model-frozen", {"model": linear().requires_grad_(False)}, ValueError, "model", "none", "requires_grad_(True)"),
    Case("model-meta", {"model": nn.Linear(2, 1, device="meta")}, ValueError, "model", "'weight'", "meta", "to_empty"),
    Case("model-lazy", {"model": nn.LazyLinear(1)}, ValueError, "model", "'weight'", "lazy", "run one batch"),
    Case("model-float16", {"model": linear().half()}, ValueError, "model", "'weight'", "float16", "precision='fp16'"),
    Case("model-data-parallel", adapted(nn.DataParallel), TypeError, "model", "DataParallel", "one process for each device"),
    Case("optimizer-duplicate", duplicate(), ValueError, "optimizer", "'weight' twice in optimizer", "leave it out"),
    Case("sparse-by-adamw", sparse(torch.optim.AdamW), ValueError, "optimizer", "'0.weight'", "AdamW", "SparseAdam"),
    Case(
        "sparse-fused", sparse(torch.optim.SGD, fused=True), ValueError, "optimizer", "'0.weight'", "fused=True", "SparseAdam"
    ),
    Case("sparse-decay", sparse(torch.optim.SGD, weight_decay=0.1), ValueError, "optimizer", "'0.weight'", "weight_decay"),
    Case("dense-by-sparse-adam", sparse(torch.optim.SparseAdam), ValueError, "optimizer", "dense gradients", "[adamw, Sparse"),
    Case("optimizer-none", {"optimizer": None}, TypeError, "optimizer", "torch.optim.Optimizer", "None"),
    Case("optimizer-class", {"optimizer": torch.optim.SGD}, TypeError, "optimizer", "torch.optim.Optimizer", "SGD"),
    Case("optimizer-is-a-model", {"optimizer": nn.Sequential(linear(), linear())}, TypeError, "optimizer", "type Sequential"),
    Case("optimizer-is-a-schedule", {"optimizer": scheduler()}, TypeError, "optimizer", "torch.optim.Optimizer", "ConstantLR"),
    Case(
        "optimizer-of-another-model",
        {"optimizer": torch.optim.SGD(nn.Linear(7, 3).parameters())},
        ValueError,
        "optimizer",
        "model",
        "(3, 7)",
        "param_groups[0]",
        "build the optimizer from model.parameters()",
        "nn.ModuleDict(",
    ),
    Case("rate-missing", relative(), ValueError, "optimizer", "learning rate", "none in param_groups[0]", "['lr'], to 1.0 if"),
    Case("rate-none", relative(lr=None), ValueError, "optimizer", "learning rate", "none in param_groups[0]", "to 1.0 if"),
    Case("optimizers-empty", {"optimizer": []}, ValueError, "optimizer", "at least one", "none"),
    Case("optimizers-not", {"optimizer": [None]}, TypeError, "optimizer[0]", "torch.optim.Optimizer", "None"),
    Case("optimizers-number", several(lambda one, other: {1: one}), ValueError, "optimizer", "strings", "got 1"),
    Case("optimizers-slash", several(lambda one, other: {"a/b": one}), ValueError, "optimizer", "strings", "'a/b'"),
    Case("optimizers-twice", several(lambda one, other: [one, one]), ValueError, "optimizer", "once", "twice"),
    Case(
        "optimizers-overlap",
        several(lambda one, other: {"one": one, "other": torch.optim.SGD(one.param_groups[0]["params"], lr=0.1)}),
        ValueError,
        "optimizer",
        "'0.weight' in optimizer['one'] and in optimizer['other']",
        "leave it out",
    ),
    Case("optimizers-incomplete", several(lambda one, other: {"one": one}), ValueError, "optimizer", "'1.weight'", "1 more"),
    Case("max-norm-of-one", {"max_grad_norm": {"one": 1.0}}, ValueError, "max_grad_norm", "a number, or", "optimizer={"),
    Case(
        "max-norm-misspelt",
        several(lambda one, other: {"one": one, "other": other}) | {"max_grad_norm": {"on": 1.0}},
        ValueError,
        "max_grad_norm",
        "'on'",
        "did you mean 'one'",
    ),
    Case(
        "max-norm-of-one-0",
        several(lambda one, other: {"one": one, "other": other}) | {"max_grad_norm": {"one": 0}},
        ValueError,
        "max_grad_norm['one']",
        "greater than 0",
    ),
    Case(
        "closure-of-several",
        several(lambda one, other: [one, other]) | {"closure": True},
        ValueError,
        "closure",
        "2 optimizers",
        "one optimizer over all",
    ),
    Case("optimizer-incomplete", sharing_one(), ValueError, "optimizer", "'1.weight'", "1 more", "requires_grad_(False)"),
    Case(
        "optimizer-lbfgs",
        {"optimizer": torch.optim.LBFGS(linear().parameters())},
        TypeError,
        "optimizer",
        "LBFGS",
        "closure=True",
    ),
    Case("forward-none", {"forward": None}, TypeError, "forward", "forward(model, micro_batch)", "None"),
    Case("forward-of-one", {"forward": lambda batch: 0}, TypeError, "forward", "forward(model, micro_batch)", "(batch)"),
    Case("forward-string", {"forward": "mean"}, TypeError, "forward", "forward(model, micro_batch)", "'mean'"),
    Case("accumulation-0", {"accumulation_steps": 0}, ValueError, "accumulation_steps", "at least 1", "0"),
    Case("accumulation--1", {"accumulation_steps": -1}, ValueError, "accumulation_steps", "at least 1", "-1"),
    Case("accumulation-2.5", {"accumulation_steps": 2.5}, TypeError, "accumulation_steps", "positive integer", "2.5"),
    Case("accumulation-true", {"accumulation_steps": True}, TypeError, "accumulation_steps", "positive integer", "True"),
    Case("accumulation-string", {"accumulation_steps": "4"}, TypeError, "accumulation_steps", "positive integer", "'4'"),
    Case("accumulation-bytes", {"accumulation_steps": b"4"}, TypeError, "accumulation_steps", "positive integer", "b'4'"),
    Case("accumulation-none", {"accumulation_steps": None}, TypeError, "accumulation_steps", "positive integer", "None"),
    Case("accumulation-[]", {"accumulation_steps": []}, ValueError, "accumulation_steps", "first epoch", "empty"),
    Case("accumulation-[0]", {"accumulation_steps": [0]}, ValueError, "accumulation_steps[0]", "at least 1", "0"),
    Case("accumulation-[2,1.5]", {"accumulation_steps": [2, 1.5]}, TypeError, "accumulation_steps[1]", "1.5"),
    Case("accumulation-[true]", {"accumulation_steps": [True]}, TypeError, "accumulation_steps[0]", "True"),
    Case("accumulation-tensor", {"accumulation_steps": torch.ones(2, 2)}, TypeError, "accumulation_steps", "Tensor"),
    Case("max-norm-0", {"max_grad_norm": 0}, ValueError, "max_grad_norm", "greater than 0", "got 0"),
    Case("max-norm--1", {"max_grad_norm": -1}, ValueError, "max_grad_norm", "greater than 0", "-1"),
    Case("max-norm-nan", {"max_grad_norm": math.nan}, ValueError, "max_grad_norm", "finite", "nan"),
    Case("max-norm-inf", {"max_grad_norm": math.inf}, ValueError, "max_grad_norm", "finite", "inf"),
    Case("max-norm-string", {"max_grad_norm": "1"}, TypeError, "max_grad_norm", "a number", "'1'"),
    Case("max-norm-true", {"max_grad_norm": True}, TypeError, "max_grad_norm", "a number", "True"),
    Case("precision-float16", {"precision": "float16"}, ValueError, "precision", "'float16'", "did you mean 'fp16'"),
    Case("precision-bfloat16", {"precision": "bfloat16"}, ValueError, "precision", "'bfloat16'", "did you mean 'bf16'"),
    Case("precision-FP32", {"precision": "FP32"}, ValueError, "precision", "'FP32'", "did you mean 'fp32'"),
    Case("precision-16", {"precision": 16}, ValueError, "precision", "16", "'fp32', 'bf16', 'fp16'"),
    Case("precision-dtype", {"precision": torch.bfloat16}, ValueError, "precision", "torch.bfloat16", "'bf16'"),
    Case("precision-none", {"precision": None}, ValueError, "precision", "None", "'fp32', 'bf16', 'fp16'"),
    Case("non-finite-ignore", {"on_nonfinite": "ignore"}, ValueError, "on_nonfinite", "'raise', 'skip'", "'ignore'"),
    Case("non-finite-misspelt", {"on_nonfinite": "rase"}, ValueError, "on_nonfinite", "'rase'", "did you mean 'raise'"),
    Case("scaling-grad-scaler", {"loss_scaling": torch.amp.GradScaler("cpu")}, TypeError, "loss_scaling", "TorchLossScaling()"),
    Case("scaling-string", {"loss_scaling": "dynamic"}, TypeError, "loss_scaling", "TorchLossScaling()", "'dynamic'"),
    Case("scaling-number", {"loss_scaling": 65536}, TypeError, "loss_scaling", "TorchLossScaling()", "65536"),
    Case("scaling-dict", {"loss_scaling": {"scale": 2.0}}, TypeError, "loss_scaling", "TorchLossScaling()", "'scale'"),
    Case("scaling-class", {"loss_scaling": TorchLossScaling}, TypeError, "loss_scaling", "TorchLossScaling()", "class"),
    Case("scaling-no-class", {"loss_scaling": NoLossScaling}, TypeError, "loss_scaling", "TorchLossScaling()", "class"),
)
def test_arguments_of_create_trainer(case):
    """A bad argument is refused when the trainer is made, before any data is seen."""
    given = arguments(**case.make)
    with answered(case):
        create_trainer(**with_options(**given))
    assert not isinstance(given["forward"], Calls) or given["forward"].number == 0


@cases(
    Case("reduction", {"reduction": "dpp"}, ValueError, "reduction", "'dpp'", "did you mean 'ddp'"),
    Case("uneven", {"uneven": "short"}, ValueError, "uneven", "'short'", "did you mean 'shortest'"),
    Case("on-nonfinite", {"on_nonfinite": "ignore"}, ValueError, "on_nonfinite", "'raise', 'skip'", "'ignore'"),
    Case("out-of-memory", {"on_out_of_memory": "spilt"}, ValueError, "on_out_of_memory", "'spilt'", "did you mean 'split'"),
    Case("give-up-0", {"give_up_after": 0}, ValueError, "give_up_after", "at least 1", "0"),
    Case("give-up-true", {"give_up_after": True}, TypeError, "give_up_after", "a positive integer", "True"),
    Case("closure", {"closure": "again"}, ValueError, "closure", "'replay'", "'again'"),
    Case("closure-none", {"closure": None}, ValueError, "closure", "'replay'", "None"),
    Case("closure-oom", {"closure": True, "on_out_of_memory": "skip"}, ValueError, "on_out_of_memory", "'raise'", "'skip'"),
    Case("none-is-empty", {"none_is_empty": 1}, TypeError, "none_is_empty", "True or False", "1 of type int"),
    Case("retain-graph", {"retain_graph": 1}, TypeError, "retain_graph", "True or False", "1 of type int"),
    Case("create-graph", {"create_graph": None}, TypeError, "create_graph", "True or False", "None"),
    Case("compiled-autograd", {"compiled_autograd": "yes"}, TypeError, "compiled_autograd", "True or False", "'yes'"),
)
def test_settings_of_update_options(case):
    """A bad setting is refused where it is written, before there is a trainer."""
    with answered(case):
        UpdateOptions(**case.make)


@cases(
    Case("mapping", {"options": {"uneven": "all"}}, TypeError, "options", "UpdateOptions(...)", "'uneven'"),
    Case("class", {"options": UpdateOptions}, TypeError, "options", "UpdateOptions(...)", "class"),
    Case("transform", {"output_transform": 3}, TypeError, "output_transform", "a function", "3 of type int"),
    Case(
        "transform-of-two",
        {"output_transform": lambda x, y: y},
        TypeError,
        "output_transform",
        "callable as output_transform(",
        "(x, y)",
    ),
    Case("misplaced", {"on_nonfinite": "skip"}, TypeError, "on_nonfinite", "options=UpdateOptions(on_nonfinite=...)"),
    Case("unknown", {"on_nonfinit": "skip"}, TypeError, "on_nonfinit"),
)
@pytest.mark.parametrize("supervises", [False, True])
def test_where_settings_belong(case, supervises):
    """A rare setting that is passed as an argument of its own is answered with where it belongs, by both functions."""
    given = arguments()
    with answered(case):
        if supervises:
            create_supervised_trainer(given["model"], given["optimizer"], nn.MSELoss(), **case.make)
        else:
            create_trainer(**given, **case.make)


def supervised(**changes: Any) -> Callable[[], Any]:
    def make() -> Any:
        model = linear()
        given = {"loss_fn": nn.MSELoss()} | changes
        return create_supervised_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), **with_options(**given))

    return make


@cases(
    Case("output-transform", supervised(output_transform="loss"), TypeError, "output_transform", "a function", "'loss'"),
    Case("deterministic", supervised(deterministic=1), TypeError, "deterministic", "True or False", "1 of type int"),
    Case("scaler", supervised(scaler=torch.amp.GradScaler("cpu")), TypeError, "scaler", "GradScaler", "loss_scaling="),
    Case("amp-apex", supervised(amp_mode="apex"), ValueError, "amp_mode", "'apex'", "'amp'"),
    Case("amp-beside", supervised(amp_mode="amp", precision="bf16"), ValueError, "amp_mode", "precision='bf16'", "one of them"),
    Case("loss-none", supervised(loss_fn=None), TypeError, "loss_fn", "loss_fn(y_pred, y)", "None"),
    Case("accumulation", supervised(gradient_accumulation_steps=0), ValueError, "accumulation_steps", "at least 1", "0"),
    Case("precision", supervised(precision="half"), ValueError, "precision", "'half'", "'fp16'"),
)
def test_arguments_of_create_supervised_trainer(case):
    """What Ignite's function of the name takes and this one cannot honour is refused, with what to write instead."""
    with answered(case):
        case.make()


@cases(
    Case("static-0", lambda: StaticLossScaling(0), ValueError, "scale", "greater than 0", "0"),
    Case("static-nan", lambda: StaticLossScaling(math.nan), ValueError, "scale", "finite", "nan"),
    Case("static-string", lambda: StaticLossScaling("x"), TypeError, "scale", "a number", "'x'"),
    Case("torch-init-0", lambda: TorchLossScaling(0), ValueError, "init_scale", "greater than 0", "0"),
    Case("torch-init--1", lambda: TorchLossScaling(-1.0), ValueError, "init_scale", "greater than 0", "-1"),
    Case("torch-init-inf", lambda: TorchLossScaling(math.inf), ValueError, "init_scale", "finite", "inf"),
    Case("torch-init-true", lambda: TorchLossScaling(True), TypeError, "init_scale", "a number", "True"),
    Case("torch-init-string", lambda: TorchLossScaling("65536"), TypeError, "init_scale", "a number", "'65536'"),
    Case("torch-growth-1", lambda: TorchLossScaling(growth_factor=1), ValueError, "growth_factor", "greater than 1", "got 1"),
    Case("torch-backoff-0", lambda: TorchLossScaling(backoff_factor=0), ValueError, "backoff_factor", "greater than 0", "0"),
    Case("torch-backoff-1", lambda: TorchLossScaling(backoff_factor=1), ValueError, "backoff_factor", "below 1", "got 1"),
    Case("torch-interval-0", lambda: TorchLossScaling(growth_interval=0), ValueError, "growth_interval", "at least 1", "0"),
    Case("torch-interval-1.5", lambda: TorchLossScaling(growth_interval=1.5), TypeError, "growth_interval", "integer", "1.5"),
    Case("torch-min-0", lambda: TorchLossScaling(min_scale=0), ValueError, "min_scale", "greater than 0", "0"),
    Case("torch-max-nan", lambda: TorchLossScaling(max_scale=math.nan), ValueError, "max_scale", "finite", "nan"),
    Case("torch-bounds", lambda: TorchLossScaling(8, max_scale=4), ValueError, "init_scale", "max_scale=4", "got 8"),
    Case("torch-floor", lambda: TorchLossScaling(on_floor="skip"), ValueError, "on_floor", "'raise', 'hold'", "'skip'"),
    Case("fairseq-window-0", lambda: FairseqLossScaling(scale_window=0), ValueError, "scale_window", "at least 1", "0"),
    Case("fairseq-tolerance--1", lambda: FairseqLossScaling(tolerance=-1), ValueError, "tolerance", "at least 0", "-1"),
    Case("fairseq-tolerance-nan", lambda: FairseqLossScaling(tolerance=math.nan), ValueError, "tolerance", "finite", "nan"),
    Case("fairseq-threshold-0", lambda: FairseqLossScaling(threshold=0), ValueError, "threshold", "greater than 0", "0"),
    Case("deepspeed-window-0", lambda: DeepSpeedLossScaling(scale_window=0), ValueError, "scale_window", "at least 1", "0"),
    Case("deepspeed-hysteresis-0", lambda: DeepSpeedLossScaling(hysteresis=0), ValueError, "hysteresis", "at least 1", "0"),
    Case("deepspeed-min-2", lambda: DeepSpeedLossScaling(1.0, min_scale=2.0), ValueError, "init_scale", "min_scale=2", "got 1"),
)
def test_arguments_of_loss_scaling(case):
    """A bad argument of a loss-scaling policy is refused under its own name."""
    with answered(case):
        case.make()


# --- forward ---------------------------------------------------------------------------------------------------------------


def loss(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(1, 2)).sum()


@cases(
    Case("none", lambda model: None, ForwardContractError, "forward", "None", "return statement", "ForwardOutput"),
    Case("int", lambda model: 3, ForwardContractError, "forward", "3 of type int", "ForwardOutput"),
    Case("float", lambda model: loss(model).item(), ForwardContractError, "forward", "of type float", "ForwardOutput"),
    Case("list", lambda model: [loss(model), 3], ForwardContractError, "forward", "of type list", "ForwardOutput"),
    Case("dict", lambda model: {"loss": loss(model)}, ForwardContractError, "forward", "of type dict", "ForwardOutput"),
    Case(
        "list-of-matrices", lambda model: [torch.ones(2, 2)], ForwardContractError, "forward", "of type list", "ForwardOutput"
    ),
    Case("empty-tuple", lambda model: (), ForwardContractError, "forward", "()", "ForwardOutput"),
    Case(
        "tuple-of-5",
        lambda model: (loss(model), 1, {}, 2, 3),
        ForwardContractError,
        "forward",
        "of type tuple",
        "ForwardOutput",
    ),
    Case("number-first", lambda model: (3, loss(model)), ForwardContractError, "loss", "3 of type int", "not a tensor"),
    Case("vector", lambda model: model(torch.ones(4, 2)), ForwardContractError, "loss", "(4, 1)", ".sum()", ".mean()"),
    Case("nothing", lambda model: loss(model)[None][:0], ForwardContractError, "loss", "(0,)", ".sum()"),
    Case("integer", lambda model: torch.tensor(3), ForwardContractError, "loss", "torch.int64", "floating-point"),
    Case("complex", lambda model: loss(model) * 1j, ForwardContractError, "loss", "torch.complex64", "floating-point"),
    Case("detached", lambda model: loss(model).detach(), ForwardContractError, "loss", "no graph", ".detach()"),
    Case("foreign", lambda model: torch.ones((), requires_grad=True) * 2, NoGradientError, "no gradient", "loss", "graph"),
    Case("size-negative", lambda model: (loss(model), -1), ForwardContractError, "sample_size", "at least 0", "-1"),
    Case("size-nan", lambda model: (loss(model), math.nan), ForwardContractError, "sample_size", "finite", "nan"),
    Case("size-inf", lambda model: (loss(model), math.inf), ForwardContractError, "sample_size", "finite", "inf"),
    Case("size-numpy-negative", lambda model: (loss(model), np.float32(-4)), ForwardContractError, "sample_size", "-4"),
    Case("size-numpy-nan", lambda model: (loss(model), np.float32("nan")), ForwardContractError, "sample_size", "nan"),
    Case("size-string", lambda model: (loss(model), "8"), ForwardContractError, "sample_size", "a number", "'8'"),
    Case("size-none", lambda model: (loss(model), None), ForwardContractError, "sample_size", "a number", "None"),
    Case("size-vector", lambda model: (loss(model), torch.ones(3)), ForwardContractError, "sample_size", "one number", "(3,)"),
    Case("size-tensor-negative", lambda model: (loss(model), torch.tensor(-4)), ForwardContractError, "sample_size", "-4"),
    Case("size-tensor-nan", lambda model: (loss(model), torch.tensor(math.nan)), ForwardContractError, "sample_size", "nan"),
    Case("logs-list", lambda model: (loss(model), 1, [1]), ForwardContractError, "logs", "mapping", "[1] of type list"),
    Case("logs-string", lambda model: (loss(model), 1, {"acc": "9"}), ForwardContractError, "logs['acc']", "a number", "'9'"),
    Case("logs-none", lambda model: (loss(model), 1, {"acc": None}), ForwardContractError, "logs['acc']", "a number", "None"),
    Case("logs-vector", lambda model: (loss(model), 1, {"a": torch.ones(2)}), ForwardContractError, "logs['a']", "(2,)"),
    Case("logs-loss", lambda model: (loss(model), 1, {"a": 1, "loss": 1}), ForwardContractError, "logs", "'loss'", "'my_loss'"),
    Case("logs-rate", lambda model: (loss(model), 1, {"learning_rate": 1}), ForwardContractError, "logs", "'learning_rate'"),
    Case("logs-group", lambda model: (loss(model), 1, {"learning_rate/0": 1}), ForwardContractError, "logs", "learning_rate/0"),
    Case("logs-train-loss", lambda m: (loss(m), 1, {"train/loss": 1}), ForwardContractError, "logs", "'train/loss'", "leave"),
    Case("logs-train-term", lambda m: (loss(m), 1, {"train/loss/a": 1}), ForwardContractError, "logs", "'my_train_loss_a'"),
    Case("logs-norm", lambda m: (loss(m), 1, {"optimizer/grad_norm": 1}), ForwardContractError, "logs", "optimizer/grad_norm"),
    Case("logs-rates", lambda m: (loss(m), 1, {"optimizer/learning_rate/0": 1}), ForwardContractError, "logs", "rate/0"),
    Case("logs-key", lambda model: (loss(model), 1, {7: 1}), ForwardContractError, "logs", "strings", "7"),
)
def test_what_forward_returns(case):
    """What `forward` may not return is refused at its first micro-batch, with what to return; nothing moves."""
    model = linear()
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = create_trainer(model, optimizer, lambda model, _: case.make(model))
    with answered(case):
        trainer.run([0, 0])
    assert all(torch.equal(left, right) for left, right in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not optimizer.state
    assert (trainer.state.iteration, trainer.state.num_micro_batches) == (0, 0)


@cases(
    Case("none", lambda model: None, ForwardContractError, "forward", "None", "ForwardOutput"),
    Case("string", lambda model: "loss", ForwardContractError, "forward", "'loss'", "ForwardOutput"),
    Case("size-negative", lambda model: (loss(model), -1), ForwardContractError, "sample_size", "at least 0", "-1"),
    Case("logs-loss", lambda model: (loss(model), 1, {"loss": 1}), ForwardContractError, "logs", "'loss'", "'my_loss'"),
    Case("no-samples", lambda model: (loss(model), 0), ValueError, "data", "at least one sample", "0"),
)
def test_what_forward_returns_to_the_evaluator(case):
    """The evaluator asks the same of `forward`, and puts the model's mode back when it fails."""
    model = linear()
    evaluator = create_evaluator(model, lambda model, _: case.make(model))
    with answered(case):
        evaluator.run([0, 0])
    assert model.training


# --- run -------------------------------------------------------------------------------------------------------------------


def limits(name: str) -> list[Case]:
    return [
        Case(f"{name}-0", {name: 0}, ValueError, name, "at least 1", "0"),
        Case(f"{name}--1", {name: -1}, ValueError, name, "at least 1", "-1"),
        Case(f"{name}-1.5", {name: 1.5}, TypeError, name, "positive integer", "1.5"),
        Case(f"{name}-string", {name: "3"}, TypeError, name, "positive integer", "'3'"),
        Case(f"{name}-true", {name: True}, TypeError, name, "positive integer", "True"),
        Case(f"{name}-nan", {name: math.nan}, TypeError, name, "positive integer", "nan"),
        Case(f"{name}-tensor", {name: torch.ones(2, 2)}, TypeError, name, "positive integer", "Tensor"),
    ]


@cases(
    *limits("max_epochs"),
    *limits("max_iters"),
    Case("both", {"max_epochs": 2, "max_iters": 3}, ValueError, "max_epochs", "max_iters", "2", "3", "pass one"),
    Case("epoch-length", {"epoch_length": 0}, ValueError, "epoch_length", "0", "at least 1"),
    Case("data-none", {"data": None}, ValueError, "data", "loader", "None", "epoch_length"),
    Case("data-int", {"data": 5}, TypeError, "data", "loader", "5 of type int"),
    Case("data-string", {"data": "train.csv"}, TypeError, "data", "loader", "'train.csv'"),
    Case("data-dict", {"data": {"x": torch.ones(3, 3)}}, TypeError, "data", "loader", "of type dict"),
    Case("data-class", {"data": DataLoader}, TypeError, "data", "loader", "DataLoader"),
    Case("data-empty", {"data": []}, ValueError, "data", "at least one micro-batch", "none"),
    Case("data-empty-loader", {"data": DataLoader([])}, ValueError, "data", "at least one micro-batch", "none"),
    Case("data-exhausted", {"data": iter(())}, ValueError, "data", "at least one micro-batch", "none"),
    Case("data-iterator", {"data": iter([0]), "max_epochs": 2}, TypeError, "data", "2 times", "iterator", "DataLoader"),
    Case("data-none-inside", {"data": [0, None]}, TypeError, "loader", "None", "collate_fn", "none_is_empty=True"),
)
def test_arguments_of_run(case):
    """Bad limits and bad data are refused before the first micro-batch, and a good run afterwards is none the worse for it."""
    forward = Calls()
    trainer = trainer_with(forward, accumulation_steps=2)
    with answered(case):
        trainer.run(**{"data": [0], **case.make})
    assert forward.number == 0
    trainer.run([0, 0, 0])
    assert (trainer.state.epoch, trainer.state.iteration, trainer.state.max_epochs) == (1, 2, 1)


@cases(
    Case("0", lambda update: 0, ValueError, "accumulation_steps(1)", "at least 1", "0"),
    Case("none", lambda update: None, TypeError, "accumulation_steps(1)", "positive integer", "None"),
    Case("half", lambda update: update / 2, TypeError, "accumulation_steps(1)", "positive integer", "0.5"),
)
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_accumulation_steps_of_a_function(case, sized):
    """A function that gives no group size is refused by the update it was asked for, before that update's first forward."""
    forward = Calls()
    trainer = trainer_with(forward, accumulation_steps=case.make)
    with answered(case):
        trainer.run([0, 0] if sized else iter([0, 0]))
    assert forward.number == 0


def test_a_group_size_that_goes_wrong_later_is_known_at_once():
    """Over a loader with a length, a function that fails for a later update is asked, and refused, before the first."""
    forward = Calls()
    case = Case("later", None, ValueError, "accumulation_steps(3)", "at least 1", "-1")
    trainer = trainer_with(forward, accumulation_steps=lambda update: 2 - update if update > 2 else 1)
    with answered(case):
        trainer.run([0, 0, 0, 0])
    assert forward.number == 0


@cases(
    Case("set-data", lambda trainer: trainer.set_data(5), TypeError, "data", "loader", "5"),
    Case(
        "event-misspelt",
        lambda trainer: trainer.add_event_handler("STEP_COMPLETD", print),
        ValueError,
        "event",
        "'STEP_COMPLETD'",
        "did you mean 'STEP_COMPLETED'",
    ),
    Case(
        "event-lower-case",
        lambda trainer: trainer.add_event_handler("epoch_complete", print),
        ValueError,
        "event",
        "'epoch_complete'",
        "did you mean 'EPOCH_COMPLETED'",
    ),
    *(
        Case(
            f"handler-{name}",
            lambda trainer, make=make: make(trainer),
            TypeError,
            "handler",
            "TrainingMetrics",
            "use TrainingMetrics(...).attach(trainer)",
        )
        for name, make in {
            "put-on-an-event": lambda trainer: trainer.add_event_handler(Events.STARTED, TrainingMetrics()),
            "class": lambda trainer: trainer.add_event_handler(Events.STARTED, TrainingMetrics),
            "decorated": lambda trainer: trainer.on(Events.STARTED)(TrainingMetrics()),
            "put-first": lambda trainer: trainer.prepend_event_handler(Events.STARTED, TrainingMetrics()),
            "put-last": lambda trainer: trainer.append_event_handler(Events.STARTED, TrainingMetrics()),
            "on-an-evaluator": lambda trainer: create_evaluator(linear(), Calls()).on(Events.STARTED)(TrainingMetrics()),
        }.items()
    ),
    Case(
        "scheduler-step",
        lambda trainer: trainer.add_event_handler(TrainEvents.STEP_COMPLETED, scheduler().step),
        TypeError,
        "handler",
        "ConstantLR.step",
        "LearningRateSchedule(scheduler).attach(trainer)",
    ),
    Case(
        "scheduler",
        lambda trainer: trainer.add_event_handler(TrainEvents.STEP_COMPLETED, scheduler()),
        TypeError,
        "handler",
        "of type ConstantLR",
        "LearningRateSchedule(scheduler).attach(trainer)",
    ),
    *(
        Case(
            f"validation-of-{kind}",
            lambda trainer, of=of: Validation(of(trainer), [torch.ones(2, 2)]),
            TypeError,
            "evaluator must be what create_evaluator returned",
            says,
            "Validation(evaluator, loader)",
        )
        for kind, of, says in (
            ("a-trainer", lambda trainer: trainer, "of type Trainer"),
            ("data", lambda _: [1], "of type list"),
        )
    ),
    Case(
        "attached-to-an-evaluator",
        lambda trainer: ProgressLog().attach(create_evaluator(linear(), Calls())),
        TypeError,
        "trainer",
        "of type Evaluator",
        "attach(trainer, evaluator=...)",
    ),
    Case(
        "attached-the-wrong-way-round",
        lambda trainer: TrainingMetrics().attach(Events.EPOCH_COMPLETED, trainer),
        TypeError,
        "trainer",
        "EPOCH_COMPLETED",
        "attach(trainer, event)",
    ),
    Case(
        "attached-to-a-model", lambda trainer: TimeLimit(1).attach(linear()), TypeError, "trainer", "Linear", "create_trainer"
    ),
    Case(
        "evaluator-for-an-event",
        lambda trainer: TensorBoard("runs").attach(trainer, create_evaluator(linear(), Calls())),
        TypeError,
        "event",
        "of type Evaluator",
        "evaluator=",
    ),
    Case(
        "loader-for-an-evaluator",
        lambda trainer: ProgressLog().attach(trainer, evaluator=[1]),
        TypeError,
        "evaluator",
        "[1] of type list",
    ),
    Case(
        "schedule-of-another-optimizer",
        lambda trainer: LearningRateSchedule(scheduler()).attach(trainer),
        ValueError,
        "scheduler",
        "ConstantLR",
        "create_trainer was given",
    ),
    Case(
        "rates-of-another-optimizer",
        lambda trainer: MinLearningRate(torch.optim.SGD(linear().parameters()), minimum=0).attach(trainer),
        ValueError,
        "optimizer",
        "another SGD",
        "create_trainer was given",
    ),
    Case("rates-of-a-model", lambda trainer: MinLearningRate(linear(), minimum=0), TypeError, "optimizer", "Linear"),
    Case("directory-none", lambda trainer: TensorBoard(None), TypeError, "log_dir", "None"),
    Case("event-none", lambda trainer: trainer.add_event_handler(None, print), ValueError, "event", "None"),
    Case("event-fired", lambda trainer: trainer.fire_event("STEP_COMPLETE"), ValueError, "event", "'STEP_COMPLETE'", "did you"),
    Case("event-on", lambda trainer: trainer.on("nothing_like_it")(print), ValueError, "event", "'nothing_like_it'"),
    Case(
        "handler-none",
        lambda trainer: trainer.add_event_handler(Events.STARTED, None),
        TypeError,
        "handler",
        "callable",
        "None",
    ),
    Case(
        "handler-called",
        lambda trainer: trainer.add_event_handler(TrainEvents.STEP_COMPLETED, linear()(torch.ones(2, 2))),
        TypeError,
        "handler",
        "callable",
        "of type Tensor",
    ),
    Case(
        "handler-prepended",
        lambda trainer: trainer.prepend_event_handler(Events.STARTED, 7),
        TypeError,
        "handler",
        "callable",
        "7 of type int",
    ),
    Case(
        "handler-signature",
        lambda trainer: trainer.add_event_handler(Events.STARTED, lambda engine, batch, loss: None),
        ValueError,
        "handler",
        "['engine', 'batch', 'loss']",
    ),
)
def test_events_and_handlers(case):
    """A misspelt event is answered with the nearest one, and what cannot be called is no handler: when it is attached."""
    forward = Calls()
    trainer = trainer_with(forward)
    with answered(case):
        case.make(trainer)
    trainer.run([0])
    assert forward.number == 1


def test_each_handler_is_attached_by_itself():
    """All ready-made ones: put on an event they say what to call instead."""
    # The search for a learning rate is not attached, and its `attach` says so.
    named = [name for name in handlers.__all__ if name != "LearningRateFinder"]
    ready_made = [vars(handlers)[name] for name in named if "attach" in vars(vars(handlers)[name])]
    assert len(ready_made) >= 15
    trainer = trainer_with()
    for kind in ready_made:
        with pytest.raises(TypeError, match=rf"use {kind.__name__}\(\.\.\.\)\.attach\(trainer\)"):
            trainer.add_event_handler(Events.STARTED, kind.__new__(kind))


def test_a_handler_that_is_derived_from_a_ready_made_one_attaches():
    """Also where its own `attach` calls the `attach` of its class, and again in another handler."""

    class Metrics(TrainingMetrics):
        def attach(self, trainer: Any, event: Any = Events.ITERATION_COMPLETED) -> Any:
            super().attach(trainer, event)
            return trainer.add_event_handler(Events.COMPLETED, self)

    for trainer, metrics in ((trainer_with(), Metrics()), (trainer_with(), Metrics())):
        metrics.attach(trainer)
        assert "loss" in trainer.run([0, 0]).metrics
    with pytest.raises(TypeError, match=r"use Metrics\(\.\.\.\)\.attach"):
        trainer.add_event_handler(Events.STARTED, metrics)


@pytest.mark.parametrize(
    "build",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5),
        lambda o: torch.optim.lr_scheduler.ChainedScheduler([torch.optim.lr_scheduler.ConstantLR(o) for _ in range(2)]),
        lambda o: torch.optim.lr_scheduler.SequentialLR(o, [torch.optim.lr_scheduler.ConstantLR(o) for _ in range(2)], [3]),
    ],
    ids=["lambda", "chained", "sequential"],
)
def test_a_schedule_is_of_the_optimizer_that_steps(build):
    """Of the trainer's own, or of one that shares its groups with it; one of any other would do nothing."""
    given = arguments()
    trainer, optimizer = create_trainer(**with_options(**given)), given["optimizer"]
    part = torch.optim.SGD(given["model"].parameters(), lr=0.1)
    LearningRateSchedule(build(optimizer)).attach(trainer)
    with pytest.raises(ValueError, match="scheduler must be of the trainer's optimizer"):
        LearningRateSchedule(build(part)).attach(trainer)
    part.param_groups = optimizer.param_groups  # as of an optimizer that is made of others
    LearningRateSchedule(build(part)).attach(trainer)


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"x": torch.ones(2, 2), "y": torch.ones(2, 1)}, "keys ['x', 'y']"),
        ((torch.ones(2, 2), torch.ones(2, 1), torch.ones(2)), "a tuple of 3"),
        ([torch.ones(2, 2)], "a list of 1"),
        (torch.ones(2, 2), "a tensor of shape (2, 2)"),  # whose rows would be taken for x and y
    ],
    ids=["mapping", "triple", "single", "tensor"],
)
def test_a_supervised_trainer_says_what_it_takes(batch, says):
    """A micro-batch that is not a pair is refused before forward, each time, unless a prepare_batch makes one of it."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_supervised_trainer(model, optimizer, nn.MSELoss())
    for _ in range(2):
        with answered(Case("batch", None, TypeError, "pair (x, y)", says, "prepare_batch")):
            trainer.run([batch])
    prepared = create_supervised_trainer(
        model, optimizer, nn.MSELoss(), prepare_batch=lambda batch, device, non_blocking: (torch.ones(2, 2), torch.ones(2, 1))
    )
    assert prepared.run([batch]).num_steps == 1
    trainer.run([(torch.ones(2, 2), torch.ones(2, 1))] * 2, max_epochs=2)
    assert not trainer.has_handlers(TrainEvents.MICRO_BATCH_STARTED)


@pytest.mark.parametrize("bare", [True, False], ids=["factor-1", "factor-half"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_gradients_that_a_handler_dropped_make_no_step(bare, fused):
    """A step without gradients would move nothing and count."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    forward = (lambda m, b: m(b).mean()) if bare else (lambda m, b: (m(b).sum(), 2))
    trainer = create_trainer(model, optimizer, forward)
    trainer.add_event_handler(TrainEvents.GRADIENTS_READY, lambda: optimizer.zero_grad())
    with answered(Case("zero_grad", None, NoGradientError, "GRADIENTS_READY", "zero_grad()")):
        trainer.run([torch.ones(2, 2)])
    assert trainer.state.num_steps == 0


def changed(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda state: state | changes


def another_scale(state: dict[str, Any], in_a_row: Any = None, **changes: Any) -> dict[str, Any]:
    """With a loss scale that could be taken over, and something else that cannot."""
    update = {**state["update"], "in_a_row": in_a_row or {}}
    return state | {"update": update | {"loss_scaling": update["loss_scaling"] | {"scale": 4.0}}} | changes


@cases(
    Case("none", lambda state: None, TypeError, "state_dict", "None"),
    Case("list", lambda state: list(state), TypeError, "state_dict", "list"),
    Case("empty", lambda state: {}, ValueError, "state_dict", "without", "iteration", "num_steps"),
    Case("ignites", lambda state: {"iteration": -3, "epoch_length": 2, "max_epochs": 4}, ValueError, "iteration", "-3"),
    *(
        Case(
            f"without-{key}", lambda state, key=key: {k: v for k, v in state.items() if k != key}, ValueError, "state_dict", key
        )
        for key in (
            "iteration",
            "num_steps",
            "num_skipped",
            "num_micro_batches",
            "epochs_completed",
            "epoch_iteration",
            "update",
        )
    ),
    *(
        Case(f"{key}-{value}", changed(**{key: value}), (ValueError, TypeError), f"state_dict['{key}']", repr(value))
        for key in ("iteration", "num_steps", "num_skipped", "num_micro_batches", "epochs_completed", "epoch_iteration")
        for value in (-1, math.nan, 2.0, "3", None, True)
    ),
    *(
        Case(f"{key}-{value}", changed(**{key: value}), (ValueError, TypeError), key, repr(value))
        for key in ("max_epochs", "max_iters")
        for value in (0, -1, math.nan, "3", True)
    ),
    Case("update-empty", changed(update={}), ValueError, "state_dict['update']", "loss_scaling"),
    Case("update-none", changed(update=None), (ValueError, TypeError), "state_dict['update']", "None"),
    Case("carried", lambda state: another_scale(state, carried={"values": {}}), ValueError, "Carried", "devices"),
    Case("in-a-row", lambda state: another_scale(state, in_a_row={"was skipped": -1}), ValueError, "was skipped", "-1"),
    Case(
        "scaling",
        changed(update={"loss_scaling": {"scale": 8.0}, "in_a_row": {}}),
        ValueError,
        "TorchLossScaling",
        "good_updates",
        "scale",
    ),
)
def test_damaged_states(case):
    """A state that is damaged or another's is refused, naming the entry, and nothing of it is taken over."""
    trainer = trainer_with(precision="fp16")
    trainer.run([0, 0], max_epochs=1)
    before = trainer.state_dict()
    with answered(case):
        trainer.load_state_dict(case.make(trainer.state_dict()))
    assert trainer.state_dict() == before


# --- evaluation ------------------------------------------------------------------------------------------------------------


def samples(number: int) -> TensorDataset:
    return TensorDataset(torch.ones(number, 2))


def padded(**changes: Any) -> DataLoader[Any]:
    data = samples(5)
    return DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=0, **changes), batch_size=2)


@cases(
    Case("padding", {"data": padded()}, ValueError, "data", "DistributedSampler", "repeats 1", "ShardedSampler"),
    Case("padding-ordered", {"data": padded(shuffle=False)}, ValueError, "data", "repeats 1", "ShardedSampler"),
    Case("empty", {"data": []}, ValueError, "data", "at least one sample", "none"),
    Case("none", {"data": None}, TypeError, "data", "loader", "None"),
    Case("int", {"data": 3}, TypeError, "data", "loader", "3 of type int"),
    Case("string", {"data": "valid.csv"}, TypeError, "data", "loader", "'valid.csv'"),
    Case("dict", {"data": {"x": torch.ones(2, 2)}}, TypeError, "data", "loader", "of type dict"),
    Case("max-iters-0", {"data": [0], "max_iters": 0}, ValueError, "max_iters", "at least 1", "0"),
    Case("max-iters-string", {"data": [0], "max_iters": "3"}, TypeError, "max_iters", "positive integer", "'3'"),
    Case("epoch-length--1", {"data": [0], "epoch_length": -1}, ValueError, "epoch_length", "at least 1", "-1"),
)
def test_arguments_of_an_evaluation(case):
    """Data that would be counted twice, or is none, is refused before `forward` is called; so are limits that are none."""
    forward = Calls()
    evaluator = create_evaluator(linear(), forward)
    with answered(case):
        evaluator.run(**case.make)
    assert forward.number == 0
    evaluator.run([0, 0])
    assert forward.number == 2


@cases(
    Case("model-none", {"model": None}, TypeError, "model", "torch.nn.Module", "None"),
    Case("model-class", {"model": nn.Linear}, TypeError, "model", "torch.nn.Module", "Linear"),
    Case("forward-none", {"forward": None}, TypeError, "forward", "forward(model, micro_batch)", "None"),
    Case("forward-of-one", {"forward": lambda batch: 0}, TypeError, "forward", "forward(model, micro_batch)", "(batch)"),
    Case("precision", {"precision": "float16"}, ValueError, "precision", "'float16'", "did you mean 'fp16'"),
    Case("uneven", {"uneven": "short"}, ValueError, "uneven", "'short'", "did you mean 'shortest'"),
)
def test_arguments_of_create_evaluator(case):
    """A bad argument is refused when the evaluator is made."""
    with answered(case):
        create_evaluator(**{"model": linear(), "forward": Calls(), **case.make})


def test_samplers_that_repeat_nothing_are_welcome():
    """A DistributedSampler that divides evenly or drops the rest, and the library's own sampler, evaluate without an error."""
    evaluator = create_evaluator(linear(), lambda model, batch: ForwardOutput(model(batch[0]).sum(), len(batch[0])))
    six = samples(6)
    for loader in (
        padded(drop_last=True),
        DataLoader(six, sampler=DistributedSampler(six, num_replicas=2, rank=0), batch_size=2),
        DataLoader(six, sampler=ShardedSampler(six, shuffle=False), batch_size=4),
    ):
        assert "loss" in evaluator.run(loader).metrics


@cases(
    Case("seed--1", lambda: ShardedSampler([1], shuffle=True, seed=-1), ValueError, "seed", "at least 0", "-1"),
    Case("seed-nan", lambda: ShardedSampler([1], shuffle=True, seed=math.nan), ValueError, "seed", "nan"),
    Case("seed-string", lambda: ShardedSampler([1], shuffle=True, seed="7"), TypeError, "seed", "'7'"),
    Case("seed-1.5", lambda: ShardedSampler([1], shuffle=True, seed=1.5), (TypeError, ValueError), "seed", "1.5"),
    Case("dataset-iterator", lambda: ShardedSampler(iter([1]), shuffle=True), TypeError, "dataset", "length", "list_iterator"),
)
def test_arguments_of_the_sampler(case):
    """A seed that is no whole number from 0 on, or data without a length, is refused."""
    with answered(case):
        case.make()


def _budget(lengths: Any = (3, 1, 2), **options: Any) -> Any:
    return lambda: TokenBudgetSampler(lengths, **{"max_tokens": 4, "shuffle": True, **options})


def _by_budget(*arguments: Any, samples: int = 3, **options: Any) -> Any:
    return lambda: ResumableLoader(torch.arange(samples), *arguments, **{"batches": _budget()(), **options})


@cases(
    Case("lengths-none", _budget(()), ValueError, "lengths", "at least one sample"),
    Case("lengths-0", _budget((3, 0, 2)), ValueError, "lengths", "at least 1", "0 at sample 1"),
    Case("lengths-1.5", _budget((3, 1.5)), TypeError, "lengths", "whole numbers", "1.5"),
    Case("lengths-pairs", _budget(((3, 1), (1, 2))), TypeError, "lengths", "one for each sample"),
    Case("lengths-number", _budget(7), TypeError, "lengths", "7"),
    Case("too-long", _budget((3, 9, 5)), ValueError, "lengths", "max_tokens=4", "9 at sample 1", "2 such", "too_long='skip'"),
    Case("all-too-long", _budget((9, 5), too_long="skip"), ValueError, "lengths", "max_tokens=4", "2 such samples of 2"),
    Case("too_long", _budget(too_long="drop"), ValueError, "too_long", "'raise', 'skip'", "'drop'"),
    Case("max_tokens-0", _budget(max_tokens=0), ValueError, "max_tokens", "at least 1"),
    Case("max_tokens-1.5", _budget(max_tokens=1.5), TypeError, "max_tokens", "1.5"),
    Case("max_samples-0", _budget(max_samples=0), ValueError, "max_samples", "at least 1"),
    Case("seed--1", _budget(seed=-1), ValueError, "seed", "at least 0", "-1"),
    Case("batches-list", _by_budget(batches=[[0], [1, 2]]), TypeError, "batches", "TokenBudgetSampler", "[[0], [1, 2]]"),
    Case("batches-batch_size", _by_budget(4), ValueError, "batch_size", "left out with batches"),
    Case("batches-shuffle", _by_budget(shuffle=True), ValueError, "shuffle", "left out with batches"),
    Case("batches-drop_last", _by_budget(drop_last=True), ValueError, "drop_last", "left out with batches"),
    Case("batches-samples", _by_budget(samples=5), ValueError, "batches", "5 samples", "3 lengths"),
    Case("no-shuffle", lambda: ResumableLoader([1], 1), TypeError, "shuffle", "True or False", "None", "batches="),
    Case("no-size", lambda: ResumableLoader([1], shuffle=True), TypeError, "batch_size", "positive integer", "None"),
)
def test_arguments_of_batches_by_tokens(case):
    """A sampler that could not keep its promises is refused, and so is a loader with two ways to cut micro-batches."""
    with answered(case):
        case.make()
