"""The private parts of torch that tracing needs, each with the reason why.

Everything else in the project uses public interfaces only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, _meta_registrations, fx  # shapes of linear algebra
from torch._dispatch.python import enable_python_dispatcher  # shape rules that keep symbols
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # shapes without memory
from torch.fx import traceback as fx_traceback  # carries module and line to traced nodes
from torch.fx.experimental import symbolic_shapes  # sizes that may be any number
from torch.fx.experimental.proxy_tensor import make_fx  # the only tracer below autograd
from torch.multiprocessing.reductions import StorageWeakRef  # memory, also of the meta device
from torch.nn.modules import transformer  # looks at the values of masks
from torch.utils import _pytree as pytree  # the flattening that torch.export itself uses
from torch.utils._mode_utils import no_dispatch  # reads a real tensor while a mode is active
from torch.utils._python_dispatch import TorchDispatchMode  # sees every operation that runs

__all__ = [
    "FakeTensorMode", "FxNode", "TorchDispatchMode", "as_in_eager", "constant_text", "expression",
    "flatten", "flatten_with_paths", "hint", "is_fake", "is_number", "is_size", "is_small",
    "make_fx", "node_meta", "one_convolution_kernel", "open_batches_of_matrices", "preserve_meta",
    "remembering_no_shapes", "storage_id", "symbolic_mode", "symbolic_rows", "symbols_kept",
    "unflatten",
]  # fmt: skip

FxNode: TypeAlias = Any
"""An `fx.Node` whose arguments are read: torch types them as a union of 18 types, but the schema
of the node's target says which one an argument is."""


LARGEST_SPELLED = 4096
"""Elements of a constant that are compared one by one."""


def flatten(tree: Any) -> tuple[list[Any], Any]:
    return pytree.tree_flatten(tree)


def storage_id(tensor: Tensor) -> int:
    """The same for tensors that lie in one memory, while they are alive."""
    reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return int(reference.cdata)


def is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def is_small(tensor: Tensor) -> bool:
    """Whether there is a content to compare, and that takes no time."""
    return not tensor.is_meta and tensor.numel() <= LARGEST_SPELLED


def constant_text(tensor: Tensor) -> str:
    """The content of a small real tensor; of others the identity."""
    if not is_small(tensor):
        return f"tensor {id(tensor)}"
    with no_dispatch():
        return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.tolist()}"


def flatten_with_paths(tree: Any) -> list[tuple[str, list[Any], Any]]:
    """(path as text, its keys and indices, leaf) of every leaf."""
    pairs, _ = pytree.tree_flatten_with_path(tree)
    return [(pytree.keystr(path), [_key(part) for part in path], leaf) for path, leaf in pairs]


def _key(part: Any) -> Any:
    """The key, attribute name or index that a part of a path stands for."""
    found = [getattr(part, name) for name in ("key", "name", "idx") if hasattr(part, name)]
    return found[0] if found else str(part)


def unflatten(leaves: list[Any], spec: Any) -> Any:
    return pytree.tree_unflatten(leaves, spec)


def expression(size: Any) -> Any:
    """The sympy expression behind a SymInt or SymFloat; plain numbers as they are."""
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat)) else size


def hint(size: int | torch.SymInt) -> int:
    """The concrete size that the example input had."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def symbolic_mode() -> FakeTensorMode:
    """Tensors without memory, some of whose sizes are symbols."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=symbolic_shapes.ShapeEnv())


def symbolic_rows(mode: FakeTensorMode, tensor: Tensor, rows: bool) -> Tensor:
    """A fake of a tensor; with `rows` its first size is a symbol, the same for equal sizes."""
    kinds = [symbolic_shapes.DimDynamic.STATIC] * tensor.dim()
    if rows:
        kinds[0] = symbolic_shapes.DimDynamic.DYNAMIC
    context: Any = symbolic_shapes.StatelessSymbolicContext(dynamic_sizes=kinds)
    return mode.from_tensor(tensor, symbolic_context=context)


def is_number(size: int | torch.SymInt) -> bool:
    """Whether a size is a number, or a symbol that only one number is left for."""
    return not getattr(expression(size), "free_symbols", ())


def is_size(node: FxNode) -> bool:
    """Whether a node is whole-number size arithmetic, whose value is an expression already.

    A quotient of sizes (SymFloat) is not: it is computed where it is used.
    """
    plain = (int, float, bool, torch.SymInt, torch.SymBool)
    return isinstance(node.meta.get("val"), plain)


def preserve_meta() -> AbstractContextManager[Any]:
    return fx_traceback.preserve_node_meta()


def node_meta(node: fx.Node) -> AbstractContextManager[Any]:
    """While active, traced nodes inherit the module path and line of `node`."""
    return fx_traceback.set_current_meta(node)


def symbols_kept() -> AbstractContextManager[Any]:
    """While active, operations that consist of others are taken apart in Python, as in export:
    torch's rules in C++ replace symbols in shapes by numbers."""
    kept: AbstractContextManager[Any] = enable_python_dispatcher()
    return kept


def remembering_no_shapes() -> AbstractContextManager[Any]:
    """Fake tensors made while it is active do not look their results up among earlier ones. With
    sizes that are symbols few operations are the same, and to look takes longer than to compute."""
    from torch._dynamo import config  # half a second, which only those who trace have to spend

    patched: AbstractContextManager[Any] = config.patch(fake_tensor_cache_enabled=False)
    return patched


@contextmanager
def as_in_eager() -> Iterator[None]:
    """While active, `torch.compiler` says that nothing compiles or exports, as where the model is
    used without a compiler: some compute in another way under one. Torch's own transformers use a
    mask as it is and do not look whether it is the causal one, which changes no number."""
    flags = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    look = transformer._detect_is_causal_mask
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = False
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = flags
        transformer._detect_is_causal_mask = look


@contextmanager
def one_convolution_kernel() -> Iterator[None]:
    """While active, torch does not choose between convolution kernels by the number of rows: the
    choice would make a capture valid for fewer (or more) than 16 rows only."""
    nnpack, mkldnn = torch._C._get_nnpack_enabled(), torch._C._get_mkldnn_enabled()
    torch._C._set_nnpack_enabled(False)
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_nnpack_enabled(nnpack)
        torch._C._set_mkldnn_enabled(mkldnn)


@contextmanager
def open_batches_of_matrices() -> Iterator[None]:
    """While active, the shape rule of triangular systems (and so of the derivatives of Cholesky and
    QR) works for any number of matrices: torch's own expands what it knows the shape of, which it
    can't do to a size that is a symbol."""
    before = _meta_registrations._linalg_broadcast_batch_dims_name
    rules: Any = _meta_registrations
    rules._linalg_broadcast_batch_dims_name = _like_each_other
    try:
        yield
    finally:
        rules._linalg_broadcast_batch_dims_name = before


def _like_each_other(arg1: Tensor, arg2: Tensor, name: str | None) -> tuple[Tensor, Tensor]:
    """Stand-ins of two stacks of matrices with the same batch; only their shapes are read."""
    if name:
        _meta_registrations.linearSolveCheckInputs(arg1, arg2, name)
    first, second = _meta_registrations._linalg_broadcast_batch_dims(arg1, arg2)
    return (
        arg1 if first == list(arg1.shape) else arg1.new_empty(first),
        arg2 if second == list(arg2.shape) else arg2.new_empty(second),
    )
