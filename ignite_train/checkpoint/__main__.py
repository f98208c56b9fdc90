"""The command `python -m ignite_train.checkpoint`."""

import sys

from ignite_train.tools.checkpoint_command import checkpoint_command

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(checkpoint_command())
