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
from ir.seats import seated
from planner.attention_time import UNFUSED, attention_s
from planner.collectives import collective_s, send_s
from planner.cost import KINDS, CostModel, Roofline
from planner.kernels import launch_bound_s, matmul_s, memory_s
from planner.links import Groups, axis_groups, lay_out
from planner.measured_cost import MeasuredCost
from planner.quantise import SCALINGS, quantise_bytes
from planner.traits import Traits
from planner.work import Work

OURS = Traits(eager=True, attention="unfused")
"""Emitted programs: torch's kernels one by one, attention by products and a softmax over all
scores (`runtime.ops.attention`), exchanges after backward."""

FOREACH_PASSES = 20 / 7
"""Tensors that torch's foreach AdamW reads and writes (weight decay 2, moments 3 + 5, root and
epsilon 6, update 4), over the seven of its fused kernel (read g, p, m, v; write p, m, v)."""
CLIP_PASSES, UNSCALE_PASSES = 3.0, 4.5
"""Over gradients in float32: a norm reads them, a scale reads and writes; a scaled loss has them
copied from 16 bits and divided, each a read and a write (Megatron-LM's mixed precision optimizer,
megatron/optimizer/optimizer.py), and the new parameters copied back."""
ACCUMULATED_PASSES, FUSED_PASSES, CAST_PASSES = 3.0, 2.0, 4.5
"""Read the sum and the new gradient, write the sum; products that add to the sum write it alone.
A gradient that stays in 16 bits is cast first: half a pass to read it, one to write the copy."""
WAITED_OP_S = 74e-6
"""What the host does between two counted kernels where it waits for each: Python, autograd, random
states, kernels that are not counted (biases, copies), launch, waking. From two steps that differ in
CUDA_LAUNCH_BLOCKING alone (bigscience, train/tr11-176B-ml/chronicles-prequel.md: 80 A100, 91.04 and
97.20 TFLOP/s): 14.5 s over 197,000 kernels."""
LOW_PRECISIONS = ("float8_e4m3fn", "mxfp8", "nvfp4")
LOGIT_COPIES = 2
"""Tensors like the logits that cross-entropy has at its peak beside them and their gradient:
`runtime.ops.cross_entropy` a copy and its exponentials, torch's their logarithms and gradient."""


@dataclass(frozen=True, slots=True)
class Paces:
    """Pace of matrix products within a long training step over that of the best benchmark of the
    same shape: the power limit is shared with memory traffic and neighbours, operands are not warm,
    and layouts are not the fastest.

    `usual`: 16 bits, and wider; `hopper`: 16 bits on Hopper, whose units meet their power limit
    first; `low`: 8 and 4 bits. Fitted on benchmarks/data by benchmarks/fitted.py.
    """

    usual: float = 0.71
    hopper: float = 0.67
    low: float = 0.77

    def of(self, arch: str, precision: str) -> float:
        """By architecture and width of the operands."""
        if precision in LOW_PRECISIONS:
            return self.low
        return self.hopper if arch == "Hopper" else self.usual


PACES = Paces()


