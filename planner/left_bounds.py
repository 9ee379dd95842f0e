"""What a search leaves open: the least bounds of candidates, planned or not.

Input: bounds of candidates when they are left. Output: the least of them. Where the gap to the best
plan is wide, the least ones are found closer at the end; before, that takes longer than it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from planner.pins import Candidate

WIDE = 0.01
"""Relative; a gap that is worth another look."""
AT_ONCE, LOOKS = 2, 3
"""Candidates that are looked at together, and how often."""

Closer = Callable[[Sequence[Candidate]], Sequence[float | None]]
"""The closest bounds of candidates; None where there is no time."""


@dataclass
class LeftBounds:
    """`alone`: the closest that is known of candidates; `shapes`: of all that one stands for."""

    alone: dict[Candidate, float] = field(default_factory=dict)
    shapes: dict[Candidate, float] = field(default_factory=dict)

    def leave(self, candidate: Candidate, bound_s: float) -> None:
        """Also again, with another bound."""
        self.alone[candidate] = max(bound_s, self.alone.get(candidate, 0.0))

    def leave_all(self, queue: Iterable[tuple[float, object, int, Candidate]]) -> None:
        """Of (bound, anything, level, candidate), of which one at level 0 stands for all of its
        shape."""
        for bound_s, _, level, candidate in queue:
            if level:
                self.leave(candidate, bound_s)
            else:
                self.shapes[candidate] = bound_s

    def least_s(self) -> float:
        """Infinity if nothing is left."""
        return min([*self.alone.values(), *self.shapes.values()], default=inf)

    def narrow(self, step_s: float, closer: Closer) -> None:
        """Finds the least bounds closer, as long as they are far below a step and that helps."""
        looked = set[Candidate]()
        for _ in range(LOOKS):
            limit_s = min([step_s / (1 + WIDE), *self.shapes.values()])
            below = (candidate for candidate, bound_s in self.alone.items() if bound_s < limit_s)
            low = sorted(below, key=self.alone.__getitem__)[:AT_ONCE]
            if not low or low[0] in looked:
                break
            looked.update(low)
            for candidate, found_s in zip(low, closer(low), strict=True):
                self.leave(candidate, found_s or 0.0)
