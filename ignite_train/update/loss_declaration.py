"""A look at the graph of the first loss: whether it is the sum, or the mean, that `forward` declares it to be."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ignite_train.events import TrainEvents
from ignite_train.forward import ForwardOutput, is_declared
from ignite_train.trainer import Trainer

__all__ = ["LossDeclarationWarning", "misdeclared", "warn_of_misdeclared_loss"]

_NODES = 64  # that are looked at below one reduction
_TERMS = 64
_REDUCING_LOSSES = {  # loss functions of torch whose node says how they reduce
    "BinaryCrossEntropy",
    "BinaryCrossEntropyWithLogits",
    "HuberLoss",
    "MseLoss",
    "MultiMarginLoss",
    "MultilabelMarginLoss",
    "NllLoss",
    "NllLoss2D",
    "SmoothL1Loss",
    "SoftMarginLoss",
}
_WEIGHTED_LOSSES = {"BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"}  # whose weight is one for each element
_SAME_VALUE = {"Alias", "Clone", "Expand", "Permute", "ReshapeAlias", "Squeeze", "T", "ToCopy", "Transpose", "Unsqueeze"}
_SAME_VALUE |= {"UnsafeView", "View"}
_ELEMENTWISE = {"Abs", "Add", "Clamp", "ClampMax", "ClampMin", "Div", "Exp", "Log", "Maximum", "Minimum", "Mul", "Neg", "Pow"}
_ELEMENTWISE |= {"Relu", "Rsub", "Sigmoid", "Softplus", "Sqrt", "Sub", "Where", "Xlogy"}
_PENALTIES = {"AccumulateGrad", "Cat", "LinalgVectorNorm", "Mean", "Norm", "Stack", "Sum"}


class LossDeclarationWarning(UserWarning):
    """The first loss is a mean where `forward` declares a sum, or a sum where it declares a mean."""


class _Scale(NamedTuple):
    """A number that the loss is multiplied by, or divided by; read when it matters."""

    value: float | Tensor
    divides: bool

    def number(self) -> float:
        value = float(self.value)  # sync, where it lies on an accelerator; once in a run, if the loss looks wrong
        return value if not self.divides else 1.0 / value if value else math.inf


class _Term(NamedTuple):
    """One summand of the loss.

    Attributes:
        kind: how its elements became one number; None: that cannot be told.
        sizes: the shape of these elements, where it is known.
        scales: what it is multiplied and divided by.
        weights: what its elements are multiplied and divided by, one by one.
        is_nll: whether it is the negative log likelihood.
    """

    kind: Literal["mean", "sum", "penalty"] | None
    sizes: tuple[int, ...] = ()
    scales: tuple[_Scale, ...] = ()
    weights: tuple[_Scale, ...] = ()
    is_nll: bool = False


def warn_of_misdeclared_loss(trainer: Trainer) -> Trainer:
    """Has `trainer` look at the loss of its first micro-batch, and at no other; a run in a new process looks once more."""

    def look(trainer: Trainer) -> None:
        handle.remove()
        output, group = trainer.state.forward_output, trainer.state.batch
        message = None if output is None else misdeclared(output, group[0])
        if message is not None:
            warnings.warn(message, LossDeclarationWarning, stacklevel=2)

    handle = trainer.add_event_handler(TrainEvents.FORWARD_COMPLETED, look)
    return trainer


def misdeclared(output: ForwardOutput, micro_batch: Any) -> str | None:
    """Says in one line what is wrong with the declaration of this loss, and what to do; None if it is right or unknown.

    It rests on the names and saved values of the autograd graph: those of torch's loss functions and reductions, seen through
    sums of terms, numbers that these are multiplied by, changes of shape and masks. Whatever is not recognised is taken to be
    right. So are a micro-batch of one sample, a `sample_size` of 1, and a mean that is multiplied by its `sample_size`.
    """
    if output.loss.grad_fn is None:
        return None
    try:
        terms = list(islice(_terms(output.loss.grad_fn, ()), _TERMS + 1))
        if len(terms) > _TERMS or any(term.kind is None for term in terms):
            return None
        terms = [term for term in terms if term.kind != "penalty"]
        if not terms:
            return None
        if not is_declared(output):
            return _wrong_mean(terms, _batch_size(micro_batch))
        if all(term.kind == "sum" and not term.scales for term in terms):
            return None  # without a look at the size, which most programs have on the accelerator
        size = float(output.sample_size)  # sync, where it lies on an accelerator; once in a run
        return _wrong_sum(terms, size) if size >= 2 else None
    except (AttributeError, RuntimeError, RecursionError):  # of another version of torch, or with hooks on what is saved
        return None


def _wrong_mean(terms: list[_Term], batch: int | None) -> str | None:
    """A bare loss, which is taken as a mean, but is a sum over the samples."""
    if batch is None or batch < 2 or not all(_is_plain_sum(term, batch) for term in terms):
        return None
    return (
        f"forward returned a bare loss, which is taken as a mean, but it looks like a sum over {batch} samples; if it is one, "
        f"the gradient is {batch} times too large; return ForwardOutput(loss, sample_size=...) or the mean; for a step along "
        "the sum of a micro-batch return ForwardOutput(loss, sample_size=1)"
    )


def _wrong_sum(terms: list[_Term], size: float) -> str | None:
    """A loss with a sample size, which must be a sum, but is a mean; or is the sum times the sample size."""
    if all(term.kind == "mean" for term in terms):
        wrong = all(_is_plain_mean(term, size) and not _may_hold(term, size) for term in terms)
    else:
        wrong = all(term.kind == "sum" and _is_divided_by(term, size) for term in terms)
    if wrong:
        return (
            f"forward returned sample_size={size:g} with a loss that looks like a mean; if it is one, the gradient is {size:g} "
            'times too small; return the sum (reduction="sum"), or the mean times sample_size, or the mean alone'
        )
    if size.is_integer() and all(_is_plain_sum(_without(term, size), int(size)) for term in terms):
        return (
            f"the loss looks like a sum that was multiplied by sample_size={size:g}; if it is one, the gradient is {size:g} "
            "times too large; the loss_fn of create_supervised_trainer must return the mean, or be a loss module of torch with "
            'reduction="sum"'
        )
    return None


def _is_plain_sum(term: _Term, batch: int) -> bool:
    """Whether it adds up samples, and nothing may have made a mean of it again."""
    if term.kind != "sum" or not term.sizes or term.sizes[0] < batch or term.sizes[0] % batch:
        return False
    if any(scale.divides for scale in term.scales) or not 0.5 <= abs(_product(term)) < math.inf:
        return False
    return all(not weight.divides and _total(weight, term.sizes) >= batch / 2 for weight in term.weights)


def _is_plain_mean(term: _Term, size: float) -> bool:
    """Whether it is a mean over `size` samples, or over what these consist of, that was not multiplied by their number."""
    number = math.prod(term.sizes)
    if number < 2 or (not term.is_nll and number % size):
        return False
    if any(math.isclose(scale.number(), size, rel_tol=1e-6) for scale in term.scales):
        return False
    return abs(_product(term)) <= 1.0 + 1e-6 and all(_is_at_most_one(weight) for weight in term.weights)


def _is_divided_by(term: _Term, size: float) -> bool:
    """Whether it is a sum divided by `size`: a mean by hand, and not a mean over features of which there are `size` too."""
    factors, number = [scale.number() for scale in term.scales], math.prod(term.sizes)
    if any(math.isclose(factor, size, rel_tol=1e-6) for factor in factors) or abs(_product(term)) > 1.0:
        return False
    if not any(math.isclose(factor, 1.0 / size, rel_tol=1e-6) for factor in factors):
        return False
    return size not in term.sizes[1:] and bool(number % (size * size)) and all(_is_at_most_one(w) for w in term.weights)


def _without(term: _Term, size: float) -> _Term:
    """The term before it was multiplied by `size`; a term that cannot be judged if it was not."""
    for index, scale in enumerate(term.scales):
        if not scale.divides and math.isclose(scale.number(), size, rel_tol=1e-6):
            return term._replace(scales=(*term.scales[:index], *term.scales[index + 1 :]))
    return _Term(None)


def _may_hold(term: _Term, size: float) -> bool:
    """Whether its factor may be `size` times a weight that the user chose, such as 0.64 = 64 · 0.01."""
    weight = abs(_product(term)) / size
    return bool(term.scales) and math.isclose(float(f"{weight:.1g}"), weight, rel_tol=1e-6)


def _product(term: _Term) -> float:
    return math.prod(scale.number() for scale in term.scales)


def _total(weight: _Scale, sizes: tuple[int, ...]) -> float:
    """The sum of all weights: the number of samples or elements where they are a mask, and 1 where they make a mean."""
    values = torch.as_tensor(weight.value)
    return float(values.float().abs().mean()) * math.prod(sizes)  # sync, once in a run


def _is_at_most_one(weight: _Scale) -> bool:
    size = torch.as_tensor(weight.value).abs()
    return bool((size >= 1).all() if weight.divides else (size <= 1).all())  # sync, once in a run


# --- reading the graph ------------------------------------------------------------------------------------------------------


def _terms(node: Any, scales: tuple[_Scale, ...]) -> Iterator[_Term]:
    """The summands of a scalar, each with what it is multiplied by."""
    while True:
        operation, inputs = _operation(node), [following for following, _ in node.next_functions if following is not None]
        if operation in {"Mul", "Div"} and len(inputs) == 1 and (scale := _scale(node, operation)) is not None:
            if isinstance(scale.value, Tensor) and scale.value.numel() != 1:
                yield _Term(None)
                return
            scales = (*scales, scale)
        elif operation == "Add" and (likelihood := _smoothed(inputs)) is not None:
            node = likelihood
            continue
        elif operation in {"Add", "Sub"} and len(inputs) == 2:
            yield from _terms(inputs[0], scales)
            yield from _terms(inputs[1], (*scales, _Scale(float(node._saved_alpha), divides=False)))
            return
        elif operation == "Sum" and len(inputs) == 1 and _operation(inputs[0]) == "Stack" and len(_shape(node)) == 1:
            for following, _ in inputs[0].next_functions:
                yield from _terms(following, scales) if following is not None else ()
            return
        elif operation not in _SAME_VALUE | {"Add", "Neg", "Rsub", "Sub"} or len(inputs) != 1:
            yield _reduction(node, operation, scales)
            return
        node = inputs[0]


def _smoothed(inputs: list[Any]) -> Any:
    """The negative log likelihood, if these are the two summands that torch's label smoothing makes; or None."""
    if len(inputs) != 2 or any(node.name() != "MulBackward1" for node in inputs):  # a product in Python is a MulBackward0
        return None
    following = inputs[0].next_functions[0][0]
    return following if following is not None and _operation(following).startswith("NllLoss") else None


