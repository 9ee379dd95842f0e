"""Lower bounds and estimates of candidates, without a plan for them.

Input: candidates. Output: `bound_s`, which no plan of the candidate beats, and `guess_s`, the
bound times what sharding was seen to cost at that tensor degree. The bound divides the time of
every node on one device by the tensor degree (but no kernel is shorter than a launch), shares
blocks evenly among stages, and adds the exchange of gradients and the optimizer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from ir.cluster import Cluster, Mesh
from ir.graph import DTYPE_BYTES
from planner.candidate import Workload
from planner.cost import Roofline
from planner.pieces import Pieces
from planner.pins import Candidate
from planner.price import OPTIMIZER_TENSORS
from planner.recompute import MenuPoint
from planner.schedule import in_flight

PRICE_STEPS, SMALLEST_PRICE_S, LARGEST_PRICE_S = 40, 1e-15, 1e-3
"""Bisection of the price of a kept byte."""


@dataclass
class Estimates:
    """Bounds by candidate, and what was learned. `pieces_of` gives the pieces of one device."""

    work: Workload
    cluster: Cluster
    pieces_of: Callable[[Candidate], Pieces]
    ratio: dict[int, float] = field(default_factory=dict)
    known: dict[Candidate, float] = field(default_factory=dict)
    guessed: dict[Candidate, float] = field(default_factory=dict)

    def ranked(self, options: list[Candidate]) -> list[Candidate]:
        """The candidates that may fit, the most promising first."""
        return sorted((c for c in options if self.may_fit(c)), key=self.key)

    def key(self, candidate: Candidate) -> tuple[float, int, int, int]:
        mesh = candidate.mesh
        guess_s = float(f"{self.guess_s(candidate):.6g}")
        return (guess_s, mesh.pipeline, -mesh.data, candidate.micro_batches)

    def guess_s(self, candidate: Candidate) -> float:
        """The bound, the recomputation that memory asks for, and the usual cost of sharding."""
        if candidate not in self.guessed:
            mesh, count = candidate.mesh, candidate.micro_batches
            again_s = self._recompute_s(candidate) * (1 + (count - 1) / mesh.pipeline)
            self.guessed[candidate] = self.bound_s(candidate) + again_s
        return self.guessed[candidate] * self.ratio.get(candidate.mesh.tensor, 1.0)

    def learn(self, candidate: Candidate, step_s: float) -> None:
        """Remembers the least ratio of step to guess at a tensor degree."""
        tensor, guess_s = candidate.mesh.tensor, self.guess_s(candidate)
        ratio = step_s / guess_s * self.ratio.get(tensor, 1.0)
        self.ratio[tensor] = min(self.ratio.get(tensor, ratio), ratio)

    def bound_s(self, candidate: Candidate) -> float:
        if candidate not in self.known:
            self.known[candidate] = self._bound_s(candidate)
        return self.known[candidate]

    def _bound_s(self, candidate: Candidate) -> float:
        mesh = candidate.mesh
        work_s = self._work_s(candidate)
        return (
            work_s + (candidate.micro_batches - 1) * work_s / mesh.pipeline + self._tail_s(mesh)
        )

    def _one_device(self, candidate: Candidate) -> Pieces:
        """The pieces of the same rows without a tensor axis."""
        count = min(candidate.micro_batches, 2)
        return self.pieces_of(Candidate(Mesh(), count, "1f1b", candidate.rows))

    def _work_s(self, candidate: Candidate) -> float:
        tensor, launch_s = candidate.mesh.tensor, self.cluster.device.kernel_launch_s
        found = self._one_device(candidate)
        total = 0.0
        for kind, times in zip(self.work.kinds, found.times, strict=True):
            seconds = (s.compute_s for s in times.of.values())
            total += len(kind.calls) * sum(max(s / tensor, min(s, launch_s)) for s in seconds)
        return total

    def _tail_s(self, mesh: Mesh) -> float:
        """Gradients over the data axis and the update, shared evenly by stages and shards."""
        cost = Roofline(self.cluster, mesh)
        size_bytes = self._parameter_bytes(trainable=True) / (mesh.pipeline * mesh.tensor)
        state_bytes = OPTIMIZER_TENSORS[self.work.optimizer] * size_bytes
        sync_s = cost.collective_s("all_reduce", size_bytes, "data")
        return sync_s + cost.optimizer_s(size_bytes, state_bytes)

    def _parameter_bytes(self, *, trainable: bool) -> int:
        total = 0
        for item in self.work.graph.state:
            if item.trainable or not trainable:
                total += item.type.elements(1) * DTYPE_BYTES[item.type.dtype]
        return total

    def _held_bytes(self, mesh: Mesh) -> float:
        """State of a device when parameters are divided evenly by stages and shards."""
        copies = 1 + OPTIMIZER_TENSORS[self.work.optimizer]
        held = self._parameter_bytes(trainable=False)
        held += copies * self._parameter_bytes(trainable=True)
        return held / (mesh.pipeline * mesh.tensor)

    def _room_bytes(self, candidate: Candidate) -> float:
        """What all stages together can keep of one micro-batch: sum of room / in flight."""
        mesh, count = candidate.mesh, candidate.micro_batches
        menus = self._one_device(candidate).menus
        transient = max(min(p.transient_bytes for p in menu) for menu in menus) / mesh.tensor
        room = Roofline(self.cluster, mesh).capacity_bytes - self._held_bytes(mesh) - transient
        flights = (in_flight(s, mesh.pipeline, count, candidate.schedule)
                   for s in range(mesh.pipeline))  # fmt: skip
        return sum(room / held for held in flights)

    def may_fit(self, candidate: Candidate) -> bool:
        """Whether the state and the least activations, divided evenly, leave room."""
        if self._held_bytes(candidate.mesh) > Roofline(self.cluster, candidate.mesh).capacity_bytes:
            return False
        least, _ = self._cheapest(candidate, LARGEST_PRICE_S)
        return least <= self._room_bytes(candidate)

    def _recompute_s(self, candidate: Candidate) -> float:
        """The least recomputation per micro-batch that makes room: a Lagrangian on kept bytes."""
        room = self._room_bytes(candidate)
        kept, seconds = self._cheapest(candidate, 0.0)
        if kept <= room:
            return 0.0
        low, high = SMALLEST_PRICE_S, LARGEST_PRICE_S
        for _ in range(PRICE_STEPS):
            price = (low * high) ** 0.5
            kept, _ = self._cheapest(candidate, price)
            low, high = (low, price) if kept <= room else (price, high)
        kept, seconds = self._cheapest(candidate, high)
        return max(0.0, seconds + high * (kept - room))

    def _cheapest(self, candidate: Candidate, price_s: float) -> tuple[float, float]:
        """Bytes kept and seconds recomputed of all blocks when a kept byte costs `price_s`."""
        tensor, found = candidate.mesh.tensor, self._one_device(candidate)
        kept = seconds = 0.0
        for number, (kind, menu) in enumerate(zip(self.work.kinds, found.menus, strict=True)):
            sizes = [self._kept_bytes(number, point, found) for point in menu]
            times = [point.backward.total_s for point in menu]
            best = min(range(len(menu)), key=lambda i: times[i] + price_s * sizes[i])  # noqa: B023
            kept += len(kind.calls) * sizes[best] / tensor
            seconds += len(kind.calls) * (times[best] - min(times)) / tensor
        return kept, seconds

    def _kept_bytes(self, number: int, point: MenuPoint, found: Pieces) -> int:
        """Without inputs that several calls share: those are kept once."""
        kind = self.work.kinds[number]
        arguments = self.work.graph.calls[kind.calls[0]].arguments
        values = dict(zip(kind.block.inputs, arguments, strict=True))
        alone = [name for name in point.inputs if self.readers[values[name]] == 1]
        return point.saved_bytes + found.storages[number].bytes_of(alone)

    @cached_property
    def readers(self) -> Counter[str]:
        """How many calls read each value."""
        return Counter(v for call in self.work.graph.calls for v in dict.fromkeys(call.arguments))
