"""The search: meshes, micro-batches and schedules, best first.

Input: a workload, a cluster, pins. Output: the `Evaluated` candidate with the smallest predicted
step that fits. Of all candidates those of the least bounds are bounded more closely, then planned,
until no bound is below the best plan by more than `GAP`, or as many were planned as is worth while;
the least bound that is left is the proof. A ZeRO stage is a candidate of its own; candidates that
offload are looked at last, beside what fits.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from time import monotonic
from typing import Any, TypeAlias

from ir.batch import needs_whole_batch
from ir.cluster import Cluster, Mesh
from ir.errors import Refused
from ir.plan import Certificate
from ir.seats import may_rest
from ir.workers import Asked, Request, Workers
from planner.attempts import Attempt, Attempts
from planner.best import Best, simplicity
from planner.candidate import Evaluated, Workload
from planner.counting import plans_log10
from planner.idle_reason import IdleReason
from planner.left_bounds import LeftBounds
from planner.no_sizes import no_sizes, no_time
from planner.offload_choice import OffloadChoice
from planner.options import Options
from planner.order_reason import OrderReason
from planner.pins import Candidate, Pins
from planner.places import Supplies
from planner.supply import Supply

MOST_EVALUATIONS = 24
"""Candidates that are planned before the search settles for the best one found."""
WINDOW, MOST_PLANNED = 32, 2
"""Requests that are made before the answer of the first one counts, and those of them that plan."""
MANY, SHORT_S = 64, 0.5
"""Requests, or seconds of a search, from which on other processes help."""
LEVELS = 5
GAP = 0.005
"""Relative; the search ends when no plan can be better than the best by more."""
PATIENCE = 8
"""The same since the last one that was better by a fifth of the gap."""
MOST_BESIDE = 4
"""The same when it looks round the best one."""
MOST_REFUSALS = 40
"""Candidates that turn out not to fit before the same."""

_Open: TypeAlias = tuple[float, tuple[int, ...], int, Candidate]


class Search:
    """One search, with the pieces that its candidates share."""

    def __init__(
        self, work: Workload, cluster: Cluster, pins: Pins, has_batch: bool,
        time_limit_s: float = inf, processes: int | None = None,
    ) -> None:  # fmt: skip
        self.work, self.cluster, self.pins, self.has_batch = work, cluster, pins, has_batch
        self.begun_s, self.time_limit_s = monotonic(), time_limit_s
        self.deadline = self.begun_s + time_limit_s
        self.certificate: Certificate | None = None
        self.idle, self.node_orders = IdleReason(cluster, pins), OrderReason(cluster)
        self.options = Options(
            work, cluster, pins, has_batch, needs_whole_batch(work.graph, work.flow)
        )
        self.notes: list[str] = []
        self.attempts = Attempts(work, self._supplies())
        blocks = [*work.graph.blocks, *(kind.block for kind in work.kinds)]
        nodes = [node for block in blocks for node in block.nodes]
        shared = (work.graph, *work.kinds, *blocks, *nodes)
        self.workers = Workers(lambda asked: asked[0](self.attempts, *asked[1]), processes, shared)
        self.least = self.attempts.bounds.least
        self.offload = OffloadChoice(pins.offload, self.least)
        self.evaluations = self.refusals = self.patient_since = 0
        self.most, self.patient_s = MOST_EVALUATIONS, inf
        self.too_large: list[Candidate] = []
        self.alike: dict[Candidate, list[Candidate]] = {}
        self.left, self.is_cut_short = LeftBounds(), False

    def _supplies(self) -> Supplies:
        is_whole = self.options.reason is not None
        return Supplies(Supply(self.work, self.cluster, self.pins, is_whole_batch=is_whole))

    def run(self) -> Evaluated:
        """The best plan."""
        with self.workers:
            return self._found()

    def _found(self) -> Evaluated:
        """Of all candidates; then, if those lack memory, of some with offload. The bound is of the
        first ones, if any of them fits."""
        everything, best = list(self._candidates()), Best()
        self._improve(best, everything, always=False)
        if best.found is None and monotonic() > self.deadline:
            raise no_time(self.time_limit_s, len(everything), self.refusals)
        smaller = self._smaller(best, everything)
        self._improve(best, smaller)
        everything += smaller
        self._beside(best, everything)
        more, left = self.offload.more(everything, best.found), self.left
        if best.found is not None:
            self.left = LeftBounds()
        self._improve(best, more)
        self.left = left
        uncut = self._uncut(best)
        options = [*everything, *more, *uncut]
        plans = plans_log10(self.work, options)
        planned = self.evaluations + self.refusals
        self.certificate = Certificate(len(options), planned, plans, self.is_cut_short)
        if best.found is None:
            if monotonic() > self.deadline:
                raise no_time(self.time_limit_s, len(options), self.refusals)
            rows = self.work.global_batch if self.has_batch else 1
            if not everything:
                raise no_sizes(self.work.graph, self.pins, self.cluster.n_devices, rows)
            raise self._nothing_fits(everything + more)
        return self._bounded(best.found)

    def _uncut(self, best: Best) -> list[Candidate]:
        """The best plan without a tensor axis that cuts nothing: as fast, on fewer devices."""
        found = best.found
        if found is None or found.candidate.mesh.tensor == 1 or self.pins.tensor is not None:
            return []
        if not all(sharding.is_whole for sharding in found.pieces.shardings):
            return []
        mesh = replace(found.candidate.mesh, tensor=1)
        if not may_rest(self.cluster, mesh.size):
            return []
        alone = replace(found.candidate, mesh=mesh, order=())
        request = (alone.mesh.tensor, alone.rows), (Attempts.plan, (alone, best.step_s))
        (answer,) = self.workers.finish(self._asked([request], always=True))
        self._attempted(alone, answer, best)
        return [alone]

    def _beside(self, best: Best, everything: list[Candidate]) -> None:
        """Looks round the best plan while that helps: at more numbers of stages, and if its gap is
        wide at all that were not planned, since loose bounds say less of them than it does."""
        known, before_s = set(everything), inf
        while best.found and best.step_s < (1 - GAP / 5) * before_s:
            if monotonic() > self.deadline:
                break
            before_s, is_wide = best.step_s, self.left.least_s() < (1 - GAP) * best.step_s
            near = [
                c for c in self.options.beside(best.found.candidate)
                if c not in known or (is_wide and c not in self.offload.tried)
            ]  # fmt: skip
            self.most, self.patient_since = self.evaluations + MOST_BESIDE, self.evaluations
            self._improve(best, near)
            everything += [c for c in near if c not in known]
            known.update(near)

    def _smaller(self, best: Best, tried: list[Candidate]) -> list[Candidate]:
        """On fewer devices, where those could be faster: what one device computes, shared by so
        few, takes less than the best plan, in which communication or waiting takes longer."""
        fewer = self.options.fewer_than(self.cluster.n_devices, self.least, best.step_s)
        known = {candidate.mesh for candidate in tried}
        meshes = [mesh for mesh in fewer if mesh not in known]
        return [replace(c, offload=self.offload.words[0]) for c in self.options.of(meshes)]

    def _improve(self, best: Best, options: list[Candidate], *, always: bool = True) -> None:
        """Best first: of all candidates those of the least bounds are bounded more closely, and
        then planned, until no bound is below the best plan by more than the gap. `always`: first
        bounds are found also after the deadline."""
        closed_s, asked = inf, deque[tuple[_Open, Asked]]()
        queue = self._first(options, always=always)
        self._begin(queue, best)
        while True:
            is_done = False
            while not is_done and len(asked) < WINDOW and monotonic() <= self.deadline:
                planned = sum(level == LEVELS for (_, _, level, _), _ in asked)
                entry, left_s = self._next(queue, best, planned, closed_s)
                closed_s = min(closed_s, left_s)
                if entry is None:
                    is_done = True
                else:
                    asked.append((entry, self._asked([self._request(entry, best)])))
            if not asked:
                self.is_cut_short |= not is_done and self._is_below(queue, best)
                self.left.leave_all(queue)
                return
            entry, waited = asked.popleft()
            (answer,) = self.workers.finish(waited)
            closed_s = min(closed_s, self._answered(entry, answer, queue, best))

    def _answered(self, entry: _Open, answer: Any, queue: list[_Open], best: Best) -> float:
        """Takes note of a closer bound, or of a plan; then the bound that it leaves."""
        bound_s, _, level, candidate = entry
        if answer is None:
            heapq.heappush(queue, entry)
        elif level == 0:
            for opened in self._opened(self.alike[candidate], answer):
                heapq.heappush(queue, opened)
        elif level < LEVELS:
            heapq.heappush(queue, self._open(candidate, max(bound_s, answer), level + 1))
        else:
            self._attempted(candidate, answer, best)
            return self._left_s(candidate, bound_s, fits=answer.fits)
        return inf

    def _begin(self, queue: list[_Open], best: Best) -> None:
        """Plans the best one that leaves nothing to choose and nobody waiting: its bound is about
        what it takes. What it beats by far need not be bounded more closely."""
        free, others = list[_Open](), list[_Open]()
        for entry in queue:
            (free if self._is_free(entry[-1]) else others).append(entry)
        heapq.heapify(free)
        while free and free[0][2] < LEVELS and monotonic() <= self.deadline:
            bound_s, _, level, candidate = heapq.heappop(free)
            closer_s = max(bound_s, self.attempts.close_s(candidate, level + 1))
            heapq.heappush(free, self._open(candidate, closer_s, level + 1))
        if self._is_below(free, best) and monotonic() <= self.deadline:
            candidate = free[0][-1]
            self._attempted(candidate, self.attempts.plan(candidate, best.step_s), best)
        queue[:] = [*others, *free]
        heapq.heapify(queue)

    def _is_free(self, candidate: Candidate) -> bool:
        """Whether ranks have the same blocks, whole, and room for everything."""
        mesh, capacity_bytes = candidate.mesh, self.least.cost_of(candidate.mesh).capacity_bytes
        alike = mesh.pipeline == mesh.tensor == 1
        return alike and self.least.most_bytes(candidate) <= capacity_bytes

    def _is_below(self, queue: list[_Open], best: Best) -> bool:
        """Whether the least bound is below the best plan by more than the gap."""
        return bool(queue) and queue[0][0] < (1 - GAP) * best.step_s

    def _next(
        self, queue: list[_Open], best: Best, planned: int, left_s: float
    ) -> tuple[_Open | None, float]:
        """The next entry to bound or to plan, if there is one; and the least bound of those that
        are left out, `left_s` so far. `planned`: how many are being planned. Which it is does not
        depend on the processes, and so the plan does not either."""
        while self._is_below(queue, best):
            if left_s <= queue[0][0] and not self._may_plan(queue[0][-1], best):
                break  # a closer bound shows nothing
            entry = heapq.heappop(queue)
            bound_s, _, level, candidate = entry
            if level < LEVELS and not self.offload.is_spare(candidate):
                return entry, left_s
            if any(map(candidate.is_as_large, self.too_large)):
                left_s = min(left_s, self._left_s(candidate, bound_s, fits=False))
            elif candidate in self.offload.tried or self.offload.is_enough(
                candidate, has_plan=best.found is not None
            ):
                left_s = min(left_s, self._left_s(candidate, bound_s))
            elif planned == MOST_PLANNED:
                heapq.heappush(queue, entry)
                break
            elif self._may_plan(candidate, best):
                return entry, left_s
            else:
                left_s = min(left_s, self._left_s(candidate, bound_s))
        return None, left_s

    def _request(self, entry: _Open, best: Best) -> Request:
        """What to do next with a candidate."""
        _, _, level, candidate = entry
        key = _key(candidate)
        if level == 0:
            return key, (Attempts.quick_s, (self.alike[candidate],))
        if level < LEVELS:
            return key, (Attempts.close_s, (candidate, level + 1))
        return key, (Attempts.plan, (candidate, best.step_s))

    def _asked(self, requests: Sequence[Request], *, always: bool = False) -> Asked:
        """In several processes once that is worth while; `always`: also after the deadline."""
        if len(requests) > MANY or monotonic() > self.begun_s + SHORT_S:
            self.workers.start()
        return self.workers.ask(requests, inf if always else self.deadline)

    def _may_plan(self, candidate: Candidate, best: Best) -> bool:
        return best.found is None or self.offload.is_extra(candidate) or self._goes_on(best)

    def _goes_on(self, best: Best) -> bool:
        """Whether one more candidate is worth planning."""
        if best.step_s < (1 - GAP / 5) * self.patient_s:
            self.patient_s, self.patient_since = best.step_s, self.evaluations
        return (
            self.evaluations < min(self.most, self.patient_since + PATIENCE)
            and self.refusals < MOST_REFUSALS
        )

    def _left_s(self, candidate: Candidate, bound_s: float, *, fits: bool = True) -> float:
        """The bound of a candidate that is left, noted; of one of which no tried sharding fits only
        with a tensor axis, since another one may."""
        left_s = bound_s if fits or candidate.mesh.tensor > 1 else inf
        self.left.leave(candidate, left_s)
        return left_s

    def _first(self, options: list[Candidate], *, always: bool) -> list[_Open]:
        """Candidates by their local shapes. Those without a tensor axis, or with `always` all, have
        their first bounds; of the others one stands for all, with what they take at least, until
        that is the next to be looked at. Nothing is known of those that there is no time for."""
        shapes: dict[tuple[int, int], list[Candidate]] = {}
        for candidate in options:
            if not self.offload.is_idle(candidate):
                shapes.setdefault(_shape(candidate), []).append(candidate)
        is_now = [always or tensor == 1 for tensor, _ in shapes]
        requests: list[Request] = [
            ((*shape, 0), (Attempts.quick_s if now else Attempts.floors_s, (found,)))
            for (shape, found), now in zip(shapes.items(), is_now, strict=True)
        ]
        answers = self.workers.finish(self._asked(requests, always=always))
        queue = list[_Open]()
        for found, now, answer in zip(shapes.values(), is_now, answers, strict=True):
            seconds = [0.0] * len(found) if answer is None else answer
            if now:
                queue += self._opened(found, seconds)
                continue
            closed = [self._open(c, floor_s, 0) for c, floor_s in zip(found, seconds, strict=True)]
            queue.append(min(closed))
            self.alike[queue[-1][-1]] = found
        return queue

    def _opened(self, candidates: list[Candidate], seconds: list[float]) -> Iterator[_Open]:
        """Candidates with their first bounds, without those that can't fit."""
        for candidate, bound_s in zip(candidates, seconds, strict=True):
            entry = self._open(candidate, bound_s, 1)
            if bound_s < inf:
                yield entry

    def _open(self, candidate: Candidate, bound_s: float, level: int) -> _Open:
        """An entry of the queue; of equal bounds fewer stages and more data ranks come first."""
        self.idle.bounded(candidate, bound_s)
        self.node_orders.bounded(candidate, bound_s)
        return bound_s, simplicity(candidate), level, candidate

    def _nothing_fits(self, options: list[Candidate]) -> Refused:
        """What the candidate of least memory lacks, and how many devices its state asks for."""
        need, state = self.least.need_bytes, self.least.state
        smallest = min(options, key=lambda c: (need(c), c.mesh.pipeline, c.zero))
        alone = Candidate(Mesh(), 1, "1f1b", 1, offload=self.offload.words[-1])
        attempts = Attempts(self.work, self._supplies())
        return attempts.shortage(smallest, state.bytes_of(alone), self.cluster.n_devices)

    def _bounded(self, found: Evaluated) -> Evaluated:
        found = found if monotonic() > self.deadline else self.attempts.improved(found)

        def closest_s(candidates: Sequence[Candidate]) -> list[Any]:
            requests = [(_key(c), (Attempts.close_s, (c, LEVELS + 1))) for c in candidates]
            return self.workers.finish(self._asked(requests))

        self.left.narrow(found.prediction.step_s, closest_s)
        bound_s = min(self.left.least_s(), found.prediction.step_s)
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

    def _attempted(self, candidate: Candidate, attempt: Attempt, best: Best) -> None:
        """Takes note of a candidate that was planned."""
        if attempt.found:
            best.offer(attempt.found)
        if attempt.least_s < inf:
            self.idle.planned(candidate.mesh, attempt.least_s)
            self.node_orders.planned(candidate, attempt.least_s)
        if attempt.is_roomy:
            self.offload.roomy.add(candidate)
        if not attempt.fits:
            self.too_large.append(candidate)
        if attempt.worth is not None:
            self.offload.worth[candidate] = attempt.worth
        self.offload.tried[candidate] = attempt.fits
        self.evaluations += attempt.fits
        if attempt.fits and candidate.mesh.size < self.cluster.n_devices:
            self.patient_since += 1  # what leaves devices idle takes nothing from the others
        self.refusals += not attempt.fits


def _key(candidate: Candidate) -> tuple[int, ...]:
    """Of a process that answers: linear programs are shared by local shapes."""
    mesh = candidate.mesh
    return *_shape(candidate), mesh.pipeline if mesh.tensor == 1 else 0


def _shape(candidate: Candidate) -> tuple[int, int]:
    """What decides the sizes of a block's tensors on a device, but for the data axis."""
    return candidate.mesh.tensor, candidate.rows
