"""Metrics for TensorBoard."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from ignite.engine import Engine, Events, RemovableEventHandle
from torch import Tensor

from ignite_train.arguments import (
    FLAG,
    SEQUENCE,
    check_fields,
    describe,
    directory_of,
    mapping_of,
    positive_int,
)
from ignite_train.checkpoint.capture import versions
from ignite_train.events import Event, TrainEvents
from ignite_train.kinds_of_handlers import EVERY_50, RecordingHandler
from ignite_train.kinds_of_handlers.event_file import EventFile, event_files, is_finished
from ignite_train.kinds_of_handlers.handler import handle_in_every_nth_update
from ignite_train.kinds_of_handlers.recording_handler import numbered_path
from ignite_train.metrics import PUBLISHED_METRICS, grouped_metric, single_metrics
from ignite_train.model.averaged_tensors import local_tensors
from ignite_train.ranks import collectives
from ignite_train.trainer import Trainer

__all__ = ["TensorBoard"]

_BINS = 64
_GROUPS = {*PUBLISHED_METRICS.values()} - {"train"}


class TensorBoard(RecordingHandler):
    """Writes `trainer.state.metrics` as scalars over the number of the update. On rank 0 only.

    Scalars have the groups `train/`, `train/optimizer/` and `train/speed/`, those of an evaluator its tag, `validation/` say.
    The tab "custom scalars" shows the training and each evaluation in one chart, metric by metric; the tabs "text" and
    "hparams" have `config`, how the trainer was made, and the versions of what it runs on. `show` adds samples of predictions,
    and `histograms` those of weights, gradients and updates, as `weights/`, `weights.gradients/` and `weights.updates/`.

    A run that resumes shows each point once: points that an earlier process wrote after the checkpoint are hidden. A run that
    starts from the beginning moves the files of an earlier one into the directory `old.1`, the next into `old.2`, and so on;
    TensorBoard shows each as a run of its own. What is written is with the operating system at once. A metric that is not a
    single number becomes several, or is left out with one warning. If the files are removed during the run, the next save, or
    the end of the run, warns of that and begins another.

    Args:
        log_dir: a directory, of one run; `tensorboard --logdir` opens it.
        config: the hyper-parameters: plain values by name, which may be nested.
        histograms: every how many updates there is a histogram of each weight, of its mean gradient before clipping and of its
            change by the update; None for no histograms. They cost copies of the model on the device and on the host in those
            updates, in which on an accelerator the step waits for the host. Of a sharded model they show the shards of rank 0.
        on_error: what happens when the points cannot be written, because the disk is full, say: `"warn"` and train without
            them, or `"raise"`, which ends the run on all ranks.

    Raises:
        TypeError: `log_dir` is not a path, or `histograms` not an integer.
        ValueError: `on_error` is neither of the two, or `histograms` is below 1.

    Example:
        >>> handle = TensorBoard(directory).attach(trainer, Events.ITERATION_COMPLETED(every=2))
        >>> handle = TrainingMetrics().attach(trainer, Events.ITERATION_COMPLETED(every=2))
        >>> state = trainer.run(data, max_epochs=1)
        >>> len(list(directory.glob("events.out.tfevents.*")))
        1
    """

    what_is_written = "points"

    def __init__(
        self,
        log_dir: str | Path,
        *,
        config: Mapping[str, Any] | None = None,
        histograms: int | None = None,
        on_error: Literal["warn", "raise"] = "warn",
    ) -> None:
        self.log_dir, self.config = directory_of("log_dir", log_dir), mapping_of("config", config)
        super().__init__(self.log_dir, on_error)
        self.histograms = None if histograms is None else positive_int("histograms", histograms)
        self._file: EventFile | None = None  # made when there is something to write
        self._loaded = False
        self._has_layout = False  # the charts are; TensorBoard takes the first layout that it finds
        self._others: list[bytes] = []  # summaries other than points, of the latest update
        self._weights: dict[str, Tensor] = {}  # before the step, where there are histograms of it

    def attach(
        self,
        trainer: Trainer,
        event: Event = EVERY_50,
        *,
        evaluator: Engine | None = None,
        tag: str = "validation",
    ) -> RemovableEventHandle | None:
        """See `RecordingHandler`."""
        handle = super().attach(trainer, event, evaluator=evaluator, tag=tag)
        if handle is not None and self.histograms is not None:
            handle_in_every_nth_update(self, trainer, self.histograms, {TrainEvents.GRADIENTS_READY: self._add_gradients})
            trainer.add_event_handler(Events.ITERATION_COMPLETED(every=self.histograms), self._add_weights)
        return handle

    def show(
        self,
        trainer: Trainer,
        samples: Callable[[], Mapping[str, str | Tensor]],
        event: Event = Events.EPOCH_COMPLETED,
    ) -> RemovableEventHandle:
        """Writes what `samples` returns at `event`: predictions, say, as texts or pictures.

        All ranks must call this, and `samples` is called on all of them, since the forward of a sharded model needs them all.

        Args:
            trainer: the trainer.
            samples: returns texts (in Markdown) and images by name. An image is a tensor of the shape (channels, height, width)
                with 1 or 3 channels, of uint8 or of floats in [0, 1]. Images need Pillow.
            event: when; of several in the same update the first counts.
        """
        shown_in: int | None = None

        def show(trainer: Trainer) -> None:
            nonlocal shown_in
            if trainer.state.iteration != shown_in:  # not again at the end of the run
                shown_in, found = trainer.state.iteration, samples()
                if collectives.is_main_rank():
                    self._show(trainer, found)

        return trainer.add_event_handler(event, show)

    def state_dict(self) -> dict[str, Any]:
        """The latest points and their update. What was written so far has left this process already."""
        self.check_file()
        others = [torch.frombuffer(bytearray(summary), dtype=torch.uint8) for summary in self._others]
        return {**self.state_of_written(), "others": others, "has_layout": self._has_layout}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes them over: points of the same update that were written after the state was taken are hidden too."""
        check_fields("TensorBoard", state_dict, {"has_layout": FLAG, "others": SEQUENCE})
        self.load_written(state_dict)
        self._loaded = True
        self._others = [bytes(summary.tolist()) for summary in state_dict["others"]]
        self._has_layout = state_dict["has_layout"]
        self._close()

    # --- points -----------------------------------------------------------------------------------------------------------

    def open_file(self) -> tuple[Path, int] | None:
        """See `RecordingHandler`."""
        return None if self._file is None else (self._file.path, self._file.fileno())

    def may_be_continued(self) -> bool:
        """See `RecordingHandler`."""
        return self._file is None and not self._loaded and self._has_files()

    def written_name(self, name: str) -> str:
        """Groups of ours are in the section of the training, where they stand behind the loss."""
        name = super().written_name(name)
        return f"train/{name}" if name.partition("/")[0] in _GROUPS else name

    def record(self, trainer: Trainer, numbers: Mapping[str, float]) -> None:
        """Writes numbers as one event."""
        self._opened(trainer).add_numbers(numbers, trainer.updates_done)

    def _add(self, trainer: Trainer, summaries: Iterable[Any]) -> None:
        """Writes summaries other than points, as one event."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        update, values = trainer.state.iteration, [value for summary in summaries for value in summary.value]
        if values:
            with self.writing(trainer):
                whole = Summary(value=values)
                self._opened(trainer).add(whole, update)
                self.note_written(update, {})
                self._others.append(whole.SerializeToString())

    def note_written(self, update: int, numbers: Mapping[str, float]) -> None:
        """See `RecordingHandler`."""
        if update != self.latest:
            self._others = []
        super().note_written(update, numbers)

    def _opened(self, trainer: Trainer) -> EventFile:
        return self._open(trainer) if self._file is None else self._file

    def _open(self, trainer: Trainer) -> EventFile:
        """Hides what was written after the beginning, and writes once more what was written there before the checkpoint."""
        begin = trainer.state.iteration if self.begin is None else self.begin
        hidden_from = begin if self._loaded or begin == 0 else begin + 1
        if begin == 0 and not self._loaded:
            self._set_aside()
        # What is hidden from the beginning is described again; later processes do not repeat what the first one wrote.
        is_described = hidden_from > 0 and self._has_files()
        file = EventFile(self.log_dir, hidden_from)
        try:
            if not is_described:
                self._describe(trainer, file)
                self._has_layout = False
            if self._loaded and self.latest == begin:
                self._write_again(file, begin)
        except OSError:
            file.remove()
            raise
        self._file = file
        return file

    def _has_files(self) -> bool:
        return bool(event_files(self.log_dir))

    def _set_aside(self) -> None:
        """Moves the files of earlier runs into a directory of their own, which TensorBoard shows as a run of its own."""
        earlier = [path for path in event_files(self.log_dir) if is_finished(path)]
        if earlier:
            aside = numbered_path(self.log_dir / "old")
            aside.mkdir()
            for path in earlier:
                path.rename(aside / path.name)

    def _write_again(self, file: EventFile, update: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self.points:
            file.add_numbers(self.points, update)
        for summary in self._others:
            file.add(Summary.FromString(summary), update)

    def _write_evaluation(self, evaluator: Engine, trainer: Trainer, tag: str) -> None:
        super()._write_evaluation(evaluator, trainer, tag)
        if not self._has_layout and self._file is not None:
            names = single_metrics(evaluator.state.metrics, self.left_out)
            with self.writing(trainer):
                self._lay_out(self._file, [*names], trainer.state.iteration)

    # --- what is written once ---------------------------------------------------------------------------------------------

    def _describe(self, trainer: Trainer, file: EventFile) -> None:
        """The tabs "text" and "hparams"."""
        from torch.utils.tensorboard.summary import hparams, text

        settings = {**dict(_flat("", self.config)), **dict(_flat("trainer", trainer.config))}
        environment = {**versions(), "ranks": collectives.world_size(), "command": " ".join(sys.argv)}
        for tag, entries in (("config", settings), ("environment", environment)):
            table = "".join(f"| {name} | `{value}` |\n" for name, value in entries.items())
            file.add(text(tag, f"| name | value |\n| --- | --- |\n{table}"), 0)  # type: ignore[no-untyped-call]
        results = dict.fromkeys([grouped_metric("loss"), *(f"{tag}/loss" for tag in self.tags)], 0.0)
        for summary in hparams({**settings, **dict(_flat("environment", environment))}, results):  # type: ignore[no-untyped-call]
            file.add(summary, 0)

    def _lay_out(self, file: EventFile, names: list[str], update: int) -> None:
        """The tab "custom scalars": a chart for each metric, with a line of the training and one of each evaluator."""
        from torch.utils.tensorboard.summary import custom_scalars

        charts = {}
        for name in names:
            tags = [grouped_metric(name), *(f"{tag}/{name}" for tag in self.tags)]
            charts[name] = ["Multiline", [f"^{re.escape(tag)}$" for tag in tags]]
        file.add(custom_scalars({"training and evaluation": charts}), update)  # type: ignore[no-untyped-call]
        self._has_layout = True

    # --- histograms and samples -------------------------------------------------------------------------------------------

    def _add_gradients(self, trainer: Trainer) -> None:
        output = trainer.state.update_output
        if output is None or output.sample_size == 0:
            return
        self._weights = {name: weight.clone() for name, weight in _weights_of(trainer).items()}
        self._add(trainer, _histograms("weights.gradients", trainer.gradients()))

    def _add_weights(self, trainer: Trainer) -> None:
        weights, before = _weights_of(trainer), self._weights
        changes = {name: weight - before[name] for name, weight in weights.items() if name in before}
        self._weights = {}
        self._add(trainer, [*_histograms("weights", weights), *_histograms("weights.updates", changes)])

    def _show(self, trainer: Trainer, samples: Mapping[str, str | Tensor]) -> None:
        from torch.utils.tensorboard.summary import image, text

        summaries = []
        for name, sample in samples.items():
            if isinstance(sample, str):
                summaries.append(text(name, sample))  # type: ignore[no-untyped-call]
            elif isinstance(sample, Tensor) and sample.dim() == 3 and sample.shape[0] in (1, 3):
                summaries.append(image(name, sample.detach().cpu(), dataformats="CHW"))  # type: ignore[no-untyped-call]
            else:
                got = f"shape {tuple(sample.shape)}" if isinstance(sample, Tensor) else describe(sample)
                raise TypeError(f"samples must give texts, or images of shape (1 or 3, height, width), got {name!r}: {got}")
        self._add(trainer, summaries)

    # --- the file ---------------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """A record that was written in part ends what can be read: the next points go into another file, which hides none.

        A file in which there is nothing yet is deleted, so that a disk that stays full does not collect them, and the next one
        begins where it would have.
        """
        file, self._file = self._file, None
        if file is not None and file.is_empty:
            file.remove()
        elif file is not None:
            file.close()
            # As if this process had loaded its state after the latest update: also where that is the beginning, 0.
            self.begin, self._loaded = self.latest + 1, True

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _flat(name: str, value: Any) -> Iterator[tuple[str, bool | int | float | str]]:
    """Plain values under names with dots."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), entry)
    else:
        yield name, value if isinstance(value, (bool, int, float, str)) else str(value)


def _weights_of(trainer: Trainer) -> dict[str, Tensor]:
    """The weights that are trained, by name; of a sharded weight this rank's shard."""
    named = {name: weight.detach() for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    return dict(zip(named, local_tensors(named.values()), strict=True))


def _histograms(group: str, tensors: Mapping[str, Tensor]) -> Iterator[Any]:
    """Of the finite values of each tensor, if it has some."""
    from torch.utils.tensorboard.summary import histogram

    for name, tensor in zip(tensors, local_tensors(tensors.values()), strict=True):
        values = tensor.detach().to_dense()  # of a sparse gradient
        values = (torch.view_as_real(values) if values.is_complex() else values).float().cpu().flatten()
        values = values[values.isfinite()]
        if len(values):
            yield histogram(f"{group}/{name}", values.numpy(), _BINS)  # type: ignore[no-untyped-call]
