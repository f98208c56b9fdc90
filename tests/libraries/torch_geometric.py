"""torch_geometric: graphs in batches of its own class, which carries its own `to`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATConv, GCNConv, HeteroConv, SAGEConv, global_mean_pool

from ignite_train import ForwardOutput
from libraries.harness import HALVED, Case, dealt

CLASSES = 3


class Classifier(nn.Module):
    """Classifies whole graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = GCNConv(5, 8), GATConv(8, 8), nn.Linear(8, CLASSES)

    def forward(self, batch: Any) -> torch.Tensor:
        x = self.first(batch.x, batch.edge_index).relu()
        return self.last(global_mean_pool(self.second(x, batch.edge_index).relu(), batch.batch))


class Mixed(nn.Module):
    """Classifies the papers of a graph of papers and authors."""

    def __init__(self) -> None:
        super().__init__()
        edges = [("author", "writes", "paper"), ("paper", "cites", "paper")]
        self.convolution = HeteroConv({edge: SAGEConv((5, 5), 8) for edge in edges})
        self.last = nn.Linear(8, CLASSES)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.last(self.convolution(batch.x_dict, batch.edge_index_dict)["paper"].relu())


def graphs() -> list[Any]:
    generator, found = torch.Generator().manual_seed(0), []
    for nodes in range(4, 27):
        edges = torch.randint(nodes, (2, 3 * nodes), generator=generator)
        x = torch.randn(nodes, 5, generator=generator)
        found.append(Data(x=x, edge_index=edges, y=torch.randint(CLASSES, (1,), generator=generator)))
    return found


def mixed_graphs() -> list[Any]:
    generator, found = torch.Generator().manual_seed(0), []
    for papers in range(4, 27):
        graph = HeteroData()
        graph["paper"].x, graph["author"].x = (
            torch.randn(papers, 5, generator=generator),
            torch.randn(3, 5, generator=generator),
        )
        graph["paper"].y = torch.randint(CLASSES, (papers,), generator=generator)
        graph["paper", "cites", "paper"].edge_index = torch.randint(papers, (2, 2 * papers), generator=generator)
        writes = [torch.randint(3, (papers,), generator=generator), torch.arange(papers)]
        graph["author", "writes", "paper"].edge_index = torch.stack(writes)
        found.append(graph)
    return found


def forward(model: nn.Module, batch: Any) -> ForwardOutput:
    return ForwardOutput(cross_entropy(model(batch), batch.y, reduction="sum"), len(batch.y))


def papers(model: nn.Module, batch: Any) -> ForwardOutput:
    y = batch["paper"].y
    return ForwardOutput(cross_entropy(model(batch), y, reduction="sum"), len(y))


CASES = [
    Case("graphs in batches, GCN and GAT", Classifier, dealt(lambda: list(DataLoader(graphs(), 3))), forward),
    Case(
        "graphs in batches, halved where memory runs out",
        Classifier,
        dealt(lambda: list(DataLoader(graphs(), 3))),
        forward,
        options=HALVED,
        has_room=lambda batch: batch.num_graphs < 3,
    ),
    Case(
        "its DataLoader, shuffled",
        Classifier,
        lambda rank, world_size: DataLoader(graphs(), 3, shuffle=True),
        forward,
        not_tried={"ranks": "the ranks draw other orders than one process does"},
    ),
    Case("heterogeneous graphs", Mixed, dealt(lambda: list(DataLoader(mixed_graphs(), 3))), papers),
]
