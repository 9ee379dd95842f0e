"""The integer program of what a block keeps, and its relaxation.

Input: a lowered block with its storages and times. Output: the forward values to keep within a
budget, or the least of seconds + price * bytes. A view is its storage: for every storage o that
forward fills, and node n that is no view:

    minimise  sum_n seconds[n] rec[n]                       the nodes that backward runs again
    (1)  save[o] + rec[maker of o] >= 1                     for every o that backward reads
    (2)  rec[n] <= save[u] + rec[maker of u]                for every input u of n
    (3)  save[u] >= rec[n]                                  for block inputs u of n
    (4)  sum_o bytes[o] save[o] + sum_n inner[n] (1 - rec[n]) <= budget

Where there is a host, save[o] + host[o] stands for save[o] in (1) to (3), and the sum that is
minimised has sum_o copies[o] host[o] too: there and back.

Parameters and other state are always there, and dropout draws the same mask again; `inner` bytes
are what a kernel keeps by itself. Sources: Checkmate (Jain et al., MLSys 2020); sharing of
storages and the collectives' time are ours.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from ir.lower import Lowered
from ir.recompute import kept_values
from planner.offload import Hosting
from planner.price import NodeTimes
from planner.solver import Model, Relaxation, Solution, Term, Variable
from planner.storage import Storage


class KeptProgram:
    """Rows (1) to (3) of a block. `always`: inputs that are there anyway; `unweighed`: inputs whose
    bytes do not count; `hosting`: the host, if values may lie there; `reads`: what backward reads,
    where only a part of it counts."""

    def __init__(
        self, lowered: Lowered, storage: Storage, times: NodeTimes, always: frozenset[str],
        unweighed: Collection[str] = (), hosting: Hosting | None = None,
        reads: Collection[str] | None = None,
    ) -> None:  # fmt: skip
        self.lowered, self.storage, self.times = lowered, storage, times
        self.always, self.unweighed = always, frozenset(unweighed)
        self.inputs = frozenset(lowered.block.inputs) - always
        nodes = [node for node in lowered.forward if not storage.is_alias(node)]
        self.makers = {name: node for node in nodes for name in node.outputs}
        self.model = Model()
        self.rec = {node.outputs[0]: self.model.binary() for node in nodes}
        self.save: dict[str, Variable] = {}
        self.host: dict[str, Variable] = {}
        self.hosting = hosting
        self.solved: dict[float, Solution] = {}
        for name in lowered.saved if reads is None else reads:
            self._constrain_present(name, [], 1.0)  # (1)
        for node in nodes:
            for name in node.inputs:
                self._constrain_present(name, [(-1.0, self.rec[node.outputs[0]])], 0.0)  # (2), (3)

    @cached_property
    def seconds(self) -> list[Term]:
        """What running the chosen nodes again costs, and copying to the host and back."""
        again = [(self.times.of[name].total_s, variable) for name, variable in self.rec.items()]
        if self.hosting is None:
            return again
        sizes = self.storage.size_bytes
        return again + [(2 * self.hosting.copy_s(sizes[o], 1), v) for o, v in self.host.items()]

    @property
    def most_seconds(self) -> float:
        """Of running everything again."""
        return sum(self.times.of[name].total_s for name in self.rec)

    @cached_property
    def sizes(self) -> list[Term]:
        """(4): the bytes of what is kept, less `inner_bytes`."""
        stored = [
            (float(self.storage.size_bytes[owner]), variable)
            for owner, variable in self.save.items() if owner not in self.unweighed
        ]  # fmt: skip
        inner = [(-size, self.rec[name]) for name, size in self._inner.items()]
        return [*stored, *inner]

    @cached_property
    def inner_bytes(self) -> float:
        """What kernels keep by themselves if nothing runs again."""
        return sum(self._inner.values())

    def cheapest(
        self, budget_bytes: float, span_bytes: float
    ) -> tuple[frozenset[str], frozenset[str]]:
        """The kept values of the least time within the budget, and what is held on the host; bytes
        decide between equals."""
        sizes = self.sizes
        self.model.constrain(sizes, upper=budget_bytes - self.inner_bytes)
        tie_s = 1e-3 * self.most_seconds / max(span_bytes, 1.0)
        self.model.minimise([*self.seconds, *((tie_s * size, v) for size, v in sizes)])
        try:
            return self._decoded(self.model.solve(1e-4))
        finally:
            self.model.relax_last()

    def priced(self, price_s: float) -> tuple[float, float, float]:
        """(seconds, bytes, their least sum with `price_s` per byte) of the relaxed program."""
        found = self._relaxed(price_s)
        seconds = sum(cost * found[v] for cost, v in self.seconds)
        held = sum(size * found[v] for size, v in self.sizes)
        return seconds, held + self.inner_bytes, found.bound

    def kept_at(self, price_s: float) -> tuple[frozenset[str], frozenset[str]] | None:
        """What is kept at such a price, as of `cheapest`; None if the relaxation keeps parts."""
        found = self._relaxed(price_s)
        return self._decoded(found) if found.is_integral else None

    def _relaxed(self, price_s: float) -> Solution:
        if price_s not in self.solved:
            terms = [*self.seconds, *((price_s * size, v) for size, v in self.sizes)]
            self.solved[price_s] = self._relaxation.minimum(terms, price_s * self.inner_bytes)
        return self.solved[price_s]

    def least_bytes(self) -> float:
        """Of what has to be kept, whatever is run again."""
        return self._relaxation.minimum(self.sizes, self.inner_bytes).bound

    @cached_property
    def _relaxation(self) -> Relaxation:
        return Relaxation(self.model)

    @cached_property
    def _inner(self) -> dict[str, float]:
        kept = {name: kept for name, (kept, _) in self.times.inner.items() if name in self.rec}
        return {name: float(size) for name, size in kept.items() if size}

    def _constrain_present(self, name: str, terms: list[Term], least: float) -> None:
        """A value is kept or made again, or this is no variable of ours."""
        owner = self.storage.owner.get(name, name)
        if owner in self.makers:
            again = (1.0, self.rec[self.makers[owner].outputs[0]])
            self.model.constrain([*self._held(owner), again, *terms], least)
        elif owner in self.inputs:
            self.model.constrain([*self._held(owner), *terms], least)

    def _held(self, owner: str) -> list[Term]:
        """A sum that is 1 if a storage is held, on the device or on the host."""
        if owner not in self.save:
            self.save[owner] = self.model.binary()
            if self.hosting is not None and owner not in self.hosting.staying:
                self.host[owner] = self.model.binary()
        return [(1.0, found[owner]) for found in (self.save, self.host) if owner in found]

    def _decoded(self, solution: Solution) -> tuple[frozenset[str], frozenset[str]]:
        """Saved values that backward needs once the recomputed ones are there; of these and of the
        inputs that it needs, the ones that are on the host alone."""
        near, far = (
            {name for name, v in found.items() if solution[v] > 0.5}
            for found in (self.save, self.host)
        )
        chosen = frozenset((near | far) & set(self.makers))
        held = kept_values(self.lowered, chosen, self.always)
        owner, hosted = self.storage.owner, far - near
        return (
            frozenset(name for name in held if name in self.makers),
            frozenset(name for name in held if owner.get(name, name) in hosted),
        )