def _reduction(node: Any, operation: str, scales: tuple[_Scale, ...]) -> _Term:
    """What made one number of many."""
    if operation in _REDUCING_LOSSES:
        weight = node._saved_weight if operation in _WEIGHTED_LOSSES else None
        weighting = () if weight is None else (_Scale(weight, divides=False),)
        is_nll = operation.startswith("NllLoss")
        sizes = tuple(node._saved_target.shape if is_nll else node._saved_self.shape)
        reduction = {1: "mean", 2: "sum"}.get(node._saved_reduction)
        return _Term(reduction, sizes, scales, weighting, is_nll)  # type: ignore[arg-type]
    if operation in {"Mean", "Sum"}:
        if _is_penalty(node):
            return _Term("penalty")
        sizes, (below, _) = _shape(node), node.next_functions[0]
        linear, below = _linear(below)
        weights, known = _weights(below)
        term = _Term("mean" if operation == "Mean" else "sum", sizes, (*scales, *linear), (*weights,))
        return term if known else _Term(None)
    return _Term("penalty" if _is_penalty(node) else None)


def _linear(node: Any) -> tuple[list[_Scale], Any]:
    """The numbers that all elements are multiplied by, and what is below them."""
    scales: list[_Scale] = []
    while node is not None:
        operation, inputs = _operation(node), [following for following, _ in node.next_functions if following is not None]
        scale = _scale(node, operation) if operation in {"Mul", "Div"} and len(inputs) == 1 else None
        if scale is not None and not (isinstance(scale.value, Tensor) and scale.value.numel() != 1):
            scales.append(scale)
        elif operation not in _SAME_VALUE | {"Neg"} or len(inputs) != 1:
            break
        node = inputs[0]
    return scales, node


