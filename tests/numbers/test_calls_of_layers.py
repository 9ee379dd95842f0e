"""How repeated layers are called: with one value twice, with sizes, with what depends on whether a
compiler runs the model."""

import pytest
import torch
from torch import nn

from checking import check
from ir.trace import trace
from runtime.models import Loaded

ROWS, WIDTH = 12, 15


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, query, key, number=1.0, mask=None):
        mixed = self.query(query).tanh() * self.key(key) / number
        return query + (mixed if mask is None else mixed * mask["of"])


class Net(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.layers, self.call = nn.ModuleList(Layer() for _ in range(4)), call

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = self.call(layer, x, index)
        return x.square().mean()


def is_compiling():
    return torch.compiler.is_compiling() or torch.compiler.is_exporting()


CALLS = {
    "one value twice": lambda layer, x, i: layer(x, x),
    "one value twice, by name": lambda layer, x, i: layer(key=x, query=x),
    "one value three times": lambda layer, x, i: layer(x, x, mask={"of": x}),
    "one value twice in some layers": lambda layer, x, i: layer(x, x if i % 2 else x.tanh()),
    "a value and a view of it": lambda layer, x, i: layer(x, x.view_as(x)),
    "a value and all of its columns": lambda layer, x, i: layer(x, x[:, :WIDTH]),
    "the rows": lambda layer, x, i: layer(x, x.cos(), x.shape[0]),
    "half of the rows": lambda layer, x, i: layer(x, x.cos(), x.shape[0] // 2),
    "the length": lambda layer, x, i: layer(x, x.cos(), len(x)),
    "another number under a compiler":
        lambda layer, x, i: layer(x, x.cos(), 2.0 if is_compiling() else 3.0),
    "one more tensor under a compiler":
        lambda layer, x, i: layer(x, x.cos(), 3.0, {"of": x} if is_compiling() else None),
    "one layer less under a compiler":
        lambda layer, x, i: x if i == 1 and is_compiling() else layer(x, x.cos()),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_layers_that_are_called_so_train_as_on_one_device(name):
    torch.manual_seed(0)
    loaded = Loaded(Net(CALLS[name]), (torch.randn(ROWS, WIDTH),), {}, None, "calls")
    for pin in ({"data": 2}, {"tensor": 2}, {"pipeline": 2}):
        (found,) = check(loaded, 2, pin=pin | {"micro_batches": 1}, steps=2)
        assert found["status"] == "ok", found


def test_one_value_twice_keeps_layers_folded():
    graph = trace(Net(CALLS["one value twice"]), (torch.randn(ROWS, WIDTH),))
    blocks = [call.block for call in graph.calls if call.path.startswith("layers.")]
    assert len(blocks) == 4 and len(set(blocks[1:])) == 1
