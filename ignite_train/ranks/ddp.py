"""`DistributedDataParallel`: gradients cross the ranks in the last backward, in an order that is the same after every start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ignite_train.errors import NoGradientError
from ignite_train.internals.of_distributed import (
    check_reducer_finished,
    comm_hooks_of,
    has_cut_buckets,
    missing_in_reduction,
    push_in_order_of_registration,
    rebuild_buckets,
    reduced_parameters,
    set_has_cut_buckets,
)
from ignite_train.internals.of_torch import backward_hooks_of, call_at_end_of_backward, late_hooks_of, share_contents
from ignite_train.model.gradients import Gradients
from ignite_train.model.in_full import in_full
from ignite_train.model.sparse_parameters import no_rows, sparse_parameters
from ignite_train.ranks import collectives
from ignite_train.ranks.crossing import Crossing
from ignite_train.ranks.first_buffers import FirstBuffers
from ignite_train.ranks.messages import Outgoing
from ignite_train.ranks.statistics import Statistics

__all__ = ["DDPCrossing", "settle_bucket_order"]

_WAITS_FOR_RANKS = True  # HangWatch looks for it in the file where a rank stands

_NOTHING = nullcontext()


class DDPCrossing(Crossing):
    """`DistributedDataParallel`: its hooks average gradients in the last backward, overlapping it.

    Buffers of rank 0 go to all ranks before the first forward, once; see `FirstBuffers`.

    Args:
        module: the model without `ddp`, unless it holds `ddp`.
        ddp: the wrapped model.
    """

    may_drop_micro_batches = False

    def __init__(self, module: nn.Module, ddp: DistributedDataParallel) -> None:
        super().__init__(module)
        self._ddp = ddp
        self.averaged_over = torch.distributed.get_world_size(ddp.process_group)
        self._frozen = {id(one): one for one in _frozen_when_wrapped(ddp)}
        self._known = {id(one): one for one in ddp.module.parameters()}  # when DDP looked for what to reduce
        self._stepped: list[nn.Parameter] = []  # those of the optimizers in the latest update
        self._unreduced: list[nn.Parameter] = []  # those among them that DDP does not reduce
        self._has_order = False  # of the buckets
        self._first_buffers = FirstBuffers(ddp)
        for parameter in sparse_parameters(ddp.module):
            if parameter.requires_grad:
                # DDP divides a sparse gradient in place, whose rows may be the gradient that backward hands on to other layers.
                parameter.register_hook(torch.clone)  # type: ignore[no-untyped-call]

    @property
    def tells_unused(self) -> bool:
        """Whether DDP finds out which parameters no rank has a gradient of, and none of them has a hook."""
        ddp = self._ddp
        return ddp.find_unused_parameters and not ddp.static_graph and not any(map(_has_hooks, ddp.module.parameters()))

    def context(self, *, last: bool) -> AbstractContextManager[Any]:
        """DDP's `no_sync`, which must cover forward and backward; none for the last. Collective, where there are buffers."""
        return self._first_buffers.context(_NOTHING if last else self._ddp.no_sync(), last=last)

    def num_placeholders(self, group: Sequence[Any], max_micro_batches: int | None) -> int:  # noqa: ARG002
        """1 on a rank without data, else 0: the backward that reduces must run on every rank. Collective the first time."""
        if not self._has_order:
            self._has_order = True
            if self.averaged_over > 2:  # a + b is b + a
                settle_bucket_order(self._ddp)
        self._first_buffers.begin()
        return 0 if group else 1

    def take_part(self, loss_of: Callable[[Any], Tensor], backward: Callable[[Tensor], object]) -> None:  # noqa: ARG002
        """Goes through DDP's forward, with its collectives, to a graph that reaches each parameter without a gradient.

        DDP takes what is missing for zero, or, where it looks for unused parameters, for unused on this rank. The module inside
        is never called, so no data is needed and no buffer changes; nor is any hook of a module, that of the wrapper included.
        Nothing is multiplied by zero either: 0 · inf would be NaN. Hooks of a parameter, which torch would call with None, are
        given zeros, or are not called where DDP looks for unused parameters.
        """
        ddp, module = self._ddp, self._ddp.module
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        sparse = {*map(id, sparse_parameters(module))}
        if ddp.find_unused_parameters:  # where a dense one that is out of the graph is ready for the reduction
            parameters = [one for one in parameters if id(one) in sparse or not _has_hooks(one)] or parameters

        def put_back() -> None:
            ddp.module = module

        try:
            ddp.module = _NoData(module, parameters, sparse)
            # not a call of `ddp`, which has hooks
            loss: Tensor = DistributedDataParallel.forward(ddp)  # type: ignore[no-untyped-call]
        finally:
            in_full(put_back)
        backward(loss)

    def start(self, outgoing: Outgoing, statistics: Statistics, gradients: Gradients, loss: Tensor) -> None:
        """Starts the statistics, ahead of the gradients' buckets on every rank.

        Gradients that backward leaves in the same memory are told apart at its end, before DDP writes their means: those may
        differ, where another rank has used only one of the parameters. A callback that is queued first runs first, and DDP
        queues its own when the last bucket is full.

        Raises:
            ValueError: a parameter is trained that was frozen, or was not there, when DDP looked for what to reduce.
        """
        stepped = gradients.parameters()
        if len(stepped) != len(self._stepped) or any(map(is_not, stepped, self._stepped)):
            self._stepped = stepped
            self._unreduced = [one for one in stepped if id(one) in self._frozen or id(one) not in self._known]
        for parameter in self._unreduced:
            if parameter.requires_grad:
                raise self._unreduced_error(gradients.name(parameter), was_there=id(parameter) in self._known)
        statistics.start(*outgoing)
        if loss.requires_grad:
            loss.register_hook(lambda _: call_at_end_of_backward(gradients.separate))  # type: ignore[no-untyped-call]

    def finish(self, outgoing: Outgoing, statistics: Statistics, gradients: Gradients) -> float | Tensor | None:
        """The norm, if DDP has reduced. Otherwise this rank must not begin its next collective: others may be in this one.

        Raises:
            NoGradientError: some parameter got no gradient in the last backward on this rank, so that DDP waits for it.
        """
        reducer = vars(self._ddp).get("reducer")
        if reducer is not None:
            try:
                check_reducer_finished(reducer)
            except RuntimeError as error:
                raise self._unfinished_error(gradients, error) from None
        return super().finish(outgoing, statistics, gradients)

    def _unfinished_error(self, gradients: Gradients, error: RuntimeError) -> NoGradientError:
        missing = [gradients.name(parameter) for parameter in missing_in_reduction(self._ddp, error)] or ["some parameter"]
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        return NoGradientError(
            f"the last backward must give each parameter in DistributedDataParallel a gradient, got none of "
            f"{', '.join(missing[:3])}{more} on rank {collectives.rank()}, so that no gradient is the mean of all ranks; wrap "
            "the model with find_unused_parameters=True if its forward does not use them, or pass the module inside with "
            "options=UpdateOptions(reduction='explicit') if only the loss does not"
        )

    def _unreduced_error(self, name: str, *, was_there: bool) -> ValueError:
        if was_there:
            return ValueError(
                f"model must be wrapped in DistributedDataParallel before {name} is frozen, got it frozen then and trained "
                "now, where each rank would keep its own gradient; attach Freeze, or freeze it after wrapping it with "
                "find_unused_parameters=True"
            )
        return ValueError(
            f"model must be wrapped in DistributedDataParallel when it has all of its parameters, got {name} in the optimizer, "
            "which came later, so that each rank would keep its own gradient; wrap the model again and make another trainer, "
            "or pass the module inside with options=UpdateOptions(reduction='explicit')"
        )


