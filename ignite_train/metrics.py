"""The names of the metrics that handlers publish, the groups in which loggers show them, and metrics as single numbers."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from ignite_train.arguments import describe, did_you_mean, one_of

__all__ = [
    "PUBLISHED_METRICS",
    "TIMED_METRICS",
    "changed_numbers",
    "grouped_metric",
    "grouped_metrics",
    "is_better",
    "is_published_metric",
    "is_taken",
    "json_line",
    "printable_name",
    "refuse_other_mode",
    "score_in",
    "score_mode",
    "single_metrics",
]

_NAMES = {
    "train": "loss loss_base2 perplexity sample_size",
    "optimizer": "clipped grad_norm grad_norm_max learning_rate loss_scale skipped",
    "layers": "dead_layers curvature layer_grad_norm layer_weight_norm update_ratio",
    "speed": (
        "progress backward_seconds between_updates_seconds checkpoint_seconds data_seconds data_wait evaluation_seconds "
        "forward_seconds handler_seconds host_memory memory_allocated memory_peak memory_reserved model_flop_utilisation "
        "optimizer_seconds reduction_seconds samples_per_second slowest_rank slowest_to_median time_to_go train_wall "
        "update_seconds updates_per_second wall"
    ),
}
_WITH_PARTS = ("learning_rate", "curvature", "layer_grad_norm", "layer_weight_norm", "update_ratio")
_PER_SECOND = "_per_second"
_MAX_EXPANDED = 32  # numbers of one metric that are shown apart
_MAX_NAME = 200  # letters

PUBLISHED_METRICS: Mapping[str, str] = {name: group for group, names in _NAMES.items() for name in names.split()}
"""The metrics that handlers and the evaluator publish in `state.metrics`, and the group of each."""

TIMED_METRICS = frozenset(_NAMES["speed"].split()) - {"progress"}
"""Metrics that depend on the clock or on the machine: two runs with the same bits differ in them."""

_logger = logging.getLogger(__name__)

# Words of a score's name. A word that stands in names of both kinds ("rate", "score", "likelihood") is in neither.
_LOWER_IS_BETTER = (
    "loss losses error errors err perplexity ppl nll mae mse rmse msle mape wer cer ter eer bits bpb bpc bce crossentropy "
    "entropy distance divergence fid kid lpips regret cost latency hamming brier ece"
)
_HIGHER_IS_BETTER = (
    "accuracy accuracies acc bleu chrf rouge meteor f1 fbeta auc auroc auprc roc ap map precision recall sensitivity "
    "specificity iou miou dice jaccard reward rewards return returns psnr ssim mcc kappa r2 pearson spearman correlation elbo "
    "mrr ndcg hits correct wins"
)


def score_mode(score: str, mode: Literal["min", "max"] | None, *, of: str) -> Literal["min", "max"]:
    """Whether lower or higher scores are better: as `mode` says, or else as the words in the name of the score say.

    The last part of the name counts, in whole words, with and without a number at the end: `"validation/top1_accuracy"` has the
    words `top`, `top1` and `accuracy`. What was taken from the name is logged.

    Args:
        score: the name of a metric.
        mode: `"min"`, `"max"`, or None if the name is to decide.
        of: whose score it is, for the log and the error.

    Raises:
        TypeError: `score` is not a string.
        ValueError: `mode` is none of the three, or it is None and the name does not decide.

    Example:
        >>> [score_mode(name, None, of="Validation") for name in ("loss", "validation/top1_accuracy", "wordErrorRate")]
        ['min', 'max', 'min']
    """
    if not isinstance(score, str):
        raise TypeError(f"score must be the name of one of the evaluator's metrics, got {describe(score)} in {of}")
    if mode is not None:
        return "min" if one_of("mode", mode, ("min", "max")) == "min" else "max"
    spaced = re.sub(r"([a-z])([A-Z])", r"\1 \2", score.rpartition("/")[2])
    found = re.findall(r"([a-z]+)([0-9]*)", spaced.lower())
    words = {word for word, _ in found} | {word + number for word, number in found}
    is_lower = not words.isdisjoint(_LOWER_IS_BETTER.split())
    is_higher = not words.isdisjoint(_HIGHER_IS_BETTER.split())
    if is_lower == is_higher:
        said = "says both" if is_lower else "does not say it"
        raise ValueError(
            f"mode must be 'min' or 'max' for the score {score!r} of {of}, since its name {said}; pass mode='max' if higher "
            "scores are better"
        )
    better = "lower" if is_lower else "higher"
    _logger.info(f"{of}: {better} values of {score!r} are taken to be better, by its name; mode='min' or 'max' would say it")
    return "min" if is_lower else "max"


def is_better(score: float, other: float | None, mode: str, *, by: float = 0.0) -> bool:
    """Whether `score` is better than `other`, if there is one, by more than `by`. NaN is never better."""
    if other is None:
        return not math.isnan(score)
    return score < other - by if mode == "min" else score > other + by


def score_in(metrics: Mapping[str, Any], score: str) -> float:
    """The score among the metrics of an evaluator.

    Raises:
        ValueError: no metric has this name.
        TypeError: it is not one number.
    """
    if score not in metrics:
        hint = did_you_mean(score, metrics)
        raise ValueError(f"score must be one of the evaluator's metrics {sorted(metrics)}, got {score!r}{hint}")
    try:
        return float(metrics[score])
    except (TypeError, ValueError, RuntimeError) as error:  # a matrix of Ignite's, say
        raise TypeError(
            f"score must name a metric that is one number, got {score!r}, which is {describe(metrics[score])}"
        ) from error


def is_published_metric(name: str) -> bool:
    """Whether handlers publish a metric of this name.

    Those names are `PUBLISHED_METRICS`, numbers of a layer or of a parameter group, and rates per second.
    """
    is_one_of_several = name.startswith("loss/") or name.partition("/")[0] in _WITH_PARTS
    return name in PUBLISHED_METRICS or is_one_of_several or name.endswith(_PER_SECOND)


def refuse_other_mode(score: str, mode: str, saved_score: Any, saved_mode: Any) -> None:
    """Compares the direction of a score with the one in a checkpoint, whose best score means the opposite in the other one.

    Args:
        score: the name of the metric.
        mode: `"min"` or `"max"`.
        saved_score: the name in the checkpoint.
        saved_mode: the direction in the checkpoint.

    Raises:
        ValueError: the score is the same and the direction is not.
    """
    if saved_score == score and saved_mode != mode:
        raise ValueError(
            f"mode must be {saved_mode!r:.60} for the score {score!r}, as when the checkpoint was saved, got {mode!r}: its "
            "best score would be the worst; pass the same mode, or train from the beginning in another directory"
        )


def grouped_metric(name: str) -> str:
    """The name under which loggers show a metric of the trainer.

    Args:
        name: its name in `state.metrics`.

    Returns:
        `"train/loss"`, `"optimizer/grad_norm"`, `"speed/data_wait"`; a name of the user's own is put into `train`, unless it
        has a group (a `/`) already.

    Example:
        >>> [grouped_metric(name) for name in ("loss", "learning_rate/0", "accuracy", "baseline/loss")]
        ['train/loss', 'optimizer/learning_rate/0', 'train/accuracy', 'baseline/loss']
    """
    group = PUBLISHED_METRICS.get(name.partition("/")[0])
    if group is None and name.endswith(_PER_SECOND):
        group = "speed"
    if group is None:
        return name if "/" in name else f"train/{name}"
    return f"{group}/{name}"


def is_taken(name: str) -> bool:
    """Whether no log may have this name: handlers publish a metric of the name, or loggers show one under it.

    Example:
        >>> [name for name in ("loss", "train/loss", "speed/wall", "train/accuracy", "baseline/loss") if is_taken(name)]
        ['loss', 'train/loss', 'speed/wall']
    """
    published = name.partition("/")[2]
    return is_published_metric(name) or (is_published_metric(published) and grouped_metric(published) == name)


def grouped_metrics(metrics: Mapping[str, Any], left_out: set[str], tag: str | None = None) -> dict[str, float]:
    """The metrics as single numbers under the names by which loggers show them.

    Args:
        metrics: by name.
        left_out: see `single_metrics`.
        tag: the group of an evaluator's metrics; None for the metrics of the trainer, see `grouped_metric`.
    """
    numbers = single_metrics(metrics, left_out)
    return {grouped_metric(name) if tag is None else f"{tag}/{name}": value for name, value in numbers.items()}


def single_metrics(metrics: Mapping[str, Any], left_out: set[str]) -> dict[str, float]:
    """The metrics as single numbers, for what can show nothing else.

    A mapping, a list or a small tensor becomes several numbers: `"recall"` becomes `"recall/0"`, `"recall/1"`, ... What is
    not made of numbers, and what has more than 32 of them, is left out with a warning. A tensor on a device is read in one
    transfer.

    Args:
        metrics: by name.
        left_out: the names that a warning was given for. The function adds to it, so that each name is warned about once.

    Returns:
        The numbers by name, in the order of `metrics`.
    """
    names = [*metrics]
    if {*map(type, metrics.values())} == {float} and {*map(type, names)} == {str} and _are_printable(*names):
        return dict(metrics)  # as most are; what follows takes far longer
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            found = dict(_numbers(printable_name(name), value))
        except (TypeError, ValueError, RuntimeError, OverflowError):  # torch's and Python's for what is not a number
            found = None
        if found is not None and len(found) <= _MAX_EXPANDED:
            numbers |= found
        elif name not in left_out:
            left_out.add(name)
            why = "is not made of numbers"
            if found is not None:
                why = f"has {len(found)} numbers, and {_MAX_EXPANDED} may be shown"
            _logger.warning(f"the metric {printable_name(name)!r} {why} ({type(value).__name__}); it is left out of the logs")
    return numbers


def changed_numbers(numbers: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """The numbers that `before` lacks or has with another value. NaN does not differ from NaN."""
    return {
        name: number
        for name, number in numbers.items()
        if name not in before or not (number == before[name] or (math.isnan(number) and math.isnan(before[name])))
    }


def json_line(entries: Mapping[str, Any]) -> str:
    """A line of JSON, which knows no NaN: numbers that are not finite become strings, which `float` reads."""
    return json.dumps(
        {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in entries.items()
        }
    )


def printable_name(name: Any) -> str:
    """The name of a metric as text that any console and file can hold: one line, of limited length, that can be encoded."""
    text = name if type(name) is str else str(name)
    if _are_printable(text):
        return text
    line = " ".join(text.splitlines())
    printable = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line[:_MAX_NAME])
    return printable if len(line) <= _MAX_NAME else f"{printable}..."


def _are_printable(*names: str) -> bool:
    return "".join(names).isprintable() and max(map(len, names)) <= _MAX_NAME


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Real):
        yield name, float(value)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _numbers(f"{name}/{printable_name(key)}", entry)
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            yield from _numbers(f"{name}/{index}", entry)
    else:
        tensor = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value)
        if tensor.is_complex():
            raise TypeError("complex")
        yield from _of_tensor(name, tensor)


def _of_tensor(name: str, tensor: Tensor) -> Iterator[tuple[str, float]]:
    if tensor.numel() == 1:
        yield name, float(tensor)
    elif tensor.numel() > _MAX_EXPANDED:  # not read
        yield from ((f"{name}/{index}", 0.0) for index in range(tensor.numel()))
    else:
        yield from _numbers(name, tensor.tolist())
