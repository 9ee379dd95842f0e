"""The integer program of sharding: its variables and rows.

Nodes i of the joint graphs, strategies p of a node, layouts l of a value:

    minimise  sum_ip compute[i,p] s[i,p] + sum_ilm reshard[i,lm] r[i,lm] + update[c,l] y[c,l]
    (1)  sum_p s[i,p] = 1                                  one strategy per node
    (2)  sum_m e[ij,lm] = sum_{p gives l} s[i,p]           tight linking, producer side
    (3)  sum_l e[ij,lm] = sum_{q takes m} s[j,q]           tight linking, consumer side
    (4)  r[i,lm] >= e[ij,lm]                               a reshard is paid once: it may be kept
    (5)  sum_l y[c,l] = 1                                  one layout per boundary class
    (6)  a block's input has its class' layout; outputs and gradients are delivered in it

Sources: the formulation is Alpa's and AutoParallel's with the tight linking; (4) and (5) let it
find sequence-sharded norms and residuals by itself. Costs of repeated blocks count as often as
they occur; what happens once per step counts 1 / micro-batches. A program is built once for all
micro-batch counts and prices of memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from copy import copy
from functools import cache, partial
from typing import Any, TypeAlias

from ir.graph import Graph
from ir.layout import PARTIAL, REPLICATE, Layout, Placement, Shard
from ir.lower import Degrees
from ir.reshard import step
from ir.variants import Variant
from planner.cost import CostModel
from planner.flows import flows
from planner.habits import Habits
from planner.node_prices import NodePrices
from planner.phases import Phase, node_phases, update_s
from planner.ports import Port, Ports, connect, options
from planner.program_prices import Price, ProgramPrices
from planner.sharding_terms import CLASS, Move, Terms, Use
from planner.solver import Variable

HELD_TENSORS = 3
"""A parameter and two tensors of optimizer state; its gradient is priced where it is made."""
SEVERAL = 2
"""Micro-batches, so that gradients are added up."""
Flow: TypeAlias = "tuple[Use, Placement, Placement, list[Variable]]"
"""A use of a value, where it is, where it is needed, and a sum that is 1 if it goes there."""


def _phases(*, late: bool, prompt: bool) -> tuple[Phase, ...]:
    """When a value may be resharded for the weights' half, or for what comes before; `prompt`: it
    is needed there as well."""
    if not late:
        return ("move",)
    return ("move", "late move") if prompt else ("late move",)


class ShardingProgram:
    """The program of all blocks; of `degrees` only the tensor degree and the rows matter.

    `twice`: what forward reshards is not kept: backward does it again. `early`: values of each
    variant that are made once per step, before the first micro-batch. `prices`: of each variant's
    nodes, where they are known. `copied`: views of each variant that have to copy what they view,
    unless it was just moved.
    """

    def __init__(
        self, graph: Graph, kinds: tuple[Variant, ...], degrees: Degrees, cost: CostModel,
        *, habits: Habits | None = None, twice: bool = False, early: Sequence[Collection[str]] = (),
        prices: Sequence[NodePrices] = (), copied: Sequence[Collection[str]] = (),
    ) -> None:  # fmt: skip
        self.graph, self.kinds, self.degrees, self.cost = graph, kinds, degrees, cost
        self.habits, self.twice = habits or Habits(), twice
        self.early, self.copied = (found or ((),) * len(kinds) for found in (early, copied))
        self.asked: dict[Price, int] = {}
        self.ports: Ports = connect(graph, kinds)
        self.places = [kind.spread.place for kind in kinds]
        self.program = Terms()
        self.flows: list[Flow] = []
        numbers = range(len(kinds))
        self._classes()
        self.program.own(-1)
        self.prices = [*prices] or [self._node_prices(n) for n in numbers]
        for number in numbers:
            self._nodes(number)
            self.program.own(number)
        for number in numbers:
            self._edges(number)
            self._deliveries(number)
            self.program.own(number)
        self._pay()
        self.terms = self.program
        self.program = self.terms.at([*map(self.sizes.of, self.asked)])

    def at(
        self, degrees: Degrees, cost: CostModel, prices: Sequence[NodePrices]
    ) -> ShardingProgram:
        """The same for other rows, where the same moves are free and the same views copy."""
        made = copy(self)
        made.degrees, made.cost, made.prices = degrees, cost, [*prices]
        made.program = self.terms.at([*map(made.sizes.of, self.asked)])
        return made

    @property
    def sizes(self) -> ProgramPrices:
        """Prices of these rows."""
        return ProgramPrices(self.kinds, self.places, self.prices, self.cost)

    def _price(self, *asked: Any) -> int:
        """The number of a price."""
        return self.asked.setdefault(asked, len(self.asked))

    def _node_prices(self, number: int) -> NodePrices:
        whole = self._crossing_leaves(number) if self.habits.whole_activations else ()
        return NodePrices(self.kinds[number], self.degrees, self.cost, whole)

    def _classes(self) -> None:
        """(5), and what holding and updating a parameter costs."""
        types = {state.name: state for state in self.graph.state}
        held: dict[int, list[str]] = {}
        for name, number in self.ports.state.items():
            held.setdefault(number, []).append(name)
        for number in sorted(set(self.ports.of_value.values())):
            row = []
            for place in self._options(number, stored=number in held):
                variable = self.program.model.binary()
                row.append((place, variable))
                updated_s = all_kept = trained = 0.0
                for name in held.get(number, ()):
                    kind = types[name]
                    share = self.degrees.tensor if isinstance(place, Shard) else 1
                    size = kind.type.bytes(self.degrees.batch) / share
                    kept = size * (HELD_TENSORS if kind.trainable else 1)
                    all_kept += kept
                    if kind.trainable:
                        updated_s += update_s(self.cost, size)
                        trained += size
                self.program.update.append((updated_s, variable))
                self.program.sizes.append((all_kept, variable))
                self.program.trained.append((trained, variable))
                if all_kept:
                    self._hold(number, all_kept, trained, variable)
            self.program.layouts[number] = row
            self.program.model.constrain([(1.0, v) for _, v in row], 1, 1)

    def _hold(
        self, number: int, kept_bytes: float, trained_bytes: float, variable: Variable
    ) -> None:
        """State belongs to its first user, in equal parts to all calls."""
        owner = self.ports.members(number)[0][0]
        calls = len(self.kinds[owner].calls)
        self.program.trained_of.setdefault(owner, []).append((trained_bytes / calls, variable))
        self.program.held.setdefault(owner, []).append(
            (f"{CLASS} {number}", kept_bytes / calls, variable)
        )

    def _options(self, number: int, *, stored: bool) -> tuple[Placement, ...]:
        """Placements of a boundary class; only state is cut if activations have to be whole."""
        if self.habits.whole_activations and not stored:
            return (REPLICATE,)
        found = options(self.ports, number, self.kinds, self.degrees.tensor)
        if self.habits.cut_activations and not stored:
            return tuple(place for place in found if place != REPLICATE) or found
        if not (self.habits.cut_weights and stored and self._is_matrix(number)):
            return found
        return tuple(p for p in found if self._is_usable_cut(number, p)) or (REPLICATE,)

    def _is_usable_cut(self, number: int, place: Placement) -> bool:
        """Whether state may be stored cut like this and used so by some block."""
        if not isinstance(place, Shard):
            return False
        return not self.habits.whole_activations or any(
            self.kinds[variant].factors.leaf_of(name, place) not in self._crossing_leaves(variant)
            for variant, _, name in self.ports.members(number)
        )

    def _is_matrix(self, number: int) -> bool:
        """Whether a class holds trained tensors of two or more dims."""
        names = {name for name, found in self.ports.state.items() if found == number}
        return any(
            item.trainable and len(item.type.shape) > 1
            for item in self.graph.state
            if item.name in names
        )

    def _crossing_leaves(self, number: int) -> set[int]:
        """The factors of the activations that enter or leave a block."""
        block, factors = self.kinds[number].block, self.kinds[number].factors
        crossing = [n for n in block.inputs if not self.is_state(number, n)] + [*block.outputs]
        return {leaf for name in crossing for leaf in factors.leaves(name)}

    def _nodes(self, number: int) -> None:
        """(1), with the compute cost of each strategy."""
        variant, program = self.kinds[number], self.program
        phases = node_phases(self.graph, variant)
        for i, node in enumerate(variant.block.nodes):
            row, backward = [], i >= variant.block.n_forward
            for place, (option, _) in enumerate(self.prices[number].options(node)):
                variable = program.model.binary()
                row.append((option, variable))
                price = self._price("node", number, i, place)
                self._spend(number, node.outputs[0], price, variable, phases[node])
                names = [name for name in node.outputs if name in variant.block.types]
                for name, result in zip(names, option.results, strict=True):
                    self._make(number, name, result, variable, backward=backward)
            program.chosen[number, node] = row
            program.model.constrain([(1.0, v) for _, v in row], 1, 1)

    def _make(
        self, number: int, name: str, place: Placement, variable: Variable, *, backward: bool
    ) -> None:
        """A value in all calls. Partial sums are not kept, but added up first; what forward makes
        counts twice, since it may be kept for backward."""
        if place != PARTIAL:
            price = self._price("bytes", number, name, Layout(self.places[number][name], place))
            times = len(self.kinds[number].calls) * (1 if backward else 2)
            self.program.add(("made", 0), float(times), price, variable)

    def _spend(
        self, number: int, name: str, price: int, variable: Variable, phase: Phase
    ) -> None:
        """The seconds of every call of a variant for a value: per micro-batch, or once."""
        calls = len(self.kinds[number].calls)
        if name in self.early[number]:
            self.program.add(("each", "early"), calls, price, variable)
        else:
            self.program.spend(number, price, calls, variable, phase)

    def _edges(self, number: int) -> None:
        """(2) and (3) between nodes, and (6) from the boundary."""
        variant, phases = self.kinds[number], node_phases(self.graph, self.kinds[number])
        have = {name: self._layouts(number, name) for name in self._boundary(number)}
        prompt = {name for n in variant.block.nodes if phases[n] != "weight" for name in n.operands}
        for i, node in enumerate(variant.block.nodes):
            backward = i >= variant.block.n_forward
            late = phases[node] == "weight"
            row = self.program.chosen[number, node]
            names = node.operands
            for position, name in enumerate(names):
                need: dict[Placement, list[Variable]] = {}
                for option, variable in row:
                    need.setdefault(option.operands[position], []).append(variable)
                when = _phases(late=late, prompt=name in prompt)
                use = Use(number, name, node, phases[node], backward, when=when)
                self._link(use, have[name], need)
            results = [name for name in node.outputs if name in variant.block.types]
            for k, name in enumerate(results):
                made: dict[Placement, list[Variable]] = {}
                for option, variable in row:
                    made.setdefault(option.results[k], []).append(variable)
                have[name] = made
        self.have = have

    def _boundary(self, number: int) -> list[str]:
        block = self.kinds[number].block
        return [*block.inputs, *(tangent for _, tangent in block.tangents)]

    def _layouts(self, number: int, name: str) -> dict[Placement, list[Variable]]:
        """The class variables of an input, or of the tangent of an output."""
        tangents = {t: output for output, t in self.kinds[number].block.tangents}
        port: Port = (number, "value", name)
        if name in tangents:
            port = (number, "gradient", tangents[name])
        return {p: [v] for p, v in self.program.layouts[self.ports.of_value[port]]}

    def _link(
        self, use: Use, have: dict[Placement, list[Variable]], need: dict[Placement, list[Variable]]
    ) -> None:
        """(2) and (3) for one use of a value."""
        found = flows(self.program.model, have, need, partial(self._is_allowed, use))
        self.flows += [(use, *pair, variables) for pair, variables in found.items()]

    def _pay(self) -> None:
        """What goes where it is needed is paid for."""
        move_s = cache(self.sizes.move_s)
        is_free = [not move_s(use.number, use.name, a, b) for use, a, b, _ in self.flows]
        shared = Counter(
            move for free, (use, a, b, _) in zip(is_free, self.flows, strict=True) if not free
            for move in self._moves(use, a, b)
        )  # fmt: skip
        for free, (use, a, b, variables) in zip(is_free, self.flows, strict=True):
            moves = self._moves(use, a, b)
            if free:
                self._find(use, a, variables)
            elif len(moves) == 1 and shared[moves[0]] == 1:
                for variable in variables:
                    self._spend_move(use, moves[0], variable)
            else:
                paid = [(1.0, self._paid(use, move)) for move in moves]
                self.program.model.constrain([*paid, *((-1.0, v) for v in variables)], 0)
                self.program.own(use.number)

    def _find(self, use: Use, have: Placement, variables: Sequence[Variable]) -> None:
        """A value is there, if one of these is chosen, in a layout that costs nothing to use, but
        for a view that copies."""
        node = use.node
        if node is not None and node.outputs[0] in self.copied[use.number]:
            place = self.kinds[use.number].block.nodes.index(node)
            price = self._price("copy", use.number, place, have)
            for variable in variables:
                self._spend(use.number, node.outputs[0], price, variable, use.phase)

    def _moves(self, use: Use, have: Placement, want: Placement) -> list[Move]:
        """What pays for moving a value there: any of these, one for each phase where it may be."""
        twice = use.backward and self.twice
        return [(use.number, use.name, have, want, twice, when) for when in use.when]

    def _is_allowed(self, use: Use, a: Placement, b: Placement) -> bool:
        """False where this would communicate state that has to stay where it is stored."""
        is_input = use.name in self.kinds[use.number].block.inputs
        if not (self.habits.cut_weights and is_input and self.is_state(use.number, use.name)):
            return True
        return step(a, b) in (None, "shard")

    def _paid(self, use: Use, move: Move) -> Variable:
        """(4): whether a reshard that several uses share is paid for."""
        paid = self.program.paid
        if move not in paid:
            paid[move] = self.program.model.variable(0, 1)
            self._spend_move(use, move, paid[move])
        return paid[move]

    def _spend_move(self, use: Use, move: Move, variable: Variable) -> None:
        number, name, a, b, _, phase = move
        price = self._price("move", number, name, a, b)
        self._make(number, name, b, variable, backward=use.backward)
        if use.once:
            self._spend_once(number, price, variable, on_pieces=b == REPLICATE)
        else:
            self._spend(number, name, price, variable, phase)

    def _spend_once(
        self, number: int, price: int, variable: Variable, *, on_pieces: bool
    ) -> None:
        """The seconds of every call of a variant, once per step."""
        calls = float(len(self.kinds[number].calls))
        if on_pieces:
            self.program.add(("update", 0), calls, price, variable)
            return
        self.program.add(("once", 0), calls, price, variable)
        self.program.add(("once_of", number), 1.0, price, variable)

    def _deliveries(self, number: int) -> None:
        """(6): outputs and gradients arrive in their class' layout; parameters' once per step."""
        block = self.kinds[number].block
        weight = float(len(self.kinds[number].calls))
        for name in block.outputs:
            self._link(Use(number, name), self.have[name], self._layouts(number, name))
        for value, gradient in block.gradients:
            once = self.is_state(number, value)
            kind = "value" if once else "gradient"
            if once:
                self._price_accumulator(number, value, gradient, weight)
            target = {
                p: [v] for p, v in self.program.layouts[self.ports.of_value[number, kind, value]]
            }
            use = Use(number, gradient, backward=True, once=once)
            self._link(use, self.have[gradient], target)

    def _price_accumulator(self, number: int, value: str, gradient: str, weight: float) -> None:
        """A gradient is accumulated in the layout it is made in: only a cut makes it smaller."""
        size = self.kinds[number].block.types[gradient].bytes(self.degrees.batch)
        tensor, is_alone = self.degrees.tensor, self.is_alone(number, value)
        for place, variables in self.have[gradient].items():
            share = tensor if isinstance(place, Shard) else 1
            self.program.sizes += [(weight * size / share, v) for v in variables]
            held = size / (share if is_alone else tensor)
            made = self.program.held.setdefault(number, [])
            made += [(gradient, held, v) for v in variables]
            if held > size / tensor:
                self._sum(number, self._summed_s(held) - self._summed_s(size / tensor), variables)

    def _summed_s(self, size_bytes: float) -> float:
        return self.cost.accumulate_s(size_bytes, 1, SEVERAL)

    def _sum(self, number: int, seconds: float, variables: Sequence[Variable]) -> None:
        """Seconds of a call beyond those of an even cut, in every micro-batch."""
        calls = len(self.kinds[number].calls)
        self.program.summed += [(seconds * calls, v) for v in variables]
        self.program.summed_of.setdefault(number, []).extend((seconds, v) for v in variables)

    def is_alone(self, number: int, value: str) -> bool:
        """Whether every state tensor that is this input of a variant has one user."""
        calls = self.kinds[number].calls
        place = self.kinds[number].block.inputs.index(value)
        names = {self.graph.calls[i].arguments[place] for i in calls}
        return all(self.ports.uses[name] == 1 for name in names)

    def is_state(self, number: int, name: str) -> bool:
        call = self.graph.calls[self.kinds[number].calls[0]]
        place = self.kinds[number].block.inputs.index(name)
        return call.arguments[place] in self.ports.state
