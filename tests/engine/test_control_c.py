"""Ctrl-C at each place of what changes something and puts it back; the next run in the process has the bits of one run."""

from __future__ import annotations

import gc
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ignite.engine import Events
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils import _python_dispatch
from torch.utils.data import TensorDataset
from torch.utils.hooks import RemovableHandle

import ignite_train
from bits import bit_by_bit
from control_c import at_each_place, unlike
from ignite_train import ForwardContractError, ForwardOutput, ResumableLoader, Trainer, create_trainer
from ignite_train.data.fetch_thread import FetchThread, _ReadAhead
from ignite_train.data.resumable_loader import _Samples
from ignite_train.fast import direct_step
from ignite_train.fast.unwrapped_step import UnwrappedStep
from ignite_train.fast.update_graphs import _Graph
from ignite_train.model import forward_state, in_full, loss_declaration, optimizers, random_state
from ignite_train.model.forward_state import ForwardState
from ignite_train.model.random_state import RandomState
from ignite_train.model.step_watch import _Watched
from ignite_train.update.handler_guard import HandlerGuard
from tiers import accelerated

Make = Callable[[], tuple[Trainer, nn.Module, Optimizer, Any]]


def forward(model: nn.Module, batch: Any) -> ForwardOutput:
    x, y = batch
    return ForwardOutput(nn.functional.cross_entropy(model(x), y, reduction="sum"), sample_size=len(y))


def made(
    kind: Callable[..., Optimizer] = SGD, *, marks: bool = True, thread: bool = False, **arguments: Any
) -> tuple[Trainer, nn.Module, Optimizer, Any]:
    """A trainer of a model with dropout, its model and optimizer, and three micro-batches whose samples are seeded.

    Args:
        kind: of the optimizer.
        marks: whether an update that is undone gives its random numbers back, as with a Checkpoint.
        thread: whether a thread reads them.
        arguments: of `create_trainer`.
    """
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 3))
    optimizer = kind(model.parameters(), lr=0.1)
    trainer = create_trainer(model, optimizer, forward, **arguments)
    if marks:
        trainer.mark_everything()
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(12, 4, generator=generator), torch.randint(0, 3, (12,), generator=generator))
    return trainer, model, optimizer, ResumableLoader(data, batch_size=4, shuffle=True, seed=0, fetch_in_thread=thread)


def interrupted_and_repeated(make: Make) -> Callable[[Callable[[], Any]], Any]:
    """A run of two epochs in which Ctrl-C may come, and another one that continues."""

    def run(pressing: Callable[[], Any]) -> Any:
        trainer, model, optimizer, loader = make()
        error = None
        try:
            with pressing():
                trainer.run(loader, max_epochs=2)
        except KeyboardInterrupt as raised:  # a notebook keeps it, and with it the frames that were left
            error = raised
        trainer.run(loader, max_epochs=2)
        del error
        state = trainer.state
        return (
            bit_by_bit([model.state_dict(), optimizer.state_dict()]),
            [state.iteration, state.num_steps, state.num_micro_batches],
            [module.training for module in model.modules()],
            (torch.is_grad_enabled(), len(optimizer._optimizer_step_pre_hooks)),  # type: ignore[attr-defined]
            (bit_by_bit(torch.get_rng_state()), random.getstate(), np.random.get_state()[1].tolist()),  # type: ignore[index]
        )

    return run


PLACES: dict[str, tuple[Make, tuple[Any, ...]]] = {
    # Nothing was drawn for an update whose samples are being read.
    "the generators after a sample": (
        lambda: made(marks=False),
        (_Samples.__getitems__, random_state.restore_random_state, random_state._check_numpy_state),
    ),
    "the generators after an update": (
        lambda: made(seed=3),
        (RandomState.restore, random_state.set_generator_state, random_state._check_numpy_state),
    ),
    "the hooks that refuse a step": (
        made,
        (HandlerGuard.no_step, optimizers.each_optimizer, optimizers.inner_optimizers, RemovableHandle.remove),
    ),
    "the switch of gradients": (made, (UnwrappedStep.__call__,)),
    "the trial of the loss": (
        made,
        (
            loss_declaration.check_declaration,
            loss_declaration._apart,
            loss_declaration._Apart.__torch_dispatch__,
            _python_dispatch.TorchDispatchMode.__enter__,
            _python_dispatch.TorchDispatchMode.__exit__,
            _python_dispatch._push_mode,
            _python_dispatch._pop_mode,
        ),
    ),
    "what forward has changed": (
        made,
        (ForwardState._put_back, in_full.put_entries_back, forward_state._fill, ForwardState._put_tensors_back),
    ),
    "the end of a step": (made, (_Watched.__exit__, _Watched.judge, _Watched.may_have_moved, _Watched.learn)),
}


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Switches gradients on, which a failing test leaves off, and takes off the modes that an interrupt leaves."""
    yield
    torch.set_grad_enabled(True)
    while torch._C._len_torch_dispatch_stack():
        _python_dispatch._pop_mode()  # in which operations on lists would not be counted as versions
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()


@accelerated
@pytest.mark.parametrize("what", PLACES)
def test_the_next_run_has_the_bits_of_one_run(what: str) -> None:
    """Whatever Ctrl-C has left half put back would change them, or end the next run."""
    make, functions = PLACES[what]
    assert unlike(at_each_place(interrupted_and_repeated(make), *functions)) == []


@pytest.mark.nightly
@pytest.mark.parametrize("arguments", [{}, {"seed": 3}], ids=str)
def test_so_it_is_wherever_it_comes(arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """At each place of the library that a run comes to. What Python drops raises nothing: there Ctrl-C is lost."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    library = Path(ignite_train.__file__).parent
    assert unlike(at_each_place(interrupted_and_repeated(lambda: made(**arguments)), library)) == []


