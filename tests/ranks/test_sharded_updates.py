"""Updates of a sharded model of which FSDP2 takes something for granted: what does not hold is put right, or refused."""

from __future__ import annotations

import math
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ignite_train import ForwardOutput, Trainer, TrainEvents, UnlikeParametersError, UpdateOptions, create_trainer
from ignite_train.model.gradients import Gradients
from ignite_train.ranks import collectives
from ignite_train.ranks.fsdp import SameParameters
from meshes import on_cpu
from ranks import run_ranks

RATE = 0.1


class Branches(nn.Module):
    """Two layers of one shape, of which forward uses one or both, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor, used: str) -> Tensor:
        out: Tensor = self.head(sum(self.get_submodule(name)(x) for name in used.split()))
        return out


def forward(model: nn.Module, micro_batch: tuple[Tensor, str]) -> ForwardOutput:
    return ForwardOutput(model(*micro_batch).square().sum(), len(micro_batch[0]))


def micro_batches(rank: int, used: list[str]) -> list[tuple[Tensor, str]]:
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(4, 3, generator=generator, dtype=torch.float64), one) for one in used]


def branches() -> Branches:
    torch.manual_seed(0)
    return Branches().double()


def by_hand(updates: list[list[list[str]]]) -> list[float]:
    """The weights after these updates: of each update, for each rank what each micro-batch uses."""
    model = branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    data = [iter(micro_batches(rank, [name for update in updates for name in update[rank]])) for rank in range(2)]
    for update in updates:
        outputs = [forward(model, next(data[rank])) for rank in range(2) for _ in update[rank]]
        (sum(output.loss for output in outputs) / sum(output.sample_size for output in outputs)).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def flat(model: nn.Module) -> list[float]:
    """All weights, gathered from their shards."""
    whole = [p.full_tensor() if isinstance(p, torch.distributed.tensor.DTensor) else p for p in model.parameters()]
    return torch.cat([parameter.detach().flatten() for parameter in whole]).tolist()


def make(model: nn.Module, steps: int, **options: Any) -> Trainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return create_trainer(model, optimizer, forward, accumulation_steps=steps, options=UpdateOptions(**options))


# --- ranks that use different parameters ---


def train(updates: list[list[list[str]]], each: bool, *, unused: bool = False, **options: Any) -> tuple[str, list[float]]:
    """The error, if any, and the weights; `each`: the layers are sharded one by one too."""
    model = branches()
    for part in (model.left, model.right) if each else ():
        fully_shard(part, mesh=on_cpu())
    sharded = fully_shard(model, mesh=on_cpu())
    if unused:
        sharded.set_reduce_scatter_unused_params(True)
    trainer = make(model, len(updates[0][0]), **options)
    rank, error = idist.get_rank(), ""
    try:
        trainer.run(micro_batches(rank, [name for update in updates for name in update[rank]]), max_epochs=1)
    except UnlikeParametersError as raised:
        error = f"{raised.parameter} on {raised.ranks}"
    return error, flat(model)


@pytest.mark.parametrize(
    "used",
    [["left", "left"], ["left", "right"], ["left right", "left"], ["left", "left", "left"], ["left", "left", "right"]],
    ids=", ".join,
)
def test_a_step_is_refused_where_ranks_use_different_parameters(used: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator decides from the sums of what each rank sends; then the host names the first parameter that differs."""
    monkeypatch.setattr(collectives, "world_size", lambda: len(used))
    ranks = []
    for rank, names in enumerate(used):
        model = branches()
        forward(model, micro_batches(rank, [names])[0]).loss.backward()  # type: ignore[union-attr]
        ranks.append(SameParameters())
        ranks[-1].look(Gradients(model, torch.optim.SGD(model.parameters(), lr=RATE)))
    sums = torch.tensor([one.payload() for one in ranks], dtype=torch.float64).sum(0)
    monkeypatch.setattr(collectives, "gather_objects", lambda _: [one._present for one in ranks])
    alike = len({*used}) == 1
    assert bool(ranks[0].vetoes(sums)) == (not alike)
    if alike:
        ranks[0].on_reduced(sums.tolist())
        return
    with pytest.raises(UnlikeParametersError) as raised:
        ranks[0].on_reduced(sums.tolist())
    users = {name: tuple(rank for rank, names in enumerate(used) if name in names.split()) for name in ("left", "right")}
    first = next(name for name, ranks_with_it in users.items() if len(ranks_with_it) < len(used))
    assert (raised.value.parameter, raised.value.ranks) == (repr(f"{first}.weight"), users[first])


