"""What a rank sends to the ranks of other stages, and takes from them.

Input: the layout with every rank's instructions. Output: `Mail`, with one channel per rank and
direction. A channel has no tags, and with several stages per rank its sender may send in another
order than its taker asks. Both know all lists, so the taker takes in the order of sending, and
keeps what it needs later. Between stages of one rank nothing moves.
"""

from collections import deque

import torch

from runtime.layout import Layout
from runtime.mesh import Mesh
from runtime.schedule import Link, Message, Receive, Send, instructions
from runtime.transport import Channel, Transport


class Mail:
    """One rank's post. Built on all ranks at the same time."""

    def __init__(self, layout: Layout, mesh: Mesh, transport: Transport) -> None:
        self._homes = layout.homes
        self._here = mesh.pipeline.index
        self._transfers = {
            (transfer.value, stage, transfer.peer): transfer
            for stage, tables in enumerate(layout.stages)
            for transfer in tables.sends
        }
        links = all_links(layout)
        lists = [instructions(actions, links) for actions in layout.order]
        self.instructions = lists[self._here]
        self._orders = {
            source: [s.message for s in steps if isinstance(s, Send) and self._comes(s.message)]
            for source, steps in enumerate(lists)
            if source != self._here
        }
        pairs = set[tuple[int, int]]().union(*map(self._pairs, lists))
        self._channels = _open_channels(pairs, mesh, transport)
        self._due: dict[int, deque[Message]] = {}
        self._there: dict[Message, torch.Tensor] = {}

    def begin(self) -> None:
        """The start of a step: all messages are still to come."""
        self._due = {source: deque(order) for source, order in self._orders.items()}
        self._there = {}

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        """Hands a tensor over; it may not be changed in place any more."""
        target = self._homes[message.target]
        if target == self._here:
            self._there[message] = tensor
        else:
            self._channels[self._here, target].send(tensor)

    def receive(self, message: Message) -> torch.Tensor:
        """The tensor of a message; waits for it, and for all that its sender sent before."""
        source = self._homes[message.source]
        while message not in self._there:
            first = self._due[source].popleft()
            shape, dtype = self._kind(first)
            self._there[first] = self._channels[source, self._here].receive(shape, dtype)
        return self._there.pop(message)

    def flush(self) -> None:
        """Waits until everything sent has left."""
        for channel in self._channels.values():
            channel.flush()

    def _comes(self, message: Message) -> bool:
        return self._homes[message.target] == self._here

    def _kind(self, message: Message) -> tuple[tuple[int, ...], torch.dtype]:
        if message.is_gradient:
            transfer = self._transfers[message.value, message.target, message.source]
            return transfer.gradient_shape, transfer.dtype
        transfer = self._transfers[message.value, message.source, message.target]
        return transfer.shape, transfer.dtype

    def _pairs(self, steps: tuple[object, ...]) -> set[tuple[int, int]]:
        """(source rank, target rank) of every channel that a rank of these steps uses."""
        messages = [step.message for step in steps if isinstance(step, (Receive, Send))]
        pairs = {(self._homes[m.source], self._homes[m.target]) for m in messages}
        return {(source, target) for source, target in pairs if source != target}


def all_links(layout: Layout) -> tuple[Link, ...]:
    """Every value that goes from stage to stage, in the order in which the senders list them."""
    return tuple(
        Link(transfer.value, source, transfer.peer, transfer.gradient)
        for source, stage in enumerate(layout.stages)
        for transfer in stage.sends
    )


def _open_channels(
    pairs: set[tuple[int, int]], mesh: Mesh, transport: Transport
) -> dict[tuple[int, int], Channel]:
    """Those of this rank, of `pairs` of the whole line; in one order on all ranks."""
    line, here, channels = mesh.shape.line(mesh.rank, "pipeline"), mesh.pipeline.index, {}
    for source, target in sorted(pairs):
        if here in (source, target):
            channels[source, target] = transport.channel(line[source], line[target])
        else:
            transport.stand_by()
    return channels
