"""The convex curve below all choices of a program that trades seconds for bytes.

Input: a `Priced` program: the least seconds + price * bytes of its relaxation. Output: `Frontier`.
Each price gives a line below all choices; the lines of several prices bound the curve, and where
choices touch it are the choices worth having.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, starmap
from math import inf
from typing import Protocol

PRICES = 8
"""Lines of a curve; more bring it nearer to the choices."""
STEEP = 10.0
"""The steepest line but the last, over the slope between the curve's ends."""


class Priced(Protocol):
    """A relaxed program whose choices take seconds and hold bytes."""

    def priced(self, price_s: float) -> tuple[float, float, float]:
        """Seconds and bytes of the choice of least seconds + price * bytes, and that sum."""
        ...

    def least_bytes(self) -> float:
        """Of any choice."""
        ...


@dataclass(frozen=True, slots=True)
class Line:
    """seconds + price * bytes >= value for all choices; (seconds, bytes) touches it."""

    price: float
    value: float
    seconds: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Frontier:
    """`corners` (seconds, bytes) of the curve, most bytes first; `lines`, by rising price."""

    corners: tuple[tuple[float, float], ...]
    lines: tuple[Line, ...]


def frontier(program: Priced, prices: int = PRICES) -> Frontier:
    """The curve by at most so many lines, but always by its ends."""
    flat, least_bytes = _line(program, 0.0), program.least_bytes()
    is_least = flat.bytes <= least_bytes * (1 + 1e-9)
    most_s = 0.0 if is_least else max(flat.seconds, _most_seconds(program, flat))
    if most_s == 0:
        return Frontier(((flat.value, least_bytes),), (flat,))
    slope = most_s / (flat.bytes - least_bytes)
    lines, edges = _refined(program, flat, _line(program, STEEP * slope), prices)
    below = sorted([*lines, *edges], key=lambda line: line.price)
    last = below[-1]
    end = (max(flat.value, last.value - last.price * least_bytes), least_bytes)
    corners = [corner for corner in _corners(below) if corner[1] > least_bytes * (1 + 1e-9)]
    return Frontier((*corners, end), tuple(lines))


def _corners(lines: Sequence[Line]) -> Iterator[tuple[float, float]]:
    """Where lines of rising price cross; three lines through one point make one corner. Of lines
    of one price, which seconds that hardly differ can lead to, the first stands for all."""
    rising = [next(group) for _, group in groupby(lines, key=lambda line: line.price)]
    before = inf
    for seconds, held in starmap(_crossing, pairwise(rising)):
        if held < before * (1 - 1e-9):
            yield seconds, held
        before = held


def _most_seconds(program: Priced, flat: Line) -> float:
    """Of the choice that holds least; found by a price that only bytes decide at."""
    found = _line(program, 1.0)
    return max(found.seconds - flat.seconds, 0.0)


def _line(program: Priced, price: float) -> Line:
    seconds, held, value = program.priced(price)
    return Line(price, value, seconds, held)


def _refined(
    program: Priced, flat: Line, tall: Line, prices: int
) -> tuple[list[Line], list[Line]]:
    """By price: between the touching points furthest apart another line is drawn; one that touches
    nothing new is the curve's edge between them."""
    lines, edges, done = [flat, tall], list[Line](), set[tuple[Line, Line]]()
    while len(lines) < prices:
        pairs = [pair for pair in pairwise(lines) if pair not in done and _area(*pair) > 0]
        if not pairs:
            break
        left, right = max(pairs, key=lambda pair: _area(*pair))
        price = (right.seconds - left.seconds) / (left.bytes - right.bytes)
        middle = _line(program, price)
        if middle.value >= (left.seconds + price * left.bytes) * (1 - 1e-6):
            done.add((left, right))
            edges.append(middle)
        else:
            lines.insert(lines.index(right), middle)
    return lines, edges


def _area(left: Line, right: Line) -> float:
    """How far apart two touching points are, in seconds * bytes."""
    return max(0.0, left.bytes - right.bytes) * max(0.0, right.seconds - left.seconds)


def _crossing(flat: Line, tall: Line) -> tuple[float, float]:
    held = (tall.value - flat.value) / (tall.price - flat.price)
    return flat.value - flat.price * held, held
