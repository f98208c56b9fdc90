"""examples/self_supervised.py against the formulas of what it is made of, on two ranks, killed, and as it is started."""

from __future__ import annotations

import copy
import importlib
import math
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn

from bits import bit_by_bit
from ignite_train import Trainer, TrainEvents
from processes import DEADLINE_SECONDS, forked
from ranks import run_ranks
from tiers import nightly

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = EXAMPLES.parent / "docs/self-supervised.md"
METHODS = ("swav", "dino", "byol")
WITH_PROTOTYPES = METHODS[:2]

pytestmark = [
    pytest.mark.skipif(not EXAMPLES.is_dir(), reason="looks at a checkout, which is not here"),
    pytest.mark.timeout(2 * DEADLINE_SECONDS),
]


def example(name: str = "self_supervised") -> Any:
    """A module of the example; the folder is in the path as when the script is started."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def crops() -> Any:
    return example("self_supervision.crops")


def prototypes() -> Any:
    return example("self_supervision.prototypes")


def settings(**changes: Any) -> Any:
    small = {"epochs": 1, "batch_size": 8, "prototypes": 6, "queue": 2, "queue_from": 0.25, "frozen": 2, "learning_rate": 1.0}
    return example().Settings(**{**small, "damaged": 0.2, **changes})


def built(method: str, count: int = 32, **changes: Any) -> Any:
    """A run over `count` images: a quarter as many updates of 8 to 8 images an epoch."""
    train_set, _ = crops().read_digits()
    return example().build(
        settings(method=method, **changes), crops().Digits(train_set.images[:count], train_set.classes[:count])
    )


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


# --- the formulas ---


def assignments_by_hand(scores: np.ndarray, epsilon: float, iterations: int) -> np.ndarray:
    """The algorithm of SwAV's listing, in float64: rows are prototypes, and constants are divided out."""
    q = np.exp(scores.astype(np.float64) / epsilon).T
    q = q / q.sum()
    num_prototypes, num_samples = q.shape
    for _ in range(iterations):
        q = q / q.sum(axis=1, keepdims=True) / num_prototypes
        q = q / q.sum(axis=0, keepdims=True) / num_samples
    return (q * num_samples).T


def unit_rows(*shape: int) -> Tensor:
    return nn.functional.normalize(torch.randn(*shape, generator=generator(), dtype=torch.float64), dim=-1)


def test_assignments_are_those_of_the_listing() -> None:
    """Of the rows that count, for each crop alone; what the others hold makes no difference."""
    scores = unit_rows(2, 9, 5)
    valid = torch.rand(2, 9, generator=generator()) > 0.3
    found = prototypes().sinkhorn(scores, valid)
    for crop in range(2):
        expected = assignments_by_hand(scores[crop][valid[crop]].numpy(), 0.05, 3)
        torch.testing.assert_close(found[crop][valid[crop]], torch.from_numpy(expected), rtol=1e-12, atol=1e-15)
    assert 0 < valid.sum() < valid.numel()
    assert found[~valid].abs().sum() == 0
    many = prototypes().sinkhorn(scores, valid, iterations=300)
    torch.testing.assert_close(many.sum(1), (valid.sum(1, keepdim=True) / 5).expand(2, 5).double(), rtol=1e-6, atol=0)


def test_no_row_at_all_is_assigned() -> None:
    """A micro-batch in which nothing counts makes no NaN."""
    nothing = prototypes().sinkhorn(unit_rows(2, 3, 5), torch.zeros(2, 3, dtype=torch.bool))
    assert nothing.tolist() == torch.zeros(2, 3, 5).tolist()


def loss_by_hand(scores: np.ndarray, targets: np.ndarray, temperature: float) -> float:
    """VISSL's order: the mean over the images, over the other crops, and over the crops that have targets."""
    num_crops, of_targets = len(scores), []
    for assigned, target in enumerate(targets):
        of_crops = []
        for predicting in range(num_crops):
            if predicting != assigned:
                logits = scores[predicting] / temperature
                log_shares = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
                of_crops.append(-(target * log_shares).sum(axis=1).mean())
        of_targets.append(sum(of_crops) / (num_crops - 1))
    return sum(of_targets) / len(targets)


