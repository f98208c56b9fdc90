"""Micro-batches are moved ahead: checked with streams that take notes, since the tests have no accelerator."""

from __future__ import annotations

import gc
import weakref
from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from ignite_train import ForwardOutput, TrainEvents, create_trainer
from ignite_train.device import to_device, to_host
from ignite_train.device.streams import copy_on, has_streams
from ignite_train.device.to_device import ToDevice
from ignite_train.device.to_host import ToHost
from update_options import with_options

CPU, META = torch.device("cpu"), torch.device("meta")
_PINNED = to_device._pinned


class Stream:
    """Takes notes."""

    def __init__(self, name: str, notes: list[str], here: list[str]) -> None:
        self.name, self.notes, self.here, self.number = name, notes, here, 0

    def __enter__(self) -> None:
        self.here.append(self.name)

    def __exit__(self, *exception: object) -> None:
        self.here.pop()

    def record_event(self) -> int:
        self.number += 1
        self.notes.append(f"{self.name} records {self.number}")
        return self.number

    def wait_event(self, event: int) -> None:
        self.notes.append(f"{self.name} waits for {event}")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens on two streams that the CPU is said to have."""
    found: list[str] = []
    here = ["computing"]
    computing = Stream("computing", found, here)

    def pinned(tensor: Tensor) -> Tensor:
        found.append(f"{here[-1]} copies {tensor.flatten()[0].item():g}")
        return tensor.clone()

    monkeypatch.setattr(to_device, "has_streams", lambda device: True)
    monkeypatch.setattr(to_device, "_new_stream", lambda device: Stream("copying", found, here))
    monkeypatch.setattr(to_device, "_current_stream", lambda device: computing)
    monkeypatch.setattr(to_device, "_pinned", pinned)
    monkeypatch.setattr(Tensor, "record_stream", lambda t, s: found.append(f"{s.name} keeps {t.flatten()[0].item():g}"))
    return found


def batches(number: int, samples: int = 2) -> list[dict[str, Tensor]]:
    """Each has its number in all places."""
    return [{"x": torch.full((samples, 3), float(n + 1))} for n in range(number)]


def forward(model: nn.Module, batch: dict[str, Tensor]) -> ForwardOutput:
    """To be near zero."""
    y = model(batch["x"])
    return ForwardOutput(mse_loss(y, torch.zeros_like(y), reduction="sum"), len(y))


def make(forward: Any = forward, **options: Any) -> tuple[Any, nn.Module]:
    """A small model with SGD."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), forward, **with_options(**options)), model


def test_the_next_one_is_copied_while_this_one_is_computed_on(notes: list[str]) -> None:
    """Each is copied once, on the stream for it, between forward and backward of the one before, in its group."""

    def noting(model: nn.Module, batch: dict[str, Tensor]) -> ForwardOutput:
        notes.append(f"forward {batch['x'][0, 0].item():g}")
        return forward(model, batch)

    trainer, _ = make(noting, accumulation_steps=2)
    trainer.add_event_handler(TrainEvents.BACKWARD_COMPLETED, lambda: notes.append("backward"))
    trainer.run(batches(3), max_epochs=1)
    one = ["computing waits for {0}", "computing keeps {0}", "forward {0}"]
    copy = ["copying copies {0}", "copying records {0}"]
    first, second, third = ([[line.format(n) for line in lines] for lines in (copy, one)] for n in (1, 2, 3))
    assert notes == [*first[0], *first[1], *second[0], "backward", *second[1], "backward", *third[0], *third[1], "backward"]


