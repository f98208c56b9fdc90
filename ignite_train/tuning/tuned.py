"""What a tuning has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ignite_train.tuning.settings import Settings

__all__ = ["Measured", "Tuned"]


class Measured(NamedTuple):
    """One row of the table: settings, and what they came to.

    Attributes:
        settings: which ones.
        samples_per_second: the median over the windows, of the slowest rank; None if they could not be measured. It is that of
            micro-batches where `settings.micro_batch` is None, since nothing says how many samples these have.
        spread: the distance between the quartiles of the windows, as a share of the median.
        ratio: how many times as fast as the present settings; a product of medians where it was measured against others.
        peak_memory: bytes on the accelerator, of the copy's weights, states and activations; None on the CPU.
        outcome: in words; the reason if they could not be measured.
    """

    settings: Settings
    samples_per_second: float | None
    spread: float
    ratio: float
    peak_memory: int | None
    outcome: str


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The fastest settings that were found, and all that were measured. `print` shows a table.

    Attributes:
        present: the settings of the program.
        fastest: the fastest ones; the present ones if nothing was faster by more than the noise.
        gain: how many times as fast they are, from a measurement of their own at the end; 1.0 if they are the present ones.
        gain_quartiles: half of the rounds of that measurement lie between these two.
        line: what to write in the program to have them; empty if they are the present ones.
        rows: what was measured, in order.
        warnings: why the cut of an update into micro-batches is not free in this training, with names.
        left_alone: the settings that were not varied, each with the reason.
        num_unmeasured: candidates that were left out because the time was over.
    """

    present: Settings
    fastest: Settings
    gain: float
    gain_quartiles: tuple[float, float]
    line: str
    rows: tuple[Measured, ...]
    warnings: tuple[str, ...]
    left_alone: dict[str, str]
    num_unmeasured: int

    def __str__(self) -> str:
        counted = "samples" if self.present.micro_batch else "micro-batches"
        head = ("settings", f"{counted}/s", "spread", "ratio", "peak memory", "")
        table = [head, *(self._cells(row) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = []
        for label, *numbers, outcome in table:
            aligned = (f"{number:>{width}}" for number, width in zip(numbers, widths[1:5], strict=True))
            lines.append("  ".join([f"{label:<{widths[0]}}", *aligned, outcome]).rstrip())
        lines += [f"not varied: {name}: {reason}" for name, reason in self.left_alone.items()]
        lines += [f"warning: {warning}" for warning in self.warnings]
        if self.num_unmeasured:
            lines.append(f"not measured because the time was over: {self.num_unmeasured} candidates; pass more seconds")
        return "\n".join([*lines, *self._conclusion()])

    def _cells(self, row: Measured) -> tuple[str, ...]:
        is_present = row.settings == self.present
        label = f"present: {row.settings.label()}" if is_present else row.settings.label(self.present)
        if row.samples_per_second is None:
            return label, "-", "-", "-", "-", row.outcome
        memory = "-" if row.peak_memory is None else f"{row.peak_memory / 2**20:,.0f} MiB"
        rate = f"{row.samples_per_second:,.0f}" if row.samples_per_second >= 100 else f"{row.samples_per_second:.3g}"
        return label, rate, f"{row.spread:.0%}", f"{row.ratio:.2f}", memory, row.outcome

    def _conclusion(self) -> list[str]:
        if self.fastest == self.present:
            return ["nothing was faster than your settings by more than the noise"]
        low, high = self.gain_quartiles
        gain = f"{self.gain:.2f} times as fast as your settings (quartiles {low:.2f} to {high:.2f})"
        return [f"fastest: {self.fastest.label(self.present)}: {gain}", f"to have it: {self.line}"]
