"""The step: a factor folded into the optimizer's kernel makes the numbers of a pass before it, and only where it may."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adagrad, Adam, AdamW
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ignite_train import ForwardOutput, StaticLossScaling, Trainer, create_trainer
from ignite_train.model.fused_kernels import is_kernel_right
from ranks import run_ranks
from textbook import Textbook
from tiers import accelerated

LR = 0.01
FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: AdamW(p, lr=LR, weight_decay=0.1, fused=True),
    "amsgrad": lambda p: Adam(p, lr=LR, amsgrad=True, fused=True),
    "l2": lambda p: Adam(p, lr=LR, weight_decay=0.1, fused=True),
    "nesterov": lambda p: SGD(p, lr=LR, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True),
    "sgd": lambda p: SGD(p, lr=LR, maximize=True, fused=True),
    "adagrad": lambda p: Adagrad(p, lr=LR, lr_decay=0.1, fused=True),
}


class Mixed(nn.Module):
    """Parameters of two dtypes, and one that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(4, 8, generator=generator))
        self.narrow = nn.Parameter(torch.randn(8, 8, generator=generator).bfloat16())
        self.last = nn.Parameter(torch.randn(8, 1, generator=generator))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(x @ self.first) @ self.narrow.float()) @ self.last

    def groups(self) -> list[dict[str, Any]]:
        """Three groups, the first of them empty, each with a learning rate of its own."""
        return [
            {"params": []},
            {"params": [self.first, self.narrow], "lr": LR / 2},
            {"params": [self.unused, self.last]},
        ]


def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> ForwardOutput:
    x, y = batch
    return ForwardOutput(mse_loss(model(x), y, reduction="sum"), len(y))


def samples(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(size, 4, generator=generator), torch.randn(size, 1, generator=generator)) for size in sizes]


def by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Textbook,
    groups: list[list[Any]],
    max_grad_norm: float | None,
    scale: float = 1.0,
) -> list[float]:
    """Gradients summed, the mean and the clipping multiplied in, then the step of `optimizer`. Returns the norms."""
    norms = []
    for group in groups:
        for batch in group:
            (forward(model, batch).loss * scale).backward()
        mean = 1.0 / (scale * sum(len(y) for _, y in group))
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(math.sqrt(sum(g.double().square().sum().item() for g in gradients)) * mean)
        clip = 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (norms[-1] + 1e-6))
        for gradient in gradients:
            gradient.copy_(gradient.double() * (mean * clip))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def watch(trainer: Trainer, optimizer: torch.optim.Optimizer) -> list[float | None]:
    """What each step to come is given to divide by: None if nothing."""
    divisors: list[float | None] = []

    def note(*_: Any) -> None:
        divisor = vars(optimizer).get("grad_scale")
        divisors.append(None if divisor is None else divisor.item())

    optimizer.register_step_post_hook(note)
    return divisors


# --- the numbers ---


