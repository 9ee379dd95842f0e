"""Lower bounds of candidates: what no sharding, kept values or cuts beat under the cost model.

Input: a candidate. Output: seconds of a step, at six levels after a floor, each closer and slower
to find.

    (0) of every node that multiplies what its fastest strategy takes
    (1) every node takes what its fastest strategy takes and nothing is communicated; stages share
        all work evenly, but no layer is cut; recomputation makes room for all stages together
    (2) one sharding of all blocks for the micro-batches, the exchange of gradients and the update
        together, as far as others with the same local shapes tell
    (3) the same, by a linear program of its own
    (4) the best cuts into stages, each recomputing what its own memory asks for
    (5) the same, where a sharding decides what blocks that repeat keep whole as well and, of ranks
        with several stages, how they exchange their gradients
    (6) the same of ranks with several stages, whose first ones have the sharding of the others

Ranks on different devices can't share all evenly, nor need their blocks agree: for them (2) and (3)
are cuts as well, of blocks whose nodes, or whose shardings, are the fastest.

What they are made of is in `planner.least_costs` and `planner.least_problem`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import ceil, inf

import numpy as np

from ir.cluster import Cluster
from ir.schedules import splits_backward
from planner.interleaved_cuts import least_blocks
from planner.leads import FirstStage, Leads, first_lines
from planner.least_costs import LeastCosts
from planner.least_forks import LeastForks
from planner.least_halves import LeastHalves
from planner.least_problem import Choose, Exchange, LeastProblem
from planner.phases import PHASES, Phase
from planner.pins import Candidate
from planner.rank_bound import Moments, least_slowest_s
from planner.schedule import fill_rounds
from planner.sharding_bound import BlockBound
from planner.stage_cuts import (
    Array,
    best_cuts,
    least_maximum,
    least_split_s,
    relaxed_seconds,
    sums,
    tail_seconds,
)
from planner.stage_problem import StageProblem
from planner.workload import Workload

FORWARD: tuple[Phase, ...] = ("forward",)
PROMPT: tuple[Phase, ...] = ("forward", "input")
"""What of a split step is not the weights' half."""
CLOSEST: tuple[Choose, ...] = ("joint", "finer")
SENDS = 2
"""A value that crosses and its gradient are both waited for, on one side or on both."""


