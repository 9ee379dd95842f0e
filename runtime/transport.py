"""What a transport must offer: groups of ranks that exchange tensors, and one-way channels.

Two modules implement it: `threads` (ranks are threads of one process) and `processes`
(torch.distributed). Everything else in the runtime knows only these protocols.
Results of a reduction are bit-identical on all members of a group.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import torch

Reduction = Literal["sum", "max", "min"]


class Group(Protocol):
    """The ranks that meet in a collective, in a fixed order; `index` is this rank's place in it.

    All members call the same method, with equal shapes and dtypes, in the same order. Inputs are
    never changed; results are new tensors.
    """

    index: int
    size: int

    def all_reduce(self, x: torch.Tensor, op: Reduction) -> torch.Tensor:
        """Element-wise reduction over the members; same shape."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every member's `x`, stacked by index: a contiguous (size, *x.shape)."""

    def reduce_scatter(self, pieces: torch.Tensor) -> torch.Tensor:
        """The sum over the members of their `pieces[index]`: a contiguous (size, *shape)."""

    def all_to_all(self, pieces: torch.Tensor) -> torch.Tensor:
        """From every member its `pieces[index]`, stacked by member; contiguous (size, *shape)."""

    def broadcast(self, x: torch.Tensor, root: int) -> torch.Tensor:
        """The `x` of the member with index `root`; the others give a tensor of that shape."""


class Channel(Protocol):
    """A one-way, ordered connection from one rank to another."""

    def send(self, x: torch.Tensor) -> None:
        """Hands `x` over and returns at once; `x` may not be changed in place until `flush`."""

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The next tensor of the channel, which must have this shape and dtype; waits for it."""

    def flush(self) -> None:
        """Waits until everything sent has left."""


class Transport(Protocol):
    """How this rank reaches the others. Groups and channels are made in one order on all ranks."""

    rank: int
    world_size: int
    device: torch.device

    def group(self, ranks: tuple[int, ...]) -> Group:
        """The group of these ranks, this one among them; each member calls this once."""

    def stand_by(self) -> None:
        """Called where others on this rank's pipeline line make a group or channel without it, so
        that all of them have made as many."""

    def channel(self, source: int, target: int) -> Channel:
        """The channel from `source` to `target`, one of which is this rank."""
