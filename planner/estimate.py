"""Lower bounds and estimates of candidates, without a plan for them.

Input: candidates. Output: `bound_s`, which no plan of the candidate beats, and `guess_s`, the
bound times what sharding was seen to cost at that tensor degree. The bound divides the time of
every node on one device by the tensor degree (but no kernel is shorter than a launch), shares
blocks evenly among stages, and adds the exchange of gradients and the optimizer. Recomputation
that memory asks for is part of the bound where nothing else is decided (one stage, no tensor
axis), and of the guess everywhere. `ranked` gives each candidate the ZeRO stage of the best guess;
`deeper` the next one, for a candidate that turned out to lack memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from math import ceil

from ir.cluster import Cluster, Mesh
from planner.calibrated import cost_model
from planner.candidate import Workload
from planner.cost import CostModel
from planner.even_state import EvenState
from planner.pieces import Pieces
from planner.pins import ZERO_STAGES, Candidate
from planner.recompute import MenuPoint
from planner.schedule import in_flight

PRICE_STEPS, SMALLEST_PRICE_S, LARGEST_PRICE_S = 40, 1e-15, 1e-3
"""Bisection of the price of a kept byte."""


@dataclass
class Estimates:
    """Bounds by candidate, and what was learned. `pieces_of` gives the pieces of one device;
    `zero_stages` are those that a candidate with data ranks may have."""

    work: Workload
    cluster: Cluster
    pieces_of: Callable[[Candidate], Pieces]
    zero_stages: tuple[int, ...] = ZERO_STAGES
    ratio: dict[int, float] = field(default_factory=dict)
    known: dict[Candidate, float] = field(default_factory=dict)
    guessed: dict[tuple[Candidate, float], float] = field(default_factory=dict)
    shares: dict[tuple[int, int], list[tuple[int, float]]] = field(default_factory=dict)
    options: dict[int, list[tuple[int, list[tuple[int, float]]]]] = field(default_factory=dict)
    singles: dict[int, Pieces] = field(default_factory=dict)

    def ranked(self, options: list[Candidate]) -> list[Candidate]:
        """The candidates that may fit, the most promising first.

        Where no candidate with so many rows fits, more rows do not either.
        """
        found: list[Candidate] = []
        for _, group in groupby(sorted(options, key=lambda c: c.rows), key=lambda c: c.rows):
            fitting = [c for c in map(self._opening, group) if self.may_fit(c)]
            if not fitting and found:
                break
            found += fitting
        return sorted(found, key=self.key)

    def key(self, candidate: Candidate) -> tuple[float, int, int, int, int]:
        mesh = candidate.mesh
        guess_s = float(f"{self.guess_s(candidate):.6g}")
        return (guess_s, mesh.pipeline, -mesh.data, candidate.micro_batches, candidate.zero)

    def stages(self, candidate: Candidate) -> tuple[Candidate, ...]:
        """The candidate at every ZeRO stage that it may have, less divided first."""
        numbers = self.zero_stages if candidate.mesh.data > 1 else (0,)
        return tuple(replace(candidate, zero=zero) for zero in numbers)

    def deeper(self, candidate: Candidate) -> tuple[Candidate, ...]:
        """The candidate with the next part of its state divided too, if there is one."""
        return tuple(c for c in self.stages(candidate) if c.zero > candidate.zero)[:1]

    def _opening(self, candidate: Candidate) -> Candidate:
        """The ZeRO stage of the best guess; the last one if none may fit.

        Stage 1 saves seconds of the update; what follows costs seconds and saves bytes, so it can
        only pay where bytes are short.
        """
        options = self.stages(candidate)
        fitting: list[Candidate] = []
        for option in options:
            if self.may_fit(option):
                fitting.append(option)
                if option.zero and self._recompute_s(option) == 0.0:
                    break
        return min(fitting, key=self.key) if fitting else options[-1]

    def guess_s(self, candidate: Candidate) -> float:
        """The bound, with the recomputation that memory asks for and the cost of sharding."""
        tensor = candidate.mesh.tensor
        ratio = self.ratio.get(tensor, 1.0)
        if (candidate, ratio) not in self.guessed:
            again_s = self._recompute_s(candidate)
            moved_s = self._moved_s(candidate, gathers=2)
            guess_s = self._pipeline_s(candidate, ratio, again_s, moved_s)
            guess_s += self._tail_s(candidate)
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
        moved_s = self._moved_s(candidate, gathers=1)  # not every backward reads weights
        return self._pipeline_s(candidate, 1.0, again_s, moved_s) + self._tail_s(candidate)

    def _pipeline_s(
        self, candidate: Candidate, ratio: float, again_s: float, moved_s: float
    ) -> float:
        """Fill and pace: some stage has an even share of all, and of the calls of each kind."""
        stages, shares = candidate.mesh.pipeline, self._shares_s(candidate)
        total_s = sum(n * seconds for n, seconds in shares)
        pace_s = max(total_s / stages, *(ceil(n / stages) * seconds for n, seconds in shares))
        more_s = again_s + moved_s
        fill_s, pace_s = total_s * ratio + more_s, pace_s * ratio + more_s / stages
        return fill_s + (candidate.micro_batches - 1) * pace_s

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

    @cached_property
    def _state(self) -> EvenState:
        return EvenState(self.work.graph, self.work.optimizer)

    def _cost(self, candidate: Candidate) -> CostModel:
        return cost_model(self.cluster, candidate.mesh)

    def _tail_s(self, candidate: Candidate) -> float:
        """Gradients over the data axis and the update, shared evenly by stages and shards."""
        return self._state.tail_s(candidate.mesh, candidate.zero, self._cost(candidate))

    def _moved_s(self, candidate: Candidate, *, gathers: int) -> float:
        """What ZeRO scatters, and gathers so often, in a micro-batch, on all stages together."""
        if candidate.zero < 2:
            return 0.0
        where = candidate.mesh, candidate.zero, self._cost(candidate)
        return self._state.scatter_s(*where) + gathers * self._state.gather_s(*where)

    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer state, once."""
        return self._state.all_bytes()

    def _held_bytes(self, candidate: Candidate) -> float:
        """State of a device when it is divided evenly by stages, shards and data ranks."""
        return self._state.held_bytes(candidate.mesh, candidate.zero)

    def need_bytes(self, candidate: Candidate) -> float:
        """State and activations of a device, divided evenly, with everything recomputed."""
        stages = candidate.mesh.pipeline
        held = in_flight(0, stages, candidate.micro_batches, candidate.schedule)
        kept, _ = self._cheapest(candidate, LARGEST_PRICE_S)
        return self._held_bytes(candidate) + self._transient_bytes(candidate) + held * kept / stages

    def _transient_bytes(self, candidate: Candidate) -> float:
        menus = self._one_device(candidate).menus
        return max(min(p.transient_bytes for p in menu) for menu in menus) / candidate.mesh.tensor

    def _room_bytes(self, candidate: Candidate) -> float:
        """What all stages together can keep of one micro-batch: sum of room / in flight."""
        mesh, count = candidate.mesh, candidate.micro_batches
        room = self._cost(candidate).capacity_bytes - self._held_bytes(candidate)
        room -= self._transient_bytes(candidate)
        flights = (in_flight(s, mesh.pipeline, count, candidate.schedule)
                   for s in range(mesh.pipeline))  # fmt: skip
        return sum(room / held for held in flights)

    def may_fit(self, candidate: Candidate) -> bool:
        """Whether the state and the least activations, divided evenly, leave room."""
        room = self._cost(candidate).capacity_bytes
        if self._held_bytes(candidate) > room:
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
