"""What a plan simplifies, in words.

Input: the workload and the evaluated candidate. Output: notes: operations that run whole, because
no rule says how to cut them or nothing divides, large parameters that every rank holds whole,
products without units, pinned schedules without stages, and the kind of cost model, first of all
where it was measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ir.cluster import GIB, Cluster, Mesh
from ir.graph import Block, Node
from ir.layout import Replicate
from ir.mixed import least_of
from ir.ops import op_def
from ir.stage_devices import are_unlike
from ir.variants import Variant
from planner.calibrated import cost_model
from planner.candidate import Evaluated, Workload
from planner.ports import divides
from planner.unmeasured import unmeasured

LARGE_SHARE = 0.01
"""A parameter with more than this part of all parameters is worth a note when it is not cut."""
ROOFLINE_NOTE = "seconds are a roofline and alpha-beta estimate from data sheets, not measured"
MEASURED_NOTE = "seconds are interpolated in measurements of this machine"
SHAPE_NOTE = "seconds are estimated by shape from published measurements, not measured here"


def divides_something(kinds: tuple[Variant, ...], degree: int) -> bool:
    """Whether some tensor of the model has a factor that the tensor axis can cut."""
    return any(divides(kind.factors, leaf, degree) for kind in kinds for leaf in kind.factors.size)


def approximations(work: Workload, best: Evaluated, cluster: Cluster) -> tuple[str, ...]:
    """All notes, in a stable order."""
    mesh = best.candidate.mesh
    notes = [*_measured(work, best, cluster)] if cluster.calibration else []
    notes += [*_unlike_devices(cluster, mesh), *_no_units(work, cluster), *_nothing_to_order(best)]
    if mesh.size > 1:
        notes += [*_fixed_batch(work), *_unknown_operations(work)]
    if mesh.tensor > 1:
        notes += [*_whole_parameters(work, best), *_whole_work(best)]
    if mesh.tensor > 1 and not divides_something(work.kinds, mesh.tensor):
        notes.append(f"tensor={mesh.tensor} divides no factor: its ranks all do the same work")
    if cluster.calibration is None:
        notes.append(ROOFLINE_NOTE if cluster.device.sm_count == 0 else SHAPE_NOTE)
    return tuple(dict.fromkeys(notes))


def _unlike_devices(cluster: Cluster, mesh: Mesh) -> list[str]:
    """Nodes that differ are planned for as the least of those of a stage."""
    if not cluster.nodes:
        return []
    if are_unlike(cluster, mesh):
        return [
            f"{cluster}: hosts, and the latency, shared ports and in-switch sums of links, are "
            "taken as the worst of all nodes; devices and rates of links are each node's own"
        ]
    usable = cluster.device.usable_bytes / GIB
    return [
        f"{cluster}: every device is taken as {least_of(cluster.nodes)}, {usable:.1f} usable GiB; "
        "faster ones wait"
    ]


def _fixed_batch(work: Workload) -> list[str]:
    """Why no data ranks and micro-batches were considered."""
    reason = work.graph.fixed_batch
    return [f"the batch can't be cut, since the model works for one size: {reason}"] * bool(reason)


def _nothing_to_order(best: Evaluated) -> list[str]:
    """A pinned schedule on a mesh with one pipeline rank."""
    candidate = best.candidate
    if candidate.mesh.pipeline > 1 or candidate.schedule == "1f1b":
        return []
    return [f"schedule={candidate.schedule} orders the work of pipeline ranks, and there is one"]


def _no_units(work: Workload, cluster: Cluster) -> list[str]:
    """Products in a precision that the device has no units for."""
    device = cluster.device
    made = {
        kind.block.types[name].dtype for kind in work.kinds for node in kind.block.nodes
        if op_def(node.op).kind in ("matmul", "attention", "conv")
        for name in node.outputs if name in kind.block.types
    }  # fmt: skip
    return [
        f"{device.name} has no units for {dtype}: its products are priced as those of float32"
        for dtype in sorted(made) if not device.has_units(dtype)
    ]  # fmt: skip


def _measured(work: Workload, best: Evaluated, cluster: Cluster) -> Iterator[str]:
    """What is measured and what is not, and whose seconds these are where ranks share cores."""
    missing = unmeasured(work, best, cluster)
    but = f", but for these, which have the catalogue's: {', '.join(missing)}" if missing else ""
    yield MEASURED_NOTE + but
    mesh = best.candidate.mesh
    if cost_model(cluster, mesh).core_sharing > 1 and cluster.calibration:
        yield (
            f"{mesh.size} ranks share {cluster.calibration.cores} cores: compute and communication "
            "are the mean of all ranks, all at once; the bubble is what cores have no work for"
        )


def _unknown_operations(work: Workload) -> list[str]:
    return [note for kind in work.kinds for note in _unknown_in(kind.block, kind)]


def _unknown_in(block: Block, kind: Variant) -> list[str]:
    notes = []
    for node in block.nodes:
        known = kind.factors.nodes[node].signature.known
        if not op_def(node.op).known or (not known and not node.op.startswith("arange")):
            where = f" in {node.source.module!r}" if node.source.module else f" in {block.name}"
            notes.append(f"{node.op}{where} has no sharding rule: every rank runs it whole")
    return notes


def _whole_parameters(work: Workload, best: Evaluated) -> list[str]:
    """Large parameters that are not cut because a dim does not divide; repeated ones once."""
    degree, notes = best.candidate.mesh.tensor, []
    parameters = [item for item in work.graph.state if item.kind == "parameter"]
    total = sum(item.type.bytes(1) for item in parameters) or 1
    for item in parameters:
        place = best.program.state.get(item.name)
        if not isinstance(place, Replicate) or item.type.bytes(1) < LARGE_SHARE * total:
            continue
        sizes = [int(size) for size in item.type.shape]
        odd = [size for size in sizes if size % degree]
        if odd:
            name = re.sub(r"(?<=\.)\d+(?=\.)", "*", item.names[0])
            notes.append(f"{name!r} is held whole on the tensor axis: {_why_whole(sizes, degree)}")
    return notes


def _why_whole(sizes: list[int], degree: int) -> str:
    """Which dims can't be cut, and that the others were not."""
    odd = " and ".join(str(size) for size in dict.fromkeys(sizes) if size % degree)
    even = " or ".join(str(size) for size in dict.fromkeys(sizes) if size % degree == 0)
    are = "are" if " and " in odd else "is"
    return f"{odd} {are} not divisible by {degree}" + (
        f", and a cut of {even} was not chosen" if even else ""
    )


def _whole_work(best: Evaluated) -> list[str]:
    """Products and attentions that every rank of the tensor axis does in full."""
    notes = []
    for kind, sharding in zip(best.program.kinds, best.pieces.shardings, strict=True):
        for node in kind.block.forward:
            is_heavy = op_def(node.op).kind in ("matmul", "attention", "conv")
            if is_heavy and not sharding.chosen[node].divides:
                module = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", node.source.module or kind.block.name)
                op = node.op.removesuffix(".default")
                why = _indivisible(kind.block, node, best.candidate.mesh.tensor)
                notes.append(
                    f"{op} in {module!r} is done in full by every rank of the tensor axis{why}"
                )
    return notes


def _indivisible(block: Block, node: Node, degree: int) -> str:
    """The sizes of an operation of which none can be cut; nothing if some can, and was not."""
    kinds = [block.types[name] for name in (*node.inputs, *node.outputs) if name in block.types]
    sizes = dict.fromkeys(n for kind in kinds for n in kind.shape if isinstance(n, int) and n > 1)
    if any(size % degree == 0 for size in sizes):
        return ""
    shown = ", ".join(map(str, sizes))
    return f": {degree} divides none of its sizes {shown}. Pin a tensor degree that does"
