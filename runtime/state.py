"""One rank's parameters, buffers and constants: cut from the user's model and put together again.

Input: the layout's state table and a model whose tensors are all there. Output: `State`, which
holds this rank's local tensor and gradient accumulator per entry (None where none of the rank's
stages has it), or flat pieces of them where ZeRO divides. `full_tensor` is the way back: every rank
gets the whole tensor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from runtime.collectives import all_gather, shard
from runtime.errors import UsageError
from runtime.layout import Layout, Shard, StateEntry
from runtime.mesh import Mesh
from runtime.pieces import gather_piece, padded, piece_size, take_piece
from runtime.transport import Group, Transport

SharingGroups = Mapping[tuple[int, ...], Group]


@dataclass(frozen=True, slots=True)
class State:
    """This rank's local tensors, by the number of the entry in the layout's state table.

    `tensors` are pieces where ZeRO divides parameters, `accumulators` where it divides gradients.
    """

    entries: tuple[StateEntry, ...]
    tensors: tuple[torch.Tensor | None, ...]
    accumulators: tuple[torch.Tensor | None, ...]  # gradients as backward adds them up
    pieces: tuple[torch.Tensor | None, ...] = ()  # what this rank updates of a divided parameter

    def __post_init__(self) -> None:
        if not self.pieces:
            object.__setattr__(self, "pieces", (None,) * len(self.entries))

    @property
    def updated(self) -> tuple[torch.Tensor | None, ...]:
        """Per entry what the optimizer of this rank updates."""
        return tuple(
            (tensor if piece is None else piece) if accumulator is not None else None
            for tensor, piece, accumulator in zip(
                self.tensors, self.pieces, self.accumulators, strict=True
            )
        )

    def zero_accumulators(self) -> None:
        """Makes the accumulators ready for a step."""
        for accumulator in self.accumulators:
            if accumulator is not None:
                accumulator.zero_()


def build_state(
    layout: Layout,
    model: nn.Module,
    mesh: Mesh,
    *,
    device: torch.device,
    constants: Mapping[str, torch.Tensor],
) -> State:
    """This rank's share of the model; copies, so that ranks may be cut from one model object."""
    available: dict[str, Mapping[str, torch.Tensor]] = {
        "parameter": dict(model.named_parameters(remove_duplicate=False)),
        "buffer": dict(model.named_buffers(remove_duplicate=False)),
        "constant": dict(constants),
    }
    here = mesh.pipeline.index
    tensors: list[torch.Tensor | None] = []
    accumulators: list[torch.Tensor | None] = []
    pieces: list[torch.Tensor | None] = []
    for entry in layout.state:
        full = find_tensor(entry, available[entry.kind])
        held = here in entry.ranks
        local = cut_shards(full.detach(), entry.shards, mesh, device) if held else None
        tensor, piece = (None, None) if local is None else divide(entry, local, mesh)
        tensors.append(tensor)
        pieces.append(piece)
        accumulators.append(_accumulator(entry, mesh, device) if held and entry.trainable else None)
    return State(layout.state, tuple(tensors), tuple(accumulators), tuple(pieces))


