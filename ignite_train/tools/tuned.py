"""Tuned: the table of what a search for fast settings has measured, and the line to write to have the fastest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["Measured", "Settings", "Tuned", "changed_settings", "label"]

Settings = Mapping[str, Any]
"""The arguments of `make_trainer` by name, and beside them `"micro_batch"`, `"workers"` and `"threads"`."""


def changed_settings(settings: Settings, present: Settings) -> dict[str, Any]:
    """Returns the settings that differ from `present`."""
    return {name: value for name, value in settings.items() if value != present[name]}


def label(settings: Settings) -> str:
    """Returns settings in a few words, for a row of the table."""
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "present settings"


class Measured(NamedTuple):
    """A row of the table: settings, and how fast they are.

    Attributes:
        settings: the settings.
        samples_per_second: the median over the windows, of the slowest rank; None if they could not be measured. Micro-batches
            are counted where the loader does not tell how many samples they have.
        spread: the distance between the quartiles of the windows, as a share of the median.
        ratio: how many times as fast as the present settings; a product of medians where it was measured against others.
        peak_memory: bytes on the accelerator, of weights, states and activations; None on the CPU.
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
        warnings: settings under which the first update came out otherwise, and modules that depend on the micro-batch.
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
        counted = "samples" if self.present.get("micro_batch") else "micro-batches"
        head = ("settings", f"{counted}/s", "spread", "ratio", "peak memory", "")
        table = [head, *(self._cells(row) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = []
        for name, *numbers, outcome in table:
            aligned = (f"{number:>{width}}" for number, width in zip(numbers, widths[1:5], strict=True))
            lines.append("  ".join([f"{name:<{widths[0]}}", *aligned, outcome]).rstrip())
        lines += [f"not varied: {name}: {reason}" for name, reason in self.left_alone.items()]
        lines += [f"warning: {warning}" for warning in self.warnings]
        if self.num_unmeasured:
            lines.append(f"not measured because the time was over: {self.num_unmeasured} candidates; pass more seconds")
        return "\n".join([*lines, *self._conclusion()])

    def _cells(self, row: Measured) -> tuple[str, ...]:
        changes = changed_settings(row.settings, self.present)
        name = label(changes) if changes else f"present: {label(row.settings)}"
        if row.samples_per_second is None:
            return name, "-", "-", "-", "-", row.outcome
        memory = "-" if row.peak_memory is None else f"{row.peak_memory / 2**20:,.0f} MiB"
        rate = f"{row.samples_per_second:,.0f}" if row.samples_per_second >= 100 else f"{row.samples_per_second:.3g}"
        return name, rate, f"{row.spread:.0%}", f"{row.ratio:.2f}", memory, row.outcome

    def _conclusion(self) -> list[str]:
        if self.fastest == self.present:
            return ["nothing was faster than your settings by more than the noise"]
        low, high = self.gain_quartiles
        changes = label(changed_settings(self.fastest, self.present))
        gain = f"{self.gain:.2f} times as fast as your settings (quartiles {low:.2f} to {high:.2f})"
        return [f"fastest: {changes}: {gain}", f"to have it: {self.line}"]
