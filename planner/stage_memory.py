"""The bytes of the functions of one stage, walked call by call in the order of the emitted text.

Input: a program, a stage, the `CallMemory` of its calls. Output: `StageMemory`: the most that each
function needs at a time, and what it leaves, of one micro-batch. A value that several calls hold
lies there once. A function deletes a value after the last call that reads it. What stages of a rank
hand on to each other lies there once as well: with the first of them until its forward ends, then
with the rank (`planner.shared_values`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from ir.spmd import Spmd, StageCall
from planner.call_memory import CallMemory
from planner.zero import ZeroMoves

Memories = Callable[[StageCall], CallMemory]


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Of one micro-batch. `forward_bytes` and `backward_bytes`: the most during these functions,
    with what was received for them; `weight_bytes`: during the weights' half of a split backward.
    `saved_bytes`: from forward to backward; `pending_bytes`: between its halves. Of values that
    stages of the rank share, which none of these count outside the first one's forward: `shared`,
    by name the bytes of those that the rank has from this stage; `keeps`, those that its forward
    leaves for backward, and `keeps_pending` between the halves."""

    forward_bytes: int
    backward_bytes: int
    weight_bytes: int
    saved_bytes: int
    pending_bytes: int
    shared: Mapping[str, int] = field(default_factory=dict)
    keeps: frozenset[str] = frozenset()
    keeps_pending: frozenset[str] = frozenset()

    @property
    def beyond_bytes(self) -> int:
        """The most beside what is saved."""
        return max(self.forward_bytes, self.backward_bytes) - self.saved_bytes

    def beside(self, saved_bytes: int, working_bytes: int) -> StageMemory:
        """With more that is saved, and more that is there while the stage runs."""
        return replace(
            self, saved_bytes=self.saved_bytes + saved_bytes,
            forward_bytes=self.forward_bytes + saved_bytes + working_bytes,
            backward_bytes=self.backward_bytes + saved_bytes + working_bytes,
        )  # fmt: skip


@dataclass
class Live:
    """Storages that are there, each counted once however many hold it; `elsewhere` are those that
    are not counted here."""

    holders: dict[Hashable, int] = field(default_factory=dict)
    sizes: dict[Hashable, int] = field(default_factory=dict)
    elsewhere: set[Hashable] = field(default_factory=set)
    current: int = 0
    peak: int = 0

    def hold(self, key: Hashable, size_bytes: int) -> None:
        if key not in self.holders:
            self.holders[key] = 0
            self.sizes[key] = 0 if key in self.elsewhere else size_bytes
            self.current += self.sizes[key]
            self.peak = max(self.peak, self.current)
        self.holders[key] += 1

    def drop(self, key: Hashable) -> None:
        self.holders[key] -= 1
        if not self.holders[key]:
            self.current -= self.sizes.pop(key)
            del self.holders[key]

    def hand_over(self, key: Hashable) -> None:
        """From now on it is counted elsewhere."""
        self.elsewhere.add(key)
        if key in self.sizes:
            self.current -= self.sizes[key]
            self.sizes[key] = 0

    def reach(self, more_bytes: int) -> None:
        """So much more is there for a moment."""
        self.peak = max(self.peak, self.current + more_bytes)


Refs = list[tuple[str, Hashable]]
"""What a list holds for a call: storages by the block's name, and by the stage's."""


def stage_memory(
    program: Spmd, stage: int, memories: Memories, moves: ZeroMoves, *, splits: bool = False
) -> StageMemory:
    """`splits`: the schedule runs the halves of a backward apart."""
    walk = _Walk(program, stage, memories, moves)
    shared = walk.forward()
    forward_bytes, saved_bytes, keeps = walk.live.peak, walk.live.current, walk.kept_shared()
    walk.begin_backward()
    walk.backward(splits=splits)
    backward_bytes, pending_bytes = walk.live.peak, walk.live.current
    keeps_pending = walk.kept_shared()
    weight_bytes = walk.weights() if splits else 0
    return StageMemory(
        forward_bytes, backward_bytes, weight_bytes, saved_bytes, pending_bytes, shared, keeps,
        keeps_pending,
    )  # fmt: skip


