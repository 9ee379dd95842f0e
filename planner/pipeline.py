"""A pipelined step as events: what each rank takes, computes and sends, one after the other.

Input: the schedule's order, seconds of every stage, what crosses between stages and over which
ports. Output: `Event`s per rank, in the order in which the runtime executes them: an action takes
first what it needs and then sends what it made, both in the order of the layout's tables. Between
two stages of one rank nothing moves.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ir.schedules import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action


class StageSeconds(NamedTuple):
    """One micro-batch on one stage, without transfers; `weight_s` is the weights' half of a
    backward that is split, and then not part of `backward_s`."""

    forward_s: float
    backward_s: float
    weight_s: float = 0.0


class Transfer(NamedTuple):
    """A value that stage `source` sends to stage `target` in each micro-batch; `gradient_s` of its
    gradient's way back, None if none comes."""

    value: str
    source: int
    target: int
    forward_s: float
    gradient_s: float | None


class Tail(NamedTuple):
    """Seconds of a rank once per step, after the last backward."""

    sync_s: float = 0.0
    update_s: float = 0.0


class Message(NamedTuple):
    """One transfer of one micro-batch, from stage to stage; `is_gradient` for the way back."""

    value: str
    source: int
    target: int
    micro: int
    is_gradient: bool


Ports = tuple[Hashable, Hashable]
"""What a transfer leaves by and enters by."""


class Event(NamedTuple):
    """What a rank does next. It waits for `needs` and for its `ports`, and `makes` messages.

    `peer`: the rank at the other side of a transfer; -1 where nothing moves.
    """

    kind: str  # "compute" | "take" | "send"
    seconds: float
    action: Action
    needs: Message | None = None
    makes: tuple[Message, ...] = ()
    ports: tuple[Hashable, ...] = ()
    peer: int = -1

    @property
    def name(self) -> str:
        """For a person: `forward 3 of stage 1`, `x 3`, `gradient of x 3`."""
        message = self.needs or self.makes[0] if self.kind != "compute" else None
        if message is not None:
            of = "gradient of " if message.is_gradient else ""
            return f"{of}{message.value}, micro-batch {message.micro}"
        return f"{WORDS[self.action.kind]} {self.action.micro}, stage {self.action.stage}"


WORDS = {
    FORWARD: "forward", BACKWARD: "backward", BACKWARD_INPUT: "backward of inputs",
    BACKWARD_WEIGHT: "backward of weights",
}  # fmt: skip


@dataclass(frozen=True)
class Pipeline:
    """A step. `tails` per rank; `ports`: (the sender's, the taker's) by (rank, rank).

    `senders_wait`: a transfer keeps first its sender and then its taker busy, as between processes
    of one machine; else only the taker. `speed`: in the mean of the step, how many times as fast as
    in `stages` and `transfers` ranks are that share cores (`planner.schedule.mean_speed`).
    """

    order: tuple[tuple[Action, ...], ...]
    stages: tuple[StageSeconds, ...]
    transfers: tuple[Transfer, ...] = ()
    tails: tuple[Tail, ...] = ()
    ports: Mapping[tuple[int, int], Ports] = field(default_factory=dict)
    senders_wait: bool = False
    speed: float = 1.0

    def rank_of(self, stage: int) -> int:
        return stage % len(self.order)

    @cached_property
    def coming(self) -> dict[int, list[Transfer]]:
        """What each stage takes."""
        return {s: [t for t in self.transfers if t.target == s] for s in range(len(self.stages))}

    @cached_property
    def going(self) -> dict[int, list[Transfer]]:
        """What each stage sends."""
        return {s: [t for t in self.transfers if t.source == s] for s in range(len(self.stages))}

    def events(self, rank: int) -> Iterator[Event]:
        """Everything that a rank does before its gradients are exchanged."""
        for action in self.order[rank]:
            takes, makes = self._moved(action)
            for message, seconds in takes:
                yield self._take(action, message, seconds / self.speed)
            sends = [pair for pair in makes if self.senders_wait and self._peer(pair[0]) >= 0]
            done = tuple(pair[0] for pair in makes if pair not in sends)
            yield Event("compute", self._own_s(action) / self.speed, action, makes=done)
            for message, seconds in sends:
                yield self._send(action, message, seconds / self.speed)

    def _moved(
        self, action: Action
    ) -> tuple[list[tuple[Message, float]], list[tuple[Message, float]]]:
        """(what an action takes, what it sends), each with its seconds."""
        stage, kind, micro = action
        if kind == BACKWARD_WEIGHT:
            return [], []
        forward = [
            [(Message(t.value, t.source, t.target, micro, False), t.forward_s) for t in transfers]
            for transfers in (self.coming[stage], self.going[stage])
        ]
        if kind == FORWARD:
            return forward[0], forward[1]
        back = [
            [
                (Message(t.value, t.target, t.source, micro, True), t.gradient_s)
                for t in transfers if t.gradient_s is not None
            ]
            for transfers in (self.going[stage], self.coming[stage])
        ]  # fmt: skip
        return back[0], back[1]

    def _own_s(self, action: Action) -> float:
        seconds = self.stages[action.stage]
        match action.kind:
            case "F":
                return seconds.forward_s
            case "W":
                return seconds.weight_s
        return seconds.backward_s

    def _peer(self, message: Message, *, taker: bool = False) -> int:
        """The other side's rank, -1 where both stages are on one."""
        source, target = self.rank_of(message.source), self.rank_of(message.target)
        return -1 if source == target else source if taker else target

    def _ports(self, message: Message) -> Ports:
        """Each carries one transfer per direction at a time."""
        pair = self.rank_of(message.source), self.rank_of(message.target)
        leaving, entering = self.ports.get(pair, pair)
        return (leaving, "out"), (entering, "in")

    def _take(self, action: Action, message: Message, seconds: float) -> Event:
        peer = self._peer(message, taker=True)
        if peer < 0:
            return Event("take", 0.0, action, needs=message)
        ports = self._ports(message)
        ports_here = ports[1:] if self.senders_wait else ports
        return Event("take", seconds, action, needs=message, ports=ports_here, peer=peer)

    def _send(self, action: Action, message: Message, seconds: float) -> Event:
        ports = self._ports(message)[:1]
        return Event(
            "send", seconds, action, makes=(message,), ports=ports, peer=self._peer(message)
        )
