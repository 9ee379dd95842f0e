"""The mesh of ranks: three named axes, outermost first pipeline, data, tensor.

`MeshShape` turns ranks into coordinates and back and lists who shares an axis; `build_mesh` makes
one rank's `Mesh`, whose axes carry the groups that collectives run on.
rank = (pipeline_index * data + data_index) * tensor + tensor_index.
"""

from dataclasses import dataclass, field
from typing import Literal

from runtime.errors import UsageError
from runtime.transport import Group, Transport

AxisName = Literal["pipeline", "data", "tensor"]
AXES: tuple[AxisName, ...] = ("pipeline", "data", "tensor")


@dataclass(frozen=True, slots=True)
class Axis:
    """One mesh axis seen from one rank: how many ranks share it and which of them this one is."""

    name: str
    size: int
    index: int
    group: Group | None = field(repr=False, compare=False)  # None where the axis has one rank


@dataclass(frozen=True, slots=True)
class Coordinates:
    """The place of a rank in the mesh."""

    pipeline: int
    data: int
    tensor: int


@dataclass(frozen=True, slots=True)
class MeshShape:
    """The axis sizes of a mesh; no live connection inside."""

    pipeline: int
    data: int
    tensor: int

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data * self.tensor

    def coordinates(self, rank: int) -> Coordinates:
        """The place of `rank`."""
        outer, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(outer, self.data)
        return Coordinates(pipeline, data, tensor)

    def rank(self, place: Coordinates) -> int:
        """The rank at a place."""
        return (place.pipeline * self.data + place.data) * self.tensor + place.tensor

    def line(self, rank: int, axis: AxisName) -> tuple[int, ...]:
        """The ranks that differ from `rank` at most along `axis`, by their index on it."""
        here = self.coordinates(rank)
        stride = {"pipeline": self.data * self.tensor, "data": self.tensor, "tensor": 1}[axis]
        size, index = getattr(self, axis), getattr(here, axis)
        return tuple(rank + (i - index) * stride for i in range(size))


@dataclass(frozen=True, slots=True)
class Mesh:
    """The mesh as one rank sees it."""

    shape: MeshShape
    rank: int
    pipeline: Axis
    data: Axis
    tensor: Axis

    def axis(self, name: str) -> Axis:
        """The axis of this name."""
        found: Axis = getattr(self, name)
        return found


def build_mesh(shape: MeshShape, transport: Transport) -> Mesh:
    """This rank's mesh over a transport; collective: all ranks build it at the same time."""
    if transport.world_size != shape.world_size:
        raise UsageError(
            f"the program is for {shape.world_size} ranks (pipeline {shape.pipeline} x data "
            f"{shape.data} x tensor {shape.tensor}) but {transport.world_size} were started. "
            f"Start {shape.world_size}, or plan again for {transport.world_size} devices."
        )
    axes = {name: _build_axis(shape, name, transport) for name in AXES}
    return Mesh(shape, transport.rank, axes["pipeline"], axes["data"], axes["tensor"])


def _build_axis(shape: MeshShape, name: AxisName, transport: Transport) -> Axis:
    ranks = shape.line(transport.rank, name)
    group = transport.group(ranks) if len(ranks) > 1 else None
    return Axis(name, len(ranks), ranks.index(transport.rank), group)
