"""What ranks of several stages wait for: no plan of a stage problem waits less."""

import random
from dataclasses import replace
from itertools import pairwise
from math import inf
from operator import add

import pytest

from ir.errors import Refused
from ir.schedules import Held
from planner.interleave import Interleaving
from planner.interleaved_cuts import least_of
from planner.leads import FirstStage, Leads, first_lines
from planner.rank_bound import Moments, least_slowest_s
from planner.schedule import moments
from planner.stage_cuts import relaxed_seconds
from planner.stage_problem import Joint, Point, Run, StageProblem


def drawn(seed: int) -> tuple[StageProblem, int]:
    """A model of up to 14 blocks with ends of their own, and its ranks; memory is short."""
    rng = random.Random(seed)
    ranks, virtual = rng.choice([(2, 2), (2, 3), (3, 2)])
    stages, micro_batches = ranks * virtual, ranks * rng.randint(1, 4)

    def points(size: float) -> tuple[Point, ...]:
        menu = [(0.0, 1.0), (rng.uniform(0.05, 0.3), rng.uniform(0.3, 0.8)), (1.0, 0.1)]
        working = rng.choice([0.0, 0.5])
        return tuple(
            Point(size, size * (2 + again), 10 * size * kept, size, size * working)
            for again, kept in menu
        )

    runs = (
        *((Run("first", 1, points(rng.uniform(0.1, 1))),) if rng.random() < 0.7 else ()),
        Run("block", rng.randint(stages, 2 * stages + 1), points(1.0), rng.uniform(0, 2)),
        *((Run("last", 1, points(rng.uniform(0.1, 1))),) if rng.random() < 0.7 else ()),
    )
    held = tuple(moments("interleaved", r, ranks, micro_batches, virtual) for r in range(ranks))
    of_stages = tuple(tuple(m[s // ranks] for m in held[s % ranks]) for s in range(stages))
    room = rng.uniform(0.1, 0.8) * 10 * sum(run.count for run in runs)
    send_s = (rng.choice([0.0, 0.1]),) * (stages - 1)
    return StageProblem(
        runs, stages, micro_batches, "interleaved", (room,) * stages, send_s, held=of_stages,
        moments=held,
    ), ranks  # fmt: skip


class Blocks:
    """Of blocks whose seconds of forward and state are the same at all points."""

    def __init__(self, point: Point) -> None:
        self.point = point

    def least_s(self, blocks: float, once: float, kept: float, price: float, held: float) -> float:
        return blocks * self.point.forward_s + held * self.point.persistent_bytes


def bounds_s(problem: StageProblem, ranks: int) -> tuple[float, ...]:
    """Of the step but what is done once: whatever first stages keep, with what they can, where that
    is told apart by the largest thing, and where it is also known what all blocks do."""
    held: tuple[Moments, ...] = problem.moments
    of_ranks = replace(
        problem, stages=ranks, capacity_bytes=problem.capacity_bytes[:ranks], held=(), moments=(),
        send_s=problem.send_s[: ranks - 1],
    )  # fmt: skip
    least = least_of(problem, problem.stages)
    fastest = [min(p.forward_s + p.backward_s for p in r.points) for r in problem.runs]
    each = [fastest[run] for run in problem.block_runs]
    first = [sum(each[:least]), *[least * min(each)] * (ranks - 2)]
    longest, runs = of_ranks.longest_run, list(of_ranks.runs)
    points = runs[longest].points
    kinds = [replace(runs[longest], points=some) for some in (points[:1], points[1:])]
    prices = (0.0, 0.02, 0.1, 0.5)
    runs[longest] = replace(
        runs[longest], joint=Joint(prices, (0.0,) * len(prices), problem.micro_batches)
    )
    priced = replace(of_ranks, runs=tuple(runs))
    found = []
    for lines in (
        [None] * ranks, first_lines(of_ranks, of_ranks, held),
        first_lines(of_ranks, of_ranks, held, kinds),
        first_lines(priced, priced, held, kinds, Blocks(points[0])),
    ):  # fmt: skip
        stages = [
            FirstStage(s, lines=of) for s, of in zip(first, lines[: len(first)], strict=True)
        ]
        found.append(least_slowest_s(of_ranks, held, Leads(stages, problem.micro_batches)))
    return tuple(found)


def test_no_plan_waits_less() -> None:
    """On random problems; in some, what ranks keep makes them wait longer."""
    closer, planned = [0, 0, 0], 0
    for seed in range(80):
        problem, ranks = drawn(seed)
        bounds = bounds_s(problem, ranks)
        assert list(bounds) == sorted(bounds)
        try:
            plan = Interleaving(problem, ranks).plan()
        except Refused:
            continue
        assert bounds[-1] <= (plan.step_s - plan.tail_s) * (1 + 1e-9), seed
        is_more = [more > 1.001 * less for less, more in pairwise(bounds)]
        closer = list(map(add, closer, is_more))
        planned += 1
    assert planned > 30 and min(closer) > 1, closer


def test_the_first_stage_of_a_rank_is_fast_if_its_others_may_be_slow() -> None:
    """One block on each of two stages of two micro-batches in flight: there is room for the values
    of one of them. The first one's are kept, if the rank may take 2 + 4 seconds."""
    points = (Point(1.0, 1.0, 10.0, 0.0, 0.0, "kept"), Point(1.0, 3.0, 1.0, 0.0, 0.0, "again"))
    problem = StageProblem((Run("block", 4, points),), 2, 2, "1f1b", (22.0, 22.0))
    (lines,) = first_lines(problem, problem, [((Held(2, 0), Held(2, 0)),)] * 2)
    stage = FirstStage(2.0, lines=lines)
    assert stage.seconds(inf, 2) == 2.0 == pytest.approx(stage.seconds(2 * 6.0, 2))
    assert stage.seconds(2 * 5.9, 2) > 2.0


def test_a_rank_with_the_head_holds_a_copy_of_a_tied_embedding() -> None:
    """The last rank has no room for keeping its blocks' values beside it, and adds up its gradient;
    the first rank of two has the embedding itself."""
    points = (Point(1.0, 1.0, 10.0, 0.0, 0.0, "kept"), Point(1.0, 3.0, 1.0, 0.0, 0.0, "again"))
    ends = (Point(0.5, 0.5, 0.0, 0.0, 0.0),)
    runs = (Run("embedding", 1, ends), Run("block", 4, points), Run("head", 1, ends))
    problem = StageProblem(runs, 2, 1, "1f1b", (20.0, 20.0))
    held = [((Held(1, 0), Held(1, 0)),)] * 2

    def least_s(tied_bytes: float, tied_s: float) -> float:
        tied = replace(problem, tied=((0, 2, tied_bytes),), tied_s=((0, 2, tied_s),))
        found = least_slowest_s(tied, held, lambda limit_s: (0.0, 0.0))
        assert float(relaxed_seconds(tied)[1, 3, 6]) == pytest.approx(found)
        return found

    assert least_s(0.0, 0.0) == 5.0
    assert least_s(0.0, 0.25) == 5.25
    assert least_s(9.0, 0.25) == pytest.approx(7.25)