@accelerated
@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
@pytest.mark.parametrize("accumulation_steps", [1, 3])
@pytest.mark.parametrize("name", FUSED)
def test_a_folded_step_is_the_textbook_step(name, accumulation_steps, max_grad_norm):
    """With several groups, mixed dtypes and a parameter without gradient: the parameters of float64 arithmetic, to rounding."""
    (model, reference, start), batches = (Mixed(), Mixed(), Mixed()), samples(3, 1, 4, 2, 3, 5)
    optimizer = FUSED[name](model.groups())
    theirs = Textbook(optimizer, [parameter for group in reference.groups() for parameter in group["params"]])
    trainer = create_trainer(
        model,
        optimizer,
        forward,
        accumulation_steps=accumulation_steps,
        max_grad_norm=max_grad_norm,
        loss_scaling=StaticLossScaling(3.0),
    )
    divisors, norms = watch(trainer, optimizer), []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: norms.append(trainer.state.output.grad_norm))
    trainer.run(batches)
    groups = [batches[start : start + accumulation_steps] for start in range(0, 6, accumulation_steps)]
    expected = by_hand(reference, theirs, groups, max_grad_norm, scale=3.0)

    folds = is_kernel_right(SGD, frozenset(), torch.bfloat16, torch.device("cpu")) or name not in ("sgd", "nesterov")
    assert [divisor is not None for divisor in divisors] == [folds] * (6 // accumulation_steps)
    assert norms[0] == pytest.approx(expected[0], rel=1e-6)
    assert norms == pytest.approx(expected, rel=2**-8)  # the bfloat16 weight is rounded otherwise, and all gradients follow
    for (key, ours), right, before in zip(model.named_parameters(), reference.parameters(), start.parameters(), strict=True):
        if key == "unused":
            continue
        moved, off = (right - before).detach().double().norm(), (ours - right).detach().double().norm()
        assert off <= (0.25 if key == "narrow" else 0.01) * moved
    assert model.unused.tolist() == [1.0, 1.0, 1.0]


@accelerated
@pytest.mark.sampled(8)
@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
@pytest.mark.parametrize("accumulation_steps", [1, 3])
@pytest.mark.parametrize("name", FUSED)
def test_folding_is_good_to_rounding(build, micro_batches, name, accumulation_steps, max_grad_norm):
    """In float32 parameters and moments are those of the textbook but for the gradient's rounding."""
    model, optimizer, trainer = build(accumulation_steps=accumulation_steps, max_grad_norm=max_grad_norm, optimizer=FUSED[name])
    reference, _, _ = build(optimizer=FUSED[name])
    theirs = Textbook(optimizer, list(reference.parameters()))
    divisors = watch(trainer, optimizer)
    trainer.run(micro_batches)
    groups = [micro_batches[start : start + accumulation_steps] for start in range(0, 5, accumulation_steps)]
    by_hand(reference, theirs, groups, max_grad_norm)

    assert None not in [divisor for divisor, group in zip(divisors, groups, strict=True) if max_grad_norm or len(group) > 1]
    for ours, right in zip(model.parameters(), reference.parameters(), strict=True):
        # the kernel rounds to float32 in each of up to five steps, and the gradient differs by 2^-23 of it besides
        torch.testing.assert_close(ours, right, rtol=5 * 1.2e-7, atol=2e-6 * LR)
        for key, moment in theirs.moments[id(right)].items():
            expected = torch.as_tensor(moment, dtype=torch.float32)
            torch.testing.assert_close(optimizer.state[ours][key], expected, rtol=1e-5, atol=5e-8)


@accelerated
@pytest.mark.parametrize("name", FUSED)
def test_folding_a_power_of_two_is_bitwise(build, bits, name):
    """Where the factor is a power of two no bit differs from the same kernel's step along gradients multiplied beforehand."""
    batches = samples(3, 5, 1, 7)
    model, optimizer, trainer = build(accumulation_steps=2, optimizer=FUSED[name], loss_scaling=StaticLossScaling(2.0**10))
    reference, theirs, _ = build(optimizer=FUSED[name])
    divisors = watch(trainer, optimizer)
    trainer.run(batches)
    by_hand(reference, theirs, [batches[:2], batches[2:]], None, scale=2.0**10)

    assert divisors == [2.0**13] * 2
    assert bits(model.state_dict()) == bits(reference.state_dict())
    assert bits(optimizer.state_dict()) == bits(theirs.state_dict())


def test_a_mean_without_clipping_is_rounded_once(build, bits):
    """The divisor is the number of samples itself, not a rounded reciprocal: each gradient is the nearest to the true mean."""
    batches = samples(3, 2, 8)
    model, _, trainer = build(accumulation_steps=3, optimizer=FUSED["sgd"])
    reference, theirs, _ = build(optimizer=lambda p: SGD(p, lr=LR, maximize=True, foreach=False))
    trainer.run(batches)
    for batch in batches:
        forward(reference, batch).loss.backward()
    for parameter in reference.parameters():
        parameter.grad = (parameter.grad.double() / 13).float()
    theirs.step()
    assert bits(model.state_dict()) == bits(reference.state_dict())


def test_a_factor_of_one_is_no_factor(build, micro_batches):
    """Where nothing is to be scaled or clipped the kernel is given nothing to divide by."""
    _, optimizer, trainer = build(lambda model, batch: mse_loss(model(batch[0]), batch[1]), optimizer=FUSED["adamw"])
    divisors = watch(trainer, optimizer)
    trainer.run(micro_batches)
    assert divisors == [None] * 5


def test_float64_gradients_are_not_folded(build, micro_batches):
    """The kernel holds the factor in float32, so float64 gradients are multiplied beforehand and stay exact to 1e-14."""
    batches = [(x.double(), y.double()) for x, y in micro_batches]
    model, optimizer, trainer = build(accumulation_steps=5, max_grad_norm=0.1, dtype=torch.float64, optimizer=FUSED["adamw"])
    reference, _, _ = build(dtype=torch.float64, optimizer=FUSED["adamw"])
    theirs = Textbook(optimizer, list(reference.parameters()))
    divisors = watch(trainer, optimizer)
    trainer.run(batches)
    by_hand(reference, theirs, [batches], 0.1)
    assert divisors == [None]
    for ours, right in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-14, atol=1e-14)


