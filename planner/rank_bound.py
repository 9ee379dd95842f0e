"""The least step of ranks with several stages, whatever blocks each of them has.

Input: a `StageProblem` with a stage per rank; per rank, what its stages hold at their fullest
moments, and how long it waits at least. Output: seconds that the rank which takes longest does, for
all micro-batches with its wait. Any share of the
blocks is allowed, in any order, with kept values in fractions. Of the longest run a rank may have
any number, of the other blocks any set: for a limit on the seconds of every rank, the most blocks
of the longest run that all can take are counted by dynamic programming over those sets, and the
least limit at which they are enough is searched for. What a rank waits for depends on the limit:
ranks that may take longer can have faster first stages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from ir.schedules import Held
from planner.interleaved_cuts import least_of
from planner.stage_cuts import Array, indifferent_prices, joint_s
from planner.stage_problem import Point, Run, StageProblem

MOST_OTHERS = 6
"""Blocks outside the longest run; with more of them there is no bound."""

SOME = 6
"""Moments of a rank that count: each gives a bound, and neighbours nearly the same."""
SPLITS = 10
"""How often the span of limits is halved in which what ranks wait for decides."""

Moments = tuple[tuple[Held, ...], ...]
Leads = Callable[[float], Sequence[float]]
"""What every rank waits for at least, where no rank takes longer than a limit with its wait."""


def least_slowest_s(problem: StageProblem, moments: Sequence[Moments], leads: Leads) -> float:
    """Infinity if no share fits the memory; 0 for models of too many kinds of blocks."""
    blocks = problem.block_runs
    longest = problem.longest_run
    others = tuple(r for r in blocks if r != longest)
    if len(others) > MOST_OTHERS:
        return 0.0
    return _Shares(problem, tuple(moments), leads, longest, others).least_slowest_s()


@dataclass(frozen=True)
class _Shares:
    """The ways to share blocks: of the run `longest` by number, of `others` by set (a bit each)."""

    problem: StageProblem
    moments: tuple[Moments, ...]
    leads: Leads
    longest: int
    others: tuple[int, ...]

    @property
    def count(self) -> int:
        return self.problem.runs[self.longest].count

    @property
    def sets(self) -> range:
        return range(2 ** len(self.others))

    def least_slowest_s(self) -> float:
        """No less than if ranks waited as little as without a limit, nor more than if they waited
        as much as with that limit; between these by bisection."""
        low = self._least_limit_s(self.leads(inf))
        high = self._least_limit_s(self.leads(low)) if low < inf else inf
        if high == low:
            return low
        for _ in range(SPLITS):
            middle = (low + high) / 2
            if self._is_enough(self._with(self.leads(middle)), middle):
                high = middle
            else:
                low = middle
        return low

    def _least_limit_s(self, leads_s: Sequence[float]) -> float:
        """By bisection over the seconds that some share of a rank takes in all."""
        seconds = self._with(leads_s)
        limits = np.unique(seconds[np.isfinite(seconds)])
        if not len(limits) or not self._is_enough(seconds, float(limits[-1])):
            return inf
        low, high = 0, len(limits) - 1
        while low < high:
            middle = (low + high) // 2
            if self._is_enough(seconds, float(limits[middle])):
                high = middle
            else:
                low = middle + 1
        return float(limits[low])

    def _with(self, leads_s: Sequence[float]) -> Array:
        """[rank, set, number]: the least seconds of a rank with its wait."""
        found: Array = self.seconds + np.array(leads_s)[:, None, None]
        return found

    def _is_enough(self, seconds: Array, limit_s: float) -> bool:
        """Whether all blocks find a place on ranks of at most so many seconds."""
        takes = np.where(seconds <= limit_s, np.arange(self.count + 1), -inf).max(axis=2)
        most = [0.0, *[-inf] * (len(self.sets) - 1)]
        for of_rank in takes.tolist():
            reached = [-inf] * len(self.sets)
            for mine, number in enumerate(of_rank):
                for others, joined in self._joined[mine] if number >= 0 else ():
                    reached[joined] = max(reached[joined], most[others] + number)
            most = reached
        return most[-1] >= self.count

    @cached_property
    def _joined(self) -> list[list[tuple[int, int]]]:
        """Per set of a rank, those that other ranks can have, with both together."""
        return [[(s, s | mine) for s in self.sets if not s & mine] for mine in self.sets]

    @cached_property
    def seconds(self) -> Array:
        """[rank, set, number]: least seconds of a rank with those blocks, of all micro-batches;
        infinity if too large."""
        known: dict[tuple[object, ...], Array] = {}
        problem, count = self.problem, self.problem.micro_batches
        found = np.full((len(self.moments), len(self.sets), self.count + 1), inf)
        for rank, moments in enumerate(self.moments):
            kind = (problem.unlike[rank], problem.capacity_bytes[rank]) if problem.unlike else ()
            for mine in self._placed(rank):
                key = (mine, problem.exposed_send_s(rank), moments, kind)
                if key not in known:
                    known[key] = self._of_rank(rank, mine)
                found[rank, mine] = count * known[key]
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
        """[number]: by duality, over some prices of a byte: any price gives a bound, at any
        moment."""
        others = [bit for bit in range(len(self.others)) if mine >> bit & 1]
        here, moments = self.problem.runs_at(rank), some(self.moments[rank])
        runs = [here[self.longest], *(here[self.others[bit]] for bit in others)]
        present = {self.longest, *(self.others[bit] for bit in others)}
        room = self.problem.capacity_bytes[rank] - least_working(runs)
        room -= _of_copies(self.problem.tied, present)
        prices = prices_of(runs, moments)
        most = max(held.forward for moment in moments for held in moment)
        longest, *alone = (Least.of(run, prices, most) for run in runs)
        held, held_of = zip(*(self._held(moment, others) for moment in moments), strict=True)
        seconds, sizes = longest.along(np.array(held))  # of so many blocks at each moment
        for place, other in enumerate(alone):
            levels = [counts[place] for counts in held_of]
            seconds = seconds + other.seconds[:, levels, None]
            sizes = sizes + other.sizes[levels, None]
        best = (seconds - room * prices[:, None, None]).max(axis=(0, 1))
        fits = (sizes <= room * (1 + 1e-9)).all(axis=0)
        best = np.maximum(best, 0.0) + self.problem.exposed_send_s(rank)
        best += _of_copies(self.problem.tied_s, present)
        is_enough = np.arange(len(best)) + len(runs) - 1 >= self._least * len(moments[0])
        return np.where(is_enough & fits, best, inf)

    @cached_property
    def _least(self) -> int:
        """Blocks of a stage."""
        return least_of(self.problem, len(self.moments) * len(self.moments[0][0]))

    def _held(self, moment: tuple[Held, ...], others: Sequence[int]) -> tuple[list[int], list[int]]:
        """Micro-batches held of each block of the longest run, of as many as there are, and of each
        of `others`, at least: every stage of the rank has its least number of blocks, the first one
        the first block of the model, and the last one the last."""
        counts = [held.forward for held in moment]
        forced, held_of = counts * self._least, {}
        for other in sorted(others, key=lambda bit: self._end(bit) is None):
            end = self._end(other)
            forced.remove(max(forced) if end is None else counts[end])
            held_of[other] = min(counts) if end is None else counts[end]
            if not forced:
                break
        held = [*sorted(forced), *[min(counts)] * self.count][: self.count]
        return held, [held_of.get(other, min(counts)) for other in others]

    def _end(self, other: int) -> int | None:
        """The place on its rank of the stage that one of `others` is on, if that is known."""
        if other == 0 and self._ends[0] != self.longest:
            return 0
        is_last = other == len(self.others) - 1 and self._ends[1] != self.longest
        return -1 if is_last else None


@dataclass(frozen=True)
class Least:
    """What a block takes at least. `seconds`: [price, held], with its bytes at a price, where so
    many micro-batches are held; `sizes`: [held], in bytes alone."""

    seconds: Array
    sizes: Array

    @staticmethod
    def of(run: Run, prices: Array, most_held: int) -> Least:
        """Of a block of a run, from no micro-batch to `most_held`."""
        held = np.arange(1.0 + most_held)
        times = np.array([p.forward_s + p.backward_s for p in run.points])
        sizes = np.stack([_bytes(p, held) for p in run.points])
        seconds = (times[:, None] + prices[:, None, None] * sizes).min(axis=1)
        joint = joint_s(run, prices[:, None], held)
        return Least(np.maximum(seconds, joint), sizes.min(axis=0))

    def along(self, held: NDArray[np.int64]) -> tuple[Array, Array]:
        """Both, of no block, of the first one, of the first two and so on; `held`: [..., block]."""
        before = np.zeros_like(self.seconds[:, held[..., :1]])
        seconds = np.concatenate([before, np.cumsum(self.seconds[:, held], axis=-1)], axis=-1)
        sizes = np.concatenate([before[0], np.cumsum(self.sizes[held], axis=-1)], axis=-1)
        return seconds, sizes


def some(moments: Moments) -> Moments:
    """Of many moments a few, from the first to the last."""
    if len(moments) <= SOME:
        return moments
    return tuple(moments[round(n * (len(moments) - 1) / (SOME - 1))] for n in range(SOME))


def _of_copies(tied: Sequence[tuple[int, int, float]], present: Collection[int]) -> float:
    """Of the copies of tied state on a rank with these runs."""
    return sum(size for i, j, size in tied if j in present and i not in present)


def prices_of(runs: Sequence[Run], moments: Moments) -> Array:
    """Of a byte: where a block changes what it keeps, if the rank holds as many micro-batches of it
    as of its stages in the mean, or at most; of all runs but the first, as few as of any; and where
    it is known what a block costs with its sharding."""
    counts = [[held.forward for held in moment] for moment in moments]
    mean, most = max(sum(c) / len(c) for c in counts), max(map(max, counts))
    held = [(runs[0], mean), (runs[0], most), *((run, min(map(min, counts))) for run in runs[1:])]
    times = [np.array([p.forward_s + p.backward_s for p in run.points]) for run, _ in held]
    sizes = [np.array([float(_bytes(p, n)) for p in run.points]) for run, n in held]
    prices = set(indifferent_prices(times, sizes))
    joint = ((run.joint.prices, n) for run, n in held if run.joint and n)
    prices.update(price / n for known, n in joint for price in known)
    return np.array(sorted(prices))


def least_working(runs: Sequence[Run]) -> float:
    """What the backward needs that follows the fullest moment, beside all that is held: that of
    the last block of some stage."""
    return min(min(p.transient_bytes for p in run.points) for run in runs)


def _bytes(point: Point, held: Array | float) -> Array:
    return np.asarray(point.persistent_bytes + held * point.saved_bytes)
