"""The recipe in examples/translation.py: its loss, its search and its BLEU, and the whole of it, shortened."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import itertools
import math
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor, nn

from bits import bit_by_bit
from ignite_train import create_evaluator
from ignite_train.checkpoint import average_checkpoints, consolidate, find
from processes import DEADLINE_SECONDS, forked
from ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = {
    "max_pairs": 600,
    "vocabulary": 100,
    "width": 32,
    "decoder_layers": 1,
    "dropout": 0.0,
    "max_tokens": 1000,
    "update_freq": "4,2",
    "max_epoch": 2,
    "lr": 0.01,
    "warmup_updates": 6,
    "log_interval": 1,
    "beam": 2,
    "samples": 1,
    "average": 2,
}
NAMES = ["loss", "nll_loss", "ppl", "wps", "ups", "wpb", "bsz", "num_updates", "lr", "gnorm", "clip", "train_wall", "wall"]

pytestmark = [
    pytest.mark.timeout(3 * DEADLINE_SECONDS),
    pytest.mark.skipif(not EXAMPLES.is_dir(), reason="looks at a checkout, which is not here"),
]


def recipe() -> Any:
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))  # as when the script is started
    script: Any = importlib.import_module("translation")
    if not hasattr(script.read_standard_library, "cache_clear"):
        script.read_standard_library = functools.cache(script.read_standard_library)  # once in a process
    return script


def functions_of(text: str) -> list[Any]:
    recipe()  # the folder is in the path now
    return list(importlib.import_module("translating.pairs").functions_of(text))


def tiny_model(num_tokens: int = 7) -> Any:
    torch.manual_seed(0)
    settings = recipe().Settings(width=32, encoder_layers=1, decoder_layers=1, dropout=0.0)
    model = recipe().make_transformer(num_tokens, settings).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)  # far from the even probabilities of a new model
    return model


# --- the loss ---


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_the_loss_is_that_of_fairseq_and_of_torch(smoothing: float) -> None:
    """Against fairseq's sum, written out token by token, and torch's own with its other share; padding counts nowhere."""
    torch.manual_seed(1)
    logits = torch.randn(3, 5, 11, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[4, 5, 2, 0, 0], [10, 9, 8, 7, 2], [3, 2, 0, 0, 0]])
    loss, nll = recipe().label_smoothed_nll(logits.log_softmax(dim=-1), targets, smoothing)

    by_hand = nll_by_hand = 0.0
    for row, target in itertools.product(range(3), range(5)):
        right = int(targets[row, target])
        if right != 0:
            logs = logits[row, target].log_softmax(dim=-1).tolist()
            nll_by_hand -= logs[right]
            by_hand -= (1 - smoothing) * logs[right]
            by_hand -= sum(smoothing / 10 * value for token, value in enumerate(logs) if token != right)
    assert loss.item() == pytest.approx(by_hand, rel=1e-12)
    assert nll.item() == pytest.approx(nll_by_hand, rel=1e-12)

    of_torch = nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=0, label_smoothing=smoothing * 11 / 10, reduction="sum"
    )
    (gradient,) = torch.autograd.grad(loss, logits)
    (gradient_of_torch,) = torch.autograd.grad(of_torch, logits)
    assert loss.item() == pytest.approx(of_torch.item(), rel=1e-12)
    torch.testing.assert_close(gradient, gradient_of_torch, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("sentence_avg", [False, True])
def test_loss_and_nll_have_their_own_denominators(sentence_avg: bool) -> None:
    """The likelihood is a mean over tokens also where the loss is one over pairs."""
    script, model = recipe(), tiny_model()
    batch = script.Batch(torch.arange(2), torch.tensor([[4, 5, 2], [6, 2, 0]]), torch.tensor([[1, 4, 5, 2], [1, 6, 2, 0]]))
    output = script.forward(model, batch, settings=script.Settings(sentence_avg=sentence_avg, label_smoothing=0.0))

    nll, tokens = output.logs["nll_loss"]
    assert (int(tokens), int(output.sample_size)) == (5, 2 if sentence_avg else 5)
    assert float(nll) == pytest.approx(output.loss.item() / math.log(2))


# --- the search ---


def exhaustive(model: Any, source: Tensor, max_length: int, lenpen: float) -> tuple[list[int], float]:
    """The best of all lines, by the model's probabilities of the whole line at once."""
    best: tuple[float, list[int]] = (-math.inf, [])
    for length in range(max_length):
        bodies = torch.cartesian_prod(*[torch.arange(3, 7)] * length).view(4**length, length) if length else torch.zeros(1, 0)
        begun = nn.functional.pad(bodies.long(), (1, 0), value=1)
        lines = nn.functional.pad(bodies.long(), (0, 1), value=2)
        logs = model(source.expand(len(lines), -1), begun).gather(-1, lines[..., None])
        scores = logs.sum(dim=(1, 2)) / (length + 1) ** lenpen
        best = max(best, (scores.max().item(), lines[scores.argmax()].tolist()))
    return best[1], best[0]