@dataclass(frozen=True)
class Calibrated:
    """Seconds by shape; `Traits` say which kernels, what is fused, and who waits for the host."""

    cluster: Cluster
    mesh: Mesh
    traits: Traits = OURS
    paces: Paces = PACES

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
                    pace=self._pace(work.dtype),
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
        return (self.traits.fused_elementwise or self.traits.fused_loss) and not (
            self.traits.eager_loss
        )

    def _product_s(self, work: Work) -> float:
        """By `kernels`, at the pace that a long step sustains."""
        pace = self._pace(self._precision_of(work))
        return self._benchmark_s(work) / pace + self._quantise_s(work)

    def _pace(self, precision: str) -> float:
        device = self.cluster.device
        return self.paces.of(device.arch, precision) * device.power_pace

    def _precision_of(self, work: Work) -> str:
        """What a product computes in: the traits' precision where its 16-element alignment allows,
        but for the logits."""
        assert work.product is not None
        batch, m, n, k = work.product
        low = self.traits.matmul_precision
        if low == "tf32":
            return low if work.dtype == "float32" else work.dtype
        if not low or work.keeps_precision or batch > 1 or m % 16 or n % 16 or k % 16:
            return work.dtype
        return low

    def _benchmark_s(self, work: Work) -> float:
        """The product alone."""
        assert work.product is not None
        batch, m, n, k = work.product
        low, device = self._precision_of(work), self.cluster.device
        if low not in LOW_PRECISIONS:
            return matmul_s(device, m, n, k, low, batch)
        return matmul_s(device, m, n, k, low) / SCALINGS[self.traits.scaling].pace

    def _quantise_s(self, work: Work) -> float:
        """The passes over a product's operands."""
        assert work.product is not None
        if self._precision_of(work) not in LOW_PRECISIONS:
            return 0.0
        _, m, n, k = work.product
        scaling, fused = self.traits.scaling, self.traits.fused_elementwise
        moved = quantise_bytes(scaling, m * k + k * n, fused=fused)
        return memory_s(
            self.cluster.device, moved, kernels=0 if fused else SCALINGS[scaling].kernels
        )

    def group_s(self, moved_bytes: float) -> float:
        """One kernel at memory's pace."""
        return memory_s(self.cluster.device, moved_bytes)

    def inner_bytes(self, work: Work) -> tuple[float, float]:
        """The scores of unfused attention, with dropout their mask (a byte each) and what it left
        too (Korthikanti et al. 2022); copies of logits in an unfused cross-entropy."""
        if work.attention is not None and self._attention in UNFUSED:
            shape = work.attention
            scores = shape.batch * shape.heads * shape.queries * shape.keys
            size_bytes = float(scores * DTYPE_BYTES[work.dtype])
            dropped = size_bytes + scores if self.traits.dropout else 0.0
            return (0.0 if work.backward else size_bytes + dropped), size_bytes
        if work.logits and not self._fuses_loss:
            copies = LOGIT_COPIES
            if self.traits.memory.whole_logits:
                # these, the logits and their gradient of all ranks; one rank's are values
                copies = (LOGIT_COPIES + 2) * self.mesh.tensor - 2
            return 0.0, float(copies * DTYPE_BYTES[work.dtype] * work.logits)
        return 0.0, 0.0

    def host_s(self, launches: float) -> float:
        """The host's time of a run of kernels; 0 unless it launches them one by one (`eager`).

        Where it waits for each (`blocking`) none of what it does in between is hidden.
        """
        if not self.traits.eager:
            return 0.0
        if self.traits.blocking:
            return launches * WAITED_OP_S
        return launch_bound_s(launches, self.cluster.device)

    @property
    def core_sharing(self) -> float:
        """A GPU is not shared."""
        return 1.0

    def accumulate_s(self, gradient_bytes: float, tensors: int, micro_batches: int) -> float:
        """Where there are several: passes over the sum and the new gradient, or over the sum alone
        in fused products."""
        if micro_batches == 1:
            return 0.0
        passes = FUSED_PASSES if self.traits.fused_accumulation else ACCUMULATED_PASSES
        if self.traits.memory.keeps_gradients:
            passes = CAST_PASSES
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

    def announce_s(self, scalars: int) -> float:
        """Left out: GPUs read the loss back after the step, while the next one runs."""
        return 0.0

    def optimizer_s(self, parameter_bytes: float, state_bytes: float) -> float:
        """Read the gradient, read and write the parameter and the state; more when not fused, and
        what clipping and a scaled loss read and write before."""
        traits = self.traits
        passes = 1.0 if traits.fused_optimizer else FOREACH_PASSES
        moved = passes * (3 * parameter_bytes + 2 * state_bytes)
        wide = 2 * parameter_bytes if traits.master_weights else parameter_bytes
        moved += wide * (CLIP_PASSES * traits.clips + UNSCALE_PASSES * traits.scales_loss)
        return memory_s(self.cluster.device, moved, kernels=0)


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


def cost_model(
    cluster: Cluster, mesh: Mesh, traits: Traits = OURS, paces: Paces = PACES
) -> CostModel:
    """`Calibrated` for devices whose units are known, else `Roofline`; measurements before both. A
    mesh with fewer ranks than there are devices lies as `ir.seats` says."""
    if mesh.size < cluster.n_devices:
        cluster = seated(cluster, mesh.size)
    catalogue: CostModel = Calibrated(cluster, mesh, traits, paces)
    if cluster.device.sm_count == 0:
        catalogue = Roofline(cluster, mesh)
    if cluster.calibration is None:
        return catalogue
    return MeasuredCost(cluster, mesh, catalogue, cluster.calibration)
