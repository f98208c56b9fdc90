"""One micro-batch on one rank is out of memory, not finite or missing: all ranks know, and nothing is left of it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import cuts
from ignite_train import (
    ForwardOutput,
    GaveUpError,
    LossScaleFloorError,
    NonFiniteError,
    TorchLossScaling,
    TrainEvents,
    UpdateOptions,
    create_evaluator,
    create_trainer,
)
from ignite_train.ranks.crossing import Crossing
from ignite_train.update.out_of_memory import RecoverFromOutOfMemory
from ranks import RanksFailedError, run_ranks

WAYS = ["ddp", "explicit", "fsdp"]


class Net(nn.Module):
    """Dropout and BatchNorm: an attempt that is not taken back leaves traces in random state and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.hidden, self.head = nn.BatchNorm1d(cuts.FEATURES), nn.Linear(cuts.FEATURES, 8), nn.Linear(8, 1)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.dropout(self.hidden(self.norm(x)), 0.3, self.training))


class Explode(torch.autograd.Function):
    """The identity, whose backward runs out of memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> Any:  # noqa: ARG004
        raise torch.OutOfMemoryError("no room in backward")


def wrap(model: nn.Module, way: str) -> Any:
    """The model as this way of crossing ranks wants it."""
    if idist.get_world_size() == 1 or way == "explicit":
        return model
    if way == "ddp":
        return DistributedDataParallel(model)
    return fully_shard(model, mesh=init_device_mesh("cpu", (idist.get_world_size(),)))


def whole(model: nn.Module) -> list[float]:
    """All parameters and buffers as numbers."""
    tensors = [t.full_tensor() if isinstance(t, DTensor) else t for t in model.state_dict().values()]
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors]).tolist()


# --- out of memory ---


def run_out_of_memory(policy: str, site: str, failing: int, at: int, sizes: list[list[int]]) -> dict[str, Any]:
    """Two epochs; micro-batch `at` of rank `failing` fails, or, with policy "weightless", has weight and gradient zero."""
    weightless = policy == "weightless"

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        strikes = idist.get_rank() == failing and trainer.state.num_micro_batches == at
        if strikes and weightless:
            raise torch.OutOfMemoryError("before anything has happened")
        if strikes and site == "large":
            strikes = len(micro_batch[0]) > 4
        if strikes and site == "forward":
            model(micro_batch[0])  # touches buffers and random state
            raise torch.OutOfMemoryError("no room in forward")
        output = cuts.forward(model, micro_batch)
        if strikes and site == "large":
            raise torch.OutOfMemoryError("too many samples")
        # the loss also goes through the head alone, so that its gradients are there when backward fails further up
        loss = output.loss if not strikes else Explode.apply(output.loss * 0.5) + output.loss * 0.5
        return output._replace(loss=loss)

    model = Net()
    several = idist.get_world_size() > 1
    trainer = create_trainer(
        wrap(model, "explicit"),
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        forward,
        accumulation_steps=3,
        options=UpdateOptions(reduction="explicit" if several else "auto", on_out_of_memory="skip" if weightless else policy),
    )
    seen: list[Any] = []
    trainer.add_event_handler(TrainEvents.OUT_OF_MEMORY, lambda: seen.append((trainer.state.iteration, trainer.state.output)))
    trainer.run(cuts.shard(sizes), max_epochs=2)
    events = [(update, output.num_out_of_memory, output.num_micro_batches) for update, output in seen]
    return {"parameters": whole(model), "events": events, "random": torch.get_rng_state().tolist()}


@pytest.mark.slow
@pytest.mark.parametrize("site", ["forward", "backward"])
@pytest.mark.parametrize(("failing", "at"), [(0, 1), (1, 3), (1, 5)], ids=["first", "last-of-group", "middle"])
def test_skip_is_bitwise_a_micro_batch_of_weight_zero(site: str, failing: int, at: int) -> None:
    """Dropped wherever it failed: parameters, buffers and random state are those of a run in which it had no weight."""
    sizes = [[8] * 4, [8] * 4]
    skipped = run_ranks(run_out_of_memory, "skip", site, failing, at, sizes)
    weightless = run_ranks(run_out_of_memory, "weightless", site, failing, at, sizes)
    for rank in range(2):
        assert skipped[rank]["parameters"] == weightless[rank]["parameters"]
        assert skipped[rank]["random"] == weightless[rank]["random"]
    assert skipped[0]["events"] == skipped[1]["events"]
    update = 1 if at <= 3 else 3  # an epoch is two updates, of 3 + 3 and of 1 + 1 micro-batches
    assert skipped[0]["events"] == [(update, 1, 5)]


class Masked(nn.Module):
    """With tensors of which torch takes no norm: a mask and an index as attributes, and frozen quantised weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.mask, self.places, self.none = torch.tensor([True, False]), torch.arange(2), torch.arange(0)
        for dtype in (torch.int8, torch.float8_e4m3fn):
            self.register_parameter(str(dtype)[6:], nn.Parameter(torch.ones(2).to(dtype), requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(self.mask, self.layer(x), self.places.float())


@pytest.mark.parametrize("policy", ["skip", "split"])
def test_a_model_may_have_tensors_without_a_norm(policy: Any) -> None:
    """The look before a forward, which recovery needs, does not end a run that has enough memory."""
    model, fails = Masked(), [False, True, False]

    def forward(model: nn.Module, x: torch.Tensor) -> ForwardOutput:
        if fails and fails.pop(0):
            raise torch.OutOfMemoryError("no room")
        return ForwardOutput(model(x).square().sum(), len(x))

    options = UpdateOptions(on_out_of_memory=policy)
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward, options=options)
    trainer.run([torch.ones(4, 3)] * 3, max_epochs=1)
    assert trainer.state.iteration == 3
    assert trainer.state.num_steps == (2 if policy == "skip" else 3)


@pytest.mark.parametrize("site", ["forward", "backward"])
@pytest.mark.parametrize("policy", ["skip", "split"])
def test_no_backward_is_told_of_for_a_dropped_micro_batch(policy: str, site: str) -> None:
    """Its graph is freed before the next forward. A micro-batch that was halved is told of once, after its last part."""
    failed: list[weakref.ref[torch.Tensor]] = []

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        assert all(loss() is None for loss in failed), "the graph of a failed attempt holds memory"
        output = cuts.forward(model, micro_batch)
        fails = trainer.state.num_micro_batches == 2 and len(micro_batch[0]) > 4
        if fails and site == "forward":
            raise torch.OutOfMemoryError("no room in forward")
        if fails:
            output = output._replace(loss=Explode.apply(output.loss))
            failed.append(weakref.ref(output.loss))
        return output

    model, told = cuts.linear(), []
    optimizer, options = torch.optim.SGD(model.parameters(), lr=cuts.LEARNING_RATE), UpdateOptions(on_out_of_memory=policy)  # type: ignore[arg-type]
    trainer = create_trainer(model, optimizer, forward, accumulation_steps=3, options=options)

    def tell(trainer: Any, name: str) -> None:
        output = trainer.state.forward_output
        told.append((name[:3], trainer.state.num_micro_batches, None if output is None else output.sample_size))

    for event in (TrainEvents.MICRO_BATCH_STARTED, TrainEvents.FORWARD_COMPLETED, TrainEvents.BACKWARD_COMPLETED):
        trainer.add_event_handler(event, tell, event.name)
    weights = [cuts.forward(model, one).sample_size for one in cuts.cut(cuts.samples(), [3, 4, 4, 2])]
    trainer.run(cuts.cut(cuts.samples(), [3, 8, 2]), max_epochs=1)
    first = [("MIC", 1, None), ("FOR", 1, weights[0]), ("BAC", 1, weights[0])]
    whole = [("FOR", 2, weights[1] + weights[2])] if site == "backward" else []
    halves = [("FOR", 2, weights[1]), ("FOR", 2, weights[2]), ("BAC", 2, weights[2])] if policy == "split" else []
    assert told[:3] == first
    assert len(failed) == (site == "backward")
    assert told[3:-3] == [("MIC", 2, None), *whole, *halves]
    assert [entry[:2] for entry in told[-3:]] == [("MIC", 3), ("FOR", 3), ("BAC", 3)]


def split_in_one_process(fails: bool) -> dict[str, Any]:
    seen: list[int] = []

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        seen.append(len(micro_batch[0]))
        if fails and len(micro_batch[0]) > 4:
            raise torch.OutOfMemoryError("too many samples")
        return cuts.forward(model, micro_batch)

    model = cuts.linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=cuts.LEARNING_RATE)
    trainer = create_trainer(
        model, optimizer, forward, accumulation_steps=2, options=UpdateOptions(on_out_of_memory="split" if fails else "raise")
    )
    trainer.run(cuts.cut(cuts.samples(), [15, 3, 16, 1, 10, 19]), max_epochs=1)
    return {"parameters": whole(model), "seen": seen, "output": trainer.state.output}


