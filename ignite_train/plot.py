"""Draws the metrics of runs: `python -m ignite_train.plot RUN_DIR [RUN_DIR ...]`."""

import sys

from ignite_train.tools.plot import main, plot_runs, read_curves

__all__ = ["main", "plot_runs", "read_curves"]

if __name__ == "__main__":
    sys.exit(main())
