"""What all candidates of a search share.

Input: a traced graph with its batch flow and variants. Output: `Workload`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from ir.batch import Flow, early_values
from ir.graph import Graph, Node
from ir.ops import op_def
from ir.spmd import early_inputs
from ir.variants import Variant


@dataclass(frozen=True)
class Workload:
    """What all candidates share."""

    graph: Graph
    flow: Flow
    kinds: tuple[Variant, ...]
    global_batch: int
    optimizer: str

    @property
    def variant_of(self) -> dict[int, int]:
        return {call: n for n, kind in enumerate(self.kinds) for call in kind.calls}

    @cached_property
    def uses(self) -> Counter[str]:
        """How many calls read each graph-level value."""
        return Counter(v for call in self.graph.calls for v in dict.fromkeys(call.arguments))

    @cached_property
    def early(self) -> tuple[set[str], ...]:
        """Per variant the values that are made, and moved, before the first of several
        micro-batches: what its prologue completes, and all that this takes."""
        return tuple(self._early(kind) for kind in self.kinds)

    def _early(self, kind: Variant) -> set[str]:
        known = early_values(kind.block, set(early_inputs(self.graph, self.flow, kind)))
        found = {name for _, name, _ in kind.spread.gathers(kind.block)} & known
        for node in reversed(kind.block.forward):
            if found.intersection(node.outputs):
                found.update(node.inputs)
        return found


def touched_bytes(kind: Variant, node: Node, rows: int) -> tuple[float, float]:
    """Of what a node makes, and the largest that it reads, if they have rows of the batch: (bytes,
    bytes per row). Of a view no more than what it views. `rows`: a number that the model takes."""
    types = kind.block.types
    views: dict[str, tuple[str, ...]] = {}
    for n in kind.block.nodes:
        if op_def(n.op).kind == "view":
            views |= dict.fromkeys(n.outputs, n.inputs)

    def sizes(name: str) -> tuple[int, int]:
        found = types[name].bytes(rows), types[name].bytes(2 * rows)
        return min([found, *map(sizes, views.get(name, ()))], key=lambda pair: pair[1])

    made = [sizes(n) for n in node.outputs if n in types and n not in views]
    read = max(map(sizes, node.inputs), key=lambda pair: pair[1], default=None)
    pairs = [pair for pair in (*made, read) if pair is not None]
    rowed = [(one, (two - one) / rows) for one, two in pairs if two > one]
    return sum(one - each * rows for one, each in rowed), sum(each for _, each in rowed)
