"""Differentiates the pieces of a step, each distinct one once.

Input: the pieces in order, the parameters to train and the loss. Output: the blocks, their calls
and the values that want a gradient. Pieces are looked at in reverse order, so that each knows which
of its outputs receive a gradient. Which ones will is mostly known before, so a copy of the process
differentiates half of the blocks ahead.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from typing import Any, TypeAlias

from ir.graph import Block, Call
from ir.names import Namer
from ir.trace.copied import meanwhile
from ir.trace.joint import Segment, differentiable_outputs, differentiate
from ir.trace.segment import canonical

Flags: TypeAlias = tuple[bool, ...]


@dataclass
class Piece:
    """A call to be: its segment, and the graph-level values that its inputs and outputs are."""

    segment: Segment
    sizes: dict[Any, Any]
    held: list[str]
    arguments: list[str]
    results: list[str]
    path: str
    name: str
    input_names: list[str]
    key: str = ""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What pieces with one block share: `needs` marks inputs that want a gradient, `carries`
    outputs that receive one."""

    key: str
    needs: Flags
    carries: Flags


def blocks_of(
    pieces: list[Piece], trainable: set[str], loss: str
) -> tuple[list[Block], list[Call], set[str]]:
    """The blocks and calls of a step, and the values that want a gradient."""
    for piece in pieces:
        piece.key = canonical(piece.segment, piece.sizes, piece.held)
    carrying = _carrying(pieces, trainable)
    share = _last_half(_expected(pieces, carrying, loss))
    wanted, found, calls, namer = {loss}, dict[_Kind, Block](), list[Call](), Namer()
    with meanwhile(partial(_differentiated, share)) if share else nullcontext(dict) as answer:
        copied = cache(answer)
        for piece, (needs, can_carry) in zip(reversed(pieces), reversed(carrying), strict=True):
            kind = _kind(piece, needs, can_carry, wanted)
            if kind not in found:
                made = copied().get(kind) if share.get(kind) is piece else None
                made = made or _differentiate(kind, piece)
                found[kind] = replace(made, name=namer(piece.name, default="block"))
            received = dict(zip(found[kind].inputs, piece.arguments, strict=True))
            wanted |= {received[name] for name, _ in found[kind].gradients}
            index = [*found].index(kind)
            calls.append(Call(index, tuple(piece.arguments), tuple(piece.results), piece.path))
    return *_in_order([*found.values()], calls), wanted


def _in_order(blocks: list[Block], calls: list[Call]) -> tuple[list[Block], list[Call]]:
    """Calls in the order of the step, blocks in that of their first calls."""
    calls = calls[::-1]
    order = list(dict.fromkeys(call.block for call in calls))
    rank = {old: new for new, old in enumerate(order)}
    return [blocks[i] for i in order], [replace(c, block=rank[c.block]) for c in calls]


def _kind(piece: Piece, needs: Flags, can_carry: Flags, wanted: set[str]) -> _Kind:
    carries = [can and r in wanted for r, can in zip(piece.results, can_carry, strict=True)]
    return _Kind(piece.key, needs, tuple(carries))


def _differentiate(kind: _Kind, piece: Piece) -> Block:
    return differentiate(
        piece.segment, list(kind.needs), list(kind.carries), piece.sizes, piece.name,
        piece.input_names,
    )  # fmt: skip


def _carrying(pieces: list[Piece], trainable: set[str]) -> list[tuple[Flags, Flags]]:
    """Per piece: which inputs need a gradient, which outputs can carry one."""
    carrying = set(trainable)
    known: dict[Any, Flags] = {}
    found = []
    for piece in pieces:
        needs = tuple(argument in carrying for argument in piece.arguments)
        key = (piece.key, needs)
        if key not in known:
            known[key] = tuple(differentiable_outputs(piece.segment, list(needs)))
        found.append((needs, known[key]))
        carrying |= {r for r, c in zip(piece.results, known[key], strict=True) if c}
    return found


def _expected(
    pieces: list[Piece], carrying: list[tuple[Flags, Flags]], loss: str
) -> dict[_Kind, Piece]:
    """The kinds of pieces, from the last to the first, if every input that needs a gradient gets
    one."""
    wanted, found = {loss}, dict[_Kind, Piece]()
    for piece, (needs, can_carry) in zip(reversed(pieces), reversed(carrying), strict=True):
        kind = _kind(piece, needs, can_carry, wanted)
        found.setdefault(kind, piece)
        if any(kind.carries):
            wanted |= {a for a, need in zip(piece.arguments, needs, strict=True) if need}
    return found


def _last_half(expected: dict[_Kind, Piece]) -> dict[_Kind, Piece]:
    """The kinds that are wanted last, with about half of all operations."""
    counts = [len(piece.segment.nodes) for piece in expected.values()]
    middles = [until - count / 2 for until, count in zip(accumulate(counts), counts, strict=True)]
    return {
        kind: piece for (kind, piece), middle in zip(expected.items(), middles, strict=True)
        if middle > sum(counts) / 2
    }  # fmt: skip


def _differentiated(share: dict[_Kind, Piece]) -> dict[_Kind, Block]:
    """The blocks of these kinds, up to one that fails: whoever wants that one sees why."""
    made: dict[_Kind, Block] = {}
    for kind, piece in share.items():
        try:
            made[kind] = _differentiate(kind, piece)
        except Exception:
            break
    return made
