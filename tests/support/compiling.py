"""What tests of compiling share: graphs of their own, a warning that torch gives while it traces, a backend that counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend

__all__ = ["ALONE", "CountingBackend", "lets_torch_read_grad"]

lets_torch_read_grad = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

ALONE = [pytest.mark.usefixtures("fresh_graphs"), lets_torch_read_grad]
"""The marks of a module whose tests compile."""


class CountingBackend:
    """Has another backend compile, and counts the graphs.

    Args:
        name: of the other one.

    Attributes:
        graphs: how many it was given.
    """

    def __init__(self, name: str = "eager") -> None:
        self.graphs, self._compile = 0, lookup_backend(name)

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor], **options: Any) -> Any:
        """Compiles one."""
        self.graphs += 1
        return self._compile(graph, inputs, **options)
