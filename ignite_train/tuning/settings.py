"""The settings that change how fast an update is computed, and not what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ignite_train.update.compilation import Compile

__all__ = ["Settings"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How an update is computed. Micro-batch times accumulation steps, the samples of an update, is the same in a tuning.

    Attributes:
        micro_batch: samples to a micro-batch of one rank; None where the loader cannot be cut otherwise.
        accumulation_steps: micro-batches to an update.
        fused: the optimizer's argument of this name; None is torch's default.
        channels_last: whether weights of 4 dimensions lie in memory as `torch.channels_last`.
        threads: of torch, for one operation on the CPU.
        workers: the loader's `num_workers`; None where it cannot be changed.
        compile: the argument of `create_trainer`.
    """

    micro_batch: int | None
    accumulation_steps: int
    fused: bool | None
    channels_last: bool
    threads: int
    workers: int | None
    compile: Compile

    def changes(self, present: Settings) -> dict[str, Any]:
        """The attributes in which these settings differ from `present`."""
        names = [field.name for field in fields(self)]
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(present, name)}

    def label(self, present: Settings | None = None) -> str:
        """These settings in a few words; with `present` only what differs from it."""
        shown: Mapping[str, Any] = vars(self) if present is None else self.changes(present)
        words = []
        if {"micro_batch", "accumulation_steps"} & shown.keys():
            size = "" if self.micro_batch is None else f"{self.micro_batch} "
            words.append(f"micro-batch {size}x {self.accumulation_steps}")
        words += [f"{name}={value}" for name, value in shown.items() if name not in ("micro_batch", "accumulation_steps")]
        return ", ".join(words)

    def line(self, present: Settings, *, creator: str, optimizer: str, loader: str) -> str:
        """What to write in the program to have these settings instead of `present`, in one line; empty if they are equal.

        Args:
            present: what the program has.
            creator: the function that makes the trainer.
            optimizer: the class of the optimizer.
            loader: the class of the loader.
        """
        changed = self.changes(present)
        steps = "gradient_accumulation_steps" if creator == "create_supervised_trainer" else "accumulation_steps"
        parts = [f"torch.set_num_threads({self.threads})"] * ("threads" in changed)
        if "channels_last" in changed:
            layout = "channels_last" if self.channels_last else "contiguous_format"
            parts.append(f"model.to(memory_format=torch.{layout})")
        for owner, names in (
            (optimizer, {"fused": "fused"}),
            (loader, {"micro_batch": "batch_size", "workers": "num_workers"}),
            (creator, {"accumulation_steps": steps, "compile": "compile"}),
        ):
            arguments = [f"{argument}={changed[name]!r}" for name, argument in names.items() if name in changed]
            parts += [f"{owner}(..., {', '.join(arguments)})"] * bool(arguments)
        return "; ".join(parts)
