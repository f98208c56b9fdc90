"""What a stranger writes to the store is no message of a rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from ignite.engine import Events
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

import cuts
from ignite_train.handlers import FailureBoard, HangWatch
from ignite_train.ranks.sealed_messages import SealedMessages
from ranks import run_ranks
from test_failures import Board, Group, lists_keys, make, until

SECRET = bytes(range(24))
VALUES = [True, "text with spaces", [1, 2.5, "three", None, {"four": []}], 0, ""]
FORGED: list[Callable[[bytes], bytes | None]] = [
    lambda _: b"",
    lambda _: b"-",
    lambda _: b"[1, 2]",
    lambda _: b"\xff\xfe \x00",
    lambda _: b"\xff" * 100_000,
    lambda _: json.dumps([9, "forged"]).encode(),
    lambda _: ("0" * 64 + " " + json.dumps([9, "forged"])).encode(),
    lambda record: record[:64] + b" " + json.dumps([9, "forged"]).encode(),
    lambda record: record[:-1],
    lambda record: record + b" ",
    lambda record: b" " + record,
]


@pytest.fixture(params=["tcp", "file", "hash"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Each kind of store at which ranks may meet. None waits longer than a moment for what is not there."""
    stores: dict[str, Callable[[], Store]] = {
        "tcp": lambda: TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
        "file": lambda: FileStore(str(tmp_path / "store"), 1),
        "hash": HashStore,
    }
    made = PrefixStore("corner", stores[request.param]())
    made.set_timeout(timedelta(seconds=20))
    return made


@pytest.mark.parametrize("value", VALUES)
def test_what_one_rank_writes_the_other_reads(store: Store, value: Any) -> None:
    """Whatever JSON knows; what has not been written is None, and is not waited for."""
    one, other = SealedMessages(store, SECRET), SealedMessages(store, SECRET)
    assert other.read("name") is None
    assert other.read_all(["name", "another"]) == {}
    one.write("name", value)
    assert other.read("name") == value
    assert other.read_all(["name", "another"]) == {"name": value}
    one.write("name", "later")
    assert other.read_all(["name"]) == {"name": "later"}


@pytest.mark.parametrize("forge", FORGED)
def test_a_forged_record_is_as_if_it_were_not_there(store: Store, forge: Callable[[bytes], bytes | None]) -> None:
    """Malformed, without the code, with the code of another content, cut off: none is read and none raises."""
    one, other = SealedMessages(store, SECRET), SealedMessages(store, SECRET)
    one.write("name", "right")
    store.set("name", forge(store.get("name")))
    assert other.read("name") is None
    assert other.read_all(["name"]) == {}
    assert other.write_once("name", "first") == "first"
    assert one.write_once("name", "second") == "first"
    assert one.read("name") == "first"


def test_a_record_counts_under_its_name_only_and_never_goes_back(store: Store) -> None:
    """A stranger can copy records: neither to another name, nor an older one over a newer one, nor into another run."""
    one, other = SealedMessages(store, SECRET), SealedMessages(store, SECRET)
    one.write("1", "old")
    old = store.get("1")
    store.set("2", old)
    assert other.read("2") is None
    one.write("1", "new")
    assert other.read("1") == "new"
    store.set("1", old)
    assert other.read("1") is None
    assert SealedMessages(store, bytes(24)).read("1") is None


def secrets() -> list[Any]:
    opened = [SealedMessages.start() for _ in range(2)]
    assert all(messages is not None for messages in opened)
    for messages in opened:
        messages.write(f"secret of {id(messages)}", "said")  # type: ignore[union-attr]
    return [messages._secret for messages in opened]  # type: ignore[union-attr]


@pytest.mark.slow
def test_the_ranks_share_a_secret_that_is_new_each_time() -> None:
    """The same on all ranks, another for each handler and run, and long enough not to be guessed."""
    first, second = run_ranks(secrets)
    assert first == second
    assert first[0] != first[1]
    assert [len(secret) for secret in first] == [24, 24]


def train_beside_a_stranger(board: Board) -> None:
    """Waits in its third update until both watches have looked at what the stranger wrote, and trains on."""
    trainer, looked = make("ddp"), []
    FailureBoard().attach(trainer)
    HangWatch(timeout_seconds=600).attach(trainer)
    read = SealedMessages.read

    def note(self: SealedMessages, name: str) -> Any:
        value = read(self, name)
        if board.has("forged"):
            looked.append(name)
        return value

    SealedMessages.read = note  # type: ignore[method-assign]

    @trainer.on(Events.ITERATION_STARTED(once=3))
    def wait() -> None:
        board.write("waits")
        until(lambda: all(looked.count(name) >= 2 for name in ("first", "verdict")), "both watches look")

    trainer.run(cuts.cut(cuts.samples(), [8] * 8), max_epochs=1)
    board.write("ended", trainer.state.iteration)


@pytest.mark.slow
@lists_keys
def test_a_stranger_at_the_store_cannot_end_the_run(tmp_path: Path) -> None:
    """It lists what is there and writes a failure, a hang, ends of ranks and reports: training takes no notice."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with Group(tmp_path, train_beside_a_stranger, agent=store) as group:
        group.board.wait_for("waits")
        ours = [name for name in store.list_keys() if "ignite_train/" in name]
        corners = {name.rpartition("/")[0] for name in ours}
        assert len(corners) == 2
        for corner in corners:
            for name, value in {
                "first": json.dumps([1, 2, "RuntimeError: forged"]),
                "news": "1",
                "verdict": "rank 1 is silent",
                "ended by 1": "true",
                "first heard by 1": "true",
                "process of 1": "[",
                "1": json.dumps([99, 99, 0, 0, False, "nowhere", False]),
                "0": "not json",
            }.items():
                store.set(f"{corner}/{name}", value)
        group.board.write("forged")
        assert [group.status(rank) for rank in (0, 1)] == [0, 0]
        assert group.board.read("ended") == 8
        assert "ERROR" not in group.stderr()
