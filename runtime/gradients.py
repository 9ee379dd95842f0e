"""From accumulated gradients to what the optimizer sees: synchronise, measure, clip.

Synchronising runs each entry's table of collectives, then sums tied parameters over the
pipeline ranks that hold them. Where ZeRO divides a parameter, the sum over the data ranks leaves
each rank its flat piece.
Every logical parameter counts once in the norm: pieces are summed over the axes that cut them,
replicas and tied copies are left out. The norm is the same number, bit for bit, on every rank.
"""

from collections.abc import Sequence

import torch

from runtime.collectives import all_gather, all_reduce, reduce_scatter, shard
from runtime.errors import UsageError
from runtime.layout import StateEntry, Sync
from runtime.mesh import Mesh
from runtime.pieces import scatter_piece, take_piece
from runtime.state import SharingGroups, State

CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def synchronise(x: torch.Tensor, steps: Sequence[Sync], mesh: Mesh) -> torch.Tensor:
    """`x` after a table of collectives; `x` itself if there is nothing to do."""
    for step in steps:
        axis = mesh.axis(step.axis)
        match step.op:
            case "all_reduce":
                x = all_reduce(x, axis)
            case "reduce_scatter":
                x = reduce_scatter(x, axis, step.dim, step.outer)
            case "all_gather":
                x = all_gather(x, axis, step.dim, step.outer)
            case "shard":
                x = shard(x, axis, step.dim, step.outer)
            case _:
                raise UsageError(f'the layout asks for an unknown collective "{step.op}".')
    return x


def synchronised_gradients(
    state: State, mesh: Mesh, groups: SharingGroups
) -> tuple[torch.Tensor | None, ...]:
    """Per state entry the gradient in the parameter's layout, or None where it has none here.

    Where it has room, the result is written over the accumulator, so that at most one gradient
    exists twice.
    """
    rows = zip(state.entries, state.accumulators, state.updated, strict=True)
    return tuple(
        None if accumulator is None or updated is None
        else _synchronised(entry, accumulator, updated, mesh, groups)
        for entry, accumulator, updated in rows
    )  # fmt: skip


def _synchronised(
    entry: StateEntry, accumulator: torch.Tensor, updated: torch.Tensor, mesh: Mesh,
    groups: SharingGroups,
) -> torch.Tensor:  # fmt: skip
    gradient = _over_mesh(entry, accumulator, mesh)
    if len(entry.ranks) > 1:
        gradient = groups[entry.ranks].all_reduce(gradient, "sum")
    _check_shape(entry, gradient, updated)
    fits = gradient.numel() <= accumulator.numel()
    return _written_over(accumulator, gradient) if fits else gradient


def _over_mesh(entry: StateEntry, accumulator: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """An accumulated gradient summed over data and tensor ranks, cut as its parameter is."""
    if entry.zero == 0:
        return synchronise(accumulator, entry.sync, mesh)
    piece = accumulator if entry.zero >= 2 else scattered(accumulator, entry.sync, mesh)
    return synchronise(piece, _divided_sync(entry.sync)[1], mesh)


def scattered(gradient: torch.Tensor, sync: Sequence[Sync], mesh: Mesh) -> torch.Tensor:
    """This data rank's piece of a gradient, summed over the data ranks where it is a partial sum.

    Sums over other axes that `sync` ends with are still to be done, on the piece.
    """
    local = synchronise(gradient, _divided_sync(sync)[0], mesh)
    is_partial = any(step.axis == "data" for step in sync)
    return scatter_piece(local, mesh.data) if is_partial else take_piece(local, mesh.data)


def _divided_sync(sync: Sequence[Sync]) -> tuple[tuple[Sync, ...], tuple[Sync, ...]]:
    """The steps before a gradient is cut in pieces, and after; the data axis is the cut itself.

    Pieces know no dims, so what cuts or joins dims comes first; sums may wait for the pieces.
    """
    steps = [step for step in sync if step.axis != "data"]
    shaped = [number for number, step in enumerate(steps) if step.op != "all_reduce"]
    end = shaped[-1] + 1 if shaped else 0
    return tuple(steps[:end]), tuple(steps[end:])


def _written_over(room: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient in the memory of its accumulator."""
    return room.view(-1)[: gradient.numel()].view(gradient.shape).copy_(gradient)


def _check_shape(entry: StateEntry, gradient: torch.Tensor, updated: torch.Tensor) -> None:
    if gradient.shape != updated.shape:
        raise UsageError(
            f'the gradient of "{entry.names[0]}" has shape {tuple(gradient.shape)} after its '
            f"synchronisation and the parameter {tuple(updated.shape)}. The layout is "
            "inconsistent; emit the program again."
        )


def global_norm(
    state: State, gradients: Sequence[torch.Tensor | None], mesh: Mesh, device: torch.device
) -> torch.Tensor:
    """The 2-norm over all logical parameters, a float64 scalar, the same on every rank."""
    squares: dict[tuple[str, ...], torch.Tensor] = {}
    for entry, gradient in zip(state.entries, gradients, strict=True):
        if gradient is None or mesh.pipeline.index != entry.ranks[0]:
            continue
        cut = {cutting.axis for cutting in entry.shards} | ({"data"} if entry.zero else set())
        axes = tuple(sorted(cut))
        before = squares.get(axes, torch.zeros((), dtype=torch.float64, device=device))
        squares[axes] = before + _sum_of_squares(gradient)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for axes in sorted(squares):
        share = squares[axes]
        for name in axes:
            share = all_reduce(share, mesh.axis(name))
        total = total + share
    if mesh.pipeline.group is not None:
        total = mesh.pipeline.group.all_gather(total).sum()
    return total.sqrt()


def _sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dtype=wide)
    return norm.real.to(torch.float64).square()


def clip(gradients: Sequence[torch.Tensor | None], norm: torch.Tensor, max_norm: float) -> None:
    """Scales all gradients in place so that their norm is at most `max_norm`.

    As torch.nn.utils.clip_grad_norm_: by max_norm / (norm + 1e-6), but never up.
    """
    coefficient = (max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0)
    for gradient in gradients:
        if gradient is not None:
            gradient.mul_(coefficient)
