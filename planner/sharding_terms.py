"""What the sharding program is made of: its variables and the terms of what it can minimise.

Input: seconds and bytes, one by one. Output: `Terms`, an objective for given micro-batches and
prices of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ir.graph import Node
from ir.layout import Placement
from ir.strategies import Strategy
from planner.phases import PHASES, Phase
from planner.solver import Model, Term, Variable

CLASS = "class"
"""Begins the name of state in `Terms.held`, whose other names are of gradients."""
Target: TypeAlias = "tuple[str, Phase | int]"
"""A list of `Terms`: its name with a phase or a variant, 0 if there is one."""
Move: TypeAlias = "tuple[int, str, Placement, Placement, bool, Phase]"
"""(variant, value, from, to, whether backward does it again, phase)."""


@dataclass(frozen=True, slots=True)
class Use:
    """Where a value of a variant is needed: by a node in a phase, or at the block's end; `once`:
    per step, not per micro-batch; `when`: in which of the phases that communicate it may be
    resharded."""

    number: int
    name: str
    node: Node | None = None
    phase: Phase = "forward"
    backward: bool = False
    once: bool = False
    when: Sequence[Phase] = ("move",)


@dataclass
class Terms:
    """The model under construction and its variables. What all calls take: `each`, seconds per
    micro-batch, by phase; `once`, seconds per step; `update`, the same of what ZeRO does on pieces:
    updating parameters, and summing gradients that stay whole; `sizes`, bytes held; `trained`,
    bytes of parameters; `summed`, seconds of adding up the gradients of one of several
    micro-batches, beyond what they take if they are cut evenly; `made`, bytes of results and of
    what is moved. `of_call`: per variant, what one call takes in one micro-batch; `held`: per
    variant, (tensor, bytes, variable) of the state of one call, one variable of each tensor being
    chosen; `trained_of`, `once_of` and `summed_of`: the same of parameters alone, of what is done
    once, and of adding up. `owners`: the variant of every row. `priced`: what these lists have
    beside what is the same for all sizes: (factor, the number of a price, variable)."""

    model: Model = field(default_factory=Model)
    each: dict[Phase, list[Term]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    once: list[Term] = field(default_factory=list)
    update: list[Term] = field(default_factory=list)
    sizes: list[Term] = field(default_factory=list)
    trained: list[Term] = field(default_factory=list)
    summed: list[Term] = field(default_factory=list)
    made: list[Term] = field(default_factory=list)
    of_call: dict[int, list[Term]] = field(default_factory=dict)
    held: dict[int, list[tuple[str, float, Variable]]] = field(default_factory=dict)
    trained_of: dict[int, list[Term]] = field(default_factory=dict)
    once_of: dict[int, list[Term]] = field(default_factory=dict)
    summed_of: dict[int, list[Term]] = field(default_factory=dict)
    chosen: dict[tuple[int, Node], list[tuple[Strategy, Variable]]] = field(default_factory=dict)
    layouts: dict[int, list[tuple[Placement, Variable]]] = field(default_factory=dict)
    paid: dict[Move, Variable] = field(default_factory=dict)
    owners: list[int] = field(default_factory=list)
    priced: dict[Target, list[tuple[float, int, Variable]]] = field(default_factory=dict)

    def at(self, prices: Sequence[float]) -> Terms:
        """The same program at other prices, by their numbers; it has what was added until then."""
        each: dict[Phase, list[Term]] = {phase: [] for phase in PHASES}
        of_call, once_of = dict[int, list[Term]](), dict[int, list[Term]]()
        once, update, made = list[Term](), [*self.update], list[Term]()
        for (name, key), rows in self.priced.items():
            terms = [(factor * prices[number], v) for factor, number, v in rows]
            match name, key:
                case "each", str():
                    each[key] += terms
                case "of_call", int():
                    of_call[key] = terms
                case "once_of", int():
                    once_of[key] = terms
                case _:
                    {"once": once, "update": update, "made": made}[name] += terms
        return replace(
            self, each=each, once=once, update=update, made=made, of_call=of_call, once_of=once_of
        )

    def add(self, target: Target, factor: float, price: int, variable: Variable) -> None:
        """To one of the lists, once prices are known."""
        self.priced.setdefault(target, []).append((factor, price, variable))

    def own(self, number: int) -> None:
        """Rows that were added since the last time are of this variant; -1: of all."""
        self.owners += [number] * (self.model.n_rows - len(self.owners))

    def rows_of(self, number: int) -> list[int]:
        """The rows of a variant, and those of all."""
        return [row for row, owner in enumerate(self.owners) if owner in (number, -1)]

    def cost(
        self, micro_batches: int, byte_price_s: float, exchange_s: float = 0.0, pieces: int = 1
    ) -> list[Term]:
        """Seconds per micro-batch, with so many seconds for a byte that is held, and for one that
        is trained, per step; `pieces`: that ZeRO cuts state into."""
        terms = (*self.each["early"], *self.once)
        once = [(seconds / micro_batches, v) for seconds, v in terms]
        once += [(seconds / micro_batches / pieces, v) for seconds, v in self.update]
        if exchange_s:
            once += [(size * exchange_s / micro_batches, v) for size, v in self.trained]
        held = [(size * byte_price_s, v) for size, v in self.sizes] if byte_price_s else []
        each = [term for phase in PHASES[:-1] for term in self.each[phase]]
        summed = self.summed if micro_batches > 1 else []
        return [*each, *summed, *once, *held]

    def spend(
        self, number: int, price: int, times: float, variable: Variable, phase: Phase
    ) -> None:
        """The seconds of every call of a variant, per micro-batch, which occurs so many times."""
        self.add(("each", phase), times, price, variable)
        self.add(("of_call", number), 1.0, price, variable)
