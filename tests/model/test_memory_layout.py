"""How parameters lie in memory makes no difference to an update, in each way of crossing ranks, with each kernel."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import conv2d
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, AdamW

from ignite_train import ForwardOutput, TrainEvents, UpdateOptions, create_trainer
from ignite_train.model.memory_layout import as_gradient_of, is_dense, pairs_with
from ignite_train.ranks import collectives, replicas
from ranks import run_ranks
from textbook import Textbook
from tiers import nightly, slow
from update_options import with_options

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda w: w,
    "channels_last": lambda w: w.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if w.dim() == 4 else w,
    "transposed": lambda w: w.permute((*reversed(range(w.dim())),)).contiguous().permute((*reversed(range(w.dim())),)),
    "expanded": lambda w: w[:1].expand(w.shape).clone() if w.dim() > 1 else w,
    "gaps": lambda w: torch.stack([w, torch.full_like(w, 9.0)], dim=-1)[..., 0],
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **how: SGD(p, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.1, **how),
    "adamw": lambda p, **how: AdamW(p, lr=0.02, weight_decay=0.1, **how),
    "adagrad": lambda p, **how: Adagrad(p, lr=0.05, lr_decay=0.1, **how),
}
HOW: dict[str, dict[str, bool]] = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}
MAX_NORM = 0.5


class Net(nn.Module):
    """A convolution, a matrix and a scale without dimensions, each with weights in the layout of that name."""

    def __init__(self, layout: str, *, scalar: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(LAYOUTS[layout](torch.randn(*shape, generator=generator) / 3))

        self.kernel, self.matrix, self.bias = weight(6, 3, 2, 2), weight(24, 5), weight(5)
        self.scale = nn.Parameter(torch.full(() if scalar else (1,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(conv2d(x, self.kernel, stride=2)).flatten(1)
        return self.scale * torch.tanh(hidden @ self.matrix + self.bias)


def forward(model: nn.Module, batch: Tensor) -> ForwardOutput:
    return ForwardOutput((model(batch) ** 3).sum(), len(batch))


def groups() -> list[list[Tensor]]:
    """Three updates of four micro-batches each, of unequal sizes."""
    generator = torch.Generator().manual_seed(1)
    sizes = [(2, 1, 3, 2), (1, 4, 1, 1), (3, 2, 2, 2)]
    return [[torch.randn(size, 3, 4, 4, generator=generator) for size in update] for update in sizes]


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters after the updates, all of it in float64."""
    exact = copy.deepcopy(model).double()
    parameters: list[Tensor] = list(exact.parameters())
    book = Textbook(optimizer, parameters)
    for group in groups():
        samples = torch.cat(group).double()
        (forward(exact, samples).loss / len(samples)).backward()
        book.clip(MAX_NORM)
        book.step()
        book.zero_grad()
    return [parameter.detach() for parameter in parameters]


def whole(parameter: Tensor) -> Tensor:
    full: Tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return full.detach().double()


def error_of(way: str, layout: str, name: str, how: str, **arguments: Any) -> float:
    """How far the parameters are from those by hand, relative to how far they have moved.

    Infinite if a gradient is laid out in another way than its parameter when it is stepped along.
    """
    model = Net(layout, scalar=way != "fsdp")
    before = [parameter.detach().double().clone() for parameter in model.parameters()]
    right = by_hand(model, OPTIMIZERS[name](model.parameters(), **HOW[how]))
    wrapped: nn.Module = model
    if way in ("ddp", "auto"):
        wrapped = DistributedDataParallel(model)
    elif way == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = OPTIMIZERS[name](model.parameters(), **HOW[how])
    reduction: Any = way if way in ("ddp", "explicit", "fsdp") else "auto"
    ranks = 1 if way == "alone" else 2
    trainer = create_trainer(
        wrapped,
        optimizer,
        forward,
        accumulation_steps=4 // ranks,
        max_grad_norm=MAX_NORM,
        **with_options(reduction=reduction, **arguments),
    )
    strange: list[str] = []

    def look() -> None:
        for key, parameter in model.named_parameters():
            if is_dense(parameter) and not pairs_with(parameter.grad, parameter):
                strange.append(key)

    if layout != "contiguous":  # so that some run without a handler of this event
        trainer.add_event_handler(TrainEvents.GRADIENTS_READY, look)
    rank, share = collectives.rank(), 4 // ranks
    trainer.run([batch for group in groups() for batch in group[share * rank : share * (rank + 1)]])
    off = sum(((whole(p) - r) ** 2).sum() for p, r in zip(model.parameters(), right, strict=True))
    moved = sum(((b - r) ** 2).sum() for b, r in zip(before, right, strict=True))
    assert optimizer.state_dict()["param_groups"][0]["fused"] is (True if how == "fused" else None)
    return float("inf") if strange else float((off / moved) ** 0.5)


