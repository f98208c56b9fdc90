"""A look inside the model: norms of gradients and weights, how far each layer moves, and layers that do not learn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ignite_train.arguments import positive_int
from ignite_train.events import TrainEvents
from ignite_train.internals.of_torch import foreach_norm, foreach_sub_
from ignite_train.kinds_of_handlers import Handler
from ignite_train.kinds_of_handlers.handler import handle_in_every_nth_update
from ignite_train.model.averaged_tensors import local_tensors, plain_name
from ignite_train.model.sparse_parameters import sparse_gradient_values
from ignite_train.ranks import collectives
from ignite_train.ranks.root_mesh import copies
from ignite_train.trainer import Trainer

__all__ = ["GradientMonitor", "Histogram"]

_MAGNITUDES = [2.0**exponent for exponent in range(-30, 7)]
_EDGES = (-math.inf, *(-edge for edge in reversed(_MAGNITUDES)), *_MAGNITUDES, math.inf)
_KINDS = ("layer_grad_norm", "layer_weight_norm", "update_ratio")
_NONE = torch.zeros(0)  # a gradient that is missing
_PIECE = 2**18  # elements, which the cache of a processor holds in float64 too


class Histogram(NamedTuple):
    """How many elements lie between two edges.

    Attributes:
        edges: in increasing order, one more than there are counts; the first is -inf, the last inf, and the others are the
            powers of two from 2⁻³⁰ to 2⁶ and their negatives. The same for all histograms, so that they can be compared.
        counts: elements x with `edges[i] <= x < edges[i + 1]`. NaN is not counted.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]


class GradientMonitor(Handler):
    """Publishes norms, by layer, and the layers that do not learn, in every 100th update by default.

    In `trainer.state.metrics`, which all loggers show, for each layer:

    - `"layer_grad_norm/NAME"`: the L2 norm of its mean gradient, over all micro-batches and ranks, before clipping. With
      `reduction="local"` it is the mean over the micro-batches of this rank alone;
    - `"layer_weight_norm/NAME"`: the L2 norm of its weights before the step;
    - `"update_ratio/NAME"`: the L2 norm of the step divided by the norm of the weights; about 0.001 is usual (A. Karpathy's
      lectures on neural networks). Left out while the weights are zero;
    - `"dead_layers"`: how many layers have a gradient of zero, or none. Layers that `Freeze` freezes are among them.

    A layer is a module with parameters of its own. Of complex ones real and imaginary parts are counted as numbers. After a
    skipped update it removes these metrics, also where this rank skips alone, as it may with `reduction="local"`. In other
    updates it does nothing. In an update that it measures it keeps a copy of the weights, has its numbers transferred to the
    host once, and, if the model is sharded, sums them over the ranks once; a step is not queued in that update. All ranks must
    attach it.

    Args:
        every: it measures each update whose number is a multiple of this.
        depth: put layers together whose names have the same first parts, this many; None: each layer by itself.
        with_histograms: count the elements of weights and gradients by size, which takes as long as sorting them.

    Attributes:
        dead: the names of the layers without a gradient in the latest update that it looked at.
        histograms: of the same update, by `"weight/NAME"` and `"gradient/NAME"`; empty without `with_histograms`.

    Raises:
        TypeError, ValueError: `every` or `depth` is not a positive integer.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trainer = create_trainer(model, optimizer, forward)
        >>> GradientMonitor(every=2).attach(trainer)
        >>> sorted(trainer.run(data).metrics)  # doctest: +NORMALIZE_WHITESPACE
        ['dead_layers', 'layer_grad_norm/0', 'layer_grad_norm/1', 'layer_weight_norm/0', 'layer_weight_norm/1',
         'update_ratio/0', 'update_ratio/1']
    """

    is_collective = True
    of_one_trainer = True

    def __init__(self, every: int = 100, *, depth: int | None = None, with_histograms: bool = False) -> None:
        self.every = positive_int("every", every)
        self.depth = None if depth is None else positive_int("depth", depth)
        self.with_histograms = with_histograms
        self.dead: tuple[str, ...] = ()
        self.histograms: dict[str, Histogram] = {}
        self._layers: list[str] = []  # of each parameter
        self._monitored: list[nn.Parameter] = []
        self._weights: list[Tensor] = []  # before the step
        self._found: list[Tensor] = []  # on the device

    def attach(self, trainer: Trainer) -> None:
        """Looks at updates of `trainer`."""
        handlers = {TrainEvents.GRADIENTS_READY: self._before_step, TrainEvents.STEP_COMPLETED: self._after_step}
        handle_in_every_nth_update(self, trainer, self.every, handlers | {TrainEvents.STEP_SKIPPED: self._withdraw})
        trainer.on_exit.append(self._end)

    def _end(self) -> None:
        self._weights, self._found, self._monitored = [], [], []

    def _withdraw(self, trainer: Trainer) -> None:
        """Removes what an earlier update has published: a skipped one has no norms."""
        self._find_layers(trainer.model)
        for name in ("dead_layers", *(f"{kind}/{layer}" for kind in _KINDS for layer in self._layers)):
            trainer.state.metrics.pop(name, None)
        self._end()

    def _find_layers(self, model: nn.Module) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        paths = [plain_name(name).split(".")[:-1] for name, _ in named]
        self._layers = [".".join(path[: self.depth]) or "model" for path in paths]
        self._monitored = [parameter for _, parameter in named]

    def _before_step(self, trainer: Trainer) -> None:
        self._find_layers(trainer.model)
        with torch.no_grad():
            weights = _local_numbers(self._monitored)
            gradients = _local_numbers(_gradient(parameter) for parameter in self._monitored)
            factor = trainer.process.mean_factor()
            self._found = [_norms(gradients) * factor, _norms(weights)]
            if self.with_histograms:
                self._found += [_counts(weight) for weight in weights]
                self._found += [
                    _counts(
                        gradient * factor, weight.numel() - gradient.numel() if p.grad is not None and p.grad.is_sparse else 0
                    )
                    for gradient, weight, p in zip(gradients, weights, self._monitored, strict=True)
                ]
            self._weights = [weight.clone() for weight in weights]

    def _after_step(self, trainer: Trainer) -> None:
        with torch.no_grad():
            foreach_sub_(self._weights, _local_numbers(self._monitored))
            self._found.insert(2, _norms(self._weights))
        found = self._fetch()
        if all(map(math.isfinite, found[0])):
            self._publish(trainer, found)
            self._end()
        else:
            self._withdraw(trainer)  # other ranks have stepped, and this one has not

    def _fetch(self) -> list[list[float]]:
        """The squared norms of each parameter, and then counts, over all ranks: one transfer, and one sum if it is sharded."""
        norms, counts = self._found[:3], self._found[3:]
        sums = torch.cat([*(norm.square() for norm in norms), *(count.to(norms[0].dtype) for count in counts)])
        if any(isinstance(parameter, DTensor) for parameter in self._monitored):
            shares = [1 / copies(parameter) for parameter in self._monitored]
            weights = [*shares * 3, *(share for share in shares * 2 for _ in _EDGES[1:])][: len(sums)]
            sums = sums * torch.tensor(weights, dtype=sums.dtype, device=sums.device)
            collectives.sum_over_ranks(sums)
        numbers = iter(sums.tolist())  # sync
        return [list(islice(numbers, len(found))) for found in self._found]

    def _publish(self, trainer: Trainer, found: Sequence[Sequence[float]]) -> None:
        layers = list(dict.fromkeys(self._layers))
        totals = [dict.fromkeys(layers, 0.0) for _ in found[:3]]
        for total, squares in zip(totals, found[:3], strict=True):
            for layer, square in zip(self._layers, squares, strict=True):
                total[layer] += square
        gradient, weight, step = ({layer: math.sqrt(square) for layer, square in total.items()} for total in totals)
        self.dead = tuple(layer for layer in layers if gradient[layer] == 0)
        ratios = {layer: step[layer] / weight[layer] for layer in layers if weight[layer] > 0}
        metrics = trainer.state.metrics
        for layer in layers:
            metrics.pop(f"update_ratio/{layer}", None)
        for name, values in zip(_KINDS, (gradient, weight, ratios), strict=True):
            metrics |= {f"{name}/{layer}": value for layer, value in values.items()}
        metrics["dead_layers"] = len(self.dead)
        self.histograms = self._histograms(found[3:])

    def _histograms(self, found: Sequence[Sequence[float]]) -> dict[str, Histogram]:
        names = [f"{kind}/{layer}" for kind in ("weight", "gradient") for layer in self._layers] if found else []
        counts = {name: [0.0] * (len(_EDGES) - 1) for name in names}
        for name, part in zip(names, found, strict=True):
            counts[name] = [a + b for a, b in zip(counts[name], part, strict=True)]
        return {name: Histogram(_EDGES, tuple(map(round, sums))) for name, sums in counts.items()}


