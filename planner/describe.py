"""The text of a plan, on the model's own structure: decisions, layouts, seconds and bytes.

Input: a plan and the evaluated candidate behind it. Output: lines that are the same for the same
plan. Names come from the user's model, so they are escaped; they are text and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ir.cluster import Cluster
from ir.graph import Node, render
from ir.layout import Layout, Partial, Shard
from ir.lower import Lowered
from ir.mixed import least_of
from ir.ops import op_def
from ir.plan import Placed, Plan
from ir.quantities import duration, size
from ir.reshard import FREE
from ir.seats import seated, seats_of
from ir.stage_devices import are_unlike, places_text
from planner.candidate import Evaluated
from planner.keep_reason import keep_reason
from planner.price import COLLECTIVES, NodeTimes, Seconds
from planner.recompute import MenuPoint

SHORT = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64",
}  # fmt: skip
MAIN = frozenset(
    "attention normalize embedding.default cross_entropy convolution.default".split()
)
_OFFLOADED = {
    "optimizer": "optimizer state", "activations": "saved values",
    "all": "optimizer state and saved values",
}  # fmt: skip
MOST_NOTES = 8


def describe(plan: Plan, best: Evaluated) -> str:
    """First line, mesh, time, stages, one section per distinct block, memory, approximations."""
    lines = [*_head(plan), *_stages(plan, best)]
    for variant in range(len(best.program.kinds)):
        lines += _block(plan, best, variant)
    return "\n".join([*lines, *_memory(plan), *_notes(plan)])


def escaped(text: str) -> str:
    """A name from the model with everything unprintable escaped."""
    return "".join(
        x if x.isprintable() and x != "\\" else x.encode("unicode_escape").decode() for x in text
    )


def common_path(paths: list[str]) -> str:
    """One pattern for the places of a block: `layers.0` and `layers.1` are `layers.*`."""
    if len(set(paths)) == 1:
        return escaped(paths[0])
    patterns = {re.sub(r"(?<=\.)\d+|^\d+", "*", path) for path in paths}
    return escaped(patterns.pop()) if len(patterns) == 1 else f"{escaped(paths[0])} …"


def _head(plan: Plan) -> Iterator[str]:
    p, rows = plan.prediction, plan.global_batch // plan.mesh.data // plan.micro_batches
    yield (
        f"{escaped(plan.model)} on {plan.cluster}   step {duration(p.step_s)} "
        f"(bound {duration(p.bound_s)}, gap {p.gap:.1%})   "
        f"peak {size(p.peak_bytes)} of {size(p.capacity_bytes)}"
    )
    yield (
        f"mesh  {plan.mesh}   micro-batch {rows} × {plan.micro_batches}   {_schedule(plan)}   "
        f"zero {plan.zero}   {plan.optimizer}"
    )
    if plan.devices_idle:
        where = seats_of(plan.cluster, plan.mesh.size).text(plan.cluster)
        used, there = plan.mesh.size, plan.cluster.n_devices
        kind = f" ({seated(plan.cluster, used)})" if plan.cluster.nodes else ""
        yield f"devices  {used} of {there} used, {where}{kind}; {plan.devices_idle} idle"
    if are_unlike(plan.cluster, plan.mesh):
        word = "pipeline rank" if plan.virtual_stages > 1 else "stage"
        where = places_text(plan.cluster, plan.mesh, word)
        yield f"devices  {where}; start the nodes in this order"
        nodes = seated(plan.cluster, plan.mesh.size).nodes
        yield f"blocks   seconds and kept bytes below are those on {least_of(nodes)}"
    if plan.zero:
        parts = ("optimizer state", "gradients", "parameters")[: plan.zero]
        words = " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)
        yield f"ZeRO {plan.zero} over data={plan.mesh.data}: {words} divided"
    if plan.offload != "none":
        host_bytes, rate = max(s.host_bytes for s in p.stages), plan.cluster.host.copy_bytes_per_s
        yield (
            f"offload {plan.offload}: {_OFFLOADED[plan.offload]} in host memory, "
            f"{size(host_bytes)} per device, over {rate / 1e9:.3g} GB/s each way"
        )
    yield (
        f"time  compute {duration(p.compute_s)}   exposed communication "
        f"{duration(p.exposed_comm_s)}   bubble {duration(p.bubble_s)}   "
        f"optimizer {duration(p.optimizer_s)}"
    )
    if found := plan.certificate:
        ended = "; the time limit ended it" if found.is_cut_short else ""
        yield (
            f"search  {found.candidates:,} candidates for 10^{found.plans_log10:.0f} plans, "
            f"{found.planned} of them planned{ended}"
        )
    if plan.cluster.usd_per_hour:
        yield cost_line(p.step_s, plan.global_batch, plan.cluster)


def cost_line(step_s: float, global_batch: int, cluster: Cluster) -> str:
    """What a step and a million rows of the batch cost, at the cluster's price."""
    step_usd = cluster.usd_per_hour * step_s / 3600
    million_usd = step_usd * 1e6 / global_batch
    return (
        f"cost  {step_usd:.4g} USD per step   {million_usd:.4g} USD per million samples   "
        f"{cluster.usd_per_hour:.4g} USD per hour"
    )


