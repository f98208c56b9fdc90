"""`check_forward` says whether an update is the same for each cut of its samples, and names what is in the way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout

from ignite_train import ForwardOutput, check_forward

Batch = tuple[Tensor, Tensor]


def linear(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), *between, nn.Linear(6, 3))


def right(model: nn.Module, batch: Batch) -> ForwardOutput:
    return ForwardOutput(cross_entropy(model(batch[0]), batch[1], reduction="sum"), sample_size=len(batch[1]))


def declared_mean(model: nn.Module, batch: Batch) -> ForwardOutput:
    return ForwardOutput(cross_entropy(model(batch[0]), batch[1]), sample_size=len(batch[1]))


def bare_mean(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def negatives(model: nn.Module, batch: Batch) -> ForwardOutput:
    features = model(batch[0])
    return ForwardOutput(cross_entropy(features @ features.T, torch.arange(len(features)), reduction="sum"), len(features))


def functional_dropout(model: nn.Module, batch: Batch) -> ForwardOutput:
    return ForwardOutput(cross_entropy(dropout(model(batch[0])), batch[1], reduction="sum"), len(batch[1]))


def regularised(model: nn.Module, batch: Batch) -> ForwardOutput:
    return ForwardOutput(right(model, batch).loss + next(model.parameters()).square().sum(), sample_size=len(batch[1]))


def one_sample(model: nn.Module, batch: Batch) -> ForwardOutput:
    return ForwardOutput(right(model, batch).loss, sample_size=1)


def two_terms(model: nn.Module, batch: Batch) -> ForwardOutput:
    scores, first = model(batch[0]), batch[1] == 0
    return ForwardOutput({"all": (scores.square().sum(), len(scores)), "first": (scores[first].sum(), first.sum())})


def with_state(model: nn.Module, batch: Batch, state: Any) -> ForwardOutput:
    return ForwardOutput(right(model, batch).loss * (1.0 if state.progress is None else state.progress), len(batch[1]))


def micro_batches(*sizes: int, dtype: torch.dtype = torch.float64) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(n, 4, generator=generator, dtype=dtype), torch.randint(0, 3, (n,), generator=generator)) for n in sizes
    ]


@pytest.mark.parametrize("forward", [right, two_terms, with_state])
@pytest.mark.parametrize("sizes", [(5, 3), (1,), (4, 4, 4), (70, 30)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_exact_is_said_to_be(forward: Callable[..., Any], sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """In each dtype, with each cut, for losses of one term and of several."""
    torch.manual_seed(0)
    checked = check_forward(linear(nn.Tanh(), nn.LayerNorm(6)).to(dtype), forward, micro_batches(*sizes, dtype=dtype))

    assert checked.is_exact, str(checked)
    assert checked.findings == ()
    assert {sum(cut.sizes) for cut in checked.cuts} == {sum(sizes)}
    assert ("single samples" in str(checked)) == (sum(sizes) <= 64)


@pytest.mark.parametrize(
    ("model", "forward", "finding"),
    [
        (linear(nn.BatchNorm1d(6)), right, "BatchNorm1d ('1') computes with the whole micro-batch"),
        (linear(nn.Dropout(0.5)), right, "Dropout ('1') draws random numbers"),
        (linear(), declared_mean, "with a loss that looks like a mean"),
        (linear(), bare_mean, "forward returned a bare loss"),
        (linear(), negatives, "depends on the other samples"),
        (linear(), functional_dropout, "forward draws random numbers"),
        (linear(), regularised, "does not grow with the samples, such as a regulariser: multiply it by the sample size"),
        (linear(), one_sample, "does not grow with the samples"),
    ],
    ids=["batch norm", "dropout", "declared mean", "bare mean", "negatives", "functional dropout", "regulariser", "one sample"],
)
def test_what_is_in_the_way_is_named(model: nn.Module, forward: Callable[..., Any], finding: str) -> None:
    """One line for each part, and no other."""
    torch.manual_seed(0)
    checked = check_forward(model.double(), forward, micro_batches(8, 5))

    assert not checked.is_exact
    assert [finding in line for line in checked.findings] == [True], checked.findings
    assert checked.findings[0] in str(checked)
    assert checked.cuts[0].is_exact


def test_two_parts_are_both_named() -> None:
    """Each is found with the other in eval mode."""
    torch.manual_seed(0)
    model = linear(nn.BatchNorm1d(6), nn.Dropout(0.5), nn.BatchNorm1d(6)).double()
    findings = check_forward(model, right, micro_batches(8, 5)).findings

    assert [line.split()[0] for line in findings] == ["BatchNorm1d", "Dropout"]
    assert "('1', '3')" in findings[0]


def test_gradients_are_those_of_the_formula() -> None:
    """A mean of the means of 8 and 5 samples differs from the mean over 13 by what a computation by hand says."""
    model, (first, second) = linear().double(), micro_batches(8, 5)
    checked = check_forward(model, bare_mean, [first, second])
    joined = (torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]]))
    means = (bare_mean(model, first) + bare_mean(model, second)) / 2

    assert [cut.loss for cut in checked.cuts if cut.name == "joined"] == pytest.approx([bare_mean(model, joined).item()])
    assert checked.cuts[0].loss == pytest.approx(means.item())


def test_it_leaves_no_trace() -> None:
    """Modes, buffers, gradients and random numbers are as before."""
    model = linear(nn.BatchNorm1d(6), nn.Dropout(0.5)).double()
    model[1].eval()
    before, draws = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    check_forward(model, right, micro_batches(8, 5))

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model] == [True, False, True, True]
    assert torch.equal(torch.get_rng_state(), draws)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("given", [[], [(torch.zeros(2, 4), torch.zeros(3))], [1.0]], ids=["none", "two lengths", "no tensor"])
def test_what_cannot_be_cut_is_an_error(given: list[Any]) -> None:
    """In one line."""
    with pytest.raises(ValueError, match=r"^micro_batches must hold"):
        check_forward(linear(), right, given)


def test_a_module_that_is_frozen_in_eval_mode_stays_there() -> None:
    """As in the training, where its statistics are constants."""
    model = linear(nn.BatchNorm1d(6)).double()
    assert not check_forward(model, right, micro_batches(8, 5)).is_exact
    model[1].eval()
    assert check_forward(model, right, micro_batches(8, 5)).is_exact
