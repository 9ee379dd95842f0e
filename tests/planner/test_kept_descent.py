"""What ranks of several stages keep, chosen for the step: against trying everything."""

from itertools import product
from random import Random

import numpy as np
import pytest

from planner.interleave import Interleaving
from planner.longest_way import longest_way_s, visits
from planner.schedule import moments
from planner.stage_problem import Assignment, Choice, Point, Run, StageProblem, price


@pytest.mark.parametrize("seed", range(5))
def test_what_the_longest_way_comes_through_adds_up_to_it(seed: int) -> None:
    ranks, virtual, micro_batches = 3, 2, 6
    seconds = np.random.default_rng(seed).uniform(0.5, 2.0, (ranks * virtual, 2))
    shape = "interleaved", ranks, micro_batches, virtual
    found = visits(*shape, seconds)
    assert (found * seconds).sum() == pytest.approx(longest_way_s(*shape, seconds[None])[0])
    assert found.max() <= micro_batches


def drawn(random: Random) -> StageProblem:
    """A block per stage, at one of three points; room for about half of what all can keep."""
    ranks, virtual = random.choice([(2, 2), (3, 2), (2, 3)])
    micro_batches, stages = 2 * ranks, ranks * virtual
    held = tuple(moments("interleaved", r, ranks, micro_batches, virtual) for r in range(ranks))
    of_stages = tuple(tuple(m[s // ranks] for m in held[s % ranks]) for s in range(stages))
    again = sorted(random.uniform(0.0, 1.0) for _ in range(2))
    points = (
        Point(1.0, 2.0, 10.0, 1.0, 0.0, "a"), Point(1.0, 2.0 + again[0], 6.0, 1.0, 0.0, "b"),
        Point(1.0, 2.0 + again[1], random.uniform(0.0, 5.0), 1.0, 0.0, "c"),
    )  # fmt: skip
    most = max(sum(h.forward for h in moment) for rank in held for moment in rank)
    room = virtual + random.uniform(5.0, 8.0) * most
    return StageProblem(
        (Run("layers", stages, points),), stages, micro_batches, "interleaved", (room,) * stages,
        held=of_stages, moments=held,
    )  # fmt: skip


def test_it_is_never_slower_fits_and_comes_near_the_best() -> None:
    over, gained = [], 0
    for seed in range(40):
        problem = drawn(Random(seed))
        ranks = len(problem.moments)
        found = Interleaving(problem, ranks)
        start = found.plan()
        rooms = problem.capacity_bytes[:ranks]

        def fits(assignment: Assignment, problem=problem, rooms=rooms) -> bool:
            points = problem.runs[0].points
            kept = [points[stage[0].point].saved_bytes for stage in assignment]
            return all(
                problem.virtual + sum(
                    held.forward * size
                    for held, size in zip(moment, kept[rank :: len(rooms)], strict=True)
                ) <= rooms[rank] * (1 + 1e-9)
                for rank, of_rank in enumerate(problem.moments) for moment in of_rank
            )  # fmt: skip

        better = found.improved(start.assignment, rooms)
        assert fits(better)
        better_s = price(problem, better).step_s
        assert better_s <= start.step_s * (1 + 1e-9)
        every = (
            tuple((Choice(0, point, 1),) for point in points)
            for points in product(range(3), repeat=problem.stages)
        )
        best_s = min(price(problem, one).step_s for one in every if fits(one))
        gained += better_s < 0.999 * start.step_s
        over.append(better_s / best_s)
    assert gained >= 4
    assert max(over) <= 1.003
