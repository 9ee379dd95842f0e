"""Reads cluster.yaml: a device and either two bandwidths or named levels, each key optional.

Input: the file's path. Output: the `Device`, its `Level`s, innermost first, and what was measured
of it, if `shardwright calibrate` wrote the file. A bandwidth that is given is taken as sustained,
in GB/s per direction and port (NIC).
"""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from ir.calibration import Calibration
from ir.calibration_file import MEASURED_KEYS, read_calibration
from ir.device import GIB, Device, Link, inner_link
from ir.errors import UsageError
from ir.topology import (
    CPU,
    DOMAIN,
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

_SIMPLE_KEYS = {
    "nodes",
    "devices_per_node",
    "intra_bandwidth_GBps",
    "intra_latency_us",
    "inter_bandwidth_GBps",
    "inter_latency_us",
}
_FILE_KEYS = _SIMPLE_KEYS | {"device", "memory_GiB", "reserve_GiB", "levels"}
_LEVEL_KEYS = {
    "name",
    "size",
    "link",
    "bandwidth_GBps",
    "latency_us",
    "devices_per_nic",
    "oversubscription",
}
Values = dict[str, Any]


def read_cluster_file(
    path: Path, devices: int | None = None
) -> tuple[Device, tuple[Level, ...], Calibration | None]:
    """The device and levels that a cluster.yaml describes, and its measurements.

    `devices` replaces `devices_per_node`. `UsageError` names a wrong key.
    """
    values = load_yaml(path)
    calibration = read_calibration(values, str(path))
    _known(values, _FILE_KEYS | (MEASURED_KEYS if calibration else set()), str(path))
    if devices is not None:
        if "levels" in values:
            raise UsageError(f"{path} has `levels`, which say how many devices there are.")
        values["devices_per_node"] = devices
    device, levels = _device_and_levels(values, path)
    count = prod(level.size for level in levels)
    return device, levels, calibration.on(count) if calibration else None


def _device_and_levels(values: Values, path: Path) -> tuple[Device, tuple[Level, ...]]:
    name = values.get("device")
    if not isinstance(name, str):
        raise UsageError(f"{path}: `device` must name a device (device: H100-SXM), not {name!r}.")
    if name == CPU:
        return _processes(values, str(path))
    device = _with_memory(named_device(name), values, str(path))
    if "levels" not in values:
        return device, _simple_levels(name, values, str(path))
    if both := sorted(_SIMPLE_KEYS & set(values)):
        raise UsageError(f"{path}: `{both[0]}` says what `levels` says; keep one of them.")
    return device, _named_levels(name, values["levels"], str(path))


def _processes(values: Values, where: str) -> tuple[Device, tuple[Level, ...]]:
    """CPU processes of one machine, each with its share of `memory_GiB`."""
    if other := sorted({"levels", "nodes"} & set(values)):
        raise UsageError(f"{where}: `{other[0]}` is for GPUs; a CPU is one machine.")
    count = _whole(values, "devices_per_node", where, 1)
    memory_GiB = _positive(values, "memory_GiB", where) if "memory_GiB" in values else None
    whole_bytes = ram_bytes() if memory_GiB is None else int(memory_GiB * GIB)
    (level,) = local_levels(count)
    link = _overridden(level.link, values, "intra_", where)
    return cpu_device(whole_bytes // count), (replace(level, link=link),)


def _simple_levels(name: str, values: Values, where: str) -> tuple[Level, ...]:
    counts = [_whole(values, key, where, 1) for key in ("nodes", "devices_per_node")]
    levels = usual_levels(name, *counts)
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
    node = names.index(NODE) if NODE in names else 0
    for index, entry in enumerate(entries):
        at = f"{where}: level {index + 1}"
        if not isinstance(entry, dict):
            raise UsageError(f"{at} must hold keys such as `name`, `size`, `bandwidth_GBps`.")
        _known(entry, _LEVEL_KEYS, at)
        levels.append(_level(name, entry, levels, index <= node, at))
    return tuple(levels)


def _level(name: str, entry: Values, below: list[Level], in_node: bool, at: str) -> Level:
    size = _whole(entry, "size", at)
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
        link = replace(link, latency_s=_positive(entry, "latency_us", at) * 1e-6)
    return Level(
        size,
        link,
        title,
        devices_per_port=_whole(entry, "devices_per_nic", at, shared),
        oversubscription=max(1.0, _positive(entry, "oversubscription", at, 1.0)),
        nvls=reduction_rate(name, link),
        port_rates=rates if len(rates) > 1 else (),
    )


def _link_of_kind(name: str, kind: str, at: str) -> Link:
    if kind.lower() == "pcie":
        return pcie(name)
    if kind.lower() in ("nvlink", "xgmi"):
        link = inner_link(name.partition(":")[0], 2)
        if link.name.lower() != kind.lower():
            raise UsageError(f"{at}: {name} has no {kind}.")
        return link
    return network(name, kind)


def _port_rates(entry: Values, size: int, at: str) -> tuple[float, ...]:
    given = entry.get("bandwidth_GBps")
    if not isinstance(given, list):
        return (_positive(entry, "bandwidth_GBps", at) * 1e9,) if given is not None else ()
    if len(given) != size:
        raise UsageError(f"{at}: {len(given)} bandwidths for {size} units; give one, or {size}.")
    key = "bandwidth_GBps"
    return tuple(_positive({key: rate}, key, at) * 1e9 for rate in given)


def _with_memory(device: Device, values: Values, where: str) -> Device:
    if "memory_GiB" in values:
        memory_bytes = int(_positive(values, "memory_GiB", where) * GIB)
        scale = memory_bytes / device.memory_bytes
        reserve_bytes = int(device.reserve_bytes * min(1.0, scale))
        device = replace(device, memory_bytes=memory_bytes, reserve_bytes=reserve_bytes)
    if "reserve_GiB" in values:
        reserve_bytes = int(_positive(values, "reserve_GiB", where) * GIB)
        if reserve_bytes >= device.memory_bytes:
            gib = device.memory_bytes / GIB
            raise UsageError(f"{where}: `reserve_GiB` leaves nothing of {gib:.1f} GiB.")
        device = replace(device, reserve_bytes=reserve_bytes)
    return device


def _overridden(link: Link, values: Values, prefix: str, where: str) -> Link:
    if (key := f"{prefix}bandwidth_GBps") in values:
        rate = _positive(values, key, where) * 1e9
        link = replace(link, bandwidth_bytes_per_s=rate, achievable=1.0)
    if (key := f"{prefix}latency_us") in values:
        link = replace(link, latency_s=_positive(values, key, where) * 1e-6)
    return link


def load_yaml(path: Path) -> Values:
    """The keys and values of a file; `UsageError` if it has none."""
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


def _known(values: Values, keys: set[str], where: str) -> None:
    if unknown := sorted(str(key) for key in set(values) - keys):
        raise UsageError(f"{where}: unknown key {unknown[0]!r}. Known: {', '.join(sorted(keys))}.")


def _positive(values: Values, key: str, where: str, default: float = 0) -> float:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise UsageError(f"{where}: `{key}` must be a positive number, not {value!r}.")
    return float(value)


def _whole(values: Values, key: str, where: str, default: float = 0) -> int:
    count = _positive(values, key, where, default)
    if count != int(count):
        raise UsageError(f"{where}: `{key}` is {count:g}; device counts are whole numbers.")
    return int(count)
