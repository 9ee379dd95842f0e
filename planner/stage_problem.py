"""Which blocks run on which pipeline stage: the problem, a plan, and what a plan costs.

Input: runs of identical blocks, each with a menu of points; stages with their memory. Output:
`price` turns an assignment into a `StagePlan` with its seconds and bytes, by the formulas that
the solver of `planner.stages` minimises.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ir.schedules import Held
from planner.schedule import SCHEDULES, StageTime, bubble_s, in_flight, pipeline_step_s


@dataclass(frozen=True, slots=True)
class Point:
    """One way to run a block: seconds and bytes of one micro-batch on one device.

    `saved_bytes` is kept from forward to backward, per micro-batch in flight; `persistent_bytes`
    (weights, gradients, optimizer state) always; `transient_bytes` while the block runs;
    `pending_bytes` between the halves of a split backward, of which `weight_s` is the second.
    """

    forward_s: float
    backward_s: float
    saved_bytes: float
    persistent_bytes: float
    transient_bytes: float
    label: str = ""
    pending_bytes: float = 0.0
    weight_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Joint:
    """What a block costs at least in seconds, kept bytes and persistent bytes together: `least_s`
    by rising price of a byte that is kept of one micro-batch, from 0. A persistent byte costs that
    over `most_held`, than which no stage holds more micro-batches."""

    prices: tuple[float, ...]
    least_s: tuple[float, ...]
    most_held: float


@dataclass(frozen=True, slots=True)
class Run:
    """`count` identical blocks in a row. `sync_s` (exposed gradient exchange) and `optimizer_s`
    are seconds per block, once per step. For bounds alone: `joint`, and `late`, points whose saved
    bytes are with the forward values that lie between the halves of a split backward, of one
    micro-batch each; pending bytes are of gradients."""

    name: str
    count: int
    points: tuple[Point, ...]
    sync_s: float = 0.0
    optimizer_s: float = 0.0
    joint: Joint | None = None
    late: tuple[Point, ...] = ()

    def points_at(self, held: Held) -> tuple[Point, ...]:
        """Those for a moment: `late`, of as many micro-batches between the halves as there are
        kept whole, where there are no fewer."""
        return self.late if self.late and held.weight >= held.forward > 0 else self.points


def fastest_s(runs: Sequence[Run]) -> tuple[float, ...]:
    """Of a block of each run, at its fastest point."""
    return tuple(min(p.forward_s + p.backward_s for p in run.points) for run in runs)


@lru_cache(maxsize=64)
def _block_runs(counts: tuple[int, ...]) -> tuple[int, ...]:
    """The run of each block, of so many blocks by run."""
    return tuple(r for r, count in enumerate(counts) for _ in range(count))


@dataclass(frozen=True, slots=True)
class StageProblem:
    """Runs in model order, to be cut into `stages` stages.

    `capacity_bytes`: per stage, what a plan may fill. `send_s`: per boundary of two stages, the
    seconds of a micro-batch's send that are not hidden, there and back; both sides spend them.
    `tied`: (run i, run j, bytes): state of run i that run j reads too; a stage with blocks of j
    but none of i holds a copy of those bytes; `tied_s`: the same with what such a copy takes per
    micro-batch at least, for bounds alone. `held`: per stage, what it holds at the moments at
    which no other one is worse; left out, as many whole micro-batches as the schedule has there.
    `moments`: per rank of several stages, what all of them hold at such moments of the rank.
    `unlike`: per stage the same runs with the points and seconds of its device, where stages lie on
    different ones. `round_s`: where ranks of several stages are meant, the same seconds from the
    last rank to the first. `moved_s`: per stage, [a, b], what a stage of blocks a..b-1 spends on
    sends, where it depends on the cuts (`planner.cut_sends`); `send_s` is typical then.
    """

    runs: tuple[Run, ...]
    stages: int
    micro_batches: int
    schedule: str
    capacity_bytes: tuple[float, ...]
    send_s: tuple[float, ...] = ()
    tied: tuple[tuple[int, int, float], ...] = ()
    held: tuple[tuple[Held, ...], ...] = ()
    moments: tuple[tuple[tuple[Held, ...], ...], ...] = ()
    unlike: tuple[tuple[Run, ...], ...] = ()
    round_s: float = 0.0
    moved_s: tuple[NDArray[np.float64], ...] = ()
    tied_s: tuple[tuple[int, int, float], ...] = ()

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"unknown schedule {self.schedule!r}; known: {', '.join(SCHEDULES)}")
        if self.stages < 1 or self.micro_batches < 1:
            raise ValueError("at least one stage and one micro-batch are needed")
        if not all(run.count > 0 and run.points for run in self.runs):
            raise ValueError("every run needs a block and a point")
        if not all(size > 0 for size in self.capacity_bytes):
            raise ValueError(f"capacities must be positive, not {self.capacity_bytes}")
        if len(self.capacity_bytes) != self.stages or len(self.send_s) not in (0, self.stages - 1):
            raise ValueError(
                f"{self.stages} stages need {self.stages} capacities and {self.stages - 1} sends, "
                f"not {len(self.capacity_bytes)} and {len(self.send_s)}"
            )
        if len(self.unlike) not in (0, self.stages):
            raise ValueError(f"{self.stages} stages need as many lists of runs, if they differ")

    @property
    def longest_run(self) -> int:
        """The run of most blocks; of equal ones the first."""
        return max(range(len(self.runs)), key=lambda r: self.runs[r].count)

    @property
    def block_runs(self) -> tuple[int, ...]:
        """The run of each block, in model order."""
        return _block_runs(tuple(run.count for run in self.runs))

    @property
    def virtual(self) -> int:
        """Stages per rank."""
        return self.stages // len(self.moments) if self.moments else 1

    def runs_at(self, stage: int) -> tuple[Run, ...]:
        """The runs on the device of a stage."""
        return self.unlike[stage] if self.unlike else self.runs

    @property
    def fastest_s(self) -> tuple[float, ...]:
        """Of a block of each run, at its fastest point."""
        return fastest_s(self.runs)

    def sends_s(self, stage: int) -> NDArray[np.float64]:
        """[a, b], or one for all: seconds per micro-batch that a stage of blocks a..b-1 spends on
        sends."""
        if self.moved_s:
            return self.moved_s[stage]
        return np.full((1, 1), self.exposed_send_s(stage))

    def send_of_s(self, stage: int, a: int, b: int) -> float:
        """Of one stage."""
        return float(self.moved_s[stage][a, b]) if self.moved_s else self.exposed_send_s(stage)

    def exposed_send_s(self, stage: int) -> float:
        """Seconds per micro-batch that a stage spends on sends to both its neighbours."""
        is_end = stage in (0, self.stages - 1)
        return sum(self.send_s[max(stage - 1, 0) : stage + 1]) + is_end * self.round_s

    def held_at(self, stage: int) -> tuple[Held, ...]:
        """What the stage holds at its fullest moments."""
        if self.held:
            return self.held[stage]
        return (Held(in_flight(stage, self.stages, self.micro_batches, self.schedule), 0),)

    def in_flight(self, stage: int) -> int:
        """Of how many micro-batches the stage holds something at its peak."""
        return max(held.forward + held.weight for held in self.held_at(stage))

    def held_bytes(self, stage: int, point: Point) -> float:
        """What a block at a point holds there at most, of all micro-batches."""
        return max(moment_bytes(held, point) for held in self.held_at(stage))


def moment_bytes(held: Held, point: Point) -> float:
    """What a block at a point holds of so many micro-batches."""
    return held.forward * point.saved_bytes + held.weight * point.pending_bytes


@dataclass(frozen=True, slots=True)
class Choice:
    """`count` blocks of run `run`, by its point `point` (both indices)."""

    run: int
    point: int
    count: int


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one device of a stage at its peak."""

    persistent_bytes: float
    saved_bytes: float
    transient_bytes: float

    @property
    def peak_bytes(self) -> float:
        """All parts together."""
        return self.persistent_bytes + self.saved_bytes + self.transient_bytes


