"""What candidates share that their bounds are made of: the least that blocks and state take.

Input: a workload, a cluster, the pieces of one device and the shardings by tensor degree and rows.
Output: seconds and bytes that no plan beats. At all, no choice of kept values recomputes and copies
less than `planner.frontier` says, and what a device holds is cut evenly over the tensor axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Any, TypeAlias

from ir.cluster import Cluster
from ir.lower import Lowered
from ir.offload import offloads_activations, staying_inputs
from ir.ops import op_def
from ir.recompute import state_inputs
from ir.schedules import Held
from planner.frontier import Frontier, frontier
from planner.least_moves import LeastMoves
from planner.least_state import LeastState
from planner.offload import Hosting
from planner.phases import PHASES, Phase, node_phases
from planner.pieces import Pieces
from planner.pins import Candidate
from planner.price import NodeTimes, Seconds
from planner.rank_costs import CostOf
from planner.recompute_program import KeptProgram
from planner.schedule import moments
from planner.sharding import Shardings
from planner.sharding_bound import (
    ANYWHERE,
    EVENLY,
    WITH_EARLY,
    BlockBound,
    LeastTotals,
    Rules,
    block_bound,
)
from planner.storage import Storage
from planner.whole_values import WholeValues
from planner.workload import Workload, touched_bytes

KEPT_PRICES = 16
"""Lines of the curve of what a block keeps."""
Kept: TypeAlias = "list[tuple[int, list[tuple[float, float]]]]"
KeptParts: TypeAlias = (
    "tuple[Lowered, Storage, NodeTimes, frozenset[str], set[str], Hosting | None]"
)


@dataclass
class LeastCosts:
    """Kept by tensor degree and rows, or by mesh, ZeRO stage and offload.

    `cost_of` gives the cost model of a mesh, `pieces_of` the pieces of one device for so many rows,
    `shardings_of` the shardings of a candidate, `lowered_of` the blocks of a rank with so many
    rows, of so many data ranks and micro-batches, `menus_of` the pieces of a candidate.
    """

    work: Workload
    cluster: Cluster
    cost_of: CostOf
    pieces_of: Callable[[int], Pieces]
    shardings_of: Callable[[Candidate], Shardings]
    lowered_of: Callable[[int, int, int], Sequence[Lowered]]
    menus_of: Callable[[Candidate], Pieces]
    known_blocks: dict[tuple[int, int, int, Rules | None], BlockBound] = field(default_factory=dict)
    known_totals: dict[tuple[int, int], LeastTotals] = field(default_factory=dict)
    known_working: dict[int, list[float]] = field(default_factory=dict)
    known_kept: dict[tuple[int, int, bool], Kept] = field(default_factory=dict)
    known_prices: dict[tuple[int, int, bool], list[tuple[float, float]]] = field(
        default_factory=dict
    )
    known_shares: dict[tuple[str, int, int, int, int], float] = field(default_factory=dict)
    known_frontiers: dict[tuple[int, bool], tuple[Frontier, ...]] = field(default_factory=dict)
    known_joint: dict[tuple[Any, ...], float] = field(default_factory=dict)
    known_whole: dict[tuple[int, int, int, bool], WholeValues] = field(default_factory=dict)
    known_left: dict[tuple[int, int], int] = field(default_factory=dict)
    known_forks: dict[tuple[int, int, bool], list[Frontier]] = field(default_factory=dict)
    known_halves: dict[tuple[int, int, bool, bool], Frontier] = field(default_factory=dict)

    @cached_property
    def state(self) -> LeastState:
        """What state takes."""
        return LeastState(self.work, self.cost_of)

    @cached_property
    def moves(self) -> LeastMoves:
        """What goes from stage to stage, and between data ranks."""
        return LeastMoves(self.work, self.cost_of, self.pieces_of, self.lowered_of)

    def working_bytes(self, candidate: Candidate) -> list[float]:
        """Per variant what its largest node reads, makes and needs while it runs, if that is cut
        evenly; of tensors with rows of the batch, and of all that it reads only the largest."""
        rows, tensor = candidate.rows, candidate.mesh.tensor
        if rows not in self.known_working:
            times = self.pieces_of(rows).times
            self.known_working[rows] = [
                max((
                    fixed + each * rows + times[number].inner.get(name, (0.0, 0.0))[1]
                    for name, (fixed, each) in touched
                ), default=0.0)
                for number, touched in enumerate(self._touched)
            ]  # fmt: skip
        return [most / tensor for most in self.known_working[rows]]

    @cached_property
    def _touched(self) -> list[list[tuple[str, tuple[float, float]]]]:
        """Per variant (first output, (bytes, bytes per row)) of its nodes."""
        rows = self.work.global_batch
        return [
            [(node.outputs[0], touched_bytes(kind, node, rows)) for node in kind.block.nodes]
            for kind in self.work.kinds
        ]

    def inner_bytes(self, candidate: Candidate) -> list[float]:
        """Per variant what kernels keep by themselves, if that is cut evenly."""
        times = self.pieces_of(candidate.rows).times
        return [sum(kept for kept, _ in t.inner.values()) / candidate.mesh.tensor for t in times]

    def need_bytes(self, candidate: Candidate) -> float:
        """State and activations of a device, divided evenly, with everything recomputed."""
        mesh = candidate.mesh
        held = max(1, self.flights(candidate, 0))
        least = self._kept_bytes(candidate, -1) / mesh.tensor
        return self.state.bytes_of(candidate) + held * least / mesh.pipeline

    def most_bytes(self, candidate: Candidate) -> float:
        """The same with everything kept that backward reads."""
        held = max(1, self.flights(candidate, 0))
        most = self._kept_bytes(candidate, 0) / candidate.mesh.tensor
        return self.state.bytes_of(candidate) + held * most / candidate.mesh.pipeline

    def _kept_bytes(self, candidate: Candidate, corner: int) -> float:
        """Of all calls, on one device, at an end of the curves: 0, all kept, or -1, nothing."""
        hosts = offloads_activations(candidate.offload)
        curves = zip(self.work.kinds, self._frontiers(candidate.rows, hosts=hosts), strict=True)
        return sum(len(kind.calls) * curve.corners[corner][1] for kind, curve in curves)

    def kept(self, candidate: Candidate) -> Kept:
        """Per variant its calls, and (seconds recomputed, bytes kept) on one device of the mesh."""
        tensor, hosts = candidate.mesh.tensor, offloads_activations(candidate.offload)
        key = _kept_key(candidate)
        if key not in self.known_kept:
            rows: Kept = []
            for number, curve in enumerate(self._frontiers(candidate.rows, hosts=hosts)):
                again = self.again_part(candidate, number)
                corners = [(seconds * again, size / tensor) for seconds, size in curve.corners]
                rows.append((len(self.work.kinds[number].calls), corners))
            self.known_kept[key] = rows
        return self.known_kept[key]

    def again_part(self, candidate: Candidate, number: int) -> float:
        """Of one device's seconds of running again, and of copies, which are even."""
        evenness = self._evenness(candidate, number)
        hosts = offloads_activations(candidate.offload)
        return (min(1.0, evenness) if hosts else evenness) / candidate.mesh.tensor

    def kept_program(self, candidate: Candidate, number: int) -> tuple[KeptProgram, float]:
        """What a variant keeps on one device, and which part of its seconds a device of the mesh
        takes at least."""
        hosts, found = offloads_activations(candidate.offload), self.pieces_of(candidate.rows)
        program = KeptProgram(*self.kept_parts(found, number, hosts=hosts))
        return program, self.again_part(candidate, number)

    def binding_prices(self, candidate: Candidate) -> list[float]:
        """Of a kept byte, rising: those that make room for what all ranks keep, and for what the
        first one does, which has most micro-batches in flight, and the next higher one each."""
        found, lines = set[float](), sorted(self._at_prices(candidate))
        first = self._room_bytes(candidate, ranks=1) * candidate.mesh.pipeline
        for room in (self._room_bytes(candidate), first):
            best = max(range(len(lines)), key=lambda n: lines[n][1] - lines[n][0] * room)
            found.update(price for price, _ in lines[best : best + 2] if price)
        return sorted(found)

    def again_s(self, candidate: Candidate) -> float:
        """The least recomputation per micro-batch, of all stages, that makes room for what is
        kept: by duality, over the prices of a kept byte; infinity if nothing makes room."""
        kept, room = self.kept(candidate), self._room_bytes(candidate)
        if sum(n * corners[-1][1] for n, corners in kept) > room:
            return inf
        return max(least_s - price * room for price, least_s in self._at_prices(candidate))

    def _at_prices(self, candidate: Candidate) -> Sequence[tuple[float, float]]:
        """(price of a kept byte, least seconds and price of all blocks), at 0 and at every price
        that makes a block keep less."""
        key = _kept_key(candidate)
        if key not in self.known_prices:
            kept = self.kept(candidate)
            prices = {
                (tall[0] - flat[0]) / (flat[1] - tall[1])
                for _, corners in kept for flat, tall in pairwise(corners)
                if tall[0] > flat[0] and flat[1] > tall[1]
            }  # fmt: skip
            self.known_prices[key] = [
                (price, sum(n * min(s + price * size for s, size in c) for n, c in kept))
                for price in (0.0, *prices)
            ]
        return self.known_prices[key]

    def _room_bytes(self, candidate: Candidate, ranks: int = 0) -> float:
        """What the first ranks, or all together, can keep of one micro-batch: sum of room / in
        flight."""
        mesh = candidate.mesh
        room = self.cost_of(mesh).capacity_bytes - self.state.bytes_of(candidate)
        order = (candidate.schedule, mesh.pipeline, candidate.micro_batches,
                 candidate.virtual_stages, ranks)  # fmt: skip
        if order not in self.known_shares:
            flights = (self.flights(candidate, rank) for rank in range(ranks or mesh.pipeline))
            self.known_shares[order] = sum(1 / max(1, held) for held in flights)
        return room * self.known_shares[order]

    def flights(self, candidate: Candidate, rank: int) -> int:
        """Of how many micro-batches a rank keeps what forward saved, at least: of several stages
        the one that keeps fewest may have most blocks."""
        if candidate.virtual_stages == 1 and candidate.schedule != "gpipe":
            return min(candidate.micro_batches, candidate.mesh.pipeline - rank)
        return max(min(held.forward for held in moment) for moment in self.moments(candidate, rank))

    def most_held(self, candidate: Candidate) -> float:
        """Of how many micro-batches any stage keeps what forward saved."""
        ranks = (self.moments(candidate, rank) for rank in range(candidate.mesh.pipeline))
        return float(max(held.forward for found in ranks for moment in found for held in moment))

    def moments(self, candidate: Candidate, rank: int) -> tuple[tuple[Held, ...], ...]:
        """What the stages of a rank hold at its fullest moments."""
        return moments(
            candidate.schedule, rank, candidate.mesh.pipeline, candidate.micro_batches,
            candidate.virtual_stages,
        )  # fmt: skip

    def forward_s(self, candidate: Candidate) -> float:
        """Of one micro-batch through all blocks, every node by its fastest strategy."""
        blocks, kinds = self.blocks(candidate), self.work.kinds
        return sum(
            len(kind.calls) * sum(block.node_s[n.outputs[0]] for n in kind.block.forward)
            for kind, block in zip(kinds, blocks, strict=True)
        )

    def part_s(self, candidate: Candidate, phases: Sequence[Phase]) -> list[float]:
        """Per variant the nodes of some phases of a call, as `forward_s`."""
        return [
            sum(block.node_s[name] for name, phase in of.items() if phase in phases)
            for block, of in zip(self.blocks(candidate), self._phases, strict=True)
        ]

    @cached_property
    def _phases(self) -> list[dict[str, Phase]]:
        """Per variant, by first output of the nodes."""
        found = (node_phases(self.work.graph, kind) for kind in self.work.kinds)
        return [{n.outputs[0]: phase for n, phase in of.items()} for of in found]

    def weighted_s(
        self, candidate: Candidate, weights: Mapping[Phase, float], exchange_s: float, *,
        exact: bool,
    ) -> float:  # fmt: skip
        """The least sum of all phases, of what is done once, shared by the pipeline's ranks, and of
        the exchange of gradients; unless `exact`, roughly."""
        ranks = candidate.mesh.pipeline
        parts = candidate.mesh.data if candidate.zero else 1
        once = 1 / ranks, 1 / ranks / parts, exchange_s / ranks
        summed = max(0.0, weights["late move"]) * self.sums(candidate)
        rates = (*(weights[phase] for phase in PHASES), *once, summed)
        totals = self._totals(candidate)
        return totals.at(rates) if exact else totals.rough(rates)

    def total_s(self, candidate: Candidate) -> float:
        """Of one micro-batch through all blocks, whose boundaries agree."""
        return self._totals(candidate).at((*EVENLY[:-1], float(self.sums(candidate))))

    def sums(self, candidate: Candidate) -> bool:
        """Whether what gradients take to add up is told apart; not on a measured machine, where
        tensors of several blocks can take less together."""
        return candidate.micro_batches > 1 and self.cluster.calibration is None

    def _totals(self, candidate: Candidate) -> LeastTotals:
        key = (candidate.mesh.tensor, candidate.rows)
        if key not in self.known_totals:
            self.known_totals[key] = LeastTotals(self.shardings_of(candidate))
        return self.known_totals[key]

    def beside_s(self, candidate: Candidate) -> float:
        """What a micro-batch takes through all blocks beside their nodes' least seconds."""
        if candidate.mesh.tensor > 1:
            return self.moves.data_s(candidate)
        found = self.menus_of(candidate)
        whole_s = sum(
            len(kind.calls) * min(p.forward.total_s + p.backward.total_s for p in menu)
            for kind, menu in zip(self.work.kinds, found.menus, strict=True)
        )
        known_s = self._totals(candidate).exactly(WITH_EARLY)
        return max(0.0, whole_s - known_s)

    def blocks(self, candidate: Candidate) -> list[BlockBound]:
        """Per variant a call with every node by its fastest strategy."""
        return [self._block(candidate, number, None) for number in range(len(self.work.kinds))]

    def curves(
        self, candidate: Candidate, exchange_s: float = 0.0, once: float = 0.0
    ) -> list[BlockBound]:
        """What no sharding of a call of each variant beats. Of blocks that repeat a byte of
        parameters takes `exchange_s` per micro-batch, and what is done once counts `once`."""
        alone = self.rules(candidate)
        repeated = replace(alone, once=once, exchange_s=exchange_s)
        return [
            self._block(candidate, number, repeated if len(kind.calls) > 1 else alone)
            for number, kind in enumerate(self.work.kinds)
        ]

    def rules(self, candidate: Candidate, exchange_s: float = 0.0, once: float = 0.0) -> Rules:
        """Of blocks that repeat, as of `curves`."""
        state_part, gradient_part = self.state.whole_parts(candidate)
        return Rules(self.sums(candidate), once, exchange_s, state_part, gradient_part)

    def fastest(self, candidate: Candidate) -> list[BlockBound]:
        """The least seconds of a call of each variant by any sharding, whatever state it holds."""
        rules = replace(ANYWHERE, sums=self.sums(candidate))
        return [self._block(candidate, number, rules) for number in range(len(self.work.kinds))]

    def _block(self, candidate: Candidate, number: int, rules: Rules | None) -> BlockBound:
        key = (candidate.mesh.tensor, candidate.rows, number, rules)
        if key not in self.known_blocks:
            shardings, early = self.shardings_of(candidate), self.work.early[number]
            self.known_blocks[key] = block_bound(shardings, number, early, rules)
        return self.known_blocks[key]

    def _frontiers(self, rows: int, *, hosts: bool) -> tuple[Frontier, ...]:
        """Of every variant, on one device; `hosts`: where the host may hold what is kept."""
        if (rows, hosts) not in self.known_frontiers:
            found = self.pieces_of(rows)
            self.known_frontiers[rows, hosts] = tuple(
                frontier(KeptProgram(*self.kept_parts(found, n, hosts=hosts)), KEPT_PRICES)
                for n in range(len(self.work.kinds))
            )
        return self.known_frontiers[rows, hosts]

    def kept_parts(self, found: Pieces, number: int, *, hosts: bool) -> KeptParts:
        """What a `KeptProgram` is made of. Inputs that several calls share are kept once, so they
        weigh nothing here."""
        graph, kind = self.work.graph, self.work.kinds[number]
        arguments = graph.calls[kind.calls[0]].arguments
        lowered = found.lowered[number]
        always = self.always(found, number)
        values = dict(zip(kind.block.inputs, arguments, strict=True))
        shared = {name for name, value in values.items() if self.work.uses[value] > 1}
        times = self._least_times(found, number)
        hosting = Hosting(self.cluster, staying_inputs(graph, kind)) if hosts else None
        return lowered, found.storages[number], times, always, shared, hosting

    def always(self, found: Pieces, number: int) -> frozenset[str]:
        """The inputs of a variant that are state."""
        graph = self.work.graph
        arguments = graph.calls[self.work.kinds[number].calls[0]].arguments
        return state_inputs(found.lowered[number], arguments, {item.name for item in graph.state})

    def _evenness(self, candidate: Candidate, variant: int) -> float:
        """The least that a node of forward takes on T devices, over a T-th of one device's."""
        tensor = candidate.mesh.tensor
        if tensor == 1:
            return 1.0
        found = self.pieces_of(candidate.rows)
        alone = self._least_times(found, variant).of
        least = self.blocks(candidate)[variant].node_s
        names = [node.outputs[0] for node in found.lowered[variant].forward]
        shares = [least[n] * tensor / alone[n].compute_s
                  for n in names if n in least and alone[n].compute_s > 0]  # fmt: skip
        return min(shares, default=0.0)

    def _least_times(self, found: Pieces, number: int) -> NodeTimes:
        """The times of a block when views are free, since another layout may allow them."""
        nodes = (*found.lowered[number].forward, *found.lowered[number].backward)
        names = {node.outputs[0] for node in nodes if op_def(node.op).kind == "view"}
        times = found.times[number]
        names |= self.work.early[number]
        return replace(times, of=times.of | dict.fromkeys(names, Seconds()))


def _kept_key(candidate: Candidate) -> tuple[int, int, bool]:
    return candidate.mesh.tensor, candidate.rows, offloads_activations(candidate.offload)
