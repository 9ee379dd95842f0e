"""Clusters whose nodes hold different devices: what each node holds, and what all can rely on.

Input: parts of a cluster, each some alike nodes. Output: the slowest device, whose pace every
step waits for, and `Level`s with each node's own rates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, prod

from ir.device import Device
from ir.errors import UsageError
from ir.topology import DOMAIN, NETWORK, NODE, Level, network

NODES_TOGETHER = (NETWORK, DOMAIN)


@dataclass(frozen=True, slots=True)
class Nodes:
    """Some nodes in a row that hold the same device in every place."""

    count: int
    device: Device


@dataclass(frozen=True, slots=True)
class Part:
    """Alike nodes of a cluster, with the levels that they would have alone.

    `spare`: of the nodes that the levels join so many are not there; with one, the levels of a
    single node say what network it is on.
    """

    device: Device
    levels: tuple[Level, ...]
    spare: int = 0

    @property
    def within(self) -> tuple[Level, ...]:
        """The levels inside one node."""
        return tuple(x for x in self.levels if x.name not in NODES_TOGETHER)

    @property
    def devices_per_node(self) -> int:
        """How many devices a node holds."""
        return prod(level.size for level in self.within)

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return prod(level.size for level in self.levels) // self.devices_per_node - self.spare

    @property
    def across(self) -> Level:
        """The network of these nodes; a usual one where NVLink joins them."""
        found = [level for level in self.levels if level.name == NETWORK]
        return found[-1] if found else Level(1, network(self.device.name), NETWORK)


def pace(device: Device) -> float:
    """By which devices are compared: the matrix rate that large products reach."""
    return device.peak_flops_per_s("bfloat16") * device.matmul_fraction


def slowest(devices: Sequence[Device]) -> Device:
    """The device with the least matrix rate, with the least memory and rates of all of them.

    What is planned for it fits on every device and is as fast on every device.
    """
    slow = min(devices, key=lambda d: (pace(d), d.name))
    least = min(devices, key=lambda d: d.usable_bytes)
    shared = {dtype for dtype, _ in slow.peaks if all(dtype in dict(d.peaks) for d in devices)}
    return replace(
        slow,
        peaks=tuple(
            (dtype, min(dict(d.peaks)[dtype] for d in devices))
            for dtype, _ in slow.peaks
            if dtype in shared
        ),
        memory_bytes=least.memory_bytes,
        reserve_bytes=least.reserve_bytes,
        memory_bandwidth_bytes_per_s=min(d.memory_bandwidth_bytes_per_s for d in devices),
    )


def least_of(nodes: Sequence[Nodes]) -> str:
    """What devices are taken as where they differ, by the kinds' names."""
    names = list(dict.fromkeys(part.device.name for part in nodes))
    return f"a device with the least rates and memory of {' and '.join(names)}"


def join(parts: Sequence[Part]) -> tuple[Device, tuple[Level, ...], tuple[Nodes, ...]]:
    """One cluster of all parts' nodes: its slowest device, its levels, what the nodes hold.

    Raises `UsageError` for nodes that can't work together.
    """
    _check_alike(parts)
    within = [_merged(levels) for levels in zip(*_same_depth(parts), strict=True)]
    ports = [(part.across, part.nodes) for part in parts]
    across = replace(_merged(ports), size=sum(part.nodes for part in parts), name=NETWORK)
    nodes: list[Nodes] = []
    for part in parts:
        if nodes and nodes[-1].device == part.device:
            nodes[-1] = replace(nodes[-1], count=nodes[-1].count + part.nodes)
        else:
            nodes.append(Nodes(part.nodes, part.device))
    held = tuple(nodes) if len(nodes) > 1 else ()
    return slowest([part.device for part in parts]), (*within, across), held


def _check_alike(parts: Sequence[Part]) -> None:
    sizes = sorted({part.devices_per_node for part in parts})
    if len(sizes) > 1:
        each = gcd(*sizes)
        split = "+".join(
            f"{part.nodes * part.devices_per_node // each}x{each}x{part.device.name}"
            for part in parts
        )
        raise UsageError(
            f"nodes of {sizes[0]} and of {sizes[-1]} devices can't be ranks of one mesh. Use "
            f"{sizes[0]} devices of each node, or describe the larger nodes as several of "
            f"{each}: {split} (nodes x devices x kind)."
        )
    makers = sorted({_library(part.device) for part in parts})
    if len(makers) > 1:
        raise UsageError(
            f"devices of {' and '.join(makers)} have no communication library in common. Describe "
            "the nodes of one kind."
        )


def _library(device: Device) -> str:
    if device.name == "CPU":
        return "CPU"
    return "AMD" if device.arch.startswith("CDNA") else "NVIDIA"


def _same_depth(parts: Sequence[Part]) -> list[list[tuple[Level, int]]]:
    """Per part its levels inside a node, with how many ports each has; one level where the parts'
    nodes are built differently."""
    shapes = {tuple(level.size for level in part.within) for part in parts}
    found = []
    for part in parts:
        levels = part.within
        if len(shapes) > 1:
            slow = min(levels, key=lambda level: level.device_bytes_per_s)
            levels = (replace(slow, size=part.devices_per_node, name=NODE, port_rates=()),)
        below, row = part.devices_per_node * part.nodes, []
        for level in levels:
            row.append((level, below))
            below //= level.size
        found.append(row)
    return found


def _merged(levels: Sequence[tuple[Level, int]]) -> Level:
    """One level with every part's own port rates; what all ports share is the worst of them."""
    rates = [
        level.port_bytes_per_s(unit) for level, ports in levels for unit in range(ports)
    ]  # fmt: skip
    slow = min((level for level, _ in levels), key=lambda level: level.device_bytes_per_s)
    link = replace(
        slow.link,
        bandwidth_bytes_per_s=min(rates),
        achievable=1.0,
        latency_s=max(level.link.latency_s for level, _ in levels),
        point_to_point=any(level.link.point_to_point for level, _ in levels),
    )
    return replace(
        slow,
        link=link,
        devices_per_port=max(level.devices_per_port for level, _ in levels),
        oversubscription=max(level.oversubscription for level, _ in levels),
        nvls=min(level.nvls for level, _ in levels),
        port_rates=tuple(rates) if len(set(rates)) > 1 else (),
    )
