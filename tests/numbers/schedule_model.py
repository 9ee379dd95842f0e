"""A small model with what makes pipelines hard, and hand-made plans for any schedule.

Tied weights, a skip over all layers, a buffer that changes, a frozen and an unused parameter,
dropout if asked for. Eight calls, so that four stages with two calls each, or eight, are possible.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ir.graph import Graph
from ir.lower import Degrees
from ir.plan import Placed, Plan
from ir.promote import promote
from ir.spmd import lower_all
from ir.trace import trace
from tests.hand_plan import even_stages, hand_plan, keep_all, kinds_of, whole_shardings

ROWS, WIDTH, VOCAB, LAYERS = 8, 6, 10, 6
TIED_ROWS = 12


class Layer(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down, self.drop = nn.Linear(2 * WIDTH, WIDTH, bias=False), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(LAYERS))
        self.layers[2].up.weight.requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        first = x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        self.seen.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        logits = self.head(x + first)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(dropout: float = 0.0) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    ids, labels = torch.randint(0, VOCAB, (2, ROWS, 5))
    return Net(dropout), (ids, labels)


def build_tied() -> tuple[Net, tuple[Any, ...]]:
    """With state that stages 0 and 1, 1 and 2, 0 and 2 of three share, and the other does not."""
    torch.manual_seed(0)
    ids, labels = torch.randint(0, VOCAB, (2, TIED_ROWS, 5))
    model = Net()
    norms = [layer.norm for layer in model.layers]
    norms[3].weight, norms[5].bias = norms[0].weight, norms[3].bias
    return model, (ids, labels)


def traced(dropout: float = 0.0) -> Graph:
    return promote(trace(*build(dropout)))


def plan_of(
    graph: Graph, schedule: str, *, ranks: int, micro: int, rows: int, virtual: int = 1,
    data: int = 1, recompute: bool = False, cuts: tuple[int, ...] = (),
) -> Plan:  # fmt: skip
    """Nothing is cut on the tensor axis; `cuts` in place of even stages."""
    degrees = Degrees(rows, data, 1, micro)
    batch_flow, kinds = kinds_of(graph)
    shardings = whole_shardings(kinds)
    lowered = lower_all(graph, batch_flow, kinds, shardings, degrees)
    keeps = keep_all(graph, kinds, lowered)
    if recompute:
        keeps = [{"none": frozenset()} for _ in keeps]
    ends = [0, *cuts, len(graph.calls)]
    stages = [(Placed(a, b - a, "none"),) for a, b in zip(ends, ends[1:], strict=False)]
    return hand_plan(
        graph, degrees, kinds, shardings, keeps,
        stages if cuts else even_stages(graph, ranks * virtual),
        schedule=schedule, virtual_stages=virtual,
    )  # fmt: skip
