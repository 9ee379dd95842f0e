"""Lowers a block to the program of one rank: local shapes, explicit collectives.

Input: a block, its batch placements, a strategy on the tensor axis per node, and the degrees.
Output: a `Lowered` block, whose nodes are those of the block plus collectives, with concrete
local shapes. The planner prices and measures the memory of it; codegen writes it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ir.batch import Spread, dual, early_values
from ir.errors import Refused
from ir.graph import Block, Node, Ref, TensorType, evaluate, needed
from ir.layout import DATA, REPLICATE, TENSOR, Layout, Partial, Placement, Shard
from ir.reshard import step
from ir.strategies import Strategy


@dataclass(frozen=True, slots=True)
class Degrees:
    """How far the batch and the tensors are cut. `batch` is the global number of rows."""

    batch: int
    data: int
    tensor: int
    micro_batches: int

    @property
    def rows(self) -> int:
        """Pieces that the batch is cut into."""
        return self.data * self.micro_batches


@dataclass(frozen=True)
class Sharding:
    """The decisions for one block on the tensor axis, with the layouts at its boundary."""

    chosen: dict[Node, Strategy]
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    tangents: tuple[Placement, ...]
    gradients: tuple[Placement, ...]

    @cached_property
    def key(self) -> Hashable:
        """Equal for equal decisions."""
        boundary = (self.inputs, self.outputs, self.tangents, self.gradients)
        return (*self.chosen.values(), *boundary)

    @property
    def is_whole(self) -> bool:
        """Whether every rank does and holds everything."""
        ends = (*self.inputs, *self.outputs, *self.tangents, *self.gradients)
        inside = (p for s in self.chosen.values() for p in (*s.operands, *s.results))
        return all(place == REPLICATE for place in (*ends, *inside))


@dataclass(frozen=True)
class Lowered:
    """The program of one rank for one block.

    `prologue` runs once per step on the rows of all micro-batches; its `early` results are read
    by forward and backward. `outputs` and `gradients` name the values handed to the outside.
    """

    block: Block
    prologue: tuple[Node, ...]
    forward: tuple[Node, ...]
    backward: tuple[Node, ...]
    early: tuple[str, ...]
    outputs: tuple[str, ...]
    gradients: tuple[tuple[str, str], ...]
    types: dict[str, TensorType]
    early_types: dict[str, TensorType]
    layouts: dict[str, Layout]
    chosen: dict[str, Strategy] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    @property
    def saved(self) -> tuple[str, ...]:
        """Values of forward or of the caller that backward reads."""
        made = {name for node in self.backward for name in node.outputs}
        made |= {tangent for _, tangent in self.block.tangents} | set(self.early)
        read = dict.fromkeys(name for node in self.backward for name in node.inputs)
        read.update(dict.fromkeys(name for _, name in self.gradients))
        return tuple(name for name in read if name not in made)


def local_type(kind: TensorType, layout: Layout, degrees: Degrees, rows: int) -> TensorType:
    """The shape of one rank's piece; `rows` is how many pieces the batch is cut into."""
    batch = degrees.batch
    shape = [size if type(size) is int else evaluate(size, batch) for size in kind.shape]
    for place, degree in ((layout.data, rows), (layout.tensor, degrees.tensor)):
        if isinstance(place, Shard):
            shape[place.dim] //= degree
    return TensorType(tuple(shape), kind.dtype)


def local_outer(layout: Layout, axis: str, degrees: Degrees, rows: int) -> int:
    """`outer` of the axis' shard on the local tensor: fewer if the other axis cuts before it."""
    place = layout.data if axis == DATA else layout.tensor
    other = layout.tensor if axis == DATA else layout.data
    assert isinstance(place, Shard)
    outer = int(evaluate(place.outer, degrees.batch))
    if isinstance(other, Shard) and other.dim == place.dim:
        before = int(evaluate(other.outer, degrees.batch)) < outer
        outer //= (degrees.tensor if axis == DATA else rows) if before else 1
    return outer