@torch.no_grad()
@pytest.mark.parametrize("lenpen", [0.0, 1.0, 2.0])
def test_a_wide_beam_is_an_exhaustive_search(lenpen: float) -> None:
    """In one batch of sources of different lengths, so that padding and finished lines do no harm."""
    script, model = recipe(), tiny_model()
    sources = [torch.tensor([4, 5, 6, 2]), torch.tensor([6, 2]), torch.tensor([5, 5, 2])]
    padded = nn.utils.rnn.pad_sequence(sources, batch_first=True)
    lines, scores = script.beam_search(model, padded, beam=100, max_length=4, lenpen=lenpen)

    for source, line, score in zip(sources, lines.tolist(), scores.tolist(), strict=True):
        expected, value = exhaustive(model, source, 4, lenpen)
        assert [token for token in line if token != 0] == expected
        assert score == pytest.approx(value, rel=1e-10)


@torch.no_grad()
def test_a_beam_of_one_is_greedy_and_a_wider_one_is_no_worse() -> None:
    script, model = recipe(), tiny_model()
    source = torch.tensor([[4, 6, 5, 2]])
    line = [1]
    while line[-1] != 2 and len(line) < 8:
        logs = model(source, torch.tensor([line]))[0, -1]
        line.append(2 if len(line) == 7 else 2 + int(logs[2:].argmax()))
    greedy, score = script.beam_search(model, source, beam=1, max_length=7, lenpen=0.0)

    assert greedy[0].tolist() == line[1:]
    assert script.beam_search(model, source, beam=50, max_length=7, lenpen=0.0)[1] >= score


@torch.no_grad()
def test_words_are_written_or_copied() -> None:
    """The probabilities of all tokens add up to one, and a word of the source is likelier than without the copy."""
    script, model = recipe(), tiny_model(12)
    encoded = model.encode(torch.tensor([[4, 5, 2, 0], [7, 8, 9, 2]]))
    x, _ = model.decode(torch.tensor([[1, 4], [1, 5]]), encoded)
    logs = model.predict(x, encoded)
    torch.testing.assert_close(logs.exp().sum(dim=-1), torch.ones(2, 2, dtype=torch.float64))

    model.writes.weight.zero_()
    model.writes.bias.fill_(-50.0)  # copies always
    copied = model.predict(x, encoded).exp()
    assert copied[0, :, [2, 4, 5]].sum(dim=-1).tolist() == pytest.approx([1.0, 1.0])
    assert copied[1, :, [2, 7, 8, 9]].sum(dim=-1).tolist() == pytest.approx([1.0, 1.0])
    assert script.PAD == 0


# --- text, and BLEU ---


FUNCTIONS = '''
class Reader:
    def readLine(self, size_limit=None):
        """Return the next line,  or None (at the end of 2 files).

        More of it.
        """
        return self.buffer.take(size_limit)

    def too_short(self):
        "Do it."

    async def close_all(self):
        """Close all files that are_open in the pool."""

    def without(self):
        return 1
'''


