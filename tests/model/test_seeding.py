"""`seed=`: random numbers of an update are a function of seed, update, micro-batch and rank, and of nothing else."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ignite.distributed as idist
import numpy as np
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Sampler

from ignite_train import (
    ForwardOutput,
    NonFiniteError,
    Trainer,
    TrainEvents,
    UpdateOptions,
    create_supervised_trainer,
    create_trainer,
)
from ignite_train.handlers import Checkpoint
from ignite_train.model.seeding import Seeding
from ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs/randomness.md"

Drawn = tuple[float, float, float]
DATA = [torch.full((2, 3), float(number)) for number in range(5)]
GROUPS = [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]  # (update, micro-batch) of each of them, with accumulation_steps=2


def drawn() -> Drawn:
    """A number of each of the generators of the process."""
    return float(torch.rand(())), float(np.random.random()), random.random()  # noqa: S311


def expected(*key: int | str) -> Drawn:
    """The first number of each generator that is seeded with the hash of `key`; of generators made for it."""
    seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")
    numpy = float(np.random.RandomState(seed % 2**32).random())
    python = random.Random(seed).random()  # noqa: S311
    return float(torch.rand((), generator=torch.Generator().manual_seed(seed))), numpy, python


def in_micro_batches(seed: int, updates: range, rank: int = 0) -> list[Drawn]:
    """What forward draws in these updates of DATA."""
    return [
        expected(seed, "micro_batch", u, 0, i, rank)
        for epoch in range(9)
        for update, i in GROUPS
        if (u := update + 3 * epoch) in updates
    ]


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))


def make(seen: list[Drawn] | None = None, model: nn.Module | None = None, **arguments: Any) -> Trainer:
    """A trainer whose forward draws from all generators."""
    model = network() if model is None else model

    def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
        numbers = drawn()
        if seen is not None:
            seen.append(numbers)
        return ForwardOutput((model(x) * sum(numbers) - 1.0).square().sum(), len(x))

    arguments = {"accumulation_steps": 2, "seed": 7, "optimizer": torch.optim.AdamW, **arguments}
    optimizer = arguments.pop("optimizer")(model.parameters(), lr=0.1)
    return create_trainer(model, optimizer, forward, **arguments)


def weights(trainer: Trainer) -> list[float]:
    model: Any = trainer.model
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


@pytest.mark.parametrize("seed", [0, 7])
def test_what_forward_draws_is_a_function_of_seed_update_and_micro_batch(seed: int) -> None:
    """Of all three generators, by the formula, in three epochs with a smaller last group."""
    seen: list[Drawn] = []
    make(seen, seed=seed).run(DATA, max_epochs=3)

    assert seen == in_micro_batches(seed, range(1, 10))
    assert len({*seen}) == len(seen) == 15


def test_outside_of_updates_nothing_is_changed() -> None:
    """Handlers and the data draw the numbers that they would draw without any update."""
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    alone = [drawn() for _ in range(9)]
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    outside: list[Drawn] = []
    trainer = make()
    trainer.add_event_handler(Events.GET_BATCH_STARTED, lambda: outside.append(drawn()))
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: outside.append(drawn()))
    trainer.add_event_handler(TrainEvents.STEP_COMPLETED, lambda: outside.append(drawn()))
    trainer.run(DATA, max_epochs=1)

    assert outside[: len(alone)] == alone


def test_without_a_seed_nothing_is_seeded() -> None:
    """Forward draws what the generators of the process give next."""
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    alone = [drawn() for _ in range(5)]
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    seen: list[Drawn] = []
    trainer = make(seen, model=nn.Linear(3, 1), seed=None)
    torch.manual_seed(1)  # the weights were drawn
    trainer.run(DATA, max_epochs=1)

    assert seen == alone


@pytest.mark.parametrize("saved", ["by hand", "by Checkpoint"])
def test_a_resumed_run_needs_no_snapshot_of_the_generators(saved: str, tmp_path: Path) -> None:
    """It ends with the same bits, whatever the generators were when it was started again."""
    whole = make()
    whole.run(DATA, max_epochs=3)
    parts = []
    for max_iters in (4, 9):
        torch.manual_seed(max_iters), np.random.seed(max_iters), random.seed(max_iters)
        trainer = make()
        if saved == "by Checkpoint":
            Checkpoint(tmp_path / "run").attach(trainer)
        elif parts:
            for name, part in trainer.parts.items():
                part.load_state_dict(parts[0].parts[name].state_dict())
            trainer.load_state_dict(parts[0].state_dict())
        trainer.run(DATA, max_iters=max_iters)
        parts.append(trainer)

    assert weights(parts[1]) == weights(whole)
    assert weights(parts[0]) != weights(whole)


def test_outside_the_generators_continue_where_they_were() -> None:
    """And inside too."""
    seeding = Seeding(3, torch.device("cpu"), 0)

    def draw(parts: tuple[bool, ...]) -> dict[bool, list[Drawn]]:
        """Draws inside or outside, as `parts` say."""
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        found: dict[bool, list[Drawn]] = {True: [], False: []}
        seeding.begin(1)
        seeding.micro_batch(0)
        for inside in parts:
            with nullcontext() if inside else seeding.outside():
                found[inside].append(drawn())
        seeding.end()
        with seeding.outside():  # no update runs
            found[False].append(drawn())
        return found

    mixed, apart = draw((True, False, True, False)), draw((True, True))
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    assert mixed == {True: apart[True], False: [drawn() for _ in range(3)]}


class Drawing(Sampler[int]):
    """Draws each index when it is asked for."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        for _ in range(12):
            self.given.append(random.randrange(12))  # noqa: S311
            yield self.given[-1]


