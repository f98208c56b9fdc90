"""A loss that is declared as what it is not: one warning at the first micro-batch, and none for what is right or unknown."""

from __future__ import annotations

import copy
import itertools
import random
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import ignite.distributed as idist
import numpy as np
import pytest
import torch
import torch.distributed.nn.functional as over_ranks
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import Tensor, nn

from ignite_train import (
    ForwardOutput,
    LossDeclarationWarning,
    TrainEvents,
    UpdateOptions,
    create_evaluator,
    create_supervised_trainer,
    create_trainer,
)
from ignite_train.model import loss_declaration
from ranks import run_ranks

SAMPLES, FEATURES, CLASSES, STEPS = 8, 6, 3, 4
Batch = dict[str, Tensor]
TOO_SMALL, TOO_LARGE = "times too small", "times too large"


class Net(nn.Module):
    """Two layers; classes for a batch of samples, or for each step of a batch of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(FEATURES, SAMPLES), nn.Linear(SAMPLES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(x)))


def batch(samples: int = SAMPLES) -> Batch:
    generator = torch.Generator().manual_seed(samples)
    mask = (torch.rand(samples, STEPS, generator=generator) < 0.7).float()
    mask[0, 0], mask[-1, -1] = 1.0, 0.0
    return {
        "x": torch.randn(samples, FEATURES, generator=generator),
        "c": torch.randint(0, CLASSES, (samples,), generator=generator),
        "y": torch.randn(samples, CLASSES, generator=generator),
        "xs": torch.randn(samples, STEPS, FEATURES, generator=generator),
        "cs": torch.randint(0, CLASSES, (samples, STEPS), generator=generator),
        "mask": mask,
    }


def told(forward: Callable[..., Any], given: Any = None, *, updates: int = 2) -> list[str]:
    """The warnings of a training with `forward`."""
    torch.manual_seed(0)
    model = Net()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=1e-6), forward)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.run([batch() if given is None else given] * updates, max_epochs=1)
    assert {warning.category for warning in caught} <= {LossDeclarationWarning}
    return [str(warning.message) for warning in caught]


def token_losses(m: nn.Module, b: Batch) -> Tensor:
    """One for each step of each sample."""
    return F.cross_entropy(m(b["xs"]).flatten(0, 1), b["cs"].flatten(), reduction="none").view(len(b["xs"]), STEPS)


def per_sample(m: nn.Module, b: Batch) -> Tensor:
    return (m(b["x"]) - b["y"]).pow(2).sum(1)


def weight_decay(m: nn.Module) -> Tensor:
    return sum(p.pow(2).sum() for p in m.parameters())  # type: ignore[return-value]


def binary_weighted(m: nn.Module, b: Batch, reduction: str) -> Tensor:
    """Each element of the loss times 1/2."""
    return F.binary_cross_entropy_with_logits(
        m(b["x"]), b["y"].sigmoid(), weight=torch.full_like(b["y"], 0.5), reduction=reduction
    )


ENTROPY, SQUARES = F.cross_entropy, F.mse_loss
MEANS: dict[str, Callable[[nn.Module, Batch], Tensor]] = {
    "cross-entropy": lambda m, b: ENTROPY(m(b["x"]), b["c"]),
    "class-weights": lambda m, b: ENTROPY(m(b["x"]), b["c"], weight=torch.tensor([0.2, 0.3, 0.5])),
    "label-smoothing": lambda m, b: ENTROPY(m(b["x"]), b["c"], label_smoothing=0.1),
    "label-smoothing-0.2": lambda m, b: ENTROPY(m(b["x"]), b["c"], label_smoothing=0.2),
    "soft-targets": lambda m, b: ENTROPY(m(b["x"]), b["y"].softmax(1)),
    "tokens": lambda m, b: ENTROPY(m(b["xs"]).flatten(0, 1), b["cs"].flatten()),
    "two-dimensional": lambda m, b: ENTROPY(m(b["xs"]).movedim(-1, 1)[..., None], b["cs"][..., None]),
    "squares": lambda m, b: SQUARES(m(b["x"]), b["y"]),
    "squares-by-hand": lambda m, b: ((m(b["x"]) - b["y"]) ** 2).mean(),
    "half-squares": lambda m, b: 0.5 * ((m(b["x"]) - b["y"]) ** 2).mean(),
    "absolute": lambda m, b: F.l1_loss(m(b["x"]), b["y"]),
    "smooth": lambda m, b: F.smooth_l1_loss(m(b["x"]), b["y"]),
    "huber": lambda m, b: F.huber_loss(m(b["x"]), b["y"]),
    "binary": lambda m, b: F.binary_cross_entropy_with_logits(m(b["x"]), b["y"].sigmoid()),
    "binary-probabilities": lambda m, b: F.binary_cross_entropy(m(b["x"]).sigmoid(), b["y"].sigmoid()),
    "binary-weighted": lambda m, b: binary_weighted(m, b, "mean"),
    "stacked": lambda m, b: torch.stack([SQUARES(m(b["x"]), b["y"]), 0.5 * ENTROPY(m(b["x"]), b["c"])]).sum(),
    "of-each-sample": lambda m, b: per_sample(m, b).mean(),
    "of-a-dimension": lambda m, b: per_sample(m, b).mean(dim=0),
    "by-hand": lambda m, b: per_sample(m, b).sum() / len(b["x"]),
    "divided-by-a-tensor": lambda m, b: per_sample(m, b).sum() / torch.tensor(len(b["x"])),
    "with-decay": lambda m, b: ENTROPY(m(b["x"]), b["c"]) + 1e-4 * weight_decay(m),
    "with-scaled-elements": lambda m, b: ENTROPY(m(b["x"]), b["c"]) + (1e-4 * m.out.weight.pow(2)).sum(),
    "scaled-predictions": lambda m, b: ((m(b["x"]) * torch.tensor(100.0) - b["y"]) ** 2).mean(),
    "with-absolute-decay": lambda m, b: ENTROPY(m(b["x"]), b["c"]) + 1e-4 * m.out.weight.abs().sum(),
    "of-a-bias-alone": lambda m, b: ((m.out.bias - b["y"]) ** 2).mean(),
    "of-data-times-weights": lambda m, b: (m.out.bias * b["y"].sigmoid()).pow(2).mean(),
    "with-norm": lambda m, b: ENTROPY(m(b["x"]), b["c"]) + 1e-4 * m.out.weight.norm(),
    "two-losses": lambda m, b: 0.7 * ENTROPY(m(b["x"]), b["c"]) + 0.3 * SQUARES(m(b["x"]), b["y"]),
    "negative": lambda m, b: -(m(b["x"]).log_softmax(1)[torch.arange(len(b["x"])), b["c"]]).mean(),
    "for-accumulation": lambda m, b: ENTROPY(m(b["x"]), b["c"]) / 4,
    "doubled-precision": lambda m, b: ENTROPY(m(b["x"]), b["c"]).double(),
    "per-sample-over-lengths": lambda m, b: (per_sample(m, b) / b["mask"].sum(1)).mean(),
    "masked-samples": lambda m, b: (per_sample(m, b) * b["mask"][:, 0]).mean(),
}
SUMS: dict[str, Callable[[nn.Module, Batch], Tensor]] = {
    "cross-entropy": lambda m, b: ENTROPY(m(b["x"]), b["c"], reduction="sum"),
    "label-smoothing": lambda m, b: ENTROPY(m(b["x"]), b["c"], reduction="sum", label_smoothing=0.1),
    "tokens": lambda m, b: ENTROPY(m(b["xs"]).flatten(0, 1), b["cs"].flatten(), reduction="sum"),
    "squares": lambda m, b: SQUARES(m(b["x"]), b["y"], reduction="sum"),
    "squares-by-hand": lambda m, b: ((m(b["x"]) - b["y"]) ** 2).sum(),
    "half-squares": lambda m, b: 0.5 * ((m(b["x"]) - b["y"]) ** 2).sum(),
    "absolute": lambda m, b: F.l1_loss(m(b["x"]), b["y"], reduction="sum"),
    "huber": lambda m, b: F.huber_loss(m(b["x"]), b["y"], reduction="sum"),
    "divergence": lambda m, b: F.kl_div(m(b["x"]).log_softmax(1), b["y"].softmax(1), reduction="sum"),
    "binary-weighted": lambda m, b: binary_weighted(m, b, "sum"),
    "of-each-sample": lambda m, b: per_sample(m, b).sum(),
    "masked": lambda m, b: (token_losses(m, b) * b["mask"]).sum(),
    "selected": lambda m, b: token_losses(m, b).sum(1).sum(),
    "scaled-predictions": lambda m, b: ((m(b["x"]) * torch.tensor(0.01) - b["y"]) ** 2).sum(),
    "of-each-step": lambda m, b: m(b["xs"]).pow(2).sum(-1).sum(),
    "with-decay": lambda m, b: SQUARES(m(b["x"]), b["y"], reduction="sum") + 1e-4 * weight_decay(m),
    "reciprocals": lambda m, b: (torch.ones(()) / (1 + per_sample(m, b))).sum(),
    "many-terms": lambda m, b: sum((m(b["x"]) - b["y"]).pow(2).sum() for _ in range(70)),  # type: ignore[dict-item, misc]
}
RIGHT_IF_BARE: dict[str, Callable[[nn.Module, Batch], Any]] = {
    "masked-mean": lambda m, b: (token_losses(m, b) * b["mask"]).sum() / b["mask"].sum(),
    "masked-mean-by-a-product": lambda m, b: (token_losses(m, b) * b["mask"]).sum() * (1 / b["mask"].sum()),
    "mask-of-mean-weights": lambda m, b: (token_losses(m, b) * (b["mask"] / b["mask"].sum())).sum(),
    "one-positive": lambda m, b: SQUARES(m(b["x"])[:1], b["y"][:1], reduction="sum") / max(1, 1),
    "some-positives": lambda m, b: F.smooth_l1_loss(m(b["x"]), b["y"], reduction="sum") / max(1, int((b["c"] > 0).sum())),
    "normalised-weights": lambda m, b: (per_sample(m, b) * torch.full((len(b["x"]),), 1 / len(b["x"]))).sum(),
    "weights-by-a-product": lambda m, b: torch.full((len(b["x"]),), 1 / len(b["x"])) @ per_sample(m, b),
    "weights-by-place": lambda m, b: (per_sample(m, b) / torch.arange(1.0, len(b["x"]) + 1)).sum(),
    "pairs": lambda m, b: torch.cdist(m(b["x"]), m(b["x"])).mean(),
    "batchmean": lambda m, b: F.kl_div(m(b["x"]).log_softmax(1), b["y"].softmax(1), reduction="batchmean"),
    "stacked-means": lambda m, b: torch.stack([SQUARES(m(b["x"]), b["y"]), ENTROPY(m(b["x"]), b["c"])]).sum(),
    "summed-means": lambda m, b: sum([SQUARES(m(b["x"]), b["y"]), ENTROPY(m(b["x"]), b["c"])]),
    "features-summed": lambda m, b: (m(b["x"]) - b["y"]).pow(2).mean(0).sum(),
    "squares-of-means": lambda m, b: m.hidden(b["x"]).mean(0).pow(2).sum(),  # as many features as samples
    "squares-of-means-of-steps": lambda m, b: m.hidden(b["xs"].repeat(1, 2, 1)).mean(-3).pow(2).sum(),
    "shares": lambda m, b: (per_sample(m, b).square() / per_sample(m, b).sum()).sum(),
    "decay-alone": lambda m, b: m.hidden.weight.pow(2).sum(),  # its first dimension is as large as the micro-batch
    "half-decay-alone": lambda m, b: (0.5 * m.hidden.weight.pow(2)).sum(),
    "mean-and-decay": lambda m, b: ENTROPY(m(b["x"]), b["c"]) + 1e-4 * m.hidden.weight.pow(2).sum(),
    "policy-gradient": lambda m, b: -(m(b["x"]).log_softmax(1)[:, 0] * b["y"][:, 0]).mean(),
    "unknown": lambda m, b: torch.logsumexp(m(b["x"]).flatten(), 0),
    "contrastive": lambda m, b: ENTROPY(m(b["x"]) @ m(b["x"]).T, torch.arange(len(b["x"]))),
    "sum-that-is-meant": lambda m, b: ForwardOutput(per_sample(m, b).sum(), 1),
    "sum-that-is-meant-as-a-tuple": lambda m, b: (per_sample(m, b).sum(), 1),
}
RIGHT_WITH_SIZE: dict[str, Callable[[nn.Module, Batch], tuple[Tensor, Any]]] = {
    "mean-times-size": lambda m, b: (ENTROPY(m(b["x"]), b["c"]) * len(b["x"]), len(b["x"])),
    "size-times-mean-and-decay": lambda m, b: (8 * ENTROPY(m(b["x"]), b["c"]) + 1e-4 * weight_decay(m), 8),
    "size-times-mean": lambda m, b: (len(b["x"]) * SQUARES(m(b["x"]), b["y"]), len(b["x"])),
    "mean-times-a-tensor": lambda m, b: (ENTROPY(m(b["x"]), b["c"]) * torch.tensor(8.0), torch.tensor(8)),
    "smoothed-mean-times-size": lambda m, b: (ENTROPY(m(b["x"]), b["c"], label_smoothing=0.1) * 8, 8),
    "weighted-mean-times-size": lambda m, b: (0.01 * ENTROPY(m(b["x"]), b["c"]) * 8, 8),
    "weight-times-size-times-mean": lambda m, b: ((0.01 * len(b["x"])) * ENTROPY(m(b["x"]), b["c"]), len(b["x"])),
    "divided-by-one-over-size": lambda m, b: (ENTROPY(m(b["x"]), b["c"]) / (1 / len(b["x"])), len(b["x"])),
    "products-before-the-mean": lambda m, b: ((per_sample(m, b) * 8).mean(), 8),
    "products-before-a-view": lambda m, b: ((per_sample(m, b) * 8).view(2, 4).mean(), 8),
    "weights-before-the-mean": lambda m, b: ((per_sample(m, b) * torch.full((8,), 8.0)).mean(), 8),
    "mean-over-features": lambda m, b: (torch.tanh(m.hidden(b["x"])).pow(2).sum(0).mean(), len(b["x"])),
    "sum-over-steps-divided-by-them": lambda m, b: (token_losses(m, b).sum() / STEPS, len(b["x"])),
    "mean-times-more-than-size": lambda m, b: (per_sample(m, b).sum() / SAMPLES * (1.5 * SAMPLES), SAMPLES),
    "sum-over-as-many-features": lambda m, b: (m.hidden(b["x"]).pow(2).sum() / SAMPLES, len(b["x"])),
    "sum-over-as-many-features-flat": lambda m, b: (m.hidden(b["x"]).flatten().pow(2).sum() / SAMPLES, len(b["x"])),
    "sum-of-means": lambda m, b: (token_losses(m, b).mean(1).sum(), len(b["x"])),
    "masked-tokens": lambda m, b: ((token_losses(m, b) * b["mask"]).sum(), b["mask"].sum()),
    "ignored-tokens": lambda m, b: (ENTROPY(m(b["xs"]).flatten(0, 1), b["cs"].flatten(), ignore_index=0, reduction="sum"), 20),
    "mean-over-a-number-that-is-no-multiple": lambda m, b: (SQUARES(m(b["x"]), b["y"]), 5),
    "one-token-of-all": lambda m, b: (ENTROPY(m(b["x"])[:1], b["c"][:1]), 8),
    "mean-of-one-token-a-sample": lambda m, b: (ENTROPY(m(b["x"])[:1], b["c"][:1]), 1),
    "sum-and-balance": lambda m, b: (SUMS["tokens"](m, b) + 0.01 * m(b["x"]).softmax(1).mean(0).pow(2).sum() * 32, 32),
    "unknown": lambda m, b: (torch.logsumexp(m(b["x"]).flatten(), 0), 8),
    "large-weight": lambda m, b: (100.0 * ENTROPY(m(b["x"]), b["c"]), 8),
    "weight-above-one": lambda m, b: (1.5 * ENTROPY(m(b["x"]), b["c"]), 8),
    "weights-above-one": lambda m, b: ((per_sample(m, b) * torch.full((8,), 1.5)).mean(), 8),
    "mean-times-size-added": lambda m, b: (torch.add(1e-4 * weight_decay(m), SQUARES(m(b["x"]), b["y"]), alpha=8), 8),
    "mean-over-features-of-some": lambda m, b: (m.hidden(b["x"])[:5].pow(2).sum() / SAMPLES, SAMPLES),
    "normalised-weights-times-size": lambda m, b: ((per_sample(m, b) * torch.full((8,), 1 / 8)).sum() * 8, 8),
}


def doubled(x: Tensor) -> Tensor:
    """The same value, through 2^60 paths of the graph."""
    for _ in range(60):
        x = 0.5 * x + 0.5 * x
    return x


def table(rows: dict[str, Any]) -> Any:
    return pytest.mark.parametrize("loss", rows.values(), ids=rows.keys())


@table(MEANS)
def test_a_mean_with_a_sample_size_is_noticed(loss: Any) -> None:
    """Its gradient is too small by the sample size: one warning, of one line, that says what to return."""
    messages = told(lambda m, b: ForwardOutput(loss(m, b), sample_size=len(b["x"])))
    assert len(messages) == 1
    assert TOO_SMALL in messages[0]
    assert f"sample_size={SAMPLES}" in messages[0]
    assert "\n" not in messages[0]


def test_the_warning_points_at_forward() -> None:
    """Also where forward takes the state, or is a method."""

    def forward(m: nn.Module, b: Batch, state: Any) -> tuple[Tensor, int]:
        return MEANS["squares"](m, b), len(b["x"])

    class Losses:
        def forward(self, m: nn.Module, b: Batch) -> tuple[Tensor, int]:
            return MEANS["squares"](m, b), len(b["x"])

    for one, code in ((forward, forward.__code__), (Losses().forward, Losses.forward.__code__)):
        model = Net()
        with pytest.warns(LossDeclarationWarning) as caught:
            create_trainer(model, torch.optim.SGD(model.parameters(), lr=1e-6), one).run([batch()])
        assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, code.co_firstlineno)]


@table(SUMS)
def test_a_bare_sum_is_noticed(loss: Any) -> None:
    """A bare loss is a mean by contract. So is one in a ForwardOutput whose sample size was forgotten."""
    for forward in (loss, lambda m, b: ForwardOutput(loss(m, b), logs={"a": 1.0})):
        messages = told(forward)
        assert len(messages) == 1
        assert TOO_LARGE in messages[0]
        assert "sample_size" in messages[0]
        assert "\n" not in messages[0]


def supervised(loss: Callable[[nn.Module, Batch], Tensor], given: Batch) -> None:
    """Trains with a loss_fn that finds all of the micro-batch in what the model returns."""
    model = Net()
    trainer = create_supervised_trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-6),
        lambda b, _: loss(model, b),
        prepare_batch=lambda b, **_: (b, b["c"]),
        model_fn=lambda _, b: b,
    )
    trainer.run([given], max_epochs=1)


@table(SUMS)
def test_a_function_that_sums_is_noticed_in_a_supervised_trainer(loss: Any) -> None:
    """It is multiplied by the number of samples, so that the gradient is that much too large."""
    with pytest.warns(LossDeclarationWarning, match=TOO_LARGE):
        supervised(loss, batch())


PAIR = [batch()["x"], batch()["c"]]
TABLE = {name: batch()[name] for name in ("x", "c", "y")}


@pytest.mark.parametrize("given", [PAIR, tuple(PAIR), TABLE, batch(7)], ids=["list", "pair", "dict", "six-fields"])
def test_the_number_of_fields_as_sample_size_is_noticed(given: Any) -> None:
    """`len` of a micro-batch is the number of its tensors; loss and step were some times too large."""

    def forward(m: nn.Module, b: Any) -> ForwardOutput:
        x, c = (b["x"], b["c"]) if isinstance(b, dict) else b
        return ForwardOutput(F.cross_entropy(m(x), c, reduction="sum"), sample_size=len(b))

    (message,) = told(forward, given)
    assert f"sample_size={len(given)}, the number of fields of the micro-batch" in message


def of_samples(m: nn.Module, b: list[Tensor]) -> ForwardOutput:
    """A list of samples, each with its steps."""
    return ForwardOutput(sum((m(x).pow(2).sum() for x in b), torch.zeros(())), sample_size=len(b))


def of_pairs(m: nn.Module, b: list[list[Tensor]]) -> ForwardOutput:
    """A list of samples, each with its boxes and their classes, as detection has them."""
    return ForwardOutput(sum((F.cross_entropy(m(x), c, reduction="sum") for x, c in b), torch.zeros(())), sample_size=len(b))


GRAPHS = {"x": batch(8)["x"], "of": torch.arange(8) // 2}  # as many of them in the first half as there are fields


@pytest.mark.parametrize(
    ("forward", "given"),
    [
        (of_samples, [batch()["x"], batch()["x"] + 1]),
        (of_pairs, [PAIR, [PAIR[0] + 1, PAIR[1]]]),
        (lambda m, b: ForwardOutput(F.cross_entropy(m(b[0]), b[1], reduction="sum"), 128), PAIR),
        (lambda m, b: ForwardOutput(F.cross_entropy(m(b[0]), b[1], reduction="sum"), 1), PAIR),
        (lambda m, b: ForwardOutput(F.cross_entropy(m(b[0]), b[1], reduction="sum"), 2), [batch(2)["x"], batch(2)["c"]]),
        (lambda m, b: ForwardOutput(m(b["x"]).square().sum(), 1), {"x": batch()["x"]}),
        (lambda m, b: ForwardOutput(m(b["x"]).square().sum(), int(b["of"].max()) + 1), GRAPHS),
    ],
    ids=["samples", "detection", "constant", "of-the-micro-batch", "two-samples", "one-field", "graphs"],
)
def test_a_number_that_is_not_of_fields_is_right(forward: Callable[..., Any], given: Any) -> None:
    assert told(forward, given) == []


@table(MEANS)
def test_a_bare_mean_is_right(loss: Any) -> None:
    """It is what a bare loss is taken for."""
    assert told(loss) == []


@table(SUMS)
def test_a_sum_with_a_sample_size_is_right(loss: Any) -> None:
    """As many samples, or as many tokens."""
    assert told(lambda m, b: ForwardOutput(loss(m, b), len(b["x"]))) == []
    assert told(lambda m, b: ForwardOutput(loss(m, b), torch.tensor(SAMPLES * STEPS))) == []


@table(RIGHT_IF_BARE)
def test_right_without_a_sample_size(loss: Any) -> None:
    """Whatever has been made a mean by hand, or is not known, is left alone."""
    assert told(loss) == []


@table(RIGHT_WITH_SIZE)
def test_right_with_a_sample_size(loss: Any) -> None:
    """Whatever has been multiplied by its sample size, or sums over samples and averages over something else."""
    assert told(lambda m, b: ForwardOutput(*loss(m, b))) == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize("what", ["loss", "penalty", "elements"])
def test_a_graph_of_many_paths_is_not_followed_to_its_end(what: str) -> None:
    """Values that are used twice, again and again, make more paths than could ever be read."""
    losses: dict[str, Callable[[nn.Module, Batch], Tensor]] = {
        "loss": lambda m, b: doubled(SQUARES(m(b["x"]), b["y"])),
        "penalty": lambda m, b: SQUARES(m(b["x"]), b["y"]) + doubled(m.out.weight).sum(),
        "elements": lambda m, b: doubled(per_sample(m, b)).mean(),
    }
    assert told(losses[what]) == []


@pytest.mark.sampled(9)
@table(MEANS)
def test_a_function_that_averages_is_right_in_a_supervised_trainer(loss: Any) -> None:
    """The trainer multiplies it by the number of samples."""
    supervised(loss, batch())  # a warning would be an error here


@pytest.mark.sampled(10)
@table({**MEANS, **SUMS})
def test_a_micro_batch_of_one_sample_is_right_either_way(loss: Any) -> None:
    """A sum over one sample is its mean."""
    assert told(loss, batch(samples=1)) == []
    assert told(lambda m, b: ForwardOutput(loss(m, b), len(b["x"])), batch(samples=1)) == []


def test_a_micro_batch_of_two_samples_is_enough() -> None:
    """To tell a sum from a mean."""
    assert len(told(lambda m, b: ForwardOutput(MEANS["squares"](m, b), len(b["x"])), batch(samples=2))) == 1
    assert len(told(SUMS["squares"], batch(samples=2))) == 1
    assert len(told(SUMS["squares"], {"temperature": torch.tensor(1.0), **batch()})) == 1  # a number does not count samples


@pytest.mark.parametrize("shape", [(10,), (3, 5, 5), (4, 5, 5)], ids=["features", "image", "transparent-image"])
def test_a_sample_without_a_batch_dimension_is_right(shape: tuple[int, ...]) -> None:
    """The length of its first dimension does not count samples."""
    model = nn.Linear(shape[-1], shape[-1])
    trainer = create_trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-6),
        lambda model, x: SQUARES(model(x), x, reduction="sum"),
    )
    trainer.run([torch.randn(shape)], max_epochs=1)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("size", [2, 10, 20, 50, 64, 100])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.05, 0.3])
def test_no_size_hides_label_smoothing(size: int, smoothing: float) -> None:
    """What is kept of the likelihood could be read as a weight times a round size, and is not."""
    messages = told(lambda m, b: (ENTROPY(m(b["x"]), b["c"], label_smoothing=smoothing), len(b["x"])), batch(size))
    assert len(messages) == 1


def test_only_the_first_micro_batch_is_looked_at() -> None:
    """A second run, and a second micro-batch, have no handler more than without it."""
    model = Net()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=1e-6), SUMS["squares"])
    with pytest.warns(LossDeclarationWarning) as caught:
        trainer.run([batch()] * 3, max_epochs=2)
    trainer.run([batch()] * 3, max_epochs=3)  # a warning would be an error here
    assert len(caught) == 1
    assert not trainer.has_handlers(TrainEvents.FORWARD_COMPLETED)


def mean_with_size(m: nn.Module, b: Batch) -> ForwardOutput:
    return ForwardOutput(ENTROPY(m(b["x"]), b["c"]), len(b["x"]))


def test_mixed_precision_is_seen_through() -> None:
    """Casts change nothing about what was summed."""
    model = Net()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=1e-6), mean_with_size, precision="bf16")
    with pytest.warns(LossDeclarationWarning, match=TOO_SMALL):
        trainer.run([batch()], max_epochs=1)


# --- logs, and evaluators ---------------------------------------------------------------------------------------------------

LOGS: dict[str, tuple[Callable[[nn.Module, Batch], Any], bool]] = {
    "accuracy": (lambda m, b: (m(b["x"]).argmax(1) == b["c"]).float().mean(), True),
    "a mean, read": (lambda m, b: m(b["x"]).square().mean().item(), True),
    "a largest value": (lambda m, b: m(b["x"]).abs().max(), True),
    "a count": (lambda m, b: (m(b["x"]).argmax(1) == b["c"]).sum(), False),
    "a sum": (lambda m, b: m(b["x"]).square().sum(), False),
    "a pair": (lambda m, b: (m(b["x"]).square().mean() * len(b["x"]), len(b["x"])), False),
    "the samples": (lambda _, b: len(b["x"]), False),
    "a constant with a fraction": (lambda *_: 0.1, True),
    "a norm of weights": (lambda m, _: m.out.weight.norm(), True),
    "a whole constant": (lambda *_: 3.0, False),  # a count that does not depend on the samples, maybe
    "nothing": (lambda *_: 0, False),
}


@table(LOGS)
def test_a_log_that_is_a_mean_is_noticed(loss: tuple[Any, bool]) -> None:
    """It would be divided by the sample size once more; in training and in evaluation."""
    log, is_wrong = loss

    def forward(m: nn.Module, b: Batch) -> ForwardOutput:
        return ForwardOutput(
            SQUARES(m(b["x"]), b["y"], reduction="sum"), len(b["x"]), {"right": len(b["x"]), "mine": log(m, b)}
        )

    messages = told(forward)
    assert len(messages) == is_wrong
    assert told(lambda m, b: ForwardOutput(SQUARES(m(b["x"]), b["y"]), logs={"mine": log(m, b)})) == []
    if is_wrong:
        assert messages[0].startswith("logs['mine'] of forward did not grow with the samples")
        assert "a pair (sum, denominator)" in messages[0]
        with pytest.warns(LossDeclarationWarning, match="'mine'"):
            create_evaluator(Net(), forward).run([batch()])


def told_of(log: Callable[[Tensor], Any], numbers: Sequence[float]) -> bool:
    """Whether a log of these numbers, one for each sample, is warned of."""
    given = batch(len(numbers)) | {"numbers": torch.tensor(numbers)}

    def forward(m: nn.Module, b: Batch) -> ForwardOutput:
        return ForwardOutput(SQUARES(m(b["x"]), b["y"], reduction="sum"), len(b["x"]), {"mine": log(b["numbers"])})

    messages = told(forward, given, updates=1)
    assert all("logs['mine'] of forward did not grow with the samples" in one for one in messages)
    return len(messages) == 1


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, pytest.param(7, marks=pytest.mark.slow)])
def test_an_accuracy_that_is_the_same_in_both_halves_is_noticed(count: int) -> None:
    """Or 0 in the first one: of whichever samples are right, unless all of them are, or none."""
    for right in itertools.product([0.0, 1.0], repeat=count):
        assert told_of(lambda numbers: numbers.mean(), right) == (0 < sum(right) < count), right
        assert not told_of(lambda numbers: numbers.sum(), right), right
        assert not told_of(lambda numbers: (numbers.sum(), len(numbers)), right), right


def test_an_accuracy_that_differs_in_the_sample_left_over_is_noticed() -> None:
    """It is a third in both halves of six, and the seventh sample is right as the fourth is."""
    assert told_of(lambda numbers: numbers.mean(), [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0])


UNLIKE_MEANS: dict[str, Callable[[Tensor], Any]] = {
    "the micro-batches": lambda _: 1,
    "nothing": lambda _: 0,
    "the samples": len,
    "different samples": lambda numbers: len(numbers.unique()),  # which doubled samples do not add to
}


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7, 8, 16, 17])
@pytest.mark.parametrize("name", UNLIKE_MEANS)
def test_what_is_the_same_in_both_halves_and_no_mean(name: str, count: int) -> None:
    """A constant, or a number that grows with the samples."""
    assert not told_of(UNLIKE_MEANS[name], [float(number) for number in range(count)])


def test_a_third_cut_that_forward_cannot_take() -> None:
    """What the halves have told is said all the same."""

    def forward(m: nn.Module, b: Batch) -> ForwardOutput:
        assert len(b["x"]) % 4 == 0
        return ForwardOutput(SQUARES(m(b["x"]), b["y"]), len(b["x"]), {"one": 1})

    messages = told(forward, updates=1)
    assert len(messages) == 1
    assert TOO_SMALL in messages[0]


@pytest.mark.parametrize("training", [False, True])
def test_an_evaluator_notices_a_mean(training: bool) -> None:
    """In its first micro-batch, once; and the model is in the mode that it had."""
    model = Net().train(training)
    evaluator = create_evaluator(model, mean_with_size)
    with pytest.warns(LossDeclarationWarning, match="sample_size=8 .* loss and gradient are 8 times too small") as caught:
        evaluator.run([batch()] * 2)
    assert len(caught) == 1
    evaluator.run([batch()])  # a warning would be an error here
    assert all(module.training == training for module in model.modules())
    create_evaluator(model, lambda m, b: ForwardOutput(SQUARES(m(b["x"]), b["y"], reduction="sum"), len(b["x"]))).run([batch()])
    with pytest.warns(LossDeclarationWarning, match=TOO_LARGE):
        create_evaluator(model, SUMS["squares"]).run([batch()])


# --- the trial of forward leaves no trace -----------------------------------------------------------------------------------


class Drawing(nn.Module):
    """Layers that draw numbers, move statistics and count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, CLASSES))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layers(x + 0.01 * random.random() + 0.01 * float(np.random.rand())) + 0.0 * torch.rand(())  # noqa: S311


