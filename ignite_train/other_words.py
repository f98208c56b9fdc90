"""The words of other libraries, and what to write here in their place: one table, and the errors that answer with it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, TypeVar

from ignite_train.arguments import did_you_mean

__all__ = [
    "OTHER_WORDS",
    "answers",
    "answers_imports",
    "answers_other_words",
    "made_by",
    "refuse_arguments",
    "refuse_attribute",
]

_SCORE = "score='accuracy', the name of one of the evaluator's metrics"
_RUN = "trainer.run(loader, max_epochs=3)"
_VALIDATE = "Validation(evaluator, loader).attach(trainer), with evaluator = create_evaluator(model, forward)"
_SAVE = "Checkpoint('runs/first').attach(trainer) of ignite_train.handlers, which saves the run and resumes it"
_EVERY = "an event in attach: attach(trainer, Events.ITERATION_COMPLETED(every=50))"
_SCHEDULE = "LearningRateSchedule(scheduler).attach(trainer), with a scheduler of torch, whose steps are updates"
_EMA = "ModelEMA(decay=0.999).attach(trainer), which averages the trainer's model"
_HANDLERS = "MyHandler(...).attach(trainer) for each of them, or @trainer.on(Events.EPOCH_COMPLETED) for a function"

OTHER_WORDS: Mapping[str, Mapping[str, str]] = {
    # Arguments of each function and class.
    "": {
        _RUN: "epochs num_epochs n_epochs max_epoch max_epochs num_train_epochs max_num_epochs",
        "trainer.run(loader, max_iters=1000), which counts updates": (
            "steps max_steps num_steps iterations num_iterations max_updates max_iters"
        ),
        "trainer.run(loader)": "train_loader train_dataloader train_dataloaders dataloader loader data train_dataset dataset",
        "trainer.run(loader, resume='must'), or with a path, or 'auto', which is the default": (
            "resume ckpt_path checkpoint resume_from resume_from_checkpoint"
        ),
        "precision='bf16' or precision='fp16'": "amp amp_mode use_amp fp16 bf16 mixed_precision autocast dtype amp_dtype",
        "loss_scaling=TorchLossScaling(), which precision='fp16' has by itself": "scaler grad_scaler use_scaler loss_scale",
        "max_grad_norm=1.0": "grad_clip clip_grad clip_grad_norm gradient_clip_val gradient_clipping max_norm clip_norm clip",
        "accumulation_steps=4 of create_trainer, gradient_accumulation_steps=4 of create_supervised_trainer": (
            "accumulate_grad_batches update_freq grad_accumulation gradient_accumulation gradient_accumulation_steps "
            "accumulation_steps grad_accum_steps"
        ),
        _SCHEDULE: "scheduler schedulers lr_scheduler lr_schedulers schedule",
        "the rate into the optimizer, torch.optim.AdamW(model.parameters(), lr=1e-3)": "lr learning_rate weight_decay",
        "forward(model, micro_batch), which returns the loss, or use create_supervised_trainer(model, optimizer, loss_fn)": (
            "loss_fn criterion loss loss_function training_step compute_loss process_function"
        ),
        "model.to(device) before the optimizer is made; data follow the model": "device devices gpus accelerator",
        "the model wrapped by idist.auto_model(model) or by fully_shard": "ddp fsdp strategy distributed num_nodes",
        "deterministic(seed) of ignite_train at the top of the script": "deterministic",
        _HANDLERS: "callbacks callback handlers hooks plugins",
        "attach_defaults(trainer, directory='runs/first'), which logs": (
            "logger loggers logging_dir report_to tensorboard log_dir"
        ),
        _EVERY: "every interval log_every log_interval log_every_n_steps logging_steps every_n_steps frequency",
        _VALIDATE: (
            "val_loader val_dataloaders validation_data valid_loader eval_loader eval_dataset eval_every val_check_interval"
        ),
        "attach(trainer, evaluator=evaluator)": "evaluator evaluators",
        "attach(trainer), which takes it": "trainer engine",
        "logs={'correct': number} in ForwardOutput, or Ignite's Accuracy().attach(evaluator, 'accuracy')": (
            "metrics compute_metrics"
        ),
        _SCORE: "monitor metric metric_name metric_for_best_model score_name score_function best best_metric",
        "mode='max' if a higher score is better, or mode='min'": (
            "maximize greater_is_better higher_is_better minimize lower_is_better direction score_sign"
        ),
        "EarlyStopping(evaluator, score, patience=3).attach(trainer)": "patience early_stopping",
        "keep=3, or keep_best=3 for the best by a score": (
            "n_saved save_total_limit max_to_keep save_top_k keep_last num_to_keep"
        ),
        "UpdateOptions(on_nonfinite='skip')": "skip_nonfinite skip_nan terminate_on_nan nan_policy",
    },
    # Arguments, of one function or class, that mean something else there.
    "create_supervised_trainer": {"loss_fn=torch.nn.CrossEntropyLoss()": "loss criterion loss_function"},
    "Checkpoint": {
        "Checkpoint('runs/first', ...), whose directory comes first": "dirpath dirname save_dir output_dir path folder",
        "every=1000 (updates), every_epochs=1 or every_seconds=600": (
            "save_every save_steps save_interval interval every_n_train_steps every_n_epochs every_n_steps save_freq frequency"
        ),
        "Checkpoint('runs/first').attach(trainer): it saves model, optimizer and handlers by itself": (
            "save_handler filename_prefix filename filename_pattern require_empty model optimizer ()"
        ),
        "nothing: the end of a run is always saved": "save_last save_on_train_end",
    },
    "EarlyStopping": {"EarlyStopping(evaluator, 'accuracy', patience=3).attach(trainer)": "() score_function trainer"},
    "ModelEMA": {
        "decay=0.999, the part of the average that stays": "momentum beta alpha",
        _EMA: "() model",
    },
    "attach_defaults": {"attach_defaults(trainer, directory='runs/first')": "()"},
    "ResumableLoader": {"ResumableLoader(dataset, batch_size=8, shuffle=True)": "()"},
    "Trainer.total_updates": {"trainer.total_updates(loader, max_epochs=3)": "epochs num_epochs n_epochs num_train_epochs"},
    "TimeLimit": {"TimeLimit(3600), in seconds": "hours minutes duration max_time"},
    "TensorBoard": {"log_dir='runs/first', the first argument": "directory save_dir path logdir"},
    # Attributes.
    "Trainer": {
        _RUN: "fit train start train_epoch",
        "trainer.update([micro_batch])": "step train_step training_step train_batch",
        "trainer.optimizers['optimizer']": "optimizer",
        _VALIDATE: "validate evaluate test eval val validation_step",
        "predict(evaluator, loader) of ignite_train.handlers": "predict",
        _SAVE: "save save_checkpoint load load_checkpoint save_model load_model resume resume_from",
        "trainer.state.iteration, the number of updates": "global_step num_updates iteration step_count current_step",
        "trainer.state.epoch": "epoch current_epoch",
        "trainer.state.max_epochs": "max_epochs num_epochs",
        _HANDLERS: "callbacks add_callback add_callbacks on_epoch_end add_handler hooks register_hook",
        "logs={...} in ForwardOutput, and trainer.state.metrics with TrainingMetrics": (
            "log log_dict metrics logs logged_metrics callback_metrics history"
        ),
        "create_trainer(model, optimizer, forward), and trainer.run(loader), which take them as they are": "prepare",
        "Checkpoint('runs/first').attach(trainer): a handler attaches itself": "attach",
        "idist.get_rank() == 0, with import ignite.distributed as idist": "is_global_zero is_main_process is_rank_zero rank",
        "trainer.state.update_output.loss": "loss loss_value",
        "trainer.state.update_output.learning_rates": "lr learning_rate",
        _SCHEDULE: "scheduler lr_scheduler schedulers",
        "next(trainer.model.parameters()).device": "device",
        "forward that returns the loss: the update calls backward, clips, steps and clears": (
            "backward zero_grad optimizer_step clip_gradients scaler accelerator manual_backward"
        ),
    },
    "TrainState": {
        "state.update_output.loss": "loss",
        "state.iteration, the number of updates": "global_step step num_updates",
        "state.update_output.learning_rates": "lr learning_rate",
        "state.update_output.grad_norm": "grad_norm",
        "state.metrics[...] with TrainingMetrics; the sums of the latest update are state.update_output.logs": "*",
    },
    "UpdateOutput": {
        "state.update_output.loss, a plain number": "item",
        "attach_metric(trainer, metric, name) for a metric of predictions, or read state.forward_output.outputs in "
        "TrainEvents.FORWARD_COMPLETED": "outputs",
    },
    # Names to import, from either module.
    "import": {
        _SAVE: "ModelCheckpoint Checkpointer DiskSaver save save_checkpoint save_model save_state save_pretrained",
        "trainer.run(loader), which continues a run that has a Checkpoint, or load_weights(model, directory) of "
        "ignite_train.checkpoint for the weights alone": (
            "load load_checkpoint load_model load_state load_state_dict from_pretrained load_from_checkpoint"
        ),
        "trainer.run(loader), which takes a DataLoader of torch": "LightningDataModule DataModule",
        "from torch.utils.data import DataLoader": "DataLoader",
        "from ignite_train.handlers import ProgressLog": "ProgressBar TQDMProgressBar RichProgressBar",
        "nothing: a loss or gradient that is not finite raises NonFiniteError by itself": "TerminateOnNan",
        _SCHEDULE: "LRScheduler ParamScheduler LearningRateScheduler PiecewiseLinear LearningRateMonitor",
        "from ignite_train.handlers import ModelEMA": "EMAHandler EMA ExponentialMovingAverage WeightAveraging",
        "from ignite_train.handlers import TensorBoard": "TensorBoardLogger TensorboardLogger SummaryWriter",
        "from ignite_train.handlers import Csv, JsonLines": "CSVLogger",
        "from ignite_train.handlers import EarlyStopping": "EarlyStoppingCallback",
        "from ignite_train.handlers import LearningRateFinder": "FastaiLRFinder LRFinder",
        "from ignite_train.handlers import TimeLimit": "Timer",
        "from ignite.engine import Events": "Events",
        "from ignite.engine import Engine": "Engine",
        "create_evaluator(model, forward), the forward of the trainer": "create_supervised_evaluator",
        "a function and @trainer.on(Events.EPOCH_COMPLETED), or a class with attach(trainer)": "Callback TrainerCallback",
        "from ignite.metrics import Accuracy, whose metrics are attached to an evaluator": "Accuracy Loss Precision Recall",
        "deterministic(seed) of ignite_train, or create_trainer(..., seed=0)": "seed_everything set_seed manual_seed",
        "create_trainer(model, optimizer, forward)": "TrainingArguments LightningModule Accelerator",
    },
    # Events, as the names of methods or as strings.
    "event": {
        "Events.STARTED": "on_train_start on_train_begin on_fit_start",
        "Events.COMPLETED": "on_train_end on_fit_end",
        "Events.EPOCH_STARTED": "on_epoch_start on_epoch_begin on_train_epoch_start",
        "Events.EPOCH_COMPLETED": "on_epoch_end on_train_epoch_end",
        "Events.ITERATION_STARTED": "on_batch_start on_batch_begin on_train_batch_start on_step_begin",
        "Events.ITERATION_COMPLETED": "on_batch_end on_train_batch_end on_step_end",
        "Events.EXCEPTION_RAISED": "on_exception",
        "TrainEvents.BACKWARD_COMPLETED": "on_after_backward",
        "TrainEvents.GRADIENTS_REDUCED": "on_before_optimizer_step on_pre_optimizer_step",
        "TrainEvents.STEP_COMPLETED": "on_optimizer_step",
        "Events.COMPLETED of the evaluator": "on_evaluate on_validation_end on_validation_epoch_end",
    },
    # Values of one argument.
    "precision": {
        "precision='bf16'": "bf16-mixed torch.bfloat16 mixed amp",
        "precision='bf16', since fp8 is not supported": "fp8 float8",
        "precision='fp16'": "16-mixed fp16-mixed 16 torch.float16 torch.half half",
        "precision='fp32'": "32 32-true torch.float32 torch.float float float32 full no None False",
        "precision='fp32' and model.to(torch.bfloat16), since 'fp32' computes in the dtypes of the model": "bf16-true",
        "precision='fp16' and keep the weights in float32": "16-true",
        "precision='fp32' and model.double(), since 'fp32' computes in the dtypes of the model": (
            "64 64-true double torch.float64 torch.double float64"
        ),
        "precision='bf16' or 'fp16'": "True",
    },
}
"""By place, the remedies and the words that each of them answers. `"*"` answers all others."""

_Given = TypeVar("_Given", bound=Callable[..., Any])


def answers_other_words(given: _Given, elsewhere: Mapping[str, str] | None = None) -> _Given:
    """The function, or the class, with an answer in one line to an argument that it does not have.

    Args:
        given: a function, or a class with an `__init__` of its own.
        elsewhere: arguments that belong to something else, and what to write.
    """
    if isinstance(given, type):
        given.__init__ = answers_other_words(given.__init__)  # type: ignore[misc]
        return given
    parameters = inspect.signature(given).parameters
    kinds = [one.kind for one in parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return given
    owner = given.__qualname__.removesuffix(".__init__").removesuffix(".attach")
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds
    places = sum(kind not in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD) for kind in kinds)

    @functools.wraps(given)
    def checked(*args: Any, **named: Any) -> Any:
        unknown = [name for name in named if not (takes_all or name in parameters)]
        refuse_arguments(given.__qualname__, unknown, parameters, elsewhere)
        if len(args) > places:
            names = [name for name in [*parameters][:places] if name != "self"]
            given_names = f"{len(args) - places + len(names)} values"
            remedy = _remedy(owner, "()") or "the others as name=value"
            raise TypeError(f"{owner} takes ({', '.join(names)}) without names, got {given_names}; write {remedy}")
        return given(*args, **named)

    return checked  # type: ignore[return-value]


def refuse_arguments(
    name: str, unknown: Iterable[str], known: Iterable[str], elsewhere: Mapping[str, str] | None = None
) -> None:
    """Raises a TypeError for the first of `unknown`, if there is one.

    Args:
        name: of the function.
        unknown: arguments that it does not have.
        known: those that it has.
        elsewhere: see `answers_other_words`.
    """
    for word in unknown:
        name = name.removesuffix(".__init__")
        owner = name.removesuffix(".attach")
        remedy = (elsewhere or {}).get(word) or _remedy(owner, word) or _remedy("", word)
        hint = f"; write {remedy}" if remedy else did_you_mean(word, known) or f"; help({owner}) lists them"
        raise TypeError(f"{name} has no argument {word!r}{hint}")


def refuse_attribute(owner: object, name: str, what_else: str = "") -> AttributeError:
    """The error for an attribute that an object of ours does not have, and `what_else` at its end."""
    kind = type(owner).__name__
    hint = "" if name.startswith("_") else answers(kind, name)
    return AttributeError(f"{kind!r} object has no attribute {name!r}{hint}{what_else}", name=name, obj=owner)


def answers_imports(module: str, *others: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module of ours: answers names that it does not have.

    Args:
        module: its name.
        others: the modules in which a name may be instead.
    """

    def answer(name: str) -> Any:
        remedy = None if name.startswith("_") else _remedy("import", name)
        if remedy is None and name[:1].isupper():  # names of submodules, which are looked for here first, are not
            found = (f"from {other} import {name}" for other in others if name in import_module(other).__all__)
            remedy = next(found, None)
        if remedy is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise ImportError(f"{module} has no {name!r}; write {remedy}", name=module)

    return answer


def answers(place: str, word: str) -> str:
    """`"; write Events.EPOCH_COMPLETED"` for a word of another library that is answered at this place, and `""` for others."""
    remedy = _remedy(place, word)
    return f"; write {remedy}" if remedy else ""


def made_by(remedy: str) -> Callable[[_Given], _Given]:
    """Makes the `__init__` of a class that users do not call say what they call instead.

    Args:
        remedy: the call that makes an object of the class.
    """

    def decorate(init: _Given) -> _Given:
        signature = inspect.signature(init)

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **named: Any) -> None:
            try:
                signature.bind(self, *args, **named)
            except TypeError as error:
                raise TypeError(f"{type(self).__name__} must not be called by itself ({error}); write {remedy}") from None
            init(self, *args, **named)

        return checked  # type: ignore[return-value]

    return decorate


def _remedy(place: str, word: str) -> str | None:
    rows = OTHER_WORDS.get(place, {})
    found = [remedy for remedy, words in rows.items() if word in words.split()]
    return next(iter(found or [remedy for remedy, words in rows.items() if words == "*"]), None)
