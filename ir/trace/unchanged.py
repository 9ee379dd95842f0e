"""Leaves a model as it was before it was traced.

A forward that keeps something in an attribute, such as its last activations or a count of its
calls, keeps there what it was traced with: tensors without memory.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy

from torch import nn


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Attributes of its modules, set inside to other values, get theirs back; collections among
    them get back what was in them, also those that every module has: parameters and buffers, which
    torch's own replacement leaves replaced in a module with two paths, children, and hooks, which a
    forward may put there once, and note that in an attribute."""
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    collections = [
        (value, copy(value)) for _, kept in before for name, value in kept.items()
        if type(value) in (list, dict, OrderedDict, set, deque)
    ]  # fmt: skip
    try:
        yield
    finally:
        for attributes, kept in before:
            attributes.clear()
            attributes.update(kept)
        for value, items in collections:
            value.clear()
            (value.extend if isinstance(value, list | deque) else value.update)(items)
