"""ZeRO as emitted programs execute it: tensor by tensor, of the running block alone, in the open.

Input: a program with its ZeRO stage, a cost model. Output: the bytes and seconds of one state
tensor, and what one call moves in a micro-batch and holds while it runs. With pieces of ceil(n / D)
elements over D data ranks, g the gather of a parameter, r the scatter of its gradient:

    stage 1   once per step: r, then g after the update
    stage 2   r in every micro-batch, g once per step
    stage 3   r in every micro-batch, g before each forward and backward that reads weights

Sums of a gradient over the tensor axis wait for the pieces; other moves on it come before r.
`planner.exchange` has the habits of other stacks: buckets, prefetching, hiding.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import TypeAlias

from ir.graph import DTYPE_BYTES, State
from ir.layout import DATA
from ir.offload import offloads_optimizer
from ir.spmd import Spmd, StageCall
from ir.topology import CPU
from planner.cost import CostModel
from planner.exchange_memory import scattering_bytes, tail_of
from planner.offload import with_hosted_state
from planner.price import OPTIMIZER_TENSORS, StateCost, least_state_cost, state_cost


def held_costs(spmd: Spmd, cost: CostModel, optimizer: str) -> dict[str, StateCost]:
    """Of every state tensor; those of repeated blocks are alike, and priced once."""
    found: dict[str, StateCost] = {}
    alike: dict[Hashable, StateCost] = {}
    for item in spmd.graph.state:
        name = item.name
        place = spmd.state[name], spmd.gradient_place(name)
        key = (item.type, item.trainable, place, spmd.zero_of(name), spmd.is_hosted(name))
        if key not in alike:
            alike[key] = held_cost(spmd, name, cost, optimizer)
        found[name] = alike[key]
    return found


def held_cost(spmd: Spmd, name: str, cost: CostModel, optimizer: str) -> StateCost:
    """What holding, syncing and updating one state tensor takes on a stage that has it."""
    divides = spmd.zero_of(name) > 0
    found = (_divided_cost if divides else state_cost)(spmd, name, cost, optimizer)
    on_gpu = cost.cluster.device.name != CPU
    found = replace(found, tail=tail_of(spmd, name, optimizer, on_gpu=on_gpu))
    return with_hosted_state(found, cost, optimizer) if spmd.is_hosted(name) else found


def _divided_cost(spmd: Spmd, name: str, cost: CostModel, optimizer: str) -> StateCost:
    zero = spmd.zero_of(name)
    local, ranks = spmd.state_type(name), spmd.degrees.data
    piece_bytes = ceil(local.elements(1) / ranks) * DTYPE_BYTES[local.dtype]
    padded_bytes = piece_bytes * ranks
    gather_s = cost.collective_s("all_gather", padded_bytes, DATA)
    gather_each_s = gather_s if zero == 3 else 0.0
    if not spmd.state_of[name].trainable:
        return StateCost(piece_bytes, gathered_bytes=padded_bytes, gather_s=gather_each_s)
    state_bytes = OPTIMIZER_TENSORS[optimizer] * piece_bytes
    gradient_bytes = spmd.gradient_type(name).bytes(1)
    before_s, after_s = _tensor_axis_s(spmd, name, cost, piece_bytes)
    scatter_s = before_s + cost.collective_s("reduce_scatter", padded_bytes, DATA)
    once_s = after_s + (scatter_s if zero == 1 else 0.0) + (gather_s if zero < 3 else 0.0)
    return StateCost(
        piece_bytes if zero == 3 else local.bytes(1),
        piece_bytes if zero >= 2 else gradient_bytes,
        state_bytes, once_s, cost.optimizer_s(piece_bytes, state_bytes),
        gathered_bytes=padded_bytes, summed_bytes=gradient_bytes, summed_tensors=1,
        gather_s=gather_each_s,
        scatter_s=scatter_s if zero >= 2 else 0.0,
        scattering_bytes=scattering_bytes(spmd, name) if zero >= 2 else 0,
    )  # fmt: skip


def least_held_cost(
    item: State, cost: CostModel, optimizer: str, zero: int, offload: str = "none"
) -> StateCost:
    """As `held_cost`, when the tensor axis cuts the tensor and its gradient evenly and moves
    nothing: what no sharding beats."""
    found = _least_device_cost(item, cost, optimizer, zero)
    return with_hosted_state(found, cost, optimizer) if offloads_optimizer(offload) else found


def _least_device_cost(item: State, cost: CostModel, optimizer: str, zero: int) -> StateCost:
    ranks = cost.mesh.data
    divides = item.kind == "parameter" and ranks > 1 and (item.trainable or zero == 3)
    if zero == 0 or not divides:
        return least_state_cost(item, cost, optimizer, cost.mesh.tensor)
    elements = item.type.elements(1) // cost.mesh.tensor
    size = DTYPE_BYTES[item.type.dtype]
    whole_bytes, piece_bytes = elements * size, elements // ranks * size
    held_bytes = piece_bytes if zero == 3 else whole_bytes
    gather_s = cost.collective_s("all_gather", piece_bytes * ranks, DATA)
    gather_each_s = gather_s if zero == 3 else 0.0
    if not item.trainable:
        return StateCost(held_bytes, gather_s=gather_each_s)
    state_bytes = OPTIMIZER_TENSORS[optimizer] * piece_bytes
    scatter_s = cost.collective_s("reduce_scatter", piece_bytes * ranks, DATA)
    return StateCost(
        held_bytes, piece_bytes if zero >= 2 else whole_bytes, state_bytes,
        (scatter_s if zero == 1 else 0.0) + (gather_s if zero < 3 else 0.0),
        cost.optimizer_s(piece_bytes, state_bytes), summed_bytes=whole_bytes, summed_tensors=1,
        gather_s=gather_each_s, scatter_s=scatter_s if zero >= 2 else 0.0,
    )  # fmt: skip


def _tensor_axis_s(
    spmd: Spmd, name: str, cost: CostModel, piece_bytes: int
) -> tuple[float, float]:
    """Of a gradient's moves on the tensor axis: on the whole gradient before, on pieces after."""
    whole_bytes, local_bytes = spmd.state_of[name].type.bytes(1), spmd.state_type(name).bytes(1)
    before_s = after_s = 0.0
    for op, axis, _, _ in spmd.gradient_sync(name):
        if axis == DATA:
            continue
        if op == "all_reduce":
            after_s += cost.collective_s(op, piece_bytes, axis)
        else:
            size_bytes = local_bytes if op == "all_to_all" else whole_bytes
            before_s += cost.collective_s(op, size_bytes, axis)
    return before_s, after_s


