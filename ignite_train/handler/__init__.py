"""What handlers derive from; see docs/writing-handlers.md."""

from ignite_train.handler.averaging_handler import AveragingHandler
from ignite_train.handler.handler import Handler, PiggybackHandler
from ignite_train.handler.recording_handler import EVERY_50, RecordingHandler
from ignite_train.handler.score_handler import ScoreHandler

__all__ = ["EVERY_50", "AveragingHandler", "Handler", "PiggybackHandler", "RecordingHandler", "ScoreHandler"]
