"""Refuses a model that computes something else in its next call.

Input: a step in whose first calls attributes changed. Output: nothing, or a `CaptureError`. What
is made in a first call and found by later ones, such as a table of positions, does no harm, nor
what is kept and never read: so the step is run on fake tensors until nothing of that kind is new.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from ir.errors import CaptureError
from ir.trace.adapters import FakeTensorMode
from ir.trace.capture import explain
from ir.trace.carried import Place, Registered, attribute, attributes, changed, tensors_in
from ir.trace.fold import named_state
from ir.trace.operations import Operations
from ir.trace.step import Leaf, Step
from ir.trace.unchanged import unchanged


def refuse_carried(step: Step, leaves: list[Leaf], factor: int) -> None:
    """Changes of parameters and buffers that are not made in place, and anything else that a call
    reads and changes for the next one."""
    with unchanged(step.model):
        _refuse_carried(_Calls(step, leaves, factor))


def _refuse_carried(calls: _Calls) -> None:
    step = calls.step
    calls.operations()
    for name, fake in calls.fakes.items():
        if fake.requires_grad != calls.tensors[name].requires_grad:
            _refuse(name.removeprefix("model."), "begins or ends to require a gradient",
                    "Set requires_grad before the model is traced.")  # fmt: skip
    step.report.changed.clear()
    before = attributes(step.model)
    second = calls.operations()
    after = attributes(step.model)
    for place in step.report.changed:
        if isinstance(before.get(place), Registered):
            _refuse(attribute(place), "is assigned in forward, not changed in place",
                    "Use self.NAME.copy_(...) or another operation in place.")  # fmt: skip
    moved = changed(before, after)
    for place in moved:
        if any(id(x) in second.foreign for x in tensors_in(before.get(place))):
            _refuse(attribute(place), "is no buffer, but carries a tensor from call to call",
                    "Make it one with register_buffer, and change it in place.")  # fmt: skip
    if moved and calls.operations().digest != second.digest:
        _refuse(_listed(moved), "differs from call to call, and so does what forward computes",
                "Make it a buffer that changes in place, or an argument.")  # fmt: skip


def _refuse(what: str, how: str, instead: str) -> NoReturn:
    raise CaptureError(f"{what} {how}: in an emitted program it would stay as it is. {instead}")


def _listed(places: list[Place]) -> str:
    return " or ".join(map(attribute, places[:3]))


class _Calls:
    """Calls of one step, all members of families run."""

    def __init__(self, step: Step, leaves: list[Leaf], factor: int) -> None:
        self.step, self.mode = step, FakeTensorMode(allow_non_fake_inputs=True)
        self.tensors = dict(named_state(step))
        self.fakes = {name: self.mode.from_tensor(t) for name, t in self.tensors.items()}
        self.inputs = [self.mode.from_tensor(leaf.example(factor)) for leaf in leaves]

    def operations(self) -> Operations:
        """What the next call does."""
        inputs = {f"input {n}": x for n, x in enumerate(self.inputs)}
        seen = Operations({**self.fakes, **inputs})
        try:
            with self.mode, seen, torch.no_grad():
                torch.func.functional_call(self.step, dict(self.fakes), tuple(self.inputs))
        except CaptureError:
            raise
        except Exception as error:
            raise explain(error, self.step) from error
        return seen
