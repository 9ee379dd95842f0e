"""Stages of ranks that have several: what they keep is bounded by what is held at a moment."""

from itertools import combinations

import pytest
from small_models import chain

from planner import plan
from planner.interleave import Interleaving
from planner.schedule import moments
from planner.stage_counts import counts_beside, stage_counts
from planner.stage_problem import Choice, Point, Run, StagePlan, StageProblem, price


def test_ranks_of_several_stages_keep_what_fits_at_every_moment() -> None:
    """Their stages are not all at their fullest at once: room for that is not needed."""
    ranks, virtual, micro_batches = 2, 2, 8
    held = tuple(moments("interleaved", r, ranks, micro_batches, virtual) for r in range(ranks))
    most = max(sum(h.forward for h in moment) for rank in held for moment in rank)
    each = max(sum(max(h.forward for h in place) for place in zip(*r, strict=True)) for r in held)
    assert most < each
    of_stages = tuple(tuple(m[s // ranks] for m in held[s % ranks]) for s in range(ranks * virtual))
    keep, drop = Point(1.0, 1.0, 10.0, 1.0, 0.0, "keep"), Point(1.0, 2.0, 0.0, 1.0, 0.0, "drop")

    def planned(room: float) -> StagePlan:
        problem = StageProblem(
            (Run("layers", 4, (keep, drop)),), ranks * virtual, micro_batches, "interleaved",
            (room,) * ranks * virtual, held=of_stages, moments=held,
        )  # fmt: skip
        interleaving = Interleaving(problem, ranks)
        found = interleaving.plan()
        assert max(interleaving.filled_bytes(found)) <= room
        return found

    def points(found: StagePlan) -> set[int]:
        return {choice.point for stage in found.assignment for choice in stage}

    assert points(planned(10.0 * most + 2)) == {0}
    assert 1 in points(planned(10.0 * most + 1))


def layers_and_head(layers: int, ranks: int, virtual: int, micro_batches: int) -> StageProblem:
    """Of 1 + 2 seconds each, between an embedding of next to nothing and a head of one second."""
    held = tuple(moments("interleaved", r, ranks, micro_batches, virtual) for r in range(ranks))
    of_stages = tuple(tuple(m[s // ranks] for m in held[s % ranks]) for s in range(ranks * virtual))
    runs = (
        Run("embedding", 1, (Point(0.01, 0.02, 0.0, 1.0, 0.0),)),
        Run("layers", layers, (Point(1.0, 2.0, 0.0, 1.0, 0.0),)),
        Run("head", 1, (Point(0.3, 0.7, 0.0, 1.0, 0.0),)),
    )
    return StageProblem(
        runs, ranks * virtual, micro_batches, "interleaved", (1e9,) * ranks * virtual,
        held=of_stages, moments=held,
    )  # fmt: skip


@pytest.mark.parametrize(("layers", "ranks", "virtual"), [(8, 2, 2), (7, 2, 2), (9, 3, 2)])
def test_cuts_of_several_stages_per_rank_are_the_best_of_all(
    layers: int, ranks: int, virtual: int
) -> None:
    """By the seconds that ranks wait for each other, which the seconds of ranks do not tell."""
    problem = layers_and_head(layers, ranks, virtual, 3 * ranks)
    found, blocks = Interleaving(problem, ranks).plan(), problem.block_runs
    best_s = min(
        price(problem, tuple(
            tuple(Choice(r, 0, blocks[a:b].count(r)) for r in dict.fromkeys(blocks[a:b]))
            for a, b in zip((0, *inner), (*inner, len(blocks)), strict=True)
        )).step_s
        for inner in combinations(range(1, len(blocks)), problem.stages - 1)
    )  # fmt: skip
    assert found.step_s <= 1.001 * best_s


def test_stages_of_a_round_line_up() -> None:
    """96 layers on 8 x 8 stages: the last rank takes 12 of them and the head, and the stages before
    its first one 2 each; no other wait is left. From cuts that share the seconds evenly it is 7 %
    more."""
    found = Interleaving(layers_and_head(96, 8, 8, 24), 8).plan()
    assert found.step_s <= 1.01 * (24 * (12 * 3 + 1) + 7 * 2 * 3)


def test_numbers_of_stages_share_the_blocks_evenly_where_some_do() -> None:
    assert stage_counts(8, 98, 96) == (2, 3, 6)
    assert stage_counts(16, 128, 126) == (2, 4, 8)
    assert stage_counts(32, 98, 96) == (3,)
    assert stage_counts(8, 90, 5) == (2, 4, 8)
    assert counts_beside(8, 98, 96) == (2, 3, 4, 6, 12)
    assert counts_beside(8, 90, 5) == (2, 3, 4, 5, 6, 7, 8)
    assert stage_counts(2, 3, 1) == ()


def test_more_stages_are_tried_beside_the_best_plan() -> None:
    """With 12 stages on a rank, a block each, the fill of two micro-batches is shortest."""
    graph = chain(depth=22, width=2048, hidden=8192, seq=1024, words=4096)
    pin = {
        "pipeline": 2, "data": 1, "tensor": 1, "micro_batches": 2, "schedule": "interleaved",
    }  # fmt: skip
    free = plan(graph, "1x2xH100-SXM", global_batch=4, pin=pin)
    fewer = plan(graph, "1x2xH100-SXM", global_batch=4, pin=pin | {"virtual_stages": 6})
    assert free.virtual_stages == 12
    assert free.prediction.step_s < 0.99 * fewer.prediction.step_s
