"""Factors of a block: the indivisible pieces of its dims, found by unification.

Every dim starts as one leaf. Signatures unify leaves of equal letters; a view splits a leaf where
its boundaries fall (`4096 = 32 heads x 128`). The result gives each value's dims as products of
leaves, and each node's leaves that must stay whole. A leaf is what a sharding cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy

from ir.graph import BATCH, Block, Node, Size
from ir.layout import Shard
from ir.ops import op_def
from ir.ops.signature import Signature

Leaf: TypeAlias = int
Leaves: TypeAlias = "tuple[Leaf, ...]"
Letters: TypeAlias = "dict[str, list[Leaf]]"


def quotient(a: Size, b: Size) -> Size | None:
    """a / b when it is a whole number for every batch size, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    ratio = sympy.cancel(sympy.sympify(a) / b)
    coefficients = ratio.as_coefficients_dict().values()
    if sympy.denom(ratio) != 1 or not all(c.is_Integer for c in coefficients):
        return None
    return int(ratio) if ratio.is_Integer else ratio


@dataclass
class _Forest:
    """Union-find over leaves that can be split in two."""

    parent: list[Leaf] = field(default_factory=list)
    size: list[Size] = field(default_factory=list)
    children: dict[Leaf, tuple[Leaf, Leaf]] = field(default_factory=dict)

    def new(self, size: Size) -> Leaf:
        self.parent.append(len(self.parent))
        self.size.append(size)
        return len(self.parent) - 1

    def root(self, leaf: Leaf) -> Leaf:
        while self.parent[leaf] != leaf:
            self.parent[leaf] = leaf = self.parent[self.parent[leaf]]
        return leaf

    def flat(self, leaves: tuple[Leaf, ...] | list[Leaf]) -> list[Leaf]:
        found: list[Leaf] = []
        for leaf in leaves:
            leaf = self.root(leaf)
            found += self.flat(self.children[leaf]) if leaf in self.children else [leaf]
        return found

    def split(self, leaf: Leaf, outer: Size, inner: Size) -> None:
        self.children[self.root(leaf)] = (self.new(outer), self.new(inner))

    def unify(self, left: list[Leaf], right: list[Leaf]) -> list[Leaf]:
        """Matches two products of equal size from the right; returns leaves left unmatched."""
        a, b = self.flat(left), self.flat(right)
        while a and b:
            x, y = a[-1], b[-1]
            if x == y or self.size[x] == self.size[y]:
                if x != y:
                    self.parent[y] = x
                a.pop()
                b.pop()
                continue
            over, under = quotient(self.size[x], self.size[y]), quotient(self.size[y], self.size[x])
            if over is not None and y not in self.flat([x]):
                self.split(x, over, self.size[y])
            elif under is not None:
                self.split(y, under, self.size[x])
            else:
                return a + b
            a, b = self.flat(a), self.flat(b)
        return a + b


@dataclass(frozen=True)
class NodeFactors:
    """A node's leaves per operand and result dim, after all unification."""

    operands: tuple[tuple[Leaves, ...], ...]
    results: tuple[tuple[Leaves, ...], ...]
    whole: frozenset[Leaf]
    adds: frozenset[Leaf]
    gathers: frozenset[Leaf]
    indexed: frozenset[Leaf]
    signature: Signature


@dataclass(frozen=True)
class Factors:
    """Leaves of every value's dims and of every node, and the size of each leaf; `known`: what was
    found with them, by first output and leaves (`ir.strategies`)."""

    dims: dict[str, tuple[Leaves, ...]]
    nodes: dict[Node, NodeFactors]
    size: dict[Leaf, Size]
    known: dict[tuple[str, tuple[Leaf, ...]], Any] = field(default_factory=dict, compare=False)

    def leaves(self, value: str) -> list[Leaf]:
        return [leaf for dim in self.dims[value] for leaf in dim]

    def shard(self, value: str, leaf: Leaf) -> Shard | None:
        """The placement that cuts `leaf` of a value; None if it has it not exactly once."""
        if self.leaves(value).count(leaf) != 1:
            return None
        for dim, leaves in enumerate(self.dims[value]):
            if leaf in leaves:
                outer: Size = 1
                for before in leaves[: leaves.index(leaf)]:
                    outer = outer * self.size[before]
                return Shard(dim, outer, f"f{leaf}")
        return None

    def leaf_of(self, value: str, place: Shard) -> Leaf | None:
        """The leaf that a placement cuts, if its boundary falls on one."""
        return next((f for f in self.leaves(value) if self.shard(value, f) == place), None)


