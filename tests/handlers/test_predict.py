"""Predictions stand in the order of the dataset, whatever order and share of it each rank has run."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

import cuts
from ignite_train import ForwardOutput, ResumableLoader, ShardedSampler, create_evaluator, create_trainer
from ignite_train.handlers import EarlyStopping, ModelEMA, Validation, predict
from mistakes import Mistake, assert_one_line
from processes import DEADLINE_SECONDS
from ranks import run_ranks
from tiers import slow

ROWS = torch.randn(11, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Two(NamedTuple):
    """What a forward may return: named outputs."""

    value: Tensor
    parts: dict[str, Tensor]


def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
    y = model(x)
    return ForwardOutput(y.sum(), len(x), outputs=Two(y, {"x": x, "twice": 2 * y}))


def check(found: Any, rows: Tensor = ROWS) -> None:
    """The rows of the dataset and what the model makes of them, by the model itself."""
    with torch.no_grad():
        y = cuts.linear()(rows)
    assert type(found) is Two
    assert torch.equal(found.parts["x"], rows)
    torch.testing.assert_close(found.value, y, rtol=1e-12, atol=0)
    assert torch.equal(found.parts["twice"], 2 * found.value)


class Batches(Dataset[Tensor]):
    """A dataset of micro-batches, for a DataLoader with batch_size=None."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Tensor:
        return ROWS[4 * index : 4 * index + 4]


class Waits(Dataset[Tensor]):
    """Rows, of which the first is not there before a later one of another worker is read."""

    def __init__(self) -> None:
        self._is_read = multiprocessing.get_context("fork").Event()

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> Tensor:
        if index == 0:
            self._is_read.wait(DEADLINE_SECONDS)
        if index == 6:
            self._is_read.set()
        return ROWS[index]


class Stream(IterableDataset[Tensor]):
    """Rows without indices."""

    def __iter__(self) -> Any:
        return iter(ROWS)


class Unsized:
    """A sampler that does not say how many indices it has."""

    def __init__(self, indices: Iterable[int]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)


def loaders() -> dict[str, Callable[[], Any]]:
    order = [[7, 3], [0], [10, 9, 8], [1, 2, 4, 5, 6]]
    return {
        "list": lambda: list(ROWS.split(4)),
        "in-order": lambda: DataLoader(ROWS, batch_size=4),
        "shuffled": lambda: DataLoader(ROWS, batch_size=4, shuffle=True),
        "tensors-for-indices": lambda: DataLoader(ROWS, batch_size=4, sampler=torch.arange(10, -1, -1)),
        "batch-sampler": lambda: DataLoader(ROWS, batch_sampler=order),
        "nothing-to-drop": lambda: DataLoader(ROWS, batch_size=11, drop_last=True),
        "resumable": lambda: ResumableLoader(ROWS, 4, shuffle=True),
        "batches": lambda: DataLoader(Batches(), batch_size=None, sampler=[2, 0, 1]),
        "stream": lambda: DataLoader(Stream(), batch_size=4),
        "workers": lambda: DataLoader(ROWS, batch_size=2, shuffle=True, num_workers=2, persistent_workers=True),
        "workers-as-they-are-ready": lambda: DataLoader(Waits(), batch_size=2, num_workers=2, in_order=False),
    }


@pytest.mark.parametrize("name", [slow(name) if "workers" in name else name for name in loaders()])
def test_the_order_is_that_of_the_dataset(name: str) -> None:
    """For each kind of loader, and again in a second call with the same one."""
    loader, evaluator = loaders()[name](), create_evaluator(cuts.linear(), forward)
    check(predict(evaluator, loader))
    check(predict(evaluator, loader))


def test_it_is_not_a_validation() -> None:
    """The evaluator's state stays, and early stopping does not count it; the average is used where the evaluator uses it."""
    model = cuts.linear()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward)
    evaluator, ema = create_evaluator(model, forward), ModelEMA(0.5)
    ema.attach(trainer)
    ema.use_in(evaluator)
    stopping = EarlyStopping(evaluator, patience=1)
    stopping.attach(trainer)
    Validation(evaluator, [ROWS]).attach(trainer, Events.ITERATION_COMPLETED(once=1))
    trainer.run([ROWS] * 2)
    state, loss = evaluator.state, evaluator.state.metrics["loss"]
    found = predict(evaluator, [ROWS + 1])
    assert evaluator.state is state
    assert state.metrics == {"loss": loss}
    assert stopping.num_bad == 0
    ended: list[bool] = []
    evaluator.add_event_handler(Events.COMPLETED, lambda: ended.append(True))
    evaluator.run([ROWS])  # the next evaluation is one
    assert ended == [True]
    with ema.swapped_in(), torch.no_grad():
        assert torch.equal(found.value, model(ROWS + 1))


