"""What a plan on a measured machine takes from the catalogue, because no curve of it is there.

Input: the workload, the evaluated candidate, its cluster. Output: names of kernels and collectives,
sorted: what the measured cost model has no curve for while it prices exactly this plan again.
"""

from __future__ import annotations

from dataclasses import replace

from ir.cluster import Cluster
from planner.calibrated import cost_model
from planner.candidate import Evaluated, Workload
from planner.measured_cost import MeasuredCost
from planner.repriced import repriced
from planner.stage_prices import StagePrices


def unmeasured(work: Workload, best: Evaluated, cluster: Cluster) -> tuple[str, ...]:
    """Nothing where nothing was measured at all."""
    plain = cost_model(cluster, best.candidate.mesh)
    if not isinstance(plain, MeasuredCost):
        return ()
    missing: set[str] = set()
    cost = replace(plain, missing=missing)
    always = [best.program.always(number) for number in range(len(work.kinds))]
    pieces = repriced(replace(best.pieces, elsewhere={}), always, cost, cluster)
    StagePrices(work, best.candidate, pieces, cost).step_s(best.program)
    return tuple(sorted(missing))
