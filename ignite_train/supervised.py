"""A trainer for pairs of input and target, with the signature of Ignite's function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from ignite.engine import Events
from ignite.utils import manual_seed
from torch import Tensor, nn

from ignite_train.arguments import describe, one_of
from ignite_train.create import check_transform, create_trainer
from ignite_train.data.grouping import AccumulationSteps
from ignite_train.events import TrainEvents
from ignite_train.forward import ForwardOutput, names_model
from ignite_train.internals.of_ignite import prepare_as_ignite
from ignite_train.internals.of_torch import Loss, pytree
from ignite_train.model.optimizers import OneOrSeveralOptimizers
from ignite_train.model.precision import PrecisionName
from ignite_train.other_words import answers_other_words
from ignite_train.protection import Protect
from ignite_train.state import UpdateOutput
from ignite_train.trainer import Trainer
from ignite_train.update.compilation import Compile
from ignite_train.update.loss_scaling import LossScaling, NoLossScaling, TorchLossScaling
from ignite_train.update.options import RARE_SETTINGS, UpdateOptions

__all__ = ["create_supervised_trainer"]


@partial(answers_other_words, elsewhere=RARE_SETTINGS)
def create_supervised_trainer(
    model: nn.Module,
    optimizer: OneOrSeveralOptimizers,
    loss_fn: Callable[[Any, Any], Tensor],
    device: str | torch.device | None = None,
    non_blocking: bool = False,
    prepare_batch: Callable[..., tuple[Any, Any]] = prepare_as_ignite,
    model_transform: Callable[[Any], Any] = lambda output: output,
    output_transform: Callable[[Any, Any, Any, Any], Any] | None = None,
    deterministic: bool = False,
    amp_mode: Literal["amp"] | None = None,
    scaler: bool = False,
    gradient_accumulation_steps: AccumulationSteps = 1,
    model_fn: Callable[[Any, Any], Any] = lambda model, x: model(x),
    *,
    max_grad_norm: float | Mapping[str, float] | None = None,
    precision: PrecisionName | None = None,
    loss_scaling: LossScaling | None = None,
    compile: Compile = False,  # noqa: A002  # torch's name for it
    protect: Protect = True,
    seed: int | None = None,
    options: UpdateOptions | None = None,
) -> Trainer:
    """Makes a trainer for batches `(x, y)`, with the signature of Ignite's function of this name.

    Each micro-batch weighs as many samples as `y` is long, so that micro-batches and ranks of unequal size make the same
    update as one large batch; Ignite's takes the mean of means. So `y` is a tensor, or a list with a target for each sample;
    several targets of each sample, in a list or by name, are for `create_trainer`.

    A `loss_fn` whose own mean weighs targets unequally, as `CrossEntropyLoss` does with `weight=` and with targets of
    `ignore_index`, makes a mean of means here too. For the update of one large batch pass `create_trainer` a forward that
    returns the sum, and the number or the weight of the targets that count:
    `ForwardOutput(cross_entropy(model(x), y, reduction="sum"), sample_size=(y != -100).sum())`, or
    `ForwardOutput(cross_entropy(model(x), y, weight, reduction="sum"), sample_size=weight[y].sum())`.

    Args:
        model: as for `create_trainer`.
        optimizer: as for `create_trainer`.
        loss_fn: `loss_fn(y_pred, y)`, the mean over the samples; a torch loss module with `reduction="sum"` is taken as a sum.
        device: where `prepare_batch` puts the batch; None leaves that to the trainer, which follows the model.
        non_blocking: handed to `prepare_batch`.
        prepare_batch: `prepare_batch(batch, device=, non_blocking=)` returns `(x, y)`.
        model_transform: applied to what the model returns.
        output_transform: `output_transform(x, y, y_pred, loss)` makes `state.output`: of the last micro-batch of the update on
            this rank, detached, and of the mean loss of the update over all micro-batches and ranks, a number (with `item()`,
            as Ignite's functions expect). None makes it that loss as a float, and holds no predictions. A rank without a
            micro-batch in this update has None for the first three; after a resume `state.output` is None until an update.
        deterministic: True does what Ignite's DeterministicEngine does. Where there is CUDA, each run calls
            `torch.use_deterministic_algorithms(True, warn_only=True)` and switches off cuDNN's benchmark. Each run draws a seed
            from torch's generator, and each epoch seeds all generators by that and its number: so a script that seeds torch
            and resumes from Ignite's `Checkpoint` at the end of an epoch continues with the same batches and random numbers; in
            the middle of an epoch, with the same batches only. With our `Checkpoint` attached, which resumes anywhere without
            this, the generators are left alone.
        amp_mode: `"amp"` is Ignite's name for `precision="fp16"`; without `scaler=True` or `loss_scaling` the loss is not
            scaled then, as in Ignite.
        scaler: True scales the loss by `TorchLossScaling()`.
        gradient_accumulation_steps: `create_trainer`'s `accumulation_steps`.
        model_fn: `model_fn(model, x)` calls the model.
        max_grad_norm: as for `create_trainer`.
        precision: as for `create_trainer`.
        loss_scaling: as for `create_trainer`.
        compile: as for `create_trainer`.
        protect: as for `create_trainer`.
        seed: as for `create_trainer`.
        options: as for `create_trainer`.

    Returns:
        The trainer.

    Raises:
        TypeError, ValueError: as `create_trainer`, and for what is not supported.

    Example:
        >>> import torch
        >>> from ignite_train import create_supervised_trainer
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trainer = create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss)
        >>> state = trainer.run([(torch.ones(4, 3), torch.ones(4, 1))] * 2, max_epochs=1)
        >>> state.iteration, state.output == state.update_output.loss  # the mean loss of the latest update
        (2, True)
    """
    check_transform(output_transform, 4)
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic must be True or False, got {describe(deterministic)}")
    precision, loss_scaling = _of_ignite(amp_mode, scaler, precision, loss_scaling)
    _check_functions(loss_fn, device, prepare_batch=prepare_batch, model_transform=model_transform, model_fn=model_fn)
    is_sum = isinstance(loss_fn, Loss) and loss_fn.reduction == "sum"
    last = None if output_transform is None else _LastMicroBatch(output_transform)
    is_prepared = prepare_batch is prepare_as_ignite and device is None  # then Ignite's function changes nothing

    def forward(model: nn.Module, batch: Any) -> ForwardOutput:
        x, y = batch if is_prepared else prepare_batch(batch, device=device, non_blocking=non_blocking)
        size = len(y) if isinstance(y, Tensor) and y.shape else _num_targets(x, y)
        y_pred = model_transform(model_fn(model, x))
        if last is not None:
            last.hold(x, y, y_pred)
        loss = loss_fn(y_pred, y)
        return ForwardOutput(loss if is_sum else loss * size, size, outputs=(y_pred, y))

    trainer = create_trainer(
        model,
        optimizer,
        forward,
        accumulation_steps=gradient_accumulation_steps,
        max_grad_norm=max_grad_norm,
        precision=precision,
        loss_scaling=loss_scaling,
        compile=compile,
        protect=protect,
        seed=seed,
        output_transform=(lambda output: output.loss) if last is None else last,
        options=options,
    )
    if last is not None:
        trainer.add_event_handler(TrainEvents.FORWARD_COMPLETED, last.keep)
    if deterministic:
        _be_deterministic(trainer)
    return _refuse_other_than_pairs(trainer) if prepare_batch is prepare_as_ignite else trainer


def _check_functions(loss_fn: Any, device: Any, **others: Any) -> None:
    """Looks at the functions that a micro-batch goes through, and where it goes, before there is one."""
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be callable as loss_fn(y_pred, y), got {describe(loss_fn)}")
    if isinstance(loss_fn, type):
        raise TypeError(f"loss_fn must be a loss and not its class, got {loss_fn.__name__}; write {loss_fn.__name__}()")
    if names_model(loss_fn):
        raise TypeError(
            f"loss_fn must be callable as loss_fn(y_pred, y), got {describe(loss_fn)}, whose first parameter is a model; write "
            "create_trainer(model, optimizer, forward)"
        )
    for name, function in others.items():
        if not callable(function):
            raise TypeError(f"{name} must be a function, got {describe(function)}")
    try:
        torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"device must be a device of torch, such as 'cuda', got {describe(device)}; leave it out, and data follow the model"
        ) from None


def _of_ignite(
    amp_mode: Any, scaler: Any, precision: PrecisionName | None, loss_scaling: LossScaling | None
) -> tuple[PrecisionName, LossScaling | None]:
    """Precision and loss scaling for Ignite's arguments `amp_mode` and `scaler`, and ours beside them."""
    if not isinstance(scaler, bool):
        raise TypeError(f"scaler must be a bool, got {type(scaler).__name__}; pass loss_scaling=TorchLossScaling(...)")
    if amp_mode is not None:
        one_of("amp_mode", amp_mode, ("amp",))
        if precision not in (None, "fp16"):
            raise ValueError(f"amp_mode='amp' means precision='fp16', got precision={precision!r} beside it; pass one of them")
    if scaler and loss_scaling is None:
        loss_scaling = TorchLossScaling()
    if amp_mode is not None and loss_scaling is None:
        loss_scaling = NoLossScaling()  # Ignite's amp_mode="amp" without a scaler
    return "fp16" if amp_mode is not None else precision or "fp32", loss_scaling


