"""A model of GPT-2's shapes, and what it is trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from contestants import Work
from ignite_train import ForwardOutput

VOCABULARY = 50304  # GPT-2's, rounded up
BATCHES = 8


class Block(nn.Module):
    """Attention to what came before, then a small network at each token."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x`, `[batch, length, width]`, with what this layer adds."""
        query, key, value = self.query_key_value(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """GPT-2's shapes: 12 layers of width 768 are its smallest, 124 M parameters."""

    def __init__(self, *, layers: int, width: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, features: Tensor | None = None) -> Tensor:
        """Returns the logits of the token after each; `features` are added to the embedding of each."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        if features is not None:
            x = x + features
        return functional.linear(self.norm(self.blocks(x)), self.tokens.weight)


def loss_of(model: nn.Module, micro_batch: tuple[Tensor, ...], reduction: str) -> Tensor:
    """Next-token loss; a micro-batch holds tokens, and features of them if there are any."""
    tokens, *features = micro_batch
    logits = model(tokens[:, :-1], *features).flatten(0, 1).float()
    return functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction=reduction)


def forward(model: nn.Module, micro_batch: tuple[Tensor, ...]) -> ForwardOutput:
    """The same as a sum, with its weight."""
    return ForwardOutput(loss_of(model, micro_batch, "sum"), micro_batch[0][:, 1:].numel())


@dataclass(frozen=True)
class Training:
    """How large everything is, and how much of it an update has.

    Attributes:
        layers: blocks.
        width: a multiple of 64, the width of a head.
        context: tokens in a sample.
        samples: in a micro-batch.
        vocabulary: different tokens.
        device: where.
        steps: micro-batches to an update.
    """

    layers: int
    width: int
    context: int
    samples: int
    vocabulary: int
    device: str
    steps: int

    def model(self) -> GPT2:
        """A fresh one, the same each time."""
        torch.manual_seed(0)
        shape = {"layers": self.layers, "width": self.width, "context": self.context, "vocabulary": self.vocabulary}
        return GPT2(**shape).to(self.device)

    def work(self, compiled: Mapping[str, Any] | None) -> Work:
        """With tokens on the device: moving them is not what is measured here."""
        model = self.model()
        if compiled is not None:
            model.compile(**compiled)
        return Work(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
            micro_batches=[(self.tokens().to(self.device),) for _ in range(BATCHES)],
            mean_loss=partial(loss_of, reduction="mean"),
            forward=forward,
            accumulation_steps=self.steps,
            precision="bf16",
        )

    def tokens(self) -> Tensor:
        """Of a micro-batch, and the one after the last of each sample."""
        return torch.randint(self.vocabulary, (self.samples, self.context + 1))

    @property
    def num_tokens(self) -> int:
        """In an update."""
        return self.steps * self.samples * self.context

    def flop(self) -> float:
        """Of forward and backward, for one token: 6 for each parameter, and those of attention."""
        block = 12 * self.width**2 + 13 * self.width
        parameters = self.layers * block + (self.vocabulary + self.context + 2) * self.width
        return 6.0 * parameters + 12.0 * self.layers * self.width * self.context
