"""The cost model of a machine that was measured (`shardwright calibrate`).

Input: a cluster with a calibration, and the cost model of its catalogue entry. Output: seconds by
interpolation in the measured curves; what was not measured, or was too noisy, by the catalogue.
A kernel's curve is the time of the whole call, so the host's time to launch it is part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ir.calibration import Calibration, Collective, Timings
from ir.cluster import Cluster, Mesh
from ir.graph import DTYPE_BYTES
from planner.cost import CostModel
from planner.links import Groups, neighbours
from planner.measured import Measured, measured_s
from planner.traits import Traits
from planner.work import Work

KERNEL_OF: Mapping[str, str] = {
    "exp.default": "exp", "log.default": "exp", "sin.default": "exp", "cos.default": "exp",
    "erf.default": "exp", "sigmoid.default": "silu", "softplus.default": "exp",
    "tanh.default": "tanh", "silu.default": "silu", "silu_backward.default": "silu",
    "gelu.default": "gelu", "gelu_backward.default": "gelu",
    "_softmax.default": "exp", "_log_softmax.default": "exp",
    "sum": "reduce", "amax.default": "reduce", "amin.default": "reduce", "max.dim": "reduce",
    "min.dim": "reduce", "argmax.default": "reduce", "linalg_vector_norm.default": "reduce",
    "view": "copy", "expand": "copy", "permute": "copy", "slice_backward.default": "copy",
    "select_backward.default": "copy", "cat.default": "cat",
    "embedding.default": "gather", "index.Tensor": "gather",
    "embedding_dense_backward.default": "scatter", "index_put.default": "scatter",
    "normalize": "normalize", "normalize_backward": "normalize_backward",
    "cross_entropy": "cross_entropy", "cross_entropy_backward": "cross_entropy_backward",
}  # fmt: skip
"""The measured kernel that stands for a memory-bound op; "elementwise" for those not listed."""
SCORE_BYTES = DTYPE_BYTES["float32"]
ACCUMULATE_PASSES = 3.0
"""Read the sum and the new gradient, write the sum."""
SCALAR_BYTES, ROW_BYTES = DTYPE_BYTES["float32"], DTYPE_BYTES["float64"]
"""Of a loss or metric, and of its place in the row that the stages exchange."""


@dataclass(frozen=True)
class MeasuredCost:
    """`catalogue` prices what the calibration does not hold; its name is added to `missing`, where
    that is given and it costs anything."""

    cluster: Cluster
    mesh: Mesh
    catalogue: CostModel
    calibration: Calibration
    missing: set[str] | None = field(default=None, compare=False)

    @property
    def capacity_bytes(self) -> int:
        """Memory of a device less its reserve."""
        return self.catalogue.capacity_bytes

    @property
    def traits(self) -> Traits:
        """The catalogue's."""
        return self.catalogue.traits

    @property
    def sends_meet(self) -> bool:
        """A measured send is from hand to hand: the receiver waits for it, the sender doesn't."""
        return self._collective("send", self._pair) is not None or self.catalogue.sends_meet

    @property
    def core_sharing(self) -> float:
        """Ranks per core when all compute, over those when one pipeline stage does; at least 1."""
        cores = self.calibration.cores
        if not cores:
            return 1.0
        ranks = self.mesh.size
        return max(1.0, ranks / cores) / max(1.0, ranks / self.mesh.pipeline / cores)

    @cached_property
    def _timings(self) -> Timings:
        """Of our own programs' kernels; another stack's are its own."""
        known = self.calibration.timings
        return known[0] if known and self._is_ours else Timings(1, 1)

    @property
    def _is_ours(self) -> bool:
        traits = self.traits
        return not traits.fused_elementwise and traits.matmul_precision == ""

    def compute_s(self, work: Work) -> float:
        """The measured call of that kind and size."""
        found = self._kernel_s(work)
        if found is not None:
            return found
        return self._unmeasured(_kernel_name(work), self.catalogue.compute_s(work))

    def _unmeasured(self, name: str, seconds: float) -> float:
        """The catalogue's seconds, which are noted."""
        if self.missing is not None and seconds:
            self.missing.add(name)
        return seconds

    def _kernel_s(self, work: Work) -> float | None:
        match work.kind:
            case "collective":
                return 0.0
            case "view":
                return self._timings.kernel_s("view", 1.0)
            case "matmul" if work.product is not None:
                return self._timings.product_s(work.dtype, *work.product)
            case "attention" if work.attention is not None:
                shape = work.attention
                scores = shape.batch * shape.heads * shape.queries * shape.keys
                name = "attention_backward" if work.backward else "attention"
                return self._timings.attention_s(name, SCORE_BYTES * scores, shape.head_dim)
            case "memory":
                kernel = KERNEL_OF.get(work.op, "elementwise")
                size_bytes = work.touched_bytes if kernel == "gather" else work.moved_bytes
                return self._timings.kernel_s(kernel, size_bytes)
        return None

    def group_s(self, moved_bytes: float) -> float:
        """As one elementwise kernel."""
        found = self._timings.kernel_s("elementwise", moved_bytes)
        if found is not None:
            return found
        return self._unmeasured("elementwise", self.catalogue.group_s(moved_bytes))

    def inner_bytes(self, work: Work) -> tuple[float, float]:
        """The catalogue's."""
        return self.catalogue.inner_bytes(work)

    def host_s(self, launches: float) -> float:
        """Nothing where the kernels were measured: their calls include it."""
        return 0.0 if self._timings.kernels else self.catalogue.host_s(launches)

    def accumulate_s(self, gradient_bytes: float, tensors: int, micro_batches: int) -> float:
        """Programs add every micro-batch's gradients, one tensor after the other."""
        each = ACCUMULATE_PASSES * gradient_bytes / max(1, tensors)
        found = self._timings.kernel_s("elementwise", each)
        if found is None:
            return self.catalogue.accumulate_s(gradient_bytes, tensors, micro_batches)
        return tensors * found

    def collective_s(self, op: str, size_bytes: float, axis: str) -> float:
        """Measured in groups that lie as this axis's do; pieces of a whole are copies."""
        if op in ("shard", "first"):
            is_view = axis == "data" or self.mesh.degree(axis) == 1
            copied = self._timings.kernel_s("elementwise", size_bytes)
            return 0.0 if is_view or copied is None else copied
        groups = self.catalogue.groups(axis)
        found = self._collective(op, groups)
        if found is None or groups.members == 1:
            catalogue_s = self.catalogue.collective_s(op, size_bytes, axis)
            return self._unmeasured(f"{op} of {groups.members} ranks", catalogue_s)
        points = tuple(zip(found.curve.sizes, found.curve.seconds, strict=True))
        measured = Measured(op, found.members, found.members_near, points)
        return measured_s((measured,), groups, op, size_bytes)

    def groups(self, axis: str) -> Groups:
        """The catalogue's."""
        return self.catalogue.groups(axis)

    def _collective(self, op: str, groups: Groups | None) -> Collective | None:
        if groups is None:
            return None
        place = (op, groups.members, groups.members_near)
        for found in self.calibration.collectives:
            if (found.op, found.members, found.members_near) == place:
                return found
        return None

    @property
    def _pair(self) -> Groups | None:
        """The first two stages' neighbours; None without a pipeline."""
        return neighbours(self.cluster, self.mesh, 0) if self.mesh.pipeline > 1 else None

    def send_s(self, size_bytes: float, stage: int | None = None) -> float:
        """Measured between neighbours that lie as these stages do."""
        stages = range(self.mesh.pipeline - 1) if stage is None else (stage,)
        return max((self._send_s(size_bytes, s) for s in stages), default=0.0)

    def _send_s(self, size_bytes: float, stage: int) -> float:
        found = self._collective("send", neighbours(self.cluster, self.mesh, stage))
        if found:
            return found.curve.at(size_bytes)
        return self._unmeasured("send", self.catalogue.send_s(size_bytes, stage))

    def announce_s(self, scalars: int) -> float:
        """A sum over the data axis of each, and a row of all gathered over the pipeline, as
        `runtime.results` does it: messages so short that only their latency counts."""
        summed_s = self.collective_s("all_reduce", SCALAR_BYTES, "data")
        row_bytes = ROW_BYTES * scalars * self.mesh.pipeline
        return scalars * summed_s + self.collective_s("all_gather", row_bytes, "pipeline")

    def optimizer_s(self, parameter_bytes: float, state_bytes: float) -> float:
        """The measured update of one parameter, with clearing and storing its gradient."""
        name = "adamw" if state_bytes else "sgd"
        found = self._timings.kernel_s(name, parameter_bytes)
        if found is not None:
            return found
        return self._unmeasured(name, self.catalogue.optimizer_s(parameter_bytes, state_bytes))


def _kernel_name(work: Work) -> str:
    """For a person; as a calibration calls it, where that has curves of the kind."""
    match work.kind:
        case "memory":
            return KERNEL_OF.get(work.op, "elementwise")
        case "attention" if work.backward:
            return "attention_backward"
        case "matmul":
            return f"products in {work.dtype}"
        case "conv":
            return f"convolutions in {work.dtype}"
    return work.kind
