"""From the arguments of a training step to the named tensors of the program, checked.

The tensor leaves of (args, kwargs) are numbered as torch's pytree numbers them: dicts in insertion
order, lists, tuples, named tuples and dataclasses in theirs; what is no tensor has no number.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from runtime.errors import UsageError
from runtime.layout import Input, Layout
from runtime.mesh import Mesh

PLAIN = (bool, int, float, complex, str, bytes, type(None))
"""Values that a traced program has as they were."""


def tensor_leaves(tree: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(path, tensor) of each tensor in nested containers; a path reads like [0]['ids'].x."""
    return ((path, leaf) for path, leaf in _leaves(tree) if isinstance(leaf, torch.Tensor))


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    match tree:
        case torch.Tensor():
            yield path, tree
        case Mapping():
            for key, branch in tree.items():
                yield from _leaves(branch, f"{path}[{key!r}]")
        case tuple() if hasattr(tree, "_fields"):  # a named tuple
            for name, branch in zip(tree._fields, tree, strict=True):
                yield from _leaves(branch, f"{path}.{name}")
        case list() | tuple():
            for number, branch in enumerate(tree):
                yield from _leaves(branch, f"{path}[{number}]")
        case _ if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
            for field in dataclasses.fields(tree):
                yield from _leaves(getattr(tree, field.name), f"{path}.{field.name}")
        case _:
            yield path, tree


def local_batch(
    layout: Layout, mesh: Mesh, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """This data rank's rows of every input, by name, from the global batch."""
    tree = args, dict(kwargs)
    _check_plain(layout, {path: repr(x) for path, x in _leaves(tree) if isinstance(x, PLAIN)})
    leaves, batch = list(tensor_leaves(tree)), {}
    for wanted in layout.inputs:
        tensor = _find(wanted, leaves)
        _check(wanted, tensor, layout)
        batch[wanted.name] = _rows(wanted, tensor, mesh)
    return batch


def _check_plain(layout: Layout, given: Mapping[str, str]) -> None:
    planned = given if layout.plain is None else layout.plain
    for path in [*planned, *given]:
        if given.get(path) != planned.get(path):
            now, then = (f"is {of[path]}" if path in of else "is not" for of in (given, planned))
            raise UsageError(
                f"the batch's {path} {now} there, and {then} in the batch that the program was "
                "traced with. Numbers and other plain values are part of the program: give the "
                "same ones, a tensor in their place, or plan again."
            )


def _find(wanted: Input, leaves: list[tuple[str, torch.Tensor]]) -> torch.Tensor:
    for number, (path, tensor) in enumerate(leaves):
        if wanted.path == path or (wanted.path is None and wanted.index == number):
            return tensor
    where = wanted.path or f"number {wanted.index}"
    raise UsageError(
        f'the step got {len(leaves)} tensors and none of them is input "{wanted.name}" ({where}, '
        "counted from 0). Give the batch as it was given when the model was planned."
    )


def _check(wanted: Input, tensor: torch.Tensor, layout: Layout) -> None:
    given, dim = tuple(tensor.shape), wanted.batch_dim
    if dim is not None and len(given) == len(wanted.shape) and given[dim] != wanted.shape[dim]:
        raise UsageError(
            f'input "{wanted.name}": global batch {layout.global_batch} ({wanted.shape[dim]} rows '
            f"at dim {dim}) expected, got {given[dim]} rows. Every rank is given the whole global "
            f"batch; give {wanted.shape[dim]} rows, or plan again."
        )
    if given != wanted.shape or tensor.dtype != wanted.dtype:
        raise UsageError(
            f'input "{wanted.name}" has shape {given} and {tensor.dtype}; the program is for '
            f"{wanted.shape} and {wanted.dtype}. Pad or convert the batch, or plan again."
        )


def _rows(wanted: Input, tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    if wanted.batch_dim is None:
        return tensor
    rows = tensor.shape[wanted.batch_dim] // mesh.data.size
    return tensor.narrow(wanted.batch_dim, mesh.data.index * rows, rows)
