"""What the members of families do, found by running the step on fake tensors.

Input: a step, its leaves and its families. Output: a `Recorder` with a `Record` of every call. To
run every member of a deep model takes seconds. So equal calls of a family are first taken to do the
same; `last_texts_of_every` runs all members, in a copy of the process, and says whether they do.
Whether anything but arguments and results goes in or out of them is seen there as well.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from ir.errors import CaptureError
from ir.trace.adapters import FakeTensorMode, as_in_eager
from ir.trace.block import function_text, last_texts
from ir.trace.capture import Capture, explain
from ir.trace.fold import Entangled, Record, Recorder, named_state
from ir.trace.operations import Outside
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
        """A record of every call. The phase `every` runs each, and raises `Entangled` where members
        can't be told from what is around them; `record` runs one of those alike."""
        recorder = Recorder(self.step.model, groups, self.rows)
        outside = self._run(recorder, phase, self.factor)
        if phase == "every":
            self._refuse_entangled(recorder, outside)
        outside.read |= self._run(recorder, "resize", 2 * self.factor).read
        read = [name for name, fake in self.fakes.items() if id(fake) in outside.read]
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
    def _run(self, recorder: Recorder, phase: str, factor: int) -> Outside:
        """What runs outside of members."""
        inputs = [self.mode.from_tensor(leaf.example(factor)) for leaf in self.leaves]
        state: dict[str, Tensor] = dict(self.fakes)
        named = {f"input {n}": x for n, x in enumerate(inputs)}
        recorder.outside = seen = Outside({**self.fakes, **named})
        try:
            with unchanged(self.step.model), recorder.installed(phase), self.mode, seen:
                torch.func.functional_call(self.step, state, tuple(inputs))
                recorder.check_all_called()
        except CaptureError:
            raise
        except Exception as error:
            raise explain(error, self.step) from error
        finally:
            recorder.outside = None
        return seen

    def _refuse_entangled(self, recorder: Recorder, outside: Outside) -> None:
        """All members were run. Where those give what they gave without being run, all else must do
        the same; and so must they, alone. Else something goes in or out by an attribute, a
        collection, or a global."""
        first = {record.variant: record for record in reversed(recorder.records)}
        try:
            again = self._run(recorder, "replay", self.factor)
            alone = [self._operations_alone(record) for record in first.values()]
        except CaptureError as error:
            raise Entangled from error
        if (
            outside.foreign or any(record.has_more for record in recorder.records)
            or outside.lines != again.lines
            or alone != [record.operations for record in first.values()]
        ):  # fmt: skip
            raise Entangled

    @torch.no_grad()
    def _operations_alone(self, record: Record) -> str:
        """Of a member outside of the model's forward."""
        start = f"model.{record.path}."
        state: dict[str, Tensor] = {
            f"block.{name.removeprefix(start)}": x
            for name, x in self.fakes.items() if name.startswith(start)
        }  # fmt: skip
        try:
            with unchanged(self.step.model), self.mode:
                digest: str = torch.func.functional_call(_Watched(record), state, ())
                return digest
        except CaptureError:
            raise
        except Exception as error:
            raise explain(error, self.step) from error


class _Watched(nn.Module):
    """What a member runs on the arguments that it was called with."""

    def __init__(self, record: Record):
        super().__init__()
        self.block, self.record = record.module, record

    def forward(self) -> str:
        args, kwargs = self.record.rebuild(self.record.inputs)
        seen = self.record.watched()
        with seen, as_in_eager():
            self.block.forward(*args, **kwargs)
        return seen.digest


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
