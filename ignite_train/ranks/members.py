"""The replicas that make an update together: who they are now, what they send one another, and how they notice a change."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import socket
import stat
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from ignite_train.arguments import real_number
from ignite_train.errors import FellBehindError, MembersChangedError, NoQuorumError
from ignite_train.internals.of_distributed import TCPStore
from ignite_train.ranks import collectives

__all__ = ["LIGHTHOUSE", "Members", "check_elastic", "require_torchft"]

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""The environment variable with the address of the lighthouse; torchft's own name for it."""
_REPLICA, _HOST = "IGNITE_TRAIN_REPLICA", "IGNITE_TRAIN_HOST"
_ENDED = "IGNITE_TRAIN_ENDED"  # a file that is there once the run has ended
_HANG, _PATIENCE = "IGNITE_TRAIN_HANG_SECONDS", "IGNITE_TRAIN_PATIENCE_SECONDS"

_logger = logging.getLogger("ignite_train")
_WAITS_FOR_RANKS = True  # HangWatch looks for it in the file where a rank stands
_CONNECT = timedelta(seconds=10)  # to the lighthouse
_REBUILD = timedelta(seconds=5)  # for the members to find one another; one of them may have died meanwhile
_REBUILD_AT_MOST = 20.0  # seconds; torch's store waits forever, beyond its time-out, for a host that is suspended
_HEARTBEAT = timedelta(milliseconds=100)
_RETRY_SECONDS = 0.2
_LAST_ANSWER_SECONDS = 10.0  # how long an answer is waited for once the run has ended: there may be too few members for one


def check_elastic() -> str:
    """Looks for what elastic replicas need, before anything is made. Gives the address of the lighthouse.

    Raises:
        ValueError: torchft is not installed, or the environment has no address of a lighthouse.
    """
    require_torchft()
    address = os.environ.get(LIGHTHOUSE, "")
    if not address:
        raise ValueError(
            f"reduction='elastic' needs the address of a lighthouse in the environment variable {LIGHTHOUSE}, got none; start "
            "the script with: python -m ignite_train.elastic --replicas N script.py"
        )
    return address


def require_torchft() -> None:
    """Raises ValueError if torchft is not installed."""
    if importlib.util.find_spec("torchft") is None:
        raise ValueError("reduction='elastic' needs torchft, which is not installed; pip install 'ignite_train[elastic]'")


