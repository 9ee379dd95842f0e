"""Lower bounds of candidates: what no sharding, kept values or cuts beat under the cost model.

Input: a candidate. Output: seconds of a step, at three levels, each closer and slower to find.

    (1) every node takes what its fastest strategy takes and nothing is communicated; stages share
        all work evenly, but no layer is cut; recomputation makes room for all stages together
    (2) the best cuts into stages, each recomputing what its own memory asks for
    (3) the same, with blocks that are no faster than `planner.sharding_bound` says

At all, no choice of kept values recomputes and copies less than `planner.frontier` says, and what
a device holds is cut evenly over the tensor axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from math import ceil, inf

from ir.batch import early_values
from ir.cluster import Cluster, Mesh
from ir.lower import Degrees
from ir.offload import offloads_activations, offloads_optimizer, staying_inputs
from ir.ops import op_def
from ir.recompute import state_inputs
from ir.schedules import Held, splits_backward
from ir.spmd import early_inputs
from planner.calibrated import cost_model
from planner.cost import CostModel
from planner.frontier import Frontier, frontier
from planner.offload import Hosting
from planner.pieces import Pieces
from planner.pins import Candidate
from planner.price import OPTIMIZER_TENSORS, NodeTimes, Seconds, StateCost
from planner.recompute_program import KeptProgram
from planner.schedule import moments
from planner.sharding_bound import BlockBound, block_bound, least_total_s
from planner.sharding_program import HELD_TENSORS
from planner.stage_cuts import best_cuts, least_maximum, relaxed_seconds, tail_seconds
from planner.stage_problem import Point, Run, StageProblem
from planner.workload import Workload
from planner.zero import least_held_cost

SENDS = 2
"""A value that crosses and its gradient are both waited for, on one side or on both."""
ROOMY = 0.5
"""Part of a device's memory that an even share may fill where no rank is taken to be short."""
COUNT = 8
"""Micro-batches for which blocks are bounded: what happens once per step is not in their bounds."""


