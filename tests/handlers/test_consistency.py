"""Ranks that come to differ are noticed on all of them, at the next check, by name; ranks that agree are left alone."""

from __future__ import annotations

import copy
import math
import pickle
import struct
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import ignite.distributed as idist
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import cuts
from ignite_train import ForwardOutput, TorchLossScaling, TrainEvents, create_trainer
from ignite_train.handlers import (
    GradNormConsistency,
    GradNormMismatchError,
    LearningRateSchedule,
    StateConsistency,
    StateMismatchError,
)
from ignite_train.handlers.state_consistency import _Check, _Shard
from ignite_train.model.tensor_digests import tensor_digests
from ignite_train.ranks import collectives, replicas
from ranks import run_ranks
from tiers import nightly, slow
from update_options import with_options

Way = Literal["ddp", "explicit"]
EVERY_UPDATE = Events.ITERATION_COMPLETED
each_way = pytest.mark.parametrize("way", ["ddp", "explicit"])


class Net(nn.Module):
    """Parameters and buffers of several dtypes, and running statistics that differ by rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(cuts.FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, 1).double()
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("table", torch.randn(1000, dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.ones(5, dtype=torch.bool), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x.float()))).double())


class Job:
    """All that makes up a run, to be put back to where it was."""

    def __init__(self, way: Way, model: nn.Module | None = None, forward: Any = None, **options: Any) -> None:
        self.model = Net() if model is None else model
        wrapped = DistributedDataParallel(self.model) if way == "ddp" else self.model
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.01)
        self.scaling = TorchLossScaling(8.0, growth_interval=50)
        options = {"reduction": way, "loss_scaling": self.scaling, "protect": False, **options}  # each check is tried alone
        self.trainer = create_trainer(wrapped, self.optimizer, forward or weighted, **with_options(**options))
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=5000)
        LearningRateSchedule(self.scheduler).attach(self.trainer)
        self.state = StateConsistency(wrapped, self.optimizer, scheduler=self.scheduler)

    def parts(self) -> list[Any]:
        return [self.model, self.optimizer, self.scheduler, self.trainer]

    def save(self) -> list[Any]:
        return [copy.deepcopy(part.state_dict()) for part in self.parts()]

    def restore(self, saved: list[Any]) -> None:
        for part, state in zip(self.parts(), saved, strict=True):
            part.load_state_dict(copy.deepcopy(state))


def weighted(model: nn.Module, micro_batch: cuts.Sample) -> ForwardOutput:
    x, y, w = micro_batch
    return ForwardOutput((w * (model(x).squeeze(1) - y) ** 2).sum(), float(w.sum()))


def shard(updates: int, size: int = 4) -> list[cuts.Sample]:
    """This rank's micro-batches, other than those of the other ranks."""
    return cuts.cut(cuts.samples(updates * size, seed=idist.get_rank()), [size] * updates)


def raised(error: type[Exception], run: Callable[[], Any]) -> Any:
    """The error, or None."""
    try:
        run()
    except error as caught:
        return caught
    return None


# --- single bits ---


def flip_in_tensor(tensor: Tensor, draw: Callable[[int], int]) -> None:
    data = tensor.detach().reshape(-1).view(torch.uint8)
    data[draw(len(data))] ^= 1 << draw(8)


def flip_float(holder: Any, key: str, draw: Callable[[int], int]) -> None:
    value = holder[key] if isinstance(holder, dict) else getattr(holder, key)
    (bits,) = struct.unpack("<Q", struct.pack("<d", value))
    (value,) = struct.unpack("<d", struct.pack("<Q", bits ^ 1 << draw(64)))
    holder.__setitem__(key, value) if isinstance(holder, dict) else setattr(holder, key, value)


def flip_int(holder: Any, key: str, draw: Callable[[int], int]) -> None:
    setattr(holder, key, getattr(holder, key) ^ 1 << draw(20))


def targets(job: Job) -> dict[str, list[tuple[str, Callable[..., None]]]]:
    """What can be flipped, by kind, with the name it must be reported by."""
    of_model = dict(job.model.named_parameters())
    names = {parameter: name for name, parameter in of_model.items()}
    found: dict[str, list[tuple[str, Callable[..., None]]]] = {
        "parameter": [(f"parameter {name}", partial(flip_in_tensor, p)) for name, p in of_model.items()],
        "buffer": [(f"buffer {name}", partial(flip_in_tensor, job.model.get_buffer(name))) for name in ("table", "count")],
        "rate": [("learning rate of group 0", partial(flip_float, job.optimizer.param_groups[0], "lr"))],
        "scale": [
            ("loss scale", partial(flip_float, job.scaling, "scale")),
            ("loss scaling good_updates", partial(flip_int, job.scaling, "good_updates")),
        ],
        "schedule": [("schedule last_epoch", partial(flip_int, job.scheduler, "last_epoch"))],
        "counter": [
            (f"counter {name}", partial(flip_int, job.trainer.state, name))
            for name in ("num_steps", "num_skipped", "iteration", "epoch")
        ],
    }
    for key in ("exp_avg", "exp_avg_sq", "step"):
        states = job.optimizer.state.items()
        found[key] = [(f"optimizer {key} of {names[p]}", partial(flip_in_tensor, state[key])) for p, state in states]
    return found