@dataclass
class Bounds:
    """Bounds by candidate. `of_ranks`: per pipeline rank the least that its own devices take, where
    ranks lie on different ones; `least` is then of all of them."""

    least: LeastCosts
    of_ranks: Sequence[LeastCosts] = ()
    known_first: dict[tuple[int, int, int, int, bool], list[float]] = field(default_factory=dict)
    known_products: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)

    @property
    def work(self) -> Workload:
        return self.least.work

    @property
    def cluster(self) -> Cluster:
        return self.least.cluster

    @property
    def _problem(self) -> LeastProblem:
        return LeastProblem(self.least, self.of_ranks)

    # (0) and (1)

    def floor_s(self, candidate: Candidate) -> float:
        """As `quick_s`, of products alone: fewer than half of the nodes, and most of the time."""
        forward_s, total_s = self._products_s(candidate)
        count, pace_s = candidate.micro_batches, total_s / candidate.mesh.pipeline
        through_s = forward_s if splits_backward(candidate.schedule) else total_s
        before = 0 if candidate.virtual_stages > 1 else count - 1
        return max(count * pace_s, before * pace_s + through_s) / self._sharing(candidate)

    def _products_s(self, candidate: Candidate) -> tuple[float, float]:
        """Of one micro-batch through all blocks, products by their fastest strategies: in forward,
        and in all."""
        key = (candidate.mesh.tensor, candidate.rows)
        if key not in self.known_products:
            forward_s = total_s = 0.0
            prices = self.least.shardings_of(candidate).prices
            for kind, of, early in zip(self.work.kinds, prices, self.work.early, strict=True):
                seconds = of.products_s(early)
                total_s += len(kind.calls) * sum(seconds.values())
                names = (node.outputs[0] for node in kind.block.forward)
                forward_s += len(kind.calls) * sum(seconds.get(name, 0.0) for name in names)
            self.known_products[key] = forward_s, total_s
        return self.known_products[key]

    def quick_s(self, candidate: Candidate) -> float:
        """Seconds that no plan of the candidate beats, in closed form; infinity if none can fit."""
        blocks = self.least.blocks(candidate)
        return self._even_s(candidate, [block.curve.corners[0][0] for block in blocks])

    def may_fit(self, candidate: Candidate) -> bool:
        """Whether what there is at once at least fits."""
        capacity_bytes = self.least.cost_of(candidate.mesh).capacity_bytes
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
        state = self.least.state.total(candidate)
        send_s = self.least.moves.least_send_s(candidate)
        more_s = again_s + (candidate.stages - 1) * SENDS * send_s
        more_s += state.gather_s + state.scatter_s
        pace_s = max((total_s + more_s) / ranks, fewest_s, self._unlike_pace_s(candidate, calls))
        step_s = self._step_s(candidate, pace_s, total_s + more_s)
        if splits_backward(candidate.schedule):
            step_s += (candidate.stages - 1) * send_s / self._sharing(candidate)
        return step_s + (state.sync_s + state.update_s) / ranks

    def _unlike_pace_s(self, candidate: Candidate, calls: Sequence[int]) -> float:
        """Of the slowest rank, where ranks lie on different devices; 0 where they don't. With
        t[r, v] of a block of variant v on rank r, of which there are n[v], and any weights y,
        pace >= (sum over v of n[v] min over r of y[r] t[r, v]) / (sum of y): whoever runs a block,
        its part of the weighted seconds is no less. Weights are what a rank would do alone."""
        if not self.of_ranks:
            return 0.0
        kinds = {id(least): least for least in self.of_ranks}
        seconds = {
            key: [block.curve.corners[0][0] for block in least.blocks(candidate)]
            for key, least in kinds.items()
        }
        alone = {k: sum(n * t for n, t in zip(calls, s, strict=True)) for k, s in seconds.items()}
        least_s = (min(seconds[k][v] / alone[k] for k in kinds) for v in range(len(calls)))
        shared = sum(n * t for n, t in zip(calls, least_s, strict=True))
        return shared / sum(1 / alone[id(least)] for least in self.of_ranks)

    def _step_s(self, candidate: Candidate, pace_s: float, sum_s: float) -> float:
        """Seconds of the pipeline, of a slowest rank and all ranks together, by the rules of
        `planner.schedule`: zero-bubble hides no more than all backwards in the fill, and ranks
        that share cores are faster while others wait."""
        count, virtual = candidate.micro_batches, candidate.virtual_stages
        if splits_backward(candidate.schedule):
            alone_s = max(pace_s, self.least.forward_s(candidate)) + (count - 1) * pace_s
        elif virtual > 1:
            waits_s = sum(self.leads_s(candidate))
            each_s = (count * sum_s + waits_s) / candidate.mesh.pipeline
            alone_s = max(count * pace_s, sum_s, each_s)
        else:
            alone_s = count * pace_s + max(0.0, sum_s - pace_s)
        sharing = self._sharing(candidate)
        shared_s = count * sum_s / candidate.mesh.pipeline if sharing > 1 else 0.0
        return max(alone_s / sharing, shared_s)

    def leads_s(self, candidate: Candidate) -> list[float]:
        """Per rank of several stages, what it waits at least for ranks before it, whatever those
        keep."""
        return Leads(self._first(candidate, closer=False), candidate.micro_batches)(inf)

    def _leads(
        self, candidate: Candidate, choose: Choose, problem: StageProblem,
        moments: Sequence[Moments],
    ) -> Leads:  # fmt: skip
        """The same by shardings and, where all ranks have the same devices, by what their memory
        has room for, at the closest level alone. `problem`: with what ranks take once per step in
        their seconds."""
        first = self._first(candidate, closer=True)
        if not self.of_ranks and (choose in CLOSEST or candidate.mesh.tensor == 1):
            alone = self._problem.of(candidate, choose=choose)
            longest = alone.longest_run
            kinds = LeastForks(self.least).runs(candidate, alone.runs[longest])
            one = self._problem.one_sharding(candidate, longest) if choose == "finer" else None
            for rank, lines in enumerate(first_lines(alone, problem, moments, kinds, one)):
                first[rank] = replace(first[rank], lines=lines)
        return Leads(first, candidate.micro_batches)

    def _first(self, candidate: Candidate, *, closer: bool) -> list[FirstStage]:
        """Of every rank but the last. `closer`: by shardings."""
        shape = candidate.mesh.tensor, candidate.rows, candidate.mesh.pipeline, candidate.stages
        key = (*shape, closer)
        if key not in self.known_first:
            self.known_first[key] = self._first_stages(candidate, closer=closer)
        send_s = self.least.moves.least_send_s(candidate)
        return [
            FirstStage(seconds, send_s * (SENDS if rank else 1))
            for rank, seconds in enumerate(self.known_first[key])
        ]

    def _first_stages(self, candidate: Candidate, *, closer: bool) -> list[float]:
        """The least seconds of the first stage of every rank but the last. They have blocks of the
        first ones of the model, but the last of all is on another stage."""
        calls, stages = len(self.work.graph.calls), candidate.stages
        least = least_blocks(calls, stages, unlike=bool(self.of_ranks))
        ranks = self.of_ranks or (self.least,) * candidate.mesh.pipeline
        is_closer = closer and candidate.mesh.tensor > 1 and not self.of_ranks
        kinds = {id(kind): kind for kind in ranks}
        of_kinds = {
            key: _in_a_row(
                self._each_s(kind.curves(candidate) if is_closer else kind.blocks(candidate)), least
            )
            for key, kind in kinds.items()
        }
        ends = [1, *(calls - least * (stages - rank) + 1 for rank in range(1, len(ranks)))]
        return [
            min(of_kinds[id(kind)][least * rank : end])
            for rank, (kind, end) in enumerate(zip(ranks[:-1], ends, strict=False))
        ]

    def _each_s(self, blocks: Sequence[BlockBound]) -> list[float]:
        """Seconds per call, of blocks by variant."""
        variant_of = self.work.variant_of
        return [blocks[variant_of[n]].curve.corners[0][0] for n in range(len(variant_of))]

    def _sharing(self, candidate: Candidate) -> float:
        return self.least.cost_of(candidate.mesh).core_sharing

    # (2) to (6)

    def close_s(self, candidate: Candidate, level: int) -> float:
        """As `quick_s`, closer: (2) to (6); 0 where a level has nothing to add."""
        if level == 6:
            has_more = candidate.mesh.tensor > 1 and candidate.virtual_stages > 1
            return self._shares_s(candidate, "finer") if has_more and not self.of_ranks else 0.0
        if level > 3:
            has_more = candidate.mesh.tensor > 1 and not self.of_ranks
            choose: Choose = "joint" if level == 5 else "curves"
            return self._cuts_s(candidate, choose) if has_more or level == 4 else 0.0
        if candidate.mesh.tensor == 1 and (level == 2 or self.of_ranks):
            return 0.0  # nothing to choose
        if self.of_ranks:  # that can't share all evenly
            return self._cuts_s(candidate, "nodes" if level == 2 else "fastest")
        joint_s = self._joint_s(candidate, _steady(candidate), exact=level == 3)
        return joint_s if level == 3 else max(joint_s, self._total_s(candidate))

    def _total_s(self, candidate: Candidate) -> float:
        """As `quick_s`, with blocks that agree on what goes between them."""
        blocks = self.least.blocks(candidate)
        least_s = [block.curve.corners[0][0] for block in blocks]
        return self._even_s(candidate, least_s, self.least.total_s(candidate))

    def _joint_s(self, candidate: Candidate, steady: float, *, exact: bool) -> float:
        """One sharding for all that it decides: ranks that share all work evenly, `steady` times a
        micro-batch and the fill of the pipeline, gradients exchanged, parameters updated; unless
        `exact`, from what other candidates showed; not where ranks share cores."""
        if self._sharing(candidate) > 1:
            return 0.0
        least, ranks = self.least, candidate.mesh.pipeline
        cost, state = self.least.cost_of(candidate.mesh), least.state.total(candidate)
        sends_s = (candidate.stages - 1) * SENDS * least.moves.least_send_s(candidate)
        more_s = least.again_s(candidate) + least.beside_s(candidate)
        more_s += self._problem.added_s(candidate, cost, state)
        exchange_s = 0.0 if self.cluster.calibration else least.state.exchange_s(candidate)
        once_s = self._latency_s(candidate, exchange_s) / ranks
        if candidate.virtual_stages > 1:
            once_s += sum(self.leads_s(candidate)) / ranks
        return once_s + max(
            least.weighted_s(candidate, weights, exchange_s, exact=exact)
            + weights["move"] * sends_s + max(0.0, weights["late move"]) * more_s
            for weights in _phase_weights(candidate, steady)
        )

    def _latency_s(self, candidate: Candidate, exchange_s: float) -> float:
        """Of exchanging gradients, beside what their bytes take when they are cut evenly."""
        state = self.least.state.total(candidate)
        total_s = state.sync_s + candidate.micro_batches * (state.gather_s + state.scatter_s)
        return max(0.0, total_s - exchange_s * self.least.state.trained_bytes(candidate))

    def _cuts_s(self, candidate: Candidate, choose: Choose) -> float:
        """By the best cuts into ranks or, for ranks of several stages, the best share of blocks."""
        if candidate.virtual_stages > 1:
            return self._shares_s(candidate, choose)
        problem = self._problem.of(candidate, choose=choose)
        sharing = self._sharing(candidate)
        seconds, tails = relaxed_seconds(problem), tail_seconds(problem)
        if splits_backward(candidate.schedule):
            tails = np.where(np.isfinite(seconds), tails, inf)
            return self._split_s(candidate, problem, seconds, least_maximum(tails))
        cuts = best_cuts(seconds, tails, candidate.micro_batches)
        return inf if cuts is None else float(cuts.cost_s) / sharing

    def _shares_s(self, candidate: Candidate, choose: Choose) -> float:
        """By the best share of the blocks for ranks of several stages. What is done once per step
        is in the seconds of blocks, if it can be told apart: the slowest rank has its own."""
        least, ranks = self.least, range(candidate.mesh.pipeline)
        exchange = Exchange.TOGETHER if choose in CLOSEST else Exchange.APART
        problem = self._problem.of(candidate, exchange, choose)
        moments = [least.moments(candidate, rank) for rank in ranks]
        leads = self._leads(candidate, choose, problem, moments)
        slowest_s = least_slowest_s(problem, moments, leads)
        sum_s = sum(problem.exposed_send_s(rank) for rank in ranks)
        if not self.of_ranks:
            sum_s += least.total_s(candidate)
        once_s = sum(run.count * (run.sync_s + run.optimizer_s) for run in problem.runs)
        shared_s = self._step_s(candidate, 0.0, sum_s)
        return max(slowest_s / self._sharing(candidate), shared_s) + once_s / len(ranks)

    def _split_s(
        self, candidate: Candidate, problem: StageProblem, seconds: Array, tail_s: float
    ) -> float:
        """Where a backward is split: the best cuts with what fills the pipeline, and `tail_s` once
        per step; and, of alike ranks, some of the steady micro-batches at the pace of the best
        cuts, and the others, which the fill can need, in one sharding with it."""
        pace_s, sharing = least_maximum(seconds), self._sharing(candidate)
        if pace_s == inf:
            return inf
        prompt, forward = (self._part_s(candidate, problem, p) for p in (PROMPT, FORWARD))
        if not self.of_ranks:
            found = dict(enumerate(self.least.part_s(candidate, PROMPT)))
            least_s = relaxed_seconds(LeastHalves(self.least).prompt(candidate, problem, found))
            prompt = np.maximum(prompt, np.where(np.isfinite(least_s), least_s, 0.0))
        step_s = least_split_s(seconds, prompt, forward, candidate.micro_batches) / sharing + tail_s
        if self.of_ranks:
            return step_s
        alone_s = self._step_s(candidate, pace_s, 0.0) + sum(problem.send_s) / sharing
        steady, ranks = _steady(candidate), candidate.mesh.pipeline
        most = min(steady, fill_rounds(ranks, candidate.micro_batches))
        return max(step_s, alone_s, *(
            (steady - joint) * ranks * pace_s + self._joint_s(candidate, joint, exact=True)
            for joint in (0.0, most)
        ))  # fmt: skip

    def _part_s(
        self, candidate: Candidate, problem: StageProblem, phases: Sequence[Phase]
    ) -> Array:
        """[stages, blocks + 1, blocks + 1]: of the nodes of these phases on a stage, and of sends,
        of which half are in forward."""
        ranks = self.of_ranks or (self.least,) * problem.stages
        runs = [variant for variant, _, _ in self.least.state.runs(candidate)]
        of_kinds = {}
        for least in {id(least): least for least in ranks}.values():
            part_s = least.part_s(candidate, phases)
            of_kinds[id(least)] = sums(problem, [part_s[variant] for variant in runs])
        share = 1.0 if "input" in phases else 0.5
        return np.stack([
            of_kinds[id(least)] + share * problem.exposed_send_s(rank)
            for rank, least in enumerate(ranks)
        ])  # fmt: skip


