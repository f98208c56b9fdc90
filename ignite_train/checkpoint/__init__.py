"""Checkpoints on disk: what is in the files, how they are written, and how a run resumes from them.

The functions that work without a run are imported from here; the command `python -m ignite_train.checkpoint` offers them too.
"""

from ignite_train.checkpoint.inspection import Found, consolidate, find, latest, verify

__all__ = ["Found", "consolidate", "find", "latest", "verify"]
