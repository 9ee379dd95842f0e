"""What the halves of a split backward take at least: bytes between them, and seconds again."""

import numpy as np
import pytest
from small_models import chain
from test_bounds import search, with_usable

from ir.cluster import Cluster, Mesh
from ir.schedules import Held
from planner.bounds import Bounds
from planner.least_halves import LeastHalves
from planner.least_problem import LeastProblem
from planner.pins import Candidate
from planner.stage_cuts import relaxed_seconds
from planner.stage_problem import Point, Run

WIDTH, HIDDEN, SEQ, ROWS = 256, 1024, 512, 2
CANDIDATE = Candidate(Mesh(pipeline=2), 4, "zero-bubble", ROWS)


def bounds(usable_bytes: float) -> Bounds:
    graph = chain(depth=6, width=WIDTH, hidden=HIDDEN, words=64, seq=SEQ)
    cluster = with_usable(Cluster.parse("1x2xH100-SXM"), usable_bytes)
    supply = search(graph, cluster, 8).attempts.supply
    return Bounds(supply.least)


def test_what_the_weights_half_reads_of_forward_lies_between_the_halves() -> None:
    """Of a layer: the operands of both products; their gradients are apart."""
    least = bounds(2**30).least
    _, kept = least.kept(CANDIDATE)[1]
    late = LeastHalves(least).late(CANDIDATE, 1)
    value_bytes = 4 * ROWS * SEQ
    assert late[0][1] - kept[0][1] >= value_bytes * (WIDTH + HIDDEN)
    assert late[-1][1] > kept[-1][1]


def test_points_with_what_lies_between_count_where_both_are_held() -> None:
    whole, late = (Point(1.0, 1.0, size, 0.0, 0.0) for size in (1.0, 2.0))
    run = Run("block", 1, (whole,), late=(late,))
    assert run.points_at(Held(1, 1)) == run.points_at(Held(1, 2)) == (late,)
    assert run.points_at(Held(2, 1)) == run.points_at(Held(0, 2)) == (whole,)


@pytest.mark.parametrize(("usable", "is_slower"), [(2**30, False), (90 * 2**20, True)])
def test_the_first_half_runs_again_what_memory_does_not_keep(usable: int, is_slower: bool) -> None:
    found = bounds(usable)
    problem = LeastProblem(found.least).of(CANDIDATE)
    prompt_s = dict(enumerate(found.least.part_s(CANDIDATE, ("forward", "input"))))
    fastest = [prompt_s[int(run.name)] for run in problem.runs for _ in range(run.count)]
    stage_s = relaxed_seconds(LeastHalves(found.least).prompt(CANDIDATE, problem, prompt_s))[0]
    whole_s = relaxed_seconds(problem)[0]
    send_s = problem.exposed_send_s(0)
    for end in range(1, len(fastest)):
        if np.isfinite(whole_s[0, end]):
            again_s = float(stage_s[0, end]) - sum(fastest[:end]) - send_s
            assert again_s >= -1e-12
            assert again_s <= whole_s[0, end]
    last = max(end for end in range(1, len(fastest)) if np.isfinite(whole_s[0, end]))
    assert (float(stage_s[0, last]) - sum(fastest[:last]) - send_s > 1e-9) == is_slower
