"""The forward of a small DistributedDataParallel, whose gradients cross the ranks with the statistics."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ignite_train.ranks.bare_forward import BareForward

X = torch.arange(6.0).view(2, 3)


@pytest.fixture
def alone(tmp_path: Any) -> Iterator[None]:
    """A process group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Noting(DistributedDataParallel):
    """Notes each call of torch's own preparation for a forward."""

    calls: int = 0

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        vars(self)["calls"] = self.calls + 1
        return super()._pre_forward(*inputs, **kwargs)


class Doubled(DistributedDataParallel):
    """A derived class with a forward of its own."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return 2 * super().forward(*inputs, **kwargs)


def make(kind: type[DistributedDataParallel], **options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    ddp = kind(nn.Linear(3, 1), **options)
    with ddp.no_sync():
        ddp(X)  # the first forward sets up what is left to set up
    return ddp


def train(ddp: DistributedDataParallel, context: Any) -> tuple[Tensor, list[Tensor | None]]:
    with context:
        output: Tensor = ddp(input=X)
        output.sum().backward()  # type: ignore[no-untyped-call]
    return output.detach(), [parameter.grad for parameter in ddp.module.parameters()]


@pytest.mark.usefixtures("alone")
def test_it_is_the_forward_of_the_module_with_the_hooks_of_the_wrapper() -> None:
    """Nothing of the wrapper's own runs, but for hooks; afterwards all of it does."""
    ddp, other = make(Noting), make(Noting)
    seen: list[nn.Module] = []
    ddp.register_forward_hook(lambda module, _inputs, _output: seen.append(module))  # type: ignore[no-untyped-call]
    before, bare = ddp.calls, BareForward(ddp)
    found, expected = train(ddp, bare), train(other, other.no_sync())
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(*pair) for pair in zip(found[1], expected[1], strict=True))  # type: ignore[arg-type]
    assert (ddp.calls, seen) == (before, [ddp])
    ddp(X)
    assert ddp.calls == before + 1


@pytest.mark.usefixtures("alone")
def test_a_forward_that_fails_leaves_the_wrapper_as_it_was() -> None:
    ddp = make(Noting)
    bare = BareForward(ddp)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), bare:
        ddp(torch.ones(2, 2))
    assert "forward" not in vars(ddp)
    with bare, bare:  # within another one it is `no_sync`
        assert not ddp.require_backward_grad_sync
    assert ddp.require_backward_grad_sync
    assert "forward" not in vars(ddp)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", ["derived", "set", "compiled", "not begun"])
def test_what_the_user_has_changed_is_called(kind: str) -> None:
    """A forward of a derived class, one set on the object, a compiled one, and the first one, are under `no_sync`."""
    if kind == "not begun":
        ddp: DistributedDataParallel = DistributedDataParallel(nn.Linear(3, 1))
    else:
        ddp = make(Doubled if kind == "derived" else DistributedDataParallel)
    expected = ddp.module(X) * (2 if kind == "derived" else 3 if kind in ("set", "compiled") else 1)
    if kind == "set":
        vars(ddp)["forward"] = lambda x: 3 * ddp.module(x)
    if kind == "compiled":
        vars(ddp)["_compiled_call_impl"] = lambda x: 3 * ddp.module(x)
    with BareForward(ddp):
        assert not ddp.require_backward_grad_sync
        assert torch.equal(ddp(X), expected)
    assert ddp.require_backward_grad_sync
    assert ("forward" in vars(ddp)) == (kind == "set")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("way", ["copy", "pickle"])
def test_a_copy_that_is_made_meanwhile_reduces(way: str) -> None:
    """It has torch's forward, as if it had been made before."""
    ddp = make(Noting)
    with BareForward(ddp):
        other: Any = copy.deepcopy(ddp) if way == "copy" else pickle.loads(pickle.dumps(ddp))
    before = other.calls
    other(X)
    assert other.calls == before + 1
    assert other.require_backward_grad_sync
