"""Stages of a schedule that splits backward: what a stage adds to the fill, and which points suit.

Input: stages with two ways to run their blocks each, that of the least seconds and that which adds
least to the fill of the pipeline. Output: for every stage the way that makes the step shorter. Only
the rank whose own micro-batches take longest needs to be fast; the others are in its way for what
`planner.schedule.fill_s` says, and a weights' half that is not in the way may take longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.schedule import fill_rounds
from planner.stage_points import HeldRun
from planner.stage_problem import (
    Choice,
    Point,
    StagePlan,
    StageProblem,
    counted_points,
    price,
)

Choices = tuple[Choice, ...]


def filling(run: HeldRun, rounds: float, *, late: bool) -> HeldRun:
    """The run with what its points add to the fill as their seconds, no more than they do add:
    F + B - rounds W if `late`, else F + (1 - rounds) B, with B and W of the halves."""

    def weighed(point: Point) -> Point:
        first_s = point.backward_s - point.weight_s
        backward_s = first_s - rounds * (point.weight_s if late else first_s)
        return replace(point, backward_s=backward_s, weight_s=0.0)

    return HeldRun.of(tuple(map(weighed, run.points)), run.count)


def is_late(problem: StageProblem, stage: int, choices: Choices) -> bool:
    """Whether the weights' half of a stage is the smaller one."""
    points = counted_points(problem, stage, choices)
    return sum(n * (point.backward_s - 2 * point.weight_s) for point, n in points) >= 0


def least_fill_s(problem: StageProblem, send_s: float, bound_s: float, *, late: bool) -> float:
    """A bound of what the blocks of a stage add to the fill, with half of the sends in each of
    forward and backward."""
    rounds = fill_rounds(problem.stages, problem.micro_batches)
    return bound_s + send_s * (1.0 if late else 1 - rounds / 2)


def suited(
    problem: StageProblem, fastest: Sequence[Choices], leanest: Sequence[Choices]
) -> StagePlan:
    """The plan of the shorter steps, one stage after the other."""
    best = price(problem, tuple(fastest))
    for stage, choices in enumerate(leanest):
        if choices != best.assignment[stage]:
            assignment = (*best.assignment[:stage], choices, *best.assignment[stage + 1 :])
            best = min(best, price(problem, assignment), key=lambda plan: plan.step_s)
    return best
