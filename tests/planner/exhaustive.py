"""The best plan of a small model by trying everything, to compare the search's answer with.

Input: a workload, a cluster, the step to beat. Output: the least step of all plans below it.

Tried are: every mesh over all devices, every number of micro-batches, every schedule and number of
stages per rank that has an order, every ZeRO stage; for each of them the shardings that are given;
every set of kept values; every cut into stages; and for the equal blocks of a stage every number of
them at each kept set. A plan counts if the exact peak of each rank is within the capacity. Prices
are the planner's own (`planner.stage_prices`); the order, the cuts and the menus are not.

Left out is only what can't be the best:

    (1) shardings that take, shared evenly by the ranks, no less than the step to beat, by
        their nodes, what they communicate and the updates
    (2) kept sets that another one equals or beats in every respect
    (3) stages that take, by the blocks on them, no less than the step to beat
    (4) stages with a rank that has been found too large: its bytes are its own
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations, combinations_with_replacement, groupby, pairwise, product
from math import inf
from typing import TypeAlias

from every_sharding import LimitOf

from ir.cluster import Cluster, Mesh
from ir.errors import UsageError
from ir.layout import DATA, Placement, Shard
from ir.lower import Degrees
from ir.recompute import kept_values, state_inputs
from ir.schedules import SCHEDULES, check_schedule, splits_backward
from ir.spmd import StageCall
from planner.calibrated import cost_model
from planner.cost import CostModel
from planner.pieces import Pieces, priced
from planner.pins import Candidate
from planner.price import OPTIMIZER_TENSORS
from planner.recompute import MenuPoint, named_point
from planner.sharding import ShardingResult
from planner.stage_prices import StagePrices
from planner.workload import Workload

ROUNDING = 1e-9

ShardingsOf: TypeAlias = (
    "Callable[[Workload, Degrees, CostModel, LimitOf], Iterator[tuple[float, ShardingResult]]]"
)
"""The shardings to try, with seconds of a micro-batch that none of their plans is below."""


@dataclass
class Exhaustive:
    """All plans of a workload on a cluster; `best_s` is the step to beat, then the least."""

    work: Workload
    cluster: Cluster
    shardings_of: ShardingsOf
    best_s: float = inf
    best: str = ""
    shardings: int = 0
    plans: int = 0
    too_large: set[tuple[object, ...]] = field(default_factory=set)
    once_s: dict[tuple[Candidate, tuple[Placement, ...]], float] = field(default_factory=dict)

    def run(self) -> float:
        """The least step of all plans, or the step to beat if none is below it."""
        every = sorted(every_candidate(self.work, self.cluster), key=_local)
        for _, group in groupby(every, key=_local):
            self._shardings(list(group))
        return self.best_s

    def _shardings(self, group: list[Candidate]) -> None:
        """All plans of candidates on one mesh with as many micro-batches; (1)."""
        degrees, cost = group[0].degrees, cost_model(self.cluster, group[0].mesh)

        def limit_of(state: dict[str, Placement]) -> float:
            return max(self._most_s(candidate, state) for candidate in group)

        for seconds, result in self.shardings_of(self.work, degrees, cost, limit_of):
            self.shardings += 1
            found = self._pieces(group[0], result)
            for candidate in group:
                if seconds < self._most_s(candidate, result.state):
                    self._stages(candidate, found)

    @property
    def _below_s(self) -> float:
        return self.best_s * (1 - ROUNDING)

    def _most_s(self, candidate: Candidate, state: Mapping[str, Placement]) -> float:
        """Of a micro-batch on all ranks, when these share it and the state's seconds evenly."""
        places = tuple(state[item.name] for item in self.work.graph.state if item.trainable)
        if (candidate, places) not in self.once_s:
            cost = cost_model(self.cluster, candidate.mesh)
            once_s = least_once_s(self.work, candidate, state, cost)
            fits = least_state_bytes(self.work, candidate, state) <= cost.capacity_bytes
            self.once_s[candidate, places] = once_s if fits else inf
        once_s = self.once_s[candidate, places] / candidate.mesh.pipeline
        return (self._below_s - once_s) / _even_step(candidate)

    def _pieces(self, candidate: Candidate, result: ShardingResult) -> Pieces:
        work, cost = self.work, cost_model(self.cluster, candidate.mesh)
        found = priced(work.graph, work.flow, work.kinds, result, candidate.degrees, cost)
        menus = tuple(every_menu(work, found, number) for number in range(len(work.kinds)))
        return replace(found, menus=menus)

    def _stages(self, candidate: Candidate, found: Pieces) -> None:
        """Every cut, with every way to run the blocks of each stage."""
        prices = StagePrices(self.work, candidate, found, cost_model(self.cluster, candidate.mesh))
        calls = len(self.work.graph.calls)
        for inner in combinations(range(1, calls), candidate.stages - 1):
            spans = list(pairwise((0, *inner, calls)))
            options = [self._stage_options(prices, a, b) for a, b in spans]
            for stages in product(*options):
                self._plan(prices, stages)

    def _stage_options(
        self, prices: StagePrices, a: int, b: int
    ) -> list[tuple[float, tuple[StageCall, ...]]]:
        """Every way to run calls a to b - 1 as one stage, up to the order of equal ones; (3)."""
        rows = []
        for variant, group in groupby(range(a, b), key=lambda i: prices.variant_of[i]):
            indices, menu = list(group), prices.found.menus[variant]
            rows.append([
                (sum(_point_s(p) for p in points),
                 tuple(StageCall(i, variant, p.label)
                       for i, p in zip(indices, points, strict=True)))
                for points in combinations_with_replacement(menu, len(indices))
            ])  # fmt: skip
        found = [
            (sum(s for s, _ in parts), tuple(c for _, calls in parts for c in calls))
            for parts in product(*rows)
        ]
        count = prices.candidate.micro_batches
        return [(s, calls) for s, calls in found if s * count < self._below_s]

    def _plan(
        self, prices: StagePrices, stages: tuple[tuple[float, tuple[StageCall, ...]], ...]
    ) -> None:
        """Prices one plan, unless (3) or (4)."""
        candidate = prices.candidate
        if _least_step_s(candidate, [seconds for seconds, _ in stages]) >= self._below_s:
            return
        ranks = [
            (candidate, self.shardings, rank,
             tuple(stages[s][1] for s in candidate.stages_of(rank)))
            for rank in range(candidate.mesh.pipeline)
        ]  # fmt: skip
        if not self.too_large.isdisjoint(ranks):
            return
        self.plans += 1
        made = prices.prediction(replace(prices.program, stages=tuple(c for _, c in stages)), 0.0)
        assert made.step_s >= _least_step_s(candidate, [s for s, _ in stages]) * (1 - ROUNDING)
        large = {key for key, stage in zip(ranks, made.stages, strict=True)
                 if stage.peak_bytes > prices.cost.capacity_bytes}
        self.too_large |= large
        if not large and made.step_s < self._below_s:
            self.best_s, self.best = made.step_s, f"{candidate} {[c for _, c in stages]}"


