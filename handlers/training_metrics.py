"""Numbers about the training, over the updates since they were last published."""

from __future__ import annotations

import logging
import math
import mmap
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from ignite.engine import Engine, Events, RemovableEventHandle
from torch.utils.data import DataLoader

from ignite_train.arguments import AMOUNT, MAPPING, NUMBER, NUMBERS, TEXTS, check_fields, did_you_mean, real_number
from ignite_train.engine.introduction import precision_of
from ignite_train.engine.sections import SECTIONS, Sections
from ignite_train.events import Event
from ignite_train.forward import TERM
from ignite_train.kinds_of_handlers import EVERY_50, Handler
from ignite_train.ranks import collectives
from ignite_train.state import UpdateOutput
from ignite_train.trainer import Trainer

__all__ = ["TrainingMetrics"]

_logger = logging.getLogger(__name__)
_AMOUNTS = ("updates", "steps", "sample_size", "clipped")
_SUMS = (*_AMOUNTS, "loss", "grad_norm", "grad_norm_max")
_UPDATE = ("forward", "backward", "reduction", "optimizer")  # the sections of an update
_TRAINING = ("data", *_UPDATE)
_OUTSIDE = ("handler", "between_updates")
_GIB = 2.0**30
_SMALLEST_SHARE = 0.005  # of the time, for a section to be in the table at the end
_LARGEST_LOSS = math.log(sys.float_info.max)
_LONG_WAIT = 0.1  # the share of the time in which the loader is waited for
_MOSTLY = 0.5  # the share of the time that forward and backward take
_SHORT_RUN = 60.0  # seconds; a shorter run tells little, since what it waits for may be its start


