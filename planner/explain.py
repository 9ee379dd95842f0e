"""Where the time and the bytes of a prediction go, as text and as JSON.

Input: a `Predicted`. Output: a few tables: parts of the step, stages, the heaviest operations of
each block with their local shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from typing import Any

from ir.cluster import GIB
from ir.graph import Node
from ir.lower import Lowered
from ir.predicted import StageCost
from planner.pins import Candidate
from planner.predict import Predicted
from planner.price import NodeTimes

PARTS = ("compute_s", "exposed_comm_s", "bubble_s", "optimizer_s")
HEAVIEST = 8
"""Operations that are listed per direction of a block."""


def explain(found: Predicted) -> str:
    """The whole explanation."""
    return "\n".join([
        *_parts(found), "", *_stages(found), "", *_traits(found), "", *_blocks(found)
    ])  # fmt: skip


def explain_json(found: Predicted) -> dict[str, Any]:
    """The same as plain JSON values: times in seconds, sizes in bytes."""
    candidate, pieces = _candidate(found), found.evaluated.pieces
    blocks = [
        {
            "block": kind.block.name, "calls": len(kind.calls),
            "forward": _heaviest_json(lowered.forward, lowered, times),
            "backward": _heaviest_json(lowered.backward, lowered, times),
        }
        for kind, lowered, times in zip(
            found.evaluated.program.kinds, pieces.lowered, pieces.times, strict=True
        )
    ]  # fmt: skip
    return {
        "candidate": {**asdict(candidate.mesh), "micro_batches": candidate.micro_batches,
                      "rows": candidate.rows, "recompute": found.recompute,
                      "virtual_stages": candidate.virtual_stages},
        "decided": [asdict(one) for one in found.decided],
        "parts": {name: getattr(found, name) for name in PARTS}, "step_s": found.step_s,
        "usd_per_step": found.usd_per_step,
        "peak_bytes": found.peak_GiB * GIB, "peak_parts": dict(found.memory),
        "stages": [asdict(stage) for stage in _stage_costs(found)],
        "traits": asdict(found.traits), "blocks": blocks,
    }  # fmt: skip


def _stage_costs(found: Predicted) -> list[StageCost]:
    """Each with what its own devices can hold."""
    prediction = found.evaluated.prediction
    return [
        replace(stage, capacity_bytes=prediction.capacity_of(rank))
        for rank, stage in enumerate(prediction.stages)
    ]  # fmt: skip


def _candidate(found: Predicted) -> Candidate:
    """With the virtual stages, which a prediction prices as a trait of the stack."""
    candidate, virtual = found.evaluated.candidate, found.traits.virtual_stages
    if virtual == 1:
        return candidate
    return replace(candidate, schedule="interleaved", virtual_stages=virtual)


def _parts(found: Predicted) -> Iterator[str]:
    """The step by what it is spent on; all of the busiest stage."""
    candidate = _candidate(found)
    yield f"{candidate}, {candidate.rows} rows each, recompute {found.recompute}"
    for one in found.decided:
        tried = ", ".join(map(str, one.tried))
        best = "the fastest that fits" if found.fits else "the smallest, since none fits,"
        yield f"  left open: {one.column}={one.value}, {best} of {tried}"
    step = found.step_s
    for name in PARTS:
        seconds = getattr(found, name)
        yield f"  {name.removesuffix('_s'):<14} {seconds:10.4f} s  {seconds / step:6.1%}"
    yield f"  {'step':<14} {step:10.4f} s"
    if found.usd_per_step:
        million_usd = found.usd_per_step * 1e6 / found.evaluated.program.degrees.batch
        yield f"  {'cost':<14} {found.usd_per_step:.4g} USD per step, {million_usd:.4g} per million"
    state = "fits" if found.fits else "does not fit"
    for name, size_bytes in found.memory.items():
        yield f"  {name:<14} {size_bytes / GIB:10.2f} GiB"
    yield f"  {'peak':<14} {found.peak_GiB:10.2f} GiB: {state}"


def _stages(found: Predicted) -> Iterator[str]:
    """Seconds of a micro-batch and GiB of a device, per stage."""
    stages = _stage_costs(found)
    names = [f.name for f in fields(stages[0])]
    sizes = [name for name in names if name.endswith("_bytes")]
    heads = [name.removesuffix("_bytes") for name in sizes]
    yield "stage  forward ms  backward ms  " + "  ".join(f"{head:>10}" for head in heads) + "  GiB"
    for number, stage in enumerate(stages):
        row = "  ".join(f"{getattr(stage, name) / GIB:10.2f}" for name in sizes)
        yield f"{number:5}  {stage.forward_s * 1e3:10.2f}  {stage.backward_s * 1e3:11.2f}  {row}"


def _traits(found: Predicted) -> Iterator[str]:
    """What the stack does."""
    values = [f"{f.name}={getattr(found.traits, f.name)!r}" for f in fields(found.traits)]
    yield "traits  " + " ".join(values)


def _blocks(found: Predicted) -> Iterator[str]:
    """The heaviest operations of every block, per micro-batch."""
    pieces = found.evaluated.pieces
    for kind, lowered, times in zip(
        found.evaluated.program.kinds, pieces.lowered, pieces.times, strict=True
    ):
        yield f"{kind.block.name} x{len(kind.calls)}"
        for word, nodes in (("forward", lowered.forward), ("backward", lowered.backward)):
            yield from _heaviest(word, nodes, lowered, times)


def _heaviest_json(
    nodes: tuple[Node, ...], lowered: Lowered, times: NodeTimes
) -> list[dict[str, Any]]:
    """The heaviest operations with their local shapes."""
    return [
        {"op": node.op, "seconds": seconds, "makes": makes}
        for node, seconds, makes in _by_weight(nodes, lowered, times)
    ]


def _heaviest(
    word: str, nodes: tuple[Node, ...], lowered: Lowered, times: NodeTimes
) -> Iterator[str]:
    for node, seconds, makes in _by_weight(nodes, lowered, times):
        yield f"  {word:<8} {seconds * 1e6:10.1f} us  {node.op:<28} {', '.join(makes)}"


def _by_weight(
    nodes: tuple[Node, ...], lowered: Lowered, times: NodeTimes
) -> Iterator[tuple[Node, float, list[str]]]:
    """The heaviest nodes, their seconds and what they make."""
    of = times.of
    for node in sorted(nodes, key=lambda node: -of[node.outputs[0]].total_s)[:HEAVIEST]:
        makes = [str(lowered.types[n]) for n in node.outputs if n in lowered.types]
        yield node, of[node.outputs[0]].total_s, makes
