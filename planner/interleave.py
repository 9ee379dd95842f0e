"""The stage plan where every rank has several stages: cuts that balance the ranks.

Input: a `StageProblem` of P v stages, and P; the stages of a rank share its memory, and each
capacity is its rank's. Output: a `StagePlan` of the least seconds, by the longest way through all
actions (`planner.longest_way`), and of gradients exchanged and parameters updated on the slowest
rank; stage s is on rank s mod P. By descent: from each of `planner.interleaved_cuts` blocks move
over one cut, or over several cuts in a row, as long as that helps; of equal steps the one with the
more equal ranks. Every stage has at least `least_blocks`. What the stages of a rank keep is chosen
together. No bound is proven.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from ir.errors import Refused
from ir.schedules import Held
from planner.interleaved_cuts import Cuts, first_cuts, least_of
from planner.kept_descent import Block, improved
from planner.longest_way import longest_way_s
from planner.schedule import StageTime
from planner.stage_points import TOUCH, HeldRun, StagePoints, held_run, stage_points
from planner.stage_problem import (
    Assignment,
    Choice,
    Point,
    StagePlan,
    StageProblem,
    fastest_s,
    moment_bytes,
    price,
)
from planner.stage_refusal import memory_message

TRIES = 8
"""How often what a rank keeps is chosen again, for a moment at which it was too much."""
TINY = 1e-9
"""Relative; steps that differ by less are equal."""
Value = tuple[int, float, float]  # ranks that don't fit, step, how unequal the ranks are
Content = tuple[tuple[int, int], ...]  # (run, blocks) of a stage
Moment = tuple[Held, ...]
Move = tuple[int, int, int]  # from cut, to cut, by blocks


class Interleaving:
    """The plans of one problem, also with less room on some ranks."""

    def __init__(self, problem: StageProblem, ranks: int) -> None:
        self.problem, self.ranks = problem, ranks
        self._descent = _Descent(problem, ranks)
        self._cuts: Cuts | None = None

    def plan(self, rooms_bytes: Sequence[float] = (), gap: float = 0.005) -> StagePlan:
        """The best cuts found, with so much room on each rank, from those that were best with other
        room; `Refused` where none fits."""
        problem, search = self.problem, self._descent
        search.rooms = tuple(rooms_bytes) or problem.capacity_bytes[: self.ranks]
        found = (self._cuts,) if self._cuts else first_cuts(problem, self.ranks)
        self._cuts = min(map(search.run, found), key=search.value)
        choices = search.choices(self._cuts, gap)
        if choices is None:
            shares = [room * self.ranks / problem.stages for room in search.rooms]
            virtual = problem.stages // self.ranks
            raise Refused(memory_message(replace(problem, capacity_bytes=(*shares,) * virtual)))
        return price(problem, choices)

    def improved(self, assignment: Assignment, rooms_bytes: Sequence[float]) -> Assignment:
        """With what blocks keep chosen for the step, in so much room on each rank beside copies of
        tied state."""

        def fits(rank: int, blocks: Sequence[Block]) -> bool:
            runs = self.problem.runs_at(rank)
            chosen = [(place, 1, runs[run].points[point]) for place, run, point in blocks]
            return self._descent.most_bytes(rank, chosen)[0] <= rooms_bytes[rank]

        return improved(self.problem, self.ranks, assignment, fits)

    def filled_bytes(self, plan: StagePlan) -> list[float]:
        """Of each rank, at its fullest moment."""
        filled = []
        for rank in range(self.ranks):
            runs = self.problem.runs_at(rank)
            chosen = [
                (place, choice.count, runs[choice.run].points[choice.point])
                for place, stage in enumerate(plan.assignment[rank :: self.ranks])
                for choice in stage
            ]
            filled.append(self._descent.most_bytes(rank, chosen)[0])
        return filled


class _Rank(NamedTuple):
    """Forward and backward of a micro-batch on each stage of a rank, with sends; seconds of a
    step's end; whether it does not fit."""

    times: tuple[StageTime, ...]
    tail_s: float
    is_unfit: bool

    @property
    def seconds(self) -> float:
        """Of a micro-batch on all of them."""
        return sum(forward + backward for forward, backward in self.times)


