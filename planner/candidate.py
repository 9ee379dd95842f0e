"""One candidate evaluated: its stages, their seconds and bytes, and the predicted step.

Input: `Pieces`, a mesh, micro-batches, a schedule. Output: `Evaluated`, with the program that it
stands for. The stage problem works with one typical cut; the prediction with the actual one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from ir.batch import Flow
from ir.cluster import GIB
from ir.errors import Refused
from ir.graph import Graph
from ir.plan import Placed, Prediction, StageCost
from ir.spmd import Spmd, StageCall
from ir.variants import Variant
from planner.cost import CostModel
from planner.exchange import Exchange, Load, exchange, exposed_send_s, exposed_tensor_s
from planner.pieces import Pieces
from planner.pins import Candidate
from planner.price import Seconds, StateCost, state_cost
from planner.recompute import MenuPoint
from planner.schedule import StageTime, bubble_s, held_batches, shared_step_s
from planner.stage_bytes import early_bytes, gathered_bytes, point_of, stage_cost
from planner.stage_problem import (
    Assignment,
    Choice,
    Point,
    Run,
    StagePlan,
    StageProblem,
    price,
)
from planner.stages import plan_stages

ATTEMPTS = 3
"""How often the stages are planned again with less room when the exact bytes pass the capacity."""


@dataclass(frozen=True)
class Evaluated:
    """A candidate with its stages, the program and the prediction."""

    candidate: Candidate
    pieces: Pieces
    program: Spmd
    stages: tuple[tuple[Placed, ...], ...]
    prediction: Prediction


@dataclass(frozen=True)
class Workload:
    """What all candidates share."""

    graph: Graph
    flow: Flow
    kinds: tuple[Variant, ...]
    global_batch: int
    optimizer: str

    @property
    def variant_of(self) -> dict[int, int]:
        return {call: n for n, kind in enumerate(self.kinds) for call in kind.calls}


def evaluate(work: Workload, candidate: Candidate, found: Pieces, cost: CostModel) -> Evaluated:
    """The best stages of a candidate; `Refused` if it does not fit."""
    return _Evaluation(work, candidate, found, cost).run()


def evaluate_stages(
    work: Workload, candidate: Candidate, found: Pieces, cost: CostModel, assignment: Assignment
) -> Evaluated:  # fmt: skip
    """A candidate with given stages, whether or not they fit."""
    return _Evaluation(work, candidate, found, cost).given(assignment)


class _Evaluation:
    """One evaluation; see the module's docstring."""

    def __init__(
        self, work: Workload, candidate: Candidate, found: Pieces, cost: CostModel
    ) -> None:
        self.work, self.candidate, self.found, self.cost = work, candidate, found, cost
        self.variant_of = work.variant_of
        keeps = tuple({p.label: p.kept for p in menu} for menu in found.menus)
        last = candidate.mesh.pipeline - 1
        order = [(i, self.variant_of[i]) for i in range(len(work.graph.calls))]
        self.program = Spmd(
            work.graph, candidate.degrees, work.flow, work.kinds, found.lowered,
            found.state, keeps, ((),) * last + (tuple(StageCall(i, v, "") for i, v in order),),
        )  # fmt: skip
        self.runs = [
            (variant, [i for i, _ in group]) for variant, group in groupby(order, lambda p: p[1])
        ]
        self.state = {
            item.name: state_cost(self.program, item.name, cost, work.optimizer)
            for item in work.graph.state
        }
        self.uses = _uses(work.graph)

    def run(self) -> Evaluated:
        room = self.cost.capacity_bytes
        for attempt in range(ATTEMPTS):
            problem = self._problem(room)
            plan = plan_stages(problem)
            program, stages = self._placed(plan)
            prediction = self._prediction(program, plan)
            excess = prediction.peak_bytes - self.cost.capacity_bytes
            if excess <= 0:
                used = _used_keeps(program)
                return Evaluated(
                    self.candidate, self.found, replace(program, keeps=used), stages, prediction
                )
            room -= excess
            if room <= 0 or attempt == ATTEMPTS - 1:
                break
        raise Refused(self._excess(prediction))

    def given(self, assignment: Assignment) -> Evaluated:
        """The stages as they are given; runs and points count as in `runs` and the menus."""
        plan = price(self._problem(self.cost.capacity_bytes), assignment)
        program, stages = self._placed(plan)
        prediction = self._prediction(program, plan)
        used = replace(program, keeps=_used_keeps(program))
        return Evaluated(self.candidate, self.found, used, stages, prediction)

    def _excess(self, prediction: Prediction) -> str:
        """The fullest stage and its largest part."""
        stage = max(range(len(prediction.stages)), key=lambda s: prediction.stages[s].peak_bytes)
        cost = prediction.stages[stage]
        parts = {
            "weights": cost.parameter_bytes, "gradients": cost.gradient_bytes,
            "optimizer state": cost.optimizer_bytes, "kept activations": cost.saved_bytes,
            "working memory": cost.transient_bytes,
        }  # fmt: skip
        name = max(parts, key=lambda part: parts[part])
        return (
            f"no plan fits: stage {stage} needs {cost.peak_bytes / GIB:.1f} GiB per device, and "
            f"{self.cost.capacity_bytes / GIB:.1f} GiB are usable. Largest part: {name} "
            f"({parts[name] / GIB:.1f} GiB). Try a smaller micro-batch, or more devices."
        )

    # the stage problem

    def _problem(self, room_bytes: float) -> StageProblem:
        mesh, count = self.candidate.mesh, self.candidate.micro_batches
        owners = self._owners()
        runs = tuple(self._run(r, owners) for r in range(len(self.runs)))
        tied: dict[tuple[int, int], float] = {}
        for r, (_, calls) in enumerate(self.runs):
            for name in self._names(calls):
                if owners[name] != r:
                    pair = (owners[name], r)
                    tied[pair] = tied.get(pair, 0.0) + self.state[name].held_bytes
        sends = tuple(self._typical_send_s(stage) for stage in range(mesh.pipeline - 1))
        return StageProblem(
            runs, mesh.pipeline, count, self.candidate.schedule,
            (float(room_bytes),) * mesh.pipeline, sends,
            tuple((i, j, held) for (i, j), held in tied.items()),
        )  # fmt: skip

    def _names(self, calls: Sequence[int]) -> list[str]:
        """The state tensors that calls read, each once."""
        graph = self.work.graph
        found = dict.fromkeys(v for i in calls for v in graph.calls[i].arguments)
        return [name for name in found if name in self.state]

    def _owners(self) -> dict[str, int]:
        """The first run that uses each state tensor; the first of all has the unused ones."""
        owners: dict[str, int] = {}
        for r, (_, calls) in enumerate(self.runs):
            for name in self._names(calls):
                owners.setdefault(name, r)
        return {name: owners.get(name, 0) for name in self.state}

    def _run(self, r: int, owners: dict[str, int]) -> Run:
        variant, calls = self.runs[r]
        state = StateCost()
        for name in self.state:
            if owners[name] == r:
                state += self.state[name]
        n = len(calls)
        added_s = self._accumulate_s(state) / n
        points = tuple(
            Point(
                self._forward(variant, point).total_s,
                self._backward(point).total_s + added_s,
                point.saved_bytes + self._input_bytes(variant, calls, point),
                state.held_bytes / n, point.transient_bytes + early_bytes(self.found, variant),
                point.label,
            )
            for point in self.found.menus[variant]
        )  # fmt: skip
        name = self.work.graph.calls[calls[0]].path or self.work.kinds[variant].block.name
        return Run(name, n, points, state.sync_s / n, state.update_s / n)

    def _forward(self, variant: int, point: MenuPoint) -> Seconds:
        """One micro-batch through one block, with its share of the prologue; the slower of the
        device and the host that launches its kernels."""
        prologue = self.found.times[variant].prologue.times(1 / self.candidate.micro_batches)
        seconds = self._pipelined(point.forward) + prologue
        return seconds.at_least(self.cost.host_s(seconds.launches))

    def _backward(self, point: MenuPoint) -> Seconds:
        seconds = self._pipelined(point.backward)
        return seconds.at_least(self.cost.host_s(seconds.launches))

    def _pipelined(self, seconds: Seconds) -> Seconds:
        exposed_s = exposed_tensor_s(seconds.communication_s, seconds.compute_s, self.cost)
        return replace(seconds, communication_s=exposed_s)

    def _accumulate_s(self, state: StateCost) -> float:
        """Per micro-batch: its gradients are added up."""
        count = self.candidate.micro_batches
        return self.cost.accumulate_s(state.summed_bytes, state.summed_tensors, count)

    @property
    def _virtual(self) -> int:
        """Pieces of the model per pipeline rank."""
        return self.cost.traits.virtual_stages if self.candidate.mesh.pipeline > 1 else 1

    def _input_bytes(self, variant: int, calls: Sequence[int], point: MenuPoint) -> float:
        """Held inputs; one that many calls share is divided among the calls of a stage."""
        call = self.work.graph.calls[calls[0]]
        storage = self.found.storages[variant]
        values = dict(zip(self.work.kinds[variant].block.inputs, call.arguments, strict=True))
        total = 0.0
        for name in point.inputs:
            readers = self.uses[values[name]]
            per_stage = max(1.0, readers / self.candidate.mesh.pipeline)
            total += storage.size_bytes[name] / per_stage
        return total

    def _typical_send_s(self, stage: int) -> float:
        """There and back, for what crosses in the middle of the model."""
        graph, program = self.work.graph, self.program
        middle = len(graph.calls) // 2
        seconds = 0.0
        crossing = {
            value for call in graph.calls[middle:] for value in call.arguments
            if value in program.makers and program.makers[value][0] < middle
        }  # fmt: skip
        for value in sorted(crossing):
            ways = 2 if value in program.has_gradient and not self.cost.sends_meet else 1
            seconds += ways * self.cost.send_s(program.local_type_of(value).bytes(1), stage)
        return seconds

    # the exact stages

    def _placed(self, plan: StagePlan) -> tuple[Spmd, tuple[tuple[Placed, ...], ...]]:
        """Calls by stage, from counts by run."""
        left = {r: list(calls) for r, (_, calls) in enumerate(self.runs)}
        stages, placed = [], []
        for choices in plan.assignment:
            row, spans = [], []
            for choice in _ordered(choices):
                variant = self.runs[choice.run][0]
                label = self.found.menus[variant][choice.point].label
                calls, left[choice.run] = (
                    left[choice.run][: choice.count], left[choice.run][choice.count :]
                )  # fmt: skip
                row += [StageCall(i, variant, label) for i in calls]
                spans.append(Placed(calls[0], len(calls), label))
            stages.append(tuple(row))
            placed.append(tuple(spans))
        return replace(self.program, stages=tuple(stages)), tuple(placed)

    def _prediction(self, program: Spmd, plan: StagePlan) -> Prediction:
        candidate, virtual = self.candidate, self._virtual
        pairs = self._stage_seconds(program)
        moves = [self._exchange(program, s, f, b) for s, (f, b) in enumerate(pairs)]
        pairs = [
            (f + Seconds(0.0, move.forward_s), b + Seconds(0.0, move.backward_s))
            for (f, b), move in zip(pairs, moves, strict=True)
        ]
        times = [(f.total_s, b.total_s) for f, b in pairs]
        sync_s, update_s = self._tail(program, moves, [b for _, b in times])
        count, schedule = candidate.micro_batches, candidate.schedule
        busy = max(pairs, key=lambda pair: pair[0].total_s + pair[1].total_s)
        total = (busy[0] + busy[1]).times(count)
        moving_s = shared_step_s(times, count, schedule, virtual, self.cost.core_sharing)
        step_s = moving_s + sync_s + update_s
        return Prediction(
            step_s, total.compute_s, total.communication_s + sync_s,
            bubble_s(times, count, schedule, virtual), update_s,
            min(plan.bound_s, step_s), int(self.cost.capacity_bytes),
            tuple(self._stage_cost(program, s, pair) for s, pair in enumerate(times)),
        )  # fmt: skip

    def _stage_seconds(self, program: Spmd) -> list[tuple[Seconds, Seconds]]:
        """Forward and backward of a micro-batch, with the actual sends: on both their sides, or
        on the sender's where they meet what comes back."""
        forward = [Seconds() for _ in program.stages]
        backward = list(forward)
        for s, calls in enumerate(program.stages):
            for placed in calls:
                point = point_of(self.found, placed)
                forward[s] += self._forward(placed.variant, point)
                backward[s] += self._backward(point)
            backward[s] += Seconds(self._accumulate_s(self._state_of_stage(program, s)))
        for message in program.messages:
            send_s = self.cost.send_s(message.type.bytes(1), message.source)
            ends = (message.source, message.target)
            for s in ends[:1] if self.cost.sends_meet else ends:
                exposed_s = exposed_send_s(send_s, forward[s].compute_s, self._virtual)
                forward[s] += Seconds(0.0, exposed_s)
            for s in ends[1:] if self.cost.sends_meet else ends:
                if message.gradient:
                    exposed_s = exposed_send_s(send_s, backward[s].compute_s, self._virtual)
                    backward[s] += Seconds(0.0, exposed_s)
        return list(zip(forward, backward, strict=True))

    def _exchange(
        self, program: Spmd, stage: int, forward: Seconds, backward: Seconds
    ) -> Exchange:
        """What the data axis adds on a stage."""
        state = self._state_of_stage(program, stage)
        load = Load(
            state.exchanged_bytes, state.gathered_bytes, len(program.stages[stage]),
            forward.total_s, backward.total_s,
        )  # fmt: skip
        return exchange(load, self.cost)

    def _stage_state(self, program: Spmd, stage: int) -> list[str]:
        names = self._names([p.index for p in program.stages[stage]])
        unused = [name for name in self.state if not self.uses.get(name)] if stage == 0 else []
        return [*names, *unused]

    def _state_of_stage(self, program: Spmd, stage: int) -> StateCost:
        total = StateCost()
        for name in self._stage_state(program, stage):
            total += self.state[name]
        return total

    def _tail(
        self, program: Spmd, moves: Sequence[Exchange], backward_s: Sequence[float]
    ) -> tuple[float, float]:
        """Exposed seconds once per step: gradients exchanged, parameters updated.

        The slowest stage's; where exchanges overlap, a later stage starts its own while the last
        backward still runs on the earlier ones.
        """
        tails = []
        for s, move in enumerate(moves):
            state, lead_s = self._state_of_stage(program, s), 0.0
            if self.cost.traits.overlap_gradients:
                lead_s = sum(backward_s[:s]) / self._virtual
            sync_s = state.sync_s + move.step_s + self._tied_s(program, s)
            tails.append((max(0.0, sync_s - lead_s), state.update_s))
        return max(tails, key=sum)

    def _tied_s(self, program: Spmd, stage: int) -> float:
        """Gradients of parameters that several stages hold are summed over these."""
        seconds = 0.0
        for name in self._stage_state(program, stage):
            item = self.state[name]
            if item.gradient_bytes and len(program.stages_of_state(name)) > 1:
                seconds += 2 * self.cost.send_s(item.gradient_bytes)
        return seconds

    def _stage_cost(self, program: Spmd, stage: int, times: StageTime) -> StageCost:
        candidate = self.candidate
        flights = held_batches(
            stage, len(program.stages), candidate.micro_batches, candidate.schedule, self._virtual
        )  # fmt: skip
        return stage_cost(
            program, stage, self.found, self._state_of_stage(program, stage),
            gathered_bytes(program, stage, self.state, self.cost), flights, times,
        )  # fmt: skip


def _ordered(choices: Sequence[Choice]) -> list[Choice]:
    return sorted((c for c in choices if c.count), key=lambda c: (c.run, c.point))


def _uses(graph: Graph) -> dict[str, int]:
    """How many calls read each graph-level value."""
    counts: dict[str, int] = {}
    for call in graph.calls:
        for value in dict.fromkeys(call.arguments):
            counts[value] = counts.get(value, 0) + 1
    return counts


def _used_keeps(program: Spmd) -> tuple[dict[str, frozenset[str]], ...]:
    """Only the menu points that some call uses."""
    used = {(p.variant, p.keep) for calls in program.stages for p in calls}
    return tuple(
        {label: kept for label, kept in keeps.items() if (variant, label) in used}
        for variant, keeps in enumerate(program.keeps)
    )
