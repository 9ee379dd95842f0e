"""The stage plan where every rank has several stages: cuts that balance the ranks.

Input: a `StageProblem` of P v stages, and P; the stages of a rank share its memory, and each
capacity is its rank's. Output: a `StagePlan`. With T_r the seconds of all stages of rank r, stage
s on rank s mod P,

    minimise  M max_r T_r + (sum_r T_r - max_r T_r) / v + max_r tail_r

by descent: from cuts that share the time evenly, blocks move over one cut, or over several cuts in
a row, as long as that helps; of equal steps the one with the more equal ranks. Every stage has at
least `least_blocks`. What the stages of a rank keep is chosen together. No bound is proven.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import inf

import numpy as np

from ir.errors import Refused
from planner.stage_cuts import sums
from planner.stage_points import StagePoints, held_run, stage_points
from planner.stage_problem import Choice, StagePlan, StageProblem, price
from planner.stage_refusal import memory_message

Cuts = tuple[int, ...]  # stage s holds blocks cuts[s]..cuts[s+1]-1
Value = tuple[int, float, float]  # ranks that don't fit, step, how unequal the ranks are
Content = tuple[tuple[int, int], ...]  # (run, blocks) of a stage


def plan_interleaved(problem: StageProblem, ranks: int, gap: float = 0.005) -> StagePlan:
    """The best cuts found; `Refused` where none fits the memory."""
    search = _Descent(problem, ranks)
    cuts = search.run(_even_cuts(problem))
    choices = search.choices(cuts, gap)
    if choices is None:
        shares = tuple(c * ranks / problem.stages for c in problem.capacity_bytes)
        raise Refused(memory_message(replace(problem, capacity_bytes=shares)))
    return price(problem, choices)


def least_blocks(blocks: int, stages: int) -> int:
    """Of a stage: those of a rank stay about equal, so that what it holds is, too."""
    return blocks // stages


def _even_cuts(problem: StageProblem) -> Cuts:
    """Each cut where the blocks before it take nearest to their share, with no stage too small."""
    fastest = [min(p.forward_s + p.backward_s for p in run.points) for run in problem.runs]
    ends = sums(problem, fastest)[0]
    blocks, stages = len(ends) - 1, problem.stages
    least, cuts = least_blocks(blocks, stages), [0]
    for stage in range(1, stages):
        nearest = int(np.abs(ends - ends[-1] * stage / stages).argmin())
        cuts.append(min(max(nearest, cuts[-1] + least), blocks - least * (stages - stage)))
    return (*cuts, blocks)


class _Descent:
    """Moves from cuts to better cuts."""

    def __init__(self, problem: StageProblem, ranks: int) -> None:
        self.problem, self.ranks = problem, ranks
        self.virtual = problem.stages // ranks
        self.content = lru_cache(maxsize=None)(self._content)
        self.points = lru_cache(maxsize=None)(self._points)
        self.sends_s = [
            sum(problem.exposed_send_s(s) for s in range(rank, problem.stages, ranks))
            for rank in range(ranks)
        ]

    def run(self, cuts: Cuts) -> Cuts:
        """The first move that helps is made, until none does."""
        found = self.value(cuts)
        is_better = True
        while is_better:
            is_better = False
            for moved in _moves(cuts, self.ranks):
                value = self.value(moved)
                if _is_less(value, found):
                    found, cuts, is_better = value, moved, True
                    break
        return cuts

    def value(self, cuts: Cuts) -> Value:
        problem, contents = self.problem, self._contents(cuts)
        points = [self.points(rank, contents[rank :: self.ranks]) for rank in range(self.ranks)]
        times = [
            (found.seconds if found else 0.0) + send_s
            for found, send_s in zip(points, self.sends_s, strict=True)
        ]
        slowest = max(times)
        step_s = problem.micro_batches * slowest + (sum(times) - slowest) / self.virtual
        step_s += max(self._tail_s(contents[rank :: self.ranks]) for rank in range(self.ranks))
        return points.count(None), step_s, sum(time * time for time in times)

    def choices(self, cuts: Cuts, gap: float) -> tuple[tuple[Choice, ...], ...] | None:
        """Per stage what runs on it; None where a rank does not fit."""
        contents, found = self._contents(cuts), [()] * self.problem.stages
        stages: list[tuple[Choice, ...]] = list(found)
        for rank in range(self.ranks):
            points = self._points(rank, contents[rank :: self.ranks], gap)
            if points is None:
                return None
            places = [(s, run) for s in range(rank, len(stages), self.ranks)
                      for run, _ in contents[s]]  # fmt: skip
            for choice in points.choices:
                stage, run = places[choice.run]
                stages[stage] += (replace(choice, run=run),)
        return tuple(stages)

    def _contents(self, cuts: Cuts) -> tuple[Content, ...]:
        return tuple(self.content(a, b) for a, b in pairwise(cuts))

    def _content(self, a: int, b: int) -> Content:
        return tuple(sorted(Counter(self.problem.block_runs[a:b]).items()))

    def _points(
        self, rank: int, contents: tuple[Content, ...], gap: float = inf
    ) -> StagePoints | None:
        """What the blocks of all stages of a rank run at."""
        problem, runs = self.problem, []
        for place, content in enumerate(contents):
            stage = place * self.ranks + rank
            runs += [held_run(problem, stage, problem.runs[r], count) for r, count in content]
        present = {r for content in contents for r, _ in content}
        copies = sum(size for i, j, size in problem.tied if j in present and i not in present)
        return stage_points(runs, problem.capacity_bytes[rank] - copies, gap)

    def _tail_s(self, contents: tuple[Content, ...]) -> float:
        runs = self.problem.runs
        return sum(
            count * (runs[r].sync_s + runs[r].optimizer_s)
            for content in contents for r, count in content
        )  # fmt: skip


def _is_less(one: Value, other: Value) -> bool:
    """Better by more than rounding."""
    if one[0] != other[0]:
        return one[0] < other[0]
    tiny = 1e-9
    if abs(one[1] - other[1]) > tiny * other[1]:
        return one[1] < other[1]
    return one[2] < other[2] * (1 - tiny)


def _moves(cuts: Cuts, ranks: int) -> Iterator[Cuts]:
    """One block over each cut, or over several cuts in a row, either way; so a block can get from
    any rank to any other."""
    least = least_blocks(cuts[-1], len(cuts) - 1)
    for length in range(ranks):
        for first in range(1, len(cuts) - 1 - length):
            last = first + length
            for step in (-1, 1):
                moved = [c + step if first <= i <= last else c for i, c in enumerate(cuts)]
                if all(b - a >= least for a, b in pairwise(moved)):
                    yield tuple(moved)
