"""Pairs of the code of a function and the first line of its docstring, from Python's own standard library, and their tokens."""

import ast
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from ignite_train import TokenBudgetSampler

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
SPECIAL = PAD, BEGIN, END, UNKNOWN = range(4)
SOURCE_TOKENS, TARGET_TOKENS = 40, 32  # what is longer is cut off; the second is also how long a generated line may be


class Function(NamedTuple):
    """A function of the standard library: its name, the words of its code, and the first line of its docstring."""

    name: str
    words: list[str]
    line: str


def functions_of(text: str) -> Iterator[Function]:
    """The functions in this source whose docstrings begin with a line of 3 to 20 words."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (docstring := ast.get_docstring(node)) is None:
            continue
        line, string = docstring.strip().partition("\n")[0].strip(), node.body[0]
        if re.match("[A-Za-z]", line) and 3 <= len(line.split()) <= 20:
            code = lines[node.lineno - 1 : string.lineno - 1] + lines[string.end_lineno : node.end_lineno]
            yield Function(node.name, words_of(f"{node.name} {' '.join(code)}"), line)


def words_of(text: str) -> list[str]:
    """Words in small letters; a name such as `readLine` or `read_line` is two."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", text)]


def read_standard_library(max_pairs: int | None) -> dict[str, list[Function]]:
    """The pairs for training, validation and test: of 20 files one is for validation and two are for the test, whole."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts))
    parts: dict[str, list[Function]] = {"train": [], "valid": [], "test": []}
    for number, path in enumerate(paths):
        part = {0: "test", 5: "valid", 10: "test"}.get(number % 20, "train")
        parts[part] += functions_of(path.read_text(encoding="utf-8", errors="replace"))
        if max_pairs is not None and sum(map(len, parts.values())) >= max_pairs:
            break
    empty = [part for part, functions in parts.items() if not functions]
    if empty:
        raise ValueError(
            f"--max-pairs must be larger, got {max_pairs}: the files with the first pairs have none for {empty[0]}"
        )
    return parts


class Vocabulary:
    """Turns text into numbers and back. The most frequent words are a token each; the others are spelled.

    A token holds the space before it, so that joined tokens are the text again.
    """

    def __init__(self, functions: Sequence[Function], size: int) -> None:
        counts = Counter(token for function in functions for token in [*self.of_source(function), *self.of_line(function.line)])
        characters = sorted({character for token in counts for character in token})
        frequent = [token for token, _ in counts.most_common() if len(token) > 1][:size]
        self.tokens = ["", "", "", "⁇", *characters, *frequent]
        self.numbers = {token: number for number, token in enumerate(self.tokens) if number >= len(SPECIAL)}

    @staticmethod
    def of_source(function: Function) -> list[str]:
        """The tokens of its code, each like a word inside a line."""
        return [f" {word}" for word in function.words]

    @staticmethod
    def of_line(line: str) -> list[str]:
        """Words, numbers and other characters; the first word stands as if after a space."""
        return re.findall(r" ?[^\W\d_]+| ?\d+| ?[^\w\s]| ?_|\s", f" {line}")

    def encode(self, tokens: Sequence[str], length: int) -> Tensor:
        """At most this many numbers, the last of which is the end."""
        pieces = [piece for token in tokens for piece in ([token] if token in self.numbers else token)]
        return torch.tensor([*(self.numbers.get(piece, UNKNOWN) for piece in pieces[: length - 1]), END])

    def decode(self, numbers: Tensor) -> str:
        """The text."""
        return "".join(self.tokens[number] for number in numbers.tolist()).strip()


class Batch(NamedTuple):
    """A micro-batch: which pairs they are, their sources and targets `[pairs, length]`, padded; targets have a beginning."""

    ids: Tensor
    sources: Tensor
    targets: Tensor


class Pairs(list[tuple[int, Tensor, Tensor]]):
    """The number, source and target of each pair of one part of the data, and the lines as they were written."""

    def __init__(self, functions: Sequence[Function], vocabulary: Vocabulary) -> None:
        self.lines = [function.line for function in functions]
        for number, function in enumerate(functions):
            source = vocabulary.encode(vocabulary.of_source(function), SOURCE_TOKENS)
            target = vocabulary.encode(vocabulary.of_line(function.line), TARGET_TOKENS)
            self.append((number, source, target))

    @property
    def lengths(self) -> list[int]:
        """What the budget of tokens counts."""
        return [max(len(source), len(target)) for _, source, target in self]

    @staticmethod
    def collate(pairs: Sequence[tuple[int, Tensor, Tensor]]) -> Batch:
        """Pads them to one length."""
        ids, sources, targets = zip(*pairs, strict=True)
        begun = [F.pad(target, (1, 0), value=BEGIN) for target in targets]
        padded = (pad_sequence(list(rows), batch_first=True, padding_value=PAD) for rows in (sources, begun))
        return Batch(torch.tensor(ids), *padded)

    def batches(self, max_tokens: int, max_samples: int | None, seed: int) -> TokenBudgetSampler:
        """The batches of the training, shuffled by seed and epoch."""
        return TokenBudgetSampler(self.lengths, max_tokens=max_tokens, max_samples=max_samples, shuffle=True, seed=seed)

    def in_order(self, max_tokens: int) -> DataLoader[Any]:
        """A loader for evaluations: each process has its share of the batches."""
        batches = TokenBudgetSampler(self.lengths, max_tokens=max_tokens, shuffle=False)
        return DataLoader(self, batch_sampler=batches, collate_fn=self.collate)
