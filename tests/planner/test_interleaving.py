"""Stages of ranks that have several: what they keep is bounded by what is held at a moment."""

from planner.interleave import Interleaving
from planner.schedule import moments
from planner.stage_problem import Point, Run, StagePlan, StageProblem


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
