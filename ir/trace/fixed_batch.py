"""Why a model works for one batch size only: the line that fails for another.

Input: a graph, and the step that it was traced from. Output: the graph, with a note where no input
could be traced with another number of rows.
"""

from __future__ import annotations

from dataclasses import replace
from inspect import currentframe
from itertools import takewhile
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from ir.errors import CaptureError
from ir.graph import Graph
from ir.trace.adapters import FakeTensorMode, is_number, symbolic_mode, symbolic_rows
from ir.trace.capture import place_in, place_of
from ir.trace.fold import named_state
from ir.trace.lengths import symbolic_lengths
from ir.trace.reasons import said_by
from ir.trace.step import Leaf, Step


def with_reason(
    graph: Graph, step: Step, leaves: list[Leaf], refusal: CaptureError | None
) -> Graph:
    """The graph; with a fixed batch, its `fixed_batch` says where another one fails.

    `refusal`: why the step could not be traced with any number of rows, if it was refused.
    """
    if any(item.batch_dim is not None for item in graph.inputs):
        return graph
    said = str(refusal or "a size in it is fixed").removeprefix("can't capture ")
    return replace(graph, fixed_batch=_failure(step, leaves) or _fixing(step, leaves) or said)


def _failure(step: Step, leaves: list[Leaf]) -> str:
    """Runs the step on fake tensors of twice the rows: where and how that fails; else empty."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        _run(step, mode, [mode.from_tensor(leaf.example(2)) for leaf in leaves])
    except Exception as error:  # whatever a model raises for a batch that it is not made for
        return f"with twice the rows {place_of(error, step)} fails: {said_by(error)}"
    return ""


def _fixing(step: Step, leaves: list[Leaf]) -> str:
    """Runs the step with a symbol for the rows: the call after which one number is left for it."""
    mode = symbolic_mode()
    inputs = [symbolic_rows(mode, leaf.example(1), leaf.rows is not None) for leaf in leaves]
    rows = next(x.shape[0] for x, leaf in zip(inputs, leaves, strict=True) if leaf.rows)
    watch = _Watch(step, rows)
    try:
        with watch:
            _run(step, mode, inputs)
    except Exception:  # it fails elsewhere, which `_failure` says
        return ""
    return watch.found


def _run(step: Step, mode: FakeTensorMode, inputs: list[Tensor]) -> None:
    fakes: dict[str, Tensor] = {k: mode.from_tensor(v) for k, v in named_state(step)}
    with mode, symbolic_lengths(step), torch.no_grad():
        torch.func.functional_call(step, fakes, tuple(inputs))


class _Watch(TorchFunctionMode):
    """Notes the first call of a torch function after which `rows` is a number."""

    def __init__(self, step: Step, rows: Any):
        super().__init__()
        self.step, self.rows, self.found = step, rows, ""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.found and func is Tensor.__len__ and not is_number(out):
            self.found = f"{self._place()}: len(...) of a tensor is a number: use its shape[0]"
        if not self.found and is_number(self.rows):
            name = resolve_name(func) or getattr(func, "__name__", "a call")
            fixed = f"{name} fixes the number of rows to {int(self.rows)}"
            self.found = f"{self._place()}: {fixed} when torch traces it"
        return out

    def _place(self) -> str:
        stack = [*walk_stack(currentframe())]
        inner = takewhile(lambda at: at[0].f_code is not _run.__code__, stack)
        return place_in(reversed([*inner]), self.step)
