"""Flat pieces of tensors over an axis: the unit that ZeRO divides.

A tensor of n elements, any shape, is flattened, padded with zeros to a multiple of the axis size D
and cut in D contiguous pieces of ceil(n / D) elements. Input and output: whole tensors and one
rank's piece of them. Padding takes part in every exchange and never reaches a whole tensor.
"""

from collections.abc import Sequence
from math import prod

import torch

from runtime.errors import UsageError
from runtime.mesh import Axis
from runtime.transport import Group


def piece_size(shape: Sequence[int], axis: Axis) -> int:
    """Elements of each rank's piece of a tensor of this shape, its padding included."""
    return -(-prod(shape) // axis.size)


def take_piece(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """This rank's piece of a tensor that all ranks hold; a copy."""
    size = piece_size(x.shape, axis)
    return padded(x, axis).narrow(0, axis.index * size, size).clone()


def scatter_piece(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """This rank's piece of the sum of `x` over the axis."""
    flat = padded(x, axis)
    if axis.size == 1:
        return flat
    return _group(axis).reduce_scatter(flat.view(axis.size, -1))


def gather_piece(piece: torch.Tensor, axis: Axis, shape: Sequence[int]) -> torch.Tensor:
    """The whole tensor, of this shape, from every rank's piece."""
    flat = piece if axis.size == 1 else _group(axis).all_gather(piece).view(-1)
    return flat[: prod(shape)].view(tuple(shape))


def padded(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """`x` as one row that divides by the axis size; shares its memory where that does already."""
    flat = x.reshape(-1)
    size = piece_size(x.shape, axis) * axis.size
    if flat.numel() == size:
        return flat
    row = flat.new_zeros(size)
    row[: flat.numel()] = flat
    return row


def _group(axis: Axis) -> Group:
    if axis.group is None:
        raise UsageError(f"axis {axis.name} has {axis.size} ranks but no connection between them.")
    return axis.group
