"""The bytes of one pipeline stage: state, what is kept per micro-batch, the largest working set.

Input: the program with its stages, the pieces with their menus, the cost of each state tensor.
Output: the parts of a `StageCost`. Values that several blocks of a stage keep count once.
"""

from __future__ import annotations

from collections.abc import Mapping

from ir.plan import StageCost
from ir.spmd import Spmd, StageCall
from planner.cost import CostModel
from planner.exchange import zero_members
from planner.pieces import Pieces
from planner.price import StateCost
from planner.recompute import MenuPoint
from planner.schedule import StageTime
from planner.zero import ZeroMoves


def point_of(found: Pieces, placed: StageCall) -> MenuPoint:
    """The menu point of a placed call."""
    return next(p for p in found.menus[placed.variant] if p.label == placed.keep)


def early_bytes(found: Pieces, variant: int) -> int:
    """Results of the prologue, which last all step."""
    lowered = found.lowered[variant]
    return sum(lowered.types[name].bytes(1) for name in lowered.early)


def stage_cost(
    program: Spmd, stage: int, found: Pieces, state: StateCost, gathered_bytes: int,
    sent_bytes: int, flights: float, times: StageTime, moves: ZeroMoves,
) -> StageCost:  # fmt: skip
    """`state`: of the whole stage; `flights`: micro-batches that are kept at the peak, each with
    `sent_bytes` of outputs."""
    held: dict[object, int] = {}
    transient = inner = on_host = 0
    for placed in program.stages[stage]:
        point, storage = point_of(found, placed), found.storages[placed.variant]
        inner += point.inner_bytes
        on_host += point.host_bytes
        working = point.transient_bytes + moves.of(placed).whole_bytes
        transient = max(transient, working + early_bytes(found, placed.variant))
        call, block = program.call(placed), program.block(placed)
        values = dict(zip(block.inputs, call.arguments, strict=True))
        values |= dict(zip(found.lowered[placed.variant].outputs, call.results, strict=True))
        for name in (*point.saved, *point.inputs):
            held[values.get(name, (placed.index, name))] = storage.size_bytes[name]
    return StageCost(
        *times, state.parameter_bytes, state.gradient_bytes, state.optimizer_bytes,
        int(flights * (inner + sum(held.values()) + sent_bytes)), transient + gathered_bytes,
        int(flights * on_host),
    )  # fmt: skip


def sent_bytes(program: Spmd, stage: int, cost: CostModel) -> int:
    """Outputs per micro-batch that a stage holds until their gradients come back."""
    if not cost.traits.memory.keeps_outputs:
        return 0
    sent = [m for m in program.messages if m.source == stage and m.gradient]
    return sum(message.type.bytes(1) for message in sent)


def gathered_bytes(
    program: Spmd, stage: int, state: Mapping[str, StateCost], cost: CostModel
) -> int:
    """ZeRO-3: the whole parameters of the running block and of the next one, which is being
    gathered, and the gradients of one on their way."""
    if cost.traits.zero_stage < 3 or zero_members(cost) == 1:
        return 0
    largest, gradients = [0, 0], 0
    for placed in program.stages[stage]:
        names = dict.fromkeys(program.call(placed).arguments)
        items = [state[name] for name in names if name in state]
        largest = sorted([*largest, sum(item.gathered_bytes for item in items)])[-2:]
        gradients = max(gradients, sum(item.summed_bytes for item in items))
    return sum(largest) + gradients
