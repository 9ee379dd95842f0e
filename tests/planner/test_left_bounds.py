"""The least bound that a search leaves, and what is looked at again for it."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from ir.cluster import Mesh
from planner.left_bounds import LOOKS, LeftBounds
from planner.pins import Candidate

ONE, TWO, THREE = (Candidate(Mesh(pipeline=2, data=n), 4, "1f1b", 1) for n in (1, 2, 3))


def left() -> LeftBounds:
    found = LeftBounds()
    for candidate, bound_s in ((ONE, 0.9), (TWO, 0.95), (THREE, 1.2)):
        found.leave(candidate, bound_s)
    return found


def test_the_closest_bound_of_a_candidate_counts_whenever_it_is_left() -> None:
    found = left()
    assert found.least_s() == 0.9
    found.leave(ONE, 0.97)
    found.leave(ONE, 0.3)
    assert found.least_s() == 0.95
    found.leave_all([(0.8, None, 0, replace(ONE, rows=2)), (inf, None, 3, THREE)])
    assert found.least_s() == 0.8
    assert LeftBounds().least_s() == inf


def test_the_least_bounds_are_looked_at_again_while_that_helps() -> None:
    asked = list[tuple[Candidate, ...]]()

    def closest_s(candidates: Sequence[Candidate]) -> list[float | None]:
        asked.append(tuple(candidates))
        return [{ONE: 0.995, TWO: None, THREE: 2.0}[candidate] for candidate in candidates]

    found = left()
    found.narrow(1.0, closest_s)
    assert asked == [(ONE, TWO)]  # there is no time for TWO, which stays the least
    assert found.least_s() == 0.95


def test_a_narrow_gap_or_one_of_shapes_is_not_looked_at() -> None:
    def never(candidates: Sequence[Candidate]) -> list[float | None]:
        raise AssertionError(candidates)

    found = left()
    found.narrow(0.905, never)
    found.leave_all([(0.5, None, 0, replace(ONE, rows=2))])
    found.narrow(1.0, never)
    assert found.least_s() == 0.5


def test_there_are_not_many_looks() -> None:
    found, asked = LeftBounds(), list[int]()
    for n in range(20):
        found.leave(replace(ONE, rows=n + 1), 0.1 + n / 1000)

    def closest_s(candidates: Sequence[Candidate]) -> list[float | None]:
        asked.append(len(candidates))
        return [0.98] * len(candidates)

    found.narrow(1.0, closest_s)
    assert asked == [2] * LOOKS