@pytest.mark.slow
def test_what_a_sampler_draws_while_a_group_arrives_is_not_seeded() -> None:
    """The main process draws it, some of it during an update; so a resumed run, which reads on, draws the same."""
    orders = []
    for seed in (1, 2):
        sampler, trainer = Drawing(), make(seed=seed, accumulation_steps=4)
        random.seed(0)
        trainer.run(DataLoader(torch.ones(12, 3), batch_size=1, sampler=sampler, num_workers=1), max_epochs=1)
        orders.append(sampler.given)
    random.seed(0)
    assert orders == [[random.randrange(12) for _ in range(12)]] * 2  # noqa: S311


def test_an_evaluation_or_a_handler_that_draws_makes_no_difference() -> None:
    """Within the update too: a handler that draws after forward does not change the numbers of the next one."""
    plain, other = make(), make()
    for event in (Events.ITERATION_STARTED, TrainEvents.FORWARD_COMPLETED, TrainEvents.BACKWARD_COMPLETED):
        other.add_event_handler(event, drawn)
    for trainer in (plain, other):
        trainer.run(DATA, max_epochs=2)

    assert weights(plain) == weights(other)


def test_an_update_that_is_repeated_draws_the_same() -> None:
    """After an exception of a handler inside the update, and the generators are given back."""
    whole, broken = make(), make()
    whole.run(DATA, max_epochs=2)
    failures = iter([False, True, False, False, False, False, False])

    def fail() -> None:
        if next(failures):
            raise OSError("the disk is full")

    broken.add_event_handler(TrainEvents.GRADIENTS_READY, fail)
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    with pytest.raises(OSError, match="full"):
        broken.run(DATA, max_epochs=2)
    after = drawn()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    assert after == drawn()
    broken.run(DATA, max_epochs=2)

    assert weights(broken) == weights(whole)