def infer(block: Block, cuts: Sequence[Shard | None] = ()) -> Factors:
    """Unifies the dims of all values of a block; see the module's docstring. `cuts`: where each
    input is cut into rows of the batch, since a dim of 6*batch alone does not tell: the view that
    made it may be in a block before."""
    forest = _Forest()
    dims = {
        name: [[] if size == 1 else [forest.new(size)] for size in kind.shape]
        for name, kind in block.types.items()
    }
    for name, cut in zip(block.inputs, cuts, strict=False):
        if cut is not None:
            dims[name][cut.dim] = _around_batch(forest, dims[name][cut.dim], cut.outer)
    drafts = [(node, *_apply(node, block, dims, forest)) for node in block.nodes]
    for output, tangent in block.tangents:
        _unify_dims(forest, dims[output], dims[tangent])
    for value, gradient in block.gradients:
        _unify_dims(forest, dims[value], dims[gradient])
    final = {n: tuple(tuple(forest.flat(d)) for d in ds) for n, ds in dims.items()}
    nodes = {}
    for node, signature, letters, stuck in drafts:
        operand_names = node.operands
        results = [name for name in node.outputs if name in final]

        def group(chosen: frozenset[str], letters: Letters = letters) -> frozenset[Leaf]:
            return frozenset(f for x in chosen if x in letters for f in forest.flat(letters[x]))

        nodes[node] = NodeFactors(
            tuple(final[n] for n in operand_names), tuple(final[n] for n in results),
            group(signature.whole) | frozenset(forest.flat(stuck)), group(signature.adds),
            group(signature.gathers), group(signature.indexed), signature,
        )  # fmt: skip
    sizes = {leaf: forest.size[leaf] for ds in final.values() for d in ds for leaf in d}
    return Factors(final, nodes, sizes)


def _around_batch(forest: _Forest, dim: list[Leaf], outer: Size) -> list[Leaf]:
    """A dim in three: what the batch is cut inside of, the batch, and what is inside of it."""
    before_and_batch = sympy.sympify(outer) * BATCH
    inner = quotient(_size(forest, dim), before_and_batch)
    if inner is None:
        return dim
    return [forest.new(size) for size in (outer, BATCH, inner) if size != 1]


def _unify_dims(forest: _Forest, left: list[list[Leaf]], right: list[list[Leaf]]) -> None:
    for a, b in zip(left, right, strict=True):
        forest.unify(a, b)


def _apply(
    node: Node, block: Block, dims: dict[str, list[list[Leaf]]], forest: _Forest
) -> tuple[Signature, Letters, list[Leaf]]:
    """Unifies by the node's signature; returns it, its letters' leaves and what did not match."""
    operand_names = node.operands
    result_names = [name for name in node.outputs if name in dims]
    signature = op_def(node.op).signature(
        node, tuple(block.types[n] for n in operand_names),
        tuple(block.types[n] for n in result_names),
    )  # fmt: skip
    letters: Letters = {}
    stuck: list[Leaf] = []
    tensors = [*zip(operand_names, signature.operands, strict=True),
               *zip(result_names, signature.results, strict=True)]  # fmt: skip
    for name, spelled in tensors:
        for letter, leaves in zip(spelled, dims[name], strict=True):
            if letter is None:
                continue
            if letter in letters:
                stuck += forest.unify(letters[letter], leaves)
            else:
                letters[letter] = leaves
    if signature.product:
        total, outer, inner = signature.product
        size = quotient(_size(forest, letters[total]), _size(forest, letters[outer]))
        letters[inner] = [forest.new(1 if size is None else size)]
        stuck += forest.unify(letters[total], [*letters[outer], *letters[inner]])
    if signature.regroups:
        left = [f for d in dims[operand_names[0]] for f in d]
        right = [f for d in dims[result_names[0]] for f in d]
        stuck += forest.unify(left, right)
    return signature, letters, stuck


def _size(forest: _Forest, leaves: list[Leaf]) -> Size:
    total: Size = 1
    for leaf in forest.flat(leaves):
        total = total * forest.size[leaf]
    return total
