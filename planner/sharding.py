"""The sharding of all blocks on the tensor axis, by the program of `planner.sharding_program`.

Input: a graph, its variants, degrees, a cost model. Output: a `ShardingResult`: one strategy per
node, one layout per state tensor and boundary, and the proven bound of their seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from ir.graph import Graph
from ir.layout import Placement
from ir.lower import Degrees, Sharding
from ir.variants import Variant
from planner.cost import CostModel
from planner.habits import Habits
from planner.node_prices import NodePrices
from planner.sharding_program import ShardingProgram
from planner.solver import Relaxation, Solution, Term, Variable

TIE = 1e-6
"""Of the least seconds: what all that nodes may make counts as where shardings are equal."""


Programs: TypeAlias = "dict[tuple[int, tuple[frozenset[str], ...]], ShardingProgram]"
"""Of one model on one kind of device, by tensor degree and views that copy."""


@dataclass(frozen=True)
class ShardingResult:
    """A `Sharding` per variant, the layout of every state tensor, and the proven gap; of what was
    minimised the `seconds`, and the bytes of state that have a price beside them."""

    shardings: tuple[Sharding, ...]
    state: dict[str, Placement]
    objective_s: float
    bound_s: float
    variables: int
    seconds: float = 0.0
    held_bytes: float = 0.0


@dataclass
class Shardings:
    """Every sharding of a model at one tensor degree and number of rows.

    `early`: per variant the values that are made once per step; `copied`: views that copy; `known`:
    programs that were built for other rows, or other meshes, of this model without `habits`. A
    program is built once, and its relaxation solved again from the last solution; it mostly is
    integral, else the integer program is solved.
    """

    graph: Graph
    kinds: tuple[Variant, ...]
    degrees: Degrees
    cost: CostModel
    early: Sequence[Collection[str]] = ()
    copied: Sequence[Collection[str]] = ()
    habits: Habits | None = None
    known: Programs = field(default_factory=dict)

    @cached_property
    def prices(self) -> list[NodePrices]:
        """Of each variant's nodes."""
        if self.habits:
            return self.built.prices
        return [NodePrices(kind, self.degrees, self.cost) for kind in self.kinds]

    @cached_property
    def built(self) -> ShardingProgram:
        """The program; for other rows only what it costs is found again."""
        copied = tuple(frozenset(names) for names in self.copied)
        if not self.habits and (found := self.known.get((self.degrees.tensor, copied))):
            return found.at(self.degrees, self.cost, self.prices)
        found = ShardingProgram(
            self.graph, self.kinds, self.degrees, self.cost, habits=self.habits,
            twice=self.habits is not None, early=self.early,
            prices=() if self.habits else self.prices, copied=self.copied,
        )  # fmt: skip
        self.known[self.degrees.tensor, copied] = found
        return found

    @cached_property
    def relaxation(self) -> Relaxation:
        """Of the program, for any objective."""
        return Relaxation(self.built.program.model)

    @cached_property
    def parts(self) -> dict[int, Relaxation]:
        """Of single variants, as far as they were asked for."""
        return {}

    @cached_property
    def call_totals(self) -> dict[int, Sequence[Variable]]:
        """What a call of single variants takes and holds, of their relaxations."""
        return {}

    def relaxation_of(self, number: int) -> Relaxation:
        """For objectives of one variant alone: without the others' rows, where these are most."""
        program = self.built.program
        rows = program.rows_of(number)
        if 2 * len(rows) > program.model.n_rows:
            return self.relaxation
        if number not in self.parts:
            self.parts[number] = Relaxation(program.model, rows)
        return self.parts[number]

    def cheapest(
        self, micro_batches: int, byte_price_s: float = 0.0, *, exchange_s: float = 0.0,
        pieces: int = 1, sends: Sequence[Term] = (), gap: float = 0.001,
    ) -> ShardingResult:  # fmt: skip
        """The sharding of the least seconds per micro-batch, when a byte of parameters, gradients
        and optimizer state that is held costs so many, and a byte that is trained `exchange_s`
        per step on the data axis; `pieces`: that ZeRO cuts state into; with `sends` between
        pipeline ranks."""
        program = self.built.program
        terms = [*program.cost(micro_batches, byte_price_s, exchange_s, pieces), *sends]
        solution = self._smaller(terms, self.relaxation.minimum(terms))
        if not solution.is_integral:
            program.model.minimise(terms)
            solution = program.model.solve(gap)
        held_bytes = sum(size * solution[v] for size, v in program.sizes)
        seconds = solution.objective - byte_price_s * held_bytes
        return replace(_decoded(self.built, solution), seconds=seconds, held_bytes=held_bytes)

    def _smaller(self, terms: Sequence[Term], least: Solution) -> Solution:
        """Of the solutions that take as long as the least one, one whose nodes make less."""
        made = self.built.program.made
        price_s = TIE * least.bound / max(1.0, sum(size for size, _ in made))
        found = self.relaxation.minimum([*terms, *((price_s * size, v) for size, v in made)])
        seconds = sum(cost * found[v] for cost, v in terms)
        return replace(found, objective=seconds, bound=least.bound)


def shard(
    graph: Graph, kinds: tuple[Variant, ...], degrees: Degrees, cost: CostModel,
    *, byte_price_s: float = 0.0, gap: float = 0.001, habits: Habits | None = None,
) -> ShardingResult:  # fmt: skip
    """The cheapest sharding. `byte_price_s`: seconds per byte of parameters, gradients and
    optimizer state held. `habits`: what a hand-written program would not do."""
    found = Shardings(graph, kinds, degrees, cost, habits=habits)
    return found.cheapest(degrees.micro_batches, byte_price_s, gap=gap)


def _decoded(built: ShardingProgram, solution: Solution) -> ShardingResult:
    picked = {
        number: next(p for p, v in row if solution[v] > 0.5)
        for number, row in built.program.layouts.items()
    }
    found = tuple(_sharding(built, n, solution, picked) for n in range(len(built.kinds)))
    state = {name: picked[number] for name, number in built.ports.state.items()}
    return ShardingResult(found, state, solution.objective, solution.bound, len(solution.values))


def _sharding(
    built: ShardingProgram, number: int, solution: Solution, picked: dict[int, Placement]
) -> Sharding:
    block = built.kinds[number].block
    chosen = {
        node: next(s for s, v in built.program.chosen[number, node] if solution[v] > 0.5)
        for node in block.nodes
    }
    made: dict[str, Placement] = {}
    for node, option in chosen.items():
        results = [name for name in node.outputs if name in block.types]
        made |= dict(zip(results, option.results, strict=True))

    def port(kind: str, name: str) -> Placement:
        return picked[built.ports.of_value[number, kind, name]]

    def delivered(value: str, gradient: str) -> Placement:
        """Gradients of a parameter that one call uses are brought into its layout once a step."""
        if not built.is_state(number, value):
            return port("gradient", value)
        return made[gradient] if built.is_alone(number, value) else port("value", value)

    made |= {name: port("value", name) for name in block.inputs}
    made |= {t: port("gradient", o) for o, t in block.tangents}
    return Sharding(
        chosen, tuple(port("value", name) for name in block.inputs),
        tuple(port("value", name) for name in block.outputs),
        tuple(port("gradient", output) for output, _ in block.tangents),
        tuple(delivered(value, gradient) for value, gradient in block.gradients),
    )  # fmt: skip
