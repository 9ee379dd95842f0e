"""The collectives that are measured, as emitted programs call them, in groups of several sizes.

Output: `GroupCall`s. All groups of a size work at the same time, as the groups of a mesh axis do.
Sizes are bytes: of the whole (gathered) tensor for all_reduce, all_gather and reduce_scatter, of
this rank's tensor for the others. A send goes there and back, and counts half of that.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from runtime import collectives
from runtime.mesh import Axis
from runtime.transport import Channel, Transport

SIZES = (64, 512, 2**12, 2**15, 2**18, 2**21, 2**24, 2**26)
QUICK_SIZES = (64, 2**12, 2**18, 2**22)
WARM_UP = 3
"""Calls until memory and connections are there."""


@dataclass(frozen=True, slots=True)
class GroupCall:
    """One measurement; `per` operations of it happen in a call."""

    op: str
    members: int
    size_bytes: int
    run: Callable[[], Any]
    per: float = 1.0
    warm_up: int = WARM_UP


def collective_calls(transport: Transport, sizes: tuple[int, ...]) -> Iterator[GroupCall]:
    """Every op in every group size that divides the ranks, and sends between neighbours; the large
    ones last."""
    ranks = transport.world_size
    axes = [_axis(transport, m) for m in range(2, ranks + 1) if ranks % m == 0]
    bounce = _Bounce(transport)
    for size_bytes in sizes:
        yield GroupCall("send", 2, size_bytes, bounce.of(_floats(size_bytes, transport)), per=2.0)
        for axis, (op, make) in product(axes, OPS.items()):
            yield GroupCall(op, axis.size, size_bytes, make(axis, size_bytes, transport))


def _axis(transport: Transport, members: int) -> Axis:
    """Runs of that many ranks."""
    first = transport.rank // members * members
    group = transport.group(tuple(range(first, first + members)))
    return Axis("measured", members, group.index, group)


def _floats(size_bytes: float, transport: Transport) -> torch.Tensor:
    return torch.ones(max(1, int(size_bytes / 4)), device=transport.device)


def _all_reduce(axis: Axis, size: int, transport: Transport) -> Callable[[], Any]:
    x = _floats(size, transport)
    return lambda: collectives.all_reduce(x, axis)


def _all_gather(axis: Axis, size: int, transport: Transport) -> Callable[[], Any]:
    x = _floats(size / axis.size, transport)
    return lambda: collectives.all_gather(x, axis, 0)


def _reduce_scatter(axis: Axis, size: int, transport: Transport) -> Callable[[], Any]:
    x = _floats(size / axis.size, transport).repeat(axis.size)
    return lambda: collectives.reduce_scatter(x, axis, 0)


def _all_to_all(axis: Axis, size: int, transport: Transport) -> Callable[[], Any]:
    rows = max(1, int(size / 4 / axis.size**2))
    x = torch.ones(rows * axis.size, axis.size, device=transport.device)
    return lambda: collectives.all_to_all(x, axis, 0, 1)


def _broadcast(axis: Axis, size: int, transport: Transport) -> Callable[[], Any]:
    x, group = _floats(size, transport), axis.group
    assert group is not None  # an axis of several ranks has one
    return lambda: group.broadcast(x, 0)


OPS: dict[str, Callable[[Axis, int, Transport], Callable[[], Any]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
}


class _Bounce:
    """A tensor there and back between ranks 0 and 1, 2 and 3, ...; an odd last rank only waits."""

    def __init__(self, transport: Transport) -> None:
        pair = transport.rank // 2 * 2
        self._is_first = transport.rank == pair
        self._channels: tuple[Channel, Channel] | None = None
        if pair + 1 < transport.world_size:
            there, back = (pair, pair + 1), (pair + 1, pair)
            self._channels = transport.channel(*there), transport.channel(*back)
        else:  # the others have made two more
            transport.stand_by()
            transport.stand_by()

    def of(self, x: torch.Tensor) -> Callable[[], Any]:
        """The call that bounces `x`."""
        return partial(self._run, x)

    def _run(self, x: torch.Tensor) -> None:
        if self._channels is None:
            return
        there, back = self._channels
        if self._is_first:
            there.send(x)
            back.receive(tuple(x.shape), x.dtype)
        else:
            back.send(there.receive(tuple(x.shape), x.dtype))
