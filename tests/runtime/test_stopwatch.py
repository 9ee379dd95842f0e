"""Timing with a clock that the test moves: medians, noise, and when it gives up."""

from collections.abc import Iterator
from itertools import cycle

import pytest

from runtime.stopwatch import NOISE_LIMIT, Stopwatch, sample_of


class Clock:
    """Moves only when a call takes time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def timed(durations: Iterator[float]) -> tuple[float, float, int]:
    """Seconds, noise and the number of calls."""
    clock, taken = Clock(), []

    def call() -> None:
        taken.append(next(durations))
        clock.now_s += taken[-1]

    sample = Stopwatch(block_s=0.01, budget_s=1.0, blocks=5, clock=clock).time(call)
    return sample.seconds, sample.noise, len(taken)


def test_a_steady_call_is_exact_and_takes_one_round() -> None:
    seconds, noise, calls = timed(cycle([0.02]))
    assert (seconds, calls) == (pytest.approx(0.02), 2 + 5)
    assert noise == pytest.approx(0.0, abs=1e-9)


def test_a_short_call_is_repeated_until_a_block_is_long_enough() -> None:
    seconds, _, calls = timed(cycle([0.001]))
    assert seconds == pytest.approx(0.001)
    assert calls >= 5 * 10


def test_the_median_ignores_a_few_interruptions() -> None:
    durations = cycle([0.02] * 4 + [0.5])
    assert timed(durations)[0] == pytest.approx(0.02)


def test_noise_is_tried_again_and_then_said() -> None:
    _, noise, calls = timed(cycle([0.02, 0.2, 0.02, 0.02, 0.2, 0.2, 0.02]))
    assert noise > NOISE_LIMIT
    assert calls >= 2 + 2 * 5


def test_more_repeats_make_the_median_more_certain() -> None:
    few, many = sample_of([1.0, 1.2, 1.4]), sample_of([1.0, 1.2, 1.4] * 9)
    assert many.noise < few.noise
    assert sample_of([1.0, 1.2, 1.4]).seconds == 1.2


def test_all_ranks_decide_by_the_same_rows() -> None:
    clock = Clock()

    def call() -> None:
        clock.now_s += 0.02

    def both(values: list[float]) -> list[list[float]]:
        return [list(values), [3 * value for value in values]]

    watch = Stopwatch(block_s=0.01, budget_s=1.0, blocks=5, clock=clock, agree=both)
    assert watch.time(call).seconds == pytest.approx(0.06)  # of the slowest rank
