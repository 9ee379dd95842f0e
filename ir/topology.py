"""The levels of a cluster: what joins the devices of a node, the nodes of a rack, the racks.

Input: a device name and counts, as people write them. Output: the `Device` (whole, or a MIG slice
of one) and the `Level`s of a usual machine with it, innermost first.
"""

import os
from dataclasses import dataclass, replace

from ir.device import GIB, Device, Link, find_device, inner_link, network_link, pcie_bytes_per_s
from ir.errors import UsageError
from ir.mig import mig_slice, slices_per_device

CPU = "CPU"
NODE, DOMAIN, NETWORK = "node", "NVLink domain", "network"

# Part of the links' sustained rate that an NVSwitch's own reductions reach (NVLS), NCCL 2.30.7
# src/graph/tuning.cc: 0.85 on Hopper, 0.74 on Blackwell. Devices on bridges or older switches: 0.
_NVLS = dict.fromkeys(("H100-SXM", "H100-96GB", "H200-SXM"), 0.85) | dict.fromkeys(
    ("B200", "B300", "GB200", "GB300"), 0.74
)
DOMAIN_SIZE = {"GB200": 72, "GB300": 72}
"""Devices that NVLink joins, over several nodes."""
# Two dies of a MI250X share a package with 4 of their 7 xGMI links; the others lead to other
# packages, 50 GB/s each per direction (hardware.csv).
_PACKAGE_RATE, _OUTER_RATE = 200e9, 150e9
# Large copies reach 80 % of PCIe; a step's latency is NCCL's (PCI, Ring, Simple).
_PCIE_FRACTION, _PCIE_LATENCY_S = 0.80, 5.7e-6
NETWORK_KINDS = {"infiniband": "InfiniBand", "roce": "RoCE", "efa": "EFA"}
# Seconds per step of a ring over each kind of network. EFA: 4 nodes of 8 B200 take 0.37 ms for a
# small all-reduce where InfiniBand takes about 0.09 (stas00/ml-engineering network/README.md).
_NETWORK_LATENCY_S = {"infiniband": 14.0e-6, "roce": 14.0e-6, "efa": 140.0e-6}


@dataclass(frozen=True, slots=True)
class Level:
    """`size` units of the level below (devices, at the innermost), joined by `link`.

    The link's bandwidth is one port's (NIC's), per direction; `devices_per_port` devices share a
    port. `oversubscription` divides what all devices together get through this level's switches.
    `port_rates`: each unit's bandwidth_bytes_per_s in order, where units differ. `nvls`: part of
    the sustained rate at which the switches themselves reduce; 0 if they can't.
    """

    size: int
    link: Link
    name: str = ""
    devices_per_port: int = 1
    oversubscription: float = 1.0
    nvls: float = 0.0
    port_rates: tuple[float, ...] = ()

    def port_bytes_per_s(self, unit: int | None = None) -> float:
        """Sustained rate of a port of that unit (of the slowest unit, if None)."""
        rates = self.port_rates or (self.link.bandwidth_bytes_per_s,)
        rate = min(rates) if unit is None else rates[unit % len(rates)]
        return rate * self.link.achievable

    @property
    def device_bytes_per_s(self) -> float:
        """What each device gets, per direction, while all devices send through this level."""
        return self.port_bytes_per_s() / self.devices_per_port / self.oversubscription


def named_device(name: str) -> Device:
    """A device, or a slice of one: "H100-SXM:3g.40gb"; `UsageError` for an unknown one.

    >>> named_device("h100:3g.40gb").name
    'H100-SXM:3g.40gb'
    """
    whole, colon, profile = name.partition(":")
    return mig_slice(find_device(whole), profile) if colon else find_device(whole)


def cpu_device(memory_bytes: int) -> Device:
    """A process on a CPU: modest round rates, 50 GFLOP/s and 10 GB/s."""
    rates = (("float32", 50e9), ("float64", 25e9), ("bfloat16", 25e9), ("float16", 25e9))
    return Device(
        name=CPU,
        peaks=rates,
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=10e9,
        reserve_bytes=min(memory_bytes // 10, GIB // 2),
    )


def local_levels(processes: int) -> tuple[Level, ...]:
    """What joins processes of one machine: its memory, at 1 GB/s."""
    return (Level(processes, Link("shared memory", 1e9, 50e-6)),)


def ram_bytes() -> int:
    """This machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usual_levels(name: str, nodes: int, devices_per_node: int) -> tuple[Level, ...]:
    """The levels of `nodes` usual machines with `devices_per_node` of that device each."""
    levels = node_levels(name, devices_per_node)
    whole = find_device(name.partition(":")[0]).name
    per_domain = DOMAIN_SIZE.get(whole, devices_per_node) // devices_per_node
    joined = max((n for n in range(1, per_domain + 1) if nodes % n == 0), default=1)
    if joined > 1:
        levels += (replace(levels[-1], size=joined, name=DOMAIN),)
    if nodes > joined:
        levels += (Level(nodes // joined, network(name), NETWORK),)
    return levels


def node_levels(name: str, devices: int) -> tuple[Level, ...]:
    """What joins the devices within a node: one level, or packages and what joins those."""
    whole, colon, _ = name.partition(":")
    if colon:  # slices have no NVLink between them: they meet over the host, on their card's port
        sharing = min(devices, slices_per_device(named_device(name)))
        return (Level(devices, pcie(name), NODE, devices_per_port=sharing),)
    link = inner_link(whole, devices)
    if find_device(whole).name == "MI250X" and devices > 2 and devices % 2 == 0:
        package = replace(link, bandwidth_bytes_per_s=_PACKAGE_RATE, point_to_point=False)
        outer = replace(link, bandwidth_bytes_per_s=_OUTER_RATE)
        return (Level(2, package, "package"), Level(devices // 2, outer, NODE))
    return (Level(devices, link, NODE, nvls=reduction_rate(whole, link)),)


def reduction_rate(name: str, link: Link) -> float:
    """`Level.nvls` of that device's switches, if `link` is the NVLink that leads to them."""
    device = find_device(name.partition(":")[0]).name
    return _NVLS.get(device, 0.0) if link.name == "NVLink" else 0.0


def pcie(name: str) -> Link:
    """What devices of that name without a link of their own meet over: PCIe, by generation."""
    rate = pcie_bytes_per_s(name.partition(":")[0])
    return Link("PCIe", rate, _PCIE_LATENCY_S, _PCIE_FRACTION)


def network(name: str, kind: str = "InfiniBand") -> Link:
    """The network of a usual machine with that device: a NIC per device, of that kind."""
    latency_s = _NETWORK_LATENCY_S.get(kind.lower())
    if latency_s is None:
        known = ", ".join(NETWORK_KINDS.values())
        raise UsageError(f"no network is called {kind!r}. Known: {known}.")
    link = network_link(name.partition(":")[0])
    return replace(link, latency_s=latency_s)
