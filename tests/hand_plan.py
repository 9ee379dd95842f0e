"""A plan made by hand: the given shardings, kept values and stages, with no prediction.

It lets tests run decisions that the planner would not make.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ir.batch import Flow, flow
from ir.cluster import Cluster, Mesh
from ir.graph import Graph
from ir.lower import Degrees, Lowered, Sharding, whole_sharding
from ir.machines import Host
from ir.plan import Placed, Plan, encode, signature
from ir.predicted import Prediction, StageCost
from ir.recompute import state_inputs
from ir.variants import Variant, variants

Keeps = Mapping[str, frozenset[str]]
HOST = Host(link_bytes_per_s=1e9, memory_bytes=2**40)
NO_COST = StageCost(0.0, 0.0, 0, 0, 0, 0, 0)


def kinds_of(graph: Graph) -> tuple[Flow, tuple[Variant, ...]]:
    """The batch flow of a graph and its variants."""
    batch_flow = flow(graph)
    return batch_flow, variants(graph, batch_flow)


def whole_shardings(kinds: Sequence[Variant]) -> tuple[Sharding, ...]:
    return tuple(whole_sharding(kind.block, kind.spread) for kind in kinds)


def state_of(graph: Graph, kind: Variant, lowered: Lowered) -> frozenset[str]:
    """Inputs of a variant that are parameters, buffers or constants."""
    names = {item.name for item in graph.state}
    return state_inputs(lowered, graph.calls[kind.calls[0]].arguments, names)


def keep_all(graph: Graph, kinds: Sequence[Variant], lowered: Sequence[Lowered]) -> list[Keeps]:
    """No recomputation, under the label `none`."""
    return [
        {"none": frozenset(piece.saved) - state_of(graph, kind, piece)}
        for kind, piece in zip(kinds, lowered, strict=True)
    ]


def even_stages(graph: Graph, pipeline: int, keep: str = "none") -> tuple[tuple[Placed, ...], ...]:
    """All calls in order, as many on each stage."""
    count = len(graph.calls)
    cuts = [round(stage * count / pipeline) for stage in range(pipeline + 1)]
    return tuple((Placed(a, b - a, keep),) for a, b in zip(cuts, cuts[1:], strict=False))


def _cluster(ranks: int, offload: str) -> Cluster:
    """Local devices; of their host something is known where something lies there."""
    local = Cluster.local(ranks, memory_GiB=1)
    return local if offload == "none" else replace(local, own_host=HOST)


def hand_plan(
    graph: Graph, degrees: Degrees, kinds: Sequence[Variant], shardings: Sequence[Sharding],
    keeps: Sequence[Keeps], stages: Sequence[tuple[Placed, ...]], *, schedule: str = "1f1b",
    virtual_stages: int = 1, zero: int = 0, offload: str = "none", hosts: Sequence[Keeps] = (),
) -> Plan:  # fmt: skip
    """These decisions as a `Plan` for as many local devices as they need."""
    mesh = Mesh(len(stages) // virtual_stages, degrees.data, degrees.tensor)
    hosts = hosts or [{}] * len(kinds)
    blocks = tuple(
        encode(*parts) for parts in zip(kinds, shardings, keeps, hosts, strict=True)
    )
    prediction = Prediction(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1, (NO_COST,) * mesh.pipeline)
    return Plan(
        graph.model, signature(graph), _cluster(mesh.size, offload), mesh, schedule,
        degrees.micro_batches, degrees.batch, "adamw", blocks, tuple(stages), prediction,
        zero=zero, offload=offload,
    )  # fmt: skip
