"""What ranks of several stages wait at least for: the first stages of the ranks before them.

Input: per rank, the least seconds of its first stage, and of what is sent there and back; a
`StageProblem` with a stage per rank, whose seconds are of one micro-batch alone; what the stages of
every rank hold. Output: `Leads`: seconds by rank, where no rank takes longer than a limit. A rank
waits at first for the forward of those stages, and at last for their backward. If x is what the
first stage of a rank takes, t what all its stages do, and a byte has price p, then for any m > 0

    x + m t + m p bytes >= a(m, p),  so  x >= a(m, p) - m t - m p room

where a(m, p) is a sum over blocks: of the first stage 1 + m times the least of seconds and bytes at
the price p m / (1 + m), of the others m times that at the price p. Blocks of the first stage are
told apart by kind (`planner.least_forks`): x is no less than the least over how many are of each.
Blocks have one sharding: with what it decides for all of them together a(m, p) is larger.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import floor, inf

import numpy as np

from planner.interleaved_cuts import least_of
from planner.least_joint import OneSharding
from planner.rank_bound import Least, Moments, least_working, prices_of, some
from planner.stage_cuts import Array
from planner.stage_problem import Run, StageProblem

SHARES = (0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)
"""Values of m."""


@dataclass(frozen=True)
class FirstStage:
    """`least_s`: whatever the rank's other stages take; `send_s`: to the next rank, there and back;
    `lines`: [way, m, 3], of a, m and what the rank takes once per step, so that with some way to
    give its blocks kinds the stage takes at least a - m t for each m, where all stages of the rank
    take t per micro-batch."""

    least_s: float
    send_s: float = 0.0
    lines: Array | None = None

    def seconds(self, limit_s: float, micro_batches: int) -> float:
        """Where the rank takes no longer for all micro-batches and what it does once."""
        if self.lines is None or limit_s == inf:
            return self.least_s
        at_least, share, once_s = np.moveaxis(self.lines, -1, 0)
        most_s = (limit_s - once_s) / micro_batches
        return max(self.least_s, float((at_least - share * most_s).max(axis=1).min()))


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
    problem: StageProblem, whole: StageProblem, moments: Sequence[Moments],
    kinds: Sequence[Run] = (), sharding: OneSharding | None = None,
) -> list[Array]:  # fmt: skip
    """The lines of every rank but the last; nothing where blocks outside the longest run may lie
    anywhere, and not only at the ends of the model. `whole`: the problem with what repeated blocks
    do once per step in their seconds of a micro-batch; `kinds`: the longest run with the choices of
    each kind, if they are told apart; `sharding`: of that run, for closer lines."""
    longest = problem.longest_run
    before, behind = problem.runs[:longest], problem.runs[longest + 1 :]
    if sum(run.count for run in before) > 1 or sum(run.count for run in behind) > 1:
        return []
    least = least_of(problem, len(moments) * len(moments[0][0]))
    once_s = problem.runs[longest].sync_s - whole.runs[longest].sync_s
    prices = prices_of([problem.runs[longest]], moments[0])
    most = max(held.forward for moment in moments[0] for held in moment)
    every = Least.of(problem.runs[longest], prices, most).seconds
    parts = [share / (1 + share) for share in SHARES]
    kinds = kinds or problem.runs[longest : longest + 1]
    tables = [[Least.of(run, prices * part, most).seconds for part in parts] for run in kinds]
    known: dict[tuple[object, ...], Array] = {}
    found = []
    for rank, of_rank in enumerate(moments[:-1]):
        has_first = bool(before) and rank == 0
        key = (has_first, of_rank, problem.exposed_send_s(rank))
        if key not in known:
            here = _Rank(problem, rank, of_rank, longest, least, has_first, once_s)
            known[key] = here.lines(prices, every, tables)
            if sharding is not None:
                closer = here.closer_lines(kinds, sharding)
                known[key] = np.concatenate([known[key], closer], axis=1)
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

    def lines(self, prices: Array, every: Array, tables: Sequence[Sequence[Array]]) -> Array:
        """[way, m, 3]: see `FirstStage`. `every`: [price, held], the least of a block at the
        prices; `tables`: that of each kind at the parts of prices that count for the first stage,
        by m."""
        held = np.array([[stage.forward for stage in moment] for moment in some(self.moments)])
        rest = self.least * every[:, held[:, 1:]].sum(axis=-1)
        rest += self.problem.exposed_send_s(self.rank) - prices[:, None] * self._room_bytes
        once_s = (self.least * held.shape[1] - self.has_first) * self.once_s
        lines = []
        for kinds in self._ways(len(tables)):
            of_way = []
            for n, share in enumerate(SHARES):
                mine = sum((tables[kind][n][:, held[:, 0]] for kind in kinds), start=0 * rest)
                least_s = ((1 + share) * (mine + self._alone_s) + share * rest).max()
                of_way.append((least_s, share, once_s))
            lines.append(of_way)
        return np.array(lines)

    def closer_lines(self, kinds: Sequence[Run], sharding: OneSharding) -> Array:
        """The same at the moment at which most is held, where blocks have one sharding; what it
        makes the blocks of the first stage keep whole does not count. With what is done once per
        step in the seconds of all stages."""
        run = self.problem.runs[self.longest]
        moment = max(self.moments, key=lambda stages: sum(held.forward for held in stages))
        mine, *others = (stage.forward for stage in moment)
        most = max(others, default=0)
        if run.joint is None or not most:
            return np.zeros((len(list(self._ways(len(kinds)))), 0, 3))
        first, more = self.least - self.has_first, self.least * len(others)
        kept = floor(2 * self.least * sum(others) / most) / 2  # few programs for all ranks
        found = np.full((len(SHARES), len(run.joint.prices) - 1), -inf)
        for n, share in enumerate(SHARES):
            for k, price in enumerate(run.joint.prices[1:]):
                each = price / most  # a byte of the device
                found[n, k] = share * (
                    self.problem.exposed_send_s(self.rank) - each * self._room_bytes
                    + sum(self.least * _kept_s(run, each * held) for held in others)
                ) + sharding.least_s(
                    first * (1 + share) + more * share, (first + more) * share, share * kept,
                    price, share * each * (first + more),
                )  # fmt: skip
        lines = []
        for way in self._ways(len(kinds)):
            of_way = []
            for n, share in enumerate(SHARES):
                part = share / (1 + share) * mine / most
                own = [
                    sum(_kept_s(kinds[kind], price * part) for kind in way)
                    for price in run.joint.prices[1:]
                ]
                least_s = (found[n] + (1 + share) * (np.array(own) + self._alone_s)).max()
                of_way.append((least_s, share, 0.0))
            lines.append(of_way)
        return np.array(lines)

    def _ways(self, kinds: int) -> Iterator[tuple[int, ...]]:
        """To give the repeated blocks of the first stage their kinds."""
        return combinations_with_replacement(range(kinds), self.least - self.has_first)

    @property
    def _room_bytes(self) -> float:
        """Beside what a running block needs."""
        run, first = self.problem.runs[self.longest], self.problem.runs[0]
        working = least_working([run, first] if self.has_first else [run])
        return self.problem.capacity_bytes[self.rank] - working

    @property
    def _alone_s(self) -> float:
        """Of the first block of the model, where it is here."""
        first = self.problem.runs[0]
        return min(p.forward_s + p.backward_s for p in first.points) * self.has_first


def _kept_s(run: Run, price: float) -> float:
    """What a block runs again, and what it keeps at a price of a byte of a micro-batch, at least;
    of points whose seconds of backward are those that run again."""
    return min(point.backward_s + price * point.saved_bytes for point in run.points)
