"""Learns to write the first line of a function's docstring from its source, trained as `fairseq-train` trains translations.

    python examples/translation.py                                     # one process
    python examples/translation.py --nproc 2                           # two, started by the script itself
    torchrun --nproc_per_node=2 examples/translation.py                # two, started by torchrun

The pairs are the functions of Python's own standard library: nothing is downloaded. The options have fairseq's names. Where
fairseq counts for each process, all counts here are over all processes together, so that the three commands make the same
updates up to rounding, but for the numbers that dropout draws. Interrupt one with Ctrl-C, or kill it, and start any of them
again: it continues where it was.

The pairs with their vocabulary, and the network with its beam search, are in the folder translating.
"""

import inspect
import math
import os
import platform
import re
import shlex
import signal
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

# Before torch starts its threads: waiting threads sleep. By default they spin, which slows a busy machine down.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import ignite.distributed as idist
import torch
import torch.nn.functional as F  # noqa: N812
import typer
from ignite.engine import Engine, Events
from sacrebleu import BLEU
from torch import Tensor, nn
from typer import Option

from ignite_train import (
    Evaluator,
    ForwardOutput,
    ResumableLoader,
    Trainer,
    WarmUpSchedule,
    create_evaluator,
    create_trainer,
)
from ignite_train.checkpoint import average_checkpoints, find
from ignite_train.handlers import (
    Checkpoint,
    EarlyStopping,
    LearningRateSchedule,
    MinLearningRate,
    StopOnSignal,
    TimeLimit,
    TrainingMetrics,
    Validation,
)
from launching import launch, number_of_processes
from translating.pairs import (
    PAD,
    SOURCE_TOKENS,
    TARGET_TOKENS,
    Batch,
    Function,
    Pairs,
    Vocabulary,
    read_standard_library,
    words_of,
)
from translating.transformer import HEAD_WIDTH, Transformer, beam_search

MODES: dict[str, Literal["min", "max"]] = {"loss": "min", "bleu": "max"}  # which is better


@dataclass(frozen=True)
class Settings:
    """What the command line can change. All counts are over all processes together."""

    nproc: Annotated[int, Option(min=1, help="Processes to start; leave at 1 under torchrun.")] = 1
    max_tokens: Annotated[int, Option(min=SOURCE_TOKENS, help="Tokens of source or target in a micro-batch.")] = 512
    max_sentences: Annotated[int | None, Option(min=1, help="Pairs in a micro-batch, at most.")] = None
    update_freq: Annotated[str, Option(help="Micro-batches to an update, by epoch; the last number repeats.")] = "2,2,2,2,4"
    max_epoch: Annotated[int, Option(min=1, help="Passes over the pairs.")] = 8
    max_update: Annotated[int, Option(min=0, help="Updates after which training stops; 0: no limit.")] = 0
    stop_min_lr: Annotated[float, Option(help="Stop when the learning rate has fallen to this; negative: never.")] = -1.0
    stop_time_hours: Annotated[float, Option(min=0.0, help="Stop after this many hours; 0: no limit.")] = 0.0
    patience: Annotated[int, Option(min=0, help="Stop after this many validations without a better one; 0: never.")] = 3
    best_checkpoint_metric: Annotated[Literal["loss", "bleu"], Option(help="What decides which is the best.")] = "loss"
    lr: Annotated[float, Option(min=0.0, help="Learning rate at its highest, after the warm-up.")] = 2e-3
    warmup_updates: Annotated[int, Option(min=1, help="Updates in which the learning rate rises.")] = 200
    clip_norm: Annotated[float, Option(min=0.0, help="Largest norm of the gradient; 0: do not clip.")] = 1.0
    label_smoothing: Annotated[float, Option(min=0.0, max=0.99, help="Probability that all other tokens share.")] = 0.1
    sentence_avg: Annotated[bool, Option(help="Take the mean over pairs in place of tokens.")] = False
    dropout: Annotated[float, Option(min=0.0, max=0.9, help="Dropout in the residual branches.")] = 0.2
    encoder_layers: Annotated[int, Option(min=1, help="Layers of the encoder.")] = 1
    decoder_layers: Annotated[int, Option(min=1, help="Layers of the decoder.")] = 2
    width: Annotated[int, Option(min=HEAD_WIDTH, help="Width of the model; a multiple of 32, the width of a head.")] = 128
    vocabulary: Annotated[int, Option(min=1, help="How many frequent words are a token each.")] = 3000
    average: Annotated[int, Option(min=1, help="How many checkpoints, the last ones, are averaged at the end.")] = 3
    beam: Annotated[int, Option(min=1, help="Beginnings of a line that the beam search keeps for the test lines.")] = 5
    lenpen: Annotated[float, Option(help="The score of a line is divided by its length to this power.")] = 1.0
    samples: Annotated[int, Option(min=0, help="How many written lines to show at the end.")] = 5
    max_pairs: Annotated[int | None, Option(min=1, help="Use only about this many pairs; 600 or more.")] = None
    log_interval: Annotated[int, Option(min=1, help="Updates between two lines of the log.")] = 50
    save_interval_updates: Annotated[int, Option(min=0, help="Updates between two checkpoints; 0: after epochs only.")] = 0
    seed: Annotated[int, Option(min=0, help="Seed of the initial weights, dropout and the order of the pairs.")] = 1
    save_dir: Annotated[Path, Option(help="Folder of the checkpoints; a run resumes from them.")] = Path("runs/translation")
    report: Annotated[Path | None, Option(help="A Markdown file into which the results are written.")] = None


