"""The most memory that a list of nodes needs beside what is always there.

Input: a lowered block, its storage, and a list of nodes (forward, or backward with recomputation).
Output: bytes. A value dies after its last reader; a parameter's gradient is added to its
accumulator, and dies, where it is made.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ir.graph import Node, TensorType
from planner.exchange_memory import COLLECTIVES, collective_bytes
from planner.storage import Storage

NOTHING: Mapping[str, int] = {}


def peak_bytes(
    nodes: Sequence[Node], storage: Storage, *, present: Collection[str],
    until_end: Collection[str], uncounted: Collection[str],
    working: Mapping[str, int] = NOTHING,
) -> int:  # fmt: skip
    """The largest sum of live storages during `nodes`.

    `present`: values there at the start; `until_end`: values handed on at the end; `uncounted`:
    values whose memory is counted elsewhere (parameters; what is kept, during forward). `working`:
    bytes that a node needs beside its values, by its first output.
    """
    owner, free = storage.owner, {storage.owner[n] for n in uncounted if n in storage.owner}
    last: dict[str, int] = {}
    for place, node in enumerate(nodes):
        for name in (*node.inputs, *node.outputs):
            if name in owner:
                last[owner[name]] = place
    last |= {owner[name]: len(nodes) for name in until_end if name in owner}
    live = {owner[name] for name in present if owner[name] in last} - free
    current = sum(storage.size_bytes[name] for name in live)
    peak = current
    dying: dict[int, list[str]] = {}
    for name, place in last.items():
        dying.setdefault(place, []).append(name)
    for place, node in enumerate(nodes):
        for name in node.outputs:
            root = owner.get(name)
            if root is not None and root not in live and root not in free:
                live.add(root)
                current += storage.size_bytes[root]
        peak = max(peak, current + working.get(node.outputs[0], 0))
        for root in dying.get(place, ()):
            if root in live:
                live.remove(root)
                current -= storage.size_bytes[root]
    return peak


def exchange_bytes(nodes: Sequence[Node], types: Mapping[str, TensorType]) -> dict[str, int]:
    """What collectives among `nodes` need beside operand and result, by their first output."""
    found = {}
    for node in nodes:
        if node.op in COLLECTIVES:
            pair = types[node.inputs[0]], types[node.outputs[0]]
            found[node.outputs[0]] = collective_bytes(node.op, *pair, *node.args[-2:])
    return found
