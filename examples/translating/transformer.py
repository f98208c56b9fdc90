"""The network that writes a line, a Transformer that may copy words of its source, and the search for the best line."""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from translating.pairs import BEGIN, END, PAD, SOURCE_TOKENS, TARGET_TOKENS

HEAD_WIDTH = 32


class Attention(nn.Module):
    """Attention of several heads, each `HEAD_WIDTH` wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key_value, self.project = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def keys_values(self, memory: Tensor) -> Tensor:
        """What can be attended to in `memory`, `[pairs, length, width]`: `[pairs, 2, heads, length, HEAD_WIDTH]`."""
        return self.key_value(memory).unflatten(-1, (2, -1, HEAD_WIDTH)).permute(0, 2, 3, 1, 4)

    def forward(self, x: Tensor, keys_values: Tensor, mask: Tensor | None = None, *, is_causal: bool = False) -> Tensor:
        """What each of `x`, `[pairs, length, width]`, gathers where the mask allows it, or from those up to itself."""
        query, (key, value) = self.query(x).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2), keys_values.unbind(1)
        gathered = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal)
        return self.project(gathered.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    """Self-attention, and a small network at each token; each normalises what comes in and is added to it."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.own = Attention(width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Returns `x`, `[pairs, length, width]`, with what this layer adds."""
        normed = self.norms[0](x)
        x = x + self.dropout(self.own(normed, self.own.keys_values(normed), mask))
        return x + self.dropout(self.network(self.norms[1](x)))


class DecoderLayer(EncoderLayer):
    """Attends to the target so far, and to the source."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__(width, dropout)
        self.norms.append(nn.LayerNorm(width))
        self.of_source = Attention(width)

    def forward(  # type: ignore[override]
        self, x: Tensor, mask: Tensor, of_source: Tensor, before: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns `x` with what this layer adds, and the keys and values of the target, those `before` it included.

        Args:
            x: a whole target `[pairs, length, width]`; with `before` its last token only, `[pairs, 1, width]`.
            mask: which tokens of the source are real.
            of_source: keys and values of the source.
            before: keys and values of the tokens before.
        """
        normed = self.norms[0](x)
        own = self.own.keys_values(normed)
        if before is not None:
            own = torch.cat([before, own], dim=3)
        x = x + self.dropout(self.own(normed, own, is_causal=before is None))
        x = x + self.dropout(self.of_source(self.norms[2](x), of_source, mask))
        return x + self.dropout(self.network(self.norms[1](x))), own


class Encoded(NamedTuple):
    """What the decoder needs of sources, `[pairs, length]`.

    Attributes:
        sources: their tokens.
        mask: which are real, `[pairs, 1, 1, length]`.
        copy_keys: what decides which token is copied, `[pairs, length, width]`.
        layers: keys and values for each layer of the decoder.
    """

    sources: Tensor
    mask: Tensor
    copy_keys: Tensor
    layers: tuple[Tensor, ...]

    def repeated(self, times: int) -> "Encoded":
        """Each source this many times, one after the other."""
        sources, mask, copy_keys = (part.repeat_interleave(times, dim=0) for part in self[:3])
        return Encoded(sources, mask, copy_keys, tuple(layer.repeat_interleave(times, dim=0) for layer in self.layers))


