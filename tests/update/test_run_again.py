"""Where forward is run again it leaves no trace: kinds of state that it may change, by places that run it again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import compiling
from ignite_train import TrainEvents, create_trainer
from ignite_train.handlers import CurvatureMonitor
from tiers import slow
from update_options import with_options

pytestmark = compiling.ALONE

OF_THE_FILE = torch.Generator()
OF_NUMPY = np.random.default_rng(1)


class Net(nn.Module):
    """A student, with what forwards are known to change beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.target = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
        self.target.load_state_dict(self.student.state_dict())  # so that it does not move at first
        self.register_buffer("written", torch.zeros(()))
        self.register_buffer("assigned", torch.zeros(3))
        self.generator, self.of_python = torch.Generator().manual_seed(1), random.Random(1)  # noqa: S311
        self.count, self.counts, self.by_name = 0, [0], {"seen": 0.0}
        self.centre, self.array = torch.zeros(3), np.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x)


def moved(net: Any, how: str) -> float:
    """The target network follows the student."""
    with torch.no_grad():
        for slow, fast in zip(net.target.parameters(), net.student.parameters(), strict=True):
            if how == "in place":
                slow.mul_(0.5).add_(fast, alpha=0.5)
            elif how == "data":
                slow.data.mul_(0.5).add_(fast, alpha=0.5)
            else:
                slow.data = 0.5 * slow.data + 0.5 * fast.data
    return 1.0 + net.target(torch.ones(3)).abs().mean()  # type: ignore[no-any-return]


def counted(net: Any) -> float:
    net.count += 1
    return 1.0 + net.count / 4


def entered(net: Any) -> float:
    net.counts[0] += 1
    net.counts.append(1)
    net.by_name["seen"] += 0.5
    return 1.0 + len(net.counts) / 4 + net.counts[0] / 3 + net.by_name["seen"]


def centred(net: Any) -> float:
    net.centre.add_(0.25)
    net.array += 0.25
    return 1.0 + net.centre.sum() + float(net.array[0])  # type: ignore[no-any-return]


def buffered(net: Any) -> float:
    net.written.add_(1.0)
    net.assigned = net.assigned + 0.5
    return 1.0 + (net.written + net.assigned.sum()).detach()  # type: ignore[no-any-return]


KINDS: dict[str, Callable[[Any], Any]] = {
    "torch": lambda _: torch.rand(()),
    "python": lambda _: random.random(),  # noqa: S311
    "numpy": lambda _: float(np.random.beta(2.0, 2.0)),
    "generator of a module": lambda net: torch.rand((), generator=net.generator),
    "Python's generator of a module": lambda net: net.of_python.random(),
    "generator of forward": lambda _: torch.rand((), generator=OF_THE_FILE),
    "NumPy's generator of forward": lambda _: float(OF_NUMPY.random()),
    "buffers": buffered,
    "counter": counted,
    "list and dict": entered,
    "tensor and array": centred,
    "target in place": lambda net: moved(net, "in place"),
    "target by its data": lambda net: moved(net, "data"),
    "target with other data": lambda net: moved(net, "other data"),
}


DRAWS = [name for name in KINDS if "generator" in name or name in ("torch", "python", "numpy")]


class Run:
    """One training, with or without a place that runs forward again."""

    def __init__(self, kind: str, **arguments: Any) -> None:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(7)
        OF_THE_FILE.manual_seed(2)
        OF_NUMPY.bit_generator.state = np.random.default_rng(1).bit_generator.state
        self.net, self.losses, self.trouble = Net(), [], {}
        factor = KINDS[kind]

        def forward(net: nn.Module, x: Tensor) -> Tensor:
            (OF_THE_FILE, OF_NUMPY)  # as a forward that names them  # noqa: B018
            loss = (net(x) * factor(net)).tanh().mean()
            if not torch.compiler.is_compiling():
                self.losses.append(loss.detach().clone())
                if error := self.trouble.pop(len(self.losses), None):
                    raise error
            return loss

        self.forward = forward
        optimizer = arguments.pop("optimizer", torch.optim.SGD)(self.net.student.parameters(), lr=0.1)
        self.trainer = create_trainer(self.net, optimizer, forward, **with_options(**arguments))

    def __call__(self, *xs: Tensor) -> Any:
        self.trainer.run([*xs], max_epochs=1)
        return self.left()

    def left(self) -> Any:
        """All that a training leaves behind, and what is drawn next."""
        net = self.net
        draws = [KINDS[name](net) for name in DRAWS]
        rest = [net.count, net.counts, net.by_name, net.centre, net.array.tolist()]
        return {**net.state_dict(), "draws": torch.tensor(draws), "rest": flat(rest)}


