"""One node as one line of Python.

Input: a node of a `Lowered` block and the names of its values. Output: the right-hand side.
`WRITERS` holds the operations whose call depends on the layout; the rest follow the op table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import sympy

from codegen.tables import shard_text
from ir.graph import Node, Ref, evaluate
from ir.layout import Layout, Shard
from ir.lower import Lowered
from ir.ops import op_def
from ir.ops.table import BY_ROWS, creates
from ir.spmd import Spmd
from ir.strategies import Strategy

MAX_INT = 2**63 - 1


class NodeText:
    """Writes the nodes of one lowered block in one region (`rows`: pieces of the batch)."""

    def __init__(self, spmd: Spmd, lowered: Lowered, rows: int, names: dict[str, str],
                 types: dict[str, Any]):  # fmt: skip
        self.spmd, self.lowered, self.rows = spmd, lowered, rows
        self.names, self.types = names, types

    def __call__(self, node: Node) -> str:
        if node.op in WRITERS:
            return WRITERS[node.op](self, node)
        text = op_def(node.op).text
        args = [self.value(a) for a in node.args]
        if "{0}" in text and not node.kwargs:
            return text.format(*args)
        call = text if "{0}" not in text else f"torch.ops.aten.{node.op}"
        words = [*args, *(f"{k}={self.value(v)}" for k, v in node.kwargs if v is not None)]
        words += ["device=ctx.device"] if creates(node.op) else []
        return f"{call}({', '.join(words)})"

    def value(self, argument: Any) -> str:
        """An argument as a Python expression."""
        if isinstance(argument, Ref):
            return self.names[argument.name]
        if isinstance(argument, (tuple, list)):
            return "[" + ", ".join(self.value(item) for item in argument) + "]"
        if isinstance(argument, str) and argument.startswith("torch."):
            return argument
        if isinstance(argument, sympy.Basic):
            argument = evaluate(argument, self.spmd.degrees.batch)
        if isinstance(argument, float) and not math.isfinite(argument):
            return f'float("{argument}")'
        return repr(argument)

    def shape(self, name: str) -> str:
        sizes = self.types[name].shape
        return "(" + ", ".join(map(str, sizes)) + ("," if len(sizes) == 1 else "") + ")"

    def strategy(self, node: Node) -> Strategy:
        return self.lowered.chosen[node.outputs[0]]

    def cut_dim(self, name: str, dim: int) -> bool:
        """Whether the tensor axis cuts this dim of a value."""
        place = self.lowered.layouts[name].tensor
        return isinstance(place, Shard) and place.dim == dim and self.spmd.degrees.tensor > 1


def _reshaping(method: str) -> Callable[[NodeText, Node], str]:
    """view and expand are written with the local shape of their result."""

    def write(text: NodeText, node: Node) -> str:
        sizes = ", ".join(map(str, text.types[node.outputs[0]].shape)) or "()"
        return f"{text.value(node.args[0])}.{method}({sizes})"

    return write


def _permute(text: NodeText, node: Node) -> str:
    return f"{text.value(node.args[0])}.permute({', '.join(map(str, node.args[1]))})"


def _sum(text: NodeText, node: Node) -> str:
    x, dims, keep = node.args
    words = [str(tuple(dims))] if dims else []
    words += ["keepdim=True"] if keep and dims else []
    words += [f"{k}={text.value(v)}" for k, v in node.kwargs if v is not None]
    return f"{text.value(x)}.sum({', '.join(words)})"


def _full(text: NodeText, node: Node) -> str:
    dtype = text.types[node.outputs[0]].dtype
    fill = text.value(node.args[0])
    shape = text.shape(node.outputs[0])
    return f"torch.full({shape}, {fill}, dtype=torch.{dtype}, device=ctx.device)"


def _arange(text: NodeText, node: Node) -> str:
    dtype = text.types[node.outputs[0]].dtype
    args = ", ".join(text.value(a) for a in node.args)
    return f"torch.arange({args}, dtype=torch.{dtype}, device=ctx.device)"


def _to(text: NodeText, node: Node) -> str:
    return f"{text.value(node.args[0])}.to(torch.{text.types[node.outputs[0]].dtype})"


def _einsum(text: NodeText, node: Node) -> str:
    equation, x, y = node.args
    return f'torch.einsum("{equation}", {text.value(x)}, {text.value(y)})'


def _composite(name: str) -> Callable[[NodeText, Node], str]:
    def write(text: NodeText, node: Node) -> str:
        return f"ops.{name}({', '.join(text.value(a) for a in node.args)})"

    return write


def _slice(text: NodeText, node: Node) -> str:
    given: list[Any] = [*node.args, *(0, None, None, 1)[len(node.args) - 1 :]]
    x, dim, start, end, step = given
    start = "" if not start else text.value(start)
    far = end is None or (isinstance(end, int) and end >= MAX_INT)
    stop = "" if far else text.value(end)
    jump = "" if step == 1 else f":{text.value(step)}"
    before = ":, " * (dim % len(text.types[node.outputs[0]].shape))
    return f"{text.value(x)}[{before}{start}:{stop}{jump}]"


def _select(text: NodeText, node: Node) -> str:
    return f"{text.value(node.args[0])}.select({', '.join(text.value(a) for a in node.args[1:])})"


def _backward_of_view(name: str) -> Callable[[NodeText, Node], str]:
    """slice_backward and select_backward take the local shape of their result."""

    def write(text: NodeText, node: Node) -> str:
        grad, _, *rest = node.args
        shape = text.shape(node.outputs[0])
        words = [text.value(grad), shape, *(text.value(a) for a in rest)]
        return f"torch.ops.aten.{name}({', '.join(words)})"

    return write


def _by_rows(text: NodeText, node: Node) -> str:
    """With a matrix that lies by rows, as the derivative was traced for (`ir.trace.normal`)."""
    matrix, *rest = map(text.value, node.args)
    words = [f"{matrix}.contiguous()", *rest, *(f"{k}={text.value(v)}" for k, v in node.kwargs)]
    return f"torch.ops.aten.{node.op}({', '.join(words)})"


def _first(text: NodeText, rows: int) -> str:
    return f"first=mesh.tensor.index * {rows}"


def _embedding(text: NodeText, node: Node) -> str:
    table, ids = node.args[:2]
    words = [text.value(table), text.value(ids)]
    if text.cut_dim(table.name, 0):
        words.append(_first(text, text.types[table.name].shape[0]))
    return f"ops.embedding({', '.join(words)})"


def _embedding_backward(text: NodeText, node: Node) -> str:
    grad, ids, _, padding = node.args[:4]
    rows = text.types[node.outputs[0]].shape[0]
    words = [text.value(grad), text.value(ids), str(rows), text.value(padding)]
    if text.cut_dim(node.outputs[0], 0):
        words.append(_first(text, rows))
    return f"ops.embedding_backward({', '.join(words)})"


def _cross_entropy(text: NodeText, node: Node) -> str:
    words = [text.value(a) for a in node.args]
    if text.cut_dim(node.args[0].name, 1):
        words.append("axis=mesh.tensor")
    return f"ops.cross_entropy({', '.join(words)})"


def _cross_entropy_backward(text: NodeText, node: Node) -> str:
    words = [text.value(a) for a in node.args]
    logits = node.args[1].name
    if text.cut_dim(logits, 1):
        words.append(_first(text, text.types[logits].shape[1]))
    return f"ops.cross_entropy_backward({', '.join(words)})"


def _dropout(text: NodeText, node: Node) -> str:
    x, p, op = node.args
    layout: Layout = text.lowered.layouts[x.name]
    kind = text.lowered.block.types[text.lowered.origins.get(x.name, x.name)]
    shape = tuple(int(evaluate(s, text.spmd.degrees.batch)) for s in kind.shape)
    words = [str(shape)]
    for axis in ("data", "tensor"):
        place = shard_text(text.spmd, layout, axis, text.rows)
        words += [f"{axis}={place}"] if place else []
    return f"dropout({text.value(x)}, {p}, ctx.key({op}, call), ctx.where({', '.join(words)}))"


def _collective(text: NodeText, node: Node) -> str:
    x, axis, *places = node.args
    value = text.value(x)
    numbers = [str(n) for n in places]
    if axis == "data" and node.op == "shard":
        return f"ctx.rows({', '.join([value, *numbers])})"
    if axis == "data" and node.op == "first":
        return f"ctx.first({value})"
    if node.op == "all_to_all":
        have_dim, have_outer, want_dim, want_outer = numbers
        numbers = [want_dim, have_dim, want_outer, have_outer]
    return f"{node.op}({', '.join([value, f'mesh.{axis}', *numbers])})"


WRITERS: dict[str, Callable[[NodeText, Node], str]] = {
    "view": _reshaping("reshape"), "expand": _reshaping("expand"), "permute": _permute,
    "sum": _sum, "full": _full,
    "arange.default": _arange, "arange.start": _arange, "arange.start_step": _arange,
    "_to_copy.default": _to, "einsum": _einsum, "attention": _composite("attention"),
    "attention_backward": _composite("attention_backward"), "normalize": _composite("normalize"),
    "normalize_backward": _composite("normalize_backward"), "slice.Tensor": _slice,
    "select.int": _select, "slice_backward.default": _backward_of_view("slice_backward"),
    "select_backward.default": _backward_of_view("select_backward"),
    "embedding.default": _embedding, "embedding_dense_backward.default": _embedding_backward,
    "cross_entropy": _cross_entropy, "cross_entropy_backward": _cross_entropy_backward,
    "resample": _composite("resample"), "resample_backward": _composite("resample_backward"),
    "dropout": _dropout, "all_reduce": _collective, "all_gather": _collective,
    "reduce_scatter": _collective, "all_to_all": _collective, "shard": _collective,
    "first": _collective, **dict.fromkeys(BY_ROWS, _by_rows),
}  # fmt: skip
