"""Which parameters have weight decay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ignite_train import parameter_groups
from mistakes import Mistake, assert_one_line


class Net(nn.Module):
    """Has a norm over two dimensions, a tied weight, a bias with three dimensions and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
        self.norm = nn.LayerNorm((2, 4))
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight


def split(model: nn.Module, **options: Any) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(value)] for value in group["params"]] for group in parameter_groups(model, weight_decay=0.1, **options)]


def test_biases_and_norms_have_no_decay() -> None:
    """Each trainable parameter is in one group; frozen ones are in none; those that are named have no decay."""
    with_decay, without = split(Net())
    assert with_decay == ["embedding.weight", "attention.in_proj_weight", "attention.out_proj.weight"]
    attention = {f"attention.{name}" for name in ("in_proj_bias", "bias_k", "bias_v", "out_proj.bias")}
    assert sorted(without) == sorted({"scale", "norm.weight", "norm.bias", "head.bias"} | attention)
    assert "embedding.weight" in split(Net(), no_decay=("head.weight",))[1]
    assert split(nn.Linear(2, 2, bias=False)) == [["weight"]]
    assert split(nn.BatchNorm1d(3)) == [["weight", "bias"]]


def test_a_module_that_is_there_twice_has_two_names() -> None:
    """Either of them takes the weight out of the decay."""
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    assert split(model) == [["0.weight"], ["0.bias"]]
    for name in ("0.weight", "2.weight"):
        assert split(model, no_decay=(name,)) == [["0.weight", "0.bias"]]


def test_a_layer_may_be_called_bias() -> None:
    """It is the name of the parameter that counts, and not that of the layer around it."""
    assert split(nn.ModuleDict({"bias": nn.Linear(2, 2)})) == [["bias.weight"], ["bias.bias"]]


def test_the_decay_is_that_of_the_group() -> None:
    """With a gradient of 0, AdamW changes only what has weight decay, by lr times it."""
    model = nn.Linear(2, 2)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.5), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(model.bias, before["bias"])
    torch.testing.assert_close(model.weight.detach(), before["weight"] * 0.95)


MISTAKES: dict[str, Mistake] = {
    "model": (TypeError, "model must be a torch.nn.Module", lambda: parameter_groups([], weight_decay=0.1)),  # type: ignore[arg-type]
    "negative": (ValueError, "weight_decay must be at least 0", lambda: parameter_groups(Net(), weight_decay=-1.0)),
    "string": (TypeError, "no_decay must be a sequence", lambda: split(Net(), no_decay="scale")),
    "misspelt": (ValueError, "did you mean 'norm.weight'", lambda: split(Net(), no_decay=("norm.wieght",))),
    "frozen": (ValueError, "must have trainable parameters", lambda: split(nn.Linear(1, 1).requires_grad_(False))),
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes(name: str) -> None:
    """Each is answered in one line."""
    assert_one_line(MISTAKES[name])
