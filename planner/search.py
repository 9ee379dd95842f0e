"""The search for a plan: meshes, micro-batches and schedules, best first.

Input: a traced graph, a cluster, the global batch, pins. Output: the `Plan` with the smallest
predicted step that fits. A candidate's lower bound divides the work of one device evenly and adds
the pipeline's fill and the exchange of gradients; candidates are evaluated in the order of an
estimate until none can be better, and the plan carries the least bound of all. A candidate is
tried at one ZeRO stage, and at the next one only while memory makes it recompute or not fit.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from itertools import groupby
from math import inf
from time import monotonic
from typing import Any, TypeAlias

from ir.batch import flow, needs_whole_batch
from ir.cluster import Cluster, Mesh
from ir.collector import paused_collector
from ir.errors import Refused, UsageError
from ir.graph import Graph
from ir.offload import OFFLOADS
from ir.plan import Certificate, Plan, encode, signature
from ir.schedules import SCHEDULES
from ir.seats import seated, seats_of
from ir.variants import variants
from planner.approximations import approximations
from planner.byte_price import marginal_price_s, recomputed_share, whole_price_s
from planner.calibrated import cost_model
from planner.candidate import Evaluated, TooSlow, Workload, evaluate
from planner.counting import plans_log10
from planner.describe import describe
from planner.idle_reason import IdleReason
from planner.no_sizes import no_sizes
from planner.offload import HostFull, check_offload
from planner.offload_choice import OffloadChoice
from planner.options import Options
from planner.pieces import Pieces
from planner.pins import Candidate, Pins, check_batch, check_pins, read_pins
from planner.places import PlacedBounds, Supplies
from planner.price import OPTIMIZER_TENSORS
from planner.shortage import does_not_fit
from planner.solver import SolverFailed
from planner.supply import Supply

MOST_EVALUATIONS = 24
"""Candidates that are planned before the search settles for the best one found."""
LEVELS = 4
GAP = 0.005
"""Relative; the search ends when no plan can be better than the best by more."""
SLACK = 0.003
"""Less recomputation than this part of a step is not worth a sharding that holds less."""
PATIENCE = 8
"""The same since the last one that was better by a fifth of the gap."""
MOST_REFUSALS = 40
"""Candidates that turn out not to fit before the same."""
MOST_PRICES = 4
"""Prices of memory under which the blocks of a candidate are sharded."""
MOST_BETWEEN = 3
"""Prices between one under which a candidate does not fit and one under which it does."""
HOPE = 0.03
"""A candidate that is slower than the best by more is not sharded for less memory."""
STEEP = 1e4
"""Over what a byte is worth between keeping everything and nothing: only bytes count."""


@paused_collector()
def plan(
    graph: Graph, cluster: Cluster | str, *, global_batch: int,
    pin: Mapping[str, Any] | None = None, optimizer: str = "adamw", name: str | None = None,
    time_limit_s: float = inf,
) -> Plan:  # fmt: skip
    """Decides how to train `graph` on `cluster`, or on that of a spec; deterministic, but for a
    search that a time limit ends: then the best plan so far, with its gap. Devices are left idle
    where the others are faster without them, or where the pinned degrees say so.

    `pin` fixes decisions: pipeline, data, tensor, micro_batches, schedule ("gpipe", "1f1b",
    "interleaved", "zero-bubble"), virtual_stages (of a rank, where interleaved), recompute
    ("none", "selective", "full"), zero (0 to 3), offload (what may lie on the host: `ir.offload`).
    Raises `UsageError` for a request that makes no sense, `Refused` when no plan fits or the
    numbers would change.
    """
    if optimizer not in OPTIMIZER_TENSORS:
        known = ", ".join(sorted(OPTIMIZER_TENSORS))
        raise UsageError(f"unknown optimizer {optimizer!r}. Known: {known}.")
    cluster = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    pins = read_pins(pin)
    has_batch = any(item.batch_dim is not None for item in graph.inputs)
    check_batch(graph, global_batch)
    check_offload(pins.offload, cluster, optimizer)
    check_pins(pins, cluster.n_devices, global_batch, has_batch=has_batch)
    if pins.pipeline and pins.data and pins.tensor:
        seats_of(cluster, pins.pipeline * pins.data * pins.tensor)
    batch_flow = flow(graph)
    work = Workload(graph, batch_flow, variants(graph, batch_flow), global_batch, optimizer)
    search = _Search(work, cluster, pins, has_batch, time_limit_s)
    best = search.run()
    used, idle = seated(cluster, best.candidate.mesh.size), search.idle
    notes = (
        *idle.notes(best.candidate.mesh, best.prediction.step_s), *search.notes,
        *approximations(work, best, used),
    )  # fmt: skip
    blocks = tuple(
        encode(*parts)
        for parts in zip(
            work.kinds, best.pieces.shardings, best.program.keeps, best.program.hosts, strict=True
        )
    )
    made = Plan(
        name or graph.model, signature(graph), cluster, best.candidate.mesh,
        best.candidate.schedule, best.candidate.micro_batches, global_batch, optimizer, blocks,
        best.stages, best.prediction, notes, zero=best.candidate.zero,
        offload=best.program.offload, certificate=search.certificate,
    )  # fmt: skip
    return replace(made, text=describe(made, best))


@dataclass
class _Best:
    """The best plan so far, by step, then by fewer devices, fewer stages, more data ranks, a
    simpler schedule, less divided."""

    found: Evaluated | None = None

    def offer(self, new: Evaluated) -> None:
        if self.found is None or _order(new) < _order(self.found):
            self.found = new

    @property
    def step_s(self) -> float:
        """Of the best plan."""
        return self.found.prediction.step_s if self.found else inf


def _order(item: Evaluated) -> tuple[Any, ...]:
    candidate = item.candidate
    step = float(f"{item.prediction.step_s:.9g}")
    return (step, *_simplicity(candidate))


def _simplicity(candidate: Candidate) -> tuple[int, ...]:
    """Of equally good candidates the least comes first."""
    mesh = candidate.mesh
    return (
        mesh.size, mesh.pipeline, -mesh.data, candidate.micro_batches, candidate.virtual_stages,
        SCHEDULES.index(candidate.schedule), candidate.zero,
        OFFLOADS.index(candidate.offload),
    )  # fmt: skip


_Open: TypeAlias = tuple[float, tuple[int, ...], int, Candidate]


class _Search:
    """One search, with the pieces that its candidates share."""

    def __init__(
        self, work: Workload, cluster: Cluster, pins: Pins, has_batch: bool,
        time_limit_s: float = inf,
    ) -> None:  # fmt: skip
        self.work, self.cluster, self.pins, self.has_batch = work, cluster, pins, has_batch
        self.time_limit_s, self.deadline = time_limit_s, monotonic() + time_limit_s
        self.certificate: Certificate | None = None
        self.idle = IdleReason(cluster, pins)
        reason = needs_whole_batch(work.graph, work.flow)
        self.options = Options(work, cluster, pins, has_batch, reason)
        self.notes: list[str] = []
        self.supply = Supplies(Supply(work, cluster, pins, is_whole_batch=reason is not None))
        self.bounds = PlacedBounds(self.supply)
        self.offload = OffloadChoice(pins.offload, self.bounds.least)
        self.evaluations = self.refusals = self.patient_since = 0
        self.patient_s = inf
        self.too_large: list[Candidate] = []

    def run(self) -> Evaluated:
        """Of all candidates; then, if those lack memory, of some with offload. The bound is of the
        first ones, if any of them fits."""
        everything, best = list(self._candidates()), _Best()
        bound_s = self._improve(best, everything)
        smaller = self._smaller(best, everything)
        bound_s = min(bound_s, self._improve(best, smaller))
        everything += smaller
        more = self.offload.more(everything, best.found)
        is_plain = best.found is not None
        offloaded_s = self._improve(best, more)
        bound_s = bound_s if is_plain else min(bound_s, offloaded_s)
        options = [*everything, *more]
        plans = plans_log10(self.work, options)
        self.certificate = Certificate(len(options), self.evaluations + self.refusals, plans)
        if best.found is None:
            if monotonic() > self.deadline:
                raise self._no_time(len(options))
            if not everything:
                rows = self.work.global_batch if self.has_batch else 1
                raise no_sizes(self.work.graph, self.pins, self.cluster.n_devices, rows)
            raise self._nothing_fits(everything + more)
        return self._bounded(best.found, bound_s)

    def _smaller(self, best: _Best, tried: list[Candidate]) -> list[Candidate]:
        """On fewer devices, where those could be faster: what one device computes, shared by so
        few, takes less than the best plan, in which communication or waiting takes longer."""
        fewer = self.options.fewer_than(self.cluster.n_devices, self.bounds.least, best.step_s)
        known = {candidate.mesh for candidate in tried}
        meshes = [mesh for mesh in fewer if mesh not in known]
        return [replace(c, offload=self.offload.words[0]) for c in self.options.of(meshes)]

    def _improve(self, best: _Best, options: list[Candidate]) -> float:
        """Best first: of all candidates the one of the least bound is bounded more closely, and
        then planned, until no bound is below the best plan by more than the gap; the least bound
        that is left."""
        closed_s = inf
        open_ = [self._open(c, s, 1) for c, s in self._quick(options)]
        heapq.heapify(open_)
        while open_ and open_[0][0] < (1 - GAP) * best.step_s and monotonic() <= self.deadline:
            bound_s, _, level, candidate = heapq.heappop(open_)
            if level < LEVELS:
                closer_s = max(bound_s, self.bounds.close_s(candidate, level + 1))
                heapq.heappush(open_, self._open(candidate, closer_s, level + 1))
                continue
            if self._is_too_large(candidate):
                closed_s = min(closed_s, self._unproven_s(candidate, bound_s))
                continue
            if self.offload.is_enough(candidate, has_plan=best.found is not None):
                closed_s = min(closed_s, bound_s)
                continue
            if self._goes_on(best) or self.offload.is_extra(candidate) or best.found is None:
                fits = self._try(candidate, best)
                left_s = bound_s if fits else self._unproven_s(candidate, bound_s)
                closed_s = min(closed_s, left_s)
            else:
                closed_s = min(closed_s, bound_s)
                if open_ and closed_s <= open_[0][0]:
                    break
        return min([closed_s, *(item[0] for item in open_[:1])])

    def _goes_on(self, best: _Best) -> bool:
        """Whether one more candidate is worth planning."""
        if best.step_s < (1 - GAP / 5) * self.patient_s:
            self.patient_s, self.patient_since = best.step_s, self.evaluations
        return (
            self.evaluations < min(MOST_EVALUATIONS, self.patient_since + PATIENCE)
            and self.refusals < MOST_REFUSALS
        )

    def _unproven_s(self, candidate: Candidate, bound_s: float) -> float:
        """The bound of a candidate of which no tried sharding fits: with a tensor axis another one
        may."""
        return bound_s if candidate.mesh.tensor > 1 else inf

    def _quick(self, options: list[Candidate]) -> Iterator[tuple[Candidate, float]]:
        """Candidates with their first bounds, without those that can't fit: where rows do not
        fit on a mesh, more rows do not either."""

        def alike(c: Candidate) -> tuple[Any, ...]:
            return (astuple(c.mesh), c.virtual_stages, c.schedule, c.zero, c.offload)

        ordered = sorted(options, key=lambda c: (alike(c), c.rows))
        for _, group in groupby(ordered, key=alike):
            for candidate in group:
                if self.offload.is_idle(candidate):
                    continue
                bound_s = self.bounds.quick_s(candidate)
                if bound_s == inf:
                    break
                yield candidate, bound_s

    def _open(self, candidate: Candidate, bound_s: float, level: int) -> _Open:
        """An entry of the queue; of equal bounds fewer stages and more data ranks come first."""
        self.idle.bounded(candidate, bound_s)
        return bound_s, _simplicity(candidate), level, candidate

    def _no_time(self, candidates: int) -> Refused:
        tried = f"{self.refusals} were planned, and none of those fits"
        begun = tried if self.refusals else "none was planned: bounding them took all of it"
        return Refused(
            f"no plan was found within {self.time_limit_s:.3g} s: of {candidates} candidates "
            f"{begun}. Allow more time, or pin decisions that are settled."
        )

    def _nothing_fits(self, options: list[Candidate]) -> Refused:
        """What the candidate of least memory lacks, and how many devices its state asks for."""
        need = self.bounds.least.need_bytes
        least = min(options, key=lambda c: (need(c), c.mesh.pipeline, c.zero))
        cost = cost_model(self.cluster, least.mesh)
        price_s = STEEP * whole_price_s(self.supply.pieces(least, 0.0))
        alone = Candidate(Mesh(), 1, "1f1b", 1, offload=self.offload.words[-1])
        try:
            evaluate(self.work, least, self.supply.pieces(least, price_s), cost)
        except HostFull as error:
            return error
        except Refused:
            pass
        return does_not_fit(
            self.work, least, self.supply.pieces(least, price_s), cost,
            state_bytes=self.bounds.least.state.bytes_of(alone),
            devices=self.cluster.n_devices,
        )  # fmt: skip

    def _bounded(self, found: Evaluated, bound_s: float) -> Evaluated:
        bound_s = min(bound_s, found.prediction.step_s)
        return replace(found, prediction=replace(found.prediction, bound_s=bound_s))

    def _candidates(self) -> Iterator[Candidate]:
        options, reason = self.options, self.options.reason
        options.check()
        if reason and self.pins.micro_batches is None:
            self.notes.append(f"one micro-batch only: {reason}")
        whole = options.on(self.cluster.n_devices)
        self.idle.has_whole = bool(whole)
        for candidate in options.of([*whole, *options.fewer(whole)]):
            yield replace(candidate, offload=self.offload.words[0])

    def _is_too_large(self, candidate: Candidate) -> bool:
        """Whether the same with fewer rows, or more divided or offloaded, did not fit."""
        return any(
            (other.mesh, other.schedule, other.virtual_stages)
            == (candidate.mesh, candidate.schedule, candidate.virtual_stages)
            and candidate.rows >= other.rows and candidate.zero <= other.zero
            and (candidate.offload == "none" or other.offload in (candidate.offload, "all"))
            for other in self.too_large
        )  # fmt: skip

    def _try(self, candidate: Candidate, best: _Best) -> bool:
        """Evaluates a candidate, first as if a byte cost nothing; if it does not fit so, with as
        few as it can, and between; then at what the last plan says a byte is worth. Whether it may
        fit."""
        price_s, tried, fits, dearer = 0.0, list[Pieces](), False, [1.0, STEEP]
        for _ in range(MOST_PRICES if candidate.mesh.tensor > 1 else 1):
            pieces = self.supply.pieces(candidate, price_s)
            is_known = any(pieces is other for other in tried)
            if is_known and (fits or not dearer):
                break
            tried.append(pieces)
            limit_s = best.step_s * (1 + HOPE)
            found = None if is_known else self._evaluated(candidate, pieces, limit_s)
            if isinstance(found, TooSlow):
                if not fits and price_s:
                    self._between(candidate, best, price_s)
                fits = True
                break
            if found is None:
                if fits or not dearer:
                    break
                price_s = dearer.pop() * whole_price_s(pieces)
                continue
            if not fits and price_s:
                self._between(candidate, best, price_s)
            fits = True
            best.offer(found)
            if recomputed_share(found) < SLACK:
                self.offload.roomy.add(candidate)
                break
            price_s = marginal_price_s(found)
        if not fits:
            self.too_large.append(candidate)
        self.offload.tried[candidate] = fits
        self.evaluations += fits
        if fits and candidate.mesh.size < self.cluster.n_devices:
            self.patient_since += 1  # what leaves devices idle takes nothing from the others
        self.refusals += not fits
        return fits

    def _between(self, candidate: Candidate, best: _Best, high_s: float) -> None:
        """Evaluates a candidate that fits at a price of memory, and not without one, at prices
        between: each is where the nearest tried shardings, one of either kind, cost the same."""
        supply, low_s = self.supply.of(candidate.mesh), 0.0
        for _ in range(MOST_BETWEEN):
            known = [supply.pieces(candidate, price_s) for price_s in (low_s, high_s)]
            price_s = supply.level_price_s(candidate, low_s, high_s)
            pieces = supply.pieces(candidate, price_s)
            if any(pieces is other for other in known):
                break
            found = self._evaluated(candidate, pieces, best.step_s * (1 + HOPE))
            if found is None:
                low_s = price_s
                continue
            high_s = price_s
            if isinstance(found, Evaluated):
                best.offer(found)

    def _evaluated(
        self, candidate: Candidate, pieces: Pieces, limit_s: float = inf
    ) -> Evaluated | None | TooSlow:
        """None if it does not fit; `TooSlow` if it takes longer than the limit."""
        cost = cost_model(self.cluster, candidate.mesh)
        try:
            found = evaluate(self.work, candidate, pieces, cost, limit_s)
            timed = found if isinstance(found, TooSlow) else found.prediction
            self.idle.planned(candidate.mesh, timed.step_s)
            return found
        except SolverFailed:
            raise
        except Refused:
            return None
