"""Several gradients of one update, one for each term of its loss, which a function makes one gradient of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ignite_train.arguments import describe
from ignite_train.errors import ForwardContractError
from ignite_train.events import TrainEvents
from ignite_train.forward import TERM, ForwardOutput
from ignite_train.kinds_of_handlers import Handler
from ignite_train.model.optimizers import stepped_parameters
from ignite_train.model.sparse_parameters import sparse_parameters
from ignite_train.ranks import collectives
from ignite_train.trainer import Trainer

__all__ = ["SeveralGradients"]

Combine = Callable[[dict[str, Tensor]], Tensor | None]


class SeveralGradients(Handler):
    """Takes the gradient of each term of the loss by itself, and has the update step along what a function makes of them.

    For PCGrad (arXiv:2001.06782), CAGrad (arXiv:2110.14048), GradNorm (arXiv:1711.02257) and their like. Forward returns its
    loss as a mapping, `{"depth": (depth_sum, num_pixels), "labels": (label_sum, num_labels)}`; see
    `UpdateOptions(sample_sizes=...)`. In GRADIENTS_REDUCED the function gets Σ∇term / Σn of each term, over all micro-batches
    and ranks, however the samples were divided. Its result replaces the gradient; then norm, clipping and step follow.

    Backward runs once more for each term, before the backward of their sum, and as many gradients are kept in memory. On
    several ranks each term costs one all-reduce of the size of the parameters. It has no state: save what the function
    remembers with `Checkpoint(to_save=...)`. All ranks must attach it.

    Args:
        combine: `combine(gradients)` gets the gradients by the names of the terms, in alphabetical order: vectors of shape
            (elements of all parameters that have a gradient,), in the dtype of the parameters. It returns one such vector, or
            None to keep the gradient of their sum. It must return the same on all ranks: random numbers are
            to be drawn from a generator with the same seed, such as `trainer.state.iteration`.
        parameters: a module, or some of its parameters, where only their gradients are to be combined; the others keep the sum.
            None: all that the optimizer has.

    Raises:
        TypeError: an argument has the wrong type.

    Example:
        >>> def two_terms(model, x):
        ...     y = model(x)
        ...     return ForwardOutput({"up": (y.sum(), len(y)), "down": (-2 * y.sum(), len(y))})
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), two_terms)
        >>> SeveralGradients(lambda gradients: gradients["up"]).attach(trainer)
        >>> round(trainer.run(data).update_output.grad_norm, 4)  # of (1, 1, 1)
        1.7321
    """

    not_elastic = "it would combine the gradients of one replica and not those of all"

    is_collective = True

    def __init__(self, combine: Combine, *, parameters: nn.Module | Iterable[nn.Parameter] | None = None) -> None:
        if not callable(combine):
            raise TypeError(f"combine must be a function of the gradients by name, got {describe(combine)}")
        if isinstance(parameters, (nn.Parameter, str)) or not isinstance(parameters, (nn.Module, Iterable, type(None))):
            raise TypeError(f"parameters must be a torch.nn.Module or a list of parameters, got {describe(parameters)}")
        self._combine = combine
        self._chosen: Any = parameters if isinstance(parameters, nn.Module | None) else [*parameters]
        self._sums: dict[str, dict[nn.Parameter, Tensor]] | None = None  # of the running update, on this rank
        self._of_micro_batch: dict[str, dict[nn.Parameter, Tensor]] = {}

    def attach(self, trainer: Trainer) -> None:
        """Combines the gradients of `trainer`'s updates.

        Raises:
            TypeError: some of the parameters are sharded or have sparse gradients.
            ValueError: the optimizer has none of the parameters, the trainer scales its loss, or its replicas train alone.
        """
        shared, sparse = self._shared(trainer), sparse_parameters(trainer.model)
        if not shared:
            raise ValueError("parameters must be some that the optimizer steps, got none of them; pass a part of the model")
        if any(isinstance(one, DTensor) or one in sparse for one in shared):
            raise TypeError(
                "SeveralGradients needs dense gradients of all parameters on each rank, and some of this trainer's are sharded "
                "or sparse; leave them out with parameters="
            )
        if "loss_scaling" in trainer.config or trainer.config.get("reduction") == "local":
            raise ValueError(
                "SeveralGradients needs a trainer without loss scaling and whose ranks share their gradients, got "
                f"precision={trainer.config.get('precision')!r} and reduction={trainer.config.get('reduction')!r}; use 'bf16' "
                "or 'fp32', and another reduction than 'local'"
            )
        trainer.add_event_handler(Events.ITERATION_STARTED, self._begin)
        trainer.add_event_handler(TrainEvents.FORWARD_COMPLETED, self._take)
        trainer.moments.on_backward.append(self._add)
        # Before other handlers of the event, which add noise to the gradient, say.
        trainer.prepend_event_handler(TrainEvents.GRADIENTS_REDUCED, self._combine_terms)

    def _shared(self, trainer: Trainer) -> list[nn.Parameter]:
        """The parameters whose gradients are combined; asked again and again, as some may join the optimizer within the run."""
        return stepped_parameters(trainer.optimizers, self._chosen)

    def _begin(self) -> None:
        self._sums, self._of_micro_batch = {}, {}

    def _take(self, trainer: Trainer) -> None:
        """Takes the gradients of a micro-batch, which are lost if its backward runs out of memory."""
        output = trainer.state.forward_output
        assert output is not None  # noqa: S101  # it is there in this event
        parameters = [parameter for parameter in self._shared(trainer) if parameter.requires_grad]
        self._of_micro_batch = {}
        for name, value in output.logs.items():
            if name.startswith(TERM) and isinstance(value, tuple) and (total := value[0]).requires_grad:  # type: ignore[union-attr]
                taken = torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True)  # type: ignore[arg-type]
                found = zip(parameters, taken, strict=True)
                self._of_micro_batch[name] = {parameter: one for parameter, one in found if one is not None}

    def _add(self, _: ForwardOutput) -> None:
        """Adds the gradients of a micro-batch whose backward is done to those of the others."""
        assert self._sums is not None  # noqa: S101  # since the update began
        for name, gradients in self._of_micro_batch.items():
            sums = self._sums.setdefault(name, {})
            for parameter, gradient in gradients.items():
                sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
        self._of_micro_batch = {}

    def _combine_terms(self, trainer: Trainer) -> None:
        """Puts what the function returns in the place of the gradient. Collective."""
        record, sums = trainer.state.update_output, self._sums
        assert record is not None  # noqa: S101  # published before this event
        sizes = {name: record.sample_sizes[name] for name in sorted(record.sample_sizes)}
        self._sums = None
        if sums is None:
            raise ValueError("SeveralGradients needs an optimizer that evaluates the loss once; leave out closure=True")
        if not sizes and record.name is None:
            raise ForwardContractError(
                "SeveralGradients needs a loss that is a mapping of several terms, and forward returned one number; return "
                "ForwardOutput({'a': (a_sum, n), 'b': (b_sum, m)}), and give updates with another forward a name"
            )
        with_gradient = [parameter for parameter in self._shared(trainer) if parameter.grad is not None]
        if not sizes or not with_gradient:
            return
        means = {
            name: vector.div_(sizes[name] or 1.0)
            for name, vector in _over_ranks([sums.get(TERM + name, {}) for name in sizes], sizes, with_gradient).items()
        }
        combined = self._combine(means)
        if combined is not None:
            _put(_checked(combined, sum(parameter.numel() for parameter in with_gradient)), with_gradient)


def _over_ranks(
    sums: Sequence[Mapping[nn.Parameter, Tensor]], names: Iterable[str], parameters: Sequence[nn.Parameter]
) -> dict[str, Tensor]:
    """A vector for each name, summed over the ranks; all vectors cross together. Collective."""
    vectors = [torch.cat([_of(one, parameter).reshape(-1) for parameter in parameters]) for one in sums]
    collectives.sum_over_ranks(*vectors)
    return dict(zip(names, vectors, strict=True))


def _of(sums: Mapping[nn.Parameter, Tensor], parameter: nn.Parameter) -> Tensor:
    return sums[parameter] if parameter in sums else torch.zeros_like(parameter)


def _checked(combined: Any, length: int) -> Tensor:
    if not isinstance(combined, Tensor):
        raise TypeError(f"combine must return a tensor, or None, got {describe(combined)}")
    if combined.shape != (length,):
        raise ValueError(f"combine must return a vector of shape ({length},), as those it gets, got {tuple(combined.shape)}")
    return combined.detach()


def _put(vector: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    parts = torch.split(vector, [parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        assert parameter.grad is not None  # noqa: S101  # they were chosen so
        parameter.grad.copy_(part.view(parameter.shape))
