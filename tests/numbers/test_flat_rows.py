"""Rows that a dim holds together with others stay cut, also where no view in a block says so."""

import pytest
import torch
from torch import Tensor, nn

from checking import check
from ir.batch import flow, needs_whole_batch
from ir.trace import trace
from runtime.models import Loaded

ROWS, SEQ, SIZE, HEADS = 12, 5, 8, 2
PINS = (
    (2, {"pipeline": 2, "schedule": "interleaved", "virtual_stages": 2, "micro_batches": 2}),
    (3, {"data": 3, "micro_batches": 2}),
    (3, {"tensor": 3, "micro_batches": 3}),
)
ORDERS = {
    "rows first": lambda x: x.flatten(0, 1),
    "rows last": lambda x: x.transpose(0, 1).flatten(0, 1),
    "rows between": lambda x: x.unflatten(2, (2, 4)).permute(2, 0, 1, 3).flatten(0, 2),
}


class Flat(nn.Module):
    """Its layers see one dim of rows and positions."""

    def __init__(self, order):
        super().__init__()
        self.order, width = order, order(torch.zeros(1, SEQ, SIZE)).shape[-1]
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.order(x)
        for layer in self.layers:
            h = h + torch.relu(layer(h))
        return h.square().mean()


class Attention(nn.Module):
    """With torch's own attention, which holds rows and heads in one dim to return its weights."""

    def __init__(self, uses_weights: bool, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(SIZE, HEADS, **options)
        self.is_first, self.uses_weights = self.attention.batch_first, uses_weights
        self.out = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.is_first else x.transpose(0, 1)
        y, weights = self.attention(h, h, h)
        loss = self.out(y).square().mean()
        return loss + (weights.square().mean() if self.uses_weights else 0)


MODELS = {name: lambda order=order: Flat(order) for name, order in ORDERS.items()} | {
    "attention, its weights unused": lambda: Attention(False, batch_first=True),
    "attention, its weights used": lambda: Attention(True),
}


@pytest.mark.parametrize("name", MODELS)
def test_any_plan_equals_one_device(name):
    torch.manual_seed(0)
    model, batch = MODELS[name](), (torch.randn(ROWS, SEQ, SIZE),)
    graph = trace(model, batch)
    assert graph.inputs[0].batch_dim == 0 and needs_whole_batch(graph, flow(graph)) is None
    for devices, pin in PINS:
        (found,) = check(Loaded(model, batch, {}, None, name), devices, pin=pin, steps=1)
        assert found["status"] == "ok", (pin, found)
