"""Measured seconds between their measuring points.

Input: points. Output: seconds anywhere. A `Curve` is over one size, a `Grid` over the three sizes
of a matrix product. Between points the logarithm of the seconds is linear in the logarithm of the
size, which is exact for any power law and never leaves the range of the neighbouring points.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import exp, log

from ir.errors import UsageError


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds over a size. Sizes rise; both are positive; `UsageError` otherwise."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        check_sizes(self.sizes)
        if len(self.sizes) != len(self.seconds) or min(self.seconds) <= 0:
            raise UsageError(
                f"{len(self.sizes)} sizes need as many times, all positive; "
                f"got {len(self.seconds)}, the least {min(self.seconds, default=0)}."
            )

    def at(self, size: float) -> float:
        """Exact at the points. Below the first its seconds (a fixed cost); above the last one
        seconds grow with the size (a rate)."""
        if size <= self.sizes[0]:
            return self.seconds[0]
        if size >= self.sizes[-1]:
            return self.seconds[-1] * size / self.sizes[-1]
        after = bisect_right(self.sizes, size)
        if size == self.sizes[after - 1]:
            return self.seconds[after - 1]
        part = log(size / self.sizes[after - 1]) / log(self.sizes[after] / self.sizes[after - 1])
        low_s, high_s = self.seconds[after - 1], self.seconds[after]
        return low_s * exp(part * log(high_s / low_s))


@dataclass(frozen=True, slots=True)
class Grid:
    """Seconds over (m, n, k), each of the same rising `sizes`; `seconds` with k running fastest."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        check_sizes(self.sizes)
        if len(self.seconds) != len(self.sizes) ** 3 or min(self.seconds) <= 0:
            raise UsageError(
                f"a grid of {len(self.sizes)} sizes needs {len(self.sizes) ** 3} positive times; "
                f"got {len(self.seconds)}, the least {min(self.seconds, default=0)}."
            )

    def at(self, m: float, n: float, k: float) -> float:
        """Exact at the points. Sizes below the first count as it, above the last at its rate."""
        places = [self._place(size) for size in (m, n, k)]
        beyond = 1.0
        for size in (m, n, k):
            beyond *= max(1.0, size / self.sizes[-1])
        total = 0.0
        for corner in product((0, 1), repeat=3):
            weight, index = 1.0, 0
            for (low, part), high in zip(places, corner, strict=True):
                weight *= part if high else 1.0 - part
                index = index * len(self.sizes) + min(low + high, len(self.sizes) - 1)
            if weight:
                total += weight * log(self.seconds[index])
        return exp(total) * beyond

    def _place(self, size: float) -> tuple[int, float]:
        """The point at or below a size, and how far it is towards the next one."""
        if size <= self.sizes[0]:
            return 0, 0.0
        if size >= self.sizes[-1]:
            return len(self.sizes) - 1, 0.0
        low = bisect_right(self.sizes, size) - 1
        return low, log(size / self.sizes[low]) / log(self.sizes[low + 1] / self.sizes[low])


def check_sizes(sizes: Sequence[float]) -> None:
    """`UsageError` unless there is a first size, positive, and each is larger than the one before.

    >>> check_sizes((1, 4, 16))
    """
    if not sizes or sizes[0] <= 0 or list(sizes) != sorted(set(sizes)):
        raise UsageError(f"measured sizes must be positive and rise; got {list(sizes)[:8]}.")
