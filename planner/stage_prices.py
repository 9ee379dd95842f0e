"""What the stages of a candidate take, exactly: seconds, bytes, and the predicted step.

Input: `Pieces`, a candidate, a cost model; then a program with its stages. Output: the `Prediction`
and, for the simulator, the `Pipeline`. Costs of blocks are those that the stage problem has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import Self

from ir.predicted import Prediction, StageCost
from ir.schedules import schedule_order, splits_backward
from ir.spmd import Spmd, StageCall
from planner.cost import CostModel
from planner.exchange import Exchange, Load, exchange, exposed_send_s, exposed_tensor_s
from planner.halves import Menu, all_halves, with_working_memory
from planner.memories import Memories
from planner.pieces import Pieces
from planner.pins import Candidate
from planner.pipeline import Pipeline, Ports, StageSeconds, Tail, Transfer
from planner.price import Seconds, StateCost
from planner.rank_costs import Kind, kind_of, rank_costs
from planner.ranks import by_rank
from planner.recompute import MenuPoint
from planner.repriced import repriced
from planner.schedule import Shape, StageTime, bubble_s, mean_speed, shared_step_s
from planner.sends import crossing_s
from planner.stage_bytes import point_of
from planner.workload import Workload
from planner.zero import ZeroMoves, held_costs, tied_s


class StagePrices:
    """Prices of one candidate; see the module's docstring."""

    def __init__(
        self, work: Workload, candidate: Candidate, found: Pieces, cost: CostModel
    ) -> None:
        self.work, self.candidate, self.found, self.cost = work, candidate, found, cost
        self.variant_of = work.variant_of
        keeps = tuple({p.label: p.kept for p in menu} for menu in found.menus)
        hosts = tuple({p.label: p.hosted for p in menu} for menu in found.menus)
        last = candidate.stages - 1
        order = [(i, self.variant_of[i]) for i in range(len(work.graph.calls))]
        self.program = Spmd(
            work.graph, candidate.degrees, work.flow, work.kinds, found.lowered,
            found.state, keeps, ((),) * last + (tuple(StageCall(i, v, "") for i, v in order),),
            candidate.zero, candidate.offload, hosts, candidate.mesh.pipeline,
        )  # fmt: skip
        self.runs = [
            (variant, [i for i, _ in group]) for variant, group in groupby(order, lambda p: p[1])
        ]
        self.always = [self.program.always(number) for number in range(len(work.kinds))]
        self.costs = rank_costs(cost)
        if self.are_unlike:  # what they share was priced as on the fastest
            found = self.found = repriced(found, self.always, cost, cost.cluster)
        self.whole = found
        self.state = held_costs(self.program, cost, work.optimizer)
        self.moves = ZeroMoves(self.program, self.state)
        self.stage_states: dict[tuple[int, tuple[StageCall, ...]], StateCost] = {}
        self.halves: Menu = {}
        if splits_backward(candidate.schedule):
            self.halves = all_halves(found, self.always)
            self.found = with_working_memory(found, self.halves)
        self.memories = Memories(candidate, self.found, cost, self.moves)

    @cached_property
    def of_ranks(self) -> tuple[Self, ...]:
        """Per pipeline rank the prices of its devices: these, where all nodes hold the same."""
        kinds: dict[Kind, Self] = {}
        for cost in self.costs:
            if cost is not self.cost and kind_of(cost) not in kinds:
                here = repriced(self.whole, self.always, cost, self.cost.cluster)
                kinds[kind_of(cost)] = type(self)(self.work, self.candidate, here, cost)
        return tuple(self if cost is self.cost else kinds[kind_of(cost)] for cost in self.costs)

    def at(self, stage: int) -> Self:
        """The prices of the device that a stage lies on."""
        return self.of_ranks[stage % self.candidate.mesh.pipeline]

    @property
    def are_unlike(self) -> bool:
        """Whether ranks lie on different devices."""
        return any(cost is not self.cost for cost in self.costs)

    def _names(self, calls: Sequence[int]) -> list[str]:
        """The state tensors that calls read, each once."""
        graph = self.work.graph
        found = dict.fromkeys(v for i in calls for v in graph.calls[i].arguments)
        return [name for name in found if name in self.state]

    def _forward(self, variant: int, point: MenuPoint) -> Seconds:
        """One micro-batch through one block, with its share of the prologue; the slower of the
        device and the host that launches its kernels."""
        prologue = self.found.times[variant].prologue.times(1 / self.candidate.micro_batches)
        return (self._pipelined(point.forward) + prologue).launched(self.cost)

    def _backward(self, variant: int, point: MenuPoint) -> tuple[Seconds, Seconds]:
        """One micro-batch's backward and, where it is split, what of it is the weights' half."""
        if not self.halves:
            return self._pipelined(point.backward).launched(self.cost), Seconds()
        halves = self.halves[variant, point.label]
        first, second = (self._pipelined(half) for half in (halves.input, halves.weight))
        return first.launched(self.cost), second.launched(self.cost)

    def _pending_bytes(self, variant: int, point: MenuPoint) -> float:
        """Between the halves of a split backward."""
        return self.halves[variant, point.label].pending_bytes if self.halves else 0.0

    def _pipelined(self, seconds: Seconds) -> Seconds:
        exposed_s = exposed_tensor_s(seconds.communication_s, seconds.compute_s, self.cost)
        return replace(seconds, communication_s=exposed_s)

    def _accumulate_s(self, state: StateCost) -> float:
        """Per micro-batch: its gradients are added up."""
        count = self.candidate.micro_batches
        return self.cost.accumulate_s(state.summed_bytes, state.summed_tensors, count)

    @property
    def _virtual(self) -> int:
        """Pieces of the model per pipeline rank: our stages, or those of a stack whose stages are
        not known one by one."""
        return self.memories.hidden_stages * self.candidate.virtual_stages

    def _between_s(self, size_bytes: float, source: int, target: int) -> float:
        """From stage to stage. Between two stages of a rank nothing moves; from the last rank to
        the first it takes as long as between the slowest neighbours."""
        ranks = self.candidate.mesh.pipeline
        if source % ranks == target % ranks:
            return 0.0
        rank = source % ranks
        return self.cost.send_s(size_bytes, rank if rank < ranks - 1 else None)

    def _crossing_s(self, program: Spmd, value: str, source: int, target: int) -> float:
        """Of a value from stage to stage, as the stack sends it."""
        if source % self.candidate.mesh.pipeline == target % self.candidate.mesh.pipeline:
            return 0.0
        return crossing_s(
            program, value, self.cost, lambda size: self._between_s(size, source, target)
        )

    def step_s(self, program: Spmd) -> float:
        """Of a program with its stages."""
        return self._timed(program, 0.0)[0].step_s

    def prediction(self, program: Spmd, bound_s: float) -> Prediction:
        """Of a program with its stages; `bound_s`: what no other stages beat,
        where ranks that wait leave no cores to the others."""
        timed, times = self._timed(program, bound_s)
        ranks = (self._rank_cost(program, rank, pair) for rank, pair in enumerate(times))
        made = replace(timed, stages=tuple(ranks))
        fullest = self.at(made.fullest)  # whose capacity is the plan's
        return replace(made, capacity_bytes=int(fullest.cost.capacity_bytes))

    def _timed(self, program: Spmd, bound_s: float) -> tuple[Prediction, list[StageTime]]:
        """The prediction without what ranks hold, and their seconds."""
        of_stages, moves = self._stage_seconds(program)
        pairs = by_rank(of_stages, self.candidate.mesh.pipeline)
        ranks, times = _totals(pairs), _totals(of_stages)
        shape, sharing = self._shape(program), self.cost.core_sharing
        sync_s, update_s = max(self._tails(program, moves, [b for _, b in ranks]), key=sum)
        total = self._worked(pairs).times(self.candidate.micro_batches)
        step_s = shared_step_s(times, *shape) + sync_s + update_s
        prediction = Prediction(
            step_s, total.compute_s, total.communication_s + sync_s, bubble_s(times, *shape),
            update_s, min(bound_s / sharing, step_s), int(self.cost.capacity_bytes), (),
        )  # fmt: skip
        return prediction, ranks

    def _shape(self, program: Spmd) -> Shape:
        """Of the pipeline, beside the seconds of its ranks: all that the step depends on."""
        candidate = self.candidate
        return (
            candidate.micro_batches, candidate.schedule, self._virtual, self._weights_s(program),
            self.cost.core_sharing,
        )  # fmt: skip

    def _worked(self, pairs: Sequence[tuple[Seconds, Seconds]]) -> Seconds:
        """A micro-batch's seconds that are no bubble: of the busiest rank. Of all ranks in the
        mean where they share cores, which compute for one while another waits."""
        ranks = [forward + backward for forward, backward in pairs]
        if self.cost.core_sharing == 1.0:
            return max(ranks, key=lambda rank: rank.total_s)
        return sum(ranks, Seconds()).times(1 / len(ranks))

    def _stage_seconds(
        self, program: Spmd
    ) -> tuple[list[tuple[Seconds, Seconds]], list[Exchange]]:
        """Forward and backward of a micro-batch per stage, with what the data axis adds to it."""
        pairs = self._sending_seconds(program)
        moves = [self._exchange(program, s, f, b) for s, (f, b) in enumerate(pairs)]
        pairs = [
            (f + Seconds(0.0, move.forward_s), b + Seconds(0.0, move.backward_s))
            for (f, b), move in zip(pairs, moves, strict=True)
        ]
        return pairs, moves

    def _sending_seconds(self, program: Spmd) -> list[tuple[Seconds, Seconds]]:
        """Forward and backward of a micro-batch, with the actual sends: on both their sides, or
        on the sender's where they meet what comes back."""
        own, hidden = self._own_seconds(program), self.memories.hidden_stages
        forward = [stage_forward for stage_forward, _, _ in own]
        backward = [stage_input + weights for _, stage_input, weights in own]
        for message in program.messages:
            send_s = self._crossing_s(program, message.value, message.source, message.target)
            ends = (message.source, message.target)
            for s in ends[:1] if self.cost.sends_meet else ends:
                exposed_s = exposed_send_s(send_s, forward[s].compute_s, hidden)
                forward[s] += Seconds(0.0, exposed_s)
            for s in ends[1:] if self.cost.sends_meet else ends:
                if message.gradient:
                    exposed_s = exposed_send_s(send_s, backward[s].compute_s, hidden)
                    backward[s] += Seconds(0.0, exposed_s)
        return list(zip(forward, backward, strict=True))

    def _own_seconds(self, program: Spmd) -> list[tuple[Seconds, Seconds, Seconds]]:
        """Forward, backward and what is apart of it, of a micro-batch on each stage, without sends;
        gradients are added up in the last part that there is."""
        found = []
        for s, calls in enumerate(program.stages):
            parts, here = [Seconds(), Seconds(), Seconds()], self.at(s)
            for placed in calls:
                point = point_of(here.found, placed)
                backward, moves = here._backward(placed.variant, point), here.moves.of(placed)
                more = (
                    here._forward(placed.variant, point) + Seconds(0.0, moves.forward_s),
                    backward[0] + Seconds(0.0, moves.backward_s), backward[1],
                )  # fmt: skip
                parts = [a + b for a, b in zip(parts, more, strict=True)]
            last = 2 if self.halves else 1
            parts[last] += Seconds(here._accumulate_s(here._state_of_stage(program, s)))
            found.append((parts[0], parts[1], parts[2]))
        return found

    def _weights_s(self, program: Spmd) -> list[float]:
        """Per rank the weights' half of a micro-batch's backward; none where it is not split."""
        if not self.halves:
            return []
        return [weights.total_s for _, _, weights in self._own_seconds(program)]

    def _exchange(
        self, program: Spmd, stage: int, forward: Seconds, backward: Seconds
    ) -> Exchange:
        """What the data axis adds on a stage."""
        state = self.at(stage)._state_of_stage(program, stage)
        load = Load(
            state.exchanged_bytes, state.gathered_bytes, len(program.stages[stage]),
            forward.total_s, backward.total_s, len(self._stage_state(program, stage)),
        )  # fmt: skip
        return exchange(load, self.at(stage).cost)

    def _stage_state(self, program: Spmd, stage: int) -> list[str]:
        names = self._names([p.index for p in program.stages[stage]])
        unused = [name for name in self.state if not self.work.uses.get(name)] if stage == 0 else []
        return [*names, *unused]

    def _state_of_stage(self, program: Spmd, stage: int) -> StateCost:
        key = (stage, program.stages[stage])
        if key not in self.stage_states:
            items = [self.state[name] for name in self._stage_state(program, stage)]
            self.stage_states[key] = StateCost.total(items)
        return self.stage_states[key]

    def _tails(
        self, program: Spmd, moves: Sequence[Exchange], backward_s: Sequence[float]
    ) -> list[tuple[float, float]]:
        """Exposed seconds once per step, of each rank: gradients exchanged and the loss announced,
        parameters updated.

        Where exchanges overlap, a later rank starts its own while the last backward still runs on
        the earlier ones.
        """
        tails = []
        announce_s = self.cost.announce_s(1 + len(self.work.graph.metrics))
        for rank in range(self.candidate.mesh.pipeline):
            state, lead_s = self.at(rank)._state_of_rank(program, rank), 0.0
            if self.cost.traits.overlap_gradients:
                lead_s = sum(backward_s[:rank]) / self._virtual
            moved_s = sum(moves[s].step_s for s in self.candidate.stages_of(rank))
            names = self._rank_state(program, rank)
            sync_s = state.sync_s + moved_s + tied_s(program, names, self.state, self.cost)
            tails.append((max(0.0, sync_s - lead_s) + announce_s, state.update_s))
        return tails

    def pipeline(self, program: Spmd, ports: Mapping[tuple[int, int], Ports]) -> Pipeline:
        """The step for the simulator: the same seconds, with sends apart."""
        candidate = self.candidate
        own = self._own_seconds(program)
        moves = [self._exchange(program, s, f, b + w) for s, (f, b, w) in enumerate(own)]
        times = by_rank([(f, b + w) for f, b, w in own], candidate.mesh.pipeline)
        tails = self._tails(program, moves, [b.total_s for _, b in times])
        transfers = []
        for message in sorted(program.messages, key=lambda message: message.source):
            ends = message.source, message.target
            send_s = self._crossing_s(program, message.value, *ends)
            back_s = send_s if message.gradient else None
            transfers.append(Transfer(message.value, *ends, send_s, back_s))
        order = schedule_order(
            candidate.schedule, ranks=candidate.mesh.pipeline,
            micro_batches=candidate.micro_batches, virtual_stages=candidate.virtual_stages,
        )  # fmt: skip
        return Pipeline(
            order, tuple(StageSeconds(*(part.total_s for part in parts)) for parts in own),
            tuple(transfers), tuple(Tail(*tail) for tail in tails),
            ports, not self.cost.sends_meet, self._mean_speed(program),
        )  # fmt: skip

    def _mean_speed(self, program: Spmd) -> float:
        """Of ranks that share cores, in a step, over that of all computing at once."""
        pairs, _ = self._stage_seconds(program)
        return mean_speed(_totals(pairs), *self._shape(program))

    def _rank_state(self, program: Spmd, rank: int) -> list[str]:
        """What several stages of a rank hold is there once."""
        stages = self.candidate.stages_of(rank)
        return list(dict.fromkeys(n for s in stages for n in self._stage_state(program, s)))

    def _state_of_rank(self, program: Spmd, rank: int) -> StateCost:
        return StateCost.total([self.state[name] for name in self._rank_state(program, rank)])

    def _rank_cost(self, program: Spmd, rank: int, times: StageTime) -> StageCost:
        """All stages of a rank together: state, what is held at the fullest moment, what its
        instructions need beside that, and all of the host's memory."""
        here = self.at(rank)
        names, state = here._rank_state(program, rank), here._state_of_rank(program, rank)
        held_bytes, working_bytes = here.memories.of_rank(program, rank, names)
        return StageCost(
            *times, state.parameter_bytes, state.gradient_bytes, state.optimizer_bytes,
            held_bytes, working_bytes, state.host_bytes + here.memories.host_bytes(program, rank),
            here.cost.capacity_bytes if self.are_unlike else 0,
        )  # fmt: skip


def _totals(pairs: Sequence[tuple[Seconds, Seconds]]) -> list[StageTime]:
    return [(forward.total_s, backward.total_s) for forward, backward in pairs]
