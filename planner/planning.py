"""`plan`: from a traced graph and a cluster to a `Plan`.

Input: the graph, the cluster, the global batch, pins. Output: the plan that the search finds, with
its notes and its text. What makes no sense is refused before the search.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

from ir.batch import flow
from ir.cluster import Cluster
from ir.collector import paused_collector
from ir.errors import UsageError
from ir.graph import Graph
from ir.plan import Plan, encode, signature
from ir.seats import seated, seats_of
from ir.variants import variants
from planner.approximations import approximations
from planner.describe import describe
from planner.limits import check_processes, check_time_limit
from planner.offload import check_offload
from planner.pins import check_batch, check_pins, read_pins
from planner.price import OPTIMIZER_TENSORS
from planner.search import Search
from planner.workload import Workload


@paused_collector()
def plan(
    graph: Graph, cluster: Cluster | str, *, global_batch: int,
    pin: Mapping[str, Any] | None = None, optimizer: str = "adamw", name: str | None = None,
    time_limit_s: float = inf, processes: int | None = None,
) -> Plan:  # fmt: skip
    """Decides how to train `graph` on `cluster`, or on that of a spec; deterministic, but for a
    search that a time limit ends: then the best plan so far, with its gap. Devices are left idle
    where the others are faster without them, or where the pinned degrees say so. `processes`: in
    how many to search (`ir.workers`); the plan is the same in any number.

    `pin` fixes decisions: pipeline, data, tensor, micro_batches, schedule ("gpipe", "1f1b",
    "interleaved", "zero-bubble"), virtual_stages (of a rank, where interleaved), recompute
    ("none", "selective", "full"), zero (0 to 3), offload (what may lie on the host: `ir.offload`).
    Raises `UsageError` for a request that makes no sense, `Refused` when no plan fits or the
    numbers would change.
    """
    if optimizer not in OPTIMIZER_TENSORS:
        known = ", ".join(sorted(OPTIMIZER_TENSORS))
        raise UsageError(f"unknown optimizer {optimizer!r}. Known: {known}.")
    check_time_limit(time_limit_s)
    check_processes(processes)
    cluster = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    pins = read_pins(pin)
    has_batch = any(item.batch_dim is not None for item in graph.inputs)
    check_batch(graph, global_batch)
    check_offload(pins.offload, cluster, optimizer)
    check_pins(pins, cluster.n_devices, global_batch, has_batch=has_batch)
    if pins.pipeline and pins.data and pins.tensor:
        seats_of(cluster, pins.pipeline * pins.data * pins.tensor)
    batch_flow = flow(graph)
    work = Workload(graph, batch_flow, variants(graph, batch_flow), global_batch, optimizer)
    search = Search(work, cluster, pins, has_batch, time_limit_s, processes)
    best = search.run()
    cluster, idle = search.attempts.supply.cluster_of(best.candidate), search.idle
    used = seated(cluster, best.candidate.mesh.size)
    notes = (
        *idle.notes(best.candidate.mesh, best.prediction.step_s), *search.notes,
        *search.node_orders.notes(best.candidate, best.prediction.step_s),
        *approximations(work, best, used),
    )  # fmt: skip
    blocks = tuple(
        encode(*parts)
        for parts in zip(
            work.kinds, best.pieces.shardings, best.program.keeps, best.program.hosts, strict=True
        )
    )
    made = Plan(
        name or graph.model, signature(graph), cluster, best.candidate.mesh,
        best.candidate.schedule, best.candidate.micro_batches, global_batch, optimizer, blocks,
        best.stages, best.prediction, notes, zero=best.candidate.zero,
        offload=best.program.offload, certificate=search.certificate,
    )  # fmt: skip
    return replace(made, text=describe(made, best))
