"""Functions of torch that are called in another way while a model is exported.

Export keeps of these a call that no rule can free of the number of rows: the sizes or the offsets
of bags are plain numbers by then. Here they are made of calls that take any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ir.errors import CaptureError


def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """As torch's: a gather whose other dims repeat to each other's sizes."""
    if dim is None:
        return input.reshape(-1).gather(0, indices.reshape(-1))
    dim %= input.dim()
    wide, places = list(input.shape), list(indices.shape)
    for d in range(input.dim()):
        if d != dim:
            wide[d] = places[d] = _repeated(input.shape[d], indices.shape[d])
    return input.expand(wide).gather(dim, indices.expand(places))


def _repeated(first: Any, second: Any) -> Any:
    return second if isinstance(first, int) and first == 1 else first


def embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None,
    norm_type: float = 2, scale_grad_by_freq: bool = False, mode: str = "mean",
    sparse: bool = False, per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False, padding_idx: int | None = None,
) -> Tensor:  # fmt: skip
    """As torch's; bags of one size, [n, size], are looked up and reduced."""
    if input.dim() != 2 or mode not in ("sum", "mean", "max"):
        found: Tensor = functional.embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse,
            per_sample_weights, include_last_offset, padding_idx,
        )  # fmt: skip
        return found
    rows = functional.embedding(
        input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
    )
    if padding_idx is None:
        return _reduced(rows, mode, per_sample_weights)
    is_padding = (input == padding_idx % weight.shape[0]).unsqueeze(-1)
    if mode == "max":
        largest = rows.masked_fill(is_padding, -torch.inf).max(1).values
        return largest.masked_fill(is_padding.all(1), 0)
    total = _reduced(rows.masked_fill(is_padding, 0), "sum", per_sample_weights)
    count = is_padding.logical_not().sum(1).clamp_min(1)
    return total / count if mode == "mean" else total


def _reduced(rows: Tensor, mode: str, weights: Tensor | None) -> Tensor:
    if mode == "max":
        return rows.max(1).values
    weighted = rows if weights is None else rows * weights.unsqueeze(-1)
    return weighted.sum(1) if mode == "sum" else weighted.mean(1)


def derivative(*args: Any, **kwargs: Any) -> Any:
    raise CaptureError(
        "it calls torch.autograd inside its forward: a derivative of a derivative can't be "
        "captured. Write out the inner one with plain operations."
    )


def hook(*args: Any, **kwargs: Any) -> Any:
    raise CaptureError(
        "it hooks the gradient of a tensor in its forward, which an emitted program would not "
        "call. Write what the hook does with plain operations."
    )


CALLS: Mapping[Any, Callable[..., Any]] = {
    torch.take_along_dim: take_along_dim,
    Tensor.take_along_dim: take_along_dim,
    functional.embedding_bag: embedding_bag,
    torch.autograd.grad: derivative,
    torch.autograd.backward: derivative,
    Tensor.backward: derivative,
    Tensor.register_hook: hook,
    Tensor.register_post_accumulate_grad_hook: hook,
}


class OtherCalls(TorchFunctionMode):
    """Calls those of `CALLS` instead; active while a model is exported."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        return CALLS.get(func, func)(*args, **(kwargs or {}))
