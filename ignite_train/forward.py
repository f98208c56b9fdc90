"""The result of the user's `forward` for one micro-batch, and the check of it."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ignite_train.arguments import describe
from ignite_train.errors import ForwardContractError
from ignite_train.metrics import is_taken

__all__ = [
    "OF_THIS_MICRO_BATCH",
    "TERM",
    "UNCOUNTED",
    "BoundForward",
    "Forward",
    "ForwardOutput",
    "Mean",
    "TermTotals",
    "as_forward_output",
    "bind_forward",
    "is_declared",
    "names_model",
    "refuse_fraction",
]

_CONTRACT = "return ForwardOutput(loss, sample_size=..., logs={...}), (loss, sample_size) or a scalar mean loss"

TERM = "loss/"
"""The beginning of the names of those logs that a loss of several terms leaves, one for each term."""

TermTotals = Mapping[str, float] | None
"""The denominator of each term of a loss over the whole update, or one of the two constants below."""

OF_THIS_MICRO_BATCH: TermTotals = None
"""The update has one micro-batch, whose denominators are those of the whole update."""

UNCOUNTED: TermTotals = {}
"""No function has counted them. The denominators of one micro-batch are not enough, or gradients are not divided by them."""

_PLAIN_NUMBERS = {int, float}  # asking for a plain number first is faster than isinstance(x, Tensor)

_checked_names: set[str] = set()  # of logs, so that a name is looked at when it is new and not in each micro-batch

_NOT_DECLARED = float("1")
"""The object that stands for a sample size that `forward` did not give. It has no class of its own, because torch 2.11 would
not compile it."""


class Mean(NamedTuple):
    """A log that is a mean over the samples of the micro-batch already, such as `{"accuracy": Mean(right.float().mean())}`.

    It weighs as much as the micro-batch, by its `sample_size`, in float64 whatever its dtype is. It is the pair
    `(value * sample_size, sample_size)`, so micro-batches and ranks that do not return it do not count. Without this class a
    number in `logs` is a sum.

    Attributes:
        value: the mean; a number or a scalar tensor.
    """

    value: float | Tensor


class ForwardOutput(NamedTuple):
    """The loss of one micro-batch and how much it weighs.

        return ForwardOutput(cross_entropy(logits, y, reduction="sum"), sample_size=len(y))

    Attributes:
        loss: the loss **summed** over the micro-batch, a tensor with one element and, in training, a graph. Where `sample_size`
            is left out, it is taken as a mean of weight 1. Several losses with denominators of their own are a mapping,
            `{"mlm": (mlm_sum, num_masked), "nsp": (nsp_sum, num_pairs)}`, without a `sample_size`: the update is along
            Σ∇mlm/Σnum_masked + Σ∇nsp/Σnum_pairs, and each mean is shown as `"loss/mlm"` and so on. A term without samples
            must be a sum of 0. See `UpdateOptions(sample_sizes=...)`.
        sample_size: the weight of this micro-batch in the mean: its targets, tokens or samples. A number or a scalar tensor,
            at least 0. The update's gradient is Σ∇loss / Σsample_size over all micro-batches and ranks.
        logs: sums to be added up over micro-batches and ranks beside the loss; numbers or scalar tensors by name, whose means
            are per sample: `{"accuracy": num_correct}`. What is a mean already is given as `{"accuracy": Mean(mean)}`. A pair
            such as `{"nll": (nll_sum, num_tokens)}` has a denominator of its own, which is added up too. The names of
            metrics that exist anyway, such as `"loss"` and `"learning_rate"`, are refused, also with the group in which loggers
            show them, such as `"train/loss"`.
        outputs: anything that handlers and Ignite's metrics are to see of this micro-batch, such as `(y_pred, y)`. Neither
            reduced nor kept: it is an evaluator's `state.output`, and `state.forward_output.outputs` in an update, where it
            still has its graph.
    """

    loss: Tensor | Any  # or a mapping, which `as_forward_output` makes a tensor of
    sample_size: float | Tensor = _NOT_DECLARED
    logs: Mapping[str, float | Tensor | Mean | tuple[float | Tensor, float | Tensor]] = {}
    outputs: Any = None


BoundForward = Callable[[Any, Any], ForwardOutput | tuple[Any, ...] | Tensor]
"""`forward(model, micro_batch)`, which knows the state if it needs one. For type checkers the model is of any class, so that
`forward` may name that of its own."""

Forward = BoundForward | Callable[[Any, Any, Any], ForwardOutput | tuple[Any, ...] | Tensor]
"""`forward(model, micro_batch)` or `forward(model, micro_batch, state)`, with the state of the engine that calls it. Returns
a `ForwardOutput`, a plain tuple of its fields, or a scalar: a mean loss of weight 1. The second of a plain pair must be a whole
number, since an accuracy or another loss may have been meant."""

_NAMES_OF_TARGETS = {"target", "targets", "label", "labels", "y_true"}
_NAMES_OF_ENGINES = {"engine", "trainer"}
_NAMES_OF_MODELS = {"model", "module", "net", "network"}
_CALLS = "forward(model, micro_batch) or forward(model, micro_batch, state)"


def bind_forward(forward: Callable[..., Any], get_state: Callable[[], Any]) -> BoundForward:
    """Makes a function of two arguments of `forward`, which gets the state if it has a third positional parameter.

    A parameter with a default is not the state's, nor is one that `functools.partial` has filled in.

    Args:
        forward: the user's.
        get_state: gives the state.

    Returns:
        `forward` itself if it has two.

    Raises:
        TypeError: it is not callable, or takes other arguments.
    """
    if not callable(forward) or isinstance(forward, type):
        raise TypeError(f"forward must be callable as {_CALLS}, got {describe(forward)}")
    try:  # a module's own call takes anything
        signature = inspect.signature(forward.forward if isinstance(forward, nn.Module) else forward)
    except ValueError:  # some functions that are not written in Python have none
        return forward
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [one for one in signature.parameters.values() if one.kind in positional and one.default is one.empty]
    try:
        signature.bind(*(None,) * max(2, min(3, len(required))))
    except TypeError:
        raise TypeError(f"forward must be callable as {_CALLS}, got one with the parameters {signature!s:.80}") from None
    if len(required) > 1 and required[1].name in _NAMES_OF_MODELS and required[0].name not in _NAMES_OF_MODELS:
        raise TypeError(f"forward must be callable as {_CALLS}, got the parameters {signature!s:.80}; put the model first")
    _refuse_other_functions(forward, signature, [one.name for one in required])
    if len(required) < 3:
        return forward

    @functools.wraps(forward)
    def bound(model: nn.Module, micro_batch: Any) -> Any:
        return forward(model, micro_batch, get_state())

    return bound


def names_model(function: Callable[..., Any]) -> bool:
    """Whether the first parameter of `function` has the name of a model."""
    try:
        return next(iter(inspect.signature(function).parameters), "") in _NAMES_OF_MODELS
    except ValueError:  # some functions that are not written in Python have no signature
        return False


def _refuse_other_functions(forward: Any, signature: inspect.Signature, names: Sequence[str]) -> None:
    """Refuses a loss, a model, and the functions that other libraries call instead.

    Raises:
        TypeError: it is one of these, by the kind of the object or the names of its parameters.
    """
    got = f"forward must be callable as {_CALLS}, got the parameters {signature!s:.80}"
    second = names[1] if len(names) > 1 else ""
    if second in _NAMES_OF_TARGETS and names[0] not in _NAMES_OF_MODELS:
        raise TypeError(
            f"{got} of a loss; write create_supervised_trainer(model, optimizer, loss_fn), or a forward that calls it"
        )
    takes_more = any(one.kind is one.VAR_POSITIONAL for one in signature.parameters.values())  # as a wrapper does
    if isinstance(forward, nn.Module) and len(names) < 2 and not takes_more:
        raise TypeError(f"{got} of a module; write a function that calls the model and returns the loss")
    if second == "batch_idx" or (second and names[0] in _NAMES_OF_ENGINES):
        raise TypeError(f"{got}; write one whose first argument is the model and whose second is the micro-batch")


def is_declared(output: ForwardOutput) -> bool:
    """Whether `forward` gave a sample size. Where it did not, the loss is taken as a mean of weight 1."""
    return output.sample_size is not _NOT_DECLARED


def as_forward_output(returned: Any, term_totals: TermTotals = OF_THIS_MICRO_BATCH) -> ForwardOutput:
    """Reads what `forward` returned. A bare scalar tensor is a mean of weight 1. A loss of several terms becomes one number.

    Args:
        returned: by the user's function.
        term_totals: the denominators of a loss with several terms.

    Raises:
        ForwardContractError: it is nothing of what `Forward` allows; the message says what to return.
    """
    output = returned if type(returned) is ForwardOutput else _read(returned)
    if type(output.loss) is not Tensor or term_totals:
        output = _with_one_loss(output, term_totals)
    loss, sample_size, logs, _ = output
    if loss.dim() or not loss.is_floating_point():
        output = output._replace(loss=_checked_loss(loss))
    is_number = type(sample_size) in _PLAIN_NUMBERS or _is_number(sample_size)
    if is_number and not 0 <= sample_size < math.inf:
        raise ForwardContractError(f"sample_size must be finite and at least 0, forward returned {sample_size!r}")
    if type(logs) is not dict and not isinstance(logs, Mapping):
        raise ForwardContractError(f"logs must be a mapping of names to numbers or left out, forward returned {describe(logs)}")
    return _with_checked_logs(output) if logs else output


def _read(returned: Any) -> ForwardOutput:
    """Makes a `ForwardOutput` of a loss, or of a tuple."""
    if isinstance(returned, Tensor):
        return ForwardOutput(returned)
    if not isinstance(returned, tuple) or not 1 <= len(returned) <= 4:
        raise ForwardContractError(f"forward returned {_describe(returned)}; {_CONTRACT}")
    if len(returned) == 2 and type(returned[1]) is float:
        refuse_fraction(returned[1])
    return ForwardOutput(*returned)


def _with_one_loss(output: ForwardOutput, term_totals: TermTotals) -> ForwardOutput:
    """The output with one tensor for its loss, of what may be several terms, or no tensor."""
    if term_totals or isinstance(output.loss, dict):
        output = _sum_of_terms(output, term_totals)
    return output if type(output.loss) is Tensor else output._replace(loss=_checked_loss(output.loss))


def _with_checked_logs(output: ForwardOutput) -> ForwardOutput:
    """The output; each of its logs is a number, a pair or a `Mean`."""
    for name, value in output.logs.items():
        if name not in _checked_names:
            _check_name(name)
        if type(value) is tuple:
            _check_pair(name, value)
        elif type(value) is Mean:
            _check_number(f"logs[{name!r}]", value.value)
        else:
            _check_number(f"logs[{name!r}]", value)
    return output


def _checked_loss(loss: Any) -> Tensor:
    if isinstance(loss, DTensor):  # of a model on a mesh, such as with loss parallel
        loss = loss.full_tensor()
    if not isinstance(loss, Tensor):
        raise ForwardContractError(f"the loss that forward returned is {_describe(loss)}, not a tensor; {_CONTRACT}")
    if loss.numel() != 1:
        raise ForwardContractError(
            f"the loss that forward returned has shape {tuple(loss.shape)}; reduce it to one number, say with .sum() "
            "beside sample_size=number of targets, or .mean() alone"
        )
    if not loss.is_floating_point():
        raise ForwardContractError(
            f"the loss that forward returned has dtype {loss.dtype}; it must have a real floating-point dtype, such as float32"
        )
    return loss.reshape(())


def _sum_of_terms(output: ForwardOutput, totals: TermTotals) -> ForwardOutput:
    """Makes one number of a loss of several terms, whose gradient over Σsample_size is the sum of the terms' means.

    The sample size is the sum N of all denominators n, and the loss is Σ sum · N/n over the terms, with N and n of the update.
    """
    terms, logs = _checked_terms(output, totals), output.logs
    own = {name: _exact(size, total.dtype) for name, (total, size) in terms.items()}
    sizes = own if totals is None else totals
    whole = sum(sizes[name] for name in terms)
    loss = sum(value * _quotient(whole, sizes[name]) for name, (value, _) in terms.items())
    pairs = {TERM + name: pair for name, pair in terms.items()}  # with graphs, for what takes their gradients one by one
    return output._replace(loss=loss, sample_size=sum(own.values()), logs={**logs, **pairs})


def _exact(size: float | Tensor, dtype: torch.dtype) -> float | Tensor:
    """A denominator in the dtype of a loss, and at least in float32: bfloat16 has no 257."""
    return size.to(torch.promote_types(dtype, torch.float32)) if isinstance(size, Tensor) else size


def _quotient(whole: float | Tensor, part: float | Tensor) -> float | Tensor:
    """0 where the part is 0. A tensor is not read."""
    if isinstance(part, Tensor):
        return whole / part.clamp(min=1e-30) * (part > 0)
    return whole / part if part else 0.0


def _checked_terms(output: ForwardOutput, totals: TermTotals) -> Mapping[str, tuple[Tensor, float | Tensor]]:
    terms: Any = output.loss
    if not isinstance(terms, dict):
        raise ForwardContractError(
            f"forward must return a loss with the terms that sample_sizes counts, {_listed(totals or ())}, got one number"
        )
    if is_declared(output):
        raise ForwardContractError("sample_size must be left out where the loss is a mapping, whose terms have their own")
    if not terms:
        raise ForwardContractError(f"the loss that forward returned is a mapping without terms; {_CONTRACT}")
    for name, term in terms.items():
        if not isinstance(name, str) or not isinstance(term, tuple) or len(term) != 2 or not isinstance(term[0], Tensor):
            raise ForwardContractError(
                f"loss[{name!r}] must be a pair (sum, number of samples) whose first is a tensor, got {_describe(term)}"
            )
        if term[0].numel() != 1:
            raise ForwardContractError(f"loss[{name!r}] must be one number, got a tensor of shape {tuple(term[0].shape)}")
        _check_size(term[1])
        _checked_names.add(TERM + name)
    if totals is not None and not totals:
        raise ForwardContractError(
            f"a loss with several denominators ({_listed(terms)}) needs them before backward; pass "
            "options=UpdateOptions(sample_sizes=function), where function(micro_batch) returns them by name; this is not for "
            "update(..., forward=). An update of one micro-batch on one rank needs none, with normalize=True and without "
            "on_out_of_memory='split'"
        )
    if totals is not None and totals.keys() != terms.keys():
        raise ForwardContractError(
            f"forward must return a loss with the terms that sample_sizes counts, {_listed(totals)}, got {_listed(terms)}"
        )
    return dict(terms)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))


def _is_number(size: Any) -> bool:
    """Whether a size, which is checked, is a number of the host. The number of a tensor is not read."""
    _check_size(size)
    return not isinstance(size, Tensor)


def _check_size(size: Any) -> None:
    _check_number("sample_size", size)
    if isinstance(size, Tensor) and size.requires_grad:
        raise ForwardContractError(
            "sample_size must not have a graph, forward returned one that requires grad; a second loss is added to the first, "
            f"as in loss + aux_loss; {_CONTRACT}"
        )


def refuse_fraction(size: float) -> None:
    """Checks the second of a plain pair `(loss, size)`.

    Raises:
        ForwardContractError: it is a fraction, as an accuracy is that stands where the sample size belongs.
    """
    if size % 1 != 0 and math.isfinite(size):
        raise ForwardContractError(
            f"forward returned a pair (loss, {size:.4g}); its second is taken for sample_size and is not a number of samples; "
            "return the mean loss alone, and other numbers as sums in ForwardOutput(loss, sample_size=..., logs={...}), which "
            "takes any weight"
        )


def _check_name(name: Any) -> None:
    """Called once for each name."""
    if not isinstance(name, str):
        raise ForwardContractError(f"the names in logs must be strings, forward returned {name!r}")
    if is_taken(name):
        raise ForwardContractError(
            f"the names in logs must not be {name!r}, under which the trainer, the evaluator or a handler such as "
            "TrainingMetrics logs its own number; leave this log out, or choose another name, such as "
            f"'my_{name.replace('/', '_')}'"
        )
    _checked_names.add(name)


def _check_pair(name: str, pair: tuple[Any, ...]) -> None:
    if len(pair) != 2:
        raise ForwardContractError(f"logs[{name!r}] must be a number or a pair (sum, denominator), got {len(pair)} numbers")
    for part, value in zip(("sum", "denominator"), pair, strict=True):
        _check_number(f"the {part} of logs[{name!r}]", value)


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ForwardContractError(f"{name} must be one number, forward returned a tensor of shape {tuple(value.shape)}")
        if value.dtype.is_complex:
            raise ForwardContractError(
                f"{name} must be a real number, forward returned one of {value.dtype}; pass its .abs() or its .real"
            )
    elif not isinstance(value, (int, float, Real)):
        raise ForwardContractError(f"{name} must be a number or a scalar tensor, forward returned {_describe(value)}")


def _describe(value: Any) -> str:
    if value is None:
        return "None (is a return statement missing?)"
    return describe(value)
