"""From the stages of a pipeline to its ranks, which may have several.

Input: what each stage takes and holds; stage s lies on rank s mod P. Output: seconds and bytes of
each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ir.schedules import Held
from planner.price import Seconds

Pair = tuple[Seconds, Seconds]


def by_rank(pairs: Sequence[Pair], ranks: int) -> list[Pair]:
    """Forward and backward of a micro-batch through all stages of a rank."""
    columns = [list(zip(*pairs[rank::ranks], strict=True)) for rank in range(ranks)]
    return [(_total(forward), _total(backward)) for forward, backward in columns]


def _total(seconds: Iterable[Seconds]) -> Seconds:
    """In order from the first, so that one stage is itself to the last bit."""
    first, *rest = seconds
    return sum(rest, first)


def most_held_bytes(
    moments: Sequence[tuple[Held, ...]], saved: Sequence[int], pending: Sequence[int]
) -> int:
    """At the fullest moment of a rank; bytes of one micro-batch per stage, for its backward and,
    between the halves of a split one, for the weights."""
    return max(
        sum(
            held.forward * for_backward + held.weight * for_weights
            for held, for_backward, for_weights in zip(moment, saved, pending, strict=True)
        )
        for moment in moments
    )