def _schedule(plan: Plan) -> str:
    names = {"1f1b": "1F1B", "gpipe": "GPipe", "zero-bubble": "zero-bubble"}
    return names.get(plan.schedule) or f"interleaved 1F1B × {plan.virtual_stages}"


def _stages(plan: Plan, best: Evaluated) -> Iterator[str]:
    """A line per rank; the spans of its stages, where it has several, are numbered."""
    ranks = plan.mesh.pipeline
    for rank, cost in enumerate(plan.prediction.stages):
        spans = [
            ", ".join(_span(placed, best) for placed in stage) for stage in plan.stages[rank::ranks]
        ]
        if plan.virtual_stages > 1:
            spans = [f"({rank + ranks * i}) {span}" for i, span in enumerate(spans)]
        yield (
            f"{_place(plan)} {rank}  fwd {duration(cost.forward_s)}  "
            f"bwd {duration(cost.backward_s)}  {'  '.join(spans)}"
        )


def _place(plan: Plan) -> str:
    return "rank" if plan.virtual_stages > 1 else "stage"


def _span(placed: Placed, best: Evaluated) -> str:
    graph, keep = best.program.graph, f" [{placed.keep}]"
    calls = [graph.calls[i] for i in (placed.first, placed.first + placed.count - 1)]
    first, last = (escaped(call.path or graph.blocks[call.block].name) for call in calls)
    return (first if placed.count == 1 else f"{first} to {last}") + keep


def _block(plan: Plan, best: Evaluated, variant: int) -> Iterator[str]:
    """The header, the main lines of forward and the collectives of backward, the rest summed up:
    forward's lines add up to its seconds."""
    program = best.program
    kind, lowered = program.kinds[variant], program.lowered[variant]
    times = best.pieces.times[variant]
    paths = [program.graph.calls[i].path or kind.block.name for i in kind.calls]
    used = [p for p in best.pieces.menus[variant] if p.label in program.keeps[variant]]
    yield ""
    head = f"{common_path(paths)}  ×{len(paths)}"
    yield f"{head:<48}  fwd {duration(used[0].forward.total_s)}"
    for point in used:
        why = keep_reason(plan, best, variant, point)
        yield f"  [{point.label}]  {_keeping(point, lowered, times)}{why}"
    early = [_row(n, lowered, times.early, plan) for n in lowered.prologue if _is_main(n)]
    forward = [_row(n, lowered, times.of, plan) for n in lowered.forward if _is_main(n)]
    backward = [_row(n, lowered, times.of, plan) for n in lowered.backward if _moves(n)]
    yield from (["  once per step"] if early else [])
    yield from _table(early)
    if rest := _summary([n for n in lowered.prologue if not _is_main(n)], times.early):
        yield f"  and {rest}, once per step"
    yield from _table(forward)
    if rest := _summary([n for n in lowered.forward if not _is_main(n)], times.of):
        yield f"  and {rest}"
    if lowered.backward:
        yield f"  backward: {_summary(lowered.backward, times.of)}"
    yield from _table(backward)


def _table(rows: list[tuple[str, str, str]]) -> Iterator[str]:
    """Three columns; an overlong cell shifts only its own line."""
    texts = [min(len(text), 76) for text, _, _ in rows]
    kinds = [min(len(kind), 48) for _, kind, _ in rows]
    for text, kind, cost in rows:
        yield f"  {text:<{max(texts)}}  {kind:<{max(kinds)}}  {cost:>9}"


