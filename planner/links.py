"""How the groups of a mesh axis lie on a cluster, and what each gets of the links it crosses.

Input: a cluster and the groups (ranks are devices, in order), or two pipeline stages. Output: per
level that a group crosses, its members, its share of the ports and the latency of a step. All
groups of an axis communicate at the same time, so they share ports and switches; which ports a
pipeline's transfers share is `pipeline_ports`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from math import ceil

import numpy as np
from numpy.typing import NDArray

from ir.cluster import Cluster, Level, Mesh
from ir.errors import UsageError


@dataclass(frozen=True, slots=True)
class Crossing:
    """One level that a group crosses.

    `inside` members share a unit of the level below, `shared` one unit of this level;
    `member_bytes_per_s`: what each member can send through this level while all send;
    `pair_bytes_per_s`: what it can send to one other member; `latency_s`: of one step.
    """

    inside: int
    shared: int
    member_bytes_per_s: float
    pair_bytes_per_s: float
    latency_s: float
    is_network: bool = False
    nvls: float = 0.0

    @property
    def units(self) -> int:
        """How many units of the level below a group has in one unit of this level."""
        return ceil(self.shared / self.inside)

    @property
    def ring_bytes_per_s(self) -> float:
        """What all members of one unit below move through this level together."""
        return self.inside * self.member_bytes_per_s


@dataclass(frozen=True, slots=True)
class Groups:
    """Alike groups of `members` ranks, innermost crossing first; no crossing for one member.

    `library`: "nccl", "rccl" (AMD) or "gloo" (CPU).
    """

    members: int
    crossings: tuple[Crossing, ...]
    library: str = "nccl"

    @property
    def ring_bytes_per_s(self) -> float:
        """Bandwidth of a ring over all members: the slowest level's."""
        return min(crossing.ring_bytes_per_s for crossing in self.crossings)

    @property
    def near(self) -> tuple[Crossing, ...]:
        """The crossings inside a machine (an NVLink domain)."""
        return tuple(crossing for crossing in self.crossings if not crossing.is_network)

    @property
    def far(self) -> tuple[Crossing, ...]:
        """The crossings over a network."""
        return tuple(crossing for crossing in self.crossings if crossing.is_network)

    @property
    def members_near(self) -> int:
        """How many members one machine has."""
        return self.near[-1].shared if self.near else 1


@lru_cache(maxsize=4096)
def axis_groups(cluster: Cluster, mesh: Mesh, axis: str) -> Groups:
    """The groups of a mesh axis; `UsageError` if the mesh is larger than the cluster."""
    return lay_out(cluster, mesh.groups(axis))


def lay_out(cluster: Cluster, groups: Iterable[Iterable[int]]) -> Groups:
    """Any groups of ranks. Where they lie unevenly, the fewest members that meet count, which is
    never too optimistic.
    """
    ranks = [tuple(group) for group in groups]
    if not ranks:
        raise UsageError("no groups were given.")
    if (highest := max(map(max, ranks))) >= cluster.n_devices:
        raise UsageError(f"rank {highest} is not on {cluster} ({cluster.n_devices} devices).")
    flat = np.array([rank for group in ranks for rank in group])
    group_of = np.repeat(np.arange(len(ranks)), [len(group) for group in ranks])
    crossings, unit, inside = [], 1, 1
    for level in cluster.levels:
        below, unit = unit, unit * level.size
        _, together = np.unique(group_of * cluster.n_devices + flat // unit, return_counts=True)
        shared = int(together.min())
        if shared > inside:
            crossings.append(_crossing(level, below, inside, shared, flat))
        inside = max(inside, shared)
    members = min(map(len, ranks))
    return Groups(members, tuple(crossings), _library(cluster))


def _library(cluster: Cluster) -> str:
    name = cluster.device.name
    return "gloo" if name == "CPU" else "rccl" if name.startswith("MI") else "nccl"


def _crossing(
    level: Level, below: int, inside: int, shared: int, ranks: NDArray[np.int64]
) -> Crossing:
    units, counts = np.unique(ranks // below, return_counts=True)
    rate = min(level.port_bytes_per_s(unit) for unit in units.tolist())
    # Idle devices leave their part of shared ports and switches to the others.
    share = below / (level.devices_per_port * level.oversubscription) / int(counts.max())
    member = rate * min(1.0, share)
    pair = member
    if level.link.point_to_point:  # one link to each other unit
        pair = member / (level.size - 1)
        member = pair * (ceil(shared / inside) - 1)
    return Crossing(
        inside, shared, member, pair, level.link.latency_s,
        is_network=level.link.name == "network", nvls=level.nvls,
    )  # fmt: skip


def pipeline_ports(
    cluster: Cluster, mesh: Mesh
) -> dict[tuple[int, int], tuple[tuple[int, int], tuple[int, int]]]:
    """By (rank, rank) of the pipeline the ports, as (level, number), that what the first sends to
    the second leaves and enters by: those of the outermost level between them.

    The first data and tensor ranks stand for all, which send at the same time.
    """
    stride, ranks = mesh.data * mesh.tensor, range(mesh.pipeline)
    return {
        (a, b): _pair_ports(cluster, a * stride, b * stride) for a in ranks for b in ranks if a != b
    }


def _pair_ports(
    cluster: Cluster, source: int, target: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    unit, crossed = 1, 0
    for number, level in enumerate(cluster.levels):
        if source // unit != target // unit:
            crossed = number
        unit *= level.size
    shared = cluster.levels[crossed].devices_per_port
    return (crossed, source // shared), (crossed, target // shared)


def neighbours(cluster: Cluster, mesh: Mesh, stage: int) -> Groups:
    """The pairs of ranks that pipeline stage `stage` and the next one are joined by.

    All pairs send at once; a pair within a node doesn't count where another crosses nodes.
    """
    stride = mesh.data * mesh.tensor
    if not 0 <= stage < mesh.pipeline - 1:
        raise UsageError(f"stage {stage} of {mesh.pipeline} has no next stage.")
    return _neighbours(cluster, stride, stage)


@cache
def _neighbours(cluster: Cluster, stride: int, stage: int) -> Groups:
    """Of stages of `stride` ranks."""
    pairs = [(rank, rank + stride) for rank in range(stage * stride, (stage + 1) * stride)]
    return lay_out(cluster, pairs)
