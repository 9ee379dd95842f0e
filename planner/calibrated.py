"""The cost model for GPUs: kernels by shape, collectives by how their groups lie.

Input: a cluster, a mesh, `Traits`. Output: a `CostModel` of `kernels`, `attention_time` and
`collectives`, and `cost_model`, which takes `Roofline` where only rates are known (CPUs).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from ir.cluster import Cluster, Mesh
from ir.errors import UsageError
from ir.graph import DTYPE_BYTES
from planner.attention_time import UNFUSED, attention_s
from planner.collectives import collective_s, send_s
from planner.cost import KINDS, CostModel, Roofline
from planner.kernels import launch_bound_s, matmul_s, memory_s
from planner.links import Groups, axis_groups, lay_out
from planner.measured_cost import MeasuredCost
from planner.traits import Traits
from planner.work import Work

OURS = Traits(eager=True, attention="unfused")
"""Emitted programs: torch's kernels one by one, attention by products and a softmax over all
scores (`runtime.ops.attention`), exchanges after backward."""

QUANTISED_BYTES, FUSED_QUANTISED_BYTES = 4.0, 2.0
"""Per element of an operand in 8 or 4 bits: read 16 bits, write it and its transpose, as
Transformer Engine's cast-transpose does; kernels that fuse it with what comes before only write.
Every operand serves two of a layer's three products."""
QUANTISED_USES = 2.0
FOREACH_PASSES = 20 / 7
"""Tensors that torch's foreach AdamW reads and writes (weight decay 2, moments 3 + 5, root and
epsilon 6, update 4), over the seven of its fused kernel (read g, p, m, v; write p, m, v)."""
ACCUMULATED_PASSES, FUSED_PASSES = 3.0, 2.0
"""Read the sum and the new gradient, write the sum; products that add to the sum write it alone."""
LOW_PRECISIONS = ("float8_e4m3fn", "mxfp8", "nvfp4")
SUSTAINED, SUSTAINED_USUAL, SUSTAINED_LOW = {"Hopper": 0.66}, 0.80, 0.85
"""Pace of matrix products within a long training step over that of the best benchmark of the same
shape: the power limit is shared with memory traffic and neighbours, operands are not warm, and
layouts are not the fastest. Hopper's 16-bit units meet their power limit first. Fitted on the rows
of benchmarks/data whose time is nearly all compute; by architecture and width of the operands."""
LOGIT_COPIES = 2
"""fp32 tensors of the logits' size that `runtime.ops.cross_entropy` has at its peak: the copy and
its exponentials."""


