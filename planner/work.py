"""The work of one kernel, by what decides its time: sizes, bytes, dtype.

Input: a node and the local types of its operands and results. Output: `Work`, which every cost
model prices. A product's sizes come from the letters of its einsum, so the products of forward,
of input gradients and of weight gradients are told apart by their shapes alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from ir.graph import Node, TensorType
from ir.ops import op_def
from ir.ops.table import flops

COMPUTE_DTYPES = ("bfloat16", "float16", "float32", "float64")
GATHERS = ("embedding.default", "index.Tensor")
"""Ops that read of their table only the rows that they return."""
ALIGNED = 8
"""Elements; kernels for 16-bit operands load as many at a time."""
LOGIT_BYTES = {"cross_entropy": (28, 6), "cross_entropy_backward": (32, 7)}
"""Bytes moved per logit besides its own reads and writes, and kernels, of `runtime.ops`: float32
passes of cast, maximum, difference, exponential, sum (backward: scale, cast)."""


class Product(NamedTuple):
    """`batch` products of (m, k) and (k, n)."""

    batch: int
    m: int
    n: int
    k: int


class AttentionShape(NamedTuple):
    """Sizes of softmax(q k) v with `heads` query heads over `kv_heads` key heads."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel on one device.

    `moved_bytes`: operands read and results written, each once; `touched_bytes`: what separate
    kernels move (rows of a table rather than all of it; the passes of a cross-entropy);
    `kernels`: how many these are. `logits`: of a cross-entropy. `keeps_precision`: a product that
    is never quantised (`planner.logits`). `op`: the node's.
    """

    kind: str
    flops: float
    moved_bytes: float
    dtype: str
    product: Product | None = None
    attention: AttentionShape | None = None
    backward: bool = False
    touched_bytes: float = 0.0
    kernels: int = 1
    logits: int = 0
    keeps_precision: bool = False
    op: str = ""


def work_of(
    node: Node, operands: Sequence[TensorType], results: Sequence[TensorType],
    kind: str | None = None,
) -> Work:  # fmt: skip
    """The work of a node on local types: of every `Ref` in order, and of what it defines.

    `kind` replaces the op's own, for a view that has to copy.
    """
    names = node.operands
    local = dict(zip(names, operands, strict=True))
    made = dict(zip(node.outputs, results, strict=False))
    shapes = {name: sizes(kind_) for name, kind_ in (local | made).items()}
    shapes.setdefault(node.outputs[0], ())
    moved = float(sum(item.bytes(1) for item in (*operands, *results)))
    logits = _logits(node, operands)
    touched, kernels = _separately(node, results, moved, logits)
    return Work(
        kind or op_def(node.op).kind, flops(node, shapes), moved, compute_dtype(operands),
        _product(node, shapes), _attention(node, shapes), node.op.endswith("_backward"),
        touched, kernels, logits, op=node.op,
    )  # fmt: skip


def sizes(kind: TensorType) -> tuple[int, ...]:
    """A local shape as numbers."""
    return tuple(int(size) for size in kind.shape)


def compute_dtype(operands: Sequence[TensorType]) -> str:
    """The dtype that a node computes in: that of its first floating operand."""
    return next((k.dtype for k in operands if k.dtype in COMPUTE_DTYPES), "float32")


def _logits(node: Node, operands: Sequence[TensorType]) -> int:
    if node.op not in LOGIT_BYTES:
        return 0
    return operands[0 if node.op == "cross_entropy" else 1].elements(1)


def _separately(
    node: Node, results: Sequence[TensorType], moved: float, logits: int
) -> tuple[float, int]:
    """Bytes and kernels when nothing is fused."""
    if node.op in GATHERS and results:
        return 2.0 * results[0].bytes(1), 1
    if logits:
        per_logit, kernels = LOGIT_BYTES[node.op]
        return moved + per_logit * logits, kernels
    return moved, 1


def _product(node: Node, shapes: Mapping[str, tuple[int, ...]]) -> Product | None:
    """Letters of both operands and the result are batch; of both operands only, summed."""
    if node.op != "einsum":
        return None
    terms, out = node.args[0].split("->")
    first, second = terms.split(",")
    size: dict[str, int] = {}
    for term, ref in zip((first, second), node.args[1:], strict=True):
        size.update(zip(term, shapes[ref.name], strict=True))
    kept = [c for c in size if c in out]
    batch = prod(size[c] for c in kept if c in first and c in second)
    m = prod(size[c] for c in kept if c not in second)
    n = prod(size[c] for c in kept if c not in first)
    k = prod(size[c] for c in size if c not in out)
    # a transposed operand has its rows along m: what is misaligned there is named n
    if m % ALIGNED and not n % ALIGNED and size[first[-1]] % ALIGNED:
        m, n = n, m
    return Product(batch, m, n, k)


def _attention(node: Node, shapes: Mapping[str, tuple[int, ...]]) -> AttentionShape | None:
    if node.op not in ("attention", "attention_backward"):
        return None
    first = 1 if node.op == "attention_backward" else 0
    q, k = shapes[node.args[first].name], shapes[node.args[first + 1].name]
    causal = bool(node.args[7 if first else 4])
    return AttentionShape(q[0], q[1], k[1], q[2], k[2], q[3], causal)