def _local_numbers(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors, or the shards of this rank; of complex ones their real and imaginary parts."""
    return [torch.view_as_real(one.resolve_conj()) if one.is_complex() else one for one in local_tensors(tensors)]


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient, of a sparse one the rows that are there; a tensor without elements if it is missing."""
    gradient = parameter.grad
    if gradient is None:
        return _NONE.to(parameter.device, parameter.dtype)
    return sparse_gradient_values(gradient)


def _norms(tensors: list[Tensor]) -> Tensor:
    """The L2 norm of each, not read; in float64, since float32 holds neither all squares nor the sum of millions of them.

    On MPS, which has no float64, in float32.
    """
    wide = torch.float32 if any(tensor.device.type == "mps" for tensor in tensors) else torch.float64
    # An accelerator widens each element as it reads it; the CPU would copy the whole tensor.
    pieces = [torch.split(tensor.reshape(-1), _PIECE) if tensor.is_cpu else (tensor,) for tensor in tensors]
    found = iter(foreach_norm([*chain.from_iterable(pieces)], 2.0, dtype=wide))
    norms = [[*islice(found, len(parts))] for parts in pieces]
    whole = [one[0] if len(one) == 1 else torch.linalg.vector_norm(torch.stack(one)) for one in norms]
    return torch.stack([norm.to(whole[0].device) for norm in whole])


def _counts(tensor: Tensor, zeros: int = 0) -> Tensor:
    """How many elements lie between the edges, not read: it sorts, because counting is not deterministic on CUDA.

    Args:
        tensor: the elements.
        zeros: how many elements that are zero there are beside them.
    """
    values = tensor.reshape(-1).float() if tensor.dtype != torch.float64 else tensor.reshape(-1)
    edges = torch.tensor(_EDGES, dtype=values.dtype, device=values.device)
    below = torch.searchsorted(values.sort().values, edges)
    counts = below.diff()
    counts[len(_MAGNITUDES)] += zeros
    return counts
