"""Rewrites captured ATen calls to a small op set that is closed under differentiation.

Input: an exported graph (pre-dispatch ATen). Output, when interpreted under `make_fx`: the same
function in terms of `shardwright::einsum`, `attention`, `cross_entropy`, `normalize`, `dropout`,
elementwise operations, sums and views. `LIFTS` has one rule per ATen operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from ir.errors import CaptureError
from ir.trace.library import ops

aten = torch.ops.aten
LETTERS = "abcdefghijklmnopqrstuvwxyz"

LIFTS: dict[Any, Callable] = {}


def lifts(*targets) -> Callable:
    """Registers a rewrite for the named ATen overloads."""

    def register(rule: Callable) -> Callable:
        LIFTS.update(dict.fromkeys(targets, rule))
        return rule

    return register


# matrix products


@lifts(aten.linear.default)
def linear(x, weight, bias=None):
    rows = LETTERS[: x.dim() - 1]
    y = ops.einsum(f"{rows}y,zy->{rows}z", x, weight)
    return y if bias is None else y + bias


@lifts(aten.matmul.default, aten.bmm.default, aten.mm.default)
def matmul(x, y):
    if x.dim() == 1 or y.dim() == 1:
        return _vector_matmul(x, y)
    batch = max(x.dim(), y.dim()) - 2
    x, y = _same_batch(x, y)
    left, right = LETTERS[batch - x.dim() + 2 : batch], LETTERS[batch - y.dim() + 2 : batch]
    out = LETTERS[:batch]
    return ops.einsum(f"{left}xy,{right}yz->{out}xz", x, y)


def _same_batch(x, y):
    """Expands size-1 leading dims so that shared letters have equal sizes."""
    if x.dim() == 2 or y.dim() == 2:
        return x, y
    shape = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return x.expand(*shape, *x.shape[-2:]), y.expand(*shape, *y.shape[-2:])


def _vector_matmul(x, y):
    if x.dim() == 1 and y.dim() == 1:
        return (x * y).sum()
    if x.dim() == 1:
        return matmul(x.unsqueeze(0), y).squeeze(-2)
    return matmul(x, y.unsqueeze(-1)).squeeze(-1)


@lifts(aten.addmm.default, aten.baddbmm.default)
def addmm(bias, x, y, *, beta=1, alpha=1):
    product = matmul(x, y)
    product = product if alpha == 1 else product * alpha
    return product + (bias if beta == 1 else bias * beta)


@lifts(aten.einsum.default)
def einsum(equation, operands, path=None):
    equation = equation.replace(" ", "")
    terms = equation.split("->")[0].split(",")
    simple = len(terms) == 2 and "->" in equation and "." not in equation
    if simple and all(len(set(term)) == len(term) for term in terms):
        return _binary_einsum(terms, equation.split("->")[1], *operands)
    return torch.einsum(equation, operands)


def _binary_einsum(terms, out, x, y):
    """Sums out letters that only one operand has, then one plain einsum."""
    first, second = terms
    lone = [i for i, letter in enumerate(first) if letter not in second + out]
    if lone:
        x, first = x.sum(lone), "".join(c for i, c in enumerate(first) if i not in lone)
    lone = [i for i, letter in enumerate(second) if letter not in first + out]
    if lone:
        y, second = y.sum(lone), "".join(c for i, c in enumerate(second) if i not in lone)
    return ops.einsum(f"{first},{second}->{out}", x, y)


# attention


class AttentionLift:
    """Lifts scaled_dot_product_attention; needs dropout ids, hence bound to an interpreter."""

    def __init__(self, interpreter: Lift):
        self.interpreter = interpreter

    def __call__(
        self, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None,
        enable_gqa=False,
    ):  # fmt: skip
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        learned = attn_mask is not None and attn_mask.is_floating_point()
        whole = q.dim() == k.dim() == v.dim() == 4 and q.shape[1] % k.shape[1] == 0
        if whole and not dropout_p and not learned and _same_rows(q, k, v):
            mask = None if attn_mask is None else attn_mask.reshape(_four(attn_mask))
            return ops.attention(q, k, v, mask, is_causal, float(scale))[0]
        return self.explicit(q, k, v, attn_mask, dropout_p, is_causal, scale)

    def explicit(self, q, k, v, mask, dropout_p, causal, scale):
        """softmax(q kᵀ · scale + mask) v, step by step."""
        if q.shape[-3:-2] != k.shape[-3:-2] and q.dim() > 2:
            repeat = q.shape[-3] // k.shape[-3]
            k, v = k.repeat_interleave(repeat, -3), v.repeat_interleave(repeat, -3)
        scores = matmul(q, k.transpose(-2, -1)) * scale
        if causal:
            rows = torch.arange(q.shape[-2], device=q.device).unsqueeze(-1)
            mask = rows >= torch.arange(k.shape[-2], device=q.device)
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(mask.logical_not(), -math.inf)
        elif mask is not None:
            scores = scores + mask
        weights = torch.softmax(scores, -1)
        if dropout_p:
            weights = self.interpreter.dropout(weights, dropout_p)
        return matmul(weights, v)


def _same_rows(q, k, v) -> bool:
    return q.shape[0] == k.shape[0] == v.shape[0] and k.shape[:3] == v.shape[:3]


def _four(mask):
    return [1] * (4 - mask.dim()) + list(mask.shape)


# normalisation


@lifts(aten.layer_norm.default)
def layer_norm(x, shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    y = ops.normalize(x, len(shape), float(eps))[0]
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@lifts(aten.group_norm.default)
def group_norm(x, groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True):
    pieces = x.reshape(x.shape[0], groups, -1)
    y = ops.normalize(pieces, 1, float(eps))[0].reshape(x.shape)
    return _affine(y, weight, bias)


def _affine(y, weight, bias):
    shape = [1, -1] + [1] * (y.dim() - 2)
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


@lifts(aten.batch_norm.default)
def batch_norm(x, weight, bias, mean, var, training, momentum, eps, cudnn_enabled=True):
    """Statistics over the whole batch, as plain sums, so that shards add up."""
    dims = [0, *range(2, x.dim())]
    shape = [1, -1] + [1] * (x.dim() - 2)
    if not training:
        y = (x - mean.reshape(shape)) * torch.rsqrt(var.reshape(shape) + eps)
        return _affine(y, weight, bias)
    count = x.numel() // x.shape[1]
    center = x.sum(dims) / count
    offset = x - center.reshape(shape)
    spread = (offset * offset).sum(dims) / count
    if mean is not None:
        unbiased = spread.detach() * (count / (count - 1))
        mean.mul_(1 - momentum).add_(center.detach() * momentum)
        var.mul_(1 - momentum).add_(unbiased * momentum)
    return _affine(offset * torch.rsqrt(spread.reshape(shape) + eps), weight, bias)


# means are sums: a mean over a sharded or micro-batched dim would be a mean of means


@lifts(aten.mean.default)
def mean(x, *, dtype=None):
    return x.sum(dtype=dtype) / x.numel()


@lifts(aten.mean.dim)
def mean_dim(x, dims, keepdim=False, *, dtype=None):
    dims = list(range(x.dim())) if not dims else list(dims)
    return x.sum(dims, keepdim, dtype=dtype) / math.prod(x.shape[d] for d in dims)


@lifts(aten.var.correction)
def var(x, dims=None, *, correction=1, keepdim=False):
    dims = list(range(x.dim())) if dims is None else list(dims)
    count = math.prod(x.shape[d] for d in dims)
    offset = x - x.sum(dims, True) / count
    return (offset * offset).sum(dims, keepdim) / (count - (1 if correction is None else correction))


@lifts(aten.std.correction)
def std(x, dims=None, *, correction=1, keepdim=False):
    return var(x, dims, correction=correction, keepdim=keepdim).sqrt()


# losses

MEAN, SUM = 1, 2


def _reduce(values, reduction):
    if reduction == MEAN:
        return mean(values)
    return values.sum() if reduction == SUM else values


def _pointwise_loss(target) -> None:
    @lifts(target)
    def rule(x, y, *args, **kwargs):
        names = [a.name for a in target._schema.arguments]
        bound = dict(zip(names[2:], args, strict=False)) | kwargs
        reduction = bound.pop("reduction", MEAN)
        if bound.get("weight") is not None or bound.get("pos_weight") is not None:
            return target(x, y, *args, **kwargs)
        return _reduce(target(x, y, reduction=0, **bound), reduction)


for _target in (
    aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
    aten.binary_cross_entropy_with_logits.default, aten.kl_div.default,
):  # fmt: skip
    _pointwise_loss(_target)


@lifts(aten.mse_loss.default)
def mse_loss(x, y, reduction=MEAN):
    return _reduce((x - y) * (x - y), reduction)


@lifts(aten.cross_entropy_loss.default)
def cross_entropy_loss(
    x, target, weight=None, reduction=MEAN, ignore_index=-100, label_smoothing=0.0
):
    """The mean divides by the number of rows that count in the whole batch."""
    plain = weight is None and not label_smoothing and not target.is_floating_point()
    if not plain:
        return torch.ops.aten.cross_entropy_loss.default(
            x, target, weight, reduction, ignore_index, label_smoothing
        )
    shape = target.shape
    if x.dim() == 1:
        x, target = x.unsqueeze(0), target.unsqueeze(0)
    if x.dim() > 2:
        x, target = x.movedim(1, -1).flatten(0, -2), target.flatten()
    losses = ops.cross_entropy(x, target, ignore_index)[0]
    if reduction == MEAN:
        count = (target != ignore_index).sum().to(losses.dtype)
        return losses.sum() / count
    return losses.sum() if reduction == SUM else losses.reshape(shape)


# operations with several results become several operations with one


@lifts(aten.split.Tensor, aten.chunk.default)
def split(x, size, dim=0, *, chunks=False):
    starts = range(0, x.shape[dim], size)
    return [x.narrow(dim, start, min(size, x.shape[dim] - start)) for start in starts]


@lifts(aten.chunk.default)
def chunk(x, count, dim=0):
    return split(x, -(-x.shape[dim] // count), dim)


@lifts(aten.split_with_sizes.default, aten.split.sizes)
def split_with_sizes(x, sizes, dim=0):
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [x.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True)]


@lifts(aten.unbind.int)
def unbind(x, dim=0):
    return [x.select(dim, i) for i in range(x.shape[dim])]


@lifts(aten.stack.default)
def stack(tensors, dim=0):
    return torch.cat([x.unsqueeze(dim) for x in tensors], dim)


@lifts(aten.one_hot.default)
def one_hot(x, classes=-1):
    if classes < 0:
        raise CaptureError("one_hot without num_classes depends on the data; give num_classes.")
    return (x.unsqueeze(-1) == torch.arange(classes, device=x.device)).to(torch.int64)


class Lift(fx.Interpreter):
    """Runs an exported graph through `LIFTS`."""

    def __init__(self, module: fx.GraphModule, *, counter: list[int] | None = None,
                 no_grad: bool = False):  # fmt: skip
        super().__init__(module)
        self.counter = counter if counter is not None else [0]
        self.no_grad = no_grad
        self.attention = AttentionLift(self)

    def dropout(self, x: Tensor, p: float, train: bool = True) -> Tensor:
        if not train or p == 0:
            return x
        self.counter[0] += 1
        return ops.dropout(x, float(p), self.counter[0])

    def call_function(self, target, args, kwargs):
        out = self.rewrite(target, args, kwargs)
        return _detached(out) if self.no_grad and not _mutates(target) else out

    def rewrite(self, target, args, kwargs):
        if target in (aten._assert_tensor_metadata.default, aten._assert_async.msg,
                      aten._assert_scalar.default, aten.sym_constrain_range_for_size.default):
            return None  # fmt: skip
        if target is aten.dropout.default:
            return self.dropout(*args, **kwargs)
        if target is aten.scaled_dot_product_attention.default:
            return self.attention(*args, **kwargs)
        if target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            return self.region(not args[0], args[1], args[2:])
        if target is torch.ops.higher_order.wrap_with_autocast:
            return self.autocast(*args)
        return LIFTS.get(target, target)(*args, **kwargs)

    def region(self, no_grad: bool, module: fx.GraphModule, operands: tuple):
        inner = Lift(module, counter=self.counter, no_grad=no_grad or self.no_grad)
        return inner.run(*operands)

    def autocast(self, device_type, dtype, enabled, cache, module, *operands):
        if enabled:
            raise CaptureError(
                "torch.autocast inside the model is not captured: its casts depend on the "
                "device. Give the model in the dtypes that it should run in."
            )
        return self.region(self.no_grad, module, operands)


def _detached(out):
    if isinstance(out, Tensor):
        return out.detach()
    return type(out)(map(_detached, out)) if isinstance(out, (list, tuple)) else out


def _mutates(target) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and schema.is_mutable
