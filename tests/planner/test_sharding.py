"""The sharding program: equal to brute force on small graphs, and Megatron's layout by cost."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from math import inf

import pytest
import torch
from small_models import chain, products
from transformers import LlamaConfig, LlamaForCausalLM

from ir.batch import flow
from ir.cluster import Cluster, Mesh
from ir.graph import Graph, Node, references
from ir.layout import REPLICATE, Placement, Shard
from ir.lower import Degrees, Lowered, Sharding, lower
from ir.ops import op_def
from ir.reshard import possible
from ir.strategies import Strategy, strategies
from ir.trace import trace
from ir.variants import Variant, variants
from planner.cost import Roofline
from planner.node_prices import NodePrices
from planner.ports import divides, options
from planner.sharding import Programs, ShardingResult, Shardings, shard
from planner.sharding_program import ShardingProgram
from planner.work import Work

COST = Roofline(Cluster.local(2), Mesh(1, 1, 2))
DEGREES = Degrees(8, 1, 2, 1)


@dataclass
class Exhaustive:
    """The cheapest sharding below `best_s` by trying all, leaving out what is already too dear.

    Prices come from the planner's own functions; what is tried and how it adds up does not.
    With `only`, nothing but that result is tried: its price.
    """

    graph: Graph
    kinds: tuple[Variant, ...]
    byte_price_s: float
    best_s: float = inf
    only: ShardingResult | None = None
    prices: ShardingProgram = field(init=False)
    least: dict[tuple[int, int], float] = field(default_factory=dict)
    seconds: dict[tuple[int, Node], dict[Strategy, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prices = ShardingProgram(self.graph, self.kinds, DEGREES, COST)

    def solve(self) -> float:
        choices = self._choices()
        for places in product(*choices.values()):
            picked = dict(zip(choices, places, strict=True))
            self._variant(0, picked, self._held_s(picked))
        return self.best_s

    def _boundary(self, number: int) -> Iterator[tuple[str, str, Placement | None]]:
        """(kind, name, decided placement) of what a block reads and hands on."""
        block = self.kinds[number].block
        made = self.only.shardings[number] if self.only else None
        tangents = [output for output, _ in block.tangents]
        gradients = [value for value, _ in block.gradients]
        rows = [("value", block.inputs, made and made.inputs)]
        rows += [("value", block.outputs, made and made.outputs)]
        rows += [("gradient", tangents, made and made.tangents)]
        rows += [("gradient", gradients, made and made.gradients)]
        for kind, names, places in rows:
            for name, place in zip(names, places or [None] * len(names), strict=True):
                is_state = names is gradients and self.prices.is_state(number, name)
                if not is_state:
                    yield kind, name, place

    def _choices(self) -> dict[int, list[Placement]]:
        """The placements to try for each class of boundary values."""
        ports, found = self.prices.ports, {}
        for number in range(len(self.kinds)):
            for kind, name, place in self._boundary(number):
                own = ports.of_value[number, kind, name]
                free = options(ports, own, self.kinds, DEGREES.tensor)
                found[own] = [place] if self.only else list(free)
        return found

    def _held_s(self, picked: dict[int, Placement]) -> float:
        total = 0.0
        types = {item.name: item for item in self.graph.state}
        for name, number in self.prices.ports.state.items():
            share = 2 if isinstance(picked[number], Shard) else 1
            size = types[name].type.bytes(8) / share
            total += COST.optimizer_s(size, 2 * size) + 3 * size * self.byte_price_s
        return total

    def _variant(self, number: int, picked: dict[int, Placement], spent_s: float) -> None:
        if number == len(self.kinds):
            self.best_s = min(self.best_s, spent_s)
            return
        kind = self.kinds[number]
        port = self.prices.ports.of_value
        have = {n: picked[port[number, "value", n]] for n in kind.block.inputs}
        have |= {t: picked[port[number, "gradient", o]] for o, t in kind.block.tangents}
        self._node(number, 0, picked, have, frozenset(), spent_s)

    def _node(self, number, place, picked, have, paid, spent_s) -> None:
        kind = self.kinds[number]
        if spent_s + self._least_s(number, place) >= self.best_s:
            return
        if place == len(kind.block.nodes):
            self._deliver(number, picked, have, paid, spent_s)
            return
        node, weight = kind.block.nodes[place], len(kind.calls)
        for option in self._strategies(kind, node):
            names = [ref.name for ref in references((node.args, node.kwargs))]
            wants = list(zip(names, option.operands, strict=True))
            if not all(possible(have[name], want) for name, want in wants):
                continue
            moves = {(name, have[name], want) for name, want in wants} - paid
            seconds = self._options(kind, node)[option] + self._moves_s(kind, moves)
            results = [name for name in node.outputs if name in kind.block.types]
            made = have | dict(zip(results, option.results, strict=True))
            self._node(number, place + 1, picked, made, paid | moves, spent_s + weight * seconds)

    def _least_s(self, number: int, place: int) -> float:
        """What the remaining nodes take at least, without any communication."""
        if (number, place) not in self.least:
            rest = [(self.kinds[number], n) for n in self.kinds[number].block.nodes[place:]]
            rest += [(kind, n) for kind in self.kinds[number + 1 :] for n in kind.block.nodes]
            self.least[number, place] = sum(
                len(kind.calls)
                * min(self._options(kind, node)[s] for s in self._strategies(kind, node))
                for kind, node in rest
            )
        return self.least[number, place]

    def _options(self, kind: Variant, node: Node) -> dict[Strategy, float]:
        """Seconds by strategy."""
        key = (self.kinds.index(kind), node)
        if key not in self.seconds:
            self.seconds[key] = dict(NodePrices(kind, DEGREES, COST).options(node))
        return self.seconds[key]

    def _strategies(self, kind: Variant, node: Node) -> Iterator[Strategy]:
        if self.only:
            yield self.only.shardings[self.kinds.index(kind)].chosen[node]
            return
        leaves = [f for f in kind.factors.size if divides(kind.factors, f, DEGREES.tensor)]
        yield from strategies(node, kind.factors, leaves)

    def _moves_s(self, kind: Variant, moves) -> float:
        number = self.kinds.index(kind)
        return sum(self.prices.sizes.move_s(number, name, a, b) for name, a, b in moves)

    def _deliver(self, number, picked, have, paid, spent_s) -> None:
        kind, port = self.kinds[number], self.prices.ports.of_value
        wanted = [(o, picked[port[number, "value", o]]) for o in kind.block.outputs]
        for value, gradient in kind.block.gradients:
            once = self.prices.is_state(number, value)
            target = picked[port[number, "value" if once else "gradient", value]]
            wanted.append((gradient, target))
            if once:
                share = 2 if isinstance(have[gradient], Shard) else 1
                size = kind.block.types[gradient].bytes(8) / share
                spent_s += len(kind.calls) * size * self.byte_price_s
        if all(possible(have[name], want) for name, want in wanted):
            moves = {(name, have[name], want) for name, want in wanted} - paid
            spent_s += len(kind.calls) * self._moves_s(kind, moves)
            self._variant(number + 1, picked, spent_s)


@pytest.mark.parametrize("byte_price_s", [0.0, 1e-6], ids=["memory free", "memory dear"])
@pytest.mark.parametrize(("depth", "folded"), [(1, False), (2, False), (3, True)])
def test_the_sharding_program_equals_brute_force(
    depth: int, folded: bool, byte_price_s: float
) -> None:
    graph = products(depth, folded=folded)
    kinds = variants(graph, flow(graph))
    found = shard(graph, kinds, DEGREES, COST, byte_price_s=byte_price_s, gap=1e-6)
    price_s = Exhaustive(graph, kinds, byte_price_s, only=found).solve()
    assert price_s == pytest.approx(found.objective_s, rel=1e-9)
    better_s = found.objective_s * (1 - 1e-5)
    assert Exhaustive(graph, kinds, byte_price_s, better_s).solve() == better_s  # nothing below
    assert found.bound_s <= found.objective_s


def test_a_price_on_memory_cuts_the_parameters() -> None:
    graph = chain(depth=2)
    kinds = variants(graph, flow(graph))
    found = shard(graph, kinds, DEGREES, COST, byte_price_s=1e-3)
    big = [item for item in graph.state if item.type.bytes(1) > 256]
    assert big
    assert all(isinstance(found.state[item.name], Shard) for item in big)


@pytest.fixture(scope="module")
def llama() -> tuple[Variant, Sharding, Lowered]:
    """A block of Llama-3-8B's sizes on a tensor axis of 8."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=32000, max_position_embeddings=4096, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(1, 4096, dtype=torch.long)
    graph = trace(model, (), {"input_ids": ids, "labels": ids})
    kinds, degrees = variants(graph, flow(graph)), Degrees(1, 1, 8, 1)
    found = shard(graph, kinds, degrees, Roofline(Cluster.parse("8xH100-SXM"), Mesh(1, 1, 8)))
    number = next(n for n, kind in enumerate(kinds) if len(kind.calls) == 2)
    kind, sharding = kinds[number], found.shardings[number]
    return kind, sharding, lower(kind.block, kind.spread, sharding, degrees)