class _Walk:
    """One micro-batch through a stage. `values` and `gradients`: the storage of what a variable of
    the stage's functions holds; None for state and the batch, which are counted elsewhere."""

    def __init__(self, program: Spmd, stage: int, memories: Memories, moves: ZeroMoves) -> None:
        self.program, self.calls = program, program.stages[stage]
        self.memories, self.moves = memories, moves
        self.live = Live()
        self.values: dict[str, Hashable] = {}
        self.gradients: dict[str, Hashable] = {}
        self.saved: list[Refs] = []
        self.pending: list[Refs] = []
        self.made = {v for placed in self.calls for v in program.call(placed).results}
        self.coming = [m for m in program.messages if m.target == stage]
        self.going = [m for m in program.messages if m.source == stage]
        self.given = {m.value for m in self.going if program.is_near(m)}
        self.taken = {m.value for m in self.coming if program.is_near(m)}
        for message in self.coming:
            self.values[message.value] = ("received", message.value)
            if message.value in self.taken:
                self.live.hand_over(self.values[message.value])
            self.live.hold(self.values[message.value], message.type.bytes(1))

    def forward(self) -> dict[str, int]:
        """What a call makes is there until its last reader, or leaves at the end; the bytes of what
        the rank has from then on."""
        graph = self.program.graph
        leaving = {graph.loss, *(v for _, v in graph.metrics), *(m.value for m in self.going)}
        leaving |= {item.update for item in graph.state if item.update}
        calls = list(enumerate(self.calls))
        last = {v: place for place, p in calls for v in self.program.call(p).arguments}
        held = {message.value for message in self.coming}
        for place, placed in calls:
            memory = self.memories(placed)
            gathered = self._gathered_bytes(self.moves.names_of(placed)[1])
            self.live.reach(gathered + memory.forward_bytes + memory.inner_kept_bytes)
            results = self.program.call(placed).results
            for value, name in zip(results, memory.lowered.outputs, strict=True):
                self.values[value] = self._hold(placed, memory, memory.storage.owner[name])
                held |= {value}
            self.saved.append(self._refs(placed, memory, memory.kept))
            if memory.inner_kept_bytes:
                self.saved[-1].append(("", ("inner", placed.index)))
                self.live.hold(("inner", placed.index), memory.inner_kept_bytes)
            dead = {v for v in held - leaving if last.get(v, place) <= place}
            self._drop_values(dead)
            held -= dead
        handed = {value: self.values[value] for value in self.given - self.taken}
        shared = {value: self.live.sizes.get(key, 0) for value, key in handed.items()}
        for key in handed.values():
            self.live.hand_over(key)
        self._drop_values(held)
        return shared

    def kept_shared(self) -> frozenset[str]:
        """Those of the values that the rank's stages share that are still held here."""
        near = self.given | self.taken
        return frozenset(value for value in near if self.values[value] in self.live.holders)

    def _drop_values(self, names: set[str]) -> None:
        for name in sorted(names):
            if self.values[name] is not None:
                self.live.drop(self.values[name])

    def begin_backward(self) -> None:
        """With the gradients that came back."""
        self.live.peak = self.live.current
        for message in self.going:
            if message.gradient is None:
                continue
            size_bytes = message.gradient.bytes(1)
            if message.value in self.gradients:  # added up as they come
                self.live.reach(2 * size_bytes)
                continue
            self.gradients[message.value] = ("returned", message.value)
            self.live.hold(self.gradients[message.value], size_bytes)

    def backward(self, *, splits: bool) -> None:
        """Last call first; a gradient is there until the maker of its value has run."""
        wanted = {message.value for message in self.coming if message.gradient}
        for placed in reversed(self.calls):
            memory, saved = self.memories(placed), self.saved.pop()
            if not memory.lowered.gradients:
                self._release(saved)
                continue
            self._call_backward(placed, memory, saved, halves=splits and memory.has_halves)
            results = self.program.call(placed).results
            self._drop_gradients(v for v in [*self.gradients] if v in results)
            self._drop_gradients(
                v for v in [*self.gradients] if v not in self.made and v not in wanted
            )
        self._drop_gradients([*self.gradients])

    def _call_backward(
        self, placed: StageCall, memory: CallMemory, saved: Refs, *, halves: bool
    ) -> None:
        peak = memory.input_bytes if halves else memory.backward_bytes
        *_, gathered, scattered = self.moves.names_of(placed)
        summed = sum(self.moves.state[name].summed_bytes for name in scattered)
        whole = summed + self._gathered_bytes(gathered)
        given = saved + self._refs(placed, memory, memory.fetched)
        self._run(given, lambda alone: peak(alone) + whole)
        handed = [self._hold(placed, memory, owner) for _, owner in memory.handed]
        if halves:
            self.pending.append(self._refs(placed, memory, memory.pending))
        scattering = [self.moves.state[name].scattering_bytes for name in scattered]
        self.live.reach(summed + max(scattering, default=0))  # one at a time
        values = dict(
            zip(memory.lowered.block.inputs, self.program.call(placed).arguments, strict=True)
        )
        for (name, _), key in zip(memory.handed, handed, strict=True):
            self._add(values[name], key)

    def weights(self) -> int:
        """The second halves, last pending first; the most that they need."""
        self.live.peak = self.live.current
        for placed in self.calls:
            memory = self.memories(placed)
            if memory.lowered.gradients and memory.has_halves:
                self._run(self.pending.pop(), memory.weight_bytes)
        return self.live.peak

    def _run(self, refs: Refs, peak: Callable[[frozenset[str]], int]) -> None:
        """A function that is handed what a list held, and frees what nobody else holds."""
        here = [(name, key) for name, key in refs if name and key not in self.live.elsewhere]
        alone = {name: key for name, key in here if self.live.holders[key] == 1}
        own_bytes = sum(self.live.sizes[key] for key in alone.values())
        self.live.reach(peak(frozenset(alone)) - own_bytes)
        self._release(refs)

    def _release(self, refs: Refs) -> None:
        for _, key in refs:
            self.live.drop(key)

    def _add(self, value: str, key: Hashable) -> None:
        """To the gradient of a value that another call gave."""
        before = self.gradients.get(value)
        if before is None:
            self.gradients[value] = key
        elif key is not None:
            total = ("sum", value, len(self.pending), self.live.sizes[key], object())
            self.live.hold(total, self.live.sizes[key])
            self.live.drop(before)
            self.live.drop(key)
            self.gradients[value] = total

    def _drop_gradients(self, values: Iterable[str]) -> None:
        for value in values:
            key = self.gradients.pop(value)
            if key is not None:
                self.live.drop(key)

    def _gathered_bytes(self, names: Iterable[str]) -> int:
        return sum(self.moves.state[name].gathered_bytes for name in names)

    def _hold(self, placed: StageCall, memory: CallMemory, owner: str) -> Hashable:
        key = self._key(placed, memory, owner)
        if key is not None:
            self.live.hold(key, memory.later.size_bytes[owner])
        return key

    def _refs(self, placed: StageCall, memory: CallMemory, owners: Iterable[str]) -> Refs:
        """Each storage once, held."""
        keys = {self._key(placed, memory, owner): owner for owner in owners}
        keys.pop(None, None)
        for key, owner in keys.items():
            self.live.hold(key, memory.later.size_bytes[owner])
        return [(owner, key) for key, owner in keys.items()]

    def _key(self, placed: StageCall, memory: CallMemory, owner: str) -> Hashable:
        block, call = memory.lowered.block, self.program.call(placed)
        if owner in memory.lowered.early:
            return None
        if owner in block.inputs:
            return self.values.get(call.arguments[block.inputs.index(owner)])
        for output, tangent in block.tangents:
            if owner == tangent:
                return self.gradients.get(call.results[block.outputs.index(output)])
        return placed.index, owner
