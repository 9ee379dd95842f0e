"""Which points the blocks of one stage run at: the least seconds within its memory.

Input: the runs on a stage, as if it held one micro-batch, and the bytes it may fill. Output:
`StagePoints`. Where the fastest points fit, they are it. Else blocks move down the hull of their
run's points, where a byte is cheapest first; that is the linear relaxation but for the last block,
so it proves a bound as well. Where plan and bound lie apart the integer program of
`planner.stage_program` decides.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, inf
from operator import itemgetter
from typing import TypeAlias

from planner.solver import Infeasible
from planner.stage_problem import Choice, Point, Run, StageProblem
from planner.stage_program import solve_program

_Moves: TypeAlias = tuple[tuple[float, float, int, int], ...]
TOUCH = 1e-9
"""Relative room for rounding."""


@dataclass(frozen=True, slots=True)
class StagePoints:
    """Choices by run, with their seconds and a lower bound of any choices' seconds."""

    choices: tuple[Choice, ...]
    seconds: float
    bound_s: float


@dataclass(frozen=True, eq=False)
class HeldRun:
    """Blocks of a run on a stage, with what they keep of all micro-batches as if of one. `fastest`:
    the point of the least seconds; of equal ones, of the least bytes. `lines` is shared by those
    that differ in their number."""

    points: tuple[Point, ...]
    count: int
    fastest: int
    lines: dict[float, _Line | None] = field(default_factory=dict)

    @staticmethod
    def of(points: tuple[Point, ...], count: int) -> HeldRun:
        """Blocks at any of these points."""
        fastest = min(range(len(points)), key=lambda o: _order(points[o]))
        return HeldRun(points, count, fastest)

    def of_so_many(self, count: int) -> HeldRun:
        """The same of another number of blocks."""
        return HeldRun(self.points, count, self.fastest, self.lines)

    def line(self, limit_bytes: float) -> _Line | None:
        """The hull of the points that need no more than the limit to run; None if none does."""
        if limit_bytes not in self.lines:
            self.lines[limit_bytes] = _line(self.points, limit_bytes)
        return self.lines[limit_bytes]


def held_run(run: Run, held_bytes: Callable[[Point], float]) -> HeldRun:
    """A block of a run, when a point keeps so many bytes."""
    points = tuple(
        replace(point, saved_bytes=held_bytes(point), pending_bytes=0.0) for point in run.points
    )
    return HeldRun.of(points, 1)


def stage_points(runs: Sequence[HeldRun], room_bytes: float, gap: float) -> StagePoints | None:
    """Within the relative gap; None where nothing fits."""
    fastest = [run.fastest for run in runs]
    if _fits(runs, fastest, room_bytes):
        seconds = sum(r.count * _seconds(r.points[o]) for r, o in zip(runs, fastest, strict=True))
        choices = tuple(Choice(r, o, runs[r].count) for r, o in enumerate(fastest))
        return StagePoints(choices, seconds, seconds)
    found = _descended(runs, room_bytes)
    if found is None or found.seconds - found.bound_s <= gap * found.seconds:
        return found
    return _solved(runs, room_bytes, gap)


def _solved(runs: Sequence[HeldRun], room_bytes: float, gap: float) -> StagePoints | None:
    """By the integer program."""
    whole = tuple(Run(str(r), run.count, run.points) for r, run in enumerate(runs))
    try:
        (choices,), bound_s = solve_program(
            StageProblem(whole, 1, 1, "gpipe", (room_bytes,)), gap, 10.0
        )
    except Infeasible:
        return None
    seconds = sum(c.count * _seconds(runs[c.run].points[c.point]) for c in choices)
    return StagePoints(choices, seconds, min(bound_s, seconds))


