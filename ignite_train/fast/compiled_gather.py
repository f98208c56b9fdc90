"""A gather whose forward, backward and step are one compiled graph, or a few."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_train.device.streams import copy_on
from ignite_train.events import TrainEvents
from ignite_train.fast.compiled_step import CompiledStep, StepPlan, StepTensors
from ignite_train.fast.update_graphs import CannotCompileError, Gathered, UpdateGraphs, mark_static_address
from ignite_train.forward import ForwardOutput
from ignite_train.model.forward_state import ForwardState
from ignite_train.model.step_watch import StepWatch
from ignite_train.ranks.messages import RankRequests
from ignite_train.ranks.statistics import Statistics, Totals
from ignite_train.trainer import Trainer
from ignite_train.update.decision import Rules
from ignite_train.update.gather import Gather
from ignite_train.update.nonfinite_search import NonFiniteSearch

__all__ = ["CompiledGather", "Result", "say_why_not_compiled"]

_SEEING = (  # the events whose handlers stand between what is one graph here
    TrainEvents.FORWARD_COMPLETED,
    TrainEvents.BACKWARD_COMPLETED,
    TrainEvents.GRADIENTS_REDUCED,
    TrainEvents.GRADIENTS_READY,
)


_hooks_on_saved_tensors: Callable[[bool], Any] = vars(torch._C._autograd).get(
    "_top_saved_tensors_default_hooks", lambda _: None
)


class Result(NamedTuple):
    """The numbers that the graphs of an update have left on the device.

    Attributes:
        vector: norm of the accumulated gradients, 1 if the step was made, loss, sample size, and logs.
        logs: see `Gathered`.
        num_micro_batches: how many took part.
    """

    vector: Tensor
    logs: tuple[tuple[str, bool], ...]
    num_micro_batches: int


def say_why_not_compiled(reason: str) -> None:
    """Says in the log why updates are not compiled as a whole."""
    logging.getLogger("ignite_train").warning(f'compile="update" compiles no more than compile=True here, since {reason}')


def _prepare_cuda_graphs(tensors: StepTensors, num_made: Tensor, *, is_first: bool) -> None:
    """Says that what earlier graphs of this update left may be read by later ones, and that states stay where they are.

    Torch makes no CUDA graph of what writes into a tensor that may be elsewhere the next time.
    """
    if is_first:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
    for state in (*tensors.states, num_made):
        mark_static_address(state)


@dataclass(kw_only=True)
class CompiledGather(Gather):
    """The gather of `compile="update"`: forward, backward, the sums, the norm, the decision and the step are done by graphs.

    The graphs decide as `decide` does, and step or change nothing. `cross` reads one vector, the host decides from the same
    numbers, and continues as after a step that a device has made. Where something stands in the way of a graph, an update
    goes the plain way, and the log says why, once for each reason. Both ways step the same optimizer and leave its state alike,
    so updates of both can follow each other.

    Attributes:
        optimizer: which the graphs step.
        rules: what the decision follows.
        watch: told of each step.
        search: told whether forward draws random numbers.
        settings: arguments of `torch.compile`.
        host_statistics: takes the numbers to the piggybacks. It is dropped where an update is broken off.
        result: what the graphs of the running update have left, until it is read.
    """

    optimizer: Optimizer
    rules: Rules
    watch: StepWatch
    search: NonFiniteSearch
    settings: Mapping[str, Any]
    host_statistics: Statistics
    result: Result | None = None
    _step: CompiledStep = field(init=False)
    _forward_state: ForwardState = field(init=False)
    _graphs: dict[tuple[StepPlan, ...], UpdateGraphs] = field(default_factory=dict)
    _current: UpdateGraphs | None = None  # those for what was tried out
    _unfit: str | None = None  # what was found about the one that was tried out
    _obstacle: str | None = None  # why no later update of this process can be a graph
    _said: set[str] = field(default_factory=set)
    _stepped: list[nn.Parameter] = field(default_factory=list)  # the parameters of these plans
    _kinds: set[tuple[torch.device, torch.dtype]] = field(default_factory=set)  # of their gradients
    _numbers: list[float] = field(default_factory=list)  # that the latest graph was given
    _on_device: Tensor = field(default_factory=lambda: torch.empty(0))  # the same
    _num_made: Tensor = field(init=False)  # on the device: the steps that graphs have made; survives an interrupt inside of one
    _num_known: int = 0  # those of them that the host knows of
    _num_before: int = 0  # the same, when a graph was last asked for a step
    _begun: int | None = None  # the micro-batch that has begun, and for which there turned out to be no graph

    def __post_init__(self) -> None:
        super().__post_init__()
        passes = self.passes
        self._step = CompiledStep(self.optimizer, passes.model)
        self._forward_state = ForwardState(passes.model, passes.carried, passes.user_forward)
        # not without dimensions: torch 2.13 drops what AOTAutograd's graphs write into such an input on the CPU
        self._num_made = torch.zeros(1, dtype=torch.float64, device=self.statistics.device)

    def begin(self, trainer: Trainer, group: Sequence[Any]) -> int:
        """Runs the graphs, up to and with the step, or up to a micro-batch that no graph can hold; gives how many have run."""
        self.result = self._begun = None
        super().begin(trainer, group)
        return self._run(trainer, group) if len(group) > 0 else 0

    def cross(self, trainer: Trainer) -> Totals:
        """See `Gather`. Where graphs have run, one vector is read; they may have made the step."""
        result, self.result = self.result, None
        if result is None:
            return super().cross(trainer)
        trainer.begin_section("reduction")
        if self.passes.seeding is not None:
            self.passes.seeding.step()
        norm, has_stepped, loss, size, *rest = result.vector.tolist()  # sync
        if has_stepped:
            self._note_step()
        self.watch.decided(moved=bool(has_stepped))
        logs, weights = _logs(result.logs, rest)
        if not trainer.piggybacks and 0 <= size < math.inf:  # as `Statistics.finish` does, which takes longer
            requests = trainer.requests
            agreed = RankRequests(requests.stop, requests.stop_epoch, requests.more_data, requests.interrupt)
            return Totals(size, loss, result.num_micro_batches, 0, logs, agreed, norm, (), weights)
        statistics = self.host_statistics
        statistics.add(ForwardOutput(loss, size, _pairs(logs, weights)))
        statistics.pack(trainer.requests, trainer.piggybacks)
        return statistics.finish(norm)._replace(num_micro_batches=result.num_micro_batches)

    def _note_step(self) -> None:
        """Notes the step of a graph. Done again after an interrupt in it, this changes nothing that it has done."""
        self._step.commit()
        self._num_known = self._num_before + 1
        self.watch.leave(self.optimizer)

    def _has_made_step(self) -> bool:
        """Whether the graph has made its step, asked where its result is not here. Synchronises with the device.

        An interrupt is raised as soon as the graph has run. So the graph itself counts its steps.
        """
        made = bool(self._num_made.item() > self._num_before)  # sync
        if made:
            self._note_step()
        return made

    # --- whether there is a graph -----------------------------------------------------------------------------------------

    def _try_out(self, micro_batch: Any) -> None:
        """Looks at forward and backward of a micro-batch, run as they are and without a trace, to see what the loss depends on.

        This is done at first, and when modules, parameters or the optimizer's groups are not what they were. So a mistake of
        forward is told as it is without compiling, also a mean that is declared as a sum.
        """
        mark = self._forward_state.mark(micro_batch)
        named = [(name, parameter) for name, parameter in self.passes.model.named_parameters() if parameter.requires_grad]
        with torch.compiler.set_stance("force_eager"):
            output = self.passes.forward(micro_batch)
            loss, parameters = self.passes.scaled(output.loss), [parameter for _, parameter in named]
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True) if named else ()
        self._forward_state.put_back(mark)
        used = frozenset([name for (name, _), one in zip(named, gradients, strict=True) if one is not None])
        self._unfit = None if used else "the loss depends on no parameter"
        if any(one is not None and one.layout is not torch.strided for one in gradients):
            self._unfit = "there are sparse gradients"
        self._step.look(used)
        self._current = None

    def _prepare(self, trainer: Trainer, micro_batch: Any, *, is_first: bool) -> tuple[UpdateGraphs, StepTensors, Tensor]:
        """The graphs of this update, and what its step takes: tensors, and numbers on the device.

        Asked at the first micro-batch of a group and at the last one, after their handlers, who may set what the step takes.

        Raises:
            CannotCompileError: it cannot be a graph.
        """
        if self._obstacle is not None:
            raise CannotCompileError(self._obstacle)
        if self.passes.is_other:  # asked first, since its loss may depend on other parameters
            raise CannotCompileError("an update has another forward", is_passing=True)
        if self._step.has_changed():
            if not is_first:
                raise CannotCompileError("parameters or the optimizer's groups change within an update", is_passing=True)
            self._try_out(micro_batch)
        reason = self._unfit or self._why_not_now(trainer)
        begun = self._step.begin() if reason is None else reason
        if isinstance(begun, str):
            raise CannotCompileError(begun, is_passing=True)
        plans, tensors = begun
        if self._current is None:
            if plans not in self._graphs:
                self._graphs[plans] = UpdateGraphs(self.passes, self._forward_state, plans, self.rules, self.settings)
            self._current = self._graphs[plans]
            self._stepped = [self.passes.model.get_parameter(name) for plan in plans for name in plan.names]
            self._kinds = {(one.device, one.dtype) for one in self._stepped}
        self.gradients.kinds = self._kinds
        if not self.statistics.on_host:
            _prepare_cuda_graphs(tensors, self._num_made, is_first=is_first)
        return self._current, tensors, self._as_tensor(tensors.numbers)

    def _why_not_now(self, trainer: Trainer) -> str | None:
        """Why this update cannot be a graph; asked in each, as handlers and hooks come and go."""
        for event in _SEEING:
            if trainer.has_handlers(event):
                return f"{event.name} has a handler"
        if trainer.moments.on_backward or trainer.moments.before_norm:
            return "a handler or a metric looks at each backward"
        if _hooks_on_saved_tensors(True) is not None:
            return "hooks on saved tensors are set, and graphs do not call them"
        if torch.is_anomaly_enabled():
            return "torch's detection of anomalies is switched on"
        return self._step.why_not()

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            say_why_not_compiled(reason)

    # --- running the graphs -----------------------------------------------------------------------------------------------

    def _run(self, trainer: Trainer, micro_batches: Sequence[Any]) -> int:
        """Runs them and leaves the result; or what was gathered until one could not be compiled. Gives how many were run."""
        gathered, done = None, 0
        try:
            for done, micro_batch in enumerate(micro_batches):
                self.begin_micro_batch(trainer, done)
                is_last = done + 1 >= len(micro_batches)  # which is right by now, see ArrivingGroup
                if done == 0 or is_last:
                    graphs, tensors, numbers = self._prepare(trainer, micro_batch, is_first=done == 0)
                transfer = self.passes.transfer
                moved = micro_batch if transfer is None else transfer(micro_batch)
                if transfer is not None and not is_last:
                    transfer.ahead(micro_batches[done + 1])
                if not is_last:
                    gathered = graphs.add(moved, numbers, gathered)
                else:
                    self._num_before = self._num_known
                    self.watch.leave_to_device(self._has_made_step)
                    self.watch.enter(self.optimizer)
                    vector, logs = graphs.end(moved, numbers, gathered, tensors.states, self._num_made)
                    self.result = Result(vector, logs, done + 1)
        except CannotCompileError as error:
            self.watch.decided(moved=False)
            self._begun = done
            self._hand_over(error, gathered, done)
            return done
        trainer.state.micro_batch_in_group = None
        self.search.draws.may_happen = graphs.draw
        return done + 1

    def begin_micro_batch(self, trainer: Trainer, index: int) -> None:
        """See `Gather`. That of a graph that there turned out not to be has begun already."""
        if index != self._begun:
            super().begin_micro_batch(trainer, index)

    def _hand_over(self, error: CannotCompileError, gathered: Gathered | None, done: int) -> None:
        """Has this update go the plain way, which finds what was gathered; and all later ones, if nothing will change."""
        if not self.search.draws.may_happen:  # as far as graphs go
            self.search.draws.may_happen = True
            self.search.mark()
        self._obstacle = None if error.is_passing else error.reason
        self._say(error.reason)
        if gathered is None:
            return
        for parameter, gradient in zip(self._stepped, gathered.gradients, strict=True):
            parameter.grad = gradient
        loss, size, *rest = gathered.sums.tolist()  # sync, once in a process
        self.statistics.add(ForwardOutput(loss, size, _pairs(*_logs(gathered.logs, rest))))
        for _ in range(done - 1):
            self.statistics.add(ForwardOutput(0.0, 0.0))  # counts

    def _as_tensor(self, numbers: list[float]) -> Tensor:
        """The loss scale, that a step is wanted, and the numbers of the step, on the device."""
        numbers = [self.passes.loss_scaling.scale, 1.0, *numbers]
        if numbers != self._numbers:
            self._numbers = numbers
            self._on_device = copy_on(self.statistics.device, torch.tensor(numbers, dtype=torch.float64))
        return self._on_device


def _logs(names: Sequence[tuple[str, bool]], numbers: Sequence[float]) -> tuple[dict[str, float], dict[str, float]]:
    """The sum of each log, and the denominators of those that have one; see `Gathered`."""
    logs: dict[str, float] = {}
    weights: dict[str, float] = {}
    rest = iter(numbers)
    for name, is_pair in names:
        logs[name] = next(rest)
        if is_pair:
            weights[name] = next(rest)
    return logs, weights


def _pairs(logs: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, Any]:
    """The logs, as forward returns them."""
    return {name: (value, weights[name]) if name in weights else value for name, value in logs.items()}