def _keeping(point: MenuPoint, lowered: Lowered, times: NodeTimes) -> str:
    again = point.backward.total_s - point.copy_s - times.total(lowered.backward).total_s
    redone = f", of it {duration(again)} again" if again > 0 else ""
    text = f"bwd {duration(point.backward.total_s)}{redone}  saved {size(point.held_bytes)}"
    if not point.hosted:
        return text
    there = f"{size(point.host_bytes)} on the host, {duration(point.copy_s)} each way"
    return f"{text}  and {there}"


def _moves(node: Node) -> bool:
    return node.op in COLLECTIVES and node.op not in FREE


def _is_main(node: Node) -> bool:
    return _moves(node) or node.op in MAIN or op_def(node.op).kind == "matmul"


def _summary(nodes: Iterable[Node], seconds: dict[str, Seconds]) -> str:
    """Seconds by operation, the longest first; without collectives, and views that copy nothing."""
    by_op: dict[str, tuple[int, Seconds]] = {}
    for node in nodes:
        found = seconds[node.outputs[0]]
        if node.op in COLLECTIVES or not found.total_s:
            continue
        word = _word(node)
        count, before = by_op.get(word, (0, Seconds()))
        by_op[word] = (count + 1, before + found)
    ordered = sorted(by_op.items(), key=lambda item: (-item[1][1].total_s, item[0]))
    return ", ".join(f"{n} {op} {duration(sums.total_s)}" for op, (n, sums) in ordered)


def _word(node: Node) -> str:
    """What an operation is counted as."""
    match op_def(node.op).kind:
        case "view":
            return "copying view"
        case "memory" if node.op not in MAIN:
            return "elementwise"
        case _:
            return node.op


def _row(
    node: Node, lowered: Lowered, seconds: dict[str, Seconds], plan: Plan
) -> tuple[str, str, str]:
    """(what, the result's type and layout, seconds)."""
    name, op = node.outputs[0], node.op.removesuffix(".default")
    words = ", ".join(_words(node))
    return f"{name} = {op}({words})", _type(name, lowered, plan), duration(seconds[name].total_s)


def _words(node: Node) -> Iterator[str]:
    """Arguments in short: a collective's axis and dims, other literals to four digits."""
    if node.op in COLLECTIVES:
        dims = [f"dim {dim}" for dim in node.args[2::2]]
        yield from (str(node.args[0]), str(node.args[1]), " to ".join(dims))[: 3 if dims else 2]
        return
    for argument in node.args:
        yield f"{argument:.4g}" if isinstance(argument, float) else render(argument)


def _type(name: str, lowered: Lowered, plan: Plan) -> str:
    """`bf16[1/data, 8192, 512/tensor]`: local sizes, and the axis that cuts a dim."""
    kind = lowered.types.get(name) or lowered.early_types[name]
    layout = lowered.layouts[name]
    dims = [str(number) for number in kind.shape]
    for axis, place in _cuts(layout, plan):
        if isinstance(place, Shard):
            dims[place.dim] += f"/{axis}"
    sums = [axis for axis, place in _cuts(layout, plan) if isinstance(place, Partial)]
    partial = f" partial({', '.join(sums)})" if sums else ""
    return f"{SHORT.get(kind.dtype, kind.dtype)}[{', '.join(dims)}]{partial}"


def _cuts(layout: Layout, plan: Plan) -> Iterator[tuple[str, object]]:
    if plan.mesh.data > 1:
        yield "data", layout.data
    if plan.mesh.tensor > 1:
        yield "tensor", layout.tensor


def _memory(plan: Plan) -> Iterator[str]:
    yield ""
    heads = ["parameters", "gradients", "optimizer", "saved", "working", "peak"]
    unlike = any(cost.capacity_bytes for cost in plan.prediction.stages)
    heads += ["usable"] * unlike
    yield "memory   " + "".join(f"{head:>12}" for head in heads)
    for number, cost in enumerate(plan.prediction.stages):
        parts = [
            cost.parameter_bytes, cost.gradient_bytes, cost.optimizer_bytes, cost.saved_bytes,
            cost.transient_bytes, cost.peak_bytes,
        ]  # fmt: skip
        parts += [cost.capacity_bytes] * unlike
        yield f"{f'{_place(plan)} {number}':<9}" + "".join(f"{size(part):>12}" for part in parts)


def _notes(plan: Plan) -> Iterator[str]:
    yield ""
    yield "approximations"
    for note in plan.approximations[:MOST_NOTES]:
        yield f"  {escaped(note)}"
    if len(plan.approximations) > MOST_NOTES:
        yield f"  and {len(plan.approximations) - MOST_NOTES} more, in plan.json"
