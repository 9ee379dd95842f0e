"""One candidate evaluated: its stages, their seconds and bytes, and the predicted step.

Input: `Pieces`, a mesh, micro-batches, a schedule. Output: `Evaluated`, with the program that it
stands for. The stage problem counts the sends of a typical cut or, where the same does not cross
everywhere, of the blocks on a stage; the prediction those of the actual cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import inf
from operator import add
from typing import overload

from ir.errors import Refused
from ir.offload import offload_of, offloads_optimizer
from ir.plan import Placed
from ir.predicted import Prediction
from ir.schedules import Held
from ir.spmd import Spmd, StageCall
from planner.cost import CostModel
from planner.cut_sends import Handed, StageSends, are_alike, stage_sends
from planner.evaluated import Evaluated as Evaluated
from planner.evaluated import TooSlow as TooSlow
from planner.fitting import fitted
from planner.interleave import Interleaving
from planner.offload import HostFull, check_host
from planner.pieces import Pieces, with_finer_menus
from planner.pins import Candidate
from planner.price import StateCost
from planner.recompute import MenuPoint
from planner.stage_bytes import early_bytes
from planner.stage_prices import StagePrices
from planner.stage_problem import (
    Assignment,
    Choice,
    Point,
    Run,
    StagePlan,
    StageProblem,
    price,
    stage_memory,
)
from planner.stage_refusal import least_assignment
from planner.stages import plan_stages
from planner.workload import Workload as Workload

NEARLY, NEARLY_AT_MOMENTS = 1.2, 1.03
"""Over the capacity: what the stage problem takes for too large by no more may fit. Of ranks
of several stages it counts what they hold at a moment, and not stage by stage."""
TRIES = 4
"""How often what blocks keep is chosen for the step in less room."""


@overload
def evaluate(
    work: Workload, candidate: Candidate, found: Pieces, cost: CostModel
) -> Evaluated: ...
@overload
def evaluate(
    work: Workload, candidate: Candidate, found: Pieces, cost: CostModel, limit_s: float
) -> Evaluated | TooSlow: ...
def evaluate(
    work: Workload, candidate: Candidate, found: Pieces, cost: CostModel, limit_s: float = inf
) -> Evaluated | TooSlow:
    """The best stages of a candidate; `Refused` if it does not fit. Where the host has no room for
    what they would offload, the best stages that offload no activations. Beyond `limit_s` seconds
    the exact memory is not looked at."""
    try:
        return _Evaluation(work, candidate, found, cost).run(limit_s)
    except HostFull:
        near = tuple(tuple(p for p in menu if not p.hosted) for menu in found.menus)
        if near == found.menus or not all(near):
            raise
        return _Evaluation(work, candidate, replace(found, menus=near), cost).run(limit_s)


def improve(work: Workload, found: Evaluated, cost: CostModel) -> Evaluated:
    """The same, or a faster one that fits: what blocks keep is chosen for the step where ranks have
    several stages, from finer menus."""
    if found.candidate.virtual_stages == 1:
        return found
    finer = with_finer_menus(found.pieces, work.graph, work.kinds)
    try:
        other = _Evaluation(work, found.candidate, finer, cost).improved(found)
    except HostFull:
        return found
    fits = min(other.left_bytes) >= 0
    return other if fits and other.prediction.step_s < found.prediction.step_s else found


def evaluate_stages(
    work: Workload, candidate: Candidate, found: Pieces, cost: CostModel, assignment: Assignment
) -> Evaluated:  # fmt: skip
    """A candidate with given stages, whether or not they fit."""
    return _Evaluation(work, candidate, found, cost).given(assignment)


def evaluate_least(
    work: Workload, candidate: Candidate, found: Pieces, cost: CostModel
) -> Evaluated:
    """A candidate with every block as small as it gets and the stages that suit that best, whether
    or not it fits."""
    return _Evaluation(work, candidate, found, cost).least()


class _Evaluation(StagePrices):
    """One evaluation; see the module's docstring."""

    def run(self, limit_s: float) -> Evaluated | TooSlow:
        """The best stages; or, since the stage problem's bytes are an estimate, the smallest ones
        where those fit by exact count."""
        try:
            return self._best(limit_s)
        except HostFull:
            raise
        except Refused as error:
            found = self._smallest()
            if found is None:
                raise error
            return found

    def _smallest(self) -> Evaluated | None:
        """The stages of least memory, if they fit."""
        problem = self._problem
        assignment = least_assignment(problem)
        estimates = [stage_memory(problem, s, stage) for s, stage in enumerate(assignment)]
        ranks = self.candidate.mesh.pipeline
        for rank in range(ranks):
            held = sum(e.persistent_bytes + e.saved_bytes for e in estimates[rank::ranks])
            if held > NEARLY * self.at(rank).cost.capacity_bytes:
                return None
        found = self.given(assignment)
        if any(found.prediction.excess_bytes):
            return None
        self._check_host(found.prediction)
        return found

    def _best(self, limit_s: float) -> Evaluated | TooSlow:
        """From more room than there is, since the stage problem counts too much."""
        nearly = NEARLY if self.candidate.virtual_stages == 1 else NEARLY_AT_MOMENTS
        rooms = [nearly * prices.cost.capacity_bytes for prices in self.of_ranks]
        made = fitted(self._made, rooms, limit_s)
        if isinstance(made, Evaluated):
            self._check_host(made.prediction)
        return made

    def _made(
        self, rooms_bytes: Sequence[float], limit_s: float
    ) -> tuple[Evaluated | TooSlow, list[float]]:
        """The best stages in so much room of each rank, whether or not they fit, and what they fill
        as the stage problem counts."""
        plan = self._stages_within(rooms_bytes)
        program, stages = self._placed(plan)
        filled = list(map(min, rooms_bytes, self._filled_bytes(plan)))
        if limit_s < inf and (step_s := self.step_s(program)) > limit_s:
            return TooSlow(step_s), filled
        prediction, used = self.prediction(program, plan.bound_s), _with_used_points(program)
        return Evaluated(self.candidate, self.found, used, stages, prediction), filled

    def _filled_bytes(self, plan: StagePlan) -> list[float]:
        """Of each rank, as the stage problem counts."""
        if self.candidate.virtual_stages > 1:
            return self._interleaving.filled_bytes(plan)
        return [memory.peak_bytes for memory in plan.stage_memory]

    def _stages_within(self, rooms_bytes: Sequence[float]) -> StagePlan:
        """In so much memory of each rank."""
        if self.candidate.virtual_stages > 1:
            return self._interleaving.plan(rooms_bytes)
        return plan_stages(replace(self._problem, capacity_bytes=tuple(rooms_bytes)))

    @cached_property
    def _interleaving(self) -> Interleaving:
        return Interleaving(self._problem, self.candidate.mesh.pipeline)

    def given(self, assignment: Assignment) -> Evaluated:
        """The stages as they are given; runs and points count as in `runs` and the menus."""
        plan = price(self._problem, assignment)
        program, stages = self._placed(plan)
        prediction = self.prediction(program, plan.bound_s)
        used = _with_used_points(program)
        return Evaluated(self.candidate, self.found, used, stages, prediction)

    def improved(self, found: Evaluated) -> Evaluated:
        """Of a fitting one; in what it fills as the stage problem counts, and what it leaves. Where
        that turns out to be too much, there is less room."""
        plan = price(self._problem, self._assignment(found))
        rooms = list(map(add, self._filled_bytes(plan), found.left_bytes))
        for _ in range(TRIES):
            other = self.given(self._interleaving.improved(plan.assignment, rooms))
            if min(other.left_bytes) >= 0:
                break
            rooms = [room + min(x, 0) for room, x in zip(rooms, other.left_bytes, strict=True)]
        self._check_host(other.prediction)
        return other

    def _assignment(self, found: Evaluated) -> Assignment:
        """The stages as the stage problem has them."""
        run_of = {call: r for r, (_, calls) in enumerate(self.runs) for call in calls}
        labels = [[point.label for point in menu] for menu in self.found.menus]
        return tuple(
            tuple(
                Choice(run_of[p.first], labels[self.variant_of[p.first]].index(p.keep), p.count)
                for p in placed
            )
            for placed in found.stages
        )

    def _check_host(self, prediction: Prediction) -> None:
        host_bytes = [stage.host_bytes for stage in prediction.stages]
        if any(host_bytes):
            check_host(self.cost.cluster, self.candidate.mesh, host_bytes)

    def least(self) -> Evaluated:
        """The stages of least memory."""
        return self.given(least_assignment(self._problem))

    # the stage problem

    @cached_property
    def _problem(self) -> StageProblem:
        ranks, owners = self.candidate.mesh.pipeline, self._owners()
        runs = self._all_runs(owners)
        unlike: tuple[tuple[Run, ...], ...] = ()
        if self.are_unlike:
            of_kinds = {id(prices): prices._all_runs(owners) for prices in self.of_ranks}
            unlike = tuple(of_kinds[id(self.at(s))] for s in range(self.candidate.stages))
        tied: dict[tuple[int, int], float] = {}
        for r, (_, calls) in enumerate(self.runs):
            for name in self._names(calls):
                if owners[name] != r:
                    pair = (owners[name], r)
                    tied[pair] = tied.get(pair, 0.0) + self.state[name].held_bytes
        candidate = self.candidate
        crossing = self._typical_crossing() if candidate.stages > 1 else []
        sends = tuple(self._send_s(crossing, stage) for stage in range(candidate.stages - 1))
        return StageProblem(
            runs, candidate.stages, candidate.micro_batches, candidate.schedule,
            tuple(float(self.at(s).cost.capacity_bytes) for s in range(candidate.stages)), sends,
            tuple((i, j, held) for (i, j), held in tied.items()),
            tuple(self._held(stage) for stage in range(candidate.stages)),
            tuple(self.memories.moments(rank) for rank in range(ranks)), unlike,
            moved_s=self._moved_s() if candidate.stages > 1 else (),
        )  # fmt: skip

    def _held(self, stage: int) -> tuple[Held, ...]:
        """What one stage holds at the fullest moments of its rank, or of its own if it has one."""
        place, rank = divmod(stage, self.candidate.mesh.pipeline)
        return tuple(dict.fromkeys(moment[place] for moment in self.memories.moments(rank)))

    def _owners(self) -> dict[str, int]:
        """The first run that uses each state tensor; the first of all has the unused ones."""
        owners: dict[str, int] = {}
        for r, (_, calls) in enumerate(self.runs):
            for name in self._names(calls):
                owners.setdefault(name, r)
        return {name: owners.get(name, 0) for name in self.state}

    def _all_runs(self, owners: dict[str, int]) -> tuple[Run, ...]:
        """On the device of these prices."""
        return tuple(self._run(r, owners) for r in range(len(self.runs)))

    def _run(self, r: int, owners: dict[str, int]) -> Run:
        variant, calls = self.runs[r]
        state = StateCost.total([item for name, item in self.state.items() if owners[name] == r])
        n = len(calls)
        added_s = self._accumulate_s(state) / n
        points = []
        for point in self.found.menus[variant]:
            moves = self.moves.of(StageCall(calls[0], variant, point.label))
            working = point.transient_bytes + early_bytes(self.found, variant) + moves.whole_bytes
            halves_s = [half.total_s for half in self._backward(variant, point)]
            points.append(Point(
                self._forward(variant, point).total_s + moves.forward_s,
                sum(halves_s) + moves.backward_s + added_s,
                point.saved_bytes + self._input_bytes(variant, calls, point),
                state.held_bytes / n, working, point.label, self._pending_bytes(variant, point),
                halves_s[1] + added_s if self.halves else 0.0,
            ))  # fmt: skip
        name = self.work.graph.calls[calls[0]].path or self.work.kinds[variant].block.name
        return Run(name, n, tuple(points), state.sync_s / n, state.update_s / n)

    def _input_bytes(self, variant: int, calls: Sequence[int], point: MenuPoint) -> float:
        """Held inputs; one that many calls share is divided among the calls of a stage."""
        call = self.work.graph.calls[calls[0]]
        storage = self.found.storages[variant]
        values = dict(zip(self.work.kinds[variant].block.inputs, call.arguments, strict=True))
        total = 0.0
        for name in point.inputs:
            readers = self.work.uses[values[name]]
            per_stage = max(1.0, readers / self.candidate.mesh.pipeline)
            total += storage.size_bytes[name] / per_stage
        return total

    def _typical_crossing(self) -> list[str]:
        """What crosses in the middle of the model."""
        graph, makers = self.work.graph, self.program.makers
        middle = len(graph.calls) // 2
        return sorted({
            value for call in graph.calls[middle:] for value in call.arguments
            if value in makers and makers[value][0] < middle
        })  # fmt: skip

    def _send_s(self, crossing: Sequence[str], stage: int) -> float:
        """There and back. What has no gradient goes once to each rank, whose stages share it."""
        program, seconds, is_round = self.program, 0.0, stage + 1 >= self.candidate.mesh.pipeline
        for value in crossing:
            if is_round and value not in program.has_gradient:
                continue
            ways = 2 if value in program.has_gradient and not self.cost.sends_meet else 1
            seconds += ways * self._crossing_s(program, value, stage, stage + 1)
        return seconds

    def _moved_s(self) -> tuple[StageSends, ...]:
        """Per stage, by the blocks on it; none where the same crosses everywhere, and its typical
        seconds do."""
        blocks, last = len(self.work.graph.calls), self.candidate.stages - 1
        if are_alike(blocks, self._handed(0)):
            return ()
        ranks, known = self.candidate.mesh.pipeline, dict[tuple[int, bool], StageSends]()
        for stage in range(last):
            if (stage % ranks, stage < ranks) not in known:
                found = stage_sends(blocks, self._handed(stage))
                known[stage % ranks, stage < ranks] = found
        made = [known[stage % ranks, stage < ranks] for stage in range(last)]
        return (*made, made[-1])

    def _handed(self, stage: int) -> tuple[Handed, ...]:
        """What calls hand on, as it would go from a stage to the next one."""
        found, meet = [], self.cost.sends_meet
        for value, maker, later in self._readers:
            is_passed_on = value not in self.program.has_gradient
            if is_passed_on and stage >= self.candidate.mesh.pipeline:
                continue  # the rank has it
            way_s = self._crossing_s(self.program, value, stage, stage + 1)
            back_s = way_s if value in self.program.has_gradient else 0.0
            sides = (way_s, back_s) if meet else (way_s + back_s,) * 2
            found.append(Handed(maker, later, *sides, is_passed_on))
        return tuple(found)

    @cached_property
    def _readers(self) -> list[tuple[str, int, tuple[int, ...]]]:
        """(value, the call that makes it, later ones that read it), if there are any."""
        readers: dict[str, list[int]] = {}
        for index, call in enumerate(self.work.graph.calls):
            for value in dict.fromkeys(call.arguments):
                readers.setdefault(value, []).append(index)
        later = {
            value: tuple(index for index in readers.get(value, ()) if index > maker)
            for value, (maker, _) in self.program.makers.items()
        }
        return [(v, self.program.makers[v][0], calls) for v, calls in later.items() if calls]

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

def _ordered(choices: Sequence[Choice]) -> list[Choice]:
    return sorted((c for c in choices if c.count), key=lambda c: (c.run, c.point))


def _with_used_points(program: Spmd) -> Spmd:
    """With only the menu points that some call uses, and the word for what is offloaded."""
    used = {(p.variant, p.keep) for calls in program.stages for p in calls}
    keeps, hosts = (
        tuple(
            {label: names for label, names in points.items() if (variant, label) in used}
            for variant, points in enumerate(table)
        )
        for table in (program.keeps, program.hosts)
    )
    offload = offload_of(
        optimizer=offloads_optimizer(program.offload),
        activations=any(names for points in hosts for names in points.values()),
    )
    return replace(program, keeps=keeps, hosts=hosts, offload=offload)