class TrainingMetrics(Handler):
    """Publishes means over the applied updates since the last time, and over all ranks, into `trainer.state.metrics`.

    Of the training:

    - `"loss"`: Σloss / Σsample_size in nats, or the sum of the means of its terms where it has several, and each log of
      `forward` by its name, likewise per sample, or over its own denominator where it has one; on request `"loss_base2"`
      = loss / ln 2 and `"perplexity"` = exp(loss);
    - `"grad_norm"`, `"grad_norm_max"`: mean and largest norm before clipping; `"clipped"`: the fraction of updates that were
      clipped; `"skipped"`: updates skipped since training began;
    - `"learning_rate"`: the one the latest update used (`"learning_rate/0"`, `"learning_rate/1"`, ... with several groups);
      `"loss_scale"`: likewise, where the loss is scaled;
    - `"sample_size"`: mean per update; `"progress"`: the fraction of the run before the latest update, in [0, 1), if the run
      has a limit and its epochs a length.

    Updates that have a name, see `trainer.update(..., name=...)`, are not in these means. `"r1/loss"` is the mean loss of those
    that are called `"r1"`, and `"r1/LOG"` that of each of their logs. The samples of these updates, and of skipped ones, are
    not counted in `"samples_per_second"` and `"model_flop_utilisation"`, though their time is.

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
    - `"time_to_go"`: the updates that remain (see `trainer.expected_updates`; left out where their number is unknown), at the
      speed of the interval, and as much evaluation, saving and handlers for each of them as there was since training began;
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
        TypeError: `per_second` is not a sequence of names, or one of the last two is not a number.
        ValueError: one of the last two is given without the other, or is not greater than 0.

    Example:
        >>> handle = TrainingMetrics(memory=False).attach(trainer, Events.ITERATION_COMPLETED(every=2))
        >>> metrics = trainer.run(data, max_epochs=1).metrics
        >>> [name for name in metrics if "second" not in name]  # doctest: +NORMALIZE_WHITESPACE
        ['loss', 'grad_norm', 'grad_norm_max', 'clipped', 'sample_size', 'learning_rate', 'skipped', 'data_wait', 'train_wall',
         'wall', 'progress', 'time_to_go']
    """

    attached_once = True

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
        if isinstance(per_second, str) or not isinstance(per_second, Iterable):
            name = per_second if isinstance(per_second, str) else "tokens"
            raise TypeError(f"per_second must be a sequence of names of logs, got {per_second!r}; pass ({name!r},)")
        if (flops_per_sample is None) != (peak_flops is None):
            raise ValueError(f"flops_per_sample and peak_flops go together, got {flops_per_sample!r} and {peak_flops!r}")
        self.base2, self.perplexity, self.per_second, self.memory = base2, perplexity, tuple(per_second), memory
        self._utilisation_per_rate: float | None = None
        if flops_per_sample is not None:
            peak = real_number("peak_flops", peak_flops, above=0)
            self._utilisation_per_rate = real_number("flops_per_sample", flops_per_sample, above=0) / peak
        self._unknown = set(self.per_second)  # names that are still to be looked for among the logs
        self._published: set[str] = set()  # in the interval before
        self._sums: dict[str, float] = dict.fromkeys(_SUMS, 0.0)  # of the interval, as the next two
        self._logs: dict[str, float] = {}
        self._log_weights: dict[str, float] = {}  # of logs with a denominator of their own
        self._totals = dict.fromkeys((*SECTIONS, "updates"), 0.0)  # of the intervals that are over
        self._clock: Callable[[], dict[str, float]] = lambda: dict.fromkeys(SECTIONS, 0.0)
        self._interval_began = self._clock()  # seconds by section
        self._before_run: dict[str, float] = {}  # seconds by section, of earlier runs and processes
        self._sections: Sections | None = None
        self._around_evaluation: str | None = None  # the section in which an evaluation has begun

    def attach(self, trainer: Trainer, event: Event = EVERY_50, *, evaluator: Engine | None = None) -> RemovableEventHandle:
        """Publishes at `event`, before whatever reads the metrics there.

        The last interval ends with the run, before other handlers of COMPLETED.

        Args:
            trainer: the trainer.
            event: the end of each interval.
            evaluator: whose time is `"evaluation_seconds"`, also where a handler runs it; for more evaluators see `watch`.
        """
        interval, self._sections, self._clock = self._in_interval(), trainer.sections, trainer.sections.seconds
        self._begin_interval(interval)
        self._model_device = next(trainer.model.parameters()).device  # which stays
        trainer.on_enter.append(self._note_start)
        trainer.moments.on_record.append(self._note)
        trainer.prepend_event_handler(Events.COMPLETED, self.__call__)  # a method: it goes with the one at `event`
        if evaluator is not None:
            self.watch(evaluator)
        return trainer.prepend_event_handler(event, self)

    def taken_off(self) -> None:
        """Forgets the running interval, which an update of another interval is not to be in."""
        self._sums, self._logs, self._log_weights = dict.fromkeys(_SUMS, 0.0), {}, {}
        self._clock = lambda: dict.fromkeys(SECTIONS, 0.0)  # of what passes until it is attached again nothing counts
        self._interval_began = self._clock()

    def watch(self, evaluator: Engine) -> None:
        """Counts the time of this evaluator as `"evaluation_seconds"` too, where it is run by a handler."""
        evaluator.add_event_handler(Events.STARTED, self._start_evaluation)
        evaluator.add_event_handler(Events.COMPLETED, self._end_evaluation)
        self.attached_evaluators = (*self.attached_evaluators, weakref.ref(evaluator))

    @property
    def seconds_by_section(self) -> dict[str, float]:
        """Seconds since training began, earlier processes included, by section: data, forward, evaluation, ..."""
        return {name: self._totals[name] + seconds for name, seconds in self._in_interval().items()}

    def rows_at_end(self) -> Iterator[tuple[str, str]]:
        """The time of each section that took some of this run, and what would make it quicker."""
        seconds = {name: value - self._before_run.get(name, 0.0) for name, value in self.seconds_by_section.items()}
        for name, value in seconds.items():
            if (share := value / (sum(seconds.values()) or 1.0)) >= _SMALLEST_SHARE:
                yield "time", f"{name.replace('_', ' ')} {value:.1f} s ({share:.0%})"
        if (trainer := self.attached_trainer) is not None:
            precision = precision_of(trainer.model, trainer.config)
            for hint in _hints(seconds, trainer.state.dataloader, self._model_device, precision, epochs=trainer.state.epoch):
                yield "hint", hint

    def __call__(self, trainer: Trainer) -> None:
        """Publishes, and begins the next interval. What the interval before has published and this one lacks is removed."""
        output, metrics = trainer.state.update_output, trainer.state.metrics
        if output is None or self._sums["updates"] == 0:
            return
        seconds = self._in_interval()
        for name, amount in (*seconds.items(), ("updates", self._sums["updates"])):
            self._totals[name] += amount
        found = self._means()
        several = len(output.learning_rates) > 1
        for group, rate in enumerate(output.learning_rates):
            found[f"learning_rate/{group}" if several else "learning_rate"] = rate
        if output.loss_scale != 1.0 or "loss_scale" in metrics:
            found["loss_scale"] = output.loss_scale
        found["skipped"] = float(trainer.state.num_skipped)
        found |= self._times(trainer, seconds)
        if self.memory:
            found |= _memory(self._model_device)
        for name in self._published - found.keys():
            metrics.pop(name, None)
        self._published = {*found}
        metrics |= found
        for name, spent in seconds.items():
            self._interval_began[name] += spent
        self._sums, self._logs, self._log_weights = dict.fromkeys(_SUMS, 0.0), {}, {}

    def state_dict(self) -> dict[str, Any]:
        """The sums of the running interval, and the time since training began."""
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
        self._sums, self._published = {name: sums[name] for name in _SUMS}, {*state_dict["published"]}
        self._logs, self._log_weights = dict(state_dict["logs"]), dict(state_dict["log_weights"])
        self._begin_interval(seconds["interval"])
        self._totals |= seconds["totals"]

    def _in_interval(self) -> dict[str, float]:
        """The seconds of this interval by section, up to now."""
        return {name: now - self._interval_began[name] for name, now in self._clock().items()}

    def _begin_interval(self, spent: Mapping[str, float]) -> None:
        """Begins an interval of which these seconds, by section, are over."""
        self._interval_began = {name: now - spent[name] for name, now in self._clock().items()}

    # --- what is added up -------------------------------------------------------------------------------------------------

    def _note_start(self, _trainer: Trainer) -> None:
        self._before_run = self.seconds_by_section

    def _note(self, output: UpdateOutput) -> None:
        """Adds an update to the sums; one that has a name only to the logs, as `name/loss` and `name/LOG`."""
        sums, size = self._sums, output.sample_size
        sums["updates"] += 1
        if output.skipped_reason is not None:
            return
        logs, loss, prefix, samples_before = output.logs, output.loss * size, "", sums["sample_size"]
        if output.name is not None:
            logs, prefix = {"loss": loss, **logs}, f"{output.name}/"
        else:
            sums["steps"] += 1
            sums["loss"] += loss
            sums["sample_size"] += size
            sums["grad_norm"] += output.grad_norm
            sums["grad_norm_max"] = max(sums["grad_norm_max"], output.grad_norm)
            sums["clipped"] += output.clip_coefficient < 1.0
        for name, value in logs.items():
            key = prefix + name
            weight = output.log_weights.get(name, size if prefix or key in self._log_weights else None)
            if weight is not None:
                if not weight and not value:  # nothing counts for this mean
                    continue
                # Another update may have logged a sum of all samples, as also a `Mean` was in checkpoints of older releases.
                begun = self._log_weights.get(key, samples_before if key in self._logs else 0.0)
                self._log_weights[key] = begun + weight
            self._logs[key] = self._logs.get(key, 0.0) + value

    def _start_evaluation(self) -> None:
        if self._sections is not None and self._sections.current in _OUTSIDE:
            self._around_evaluation = self._sections.switch("evaluation")

    def _end_evaluation(self) -> None:
        if self._sections is not None and self._sections.current == "evaluation":
            self._sections.switch(self._around_evaluation)

    # --- what is published ------------------------------------------------------------------------------------------------

    def _means(self) -> dict[str, float]:
        """The means over the applied updates, and over the updates that have a name, which may be the only ones."""
        sums, steps, found = self._sums, self._sums["steps"], dict[str, float]()
        samples = sums["sample_size"]
        if steps:
            found["loss"] = sums["loss"] / samples
        losses: dict[str, float] = {}  # those of several terms: the sum of their means, as the evaluator's
        for name, value in self._logs.items():
            weight = self._log_weights.get(name, samples)
            found[name] = mean = value / weight if weight else math.nan
            prefix, is_term, _ = name.partition(TERM)
            of_name = prefix.endswith("/") and f"{prefix}loss" in self._log_weights  # of updates that have a name
            if is_term and weight and (not prefix or of_name):
                losses[f"{prefix}loss"] = losses.get(f"{prefix}loss", 0.0) + mean
        found |= losses
        if steps and self.base2:
            found["loss_base2"] = found["loss"] / math.log(2)
        if steps and self.perplexity:
            found["perplexity"] = math.exp(found["loss"]) if found["loss"] < _LARGEST_LOSS else math.inf
        if steps:
            if self._unknown:
                self._warn_of_unknown()
            found |= {"grad_norm": sums["grad_norm"] / steps, "grad_norm_max": sums["grad_norm_max"]}
            found |= {"clipped": sums["clipped"] / steps, "sample_size": samples / steps}
        return found

    def _warn_of_unknown(self) -> None:
        """Says once which names of `per_second` no log has."""
        unknown, self._unknown = self._unknown - self._logs.keys(), set()
        for name in sorted(unknown) if collectives.is_main_rank() else ():
            hint = did_you_mean(name, self._logs)
            _logger.warning(
                f"per_second has {name!r}, and forward has logged {sorted(self._logs)}: {name}_per_second is 0 until it logs "
                f"that{hint}"
            )

    def _times(self, trainer: Trainer, seconds: Mapping[str, float]) -> dict[str, float]:
        """The sections of the interval, and speeds: per second of data and update, without the other sections."""
        totals, updates = self._totals, self._sums["updates"]
        update = sum(map(seconds.__getitem__, _UPDATE))
        training, train_wall = seconds["data"] + update, sum(map(totals.__getitem__, _TRAINING))
        wall, per = sum(map(totals.__getitem__, SECTIONS)), training or math.nan
        samples_per_second = self._sums["sample_size"] / per
        found = {"samples_per_second": samples_per_second, "updates_per_second": updates / per}
        for name in self.per_second:
            found[f"{name}_per_second"] = self._logs.get(name, 0.0) / per
        if self._utilisation_per_rate is not None:
            num_ranks = trainer.state.metrics.get("replicas", 1) * collectives.world_size()  # elastic ones publish their number
            found["model_flop_utilisation"] = samples_per_second * self._utilisation_per_rate / num_ranks
        for name, spent in seconds.items():
            if name != "between_updates" or totals[name] > 0:
                found[f"{name}_seconds"] = spent
        found |= {"update_seconds": update, "data_wait": seconds["data"] / per, "train_wall": train_wall, "wall": wall}
        if (done := trainer.progress.done_before(trainer.state)) is not None:
            found["progress"] = done
        if (expected := trainer.expected_updates) is not None:
            apart = (wall - train_wall) / totals["updates"]  # of an update, besides its training
            found["time_to_go"] = (expected - trainer.state.iteration) * (training / updates + apart)
        return found


