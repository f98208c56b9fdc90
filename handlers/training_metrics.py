"""Numbers about the training, over the updates since they were last published."""

from __future__ import annotations

import logging
import math
import resource
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from ignite.engine import Engine, Events, RemovableEventHandle

from ignite_train.arguments import AMOUNT, MAPPING, NUMBER, NUMBERS, TEXTS, check_fields, did_you_mean, real_number
from ignite_train.engine.hints import hints
from ignite_train.engine.sections import SECTIONS, Sections
from ignite_train.events import Event, every
from ignite_train.kinds_of_handlers import Handler
from ignite_train.ranks import collectives
from ignite_train.state import UpdateOutput
from ignite_train.trainer import Trainer

__all__ = ["TrainingMetrics"]

_logger = logging.getLogger(__name__)
_SUMS = ("updates", "steps", "loss", "sample_size", "grad_norm", "grad_norm_max", "clipped")
_AMOUNTS = ("updates", "steps", "sample_size", "clipped")  # of these
_UPDATE = ("forward", "backward", "reduction", "optimizer")  # the sections of an update
_TRAINING = ("data", *_UPDATE)
_OUTSIDE = ("handler", "between_updates")
_APART = ("evaluation", "checkpoint", *_OUTSIDE)
_GIB = 2.0**30
_SMALLEST_SHARE = 0.005  # of the time, for a section to be in the table at the end
_MAX_PENDING = 256  # records that are kept, however long the interval is

_Record = tuple[UpdateOutput, dict[str, float], dict[str, float]]
"""What an update did, with copies of its logs and of their denominators: handlers may change those."""


