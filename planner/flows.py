"""The rows of the sharding program between where a value is made and where it is used.

Input: a model, for every use of a value the variables by placement that make and that ask for it.
Output: rows (2) and (3) of `planner.sharding_program`, and how much goes from which placement to
which, as sums of variables. Variables and rows that follow from others are left out:

    a value that has one placement, or is asked for in one, goes from or to there as others say
    of row (3) the last placement's: rows (2) add up to one, as what a node asks for does
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ir.layout import Placement
from ir.reshard import possible
from planner.phases import Phase
from planner.solver import Model, Variable

Sides: TypeAlias = "Mapping[Placement, list[Variable]]"
"""By placement the variables of which one is chosen."""
Flows: TypeAlias = "dict[tuple[Placement, Placement], list[Variable]]"
Move: TypeAlias = "tuple[int, str, Placement, Placement, bool, Phase]"
"""(variant, value, from, to, whether backward does it again, phase)."""


@dataclass(frozen=True)
class Use:
    """One use of a value of a variant, that is had and needed in so many ways. `again`: backward
    reshards it once more; `once`: it is resharded once per step, not per micro-batch; `when`: in
    which of the phases that communicate it may be."""

    number: int
    name: str
    have: Sides
    need: Sides
    again: bool = False
    once: bool = False
    when: tuple[Phase, ...] = ("move",)

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to choose."""
        return len(self.have) == 1 and len(self.need) == 1 and set(self.have) == set(self.need)

    def moves(self, a: Placement, b: Placement) -> list[Move]:
        """What pays for going from `a` to `b`: any one of these."""
        return [(self.number, self.name, a, b, self.again, phase) for phase in self.when]


def flows(model: Model, use: Use, is_allowed: Callable[[Placement, Placement], bool]) -> Flows:
    """How much goes from which placement to which."""
    have, need = use.have, use.need
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