def test_split_is_exact_and_remembers_what_fitted() -> None:
    """Halved until they fit, micro-batches make the update of the whole ones; later ones are cut beforehand."""
    split, together = split_in_one_process(fails=True), split_in_one_process(fails=False)
    assert split["parameters"] == pytest.approx(together["parameters"], rel=1e-13)
    assert split["output"].loss == pytest.approx(together["output"].loss, rel=1e-14)
    assert split["output"].sample_size == together["output"].sample_size
    assert split["seen"][:2] == [15, 8]  # 15 fails, then its first half, 8
    assert max(split["seen"][2:]) <= 8
    assert split["seen"].count(8) == 1


def test_split_cuts_what_is_as_long_as_the_samples() -> None:
    """Each half has the numbers, names and tensors of another length unchanged."""
    seen: list[tuple[list[float], list[float], float, str, list[float]]] = []

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        x, y, temperature, name, table = (micro_batch[key] for key in ("x", "y", "temperature", "name", "table"))
        if len(x) > 2:
            raise torch.OutOfMemoryError("too many samples")
        seen.append((x[:, 0].tolist(), y.tolist(), temperature.item(), name, table.tolist()))
        return ForwardOutput((model(x)[:, 0] - y).square().sum(), len(x))

    model = nn.Linear(1, 1)
    trainer = create_trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), forward, options=UpdateOptions(on_out_of_memory="split")
    )
    micro_batch = {
        "temperature": torch.tensor(0.5),
        "name": "first",
        "x": torch.arange(5.0)[:, None],
        "y": torch.arange(5.0, 10.0),
        "table": torch.arange(3.0),
    }
    trainer.run([micro_batch], max_epochs=1)
    rest = (0.5, "first", [0.0, 1.0, 2.0])
    assert seen == [([0.0, 1.0], [5.0, 6.0], *rest), ([2.0], [7.0], *rest), ([3.0, 4.0], [8.0, 9.0], *rest)]
    assert trainer.state.update_output is not None
    assert trainer.state.update_output.sample_size == 5


