"""SeveralGradients: the gradient of each term of the loss by itself, and an update along what a function makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import cuts
from ignite_train import ForwardContractError, ForwardOutput, Trainer, TrainEvents, UpdateOptions, create_trainer
from ignite_train.handlers import SeveralGradients, TrainingMetrics
from meshes import on_cpu
from ranks import run_ranks

NUM_UPDATES = 4
MAX_NORM = 0.4
CUTS = ([64], [32, 32], [1, 63], [5, 0, 40, 19], [16] * 4)


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.ModuleDict({"body": nn.Linear(3, 5), "up": nn.Linear(5, 1), "down": nn.Linear(5, 1)}).double()


class Heads(nn.Module):
    """A body with two heads, which `DistributedDataParallel` can wrap."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = network()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        body = self.parts["body"](x).tanh()  # type: ignore[index]
        return self.parts["up"](body).squeeze(-1), self.parts["down"](body).squeeze(-1)  # type: ignore[index]


def terms_of(model: nn.Module, sample: cuts.Sample) -> dict[str, tuple[Tensor, Tensor]]:
    """Two tasks that pull against one another: targets with a weight each, and their opposites where they are positive."""
    x, y, weight = sample
    up, down = model(x)
    return {
        "up": ((weight * (up - y).square()).sum(), weight.sum()),
        "down": (((down + up + 2 * y).square() * (y > 0)).sum(), (y > 0).sum()),
    }


def forward(model: nn.Module, sample: cuts.Sample) -> ForwardOutput:
    return ForwardOutput(terms_of(model, sample))


def sizes(sample: cuts.Sample) -> dict[str, float]:
    _, y, weight = sample
    return {"up": float(weight.sum()), "down": float((y > 0).sum())}


def project(gradients: Mapping[str, Tensor]) -> Tensor:
    """PCGrad (arXiv:2001.06782, algorithm 1) for two tasks."""
    one, other = gradients.values()
    product = one.dot(other)
    if product >= 0:
        return one + other
    return one - product / other.square().sum() * other + other - product / one.square().sum() * one


def weigh(gradients: Mapping[str, Tensor]) -> Tensor:
    """Each of length 1, whose sum is not the gradient of any loss."""
    return torch.stack([gradient / gradient.norm() for gradient in gradients.values()]).sum(0)


Build = Callable[[Mapping[str, Tensor]], Tensor]


def by_hand(combine: Build, chosen: Callable[[nn.Module], nn.Module] = lambda model: model) -> list[float]:
    """Updates on all samples at once, with torch alone."""
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    parameters = [*chosen(model).parameters()]
    for _ in range(NUM_UPDATES):
        means = {name: total / size for name, (total, size) in sorted(terms_of(model, cuts.samples()).items())}
        taken = {
            name: torch.autograd.grad(mean, parameters, retain_graph=True, materialize_grads=True, allow_unused=True)
            for name, mean in means.items()
        }
        optimizer.zero_grad()
        torch.stack([*means.values()]).sum().backward()
        combined = combine({name: torch.cat([part.flatten() for part in parts]) for name, parts in taken.items()})
        nn.utils.vector_to_parameters(combined, [one.grad for one in parameters])  # type: ignore[misc]
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return weights_of(model)


def weights_of(model: nn.Module) -> list[float]:
    found: list[float] = nn.utils.parameters_to_vector(model.parameters()).tolist()
    return found


def make(model: nn.Module, parameters: Any = None, *, user_forward: Any = forward, steps: int = 100, **options: Any) -> Trainer:
    optimizer = torch.optim.SGD(parameters or model.parameters(), lr=0.1, momentum=0.5)
    options = {"sample_sizes": sizes, **options}
    return create_trainer(
        model,
        optimizer,
        user_forward,
        accumulation_steps=steps,
        max_grad_norm=MAX_NORM,
        protect=False,
        options=UpdateOptions(**options),
    )


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("combine", [project, weigh])
def test_each_cut_is_one_batch(cut: Sequence[int], combine: Build) -> None:
    """To 1e-12 in float64, as the loop by hand, with momentum and clipping after the function."""
    model = Heads()
    trainer = make(model)
    SeveralGradients(combine).attach(trainer)
    trainer.run(cuts.cut(cuts.samples(), cut), max_epochs=NUM_UPDATES)
    assert weights_of(model) == pytest.approx(by_hand(combine), rel=1e-12)


def test_the_tasks_pull_against_one_another() -> None:
    """So that the projection above is one, and the sum of the gradients another update."""
    assert by_hand(project) != pytest.approx(by_hand(lambda gradients: torch.stack([*gradients.values()]).sum(0)), rel=1e-3)


