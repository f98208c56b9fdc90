"""Graphs that hold a whole update: forward, backward, the sums, the norm, the decision and the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ignite_train.errors import ForwardContractError
from ignite_train.fast.compiled_step import StepPlan, computed_once, stepped
from ignite_train.fast.direct_graph import inductor
from ignite_train.fast.folded_step import LARGEST_DIVISOR, SMALLEST_DIVISOR
from ignite_train.fast.graph_numbers import GraphNumbers
from ignite_train.fast.graph_trial import GraphTrial
from ignite_train.forward import Mean
from ignite_train.metrics import is_taken
from ignite_train.model.forward_state import ForwardState
from ignite_train.model.gradients import sharing_memory
from ignite_train.model.random_state import NUMPY, PYTHON, RandomState
from ignite_train.update.decision import EPSILON, Rules
from ignite_train.update.forward_backward import ForwardBackward

__all__ = ["CannotCompileError", "Gathered", "UpdateGraphs", "mark_static_address"]

_OTHERS = "the loss depends on other parameters than that of an earlier micro-batch"
_OWN_DRAWS = "forward draws from a generator of its own, and torch's graphs would repeat its numbers"
_TERMS = "the loss has terms with denominators of their own"
_REFUSED = "forward returned a sample size or a name in logs that is refused"


class CannotCompileError(Exception):
    """No graph can hold what was to be run, and nothing of it was run.

    Args:
        reason: why, in one line.
        is_passing: whether a later update may be a graph again.
    """

    def __init__(self, reason: str, *, is_passing: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.is_passing = reason, is_passing


class Gathered(NamedTuple):
    """The gradients and the sums that micro-batches have left, on their device.

    Attributes:
        gradients: sums over the micro-batches, of each parameter of the plans in their order, times the loss scale.
        sums: loss, sample size and logs, in float64; a log with a denominator of its own has two numbers.
        logs: the name of each log, and whether it has a denominator.
    """

    gradients: list[Tensor]
    sums: Tensor
    logs: tuple[tuple[str, bool], ...]

    def unscaled(self, scale: Tensor) -> Gathered:
        """A copy without the loss scale, and with 0 for what has overflowed."""
        gradients = [torch.nan_to_num(one / scale.to(one.dtype), 0.0, 0.0, 0.0) for one in self.gradients]
        return self._replace(gradients=gradients)


class UpdateGraphs:
    """Compiles and calls the graphs of an update, for one set of parameters and one way of stepping them.

    A group of one micro-batch is one graph. A larger one has a graph for its first micro-batch, whose gradients come
    into being, one for each further one, whose gradients are added, and one for its last one, with norm, decision, clipping and
    step. Sums of gradients are written in place, but for CUDA graphs, which would not be made of what writes into its inputs.

    A new graph is tried before it is used, because compilers have mistakes: one step is made without a trace, and norm, loss,
    sample size and all that was written are compared with those of the same code without compiling. One that draws random
    numbers from torch's generators is not compared, since it draws others.

    Sizes are taken as they are (`dynamic=False`), so each size of a micro-batch has graphs of its own, and a resumed run has
    those of one that was never interrupted. Torch compiles each of the four up to `torch._dynamo.config.recompile_limit` times.

    Args:
        passes: forward.
        forward_state: what forward may change.
        plans: how the parameters of each group are stepped.
        rules: what the decision follows.
        settings: arguments of `torch.compile`.

    Attributes:
        draw: whether one of the graphs draws random numbers.
    """

    def __init__(
        self,
        passes: ForwardBackward,
        forward_state: ForwardState,
        plans: tuple[StepPlan, ...],
        rules: Rules,
        settings: Mapping[str, Any],
    ) -> None:
        self._forward, self._model, self._precision = passes.user_forward, passes.model, passes.precision
        self._forward_state, self._plans = forward_state, plans
        self._max_grad_norm, self._normalize, self._scales_loss = rules.max_grad_norm, rules.normalize, rules.scales_loss
        self._settings, self.draw = settings, False
        self._adds_in_place = not _are_cuda_graphs(settings, next(self._model.parameters()).device)
        self._whole, self._first = self._compiled(UpdateGraphs._trace_whole), self._compiled(UpdateGraphs._trace_first)
        self._further, self._last = self._compiled(UpdateGraphs._trace_further), self._compiled(UpdateGraphs._trace_last)

    def add(self, micro_batch: Any, numbers: Tensor, before: Gathered | None) -> Gathered:
        """Runs forward and backward of a micro-batch that is not the last; see `end`.

        Args:
            micro_batch: on the device of the model.
            numbers: see `end`.
            before: what the micro-batches before it have left, whose gradients are added to in place; None for the first.
        """
        if before is not None:
            returned = self._call(self._further, micro_batch, numbers, before)
            gradients, sums = (before.gradients, returned) if self._adds_in_place else returned
            return before._replace(gradients=gradients, sums=sums)
        gathered = Gathered(*self._call(self._first, micro_batch, numbers, None))
        for index in sharing_memory(gathered.gradients):  # what is added to one of them must not be added to another
            gathered.gradients[index] = gathered.gradients[index].clone()
        return gathered

    def end(
        self, micro_batch: Any, numbers: Tensor, before: Gathered | None, states: list[Tensor], num_made: Tensor
    ) -> tuple[Tensor, Any]:
        """Runs forward and backward of the last micro-batch, and makes the step or skips it.

        Args:
            micro_batch: on the device of the model.
            numbers: the loss scale, 1 for a step or 0 for none, and those of each plan, in float64.
            before: what the micro-batches before it have left; None for a group of one.
            states: of all parameters; changed in place.
            num_made: float64; one is added to it, in place, if the step is made. It shows a step whose results were lost to
                an interrupt.

        Returns:
            The norm of the accumulated gradients, 1 if the step was made, and the sums of `Gathered`, in one vector; and the
            names of the logs.

        Raises:
            CannotCompileError: no graph can do it; nothing has run.
        """
        if before is None:
            returned: tuple[Tensor, Any] = self._call(self._whole, micro_batch, numbers, None, states, num_made)
            return returned
        return self._call(self._last, micro_batch, numbers, before, states, num_made), before.logs

    def _call(self, graph: _Graph, micro_batch: Any, numbers: Tensor, before: Gathered | None, *tensors: Any) -> Any:
        """Calls a graph, which is compiled and tried first if none fits these arguments."""
        arguments = (micro_batch, numbers, *(before or ()), *tensors)
        returned = graph.look_up(*arguments)
        if returned is None:
            self._try(graph, micro_batch, numbers, before, *tensors)
            returned = graph.compile(*arguments)
        self.draw = self.draw or graph.draws
        return returned

    def _try(self, graph: _Graph, micro_batch: Any, numbers: Tensor, before: Gathered | None, *tensors: Any) -> None:
        """Compiles a graph and compares all that it writes with the same code without compiling; leaves no trace of either.

        Raises:
            CannotCompileError: torch cannot compile it, or has compiled something else.
        """
        scale, numbers = numbers[0], self._numbers_of_trial(numbers)
        given = () if not tensors else (tensors[0], self._uncounted(tensors[1]))
        trial = GraphTrial(self._forward_state, micro_batch, self._stepped(*tensors[:1]))
        with trial:
            copied = before and before.unscaled(scale)
            returned = graph.compile(micro_batch, numbers, *(copied or ()), *given)
            left = (
                copied if given or self._adds_in_place else None
            )  # where the graph has left its sums, if not in what it returned
            found = _numbers(returned, left, has_ended=bool(given))
            trial.note([] if given else returned[0] if left is None else left.gradients)
            if trial.draws_of_its_own():
                raise CannotCompileError(_OWN_DRAWS)
        if graph.draws_of_torch:  # it draws others than code that is not compiled
            return
        with trial:
            gathered = self._run_plainly(micro_batch, numbers, before and before.unscaled(scale), given)
            if trial.draws_of_its_own():
                raise CannotCompileError(_OWN_DRAWS)
            if gathered is None:
                return
            expected = _numbers((gathered.gradients, gathered.sums), None, has_ended=False)
            dtypes = [*{one.dtype for one in self._model.parameters()}, *self._precision.dtypes]
            wrong = found.difference(expected, dtypes) or trial.difference([] if given else gathered.gradients, dtypes)
        if wrong is not None:
            raise CannotCompileError(
                f"torch has compiled it wrongly: {wrong}; compile=True may be wrong too, so compare it with compile=False"
            )

    def _uncounted(self, num_made: Tensor) -> Tensor:
        """A copy, so that the step of a trial is not counted."""
        copied = num_made.clone()
        if copied.is_cuda:
            mark_static_address(copied)  # as it is for the graph that is compiled here
        return copied

    def _run_plainly(self, micro_batch: Any, numbers: Tensor, before: Gathered | None, given: Sequence[Any]) -> Gathered | None:
        """The same without compiling, with the step where the tensors are `given` that it changes.

        None if forward or backward draws random numbers of torch's, or raises an exception.
        """
        random_state = RandomState([numbers.device], [])
        try:
            with torch.compiler.set_stance("force_eager"):
                gathered = Gathered(*self._gather(micro_batch, numbers))
                if random_state.torch_has_moved():
                    return None
                if before is not None:
                    pairs = zip(gathered.gradients, before.gradients, strict=True)
                    gathered = Gathered([one + other for one, other in pairs], gathered.sums + before.sums, before.logs)
                if given:
                    self._finish(gathered.gradients, gathered.sums, numbers, *given)
        except Exception:  # the graph, or the update that is made without it, says what is wrong
            return None
        return gathered

    def _numbers_of_trial(self, numbers: Tensor) -> Tensor:
        """Numbers of a step that is continuous in the gradients (Adam's is not without an epsilon), and of no loss scale."""
        numbers = numbers.clone()
        numbers[0], place = 1.0, 2
        for plan in self._plans:
            numbers[place] = 1.0  # the rate, which is the first of a plan
            if plan.is_adam:
                numbers[place + plan.num_numbers - 1] = 1.0
            place += plan.num_numbers
        return numbers

    def _stepped(self, states: Sequence[Tensor] | None = None) -> dict[str, dict[str, Tensor]]:
        """What a step changes, by kinds and by names of parameters; nothing where there are no states of a step."""
        if states is None:
            return {}
        names = [name for plan in self._plans for name in plan.names]
        found: dict[str, dict[str, Tensor]] = {"parameter": dict(zip(names, self._named(names), strict=True))}
        rest = iter(states)
        for plan in self._plans:
            for name in plan.names:
                for number in range(plan.num_states):
                    found.setdefault(f"optimizer's state {number} of", {})[name] = next(rest)
        return found

    def _compiled(self, traced: Callable[..., Any]) -> _Graph:
        """A method, with code of its own."""
        return _Graph(MethodType(_with_own_code(traced), self), self._settings, next(self._model.parameters()).device)

    # --- what is traced: Python runs here while torch compiles, and not in an update ------------------------------------------

    def _trace_whole(self, micro_batch: Any, numbers: Tensor, states: list[Tensor], num_made: Tensor) -> tuple[Tensor, Any]:
        _refuse_to_run()
        gradients, sums, logs = self._gather(micro_batch, numbers)
        return self._finish(gradients, sums, numbers, states, num_made), logs

    def _trace_first(self, micro_batch: Any, numbers: Tensor) -> tuple[list[Tensor], Tensor, Any]:
        _refuse_to_run()
        return self._gather(micro_batch, numbers)

    def _trace_further(self, micro_batch: Any, numbers: Tensor, gradients: list[Tensor], sums: Tensor, logs: Any) -> Any:
        _refuse_to_run()
        more, more_sums = self._gather_more(micro_batch, numbers, logs)
        if not self._adds_in_place:
            return [gradient + one for gradient, one in zip(gradients, more, strict=True)], sums + more_sums
        for gradient, one in zip(gradients, more, strict=True):
            gradient.add_(one)
        return sums + more_sums

    def _trace_last(
        self,
        micro_batch: Any,
        numbers: Tensor,
        gradients: list[Tensor],
        sums: Tensor,
        logs: Any,
        states: list[Tensor],
        num_made: Tensor,
    ) -> Tensor:
        _refuse_to_run()
        more, more_sums = self._gather_more(micro_batch, numbers, logs)
        added = [gradient + one for gradient, one in zip(gradients, more, strict=True)]
        return self._finish(added, sums + more_sums, numbers, states, num_made)

    def _gather(self, micro_batch: Any, numbers: Tensor) -> tuple[list[Tensor], Tensor, Any]:
        with self._precision.autocast():
            returned = self._forward(self._model, micro_batch)
        loss, sums, logs = _read(returned)
        scaled = loss * numbers[0].to(loss.dtype) if self._scales_loss else loss
        names = [name for plan in self._plans for name in plan.names]
        unused = [name for plan in self._plans for name in plan.unused]
        found = torch.autograd.grad(scaled, self._named([*names, *unused]), allow_unused=True)
        gradients = [one.detach() for one in found if one is not None]
        if len(gradients) != len(names) or any(one is None for one in found[: len(names)]):
            raise ForwardContractError(_OTHERS)
        return gradients, torch.stack(sums), logs

    def _gather_more(self, micro_batch: Any, numbers: Tensor, logs: Any) -> tuple[list[Tensor], Tensor]:
        gradients, sums, its_logs = self._gather(micro_batch, numbers)
        if its_logs != logs:
            raise ForwardContractError("the names in logs differ between micro-batches of one group")
        return gradients, sums

    def _named(self, names: list[str]) -> list[Tensor]:
        found: list[Tensor] = []
        for name in names:
            here: Any = self._model
            for part in name.split("."):
                here = getattr(here, part)
            found.append(here)
        return found

    def _finish(self, gradients: list[Tensor], sums: Tensor, numbers: Tensor, states: list[Tensor], num_made: Tensor) -> Tensor:
        with torch.no_grad():
            norm = _norm(gradients)
            may_step, factor = self._decide(norm, sums[0], sums[1], numbers)
            # Float32 may not hold the factor; a power of two takes it there, and is 1 for ordinary ones.
            power = torch.where(factor > LARGEST_DIVISOR, 2.0**100, torch.where(factor < SMALLEST_DIVISOR, 2.0**-100, 1.0))
            norm, power, rest = computed_once(norm, power, factor / power)
            self._step(gradients, (power, rest), may_step, numbers, states)
            num_made.copy_(num_made + may_step)
            return torch.cat([torch.stack([norm, may_step.to(norm.dtype)]), sums])

    def _decide(self, norm: Tensor, loss: Tensor, size: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The operations of `decide`, one by one: whether to step, and what to multiply the gradients by."""
        scale, wanted = numbers[0], numbers[1] > 0
        mean_factor = 1.0 / (scale * size) if self._normalize else 1.0 / scale
        norm = norm * mean_factor
        may_step = wanted & (size > 0) & torch.isfinite(size) & torch.isfinite(loss / size) & torch.isfinite(norm)
        if self._max_grad_norm is None:
            return may_step, mean_factor
        return may_step, mean_factor * torch.clamp(self._max_grad_norm / (norm + EPSILON), max=1.0)

    def _step(
        self, gradients: list[Tensor], factors: Sequence[Tensor], may_step: Tensor, numbers: Tensor, states: list[Tensor]
    ) -> None:
        """Changes parameters and states in place, or writes what is there."""
        parameters = self._named([name for plan in self._plans for name in plan.names])
        scalars = list(numbers.unbind())
        place, number, state = 0, 2, 0
        for plan in self._plans:
            mine = scalars[number : number + plan.num_numbers]
            number += plan.num_numbers
            for _ in plan.names:
                parameter, old = parameters[place], states[state : state + plan.num_states]
                power, rest = (factor.to(torch.promote_types(parameter.dtype, torch.float32)) for factor in factors)
                gradient = gradients[place] * power * rest
                new, new_states = stepped(plan, mine, parameter, gradient, old)
                parameter.copy_(torch.where(may_step, new, parameter))
                for before, after in zip(old, new_states, strict=True):
                    before.copy_(torch.where(may_step, after, before))
                place, state = place + 1, state + plan.num_states


def _numbers(returned: Any, before: Gathered | None, *, has_ended: bool) -> GraphNumbers:
    """The numbers to compare, from the result of a graph. Synchronises with the device.

    Args:
        returned: by a graph.
        before: what it was given that micro-batches before had left.
        has_ended: whether it was one that ends a group.
    """
    if has_ended:
        vector = returned[0] if before is None else returned
        norm, _, loss, size, *_ = vector.tolist()
    else:
        gradients, sums, *_ = returned if before is None else (before.gradients, returned)
        norm, (loss, size, *_) = _norm(gradients).item(), sums.tolist()
    return GraphNumbers(norm, loss, size)


def _read(returned: Any) -> tuple[Tensor, list[Tensor], tuple[tuple[str, bool], ...]]:
    """The loss; it, the sample size and the logs as float64 scalars; the names of the logs. See `as_forward_output`.

    Numbers and names that it refuses are refused here too: the update that is made without a graph then says why.
    """
    loss, size = returned, 1
    logs: Mapping[str, Any] = {}
    if not isinstance(returned, Tensor):
        loss = returned[0]
        size = returned[1] if len(returned) > 1 else 1
        logs = returned[2] if len(returned) > 2 else {}
    if isinstance(size, (int, float)) and not 0 <= size < math.inf:
        raise ForwardContractError(_REFUSED)
    if not isinstance(loss, Tensor):
        raise ForwardContractError(_TERMS)
    loss = loss.reshape(())
    values, names = [_number(loss, loss), _number(size, loss)], []
    for name, value in logs.items():
        if is_taken(name):
            raise ForwardContractError(_REFUSED)
        names.append((name, isinstance(value, tuple)))
        numbers = [_number(one, loss) for one in (value if isinstance(value, tuple) else [value])]
        values.extend([numbers[0] * values[1], values[1]] if isinstance(value, Mean) else numbers)
    return loss, values, tuple(names)


def _number(value: Any, like: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().reshape(()).to(like.device, torch.float64)
    return torch.full((), float(value), dtype=torch.float64, device=like.device)


def _norm(gradients: list[Tensor]) -> Tensor:
    """L2 norm over all gradients, in float64, whose squares hold those of float32; those of float64 are scaled first."""
    wide = [gradient.to(torch.float64) for gradient in gradients if gradient.numel() > 0]
    if all(gradient.dtype is not torch.float64 for gradient in gradients):
        return torch.stack([one.square().sum() for one in wide]).sum().sqrt()
    largest = torch.stack([one.abs().amax() for one in wide]).amax()
    divisor = torch.where((largest > 0) & torch.isfinite(largest), largest, torch.ones_like(largest))
    return torch.stack([(one / divisor).square().sum() for one in wide]).sum().sqrt() * divisor


def mark_static_address(tensor: Tensor) -> None:
    """Says that a tensor stays where it is, so that a CUDA graph may write into it."""
    torch._dynamo.mark_static_address(tensor, guard=False)


def _are_cuda_graphs(settings: Mapping[str, Any], device: torch.device) -> bool:
    """Whether torch is asked to make CUDA graphs of what it compiles."""
    options = settings.get("options") or {}
    wanted = settings.get("mode") in ("reduce-overhead", "max-autotune") or options.get("triton.cudagraphs", False)
    return device.type == "cuda" and bool(wanted)


# --- calling what torch has compiled ----------------------------------------------------------------------------------------


_WHILE_COMPILING = {
    "trace_autograd_ops": True,  # or torch would not look into `torch.autograd.grad`
    "skip_nnmodule_hook_guards": False,  # or a hook of a module that is added later would not be called
    "automatic_dynamic_shapes": False,  # these two are `dynamic=False`
    "assume_static_by_default": True,
    "record_runtime_overhead": False,  # a range in profiles around what precedes a graph, which each call would pay for
}


def _with_own_code(function: Callable[..., Any]) -> FunctionType:
    """The same function: torch counts by code how often something was compiled, and looks graphs up there."""
    assert isinstance(function, FunctionType)  # noqa: S101
    code, named = function.__code__.replace(), function.__name__
    return FunctionType(code, function.__globals__, named, function.__defaults__, function.__closure__)


class _NotCompiledError(Exception):
    """A function was about to run uncompiled."""


class _Graph:
    """A compiled function, whose calls cost little where it has been compiled for what it is called with.

    What `torch.compile` returns sets and resets switches around each call, which takes as long as a small update. They matter
    where it compiles. So it is asked to do that only where nothing fits: before, the function is called with torch looking up
    what was compiled for it, and nothing else. What is private in torch about that stands here; without it, each call goes
    through what `torch.compile` returns.

    Args:
        function: a method to compile; it calls `_refuse_to_run` first.
        settings: arguments of `torch.compile`.
        device: that of the model.

    Attributes:
        draws: whether a call that compiles it has drawn random numbers.
        draws_of_torch: whether the latest such call has drawn from torch's generators.
    """

    def __init__(self, function: MethodType, settings: Mapping[str, Any], device: torch.device) -> None:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        self._function, self._compiled = function, torch.compile(function, **_arguments(settings, on_cpu=device.type == "cpu"))
        self._set_lookup: Callable[[Any], Any] | None = vars(torch._C._dynamo.eval_frame).get("set_eval_frame")
        self._refusals = (TorchDynamoException, FailOnRecompileLimitHit)
        self._target, self._is_new, self.draws, self.draws_of_torch = device, True, False, False

    def look_up(self, *arguments: Any) -> Any:
        """Calls what was compiled for such arguments. Gives None where nothing was, and then nothing has run."""
        if self._is_new:
            return None
        if self._set_lookup is None:
            return self.compile(*arguments)
        before = None
        try:
            before = self._set_lookup(_ONLY_LOOK_UP)
            return self._function(*arguments)
        except _NotCompiledError:
            return None
        finally:
            self._set_lookup(before)

    def compile(self, *arguments: Any) -> Any:
        """Compiles it for such arguments if need be, and calls it.

        Raises:
            CannotCompileError: torch cannot compile it for these arguments; nothing has run.
        """
        random_state = RandomState([self._target], [PYTHON, NUMPY])
        try:
            with torch._dynamo.config.patch(_WHILE_COMPILING):
                returned = self._compiled(*arguments)
        except _NotCompiledError as error:
            raise CannotCompileError(str(error), is_passing=True) from error
        except self._refusals as error:
            raise CannotCompileError(_reason(error)) from error
        self._is_new = False
        self.draws_of_torch = random_state.torch_has_moved()
        self.draws = self.draws or self.draws_of_torch or bool(random_state.moved())
        return returned


def _arguments(settings: Mapping[str, Any], *, on_cpu: bool) -> dict[str, Any]:
    """The arguments of `torch.compile`: those of the user, without guards that always hold, and with graphs called directly."""
    options = {_FILTER: _may_change, **(settings.get("options") or {})}
    for_backend = {name: value for name, value in options.items() if name != _FILTER}
    backend = inductor({**settings, "options": for_backend}) if on_cpu else None
    if backend is not None:
        return {"backend": backend, "options": {_FILTER: options[_FILTER]}, "fullgraph": True}
    if settings.get("mode") is not None:  # torch takes no options beside it
        return {**settings, "fullgraph": True}
    return {**settings, "options": options, "fullgraph": True}


_FILTER = "guard_filter_fn"
_OURS = ("self", "G['")  # where guards on this library's own objects, and on globals of this file, begin
_NOT_OURS = ("self._model", "self._forward", "G['__import_", "G['___unnamed_scope")
_IMPORTED = "G['__import_ignite_train_dot_"


def _may_change(guards: Sequence[Any]) -> list[bool]:
    """Which guards to look at in each call: not those on this library's code and numbers, or on Python's builtins.

    They stay as they are while a graph lives, and are as many as those on the model and on what forward uses. Hooks on saved
    tensors are left out too: a graph with its own backward saves none.
    """
    return [not _always_holds(guard.name, guard.guard_type) for guard in guards]


def _always_holds(name: str, kind: str) -> bool:
    if kind == "AUTOGRAD_SAVED_TENSORS_HOOKS" or name.startswith(_IMPORTED):
        return True
    return name.startswith(_OURS) and not name.startswith(_NOT_OURS)


_ONLY_LOOK_UP = False  # for `set_eval_frame`: run what was compiled, and compile nothing


def _refuse_to_run() -> None:
    """Called first in what is traced, which must not run uncompiled."""
    if not torch.compiler.is_compiling():
        raise _NotCompiledError("torch compiles nothing while a mode of its dispatcher or another stance is active")


def _reason(error: Exception) -> str:
    """The reason that torch gives, in one line."""
    if type(error).__name__ == "FailOnRecompileLimitHit":
        return "there are more sizes of micro-batches, or numbers in them, than torch._dynamo.config.recompile_limit"
    for reason in (_OTHERS, _REFUSED, _TERMS):
        if reason in str(error):
            return reason
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    explained = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")]
    return f"torch cannot compile it: {'; '.join([*lines[:1], *explained[:1]]) or type(error).__name__:.300}"
