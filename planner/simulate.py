"""The timeline of a pipelined step: discrete events over what every rank does.

Input: a `Pipeline`. Output: a `Timeline` of named spans, and its makespan. A rank runs its events
one after the other. A transfer starts when the value is there, its taker asks for it and its ports
are free. When all ranks of the pipeline have run their last action they tell each other the loss;
then gradients are exchanged, then parameters updated.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from ir.schedules import Action
from planner.pipeline import Event, Message, Pipeline

COMPUTE, EXCHANGE = "compute", "exchange"


class Span(NamedTuple):
    """One thing on one stream of a pipeline rank; `action` for computations."""

    rank: int
    stream: str
    start_s: float
    end_s: float
    name: str
    action: Action | None = None


@dataclass(frozen=True)
class Timeline:
    """All spans by rank, stream and start; `pipeline_s` ends with the last backward. `speed`: the
    pipeline's, of ranks that share cores."""

    spans: tuple[Span, ...]
    pipeline_s: float
    makespan_s: float
    speed: float = 1.0

    def actions(self, rank: int) -> tuple[Action, ...]:
        """What a rank computes, in order of time."""
        return tuple(s.action for s in self.spans if s.rank == rank and s.action is not None)


def simulate(pipeline: Pipeline) -> Timeline:
    """Runs all events; `ValueError` if the ranks wait for each other for ever."""
    run = _Run(pipeline)
    run.all_events()
    pipeline_s = max(run.clock)
    spans = [*run.spans, *_tails(pipeline, pipeline_s)]
    makespan_s = max([pipeline_s, *(span.end_s for span in spans)])
    ordered = tuple(sorted(spans, key=lambda s: s[:4]))
    return Timeline(ordered, pipeline_s, makespan_s, pipeline.speed)


def _tails(pipeline: Pipeline, start_s: float) -> Iterator[Span]:
    for rank, tail in enumerate(pipeline.tails):
        middle_s = start_s + tail.sync_s
        if tail.sync_s:
            yield Span(rank, EXCHANGE, start_s, middle_s, "exchange of gradients")
        if tail.update_s:
            yield Span(rank, COMPUTE, middle_s, middle_s + tail.update_s, "optimizer")


class _Run:
    """A simulation: clocks, messages that are there, and ranks that wait for one."""

    def __init__(self, pipeline: Pipeline) -> None:
        ranks = range(len(pipeline.order))
        self.events = [list(pipeline.events(rank))[::-1] for rank in ranks]  # the next one is last
        self.clock = [0.0 for _ in ranks]
        self.there_s: dict[Message, float] = {}
        self.free_s: dict[Hashable, float] = {}
        self.waiting: dict[Message, int] = {}
        self.queue: list[tuple[float, int]] = []
        self.spans: list[Span] = []
        self.both_sides = not pipeline.senders_wait

    def all_events(self) -> None:
        """Always the event that can start first; what is queued can only be held up by ports."""
        for rank in range(len(self.events)):
            self._queue_next(rank)
        while self.queue:
            start_s, rank = heappop(self.queue)
            possible_s = self._start_s(rank)
            if possible_s > start_s:
                heappush(self.queue, (possible_s, rank))
            else:
                self._run(rank, start_s)
                self._queue_next(rank)
        if self.waiting:
            message, rank = next(iter(self.waiting.items()))
            raise ValueError(f"rank {rank} waits for {message}, which is never sent")

    def _queue_next(self, rank: int) -> None:
        if not self.events[rank]:
            return
        needs = self.events[rank][-1].needs
        if needs is None or needs in self.there_s:
            heappush(self.queue, (self._start_s(rank), rank))
        else:
            self.waiting[needs] = rank

    def _start_s(self, rank: int) -> float:
        event = self.events[rank][-1]
        there_s = self.there_s[event.needs] if event.needs is not None else 0.0
        return max(self.clock[rank], there_s, *(self.free_s.get(p, 0.0) for p in event.ports), 0.0)

    def _run(self, rank: int, start_s: float) -> None:
        event = self.events[rank].pop()
        end_s = self.clock[rank] = start_s + event.seconds
        self.spans += self._spans(rank, event, start_s, end_s)
        self.free_s |= dict.fromkeys(event.ports, end_s)
        for message in event.makes:
            self.there_s[message] = end_s
            if message in self.waiting:
                self._queue_next(self.waiting.pop(message))

    def _spans(self, rank: int, event: Event, start_s: float, end_s: float) -> Iterator[Span]:
        """A transfer is on the streams of those whom it keeps busy, or whose port."""
        times = start_s, end_s
        match event.kind:
            case "compute":
                yield Span(rank, COMPUTE, *times, event.name, event.action)
            case "send":
                yield Span(rank, f"send to {event.peer}", *times, event.name)
            case "take" if event.peer >= 0:
                yield Span(rank, f"receive from {event.peer}", *times, event.name)
                if self.both_sides:
                    yield Span(event.peer, f"send to {rank}", *times, event.name)