def test_the_loss_is_that_of_vissl() -> None:
    """The sum over all pairs by their number is the mean of means, where all crops count."""
    scores, targets = unit_rows(6, 7, 5), unit_rows(2, 7, 5).softmax(2)
    loss, pairs = prototypes().swapped_loss(scores, targets, torch.ones(6, 7, dtype=torch.bool))
    assert pairs == 2 * 5 * 7
    assert float(loss / pairs) == pytest.approx(loss_by_hand(scores.numpy(), targets.numpy(), 0.1), rel=1e-12)


def test_the_loss_counts_pairs_of_valid_crops() -> None:
    """Pair by pair; a crop that does not count is in none of them."""
    scores, targets = unit_rows(4, 5, 3), unit_rows(2, 5, 3).softmax(2)
    valid = torch.rand(4, 5, generator=generator()) > 0.4
    loss, pairs = prototypes().swapped_loss(scores, targets, valid)
    log_shares = (scores / 0.1).log_softmax(2)
    counted = [(t, c, b) for t in range(2) for c in range(4) for b in range(5) if c != t and valid[t, b] and valid[c, b]]
    assert pairs == len(counted) < 2 * 3 * 5
    expected = -sum(float((targets[t, b] * log_shares[c, b]).sum()) for t, c, b in counted)
    assert float(loss) == pytest.approx(expected, rel=1e-12)


def test_the_loss_of_byol_is_its_formula() -> None:
    """Equation 2 of the paper, ||q / ||q|| - z / ||z|| ||^2, pair by pair in NumPy; crops that do not count are in none."""
    predictions, targets = (torch.randn(n, 5, 3, generator=generator(), dtype=torch.float64) for n in (4, 2))
    valid = torch.rand(4, 5, generator=generator()) > 0.4
    loss, pairs = example("self_supervision.prediction").prediction_loss(predictions, targets, valid)
    q, z = (rows.numpy() / np.linalg.norm(rows.numpy(), axis=2, keepdims=True) for rows in (predictions, targets))
    counted = [(t, c, b) for t in range(2) for c in range(4) for b in range(5) if c != t and valid[t, b] and valid[c, b]]
    assert pairs == len(counted) < 2 * 3 * 5
    assert float(loss) == pytest.approx(sum(((q[c, b] - z[t, b]) ** 2).sum() for t, c, b in counted), rel=1e-12)


@pytest.mark.slow
def test_byol_predicts_what_the_teacher_projects() -> None:
    """The first loss of a run: the student's predictions against the teacher's projections of the large crops, by hand."""
    run = built("byol", damaged=0.0)
    net, teacher = copy.deepcopy(run.net), copy.deepcopy(run.teacher)
    seen = recorded(run, lambda trainer: (trainer.state.batch[0], trainer.state.update_output.loss))
    run.trainer.run(run.loader, max_epochs=1)
    sample, loss = seen[0]
    rows = [(crop, image) for crop in range(6) for image in range(8) if sample.valid[image, crop]]
    large = torch.stack([sample.large[image, crop] for crop, image in rows if crop < 2])
    small = torch.stack([sample.small[image, crop - 2] for crop, image in rows if crop >= 2])
    predicted = zip(rows, nn.functional.normalize(net(large, small)[1], dim=1), strict=True)
    projected = [*zip(rows, nn.functional.normalize(teacher(large)[0], dim=1), strict=False)]  # rows of large crops come first
    pairs = [(p, z) for (c, i), p in predicted for (t, j), z in projected if i == j and c != t]
    assert loss == pytest.approx(sum((p - z).square().sum().item() for p, z in pairs) / len(pairs), rel=1e-5)
    assert not any(p.requires_grad for p in run.teacher.parameters())


