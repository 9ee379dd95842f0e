"""How many plans a search chooses from.

Input: a workload and the candidates. Output: the power of ten of the number of plans that they
stand for: cuts into stages, a strategy for every node, what every call keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import comb, log2, log10

from ir.strategies import strategies
from planner.pins import Candidate
from planner.ports import divides
from planner.workload import Workload


def plans_log10(work: Workload, candidates: Sequence[Candidate]) -> float:
    """log10 of the number of plans; 0 for none."""
    calls = len(work.graph.calls)

    @cache
    def inside(tensor: int) -> float:
        return sum(_block_log10(work, number, tensor) for number in range(len(work.kinds)))

    logs = [log10(comb(calls - 1, c.stages - 1)) + inside(c.mesh.tensor) for c in candidates]
    if not logs:
        return 0.0
    most = max(logs)
    return round(most + log10(sum(10 ** (x - most) for x in logs)), 1)


def _block_log10(work: Workload, number: int, tensor: int) -> float:
    """Strategies of the nodes of a variant, and which of its forward values every call keeps."""
    kind = work.kinds[number]
    leaves = [leaf for leaf in kind.factors.size if divides(kind.factors, leaf, tensor)]
    shardings = sum(
        log10(max(1, len(list(strategies(node, kind.factors, leaves)))))
        for node in kind.block.nodes
    )
    read = {name for node in kind.block.nodes[kind.block.n_forward :] for name in node.inputs}
    made = {name for node in kind.block.forward for name in node.outputs}
    return shardings + len(kind.calls) * len(read & made) / log2(10)
