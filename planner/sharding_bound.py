"""What no sharding of a block beats: seconds of one call against the bytes of its state.

Input: the shardings of a model, a variant. Output: `BlockBound`. The program of
`planner.sharding_program` is relaxed to real numbers, and nothing but the variant counts. What
happens once per step is left out, also what may be made once for all micro-batches (`early`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import mul
from typing import TypeAlias

from planner.frontier import Frontier, frontier
from planner.phases import PHASES, least_parts
from planner.sharding import Shardings
from planner.sharding_terms import CLASS, Terms
from planner.solver import Model, Relaxation, Variable, summed

Rates: TypeAlias = tuple[float, ...]
RATES = (*PHASES, "once", "update", "trained", "summed")
"""How often each phase, what is done once, updating, a byte of parameters, and what adding up
gradients takes beyond an even cut count."""
ONCE = ("early", "once", "update")
EVENLY: Rates = tuple(float(name in PHASES and name != "early") for name in RATES)
"""Every phase of a micro-batch once."""
WITH_EARLY: Rates = tuple(float(name in PHASES) for name in RATES)
"""The same with what precedes the first one."""
CLOSE = 0.003
"""Relative; how near a lower bound of a total has to be to an upper one to do for it."""
ROUGH = 0.02
"""The same, for a first look."""
PRICES, FEW_PRICES = 4, 2
"""Lines of the curve of a block that repeats, and of one that does not."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How a candidate counts what blocks take: `sums`, gradients are added up; `once`, how often
    per micro-batch what is done once per step; `exchange_s`, seconds of a byte of parameters on the
    data axis, per micro-batch; parts of state and gradients that are held undivided."""

    sums: bool = False
    once: float = 0.0
    exchange_s: float = 0.0
    state_part: float = 1.0
    gradient_part: float = 1.0


ANYWHERE = Rules(state_part=0.0, gradient_part=0.0)
"""Where no state is held, and only seconds count."""


@dataclass(frozen=True)
class BlockBound:
    """Of one call and micro-batch: (seconds of forward and backward, bytes of state), and the
    least seconds of each node by its first output."""

    curve: Frontier
    node_s: dict[str, float]


def block_bound(
    shardings: Shardings, number: int, early: Collection[str], rules: Rules | None = None
) -> BlockBound:
    """The curve of one variant under `rules`; without them a point: every node by its fastest
    strategy, and no state. `early` values cost nothing."""
    node_s = shardings.prices[number].least_s() | dict.fromkeys(early, 0.0)
    if rules is None:
        return BlockBound(Frontier(((sum(node_s.values()), 0.0),), ()), node_s)
    prices = PRICES if len(shardings.kinds[number].calls) > 1 else FEW_PRICES
    return BlockBound(frontier(_Held(shardings, number, rules), prices), node_s)


@dataclass
class LeastTotals:
    """Lower bounds of the least sum over all calls, whose blocks agree on what goes between them,
    at given `RATES`.

    A choice takes some seconds (or bytes) y of each kind, and rates * y in all. So no choice takes
    less at some rates than the least rates * y with the known totals kept at all other rates, and
    the best one no more than what was best at others. A program is solved only where these two lie
    apart.
    """

    shardings: Shardings
    known: dict[Rates, tuple[float, Rates]] = field(default_factory=dict)

    def exactly(self, rates: Rates) -> float:
        """The least total of the relaxed program; without a tensor axis, of what there is."""
        if self.shardings.degrees.tensor == 1:
            return sum(rate * part for rate, part in zip(rates, self._least, strict=True))
        if rates not in self.known:
            self.known[rates] = total, _ = self._solved(rates)
            program, kinds = self._kinds
            program.constrain(zip(rates, kinds, strict=True), total)
        return self.known[rates][0]

    def at(self, rates: Rates) -> float:
        """Within `CLOSE` of the least total."""
        return self._within(rates, CLOSE)

    def rough(self, rates: Rates) -> float:
        """Within `ROUGH` of the least total without what is done once, before the first micro-batch
        or after the last."""
        counts = [0.0 if name in ONCE else rate for name, rate in zip(RATES, rates, strict=True)]
        return self._within(tuple(counts), ROUGH)

    def _within(self, rates: Rates, gap: float) -> float:
        if self.known and rates not in self.known and min(rates) >= 0:
            terms = [(rate, v) for rate, v in zip(rates, self._kinds[1], strict=True)]
            low_s = self._kinds[0].minimum(terms, only=()).bound
            if low_s >= (1 - gap) * self._above(rates):
                return low_s
        return self.exactly(rates)

    def _above(self, rates: Rates) -> float:
        return min(
            sum(rate * part for rate, part in zip(rates, parts, strict=True))
            for _, parts in self.known.values()
        )

    def _solved(self, rates: Rates) -> tuple[float, Rates]:
        """The total, and its parts at a rate of 1."""
        totals = self._totals
        found = self.shardings.relaxation.minimum(zip(rates, totals, strict=True), only=totals)
        return found.bound, tuple(found[v] for v in totals)

    @cached_property
    def _kinds(self) -> tuple[Relaxation, list[Variable]]:
        """What choices take of each kind: as much as every node and parameter alone at least, and
        the totals that are known."""
        model = Model()
        kinds = [model.variable(least) for least in self._least]
        return Relaxation(model), kinds

    @cached_property
    def _least(self) -> Rates:
        """Of each kind alone."""
        found = self.shardings
        least = least_parts(
            found.graph, found.kinds, found.prices, found.early, found.degrees.tensor, found.cost
        )
        return tuple(least.get(name, 0.0) for name in RATES)

    @cached_property
    def _totals(self) -> list[Variable]:
        program = self.shardings.built.program
        once = program.once, program.update, program.trained
        parts = [*program.each.values(), *once, program.summed]
        return [self.shardings.relaxation.total(terms) for terms in parts]


def seconds_of(program: Terms, number: int, rules: Rules) -> dict[Variable, float]:
    """Of one call of a variant, by variable; those that take none are left out."""
    seconds = [*program.of_call.get(number, [])]
    if rules.sums:
        seconds += program.summed_of.get(number, [])
    if rules.once:
        seconds += [(rules.once * s, v) for s, v in program.once_of.get(number, [])]
    if rules.exchange_s:
        trained = program.trained_of.get(number, [])
        seconds += [(rules.exchange_s * size, v) for size, v in trained]
    return {v: c for c, v in summed(seconds) if c}


@dataclass(frozen=True)
class _Held:
    """The program of all blocks, with the seconds and the state of one call alone: what the other
    blocks take does not count."""

    shardings: Shardings
    number: int
    rules: Rules

    def priced(self, price_s: float) -> tuple[float, float, float]:
        relaxation, totals = self.shardings.relaxation_of(self.number), self._totals
        seconds, held = self._seconds, self._bytes
        terms = [*zip(seconds, totals, strict=True)]
        terms += [(price_s * part, v) for part, v in zip(held, totals, strict=True)]
        found = relaxation.minimum(terms, only=totals)
        parts = [found[v] for v in totals]
        total_s, total_bytes = (sum(map(mul, of, parts)) for of in (seconds, held))
        return total_s, total_bytes, found.bound

    def least_bytes(self) -> float:
        """Every state tensor and every gradient in its smallest layout."""
        least: dict[str, float] = {}
        for group, size, _ in self._held():
            least[group] = min(size, least.get(group, size))
        return sum(least.values())

    @property
    def _seconds(self) -> Rates:
        """How often each of the totals counts as seconds."""
        rules = self.rules
        return 1.0, float(rules.sums), rules.once, rules.exchange_s, 0.0, 0.0

    @property
    def _bytes(self) -> Rates:
        """The same as bytes."""
        return 0.0, 0.0, 0.0, 0.0, self.rules.state_part, self.rules.gradient_part

    @property
    def _totals(self) -> Sequence[Variable]:
        """Seconds of a call in one micro-batch, of adding up gradients, of what is done once; bytes
        of parameters, of state, of gradients."""
        known, number = self.shardings.call_totals, self.number
        if number not in known:
            program = self.shardings.built.program
            held = held_of(program, number, Rules())
            of_calls = program.of_call, program.summed_of, program.once_of, program.trained_of
            kinds = [of_call.get(number, []) for of_call in of_calls]
            for is_state in (True, False):
                kinds.append([(s, v) for name, s, v in held if name.startswith(CLASS) == is_state])
            relaxation = self.shardings.relaxation_of(number)
            known[number] = [relaxation.total(terms) for terms in kinds]
        return known[number]

    def _held(self) -> list[tuple[str, float, Variable]]:
        return held_of(self.shardings.built.program, self.number, self.rules)


def held_of(program: Terms, number: int, rules: Rules) -> list[tuple[str, float, Variable]]:
    """(tensor, bytes, variable) of the state and gradients of one call that are not divided."""
    parts = {True: rules.state_part, False: rules.gradient_part}
    held = program.held.get(number, [])
    return [(group, size * parts[group.startswith(CLASS)], v) for group, size, v in held]
