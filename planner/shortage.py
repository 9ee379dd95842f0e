"""What is missing where nothing fits: the fullest rank of the plan that needs least.

Input: the candidate of least memory, with its stages. Output: a `Shortage`: bytes by part, the
fewest parts that alone exceed a device, the largest blocks and tensors; and `DoesNotFit`, the
refusal that carries it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil

from ir.batch import needs_whole_batch
from ir.errors import Refused
from ir.predicted import StageCost
from ir.quantities import size
from ir.spmd import StageCall
from planner.candidate import Evaluated, Workload, evaluate_least
from planner.cost import CostModel
from planner.describe import common_path, escaped
from planner.pieces import Pieces
from planner.pins import Candidate
from planner.recompute import MenuPoint
from planner.stage_bytes import point_of
from planner.zero import held_costs

MOST_NAMED = 6
"""Blocks and tensors that are named as the largest."""


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of one device, and what they are."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Shortage:
    """A device of pipeline rank `rank` under `candidate`, which needs less than any other one.

    `parts`: all that is there at the peak, state first. `largest`: blocks and tensors, the largest
    first; a tensor is also in its block. `state_bytes`: parameters, gradients and optimizer state
    of the whole model, once; `devices`: how many the cluster has. `whole_batch`: why a step is one
    micro-batch of all rows, if it is.
    """

    candidate: Candidate
    rank: int
    capacity_bytes: int
    parts: tuple[Part, ...]
    largest: tuple[Part, ...]
    state_bytes: int
    devices: int
    whole_batch: str = ""

    @property
    def need_bytes(self) -> int:
        """The peak."""
        return sum(part.size_bytes for part in self.parts)

    @property
    def violated(self) -> tuple[Part, ...]:
        """The fewest parts that exceed the capacity together; all of them, if even they do not."""
        chosen: list[Part] = []
        for part in sorted(self.parts, key=lambda part: -part.size_bytes):
            chosen.append(part)
            if sum(item.size_bytes for item in chosen) > self.capacity_bytes:
                break
        return tuple(part for part in self.parts if part in chosen)

    @property
    def least_devices(self) -> int:
        """What the state alone asks for."""
        return ceil(self.state_bytes / self.capacity_bytes)


class DoesNotFit(Refused):
    """No plan fits; `shortage` has the numbers behind the message."""

    def __init__(self, shortage: Shortage) -> None:
        super().__init__(short_text(shortage))
        self.shortage = shortage


def does_not_fit(
    work: Workload, candidate: Candidate, found: Pieces, cost: CostModel, *, state_bytes: float,
    devices: int,
) -> DoesNotFit:  # fmt: skip
    """The refusal of a search in which `candidate`, of least memory, does not fit."""
    least = evaluate_least(work, candidate, found, cost)
    stages = least.prediction.stages
    rank = least.prediction.fullest
    named = sorted(_named(work, least, cost, rank), key=lambda part: -part.size_bytes)
    return DoesNotFit(Shortage(
        candidate, rank, least.prediction.capacity_bytes, peak_parts(stages[rank]),
        tuple(part for part in named[:MOST_NAMED] if part.size_bytes), int(state_bytes), devices,
        escaped(needs_whole_batch(work.graph, work.flow) or work.graph.fixed_batch),
    ))  # fmt: skip


def whole_batch_text(shortage: Shortage) -> str:
    """Why fewer rows at once were not tried."""
    return f"Fewer rows at once can't be had, since {shortage.whole_batch}"


def short_text(shortage: Shortage) -> str:
    """One paragraph: the numbers, the violated set, the largest part, what was tried."""
    words = " + ".join(f"{part.name} {size(part.size_bytes)}" for part in shortage.violated)
    candidate = shortage.candidate
    zero = f", ZeRO {candidate.zero}" if candidate.zero else ""
    zero += f", offload={candidate.offload}" if candidate.offload != "none" else ""
    text = (
        f"no plan fits: stage {shortage.rank} needs {size(shortage.need_bytes)} per device with "
        f"its blocks as small as they get, and {size(shortage.capacity_bytes)} are usable. Already "
        f"too much: {words}. Largest part: {_largest(shortage)}. The least was tried: "
        f"{candidate.mesh}, {candidate.rows} rows per micro-batch{zero}."
    )
    if shortage.whole_batch:
        text += f" {whole_batch_text(shortage)}."
    if shortage.least_devices > shortage.devices:
        state = f"The state alone ({size(shortage.state_bytes)})"
        text += f" {state} needs at least {shortage.least_devices} devices."
    return text


def _largest(shortage: Shortage) -> str:
    working = [part for part in shortage.parts if part.name == "working memory"]
    part = max((*shortage.largest, *working), key=lambda part: part.size_bytes)
    return f"{part.name} ({size(part.size_bytes)})"


def peak_parts(cost: StageCost) -> tuple[Part, ...]:
    """All that is there at a rank's peak, state first; nothing that takes no bytes."""
    parts = (
        Part("parameters", cost.parameter_bytes), Part("gradients", cost.gradient_bytes),
        Part("optimizer state", cost.optimizer_bytes), Part("saved tensors", cost.saved_bytes),
        Part("working memory", cost.transient_bytes),
    )  # fmt: skip
    return tuple(part for part in parts if part.size_bytes)


