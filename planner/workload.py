"""What all candidates of a search share.

Input: a traced graph with its batch flow and variants. Output: `Workload`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from ir.batch import Flow, early_values
from ir.graph import Graph
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
        """Per variant the values that exist before the first micro-batch, if there are several."""
        return tuple(
            early_values(kind.block, set(early_inputs(self.graph, self.flow, kind)))
            for kind in self.kinds
        )