LIKE = [["left", "left right"], ["left", "left right"]], [["right", "left"], ["right", "left"]]
UNLIKE = [["left"], ["right"]]


def all_cases() -> list[tuple[str, list[float]]]:
    begin = [["left right"], ["left right"]]
    return [
        train([*LIKE], False),
        train([*LIKE], True),
        train([begin, UNLIKE], False),
        train([begin, UNLIKE], True),
    ]


@pytest.mark.slow
def test_ranks_that_use_different_parameters_are_refused_before_the_step() -> None:
    """FSDP2 would add up the gradients of different layers; micro-batches of a rank may use different ones."""
    for like, like_each, unlike, unlike_each in run_ranks(all_cases):
        for error, weights in (like, like_each):
            assert error == ""
            assert weights == pytest.approx(by_hand([*LIKE]))
        begin = [["left right"], ["left right"]]
        for error, weights in (unlike, unlike_each):
            assert error == "'left.weight' on (0,)"
            assert weights == pytest.approx(by_hand([begin]))


CROSSED = [["left", "right"], ["right", "left"]]  # both ranks have both gradients in the end


def reduced_in_each() -> list[tuple[str, list[float]]]:
    alike = [["left", "right"]] * 2
    return [train([alike, one], False, reduce_each_micro_batch=True) for one in (alike, CROSSED)]


@pytest.mark.slow
def test_each_reduction_is_compared_where_each_backward_reduces() -> None:
    """In the first micro-batch FSDP2 adds the gradient of one layer to that of another, although all have both in the end."""
    alike = [["left", "right"]] * 2
    for (error, weights), (crossed, unmoved) in run_ranks(reduced_in_each):
        assert error == ""
        assert weights == pytest.approx(by_hand([alike, alike]))
        assert crossed == "'left.weight' on (0,)"
        assert unmoved == pytest.approx(by_hand([alike]))


def with_zeros_of_torch() -> tuple[str, list[float]]:
    return train([[["left right"], ["left right"]], UNLIKE], False, unused=True)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="torch before 2.13 cannot reduce zeros")
def test_ranks_may_use_different_parameters_where_torch_reduces_zeros() -> None:
    """The weights are those by hand."""
    for error, weights in run_ranks(with_zeros_of_torch):
        assert error == ""
        assert weights == pytest.approx(by_hand([[["left right"], ["left right"]], UNLIKE]))


# --- an update that is broken off ---


class Broken(Exception):  # noqa: N818  # raised to end an update
    """Ends an update."""


def break_off(place: str, number: int) -> tuple[int, list[float]]:
    """Runs, is broken off in micro-batch `number`, and runs on."""
    model = branches()
    fully_shard(model.left, mesh=on_cpu())
    fully_shard(model, mesh=on_cpu())
    trainer, breaks = make(model, 2), [place]

    def stop(*_: Any) -> None:
        if breaks and trainer.state.num_micro_batches == number:
            breaks.clear()
            raise Broken

    if place == "handler":
        trainer.add_event_handler(TrainEvents.BACKWARD_COMPLETED, stop)
    elif place == "forward":
        model.right.register_forward_hook(stop)
    elif place == "backward":
        model.right.register_forward_hook(lambda module, inputs, output: (output.register_hook(stop), None)[1])
    data = micro_batches(idist.get_rank(), ["left right"] * 6)
    for _ in breaks:
        with pytest.raises(Broken):
            trainer.run(data, max_epochs=1)
    trainer.run(data, max_epochs=1)
    return trainer.state.num_steps, flat(model)


BREAKS = [(place, number) for place in ("handler", "forward", "backward") for number in (3, 4)]


