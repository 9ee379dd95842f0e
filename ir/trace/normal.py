"""Normal forms: several ATen spellings of one operation become one.

`replay_target` simplifies calls before differentiation; the tables below it say which calls
vanish or become `view` and `full` when a traced graph is converted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ir.ops.table import BY_ROWS, aten_overload

aten = torch.ops.aten
WHOLE = sys.maxsize


def replay_target(target: Any) -> Callable[..., Any]:
    simpler: Callable[..., Any] = SIMPLER.get(target, target)
    return simpler


def _copy(destination: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return source.to(destination.dtype).expand(destination.shape)


def _full_slice(x: Tensor, dim: int, start: Any, end: Any, step: int) -> bool:
    return not start and step == 1 and (end is None or end == WHOLE or end == x.shape[dim])


def _slice(x: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Tensor:
    if _full_slice(x, dim, start, end, step):
        return x
    piece: Tensor = aten.slice.Tensor(x, dim, start, end, step)
    return piece


def _slice_scatter(
    x: Tensor, source: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Tensor:
    if _full_slice(x, dim, start, end, step):
        return source
    whole: Tensor = aten.slice_scatter.default(x, source, dim, start, end, step)
    return whole


def _cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    """One-dimensional tensors without elements count for nothing, whatever the others' dims."""
    full = [x for x in tensors if x.dim() != 1 or x.shape[0] != 0]
    whole: Tensor = aten.cat.default(full or tensors, dim)
    return whole


def _shift(target: Any) -> Callable[..., Any]:
    """A number added to a scalar becomes a tensor: a partial sum may pass through a sum of two
    tensors, but not through one with a number."""

    def rule(x: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        scalar = isinstance(x, Tensor) and x.dim() == 0 and x.is_floating_point()
        if scalar and isinstance(other, (int, float)) and other:
            other = x.new_full((), other)
        return target(x, other, *args, **kwargs)

    return rule


def _by_rows(target: Any) -> Callable[..., Any]:
    """Derivatives of these factor a matrix or its transpose, by how it lies in memory while they
    are traced: so it lies by rows, as emitted programs see to."""

    def rule(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return target(x.clone(memory_format=torch.contiguous_format), *args, **kwargs)

    return rule


SIMPLER: dict[Any, Callable[..., Any]] = {
    **{op: _by_rows(op) for op in map(aten_overload, BY_ROWS)},
    aten.add.Tensor: _shift(aten.add.Tensor),
    aten.sub.Tensor: _shift(aten.sub.Tensor),
    aten.cat.default: _cat,
    aten.copy.default: _copy,
    aten.slice.Tensor: _slice,
    aten.slice_scatter.default: _slice_scatter,
}

IDENTITY = {
    aten.detach.default, aten.alias.default, aten.clone.default, aten.lift_fresh_copy.default,
    aten.lift_fresh.default, aten.contiguous.default,
}  # fmt: skip
"""Operations that give back the values of their first input."""

COPIES = {aten.clone.default, aten.lift_fresh_copy.default, aten._to_copy.default}
"""Those, and casts to the same type, whose result does not change with what is written later."""

VIEW = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.flatten.using_ints,
    aten.view_copy.default, aten.unflatten.int,
}  # fmt: skip
"""Operations that only regroup dims: the result's shape says it all."""

FILLS: dict[Any, float | None] = {
    aten.zeros.default: 0, aten.zeros_like.default: 0, aten.new_zeros.default: 0,
    aten.ones.default: 1, aten.ones_like.default: 1, aten.new_ones.default: 1,
    aten.empty.memory_format: 0, aten.empty_like.default: 0, aten.new_empty.default: 0,
    aten.full.default: None, aten.full_like.default: None, aten.new_full.default: None,
    aten.scalar_tensor.default: None, aten.fill.Scalar: None, aten.fill_.Scalar: None,
    aten.zero.default: 0, aten.zero_.default: 0,
}  # fmt: skip
"""Constant fills and their value; None where the value is an argument. Empty reads as zero."""

NEUTRAL: dict[Any, int] = {
    aten.add.Tensor: 0, aten.sub.Tensor: 0, aten.mul.Tensor: 1, aten.div.Tensor: 1,
    aten.pow.Tensor_Scalar: 1, aten.mul.Scalar: 1, aten.add.Scalar: 0,
}  # fmt: skip
"""Second operands that leave the first as it is."""