def test_a_llama_block_is_cut_by_columns_then_by_rows(llama) -> None:
    kind, sharding, _ = llama
    places = dict(zip(kind.block.inputs, sharding.inputs, strict=True))
    cuts = {
        name.removesuffix("_proj_weight").rpartition("_")[2]: place.dim
        for name, place in places.items() if name.endswith("_proj_weight")
    }  # fmt: skip
    assert cuts == dict.fromkeys(("q", "k", "v", "gate", "up"), 0) | {"o": 1, "down": 1}


def test_a_llama_block_has_sequence_cut_norms_residuals_and_boundary(llama) -> None:
    kind, _, lowered = llama
    sequence = Shard(1)
    hidden = [n for n in kind.block.inputs if len(kind.block.types[n].shape) == 3][0]
    assert lowered.layouts[hidden].tensor == sequence
    assert lowered.layouts[lowered.outputs[0]].tensor == sequence
    means = [n for n in lowered.forward if n.op == "rsqrt.default"]
    assert len(means) == 2
    assert all(lowered.layouts[n.outputs[0]].tensor == sequence for n in means)


def test_a_llama_block_gathers_and_scatters_the_sequence(llama) -> None:
    _, _, lowered = llama
    moves = [(n.op, n.args[2]) for n in lowered.forward if n.op in ("all_gather", "reduce_scatter",
             "all_reduce", "all_to_all")]  # fmt: skip
    assert moves == [("all_gather", 1), ("reduce_scatter", 1)] * 2


