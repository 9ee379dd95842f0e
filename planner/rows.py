"""A row of a table of training runs as a configuration: what is pinned, and what is open.

Input: a mapping with the columns of measured runs (`tp`, `pp`, `micro_batch`, `recompute`, ...).
Output: a `Configuration` with its `Cluster`. A row that can't be represented is a `UsageError`
that says which column is to blame.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ir.cluster import Cluster, Mesh
from ir.errors import UsageError
from ir.topology import DOMAIN, NETWORK, Level, named_device, network, node_levels
from planner.stacks import least_recompute, selective_of, traits_of
from planner.traits import Traits

RECOMPUTE = ("none", "selective", "full")
MODULES = ("core_attn", "op", "every-2nd-layer")
"""What "selective" (or "full", of some layers) means, where a row says so; else by its stack."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """Pinned decisions; None is the planner's own.

    `rows`: sequences per micro-batch and rank. `micro_batches`: per step. `sequence_cuts`: whether
    activations between blocks are cut over the tensor axis. `memory_kind`: the reading that a
    peak is compared with: "allocated" or "reserved" by torch, else of the whole device.
    `least_recompute`: of `RECOMPUTE`, the least that is tried where it is open.
    """

    cluster: Cluster
    mesh: Mesh
    rows: int
    micro_batches: int
    recompute: str | None
    modules: str
    virtual_stages: int | None
    zero_stage: int | None
    sequence_cuts: bool | None
    traits: Traits
    memory_kind: str = ""
    least_recompute: str = "none"
    optimizer: str = "adamw"

    @property
    def global_batch(self) -> int:
        return self.rows * self.mesh.data * self.micro_batches


def read_configuration(row: Mapping[str, str], cluster: Cluster | None = None) -> Configuration:
    """The configuration of a row, on `cluster` or the one that the row states."""
    _check_represented(row)
    mesh = Mesh(_count(row, "pp", 1), _count(row, "dp", 1), _count(row, "tp", 1))
    cluster = cluster or read_cluster(row, mesh.size)
    _check_degrees(row, mesh, cluster)
    rows, batch = _count(row, "micro_batch"), _count(row, "global_batch")
    if batch % (rows * mesh.data):
        raise UsageError(
            f"global_batch={batch} is no multiple of micro_batch={rows} times dp={mesh.data}"
        )
    recompute = _word(row, "recompute", RECOMPUTE)
    modules = (row.get("recompute_modules") or "").strip()
    traits = traits_of(row, cluster.device)
    return Configuration(
        cluster, mesh, rows, batch // (rows * mesh.data), recompute,
        modules if modules in MODULES else selective_of(row),
        _virtual_stages(row, mesh), _zero_stage(row),
        {"0": False, "1": True}.get(row.get("sequence_parallel") or ""),
        replace(traits, zero_group=_count(row, "shard_group", 0)),
        (row.get("mem_kind") or "").strip(), least_recompute(row),
    )  # fmt: skip


def read_cluster(row: Mapping[str, str], n_devices: int) -> Cluster:
    """Nodes, NVLink domains and the network that the columns state."""
    name = (row.get("device") or "").strip()
    if not name:
        raise UsageError("device is missing")
    device = named_device(name)
    per_node = min(_count(row, "devices_per_node", n_devices), n_devices)
    if n_devices % per_node:
        raise UsageError(f"{n_devices} devices do not fill nodes of devices_per_node={per_node}")
    nodes = n_devices // per_node
    levels = node_levels(name, per_node)
    joined = max(1, min(_count(row, "nvlink_domain", per_node) // per_node, nodes))
    joined = max(n for n in range(1, joined + 1) if nodes % n == 0)
    if joined > 1:
        levels += (replace(levels[-1], size=joined, name=DOMAIN),)
    if nodes > joined:
        link = network(name)
        if row.get("inter_node_GBps_per_device"):
            rate = _number(row, "inter_node_GBps_per_device") * 1e9
            link = replace(link, bandwidth_bytes_per_s=rate)
        levels += (Level(nodes // joined, link, NETWORK),)
    return Cluster(device, levels)


def _check_represented(row: Mapping[str, str]) -> None:
    """What this planner does not lay out is named, not guessed."""
    if _count(row, "experts", 0) > 1:
        raise UsageError("experts: mixtures of experts are not represented")
    if _count(row, "cp", 1) > 1:
        raise UsageError("cp: context parallelism is not represented")
    if _count(row, "ep", 1) > 1:
        raise UsageError("ep: expert parallelism without experts")
    if (optimizer := row.get("optimizer") or "adam") not in ("adam", "adamw"):
        raise UsageError(f"optimizer={optimizer!r}: only adam and adamw are priced")


def _check_degrees(row: Mapping[str, str], mesh: Mesh, cluster: Cluster) -> None:
    """Degrees against devices, heads and layers."""
    asked = _count(row, "n_devices", mesh.size)
    if mesh.size != asked or mesh.size > cluster.n_devices:
        raise UsageError(
            f"tp x pp x dp = {mesh.size}, but n_devices={asked} of {cluster.n_devices}"
        )
    stated = _count(row, "nodes", 0) * _count(row, "devices_per_node", 0)
    if 0 < stated < mesh.size:
        raise UsageError(f"tp x pp x dp = {mesh.size}, but nodes x devices_per_node = {stated}")
    for column in ("heads", "ffn_hidden"):
        if (size := _count(row, column, 0)) % mesh.tensor:
            raise UsageError(f"{column}={size} can't be divided by tp={mesh.tensor}")
    kv_heads = _count(row, "kv_heads", 0) or mesh.tensor
    if kv_heads % mesh.tensor and mesh.tensor % kv_heads:
        raise UsageError(f"kv_heads={kv_heads} can't be shared by tp={mesh.tensor}")
    layers = _count(row, "layers", mesh.pipeline)
    pieces = mesh.pipeline * (_count(row, "virtual_stages", 1) if mesh.pipeline > 1 else 1)
    if layers + 2 < pieces:
        raise UsageError(f"layers={layers} can't fill {pieces} pipeline stages")


def _virtual_stages(row: Mapping[str, str], mesh: Mesh) -> int | None:
    return _count(row, "virtual_stages", 0) or None if mesh.pipeline > 1 else 1


def _zero_stage(row: Mapping[str, str]) -> int | None:
    text = (row.get("zero_stage") or "").strip()
    if text not in ("", "0", "1", "2", "3"):
        raise UsageError(f"zero_stage={text!r}: it is 0, 1, 2, 3 or empty")
    return int(text) if text else None


def _word(row: Mapping[str, str], column: str, known: tuple[str, ...]) -> str | None:
    text = (row.get(column) or "").strip()
    if text and text not in known:
        raise UsageError(f"{column}={text!r}: it is one of {', '.join(known)}, or empty")
    return text or None


def _number(row: Mapping[str, str], column: str) -> float:
    text = str(row.get(column) or "").strip()
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{column}={text!r} is not a number" if text else
                         f"{column} is missing") from None  # fmt: skip
    if not 0 <= value < 1e15:
        raise UsageError(f"{column}={text} is out of range")
    return value


def _count(row: Mapping[str, str], column: str, default: int | None = None) -> int:
    """A whole number; `default` where the column is empty."""
    if default is not None and not str(row.get(column) or "").strip():
        return default
    value = _number(row, column)
    if value != int(value) or (value < 1 and default != 0):
        raise UsageError(f"{column}={row[column]}: it must be a whole number of at least 1")
    return int(value)
