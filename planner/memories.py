"""The bytes of the pipeline ranks of one candidate.

Input: a candidate with its pieces, a cost model, then a program with its stages. Output: of a rank
what it holds at its fullest moment, and the most that its instructions need beside that, from one
walk: of blocks (`call_memory`), the functions that call them (`stage_memory`), the rank's list of
actions (`rank_memory`), and what follows the last one (`exchange_memory`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ir.schedules import Held, schedule_order, splits_backward
from ir.spmd import Spmd, StageCall
from planner.call_memory import CallMemory
from planner.cost import CostModel
from planner.exchange_memory import tail_bytes
from planner.pieces import Pieces
from planner.pins import Candidate
from planner.rank_memory import rank_bytes
from planner.ranks import most_held_bytes
from planner.schedule import held_batches, moments, settled_batches
from planner.stage_bytes import batch_bytes, gathered_bytes, is_shared, point_of, sent_bytes
from planner.stage_memory import StageMemory, stage_memory
from planner.zero import ZeroMoves

Stages = Mapping[int, StageMemory]


@dataclass(frozen=True, slots=True)
class Memories:
    """See the module's docstring."""

    candidate: Candidate
    found: Pieces
    cost: CostModel
    moves: ZeroMoves

    @property
    def hidden_stages(self) -> int:
        """Pieces of the model per rank of a stack whose stages are not known one by one."""
        return self.cost.traits.virtual_stages if self.candidate.mesh.pipeline > 1 else 1

    def moments(self, rank: int) -> tuple[tuple[Held, ...], ...]:
        """The fullest moments of a rank."""
        candidate = self.candidate
        return moments(
            candidate.schedule, rank, candidate.mesh.pipeline, candidate.micro_batches,
            candidate.virtual_stages,
        )  # fmt: skip

    def of_rank(self, program: Spmd, rank: int, state: Sequence[str]) -> tuple[int, int]:
        """(held at the fullest moment with the rows of the batch, the most beside that); `state`:
        names of what the rank has, which is in neither."""
        stages = self.candidate.stages_of(rank)
        memories = {stage: self._of_stage(program, stage) for stage in stages}
        held = self._held_bytes(rank, memories)
        calls = [self._of_call(placed) for s in stages for placed in program.stages[s]]
        ranks, costs = self.candidate.mesh.pipeline, self.moves.state
        tails = [(costs[name].tail, is_shared(program, name, ranks)) for name in state]
        most = max(
            self._most_bytes(program, rank, memories), tail_bytes(tails),
            *(call.prologue_bytes for call in calls),
        )  # fmt: skip
        early = sum(call.early_bytes for call in calls)
        return held + batch_bytes(program, stages), early + most - held

    def host_bytes(self, program: Spmd, rank: int) -> int:
        """Saved values in host memory, at the fullest moment."""
        stages = [program.stages[stage] for stage in self.candidate.stages_of(rank)]
        saved = [sum(point_of(self.found, p).host_bytes for p in calls) for calls in stages]
        return self._in_flight_bytes(rank, saved, [0] * len(saved))

    def _held_bytes(self, rank: int, memories: Stages) -> int:
        """Of all micro-batches, between two actions."""
        saved = [memory.saved_bytes for memory in memories.values()]
        pending = [memory.pending_bytes for memory in memories.values()]
        return self._in_flight_bytes(rank, saved, pending)

    def _in_flight_bytes(self, rank: int, saved: Sequence[int], pending: Sequence[int]) -> int:
        """From bytes of one micro-batch per stage."""
        candidate = self.candidate
        if self.hidden_stages == 1:
            return most_held_bytes(self.moments(rank), saved, pending)
        flights = held_batches(
            rank, candidate.mesh.pipeline, candidate.micro_batches, candidate.schedule,
            self.hidden_stages,
        )  # fmt: skip
        return int(flights * sum(saved))

    def _most_bytes(self, program: Spmd, rank: int, memories: Stages) -> int:
        """During any action."""
        candidate, ranks = self.candidate, self.candidate.mesh.pipeline
        if self.hidden_stages > 1:
            alone = max(memory.beyond_bytes for memory in memories.values())
            return self._held_bytes(rank, memories) + alone
        order = schedule_order(
            candidate.schedule, ranks=ranks, virtual_stages=candidate.virtual_stages,
            micro_batches=settled_batches(candidate.schedule, ranks, candidate.micro_batches),
        )  # fmt: skip
        return rank_bytes(order, rank, memories, program.messages)

    def _of_stage(self, program: Spmd, stage: int) -> StageMemory:
        """With what other stacks hold beside it."""
        splits = splits_backward(self.candidate.schedule)
        walked = stage_memory(program, stage, self._of_call, self.moves, splits=splits)
        return walked.beside(
            sent_bytes(program, stage, self.cost),
            gathered_bytes(program, stage, self.moves.state, self.cost),
        )

    def _of_call(self, placed: StageCall) -> CallMemory:
        number, point = placed.variant, point_of(self.found, placed)
        known = self.found.memories
        key = (number, point.label, point.kept, point.hosted)
        if key not in known:
            inner = self.found.times[number].inner
            working = {name: int(size) for name, (_, size) in inner.items()}
            known[key] = CallMemory(
                self.moves.program, number, point.label, self.found.storages[number], working,
                point.inner_bytes,
            )  # fmt: skip
        return known[key]
