"""Elastic replicas: what they add to an update, and how long the others stand still when one is killed.

    python benchmarks/elastic.py cost
    python benchmarks/elastic.py gap
    python benchmarks/elastic.py join

It needs the extra `ignite_train[elastic]`. The contestants are processes of this machine that talk by gloo; give it as many
idle cores as there are replicas, or else it measures the scheduler. `cost` prints the time of an update in milliseconds, for a
model of two small layers whose forward sleeps for 0, 20 and 200 ms, as one that runs on an accelerator does. `gap` kills one
replica of three in each round, and prints the longest time between two updates of the others. Beside both stands bare torchft:
its manager, an all-reduce of the gradients, and its vote. Beside the gap stands a run of reduction="explicit" that is started
again from its latest checkpoint, from the kill to the first update that had not been made before. `join` starts a third replica
beside two, for models of several sizes, and prints the longest time between two updates of the two, beside the median one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ignite.engine import Events
from torch import Tensor, nn

from ignite_train import ForwardOutput, ResumableLoader, UpdateOptions, create_trainer
from ignite_train.handlers import Checkpoint

SLEEPS_MS = (0.0, 20.0, 200.0)
WARM_UP = 10  # updates that are not measured
HEARTBEAT_MS, JOIN_MS = 600, 1500
MEBIBYTES = (1, 16, 128)  # of parameters, which are the state
KINDS = ("explicit", "elastic", "bare torchft")
DEADLINE_SECONDS = 300.0


def make_model(width: int = 32) -> nn.Module:
    """A model with 34 parameters for each of its width, and one. With the default its step takes next to nothing."""
    return nn.Sequential(nn.Linear(32, width), nn.Tanh(), nn.Linear(width, 1))


class Times:
    """Writes when each update has ended: a line with its number and the clock that all processes of a machine share."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def __call__(self, update: int) -> None:
        """Notes the end of an update."""
        self._file.write(f"{update} {time.monotonic():.6f}\n")
        self._file.flush()


