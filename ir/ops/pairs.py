"""Factor signatures of distances between all pairs: x [..., p, m], y [..., r, m] -> [..., p, r]."""

from __future__ import annotations

from typing import Any

from ir.graph import Node, TensorType
from ir.ops.signature import Dims, Signature, linear_in


def distances(node: Node, operands: Any, results: Any) -> Signature:
    """Pairs are free of each other; the coordinates of one stay together."""
    (x, y), (out,) = operands, results
    ins = _named(x, out, "p", "m"), _named(y, out, "r", "m")
    return Signature(ins, (_named(out, out, "p", "r"),), whole=frozenset("m"))


def distances_backward(node: Node, operands: Any, results: Any) -> Signature:
    """Of the gradient, x, y and the distances; the gradient of x adds up over y's points."""
    grad, x, y, out = operands
    ins = (
        _named(grad, out, "p", "r"), _named(x, out, "p", "m"), _named(y, out, "r", "m"),
        _named(out, out, "p", "r"),
    )  # fmt: skip
    return Signature(
        ins, (_named(results[0], out, "p", "m"),), whole=frozenset("m"), adds=frozenset("r"),
        linear=linear_in(0),
    )  # fmt: skip


def _named(kind: TensorType, out: TensorType, *last: str) -> Dims:
    """Leading dims align from the right with those of the distances."""
    lead, shift = len(kind.shape) - 2, len(out.shape) - len(kind.shape)
    words = (*(f"d{d + shift}" for d in range(lead)), *last)
    return tuple(None if n == 1 else w for n, w in zip(kind.shape, words, strict=True))
