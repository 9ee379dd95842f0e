"""The rows of the sharding program between where a value is made and where it is used.

Input: a model; of one use of a value the variables, by placement, that make it and that ask for it.
Output: rows (2) and (3) of `planner.sharding_program`, and how much goes from which placement to
which, as sums of variables. Variables and rows that follow from others are left out:

    a value that has one placement, or is asked for in one, goes from or to there as others say
    of row (3) the last placement's: rows (2) add up to one, as what a node asks for does
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from ir.layout import Placement
from ir.reshard import possible
from planner.solver import Model, Variable

Side: TypeAlias = "Mapping[Placement, list[Variable]]"
"""By placement variables, of which one is chosen."""
Flows: TypeAlias = "dict[tuple[Placement, Placement], list[Variable]]"


def flows(
    model: Model, have: Side, need: Side, is_allowed: Callable[[Placement, Placement], bool]
) -> Flows:
    """How much goes from which placement to which."""
    pairs = [(a, b) for a in have for b in need if possible(a, b) and is_allowed(a, b)]
    if len(pairs) == len(have) * len(need) and 1 in (len(have), len(need)):
        return {(a, b): need[b] if len(have) == 1 else have[a] for a, b in pairs}
    edges = {pair: [model.variable(0, 1)] for pair in pairs}
    for a, variables in have.items():
        _balance(model, [e for (x, _), (e,) in edges.items() if x == a], variables)
    for b, variables in [*need.items()][:-1]:
        _balance(model, [e for (_, y), (e,) in edges.items() if y == b], variables)
    return edges


def _balance(model: Model, edges: Sequence[Variable], variables: Sequence[Variable]) -> None:
    model.constrain([*((1.0, e) for e in edges), *((-1.0, v) for v in variables)], 0, 0)
