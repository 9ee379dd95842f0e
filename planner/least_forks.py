"""Bounds of a block told apart by the largest thing that it may keep: with it, and without it.

Input: what candidates share, a candidate, a run of its least problem. Output: that run twice, with
choices of either kind alone. The thing is one value, or what one kernel keeps by itself. The curve
below all choices goes straight over the bytes between the two kinds, where there may be none: of
many blocks some can keep it, but one block does or does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import add
from typing import TypeAlias

from ir.offload import offloads_activations
from planner.frontier import Frontier, frontier
from planner.least_costs import KEPT_PRICES, LeastCosts
from planner.pins import Candidate
from planner.recompute_program import KeptProgram
from planner.solver import Infeasible
from planner.stage_problem import Run

Corners: TypeAlias = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class LeastForks:
    """Kept by rows, in `least`."""

    least: LeastCosts

    def runs(self, candidate: Candidate, run: Run) -> list[Run]:
        """The run with choices of each kind; one run where all are of one kind."""
        number = int(run.name)
        again, tensor = self.least.again_part(candidate, number), candidate.mesh.tensor
        _, every = self.least.kept(candidate)[number]
        shardings = {(p.forward_s, p.persistent_bytes): p for p in run.points}.values()
        found = []
        for curve in self._curves(candidate, number):
            kept = [(seconds * again, size / tensor) for seconds, size in curve.corners]
            points = tuple(
                replace(point, backward_s=again_s, saved_bytes=size)
                for point in shardings for again_s, size in kept
            )  # fmt: skip
            joint = run.joint
            if joint is not None:
                more_s = (_priced(kept, price) - _priced(every, price) for price in joint.prices)
                joint = replace(joint, least_s=tuple(map(add, joint.least_s, more_s)))
            found.append(replace(run, points=points, joint=joint))
        return found

    def _curves(self, candidate: Candidate, number: int) -> list[Frontier]:
        """What a variant runs again and keeps on one device, by kind."""
        hosts = offloads_activations(candidate.offload)
        known, key = self.least.known_forks, (candidate.rows, number, hosts)
        if key not in known:
            known[key] = []
            for kind in (0.0, 1.0):
                with suppress(Infeasible):
                    known[key].append(frontier(self._program(candidate, number, kind), KEPT_PRICES))
        return known[key]

    def _program(self, candidate: Candidate, number: int, kind: float) -> KeptProgram:
        """Where the variable that most bytes go with has such a value, if there is any."""
        program, _ = self.least.kept_program(candidate, number)
        for _, largest in sorted(program.sizes, key=lambda term: abs(term[0]))[-1:]:
            program.model.constrain([(1.0, largest)], kind, kind)
        return program


def _priced(kept: Corners, price: float) -> float:
    """The least of seconds and bytes at a price."""
    return min(seconds + price * size for seconds, size in kept)