@pytest.mark.parametrize("policy", ["skip", "split"])
def test_an_attempt_without_memory_leaves_the_numbers_of_the_others_alone(policy: str) -> None:
    """A micro-batch that is dropped draws nothing that another one misses; one that is halved draws from where it began."""
    seen: list[Drawn] = []

    def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
        numbers = drawn()
        if x[0, 0] == 2.0 and len(x) > 1:
            raise torch.OutOfMemoryError("too many samples")
        seen.append(numbers)
        return ForwardOutput(model(x).square().sum(), len(x))

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = UpdateOptions(on_out_of_memory=policy)  # type: ignore[arg-type]
    create_trainer(model, optimizer, forward, accumulation_steps=2, seed=7, options=options).run(DATA, max_epochs=1)

    table = in_micro_batches(7, range(1, 4))
    firsts = [table[0], table[1], table[3]]
    if policy == "skip":
        assert seen == [*firsts, table[4]]
    else:
        assert seen[:2] == firsts[:2]
        assert (seen[2][0], seen[2][2]) == (table[2][0], table[2][2])  # NumPy's is not taken back with an attempt
        assert seen[4] == firsts[2]


def test_the_search_for_a_value_that_is_not_finite_draws_what_the_update_drew() -> None:
    """A number of the second update's second micro-batch makes a NaN; the search finds it there and nowhere else."""
    (bad, *_) = expected(7, "micro_batch", 2, 0, 1, 0)

    def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
        number, *_ = drawn()
        return ForwardOutput(model(x).sum() * (float("nan") if number == bad else 1.0), len(x))

    model = network()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward, accumulation_steps=2, seed=7)
    with pytest.raises(NonFiniteError, match=r"^update 2: .*micro-batch 2 of 2: NaN in the loss"):
        trainer.run(DATA, max_epochs=1)


class Again(torch.optim.SGD):
    """Evaluates the loss twice more, each time at other parameters, and draws a number after each."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.drawn = [drawn()]
        for _ in range(2):
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(0.01)
            closure()
            self.drawn.append(drawn())
        super().step()


@pytest.mark.parametrize("closure", [True, "replay"])
def test_each_evaluation_of_a_closure_is_seeded(closure: Any) -> None:
    """By its number; with "replay" as the first. What the optimizer draws is that of the step."""
    seen: list[Drawn] = []
    model = network()
    trainer = make(seen, model, optimizer=Again, options=UpdateOptions(closure=closure))
    trainer.run(DATA[:2], max_epochs=1)
    evaluations = [0, 0, 0] if closure == "replay" else [0, 1, 2]

    assert seen == [expected(7, "micro_batch", 1, evaluation, index, 0) for evaluation in evaluations for index in range(2)]
    optimizer: Any = trainer.optimizers["optimizer"]
    assert optimizer.drawn == [expected(7, "step", 1, evaluation) for evaluation in range(3)]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_activation_checkpointing_sees_the_same_masks(reentrant: bool) -> None:
    """What backward computes again has the dropout of the forward: the weights are bitwise those without it."""

    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module, *, on: bool) -> None:
            super().__init__()
            self.inner, self.on = inner, on

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            return checkpoint(self.inner, x, use_reentrant=reentrant) if self.on else self.inner(x)

    ended = []
    for on in (True, False):
        trainer = make(model=Checkpointed(network(), on=on))
        trainer.run(DATA, max_epochs=2)
        ended.append(weights(trainer))
    assert ended[0] == ended[1]


def test_an_update_inside_another_ones_handler_is_seeded_for_itself() -> None:
    """And gives the generators back as they were inside the outer update."""
    inner, numbers = make(seed=8), []
    outer = make()

    @outer.on(TrainEvents.FORWARD_COMPLETED)
    def update() -> None:
        before = torch.get_rng_state(), random.getstate()
        inner.update([DATA[0]])
        numbers.append(torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate())

    outer.run(DATA, max_epochs=1)
    plain = make()
    plain.run(DATA, max_epochs=1)

    assert numbers == [True] * 5
    assert weights(outer) == weights(plain)


class Noisy(torch.optim.SGD):
    """Adds noise in each step, as Langevin dynamics do; replicas stay equal only if all ranks draw the same."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.drawn = drawn()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.01)


