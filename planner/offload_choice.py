"""Which candidates of a search offload to the host's memory, where no pin says it.

Input: the pin, the cluster, the least that candidates need; what a search without offload found.
Output: the same candidates with offload, if that search found nothing that fits, or its best plan
recomputes; and which of them to leave out. Menus with activations on the host have all points of
the others. Offload is tried only where an even share of what is held comes near a device's memory
and the same candidate is not known to have room without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ir.cluster import Mesh
from planner.byte_price import ByteWorth
from planner.candidate import Evaluated
from planner.least_costs import LeastCosts
from planner.offload import can_offload, copy_s
from planner.pins import Candidate
from planner.price import OPTIMIZER_TENSORS

ROOMY = 0.5
"""Part of a device's memory that an even share may fill where no rank is taken to be short."""
MOST_BESIDE = 3
"""Candidates of each way to offload that are planned beside a plan without."""
MOST_INSTEAD = 24
"""The same where nothing fits without."""


class OffloadChoice:
    """What one search knows of it."""

    def __init__(self, pinned: str | None, least: LeastCosts) -> None:
        self.pinned, self.least = pinned, least
        self.most, self.is_beside = MOST_INSTEAD, False
        self.tried: dict[Candidate, bool] = {}
        self.roomy: set[Candidate] = set()
        self.worth: dict[Candidate, ByteWorth] = {}

    @property
    def words(self) -> tuple[str, ...]:
        """What may be tried, in order: the pin; or nothing, and where the host is known both ways
        to offload."""
        if self.pinned is not None:
            return (self.pinned,)
        if not can_offload(self.least.cluster):
            return ("none",)
        has_state = OPTIMIZER_TENSORS[self.least.work.optimizer] > 0
        return ("none", "activations", *(["all"] if has_state else []))

    def more(self, candidates: Sequence[Candidate], found: Evaluated | None) -> list[Candidate]:
        """These candidates with offload, after a search without; beside a plan those that were
        planned and are like what fits, and none if that plan has room."""
        if found is not None:
            if found.candidate in self.roomy:
                return []
            self.most, self.is_beside = MOST_BESIDE, True
            fitting = {_order(tried) for tried, fits in self.tried.items() if fits}
            candidates = [c for c in candidates if c in self.tried and _order(c) in fitting]
        return [replace(c, offload=word) for c in candidates for word in self.words[1:]]

    def is_extra(self, candidate: Candidate) -> bool:
        """Whether it offloads without a pin."""
        return self.pinned is None and candidate.offload != "none"

    def is_idle(self, candidate: Candidate) -> bool:
        """Whether it would offload, and has room in any case: by an even share, unless the same
        without offload did not fit."""
        near = replace(candidate, offload="none")
        if not self.is_extra(candidate) or self.tried.get(near) is False:
            return False
        capacity_bytes = self.least.cost_of(candidate.mesh).capacity_bytes
        return self.least.most_bytes(near) <= ROOMY * capacity_bytes

    def is_enough(self, candidate: Candidate, *, has_plan: bool) -> bool:
        """Whether it need not be planned: the same has room with less on the host, or would lose by
        it; or enough were tried."""
        if not self.is_extra(candidate):
            return False
        less = [replace(candidate, offload=word) for word in self.words]
        has_room = any(near in self.roomy for near in less[: self.words.index(candidate.offload)])
        tried = sum(other.offload == candidate.offload for other in self.tried)
        return has_room or self._loses(candidate) or (has_plan and tried >= self.most)

    def is_spare(self, candidate: Candidate) -> bool:
        """Whether it need not even be bounded: beside a plan without offload, whose bound is of
        such plans alone."""
        return self.is_beside and self.is_enough(candidate, has_plan=True)

    def _loses(self, candidate: Candidate) -> bool:
        """Whether copies take longer than what they free saves, at what it is worth in the plan of
        the same candidate without: a byte more saves no more than the last one."""
        near = replace(candidate, offload="none")
        worth, state = self.worth.get(near), self.least.state
        if worth is None or worth.kept_s > 2 * copy_s(self.least.cluster, 1.0, copies=0):
            return False
        freed_bytes = state.bytes_of(near) - state.bytes_of(candidate)
        copies_s = state.total(candidate).update_s - state.total(near).update_s
        saved_s = candidate.micro_batches * worth.memory_s * freed_bytes
        return saved_s <= copies_s / candidate.mesh.pipeline


def _order(candidate: Candidate) -> tuple[Mesh, str, int]:
    """What the ranks do, for any micro-batches and ZeRO stage."""
    return candidate.mesh, candidate.schedule, candidate.virtual_stages
