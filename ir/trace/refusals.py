"""Refuses models and batches that would be captured wrong, or not at all, before they are traced.

Input: what was given as a model, its arguments. Output: nothing, or a `CaptureError` that names
what is in the way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from ir.errors import CaptureError
from ir.trace.adapters import storage_id
from ir.trace.step import Leaf


def refuse_model(model: Any) -> None:
    """Compiled by TorchScript, not yet initialised, with hooks on gradients, or no model."""
    if not isinstance(model, nn.Module):
        raise CaptureError(f"a model is a torch.nn.Module, not {type(model).__name__}.")
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            "the model is a ScriptModule of torch.jit, whose operations can't be captured. Give "
            "the nn.Module that it was made from."
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise CaptureError(
                f"{name} has no shape yet: it belongs to a lazy module. Call the model once on a "
                "batch before it is traced."
            )
        _refuse_layout(name, tensor)
    for where in _gradient_hooks(model):
        raise CaptureError(
            f"{where} has a hook on its gradient, which an emitted program would not call: it "
            "differentiates the model before any training. Remove the hook, or make what it does a "
            "part of the model or of the step."
        )


def refuse_shared_memory(model: nn.Module, updated: Collection[str] = ()) -> None:
    """Parameters and buffers that lie in the same memory but are not one object: a change of one,
    by training or, of the `updated` buffers, by forward, would change the other as well."""
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        by_storage.setdefault(storage_id(tensor), []).append((name, tensor))
    for held in by_storage.values():
        for (one, first), (other, second) in combinations(held, 2):
            changes = first.requires_grad or second.requires_grad or {one, other} & {*updated}
            if changes and _overlap(first, second):
                raise CaptureError(
                    f"{one} and {other} lie in the same memory but are two tensors: what changes "
                    "one in the model would not change the other in an emitted program. Assign one "
                    "parameter to both modules to tie them, or clone() it to part them."
                )


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Whether the bytes from the first to the last one of two tensors of one storage do."""
    (begin, end), (other_begin, other_end) = map(_extent, (first, second))
    return bool(begin < other_end and other_begin < end)


def _extent(tensor: Tensor) -> tuple[Any, Any]:
    if not tensor.numel():
        return 0, 0
    begin = tensor.storage_offset() * tensor.element_size()
    steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (steps + 1) * tensor.element_size()


def refuse_batch(leaves: list[Leaf], batch: int) -> None:
    """Without rows, or with tensors that are not plain ones."""
    for leaf in leaves:
        _refuse_layout(f"the argument `{leaf.name}`", leaf.tensor)
    if not batch:
        raise CaptureError("the example batch has no rows: give one with at least one.")


def _refuse_layout(name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided:
        raise CaptureError(
            f"{name} is a sparse tensor ({tensor.layout}): only dense ones can be cut. Give it as "
            "to_dense() makes it."
        )


def _gradient_hooks(model: nn.Module) -> Iterator[str]:
    """The names of parameters and modules with hooks that run in backward."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            yield name
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            yield f"the module {name}" if name else "the model"
