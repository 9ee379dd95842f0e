"""Plans that are asked for one after another within a time limit: what explanations are made of.

Input: a function that plans a `Request`. Output: per request its `Outcome`: a plan, the reason why
there is none, or None once the time is used. The same request is planned once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ir.cluster import Cluster
from ir.errors import ShardwrightError, UsageError
from ir.plan import Plan
from planner.shortage import DoesNotFit, Shortage

Decision: TypeAlias = int | str
Pinned: TypeAlias = Mapping[str, Decision]


@dataclass(frozen=True)
class Request:
    """What is planned: for which hardware, how many rows of a step, with which decisions fixed."""

    cluster: Cluster
    global_batch: int
    pins: Pinned


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there is no plan. `shortage`: the numbers, where memory is the reason; `contradicts`:
    the decisions make no sense together."""

    reason: str
    shortage: Shortage | None = None
    contradicts: bool = False


Planning: TypeAlias = Callable[[Request, float], Plan]
"""Of a request, in at most so many seconds. Raises `UsageError` or `Refused` where it can't."""
Outcome: TypeAlias = Plan | Refusal | None


class Trials:
    """No request is begun later than `limit_s` after the first, and the search for one ends then.

    `cut_short`: the outcome of the request whose search the limit ended, if there is one.
    """

    def __init__(
        self, planning: Planning, limit_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.planning, self.limit_s, self.clock = planning, limit_s, clock
        self.start_s = clock()
        self.known: dict[tuple[object, ...], Plan | Refusal] = {}
        self.cut_short: Outcome = None

    def __call__(self, request: Request) -> Outcome:
        """The outcome of one request."""
        key = (request.cluster, request.global_batch, *sorted(request.pins.items()))
        if key not in self.known:
            left_s = self._left_s()
            if left_s <= 0:
                return None
            self.known[key] = self._planned(request, left_s)
            if self._left_s() < 0:
                self.cut_short = self.known[key]
        return self.known[key]

    def _left_s(self) -> float:
        return self.limit_s - (self.clock() - self.start_s)

    def _planned(self, request: Request, left_s: float) -> Plan | Refusal:
        try:
            return self.planning(request, left_s)
        except DoesNotFit as error:
            return Refusal(str(error), error.shortage)
        except ShardwrightError as error:
            return Refusal(str(error), contradicts=isinstance(error, UsageError))