def test_pairs_are_code_and_first_line() -> None:
    """The docstring is not in the code; names are taken apart; what has no line of three words is left out."""
    first, second = functions_of(FUNCTIONS)
    assert first.line == "Return the next line,  or None (at the end of 2 files)."
    assert " ".join(first.words) == "read line def read line self size limit none return self buffer take size limit"
    assert (second.name, second.line) == ("close_all", "Close all files that are_open in the pool.")


def test_text_comes_back() -> None:
    """Frequent words are a token, others are spelled, and characters never seen are lost, visibly."""
    script = recipe()
    functions = functions_of(FUNCTIONS)
    vocabulary = script.Vocabulary(functions, 4)
    for line in (functions[0].line, "take 2 pools of self, or lose it."):
        numbers = vocabulary.encode(vocabulary.of_line(line), 99)
        assert vocabulary.decode(numbers[:-1]) == line
    assert len(vocabulary.encode(vocabulary.of_line(functions[0].line), 5)) == 5
    assert vocabulary.decode(vocabulary.encode(vocabulary.of_line("the ∂"), 99)[:-1]) == "the ⁇"


def test_bleu_of_micro_batches_is_bleu_of_the_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published number is sacrebleu's of all lines at once, and not the mean over micro-batches."""
    from sacrebleu import BLEU

    script = recipe()
    functions = [script.Function("f", ["a", "b"], f"the {number} words of a line are b a c") for number in range(7)]
    vocabulary = script.Vocabulary(functions, 50)
    pairs = script.Pairs(functions, vocabulary)
    model = tiny_model(len(vocabulary.tokens)).float()
    settings = script.Settings(width=32)
    written = ["the 3 words of a line are a"] * 3 + ["the 3 words of a line"] * 4  # two lengths, so that means would differ
    numbers = [vocabulary.encode(vocabulary.of_line(line), 99) for line in written]

    def some_lines(model: Any, sources: Tensor, **options: Any) -> Any:
        chosen = numbers[:3] if len(sources) == 3 else numbers[3:]
        return nn.utils.rnn.pad_sequence(chosen, batch_first=True), None

    monkeypatch.setattr(script, "beam_search", some_lines)
    judge = functools.partial(script.judge, settings=settings, pairs=pairs, vocabulary=vocabulary, beam=2)
    evaluator = create_evaluator(model, judge)
    evaluator.add_event_handler("EPOCH_COMPLETED", script.publish_bleu, len(pairs))
    metrics = evaluator.run([pairs.collate(pairs[:3]), pairs.collate(pairs[3:])]).metrics

    assert metrics["bleu"] == pytest.approx(BLEU().corpus_score(written, [pairs.lines]).score, rel=1e-12)
    assert metrics["bleu"] > 0
    assert metrics["ppl"] == pytest.approx(2 ** metrics["nll_loss"])
    assert not any("count" in name for name in metrics)


# --- the whole recipe, shortened ---


def train(directory: Path, **changes: Any) -> str:
    """What it prints on this rank."""
    script, printed = recipe(), io.StringIO()
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(printed):
        script.train(0, script.Settings(save_dir=directory, **{**TINY, **changes}))
    return printed.getvalue()


