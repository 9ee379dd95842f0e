"""What a block keeps from forward for backward: a menu of points between everything and nothing.

Input: a lowered block with its storages and times. Output: `MenuPoint`s that no other one beats;
those inside are solved by `planner.recompute_program`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from ir.graph import Node
from ir.lower import Lowered
from ir.recompute import backward_nodes, kept_values
from planner.frontier import frontier
from planner.fusion import is_fusable
from planner.liveness import peak_bytes
from planner.offload import Hosting, pinned_bytes
from planner.price import COLLECTIVES, NodeTimes, Seconds
from planner.recompute_program import KeptProgram
from planner.solver import Infeasible
from planner.storage import Storage

FINER = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Of the way between two points of a menu, from the smaller one: where `finer` looks for more."""
TOUCH = 1e-6
"""Relative room of a budget for rounding."""
FULL = "full"
"""The point that runs a whole block again, with what its kernels keep by themselves."""
FULL_ON_HOST = "full on the host"
STATISTICS = ("cross_entropy",)
"""Fused ops whose small results are kept rather than made again."""


@dataclass(frozen=True)
class MenuPoint:
    """One way to run a block: time and bytes per micro-batch on one device.

    `kept`: the forward values held; `saved`: the storages of the block's own values among what
    is held; `inputs`: the block's activation inputs that are held too. `inner_bytes` of
    `saved_bytes` are no values: kernels keep them by themselves. `hosted`: the held values that lie
    in host memory, `host_bytes` of it; their copies, `copy_s` each way, are in both times.
    """

    label: str
    kept: frozenset[str]
    forward: Seconds
    backward: Seconds
    saved: tuple[str, ...]
    inputs: tuple[str, ...]
    saved_bytes: int
    input_bytes: int
    transient_bytes: int
    inner_bytes: int = 0
    hosted: frozenset[str] = frozenset()
    host_bytes: int = 0
    copy_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Forward and backward."""
        return self.forward.total_s + self.backward.total_s

    @property
    def held_bytes(self) -> int:
        return self.saved_bytes + self.input_bytes

    def beats(self, other: MenuPoint) -> bool:
        """At least as good in time and bytes."""
        return (
            self.total_s <= other.total_s
            and self.held_bytes <= other.held_bytes
            and self.held_bytes + self.transient_bytes <= other.held_bytes + other.transient_bytes
        )


def menu(
    lowered: Lowered, storage: Storage, times: NodeTimes, always: frozenset[str],
    allowed: str | None = None, hosting: Hosting | None = None,
) -> tuple[MenuPoint, ...]:  # fmt: skip
    """Points that no other one beats, most kept first.

    `allowed`: only "none", only "full", or "selective": the points between them, if there are any.
    With `hosting` there are, behind them, those that hold some or all of their values on the host.
    """
    block = _Block(lowered, storage, times, always, hosting)
    fused = times.cost.traits.fused_elementwise
    none = block.point("none", (boundary if fused else everything)(lowered, storage, always))
    full = block.point(FULL, frozenset())
    if allowed in ("none", FULL):
        only = none if allowed == "none" else full
        return _undominated((only, *_hosted(block, only)))
    between = tuple(_interior(block, none, full))
    if allowed == "selective":
        return _undominated(between) or (none,)
    ends = (*_hosted(block, none), *_hosted(block, full))
    return _undominated((none, *between, full, *ends))


def finer(
    lowered: Lowered, storage: Storage, times: NodeTimes, always: frozenset[str],
    points: tuple[MenuPoint, ...],
) -> tuple[MenuPoint, ...]:  # fmt: skip
    """The points of a menu and, between any two that are next to each other on the device, some
    more, for what room is left beside whole steps from point to point: a bit above the line through
    both, which is why menus leave them out."""
    block = _Block(lowered, storage, times, always)
    program = KeptProgram(lowered, storage, times, always)
    there = sorted({p.held_bytes: p for p in points if not p.hosted}.items())
    most = max((size for size, _ in there), default=0)
    more = []
    for (less, _), (size, _) in pairwise(there):
        for part in FINER:
            try:
                kept, _ = program.cheapest(less + part * (size - less), most)
            except Infeasible:
                continue
            point = block.point("", kept)
            more.append(replace(point, label=f"keep {point.held_bytes / most:.1%}"))
    return (*points, *(p for p in _undominated([*points, *more]) if p not in points))


def named_point(
    lowered: Lowered, storage: Storage, times: NodeTimes, always: frozenset[str], label: str,
    kept: frozenset[str], hosted: frozenset[str] = frozenset(), hosting: Hosting | None = None,
) -> MenuPoint:  # fmt: skip
    """The point that keeps just these forward values, some of what it holds on the host."""
    return _Block(lowered, storage, times, always, hosting).point(label, kept, hosted)


def everything(lowered: Lowered, storage: Storage, always: frozenset[str]) -> frozenset[str]:
    """What backward reads of forward's values, less views of what is there anyway."""
    makers = {name: node for node in lowered.forward for name in node.outputs}
    wanted = [name for name in lowered.saved if name in makers and name not in always]
    there = set(wanted) | set(lowered.block.inputs) | set(lowered.early)

    def is_free(name: str) -> bool:
        node = makers[name]
        if not storage.is_alias(node):
            return False
        return all(u in there or (u in makers and is_free(u)) for u in node.inputs)

    return frozenset(name for name in wanted if not is_free(name))


