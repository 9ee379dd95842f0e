"""The stage plan where every rank has several stages: cuts that balance the ranks.

Input: a `StageProblem` of P v stages and P. Output: a `StagePlan`. With T_r the seconds of all
stages of rank r, stage s on rank s mod P,

    minimise  M max_r T_r + (sum_r T_r - max_r T_r) / v + max_r tail_r

by descent: from cuts that share the time evenly, blocks move over one cut, or over several cuts in
a row, as long as that helps; of equal steps the one with the more equal ranks. Every stage keeps
what is best within its own part of the rank's memory. No bound is proven.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from ir.errors import Refused
from planner.stage_cuts import Array, sums, tail_seconds
from planner.stage_problem import Choice, StagePlan, StageProblem, price
from planner.stage_refusal import memory_message
from planner.stages import StageCosts

Cuts = tuple[int, ...]  # stage s holds blocks cuts[s]..cuts[s+1]-1
Rank = tuple[int, float, float]  # stages that don't fit, step, how unequal the ranks are


def plan_interleaved(problem: StageProblem, ranks: int, gap: float = 0.005) -> StagePlan:
    """The best cuts found; `Refused` where none fits the memory."""
    search = _Descent(problem, ranks, gap)
    cuts = search.run(_even_cuts(problem))
    choices = search.choices(cuts)
    if not all(choices):
        raise Refused(memory_message(problem))
    return price(problem, tuple(c for c in choices if c))


def _even_cuts(problem: StageProblem) -> Cuts:
    """Each cut where the blocks before it take nearest to their share, with no empty stage."""
    fastest = [min(p.forward_s + p.backward_s for p in run.points) for run in problem.runs]
    ends = sums(problem, fastest)[0]
    blocks, stages = len(ends) - 1, problem.stages
    cuts = [0]
    for stage in range(1, stages):
        nearest = int(np.abs(ends - ends[-1] * stage / stages).argmin())
        cuts.append(min(max(nearest, cuts[-1] + 1), blocks - (stages - stage)))
    return (*cuts, blocks)


class _Descent:
    """Moves from cuts to better cuts."""

    def __init__(self, problem: StageProblem, ranks: int, gap: float) -> None:
        self.problem, self.ranks = problem, ranks
        self.costs = StageCosts.relaxed(problem, gap)
        self.tail: Array = tail_seconds(problem)

    def run(self, cuts: Cuts) -> Cuts:
        found = self.value(cuts)
        while True:
            options = [(self.value(moved), moved) for moved in _moves(cuts)]
            best, moved = min(options, default=(found, cuts))
            if not _is_less(best, found):
                return cuts
            found, cuts = best, moved

    def choices(self, cuts: Cuts) -> list[tuple[Choice, ...] | None]:
        """What runs on each stage; None where nothing fits."""
        stages = [(s, a, b) for s, (a, b) in enumerate(pairwise(cuts))]
        self.costs.make_exact(stages)
        return [self.costs.choices[stage] for stage in stages]

    def value(self, cuts: Cuts) -> Rank:
        unfit = sum(choice is None for choice in self.choices(cuts))
        stages = [(s, a, b) for s, (a, b) in enumerate(pairwise(cuts))]
        seconds = [float(self.costs.seconds[stage]) for stage in stages]
        if unfit:
            seconds = [s if np.isfinite(s) else 0.0 for s in seconds]
        tails = [float(self.tail[a, b]) for _, a, b in stages]
        times = self._by_rank(seconds)
        slowest = max(times)
        virtual = self.problem.stages // self.ranks
        step_s = self.problem.micro_batches * slowest + (sum(times) - slowest) / virtual
        step_s += max(self._by_rank(tails))
        return unfit, step_s, sum(time * time for time in times)

    def _by_rank(self, values: list[float]) -> list[float]:
        return [sum(values[rank :: self.ranks]) for rank in range(self.ranks)]


def _is_less(one: Rank, other: Rank) -> bool:
    """Better by more than rounding."""
    if one[0] != other[0]:
        return one[0] < other[0]
    tiny = 1e-9
    if abs(one[1] - other[1]) > tiny * other[1]:
        return one[1] < other[1]
    return one[2] < other[2] * (1 - tiny)


def _moves(cuts: Cuts) -> Iterator[Cuts]:
    """One block over each cut, or over several cuts in a row, either way."""
    for first in range(1, len(cuts) - 1):
        for last in range(first, len(cuts) - 1):
            for step in (-1, 1):
                moved = [c + step if first <= i <= last else c for i, c in enumerate(cuts)]
                if all(a < b for a, b in pairwise(moved)):
                    yield tuple(moved)
