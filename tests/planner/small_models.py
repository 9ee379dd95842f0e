"""Small models for the planner's tests, traced without Hugging Face."""

import torch
from torch import nn

from ir.graph import Graph
from ir.trace import trace


class Layer(nn.Module):
    """Norm, two products with an activation between them, a residual."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Chain(nn.Module):
    """An embedding, `depth` equal layers, a head, cross-entropy."""

    def __init__(self, depth: int = 4, width: int = 16, hidden: int = 32, words: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, hidden) for _ in range(depth))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Product(nn.Module):
    """A product without bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Products(nn.Module):
    """`depth` products with activations, and a sum; equal modules are folded unless they are bare.

    A bare linear has no children, so it is not worth a block of its own.
    """

    def __init__(self, depth: int, width: int, *, folded: bool) -> None:
        super().__init__()
        kind = Product if folded else lambda width: nn.Linear(width, width, bias=False)
        self.products = nn.ModuleList(kind(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for product in self.products:
            x = product(x).relu()
        return x.sum()


class Whole(nn.Module):
    """A batch norm by hand: statistics over all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return (y - y.mean(0, keepdim=True)).square().sum()


def chain(
    depth: int = 4, width: int = 16, hidden: int = 32, words: int = 24, seq: int = 8,
    *, tied: bool = False,
) -> Graph:  # fmt: skip
    with torch.device("meta"):
        model = Chain(depth, width, hidden, words)
        if tied:
            model.head.weight = model.embed.weight
        ids = torch.zeros(8, seq, dtype=torch.long)
    return trace(model, (ids, ids), {}, name="chain")


def products(depth: int, width: int = 4, *, folded: bool = False) -> Graph:
    with torch.device("meta"):
        model, x = Products(depth, width, folded=folded), torch.zeros(8, width)
    return trace(model, (x,), {}, name="products")


def whole() -> Graph:
    with torch.device("meta"):
        model, x = Whole(), torch.zeros(8, 4)
    return trace(model, (x,), {}, name="whole")
