"""What a plan is predicted to take: seconds of a step, and seconds and bytes of each pipeline rank.

Input: the planner's numbers. Output: values that a plan file holds, and which rank is the fullest.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageCost:
    """Predicted seconds per micro-batch and bytes per device of one stage.

    `host_bytes`: of the device's host's memory; they are no part of the peak. `capacity_bytes`:
    what a plan may fill there, where stages lie on different devices; else 0.
    """

    forward_s: float
    backward_s: float
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    transient_bytes: int
    host_bytes: int = 0
    capacity_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return (
            self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
            + self.saved_bytes + self.transient_bytes
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted seconds of one optimizer step and its parts, and each stage's cost.

    `capacity_bytes`: what a plan may fill of a device, of the fullest stage where they differ.
    """

    step_s: float
    compute_s: float
    exposed_comm_s: float
    bubble_s: float
    optimizer_s: float
    bound_s: float
    capacity_bytes: int
    stages: tuple[StageCost, ...]

    def capacity_of(self, rank: int) -> int:
        """Of one pipeline rank."""
        return self.stages[rank].capacity_bytes or self.capacity_bytes

    @property
    def fullest(self) -> int:
        """The rank that fills most of its device; the first of equal ones."""
        ranks = range(len(self.stages))
        return max(ranks, key=lambda r: self.stages[r].peak_bytes / self.capacity_of(r))

    @property
    def peak_bytes(self) -> int:
        """Of a device of the fullest rank."""
        return self.stages[self.fullest].peak_bytes

    @property
    def excess_bytes(self) -> list[int]:
        """Of each rank, what it has not room for."""
        return [
            max(0, stage.peak_bytes - self.capacity_of(rank))
            for rank, stage in enumerate(self.stages)
        ]

    @property
    def gap(self) -> float:
        return max(0.0, self.step_s / self.bound_s - 1) if self.bound_s > 0 else 0.0
