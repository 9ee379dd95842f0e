"""How windows over dims keep the batch free.

Windows become gathers of fixed places along the dims that they move over, and views.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ir.trace.lift import Rules

aten = torch.ops.aten
WINDOWS = Rules()


@WINDOWS.of(aten.unfold.default)
def unfold(x: Tensor, dim: int, size: int, step: int) -> Tensor:
    """[..., n, ...] -> [..., windows, ..., size]"""
    dim %= max(x.dim(), 1)
    if x.dim() == 0 or not isinstance(x.shape[dim], int):
        windows: Tensor = aten.unfold.default(x, dim, size, step)
        return windows
    return _windows(x, dim, size, step).movedim(dim + 1, -1)


@WINDOWS.of(aten.im2col.default)
def image_to_columns(
    x: Tensor, kernel: list[int], dilation: list[int], padding: list[int], stride: list[int]
) -> Tensor:
    """[n, c, h, w] (or without n) -> [n, c * kernel, windows]"""
    *rows, channels = x.shape[:-2]
    moves = zip((x.dim() - 2, x.dim()), kernel, stride, dilation, padding, strict=True)
    for dim, size, step, spread, before in moves:
        x = _windows(x, dim, size, step, dilation=spread, padding=before)
    high, tall, wide, broad = x.shape[-4:]
    order = [*range(len(rows) + 1), -3, -1, -4, -2]
    return x.permute(order).reshape(*rows, channels * tall * broad, high * wide)


def _windows(
    x: Tensor, dim: int, size: int, step: int, *, dilation: int = 1, padding: int = 0
) -> Tensor:
    """The dim in two: which window, and the place in it; zeros where that is in the padding."""
    length = x.shape[dim]
    count = (length + 2 * padding - dilation * (size - 1) - 1) // step + 1
    begins = torch.arange(count, device=x.device) * step - padding
    places = begins.unsqueeze(1) + torch.arange(size, device=x.device) * dilation
    found = x[(slice(None),) * dim + (places.clamp(0, length - 1).reshape(-1),)]
    found = found.reshape([*x.shape[:dim], count, size, *x.shape[dim + 1 :]])
    if not padding:
        return found
    is_outside = (places < 0) | (places >= length)
    return found.masked_fill(is_outside[(...,) + (None,) * (x.dim() - dim - 1)], 0)
