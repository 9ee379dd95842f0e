"""What ranks of several stages wait at least for: the first stages of the ranks before them.

Input: per rank, the least seconds of its first stage, and of what is sent there and back; a
`StageProblem` with a stage per rank, whose seconds are of one micro-batch alone; what the stages of
every rank hold. Output: `Leads`: seconds by rank, where no rank takes longer than a limit. A rank
waits at first for the forward of those stages, and at last for their backward. If x is what the
first stage of a rank takes, t what all its stages do, and a byte has price p, then for any m > 0

    x + m t + m p bytes >= a(m, p),  so  x >= a(m, p) - m t - m p room

where a(m, p) is a sum over blocks: of the first stage 1 + m times the least of seconds and bytes at
the price p m / (1 + m), of the others m times that at the price p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from planner.interleaved_cuts import least_of
from planner.rank_bound import Least, Moments, least_working, prices_of, some
from planner.stage_cuts import Array
from planner.stage_problem import StageProblem

SHARES = (0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)
"""Values of m."""


@dataclass(frozen=True)
class FirstStage:
    """`least_s`: whatever the rank's other stages take; `send_s`: to the next rank, there and back;
    `lines`: [m, 3], of a, m and what the rank takes once per step, so that the stage takes at least
    a - m t where all stages of the rank take t per micro-batch."""

    least_s: float
    send_s: float = 0.0
    lines: Array | None = None

    def seconds(self, limit_s: float, micro_batches: int) -> float:
        """Where the rank takes no longer for all micro-batches and what it does once."""
        if self.lines is None or limit_s == inf:
            return self.least_s
        at_least, share, once_s = self.lines.T
        most_s = (limit_s - once_s) / micro_batches
        return max(self.least_s, float((at_least - share * most_s).max()))


@dataclass(frozen=True)
class Leads:
    """`first`: of every rank but the last."""

    first: Sequence[FirstStage]
    micro_batches: int

    def __call__(self, limit_s: float) -> list[float]:
        """Per rank, where none takes longer than the limit with its wait."""
        leads_s = [0.0]
        for stage in self.first:
            own_s = stage.seconds(limit_s - leads_s[-1], self.micro_batches)
            leads_s.append(leads_s[-1] + own_s + stage.send_s)
        return leads_s


def first_lines(
    problem: StageProblem, whole: StageProblem, moments: Sequence[Moments]
) -> list[Array]:
    """The lines of every rank but the last; nothing where blocks outside the longest run may lie
    anywhere, and not only at the ends of the model. `whole`: the problem with what repeated blocks
    do once per step in their seconds of a micro-batch."""
    longest = max(range(len(problem.runs)), key=lambda r: problem.runs[r].count)
    before, behind = problem.runs[:longest], problem.runs[longest + 1 :]
    if sum(run.count for run in before) > 1 or sum(run.count for run in behind) > 1:
        return []
    least = least_of(problem, len(moments) * len(moments[0][0]))
    once_s = problem.runs[longest].sync_s - whole.runs[longest].sync_s
    prices = prices_of([problem.runs[longest]], moments[0])
    most = max(held.forward for moment in moments[0] for held in moment)
    tables = [
        Least.of(problem.runs[longest], prices * part, most).seconds
        for part in (1.0, *(share / (1 + share) for share in SHARES))
    ]
    known: dict[tuple[object, ...], Array] = {}
    found = []
    for rank, of_rank in enumerate(moments[:-1]):
        has_first = bool(before) and rank == 0
        key = (has_first, of_rank, problem.exposed_send_s(rank))
        if key not in known:
            here = _Rank(problem, rank, of_rank, longest, least, has_first, once_s)
            known[key] = here.lines(prices, tables)
        found.append(known[key])
    return found


@dataclass(frozen=True)
class _Rank:
    """`least`: blocks of every stage, all of the longest run; `has_first`: but for the first block
    of the model. `once_s`: of a block, once per step."""

    problem: StageProblem
    rank: int
    moments: Moments
    longest: int
    least: int
    has_first: bool
    once_s: float

    def lines(self, prices: Array, tables: Sequence[Array]) -> Array:
        """[m, 3]: see `FirstStage`. `tables`: [price, held], the least of a block at the prices,
        and at their parts that count for the first stage, by m."""
        run, first = self.problem.runs[self.longest], self.problem.runs[0]
        room = self.problem.capacity_bytes[self.rank] - least_working(
            [run, first] if self.has_first else [run]
        )
        held = np.array([[stage.forward for stage in moment] for moment in some(self.moments)])
        rest = self.least * tables[0][:, held[:, 1:]].sum(axis=-1)
        rest += self.problem.exposed_send_s(self.rank) - prices[:, None] * room
        alone_s = min(p.forward_s + p.backward_s for p in first.points) * self.has_first
        blocks = self.least - self.has_first
        once_s = (self.least * held.shape[1] - self.has_first) * self.once_s
        lines = []
        for share, table in zip(SHARES, tables[1:], strict=True):
            mine = table[:, held[:, 0]]
            least_s = ((1 + share) * (blocks * mine + alone_s) + share * rest).max()
            lines.append((least_s, share, once_s))
        return np.array(lines)
