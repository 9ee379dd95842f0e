"""The private parts of torch that tracing needs, each with the reason why.

Everything else in the project uses public interfaces only.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode  # shapes without memory
from torch.fx import traceback as fx_traceback  # carries module and line to traced nodes
from torch.fx.experimental.proxy_tensor import make_fx  # the only tracer below autograd
from torch.utils import _pytree as pytree  # the flattening that torch.export itself uses
from torch.utils._python_dispatch import TorchDispatchMode  # sees every operation that runs

__all__ = [
    "FakeTensorMode", "FxNode", "TorchDispatchMode", "expression", "flatten", "hint", "make_fx",
    "node_meta", "preserve_meta", "unflatten",
]  # fmt: skip

FxNode: TypeAlias = Any
"""An `fx.Node` whose arguments are read: torch types them as a union of 18 types, but the schema
of the node's target says which one an argument is."""


def flatten(tree: Any) -> tuple[list[Any], Any]:
    return pytree.tree_flatten(tree)


def unflatten(leaves: list[Any], spec: Any) -> Any:
    return pytree.tree_unflatten(leaves, spec)


def expression(size: Any) -> Any:
    """The sympy expression behind a SymInt or SymFloat; plain numbers as they are."""
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat)) else size


def hint(size: int | torch.SymInt) -> int:
    """The concrete size that the example input had."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def preserve_meta() -> AbstractContextManager[Any]:
    return fx_traceback.preserve_node_meta()


def node_meta(node: fx.Node) -> AbstractContextManager[Any]:
    """While active, traced nodes inherit the module path and line of `node`."""
    return fx_traceback.set_current_meta(node)
