"""The supplies and bounds of a search, by how the ranks of a candidate lie.

Input: a workload, a cluster, pins. Output: the `Pieces` and the bounds of a candidate. Candidates
of all devices with one tensor degree have their tensor groups in the same places, and share a
`Supply`; where devices idle, the groups may be nearer to each other, and the devices faster. Where
nodes hold different devices, candidates share one whose ranks lie on the same kinds of place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ir.cluster import Cluster, Mesh
from ir.device import Device
from ir.mixed import pace
from ir.stage_devices import Order, in_order
from planner.bounds import Bounds
from planner.least_costs import LeastCosts
from planner.pieces import Pieces
from planner.pins import Candidate
from planner.rank_costs import Place, rank_places
from planner.supply import Supply


@dataclass
class Supplies:
    """`main`: of all devices."""

    main: Supply
    known: dict[tuple[frozenset[Place], Place | None], list[Supply]] = field(default_factory=dict)
    by_devices: dict[tuple[Device, ...], Supply] = field(default_factory=dict)
    places: dict[tuple[Mesh, Order], Supply] = field(default_factory=dict)
    of_ranks: dict[tuple[Mesh, Order], tuple[LeastCosts, ...]] = field(default_factory=dict)

    @property
    def least(self) -> LeastCosts:
        """Of all devices: what does not depend on the tensor axis's links."""
        return self.main.least

    def pieces(self, candidate: Candidate, price_s: float) -> Pieces:
        """As `Supply.pieces`."""
        return self.of(candidate).pieces(candidate, price_s)

    def cluster_of(self, candidate: Candidate) -> Cluster:
        """With its nodes in the candidate's order."""
        return in_order(self.main.cluster, candidate.order)

    def of(self, candidate: Candidate) -> Supply:
        """The supply for a candidate."""
        cluster, mesh = self.main.cluster, candidate.mesh
        if mesh.size == cluster.n_devices and not cluster.nodes:
            return self.main
        key = (mesh, candidate.order)
        if key not in self.places:
            self.places[key] = self._found(self.cluster_of(candidate), mesh)
        return self.places[key]

    def _found(self, cluster: Cluster, mesh: Mesh) -> Supply:
        """By the devices, and where there are tensor groups by how they lie."""
        main, places = self.main.cluster, frozenset(rank_places(cluster, mesh))
        if cluster == main and (mesh.tensor == 1 or main.n_devices % mesh.tensor == 0):
            everywhere = Mesh(data=main.n_devices // mesh.tensor, tensor=mesh.tensor)
            if places == {*rank_places(main, everywhere)}:
                return self.main
        return self._shared(cluster, places)

    def _shared(
        self, cluster: Cluster, places: frozenset[Place], only: Place | None = None
    ) -> Supply:
        """One for all ranks in the same places, or for those in `only` one of them, whatever the
        places of the others. Where nodes hold different devices the first of the same devices has
        what those alone decide."""
        here = places if only is None else frozenset({only})
        known = self.known.setdefault((here, only), [])
        for supply in known:
            if supply.cluster == cluster:
                return supply
        if known:
            made = known[0].reordered(cluster)
        else:
            devices = tuple(sorted({device for device, _ in here}, key=_by_pace))
            made = self.by_devices.get(devices, self.main).elsewhere(cluster, devices, only)
            self.by_devices.setdefault(devices, made)
        known.append(made)
        return made

    def least_of_ranks(self, candidate: Candidate) -> tuple[LeastCosts, ...]:
        """Per pipeline rank what its own devices take; nothing where all are alike."""
        if not self.main.cluster.nodes:
            return ()
        key = (candidate.mesh, candidate.order)
        if key not in self.of_ranks:
            cluster = self.cluster_of(candidate)
            places = rank_places(cluster, candidate.mesh)
            different = frozenset(places)
            self.of_ranks[key] = tuple(
                self._shared(cluster, different, place).least for place in places
            ) if len(different) > 1 else ()
        return self.of_ranks[key]


def _by_pace(device: Device) -> tuple[float, str]:
    return pace(device), device.name


@dataclass(frozen=True)
class PlacedBounds:
    """As `Bounds`, each candidate by the supply of its mesh."""

    supplies: Supplies
    known: dict[tuple[int, ...], Bounds] = field(default_factory=dict)
    """By what ranks take."""

    @property
    def least(self) -> LeastCosts:
        """As `Supplies.least`."""
        return self.supplies.least

    def may_fit(self, candidate: Candidate) -> bool:
        """As `Bounds.may_fit`."""
        return self._of(candidate).may_fit(candidate)

    def floor_s(self, candidate: Candidate) -> float:
        """As `Bounds.floor_s`."""
        return self._of(candidate).floor_s(candidate)

    def quick_s(self, candidate: Candidate) -> float:
        """As `Bounds.quick_s`."""
        return self._of(candidate).quick_s(candidate)

    def close_s(self, candidate: Candidate, level: int) -> float:
        """As `Bounds.close_s`."""
        return self._of(candidate).close_s(candidate, level)

    def _of(self, candidate: Candidate) -> Bounds:
        of_ranks = self.supplies.least_of_ranks(candidate)
        least = self.supplies.of(candidate).least
        key = tuple(id(item) for item in (least, *of_ranks))
        if key not in self.known:
            self.known[key] = Bounds(least, of_ranks)
        return self.known[key]
