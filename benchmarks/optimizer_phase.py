"""From accumulated gradients to new parameters: what scaling, norm, clipping and the step take together.

    python benchmarks/optimizer_phase.py
    python benchmarks/optimizer_phase.py --device cuda --parameters 10 --parameters 100 --parameters 1000

The floor is what cannot be avoided: one read of the gradients for their norm (of one flat tensor of the same size) and one
fused AdamW step. This library is timed from the last handler of BACKWARD_COMPLETED to the first of STEP_COMPLETED, in an
update whose forward and backward cost nothing: gradients that were prepared before are put in place. Every way starts from
the same gradients and must come to the same parameters. On a GPU the host waits for it before each reading of the clock.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from typer import Option

from card import card, now
from ignite_train import ForwardOutput, TrainEvents, create_trainer
from interleaving import MIN_REPETITIONS, interleave, table

FLOOR = "floor: norm of one flat tensor + fused AdamW"
SAMPLE_SIZE = 8.0  # the divisor of the sum
RATE = 1e-4

Phase = Callable[[], float]


class Weights(nn.Module):
    """So many parameters in so many tensors, and one more that backward reaches."""

    def __init__(self, parameters: int, tensors: int, device: str) -> None:
        super().__init__()
        width = max(1, parameters // tensors)
        self.weights = nn.ParameterList(torch.randn(width, device=device) for _ in range(tensors))
        self.anchor = nn.Parameter(torch.zeros((), device=device))

    def now(self) -> float:
        """The clock, when all is done that was asked of the device."""
        return now(self.anchor.device.type)

    def forward(self) -> Tensor:
        """Costs nothing; its gradient is one."""
        return self.anchor * 1.0


class Placed(torch.autograd.Function):
    """A loss whose gradients are copies of given ones: nothing but backward may write gradients before their reduction."""

    @staticmethod
    def forward(ctx: Any, source: list[Tensor], *parameters: Tensor) -> Tensor:
        """Gives a zero."""
        ctx.source = source
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        """Gives the gradients, without an own graph."""
        return None, *(gradient.clone() for gradient in ctx.source)


class Gradients:
    """Gradients of a sum over samples, set again before each step, because most steps change them."""

    def __init__(self, model: Weights) -> None:
        self._parameters = list(model.parameters())
        self._source = [torch.randn_like(parameter) for parameter in self._parameters]
        self._given = [torch.empty_like(parameter) for parameter in self._parameters]
        self.norm = float(torch.stack([source.norm() for source in self._source]).norm()) / SAMPLE_SIZE

    def loss(self) -> Tensor:
        """A loss that has these gradients."""
        loss: Tensor = Placed.apply(self._source, *self._parameters)
        return loss

    def place(self, factor: float = 1.0) -> None:
        """Gives each parameter its gradient times `factor`."""
        torch._foreach_copy_(self._given, self._source)
        if factor != 1.0:
            torch._foreach_mul_(self._given, factor)
        for parameter, gradient in zip(self._parameters, self._given, strict=True):
            parameter.grad = gradient


def optimizers(model: nn.Module) -> dict[bool, Optimizer]:
    """Torch's AdamW, fused (True) or as it is by default (False), shared by all ways: its moments are large."""
    return {fused: torch.optim.AdamW(model.parameters(), lr=RATE, fused=True if fused else None) for fused in (True, False)}


def floor(model: Weights, optimizer: Optimizer, gradients: Gradients) -> Phase:
    """One read and one pass."""
    flat = torch.randn(sum(parameter.numel() for parameter in model.parameters()), device=model.anchor.device)

    def phase() -> float:
        gradients.place()
        started = model.now()
        torch.linalg.vector_norm(flat).item()
        optimizer.step()
        return model.now() - started

    return phase