def test_lars_is_its_formula() -> None:
    """A matrix moves by the trust ratio, also from zero; what has none as by SGD; a new rate acts on all momentum."""
    lars = example("self_supervision.lars").LARS
    starts = [torch.randn(3, 4, generator=generator(), dtype=torch.float64), torch.zeros(2, 2).double(), torch.ones(5).double()]
    found = [nn.Parameter(start.clone()) for start in starts]
    untouched = nn.Parameter(torch.ones(2, 2))
    groups = [{"params": [*found[:2], untouched]}, {"params": found[2:], "weight_decay": 0.1, "trust": None}]
    optimizer = lars(groups, 2.0, momentum=0.8, weight_decay=0.3, trust=0.01)
    weights, velocities = [start.numpy().copy() for start in starts], [0.0, 0.0, 0.0]
    for step, rate in enumerate((2.0, 2.0, 0.5)):
        for group in optimizer.param_groups:
            group["lr"] = rate
        gradients = [np.cos(np.arange(weight.size) + step).reshape(weight.shape) for weight in weights]
        for index, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            found[index].grad = torch.from_numpy(gradient.copy())
            decay, trust, length = (0.1 if index == 2 else 0.3), 1.0, np.linalg.norm(weight)
            if index < 2 and length > 0:
                trust = 0.01 * length / (np.linalg.norm(gradient) + decay * length)
            velocities[index] = 0.8 * velocities[index] + trust * (gradient + decay * weight)
            weights[index] = weight - rate * velocities[index]
        optimizer.step()
    for parameter, weight in zip(found, weights, strict=True):
        torch.testing.assert_close(parameter.detach(), torch.from_numpy(weight), rtol=1e-12, atol=1e-14)
    assert untouched.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_features_are_standardised_as_by_batch_norm() -> None:
    """And so are their gradients; without rows nothing is NaN."""
    rows = torch.randn(7, 4, generator=generator(), dtype=torch.float64, requires_grad=True)
    expected = nn.functional.batch_norm(rows, None, None, training=True)
    found = prototypes().Standardised()(rows)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    gradients = [torch.autograd.grad(value.sin().sum(), rows)[0] for value in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-11)
    assert prototypes().Standardised()(torch.zeros(0, 4)).shape == (0, 4)


# --- the samples ---


def micro_batch(count: int = 16, damaged: float = 0.25) -> Any:
    torch.manual_seed(5)
    train_set, _ = crops().read_digits()
    images = crops().Crops(train_set.images[:count], damaged)
    return torch.utils.data.default_collate([images[index] for index in range(count)])


@pytest.mark.slow
def test_what_a_crop_that_does_not_count_shows_makes_no_difference() -> None:
    """The crops of damaged images are NaN, some others show too little: all other pixels in their places give the same bits."""
    sample = micro_batch()
    valid = sample.valid
    assert not valid[::4].any()
    assert 0 < (~valid.view(4, 4, 6)[:, 1:]).sum() < 24
    for method in METHODS:
        ends = []
        for stand_in in (None, 0.0, 1e30):
            parts = [part.clone() for part in (sample.large, sample.small)]
            for part, counted in zip(parts, (valid[:, :2], valid[:, 2:]), strict=True):
                assert stand_in is None or bool(part[~counted].isnan().any())
                part[~counted] = part[~counted] if stand_in is None else stand_in
            run = built(method, frozen=0)
            state = run.trainer.run([crops().Sample(*parts, valid, sample.index)], max_epochs=1)
            ends.append([repr(state.update_output), bit_by_bit(run.net.state_dict()), bit_by_bit(dict(state.carried))])
        assert ends[0] == ends[1] == ends[2]


@pytest.mark.slow
def test_a_micro_batch_in_which_nothing_counts_is_a_skip() -> None:
    """With all methods the update is skipped for the reason "no_samples", and nothing is NaN."""
    sample = micro_batch(4)
    for method in METHODS:
        run = built(method)
        before = bit_by_bit(run.net.state_dict())
        state = run.trainer.run([sample._replace(valid=torch.zeros_like(sample.valid))], max_epochs=1)
        assert state.update_output.skipped_reason == "no_samples"
        assert bit_by_bit(run.net.state_dict()) == before


# --- a run ---