def flip_many_bits(way: Way, trials: int) -> tuple[list[Any], dict[str, int]]:
    job, due, loader = Job(way), [], shard(3)
    job.trainer.logger.disabled = True  # 126 errors are wanted
    job.trainer.add_event_handler(TrainEvents.STEP_COMPLETED, lambda: due.pop()() if due else None)
    job.state.attach(job.trainer, EVERY_UPDATE)
    job.trainer.run(loader, max_epochs=1)
    saved = job.save()
    missed, kinds = [], dict.fromkeys(targets(job), 0)
    for trial in range(trials):
        generator = torch.Generator().manual_seed(trial)  # both ranks know what one of them flips
        draw = partial(lambda generator, below: int(torch.randint(below, (), generator=generator)), generator)
        kind = [*kinds][trial % len(kinds)]
        choices = targets(job)[kind]
        name, flip = choices[draw(len(choices))]
        if draw(2) == idist.get_rank():
            due.append(partial(flip, draw))
        error = raised(StateMismatchError, partial(job.trainer.run, loader, max_epochs=2))
        kinds[kind] += 1
        if error is None or error.names != (name,) or (error.update != 4 and "iteration" not in name):
            missed.append((name, error and (error.update, error.names)))
        job.restore(saved)
    return missed, kinds


@pytest.mark.parametrize("number", [slow(45), nightly(126)])
@each_way
def test_every_flipped_bit_is_reported_by_the_next_check(way: Way, number: int) -> None:
    """One random bit of one tensor or number on one rank is an error on both, in the next update, and the name is right."""
    for missed, kinds in run_ranks(flip_many_bits, way, number):
        assert missed == []
        assert min(kinds.values()) >= number // 9, kinds
        assert len(kinds) == 9


