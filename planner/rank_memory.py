"""The most bytes that a pipeline rank needs beside its state, from the order of its instructions.

Input: what every rank does in a step, the `StageMemory` of the rank's stages, what crosses between
stages. Output: bytes. An action finds there what the rank's stages hold of all micro-batches, and
needs its own on top. With several stages per rank a value can also come before it is asked for,
since a channel gives things in the order of their sending, or wait for a stage of the same rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from ir.schedules import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action
from ir.spmd import Message
from planner.stage_memory import StageMemory

Order = Sequence[Sequence[Action]]
Letter = tuple[str, int, int, int, bool]
"""A value, from stage to stage, of a micro-batch; whether it is the gradient on its way back."""


def rank_bytes(
    order: Order, rank: int, stages: Mapping[int, StageMemory], messages: Sequence[Message]
) -> int:
    """The most at any moment of the rank's actions; `stages`: the rank's, by number."""
    waiting = _waiting_bytes(order, rank, messages) if len(stages) > 1 else [0] * len(order[rank])
    held = peak = 0
    for action, more_bytes in zip(order[rank], waiting, strict=True):
        needed, left = _change(stages[action.stage], action.kind)
        peak = max(peak, held + needed + more_bytes)
        held += left
    return peak


def _change(stage: StageMemory, kind: str) -> tuple[int, int]:
    """(the most during an action beside what was held, what it adds to that)."""
    saved, pending = stage.saved_bytes, stage.pending_bytes
    if kind == FORWARD:
        return stage.forward_bytes, saved
    if kind == BACKWARD_WEIGHT:
        return stage.weight_bytes - pending, -pending
    left = pending if kind == BACKWARD_INPUT else 0
    return stage.backward_bytes - saved, left - saved


def _waiting_bytes(order: Order, rank: int, messages: Sequence[Message]) -> list[int]:
    """What has come, or was left by another stage here, and is not asked for yet, during each
    action of the rank."""
    messages = sorted(messages, key=lambda message: message.source)  # as the layout lists them
    sizes: dict[Letter, int] = {}
    due: dict[int, deque[Letter]] = {}
    for source, actions in enumerate(order):
        letters = [x for action in actions for x in _sent(action, messages, sizes)]
        due[source] = deque(x for x in letters if x[2] % len(order) == rank)
    there: set[Letter] = set()
    found = []
    for action in order[rank]:
        for letter in _taken(action, messages):
            while letter not in there:
                there.add(due[letter[1] % len(order)].popleft())
            there.remove(letter)
        found.append(sum(sizes[letter] for letter in there))
        own = {x for x in _sent(action, messages, {}) if x[2] % len(order) == rank}
        there |= own
    return found


def _sent(
    action: Action, messages: Sequence[Message], sizes: dict[Letter, int]
) -> Iterator[Letter]:
    """What an action sends, in the order of the layout; notes its bytes in `sizes`."""
    for m in messages:
        if action.kind == FORWARD and m.source == action.stage:
            letter = (m.value, m.source, m.target, action.micro, False)
            sizes[letter] = m.type.bytes(1)
            yield letter
        if action.kind in (BACKWARD, BACKWARD_INPUT) and m.target == action.stage and m.gradient:
            letter = (m.value, m.target, m.source, action.micro, True)
            sizes[letter] = m.gradient.bytes(1)
            yield letter


def _taken(action: Action, messages: Sequence[Message]) -> Iterator[Letter]:
    """What an action waits for."""
    for m in messages:
        if action.kind == FORWARD and m.target == action.stage:
            yield m.value, m.source, m.target, action.micro, False
        if action.kind in (BACKWARD, BACKWARD_INPUT) and m.source == action.stage and m.gradient:
            yield m.value, m.target, m.source, action.micro, True