def test_a_second_one_while_the_first_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update that was broken off counted as if it had been made, and the next run left its samples out."""

    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    weights = []
    for is_interrupted in (False, True):
        trainer, model, _, loader = made()
        if is_interrupted:
            handle = trainer.add_event_handler(Events.ITERATION_STARTED(once=2), pressed)
            with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
                patch.setattr(trainer.logger, "error", pressed)
                trainer.run(loader)
            handle.remove()
            assert trainer.state.iteration == 1
        assert trainer.run(loader).num_steps == trainer.state.iteration == 3
        weights.append(bit_by_bit(model.state_dict()))
    assert weights[0] == weights[1]


@accelerated
def test_gradients_are_on_again_after_a_kernel() -> None:
    """Which is called directly: they are off meanwhile."""

    def run(pressing: Callable[[], Any]) -> Any:
        trainer, _, _, loader = made(partial(SGD, fused=True))
        with suppress(KeyboardInterrupt), pressing():
            trainer.run(loader)
        found = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        return found

    assert unlike(at_each_place(run, direct_step._make)) == []


def test_torch_compiles_again_after_a_graph_was_looked_up() -> None:
    """Ctrl-C comes when it has been told to compile nothing, before what it was told before is known here."""
    told: list[Any] = [None]

    def tell(what: Any) -> Any:
        told.append(what)
        if len(told) == 2:
            raise KeyboardInterrupt
        return told[-2]

    graph: Any = SimpleNamespace(_is_new=False, _set_lookup=tell, _function=lambda: None)
    with pytest.raises(KeyboardInterrupt):
        _Graph.look_up(graph)
    assert told == [None, False, None]


def test_a_loss_without_a_graph_where_gradients_are_off() -> None:
    """Ctrl-C inside torch's own `no_grad` may leave them so, and the message says what to do."""
    trainer, _, _, loader = made()
    torch.set_grad_enabled(False)
    with pytest.raises(ForwardContractError, match=r"switched off in this thread, so call torch\.set_grad_enabled\(True\)"):
        trainer.run(loader)
    torch.set_grad_enabled(True)
    assert trainer.run(loader).num_steps == 3


@pytest.mark.parametrize("enabled", [False, True])
def test_a_loss_without_a_graph_in_inference_mode(enabled: bool) -> None:
    """Where `torch.set_grad_enabled(True)` does not help, the message does not advise it."""
    trainer, _, _, loader = made()
    with torch.inference_mode(), torch.set_grad_enabled(enabled), pytest.raises(ForwardContractError) as raised:
        trainer.run(loader)
    assert str(raised.value) == (
        "the loss that forward returned has no graph; torch.inference_mode() is on, in which none is made; make the model "
        "and call the run outside of it"
    )
    assert trainer.run(loader).num_steps == 3


@pytest.mark.parametrize("length", [None, 4])
def test_a_thread_that_reads(length: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C as it is made or started: nothing waits for one that has not begun, and nothing is printed as one is dropped."""
    printed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)

    def run(pressing: Callable[[], Any]) -> Any:
        trainer, model, _, loader = made(thread=True)
        with suppress(KeyboardInterrupt), pressing():
            trainer.run(loader, max_epochs=2, epoch_length=length)
        trainer.run(loader, max_epochs=2, epoch_length=length)
        gc.collect()
        return bit_by_bit(model.state_dict()), trainer.state.num_steps, printed

    assert (
        unlike(at_each_place(run, FetchThread.__init__, FetchThread._start, _ReadAhead.__init__, threading.Thread.start)) == []
    )
