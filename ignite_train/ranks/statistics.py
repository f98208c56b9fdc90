"""The sums of one update, over its micro-batches and over the ranks, in one small vector."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ignite_train.device.streams import copy_on
from ignite_train.device.to_host import ToHost, is_on_host
from ignite_train.errors import ForwardContractError
from ignite_train.forward import ForwardOutput, Mean
from ignite_train.ranks import collectives
from ignite_train.ranks.messages import Piggyback, RankRequests

__all__ = ["Ranks", "Reduced", "Statistics", "Totals"]

_WAITS_FOR_RANKS = True  # HangWatch looks for it in the file where a rank stands

_NO_REQUESTS = RankRequests()  # of an update that has not asked yet
_SUM, _WEIGHT = "\0sum", "\0weight"  # behind the names under which the two numbers of a log travel that has a denominator


class _Head(NamedTuple):
    """The numbers that the vector of every update begins with, each summed over the ranks."""

    length: Any  # of all that a rank sends in this collective
    sample_size: Any
    loss: Any
    num_micro_batches: Any
    num_out_of_memory: Any
    stop: Any
    stop_epoch: Any
    more_data: Any
    interrupt: Any
    changes_gradients: Any
    has_new_names: Any
    norm_squared: Any

    @classmethod
    def split(cls, numbers: Any) -> tuple[_Head, Any]:
        """Splits a list or a vector in the head, and what follows it: payloads of piggybacks, and logs."""
        length = len(cls._fields)
        return cls(*numbers[:length]), numbers[length:]


class Reduced(NamedTuple):
    """The numbers that the device decides from, over all ranks: float64 tensors without dimensions, on the device, not read.

    Attributes:
        sample_size: Σsample_size; a number where the host knows it.
        loss: Σloss.
        norm: L2 norm of the gradients in `.grad`.
        obstacles: 0 if all names of logs are known to all ranks, none ran out of memory or changes gradients, and no piggyback
            vetoes; None where the host knows that nothing stands in the way.
    """

    sample_size: float | Tensor
    loss: Tensor
    norm: Tensor
    obstacles: Tensor | None


class Totals(NamedTuple):
    """The sums of an update over all ranks, in float64; the same on every rank.

    Attributes:
        sample_size: Σsample_size.
        loss: Σloss, not divided.
        num_micro_batches: how many took part.
        num_out_of_memory: how often forward or backward ran out of memory.
        logs: the sum of each log by name.
        log_weights: the sum of the denominator of those logs that have their own.
        requests: what any rank asked for.
        norm: L2 norm of the gradients in `.grad`.
        more: what was sent beside them.
    """

    sample_size: float
    loss: float
    num_micro_batches: int
    num_out_of_memory: int
    logs: dict[str, float]
    requests: RankRequests
    norm: float
    more: Sequence[float] = ()
    log_weights: Mapping[str, float] = {}


class Ranks(Protocol):
    """The ranks that the sums go over.

    Attributes:
        size: how many they are.
    """

    size: int

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Sums each tensor over them, in place."""

    def gather_objects(self, value: Any) -> list[Any]:
        """`value` of each of them."""


class _AllRanks:
    """The ranks of the process group."""

    def __init__(self) -> None:
        self.size = collectives.world_size()  # asked once: to ask costs as much as to pack

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """See `Ranks`."""
        collectives.sum_over_ranks(*tensors)

    def gather_objects(self, value: Any) -> list[Any]:
        """See `Ranks`."""
        return collectives.gather_objects(value)


