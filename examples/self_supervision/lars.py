"""LARS: a learning rate for each layer, by the lengths of its weights and of its gradient."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class LARS(torch.optim.Optimizer):
    """SGD with momentum in which each matrix moves by a share of its own length (arXiv:1708.03888).

    With gradient g, weights w and momentum m, in each step

        λ = trust · ‖w‖ / (‖g‖ + weight_decay · ‖w‖)
        v ← m · v + λ · (g + weight_decay · w)
        w ← w - lr · v

    where λ is 1 if the weights or the denominator are 0. Groups with `trust=None` are stepped as by SGD: SimCLR and VISSL do so
    with biases and scales. As in torch's SGD, the rate is outside of the momentum: a new rate acts on all of v at once.

    Args:
        parameters: as for any optimizer.
        lr: of all layers.
        momentum: m.
        weight_decay: added to the gradient.
        trust: how large a share; None: no trust ratio.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float | None = 0.001,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes a step along the gradients."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)
        return loss

    def _move(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        ratio = 1.0 if group["trust"] is None else trust_ratio(parameter, gradient, group)
        change = gradient.add(parameter, alpha=group["weight_decay"]) * ratio
        state = self.state[parameter]
        if "velocity" not in state:
            state["velocity"] = torch.zeros_like(parameter)
        velocity = state["velocity"].mul_(group["momentum"]).add_(change)
        parameter.add_(velocity, alpha=-group["lr"])


def trust_ratio(parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
    """λ, as a tensor, so that an accelerator is not waited for."""
    length = parameter.norm()
    whole = gradient.norm() + group["weight_decay"] * length
    return torch.where((length > 0) & (whole > 0), group["trust"] * length / whole, 1.0)