def recorded(run: Any, look: Any, event: Any = Events.ITERATION_COMPLETED) -> list[Any]:
    """What `look(trainer)` gives in each update."""
    seen: list[Any] = []
    run.trainer.add_event_handler(event, lambda trainer: seen.append(look(trainer)))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("method", WITH_PROTOTYPES)
def test_prototypes_have_length_1_and_are_frozen_at_first(method: str) -> None:
    """After each update; they move from the third on."""
    run = built(method, frozen=2)
    before = run.net.prototypes.weight.detach().clone()
    seen = recorded(run, lambda _: run.net.prototypes.weight.detach().clone())
    run.trainer.run(run.loader, max_epochs=1)
    assert len(seen) == 4
    for weight in (before, *seen):
        torch.testing.assert_close(weight.norm(dim=1), torch.ones(6), rtol=0, atol=1e-6)
    moved = [float((weight - before).abs().max()) for weight in seen]
    assert max(moved[:2]) < 1e-6 < 1e-4 < moved[2] < moved[3]


@pytest.mark.slow
def test_the_rate_is_a_function_of_where() -> None:
    """VISSL's `where` is the part of the run that is done: 0, 1/8, ... here, across epochs."""
    run, of = built("swav", learning_rate=0.5), example()
    used = recorded(run, lambda trainer: trainer.state.update_output.learning_rates)
    run.trainer.run(run.loader, max_epochs=2)
    assert used == [(0.5 * of.rate(index / 8), 0.5 * of.rate(index / 8) / 50) for index in range(8)]
    assert of.rate(0.0) == pytest.approx(0.05)
    assert of.rate(0.5) == pytest.approx(0.5)
    assert of.rate(1.0) == pytest.approx(0.0)


@pytest.mark.slow
def test_the_teacher_follows_by_its_momentum() -> None:
    """It is m · teacher + (1 - m) · student after each step, with m = 1 - (1 - 0.95) (1 + cos(pi where)) / 2."""
    run = built("dino", frozen=0)
    expected = {name: value.double() for name, value in copy.deepcopy(run.teacher).named_parameters()}
    students = recorded(run, lambda _: {name: value.detach().double() for name, value in run.net.named_parameters()})
    run.trainer.run(run.loader, max_epochs=1)
    for index, student in enumerate(students):
        momentum = 1 - (1 - 0.95) * (1 + math.cos(math.pi * index / 4)) / 2
        expected = {name: momentum * value + (1 - momentum) * student[name] for name, value in expected.items()}
    for name, value in run.teacher.named_parameters():
        torch.testing.assert_close(value.detach().double(), expected[name], rtol=1e-5, atol=1e-6)
    assert not torch.equal(run.teacher.prototypes.weight, run.net.prototypes.weight)


@pytest.mark.slow
def test_the_queue_holds_the_latest_updates() -> None:
    """Newest first, at most two; the projections of large crops, without those that do not count; in the checkpoint."""
    run = built("swav")
    lengths = recorded(run, lambda trainer: len(trainer.state.carried["queue"]))
    seen = recorded(run, lambda trainer: trainer.state.carried["queue"][0][0])
    run.trainer.run(run.loader, max_epochs=1)
    queue = run.trainer.state.carried["queue"]
    assert lengths == [1, 2, 2, 2]
    assert [torch.equal(rows, newest) for (rows, _), newest in zip(queue, (seen[3], seen[2]), strict=True)] == [True, True]
    for rows, valid in queue:
        assert rows.shape == (2, 8, 32)
        torch.testing.assert_close(rows.norm(dim=2), valid.float(), rtol=0, atol=1e-6)
    assert "queue" in run.trainer.state_dict()["carried"]["values"]


