"""An optimizer that trains at one point and is evaluated at another."""

from __future__ import annotations

from typing import Any

import torch

BETA = 0.7


class ScheduleFreeSGD(torch.optim.SGD):
    """Trains at y = (1 - β) z + β x, where z takes plain steps and x is their mean (arXiv:2405.15682, equations 2 to 4)."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.param_groups[0]["train_mode"] = False

    def train(self) -> None:
        self._move(to_training=True)

    def eval(self) -> None:
        self._move(to_training=False)

    @torch.no_grad()
    def _move(self, *, to_training: bool) -> None:
        group = self.param_groups[0]
        if group["train_mode"] == to_training:
            return
        group["train_mode"] = to_training
        for p in group["params"]:
            if "z" in self.state[p]:
                p.lerp_(self.state[p]["z"], 1 - BETA if to_training else 1 - 1 / BETA)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for p in self.param_groups[0]["params"]:
            assert self.param_groups[0]["train_mode"]
            state = self.state[p]
            z, k = state.setdefault("z", p.clone()), state.setdefault("k", torch.zeros_like(p[:1].sum()))
            x = p.lerp(z, 1 - 1 / BETA)
            k += 1
            z.sub_(p.grad, alpha=self.param_groups[0]["lr"])
            x.lerp_(z, float(1 / k))
            p.copy_(z.lerp(x, BETA))
