"""Handing the state of a run over to a replica that has come: what a checkpoint holds, in memory."""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from ignite.engine import Events
from torch import Tensor

from ignite_train.checkpoint.capture import capture, plain_config, versions
from ignite_train.checkpoint.directory import CheckpointDirectory, commit
from ignite_train.checkpoint.disk import Disk
from ignite_train.checkpoint.manifest import MANIFEST, Manifest, file_names
from ignite_train.checkpoint.reader import CheckpointReader
from ignite_train.checkpoint.retention import Retention
from ignite_train.checkpoint.run_state import RunState
from ignite_train.checkpoint.saved_run import SavedRun
from ignite_train.ranks import collectives
from ignite_train.trainer import Trainer

__all__ = ["Handover"]


class Handover:
    """Gives the state of a run to another process as one block of bytes, and takes it over from another one.

    It is written and read as a checkpoint is, in a directory that lives for a moment, so that all checks of a resume hold:
    what comes is refused unless it is of the same model, optimizer and handlers. Where a replica has several ranks, each of
    them gives what it would write to the rank of its number; they share a directory for temporary files.

    Args:
        trainer: of the run.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def capture(self) -> Tensor:
        """The state after the updates that are counted, or this rank's part of it, as bytes. Collective."""
        run = self._run()
        state = self._trainer.state
        manifest = Manifest(
            update=state.iteration,  # the running one too, which the trainer does not count yet
            epoch=state.epoch,
            serial=0,
            world_size=collectives.world_size(),
            score=None,
            config=plain_config({}, {}),
            versions=versions(),
            files={},
        )
        content, own = io.BytesIO(), file_names(collectives.rank())
        with _shared_directory() as place:
            directory = CheckpointDirectory(place, Disk())
            path = commit(directory, capture(run), manifest, Retention(1, 1, "min", None), collectives.gather_objects)
            with tarfile.open(fileobj=content, mode="w") as archive:
                for name in (*own, MANIFEST) if collectives.is_main_rank() else own:
                    archive.add(path / name, arcname=name)
        return torch.frombuffer(bytearray(content.getbuffer()), dtype=torch.uint8)

    def restore(self, state: Tensor) -> None:
        """Takes the state of another process over, and the data of the next pass begins at its place. Collective.

        Raises:
            CheckpointError: it is the state of another model, optimizer or set of handlers.
        """
        run = self._run()
        with _shared_directory() as place:
            with tarfile.open(fileobj=io.BytesIO(state.numpy().tobytes()), mode="r") as archive:
                archive.extractall(place, filter="data")
            collectives.gather_objects(None)  # the parts of all ranks are there
            with CheckpointReader(place) as reader:
                taken, begun = RunState(reader, run), reader.manifest.update
        taken.restore()
        trainer = self._trainer
        in_epoch = trainer.state_dict()["epoch_iteration"] > 0
        if trainer.checkpoint is not None:
            trainer.checkpoint.forget_resumed()
        if begun == 0:  # STARTED is still to come on both, and does the same
            return

        def put_back() -> None:
            for handle in handles:
                handle.remove()
            taken.restore_objects()

        # Handlers of these events, such as metrics that reset themselves, change what was restored. Where the state comes from
        # within an update, they have been called there, up to its ITERATION_STARTED. A run that is stopped already ends before
        # its epoch is continued; there the state is put back before a Checkpoint saves it.
        between_updates = Events.EPOCH_STARTED if in_epoch else Events.STARTED
        event = Events.ITERATION_STARTED if begun > trainer.state.iteration else between_updates
        handles = [trainer.append_event_handler(event, put_back)]
        handles += [trainer.add_event_handler(event, put_back) for event in (Events.TERMINATE, Events.COMPLETED)]

    def _run(self) -> SavedRun:
        saves = self._trainer.checkpoint
        run = SavedRun(self._trainer, {} if saves is None else saves.to_save)
        run.begin()
        return run


@contextmanager
def _shared_directory() -> Iterator[Path]:
    """A temporary directory of rank 0, which all ranks of a replica write to. Collective."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(collectives.from_main_rank(name))
        collectives.gather_objects(None)  # all have read
