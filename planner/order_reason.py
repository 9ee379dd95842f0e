"""Why a plan has nodes that hold different devices in its order, in words.

Input: what a search learns of plans with the nodes in each order, as it goes. Output: a note for
the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from ir.cluster import Cluster
from ir.quantities import duration
from ir.stage_devices import Order, are_unlike, in_order
from planner.pins import Candidate


@dataclass
class OrderReason:
    """`bounds_s`: what candidates of each order take at least; `planned_s`: of each order, the
    seconds of the fastest that was planned."""

    cluster: Cluster
    bounds_s: dict[Order, dict[Candidate, float]] = field(default_factory=dict)
    planned_s: dict[Order, float] = field(default_factory=dict)

    def bounded(self, candidate: Candidate, bound_s: float) -> None:
        """A candidate takes as long at least."""
        if self.cluster.nodes and self._are_unlike(candidate):
            self.bounds_s.setdefault(candidate.order, {})[candidate] = bound_s

    def planned(self, candidate: Candidate, step_s: float) -> None:
        """A plan of that candidate takes as long."""
        if self.cluster.nodes and self._are_unlike(candidate):
            known_s = self.planned_s.get(candidate.order, inf)
            self.planned_s[candidate.order] = min(known_s, step_s)

    def notes(self, candidate: Candidate, step_s: float) -> list[str]:
        """Why the nodes are in a plan's order; nothing where all stages lie on the same devices."""
        if not self.cluster.nodes or not self._are_unlike(candidate):
            return []
        others = [*self._others(candidate.order)]
        if not others:
            return []
        now = in_order(self.cluster, candidate.order)
        return [f"nodes in the order {now}: {'; '.join(others)}; this plan {duration(step_s)}"]

    def _others(self, order: Order) -> Iterator[str]:
        for other, bounds_s in sorted(self.bounds_s.items()):
            if other == order:
                continue
            cluster, planned_s = in_order(self.cluster, other), self.planned_s.get(other)
            if planned_s is not None:
                yield f"the best plan found with {cluster} takes {duration(planned_s)}"
            elif (least_s := min(bounds_s.values())) < inf:
                yield f"plans with {cluster} take {duration(least_s)} at least"

    def _are_unlike(self, candidate: Candidate) -> bool:
        return are_unlike(in_order(self.cluster, candidate.order), candidate.mesh)
