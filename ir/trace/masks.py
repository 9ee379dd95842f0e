"""Recognises attention masks that do not depend on data.

Input and output: a `Graph`. A mask computed from positions alone is evaluated once; if it is the
causal triangle (or lets everything through) the attention is marked so and the mask, a tensor of
sequence length squared, disappears. Any other mask stays a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from ir.graph import Block, Graph, Node, Ref, evaluate
from ir.ops.table import aten_overload
from ir.trace.tidy import drop_unused

LARGEST_MASK = 2**28
"""Elements up to which a mask is evaluated (256 MiB of bool)."""
TRIED_BATCH = 2
MASK_ARGUMENT = {"attention": 3, "attention_backward": 6}


def recognise_masks(graph: Graph) -> Graph:
    """Marks attention as causal or unmasked where its mask is a constant of that form."""
    blocks = list(graph.blocks)
    evaluator = _Evaluator(graph)
    for number, block in enumerate(graph.blocks):
        masks = {n.args[3].name for n in block.nodes if n.op == "attention" and n.args[3]}
        for name in sorted(masks):
            causal = _is_causal(evaluator, number, name)
            if causal is not None:
                blocks[number] = _without_mask(blocks[number], name, causal)
    return drop_unused(replace(graph, blocks=tuple(blocks)))


def _is_causal(evaluator: _Evaluator, number: int, name: str) -> bool | None:
    """True: causal; False: everything visible; None: neither, or it depends on data."""
    kind = evaluator.graph.blocks[number].types[name]
    if kind.elements(TRIED_BATCH) > LARGEST_MASK or kind.dtype != "bool":
        return None
    try:
        mask = evaluator.value(number, name)
    except _DependsOnData:
        return None
    rows, columns = mask.shape[-2:]
    if bool(mask[..., 0, -1].any()):  # seen at once, where to look at all of it takes long
        return False if bool(mask.all()) else None
    place = torch.arange(columns)
    triangle = place <= place[:, None]
    if rows == columns and all(torch.equal(x, triangle) for x in mask.reshape(-1, rows, columns)):
        return True
    return None


class _DependsOnData(Exception):
    """The value is not a constant of the program."""


class _Evaluator:
    """Computes values, in any block, that depend on nothing but sizes."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.makers = [
            {name: node for node in block.forward for name in node.outputs}
            for block in graph.blocks
        ]
        self.origins = {
            result: (call.block, output)
            for call in graph.calls
            for result, output in zip(call.results, graph.blocks[call.block].outputs, strict=True)
        }
        self.known: dict[tuple[int, str], Tensor] = {}

    def value(self, number: int, name: str) -> Tensor:
        if (number, name) not in self.known:
            node = self.makers[number].get(name)
            if node is None:
                found = self._outside(number, name)
            elif node.op == "dropout" or len(node.outputs) > 1:
                raise _DependsOnData(name)
            else:
                found = self._run(number, node)
            self.known[number, name] = found
        return self.known[number, name]

    def _outside(self, number: int, name: str) -> Tensor:
        """An input of a block, if it has one value in all calls."""
        place = self.graph.blocks[number].inputs.index(name)
        values = {c.arguments[place] for c in self.graph.calls if c.block == number}
        if not values <= set(self.origins):
            raise _DependsOnData(name)
        first, *others = [self.value(*self.origins[value]) for value in sorted(values)]
        if not all(torch.equal(first, other) for other in others):
            raise _DependsOnData(name)
        return first

    def _run(self, number: int, node: Node) -> Tensor:
        args = [self._argument(number, a) for a in node.args]
        kwargs = {key: self._argument(number, a) for key, a in node.kwargs}
        kind = self.graph.blocks[number].types[node.outputs[0]]
        shape = [evaluate(size, TRIED_BATCH) for size in kind.shape]
        if node.op == "bitwise_and.Tensor" and kind.dtype == "bool":
            one, two = args
            if _is_true(one) and list(two.shape) == shape:
                return cast(Tensor, two)
        plain: dict[str, Callable[[], Tensor]] = {
            "view": lambda: args[0].reshape(shape),
            "expand": lambda: args[0].expand(shape),
            "permute": lambda: args[0].permute(*args[1]),
            "sum": lambda: args[0].sum(tuple(args[1]), args[2]),
            "full": lambda: torch.full(shape, args[0], dtype=getattr(torch, kind.dtype)),
        }
        if node.op in plain:
            return plain[node.op]()
        overload = aten_overload(node.op)
        if overload is None:
            raise _DependsOnData(node.op)
        result = overload(*args, **kwargs)
        assert isinstance(result, Tensor)
        return result

    def _argument(self, number: int, argument: Any) -> Any:
        if isinstance(argument, Ref):
            return self.value(number, argument.name)
        if isinstance(argument, tuple):
            return [self._argument(number, item) for item in argument]
        if isinstance(argument, str) and argument.startswith("torch."):
            return getattr(torch, argument.removeprefix("torch."))
        return evaluate(argument, TRIED_BATCH)


def _is_true(x: Tensor) -> bool:
    """The `and` of an empty list of masks, with which models begin."""
    return x.numel() == 1 and bool(x)


def _without_mask(block: Block, mask: str, causal: bool) -> Block:
    def rewrite(node: Node) -> Node:
        place = MASK_ARGUMENT.get(node.op)
        if place is None or node.args[place] != Ref(mask):
            return node
        args = (*node.args[:place], None, causal or node.args[place + 1], *node.args[place + 2 :])
        return Node(node.op, args, node.kwargs, node.outputs, node.source)

    return replace(block, nodes=tuple(map(rewrite, block.nodes)))
