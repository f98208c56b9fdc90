"""Running a model leaves no trace: what is remembered of it before, and put back."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ignite_train import TrainingError
from ignite_train.model.buffer_rollback import BufferRollback
from ignite_train.model.forward_state import ForwardState
from ignite_train.model.micro_batch_rollback import written_into
from ignite_train.state import Carried


class Noted(nn.Module):
    """Leaves in itself what forwards are seen to leave there, and draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.ones(3)), 0
        self.register_buffer("assigned", torch.zeros(3))
        self.register_buffer("written", torch.zeros(3))
        self.register_buffer("nothing", None)
        self.generator, self.of_numpy = torch.Generator().manual_seed(1), np.random.default_rng(1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.latest = x
        self.assigned = self.assigned + 1
        self.written.add_(1)
        draw = torch.rand(3, generator=self.generator) + torch.rand(3)
        return x * self.weight + draw + float(self.of_numpy.random()) + float(np.random.rand())


@pytest.mark.parametrize("depth", [0, 1])
def test_buffers_are_the_tensors_and_the_values_that_they_were(depth):
    """Also those that forward assigns, in the module itself and in one inside of it."""
    noted = Noted()
    module = nn.Sequential(noted) if depth else noted
    before = [noted.assigned, noted.written]
    state = ForwardState(module)
    mark = state.mark()
    module(torch.ones(3))
    assert noted.assigned is not before[0]
    state.put_back(mark)
    assert noted.assigned is before[0]
    assert noted.written is before[1]
    assert noted.assigned.tolist() == noted.written.tolist() == [0.0] * 3


OTHERS = {
    "same": torch.full((3,), 2.0),
    "shape": torch.full((2, 2), 2.0),
    "dtype": torch.full((3,), 2.0, dtype=torch.float64),  # whose values float32 does not hold
}


@pytest.mark.parametrize("how", ["assigned", "given other memory"])
@pytest.mark.parametrize("name", OTHERS)
def test_a_buffer_that_is_another_one_by_now_is_remembered_again(name, how):
    """Copies are written over only where they are of the same tensors, of that shape and dtype."""
    module, other = Noted(), OTHERS[name].clone()
    rollback = BufferRollback(module)
    rollback.mark()
    if how == "assigned":
        module.written = other
    else:
        module.written.data = other
    there = module.written
    for value in (2.1, 7.3):
        module.written.fill_(value)
        rollback.mark()
        module.written.add_(1)
        rollback.roll_back()
        assert module.written is there
        assert torch.equal(module.written, torch.full_like(OTHERS[name], value))


@pytest.mark.parametrize("name", OTHERS)
def test_the_only_buffer_may_become_another_one(name):
    """Its values are those of the tensor that it was at the latest mark."""
    module = nn.Module()
    module.register_buffer("only", torch.zeros(3))
    rollback = BufferRollback(module)
    rollback.mark()
    for value in (0.1, 0.7, 0.3):
        other = torch.full_like(OTHERS[name], value)
        if name == "same":
            module.only = other
        else:
            module.only.data = other
        there = module.only
        rollback.mark()
        module.only.add_(1)
        rollback.roll_back()
        assert module.only is there
        assert torch.equal(module.only, torch.full_like(OTHERS[name], value))


def test_an_expanded_buffer_is_put_back():
    """Torch writes to it only where no two elements share their memory."""
    module = nn.Module()
    module.register_buffer("mask", torch.tensor([[1.0], [2.0]]).expand(2, 3))
    module.register_buffer("plain", torch.tensor([3.0]))
    rollback = BufferRollback(module)
    for value in (5.0, 6.0):
        before = module.mask.clone()
        rollback.mark()
        module.mask[:, :1] = value
        module.plain.fill_(value)
        rollback.roll_back()
        assert torch.equal(module.mask, before)
        assert module.plain.tolist() == [3.0]
        module.mask[0, :1] = value
    assert module.mask.stride() == (1, 0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_nested_buffer_is_put_back(layout: torch.layout) -> None:
    """Torch tells no shape of one, and copies it with no other."""
    module = nn.Module()
    module.register_buffer("rows", torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=layout))
    rollback = BufferRollback(module)
    for value in (1.0, 5.0):
        rollback.mark()
        module.rows.mul_(5.0)
        rollback.roll_back()
        assert [row.tolist() for row in module.rows.unbind()] == [[value], [value] * 2]
        module.rows.mul_(5.0)


def test_a_buffer_that_nothing_can_write_to_stays():
    """As one that was made in inference mode."""
    module = nn.Module()
    with torch.inference_mode():
        module.register_buffer("cache", torch.ones(2))
    rollback = BufferRollback(module)
    rollback.mark()
    rollback.roll_back()
    assert module.cache.tolist() == [1.0, 1.0]


def test_a_trial_run_leaves_no_trace():
    """A second forward, after a trial run was undone, gives the very numbers that the first one gave."""
    noted, carried = Noted(), Carried({"seen": 1})
    model = nn.Sequential(noted)
    state = ForwardState(model, carried)
    mark = state.mark()
    first = model(torch.ones(3))
    carried["seen"] = 2
    state.put_back(mark)
    assert noted.calls == 0
    assert carried == {"seen": 1}
    assert noted.assigned.tolist() == noted.written.tolist() == [0.0] * 3
    assert not hasattr(noted, "latest")
    assert torch.equal(model(torch.ones(3)), first)
    assert noted.calls == 1


def test_a_trial_run_undoes_what_forward_counts():
    """Also where each attribute that it assigns was there before."""
    model = Noted()
    model(torch.ones(3))
    latest = model.latest
    state = ForwardState(model)
    mark = state.mark()
    model(torch.zeros(3))
    state.put_back(mark)
    assert model.calls == 1
    assert model.latest is latest


@pytest.mark.parametrize("how", ["added", "deleted"])
def test_a_trial_run_undoes_an_attribute_that_comes_or_goes(how):
    """Also where it is all that forward changes in a module."""
    model = nn.Linear(1, 1)
    if how == "deleted":
        model.latest = None
    before = {**vars(model)}
    state = ForwardState(model)
    mark = state.mark()
    if how == "added":
        model.latest = None
    else:
        del model.latest
    state.put_back(mark)
    assert vars(model) == before


def test_a_trial_run_undoes_the_draws_of_forward_itself():
    """An object for a forward, or a method of one, may hold a generator."""

    class Forward:
        def __init__(self) -> None:
            self.generator = torch.Generator().manual_seed(1)

        def draw(self, _model: nn.Module, _x: Tensor) -> Tensor:
            return torch.rand(3, generator=self.generator)

        __call__ = draw

    model = Noted()
    for forward in ((made := Forward()), made.draw):
        state = ForwardState(model, Carried(), forward)
        mark = state.mark()
        first = forward(model, torch.ones(3))
        state.put_back(mark)
        assert torch.equal(forward(model, torch.ones(3)), first)


def unusual_tensors() -> dict[str, Tensor]:
    """Some whose memory is not one row of numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that some of them are new, and others old
        return {
            "sparse": torch.eye(2).to_sparse(),
            "several": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
            "meta": torch.ones(2, device="meta"),
            "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        }


def test_a_trial_run_undoes_what_is_written_into_the_micro_batch():
    """Tensors of any strides, also with NaN and of a shape that is expanded, and arrays; nothing else is written."""
    x, nan, array = torch.arange(6.0).view(2, 3).T, torch.tensor([math.nan, 1.0]), np.arange(3.0)
    one, expanded = torch.ones(1), torch.tensor(math.nan).expand(4)
    micro_batch = {"x": x, "nested": [nan, array, one], "expanded": expanded, "text": "a", "empty": torch.ones(0)}
    micro_batch |= unusual_tensors()
    before = [x.clone(), nan.clone(), array.copy(), one.clone()]
    state = ForwardState(Noted())
    mark = state.mark(micro_batch)
    x.mul_(2)
    nan.add_(1)
    array += 1
    one.add_(1)
    state.put_back(mark)
    assert x.stride() == (1, 3)
    for now, then in zip((x, nan, torch.from_numpy(array), one), before, strict=True):
        torch.testing.assert_close(now, torch.as_tensor(then), rtol=0, atol=0, equal_nan=True)


def test_writing_into_a_micro_batch_is_noticed():
    """Without a copy, by the versions that torch counts."""
    with torch.inference_mode():
        unknown = torch.ones(2)
    x, y = torch.ones(2), torch.ones(2)
    is_written = written_into((x, [y, unknown], np.ones(2), unusual_tensors(), "a", None))
    assert not is_written()
    y[0].add_(1)
    assert is_written()


class Following(nn.Module):
    """Has a target that follows its weight in forward, from a call on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.weight, self.target = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2), requires_grad=False)
        self.calls, self.first = 0, first

    def forward(self) -> None:
        self.calls += 1
        if self.calls >= self.first:
            self.target.data.add_(1.0)
            self.target.data = self.target.data + 1.0


