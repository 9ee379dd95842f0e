"""The refusals of a request for which nothing was found: no sizes, or no time.

Input: a graph, pins, the devices, the rows of the batch; or how far a search came. Output:
`Refused`, with what to try.
"""

from __future__ import annotations

from ir.errors import Refused
from ir.graph import Graph
from planner.pins import Pins, divisors, row_conditions, takes_rows


def no_sizes(graph: Graph, pins: Pins, devices: int, rows: int) -> Refused:
    """`rows`: that devices can share."""
    calls = len(graph.calls)
    if pins.is_interleaved:
        virtual = pins.virtual_stages or 2
        return Refused(
            f"the interleaved schedule with virtual_stages={virtual} finds no sizes: it needs "
            f"at least 2 pipeline ranks, pipeline x {virtual} of the model's {calls} blocks, "
            "and at least as many micro-batches as ranks, in equal rounds. Try schedule=1f1b, "
            "a larger global batch, or fewer virtual stages."
        )
    taken = [n for n in divisors(rows) if takes_rows(graph, n)]
    if len(taken) < len(divisors(rows)):
        conditions = " and ".join(dict.fromkeys(map(str, row_conditions(graph))))
        return Refused(
            f"{devices} devices find no sizes: micro-batches of a data rank need {conditions}, and "
            f"of the {rows} rows that are shared they can have {', '.join(map(str, taken))}. Pin "
            "fewer micro-batches or data ranks, or give another global batch."
        )
    fitting = [d for d in divisors(rows) if d <= devices]
    return Refused(
        f"more devices than work: {devices} devices can't share {rows} rows of the batch, "
        f"{calls} blocks for pipeline stages and the factors of the model's tensors. Try "
        f"{fitting[-1]} devices, or another global batch."
    )


def no_time(limit_s: float, candidates: int, refused: int) -> Refused:
    """`refused`: of how many candidates it was found that they do not fit."""
    tried = f"{refused} were planned, and none of those fits"
    begun = tried if refused else "none was planned: bounding them took all of it"
    return Refused(
        f"no plan was found within {limit_s:.3g} s: of {candidates} candidates {begun}. Allow more "
        "time, or pin decisions that are settled."
    )