class _Descent:
    """Moves from cuts to better cuts; `rooms`: what each rank may fill."""

    def __init__(self, problem: StageProblem, ranks: int) -> None:
        self.problem, self.ranks = problem, ranks
        self.virtual = problem.stages // ranks
        self.block_runs = problem.block_runs
        self.content = lru_cache(maxsize=None)(self._content)
        self.held = lru_cache(maxsize=None)(self._held)
        self.fastest_s = lru_cache(maxsize=None)(self._fastest_s)
        self.contents: dict[Content, int] = {}
        self.known: dict[tuple[int, float, tuple[int, ...]], _Rank] = {}
        self.rooms = problem.capacity_bytes[:ranks]
        self.moments = [sorted(found, reverse=True) for found in problem.moments[:ranks]]
        self.counts = [np.array(found, dtype=float) for found in self.moments]
        every = [problem.runs_at(rank) for rank in range(ranks)]
        self.alike = [every.index(runs) for runs in every]  # the first rank with the same devices
        self.run_s = [fastest_s(runs) for runs in every]
        self.sends_s = [
            sum(problem.exposed_send_s(s) for s in range(rank, problem.stages, ranks))
            for rank in range(ranks)
        ]

    def run(self, cuts: Cuts) -> Cuts:
        """The best move is made, until none helps."""
        moves = list(_moves(len(cuts), self.ranks))
        least = least_of(self.problem, len(cuts) - 1)
        found = self.value(cuts)
        while True:
            others = [other for move in moves if (other := _moved(cuts, move, least))]
            if not found[0]:
                others = [o for o in others if not self._is_worse(o, found[1] * (1 + TINY))]
            values = self.values(others)
            best = min(range(len(others)), key=values.__getitem__, default=None)
            if best is None or not _is_less(values[best], found):
                return cuts
            found, cuts = values[best], others[best]

    def value(self, cuts: Cuts) -> Value:
        return self.values([cuts])[0]

    def values(self, several: Sequence[Cuts]) -> list[Value]:
        """Of each of several cuts."""
        if not several:
            return []
        plans = [self._ranks(cuts) for cuts in several]
        steps = self._steps_s([[rank.times for rank in plan] for plan in plans])
        return [
            (sum(rank.is_unfit for rank in plan), step_s + max(rank.tail_s for rank in plan),
             sum(rank.seconds**2 for rank in plan))
            for plan, step_s in zip(plans, steps, strict=True)
        ]  # fmt: skip

    def _ranks(self, cuts: Cuts) -> list[_Rank]:
        contents = tuple(map(self.content, cuts, cuts[1:]))
        return [self._rank(rank, contents[rank :: self.ranks]) for rank in range(self.ranks)]

    def _steps_s(self, times: Sequence[Sequence[tuple[StageTime, ...]]]) -> list[float]:
        """Of plans, from [plan][rank][place of a stage on it]."""
        problem = self.problem
        by_stage = np.array(times).swapaxes(1, 2).reshape(len(times), problem.stages, 2)
        shape = problem.schedule, self.ranks, problem.micro_batches, self.virtual
        found: list[float] = longest_way_s(*shape, by_stage).tolist()
        return found

    def _is_worse(self, cuts: Cuts, step_s: float) -> bool:
        """Whether these cuts take longer or a rank does not fit, as far as single ranks tell: each
        takes all micro-batches and its step's end. One that was not looked at takes at least what
        every block does at its fastest, and is looked at where that does not tell."""
        contents, count = tuple(map(self.content, cuts, cuts[1:])), self.problem.micro_batches
        ranks = [(rank, contents[rank :: self.ranks]) for rank in range(self.ranks)]
        fastest = (self.fastest_s(self.alike[r], mine) + self.sends_s[r] for r, mine in ranks)
        if count * max(fastest) > step_s:
            return True
        found = (self._rank(rank, mine) for rank, mine in ranks)
        return any(r.is_unfit or count * r.seconds + r.tail_s > step_s for r in found)

    def choices(self, cuts: Cuts, gap: float) -> tuple[tuple[Choice, ...], ...] | None:
        """Per stage what runs on it; None where a rank does not fit."""
        known = tuple(self.contents)
        contents = tuple(known[self.content(a, b)] for a, b in pairwise(cuts))
        stages: list[tuple[Choice, ...]] = [()] * self.problem.stages
        for rank in range(self.ranks):
            mine = contents[rank :: self.ranks]
            points = self._points(rank, mine, gap) or self._points(rank, mine)
            if points is None:
                return None
            places = [(s, run) for s in range(rank, len(stages), self.ranks)
                      for run, _ in contents[s]]  # fmt: skip
            for choice in points.choices:
                stage, run = places[choice.run]
                stages[stage] += (replace(choice, run=run),)
        return tuple(stages)

    def _content(self, a: int, b: int) -> int:
        """The number of the content of a stage of blocks a..b-1, in `contents`."""
        content = tuple(sorted(Counter(self.block_runs[a:b]).items()))
        return self.contents.setdefault(content, len(self.contents))

    def _fastest_s(self, rank: int, numbers: tuple[int, ...]) -> float:
        """Of stages with the contents of those numbers, every block at its fastest; on the devices
        of a rank."""
        known = tuple(self.contents)
        return sum(n * self.run_s[rank][run] for number in numbers for run, n in known[number])

    def _held(self, rank: int, run: int, held: Held) -> HeldRun:
        """On the devices of a rank."""
        runs = self.problem.runs_at(rank)
        return held_run(runs[run], lambda point: moment_bytes(held, point))

    def _rank(self, rank: int, numbers: tuple[int, ...]) -> _Rank:
        """Of the stages with the contents of those numbers."""
        key = (rank, self.rooms[rank], numbers)
        if key not in self.known:
            known = tuple(self.contents)
            contents = tuple(known[number] for number in numbers)
            points = self._points(rank, contents)
            times = self._times(rank, contents, points) if points else ((0.0, 0.0),) * self.virtual
            self.known[key] = _Rank(times, self._tail_s(rank, contents), points is None)
        return self.known[key]

    def _times(
        self, rank: int, contents: tuple[Content, ...], points: StagePoints
    ) -> tuple[StageTime, ...]:
        stages = range(rank, self.problem.stages, self.ranks)
        found = [[self.problem.exposed_send_s(stage) / 2] * 2 for stage in stages]
        for place, count, point in self._chosen(rank, contents, points):
            found[place][0] += count * point.forward_s
            found[place][1] += count * point.backward_s
        return tuple((forward, backward) for forward, backward in found)

    def _points(
        self, rank: int, contents: tuple[Content, ...], gap: float = inf
    ) -> StagePoints | None:
        """What the blocks of all stages of a rank run at: chosen for the mean of some moments. One
        at which that is too much is added to them, or if it is among them there is less room; where
        that does not end, it is chosen for a moment at which every stage is at its fullest."""
        problem = self.problem
        present = {r for content in contents for r, _ in content}
        copies = sum(size for i, j, size in problem.tied if j in present and i not in present)
        whole = room = self.rooms[rank] - copies
        moments: list[Moment] = []
        for _ in range(TRIES):
            mean = _mean(moments) if moments else problem.moments[rank][-1]
            points = stage_points(self._runs(rank, contents, mean), room, gap)
            if points is None:
                break
            most_bytes, fullest = self._fullest(rank, contents, points)
            if most_bytes <= whole * (1 + TOUCH):
                return points
            if fullest in moments:
                room -= most_bytes - whole
            else:
                moments.append(fullest)
        each = [
            Held(*(max(counts) for counts in zip(*held, strict=True)))
            for held in zip(*problem.moments[rank], strict=True)
        ]
        return stage_points(self._runs(rank, contents, each), whole, gap)

    def _runs(
        self, rank: int, contents: tuple[Content, ...], moment: Sequence[Held]
    ) -> list[HeldRun]:
        return [
            self.held(self.alike[rank], r, held).of_so_many(count)
            for held, content in zip(moment, contents, strict=True) for r, count in content
        ]  # fmt: skip

    def _fullest(
        self, rank: int, contents: tuple[Content, ...], points: StagePoints
    ) -> tuple[float, Moment]:
        """The most bytes of a rank, and when."""
        return self.most_bytes(rank, self._chosen(rank, contents, points))

    def _chosen(
        self, rank: int, contents: tuple[Content, ...], points: StagePoints
    ) -> list[tuple[int, int, Point]]:
        """(place of a stage on its rank, number of blocks, their point)."""
        places = [(place, r) for place, content in enumerate(contents) for r, _ in content]
        runs = self.problem.runs_at(rank)
        return [
            (places[c.run][0], c.count, runs[places[c.run][1]].points[c.point])
            for c in points.choices
        ]

    def most_bytes(
        self, rank: int, chosen: Sequence[tuple[int, int, Point]]
    ) -> tuple[float, Moment]:
        """Of a rank with blocks by (place of their stage, number, point); and at which moment."""
        kept = np.zeros((self.virtual, 2))
        for place, count, point in chosen:
            kept[place] += count * point.saved_bytes, count * point.pending_bytes
        held = (self.counts[rank] * kept).sum(axis=(1, 2))
        fullest = int(held.argmax())
        always = max(point.transient_bytes for _, _, point in chosen)
        always += sum(count * point.persistent_bytes for _, count, point in chosen)
        return always + float(held[fullest]), self.moments[rank][fullest]

    def _tail_s(self, rank: int, contents: tuple[Content, ...]) -> float:
        runs = self.problem.runs_at(rank)
        return sum(
            count * (runs[r].sync_s + runs[r].optimizer_s)
            for content in contents for r, count in content
        )  # fmt: skip


def _mean(moments: Sequence[Moment]) -> list[Held]:
    """Of what each stage holds."""
    return [
        Held(*(sum(counts) / len(moments) for counts in zip(*held, strict=True)))
        for held in zip(*moments, strict=True)
    ]


def _is_less(one: Value, other: Value) -> bool:
    """Better by more than rounding."""
    if one[0] != other[0]:
        return one[0] < other[0]
    if abs(one[1] - other[1]) > TINY * other[1]:
        return one[1] < other[1]
    return one[2] < other[2] * (1 - TINY)


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
