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
from planner.pins import nearest
from planner.row_cells import (
    COUNTS,
    check_cells,
    check_columns,
    count_of,
    flag_of,
    number_of,
    text_of,
    word_of,
)
from planner.stacks import LOW_PRECISIONS, OWN_PRECISIONS, least_recompute, selective_of, traits_of
from planner.traits import Traits

MOST_MICRO_BATCHES = 1_000_000
"""Per step: more is a slip."""


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
    check_columns(row)
    _check_represented(row)
    check_cells(row)
    mesh = _mesh(row, cluster)
    _check_product(row, mesh)
    _check_words(row)
    cluster = cluster or read_cluster(row, mesh.size)
    _check_degrees(row, mesh, cluster)
    rows, batch = count_of(row, "micro_batch"), count_of(row, "global_batch")
    if batch % (rows * mesh.data):
        each = rows * mesh.data
        least = batch // each * each
        near = f"{least} or {least + each}" if least else str(each)
        raise UsageError(
            f"global_batch={batch} is no multiple of micro_batch={rows} times dp={mesh.data}: "
            f"use {near}, or another dp"
        )
    count = batch // (rows * mesh.data)
    if count > MOST_MICRO_BATCHES:
        raise UsageError(f"global_batch={batch} makes {count} micro-batches of micro_batch={rows}")
    traits = traits_of(row, cluster.device)
    _check_precision(row, cluster)
    return Configuration(
        cluster, mesh, rows, count, word_of(row, "recompute"),
        word_of(row, "recompute_modules") or selective_of(row),
        _virtual_stages(row, mesh), _zero_stage(row), flag_of(row, "sequence_parallel"),
        replace(traits, zero_group=count_of(row, "shard_group", 0)), text_of(row, "mem_kind"),
        least_recompute(row),
    )  # fmt: skip


