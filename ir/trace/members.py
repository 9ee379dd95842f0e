"""What the members of families do, found by running the step on fake tensors.

Input: a step, its leaves and its families. Output: a `Recorder` with a `Record` of every call. To
run every member of a deep model takes seconds. So equal calls of a family are first taken to do the
same; `last_texts_of_every` runs all members, in a copy of the process, and says whether they do.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ir.errors import CaptureError
from ir.trace.adapters import FakeTensorMode
from ir.trace.block import function_text, last_texts
from ir.trace.capture import Capture, explain
from ir.trace.fold import Record, Recorder, named_state
from ir.trace.step import Leaf, Step
from ir.trace.unchanged import unchanged

Groups = list[tuple[str, ...]]


class DryRun:
    """Runs of one step on fake tensors; `rows`: of the smallest batch that is tried."""

    def __init__(self, step: Step, leaves: list[Leaf], factor: int, rows: int):
        self.step, self.leaves, self.factor, self.rows = step, leaves, factor, rows
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.fakes = {name: self.mode.from_tensor(t) for name, t in named_state(step)}

    def recorder(self, groups: Groups, phase: str) -> Recorder:
        """A record of every call. The phase `every` runs each, `record` one of those alike."""
        recorder = Recorder(self.step.model, groups, self.rows)
        self._run(recorder, phase, self.factor)
        self._run(recorder, "resize", 2 * self.factor)
        read = [name for name, fake in self.fakes.items() if id(fake) in recorder.reads.tensors]
        recorder.hidden = tuple(
            path for group in groups for path in group
            if not any(name.startswith(f"model.{path}.") for name in read)
        )  # fmt: skip
        return recorder

    def last_texts_of_every(self, groups: Groups) -> dict[int, str] | None:
        """`last_texts` after every member was run; None if equal calls do not do the same."""
        records = self.recorder(groups, "every").records
        return last_texts(records) if _do_the_same(records) else None

    @torch.no_grad()
    def _run(self, recorder: Recorder, phase: str, factor: int) -> None:
        inputs = [self.mode.from_tensor(leaf.example(factor)) for leaf in self.leaves]
        state: dict[str, Tensor] = dict(self.fakes)
        try:
            seen = recorder.reads if phase == "resize" else nullcontext()
            with unchanged(self.step.model), recorder.installed(phase), self.mode, seen:
                torch.func.functional_call(self.step, state, tuple(inputs))
        except CaptureError:
            raise
        except Exception as error:
            raise explain(error, self.step) from error


def _do_the_same(records: list[Record]) -> bool:
    done = defaultdict(set)
    for record in records:
        done[record.call].add((record.operations, record.made))
    return all(len(found) == 1 for found in done.values())


def refuse_unlike(
    records: list[Record], captures: dict[Any, Capture], last: dict[int, str]
) -> None:
    """The last member of each variant must be captured as the first one was."""
    for place, text in last.items():
        first = records[place]
        if function_text(captures[first.variant]) != text:
            members = [record.path for record in records if record.variant == first.variant]
            raise CaptureError(
                f"{first.path} and {members[-1]} look alike but compute different things (a "
                "captured constant or a hidden attribute differs). Make the difference a plain "
                "attribute of the module."
            )
