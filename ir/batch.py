"""How the batch flows through the program: which values are cut by rows, whole, or partial sums.

Data parallelism and micro-batching both cut the batch, so one analysis serves both. It is exact,
not a choice: rows stay cut wherever the operation allows it. Where an operation needs the whole
batch the analysis records an edge: a collective over the data axis, and with several
micro-batches either a prologue (if it depends on inputs alone) or a refusal.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from ir.errors import Refused
from ir.factors import Factors, infer
from ir.graph import BATCH, Block, Graph, Node, Source
from ir.layout import PARTIAL, REPLICATE, Partial, Placement, Replicate, Shard
from ir.reshard import possible
from ir.strategies import Strategy, strategies

FUNCTIONS = {"batch_norm": "batch_norm in training mode"}
"""Functions of a model that need the whole batch, where more is to be said than their names."""
NOMINAL_BATCH = 64
"""Batch size at which the greedy choice compares bytes; any size gives the same choices."""
Placements: TypeAlias = tuple[Placement, ...]


def dual(place: Placement) -> Placement:
    """The placement of a gradient: whole values have partial gradients and the reverse."""
    match place:
        case Shard():
            return place
        case Replicate():
            return PARTIAL
        case Partial():
            return REPLICATE


@dataclass(frozen=True)
class Spread:
    """The batch placement of every value of a block and each node's strategy on the batch."""

    place: dict[str, Placement]
    chosen: dict[Node, Strategy]

    def gathers(self, block: Block) -> list[tuple[Node, str, Placement]]:
        """Operands that must be completed over the batch: (node, value, wanted placement)."""
        found = []
        for node in block.nodes:
            names = node.operands
            for name, want in zip(names, self.chosen[node].operands, strict=True):
                have = self.place[name]
                if have != want and have != REPLICATE:
                    found.append((node, name, want))
        return found


def factors_of(block: Block, inputs: Placements = ()) -> Factors:
    """The factors of a block, inferred once; by its inputs' batch placements where their dims hold
    more than the batch."""
    cuts = tuple(
        place if isinstance(place, Shard) and block.types[name].shape[place.dim] != BATCH else None
        for name, place in zip(block.inputs, inputs, strict=False)
    )
    return _factors_of(block, cuts if any(cuts) else ())


@lru_cache(maxsize=512)
def _factors_of(block: Block, cuts: tuple[Shard | None, ...]) -> Factors:
    return infer(block, cuts)


@lru_cache(maxsize=512)
def spread(block: Block, inputs: tuple[Placement, ...]) -> Spread:
    """Batch placements of a block's values from those of its inputs.

    A partial sum that has to be completed is completed where it is small: before an op that makes
    it larger, not after.
    """
    whole: set[Node] = set()
    while True:
        found = _spread(block, inputs, whole)
        more = _enlarged_sums(block, found) - whole
        if not more:
            return found
        whole |= more


def _enlarged_sums(block: Block, found: Spread) -> set[Node]:
    """The nodes that make a partial sum larger which is then completed."""
    makers = {name: node for node in block.nodes for name in node.outputs}
    nodes = set()
    for _, name, _ in found.gathers(block):
        maker = makers.get(name)
        while maker is not None and found.place[name] == PARTIAL:
            partial = [n for n in maker.operands if found.place[n] == PARTIAL]
            small = [n for n in partial if _nominal_bytes(block, n) < _nominal_bytes(block, name)]
            if small and PARTIAL in found.chosen[maker].operands:
                nodes.add(maker)
                break
            name = partial[0] if len(partial) == 1 else name
            maker = makers.get(name) if len(partial) == 1 else None
    return nodes


def _nominal_bytes(block: Block, name: str) -> int:
    return block.types[name].bytes(NOMINAL_BATCH)


def _spread(block: Block, inputs: tuple[Placement, ...], whole: set[Node]) -> Spread:
    """By the cheapest strategy of each node; those in `whole` take no partial sums. Dims whose
    places an op counts are never cut with the batch: it knows of such cuts of the tensor axis."""
    factors = factors_of(block, inputs)
    leaves = [leaf for leaf, size in factors.size.items() if size == BATCH]
    place: dict[str, Placement] = dict(zip(block.inputs, inputs, strict=True))
    chosen: dict[Node, Strategy] = {}
    tangents = {tangent: output for output, tangent in block.tangents}
    for i, node in enumerate(block.nodes):
        if i == block.n_forward:
            place |= {tangent: dual(place[output]) for tangent, output in tangents.items()}
        names = node.operands
        options = [
            s for s in strategies(node, factors, leaves)
            if s.leaf not in factors.nodes[node].indexed
            and (node not in whole or PARTIAL not in s.operands)
        ]  # fmt: skip
        best = min(options, key=lambda s: _cost(s, names, place, block))
        chosen[node] = best
        results = [name for name in node.outputs if name in factors.dims]
        place |= dict(zip(results, best.results, strict=True))
    place |= {t: dual(place[o]) for t, o in tangents.items() if t not in place}
    return Spread(place, chosen)