def _on_this_rank(sizes: tuple[int, int], uneven: str) -> Any:
    rank, rows = idist.get_rank(), ROWS[: sum(sizes)]
    shares = [list(range(sizes[0])), list(range(sizes[0], sum(sizes)))]
    evaluator = create_evaluator(cuts.linear(), forward, uneven=uneven)  # type: ignore[arg-type]
    found = predict(evaluator, DataLoader(rows, batch_size=2, sampler=shares[rank][::-1]))  # type: ignore[arg-type]
    check(found, rows)
    dealt = DataLoader(rows, batch_size=2, sampler=ShardedSampler(rows, shuffle=True))  # type: ignore[arg-type]
    check(predict(evaluator, dealt), rows)
    refused = []
    for loader in (DataLoader(rows, batch_size=2), [rows]):  # type: ignore[arg-type]
        try:
            predict(evaluator, loader)
        except ValueError as error:
            refused.append(str(error))
    _check_what_this_rank_gets(evaluator, rows, shares[rank])
    return found.value.tolist(), refused, _wrong_on_one_rank(evaluator)


def _check_what_this_rank_gets(evaluator: Any, rows: Tensor, share: list[int]) -> None:
    """All of the rows on rank 0, or its own on each."""
    loader = DataLoader(rows, batch_size=2, sampler=share[::-1])  # type: ignore[arg-type]
    on_main = predict(evaluator, loader, gather="main")
    own = predict(evaluator, loader, gather="none")
    for found, expected in ((on_main, rows if idist.get_rank() == 0 else None), (own, rows[share] if share else None)):
        if expected is None:
            assert found is None
        else:
            check(found, expected)


def _wrong_on_one_rank(evaluator: Any) -> str:
    def forward_without(model: nn.Module, x: Tensor) -> ForwardOutput:
        return forward(model, x) if idist.get_rank() == 0 else ForwardOutput(model(x).sum(), len(x))

    def forward_wider(model: nn.Module, x: Tensor) -> ForwardOutput:
        return ForwardOutput(model(x).sum(), len(x), outputs=x.new_zeros(len(x), 1 + idist.get_rank()))

    loader = DataLoader(ROWS, batch_size=2, sampler=ShardedSampler(ROWS, shuffle=False))  # type: ignore[arg-type]
    messages = []
    for wrong in (forward_without, forward_wider):
        for gather in ("all", "main", "none"):
            with pytest.raises(ValueError, match="outputs") as raised:
                predict(create_evaluator(evaluator.model, wrong), loader, gather=gather)  # type: ignore[arg-type]
            messages.append(str(raised.value))
    return "; ".join(messages)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "uneven"), [((7, 4), "all"), ((11, 0), "all"), ((3, 8), "replay")], ids=str)
def test_two_ranks(sizes: tuple[int, int], uneven: str) -> None:
    """Uneven shares, in any order, with placeholders: both ranks have all rows. What is wrong is raised on both."""
    (first, refused, wrong), (second, also_refused, also_wrong) = run_ranks(_on_this_rank, sizes, uneven)
    assert first == second
    assert refused == also_refused
    assert "got sample 0 twice" in refused[0]
    assert "whose samples have no order over the ranks" in refused[1]
    assert wrong == also_wrong
    assert wrong.count("forward must return outputs") == wrong.count("pad them in forward") == 3


def _shortest() -> str:
    share = [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 10]][idist.get_rank()]
    evaluator = create_evaluator(cuts.linear(), forward, uneven="shortest")
    check(predict(evaluator, DataLoader(ROWS[:8], batch_size=2, sampler=ShardedSampler(ROWS[:8], shuffle=False))), ROWS[:8])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="make it with uneven='replay'") as raised:
        predict(evaluator, DataLoader(ROWS, batch_size=2, sampler=share))  # type: ignore[arg-type]
    return str(raised.value)


@pytest.mark.slow
def test_samples_that_the_evaluator_leaves_out_are_an_error_on_all_ranks() -> None:
    """Where all ranks have as many micro-batches none is left out."""
    first, second = run_ranks(_shortest)
    assert first == second