def cells(name: str, part: int | None) -> list[tuple[str, str, str]]:
    """Ways, layouts and kernels; of the parts 0, 1 and 2, each of the three optimizers has another third of them."""
    found = [
        (way, layout, how)
        for way in ("ddp", "auto", "explicit", "buckets", "fsdp")
        for layout in (("contiguous", "expanded") if way == "fsdp" else LAYOUTS)  # torch refuses to shard the others
        for how in HOW
    ]
    first = list(OPTIMIZERS).index(name)
    return found if part is None else [cell for number, cell in enumerate(found) if (number + number // 3 + first) % 3 == part]


def table(patch: pytest.MonkeyPatch, name: str, part: int | None) -> Iterator[tuple[str, float]]:
    for way, layout, how in cells(name, part):
        with patch.context() as within:
            if way == "buckets":
                within.setattr(replicas, "_TAIL_ELEMENTS", 6)  # so that all but the scale and the bias are in buckets
            yield f"{way} {layout} {how}", error_of("explicit" if way == "buckets" else way, layout, name, how)


def errors_of(name: str, part: int | None) -> dict[str, float]:
    logging.disable(logging.WARNING)
    with pytest.MonkeyPatch.context() as patch:
        return dict(table(patch, name, part))


@pytest.mark.parametrize("part", [slow(0), nightly(None)], ids=["third", "all"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_layout_of_parameters_changes_no_update(name, part):
    """Each layout, in each way of crossing ranks, with each kernel of each optimizer: the parameters of float64 arithmetic.

    The thirds of the three optimizers hold each way, layout and kernel once.
    """
    for errors in run_ranks(errors_of, name, part):
        assert [*errors] == [" ".join(cell) for cell in cells(name, part)]
        assert {case: error for case, error in errors.items() if not error < 1e-4} == {}


@pytest.mark.sampled(6)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_changes_nothing_in_one_process(layout, how):
    """Also where gradients are set aside and put back, and where backward leaves graphs on them."""
    assert error_of("alone", layout, "adamw", how) < 1e-4
    assert error_of("alone", layout, "sgd", how, on_out_of_memory="split") < 1e-4
    assert error_of("alone", layout, "adagrad", how, create_graph=True) < 1e-4


def test_the_thirds_are_all():
    """Together, and each kernel and each way is in each of them."""
    thirds = [cells(name, 0) for name in OPTIMIZERS]
    assert sorted(chain.from_iterable(thirds)) == sorted(cells("sgd", None))
    assert len(cells("sgd", None)) == 4 * 5 * 3 + 2 * 3
    assert [(len({way for way, _, _ in third}), len({how for _, _, how in third})) for third in thirds] == [(5, 3)] * 3


# --- the beginning ---


def broadcast_to_other_strides() -> list[Any]:
    """What rank 1 has after rank 0's tensors were given to it, where its own have other strides."""
    rank = collectives.rank()
    values = torch.arange(24.0).view(2, 3, 4) + 1
    found: list[Any] = []
    for other in LAYOUTS["transposed"], LAYOUTS["gaps"], lambda w: w[:1].expand(2, 3, 4):
        mine = values.clone() if rank == 0 else other(torch.zeros(2, 3, 4))
        collectives.broadcast(mine)
        between = mine.as_strided((24,), (2,), 1).tolist() if other is LAYOUTS["gaps"] and rank == 1 else [9.0] * 24
        found.append([mine.tolist(), between])
    return found


def test_a_broadcast_is_by_index():
    """Rank 0's values arrive at their indices whatever the strides; nothing is written into gaps or beyond expanded tensors."""
    values = (torch.arange(24.0).view(2, 3, 4) + 1).tolist()
    for found in run_ranks(broadcast_to_other_strides):
        assert found[:2] == [[values, [9.0] * 24]] * 2
        assert found[2][0] in (values, [values[0]] * 2)


def begin_with_other_strides() -> list[float]:
    """The parameters that an update is begun with, on ranks that were built otherwise."""
    rank = collectives.rank()
    model = Net("transposed" if rank else "contiguous")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0 + rank)
    create_trainer(model, SGD(model.parameters(), lr=0.1), forward, options=UpdateOptions(reduction="explicit"))
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


def test_ranks_begin_alike_whatever_their_strides():
    """`reduction="explicit"` gives rank 0's values to each index of the other ranks' parameters."""
    first, second = run_ranks(begin_with_other_strides)
    assert first == second


# --- pieces ---


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (4,), (4, 1), (3, 5), (2, 3, 2, 2), (1, 3, 1, 2)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_is_laid_out_as_backward_does(layout, shape):
    """Values in the order of the indices come to those indices, in strides that pair with those of backward's gradient."""
    parameter = nn.Parameter(LAYOUTS[layout](torch.ones(shape)))
    (parameter * 2.0).sum().backward()
    values = torch.arange(float(parameter.numel()))
    ours = as_gradient_of(values, parameter)
    assert torch.equal(ours, values.view(shape))
    assert pairs_with(ours, parameter.grad)
    assert is_dense(parameter) == (layout != "gaps" or parameter.numel() < 2)
    assert pairs_with(ours, parameter) or not is_dense(parameter)


@pytest.mark.parametrize("rows", [2, 4])
def test_an_expanded_parameter_is_refused(rows):
    """Several of its elements are one number in memory: a fused kernel would write beyond it."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(1, 3).expand(rows, 3))})
    with pytest.raises(ValueError, match=rf"model must hold each weight once, got 'w' of shape \({rows}, 3\) expanded"):
        create_trainer(model, SGD(model.parameters(), lr=0.1), forward)


def test_a_number_that_is_expanded_to_one_element_is_taken():
    """It is in memory once, although its stride is 0."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(()).expand(1))})
    assert model["w"].stride() == (0,)
    trainer = create_trainer(model, SGD(model.parameters(), lr=0.1), lambda model, x: (model["w"] * x).sum())
    trainer.run([torch.tensor([2.0])])
    assert model["w"].tolist() == pytest.approx([0.8])
