"""The accumulated gradients of an optimizer: their norm, the one factor they are multiplied by, and clearing them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ignite_train.errors import GradientAccessError, NoGradientError

__all__ = ["Gradients", "clip_coefficient"]


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """What clips a gradient of L2 norm `norm` to `max_norm`: min(1, max_norm / (norm + 1e-6)), as `clip_grad_norm_`."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


class Gradients:
    """The gradients of `optimizer`'s parameters, as backward left them: a sum, times the loss scale.

    Args:
        model: gives the parameters their names.
        optimizer: whose parameters these are.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._model = model
        self._factor: float | None = None  # what makes them the gradient of the mean; known in GRADIENTS_READY only

    def clear(self) -> None:
        """Drops all gradients; `.grad` is None afterwards."""
        self._factor = None
        self._optimizer.zero_grad(set_to_none=True)

    def clear_stale(self) -> None:
        """Drops gradients that something else than an update left behind: they are no part of this update."""
        if any(parameter.grad is not None for group in self._optimizer.param_groups for parameter in group["params"]):
            self.clear()

    def set_aside(self) -> list[Tensor | None]:
        """Takes all gradients off their parameters."""
        aside = []
        for parameter in self._parameters():
            aside.append(parameter.grad)
            parameter.grad = None
        return aside

    def put_back(self, aside: list[Tensor | None]) -> None:
        """Undoes `set_aside`, and whatever came since."""
        for parameter, gradient in zip(self._parameters(), aside, strict=True):
            parameter.grad = gradient

    def add_back(self, aside: list[Tensor | None]) -> None:
        """Adds what was set aside to what came since, as backward would have."""
        for parameter, gradient in zip(self._parameters(), aside, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            elif gradient is not None:
                parameter.grad = gradient.add_(parameter.grad)

    def detach(self) -> None:
        """Cuts the graphs that `create_graph=True` leaves on gradients, so that the next micro-batch does not grow them."""
        for parameter in self._parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach()

    def norm(self) -> Tensor:
        """L2 norm over all of them as they are, accumulated in float32 or wider; a 0-d float64 tensor, not read back."""
        gradients = self._existing()
        if not gradients:
            return torch.zeros((), dtype=torch.float64)
        total: Tensor = torch.linalg.vector_norm(_norms(gradients))
        return total

    def shard_norm_squared(self) -> Tensor:
        """This rank's share of the squared norm, for gradients that are sharded over all ranks: Σ over ranks is the whole.

        A shard that several ranks hold counts on each of them for its part.
        """
        shares: dict[int, list[Tensor]] = {}
        for gradient in self._existing():
            if not isinstance(gradient, DTensor):
                raise TypeError("model must have all trainable parameters inside fully_shard; apply it to the root module last")
            placements = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
            replicas = math.prod(size for placement, size in placements if placement.is_replicate())
            shares.setdefault(replicas, []).append(gradient.to_local())
        squares = [_norms(gradients).square().sum() / replicas for replicas, gradients in shares.items()]
        return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)

    def check(self) -> None:
        """Sees to it that there are any.

        Raises:
            NoGradientError: no parameter has one.
        """
        if all(parameter.grad is None for parameter in self._parameters()):
            raise NoGradientError(
                "backward left no gradient on any parameter of the optimizer: the loss that forward returned does not depend "
                "on them; return it with its graph (no .detach(), .item() or torch.no_grad())"
            )

    def ready(self, factor: float) -> None:
        """From here until the next `make_mean` or `clear`, `named` gives the gradients times `factor`."""
        self._factor = factor

    def named(self) -> dict[str, Tensor]:
        """Copies of the gradients of the mean loss, by parameter name.

        Raises:
            GradientAccessError: outside of GRADIENTS_READY.
        """
        if self._factor is None:
            raise GradientAccessError(
                "gradients are whole in GRADIENTS_READY only; call gradients() in a handler of TrainEvents.GRADIENTS_READY"
            )
        named = self._model.named_parameters()
        return {name: p.grad.detach() * self._factor for name, p in named if p.grad is not None}

    def make_mean(self, coefficient: float) -> None:
        """Makes them those of the mean loss, times `coefficient`, in one pass; in none if nothing changes."""
        factor, self._factor = self._factor, None
        assert factor is not None  # noqa: S101  # `ready` comes before
        if factor * coefficient != 1.0:
            torch._foreach_mul_(self._existing(), factor * coefficient)

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _existing(self) -> list[Tensor]:
        return [parameter.grad.detach() for parameter in self._parameters() if parameter.grad is not None]


def _norms(gradients: list[Tensor]) -> Tensor:
    """The L2 norm of each, in float64 on one device."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    home = gradients[0].device
    exact = torch.float32 if home.type == "mps" else torch.float64
    stacks = []
    for (_, dtype), same in kinds.items():
        wide = torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
        norms = torch._foreach_norm(same, 2.0, dtype=None if dtype.is_complex else wide)
        stacks.append(torch.stack(norms).to(home, exact))
    return stacks[0] if len(stacks) == 1 else torch.cat(stacks)
