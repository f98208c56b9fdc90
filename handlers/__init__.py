"""Ready-made handlers, imported as `ignite_train.handlers`. Each is one file; none imports another.

The example of a handler uses public names of `ignite_train`, an empty `directory`, and these; so it begins::

    import csv, json, signal

    import torch
    from ignite.engine import Events

    def forward(model, x):
        return model(x).square().mean()

    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_trainer(model, optimizer, forward)
    evaluator = create_evaluator(model, forward)
    data = [torch.ones(8, 3)] * 4
"""

from typing import TYPE_CHECKING

from ignite_train.handlers.checkpoint import BestCheckpoint, Checkpoint
from ignite_train.handlers.curvature_monitor import CurvatureMonitor
from ignite_train.handlers.early_stopping import EarlyStopping
from ignite_train.handlers.empty_cache import EmptyCache
from ignite_train.handlers.failure_board import FailureBoard, PeerFailureError
from ignite_train.handlers.freeze import Freeze
from ignite_train.handlers.garbage_collection import GarbageCollection
from ignite_train.handlers.grad_norm_consistency import GradNormConsistency, GradNormMismatchError
from ignite_train.handlers.gradient_monitor import GradientMonitor, Histogram
from ignite_train.handlers.hang_watch import HangWatch
from ignite_train.handlers.learning_rate import LearningRateSchedule
from ignite_train.handlers.learning_rate_finder import LearningRateFinder
from ignite_train.handlers.log_file import Csv, JsonLines, LogFile
from ignite_train.handlers.loss_scale import LossScaleLogger
from ignite_train.handlers.min_learning_rate import MinLearningRate
from ignite_train.handlers.model_ema import ModelEMA
from ignite_train.handlers.model_sync import ModelSync
from ignite_train.handlers.momentum_teacher import MomentumTeacher
from ignite_train.handlers.optimizer_modes import OptimizerModes
from ignite_train.handlers.outer_optimizer import OuterOptimizer
from ignite_train.handlers.predict import predict
from ignite_train.handlers.profiler import Profiler
from ignite_train.handlers.progress import ProgressLog
from ignite_train.handlers.reduce_on_plateau import ReduceOnPlateau
from ignite_train.handlers.several_gradients import SeveralGradients
from ignite_train.handlers.state_consistency import StateConsistency, StateMismatchError
from ignite_train.handlers.step_timer import SectionTimes, StepTimer
from ignite_train.handlers.stochastic_weight_averaging import StochasticWeightAveraging
from ignite_train.handlers.stop_on_signal import StopOnSignal
from ignite_train.handlers.tensorboard import TensorBoard
from ignite_train.handlers.time_limit import TimeLimit
from ignite_train.handlers.training_metrics import TrainingMetrics
from ignite_train.handlers.validation import Validation
from ignite_train.other_words import answers_imports

__all__ = [
    "BestCheckpoint",
    "Checkpoint",
    "Csv",
    "CurvatureMonitor",
    "EarlyStopping",
    "EmptyCache",
    "FailureBoard",
    "Freeze",
    "GarbageCollection",
    "GradNormConsistency",
    "GradNormMismatchError",
    "GradientMonitor",
    "HangWatch",
    "Histogram",
    "JsonLines",
    "LearningRateFinder",
    "LearningRateSchedule",
    "LogFile",
    "LossScaleLogger",
    "MinLearningRate",
    "ModelEMA",
    "ModelSync",
    "MomentumTeacher",
    "OptimizerModes",
    "OuterOptimizer",
    "PeerFailureError",
    "Profiler",
    "ProgressLog",
    "ReduceOnPlateau",
    "SectionTimes",
    "SeveralGradients",
    "StateConsistency",
    "StateMismatchError",
    "StepTimer",
    "StochasticWeightAveraging",
    "StopOnSignal",
    "TensorBoard",
    "TimeLimit",
    "TrainingMetrics",
    "Validation",
    "predict",
]

if not TYPE_CHECKING:  # or else each name would be known
    __getattr__ = answers_imports(__name__, "ignite_train")
