"""The supplies and bounds of a search, by how the groups of the tensor axis lie.

Input: a workload, a cluster, pins. Output: the `Pieces` and the bounds of a candidate. Candidates
of all devices with one tensor degree have their tensor groups in the same places, and share a
`Supply`; where devices idle, the groups may be nearer to each other, and the devices faster.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ir.cluster import Cluster, Mesh
from ir.device import Device
from planner.bounds import Bounds
from planner.calibrated import cost_model
from planner.least_costs import LeastCosts
from planner.links import Groups
from planner.pieces import Pieces
from planner.pins import Candidate
from planner.supply import Supply


@dataclass
class Supplies:
    """`main`: of all devices."""

    main: Supply
    known: dict[tuple[Device, Groups | None], Supply] = field(default_factory=dict)
    places: dict[Mesh, Supply] = field(default_factory=dict)

    @property
    def least(self) -> LeastCosts:
        """Of all devices: what does not depend on the tensor axis's links."""
        return self.main.least

    def pieces(self, candidate: Candidate, price_s: float) -> Pieces:
        """As `Supply.pieces`."""
        return self.of(candidate.mesh).pieces(candidate, price_s)

    def of(self, mesh: Mesh) -> Supply:
        """The supply for a mesh."""
        if mesh.size == self.main.cluster.n_devices:
            return self.main
        if mesh not in self.places:
            self.places[mesh] = self._found(mesh)
        return self.places[mesh]

    def _found(self, mesh: Mesh) -> Supply:
        """By the device, and where there are tensor groups by how they lie."""
        cluster, place = self.main.cluster, _place(self.main.cluster, mesh)
        if mesh.tensor == 1 or cluster.n_devices % mesh.tensor == 0:
            everywhere = Mesh(data=cluster.n_devices // mesh.tensor, tensor=mesh.tensor)
            if place == _place(cluster, everywhere):
                return self.main
        if place not in self.known:
            self.known[place] = self.main.elsewhere(place[0])
        return self.known[place]


@dataclass(frozen=True)
class PlacedBounds:
    """As `Bounds`, each candidate by the supply of its mesh."""

    supplies: Supplies

    @property
    def least(self) -> LeastCosts:
        """As `Supplies.least`."""
        return self.supplies.least

    def may_fit(self, candidate: Candidate) -> bool:
        """As `Bounds.may_fit`."""
        return self._of(candidate).may_fit(candidate)

    def quick_s(self, candidate: Candidate) -> float:
        """As `Bounds.quick_s`."""
        return self._of(candidate).quick_s(candidate)

    def close_s(self, candidate: Candidate, level: int) -> float:
        """As `Bounds.close_s`."""
        return self._of(candidate).close_s(candidate, level)

    def _of(self, candidate: Candidate) -> Bounds:
        return Bounds(self.supplies.of(candidate.mesh).least)


def _place(cluster: Cluster, mesh: Mesh) -> tuple[Device, Groups | None]:
    cost = cost_model(cluster, mesh)
    return cost.cluster.device, cost.groups("tensor") if mesh.tensor > 1 else None