class Members:
    """The members of the running update, and the process group between them.

    A member asks the lighthouse who takes part in each update (torchft calls the answer a quorum), in a thread, while its
    forward runs. All members get the same answer. As long as it names the members of the update before, the update continues.
    Otherwise each of them raises a `MembersChangedError`; then the members form a new process group, a member with the newest
    state sends it to those that have come, and the update is made again by all of them.

    What all of them decide from travels with the questions: how many updates a member has counted, and a digest of its
    history, which is another one after another sequence of members or of learning rates. Of the members that have counted
    the most updates, those with the most frequent history continue. Another member that has taken part in the run before ends
    with a `FellBehindError`; started again it joins as a new one.

    A replica may be several ranks of a process group, each with its shards of the model. They are one member: the first rank
    asks, and gives the answer to the others. Each rank forms a group with the ranks of its number in the other replicas. What
    fails on one rank of a replica fails on all of them, which then decide from the same.

    A process has one run of elastic replicas at a time.

    Args:
        lighthouse: its address.

    Attributes:
        rank, size: the number of this replica among the members, and how many they are.
        names: the names of all members, by rank.
        num_changes: how often an update of this process was made again.
        sends: the handlers whose numbers travel with each update, in words; set before a run begins.
        is_stopped: whether this process has come after the others were asked to stop, and have made their last update.
    """

    _in_run: ClassVar[Members | None] = None  # in this process
    _ended_runs: ClassVar[int] = 0  # of this process, whichever trainer they had

    def __init__(self, lighthouse: str) -> None:
        self._lighthouse = lighthouse
        self.rank, self.size, self.num_changes, self.is_stopped = 0, 1, 0, False
        self.names: tuple[str, ...] = ("",)
        self.sends = ""
        self._hang = timedelta(seconds=_seconds(_HANG, "60"))
        self._patience = _seconds(_PATIENCE, "600")
        self._waits_since: float | None = None  # for an answer that has not come
        self._has_warned = False  # that there is none
        self._group: Any = None
        self._key = ""  # of the process group; empty where there is none that works
        self._history = ""
        self._is_new, self._stops = True, False
        self._question: _Question | None = None
        self._quorum: Sequence[_Participant] | None = None  # an answer that names other members, which are to form a group
        self._is_settled = False  # whether the members of the update to come are known already
        self._identity = ""
        self._sockets: dict[int, int] = {}  # what belongs to this process only: the numbers of files, with their inodes

    # --- a run

    def join(self, step: Callable[[], int], capture: Callable[[], Tensor], restore: Callable[[Tensor], None]) -> None:
        """Becomes a member, with the state of the others if there are any. Waits for them between two of their updates.

        Args:
            step: gives how many updates this process has counted, as after a resume from a checkpoint.
            capture: gives the state of the run, as bytes.
            restore: takes the state of another member over.

        Raises:
            NoQuorumError: the lighthouse cannot be reached, or gives no answer in time.
            RuntimeError: another trainer of this process is in a run of elastic replicas.
        """
        if Members._in_run is not None:
            raise RuntimeError("a process can have one run with reduction='elastic' at a time, got a second; run them in turn")
        Members._in_run = self
        if Members._ended_runs and _ENDED in os.environ:  # the script continues with another run
            Path(os.environ[_ENDED]).unlink(missing_ok=True)
        self.is_stopped = self._stops = False
        self._is_new, self._history, self._capture, self._restore = True, "", capture, restore
        self._connect()
        self.renew(step)

    def part(self, step: Callable[[], int], *, stopped: bool) -> None:
        """Where the run has ended: waits until all members have, and gives those that come now the last state. Collective.

        Args:
            step: gives how many updates this process has counted.
            stopped: whether the run was asked to stop, which those that come now must know.

        Raises:
            FellBehindError: the others have counted an update that this one has not.
            NoQuorumError: there was no answer in time.
        """
        self._stops = stopped
        while True:
            try:
                self.ask(step())
                self.confirm()
            except MembersChangedError:
                if self._quorum is None and collectives.any_rank(_has_ended()):  # the others have found all there
                    break
                self.renew(step)
            else:
                break
        self.note_end()

    def note_end(self) -> None:
        """Leaves the sign that a run has ended, by which the launcher and replicas that are starting know it."""
        Members._ended_runs += 1
        if (path := os.environ.get(_ENDED)) is not None:
            Path(path).touch()

    def leave(self) -> None:
        """Ends being a member; the others notice it at once."""
        if Members._in_run is self:
            Members._in_run = None
        self._drop()
        self._question = self._quorum = None
        if self._identity:
            if collectives.is_main_rank():
                self._heart.shutdown()
            self._identity = ""

    def _connect(self) -> None:
        """The first rank of a replica connects; the others have no store and send no heartbeats."""
        failure = None
        if collectives.is_main_rank():
            try:
                self._connect_to_lighthouse()
            except NoQuorumError as error:
                failure = error
        self._identity, failure = collectives.from_main_rank((self._identity, failure))
        if failure is not None:
            raise failure

    def _connect_to_lighthouse(self) -> None:
        os.environ.setdefault("RUST_LOG", "warn")  # torchft writes a line for each question otherwise
        from torchft.coordination import LighthouseClient, ManagerServer

        host = os.environ.get(_HOST) or _own_host(self._lighthouse)
        before = _open_sockets()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._sockets = _since(before)
        self._store_address = f"{host}:{self._store.port}"
        identity = f"{os.environ.get(_REPLICA, socket.gethostname())}:{uuid.uuid4().hex}"
        try:
            self._client = LighthouseClient(self._lighthouse, connect_timeout=_CONNECT)
            # It sends heartbeats from a thread that Python's lock does not hold up.
            self._heart = ManagerServer(
                replica_id=identity,
                lighthouse_addr=self._lighthouse,
                hostname=host,
                bind=f"{host}:0",
                store_addr=self._store_address,
                world_size=1,
                heartbeat_interval=_HEARTBEAT,
                connect_timeout=_CONNECT,
                quorum_retries=0,
            )
        except RuntimeError as error:
            raise NoQuorumError(
                f"the lighthouse at {self._lighthouse} cannot be reached: {_one_line(error)}; start it, or correct {LIGHTHOUSE}"
            ) from error
        self._identity = identity

    # --- an update

    def ask(self, step: int) -> None:
        """Asks who takes part in the update to come, and does not wait for the answer. `step`: updates that are counted."""
        if self._is_settled:
            self._is_settled = False
        else:
            self._question = _Question(lambda: self._ask(step, self._patience))

    def confirm(self) -> None:
        """Waits for the answer.

        Raises:
            MembersChangedError: others take part than in the update before.
        """
        if self._question is None:
            return
        question, self._question = self._question, None
        quorum = collectives.from_main_rank(question.answer())
        if quorum is None:
            self._waits_since = question.begun
        if quorum is None or not self._names_same(quorum):
            self._quorum = quorum
            raise MembersChangedError("other replicas take part in this update than in the one before")

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Sums each tensor over the members, in place. Collective.

        Raises:
            MembersChangedError: a member was lost.
        """
        if self.size == 1:
            return
        options = dist.AllreduceOptions()
        options.timeout = self._hang
        with _LosingMembers(self):
            for work in [self._group.allreduce([tensor], options) for tensor in tensors]:
                work.wait()

    def gather_objects(self, value: Any) -> list[Any]:
        """`value` of each member, by rank: plain values. Collective.

        Raises:
            MembersChangedError: a member was lost.
        """
        own = _as_bytes(value)
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(own)
        self.sum([lengths])
        table = torch.zeros(self.size, int(lengths.max()), dtype=torch.uint8)
        table[self.rank, : len(own)] = own
        self.sum([table])
        return [_from_bytes(row[:length]) for row, length in zip(table, lengths.tolist(), strict=True)]

    def commit(self, step: int, learning_rates: Sequence[float]) -> None:
        """Notes that update `step` has had its effect on this member, with these rates, which a score may have decided."""
        self._history = _digest(self._history, self._key, str(step), repr(learning_rates))

    # --- a change

    def renew(self, step: Callable[[], int]) -> None:
        """Forms a group with those that take part now, and gives those that have come the state. Collective.

        Args:
            step: gives how many updates this process has counted; another number once it has got the state of another member.

        Raises:
            FellBehindError: the others have counted an update that this one has not.
            NoQuorumError: there was no answer in time.
        """
        now = time.monotonic()
        deadline = self._patience + (now if self._waits_since is None else self._waits_since)
        quorum, self._quorum, self._question, self._waits_since = self._quorum, None, None, None
        while True:
            if quorum is None:
                counted, left = step(), max(1.0, deadline - time.monotonic())
                quorum = collectives.from_main_rank(_Question(partial(self._ask, counted, left)).answer())
            if quorum is not None:
                with suppress(MembersChangedError):
                    self._form(quorum)
                    self._is_settled = True
                    return
            elif self._is_new and not Members._ended_runs and collectives.any_rank(_has_ended()):  # the others have gone
                raise _nothing_left()
            quorum = None
            if collectives.any_rank(time.monotonic() > deadline):
                raise NoQuorumError(
                    f"the lighthouse at {self._lighthouse} has named no members for {self._patience:g} s; see whether it "
                    f"runs and how many replicas it waits for (more than half of the living replicas must ask; HangWatch ends "
                    f"one that hangs), or raise {_PATIENCE}"
                )

    def _ask(self, step: int, seconds: float) -> list[_Participant] | None:
        """The replicas that the lighthouse names; None without an answer in so many seconds, and on ranks that do not ask."""
        if not collectives.is_main_rank():
            return None
        own = {"key": self._key, "history": self._history, "is_new": self._is_new}
        own |= {"ended_runs": Members._ended_runs, "stops": self._stops}
        own |= {"num_ranks": collectives.world_size(), "sends": self.sends}
        try:
            answer = self._client.quorum(
                replica_id=self._identity,
                timeout=timedelta(seconds=seconds),
                address=self._heart.address(),
                store_address=self._store_address,
                step=step,
                world_size=1,
                shrink_only=False,
                data=own | {"nonce": uuid.uuid4().hex},
            )
        except (RuntimeError, TimeoutError) as error:
            if not self._has_warned:  # once, and not five times a second
                self._has_warned = True
                _logger.warning(
                    f"the lighthouse at {self._lighthouse} gives no answer: {_one_line(error)}; it is asked again "
                    f"until it does, for {self._patience:g} s at most"
                )
            time.sleep(_RETRY_SECONDS)
            with suppress(RuntimeError, TimeoutError):
                from torchft.coordination import LighthouseClient

                self._client = LighthouseClient(self._lighthouse, connect_timeout=_CONNECT)
            return None
        self._has_warned = False
        return [_Participant(one.replica_id, one.store_address, one.step, one.data) for one in answer.participants]

    def _names_same(self, quorum: Sequence[_Participant]) -> bool:
        keys = {participant.data["key"] for participant in quorum}
        places = {_place(participant) for participant in quorum}
        return bool(self._key) and keys == {self._key} and len(places) == 1 and len(quorum) == self.size

    def _form(self, participants: Sequence[_Participant]) -> None:
        from torchft.process_group import ProcessGroupGloo

        ranks = {participant.replica_id: rank for rank, participant in enumerate(participants)}
        rank, source = ranks[self._identity], _newest(participants)
        mine, newest = participants[rank], participants[source]
        self._check_places(participants, mine, newest)
        self._drop()
        key = _digest(*(f"{one.replica_id}/{one.data['nonce']}" for one in participants))
        self._group = ProcessGroupGloo(timeout=_REBUILD)
        sockets = _open_sockets()
        group, address = self._group, f"{newest.store_address}/{key}/{collectives.rank()}"
        with _LosingMembers(self):
            _within(_REBUILD_AT_MOST, lambda: group.configure(address, self._identity, rank, len(participants)))
        self._sockets |= _since(sockets)
        arrivals = [number for number, one in enumerate(participants) if one.data["is_new"] and number != source]
        if rank == source:
            self._send_state(arrivals)
        elif rank in arrivals:
            _warn_of_lost_updates(mine, newest)
            _warn_of_another_run(mine, newest)
            self._receive_state(source)
        self.is_stopped = self._is_new and any(one.data["stops"] for one in participants)
        self._is_new = False
        self.names, before = tuple(_name(one.replica_id) for one in participants), self.names
        self.rank, self.size, self._key = rank, len(participants), key
        self._say(before, newest.step + 1)

    def _check_places(self, participants: Sequence[_Participant], mine: _Participant, newest: _Participant) -> None:
        """Sees to it that all of them can continue from the state of `newest`, or begin with its state.

        Raises:
            FellBehindError: this replica has missed an update, or made one otherwise.
            NoQuorumError: the run has ended.
            ValueError: this replica has another number of ranks, or other handlers whose numbers travel.
            MembersChangedError: another replica ends for one of these reasons.
        """
        have_not_run = all(one.data["is_new"] and not one.data["ended_runs"] for one in participants)
        if have_not_run and collectives.any_rank(_has_ended()):
            raise _nothing_left()
        behind = [one for one in participants if not one.data["is_new"] and _place(one) != _place(newest)]
        if mine in behind:
            self.leave()
            how = "with other members or learning rates" if mine.step == newest.step else "without it"
            raise FellBehindError(
                f"this replica has counted {mine.step} updates, and the others have continued {how} to update {newest.step}; "
                "start it again, and it joins them"
            )
        strange = [one for one in participants if _unlike(one, newest)]
        if mine in strange:
            self.leave()
            raise ValueError(_unlike(mine, newest))
        if behind or strange:  # they end; to form a group with them would wait for them
            raise MembersChangedError("a replica has another history, size or handlers, and ends")

    def _send_state(self, arrivals: Sequence[int]) -> None:
        if not arrivals:
            return
        state, history = self._capture(), _as_bytes(self._history)
        lengths = torch.tensor([len(state), len(history)])
        with _LosingMembers(self):
            for arrival in arrivals:
                for tensor in (lengths, state, history):
                    self._group.send([tensor], arrival, 0).wait(self._hang)

    def _receive_state(self, source: int) -> None:
        lengths = torch.zeros(2, dtype=torch.int64)
        with _LosingMembers(self):
            self._group.recv([lengths], source, 0).wait(self._hang)
            state, history = (torch.zeros(length, dtype=torch.uint8) for length in lengths.tolist())
            for tensor in (state, history):
                self._group.recv([tensor], source, 0).wait(self._hang)
        self._restore(state)
        self._history = _from_bytes(history)

    def _say(self, before: Sequence[str], update: int) -> None:
        """One line for each replica that has left or come; the first member says it."""
        if not collectives.is_main_rank():
            return
        if before == ("",):
            _logger.info(f"replica {self.names[self.rank]} takes part from update {update}: {self.size} replicas")
            return
        left, came = Counter(before) - Counter(self.names), Counter(self.names) - Counter(before)
        for names, what in ((left, "has left"), (came, "has come")):
            for name in names if self.rank == 0 else ():
                _logger.warning(f"replica {name} {what}: update {update} is made by {self.size} replicas")

    def close_copies(self) -> None:
        """In a process that was forked from a member, as a worker of a loader is: closes the copies of its connections.

        The others would not notice that the member has died, as long as the worker holds them open.
        """
        for number, inode in self._sockets.items():
            with suppress(OSError):
                if os.fstat(number).st_ino == inode:
                    os.close(number)

    @staticmethod
    def after_fork() -> None:
        """Of any process that is forked from this one."""
        if Members._in_run is not None:
            Members._in_run.close_copies()
            Members._in_run = None

    def _drop(self) -> None:
        """Gives the process group up, so that the members that wait for this one notice it at once."""
        group, self._group, self._key, self._is_settled = self._group, None, "", False
        if group is not None:
            group.abort(errored=False)


class _Participant(NamedTuple):
    """A replica that the lighthouse names: where the store of its first rank is, how many updates it has, what it sent."""

    replica_id: str
    store_address: str
    step: int
    data: dict[str, Any]


class _LosingMembers:
    """A `with` in which an error of the process group means that a member was lost. Collective over the ranks of a replica.

    Where some ranks have reached their members and others have not, all of them take the members for lost.
    """

    def __init__(self, members: Members) -> None:
        self._members = members

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        is_lost = isinstance(error, (RuntimeError, TimeoutError))
        if error is not None and not is_lost:
            return
        if is_lost:  # now, so that the members that wait for this rank notice it at once
            self._members._drop()
        if collectives.any_rank(is_lost):
            self._members._drop()
            reason = "by another rank of this replica" if error is None else _one_line(error)
            raise MembersChangedError(f"a replica was lost: {reason}") from error


def _within(seconds: float, work: Callable[[], object]) -> None:
    """Does `work` in a thread, which is given up after so many seconds.

    Raises:
        TimeoutError: it has not ended by then.
        BaseException: what it raised.
    """
    errors = list[BaseException]()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="Members", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"the members have not found one another within {seconds:g} s")
    if errors:
        raise errors[0]


class _Question(threading.Thread):
    """A question that is under way. The thread ends with its process.

    Attributes:
        begun: when it was asked.
    """

    def __init__(self, ask: Callable[[], Any]) -> None:
        super().__init__(name="Members", daemon=True)
        self._ask, self._answer, self.begun = ask, None, time.monotonic()
        self.start()

    def run(self) -> None:
        """Asks."""
        self._answer = self._ask()

    def answer(self) -> Any:
        """Waits for the answer, and once the run has ended only a little longer; None if there was none."""
        while self.is_alive() and not _has_ended():
            self.join(1.0)
        self.join(_LAST_ANSWER_SECONDS)
        return self._answer


def _seconds(name: str, default: str) -> float:
    """The number in an environment variable.

    Raises:
        ValueError: it is not a number, or not above 0.
    """
    text = os.environ.get(name, default)
    try:
        return real_number(name, float(text), above=0)
    except ValueError:
        raise ValueError(f"{name} in the environment must be a number of seconds above 0, got {text!r}") from None


def _open_sockets() -> dict[int, int]:
    """The numbers of the sockets that are open in this process, with their inodes; none where that cannot be seen."""
    found, files = dict[int, int](), Path("/dev/fd")
    for file in files.iterdir() if files.is_dir() else ():
        with suppress(OSError):
            status = os.fstat(int(file.name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(file.name)] = status.st_ino
    return found


def _since(before: dict[int, int]) -> dict[int, int]:
    """Those that were opened since then."""
    return {number: inode for number, inode in _open_sockets().items() if before.get(number) != inode}


def _has_ended() -> bool:
    return _ENDED in os.environ and Path(os.environ[_ENDED]).exists()


def _nothing_left() -> NoQuorumError:
    return NoQuorumError("the run has ended while this replica was starting; there is nothing left to do")


def _newest(participants: Sequence[_Participant]) -> int:
    """The member whose state the others take over: one that is in the run, as far as any, with the history of the most."""
    running = [one for one in participants if not one.data["is_new"]] or list(participants)
    furthest = [one for one in running if one.step == max(other.step for other in running)]
    votes = Counter(_place(one) for one in furthest)
    best = max(furthest, key=lambda one: votes[_place(one)])  # the first of them, as they are sorted
    return participants.index(best)


def _unlike(one: _Participant, newest: _Participant) -> str:
    """Says why a replica and the newest could not sum their numbers; empty if they can."""
    if one.data["num_ranks"] != newest.data["num_ranks"]:
        return (
            f"each replica must have as many ranks as the others, {newest.data['num_ranks']}, got {one.data['num_ranks']}; "
            "start all of them with the same number"
        )
    if one.data["sends"] != newest.data["sends"]:
        return (
            "handlers that send numbers with each update must be those of the other replicas "
            f"({newest.data['sends'] or 'none'}), got {one.data['sends'] or 'none'}; attach them on all replicas or on none "
            "(Cadence belongs to Checkpoint(every_seconds=...))"
        )
    return ""


def _warn_of_lost_updates(mine: _Participant, newest: _Participant) -> None:
    """Where a replica has come too late to give the others its state, which is further by more than their last update."""
    if mine.step > newest.step + 1 and collectives.is_main_rank():
        _logger.warning(
            f"this replica has resumed after update {mine.step}, and takes over the state after {newest.step} from those that "
            "train, which began without it: the updates between are made again; with --min-replicas as many as there are, all "
            "begin together, from the furthest"
        )


def _warn_of_another_run(mine: _Participant, newest: _Participant) -> None:
    """Warns where a replica may be at another `run` of the script. It may have left runs out rightly, so it is not refused."""
    own, other = mine.data["ended_runs"] + 1, newest.data["ended_runs"] + 1
    if own != other and collectives.is_main_rank():
        _logger.warning(
            f"this replica makes run {own} since its start, and takes over the state of replica {_name(newest.replica_id)}, "
            f"which makes run {other}: if these are different runs of the script, it trains on the wrong data; start a script "
            "for each run, or attach a Checkpoint to each, so that a replica that is started again has nothing to do in those "
            "before"
        )


def _place(participant: _Participant) -> tuple[int, str]:
    return participant.step, participant.data["history"]


def _own_host(lighthouse: str) -> str:
    """The name under which the others reach this machine."""
    host = urlsplit(lighthouse).hostname or ""
    return "127.0.0.1" if host in ("127.0.0.1", "localhost", "::1") else socket.gethostname()


def _name(identity: str) -> str:
    return identity.partition(":")[0]


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _as_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_bytes(content: Tensor) -> Any:
    return json.loads(bytes(content.tolist()))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


os.register_at_fork(after_in_child=Members.after_fork)