def replica(kind: str, directory: Path, updates: int, sleep_ms: float) -> None:
    """Trains as one replica, and writes down when each update ended."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    times = Times(directory / f"{os.environ['REPLICA']}-{os.getpid()}")
    model = make_model(int(os.environ.get("WIDTH", "32")))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        time.sleep(sleep_ms / 1e3)
        return model(x).square().sum()

    if kind == "bare torchft":
        bare(model, optimizer, loss_of, times, updates)
        return
    if kind == "explicit":
        dist.init_process_group("gloo")
    trainer = create_trainer(
        model,
        optimizer,
        lambda model, x: ForwardOutput(loss_of(model, x), sample_size=len(x)),
        seed=0,
        options=UpdateOptions(reduction=kind),
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: times(trainer.state.iteration))
    if "SAVES" in os.environ:
        Checkpoint(directory / "saves", every=20).attach(trainer)
    trainer.run(ResumableLoader(torch.ones(4096, 32), batch_size=4, shuffle=True), max_iters=updates)


def bare(model: nn.Module, optimizer: Any, loss_of: Callable[..., Tensor], times: Times, updates: int) -> None:
    """The same with torchft alone: samples are lost or counted twice when a replica dies."""
    from torchft import Manager
    from torchft.process_group import ProcessGroupGloo

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=lambda state: (model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"])),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"replica_{os.environ['REPLICA']}",
        hostname="127.0.0.1",
    )
    try:
        while manager.current_step() < updates:
            manager.start_quorum()
            optimizer.zero_grad()
            loss_of(model, torch.ones(4, 32)).backward()
            flat = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters() if parameter.grad is not None])
            manager.allreduce(flat).wait()
            parts = torch.split(flat, [parameter.numel() for parameter in model.parameters()])
            for parameter, part in zip(model.parameters(), parts, strict=True):
                parameter.grad = part.view_as(parameter)
            if manager.should_commit():
                optimizer.step()
                times(manager.current_step())
    finally:
        manager.shutdown(wait=False)


class Group:
    """The processes of one contestant, and the lighthouse that they ask.

    Args:
        kind: which contestant.
        number: how many processes.
        updates: how many updates they make.
        sleep_ms: how long each forward sleeps.
        directory: where they write.
        least: with fewer replicas the lighthouse waits.
        settings: more variables for their environment.
    """

    def __init__(
        self, kind: str, number: int, updates: int, sleep_ms: float, directory: Path, *, least: int, **settings: str
    ) -> None:
        self.directory, self._kind, self._number = directory, kind, number
        self._arguments = [kind, str(directory), str(updates), str(sleep_ms)]
        self._environment = os.environ | settings
        self.processes: list[subprocess.Popen[bytes]] = []
        self._lighthouse: Any = None
        if kind != "explicit":
            from torchft.coordination import LighthouseServer

            self._lighthouse = LighthouseServer(
                bind="127.0.0.1:0",
                min_replicas=least,
                join_timeout_ms=JOIN_MS,
                quorum_tick_ms=20,
                heartbeat_timeout_ms=HEARTBEAT_MS,
            )
            port = self._lighthouse.address().rpartition(":")[2]
            self._environment["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{port}"
        self.start()

    def start(self) -> None:
        """Starts all processes."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        ranks = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(self._number)}
        for number in range(self._number):
            own = {"REPLICA": str(number), "IGNITE_TRAIN_REPLICA": str(number), "RANK": str(number)}
            self.start_one(own | (ranks if self._kind == "explicit" else {}))

    def start_one(self, settings: dict[str, str]) -> None:
        """Starts a process with more variables in its environment."""
        command = [sys.executable, __file__, "replica", *self._arguments]
        output = None if "SHOW" in os.environ else subprocess.DEVNULL
        self.processes.append(subprocess.Popen(command, env=self._environment | settings, stdout=output, stderr=output))

    def times(self) -> list[list[tuple[int, float]]]:
        """The number and the time of each update, by process."""
        found = []
        for path in sorted(self.directory.glob("*-*")):
            lines = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            found.append([(int(update), float(seconds)) for update, seconds in lines])
        return found

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Until something has come about."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not is_done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._kind} has not come so far in {DEADLINE_SECONDS:g} s")
            time.sleep(0.01)

    def kill(self, process: subprocess.Popen[bytes]) -> float:
        """Kills one process. Gives the time."""
        self.processes.remove(process)
        now = time.monotonic()
        process.kill()
        process.wait()
        return now

    def end(self) -> None:
        """Kills what is running."""
        for process in list(self.processes):
            self.kill(process)
        if self._lighthouse is not None:
            self._lighthouse.shutdown()


def update_ms(kind: str, sleep_ms: float, replicas: int) -> float:
    """The median time of an update of the first process, in milliseconds."""
    updates = 60 if sleep_ms > 100 else 200
    with tempfile.TemporaryDirectory() as name:
        group = Group(kind, replicas, WARM_UP + updates, sleep_ms, Path(name), least=replicas)
        try:
            group.wait(lambda: all(process.poll() is not None for process in group.processes))
            seconds = [second for update, second in group.times()[0] if update > WARM_UP]
        finally:
            group.end()
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(seconds)) * 1e3


def gap_seconds(kind: str, replicas: int) -> float:
    """How long the survivors stand still after a kill."""
    with tempfile.TemporaryDirectory() as name:
        group = Group(kind, replicas, 10**6, 20.0, Path(name), least=1)
        try:
            group.wait(lambda: len(found := group.times()) == replicas and min(map(len, found)) > 2 * WARM_UP)
            killed = group.kill(group.processes[-1])
            others = range(replicas - 1)
            group.wait(lambda: min(group.times()[index][-1][1] for index in others) > killed + 5)
            latest = [[second for _, second in group.times()[index] if second > killed - 1] for index in others]
        finally:
            group.end()
    return max(later - earlier for seconds in latest for earlier, later in itertools.pairwise(seconds))


def restart_seconds(replicas: int) -> float:
    """The time from a kill to the first update that had not been made, where all begin again from the latest checkpoint."""
    with tempfile.TemporaryDirectory() as name:
        group = Group("explicit", replicas, 10**6, 20.0, Path(name), least=1, SAVES="1")
        try:
            group.wait(lambda: len(found := group.times()) == replicas and min(map(len, found)) > 30)
            killed = group.kill(group.processes[-1])
            for process in list(group.processes):
                group.kill(process)
            furthest = max(update for found in group.times() for update, _ in found)
            group.start()
            group.wait(lambda: any(update > furthest for found in group.times() for update, _ in found))
            return min(second for found in group.times() for update, second in found if update > furthest) - killed
        finally:
            group.end()