def test_a_divisor_beyond_float32_is_not_folded():
    """A gradient of 1e30 clipped to 1e-12 needs a divisor of 1e42; as float32 that would be infinite and the step zero."""
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    optimizer = SGD(model.parameters(), lr=1.0, fused=True)
    create_trainer(model, optimizer, lambda model, x: model(x).sum(), max_grad_norm=1e-12).run([torch.full((1, 1), 1e30)])
    assert model.weight.item() == pytest.approx(-1e-12, rel=1e-2)  # the factor of 1e-42 is a denormal number


# --- which way ---


class OwnAdamW(AdamW):
    """A kind of its own, which may look at gradients in ways that we do not know."""


def replace_step(optimizer: torch.optim.Optimizer) -> None:
    step = type(optimizer).step
    optimizer.step = MethodType(lambda self, closure=None: step(self, closure), optimizer)  # type: ignore[method-assign]


@accelerated
@pytest.mark.parametrize(
    ("optimizer", "prepare", "folds"),
    [
        (FUSED["adamw"], lambda o: None, True),
        (FUSED["sgd"], lambda o: None, True),
        (FUSED["adagrad"], lambda o: None, True),
        (FUSED["adamw"], lambda o: torch.optim.lr_scheduler.StepLR(o, 1), True),
        (FUSED["adamw"], lambda o: o.register_step_post_hook(lambda *_: None), True),
        (FUSED["adamw"], lambda o: o.register_step_pre_hook(lambda *_: None), False),
        (FUSED["adamw"], lambda o: o.param_groups[0].update(fused=False), False),
        (FUSED["adamw"], replace_step, False),
        (lambda p: AdamW(p, lr=LR), lambda o: None, False),
        (lambda p: AdamW(p, lr=LR, foreach=True), lambda o: None, False),
        (lambda p: OwnAdamW(p, lr=LR, fused=True), lambda o: None, False),
        (lambda p: torch.optim.RMSprop(p, lr=LR), lambda o: None, False),
    ],
    ids=[
        *("adamw", "sgd", "adagrad", "scheduler", "post-hook", "pre-hook", "group", "replaced", "default", "foreach"),
        *("subclass", "rmsprop"),
    ],
)
def test_which_optimizers_fold(build, micro_batches, optimizer, prepare, folds):
    """Torch's own fused optimizers fold, scheduled or not; whatever may look at the gradients in between does not."""
    _, built, trainer = build(optimizer=optimizer, max_grad_norm=0.1)
    kept = prepare(built)  # a scheduler's wrapper of step lives as long as the scheduler
    divisors = watch(trainer, built)
    trainer.run(micro_batches)
    assert [divisor is not None for divisor in divisors] == [folds] * 5
    del kept


@accelerated
@pytest.mark.parametrize("everywhere", [False, True], ids=["own", "global"])
def test_a_pre_hook_sees_what_is_stepped_on(build, micro_batches, everywhere):
    """A pre-hook that comes in the middle of a run sees clipped mean gradients; when it goes, folding comes back."""
    model, optimizer, trainer = build(accumulation_steps=1, max_grad_norm=0.125, optimizer=FUSED["adamw"])
    divisors, norms, handles = watch(trainer, optimizer), [], []

    def hook(*_: Any) -> None:
        norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())

    def register() -> None:
        handles.append(register_optimizer_step_pre_hook(hook) if everywhere else optimizer.register_step_pre_hook(hook))

    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=1), register)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: handles[0].remove())
    trainer.run(micro_batches)
    assert [divisor is None for divisor in divisors] == [False, True, True, False, False]
    assert norms == pytest.approx([0.125] * 2, rel=1e-5)


@accelerated
@pytest.mark.parametrize(
    ("optimizer", "how"),
    [
        (FUSED["adamw"], "inside its fused kernel"),
        (lambda p: AdamW(p, lr=LR), "in a pass over memory of their own, since it was made without fused=True"),
    ],
    ids=["folded", "multiplied"],
)
def test_the_way_is_said_once(build, micro_batches, caplog, optimizer, how):
    """One line, when the trainer is made or at its first step, says which way is taken, and why not the other."""
    with caplog.at_level(logging.INFO, logger="ignite_train"):
        _, _, trainer = build(optimizer=optimizer)
        trainer.run(micro_batches)
    assert [record.message for record in caplog.records if "unscaled" in record.message] == [
        f"gradients for AdamW are unscaled, normalised and clipped {how}"
    ]