class Transformer(nn.Module):
    """Encoder and decoder (Vaswani et al., 2017), normalised before each part; one embedding for source, target and output.

    The next token is written from the vocabulary or copied from the source, with a probability for each (the pointer-generator
    of See et al., 2017): most docstrings repeat words of the code.
    """

    def __init__(self, num_tokens: int, *, width: int, encoder_layers: int, decoder_layers: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_tokens, width)
        self.positions = nn.Embedding(max(SOURCE_TOKENS, TARGET_TOKENS), width)
        self.encoder = nn.ModuleList(EncoderLayer(width, dropout) for _ in range(encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(width, dropout) for _ in range(decoder_layers))
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.copy_query, self.copy_key, self.writes = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1)
        self.dropout = nn.Dropout(dropout)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=width**-0.5)

    def forward(self, sources: Tensor, targets: Tensor) -> Tensor:
        """The log-probabilities of the token after each of `targets`, `[pairs, length, tokens]`."""
        encoded = self.encode(sources)
        return self.predict(self.decode(targets, encoded)[0], encoded)

    def encode(self, sources: Tensor) -> Encoded:
        """What the decoder needs of the sources."""
        mask, x = (sources != PAD)[:, None, None], self._embed(sources)
        for layer in self.encoder:
            x = layer(x, mask)
        memory = self.encoder_norm(x)
        layers = tuple(layer.of_source.keys_values(memory) for layer in self.decoder)
        return Encoded(sources, mask, self.copy_key(memory), layers)

    def decode(self, targets: Tensor, encoded: Encoded, before: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
        """What the decoder says at each of `targets`, `[pairs, length, width]`, and its keys and values.

        With those of the tokens `before`, `targets` is the next token only.
        """
        known: list[Tensor] = []
        x = self._embed(targets, 0 if before is None else before[0].shape[3])
        for number, layer in enumerate(self.decoder):
            x, own = layer(x, encoded.mask, encoded.layers[number], None if before is None else before[number])
            known.append(own)
        return self.decoder_norm(x), known

    def predict(self, x: Tensor, encoded: Encoded) -> Tensor:
        """Log-probabilities of all tokens after each `x`."""
        scores = self.copy_query(x) @ encoded.copy_keys.transpose(1, 2) * x.shape[-1] ** -0.5
        copies = scores.masked_fill(~encoded.mask[:, 0], -math.inf).softmax(dim=-1)
        writes = self.writes(x).sigmoid()
        probabilities = F.linear(x, self.tokens.weight).softmax(dim=-1) * writes
        sources = encoded.sources[:, None].expand(copies.shape)
        probabilities = probabilities.scatter_add(-1, sources, copies * (1 - writes))
        return probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()

    def _embed(self, numbers: Tensor, place: int = 0) -> Tensor:
        positions = self.positions.weight[place : place + numbers.shape[1]]
        return self.dropout(self.tokens(numbers) * self.tokens.embedding_dim**0.5 + positions)


@torch.no_grad()
def beam_search(model: Any, sources: Tensor, *, beam: int, max_length: int, lenpen: float = 1.0) -> tuple[Tensor, Tensor]:
    """The best of the lines that a beam search finds for each source, and its score: Σ log p / length^`lenpen`.

    Step by step, the `beam` best beginnings of each line are continued by all tokens, and of these the `beam` best stay. A line
    that has ended is kept unchanged. With 1 this is greedy search; if all lines of `max_length` fit, it is exhaustive.

    Args:
        model: a `Transformer`.
        sources: `[pairs, length]`.
        beam: beginnings that are kept.
        max_length: tokens of a line, its end included.
        lenpen: larger ones favour longer lines. The length includes the end.

    Returns:
        Tokens with the end, `[pairs, at most max_length]`, padded; and scores, `[pairs]`.
    """
    pairs, rows = len(sources), torch.arange(len(sources), device=sources.device)[:, None]
    encoded: Encoded = model.encode(sources).repeated(beam)
    tokens = sources.new_full((pairs, beam, 1), BEGIN)
    scores = torch.full((pairs, beam), -math.inf, device=sources.device, dtype=encoded.copy_keys.dtype)
    scores[:, 0] = 0.0  # all beginnings are alike: only one counts
    known: list[Tensor] | None = None
    for length in range(1, max_length + 1):
        x, known = model.decode(tokens[..., -1:].flatten(0, 1), encoded, known)
        steps = model.predict(x, encoded).view(pairs, beam, -1)
        has_ended = (tokens[..., -1] == END) | (tokens[..., -1] == PAD)
        steps[..., [PAD, BEGIN]] = -math.inf
        if length == max_length:
            steps[..., END + 1 :] = -math.inf
        steps[has_ended] = -math.inf
        steps[..., PAD][has_ended] = 0.0
        scores, best = (scores[..., None] + steps).flatten(1).topk(beam)
        beginnings, latest = best // steps.shape[-1], best % steps.shape[-1]
        known = [part[(rows * beam + beginnings).flatten()] for part in known]
        tokens = torch.cat([tokens[rows, beginnings], latest[..., None]], dim=-1)
        if ((latest == END) | (latest == PAD)).all():
            break
    lines = tokens[..., 1:]
    scores = scores / (lines != PAD).sum(dim=-1) ** lenpen
    best = scores.argmax(dim=1, keepdim=True)
    return lines[rows, best][:, 0], scores[rows, best][:, 0]
