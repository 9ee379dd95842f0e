"""Which values of a lowered block share memory: views lie in the storage of what they view.

Input: a `Lowered` block. Output: for every value the value that owns its storage. A view whose
strides do not allow it (heads merged after a transpose) is a copy, and owns its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ir.errors import UsageError
from ir.graph import Node, TensorType
from ir.layout import DATA
from ir.lower import Lowered
from ir.ops import op_def

_MOST_BYTES = 2**62
"""Of one tensor; torch counts in 64 bits."""
ALIGNMENT = 16
"""Bytes that a copy to the host begins at a multiple of (`runtime.host`)."""
_STRIDED: dict[str, Callable[[Tensor, Node, tuple[int, ...]], Tensor]] = {
    "view": lambda x, node, shape: x.view(shape),
    "expand": lambda x, node, shape: x.expand(shape),
    "permute": lambda x, node, shape: x.permute(node.args[1]),
    "slice.Tensor": lambda x, node, shape: torch.ops.aten.slice.Tensor(x, *node.args[1:]),
    "select.int": lambda x, node, shape: torch.ops.aten.select.int(x, *node.args[1:]),
    "shard": lambda x, node, shape: _rows(x, node, shape),
    "view_as_real.default": lambda x, node, shape: torch.view_as_real(x),
    "view_as_complex.default": lambda x, node, shape: torch.view_as_complex(x),
}


@dataclass(frozen=True)
class Storage:
    """`owner` of every value, and the bytes of every owner; `spans`: of every value the first byte
    that it reads there, and the one behind the last."""

    owner: dict[str, str]
    size_bytes: dict[str, int]
    spans: dict[str, tuple[int, int]]

    def bytes_of(self, names: Iterable[str]) -> int:
        """The bytes that hold these values, each storage once."""
        return sum(self.size_bytes[o] for o in dict.fromkeys(self.owner[n] for n in names))

    def again(self, nodes: Iterable[Node], given: Iterable[str]) -> Storage:
        """For nodes that may make a storage again of which `given` values, views, hold the old."""
        nodes = tuple(nodes)
        made = {name for node in nodes for name in node.outputs}
        old = {name: f"old {o}" for name in given if (o := self.owner[name]) in made}
        sizes = {name: self.size_bytes[self.owner[value]] for value, name in old.items()}
        return self._moved(nodes, old, sizes) if old else self

    def fetched(self, nodes: Iterable[Node], hosted: Iterable[str]) -> Storage:
        """For nodes that find the values `hosted` in copies of their own, each of the span of
        their old storage that they read."""
        copies = {name: f"fetched {self.owner[name]}" for name in hosted}
        ends: dict[str, tuple[int, int]] = {}
        for name, copy in copies.items():
            low, high = ends.get(copy, self.spans[name])
            start, end = self.spans[name]
            ends[copy] = min(low, start), max(high, end)
        sizes = {copy: end - start for copy, (start, end) in ends.items()}
        return self._moved(nodes, copies, sizes) if copies else self

    def _moved(
        self, nodes: Iterable[Node], moved: dict[str, str], sizes: dict[str, int]
    ) -> Storage:
        """With other owners for some values, and for what the nodes make as views of them."""
        owner = self.owner | moved
        for node in nodes:
            if node.outputs[0] in owner and self.is_alias(node):
                owner[node.outputs[0]] = owner[node.operands[0]]
        return replace(self, owner=owner, size_bytes=self.size_bytes | sizes)

    def is_alias(self, node: Node) -> bool:
        """Whether a node only looks at the memory of its operand."""
        return self.owner[node.outputs[0]] != node.outputs[0]


def storage_of(lowered: Lowered) -> Storage:
    """Follows strides, on tensors without data, through all nodes of a block."""
    tangents = [tangent for _, tangent in lowered.block.tangents]
    given = (*lowered.block.inputs, *tangents, *lowered.early)
    return _followed((*lowered.forward, *lowered.backward), given, lowered.types)


def copied_views(lowered: Lowered) -> frozenset[str]:
    """Views of views that have to copy even where what both look at is contiguous."""
    nodes, types = (*lowered.forward, *lowered.backward), lowered.types
    makers = {node.outputs[0]: node for node in nodes if node.op in _STRIDED}
    found = set[str]()
    for node in nodes:
        first = makers.get(node.operands[0]) if node.op in _STRIDED else None
        if first is None:
            continue
        below = {first.operands[0]: _contiguous(types[first.operands[0]])}
        between = _viewed(first, below, types)
        if between is not None and _viewed(node, {node.operands[0]: between}, types) is None:
            found.update(node.outputs)
    return frozenset(found)


def early_storage(lowered: Lowered) -> Storage:
    """Of the prologue, which has other sizes."""
    return _followed(lowered.prologue, lowered.block.inputs, lowered.early_types)


def _followed(
    nodes: Iterable[Node], given: Iterable[str], types: dict[str, TensorType]
) -> Storage:
    shapes: dict[str, Tensor] = {}
    owner: dict[str, str] = {}
    for name in given:
        if name in types:
            shapes[name], owner[name] = _contiguous(types[name]), name
    for node in nodes:
        viewed = _viewed(node, shapes, types)
        if viewed is not None:
            source = node.operands[0]
            shapes[node.outputs[0]], owner[node.outputs[0]] = viewed, owner[source]
            continue
        for name in node.outputs:
            if name in types:
                shapes[name], owner[name] = _like_operand(node, types[name], shapes), name
    sizes = {name: types[name].bytes(1) for name in set(owner.values())}
    return Storage(owner, sizes, {name: _span(shapes[name]) for name in owner})


def _span(x: Tensor) -> tuple[int, int]:
    """As copies to the host have it (`runtime.host`)."""
    first_byte = int(x.storage_offset()) * x.element_size()
    reach = sum((int(n) - 1) * int(step) for n, step in zip(x.shape, x.stride(), strict=True))
    end_byte = first_byte + (reach + 1) * x.element_size() if x.numel() else first_byte
    return first_byte - first_byte % ALIGNMENT, end_byte


def _rows(x: Tensor, node: Node, shape: tuple[int, ...]) -> Tensor:
    """A micro-batch's rows of a value that is there for all; other pieces are copied."""
    _, axis, dim, outer = node.args
    if axis != DATA or outer != 1:
        raise RuntimeError(f"{node.op} on the {axis} axis copies")
    return x.narrow(dim, 0, shape[dim])


