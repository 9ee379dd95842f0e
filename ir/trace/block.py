"""Captures one member of a folded family on its own.

Input: the `Record` of a call seen in the dry run. Output: a `Capture` with sizes in `BATCH`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from ir.graph import BATCH
from ir.trace.adapters import as_in_eager, flatten, storage_id
from ir.trace.capture import Capture, capture
from ir.trace.convert import tensor_type
from ir.trace.fold import Record
from ir.trace.joint import Segment
from ir.trace.segment import canonical, live_nodes


class _Alone(nn.Module):
    """Runs a family member on flat tensors, as it was called inside the model. Its hooks are not
    part of it: they run there, before and after what is folded."""

    def __init__(self, record: Record):
        super().__init__()
        self.block = record.module
        self.rebuild = record.rebuild

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        args, kwargs = self.rebuild(list(tensors))
        with as_in_eager():
            output = self.block.forward(*args, **kwargs)
        return [x for x in flatten(output)[0] if isinstance(x, Tensor)]


def capture_record(record: Record) -> Capture:
    examples = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in record.inputs]
    dims = [_batch_dims(small, large, record.rows) for small, large in record.input_sizes]
    return capture(_Alone(record), examples, dims)


def has_state_of_others(body: Capture, state: Iterable[Tensor]) -> bool:
    """Whether a member reads the model's `state` in a way that leaves it a constant: its own is
    known by name, but not that of modules that are arguments, say, or lie in plain lists."""
    known = set(map(storage_id, state))
    return any(storage_id(constant) in known for constant in body.constants.values())


def result_name(node: fx.Node, body: Capture, record: Record) -> str:
    """A result is named like the argument of its type: `hidden_states` stays that."""
    kind = tensor_type(node.meta["val"], body.sizes)
    for holder in body.graph.nodes:
        if holder.name in body.inputs and tensor_type(holder.meta["val"], body.sizes) == kind:
            return record.names[body.inputs[holder.name]]
    return record.path.rsplit(".", 1)[0] + "_out"


def last_texts(records: list[Record]) -> dict[int, str]:
    """By the place of the first call of each variant that has several: the text of the function of
    the last one's member."""
    first: dict[Any, int] = {}
    last: dict[Any, int] = {}
    for place, record in enumerate(records):
        first.setdefault(record.variant, place)
        last[record.variant] = place
    return {
        first[variant]: function_text(capture_record(records[place]))
        for variant, place in last.items() if place != first[variant]
    }  # fmt: skip


def _batch_dims(small: tuple[int, ...], large: tuple[int, ...], rows: int) -> dict[int, Any]:
    """Dims that grew with the batch, as multiples of it."""
    return {
        dim: BATCH * sympy.Rational(a, rows)
        for dim, (a, b) in enumerate(zip(small, large, strict=True)) if a != b
    }  # fmt: skip


def body_nodes(body: Capture) -> list[fx.Node]:
    """The nodes that the outputs and the buffer updates depend on, in order."""
    return live_nodes(body.graph, [*body.outputs, *body.updates.values()])


def function_text(body: Capture) -> str:
    """Text that two captures share exactly if they compute the same thing on their state and
    inputs."""
    holders = tuple(n for n in body.graph.nodes if n.op in ("placeholder", "get_attr"))
    held = [
        body.state.get(n.name) or str(body.inputs.get(n.name, body.constants.get(n.name)))
        for n in holders
    ]
    outputs = tuple(n for n in (*body.outputs, *body.updates.values()) if n not in holders)
    piece = Segment(tuple(body_nodes(body)), holders, outputs)
    return canonical(piece, body.sizes, held)