def _frozen_when_wrapped(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """The parameters that `ddp` was not told to ignore and does not reduce; none where that cannot be found out any more."""
    reducer = vars(ddp).get("reducer")
    if reducer is None:
        return []
    named = [(name, parameter) for name, parameter in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore]
    frozen = [parameter for _, parameter in named if not parameter.requires_grad]
    return frozen if len(reducer.get_backward_stats()) == len(named) - len(frozen) else []


class _NoData(nn.Module):
    """A module with the parameters and buffers of another, because DDP looks them up, and with a forward of its own."""

    def __init__(self, module: nn.Module, parameters: list[nn.Parameter], sparse: set[int]) -> None:
        super().__init__()
        self._borrowed = parameters, sparse
        share_contents(self, module)

    def forward(self) -> Tensor:
        return _visiting(*self._borrowed)

    __call__ = forward  # without the hooks that torch has for all modules


def _has_hooks(parameter: Tensor) -> bool:
    return bool(backward_hooks_of(parameter) or late_hooks_of(parameter))


def _nothing_for(parameter: Tensor, *, is_sparse: bool) -> Tensor | None:
    """No gradient; of a sparse one no rows, since DDP insists on a gradient there, and zeros for hooks."""
    if is_sparse:
        return no_rows(parameter)
    return torch.zeros_like(parameter) if _has_hooks(parameter) else None


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
    if reducer is None or not cuts_once or has_cut_buckets(ddp) or rebuild_buckets(reducer):
        return  # the last if the script has run a backward of its own, which decides
    parameters = [parameter for parameter in reduced_parameters(ddp) if parameter.requires_grad]
    with _set_aside(parameters):
        if ddp.static_graph or ddp.mixed_precision is not None or any(map(_has_state, comm_hooks_of(ddp))):
            push_in_order_of_registration(reducer)
        else:
            sparse = {*map(id, sparse_parameters(ddp.module))}
            reducer.prepare_for_backward([])
            torch.autograd.backward(_visiting(parameters, sparse))
        rebuild_buckets(reducer)
    set_has_cut_buckets(ddp)


def _has_state(hook: tuple[Any, Any]) -> bool:
    return not (hook[1] is None or isinstance(hook[1], ProcessGroup))


@contextmanager
def _set_aside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Takes gradients and hooks away for a while: a hook may make a step."""
    hooks = [one for parameter in parameters for one in (backward_hooks_of(parameter), late_hooks_of(parameter))]
    before = [(one, {**one}) for one in hooks if one]
    gradients = [parameter.grad for parameter in parameters]

    def put_back() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for one, entries in before:
            one.update(entries)

    try:
        for one, _ in before:
            one.clear()
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        in_full(put_back)


def _visiting(parameters: Sequence[nn.Parameter], sparse: set[int]) -> Tensor:
    """A zero whose backward comes to one parameter after the other, the last one first, without a gradient for any."""
    zero = torch.zeros((), device=parameters[0].device)  # real, as a loss must be, whatever the parameters are
    with torch.enable_grad():
        for parameter in parameters:
            nothing = _nothing_for(parameter, is_sparse=id(parameter) in sparse)
            zero = _Visit.apply(zero, parameter, nothing)  # type: ignore[no-untyped-call]
    return zero


class _Visit(torch.autograd.Function):
    """Comes to a parameter in backward, and gives it what `_nothing_for` has found."""

    @staticmethod
    def forward(ctx: Any, earlier: Tensor, parameter: Tensor, gradient: Tensor | None) -> Tensor:  # noqa: ARG004
        ctx.gradient = gradient
        return earlier.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        return grad_outputs[0], ctx.gradient, None
