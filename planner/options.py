"""The candidates of a search: meshes, micro-batches, schedules and ZeRO stages that pins leave.

Input: a workload, a cluster, pins. Output: `Candidate`s, on all devices and, where those can't
share the work, on fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from ir.cluster import Cluster, Mesh
from ir.errors import Refused
from ir.seats import may_rest, shares_cores
from ir.stage_devices import mesh_orders
from planner.approximations import divides_something
from planner.fewer_devices import Shares, fewer_devices, tensor_degrees
from planner.least_costs import LeastCosts
from planner.pins import Candidate, Pins, candidates, meshes, takes_rows, zero_stages
from planner.stage_counts import counts_beside, stage_counts
from planner.workload import Workload

FEW = 16
"""Devices of which any smaller number is looked at."""
SOME_ROWS = 8
"""Of a micro-batch of large layers that computes about as fast as it can."""


@dataclass(frozen=True)
class Options:
    """`has_batch`: some input has rows to divide; `reason`: why the model needs all rows of a step
    at once, if it does."""

    work: Workload
    cluster: Cluster
    pins: Pins
    has_batch: bool
    reason: str | None

    def of(self, found: Sequence[Mesh]) -> Iterator[Candidate]:
        """All candidates of these meshes."""
        for mesh in found:
            yield from self._of_mesh(mesh, stage_counts)

    def beside(self, near: Candidate) -> Iterator[Candidate]:
        """Those of one mesh, number of micro-batches and order of nodes, with more numbers of
        stages."""
        for candidate in self._of_mesh(near.mesh, counts_beside):
            if (candidate.micro_batches, candidate.order) == (near.micro_batches, near.order):
                yield replace(candidate, offload=near.offload)

    def check(self) -> None:
        """`Refused` for pins that this model can't have."""
        pins, calls = self.pins, len(self.work.graph.calls)
        if pins.pipeline and pins.pipeline > calls:
            raise Refused(
                f"more devices than work: pipeline={pins.pipeline} stages need at least one "
                f"block each, and the model has {calls}. Use at most pipeline={calls}."
            )
        why = self.reason or self.work.graph.fixed_batch or "no input has rows to cut"
        if self._is_whole and (pins.micro_batches or 1) > 1:
            raise Refused(f"{why}; plan with micro_batches=1.")
        if self._is_whole and pins.is_interleaved:
            raise Refused(
                "the interleaved schedule needs at least as many micro-batches as pipeline ranks, "
                f"and this model's batch can't be cut: {why}. So a step is one micro-batch. Use "
                "schedule=1f1b."
            )

    def fewer(self, whole: Sequence[Mesh]) -> list[Mesh]:
        """Meshes that leave devices idle."""
        rows = self.work.global_batch if self.has_batch else 1
        degrees = tensor_degrees(self.work.kinds, self.cluster.n_devices)
        shares = Shares(len(self.work.graph.calls), rows, degrees, self._is_usable)
        return fewer_devices(self.cluster, self.pins, whole, shares)

    def fewer_than(self, devices: int, least: LeastCosts, step_s: float) -> list[Mesh]:
        """Meshes of fewer devices that could take less than a step by what they compute: of any
        number up to `FEW`, else of halves. None where the pins say how many, or on a machine that
        was measured as it is, all processes at once."""
        pins = self.pins
        if pins.pipeline and pins.data and pins.tensor:
            return []
        counts = list(range(devices - 1, 0, -1))
        if devices > FEW:
            counts = [devices >> n for n in range(1, devices.bit_length())]
        alone_s = self._alone_s(least)
        return [
            mesh for count in counts if alone_s < count * step_s and may_rest(self.cluster, count)
            for mesh in self.on(count)
        ]

    def _alone_s(self, least: LeastCosts) -> float:
        """Of a step's computation on one device, with few rows or all at once, which makes short
        kernels longer."""
        batch, seconds = self.work.global_batch, []
        for rows in dict.fromkeys((min(batch, SOME_ROWS), batch)):
            alone = Candidate(Mesh(), max(1, batch // rows), "1f1b", rows)
            blocks = zip(self.work.kinds, least.blocks(alone), strict=True)
            each_s = sum(len(kind.calls) * sum(b.node_s.values()) for kind, b in blocks)
            seconds.append(each_s * batch / rows)
        return min(seconds)

    def on(self, devices: int) -> list[Mesh]:
        """The meshes of so many devices that have candidates."""
        return [m for m in meshes(self.pins, devices) if self._is_usable(m)]

    @property
    def _is_whole(self) -> bool:
        """Whether a step is one micro-batch of all rows."""
        return self.reason is not None or not self.has_batch

    def _is_usable(self, mesh: Mesh) -> bool:
        """Whether a mesh has candidates, and its tensor axis something to cut; or else nothing
        stands for the mesh, since all processes of a machine were measured at once."""
        useless = mesh.tensor > 1 and not divides_something(self.work.kinds, mesh.tensor)
        is_kept = self.pins.tensor is not None or shares_cores(self.cluster)
        return any(self.of([mesh])) and (not useless or is_kept)

    def _of_mesh(self, mesh: Mesh, counts: Callable[..., tuple[int, ...]]) -> Iterator[Candidate]:
        calls = len(self.work.graph.calls)
        if mesh.pipeline > calls or (mesh.data > 1 and not self.has_batch):
            return
        virtual = counts(mesh.pipeline, calls, self._longest)
        for candidate in candidates(
            self.pins, mesh, self.work.global_batch, calls, whole_batch=self._is_whole,
            virtual=virtual,
        ):  # fmt: skip
            if not takes_rows(self.work.graph, candidate.rows):
                continue
            for zero in zero_stages(self.pins, candidate):
                for order in mesh_orders(self.cluster, mesh):
                    yield replace(candidate, zero=zero, order=order)

    @property
    def _longest(self) -> int:
        """Of the runs of equal blocks."""
        variants = [self.work.variant_of[n] for n in range(len(self.work.variant_of))]
        return max(len(list(run)) for _, run in groupby(variants))
