"""Promotes a graph to float64, the casts inside the model too, for comparing numbers.

Input and output: a `Graph`. A model that casts to float32 for its norms would lose what a
comparison to 1e-9 needs; the compared plain model promotes the same casts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ir.graph import Block, Graph, Node, TensorType

WIDE = {
    "float32": "float64", "float16": "float64", "bfloat16": "float64", "complex64": "complex128",
}  # fmt: skip


def promote(graph: Graph) -> Graph:
    """The same graph with every floating tensor and cast in float64."""
    return replace(
        graph,
        inputs=tuple(replace(i, type=_type(i.type)) for i in graph.inputs),
        state=tuple(replace(s, type=_type(s.type), data=_data(s.data)) for s in graph.state),
        blocks=tuple(map(_block, graph.blocks)),
    )


def _type(kind: TensorType) -> TensorType:
    return TensorType(kind.shape, WIDE.get(kind.dtype, kind.dtype))


def _data(data: Any) -> Any:
    return data.double() if data is not None and data.is_floating_point() else data


def _block(block: Block) -> Block:
    return replace(
        block,
        nodes=tuple(_node(node, block.types) for node in block.nodes),
        types={name: _type(kind) for name, kind in block.types.items()},
    )


def _node(node: Node, types: dict[str, TensorType]) -> Node:
    kwargs = tuple((key, _argument(value)) for key, value in node.kwargs)
    args = _argument(node.args)
    if node.op == "full":
        args = (_rounded(args[0], types[node.outputs[0]].dtype),)
    return Node(node.op, args, kwargs, node.outputs, node.source)


def _rounded(value: Any, dtype: str) -> Any:
    """A fill value as the model's own dtype holds it."""
    if not isinstance(value, float) or dtype not in WIDE:
        return value
    return torch.tensor(value, dtype=getattr(torch, dtype)).item()


def _argument(argument: Any) -> Any:
    if isinstance(argument, tuple):
        return tuple(_argument(item) for item in argument)
    if isinstance(argument, str) and argument.startswith("torch."):
        name = argument.removeprefix("torch.")
        return f"torch.{WIDE.get(name, name)}"
    return argument
