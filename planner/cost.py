"""What an op, a collective, a send and the optimizer step cost, in seconds.

Input: `Work` (shapes, FLOPs, bytes). Output: seconds on one device of a cluster, under a mesh.
`CostModel` is the interface that the planner sees; `Roofline` is the model from rates alone, for
devices of which no more is known (`planner.calibrated` is the one for GPUs).
"""

from dataclasses import dataclass
from math import log2
from typing import Protocol

from ir.cluster import Cluster, Mesh
from planner.links import Groups, axis_groups
from planner.traits import Traits
from planner.work import Work

KINDS = ("matmul", "conv", "attention", "memory", "view", "collective")

# Seconds once per collective, NCCL 2.30.7 src/graph/tuning.cc (base latency, Simple protocol).
_COLLECTIVE_BASE_S = 8.4e-6
# Bandwidth of NCCL's double binary tree relative to its ring, same source.
_TREE_FRACTION = 0.92


class CostModel(Protocol):
    """Seconds per piece of work on one device."""

    @property
    def capacity_bytes(self) -> int:
        """Memory that a plan may fill on one device."""

    @property
    def mesh(self) -> Mesh:
        """The mesh whose axes `collective_s` knows."""

    @property
    def cluster(self) -> Cluster:
        """The devices and their hosts."""

    @property
    def traits(self) -> Traits:
        """How the step is executed."""

    @property
    def sends_meet(self) -> bool:
        """Whether an activation's way and a gradient's way back take the time of one."""

    def compute_s(self, work: Work) -> float:
        """One kernel on the device."""

    def group_s(self, moved_bytes: float) -> float:
        """One fused kernel that reads and writes `moved_bytes` at its boundary."""

    def inner_bytes(self, work: Work) -> tuple[float, float]:
        """Beside operands and results: what is kept for backward, and needed while it runs."""

    def host_s(self, launches: float) -> float:
        """What the host needs to launch that many kernels; 0 where it is never waited for."""

    def accumulate_s(self, gradient_bytes: float, tensors: int, micro_batches: int) -> float:
        """Per micro-batch: adding the gradients of that many tensors to what is there."""

    @property
    def core_sharing(self) -> float:
        """How much faster ranks compute while those of the other pipeline stages wait."""

    def groups(self, axis: str) -> Groups:
        """How the groups of an axis lie on the cluster."""

    def collective_s(self, op: str, size_bytes: float, axis: str) -> float:
        """One collective over a group of `axis`.

        `size_bytes`: the whole (gathered) tensor for all_reduce, all_gather and reduce_scatter;
        this rank's tensor for all_to_all. 0 for what moves nothing (shard, first, an axis of 1).
        """

    def send_s(self, size_bytes: float, stage: int | None = None) -> float:
        """From pipeline stage `stage` to the next one; the slowest such pair if None."""

    def announce_s(self, scalars: int) -> float:
        """Once per step: the loss and metrics, summed over data ranks and told to all stages."""

    def optimizer_s(self, parameter_bytes: float, state_bytes: float) -> float:
        """The step's update of `parameter_bytes` with `state_bytes` of optimizer state."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """max(FLOPs / reachable peak, bytes / reachable bandwidth), and alpha-beta collectives.

    Kernels: Williams et al., "Roofline", CACM 2009, with the reachable fractions of `ir.device`,
    and never less than a launch: kernels that are shorter than it wait for the host.
    """

    cluster: Cluster
    mesh: Mesh

    @property
    def capacity_bytes(self) -> int:
        """Memory of a device less its reserve."""
        return self.cluster.device.usable_bytes

    @property
    def traits(self) -> Traits:
        """The defaults: nothing is fused or overlapped."""
        return Traits()

    @property
    def sends_meet(self) -> bool:
        """No: processes of one machine share its memory."""
        return False

    def compute_s(self, work: Work) -> float:
        """Seconds of one kernel. Views are free; a collective's time is `collective_s`."""
        device = self.cluster.device
        peak = device.peak_flops_per_s(work.dtype)
        match work.kind:
            case "view" | "collective":
                return 0.0
            case "matmul" | "conv":
                flops_per_s = peak * device.matmul_fraction
            case "attention":
                flops_per_s = peak * device.attention_fraction
            case "memory":  # elementwise and reductions compute in float32 units
                flops_per_s = device.peak_flops_per_s("float32")
            case _:
                raise ValueError(f"unknown kind of work {work.kind!r}; known: {', '.join(KINDS)}")
        memory_s = work.moved_bytes / device.sustained_bandwidth_bytes_per_s
        return max(work.flops / flops_per_s, memory_s, device.kernel_launch_s)

    def group_s(self, moved_bytes: float) -> float:
        """As one memory-bound kernel."""
        return self.compute_s(Work("memory", 0.0, moved_bytes, "float32"))

    def inner_bytes(self, work: Work) -> tuple[float, float]:
        """None: kernels are taken as fused."""
        return 0.0, 0.0

    def host_s(self, launches: float) -> float:
        """Each kernel has the host's time in it already."""
        return 0.0

    def accumulate_s(self, gradient_bytes: float, tensors: int, micro_batches: int) -> float:
        """Left out: it is the same for all plans."""
        return 0.0

    @property
    def core_sharing(self) -> float:
        """Unknown without a measurement: ranks are taken as independent."""
        return 1.0

    def groups(self, axis: str) -> Groups:
        """By the mesh."""
        return axis_groups(self.cluster, self.mesh, axis)

    def collective_s(self, op: str, size_bytes: float, axis: str) -> float:
        """Seconds of one collective.

        With n members, S bytes, ring bandwidth B and step latency a of `Mesh.axis_link`, and the
        factors of NVIDIA/nccl-tests doc/PERFORMANCE.md:

            all_gather, reduce_scatter:  base + (n-1) a + S (n-1)/n / B
            all_reduce:                  base + 2(n-1) a + 2 S (n-1)/n / B, or a tree if faster
            all_to_all:                  base + (n-1) a + the slowest level's share of S
        """
        n = self.mesh.degree(axis)
        if n == 1 or op in ("shard", "first"):
            return 0.0
        link = self.mesh.axis_link(self.cluster, axis)
        latency_s = (n - 1) * link.latency_s
        ring_s = size_bytes * (n - 1) / n / link.bandwidth_bytes_per_s
        match op:
            case "all_gather" | "reduce_scatter":
                return _COLLECTIVE_BASE_S + latency_s + ring_s
            case "all_reduce":
                return _COLLECTIVE_BASE_S + min(
                    2 * (latency_s + ring_s), self._tree_s(size_bytes, axis)
                )
            case "all_to_all":
                return _COLLECTIVE_BASE_S + latency_s + self._exchange_s(size_bytes, axis)
        raise ValueError(f"unknown collective {op!r}")

    def _tree_s(self, size_bytes: float, axis: str) -> float:
        """All-reduce up and down a tree: a chain within a unit, log2(units) steps across units.

        NCCL 2.30.7 src/graph/tuning.cc: 2 ((m-1) a_inside + log2(n/m) a_across), 2 S / (0.92 B).
        """
        link = self.mesh.axis_link(self.cluster, axis)
        spread = self.mesh.spread(self.cluster, axis)
        latency_s = (spread[0] - 1) * self.cluster.levels[0].link.latency_s
        for level, inside, shared in zip(self.cluster.levels[1:], spread, spread[1:], strict=False):
            latency_s += log2(shared / inside) * level.link.latency_s
        return 2 * (latency_s + size_bytes / (_TREE_FRACTION * link.bandwidth_bytes_per_s))

    def _exchange_s(self, size_bytes: float, axis: str) -> float:
        """All-to-all: each pair has its own 1/n of S; what crosses a level uses one port of it."""
        n, inside, slowest_s = self.mesh.degree(axis), 1, 0.0
        spread = self.mesh.spread(self.cluster, axis)
        for level, shared in zip(self.cluster.levels, spread, strict=True):
            rate = level.link.sustained_bytes_per_s
            if level.link.point_to_point:
                rate *= max(1, shared - inside) / (level.size - 1) if level.size > 1 else 1
            slowest_s = max(slowest_s, size_bytes * (shared - inside) / n / rate)
            inside = shared
        return slowest_s

    def send_s(self, size_bytes: float, stage: int | None = None) -> float:
        """base + a + S / B over the link between neighbouring stages; 0 without a pipeline."""
        stages = range(self.mesh.pipeline - 1) if stage is None else (stage,)
        links = [self.mesh.neighbour_link(self.cluster, s) for s in stages]
        seconds = [size_bytes / k.bandwidth_bytes_per_s + k.latency_s for k in links]
        return _COLLECTIVE_BASE_S + max(seconds) if seconds else 0.0

    def announce_s(self, scalars: int) -> float:
        """Left out: it is the same for all plans of a mesh."""
        return 0.0

    def optimizer_s(self, parameter_bytes: float, state_bytes: float) -> float:
        """Memory-bound: read the gradient, read and write the parameter and the state."""
        return self.group_s(3 * parameter_bytes + 2 * state_bytes)
