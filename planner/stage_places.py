"""Which stages lie on which devices, where nodes hold different ones, and why so: in words.

Input: a plan's cluster and mesh; what a search learns of plans with its nodes in each order, as it
goes. Output: lines for the plan. The nodes must be started in the order that the plan has them in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from math import inf

from ir.cluster import Cluster, Mesh
from ir.quantities import duration
from ir.stage_devices import Order, held_devices, in_order, stage_devices, stage_parts
from planner.pins import Candidate


def are_unlike(cluster: Cluster, mesh: Mesh) -> bool:
    """Whether pipeline ranks are priced on different devices."""
    return any(stage_parts(cluster, mesh))


def places_text(cluster: Cluster, mesh: Mesh, word: str) -> str:
    """`stage 0 on A100-80GB (ranks 0 to 7), stage 1 on H100-SXM (ranks 8 to 15)`; `word`: what a
    pipeline rank is called."""
    each, names = mesh.data * mesh.tensor, _names(cluster, mesh)
    found = []
    for name, group in groupby(range(mesh.pipeline), key=lambda rank: names[rank]):
        ranks = list(group)
        first, last = ranks[0] * each, (ranks[-1] + 1) * each - 1
        devices = f"ranks {first} to {last}" if last > first else f"rank {first}"
        of = f"{word}s {ranks[0]} to {ranks[-1]}" if ranks[1:] else f"{word} {ranks[0]}"
        found.append(f"{of} on {name} ({devices})")
    return ", ".join(found)


def _names(cluster: Cluster, mesh: Mesh) -> list[str]:
    """Per pipeline rank the device; of one that lies on several, what each is taken as."""
    found = []
    for rank, device in enumerate(stage_devices(cluster, mesh)):
        held = list(dict.fromkeys(d.name for d in held_devices(cluster, mesh, rank)))
        alike = f", each taken as {device.name} with the least memory of them" if held[1:] else ""
        found.append(f"{' and '.join(held)}{alike}")
    return found


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
