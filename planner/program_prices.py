"""What the terms of the sharding program cost on local shapes of one size.

Input: variants, how the data axis cuts their values, the prices of their nodes, a cost model; what
is asked for, as a `Price`. Output: seconds of one call, or bytes of one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ir.layout import REPLICATE, Layout, Placement
from ir.reshard import step
from ir.variants import Variant
from planner.cost import CostModel
from planner.node_prices import NodePrices

Price: TypeAlias = "tuple[Any, ...]"
"""("node", variant, node's place, option's place), ("copy", variant, node's place, placement),
("move", variant, value, from, to), ("bytes", variant, value, layout)."""


@dataclass(frozen=True)
class ProgramPrices:
    """`places`: per variant, how the data axis cuts every value."""

    kinds: Sequence[Variant]
    places: Sequence[Mapping[str, Placement]]
    nodes: Sequence[NodePrices]
    cost: CostModel

    def of(self, price: Price) -> float:
        """Seconds, or bytes."""
        kind, number, *what = price
        nodes = self.kinds[number].block.nodes
        match kind:
            case "node":
                return self.nodes[number].options(nodes[what[0]])[what[1]][1]
            case "copy":
                return self.nodes[number].copy_s(nodes[what[0]], what[1])
            case "move":
                return self.move_s(number, *what)
            case "bytes":
                return self.nodes[number].bytes_of(*what)
        raise ValueError(f"unknown kind of price {kind!r}")

    def move_s(self, number: int, name: str, a: Placement, b: Placement) -> float:
        """A value of a call from one placement to another on the tensor axis."""
        kind = step(a, b)
        if kind is None:
            return 0.0
        layout = Layout(self.places[number][name], a if kind == "all_to_all" else REPLICATE)
        return self.cost.collective_s(kind, self.nodes[number].bytes_of(name, layout), "tensor")
