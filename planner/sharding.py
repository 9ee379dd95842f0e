"""The sharding of all blocks on the tensor axis, by the program of `planner.sharding_program`.

Input: a graph, its variants, degrees, a cost model. Output: a `ShardingResult`: one strategy per
node, one layout per state tensor and boundary, and the proven bound of their seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from ir.graph import Graph
from ir.layout import Placement
from ir.lower import Degrees, Sharding
from ir.variants import Variant
from planner.cost import CostModel
from planner.sharding_program import Habits, ShardingProgram
from planner.solver import Solution


@dataclass(frozen=True)
class ShardingResult:
    """A `Sharding` per variant, the layout of every state tensor, and the proven gap."""

    shardings: tuple[Sharding, ...]
    state: dict[str, Placement]
    objective_s: float
    bound_s: float
    variables: int


def shard(
    graph: Graph, kinds: tuple[Variant, ...], degrees: Degrees, cost: CostModel,
    *, byte_price_s: float = 0.0, gap: float = 0.001, habits: Habits | None = None,
) -> ShardingResult:  # fmt: skip
    """The cheapest sharding. `byte_price_s`: seconds per byte of parameters, gradients and
    optimizer state held. `habits`: what a hand-written program would not do."""
    built = ShardingProgram(
        graph, kinds, degrees, cost, byte_price_s=byte_price_s, habits=habits,
        twice=habits is not None,
    )  # fmt: skip
    program = built.program
    program.model.minimise(program.cost)
    return _decoded(built, program.model.solve(gap))


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
