"""What a block keeps for a backward in two halves: the program, with what is held between them.

Input: as of `planner.recompute_program`, and what the weights' half reads. To its rows come, for
every storage o that the weights' half reads, and node n that runs again in that half:

    (5)  pend[o] + late[maker of o] >= 1
    (6)  late[n] <= rec[n]     late[n] <= pend[u] + late[maker of u]    for every input u of n
    (7)  pend[o] <= save[o] + rec[maker of o]

and the bytes of what is kept have sum_o bytes[o] pend[o] too: of forward values alone.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from ir.lower import Lowered
from planner.offload import Hosting
from planner.price import NodeTimes
from planner.recompute_program import KeptProgram
from planner.solver import Term, Variable
from planner.storage import Storage


class LateProgram(KeptProgram):
    """`reads`: the names that the weights' half reads; `unheld`: inputs whose bytes between the
    halves do not count."""

    def __init__(
        self, lowered: Lowered, storage: Storage, times: NodeTimes, always: frozenset[str],
        unweighed: Collection[str], hosting: Hosting | None, *, reads: Collection[str],
        unheld: Collection[str],
    ) -> None:  # fmt: skip
        super().__init__(lowered, storage, times, always, unweighed, hosting)
        self.unheld = frozenset(unheld)
        self.pend: dict[str, Variable] = {}
        self.late = {name: self.model.binary() for name in self.rec}
        for name in reads:
            self._constrain_late(name, [], 1.0)  # (5)
        for node in self.makers.values():
            late = (-1.0, self.late[node.outputs[0]])
            self.model.constrain([(1.0, self.rec[node.outputs[0]]), late], 0.0)  # (6)
            for name in node.inputs:
                self._constrain_late(name, [late], 0.0)

    @cached_property
    def sizes(self) -> list[Term]:
        """With what is held between the halves."""
        held = [(o, v) for o, v in self.pend.items() if o not in self.unheld | self.unweighed]
        return [*super().sizes, *((float(self.storage.size_bytes[o]), v) for o, v in held)]

    def _constrain_late(self, name: str, terms: list[Term], least: float) -> None:
        """A value is held between the halves or made again in the second one, or this is no
        variable of ours."""
        owner = self.storage.owner.get(name, name)
        if owner in self.makers:
            again = (1.0, self.late[self.makers[owner].outputs[0]])
            self.model.constrain([(1.0, self._pending(owner)), again, *terms], least)
        elif owner in self.inputs:
            self.model.constrain([(1.0, self._pending(owner)), *terms], least)

    def _pending(self, owner: str) -> Variable:
        if owner not in self.pend:
            self.pend[owner] = self.model.binary()
            there = self._held(owner)
            if owner in self.makers:
                there.append((1.0, self.rec[self.makers[owner].outputs[0]]))
            self.model.constrain([*there, (-1.0, self.pend[owner])], 0.0)  # (7)
        return self.pend[owner]