class TrainingMetrics(Handler):
    """Publishes means over the applied updates since the last time, and over all ranks, into `trainer.state.metrics`.

    Of the training:

    - `"loss"`: Σloss / Σsample_size in nats, and each log of `forward` by its name, likewise per sample, or over its own
      denominator where it has one; on request `"loss_base2"` = loss / ln 2 and `"perplexity"` = exp(loss);
    - `"grad_norm"`, `"grad_norm_max"`: mean and largest norm before clipping; `"clipped"`: the fraction of updates that were
      clipped; `"skipped"`: updates skipped since training began;
    - `"learning_rate"`: the one the latest update used (`"learning_rate/0"`, `"learning_rate/1"`, ... with several groups);
      `"loss_scale"`: likewise, where the loss is scaled;
    - `"sample_size"`: mean per update; `"progress"`: the fraction of the run before the latest update, in [0, 1), if the run
      has a limit and its epochs a length.

    Updates that have a name, see `trainer.update(..., name=...)`, are not in these means. `"r1/loss"` is the mean loss of those
    that are called `"r1"`, and `"r1/LOG"` that of each of their logs.

    Of the time, in seconds by the clock of this rank:

    - `"data_seconds"`: waiting for the loader; `"forward_seconds"`; `"backward_seconds"`, with the reductions that overlap it;
      `"reduction_seconds"`: what is left of them, and the norm; `"optimizer_seconds"`; `"evaluation_seconds"`: of `Validation`
      and of the evaluators that `attach` was given; `"checkpoint_seconds"`: the time for which the run waited for saves;
      `"handler_seconds"`: all other handlers; `"between_updates_seconds"`, in a session: what the script does outside of
      `update`. Together they are the time since the interval began;
    - `"update_seconds"`: forward, backward, reduction and optimizer;
    - `"data_wait"`: data / (data + update). Above a few percent, add workers;
    - `"samples_per_second"` (of sample_size), `"updates_per_second"`, and `"tokens_per_second"` for a log `"tokens"` that
      `per_second` names: per second of data and update, without the other sections;
    - `"train_wall"`: data and update, `"wall"`: all sections, since training began, earlier processes included;
    - `"time_to_go"`: the updates that remain, at the speed of the interval, and as much evaluation,
      saving and handlers for each of them as there was since training began;
    - `"model_flop_utilisation"` on request: `flops_per_sample` · samples per second / (`peak_flops` · ranks), as defined by
      Chowdhery et al., PaLM, 2022, appendix B.

    Of the memory, in GiB and of this rank: `"memory_allocated"`, `"memory_reserved"` and `"memory_peak"` of the model's
    accelerator, the last of the interval; `"host_memory"`, resident now (at most, where the system does
    not tell).

    All of it comes from the statistics that the update reduces anyway and from this rank's clock and allocator: no collective
    and no read of the device. Sums and times are saved in checkpoints, so that an interval in which a run was interrupted has
    the same means as in a run that was not.

    Args:
        base2: add `"loss_base2"`.
        perplexity: add `"perplexity"`.
        per_second: names of logs that count something, such as `("tokens",)`.
        memory: add the memory.
        flops_per_sample: floating point operations of forward and backward for a sample_size of 1; about 6 times the number of
            parameters for a token of a transformer. Needs `peak_flops`.
        peak_flops: what one device can do in a second, by its data sheet.

    Raises:
        TypeError: `per_second` is a string, or one of the last two is not a number.
        ValueError: one of the last two is given without the other, or is not greater than 0.

    Example:
        >>> handle = TrainingMetrics(memory=False).attach(trainer, Events.ITERATION_COMPLETED(every=2))
        >>> metrics = trainer.run(data, max_epochs=1).metrics
        >>> [name for name in metrics if "second" not in name]  # doctest: +NORMALIZE_WHITESPACE
        ['loss', 'grad_norm', 'grad_norm_max', 'clipped', 'sample_size', 'learning_rate', 'skipped', 'data_wait', 'train_wall',
         'wall', 'progress', 'time_to_go']
    """

    def __init__(
        self,
        *,
        base2: bool = False,
        perplexity: bool = False,
        per_second: Iterable[str] = (),
        memory: bool = True,
        flops_per_sample: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        if isinstance(per_second, str):
            raise TypeError(f"per_second must be a sequence of names of logs, got {per_second!r}; pass ({per_second!r},)")
        if (flops_per_sample is None) != (peak_flops is None):
            raise ValueError(f"flops_per_sample and peak_flops go together, got {flops_per_sample!r} and {peak_flops!r}")
        self.base2, self.perplexity, self.per_second, self.memory = base2, perplexity, tuple(per_second), memory
        self._utilisation_per_rate: float | None = None
        if flops_per_sample is not None:
            peak = real_number("peak_flops", peak_flops, above=0)
            self._utilisation_per_rate = real_number("flops_per_sample", flops_per_sample, above=0) / peak
        self._unknown = set(self.per_second)  # names that are still to be looked for among the logs
        self._totals = dict.fromkeys((*SECTIONS, "updates"), 0.0)  # of the intervals that are over
        self._sections: Sections | None = None
        self._around_evaluation: str | None = None  # the section in which an evaluation has begun
        self._pending: list[_Record] = []  # of the interval, not yet added to the sums
        self._sums: dict[str, float] = {}
        self._logs: dict[str, float] = {}
        self._log_weights: dict[str, float] = {}  # of those with a denominator of their own
        self._published: set[str] = set()  # logs of the interval before
        self._trainer: weakref.ref[Trainer] | None = None
        self._before_run: dict[str, float] = {}  # seconds by section, of earlier runs and processes
        self._offset = dict.fromkeys(SECTIONS, 0.0)  # from seconds of this process to those of the interval
        self._begin_interval()

    def attach(
        self,
        trainer: Trainer,
        event: Event = every(50, Events.ITERATION_COMPLETED, early=True),
        *,
        evaluator: Engine | None = None,
    ) -> RemovableEventHandle:
        """Publishes at `event`, before whatever reads the metrics there.

        The last interval ends with the run, before other handlers of COMPLETED.

        Args:
            trainer: the trainer.
            event: the end of each interval.
            evaluator: whose time is `"evaluation_seconds"`, wherever it is run; for more of them see `watch`.
        """
        self._sections = trainer.sections
        now = self._sections.seconds()
        self._offset = {name: offset - now[name] for name, offset in self._offset.items()}
        trainer.on_enter.append(self._note_start)
        trainer.moments.on_record.append(self._note)
        trainer.prepend_event_handler(Events.COMPLETED, self)
        if evaluator is not None:
            self.watch(evaluator)
        return trainer.prepend_event_handler(event, self)

    def watch(self, evaluator: Engine) -> None:
        """Counts the time of this evaluator as `"evaluation_seconds"` too, where it is run by a handler."""
        evaluator.add_event_handler(Events.STARTED, self._start_evaluation)
        evaluator.add_event_handler(Events.COMPLETED, self._end_evaluation)

    @property
    def seconds_by_section(self) -> dict[str, float]:
        """Seconds since training began, earlier processes included, by section: data, forward, evaluation, ..."""
        seconds = self._in_interval()
        return {name: self._totals[name] + seconds[name] for name in SECTIONS}

    def rows_at_end(self) -> Iterator[tuple[str, str]]:
        """The time of each section that took some of this run, and what would make it quicker; see `hints`."""
        seconds = {name: value - self._before_run.get(name, 0.0) for name, value in self.seconds_by_section.items()}
        for name, value in seconds.items():
            if (share := value / (sum(seconds.values()) or 1.0)) >= _SMALLEST_SHARE:
                yield "time", f"{name.replace('_', ' ')} {value:.1f} s ({share:.0%})"
        if self._trainer is not None and (trainer := self._trainer()) is not None:
            device, precision = next(trainer.model.parameters()).device, trainer.config.get("precision", "fp32")
            for hint in hints(seconds, trainer.state.dataloader, device, precision, epochs=trainer.state.epoch):
                yield "hint", hint

    def _note_start(self, trainer: Trainer) -> None:
        self._before_run, self._trainer = self.seconds_by_section, weakref.ref(trainer)

    def __call__(self, trainer: Trainer) -> None:
        """Publishes, and begins the next interval."""
        self._add_pending()
        output = trainer.state.update_output
        if output is None or self._sums["updates"] == 0:
            return
        metrics, seconds = trainer.state.metrics, self._in_interval()
        totals = {name: self._totals[name] + seconds[name] for name in SECTIONS}
        updates = self._totals["updates"] + self._sums["updates"]
        self._publish_means(metrics)
        self._publish_options(metrics, trainer, output)
        self._publish_speed(metrics, seconds, totals)
        metrics["train_wall"], metrics["wall"] = _sum_of(totals, _TRAINING), sum(totals.values())
        self._publish_progress(metrics, trainer, seconds, _sum_of(totals, _APART) / updates)
        if self.memory:
            metrics |= _memory(next(trainer.model.parameters()).device)
        self._totals = {**totals, "updates": updates}
        self._offset = {name: offset - seconds[name] for name, offset in self._offset.items()}
        self._begin_interval()

    def state_dict(self) -> dict[str, Any]:
        """The sums of the running interval, and the time since training began."""
        self._add_pending()
        return {
            "sums": dict(self._sums),
            "logs": dict(self._logs),
            "log_weights": dict(self._log_weights),
            "published": sorted(self._published),
            "seconds": {"interval": self._in_interval(), "totals": dict(self._totals)},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues with it.

        Raises:
            TypeError: `state_dict` is not a mapping.
            ValueError: a key is missing, or something in it is not what `state_dict()` gives.
        """
        owner, numbers = "TrainingMetrics", dict.fromkeys(("sums", "logs", "log_weights"), NUMBERS)
        check_fields(owner, state_dict, {**numbers, "published": TEXTS, "seconds": MAPPING})
        sums, seconds = state_dict["sums"], state_dict["seconds"]
        check_fields(owner, sums, {**dict.fromkeys(_SUMS, NUMBER), **dict.fromkeys(_AMOUNTS, AMOUNT)})
        check_fields(owner, seconds, dict.fromkeys(("interval", "totals"), NUMBERS))
        check_fields(owner, seconds["interval"], dict.fromkeys(SECTIONS, NUMBER))
        check_fields(owner, seconds["totals"], {**dict.fromkeys(SECTIONS, NUMBER), "updates": AMOUNT})
        self._begin_interval()
        self._sums = {name: sums[name] for name in _SUMS}
        self._logs, self._log_weights = dict(state_dict["logs"]), dict(state_dict["log_weights"])
        self._published = {*state_dict["published"]}
        here = self._in_interval()
        self._offset = {name: offset + seconds["interval"][name] - here[name] for name, offset in self._offset.items()}
        self._totals |= seconds["totals"]

    def _begin_interval(self) -> None:
        self._pending = []
        self._sums, self._logs, self._log_weights = dict.fromkeys(_SUMS, 0.0), {}, {}

    def _in_interval(self) -> dict[str, float]:
        """The seconds of this interval by section, up to now."""
        now = None if self._sections is None else self._sections.seconds()
        return {name: offset + (0.0 if now is None else now[name]) for name, offset in self._offset.items()}

    # --- what is added up -------------------------------------------------------------------------------------------------

    def _note(self, output: UpdateOutput) -> None:
        """Keeps the record of an update, which is all that is done in each of them."""
        self._pending.append((output, dict(output.logs), dict(output.log_weights)))
        if len(self._pending) == _MAX_PENDING:
            self._add_pending()

    def _add_pending(self) -> None:
        """Adds what is kept to the sums, update by update in their order: so it does not matter when it is done."""
        sums, logs, weights = self._sums, self._logs, self._log_weights
        updates, steps, loss, size, norm, largest, clipped = sums.values()
        for output, logs_of_update, weights_of_update in self._pending:
            if output.skipped_reason is not None:
                continue
            if output.name is None:
                steps += 1
                loss += output.loss * output.sample_size
                size += output.sample_size
                norm += output.grad_norm
                largest = max(largest, output.grad_norm)
                clipped += output.clip_coefficient < 1.0
            else:
                logs_of_update, weights_of_update = _under_name(output, logs_of_update, weights_of_update)
            for name, value in logs_of_update.items():
                logs[name] = logs.get(name, 0.0) + value
            for name, weight in weights_of_update.items():
                weights[name] = weights.get(name, 0.0) + weight
        updates += len(self._pending)
        self._sums = dict(zip(_SUMS, (updates, steps, loss, size, norm, largest, clipped), strict=True))
        self._pending = []

    def _start_evaluation(self) -> None:
        if self._sections is not None and self._sections.current in _OUTSIDE:
            self._around_evaluation = self._sections.switch("evaluation")

    def _end_evaluation(self) -> None:
        if self._sections is not None and self._sections.current == "evaluation":
            self._sections.switch(self._around_evaluation)

    # --- what is published ------------------------------------------------------------------------------------------------

    def _publish_means(self, metrics: dict[str, Any]) -> None:
        """Publishes the means over the applied updates. Those of the interval before that this one lacks are removed."""
        sums, steps = self._sums, self._sums["steps"]
        for name in self._published - self._logs.keys():
            metrics.pop(name, None)
        self._published = {*self._logs}
        samples = sums["sample_size"]
        if steps:
            self._publish_loss(metrics, sums["loss"] / samples)
        else:
            for name in ("loss", "loss_base2", "perplexity", "grad_norm", "grad_norm_max", "clipped", "sample_size"):
                metrics.pop(name, None)
        for name, value in self._logs.items():  # updates with a name have some, where no other was made
            weight = self._log_weights.get(name, samples)
            metrics[name] = value / weight if weight else math.nan
        if not steps:
            return
        if self._unknown:
            self._warn_of_unknown()
        metrics["grad_norm"], metrics["grad_norm_max"] = sums["grad_norm"] / steps, sums["grad_norm_max"]
        metrics["clipped"], metrics["sample_size"] = sums["clipped"] / steps, samples / steps

    def _publish_loss(self, metrics: dict[str, Any], loss: float) -> None:
        metrics["loss"] = loss
        if self.base2:
            metrics["loss_base2"] = loss / math.log(2)
        if self.perplexity:
            metrics["perplexity"] = math.exp(loss) if loss < math.log(sys.float_info.max) else math.inf

    def _warn_of_unknown(self) -> None:
        """Says once which names of `per_second` no log has."""
        unknown, self._unknown = self._unknown - self._logs.keys(), set()
        for name in sorted(unknown) if collectives.is_main_rank() else ():
            hint = did_you_mean(name, self._logs)
            _logger.warning(
                f"per_second has {name!r}, and forward has logged {sorted(self._logs)}: {name}_per_second is 0 until it logs "
                f"that{hint}"
            )

    def _publish_options(self, metrics: dict[str, Any], trainer: Trainer, output: UpdateOutput) -> None:
        """What the latest update was made with."""
        if len(output.learning_rates) == 1:
            metrics["learning_rate"] = output.learning_rates[0]
        else:
            metrics.pop("learning_rate", None)  # of the updates before a group was added
            metrics |= {f"learning_rate/{group}": rate for group, rate in enumerate(output.learning_rates)}
        if output.loss_scale != 1.0 or "loss_scale" in metrics:
            metrics["loss_scale"] = output.loss_scale
        metrics["skipped"] = float(trainer.state.num_skipped)

    def _publish_speed(self, metrics: dict[str, Any], seconds: Mapping[str, float], totals: Mapping[str, float]) -> None:
        sums = self._sums
        training = _sum_of(seconds, _TRAINING) or math.nan
        samples_per_second = sums["sample_size"] / training
        metrics["samples_per_second"], metrics["updates_per_second"] = samples_per_second, sums["updates"] / training
        for name in self.per_second:
            metrics[f"{name}_per_second"] = self._logs.get(name, 0.0) / training
        if self._utilisation_per_rate is not None:
            metrics["model_flop_utilisation"] = samples_per_second * self._utilisation_per_rate / collectives.world_size()
        has_been_between = totals["between_updates"] > 0
        metrics |= {f"{name}_seconds": seconds[name] for name in seconds if name != "between_updates" or has_been_between}
        metrics["update_seconds"] = _sum_of(seconds, _UPDATE)
        metrics["data_wait"] = seconds["data"] / training

    def _publish_progress(self, metrics: dict[str, Any], trainer: Trainer, seconds: Mapping[str, float], apart: float) -> None:
        """Publishes how far the run is; `apart` is the time of an update besides that of training."""
        progress = trainer.progress.of_run(trainer.state)
        if progress is None:
            return
        remaining = trainer.state.iteration * (1.0 - progress.after) / progress.after
        training = _sum_of(seconds, _TRAINING) / self._sums["updates"]
        metrics["progress"], metrics["time_to_go"] = progress.before, remaining * (training + apart)


def _under_name(
    output: UpdateOutput, logs: dict[str, float], weights: dict[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """The loss and the logs of an update under its name, and a denominator for each."""
    sums = {"loss": output.loss * output.sample_size, **logs}
    named = {name: f"{output.name}/{name}" for name in sums}
    sizes = {named[name]: weights.get(name, output.sample_size) for name in sums}
    return {named[name]: value for name, value in sums.items()}, sizes


def _sum_of(seconds: Mapping[str, float], names: Iterable[str]) -> float:
    return sum(map(seconds.__getitem__, names))


def _memory(device: torch.device) -> dict[str, float]:
    """GiB that this process holds, on `device` too if that is an accelerator, whose peak is then counted from here again."""
    metrics = {"host_memory": _host_bytes() / _GIB}
    if device.type in ("cuda", "xpu"):  # whose allocators tell, without waiting for the device
        metrics["memory_allocated"] = torch.accelerator.memory_allocated(device) / _GIB
        metrics["memory_reserved"] = torch.accelerator.memory_reserved(device) / _GIB
        metrics["memory_peak"] = torch.accelerator.max_memory_allocated(device) / _GIB
        torch.accelerator.reset_peak_memory_stats(device)
    return metrics


def _host_bytes() -> float:
    """Resident memory: now, on Linux; elsewhere the most there ever was, which macOS gives in bytes."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:  # noqa: PTH123  # a third of the time of Path's
            return int(file.read().split()[1]) * float(resource.getpagesize())
    except FileNotFoundError:
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
