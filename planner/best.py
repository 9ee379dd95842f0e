"""The best plan of a search so far.

Input: plans, one by one. Output: the fastest; of equally fast ones the simplest candidate's.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from ir.offload import OFFLOADS
from ir.schedules import SCHEDULES
from planner.candidate import Evaluated
from planner.pins import Candidate


@dataclass
class Best:
    """The best plan so far, by step, then by fewer devices, fewer stages, more data ranks, a
    simpler schedule, less divided."""

    found: Evaluated | None = None

    def offer(self, new: Evaluated) -> None:
        if self.found is None or _order(new) < _order(self.found):
            self.found = new

    @property
    def step_s(self) -> float:
        """Of the best plan."""
        return self.found.prediction.step_s if self.found else inf


def _order(item: Evaluated) -> tuple[Any, ...]:
    candidate = item.candidate
    step = float(f"{item.prediction.step_s:.9g}")
    return (step, *simplicity(candidate))


def simplicity(candidate: Candidate) -> tuple[int, ...]:
    """Of equally good candidates the least comes first."""
    mesh = candidate.mesh
    return (
        mesh.size, mesh.pipeline, -mesh.data, candidate.micro_batches, candidate.virtual_stages,
        SCHEDULES.index(candidate.schedule), candidate.zero,
        OFFLOADS.index(candidate.offload), *candidate.order,
    )  # fmt: skip
