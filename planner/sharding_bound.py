"""What no sharding of a block beats: seconds of one call against the bytes of its state.

Input: a variant, degrees, a cost model. Output: `BlockBound`. The program of
`planner.sharding_program` for the variant alone, with free boundaries, is relaxed to real numbers.
What happens once per step is left out, also what may be made once for all micro-batches (`free`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ir.graph import Graph
from ir.lower import Degrees
from ir.variants import Variant
from planner.cost import CostModel
from planner.frontier import Frontier, frontier
from planner.node_prices import NodePrices
from planner.sharding_program import ShardingProgram
from planner.solver import Relaxation

PRICES, FEW_PRICES = 3, 2
"""Lines of the curve of a block that repeats, and of one that does not."""


@dataclass(frozen=True)
class BlockBound:
    """Of one call and micro-batch: (seconds of forward and backward, bytes of state), and the
    least seconds of each node by its first output."""

    curve: Frontier
    node_s: dict[str, float]


def block_bound(
    graph: Graph, kinds: tuple[Variant, ...], number: int, degrees: Degrees, cost: CostModel,
    free: Sequence[Collection[str]], *, exact: bool,
) -> BlockBound:  # fmt: skip
    """The curve of one variant; unless `exact`, a point: every node by its fastest strategy, and
    no state."""
    node_s = NodePrices(kinds[number], degrees, cost, free=free[number]).least_s()
    if not exact:
        return BlockBound(Frontier(((sum(node_s.values()), 0.0),), ()), node_s)
    built = ShardingProgram(graph, kinds, degrees, cost, only=number, free=free)
    held = _Held(built, number, Relaxation(built.program.model))
    many = len(kinds[number].calls) > 1
    return BlockBound(frontier(held, PRICES if many else FEW_PRICES), node_s)


def least_total_s(
    graph: Graph, kinds: tuple[Variant, ...], degrees: Degrees, cost: CostModel,
    free: Sequence[Collection[str]],
) -> float:  # fmt: skip
    """Of one micro-batch through all calls, when blocks agree on what goes between them."""
    program = ShardingProgram(graph, kinds, degrees, cost, free=free).program
    seconds = [
        (s * len(kinds[n].calls), v) for n, terms in program.of_call.items() for s, v in terms
    ]  # fmt: skip
    return Relaxation(program.model).minimum(seconds).bound


@dataclass(frozen=True)
class _Held:
    """The program, with the state of one call as its bytes."""

    built: ShardingProgram
    number: int
    relaxation: Relaxation

    def priced(self, price_s: float) -> tuple[float, float, float]:
        program = self.built.program
        seconds = program.of_call.get(self.number, [])
        held = [(size, v) for _, size, v in program.held.get(self.number, [])]
        found = self.relaxation.minimum([*seconds, *((price_s * size, v) for size, v in held)])
        total_s, held_bytes = (sum(x * found[v] for x, v in terms) for terms in (seconds, held))
        return total_s, held_bytes, found.bound

    def least_bytes(self) -> float:
        """Every state tensor and every gradient in its smallest layout."""
        least: dict[str, float] = {}
        for group, size, _ in self.built.program.held.get(self.number, []):
            least[group] = min(size, least.get(group, size))
        return sum(least.values())
