"""Reads the short form of a cluster: "4x8xH100-SXM", "2xDGX-H100", "H100-SXM:3g.40gb".

Input: the text. Output: the `Device`, its `Level`s, and the `Host` where a machine was named.
"""

import difflib
import re
from dataclasses import replace

from ir.device import Device, find_device
from ir.errors import UsageError
from ir.machines import Host, Machine, find_machine, machine_names
from ir.topology import DOMAIN_SIZE, NETWORK, Level, named_device, network, usual_levels

GRAMMAR = (
    "Write [NODES x] [DEVICES x] DEVICE, for example 4x8xH100-SXM (4 nodes of 8), 8xA100-80GB, "
    "H200-SXM, H100-SXM:3g.40gb (a MIG slice), 2x8xH100-SXM+2x8xA100-80GB (different nodes); or "
    "[COUNT x] MACHINE, such as 4xDGX-H100 or p5.48xlarge; or local:4 for 4 processes on this "
    "machine; or the path of a cluster.yaml; 2xmachine.yaml for 2 devices per node of what it "
    "describes."
)
MOST_IN_A_NODE = 16
"""Devices; HGX-2 and the largest PCIe boxes hold as many."""

_NAME = r"(?!\d+x|x)([a-z].*|\d{3,}.*)"
Described = tuple[Device, tuple[Level, ...], Host | None]


def read_spec(compact: str, spec: str, spare: int = 0) -> Described:
    """The cluster of one part of `spec`, without spaces; `UsageError` if it makes no sense.

    `spare`: so many nodes more than it says.
    """
    compact = compact.replace("×", "x")
    match = re.fullmatch(rf"(?:(\d+)x)?(?:(\d+)x)?{_NAME}", compact, re.IGNORECASE)
    counts = [int(count) for count in match.groups()[:2] if count] if match else [0]
    if match is None or 0 in counts or re.search(r"^[^:]*\+", match[3]):
        raise UsageError(f"cluster {spec!r} can't be read. {GRAMMAR}")
    if machine := find_machine(match[3]):
        return _of_machines(machine, counts, spare)
    device = _device(match[3])
    nodes, devices = [1] * (2 - len(counts)) + counts
    most = DOMAIN_SIZE.get(device.name, MOST_IN_A_NODE)
    if devices > most and ":" not in match[3]:
        raise UsageError(
            f"cluster {spec!r}: one node with {devices} {device.name} is not built ({most} are the "
            f"most). Write NODESxDEVICESx{match[3]}, such as {max(1, devices // 8)}x8x{match[3]}."
        )
    return device, usual_levels(match[3], nodes + spare, devices), None


def machine_in(spec: str) -> Machine | None:
    """The machine that a spec names; None if it names a device."""
    compact = re.sub(r"\s", "", spec).replace("×", "x")
    match = re.fullmatch(rf"(?:\d+x)?(?:\d+x)?{_NAME}", compact, re.IGNORECASE)
    return find_machine(match[1]) if match else None


def machine_levels(machine: Machine, nodes: int) -> tuple[Level, ...]:
    """The levels of so many of its nodes."""
    levels = usual_levels(machine.device, nodes, machine.devices)
    link = replace(
        network(machine.device, machine.network), bandwidth_bytes_per_s=machine.nic_bytes_per_s
    )
    return tuple(
        replace(level, link=link, devices_per_port=machine.devices_per_nic)
        if level.name == NETWORK else level
        for level in levels
    )  # fmt: skip


def _of_machines(machine: Machine, counts: list[int], spare: int) -> Described:
    if len(counts) == 2 and counts[1] != machine.devices:
        raise UsageError(
            f"a {machine.name} has {machine.devices} devices, not {counts[1]}. Write "
            f"{counts[0]}x{machine.name}."
        )
    nodes = machine.nodes * (counts[0] if counts else 1)
    levels = machine_levels(machine, nodes + spare)
    return find_device(machine.device), levels, machine.host


def _device(name: str) -> Device:
    """`named_device`, which also names a machine that is spelled nearly so."""
    try:
        return named_device(name)
    except UsageError as error:
        near = difflib.get_close_matches(name.lower(), [n.lower() for n in machine_names()], 1, 0.8)
        if not near:
            raise
        raise UsageError(f"{error} Or did you mean the machine {near[0]}?") from error