def _descended(runs: Sequence[HeldRun], room_bytes: float) -> StagePoints | None:
    """The best over all limits on what a running block needs; None where even parts of blocks
    would not fit. A higher limit leaves less room, so it is no better where the moves that the last
    one took are the same."""
    best, bound_s = None, inf
    taken: list[_Moves] | None = None
    steepest = inf
    for limit_bytes in sorted({p.transient_bytes for run in runs for p in run.points}):
        lines = [line for run in runs if (line := run.line(limit_bytes)) is not None]
        if len(lines) < len(runs):
            continue
        if taken is not None and taken == [line.until(steepest) for line in lines]:
            continue
        found, steepest = _greedy(runs, lines, room_bytes - limit_bytes)
        if found is None:
            continue
        taken = [line.until(steepest) for line in lines]
        bound_s = min(bound_s, found.bound_s)
        if best is None or found.seconds < best.seconds:
            best = found
    return best and StagePoints(best.choices, best.seconds, min(bound_s, best.seconds))


def _greedy(
    runs: Sequence[HeldRun], lines: Sequence[_Line], room_bytes: float
) -> tuple[StagePoints | None, float]:
    """Blocks move from point to point of their hull, where a byte costs least first, until they
    fit; the last move is of no more blocks than it takes. With the slope of that move."""
    excess = -room_bytes
    seconds = steepest = 0.0
    for run, line in zip(runs, lines, strict=True):
        excess += run.count * line.held
        seconds += run.count * line.seconds
    bound_s = seconds
    counts = [{line.first: run.count} for run, line in zip(runs, lines, strict=True)]
    moves = sorted((*move, r) for r, line in enumerate(lines) for move in line.moves)
    for slope, size, here, there, r in moves:
        if excess <= room_bytes * TOUCH:
            break
        count, steepest = runs[r].count, slope
        moved = min(count, ceil(excess / size * (1 - TOUCH)))
        bound_s += min(excess, count * size) * slope
        seconds += moved * size * slope
        excess -= moved * size
        counts[r] = {here: count - moved, there: moved}
    if excess > abs(room_bytes) * TOUCH:
        return None, steepest
    choices = (
        Choice(r, o, n) for r, taken in enumerate(counts) for o, n in sorted(taken.items()) if n
    )
    return StagePoints(tuple(choices), seconds, bound_s), steepest


@dataclass(frozen=True, slots=True)
class _Line:
    """The hull of a run's points: its fastest one with seconds and bytes, and the moves along it,
    (seconds per byte, bytes, from, to), by rising seconds per byte."""

    first: int
    seconds: float
    held: float
    moves: _Moves

    def until(self, slope: float) -> _Moves:
        """The moves that are no steeper, with what precedes them."""
        start = (self.seconds, self.held, self.first, self.first)
        return (start, *self.moves[: bisect_right(self.moves, slope, key=itemgetter(0))])


def _line(points: tuple[Point, ...], limit_bytes: float) -> _Line | None:
    """Of the points that need no more than the limit to run; None if there are none."""
    hull: list[int] = []
    allowed = [o for o, point in enumerate(points) if point.transient_bytes <= limit_bytes]
    for o in sorted(allowed, key=lambda o: _order(points[o])):
        if hull and _held(points[o]) >= _held(points[hull[-1]]):
            continue
        while len(hull) > 1 and _slope(points, hull[-1], o) <= _slope(points, *hull[-2:]):
            hull.pop()
        hull.append(o)
    if not hull:
        return None
    moves = tuple(
        (_slope(points, here, there), _held(points[here]) - _held(points[there]), here, there)
        for here, there in pairwise(hull)
    )
    return _Line(hull[0], _seconds(points[hull[0]]), _held(points[hull[0]]), moves)


def _slope(points: Sequence[Point], here: int, there: int) -> float:
    """Seconds per byte."""
    more_s = _seconds(points[there]) - _seconds(points[here])
    return more_s / (_held(points[here]) - _held(points[there]))


def _fits(runs: Sequence[HeldRun], chosen: Sequence[int], room_bytes: float) -> bool:
    points = [run.points[o] for run, o in zip(runs, chosen, strict=True)]
    held = sum(run.count * _held(point) for run, point in zip(runs, points, strict=True))
    return held + max(p.transient_bytes for p in points) <= room_bytes * (1 + TOUCH)


def _order(point: Point) -> tuple[float, float, float]:
    return _seconds(point), _held(point) + point.transient_bytes, _held(point)


def _seconds(point: Point) -> float:
    return point.forward_s + point.backward_s


def _held(point: Point) -> float:
    return point.persistent_bytes + point.saved_bytes
