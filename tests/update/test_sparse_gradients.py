"""Embeddings with sparse gradients: accumulated, added up over ranks, in the norm, clipped and stepped along."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from bits import bit_by_bit
from ignite_train import ForwardOutput, NonFiniteError, StaticLossScaling, TrainEvents, count_traffic, create_trainer
from ignite_train.handlers import Checkpoint
from ignite_train.model.sparse_parameters import no_rows
from ignite_train.ranks import collectives
from ignite_train.ranks.sparse_rows import SparseRows
from ranks import run_ranks
from update_options import with_options

# torch says so whenever its own optimizers make a sparse tensor
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")

WORDS = 40
SIZES = [[[2, 3], [4]], [[1], []], [[3], [2, 5]], [[], []]]  # by update and rank
KINDS = ("sgd", "momentum", "adagrad", "sparse-adam")


class Words(nn.Module):
    """Two tables, one of them a bag, and a dense layer; the second table is not used by all micro-batches."""

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.table = nn.Embedding(WORDS, 4, sparse=sparse)
            self.bag = nn.EmbeddingBag(WORDS, 3, mode="sum", sparse=sparse)
            self.last = nn.Linear(7, 1)
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        return self.last(torch.cat([self.table(words).sum(1), self.bag(words)], 1).tanh()).squeeze(1)


def batch(start: int, count: int) -> tuple[Tensor, Tensor]:
    """Samples of three words each, in which words repeat."""
    numbers = torch.arange(start, start + count)
    return torch.stack([numbers % 5, numbers * 7 % WORDS, numbers % 5], 1), numbers.double().cos()


def forward(model: nn.Module, micro_batch: tuple[Tensor, Tensor]) -> ForwardOutput:
    words, y = micro_batch
    return ForwardOutput((model(words) - y).square().sum(), len(y))


def optimizers(model: Words, kind: str) -> list[Optimizer]:
    """Of the tables, and of the dense layer."""
    tables, dense = [model.table.weight, model.bag.weight], model.last.parameters()
    made: dict[str, Any] = {
        "sgd": lambda: SGD(tables, lr=0.5),
        "momentum": lambda: SGD(tables, lr=0.5, momentum=0.9),
        "adagrad": lambda: Adagrad(tables, lr=0.5),
        "sparse-adam": lambda: SparseAdam(tables, lr=0.5),
    }
    return [made[kind](), SGD(dense, lr=0.1, momentum=0.9)]


def by_hand(kind: str, limit: float | None) -> tuple[list[float], list[float]]:
    """The loop on all samples of each update at once: with dense gradients, except for SparseAdam, which is another rule."""
    model, start, norms = Words(sparse=kind == "sparse-adam"), 0, []
    steps = optimizers(model, kind)
    for sizes in SIZES:
        count = sum(map(sum, sizes))
        if not count:
            continue
        loss, weight, *_ = forward(model, batch(start, count))
        start += count
        (loss / weight).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(math.sqrt(sum(float(g.to_dense().square().sum()) for g in gradients)))
        for gradient in gradients if limit is not None else ():
            gradient.mul_(min(1.0, limit / (norms[-1] + 1e-6)))
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), norms


def on_rank(way: str, kind: str, limit: float | None = 0.2, scale: float | None = None) -> Any:
    """The same on this rank's samples, and the collectives of the last update with samples."""
    model = Words()
    wrapped = DistributedDataParallel(model) if way in ("ddp", "small") else model
    reduction = {"small": "auto"}.get(way, way)
    scaling = None if scale is None else StaticLossScaling(scale)
    arguments = with_options(max_grad_norm=limit, reduction=reduction, loss_scaling=scaling)
    trainer = create_trainer(wrapped, optimizers(model, kind), forward, **arguments)
    start, norms, names = 0, [], []
    rank, ranks = idist.get_rank(), idist.get_world_size()
    with trainer.session():
        for sizes in SIZES:
            mine = [size for own in (sizes if ranks == 1 else sizes[rank : rank + 1]) for size in own]
            place = start + (0 if ranks == 1 else sum(map(sum, sizes[:rank])))
            micro_batches = []
            for size in mine:
                micro_batches.append(batch(place, size))
                place += size
            with count_traffic() as traffic:
                record = trainer.update(micro_batches)
            if record.applied:
                norms.append(record.grad_norm)
                names = [one.name for one in traffic.collectives]
            start += sum(map(sum, sizes))
    assert trainer.state.num_skipped == 1
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), norms, names


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("limit", "scale"), [(None, None), (0.2, None), (0.2, 1024.0)], ids=["plain", "clipped", "scaled"])
def test_one_process_is_the_loop_by_hand(kind: str, limit: float | None, scale: float | None) -> None:
    """Accumulated over micro-batches with the same words in them; the norm is that of the sum and not of its parts."""
    parameters, norms, _ = on_rank("auto", kind, limit, scale)
    expected, expected_norms = by_hand(kind, limit)
    assert parameters == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert norms == pytest.approx(expected_norms, rel=1e-11)


