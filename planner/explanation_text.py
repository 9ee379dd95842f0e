"""The words of an explanation.

Input: an `Explanation`. Output: lines: the plan in short, a line per alternative, what holds the
plan back, answers to why-not and what-if; or, where nothing fits, what is missing and what helps.
Shares are of the explained plan's step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ir.cluster_change import level_names
from ir.plan import Plan
from ir.quantities import duration, size
from planner.alternatives import Alternative, Difference, Moved, compare, decisions
from planner.describe import escaped
from planner.relaxations import Relaxation
from planner.remedies import Remedy
from planner.shortage import Part, Shortage, whole_batch_text
from planner.trials import Outcome, Refusal

if TYPE_CHECKING:  # an explanation prints itself by this module
    from planner.explanation import Explanation, WhatIf

WORDS = {
    "compute": "compute", "exposed_comm": "communication", "bubble": "bubble",
    "optimizer": "optimizer",
}  # fmt: skip
SHOWN = 0.0005
"""Relative: smaller parts of a difference print as 0.0 %."""


def explanation_text(told: Explanation) -> str:
    """The whole text."""
    lines = [*_plan(told)] if told.plan else [*_nothing_fits(told)]
    if told.alternatives:
        lines += ["", "nearest alternatives, each planned", *_alternatives(told)]
        lines += ["", "what holds the plan back, each relaxed and planned", *_constraints(told)]
    if told.why_not:
        lines += ["", f"why not {_asked(told.why_not)}", *_answer(told, told.why_not)]
    if told.what_if:
        lines += ["", *_what_if(told, told.what_if)]
    return "\n".join(lines)


def _plan(told: Explanation) -> Iterator[str]:
    assert told.plan is not None  # as asked above
    plan, p = told.plan, told.plan.prediction
    yield (
        f"plan {(told.given or plan).hash}   {escaped(plan.model)} on {plan.cluster}   "
        f"step {duration(p.step_s)}   peak {size(p.peak_bytes)} of {size(p.capacity_bytes)}"
    )
    yield _decided(plan)
    if plan.devices_idle:
        yield f"{plan.devices_idle} of {plan.cluster.n_devices} devices idle"
    if told.is_cut_short(plan):
        yield f"the limit of {told.time_limit_s:g} s ended its search: {p.gap:.1%} are unproven"
    parts = ((WORDS[part], getattr(p, f"{part}_s")) for part in WORDS)
    yield "step  " + "   ".join(f"{word} {seconds / p.step_s:.1%}" for word, seconds in parts)
    if told.given and (was_s := told.given.prediction.step_s) != p.step_s:
        yield f"it was made with a step of {duration(was_s)}; all here is priced now"
    if told.again:
        yield f"planned again with nothing changed: {_outcome(told, told.again, plan)}"


def _decided(plan: Plan) -> str:
    return "   ".join(f"{key}={value}" for key, value in decisions(plan).items())


def _alternatives(told: Explanation) -> Iterator[str]:
    names = [_asked(item) for item in told.alternatives]
    for name, item in zip(names, told.alternatives, strict=True):
        moved = {key for key, _ in item.asked}
        freed = f"   not with your {_listed(item.released)}" if item.released else ""
        text = _outcome(told, item.outcome, told.plan, moved)
        yield f"  {name:<{max(map(len, names))}}   {text}{freed}"


def _asked(item: Alternative) -> str:
    return ", ".join(f"{key} = {value}" for key, value in item.asked)


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(keys)


def _outcome(
    told: Explanation, outcome: Outcome, first: Plan | None, asked: Iterable[str] = ()
) -> str:
    """One line; `asked`: decisions that need no mention."""
    if not told.is_cut_short(outcome):
        return _outcome_alone(outcome, first, asked)
    if isinstance(outcome, Refusal):
        return "none found before the time limit ended its search"
    return _outcome_alone(outcome, first, asked) + ", but the time limit ended its search"


def _outcome_alone(outcome: Outcome, first: Plan | None, asked: Iterable[str]) -> str:
    match outcome:
        case None:
            return "not tried: the time limit was reached"
        case Refusal(shortage=Shortage() as shortage):
            need, capacity = size(shortage.need_bytes), size(shortage.capacity_bytes)
            most = max(shortage.parts, key=lambda part: part.size_bytes)
            return f"does not fit: {need} of {capacity}, {size(most.size_bytes)} of it {most.name}"
        case Refusal():
            return f"refused: {outcome.reason}"
        case _ if first is None:
            return f"fits: {_fit(outcome)}"
        case _:
            found = compare(first, outcome)
            moved = [move for move in found.moved if move.key not in set(asked)]
            return _difference(found) + (f"; with {_moves(moved)}" if moved else "")


def _fit(plan: Plan) -> str:
    p = plan.prediction
    return f"step {duration(p.step_s)}, peak {size(p.peak_bytes)} of {size(p.capacity_bytes)}"


def _difference(found: Difference) -> str:
    """`+3.1 %: bubble +2.9, compute +0.2`, the largest part first."""
    parts = [(WORDS[part], seconds / found.step_s) for part, seconds in found.parts]
    shown = sorted((p for p in parts if abs(p[1]) >= SHOWN), key=lambda p: -abs(p[1]))
    words = ", ".join(f"{word} {100 * share:+.1f}" for word, share in shown)
    total = found.share if abs(found.share) >= SHOWN else 0.0  # never "-0.0 %"
    return f"{100 * total:+.1f} %" + (f": {words}" if words else "")


def _moves(moved: Iterable[Moved]) -> str:
    return ", ".join(
        f"{m.key} {m.old} -> {m.new}" if m.old != "" else f"{m.key} {m.new}" for m in moved
    )


def _constraints(told: Explanation) -> Iterator[str]:
    plan = told.base
    assert plan is not None  # there are constraints of plans only
    facts = _facts(plan)
    names = [item.constraint for item in told.relaxations] + ["compute"]
    for item in told.relaxations:
        fact = facts.get(item.constraint) or _kept_out(item, plan)
        binds = " (binds)" if item.binds(plan) else ""
        text = _outcome(told, item.outcome, plan)
        yield f"  {item.constraint:<{max(map(len, names))}}   {fact}: {text}{binds}"
    share = plan.prediction.compute_s / plan.prediction.step_s
    yield f"  {'compute':<{max(map(len, names))}}   {share:.1%} of the step"


def _facts(plan: Plan) -> Mapping[str, str]:
    """How far each constraint is used, and what it was relaxed to."""
    p = plan.prediction
    facts = {
        "memory": f"rank {p.fullest} holds {size(p.peak_bytes)} of {size(p.capacity_bytes)}; with "
        "a tenth more memory"
    }
    for name, level in zip(level_names(plan.cluster), plan.cluster.levels, strict=True):
        rate = level.device_bytes_per_s / 1e9
        facts[f"link.{name.replace(' ', '-')}"] = f"{rate:.4g} GB/s; with twice as much"
    return facts


def _kept_out(item: Relaxation, plan: Plan) -> str:
    degrees = ", ".join(map(str, item.limits[:4])) + (", ..." if item.limits[4:] else "")
    return f"{degrees} do not divide {plan.global_batch} rows; with {item.change}, per row"


def _answer(told: Explanation, item: Alternative) -> Iterator[str]:
    yield f"  {_outcome(told, item.outcome, told.plan, {key for key, _ in item.asked})}"
    if item.released:
        yield f"  it does not go with {_listed(item.released)}, which you fixed"
    if isinstance(item.outcome, Plan):
        yield f"  {_fit(item.outcome)}"
        yield f"  {_decided(item.outcome)}"
    if isinstance(item.outcome, Refusal) and item.outcome.shortage:
        yield from _shortage(item.outcome.shortage)


def _what_if(told: Explanation, item: WhatIf) -> Iterator[str]:
    yield "what if " + ", ".join(f"{key}={value}" for key, value in item.changes)
    yield f"  {_outcome(told, item.outcome, told.plan)}"
    if item.released:
        yield f"  it does not go with {_listed(item.released)}, which you fixed"
    if not isinstance(item.outcome, Plan):
        return
    new = item.outcome.prediction
    yield f"  on {item.outcome.cluster}: {_fit(item.outcome)}"
    if told.plan is None:
        yield f"  {_decided(item.outcome)}"
        return
    for key, word in (("step", "step"), *WORDS.items()):
        old_s, new_s = getattr(told.plan.prediction, f"{key}_s"), getattr(new, f"{key}_s")
        yield f"  {word:<13}  {duration(old_s):>10} -> {duration(new_s):>10}"


def _nothing_fits(told: Explanation) -> Iterator[str]:
    assert told.shortage is not None  # without a plan there is one
    yield "no plan fits"
    yield from _shortage(told.shortage)
    if told.remedies:
        yield ""
        yield from _remedies([item for item in told.remedies if item.fits])
        tried = [item for item in told.remedies if not item.fits]
        yield from (["tried as well:"] if tried else [])
        for item in tried:
            yield f"  {remedy_change(item)}: {_outcome(told, item.outcome, None)}"


def _remedies(fitting: Sequence[Remedy]) -> Iterator[str]:
    if not fitting:
        yield "nothing that fits was found"
        return
    yield "what would fit, each planned, the cheapest first"
    yield from (f"  {remedy_text(item)}" for item in fitting)


def _shortage(shortage: Shortage) -> Iterator[str]:
    yield (
        f"  the plan that needs least ({shortage.candidate}, {shortage.candidate.rows} rows per "
        f"micro-batch) needs {size(shortage.need_bytes)} on rank {shortage.rank}; "
        f"{size(shortage.capacity_bytes)} are usable"
    )
    yield f"  at its peak: {_parts(shortage.parts)}"
    over_bytes = sum(part.size_bytes for part in shortage.violated)
    yield f"  already too much: {_parts(shortage.violated)} = {size(over_bytes)}"
    if shortage.whole_batch:
        yield f"  {whole_batch_text(shortage)}"
    yield "  the largest there:"
    yield from (f"    {size(part.size_bytes):>10}  {part.name}" for part in shortage.largest)
    if shortage.least_devices > shortage.devices:
        yield (
            f"  the state alone ({size(shortage.state_bytes)}) needs at least "
            f"{shortage.least_devices} devices of {shortage.devices}"
        )


def _parts(parts: Iterable[Part]) -> str:
    return " + ".join(f"{part.name} {size(part.size_bytes)}" for part in parts)


def remedy_text(item: Remedy) -> str:
    """`nodes = 2: step 1.2 s, peak 70.1 GiB of 75.4 GiB`."""
    assert isinstance(item.outcome, Plan)  # only what fits is told
    chosen = ""
    if item.kind == "free":
        now = decisions(item.outcome)
        chosen = f" ({_listed(f'{key}={now[key]}' for key in item.released)})"
    return f"{remedy_change(item)}{chosen}: {_fit(item.outcome)}"


def remedy_change(item: Remedy) -> str:
    """What is changed, in words."""
    freed = f", without your {_listed(item.released)}" if item.released else ""
    return {
        "free": f"leaving {item.change} free", "batch": f"a global batch of {item.change}, which "
        "trains differently", "nodes": f"nodes = {item.change}{freed}",
        "memory": f"devices with {item.change[:-3]} {item.change[-3:]}{freed}",
    }[item.kind]  # fmt: skip