def _cost(
    option: Strategy, names: tuple[str, ...], place: dict[str, Placement], block: Block
) -> tuple[float, int]:
    """Bytes to move, then cut before partial before whole."""
    moved = 0.0
    for name, want in zip(names, option.operands, strict=True):
        have = place[name]
        if have in (want, REPLICATE):
            continue
        if not possible(have, want):
            return (float("inf"), 0)
        factor = 2 if have == PARTIAL and want == REPLICATE else 1
        moved += factor * _nominal_bytes(block, name) + 1
    passes = any(
        want == PARTIAL == place[name] for name, want in zip(names, option.operands, strict=True)
    )
    return (moved, 0 if option.leaf is not None else 1 if passes else 2)


@dataclass(frozen=True)
class Flow:
    """The batch placement of graph-level values, and of each call's inputs."""

    values: dict[str, Placement]
    calls: tuple[Placements, ...]
    early: frozenset[str]

    def spread_of(self, graph: Graph, index: int) -> Spread:
        return spread(graph.blocks[graph.calls[index].block], self.calls[index])


def flow(graph: Graph) -> Flow:
    """Follows the batch through all calls. `early` values exist before the first micro-batch."""
    values: dict[str, Placement] = {item.name: REPLICATE for item in graph.state}
    for item in graph.inputs:
        values[item.name] = REPLICATE if item.batch_dim is None else Shard(item.batch_dim)
    early = frozenset(values)
    calls = []
    for call in graph.calls:
        block = graph.blocks[call.block]
        inputs = tuple(values[name] for name in call.arguments)
        calls.append(inputs)
        result = spread(block, inputs)
        values |= {
            r: result.place[o] for r, o in zip(call.results, block.outputs, strict=True)
        }
    for state in graph.state:
        if state.update and isinstance(values[state.update], Shard):
            raise Refused(
                f"buffer {state.names[0]} is updated with a tensor that has one entry per row of "
                "the batch; no rank holds all rows. Keep such a tensor out of the buffers."
            )
    return Flow(values, tuple(calls), early)


def needs_whole_batch(graph: Graph, batch_flow: Flow) -> str | None:
    """Why several micro-batches can't give the one-device result, or None if they can."""
    alike: set[tuple[object, ...]] = set()
    counts = Counter(call.block for call in graph.calls)
    for index, call in enumerate(graph.calls):
        block = graph.blocks[call.block]
        result = batch_flow.spread_of(graph, index)
        once = counts[call.block] == 1
        early = {
            name for name, value in zip(block.inputs, call.arguments, strict=True)
            if value in batch_flow.early
        }  # fmt: skip
        key = (call.block, batch_flow.calls[index], frozenset(early))
        if key in alike:
            continue
        alike.add(key)
        known = early_values(block, early)
        gathers = result.gathers(block)
        for node, name, _ in gathers:
            if not once or name not in known:
                source = _source(block, _origin(block, node, [n for n, _, _ in gathers]))
                function = FUNCTIONS.get(source.function, source.function) or node.op
                where = str(source) or call.path or "the model"
                return f"{where}: {function} needs all rows of the batch at once"
        for value, gradient in block.gradients:
            want = dual(result.place[value])
            if result.place[gradient] not in (want, REPLICATE):
                where = call.path or "the model"
                return f"{where}: the gradient of {value} needs all rows of the batch at once"
    return None


def _origin(block: Block, node: Node, gathering: list[Node]) -> Node:
    """The node to name: for one of the backward, the first of the forward that needs all rows."""
    forward = set(block.forward)
    before = [made for made in gathering if made in forward and str(made.source)]
    return node if node in forward or str(node.source) or not before else before[0]


def _source(block: Block, node: Node) -> Source:
    """Where a node comes from; backward nodes are where what they read, or their next readers read,
    was made, or else what that was made of."""
    makers = {name: made for made in block.nodes for name in made.outputs}
    seen, found = {node}, [node]
    for near in found:
        read = [makers[name] for name in near.inputs if name in makers]
        for made in (near, *read):
            if str(made.source):
                return made.source
        readers = [n for n in block.nodes if set(n.inputs) & set(near.outputs)]
        more = [n for n in (*readers, *read) if n not in seen]
        seen.update(more)
        found += more
    return Source()


def early_values(block: Block, allowed: set[str]) -> set[str]:
    """Values that depend on nothing but the allowed inputs of their block."""
    known = set(allowed)
    for node in block.forward:
        if all(name in known for name in node.inputs):
            known.update(node.outputs)
    return known