def break_off_everywhere() -> list[tuple[int, list[float]]]:
    return [break_off(place, number) for place, number in BREAKS]


@pytest.mark.slow
def test_an_update_that_is_broken_off_leaves_no_gradient_inside_of_fsdp() -> None:
    """The next run repeats it, and comes to the weights of a run that was never broken off."""
    expected = by_hand([[["left right"] * 2] * 2] * 3)
    for outcomes in run_ranks(break_off_everywhere):
        for (place, number), (num_steps, weights) in zip(BREAKS, outcomes, strict=True):
            assert num_steps == 3, (place, number)
            assert weights == pytest.approx(expected), (place, number)


# --- shards that several ranks hold ---

USED, LIMIT = ["left right", "left", "right"], 0.1


def in_replicas(factor: float) -> tuple[list[float], list[float]]:
    """The norms of three updates, and the weights after them; each shard is on two ranks, and the loss times `factor`."""
    model = branches().float()
    mesh = init_device_mesh("cpu", (2, idist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))
    fully_shard(model, mesh=mesh)

    def times_factor(model: nn.Module, micro_batch: tuple[Tensor, str]) -> ForwardOutput:
        output = forward(model, micro_batch)
        return output._replace(loss=output.loss * factor)

    optimizer, norms = torch.optim.SGD(model.parameters(), lr=RATE), list[float]()
    trainer = create_trainer(model, optimizer, times_factor, max_grad_norm=LIMIT)
    for x, used in micro_batches(idist.get_rank(), USED):
        norms.append(trainer.update([(x.float(), used)]).grad_norm)
    return norms, flat(model)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4], ids=["whole", "sharded"])
@pytest.mark.parametrize("factor", [1.0, 1e20], ids=["plain", "squares beyond float32"])
def test_shards_that_several_ranks_hold_count_once_in_the_norm(factor: float, ranks: int) -> None:
    """Norms, and weights after steps along clipped gradients, are those by hand in float64."""
    model, expected = branches(), list[float]()
    data = [micro_batches(rank, USED) for rank in range(ranks)]
    for number in range(3):
        loss = sum(forward(model, data[rank][number]).loss for rank in range(ranks)) / (4 * ranks)
        model.zero_grad()
        loss.backward()  # type: ignore[union-attr]
        gradients = [parameter for parameter in model.parameters() if parameter.grad is not None]
        expected.append(factor * math.sqrt(sum(float(one.grad.square().sum()) for one in gradients)))  # type: ignore[union-attr]
        clipped = factor * min(1.0, LIMIT / (expected[-1] + 1e-6))
        with torch.no_grad():
            for parameter in gradients:
                parameter -= RATE * clipped * parameter.grad
    for norms, weights in run_ranks(in_replicas, factor, world_size=ranks):
        assert norms == pytest.approx(expected, rel=1e-5)
        assert weights == pytest.approx(flat(model), rel=1e-4, abs=1e-6)
    assert min(expected) > LIMIT


# --- how it was sharded ---


def refusals() -> list[str]:
    """What is said about a mesh of one rank, and about a factor by which gradients are divided."""
    mesh, messages = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards")), []
    for change in ("mesh", "factor", "same factor", "same factor on two dimensions"):
        model = branches()
        fully_shard(model, mesh=mesh["shards"] if change == "mesh" else mesh if "two" in change else None)
        if "factor" in change:
            model.set_gradient_divide_factor(1.0 if change == "factor" else 2.0)  # type: ignore[attr-defined]
        try:
            make(model, 1)
        except ValueError as error:
            messages.append(str(error))
    return messages


@pytest.mark.slow
def test_a_model_whose_gradients_would_not_be_the_mean_is_refused() -> None:
    """Sharded over some of the ranks only, which need not be fed the same; or its gradients are not divided by them."""
    for of_mesh, of_factor in run_ranks(refusals):
        assert of_mesh.startswith(
            "data_dims must name the dimensions of the mesh over which samples differ, among 'replicas', "
        )
        assert of_factor.startswith("model must have its gradients averaged over 2 ranks by fully_shard, got ")
