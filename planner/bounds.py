"""Lower bounds of candidates: what no sharding, kept values or cuts beat under the cost model.

Input: a candidate. Output: seconds of a step, at four levels, each closer and slower to find.

    (1) every node takes what its fastest strategy takes and nothing is communicated; stages share
        all work evenly, but no layer is cut; recomputation makes room for all stages together
    (2) the same, with blocks that are no faster than `planner.sharding_bound` says
    (3) one sharding for the micro-batches, the exchange of gradients and the update together
    (4) the best cuts into stages, each recomputing what its own memory asks for

What they are made of is in `planner.least_costs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf

from ir.cluster import Cluster
from ir.schedules import Held, splits_backward
from planner.calibrated import cost_model
from planner.cost import CostModel
from planner.least_costs import LeastCosts
from planner.pins import Candidate
from planner.price import StateCost
from planner.rank_bound import least_pace_s
from planner.sharding_program import PHASES, Phase
from planner.stage_cuts import best_cuts, least_maximum, relaxed_seconds, tail_seconds
from planner.stage_problem import Point, Run, StageProblem
from planner.workload import Workload

SENDS = 2
"""A value that crosses and its gradient are both waited for, on one side or on both."""


@dataclass
class Bounds:
    """Bounds by candidate."""

    least: LeastCosts

    @property
    def work(self) -> Workload:
        return self.least.work

    @property
    def cluster(self) -> Cluster:
        return self.least.cluster

    # (1)

    def quick_s(self, candidate: Candidate) -> float:
        """Seconds that no plan of the candidate beats, in closed form; infinity if none can fit."""
        if not self._may_fit(candidate):
            return inf
        blocks = self.least.blocks(candidate, exact=False)
        return self._even_s(candidate, [block.curve.corners[0][0] for block in blocks])

    def _may_fit(self, candidate: Candidate) -> bool:
        """By what there is at once at least."""
        capacity_bytes = cost_model(self.cluster, candidate.mesh).capacity_bytes
        if max(self.least.working_bytes(candidate)) > capacity_bytes:
            return False
        return self.least.need_bytes(candidate) <= capacity_bytes

    def _even_s(
        self, candidate: Candidate, block_s: Sequence[float], total_s: float = 0.0
    ) -> float:
        """A step whose ranks share all work evenly, but no block is cut. `block_s`: of a call of
        each variant; `total_s`: of all calls, if that is known to be more than their sum."""
        again_s, ranks = self.least.again_s(candidate), candidate.mesh.pipeline
        calls = [len(kind.calls) for kind in self.work.kinds]
        pairs = list(zip(calls, block_s, strict=True))
        total_s = max(total_s, sum(n * seconds for n, seconds in pairs))
        fewest_s = max(ceil(n / ranks) * seconds for n, seconds in pairs)  # and fewer sends, maybe
        state = self.least.state(candidate)
        cost = cost_model(self.cluster, candidate.mesh)
        send_s = min((self.least.send_s(candidate, cost, s) for s in range(ranks - 1)), default=0.0)
        more_s = again_s + (candidate.stages - 1) * SENDS * send_s
        more_s += state.gather_s + state.scatter_s
        pace_s = max((total_s + more_s) / ranks, fewest_s)
        step_s = self._step_s(candidate, pace_s, total_s + more_s)
        if splits_backward(candidate.schedule):
            step_s += (candidate.stages - 1) * send_s / self._sharing(candidate)
        return step_s + (state.sync_s + state.update_s) / ranks

    def _step_s(self, candidate: Candidate, pace_s: float, sum_s: float) -> float:
        """Seconds of the pipeline, of a slowest rank and all ranks together, by the rules of
        `planner.schedule`: zero-bubble hides no more than all backwards in the fill, and ranks
        that share cores are faster while others wait."""
        count, virtual = candidate.micro_batches, candidate.virtual_stages
        if splits_backward(candidate.schedule):
            alone_s = (count - 1) * pace_s + self.least.forward_s(candidate)
        else:
            alone_s = count * pace_s + max(0.0, sum_s - pace_s) / virtual
        sharing = self._sharing(candidate)
        shared_s = count * sum_s / candidate.mesh.pipeline if sharing > 1 else 0.0
        return max(alone_s / sharing, shared_s)

    def _sharing(self, candidate: Candidate) -> float:
        return cost_model(self.cluster, candidate.mesh).core_sharing

    # (2), (3) and (4)

    def close_s(self, candidate: Candidate, level: int) -> float:
        """As `quick_s`, closer: (2), (3) or (4)."""
        if level == 2:
            return self._exact_even_s(candidate)
        return self._joint_s(candidate) if level == 3 else self._cuts_s(candidate)

    def _exact_even_s(self, candidate: Candidate) -> float:
        """As `quick_s`; without a tensor axis there is nothing to choose."""
        if candidate.mesh.tensor == 1:
            return 0.0
        blocks = self.least.blocks(candidate, exact=True)
        least_s = [min(s for s, _ in block.curve.corners) for block in blocks]
        return self._even_s(candidate, least_s, self.least.total_s(candidate))

    def _joint_s(self, candidate: Candidate) -> float:
        """One sharding for all that it decides: ranks that share all work evenly, the fill of the
        pipeline, gradients exchanged, parameters updated; not where ranks share cores."""
        if self._sharing(candidate) > 1:
            return 0.0
        least, ranks = self.least, candidate.mesh.pipeline
        cost, state = cost_model(self.cluster, candidate.mesh), least.state(candidate)
        send_s = min((least.send_s(candidate, cost, s) for s in range(ranks - 1)), default=0.0)
        more_s = least.again_s(candidate) + (candidate.stages - 1) * SENDS * send_s
        more_s += least.beside_s(candidate) + self._added_s(candidate, cost, state)
        exchange_s = 0.0 if self.cluster.calibration else least.exchange_s(candidate)
        once_s = self._latency_s(candidate, exchange_s) / ranks
        return once_s + max(
            least.weighted_s(candidate, weights, exchange_s)
            + max(0.0, weights["move"]) * more_s
            for weights in _phase_weights(candidate)
        )

    def _latency_s(self, candidate: Candidate, exchange_s: float) -> float:
        """Of exchanging gradients, beside what their bytes take when they are cut evenly."""
        state = self.least.state(candidate)
        total_s = state.sync_s + candidate.micro_batches * (state.gather_s + state.scatter_s)
        return max(0.0, total_s - exchange_s * self.least.trained_bytes(candidate))

    def _cuts_s(self, candidate: Candidate) -> float:
        """By the best cuts into ranks or, for ranks of several stages, the best share of blocks."""
        problem = self._problem(candidate)
        sharing = self._sharing(candidate)
        if candidate.virtual_stages > 1:
            ranks = range(candidate.mesh.pipeline)
            moments = [self.least.moments(candidate, rank) for rank in ranks]
            pace_s, state = least_pace_s(problem, moments), self.least.state(candidate)
            sum_s = sum(r.count * min(_seconds(p) for p in r.points) for r in problem.runs)
            sum_s += sum(problem.exposed_send_s(rank) for rank in ranks)
            once_s = (state.sync_s + state.update_s) / len(ranks)
            return self._step_s(candidate, pace_s, sum_s) + once_s
        seconds, tails = relaxed_seconds(problem), tail_seconds(problem)
        if splits_backward(candidate.schedule):
            pace_s = least_maximum(seconds)
            return self._step_s(candidate, pace_s, 0.0) + sum(problem.send_s) / sharing
        cuts = best_cuts(seconds, tails, candidate.micro_batches)
        return inf if cuts is None else float(cuts.cost_s) / sharing

    def _problem(self, candidate: Candidate) -> StageProblem:
        mesh, cost = candidate.mesh, cost_model(self.cluster, candidate.mesh)
        exact = mesh.tensor > 1
        runs = []
        for variant, count, state in self.least.runs(candidate):
            added_s = self._added_s(candidate, cost, state) / count
            added_s += (state.gather_s + state.scatter_s) / count
            held = state.held_bytes / count
            points = self._points(candidate, variant, added_s, None if exact else held)
            once = state.sync_s / count, state.update_s / count
            runs.append(Run(str(variant), count, points, *once))
        return StageProblem(
            tuple(runs), mesh.pipeline, candidate.micro_batches, candidate.schedule,
            (float(cost.capacity_bytes),) * mesh.pipeline,
            tuple(
                candidate.virtual_stages * self.least.send_s(candidate, cost, stage)
                for stage in range(mesh.pipeline - 1)
            ),
            held=tuple(self._held(candidate, rank) for rank in range(mesh.pipeline)),
        )  # fmt: skip

    def _held(self, candidate: Candidate, rank: int) -> tuple[Held, ...]:
        """At the fullest moments of a rank; of several stages the least."""
        if candidate.virtual_stages > 1:
            return (Held(self.least.flights(candidate, rank), 0),)
        return tuple(moment[0] for moment in self.least.moments(candidate, rank))

    def _added_s(self, candidate: Candidate, cost: CostModel, state: StateCost) -> float:
        """Gradients added up per micro-batch; nothing on a measured machine, where what tensors of
        several runs take together can be less than what those of each run do."""
        if self.cluster.calibration is not None:
            return 0.0
        count = candidate.micro_batches
        return cost.accumulate_s(state.summed_bytes, state.summed_tensors, count)

    def _points(
        self, candidate: Candidate, variant: int, added_s: float, held_bytes: float | None
    ) -> tuple[Point, ...]:
        """Every corner of the variant's shardings with every corner of what it keeps.
        `held_bytes`: of state, where shardings are not told apart."""
        _, kept = self.least.kept(candidate)[variant]
        block = self.least.blocks(candidate, exact=held_bytes is None)[variant]
        working_bytes = self.least.working_bytes(candidate)[variant]
        part = self.least.held_part(candidate)
        splits = splits_backward(candidate.schedule)
        pending = self.least.pending_bytes(candidate)[variant] if splits else 0.0
        return tuple(
            Point(
                base_s + added_s, again_s, size,
                held * part if held_bytes is None else held_bytes,
                max(0.0, working_bytes - size), pending_bytes=pending,
            )
            for base_s, held in block.curve.corners for again_s, size in kept
        )  # fmt: skip


def _seconds(point: Point) -> float:
    return point.forward_s + point.backward_s


def _phase_weights(candidate: Candidate) -> Iterator[Mapping[Phase, float]]:
    """How often a step takes the seconds of a micro-batch through all blocks, by phase, at least:
    M - 1 times on the slowest rank, which has a P-th or more of them, and once on all.

    Zero-bubble's fill is F + B - min(B, W) of every rank but the slowest (`planner.schedule`): no
    less than F, and no less than F + B - W.
    """
    ranks, count = candidate.mesh.pipeline, candidate.micro_batches
    steady, early = (count - 1) / ranks, 1 / ranks
    if not splits_backward(candidate.schedule):
        part = 1 / candidate.virtual_stages
        yield {**dict.fromkeys(PHASES, (count - part) / ranks + part), "early": early}
        return
    yield {**dict.fromkeys(PHASES, steady), "forward": steady + 1, "early": early}
    if steady >= 1 or candidate.mesh.tensor == 1:
        late, whole = steady - 1, steady + 1
        yield {"forward": whole, "input": whole, "weight": late, "move": late, "early": early}
