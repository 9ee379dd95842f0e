"""Groups the calls of a stage: consecutive calls of one block become a loop.

Input: an `Spmd` program and a stage. Output: `Group`s. A group of several calls is written as a
loop when each call feeds the next in the same places and nothing else reads what is between.
"""

from __future__ import annotations

from dataclasses import dataclass

from ir.names import Namer, identifier
from ir.spmd import Spmd, StageCall


@dataclass(frozen=True, slots=True)
class Group:
    """Calls of one variant with one menu point. `first` is the place of the first call among
    the weights of the same name; `carried` maps an argument's place to a result's place."""

    name: str
    variant: int
    keep: str
    calls: tuple[StageCall, ...]
    carried: tuple[tuple[int, int], ...]

    @property
    def many(self) -> bool:
        return len(self.calls) > 1


def weight_path(name: str) -> str:
    """The attribute under which a block's parameter is found."""
    return identifier(name)


def stage_groups(spmd: Spmd, number: int) -> tuple[Group, ...]:
    """The groups of a stage in order, with unique names."""
    namer = Namer()
    groups: list[Group] = []
    run: list[StageCall] = []
    for placed in spmd.stages[number]:
        if run and _continues(spmd, run, placed):
            run.append(placed)
            continue
        groups += [_group(spmd, namer, run)] if run else []
        run = [placed]
    groups += [_group(spmd, namer, run)] if run else []
    return tuple(groups)


def _group(spmd: Spmd, namer: Namer, run: list[StageCall]) -> Group:
    carried = tuple(sorted(_links(spmd, run[0], run[1]).items())) if len(run) > 1 else ()
    name = namer(spmd.block(run[0]).name)
    return Group(name, run[0].variant, run[0].keep, tuple(run), carried)


def _links(spmd: Spmd, first: StageCall, second: StageCall) -> dict[int, int]:
    results = spmd.call(first).results
    return {
        place: results.index(value)
        for place, value in enumerate(spmd.call(second).arguments) if value in results
    }  # fmt: skip


def _continues(spmd: Spmd, run: list[StageCall], placed: StageCall) -> bool:
    """Whether a call can join the loop of the calls before it."""
    last = run[-1]
    if (last.variant, last.keep) != (placed.variant, placed.keep) or placed.index != last.index + 1:
        return False
    links = _links(spmd, last, placed)
    if not links or (len(run) > 1 and links != _links(spmd, run[-2], last)):
        return False
    if not _same_outside(spmd, last, placed, links):
        return False
    return _read_only_by(spmd, last, placed)


def _same_outside(
    spmd: Spmd, last: StageCall, placed: StageCall, links: dict[int, int]
) -> bool:
    """Arguments that are neither carried nor state are the same value, without a gradient."""
    before, after = spmd.call(last).arguments, spmd.call(placed).arguments
    for place, (a, b) in enumerate(zip(before, after, strict=True)):
        if place in links or b in spmd.state_of:
            continue
        if a != b or spmd.gives_gradient(placed.index, b):
            return False
    return True


def _read_only_by(spmd: Spmd, last: StageCall, placed: StageCall) -> bool:
    """Whether nothing but the next call reads the results of `last`."""
    results = set(spmd.call(last).results)
    ends = {spmd.graph.loss, *(v for _, v in spmd.graph.metrics)}
    ends |= {state.update for state in spmd.graph.state if state.update}
    readers = {
        i for i, call in enumerate(spmd.graph.calls) if results & set(call.arguments)
    }  # fmt: skip
    return not results & ends and readers <= {placed.index}