def tied_s(
    program: Spmd, names: Sequence[str], state: Mapping[str, StateCost], cost: CostModel
) -> float:
    """Gradients of parameters that several pipeline ranks hold are summed over these; pieces of
    them where they are divided, also where they are whole until the step."""
    seconds, ranks = 0.0, cost.mesh.pipeline
    for name in names:
        size_bytes = state[name].gradient_bytes
        if program.zero_of(name) == 1:
            size_bytes = ceil(size_bytes / program.degrees.data)
        holders = {stage % ranks for stage in program.stages_of_state(name)}
        if size_bytes and len(holders) > 1:
            seconds += 2 * cost.send_s(size_bytes)
    return seconds


@dataclass(frozen=True, slots=True)
class Moves:
    """Of one call: seconds of a micro-batch's forward and backward, and bytes that are whole while
    it runs."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    whole_bytes: int = 0


NOTHING = Moves()
Names: TypeAlias = "tuple[tuple[str, ...], ...]"
NO_NAMES: Names = ((), (), (), ())


@dataclass
class ZeroMoves:
    """The moves of any call, each kind computed once; `state` has the cost of each state tensor."""

    program: Spmd
    state: Mapping[str, StateCost]
    known: dict[Names, Moves] = field(default_factory=dict)
    names: dict[tuple[int, str], Names] = field(default_factory=dict)

    def of(self, placed: StageCall) -> Moves:
        if self.program.zero < 2:
            return NOTHING
        names = self.names_of(placed)
        if names not in self.known:
            self.known[names] = self._moves(*names)
        return self.known[names]

    def names_of(self, placed: StageCall) -> Names:
        """What a call gathers for its prologue, forward and backward, and what it scatters."""
        if self.program.zero < 2:
            return NO_NAMES
        key = (placed.index, placed.keep)
        if key not in self.names:
            program = self.program
            phases = ("prologue", "forward", "backward")
            gathered = (program.gathered(placed, phase) for phase in phases)
            self.names[key] = (*gathered, program.scattered(placed))
        return self.names[key]

    def _moves(
        self, early: tuple[str, ...], forward: tuple[str, ...], backward: tuple[str, ...],
        scattered: tuple[str, ...],
    ) -> Moves:  # fmt: skip
        gathered_bytes = [
            sum(self.state[name].gathered_bytes for name in names)
            for names in (early, forward, backward)
        ]
        gradient_bytes = sum(self.state[name].summed_bytes for name in scattered)
        return Moves(
            self._gather_s(forward) + self._gather_s(early) / self.program.degrees.micro_batches,
            self._gather_s(backward) + sum(self.state[name].scatter_s for name in scattered),
            max(*gathered_bytes[:2], gathered_bytes[2] + gradient_bytes),
        )

    def _gather_s(self, names: tuple[str, ...]) -> float:
        return sum(self.state[name].gather_s for name in names)
