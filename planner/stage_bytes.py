"""Bytes of a pipeline stage that no walk of its functions finds: of the batch, and of habits.

Input: the program with its stages, the pieces with their menus, the cost of each state tensor.
Output: bytes of one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ir.spmd import Spmd, StageCall
from planner.cost import CostModel
from planner.exchange import zero_members
from planner.pieces import Pieces
from planner.price import StateCost
from planner.recompute import MenuPoint


def point_of(found: Pieces, placed: StageCall) -> MenuPoint:
    """The menu point of a placed call."""
    return next(p for p in found.menus[placed.variant] if p.label == placed.keep)


def early_bytes(found: Pieces, variant: int) -> int:
    """Results of the prologue, which last all step."""
    lowered = found.lowered[variant]
    return sum(lowered.types[name].bytes(1) for name in lowered.early)


def batch_bytes(program: Spmd, stages: Iterable[int]) -> int:
    """This data rank's rows of the inputs that stages read, of all micro-batches; each once."""
    read = {v for s in stages for p in program.stages[s] for v in program.call(p).arguments}
    total = 0
    for item in (item for item in program.graph.inputs if item.name in read):
        whole_bytes = item.type.bytes(program.degrees.batch)
        total += whole_bytes // (1 if item.batch_dim is None else program.degrees.data)
    return total


def is_shared(program: Spmd, name: str, ranks: int) -> bool:
    """Whether several pipeline ranks hold a state tensor."""
    return len({stage % ranks for stage in program.stages_of_state(name)}) > 1


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
