"""The rows of the op table.

`op_def(name)` gives the row of an operation: its signature rule, its kind and FLOPs for the cost
model, and how codegen writes it. An operation without a row is replicated and reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ir.graph import Node
from ir.ops import signature as sig
from ir.ops.pairs import distances, distances_backward
from ir.ops.signature import SignatureRule, along, linear_in, pointwise


@dataclass(frozen=True, slots=True)
class OpDef:
    """One row. `kind` is what the cost model calls it; `text` the call that codegen writes.

    `text` is a format of the argument texts (`{0} + {1}`), or a function's name; an empty text
    means that codegen has a rule of its own because the call depends on the layout.
    """

    name: str
    signature: SignatureRule
    kind: str = "memory"
    text: str = ""
    known: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ("matmul", "conv", "attention", "memory", "view"):
            raise ValueError(f"{self.name}: unknown kind {self.kind!r}")


def _argument(position: int, default: Any) -> Callable[[Node], Any]:
    return lambda node: node.args[position] if len(node.args) > position else default


def _padded(node: Node) -> tuple[int, ...]:
    """Dims that constant_pad_nd pads: its list runs from the last dim, two entries each."""
    return tuple(-1 - i for i in range(len(node.args[1]) // 2))


SIGNATURES: dict[str, tuple[SignatureRule, str]] = {
    "view": (sig.view, "view"),
    "expand": (sig.expand, "view"),
    "permute": (sig.permute, "view"),
    "sum": (sig.total, "memory"),
    "full": (sig.fill, "memory"),
    "einsum": (sig.einsum, "matmul"),
    "attention": (sig.attention, "attention"),
    "attention_backward": (sig.attention_backward, "attention"),
    "normalize": (sig.normalize, "memory"),
    "normalize_backward": (sig.normalize_backward, "memory"),
    "cross_entropy": (sig.cross_entropy, "memory"),
    "cross_entropy_backward": (sig.cross_entropy_backward, "memory"),
    "dropout": (sig.dropout, "memory"),
    "resample": (sig.resample, "memory"),
    "resample_backward": (sig.resample, "memory"),
    "embedding.default": (sig.embedding, "memory"),
    "embedding_dense_backward.default": (sig.embedding_backward, "memory"),
    "convolution.default": (sig.convolution, "conv"),
    "convolution_backward.default": (sig.convolution_backward, "conv"),
    "index.Tensor": (sig.index, "memory"),
    "index_put.default": (sig.index_put, "memory"),
    "_to_copy.default": (sig.cast, "memory"),
    "view_as_real.default": (sig.view_as_real, "view"),
    "view_as_complex.default": (sig.view_as_complex, "view"),
    "slice.Tensor": (along(_argument(1, 0), linear=linear_in(0)), "view"),
    "slice_backward.default": (along(_argument(2, 0), linear=linear_in(0)), "memory"),
    "select_backward.default": (along(_argument(2, 0), linear=linear_in(0)), "memory"),
    "select_scatter.default": (along(_argument(2, 0), linear=linear_in((0, 1))), "memory"),
    "slice_scatter.default": (along(_argument(2, 0), linear=linear_in((0, 1))), "memory"),
    "select.int": (along(_argument(1, 0), linear=linear_in(0)), "view"),
    "cat.default": (along(_argument(1, 0)), "memory"),
    "constant_pad_nd.default": (along(_padded), "memory"),
    "_softmax.default": (along(_argument(1, -1)), "memory"),
    "_log_softmax.default": (along(_argument(1, -1)), "memory"),
    "_softmax_backward_data.default": (along(_argument(2, -1), linear=linear_in(0)), "memory"),
    "_log_softmax_backward_data.default": (along(_argument(2, -1), linear=linear_in(0)), "memory"),
    "cumsum.default": (along(_argument(1, 0), linear=linear_in(0)), "memory"),
    "amax.default": (along(_argument(1, ())), "memory"),
    "amin.default": (along(_argument(1, ())), "memory"),
    "linalg_vector_norm.default": (along(_argument(2, None)), "memory"),
    "max.dim": (along(_argument(1, -1)), "memory"),
    "min.dim": (along(_argument(1, -1)), "memory"),
    "argmax.default": (along(_argument(1, None)), "memory"),
    "logsumexp.default": (along(_argument(1, -1)), "memory"),
    "sort.default": (along(_argument(1, -1)), "memory"),
    "topk.default": (along(_argument(2, -1)), "memory"),
    "median.dim": (along(_argument(1, -1)), "memory"),
    "cumprod.default": (along(_argument(1, 0)), "memory"),
    "prod.dim_int": (along(_argument(1, 0)), "memory"),
    "any.dim": (along(_argument(1, 0)), "memory"),
    "any.default": (along(_argument(1, None)), "memory"),
    "all.dim": (along(_argument(1, 0)), "memory"),
    "all.default": (along(_argument(1, None)), "memory"),
    "max.default": (along(_argument(1, None)), "memory"),
    "min.default": (along(_argument(1, None)), "memory"),
    "roll.default": (along(_argument(2, ()), linear=linear_in(0)), "memory"),
    "_cdist_forward.default": (distances, "memory"),
    "_cdist_backward.default": (distances_backward, "memory"),
    "gather.default": (sig.gather, "memory"),
    "scatter.src": (sig.gather, "memory"),
    "scatter.value": (sig.gather, "memory"),
    "scatter_add.default": (sig.gather, "memory"),
    "im2col.default": (sig.rows, "memory"),
    "col2im.default": (sig.rows, "memory"),
    "grid_sampler_2d.default": (sig.grid_sample, "memory"),
    "grid_sampler_2d_backward.default": (sig.grid_sample_backward, "memory"),
    "grid_sampler_3d.default": (sig.grid_sample, "memory"),
    "grid_sampler_3d_backward.default": (sig.grid_sample_backward, "memory"),
    "flip.default": (along(_argument(1, ()), linear=linear_in(0)), "memory"),
    "tril.default": (along(lambda node: (-2, -1), linear=linear_in(0)), "memory"),
    "triu.default": (along(lambda node: (-2, -1), linear=linear_in(0)), "memory"),
}


def _last(count: int) -> Callable[[Node], Any]:
    """The last dims, whatever the node."""
    return lambda _: tuple(range(-count, 0))


def _windows() -> Iterator[tuple[str, tuple[SignatureRule, str]]]:
    """Pooling and padding: rows and channels are free, the dims that windows move over are not."""
    kinds = {
        "max_pool{}_with_indices": (), "avg_pool{}": linear_in(0),
        "_adaptive_avg_pool{}": linear_in(0), "reflection_pad{}": linear_in(0),
        "replication_pad{}": linear_in(0), "adaptive_max_pool{}": (),
    }  # fmt: skip
    for name, linear in kinds.items():
        for count in (1, 2, 3) if name.endswith("_pad{}") else (2, 3):
            base = name.format(f"{count}d")
            yield f"{base}.default", (along(_last(count), linear=linear), "memory")
            yield f"{base}_backward.default", (along(_last(count), linear=linear_in(0)), "memory")
    for count in (2, 3):
        yield f"max_unpool{count}d.default", (along(_last(count), linear=linear_in(0)), "memory")


SIGNATURES |= dict(_windows())

LINEAR: dict[str, tuple[frozenset[int], ...]] = {
    "add.Tensor": linear_in((0, 1)),
    "sub.Tensor": linear_in((0, 1)),
    "mul.Tensor": linear_in(0, 1),
    "div.Tensor": linear_in(0),
    "mul.Scalar": linear_in(0),
    "div.Scalar": linear_in(0),
    "neg.default": linear_in(0),
    "where.self": linear_in((1, 2)),
    "gelu_backward.default": linear_in(0),
    "silu_backward.default": linear_in(0),
    "tanh_backward.default": linear_in(0),
    "sigmoid_backward.default": linear_in(0),
    "threshold_backward.default": linear_in(0),
    "_conj.default": linear_in(0),
}

BY_ROWS = ("_linalg_det.default", "_linalg_slogdet.default", "_linalg_solve_ex.default")
"""What torch differentiates by how its first operand lies in memory: by rows, in our programs."""

ALSO_POINTWISE = (
    "hardtanh_backward.default", "leaky_relu_backward.default",
    "elu_backward.default", "softplus_backward.default", "smooth_l1_loss_backward.default",
    "huber_loss_backward.default", "masked_fill.Tensor", "hardsigmoid_backward.default",
    "hardswish_backward.default", "log_sigmoid_backward.default", "_conj.default",
    "smooth_l1_loss.default", "huber_loss.default", "l1_loss.default", "mish_backward.default",
    "binary_cross_entropy_with_logits.default", "binary_cross_entropy.default",
    "binary_cross_entropy_backward.default", "soft_margin_loss.default",
    "soft_margin_loss_backward.default", "log_sigmoid_forward.default",
    "hardswish.default", "_prelu_kernel.default", "_prelu_kernel_backward.default",
)  # fmt: skip

OPERATORS = {
    "add.Tensor": "{0} + {1}", "sub.Tensor": "{0} - {1}", "mul.Tensor": "{0} * {1}",
    "mul.Scalar": "{0} * {1}", "div.Tensor": "{0} / {1}", "div.Scalar": "{0} / {1}",
    "neg.default": "-{0}", "pow.Tensor_Scalar": "{0} ** {1}", "eq.Tensor": "{0} == {1}",
    "ne.Scalar": "{0} != {1}", "lt.Scalar": "{0} < {1}", "gt.Scalar": "{0} > {1}",
    "ge.Scalar": "{0} >= {1}", "le.Scalar": "{0} <= {1}", "eq.Scalar": "{0} == {1}",
    "lt.Tensor": "{0} < {1}", "gt.Tensor": "{0} > {1}", "ge.Tensor": "{0} >= {1}",
    "le.Tensor": "{0} <= {1}", "ne.Tensor": "{0} != {1}", "bitwise_and.Tensor": "{0} & {1}",
    "bitwise_or.Tensor": "{0} | {1}", "bitwise_not.default": "~{0}",
    "add.Scalar": "{0} + {1}", "sub.Scalar": "{0} - {1}",
}  # fmt: skip


def _is_pointwise(name: str) -> bool:
    overload = aten_overload(name)
    return overload is not None and torch.Tag.pointwise in overload.tags


def aten_overload(name: str) -> Any:
    """The ATen overload behind a dotted name, or None."""
    base, _, kind = name.partition(".")
    return getattr(getattr(torch.ops.aten, base, None), kind, None)


def _written(name: str) -> str:
    """How codegen writes a plain call: an operator, `torch.name`, or the ATen overload."""
    if name in OPERATORS:
        return OPERATORS[name]
    base = name.partition(".")[0]
    public = getattr(torch, base, None)
    plain = not base.startswith("_") and base not in ("slice", "select", "index", "index_put")
    if callable(public) and plain and name not in ("max.dim", "min.dim", "where.Scalar"):
        return f"torch.{base}"
    return f"torch.ops.aten.{name}"


@cache
def op_def(name: str) -> OpDef:
    """The row of an operation; an unknown one is replicated (`known` is False)."""
    if name in SIGNATURES:
        rule, kind = SIGNATURES[name]
        return OpDef(name, rule, kind, _written(name) if "." in name else "")
    if name in LINEAR or name in ALSO_POINTWISE or _is_pointwise(name):
        return OpDef(name, pointwise(LINEAR.get(name, ())), "memory", _written(name))
    return OpDef(name, sig.unknown, "memory", _written(name), known=creates(name))


def creates(name: str) -> bool:
    """Whether an operation makes a tensor of plain numbers, on a device that it is told."""
    overload = aten_overload(name)
    arguments = overload._schema.arguments if overload is not None else ()
    tensors = any("Tensor" in str(argument.type) for argument in arguments)
    return not tensors and any(argument.name == "device" for argument in arguments)


def flops(node: Node, shapes: dict[str, tuple[int, ...]]) -> float:
    """Floating-point operations of a node on tensors of these (local, concrete) shapes."""
    match node.op:
        case "einsum":
            size = _einsum_sizes(node, shapes)
            return 2.0 * _product(size.values())
        case "attention" | "attention_backward":
            return _attention_flops(node, shapes)
        case "convolution.default" | "convolution_backward.default":
            return _convolution_flops(node, shapes)
        case _:
            return float(_product(shapes[node.outputs[0]]))


def _einsum_sizes(node: Node, shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    terms = node.args[0].split("->")[0].split(",")
    size: dict[str, int] = {}
    for term, ref in zip(terms, node.args[1:], strict=True):
        size.update(zip(term, shapes[ref.name], strict=True))
    return size


def _attention_flops(node: Node, shapes: dict[str, tuple[int, ...]]) -> float:
    """Two products of 2·b·h·s·t·d forward, five backward; half of it when causal."""
    backward = node.op == "attention_backward"
    q = shapes[node.args[1 if backward else 0].name]
    k = shapes[node.args[2 if backward else 1].name]
    causal = node.args[7 if backward else 4]
    products = 5 if backward else 2
    return products * 2.0 * _product(q) * k[2] * (0.5 if causal else 1.0)


def _convolution_flops(node: Node, shapes: dict[str, tuple[int, ...]]) -> float:
    """2 per multiply: output elements times the kernel's elements per output channel."""
    if node.op == "convolution.default":
        weight = shapes[node.args[1].name]
        return 2.0 * _product(shapes[node.outputs[0]]) * _product(weight[1:])
    weight = shapes[node.args[2].name]
    return 4.0 * _product(shapes[node.args[0].name]) * _product(weight[1:])


def _product(sizes: Any) -> int:
    total = 1
    for size in sizes:
        total *= int(size)
    return total
