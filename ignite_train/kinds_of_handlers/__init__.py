"""The classes that handlers derive from; see docs/writing-handlers.md."""

from ignite_train.kinds_of_handlers.averaging_handler import AveragingHandler
from ignite_train.kinds_of_handlers.handler import Handler, PiggybackHandler
from ignite_train.kinds_of_handlers.recording_handler import EVERY_50, RecordingHandler
from ignite_train.kinds_of_handlers.score_handler import ScoreHandler

__all__ = ["EVERY_50", "AveragingHandler", "Handler", "PiggybackHandler", "RecordingHandler", "ScoreHandler"]
