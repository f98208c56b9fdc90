"""How many instructions the processor executes in an update, counted by callgrind: other processes cannot disturb a count.

    python benchmarks/instructions.py            # counts, and writes three tables into docs/performance.md
    python benchmarks/instructions.py --print    # only shows the tables

Needs valgrind (`apt-get install valgrind`). The loops of `overhead.py` train its tiny network, with clipping, on one thread;
loss and norm of each update are kept. Loops and peers run in processes under valgrind, where the processor is a simple one
without AVX-512: a ratio of instructions says how much work is spared, not how much time. Garbage is not collected meanwhile.
What people write by default, with optimizers that are not fused, has tables for 1, 4 and 16 micro-batches an update. A table
of its own says what `attach_defaults` adds to the same loop, in updates without a line and over a whole interval.

In the updates 1, 2, 4, 8, ... a trainer looks whether Python's generator was drawn from, whose state takes 0.1 million
instructions to read. None of these is among the updates that count.
"""

import gc
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor
from torch.autograd.variable import Variable
from typer import Option

import contestants
import peers
from contestants import LOG_EVERY, REFERENCE, Contestant, MicroBatches, Outcome, Work
from ignite_train import TrainEvents
from interleaving import table
from overhead import DEFAULT_OPTIMIZERS, tiny_work

PAGE = Path(__file__).parent.parent / "docs/performance.md"
BEGIN, END = "<!-- written by benchmarks/instructions.py -->\n", "<!-- end -->\n"
WARM_UP, UPDATES = 18, 10
OPTIMIZERS: dict[str, Any] = {"SGD": partial(torch.optim.SGD, lr=0.05), "AdamW": partial(torch.optim.AdamW, lr=1e-3)}
FUSED = "fused=True"


class Loop(NamedTuple):
    """A loop, whether its optimizer is a fused one, the updates before those that count, and how many count."""

    run: Contestant
    fused: bool
    warm_up: int = WARM_UP
    updates: int = UPDATES


BARE = f"ignite_train, {FUSED}"
PIECES = "the pieces alone"
WATCHED = "attach_defaults, updates between two lines", f"attach_defaults, a line in {LOG_EVERY} updates"
# The loops of this file and of this library, which share a process.
LOOPS: dict[str, Loop] = {
    REFERENCE: Loop(contestants.by_hand, fused=False),
    f"{REFERENCE}, {FUSED}": Loop(contestants.by_hand, fused=True),
    "ignite_train": Loop(contestants.ignite_train, fused=False),
    BARE: Loop(contestants.ignite_train, fused=True),
}
for name, number in zip(WATCHED, (UPDATES, LOG_EVERY), strict=True):  # each with the same updates of a bare trainer
    LOOPS[name] = Loop(contestants.ignite_train_with_defaults, fused=True, warm_up=LOG_EVERY + WARM_UP, updates=number)
    LOOPS[f"{BARE}, {number} later updates"] = LOOPS[name]._replace(run=contestants.ignite_train)
# What people write by default, in a process for each number of micro-batches. The updates without a line count, as most are.
BY_DEFAULT = {f"by default, accumulation {steps}": steps for steps in (1, 4, 16)}
DEFAULT_LOOPS: dict[str, Contestant] = {REFERENCE: contestants.by_hand, **contestants.BY_DEFAULT}
PEERS: dict[str, Contestant] = peers.WITHOUT_LOGGING | {"Transformers Trainer, logging every 50": peers.transformers}
STAGES = ("forward and loss", "backward", "norm, decision", "clipping, step, clearing", "all between updates")


