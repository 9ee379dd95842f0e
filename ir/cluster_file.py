"""Reads cluster.yaml: a device and either two bandwidths or named levels, each key optional.

Input: the file's path. Output: what a `Cluster` holds, also what was measured of it, if
`shardwright calibrate` wrote the file. A bandwidth that is given is taken as sustained, in GB/s per
direction and port (NIC). `nodes` may be a list of different nodes, and
`topology` a file that a tool wrote on one of the nodes.
"""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, TypedDict

from ir.calibration import Calibration
from ir.calibration_file import MEASURED_KEYS, read_calibration
from ir.device import GIB, Device, Link, inner_link
from ir.errors import UsageError
from ir.machines import GB, Host, Machine, find_machine, machine_names, usual_host
from ir.mixed import Nodes, Part, join
from ir.spec import machine_levels
from ir.topology import (
    CPU,
    DOMAIN,
    NETWORK_KINDS,
    NODE,
    Level,
    cpu_device,
    local_levels,
    named_device,
    network,
    pcie,
    ram_bytes,
    reduction_rate,
    usual_levels,
)
from ir.topology_text import levels_from_nccl_xml, levels_from_nvidia_smi
from ir.yaml_values import Values, check_keys, load_yaml, positive, read_text, whole

_SIMPLE_KEYS = {
    "nodes",
    "devices_per_node",
    "intra_bandwidth_GBps",
    "intra_latency_us",
    "inter_bandwidth_GBps",
    "inter_latency_us",
}
_HOST_KEYS = {
    "host_link_GBps",
    "host_memory_GiB",
    "host_memory_GBps",
    "nvme_GB",
    "nvme_GBps",
}
_PRICE_KEYS = {"usd_per_device_hour", "usd_per_node_hour"}
_DEVICE_KEYS = {"device", "memory_GiB", "reserve_GiB"}
_FILE_KEYS = (
    _SIMPLE_KEYS | _DEVICE_KEYS | _HOST_KEYS | _PRICE_KEYS | {"levels", "machine", "topology"}
)
_NODE_KEYS = (_SIMPLE_KEYS | _DEVICE_KEYS | _PRICE_KEYS | {"machine", "count"}) - {"nodes"}
_LEVEL_KEYS = {
    "name",
    "size",
    "link",
    "bandwidth_GBps",
    "latency_us",
    "devices_per_nic",
    "oversubscription",
}


DEVICE_LINKS = ("NVLink", "xGMI", "PCIe")
"""What `link` may be beside a kind of network."""


class Described(TypedDict, total=False):
    """Keyword arguments of `Cluster`."""

    device: Device
    levels: tuple[Level, ...]
    nodes: tuple[Nodes, ...]
    usd_per_hour: float
    own_host: Host
    calibration: Calibration


def read_cluster_file(path: Path, devices: int | None = None) -> Described:
    """What a cluster.yaml describes; `devices` replaces `devices_per_node`. `UsageError` names a
    wrong key."""
    return described(load_yaml(path), path, devices)


def described(values: Values, path: Path, devices: int | None = None) -> Described:
    """What a file with these values would describe at `path`, which need not be there."""
    where = str(path)
    calibration = read_calibration(values, where)
    check_keys(values, _FILE_KEYS | (MEASURED_KEYS if calibration else set()), where)
    if devices is not None:
        values = _with_devices(values, devices, where)
    if isinstance(values.get("nodes"), list):
        if calibration:
            raise UsageError(f"{where}: nodes that differ can't share what was measured of one.")
        return _mixed(values, where)
    found = _alike(values, path)
    if calibration:
        found["calibration"] = calibration.on(prod(level.size for level in found["levels"]))
    if usd := _usd_per_hour(values, Part(found["device"], found["levels"]), where):
        found["usd_per_hour"] = usd
    if host := _own_host(values, found["device"], where):
        found["own_host"] = host
    return found


def _with_devices(values: Values, devices: int, where: str) -> Values:
    for key in ("levels", "topology", "machine"):
        if key in values:
            raise UsageError(f"{where} has `{key}`, which says how many devices there are.")
    if isinstance(values.get("nodes"), list):
        raise UsageError(f"{where}: its `nodes` differ; say in them how many devices there are.")
    return values | {"devices_per_node": devices}


