"""A candidate with its stages, its program and the prediction."""

from __future__ import annotations

from dataclasses import dataclass

from ir.plan import Placed
from ir.predicted import Prediction
from ir.spmd import Spmd
from planner.pieces import Pieces
from planner.pins import Candidate


@dataclass(frozen=True)
class Evaluated:
    """A candidate with its stages, the program and the prediction."""

    candidate: Candidate
    pieces: Pieces
    program: Spmd
    stages: tuple[tuple[Placed, ...], ...]
    prediction: Prediction

    @property
    def left_bytes(self) -> list[float]:
        """Of each rank, by exact count; less than nothing where it has not enough."""
        found = self.prediction
        return [
            found.capacity_of(rank) - stage.peak_bytes for rank, stage in enumerate(found.stages)
        ]


@dataclass(frozen=True)
class TooSlow:
    """Instead of an evaluation that would take longer than its limit."""

    step_s: float
