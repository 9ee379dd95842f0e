"""Runs the steps of one rank: its static list of instructions, one after the other.

Input: the functions of the rank's stages, the state and this data rank's rows of the batch. Output:
`Outcome`, the loss and metrics (known to every rank), the synchronised gradients and the new
buffers. Runs without autograd.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

import torch

from runtime.gradients import synchronised_gradients
from runtime.layout import Layout
from runtime.mail import Mail
from runtime.mesh import Mesh
from runtime.program import Context, Stage
from runtime.results import Announcer, Results, new_buffers
from runtime.schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Receive,
    Reduce,
    Send,
    Step,
)
from runtime.stage_run import StageRun
from runtime.state import SharingGroups, State
from runtime.transport import Transport


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step found; gradients and buffers per state entry, None where nothing is here."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]
    gradients: tuple[torch.Tensor | None, ...]
    buffers: tuple[torch.Tensor | None, ...]


class Executor:
    """Runs the steps of one rank. Built on all ranks at the same time."""

    def __init__(
        self,
        layout: Layout,
        stages: Sequence[Stage],
        state: State,
        *,
        mesh: Mesh,
        transport: Transport,
        groups: SharingGroups,
    ) -> None:
        """`stages`: the functions of all stages of the program."""
        self._layout = layout
        self._state = state
        self._mesh = mesh
        self._device = transport.device
        self._groups = groups
        here = mesh.pipeline.index
        self._stages = {
            number: StageRun(number, layout, stages[number], state, mesh, transport.device)
            for number, home in enumerate(layout.homes)
            if home == here
        }
        updates = [entry.update for entry in layout.state if entry.update is not None]
        scalars = (layout.loss, *layout.metrics)
        self._wanted = [scalar for scalar in (*scalars, *updates) if scalar.rank == here]
        self._announcer = Announcer(scalars, mesh, transport.device)
        self._mail = Mail(layout, mesh, transport)

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """What this rank does in each step."""
        return self._mail.instructions

    @torch.no_grad()
    def run(
        self,
        batch: Mapping[str, torch.Tensor],
        context: Context,
        update: Callable[[Outcome], None],
    ) -> Outcome:
        """One step over this data rank's rows; `update` is called at the Step instruction."""
        self._state.zero_accumulators()
        self._mail.begin()
        read = {name for stage in self._stages.values() for name in stage.inputs}
        inputs = {name: batch[name].to(self._device) for name in sorted(read)}
        for stage in self._stages.values():
            stage.begin(inputs, context)
        results = Results(self._wanted)
        outcome: Outcome | None = None
        for instruction in self.instructions:
            match instruction:
                case Reduce():
                    outcome = self._reduce(results)
                case Step():
                    assert outcome is not None  # every list ends with Reduce, Step
                    update(outcome)
                case _:
                    self._execute(instruction, results)
        assert outcome is not None
        for stage in self._stages.values():
            stage.end()
        return outcome

    def _execute(self, instruction: Instruction, results: Results) -> None:
        match instruction:
            case Forward(stage, micro):
                results.add(stage, self._stages[stage].forward(micro))
            case Backward(stage, micro):
                self._stages[stage].backward(micro)
            case BackwardInput(stage, micro):
                self._stages[stage].backward_input(micro)
            case BackwardWeight(stage, micro):
                self._stages[stage].backward_weight(micro)
            case Receive(message):
                self._stages[message.target].take(message, self._mail.receive(message))
            case Send(message):
                self._mail.send(message, self._stages[message.source].give(message))
            case Reduce() | Step():
                raise AssertionError("these end a step and belong to run")
            case _:
                assert_never(instruction)

    def _reduce(self, results: Results) -> Outcome:
        self._mail.flush()
        loss, *metrics = self._announcer.announce(results)
        names = [metric.name for metric in self._layout.metrics]
        return Outcome(
            loss=loss,
            metrics=dict(zip(names, metrics, strict=True)),
            gradients=synchronised_gradients(self._state, self._mesh, self._groups),
            buffers=new_buffers(results, self._state, self._mesh, self._groups),
        )
