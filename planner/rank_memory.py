"""The most bytes that a pipeline rank needs beside its state, from the order of its instructions.

Input: what every rank does in a step, the `StageMemory` of the rank's stages, what crosses between
stages. Output: bytes. An action finds there what the rank's stages hold of all micro-batches, and
needs its own on top. With several stages per rank a value can also come before it is asked for,
since a channel gives things in the order of their sending. What a stage hands on to one of the same
rank they share (`planner.shared_values`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from ir.schedules import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action
from ir.spmd import Message
from planner.shared_values import shared_bytes
from planner.stage_memory import StageMemory

Order = Sequence[Sequence[Action]]
Letter = tuple[str, int, int, int, bool]
"""A value, from stage to stage, of a micro-batch; whether it is the gradient on its way back."""
Name = tuple[str, int, int, bool]
"""The same of all micro-batches."""


def rank_bytes(
    order: Order, rank: int, stages: Mapping[int, StageMemory], messages: Sequence[Message]
) -> int:
    """The most at any moment of the rank's actions; `stages`: the rank's, by number."""
    waiting = shared = [0] * len(order[rank])
    if len(stages) > 1:
        waiting = _waiting_bytes(order, rank, messages)
        shared = shared_bytes(order[rank], stages, messages)
    held = peak = 0
    for action, *more_bytes in zip(order[rank], waiting, shared, strict=True):
        needed, left = _change(stages[action.stage], action.kind)
        peak = max(peak, held + needed + sum(more_bytes))
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
    """What has come and is not asked for yet, or is a gradient that another stage here left, during
    each action of the rank."""
    ranks = len(order)
    post = _Post(messages, lambda stage: stage % ranks == rank)
    due = {
        source: deque(letter for action in actions for letter in post.sent(action))
        for source, actions in enumerate(order)
    }
    there: set[Letter] = set()
    found, waiting_bytes = [], 0
    for action in order[rank]:
        for letter in post.taken(action):
            while letter not in there:
                came = due[letter[1] % ranks].popleft()
                there.add(came)
                waiting_bytes += post.sizes[_name(came)]
            there.remove(letter)
            waiting_bytes -= post.sizes[_name(letter)]
        found.append(waiting_bytes)
        for letter in post.sent(action):
            if letter not in there:
                there.add(letter)
                waiting_bytes += post.sizes[_name(letter)]
    return found


class _Post:
    """What actions send to the stages of one rank, and take there, in the order of the layout."""

    def __init__(self, messages: Sequence[Message], is_here: Callable[[int], bool]) -> None:
        self.sizes: dict[Name, int] = {}
        self._sent: dict[tuple[bool, int], list[Name]] = {}
        self._taken: dict[tuple[bool, int], list[Name]] = {}
        for m in sorted(messages, key=lambda message: message.source):  # as the layout lists them
            ways = [(m.source, m.target, False, m.type), (m.target, m.source, True, m.gradient)]
            for source, target, is_back, kind in ways:
                if kind is None or not is_here(target):
                    continue
                name = (m.value, source, target, is_back)
                self.sizes[name] = 0 if is_here(source) and not is_back else kind.bytes(1)
                self._sent.setdefault((is_back, source), []).append(name)
                self._taken.setdefault((is_back, target), []).append(name)

    def sent(self, action: Action) -> Iterator[Letter]:
        """To the rank's stages."""
        return _letters(self._sent, action)

    def taken(self, action: Action) -> Iterator[Letter]:
        """What one of the rank's actions waits for."""
        return _letters(self._taken, action)


def _letters(names: Mapping[tuple[bool, int], Sequence[Name]], action: Action) -> Iterator[Letter]:
    if action.kind != BACKWARD_WEIGHT:
        for value, source, target, is_back in names.get((action.kind != FORWARD, action.stage), ()):
            yield value, source, target, action.micro, is_back


def _name(letter: Letter) -> Name:
    value, source, target, _, is_back = letter
    return value, source, target, is_back
