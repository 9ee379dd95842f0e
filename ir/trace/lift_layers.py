"""How resampling, repetition and a few layers keep the batch free.

torch's own decompositions of these read sizes as plain numbers, which fixes the batch, or end in
operations that no rule cuts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ir.errors import CaptureError
from ir.trace.dropouts import DRAWS
from ir.trace.library import ops
from ir.trace.lift import LETTERS, Rules, matmul

aten = torch.ops.aten
LAYERS = Rules()

NEAREST = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
)  # fmt: skip
SMOOTH = (
    "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip
"""Kinds of `shardwright::resample`; the smooth ones also take `align_corners`."""


def _resample(kind: str) -> None:
    @LAYERS.of(getattr(aten, kind).vec)
    def rule(x: Tensor, size: list[int] | None, *rest: Any) -> Any:
        align, scales = rest if len(rest) > 1 else (False, *rest)
        if size is None:
            size = [int(n * scale) for n, scale in zip(x.shape[2:], scales, strict=True)]
        return ops.resample(x, kind, size, align, scales or [])


for _kind in (*NEAREST, *SMOOTH):
    _resample(_kind)


@LAYERS.of(aten.affine_grid_generator.default)
def affine_grid(theta: Tensor, size: list[int], align: bool) -> Tensor:
    """theta [n, d, d + 1], size [n, c, ...] -> the place that each element reads [n, ..., d]."""
    spatial = size[2:]
    ends = [1.0 if align else (length - 1) / length for length in spatial]
    lines = [
        torch.linspace(-end, end, length, dtype=theta.dtype, device=theta.device)
        for end, length in zip(ends, spatial, strict=True)
    ]  # fmt: skip
    places = torch.meshgrid(*lines, indexing="ij")[::-1]
    base = torch.stack([*places, torch.ones_like(places[0])], -1).reshape(-1, len(spatial) + 1)
    grid: Tensor = ops.einsum("xk,njk->nxj", base, theta)
    return grid.reshape([theta.shape[0], *spatial, len(spatial)])


@LAYERS.of(aten.pixel_shuffle.default)
def pixel_shuffle(x: Tensor, factor: int) -> Tensor:
    """[..., c·f·f, h, w] -> [..., c, h·f, w·f]"""
    *lead, channels, height, width = x.shape
    fine = x.reshape(*lead, channels // factor**2, factor, factor, height, width)
    order = [*range(len(lead) + 1), -2, -4, -1, -3]
    return fine.permute(order).reshape(
        *lead, channels // factor**2, height * factor, width * factor
    )


@LAYERS.of(aten.pixel_unshuffle.default)
def pixel_unshuffle(x: Tensor, factor: int) -> Tensor:
    """[..., c, h·f, w·f] -> [..., c·f·f, h, w]"""
    *lead, channels, height, width = x.shape
    high, wide = height // factor, width // factor
    fine = x.reshape(*lead, channels, high, factor, wide, factor)
    order = [*range(len(lead) + 1), -3, -1, -4, -2]
    return fine.permute(order).reshape(*lead, channels * factor**2, high, wide)


@LAYERS.of(aten.channel_shuffle.default, aten.native_channel_shuffle.default)
def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    rows, channels, *rest = x.shape
    grouped = x.reshape(rows, groups, channels // groups, *rest)
    return grouped.transpose(1, 2).reshape(x.shape)


@LAYERS.of(aten.repeat.default)
def repeat(x: Tensor, times: list[int]) -> Tensor:
    """Each dim becomes (repeats, size): an expansion and a view, whose cuts are known."""
    x = x.reshape([1] * (len(times) - x.dim()) + list(x.shape))
    for dim, count in enumerate(times):
        if count != 1:
            pairs = [*x.shape[:dim], count, *x.shape[dim:]]
            shape = [*x.shape[:dim], count * x.shape[dim], *x.shape[dim + 1 :]]
            x = x.unsqueeze(dim).expand(pairs).reshape(shape)
    return x


@LAYERS.of(aten.tile.default)
def tile(x: Tensor, times: list[int]) -> Tensor:
    return repeat(x, [1] * (x.dim() - len(times)) + list(times))


@LAYERS.of(aten.glu.default)
def glu(x: Tensor, dim: int = -1) -> Tensor:
    half = x.shape[dim] // 2
    return x.narrow(dim, 0, half) * torch.sigmoid(x.narrow(dim, half, half))


@LAYERS.of(aten.rrelu.default)
def rrelu(
    x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False,
    generator: Any = None,
) -> Tensor:  # fmt: skip
    if training:
        raise CaptureError(f"nn.RReLU in training {DRAWS} Use nn.LeakyReLU, or call eval() on it.")
    return torch.nn.functional.leaky_relu(x, (lower + upper) / 2)


@LAYERS.of(aten.rrelu_with_noise.default)
def rrelu_with_noise(x: Tensor, noise: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return rrelu(x, *args, **kwargs)


@LAYERS.of(aten.hardshrink.default)
def hardshrink(x: Tensor, size: float = 0.5) -> Tensor:
    return x.masked_fill(x.abs() <= size, 0)


@LAYERS.of(aten.softshrink.default)
def softshrink(x: Tensor, size: float = 0.5) -> Tensor:
    return torch.where(x > 0, x - size, x + size).masked_fill(x.abs() <= size, 0)


@LAYERS.of(aten._weight_norm.default)
def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Weight normalisation (arXiv:1602.07868): v scaled to the norm g, over all dims but one."""
    others = [d for d in range(v.dim()) if d != dim % v.dim()] if dim != -1 else None
    scaled: Tensor = v * (g / torch.linalg.vector_norm(v, 2, others, keepdim=True))
    return scaled