def join_ms(mebibytes: int, sleep_ms: float = 50.0) -> tuple[float, float]:
    """The longest time between two updates of two replicas while a third one joins, and the median before. Milliseconds."""
    with tempfile.TemporaryDirectory() as name:
        width = mebibytes * 2**18 // 34
        group = Group("elastic", 2, 10**6, sleep_ms, Path(name), least=2, WIDTH=str(width))
        try:
            group.wait(lambda: len(found := group.times()) == 2 and min(map(len, found)) > 2 * WARM_UP)
            before = [later - earlier for (_, earlier), (_, later) in itertools.pairwise(group.times()[0][WARM_UP:])]
            group.start_one({"REPLICA": "2", "IGNITE_TRAIN_REPLICA": "2"})
            group.wait(lambda: len(found := group.times()) == 3 and len(found[2]) > WARM_UP)
            *others, joiner = group.times()
        finally:
            group.end()
    joined = joiner[0][1]
    near = [[second for _, second in one if abs(second - joined) < 60] for one in others]
    gaps = [
        later - earlier
        for seconds in near
        for earlier, later in itertools.pairwise(seconds)
        if earlier < joined and later > joined - 10
    ]
    return max(gaps) * 1e3, statistics.median(before) * 1e3


def join(rounds: int, replicas: int) -> None:  # noqa: ARG001  # always two and one
    """Prints how long two replicas stand still while a third one joins, by the size of the state."""
    print("| MiB of state | longest time between two updates while a replica joins, ms | median otherwise, ms |\n|---|---|---|")
    for mebibytes in MEBIBYTES:
        found = [join_ms(mebibytes) for _ in range(rounds)]
        longest, usual = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"| {mebibytes} | {longest:.0f} | {usual:.0f} |", flush=True)


def cost(rounds: int, replicas: int) -> None:
    """Prints the table of updates. The contestants take turns."""
    print(f"| ms an update, {replicas} replicas | " + " | ".join(KINDS) + " | elastic to explicit |")
    print("|---" * (len(KINDS) + 2) + "|")
    for sleep_ms in SLEEPS_MS:
        found: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(rounds):
            for kind in KINDS:
                found[kind].append(update_ms(kind, sleep_ms, replicas))
        best = {kind: min(values) for kind, values in found.items()}
        cells = " | ".join(f"{best[kind]:.2f}" for kind in KINDS)
        print(f"| forward {sleep_ms:g} | {cells} | {best['elastic'] / best['explicit']:.3f} |", flush=True)


def gap(rounds: int, replicas: int) -> None:
    """Prints the table of gaps: the median of the rounds, and the longest."""
    print(f"| seconds, {replicas} replicas, heartbeat {HEARTBEAT_MS} ms | median | longest |\n|---|---|---|")
    ways: dict[str, Callable[[], float]] = {
        "elastic": lambda: gap_seconds("elastic", replicas),
        "bare torchft": lambda: gap_seconds("bare torchft", replicas),
        "restart from the latest checkpoint": lambda: restart_seconds(replicas),
    }
    for name, measure in ways.items():
        found = [measure() for _ in range(rounds)]
        print(f"| {name} | {statistics.median(found):.2f} | {max(found):.2f} |", flush=True)


def main() -> None:
    """Runs the command line."""
    if sys.argv[1:2] == ["replica"]:
        kind, directory, updates, sleep_ms = sys.argv[2:]
        replica(kind, Path(directory), int(updates), float(sleep_ms))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cost", "gap", "join"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--replicas", type=int)
    given = parser.parse_args()
    os.environ["RUST_LOG"] = "warn"  # torchft writes a line for each question otherwise
    busy = os.getloadavg()[0]
    if busy > 0.5:
        print(f"The machine is busy (load {busy:.1f}): these numbers measure that, and must not be published.")
    what = {"cost": cost, "gap": gap, "join": join}[given.what]
    what(given.rounds, given.replicas or {"cost": 2, "gap": 3, "join": 2}[given.what])


if __name__ == "__main__":
    main()
