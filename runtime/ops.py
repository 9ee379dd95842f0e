"""The composite operations of emitted programs, in plain torch.

Each is the local operation on one rank's pieces. Those that look up or normalise over a dim cut
on a mesh axis take `first`, the global index of the first local row, or the axis itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runtime.collectives import all_reduce
from runtime.mesh import Axis


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ · scale) v. q [b, h, s, d], k, v [b, kv, t, d] -> ([b, h, s, d], [b, h, s]).

    `mask` is boolean, true where a query sees a key. The second result is the logsumexp of each
    row of scores, in float32 or wider.
    """
    scores = _scores(q, _spread(k, q), mask, causal, scale)
    logsumexp = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - logsumexp.unsqueeze(-1)).to(v.dtype)
    return weights @ _spread(v, q), logsumexp


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
    mask: Tensor | None, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v; the weights are rebuilt from the logsumexp (FlashAttention-2)."""
    wide_k, wide_v = _spread(k, q), _spread(v, q)
    scores = _scores(q, wide_k, mask, causal, scale)
    weights = torch.exp(scores - logsumexp.unsqueeze(-1))
    inner = (grad * out).sum(-1, keepdim=True).to(scores.dtype)
    grad_scores = weights * ((grad @ wide_v.mT).to(scores.dtype) - inner) * scale
    grad_scores = grad_scores.to(q.dtype)
    grad_q = grad_scores @ wide_k
    grad_k = _gathered(grad_scores.mT @ q, k)
    grad_v = _gathered(weights.to(grad.dtype).mT @ grad, v)
    return grad_q, grad_k, grad_v


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = (q @ k.mT).to(wide) * scale
    if causal:
        rows = torch.arange(q.shape[-2], device=q.device).unsqueeze(-1)
        later = rows < torch.arange(k.shape[-2], device=q.device)
        scores = scores.masked_fill(later, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(mask.logical_not(), -torch.inf)
    return scores


def _spread(k: Tensor, q: Tensor) -> Tensor:
    """Key heads repeated to the number of query heads."""
    repeat = q.shape[1] // k.shape[1]
    return k if repeat == 1 else k.repeat_interleave(repeat, 1)


def _gathered(grad: Tensor, k: Tensor) -> Tensor:
    """Gradients of repeated key heads added up."""
    repeat = grad.shape[1] // k.shape[1]
    return grad if repeat == 1 else grad.unflatten(1, (k.shape[1], repeat)).sum(2)


def normalize(x: Tensor, dims: int, eps: float) -> tuple[Tensor, Tensor]:
    """Zero mean, unit variance over the last `dims` dims -> (normalised, 1 / std)."""
    over = tuple(range(-dims, 0))
    wide = x.to(_wide(x))
    variance, mean = torch.var_mean(wide, over, correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    return ((wide - mean) * rstd).to(x.dtype), rstd


def normalize_backward(grad: Tensor, normalised: Tensor, rstd: Tensor, dims: int) -> Tensor:
    """(grad - mean(grad) - n · mean(grad · n)) / std, n the normalised tensor."""
    over = tuple(range(-dims, 0))
    wide, n = grad.to(rstd.dtype), normalised.to(rstd.dtype)
    inner = (wide * n).mean(over, keepdim=True)
    return ((wide - wide.mean(over, keepdim=True) - n * inner) * rstd).to(grad.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def resample(x: Tensor, kind: str, size: list[int], align: bool, scales: list[float]) -> Tensor:
    """x [rows, channels, ...] interpolated to `size` by torch's operation `kind`."""
    call = getattr(torch.ops.aten, kind).default
    out: Tensor = call(x, size, *_settings(call, align, scales, x.dim() - 2))
    return out


def resample_backward(
    grad: Tensor, kind: str, size: list[int], align: bool, scales: list[float]
) -> Tensor:
    """The gradient of an input whose dims after rows and channels are `size`."""
    call = getattr(torch.ops.aten, f"{kind}_backward").default
    settings = _settings(call, align, scales, grad.dim() - 2)
    back: Tensor = call(grad, list(grad.shape[2:]), [*grad.shape[:2], *size], *settings)
    return back


def _settings(call: Any, align: bool, scales: list[float], dims: int) -> list[Any]:
    """`align_corners`, where an operation has it, and a scale (or None) per dim."""
    aligned = any(argument.name == "align_corners" for argument in call._schema.arguments)
    each: list[float | None] = [*scales] or [None] * dims
    return [align, *each] if aligned else [*each]


def embedding(table: Tensor, ids: Tensor, first: int = 0) -> Tensor:
    """Rows of a table that starts at global row `first`; other rows read as zero."""
    if not first and _holds_all(table, ids):
        return table[ids]
    local = ids - first
    held = (local >= 0) & (local < table.shape[0])
    rows = table[local.clamp(0, table.shape[0] - 1)]
    return rows.masked_fill(held.logical_not().unsqueeze(-1), 0)


def _holds_all(table: Tensor, ids: Tensor) -> bool:
    return ids.numel() == 0 or (int(ids.min()) >= 0 and int(ids.max()) < table.shape[0])


def embedding_backward(
    grad: Tensor, ids: Tensor, rows: int, padding: int, first: int = 0
) -> Tensor:
    """Sums the gradients of each of `rows` table rows from `first` on; `padding` gets none."""
    local = (ids - first).flatten()
    held = (local >= 0) & (local < rows) & (ids.flatten() != padding)
    table = grad.new_zeros(rows, grad.shape[-1])
    flat = grad.reshape(-1, grad.shape[-1])
    return table.index_add_(0, local[held], flat[held])


def cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int, axis: Axis | None = None
) -> tuple[Tensor, Tensor]:
    """logits [n, vocab or its piece on `axis`], target [n] -> (loss of each row, logsumexp)."""
    wide = logits.to(_wide(logits))
    largest = wide.amax(-1)
    first = 0
    if axis is not None:
        largest = all_reduce(largest, axis, "max")
        first = axis.index * logits.shape[-1]
    total = torch.exp(wide - largest.unsqueeze(-1)).sum(-1)
    picked = _picked(wide, target, first)
    if axis is not None:
        total, picked = all_reduce(total, axis), all_reduce(picked, axis)
    logsumexp = largest + torch.log(total)
    losses = (logsumexp - picked).masked_fill(target == ignore_index, 0)
    return losses.to(logits.dtype), logsumexp


def _picked(logits: Tensor, target: Tensor, first: int) -> Tensor:
    """Each row's logit of its target, zero where another rank holds it."""
    local = target - first
    held = (local >= 0) & (local < logits.shape[-1])
    place = local.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
    return logits.gather(-1, place).squeeze(-1).masked_fill(held.logical_not(), 0)


def cross_entropy_backward(
    grad: Tensor, logits: Tensor, target: Tensor, logsumexp: Tensor, ignore_index: int,
    first: int = 0,
) -> Tensor:  # fmt: skip
    """(softmax - one-hot) · grad, zero in ignored rows; `first` as in `embedding`."""
    back = torch.exp(logits.to(logsumexp.dtype) - logsumexp.unsqueeze(-1))
    local = target - first
    held = (local >= 0) & (local < logits.shape[-1])
    place = local.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
    back.scatter_add_(-1, place, -held.to(back.dtype).unsqueeze(-1))
    scale = grad.masked_fill(target == ignore_index, 0).to(back.dtype)
    return (back * scale.unsqueeze(-1)).to(logits.dtype)
