"""Why a model works for one batch size only: the line that fails for another.

Input: a graph, and the step that it was traced from. Output: the graph, with a note where no input
could be traced with another number of rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from ir.graph import Graph
from ir.trace.adapters import FakeTensorMode
from ir.trace.capture import place_of
from ir.trace.fold import named_state
from ir.trace.step import Leaf, Step


def with_reason(graph: Graph, step: Step, leaves: list[Leaf]) -> Graph:
    """The graph; with a fixed batch, its `fixed_batch` says where another one fails."""
    if any(item.batch_dim is not None for item in graph.inputs):
        return graph
    return replace(graph, fixed_batch=_failure(step, leaves) or "a size in it is fixed")


def _failure(step: Step, leaves: list[Leaf]) -> str:
    """Runs the step on fake tensors of twice the rows: where and how that fails; else empty."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[str, Tensor] = {k: mode.from_tensor(v) for k, v in named_state(step)}
    inputs = [mode.from_tensor(leaf.example(2)) for leaf in leaves]
    try:
        with _torch_is_quiet(), mode, torch.no_grad():
            torch.func.functional_call(step, fakes, tuple(inputs))
    except Exception as error:  # whatever a model raises for a batch that it is not made for
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"with twice the rows {place_of(error, step)} fails: {said[:200]}"
    return ""


@contextmanager
def _torch_is_quiet() -> Iterator[None]:
    """Torch logs the traceback of what fails on fake tensors; here failing is the answer."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
