"""One candidate of a search bounded, or planned under several prices of memory.

Input: a workload, the supplies; a candidate. Output: seconds, or an `Attempt`. What
linear programs showed of other candidates with the same local shapes is made use of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from ir.errors import Refused
from planner.byte_price import marginal_price_s, recomputed_share, whole_price_s
from planner.calibrated import cost_model
from planner.candidate import Evaluated, TooSlow, Workload, evaluate
from planner.offload import HostFull
from planner.pieces import Pieces
from planner.pins import Candidate
from planner.places import PlacedBounds, Supplies
from planner.shortage import does_not_fit
from planner.solver import SolverFailed

SLACK = 0.003
"""Less recomputation than this part of a step is not worth a sharding that holds less."""
MOST_PRICES = 4
"""Prices of memory under which the blocks of a candidate are sharded."""
MOST_BETWEEN = 3
"""Prices between one under which a candidate does not fit and one under which it does."""
HOPE = 0.03
"""A candidate that is slower than the best by more is not sharded for less memory."""
ROUNDING = 1e-8
"""Relative; plans that differ by less are equally fast."""
STEEP = 1e4
"""Over what a byte is worth between keeping everything and nothing: only bytes count."""


@dataclass(frozen=True)
class Attempt:
    """What planning a candidate came to. `fits`: whether it may fit; `found`: its best plan, unless
    a faster one was known; `least_s`: seconds of the fastest that was looked at; `is_roomy`: it
    recomputes next to nothing."""

    fits: bool
    found: Evaluated | None
    least_s: float
    is_roomy: bool


class Attempts:
    """Bounds and plans of candidates; every method's answer can be copied to another process."""

    def __init__(self, work: Workload, supply: Supplies) -> None:
        self.work, self.supply = work, supply
        self.bounds = PlacedBounds(supply)

    def quick_s(self, candidates: Sequence[Candidate]) -> list[float]:
        """The first bounds."""
        return [self.bounds.quick_s(candidate) for candidate in candidates]

    def close_s(self, candidate: Candidate, level: int) -> float:
        """A closer bound."""
        return self.bounds.close_s(candidate, level)

    def plan(self, candidate: Candidate, best_s: float) -> Attempt:
        """First as if a byte cost nothing; if it does not fit so, with as few as it can, and
        between; then at what the last plan says a byte is worth."""
        return _Attempt(self, candidate, best_s).run()

    def shortage(self, candidate: Candidate, state_bytes: float, devices: int) -> Refused:
        """Why a candidate does not fit, on one of so many devices; `state_bytes`: of a device that
        holds all state."""
        cost = cost_model(self.supply.cluster_of(candidate), candidate.mesh)
        price_s = STEEP * whole_price_s(self.supply.pieces(candidate, 0.0))
        pieces = self.supply.pieces(candidate, price_s)
        try:
            evaluate(self.work, candidate, pieces, cost)
        except HostFull as error:
            return error
        except Refused:
            pass
        return does_not_fit(
            self.work, candidate, pieces, cost, state_bytes=state_bytes, devices=devices
        )


class _Attempt:
    """One planning of a candidate; `best_s`: of the best plan so far."""

    def __init__(self, attempts: Attempts, candidate: Candidate, best_s: float) -> None:
        self.work, self.supply = attempts.work, attempts.supply
        self.cost = cost_model(self.supply.cluster_of(candidate), candidate.mesh)
        self.candidate, self.best_s = candidate, best_s
        self.found: Evaluated | None = None
        self.least_s = inf

    def run(self) -> Attempt:
        price_s, tried, fits, is_roomy, dearer = 0.0, list[Pieces](), False, False, [1.0, STEEP]
        for _ in range(MOST_PRICES if self.candidate.mesh.tensor > 1 else 1):
            pieces = self.supply.pieces(self.candidate, price_s)
            is_known = any(pieces is other for other in tried)
            if is_known and (fits or not dearer):
                break
            tried.append(pieces)
            found = None if is_known else self._evaluated(pieces)
            if isinstance(found, TooSlow):
                if not fits and price_s:
                    self._between(price_s)
                fits = True
                break
            if found is None:
                if fits or not dearer:
                    break
                price_s = dearer.pop() * whole_price_s(pieces)
                continue
            if not fits and price_s:
                self._between(price_s)
            fits = True
            self._offer(found)
            if recomputed_share(found) < SLACK:
                is_roomy = True
                break
            price_s = marginal_price_s(found)
        return Attempt(fits, self.found, self.least_s, is_roomy)

    def _between(self, high_s: float) -> None:
        """Evaluates a candidate that fits at a price of memory, and not without one, at prices
        between: each is where the nearest tried shardings, one of either kind, cost the same."""
        supply, low_s = self.supply.of(self.candidate), 0.0
        for _ in range(MOST_BETWEEN):
            known = [supply.pieces(self.candidate, price_s) for price_s in (low_s, high_s)]
            price_s = supply.level_price_s(self.candidate, low_s, high_s)
            pieces = supply.pieces(self.candidate, price_s)
            if any(pieces is other for other in known):
                break
            found = self._evaluated(pieces)
            if found is None:
                low_s = price_s
                continue
            high_s = price_s
            if isinstance(found, Evaluated):
                self._offer(found)

    def _offer(self, new: Evaluated) -> None:
        known_s = self.found.prediction.step_s if self.found else self.best_s * (1 + ROUNDING)
        if new.prediction.step_s <= known_s:
            self.found, self.best_s = new, min(self.best_s, new.prediction.step_s)

    def _evaluated(self, pieces: Pieces) -> Evaluated | None | TooSlow:
        """None if it does not fit; `TooSlow` if it takes longer than the best by `HOPE`."""
        limit_s = self.best_s * (1 + HOPE)
        try:
            found = evaluate(self.work, self.candidate, pieces, self.cost, limit_s)
        except SolverFailed:
            raise
        except Refused:
            return None
        timed = found if isinstance(found, TooSlow) else found.prediction
        self.least_s = min(self.least_s, timed.step_s)
        return found
