"""What a sharding adds to what a block keeps: values that backward reads whole on every device.

Input: the sharding program, a variant, what it keeps on one device. Output: `WholeValues`, whose
relaxation bounds shardings and kept values together. The least that a block keeps and runs again
(`planner.least_costs`) is as if every value were cut evenly over the tensor axis. Where a sharding
has forward make value v whole and backward read it so (h = 1), one of these adds to that:

    k   the whole value is kept                                price * (bytes - even bytes)
    c   a part is kept, and gathered again                     seconds of an all-gather
    r   it is made again, on all of it                         seconds - even seconds
    x   the whole value is on the host                         seconds of copying it there and back

    k[v] + c[v] + r[v] + x[v] >= h[v]
    h[v] >= e                     where forward makes v whole and backward reads it so, e
    h[v] >= e + f - 1             where it is whole for backward, e, and for a node of forward, f
    h[u] >= r[v]                  where v can be made whole only from a whole u

A storage is one value, and what its first reader in backward reads is what counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

from ir.graph import Node
from ir.layout import REPLICATE, Layout, Placement
from planner.recompute_program import KeptProgram
from planner.sharding_program import Flow, ShardingProgram
from planner.sharding_terms import Use
from planner.solver import Relaxation, Term, Variable


class WholeValues:
    """Of one variant. `kept`: its program on one device; `part`: of what running a node again takes
    there, what a device of the tensor axis takes at least."""

    def __init__(
        self, built: ShardingProgram, number: int, kept: KeptProgram, part: float
    ) -> None:
        self.built, self.number, self.kept, self.part = built, number, kept, part
        self.block = built.kinds[number].block
        self.model = built.program.model.copy()
        first = self.model.n_rows
        self.had: dict[str, Variable] = {}
        self.more: list[Term] = []
        """Bytes, beyond an even part."""
        self.seconds: list[Term] = []
        for owner, node, name in self._readers():
            self._read(owner, node, name)
        rows = [*built.program.rows_of(number), *range(first, self.model.n_rows)]
        self.relaxation = Relaxation(self.model, rows)

    def least_s(self, terms: Sequence[Term], price_s: float) -> float:
        """The least of these seconds of the sharding and of what it adds to what is kept, where a
        byte of that costs so many."""
        more = ((price_s * size, variable) for size, variable in self.more)
        return self.relaxation.minimum([*terms, *self.seconds, *more], only=()).bound

    def _readers(self) -> Iterator[tuple[str, Node, str]]:
        """Every storage that backward reads, the first node that does, and by which value."""
        owners = self.kept.storage.owner
        left = {owners[name] for name in self.kept.lowered.saved}
        for node in self.block.nodes[self.block.n_forward :]:
            for name in node.operands:
                owner = owners.get(name)
                if owner in left:
                    left.remove(owner)
                    yield owner, node, name

    def _read(self, owner: str, node: Node, name: str) -> None:
        if not self._counts(owner):
            return
        after = self._first_whole(name, lambda use: use.node is node)
        before = self._first_whole(name, lambda use: not use.backward)
        made = [(-1.0, v) for v in after.get(REPLICATE, ())]
        if made:
            self.model.constrain([(1.0, self._have(owner)), *made], 0)
        if after and before:
            both = [(-1.0, v) for found in (after, before) for vs in found.values() for v in vs]
            self.model.constrain([(1.0, self._have(owner)), *both], -1)

    def _have(self, owner: str) -> Variable:
        """Whether a storage is had whole in backward."""
        if owner in self.had:
            return self.had[owner]
        had = self.had[owner] = self.model.variable(0, 1)
        keep, gather = self.model.variable(0, 1), self.model.variable(0, 1)
        more = self._more_bytes(owner)
        self.more.append((more, keep))
        gathered_s = self.built.cost.collective_s("all_gather", self._bytes(owner), "tensor")
        self.seconds.append((gathered_s, gather))
        ways = [keep, gather]
        if self.kept.hosting is not None:
            ways.append(self._host(more))
        for maker in (node for node in self.block.forward if owner in node.outputs):
            ways += self._make(owner, maker)
        self.model.constrain([*((1.0, way) for way in ways), (-1.0, had)], 0)
        return had

    def _host(self, more_bytes: float) -> Variable:
        assert self.kept.hosting is not None
        host = self.model.variable(0, 1)
        self.seconds.append((2 * self.kept.hosting.copy_s(more_bytes, 0), host))
        return host

    def _make(self, owner: str, maker: Node) -> list[Variable]:
        """Whether it is made again, if that can be whole; from operands that are whole if no other
        way makes it so."""
        options = self.built.prices[self.number].options(maker)
        place = [name for name in maker.outputs if name in self.block.types].index(owner)
        whole = [(option, s) for option, s in options if option.results[place] == REPLICATE]
        if not whole:
            return []
        again = self.model.variable(0, 1)
        even_s = self.part * self.kept.times.of[maker.outputs[0]].total_s
        self.seconds.append((max(0.0, min(s for _, s in whole) - even_s), again))
        for position, name in enumerate(maker.operands):
            operand = self.kept.storage.owner.get(name, name)
            if self._counts(operand) and all(o.operands[position] == REPLICATE for o, _ in whole):
                self.model.constrain([(1.0, self._have(operand)), (-1.0, again)], 0)
        return [again]

    def _counts(self, owner: str) -> bool:
        """Whether a whole storage takes more than an even part of it."""
        kept, early = self.kept, self.built.early[self.number]
        if owner in kept.always or owner in kept.unweighed or owner in early:
            return False
        return owner in kept.storage.size_bytes and self._more_bytes(owner) > 0

    def _more_bytes(self, owner: str) -> float:
        size_bytes = self.kept.storage.size_bytes[owner]
        return min(self._bytes(owner), size_bytes) - size_bytes / self.built.degrees.tensor

    def _first_whole(
        self, name: str, wanted: Callable[[Use], bool]
    ) -> Mapping[Placement, Sequence[Variable]]:
        """By where it comes from, sums of variables that are 1 where the first such use of a value
        needs it whole."""
        uses = [flow for flow in self._flows.get(name, ()) if wanted(flow[0])]
        return {have: v for use, have, want, v in uses if use is uses[0][0] and want == REPLICATE}

    @cached_property
    def _flows(self) -> dict[str, list[Flow]]:
        found: dict[str, list[Flow]] = {}
        for flow in self.built.flows:
            if flow[0].number == self.number:
                found.setdefault(flow[0].name, []).append(flow)
        return found

    def _bytes(self, name: str) -> int:
        layout = Layout(self.built.places[self.number][name], REPLICATE)
        return self.built.prices[self.number].bytes_of(name, layout)
