"""What backward recomputes: the backward nodes with forward nodes put in before their use.

Input: a `Lowered` block and the set of forward values that are kept. Output: the backward list;
every value that is neither kept nor always there is recomputed right before its first use.
"""

from __future__ import annotations

from ir.graph import Node
from ir.lower import Lowered


def state_inputs(lowered: Lowered, arguments: tuple[str, ...], state: set[str]) -> frozenset[str]:
    """The block inputs that are parameters, buffers or constants: they are always there."""
    return frozenset(
        name for name, value in zip(lowered.block.inputs, arguments, strict=True) if value in state
    )


def kept_values(lowered: Lowered, kept: frozenset[str], always: frozenset[str]) -> tuple[str, ...]:
    """The values that forward hands to backward, in a fixed order.

    Inputs of the block that recomputation starts from are added to the chosen `kept`.
    """
    backward = backward_nodes(lowered, kept, always)
    read = dict.fromkeys(name for node in backward for name in node.inputs)
    read.update(dict.fromkeys(name for _, name in lowered.gradients))
    made = {name for node in backward for name in node.outputs}
    outside = {tangent for _, tangent in lowered.block.tangents} | always | set(lowered.early)
    return tuple(name for name in read if name not in made | outside)


def backward_nodes(
    lowered: Lowered, kept: frozenset[str], always: frozenset[str]
) -> tuple[Node, ...]:
    """Backward with its recomputation.

    A node that runs again gives all its results again, so none of them is kept.
    """
    while True:
        nodes = _with_recomputation(lowered, kept, always)
        again = kept.intersection(name for node in nodes for name in node.outputs)
        if not again:
            return nodes
        kept -= again


def _with_recomputation(
    lowered: Lowered, kept: frozenset[str], always: frozenset[str]
) -> tuple[Node, ...]:
    """Each forward node that is missing, right before the backward node that first needs it."""
    makers = {name: node for node in lowered.forward for name in node.outputs}
    present = set(always) | set(kept) | set(lowered.early) | set(lowered.block.inputs)
    present |= {tangent for _, tangent in lowered.block.tangents}
    result: list[Node] = []

    def bring(name: str) -> None:
        if name in present:
            return
        node = makers[name]
        for source in node.inputs:
            bring(source)
        result.append(node)
        present.update(node.outputs)

    for node in lowered.backward:
        for name in node.inputs:
            bring(name)
        result.append(node)
        present.update(node.outputs)
    for _, name in lowered.gradients:
        bring(name)
    return tuple(result)
