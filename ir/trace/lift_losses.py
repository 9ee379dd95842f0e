"""How captured losses become elementwise operations, gathers and sums.

A mean over the batch is a sum divided by a count of the whole batch, so that rows stay cut.
`POINTWISE` holds the losses that stay themselves, without their reduction.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ir.trace.library import ops
from ir.trace.lift import Rules, mean

aten = torch.ops.aten
MEAN, SUM = 1, 2
LOSSES = Rules()

POINTWISE = (
    aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
    aten.binary_cross_entropy_with_logits.default, aten.binary_cross_entropy.default,
    aten.kl_div.default, aten.soft_margin_loss.default,
)  # fmt: skip


def _reduce(values: Tensor, reduction: int) -> Tensor:
    if reduction == MEAN:
        return mean(values)
    return values.sum() if reduction == SUM else values


def _pointwise_loss(target: Any) -> None:
    names = [argument.name for argument in target._schema.arguments]

    @LOSSES.of(target)
    def rule(*args: Any, **kwargs: Any) -> Any:
        bound = dict(zip(names, args, strict=False)) | kwargs
        reduction = bound.pop("reduction", MEAN)
        first, second = (bound.pop(name) for name in names[:2])
        return _reduce(target(first, second, reduction=0, **bound), reduction)


for _target in POINTWISE:
    _pointwise_loss(_target)


@LOSSES.of(aten.mse_loss.default)
def mse_loss(x: Tensor, y: Tensor, reduction: int = MEAN) -> Tensor:
    return _reduce((x - y) * (x - y), reduction)


@LOSSES.of(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [n, classes, ...] (or [classes]), target [n, ...] -> (loss, weight of all).

    A class is read by a gather. The mean divides by the weight of what counts.
    """
    classes = 1 if x.dim() > 1 else 0
    counts = target != ignore_index
    safe = target.masked_fill(counts.logical_not(), 0)
    picked = x.gather(classes, safe.unsqueeze(classes)).squeeze(classes)
    shares = counts.to(x.dtype) if weight is None else weight[safe] * counts
    total, losses = shares.sum(), (-picked * shares).masked_fill(counts.logical_not(), 0)
    if reduction == MEAN:
        return losses.sum() / total, total
    return losses.sum() if reduction == SUM else losses, total


@LOSSES.of(aten.cross_entropy_loss.default)
def cross_entropy_loss(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN,
    ignore_index: int = -100, label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """The mean divides by the number of rows that count in the whole batch."""
    plain = weight is None and not label_smoothing and not target.is_floating_point()
    if not plain:
        loss: Tensor = aten.cross_entropy_loss.default(
            x, target, weight, reduction, ignore_index, label_smoothing
        )
        return loss
    shape = target.shape
    if x.dim() == 1:
        x, target = x.unsqueeze(0), target.unsqueeze(0)
    if x.dim() > 2:
        x, target = x.movedim(1, -1).flatten(0, -2), target.flatten()
    losses: Tensor = ops.cross_entropy(x, target, ignore_index)[0]
    if reduction == MEAN:
        count = (target != ignore_index).sum().to(losses.dtype)
        return losses.sum() / count
    return losses.sum() if reduction == SUM else losses.reshape(shape)


@LOSSES.of(aten.multi_margin_loss.default)
def multi_margin_loss(
    x: Tensor, target: Tensor, p: float = 1, margin: float = 1, weight: Tensor | None = None,
    reduction: int = MEAN,
) -> Tensor:  # fmt: skip
    """x [n, classes] (or [classes]), target [n]: every other class has to be `margin` lower."""
    places = target.unsqueeze(-1)
    over = (x - x.gather(-1, places) + margin).clamp_min(0) ** p
    if weight is not None:
        over = over * weight[places]
    is_other = torch.arange(x.shape[-1], device=x.device) != places
    return _reduce((over * is_other).sum(-1) / x.shape[-1], reduction)


@LOSSES.of(aten.multilabel_margin_loss.default)
def multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    """x, target [n, classes] (or [classes]); the labels of a row end where its first -1 is. Every
    class that is no label has to be lower by 1 than each label."""
    counts = (target < 0).to(x.dtype).cumsum(-1) == 0
    labels = target.masked_fill(counts.logical_not(), 0)
    classes = torch.arange(x.shape[-1], device=x.device)
    is_it = (labels.unsqueeze(-1) == classes) & counts.unsqueeze(-1)
    is_other = is_it.any(-2).logical_not()
    over = (x.unsqueeze(-2) - x.gather(-1, labels).unsqueeze(-1) + 1).clamp_min(0)
    sums = (over * (counts.unsqueeze(-1) & is_other.unsqueeze(-2))).sum((-2, -1))
    return _reduce(sums / x.shape[-1], reduction)
