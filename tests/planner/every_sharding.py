"""Every sharding of a small model on a tensor axis, one node after the other.

Input: a workload, degrees, a cost model, a limit. Output: the shardings whose nodes and
communication take less than the limit for one micro-batch, each with those seconds; what happens
once per step is shared by the micro-batches. The limit is asked for as soon as the stored layouts
are known. No other costs are counted, so a sharding never takes less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from math import inf
from typing import TypeAlias

from ir.graph import Node
from ir.layout import REPLICATE, Layout, Placement
from ir.lower import Degrees, Sharding
from ir.reshard import possible, step
from ir.strategies import Strategy
from planner.cost import CostModel
from planner.node_prices import NodePrices
from planner.pieces import whole
from planner.ports import Ports, connect, options
from planner.sharding import ShardingResult, Shardings
from planner.workload import Workload

Picked: TypeAlias = "dict[int, Placement]"
Move: TypeAlias = "tuple[str, Placement, Placement]"
LimitOf: TypeAlias = "Callable[[dict[str, Placement]], float]"
"""The seconds of a micro-batch that are not worth passing, from the layouts of the state."""


def every_sharding(
    work: Workload, degrees: Degrees, cost: CostModel, limit_of: LimitOf
) -> Iterator[tuple[float, ShardingResult]]:
    """With their seconds."""
    if degrees.tensor == 1:
        yield 0.0, whole(work.graph, work.kinds)
    else:
        yield from _Walk(work, degrees, cost, limit_of).run()


def offered_shardings(
    work: Workload, degrees: Degrees, cost: CostModel, limit_of: LimitOf
) -> Iterator[tuple[float, ShardingResult]]:
    """Only those that are the cheapest at some price of memory, from none to where only bytes
    count."""
    if degrees.tensor == 1:
        yield 0.0, whole(work.graph, work.kinds)
        return
    found = Shardings(work.graph, work.kinds, degrees, cost, work.early)
    known = set[tuple[object, ...]]()
    for price_s in (0.0, *(10.0**power for power in range(-16, -5))):
        result = found.cheapest(degrees.micro_batches, price_s)
        key = tuple(sharding.key for sharding in result.shardings)
        if key not in known:
            known.add(key)
            yield 0.0, result


@dataclass
class _Walk:
    """Variant by variant and node by node; see the module's docstring."""

    work: Workload
    degrees: Degrees
    cost: CostModel
    limit_of: LimitOf
    limit_s: float = 0.0
    ports: Ports = field(init=False)
    prices: list[NodePrices] = field(init=False)
    rest_s: list[list[float]] = field(init=False)
    alone: list[dict[str, str]] = field(init=False)
    moved_s: dict[tuple[int, str, Placement, Placement], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = self.work.kinds
        self.ports = connect(self.work.graph, kinds)
        self.prices = [NodePrices(kind, self.degrees, self.cost) for kind in kinds]
        self.alone = [
            {g: v for v, g in kind.block.gradients if self._is_alone_state(number, v)}
            for number, kind in enumerate(kinds)
        ]
        self.rest_s, after_s = [], 0.0
        for number in reversed(range(len(kinds))):
            row = [after_s]
            for node in reversed(kinds[number].block.nodes):
                least_s = min(seconds for _, seconds in self._options(number, node))
                row.append(row[-1] + len(kinds[number].calls) * least_s)
            self.rest_s.append(row[::-1])
            after_s = row[-1]
        self.rest_s.reverse()

    def run(self) -> Iterator[tuple[float, ShardingResult]]:
        numbers = sorted(set(self.ports.of_value.values()))
        free = [options(self.ports, n, self.work.kinds, self.degrees.tensor) for n in numbers]
        for places in product(*free):
            picked = dict(zip(numbers, places, strict=True))
            state = {name: picked[number] for name, number in self.ports.state.items()}
            self.limit_s = self.limit_of(state)
            for seconds, found in self._variants(0, picked, 0.0):
                yield seconds, ShardingResult(found, state, seconds, 0.0, 0)

    def _variants(
        self, number: int, picked: Picked, spent_s: float
    ) -> Iterator[tuple[float, tuple[Sharding, ...]]]:
        if spent_s >= self.limit_s:
            return
        if number == len(self.work.kinds):
            yield spent_s, ()
            return
        block, port = self.work.kinds[number].block, self.ports.of_value
        have = {name: picked[port[number, "value", name]] for name in block.inputs}
        have |= {t: picked[port[number, "gradient", o]] for o, t in block.tangents}
        for seconds, chosen, made in self._nodes(number, 0, {}, have, frozenset(), spent_s, picked):
            sharding = self._sharding(number, picked, chosen, made)
            for total_s, others in self._variants(number + 1, picked, seconds):
                yield total_s, (sharding, *others)

    def _nodes(
        self, number: int, place: int, chosen: dict[Node, Strategy], have: dict[str, Placement],
        paid: frozenset[Move], spent_s: float, picked: Picked,
    ) -> Iterator[tuple[float, dict[Node, Strategy], dict[str, Placement]]]:  # fmt: skip
        if spent_s + self.rest_s[number][place] >= self.limit_s:
            return
        kind = self.work.kinds[number]
        if place == len(kind.block.nodes):
            moves = self._deliveries(number, picked, have)
            if moves is not None:
                more_s = self._moves_s(number, moves - paid)
                yield spent_s + len(kind.calls) * more_s, chosen, have
            return
        node = kind.block.nodes[place]
        made = [name for name in node.outputs if name in kind.block.types]
        for option, seconds in self._options(number, node):
            wants = list(zip(node.operands, option.operands, strict=True))
            if not all(possible(have[name], want) for name, want in wants):
                continue
            moves = {(name, have[name], want) for name, want in wants} - paid
            seconds += sum(self._once_s(number, *pair, picked)
                           for pair in zip(made, option.results, strict=True))
            total_s = spent_s + len(kind.calls) * (seconds + self._moves_s(number, moves))
            yield from self._nodes(
                number, place + 1, chosen | {node: option},
                have | dict(zip(made, option.results, strict=True)), paid | moves, total_s, picked,
            )  # fmt: skip

    def _deliveries(
        self, number: int, picked: Picked, have: dict[str, Placement]
    ) -> frozenset[Move] | None:
        """What every micro-batch hands on; None if it can't be in its layout."""
        block, port = self.work.kinds[number].block, self.ports.of_value
        wanted = [(name, picked[port[number, "value", name]]) for name in block.outputs]
        once = []
        for value, gradient in block.gradients:
            if self._is_state(number, value):
                once.append((gradient, picked[port[number, "value", value]]))
            else:
                wanted.append((gradient, picked[port[number, "gradient", value]]))
        if not all(possible(have[name], want) for name, want in (*wanted, *once)):
            return None
        return frozenset((name, have[name], want) for name, want in wanted)

    def _once_s(self, number: int, name: str, have: Placement, picked: Picked) -> float:
        """Of a value that is the gradient of a parameter which one call uses, brought into the
        parameter's layout: per micro-batch, and summed as pieces if ZeRO divides it."""
        value = self.alone[number].get(name)
        if value is None:
            return 0.0
        want = picked[self.ports.of_value[number, "value", value]]
        if not possible(have, want):
            return inf
        seconds = self._move_s(number, (name, have, want))
        part = self.degrees.data if step(have, want) == "all_reduce" else 1
        return seconds / part / self.degrees.micro_batches

    def _sharding(
        self, number: int, picked: Picked, chosen: dict[Node, Strategy], made: dict[str, Placement]
    ) -> Sharding:
        """Gradients of a parameter that one call uses stay as they are made until the step ends."""
        block, port = self.work.kinds[number].block, self.ports.of_value

        def delivered(value: str, gradient: str) -> Placement:
            if not self._is_state(number, value):
                return picked[port[number, "gradient", value]]
            return made[gradient] if self._is_alone_state(number, value) else made_in(value)

        def made_in(value: str) -> Placement:
            return picked[port[number, "value", value]]

        return Sharding(
            chosen, tuple(map(made_in, block.inputs)), tuple(map(made_in, block.outputs)),
            tuple(picked[port[number, "gradient", output]] for output, _ in block.tangents),
            tuple(delivered(value, gradient) for value, gradient in block.gradients),
        )  # fmt: skip

    def _options(self, number: int, node: Node) -> list[tuple[Strategy, float]]:
        """Strategies with their seconds per micro-batch."""
        times = self._times(number, node.outputs[0])
        return [(option, s / times) for option, s in self.prices[number].options(node)]

    def _times(self, number: int, name: str) -> int:
        """How many micro-batches share a value, which may be made before the first one."""
        return self.degrees.micro_batches if name in self.work.early[number] else 1

    def _arguments(self, number: int, name: str) -> list[str]:
        """The graph's values that are this input of a variant."""
        kind = self.work.kinds[number]
        place = kind.block.inputs.index(name)
        return [self.work.graph.calls[i].arguments[place] for i in kind.calls]

    def _is_state(self, number: int, name: str) -> bool:
        return self._arguments(number, name)[0] in self.ports.state

    def _is_alone_state(self, number: int, name: str) -> bool:
        uses = self.ports.uses
        return all(uses.get(value) == 1 for value in self._arguments(number, name))

    def _moves_s(self, number: int, moves: frozenset[Move] | set[Move]) -> float:
        return sum(self._move_s(number, move) for move in moves)

    def _move_s(self, number: int, move: Move) -> float:
        key = (number, *move)
        if key not in self.moved_s:
            self.moved_s[key] = self._collective_s(number, *move) / self._times(number, move[0])
        return self.moved_s[key]

    def _collective_s(self, number: int, name: str, have: Placement, want: Placement) -> float:
        op = step(have, want)
        if op is None:
            return 0.0
        place = self.work.kinds[number].spread.place[name]
        layout = Layout(place, have if op == "all_to_all" else REPLICATE)
        size_bytes = self.prices[number].bytes_of(name, layout)
        return self.cost.collective_s(op, size_bytes, "tensor")
