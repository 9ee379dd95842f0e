"""The timeline of a plan: priced again as it was, and simulated.

Input: a traced graph and a plan for it. Output: the prediction of the plan's own program, the
`Pipeline` and its `Timeline`. Nothing is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass

from ir.graph import Graph
from ir.plan import Plan, decode, spmd
from ir.predicted import Prediction
from planner.calibrated import cost_model
from planner.links import pipeline_ports
from planner.offload import Hosting
from planner.pieces import Pieces
from planner.pins import Candidate
from planner.pipeline import Pipeline
from planner.price import node_times
from planner.recompute import named_point
from planner.simulate import Timeline, simulate
from planner.stage_prices import StagePrices
from planner.storage import storage_of
from planner.workload import Workload


@dataclass(frozen=True)
class Simulated:
    """A plan priced again, with its events."""

    prediction: Prediction
    pipeline: Pipeline
    timeline: Timeline


def simulate_plan(graph: Graph, plan: Plan) -> Simulated:
    """Refuses, as `spmd` does, a plan that was made for another model."""
    program = spmd(graph, plan)
    cost = cost_model(plan.cluster, plan.mesh)
    work = Workload(graph, program.flow, program.kinds, plan.global_batch, plan.optimizer)
    rows = plan.global_batch // plan.mesh.data // plan.micro_batches
    candidate = Candidate(
        plan.mesh, plan.micro_batches, plan.schedule, rows, plan.virtual_stages, plan.zero,
        plan.offload,
    )
    storages = tuple(storage_of(lowered) for lowered in program.lowered)
    times = tuple(
        node_times(lowered, storage, cost)
        for lowered, storage in zip(program.lowered, storages, strict=True)
    )
    menus = tuple(
        tuple(
            named_point(
                lowered, storage, time, program.always(number), label, kept,
                program.hosts[number].get(label, frozenset()), Hosting(plan.cluster),
            )
            for label, kept in program.keeps[number].items()
        )
        for number, (lowered, storage, time) in enumerate(
            zip(program.lowered, storages, times, strict=True)
        )
    )
    shardings = tuple(decode(v, b) for v, b in zip(program.kinds, plan.blocks, strict=True))
    found = Pieces(shardings, program.state, program.lowered, storages, times, menus)
    prices = StagePrices(work, candidate, found, cost)
    pipeline = prices.pipeline(program, pipeline_ports(cost.cluster, plan.mesh))
    prediction = prices.prediction(program, plan.prediction.bound_s)
    return Simulated(prediction, pipeline, simulate(pipeline))
