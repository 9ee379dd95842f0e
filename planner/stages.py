"""The stage plan: how many blocks of which run go to which stage, at which menu point.

Input: a `StageProblem`. Output: a `StagePlan` of the shortest step within a proven gap.

The program of `planner.stage_program` is exact but slow for many stages, since its relaxation
mixes plans. So it is decomposed: a search over cuts (`planner.stage_cuts`) with costs that are
too low proposes stages and gives a lower bound; the program, for one stage at a time, finds the
true costs of the proposed stages; repeat until plan and bound meet. Every round makes at least
one cost exact, so this ends, at the optimum. The whole program is left for GPipe, whose two
phases the search only bounds.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from time import monotonic

import numpy as np

from ir.errors import Refused
from ir.schedules import splits_backward
from planner.schedule import fill_rounds
from planner.split_stages import filling, is_late, least_fill_s, suited
from planner.stage_cuts import (
    Array,
    best_cuts,
    copies_bytes,
    relaxed_fill_s,
    relaxed_seconds,
    tail_seconds,
)
from planner.stage_points import HeldRun, StagePoints, held_run, stage_points
from planner.stage_problem import Choice, StagePlan, StageProblem, price
from planner.stage_program import solve_program
from planner.stage_refusal import memory_message

Stage = tuple[int, int, int]  # stage s with blocks a..b-1


def plan_stages(problem: StageProblem, gap: float = 0.005, time_limit_s: float = 20.0) -> StagePlan:
    """The shortest step within the relative `gap`; `Refused` if no plan fits the memory.

    After `time_limit_s` the best plan so far is returned, with its gap; only then does the result
    depend on the machine.
    """
    blocks = len(problem.block_runs)
    if blocks < problem.stages:
        runs = ", ".join(f"{run.name} x {run.count}" for run in problem.runs)
        raise Refused(
            f"{problem.stages} pipeline stages need at least a block each, and the model has "
            f"{blocks} ({runs}). Ask for at most {blocks} stages."
        )
    deadline = monotonic() + time_limit_s
    plan = _search_cuts(problem, gap, deadline)
    if plan is None:
        raise Refused(memory_message(problem))
    if plan.gap <= gap or problem.schedule != "gpipe" or monotonic() >= deadline:
        return plan
    assignment, bound_s = solve_program(problem, gap, max(deadline - monotonic(), 1.0))
    bound_s = max(bound_s, plan.bound_s)
    plans = price(problem, plan.assignment, bound_s), price(problem, assignment, bound_s)
    return min(plans, key=lambda candidate: candidate.step_s)


def _search_cuts(problem: StageProblem, gap: float, deadline: float) -> StagePlan | None:
    """The best plan found when no cheaper cuts are left, within the gap or out of time."""
    costs = StageCosts.relaxed(problem, gap)
    tail, best, bound_s = tail_seconds(problem), None, 0.0
    while cuts := best_cuts(costs.seconds, tail, problem.micro_batches, costs.fill):
        bound_s = max(bound_s, cuts.cost_s)
        stages = [(s, a, b) for s, (a, b) in enumerate(pairwise(cuts.at))]
        is_news = costs.make_exact(stages)
        if (plan := costs.plan(stages)) is not None:
            best = plan if best is None or plan.step_s < best.step_s else best
        if best and (_gap(best, bound_s) <= gap or not is_news or monotonic() > deadline):
            return price(problem, best.assignment, bound_s)
        if monotonic() > deadline:
            raise Refused(
                f"no stage plan was found in time for {problem.stages} stages of "
                f"{len(problem.block_runs)} blocks. Allow more time, or ask for fewer stages."
            )
    return None


def _gap(plan: StagePlan, bound_s: float) -> float:
    return (plan.step_s - bound_s) / plan.step_s if plan.step_s else 0.0


def _shifted(found: StagePoints, first_run: int) -> tuple[Choice, ...]:
    """The choices, with the runs of the whole problem."""
    return tuple(replace(c, run=c.run + first_run) for c in found.choices)


@dataclass(slots=True)
class StageCosts:
    """seconds[s,a,b] of every possible stage: a lower bound, or exact where `choices` has it.

    A stage that can't fit has infinite seconds, and None for its choices. Where a backward is
    split, `fill` is the least that stages add to the fill, and `leanest` the choices for it.
    """

    problem: StageProblem
    gap: float
    seconds: Array
    copies: Array
    choices: dict[Stage, tuple[Choice, ...] | None]
    fill: Array | None = None
    leanest: dict[Stage, tuple[Choice, ...]] = field(default_factory=dict)
    held: dict[tuple[int, int], HeldRun] = field(default_factory=dict)

    @staticmethod
    def relaxed(problem: StageProblem, gap: float) -> "StageCosts":
        fill = relaxed_fill_s(problem) if splits_backward(problem.schedule) else None
        return StageCosts(problem, gap, relaxed_seconds(problem), copies_bytes(problem), {}, fill)

    def make_exact(self, stages: list[Stage]) -> bool:
        """Solve the stages that are not solved yet; whether there were any."""
        unsolved = [stage for stage in stages if stage not in self.choices]
        for stage in unsolved:
            self._solve(stage)
        return bool(unsolved)

    def plan(self, stages: list[Stage]) -> StagePlan | None:
        """Of solved stages; None where one does not fit."""
        choices = [c for stage in stages if (c := self.choices[stage])]
        if len(choices) < len(stages):
            return None
        leanest = [self.leanest[stage] for stage in stages] if self.fill is not None else choices
        return suited(self.problem, choices, leanest)

    def _solve(self, stage: Stage) -> None:
        """The least seconds of a stage, for it and all that hold the same blocks."""
        s, a, b = stage
        alone, room_bytes, first_run = self._alone(stage)
        seconds, choices = np.inf, None
        if found := stage_points(alone, room_bytes, self.gap / 2):
            seconds, choices = found.bound_s, _shifted(found, first_run)
        for first in self._same_blocks(a, b):
            same = (s, first, first + b - a)
            self.seconds[same] = max(seconds + self.problem.send_of_s(*same), self.seconds[same])
            self.choices[same] = choices
        if self.fill is not None and choices:
            late = is_late(self.problem, s, choices)
            rounds = fill_rounds(self.problem.stages, self.problem.micro_batches)
            lean = [filling(run, rounds, late=late) for run in alone]
            least = stage_points(lean, room_bytes, self.gap / 2)
            assert least is not None  # the same bytes as before
            for first in self._same_blocks(a, b):
                same = (s, first, first + b - a)
                send_s = self.problem.send_of_s(*same)
                fill_s = least_fill_s(self.problem, send_s, least.bound_s, late=late)
                self.fill[same] = max(fill_s, self.fill[same])
                self.leanest[same] = _shifted(least, first_run)

    def _alone(self, stage: Stage) -> tuple[tuple[HeldRun, ...], float, int]:
        """What the stage holds, the bytes it may fill, and the index of its first run."""
        s, a, b = stage
        inside = self.problem.block_runs[a:b]
        runs = tuple(
            replace(self._held(s, r), count=inside.count(r)) for r in sorted(set(inside))
        )
        room_bytes = max(self.problem.capacity_bytes[s] - float(self.copies[a, b]), 1.0)
        return runs, room_bytes, inside[0]

    def _held(self, stage: int, r: int) -> HeldRun:
        """A block of a run on a stage."""
        if (stage, r) not in self.held:
            held_bytes = partial(self.problem.held_bytes, stage)
            self.held[stage, r] = held_run(self.problem.runs_at(stage)[r], held_bytes)
        return self.held[stage, r]

    def _same_blocks(self, a: int, b: int) -> Iterator[int]:
        """First blocks of the stages with the same blocks as a..b-1: shifts within one run."""
        runs = self.problem.block_runs
        if runs[a] != runs[b - 1]:
            yield a
            return
        for first in range(len(runs) - (b - a) + 1):
            if runs[first] == runs[first + b - a - 1] == runs[a]:
                yield first
