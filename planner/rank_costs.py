"""Cost models where nodes hold different devices: of each pipeline rank, and of the best of them.

Input: a cluster, a mesh. Output: per rank a `CostModel` of the devices that its stages lie on, from
`ir.stage_devices`; and `Fastest`, which no rank beats, for bounds and for choices that all stages
share (shardings, what blocks may keep). On alike devices both are `planner.calibrated.cost_model`.
What goes from stage to stage is priced on the whole cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from ir.cluster import Cluster, Mesh
from ir.device import Device
from ir.stage_devices import stage_parts
from planner.calibrated import Calibrated, cost_model
from planner.cost import CostModel
from planner.links import Groups
from planner.traits import Traits
from planner.work import Work

Place: TypeAlias = "tuple[Device, Groups | None]"
"""What costs of blocks depend on that no data axis cuts: the device, how tensor groups lie."""
Kind: TypeAlias = "tuple[Place, Groups | None]"
"""What all costs of a rank depend on: how data groups lie, too."""
CostOf: TypeAlias = "Callable[[Mesh], CostModel]"


def rank_costs(cost: CostModel) -> tuple[CostModel, ...]:
    """Per pipeline rank, from the cost model of all ranks."""
    parts = stage_parts(cost.cluster, cost.mesh) if cost.cluster.nodes else ()
    if not any(parts):
        return (cost,) * cost.mesh.pipeline
    if not isinstance(cost, Calibrated):
        return tuple(cost_model(*part) if part else cost for part in parts)
    habits = cost.traits, cost.paces
    return tuple(cost_model(*part, *habits) if part else cost for part in parts)


def place_of(cost: CostModel) -> Place:
    """Of the cost model of a rank."""
    return cost.cluster.device, cost.groups("tensor") if cost.mesh.tensor > 1 else None


def kind_of(cost: CostModel) -> Kind:
    """Of the cost model of a rank."""
    return place_of(cost), cost.groups("data") if cost.mesh.data > 1 else None


def rank_places(cluster: Cluster, mesh: Mesh) -> tuple[Place, ...]:
    """Per pipeline rank; one for all where nodes hold the same."""
    main = cost_model(cluster, mesh)
    return tuple(map(place_of, rank_costs(main) if cluster.nodes else (main,)))


@lru_cache(maxsize=4096)
def _least_of(cluster: Cluster, mesh: Mesh) -> CostModel:
    main = cost_model(cluster, mesh)
    return fastest(main, rank_costs(main))


def least_cost(cluster: Cluster, mesh: Mesh) -> CostModel:
    """What no rank of the mesh beats."""
    return _least_of(cluster, mesh) if cluster.nodes else cost_model(cluster, mesh)


def fastest(main: CostModel, costs: Iterable[CostModel]) -> CostModel:
    """Of several cost models the least of everything, with the sends and the cluster of `main`."""
    distinct = tuple({kind_of(cost): cost for cost in costs}.values())
    return distinct[0] if distinct == (main,) else Fastest(main, distinct)


@dataclass(frozen=True)
class Fastest:
    """Not one device: the best of several in every respect."""

    main: CostModel
    costs: tuple[CostModel, ...]

    @property
    def capacity_bytes(self) -> int:
        """The most memory."""
        return max(cost.capacity_bytes for cost in self.costs)

    @property
    def mesh(self) -> Mesh:
        """Of all ranks."""
        return self.main.mesh

    @property
    def cluster(self) -> Cluster:
        """All that the mesh uses."""
        return self.main.cluster

    @property
    def traits(self) -> Traits:
        """The same on every device."""
        return self.main.traits

    @property
    def sends_meet(self) -> bool:
        """As between any two ranks."""
        return self.main.sends_meet

    @property
    def core_sharing(self) -> float:
        """As of any rank."""
        return self.main.core_sharing

    def compute_s(self, work: Work) -> float:
        """One kernel where it is fastest."""
        return min(cost.compute_s(work) for cost in self.costs)

    def group_s(self, moved_bytes: float) -> float:
        """One fused kernel where it is fastest."""
        return min(cost.group_s(moved_bytes) for cost in self.costs)

    def inner_bytes(self, work: Work) -> tuple[float, float]:
        """The least of each."""
        kept, working = zip(*(cost.inner_bytes(work) for cost in self.costs), strict=True)
        return min(kept), min(working)

    def host_s(self, launches: float) -> float:
        """Of the fastest host."""
        return min(cost.host_s(launches) for cost in self.costs)

    def accumulate_s(self, gradient_bytes: float, tensors: int, micro_batches: int) -> float:
        """Where it is fastest."""
        return min(
            cost.accumulate_s(gradient_bytes, tensors, micro_batches) for cost in self.costs
        )

    def groups(self, axis: str) -> Groups:
        """Of all ranks together."""
        return self.main.groups(axis)

    def collective_s(self, op: str, size_bytes: float, axis: str) -> float:
        """Where the links are fastest."""
        return min(cost.collective_s(op, size_bytes, axis) for cost in self.costs)

    def send_s(self, size_bytes: float, stage: int | None = None) -> float:
        """As on the whole cluster."""
        return self.main.send_s(size_bytes, stage)

    def announce_s(self, scalars: int) -> float:
        """As on the whole cluster."""
        return self.main.announce_s(scalars)

    def optimizer_s(self, parameter_bytes: float, state_bytes: float) -> float:
        """Where it is fastest."""
        return min(cost.optimizer_s(parameter_bytes, state_bytes) for cost in self.costs)