def _processes(values: Values, where: str) -> Described:
    """CPU processes of one machine, each with its share of `memory_GiB`."""
    wrong = {"levels", "topology", "nodes", "inter_bandwidth_GBps", "inter_latency_us"}
    if other := sorted(wrong & set(values)):
        raise UsageError(f"{where}: `{other[0]}` is for GPUs; a CPU is one machine.")
    count = whole(values, "devices_per_node", where, 1)
    all_bytes = ram_bytes()
    if "memory_GiB" in values:
        all_bytes = int(positive(values, "memory_GiB", where) * GIB)
    kept = {key: value for key, value in values.items() if key == "reserve_GiB"}
    device = _with_memory(cpu_device(all_bytes // count), kept, where)
    return Described(device=device, levels=_overridden_levels(local_levels(count), values, where))


def _alike(values: Values, path: Path) -> Described:
    """Nodes that all hold the same device."""
    where = str(path)
    machine = _machine(values, where)
    if machine is not None:
        values = {"device": machine.device, "devices_per_node": machine.devices} | values
    name = values.get("device")
    if not isinstance(name, str):
        raise UsageError(f"{where}: `device` must name a device (device: H100-SXM), not {name!r}.")
    if name == CPU:
        return _processes(values, where)
    device = _with_memory(named_device(name), values, where)
    levels = _levels(name, values, path)
    if machine is not None:
        levels = machine_levels(machine, whole(values, "nodes", where, machine.nodes))
        levels = _overridden_levels(levels, values, where)
    found = Described(device=device, levels=levels)
    if machine is not None:
        found["own_host"] = machine.host
    return found


def _levels(name: str, values: Values, path: Path) -> tuple[Level, ...]:
    """By `levels`, by `topology`, or usual ones for the counts; two of these are one too many."""
    where = str(path)
    for key, others in (
        ("levels", _SIMPLE_KEYS | {"topology", "machine"}),
        ("topology", _SIMPLE_KEYS | {"machine"}),
    ):
        allowed = {"nodes"} if key == "topology" else set()
        if key in values and (both := sorted((others - allowed) & set(values))):
            raise UsageError(f"{where}: `{both[0]}` says what `{key}` says; keep one of them.")
    if "levels" in values:
        return _named_levels(name, values["levels"], where)
    if "topology" in values:
        return _pasted_levels(name, values, path)
    return _simple_levels(name, values, where)


def _pasted_levels(name: str, values: Values, path: Path) -> tuple[Level, ...]:
    """Levels from `nvidia-smi topo -m` or NCCL's XML, in a file beside the cluster.yaml."""
    file = path.parent / str(values["topology"])
    text, nodes = read_text(file), whole(values, "nodes", str(path), 1)
    try:
        if text.lstrip().startswith("<"):
            return levels_from_nccl_xml(text, name, nodes)[1]
        return levels_from_nvidia_smi(text, name, nodes)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from error


def _mixed(values: Values, where: str) -> Described:
    """`nodes` as a list: each entry has a `count`, and what differs from the file's own keys."""
    if wrong := sorted({"levels", "topology"} & set(values)):
        raise UsageError(f"{where}: `{wrong[0]}` can't describe nodes that differ.")
    shared = {key: value for key, value in values.items() if key in _NODE_KEYS}
    parts, prices = [], list[float]()
    for number, entry in enumerate(values["nodes"], start=1):
        at = f"{where}: entry {number} of `nodes`"
        if not isinstance(entry, dict):
            raise UsageError(f"{at} must hold keys, such as `count: 2` and `device: H100-SXM`.")
        check_keys(entry, _NODE_KEYS, at)
        count = whole(entry, "count", at, 1)
        own = shared | {key: value for key, value in entry.items() if key != "count"}
        found = _alike(own | {"nodes": count + 1}, Path(at))
        parts.append(Part(found["device"], found["levels"], spare=1))
        prices.append(_usd_per_hour(own, parts[-1], at))
    if not parts:
        raise UsageError(f"{where}: `nodes` lists no node.")
    if 0 in prices and any(prices):
        raise UsageError(
            f"{where}: entry {prices.index(0) + 1} of `nodes` has no price and others have one. "
            "Give every entry its price, or none."
        )
    device, levels, nodes = join(parts)
    found = Described(device=device, levels=levels, nodes=nodes, usd_per_hour=sum(prices))
    if host := _own_host(values, device, where):
        found["own_host"] = host
    return found


def _machine(values: Values, where: str) -> Machine | None:
    if "machine" not in values:
        return None
    if both := sorted({"device", "devices_per_node"} & set(values)):
        raise UsageError(f"{where}: `{both[0]}` says what `machine` says; keep one of them.")
    machine = find_machine(str(values["machine"]))
    if machine is None:
        known = ", ".join(machine_names())
        raise UsageError(f"{where}: no machine is called {values['machine']!r}. Known: {known}.")
    return machine


def _own_host(values: Values, device: Device, where: str) -> Host | None:
    """The usual host with what the file says of it; None if it says nothing. A rate that is given
    is sustained."""
    if not _HOST_KEYS & set(values):
        return None
    usual = usual_host(device) if device.sm_count else Host(0.0, 0)
    scales = (
        ("host_link_GBps", "link_bytes_per_s", GB),
        ("host_memory_GiB", "memory_bytes", GIB),
        ("host_memory_GBps", "memory_bytes_per_s", GB),
        ("nvme_GB", "nvme_bytes", GB),
        ("nvme_GBps", "nvme_bytes_per_s", GB),
    )
    given: dict[str, Any] = {
        field: type(getattr(usual, field))(positive(values, key, where) * scale)
        for key, field, scale in scales if key in values
    }  # fmt: skip
    if "link_bytes_per_s" in given:
        given["link_part"] = 1.0
    return replace(usual, **given)


def _usd_per_hour(values: Values, part: Part, where: str) -> float:
    """The price of all nodes together; 0 where none is given."""
    if len(_PRICE_KEYS & set(values)) > 1:
        raise UsageError(f"{where}: give the price per device or per node, not both.")
    if "usd_per_node_hour" in values:
        return part.nodes * positive(values, "usd_per_node_hour", where)
    if "usd_per_device_hour" in values:
        devices = part.nodes * part.devices_per_node
        return devices * positive(values, "usd_per_device_hour", where)
    return 0.0


def _simple_levels(name: str, values: Values, where: str) -> tuple[Level, ...]:
    counts = [whole(values, key, where, 1) for key in ("nodes", "devices_per_node")]
    return _overridden_levels(usual_levels(name, *counts), values, where)


def _overridden_levels(levels: tuple[Level, ...], values: Values, where: str) -> tuple[Level, ...]:
    prefixes = ["inter" if level.name == "network" else "intra" for level in levels]
    return tuple(
        replace(level, link=_overridden(level.link, values, f"{prefix}_", where))
        for level, prefix in zip(levels, prefixes, strict=True)
    )


def _named_levels(name: str, entries: Any, where: str) -> tuple[Level, ...]:
    """Innermost first. What an entry leaves out is usual for the device, or as one level below."""
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{where}: `levels` must list the levels, innermost first.")
    levels: list[Level] = []
    names = [entry.get("name") if isinstance(entry, dict) else None for entry in entries]
    if twice := next((n for n in names if n is not None and names.count(n) > 1), None):
        raise UsageError(f"{where}: two levels are named {twice!r}. Give each its own name.")
    node = names.index(NODE) if NODE in names else 0
    for index, entry in enumerate(entries):
        at = f"{where}: level {index + 1}"
        if not isinstance(entry, dict):
            raise UsageError(f"{at} must hold keys such as `name`, `size`, `bandwidth_GBps`.")
        check_keys(entry, _LEVEL_KEYS, at)
        levels.append(_level(name, entry, levels, index <= node, at))
    return tuple(levels)


def _level(name: str, entry: Values, below: list[Level], in_node: bool, at: str) -> Level:
    size = whole(entry, "size", at)
    title = str(entry.get("name", NODE if in_node and not below else ""))
    kind = entry.get("link")
    if kind is not None:
        link = _link_of_kind(name, str(kind), at)
    elif below and title == DOMAIN:
        link = below[-1].link
    elif in_node:
        link = pcie(name) if below or ":" in name else inner_link(name, size)
    else:
        link = below[-1].link if below[-1].link.name == "network" else network(name)
    rates = _port_rates(entry, size, at)
    if rates:
        link = replace(link, bandwidth_bytes_per_s=min(rates), achievable=1.0)
    shared = below[-1].devices_per_port if below and below[-1].link.name == link.name else 1
    if "latency_us" in entry:
        link = replace(link, latency_s=positive(entry, "latency_us", at) * 1e-6)
    most = prod(lower.size for lower in below) if below else size
    return Level(
        size,
        link,
        title,
        devices_per_port=_sharing(entry, shared, most, at),
        oversubscription=_oversubscription(entry, at),
        nvls=reduction_rate(name, link),
        port_rates=rates if len(rates) > 1 else (),
    )


def _sharing(entry: Values, usual: int, most: int, at: str) -> int:
    """How many devices share a port, `most` of them: those of a unit that the level joins."""
    sharing = whole(entry, "devices_per_nic", at, usual)
    if sharing > most:
        raise UsageError(
            f"{at}: `devices_per_nic` is {sharing}, and {most} devices are all that could share "
            f"a port there. Use 1 to {most}."
        )
    return sharing


def _oversubscription(entry: Values, at: str) -> float:
    ratio = positive(entry, "oversubscription", at, 1.0)
    if ratio < 1:
        raise UsageError(
            f"{at}: `oversubscription` is {ratio:g}; it is 1 where the switches carry all that is "
            "sent, and more where they don't. A faster link is `bandwidth_GBps`."
        )
    return ratio


def _link_of_kind(name: str, kind: str, at: str) -> Link:
    if kind.lower() == "pcie":
        return pcie(name)
    if kind.lower() in ("nvlink", "xgmi"):
        link = inner_link(name.partition(":")[0], 2)
        if link.name.lower() != kind.lower():
            raise UsageError(
                f"{at}: `link` is {kind}, and {name} has none. It has {link.name}, and networks."
            )
        return link
    if kind.lower() not in NETWORK_KINDS:
        known = ", ".join((*DEVICE_LINKS, *NETWORK_KINDS.values()))
        raise UsageError(f"{at}: `link` is {kind!r}; it is one of {known}.")
    return network(name, kind)


def _port_rates(entry: Values, size: int, at: str) -> tuple[float, ...]:
    given = entry.get("bandwidth_GBps")
    if not isinstance(given, list):
        return (positive(entry, "bandwidth_GBps", at) * 1e9,) if given is not None else ()
    if len(given) != size:
        raise UsageError(f"{at}: {len(given)} bandwidths for {size} units; give one, or {size}.")
    key = "bandwidth_GBps"
    return tuple(positive({key: rate}, key, at) * 1e9 for rate in given)


def _with_memory(device: Device, values: Values, where: str) -> Device:
    if "memory_GiB" in values:
        memory_bytes = int(positive(values, "memory_GiB", where) * GIB)
        if memory_bytes > device.memory_bytes and device.name != CPU:
            raise UsageError(
                f"{where}: `memory_GiB` is {memory_bytes / GIB:g}, and a {device.name} has "
                f"{device.memory_bytes / GIB:g}. Name the device that has more, or leave it out."
            )
        scale = memory_bytes / device.memory_bytes
        reserve_bytes = int(device.reserve_bytes * min(1.0, scale))
        device = replace(device, memory_bytes=memory_bytes, reserve_bytes=reserve_bytes)
    if "reserve_GiB" in values:
        reserve_bytes = int(positive(values, "reserve_GiB", where) * GIB)
        if reserve_bytes >= device.memory_bytes:
            gib = device.memory_bytes / GIB
            raise UsageError(f"{where}: `reserve_GiB` leaves nothing of {gib:.1f} GiB.")
        device = replace(device, reserve_bytes=reserve_bytes)
    return device


def _overridden(link: Link, values: Values, prefix: str, where: str) -> Link:
    if (key := f"{prefix}bandwidth_GBps") in values:
        rate = positive(values, key, where) * 1e9
        link = replace(link, bandwidth_bytes_per_s=rate, achievable=1.0)
    if (key := f"{prefix}latency_us") in values:
        link = replace(link, latency_s=positive(values, key, where) * 1e-6)
    return link