@pytest.mark.parametrize("copies", [True, False], ids=["copied", "norms"])
def test_a_parameter_that_forward_moves_is_put_back(copies):
    """In the memory that it had. Where only norms are taken at first, after a forward that was kept."""
    model = Following(1)
    state = ForwardState(model, copies=copies)
    if not copies:
        kept = state.mark()
        model()
        state.keep(kept)
    before, address = model.target.detach().clone(), model.target.data_ptr()
    for _ in range(3):
        mark = state.mark()
        model()
        state.put_back(mark)
        assert torch.equal(model.target, before)
        assert model.target.data_ptr() == address


@pytest.mark.parametrize(("copies", "first"), [(True, 2), (False, 1), (False, 2)])
def test_a_parameter_without_a_copy_is_refused_by_its_name(copies, first):
    """One that moves later than others were looked for, and one that moves in the first forward, where none is copied."""
    model = Following(first)
    state = ForwardState(model, copies=copies)
    if first == 2:
        for _ in range(2):  # before a step of what is trained, and after it
            model.calls = 0
            mark = state.mark()
            model()
            (state.put_back if copies else state.keep)(mark)
            model.weight.data.add_(1.0)
        model.calls = 1
    mark = state.mark()
    model()
    with pytest.raises(TrainingError, match=r"it has moved model\.target, which was not copied"):
        state.put_back(mark)
    assert model.calls == first - 1  # all else is back


def test_what_something_else_steps_stays():
    """Parameters that are named are left as they are; a mark can be put back several times."""
    model = Following(1)
    state = ForwardState(model)
    mark = state.mark()
    for _ in range(2):
        model()
        with torch.no_grad():
            model.weight.add_(1.0)
        state.put_back(mark, stepped=[model.weight])
    assert model.weight.tolist() == [3.0, 3.0]
    assert model.target.tolist() == [0.0, 0.0]
