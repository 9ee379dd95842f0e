"""What a node of a block costs under each of its strategies, on local shapes.

Input: a variant, degrees, a cost model. Output: per node its strategies with their seconds of one
call and micro-batch; what is communicated between nodes is not in them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property

from ir.batch import Spread
from ir.graph import Node, TensorType
from ir.layout import REPLICATE, Layout, Placement, Shard
from ir.lower import Degrees, local_type
from ir.ops import op_def
from ir.strategies import Strategy, strategies
from ir.variants import Variant
from planner.cost import CostModel
from planner.ports import divides
from planner.price import CROSS_ENTROPY_REDUCTIONS
from planner.work import Work, compute_dtype, work_of


@dataclass(frozen=True)
class NodePrices:
    """Prices of one variant's nodes, each found once; `whole` factors may not be cut."""

    variant: Variant
    degrees: Degrees
    cost: CostModel
    whole: Collection[int] = ()
    known: dict[str, list[tuple[Strategy, float]]] = field(default_factory=dict)
    types: dict[tuple[str, Placement, Placement], TensorType] = field(default_factory=dict)
    sizes: dict[tuple[str, Placement, Placement], int] = field(default_factory=dict)

    def options(self, node: Node) -> list[tuple[Strategy, float]]:
        """Every strategy with its seconds."""
        name = node.outputs[0]
        if name not in self.known:
            found = strategies(node, self.variant.factors, self._leaves)
            if op_def(node.op).kind == "view":
                self.known[name] = [(option, self._view_s) for option in found]
                return self.known[name]
            batch = self._spread.chosen[node]
            self.known[name] = [(option, self._seconds(node, batch, option)) for option in found]
        return self.known[name]

    @cached_property
    def _spread(self) -> Spread:
        return self.variant.spread

    @cached_property
    def _view_s(self) -> float:
        """Of a view, which takes the same in any layout."""
        return self.cost.compute_s(Work("view", 0.0, 0.0, "float32"))

    @cached_property
    def _leaves(self) -> tuple[int, ...]:
        """The factors that may be cut."""
        factors = self.variant.factors
        return tuple(
            leaf for leaf in factors.size
            if leaf not in self.whole and divides(factors, leaf, self.degrees.tensor)
        )

    def least_s(self) -> dict[str, float]:
        """By first output, the seconds of each node by its fastest strategy."""
        nodes = self.variant.block.nodes
        return {node.outputs[0]: min(s for _, s in self.options(node)) for node in nodes}

    def bytes_of(self, name: str, layout: Layout) -> int:
        """Of a value in a layout, on one device."""
        key = (name, layout.data, layout.tensor)
        if key not in self.sizes:
            self.sizes[key] = self._local(*key).bytes(1)
        return self.sizes[key]

    def copy_s(self, node: Node, place: Placement) -> float:
        """Of a view that copies its operand in a layout; nothing where a dim may be left with one
        element, since it may be a view then."""
        name, tensor = node.operands[0], self.degrees.tensor
        if isinstance(place, Shard):
            leaf = self.variant.factors.leaf_of(name, place)
            if leaf is None or self.variant.factors.size[leaf] == tensor:
                return 0.0
        data = self._spread.chosen[node]
        operand = self._local(name, data.operands[0], place)
        moved = 2.0 * operand.bytes(1)
        dtype = compute_dtype([operand])
        return self.cost.compute_s(
            Work("memory", 0.0, moved, dtype, touched_bytes=moved, op=node.op)
        )

    def _seconds(self, node: Node, batch: Strategy, option: Strategy) -> float:
        made = [name for name in node.outputs if name in self.variant.block.types]
        operands = list(map(self._local, node.operands, batch.operands, option.operands))
        results = list(map(self._local, made, batch.results, option.results))
        seconds = self.cost.compute_s(work_of(node, operands, results))
        if option.communicates:
            rows = self._local(made[0], batch.results[0], REPLICATE).bytes(1)
            reduced_s = self.cost.collective_s("all_reduce", rows, "tensor")
            seconds += CROSS_ENTROPY_REDUCTIONS * reduced_s
        return seconds

    def _local(self, name: str, data: Placement, tensor: Placement) -> TensorType:
        key = (name, data, tensor)
        if key not in self.types:
            kind = self.variant.block.types[name]
            layout = Layout(data, tensor)
            self.types[key] = local_type(kind, layout, self.degrees, self.degrees.rows)
        return self.types[key]
