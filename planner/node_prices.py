"""What a node of a block costs under each of its strategies, on local shapes.

Input: a variant, degrees, a cost model. Output: per node its strategies with their seconds of one
call and micro-batch; what is communicated between nodes is not in them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property

from ir.graph import Node, TensorType
from ir.layout import Layout
from ir.lower import Degrees, local_type
from ir.strategies import Strategy, strategies
from ir.variants import Variant
from planner.cost import CostModel
from planner.ports import divides
from planner.price import CROSS_ENTROPY_REDUCTIONS
from planner.work import work_of


@dataclass(frozen=True)
class NodePrices:
    """Prices of one variant's nodes, each found once; `whole` factors may not be cut."""

    variant: Variant
    degrees: Degrees
    cost: CostModel
    whole: Collection[int] = ()
    known: dict[str, list[tuple[Strategy, float]]] = field(default_factory=dict)

    def options(self, node: Node) -> list[tuple[Strategy, float]]:
        """Every strategy with its seconds."""
        name = node.outputs[0]
        if name not in self.known:
            found = strategies(node, self.variant.factors, self._leaves)
            self.known[name] = [(option, self._seconds(node, option)) for option in found]
        return self.known[name]

    @cached_property
    def _leaves(self) -> list[int]:
        """The factors that may be cut."""
        factors = self.variant.factors
        return [
            leaf for leaf in factors.size
            if leaf not in self.whole and divides(factors, leaf, self.degrees.tensor)
        ]  # fmt: skip

    def least_s(self) -> dict[str, float]:
        """By first output, the seconds of each node by its fastest strategy."""
        nodes = self.variant.block.nodes
        return {node.outputs[0]: min(s for _, s in self.options(node)) for node in nodes}

    def bytes_of(self, name: str, layout: Layout) -> int:
        """Of a value in a layout, on one device."""
        return self._local(name, layout).bytes(1)

    def _seconds(self, node: Node, option: Strategy) -> float:
        batch = self.variant.spread.chosen[node]
        names = node.operands
        made = [name for name in node.outputs if name in self.variant.block.types]
        operands = [
            self._local(name, Layout(*places))
            for name, *places in zip(names, batch.operands, option.operands, strict=True)
        ]
        results = [
            self._local(name, Layout(*places))
            for name, *places in zip(made, batch.results, option.results, strict=True)
        ]
        seconds = self.cost.compute_s(work_of(node, operands, results))
        if option.communicates:
            rows = self.bytes_of(made[0], Layout(batch.results[0]))
            reduced_s = self.cost.collective_s("all_reduce", rows, "tensor")
            seconds += CROSS_ENTROPY_REDUCTIONS * reduced_s
        return seconds

    def _local(self, name: str, layout: Layout) -> TensorType:
        kind = self.variant.block.types[name]
        return local_type(kind, layout, self.degrees, self.degrees.rows)
