"""What blocks keep where ranks have several stages: better for the step than for each rank alone.

Input: a `StageProblem` of P v stages, P, an assignment, what fits. Output: an assignment that is no
slower. `planner.interleave` chooses what is kept for the least seconds of every rank by itself; but
ranks wait for each other's first stages, and in every round for the slowest. By descent on the
longest way through all actions: a block runs at a faster point, or changes points with another one
of its rank, where that way comes through its stage; of all such moves that fit the best is made.
Where none helps, another block may keep less for it, until that does not help either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from heapq import nsmallest
from operator import itemgetter
from typing import TypeAlias

import numpy as np

from planner.longest_way import longest_way_s, visits
from planner.stage_cuts import Array
from planner.stage_problem import Assignment, Choice, StageProblem

ROUNDS = 80
"""Moves that are made at most."""
MOST_LOOKS, MOST_FITTING = 400, 20
"""At moves of a rank, in a round, for whether they fit; and of those that do."""
MOST_ACTIONS = 10**7
"""Of all moves that fit, together; of more than that only the best on the way are priced."""
TINY = 1e-9
"""Relative; steps that differ by less are equal."""

Block: TypeAlias = tuple[int, int, int]
"""(place of its stage on the rank, run, point)."""
Fits: TypeAlias = Callable[[int, Sequence[Block]], bool]
"""Whether a rank has room for these blocks."""


def improved(problem: StageProblem, ranks: int, assignment: Assignment, fits: Fits) -> Assignment:
    """At most `ROUNDS` moves away."""
    search = _Search(problem, ranks, fits)
    blocks = [_blocks(assignment[rank::ranks]) for rank in range(ranks)]
    times = np.array([search.times(rank, of_rank) for rank, of_rank in enumerate(blocks)])
    for _ in range(ROUNDS):
        move = search.best(blocks, times, pairs=False) or search.best(blocks, times, pairs=True)
        if move is None:
            break
        rank, of_rank = move
        blocks[rank], times[rank] = of_rank, search.times(rank, of_rank)
    return _assignment(blocks, ranks)


class _Search:
    """Moves between the points that blocks run at."""

    def __init__(self, problem: StageProblem, ranks: int, fits: Fits) -> None:
        self.problem, self.ranks, self.fits = problem, ranks, lru_cache(maxsize=None)(fits)
        self.virtual = problem.stages // ranks
        self.shape = problem.schedule, ranks, problem.micro_batches, self.virtual
        self.most = max(1, MOST_ACTIONS // (2 * problem.stages * problem.micro_batches))

    def times(self, rank: int, blocks: Sequence[Block]) -> Array:
        """[place, 2]: forward and backward of a micro-batch on each stage of a rank."""
        stages, runs = range(rank, self.problem.stages, self.ranks), self.problem.runs_at(rank)
        found = np.array([[self.problem.exposed_send_s(stage) / 2] * 2 for stage in stages])
        for place, run, point in blocks:
            found[place] += runs[run].points[point].forward_s, runs[run].points[point].backward_s
        return found

    def best(
        self, blocks: Sequence[Sequence[Block]], times: Array, *, pairs: bool
    ) -> tuple[int, list[Block]] | None:
        """(rank, its blocks after the best move); None if none helps. `times`: of all ranks."""
        found = nsmallest(self.most, self._moves(blocks, times, pairs=pairs), key=itemgetter(0))
        moves = [(rank, of_rank) for _, rank, of_rank in found]
        several = np.repeat(times[None], len(moves) + 1, axis=0)
        for n, (rank, of_rank) in enumerate(moves):
            several[n, rank] = self.times(rank, of_rank)
        *steps_s, now_s = longest_way_s(*self.shape, self._by_stage(several)).tolist()
        least = min(range(len(moves)), key=steps_s.__getitem__, default=None)
        if least is None or steps_s[least] >= now_s * (1 - TINY):
            return None
        return moves[least]

    def _by_stage(self, several: Array) -> Array:
        """[k, stages, 2], from [k, rank, place, 2]."""
        found: Array = several.swapaxes(1, 2).reshape(len(several), self.problem.stages, 2)
        return found

    def _moves(
        self, blocks: Sequence[Sequence[Block]], times: Array, *, pairs: bool
    ) -> Iterator[tuple[float, int, list[Block]]]:
        """(seconds more on the way, rank, its blocks after a move) of those that fit and may help;
        on each rank some that make the way through it shortest."""
        seen = visits(*self.shape, self._by_stage(times[None])[0]).astype(float)
        for rank, of_rank in enumerate(blocks):
            changes = self._changes(rank, of_rank, seen[rank :: self.ranks], pairs=pairs)
            fitting = 0
            for more_s, old, new in nsmallest(MOST_LOOKS, changes, key=itemgetter(0)):
                after = _changed(of_rank, old, new)
                if self.fits(rank, after):
                    fitting += 1
                    yield more_s, rank, list(after)
                if fitting == MOST_FITTING:
                    break

    def _changes(
        self, rank: int, blocks: Sequence[Block], seen: Array, *, pairs: bool
    ) -> Iterator[tuple[float, list[Block], list[Block]]]:
        """(seconds more, blocks that go, blocks that come) that make a stage faster where the way
        comes through it, as often as `seen`, and that way shorter: of one block or two that change
        points, or with `pairs` of two of which the other one keeps less."""
        runs, every = self.problem.runs_at(rank), sorted(set(blocks))
        cost: dict[Block, float] = {
            (place, run, n): float(seen[place] @ (of.forward_s, of.backward_s))
            for place, run in {block[:2] for block in every}
            for n, of in enumerate(runs[run].points)
        }

        for old in every:
            place, run, point = old
            faster = [(place, run, n) for n in range(len(runs[run].points))]
            for new in (block for block in faster if cost[block] < cost[old]):
                more_s = cost[new] - cost[old]
                if not pairs:
                    yield more_s, [old], [new]
                for other in (block for block in every if block[0] != place):
                    where, its_run, its_point = other
                    its = runs[its_run].points
                    if pairs:
                        less = [n for n, of in enumerate(its)
                                if of.saved_bytes < its[its_point].saved_bytes]  # fmt: skip
                    else:
                        less = [point] if other[1:] == new[1:] else []
                    for instead in ((where, its_run, n) for n in less):
                        both_s = more_s + cost[instead] - cost[other]
                        if both_s < 0:
                            yield both_s, [old, other], [new, instead]


def _blocks(stages: Sequence[Sequence[Choice]]) -> list[Block]:
    return sorted(
        (place, choice.run, choice.point)
        for place, choices in enumerate(stages) for choice in choices for _ in range(choice.count)
    )  # fmt: skip


def _changed(
    blocks: Sequence[Block], old: Sequence[Block], new: Sequence[Block]
) -> tuple[Block, ...]:
    """The blocks of a rank where some go and others come."""
    after = list(blocks)
    for block in old:
        after.remove(block)
    return tuple(sorted([*after, *new]))


def _assignment(blocks: Sequence[Sequence[Block]], ranks: int) -> Assignment:
    stages: list[tuple[Choice, ...]] = [()] * (ranks * (1 + max(b[0] for b in blocks[0])))
    for rank, of_rank in enumerate(blocks):
        for (place, run, point), count in sorted(Counter(of_rank).items()):
            stages[place * ranks + rank] += (Choice(run, point, count),)
    return tuple(stages)
