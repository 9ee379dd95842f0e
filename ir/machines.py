"""Machines by name, and what a device's host has for it, from the table `machines.csv`.

Input: a machine's name as people write it ("dgx-h100", "p5.48xlarge"), or a device. Output: the
`Machine`: its device, how many, their network, and the `Host` behind each device.
"""

import csv
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

from ir.device import GIB, Device, host_link_bytes_per_s

GB, TB = 10**9, 10**12


@dataclass(frozen=True, slots=True)
class Host:
    """One device's share of its host; 0 where it is not known.

    `link_bytes_per_s`: between device and host, per direction, nominal; large copies reach
    `link_part` of it (as PCIe in `ir.device.inner_link`). Rates of memory and NVMe are what all
    devices of the host reach together, over their number.
    """

    link_bytes_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float = 0.0
    nvme_bytes: int = 0
    nvme_bytes_per_s: float = 0.0
    link_part: float = 0.80

    @property
    def copy_bytes_per_s(self) -> float:
        """Rate of large copies between a device and its host's memory, all devices copying; 0 if
        the link or the memory is not known."""
        if not (self.link_bytes_per_s and self.memory_bytes):
            return 0.0
        link_bytes_per_s = self.link_bytes_per_s * self.link_part
        return min(link_bytes_per_s, self.memory_bytes_per_s or link_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Machine:
    """What can be bought or rented: `nodes` (1, unless it is a rack) of `devices` each.

    `nic_bytes_per_s`: of one NIC, nominal, per direction.
    """

    name: str
    device: str
    nodes: int
    devices: int
    network: str
    nic_bytes_per_s: float
    devices_per_nic: int
    host: Host


@dataclass(frozen=True, slots=True)
class MemoryLevel:
    """One level of a device's memory; its rate is 0 where it is not known."""

    name: str
    size_bytes: int
    bytes_per_s: float = 0.0


def find_machine(name: str) -> Machine | None:
    """The machine of that name, in any case; None if there is none.

    >>> find_machine("DGX h100").devices
    8
    """
    return _table().get(_normal(name))


def machine_names() -> tuple[str, ...]:
    """All names, as the table has them."""
    return tuple(machine.name for machine in _table().values())


def usual_host(device: Device) -> Host:
    """The share of one device in the maker's own machine with it, or one of its architecture."""
    found = _usual()
    whole = device.name.partition(":")[0]
    key = next(key for key in (whole, device.arch, "other") if key in found)
    return _host(found[key], whole)


def memory_levels(device: Device, host: Host) -> tuple[MemoryLevel, ...]:
    """From registers to NVMe: what one device can use, and how fast.

    Shared memory gives 128 bytes per clock and SM (NVIDIA tuning guides, Volta to Hopper; the same
    of a CU's LDS on CDNA). Host memory and NVMe are reached through the host link.
    """
    sms = device.sm_count
    inner = (
        MemoryLevel("registers", sms * device.registers_per_sm * 4),
        MemoryLevel(
            "shared memory", sms * device.shared_memory_per_sm_bytes, 128 * sms * device.clock_hz
        ),
        MemoryLevel("L2", device.l2_bytes, device.l2_bandwidth_bytes_per_s),
    )
    rates = [rate for rate in (host.link_bytes_per_s, host.memory_bytes_per_s) if rate]
    levels = (
        *(inner if sms else ()),
        MemoryLevel("device", device.memory_bytes, device.memory_bandwidth_bytes_per_s),
        MemoryLevel("host", host.memory_bytes, min(rates, default=0.0)),
        MemoryLevel("NVMe", host.nvme_bytes, min([host.nvme_bytes_per_s, *rates[:1]])),
    )
    return tuple(level for level in levels if level.size_bytes)


@cache
def _rows() -> tuple[dict[str, str], ...]:
    text = resources.files("ir").joinpath("machines.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))


@cache
def _table() -> dict[str, Machine]:
    return {_normal(row["name"]): _machine(row) for row in _rows() if row["usual_for"] != "other"}


@cache
def _usual() -> dict[str, dict[str, str]]:
    return {row["usual_for"]: row for row in _rows() if row["usual_for"]}


def _machine(row: dict[str, str]) -> Machine:
    return Machine(
        name=row["name"],
        device=row["device"],
        nodes=int(row["nodes"]),
        devices=int(row["devices"]),
        network=row["network"],
        nic_bytes_per_s=float(row["nic_gbs_per_dir"]) * GB,
        devices_per_nic=int(row["devices_per_nic"]),
        host=_host(row, row["device"]),
    )


def _host(row: dict[str, str], device: str) -> Host:
    """The share of one device of that name in the row's machine."""
    share = 1 / int(row["devices"])
    return Host(
        link_bytes_per_s=host_link_bytes_per_s(device),
        memory_bytes=int(float(row["host_memory_gb"]) * GIB * share),
        memory_bytes_per_s=float(row["host_memory_gbs"] or 0) * GB * share,
        nvme_bytes=int(float(row["nvme_tb"] or 0) * TB * share),
        nvme_bytes_per_s=float(row["nvme_gbs"] or 0) * GB * share,
    )


def _normal(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
