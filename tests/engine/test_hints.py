"""What a run says that would make it quicker: at its end from what it has measured, and at its start of the optimizer."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from ignite_train import ResumableLoader, ShardedSampler, create_trainer
from ignite_train.engine.introduction import introduction, precision_of
from ignite_train.engine.sections import SECTIONS
from ignite_train.handlers import ProgressLog, TrainingMetrics, training_metrics
from ignite_train.state import TrainState

CPU, CARD = torch.device("cpu"), torch.device("cuda")
DATASET = TensorDataset(torch.zeros(8, 2))


def seconds(**given: float) -> dict[str, float]:
    """What each section took."""
    return dict.fromkeys(SECTIONS, 0.0) | given


def told(loader: Any = None, device: torch.device = CPU, precision: str = "fp32", epochs: int = 3, **given: float) -> list[str]:
    """The hints of a run that took this long."""
    return [*training_metrics._hints(seconds(**given), loader, device, precision, epochs=epochs)]


def test_a_run_that_waits_for_its_loader():
    """The first thing that helps is named; where the loader is quick enough, or the run is short, nothing is."""
    plain = DataLoader(DATASET)
    assert told(plain, data=30, forward=70) == [
        "the loader was waited for 30% of the time; try DataLoader(..., num_workers=2) or more"
    ]
    (again,) = told(DataLoader(DATASET, num_workers=1), data=30, forward=70)
    assert "persistent_workers=True" in again
    for loader, epochs in (
        (DataLoader(DATASET, num_workers=1, persistent_workers=True), 3),
        (DataLoader(DATASET, num_workers=1), 1),
    ):
        assert told(loader, epochs=epochs, data=30, forward=70) == [
            "the loader was waited for 30% of the time; try more than num_workers=1"
        ]
    assert told(plain, data=9, forward=91) == told(plain, data=3, forward=7) == told([1, 2], data=30, forward=70) == []


def test_hints_for_a_card(monkeypatch):
    """Pinned memory and bf16, and three lines at most; nothing of it on the CPU."""
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: True)
    lines = told(DataLoader(DATASET), CARD, data=20, forward=40, backward=40)
    assert [any(word in line for line in lines) for word in ("num_workers", "pin_memory=True", "precision='bf16'")] == [
        True
    ] * 3
    assert len(lines) == 3
    assert told(None, CARD, "bf16", forward=100) == told(None, CARD, forward=40, evaluation=60) == []
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: False)
    assert told(None, CARD, forward=100) == []


@pytest.mark.parametrize(
    ("kind", "settings", "parameters", "says"),
    [
        (torch.optim.AdamW, {}, 10_000_000, True),
        (torch.optim.Adam, {"foreach": True}, 10_000_000, True),
        (torch.optim.AdamW, {"fused": True}, 10_000_000, False),
        (torch.optim.AdamW, {}, 9_999_999, False),
        (torch.optim.SGD, {}, 10_000_000, False),
        (type("Own", (torch.optim.AdamW,), {}), {}, 10_000_000, False),
    ],
)
def test_the_introduction_names_an_adam_that_is_not_fused(kind, settings, parameters, says):
    """By the number of its parameters alone."""
    model = torch.nn.ParameterList([torch.empty(parameters)])
    lines = introduction(model, [kind(model.parameters(), lr=0.1, **settings)], {}, TrainState(), updates=None, data_ranks=1)
    assert ("fused=True" in lines[-1]) == says
    assert len(lines) == 2 + says
    assert all(len(line) <= 100 for line in lines)


@pytest.mark.parametrize(
    ("ranks", "loader", "says"),
    [
        (2, DataLoader(DATASET, 4, shuffle=True), True),
        (2, DataLoader(DATASET, batch_sampler=BatchSampler(SequentialSampler(DATASET), 4, drop_last=True)), True),
        (1, DataLoader(DATASET, 4, shuffle=True), False),
        (2, ResumableLoader(DATASET, 4, shuffle=True), False),
        (2, DataLoader(DATASET, 4, sampler=ShardedSampler(DATASET, shuffle=True)), False),
        (2, DataLoader(DATASET, 4, sampler=DistributedSampler(DATASET, 2, 0)), False),
        (2, DataLoader(DATASET, batch_sampler=BatchSampler(DistributedSampler(DATASET, 2, 0), 4, drop_last=True)), False),
        (2, DataLoader(DATASET, batch_size=None), False),
        (2, DataLoader(DATASET, 4, sampler=RandomSampler(DATASET, num_samples=4)), False),
        (2, [1, 2], False),
    ],
)
def test_the_introduction_names_a_loader_that_gives_each_rank_all_samples(ranks, loader, says):
    """The epochs of newcomers were as many passes as there were ranks, and nothing said so."""
    model, state = torch.nn.Linear(2, 1), TrainState()
    state.dataloader = loader
    lines = introduction(model, [torch.optim.SGD(model.parameters())], {}, state, updates=None, data_ranks=ranks)
    assert (
        lines[2:]
        == [f"each of {ranks} ranks reads all of its DataLoader; unless that is its share, use a ResumableLoader"] * says
    )


@pytest.mark.parametrize(
    ("dtypes", "precision", "says"),
    [
        ([torch.float32], "fp32", "fp32"),
        ([torch.float32], "bf16", "bf16"),
        ([torch.bfloat16], "fp32", "bfloat16"),
        ([torch.float64, torch.float64], "fp32", "float64"),
        ([torch.float32, torch.bfloat16], "fp32", "bfloat16 and float32"),
        ([torch.float64], "bf16", "bf16 with parameters in float64"),
        ([torch.float32, torch.int8], "fp32", "fp32"),
        ([torch.complex64], "fp32", "complex64"),
    ],
)
def test_the_introduction_and_the_hints_know_the_dtype_of_the_parameters(dtypes, precision, says, monkeypatch):
    """Only a model in float32 without autocast is told that the card has bf16."""
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: True)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2, dtype=dtype), dtype != torch.int8) for dtype in dtypes])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lines = introduction(model, [optimizer], {"precision": precision}, TrainState(), updates=None, data_ranks=1)
    assert lines[0].endswith(f", on cpu in {says}, SGD")
    assert precision_of(model, {"precision": precision}) == says
    assert bool(told(None, CARD, says, forward=100)) == (says == "fp32")


@pytest.mark.parametrize("number", [1, 2])
def test_the_table_at_the_end_has_them(number, monkeypatch, capsys):
    """In a run that takes long enough, with `TrainingMetrics` and `ProgressLog`; once, whatever the number of the former."""
    monkeypatch.setattr("ignite_train.handlers.training_metrics._SHORT_RUN", 0.0)

    class Slow(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.01)
            return super().__getitem__(index)

    model = torch.nn.Linear(2, 1)
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, batch: m(batch[0]).square().mean())
    for _ in range(number):
        TrainingMetrics().attach(trainer)
    ProgressLog("simple").attach(trainer, Events.EPOCH_COMPLETED)
    trainer.run(DataLoader(Slow(torch.zeros(8, 2)), batch_size=8), max_epochs=1)
    written = capsys.readouterr().out
    (line,) = [line for line in written.splitlines() if line.startswith("  hint")]
    assert "num_workers=2" in line
    assert [len(re.findall(text, written)) for text in ("the loader was waited for", r"data \d")] == [1, 1]


def test_the_table_has_three_hints_at_most(monkeypatch, capsys):
    """Also where several handlers have some, each with its own numbers."""
    texts = iter(range(100))
    monkeypatch.setattr(training_metrics, "_hints", lambda *_, **__: [f"hint number {next(texts)}" for _ in range(3)])
    model = torch.nn.Linear(2, 1)
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).square().mean())
    for _ in range(2):
        TrainingMetrics().attach(trainer)
    ProgressLog("simple").attach(trainer, Events.EPOCH_COMPLETED)
    trainer.run([torch.zeros(8, 2)], max_epochs=1)
    assert capsys.readouterr().out.count("hint number") == 3