def boundary(lowered: Lowered, storage: Storage, always: frozenset[str]) -> frozenset[str]:
    """What fused kernels leave for backward: operands of products and attention, and what the
    groups of backward start from when they make the values inside groups again."""
    wanted = everything(lowered, storage, always)
    heavy = wanted & _heavily_read(lowered, storage)
    return heavy | group_starts(lowered, wanted, heavy)


def group_starts(
    lowered: Lowered, wanted: Collection[str], kept: Collection[str], through: Collection[str] = ()
) -> frozenset[str]:
    """Results that fused groups start from when they make the values `wanted` again, beside what
    is `kept`; the ops `through` run again too."""
    makers = {name: node for node in lowered.forward for name in node.outputs}
    found: set[str] = set()
    seen: set[str] = set()

    def bring(name: str) -> None:
        if name in kept or name in seen or name not in makers:
            return
        seen.add(name)
        node = makers[name]
        is_inside = is_fusable(node, COLLECTIVES) and node.op not in STATISTICS
        if is_inside or node.op in through:
            for source in node.inputs:
                bring(source)
        else:
            found.add(name)

    for name in sorted(wanted):
        bring(name)
    return frozenset(found)


def _heavily_read(lowered: Lowered, storage: Storage) -> set[str]:
    """Values that products, attention and collectives of backward read, also through views."""
    found: set[str] = set()
    for node in reversed(lowered.backward):
        through = storage.is_alias(node) if node.outputs[0] in storage.owner else False
        if not is_fusable(node, COLLECTIVES) or (through and found & set(node.outputs)):
            found.update(node.inputs)
    return found


