"""Composite operations that tracing keeps whole, with shapes and derivatives.

They are closed under differentiation: the gradient of an einsum is two einsums. They are only
ever run on fake tensors here; emitted programs call the functions of the same names in
`runtime.ops`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.library import custom_op

from ir.errors import CaptureError

ops = torch.ops.shardwright
Context: TypeAlias = Any
"""What an autograd rule keeps from forward to backward: attributes of its own, and tensors."""


@custom_op("shardwright::einsum", mutates_args=())
def einsum(equation: str, x: Tensor, y: Tensor) -> Tensor:
    return torch.einsum(equation, x, y)


@einsum.register_fake
def _(equation: str, x: Tensor, y: Tensor) -> Tensor:
    terms, out = equation.split("->")
    first, second = terms.split(",")
    if x.dtype != y.dtype:
        raise CaptureError(
            f"a product of {x.dtype} and {y.dtype}, which torch does not compute: the batch, or a "
            "part of the model, has another dtype than the rest."
        )
    size = {**dict(zip(second, y.shape, strict=True)), **dict(zip(first, x.shape, strict=True))}
    return x.new_empty([size[letter] for letter in out])


def _einsum_setup(ctx: Context, inputs: Any, output: Any) -> None:
    ctx.equation, x, y = inputs
    ctx.save_for_backward(x, y)


def _einsum_backward(ctx: Context, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
    x, y = ctx.saved_tensors
    terms, out = ctx.equation.split("->")
    first, second = terms.split(",")
    if x.is_complex():  # torch's gradients are conjugate
        x, y = torch.conj_physical(x), torch.conj_physical(y)
    grad_x = ops.einsum(f"{out},{second}->{first}", grad, y) if ctx.needs_input_grad[1] else None
    grad_y = ops.einsum(f"{out},{first}->{second}", grad, x) if ctx.needs_input_grad[2] else None
    return None, grad_x, grad_y


einsum.register_autograd(_einsum_backward, setup_context=_einsum_setup)


@custom_op("shardwright::attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """q [batch, heads, s, d], k and v [batch, kv_heads, t, d]; also returns the logsumexp."""
    raise RuntimeError("attention is only traced here")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out = q.new_empty([*q.shape[:-1], v.shape[-1]])
    return out, q.new_empty(q.shape[:-1], dtype=_wide(q.dtype))


@custom_op("shardwright::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
    mask: Tensor | None, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    raise RuntimeError("attention is only traced here")


@attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _attention_setup(ctx: Context, inputs: Any, output: Any) -> None:
    q, k, v, mask, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, mask, *output)


def _attention_gradient(ctx: Context, grad: Tensor, grad_logsumexp: Any) -> tuple[Any, ...]:
    q, k, v, mask, out, logsumexp = ctx.saved_tensors
    grads = ops.attention_backward(
        grad, q, k, v, out, logsumexp, mask, ctx.causal, ctx.scale
    )
    return (*grads, None, None, None)


attention.register_autograd(_attention_gradient, setup_context=_attention_setup)


@custom_op("shardwright::cross_entropy", mutates_args=())
def cross_entropy(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """logits [n, vocab], target [n] -> (loss of each row, 0 where ignored; logsumexp)."""
    raise RuntimeError("cross_entropy is only traced here")


@cross_entropy.register_fake
def _(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    rows = logits.shape[:1]
    return logits.new_empty(rows), logits.new_empty(rows, dtype=_wide(logits.dtype))


@custom_op("shardwright::cross_entropy_backward", mutates_args=())
def cross_entropy_backward(
    grad: Tensor, logits: Tensor, target: Tensor, logsumexp: Tensor, ignore_index: int
) -> Tensor:
    raise RuntimeError("cross_entropy is only traced here")


@cross_entropy_backward.register_fake
def _(
    grad: Tensor, logits: Tensor, target: Tensor, logsumexp: Tensor, ignore_index: int
) -> Tensor:
    return logits.new_empty(logits.shape)


def _cross_entropy_setup(ctx: Context, inputs: Any, output: Any) -> None:
    logits, target, ctx.ignore_index = inputs
    ctx.save_for_backward(logits, target, output[1])


def _cross_entropy_gradient(
    ctx: Context, grad: Tensor, grad_logsumexp: Any
) -> tuple[Tensor, None, None]:
    logits, target, logsumexp = ctx.saved_tensors
    back = ops.cross_entropy_backward(grad, logits, target, logsumexp, ctx.ignore_index)
    return back, None, None


cross_entropy.register_autograd(_cross_entropy_gradient, setup_context=_cross_entropy_setup)


@custom_op("shardwright::normalize", mutates_args=())
def normalize(x: Tensor, dims: int, eps: float) -> tuple[Tensor, Tensor]:
    """Zero mean and unit variance over the last `dims` dims -> (normalised, 1/std)."""
    raise RuntimeError("normalize is only traced here")


@normalize.register_fake
def _(x: Tensor, dims: int, eps: float) -> tuple[Tensor, Tensor]:
    shape = [*x.shape[: x.dim() - dims], *([1] * dims)]
    return x.new_empty(x.shape), x.new_empty(shape, dtype=_wide(x.dtype))


@custom_op("shardwright::normalize_backward", mutates_args=())
def normalize_backward(grad: Tensor, normalised: Tensor, rstd: Tensor, dims: int) -> Tensor:
    raise RuntimeError("normalize is only traced here")


@normalize_backward.register_fake
def _(grad: Tensor, normalised: Tensor, rstd: Tensor, dims: int) -> Tensor:
    return grad.new_empty(grad.shape)


def _normalize_setup(ctx: Context, inputs: Any, output: Any) -> None:
    ctx.dims = inputs[1]
    ctx.save_for_backward(*output)


def _normalize_gradient(
    ctx: Context, grad: Tensor, grad_rstd: Any
) -> tuple[Tensor, None, None]:
    return ops.normalize_backward(grad, *ctx.saved_tensors, ctx.dims), None, None


normalize.register_autograd(_normalize_gradient, setup_context=_normalize_setup)


@custom_op("shardwright::resample", mutates_args=())
def resample(x: Tensor, kind: str, size: list[int], align: bool, scales: list[float]) -> Tensor:
    """x [rows, channels, ...] interpolated to `size`; `kind` is the name of torch's operation."""
    raise RuntimeError("resample is only traced here")


