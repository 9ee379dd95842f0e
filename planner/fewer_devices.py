"""Meshes that leave devices of a cluster idle, where they may be faster than those of all devices.

Input: a cluster, pins, the meshes of all devices that have plans, what the model and the batch can
share. Output: the meshes of fewer devices that are worth a look.

All devices are useless where they can't share the work: 7 of them a batch of 8, 100 of them one of
64. Where they can, a mesh of fewer devices does nothing that one of all devices doesn't do with
more, so it is left out if a larger mesh *covers* it: has more than half its degree on every axis.
Within such a step larger meshes trade one axis for another. What a larger mesh loses by its traffic
alone is not looked at: over a slow network one node can be faster than two. But a mesh of all
devices whose tensor axis has nothing to cut stands for one with fewer, whatever covers that. Where
nodes hold different devices, all nodes of each kind are looked at alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ir.cluster import AXES, Cluster, Mesh
from ir.seats import may_rest, shares_cores
from ir.variants import Variant
from planner.pins import Pins, divisors, meshes


@dataclass(frozen=True, slots=True)
class Shares:
    """What ranks can share: the stages and the rows that there are at most, and the model's tensor
    degrees. `usable`: whether a mesh has a plan by these and the pins."""

    stages: int
    rows: int
    tensor: Sequence[int]
    usable: Callable[[Mesh], bool]


def tensor_degrees(kinds: Sequence[Variant], most: int) -> list[int]:
    """The degrees that divide some tensor of the model, in order."""
    sizes = {size for kind in kinds for size in kind.factors.size.values() if type(size) is int}
    return sorted({d for size in sizes for d in divisors(size) if d <= most} | {1})


def fewer_devices(
    cluster: Cluster, pins: Pins, whole: Sequence[Mesh], shares: Shares
) -> list[Mesh]:
    """Those that no mesh of `whole` and no other of them covers, the largest first. None on a
    machine that was measured as it is, all processes at once; if the pins say so, just one."""
    if pins.pipeline and pins.data and pins.tensor:
        mesh = Mesh(pins.pipeline, pins.data, pins.tensor)
        return [mesh] * (mesh.size < cluster.n_devices and shares.usable(mesh))
    if shares_cores(cluster):
        return []
    found = sorted(_largest(cluster, pins, whole, shares), key=_largest_first)
    kept = _of_one_kind(cluster, pins, shares)
    for mesh in found:
        if not any(_covers(other, mesh) for other in kept) and mesh not in kept:
            kept.append(mesh)
    kept += [mesh for mesh in _without_repetition(cluster, pins, shares) if mesh not in kept]
    return kept


def _without_repetition(cluster: Cluster, pins: Pins, shares: Shares) -> Iterator[Mesh]:
    """For meshes of all devices whose tensor axis has nothing to cut, by no part of its degree:
    ranks that would repeat the work of others are left out."""
    for mesh in meshes(pins, cluster.n_devices) if pins.tensor is None else ():
        repeats = mesh.tensor > 1 and all(mesh.tensor % d for d in shares.tensor if d > 1)
        smaller = Mesh(mesh.pipeline, mesh.data)
        if repeats and may_rest(cluster, smaller.size) and shares.usable(smaller):
            yield smaller


def _of_one_kind(cluster: Cluster, pins: Pins, shares: Shares) -> list[Mesh]:
    """Where nodes hold different devices, the meshes of all nodes of each kind; of kinds with as
    many nodes, those of the faster one."""
    sizes = dict.fromkeys(part.count * cluster.devices_per_node for part in cluster.nodes)
    return [mesh for n in sizes for mesh in meshes(pins, n) if shares.usable(mesh)]


def _largest(
    cluster: Cluster, pins: Pins, whole: Sequence[Mesh], shares: Shares
) -> Iterator[Mesh]:
    """For every data and tensor degree the mesh of most stages."""
    most = cluster.n_devices
    for data in _allowed(pins.data, divisors(shares.rows)):
        for tensor in _allowed(pins.tensor, shares.tensor):
            stages = min(shares.stages, most // (data * tensor))
            for pipeline in _allowed(pins.pipeline, range(stages, 0, -1), stages):
                mesh = Mesh(pipeline, data, tensor)
                if any(_covers(other, mesh) for other in whole):
                    break
                fits = mesh.size < most and may_rest(cluster, mesh.size)
                if fits and shares.usable(mesh):
                    yield mesh
                    break


def _allowed(pinned: int | None, degrees: Sequence[int], most: int | None = None) -> Sequence[int]:
    """The pinned degree instead of all."""
    if pinned is None:
        return degrees
    return [pinned] if most is None or pinned <= most else []


def _covers(larger: Mesh, mesh: Mesh) -> bool:
    return larger.size > mesh.size and all(
        2 * larger.degree(axis) > mesh.degree(axis) for axis in AXES
    )


def _largest_first(mesh: Mesh) -> tuple[int, int, int]:
    return -mesh.size, mesh.pipeline, -mesh.data
