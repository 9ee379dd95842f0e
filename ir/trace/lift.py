"""How captured ATen calls become a small op set that is closed under differentiation.

`LIFTS` has one rule per ATen operation: a function of the call's arguments that computes the same
with `shardwright::einsum`, `cross_entropy`, `normalize`, elementwise operations, sums and views.
`ir.trace.interpret` runs a graph through it and the tables of `lift_losses` and `lift_layers`;
attention is there, dropout in `dropouts`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ir.errors import CaptureError
from ir.trace.library import ops

aten = torch.ops.aten
LETTERS = "abcdefghijklmnopqrstuvwxyz"

Rule = TypeVar("Rule", bound=Callable[..., Any])


class Rules(dict[Any, Callable[..., Any]]):
    """A rewrite for each ATen overload that has one."""

    def of(self, *targets: Any) -> Callable[[Rule], Rule]:
        """Registers the function below as the rewrite of the named overloads."""

        def register(rule: Rule) -> Rule:
            self.update(dict.fromkeys(targets, rule))
            return rule

        return register


LIFTS = Rules()
lifts = LIFTS.of


# matrix products


@lifts(aten.linear.default)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = LETTERS[: x.dim() - 1]
    y: Tensor = ops.einsum(f"{rows}y,zy->{rows}z", x, weight)
    return y if bias is None else y + bias


@lifts(aten.matmul.default, aten.bmm.default, aten.mm.default)
def matmul(x: Tensor, y: Tensor) -> Tensor:
    if x.dim() == 1 or y.dim() == 1:
        return _vector_matmul(x, y)
    batch = max(x.dim(), y.dim()) - 2
    x, y = _same_batch(x, y)
    left, right = LETTERS[batch - x.dim() + 2 : batch], LETTERS[batch - y.dim() + 2 : batch]
    out = LETTERS[:batch]
    product: Tensor = ops.einsum(f"{left}xy,{right}yz->{out}xz", x, y)
    return product


def _same_batch(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Expands size-1 leading dims so that shared letters have equal sizes."""
    if x.dim() == 2 or y.dim() == 2:
        return x, y
    # torch leaves the next function untyped
    shape = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])  # type: ignore[no-untyped-call]
    return x.expand(*shape, *x.shape[-2:]), y.expand(*shape, *y.shape[-2:])


def _vector_matmul(x: Tensor, y: Tensor) -> Tensor:
    if x.dim() == 1 and y.dim() == 1:
        return (x * y).sum()
    if x.dim() == 1:
        return matmul(x.unsqueeze(0), y).squeeze(-2)
    return matmul(x, y.unsqueeze(-1)).squeeze(-1)


