"""The errors of training, as types that carry the values in their messages.

A caller's mistake that is known before the first batch is a plain `ValueError` or `TypeError`. What shows only in a run::

    TrainingError
    ├── ForwardContractError   (TypeError)           `forward` did not return a loss, sample size and logs
    ├── NoGradientError        (RuntimeError)        backward reached no parameter of the optimizer
    ├── SparseGradientError    (ValueError)          backward left a sparse gradient
    ├── UnlikeMicroBatchesError  (RuntimeError)      ranks that must be fed the same micro-batches were fed others
    ├── UnlikeParametersError  (RuntimeError)        sharded, and the ranks have used different parameters
    ├── LearningRateError      (ValueError)          a learning rate is NaN or infinite
    ├── GradientAccessError    (RuntimeError)        gradients were asked for, or changed, where they are a sum
    ├── CheckpointError        (RuntimeError)        a checkpoint could not be written, found or read
    │   ├── DamagedCheckpointError                   a file is missing, cut short or altered
    │   ├── CheckpointFormatError                    another version of this library wrote the checkpoint
    │   └── UnreadableCheckpointError                the disk gave an error while a checkpoint was read
    ├── NonFiniteError         (FloatingPointError)  the reduced gradient norm or loss is inf or NaN
    ├── GaveUpError            (RuntimeError)        too many updates in a row were skipped or ran out of memory
    ├── MembersChangedError    (RuntimeError)        elastic replicas: others take part now; the update is made again
    ├── FellBehindError        (RuntimeError)        elastic replicas: the others have continued without this one
    ├── NoQuorumError          (RuntimeError)        elastic replicas: there is no lighthouse, or too few replicas
    └── LossScaleFloorError    (FloatingPointError)  the loss scale cannot be lowered any further
"""

from __future__ import annotations

from functools import partial
from typing import Any, Self

__all__ = [
    "CheckpointError",
    "CheckpointFormatError",
    "DamagedCheckpointError",
    "FellBehindError",
    "ForwardContractError",
    "GaveUpError",
    "GradientAccessError",
    "LearningRateError",
    "LockTakenOverError",
    "LossScaleFloorError",
    "MembersChangedError",
    "NoGradientError",
    "NoQuorumError",
    "NonFiniteError",
    "SparseGradientError",
    "TrainingError",
    "UnlikeMicroBatchesError",
    "UnlikeParametersError",
    "UnreadableCheckpointError",
]


class TrainingError(Exception):
    """The root of every error that this library raises while training. A copy is made with the arguments of the original."""

    _made_with: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Keeps the arguments: `args` of an exception is its message."""
        error = super().__new__(cls, *args)
        error._made_with = args, kwargs
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        args, kwargs = self._made_with
        return partial(type(self), **kwargs), args, vars(self)


class ForwardContractError(TrainingError, TypeError):
    """The user's `forward` did not return a loss, sample size and logs."""


class NoGradientError(TrainingError, RuntimeError):
    """Backward left every parameter of the optimizer without a gradient, or one that `DistributedDataParallel` waits for."""


class SparseGradientError(TrainingError, ValueError):
    """Backward left a sparse gradient where none can be stepped along. It is raised before the optimizer step.

    Attributes:
        parameter: the name of the parameter.
    """

    def __init__(self, parameter: str) -> None:
        self.parameter = parameter
        super().__init__(
            f"the gradient of {parameter!r} is sparse; that is possible for the weight of an nn.Embedding or nn.EmbeddingBag "
            "with sparse=True, where fully_shard is not used; use such a module, or call the embedding with sparse=False"
        )


class UnlikeMicroBatchesError(TrainingError, RuntimeError):
    """On a mesh the ranks of a group that must be fed the same micro-batches were fed different ones. Raised on all ranks.

    Attributes:
        ranks: the group.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        super().__init__(
            f"ranks {', '.join(map(str, ranks))} must be fed the same micro-batches, having the same place in data_dims, "
            "got different ones; no parameter was moved; pass mesh=mesh['dp'], say, to ResumableLoader, ShardedSampler or "
            "TokenBudgetSampler, or num_replicas and rank of that dimension to another sampler"
        )


class UnlikeParametersError(TrainingError, RuntimeError):
    """In a sharded model some ranks have gradients of other parameters than the rest. Raised on all of them, before the step.

    Attributes:
        parameter: the first such parameter.
        ranks: the ranks that have a gradient of it.
    """

    def __init__(self, parameter: str, ranks: tuple[int, ...]) -> None:
        self.parameter, self.ranks = parameter, ranks
        super().__init__(
            "model must use the same parameters on all ranks in an update, where fully_shard was applied to it, got a gradient "
            f"of {parameter} on rank {', '.join(map(str, ranks))} alone, which torch has added to gradients of others; no "
            "parameter was moved; where all ranks call the same sharded modules, call "
            "model.set_reduce_scatter_unused_params(True), which torch has had since 2.13; or else train without fully_shard, "
            "with options=UpdateOptions(reduction='explicit')"
        )


class LearningRateError(TrainingError, ValueError):
    """A learning rate of the optimizer is NaN or infinite. It is raised before the step: no parameter was moved.

    Attributes:
        group: the index of the group in `optimizer.param_groups`.
        learning_rate: its learning rate.
        optimizer: which optimizer, `"optimizer['muon']"` say, if there are several.
    """

    def __init__(self, group: int, learning_rate: float, optimizer: str = "optimizer") -> None:
        self.group, self.learning_rate, self.optimizer = group, learning_rate, optimizer
        super().__init__(
            f"{optimizer} must have finite learning rates, got {learning_rate!r} in param_groups[{group}]; no parameter was "
            "moved; look at the learning-rate schedule, and at what else sets param_groups[...]['lr']"
        )


class GradientAccessError(TrainingError, RuntimeError):
    """A handler has read gradients, changed them or called `step` at an event where `.grad` is not the update's gradient."""


