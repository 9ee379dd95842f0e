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
from ir.machines import Host, MemoryLevel, memory_levels, usual_host
from ir.mixed import Nodes, Part, join, least_of
from ir.spec import read_spec
from ir.topology import NODE, Level, cpu_device, local_levels, named_device, ram_bytes
from ir.topology_text import levels_from_nccl_xml, levels_from_nvidia_smi
from ir.yaml_values import read_text

__all__ = ["AXES", "GIB", "Cluster", "Device", "Level", "Link", "Mesh"]

AXES = ("pipeline", "data", "tensor")  # outermost first
MOST_DEVICES = 100_000
"""Of a cluster: far beyond any that a step was run on; more is a slip."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices on nested levels, innermost first: 8 by NVLink, then 4 nodes by a network.

    `device` is in every place; where `nodes` hold different ones (in rank order), it is the
    slowest with the least memory of them. `usd_per_hour`: of the whole cluster, 0 if not known.
    `own_host`: what the host has for each device, where it is not the usual machine's.
    `calibration`: what was measured of these devices.
    """

    device: Device
    levels: tuple[Level, ...]
    nodes: tuple[Nodes, ...] = ()
    usd_per_hour: float = 0.0
    own_host: Host | None = None
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        if self.n_devices > MOST_DEVICES:
            raise UsageError(f"{self} has {self.n_devices} devices; {MOST_DEVICES} are the most.")

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

    @property
    def host(self) -> Host:
        """What the host has for each device; nothing is known of a CPU process's."""
        known = self.own_host or (usual_host(self.device) if self.device.sm_count else None)
        return known or Host(0.0, 0)

    @property
    def memory_levels(self) -> tuple[MemoryLevel, ...]:
        """What one device can use, from registers to NVMe."""
        return memory_levels(self.device, self.host)

    def device_of(self, rank: int) -> Device:
        """The device in that place."""
        if not 0 <= rank < self.n_devices:
            raise UsageError(f"rank {rank} is not on {self} ({self.n_devices} devices).")
        left = rank // self.devices_per_node
        for part in self.nodes:
            if left < part.count:
                return part.device
            left -= part.count
        return self.device

    def __str__(self) -> str:
        per_node = self.devices_per_node
        parts = self.nodes or (Nodes(self.n_devices // per_node, self.device),)
        return " + ".join(f"{part.count}x{per_node} {part.device.name}" for part in parts)

    @staticmethod
    def parse(spec: str) -> "Cluster":
        """The cluster that a spec or a cluster.yaml describes; `UsageError` if it makes no sense.

        >>> str(Cluster.parse("4x8xh100"))
        '4x8 H100-SXM'
        """
        if spec.endswith((".yaml", ".yml")):
            counted = None if Path(spec).exists() else re.fullmatch(r"(\d+)x(.+)", spec)
            if counted is None:
                return Cluster(**read_cluster_file(Path(spec)))
            return Cluster(**read_cluster_file(Path(counted[2]), int(counted[1])))
        if spec.endswith(".xml"):
            return Cluster.from_nccl_xml(read_text(Path(spec)))
        compact = re.sub(r"\s", "", spec)
        if local := re.fullmatch(r"local:(\d+)|(?:(\d+)x)?CPU", compact, re.IGNORECASE):
            return Cluster.local(int(local[1] or local[2] or 1))
        if compact.lower().startswith("local"):
            raise UsageError(f"cluster {spec!r}: local:N is N processes here, as in local:4.")
        parts = re.split(r"\+(?=\d)", compact)
        if len(parts) > 1:
            found = [read_spec(part, spec, spare=1)[:2] for part in parts]
            return Cluster(*join([Part(device, levels, 1) for device, levels in found]))
        device, levels, host = read_spec(compact, spec)
        return Cluster(device, levels, own_host=host)

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
            "device": _device_json(self.device),
            "levels": [_level_json(level) for level in self.levels],
            **self._facts_json(),
        }

    def _facts_json(self) -> dict[str, Any]:
        """Of the other fields those that say something."""
        facts: dict[str, Any] = {}
        if self.nodes:
            facts["device_is"] = least_of(self.nodes)  # for people; its name is the slowest kind's
            facts["nodes"] = [[n.count, _device_json(n.device)] for n in self.nodes]
        if self.usd_per_hour:
            facts["usd_per_hour"] = self.usd_per_hour
        if self.own_host:
            facts["own_host"] = asdict(self.own_host)
        if self.calibration:
            facts["calibration"] = self.calibration.to_json()
        return facts

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "Cluster":
        """The cluster that `to_json` wrote; `UsageError` if the value has another shape."""
        try:
            levels = tuple(_level_from_json(level) for level in value["levels"])
            measured = value.get("calibration")
            return Cluster(
                _device_from_json(value["device"]),
                levels,
                tuple(Nodes(n, _device_from_json(item)) for n, item in value.get("nodes", ())),
                value.get("usd_per_hour", 0.0),
                Host(**value["own_host"]) if "own_host" in value else None,
                Calibration.from_json(measured) if measured else None,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
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


def _device_json(device: Device) -> dict[str, Any]:
    return {**asdict(device), "peaks": dict(device.peaks)}


def _device_from_json(value: Mapping[str, Any]) -> Device:
    return Device(**{**value, "peaks": tuple(value["peaks"].items())})


def _level_json(level: Level) -> dict[str, Any]:
    """Size and link, and of the other fields those that say something."""
    values = asdict(level)
    plain = {f.name: f.default for f in fields(Level)}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items() if v != plain[k]}


def _level_from_json(value: Mapping[str, Any]) -> Level:
    values: dict[str, Any] = {**value, "link": Link(**value["link"])}
    return Level(**{**values, "port_rates": tuple(value.get("port_rates", ()))})
