"""Runs of elastic replicas in which processes are killed at given places, and what must hold after them.

A deck of cards says who dies: each card is a place in the code, a signal and how many replicas get it. A replica gets its card
when it is started, and plays it when it comes to the place; a card that was not played goes back. Replicas are forked from this
process, which has imported torch and started no thread, so that to start one costs a tenth of a second.

    python tests/support/elastic_runs.py DIRECTORY SEED REPLICAS CARDS BATCHES [lighthouse | shards | lonely | dark | frozen]

writes what the replicas that have ended wrote, and `kills`: how many were killed, and the cards that were played. `lighthouse`
kills the lighthouse three times in between; with `shards` each replica is two ranks: either plays its card, and both end;
for the others, in which no card is played, see `run_in_vain`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

import elastic_script

PLACES = (
    "forward",
    "backward",
    "reduction",
    "commit",
    "step",
    "save",
    "evaluation",
    "healing another",
    "being healed",
)
HOW = ("alone", "alone", "alone", "two at once", "all but one")
SECONDS = 500.0  # for anything that is waited for; a run without a kill takes seconds on an idle machine
QUIET_SECONDS = 240.0  # without a replica that ends: the run hangs
SECONDS_WITH_KILLS = 1500.0  # for a run in which replicas are killed; half a minute on an idle machine
_NO_CHANGE_SECONDS = 3.0
MAX_ERRORS = 20  # so often a replica may end with an error, such as one that fell behind
HEARTBEAT_MS, JOIN_MS, HANG_SECONDS = 1500, 10_000, 10.0


@dataclass(frozen=True)
class Card:
    """Who dies where.

    Attributes:
        place: one of `PLACES`.
        signal: which signal.
        how: whether others get the signal too.
        after: how often the place is passed before.
        delay: seconds between the place and the signal, while the process goes on.
    """

    place: str
    signal: int
    how: str
    after: int
    delay: float


def deck(seed: int, number: int) -> list[Card]:
    """Cards in which each place comes as often as any other."""
    draw, cards = random.Random(seed), list[Card]()  # noqa: S311  # a test
    places = [PLACES[index % len(PLACES)] for index in range(number)]
    draw.shuffle(places)
    for place in places:
        rare = place in ("save", "evaluation", "healing another", "being healed")
        cards.append(
            Card(
                place,
                draw.choice([signal.SIGKILL] * 3 + [signal.SIGSTOP, signal.SIGTERM]),
                draw.choice(HOW),
                0 if rare else draw.randint(0, 12),
                draw.choice([0.0, 0.0, draw.uniform(0, 0.004)]),
            )
        )
    return cards


def to_shake(held: Mapping[int, Card | None], joined: Set[int]) -> list[int]:
    """The replicas one of which is to be killed, because no card will be played before one dies.

    A replica that heals waits for one that comes. One that is to be healed waits for ever once it has joined without that, as
    the first of a run does. Whoever dies gives its card back, and may get another one when it is started again.

    Args:
        held: the card of each process that runs, None for one that has none.
        joined: those that take part in updates.
    """
    waits = all(card is None or card.place in ("healing another", "being healed") for card in held.values())
    if not waits or len(held) < 2 or not joined.issuperset(held):
        return []
    return [process for process, card in held.items() if card is None or card.place != "healing another"]


class Trap:
    """In a replica: waits for the place of its card, and sends the signal there.

    Args:
        card: what to do; None for a replica that does nothing of its own.
        directory: of the run, with the numbers of the processes.
        number: of this replica.
    """

    def __init__(self, card: Card | None, directory: Path, number: int) -> None:
        self._card, self._directory, self._number, self._passed = card, directory, number, 0

    def __call__(self, place: str) -> None:
        card = self._card
        if place == "joined":
            (self._directory / f"joined-{os.getpid()}").touch()
        if card is None or place != card.place:
            return
        self._passed += 1
        if self._passed <= card.after:
            return
        self._card = None
        if card.delay:
            threading.Timer(card.delay, self._play, [card]).start()
        else:
            self._play(card)

    def _play(self, card: Card) -> None:
        (self._directory / f"played-{os.getpid()}").touch()
        for process in self._others(card.how):
            with suppress(ProcessLookupError):
                os.kill(process, card.signal)
        os.kill(os.getpid(), card.signal)

    def _others(self, how: str) -> list[int]:
        """The processes that get the signal too; at least one other replica gets none."""
        running = sorted(self._directory.glob("process-*"))
        others = [int(path.read_text()) for path in running if path.name != f"process-{self._number}"]
        return {"alone": [], "two at once": others[1:2], "all but one": others[1:]}[how]


class Runner:
    """Starts the lighthouse and the replicas, and starts again what was killed or stopped.

    Args:
        directory: where the replicas write.
        seed: of the deck.
        num_replicas: how many.
        num_cards: how many cards are played; then the replicas end after the same update.
        batches: the kind of batches, see `elastic_script`.
        lighthouse_deaths: how often the lighthouse is killed too, and started again at its address.
        min_replicas: with fewer the run waits.
        num_ranks: how many processes a replica is; a single process of them holds its card.
    """

    def __init__(
        self,
        directory: Path,
        seed: int,
        num_replicas: int,
        num_cards: int,
        batches: str,
        *,
        lighthouse_deaths: int = 0,
        min_replicas: int = 1,
        num_ranks: int = 1,
    ) -> None:
        self._num_ranks, self._ranks = num_ranks, dict[int, list[int]]()  # processes that run, by that which holds the card
        self._deaths, self._min, self._next_death = lighthouse_deaths, min_replicas, 0.0
        self._lighthouse, self._port = 0, 0
        self._directory, self._num, self._batches = directory, num_replicas, batches
        self._cards, self._dealt = deck(seed, num_cards), dict[int, Card]()
        self.played, self.num_killed, self.num_errors = list[Card](), 0, 0
        self._running, self._stopped, self._births, self._stops = dict[int, int](), list[int](), Counter[int](), Counter[int]()
        self._is_over, self._started, self._latest = False, 0.0, time.monotonic()
        self._draw = random.Random(seed)  # noqa: S311  # a test

    def run(self) -> None:
        """Until all replicas have ended."""
        deadline = time.monotonic() + SECONDS_WITH_KILLS
        self._lighthouse, self._port = start_lighthouse(min_replicas=self._min)
        os.environ |= {
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self._port}",
            "IGNITE_TRAIN_ENDED": str(self._directory / "ended"),
            "IGNITE_TRAIN_HANG_SECONDS": str(HANG_SECONDS),
        }
        try:
            for number in range(self._num):
                self._start(number)
            while self._running:
                if time.monotonic() > min(deadline, self._latest + QUIET_SECONDS):
                    raise TimeoutError(self._describe())
                self._look()
                self._kill_lighthouse()
                time.sleep(0.01)
        finally:
            for process in (*chain(*self._ranks.values()), *self._stopped, self._lighthouse):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
                    os.waitpid(process, 0)

    def _start(self, number: int) -> None:
        # One replica at least waits for no place, so that not all are lost.
        card = None
        if self._cards and len(self._dealt) < self._num - 1:
            card = next((card for card in self._cards if self._may_have(number, card)), None)
        self._births[number] += 1
        chosen, port, ranks = self._draw.randrange(self._num_ranks), free_port(), list[int]()
        for rank in range(self._num_ranks):
            ranks.append(fork(lambda rank=rank: self._be(number, card if rank == chosen else None, rank, port)))
        process, self._started = ranks[chosen], time.monotonic()
        self._running[process], self._ranks[process] = number, ranks
        (self._directory / f"process-{number}").write_text(str(process))
        if card is not None:
            self._cards.remove(card)
            self._dealt[process] = card

    def _may_have(self, number: int, card: Card) -> bool:
        """The first replica heals the others, and only one that comes later is healed."""
        return {"healing another": number == 0, "being healed": self._births[number] > 0}.get(card.place, True)

    def _be(self, number: int, card: Card | None, rank: int, port: int) -> None:
        if self._num_ranks > 1:
            of_all = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(self._num_ranks)}
            os.environ |= of_all | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ["IGNITE_TRAIN_REPLICA"] = str(number)
        os.environ["SAVES"] = f"{number}-{self._stops[number]}"  # what is stopped holds the lock of its own
        torch.set_num_threads(1)
        faulthandler.register(signal.SIGUSR1)
        elastic_script.main(str(self._directory), 1000, 96, 0.02, self._batches, reach=Trap(card, self._directory, number))

    def _look(self) -> None:
        for process in list(self._running):
            ended = self._end_of(process)
            if ended is None:
                continue
            first, status = ended
            number, self._latest = self._running.pop(process), time.monotonic()
            self._take_back(process)
            if os.WIFSTOPPED(status):  # for ever; another one takes its place
                self._stopped.append(first)
                self._stops[number] += 1
                self.num_killed += 1
            elif os.WIFSIGNALED(status):
                self.num_killed += 1
            elif os.WEXITSTATUS(status) == 0:
                self._is_over = True
            else:
                self.num_errors += 1
                if self.num_errors > MAX_ERRORS:
                    raise RuntimeError(f"{self.num_errors} replicas have ended with an error")
            if not self._is_over and not (self._directory / "ended").exists():
                self._start(number)
        if not self._cards and not self._dealt:
            (self._directory / "enough").touch()
        if (self._cards or self._dealt) and time.monotonic() - self._started > _NO_CHANGE_SECONDS:
            joined = {process for process in self._running if (self._directory / f"joined-{process}").exists()}
            if candidates := to_shake({process: self._dealt.get(process) for process in self._running}, joined):
                os.kill(self._draw.choice(candidates), signal.SIGKILL)
                self._started = time.monotonic()

    def _end_of(self, process: int) -> tuple[int, int] | None:
        """The rank with which a replica has ended, and how; None while it runs. The other ranks are killed."""
        left, ended = self._ranks[process], list[tuple[int, int]]()
        for rank in list(left):
            found, status = os.waitpid(rank, os.WNOHANG | os.WUNTRACED)
            if found:
                left.remove(rank)
                ended.append((rank, status))
        # A rank that has lost another one ends with an error.
        failed = sorted((one for one in ended if one[1]), key=lambda one: os.WIFEXITED(one[1]))
        if left and not failed:
            return None
        for rank in self._ranks.pop(process):
            os.kill(rank, signal.SIGKILL)
            os.waitpid(rank, 0)
        return (failed or ended)[0]

    def _describe(self) -> str:
        """What a run looks like that has not ended; each replica writes to stderr where it stands."""
        for process in chain(*self._ranks.values()):
            os.kill(process, signal.SIGUSR1)
            time.sleep(1.0)
        held = {number: self._dealt.get(process) for process, number in self._running.items()}
        return f"the replicas have not ended; {self.num_killed} kills, cards in the deck: {self._cards}, cards held: {held}"

    def _kill_lighthouse(self) -> None:
        now = time.monotonic()
        if not self._deaths or not (self._directory / "begun").exists() or now < self._next_death:
            return
        os.kill(self._lighthouse, signal.SIGKILL)
        os.waitpid(self._lighthouse, 0)
        time.sleep(0.7)  # several questions are asked meanwhile
        self._lighthouse, _ = start_lighthouse(self._port, self._min)
        self._deaths, self._next_death = self._deaths - 1, time.monotonic() + 4.0

    def _take_back(self, process: int) -> None:
        card = self._dealt.pop(process, None)
        if card is None:
            return
        if (self._directory / f"played-{process}").exists():
            self.played.append(card)
        else:
            self._cards.append(card)


def free_port() -> int:
    """A port of loopback on which no process listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def fork(work: Callable[[], None]) -> int:
    """Starts a process that does `work`. Gives its number."""
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        work()
        status = 0
    except BaseException as error:
        sys.stderr.write(f"{os.environ.get('IGNITE_TRAIN_REPLICA')}: {type(error).__name__}: {error}\n")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_in_vain(directory: Path, num_replicas: int, what: str) -> int:
    """Takes away what replicas need, and waits until those that are left have ended. Gives the status of the first.

    Args:
        directory: where the replicas write.
        num_replicas: how many there are, all of which are needed for an update.
        what: `lonely` kills all but the first; `dark` kills the lighthouse, and `frozen` suspends it without an end.
    """
    lighthouse, port = start_lighthouse(min_replicas=num_replicas)
    os.environ |= {
        "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}",
        "IGNITE_TRAIN_PATIENCE_SECONDS": "20",
    }  # all must come in it

    def be(number: int) -> None:
        os.environ["IGNITE_TRAIN_REPLICA"] = str(number)
        elastic_script.main(str(directory), 1000, 96, 0.02, "samples", reach=lambda place: None)

    replicas = [fork(lambda number=number: be(number)) for number in range(num_replicas)]
    deadline = time.monotonic() + SECONDS
    while not (directory / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    for process in {"lonely": replicas[1:], "dark": [lighthouse], "frozen": []}[what]:
        os.kill(process, signal.SIGKILL)
    if what == "frozen":
        os.kill(lighthouse, signal.SIGSTOP)
    statuses = dict[int, int]()
    while len(statuses) < num_replicas:
        for replica in {*replicas} - {*statuses}:
            if time.monotonic() > deadline:
                os.kill(replica, signal.SIGKILL)
            found, status = os.waitpid(replica, os.WNOHANG)
            statuses |= {found: os.waitstatus_to_exitcode(status)} if found else {}
        time.sleep(0.01)
    os.kill(lighthouse, signal.SIGKILL)
    os.waitpid(lighthouse, 0)
    return statuses[replicas[0]]


def start_lighthouse(port: int = 0, min_replicas: int = 1) -> tuple[int, int]:
    """A lighthouse in a process of its own. Gives the number of the process, and the port."""
    reader, writer = os.pipe()

    def be() -> None:
        from torchft.coordination import LighthouseServer

        server = LighthouseServer(
            bind=f"127.0.0.1:{port}",
            min_replicas=min_replicas,
            join_timeout_ms=JOIN_MS,
            quorum_tick_ms=20,
            heartbeat_timeout_ms=HEARTBEAT_MS,
        )
        os.write(writer, server.address().rpartition(":")[2].encode())
        os.close(writer)
        signal.pause()

    os.environ.setdefault("RUST_LOG", "warn")
    process = fork(be)
    os.close(writer)
    found = os.read(reader, 20).decode()
    os.close(reader)
    return process, int(found)


def check(ends: list[Any], samples: int = 96) -> None:
    """The replicas are bitwise equal, each sample counts once an epoch, and one process that replays them ends there too."""
    assert ends
    first = ends[0]
    assert all(other == first for other in ends[1:])
    last = first["updates"][-1][0]
    for epoch in range(1, last + 1):
        counted = [counts for of_epoch, counts in first["updates"] if of_epoch == epoch]
        sums = [sum(column) for column in zip(*counted, strict=True)]
        assert sums == [1] * samples or (epoch == last and set(sums) == {0, 1})  # a stop ends the last one early
    assert first["steps"] == len(first["updates"])
    data, model = elastic_script.Samples(samples), elastic_script.make_model()
    model.load_state_dict({name: torch.tensor(value, dtype=torch.float64) for name, value in first["start"].items()})
    optimizer, schedule = elastic_script.make_optimizer(model)
    for _, counts in first["updates"]:
        taken = [data[index] for index, count in enumerate(counts) if count]
        x, y = (torch.stack([sample[part] for sample in taken]) for part in (1, 2))
        optimizer.zero_grad()
        ((model(x) - y).square().sum() / len(taken)).backward()
        if "CLIPS" in os.environ:
            torch.nn.utils.clip_grad_norm_(model.parameters(), float(os.environ["CLIPS"]))
        optimizer.step()
        schedule.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(torch.tensor(first["parameters"][name], dtype=torch.float64), value, rtol=0, atol=1e-12)


if __name__ == "__main__":
    os.environ.setdefault("RUST_LOG", "warn")
    from torchft import coordination, process_group  # noqa: F401  # here, so that a replica is forked with it

    where, (seed, replicas, cards), kind = Path(sys.argv[1]), map(int, sys.argv[2:5]), sys.argv[5]
    more = sys.argv[6:]
    if more and more not in (["lighthouse"], ["shards"]):
        sys.exit(run_in_vain(where, replicas, *more))
    least = 2 if seed % 4 == 3 and replicas > 2 else 1
    deaths = 3 if more == ["lighthouse"] else 0
    num = 2 if more == ["shards"] else 1
    runner = Runner(where, seed, replicas, cards, kind, lighthouse_deaths=deaths, min_replicas=least, num_ranks=num)
    runner.run()
    told = [[card.place, signal.Signals(card.signal).name, card.how] for card in runner.played]
    (where / "kills").write_text(json.dumps({"number": runner.num_killed, "played": told, "errors": runner.num_errors}))