@dataclass(frozen=True)
class _Block:
    """What the points of one block are made from."""

    lowered: Lowered
    storage: Storage
    times: NodeTimes
    always: frozenset[str]
    hosting: Hosting | None = None

    @property
    def activations(self) -> frozenset[str]:
        return frozenset(self.lowered.block.inputs) - self.always

    def point(
        self, label: str, kept: frozenset[str], hosted: frozenset[str] = frozenset()
    ) -> MenuPoint:
        """Prices a set of kept values, with the nodes that backward then runs again."""
        point = self._device_point(label, kept)
        return self._on_host(point, hosted) if hosted else point

    def hostable(self, kept: frozenset[str]) -> frozenset[str]:
        """What may be on the host of all that is held with these kept values."""
        held = kept_values(self.lowered, kept, self.always)
        staying = self.hosting.staying if self.hosting else frozenset()
        owner = self.storage.owner
        return frozenset(name for name in held if owner[name] not in staying)

    def _on_host(self, point: MenuPoint, hosted: frozenset[str]) -> MenuPoint:
        """The same with values on the host, but in the running block."""
        assert self.hosting is not None
        sizes, owner = self.storage.size_bytes, self.storage.owner
        held = kept_values(self.lowered, point.kept, self.always)
        near = {owner[name] for name in held if name not in hosted}
        far = [o for o in dict.fromkeys(owner[name] for name in held) if o not in near]
        moved_bytes = sum(sizes[o] for o in far)
        copies = Seconds(0.0, self.hosting.copy_s(moved_bytes, len(far)))
        saved, inputs = (
            tuple(o for o in owners if o in near) for owners in (point.saved, point.inputs)
        )
        return replace(
            point, hosted=hosted, forward=point.forward + copies, backward=point.backward + copies,
            saved=saved, inputs=inputs,
            saved_bytes=self.storage.bytes_of(saved) + point.inner_bytes,
            input_bytes=self.storage.bytes_of(inputs),
            transient_bytes=point.transient_bytes + moved_bytes,
            host_bytes=sum(pinned_bytes(sizes[o]) for o in far), copy_s=copies.total_s,
        )  # fmt: skip

    def _device_point(self, label: str, kept: frozenset[str]) -> MenuPoint:
        lowered, storage = self.lowered, self.storage
        backward = backward_nodes(lowered, kept, self.always)
        held = kept_values(lowered, kept, self.always)
        owners = dict.fromkeys(storage.owner[name] for name in held)
        saved = tuple(o for o in owners if o not in lowered.block.inputs)
        inputs = tuple(o for o in owners if o in self.activations)
        inner_bytes = 0 if label in (FULL, FULL_ON_HOST) else self._inner_kept(backward)
        return MenuPoint(
            label, kept, self.times.total(lowered.forward, {*held, *lowered.outputs}),
            self.times.total(backward, {g for _, g in lowered.gradients}), saved, inputs,
            storage.bytes_of(saved) + inner_bytes, storage.bytes_of(inputs),
            max(self._forward_bytes(held), self._backward_bytes(backward, held))
            + self._inner_working(), inner_bytes,
        )  # fmt: skip

    def _inner_kept(self, backward: Iterable[Node]) -> int:
        """What kernels of forward keep by themselves, unless they run again."""
        again = {node.outputs[0] for node in backward}
        inner = self.times.inner
        kept_bytes = sum(b for name, (b, _) in inner.items() if name not in again)
        return int(kept_bytes) + self.times.mask_bytes

    def _inner_working(self) -> int:
        return int(max((b for _, b in self.times.inner.values()), default=0.0))

    def _forward_bytes(self, held: tuple[str, ...]) -> int:
        """Beside what is kept: working values, inputs that die here, outputs."""
        return peak_bytes(
            self.lowered.forward, self.storage, present=self.activations,
            until_end=self.lowered.outputs, uncounted=[*held, *self.always, *self.lowered.early],
        )  # fmt: skip

    def _backward_bytes(self, backward: Iterable[Node], held: tuple[str, ...]) -> int:
        """Beside what is kept, which dies on the way."""
        lowered = self.lowered
        tangents = [tangent for _, tangent in lowered.block.tangents]
        handed_on = [g for value, g in lowered.gradients if value not in self.always]
        nodes = backward_nodes(lowered, frozenset(held), self.always)
        peak = peak_bytes(
            nodes, self.storage, present=[*held, *tangents], until_end=handed_on,
            uncounted=[*self.always, *lowered.early],
        )  # fmt: skip
        return max(0, peak - self.storage.bytes_of(n for n in held if n not in self.always))


def _interior(block: _Block, none: MenuPoint, full: MenuPoint) -> Iterable[MenuPoint]:
    """The points that the curve below all points touches, then those where the host makes the curve
    lower; where a curve touches none, the cheapest within its bytes."""
    span = none.held_bytes - full.held_bytes
    if span <= 0:
        return
    parts = block.lowered, block.storage, block.times, block.always
    alone = KeptProgram(*parts)
    lines = [(alone, line) for line in frontier(alone).lines[1:-1]]
    if block.hosting is not None:
        helped = KeptProgram(*parts, hosting=block.hosting)
        lines += [
            (helped, line) for line in frontier(helped).lines[1:-1]
            if line.value < alone.priced(line.price)[2] * (1 - TOUCH)
        ]  # fmt: skip
    for program, line in lines:
        found = program.kept_at(line.price)
        if found is None:
            try:
                found = program.cheapest(line.bytes * (1 + TOUCH), span)
            except Infeasible:
                continue
        kept, hosted = found
        point = block.point("", kept, hosted)
        words = [f"keep {point.held_bytes / none.held_bytes:.0%}"]
        if hosted:
            moved_bytes = block.storage.bytes_of(hosted)
            words.append(f"host {moved_bytes / none.held_bytes:.0%}")
        yield replace(point, label=", ".join(words))


def _hosted(block: _Block, point: MenuPoint) -> Iterable[MenuPoint]:
    """The point with all that it holds on the host, where that is possible."""
    hosted = block.hostable(point.kept) if block.hosting else frozenset()
    if hosted:
        found = block.point(point.label, point.kept, hosted)
        yield replace(found, label=f"{point.label} on the host")

def _undominated(points: Iterable[MenuPoint]) -> tuple[MenuPoint, ...]:
    """Without the points that an earlier or strictly better one beats; labels are unique."""
    found: list[MenuPoint] = []
    ordered = list(points)
    for i, point in enumerate(ordered):
        rivals = [*ordered[:i], *(p for p in ordered[i + 1 :] if not point.beats(p))]
        known = {p.label for p in found}
        if point.label not in known and not any(rival.beats(point) for rival in rivals):
            found.append(point)
    return tuple(found)