@pytest.mark.slow
def test_handlers_see_what_hooks_of_vissl_see() -> None:
    """Input, target, output and loss of the micro-batch that is running, in the order of VISSL's step."""
    run, of, seen = built("swav", damaged=0.0), example(), []
    vissl = {
        "on_phase_start": Events.EPOCH_STARTED,
        "on_loss_and_meter": TrainEvents.FORWARD_COMPLETED,
        "on_backward": TrainEvents.BACKWARD_COMPLETED,
        "on_update": TrainEvents.STEP_COMPLETED,
        "on_step": Events.ITERATION_COMPLETED,
        "on_phase_end": Events.EPOCH_COMPLETED,
    }
    for name, event in vissl.items():
        run.trainer.add_event_handler(event, lambda _, name=name: seen.append(name))

    @run.trainer.on(TrainEvents.FORWARD_COMPLETED | TrainEvents.BACKWARD_COMPLETED)
    def look(trainer: Trainer) -> None:
        batch = of.last_batch(trainer.state)
        assert batch.sample.large.shape == (8, 2, 1, 10, 10)
        assert batch.model_output.shape == (6, 8, 6)
        valid = batch.sample.valid.T
        torch.testing.assert_close(batch.target.sum(2)[valid[:2]], torch.ones(int(valid[:2].sum())).double())
        loss, pairs = prototypes().swapped_loss(batch.model_output, batch.target, valid)
        assert batch.loss == pytest.approx(float(loss.detach() / pairs), rel=1e-6)

    run.trainer.run(run.loader, max_epochs=1)
    assert seen == [*list(vissl)[:1], *list(vissl)[1:5] * 4, "on_phase_end"]


@pytest.mark.slow
def test_times_have_the_names_of_vissl() -> None:
    """The parts are those of the step, and none is counted twice."""
    run = built("swav")
    example().PrototypesInUse(run.timer).attach(run.trainer)
    run.trainer.run(run.loader, max_epochs=1)
    stats = example().perf_stats(run.timer)
    total = stats.pop("train_step_total")
    parts = ["read_sample", "forward", "loss_compute", "loss_all_reduce", "meters_update", "backward", "optimizer_step"]
    assert list(stats) == parts
    assert min(stats.values()) > 0
    assert sum(stats.values()) <= total * (1 + 1e-9)
    assert 0 < run.trainer.state.metrics["prototypes_in_use"] <= 6


# --- two ranks, and kills ---


def on_ranks(method: str) -> tuple[list[float], Tensor, Tensor]:
    """Losses, parameters and what the queue or the centre holds, in float64."""
    torch.set_default_dtype(torch.float64)
    run = built(method, frozen=1)
    losses = recorded(run, lambda trainer: trainer.state.update_output.loss)
    state = run.trainer.run(run.loader, max_epochs=2)
    kept = [rows for rows, _ in state.carried.get("queue", [])]
    carried = torch.cat(kept, dim=1) if kept else state.carried.get("centre", torch.zeros(0))
    nets = [run.net] if run.teacher is None else [run.net, run.teacher]
    parameters = torch.cat([nn.utils.parameters_to_vector(net.parameters()) for net in nets]).detach()
    return losses, parameters, carried


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_make_the_updates_of_one(method: str) -> None:
    """Assignments, queue and centre are those of all images, though each rank has other crops that do not count."""
    alone = run_ranks(on_ranks, method, world_size=1)[0]
    first, second = run_ranks(on_ranks, method)
    for losses, parameters, _ in (first, second):
        assert losses == pytest.approx(alone[0], rel=1e-9)
        torch.testing.assert_close(parameters, alone[1], rtol=1e-8, atol=1e-10)
    assert len(alone[0]) == 8
    if method != "swav":
        torch.testing.assert_close(first[2], alone[2], rtol=1e-8, atol=1e-10)
    else:  # each rank holds its half of each batch: together they hold the same rows
        together = torch.cat([first[2], second[2]], dim=1)
        torch.testing.assert_close(together.sum(1), alone[2].sum(1), rtol=1e-8, atol=1e-10)
        assert together.shape == alone[2].shape


