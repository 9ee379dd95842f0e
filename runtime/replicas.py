"""Finds state whose copies on different ranks have drifted apart.

Copies are compared bit by bit with the copy at index 0 of each axis that does not cut the entry,
and over the pipeline ranks that hold it. Equal along every axis means equal everywhere.
"""

import torch

from runtime.layout import StateEntry
from runtime.mesh import Mesh
from runtime.state import SharingGroups, State
from runtime.transport import Group


def differing_entries(
    state: State, mesh: Mesh, groups: SharingGroups, device: torch.device
) -> list[str]:
    """First names of the parameters and buffers that differ somewhere; the same on every rank."""
    flags = torch.zeros(len(state.entries), dtype=torch.int64, device=device)
    for number, (entry, tensor) in enumerate(zip(state.entries, state.tensors, strict=True)):
        if entry.kind != "constant" and tensor is not None:
            for group in _replica_groups(entry, mesh, groups):
                flags[number] += int(_differs(tensor, group))
    for axis in (mesh.tensor, mesh.data, mesh.pipeline):
        if axis.group is not None:
            flags = axis.group.all_reduce(flags, "max")
    return [state.entries[number].names[0] for number in flags.nonzero().flatten().tolist()]


def _replica_groups(entry: StateEntry, mesh: Mesh, groups: SharingGroups) -> list[Group]:
    cut_axes = {cutting.axis for cutting in entry.shards} | ({"data"} if entry.zero == 3 else set())
    axes = [axis for axis in (mesh.data, mesh.tensor) if axis.name not in cut_axes]
    found = [axis.group for axis in axes if axis.group is not None]
    return [*found, groups[entry.ranks]] if len(entry.ranks) > 1 else found


def _differs(tensor: torch.Tensor, group: Group) -> bool:
    """Whether this rank's bits differ from those of the group's first member."""
    original = group.broadcast(tensor, 0)
    mine, theirs = (x.contiguous().reshape(-1).view(torch.uint8) for x in (tensor, original))
    return not torch.equal(mine, theirs)
