"""What other decisions would cost: the neighbours of a plan in each dimension, or asked ones.

Input: a plan, the decisions that its maker fixed, `Trials`. Output: `Alternative`s, each planned;
`compare` says by what two plans differ, part by part.

An alternative fixes one decision. The mesh stays unless the decision is a degree of it; where
that makes no sense or does not fit, the mesh is free as well, and where the decisions contradict
what the plan's maker fixed, the fewest of that. All other decisions are the search's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ir.cluster import AXES, Mesh
from ir.errors import UsageError
from ir.plan import Plan
from ir.schedules import SCHEDULES
from planner.freed import with_fewest_freed
from planner.pins import RECOMPUTE, ZERO_STAGES, check_pins, divisors, read_pins
from planner.stage_counts import MOST_STAGES
from planner.trials import Decision, Outcome, Pinned, Refusal, Request, Trials

PARTS = ("compute", "exposed_comm", "bubble", "optimizer")
"""Of a predicted step; with `_s` the fields of `Prediction`."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A decision that differs between two plans."""

    key: str
    old: Decision
    new: Decision


@dataclass(frozen=True, slots=True)
class Difference:
    """Seconds of another plan's step less those of the first, whose step takes `step_s`.

    Where the global batches differ, the other plan's seconds are for the rows of the first.
    `parts`: by name of `PARTS`.
    """

    step_s: float
    total_s: float
    parts: tuple[tuple[str, float], ...]
    moved: tuple[Moved, ...]

    @property
    def share(self) -> float:
        """Of the first plan's step."""
        return self.total_s / self.step_s


@dataclass(frozen=True, slots=True)
class Alternative:
    """Decisions that were asked for, and what became of them.

    `released`: what the plan's maker had fixed and these decisions do not go with.
    """

    asked: tuple[tuple[str, Decision], ...]
    outcome: Outcome
    released: tuple[str, ...] = ()


def decisions(plan: Plan) -> dict[str, Decision]:
    """By the names that pins have. Recompute is "mixed" where no one word says it."""
    labels = {p.keep.removesuffix(" on the host") for stage in plan.stages for p in stage}
    word = labels.pop() if len(labels) == 1 else "mixed" if labels & {"none", "full"} else ""
    mesh: dict[str, Decision] = {axis: plan.mesh.degree(axis) for axis in AXES}
    return mesh | {
        "micro_batches": plan.micro_batches, "schedule": plan.schedule,
        "virtual_stages": plan.virtual_stages,
        "recompute": word if word in (*RECOMPUTE, "mixed") else "selective", "zero": plan.zero,
        "offload": plan.offload,
    }  # fmt: skip


def compare(first: Plan, other: Plan) -> Difference:
    """What the other plan takes more or less, and which decisions differ."""
    a, b, scale = first.prediction, other.prediction, first.global_batch / other.global_batch
    parts = tuple((p, getattr(b, f"{p}_s") * scale - getattr(a, f"{p}_s")) for p in PARTS)
    return Difference(a.step_s, b.step_s * scale - a.step_s, parts, tuple(_moved(first, other)))


def _moved(first: Plan, other: Plan) -> Iterator[Moved]:
    new = decisions(other)
    for key, old in decisions(first).items():
        if new[key] != old:
            yield Moved(key, old, new[key])
    if len(first.stages) == len(other.stages) > 1 and _cuts(first) != _cuts(other):
        yield Moved("blocks per stage", _cuts(first), _cuts(other))
    pairs = zip(first.blocks, other.blocks, strict=True)
    changed = sum(a != b for x, y in pairs for a, b in zip(x.nodes, y.nodes, strict=True))
    if first.mesh.tensor == other.mesh.tensor > 1 and changed:
        yield Moved("shardings", "", f"of {changed} operations")


def _cuts(plan: Plan) -> str:
    return "+".join(str(sum(placed.count for placed in stage)) for stage in plan.stages)


def alternatives(plan: Plan, pins: Pinned, trials: Trials) -> tuple[Alternative, ...]:
    """The nearest other values of every decision, one at a time."""
    request = Request(plan.cluster, plan.global_batch, pins)
    return tuple(
        alternative(request, {key: value}, trials, plan.mesh) for key, value in neighbours(plan)
    )


def alternative(
    request: Request, asked: Pinned, trials: Trials, mesh: Mesh | None = None
) -> Alternative:
    """The request with these decisions; on that mesh, if they leave it as it is."""
    own, cluster = tuple(asked.items()), request.cluster
    try:
        check_pins(read_pins(asked), cluster.n_devices, request.global_batch)
    except UsageError as error:  # it is not for what is fixed
        return Alternative(own, Refusal(str(error), contradicts=True))
    return Alternative(own, *with_fewest_freed(request, asked, trials, mesh))


def neighbours(plan: Plan) -> Iterator[tuple[str, Decision]]:
    """The nearest legal values of each decision on both sides; all others of a choice of words."""
    devices, now = plan.cluster.n_devices, decisions(plan)
    calls = sum(placed.count for stage in plan.stages for placed in stage)
    yield from _beside("pipeline", plan.mesh.pipeline, [d for d in divisors(devices) if d <= calls])
    fitting = [d for d in divisors(devices) if plan.global_batch % d == 0]
    yield from _beside("data", plan.mesh.data, fitting)
    yield from _beside("tensor", plan.mesh.tensor, divisors(devices))
    rows = plan.global_batch // plan.mesh.data
    yield from _beside("micro_batches", plan.micro_batches, divisors(rows))
    if plan.mesh.pipeline > 1 and plan.micro_batches > 1:
        yield from (("schedule", word) for word in SCHEDULES if word != plan.schedule)
    if plan.virtual_stages > 1:
        most = min(MOST_STAGES, calls // plan.mesh.pipeline)
        yield from _beside("virtual_stages", plan.virtual_stages, list(range(2, most + 1)))
    yield from (("recompute", word) for word in RECOMPUTE if word != now["recompute"])
    if plan.mesh.data > 1:
        yield from _beside("zero", plan.zero, list(ZERO_STAGES))
    if plan.offload != "none":
        yield "offload", "none"


def _beside(key: str, value: int, legal: list[int]) -> Iterator[tuple[str, Decision]]:
    below, above = [n for n in legal if n < value], [n for n in legal if n > value]
    yield from ((key, number) for number in (*below[-1:], *above[:1]))
