"""The least step of ranks with several stages, whatever blocks each of them has.

Input: a `StageProblem` with a stage per rank; per rank, what its stages hold at their fullest
moments, and how long it waits at least. Output: seconds that the rank which takes longest does, for
all micro-batches with its wait. Any share of the
blocks is allowed, in any order, with kept values in fractions. Of the longest run a rank may have
any number, of the other blocks any set: for a limit on the seconds of every rank, the most blocks
of the longest run that all can take are counted by dynamic programming over those sets, and the
least limit at which they are enough is searched for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from ir.schedules import Held
from planner.interleaved_cuts import least_of
from planner.stage_cuts import Array, indifferent_prices
from planner.stage_problem import Point, Run, StageProblem

MOST_OTHERS = 6
"""Blocks outside the longest run; with more of them there is no bound."""

Moments = tuple[tuple[Held, ...], ...]


def least_slowest_s(
    problem: StageProblem, moments: Sequence[Moments], leads_s: Sequence[float]
) -> float:
    """Infinity if no share fits the memory; 0 for models of too many kinds of blocks."""
    blocks = problem.block_runs
    longest = max(range(len(problem.runs)), key=lambda r: problem.runs[r].count)
    others = tuple(r for r in blocks if r != longest)
    if len(others) > MOST_OTHERS:
        return 0.0
    return _Shares(problem, tuple(moments), tuple(leads_s), longest, others).least_slowest_s()


@dataclass(frozen=True)
class _Shares:
    """The ways to share blocks: of the run `longest` by number, of `others` by set (a bit each)."""

    problem: StageProblem
    moments: tuple[Moments, ...]
    leads_s: tuple[float, ...]
    longest: int
    others: tuple[int, ...]

    @property
    def count(self) -> int:
        return self.problem.runs[self.longest].count

    @property
    def sets(self) -> range:
        return range(2 ** len(self.others))

    def least_slowest_s(self) -> float:
        """By bisection over the seconds that some share of a rank takes in all."""
        limits = np.unique(self.seconds[np.isfinite(self.seconds)])
        if not len(limits) or not self._is_enough(float(limits[-1])):
            return inf
        low, high = 0, len(limits) - 1
        while low < high:
            middle = (low + high) // 2
            if self._is_enough(float(limits[middle])):
                high = middle
            else:
                low = middle + 1
        return float(limits[low])

    def _is_enough(self, limit_s: float) -> bool:
        """Whether all blocks find a place on ranks of at most so many seconds."""
        takes = np.where(self.seconds <= limit_s, np.arange(self.count + 1), -inf).max(axis=2)
        most = np.full(len(self.sets), -inf)
        most[0] = 0
        for of_rank in takes:
            reached = np.full(len(self.sets), -inf)
            for mine in self.sets:
                if of_rank[mine] < 0:
                    continue
                free = [s for s in self.sets if not s & mine]
                joined = [s | mine for s in free]
                np.maximum.at(reached, joined, most[free] + of_rank[mine])
            most = reached
        return bool(most[-1] >= self.count)

    @cached_property
    def seconds(self) -> Array:
        """[rank, set, number]: least seconds of a rank with those blocks, of all micro-batches and
        its wait; infinity if too large."""
        known: dict[tuple[object, ...], Array] = {}
        problem, count = self.problem, self.problem.micro_batches
        found = np.full((len(self.moments), len(self.sets), self.count + 1), inf)
        for rank, moments in enumerate(self.moments):
            kind = (problem.unlike[rank], problem.capacity_bytes[rank]) if problem.unlike else ()
            for mine in self._placed(rank):
                key = (mine, problem.exposed_send_s(rank), moments, kind)
                if key not in known:
                    known[key] = self._of_rank(rank, mine)
                found[rank, mine] = count * known[key] + self.leads_s[rank]
        return found

    def _placed(self, rank: int) -> list[int]:
        """The sets with the model's first block on the first rank, its last one on the last."""
        first = last = 0
        if self._ends[0] != self.longest:
            first = 1
        if self._ends[1] != self.longest:
            last = 1 << (len(self.others) - 1)
        there = (first if rank == 0 else 0) | (last if rank == len(self.moments) - 1 else 0)
        return [mine for mine in self.sets if mine & (first | last) == there]

    @cached_property
    def _ends(self) -> tuple[int, int]:
        """The runs of the first and of the last block."""
        blocks = self.problem.block_runs
        return blocks[0], blocks[-1]

    def _of_rank(self, rank: int, mine: int) -> Array:
        """[number]: by duality, over some prices of a byte: any price gives a bound."""
        runs = [r for bit, r in enumerate(self.others) if mine >> bit & 1]
        here = self.problem.runs_at(rank)
        room = self.problem.capacity_bytes[rank] - _least_working(here, [self.longest, *runs])
        numbers = np.arange(self.count + 1, dtype=np.float64)
        held = self._held(self.moments[rank], numbers, len(runs))
        least_held = min(min(h.forward for h in moment) for moment in self.moments[rank])
        points = here[self.longest].points
        sizes = [np.stack([_bytes(p, held) for p in points])]
        times = [_times(points)]
        for r in runs:
            sizes.append(np.array([[_bytes(p, least_held)] for p in here[r].points]))
            times.append(_times(here[r].points))
        counts = [numbers, *(np.ones(1) for _ in runs)]
        middle = [size[:, min(size.shape[1] - 1, 1 + self.count // len(self.moments))]
                  for size in sizes]  # fmt: skip
        best = np.zeros(self.count + 1)
        for price in indifferent_prices(times, middle):
            total = sum(
                n * (time[:, None] + price * size).min(axis=0)
                for n, time, size in zip(counts, times, sizes, strict=True)
            )
            best = np.maximum(best, total - price * room)
        smallest = sum(n * size.min(axis=0) for n, size in zip(counts, sizes, strict=True))
        best += self.problem.exposed_send_s(rank)
        is_enough = numbers + len(runs) >= self._least * len(self.moments[rank][0])
        return np.where(is_enough & (smallest <= room * (1 + 1e-9)), best, inf)

    @cached_property
    def _least(self) -> int:
        """Blocks of a stage."""
        return least_of(self.problem, len(self.moments) * len(self.moments[0][0]))

    def _held(self, moments: Moments, numbers: Array, others: int) -> Array:
        """[number]: micro-batches held per block, at least: every stage of the rank has its least
        number of blocks, and all but `others` of those are of the longest run."""
        most = np.zeros(len(numbers))
        for moment in moments:
            held = sorted(h.forward for h in moment)
            forced = [h for h in held for _ in range(self._least)]
            forced = forced[: max(0, len(forced) - others)]
            places = np.minimum(numbers, len(forced))
            sums = np.concatenate([[0.0], np.cumsum(forced)])[places.astype(int)]
            sums = sums + np.maximum(0, numbers - places) * held[0]
            most = np.maximum(most, sums / np.maximum(numbers, 1))
        return most


def _least_working(runs: Sequence[Run], present: Sequence[int]) -> float:
    """What the backward needs that follows the fullest moment, beside all that is held: that of
    the last block of some stage."""
    return min(min(p.transient_bytes for p in runs[r].points) for r in present)


def _bytes(point: Point, held: Array | float) -> Array:
    return np.asarray(point.persistent_bytes + held * point.saved_bytes)


def _times(points: Sequence[Point]) -> Array:
    return np.array([p.forward_s + p.backward_s for p in points])