def kernel_of(optimizer: torch.optim.Optimizer) -> Callable[[list[Tensor], Tensor], None]:
    """Torch's fused kernel for it, called with gradients and what they are divided by; the lists are made once."""
    group = optimizer.param_groups[0]
    parameters = group["params"]
    if isinstance(optimizer, torch.optim.SGD):
        options = {name: group[name] for name in ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")}
        return lambda gradients, scale: torch._fused_sgd_(
            parameters, gradients, [], **options, is_first_step=False, grad_scale=scale
        )
    options = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
    options["beta1"], options["beta2"] = group["betas"]
    moments = [[torch.zeros_like(parameter) for parameter in parameters] for _ in range(2)]
    steps, one = torch.zeros(len(parameters)), torch.ones(())
    step_of_each = [*steps]

    def run(gradients: list[Tensor], scale: Tensor) -> None:
        steps.add_(one)
        torch._fused_adamw_(parameters, gradients, *moments, [], step_of_each, **options, grad_scale=scale)

    return run


def pieces_alone(work: Work) -> Outcome:
    """An update of which nothing is asked or checked: no loop that calls torch's pieces one by one needs much less."""
    parameters, outcome, kernel = list(work.model.parameters()), Outcome([]), kernel_of(work.optimizer)
    run_engine: Any = Variable._execution_engine.run_backward
    one, scale = torch.ones(()), torch.ones(())
    for micro_batch in work.micro_batches:
        loss, size, *_ = work.forward(work.model, micro_batch)
        run_engine((loss,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        gradients: Any = [parameter.grad for parameter in parameters]
        norm = math.hypot(*map(float, torch._foreach_norm(gradients))) / size
        scale.fill_(size / min(1.0, work.max_grad_norm / (norm + 1e-6)))  # type: ignore[operator]
        with torch.no_grad():
            kernel(gradients, scale)
        for parameter in parameters:
            parameter.grad = None
        outcome.losses.append(loss.item() / size)
        outcome.norms.append(norm)
    return outcome


class Counter:
    """Has callgrind count between two notes of the loader; or, of what lies between them, one stage only.

    Args:
        stage: which one; None counts everything.
    """

    def __init__(self, stage: str | None = None) -> None:
        self._stage, self._open, self._counts = stage, False, False

    def note(self) -> None:
        """The loader calls it before the first update that counts, and after the last."""
        self._open = not self._open
        if self._stage is None or not self._open:
            self._set(counts=self._open)

    def mark(self, stage: str) -> None:
        """The loop calls it where a stage begins."""
        if self._open:
            self._set(counts=stage == self._stage)

    def _set(self, *, counts: bool) -> None:
        if counts != self._counts:
            self._counts = counts
            torch._C._valgrind_toggle()

    def write(self) -> None:
        """Has callgrind write the count into a file of its own, and begin at zero."""
        torch._C._valgrind_toggle()
        torch._C._valgrind_toggle_and_dump_stats()


LOOPS[PIECES] = Loop(pieces_alone, fused=True)


def work_for(
    optimizer: Callable[..., Any], counter: Counter, warm_up: int = WARM_UP, updates: int = UPDATES, steps: int = 1
) -> Work:
    """The tiny network, whose loader tells `counter` which updates count."""
    work = tiny_work(steps, 1, optimizer=optimizer)
    batches = [*islice(work.micro_batches, 64)]
    work.micro_batches = MicroBatches(
        batches, steps=steps, stretch=updates, stretches=1, warm_up=warm_up, before_note=counter.note
    )
    return work


def by_hand_in_stages(work: Work, mark: Callable[[str], None]) -> Outcome:
    """`contestants.by_hand`, in stages."""
    forward_, backward, norm, step, between = STAGES
    parameters, outcome = list(work.model.parameters()), Outcome([])
    work.model.train()
    for micro_batch in work.micro_batches:
        mark(forward_)
        loss = work.mean_loss(work.model, micro_batch)
        mark(backward)
        loss.backward()
        mark(norm)
        outcome.norms.append(torch.nn.utils.clip_grad_norm_(parameters, work.max_grad_norm or 0.0))  # type: ignore[arg-type]
        mark(step)
        work.optimizer.step()
        work.optimizer.zero_grad()
        mark(between)
        outcome.losses.append(loss.detach())  # type: ignore[arg-type]
    return outcome


def ignite_train_in_stages(work: Work, mark: Callable[[str], None]) -> Outcome:
    """This library, in stages; each handler that begins one costs something too."""
    forward_, backward, norm, step, between = STAGES
    trainer = contestants.trainer_of(work)
    trainer.add_event_handler(TrainEvents.MICRO_BATCH_STARTED, lambda: mark(forward_))
    trainer.add_event_handler(TrainEvents.FORWARD_COMPLETED, lambda: mark(backward))
    trainer.add_event_handler(TrainEvents.BACKWARD_COMPLETED, lambda: mark(norm))
    trainer.add_event_handler(TrainEvents.GRADIENTS_READY, lambda: mark(step))
    trainer.add_event_handler(TrainEvents.STEP_COMPLETED, lambda: mark(between))
    return contestants.run_trainer(work, trainer)


STAGED = {f"{REFERENCE}": (by_hand_in_stages, False), f"ignite_train, {FUSED}": (ignite_train_in_stages, True)}


def whole(name: str) -> list[tuple[str, str, str | None]]:
    """What is counted in one process: optimizer, loop and stage, in this order.

    Args:
        name: of a peer, one of `BY_DEFAULT`, or empty for the other loops of ours.
    """
    if name in BY_DEFAULT:
        return [(kind, loop, None) for kind in DEFAULT_OPTIMIZERS for loop in DEFAULT_LOOPS]
    loops: list[tuple[str, str, str | None]] = [
        (kind, loop, None) for kind in OPTIMIZERS for loop in ([name] if name else LOOPS)
    ]
    return loops if name else loops + [(kind, loop, stage) for kind in OPTIMIZERS for loop in STAGED for stage in STAGES]


def loop_of(name: str) -> Loop:
    """One of ours, or a peer."""
    return LOOPS[name] if name in LOOPS else Loop(PEERS[name], fused=True)


def count_here(name: str) -> None:
    """Runs under valgrind: each count goes into a file of its own, in the order of `whole`."""
    import torch.utils.tensorboard.summary  # what `TensorBoard` imports with its first points

    torch.set_num_threads(1)
    gc.disable()
    control = subprocess.Popen(["callgrind_control", "-i", "on", str(os.getpid())], stdout=subprocess.DEVNULL)  # noqa: S607
    while control.poll() is None:
        pass  # valgrind hears it while this process runs; imports went before, since they take minutes if they are watched
    for kind, loop, stage in whole(name):
        counter = Counter(stage)
        if name in BY_DEFAULT:
            warm_up = LOG_EVERY + WARM_UP if "every" in loop else WARM_UP
            contestants.run(DEFAULT_LOOPS[loop], work_for(DEFAULT_OPTIMIZERS[kind], counter, warm_up, steps=BY_DEFAULT[name]))
        elif stage is not None:
            run, fused = STAGED[loop]
            contestants.run(partial(run, mark=counter.mark), work_for(partial(OPTIMIZERS[kind], fused=fused), counter))
        else:
            contestant, fused, warm_up, updates = loop_of(loop)
            contestants.run(contestant, work_for(partial(OPTIMIZERS[kind], fused=fused), counter, warm_up, updates))
        counter.write()
        gc.collect()


def count(name: str) -> dict[tuple[str, str, str | None], int]:
    """Instructions of an update, of each loop and stage in `whole`; empty if the process failed."""
    print(f"{name or 'ours and by hand'} ...", file=sys.stderr, flush=True)
    with TemporaryDirectory() as directory:
        written = Path(directory) / "counts"
        valgrind = [
            "valgrind",
            "--tool=callgrind",
            "--instr-atstart=no",
            "--collect-atstart=no",
            "--dump-line=no",
            f"--log-file={directory}/log",
        ]
        command = [*valgrind, f"--callgrind-out-file={written}", sys.executable, __file__, "--inside", name]
        environment = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        ended = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
        texts = [Path(f"{written}.{number}") for number in range(1, len(whole(name)) + 1)]
        if ended.returncode or not all(text.exists() for text in texts):
            print(f"left out: {name}, which did not run under valgrind (status {ended.returncode})", file=sys.stderr)
            return {}
        found = [re.search(r"^totals: (\d+)", text.read_text(encoding="utf-8"), re.MULTILINE) for text in texts]
    updates = [UPDATES if stage is not None or name in BY_DEFAULT else loop_of(loop).updates for _, loop, stage in whole(name)]
    return {what: int(match[1]) // each for what, match, each in zip(whole(name), found, updates, strict=True) if match}


def loops_table(counts: dict[tuple[str, str, str | None], int]) -> str:
    """Each loop beside the one by hand with torch's default optimizer."""
    rows = []
    kinds = [*dict.fromkeys(kind for kind, _, _ in counts)]
    for loop in dict.fromkeys(loop for _, loop, stage in counts if stage is None):
        row = [loop]
        for kind in kinds:
            number, reference = counts[kind, loop, None], counts[kind, REFERENCE, None]
            row += [f"{number / 1e3:.0f}", f"{number / reference:.3f}"]
        rows.append(row)
    return table(["loop", *(text for kind in kinds for text in (f"{kind}: thousand instructions", "ratio"))], rows)


def default_table(counts: dict[int, dict[tuple[str, str, str | None], int]]) -> str:
    """Ratios of what people write by default, for each number of micro-batches of an update."""
    columns = [(kind, steps) for kind in DEFAULT_OPTIMIZERS for steps in counts]
    rows = []
    for loop in list(DEFAULT_LOOPS)[1:]:
        ratios = [counts[steps][kind, loop, None] / counts[steps][kind, REFERENCE, None] for kind, steps in columns]
        rows.append([loop, *(f"{ratio:.3f}" for ratio in ratios)])
    return table(["loop", *(f"{kind}, {steps}" for kind, steps in columns)], rows)


def watching_table(counts: dict[tuple[str, str, str | None], int]) -> str:
    """What `attach_defaults` adds to a bare trainer."""
    rows = []
    for kind in OPTIMIZERS:
        for loop in WATCHED:
            bare = counts[kind, f"{BARE}, {LOOPS[loop].updates} later updates", None]
            more = counts[kind, loop, None] - bare
            rows.append([kind, loop, f"{bare / 1e3:.0f}", f"{more / 1e3:.1f}", f"{1 + more / bare:.3f}"])
    return table(["optimizer", "loop", "bare: thousand instructions", "more with it", "ratio"], rows)


def stages_table(counts: dict[tuple[str, str, str | None], int]) -> str:
    """What each stage takes, in thousand instructions."""
    columns = [(kind, loop) for kind in OPTIMIZERS for loop in STAGED]
    rows = [[stage, *(f"{counts[kind, loop, stage] / 1e3:.0f}" for kind, loop in columns)] for stage in STAGES]
    return table(["stage", *(f"{kind}: {loop}" for kind, loop in columns)], rows)


def write(text: str) -> None:
    """Puts tables into their page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + text + "\n" + END + rest.partition(END)[2], encoding="utf-8")


def main(
    inside: Annotated[str | None, Option(hidden=True)] = None,
    only: Annotated[str, Option(help="Peers with this in their name; ours and the loop by hand are always there.")] = "",
    by_default: Annotated[int | None, Option(help="Only the loops that people write by default, at this accumulation.")] = None,
    *,
    show: Annotated[bool, Option("--print", help="Print the tables, and do not change the page.")] = False,
) -> None:
    """Count the instructions of an update."""
    if inside is not None:
        count_here(inside)
        return
    if shutil.which("valgrind") is None:
        print("Nothing was counted, since valgrind is not installed here.")
        return
    defaults = {steps: count(name) for name, steps in BY_DEFAULT.items() if by_default in (None, steps)}
    for steps, found in defaults.items():
        print(f"What people write by default, accumulation {steps}.\n\n{loops_table(found)}\n")
    if by_default is not None:
        return
    counts = count("")
    if not counts or not all(defaults.values()):
        raise typer.Exit(1)
    for name in peers.installed(PEERS):
        if only in name:
            counts |= count(name)
    print("Ratios are to the loop by hand with torch's default optimizer; peers have a fused one.\n")
    print(loops_table(counts))
    watching, budget = watching_table(counts), stages_table(counts)
    print(f"\nWhat `attach_defaults` adds to an update.\n\n{watching}")
    print(f"\nThousand instructions of each stage.\n\n{budget}")
    if not show:
        network = f"an update of three small linear layers; torch {torch.__version__}"
        write(
            f"Thousand instructions of {network}.\n\n{budget}\n\nWhat `attach_defaults` adds to it.\n\n{watching}\n\n"
            "What people write by default, with optimizers that are not fused: instructions of an update of 1, 4 and 16 "
            f"micro-batches, to those of the loop by hand.\n\n{default_table(defaults)}\n"
        )


if __name__ == "__main__":
    typer.run(main)
