"""A parameter that was frozen when it was wrapped in DistributedDataParallel, and is trained later."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ignite_train import UpdateOptions, create_trainer
from ranks import run_ranks


def _thaw(wrapped_first: bool, reduction: str, *, trained: bool = True) -> tuple[str, list[float]]:
    """The error, if any, and the weights, after two updates; in the second a layer is no longer frozen.

    `trained`: whether the optimizer has its parameters.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    if wrapped_first:
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        model[0].requires_grad_(False)
    else:
        model[0].requires_grad_(False)
        ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters() if trained else model[1].parameters(), lr=0.1)
    options = UpdateOptions(reduction=reduction)  # type: ignore[arg-type]
    trainer = create_trainer(ddp, optimizer, lambda m, x: m(x).square().mean(), protect=False, options=options)
    x, error = torch.full((2, 3), 1.0 + torch.distributed.get_rank()), ""
    with trainer.session():
        trainer.update([x])
        model[0].requires_grad_(True)
        try:
            trainer.update([x])
        except ValueError as raised:
            error = str(raised)
    return error.partition(" is frozen")[0], torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def _all_ways() -> list[tuple[str, list[float]]]:
    return [
        _thaw(False, "ddp", trained=False),
        *(_thaw(True, "ddp"), _thaw(False, "auto"), _thaw(True, "auto")),
        _thaw(False, "ddp"),
    ]


@pytest.mark.slow
def test_it_is_reduced_or_refused() -> None:
    """Each rank would step along its own gradient, where torch's hooks reduce; refused on all ranks, before the step."""
    first, second = run_ranks(_all_ways)
    assert first == second
    ((of_no_optimizer, _), *reduced, (error, _)) = first
    assert error == "model must be wrapped in DistributedDataParallel before '0.weight'"
    assert of_no_optimizer == ""
    assert [error for error, _ in reduced] == [""] * 3
    for _, weights in reduced:
        torch.testing.assert_close(weights, reduced[0][1])
