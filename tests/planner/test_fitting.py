"""Stages that fit by exact count, made by a problem that counts another way."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ir.errors import Refused
from ir.predicted import Prediction, StageCost
from planner.evaluated import Evaluated, TooSlow
from planner.fitting import Make, fitted

CAPACITY = 800


def maker(
    exact: Callable[[float], float], least: float = 0.0, most: float = 2000.0
) -> tuple[Make, list[float]]:
    """Of one rank: with more room a step is shorter, and the rooms that were tried. `exact`: bytes
    by what the problem counts; `least`: below which it has no stages."""
    tried: list[float] = []

    def make(
        rooms: Sequence[float], limit_s: float
    ) -> tuple[Evaluated | TooSlow, list[float]]:
        filled = min(rooms[0], most)
        tried.append(rooms[0])
        if filled < least:
            raise Refused("too little")
        if (step_s := 2000 - filled) > limit_s:
            return TooSlow(step_s), [filled]
        stage = StageCost(0.0, 0.0, int(exact(filled)), 0, 0, 0, 0)
        parts: Any = None
        made = Prediction(step_s, 0.0, 0.0, 0.0, 0.0, 0.0, CAPACITY, (stage,))
        return Evaluated(parts, parts, parts, (), made), [filled]

    return make, tried


def step_of(found: Evaluated | TooSlow) -> float:
    assert isinstance(found, Evaluated)
    assert min(found.left_bytes) >= 0
    return found.prediction.step_s


def test_what_fits_at_once_is_taken() -> None:
    make, tried = maker(lambda filled: filled - 50, most=820)
    assert step_of(fitted(make, [960.0])) == 2000 - 820
    assert tried == [960.0]


def test_what_was_taken_off_and_is_left_is_used() -> None:
    """At 960 the exact count is 160 too much; at 800 it leaves 80, at 880 it fits."""
    make, _ = maker(lambda filled: filled if filled > 900 else 0.9 * filled)
    assert step_of(fitted(make, [960.0])) == 2000 - 880


def test_less_is_taken_off_where_nothing_fits_twice_as_much() -> None:
    """At 960 the exact count is 100 too much, at 860 40; at 780 there are no stages, 820 fit."""
    make, tried = maker(lambda filled: filled - (60 if filled > 900 else 20), least=800)
    assert step_of(fitted(make, [960.0])) == 2000 - 820
    assert tried == [960.0, 860.0, 780.0, 820.0]


def test_nothing_fits() -> None:
    make, _ = maker(lambda filled: max(filled, 801))
    with pytest.raises(Refused, match="needs"):
        fitted(make, [960.0])
    make, _ = maker(lambda filled: filled, least=970)
    with pytest.raises(Refused, match="too little"):
        fitted(make, [960.0])


def test_beyond_the_limit_nothing_is_looked_at() -> None:
    make, tried = maker(lambda filled: filled)
    assert isinstance(fitted(make, [960.0], 100.0), TooSlow)
    assert len(tried) == 1