def test_some_parameters_alone() -> None:
    """Those of the body are combined, as PCGrad does; the heads keep their gradient."""
    model = Heads()
    trainer = make(model)
    SeveralGradients(weigh, parameters=model.parts["body"]).attach(trainer)  # type: ignore[index]
    trainer.run(cuts.cut(cuts.samples(), [40, 24]), max_epochs=NUM_UPDATES)
    expected = by_hand(weigh, chosen=lambda model: model.parts["body"])  # type: ignore[index]
    assert weights_of(model) == pytest.approx(expected, rel=1e-12)


def on_ranks(shards: Sequence[Sequence[int]], way: str) -> list[float]:
    model = Heads()
    wrapped = idist.auto_model(model) if way == "ddp" else model
    trainer = make(wrapped, reduction=way)
    SeveralGradients(weigh).attach(trainer)
    trainer.run(cuts.shard(shards), max_epochs=NUM_UPDATES)
    return weights_of(model)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "explicit"])
@pytest.mark.parametrize("shards", [[[30, 10], [24]], [[40, 0, 24], []], [[20], [4, 4], [36]]], ids=str)
def test_ranks_are_one_batch(shards: list[list[int]], way: str) -> None:
    """Two and three of them, with a rank without data; bitwise the same on all."""
    expected = by_hand(weigh)
    first, *others = run_ranks(on_ranks, shards, way, world_size=len(shards))
    assert first == pytest.approx(expected, rel=1e-12)
    assert all(other == first for other in others)


@pytest.mark.parametrize("chosen", [False, True])
def test_parameters_that_join_the_optimizer_in_the_run_are_combined(chosen: bool) -> None:
    """The weights are equal to a run whose optimizer has these parameters from the beginning, frozen as long."""

    def train(*, join: bool) -> list[float]:
        model = Heads()
        body = [*model.parts["body"].requires_grad_(False).parameters()]  # type: ignore[index]
        trainer = make(model, [one for one in model.parameters() if one.requires_grad] if join else None)
        SeveralGradients(weigh, parameters=model if chosen else None).attach(trainer)

        @trainer.on(Events.ITERATION_STARTED(once=2))
        def thaw() -> None:
            model.requires_grad_()
            if join:
                trainer.optimizers["optimizer"].add_param_group({"params": body})

        trainer.run([cuts.samples()], max_epochs=NUM_UPDATES)
        return weights_of(model)

    assert train(join=True) == pytest.approx(train(join=False), rel=1e-12)


def test_none_leaves_the_gradient_as_it_is() -> None:
    """A function may only look, as one that measures the norms of the tasks does; the sum is that of what it sees."""
    seen: list[float] = []

    def look(gradients: Mapping[str, Tensor]) -> None:
        seen.append(float(torch.stack([*gradients.values()]).sum(0).norm()))

    found = []
    for is_looking in (True, False):
        model = Heads()
        trainer = make(model)
        if is_looking:
            SeveralGradients(look).attach(trainer)
        state = trainer.run(cuts.cut(cuts.samples(), [40, 24]), max_epochs=NUM_UPDATES)
        found.append(weights_of(model))
        assert state.update_output is not None
        assert not is_looking or state.update_output.grad_norm == pytest.approx(seen[-1], rel=1e-12)
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_other_handlers_see_what_was_made() -> None:
    """Also one that was attached before, such as one that adds noise."""
    model, seen = Heads(), []
    trainer = make(model)
    trainer.add_event_handler(
        TrainEvents.GRADIENTS_REDUCED, lambda: seen.extend(nn.utils.parameters_to_vector([p.grad for p in model.parameters()]))
    )
    SeveralGradients(lambda gradients: torch.full_like(gradients["up"], 0.01)).attach(trainer)
    trainer.run([cuts.samples()], max_epochs=1)
    assert {float(number) for number in seen} == {0.01}


def test_halves_of_a_micro_batch_count_once() -> None:
    """What was taken of a micro-batch whose backward did not fit is dropped with it."""
    failed: list[int] = []

    class Narrow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, loss: Tensor, rows: int) -> Tensor:
            ctx.rows = rows
            return loss.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
            if ctx.rows > 20 and torch.is_grad_enabled() is False and taken[0] == 2:
                failed.append(ctx.rows)
                raise torch.OutOfMemoryError("no room")
            return gradients[0], None

    taken = [0]  # gradients of the micro-batch that were taken one by one: the backward of their sum is the one that fails

    def narrow(model: nn.Module, sample: cuts.Sample) -> ForwardOutput:
        taken[0] = 0
        return ForwardOutput({name: (Narrow.apply(v, len(sample[0])), n) for name, (v, n) in terms_of(model, sample).items()})

    model = Heads()
    trainer = make(model, user_forward=narrow, on_out_of_memory="split")
    trainer.add_event_handler(TrainEvents.FORWARD_COMPLETED, lambda: None)
    SeveralGradients(weigh).attach(trainer)
    trainer.add_event_handler(TrainEvents.FORWARD_COMPLETED, lambda: taken.__setitem__(0, 2))
    trainer.run([cuts.samples()], max_epochs=NUM_UPDATES)
    assert failed
    assert weights_of(model) == pytest.approx(by_hand(weigh), rel=1e-12)