class _Region:
    """Emits nodes for one region: the prologue, or forward and backward."""

    def __init__(self, owner: _Lowering, rows: int):
        self.owner, self.rows = owner, rows
        self.nodes: list[Node] = []
        self.types: dict[str, TensorType] = {}
        self.converted: dict[tuple[str, Layout], str] = {}

    def define(self, name: str, layout: Layout) -> None:
        owner = self.owner
        kind = owner.block.types[owner.origin.get(name, name)]
        self.types[name] = local_type(kind, layout, owner.degrees, self.rows)
        owner.layouts[name] = layout

    def convert(self, name: str, want: Layout) -> str:
        """The value in layout `want`; emits and remembers the collectives."""
        have = self.owner.layouts[name]
        if (name, want) in self.converted:
            return self.converted[name, want]
        current, layout = name, have
        targets = [(DATA, Layout(want.data, have.tensor)), (TENSOR, want)]
        if isinstance(have.data, Shard) and isinstance(want.data, Partial):
            targets.insert(0, (DATA, Layout(REPLICATE, have.tensor)))
        for axis, target in targets:
            current = self._one_axis(name, current, layout, target, axis)
            layout = target
        self.converted[name, want] = current
        return current

    def _one_axis(self, base: str, name: str, have: Layout, want: Layout, axis: str) -> str:
        old, new = (have.data, want.data) if axis == DATA else (have.tensor, want.tensor)
        kind = step(old, new)
        degree = self.rows if axis == DATA else self.owner.degrees.tensor
        if kind is None:
            return name
        if (name, want) in self.converted:
            return self.converted[name, want]
        if degree == 1:
            self.converted[name, want] = name
            return name
        if axis == DATA and kind not in ("shard", "first") and self.rows != self.owner.degrees.data:
            raise Refused(f"{base} needs all rows of the batch at once")
        out = self.owner.fresh(f"{base}_{SUFFIX[kind]}", base)
        self.nodes.append(self._collective(kind, name, out, have, want, axis))
        self.define(out, want)
        self.converted[name, want] = out
        return out

    def _collective(
        self, kind: str, name: str, out: str, have: Layout, want: Layout, axis: str
    ) -> Node:
        args: list[Any] = [Ref(name), axis]
        if kind in ("all_gather", "all_to_all"):
            args += self._cut(have, axis)
        if kind in ("shard", "reduce_scatter", "all_to_all"):
            args += self._cut(want, axis)
        return Node(kind, tuple(args), (), (out,))

    def _cut(self, layout: Layout, axis: str) -> tuple[int, int]:
        """The dim that a layout cuts on an axis, and the local `outer` of the cut."""
        place = layout.data if axis == DATA else layout.tensor
        assert isinstance(place, Shard)
        return place.dim, local_outer(layout, axis, self.owner.degrees, self.rows)

    def run(self, node: Node, layout_of: Any) -> None:
        """Converts the operands of a node and emits it."""
        names = node.operands
        wants = layout_of(node)
        swap = iter([self.convert(n, w) for n, w in zip(names, wants[0], strict=True)])
        args, kwargs = _replace((node.args, node.kwargs), swap)
        outputs = [name for name in node.outputs if name in self.owner.block.types]
        self.nodes.append(Node(node.op, args, kwargs, node.outputs, node.source))
        for name, layout in zip(outputs, wants[1], strict=False):
            self.define(name, layout)


SUFFIX = {
    "all_reduce": "sum", "all_gather": "full", "reduce_scatter": "part", "all_to_all": "turned",
    "shard": "part", "first": "once",
}  # fmt: skip


def _replace(argument: Any, swap: Any) -> Any:
    if isinstance(argument, Ref):
        return Ref(next(swap))
    if isinstance(argument, tuple):
        return tuple(_replace(item, swap) for item in argument)
    return argument