def every_candidate(work: Workload, cluster: Cluster) -> Iterator[Candidate]:
    """All meshes, micro-batch counts, schedules and ZeRO stages that can be executed."""
    n, batch, calls = cluster.n_devices, work.global_batch, len(work.graph.calls)
    degrees = range(1, n + 1)
    for pipeline, data, tensor in product(degrees, degrees, degrees):
        if pipeline * data * tensor != n or pipeline > calls or batch % data:
            continue
        for count in (c for c in range(1, batch + 1) if batch // data % c == 0):
            for schedule, virtual in product(SCHEDULES, range(1, calls + 1)):
                if pipeline * virtual > calls or not _has_order(schedule, pipeline, count, virtual):
                    continue
                for zero in range(4 if data > 1 else 1):
                    if zero < 2 or not splits_backward(schedule):
                        rows = batch // data // count
                        mesh = Mesh(pipeline, data, tensor)
                        yield Candidate(mesh, count, schedule, rows, virtual, zero)


def least_once_s(
    work: Workload, candidate: Candidate, state: Mapping[str, Placement], cost: CostModel
) -> float:
    """Of a step on all ranks: parameters are updated and, on the data axis, summed and gathered."""
    total_s, data, times = 0.0, candidate.mesh.data, candidate.micro_batches
    moves = {
        0: (("all_reduce", 1),), 1: (("reduce_scatter", 1), ("all_gather", 1)),
        2: (("reduce_scatter", times), ("all_gather", 1)),
        3: (("reduce_scatter", times), ("all_gather", 2 * times)),
    }  # fmt: skip
    for item in work.graph.state:
        if item.trainable:
            share = candidate.mesh.tensor if isinstance(state[item.name], Shard) else 1
            size = item.type.bytes(1) // share
            piece = size // data if candidate.zero else size
            total_s += sum(n * cost.collective_s(op, size, DATA) for op, n in moves[candidate.zero])
            total_s += cost.optimizer_s(piece, OPTIMIZER_TENSORS[work.optimizer] * piece)
    return total_s


def least_state_bytes(
    work: Workload, candidate: Candidate, state: Mapping[str, Placement]
) -> float:
    """Of the fullest rank, at least: parameters, gradients and what the optimizer holds."""
    of_optimizer, of_gradient, of_parameter = (
        candidate.mesh.data if candidate.zero >= stage else 1 for stage in (1, 2, 3)
    )
    total = 0.0
    for item in work.graph.state:
        if item.trainable:
            share = candidate.mesh.tensor if isinstance(state[item.name], Shard) else 1
            size = item.type.bytes(1) // share
            held = OPTIMIZER_TENSORS[work.optimizer] * (size // of_optimizer)
            gradient = item.type.bytes(1) // candidate.mesh.tensor // of_gradient
            total += size // of_parameter + gradient + held
    return total / candidate.mesh.pipeline


def every_menu(work: Workload, found: Pieces, number: int) -> tuple[MenuPoint, ...]:
    """A point for every set of kept values; (2)."""
    kind, lowered, storage = work.kinds[number], found.lowered[number], found.storages[number]
    state = {item.name for item in work.graph.state}
    always = state_inputs(lowered, work.graph.calls[kind.calls[0]].arguments, state)
    makers = [name for node in lowered.forward for name in node.outputs]
    values = [name for name in makers if storage.owner.get(name) == name]
    held: dict[frozenset[str], frozenset[str]] = {}
    for size in range(len(values) + 1):
        for kept in map(frozenset, combinations(values, size)):
            held.setdefault(frozenset(kept_values(lowered, kept, always)), kept)
    points = [
        named_point(lowered, storage, found.times[number], always, f"set {n}", kept)
        for n, kept in enumerate(held.values())
    ]
    outside = {*kind.block.inputs, *lowered.outputs}
    return tuple(p for p in points if not any(_beats(q, p, outside) for q in points))


def _beats(one: MenuPoint, other: MenuPoint, outside: set[str]) -> bool:
    """At least as good in every respect and not the same. What other blocks may hold as well is
    compared by name."""
    shared = [{*p.saved, *p.inputs} & outside for p in (one, other)]
    costs = [
        (p.backward.compute_s, p.backward.communication_s, p.held_bytes, p.transient_bytes)
        for p in (one, other)
    ]
    if not shared[0] <= shared[1] or not all(a <= b for a, b in zip(*costs, strict=True)):
        return False
    return costs[0] != costs[1] or shared[0] != shared[1] or one.label < other.label


def _local(candidate: Candidate) -> tuple[int, int, int]:
    """What candidates with the same shardings have in common."""
    return candidate.mesh.pipeline, candidate.mesh.tensor, candidate.rows


def _has_order(schedule: str, ranks: int, micro_batches: int, virtual: int) -> bool:
    try:
        check_schedule(schedule, ranks, micro_batches, virtual)
    except UsageError:
        return False
    return True


def _point_s(point: MenuPoint) -> float:
    return point.forward.total_s + point.backward.total_s


def _even_step(candidate: Candidate) -> float:
    """A step of ranks that share a micro-batch evenly, when that takes 1 on all together; of
    several stages on a rank the first may take next to nothing."""
    if candidate.virtual_stages > 1:
        return candidate.micro_batches / candidate.mesh.pipeline
    return _least_step_s(candidate, [1 / candidate.stages] * candidate.stages)


def _least_step_s(candidate: Candidate, stage_s: list[float]) -> float:
    """By the blocks alone: the slowest rank with every micro-batch, and the fill where nothing
    is taken off it; of several stages on a rank, that of the last one."""
    times = [sum(stage_s[s] for s in candidate.stages_of(rank))
             for rank in range(candidate.mesh.pipeline)]  # fmt: skip
    count, pace_s = candidate.micro_batches, max(times)
    if candidate.virtual_stages > 1:
        return max(count * pace_s, count * times[-1] + sum(stage_s[: len(times) - 1]))
    fill_s = 0.0 if splits_backward(candidate.schedule) else sum(times) - pace_s
    return count * pace_s + fill_s
