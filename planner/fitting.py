"""The best stages that fit by exact count, from a stage problem that counts another way.

Input: what makes stages in so much room of each rank, as that problem counts, and the room to begin
with. Output: the stages. Where a rank passes the capacity by exact count it gets less room than its
plan fills, by as much as it was too much, then by twice that, or where nothing fits, by as much
again. A plan that leaves much of what was taken off is made again with what it leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from operator import add
from typing import TypeAlias

from ir.errors import Refused
from planner.evaluated import Evaluated, TooSlow
from planner.stage_refusal import excess_message

ATTEMPTS = 6
"""How often the stages are planned again with less room when the exact bytes pass the capacity."""
MUCH, REFILLS = 0.05, 3
"""Of the capacity: what a plan may leave of the room that was taken off; tries to use it."""

Make: TypeAlias = "Callable[[Sequence[float], float], tuple[Evaluated | TooSlow, list[float]]]"
"""From bytes of room per rank and a limit of seconds: stages and what they fill."""


def fitted(make: Make, rooms_bytes: Sequence[float], limit_s: float = inf) -> Evaluated | TooSlow:
    """`Refused` where none fit."""
    rooms, gentler = list(rooms_bytes), list[float]()
    for attempt in range(ATTEMPTS):
        try:
            made, filled = make(rooms, limit_s)
        except Refused:
            if not gentler:
                raise
            rooms, gentler = gentler, []
            continue
        if isinstance(made, TooSlow):
            return made
        left = made.left_bytes
        just = list(map(add, filled, left))
        if min(left) >= 0:
            return _refilled(make, made, just, limit_s) if attempt else made
        over = [2**attempt * min(more, 0) for more in left]
        gentler = list(map(min, rooms, just))
        rooms = [min(r, f + o) if o else r for r, f, o in zip(rooms, filled, over, strict=True)]
        if min(rooms) <= 0:
            break
    assert isinstance(made, Evaluated)
    raise Refused(excess_message(made.prediction))


def _refilled(
    make: Make, made: Evaluated, rooms_bytes: Sequence[float], limit_s: float
) -> Evaluated:
    """The plan, or a faster one in what it leaves, if that is much."""
    capacity_bytes = max(map(made.prediction.capacity_of, range(len(made.left_bytes))))
    tries = REFILLS if max(made.left_bytes) > MUCH * capacity_bytes else 0
    rooms = list(rooms_bytes)
    for _ in range(tries):
        try:
            again, filled = make(rooms, min(limit_s, made.prediction.step_s))
        except Refused:
            break
        if isinstance(again, TooSlow):
            break
        if min(again.left_bytes) >= 0:
            return again
        rooms = list(map(min, rooms, map(add, filled, again.left_bytes)))
    return made