@pytest.mark.parametrize("policy", ["skip", "split"])
def test_an_accelerator_gives_back_what_a_failed_attempt_has_held(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its allocator keeps memory in pieces that may be too small for the next attempt, so it is emptied after each failure."""
    emptied: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: emptied.append(len(seen)))
    seen: list[int] = []

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        seen.append(len(micro_batch[0]))
        if len(micro_batch[0]) > 4:
            raise torch.OutOfMemoryError("too many samples")
        return cuts.forward(model, micro_batch)

    model = cuts.linear()
    options = UpdateOptions(on_out_of_memory=policy)  # type: ignore[arg-type]
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=cuts.LEARNING_RATE), forward, options=options)
    trainer.run(cuts.cut(cuts.samples(), [8, 5]), max_epochs=1)
    assert seen == ([8, 5] if policy == "skip" else [8, 4, 4, 3, 2])
    assert emptied == ([1, 2] if policy == "skip" else [1])


def test_split_goes_down_to_single_samples() -> None:
    """Where no two of them fit, and the update is that of all of them together."""

    def run(policy: str) -> tuple[list[float], list[int]]:
        seen: list[int] = []

        def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
            seen.append(len(micro_batch[0]))
            if policy == "split" and len(micro_batch[0]) > 1:
                raise torch.OutOfMemoryError("too many samples")
            return cuts.forward(model, micro_batch)

        model = cuts.linear()
        options = UpdateOptions(on_out_of_memory=policy)  # type: ignore[arg-type]
        trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=cuts.LEARNING_RATE), forward, options=options)
        trainer.run(cuts.cut(cuts.samples(), [2, 3]), max_epochs=1)
        return whole(model), seen

    weights, seen = run("split")
    assert seen == [2, 1, 1, 1, 1, 1]
    assert weights == pytest.approx(run("raise")[0], rel=1e-13)


def test_a_micro_batch_that_forward_writes_into_is_not_split() -> None:
    """Its halves would be what forward has made of it; where it writes into a copy they are what they were."""

    def forward(model: nn.Module, micro_batch: Any, *, into: str = "it") -> ForwardOutput:
        x, *rest = micro_batch
        x = x.mul_(2) if into == "it" else x.clone().mul_(2)
        if len(x) > 4:
            raise torch.OutOfMemoryError("too many samples")
        return cuts.forward(model, (x, *rest))

    for into in ("it", "copy"):
        model = cuts.linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=cuts.LEARNING_RATE)
        way = UpdateOptions(on_out_of_memory="split")
        trainer = create_trainer(model, optimizer, partial(forward, into=into), options=way)
        data = cuts.cut(cuts.samples(), [8, 8])
        with nullcontext() if into == "copy" else pytest.raises(ValueError, match="forward has written into its tensors"):
            trainer.run([(x.clone(), *rest) for x, *rest in data], max_epochs=1)
        assert trainer.state.num_steps == (2 if into == "copy" else 0)


def split_on_ranks(fails: bool) -> list[float]:
    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        if fails and idist.get_rank() == 1 and len(micro_batch[0]) > 3:
            raise torch.OutOfMemoryError("too many samples")
        return cuts.forward(model, micro_batch)

    model = cuts.linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=cuts.LEARNING_RATE)
    policy = "split" if fails else "raise"
    trainer = create_trainer(
        model,
        optimizer,
        forward,
        accumulation_steps=2,
        options=UpdateOptions(reduction="explicit", on_out_of_memory=policy, give_up_after=None),
    )
    trainer.run(cuts.shard([[8] * 4, [8] * 4]), max_epochs=2)
    return whole(model)


def test_splitting_on_one_rank_is_exact_on_both() -> None:
    """Rank 1 fits three samples at a time, rank 0 eight: the updates are those of enough memory."""
    split = run_ranks(split_on_ranks, True)
    assert split[0] == split[1]
    assert split[0] == pytest.approx(run_ranks(split_on_ranks, False)[0], rel=1e-13)


def test_a_single_sample_that_does_not_fit_is_an_error() -> None:
    """There is nothing left to halve."""

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        raise torch.OutOfMemoryError("never enough")

    model = cuts.linear()
    trainer = create_trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), forward, options=UpdateOptions(on_out_of_memory="split")
    )
    with pytest.raises(ValueError, match="must be able to halve"):
        trainer.run(cuts.cut(cuts.samples(), [4]), max_epochs=1)


def test_raise_adds_advice() -> None:
    """By default the error goes through, with what to do about it."""

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        raise torch.OutOfMemoryError("no room")

    model = cuts.linear()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward)
    with pytest.raises(torch.OutOfMemoryError, match="no room") as caught:
        trainer.run(cuts.cut(cuts.samples(), [4]), max_epochs=1)
    assert "more accumulation_steps" in caught.value.__notes__[0]


def test_raise_shows_the_memory_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the error has the allocator's summary with it."""

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "memory_summary", lambda: "allocated: all of it")
        raise torch.OutOfMemoryError("no room")

    model = cuts.linear()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward)
    with pytest.raises(torch.OutOfMemoryError, match="no room") as caught:
        trainer.run(cuts.cut(cuts.samples(), [4]), max_epochs=1)
    assert caught.value.__notes__[1] == "allocated: all of it"