def _mesh(row: Mapping[str, str], cluster: Cluster | None) -> Mesh:
    """The degrees; an empty `dp` is what the other degrees leave of the devices: `n_devices`, or
    else all of the cluster, or of the nodes."""
    pipeline, tensor = count_of(row, "pp", 1), count_of(row, "tp", 1)
    if text_of(row, "dp"):
        return _sized(Mesh(pipeline, count_of(row, "dp"), tensor))
    stated = count_of(row, "nodes", 1) * count_of(row, "devices_per_node", 0)
    there = cluster.n_devices if cluster else stated or pipeline * tensor
    devices = count_of(row, "n_devices", there)
    if devices % (pipeline * tensor):
        raise UsageError(
            f"n_devices={devices} can't be divided by tp={tensor} times pp={pipeline}: their "
            f"product may be {nearest(devices, tensor * pipeline)}"
        )
    return _sized(Mesh(pipeline, devices // (pipeline * tensor), tensor))


def _sized(mesh: Mesh) -> Mesh:
    _, most = COUNTS["n_devices"]
    if mesh.size > most:
        raise UsageError(f"tp x pp x dp = {mesh.size} devices, and {most} are the most")
    return mesh


def read_cluster(row: Mapping[str, str], n_devices: int) -> Cluster:
    """Nodes, NVLink domains and the network that the columns state."""
    name = text_of(row, "device")
    if not name:
        raise UsageError("device is missing")
    device = named_device(name)
    per_node = min(count_of(row, "devices_per_node", n_devices), n_devices)
    if n_devices % per_node:
        raise UsageError(
            f"tp x pp x dp = {n_devices} devices do not fill nodes of devices_per_node={per_node}"
        )
    nodes = n_devices // per_node
    levels = node_levels(name, per_node)
    joined = max(1, min(count_of(row, "nvlink_domain", per_node) // per_node, nodes))
    joined = max(n for n in range(1, joined + 1) if nodes % n == 0)
    if joined > 1:
        levels += (replace(levels[-1], size=joined, name=DOMAIN),)
    if nodes > joined:
        link = network(name)
        if text_of(row, "inter_node_GBps_per_device"):
            rate = number_of(row, "inter_node_GBps_per_device") * 1e9
            link = replace(link, bandwidth_bytes_per_s=rate)
        levels += (Level(nodes // joined, link, NETWORK),)
    return Cluster(device, levels)


def _check_represented(row: Mapping[str, str]) -> None:
    """What this planner does not lay out is named, not guessed."""
    if count_of(row, "experts", 0) > 1:
        raise UsageError("experts: mixtures of experts are not represented")
    if count_of(row, "cp", 1) > 1:
        raise UsageError("cp: context parallelism is not represented")
    if count_of(row, "ep", 1) > 1:
        raise UsageError("ep: expert parallelism without experts")
    if count_of(row, "lora_rank", 0):
        raise UsageError("lora_rank: low-rank adapters are not represented")


def _check_product(row: Mapping[str, str], mesh: Mesh) -> None:
    """The degrees must use the devices that are stated."""
    others, asked = mesh.tensor * mesh.pipeline, count_of(row, "n_devices", mesh.size)
    if asked != mesh.size:
        fits = f": tp x pp = {others} leave dp={asked // others}" if asked % others == 0 else ""
        raise UsageError(f"tp x pp x dp = {mesh.size}, but n_devices={asked}{fits}")


def _check_words(row: Mapping[str, str]) -> None:
    """Cells that say no to each other."""
    recompute, modules = word_of(row, "recompute"), word_of(row, "recompute_modules")
    if modules and recompute in ("none", "full"):
        raise UsageError(
            f"recompute={recompute} leaves nothing to recompute_modules={modules}: "
            "those go with recompute=selective, or empty"
        )
    domain, node = count_of(row, "nvlink_domain", 0), count_of(row, "devices_per_node", 0)
    if node and domain > node and domain % node:
        raise UsageError(
            f"nvlink_domain={domain} is not made of whole nodes of devices_per_node={node}"
        )


def _check_degrees(row: Mapping[str, str], mesh: Mesh, cluster: Cluster) -> None:
    """Degrees against devices, heads and layers."""
    if mesh.size > cluster.n_devices:
        raise UsageError(
            f"tp x pp x dp = {mesh.size}, but {cluster} has {cluster.n_devices} devices"
        )
    stated = count_of(row, "nodes", 0) * count_of(row, "devices_per_node", 0)
    idle = stated - count_of(row, "devices_per_node", 0)
    if 0 < mesh.size <= idle:
        raise UsageError(f"n_devices={mesh.size} leave some of nodes={row['nodes']} without any")
    if 0 < stated < mesh.size:
        raise UsageError(f"tp x pp x dp = {mesh.size}, but nodes x devices_per_node = {stated}")
    for column in ("heads", "ffn_hidden"):
        if (size := count_of(row, column, 0)) % mesh.tensor:
            legal = nearest(size, mesh.tensor)
            raise UsageError(f"{column}={size} can't be divided by tp={mesh.tensor}: use {legal}")
    kv_heads = count_of(row, "kv_heads", 0) or mesh.tensor
    if kv_heads % mesh.tensor and mesh.tensor % kv_heads:
        raise UsageError(f"kv_heads={kv_heads} can't be shared by tp={mesh.tensor}")
    group = count_of(row, "shard_group", 0)
    if group and mesh.data % group:
        legal = nearest(mesh.data, group)
        raise UsageError(f"dp={mesh.data} can't be divided by shard_group={group}: use {legal}")
    layers = count_of(row, "layers", mesh.pipeline)
    pieces = mesh.pipeline * (count_of(row, "virtual_stages", 1) if mesh.pipeline > 1 else 1)
    if layers + 2 < pieces:
        raise UsageError(f"layers={layers} can't fill {pieces} pipeline stages")


def _check_precision(row: Mapping[str, str], cluster: Cluster) -> None:
    """The device must have units for the products' precision."""
    described = "bf16" if text_of(row, "hidden") else ""  # of the model that the row describes
    stated, device = text_of(row, "precision") or described, cluster.device
    words = OWN_PRECISIONS | LOW_PRECISIONS
    if stated and not device.has_units(words[stated]):
        known = ", ".join(word for word, dtype in words.items() if device.has_units(dtype))
        raise UsageError(f"precision={stated}: {device.name} has no units for it; it has {known}")


def _virtual_stages(row: Mapping[str, str], mesh: Mesh) -> int | None:
    asked = count_of(row, "virtual_stages", 0)
    if asked > 1 and mesh.pipeline == 1:
        raise UsageError(f"virtual_stages={asked} with pp=1: there are no stages to split")
    return asked or None if mesh.pipeline > 1 else 1


def _zero_stage(row: Mapping[str, str]) -> int | None:
    word = word_of(row, "zero_stage")
    return None if word is None else int(word)