def test_a_model_that_draws_is_trained_as_by_hand() -> None:
    """Bit by bit: generators, statistics, attributes and modes are those of a loop without the trial, which sees the mean."""
    ends = []
    for by_hand in (True, False):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model, data = Drawing(), [batch(), batch(4)]  # whose division is exact
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if by_hand:
            for one in data:
                optimizer.zero_grad()
                (ENTROPY(model(one["x"]), one["c"]) / len(one["x"])).backward()
                optimizer.step()
        else:
            with pytest.warns(LossDeclarationWarning, match=TOO_SMALL):
                create_trainer(model, optimizer, mean_with_size).run(data)
        draws = [torch.rand(1).item(), random.random(), np.random.rand()]  # noqa: S311
        assert all(module.training for module in model.modules())
        ends.append((model.calls, draws, copy.deepcopy(model.state_dict())))
    (calls, draws, right), (mine, drawn, state) = ends
    assert (mine, drawn) == (calls, draws)
    assert all(torch.equal(state[name], value) for name, value in right.items())


class Log:
    """Holds what its holder may look at."""

    def __init__(self) -> None:
        self.lines: list[object] = []


@pytest.mark.parametrize("make", [lambda: iter(range(9)), lambda: {"log": [object()]}, Log], ids=["iterator", "objects", "log"])
@pytest.mark.parametrize("place", ["around", "default", "model", "hook"])
def test_what_could_not_be_put_back_is_not_run(make: Callable[[], Any], place: str) -> None:
    """Where something is used that is neither a number nor a container of them, forward runs once for each micro-batch."""
    thing, model = make(), Net()

    class Using(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if thing else x

    if place == "model":
        model = Using()
    if place == "hook":
        model.register_forward_hook(lambda *_: thing and None)
    forwards: dict[str, Any] = {
        "around": lambda m, b: mean_with_size(m, b) if thing else None,
        "default": lambda m, b, used=thing: mean_with_size(m, b) if used else None,
    }
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=1e-6), forwards.get(place, mean_with_size))
    trainer.run([batch()])  # a warning would be an error here