class Statistics:
    """Adds up what `forward` returns and reduces it over the ranks: one collective with a float64 vector, whatever is logged.

    The names of the logs need not be known anywhere beforehand. A rank that meets a name for the first time says so in the
    vector; then all ranks exchange their names (pickled, once) and repeat that one reduction.

    Args:
        device: where losses live. On the CPU sums are kept by the host; elsewhere they stay on the device until `finish`.
        counts: whether what is added here counts; False where another rank is fed the same micro-batches and its sums do.

    Attributes:
        on_host: whether the host keeps them.
        device: where they are.
        ranks: over whom they go; the ranks of the process group, unless a way of crossing sets others.
    """

    def __init__(self, device: torch.device, *, counts: bool = True) -> None:
        self.device, self.counts = device, counts
        self.on_host = is_on_host(device)
        self._reading = ToHost(device)
        self.ranks: Ranks = _AllRanks()
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._names: tuple[str, ...] = ()  # of the logs, agreed over the ranks
        self._has_weights = False  # whether a log has had a denominator so far, on this rank or on one whose names it knows
        self.reset()

    def reset(self) -> None:
        """Forgets what was added since the last `finish`."""
        self._sums: list[float | Tensor] = [0.0, 0.0]
        self._logs: dict[str, float | Tensor] = {}
        self._count = 0
        self.num_out_of_memory = 0
        self._requests = _NO_REQUESTS
        self._norm_squared: float | Tensor = 0.0
        self._piggybacks: Sequence[Piggyback] = ()
        self._payload: list[float] = []
        self._num_beside = 0
        self._vector: Tensor | None = None
        self._work: collectives.StartedSum | None = None
        if not self.on_host:
            self._reading.forget()

    def add(self, output: ForwardOutput) -> None:
        """Adds one micro-batch. On an accelerator nothing is read back."""
        loss, size, logs, _ = output
        self._count += 1
        sums, size = self._sums, size if type(size) is int else self._number(size)
        sums[0] = sums[0] + size  # not in place: `mark` has kept a tensor
        if self.on_host:
            sums[1] += loss.item() if type(loss) is Tensor else self._number(loss)
        else:
            sums[1] = _plus(sums[1], self._number(loss))
        if logs:
            self._add_logs(logs, size)

    def _add_logs(self, logs: Mapping[str, Any], size: float | Tensor) -> None:
        for name, value in logs.items():
            kind = type(value)
            if kind is tuple:
                self._add_pair(name, *value)
            elif kind is Mean:
                self._add_pair(name, self._number(value.value) * size, size)
            else:
                self._logs[name] = _plus(self._logs.get(name, 0.0), self._number(value))

    def _add_pair(self, name: str, value: float | Tensor, weight: float | Tensor) -> None:
        self._has_weights = True
        self._logs[name + _SUM] = _plus(self._logs.get(name + _SUM, 0.0), self._number(value))
        self._logs[name + _WEIGHT] = _plus(self._logs.get(name + _WEIGHT, 0.0), self._number(weight))

    def mark(self) -> tuple[list[float | Tensor], dict[str, float | Tensor], int]:
        """Where the sums stand, for `rewind`."""
        return list(self._sums), dict(self._logs), self._count

    def rewind(self, mark: tuple[list[float | Tensor], dict[str, float | Tensor], int]) -> None:
        """Forgets what was added since `mark`."""
        self._sums, self._logs, self._count = mark

    def own_totals(self) -> Totals:
        """The sums of this rank so far, without a norm. Synchronises with the device."""
        return self._own(0.0)[0]

    def leave_out(self) -> None:
        """Takes the loss, the sample size and the logs of this rank out of what `pack` sends."""
        self._sums, self._logs = [0.0, 0.0], dict.fromkeys(self._logs, 0.0)

    def pack(
        self,
        requests: RankRequests,
        piggybacks: Sequence[Piggyback] = (),
        norm_squared: float | Tensor = 0.0,
        *,
        beside: int = 0,
    ) -> Tensor | None:
        """The vector to sum over the ranks, in place; None if there is a single rank. Nothing is added later.

        `beside` is how many numbers cross in the same collective.
        """
        self._norm_squared, self._num_beside = norm_squared, beside
        stop, stop_epoch, more_data = requests.stop, requests.stop_epoch, requests.more_data  # as they are now
        self._requests = RankRequests(stop, stop_epoch, more_data, requests.interrupt, requests.changes_gradients)
        self._piggybacks = piggybacks
        self._payload = [float(number) for piggyback in piggybacks for number in piggyback.payload()] if piggybacks else []
        if self.ranks.size > 1:
            self._vector = self._as_vector()
        return self._vector

    def start(self, requests: RankRequests, piggybacks: Sequence[Piggyback] = (), norm_squared: float | Tensor = 0.0) -> None:
        """Packs and starts the reduction over the process group, to overlap what follows. Collective."""
        vector = self.pack(requests, piggybacks, norm_squared)
        if vector is not None:
            self._work = collectives.start_sum(vector)

    def reduced(self, norm: float | Tensor | None) -> Reduced | None:
        """The numbers for a decision on the device; None where the host has the numbers, or the device has no float64.

        Waits for the reduction, on an accelerator without holding the host. `norm`: as for `finish`.
        """
        if self.on_host or self._dtype is not torch.float64 or isinstance(norm, float):
            return None
        if self._vector is None:
            return self._own_reduced(norm)
        self._wait()
        vector = self._vector
        head, payload = _Head.split(vector)
        obstacles = (
            head.num_out_of_memory + head.has_new_names + head.changes_gradients + (head.length != self._length_of_all(vector))
        )
        norm = head.norm_squared.sqrt() if norm is None else norm.to(vector.device, vector.dtype)
        return Reduced(head.sample_size, head.loss, norm, self._vetoed(obstacles, payload))

    def _own_reduced(self, norm: Tensor | None) -> Reduced | None:
        """The same of this rank, which is alone; numbers that the host knows are not sent to the device."""
        size, loss = self._sums
        if norm is None or not isinstance(loss, Tensor) or self.num_out_of_memory or self._requests.changes_gradients:
            return None
        norm, obstacles = norm.to(self.device, self._dtype), None
        if self._payload:
            payload = copy_on(self.device, torch.tensor(self._payload, dtype=self._dtype))
            obstacles = self._vetoed(payload.new_zeros(()), payload)
        return Reduced(size, loss, norm, obstacles)

    def _vetoed(self, obstacles: Tensor, payload: Tensor) -> Tensor:
        """These, and one more for each piggyback that vetoes."""
        for piggyback in self._piggybacks:
            obstacles = obstacles + piggyback.vetoes(payload[: piggyback.payload_size])
            payload = payload[piggyback.payload_size :]
        return obstacles

    def send(self, norm: float | Tensor | None, more: Sequence[Tensor] = ()) -> None:
        """Starts the one transfer to the host, which `finish` waits for. What is given to the device later does not delay it.

        Args:
            norm: as for `finish`.
            more: tensors of one element that travel with it, for `Totals.more`.
        """
        self._wait()
        own = self._own_numbers() if self._vector is None else [self._vector]
        sent = [one for one in own if isinstance(one, Tensor)]
        sent += [one for one in (norm, *more) if isinstance(one, Tensor)]
        if sent:
            parts = [one.detach().reshape(-1).to(self.device, self._dtype) for one in sent]
            self._reading.send(torch.cat(parts))

    def _own_numbers(self) -> list[float | Tensor]:
        """Sample size, loss, the squared norm, and the logs of this rank."""
        return [*self._sums, self._norm_squared, *self._logs.values()]

    def finish(self, norm: float | Tensor | None) -> Totals:
        """Waits for the reduction, reads it in one transfer, and gives the piggybacks their sums. Synchronises with the device.

        Args:
            norm: the gradients' norm, read in the same transfer; None if its square is in what was packed.

        Raises:
            ForwardContractError: Σsample_size is negative or not finite; or a log has a denominator in some micro-batches only.
        """
        totals, payload = self._own(norm) if self._vector is None else self._reduced(norm)
        if not 0 <= totals.sample_size < float("inf"):
            raise ForwardContractError(
                f"sample_size must sum to a finite number of at least 0, forward's sum to {totals.sample_size}"
            )
        piggybacks = self._piggybacks
        self.reset()
        if self._has_weights:
            totals = _with_log_weights(totals)
        for piggyback in piggybacks:
            piggyback.on_reduced(payload[: piggyback.payload_size])
            payload = payload[piggyback.payload_size :]
        return totals

    def _own(self, norm: float | Tensor | None) -> tuple[Totals, list[float]]:
        """The sums of this rank, which is alone, and the payload of its piggybacks."""
        if not self.on_host:
            return self._read_own(norm), self._payload
        norm = math.sqrt(self._norm_squared) if norm is None else float(norm)
        loss, logs = float(self._sums[1]), dict(zip(self._logs, map(float, self._logs.values()), strict=True))
        sample_size, payload = float(self._sums[0]), self._payload
        return Totals(sample_size, loss, self._count, self.num_out_of_memory, logs, self._requests, norm), payload

    def _read_own(self, norm: float | Tensor | None) -> Totals:
        """The sums of this rank; one transfer reads all that lies on the device."""
        if not self._reading.under_way:
            self.send(norm)
        read = iter(self._reading.receive() if self._reading.under_way else [])
        numbers = [next(read) if isinstance(number, Tensor) else float(number) for number in self._own_numbers()]
        sample_size, loss, norm_squared, *logs = numbers
        norm = next(read) if isinstance(norm, Tensor) else norm
        return Totals(
            sample_size=sample_size,
            loss=loss,
            num_micro_batches=self._count,
            num_out_of_memory=self.num_out_of_memory,
            logs=dict(zip(self._logs, logs, strict=True)),
            requests=self._requests,
            norm=math.sqrt(norm_squared) if norm is None else norm,
            more=[*read],
        )

    def _reduced(self, norm: float | Tensor | None) -> tuple[Totals, list[float]]:
        """The sums of all ranks, and those of the piggybacks' payload."""
        if not self._reading.under_way:
            self.send(norm)
        head, rest, behind = self._read()
        self._check_length(head.length)
        while head.has_new_names > 0:
            self._exchange_names()
            head, rest, _ = self._read()
        payload, logs = rest[: len(self._payload)], rest[len(self._payload) :]
        # Behind the sums is how many ranks have met each name in this update. A resumed process may not know the others yet.
        met = zip(self._names, logs, logs[len(self._names) :], strict=False)
        if norm is None:
            norm = math.sqrt(head.norm_squared)
        elif isinstance(norm, Tensor):
            norm, *behind = behind
        return Totals(
            sample_size=head.sample_size,
            loss=head.loss,
            num_micro_batches=round(head.num_micro_batches),
            num_out_of_memory=round(head.num_out_of_memory),
            logs={name: value for name, value, num_ranks in met if num_ranks},
            requests=RankRequests(
                head.stop > 0, head.stop_epoch > 0, round(head.more_data), head.interrupt > 0, head.changes_gradients > 0
            ),
            norm=norm,
            more=behind,
        ), payload

    def _check_length(self, total: float) -> None:
        """Sees to it that the ranks have sent vectors of one length: a backend may take a shorter one without an error.

        Raises:
            ValueError: the others have sent more or less than this rank.
        """
        assert self._vector is not None  # noqa: S101  # it was sent
        if total != self._length_of_all(self._vector):
            own = self._vector.numel() + self._num_beside
            raise ValueError(
                f"the trainer must be alike on all ranks, got {own} numbers of an update on this rank, and on average "
                f"{total / self.ranks.size:g}; attach the same handlers, freeze the same parameters, and call evaluators, "
                "saves and other collectives, on all ranks"
            )

    def _length_of_all(self, vector: Tensor) -> int:
        """The sum of the lengths that the ranks have sent, if all have sent as much as this one."""
        return (vector.numel() + self._num_beside) * self.ranks.size

    def forget_names(self) -> None:
        """Has the names of the logs agreed again, as where a member comes that does not know them."""
        self._names, self._has_weights = (), False

    def _exchange_names(self) -> None:
        """A log has a name that some rank did not know: all ranks learn it, and repeat the reduction. Collective."""
        known = self.ranks.gather_objects(sorted({*self._names, *self._logs}))
        self._names = tuple(sorted({name for names in known for name in names}))
        self._has_weights = any(name.endswith(_WEIGHT) for name in self._names)
        self._vector = self._as_vector()
        self.ranks.sum([self._vector])
        self.send(None)

    def _number(self, value: float | Tensor) -> float | Tensor:
        if type(value) is not int and isinstance(value, Tensor):  # the one is told faster than the other
            value = value.full_tensor() if isinstance(value, DTensor) else value
            return float(value.item()) if self.on_host else value.detach().reshape(()).to(self.device, self._dtype)
        return float(value)

    def _entries(self) -> list[float | Tensor]:
        sample_size, loss = self._sums if self.counts else (0.0, 0.0)
        logs = self._logs if self.counts else {}
        head = _Head(
            length=float(len(_Head._fields) + len(self._payload) + 2 * len(self._names) + self._num_beside),
            sample_size=sample_size,
            loss=loss,
            num_micro_batches=float(self._count if self.counts else 0),
            num_out_of_memory=float(self.num_out_of_memory),
            stop=float(self._requests.stop),
            stop_epoch=float(self._requests.stop_epoch),
            more_data=float(self._requests.more_data),
            interrupt=float(self._requests.interrupt),
            changes_gradients=float(self._requests.changes_gradients),
            has_new_names=float(not self._logs.keys() <= {*self._names}),
            norm_squared=self._norm_squared,
        )
        has = [float(name in logs) for name in self._names]
        return [*head, *self._payload, *[logs.get(name, 0.0) for name in self._names], *has]

    def _as_vector(self) -> Tensor:
        entries = self._entries()
        if self.on_host and not isinstance(self._norm_squared, Tensor):
            return torch.tensor(entries, dtype=self._dtype)  # all of them are numbers
        vector = torch.tensor([0.0 if isinstance(e, Tensor) else e for e in entries], dtype=self._dtype)
        vector = copy_on(self.device, vector)
        for index, entry in enumerate(entries):
            if isinstance(entry, Tensor):
                vector[index] = entry
        return vector

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _read(self) -> tuple[_Head, list[float], list[float]]:
        """The head of the vector, what follows it there, and the numbers that were sent behind the vector."""
        assert self._vector is not None  # noqa: S101  # it was sent
        numbers, length = self._reading.receive(), self._vector.numel()
        return *_Head.split(numbers[:length]), numbers[length:]


def _plus(total: float | Tensor, number: float | Tensor) -> float | Tensor:
    """Their sum. To add a tensor to the zero of the beginning would be one more kernel of the device."""
    return number if type(total) is float and total == 0.0 and isinstance(number, Tensor) else total + number


def _with_log_weights(totals: Totals) -> Totals:
    """Puts the logs under the names that the user gave them, and their denominators beside them."""
    logs: dict[str, float] = {}
    weights: dict[str, float] = {}
    for key, value in totals.logs.items():
        name, _, kind = key.partition("\0")
        if kind == "weight":  # which comes behind its sum
            weights[name] = value
        elif name in logs:
            raise ForwardContractError(
                f"logs[{name!r}] must be a pair (sum, denominator) or a Mean in all micro-batches or in none, and forward "
                "returned a sum too"
            )
        else:
            logs[name] = value
    return totals._replace(logs=logs, log_weights=weights)