def all_on_ranks(way: str) -> list[Any]:
    return [on_rank(way, kind) for kind in KINDS]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["explicit", "small", "ddp"])
def test_ranks_are_the_loop_by_hand(way: str) -> None:
    """Ranks with other words, other numbers of rows, or none; replicas gather the rows in one collective."""
    outcomes = run_ranks(all_on_ranks, way)
    assert [one[:2] for one in outcomes[0]] == [one[:2] for one in outcomes[1]], "bitwise the same on both ranks"
    for kind, (parameters, norms, names) in zip(KINDS, outcomes[0], strict=True):
        expected, expected_norms = by_hand(kind, 0.2)
        assert parameters == pytest.approx(expected, rel=1e-9, abs=1e-12), kind
        assert norms == pytest.approx(expected_norms, rel=1e-11), kind
        if way != "ddp":
            assert names == ["allgather_", "allgather_"]  # statistics and dense gradients; rows


class Threads:
    """Two threads in place of two ranks."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._rank, self._barrier = threading.local(), threading.Barrier(2, timeout=60.0)
        self._given: dict[int, Tensor] = {}
        patch.setattr(collectives, "world_size", lambda: 2)
        patch.setattr(collectives, "rank", lambda: self._rank.number)
        patch.setattr(collectives, "gather_bytes", self.gather)

    def gather(self, given: Tensor, lengths: Sequence[int] = ()) -> list[Tensor]:
        """What both have given, in rank order, as long as each of them knows that it is."""
        self._given[self._rank.number] = given
        self._barrier.wait()
        found = [self._given[0], self._given[1]]
        self._barrier.wait()
        assert not lengths or [len(one) for one in found] == [*lengths]
        return found

    def add_up(self, gradients: list[list[Tensor | None]], rows: int = 6) -> list[list[Tensor | None]]:
        """Of each rank: the gradients of its parameters, of so many rows, once those of both have been added up."""

        def on_rank(number: int) -> list[Tensor | None]:
            self._rank.number = number
            dtypes = [torch.float64, torch.bfloat16, *[torch.float32] * 9][: len(gradients[number])]
            owners = [nn.Parameter(torch.zeros(rows, 2, dtype=dtype)) for dtype in dtypes]
            for owner, gradient in zip(owners, gradients[number], strict=True):
                owner.grad = gradient
            both = SparseRows(owners)
            both.add_over_ranks(torch.stack(self.gather(both.announcement())).sum(0))
            return [owner.grad for owner in owners]

        with ThreadPoolExecutor(2) as pool:
            return [*pool.map(on_rank, range(2))]


def rows_of(numbers: list[int], dtype: torch.dtype = torch.float32, rows: int = 6) -> Tensor:
    """A gradient with these rows, of which each may be there twice; its values are 1, 2, 3, ..."""
    values = torch.arange(1.0, 2 * len(numbers) + 1).view(-1, 2).to(dtype)
    return torch.sparse_coo_tensor(torch.tensor([numbers], dtype=torch.int64), values, (rows, 2), check_invariants=True)


def test_rows_are_added_up_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several tables and dtypes, rows that both ranks have, none, all because the gradient is dense, or no gradient."""
    wide, half = torch.float64, torch.bfloat16
    ranks: list[list[Tensor | None]] = [
        [rows_of([1, 2, 1], wide), rows_of([5], half), torch.ones(6, 2), None, rows_of([]), None],
        [rows_of([2, 0], wide), rows_of([3, 5], half), None, None, None, rows_of([4])],
    ]
    expected = []
    for both in zip(*ranks, strict=True):
        present = [one.to_dense() for one in both if one is not None]
        expected.append(sum(present[1:], present[0]) if present else None)
    for found in Threads(monkeypatch).add_up(ranks):
        for gradient, right in zip(found, expected, strict=True):
            assert (gradient is None) == (right is None)
            if gradient is not None and right is not None:
                assert gradient.is_sparse
                assert gradient.is_coalesced()
                assert gradient.dtype is right.dtype
                assert torch.equal(gradient.to_dense(), right)
    for *nothing, empty in Threads(monkeypatch).add_up([[None] * 3, [None, None, rows_of([])]]):
        assert nothing == [None] * 2
        assert empty is not None
        assert empty.to_dense().tolist() == [[0.0, 0.0]] * 6
    single: list[Tensor | None] = [rows_of([0, 0], wide, rows=1)]  # a table of one row
    for (gradient,) in Threads(monkeypatch).add_up([single, single], rows=1):
        assert gradient is not None
        assert gradient.to_dense().tolist() == [[8.0, 12.0]]