Assignment = tuple[tuple[Choice, ...], ...]  # per stage, in model order


@dataclass(frozen=True, slots=True)
class StagePlan:
    """An assignment with its price. `tail_s`: exposed sync and optimizer of the slowest stage;
    `bound_s`: no plan is faster; `gap`: (step - bound) / step."""

    assignment: Assignment
    step_s: float
    bubble_s: float
    tail_s: float
    stage_times: tuple[StageTime, ...]
    stage_memory: tuple[StageMemory, ...]
    bound_s: float
    gap: float


def price(problem: StageProblem, assignment: Assignment, bound_s: float = 0.0) -> StagePlan:
    """What the assignment costs. It is taken as complete and in order; memory is not checked."""
    ends = [0, *accumulate(sum(c.count for c in stage) for stage in assignment)]
    times = tuple(
        stage_time(problem, s, choices, problem.send_of_s(s, *ends[s : s + 2]))
        for s, choices in enumerate(assignment)
    )
    tail_s = max(
        sum(c.count * (runs[c.run].sync_s + runs[c.run].optimizer_s) for c in stage)
        for runs, stage in ((problem.runs_at(s), stage) for s, stage in enumerate(assignment))
    )
    weight_s = weights_s(problem, assignment)
    shape = problem.micro_batches, problem.schedule, problem.virtual
    step_s = pipeline_step_s(times, *shape, weight_s=weight_s) + tail_s
    bound_s = min(bound_s, step_s)
    return StagePlan(
        assignment=assignment,
        step_s=step_s,
        bubble_s=bubble_s(times, *shape, weight_s=weight_s),
        tail_s=tail_s,
        stage_times=times,
        stage_memory=tuple(stage_memory(problem, s, st) for s, st in enumerate(assignment)),
        bound_s=bound_s,
        gap=(step_s - bound_s) / step_s if step_s else 0.0,
    )


