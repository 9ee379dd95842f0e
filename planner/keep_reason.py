"""Why a block does not keep all that its backward reads, in words for the text of a plan.

Input: a plan, the evaluated candidate behind it, and a point of a block's menu that is used.
Output: a clause: which rank is waited for, or what keeping all would take and save.
"""

from __future__ import annotations

from ir.plan import Plan
from ir.quantities import duration, size
from planner.byte_price import flights
from planner.candidate import Evaluated
from planner.recompute import MenuPoint

SLACK = 0.001
"""Relative: what a rank must be faster than another to be said to wait for it."""


def keep_reason(plan: Plan, best: Evaluated, variant: int, point: MenuPoint) -> str:
    """Empty for a point that keeps all. A rank that is faster than another one makes values again
    at no cost but while the pipeline fills."""
    every = max(best.pieces.menus[variant], key=lambda other: other.held_bytes)
    if point.held_bytes >= every.held_bytes:
        return ""
    if every.total_s >= point.total_s:
        return "; to keep all would save no time"
    more_bytes = _more_bytes(best, variant, point, every)
    stages = plan.prediction.stages
    free_bytes = {r: plan.prediction.capacity_of(r) - stages[r].peak_bytes for r in more_bytes}
    busy_s = [cost.forward_s + cost.backward_s for cost in stages]
    slowest = max(range(len(busy_s)), key=lambda rank: busy_s[rank])
    early = [
        rank for rank in more_bytes
        if more_bytes[rank] <= free_bytes[rank] and busy_s[rank] <= busy_s[slowest] * (1 - SLACK)
    ]  # fmt: skip
    said = [f"{_ranks(plan, early)} would else wait for {_ranks(plan, [slowest])}"] if early else []
    if late := more_bytes.keys() - early:
        fullest = max(sorted(late), key=lambda rank: more_bytes[rank] - free_bytes[rank])
        others = f" (and on {len(late) - 1} others)" if len(late) > 1 else ""
        said.append(
            f"all takes about {size(more_bytes[fullest])} more on {_ranks(plan, [fullest])}"
            f"{others}, which has {size(max(0, free_bytes[fullest]))} free, and saves "
            f"{duration(point.total_s - every.total_s)} per block and micro-batch"
        )
    return "; " + "; ".join(said)


def _more_bytes(
    best: Evaluated, variant: int, point: MenuPoint, every: MenuPoint
) -> dict[int, int]:
    """By rank that uses the point, what keeping all there takes, of all its micro-batches."""
    found: dict[int, int] = {}
    for stage, calls in enumerate(best.program.stages):
        rank = stage % best.candidate.mesh.pipeline
        uses = sum(call.variant == variant and call.keep == point.label for call in calls)
        if uses:
            each = (every.held_bytes - point.held_bytes) * flights(best, rank)
            found[rank] = found.get(rank, 0) + round(uses * each)
    return found


def _ranks(plan: Plan, ranks: list[int]) -> str:
    kind = "rank" if plan.virtual_stages > 1 else "stage"
    return f"{kind} {', '.join(map(str, sorted(ranks)))}"
