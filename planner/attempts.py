"""One candidate of a search bounded, or planned under several prices of memory.

Input: a workload, the supplies; a candidate. Output: seconds, or an `Attempt`. What
linear programs showed of other candidates with the same local shapes is made use of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from ir.errors import Refused
from planner.byte_price import ByteWorth, byte_worth, recomputed_share, whole_price_s
from planner.calibrated import cost_model
from planner.candidate import Evaluated, TooSlow, Workload, evaluate, improve
from planner.offload import HostFull
from planner.pieces import Pieces
from planner.pins import Candidate
from planner.places import PlacedBounds, Supplies
from planner.shortage import does_not_fit
from planner.solver import SolverFailed

SLACK = 0.003
"""Less recomputation than this part of a step is not worth a sharding that holds less."""
MOST_PRICES = 5
"""More prices of memory under which the blocks of a candidate that fits are sharded."""
DEARER = 2.0
"""Times what a byte is worth on the rank that lacks it most: others may lack it as well."""
NEAR = 0.01
"""A candidate that is slower than the best by more is not sharded under more prices."""
HOPE = 0.03
"""A candidate that is slower than the best by more is not sharded for less memory."""
ROUNDING = 1e-8
"""Relative; plans that differ by less are equally fast."""
STEEP = 1e4
"""Over what a byte is worth between keeping everything and nothing: only bytes count."""


@dataclass(frozen=True)
class Attempt:
    """What planning a candidate came to. `fits`: whether it may fit; `found`: its best plan, unless
    a faster one was known; `least_s`: seconds of the fastest that was looked at, `worth` of a byte
    in it, unless it was too slow to tell; `is_roomy`: it recomputes next to nothing."""

    fits: bool
    found: Evaluated | None
    least_s: float
    is_roomy: bool
    worth: ByteWorth | None = None


class Attempts:
    """Bounds and plans of candidates; every method's answer can be copied to another process."""

    def __init__(self, work: Workload, supply: Supplies) -> None:
        self.work, self.supply = work, supply
        self.bounds = PlacedBounds(supply)

    def floors_s(self, candidates: Sequence[Candidate]) -> list[float]:
        """What candidates take at least, before anything but products is priced."""
        return [self.bounds.floor_s(candidate) for candidate in candidates]

    def quick_s(self, candidates: Sequence[Candidate]) -> list[float]:
        """The first bounds; infinity where a candidate can't fit."""
        may_fit, quick_s = self.bounds.may_fit, self.bounds.quick_s
        return [quick_s(c) if may_fit(c) else inf for c in candidates]

    def close_s(self, candidate: Candidate, level: int) -> float:
        """A closer bound."""
        return self.bounds.close_s(candidate, level)

    def plan(self, candidate: Candidate, best_s: float) -> Attempt:
        """First as if a byte cost nothing; if it does not fit so, with as few as it can; then under
        prices between, and at what a byte turns out to be worth."""
        return _Attempt(self, candidate, best_s).run()

    def improved(self, found: Evaluated) -> Evaluated:
        """The best plan, or a faster one with the same stages."""
        mesh = found.candidate.mesh
        return improve(self.work, found, cost_model(self.supply.cluster_of(found.candidate), mesh))

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


@dataclass(frozen=True)
class _Tried:
    """The shardings under a price of memory and the seconds of their step, infinity if it does not
    fit; `worth`: of a byte then; `is_roomy`: next to nothing is recomputed."""

    price_s: float
    pieces: Pieces
    step_s: float
    worth: ByteWorth | None = None
    is_roomy: bool = False