def test_out_of_memory_is_known_by_its_type() -> None:
    """A RuntimeError that speaks of memory is raised, also the CPU allocator's own; a forward can say what it means."""
    calls: list[int] = []

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        calls.append(1)
        if len(calls) == 2:
            try:
                torch.empty(2**55)
            except RuntimeError as error:
                raise (torch.OutOfMemoryError("on the CPU") if says_so else error) from None
        return cuts.forward(model, micro_batch)

    for says_so in (True, False):
        calls.clear()
        model = cuts.linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = create_trainer(
            model, optimizer, forward, accumulation_steps=2, options=UpdateOptions(on_out_of_memory="skip")
        )
        with nullcontext() if says_so else pytest.raises(RuntimeError, match="can't allocate memory"):
            trainer.run(cuts.cut(cuts.samples(), [4, 4]))
        assert trainer.state.num_steps == int(says_so)


def refused(way: str) -> str:
    model = wrap(Net(), way)
    with pytest.raises(ValueError, match="on_out_of_memory must be 'raise'") as caught:
        create_trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), cuts.forward, options=UpdateOptions(on_out_of_memory="skip")
        )
    return str(caught.value)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_recovery_is_refused_where_others_would_wait(way: str) -> None:
    """Inside hooks a rank that leaves its backward for lack of memory leaves the others waiting: refused, with the remedy."""
    for message in run_ranks(refused, way):
        assert "reduction='explicit'" in message


def recover_under_hooks() -> None:
    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        if idist.get_rank() == 1 and trainer.state.iteration == 2:
            raise torch.OutOfMemoryError("no room")
        return cuts.forward(model, micro_batch)

    model = cuts.linear()
    ddp, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_trainer(ddp, optimizer, forward, options=UpdateOptions(reduction="ddp"))
    process: Any = trainer.process
    gather = process.gather
    gather.recovery = RecoverFromOutOfMemory(gather.passes, gather.gradients, gather.statistics)  # what create_trainer refuses
    trainer.run(cuts.shard([[8] * 4, [8] * 4]), max_epochs=1)


