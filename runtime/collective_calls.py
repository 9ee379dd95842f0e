"""The collectives that are measured, as emitted programs call them, in groups of several sizes.

Output: `GroupCall`s. All groups of a size work at the same time, as the groups of a mesh axis do.
Sizes are bytes: of the whole (gathered) tensor for all_reduce, all_gather and reduce_scatter, of
this rank's tensor for the others. A send goes there and back, and counts half of that.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from runtime import collectives
from runtime.mesh import Axis
from runtime.transport import Channel, Group, Transport

SIZES = (64, 512, 2**12, 2**15, 2**18, 2**21, 2**24, 2**26)
QUICK_SIZES = (64, 2**12, 2**18, 2**22)


@dataclass(frozen=True, slots=True)
class GroupCall:
    """One measurement; `per` operations of it happen in a call."""

    op: str
    members: int
    size_bytes: int
    run: Callable[[], Any]
    per: float = 1.0


def collective_calls(transport: Transport, sizes: tuple[int, ...]) -> Iterator[GroupCall]:
    """Every op in every group size that divides the ranks, and sends between neighbours."""
    ranks = transport.world_size
    for members in (m for m in range(2, ranks + 1) if ranks % m == 0):
        first = transport.rank // members * members
        group = transport.group(tuple(range(first, first + members)))
        axis = Axis("measured", members, group.index, group)
        for op, make in OPS.items():
            for size_bytes in sizes:
                yield GroupCall(op, members, size_bytes, make(axis, group, size_bytes, transport))
    yield from _sends(transport, sizes)


def _floats(size_bytes: float, transport: Transport) -> torch.Tensor:
    return torch.ones(max(1, int(size_bytes / 4)), device=transport.device)


def _all_reduce(axis: Axis, group: Group, size: int, transport: Transport) -> Callable[[], Any]:
    x = _floats(size, transport)
    return lambda: collectives.all_reduce(x, axis)


def _all_gather(axis: Axis, group: Group, size: int, transport: Transport) -> Callable[[], Any]:
    x = _floats(size / axis.size, transport)
    return lambda: collectives.all_gather(x, axis, 0)


def _reduce_scatter(axis: Axis, group: Group, size: int, transport: Transport) -> Callable[[], Any]:
    x = _floats(size / axis.size, transport).repeat(axis.size)
    return lambda: collectives.reduce_scatter(x, axis, 0)


def _all_to_all(axis: Axis, group: Group, size: int, transport: Transport) -> Callable[[], Any]:
    rows = max(1, int(size / 4 / axis.size**2))
    x = torch.ones(rows * axis.size, axis.size, device=transport.device)
    return lambda: collectives.all_to_all(x, axis, 0, 1)


def _broadcast(axis: Axis, group: Group, size: int, transport: Transport) -> Callable[[], Any]:
    x = _floats(size, transport)
    return lambda: group.broadcast(x, 0)


OPS: dict[str, Callable[[Axis, Group, int, Transport], Callable[[], Any]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
}


def _sends(transport: Transport, sizes: tuple[int, ...]) -> Iterator[GroupCall]:
    """Ranks 0 and 1, 2 and 3, ...: a tensor there and back; an odd last rank has no neighbour."""
    rank, pair = transport.rank, transport.rank // 2 * 2
    has_pair = pair + 1 < transport.world_size
    there = transport.channel(pair, pair + 1) if has_pair else None
    back = transport.channel(pair + 1, pair) if has_pair else None
    for size_bytes in sizes:
        x = _floats(size_bytes, transport)
        run: Callable[[], Any] = partial(_bounce, x, there, back, is_first=rank == pair)
        yield GroupCall("send", 2, size_bytes, run, per=2.0)


def _bounce(
    x: torch.Tensor, there: Channel | None, back: Channel | None, *, is_first: bool
) -> torch.Tensor | None:
    if there is None or back is None:
        return None
    if is_first:
        there.send(x)
        return back.receive(tuple(x.shape), x.dtype)
    found = there.receive(tuple(x.shape), x.dtype)
    back.send(found)
    return found
