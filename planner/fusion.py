"""Which memory-bound ops become one kernel, and the bytes that each such kernel moves.

Input: nodes in order, the storages of their values, the values that are wanted outside. Output:
groups with their boundary bytes. Nodes may be fused when no product, attention or collective lies
between them: they then have the same depth, the largest number of such ops on a path to them. A
group is what is connected by values at one depth; inside it nothing goes through memory. This is
what a compiler does. Hand-written kernels have norms for themselves: a norm does not join what its
input was made by, nor its backward what reads the result (a residual's sum). A library without
either still has single kernels for a norm with its weights and for what a split's gradients become
(`library_members`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ir.graph import Node
from ir.ops import op_def
from planner.storage import Storage

NORM, NORM_BACKWARD = "normalize", "normalize_backward"
SPLIT_BACKWARD = "select_backward.default"
ALONE = frozenset(
    (
        "embedding.default", "embedding_dense_backward.default", "index.Tensor",
        "index_put.default", "cumsum.default",
    )
)  # fmt: skip
"""Gathers, scatters and scans that stay kernels of their own."""


@dataclass(frozen=True, slots=True)
class Group:
    """One kernel: the nodes in it (by first output) and what it reads and writes."""

    nodes: tuple[str, ...]
    moved_bytes: int


def is_fusable(node: Node, collectives: Collection[str]) -> bool:
    """Whether a node may be part of a memory-bound group; views may, at no cost."""
    if node.op in collectives or node.op in ALONE:
        return False
    return op_def(node.op).kind in ("memory", "view")


def groups(
    nodes: Sequence[Node], storage: Storage, wanted: Collection[str],
    collectives: Collection[str], across_norms: bool = True,
    only: Collection[str] | None = None,
) -> tuple[Group, ...]:  # fmt: skip
    """The groups among `nodes`; a group of views alone moves nothing and is left out.

    `across_norms`: whether norms join what comes before them, as a compiler has it. `only`: first
    outputs of the nodes that may be in groups.
    """
    parent: dict[int, int] = {}

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    maker: dict[str, int] = {}
    depth: dict[int, int] = {}
    for i, node in enumerate(nodes):
        sources = [maker[name] for name in node.inputs if name in maker]
        fusable = is_fusable(node, collectives) and (only is None or node.outputs[0] in only)
        depth[i] = max((depth[j] for j in sources), default=0) + (not fusable)
        if fusable:
            parent[i] = i
            for j in sources:
                joins = across_norms or not _parts(nodes[j], node)
                if j in parent and depth[j] == depth[i] and joins:
                    parent[root(j)] = root(i)
        maker |= dict.fromkeys(node.outputs, i)
    return _priced(nodes, storage, wanted, {i: root(i) for i in parent})


def _priced(
    nodes: Sequence[Node], storage: Storage, wanted: Collection[str], group_of: dict[int, int]
) -> tuple[Group, ...]:
    """Boundary bytes: storages read from outside, and made inside and used outside, once each."""
    owner, size = storage.owner, storage.size_bytes
    makers = {name: i for i, node in enumerate(nodes) for name in node.outputs}
    members: dict[int, list[str]] = {}
    crossing: dict[int, set[str]] = {}
    for i, node in enumerate(nodes):
        here = group_of.get(i)
        if here is not None:
            members.setdefault(here, []).append(node.outputs[0])
        for name in node.inputs:
            source = makers.get(name)
            made_in = None if source is None else group_of.get(source)
            if made_in == here or name not in owner:
                continue
            if here is not None:
                crossing.setdefault(here, set()).add(owner[name])
            if made_in is not None:
                crossing.setdefault(made_in, set()).add(owner[name])
    for name in wanted:
        source = makers.get(name)
        if source is not None and source in group_of and name in owner:
            crossing.setdefault(group_of[source], set()).add(owner[name])
    kernels = {g for i, g in group_of.items() if not _is_view(nodes[i], storage)}
    return tuple(
        Group(tuple(names), sum(size[o] for o in crossing.get(g, ())))
        for g, names in members.items() if g in kernels
    )


def library_members(nodes: Sequence[Node]) -> frozenset[str]:
    """First outputs of what torch's own kernels hold together: a norm with its weights
    (layer_norm, rms_norm) and its backward, and the concatenation that is a split's backward."""
    normal = {node.outputs[0] for node in nodes if node.op == NORM}
    normal |= {name for node in nodes if node.op == NORM_BACKWARD for name in node.inputs}
    found: set[str] = set()
    for node in nodes:
        name, first = node.outputs[0], node.inputs[:1]
        match node.op:
            case "mul.Tensor":
                joins = not normal.isdisjoint((name, *node.inputs))
            case "add.Tensor" | "sum":
                joins = bool(first) and found.issuperset(first)
            case op:
                joins = op in (NORM, NORM_BACKWARD, SPLIT_BACKWARD)
        if joins:
            found.add(name)
    return frozenset(found)


def _parts(source: Node, node: Node) -> bool:
    """Whether a kernel for a norm begins or ends between two nodes."""
    return node.op == NORM or source.op == NORM_BACKWARD


def _is_view(node: Node, storage: Storage) -> bool:
    return node.outputs[0] in storage.owner and storage.is_alias(node)