def numbers_of(printed: str, name: str, line: str = "train_inner") -> list[float]:
    """Of each line of that kind."""
    return [float(value) for value in re.findall(rf"^{line} .*?\b{name}[= ]([-+.e\d]+)", printed, re.MULTILINE)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the recipe prints in one process, and its directory."""
    directory = tmp_path_factory.mktemp("runs") / "alone"
    return train(directory), directory


@pytest.mark.slow
def test_the_lines_are_those_of_fairseq(alone: tuple[str, Path]) -> None:
    """One for each log interval, validation and epoch; the loss falls; three ways to generate, and three baselines."""
    printed, _ = alone
    first = next(line for line in printed.splitlines() if line.startswith("train_inner"))
    assert re.findall(r"(\w+)=", first) == NAMES
    assert re.match(r"train_inner \| epoch 001: +1 / \d+ loss=", first)
    losses = numbers_of(printed, "nll_loss")
    assert losses[-1] < losses[0] - 1
    assert numbers_of(printed, "num_updates") == [*range(1, len(losses) + 1)]
    assert len(re.findall(r"^valid \| epoch 00\d \| valid on 'valid' subset \| loss .* bleu ", printed, re.MULTILINE)) == 2
    assert len(numbers_of(printed, "ppl", "train")) == 2
    assert len(re.findall(r"^generate \| test with beam=2 .*BLEU4 = [\d.]+$", printed, re.MULTILINE)) == 3
    assert len(re.findall(r"^baseline \| .*BLEU4 = [\d.]+$", printed, re.MULTILINE)) == 3
    assert re.search(r"^S-0\t.*\nT-0\t.*\nH-0\t-[\d.]+\t", printed, re.MULTILINE)


@pytest.mark.slow
def test_rates_and_groups_follow_their_rules(alone: tuple[str, Path]) -> None:
    """The rate of each update is fairseq's formula; an update of the second epoch has half the micro-batches of the first."""
    printed, _ = alone
    rates = numbers_of(printed, "lr")
    expected = [0.01 * min(update / 6, math.sqrt(6 / update)) for update in range(1, len(rates) + 1)]
    assert rates == pytest.approx(expected, rel=1e-5)
    batches = int(re.findall(r"(\d+) batches to an epoch", printed)[0])
    lengths = [int(length) for length in re.findall(r"^train_inner \| epoch \d+: +1 / (\d+) ", printed, re.MULTILINE)]
    assert lengths == [-(-batches // 4), -(-batches // 2)]


@pytest.mark.nightly
def test_two_ranks_have_the_losses_of_one(alone: tuple[str, Path], tmp_path: Path) -> None:
    """Update by update; in each validation the loss, and the BLEU of the lines that are written, are those of one too."""
    printed, silent = run_ranks(train, tmp_path)
    assert silent == ""
    for name in ("loss", "nll_loss", "gnorm"):
        assert numbers_of(printed, name) == pytest.approx(numbers_of(alone[0], name), abs=2e-3)
    for name in ("num_updates", "lr", "wpb", "bsz"):
        assert numbers_of(printed, name) == numbers_of(alone[0], name)
    for name in ("loss", "ppl", "bleu"):
        assert numbers_of(printed, name, "valid") == pytest.approx(numbers_of(alone[0], name, "valid"), rel=2e-3)


class KilledAt(io.StringIO):
    """A standard output that kills the process when `text` is printed and a checkpoint of the second epoch is there."""

    def __init__(self, text: str, directory: Path) -> None:
        super().__init__()
        self._text, self._directory = text, directory

    def write(self, text: str) -> int:
        count = super().write(text)
        if self._text in self.getvalue():
            deadline = time.monotonic() + DEADLINE_SECONDS
            while 2 not in self._epochs() and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return count

    def _epochs(self) -> list[int]:
        """Of the checkpoints."""
        return [found.manifest.epoch for found in find(self._directory) if found.manifest is not None]


def _train_until(text: str, directory: Path, changes: dict[str, Any]) -> None:
    """In a process of its own."""
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(KilledAt(text, directory)):
        script = recipe()
        script.train(0, script.Settings(save_dir=directory, **{**TINY, **changes}))


@pytest.mark.slow
def test_killed_and_started_again_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    """In the middle of the second epoch, with dropout. Weights, Adam's moments, and the numbers of the updates are the same."""
    changes = {"dropout": 0.3, "save_interval_updates": 2}
    whole = train(tmp_path / "whole", **changes)
    process = forked.Process(target=_train_until, args=("epoch 002:      3", tmp_path / "parts", changes), daemon=True)
    process.start()
    process.join(2 * DEADLINE_SECONDS)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    rest = train(tmp_path / "parts", **changes)

    steps = [line for line in whole.splitlines() if "train_inner | epoch 002" in line]
    assert 0 < len(numbers_of(rest, "loss")) < len(steps)
    for name in ("loss", "gnorm", "lr", "num_updates"):
        assert numbers_of(rest, name) == numbers_of(whole, name)[-len(numbers_of(rest, name)) :]
    for entry in ("model", "optimizer"):
        ends = []
        for part in ("whole", "parts"):
            consolidate(tmp_path / part, tmp_path / "entry.pt", entry=entry)
            ends.append(bit_by_bit(torch.load(tmp_path / "entry.pt")))
        assert ends[0] == ends[1]
    generated = re.findall("^generate.*", whole, re.MULTILINE)
    assert len(generated) == 3
    assert re.findall("^generate.*", rest, re.MULTILINE) == generated


@pytest.mark.slow
@torch.no_grad()
def test_the_average_is_that_of_the_last_checkpoints(alone: tuple[str, Path]) -> None:
    """Added up by hand and evaluated on all test pairs at once, it has the likelihood that the line tells."""
    printed, directory = alone
    script, weights = recipe(), [average_checkpoints([found.path]) for found in find(directory)]
    assert len(weights) == 2
    parts = script.read_standard_library(TINY["max_pairs"])
    vocabulary = script.Vocabulary(parts["train"], TINY["vocabulary"])
    settings = script.Settings(width=32, decoder_layers=1)
    model = script.make_transformer(len(vocabulary.tokens), settings).eval()
    model.load_state_dict({name: (weights[0][name] + weights[1][name]) / 2 for name in weights[0]})
    pairs = script.Pairs(parts["test"], vocabulary)
    nll, tokens = script.forward(model, pairs.collate(pairs), settings=settings).logs["nll_loss"]

    (told,) = re.findall(r"average of the last 2 checkpoint.* nll_loss ([\d.]+)", printed)
    assert float(told) == pytest.approx(float(nll / tokens), abs=1e-3)
    assert told not in re.findall(r"(?:last|best) checkpoint \| nll_loss ([\d.]+)", printed)


LIMITS: dict[str, tuple[dict[str, Any], int]] = {
    "updates": ({"max_update": 3}, 3),
    "rate": ({"stop_min_lr": 0.008, "max_epoch": 9}, 9),  # update 10 would have 0.01 * sqrt(6 / 10)
    "patience": ({"patience": 1, "max_epoch": 9, "lr": 0.0}, 0),  # nothing is learned: the second validation is a tie
}


@pytest.mark.slow
@pytest.mark.parametrize("limit", LIMITS)
def test_limits_end_the_run_and_again_add_nothing(limit: str, tmp_path: Path) -> None:
    changes, updates = LIMITS[limit]
    printed = train(tmp_path, samples=0, **changes)
    if updates:
        assert numbers_of(printed, "num_updates") == [*range(1, updates + 1)]
    else:
        assert len(numbers_of(printed, "loss", "valid")) == 2
    again = train(tmp_path, samples=0, **changes)
    assert numbers_of(again, "num_updates") == []
    assert re.findall("^generate.*", again, re.MULTILINE) == re.findall("^generate.*", printed, re.MULTILINE)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"width": 48}, "--width must be a multiple of 32, the width of a head; got 48"),
    "text": ({"update_freq": "2,x"}, "--update-freq must be numbers with commas between them, got '2,x'"),
    "ranks": ({"update_freq": "4,3", "nproc": 2}, "--update-freq must be multiples of 2, the processes; got 4,3"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_options_that_do_not_fit_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is read, in one line."""
    monkeypatch.delenv("RANK", raising=False)
    options, says = MISTAKES[name]
    with pytest.raises(typer.BadParameter) as raised:
        recipe().main(**options)
    assert str(raised.value) == says
