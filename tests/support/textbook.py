"""Optimizers in plain float64 arithmetic, from the formulas in torch's documentation: what the steps of a trainer must come to.

None of torch's own optimizers takes part, since a kernel may be wrong, and then so is each test that has it for its reference.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, Optimizer


class Textbook:
    """Steps along the `.grad` of its parameters, with the options that `options` has at that time.

    Moments are in float64. A parameter is rounded to its own dtype at the end of each step.

    Args:
        options: an SGD, Adam, AdamW or Adagrad over as many other parameters, whose options are taken and nothing else.
        parameters: those that are stepped, in the order of the groups of `options`.
    """

    def __init__(self, options: Optimizer, parameters: list[Tensor]) -> None:
        assert isinstance(options, (SGD, Adam, Adagrad))
        self.options, self.parameters = options, parameters
        self.moments: dict[int, dict[str, Any]] = {}

    def step(self) -> None:
        rest = iter(self.parameters)
        for group in self.options.param_groups:
            for _ in group["params"]:
                parameter = next(rest)
                if parameter.grad is not None:
                    self._step(group, parameter, self.moments.setdefault(id(parameter), {}))

    def clip(self, max_norm: float) -> float:
        """Multiplies all gradients by min(1, max_norm / (norm + 1e-6)). Gives their L2 norm before, taken in float64."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = math.sqrt(sum(float(gradient.to(torch.complex128).abs().square().sum()) for gradient in gradients))
        for gradient in gradients:
            gradient *= min(1.0, max_norm / (norm + 1e-6))
        return norm

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _step(self, group: dict[str, Any], parameter: Tensor, moments: dict[str, Any]) -> None:
        wide = torch.complex128 if parameter.is_complex() else torch.float64
        old = parameter.detach().to(wide)
        along = parameter.grad.to(wide) * (-1 if group["maximize"] else 1)
        if not group.get("decoupled_weight_decay", False):
            along = along + group["weight_decay"] * old
        kind = sgd if isinstance(self.options, SGD) else adagrad if isinstance(self.options, Adagrad) else adam
        new = kind(group, old, along, moments)
        with torch.no_grad():
            parameter.copy_(new.to(parameter.dtype))


def sgd(group: dict[str, Any], old: Tensor, along: Tensor, moments: dict[str, Any]) -> Tensor:
    momentum = group["momentum"]
    if momentum != 0:
        before = moments.get("momentum_buffer")
        buffer = along if before is None else momentum * before + (1 - group["dampening"]) * along
        moments["momentum_buffer"] = buffer
        along = along + momentum * buffer if group["nesterov"] else buffer
    return old - float(group["lr"]) * along


def adam(group: dict[str, Any], old: Tensor, along: Tensor, moments: dict[str, Any]) -> Tensor:
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    step = moments["step"] = moments.get("step", 0) + 1
    first = moments["exp_avg"] = beta1 * moments.get("exp_avg", 0.0) + (1 - beta1) * along
    second = moments["exp_avg_sq"] = beta2 * moments.get("exp_avg_sq", 0.0) + (1 - beta2) * along**2
    if group["amsgrad"]:
        second = moments["max_exp_avg_sq"] = torch.maximum(second, torch.as_tensor(moments.get("max_exp_avg_sq", 0.0)))
    if group.get("decoupled_weight_decay", False):
        old = old * (1 - lr * group["weight_decay"])
    return old - lr / (1 - beta1**step) * first / ((second / (1 - beta2**step)).sqrt() + group["eps"])


def adagrad(group: dict[str, Any], old: Tensor, along: Tensor, moments: dict[str, Any]) -> Tensor:
    moments["step"] = moments.get("step", 0) + 1
    total = moments["sum"] = moments.get("sum", group["initial_accumulator_value"]) + along**2
    rate = float(group["lr"]) / (1 + (moments["step"] - 1) * group["lr_decay"])
    return old - rate * along / (total.sqrt() + group["eps"])