def penalty(model: nn.Module, _: Any) -> ForwardOutput:
    return ForwardOutput(sum(p.square().sum() for p in model.parameters()), sample_size=1)  # type: ignore[arg-type]


def with_another_forward() -> tuple[list[int], list[dict[str, float]], dict[str, float], list[float]]:
    """How many gradients were combined, sizes of the terms by update, what the metrics show as losses, and the weights."""
    called: list[int] = []
    model = Heads()
    trainer = make(model, reduction="explicit")
    SeveralGradients(lambda gradients: called.append(len(gradients))).attach(trainer)  # type: ignore[arg-type,func-returns-value]
    TrainingMetrics(memory=False).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    has_data = idist.get_rank() == 0  # the other rank has none in any update
    with trainer.session() as state:
        records = [trainer.update([cuts.samples()] * has_data)]
        records.append(trainer.update([torch.zeros(1)] * has_data, forward=penalty, name="penalty"))
        shown = {name: value for name, value in state.metrics.items() if "loss" in name}
        records.append(trainer.update([]))
        before = weights_of(model)
        with pytest.raises(ForwardContractError, match="needs a loss that is a mapping of several terms"):
            trainer.update([torch.zeros(1)] * has_data, forward=penalty)
        assert weights_of(model) == before
    assert records[-1].skipped_reason == "no_samples"
    return called, [record.sample_sizes for record in records[:2]], shown, before


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_update_of_another_forward_is_left_alone(world_size: int) -> None:
    """Ranks find no terms in an update with a name. Without a name, a loss of one number is an error before the step."""
    alone = with_another_forward()
    called, (ordinary, other), shown, _ = alone
    assert (called, [*ordinary], other) == ([2], ["up", "down"], {})
    assert sorted(shown) == ["loss", "loss/down", "loss/up", "penalty/loss"]
    for of_rank in run_ranks(with_another_forward, world_size=world_size):
        assert of_rank[0] == called
        assert of_rank[1] == [pytest.approx(ordinary, rel=1e-12), {}]
        assert of_rank[2] == pytest.approx(shown, rel=1e-12)
        assert of_rank[3] == pytest.approx(alone[3], rel=1e-12)


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (torch.zeros(3), ValueError, r"must return a vector of shape \(32,\), as those it gets, got \(3,\)"),
        (3, TypeError, "combine must return a tensor, or None, got 3"),
    ],
    ids=["shape", "number"],
)
def test_what_is_no_gradient_is_said(returned: Any, error: type[Exception], message: str) -> None:
    """Before the step."""
    model = Heads()
    trainer, before = make(model), weights_of(model)
    SeveralGradients(lambda _: returned).attach(trainer)
    with pytest.raises(error, match=message):
        trainer.run([cuts.samples()], max_epochs=1)
    assert weights_of(model) == before


def test_a_closure_is_said() -> None:
    """Its later evaluations fire no FORWARD_COMPLETED, so that nothing could be taken in them."""
    model = Heads()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    trainer = create_trainer(model, optimizer, forward, options=UpdateOptions(closure=True))
    SeveralGradients(weigh).attach(trainer)
    with pytest.raises(ValueError, match="evaluates the loss once; leave out closure=True"):
        trainer.run([cuts.samples()], max_epochs=1)


def test_what_it_cannot_do_is_refused() -> None:
    """When it is made or attached."""
    model = Heads()
    with pytest.raises(TypeError, match="combine must be a function of the gradients by name, got 3"):
        SeveralGradients(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"parameters must be a torch\.nn\.Module or a list of parameters"):
        SeveralGradients(weigh, parameters="body")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="parameters must be some that the optimizer steps"):
        SeveralGradients(weigh, parameters=nn.Linear(2, 2)).attach(make(model))
    scaled = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward, precision="fp16")
    with pytest.raises(ValueError, match="needs a trainer without loss scaling"):
        SeveralGradients(weigh).attach(scaled)
    with pytest.raises(ValueError, match="reduction='local'"):
        SeveralGradients(weigh).attach(make(model, reduction="local", sample_sizes=None))
    embedding = nn.Embedding(3, 2, sparse=True)
    with pytest.raises(TypeError, match="sharded or sparse; leave them out with parameters="):
        SeveralGradients(weigh).attach(make(embedding))


def sharded() -> str:
    model = fully_shard(Heads(), mesh=on_cpu())
    with pytest.raises(TypeError) as raised:
        SeveralGradients(weigh).attach(make(model))
    return str(raised.value)


def test_a_sharded_model_is_refused() -> None:
    for message in run_ranks(sharded):
        assert "some of this trainer's are sharded or sparse" in message
