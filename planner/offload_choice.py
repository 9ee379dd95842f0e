"""Which candidates of a search offload to the host's memory, where no pin says it.

Input: the pin, the cluster, the least that candidates need. Output: the words to try, and which
candidates to leave out. Activations may be offloaded where memory is short: those menus have all
points of the others, so where it is short nothing else is tried. Optimizer state is, beside that,
while the same without it is not known to have room, for a few candidates more than are planned
anyway.
"""

from __future__ import annotations

from dataclasses import replace

from planner.calibrated import cost_model
from planner.least_costs import LeastCosts
from planner.offload import can_offload
from planner.pins import Candidate
from planner.price import OPTIMIZER_TENSORS

ROOMY = 0.5
"""Part of a device's memory that an even share may fill where no rank is taken to be short."""
MOST_WITH_STATE = 3
"""Candidates with optimizer state on the host that are planned beside the others."""


class OffloadChoice:
    """What one search knows of it."""

    def __init__(self, pinned: str | None, least: LeastCosts) -> None:
        self.pinned, self.least = pinned, least
        self.with_state = 0
        self.roomy: set[Candidate] = set()

    @property
    def words(self) -> tuple[str, ...]:
        """What is tried: the pin; or nothing, and where the host is known both ways to offload."""
        if self.pinned is not None:
            return (self.pinned,)
        if not can_offload(self.least.cluster):
            return ("none",)
        has_state = OPTIMIZER_TENSORS[self.least.work.optimizer] > 0
        return ("none", "activations", *(["all"] if has_state else []))

    def is_idle(self, candidate: Candidate) -> bool:
        """Whether it may offload but has room, or may not where one that may is no worse."""
        if len(self.words) == 1:
            return False
        near = replace(candidate, offload="none")
        capacity_bytes = cost_model(self.least.cluster, candidate.mesh).capacity_bytes
        is_short = self.least.most_bytes(near) > ROOMY * capacity_bytes
        return is_short == (candidate == near)

    def is_extra(self, candidate: Candidate) -> bool:
        """Whether it has optimizer state on the host without a pin."""
        return self.pinned is None and candidate.offload == "all"

    def is_enough(self, candidate: Candidate, *, has_plan: bool) -> bool:
        """Whether its optimizer state may stay on the device: the same has room for that, or
        enough were tried without it."""
        near = replace(candidate, offload="activations")
        enough = has_plan and self.with_state >= MOST_WITH_STATE
        return self.is_extra(candidate) and (near in self.roomy or enough)
