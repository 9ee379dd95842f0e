"""A user's own measurements of a collective, in place of the model for the system they are of.

Input: seconds by size of one op in groups that lie alike (nccl-tests, `shardwright calibrate`).
Output: seconds at any size: interpolated inside the measured sizes, outside them the model scaled
to meet the nearest measurement. Never used unless the user gives them.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, log

from ir.errors import UsageError
from planner.collectives import collective_s
from planner.links import Groups


@dataclass(frozen=True, slots=True)
class Measured:
    """`points`: (bytes, seconds) in rising sizes; `size_bytes` as `collective_s` counts it."""

    op: str
    members: int
    members_near: int
    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)) or min(min(p) for p in self.points) <= 0:
            raise UsageError(
                f"measured {self.op} of {self.members}: sizes must rise, and sizes and seconds be "
                f"positive; got {len(sizes)} points."
            )

    def is_of(self, groups: Groups, op: str) -> bool:
        """Whether these groups lie as the measured ones did."""
        measured = (self.op, self.members, self.members_near)
        return measured == (op, groups.members, groups.members_near)


def measured_s(
    measurements: Iterable[Measured], groups: Groups, op: str, size_bytes: float
) -> float:
    """`collective_s`, from the first measurement of such groups if there is one."""
    for measured in measurements:
        if measured.is_of(groups, op):
            return _interpolated(measured, groups, size_bytes)
    return collective_s(groups, op, size_bytes)


def _interpolated(measured: Measured, groups: Groups, size_bytes: float) -> float:
    points = measured.points
    after = bisect_left(points, (size_bytes, 0.0))
    if 0 < after < len(points):
        (low, low_s), (high, high_s) = points[after - 1], points[after]
        part = log(size_bytes / low) / log(high / low)
        return exp(log(low_s) + part * log(high_s / low_s))
    end, end_s = points[min(after, len(points) - 1)]
    model_s = collective_s(groups, measured.op, size_bytes)
    return model_s * end_s / collective_s(groups, measured.op, end)
