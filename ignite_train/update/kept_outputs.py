"""Outputs of forward for single samples in the latest update: priorities, errors, predictions."""

from __future__ import annotations

from typing import Any

from ignite.engine import Events
from torch import Tensor

from ignite_train.arguments import describe
from ignite_train.errors import ForwardContractError
from ignite_train.forward import ForwardOutput
from ignite_train.internals.of_torch import pytree
from ignite_train.ranks import collectives
from ignite_train.trainer import Trainer

__all__ = ["KeptOutputs", "keep_outputs"]


class KeptOutputs:
    """The `outputs` of the micro-batches of the latest update, in their order; `keep_outputs` makes it.

    They are detached, and kept until the next update begins, also after a skipped update: the record says that it was skipped.
    After a resume the list is empty until an update is done.
    """

    def __init__(self, asked_by: str) -> None:
        self._asked_by = asked_by
        self._held: list[Any] = []

    def __call__(self, *, gathered: bool = False) -> list[Any]:
        """An entry for each micro-batch of this rank, or with `gathered` of all ranks, rank by rank and on the CPU.

        A micro-batch that was halved to fit into memory has two. With `gathered` all ranks must call it: it pickles the
        outputs and sends them in a collective of its own, which waits for the device.
        """
        if not gathered:
            return list(self._held)
        on_host = pytree.tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, self._held)
        return [outputs for held in collectives.gather_objects(on_host) for outputs in held]

    def hold(self, output: ForwardOutput) -> None:
        """Holds the outputs of a micro-batch, or of the part of it that fitted into memory, whose backward is done.

        Raises:
            ForwardContractError: `forward` gave no outputs.
        """
        if output.outputs is None:
            raise ForwardContractError(
                f"{self._asked_by} needs what forward computed of the samples; return ForwardOutput(..., outputs=(y_pred, y))"
            )
        self._held.append(pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output.outputs))

    def clear(self) -> None:
        """Releases the outputs."""
        self._held = []


def keep_outputs(trainer: Trainer, *, asked_by: str = "keep_outputs") -> KeptOutputs:
    """Keeps what forward gives for single samples until the next update, for a loop that samples by it.

    Prioritised replay, samplers that follow the loss and mining of hard examples read it between two updates. All ranks must
    call it. A replay buffer must know which samples they are: put the indices into the micro-batch and into `outputs`.

    Args:
        trainer: whose `forward` returns `ForwardOutput(..., outputs=...)`.
        asked_by: who asks, for the error if it does not.

    Returns:
        A function that gives the outputs of the latest update.

    Raises:
        TypeError: `trainer` is of another class.

    Example:
        >>> import torch
        >>> from ignite_train import ForwardOutput, create_trainer, keep_outputs
        >>> def forward(model, micro_batch):
        ...     indices, x = micro_batch
        ...     errors = model(x).squeeze(1)
        ...     return ForwardOutput(errors.square().sum(), sample_size=len(x), outputs=(indices, errors))
        >>> model = torch.nn.Linear(2, 1)
        >>> trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward)
        >>> outputs, priorities = keep_outputs(trainer), torch.ones(10)
        >>> with trainer.session():
        ...     record = trainer.update([(torch.tensor([3, 7]), torch.randn(2, 2))])
        ...     for indices, errors in outputs(gathered=True):
        ...         priorities[indices] = errors.abs()
        >>> (priorities != 1).nonzero().flatten().tolist()
        [3, 7]
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"trainer must be a Trainer, got {describe(trainer)}")
    kept = KeptOutputs(asked_by)
    trainer.moments.on_backward.append(kept.hold)
    trainer.prepend_event_handler(Events.ITERATION_STARTED, kept.clear)
    return kept
