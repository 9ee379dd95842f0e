"""The bytes of one call of a block: what it makes, hands on and holds, in each of its functions.

Input: a program, a variant with its menu point, its storages. Output: `CallMemory`. The caller
holds arguments and tangents until the call is over, so a block can free only what it makes itself
and what is handed to it alone: the values that forward kept, and copies of those that forward left
on the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from ir.graph import Node
from ir.lower import Lowered
from ir.split import Split
from ir.spmd import Spmd
from planner.liveness import exchange_bytes, peak_bytes
from planner.storage import Storage, early_storage


@dataclass
class CallMemory:
    """Of one (variant, menu point). Peaks are beside what the caller holds.

    `inner`: bytes that kernels need while they run, by the first output of their node;
    `inner_kept_bytes`: that they keep by themselves until backward.
    """

    program: Spmd
    variant: int
    keep: str
    storage: Storage
    inner: dict[str, int] = field(default_factory=dict)
    inner_kept_bytes: int = 0
    _peaks: dict[tuple[str, frozenset[str]], int] = field(default_factory=dict)

    @property
    def lowered(self) -> Lowered:
        return self.program.lowered[self.variant]

    @cached_property
    def always(self) -> frozenset[str]:
        return self.program.always(self.variant)

    @cached_property
    def kept(self) -> tuple[str, ...]:
        """Storages that forward hands to backward, on the device."""
        names = self.program.kept(self.variant, self.keep)
        return self._owners(self.storage, [name for name in names if name not in self.hosted])

    @cached_property
    def hosted(self) -> tuple[str, ...]:
        """Values that forward hands to backward by way of the host."""
        return self.program.hosted(self.variant, self.keep)

    @cached_property
    def later(self) -> Storage:
        """The storages of backward, which fetches copies of what is on the host."""
        return self.storage.fetched(self.backward, self.hosted)

    @cached_property
    def fetched(self) -> tuple[str, ...]:
        """Storages that backward fetches when it starts."""
        return self._owners(self.later, self.hosted)

    @cached_property
    def handed(self) -> tuple[tuple[str, str], ...]:
        """(input, the storage of its gradient) of what backward returns, in order."""
        owner, pairs = self.later.owner, self.lowered.gradients
        return tuple((value, owner[name]) for value, name in pairs if value not in self.always)

    @cached_property
    def split(self) -> Split:
        return self.program.split(self.variant, self.keep)

    @property
    def has_halves(self) -> bool:
        return self.split.has_weight_half

    @cached_property
    def pending(self) -> tuple[str, ...]:
        """Storages between the halves of a split backward."""
        return self._owners(self.later, self.split.pending)

    @cached_property
    def backward(self) -> tuple[Node, ...]:
        return self.program.backward(self.variant, self.keep)

    @cached_property
    def forward_bytes(self) -> int:
        """The most that forward makes at a time."""
        lowered = self.lowered
        kept = self.program.kept(self.variant, self.keep)
        return peak_bytes(
            lowered.forward, self.storage, present=(), until_end=[*lowered.outputs, *kept],
            uncounted=self._outside, working=self._working(lowered.forward),
        )  # fmt: skip

    @cached_property
    def early_bytes(self) -> int:
        """Results of the prologue, which last all step."""
        return sum(self.lowered.types[name].bytes(1) for name in self.lowered.early)

    @cached_property
    def prologue_bytes(self) -> int:
        """The most that the prologue makes at a time."""
        lowered = self.lowered
        return peak_bytes(
            lowered.prologue, early_storage(lowered), present=(), until_end=lowered.early,
            uncounted=lowered.block.inputs,
            working=exchange_bytes(lowered.prologue, lowered.early_types),
        )  # fmt: skip

    def backward_bytes(self, alone: frozenset[str]) -> int:
        """The most of backward with the storages `alone`, of what is kept, that nobody else holds
        and that die on the way."""
        return self._peak("backward", self.backward, alone, self._handed_names)

    def input_bytes(self, alone: frozenset[str]) -> int:
        """Of the first half of a split backward."""
        ends = [*self._handed_names, *self.split.pending]
        return self._peak("input", self.split.input, alone, ends)

    def weight_bytes(self, alone: frozenset[str]) -> int:
        """Of the second half, with the storages `alone` of what is pending."""
        return self._peak("weight", self.split.weight, alone, ())

    @property
    def _handed_names(self) -> list[str]:
        return [name for value, name in self.lowered.gradients if value not in self.always]

    @cached_property
    def _outside(self) -> frozenset[str]:
        """What the caller holds."""
        tangents = {tangent for _, tangent in self.lowered.block.tangents}
        return frozenset({*self.lowered.block.inputs, *self.lowered.early, *tangents})

    def _peak(
        self, what: str, nodes: tuple[Node, ...], alone: frozenset[str], ends: Iterable[str]
    ) -> int:
        if (what, alone) not in self._peaks:
            kept = self.program.kept(self.variant, self.keep)
            given = self.split.pending if what == "weight" else kept
            owner = self.later.owner
            free = [n for n in {*self._outside, *given} if n in owner and owner[n] not in alone]
            self._peaks[what, alone] = peak_bytes(
                nodes, self.later.again(nodes, given), until_end=tuple(ends),
                present=[name for name in given if owner[name] in alone],
                uncounted=free, working=self._working(nodes),
            )  # fmt: skip
        return self._peaks[what, alone]

    def _working(self, nodes: Iterable[Node]) -> dict[str, int]:
        return self.inner | exchange_bytes(tuple(nodes), self.lowered.types)

    def _owners(self, storage: Storage, names: Iterable[str]) -> tuple[str, ...]:
        there = self.always | set(self.lowered.early)
        found = dict.fromkeys(storage.owner[name] for name in names)
        return tuple(owner for owner in found if owner not in there)
