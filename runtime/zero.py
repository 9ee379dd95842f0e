"""ZeRO at run time: parameters, gradients and optimizer state in flat pieces over the data axis.

What each stage of an entry (`StateEntry.zero`) divides; `runtime.pieces` has the unit of division:

    1  optimizer state: gradients are scattered once per step, each rank updates its piece, and the
       pieces are gathered into the parameter
    2  gradients too: those of a block are scattered in every micro-batch and added to pieces
    3  parameters too: those of a block are gathered before it runs, and freed behind it

Emitted stage functions call `gather`, `zeros` and `scatter_add` on the namespaces of one block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from runtime.gradients import scattered
from runtime.layout import Sync
from runtime.mesh import Mesh
from runtime.pieces import gather_piece
from runtime.state import State, gradient_shape, parameter_shape


@dataclass(frozen=True, slots=True)
class Divided:
    """A local tensor of which this data rank holds one piece.

    `shape`: of the parameter, or of its gradient as backward makes it; `sync`: the collectives
    that bring that gradient to its parameter.
    """

    piece: torch.Tensor
    shape: tuple[int, ...]
    sync: tuple[Sync, ...] = ()


def weight_leaves(state: State, mesh: Mesh) -> tuple[Any, ...]:
    """What a stage function finds under `w`, per state entry: the tensor, or what to gather."""
    return tuple(
        Divided(tensor, parameter_shape(entry, mesh))
        if entry.zero == 3 and tensor is not None
        else tensor
        for entry, tensor in zip(state.entries, state.tensors, strict=True)
    )


def gradient_leaves(state: State, mesh: Mesh) -> tuple[Any, ...]:
    """What a stage function finds under `g`, per state entry: what its gradients are added to."""
    return tuple(
        Divided(accumulator, gradient_shape(entry, mesh), entry.sync)
        if entry.zero >= 2 and accumulator is not None
        else accumulator
        for entry, accumulator in zip(state.entries, state.accumulators, strict=True)
    )


def gather(w: SimpleNamespace, mesh: Mesh) -> SimpleNamespace:
    """A block's weights with whole tensors for divided ones; they live as long as the result."""
    return _mapped(w, lambda leaf: gather_piece(leaf.piece, mesh.data, leaf.shape))


def zeros(g: SimpleNamespace) -> SimpleNamespace:
    """Whole gradients of a block, zero, for its backward to add to."""
    return _mapped(
        g,
        lambda leaf: torch.zeros(leaf.shape, dtype=leaf.piece.dtype, device=leaf.piece.device),
    )


def scatter_add(g: SimpleNamespace, grads: SimpleNamespace, mesh: Mesh) -> None:
    """Adds a block's whole gradients, summed over the data ranks, to this rank's pieces.

    Takes the tensors out of `grads`, so that each is freed once it has been scattered.
    """
    for name, leaf in vars(g).items():
        gradient = vars(grads).pop(name)
        if isinstance(leaf, Divided):
            leaf.piece.add_(scattered(gradient, leaf.sync, mesh))


def share_updates(state: State, mesh: Mesh) -> None:
    """Gathers the updated pieces into the parameters that every data rank holds whole."""
    for entry, tensor, piece in zip(state.entries, state.tensors, state.pieces, strict=True):
        if entry.zero in (1, 2) and tensor is not None and piece is not None:
            tensor.copy_(gather_piece(piece, mesh.data, tensor.shape))


def _mapped(names: SimpleNamespace, change: Callable[[Divided], torch.Tensor]) -> SimpleNamespace:
    """The same namespace with every divided leaf changed."""
    return SimpleNamespace(**{
        name: change(leaf) if isinstance(leaf, Divided) else leaf
        for name, leaf in vars(names).items()
    })  # fmt: skip
