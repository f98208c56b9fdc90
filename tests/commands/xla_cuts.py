"""Trains the table of cuts on a device of torch_xla, and says how often it was compiled, read and cut into graphs.

    PJRT_DEVICE=CPU python tests/commands/xla_cuts.py      # in an environment with torch_xla, see docs/xla.md

`make xla-test` makes that environment and calls it. One process. torch_xla is not among torch's accelerators, and Ignite 0.5.5
calls functions that torch_xla has removed, so both are told here what they need; nothing in the library is changed for it.
"""

from __future__ import annotations

import sys
import types
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]
warnings.filterwarnings("ignore")

# How 64 samples are cut: the sizes of the micro-batches of one update, which is repeated.
CUTS = {
    "1 x 64": [64],
    "4 x 16": [16] * 4,
    "16 x 4": [4] * 16,
    "ragged": [30, 2, 20, 12],
    "with an empty one": [40, 0, 24],
}
UPDATES, WARM_UP = 8, 3


def prepare() -> tuple[Any, Any]:
    """Imports torch_xla and gives torch and Ignite the names that they look for; returns torch_xla and its metrics."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as metrics
    import torch_xla.runtime as xr

    generator = types.ModuleType("torch.xla")
    generator.get_rng_state = lambda device=None: xm.get_rng_state()  # type: ignore[attr-defined]
    generator.set_rng_state = lambda state, device=None: xm.set_rng_state(state)  # type: ignore[attr-defined]
    generator.manual_seed = lambda seed: xm.set_rng_state(seed % 2**31)  # type: ignore[attr-defined]
    torch._register_device_module("xla", generator)
    xm.xrt_world_size, xm.get_ordinal, xm.get_local_ordinal = xr.world_size, xr.global_ordinal, xr.local_ordinal
    return torch_xla, metrics


def forward(model: Any, micro_batch: Any) -> Any:
    """As in `cuts`, without reading the device."""
    from ignite_train import ForwardOutput

    x, y, w = micro_batch
    return ForwardOutput((w * (model(x).squeeze(1) - y) ** 2).sum(), w.sum(), {"samples": len(x)})


def count(metrics: Any, name: str) -> int:
    """How often torch_xla did something, from its metrics."""
    found = metrics.metric_data(name)
    return 0 if found is None else int(found[0])


def train(torch_xla: Any, metrics: Any, sizes: list[int], *, shrinks: bool = False) -> dict[str, Any]:
    """UPDATES times the same update; what it came to, and what torch_xla did in each update after the first ones.

    With `shrinks` each update has a sample less than the one before, so that it cannot be the same graph.
    """
    from ignite.engine import Events

    import cuts
    from ignite_train import create_trainer

    model = cuts.linear().to(torch_xla.device())
    trainer = create_trainer(
        model, torch.optim.SGD(model.parameters(), lr=cuts.LEARNING_RATE), forward, accumulation_steps=len(sizes)
    )
    seen: list[tuple[int, int, int]] = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def mark_step() -> None:
        torch_xla.sync()
        names = ("CompileTime", "TransferFromDeviceTime", "ExecuteTime")
        seen.append((count(metrics, names[0]), count(metrics, names[1]), count(metrics, names[2])))

    losses: list[float] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output.loss))
    data = [cut for update in range(UPDATES) for cut in cuts.cut(cuts.samples(), [size - shrinks * update for size in sizes])]
    trainer.run(data, max_iters=UPDATES)
    weight, bias = model.weight.detach().cpu()[0], float(model.bias.detach().cpu())
    last = [tuple(b - a for a, b in zip(before, after, strict=True)) for before, after in pairwise(seen)]
    return {"weight": weight, "bias": bias, "losses": losses, "by_update": last[WARM_UP - 1 :]}


def main() -> int:
    """Prints a line for each cut; returns 1 if one of them is not the closed form, or was compiled after the first updates."""
    torch_xla, metrics = prepare()
    import cuts

    expected, wrong = cuts.reference([cuts.samples()] * UPDATES), 0
    for name, sizes in CUTS.items():
        found = train(torch_xla, metrics, sizes)
        error = max(
            float((found["weight"] - expected["weight"]).abs().max()),
            abs(found["bias"] - expected["bias"]),
            *(abs(a - b) for a, b in zip(found["losses"], expected["losses"], strict=True)),
        )
        compilations, reads, executions = (sorted({one[index] for one in found["by_update"]}) for index in range(3))
        is_right = error < 1e-12 and compilations == [0]
        wrong += not is_right
        print(  # noqa: T201
            f"{name}: {'as' if is_right else 'NOT as'} it must be; error {error:.1e}; after update {WARM_UP} an update has "
            f"compilations {compilations}, reads {reads}, executions {executions}",
            flush=True,
        )
    shrinking = train(torch_xla, metrics, [64], shrinks=True)["by_update"]
    is_noticed = all(compilations > 0 for compilations, _, _ in shrinking)
    outcome = f"{'as' if is_noticed else 'NOT as'} it must be"
    print(f"another size in each update: {outcome}; compilations {[one[0] for one in shrinking]}")  # noqa: T201
    return int(wrong > 0 or not is_noticed)


if __name__ == "__main__":
    sys.exit(main())
