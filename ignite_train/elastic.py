"""Starts replicas that come and go, on one machine: `python -m ignite_train.elastic --replicas N script.py ...`."""

import sys

from ignite_train.tools.elastic import ElasticLauncher, main

__all__ = ["ElasticLauncher", "main"]

if __name__ == "__main__":
    sys.exit(main())
