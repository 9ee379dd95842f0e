"""Random legal plans: any mesh, strategy of each operation, recomputation, stages, ZeRO stage,
offload.

Input: a promoted graph and a random generator. Output: a `Plan`. Boundary values that must agree
between blocks (`planner.ports`) get one random placement; what is legal is decided by `ir` alone.
"""

from collections.abc import Sequence
from random import Random

from ir.graph import Graph, references
from ir.layout import Placement
from ir.lower import Degrees, Lowered, Sharding
from ir.offload import OFFLOADS, offloads_activations
from ir.plan import Placed, Plan
from ir.reshard import possible
from ir.schedules import fits_rounds
from ir.spmd import lower_all
from ir.strategies import strategies
from ir.variants import Variant
from planner.ports import Ports, connect, divides, options
from tests.hand_plan import hand_plan, kinds_of, state_of

MOST_RANKS = 6
LABELS = ("a", "b")


def random_degrees(random: Random, rows: int, calls: int) -> tuple[int, Degrees]:
    """(stages, degrees); about one in three has several micro-batches."""
    tensor = random.choice([1, 2, 2, 3, 4])
    data = random.choice([d for d in (1, 1, 2, 3) if d * tensor <= MOST_RANKS])
    room = min(calls, MOST_RANKS // (data * tensor))
    pipeline = random.choice([p for p in (1, 2, 3) if p <= room])
    micro = random.choice([m for m in (1, 1, 1, 1, 2, 3) if rows % (data * m) == 0])
    return pipeline, Degrees(rows, data, tensor, micro)


def random_plan(
    graph: Graph, rows: int, random: Random, *, mesh: tuple[int, Degrees] | None = None,
    zero: int | None = None, order: tuple[str, int] | None = None, offload: str | None = None,
) -> Plan:  # fmt: skip
    """Stages, degrees, ZeRO stage, (schedule, stages per rank) and offload may be given. Raises
    `Refused` where the micro-batches of the draw would change the numbers."""
    batch_flow, kinds = kinds_of(graph)
    pipeline, degrees = mesh or random_degrees(random, rows, len(graph.calls))
    ports = connect(graph, kinds)
    shardings = random_shardings(graph, kinds, ports, degrees.tensor, random)
    lowered = lower_all(graph, batch_flow, kinds, shardings, degrees)
    keeps = [
        {label: _random_subset(graph, kind, piece, random) for label in LABELS}
        for kind, piece in zip(kinds, lowered, strict=True)
    ]
    schedule, virtual = order or random_schedule(
        random, pipeline, degrees.micro_batches, len(graph.calls)
    )
    stages = _random_stages(len(graph.calls), pipeline * virtual, random)
    zero = random.choice([0, 1, 2, 3]) if zero is None else zero
    if zero >= 2 and degrees.data > 1 and schedule == "zero-bubble":  # not offered together
        schedule = "1f1b"
    offload = random.choice(OFFLOADS) if offload is None else offload
    hosts = [{label: _random_hosted(piece, random) for label in LABELS} for piece in lowered]
    return hand_plan(
        graph, degrees, kinds, shardings, keeps, stages, schedule=schedule, virtual_stages=virtual,
        zero=zero, offload=offload, hosts=hosts if offloads_activations(offload) else (),
    )  # fmt: skip


def random_schedule(random: Random, pipeline: int, micro: int, calls: int) -> tuple[str, int]:
    """(schedule, stages per rank): any that has an order for these sizes."""
    options = [("1f1b", 1), ("gpipe", 1), ("zero-bubble", 1)]
    if pipeline > 1 and fits_rounds(pipeline, micro):
        options += [("interleaved", v) for v in (2, 3) if pipeline * v <= calls]
    return random.choice(options)


def _random_subset(graph: Graph, kind: Variant, piece: Lowered, random: Random) -> frozenset[str]:
    """Any of the values that backward reads; what it lacks is recomputed."""
    share = random.choice([0.0, 0.5, 1.0])
    own = [name for name in piece.saved if name not in state_of(graph, kind, piece)]
    return frozenset(name for name in own if random.random() < share)


def _random_hosted(piece: Lowered, random: Random) -> frozenset[str]:
    """Any of the values that may be held; those that are not make no difference."""
    share = random.choice([0.5, 1.0])
    names = [*piece.saved, *piece.block.inputs]
    return frozenset(name for name in names if random.random() < share)


def _random_stages(calls: int, pipeline: int, random: Random) -> list[tuple[Placed, ...]]:
    """Random cuts; within a stage a random switch between two kept sets."""
    cuts = [0, *sorted(random.sample(range(1, calls), pipeline - 1)), calls]
    stages = []
    for start, end in zip(cuts, cuts[1:], strict=False):
        switch = random.randint(start, end)
        halves = [Placed(start, switch - start, "a"), Placed(switch, end - switch, "b")]
        stages.append(tuple(half for half in halves if half.count))
    return stages


def random_shardings(
    graph: Graph, kinds: Sequence[Variant], ports: Ports, degree: int, random: Random
) -> tuple[Sharding, ...]:
    """A random strategy for every node, with boundary values that agree between blocks."""
    places = {
        number: random.choice(options(ports, number, tuple(kinds), degree))
        for number in sorted(set(ports.of_value.values()))
    }
    draws = [_Draw(graph, kinds, ports, n, places, random) for n in range(len(kinds))]
    return tuple(draw.run(degree) for draw in draws)


class _Draw:
    """The random sharding of one variant."""

    def __init__(self, graph: Graph, kinds: Sequence[Variant], ports: Ports, number: int,
                 places: dict[int, Placement], random: Random):  # fmt: skip
        self.graph, self.kind, self.ports, self.number = graph, kinds[number], ports, number
        self.places, self.random = places, random
        self.block = self.kind.block

    def run(self, degree: int) -> Sharding:
        block, factors = self.block, self.kind.factors
        have = {name: self._port("value", name) for name in block.inputs}
        have |= {tangent: self._port("gradient", output) for output, tangent in block.tangents}
        leaves = [leaf for leaf in factors.size if divides(factors, leaf, degree)]
        wanted = self._wanted()
        bold = self.random.random()
        chosen = {}
        for node in block.nodes:
            names = [ref.name for ref in references((node.args, node.kwargs))]
            results = [name for name in node.outputs if name in block.types]
            legal = [
                option for option in strategies(node, factors, leaves)
                if all(possible(have[n], p) for n, p in zip(names, option.operands, strict=True))
                and all(
                    possible(p, want) for n, p in zip(results, option.results, strict=True)
                    for want in wanted.get(n, ())
                )
            ]  # fmt: skip
            divided = legal[1:] or legal
            picked = self.random.choice(divided if self.random.random() < bold else legal)
            chosen[node] = picked
            have |= dict(zip(results, picked.results, strict=True))
        return Sharding(
            chosen, tuple(self._port("value", name) for name in block.inputs),
            tuple(self._port("value", name) for name in block.outputs),
            tuple(self._port("gradient", output) for output, _ in block.tangents),
            tuple(self._delivered(value, have[grad]) for value, grad in block.gradients),
        )  # fmt: skip

    def _port(self, kind: str, name: str) -> Placement:
        return self.places[self.ports.of_value[self.number, kind, name]]

    def _wanted(self) -> dict[str, list[Placement]]:
        """The placements in which outputs and gradients are delivered."""
        wanted: dict[str, list[Placement]] = {}
        for name in self.block.outputs:
            wanted.setdefault(name, []).append(self._port("value", name))
        for value, gradient in self.block.gradients:
            kind = "value" if self._states(value) else "gradient"
            wanted.setdefault(gradient, []).append(self._port(kind, value))
        return wanted

    def _states(self, name: str) -> set[str]:
        """The state tensors that an input is, over all calls of the variant."""
        at = self.block.inputs.index(name)
        values = {self.graph.calls[i].arguments[at] for i in self.kind.calls}
        return values & set(self.ports.state)

    def _delivered(self, value: str, made: Placement) -> Placement:
        """A parameter that one call uses may keep its gradient as it was made until the step."""
        states = self._states(value)
        if not states:
            return self._port("gradient", value)
        alone = all(self.ports.uses[name] == 1 for name in states)
        place = self._port("value", value)
        return self.random.choice([made, place]) if alone else place
