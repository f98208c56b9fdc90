"""A calculator for a long run: `python -m ignite_train.plan --updates 100000 --compute 8 ...`."""

import sys

from ignite_train.tools.plan import Plan, Run, expected_seconds, main, plan, save_interval

__all__ = ["Plan", "Run", "expected_seconds", "main", "plan", "save_interval"]

if __name__ == "__main__":
    sys.exit(main())
