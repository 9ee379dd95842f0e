"""What layouts between blocks cost where the pipeline is cut: terms for the sharding program.

Input: the program of all blocks, a candidate, its cost model. Output: seconds of a micro-batch by
layout variable. Which boundaries are cut is not known yet, so every place between two calls counts
as a cut with the same part, (stages - 1) / (calls - 1), or of what has no gradient and goes once to
each rank (ranks - 1) / (calls - 1); both ranks spend a send, unless they meet.
"""

from __future__ import annotations

from collections.abc import Mapping

from ir.graph import Graph
from ir.layout import Layout
from planner.cost import CostModel
from planner.pins import Candidate
from planner.sharding_program import ShardingProgram
from planner.solver import Term


def send_terms(
    built: ShardingProgram, variant_of: Mapping[int, int], candidate: Candidate, cost: CostModel
) -> list[Term]:
    """Of every value that calls hand on, and of its gradient on the way back; none without a
    pipeline, or where the ranks of the tensor axis send pieces anyway."""
    calls = len(built.graph.calls)
    if candidate.stages == 1 or calls == 1 or cost.traits.scatters_sends:
        return []
    part = (1 if cost.sends_meet else 2) / (calls - 1)
    terms: list[Term] = []
    for (number, name), places in _crossed(built.graph, built, variant_of).items():
        kind, ports = built.kinds[number], built.ports.of_value
        with_gradient = any(name == output for output, _ in kind.block.tangents)
        cuts = (candidate.stages if with_gradient else candidate.mesh.pipeline) - 1
        for way in ("value", "gradient") if with_gradient else ("value",):
            for placement, variable in built.program.layouts[ports[number, way, name]]:
                layout = Layout(kind.spread.place[name], placement)
                seconds = cost.send_s(built.prices[number].bytes_of(name, layout))
                terms.append((part * cuts * places * seconds, variable))
    return terms


def _crossed(
    graph: Graph, built: ShardingProgram, variant_of: Mapping[int, int]
) -> dict[tuple[int, str], int]:
    """How many places between two calls the values of an output cross, by (variant, output)."""
    last: dict[str, int] = {}
    for index, call in enumerate(graph.calls):
        last.update(dict.fromkeys(call.arguments, index))
    found: dict[tuple[int, str], int] = {}
    for index, call in enumerate(graph.calls):
        number = variant_of[index]
        for value, name in zip(call.results, built.kinds[number].block.outputs, strict=True):
            if (places := last.get(value, index) - index) > 0:
                found[number, name] = found.get((number, name), 0) + places
    return found