def kill_this_process(directory: Path) -> None:
    """Once the checkpoint of update 6, which a thread writes, is there."""
    until = time.monotonic() + DEADLINE_SECONDS
    while not (directory / "update-00000006").exists() and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def whole_run(method: str, directory: str, killed_after: int | None, ended: str) -> None:
    """What `train` of the example does before it reports, with 5 updates in each of 3 epochs."""
    torch.set_num_threads(1)
    of = example()
    chosen = settings(method=method, epochs=3, log_dir=Path(directory), save_every=3)
    train_set, _ = crops().read_digits()
    run = of.build(chosen, crops().Digits(train_set.images[:40], train_set.classes[:40]))
    of.watch(run, chosen)
    begun = recorded(run, lambda trainer: trainer.state.iteration)
    if killed_after is not None:
        run.trainer.append_event_handler(
            Events.ITERATION_COMPLETED(once=killed_after), partial(kill_this_process, chosen.log_dir)
        )
    state = run.trainer.run(run.loader, max_epochs=chosen.epochs)
    values = {"net": run.net.state_dict(), "carried": dict(state.carried), "loss": state.update_output.loss}
    values["teacher"] = {} if run.teacher is None else run.teacher.state_dict()
    values["optimizer"], values["metric"] = run.optimizer.state_dict(), state.metrics["prototypes_in_use"]
    torch.save([begun, values], ended)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["swav", nightly("dino")])
def test_killed_and_resumed_it_ends_with_the_same_bits(method: str, tmp_path: Path) -> None:
    """By SIGKILL in the second epoch: it continues in the middle of it, after update 6, whose checkpoint was the last."""
    lives = [("straight", None), ("killed", 8), ("killed", None)]
    codes = []
    for number, (name, killed_after) in enumerate(lives):
        job = (method, str(tmp_path / name), killed_after, str(tmp_path / f"{number}.pt"))
        process = forked.Process(target=whole_run, args=job, daemon=True)
        process.start()
        process.join(DEADLINE_SECONDS)
        process.kill()
        codes.append(process.exitcode)
    straight, resumed = (torch.load(tmp_path / f"{number}.pt") for number in (0, 2))
    assert codes == [0, -signal.SIGKILL, 0]
    assert (straight[0], resumed[0]) == ([*range(1, 16)], [*range(7, 16)])
    assert bit_by_bit(resumed[1]) == bit_by_bit(straight[1])


# --- as it is started ---


def started(*arguments: str, timeout_seconds: float = DEADLINE_SECONDS) -> str:
    """What the example prints; it must succeed in time."""
    command = [sys.executable, str(EXAMPLES / "self_supervised.py"), *arguments]
    environment = os.environ | {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def accuracies(printed: str) -> list[float]:
    found = re.findall(r"^(?:pixels|untrained features|features of \w+) +([\d.]+)%$", printed, re.MULTILINE)
    return [float(number) for number in found]


@pytest.mark.nightly
def test_it_runs_as_it_is_started(tmp_path: Path) -> None:
    """Two processes train, one reports: times by VISSL's names, and three accuracies."""
    few = ("--epochs", "1", "--max-images", "256", "--batch-size", "64")
    printed = started("--method", "dino", "--nproc", "2", *few, "--log-dir", str(tmp_path))
    assert len(accuracies(printed)) == 3
    assert printed.count("train_step_total") == 1
    assert "finished after 4 updates" in printed


@pytest.mark.nightly
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("method", METHODS)
def test_features_beat_pixels(method: str, tmp_path: Path) -> None:
    """The whole run: a linear classifier of the features is better by 5 points than that of the pixels, and than untrained."""
    pixels, untrained, trained = accuracies(started("--method", method, "--log-dir", str(tmp_path), timeout_seconds=1800.0))
    assert trained >= pixels + 5
    assert trained > untrained


# --- the page ---


@pytest.mark.skipif(not PAGE.is_file(), reason="looks at a checkout, which is not here")
def test_the_page_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All blocks, one after the other, print what stands beside each `print` or below it."""
    monkeypatch.chdir(tmp_path)
    code = "".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL))
    promised = re.findall(r"^print\(.*\)(?:  |\n)# (.*)$", code, flags=re.MULTILINE)
    exec(compile(code, str(PAGE), "exec"), {"__name__": "page"})  # noqa: S102
    assert capsys.readouterr().out.splitlines() == promised
    assert len(promised) == 3