def flat(values: Any) -> Tensor:
    return torch.cat([torch.as_tensor(one, dtype=torch.float64).reshape(-1) for one in pytree.tree_leaves(values)])


def micro_batches(number: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [*torch.randn(number, 2, 3, generator=generator)]


def monitor(kind: str) -> tuple[Any, Any]:
    """The curvature is looked at after each second update."""
    run = Run(kind)
    CurvatureMonitor(run.forward, every=2, max_iterations=3).attach(run.trainer)
    return run(*micro_batches()), Run(kind)(*micro_batches())


def without_memory(kind: str) -> tuple[Any, Any]:
    """A micro-batch does not fit, and is dropped: as if it had not been there."""
    run, data = Run(kind, on_out_of_memory="skip", accumulation_steps=2), micro_batches()
    run.trouble[4] = torch.OutOfMemoryError("no room")
    found = run(*data)
    return found, Run(kind, accumulation_steps=lambda update: 1 if update == 2 else 2)(*data[:3], *data[4:])


class Again(torch.optim.SGD):
    """Evaluates the loss three times, and steps along the last gradients."""

    def step(self, closure: Any = None) -> Any:
        values = [float(closure()), *[float(self._again(closure)) for _ in range(2)]]
        assert values == values[:1] * 3  # the objective is one
        super().step()
        return values[0]

    def _again(self, closure: Any) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        return closure()


def replayed(kind: str) -> tuple[Any, Any]:
    """Each evaluation is the first."""
    run = Run(kind, closure="replay", optimizer=Again, accumulation_steps=2)
    return run(*micro_batches()), Run(kind, accumulation_steps=2)(*micro_batches())


def searched(kind: str) -> tuple[Any, Any]:
    """An error of the user's own is searched for; the search draws what the update has drawn."""
    ends, runs = [], []
    for searches in (True, False):
        run = Run(kind)
        if not searches:
            run.trainer.process.search.explain = lambda *_: None
        run.trainer.add_event_handler(TrainEvents.GRADIENTS_READY(once=3), fail)
        with pytest.raises(FloatingPointError):
            run(*micro_batches())
        ends.append(run.left())
        runs.append(run)
    assert len(runs[0].losses) == len(runs[1].losses) + 1
    if kind in DRAWS:
        assert torch.equal(*runs[0].losses[2:4])
    return ends[0], ends[1]


def fail() -> None:
    raise FloatingPointError("by the user")


def compiled(kind: str) -> tuple[Any, Any]:
    """Graphs are tried; the backend runs torch's own operations."""
    found = Run(kind, compile={"update": True, "backend": "eager"})(*micro_batches())
    return found, Run(kind)(*micro_batches())


PLACES: dict[str, Callable[[str], tuple[Any, Any]]] = {
    "CurvatureMonitor": monitor,
    "lack of memory": without_memory,
    "closure": replayed,
    "search": searched,
    "graphs": compiled,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [slow(place) if place == "graphs" else place for place in PLACES])
def test_a_forward_that_is_run_again_leaves_no_trace(place: str, kind: str) -> None:
    """What is left is bitwise what a run without that place leaves; a graph may round otherwise."""
    found, expected = PLACES[place](kind)
    tolerance = 1e-5 if place == "graphs" else 0.0
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