class _LastMicroBatch:
    """Makes `state.output` by Ignite's `output_transform(x, y, y_pred, loss)`; holds a micro-batch until then.

    Args:
        transform: the user's function.
    """

    def __init__(self, transform: Callable[[Any, Any, Any, Any], Any]) -> None:
        self._transform = transform
        self._latest: tuple[Any, Any, Any] = (None, None, None)
        self._held: tuple[Any, Any, Any] | None = None

    def hold(self, x: Any, y: Any, y_pred: Any) -> None:
        """Holds what forward has run on, without the graph of the prediction. That may be a placeholder."""
        self._latest = x, y, pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, y_pred)

    def keep(self) -> None:
        """Called at FORWARD_COMPLETED: what is held counts, and takes the place of the one before."""
        self._held, self._latest = self._latest, (None, None, None)

    def __call__(self, output: UpdateOutput) -> Any:
        """Called once an update. None where this process has run no micro-batch yet, as after a resume."""
        if self._held is None:
            return None
        held, self._held = self._held, (None, None, None)
        self._latest = self._held
        return self._transform(*held, np.float64(output.loss))


def _be_deterministic(trainer: Trainer) -> None:
    """Has `trainer` do what Ignite's DeterministicEngine does: its seeds are those of the same script with Ignite's engine."""
    seed_of_run: list[int] = []

    def begin_run(trainer: Trainer) -> None:
        if torch.cuda.is_available():
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.backends.cudnn.benchmark = False
        seed_of_run[:] = [] if trainer.checkpoint is not None else [int(torch.randint(0, int(1e9), (1,)))]

    def begin_epoch(trainer: Trainer) -> None:
        for seed in seed_of_run:
            manual_seed(seed + trainer.state.epoch - 1)

    trainer.add_event_handler(Events.STARTED, begin_run)
    trainer.append_event_handler(Events.EPOCH_STARTED, begin_epoch)  # last, and before the data is opened