@resample.register_fake
def _(x: Tensor, kind: str, size: list[int], align: bool, scales: list[float]) -> Tensor:
    return x.new_empty([*x.shape[:2], *size])


@custom_op("shardwright::resample_backward", mutates_args=())
def resample_backward(
    grad: Tensor, kind: str, size: list[int], align: bool, scales: list[float]
) -> Tensor:
    """The gradient of an input of `size` after rows and channels."""
    raise RuntimeError("resample is only traced here")


@resample_backward.register_fake
def _(grad: Tensor, kind: str, size: list[int], align: bool, scales: list[float]) -> Tensor:
    return grad.new_empty([*grad.shape[:2], *size])


def _resample_setup(ctx: Context, inputs: Any, output: Any) -> None:
    x, ctx.kind, _, ctx.align, ctx.scales = inputs
    ctx.size = list(x.shape[2:])


def _resample_gradient(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    back = ops.resample_backward(grad, ctx.kind, ctx.size, ctx.align, ctx.scales)
    return back, None, None, None, None


resample.register_autograd(_resample_gradient, setup_context=_resample_setup)


@custom_op("shardwright::dropout", mutates_args=())
def dropout(x: Tensor, p: float, op: int) -> Tensor:
    """The mask is a function of (seed, step, op, global element index): see `runtime.random`."""
    raise RuntimeError("dropout is only traced here")


@dropout.register_fake
def _(x: Tensor, p: float, op: int) -> Tensor:
    return x.new_empty(x.shape)


def _dropout_setup(ctx: Context, inputs: Any, output: Any) -> None:
    _, ctx.p, ctx.op = inputs


def _dropout_gradient(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
    return ops.dropout(grad, ctx.p, ctx.op), None, None


dropout.register_autograd(_dropout_gradient, setup_context=_dropout_setup)


CALL_SIGNATURE = "call(Tensor[] xs, str key) -> Tensor[]"
"""The opaque call that stands for a folded block while the whole model is exported."""
