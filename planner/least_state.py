"""The least that parameters, gradients and optimizer state take, whatever the sharding.

Input: a workload, cost models by mesh, a candidate. Output: `StateCost`s, as if the tensor axis
cut every tensor evenly and moved nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

from ir.cluster import GIB, Mesh
from ir.graph import State, TensorType
from ir.layout import DATA
from ir.offload import offloads_optimizer
from planner.pins import Candidate
from planner.price import OPTIMIZER_TENSORS, StateCost
from planner.rank_costs import CostOf
from planner.sharding_program import HELD_TENSORS
from planner.workload import Workload
from planner.zero import least_held_cost


@dataclass
class LeastState:
    """Kept by mesh, ZeRO stage and offload."""

    work: Workload
    cost_of: CostOf
    known: dict[tuple[Mesh, int, str], dict[str, StateCost]] = field(default_factory=dict)
    known_total: dict[tuple[Mesh, int, str], StateCost] = field(default_factory=dict)
    known_runs: dict[tuple[Mesh, int, str], list[tuple[int, int, StateCost]]] = field(
        default_factory=dict
    )

    def each(self, candidate: Candidate) -> dict[str, StateCost]:
        """Of every state tensor."""
        key = (candidate.mesh, candidate.zero, candidate.offload)
        if key not in self.known:
            cost, like = self.cost_of(candidate.mesh), self._alike
            found = {
                kind: least_held_cost(
                    item, cost, self.work.optimizer, candidate.zero, candidate.offload
                )
                for kind, item in dict(like.values()).items()
            }
            self.known[key] = {name: found[kind] for name, (kind, _) in like.items()}
        return self.known[key]

    @cached_property
    def _alike(self) -> dict[str, tuple[int, State]]:
        """Per state tensor the first one that costs as much, and its number."""
        first: dict[tuple[TensorType, str, bool], tuple[int, State]] = {}
        found = {}
        for item in self.work.graph.state:
            key = (item.type, item.kind, item.trainable)
            found[item.name] = first.setdefault(key, (len(first), item))
        return found

    def total(self, candidate: Candidate) -> StateCost:
        """Of all state tensors together."""
        key = (candidate.mesh, candidate.zero, candidate.offload)
        if key not in self.known_total:
            self.known_total[key] = StateCost.total(list(self.each(candidate).values()))
        return self.known_total[key]

    def bytes_of(self, candidate: Candidate) -> float:
        """State of a device when it is divided evenly by stages and shards."""
        return self.total(candidate).held_bytes / candidate.mesh.pipeline

    def runs(self, candidate: Candidate) -> list[tuple[int, int, StateCost]]:
        """Identical calls in a row: variant, their number, the state that they use first."""
        key = (candidate.mesh, candidate.zero, candidate.offload)
        if key not in self.known_runs:
            self.known_runs[key] = self._found_runs(candidate)
        return self.known_runs[key]

    def _found_runs(self, candidate: Candidate) -> list[tuple[int, int, StateCost]]:
        graph, states = self.work.graph, dict(self.each(candidate))
        variant_of, found = self.work.variant_of, []
        for variant, group in groupby(range(len(graph.calls)), key=lambda i: variant_of[i]):
            calls = list(group)
            names = dict.fromkeys(v for i in calls for v in graph.calls[i].arguments)
            mine = [states.pop(name) for name in names if name in states]
            found.append((variant, len(calls), StateCost.total(mine)))
        return found

    def tied(self, candidate: Candidate) -> list[tuple[int, int, StateCost]]:
        """(run i, run j, the state that j reads and i uses first), as places in `runs`."""
        graph, states, found, end = self.work.graph, self.each(candidate), [], 0
        first: dict[str, int] = {}
        for run, (_, count, _) in enumerate(self.runs(candidate)):
            calls, end = graph.calls[end : end + count], end + count
            names = [v for v in dict.fromkeys(v for c in calls for v in c.arguments) if v in states]
            for owner in sorted({first.setdefault(name, run) for name in names} - {run}):
                mine = [states[name] for name in names if first[name] == owner]
                found.append((owner, run, StateCost.total(mine)))
        return found

    def whole_parts(self, candidate: Candidate) -> tuple[float, float]:
        """What ZeRO, the optimizer and the host leave undivided: of the `HELD_TENSORS` that the
        curve of a block counts for a parameter and AdamW's state, and of gradients."""
        tensors = 0 if candidate.zero == 3 else 1
        if candidate.zero == 0 and not offloads_optimizer(candidate.offload):
            tensors += OPTIMIZER_TENSORS[self.work.optimizer]
        return min(1.0, tensors / HELD_TENSORS), 0.0 if candidate.zero >= 2 else 1.0

    def divided_bytes(self, candidate: Candidate, state: StateCost) -> int:
        """What they divide, of so much state that is cut evenly."""
        of_stages = state.optimizer_bytes, state.gradient_bytes, state.parameter_bytes
        return sum(of_stages[: candidate.zero])

    def trained_bytes(self, candidate: Candidate) -> float:
        """Of all parameters, cut evenly over the tensor axis."""
        return self._trained_bytes / candidate.mesh.tensor

    @cached_property
    def _trained_bytes(self) -> int:
        return sum(item.type.bytes(1) for item in self.work.graph.state if item.trainable)

    def exchange_s(self, candidate: Candidate) -> float:
        """Of a byte of parameters over the data axis, per step; of long messages, so at least."""
        cost, times = self.cost_of(candidate.mesh), candidate.micro_batches
        if candidate.mesh.data == 1:
            return 0.0
        scatter_s, gather_s = (
            cost.collective_s(kind, GIB, DATA) / GIB for kind in ("reduce_scatter", "all_gather")
        )
        scatters = times if candidate.zero >= 2 else 1
        return scatters * scatter_s + (times if candidate.zero == 3 else 1) * gather_s