def _contiguous(kind: TensorType) -> Tensor:
    if kind.bytes(1) > _MOST_BYTES:
        raise UsageError(f"a tensor of {kind} has {kind.bytes(1):.1e} bytes: is a size wrong?")
    return torch.empty(_sizes(kind), dtype=getattr(torch, kind.dtype), device="meta")


def _sizes(kind: TensorType) -> tuple[int, ...]:
    return tuple(int(size) for size in kind.shape)


def _viewed(node: Node, shapes: dict[str, Tensor], types: dict[str, TensorType]) -> Tensor | None:
    """The result as a view of the operand; None if it is a new tensor."""
    rule = _STRIDED.get(node.op)
    if rule is None or node.outputs[0] not in types:
        return None
    shape = _sizes(types[node.outputs[0]])
    try:
        found = rule(shapes[node.operands[0]], node, shape)
    except RuntimeError:
        return None
    return found if tuple(found.shape) == shape else None


def _like_operand(node: Node, kind: TensorType, shapes: dict[str, Tensor]) -> Tensor:
    """Elementwise results keep the order of dims in memory of an operand of the same shape."""
    if op_def(node.op).kind == "memory" and "." in node.op:
        for name in node.operands:
            operand: Any = shapes[name]
            if tuple(operand.shape) == _sizes(kind):
                return torch.empty_like(operand, dtype=getattr(torch, kind.dtype))
    return _contiguous(kind)