@lifts(aten.addmm.default, aten.baddbmm.default)
def addmm(
    bias: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    product = matmul(x, y)
    product = product if alpha == 1 else product * alpha
    return product + (bias if beta == 1 else bias * beta)


@lifts(aten.einsum.default)
def einsum(equation: str, operands: list[Tensor], path: Any = None) -> Tensor:
    equation = equation.replace(" ", "")
    terms = equation.split("->")[0].split(",")
    simple = len(terms) == 2 and "->" in equation and "." not in equation
    if simple and all(len(set(term)) == len(term) for term in terms):
        return _binary_einsum(terms, equation.split("->")[1], *operands)
    return torch.einsum(equation, operands)


def _binary_einsum(terms: list[str], out: str, x: Tensor, y: Tensor) -> Tensor:
    """Sums out letters that only one operand has, then one plain einsum."""
    first, second = terms
    lone = [i for i, letter in enumerate(first) if letter not in second + out]
    if lone:
        x, first = x.sum(lone), "".join(c for i, c in enumerate(first) if i not in lone)
    lone = [i for i, letter in enumerate(second) if letter not in first + out]
    if lone:
        y, second = y.sum(lone), "".join(c for i, c in enumerate(second) if i not in lone)
    product: Tensor = ops.einsum(f"{first},{second}->{out}", x, y)
    return product


# normalisation


@lifts(aten.layer_norm.default)
def layer_norm(
    x: Tensor, shape: list[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, cudnn_enable: bool = True,
) -> Tensor:  # fmt: skip
    y: Tensor = ops.normalize(x, len(shape), float(eps))[0]
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@lifts(aten.group_norm.default)
def group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, cudnn_enabled: bool = True,
) -> Tensor:  # fmt: skip
    pieces = x.reshape(x.shape[0], groups, -1)
    y = ops.normalize(pieces, 1, float(eps))[0].reshape(x.shape)
    return _affine(y, weight, bias)


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    shape = [1, -1] + [1] * (y.dim() - 2)
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


@lifts(aten.batch_norm.default)
def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None,
    training: bool, momentum: float, eps: float, cudnn_enabled: bool = True,
) -> Tensor:  # fmt: skip
    """Statistics over the whole batch, as plain sums, so that shards add up."""
    dims = [0, *range(2, x.dim())]
    shape = [1, -1] + [1] * (x.dim() - 2)
    if not training:
        assert mean is not None and var is not None  # torch refuses evaluation without them
        y = (x - mean.reshape(shape)) * torch.rsqrt(var.reshape(shape) + eps)
        return _affine(y, weight, bias)
    count = x.numel() // x.shape[1]
    center = x.sum(dims) / count
    offset = x - center.reshape(shape)
    spread = (offset * offset).sum(dims) / count
    if mean is not None and var is not None:
        unbiased = spread.detach() * (count / (count - 1))
        mean.mul_(1 - momentum).add_(center.detach() * momentum)
        var.mul_(1 - momentum).add_(unbiased * momentum)
    return _affine(offset * torch.rsqrt(spread.reshape(shape) + eps), weight, bias)


@lifts(aten.instance_norm.default)
def instance_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None,
    use_input_stats: bool, momentum: float, eps: float, cudnn_enabled: bool = True,
) -> Tensor:  # fmt: skip
    """Statistics of each row and channel by itself: rows stay cut. torch's own decomposition is a
    batch norm in which rows are channels, which no rule can tell from one over rows."""
    if not use_input_stats:
        return batch_norm(x, weight, bias, mean, var, False, momentum, eps)
    pieces = x.reshape(*x.shape[:2], -1)
    if mean is not None and var is not None:
        rows, count = x.shape[0], pieces.shape[-1]
        center = mean_dim(pieces, [-1], True).detach()
        offset = pieces.detach() - center
        unbiased = (offset * offset).sum(-1) / (count - 1)
        mean.mul_(1 - momentum).add_(center.squeeze(-1).sum(0) / rows * momentum)
        var.mul_(1 - momentum).add_(unbiased.sum(0) / rows * momentum)
    y = ops.normalize(pieces, 1, float(eps))[0].reshape(x.shape)
    return _affine(y, weight, bias)


# means are sums: a mean over a sharded or micro-batched dim would be a mean of means