@LAYERS.of(aten.embedding.default)
def embedding(
    table: Tensor, ids: Tensor, padding: int = -1, scale_grad: bool = False, sparse: bool = False
) -> Tensor:
    named = {"scale_grad_by_freq": scale_grad, "sparse": sparse}
    for name in (name for name, given in named.items() if given):
        raise CaptureError(
            f"an embedding with {name}=True has a gradient that depends on how often each row is "
            f"read in the whole batch, or no dense one. Leave {name} out."
        )
    rows: Tensor = aten.embedding.default(table, ids, padding)
    return rows


@LAYERS.of(aten.embedding_renorm_.default)
def embedding_renorm(table: Tensor, ids: Tensor, max_norm: float, norm_type: float) -> Tensor:
    raise CaptureError(
        "an embedding with max_norm writes into its own table in the forward pass, the rows that "
        "the whole batch reads. Normalise what is read instead, or clip rows after the step."
    )


@LAYERS.of(aten.lerp.Tensor, aten.lerp.Scalar)
def lerp(x: Tensor, end: Tensor, weight: Any) -> Tensor:
    between: Tensor = x + weight * (end - x)
    return between


@LAYERS.of(aten.mv.default)
def matrix_vector(x: Tensor, y: Tensor) -> Tensor:
    return matmul(x, y)


@LAYERS.of(aten.dot.default)
def dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum()


@LAYERS.of(aten.vdot.default)
def vdot(x: Tensor, y: Tensor) -> Tensor:
    return dot(x.conj(), y) if x.is_complex() else dot(x, y)


@LAYERS.of(aten.index_select.default)
def index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    return x[(slice(None),) * (dim % x.dim()) + (index.reshape(-1),)]


@LAYERS.of(aten.bilinear.default)
def bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., i], y [..., j], weight [o, i, j] -> [..., o]."""
    rows = LETTERS[: x.dim() - 1]
    half: Tensor = ops.einsum(f"{rows}x,zxy->{rows}zy", x, weight)
    product: Tensor = ops.einsum(f"{rows}zy,{rows}y->{rows}z", half, y)
    return product if bias is None else product + bias
