"""What a byte is worth: the seconds that it saves where memory makes blocks recompute.

Input: an evaluated candidate, or its pieces where nothing fits. Output: seconds per micro-batch and
byte, the price of memory under which blocks are sharded again. By duality: a byte less of state is
room for one of what a stage keeps, of all micro-batches that it has in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ir.lower import Lowered
from ir.spmd import StageCall
from planner.candidate import Evaluated
from planner.pieces import Pieces
from planner.recompute import MenuPoint
from planner.schedule import held_pieces


@dataclass(frozen=True, slots=True)
class ByteWorth:
    """Most seconds per micro-batch that a byte saves in any stage: one of a device's memory, and
    one of what a block keeps of a micro-batch, as many of which a stage holds as are in flight."""

    memory_s: float
    kept_s: float


def byte_worth(found: Evaluated) -> ByteWorth:
    """0 where nothing is recomputed."""
    candidate, pieces = found.candidate, found.pieces
    memory_s = kept_s = 0.0
    for stage, calls in enumerate(found.program.stages):
        rank = stage % candidate.mesh.pipeline
        rate = max((_rate(pieces, placed) for placed in calls), default=0.0)
        memory_s, kept_s = max(memory_s, rate / flights(found, rank)), max(kept_s, rate)
    return ByteWorth(memory_s, kept_s)


def flights(found: Evaluated, rank: int) -> float:
    """Micro-batches that a rank holds at once."""
    candidate = found.candidate
    pieces = held_pieces(
        candidate.schedule, rank, candidate.mesh.pipeline, candidate.micro_batches,
        candidate.virtual_stages,
    )  # fmt: skip
    return max(1.0, pieces / candidate.virtual_stages)


def whole_price_s(pieces: Pieces) -> float:
    """Between keeping everything and nothing, with one micro-batch in flight; where nothing can be
    made again, what a block takes over all that it reads from outside."""
    rates = [_upgrade(menu, menu[-1]) for menu in pieces.menus]
    return max(rates, default=0.0) or max(map(_whole_rate, pieces.lowered, pieces.menus))


def _whole_rate(lowered: Lowered, menu: Sequence[MenuPoint]) -> float:
    read_bytes = sum(lowered.types[name].bytes(1) for name in lowered.block.inputs)
    seconds = min(point.forward.total_s + point.backward.total_s for point in menu)
    return seconds / read_bytes if read_bytes else 0.0


def recomputed_share(found: Evaluated) -> float:
    """The part of all compute and communication that goes into recomputation and copies."""
    again_s = total_s = 0.0
    for placed in (p for calls in found.program.stages for p in calls):
        menu = found.pieces.menus[placed.variant]
        point = _point(menu, placed)
        again_s += point.total_s - min(p.total_s for p in menu)
        total_s += point.total_s
    return again_s / total_s if total_s else 0.0


def _rate(pieces: Pieces, placed: StageCall) -> float:
    menu = pieces.menus[placed.variant]
    return _upgrade(menu, _point(menu, placed))


def _point(menu: Sequence[MenuPoint], placed: StageCall) -> MenuPoint:
    return next(point for point in menu if point.label == placed.keep)


def _upgrade(menu: Sequence[MenuPoint], point: MenuPoint) -> float:
    """The most seconds per byte that a faster point saves."""
    return max((
        (point.total_s - other.total_s) / (other.held_bytes - point.held_bytes)
        for other in menu
        if other.held_bytes > point.held_bytes and other.total_s < point.total_s
    ), default=0.0)  # fmt: skip