def _kinds_of(crossing: type[Crossing]) -> set[type[Crossing]]:
    return {crossing}.union(*map(_kinds_of, crossing.__subclasses__()))


def test_a_crossing_with_a_context_allows_no_recovery() -> None:
    """A forward and its backward run in the context of the crossing or in that of the recovery, so there are never both."""
    kinds = _kinds_of(Crossing)
    with_context = {kind for kind in kinds if kind.context is not Crossing.context}

    assert {"DDPCrossing", "FSDPCrossing"} <= {kind.__name__ for kind in with_context}
    assert [kind.__name__ for kind in with_context if kind.may_drop_micro_batches] == []


@pytest.mark.slow
def test_without_the_refusal_the_others_wait() -> None:
    """Why it is refused: rank 1 drops its micro-batch, and the ranks wait for one another in different collectives."""
    with pytest.raises(RanksFailedError):
        run_ranks(recover_under_hooks, timeout_seconds=6)


def always_out_of_memory(give_up_after: int) -> tuple[int, int]:
    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        if idist.get_rank() == 1 and trainer.state.iteration > 1:
            raise torch.OutOfMemoryError("again")
        return cuts.forward(model, micro_batch)

    model = cuts.linear()
    trainer = create_trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        forward,
        options=UpdateOptions(reduction="explicit", on_out_of_memory="skip", give_up_after=give_up_after),
    )
    with pytest.raises(GaveUpError, match="in a row that ran out of memory") as caught:
        trainer.run(cuts.shard([[4] * 8, [4] * 8]), max_epochs=1)
    return caught.value.update, trainer.state.num_steps


@pytest.mark.slow
def test_running_out_again_and_again_ends_all_ranks() -> None:
    """The third update in a row that lost a micro-batch on one rank ends both, before its step."""
    assert run_ranks(always_out_of_memory, 3) == [(4, 3)] * 2


# --- not finite ---


