"""Removes what no longer matters: dead nodes, unread block inputs, unread block outputs.

Input and output: a `Graph`. Passes that rewrite blocks leave dead ends behind; this ends them.
"""

from __future__ import annotations

from dataclasses import replace

from ir.graph import Block, Call, Graph, needed


def drop_unused(graph: Graph) -> Graph:
    """Repeats until nothing changes: dropping an input may leave an output unread."""
    while True:
        smaller = _drop_inputs(_drop_outputs(graph))
        if _size(smaller) == _size(graph):
            return smaller
        graph = smaller


def _size(graph: Graph) -> int:
    return sum(
        len(block.nodes) + len(block.inputs) + len(block.outputs) for block in graph.blocks
    ) + sum(len(call.arguments) + len(call.results) for call in graph.calls)


def _drop_outputs(graph: Graph) -> Graph:
    read = {name for call in graph.calls for name in call.arguments}
    read |= {graph.loss, *(value for _, value in graph.metrics)}
    read |= {state.update for state in graph.state if state.update}
    blocks, calls = list(graph.blocks), list(graph.calls)
    for number, block in enumerate(graph.blocks):
        users = [call for call in graph.calls if call.block == number]
        keep = [
            i for i, name in enumerate(block.outputs)
            if any(call.results[i] in read for call in users)
        ]  # fmt: skip
        blocks[number] = live(replace(block, outputs=tuple(block.outputs[i] for i in keep)))
        calls = [
            replace(c, results=tuple(c.results[i] for i in keep)) if c.block == number else c
            for c in calls
        ]
    return replace(graph, blocks=tuple(blocks), calls=tuple(calls))


def _drop_inputs(graph: Graph) -> Graph:
    blocks, calls = list(graph.blocks), list(graph.calls)
    for number, block in enumerate(graph.blocks):
        used = {name for node in block.nodes for name in node.inputs} | set(block.outputs)
        used |= {gradient for _, gradient in block.gradients}
        keep = [i for i, name in enumerate(block.inputs) if name in used]
        blocks[number] = live(replace(block, inputs=tuple(block.inputs[i] for i in keep)))
        calls = [_keep_arguments(c, keep) if c.block == number else c for c in calls]
    needed = {name for call in calls for name in call.arguments}
    state = tuple(s for s in graph.state if s.name in needed or s.kind != "constant")
    return replace(graph, blocks=tuple(blocks), calls=tuple(calls), state=state)


def _keep_arguments(call: Call, keep: list[int]) -> Call:
    return replace(call, arguments=tuple(call.arguments[i] for i in keep))


def live(block: Block) -> Block:
    """The block without nodes that neither its outputs nor its gradients depend on."""
    forward = needed(block.forward, block.outputs)
    roots = {gradient for _, gradient in block.gradients}
    joint = needed((*block.forward, *block.backward), roots)
    extra = [node for node in joint if node not in set(forward)]
    nodes = (*forward, *extra)
    names = {name for node in nodes for name in node.outputs}
    names |= {*block.inputs, *(tangent for _, tangent in block.tangents)}
    return replace(
        block, nodes=nodes, n_forward=len(forward),
        types={name: kind for name, kind in block.types.items() if name in names},
    )  # fmt: skip
