"""Why a plan is as it is, or why there is none: all that is said of it, as values.

Input: a request, its plan if there is one already, `Trials`. Output: an `Explanation`, which
prints itself (`planner.explanation_text`) and gives its JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from ir.cluster_change import changed
from ir.errors import Refused, UsageError
from ir.plan import Plan
from planner.alternatives import Alternative, alternative, alternatives, compare, decisions
from planner.explanation_text import explanation_text
from planner.pins import read_pins
from planner.relaxations import Relaxation, relaxations, what_if
from planner.remedies import Remedy, remedies
from planner.shortage import DoesNotFit, Part, Shortage, short_text
from planner.trials import Outcome, Pinned, Refusal, Request, Trials


@dataclass(frozen=True)
class WhatIf:
    """The changes of the cluster as they were asked for, and the plan for what it becomes."""

    changes: tuple[tuple[str, str], ...]
    outcome: Outcome
    released: tuple[str, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """Of `plan`, or, where it is None, of the `shortage`.

    `given`: the plan as it was made before, if it was; `plan` is priced now. `again`: what the same
    request is planned as now, where the plan was given. `time_limit_s`: planning ended then; what
    was not begun has the outcome None, and `cut_short` is the outcome that a longer search may
    better.
    """

    plan: Plan | None
    time_limit_s: float
    again: Outcome = None
    alternatives: tuple[Alternative, ...] = ()
    relaxations: tuple[Relaxation, ...] = ()
    why_not: Alternative | None = None
    what_if: WhatIf | None = None
    shortage: Shortage | None = None
    remedies: tuple[Remedy, ...] = ()
    given: Plan | None = None
    cut_short: Outcome = None

    def is_cut_short(self, outcome: Outcome) -> bool:
        """Whether the time limit ended the search for it."""
        return outcome is not None and outcome is self.cut_short

    def __str__(self) -> str:
        return explanation_text(self)

    @property
    def fits(self) -> bool:
        """Whether there is a plan."""
        return self.plan is not None

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        value: dict[str, Any] = {"status": "ok" if self.fits else "refused"}
        if self.plan:
            made = self.given or self.plan
            value["plan"] = {"hash": made.hash, **_plan_json(None, self.plan)}
            value["plan"] |= {"cut_short": True} if self.is_cut_short(self.plan) else {}
        if self.again:
            value["again"] = self._outcome(self.again)
        if self.shortage:
            value["reason"] = short_text(self.shortage)
            value["shortage"] = _shortage_json(self.shortage)
            value["remedies"] = [self._remedy(item) for item in self.remedies]
        if self.alternatives:
            value["alternatives"] = [self._alternative(item) for item in self.alternatives]
            value["constraints"] = [self._relaxation(item) for item in self.relaxations]
        if self.why_not:
            value["why_not"] = self._alternative(self.why_not)
        if self.what_if:
            value["what_if"] = {
                "changes": dict(self.what_if.changes), "released": list(self.what_if.released),
                **self._outcome(self.what_if.outcome),
            }  # fmt: skip
        return value

    def _alternative(self, item: Alternative) -> dict[str, Any]:
        released = list(item.released)
        return {"asked": dict(item.asked), "released": released, **self._outcome(item.outcome)}

    def _relaxation(self, item: Relaxation) -> dict[str, Any]:
        assert self.plan is not None  # there are relaxations of plans only
        return {
            "constraint": item.constraint, "change": item.change,
            "binds": item.binds(self.base or self.plan), **self._outcome(item.outcome),
        }  # fmt: skip

    @property
    def base(self) -> Plan | None:
        """What relaxed constraints are compared with: the plan that the search finds now."""
        return self.again if isinstance(self.again, Plan) else self.plan

    def _remedy(self, item: Remedy) -> dict[str, Any]:
        return {"kind": item.kind, "change": item.change, **self._outcome(item.outcome)}

    def _outcome(self, outcome: Outcome) -> dict[str, Any]:
        match outcome:
            case None:
                return {"status": "not tried"}
            case Refusal():
                if outcome.shortage is None:
                    return {"status": "refused", "reason": outcome.reason}
                return {"status": "does not fit", **_shortage_json(outcome.shortage)}
            case _:
                cut = {"cut_short": True} if self.is_cut_short(outcome) else {}
                return {"status": "fits", **cut, **_plan_json(self.plan, outcome)}


def _plan_json(first: Plan | None, plan: Plan) -> dict[str, Any]:
    p = plan.prediction
    value: dict[str, Any] = {
        "step_s": p.step_s, "peak_bytes": p.peak_bytes, "capacity_bytes": p.capacity_bytes,
        "decisions": decisions(plan),
    }  # fmt: skip
    if first is None:
        return value
    difference = compare(first, plan)
    return value | {
        "difference_s": difference.total_s, "relative": difference.share,
        "parts_s": dict(difference.parts), "moved": [asdict(move) for move in difference.moved],
    }  # fmt: skip


def _shortage_json(shortage: Shortage) -> dict[str, Any]:
    def named(parts: tuple[Part, ...]) -> list[dict[str, Any]]:
        return [{"name": part.name, "bytes": part.size_bytes} for part in parts]

    return {
        "rank": shortage.rank, "need_bytes": shortage.need_bytes,
        "capacity_bytes": shortage.capacity_bytes, "least": str(shortage.candidate),
        "parts": named(shortage.parts), "violated": named(shortage.violated),
        "largest": named(shortage.largest), "state_bytes": shortage.state_bytes,
    }  # fmt: skip


def explain_request(
    request: Request, trials: Trials, *, plan: Plan | None = None, why_not: Pinned | None = None,
    changes: Mapping[str, str] | None = None,
) -> Explanation:  # fmt: skip
    """Everything, or only what `why_not` and `changes` ask for.

    `plan`: one that was made before; else the request is planned. Raises `UsageError` for unknown
    decisions and changes, `Refused` where there is no plan for another reason than memory.
    """
    question, answer = _why_not(request, why_not), _what_if(request, changes)  # quick to refuse
    asks = why_not is not None or changes is not None
    now = None if plan and asks else trials(request)
    found = plan or now
    limit_s = trials.limit_s
    if isinstance(found, Refusal):
        shortage = _shortage_of(found)
        tried = () if asks else tuple(remedies(request, shortage, trials))
        told = Explanation(None, limit_s, shortage=shortage, remedies=tried)
    elif found is None or asks:
        told = Explanation(found, limit_s)
    else:
        told = Explanation(
            found, limit_s, now if plan else None, alternatives(found, request.pins, trials),
            relaxations(now if isinstance(now, Plan) else found, request.pins, trials),
        )  # fmt: skip
    told = replace(told, why_not=question(trials), what_if=answer(trials))
    return replace(told, cut_short=trials.cut_short)


def _why_not(request: Request, asked: Pinned | None) -> Callable[[Trials], Alternative | None]:
    if asked is None:
        return lambda trials: None
    read_pins(asked)
    return lambda trials: alternative(request, asked, trials)


def _what_if(
    request: Request, changes: Mapping[str, str] | None
) -> Callable[[Trials], WhatIf | None]:
    if changes is None:
        return lambda trials: None
    asked, cluster = tuple(changes.items()), changed(request.cluster, changes)
    return lambda trials: WhatIf(asked, *what_if(request, cluster, trials))


def _shortage_of(refusal: Refusal) -> Shortage:
    """Raises the refusal again if it is for another reason than memory."""
    if refusal.shortage is None:
        raise (UsageError if refusal.contradicts else Refused)(refusal.reason)
    return refusal.shortage


def first_remedies(
    error: DoesNotFit, request: Request, trials: Trials, most: int
) -> tuple[Remedy, ...]:
    """The first changes that make the request fit."""
    tried = remedies(request, error.shortage, trials)
    return tuple(islice((remedy for remedy in tried if remedy.fits), most))