@pytest.mark.parametrize("gather", ["all", "main", "none"])
def test_one_process_gets_all_of_them(gather: Any) -> None:
    """Whatever is asked for."""
    check(predict(create_evaluator(cuts.linear(), forward), DataLoader(ROWS, batch_size=4, shuffle=True), gather=gather))  # type: ignore[arg-type]


def test_outputs_that_forward_writes_over_are_kept() -> None:
    """One buffer for the outputs of all micro-batches, as code that saves memory has it."""
    buffer = ROWS.new_zeros(4, 3)

    def fill(x: Tensor) -> Tensor:
        return buffer[: len(x)].copy_(x)

    assert torch.equal(run_with(fill), ROWS)


def run_with(outputs: Callable[[Tensor], Any], loader: Any = None) -> Any:
    def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
        return ForwardOutput(x.sum(), len(x), outputs=outputs(x))

    loader = DataLoader(ROWS, batch_size=4) if loader is None else loader  # type: ignore[arg-type]
    return predict(create_evaluator(cuts.linear(), forward), loader)


def ended_early() -> None:
    evaluator = create_evaluator(cuts.linear(), forward)
    evaluator.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: evaluator.terminate())
    predict(evaluator, DataLoader(ROWS, batch_size=4, shuffle=True))  # type: ignore[arg-type]


MISTAKES: dict[str, Mistake] = {
    "gather": (ValueError, "gather must be", lambda: predict(create_evaluator(cuts.linear(), forward), [ROWS], gather="some")),  # type: ignore[arg-type]
    "evaluator": (TypeError, "evaluator must be what", lambda: predict(cuts.linear(), [ROWS])),  # type: ignore[arg-type]
    "none": (ValueError, "forward must return outputs", lambda: run_with(lambda x: None)),
    "text": (TypeError, "outputs must be tensors", lambda: run_with(lambda x: ["a"] * len(x))),
    "scalar": (ValueError, "a tensor without dimensions", lambda: run_with(lambda x: x.sum())),
    "rows": (ValueError, "one row for each of the 4 samples", lambda: run_with(lambda x: x[:1])),
    "widths": (ValueError, "pad them in forward", lambda: run_with(lambda x: x.new_zeros(len(x), len(x)))),
    "structure": (ValueError, "one structure in all", lambda: run_with(lambda x: (x,) * len(x))),
    "order": (
        ValueError,
        "one structure in all",
        lambda: run_with(lambda x: {"a": x, "b": x} if len(x) == 4 else {"b": x, "a": x}),
    ),
    "indices": (
        TypeError,
        "loader must have a sampler of integers, got the index 'a'",
        lambda: run_with(lambda x: x, DataLoader({"a": ROWS[0], "b": ROWS[1]}, sampler=["a", "b"])),  # type: ignore[arg-type]
    ),
    "tensors of indices": (
        TypeError,
        r"loader must have a sampler of integers, got the index tensor\(\[2, 0\]\)",
        lambda: run_with(lambda x: x, DataLoader(ROWS, batch_size=None, sampler=[torch.tensor([2, 0])])),  # type: ignore[arg-type]
    ),
    "may be dropped": (
        ValueError,
        "got drop_last=True, which may leave out some; pass drop_last=False",
        lambda: run_with(lambda x: x, DataLoader(ROWS, batch_size=4, sampler=Unsized(range(11)), drop_last=True)),  # type: ignore[arg-type]
    ),
    "dropped": (
        ValueError,
        "got drop_last=True, which leaves out 3",
        lambda: run_with(lambda x: x, DataLoader(ROWS, batch_size=4, drop_last=True)),  # type: ignore[arg-type]
    ),
    "dropped by a sampler": (
        ValueError,
        "got a DistributedSampler with drop_last=True; use ShardedSampler",
        lambda: run_with(lambda x: x, DataLoader(ROWS, sampler=DistributedSampler(ROWS, 2, 0, drop_last=True))),  # type: ignore[arg-type]
    ),
    "ended": (ValueError, "must run on all micro-batches of the loader, and ended after 1;", ended_early),
    "twice": (ValueError, "got sample 1 twice", lambda: run_with(lambda x: x, DataLoader(ROWS, sampler=[1, 1]))),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes(name: str) -> None:
    """Each is answered in one line."""
    assert_one_line(MISTAKES[name])