def divide(
    entry: StateEntry, local: torch.Tensor, mesh: Mesh
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(what this rank holds of a local tensor, the piece that it updates if ZeRO divides it).

    Up to stage 2 the piece is a part of the held tensor's own memory.
    """
    if entry.zero == 0:
        return local, None
    if entry.zero == 3:
        piece = take_piece(local, mesh.data)
        return piece, piece
    row, size = padded(local, mesh.data), piece_size(local.shape, mesh.data)
    whole = row[: local.numel()].view(local.shape)
    return whole, row.narrow(0, mesh.data.index * size, size)


def _accumulator(entry: StateEntry, mesh: Mesh, device: torch.device) -> torch.Tensor:
    shape = gradient_shape(entry, mesh)
    if entry.zero >= 2:
        shape = (piece_size(parameter_shape(entry, mesh), mesh.data),)
    return torch.zeros(shape, dtype=entry.dtype, device=device)


def find_tensor(entry: StateEntry, available: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The model's tensor for an entry; a model that is not the planned one is a UsageError."""
    missing = [name for name in entry.names if name not in available]
    if missing:
        raise UsageError(
            f'the model has no {entry.kind} "{missing[0]}" (it has {len(available)}). The program '
            "was emitted for another model; give the model that was planned, or plan again."
        )
    found = available[entry.names[0]]
    if found.is_meta:
        raise UsageError(
            f'{entry.kind} "{entry.names[0]}" is on the meta device, so it has no values. '
            "Build the model on a real device before training."
        )
    for name in entry.names[1:]:
        if available[name] is not found:
            raise UsageError(
                f'"{entry.names[0]}" and "{name}" are one {entry.kind} in the plan and two in this '
                "model. Tie them before training, or plan again."
            )
    if tuple(found.shape) != entry.shape or found.dtype != entry.dtype:
        raise UsageError(
            f'{entry.kind} "{entry.names[0]}" has shape {tuple(found.shape)} and {found.dtype}; '
            f"the program is for {entry.shape} and {entry.dtype}. Plan again for this model."
        )
    return found


def cut_shards(
    full: torch.Tensor, shards: Sequence[Shard], mesh: Mesh, device: torch.device
) -> torch.Tensor:
    """This rank's piece of a full tensor, as a copy of its own on `device`."""
    piece = full
    for cutting in shards:
        piece = shard(piece, mesh.axis(cutting.axis), cutting.dim, cutting.outer)
    return piece.to(device, copy=piece is full).contiguous()


def parameter_shape(entry: StateEntry, mesh: Mesh) -> tuple[int, ...]:
    """The shape of an entry's tensor on a rank, before ZeRO divides it."""
    return _local_shape(entry, entry.shards, mesh)


def gradient_shape(entry: StateEntry, mesh: Mesh) -> tuple[int, ...]:
    """The shape of an entry's gradient on a rank as backward makes it."""
    return _local_shape(entry, entry.gradient_shards, mesh)


def _local_shape(entry: StateEntry, shards: Sequence[Shard], mesh: Mesh) -> tuple[int, ...]:
    shape = list(entry.shape)
    for cutting in shards:
        size = mesh.axis(cutting.axis).size
        if shape[cutting.dim] % (size * cutting.outer):
            raise UsageError(
                f'"{entry.names[0]}", shape {entry.shape}, or its gradient can\'t be cut '
                f"{size} ways at dim {cutting.dim}. Plan again for this mesh."
            )
        shape[cutting.dim] //= size
    return tuple(shape)


def sharing_groups(layout: Layout, mesh: Mesh, transport: Transport) -> SharingGroups:
    """The groups over pipeline ranks that share state: tied parameters, buffers that change.

    Collective: all ranks build them at the same time.
    """
    wanted = {ranks for entry in layout.state if len(ranks := sharing_ranks(entry)) > 1}
    here = mesh.pipeline.index
    line = mesh.shape.line(mesh.rank, "pipeline")
    groups = {}
    for ranks in sorted(wanted):
        if here in ranks:
            groups[ranks] = transport.group(tuple(line[rank] for rank in ranks))
        else:
            transport.stand_by()
    return groups


def sharing_ranks(entry: StateEntry) -> tuple[int, ...]:
    """The pipeline ranks that hold an entry or make its update, in order."""
    updating = {entry.update.rank} if entry.update else set()
    return tuple(sorted({*entry.ranks, *updating}))


def full_tensor(
    entry: StateEntry,
    local: torch.Tensor | None,
    mesh: Mesh,
    device: torch.device,
    *,
    is_piece: bool = False,
) -> torch.Tensor:
    """The whole tensor on every rank, from the local tensors of the ranks that hold the entry.

    `is_piece`: from flat pieces of them. Collective over the whole mesh: also the ranks without
    the entry call it, with None.
    """
    if mesh.pipeline.index == entry.ranks[0] and local is not None:
        full = local
        if is_piece:
            full = gather_piece(local, mesh.data, parameter_shape(entry, mesh))
        for cutting in reversed(entry.shards):
            full = all_gather(full, mesh.axis(cutting.axis), cutting.dim, cutting.outer)
    else:
        full = torch.empty(entry.shape, dtype=entry.dtype, device=device)
    if mesh.pipeline.group is not None:
        return mesh.pipeline.group.broadcast(full, entry.ranks[0])
    return full.clone() if full is local else full