def _named(work: Workload, least: Evaluated, cost: CostModel, rank: int) -> Iterator[Part]:
    """Blocks by what they hold, and single tensors of the state and of what is saved.

    A block frees what it saved bit by bit, so its own most may exceed what the rank's peak has
    beside saved tensors; that is all of it that is there.
    """
    program, found = least.program, least.pieces
    placed = [p for s in least.candidate.stages_of(rank) for p in program.stages[s]]
    state = held_costs(program, cost, work.optimizer)
    total = sum(_saved_bytes(found, p) for p in placed)
    peak = least.prediction.stages[rank]
    held = peak.saved_bytes / total if total else 0.0  # micro-batches
    for variant in dict.fromkeys(p.variant for p in placed):
        calls = [p for p in placed if p.variant == variant]
        paths = [work.graph.calls[p.index].path or work.kinds[variant].block.name for p in calls]
        name = common_path(paths) + (f" x {len(calls)}" if len(calls) > 1 else "")
        names = dict.fromkeys(v for p in calls for v in program.call(p).arguments if v in state)
        owned_bytes = sum(state[v].held_bytes for v in names)
        yield Part(f"weights, gradients and optimizer state of {name}", int(owned_bytes))
        saved_bytes = sum(_saved_bytes(found, p) for p in calls)
        yield Part(f"saved tensors of {name}", int(held * saved_bytes))
        working_bytes = max(point_of(found, p).transient_bytes for p in calls)
        there_bytes = min(working_bytes, peak.transient_bytes)
        yield Part(f"working memory of {common_path(paths)}", there_bytes)
        yield from _tensors(work, {v: int(state[v].held_bytes) for v in names})
        sizes = found.storages[variant].size_bytes
        for value, count in _saved_values([point_of(found, p) for p in calls]):
            yield Part(f"{escaped(value)}, saved by {name}", int(held * count * sizes[value]))


def _tensors(work: Workload, held_bytes: Mapping[str, int]) -> Iterator[Part]:
    """State tensors by their names in the model; those of repeated blocks together."""
    paths = {item.name: (item.names or (item.name,))[0] for item in work.graph.state}
    alike: dict[str, list[str]] = {}
    for name in held_bytes:
        alike.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", paths[name]), []).append(name)
    for names in alike.values():
        count = f" x {len(names)}" if len(names) > 1 else ""
        whole_bytes = sum(held_bytes[name] for name in names)
        yield Part(common_path([paths[name] for name in names]) + count, whole_bytes)


def _saved_bytes(found: Pieces, placed: StageCall) -> int:
    """Of one micro-batch."""
    return point_of(found, placed).held_bytes


def _saved_values(points: list[MenuPoint]) -> Iterator[tuple[str, int]]:
    """Each saved value with how many of the blocks save it."""
    names = [name for point in points for name in (*point.saved, *point.inputs)]
    for name in dict.fromkeys(names):
        yield name, names.count(name)