def test_plain_containers_are_put_back() -> None:
    """A list or a counter of numbers is as if the trial had not been."""
    seen: list[int] = []
    counts = {"calls": 0}

    def forward(m: nn.Module, b: Batch) -> ForwardOutput:
        seen.append(len(b["x"]))
        counts["calls"] += 1
        return mean_with_size(m, b)

    assert len(told(forward)) == 1
    assert (seen, counts) == ([SAMPLES] * 2, {"calls": 2})
    number = 0

    def counting(m: nn.Module, b: Batch) -> ForwardOutput:
        nonlocal number
        number += 1
        return mean_with_size(m, b)

    assert told(counting) == []  # a variable outside could not be put back
    assert number == 2


def test_a_tensor_outside_is_not_written() -> None:
    """A memory bank counts what training has seen alone: the trial is broken off before it writes."""
    bank = torch.zeros(SAMPLES)

    def forward(m: nn.Module, b: Batch) -> ForwardOutput:
        bank[: len(b["x"])] += 1
        return mean_with_size(m, b)

    assert told(forward) == []
    assert bank.tolist() == [2.0] * SAMPLES


@pytest.mark.parametrize("samples", [2, 3, 4, 5, 6, 7])
def test_the_logarithm_of_the_number_of_samples_is_no_sum(samples: int) -> None:
    """A contrastive loss of equal features is log n, which doubles from 2 to 4 samples."""

    def contrastive(m: nn.Module, b: Batch) -> Tensor:
        features = 0.0 * m(b["x"])
        return ENTROPY(features @ features.T, torch.arange(len(features)))

    assert told(contrastive, batch(samples)) == []


