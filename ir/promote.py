"""Promotes a graph to float64, the casts inside the model too, for comparing numbers.

Input and output: a `Graph`. A model that casts to float32 for its norms would lose what a
comparison to 1e-9 needs; the compared plain model promotes the same casts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ir.graph import Block, Graph, Node, Ref, TensorType

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
    types = block.types
    made = {node.outputs[0]: f"{node.outputs[0]}_as_made" for node in block.nodes
            if _is_made(node, types)}  # fmt: skip
    forward, backward = (
        tuple(wide for node in nodes for wide in _with_cast(_node(node, types), made))
        for nodes in (block.forward, block.backward)
    )
    return replace(
        block,
        nodes=forward + backward,
        n_forward=len(forward),
        types={name: _type(kind) for name, kind in types.items()}
        | {raw: types[name] for name, raw in made.items()},
    )


def _is_made(node: Node, types: dict[str, TensorType]) -> bool:
    """Whether a node makes a floating tensor of nothing in torch's default dtype, as `eye` does."""
    named = node.op == "full" or any(key == "dtype" for key, _ in node.kwargs)
    return not node.inputs and not named and types[node.outputs[0]].dtype in WIDE


def _with_cast(node: Node, made: dict[str, str]) -> tuple[Node, ...]:
    """The node, with a cast behind it if it makes a tensor in a narrower dtype."""
    if node.outputs[0] not in made:
        return (node,)
    raw, wide = made[node.outputs[0]], (("dtype", f"torch.{WIDE['float32']}"),)
    cast = Node("_to_copy.default", (Ref(raw),), wide, node.outputs, node.source)
    return replace(node, outputs=(raw,)), cast


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