class CheckpointError(TrainingError, RuntimeError):
    """A checkpoint could not be written, found or read; those already on disk have not changed."""


class DamagedCheckpointError(CheckpointError):
    """A file of the checkpoint is missing, truncated or altered, or the path is not a checkpoint.

    Attributes:
        path: of the checkpoint.
        reason: the first thing that is wrong.
    """

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"checkpoint {path} is damaged: {reason}")


class CheckpointFormatError(CheckpointError):
    """A checkpoint has a format that this version of the library does not read. It may well be whole: it is left untouched.

    Attributes:
        path: of the checkpoint.
        found: its format.
        newest: the newest format that this version reads.
        earlier: where it is too old, what the message says of the version that wrote it; empty where it is too new.
        reason: why this version does not read it.
    """

    def __init__(self, path: str, found: int, newest: int, earlier: str = "") -> None:
        self.path, self.found, self.newest, self.earlier = path, found, newest, earlier
        self.reason = f"it has format {found}, and this version of ignite_train reads formats up to {newest}"
        remedy = "use the version that wrote it or a newer one, or move it to another directory"
        if earlier:
            self.reason = f"it was written by an earlier version of ignite_train, {earlier}"
            remedy = "finish with that version, or start in another directory"
        super().__init__(f"checkpoint {path} cannot be used: {self.reason}; nothing was renamed: {remedy}")


class LockTakenOverError(CheckpointError):
    """Another run has taken over the directory of this one, which never gets it back."""


class UnreadableCheckpointError(CheckpointError):
    """The disk gave an error while a checkpoint was read. The checkpoint itself may be intact, and nothing is renamed.

    Attributes:
        path: of the checkpoint, or of the directory of checkpoints.
        reason: the error, with the file.
    """

    def __init__(self, path: str, reason: str, remedy: str = "start again when the disk is readable") -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path} cannot be read: {reason}; nothing was renamed: {remedy}")


class NonFiniteError(TrainingError, FloatingPointError):
    """The gradient norm or the loss of an update, reduced over all ranks, is inf or NaN.

    It is raised on every rank, before the optimizer step: parameters, moments and schedules have not changed. If the gradients
    of one replica were changed after the reduction, it is raised on that rank alone, and `disagreeing` lists the others.

    Attributes:
        update: number of the update (`state.iteration`).
        loss: loss per sample, over all ranks.
        grad_norm: L2 norm of the gradient before clipping.
        where: what each rank found when it ran its micro-batches again: the first module or parameter that is not finite.
        disagreeing: the ranks on which the update was finite; they have most likely made the step.
    """

    def __init__(
        self, update: int, loss: float, grad_norm: float, where: tuple[str, ...] = (), disagreeing: tuple[int, ...] = ()
    ) -> None:
        self.update, self.loss, self.grad_norm, self.where, self.disagreeing = update, loss, grad_norm, where, disagreeing
        origin = f" ({'; '.join(where)})" if where else ""
        others = f"rank{'s' if len(disagreeing) > 1 else ''} {', '.join(map(str, disagreeing))}"
        super().__init__(
            f"update {update}: gradient norm {grad_norm:g}, loss {loss:g}: not finite, so no parameter was moved{origin}; look "
            "at the data of this update, lower the learning rate or set max_grad_norm, "
            "or pass options=UpdateOptions(on_nonfinite='skip')"
            if not disagreeing
            else f"update {update}: gradient norm {grad_norm:g}, loss {loss:g}: not finite on this rank, but finite "
            f"on {others}, which most likely made the step{origin}; look for a handler, a hook or a device that changes "
            f"gradients after they were reduced, and resume from a checkpoint before update {update}"
        )


class GaveUpError(TrainingError, RuntimeError):
    """Too many updates in a row were skipped or ran out of memory.

    Attributes:
        update: number of the last of them.
        in_a_row: how many.
    """

    def __init__(self, update: int, in_a_row: int, why: str) -> None:
        self.update, self.in_a_row, self.why = update, in_a_row, why
        super().__init__(
            f"update {update} is number {in_a_row} in a row that {why}: more updates will not help; look at the data and the "
            "learning rate, use smaller micro-batches, or raise give_up_after in UpdateOptions"
        )


class LossScaleFloorError(TrainingError, FloatingPointError):
    """An overflow requires a loss scale below the floor; the scale is not changed.

    Attributes:
        loss_scale: the scale that overflowed.
        floor: the lowest scale allowed.
        where: what each rank found when it ran its micro-batches again, as in `NonFiniteError`.
    """

    def __init__(self, loss_scale: float, floor: float, where: tuple[str, ...] = ()) -> None:
        self.loss_scale, self.floor, self.where = loss_scale, floor, where
        origin = f" ({'; '.join(where)})" if where else ""
        super().__init__(
            f"gradients overflow at loss scale {loss_scale:g}, which must not fall below {floor:g}{origin}: the loss has most "
            "likely diverged; lower the learning rate, set max_grad_norm, or train with precision='bf16'"
        )


class MembersChangedError(TrainingError, RuntimeError):
    """Elastic replicas: a replica was lost, or one has joined. The update is undone and made again; no user sees this error."""


class FellBehindError(TrainingError, RuntimeError):
    """Elastic replicas: the others have counted an update that this one has not, as after it was suspended."""


class NoQuorumError(TrainingError, RuntimeError):
    """Elastic replicas: the lighthouse cannot be reached, or too few replicas ask it for an update.

    At least as many as it was told must ask, and more than half of those that live.
    """
