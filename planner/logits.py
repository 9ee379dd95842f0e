"""Which products make the logits, and their gradients' products: they stay in the traced precision.

Input: a lowered block. Output: the first outputs of those nodes. Frameworks leave the output layer
out of 8- and 4-bit training (Transformer Engine wraps only the layers between embedding and
output; torchtitan filters "output"), since errors there reach the loss unattenuated.
"""

from __future__ import annotations

from collections.abc import Iterable

from ir.graph import Node
from ir.lower import Lowered

_PRODUCT, _LOSS, _LOSS_BACKWARD = "einsum", "cross_entropy", "cross_entropy_backward"


def logit_products(lowered: Lowered) -> frozenset[str]:
    """The product that a cross-entropy reads, with no other between, and the two of backward."""
    wanted = {name for node in lowered.forward if node.op == _LOSS for name in node.inputs}
    made = _reached(reversed(lowered.forward), wanted, backwards=True)
    gradients = {n for node in lowered.backward if node.op == _LOSS_BACKWARD for n in node.outputs}
    return made | _reached(lowered.backward, gradients, backwards=False)


def _reached(nodes: Iterable[Node], names: set[str], *, backwards: bool) -> frozenset[str]:
    """Products next to `names`, through any nodes that are no products."""
    found: set[str] = set()
    for node in nodes:
        near, far = (node.outputs, node.inputs) if backwards else (node.inputs, node.outputs)
        if not names.intersection(near):
            continue
        if node.op == _PRODUCT:
            found.add(node.outputs[0])
        elif node.op != _LOSS:
            names |= set(far)
    return frozenset(found)
