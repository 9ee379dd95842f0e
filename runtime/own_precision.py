"""How far a program is from the plain model where both compute at the model's own precision.

Input: runs of both, and of copies of the model that differ in a last bit. Output: the difference,
in units of what rounding explains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf, isfinite

import torch
from torch import Tensor, nn

from runtime.compare import Run
from runtime.rounding import MARGIN

OWN_PRECISION_EPS = 64
"""At a model's own precision, loss and gradient vector may differ by this many machine epsilons
of its coarsest floating dtype: sums in another order, not another function."""


def own_precision_error(
    found: Run, wanted: Run, model: nn.Module, nudged: Sequence[Run] = ()
) -> float:
    """The larger relative difference of first loss and gradient vector, in allowed units.

    1 is `OWN_PRECISION_EPS` machine epsilons; more means another function. `nudged`: plain runs
    of copies that differ in a last bit (`runtime.rounding`). 1 is `MARGIN` times what these move,
    where that is more: of a difference of large values, or of what is zero in truth.
    """
    floating = [t.dtype for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    eps = max((torch.finfo(dtype).eps for dtype in floating), default=2**-23)
    allowed = OWN_PRECISION_EPS * eps
    loss = abs(wanted.losses[0])
    far = [abs(run.losses[0] - wanted.losses[0]) for run in (found, *nudged)]
    loss_error = _own_error(far, loss or 1e-300, allowed)
    size = _length(wanted.gradients.values())
    far = [_distance(run.gradients, wanted.gradients) for run in (found, *nudged)]
    return max(loss_error, _own_error(far, size or 1.0, allowed))


def _own_error(far: Sequence[float], size: float, allowed: float) -> float:
    """Of the first of `far`; the others are how far rounding moves a value of that size. Where the
    model itself gives no number there is nothing to compare."""
    if not isfinite(size):
        return 0.0
    if not isfinite(far[0]):
        return inf
    moved = max((other for other in far[1:] if isfinite(other)), default=0.0)
    return far[0] / max(size * allowed, MARGIN * moved)


def _length(tensors: Iterable[Tensor]) -> float:
    return sum(float(_wide(t).abs().square().sum()) for t in tensors) ** 0.5


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128) if tensor.is_complex() else tensor.double()


def _distance(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Of two gradient vectors; one that is not there is zero."""
    return _length(
        _wide(found[name]) - _wide(tensor) if name in found else tensor
        for name, tensor in wanted.items()
    )