@lifts(aten.mean.default)
def mean(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return x.sum(dtype=dtype) / x.numel()


@lifts(aten.mean.dim)
def mean_dim(
    x: Tensor, dims: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    dims = list(range(x.dim())) if not dims else list(dims)
    return x.sum(dims, keepdim, dtype=dtype) / math.prod(x.shape[d] for d in dims)


@lifts(aten.var.correction)
def var(
    x: Tensor, dims: list[int] | None = None, *, correction: float | None = 1,
    keepdim: bool = False,
) -> Tensor:  # fmt: skip
    dims = list(range(x.dim())) if dims is None else list(dims)
    count = math.prod(x.shape[d] for d in dims)
    offset = x - x.sum(dims, True) / count
    freedom = count - (1 if correction is None else correction)
    return (offset * offset).sum(dims, keepdim) / freedom


@lifts(aten.std.correction)
def std(
    x: Tensor, dims: list[int] | None = None, *, correction: float | None = 1,
    keepdim: bool = False,
) -> Tensor:  # fmt: skip
    return var(x, dims, correction=correction, keepdim=keepdim).sqrt()


@lifts(aten.var.dim)
def var_dim(
    x: Tensor, dims: list[int] | None, unbiased: bool = True, keepdim: bool = False
) -> Tensor:
    return var(x, dims, correction=int(unbiased), keepdim=keepdim)


@lifts(aten.std.dim)
def std_dim(
    x: Tensor, dims: list[int] | None, unbiased: bool = True, keepdim: bool = False
) -> Tensor:
    return var_dim(x, dims, unbiased, keepdim).sqrt()


@lifts(aten.var_mean.correction)
def var_mean(x: Tensor, dims: list[int] | None = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return var(x, dims, **kwargs), mean_dim(x, dims, kwargs.get("keepdim", False))


@lifts(aten.std_mean.correction)
def std_mean(x: Tensor, dims: list[int] | None = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return std(x, dims, **kwargs), mean_dim(x, dims, kwargs.get("keepdim", False))


@lifts(aten.nansum.default)
def nansum(
    x: Tensor, dims: list[int] | None = None, keepdim: bool = False, *,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    dims = list(range(x.dim())) if not dims else list(dims)
    return x.masked_fill(x != x, 0).sum(dims, keepdim, dtype=dtype)


@lifts(aten.norm.ScalarOpt_dim)
def norm(x: Tensor, p: float | None, dims: list[int], keepdim: bool = False) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(x, 2 if p is None else p, dims, keepdim)
    return length


@lifts(aten.rms_norm.default)
def rms_norm(
    x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    dims = list(range(-len(shape), 0))
    y = x * torch.rsqrt(mean_dim(x * x, dims, True) + eps)
    return y if weight is None else y * weight


# padding with a constant is a concatenation: torch's own decomposition fixes the batch size


@lifts(aten.constant_pad_nd.default)
def constant_pad(x: Tensor, sizes: list[int], value: float = 0) -> Tensor:
    for dim, (before, after) in enumerate(zip(sizes[::2], sizes[1::2], strict=True)):
        x = _padded(x, -1 - dim, before, after, value)
    return x


def _padded(x: Tensor, dim: int, before: int, after: int, value: float) -> Tensor:
    """A negative size cuts off."""
    start, length = max(0, -before), x.shape[dim] + min(0, before) + min(0, after)
    x = x.narrow(dim, start, length) if min(before, after) < 0 else x
    shape = list(x.shape)
    pieces = []
    for size in (before, None, after):
        if size is None:
            pieces.append(x)
        elif size > 0:
            shape[dim] = size
            pieces.append(x.new_full(shape, value))
    return torch.cat(pieces, dim) if len(pieces) > 1 else x


@lifts(aten.pad.default)
def pad(
    x: Tensor, sizes: list[int], mode: str = "constant", value: float | None = None
) -> Tensor:
    if mode != "constant":
        padded: Tensor = aten.pad.default(x, sizes, mode, value)
        return padded
    return constant_pad(x, sizes, 0 if value is None else value)


# operations with several results become several operations with one


@lifts(aten.split.Tensor)
def split(x: Tensor, size: int, dim: int = 0) -> list[Tensor]:
    starts = range(0, x.shape[dim], size)
    return [x.narrow(dim, start, min(size, x.shape[dim] - start)) for start in starts]


@lifts(aten.chunk.default)
def chunk(x: Tensor, count: int, dim: int = 0) -> list[Tensor]:
    return split(x, -(-x.shape[dim] // count), dim)


@lifts(aten.split_with_sizes.default, aten.split.sizes)
def split_with_sizes(x: Tensor, sizes: list[int], dim: int = 0) -> list[Tensor]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [x.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True)]


@lifts(aten.unbind.int)
def unbind(x: Tensor, dim: int = 0) -> list[Tensor]:
    return [x.select(dim, i) for i in range(x.shape[dim])]


@lifts(aten.stack.default)
def stack(tensors: list[Tensor], dim: int = 0) -> Tensor:
    return torch.cat([x.unsqueeze(dim) for x in tensors], dim)


@lifts(aten.one_hot.default)
def one_hot(x: Tensor, classes: int = -1) -> Tensor:
    if classes < 0:
        raise CaptureError("one_hot without num_classes depends on the data; give num_classes.")
    return (x.unsqueeze(-1) == torch.arange(classes, device=x.device)).to(torch.int64)
