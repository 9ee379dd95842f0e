"""Dropout in all its kinds, from one draw that no layout changes.

`Dropouts` numbers the draws in the order of their calls; each is a `shardwright::dropout`, whose
mask depends on the seed, the step, that number and the global index of the element. Dropout of
whole features draws one element per feature. Formulas: torch's aten/src/ATen/native/Dropout.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ir.trace.library import ops

aten = torch.ops.aten
LIMIT = -1.7580993408473766
"""What SELU tends to for small inputs: the value that alpha dropout drops to (arXiv:1706.02515)."""

DRAWS = (
    "draws random numbers, which would differ from rank to rank. Only dropout (of elements or of "
    "features, also alpha dropout) is drawn the same in every layout; pass other noise in as an "
    "input."
)


class Dropouts:
    """The dropout calls of one capture; `counter` is shared by its regions."""

    def __init__(self, counter: list[int]):
        self.counter = counter
        kinds = {
            "dropout": self.plain, "feature_dropout": self.feature, "alpha_dropout": self.alpha,
            "feature_alpha_dropout": self.feature_alpha,
        }  # fmt: skip
        self.rules: dict[Any, Callable[..., Tensor]] = {}
        for name, rule in kinds.items():
            self.rules[getattr(aten, name).default] = rule
            self.rules[getattr(aten, name + "_").default] = _written(rule)

    def draw(self, x: Tensor, p: float) -> Tensor:
        """`x` with elements zeroed with probability `p` and the rest scaled by 1 / (1 - p)."""
        self.counter[0] += 1
        out: Tensor = ops.dropout(x, float(p), self.counter[0])
        return out

    def plain(self, x: Tensor, p: float, train: bool = True) -> Tensor:
        return self.draw(x, p) if train and p else x

    def feature(self, x: Tensor, p: float, train: bool = True) -> Tensor:
        return x * self.draw(_one_per_feature(x), p) if train and p else x

    def alpha(self, x: Tensor, p: float, train: bool = True) -> Tensor:
        return self._towards_limit(x, torch.ones_like(x), p) if train and p else x

    def feature_alpha(self, x: Tensor, p: float, train: bool = True) -> Tensor:
        return self._towards_limit(x, _one_per_feature(x), p) if train and p else x

    def _towards_limit(self, x: Tensor, ones: Tensor, p: float) -> Tensor:
        """Dropped elements become `LIMIT`; then mean 0 and variance 1 are restored."""
        if p == 1:
            return x * 0
        scale = 1 / math.sqrt((LIMIT * LIMIT * p + 1) * (1 - p))
        kept = (self.draw(ones, p) != 0).to(x.dtype)
        return x * (kept * scale) + ((1 - kept) * (LIMIT * scale) - LIMIT * scale * p)


def _one_per_feature(x: Tensor) -> Tensor:
    """Ones of [rows, channels, 1, ...]."""
    return x.new_ones([*x.shape[:2], *[1] * (x.dim() - 2)])


def _written(rule: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The rule of a call that writes into its argument."""

    def write(x: Tensor, p: float, train: bool = True) -> Tensor:
        return x.copy_(rule(x, p, train))

    return write
