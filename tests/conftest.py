"""What several test files share: one small regression, and a view of any state that is equal only bit by bit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import torch
from torch import nn

import cuts
from bits import bit_by_bit
from devices import devices
from ignite_train import create_trainer
from ignite_train.engine.attachable import Attachable
from setups import Batch, Setup, summed_loss
from update_options import with_options

# On a machine that is busy with other things an example may take long, although the code is fast.
hypothesis.settings.register_profile(
    "any machine", hypothesis.settings(), deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

# Their files run in environments of their own: each has the name of a library, or is a script that imports one.
collect_ignore = ["libraries", "migration"]


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deals the cases of a test that is marked `sampled(number, slow=more)` to the tiers, each tier evenly spread.

    `make test` looks at `number` of them and `make slow` at `more` others, or at all; the rest are left to `make nightly`.
    """
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if (
            item.get_closest_marker("sampled")
            and not item.get_closest_marker("slow")
            and not item.get_closest_marker("nightly")
        ):
            cases[item.nodeid.partition("[")[0]].append(item)
    for found in cases.values():
        mark = found[0].get_closest_marker("sampled")
        (number,), more = mark.args, mark.kwargs.get("slow")
        left = _mark_all_but(number, found, "slow")
        if more is not None:
            _mark_all_but(more, left, "nightly")


def _mark_all_but(number: int, items: list[pytest.Item], name: str) -> list[pytest.Item]:
    """Marks all items but for so many, evenly spread, and returns the marked items."""
    kept = {index * len(items) // number for index in range(number)}
    marked = [item for index, item in enumerate(items) if index not in kept]
    for item in marked:
        item.add_marker(name)
    return marked


@pytest.fixture(params=devices(), ids=str)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the model is: on the CPU, and on the accelerator if there is one."""
    found: torch.device = request.param
    return found


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is compared with numbers of the CPU, and would choose a GPU by itself."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def micro_batches() -> list[Batch]:
    """Five micro-batches of 3, 1, 4, 2 and 3 samples."""
    generator = torch.Generator().manual_seed(1)
    drawn = [(torch.randn(size, 4, generator=generator), torch.randn(size, 1, generator=generator)) for size in (3, 1, 4, 2, 3)]
    return [(x.flip(0), y.flip(0)) for x, y in drawn] if cuts.REVERSED else drawn


@pytest.fixture
def build() -> Callable[..., Setup]:
    """Makes a small regression with the same weights each time: `build(accumulation_steps=2, optimizer=..., dtype=...)`."""

    def build(
        forward: Callable[..., Any] = summed_loss,
        *,
        optimizer: Callable[..., torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        dtype: torch.dtype = torch.float32,
        **arguments: Any,
    ) -> Setup:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
        built = optimizer(model.parameters())
        return Setup(model, built, create_trainer(model, built, forward, **with_options(**arguments)))

    return build


@pytest.fixture
def bits() -> Callable[[Any], Any]:
    """Turns nested state into plain values that are equal only if every tensor in it is bitwise equal."""
    return bit_by_bit


@pytest.fixture
def fresh_graphs() -> Iterator[None]:
    """Other tests' graphs, traces and counts are none of ours."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _no_handlers_of_other_tests() -> None:
    """A run names the handlers that were made and not attached; those of another test are not of this one."""
    Attachable.unattached.clear()
