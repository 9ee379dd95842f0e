"""What a configuration says of a model or a cluster that is given beside it: it must be so.

Input: a row (column name -> text), and the traced graph or the cluster. A column that says
something else is a `UsageError` with both values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ir.cluster import Cluster
from ir.deepen import layer_run
from ir.errors import UsageError
from ir.graph import Graph
from ir.topology import named_device
from planner.row_cells import count_of, text_of
from planner.stacks import OWN_PRECISIONS

SIZES = ("hidden", "heads", "kv_heads", "head_dim", "ffn_hidden", "vocab", "seq_len")
"""Columns whose value is the size of a dim of some tensor of a model."""
_ADVICE = "The model that is given counts: leave the column out, or give None as the model."


def check_stated_model(row: Mapping[str, str], graph: Graph) -> None:
    """Layers, sizes and precision that a row states must be those of the model."""
    if (asked := count_of(row, "layers", 0)) and asked != (has := _layers(graph)):
        raise UsageError(f"layers={asked}: {graph.model} repeats a layer {has} times. {_ADVICE}")
    sizes = {size for block in graph.blocks for kind in block.types.values() for size in kind.shape}
    for column in SIZES:
        asked = count_of(row, column, 0)
        if asked and asked not in sizes:
            raise UsageError(
                f"{column}={asked}: no tensor of {graph.model} has a dim of that size. {_ADVICE}"
            )
    stated, dtype = text_of(row, "precision"), _dtype(graph)
    if OWN_PRECISIONS.get(stated, dtype) != dtype:
        raise UsageError(f"precision={stated}: {graph.model} was traced in {dtype}. {_ADVICE}")


def _layers(graph: Graph) -> int:
    try:
        return len(layer_run(graph))
    except ValueError:  # nothing is repeated
        return 1


def _dtype(graph: Graph) -> str:
    """Of most parameters' elements."""
    counts: Counter[str] = Counter()
    for state in graph.state:
        if state.kind == "parameter":
            counts[state.type.dtype] += state.type.elements(1)
    return counts.most_common(1)[0][0]


def check_stated_cluster(row: Mapping[str, str], cluster: Cluster) -> None:
    """Device and node columns that a row states must be those of the cluster."""
    per_node = cluster.devices_per_node
    has = {"nodes": cluster.n_devices // per_node, "devices_per_node": per_node}
    wrong = [
        f"{column}={row[column]}" for column, value in has.items()
        if count_of(row, column, value) != value
    ]  # fmt: skip
    name = text_of(row, "device")
    if name and named_device(name).name not in _devices(cluster):
        wrong.insert(0, f"device={name}")
    if wrong:
        raise UsageError(
            f"{wrong[0]}: the cluster that is given is {cluster}. Leave the column out, or give "
            "None as the cluster to take what the columns state."
        )


def _devices(cluster: Cluster) -> set[str]:
    return {cluster.device.name, *(part.device.name for part in cluster.nodes)}