def counted_points(
    problem: StageProblem, stage: int, choices: Sequence[Choice]
) -> list[tuple[Point, int]]:
    """The points of choices on a stage, each with its number of blocks."""
    runs = problem.runs_at(stage)
    return [(runs[c.run].points[c.point], c.count) for c in choices]


def stage_time(
    problem: StageProblem, stage: int, choices: Sequence[Choice], send_s: float
) -> StageTime:
    """Seconds of forward and backward of one micro-batch; the sends are half in each."""
    points = counted_points(problem, stage, choices)
    return (
        sum(count * point.forward_s for point, count in points) + send_s / 2,
        sum(count * point.backward_s for point, count in points) + send_s / 2,
    )


def weights_s(problem: StageProblem, assignment: Assignment) -> tuple[float, ...]:
    """Per stage the weights' half of one micro-batch's backward."""
    return tuple(
        sum(count * point.weight_s for point, count in counted_points(problem, stage, choices))
        for stage, choices in enumerate(assignment)
    )


def stage_memory(problem: StageProblem, stage: int, choices: Sequence[Choice]) -> StageMemory:
    """Bytes at the peak: one block runs at a time, so transient bytes do not add up."""
    points = counted_points(problem, stage, choices)
    present = {choice.run for choice in choices}
    copies = sum(size for i, j, size in problem.tied if j in present and i not in present)
    return StageMemory(
        persistent_bytes=sum(n * point.persistent_bytes for point, n in points) + copies,
        saved_bytes=sum(count * problem.held_bytes(stage, point) for point, count in points),
        transient_bytes=max((point.transient_bytes for point, _ in points), default=0.0),
    )
