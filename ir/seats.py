"""Where the ranks of a mesh sit that has fewer ranks than the cluster has devices.

Input: a cluster, a number of ranks. Output: on how many nodes and how many devices of each they
lie, and the cluster that they see. They fill the first nodes, each with as many ranks as the
others, so that one command per node starts them; the devices that are left idle. Where nodes hold
different devices, they fill those of the fastest kind that has enough.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil

from ir.cluster import Cluster
from ir.errors import UsageError
from ir.mixed import Nodes, pace, slowest
from ir.topology import Level


@dataclass(frozen=True, slots=True)
class Seats:
    """The first `per_node` devices of each of `nodes` nodes, from node `first` on."""

    nodes: int
    per_node: int
    first: int = 0

    def text(self, cluster: Cluster) -> str:
        """Which devices of the cluster these are."""
        each = f"the first {self.per_node}" if self.per_node > 1 else "the first"
        if cluster.n_devices == cluster.devices_per_node:
            return each
        last = self.first + self.nodes - 1
        nodes = f"nodes {self.first} to {last}" if self.nodes > 1 else f"node {last}"
        whole = self.per_node == cluster.devices_per_node
        return nodes if whole else f"{each} of {'each of ' * (self.nodes > 1)}{nodes}"


def seats(cluster: Cluster, ranks: int) -> Seats | None:
    """On as few nodes as can be; None where they can't lie evenly.

    >>> seats(Cluster.parse("4x6xH100-SXM"), 16)
    Seats(nodes=4, per_node=4, first=0)
    """
    everywhere = 0, cluster.n_devices // cluster.devices_per_node
    for first, nodes in (*_alike_nodes(cluster), everywhere):
        found = _seats_among(cluster, ranks, nodes)
        if found is not None:
            return replace(found, first=first)
    return None


def _alike_nodes(cluster: Cluster) -> list[tuple[int, int]]:
    """(First, number) of nodes in a row with the same device, those with the fastest first."""
    runs, first = [], 0
    for part in cluster.nodes:
        runs.append((-pace(part.device), first, part.count))
        first += part.count
    return [(first, count) for _, first, count in sorted(runs)]


def _seats_among(cluster: Cluster, ranks: int, most: int) -> Seats | None:
    for nodes in range(ceil(ranks / cluster.devices_per_node), min(most, ranks) + 1):
        if ranks % nodes == 0 and _sizes(cluster, ranks // nodes) is not None:
            return Seats(nodes, ranks // nodes)
    return None


def seats_of(cluster: Cluster, ranks: int) -> Seats:
    """As `seats`; `UsageError` where so many ranks can't use a part of the cluster."""
    found = seats(cluster, ranks)
    if ranks > cluster.n_devices:
        raise UsageError(f"{ranks} ranks are more than the {cluster.n_devices} devices {cluster}.")
    if found is None:
        below = next(n for n in range(ranks - 1, 0, -1) if seats(cluster, n))
        above = next(n for n in range(ranks + 1, cluster.n_devices + 1) if seats(cluster, n))
        raise UsageError(
            f"{ranks} ranks can't lie on the nodes of {cluster} with as many on each. Use pins for "
            f"{below} or {above} devices."
        )
    if ranks < cluster.n_devices and shares_cores(cluster):
        raise UsageError(
            f"{ranks} ranks on {cluster}: it was measured with {cluster.n_devices} processes at "
            f"once, which is not what fewer take. Plan for so many: --cluster {ranks}xFILE.yaml."
        )
    return found


def may_rest(cluster: Cluster, ranks: int) -> bool:
    """Whether so many ranks can use it and leave the other devices idle."""
    return not shares_cores(cluster) and seats(cluster, ranks) is not None


def shares_cores(cluster: Cluster) -> bool:
    """Whether it was measured with as many processes as it has, which share cores."""
    return cluster.calibration is not None and cluster.calibration.cores > 0


def seated(cluster: Cluster, ranks: int) -> Cluster:
    """The cluster in which these ranks, one after the other, lie where they sit: nodes with as many
    devices as are used. Whole nodes, and a part of one node, are the first devices already, but
    where nodes hold different devices: then the slowest of those that are used is in every place.

    Of a link from each device to each other one, those to idle devices are idle; ports and switches
    serve the devices that are left.
    """
    found = seats(cluster, ranks)
    if found is None:
        return cluster
    if cluster.nodes:
        cluster = only_nodes(cluster, found)
    if found.nodes == 1 or found.per_node == cluster.devices_per_node:
        return cluster
    sizes = _sizes(cluster, found.per_node)
    assert sizes is not None  # seats() asked
    inner, outer = cluster.levels[: len(sizes)], cluster.levels[len(sizes) :]
    share = found.per_node / cluster.devices_per_node
    return replace(
        cluster,
        levels=(
            *(_smaller(level, size) for level, size in zip(inner, sizes, strict=True)),
            *(_less_busy(level, found.per_node, share) for level in outer),
        ),
    )


def only_nodes(cluster: Cluster, found: Seats) -> Cluster:
    """These nodes alone, of a cluster whose nodes differ and are joined by one level."""
    held = [part.device for part in cluster.nodes for _ in range(part.count)]
    used = held[found.first : found.first + found.nodes]
    runs = [Nodes(len([*group]), device) for device, group in groupby(used)]
    unit, levels = 1, []
    for level in cluster.levels:
        ports = cluster.devices_per_node // unit or 1  # of a node
        first, last = found.first * ports, (found.first + found.nodes) * ports
        rates = tuple(level.port_rates[i % len(level.port_rates)] for i in range(first, last)
                      if level.port_rates)  # fmt: skip
        is_across = unit == cluster.devices_per_node
        unit *= level.size
        size = found.nodes if is_across else level.size
        levels.append(replace(level, size=size, port_rates=rates))
    nodes = tuple(runs) if len(runs) > 1 else ()
    return replace(cluster, device=slowest(used), levels=tuple(levels), nodes=nodes)


def _sizes(cluster: Cluster, per_node: int) -> list[int] | None:
    """Of the levels inside a node with so many devices: inner ones full, then a part of one; None
    where that part is uneven."""
    left, unit, sizes = per_node, 1, []
    for level in cluster.levels:
        if unit == cluster.devices_per_node:
            break
        unit *= level.size
        if left >= level.size and left % level.size:
            return None
        sizes.append(min(left, level.size))
        left = max(1, left // level.size)
    return sizes


def _smaller(level: Level, size: int) -> Level:
    """A level inside the node with fewer units; where those differ, each as the slowest."""
    link = level.link
    rate = min(level.port_rates or (link.bandwidth_bytes_per_s,))
    if link.point_to_point and size > 1:
        rate *= (size - 1) / (level.size - 1)
    return replace(
        level, size=size, link=replace(link, bandwidth_bytes_per_s=rate), port_rates=(),
        devices_per_port=min(level.devices_per_port, size),
    )  # fmt: skip


def _less_busy(level: Level, per_node: int, share: float) -> Level:
    """A level that joins nodes, of whose devices only a `share` sends."""
    return replace(
        level, devices_per_port=min(level.devices_per_port, per_node),
        oversubscription=max(1.0, level.oversubscription * share),
    )  # fmt: skip
