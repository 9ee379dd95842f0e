"""One pipeline stage in the middle of a step: runs its functions, holds what lives between them.

Input: the stage's functions and tables, the state, this data rank's rows of the batch. What a
micro-batch saved is freed by its backward (or, where that is two, by its second half), what it
sends when it has left.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from runtime.errors import UsageError
from runtime.layout import Layout, Transfer
from runtime.mesh import Mesh
from runtime.program import Context, Stage, build_namespace
from runtime.schedule import BackwardInput, Forward, Message
from runtime.state import State
from runtime.zero import gradient_leaves, weight_leaves

Values = dict[tuple[int, str], torch.Tensor]  # by (micro-batch, value)


class StageRun:
    """A stage on this rank."""

    def __init__(
        self, number: int, layout: Layout, functions: Stage, state: State, mesh: Mesh,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.number = number
        self._layout = layout
        self._functions = functions
        self._device = device
        self._here = layout.stages[number]
        self._last_peer = {transfer.value: transfer.peer for transfer in self._here.sends}
        self._batch_dims = {x.name: x.batch_dim for x in layout.inputs}
        tree = dict(self._here.weights)
        self._weights = build_namespace(tree, weight_leaves(state, mesh))
        self._accumulators = build_namespace(tree, gradient_leaves(state, mesh))
        self._check_functions()

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the batch's tensors that the stage reads."""
        return self._here.inputs

    def begin(self, inputs: Mapping[str, torch.Tensor], context: Context) -> None:
        """The start of a step, with the rows of all micro-batches."""
        self._inputs = {name: inputs[name] for name in self.inputs}
        prologue = None
        if self._functions.prologue is not None:
            once = context.at(0, 1, None)
            x = SimpleNamespace(**self._inputs)
            prologue = self._functions.prologue(once, self._weights, x)
        self._context = context.at(0, self._layout.micro_batches, prologue)
        self._received: Values = {}
        self._outgoing: Values = {}
        self._saved: dict[int, Any] = {}
        self._pending: dict[int, Any] = {}
        self._received_gradients: Values = {}
        self._outgoing_gradients: Values = {}

    def take(self, message: Message, tensor: torch.Tensor) -> None:
        """A value for a forward, or a gradient; gradients from several stages add up."""
        key = (message.micro, message.value)
        if not message.is_gradient:
            self._received[key] = tensor
            return
        before = self._received_gradients.get(key)
        self._received_gradients[key] = tensor if before is None else before + tensor

    def give(self, message: Message) -> torch.Tensor:
        """What a message carries; forgotten when its last taker has it."""
        key = (message.micro, message.value)
        if message.is_gradient:
            return self._outgoing_gradients.pop(key)
        if message.target == self._last_peer[message.value]:
            return self._outgoing.pop(key)
        return self._outgoing[key]

    def forward(self, micro: int) -> SimpleNamespace:
        """Runs a forward; what it returned."""
        x = SimpleNamespace(**{name: self._slice(name, micro) for name in self._inputs})
        for transfer in self._here.receives:
            setattr(x, transfer.value, self._received.pop((micro, transfer.value)))
        y, self._saved[micro] = self._functions.forward(self._at(micro), self._weights, x)
        for transfer in self._here.sends:
            made = self._checked(transfer, y, "forward", transfer.shape)
            self._outgoing[micro, transfer.value] = made
        return y

    def backward(self, micro: int) -> None:
        """Runs a whole backward."""
        assert self._functions.backward is not None
        dx = self._functions.backward(*self._backward_arguments(micro))
        self._keep_gradients(micro, dx)

    def backward_input(self, micro: int) -> None:
        """Runs the half that gives the gradients of what was received."""
        assert self._functions.backward_input is not None
        dx, self._pending[micro] = self._functions.backward_input(*self._backward_arguments(micro))
        self._keep_gradients(micro, dx)

    def backward_weight(self, micro: int) -> None:
        """Runs the half that gives the gradients of the weights."""
        assert self._functions.backward_weight is not None
        pending = self._pending.pop(micro)
        context = self._at(micro)
        self._functions.backward_weight(context, self._weights, self._accumulators, pending)

    def end(self) -> None:
        """Forgets the batch of the step, and what the prologue made of it."""
        self._inputs = {}
        self._context = self._context.at(0, 1, None)

    def _at(self, micro: int) -> Context:
        return self._context.at(micro, self._layout.micro_batches, self._context.prologue)

    def _backward_arguments(self, micro: int) -> tuple[Any, ...]:
        dy = SimpleNamespace()
        for transfer in self._here.sends:
            gradient = self._received_gradients.pop((micro, transfer.value), None)
            if gradient is not None:
                setattr(dy, transfer.value, gradient)
        saved = self._saved.pop(micro)
        return self._at(micro), self._weights, self._accumulators, saved, dy

    def _keep_gradients(self, micro: int, dx: SimpleNamespace) -> None:
        for transfer in self._here.receives:
            if not transfer.gradient:
                continue
            shape = transfer.gradient_shape
            if getattr(dx, transfer.value, None) is None:  # nothing here depends on the value
                gradient = torch.zeros(shape, dtype=transfer.dtype, device=self._device)
            else:
                gradient = self._checked(transfer, dx, "backward", shape)
            self._outgoing_gradients[micro, transfer.value] = gradient

    def _slice(self, name: str, micro: int) -> torch.Tensor:
        """The rows of a micro-batch."""
        x, dim = self._inputs[name], self._batch_dims[name]
        if dim is None:
            return x
        rows = x.shape[dim] // self._layout.micro_batches
        return x.narrow(dim, micro * rows, rows)

    def _checked(
        self, transfer: Transfer, made: SimpleNamespace, what: str, shape: tuple[int, ...]
    ) -> torch.Tensor:
        value = getattr(made, transfer.value, None)
        if value is None:
            raise UsageError(f'the {what} of stage {self.number} returned no "{transfer.value}".')
        if tuple(value.shape) != shape or value.dtype != transfer.dtype:
            raise UsageError(
                f'the {what} of stage {self.number} made "{transfer.value}" as '
                f"{tuple(value.shape)} {value.dtype}; the layout says {shape} {transfer.dtype}. "
                "program.py and layout.json don't belong together; emit the program again."
            )
        tensor: torch.Tensor = value
        return tensor

    def _check_functions(self) -> None:
        """The order asks for the functions that the program has."""
        kinds = {type(a) for actions in self._layout.order for a in actions} - {Forward}
        has = self._functions
        good = has.backward is not None
        if BackwardInput in kinds:
            good = has.backward_input is not None and has.backward_weight is not None
        if not good:
            raise UsageError(
                f"stage {self.number} of program.py has no such backward as the order of "
                "layout.json runs; they don't belong together. Emit the program again."
            )
