"""The least that the halves of a split backward take, for schedules that run them apart.

Input: what candidates share, a candidate. Output: per variant of blocks bytes between the halves,
and what the half that other stages wait for runs again, all as if cut evenly over the tensor axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from ir.offload import offloads_activations
from ir.split import split_backward
from planner.frontier import Frontier, frontier
from planner.halves import least_pending_bytes
from planner.late_program import LateProgram
from planner.least_costs import KEPT_PRICES, LeastCosts
from planner.pieces import Pieces
from planner.pins import Candidate
from planner.recompute import everything
from planner.recompute_program import KeptProgram
from planner.stage_problem import Point, Run, StageProblem

Corners: TypeAlias = list[tuple[float, float]]


@dataclass(frozen=True)
class LeastHalves:
    """Kept by rows, in `least`."""

    least: LeastCosts

    def pending_bytes(self, candidate: Candidate) -> list[float]:
        """Per variant what the first half of a backward leaves for the second, at least: gradients
        that no other block has."""
        variants = range(len(self.least.work.kinds))
        return [self._left_bytes(candidate, n) / candidate.mesh.tensor for n in variants]

    def _left_bytes(self, candidate: Candidate, number: int) -> int:
        known, key = self.least.known_left, (candidate.rows, number)
        if key not in known:
            found = self.least.pieces_of(candidate.rows)
            parts = found.lowered[number], found.storages[number]
            known[key] = least_pending_bytes(*parts, self.least.always(found, number))
        return known[key]

    def prompt(
        self, candidate: Candidate, problem: StageProblem, prompt_s: Mapping[int, float]
    ) -> StageProblem:
        """The problem of what is not the weights' half. `prompt_s`: of a block by variant, which
        are the names of runs, without what runs again: no more than what that half reads."""
        runs = [self._prompt(candidate, run, prompt_s[int(run.name)]) for run in problem.runs]
        return replace(problem, runs=tuple(runs))

    def _prompt(self, candidate: Candidate, run: Run, seconds: float) -> Run:
        """With everything kept, or at the corners of what that half needs."""
        corners = self._corners(candidate, int(run.name), is_late=False)
        state_bytes, working_bytes, pending_bytes = (
            min(getattr(point, name) for point in run.points)
            for name in ("persistent_bytes", "transient_bytes", "pending_bytes")
        )
        most_bytes = max(point.saved_bytes for point in run.points)
        points = (
            Point(seconds, again_s, size, state_bytes, working_bytes, pending_bytes=pending_bytes)
            for again_s, size in [(0.0, most_bytes), *corners]
        )
        return replace(run, points=tuple(points), joint=None, late=())

    def late(self, candidate: Candidate, number: int) -> Corners:
        """(seconds recomputed, bytes kept from forward and, of forward values, between the halves)
        of a variant on one device of the mesh."""
        return self._corners(candidate, number, is_late=True)

    def _corners(self, candidate: Candidate, number: int, *, is_late: bool) -> Corners:
        again, tensor = self.least.again_part(candidate, number), candidate.mesh.tensor
        corners = self._frontier(candidate, number, is_late=is_late).corners
        return [(seconds * again, size / tensor) for seconds, size in corners]

    def _frontier(self, candidate: Candidate, number: int, *, is_late: bool) -> Frontier:
        """Of a variant on one device: of what both halves run again and keep, if `is_late`, or of
        what the first one alone does."""
        hosts = offloads_activations(candidate.offload)
        known, key = self.least.known_halves, (candidate.rows, number, hosts, is_late)
        if key not in known:
            program = self._program(candidate, number, hosts=hosts, is_late=is_late)
            known[key] = frontier(program, KEPT_PRICES)
        return known[key]

    def _program(
        self, candidate: Candidate, number: int, *, hosts: bool, is_late: bool
    ) -> KeptProgram:
        found = self.least.pieces_of(candidate.rows)
        parts = self.least.kept_parts(found, number, hosts=hosts)
        lowered, storage, _, always, _, _ = parts
        split = split_backward(lowered, everything(lowered, storage, always), always)
        half = split.weight if is_late else split.input
        reads = list(dict.fromkeys(name for node in half for name in node.inputs))
        if not is_late:
            return KeptProgram(*parts, reads)
        return LateProgram(*parts, reads=reads, unheld=self._held_elsewhere(found, number))

    def _held_elsewhere(self, found: Pieces, number: int) -> set[str]:
        """The inputs of a variant that are of the batch, or that the block which made them may hold
        for its own backward."""
        graph, kinds = self.least.work.graph, self.least.work.kinds
        saved: dict[str, bool] = {}
        for kind, lowered, storage in zip(kinds, found.lowered, found.storages, strict=True):
            owners = {storage.owner[name] for name in lowered.saved}
            for index in kind.calls:
                for value, name in zip(graph.calls[index].results, lowered.outputs, strict=True):
                    saved[value] = storage.owner[name] in owners
        return {
            name for index in kinds[number].calls
            for name, value in zip(
                kinds[number].block.inputs, graph.calls[index].arguments, strict=True
            )
            if saved.get(value, True)
        }  # fmt: skip
