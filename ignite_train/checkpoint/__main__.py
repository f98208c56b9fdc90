"""The command `python -m ignite_train.checkpoint`."""

import sys

from ignite_train.checkpoint.inspection import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