def not_finite(site: str, way: str, scaled: bool) -> tuple[str, int, int]:
    """A value that is not finite on rank 1 in the second micro-batch of update 2."""
    model = Net()
    wrapped = wrap(model, way)

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        x, y, w = micro_batch
        poisoned = bool((x == 77).any())
        output = cuts.forward(model, (torch.where(x == 77, 0.0, x), y, w)) if poisoned and site != "input" else None
        output = output or cuts.forward(model, micro_batch)
        if poisoned and site == "loss":
            output = output._replace(loss=output.loss * float("nan"))
        return output

    data = cuts.shard([[4] * 4, [4] * 4])
    if idist.get_rank() == 1:
        data[3][0][1, 2] = float("inf") if site == "input" else 77.0
        if site in ("output", "gradient"):
            child = model.hidden

            def strike(_module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
                active = trainer.state.iteration == 2 and torch.equal(flag[0], torch.ones(1))
                if not active:
                    return None
                if site == "output":
                    return output + float("inf")
                output.register_hook(lambda gradient: gradient * float("nan"))
                return None

            child.register_forward_hook(strike)
            model.norm.register_forward_pre_hook(
                lambda _module, inputs: flag.__setitem__(0, torch.ones(1) if marks(inputs[0]) else torch.zeros(1))
            )
    flag = [torch.zeros(1)]
    second = data[3][0].clone()

    def marks(x: torch.Tensor) -> bool:
        return x.shape == second.shape and torch.equal(x, torch.where(second == 77, 0.0, second))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    policy = TorchLossScaling(2.0, min_scale=2.0) if scaled else None
    trainer = create_trainer(
        wrapped, optimizer, forward, accumulation_steps=2, options=UpdateOptions(reduction=way), loss_scaling=policy
    )
    with pytest.raises(LossScaleFloorError if scaled else NonFiniteError) as caught:
        trainer.run(data, max_epochs=1)
    return str(caught.value), trainer.state.num_steps, int(model.norm.num_batches_tracked)


EXPECTED = {
    "input": "micro-batch 2 of 2: inf in the micro-batch itself",
    "output": "micro-batch 2 of 2: inf in the output of module 'hidden' (Linear)",
    "loss": "micro-batch 2 of 2: NaN in the loss",
    "gradient": "micro-batch 2 of 2: NaN in the gradient of the output of module 'hidden' (Linear)",
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("site", EXPECTED)
@pytest.mark.parametrize("scaled", [False, True], ids=["unscaled", "at-the-floor"])
def test_a_value_that_is_not_finite_is_found(site: str, way: str, scaled: bool) -> None:
    """Every rank's error names the rank, the micro-batch and the first module or parameter that is not finite.

    So does that of a loss scale that is at its floor.
    """
    first, second = run_ranks(not_finite, site, way, scaled)
    assert first == second
    message, num_steps, num_forwards = first
    assert f"(rank 1, {EXPECTED[site]}" in message
    assert "rank 0" not in message
    assert "\n" not in message
    assert num_steps == 1
    # Running again to find it left no trace in the buffers. With a loss scale they are copied, and the update is put back.
    assert num_forwards == (2 if scaled else 4)


class Logarithm(nn.Module):
    """NaN where `sign` makes its input negative."""

    sign = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.sign).log()


@pytest.mark.parametrize(
    ("site", "note"),
    [
        ("forward", "run again: micro-batch 2 of 2: NaN in the output of module '3' (Logarithm), shape (4, 1)"),
        ("handler", "run again: micro-batch 2 of 2: NaN in the output of module '3' (Logarithm), shape (4, 1)"),
        ("outside", "run again: micro-batch 2 of 2: FloatingPointError: not this loss (when run again)"),
        ("without-cause", "run again, this update was finite"),
    ],
    ids=["forward", "handler", "outside-of-modules", "without-cause"],
)
def test_a_floating_point_error_of_ones_own_is_explained(site: str, note: str) -> None:
    """A check of the user's own ends the run; its error says where the value came from, and the replay leaves no trace."""

    def check(loss: torch.Tensor) -> None:
        if not torch.isfinite(loss) or (site == "without-cause" and trainer.state.iteration == 2 and not states):
            states.append((before[-1], model[0].running_mean.clone()))
            raise FloatingPointError("not this loss")

    def forward(model: nn.Module, micro_batch: Any) -> torch.Tensor:
        x, sign = micro_batch
        model[3].sign = 1.0 if site == "outside" else sign
        loss = model(x).mean() + (torch.tensor(sign).log() if site == "outside" else 0.0)
        if site != "handler":
            check(loss)
        return loss

    torch.manual_seed(0)
    # Random numbers are those before the update, which is put back; running means, of which there is no copy, stay.
    states: list[tuple[torch.Tensor, torch.Tensor]] = []
    before: list[torch.Tensor] = []
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1), Logarithm())
    nn.init.zeros_(model[2].weight)
    nn.init.ones_(model[2].bias)
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward, accumulation_steps=2)
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: before.append(torch.get_rng_state()))
    if site == "handler":
        trainer.add_event_handler(TrainEvents.FORWARD_COMPLETED, lambda: check(trainer.state.forward_output.loss))
    with pytest.raises(FloatingPointError, match="not this loss") as caught:
        trainer.run([(torch.randn(4, 3), sign) for sign in (1.0, 1.0, 1.0, 1.0 if site == "without-cause" else -1.0)])
    assert caught.value.__notes__ == [note]
    assert [torch.equal(a, b) for a, b in zip(states[0], (torch.get_rng_state(), model[0].running_mean), strict=True)] == [
        True
    ] * 2
    assert trainer.state.num_micro_batches == 2  # those of the first update
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_floating_point_error_of_an_update_that_cannot_be_run_again_stays_as_it_is() -> None:
    """Far above the floor of the loss scale no random state is remembered, so running again would draw other numbers."""

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise FloatingPointError("not this loss")

    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_trainer(model, optimizer, forward, loss_scaling=TorchLossScaling(2.0**16))
    with pytest.raises(FloatingPointError, match="not this loss") as caught:
        trainer.run([torch.ones(2, 3)])
    assert not hasattr(caught.value, "__notes__")