@dataclass(frozen=True)
class Calibrated:
    """Seconds by shape; `Traits` say which kernels, what is fused, and who waits for the host."""

    cluster: Cluster
    mesh: Mesh
    traits: Traits = OURS

    @property
    def capacity_bytes(self) -> int:
        """Memory of a device less its reserve."""
        return self.cluster.device.usable_bytes

    @property
    def sends_meet(self) -> bool:
        """Links carry both directions at once, and 1F1B sends and receives in one call."""
        return True

    def compute_s(self, work: Work) -> float:
        """Seconds of one kernel that was queued in time; see `host_s`."""
        device = self.cluster.device
        match work.kind:
            case "view" | "collective":
                return 0.0
            case "matmul" if work.product is not None:
                return self._product_s(work)
            case "attention" if work.attention is not None:
                shape = work.attention
                return attention_s(
                    device, batch=shape.batch, heads=shape.heads, kv_heads=shape.kv_heads,
                    queries=shape.queries, keys=shape.keys, head_dim=shape.head_dim,
                    dtype=work.dtype, causal=shape.causal, backward=work.backward,
                    kernel=self._attention, dropout=self.traits.dropout,
                )  # fmt: skip
            case "matmul" | "conv" | "attention":
                rate = device.peak_flops_per_s(work.dtype) * device.matmul_fraction
                moving_s = memory_s(device, work.moved_bytes, kernels=0)
                return max(work.flops / rate, moving_s) + device.kernel_fixed_s
            case "memory":
                if work.logits and self._fuses_loss:
                    return memory_s(device, work.moved_bytes)
                moved = work.touched_bytes or work.moved_bytes
                return memory_s(device, moved, work.kernels)
        raise ValueError(f"unknown kind of work {work.kind!r}; known: {', '.join(KINDS)}")

    @cached_property
    def _attention(self) -> str:
        return self.traits.on(self.cluster.device).attention

    @property
    def _fuses_loss(self) -> bool:
        return self.traits.fused_elementwise or self.traits.fused_loss

    def _product_s(self, work: Work) -> float:
        """By `kernels`, at the pace that a long step sustains."""
        low = self.traits.matmul_precision in LOW_PRECISIONS
        pace = SUSTAINED_LOW if low else SUSTAINED.get(self.cluster.device.arch, SUSTAINED_USUAL)
        return self._benchmark_s(work) / pace

    def _benchmark_s(self, work: Work) -> float:
        """In the traits' precision where its 16-element alignment allows, with quantising."""
        assert work.product is not None
        batch, m, n, k = work.product
        dtype, device = work.dtype, self.cluster.device
        low = self.traits.matmul_precision
        if low == "tf32" and dtype == "float32":
            return matmul_s(device, m, n, k, "tf32", batch)
        if low in ("", "tf32") or batch > 1 or m % 16 or n % 16 or k % 16:
            return matmul_s(device, m, n, k, dtype, batch)
        fused = self.traits.fused_elementwise
        per_element = FUSED_QUANTISED_BYTES if fused else QUANTISED_BYTES
        quantised = per_element * (m * k + k * n) / QUANTISED_USES
        passes_s = memory_s(device, quantised, kernels=0 if fused else 1)
        return matmul_s(device, m, n, k, low) + passes_s

    def group_s(self, moved_bytes: float) -> float:
        """One kernel at memory's pace."""
        return memory_s(self.cluster.device, moved_bytes)

    def inner_bytes(self, work: Work) -> tuple[float, float]:
        """The scores of unfused attention; fp32 copies of logits in an unfused cross-entropy."""
        if work.attention is not None and self._attention in UNFUSED:
            shape = work.attention
            scores = shape.batch * shape.heads * shape.queries * shape.keys
            size_bytes = float(scores * DTYPE_BYTES[work.dtype])
            return (0.0 if work.backward else size_bytes), size_bytes
        if work.logits and not self._fuses_loss:
            return 0.0, LOGIT_COPIES * DTYPE_BYTES["float32"] * work.logits
        return 0.0, 0.0

    def host_s(self, launches: float) -> float:
        """The host's time of a run of kernels; 0 unless it launches them one by one (`eager`)."""
        return launch_bound_s(launches, self.cluster.device) if self.traits.eager else 0.0

    @property
    def core_sharing(self) -> float:
        """A GPU is not shared."""
        return 1.0

    def accumulate_s(self, gradient_bytes: float, tensors: int, micro_batches: int) -> float:
        """Where there are several: passes over the sum and the new gradient, or over the sum alone
        in fused products."""
        if micro_batches == 1:
            return 0.0
        passes = FUSED_PASSES if self.traits.fused_elementwise else ACCUMULATED_PASSES
        return memory_s(self.cluster.device, passes * gradient_bytes, kernels=0)

    def collective_s(self, op: str, size_bytes: float, axis: str) -> float:
        """One collective; `axis` may also be "zero" (the ranks that share state) or "replica"."""
        if axis == "replica" and self.mesh.data == self.zero_members:
            return 0.0
        return collective_s(self.groups(axis), op, size_bytes)

    @property
    def zero_members(self) -> int:
        """Data ranks that share one copy of what ZeRO divides."""
        members = min(self.traits.zero_group or self.mesh.data, self.mesh.data)
        if self.mesh.data % members:
            raise UsageError(
                f"zero_group={members} does not divide data={self.mesh.data}: choose a divisor."
            )
        return members

    def groups(self, axis: str) -> Groups:
        """By the mesh, or of the ranks that share state."""
        if axis not in ("zero", "replica"):
            return axis_groups(self.cluster, self.mesh, axis)
        return _part_groups(self.cluster, self.mesh, self.zero_members, axis == "replica")

    def send_s(self, size_bytes: float, stage: int | None = None) -> float:
        """All ranks of a stage to the next one's, at once."""
        return send_s(self.cluster, self.mesh, size_bytes, stage)

    def optimizer_s(self, parameter_bytes: float, state_bytes: float) -> float:
        """Read the gradient, read and write the parameter and the state; more when not fused."""
        passes = 1.0 if self.traits.fused_optimizer else FOREACH_PASSES
        moved = 3 * parameter_bytes + 2 * state_bytes
        return memory_s(self.cluster.device, passes * moved, kernels=0)


@lru_cache(maxsize=1024)
def _part_groups(cluster: Cluster, mesh: Mesh, members: int, across: bool) -> Groups:
    """Runs of `members` of each group of the data axis, or the groups across these runs."""
    parts: list[range] = []
    for ranks in mesh.groups("data"):
        if across:
            parts += [ranks[i::members] for i in range(members)]
        else:
            parts += [ranks[i : i + members] for i in range(0, len(ranks), members)]
    return lay_out(cluster, parts)


def cost_model(cluster: Cluster, mesh: Mesh, traits: Traits = OURS) -> CostModel:
    """`Calibrated` for devices whose units are known, else `Roofline`; measurements before both."""
    catalogue: CostModel = Calibrated(cluster, mesh, traits)
    if cluster.device.sm_count == 0:
        catalogue = Roofline(cluster, mesh)
    if cluster.calibration is None:
        return catalogue
    return MeasuredCost(cluster, mesh, catalogue, cluster.calibration)
