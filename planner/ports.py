"""What must agree between blocks: the layouts of the values that cross their boundaries.

Input: a graph and its variants. Output: port classes: boundary values that hold the same tensor,
or are the same input of a repeated block, share one layout on the tensor axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ir.factors import Factors
from ir.graph import Graph
from ir.layout import REPLICATE, Placement
from ir.variants import Variant

Port: TypeAlias = "tuple[int, str, str]"
"""(variant, "value" or "gradient", name of the value inside the block)."""


@dataclass(frozen=True)
class Ports:
    """Classes of ports; `fixed` classes stay whole (model inputs, losses, buffer updates)."""

    of_value: dict[Port, int]
    fixed: frozenset[int]
    state: dict[str, int]
    uses: dict[str, int]

    def members(self, number: int) -> list[Port]:
        return [port for port, found in self.of_value.items() if found == number]


def connect(graph: Graph, kinds: tuple[Variant, ...]) -> Ports:
    """Joins ports over the graph's values."""
    parent: dict[object, object] = {}

    def root(item: object) -> object:
        parent.setdefault(item, item)
        while parent[item] != item:
            item = parent[item]
        return item

    state_names = {state.name for state in graph.state}
    ports: list[Port] = []
    uses: dict[str, int] = dict.fromkeys(state_names, 0)
    for number, variant in enumerate(kinds):
        for index in variant.calls:
            call = graph.calls[index]
            outer = [*zip(variant.block.inputs, call.arguments, strict=True),
                     *zip(variant.block.outputs, call.results, strict=True)]  # fmt: skip
            for name, value in outer:
                parent[root(("value", value))] = root((number, "value", name))
                if value in uses:
                    uses[value] += 1
                else:
                    parent[root(("gradient", value))] = root((number, "gradient", name))
    for number, variant in enumerate(kinds):
        names = dict.fromkeys([*variant.block.inputs, *variant.block.outputs])
        ports += [(number, kind, name) for name in names for kind in ("value", "gradient")]
    numbers: dict[object, int] = {}
    of_value = {port: numbers.setdefault(root(port), len(numbers)) for port in ports}
    ends = [item.name for item in graph.inputs] + [graph.loss] + [v for _, v in graph.metrics]
    ends += [n for state in graph.state if state.update for n in (state.update, state.name)]
    fixed = frozenset(
        numbers[root((kind, name))] for name in ends for kind in ("value", "gradient")
        if root((kind, name)) in numbers
    )  # fmt: skip
    state = {
        name: numbers[root(("value", name))] for name in sorted(state_names)
        if root(("value", name)) in numbers
    }  # fmt: skip
    return Ports(of_value, fixed, state, uses)


def options(
    ports: Ports, number: int, kinds: tuple[Variant, ...], degree: int
) -> tuple[Placement, ...]:
    """Placements that every port of a class can have: whole, and cuts that divide evenly."""
    if number in ports.fixed:
        return (REPLICATE,)
    shared: dict[Placement, None] | None = None
    for variant, _, name in ports.members(number):
        factors = kinds[variant].factors
        cuts: dict[Placement, None] = {
            place: None for leaf in factors.leaves(name) if divides(factors, leaf, degree)
            if (place := factors.shard(name, leaf)) is not None
        }  # fmt: skip
        shared = cuts if shared is None else {p: None for p in shared if p in cuts}
    return (REPLICATE, *(shared or {}))


def divides(factors: Factors, leaf: int, degree: int) -> bool:
    """Whether a leaf has a fixed size that the axis divides."""
    size = factors.size[leaf]
    return isinstance(size, int) and size % degree == 0
