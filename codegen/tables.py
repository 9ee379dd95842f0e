"""layout.json: what each rank holds, reads, sends and reduces.

Input: an `Spmd` program, the call groups of its stages and the plan. Output: plain JSON values in
the format that `runtime.layout` reads.
"""

from __future__ import annotations

from typing import Any

from codegen.groups import Group, weight_path
from ir.graph import TensorType, evaluate
from ir.layout import TENSOR, Layout, Placement, Shard
from ir.lower import local_outer
from ir.plan import Plan
from ir.spmd import Message, Spmd

FORMAT = "shardwright-layout/2"


def layout_tables(spmd: Spmd, groups: tuple[tuple[Group, ...], ...], plan: Plan) -> dict[str, Any]:
    """The whole of layout.json; `groups` are the call groups of each stage."""
    index = {state.name: i for i, state in enumerate(spmd.graph.state)}
    return {
        "format": FORMAT,
        "plan": plan.hash,
        "mesh": {
            "pipeline": plan.mesh.pipeline, "data": plan.mesh.data, "tensor": plan.mesh.tensor
        },
        "schedule": {
            "name": plan.schedule,
            "order": [" ".join(map(str, actions)) for actions in plan.order],
        },
        "micro_batches": spmd.degrees.micro_batches,
        "global_batch": spmd.degrees.batch,
        "state": [_state(spmd, state.name) for state in spmd.graph.state],
        "inputs": [_input(spmd, item) for item in spmd.graph.inputs],
        "plain": [{"path": path, "value": value} for path, value in spmd.graph.plain],
        "stages": [
            _stage(spmd, s, groups[s], index) for s in range(len(spmd.stages))
        ],
        "loss": _scalar(spmd, spmd.graph.loss, "loss"),
        "metrics": [_scalar(spmd, value, name) for name, value in spmd.graph.metrics],
    }  # fmt: skip


def _shards(spmd: Spmd, place: Placement) -> list[dict[str, Any]]:
    if not isinstance(place, Shard) or spmd.degrees.tensor == 1:
        return []
    outer = int(evaluate(place.outer, spmd.degrees.batch))
    return [{"axis": TENSOR, "dim": place.dim, "outer": outer}]


def _state(spmd: Spmd, name: str) -> dict[str, Any]:
    state = spmd.state_of[name]
    gradient = spmd.gradient_place(name) if state.trainable else spmd.state[name]
    return {
        "names": list(state.names),
        "kind": state.kind,
        "shape": list(state.type.shape),
        "dtype": state.type.dtype,
        "trainable": state.trainable,
        "shards": _shards(spmd, spmd.state[name]),
        "stages": list(spmd.stages_of_state(name)),
        "gradient_shards": _shards(spmd, gradient) if state.trainable else [],
        "sync": _gradient_sync(spmd, name) if state.trainable else [],
        "update": _update(spmd, state.update),
        "zero": spmd.zero_of(name),
        **({"hosted": True} if spmd.is_hosted(name) else {}),
    }


def _gradient_sync(spmd: Spmd, name: str) -> list[dict[str, Any]]:
    steps = []
    for op, axis, have, want in spmd.gradient_sync(name):
        entry: dict[str, Any] = {"op": op, "axis": axis}
        place = have if op == "all_gather" else want
        if op != "all_reduce" and isinstance(place, Shard):
            entry |= {"dim": place.dim, "outer": int(evaluate(place.outer, spmd.degrees.batch))}
        steps.append(entry)
    return steps


def _update(spmd: Spmd, value: str | None) -> dict[str, Any] | None:
    if value is None:
        return None
    entry = _scalar(spmd, value, value)
    return {key: entry[key] for key in ("stage", "value", "reduce", "sync")}


def _scalar(spmd: Spmd, value: str, name: str) -> dict[str, Any]:
    """A value that the last use sums over micro-batches and data ranks, or keeps."""
    stage = spmd.stage_of[spmd.makers[value][0]]
    summed = spmd.is_summed(value)
    data = summed and spmd.degrees.data > 1
    return {
        "name": name, "stage": stage, "value": value, "reduce": "sum" if summed else "keep",
        "sync": [{"op": "all_reduce", "axis": "data"}] if data else [],
    }  # fmt: skip


def _input(spmd: Spmd, item: Any) -> dict[str, Any]:
    return {
        "name": item.name, "index": item.index, "path": item.path, "dtype": item.type.dtype,
        "shape": [int(evaluate(size, spmd.degrees.batch)) for size in item.type.shape],
        "batch_dim": item.batch_dim,
    }  # fmt: skip


def _stage(
    spmd: Spmd, number: int, groups: tuple[Group, ...], index: dict[str, int]
) -> dict[str, Any]:
    weights: dict[str, Any] = {}
    read: set[str] = set()
    for group in groups:
        trees = [_weights(spmd, placed, index) for placed in group.calls]
        weights[group.name] = trees if group.many else trees[0]
        for placed in group.calls:
            read.update(spmd.call(placed).arguments)
    prologue = any(spmd.lowered[group.variant].prologue for group in groups)
    return {
        "weights": weights,
        "inputs": [item.name for item in spmd.graph.inputs if item.name in read],
        "receives": [
            {**_message(m), "from": m.source} for m in spmd.messages if m.target == number
        ],
        "sends": [{**_message(m), "to": m.target} for m in spmd.messages if m.source == number],
        "has_prologue": prologue,
    }


def _weights(spmd: Spmd, placed: Any, index: dict[str, int]) -> dict[str, int]:
    block, call = spmd.block(placed), spmd.call(placed)
    return {
        weight_path(name): index[value]
        for name, value in zip(block.inputs, call.arguments, strict=True)
        if value in index
    }


def _message(message: Message) -> dict[str, Any]:
    kind: TensorType = message.type
    return {
        "value": message.value, "shape": list(kind.shape), "dtype": kind.dtype,
        "gradient": message.gradient is not None,
        "gradient_shape": list(message.gradient.shape) if message.gradient else None,
    }  # fmt: skip


def shard_text(spmd: Spmd, layout: Layout, axis: str, rows: int) -> tuple[int, int] | None:
    """(dim, outer) of the cut on an axis for `ctx.where`; None if the axis does not cut."""
    place = layout.data if axis == "data" else layout.tensor
    degree = rows if axis == "data" else spmd.degrees.tensor
    if not isinstance(place, Shard) or degree == 1:
        return None
    if axis == "data":
        return place.dim, int(evaluate(place.outer, spmd.degrees.batch))
    return place.dim, local_outer(layout, axis, spmd.degrees, rows)