def test_what_is_there_already_is_handed_over_as_it_is(notes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No stream waits, and nothing is kept for one; a value that may have to be moved late takes the long way."""
    monkeypatch.setattr(to_device, "_pinned", lambda tensor: tensor)
    transfer, (micro_batch,) = ToDevice(CPU), batches(1)
    transfer.ahead(micro_batch)
    assert transfer(micro_batch) is micro_batch
    transfer.await_copies()
    assert notes == []
    transfer({**micro_batch, "name": "one"})
    assert [note.split()[1] for note in notes if "keeps" not in note] == ["records", "waits"]


def test_the_same_bits(notes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether moved ahead or not."""
    ends = []
    for streams in (True, False):
        monkeypatch.setattr(to_device, "has_streams", lambda device, streams=streams: streams)
        trainer, model = make(accumulation_steps=3)
        trainer.run(batches(8), max_epochs=2)
        ends.append([*model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert sum("copies" in note for note in notes) == 16


def test_halves_do_not_lose_what_was_moved_ahead(notes: list[str]) -> None:
    """While a micro-batch is gone through in parts, the next one waits on the device."""

    def cramped(model: nn.Module, batch: dict[str, Tensor]) -> ForwardOutput:
        if len(batch["x"]) > 2:
            raise torch.OutOfMemoryError("no room")
        return forward(model, batch)

    trainer, _ = make(cramped, accumulation_steps=2, on_out_of_memory="split")
    trainer.run([*batches(1, samples=4), {"x": torch.full((2, 3), 7.0)}], max_epochs=1)
    assert [note for note in notes if "copies" in note] == ["copying copies 1"] * 2 + ["copying copies 7", "copying copies 1"]


@pytest.mark.usefixtures("notes")
def test_no_room_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit yet is moved when it is asked for, and the error, if there still is one, is then its own."""
    mover, batch = ToDevice(CPU), batches(1)[0]
    pinned = to_device._pinned

    def no_room(tensor: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(to_device, "_pinned", no_room)
    mover.ahead(batch)
    with pytest.raises(torch.OutOfMemoryError):
        mover(batch)
    monkeypatch.setattr(to_device, "_pinned", pinned)
    assert torch.equal(mover(batch)["x"], batch["x"])


@pytest.mark.usefixtures("notes")
def test_a_broken_off_update_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was moved for the micro-batch that was never reached is let go of."""
    moved: list[Any] = []
    pinned = to_device._pinned

    def remember(tensor: Tensor) -> Tensor:
        copy = pinned(tensor)
        moved.append(weakref.ref(copy))
        return copy

    monkeypatch.setattr(to_device, "_pinned", remember)
    trainer, _ = make(accumulation_steps=2)
    trainer.add_event_handler(TrainEvents.BACKWARD_COMPLETED(once=1), lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(batches(2), max_epochs=1)
    gc.collect()
    assert len(moved) == 2
    assert [reference() for reference in moved] == [None, None]


@pytest.mark.usefixtures("notes")
def test_what_lies_on_a_device_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch pins what is on the host, and raises an error for a tensor that is not."""
    pinned: list[Tensor] = []
    monkeypatch.setattr(to_device, "_pinned", _PINNED)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor.clone())
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    batch = {"host": torch.ones(2), "device": torch.ones(3, device=META)}
    moved = ToDevice(META)(batch)
    assert [tensor.shape for tensor in pinned] == [(2,)]
    assert {name: tensor.device for name, tensor in moved.items()} == {"host": META, "device": META}


@pytest.mark.usefixtures("notes")
@pytest.mark.parametrize("streams", [True, False], ids=["streams", "without"])
def test_copies_wait_only_where_there_are_no_streams(monkeypatch: pytest.MonkeyPatch, streams: bool) -> None:
    """Without an event the host could not know when a tensor has been read, and may free it before; sparse ones too."""
    monkeypatch.setattr(to_device, "has_streams", lambda device: streams)
    moving, to = [], Tensor.to

    def noting(tensor: Tensor, *arguments: Any, **named: Any) -> Tensor:
        moving.append((arguments, named))
        return to(tensor, *arguments, **named)

    monkeypatch.setattr(Tensor, "to", noting)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    ToDevice(META)({"x": torch.ones(2), "sparse": torch.eye(2).to_sparse()})
    assert moving == [((META,), {"non_blocking": True} if streams else {})] * 2


class Event:
    """Notes that the host waits for it."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def synchronize(self) -> None:
        self.notes.append(f"the host waits for {self.name}")


@pytest.mark.parametrize("late", [False, True], ids=["copied ahead", "copied late"])
def test_the_host_waits_for_the_last_copy(notes: list[str], monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """Behind what moved itself, on the stream that computes; else on that of the copies alone. And once."""
    monkeypatch.setattr(Stream, "record_event", lambda stream: Event(stream.name, stream.notes))
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    mover = ToDevice(META if late else CPU)
    mover.await_copies()  # nothing was copied
    mover({"x": torch.ones(2), **({"sparse": torch.eye(2).to_sparse()} if late else {})})
    notes.clear()
    mover.await_copies()
    mover.await_copies()
    assert notes == [f"the host waits for {'computing' if late else 'copying'}"]


def test_mps_counts_as_a_device_without_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a torch makes there: its copies that do not wait may read memory that was freed."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch, "Stream", lambda device: pytest.fail("a stream was made"))
    assert not has_streams(torch.device("mps", 7))  # a number that no other test asks for
    assert not has_streams(torch.device("cuda", 7))


def test_a_number_of_the_host_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """From pinned memory, which torch keeps until it was read; and without streams by a copy that waits."""
    calls: list[Any] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: (calls.append("pinned"), tensor)[1])
    monkeypatch.setattr(Tensor, "to", lambda *arguments, **named: (calls.append((*arguments[1:], named)), arguments[0])[1])
    for streams in (True, False):
        monkeypatch.setattr("ignite_train.device.streams.has_streams", lambda device, streams=streams: streams)
        copy_on(META, torch.ones(2))
    assert calls == ["pinned", (META, {"non_blocking": True}), (META, {})]


def test_what_is_no_plain_tensor_moves_when_it_is_asked_for(notes: list[str]) -> None:
    """Sparse tensors, and objects that move themselves, are not touched ahead; the rest stays what it is."""

    class Graph:
        def to(self, device: torch.device, *, non_blocking: bool) -> str:  # noqa: ARG002
            notes.append(f"graph to {device}")
            return "moved"

    batch = {"x": torch.ones(2), "sparse": torch.eye(2).to_sparse(), "graph": Graph(), "name": "a"}
    mover = ToDevice(CPU)
    mover.ahead(batch)
    assert notes == ["copying copies 1", "copying records 1"]
    moved = mover(batch)
    assert notes[2:] == ["computing waits for 1", "computing keeps 1", "graph to cpu", "computing records 1"]
    assert (moved["graph"], moved["name"]) == ("moved", "a")
    assert torch.equal(moved["sparse"].to_dense(), torch.eye(2))


def test_on_the_cpu_nothing_is_looked_at() -> None:
    """The micro-batch itself is what forward gets."""
    mover, batch = ToDevice(CPU), object()
    mover.ahead(batch)
    assert mover(batch) is batch


class Edges(NamedTuple):
    """Has a field that is called as the method is."""

    source: Tensor
    to: Tensor


class Graph:
    """Moves itself, and knows nothing of `non_blocking`."""

    def __init__(self, nodes: Tensor, where: str = "made") -> None:
        self.nodes, self.where = nodes, where

    def to(self, device: torch.device) -> Graph:
        return Graph(self.nodes.to(device), str(device))


class Tokens(UserDict[str, Tensor]):
    """A mapping that moves itself, as those of tokenizers do."""

    told: Any = None

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Tokens:
        moved = Tokens({name: value.to(device) for name, value in self.items()})
        moved.told = non_blocking
        return moved


class _InC:
    """A method that is written in C++: `inspect` does not know what it takes."""

    @property
    def __signature__(self) -> Any:
        raise ValueError("no signature found")

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return lambda device, **named: ("moved", device, named)

    def __call__(self) -> None:
        """It can be called."""


class Compact:
    """Moves itself by such a method."""

    to = _InC()


class Wrapped(NamedTuple):
    """A named tuple that moves itself: what it counts stays with the host."""

    values: Tensor
    lengths: Tensor

    def to(self, *arguments: Any, **named: Any) -> Wrapped:
        return Wrapped(self.values.to(*arguments, **named), self.lengths)


class Method:
    """Its `to` fails inside, by an error that must not be taken for a missing argument."""

    def to(self, *_arguments: Any, **_named: Any) -> None:
        raise TypeError("from inside")


def packed() -> PackedSequence:
    """Three sequences, not in the order of their lengths, so that there are indices to move."""
    return pack_sequence([torch.ones(2, 3), torch.ones(4, 3), torch.ones(3, 3)], enforce_sorted=False)


@pytest.mark.usefixtures("notes")
@pytest.mark.parametrize("streams", [True, False], ids=["streams", "without"])
def test_what_moves_itself_is_not_taken_apart(monkeypatch: pytest.MonkeyPatch, streams: bool) -> None:
    """Also where it is a tuple, and also below dicts, lists, tuples and named tuples; its own parts go where it sends them.

    It is asked not to wait where there are streams, and where it can be asked.
    """
    monkeypatch.setattr(to_device, "has_streams", lambda device: streams)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    batch = {
        "packed": packed(),
        "pair": (Edges(torch.ones(2), torch.ones(3)), [packed(), 7, "name"]),
        "graph": Graph(torch.ones(2)),
        "tokens": Tokens(ids=torch.ones(2)),
        "wrapped": Wrapped(torch.ones(2), torch.ones(2)),
        "list": [torch.ones(2), None],
        "compact": Compact(),
    }
    moved = ToDevice(META)(batch)
    for sequence in (moved["packed"], moved["pair"][1][0]):
        assert isinstance(sequence, PackedSequence)
        assert sequence.data.device == sequence.sorted_indices.device == sequence.unsorted_indices.device == META
        assert torch.equal(sequence.batch_sizes, packed().batch_sizes)
    edges = moved["pair"][0]
    assert isinstance(edges, Edges)
    assert edges.source.device == edges.to.device == META
    assert moved["pair"][1][1:] == [7, "name"]
    assert (moved["graph"].where, moved["graph"].nodes.device) == ("meta", META)
    assert isinstance(moved["tokens"], Tokens)
    assert (moved["tokens"]["ids"].device, moved["tokens"].told) == (META, streams)
    assert (moved["wrapped"].values.device, moved["wrapped"].lengths.device) == (META, CPU)
    assert (moved["list"][0].device, moved["list"][1]) == (META, None)
    assert moved["compact"] == ("moved", META, {"non_blocking": True} if streams else {})
    with pytest.raises(TypeError, match="from inside"):
        ToDevice(META)([Method()])


def test_what_moves_itself_does_so_when_it_is_asked_for(notes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stream for copies too: only plain tensors are pinned and copied ahead, and nothing is taken apart."""
    moving: list[str] = []
    monkeypatch.setattr(PackedSequence, "to", lambda self, device, non_blocking: moving.append(str(device)) or "moved")
    batch = {"x": torch.ones(2), "packed": packed(), "graph": Graph(torch.ones(2))}
    mover = ToDevice(CPU)
    mover.ahead(batch)
    assert (moving, notes) == ([], ["copying copies 1", "copying records 1"])
    moved = mover(batch)
    assert moving == ["cpu"]
    assert (moved["packed"], moved["graph"].where) == ("moved", "cpu")
    assert notes[2:] == ["computing waits for 1", "computing keeps 1", "computing records 1"]


def test_a_pinned_packed_sequence_stays_one() -> None:
    """A loader's `pin_memory` goes through a named tuple too; it keeps the type, which is then moved as one."""
    rebuilt = PackedSequence(*[None if part is None else part.clone() for part in packed()])
    assert torch.equal(ToDevice(META)([rebuilt])[0].batch_sizes, packed().batch_sizes)


@pytest.mark.parametrize("first", [True, False], ids=["alone", "behind-a-tensor"])
@pytest.mark.parametrize("kind", [packed, lambda: Graph(torch.ones(4, 3))], ids=["packed", "graph"])
def test_what_moves_itself_is_not_halved(first: bool, kind: Any) -> None:
    """Both halves would hold all of it. It is refused with what to do, and can be skipped."""

    def cramped(model: nn.Module, batch: Any) -> ForwardOutput:
        if trainer.state.iteration == 2:
            raise torch.OutOfMemoryError("no room")
        return ForwardOutput(model(torch.ones(4, 3)).sum(), 4)

    batch = [kind()] if first else [torch.ones(4, 3), kind()]
    trainer, _ = make(cramped, on_out_of_memory="split")
    with pytest.raises(ValueError, match=f"a {type(batch[-1]).__name__} cannot be halved .* on_out_of_memory='skip'"):
        trainer.run([batch] * 3, max_epochs=1)
    assert trainer.state.num_steps == 1
    trainer, _ = make(cramped, on_out_of_memory="skip")
    assert trainer.run([batch] * 3, max_epochs=1).num_steps == 2


def test_a_recurrent_network_trains_on_packed_sequences() -> None:
    """One update is that of a loop by hand."""

    def sequences(model: nn.Module, batch: PackedSequence) -> ForwardOutput:
        return ForwardOutput(model(batch)[1].pow(2).sum(), 3)

    models = []
    for by_hand in (True, False):
        torch.manual_seed(0)
        model = nn.GRU(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if by_hand:
            (model(packed())[1].pow(2).sum() / 3).backward()
            optimizer.step()
        else:
            create_trainer(model, optimizer, sequences).run([packed()], max_epochs=1)
        models.append(model)
    for left, right in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-7)  # divided before backward, and after it


# --- to the host ------------------------------------------------------------------------------------------------------------


class Queue:
    """A device that copies to the host when an event behind the copies is waited for, and not before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.streams: list[Any] = []
        self.num_buffers = 0
        self.copy, self.empty_like = Tensor.copy_, torch.empty_like
        monkeypatch.setattr(Tensor, "copy_", lambda tensor, source, **options: self.copy_later(tensor, source, **options))
        monkeypatch.setattr(torch, "empty_like", self.buffer)
        monkeypatch.setattr(to_host, "has_streams", lambda device: True)
        monkeypatch.setattr(to_host, "_new_event", lambda device: Recorded(self))
        monkeypatch.setattr(to_host, "_stream_of", lambda device: f"the stream of {device}")

    def copy_later(self, target: Tensor, source: Tensor, **options: Any) -> Tensor:
        assert options == {"non_blocking": True}  # or else the host would wait here
        self.copies.append((target.fill_(-1.0), source.clone()))
        return target

    def buffer(self, *arguments: Any, **options: Any) -> Tensor:
        self.num_buffers += 1
        return self.empty_like(*arguments, **options)


class Recorded:
    """An event of that device."""

    def __init__(self, queue: Queue) -> None:
        self.queue, self.number = queue, 0

    def record(self, stream: Any) -> None:
        self.queue.streams.append(stream)
        self.number = len(self.queue.copies)

    def synchronize(self) -> None:
        for target, source in self.queue.copies[: self.number]:
            self.queue.copy(target, source)


def test_numbers_are_read_behind_their_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each vector as it was sent, of any length and dtype; as long as these stay the same, so does the buffer for them."""
    queue, mover = Queue(monkeypatch), ToHost(CPU)
    vectors = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.tensor([5.0]), torch.tensor([0.1]).double() / 3]
    for numbers in vectors:
        expected = numbers.tolist()
        mover.send(numbers)
        assert mover.under_way
        numbers.zero_()
        assert mover.receive() == expected
        assert not mover.under_way
    assert queue.num_buffers == 3
    assert queue.streams == ["the stream of cpu"] * 4


def test_numbers_that_nobody_reads_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next ones are read as if those had not been sent."""
    Queue(monkeypatch)
    mover = ToHost(CPU)
    mover.send(torch.ones(2))
    mover.forget()
    assert not mover.under_way
    mover.send(torch.full((2,), 7.0))
    assert mover.receive() == [7.0, 7.0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_samples_and_targets_keep_their_dtype(precision: Any) -> None:
    """Samples are moved and not cast, whatever the model's dtype is; autocast computes in 16 bits inside forward."""
    seen: list[Any] = []
    model = nn.Linear(3, 2)

    def forward(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch["samples"].float())
        seen.append((batch["samples"].dtype, batch["targets"].dtype, batch["weights"].dtype, logits.dtype))
        return nn.functional.cross_entropy(logits, batch["targets"])

    batch = {
        "samples": torch.ones(4, 3, dtype=torch.float64),
        "targets": torch.zeros(4, dtype=torch.int64),
        "weights": torch.ones(4, dtype=torch.float16),
    }
    create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward, precision=precision).run([batch])
    computed = torch.bfloat16 if precision == "bf16" else torch.float32
    assert seen[-1] == (torch.float64, torch.int64, torch.float16, computed)
