"""A test of a user's `forward`: whether an update stays the same however its samples are cut, and what is in the way if not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ignite_train.arguments import describe
from ignite_train.forward import BoundForward, Forward, ForwardOutput, as_forward_output, bind_forward, is_declared
from ignite_train.internals.of_torch import pytree
from ignite_train.model.forward_state import ForwardState
from ignite_train.model.in_full import in_full
from ignite_train.model.loss_declaration import check_declaration
from ignite_train.model.modes import modes_of, set_modes
from ignite_train.model.precision import Precision
from ignite_train.state import EvaluatorState

__all__ = ["Cut", "ForwardCheck", "check_forward"]

_MOST_SINGLE_SAMPLES = 64
_AGAIN = "the same again"
_OF_THE_BATCH = "computes with the whole micro-batch; use GroupNorm or LayerNorm, or put it into eval mode"
_RANDOM = "draws random numbers: another cut draws others, and only the expectation is the same"
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}


class Cut(NamedTuple):
    """The same samples, divided into micro-batches in one way, on one rank or on several: an update is the sum over both.

    Attributes:
        name: how they are divided.
        sizes: the samples of each micro-batch.
        loss: the mean loss of the update; NaN if forward raised an error.
        difference: the largest difference of a gradient from that of the micro-batches as they were given, in parts of the
            largest gradient; or the difference of the losses, if it is larger.
        is_exact: whether that is rounding.
        error: of forward, if it raised one.
    """

    name: str
    sizes: tuple[int, ...]
    loss: float
    difference: float
    is_exact: bool
    error: str = ""


class ForwardCheck(NamedTuple):
    """The result of `check_forward`; `print` shows it as a table.

    Attributes:
        cuts: a row for each way of dividing the samples; the first is the way in which they were given.
        findings: a line for each thing that is in the way, and what to do.
    """

    cuts: tuple[Cut, ...]
    findings: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        """Whether the update is the same, to rounding, for every way of dividing the samples."""
        return all(cut.is_exact for cut in self.cuts)

    def __str__(self) -> str:
        rows = [f"{'cut':<28}{'micro-batches':>14}{'loss':>12}{'difference':>12}"]
        for cut in self.cuts:
            verdict = "" if cut.is_exact else f"  {cut.error or 'not the same'}"
            rows.append(f"{cut.name:<28}{len(cut.sizes):>14}{cut.loss:>12.5g}{cut.difference:>12.1e}{verdict}")
        return "\n".join([*rows, *self.findings])


def check_forward(model: nn.Module, forward: Forward, micro_batches: Iterable[Any]) -> ForwardCheck:
    """Tests whether an update with `forward` is the same however its samples are divided into micro-batches and ranks.

    For a test of your own training code: it makes the gradient of one update in up to six ways, in training mode, and compares.
    A module in eval mode stays there where the model is in training mode. If they differ it tries again with parts of the model
    in eval mode, to name what is in the way: layers with statistics of the micro-batch (BatchNorm), random numbers (Dropout), a
    mean that is declared as a sum, a loss in which samples see each other (in-batch negatives). Not exact is not wrong: it says
    that accumulation and ranks change what is trained.

    It leaves no trace in the model, its `.grad`, random numbers or what forward refers to. It runs in one process, without
    collectives; ranks add up the same sums as micro-batches do. A forward with collectives of its own is not covered.

    Args:
        model: without a wrapper, on its device.
        forward: as for `create_trainer`; a third parameter gets the state of an evaluation.
        micro_batches: of one update, on the device of the model. All tensors have the samples in their first dimension.
            Micro-batches of different sizes find more.

    Raises:
        ValueError: there are no micro-batches, or one cannot be divided.

    Example:
        >>> def forward(model, x):
        ...     return ForwardOutput(model(x).square().sum(), sample_size=len(x))
        >>> micro_batches = [torch.randn(5, 4), torch.randn(3, 4)]
        >>> check_forward(torch.nn.Linear(4, 1), forward, micro_batches).is_exact
        True
        >>> normalised = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
        >>> print(check_forward(normalised, forward, micro_batches).findings[0])
        BatchNorm1d ('1') computes with the whole micro-batch; use GroupNorm or LayerNorm, or put it into eval mode
    """
    group = list(micro_batches)
    if not group:
        raise ValueError("micro_batches must hold at least one, got none")
    state = EvaluatorState()
    probe = _Probe(model, bind_forward(forward, lambda: state), group, state)
    cuts, findings = probe.cuts(trained=probe.trained.values()), []
    if not all(cut.is_exact for cut in cuts):
        findings = probe.causes()
    return ForwardCheck(tuple(cuts), tuple(dict.fromkeys([*probe.declarations(), *findings])))


class _Probe:
    """Makes the gradient of an update in several ways.

    Args:
        model: the model.
        forward: the user's.
        group: the micro-batches as they were given.
        state: that forward sees.
    """

    def __init__(self, model: nn.Module, forward: BoundForward, group: Sequence[Any], state: EvaluatorState) -> None:
        self._model, self._forward, self._group, self._state = model, forward, group, state
        # The others are frozen in eval mode.
        self.trained: dict[str, nn.Module] = {
            name: one for name, one in model.named_modules() if one.training or not model.training
        }
        self._trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._forward_state = ForwardState(model, state.carried, forward)
        self._ways = dict(_ways(group))
        kinds = {parameter.dtype for parameter in self._trainable}
        self._tolerance = max((_TOLERANCES.get(kind, 2e-2) for kind in kinds), default=1e-4)

    def cuts(self, trained: Iterable[nn.Module]) -> list[Cut]:
        """Each way to cut, compared with the first, with these modules in training mode and the others in eval mode."""
        mark = self._forward_state.mark(self._group)
        try:
            with _modes(self._model, trained):
                mean, reference = self._update(self._group)
                given = Cut("as given", tuple(map(_length, self._group)), mean, 0.0, is_exact=True)
                return [given, *(self._compare(name, ways, mean, reference) for name, ways in self._ways.items())]
        finally:
            self._forward_state.put_back(mark)

    def _compare(self, name: str, ways: Sequence[Any], mean: float, reference: Sequence[Tensor]) -> Cut:
        sizes = tuple(_length(micro_batch) for micro_batch in ways)
        try:
            loss, gradients = self._update(ways)
        except Exception as error:
            return Cut(name, sizes, math.nan, math.inf, is_exact=False, error=str(error).partition("\n")[0])
        largest = max([float(one.abs().max()) for one in reference if one.numel()], default=0.0) or 1.0
        apart = [float((a - b).abs().max()) / largest for a, b in zip(gradients, reference, strict=True) if a.numel()]
        difference = max([*apart, abs(loss - mean) / (abs(mean) or 1.0)])
        return Cut(name, sizes, loss, difference, is_exact=difference <= self._tolerance)

    def _update(self, group: Sequence[Any]) -> tuple[float, list[Tensor]]:
        """The mean loss of an update, and its gradients: Σ∇loss / Σsample_size, added up over the terms of the loss."""
        rows = [
            (name, *term) for micro_batch in group for name, term in _terms(self._forward(self._model, micro_batch)).items()
        ]
        sizes: Counter[str] = Counter()
        for name, _, size in rows:
            sizes[name] += float(size)  # type: ignore[assignment]  # a sample size may be a fraction
        mean = torch.stack([loss / (sizes[name] or 1.0) for name, loss, _ in rows]).sum()
        gradients = torch.autograd.grad(mean, self._trainable, allow_unused=True, materialize_grads=True)
        return float(mean.detach()), list(gradients)

    def declarations(self) -> list[str]:
        """Loss and logs that are means where forward declares sums, or the other way."""
        device = next((parameter.device for parameter in self._trainable), torch.device("cpu"))
        precision = Precision("fp32", device)
        return check_declaration(self._model, self._forward, self._group[0], carried=self._state.carried, precision=precision)

    def causes(self) -> list[str]:
        """The obstacles to an exact update: in forward itself, or else in kinds of modules."""
        at_rest = {cut.name: cut.is_exact for cut in self.cuts(trained=())}
        if not at_rest[_AGAIN]:
            return ["forward draws random numbers, or remembers what it has seen: another cut draws others"]
        if not all(at_rest.values()):
            return self.declarations() or [self._cause_in_forward()]
        found = []
        for kind in dict.fromkeys(map(type, self.trained.values())):
            modules = {name: module for name, module in self.trained.items() if type(module) is kind}
            exact = {cut.name: cut.is_exact for cut in self.cuts(trained=modules.values())}
            if not all(exact.values()):
                names = f"{kind.__name__} ({', '.join(map(repr, [*modules][:3]))}{', ...' if len(modules) > 3 else ''})"
                found.append(f"{names} {_OF_THE_BATCH if exact[_AGAIN] else _RANDOM}")
        return found

    def _cause_in_forward(self) -> str:
        mark = self._forward_state.mark(self._group)
        returned = self._forward(self._model, self._group[0])
        self._forward_state.put_back(mark)
        if not isinstance(returned, ForwardOutput | tuple) or not is_declared(as_forward_output(returned)):
            return (
                "forward returned a bare loss: the update is the mean of the means of micro-batches, which changes with their "
                "sizes; return ForwardOutput(sum, sample_size=...)"
            )
        return (
            "the loss of a sample depends on the other samples of its micro-batch, as with in-batch negatives or a mean over "
            "the batch inside forward; gather the whole batch, or keep the cut the same in all runs; or a term or sample_size "
            "does not grow with the samples, such as a regulariser: multiply it by the sample size"
        )


def _terms(returned: Any) -> Mapping[str, tuple[Tensor, Any]]:
    if isinstance(returned, tuple) and isinstance(returned[0], Mapping):
        terms: Mapping[str, tuple[Tensor, Any]] = returned[0]
        return terms
    output = as_forward_output(returned)
    return {"": (output.loss, output.sample_size)}


def _ways(group: Sequence[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Other ways to cut the samples, by name."""
    lengths = [_length(micro_batch) for micro_batch in group]
    yield _AGAIN, [*group]
    for name, places in (("halves", [n // 2 for n in lengths]), ("one sample, and the rest", [1] * len(lengths))):
        parts = [(one, a, b) for one, n, at in zip(group, lengths, places, strict=True) for a, b in ((0, at), (at, n))]
        yield name, [_piece(one, a, b) for one, a, b in parts if b > a]
    if sum(lengths) <= _MOST_SINGLE_SAMPLES:
        yield "single samples", [_piece(one, at, at + 1) for one, n in zip(group, lengths, strict=True) for at in range(n)]
    leaves = [pytree.tree_flatten(one) for one in group]
    if len(group) > 1 and all(structure == leaves[0][1] for _, structure in leaves):
        columns = list(zip(*(one for one, _ in leaves), strict=True))
        shapes = [{leaf.shape[1:] for leaf in column if isinstance(leaf, Tensor)} for column in columns]
        if all(len(shape) == 1 for shape in shapes):
            yield "joined", [pytree.tree_unflatten([torch.cat(column) for column in columns], leaves[0][1])]


def _length(micro_batch: Any) -> int:
    lengths = {leaf.shape[0] if leaf.dim() else 0 for leaf in pytree.tree_leaves(micro_batch) if isinstance(leaf, Tensor)}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            "micro_batches must hold tensors with the same number of samples in their first dimension, got "
            f"{describe(micro_batch)} with {sorted(lengths) or 'no tensors'}; check a forward that takes such tensors"
        )
    return int(lengths.pop())


def _piece(micro_batch: Any, first: int, last: int) -> Any:
    return pytree.tree_map(lambda leaf: leaf[first:last] if isinstance(leaf, Tensor) else leaf, micro_batch)


@contextmanager
def _modes(model: nn.Module, trained: Iterable[nn.Module]) -> Iterator[None]:
    before, within = modes_of(model), modes_of(model, trained)
    try:
        set_modes(within, since=before)
        yield
    finally:
        in_full(partial(set_modes, before, since=within))
