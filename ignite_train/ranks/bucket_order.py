"""The order in which `DistributedDataParallel` adds up gradients, the same after every start of a process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ignite_train.model.sparse_parameters import no_rows, sparse_parameters

__all__ = ["settle_bucket_order"]

_WAITS_FOR_RANKS = True  # HangWatch looks for it in the file where a rank stands


def settle_bucket_order(ddp: DistributedDataParallel) -> None:
    """Has `ddp` cut its buckets before its first backward, in an order that depends on the parameters only. Collective.

    DDP begins with one bucket and cuts the final ones after the first backward of a process, in the order in which gradients
    arrived. From three ranks on, where a gradient lies in a bucket decides in which order the ranks' shares of it are added.
    So an update right after a resume would be rounded otherwise than the same update of a run that was not interrupted.

    The order is the reverse of that in which the parameters were registered, as backward goes through most models. It is told
    to DDP by a backward that gives each parameter no gradient, and crosses the ranks once. Where such a backward would leave
    traces (in a static graph, which DDP learns from its first backward; in the state of a communication hook), DDP is told the
    order of registration instead, in which buckets fill up late and overlap less of backward.
    """
    reducer = vars(ddp).get("reducer")
    cuts_once = ddp.static_graph or not ddp.find_unused_parameters  # otherwise the first buckets stay
    if reducer is None or not cuts_once or ddp._has_rebuilt_buckets or reducer._rebuild_buckets():
        return  # the last if the script has run a backward of its own, which decides
    parameters = [parameter for parameter in ddp._module_parameters if parameter.requires_grad]
    with _set_aside(parameters):
        if ddp.static_graph or ddp.mixed_precision is not None or any(map(_has_state, ddp._comm_hooks)):
            reducer._push_all_rebuilt_params()
        else:
            sparse = {*map(id, sparse_parameters(ddp.module))}
            reducer.prepare_for_backward([])
            torch.autograd.backward(_visiting(parameters, sparse))
        reducer._rebuild_buckets()
    ddp._has_rebuilt_buckets = True


def _has_state(hook: tuple[Any, Any]) -> bool:
    return not (hook[1] is None or isinstance(hook[1], ProcessGroup))


@contextmanager
def _set_aside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Takes gradients and hooks away for a while: a hook may make a step."""
    hooks = [one for parameter in parameters for one in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)]
    before = [(one, {**one}) for one in hooks if one]
    gradients = [parameter.grad for parameter in parameters]
    for one, _ in before:
        one.clear()
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for one, entries in before:
            one.update(entries)


def _visiting(parameters: Sequence[nn.Parameter], sparse: set[int]) -> Tensor:
    """A zero whose backward comes to one parameter after the other, the last one first."""
    zero = torch.zeros((), device=parameters[0].device)
    with torch.enable_grad():
        for parameter in parameters:
            gradient = no_rows(parameter) if id(parameter) in sparse else None
            zero = _Visit.apply(zero, parameter, gradient)  # type: ignore[no-untyped-call]
    return zero


class _Visit(torch.autograd.Function):
    """Gives a parameter no gradient, or, as DDP insists on with a sparse one, a gradient without rows."""

    @staticmethod
    def forward(ctx: Any, earlier: Tensor, parameter: Tensor, gradient: Tensor | None) -> Tensor:  # noqa: ARG004
        ctx.gradient = gradient
        return earlier.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        return grad_outputs[0], ctx.gradient, None
