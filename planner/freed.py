"""Which of the decisions that a plan's maker fixed do not go with what is asked: the fewest.

Input: a request with fixed decisions, decisions that are asked for, `Trials`. Output: the best
outcome with the fewest of the fixed decisions freed, and which these are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import combinations
from typing import TypeAlias

from ir.cluster import AXES, Mesh
from ir.plan import Plan
from planner.trials import Outcome, Pinned, Refusal, Request, Trials

Freed: TypeAlias = tuple[str, ...]


def with_fewest_freed(
    request: Request, asked: Pinned, trials: Trials, mesh: Mesh | None = None
) -> tuple[Outcome, Freed]:
    """None of what is fixed is freed, or else one decision, or else two, and so on; of as many the
    freed ones that give the fastest plan. It ends where memory is all that is lacking. Where even
    freeing all does not help, the reason is no fixed decision, and none is named.

    `mesh`: tried first, where `asked` leaves its degrees as they are; then any mesh.
    """
    keys = [key for key in request.pins if key not in asked]
    last: Outcome = None
    for count in range(len(keys) + 1):
        found = [*_tried(request, asked, trials, mesh, list(combinations(keys, count)))]
        if plans := [(plan, freed) for plan, freed in found if isinstance(plan, Plan)]:
            return min(plans, key=lambda pair: pair[0].prediction.step_s)
        if ended := [pair for pair in found if _ends(pair[0])]:
            outcome, freed = ended[0]
            return outcome, freed if outcome else ()
        last = found[-1][0]
    return last, ()


def _tried(
    request: Request, asked: Pinned, trials: Trials, mesh: Mesh | None, sets: list[Freed]
) -> Iterator[tuple[Outcome, Freed]]:
    for freed in sets:
        kept = {key: value for key, value in request.pins.items() if key not in freed}
        own_mesh = mesh if not {*asked, *freed} & set(AXES) else None
        yield _on_meshes(replace(request, pins=kept | dict(asked)), trials, own_mesh), freed


def _on_meshes(request: Request, trials: Trials, mesh: Mesh | None) -> Outcome:
    """On this mesh if that makes sense and fits, else on any."""
    on_mesh: Outcome = None
    if mesh is not None:
        on_mesh = trials(replace(request, pins=asdict(mesh) | dict(request.pins)))
        if not isinstance(on_mesh, Refusal):
            return on_mesh
    found = trials(request)
    no_time = found is None and isinstance(on_mesh, Refusal) and on_mesh.shortage
    return on_mesh if no_time else found


def _ends(outcome: Outcome) -> bool:
    """Whether to free more would be no answer: only memory or time is lacking."""
    return outcome is None or (isinstance(outcome, Refusal) and outcome.shortage is not None)
