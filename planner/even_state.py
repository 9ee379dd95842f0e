"""State divided evenly by stages, shards and data ranks: the least bytes and seconds it can take.

Input: a graph's state, a mesh, a ZeRO stage. Output: lower bounds that need no plan, for
`planner.estimate`. Exchanges are tensor by tensor, as in the emitted program: some stage has at
least an even share of their seconds, and a shard at least an even share of a tensor.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

from ir.cluster import Mesh
from ir.graph import Graph
from planner.cost import CostModel
from planner.price import OPTIMIZER_TENSORS


@dataclass
class EvenState:
    """Bounds by (mesh, ZeRO stage)."""

    graph: Graph
    optimizer: str
    known: dict[tuple[Mesh, int], tuple[float, float, float]] = field(default_factory=dict)

    @cached_property
    def trained(self) -> Counter[int]:
        """How many trained tensors of each size in bytes."""
        return Counter(s.type.bytes(1) for s in self.graph.state if s.trainable)

    @cached_property
    def trained_bytes(self) -> int:
        return sum(size * count for size, count in self.trained.items())

    @cached_property
    def frozen_bytes(self) -> int:
        """Parameters that are not trained."""
        items = (s for s in self.graph.state if s.kind == "parameter" and not s.trainable)
        return sum(s.type.bytes(1) for s in items)

    @cached_property
    def other_bytes(self) -> int:
        """Buffers and constants."""
        return sum(s.type.bytes(1) for s in self.graph.state if s.kind != "parameter")

    def all_bytes(self) -> int:
        """Parameters, gradients, optimizer state and buffers, once."""
        copies = 2 + OPTIMIZER_TENSORS[self.optimizer]
        return self.other_bytes + self.frozen_bytes + copies * self.trained_bytes

    def held_bytes(self, mesh: Mesh, zero: int) -> float:
        """Of one device."""
        of_state, of_gradients, of_parameters = (
            mesh.data if zero >= stage else 1 for stage in (1, 2, 3)
        )
        copies = 1 / of_parameters + 1 / of_gradients
        copies += OPTIMIZER_TENSORS[self.optimizer] / of_state
        held = self.other_bytes + self.frozen_bytes / of_parameters + copies * self.trained_bytes
        return held / (mesh.pipeline * mesh.tensor)

    def tail_s(self, mesh: Mesh, zero: int, cost: CostModel) -> float:
        """Once per step: gradients, or parameters, over the data axis, and the update."""
        return self._seconds(mesh, zero, cost)[0]

    def scatter_s(self, mesh: Mesh, zero: int, cost: CostModel) -> float:
        """All stages together, per micro-batch: gradients scattered."""
        return self._seconds(mesh, zero, cost)[1]

    def gather_s(self, mesh: Mesh, zero: int, cost: CostModel) -> float:
        """All stages together: parameters gathered once."""
        return self._seconds(mesh, zero, cost)[2]

    def _seconds(self, mesh: Mesh, zero: int, cost: CostModel) -> tuple[float, float, float]:
        if (mesh, zero) not in self.known:
            ops = ("all_reduce", "reduce_scatter", "all_gather")
            reduce_s, scatter_s, gather_s = (self._moved_s(op, mesh, cost) for op in ops)
            size_bytes = self.trained_bytes / (mesh.pipeline * mesh.tensor)
            size_bytes /= mesh.data if zero else 1
            state_bytes = OPTIMIZER_TENSORS[self.optimizer] * size_bytes
            once_s = (reduce_s, scatter_s + gather_s, gather_s, 0.0)[zero] / mesh.pipeline
            self.known[mesh, zero] = (
                once_s + cost.optimizer_s(size_bytes, state_bytes),
                scatter_s if zero >= 2 else 0.0, gather_s if zero == 3 else 0.0,
            )  # fmt: skip
        return self.known[mesh, zero]

    def _moved_s(self, op: str, mesh: Mesh, cost: CostModel) -> float:
        """Every trained tensor once."""
        return sum(
            count * cost.collective_s(op, size / mesh.tensor, "data")
            for size, count in self.trained.items()
        )
