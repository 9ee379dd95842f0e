"""A traced graph with other sizes: models that differ only in their widths are traced once.

Input: a `Graph` traced at sizes that occur nowhere by chance (see `Sizes`), and what each of them
becomes. Output: the graph of the same model at the new sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import sympy

from ir.graph import Block, Graph, Node, TensorType

Sizes: TypeAlias = Mapping["int | float", "int | float"]
"""Traced number -> new number. Whole numbers replace sizes and literals, others only literals.

The caller chooses traced sizes so that no two of them, nor any other number in the graph, agree.
"""


def resize(graph: Graph, sizes: Sizes, dtypes: Mapping[str, str] | None = None) -> Graph:
    """Every size and literal of `graph` that is a key of `sizes` replaced; `dtypes` likewise."""
    change = _Change(sizes, dtypes or {})
    return replace(
        graph,
        inputs=tuple(replace(item, type=change.type(item.type)) for item in graph.inputs),
        state=tuple(replace(item, type=change.type(item.type)) for item in graph.state),
        blocks=tuple(change.block(block) for block in graph.blocks),
    )


class _Change:
    """Applies the two tables to every part of a graph."""

    def __init__(self, sizes: Sizes, dtypes: Mapping[str, str]) -> None:
        self.sizes, self.dtypes = dict(sizes), dict(dtypes)

    def block(self, block: Block) -> Block:
        types = {name: self.type(kind) for name, kind in block.types.items()}
        return replace(block, nodes=tuple(map(self.node, block.nodes)), types=types)

    def node(self, node: Node) -> Node:
        return replace(node, args=self.value(node.args), kwargs=self.value(node.kwargs))

    def type(self, kind: TensorType) -> TensorType:
        return TensorType(self.value(kind.shape), self.dtypes.get(kind.dtype, kind.dtype))

    def value(self, value: Any) -> Any:
        """A literal, a size or a tuple of them."""
        if isinstance(value, tuple):
            return tuple(self.value(item) for item in value)
        if isinstance(value, sympy.Basic):
            return value.xreplace({a: self._rational(a) for a in value.atoms(sympy.Rational)})
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return self.sizes.get(value, value)
        return value

    def _rational(self, atom: sympy.Rational) -> sympy.Rational:
        return sympy.Rational(self.sizes.get(atom.p, atom.p), self.sizes.get(atom.q, atom.q))
