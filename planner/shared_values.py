"""Bytes of the values that stages of one pipeline rank hand on to each other: one copy for all.

Input: the actions of a rank, the `StageMemory` of its stages, what crosses between stages. Output:
bytes by action. A value is with its first stage until that has run it forward; then with the rank,
until every stage that takes it has, and none keeps it for its backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ir.schedules import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action
from ir.spmd import Message
from planner.stage_memory import StageMemory


def shared_bytes(
    actions: Sequence[Action], stages: Mapping[int, StageMemory], messages: Sequence[Message]
) -> list[int]:
    """What is there during each action, of all micro-batches."""
    near = [m for m in messages if m.source in stages and m.target in stages]
    given = {stage: [m.value for m in near if m.source == stage] for stage in stages}
    taken = {stage: [m.value for m in near if m.target == stage] for stage in stages}
    sizes = {value: size for memory in stages.values() for value, size in memory.shared.items()}
    holders: Counter[tuple[str, int]] = Counter()
    found, current = [], 0
    for stage, kind, micro in actions:
        found.append(current)
        memory = stages[stage]
        more: Iterable[str] = ()
        less: Iterable[str] = memory.keeps - memory.keeps_pending
        if kind == FORWARD:
            more, less = (*given[stage], *memory.keeps), taken[stage]
        elif kind == BACKWARD_WEIGHT:
            less = memory.keeps_pending
        elif kind != BACKWARD_INPUT:
            less = memory.keeps
        for value in more:
            current += 0 if holders[value, micro] else sizes[value]
            holders[value, micro] += 1
        for value in less:
            holders[value, micro] -= 1
            current -= 0 if holders[value, micro] else sizes[value]
    return found
