"""Recognises attention masks that do not depend on data.

Input and output: a `Graph`. A mask computed from positions alone is evaluated once; if it is the
causal triangle (or lets everything through) the attention is marked so and the mask, a tensor of
sequence length squared, disappears. Any other mask stays a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

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
    verdicts: dict[tuple[int, str], bool | None] = {}
    for number, block in enumerate(graph.blocks):
        masks = {n.args[3].name for n in block.nodes if n.op == "attention" and n.args[3]}
        for name in sorted(masks):
            places = _origins(graph, number, name)
            for place in places - set(verdicts):
                verdicts[place] = _is_causal(graph.blocks[place[0]], place[1])
            found = {verdicts[place] for place in places}
            if len(found) == 1 and None not in found:
                blocks[number] = _without_mask(blocks[number], name, bool(found.pop()))
    return drop_unused(replace(graph, blocks=tuple(blocks)))


def _origins(graph: Graph, number: int, name: str) -> set[tuple[int, str]]:
    """The (block, value) pairs that a block's value comes from."""
    block = graph.blocks[number]
    if name not in block.inputs:
        return {(number, name)}
    found = set()
    makers = {
        result: (call.block, graph.blocks[call.block].outputs[i])
        for call in graph.calls for i, result in enumerate(call.results)
    }  # fmt: skip
    for call in graph.calls:
        if call.block == number:
            value = call.arguments[block.inputs.index(name)]
            found.add(makers.get(value, (number, name)))
    return found


def _is_causal(block: Block, name: str) -> bool | None:
    """True: causal; False: everything visible; None: neither, or it depends on data."""
    if block.types[name].elements(TRIED_BATCH) > LARGEST_MASK or block.types[name].dtype != "bool":
        return None
    try:
        mask = _Evaluator(block).value(name)
    except _DependsOnData:
        return None
    if bool(mask.all()):
        return False
    square = mask.shape[-1] == mask.shape[-2]
    if square and bool((mask == torch.ones(mask.shape[-2:], dtype=torch.bool).tril()).all()):
        return True
    return None


class _DependsOnData(Exception):
    """The value is not a constant of the program."""


class _Evaluator:
    """Computes values of a block that depend on nothing but sizes."""

    def __init__(self, block: Block):
        self.block = block
        self.makers = {name: node for node in block.forward for name in node.outputs}
        self.known: dict[str, Tensor] = {}

    def value(self, name: str) -> Tensor:
        if name not in self.known:
            node = self.makers.get(name)
            if node is None or node.op == "dropout" or len(node.outputs) > 1:
                raise _DependsOnData(name)
            self.known[name] = self._run(node)
        return self.known[name]

    def _run(self, node: Node) -> Tensor:
        args = [self._argument(a) for a in node.args]
        kwargs = {key: self._argument(a) for key, a in node.kwargs}
        kind = self.block.types[node.outputs[0]]
        shape = [evaluate(size, TRIED_BATCH) for size in kind.shape]
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

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, Ref):
            return self.value(argument.name)
        if isinstance(argument, tuple):
            return [self._argument(item) for item in argument]
        if isinstance(argument, str) and argument.startswith("torch."):
            return getattr(torch, argument.removeprefix("torch."))
        return evaluate(argument, TRIED_BATCH)


def _without_mask(block: Block, mask: str, causal: bool) -> Block:
    def rewrite(node: Node) -> Node:
        place = MASK_ARGUMENT.get(node.op)
        if place is None or node.args[place] != Ref(mask):
            return node
        args = (*node.args[:place], None, causal or node.args[place + 1], *node.args[place + 2 :])
        return Node(node.op, args, node.kwargs, node.outputs, node.source)

    return replace(block, nodes=tuple(map(rewrite, block.nodes)))
