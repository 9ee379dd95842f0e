"""What a plan may keep in the host's memory instead of the device's.

    none         nothing
    optimizer    optimizer state: at the step it streams through the device, tensor by tensor
    activations  values that forward saves for backward, where that is worth it
    all          both
"""

from __future__ import annotations

from collections import Counter

from ir.graph import Graph
from ir.variants import Variant

OFFLOADS = ("none", "optimizer", "activations", "all")


def offloads_optimizer(offload: str) -> bool:
    """Whether optimizer state lies in host memory."""
    return offload in ("optimizer", "all")


def offloads_activations(offload: str) -> bool:
    """Whether saved values may lie in host memory."""
    return offload in ("activations", "all")


def offload_of(*, optimizer: bool, activations: bool) -> str:
    """The word for what is offloaded."""
    return OFFLOADS[optimizer + 2 * activations]


def staying_inputs(graph: Graph, variant: Variant) -> frozenset[str]:
    """Inputs of a variant that are on the device in any case: of the batch, of the state, or read
    by several calls."""
    readers = Counter(v for call in graph.calls for v in dict.fromkeys(call.arguments))
    there = {item.name for item in graph.inputs} | {item.name for item in graph.state}
    return frozenset(
        name for index in variant.calls
        for name, value in zip(variant.block.inputs, graph.calls[index].arguments, strict=True)
        if value in there or readers[value] > 1
    )  # fmt: skip