# --- what is left behind ---


@accelerated
def test_an_exception_in_the_step_leaves_no_factor_behind(build, micro_batches):
    """A step that fails leaves nothing on the optimizer that would scale the user's own next step."""
    _, optimizer, trainer = build(optimizer=FUSED["adamw"], max_grad_norm=0.1)

    def fail(*_: Any) -> None:
        assert "grad_scale" in vars(optimizer)
        raise InterruptedError

    handle = optimizer.register_step_post_hook(fail)
    with pytest.raises(InterruptedError):
        trainer.run(micro_batches)
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()
    handle.remove()
    trainer.run(micro_batches)
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()


@pytest.mark.parametrize("name", FUSED)
def test_a_skip_leaves_a_fused_optimizer_as_it_was(build, bits, micro_batches, name):
    """An update that is not finite moves no parameter, no moment and no number of steps."""
    model, optimizer, trainer = build(optimizer=FUSED[name], max_grad_norm=0.1, on_nonfinite="skip")
    trainer.run(micro_batches)
    before = bits([model.state_dict(), optimizer.state_dict()])
    x, y = micro_batches[2]
    trainer.run([(x * math.inf, y)], max_epochs=2)
    assert trainer.state.num_skipped == 1
    assert bits([model.state_dict(), optimizer.state_dict()]) == before


# --- the norm ---


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-7), (torch.bfloat16, 5e-6)])
def test_the_norm_of_a_large_gradient(dtype, rounding):
    """Over four million elements the norm keeps its digits: one float32 sum over them would be off by 6e-5 and more."""
    weight = nn.Parameter(torch.zeros(2**11 + 1, 2**11, dtype=dtype))
    gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight.register_hook(lambda _: gradient)
    model = nn.ParameterList([weight])
    trainer = create_trainer(model, SGD(model.parameters(), lr=0.0), lambda model, _: model[0].sum())
    trainer.run([0])
    assert trainer.state.output.grad_norm == pytest.approx(gradient.double().norm().item(), rel=rounding)


def test_the_norm_does_not_depend_on_the_number_of_threads():
    """A run on two threads takes the very norm of a run on one."""
    model = nn.Linear(1000, 1000)
    norms = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        trainer = create_trainer(model, SGD(model.parameters(), lr=0.0), lambda model, x: (model(x) ** 2).sum())
        torch.set_num_threads(1)
        handle = model.weight.register_hook(lambda _, n=threads: torch.set_num_threads(n))
        trainer.run([torch.ones(1, 1000)])
        handle.remove()
        norms.append(trainer.state.output.grad_norm)
    torch.set_num_threads(before)
    assert norms[0] == norms[1]


# --- ranks ---


def fsdp_against_one_process() -> tuple[list[float], list[float], list[bool]]:
    """Two updates of a sharded model under fused AdamW, and the same by hand, whole, on this rank alone."""
    groups = [samples(*sizes) for sizes in ([3, 1, 4, 2], [5, 2, 2, 3])]

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    model = make()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = FUSED["adamw"](model.parameters())
    reference = make()
    by_hand(reference, Textbook(optimizer, list(reference.parameters())), groups, 0.05, scale=2.0**7)
    trainer = create_trainer(
        model, optimizer, forward, accumulation_steps=2, max_grad_norm=0.05, loss_scaling=StaticLossScaling(2.0**7)
    )
    divisors = watch(trainer, optimizer)
    rank = torch.distributed.get_rank()
    trainer.run([batch for group in groups for batch in group[2 * rank : 2 * rank + 2]])
    whole = [parameter.full_tensor().detach().flatten() for parameter in model.parameters()]
    return (
        torch.cat(whole).tolist(),
        torch.cat([parameter.detach().flatten() for parameter in reference.parameters()]).tolist(),
        [divisor is not None for divisor in divisors],
    )


@pytest.mark.slow
@accelerated
def test_a_sharded_step_is_folded():
    """FSDP2's shards, stepped by fused AdamW with the factor folded in, are those of the whole model stepped by hand."""
    for ours, right, folded in run_ranks(fsdp_against_one_process):
        assert folded == [True, True]
        assert ours == pytest.approx(right, rel=1e-6, abs=1e-4 * LR)  # the ranks' sums are in another order
