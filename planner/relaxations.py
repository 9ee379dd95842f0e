"""Which constraint holds a plan back: each is relaxed a little, and planned again.

Input: a plan, the decisions that its maker fixed, `Trials`. Output: a `Relaxation` for memory, for
every link and, where it keeps degrees out, for the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ir.cluster import Cluster
from ir.cluster_change import changed, level_names
from ir.errors import UsageError
from ir.plan import Plan
from planner.alternatives import compare
from planner.freed import with_fewest_freed
from planner.pins import divisors
from planner.trials import Outcome, Pinned, Refusal, Request, Trials

MORE_MEMORY, MORE_LINK = "x1.1", "x2"
BINDING = 0.001
"""Relative; a constraint binds if relaxing it makes the step shorter by more."""


@dataclass(frozen=True, slots=True)
class Relaxation:
    """`constraint`: "memory", "link.node", "batch"; `change`: what it became; `limits`: degrees of
    the data axis that the batch keeps out."""

    constraint: str
    change: str
    outcome: Outcome
    limits: tuple[int, ...] = ()

    def binds(self, plan: Plan) -> bool:
        """Whether the plan is slower for it."""
        found = self.outcome
        return isinstance(found, Plan) and compare(plan, found).share < -BINDING


def relaxations(plan: Plan, pins: Pinned, trials: Trials) -> tuple[Relaxation, ...]:
    """Memory first, then links from the innermost, then the batch."""
    return (
        _relaxed(plan, pins, trials, "memory", MORE_MEMORY),
        *_links(plan, pins, trials),
        *_batch(plan, pins, trials),
    )


def what_if(
    request: Request, cluster: Cluster, trials: Trials
) -> tuple[Outcome, tuple[str, ...]]:
    """The same request on another cluster, and which of its fixed decisions had to be freed."""
    return with_fewest_freed(replace(request, cluster=cluster), {}, trials)


def _relaxed(plan: Plan, pins: Pinned, trials: Trials, key: str, value: str) -> Relaxation:
    try:
        cluster = changed(plan.cluster, {key: value})
    except UsageError as error:
        return Relaxation(key, value, Refusal(str(error)))
    return Relaxation(key, value, trials(Request(cluster, plan.global_batch, pins)))


def _links(plan: Plan, pins: Pinned, trials: Trials) -> Iterator[Relaxation]:
    for name, level in zip(level_names(plan.cluster), plan.cluster.levels, strict=True):
        if level.size > 1:
            key = f"link.{name.replace(' ', '-')}"
            yield _relaxed(plan, pins, trials, key, MORE_LINK)


def _batch(plan: Plan, pins: Pinned, trials: Trials) -> Iterator[Relaxation]:
    """The next batch that every degree divides, if not every one divides this."""
    devices = plan.cluster.n_devices
    kept_out = tuple(d for d in divisors(devices) if plan.global_batch % d)
    if kept_out:
        rows = plan.global_batch // devices * devices + devices
        outcome = trials(Request(plan.cluster, rows, pins))
        yield Relaxation("batch", str(rows), outcome, kept_out)
