"""A cluster with something changed: more memory, other links, more nodes.

Input: a `Cluster` and changes as people write them: `memory=+8GiB`, `nodes=8`, `link.node=900`.
Output: the changed `Cluster`; a wrong key, value or unit is a `UsageError` with the legal ones.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil, prod

from ir.cluster import Cluster
from ir.device import GIB, Device
from ir.errors import UsageError
from ir.quantities import size
from ir.topology import CPU, NETWORK, NODE, Level, network

FORMS = "memory=+8GiB, memory=96GiB, memory=x1.1, nodes=8, link.LEVEL=900 (GB/s), link.LEVEL=x2"
_NUMBER = r"([+\-x]?)(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z/]*)"
_MEMORY_UNITS = {"mib": 2**20, "gib": GIB, "mb": 10**6, "gb": 10**9}
_RATE_UNITS = {"": 1e9, "gb/s": 1e9, "gbps": 1e9}


def changed(cluster: Cluster, changes: Mapping[str, str]) -> Cluster:
    """The cluster with all changes made, in order.

    >>> changed(Cluster.parse("4x8xH100-SXM"), {"nodes": "8"}).n_devices
    64
    """
    for key, value in changes.items():
        cluster = _change_of(cluster, key)(cluster, value)
    return cluster


def parse_changes(text: str) -> dict[str, str]:
    """`memory=+8GiB,nodes=8` as keys and values."""
    found: dict[str, str] = {}
    for part in filter(None, (word.strip() for word in text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not (equals and key and value):
            raise UsageError(f"{part!r} is not KEY=VALUE. Changes are {FORMS}.")
        if key in found:
            raise UsageError(f"{text!r} names {key} twice. Give it once.")
        found[key] = value
    if not found:
        raise UsageError(f"nothing is changed. Changes are {FORMS}.")
    return found


def level_names(cluster: Cluster) -> tuple[str, ...]:
    """What a link can be called by: its level's name, or what it is made of."""
    return tuple(level.name or level.link.name for level in cluster.levels)


def _change_of(cluster: Cluster, key: str) -> Callable[[Cluster, str], Cluster]:
    word, _, name = key.partition(".")
    if word == "link":
        number = _level_number(cluster, name)
        return lambda cluster, value: _with_rate(cluster, number, value)
    known = {"memory": _with_memory, "nodes": _with_nodes}
    if key not in known:
        raise UsageError(f"{key!r} can't be changed. Changes are {FORMS}.")
    return known[key]


def _read(text: str, what: str, units: Mapping[str, float], now: float) -> float:
    """The new value of something that is `now` as large: `+8GiB` more, `x2`, or `96GiB`."""
    match = re.fullmatch(_NUMBER, text.strip())
    sign, number, unit = match.groups() if match else ("", "", "?")
    scale = {"": 1.0}.get(unit) if sign == "x" else units.get(unit.lower())
    if scale is None:
        known = ", ".join(u for u in ("GiB", "MiB", "GB", "MB", "GB/s") if u.lower() in units)
        raise UsageError(
            f"{what}={text} can't be read. Write a number with its unit ({known}), as in {FORMS}."
        )
    given = float(number) * scale
    return {"+": now + given, "-": now - given, "x": now * given, "": given}[sign]


def _with_memory(cluster: Cluster, text: str) -> Cluster:
    """Of every device; the reserve stays as it is."""

    def larger(device: Device) -> Device:
        memory_bytes = round(_read(text, "memory", _MEMORY_UNITS, device.memory_bytes))
        if memory_bytes <= device.reserve_bytes:
            raise UsageError(
                f"memory={text} leaves {size(memory_bytes)} of a {device.name}, and "
                f"{size(device.reserve_bytes)} are its reserve. Use more."
            )
        return replace(device, memory_bytes=memory_bytes)

    nodes = tuple(replace(part, device=larger(part.device)) for part in cluster.nodes)
    return replace(cluster, device=larger(cluster.device), nodes=nodes)


def _level_number(cluster: Cluster, name: str) -> int:
    names = [_plain(known) for known in level_names(cluster)]
    if _plain(name) not in names:
        known = ", ".join(f"link.{n.replace(' ', '-')}" for n in level_names(cluster))
        raise UsageError(f"{cluster} has no link.{name}. Its links are {known}.")
    return names.index(_plain(name))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _with_rate(cluster: Cluster, number: int, text: str) -> Cluster:
    """What each device gets of that level, sustained, per direction; the latency stays."""
    if cluster.calibration is not None:
        raise UsageError(
            f"link={text}: what collectives take on {cluster} was measured, so another link would "
            "not show. Describe the cluster without its measurements."
        )
    level, what = cluster.levels[number], f"link.{level_names(cluster)[number]}"
    rate = _read(text, what, _RATE_UNITS, level.device_bytes_per_s)
    if rate <= 0:
        raise UsageError(f"{what}={text} leaves nothing of the link. Use a rate above 0 GB/s.")
    port = rate * level.devices_per_port * level.oversubscription
    link = replace(level.link, bandwidth_bytes_per_s=port, achievable=1.0)
    levels = list(cluster.levels)
    levels[number] = replace(level, link=link, port_rates=())
    return replace(cluster, levels=tuple(levels))


def _with_nodes(cluster: Cluster, text: str) -> Cluster:
    """So many nodes, joined as the present ones are; a usual network where there was one node."""
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"nodes={text}: it must be a whole number of at least 1.")
    if cluster.device.name == CPU:
        raise UsageError(
            f"nodes={text}: {cluster} is one machine, whose memory its processes share. Plan for "
            "another cluster, such as --cluster local:8."
        )
    uneven = any(level.port_rates for level in cluster.levels)
    if cluster.nodes or uneven:
        raise UsageError(
            f"nodes={text}: the nodes of {cluster} differ, so it is open which ones are added. "
            "Describe the cluster that you mean with --cluster."
        )
    inner = _node_level(cluster) + 1
    levels = (*cluster.levels[:inner], *_outer(cluster, cluster.levels[inner:], int(text)))
    devices = prod(level.size for level in levels)
    usd = cluster.usd_per_hour * devices / cluster.n_devices
    return replace(cluster, levels=levels, usd_per_hour=usd)


def node_count(cluster: Cluster) -> int:
    """How many nodes a cluster has."""
    return cluster.n_devices // cluster.devices_per_node


def _node_level(cluster: Cluster) -> int:
    """The number of the level that makes a node."""
    names = [level.name for level in cluster.levels]
    return names.index(NODE) if NODE in names else 0


def _outer(cluster: Cluster, levels: tuple[Level, ...], nodes: int) -> tuple[Level, ...]:
    """The levels above the node for so many nodes: inner ones stay full, the last takes the rest.

    Fewer nodes than a level joins leave a part of it, and nothing above.
    """
    if nodes == 1:
        return ()
    if not levels:
        return (Level(nodes, network(cluster.device.name), NETWORK),)
    first, rest = levels[0], levels[1:]
    if not rest and first.name == NETWORK or nodes < first.size:
        return (replace(first, size=nodes),)
    if nodes % first.size:
        below = nodes // first.size * first.size
        raise UsageError(
            f"nodes={nodes}: {first.name or first.link.name} joins {first.size} nodes of {cluster} "
            f"each. Use nodes={below} or {ceil(nodes / first.size) * first.size}."
        )
    return (first, *_outer(cluster, rest, nodes // first.size))
