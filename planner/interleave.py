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
from math import inf

import numpy as np

from ir.errors import Refused
from planner.stage_cuts import sums
from planner.stage_points import StagePoints, held_run, stage_points
from planner.stage_problem import Choice, Run, StagePlan, StageProblem, price
from planner.stage_refusal import memory_message

Cuts = tuple[int, ...]  # stage s holds blocks cuts[s]..cuts[s+1]-1
Value = tuple[int, float, float]  # ranks that don't fit, step, how unequal the ranks are
Content = tuple[tuple[int, int], ...]  # (run, blocks) of a stage
Rank = tuple[float, float, bool]
Move = tuple[int, int, int]  # from cut, to cut, by blocks


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
        self.block_runs = problem.block_runs
        self.content = lru_cache(maxsize=None)(self._content)
        self.held = lru_cache(maxsize=None)(self._held)
        self.known: dict[tuple[int, tuple[Content, ...]], Rank] = {}
        self.sends_s = [
            sum(problem.exposed_send_s(s) for s in range(rank, problem.stages, ranks))
            for rank in range(ranks)
        ]

    def run(self, cuts: Cuts) -> Cuts:
        """Every move that helps is made, until none does."""
        moves = list(_moves(len(cuts), self.ranks))
        least = least_blocks(cuts[-1], len(cuts) - 1)
        found, left, place = self.value(cuts), len(moves), 0
        while left:
            moved = _moved(cuts, moves[place], least)
            place, left = (place + 1) % len(moves), left - 1
            value = self.value(moved) if moved else found
            if moved and _is_less(value, found):
                found, cuts, left = value, moved, len(moves)
        return cuts

    def value(self, cuts: Cuts) -> Value:
        contents = self._contents(cuts)
        parts = [self._rank(rank, contents[rank :: self.ranks]) for rank in range(self.ranks)]
        times = [time for time, _, _ in parts]
        slowest, total = max(times), sum(times)
        step_s = self.problem.micro_batches * slowest + (total - slowest) / self.virtual
        step_s += max(tail for _, tail, _ in parts)
        return sum(unfit for _, _, unfit in parts), step_s, sum(time * time for time in times)

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
        return tuple(map(self.content, cuts, cuts[1:]))

    def _content(self, a: int, b: int) -> Content:
        return tuple(sorted(Counter(self.block_runs[a:b]).items()))

    def _held(self, stage: int, run: int, count: int) -> Run:
        return held_run(self.problem, stage, self.problem.runs[run], count)

    def _rank(self, rank: int, contents: tuple[Content, ...]) -> Rank:
        """Seconds of a micro-batch and of a step's end, and whether it does not fit."""
        key = (rank, contents)
        if key not in self.known:
            points = self._points(rank, contents)
            seconds = (points.seconds if points else 0.0) + self.sends_s[rank]
            self.known[key] = seconds, self._tail_s(contents), points is None
        return self.known[key]

    def _points(
        self, rank: int, contents: tuple[Content, ...], gap: float = inf
    ) -> StagePoints | None:
        """What the blocks of all stages of a rank run at."""
        problem = self.problem
        runs = [
            self.held(place * self.ranks + rank, r, count)
            for place, content in enumerate(contents) for r, count in content
        ]  # fmt: skip
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


def _moves(cuts: int, ranks: int) -> Iterator[Move]:
    """One block over each cut, or over several cuts in a row, either way; so a block can get from
    any rank to any other."""
    for length in range(ranks):
        for first in range(1, cuts - 1 - length):
            yield first, first + length, -1
            yield first, first + length, 1


def _moved(cuts: Cuts, move: Move, least: int) -> Cuts | None:
    """None where a stage gets too small."""
    first, last, step = move
    shrunk = (first - 1, first) if step < 0 else (last, last + 1)
    if cuts[shrunk[1]] - cuts[shrunk[0]] <= least:
        return None
    return (*cuts[:first], *(c + step for c in cuts[first : last + 1]), *cuts[last + 1 :])
