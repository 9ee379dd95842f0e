"""Dims as long as the batch, where places are counted: classes, rows of a table, pairs of rows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from checking import check
from runtime.models import Loaded

ROWS, WIDTH = 12, 6
LOSSES = {
    "each row is a class": lambda a, b: F.cross_entropy(a @ b.T, torch.arange(a.shape[0])),
    "each row is a class, by len": lambda a, b: F.cross_entropy(a @ b.T, torch.arange(len(a))),
    "both ways": lambda a, b: (
        F.cross_entropy(a @ b.T, torch.arange(a.shape[0]))
        + F.cross_entropy(b @ a.T, torch.arange(a.shape[0]))
    ),
    "given classes": lambda a, b: F.cross_entropy(
        a @ b.T, (a.detach().sum(1).argsort() % a.shape[0]), label_smoothing=0.1
    ),
    "a table of rows": lambda a, b: F.embedding(
        a.detach().sum(1).argsort(), b * torch.arange(1.0, 1 + b.shape[0], dtype=b.dtype)[:, None]
    ).mul(a).mean(),
    "a mean over all pairs": lambda a, b: (a @ b.T - torch.eye(a.shape[0])).square().mean(),
    "half of all pairs": lambda a, b: (
        (a @ b.T).triu(1).sum() * 2 / (a.shape[0] * (a.shape[0] - 1) // 2)),
    "distances of all pairs": lambda a, b: torch.cdist(a, b).mean(),
    "rows times rows as a number": lambda a, b: (a * b).sum() / a.shape[0] ** 2 * (b.shape[0] + 1),
}  # fmt: skip


class Pairs(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.first, self.second, self.loss = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8), loss

    def forward(self, x, z):
        return self.loss(self.first(x), self.second(z))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("pin", [{"data": 2}, {"data": 3}, {"data": 2, "tensor": 2}, {"tensor": 2}])
def test_a_dim_whose_places_count_is_not_cut_with_the_batch(name, pin):
    torch.manual_seed(0)
    batch = (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))
    loaded = Loaded(Pairs(LOSSES[name]), batch, {}, None, "pairs")
    ranks = pin.get("data", 1) * pin.get("tensor", 1)
    (found,) = check(loaded, ranks, pin=pin | {"micro_batches": 1})
    assert found["status"] == "ok", found


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, other, gate):
        return x + gate * (self.linear(x) + other).tanh()


class TwoInputs(nn.Module):
    """Between two stacks of layers it uses the rows of one input beside the other one: that they
    are as many is seen by nothing but its layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.ModuleList(Layer() for _ in range(3)) for _ in range(2))

    def forward(self, x, z):
        rows, gate = x.shape[0], torch.ones(1)
        for layer in self.first:
            x = layer(x, gate, gate)
        z, gate = z.tanh(), torch.arange(1.0, 1 + WIDTH)[None].expand(rows, WIDTH)
        for layer in self.second:
            z = layer(z, x, gate)
        return z.square().mean()


@pytest.mark.parametrize("pin", [{"data": 2}, {"tensor": 2}, {"pipeline": 2, "micro_batches": 3}])
def test_rows_of_one_input_are_those_of_another(pin):
    torch.manual_seed(0)
    batch = (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))
    (found,) = check(Loaded(TwoInputs(), batch, {}, None, "two"), 2, pin=pin)
    assert found["status"] == "ok", found
