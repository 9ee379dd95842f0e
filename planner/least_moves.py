"""The least that goes from stage to stage, and between data ranks inside blocks.

Input: a workload, cost models, the pieces of one device, blocks of a rank. Output: seconds that no
plan beats: what moves is cut evenly over the tensor axis, and of all places to cut the model the
one where least crosses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ir.cluster import Mesh
from ir.layout import DATA
from ir.lower import Lowered
from planner.cost import CostModel
from planner.pieces import Pieces
from planner.pins import Candidate
from planner.price import COLLECTIVES, moved_bytes
from planner.rank_costs import CostOf
from planner.workload import Workload


@dataclass
class LeastMoves:
    """Kept by mesh and rows; the arguments are those of `LeastCosts`."""

    work: Workload
    cost_of: CostOf
    pieces_of: Callable[[int], Pieces]
    lowered_of: Callable[[int, int, int], Sequence[Lowered]]
    known_sends: dict[tuple[Mesh, int], float] = field(default_factory=dict)
    known_crossings: dict[int, set[tuple[int, ...]]] = field(default_factory=dict)
    known_moves: dict[tuple[int, int, int], Counter[tuple[str, int]]] = field(default_factory=dict)
    known_data_s: dict[tuple[Mesh, int, int], float] = field(default_factory=dict)

    def send_s(self, candidate: Candidate, cost: CostModel, stage: int | None = None) -> float:
        """There and back, of a micro-batch, where the least crosses and is cut evenly; from a
        pipeline rank to the next one, or from the last to the first."""
        tensor, crossings = candidate.mesh.tensor, self._crossings(candidate.rows)
        each = (sum(cost.send_s(size // tensor, stage) for size in sizes) for sizes in crossings)
        return min(each, default=0.0) * (1 if cost.sends_meet else 2)

    def least_send_s(self, candidate: Candidate) -> float:
        """Of the two neighbouring stages that are joined best; 0 without a pipeline."""
        key = (candidate.mesh, candidate.rows)
        if key not in self.known_sends:
            cost, stages = self.cost_of(candidate.mesh), candidate.mesh.pipeline - 1
            each = (self.send_s(candidate, cost, stage) for stage in range(stages))
            self.known_sends[key] = min(each, default=0.0)
        return self.known_sends[key]

    def _crossings(self, rows: int) -> set[tuple[int, ...]]:
        """Bytes of the values with gradients that cross each place between two calls."""
        if rows not in self.known_crossings:
            found, calls = self.pieces_of(rows), self.work.graph.calls
            made: dict[str, tuple[int, int]] = {}
            last: dict[str, int] = {}
            for index, call in enumerate(calls):
                last.update(dict.fromkeys(call.arguments, index))
                number = self.work.variant_of[index]
                block, types = self.work.kinds[number].block, found.lowered[number].types
                for value, name in zip(call.results, block.outputs, strict=True):
                    if any(name == output for output, _ in block.tangents):
                        made[value] = (index, types[name].bytes(1))
            self.known_crossings[rows] = {
                tuple(sorted(size for value, (first, size) in made.items()
                             if first < place <= last.get(value, -1)))
                for place in range(1, len(calls))
            }  # fmt: skip
        return self.known_crossings[rows]

    def data_s(self, candidate: Candidate) -> float:
        """Of collectives on the data axis inside all blocks, per micro-batch; what they move is cut
        evenly over the tensor axis."""
        if not self._has_gathers or candidate.mesh.data == 1:
            return 0.0
        key = (candidate.mesh, candidate.rows, min(candidate.micro_batches, 2))
        if key not in self.known_data_s:
            cost, tensor = self.cost_of(candidate.mesh), candidate.mesh.tensor
            self.known_data_s[key] = sum(
                times * cost.collective_s(kind, size // tensor, DATA)
                for (kind, size), times in self._data_moves(candidate).items()
            )
        return self.known_data_s[key]

    @cached_property
    def _has_gathers(self) -> bool:
        return any(kind.spread.gathers(kind.block) for kind in self.work.kinds)

    def _data_moves(self, candidate: Candidate) -> Counter[tuple[str, int]]:
        """(kind, bytes) of those collectives; several micro-batches share what is done early."""
        key = (candidate.rows, candidate.mesh.data, min(candidate.micro_batches, 2))
        if key not in self.known_moves:
            found: Counter[tuple[str, int]] = Counter()
            for kind, lowered in zip(self.work.kinds, self.lowered_of(*key), strict=True):
                for node in (*lowered.forward, *lowered.backward):
                    if node.op in COLLECTIVES and node.args[1] == DATA:
                        found[node.op, moved_bytes(node, lowered.types)] += len(kind.calls)
            self.known_moves[key] = found
        return self.known_moves[key]
