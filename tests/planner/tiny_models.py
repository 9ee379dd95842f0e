"""Models of a few nodes or a few layers, for tests that try every plan of them."""

from collections.abc import Callable

import torch
from torch import nn

from ir.graph import Graph
from ir.trace import trace

ROWS = 8


class Nodes(nn.Module):
    """A few operations in one block, by their names; no more than `ROWS` rows at a time."""

    def __init__(self, width: int, hidden: int, ops: tuple[str, ...]) -> None:
        super().__init__()
        self.ops = ops
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "up": self.up, "down": self.down, "relu": torch.relu, "tanh": torch.tanh,
            "double": lambda y: y + y, "square": torch.square,
        }  # fmt: skip
        for op in self.ops:
            x = steps[op](x)
        return x.sum()


class Layer(nn.Module):
    """One product with an activation; with `residual` its input is added."""

    def __init__(self, width: int, residual: bool) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(width, width, bias=False), nn.ReLU()
        self.residual = residual

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.linear(x))
        return x + y if self.residual else y


class Layers(nn.Module):
    """`depth` layers of equal or of different widths in their first half, then a sum."""

    def __init__(self, depth: int, width: int, residual: bool, heavy: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, residual) for _ in range(depth))
        self.head = Layer(width, not residual) if heavy else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().sum()


def nodes(width: int, hidden: int, ops: tuple[str, ...]) -> Graph:
    """A block of at most six operations and the sum."""
    return _traced(lambda: Nodes(width, hidden, ops), width)


def layers(depth: int, width: int, *, residual: bool, heavy: bool) -> Graph:
    """A chain of at most five layers; `heavy`: the last one is of another kind."""
    return _traced(lambda: Layers(depth, width, residual, heavy), width)


def _traced(build: Callable[[], nn.Module], width: int) -> Graph:
    with torch.device("meta"):
        model, x = build(), torch.zeros(ROWS, width)
    return trace(model, (x,), {}, name="tiny")