def test_a_tensor_that_forward_gives_other_data_is_left_alone() -> None:
    """MoCo moves its key encoder so in forward. The trial moved such tensors too, or was refused."""
    held = torch.ones(3)

    class Momentum(Net):
        def __init__(self) -> None:
            super().__init__()
            self.key = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(m: nn.Module, b: Batch) -> ForwardOutput:
        m.key.data = m.key.data * 0.5
        held.data = held.data * 0.5
        return ForwardOutput(per_sample(m, b).sum(), len(b["x"]))

    model = Momentum()
    create_trainer(model, torch.optim.SGD(model.parameters(), lr=1e-6), forward).run([batch()] * 3)
    assert model.key.tolist() == [0.125] * 2
    assert held.tolist() == [0.125] * 3
    create_evaluator(model, forward).run([batch()])
    assert held.tolist() == [0.0625] * 3


@pytest.mark.parametrize("train", [True, False])
def test_a_forward_that_sets_the_mode_is_noticed(train: bool) -> None:
    """The mode of training moved running statistics in an evaluation, and eval mode kept them in training."""
    model = Net()

    def forward(m: nn.Module, b: Batch) -> Tensor:
        m.train(train)
        return per_sample(m, b).mean()

    def both(forward: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            create_trainer(model.train(), torch.optim.SGD(model.parameters(), lr=1e-6), forward).run([batch()] * 2)
            create_evaluator(model, forward).run([batch()] * 2)
        assert {(one.category, one.filename) for one in caught} <= {(UserWarning, __file__)}
        return [str(one.message) for one in caught]

    (line,) = both(forward)
    now, call = ("training", "train") if train else ("eval", "eval")
    assert line.startswith(f"forward has put the model into {now} mode")
    assert f"leave model.{call}() out of forward" in line
    assert both(lambda m, b: per_sample(m, b).mean()) == []


def test_trials_in_two_threads_leave_the_process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """One ended while another continued, and put back what that had set: no warning was shown any more in the whole process."""
    begun, first_is_over = threading.Event(), threading.Event()
    trials: list[str] = []

    def findings(_: Any) -> list[str]:
        trials.append(threading.current_thread().name)
        if len(trials) == 1:
            other.start()
            assert begun.wait(60)
        else:
            begun.set()
            assert first_is_over.wait(60)
        return []

    def train() -> None:
        model = Net()
        create_trainer(model, torch.optim.SGD(model.parameters(), lr=1e-6), lambda m, b: per_sample(m, b).mean()).run([batch()])
        begun.set()

    monkeypatch.setattr(loss_declaration, "_findings", findings)
    other, before = threading.Thread(target=train, name="other"), [*warnings.filters]
    train()
    first_is_over.set()
    other.join(60)
    assert not other.is_alive()
    assert warnings.filters == before
    assert trials == [threading.current_thread().name]


def with_collectives() -> list[Any]:
    """Trains and evaluates a mean over all ranks, with one collective in each forward; and a plain mean."""
    found = []

    def forward(m: nn.Module, b: Batch) -> ForwardOutput:
        loss = ENTROPY(m(b["x"]), b["c"])
        return ForwardOutput(over_ranks.all_reduce(loss), len(b["x"]))

    for function in (forward, mean_with_size):
        torch.manual_seed(0)
        model = idist.auto_model(Net())
        mine = [batch()] * (2 - idist.get_rank()) if function is mean_with_size else [batch()] * 2
        trainer = create_trainer(
            model, torch.optim.SGD(model.parameters(), lr=1e-6), function, options=UpdateOptions(reduction="ddp"), protect=False
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.run(mine, max_epochs=1)
            create_evaluator(model, function).run([batch()])
        found.append(sum(issubclass(one.category, LossDeclarationWarning) for one in caught))
    return found


@pytest.mark.slow
def test_a_forward_with_collectives_is_left_alone() -> None:
    """No rank begins one in the trial; and each rank is told of its own mean, in training and in evaluation."""
    assert run_ranks(with_collectives) == [[0, 2], [0, 2]]