def _weights(node: Any) -> tuple[list[_Scale], bool]:
    """What elements are multiplied by, one by one, and whether they are still those of samples: not if these were reduced."""
    weights: list[_Scale] = []
    waiting, seen = [node], 0
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        seen += 1
        operation, inputs = _operation(node), [following for following, _ in node.next_functions if following is not None]
        if seen > _NODES or (operation in {"Mean", "Sum"} and _reduces_first(node)):
            return [], False
        if operation in {"Mul", "Div"} and len(inputs) == 1:
            scale = _scale(node, operation)
            if scale is None:
                return [], False
            if isinstance(scale.value, Tensor) and scale.value.numel() != 1:
                weights.append(scale)
        if operation in _ELEMENTWISE | _SAME_VALUE | {"Mean", "Sum"}:
            waiting += inputs
    return weights, True


def _is_penalty(node: Any) -> bool:
    """Whether it is made of parameters alone, as weight decay is: no sample takes part in it."""
    waiting, seen = [node], 0
    while waiting:
        node, seen = waiting.pop(), seen + 1
        operation, inputs = _operation(node), [following for following, _ in node.next_functions if following is not None]
        if seen > _NODES * _TERMS or operation not in _ELEMENTWISE | _SAME_VALUE | _PENALTIES:
            return False
        if operation in {"Mul", "Div"} and len(inputs) == 1 and node.name()[-1] == "0":
            scale = _scale(node, operation)
            if scale is None or (isinstance(scale.value, Tensor) and scale.value.numel() != 1):
                return False
        elif operation in _ELEMENTWISE and any(f is None for f, _ in node.next_functions) and operation != "Pow":
            return False
        waiting += inputs
    return True


