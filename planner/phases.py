"""When in a step the nodes of a block run, and the least that each part of a step takes.

Input: the variants of a graph, the prices of their nodes. Output: per node its `Phase`; seconds by
phase, of updating, and the bytes of parameters that no sharding beats. Without a tensor axis there
is nothing to choose, and they are what every sharding takes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, TypeAlias

from ir.graph import Graph, Node, needed
from ir.variants import Variant
from planner.cost import CostModel
from planner.node_prices import NodePrices

Phase: TypeAlias = Literal["forward", "input", "weight", "move", "late move", "early"]
PHASES: tuple[Phase, ...] = ("forward", "input", "weight", "move", "late move", "early")
"""Of a node: in forward, in the half of backward that gives gradients of activations, in the rest;
what is communicated between nodes, for forward or that half, or for the rest alone; and what is
done once, before the first micro-batch."""
OPTIMIZER_STATE = 2
"""Tensors of state per parameter that updating is priced with where shardings are compared."""


def node_phases(graph: Graph, kind: Variant) -> dict[Node, Phase]:
    """Of every node of a variant, when it is not done early."""
    state, block = {item.name for item in graph.state}, kind.block
    arguments = dict(zip(block.inputs, graph.calls[kind.calls[0]].arguments, strict=True))
    handed = [gradient for value, gradient in block.gradients if arguments[value] not in state]
    phases: dict[Node, Phase] = dict.fromkeys(block.nodes, "weight")
    phases |= dict.fromkeys(needed(block.nodes, handed), "input")
    return phases | dict.fromkeys(block.forward, "forward")


def update_s(cost: CostModel, size_bytes: float) -> float:
    """Of updating so many bytes of parameters."""
    return cost.optimizer_s(size_bytes, OPTIMIZER_STATE * size_bytes)


def least_parts(
    graph: Graph, kinds: Sequence[Variant], prices: Sequence[NodePrices],
    early: Sequence[Collection[str]], tensor: int, cost: CostModel,
) -> dict[str, float]:  # fmt: skip
    """By phase and of `update` and `trained`: every node by its fastest strategy, every parameter
    cut evenly, nothing communicated."""
    found: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    for kind, known, names in zip(kinds, prices, early, strict=True):
        phases, least_s = node_phases(graph, kind), known.least_s()
        for node in kind.block.nodes:
            name = node.outputs[0]
            phase = "early" if name in names else phases[node]
            found[phase] += len(kind.calls) * least_s[name]
    batch = prices[0].degrees.batch if prices else 1
    sizes = [item.type.bytes(batch) / tensor for item in graph.state if item.trainable]
    return found | {"update": sum(update_s(cost, s) for s in sizes), "trained": sum(sizes)}