class _Attempt:
    """One planning of a candidate; `best_s`: of the best plan so far."""

    def __init__(self, attempts: Attempts, candidate: Candidate, best_s: float) -> None:
        self.work, self.supply = attempts.work, attempts.supply.of(candidate)
        self.cost = cost_model(attempts.supply.cluster_of(candidate), candidate.mesh)
        self.candidate, self.best_s = candidate, best_s
        self.found: Evaluated | None = None
        self.tried: list[_Tried] = []

    def run(self) -> Attempt:
        fits = self._first_fits()
        if fits and self.candidate.mesh.tensor > 1:
            self._refine()
        least = min(self.tried, key=lambda item: item.step_s)
        is_roomy = any(item.is_roomy for item in self.tried)
        return Attempt(fits, self.found, least.step_s, is_roomy, least.worth)

    def _first_fits(self) -> bool:
        """Whether the candidate fits with a byte at no price, only bytes at one, or between."""
        item = self._try(0.0)
        dearer = (STEEP, 1.0) if self.candidate.mesh.tensor > 1 else ()
        for times in dearer:
            if item.step_s < inf:
                return True
            item = self._try(times * whole_price_s(item.pieces))
        return item.step_s < inf

    def _refine(self) -> None:
        """Tries prices next to the one of the fastest plan, as long as it is near the best one, or
        shardings that do not fit leave open how much faster the next ones are."""
        for _ in range(MOST_PRICES):
            steps_s = [item.step_s for item in self.tried]
            is_near = min(steps_s) <= self.best_s * (1 + NEAR) or inf in steps_s
            price_s = self._next_price_s() if is_near else None
            if price_s is None:
                return
            self._try(price_s)

    def _next_price_s(self) -> float | None:
        """What a byte is worth in the fastest plan, or more, if none was tried that is dearer; or
        where the shardings of that plan and of a neighbour cost the same: what is cheapest there
        lies between them. No dearer one for a plan that has room. None where nothing is new."""
        tried = sorted(self.tried, key=lambda item: item.price_s)
        best = min(tried, key=lambda item: item.step_s)
        if best is tried[-1] and not best.is_roomy:
            worth_s = best.worth.memory_s if best.worth else 0.0
            for price_s in (worth_s, DEARER * worth_s):
                if price_s > best.price_s and self._is_new(price_s):
                    return price_s
        pairs = [
            pair for pair in pairwise(tried)
            if best is pair[1] or (best is pair[0] and not best.is_roomy)
        ]  # fmt: skip
        for low, high in sorted(pairs, key=lambda pair: sum(item.step_s for item in pair)):
            price_s = self.supply.level_price_s(self.candidate, low.price_s, high.price_s)
            if self._is_new(price_s):
                return price_s
        return None

    def _is_new(self, price_s: float) -> bool:
        """Whether the shardings under a price were not tried."""
        pieces = self.supply.pieces(self.candidate, price_s)
        return not any(pieces is item.pieces for item in self.tried)

    def _try(self, price_s: float) -> _Tried:
        """Evaluates the shardings under a price, if they are new."""
        pieces = self.supply.pieces(self.candidate, price_s)
        known = next((item for item in self.tried if item.pieces is pieces), None)
        if known:
            return known
        found = self._evaluated(pieces)
        if isinstance(found, Evaluated):
            self._offer(found)
            is_roomy = recomputed_share(found) < SLACK
            step_s, worth = found.prediction.step_s, byte_worth(found)
            item = _Tried(price_s, pieces, step_s, worth, is_roomy)
        else:
            item = _Tried(price_s, pieces, found.step_s if found else inf)
        self.tried.append(item)
        return item

    def _offer(self, new: Evaluated) -> None:
        known_s = self.found.prediction.step_s if self.found else self.best_s * (1 + ROUNDING)
        if new.prediction.step_s <= known_s:
            self.found, self.best_s = new, min(self.best_s, new.prediction.step_s)

    def _evaluated(self, pieces: Pieces) -> Evaluated | None | TooSlow:
        """None if it does not fit; `TooSlow` if it takes longer than the best by `HOPE`."""
        limit_s = self.best_s * (1 + HOPE)
        try:
            return evaluate(self.work, self.candidate, pieces, self.cost, limit_s)
        except SolverFailed:
            raise
        except Refused:
            return None