UNUSUAL: dict[str, Callable[[], torch.Tensor]] = {
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "compressed": lambda: torch.eye(2).to_sparse_csr(),
    "float8": lambda: torch.ones(2).to(torch.float8_e4m3fn),
    "meta": lambda: torch.ones(2, device="meta"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("place", ["micro-batch", "buffer", "output"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_the_search_goes_on_past_what_torch_cannot_look_at(name: str, place: str) -> None:
    """Torch has no `isfinite` for some layouts, dtypes and devices. The cause is found, and is not said to be there."""

    class Unusual(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, UNUSUAL[name]()

    model = nn.ModuleDict({"unusual": Unusual(), "linear": nn.Linear(3, 1), "logarithm": Logarithm()})
    if place == "buffer":
        model.register_buffer("unusual_buffer", UNUSUAL[name]())

    def forward(model: Any, micro_batch: Any) -> torch.Tensor:
        x = micro_batch["x"]
        if place == "output":
            x, _ = model["unusual"](x)
        logarithm: torch.Tensor = model["logarithm"](-model["linear"](x).abs() - 1)
        return logarithm.mean()

    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward)
    micro_batch = {"x": torch.ones(2, 3)} | ({"unusual": UNUSUAL[name]()} if place == "micro-batch" else {})
    with pytest.raises(NonFiniteError, match=r"NaN in the output of module 'logarithm' \(Logarithm\)"):
        trainer.run([micro_batch])


def test_a_model_with_an_expanded_buffer_is_searched() -> None:
    """Its buffers are put back after the search, without an error of torch in the place of the one that says what was found."""
    model = nn.Sequential(nn.Linear(3, 1), Logarithm())
    model.register_buffer("mask", torch.ones(1).expand(4))
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).mean())
    with pytest.raises(NonFiniteError, match="NaN in the micro-batch itself"):
        trainer.run([torch.full((2, 3), math.nan)])
    assert all(not module._forward_hooks for module in model.modules())
    assert all(not parameter._backward_hooks for parameter in model.parameters())


def test_complex_values_are_looked_at() -> None:
    """The module that made the first of them not finite is named, and a buffer that is spoilt."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("spoilt", torch.full((1,), complex("nan")))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.complex(x, torch.full_like(x, math.nan))

    model = nn.Sequential(nn.Linear(3, 1), Turned())
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).abs().mean())
    with pytest.raises(NonFiniteError, match=r"NaN in the output of module '1' \(Turned\)") as caught:
        trainer.run([torch.ones(2, 3)])
    assert [note for note in caught.value.__notes__ if note.startswith("the buffer '1.spoilt' has a NaN by now")]


def skip_for_ever() -> tuple[int, int, int]:
    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        output = cuts.forward(model, micro_batch)
        bad = idist.get_rank() == 0 and trainer.state.iteration in (2, 3, 5, 6, 7)
        return output._replace(loss=output.loss * float("nan")) if bad else output

    model = cuts.linear()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = create_trainer(ddp, optimizer, forward, options=UpdateOptions(on_nonfinite="skip", give_up_after=3))
    with pytest.raises(GaveUpError, match="in a row that was skipped") as caught:
        trainer.run(cuts.shard([[2] * 9, [2] * 9]), max_epochs=1)
    return caught.value.update, caught.value.in_a_row, trainer.state.num_steps


@pytest.mark.slow
def test_skipping_gives_up_on_all_ranks() -> None:
    """Two updates in a row that are not finite are survived, the third in a row ends both ranks in the same update."""
    assert run_ranks(skip_for_ever) == [(7, 3, 2)] * 2


@pytest.mark.parametrize("limit", [2, 3])
def test_a_skip_and_a_want_of_memory_are_counted_apart(limit: int) -> None:
    """Neither continues the count of the other; the first kind to reach the limit without a break ends the run."""
    kinds = [*("skip", "memory") * 4, "good", *["skip"] * (limit - 1), *["memory"] * limit]

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        output, kind = cuts.forward(model, micro_batch), kinds[trainer.state.iteration - 1]
        if kind == "memory" and trainer.state.num_micro_batches % 2 == 0:
            raise torch.OutOfMemoryError("no room")
        return output._replace(loss=output.loss * float("nan")) if kind == "skip" else output

    model = cuts.linear()
    trainer = create_trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        forward,
        accumulation_steps=2,
        options=UpdateOptions(on_nonfinite="skip", on_out_of_memory="skip", give_up_after=limit),
    )
    with pytest.raises(GaveUpError, match=f"number {limit} in a row that ran out of memory") as caught:
        trainer.run(cuts.cut(cuts.samples(), [1] * 2 * len(kinds)), max_epochs=1)
    assert caught.value.update == len(kinds)


def test_updates_without_samples_do_not_end_a_row_of_skips() -> None:
    """A model that is NaN for ever, of which each second update has nothing to learn from, ends at the third NaN."""

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        output = cuts.forward(model, micro_batch)
        is_empty = trainer.state.iteration % 2 == 0
        return output._replace(loss=output.loss * (0.0 if is_empty else float("nan")), sample_size=0 if is_empty else 2)

    model = cuts.linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = create_trainer(model, optimizer, forward, options=UpdateOptions(on_nonfinite="skip", give_up_after=3))
    with pytest.raises(GaveUpError, match="number 3 in a row that was skipped") as caught:
        trainer.run(cuts.cut(cuts.samples(), [2] * 8), max_epochs=1)
    assert (caught.value.update, trainer.state.num_steps) == (5, 0)


# --- uneven data ---


def uneven(policy: str, way: str, sized: bool) -> Any:
    model = wrap(cuts.linear(), way)
    optimizer = torch.optim.SGD(model.parameters(), lr=cuts.LEARNING_RATE)
    trainer = create_trainer(
        model, optimizer, cuts.forward, accumulation_steps=2, options=UpdateOptions(reduction=way, uneven=policy)
    )
    sizes: list[float] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: sizes.append(trainer.state.output.logs["samples"]))
    loader: Any = cuts.shard([[2] * 10, [2] * 8])
    try:
        trainer.run(loader if sized else iter(loader), max_epochs=1)
    except ValueError as error:
        return str(error)
    return sizes


@pytest.mark.slow
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", ["all", "shortest", "error"])
def test_policies_for_uneven_data(policy: str, way: str, sized: bool) -> None:
    """10 and 8 micro-batches end together: after every sample, with the shortest, or with an error naming both numbers."""
    first, second = run_ranks(uneven, policy, way, sized)
    assert first == second
    if policy == "error":
        lengths = "rank 0: 10, rank 1: 8" if sized else "rank 0: unknown, rank 1: unknown"
        assert lengths in first
    else:
        assert first == [8.0] * 4 + ([4.0] if policy == "all" else [])


# --- sharded models ---


def sharded_against_one(way: str) -> dict[str, Any]:
    model = Net()
    model.norm = nn.Identity()  # BatchNorm's statistics are a rank's own
    for module in (model.hidden, model.head) if way == "fsdp" and idist.get_world_size() > 1 else ():
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    wrapped = wrap(model, way)
    model.eval()
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01, weight_decay=0.1)
    trainer = create_trainer(wrapped, optimizer, no_dropout, accumulation_steps=2, max_grad_norm=0.3)
    norms: list[float] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: norms.append(trainer.state.output.grad_norm))
    sizes = [[8, 3, 5], [10]] if idist.get_world_size() > 1 else [[8, 3, 10, 5]]
    loader = cuts.shard(sizes) if idist.get_world_size() > 1 else alone()
    trainer.run(loader, max_epochs=3)
    evaluator = create_evaluator(wrapped, no_dropout)
    held_out = cuts.shard([[4, 4, 8], []]) if idist.get_world_size() > 1 else cuts.cut(cuts.samples(), [16])
    return {"parameters": whole(model), "norms": norms, "metrics": dict(evaluator.run(held_out).metrics)}


def no_dropout(model: nn.Module, micro_batch: Any) -> ForwardOutput:
    mode = model.training
    model.eval()
    output = cuts.forward(model, micro_batch)
    model.train(mode)  # a forward that leaves another one is warned of
    return output


def alone() -> list[Any]:
    """The micro-batches of both ranks as one process sees them: updates of (8, 3, 10) and of (5)."""
    data = cuts.samples()
    first = tuple(torch.cat([part[0:11], part[16:26]]) for part in data)
    second = tuple(part[11:16] for part in data)
    empty = tuple(part[:0] for part in data)
    return [first, empty, second]


@pytest.mark.slow
def test_a_sharded_model_trains_and_evaluates_as_one_process_does() -> None:
    """FSDP2 on two ranks with uneven data, clipping and AdamW equals the single process, parameters, norms and metrics."""
    expected = sharded_against_one("none")
    for result in run_ranks(sharded_against_one, "fsdp"):
        assert result["parameters"] == pytest.approx(expected["parameters"], rel=1e-9, abs=1e-12)
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-12)
        assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-9)


def wrong_sharding() -> None:
    partly, without_root, grown = Net(), Net(), Net()
    fully_shard(partly.head, mesh=init_device_mesh("cpu", (2,)))
    for part in without_root.children():
        fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(grown, mesh=init_device_mesh("cpu", (2,)))
    grown.late = nn.Linear(2, 2)
    for model in (partly, without_root, grown):
        with pytest.raises(ValueError, match="fully_shard applied to the root"):
            create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), cuts.forward)
    root = fully_shard(Net(), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match="reduction must be 'auto' or 'fsdp'"):
        create_trainer(
            root, torch.optim.SGD(root.parameters(), lr=0.1), cuts.forward, options=UpdateOptions(reduction="explicit")
        )


@pytest.mark.slow
def test_models_that_are_partly_sharded_are_refused() -> None:
    """A parameter outside of fully_shard would not cross the ranks."""
    assert run_ranks(wrong_sharding) == [None, None]
