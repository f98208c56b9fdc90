"""How many processes a script trains in, and starting them: the scripts with `--nproc` use it, under torchrun too."""

import logging
import os
import socket
from collections.abc import Callable
from typing import Any

import ignite.distributed as idist
import torch


def number_of_processes(nproc: int) -> int:
    """As many as torchrun or another launcher has started, or else `nproc`, which the script is to start."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else nproc


def launch(train: Callable[..., None], processes: int, *arguments: Any) -> None:
    """Calls `train(local_rank, *arguments)` in each of `processes` processes; starts those that no launcher has started."""
    started = "RANK" in os.environ
    backend = ("nccl" if torch.cuda.is_available() else "gloo") if started or processes > 1 else None
    spawn: dict[str, Any] = {} if started or processes == 1 else {"nproc_per_node": processes, "master_port": free_port()}
    logging.getLogger("ignite.distributed.launcher.Parallel").disabled = True  # it would print how the processes are started
    with idist.Parallel(backend=backend, **spawn) as parallel:
        parallel.run(train, *arguments)


def free_port() -> int:
    """A free port, so that two runs on one machine do not connect to each other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