def _operation(node: Any) -> str:
    """The name of what torch did; empty for functions that are not torch's, whose nodes have no number."""
    if node.name().endswith("AccumulateGrad"):
        return "AccumulateGrad"
    found = re.fullmatch(r"(\w+)Backward\d+", node.name())
    return found[1] if found else ""


def _scale(node: Any, operation: str) -> _Scale | None:
    """What a node with one input multiplies or divides it by; None if it is not known, or the input is the divisor."""
    following = node.next_functions
    if len(following) == 2 and following[0][0] is None:
        return None if operation == "Div" else _Scale(node._saved_self, divides=False)
    other = node._saved_other
    return None if other is None else _Scale(other, divides=operation == "Div")


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in node._saved_self_sym_sizes)


def _reduces_first(node: Any) -> bool:
    """Whether a sum or a mean goes over the first dimension, in which samples lie."""
    if node.name()[-1] == "0":
        return True
    dimensions = node._saved_dim if isinstance(node._saved_dim, (tuple, list)) else (node._saved_dim,)
    number = len(_shape(node))
    return not dimensions or any((d - 2**64 if d >= 2**63 else d) % number == 0 for d in dimensions)


def _batch_size(micro_batch: Any) -> int | None:
    """Samples in a micro-batch, if its tensors leave no doubt: a sample alone may have a first dimension too."""
    tensors = [leaf for leaf in pytree.tree_leaves(micro_batch) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not tensors:
        return None
    size = len(tensors[0])
    shapes = [tensor.shape for tensor in tensors if len(tensor) == size]
    is_image = all(len(shape) == 3 for shape in shapes) and size <= 4
    return None if is_image or all(len(shape) == 1 for shape in shapes) else size