def _train_with_noise(uneven: str, num: int) -> dict[str, Any]:
    rank, seen = idist.get_rank(), []  # type: ignore[var-annotated]
    options = UpdateOptions(reduction="explicit", uneven=uneven)  # type: ignore[arg-type]
    trainer = make(seen, optimizer=Noisy, options=options)
    changed: list[Drawn] = []
    trainer.add_event_handler(TrainEvents.GRADIENTS_REDUCED, lambda: changed.append(drawn()))
    trainer.run(DATA[: num if rank else 5], max_epochs=1)
    optimizer: Any = trainer.optimizers["optimizer"]
    return {"seen": seen, "changed": changed, "step": optimizer.drawn, "weights": weights(trainer)}


@pytest.mark.slow
@pytest.mark.parametrize(("uneven", "num"), [("all", 5), ("all", 3), ("replay", 3)], ids=["even", "uneven", "replay"])
def test_ranks_draw_their_own_in_forward_and_the_same_in_the_step(uneven: str, num: int) -> None:
    """The default checks of the state pass, which would notice noise that differs between the ranks."""
    both = run_ranks(_train_with_noise, uneven, num)

    assert both[0]["seen"] == in_micro_batches(7, range(1, 4), rank=0)
    own = [numbers for numbers in both[1]["seen"] if numbers in in_micro_batches(7, range(1, 4), rank=1)]
    assert own[:num] == in_micro_batches(7, range(1, 4), rank=1)[:num]
    assert both[0]["changed"] == both[1]["changed"] == [expected(7, "step", update, 0) for update in (1, 2, 3)]
    assert both[0]["step"] == both[1]["step"]
    assert both[0]["weights"] == both[1]["weights"]


def test_the_generator_of_the_models_device_is_seeded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same hash, while the device of the model is the current one; and it is put back."""
    calls: list[Any] = []

    @contextmanager
    def device_index(index: int) -> Iterator[None]:
        calls.append(f"on {index}")
        yield
        calls.append("off")

    backend = SimpleNamespace(
        get_rng_state=lambda device: f"state of {device}",
        set_rng_state=lambda state, device: calls.append((state, str(device))),
        manual_seed=calls.append,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: backend)
    monkeypatch.setattr(torch.accelerator, "device_index", device_index)
    seeding = Seeding(7, torch.device("cuda:1"), 3)
    seeding.begin(11)
    seeding.micro_batch(2)
    assert drawn() == expected(7, "micro_batch", 11, 0, 2, 3)
    seeding.end()
    seeding.end()

    seed = int.from_bytes(hashlib.blake2b(repr((7, "micro_batch", 11, 0, 2, 3)).encode(), digest_size=8).digest(), "big")
    assert calls == ["on 1", seed, "off", ("state of cuda:1", "cuda:1")]


def test_a_supervised_trainer_takes_it_too() -> None:
    """The same seed gives the same weights, another one others."""
    ended = []
    for seed in (1, 1, 2):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = create_supervised_trainer(model, optimizer, nn.functional.mse_loss, seed=seed)
        trainer.run([(x, torch.ones(2, 1)) for x in DATA], max_epochs=1)
        ended.append(weights(trainer))
    assert ended[0] == ended[1] != ended[2]


@pytest.mark.skipif(not PAGE.is_file(), reason="looks at a checkout, which is not here")
def test_the_page_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/randomness.md: all blocks, one after the other, print what stands beside each `print`."""
    code = "".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL))
    exec(compile(code, str(PAGE), "exec"), {"__name__": "page"})  # noqa: S102
    promised = re.findall(r"^ *print\(.*\)  # (.*)$", code, flags=re.MULTILINE)

    assert len(promised) == 2
    assert capsys.readouterr().out.splitlines() == promised


MISTAKES: dict[str, tuple[Any, type[Exception], str]] = {
    "text": ("7", TypeError, r"seed must be a number, got '7' of type str"),
    "bool": (True, TypeError, r"seed must be a number, got True of type bool"),
    "negative": (-1, ValueError, r"seed must be at least 0, got -1"),
    "fraction": (0.5, ValueError, r"seed must be a whole number, got 0.5"),
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes(name: str) -> None:
    """Each is answered in one line."""
    seed, error, says = MISTAKES[name]
    with pytest.raises(error, match=says) as raised:
        make(seed=seed)
    assert "\n" not in str(raised.value)
