"""Runs the steps of one rank: its static list of instructions, one after the other.

Input: the stage's functions, the state and this data rank's rows of the batch. Output: `Outcome`,
the loss and metrics (known to every rank), the synchronised gradients and the new buffers. Runs
without autograd. What a micro-batch saved is freed by its backward, what it sends when it has left.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, assert_never

import torch

from runtime.errors import UsageError
from runtime.gradients import synchronised_gradients
from runtime.layout import Layout, Transfer
from runtime.mesh import Mesh
from runtime.program import Context, Stage, build_namespace
from runtime.results import Announcer, Results, new_buffers
from runtime.schedule import (
    Backward,
    Forward,
    Instruction,
    Link,
    Receive,
    ReceiveGradient,
    Reduce,
    Send,
    SendGradient,
    Step,
    instructions,
)
from runtime.state import StageGroups, State
from runtime.transport import Channel, Transport
from runtime.zero import gradient_leaves, weight_leaves


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step found; gradients and buffers per state entry, None where nothing is here."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]
    gradients: tuple[torch.Tensor | None, ...]
    buffers: tuple[torch.Tensor | None, ...]


@dataclass(slots=True)
class _Live:
    """What exists in the middle of a step; tensors by (micro-batch, value)."""

    inputs: dict[str, torch.Tensor]
    context: Context
    results: Results
    received: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    outgoing: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    saved: dict[int, Any] = field(default_factory=dict)
    received_gradients: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    outgoing_gradients: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)


class Executor:
    """Runs the steps of one rank. Built on all ranks at the same time."""

    def __init__(
        self,
        layout: Layout,
        stage: Stage,
        state: State,
        *,
        mesh: Mesh,
        transport: Transport,
        groups: StageGroups,
    ) -> None:
        index = mesh.pipeline.index
        self._layout = layout
        self._stage = stage
        self._state = state
        self._mesh = mesh
        self._device = transport.device
        self._groups = groups
        self._here = layout.stages[index]
        self._receives = {transfer.value: transfer for transfer in self._here.receives}
        self._last_peer = {transfer.value: transfer.peer for transfer in self._here.sends}
        self._sends = {(transfer.value, transfer.peer): transfer for transfer in self._here.sends}
        self._batch_dims = {x.name: x.batch_dim for x in layout.inputs}
        tree = dict(self._here.weights)
        self._weights = build_namespace(tree, weight_leaves(state, mesh))
        self._accumulators = build_namespace(tree, gradient_leaves(state, mesh))
        updates = [entry.update for entry in layout.state if entry.update is not None]
        scalars = (layout.loss, *layout.metrics)
        self._wanted = [scalar for scalar in (*scalars, *updates) if scalar.stage == index]
        self._announcer = Announcer(scalars, mesh, transport.device)
        links = all_links(layout)
        self._channels = _open_channels(links, mesh, transport)
        self.instructions: tuple[Instruction, ...] = instructions(
            layout.schedule,
            index,
            stages=len(layout.stages),
            micro_batches=layout.micro_batches,
            links=links,
        )

    @torch.no_grad()
    def run(
        self,
        batch: Mapping[str, torch.Tensor],
        context: Context,
        update: Callable[[Outcome], None],
    ) -> Outcome:
        """One step over this data rank's rows; `update` is called at the Step instruction."""
        self._state.zero_accumulators()
        inputs = {name: batch[name].to(self._device) for name in self._here.inputs}
        context = context.at(0, 1, None)
        prologue = None
        if self._stage.prologue is not None:
            prologue = self._stage.prologue(context, self._weights, SimpleNamespace(**inputs))
        context = context.at(0, self._layout.micro_batches, prologue)
        live = _Live(inputs, context, Results(self._wanted))
        outcome: Outcome | None = None
        for instruction in self.instructions:
            match instruction:
                case Reduce():
                    outcome = self._reduce(live)
                case Step():
                    assert outcome is not None  # every list ends with Reduce, Step
                    update(outcome)
                case _:
                    self._execute(instruction, live)
        assert outcome is not None
        return outcome

    def _execute(self, instruction: Instruction, live: _Live) -> None:
        match instruction:
            case Forward(micro):
                self._forward(micro, live)
            case Backward(micro):
                self._backward(micro, live)
            case Receive(micro, value, peer):
                transfer = self._receives[value]
                channel = self._channels[peer, self._mesh.pipeline.index]
                live.received[micro, value] = channel.receive(transfer.shape, transfer.dtype)
            case Send(micro, value, peer):
                tensor = live.outgoing[micro, value]
                if peer == self._last_peer[value]:
                    del live.outgoing[micro, value]
                self._channels[self._mesh.pipeline.index, peer].send(tensor)
            case ReceiveGradient(micro, value, peer):
                transfer = self._sends[value, peer]
                channel = self._channels[peer, self._mesh.pipeline.index]
                gradient = channel.receive(transfer.gradient_shape, transfer.dtype)
                before = live.received_gradients.get((micro, value))
                total = gradient if before is None else before + gradient
                live.received_gradients[micro, value] = total
            case SendGradient(micro, value, peer):
                tensor = live.outgoing_gradients.pop((micro, value))
                self._channels[self._mesh.pipeline.index, peer].send(tensor)
            case Reduce() | Step():
                raise AssertionError("these end a step and belong to run")
            case _:
                assert_never(instruction)

    def _forward(self, micro: int, live: _Live) -> None:
        x = SimpleNamespace(**{name: self._slice(name, micro, live) for name in live.inputs})
        for transfer in self._here.receives:
            setattr(x, transfer.value, live.received.pop((micro, transfer.value)))
        context = live.context.at(micro, self._layout.micro_batches, live.context.prologue)
        y, live.saved[micro] = self._stage.forward(context, self._weights, x)
        live.results.add(y)
        for transfer in self._here.sends:
            made = self._checked(transfer, y, "forward", transfer.shape)
            live.outgoing[micro, transfer.value] = made

    def _backward(self, micro: int, live: _Live) -> None:
        dy = SimpleNamespace()
        for transfer in self._here.sends:
            gradient = live.received_gradients.pop((micro, transfer.value), None)
            if gradient is not None:
                setattr(dy, transfer.value, gradient)
        context = live.context.at(micro, self._layout.micro_batches, live.context.prologue)
        saved = live.saved.pop(micro)
        dx = self._stage.backward(context, self._weights, self._accumulators, saved, dy)
        for transfer in self._here.receives:
            if not transfer.gradient:
                continue
            if getattr(dx, transfer.value, None) is None:  # nothing here depends on the value
                shape, dtype = transfer.gradient_shape, transfer.dtype
                zeros = torch.zeros(shape, dtype=dtype, device=self._device)
                live.outgoing_gradients[micro, transfer.value] = zeros
            else:
                gradient = self._checked(transfer, dx, "backward", transfer.gradient_shape)
                live.outgoing_gradients[micro, transfer.value] = gradient

    def _slice(self, name: str, micro: int, live: _Live) -> torch.Tensor:
        """The rows of a micro-batch."""
        x, dim = live.inputs[name], self._batch_dims[name]
        if dim is None:
            return x
        rows = x.shape[dim] // self._layout.micro_batches
        return x.narrow(dim, micro * rows, rows)

    def _checked(
        self, transfer: Transfer, made: SimpleNamespace, what: str, shape: tuple[int, ...]
    ) -> torch.Tensor:
        value = getattr(made, transfer.value, None)
        stage = self._mesh.pipeline.index
        if value is None:
            raise UsageError(f'the {what} of stage {stage} returned no "{transfer.value}".')
        if tuple(value.shape) != shape or value.dtype != transfer.dtype:
            raise UsageError(
                f'the {what} of stage {stage} made "{transfer.value}" as {tuple(value.shape)} '
                f"{value.dtype}; the layout says {shape} {transfer.dtype}. "
                "program.py and layout.json don't belong together; emit the program again."
            )
        tensor: torch.Tensor = value
        return tensor

    def _reduce(self, live: _Live) -> Outcome:
        for channel in self._channels.values():
            channel.flush()
        loss, *metrics = self._announcer.announce(live.results)
        names = [metric.name for metric in self._layout.metrics]
        return Outcome(
            loss=loss,
            metrics=dict(zip(names, metrics, strict=True)),
            gradients=synchronised_gradients(self._state, self._mesh, self._groups),
            buffers=new_buffers(live.results, self._state, self._mesh, self._groups),
        )


def all_links(layout: Layout) -> tuple[Link, ...]:
    """Every value that goes from stage to stage, in the order in which the senders list them."""
    return tuple(
        Link(transfer.value, source, transfer.peer, transfer.gradient)
        for source, stage in enumerate(layout.stages)
        for transfer in stage.sends
    )


def _open_channels(
    links: Sequence[Link], mesh: Mesh, transport: Transport
) -> dict[tuple[int, int], Channel]:
    """This rank's channels by (source stage, target stage); opened in one order on all ranks."""
    used = {(link.source, link.target) for link in links}
    used |= {(link.target, link.source) for link in links if link.gradient}
    here = mesh.pipeline.index
    line = mesh.shape.line(mesh.rank, "pipeline")
    return {
        (source, target): transport.channel(line[source], line[target])
        for source, target in sorted(used)
        if here in (source, target)
    }
