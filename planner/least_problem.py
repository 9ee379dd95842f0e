"""The stage problem of a candidate whose blocks take what no block beats.

Input: a candidate, what blocks and state take at least. Output: a `StageProblem` whose stages, or
ranks if several stages share one, are no slower than those of any plan, and no larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal, TypeAlias

from ir.schedules import Held, splits_backward
from planner.cost import CostModel
from planner.least_costs import LeastCosts
from planner.least_halves import LeastHalves
from planner.least_joint import LeastJoint, OneSharding
from planner.pins import Candidate
from planner.price import StateCost
from planner.sharding_bound import BlockBound
from planner.stage_problem import Point, Run, StageProblem

Choose: TypeAlias = Literal["nodes", "fastest", "curves", "joint", "finer"]
"""What is known of a block's sharding: the fastest strategy of every node, the fastest sharding,
what no sharding beats that holds as many bytes, or of repeated blocks also what they and what they
keep cost together, at some prices or at more of them; each closer and slower to find."""


class Exchange(Enum):
    """What is done once per step: left out, or in the seconds of blocks; what the tensor and data
    axes do with the gradients of blocks that repeat as if parameters were cut evenly, or by one
    sharding for all."""

    LEFT_OUT = auto()
    APART = auto()
    TOGETHER = auto()


@dataclass(frozen=True)
class LeastProblem:
    """`of_ranks`: per pipeline rank the least that its own devices take, where ranks lie on
    different ones; `least` is then of all of them."""

    least: LeastCosts
    of_ranks: Sequence[LeastCosts] = ()

    def of(
        self, candidate: Candidate, exchange: Exchange = Exchange.LEFT_OUT,
        choose: Choose = "curves",
    ) -> StageProblem:  # fmt: skip
        mesh, cost = candidate.mesh, self.least.cost_of(candidate.mesh)
        if not self.has_exchange(candidate):
            exchange = Exchange.LEFT_OUT
        virtual, tied = candidate.virtual_stages, self.least.state.tied(candidate)
        capacity_bytes = (float(cost.capacity_bytes),) * mesh.pipeline
        unlike: tuple[tuple[Run, ...], ...] = ()
        if self.of_ranks:
            capacity_bytes = tuple(
                float(least.cost_of(mesh).capacity_bytes) for least in self.of_ranks
            )
            kinds = {id(x): LeastProblem(x) for x in self.of_ranks}
            of_kinds = {key: kind._runs(candidate, exchange, choose) for key, kind in kinds.items()}
            unlike = tuple(of_kinds[id(least)] for least in self.of_ranks)
        return StageProblem(
            self._runs(candidate, exchange, "nodes" if unlike else choose), mesh.pipeline,
            candidate.micro_batches, candidate.schedule, capacity_bytes,
            tuple(
                virtual * self.least.moves.send_s(candidate, cost, stage)
                for stage in range(mesh.pipeline - 1)
            ),
            held=tuple(self._held(candidate, rank) for rank in range(mesh.pipeline)),
            unlike=unlike,
            round_s=(virtual - 1) * self.least.moves.send_s(candidate, cost),
            tied=tuple((i, j, state.held_bytes) for i, j, state in tied),
            tied_s=tuple((i, j, self._copy_s(candidate, state, exchange)) for i, j, state in tied),
        )  # fmt: skip

    def _copy_s(self, candidate: Candidate, state: StateCost, exchange: Exchange) -> float:
        """What a copy of state takes per micro-batch; with its exchange, unless that is left out:
        the rank that takes longest has its own."""
        added_s = self.added_s(candidate, self.least.cost_of(candidate.mesh), state)
        if exchange is Exchange.LEFT_OUT:
            return added_s
        exchange_s = self.least.state.exchange_s(candidate)
        return added_s + exchange_s * state.summed_bytes / candidate.micro_batches

    def has_exchange(self, candidate: Candidate) -> bool:
        """Whether what the axes do once per step can be told apart and depends on shardings."""
        is_measured = self.least.cluster.calibration is not None
        return candidate.mesh.tensor > 1 and candidate.zero < 2 and not is_measured

    def _runs(self, candidate: Candidate, exchange: Exchange, choose: Choose) -> tuple[Run, ...]:
        """What all blocks take at least."""
        least, cost = self.least, self.least.cost_of(candidate.mesh)
        micro_batches, exchange_s = candidate.micro_batches, 0.0
        if exchange is not Exchange.LEFT_OUT:
            exchange_s = least.state.exchange_s(candidate)
        each = (0.0, 0.0)
        if exchange is Exchange.TOGETHER:
            each = (exchange_s / micro_batches, 1 / micro_batches)
        is_joint = choose in ("joint", "finer") and candidate.mesh.tensor > 1
        blocks = self._blocks(candidate, choose, *each)
        runs = []
        for variant, count, state in least.state.runs(candidate):
            added_s = self.added_s(candidate, cost, state) / count
            added_s += (state.gather_s + state.scatter_s) / count
            sync_s, moved_s = state.sync_s, exchange_s * state.summed_bytes
            if len(least.work.kinds[variant].calls) > 1:
                sync_s = max(0.0, sync_s - moved_s)
                if exchange is Exchange.APART:
                    added_s += moved_s / count / micro_batches
            ends = sync_s / count, state.update_s / count
            if exchange is not Exchange.LEFT_OUT:
                added_s, ends = added_s + sum(ends) / micro_batches, (0.0, 0.0)
            shardings = self._shardings(candidate, blocks[variant], state, count)
            _, kept = least.kept(candidate)[variant]
            points = self._points(candidate, variant, added_s, shardings, kept)
            late: tuple[Point, ...] = ()
            if splits_backward(candidate.schedule):
                corners = LeastHalves(least).late(candidate, variant)
                late = self._points(candidate, variant, added_s, shardings, corners)
            together = None
            if is_joint and len(least.work.kinds[variant].calls) > 1:
                divided_bytes = least.state.divided_bytes(candidate, state) / count
                found, rules = LeastJoint(least, choose == "finer"), least.rules(candidate, *each)
                together = found.of(candidate, variant, rules, added_s, divided_bytes)
            runs.append(Run(str(variant), count, points, *ends, together, late))
        return tuple(runs)

    def one_sharding(self, candidate: Candidate, run: int) -> OneSharding:
        """Of the blocks of a run."""
        least, cost = self.least, self.least.cost_of(candidate.mesh)
        variant, count, state = least.state.runs(candidate)[run]
        added_s = self.added_s(candidate, cost, state) + state.gather_s + state.scatter_s
        rules = once = least.rules(candidate)
        ends_s = 0.0
        if self.has_exchange(candidate):
            exchange_s, part = least.state.exchange_s(candidate), 1 / candidate.micro_batches
            once = least.rules(candidate, exchange_s * part, part)
            ends_s = max(0.0, state.sync_s - exchange_s * state.summed_bytes) + state.update_s
            ends_s *= part
        divided_bytes = least.state.divided_bytes(candidate, state)
        each = (added_s / count, ends_s / count, divided_bytes / count)
        return OneSharding(least, candidate, variant, (rules, once), *each)

    def _blocks(
        self, candidate: Candidate, choose: Choose, exchange_s: float, once: float
    ) -> list[BlockBound]:
        """A call of each variant; curves with the exchange of a byte and what is done once per
        step. Without a tensor axis there is nothing to choose."""
        if choose == "nodes" or candidate.mesh.tensor == 1:
            return self.least.blocks(candidate)
        if choose == "fastest":
            return self.least.fastest(candidate)
        return self.least.curves(candidate, exchange_s, once)

    def _held(self, candidate: Candidate, rank: int) -> tuple[Held, ...]:
        """At the fullest moments of a rank; of several stages the least."""
        if candidate.virtual_stages > 1:
            return (Held(self.least.flights(candidate, rank), 0),)
        return tuple(moment[0] for moment in self.least.moments(candidate, rank))

    def added_s(self, candidate: Candidate, cost: CostModel, state: StateCost) -> float:
        """Gradients added up per micro-batch; nothing on a measured machine, where what tensors of
        several runs take together can be less than what those of each run do."""
        if self.least.cluster.calibration is not None:
            return 0.0
        count = candidate.micro_batches
        return cost.accumulate_s(state.summed_bytes, state.summed_tensors, count)

    def _shardings(
        self, candidate: Candidate, block: BlockBound, state: StateCost, count: int
    ) -> list[tuple[float, float]]:
        """(seconds, bytes of state) of a call, of which there are so many: corners of its curve,
        but no less than if state is cut evenly."""
        divided_bytes = self.least.state.divided_bytes(candidate, state)
        found = dict[float, float]()  # the fastest of those that hold as much
        for seconds, whole_bytes in block.curve.corners:
            held = max(state.held_bytes / count, whole_bytes + divided_bytes / count)
            found.setdefault(held, seconds)
        return [(seconds, held) for held, seconds in found.items()]

    def _points(
        self, candidate: Candidate, variant: int, added_s: float,
        shardings: Sequence[tuple[float, float]], kept: Sequence[tuple[float, float]],
    ) -> tuple[Point, ...]:  # fmt: skip
        """Every sharding of the variant with every corner of what it keeps. A block that runs
        backward can free no more than the values that it kept."""
        least = self.least
        working_bytes = least.working_bytes(candidate)[variant]
        value_bytes = kept[0][1] - least.inner_bytes(candidate)[variant]
        splits = splits_backward(candidate.schedule)
        pending = LeastHalves(least).pending_bytes(candidate)[variant] if splits else 0.0
        return tuple(
            Point(
                base_s + added_s, again_s, size, held,
                max(0.0, working_bytes - min(size, max(0.0, value_bytes))),
                pending_bytes=pending,
            )
            for base_s, held in shardings for again_s, size in kept
        )  # fmt: skip