@dataclass
class Bounds:
    """Bounds by candidate; shares what depends on the tensor degree and the rows only.

    `pieces_of` gives the pieces of one device for so many rows.
    """

    work: Workload
    cluster: Cluster
    pieces_of: Callable[[int], Pieces]
    blocks: dict[tuple[int, int, bool], tuple[BlockBound, ...]] = field(default_factory=dict)
    totals: dict[tuple[int, int], float] = field(default_factory=dict)
    frontiers: dict[tuple[int, bool], tuple[Frontier, ...]] = field(default_factory=dict)
    crossings: dict[int, set[tuple[int, ...]]] = field(default_factory=dict)
    states: dict[tuple[Mesh, int, str], dict[str, StateCost]] = field(default_factory=dict)
    state_parts: dict[tuple[Mesh, int], float] = field(default_factory=dict)

    # (1)

    def quick_s(self, candidate: Candidate) -> float:
        """Seconds that no plan of the candidate beats, in closed form; infinity if none can fit."""
        blocks = self._blocks(candidate, exact=False)
        return self._even_s(candidate, [block.curve.corners[0][0] for block in blocks])

    def _even_s(
        self, candidate: Candidate, block_s: Sequence[float], total_s: float = 0.0
    ) -> float:
        """A step whose ranks share all work evenly, but no block is cut. `block_s`: of a call of
        each variant; `total_s`: of all calls, if that is known to be more than their sum."""
        again_s, ranks = self._again_s(candidate), candidate.mesh.pipeline
        calls = [len(kind.calls) for kind in self.work.kinds]
        pairs = list(zip(calls, block_s, strict=True))
        total_s = max(total_s, sum(n * seconds for n, seconds in pairs))
        pace_s = max(total_s / ranks, *(ceil(n / ranks) * seconds for n, seconds in pairs))
        state = StateCost.total(list(self._states(candidate).values()))
        cost = cost_model(self.cluster, candidate.mesh)
        send_s = min((self._send_s(candidate, cost, s) for s in range(ranks - 1)), default=0.0)
        more_s = again_s + (candidate.stages - 1) * SENDS * send_s
        more_s += state.gather_s + state.scatter_s
        step_s = self._step_s(candidate, pace_s + more_s / ranks, total_s + more_s)
        if splits_backward(candidate.schedule):
            step_s += (candidate.stages - 1) * send_s / self._sharing(candidate)
        return step_s + (state.sync_s + state.update_s) / ranks

    def _step_s(self, candidate: Candidate, pace_s: float, sum_s: float) -> float:
        """Seconds of the pipeline, of a slowest rank and all ranks together, by the rules of
        `planner.schedule`: zero-bubble hides no more than all backwards in the fill, and ranks
        that share cores are faster while others wait."""
        count, virtual = candidate.micro_batches, candidate.virtual_stages
        if splits_backward(candidate.schedule):
            alone_s = (count - 1) * pace_s + self._forward_s(candidate)
        else:
            alone_s = count * pace_s + max(0.0, sum_s - pace_s) / virtual
        sharing = self._sharing(candidate)
        shared_s = count * sum_s / candidate.mesh.pipeline if sharing > 1 else 0.0
        return max(alone_s / sharing, shared_s)

    def _sharing(self, candidate: Candidate) -> float:
        return cost_model(self.cluster, candidate.mesh).core_sharing

    def _forward_s(self, candidate: Candidate) -> float:
        """Of one micro-batch through all blocks, every node by its fastest strategy."""
        blocks, kinds = self._blocks(candidate, exact=False), self.work.kinds
        return sum(
            len(kind.calls) * sum(block.node_s[n.outputs[0]] for n in kind.block.forward)
            for kind, block in zip(kinds, blocks, strict=True)
        )

    def state_bytes(self, candidate: Candidate) -> float:
        """State of a device when it is divided evenly by stages and shards."""
        states = self._states(candidate).values()
        return sum(item.held_bytes for item in states) / candidate.mesh.pipeline

    def need_bytes(self, candidate: Candidate) -> float:
        """State and activations of a device, divided evenly, with everything recomputed."""
        mesh = candidate.mesh
        held = self._flights(candidate, 0)
        least = sum(n * corners[-1][1] for n, corners in self._kept(candidate))
        return self.state_bytes(candidate) + held * least / mesh.pipeline

    def is_short(self, candidate: Candidate) -> bool:
        """Whether state and everything that backward reads, divided evenly, take so much of a
        device that an uneven share may not fit."""
        most = sum(n * corners[0][1] for n, corners in self._kept(candidate))
        flights = self._flights(candidate, 0)
        key = (candidate.mesh, candidate.zero)
        if key not in self.state_parts:
            self.state_parts[key] = self.state_bytes(candidate)
        held_bytes = self.state_parts[key] + flights * most / candidate.mesh.pipeline
        return held_bytes > ROOMY * cost_model(self.cluster, candidate.mesh).capacity_bytes

    def _kept(self, candidate: Candidate) -> list[tuple[int, list[tuple[float, float]]]]:
        """Per variant its calls, and (seconds recomputed, bytes kept) on one device of the mesh."""
        tensor = candidate.mesh.tensor
        rows = []
        hosts = offloads_activations(candidate.offload)
        for number, curve in enumerate(self._frontiers(candidate.rows, hosts=hosts)):
            evenness = self._evenness(candidate, number)
            again = (min(evenness, 1.0) if hosts else evenness) / tensor
            corners = [(seconds * again, kept / tensor) for seconds, kept in curve.corners]
            rows.append((len(self.work.kinds[number].calls), corners))
        return rows

    def _again_s(self, candidate: Candidate) -> float:
        """The least recomputation per micro-batch, of all stages, that makes room for what is
        kept: by duality, over the prices of a kept byte; infinity if nothing makes room."""
        kept, room = self._kept(candidate), self._room_bytes(candidate)
        if sum(n * corners[-1][1] for n, corners in kept) > room:
            return inf
        prices = {
            (tall[0] - flat[0]) / (flat[1] - tall[1])
            for _, corners in kept for flat in corners for tall in corners
            if tall[0] > flat[0] and flat[1] > tall[1]
        }  # fmt: skip
        return max(
            sum(n * min(s + price * size for s, size in corners) for n, corners in kept)
            - price * room
            for price in (0.0, *prices)
        )

    def _room_bytes(self, candidate: Candidate) -> float:
        """What all ranks together can keep of one micro-batch: sum of room / in flight."""
        mesh = candidate.mesh
        room = cost_model(self.cluster, mesh).capacity_bytes - self.state_bytes(candidate)
        return sum(room / self._flights(candidate, rank) for rank in range(mesh.pipeline))

    def _flights(self, candidate: Candidate, rank: int) -> float:
        """Whole micro-batches of which a rank keeps what forward saved."""
        found = moments(
            candidate.schedule, rank, candidate.mesh.pipeline, candidate.micro_batches,
            candidate.virtual_stages,
        )  # fmt: skip
        most = max(sum(held.forward for held in moment) for moment in found)
        return most / candidate.virtual_stages

    # (2) and (3)

    def close_s(self, candidate: Candidate, *, exact: bool) -> float:
        """As `quick_s`, closer, by integer cuts: (2), or (3) if `exact`."""
        even_s = 0.0
        if exact and candidate.mesh.tensor > 1:
            blocks = self._blocks(candidate, exact=True)
            least_s = [min(s for s, _ in block.curve.corners) for block in blocks]
            even_s = self._even_s(candidate, least_s, self._total_s(candidate))
        return max(even_s, self._cuts_s(candidate, exact=exact))

    def _cuts_s(self, candidate: Candidate, *, exact: bool) -> float:
        """By the best cuts; several stages per rank can be more even than any cuts into ranks."""
        if candidate.virtual_stages > 1:
            return 0.0
        problem = self._problem(candidate, exact=exact)
        seconds, tails = relaxed_seconds(problem), tail_seconds(problem)
        sharing = self._sharing(candidate)
        if splits_backward(candidate.schedule):
            pace_s = least_maximum(seconds)
            return self._step_s(candidate, pace_s, 0.0) + sum(problem.send_s) / sharing
        cuts = best_cuts(seconds, tails, candidate.micro_batches)
        return inf if cuts is None else float(cuts.cost_s) / sharing

    def _total_s(self, candidate: Candidate) -> float:
        """Of one micro-batch through all blocks, whose boundaries agree."""
        key = (candidate.mesh.tensor, candidate.rows)
        if key not in self.totals:
            cost = cost_model(self.cluster, candidate.mesh)
            degrees = Degrees(candidate.rows * COUNT, 1, candidate.mesh.tensor, COUNT)
            self.totals[key] = least_total_s(
                self.work.graph, self.work.kinds, degrees, cost, self._free
            )
        return self.totals[key]

    def _problem(self, candidate: Candidate, *, exact: bool) -> StageProblem:
        mesh, cost = candidate.mesh, cost_model(self.cluster, candidate.mesh)
        exact = exact and mesh.tensor > 1
        runs = []
        for variant, count, state in self._runs(candidate):
            added_s = self._added_s(candidate, cost, state) / count
            added_s += (state.gather_s + state.scatter_s) / count
            held = state.held_bytes / count
            points = self._points(candidate, variant, added_s, None if exact else held)
            once = state.sync_s / count, state.update_s / count
            runs.append(Run(str(variant), count, points, *once))
        return StageProblem(
            tuple(runs), mesh.pipeline, candidate.micro_batches, candidate.schedule,
            (float(cost.capacity_bytes),) * mesh.pipeline,
            tuple(self._send_s(candidate, cost, s) for s in range(mesh.pipeline - 1)),
            held=tuple(
                (Held(int(self._flights(candidate, rank)), 0),) for rank in range(mesh.pipeline)
            ),
        )  # fmt: skip

    def _added_s(self, candidate: Candidate, cost: CostModel, state: StateCost) -> float:
        """Gradients added up per micro-batch; nothing on a measured machine, where what tensors of
        several runs take together can be less than what those of each run do."""
        if self.cluster.calibration is not None:
            return 0.0
        count = candidate.micro_batches
        return cost.accumulate_s(state.summed_bytes, state.summed_tensors, count)

    def _send_s(self, candidate: Candidate, cost: CostModel, stage: int) -> float:
        """There and back, of a micro-batch, where the least crosses and is cut evenly."""
        tensor = candidate.mesh.tensor
        return min(
            sum(cost.send_s(size // tensor, stage) for size in sizes)
            for sizes in self._crossings(candidate.rows)
        ) * (1 if cost.sends_meet else 2)

    def _crossings(self, rows: int) -> set[tuple[int, ...]]:
        """Bytes of the values with gradients that cross each place between two calls."""
        if rows not in self.crossings:
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
            self.crossings[rows] = {
                tuple(sorted(size for value, (first, size) in made.items()
                             if first < place <= last.get(value, -1)))
                for place in range(1, len(calls))
            }  # fmt: skip
        return self.crossings[rows]

    def _runs(self, candidate: Candidate) -> list[tuple[int, int, StateCost]]:
        """Identical calls in a row: variant, their number, the state that they use first."""
        graph, states = self.work.graph, dict(self._states(candidate))
        variant_of, found = self.work.variant_of, []
        for variant, group in groupby(range(len(graph.calls)), key=lambda i: variant_of[i]):
            calls = list(group)
            names = dict.fromkeys(v for i in calls for v in graph.calls[i].arguments)
            mine = [states.pop(name) for name in names if name in states]
            found.append((variant, len(calls), StateCost.total(mine)))
        return found

    def _points(
        self, candidate: Candidate, variant: int, added_s: float, held_bytes: float | None
    ) -> tuple[Point, ...]:
        """Every corner of the variant's shardings with every corner of what it keeps.
        `held_bytes`: of state, where shardings are not told apart."""
        _, kept = self._kept(candidate)[variant]
        block = self._blocks(candidate, exact=held_bytes is None)[variant]
        part = self._held_part(candidate)
        return tuple(
            Point(
                base_s + added_s, again_s, size,
                held * part if held_bytes is None else held_bytes, 0.0,
            )
            for base_s, held in block.curve.corners for again_s, size in kept
        )  # fmt: skip

    def _held_part(self, candidate: Candidate) -> float:
        """The least part of a block's held bytes that ZeRO, the optimizer and the host leave: of
        gradients, or of the `HELD_TENSORS` that the curve counts for a parameter and AdamW's
        state."""
        of_state, of_gradient, of_parameter = (
            candidate.mesh.data if candidate.zero >= stage else 1 for stage in (1, 2, 3)
        )
        tensors = 1 / of_parameter
        if not offloads_optimizer(candidate.offload):
            tensors += OPTIMIZER_TENSORS[self.work.optimizer] / of_state
        return min(tensors / HELD_TENSORS, 1 / of_gradient)

    # what candidates share

    def _states(self, candidate: Candidate) -> dict[str, StateCost]:
        key = (candidate.mesh, candidate.zero, candidate.offload)
        if key not in self.states:
            cost = cost_model(self.cluster, candidate.mesh)
            self.states[key] = {
                item.name: least_held_cost(
                    item, cost, self.work.optimizer, candidate.zero, candidate.offload
                )
                for item in self.work.graph.state
            }
        return self.states[key]

    def _blocks(self, candidate: Candidate, *, exact: bool) -> tuple[BlockBound, ...]:
        tensor = candidate.mesh.tensor
        key = (tensor, candidate.rows, exact)
        if key not in self.blocks:
            cost = cost_model(self.cluster, candidate.mesh)
            degrees = Degrees(candidate.rows * COUNT, 1, tensor, COUNT)
            graph, kinds = self.work.graph, self.work.kinds
            self.blocks[key] = tuple(
                block_bound(graph, kinds, n, degrees, cost, self._free, exact=exact)
                for n in range(len(kinds))
            )  # fmt: skip
        return self.blocks[key]

    def _frontiers(self, rows: int, *, hosts: bool) -> tuple[Frontier, ...]:
        """Of every variant, on one device; `hosts`: with what the host may hold."""
        if (rows, hosts) not in self.frontiers:
            found = self.pieces_of(rows)
            self.frontiers[rows, hosts] = tuple(
                frontier(self._kept_program(found, n, hosts=hosts))
                for n in range(len(self.work.kinds))
            )
        return self.frontiers[rows, hosts]

    def _kept_program(self, found: Pieces, number: int, *, hosts: bool) -> KeptProgram:
        """Inputs that several calls share are kept once, so they weigh nothing here."""
        graph, kind = self.work.graph, self.work.kinds[number]
        arguments = graph.calls[kind.calls[0]].arguments
        lowered = found.lowered[number]
        always = state_inputs(lowered, arguments, {item.name for item in graph.state})
        values = dict(zip(kind.block.inputs, arguments, strict=True))
        shared = {name for name, value in values.items() if self.work.uses[value] > 1}
        times = self._least_times(found, number)
        hosting = Hosting(self.cluster, staying_inputs(graph, kind)) if hosts else None
        return KeptProgram(lowered, found.storages[number], times, always, shared, hosting)

    def _evenness(self, candidate: Candidate, variant: int) -> float:
        """The least that a node of forward takes on T devices, over a T-th of one device's."""
        tensor = candidate.mesh.tensor
        if tensor == 1:
            return 1.0
        found = self.pieces_of(candidate.rows)
        alone = self._least_times(found, variant).of
        least = self._blocks(candidate, exact=False)[variant].node_s
        names = [node.outputs[0] for node in found.lowered[variant].forward]
        shares = [least[n] * tensor / alone[n].compute_s
                  for n in names if n in least and alone[n].compute_s > 0]  # fmt: skip
        return min(shares, default=0.0)

    @cached_property
    def _free(self) -> tuple[set[str], ...]:
        """Per variant the values that exist before the first micro-batch, if there are several."""
        graph, flow = self.work.graph, self.work.flow
        return tuple(
            early_values(kind.block, set(early_inputs(graph, flow, kind)))
            for kind in self.work.kinds
        )

    def _least_times(self, found: Pieces, number: int) -> NodeTimes:
        """The times of a block when views are free, since another layout may allow them."""
        nodes = (*found.lowered[number].forward, *found.lowered[number].backward)
        names = {node.outputs[0] for node in nodes if op_def(node.op).kind == "view"}
        times = found.times[number]
        return replace(times, of=times.of | dict.fromkeys(names | self._free[number], Seconds()))