def bytes_of(tensor: Tensor) -> Tensor:
    """The memory that `tensor` is a view of."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def views() -> dict[str, Callable[[Tensor], Tensor]]:
    """Ways of laying out the elements of a vector of length 2n."""
    return {
        "flat": lambda base: base,
        "scalar": lambda base: base[1],
        "empty": lambda base: base[:0],
        "transposed": lambda base: base.view(2, -1).t(),
        "strided": lambda base: base[1::2],
        "offset": lambda base: base[1:],
        "expanded": lambda base: base[1:2].expand(3, 5),
    }


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool]


@pytest.mark.slow
@settings(deadline=None, max_examples=400)
@given(st.data(), st.sampled_from(DTYPES), st.sampled_from([*views()]), st.sampled_from([1, 2, 3, 130, 390, 1600, 3084]))
def test_a_digest_is_of_the_bits_and_of_all_of_them(data: st.DataObject, dtype: torch.dtype, layout: str, half: int) -> None:
    """Whatever dtype, size and memory layout: equal elements have one digest, and any one flipped bit makes it another."""
    itemsize = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(half)
    content = torch.randint(2 if dtype is torch.bool else 256, (2 * half * itemsize,), dtype=torch.uint8, generator=generator)
    tensor = views()[layout](content.view(dtype))
    before = tensor_digests({"x": tensor})
    assert before == tensor_digests({"x": tensor.clone(memory_format=torch.contiguous_format)})
    assert before["x"] != tensor_digests({"y": tensor})["y"]  # or two tensors could change places
    assert before != tensor_digests({"x": tensor[None]})
    if layout != "empty":
        index = [data.draw(st.integers(0, size - 1)) for size in tensor.shape]
        element = tensor.storage_offset() + sum(i * step for i, step in zip(index, tensor.stride(), strict=True))
        byte, bit = data.draw(st.integers(0, itemsize - 1)), data.draw(st.integers(0, 7))
        bytes_of(tensor)[element * itemsize + byte] ^= 1 << bit
        assert before != tensor_digests({"x": tensor})


def test_a_digest_does_not_depend_on_where_a_tensor_begins() -> None:
    """It is read in words of 8 bytes, and a tensor of bytes may begin between two of them."""
    content = torch.arange(257 * 8 * 3).to(torch.uint8)
    memory = torch.zeros(len(content) + 17, dtype=torch.uint8)
    for start in range(17):
        tensor = memory[start : start + len(content)].copy_(content)
        assert tensor_digests({"x": tensor}) == tensor_digests({"x": content})


@pytest.mark.parametrize("length", [1, 15, 257 * 8 * 3, 257 * 8 * 3 + 7, 257 * 8 * 5 - 1])
def test_the_last_bytes_count(length: int) -> None:
    """Whatever does not fill a row or a word is in the digest too."""
    tensor = torch.arange(length).to(torch.uint8)
    before = tensor_digests({"x": tensor})
    for byte in range(max(0, length - 20), length):
        tensor[byte] ^= 128
        assert before != tensor_digests({"x": tensor})
        tensor[byte] ^= 128
    assert before == tensor_digests({"x": tensor})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [2, 4, 257 * 2, 257 * 4, 257 * 8, 257 * 16, 4096])
def test_flipped_signs_do_not_cancel(dtype: torch.dtype, length: int) -> None:
    """In a plain sum of words an even number of flipped signs may add up to nothing; here all, two and any half are seen."""
    tensor = torch.ones(length, dtype=dtype) * torch.tensor([1, -1], dtype=dtype).repeat(length // 2)
    half = torch.randperm(length, generator=torch.Generator().manual_seed(length))[: length // 2]
    digests = [tensor_digests({"x": tensor})["x"]]
    for part in (slice(None), slice(2), half):
        flipped = tensor.clone()
        flipped[part] *= -1
        digests.append(tensor_digests({"x": flipped})["x"])
    assert digests[0] not in digests[1:]


# --- what only one of the two sees ---


def disturb(job: Job, kind: str) -> None:
    parameter = job.model.first.weight if isinstance(job.model, Net) else job.model.weight
    if kind == "learning rate":
        job.optimizer.param_groups[0]["lr"] *= 1.01
    elif kind == "moment":
        job.optimizer.state[parameter]["exp_avg"] += 1e-3
    elif kind == "sign":
        parameter.detach().neg_()
    else:
        bytes_of(parameter)[2] ^= 1  # of the mantissa's 23 bits one that rounding does not take back


def diverge(way: Way, kind: str) -> tuple[list[float], Any]:
    job, norms = Job(way), []
    job.trainer.add_event_handler(TrainEvents.GRADIENTS_READY, lambda: norms.append(job.trainer.state.output.grad_norm))
    if idist.get_rank() == 1:
        job.trainer.add_event_handler(TrainEvents.STEP_COMPLETED(once=3), lambda: disturb(job, kind))
    GradNormConsistency().attach(job.trainer)
    job.state.attach(job.trainer, Events.ITERATION_COMPLETED(after=19))
    error = raised(StateMismatchError, lambda: job.trainer.run(shard(40), max_epochs=1))
    return norms, error and (error.update, error.names, error.ranks, str(error), job.trainer.state.iteration)


@pytest.mark.slow
@each_way
@pytest.mark.parametrize("kind", ["learning rate", "moment", "sign", "bit"])
def test_the_gradient_norm_never_shows_what_the_state_does(way: Way, kind: str) -> None:
    """17 updates on diverged replicas have the same norm on both ranks, bit by bit; the first digest says what differs."""
    (norms, error), other = run_ranks(diverge, way, kind)
    assert (norms, error) == other
    assert len(norms) >= 20
    update, names, ranks, message, done = error
    assert update == done == 20
    assert names[0].startswith("parameter ")
    assert ("learning rate of group 0" in names) == (kind == "learning rate")
    assert ranks == ()
    assert "no majority" in message
    assert names[0] in message


# --- no false alarm ---


def stay_clean(way: Way, max_epochs: int) -> tuple[Any, ...]:
    job = Job(way, accumulation_steps=lambda update: update % 3 + 1, max_grad_norm=1.0)
    GradNormConsistency().attach(job.trainer)
    job.state.attach(job.trainer, EVERY_UPDATE)
    job.trainer.run(shard(80 + 3 * idist.get_rank()), max_epochs=max_epochs)
    return job.trainer.state.iteration, job.model.norm.running_mean.tolist()


@pytest.mark.slow
@each_way
@pytest.mark.parametrize(("max_epochs", "least"), [(2, 80), nightly(25, 1000)])
def test_a_thousand_clean_updates_raise_nothing(way: Way, max_epochs: int, least: int) -> None:
    """Uneven ranks, accumulation, clipping, a schedule and a growing loss scale: nothing that is right looks wrong."""
    (updates, mean), (_, other_mean) = run_ranks(stay_clean, way, max_epochs)
    assert updates >= least
    assert mean != other_mean  # differs by design


# --- what it costs ---


def count_collectives(way: Way) -> list[dict[str, int]]:
    counts = []
    for attached in (False, True):
        job = Job(way)
        if attached:
            GradNormConsistency().attach(job.trainer)
            job.state.attach(job.trainer, EVERY_UPDATE)
        loader = shard(20)
        job.trainer.run(loader, max_iters=5)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            job.trainer.run(loader, max_iters=15)
        counts.append({event.key: event.count for event in profiler.key_averages() if event.key.startswith("gloo:")})
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "explicit"])
def test_updates_have_no_more_collectives(way: Way) -> None:
    """Ten updates with both checks in each have the collectives of ten without, and the end of the run one for each."""
    for without, with_checks in run_ranks(count_collectives, way):
        assert with_checks == without | {"gloo:all_reduce": without.get("gloo:all_reduce", 0) + 2}
        assert without["gloo:all_gather"] >= 10


# --- what the errors say ---


def one_of_three(victim: int, every: int) -> Any:
    job = Job("ddp")
    if idist.get_rank() == victim:
        job.trainer.add_event_handler(TrainEvents.STEP_COMPLETED(once=4), lambda: disturb(job, "moment"))
    job.state.attach(job.trainer, Events.ITERATION_COMPLETED(every=every))
    error = raised(StateMismatchError, lambda: job.trainer.run(shard(8), max_epochs=1))
    again = pickle.loads(pickle.dumps(error))
    return (again.update, again.names, again.ranks, str(again)), str(error)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_three_ranks_name_the_one_that_differs(victim: int) -> None:
    """With a majority the error says which rank is out of it, and which tensors; it survives pickling."""
    first, *others = run_ranks(one_of_three, victim, 2, world_size=3)
    assert others == [first, first]
    (update, names, ranks, message), before_pickling = first
    assert (update, names, ranks) == (4, ("optimizer exp_avg of first.weight",), (victim,))
    assert f"rank {victim} differs from the majority" in message
    assert "update 4: the ranks differ in optimizer exp_avg of first.weight;" in message == before_pickling


class Broken:
    """A gradient that is no longer what was reduced: on rank 1, in these updates, the one of the largest small parameter."""

    def __init__(self, way: Way, updates: range, factor: float = 1.5) -> None:
        self.job = Job(way, cuts.linear(), on_nonfinite="skip", loss_scaling=None)
        self.updates, self.factor = updates, factor
        if idist.get_rank() == 1 and way == "ddp":
            # No handler of an event may do this unnoticed.
            self.job.trainer.moments.before_norm.append(lambda _: self.change())
        elif idist.get_rank() == 1:
            self.unflatten, replicas.unflatten = replicas.unflatten, self.change_sum

    def change(self) -> None:
        if self.job.trainer.state.iteration in self.updates:
            self.job.model.weight.grad.data[0, -1] *= self.factor  # which torch does not count as a change
            self.job.model.bias.grad = self.job.model.bias.grad if self.factor else None

    def change_sum(self, *given: Any) -> None:
        self.unflatten(*given)
        if self.job.trainer.state.iteration in self.updates:
            self.job.model.weight.grad.data[0, -1] *= self.factor  # which torch does not count as a change


def break_gradients(way: Way, updates: range, factor: float, every: int, options: dict[str, Any]) -> Any:
    seen: list[float] = []
    completed: list[bool] = []
    job = Broken(way, updates, factor).job
    job.trainer.add_event_handler(Events.COMPLETED, lambda: completed.append(True))
    job.trainer.prepend_event_handler(TrainEvents.GRADIENTS_READY, lambda: seen.append(job.trainer.state.output.grad_norm))
    GradNormConsistency(**options).attach(job.trainer, TrainEvents.GRADIENTS_READY(every=every))
    error = raised(GradNormMismatchError, lambda: job.trainer.run(shard(6), max_epochs=1))
    if error is None:
        return None, seen, completed
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert error.norms[idist.get_rank()] == seen[error.update - 1]
    return (error.update, error.norms, error.parameters, str(error)), job.trainer.state.iteration, completed


@pytest.mark.sampled(3)
@each_way
@pytest.mark.parametrize(
    ("updates", "every", "compared", "named"),
    [
        (range(2, 9), 1, 2, True),
        (range(2, 3), 1, 2, False),
        (range(2, 9), 3, 3, True),
        (range(6, 7), 1, 6, False),
    ],
    ids=["from update 2 on", "only update 2", "every third", "the last update"],
)
def test_different_gradients_are_an_error_on_every_rank(
    way: Way, updates: range, every: int, compared: int, named: bool
) -> None:
    """The update after the one compared raises on both ranks with all norms, and with the parameter if it differs there too."""
    first, second = run_ranks(break_gradients, way, updates, 1.5, every, {})
    assert first == second
    (update, norms, parameters, message), iteration, completed = first
    assert (update, iteration) == (compared, compared)
    assert norms[0] != norms[1]
    assert parameters == (("weight",) if named else ())
    assert all(f"rank {rank}: {norm:.9g}" in message for rank, norm in enumerate(norms))
    assert ("gradients of weight differ" in message) == named
    assert "no gradient is the same" not in message  # that of the bias is
    assert completed == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("updates", "factor", "every", "options"),
    [
        (range(0), 1.5, 1, {}),
        (range(2, 3), 1.5, 3, {}),
        (range(2, 9), 1 + 1e-9, 1, {}),
        (range(2, 9), 1.5, 1, {"tolerance": 9}),
    ],
    ids=["nothing broken", "between checks", "within the tolerance", "a wide tolerance"],
)
def test_gradients_that_agree_are_let_through(updates: range, factor: float, every: int, options: dict[str, Any]) -> None:
    """An update that is not checked, and a difference below the tolerance, raise nothing."""
    for error, seen, completed in run_ranks(break_gradients, "ddp", updates, factor, every, options):
        assert error is None
        assert len(seen) == 6
        assert completed == [True]


@pytest.mark.slow
def test_a_norm_that_is_finite_on_one_rank_only_is_a_mismatch() -> None:
    """One rank skipped what the other did."""
    (update, norms, *_), *_ = run_ranks(break_gradients, "ddp", range(2, 9), math.inf, 1, {})[0]
    assert update == 2
    assert math.isfinite(norms[0])
    assert not math.isfinite(norms[1])


@pytest.mark.slow
def test_a_gradient_that_one_rank_lacks_is_named() -> None:
    """Whatever the norm of those it has."""
    for (update, _, parameters, _), *_ in run_ranks(break_gradients, "ddp", range(2, 9), 0.0, 1, {}):
        assert (update, parameters) == (2, ("weight", "bias"))


def mismatch_before_an_update_without_samples() -> Any:
    """The norms of update 2 differ; in update 3 rank 0 has samples without weight, and rank 1 none."""
    job = Broken("explicit", range(2, 3)).job
    GradNormConsistency().attach(job.trainer)
    *data, (x, y, w) = shard(3)
    if idist.get_rank() == 0:
        data.append((x, y, 0 * w))
    error = raised(GradNormMismatchError, lambda: job.trainer.run(data, max_epochs=1))
    again = raised(GradNormMismatchError, lambda: job.trainer.run(data, max_epochs=1))
    return error.update, error.parameters, error.all_differ, again, job.trainer.state.iteration


@pytest.mark.slow
def test_an_update_without_samples_names_no_parameter() -> None:
    """Its gradients say nothing of those before it. The error is raised once, also if the same run continues."""
    assert run_ranks(mismatch_before_an_update_without_samples) == [(2, (), False, None, 3)] * 2


@pytest.mark.parametrize(
    "norms",
    [
        *([1.0, 1.0], [0.0, 0.0], [-1.0, -1.0], [1.0, 1 + 1e-9], [1.0, 1 + 2e-6], [2e-6, 0.0], [1e-12, 0.0], [1e30, 1e30]),
        *([math.inf, math.inf], [math.inf, math.nan], [1.0, math.inf], [math.nan, 1.0], [-1.0, 1.0], [1e30, -1.0]),
        *([1.0, 1.0, 1.1], [1.0, 1.0, 1.0], [-1.0, math.inf], [5e-7, 6e-7]),
    ],
)
def test_the_device_objects_to_what_the_host_raises_for(norms: list[float]) -> None:
    """Both look at the same sums: an update that the host ends is one whose step the device has skipped."""
    check = GradNormConsistency()
    check._sent = None if norms[0] == -1.0 else (1, norms[0])
    try:
        raises = check._compare(norms) is not None
    except ValueError:
        raises = True
    assert bool(check.vetoes(torch.tensor(norms, dtype=torch.float64))) == raises


@pytest.mark.parametrize(
    ("ranks", "objects"),
    [
        ([(7, None), (7, None)], False),
        ([(7, None), (8, None)], True),
        ([(2**63, None), (2**63, None), (2**62, None)], True),
        ([None, None], False),
        ([None, (7, None)], True),
        ([(7, (5, 1)), (7, (5, -1))], False),
        ([(7, (5, 1)), (7, (6, -1))], True),
    ],
    ids=["equal", "different", "one of three", "no check", "missing on one", "equal shards", "different shards"],
)
def test_the_device_objects_to_states_that_differ(monkeypatch: pytest.MonkeyPatch, ranks: list[Any], objects: bool) -> None:
    """From the sum of what the ranks send: each a digest, and a digest of shards with a factor; or nothing."""
    monkeypatch.setattr(collectives, "world_size", lambda: len(ranks))
    model = nn.Linear(1, 1)
    check: Any = StateConsistency(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sums = torch.zeros(check.payload_size, dtype=torch.float64)
    for sent in ranks:
        check._sent = None
        if sent is not None:
            digest, shards = sent
            held = {} if shards is None else {"weight": shards[0]}
            holders: Any = {} if shards is None else {"weight": SimpleNamespace(factor=shards[1])}
            check._sent = _Check(1, {"bias": digest}, held, holders)
        sums += torch.tensor(check.payload(), dtype=torch.float64)
    assert bool(check.vetoes(sums)) == objects


def nonfinite_everywhere() -> int:
    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        output = weighted(model, micro_batch)
        return output._replace(loss=output.loss * math.nan) if job.trainer.state.iteration in (2, 3, 6) else output

    job = Job("ddp", cuts.linear(), forward, loss_scaling=None, on_nonfinite="skip")
    GradNormConsistency().attach(job.trainer)
    StateConsistency(job.model, job.optimizer).attach(job.trainer, EVERY_UPDATE)
    return job.trainer.run(shard(6), max_epochs=1).num_skipped


@pytest.mark.slow
def test_norms_that_are_not_finite_anywhere_are_no_mismatch() -> None:
    """They are the trainer's own policy's business."""
    assert run_ranks(nonfinite_everywhere) == [3, 3]


# --- what is compared, and when ---


def disturb_at_the_end() -> Any:
    job, completed = Job("ddp"), []
    job.trainer.add_event_handler(Events.COMPLETED, lambda: completed.append(True))
    if idist.get_rank() == 0:
        job.trainer.add_event_handler(TrainEvents.STEP_COMPLETED(once=6), lambda: disturb(job, "sign"))
    job.state.attach(job.trainer, Events.ITERATION_COMPLETED(every=3))
    error = raised(StateMismatchError, lambda: job.trainer.run(shard(6), max_epochs=1))
    return error.update, error.names, completed


@pytest.mark.slow
def test_the_last_check_is_settled_before_the_run_completes() -> None:
    """What no later update can carry is compared ahead of the handlers of COMPLETED."""
    assert run_ranks(disturb_at_the_end) == [(6, ("parameter first.weight",), [])] * 2


def change_a_sparse_gradient() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 2, sparse=True), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def forward(model: nn.Module, rows: Tensor) -> ForwardOutput:
        return ForwardOutput(model(rows).square().sum(), len(rows))

    trainer = create_trainer(model, optimizer, forward, protect=False, **with_options(reduction="explicit"))
    GradNormConsistency().attach(trainer)

    @trainer.on(TrainEvents.GRADIENTS_REDUCED)
    def change() -> None:
        if idist.get_rank() == 1 and trainer.state.iteration > 1:
            model[0].weight.grad.mul_(2)  # type: ignore[union-attr]

    data = [torch.tensor([0, 2, 2 + idist.get_rank()])] * 4
    error = raised(GradNormMismatchError, lambda: trainer.run(data))
    return error.update, error.parameters


@pytest.mark.slow
def test_a_sparse_gradient_that_differs_is_named() -> None:
    """Its norm is the norm of its rows."""
    assert run_ranks(change_a_sparse_gradient, timeout_seconds=120) == [(2, ("0.weight",))] * 2


def attach_unalike(which: str) -> str:
    job = Job("explicit")
    handler = GradNormConsistency() if which == "norm" else job.state
    moment = TrainEvents.GRADIENTS_READY if which == "norm" else Events.ITERATION_COMPLETED
    handler.attach(job.trainer, moment(every=2 + idist.get_rank()))
    return str(raised(ValueError, lambda: job.trainer.run(shard(9), max_epochs=1)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "found"),
    [("norm", "GradNormConsistency had no norm on ranks [1]"), ("state", "StateConsistency had a digest on 1 of 2 ranks")],
    ids=["norm", "state"],
)
def test_checks_in_different_updates_are_an_error(which: str, found: str) -> None:
    """Ranks that check at different times would never compare anything."""
    first, second = run_ranks(attach_unalike, which)
    assert first == second
    assert first.startswith("event must fire in the same updates on all ranks")
    assert found in first


def lose_count() -> Any:
    job = Job("explicit")
    if idist.get_rank() == 1:
        job.trainer.add_event_handler(
            TrainEvents.STEP_COMPLETED(once=3), lambda: setattr(job.trainer.state, "iteration", job.trainer.state.iteration + 1)
        )
    job.state.attach(job.trainer, Events.ITERATION_COMPLETED(every=2))
    error = raised(StateMismatchError, lambda: job.trainer.run(shard(9), max_epochs=1))
    return error.update, error.names


@pytest.mark.slow
def test_a_counter_that_moves_the_check_itself_is_named() -> None:
    """A rank whose `iteration` differs checks at another time than the others, which is how it shows."""
    assert run_ranks(lose_count) == [(4, ("counter iteration",))] * 2


class Owner(nn.Linear):
    """A linear model with a buffer that holds what the rank saw last."""

    def __init__(self) -> None:
        super().__init__(cuts.FEATURES, 1, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.fill_(float(x.sum()))
        return super().forward(x)


def own_buffer(own: tuple[str, ...]) -> str:
    job = Job("explicit", Owner())
    StateConsistency(job.model, job.optimizer, own_buffers=own).attach(job.trainer, EVERY_UPDATE)
    return str(raised(StateMismatchError, lambda: job.trainer.run(shard(3), max_epochs=1)))


@pytest.mark.slow
def test_a_buffer_of_a_ranks_own_can_be_left_out() -> None:
    """A buffer that forward fills from a rank's data is reported with the way out, and left alone once it is named."""
    for message in run_ranks(own_buffer, ()):
        assert "differ in buffer seen (name it in own_buffers if" in message
    assert run_ranks(own_buffer, ("seen",)) == ["None", "None"]


