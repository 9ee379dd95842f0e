"""Dims are products of factors, and a sharding cuts one factor."""

import torch
from torch import nn

from ir.batch import factors_of
from ir.factors import Factors, infer, quotient
from ir.graph import BATCH, Block, Node, Ref, TensorType
from ir.layout import Shard
from ir.strategies import strategies
from ir.trace import trace


def viewed(source: tuple, target: tuple) -> tuple[Factors, Node]:
    """The factors of `y = x.view(target)`."""
    node = Node("view", (Ref("x"),), (), ("y",))
    types = {"x": TensorType(source, "float32"), "y": TensorType(target, "float32")}
    return infer(Block("one", ("x",), ("y",), (node,), 1, (), (), types)), node


def cuts(source: tuple, target: tuple) -> set[tuple[str, str]]:
    """How each legal cut of x comes out in y, as text."""
    factors, node = viewed(source, target)
    options = strategies(node, factors, factors.size)
    return {(str(o.operands[0]), str(o.results[0])) for o in options if o.divides}


def test_a_view_that_splits_a_dim_cuts_either_part() -> None:
    assert cuts((3, 32), (3, 4, 8)) == {
        ("shard(0)", "shard(0)"), ("shard(1)", "shard(1)"), ("shard(1/4)", "shard(2)"),
    }  # fmt: skip


def test_a_view_that_merges_dims_cuts_either_part() -> None:
    assert cuts((3, 4, 8), (12, 8)) == {
        ("shard(0)", "shard(0)"), ("shard(1)", "shard(0/3)"), ("shard(2)", "shard(1)"),
    }  # fmt: skip


def test_a_view_whose_boundaries_do_not_nest_stays_whole() -> None:
    assert cuts((12, 8), (16, 6)) == set()
    assert cuts((5, 12, 8), (5, 16, 6)) == set()


def test_dims_of_one_element_are_no_factors() -> None:
    assert cuts((1, 8), (8, 1)) == {("shard(1)", "shard(0)")}


def test_a_flattened_batch_and_sequence_is_cut_by_either() -> None:
    assert cuts((BATCH, 7, 4), (7 * BATCH, 4)) == {
        ("shard(0)", "shard(0)"), ("shard(1)", "shard(0/batch)"), ("shard(2)", "shard(1)"),
    }  # fmt: skip


def test_quotients_hold_for_every_batch() -> None:
    assert quotient(12, 4) == 3
    assert quotient(12, 8) is None
    assert quotient(6 * BATCH, BATCH) == 6
    assert quotient(6 * BATCH, 3) == 2 * BATCH
    assert quotient(BATCH, 2) is None


class Fused(nn.Module):
    """Fused query, key and value of 4 heads with 6 elements each."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(10, 3 * 4 * 6, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 6)).unbind(-3)
        return (q * k * v).square().mean()


def placements(model: nn.Module, rows: int, features: int, weight: str) -> set[tuple[int, int]]:
    """(dim, outer) of the cuts of a weight, over the block that reads it."""
    graph = trace(model, (torch.randn(rows, 7, features),))
    name = next(state.name for state in graph.state if weight in state.names)
    call = next(call for call in graph.calls if name in call.arguments)
    block = graph.blocks[call.block]
    inner = block.inputs[call.arguments.index(name)]
    factors = factors_of(block)
    found = [factors.shard(inner, leaf) for leaf in factors.leaves(inner)]
    return {(place.dim, int(place.outer)) for place in found if isinstance(place, Shard)}


def test_a_fused_weight_is_cut_by_heads() -> None:
    assert (0, 3) in placements(Fused(), 5, 10, "qkv.weight")


def attention_cuts(heads: int, key_heads: int) -> set[tuple[str, ...]]:
    """How each cut of heads lies on query, keys, values, result and logsumexp."""
    q, k = (5, heads, 7, 3), (5, key_heads, 7, 3)
    shapes = {"q": q, "k": k, "v": k, "out": q, "logsumexp": q[:3]}
    node = Node("attention", (*map(Ref, "qkv"), None, True, 1.0), (), ("out", "logsumexp"))
    types = {name: TensorType(shape, "float32") for name, shape in shapes.items()}
    block = Block("one", tuple("qkv"), node.outputs, (node,), 1, (), (), types)
    options = strategies(node, infer(block), infer(block).size)
    return {tuple(map(str, (*o.operands, *o.results))) for o in options if o.divides} - {
        ("shard(0)",) * 5
    }


def test_grouped_query_heads_are_key_heads_times_groups() -> None:
    by_key_head = ("shard(1)",) * 5
    by_group = ("shard(1/2)", "whole", "whole", "shard(1/2)", "shard(1/2)")
    assert attention_cuts(8, 2) == {by_key_head, by_group}
    assert attention_cuts(8, 8) == {by_key_head}
    assert attention_cuts(8, 1) == {("shard(1)", "whole", "whole", "shard(1)", "shard(1)")}