class _Lowering:
    """One lowering; see the module's docstring."""

    def __init__(self, block: Block, spread: Spread, sharding: Sharding, degrees: Degrees,
                 early_inputs: frozenset[str]):  # fmt: skip
        self.block, self.spread, self.sharding, self.degrees = block, spread, sharding, degrees
        self.early_inputs = early_inputs
        self.layouts: dict[str, Layout] = {}
        self.origin: dict[str, str] = {}
        self.used = set(block.types)

    def fresh(self, word: str, base: str) -> str:
        name, number = word, 1
        while name in self.used:
            name, number = f"{word}_{number}", number + 1
        self.used.add(name)
        self.origin[name] = self.origin.get(base, base)
        return name

    def layouts_of(self, node: Node) -> tuple[list[Layout], list[Layout]]:
        batch, tensor = self.spread.chosen[node], self.sharding.chosen[node]
        pairs = zip(batch.operands, tensor.operands, strict=True)
        results = zip(batch.results, tensor.results, strict=True)
        return [Layout(*p) for p in pairs], [Layout(*p) for p in results]

    def run(self) -> Lowered:
        main = _Region(self, self.degrees.rows)
        for name, place in zip(self.block.inputs, self.sharding.inputs, strict=True):
            main.define(name, Layout(self.spread.place[name], place))
        prologue, early = self._prologue(main)
        for node in self.block.forward:
            main.run(node, self.layouts_of)
        outputs = [
            main.convert(name, Layout(self.spread.place[name], place))
            for name, place in zip(self.block.outputs, self.sharding.outputs, strict=True)
        ]
        n_forward = len(main.nodes)
        for (_, tangent), place in zip(self.block.tangents, self.sharding.tangents, strict=True):
            main.define(tangent, Layout(self.spread.place[tangent], place))
        for node in self.block.backward:
            main.run(node, self.layouts_of)
        gradients = []
        for (value, name), place in zip(
            self.block.gradients, self.sharding.gradients, strict=True
        ):
            want = Layout(dual(self.spread.place[value]), place)
            gradients.append((value, main.convert(name, want)))
        read = {name for node in main.nodes for name in node.inputs} | set(outputs)
        early = tuple(name for name in early if name in read)
        return Lowered(
            self.block, needed(prologue.nodes, list(early)) if prologue else (),
            needed(main.nodes[:n_forward], [*outputs, *(n for x in main.nodes[n_forward:]
                                                       for n in x.inputs),
                                           *(n for _, n in gradients)]),
            tuple(main.nodes[n_forward:]), early, tuple(outputs), tuple(gradients),
            main.types, prologue.types if prologue else {}, dict(self.layouts),
            self._chosen(), dict(self.origin),
        )  # fmt: skip

    def _chosen(self) -> dict[str, Strategy]:
        return {node.outputs[0]: s for node, s in self.sharding.chosen.items()}

    def _prologue(self, main: _Region) -> tuple[_Region | None, tuple[str, ...]]:
        """With several micro-batches, completes early what needs all rows."""
        gathers = self.spread.gathers(self.block)
        if self.degrees.micro_batches == 1 or not gathers:
            return None, ()
        region = _Region(self, self.degrees.data)
        for name in self.block.inputs:
            region.define(name, self.layouts[name])
        known = early_values(self.block, set(self.early_inputs))
        wanted = [(node, name, want) for node, name, want in gathers]
        if any(name not in known for _, name, _ in wanted):
            raise Refused(f"{wanted[0][0].source} needs all rows of the batch at once")
        for node in self.block.forward:
            if node.outputs[0] in known:
                region.run(node, self.layouts_of)
        early = []
        for node, name, _ in wanted:
            names = node.operands
            layouts = self.layouts_of(node)[0]
            want = layouts[names.index(name)]
            result = region.convert(name, want)
            if result in self.block.types:
                result = self._renamed(region, result, want)
            main.types[result] = region.types[result]
            main.converted[name, want] = result
            early.append(result)
        return region, tuple(dict.fromkeys(early))


    def _renamed(self, region: _Region, name: str, layout: Layout) -> str:
        """A name of its own for a result of the prologue that forward makes from fewer rows."""
        out = self.fresh(f"{name}_all", name)
        region.nodes.append(Node("view", (Ref(name),), (), (out,)))
        region.define(out, layout)
        return out


def lower(
    block: Block, spread: Spread, sharding: Sharding, degrees: Degrees,
    early_inputs: frozenset[str] = frozenset(),
) -> Lowered:  # fmt: skip
    """The program of one rank for `block`; raises `Refused` if it needs more than its rows."""
    return _Lowering(block, spread, sharding, degrees, early_inputs).run()


def whole_sharding(block: Block, spread: Spread) -> Sharding:
    """No cut on the tensor axis: every node runs whole."""
    chosen = {}
    for node in block.nodes:
        batch = spread.chosen[node]
        chosen[node] = Strategy(
            None, (REPLICATE,) * len(batch.operands), (REPLICATE,) * len(batch.results)
        )
    return Sharding(
        chosen, (REPLICATE,) * len(block.inputs), (REPLICATE,) * len(block.outputs),
        (REPLICATE,) * len(block.tangents), (REPLICATE,) * len(block.gradients),
    )  # fmt: skip