def test_torch_is_given_no_reason_to_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the sparse tensors that the library makes: the sum of rows, one of a dense gradient, and one without rows."""
    ranks: list[list[Tensor | None]] = [
        [rows_of([1, 2, 1], torch.float64), torch.ones(6, 2, dtype=torch.bfloat16)],
        [rows_of([2, 0], torch.float64), None],
    ]
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Threads(monkeypatch).add_up(ranks)
            nothing = no_rows(nn.Parameter(torch.ones(6, 2)))
    finally:
        torch.set_warn_always(before)
    assert torch.equal(nothing.to_dense(), torch.zeros(6, 2))


def test_an_update_that_is_not_finite_moves_nothing() -> None:
    """It is named, or skipped; a sparse gradient is looked into as any other."""
    model = Words()
    steps = optimizers(model, "sparse-adam")
    trainer = create_trainer(model, steps, forward, **with_options(on_nonfinite="skip"))
    words, y = batch(0, 3)
    trainer.run([(words, y)])

    def state() -> Any:
        return bit_by_bit([model.state_dict(), [one.state_dict() for one in steps]])

    before = state()
    trainer.update([(words, y * math.inf)])
    assert (state() == before, trainer.state.num_skipped) == (True, 1)
    naming = create_trainer(model, steps, forward)
    with torch.no_grad():
        model.table.weight[2] = math.nan
    with pytest.raises(NonFiniteError, match="NaN in the output of module 'table'"):
        naming.run([(words, y)])
    with torch.no_grad():
        model.table.weight[2] = 0.0
    trap = model.table.register_forward_hook(lambda *args: args[2].register_hook(lambda g: g * math.inf) and None)
    with pytest.raises(NonFiniteError, match="in the gradient of "):
        naming.run([(words, y)], max_epochs=2)
    trap.remove()


@pytest.mark.parametrize("sparse_first", [True, False])
def test_a_table_with_sparse_and_dense_gradients_beside_a_recovery(sparse_first: bool) -> None:
    """A table may be the matrix of the output too, in some micro-batches; the step equals one without a recovery."""
    weights = []
    for recovery in ("raise", "skip"):
        torch.manual_seed(0)
        table = nn.Embedding(6, 2, sparse=True).double()

        def forward(table: nn.Module, words: Tensor) -> ForwardOutput:
            is_sparse = (words[0] == 0) == sparse_first
            loss = table(words).square().sum() if is_sparse else table.get_parameter("weight").square().sum()
            return ForwardOutput(loss, len(words))

        options = with_options(on_out_of_memory=recovery)
        trainer = create_trainer(table, SGD(table.parameters(), lr=0.1), forward, accumulation_steps=2, **options)
        trainer.run([torch.tensor([0, 1]), torch.tensor([1, 2])], max_epochs=1)
        weights.append(table.weight.detach().clone())
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-12, atol=0)


def test_handlers_see_sparse_gradients() -> None:
    """Coalesced, and those of the mean in GRADIENTS_REDUCED and in `trainer.gradients()`."""
    model, seen = Words(), []
    trainer = create_trainer(model, optimizers(model, "sgd"), forward)

    @trainer.on(TrainEvents.GRADIENTS_REDUCED)
    def change() -> None:
        assert model.table.weight.grad is not None
        model.table.weight.grad.mul_(0.5)

    @trainer.on(TrainEvents.GRADIENTS_READY)
    def look() -> None:
        gradient = trainer.gradients()["table.weight"]
        seen.append((gradient.is_sparse, gradient.to_dense()))

    trainer.run([batch(0, 4)])
    dense = Words(sparse=False)
    loss, weight, *_ = forward(dense, batch(0, 4))
    (0.5 * loss / weight).backward()
    assert seen[0][0]
    assert dense.table.weight.grad is not None
    assert torch.allclose(seen[0][1], dense.table.weight.grad, rtol=1e-12)


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    """The moments of SparseAdam are in the checkpoint."""

    def run(directory: Path, updates: int) -> Any:
        model = Words()
        steps = optimizers(model, "sparse-adam")
        trainer = create_trainer(model, steps, forward)
        Checkpoint(directory, every=2).attach(trainer)
        trainer.run([batch(4 * i, 4) for i in range(3)], max_iters=updates)
        return bit_by_bit([model.state_dict(), [one.state_dict() for one in steps]])

    run(tmp_path / "a", 2)
    assert run(tmp_path / "a", 5) == run(tmp_path / "b", 5)


def test_a_weight_that_is_used_densely_too() -> None:
    """Tied to an output layer, as in language models: torch makes its gradient dense, and that is stepped along."""
    models = [nn.Sequential(nn.Embedding(6, 3, sparse=sparse), nn.Linear(3, 6, bias=False)) for sparse in (True, False)]
    ends = []
    for model in models:
        with torch.no_grad():
            model[0].weight.copy_(torch.arange(18.0).reshape(6, 3).sin())  # type: ignore[operator,union-attr]
        model[1].weight = model[0].weight
        trainer = create_trainer(
            model, SGD(model.parameters(), lr=0.1), lambda m, x: (m(x).square().sum(), len(x)), max_grad_norm=0.5
        )
        trainer.run([torch.tensor([1, 2, 1]), torch.tensor([3])], max_epochs=2)
        ends.append(model[0].weight.detach())
    assert torch.allclose(*ends, rtol=1e-6)


def tied_on_ranks() -> list[float]:
    """Rank 1 uses the weight as a table alone, and rank 0 as an output layer too."""
    model = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 6, bias=False)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.arange(18.0).reshape(6, 3).sin())  # type: ignore[operator,union-attr]
    model[1].weight = model[0].weight
    layers = 2 if idist.get_rank() == 0 else 1
    trainer = create_trainer(
        model,
        SGD(model.parameters(), lr=0.1),
        lambda m, x: (m[:layers](x).square().sum(), len(x)),
        **with_options(reduction="explicit"),
    )
    trainer.run([torch.tensor([[1, 2, 1], [3, 2, 2]][idist.get_rank()])], max_epochs=2)
    weight: list[float] = model[0].weight.flatten().tolist()  # type: ignore[operator,union-attr]
    return weight


@pytest.mark.slow
def test_a_gradient_that_is_dense_on_one_rank_only() -> None:
    """Each of its rows counts."""
    weight = torch.arange(18.0).reshape(6, 3).sin().double().requires_grad_()
    for _ in range(2):
        first, second = weight[torch.tensor([1, 2, 1])], weight[torch.tensor([3, 2, 2])]
        loss = ((first @ weight.t()).square().sum() + second.square().sum()) / 6
        (gradient,) = torch.autograd.grad(loss, weight)
        weight = (weight - 0.1 * gradient).detach().requires_grad_()
    found = run_ranks(tied_on_ranks)
    assert found[0] == found[1]
    assert found[0] == pytest.approx(weight.flatten().tolist(), rel=1e-12)


def sharded_message() -> str:
    model = fully_shard(Words().float(), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match="fully_shard") as caught:
        create_trainer(model, SGD(model.parameters(), lr=0.1), forward)
    return str(caught.value)


@pytest.mark.slow
def test_a_sharded_model_is_refused_in_one_line() -> None:
    """Before anything is computed, with the parameter and the remedy."""
    right = (
        "model must have dense gradients in fully_shard, got 'table.weight' of an embedding with sparse=True; build it with "
        "sparse=False"
    )
    assert run_ranks(sharded_message) == [right] * 2
