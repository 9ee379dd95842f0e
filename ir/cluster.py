"""The hardware that a plan is for: devices, the levels of links that join them, a mesh over them.

Input: a spec ("4x8xH100-SXM", "local:4", "cluster.yaml"). Output: a frozen `Cluster`, and what
each axis of a `Mesh` on it sees: how its groups lie on the levels and the link they get.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from ir.calibration import Calibration
from ir.cluster_file import read_cluster_file
from ir.detect import detected_spec
from ir.device import GIB, Device, Link
from ir.errors import UsageError
from ir.topology import (
    NODE,
    Level,
    cpu_device,
    local_levels,
    named_device,
    ram_bytes,
    usual_levels,
)
from ir.topology_text import levels_from_nccl_xml, levels_from_nvidia_smi

__all__ = ["AXES", "GIB", "Cluster", "Device", "Level", "Link", "Mesh"]

AXES = ("pipeline", "data", "tensor")  # outermost first

_GRAMMAR = (
    "Write [NODES x] [DEVICES x] DEVICE, for example 4x8xH100-SXM (4 nodes of 8), 8xA100-80GB, "
    "H200-SXM, H100-SXM:3g.40gb (a MIG slice); or local:4 for 4 processes on this machine; "
    "or the path of a cluster.yaml; 2xmachine.yaml for 2 devices per node of what it describes."
)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal devices on nested levels, innermost first: 8 by NVLink, then 4 nodes by a network."""

    device: Device
    levels: tuple[Level, ...]
    calibration: Calibration | None = None

    @property
    def n_devices(self) -> int:
        """How many devices there are."""
        return prod(level.size for level in self.levels)

    @property
    def devices_per_node(self) -> int:
        """How many devices one host has: up to the level called "node", else the innermost."""
        names = [level.name for level in self.levels]
        inner = names.index(NODE) + 1 if NODE in names else 1
        return prod(level.size for level in self.levels[:inner])

    @property
    def near_devices(self) -> int:
        """How many devices talk to each other without crossing a network."""
        near = [level.size for level in self.levels if level.link.name != "network"]
        return prod(near)

    def __str__(self) -> str:
        per_node = self.devices_per_node
        return f"{self.n_devices // per_node}x{per_node} {self.device.name}"

    @staticmethod
    def parse(spec: str) -> "Cluster":
        """The cluster that a spec or a cluster.yaml describes; `UsageError` if it makes no sense.

        >>> str(Cluster.parse("4x8xh100"))
        '4x8 H100-SXM'
        """
        if spec.endswith((".yaml", ".yml")):
            counted = None if Path(spec).exists() else re.fullmatch(r"(\d+)x(.+)", spec)
            if counted is None:
                return Cluster(*read_cluster_file(Path(spec)))
            return Cluster(*read_cluster_file(Path(counted[2]), int(counted[1])))
        compact = re.sub(r"\s", "", spec)
        if local := re.fullmatch(r"local:(\d+)", compact, re.IGNORECASE):
            return Cluster.local(int(local[1]))
        name = r"(?!\d+x|x)([a-z].*|\d{3,}.*)"
        match = re.fullmatch(rf"(?:(\d+)x)?(?:(\d+)x)?{name}", compact, re.IGNORECASE)
        counts = [int(count) for count in match.groups()[:2] if count] if match else [0]
        if match is None or 0 in counts:
            raise UsageError(f"cluster {spec!r} can't be read. {_GRAMMAR}")
        nodes, devices_per_node = [1] * (2 - len(counts)) + counts
        return Cluster(named_device(match[3]), usual_levels(match[3], nodes, devices_per_node))

    @staticmethod
    def from_nvidia_smi(text: str, device: str, nodes: int = 1) -> "Cluster":
        """`nodes` nodes that look like this output of `nvidia-smi topo -m`."""
        return Cluster(named_device(device), levels_from_nvidia_smi(text, device, nodes))

    @staticmethod
    def from_nccl_xml(text: str, device: str | None = None, nodes: int = 1) -> "Cluster":
        """`nodes` nodes that look like this topology, written by NCCL_TOPO_DUMP_FILE.

        NCCL writes only the compute capability; without `device` the most usual device with it.
        """
        name, levels = levels_from_nccl_xml(text, device, nodes)
        return Cluster(named_device(name), levels)

    @staticmethod
    def detect(environment: Mapping[str, str] | None = None) -> "Cluster":
        """Where this process runs: NVML's devices on SLURM's nodes, else this machine's CPU."""
        return Cluster.parse(detected_spec(os.environ if environment is None else environment))

    @staticmethod
    def local(n: int, memory_GiB: float | None = None) -> "Cluster":
        """`n` CPU processes on this machine, each with its share of the RAM.

        The rates are modest round numbers (50 GFLOP/s, 10 GB/s per process, 1 GB/s between two):
        good for choosing among plans; `shardwright calibrate` measures what predicts seconds.
        """
        if n < 1:
            raise UsageError(f"local:{n}: at least one process is needed.")
        memory_bytes = int(memory_GiB * GIB) if memory_GiB is not None else ram_bytes() // n
        return Cluster(cpu_device(memory_bytes), local_levels(n))

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file; `from_json` reads them back to an equal cluster."""
        return {
            "device": {**asdict(self.device), "peaks": dict(self.device.peaks)},
            "levels": [_level_json(level) for level in self.levels],
            **({"calibration": self.calibration.to_json()} if self.calibration else {}),
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "Cluster":
        """The cluster that `to_json` wrote; `UsageError` if the value has another shape."""
        try:
            device = dict(value["device"])
            device["peaks"] = tuple(device["peaks"].items())
            levels = tuple(_level_from_json(level) for level in value["levels"])
            measured = value.get("calibration")
            calibration = Calibration.from_json(measured) if measured else None
            return Cluster(Device(**device), levels, calibration)
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"this is not a cluster written by to_json: {error!r}.") from error


@dataclass(frozen=True, slots=True)
class Mesh:
    """Degrees of parallelism; rank = (pipeline_index * data + data_index) * tensor + tensor_index.

    Ranks lie consecutively on the cluster's devices, so the tensor axis has the nearest ones.
    """

    pipeline: int = 1
    data: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.pipeline * self.data * self.tensor

    def __str__(self) -> str:
        return f"pipeline={self.pipeline} data={self.data} tensor={self.tensor}"

    def degree(self, axis: str) -> int:
        """How many members a group of `axis` has."""
        return {"pipeline": self.pipeline, "data": self.data, "tensor": self.tensor}[axis]

    def spread(self, cluster: Cluster, axis: str) -> tuple[int, ...]:
        """Per level, how many members of a group share one unit of it; the last is all of them.

        On 4 nodes of 8: (8, 32) for all 32, (1, 4) for one per node. Where groups differ or lie
        unevenly, the fewest that meet in a unit count, which is never too optimistic.
        """
        return _spread(cluster, self, axis)

    def axis_link(self, cluster: Cluster, axis: str) -> Link:
        """What a ring over a group of `axis` gets, as one link.

        A ring crosses a level with as many members in parallel as share a unit below, each over
        its own port; so the bandwidth is the least of (members * rate) over the levels crossed.
        The latency is the mean over the ring's steps (NCCL 2.30.7 src/graph/tuning.cc counts
        one step less than nodes on the network and the others inside the nodes).
        """
        members, inside = self.degree(axis), 1
        slowest, latency_s = cluster.levels[0].link, 0.0
        rates: list[tuple[float, Link]] = []
        for level, shared in zip(cluster.levels, self.spread(cluster, axis), strict=True):
            if shared > inside:
                share = (shared - 1) / (level.size - 1) if level.link.point_to_point else 1.0
                rates.append((level.device_bytes_per_s * inside * share, level.link))
                steps = members / inside - members / shared
                latency_s += level.link.latency_s * steps / (members - 1)
            inside = shared
        if not rates:
            return slowest
        rate, slowest = min(rates, key=lambda pair: pair[0])
        return Link(slowest.name, rate, latency_s)

    def neighbour_link(self, cluster: Cluster, stage: int) -> Link:
        """The slowest link between a rank of pipeline stage `stage` and its peer in the next."""
        stride = self.data * self.tensor
        ranks = range(stage * stride, (stage + 1) * stride)
        level = max(_level_joining(cluster, rank, rank + stride) for rank in ranks)
        size, link = cluster.levels[level].size, cluster.levels[level].link
        share = 1 / (size - 1) if link.point_to_point else 1.0
        return Link(link.name, cluster.levels[level].device_bytes_per_s * share, link.latency_s)

    def groups(self, axis: str) -> Iterator[range]:
        """The ranks of each group of `axis`."""
        degree = self.degree(axis)
        stride = {"pipeline": self.data * self.tensor, "data": self.tensor, "tensor": 1}[axis]
        for first in range(self.size):
            if first // stride % degree == 0:
                yield range(first, first + degree * stride, stride)


@cache
def _spread(cluster: Cluster, mesh: Mesh, axis: str) -> tuple[int, ...]:
    if mesh.size > cluster.n_devices:
        raise UsageError(
            f"mesh {mesh} needs {mesh.size} devices, {cluster} has {cluster.n_devices}."
        )
    spread, unit = [], 1
    for level in cluster.levels:
        unit *= level.size
        groups = (Counter(rank // unit for rank in group) for group in mesh.groups(axis))
        spread.append(min(min(group.values()) for group in groups))
    return tuple(spread)


def _level_joining(cluster: Cluster, a: int, b: int) -> int:
    """The innermost level that has both ranks in one unit."""
    unit = 1
    for index, level in enumerate(cluster.levels):
        unit *= level.size
        if a // unit == b // unit:
            return index
    raise UsageError(f"rank {max(a, b)} is not on {cluster} ({cluster.n_devices} devices).")


def _level_json(level: Level) -> dict[str, Any]:
    """Size and link, and of the other fields those that say something."""
    values = asdict(level)
    plain = {f.name: f.default for f in fields(Level)}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items() if v != plain[k]}


def _level_from_json(value: Mapping[str, Any]) -> Level:
    values: dict[str, Any] = {**value, "link": Link(**value["link"])}
    return Level(**{**values, "port_rates": tuple(value.get("port_rates", ()))})
