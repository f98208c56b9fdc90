"""An exact, event-driven training loop on PyTorch-Ignite."""

from typing import TYPE_CHECKING

from ignite_train.create import create_trainer
from ignite_train.data.grouping import AccumulationSteps
from ignite_train.data.resumable_loader import ResumableLoader
from ignite_train.data.samplers import ShardedSampler
from ignite_train.data.token_budget_sampler import TokenBudgetSampler
from ignite_train.defaults import Defaults, attach_defaults
from ignite_train.errors import (
    CheckpointError,
    CheckpointFormatError,
    DamagedCheckpointError,
    FellBehindError,
    ForwardContractError,
    GaveUpError,
    GradientAccessError,
    LearningRateError,
    LockTakenOverError,
    LossScaleFloorError,
    MembersChangedError,
    NoGradientError,
    NonFiniteError,
    NoQuorumError,
    SparseGradientError,
    TrainingError,
    UnlikeMicroBatchesError,
    UnlikeParametersError,
    UnreadableCheckpointError,
)
from ignite_train.evaluation.evaluator import Evaluator, create_evaluator
from ignite_train.events import TrainEvents, only
from ignite_train.forward import Forward, ForwardOutput, Mean
from ignite_train.model.check_forward import Cut, ForwardCheck, check_forward
from ignite_train.model.deterministic import deterministic
from ignite_train.model.loss_declaration import LossDeclarationWarning
from ignite_train.model.model_summary import ModelSummary, model_summary
from ignite_train.model.parameter_groups import parameter_groups
from ignite_train.model.precision import PrecisionName
from ignite_train.model.warm_up_schedule import WarmUpSchedule
from ignite_train.other_words import answers_imports
from ignite_train.ranks.messages import Piggyback
from ignite_train.state import TrainState, UpdateOutput
from ignite_train.supervised import create_supervised_trainer
from ignite_train.tools.tune import tune
from ignite_train.tools.tuned import Tuned
from ignite_train.traffic import Counted, Traffic, count_traffic
from ignite_train.trainer import Trainer
from ignite_train.update.attach_metric import attach_metric
from ignite_train.update.kept_outputs import KeptOutputs, keep_outputs
from ignite_train.update.loss_scaling import (
    DeepSpeedLossScaling,
    FairseqLossScaling,
    LossScaling,
    NoLossScaling,
    StaticLossScaling,
    TorchLossScaling,
)
from ignite_train.update.options import UpdateOptions

__version__ = "0.1.0"

__all__ = [
    "AccumulationSteps",
    "CheckpointError",
    "CheckpointFormatError",
    "Counted",
    "Cut",
    "DamagedCheckpointError",
    "DeepSpeedLossScaling",
    "Defaults",
    "Evaluator",
    "FairseqLossScaling",
    "FellBehindError",
    "Forward",
    "ForwardCheck",
    "ForwardContractError",
    "ForwardOutput",
    "GaveUpError",
    "GradientAccessError",
    "KeptOutputs",
    "LearningRateError",
    "LockTakenOverError",
    "LossDeclarationWarning",
    "LossScaleFloorError",
    "LossScaling",
    "Mean",
    "MembersChangedError",
    "ModelSummary",
    "NoGradientError",
    "NoLossScaling",
    "NoQuorumError",
    "NonFiniteError",
    "Piggyback",
    "PrecisionName",
    "ResumableLoader",
    "ShardedSampler",
    "SparseGradientError",
    "StaticLossScaling",
    "TokenBudgetSampler",
    "TorchLossScaling",
    "Traffic",
    "TrainEvents",
    "TrainState",
    "Trainer",
    "TrainingError",
    "Tuned",
    "UnlikeMicroBatchesError",
    "UnlikeParametersError",
    "UnreadableCheckpointError",
    "UpdateOptions",
    "UpdateOutput",
    "WarmUpSchedule",
    "attach_defaults",
    "attach_metric",
    "check_forward",
    "count_traffic",
    "create_evaluator",
    "create_supervised_trainer",
    "create_trainer",
    "deterministic",
    "keep_outputs",
    "model_summary",
    "only",
    "parameter_groups",
    "tune",
]

if not TYPE_CHECKING:  # or else each name would be known
    __getattr__ = answers_imports(__name__, "ignite_train.handlers")
