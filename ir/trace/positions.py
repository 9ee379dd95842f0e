"""Refuses positions that a learned table does not have.

Input: a graph. An embedding whose ids are a range of whole numbers reads rows up to the range's
end; without data nobody else notices that the table is shorter.
"""

from __future__ import annotations

from ir.errors import CaptureError
from ir.graph import Block, Call, Graph, Node

SAME_VALUES = ("view", "expand", "permute", "_to_copy.default")


def check_positions(graph: Graph) -> Graph:
    """The graph; `CaptureError` if it reads behind the end of a table."""
    ends: dict[str, int] = {}
    for call in graph.calls:
        ends |= _check(graph.blocks[call.block], call, ends)
    return graph


def _check(block: Block, call: Call, ends: dict[str, int]) -> dict[str, int]:
    """Which of a call's results are ranges of whole numbers: one more than the largest of each."""
    given = zip(block.inputs, call.arguments, strict=True)
    known = {name: ends[value] for name, value in given if value in ends}
    for node in block.forward:
        if node.op == "embedding.default":
            _check_table(block, node, known)
        end = _end(node, known)
        if end is not None:
            known[node.outputs[0]] = end
    results = zip(call.results, block.outputs, strict=True)
    return {value: known[name] for value, name in results if name in known}


def _check_table(block: Block, node: Node, known: dict[str, int]) -> None:
    table, ids = (block.types[item.name] for item in node.args[:2])
    rows, end = table.shape[0], known.get(node.args[1].name)
    if isinstance(rows, int) and end is not None and end > rows:
        unread = end - int(ids.shape[-1])
        raise CaptureError(
            f"can't capture {node.source}: it reads {end} positions, and its table has {rows}. "
            f"Take sequences of at most {rows - unread}, or a longer table."
        )


def _end(node: Node, known: dict[str, int]) -> int | None:
    """One more than the largest number of a range, through views and sums with a number."""
    if node.op in SAME_VALUES:
        return known.get(node.args[0].name)
    if node.op in ("add.Tensor", "add.Scalar") and isinstance(node.args[1], int):
        before = known.get(node.inputs[0]) if node.inputs else None
        return None if before is None else before + node.args[1]
    place = {"arange.default": 0, "arange.start": 1, "arange.start_step": 1}.get(node.op)
    end = None if place is None else node.args[place]
    return end if isinstance(end, int) else None