class DearSums(Roofline):
    """Adding up gradients takes longer than all else."""

    def accumulate_s(self, gradient_bytes: float, tensors: int, micro_batches: int) -> float:
        return gradient_bytes if micro_batches > 1 else 0.0


def test_gradients_are_cut_where_adding_them_up_is_dear() -> None:
    graph = chain(depth=3, width=64, hidden=256, seq=16)
    kinds = variants(graph, flow(graph))
    cost = DearSums(Cluster.local(2), Mesh(1, 1, 2))
    found = Shardings(graph, kinds, Degrees(4, 1, 2, 2), cost)
    several, one = (found.cheapest(count) for count in (2, 1))
    terms = found.built.program.summed
    assert terms and several.seconds < min(seconds for seconds, _ in terms)
    assert one.seconds < several.seconds  # nothing is added up then, and layouts are free


def test_a_program_for_other_rows_costs_what_a_new_one_does() -> None:
    """It is built for the first rows alone; where other views copy, anew."""
    graph = chain(depth=3, width=64, hidden=256, seq=16)
    kinds = variants(graph, flow(graph))
    known: Programs = {}
    views = [
        {node.outputs[0] for node in kind.block.nodes if op_def(node.op).kind == "view"}
        for kind in kinds
    ]
    for rows, copied in ((8, ()), (2, ()), (2, views), (32, views)):
        degrees = Degrees(rows, 1, 2, 1)
        new = Shardings(graph, kinds, degrees, COST, copied=copied)
        again = Shardings(graph, kinds, degrees, COST, copied=copied, known=known)
        assert again.built.degrees == degrees
        costs = new.built.program.cost(2, 1e-12, 1e-12)
        assert costs and costs == again.built.program.cost(2, 1e-12, 1e-12)
        for part in ("made", "of_call", "once_of", "held", "trained_of", "summed_of"):
            assert getattr(new.built.program, part) == getattr(again.built.program, part)
        assert new.cheapest(2) == again.cheapest(2)
    assert len(known) == 2


def test_a_view_that_copies_costs_its_bytes() -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    ids = torch.zeros((2, 8), dtype=torch.int64)
    graph = trace(LlamaForCausalLM(config), (), {"input_ids": ids, "labels": ids})
    kinds = variants(graph, flow(graph))
    views = [
        {node.outputs[0] for node in kind.block.nodes if op_def(node.op).kind == "view"}
        for kind in kinds
    ]
    free, dear = (
        Shardings(graph, kinds, DEGREES, COST, copied=copied).cheapest(1).seconds
        for copied in ((), views)
    )
    assert dear > free


class Flat(Roofline):
    """Every kernel takes as long, however it is cut, and nothing is slow to move."""

    def compute_s(self, work: Work) -> float:
        return 0.0 if work.kind in ("view", "collective") else 1.0

    def collective_s(self, op: str, size_bytes: float, axis: str) -> float:
        return 0.0

    def optimizer_s(self, parameter_bytes: float, state_bytes: float) -> float:
        return 0.0


def test_of_equal_shardings_the_one_that_may_keep_less_is_taken() -> None:
    """All shardings of the chain take as long. Nothing that it makes lies whole then: it is cut, or
    a partial sum, which is not kept."""
    graph = chain(depth=2, width=16, hidden=32, words=24, seq=8)
    kinds = variants(graph, flow(graph))
    taken = shard(graph, kinds, DEGREES, Flat(Cluster.local(2), Mesh(1, 1, 2)))
    kernels = sum(
        len(kind.calls) * (op_def(node.op).kind != "view")
        for kind in kinds for node in kind.block.nodes
    )  # fmt: skip
    assert taken.seconds == pytest.approx(kernels)
    made = [
        place for sharding in taken.shardings for option in sharding.chosen.values()
        for place in option.results
    ]  # fmt: skip
    assert made.count(REPLICATE) == 0 and len(made) > 20