def by_hand(model: Weights, optimizer: Optimizer, gradients: Gradients, max_norm: float) -> Phase:
    """The gradient is already that of the mean: `clip_grad_norm_` and the step."""
    parameters = list(model.parameters())

    def phase() -> float:
        gradients.place(1 / SAMPLE_SIZE)
        started = model.now()
        clip_grad_norm_(parameters, max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return model.now() - started

    return phase


def fairseq_style(model: Weights, optimizer: Optimizer, gradients: Gradients, max_norm: float) -> Phase:
    """One pass each to multiply, for the norm and to clip, and the step."""
    parameters = list(model.parameters())

    def phase() -> float:
        gradients.place()
        started = model.now()
        for parameter in parameters:
            parameter.grad.mul_(1 / SAMPLE_SIZE)  # type: ignore[union-attr]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()  # type: ignore[union-attr]
        coefficient = (max_norm / (norm + 1e-6)).clamp_(max=1)
        for parameter in parameters:
            parameter.grad.mul_(coefficient)  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        return model.now() - started

    return phase


def ignite_train(model: Weights, optimizer: Optimizer, gradients: Gradients, max_norm: float) -> Phase:
    """What a trainer does between the last backward and the end of the step."""
    moments, weights = [0.0, 0.0], model

    def forward(_model: nn.Module, _: int) -> ForwardOutput:
        return ForwardOutput(gradients.loss(), SAMPLE_SIZE)

    def start() -> None:
        moments[0] = weights.now()

    def stop() -> None:
        moments[1] = weights.now()

    trainer = create_trainer(model, optimizer, forward, max_grad_norm=max_norm)
    trainer.add_event_handler(TrainEvents.BACKWARD_COMPLETED, start)
    trainer.prepend_event_handler(TrainEvents.STEP_COMPLETED, stop)

    def phase() -> float:
        trainer.run([0], max_iters=trainer.state.iteration + 1)
        return moments[1] - moments[0]

    return phase


WAYS: dict[str, tuple[Callable[[Weights, Optimizer, Gradients, float], Phase], bool]] = {
    "ignite_train, fused AdamW": (ignite_train, True),
    "ignite_train, default AdamW": (ignite_train, False),
    "`clip_grad_norm_`, fused AdamW": (by_hand, True),
    "`clip_grad_norm_`, default AdamW": (by_hand, False),
    "fairseq-style (multiply, norm, clip, step), fused AdamW": (fairseq_style, True),
    "fairseq-style (multiply, norm, clip, step), default AdamW": (fairseq_style, False),
}


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Computes on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_same_work(device: str) -> None:
    """A few small steps of every way end at the same parameters, with clipping and without."""
    for clip in (0.5, 2.0):  # times the norm
        ends = []
        for way, fused in WAYS.values():
            torch.manual_seed(0)
            model = Weights(3000, 7, device)
            gradients = Gradients(model)
            phase = way(model, optimizers(model)[fused], gradients, clip * gradients.norm)
            for _ in range(3):
                phase()
            ends.append(torch.cat([weight.detach() for weight in model.weights]))
        for name, end in zip(WAYS, ends, strict=True):
            if not torch.allclose(end, ends[0], rtol=0, atol=1e-2 * RATE):
                raise AssertionError(f"not the same parameters: {name}, {(end - ends[0]).abs().max() / RATE:.3g} rates apart")


def print_cost_of_tensors(parameters: int, tensors: Sequence[int], repetitions: int) -> None:
    """What the library's phase takes over parameters in many tensors, to the same over one tensor of as many; one thread."""
    phases = {}
    for pieces in (1, *tensors):
        torch.manual_seed(0)
        model = Weights(parameters, pieces, "cpu")
        gradients = Gradients(model)
        phases[f"{pieces} tensors"] = ignite_train(model, optimizers(model)[True], gradients, 0.5 * gradients.norm)
    with threads(1):
        rounds = interleave(phases, repetitions=repetitions, bracket=False)
    print(f"\n{parameters / 1e6:.1f} M parameters, ignite_train with fused AdamW, to one tensor of as many.\n")
    names = [name for name in phases if name != "1 tensors"]
    print(table(["tensors", "ratio to one tensor (quartiles)"], [[name, rounds.ratios(name).show()] for name in names]))


def print_ways(millions: float, pieces: int, device: str, num_threads: Sequence[int], repetitions: int, until: float) -> None:
    """What each way takes, to the floor."""
    torch.manual_seed(0)
    model = Weights(int(millions * 1e6), pieces, device)
    gradients, optimizer = Gradients(model), optimizers(model)
    phases = {FLOOR: floor(model, optimizer[True], gradients)}
    phases |= {name: way(model, optimizer[fused], gradients, 0.5 * gradients.norm) for name, (way, fused) in WAYS.items()}
    for number in num_threads:
        with threads(number):
            rounds = interleave(phases, repetitions=repetitions, bracket=False, until=until)
        where = f"threads: {number}" if device == "cpu" else card()
        took = f"the floor takes {rounds.typical(FLOOR) * 1e3:.3g} ms; rounds: {len(rounds.pairs[FLOOR])}"
        print(f"\n{millions:g} M parameters in {pieces} tensors, {where}; {took}.\n")
        print(
            table(["way", "ratio to the floor (quartiles)"], [[name, rounds.ratios(name).show()] for name in WAYS]), flush=True
        )


def main(
    parameters: Annotated[list[float], Option(help="Millions of them; may be given several times.")] = [50.0],  # noqa: B006
    tensors: Annotated[list[int], Option(help="Cut into so many; may be given several times.")] = [192, 3072],  # noqa: B006
    num_threads: Annotated[list[int], Option(help="May be given several times.")] = [1, 2],  # noqa: B006
    repetitions: Annotated[int, Option(min=1, help="Rounds; every way runs in each of them.")] = 2 * MIN_REPETITIONS,
    device: Annotated[str, Option(help="cpu or cuda; threads are chosen for the CPU alone.")] = "cpu",
    minutes: Annotated[float, Option(help="When they are over no round begins, but the first ones.")] = math.inf,
) -> None:
    """Measure each way from gradients to parameters against the floor."""
    until = time.perf_counter() + 60 * minutes
    try:
        check_same_work(device)
    except AssertionError as error:
        if device == "cpu":
            raise
        print(f"{error}.")  # on a machine that is there for minutes the figures are taken all the same
    for millions in parameters:
        for pieces in tensors:
            print_ways(millions, pieces, device, num_threads if device == "cpu" else num_threads[:1], repetitions, until)
    if device == "cpu":
        for number in (3072 * 1024, int(parameters[-1] * 1e6)):
            print_cost_of_tensors(number, tensors, repetitions)


if __name__ == "__main__":
    typer.run(main)
