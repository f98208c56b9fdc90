"""The code of docs/programs.md runs as it is printed, and does what the page says of it."""

from __future__ import annotations

import ast
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from ignite_train import ForwardOutput, Trainer, UpdateOptions, create_evaluator, create_trainer
from ignite_train.handlers import Checkpoint, EarlyStopping, SeveralGradients, Validation
from processes import DEADLINE_SECONDS, Processes, forked
from ranks import run_ranks

PROGRAMS = Path(__file__).parents[2] / "docs/programs.md"
CUTS = ([48], [20, 28], [1, 40, 0, 7])  # micro-batches of 48 samples
UPDATES = 5

pytestmark = pytest.mark.skipif(not PROGRAMS.is_file(), reason="looks at a checkout, which is not here")


def code_of(text: str) -> str:
    return "".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))


@pytest.mark.slow
def test_the_page_on_programs_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All blocks, one after the other, print what stands beside each `print`, and nothing else; each section prints."""
    monkeypatch.chdir(tmp_path)
    text = PROGRAMS.read_text(encoding="utf-8")
    code = code_of(text)
    promised = re.findall(r"^ *print\(.*\)  # (.*)$", code, flags=re.MULTILINE)
    exec(compile(code, str(PROGRAMS), "exec"), {"__name__": "page"})  # noqa: S102

    assert capsys.readouterr().out.splitlines() == promised
    assert all("  # " in section and "print(" in section for section in text.split("\n## ")[1:])


# --- what single pieces of the page do ---


def definitions(section: str, old: str = "", new: str = "") -> dict[str, Any]:
    """What the page imports and defines up to the end of a section, in which one line may be another."""
    before, _, after = PROGRAMS.read_text(encoding="utf-8").partition(f"\n## {section}\n")
    code = code_of(before + after.partition("\n## ")[0])
    assert old in code
    tree = ast.parse(code.replace(old, new) if old else code)
    kinds = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)
    tree.body = [one for one in tree.body if isinstance(one, kinds) and not getattr(one, "decorator_list", None)]
    names: dict[str, Any] = {"__name__": "page", "os": os, "signal": signal}
    exec(compile(tree, str(PROGRAMS), "exec"), names)  # noqa: S102
    return names


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(48, size, generator=generator, dtype=torch.float64) for size in (4, 1))  # type: ignore[return-value]


def cut(sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(*(part.split(list(sizes)) for part in samples()), strict=True))


def squared_error(model: nn.Module, micro_batch: tuple[Tensor, Tensor]) -> ForwardOutput:
    x, y = micro_batch
    return ForwardOutput((model(x) - y).square().sum(), sample_size=len(x))


def vector(model: nn.Module) -> list[float]:
    found: list[float] = parameters_to_vector(model.parameters()).tolist()
    return found


def loop_of_the_page(trainer: Trainer) -> None:
    """The loop of the section "A loop of your own", with a trainer of the test."""
    section = PROGRAMS.read_text(encoding="utf-8").partition("\n## A loop of your own\n")[2]
    code = code_of(section).partition("with trainer.session()")
    exec("".join(code[1:]).partition("\n\n")[0], {"trainer": trainer, "data": cut([8] * 6)})  # noqa: S102


@pytest.mark.parametrize("stop", ["terminate", "interrupt"])
def test_the_loop_of_the_page_ends_after_a_request_to_stop(stop: str) -> None:
    """Whichever of the two was asked for; the loop has three updates."""
    model = nn.Linear(4, 1).double()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), squared_error)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), getattr(trainer, stop))
    loop_of_the_page(trainer)
    assert trainer.state.iteration == 2


def test_the_loop_of_the_page_does_nothing_where_the_job_has_ended(tmp_path: Path) -> None:
    """`EarlyStopping` has ended it, and the same command is started again; as `run` does."""
    found = []
    for _ in range(2):
        model = nn.Linear(4, 1).double()
        trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), squared_error)
        evaluator = create_evaluator(model, squared_error)
        EarlyStopping(evaluator, target=1e9).attach(trainer)
        Validation(evaluator, cut([48])).attach(trainer, Events.ITERATION_COMPLETED(every=2))
        Checkpoint(tmp_path, every=1).attach(trainer)
        loop_of_the_page(trainer)
        found.append((trainer.state.iteration, vector(model)))
    assert found[0] == found[1]
    assert found[0][0] == 2


@pytest.mark.slow
def test_the_mixture_of_cagrad_is_the_best_of_all_mixtures() -> None:
    """Of ten thousand that are tried, for gradients of two tasks, which agree or conflict."""
    combine = definitions("Several gradients of one update")["avoid_conflicts"]
    shares = torch.linspace(0, 1, 10_001, dtype=torch.float64)[:, None]
    between = 0
    for seed in range(20):
        one, other = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        mean, mixtures = (one + other) / 2, shares * one + (1 - shares) * other
        objective = mixtures @ mean + 0.5 * mean.norm() * mixtures.norm(dim=1)
        best = mixtures[place := int(objective.argmin())]
        expected = mean + 0.5 * mean.norm() * best / best.norm()
        torch.testing.assert_close(combine({"one": one, "other": other}), expected, rtol=2e-3, atol=2e-3)
        between += 0 < place < 10_000
    assert 5 < between < 20


def gradnorm(shards: Sequence[Sequence[int]]) -> list[float]:
    """What the GradNorm of the page comes to: parameters, and the weights of the tasks."""
    page, rank = definitions("Several gradients of one update"), idist.get_rank()
    page["norm"] = norm = page["GradNorm"](["near", "small"])
    model = page["make_model"]().double()
    sizes = [size for shard in shards for size in shard]
    start = sum(map(len, shards[:rank]))
    options = UpdateOptions(sample_sizes=lambda group: {"near": len(group[0]), "small": len(group[0])}, reduction="explicit")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = create_trainer(model, optimizer, page["weighed"], options=options, protect=False)
    SeveralGradients(lambda gradients: norm.balance(gradients, trainer.state.update_output.losses), parameters=model[0]).attach(
        trainer
    )
    with trainer.session():
        for _ in range(UPDATES):
            trainer.update(cut(sizes)[start : start + len(shards[rank])])
    return [*vector(model), norm.weights["near"], norm.weights["small"]]


def gradnorm_by_hand() -> list[float]:
    """On all samples at once: the weights follow the slope that torch finds of the sum of |norm - wanted|."""
    model, (x, y) = definitions("A loop of your own")["make_model"]().double(), samples()
    optimizer, shared = torch.optim.SGD(model.parameters(), lr=0.05), [*model[0].parameters()]
    weights, first = torch.ones(2, dtype=torch.float64), None
    for _ in range(UPDATES):
        weights.requires_grad_()
        found = model(x)
        losses = torch.stack([(found - y).square().sum() / 48, (found + y).abs().sum() / 48])
        lengths = [parameters_to_vector(torch.autograd.grad(loss, shared, retain_graph=True)).norm() for loss in losses]
        norms = weights * torch.stack(lengths)
        first = losses.detach() if first is None else first
        left = losses.detach() / first
        wanted = norms.detach().mean() * (left / left.mean()) ** 1.5
        (slope,) = torch.autograd.grad((norms - wanted).abs().sum(), weights)
        optimizer.zero_grad()
        (weights.detach() * losses).sum().backward()
        optimizer.step()
        weights = weights.detach() - 0.025 * slope
        weights = 2 * weights / weights.sum()
    return [*vector(model), *weights.tolist()]


def test_gradnorm_is_the_loop_by_hand() -> None:
    """However the samples are cut; the weights of the tasks move apart."""
    expected = gradnorm_by_hand()
    assert abs(expected[-1] - expected[-2]) > 1e-3
    for sizes in CUTS:
        assert gradnorm([sizes]) == pytest.approx(expected, rel=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [[[20, 28], []], [[1, 3], [40], [0, 4]]], ids=str)
def test_gradnorm_on_ranks_is_the_loop_by_hand(shards: list[list[int]]) -> None:
    for found in run_ranks(gradnorm, shards, world_size=len(shards)):
        assert found == pytest.approx(gradnorm_by_hand(), rel=1e-11)


def sophia(sizes: Sequence[int]) -> list[float]:
    page = definitions("Another forward for one update")
    model = page["make_model"]().double()
    optimizer = page["Sophia"](model.parameters(), 0.01, lambda: trainer.state.update_output)
    trainer = create_trainer(model, optimizer, page["forward"])
    torch.manual_seed(0)
    with trainer.session():
        for _ in range(UPDATES):
            trainer.update(cut(sizes), forward=page["drawn"], name="curvature")
            trainer.update(cut(sizes))
    return vector(model)


def sophia_by_hand(sizes: Sequence[int]) -> list[float]:
    """On all samples at once, with lists of moments; the numbers are drawn one micro-batch after the other."""
    model, (x, y) = definitions("A loop of your own")["make_model"]().double(), samples()
    parameters = [*model.parameters()]
    momenta, curvatures = ([torch.zeros_like(one) for one in parameters] for _ in range(2))
    torch.manual_seed(0)
    for _ in range(UPDATES):
        found = model(x)
        noise = torch.cat([torch.randn(size, 1, dtype=torch.float64) for size in sizes])
        loss = 0.5 * (found - found.detach() - noise).square().sum() / 48
        gradients = torch.autograd.grad(loss, parameters)
        curvatures = [0.99 * old + 0.01 * 48 * new**2 for old, new in zip(curvatures, gradients, strict=True)]
        gradients = torch.autograd.grad((model(x) - y).square().sum() / 48, parameters)
        momenta = [0.96 * old + 0.04 * new for old, new in zip(momenta, gradients, strict=True)]
        with torch.no_grad():
            for one, momentum, curvature in zip(parameters, momenta, curvatures, strict=True):
                one -= 0.01 * torch.clamp(momentum / torch.clamp(0.05 * curvature, min=1e-12), -1, 1)
    return vector(model)


@pytest.mark.parametrize("sizes", CUTS, ids=str)
def test_sophia_is_the_loop_by_hand(sizes: list[int]) -> None:
    """Its estimate is an update with a forward and a name of its own."""
    assert sophia(sizes) == pytest.approx(sophia_by_hand(sizes), rel=1e-9)


@pytest.mark.parametrize("sizes", CUTS[:2], ids=str)
def test_the_noise_scale_is_that_of_single_samples(sizes: list[int]) -> None:
    """The trace of their covariance by the squared mean, both without bias."""
    page = definitions("Several gradients of one update")
    model, (x, y) = page["make_model"]().double(), samples()
    singles = torch.stack(
        [
            parameters_to_vector(torch.autograd.grad((model(one) - target).square().sum(), [*model.parameters()]))
            for one, target in zip(x, y, strict=True)
        ]
    )
    trace = singles.T.cov().trace()
    expected = trace / (singles.mean(0).square().sum() - trace / 48)
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), page["measured"], accumulation_steps=9)
    assert page["noise_scale"](trainer.run(cut(sizes)).update_output) == pytest.approx(float(expected), rel=1e-10)


def rounds(directory: Path, killed_at: int | None = None, style: str = "none") -> Any:
    """A process of the page's loop in rounds, which the system ends in the middle of a round where the page has Ctrl-C."""
    page = definitions("Rounds", "raise KeyboardInterrupt", "os.kill(os.getpid(), signal.SIGKILL)")
    torch.manual_seed(3)
    return page["train"](directory, killed_at, style)


@pytest.mark.slow
@pytest.mark.parametrize("places", [(6, 11), (9, 15), (13, 14)], ids=str)
def test_rounds_that_are_killed_twice_end_bitwise_the_same(
    places: tuple[int, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Critic, actor, target and the loop's own counter; one line of the console tells of both trainers."""
    expected = rounds(tmp_path / "whole")
    for killed_at in places:
        process = forked.Process(target=rounds, args=(tmp_path / "killed", killed_at))
        with Processes([process], []):
            process.join(DEADLINE_SECONDS)
            assert process.exitcode == -signal.SIGKILL
    assert [*(tmp_path / "killed").glob("update-*")]

    assert rounds(tmp_path / "killed", style="simple") == expected
    assert re.search(r"\bloss \S+.* actor/loss ", capsys.readouterr().out)