def _refuse_other_than_pairs(trainer: Trainer) -> Trainer:
    """Has `trainer` look at its first micro-batch: Ignite's way of preparing one takes keys or rows for x and y."""

    def look(trainer: Trainer) -> None:
        batch = trainer.state.batch[0]
        if isinstance(batch, (Mapping, Tensor)) or (isinstance(batch, (list, tuple)) and len(batch) != 2):
            raise TypeError(
                f"a micro-batch must be a pair (x, y), got {_kind_of_batch(batch):.80}; pass prepare_batch=lambda batch, "
                "device, non_blocking: (x, y), or use create_trainer"
            )
        handle.remove()

    handle = trainer.add_event_handler(TrainEvents.MICRO_BATCH_STARTED, look)
    return trainer


def _num_targets(x: Any, y: Any) -> int:
    """How many samples have a target in `y`; refuses several targets of each sample, whose number is another one, and none."""
    if isinstance(y, Sized) and not isinstance(y, (Mapping, Tensor)):
        inputs = x.values() if isinstance(x, Mapping) else x if isinstance(x, (list, tuple)) else [x]
        of_x, of_y = (
            {*map(_first_size, several)} - {len(y)} for several in (inputs, y if isinstance(y, (list, tuple)) else ())
        )
        if len(of_y) != 1 or not of_y <= of_x - {None}:
            return len(y)
    raise TypeError(
        f"y must be a tensor, or a list with a target for each sample, got {_kind_of_batch(y):.80}; for several targets or "
        "none use create_trainer, whose forward says how many samples there are"
    )


def _first_size(part: Any) -> int | None:
    return part.size(0) if isinstance(part, Tensor) and part.dim() else None


def _kind_of_batch(batch: Any) -> str:
    if isinstance(batch, Tensor):  # of two samples: its rows would be taken for x and y
        return f"a tensor of shape {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return f"one with the keys {list(batch)}"
    return f"a {type(batch).__name__} of {len(batch)}" if isinstance(batch, Sized) else describe(batch)
