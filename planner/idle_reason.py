"""Why a plan leaves devices idle, in words.

Input: what a search learns of plans on all devices, as it goes. Output: a note for the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from ir.cluster import Cluster, Mesh
from ir.quantities import duration
from planner.pins import Candidate, Pins


@dataclass
class IdleReason:
    """`has_whole`: there are candidates on all devices; `bounds_s`: what each takes at least;
    `fastest`: of those that were planned the seconds and the mesh."""

    cluster: Cluster
    pins: Pins
    has_whole: bool = True
    bounds_s: dict[Candidate, float] = field(default_factory=dict)
    fastest: tuple[float, Mesh] | None = None

    def bounded(self, candidate: Candidate, bound_s: float) -> None:
        """A candidate takes as long at least."""
        if candidate.mesh.size == self.cluster.n_devices:
            self.bounds_s[candidate] = bound_s

    def planned(self, mesh: Mesh, step_s: float) -> None:
        """A plan on that mesh takes as long."""
        is_faster = self.fastest is None or step_s < self.fastest[0]
        if mesh.size == self.cluster.n_devices and is_faster:
            self.fastest = step_s, mesh

    def notes(self, mesh: Mesh, step_s: float) -> list[str]:
        """How many devices the best plan leaves idle, and why; nothing if none."""
        devices = self.cluster.n_devices
        if mesh.size == devices:
            return []
        return [f"{devices - mesh.size} of {devices} devices idle: {self._why(devices, step_s)}"]

    def _why(self, devices: int, step_s: float) -> str:
        if self.pins.pipeline and self.pins.data and self.pins.tensor:
            return "the pins say so"
        if self.fastest is not None:
            whole_s, whole = self.fastest
            return (
                f"the best plan found on all {devices} ({whole}) takes {duration(whole_s)}, this "
                f"one {duration(step_s)}"
            )
        if not self.has_whole:
            return f"no mesh of all {devices} can share the rows, the blocks and the tensors"
        least_s = min(self.bounds_s.values(), default=inf)
        if least_s == inf:
            return f"no plan on all {devices} fits"
        return f"plans on all {devices} take {duration(least_s)} at least"