def _in_a_row(values: Sequence[float], count: int) -> list[float]:
    """Sums of so many values that follow each other, by the first one."""
    ends = [0.0, *accumulate(values)]
    return [behind - before for before, behind in zip(ends, ends[count:], strict=False)]


def _steady(candidate: Candidate) -> float:
    """How often the slowest rank's seconds count beside the fill, if all share evenly; of several
    stages the fill is not in it."""
    fill = 1 if candidate.virtual_stages == 1 else 0
    return (candidate.micro_batches - fill) / candidate.mesh.pipeline


def _phase_weights(candidate: Candidate, steady: float) -> Iterator[Mapping[Phase, float]]:
    """How often a step takes the seconds of a micro-batch through all blocks, by phase, at least:
    `steady` times, and once through all; of several stages on a rank that is apart.

    Zero-bubble's fill is F + B - rounds min(B, W) of every rank but the slowest, with B and W of
    the halves of backward (`planner.schedule`): no less than F + (1 - rounds) B, no less than
    F + B - rounds W, nor than any mean of both; the slowest rank's F + B + W is no less either.
    """
    mesh = candidate.mesh
    once: dict[Phase, float] = {"early": 1 / mesh.pipeline}
    if not splits_backward(candidate.schedule):
        fill = 1 if candidate.virtual_stages == 1 else 0
        yield {**dict.fromkeys(PHASES, steady + fill), **once}
        return
    rounds = fill_rounds(mesh.pipeline, candidate.micro_batches)
    most = 1.0 if mesh.tensor == 1 or not rounds else min(1.0, steady / rounds)
    for part in (0.0, most):
        late, wait = steady - part * rounds, steady + 1 - (1 - part) * rounds
        yield {
            "forward": steady + 1, "input": wait, "move": wait, "weight": late, "late move": late,
            **once,
        }  # fmt: skip
