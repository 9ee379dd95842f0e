"""Interpolation: exact at the points, between its neighbours elsewhere."""

from itertools import pairwise, product

import pytest

from ir.curves import Curve, Grid
from ir.errors import UsageError

CURVE = Curve((64.0, 4096.0, 2**20), (5e-6, 6e-6, 9e-4))
SIZES = (16.0, 64.0, 256.0)
GRID = Grid(SIZES, tuple(1e-6 + m * n * k * 1e-12 for m, n, k in product(SIZES, repeat=3)))


def test_a_curve_is_exact_at_its_points() -> None:
    assert [CURVE.at(size) for size in CURVE.sizes] == list(CURVE.seconds)


def test_a_rising_curve_rises_between_its_points() -> None:
    seconds = [CURVE.at(64 * 1.3**i) for i in range(60)]
    assert all(low <= high for low, high in pairwise(seconds))


def test_below_a_curve_is_its_fixed_cost_and_above_its_rate() -> None:
    assert CURVE.at(1) == 5e-6
    assert CURVE.at(2**22) == pytest.approx(4 * 9e-4)


def test_a_grid_is_exact_at_its_points() -> None:
    for sizes, seconds in zip(product(SIZES, repeat=3), GRID.seconds, strict=True):
        assert GRID.at(*sizes) == pytest.approx(seconds, rel=1e-12)


def test_a_rising_grid_rises_along_every_side() -> None:
    for side in range(3):
        sizes = [[100.0] * side + [16 * 1.2**i] + [100.0] * (2 - side) for i in range(20)]
        seconds = [GRID.at(*size) for size in sizes]
        assert all(low < high for low, high in pairwise(seconds))


def test_above_a_grid_its_last_rate_counts() -> None:
    assert GRID.at(512, 256, 256) == pytest.approx(2 * GRID.at(256, 256, 256))
    assert GRID.at(4, 16, 16) == GRID.at(16, 16, 16)


@pytest.mark.parametrize(
    ("sizes", "seconds"), [((), ()), ((2, 1), (1, 1)), ((1, 2), (1,)), ((1, 2), (1, 0))]
)
def test_points_that_make_no_curve_are_refused(sizes: tuple, seconds: tuple) -> None:
    with pytest.raises(UsageError):
        Curve(sizes, seconds)
    with pytest.raises(UsageError):
        Grid(sizes, seconds)