def distributed_tensors(changed: str) -> Any:
    job = Job("explicit", cuts.linear())
    mesh = init_device_mesh("cpu", (2,))
    job.trainer.run(shard(2), max_epochs=1)
    job.optimizer.state[job.model.weight] |= {
        "whole": distribute_tensor(torch.arange(6.0), mesh, [Replicate()]),
        "shard": distribute_tensor(torch.arange(6.0), mesh, [Shard(0)]),
    }
    if idist.get_rank() == 1:
        job.optimizer.state[job.model.weight][changed].to_local()[0] += 1
    job.state.attach(job.trainer, EVERY_UPDATE)
    error = raised(StateMismatchError, lambda: job.trainer.run(shard(2), max_epochs=2))
    return error and error.names


@pytest.mark.slow
def test_sharded_tensors_are_left_out_and_replicated_ones_are_not() -> None:
    """Shards differ by design; there is nothing to compare them with."""
    assert run_ranks(distributed_tensors, "shard") == [None, None]
    assert run_ranks(distributed_tensors, "whole") == [("optimizer whole of weight",)] * 2


def replicated_shards(part: str | None, victims: list[int], last: bool) -> Any:
    """Two shards, each held by two ranks (HSDP); after update 3 a bit flips in the shards of these ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(cuts.FEATURES, 4), nn.Linear(4, 1)).double()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard")))
    job = Job("explicit", model, reduction="fsdp")

    def flip() -> None:
        weight = model[0].weight
        tensor = weight if part == "parameter" else job.optimizer.state[weight]["exp_avg"]
        bytes_of(tensor.to_local())[9] ^= 1

    if idist.get_rank() in victims:
        job.trainer.add_event_handler(TrainEvents.STEP_COMPLETED(once=3), flip)
    job.state.attach(job.trainer, EVERY_UPDATE)
    error = raised(StateMismatchError, lambda: job.trainer.run(shard(3 if last else 6), max_epochs=1))
    return error and (error.update, error.names, error.ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "victims", "last", "expected"),
    [
        (None, [], False, None),
        ("parameter", [3], False, (3, ("parameter 0.weight",), ())),
        ("moment", [0], True, (3, ("optimizer exp_avg of 0.weight",), ())),
    ],
    ids=["none differs", "a parameter", "a moment, at the end"],
)
def test_shards_that_several_ranks_hold_are_compared(part: Any, victims: list[int], last: bool, expected: Any) -> None:
    """Four ranks in two copies of two shards (HSDP): a bit that differs between the copies is an error on all, by name."""
    assert run_ranks(replicated_shards, part, victims, last, world_size=4) == [expected] * 4


def of_six_ranks(monkeypatch: pytest.MonkeyPatch, digests: list[int], whole: list[int]) -> tuple[StateConsistency, Tensor]:
    """A handler, and what it has of six ranks with three copies of two shards, of which ranks 0, 2 and 4 hold the first."""
    holders = [{"weight": _Shard((rank % 2,), (rank // 2,), copies=3)} if digests else {} for rank in range(6)]
    of_shards = [{"weight": digest} for digest in digests] or [{}] * 6
    checks = [_Check(1, {"bias": whole[rank]}, of_shards[rank], holders[rank]) for rank in range(6)]
    monkeypatch.setattr("ignite_train.ranks.collectives.gather_objects", lambda _: checks)
    monkeypatch.setattr("ignite_train.ranks.collectives.world_size", lambda: 6)
    model = cuts.linear()
    check = StateConsistency(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sums = torch.zeros(check.payload_size, dtype=torch.float64)
    for check._sent in checks:
        sums += torch.tensor(check.payload(), dtype=torch.float64)
    return check, sums


@pytest.mark.parametrize("digests", [[], [1, 2] * 3, [2**64 - 1, 2**63 + 5] * 3], ids=["no shards", "small", "large"])
def test_ranks_and_copies_that_agree_raise_nothing(monkeypatch: pytest.MonkeyPatch, digests: list[int]) -> None:
    """Whatever the digests are: the step is not held back, and nothing is compared again."""
    for whole in (0, 7, 2**64 - 1):
        check, sums = of_six_ranks(monkeypatch, digests, [whole] * 6)
        monkeypatch.setattr("ignite_train.ranks.collectives.gather_objects", lambda _: pytest.fail("is compared again"))
        assert not bool(check.vetoes(sums))
        check.on_reduced(sums.tolist())


@pytest.mark.parametrize(
    ("digests", "whole", "expected"),
    [
        ([1, 2, 1, 2, 3, 2], [7] * 6, (("weight",), (4,))),
        ([1, 2, 1, 2, 3, 4], [7] * 6, (("weight",), (4, 5))),
        ([1, 2, 1, 2, 1 + 2**63, 2], [7] * 6, (("weight",), (4,))),
        ([1, 2, 3, 2, 4, 2], [7] * 6, (("weight",), ())),
        ([1, 2, 1, 2, 3, 2], [7, 7, 7, 7, 7, 8], (("weight", "bias"), (4, 5))),
        ([1, 2, 1, 2, 1, 2], [7, 7, 7, 7, 7, 8], (("bias",), (5,))),
        ([1, 2, 1, 2, 1, 2], [7, 7, 7, 8, 8, 8], (("bias",), ())),
    ],
    ids=["one copy", "one of each shard", "in one bit", "all copies", "a copy and more", "no copy", "no majority"],
)
def test_with_three_copies_of_a_shard_the_rank_that_differs_is_named(
    monkeypatch: pytest.MonkeyPatch, digests: list[int], whole: list[int], expected: Any
) -> None:
    """Six ranks in three copies of two shards, of which ranks 0, 2 and 4 hold the first: each is compared with its copies."""
    check, sums = of_six_ranks(monkeypatch, digests, whole)
    assert bool(check.vetoes(sums))
    with pytest.raises(StateMismatchError) as caught:
        check.on_reduced(sums.tolist())
    assert (caught.value.names, caught.value.ranks) == expected


def go_on_after_a_failure() -> Any:
    """A check is on its way when the update that carries it fails on both ranks."""
    job, failures = Job("ddp"), [1]

    def fail() -> None:
        if job.trainer.state.iteration == 4 and failures:
            failures.pop()
            raise RuntimeError("once")

    job.trainer.add_event_handler(TrainEvents.BACKWARD_COMPLETED, fail)
    if idist.get_rank() == 1:
        job.trainer.add_event_handler(TrainEvents.STEP_COMPLETED(once=3), lambda: disturb(job, "moment"))
    job.state.attach(job.trainer, Events.ITERATION_COMPLETED(every=3))
    assert raised(RuntimeError, lambda: job.trainer.run(shard(5), max_epochs=1)).args == ("once",)
    error = raised(StateMismatchError, lambda: job.trainer.run(shard(5), max_epochs=1))
    return error.update, error.names


@pytest.mark.slow
def test_a_check_survives_the_update_that_carries_it() -> None:
    """The verdict comes with the first update that goes through."""
    assert run_ranks(go_on_after_a_failure) == [(3, ("optimizer exp_avg of first.weight",))] * 2


def break_off_after_a_mismatch(way: Way) -> Any:
    """The norms of update 3 differ, and update 4, which carries them, fails on both ranks after its last backward."""
    job, failures = Broken(way, range(3, 4)).job, [1]

    def fail() -> None:
        if job.trainer.state.iteration == 4 and failures:
            failures.pop()
            raise RuntimeError("once")

    job.trainer.add_event_handler(TrainEvents.BACKWARD_COMPLETED, fail)
    GradNormConsistency().attach(job.trainer)
    assert raised(RuntimeError, lambda: job.trainer.run(shard(6), max_epochs=1)).args == ("once",)
    error = raised(GradNormMismatchError, lambda: job.trainer.run(shard(6), max_epochs=1))
    return error and (error.update, error.norms)


@pytest.mark.slow
@each_way
def test_a_norm_is_sent_again_after_an_update_that_was_broken_off(way: Way) -> None:
    """The next update that goes through brings the verdict on the one before."""
    first, second = run_ranks(break_off_after_a_mismatch, way)
    assert first == second
    update, norms = first
    assert update == 3
    assert norms[0] != norms[1]


def test_a_single_process_carries_nothing(build: Callable[..., Any], micro_batches: list[Any]) -> None:
    """There is nobody to compare with: no piggyback, and the same training."""
    plain, checked = build(), build()
    GradNormConsistency().attach(checked.trainer)
    StateConsistency(checked.model, checked.optimizer).attach(checked.trainer, EVERY_UPDATE)
    for setup in (plain, checked):
        setup.trainer.run(micro_batches, max_epochs=2)
    assert checked.trainer.piggybacks == []
    assert checked.contents() == plain.contents()


def test_wrong_arguments() -> None:
    """A caller's mistake is named before anything runs."""
    model = Owner()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="tolerance must be greater than 0"):
        GradNormConsistency(tolerance=0)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        StateConsistency(optimizer, model)
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer"):
        StateConsistency(model, model)
    with pytest.raises(ValueError, match="own_buffers must be names of buffers of model, got 'sen'; did you mean 'seen'"):
        StateConsistency(model, optimizer, own_buffers=["sen"])
