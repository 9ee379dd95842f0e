"""Lower bounds and estimates of candidates, without a plan for them.

Input: candidates. Output: `bound_s`, which no plan of the candidate beats, and `guess_s`, the
bound times what sharding was seen to cost at that tensor degree. The bound divides the time of
every node on one device by the tensor degree (but no kernel is shorter than a launch), shares
blocks evenly among stages, and adds the exchange of gradients and the optimizer. Recomputation
that memory asks for is part of the bound where nothing else is decided (one stage, no tensor
axis), and of the guess everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from math import ceil

from ir.cluster import Cluster, Mesh
from ir.graph import DTYPE_BYTES
from ir.recompute import state_inputs
from ir.schedules import splits_backward
from ir.split import split_backward
from planner.calibrated import cost_model
from planner.candidate import Workload
from planner.pieces import Pieces
from planner.pins import Candidate
from planner.price import OPTIMIZER_TENSORS
from planner.recompute import MenuPoint
from planner.schedule import held_pieces, least_step_s

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
    guessed: dict[tuple[Candidate, float], float] = field(default_factory=dict)
    shares: dict[tuple[int, int], list[tuple[int, float]]] = field(default_factory=dict)
    options: dict[int, list[tuple[int, list[tuple[int, float]]]]] = field(default_factory=dict)
    singles: dict[int, Pieces] = field(default_factory=dict)
    weights: dict[int, float] = field(default_factory=dict)

    def ranked(self, options: list[Candidate]) -> list[Candidate]:
        """The candidates that may fit, the most promising first.

        Where no candidate with so many rows fits, more rows do not either.
        """
        found: list[Candidate] = []
        for _, group in groupby(sorted(options, key=lambda c: c.rows), key=lambda c: c.rows):
            fitting = [c for c in group if self.may_fit(c)]
            if not fitting and found:
                break
            found += fitting
        return sorted(found, key=self.key)

    def key(self, candidate: Candidate) -> tuple[float, int, int, int]:
        mesh = candidate.mesh
        guess_s = float(f"{self.guess_s(candidate):.6g}")
        return (guess_s, mesh.pipeline, -mesh.data, candidate.micro_batches)

    def guess_s(self, candidate: Candidate) -> float:
        """The bound, with the recomputation that memory asks for, sends and the cost of sharding.
        """
        tensor = candidate.mesh.tensor
        ratio = self.ratio.get(tensor, 1.0)
        if (candidate, ratio) not in self.guessed:
            again_s = self._recompute_s(candidate)
            sends = self._sends_s(candidate)
            guess_s = self._pipeline_s(candidate, ratio, again_s, sends)
            guess_s += self._tail_s(candidate.mesh)
            self.guessed[candidate, ratio] = guess_s
        return self.guessed[candidate, ratio]

    def learn(self, candidate: Candidate, found: Pieces) -> None:
        """Remembers how much longer blocks take than their even share, at a tensor degree."""
        actual_s = 0.0
        for kind, menu in zip(self.work.kinds, found.menus, strict=True):
            seconds = min(p.forward.total_s + p.backward.total_s for p in menu)
            actual_s += len(kind.calls) * seconds
        ratio = actual_s / sum(n * seconds for n, seconds in self._shares_s(candidate))
        tensor = candidate.mesh.tensor
        self.ratio[tensor] = min(self.ratio.get(tensor, ratio), ratio)

    def bound_s(self, candidate: Candidate) -> float:
        if candidate not in self.known:
            self.known[candidate] = self._bound_s(candidate)
        return self.known[candidate]

    def _bound_s(self, candidate: Candidate) -> float:
        mesh = candidate.mesh
        alone = mesh.pipeline == mesh.tensor == 1
        again_s = self._recompute_s(candidate) if alone else 0.0
        return self._pipeline_s(candidate, 1.0, again_s) + self._tail_s(mesh)

    def _pipeline_s(
        self, candidate: Candidate, ratio: float, again_s: float,
        sends: tuple[float, float] = (0.0, 0.0),
    ) -> float:  # fmt: skip
        """Fill and pace: some rank has an even share of all, and of the calls of each kind.

        `sends`: seconds that the pace and the fill spend on them.
        """
        stages, shares = candidate.mesh.pipeline, self._shares_s(candidate)
        total_s = sum(n * seconds for n, seconds in shares)
        pace_s = max(total_s / stages, *(ceil(n / stages) * seconds for n, seconds in shares))
        fill_s, pace_s = total_s * ratio + again_s, pace_s * ratio + again_s / stages
        fill_s, pace_s = fill_s + sends[1], pace_s + sends[0]
        share = self._weight_share(candidate) if splits_backward(candidate.schedule) else 0.0
        return least_step_s(
            pace_s, fill_s, candidate.micro_batches, candidate.schedule, stages,
            candidate.virtual_stages, share,
        )  # fmt: skip

    def _sends_s(self, candidate: Candidate) -> tuple[float, float]:
        """What of a micro-batch a rank, and the whole pipeline, spend on sends of what crosses in
        the middle of the model, there and back."""
        mesh, stages = candidate.mesh, candidate.stages
        if mesh.pipeline == 1:
            return 0.0, 0.0
        cost = cost_model(self.cluster, mesh)
        found, calls = self._one_device(candidate), self.work.graph.calls
        middle, seconds = len(calls) // 2, 0.0
        read = {value for call in calls[middle:] for value in call.arguments}
        for index, call in enumerate(calls[:middle]):
            lowered = found.lowered[self.work.variant_of[index]]
            for value, name in zip(call.results, lowered.outputs, strict=True):
                if value in read:
                    seconds += cost.send_s(lowered.types[name].bytes(1))
        sides = 2 if cost.sends_meet else 4
        ends = min(stages - 1, 2 * candidate.virtual_stages) / 2  # boundaries of a rank, shared
        return sides * ends * seconds, sides * (stages - 1) * seconds

    def _weight_share(self, candidate: Candidate) -> float:
        """The part of a micro-batch that is the weights' half of backward, on one device."""
        if candidate.rows not in self.weights:
            graph, found = self.work.graph, self._one_device(candidate)
            state = {item.name for item in graph.state}
            weights_s = total_s = 0.0
            for number, kind in enumerate(self.work.kinds):
                always = state_inputs(
                    found.lowered[number], graph.calls[kind.calls[0]].arguments, state
                )
                fastest = min(found.menus[number], key=lambda p: p.backward.total_s)
                split = split_backward(found.lowered[number], fastest.kept, always)
                late = found.times[number].total(split.weight).total_s
                weights_s += len(kind.calls) * late
                total_s += len(kind.calls) * (fastest.forward + fastest.backward).total_s
            self.weights[candidate.rows] = weights_s / total_s if total_s else 0.0
        return self.weights[candidate.rows]

    def _one_device(self, candidate: Candidate) -> Pieces:
        """The pieces of the same rows without a tensor axis."""
        if candidate.rows not in self.singles:
            alone = Candidate(Mesh(), 1, "1f1b", candidate.rows)
            self.singles[candidate.rows] = self.pieces_of(alone)
        return self.singles[candidate.rows]

    def _shares_s(self, candidate: Candidate) -> list[tuple[int, float]]:
        """Per variant its calls, and the seconds of one when the tensor axis divides it evenly."""
        tensor, launch_s = candidate.mesh.tensor, self.cluster.device.kernel_launch_s
        if (candidate.rows, tensor) not in self.shares:
            self.shares[candidate.rows, tensor] = [
                (len(kind.calls), sum(
                    max(s.compute_s / tensor, min(s.compute_s, launch_s))
                    for s in times.of.values()
                ))
                for kind, times in zip(
                    self.work.kinds, self._one_device(candidate).times, strict=True
                )
            ]  # fmt: skip
        return self.shares[candidate.rows, tensor]

    def _tail_s(self, mesh: Mesh) -> float:
        """Gradients over the data axis and the update, shared evenly by stages and shards."""
        cost = cost_model(self.cluster, mesh)
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

    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer state, once."""
        copies = 1 + OPTIMIZER_TENSORS[self.work.optimizer]
        held = self._parameter_bytes(trainable=False)
        return held + copies * self._parameter_bytes(trainable=True)

    def _held_bytes(self, mesh: Mesh) -> float:
        """State of a device when it is divided evenly by stages and shards."""
        return self.state_bytes() / (mesh.pipeline * mesh.tensor)

    def need_bytes(self, candidate: Candidate) -> float:
        """State and activations of a device, divided evenly, with everything recomputed."""
        mesh, stages = candidate.mesh, candidate.mesh.pipeline
        held = _held(candidate, 0)
        kept, _ = self._cheapest(candidate, LARGEST_PRICE_S)
        return self._held_bytes(mesh) + self._transient_bytes(candidate) + held * kept / stages

    def _transient_bytes(self, candidate: Candidate) -> float:
        menus = self._one_device(candidate).menus
        return max(min(p.transient_bytes for p in menu) for menu in menus) / candidate.mesh.tensor

    def _room_bytes(self, candidate: Candidate) -> float:
        """What all stages together can keep of one micro-batch: sum of room / in flight."""
        mesh = candidate.mesh
        room = cost_model(self.cluster, mesh).capacity_bytes - self._held_bytes(mesh)
        room -= self._transient_bytes(candidate)
        return sum(room / _held(candidate, rank) for rank in range(mesh.pipeline))

    def may_fit(self, candidate: Candidate) -> bool:
        """Whether the state and the least activations, divided evenly, leave room."""
        room = cost_model(self.cluster, candidate.mesh).capacity_bytes
        if self._held_bytes(candidate.mesh) > room:
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
        kept = seconds = 0.0
        for calls, menu in self._options(candidate):
            size, time_s = min(menu, key=lambda option: option[1] + price_s * option[0])
            kept += calls * size
            seconds += calls * time_s
        return kept / candidate.mesh.tensor, seconds / candidate.mesh.tensor

    def _options(self, candidate: Candidate) -> list[tuple[int, list[tuple[int, float]]]]:
        """Per variant its number of calls, and (bytes kept, seconds recomputed) of its points."""
        if candidate.rows not in self.options:
            found, rows = self._one_device(candidate), []
            for number, (kind, menu) in enumerate(zip(self.work.kinds, found.menus, strict=True)):
                least_s = min(p.backward.total_s for p in menu)
                rows.append((len(kind.calls), [
                    (self._kept_bytes(number, p, found), p.backward.total_s - least_s) for p in menu
                ]))  # fmt: skip
            self.options[candidate.rows] = rows
        return self.options[candidate.rows]

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


def _held(candidate: Candidate, rank: int) -> float:
    """Micro-batches of which a rank holds something, in whole ones."""
    ranks, virtual = candidate.mesh.pipeline, candidate.virtual_stages
    pieces = held_pieces(candidate.schedule, rank, ranks, candidate.micro_batches, virtual)
    return pieces / virtual