def _memory(device: torch.device) -> dict[str, float]:
    """GiB that this process holds, on `device` too if that is an accelerator, whose peak is then counted from here again."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:  # noqa: PTH123  # a third of the time of Path's
            metrics = {"host_memory": int(file.read().split()[1]) * mmap.PAGESIZE / _GIB}
    except FileNotFoundError:
        metrics = _most_memory()
    if device.type in ("cuda", "xpu"):  # whose allocators tell, without waiting for the device
        metrics["memory_allocated"] = torch.accelerator.memory_allocated(device) / _GIB
        metrics["memory_reserved"] = torch.accelerator.memory_reserved(device) / _GIB
        metrics["memory_peak"] = torch.accelerator.max_memory_allocated(device) / _GIB
        torch.accelerator.reset_peak_memory_stats(device)
    return metrics


def _most_memory() -> dict[str, float]:
    """The most that this process ever held, which systems other than Linux tell; Windows does not."""
    if sys.platform == "win32":
        return {}
    import resource

    return {"host_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _GIB}  # macOS gives it in bytes


def _hints(seconds: Mapping[str, float], data: Any, device: torch.device, precision: str, *, epochs: int) -> Iterator[str]:
    """Advice for a quicker run: at most three lines, each with what was measured and what to change.

    Args:
        seconds: what each section of the run took; see `SECTIONS`.
        data: the loader.
        device: of the model.
        precision: of forward and of the parameters.
        epochs: how many times the loader was opened.
    """
    on_card, total = device.type == "cuda", sum(seconds.values())
    if total < _SHORT_RUN:
        return
    if isinstance(data, DataLoader) and (waits := seconds["data"] / total) >= _LONG_WAIT:
        waited = f"the loader was waited for {waits:.0%} of the time"
        if data.num_workers == 0:
            yield f"{waited}; try DataLoader(..., num_workers=2) or more"
        elif epochs > 1 and not data.persistent_workers:
            yield f"{waited}; try persistent_workers=True, without which each epoch starts them again"
        else:
            yield f"{waited}; try more than num_workers={data.num_workers}"
        if on_card and not data.pin_memory:
            yield "copies to the device wait for the host; try DataLoader(..., pin_memory=True)"
    computes = (seconds["forward"] + seconds["backward"]) / total
    if on_card and precision == "fp32" and computes >= _MOSTLY and torch.cuda.is_bf16_supported(including_emulation=False):
        yield f"forward and backward took {computes:.0%} of the time in fp32; this card has bf16, try precision='bf16'"
