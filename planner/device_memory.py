"""What a device holds at its peak, and what the tools that people read memory with show of it.

Input: an `Evaluated` configuration and its cost model. Output: bytes of the fullest stage, exactly
and as a reading. A step has two peaks, neither of which has the other's values: activations in the
last forward and first backward, and the optimizer's copies (`planner.memory_traits`).
torch's allocator keeps what is freed: big copies fit no block that activations left, so both
are reserved at once, until memory is short and unused blocks are given back.
"""

from __future__ import annotations

from ir.cluster import GIB, Mesh
from ir.predicted import StageCost
from ir.spmd import Spmd
from planner.candidate import Evaluated
from planner.cost import CostModel
from planner.exchange import zero_members

FRAGMENTATION = 0.04
"""Of torch's caching allocator, as in the reserve of `ir.device`."""
CONTEXT_BYTES = 1.4 * GIB
"""CUDA context, NCCL's channels of one group, library workspaces; same source."""
COMMUNICATORS_BYTES = 1.5 * GIB
"""NCCL's channels of the groups that each further axis of the mesh adds. Fitted on readings of
whole A100 in the pipelines of Megatron-DeepSpeed, where both make their own groups."""


class DeviceMemory:
    """Of every stage of a configuration."""

    def __init__(self, evaluated: Evaluated, cost: CostModel) -> None:
        self._prediction, self._cost = evaluated.prediction, cost
        update, members = cost.traits.memory.update, zero_members(cost)
        sizes = [
            _trainable_elements(evaluated.program, number)
            for number in range(len(self._prediction.stages))
        ]
        self._cached = [update.cached_bytes(of_stage, members) for of_stage in sizes]
        lives = (update.live_bytes(of_stage, members) for of_stage in sizes)
        self._peaks = [
            _state_bytes(stage) + max(_activation_bytes(stage), live)
            for stage, live in zip(self._prediction.stages, lives, strict=True)
        ]

    @property
    def fits(self) -> bool:
        """Whether every stage has room for its peak."""
        capacity_of = self._prediction.capacity_of
        return all(peak <= capacity_of(rank) for rank, peak in enumerate(self._peaks))

    def reading_bytes(self, kind: str) -> dict[str, float]:
        """What a tool shows of the fullest stage, by what holds it: torch's "allocated" or
        "reserved", else the use of the whole device."""
        peak, cost = max(self._peaks), self._cost
        parts: dict[str, float] = {"tensors": peak}
        if kind == "allocated":
            return parts
        is_planned = cost.traits.memory.is_planned
        if not is_planned:
            cached = max(
                _state_bytes(stage) + _activation_bytes(stage) + held
                for stage, held in zip(self._prediction.stages, self._cached, strict=True)
            )
            reserved = max(peak, min(cached, cost.capacity_bytes)) * (1 + FRAGMENTATION)
            parts["allocator"] = reserved - peak
        if kind != "reserved":
            parts["context"] = CONTEXT_BYTES
            if not is_planned:
                parts["communicators"] = COMMUNICATORS_BYTES * max(0, _axes(cost.mesh) - 1)
        return parts


def _axes(mesh: Mesh) -> int:
    return sum(degree > 1 for degree in (mesh.pipeline, mesh.data, mesh.tensor))


def _state_bytes(stage: StageCost) -> int:
    return stage.parameter_bytes + stage.gradient_bytes + stage.optimizer_bytes


def _activation_bytes(stage: StageCost) -> int:
    return stage.saved_bytes + stage.transient_bytes


def _trainable_elements(program: Spmd, stage: int) -> list[int]:
    """Elements per device of each parameter that a stage updates."""
    names = {v for placed in program.stages[stage] for v in program.call(placed).arguments}
    state = program.state_of
    return [
        program.state_type(name).elements(1)
        for name in state if name in names and state[name].trainable
    ]  # fmt: skip
