"""Random training programs come to what they must, on one rank, two and three."""

from __future__ import annotations

import pytest

from compiling import lets_torch_read_grad
from random_cases import difference_of_graphs, failures
from ranks import run_ranks
from tiers import accelerated

# torch says so whenever its own optimizers make a sparse tensor
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")


def on_rank(seeds: range, world_size: int = 2) -> list[str]:
    return failures(seeds, world_size=world_size)


@pytest.mark.slow
def test_some_programs_on_one_rank():
    """Whatever the layers, layouts, optimizer, cuts and accidents, the parameters are those of one large float64 batch."""
    assert failures(range(150), world_size=1) == []


@accelerated
@pytest.mark.slow
@lets_torch_read_grad
def test_some_programs_with_compiled_updates(caplog):
    """The same with `compile="update"`, where nothing stands in the way of a graph."""
    assert failures(range(3), world_size=1, run=difference_of_graphs) == []
    assert [record.message for record in caplog.records if record.message.startswith('compile="update"')] == []


@pytest.mark.slow
def test_some_programs_on_two_ranks():
    """The same over two ranks, in each way of crossing them, with uneven data."""
    assert run_ranks(on_rank, range(10_000, 10_030)) == [[], []]


@pytest.mark.slow
def test_some_programs_on_three_ranks():
    """The same over three ranks, where shares of the parameters and of the data are more uneven."""
    assert run_ranks(on_rank, range(40_000, 40_015), 3, world_size=3) == [[], [], []]


def on_local_rank(seeds: range) -> list[str]:
    return failures(seeds, world_size=2, local=True)


@pytest.mark.slow
def test_some_programs_of_replicas_that_train_on_their_own():
    """Each rank comes to what its own samples come to, with and without outer steps; what is recorded is of all ranks."""
    assert run_ranks(on_local_rank, range(20_000, 20_030)) == [[], []]


@pytest.mark.slow
def test_a_program_whose_dense_layer_was_divided_twice():
    """DistributedDataParallel divides sparse gradients in place, and their rows are the gradient of the layer beside, too."""
    assert run_ranks(on_rank, range(10_054, 10_055)) == [[], []]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("start", range(100_000, 100_900, 100))
def test_many_programs_on_one_rank(start):
    """As above: 900 more."""
    assert failures(range(start, start + 100), world_size=1) == []


@accelerated
@pytest.mark.nightly
@pytest.mark.timeout(1200)
@lets_torch_read_grad
@pytest.mark.parametrize("start", range(300_000, 300_100, 25))
def test_many_programs_with_compiled_updates(start):
    """As above: 100 more. Moments and buffers are compared with those of the plain path, too."""
    assert failures(range(start, start + 25), world_size=1, run=difference_of_graphs) == []


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("start", range(200_000, 200_600, 50))
def test_many_programs_on_two_ranks(start):
    """As above: 600 more."""
    assert run_ranks(on_rank, range(start, start + 50), timeout_seconds=600) == [[], []]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("start", range(400_000, 400_200, 50))
def test_many_programs_on_three_ranks(start):
    """As above: 200 more."""
    assert run_ranks(on_rank, range(start, start + 50), 3, world_size=3, timeout_seconds=600) == [[], [], []]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("start", range(300_000, 300_200, 50))
def test_many_programs_of_replicas_that_train_on_their_own(start):
    """As above: 200 more."""
    assert run_ranks(on_local_rank, range(start, start + 50), timeout_seconds=600) == [[], []]
