"""Cuts to begin with where every rank has several stages: pieces of the model, ranks in a round.

Input: a `StageProblem` of P v stages, and P. Output: cuts; stage s holds blocks cuts[s] to
cuts[s + 1] - 1. One shares the seconds evenly. Others line up: the blocks of the longest run are
shared so that all stages of a round have as many, the first rounds one more where they don't
divide, and what comes before or behind that run goes to the first or the last stage. Stages of a
round that differ make each other wait in every round.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import numpy as np

from planner.stage_cuts import sums
from planner.stage_problem import StageProblem, fastest_s

Cuts = tuple[int, ...]


def least_blocks(blocks: int, stages: int, *, unlike: bool) -> int:
    """Of a stage: those of a rank stay about equal, so that what it holds is, too. On `unlike`
    devices they may be as small as can be."""
    return 1 if unlike else blocks // stages


def least_of(problem: StageProblem, stages: int) -> int:
    """The same of a problem."""
    return least_blocks(len(problem.block_runs), stages, unlike=bool(problem.unlike))


def first_cuts(problem: StageProblem, ranks: int) -> Iterator[Cuts]:
    """All of them, each once."""
    yield from dict.fromkeys((even_cuts(problem), *_lined_up(problem, ranks)))


def even_cuts(problem: StageProblem) -> Cuts:
    """Each cut where the blocks before it take nearest to their share, with no stage too small."""
    ends = sums(problem, problem.fastest_s)[0]
    blocks, stages, targets = len(ends) - 1, problem.stages, _targets(problem, ends[-1])
    least, cuts = least_of(problem, stages), [0]
    for stage in range(1, stages):
        nearest = int(np.abs(ends - targets[stage]).argmin())
        cuts.append(min(max(nearest, cuts[-1] + least), blocks - least * (stages - stage)))
    return (*cuts, blocks)


def _targets(problem: StageProblem, total_s: float) -> list[float]:
    """How many seconds of blocks should lie before each stage, by the pace of their devices."""
    if not problem.unlike:
        return [total_s * stage / problem.stages for stage in range(problem.stages)]
    counts = [run.count for run in problem.runs]
    paces = [
        1 / sum(n * seconds for n, seconds in zip(counts, fastest_s(runs), strict=True))
        for runs in problem.unlike
    ]
    return [total_s * sum(paces[:stage]) / sum(paces) for stage in range(problem.stages)]


def _lined_up(problem: StageProblem, ranks: int) -> Iterator[Cuts]:
    """With the rest of a round on its first ranks, or on its last."""
    runs, stages, longest = problem.runs, problem.stages, problem.longest_run
    each, rest = divmod(runs[longest].count, stages)
    rounds, left = divmod(rest, ranks)
    for early in (True, False) if left else (True,):
        part = range(left) if early else range(ranks - left, ranks)
        sizes = [
            each + (s // ranks < rounds or (s // ranks == rounds and s % ranks in part))
            for s in range(stages)
        ]
        sizes[0] += sum(run.count for run in runs[:longest])
        sizes[-1] += sum(run.count for run in runs[longest + 1 :])
        if min(sizes) >= least_of(problem, stages):
            yield (0, *accumulate(sizes))
