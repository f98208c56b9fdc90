"""Checkpoints on disk: what is in the files, how they are written, and how a run resumes from them.

The functions that work without a run are imported from here; the command `python -m ignite_train.checkpoint` offers them too.

Example:
    >>> import tempfile
    >>> import torch
    >>> from ignite_train import checkpoint, create_trainer
    >>> from ignite_train.handlers import Checkpoint
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> trainer = create_trainer(model, optimizer, lambda model, x: model(x).square().mean())
    >>> directory = tempfile.mkdtemp()
    >>> Checkpoint(directory).attach(trainer)
    >>> state = trainer.run([torch.ones(2, 4)] * 3, max_epochs=1)
    >>> newest = checkpoint.latest(directory)
    >>> checkpoint.verify(newest)  # raises if it is damaged
    >>> written = checkpoint.consolidate(newest, f"{directory}/model.pt")
    >>> sorted(torch.load(f"{directory}/model.pt"))
    ['bias', 'weight']
    >>> checkpoint.load_weights(model, directory)  # for inference, or to begin another run with
    []
"""

from typing import TYPE_CHECKING

from ignite_train.checkpoint.read_checkpoint import CheckpointInfo, Found, GroupInfo, best, find, read_checkpoint
from ignite_train.other_words import answers_imports
from ignite_train.tools.average_checkpoints import average_checkpoints
from ignite_train.tools.consolidate import consolidate
from ignite_train.tools.inspection import latest, verify
from ignite_train.tools.load_weights import load_weights

__all__ = [
    "CheckpointInfo",
    "Found",
    "GroupInfo",
    "average_checkpoints",
    "best",
    "consolidate",
    "find",
    "latest",
    "load_weights",
    "read_checkpoint",
    "verify",
]

if not TYPE_CHECKING:  # or else each name would be known
    __getattr__ = answers_imports(__name__, "ignite_train.handlers", "ignite_train")
