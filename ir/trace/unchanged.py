"""Leaves a model as it was before it was traced.

A forward that keeps something in an attribute, such as its last activations or a count of its
calls, keeps there what it was traced with: tensors without memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Attributes of its modules, set inside to other values, get theirs back."""
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for attributes, kept in before:
            attributes.clear()
            attributes.update(kept)
