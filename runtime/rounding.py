"""How far rounding alone moves what a model's training gives: its own numbers, in a last bit else.

Input: a model, runs of it and of copies whose parameters differ in their last bit. Output: per
tensor the largest change, and the scale on which a difference of it means something. A gradient
that is zero in truth (of a bias before a batch norm) is nothing but rounding of what it is summed
from, and AdamW divides it by its own root: only such a run says how large both are.
"""

from collections.abc import Mapping, Sequence
from math import inf

import torch
from torch import Tensor, nn

from runtime.copies import copied
from runtime.numberless import largest

NUDGES = 3
"""Copies that are trained: one by itself may hit a sum that comes out as before."""
MARGIN = 32
"""Another order of the sums may move a tensor so many times as far as the copies moved."""
MOST_WIDER = 100.0
"""Where a last bit moves more, as in a model that jumps, differences count all the same: with a
tolerance of 1e-9 those above 1e-7."""

NOTHING = 1e-12
"""A gradient that is smaller, as a part of the largest one, or of the loss over the largest
parameter, is zero but for rounding."""


def nudged(model: nn.Module, seed: int) -> nn.Module:
    """A copy with every floating parameter changed by its dtype's epsilon, up or down."""
    other = copied(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in other.parameters():
        if parameter.is_floating_point():
            up = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter)
            eps = torch.finfo(parameter.dtype).eps
            parameter.data = parameter.data * (1 + eps * (2 * up - 1))
    return other


def moved_by_rounding(
    runs: Sequence[Mapping[str, Tensor]], wanted: Mapping[str, Tensor]
) -> dict[str, float]:
    """The largest change of an entry, by the tensor's name."""
    found: dict[str, float] = {}
    for run in runs:
        for name, tensor in wanted.items():
            other = run.get(name)
            if other is not None and other.shape == tensor.shape and tensor.numel():
                change = (other - tensor).abs() if tensor.is_floating_point() else None
                most = 0.0 if change is None else float(change.max())
                found[name] = max(found.get(name, 0.0), most)
    return found


def untrained(
    gradients: Mapping[str, Tensor], tensors: Mapping[str, Tensor], loss: float
) -> frozenset[str]:
    """The parameters whose first gradients are nothing beside the model's largest, or beside what
    changes the loss by its own size: what trains them is rounding, from the first step on."""
    sizes = {name: largest(gradient) for name, gradient in gradients.items()}
    held = [largest(tensors[name]) for name in sizes if name in tensors]
    usual = abs(loss) / max(held) if any(held) and abs(loss) < inf else 0.0
    most = NOTHING * max([usual, *sizes.values()])
    return frozenset(n for n, s in sizes.items() if s <= most)


def scale_of(size: float, moved: float, tolerance: float, *, is_untrained: bool = False) -> float:
    """What a difference of a tensor is relative to: its size, or, where rounding moves it by more
    than that is worth, so much that `MARGIN` times the move comes to the tolerance. There is a
    limit to that, but not where rounding alone moves a tensor."""
    moved = moved if moved < inf else 0.0  # a run that overflows says nothing
    most = inf if is_untrained else MOST_WIDER * size
    return max(size, min(MARGIN * moved / tolerance, most))
