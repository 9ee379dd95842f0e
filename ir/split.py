"""A backward in two halves, for schedules that run them apart.

Input: a `Lowered` block and what it keeps. Output: `Split`: the nodes that the gradients of the
block's activations depend on, and the rest, which only gradients of parameters need. Every node of
the backward, also a recomputed one, is in exactly one half. A parameter's gradient that falls out
of the first half is added to its accumulator there.
"""

from __future__ import annotations

from dataclasses import dataclass

from ir.graph import Node, needed
from ir.lower import Lowered
from ir.recompute import backward_nodes


@dataclass(frozen=True)
class Split:
    """`pending`: values that the first half hands to the second, in a fixed order; `summed_early`
    and `summed_late`: (parameter, gradient) that each half adds up."""

    input: tuple[Node, ...]
    weight: tuple[Node, ...]
    pending: tuple[str, ...]
    summed_early: tuple[tuple[str, str], ...]
    summed_late: tuple[tuple[str, str], ...]

    @property
    def has_weight_half(self) -> bool:
        return bool(self.summed_late)


def split_backward(lowered: Lowered, kept: frozenset[str], always: frozenset[str]) -> Split:
    """The two halves of the backward of a menu point; `always`: inputs that are state."""
    nodes = backward_nodes(lowered, kept, always)
    handed = [gradient for value, gradient in lowered.gradients if value not in always]
    sums = [(value, gradient) for value, gradient in lowered.gradients if value in always]
    first = needed(nodes, handed)
    inside = set(map(id, first))
    rest = tuple(node for node in nodes if id(node) not in inside)
    made_late = {name for node in rest for name in node.outputs}
    late = tuple(pair for pair in sums if pair[1] in made_late)
    weight = needed(rest, [gradient for _, gradient in late])
    there = {name for node in weight for name in node.outputs} | always | set(lowered.early)
    read = dict.fromkeys(name for node in weight for name in node.inputs)
    return Split(
        first, weight, tuple(name for name in read if name not in there),
        tuple(pair for pair in sums if pair[1] not in made_late), late,
    )  # fmt: skip
