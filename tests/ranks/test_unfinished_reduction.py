"""A parameter that got no gradient where DistributedDataParallel waits for one: refused before the next collective."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ignite_train import ForwardOutput, NoGradientError, TrainState, UpdateOptions, create_trainer
from ranks import Ranks, run_ranks

UPDATES, SPECIAL = 4, 3  # how many there are, and the one that leaves a parameter out
REMEDIES = ("find_unused_parameters=True", "reduction='explicit'")


class Net(nn.Module):
    """A layer that can be dropped between two others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.dropped, self.last = nn.Linear(3, 4).double(), nn.Linear(4, 4).double(), nn.Linear(4, 1).double()

    def forward(self, x: Tensor, *, drops: bool = False) -> Tensor:
        hidden = self.first(x).tanh()
        return self.last(hidden if drops else hidden + self.dropped(hidden).tanh())  # type: ignore[no-any-return]


def loss_of(model: nn.Module, x: Tensor, case: str, update: int, index: int | None) -> Tensor:
    is_special = update == SPECIAL
    if case == "penalty" and is_special:
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return gradient.square().sum()
    drops = {"all": True, "first micro-batch": index == 0, "last micro-batch": index == 1, "one rank": idist.get_rank() == 1}
    return model(x, drops=is_special and drops.get(case, False)).square().sum()  # type: ignore[no-any-return]


def samples(rank: int, number: int) -> Tensor:
    return torch.randn(3, 3, generator=torch.Generator().manual_seed(10 * number + rank), dtype=torch.float64)


def trained(
    case: str, steps: int, wrapper: Mapping[str, Any], way: str = "ddp", *, hooked: bool = False, empty: bool = False
) -> tuple[str, list[float]]:
    """The error of the update that broke off, if any, and the weights then."""
    model = Net()
    wrapped = DistributedDataParallel(model, **wrapper) if way == "ddp" else model
    if hooked:
        wrapped.register_comm_hook(None, default_hooks.allreduce_hook)  # type: ignore[operator]

    def forward(model: nn.Module, x: Tensor, state: TrainState) -> ForwardOutput:
        return ForwardOutput(loss_of(model, x, case, state.iteration, state.micro_batch_in_group), len(x))

    optimizer, options = torch.optim.SGD(model.parameters(), lr=0.1), UpdateOptions(reduction=way)  # type: ignore[arg-type]
    trainer = create_trainer(wrapped, optimizer, forward, accumulation_steps=steps, options=options)
    error, rank = "", idist.get_rank()
    for update in range(1, UPDATES + 1):
        group = [samples(rank, 2 * update + index) for index in range(steps)]
        try:
            trainer.update([] if empty and rank == 1 and update == SPECIAL else group)
        except NoGradientError as raised:
            error = str(raised)
            break
    return error, torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def by_hand(case: str, steps: int, updates: int, *, empty: bool = False) -> list[float]:
    """The same in one process, with the samples of both ranks."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for update in range(1, updates + 1):
        optimizer.zero_grad()
        ranks = (0,) if empty and update == SPECIAL else (0, 1)
        for rank in ranks:
            for index in range(steps):
                (loss_of(model, samples(rank, 2 * update + index), case, update, index) / (3 * steps * len(ranks))).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


FIND = {"find_unused_parameters": True}
REFUSED: dict[str, tuple[str, int, Mapping[str, Any], list[str]]] = {
    "on all ranks": ("all", 1, {}, ["'dropped.weight', 'dropped.bias'"] * 2),
    "in the last micro-batch": ("last micro-batch", 2, {}, ["'dropped.weight', 'dropped.bias'"] * 2),
    "a penalty": ("penalty", 1, {}, ["'last.bias'"] * 2),
    "a penalty, which torch cannot see": ("penalty", 1, FIND, ["'last.bias'"] * 2),
    "a static graph": ("all", 1, {"static_graph": True}, ["'dropped.weight', 'dropped.bias'"] * 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_an_update_in_which_a_parameter_has_no_gradient_is_refused(two: Ranks, name: str) -> None:
    """On each rank that lacks it, by its name, with the weights of the update before on all ranks."""
    case, steps, wrapper, names = REFUSED[name]
    expected = by_hand(case, steps, SPECIAL - 1)
    for rank, (error, weights) in enumerate(two.run(trained, case, steps, wrapper)):
        assert f"got none of {names[rank]} on rank {rank}, so" in error
        assert all(remedy in error for remedy in REMEDIES)
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)


ALLOWED: dict[str, tuple[str, int, Mapping[str, Any], dict[str, Any]]] = {
    "the first remedy": ("all", 1, FIND, {}),
    "the first remedy on one rank": ("one rank", 1, FIND, {}),
    "the second remedy": ("penalty", 1, {}, {"way": "explicit"}),
    "not in the last micro-batch": ("first micro-batch", 2, {}, {}),
    "views": ("none", 2, {"gradient_as_bucket_view": True}, {}),
    "a hook": ("none", 2, {}, {"hooked": True}),
    "a rank without data": ("none", 2, {}, {"empty": True}),
    "a rank without data, looked for": ("none", 2, FIND, {"empty": True}),
    "a static graph": ("none", 1, {"static_graph": True}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALLOWED)
def test_an_update_that_is_reduced_is_that_of_one_process(two: Ranks, name: str) -> None:
    case, steps, wrapper, others = ALLOWED[name]
    if case == "one rank":
        outcomes = two.run(partial(trained, case, steps, wrapper, **others))
        assert outcomes[0] == outcomes[1]
        assert outcomes[0][0] == ""
        return
    expected = by_hand(case, steps, UPDATES, empty=others.get("empty", False))
    for error, weights in two.run(partial(trained, case, steps, wrapper, **others)):
        assert error == ""
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)


def alone() -> str:
    """What the rank says that alone lacks a gradient; the other waits in its backward until that one has gone."""
    try:
        return trained("one rank", 1, {})[0]
    except RuntimeError:
        return "the other rank has gone"


@pytest.mark.slow
def test_a_rank_that_alone_lacks_a_gradient_says_so() -> None:
    """It begins no collective in which the buckets of the other rank would be taken for something else."""
    other, mine = run_ranks(alone, timeout_seconds=60.0)
    assert "got none of 'dropped.weight', 'dropped.bias' on rank 1" in mine
    assert other == "the other rank has gone"
