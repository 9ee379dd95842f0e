"""Cuts a captured graph into segments: the pieces that pipeline stages are made of.

Input: the nodes of a `Capture` in order. Output: `Segment`s and opaque calls in order. Repeated
stretches of nodes become equal segments (the structural fold); other stretches are cut between
their heavy operations, where the fewest tensors cross.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ir.trace.adapters import is_size
from ir.trace.convert import size_in_batch, tensor_type
from ir.trace.fold import OPAQUE
from ir.trace.joint import Segment
from ir.trace.library import ops
from ir.trace.normal import aten
from ir.trace.source import source_of

HEAVY = {
    ops.einsum.default, ops.attention.default, aten.embedding.default, aten.convolution.default,
}  # fmt: skip
MAX_SEGMENTS = 12
MIN_PERIOD, MIN_COPIES = 3, 3
TUPLE_WEIGHT = 1000  # an operation with several results is never cut from them


def live_nodes(graph: fx.Graph, roots: Iterable[fx.Node]) -> list[fx.Node]:
    """The tensor operations (not size arithmetic) that the roots depend on, in order."""
    live = set(roots)
    for node in reversed(graph.nodes):
        if node in live:
            live.update(node.all_input_nodes)
    return [n for n in graph.nodes if n in live and n.op == "call_function" and not is_size(n)]


def split(nodes: list[fx.Node], sizes: dict[Any, Any]) -> list[list[fx.Node] | fx.Node]:
    """Opaque calls and the stretches between them; without such calls, one stretch, cut further."""
    calls = {node for node in nodes if node.target is OPAQUE}
    if not calls:
        return [*cut(nodes, sizes)]
    items: list[list[fx.Node] | fx.Node] = []
    stretch: list[fx.Node] = []
    for node in nodes:
        if node in calls:
            items += [stretch] if stretch else []
            items.append(node)
            stretch = []
        elif not (node.target is operator.getitem and node.args[0] in calls):
            stretch.append(node)
    return [*items, stretch] if stretch else items


def cut(nodes: list[fx.Node], sizes: dict[Any, Any]) -> list[list[fx.Node]]:
    """Cuts one stretch: at its repeats if it has any, else between heavy operations."""
    found = repeats(nodes, sizes)
    if found is None:
        places = between_heavy(nodes)
    else:
        start, period, copies = found
        places = [start + i * period for i in range(copies + 1)]
    bounds = sorted({0, len(nodes), *places})
    pieces = [nodes[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    return [piece for piece in pieces if piece]


def repeats(nodes: list[fx.Node], sizes: dict[Any, Any]) -> tuple[int, int, int] | None:
    """(start, period, copies) of the longest repeated stretch of equal operations."""
    marks = [signature(node, sizes) for node in nodes]
    best: tuple[int, int, int] | None = None
    for period in range(MIN_PERIOD, len(nodes) // MIN_COPIES + 1):
        run = start = 0
        for i in range(len(nodes) - period):
            run = run + 1 if marks[i] == marks[i + period] else 0
            start = i - run + 1
            covered = run + period
            if covered >= MIN_COPIES * period and (best is None or covered > best[0]):
                best = (covered, start, period)
    if best is None:
        return None
    covered, start, period = best
    slack = covered % period
    crossing = crossings(nodes)
    offset = min(range(slack + 1), key=lambda o: (crossing[start + o], o))
    return start + offset, period, (covered - offset) // period


def signature(node: fx.Node, sizes: dict[Any, Any]) -> str:
    """The operation with its literals, operand types and result type, but no names."""

    def mark(argument: Any) -> str:
        if isinstance(argument, fx.Node):
            value = argument.meta["val"]
            kind = argument.op == "placeholder" and argument.target
            held = "p" if kind else "v"
            return f"{held}{_type(value, sizes)}"
        if isinstance(argument, (list, tuple)):
            return "[" + ",".join(map(mark, argument)) + "]"
        return repr(argument)

    kwargs = ",".join(f"{k}={mark(v)}" for k, v in sorted(node.kwargs.items()))
    args = ",".join(map(mark, node.args))
    return f"{node.target}({args};{kwargs})->{_type(node.meta['val'], sizes)}"


def _type(value: Any, sizes: dict[Any, Any]) -> str:
    if isinstance(value, Tensor):
        return str(tensor_type(value, sizes))
    if isinstance(value, (list, tuple)):
        return "(" + ",".join(_type(v, sizes) for v in value) + ")"
    return str(size_in_batch(value, sizes)) if isinstance(value, torch.SymInt) else str(value)


def crossings(nodes: Sequence[fx.Node]) -> list[int]:
    """For each position, how many tensors made before it are read at or after it."""
    place = {node: i for i, node in enumerate(nodes)}
    counts = [0] * (len(nodes) + 1)
    for node, i in place.items():
        users = [user for user in node.users if user.users or user.op == "output"]
        last = max((place.get(user, len(nodes)) for user in users), default=i)
        weight = 1 if isinstance(node.meta["val"], Tensor) else TUPLE_WEIGHT
        for position in range(i + 1, last + 1):
            counts[position] += weight
    return counts


def between_heavy(nodes: list[fx.Node]) -> list[int]:
    """Between neighbouring heavy operations, the position that the fewest tensors cross."""
    heavy = [i for i, node in enumerate(nodes) if node.target in HEAVY]
    crossing = crossings(nodes)
    gaps = list(zip(heavy, heavy[1:], strict=False))
    places = [min(range(a + 1, b + 1), key=lambda i: (crossing[i], i)) for a, b in gaps]
    if len(places) < MAX_SEGMENTS:
        return places
    step = len(places) / (MAX_SEGMENTS - 1)
    return [places[int(i * step)] for i in range(MAX_SEGMENTS - 1)]


def segment(nodes: list[fx.Node]) -> Segment:
    """The segment of these nodes, with inputs in order of use and outputs that others read."""
    own = set(nodes)
    inputs: dict[fx.Node, None] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in own and not is_size(source):
                inputs[source] = None
    outputs = [
        node for node in nodes
        if isinstance(node.meta["val"], Tensor) and any(u not in own for u in node.users)
    ]  # fmt: skip
    return Segment(tuple(nodes), tuple(inputs), tuple(outputs))


def canonical(piece: Segment, sizes: dict[Any, Any], held: list[str]) -> str:
    """Text that two segments share exactly if they compute the same function."""
    number = {node: f"i{i}" for i, node in enumerate(piece.inputs)}
    lines = [f"{h}:{_type(n.meta['val'], sizes)}" for n, h in zip(piece.inputs, held, strict=True)]

    def mark(argument: Any) -> str:
        if isinstance(argument, fx.Node):
            if argument in number:
                return number[argument]
            return _type(argument.meta["val"], sizes)
        if isinstance(argument, (list, tuple)):
            return "[" + ",".join(map(mark, argument)) + "]"
        return repr(argument)

    for node in piece.nodes:
        if not is_size(node):
            words = [mark(a) for a in node.args]
            words += [f"{k}={mark(v)}" for k, v in sorted(node.kwargs.items())]
            number[node] = f"n{len(number)}"
            lines.append(f"{number[node]}={node.target}({','.join(words)})")
    lines.append("->" + ",".join(number[node] for node in piece.outputs))
    return "\n".join(lines)


def common_path(nodes: list[fx.Node]) -> str:
    """The module path that the heavy operations of a piece share."""
    chosen = [n for n in nodes if n.target in HEAVY] or nodes
    paths = [source_of(n).module.split(".") for n in chosen]
    shared = []
    for words in zip(*paths, strict=False):
        if len(set(words)) > 1:
            break
        shared.append(words[0])
    return ".".join(shared)
