"""The two halves of a block's backward, priced, for schedules that run them apart.

Input: the pieces, and which inputs of each variant are state. Output: per menu point its `Halves`,
and menus whose working memory is that of the halves. The first half leaves what the second reads:
it is held until then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ir.lower import Lowered
from ir.recompute import kept_values
from ir.split import Split, split_backward
from planner.liveness import peak_bytes
from planner.pieces import Pieces
from planner.price import Seconds
from planner.recompute import MenuPoint, everything
from planner.storage import Storage


@dataclass(frozen=True, slots=True)
class Halves:
    """Seconds of each half of one micro-batch; the storages held between them, with their bytes;
    the most that either half needs on top of what is held."""

    input: Seconds
    weight: Seconds
    pending: tuple[str, ...]
    pending_bytes: int
    transient_bytes: int


Menu = Mapping[tuple[int, str], Halves]  # by (variant, label of the menu point)


def all_halves(found: Pieces, always: Sequence[frozenset[str]]) -> dict[tuple[int, str], Halves]:
    """Of every menu point of every variant; `always`: per variant its inputs that are state."""
    return {
        (number, point.label): _halves(found, number, always[number], point)
        for number, menu in enumerate(found.menus) for point in menu
    }  # fmt: skip


def with_working_memory(found: Pieces, menu: Menu) -> Pieces:
    """The pieces with the working memory of the halves, where it is more."""
    menus = tuple(
        tuple(_enlarged(point, menu[number, point.label]) for point in points)
        for number, points in enumerate(found.menus)
    )
    return replace(found, menus=menus)


def _enlarged(point: MenuPoint, halves: Halves) -> MenuPoint:
    transient_bytes = max(point.transient_bytes, halves.transient_bytes)
    return replace(point, transient_bytes=transient_bytes)


def _halves(found: Pieces, number: int, always: frozenset[str], point: MenuPoint) -> Halves:
    lowered, storage = found.lowered[number], found.storages[number]
    times = found.times[number]
    split = split_backward(lowered, point.kept, always)
    handed = [gradient for value, gradient in lowered.gradients if value not in always]
    late = [gradient for _, gradient in split.summed_late]
    there = always | set(lowered.early)
    owners = tuple(
        owner for owner in dict.fromkeys(storage.owner[name] for name in split.pending)
        if owner not in there
    )  # fmt: skip
    fetched = Seconds(0.0, point.copy_s)
    return Halves(
        times.total(split.input, {*handed, *split.pending}) + fetched,
        times.total(split.weight, late),
        owners, storage.bytes_of(owners),
        _working_bytes(lowered, storage, split, point, always, handed),
    )  # fmt: skip


def _working_bytes(
    lowered: Lowered, storage: Storage, split: Split, point: MenuPoint, always: frozenset[str],
    handed: Sequence[str],
) -> int:  # fmt: skip
    """Beside what is held when each half starts."""
    tangents = [tangent for _, tangent in lowered.block.tangents]
    kept = [n for n in kept_values(lowered, point.kept, always) if n not in always]
    uncounted = [*always, *lowered.early]
    first = peak_bytes(
        split.input, storage, present=[*kept, *tangents], until_end=[*handed, *split.pending],
        uncounted=uncounted,
    )  # fmt: skip
    second = peak_bytes(
        split.weight, storage, present=split.pending, until_end=(), uncounted=uncounted
    )
    near = [name for name in kept if name not in point.hosted]
    held = storage.bytes_of(near), storage.bytes_of(split.pending)
    return max(0, first - held[0], second - held[1])


def least_pending_bytes(lowered: Lowered, storage: Storage, always: frozenset[str]) -> int:
    """What the first half of a backward leaves for the second, at least: gradients that no other
    block has."""
    every = everything(lowered, storage, always)
    made = {name for node in lowered.backward for name in node.outputs}
    handed = {storage.owner[gradient] for _, gradient in lowered.gradients}
    pending = split_backward(lowered, every, always).pending
    owners = {storage.owner[name] for name in pending if name in made}
    return storage.bytes_of((owners & made) - handed)
