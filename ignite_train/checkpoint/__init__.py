"""Checkpoints on disk: what is in the files, how they are written, and how a run resumes from them.

What can be done with them without a run is imported from here, and is the command `python -m ignite_train.checkpoint`.
"""

from ignite_train.checkpoint.inspection import Found, consolidate, find, latest, verify

__all__ = ["Found", "consolidate", "find", "latest", "verify"]
