"""Collectives by mesh axis, as emitted programs call them.

A sharded dim is seen as (outer, rest), and `rest` is cut contiguously over the axis: outer=1 is the
ordinary contiguous cut, outer=3 cuts each third of a fused qkv weight. Inputs are never changed. On
an axis of one rank every function gives its input back. Results are bit-identical on all members.
"""

from collections.abc import Sequence

import torch

from runtime.errors import UsageError
from runtime.mesh import Axis
from runtime.transport import Group, Reduction


def all_reduce(x: torch.Tensor, axis: Axis, op: Reduction = "sum") -> torch.Tensor:
    """The element-wise sum, maximum or minimum over the axis; same shape."""
    if axis.size == 1:
        return x
    return _group(axis).all_reduce(x, op)


def all_gather(x: torch.Tensor, axis: Axis, dim: int, outer: int = 1) -> torch.Tensor:
    """The whole tensor from its pieces: `dim` grows by the axis size."""
    if axis.size == 1:
        return x
    pieces = _group(axis).all_gather(x)
    if outer == 1 and dim % x.dim() == 0:
        return pieces.flatten(0, 1)
    return join(pieces.unbind(), dim, outer)


def reduce_scatter(x: torch.Tensor, axis: Axis, dim: int, outer: int = 1) -> torch.Tensor:
    """This rank's piece of the sum over the axis: `dim` shrinks by the axis size."""
    if axis.size == 1:
        return x
    return _group(axis).reduce_scatter(torch.stack(cut(x, axis.size, dim, outer)))


def all_to_all(
    x: torch.Tensor,
    axis: Axis,
    split_dim: int,
    concat_dim: int,
    split_outer: int = 1,
    concat_outer: int = 1,
) -> torch.Tensor:
    """Moves the cut from `concat_dim`, which becomes whole, to `split_dim`, which is now cut."""
    if axis.size == 1:
        return x
    pieces = _group(axis).all_to_all(torch.stack(cut(x, axis.size, split_dim, split_outer)))
    return join(pieces.unbind(), concat_dim, concat_outer)


def shard(x: torch.Tensor, axis: Axis, dim: int, outer: int = 1) -> torch.Tensor:
    """This rank's piece of a tensor that all ranks of the axis hold; no communication.

    A copy, so that the whole tensor's memory can be freed.
    """
    if axis.size == 1:
        return x
    piece = cut(x, axis.size, dim, outer)[axis.index]
    return piece.clone(memory_format=torch.contiguous_format)


def first(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """`x` on index 0 and zeros elsewhere: a replicated tensor becomes a partial sum.

    A copy, so that all ranks hold as much: a view would keep all of what it views.
    """
    return x.clone() if axis.index == 0 else torch.zeros_like(x)


def cut(x: torch.Tensor, pieces: int, dim: int, outer: int = 1) -> tuple[torch.Tensor, ...]:
    """The pieces of `x` along `dim`, seen as (outer, rest); views of `x` where outer is 1."""
    if not -x.dim() <= dim < x.dim():
        raise UsageError(f"can't cut dim {dim} of a tensor of shape {tuple(x.shape)}: no such dim.")
    dim %= x.dim()
    if x.shape[dim] % (outer * pieces):
        raise UsageError(
            f"can't cut dim {dim} of shape {tuple(x.shape)} into {outer} x {pieces} equal pieces: "
            f"{x.shape[dim]} does not divide by {outer * pieces}."
        )
    if outer == 1:
        return x.chunk(pieces, dim)
    parts = x.unflatten(dim, (outer, -1)).chunk(pieces, dim + 1)
    return tuple(part.flatten(dim, dim + 1) for part in parts)


def join(pieces: Sequence[torch.Tensor], dim: int, outer: int = 1) -> torch.Tensor:
    """The inverse of `cut`: one tensor from its pieces along `dim`."""
    dim %= pieces[0].dim()
    if outer == 1:
        return torch.cat(list(pieces), dim)
    parts = [piece.unflatten(dim, (outer, -1)) for piece in pieces]
    return torch.cat(parts, dim + 1).flatten(dim, dim + 1)


def _group(axis: Axis) -> Group:
    if axis.group is None:
        raise UsageError(f"axis {axis.name} has {axis.size} ranks but no connection between them.")
    return axis.group