# --- the loss ---


def label_smoothed_nll(log_probabilities: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Sums over the real tokens: the cross entropy with a softened target, and the negative log-likelihood, both in nats.

    The target is 1 - `smoothing` at the right token and shares `smoothing` among the V - 1 others, as in fairseq. torch's
    `label_smoothing` shares it among all V, so that fairseq's `smoothing` is torch's times (V - 1) / V.
    """
    real = targets != PAD
    of_real = log_probabilities[real]
    nll = -of_real.gather(1, targets[real][:, None]).sum()
    of_each_other = smoothing / (of_real.shape[1] - 1)
    return (1 - smoothing - of_each_other) * nll - of_each_other * of_real.sum(), nll


def forward(model: nn.Module, batch: Batch, *, settings: Settings) -> ForwardOutput:
    """The one function that training needs: the loss of a micro-batch, summed, and of how many tokens (or pairs) it is.

    The trainer divides the gradient by the sum of the sample sizes of an update, over all its micro-batches and processes. The
    log `nll_loss` (in bits) has a denominator of its own: it is a mean over tokens also where the loss is one over pairs.
    """
    targets = batch.targets[:, 1:]
    loss, nll = label_smoothed_nll(model(batch.sources, batch.targets[:, :-1]), targets, settings.label_smoothing)
    tokens, pairs = (targets != PAD).sum(), len(targets)
    logs = {"nll_loss": (nll.detach() / math.log(2), tokens), "tokens": tokens, "sentences": pairs}
    return ForwardOutput(loss, pairs if settings.sentence_avg else tokens, logs)


# --- BLEU and what it is compared with --------------------------------------------------------------------------------------


def judge(
    model: nn.Module, batch: Batch, *, settings: Settings, pairs: Pairs, vocabulary: Vocabulary, beam: int
) -> ForwardOutput:
    """What an evaluator runs: the loss, and the counts of BLEU of the lines that the model writes.

    The counts are summed over all processes like any log; each has the number of pairs as its denominator, so that
    `publish_bleu` finds their sums.
    """
    output = forward(model, batch, settings=settings)
    lines, _ = beam_search(model, batch.sources, beam=beam, max_length=TARGET_TOKENS, lenpen=settings.lenpen)
    written = [vocabulary.decode(line) for line in lines]
    score = BLEU().corpus_score(written, [[pairs.lines[number] for number in batch.ids.tolist()]])
    counts = [score.sys_len, score.ref_len, *score.counts, *score.totals]
    logs = {f"bleu_count_{index}": (count, len(written)) for index, count in enumerate(counts)}
    return output._replace(logs={**output.logs, **logs})


def publish_bleu(evaluator: Engine, num_pairs: int) -> None:
    """Makes `bleu` of the counts, and `ppl` of the negative log-likelihood."""
    metrics = evaluator.state.metrics
    counts = [round(metrics.pop(f"bleu_count_{index}") * num_pairs) for index in range(10)]
    score = BLEU.compute_bleu(counts[2:6], counts[6:], *counts[:2], smooth_method="exp")
    metrics |= {"bleu": score.score, "ppl": 2 ** metrics["nll_loss"]}


def baselines(parts: dict[str, list[Function]]) -> dict[str, list[str]]:
    """Lines for the test functions that need no training."""
    most_frequent = Counter(function.line for function in parts["train"]).most_common(1)[0][0]
    return {
        "the most frequent line": [most_frequent for _ in parts["test"]],
        "the words of the name": [f"{' '.join(words_of(function.name)).capitalize()}." for function in parts["test"]],
        "the line of the most similar function": most_similar(parts),
    }


def most_similar(parts: dict[str, list[Function]]) -> list[str]:
    """The line of the training function with the nearest code: by the cosine of word counts, rare words counting more."""
    columns = {
        word: number for number, word in enumerate(sorted({word for part in parts.values() for f in part for word in f.words}))
    }
    counts = {name: torch.zeros(len(parts[name]), len(columns)) for name in ("train", "test")}
    for name, rows in counts.items():
        for row, function in zip(rows, parts[name], strict=True):
            row += torch.tensor([columns[word] for word in function.words]).bincount(minlength=len(columns))
    rarity = (len(parts["train"]) / (1 + (counts["train"] > 0).sum(dim=0))).log().clamp(min=0)
    train, test = (F.normalize(rows.log1p() * rarity, dim=1) for rows in counts.values())
    return [parts["train"][number].line for number in (test @ train.T).argmax(dim=1).tolist()]


# --- the run ----------------------------------------------------------------------------------------------------------------


def print_inner(trainer: Trainer) -> None:
    """A line in the middle of an epoch, with fairseq's names: means since the line before."""
    if idist.get_rank() == 0:
        values = ", ".join(f"{name}={value}" for name, value in fairseq_names(trainer).items())
        state, done = trainer.state, trainer.state_dict()["epoch_iteration"]
        print(f"train_inner | epoch {state.epoch:03d}: {done:6d} / {state.epoch_length} {values}", flush=True)


def print_epoch(trainer: Trainer) -> None:
    """A line at the end of an epoch: means over it."""
    if idist.get_rank() == 0:
        values = " | ".join(f"{name} {value}" for name, value in fairseq_names(trainer).items())
        print(f"train | epoch {trainer.state.epoch:03d} | {values}", flush=True)


def fairseq_names(trainer: Trainer) -> dict[str, str]:
    """What `TrainingMetrics` has published, under the names that fairseq has for it; the loss is in bits."""
    metrics = trainer.state.metrics
    shown = {
        "loss": f"{metrics['loss_base2']:.3f}",
        "nll_loss": f"{metrics['nll_loss']:.3f}",
        "ppl": f"{2 ** metrics['nll_loss']:.2f}",
        "wps": f"{metrics['tokens_per_second']:.1f}",
        "ups": f"{metrics['updates_per_second']:.2f}",
        "wpb": f"{metrics['tokens'] * metrics['sample_size']:.1f}",
        "bsz": f"{metrics['sentences'] * metrics['sample_size']:.1f}",
        "num_updates": str(trainer.state.num_steps),
        "lr": f"{metrics['learning_rate']:.6g}",
        "gnorm": f"{metrics['grad_norm']:.3f}",
        "clip": f"{100 * metrics['clipped']:.0f}",
    }
    return shown | {name: f"{metrics[name]:.0f}" for name in ("train_wall", "wall")}


def print_validation(evaluator: Evaluator, trainer: Trainer, validation: Validation) -> None:
    """A line for each validation, from the second one on with the best so far."""
    metrics, state, score = evaluator.state.metrics, trainer.state, validation.score
    better, unit = (min, math.log(2)) if score == "loss" else (max, 1.0)
    best = "" if validation.best is None else f" | best_{score} {better(metrics[score], validation.best) / unit:.3f}"
    if idist.get_rank() == 0:
        print(
            f"valid | epoch {state.epoch:03d} | valid on 'valid' subset | loss {metrics['loss'] / math.log(2):.3f} "
            f"| nll_loss {metrics['nll_loss']:.3f} | ppl {metrics['ppl']:.2f} | bleu {metrics['bleu']:.2f} "
            f"| num_updates {state.num_steps}{best}",
            flush=True,
        )


def stop_at(trainer: Trainer, max_update: int) -> None:
    """A limit beside that of `trainer.run`; the counter is the same on all processes. Done again, it adds no update."""
    if trainer.state.num_steps >= max_update:
        if idist.get_rank() == 0:
            print(f"Stopping training due to num_updates: {trainer.state.num_steps} >= max_update: {max_update}")
        trainer.terminate(agreed=True)


def attach_validation(trainer: Trainer, evaluator: Evaluator, pairs: Pairs, settings: Settings) -> None:
    """A validation after each epoch and at the end of the run, which notes the best score and prints a line."""
    metric = settings.best_checkpoint_metric
    validation = Validation(evaluator, pairs.in_order(4 * settings.max_tokens), score=metric, mode=MODES[metric])
    validation.attach(trainer, Events.EPOCH_COMPLETED | Events.COMPLETED)
    evaluator.add_event_handler(Events.COMPLETED, print_validation, trainer, validation)


def attach_handlers(trainer: Trainer, evaluator: Evaluator, optimizer: torch.optim.Optimizer, settings: Settings) -> Checkpoint:
    """All that is not forward, backward and step: schedule, limits, metrics, lines and checkpoints."""
    # After n updates the rate is lr * min((n + 1) / warmup_updates, sqrt(warmup_updates / (n + 1))).
    schedule = WarmUpSchedule(optimizer, "inverse_square_root", warm_up=settings.warmup_updates - 1)
    LearningRateSchedule(schedule).attach(trainer)
    if settings.max_update:
        trainer.add_event_handler(Events.ITERATION_COMPLETED, stop_at, settings.max_update)
        trainer.on_enter.append(lambda trainer: stop_at(trainer, settings.max_update))  # a stop in STARTED is after an update
    if settings.stop_min_lr >= 0:
        MinLearningRate(optimizer, minimum=settings.stop_min_lr).attach(trainer)
    if settings.stop_time_hours:
        TimeLimit(seconds=3600 * settings.stop_time_hours).attach(trainer)
    metric = settings.best_checkpoint_metric
    mode = MODES[metric]
    if settings.patience:
        EarlyStopping(evaluator, metric, patience=settings.patience, mode=mode).attach(trainer)
    for event, line in (
        (Events.ITERATION_COMPLETED(every=settings.log_interval), print_inner),
        (Events.EPOCH_COMPLETED, print_epoch),
    ):
        TrainingMetrics(base2=True, per_second=("tokens",), memory=False).attach(trainer, event)
        trainer.add_event_handler(event, line)
    checkpoint = Checkpoint(
        settings.save_dir,
        every_epochs=1,
        every=settings.save_interval_updates or None,
        keep=settings.average,
        score=metric,
        mode=mode,
        config=asdict(settings),
    )
    checkpoint.attach(trainer, evaluator=evaluator)
    return checkpoint


def make_transformer(num_tokens: int, settings: Settings) -> Transformer:
    """The network for this number of tokens, which draws its weights."""
    return Transformer(
        num_tokens,
        width=settings.width,
        encoder_layers=settings.encoder_layers,
        decoder_layers=settings.decoder_layers,
        dropout=settings.dropout,
    )


def make_trainer(model: nn.Module, optimizer: torch.optim.Optimizer, settings: Settings) -> Trainer:
    """The trainer, whose updates are as large on any number of processes."""
    processes = idist.get_world_size()
    return create_trainer(
        model,
        optimizer,
        partial(forward, settings=settings),
        accumulation_steps=[int(number) // processes for number in settings.update_freq.split(",")],
        max_grad_norm=settings.clip_norm or None,
    )


def make_evaluators(
    model: nn.Module, data: dict[str, Pairs], vocabulary: Vocabulary, settings: Settings
) -> dict[str, Evaluator]:
    """One for validations, whose lines are written greedily, and one for the test."""
    evaluators: dict[str, Evaluator] = {}
    for name, beam in (("valid", 1), ("test", settings.beam)):
        judged = partial(judge, settings=settings, pairs=data[name], vocabulary=vocabulary, beam=beam)
        evaluators[name] = create_evaluator(model, judged)
        evaluators[name].add_event_handler(Events.EPOCH_COMPLETED, publish_bleu, len(data[name]))
    return evaluators


def train(_local_rank: int, settings: Settings) -> None:
    """The run: what each process does."""
    processes = idist.get_world_size()
    if processes > 1:  # or each process would start a thread on every core
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // idist.get_nproc_per_node()))

    parts = read_standard_library(settings.max_pairs)
    vocabulary = Vocabulary(parts["train"], settings.vocabulary)
    data = {name: Pairs(functions, vocabulary) for name, functions in parts.items()}
    batches = data["train"].batches(settings.max_tokens, settings.max_sentences, settings.seed)
    loader = ResumableLoader(data["train"], batches=batches, seed_samples=False, collate_fn=Pairs.collate)

    torch.manual_seed(settings.seed)
    transformer = make_transformer(len(vocabulary.tokens), settings).to(idist.device())
    model = idist.auto_model(transformer) if processes > 1 else transformer  # with one process it would use DataParallel
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr, betas=(0.9, 0.98), fused=True)
    if idist.get_rank() == 0:
        sizes = ", ".join(f"{name} {len(pairs)} pairs" for name, pairs in data.items())
        parameters = sum(parameter.numel() for parameter in transformer.parameters())
        print(f"{sizes}; {len(vocabulary.tokens)} tokens; {parameters} parameters; {batches.num_batches} batches to an epoch")

    trainer = make_trainer(model, optimizer, settings)
    evaluators = make_evaluators(model, data, vocabulary, settings)
    attach_validation(trainer, evaluators["valid"], data["valid"], settings)
    checkpoint = attach_handlers(trainer, evaluators["valid"], optimizer, settings)
    stop = StopOnSignal([signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])  # Ctrl-C: save and end
    stop.attach(trainer)

    trainer.run(loader, max_epochs=settings.max_epoch)  # resumes from the newest checkpoint, if there is one

    if idist.all_reduce(float(stop.received is not None)):  # a signal may reach one process only
        if idist.get_rank() == 0:
            print(f"stopped after update {trainer.state.iteration}; the same command continues from there")
        return
    if idist.get_rank() == 0:
        print(f"done training in {trainer.state.metrics['wall']:.1f} seconds")
    reached = test(evaluators["test"], checkpoint, transformer, data["test"], settings)
    if idist.get_rank() == 0:
        reached |= compare(parts)
        show(transformer, data["test"], vocabulary, settings)
        if settings.report is not None:
            settings.report.write_text(report(trainer, data, reached), encoding="utf-8")


def test(
    evaluator: Evaluator, checkpoint: Checkpoint, transformer: Transformer, pairs: Pairs, settings: Settings
) -> dict[str, float]:
    """Writes the lines of the test functions with the last weights, their average and the best ones, which stay loaded.

    Returns:
        The BLEU of each.
    """
    loader = pairs.in_order(4 * settings.max_tokens)
    updates = {found.manifest.update for found in find(settings.save_dir) if found.manifest is not None}
    last = min(settings.average, len(updates))

    def load_average() -> None:
        transformer.load_state_dict(average_checkpoints(settings.save_dir, last=last))

    ways = {"last": lambda: None, f"average of the last {last}": load_average, "best": checkpoint.load_best}
    reached: dict[str, float] = {}
    for name, load in ways.items():
        load()
        metrics = evaluator.run(loader).metrics
        reached[f"beam search, {name} checkpoint" + "s" * name.startswith("average")] = metrics["bleu"]
        if idist.get_rank() == 0:
            print(
                f"generate | test with beam={settings.beam} | {name} checkpoint | nll_loss {metrics['nll_loss']:.3f} "
                f"| ppl {metrics['ppl']:.2f} | BLEU4 = {metrics['bleu']:.2f}",
                flush=True,
            )
    return reached


def compare(parts: dict[str, list[Function]]) -> dict[str, float]:
    """Prints the BLEU of lines for which nothing is learned, and returns it."""
    lines = [function.line for function in parts["test"]]
    reached = {name: BLEU().corpus_score(written, [lines]).score for name, written in baselines(parts).items()}
    for name, score in reached.items():
        print(f"baseline | {name} | BLEU4 = {score:.2f}")
    return reached


def report(trainer: Trainer, data: dict[str, Pairs], reached: dict[str, float]) -> str:
    """The figures of a run, as Markdown."""
    sizes = ", ".join(f"{len(pairs)} for {name}" for name, pairs in data.items())
    state, processes = trainer.state, idist.get_world_size()
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    rows = "\n".join(f"| {name} | {score:.2f} |" for name, score in reached.items())
    return f"""# What examples/translation.py reaches

This command wrote the page: `python {shlex.join(sys.argv)}`.

The example learns to write the first line of a function's docstring, on functions of Python's standard library. The model is
small and has few pairs: it shows the recipe, not how well it can be done. The last three rows of the table need no training.

- Pairs: {sizes}; no file is in two parts. Other versions of Python have other pairs.
- Trained for {state.num_steps} updates in {state.epoch} epochs, {state.metrics["wall"] / 60:.0f} minutes with validations.
- {versions}, {processes} process{"es" * (processes > 1)}, {os.cpu_count()} cores.

| lines for the test functions | BLEU (sacrebleu) |
|---|---|
{rows}
"""


def show(transformer: Transformer, pairs: Pairs, vocabulary: Vocabulary, settings: Settings) -> None:
    """Prints source, target and hypothesis of the first test functions, and the score of the last."""
    transformer.eval()
    for number, source, _ in pairs[: settings.samples]:
        sources = source[None].to(idist.device())
        lines, scores = beam_search(transformer, sources, beam=settings.beam, max_length=TARGET_TOKENS, lenpen=settings.lenpen)
        print(f"S-{number}\t{vocabulary.decode(source[:-1])}\nT-{number}\t{pairs.lines[number]}")
        print(f"H-{number}\t{scores.item() / math.log(2):.4f}\t{vocabulary.decode(lines[0])}")


def main(**options: Any) -> None:
    """Learn to write the first line of a function's docstring, on the functions of Python's standard library."""
    settings = Settings(**options)
    processes = number_of_processes(settings.nproc)
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", settings.update_freq):
        raise typer.BadParameter(f"--update-freq must be numbers with commas between them, got {settings.update_freq!r}")
    if settings.width % HEAD_WIDTH:
        raise typer.BadParameter(f"--width must be a multiple of {HEAD_WIDTH}, the width of a head; got {settings.width}")
    if any(int(number) % processes for number in settings.update_freq.split(",")):
        raise typer.BadParameter(f"--update-freq must be multiples of {processes}, the processes; got {settings.update_freq}")
    launch(train, processes, settings)


main.__signature__ = inspect.signature(Settings)  # typer takes the options of the command line from here

if __name__ == "__main__":
    typer.run(main)
