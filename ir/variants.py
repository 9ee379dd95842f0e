"""The distinct (block, batch placements) pairs of a graph: what is sharded and emitted once."""

from __future__ import annotations

from dataclasses import dataclass

from ir.batch import Flow, Placements, Spread, factors_of, spread
from ir.factors import Factors
from ir.graph import Block, Graph


@dataclass(frozen=True)
class Variant:
    """A block under given batch placements; `calls` are its places in the graph."""

    block: Block
    placements: Placements
    calls: tuple[int, ...]

    @property
    def spread(self) -> Spread:
        return spread(self.block, self.placements)

    @property
    def factors(self) -> Factors:
        return factors_of(self.block, self.placements)


def variants(graph: Graph, flow: Flow) -> tuple[Variant, ...]:
    """All variants, in order of first call."""
    found: dict[tuple[int, Placements], list[int]] = {}
    for index, call in enumerate(graph.calls):
        found.setdefault((call.block, flow.calls[index]), []).append(index)
    return tuple(
        Variant(graph.blocks[block], places, tuple(calls))
        for (block, places), calls in found.items()
    )
