"""Tiny models with plans made by hand: what the planner prefers does not change these texts."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional

from ir.batch import factors_of
from ir.graph import Graph, Node, references
from ir.layout import REPLICATE, Placement, Shard
from ir.lower import Degrees, Sharding
from ir.plan import Plan
from ir.reshard import possible, step
from ir.spmd import lower_all
from ir.strategies import Strategy, strategies
from ir.trace import trace
from ir.variants import Variant
from planner.ports import divides
from tests.hand_plan import even_stages, hand_plan, keep_all, kinds_of, whole_shardings


class Layer(nn.Module):
    """Attention with a fused projection, then a feed-forward, both with a residual."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 2)).movedim(-2, 1).unbind(-2)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(x)))


class Transformer(nn.Module):
    """Two equal layers between an embedding and a head that share their table."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, labels):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Skip(nn.Module):
    """Convolutions with a long skip and a buffer that follows the mean of the activations."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv1d(4, 6, 3, padding=1), nn.Conv1d(6, 6, 3, padding=1)
        self.last = nn.Conv1d(12, 4, 1)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        early = torch.relu(self.first(x))
        late = torch.relu(self.second(early))
        self.seen.mul_(0.9).add_(late.detach().mean((0, 2)), alpha=0.1)
        return (self.last(torch.cat([early, late], 1)) - x).square().mean()


class Adapted(nn.Module):
    """Frozen products with trained factors, between ends that share their table."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        self.layers = nn.ModuleList(Factors() for _ in range(4))
        self.head.weight = self.embed.weight

    def forward(self, ids, labels):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 6, bias=False).requires_grad_(False)
        self.low, self.high = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x):
        return x + self.base(x) + self.high(self.low(x))


def transformer() -> tuple[Graph, Plan]:
    """Columns, then rows, over two tensor ranks; two data ranks; the layers recompute."""
    torch.manual_seed(0)
    ids = torch.zeros(4, 5, dtype=torch.long)
    graph = trace(Transformer(), (ids, ids))
    degrees = Degrees(4, 2, 2, 1)
    batch_flow, kinds = kinds_of(graph)
    weights = {"qkv.weight": (0, 3), "qkv.bias": (0, 3), "out.weight": (1, 1),
               "up.weight": (0, 1), "down.weight": (1, 1), "embed.weight": (0, 1)}  # fmt: skip
    shardings = [_greedy(graph, kind, weights, degrees.tensor) for kind in kinds]
    lowered = lower_all(graph, batch_flow, kinds, tuple(shardings), degrees)
    keeps = keep_all(graph, kinds, lowered)
    keeps = [
        {"none": frozenset()} if len(kind.calls) > 1 else keep
        for kind, keep in zip(kinds, keeps, strict=True)
    ]
    return graph, hand_plan(graph, degrees, kinds, shardings, keeps, even_stages(graph, 1))


def skip(pipeline: int = 3, schedule: str = "gpipe") -> tuple[Graph, Plan]:
    """Three stages, two micro-batches, nothing cut on the tensor axis."""
    torch.manual_seed(0)
    graph = trace(Skip(), (torch.zeros(4, 4, 7),))
    degrees = Degrees(4, 1, 1, 2)
    batch_flow, kinds = kinds_of(graph)
    shardings = whole_shardings(kinds)
    lowered = lower_all(graph, batch_flow, kinds, shardings, degrees)
    keeps, stages = keep_all(graph, kinds, lowered), even_stages(graph, pipeline)
    return graph, hand_plan(graph, degrees, kinds, shardings, keeps, stages, schedule=schedule)


def halves() -> tuple[Graph, Plan]:
    """Two stages whose backward is in two halves."""
    return skip(2, "zero-bubble")


def zero3(zero: int = 3) -> tuple[Graph, Plan]:
    """Two stages and two data ranks, which divide every parameter; two micro-batches."""
    torch.manual_seed(0)
    ids = torch.zeros(8, 3, dtype=torch.long)
    graph = trace(Adapted(), (ids, ids))
    degrees = Degrees(8, 2, 1, 2)
    batch_flow, kinds = kinds_of(graph)
    shardings = whole_shardings(kinds)
    lowered = lower_all(graph, batch_flow, kinds, shardings, degrees)
    keeps, stages = keep_all(graph, kinds, lowered), even_stages(graph, 2)
    return graph, hand_plan(graph, degrees, kinds, shardings, keeps, stages, zero=zero)


PLANS = {"transformer": transformer, "skip": skip, "halves": halves, "zero3": zero3}


def _greedy(
    graph: Graph, kind: Variant, weights: dict[str, tuple[int, int]], degree: int
) -> Sharding:
    """Follows the given cuts of weights: each node moves as little as it can, then divides."""
    block, factors = kind.block, factors_of(kind.block)
    have: dict[str, Placement] = dict.fromkeys(block.inputs, REPLICATE)
    have |= {tangent: REPLICATE for _, tangent in block.tangents}
    values = dict(zip(block.inputs, graph.calls[kind.calls[0]].arguments, strict=True))
    state = {item.name: item.names for item in graph.state}
    for name in block.inputs:
        for end, (dim, outer) in weights.items():
            if any(full.endswith(end) for full in state.get(values[name], ())):
                have[name] = Shard(dim, outer)
    given = dict(have)
    leaves = [leaf for leaf in factors.size if divides(factors, leaf, degree)]
    chosen: dict[Node, Strategy] = {}
    for node in block.nodes:
        names = [ref.name for ref in references((node.args, node.kwargs))]
        best = min(strategies(node, factors, leaves), key=lambda s, n=names: _moves(s, n, have))
        chosen[node] = best
        results = [name for name in node.outputs if name in block.types]
        have |= dict(zip(results, best.results, strict=True))
    return Sharding(
        chosen, tuple(given[name] for name in block.inputs), (REPLICATE,) * len(block.outputs),
        (REPLICATE,) * len(block.tangents),
        tuple(given[value] for value, _ in block.gradients),
    )  # fmt: skip


def _moves(
    option: Strategy, names: Iterable[str], have: dict[str, Placement]
) -> tuple[float, int, int]:
    """(operands that move between ranks, whether nothing is divided, operands that change)."""
    pairs = [(have[name], want) for name, want in zip(names, option.operands, strict=True)]
    if not all(possible(a, b) for a, b in pairs):
        return float("inf"), 0, 0
    steps = [step(a, b) for a, b in pairs]
    moved = sum(kind not in (None, "shard", "first") for kind in steps)
    return moved, not option.divides, sum(kind is not None for kind in steps)
