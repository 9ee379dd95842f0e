"""Pipeline stages on nodes that hold different devices: in which order, and what each stage has.

Input: a cluster, a mesh, an order of its groups of nodes. Output: the cluster in that order; per
pipeline rank the part of the cluster that it shares with stages on the same devices, as a cluster
and a mesh of its own. A stage lies on one kind of device, or counts all as the slowest it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import groupby, permutations

from ir.cluster import Cluster, Mesh
from ir.device import Device
from ir.mixed import Nodes, pace, slowest
from ir.seats import Seats, only_nodes, seated
from ir.topology import Level

FEW_KINDS = 3
"""Of devices whose orders are all tried; of more, only the fastest first and the slowest first."""

Order = tuple[int, ...]
"""Groups of alike nodes (numbers in `Cluster.nodes`) by rank; () is as the cluster lists them."""


@lru_cache(maxsize=64)
def node_orders(cluster: Cluster) -> list[Order]:
    """As listed, then the other ones in which nodes of a kind are in a row.

    >>> node_orders(Cluster.parse("1x8xH100-SXM+1x8xA100-80GB"))
    [(), (1, 0)]
    """
    kinds = list(dict.fromkeys(part.device for part in cluster.nodes))
    tried = list(permutations(kinds))
    if len(kinds) > FEW_KINDS:
        fastest = sorted(kinds, key=lambda device: -pace(device))
        tried = [tuple(fastest), tuple(reversed(fastest))]
    found: dict[tuple[Nodes, ...], Order] = {in_order(cluster, ()).nodes: ()}
    for devices in tried:
        numbers = range(len(cluster.nodes))
        order = tuple(sorted(numbers, key=lambda n: devices.index(cluster.nodes[n].device)))
        found.setdefault(in_order(cluster, order).nodes, order)
    return list(found.values())


def mesh_orders(cluster: Cluster, mesh: Mesh) -> list[Order]:
    """Those in which stages of a mesh lie on different devices; where none does, as listed. With
    idle devices too: which of them are used does not depend on it."""
    if not cluster.nodes or mesh.pipeline == 1 or mesh.size < cluster.n_devices:
        return [()]
    orders = node_orders(cluster)
    return [o for o in orders if any(stage_parts(in_order(cluster, o), mesh))] or [()]


@lru_cache(maxsize=1024)
def in_order(cluster: Cluster, order: Order) -> Cluster:
    """The cluster whose ranks lie on its groups of nodes in that order."""
    if not order:
        return cluster
    firsts, first = [], 0
    for part in cluster.nodes:
        firsts.append(first)
        first += part.count
    nodes = [i for n in order for i in range(firsts[n], firsts[n] + cluster.nodes[n].count)]
    return replace(
        cluster, nodes=_joined([cluster.nodes[n] for n in order]),
        levels=tuple(_moved(level, below, cluster, nodes) for level, below in _with_units(cluster)),
    )  # fmt: skip


def _joined(parts: list[Nodes]) -> tuple[Nodes, ...]:
    """Neighbours with the same device are one group."""
    found: list[Nodes] = []
    for part in parts:
        if found and found[-1].device == part.device:
            part = Nodes(found.pop().count + part.count, part.device)
        found.append(part)
    return tuple(found)


def _with_units(cluster: Cluster) -> Iterator[tuple[Level, int]]:
    """The levels, each with how many devices a unit of the one below has."""
    below = 1
    for level in cluster.levels:
        yield level, below
        below *= level.size


def _moved(level: Level, below: int, cluster: Cluster, nodes: list[int]) -> Level:
    """A level whose ports have gone with their nodes."""
    rates, ports = level.port_rates, cluster.devices_per_node // below or 1
    moved = [rates[(n * ports + i) % len(rates)] for n in nodes for i in range(ports) if rates]
    return replace(level, port_rates=tuple(moved))


@lru_cache(maxsize=1024)
def stage_parts(cluster: Cluster, mesh: Mesh) -> tuple[tuple[Cluster, Mesh] | None, ...]:
    """Per pipeline rank where it lies; None where that is all that the mesh uses.

    Alike stages in a row that fill their nodes see these nodes alone. Another stage sees all links,
    and the slowest of its own devices.
    """
    used = seated(cluster, mesh.size)
    if not used.nodes or mesh.pipeline == 1 or used.calibration is not None:
        return (None,) * mesh.pipeline
    return tuple(_part(used, mesh, rank) for rank in range(mesh.pipeline))


def held_devices(cluster: Cluster, mesh: Mesh, rank: int) -> list[Device]:
    """The devices of the groups of alike nodes that a pipeline rank lies on, in order."""
    used, each = seated(cluster, mesh.size), mesh.data * mesh.tensor
    per_node, first, found = used.devices_per_node, 0, []
    for part in used.nodes:
        if first * per_node < (rank + 1) * each and rank * each < (first + part.count) * per_node:
            found.append(part.device)
        first += part.count
    return found or [used.device]


def _part(cluster: Cluster, mesh: Mesh, rank: int) -> tuple[Cluster, Mesh] | None:
    each, per_node = mesh.data * mesh.tensor, cluster.devices_per_node
    low, high, first = rank * each, (rank + 1) * each, 0
    for part in cluster.nodes:
        start, end = first * per_node, (first + part.count) * per_node
        if start <= low and high <= end and start % each == 0 and end % each == 0:
            alone = only_nodes(cluster, Seats(part.count, per_node, first))
            return _with_host(alone, cluster), replace(mesh, pipeline=(end - start) // each)
        first += part.count
    device = slowest(held_devices(cluster, mesh, rank))
    if device == cluster.device:
        return None
    return _with_host(replace(cluster, device=device, nodes=()), cluster), mesh


def _with_host(part: Cluster, cluster: Cluster) -> Cluster:
    """Every host is taken as the one that the cluster as a whole can rely on."""
    return replace(part, own_host=cluster.host)


def stage_devices(cluster: Cluster, mesh: Mesh) -> tuple[Device, ...]:
    """Per pipeline rank the device that it counts on in every place."""
    device = seated(cluster, mesh.size).device
    return tuple(part[0].device if part else device for part in stage_parts(cluster, mesh))


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
    for rank in range(mesh.pipeline):
        held = list(dict.fromkeys(d.name for d in held_devices(cluster, mesh, rank)))
        alike = ", each taken as one with the least rates and memory of them" if held[1:] else ""
        found.append(f"{' and '.join(held)}{alike}")
    return found
