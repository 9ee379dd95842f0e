"""The hardware that a plan is for: devices, the levels of links that join them, a mesh over them.

Input: a spec ("4x8xH100-SXM", "local:4", "cluster.yaml"). Output: a frozen `Cluster`, and what
each axis of a `Mesh` on it sees: how its groups lie on the levels and the link they get.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from ir.device import GIB, Device, Link, find_device, inner_link, network_link
from ir.errors import UsageError

__all__ = ["AXES", "GIB", "Cluster", "Device", "Level", "Link", "Mesh"]

AXES = ("pipeline", "data", "tensor")  # outermost first

_GRAMMAR = (
    "Write [NODES x] [DEVICES x] DEVICE, for example 4x8xH100-SXM (4 nodes of 8), 8xA100-80GB, "
    "H200-SXM; or local:4 for 4 processes on this machine; or the path of a cluster.yaml."
)
_FILE_KEYS = {
    "nodes",
    "devices_per_node",
    "device",
    "memory_GiB",
    "intra_bandwidth_GBps",
    "intra_latency_us",
    "inter_bandwidth_GBps",
    "inter_latency_us",
}


@dataclass(frozen=True, slots=True)
class Level:
    """`size` units of the level below (devices, at the innermost), joined by `link`."""

    size: int
    link: Link


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal devices on nested levels, innermost first: 8 by NVLink, then 4 nodes by a network."""

    device: Device
    levels: tuple[Level, ...]

    @property
    def n_devices(self) -> int:
        """How many devices there are."""
        return prod(level.size for level in self.levels)

    def __str__(self) -> str:
        sizes = [level.size for level in reversed(self.levels)]
        sizes = [1] * (2 - len(sizes)) + sizes
        return f"{'x'.join(map(str, sizes))} {self.device.name}"

    @staticmethod
    def parse(spec: str) -> "Cluster":
        """The cluster that a spec or a cluster.yaml describes; `UsageError` if it makes no sense.

        >>> str(Cluster.parse("4x8xh100"))
        '4x8 H100-SXM'
        """
        if spec.endswith((".yaml", ".yml")):
            return _read_file(Path(spec))
        compact = re.sub(r"\s", "", spec)
        if local := re.fullmatch(r"local:(\d+)", compact, re.IGNORECASE):
            return Cluster.local(int(local[1]))
        name = r"(?!\d+x|x)([a-z].*|\d{3,}.*)"
        match = re.fullmatch(rf"(?:(\d+)x)?(?:(\d+)x)?{name}", compact, re.IGNORECASE)
        counts = [int(count) for count in match.groups()[:2] if count] if match else [0]
        if match is None or 0 in counts:
            raise UsageError(f"cluster {spec!r} can't be read. {_GRAMMAR}")
        nodes, devices_per_node = [1] * (2 - len(counts)) + counts
        return _usual_cluster(match[3], nodes, devices_per_node)

    @staticmethod
    def local(n: int, memory_GiB: float | None = None) -> "Cluster":
        """`n` CPU processes on this machine, each with its share of the RAM.

        The rates are modest round numbers (50 GFLOP/s, 10 GB/s per process, 1 GB/s between two):
        good for choosing among plans, not for predicting seconds.
        """
        if n < 1:
            raise UsageError(f"local:{n}: at least one process is needed.")
        memory_bytes = int(memory_GiB * GIB) if memory_GiB is not None else _ram_bytes() // n
        rates = (("float32", 50e9), ("float64", 25e9), ("bfloat16", 25e9), ("float16", 25e9))
        device = Device(
            name="CPU",
            peaks=rates,
            memory_bytes=memory_bytes,
            memory_bandwidth_bytes_per_s=10e9,
            reserve_bytes=min(memory_bytes // 10, GIB // 2),
        )
        return Cluster(device, (Level(n, Link("shared memory", 1e9, 50e-6)),))

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file; `from_json` reads them back to an equal cluster."""
        return {
            "device": {**asdict(self.device), "peaks": dict(self.device.peaks)},
            "levels": [asdict(level) for level in self.levels],
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "Cluster":
        """The cluster that `to_json` wrote; `UsageError` if the value has another shape."""
        try:
            device = dict(value["device"])
            device["peaks"] = tuple(device["peaks"].items())
            levels = tuple(Level(lv["size"], Link(**lv["link"])) for lv in value["levels"])
            return Cluster(Device(**device), levels)
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
                rates.append((level.link.sustained_bytes_per_s * inside * share, level.link))
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
        return Link(link.name, link.sustained_bytes_per_s * share, link.latency_s)

    def _groups(self, axis: str) -> Iterator[range]:
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
        groups = (Counter(rank // unit for rank in group) for group in mesh._groups(axis))
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


def _usual_cluster(name: str, nodes: int, devices_per_node: int) -> Cluster:
    """Nodes of that device with the links such machines usually have."""
    levels = [Level(devices_per_node, inner_link(name, devices_per_node))]
    if nodes > 1:
        levels.append(Level(nodes, network_link(name)))
    return Cluster(find_device(name), tuple(levels))


def _ram_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read_file(path: Path) -> Cluster:
    """A cluster.yaml: `device` and, each optional, the other keys of `_FILE_KEYS`.

    Bandwidths are what a device gets per direction; a given one is taken as sustained.
    """
    values = _load_yaml(path)
    if unknown := sorted(set(values) - _FILE_KEYS):
        keys = ", ".join(sorted(_FILE_KEYS))
        raise UsageError(f"{path}: unknown key {unknown[0]!r}. Known: {keys}.")
    name = values.get("device")
    if not isinstance(name, str):
        raise UsageError(f"{path}: `device` must name a device (device: H100-SXM), not {name!r}.")
    counts = [_positive(values, key, path, 1) for key in ("nodes", "devices_per_node")]
    if any(count != int(count) for count in counts):
        raise UsageError(f"{path}: nodes and devices_per_node must be whole numbers.")
    cluster = _usual_cluster(name, int(counts[0]), int(counts[1]))
    device, levels = cluster.device, cluster.levels
    if "memory_GiB" in values:
        memory_bytes = int(_positive(values, "memory_GiB", path) * GIB)
        scale = memory_bytes / device.memory_bytes
        reserve_bytes = int(device.reserve_bytes * min(1.0, scale))
        device = replace(device, memory_bytes=memory_bytes, reserve_bytes=reserve_bytes)
    prefixes = ("intra", "inter")[: len(levels)]
    links = [_overridden(lv.link, values, p, path) for lv, p in zip(levels, prefixes, strict=True)]
    return Cluster(device, tuple(Level(lv.size, k) for lv, k in zip(levels, links, strict=True)))


def _load_yaml(path: Path) -> dict[str, Any]:
    try:
        import yaml  # optional: only a cluster.yaml needs it
    except ImportError as error:
        raise UsageError(f"reading {path} needs PyYAML: pip install pyyaml.") from error
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not YAML: {error}.") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} must hold keys and values, such as `device: H100-SXM`.")
    return {str(key): value for key, value in values.items()}


def _positive(values: dict[str, Any], key: str, path: Path, default: float = 0) -> float:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise UsageError(f"{path}: `{key}` must be a positive number, not {value!r}.")
    return float(value)


def _overridden(link: Link, values: dict[str, Any], prefix: str, path: Path) -> Link:
    if (key := f"{prefix}_bandwidth_GBps") in values:
        rate = _positive(values, key, path) * 1e9
        link = replace(link, bandwidth_bytes_per_s=rate, achievable=1.0)
    if (key := f"{prefix}_latency_us") in values:
        link = replace(link, latency_s=_positive(values, key, path) * 1e-6)
    return link
