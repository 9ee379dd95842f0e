"""What a node of a block costs under each of its strategies, on local shapes.

Input: a variant, degrees, a cost model. Output: per node its strategies with their seconds of one
call and micro-batch; what is communicated between nodes is not in them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

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

PRODUCTS = ("matmul", "conv", "attention")
"""Kinds of ops."""
_Place: TypeAlias = tuple[str, Placement, Placement]  # a value, how data and tensor axes cut it


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
    alike: dict[tuple[str, str, tuple[int, ...]], float] = field(default_factory=dict)

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

    def products_s(self, early: Collection[str]) -> dict[str, float]:
        """As `least_s`, of what multiplies, without `early` values."""
        nodes = (node for node in self.variant.block.nodes if op_def(node.op).kind in PRODUCTS)
        return {
            node.outputs[0]: min(s for _, s in self.options(node))
            for node in nodes if node.outputs[0] not in early
        }  # fmt: skip

    def bytes_of(self, name: str, layout: Layout) -> int:
        """Of a value in a layout, on one device."""
        return self._size(name, layout.data, layout.tensor)

    def _size(self, name: str, data: Placement, tensor: Placement) -> int:
        key = (name, data, tensor)
        found = self.sizes.get(key)
        if found is None:
            found = self.sizes[key] = self._local(name, data, tensor).bytes(1)
        return found

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
        seconds = self._compute_s(node, made, batch, option)
        if option.communicates:
            rows = self._size(made[0], batch.results[0], REPLICATE)
            reduced_s = self.cost.collective_s("all_reduce", rows, "tensor")
            seconds += CROSS_ENTROPY_REDUCTIONS * reduced_s
        return seconds

    def _compute_s(
        self, node: Node, made: Sequence[str], batch: Strategy, option: Strategy
    ) -> float:
        """What moves memory takes the same for as many bytes of everything, in any layout."""
        operands = list(zip(node.operands, batch.operands, option.operands, strict=True))
        results = list(zip(made, batch.results, option.results, strict=False))
        if op_def(node.op).kind != "memory":
            return self._work_s(node, operands, results)
        sizes = tuple(self._size(*place) for place in (*operands, *results))
        types = self.variant.block.types
        key = node.op, " ".join(types[name].dtype for name in (*node.operands, *made)), sizes
        found = self.alike.get(key)
        if found is None:
            found = self.alike[key] = self._work_s(node, operands, results)
        return found

    def _work_s(self, node: Node, operands: Sequence[_Place], results: Sequence[_Place]) -> float:
        read, written = ([self._local(*p) for p in places] for places in (operands, results))
        return self.cost.compute_s(work_of(node, read, written))

    def _local(self, name: str, data: Placement, tensor: Placement) -> TensorType:
        key = (name, data, tensor)
        if key not in self.types:
            kind = self.variant.block.types[name]
            layout = Layout(data, tensor)
            self.types[key] = local_type(kind, layout, self.degrees, self.degrees.rows)
        return self.types[key]
